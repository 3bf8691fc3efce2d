"""Does a split job train like one process? Loss, gradient norm and every updated parameter, in fp64 (or bf16) with SGD.

A tiny model of the plan's kind, split as the plan is, is compared with one process of another model (``serial_model``) before
anything is timed. SGD, because Adam hides a gradient that is scaled wrongly.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.lab.reference.split import Split, Stage
from planner.lab.run.serial_model import SerialModel
from planner.lab.run.serial_rounding import Rounding
from planner.lab.run.tensor_parallel import quantised_names
from planner.lab.run.training import Meshes, Run, initial, tokens
from planner.model import ModelSpec

TOLERANCE = 1e-12
"""Largest error of loss, norm and parameters in fp64, relative to the largest value of each parameter."""
STEPS = 2
SCALARS = 5.0
"""Losses and norms of a bf16 run may be off by so many times what they round in one process."""
LEAST_ROUNDING = (2.0**-11, 2.0**-9)
"""Of losses and norms in bf16, relative: two steps can round to nearly nothing by chance. Seen: 0.2 to 5e-4 and 1 to 6e-3."""
NO_UPDATE = 1e-6
"""Update of a parameter, over the usual one, below which its gradient is 0 but for rounding (fp64 rounds at 1e-16)."""


def serial(split: Split, rounded: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms, and the updated parameters of the job by one process, of a model that shares no code with the split one.

    In fp64, from the weights that the split job starts with; ``rounded``: as mixed precision does it, fp32 weights and
    gradients, passes in bf16.
    """
    drawn, kept = torch.float64 if split.precision == "fp64" else torch.float32, torch.float32 if rounded else torch.float64
    alone = SerialModel(split.model, lambda name, shape: initial(name, shape, drawn).to(kept), rounded, _eight_bits(split))
    scalars = alone.train([tokens(split, step) for step in range(STEPS)], split.learning_rate, split.clip)
    return scalars, {name: one.detach() for name, one in alone.weights.items()}


def _eight_bits(split: Split) -> tuple[Rounding, frozenset[str]] | None:
    """Scales are of the tokens of one microbatch, of which a context-parallel rank has its chunks r and 2 c - 1 - r."""
    if not split.linear:
        return None
    block = split.scale_block or {"mxfp8": 32}.get(split.linear, 128)
    numbers = torch.arange(split.global_batch_size * split.sequence_length)
    passes = numbers.view(-1, split.micro_batch_size, 2 * split.cp, split.sequence_length // (2 * split.cp))
    groups = tuple(one[:, [r, 2 * split.cp - 1 - r]].flatten() for one in passes for r in range(split.cp))
    return Rounding(split.linear, block, groups), frozenset(name for name, _ in quantised_names(split))


OfRank = tuple[list[float], dict[str, Any], set[str]]
"""Losses and norms; by name the number of the first row and the rows of a parameter; in which types gradients were summed."""


def of_rank(split: Split, device: torch.device | None = None, meshes: Meshes | None = None) -> OfRank:
    """Trains; what this rank has of the parameters afterwards, experts by the number of the first."""
    run = Run(split, device or torch.device("cpu"), meshes).allocate()
    scalars, sums = [], GradientSums()
    run.gradients = sums.around(run.gradients)  # type: ignore[method-assign]
    for step in range(STEPS):
        loss, norm = run.step(*run.data(step))
        scalars += [run.total_loss(loss), float(norm)]
    found: dict[str, Any] = {}
    for name, parameter, number in run.parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = ((number or 0) * value.shape[0], value.cpu().numpy())
    return scalars, found, sums.types


class GradientSums(TorchDispatchMode):
    """Types of what data parallelism sums over ranks in the passes: its collectives are c10d's own, all others functional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname in ("_reduce_scatter_base_", "allreduce_"):
            tensors = (one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor))
            self.types |= {str(one.dtype).removeprefix("torch.") for one in tensors}
        return func(*args, **(kwargs or {}))

    def around(self, passes: Callable[..., Any]) -> Callable[..., Any]:
        """The same passes, looked at."""

        def run(*arguments: Any) -> Any:
            with self:
                return passes(*arguments)

        return run


def among_ranks(split: Split, device: torch.device, meshes: Meshes) -> dict[str, Any]:
    """The same inside of a running job, by all its ranks, each of which trains the one-process run for itself."""
    truth = Truth(split)
    mine = truth.differences(of_rank(split, device, meshes))
    every: list[Any] = [None] * split.world
    dist.all_gather_object(every, mine)
    return truth.judged(every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differences:
    """What one rank has, against one process."""

    parameters: float
    """Largest error of a parameter."""
    scalars: tuple[float, ...]
    """Of each loss and norm."""
    rows: tuple[tuple[str, int, int], ...]
    """Which rows of which parameters: name, first, behind the last."""
    wrong: tuple[str, ...]
    """What cannot be compared or is of another type, a sentence each."""


class Truth:
    """The one-process run of a split, and how far from it a split run may be.

    fp64: ``TOLERANCE``, each parameter relative to its largest value. bf16: what is compared is the update of each parameter
    (trained less initial, Euclidean norm of the error over that of the update), and rounding itself sets the measure: a
    one-process run whose passes are in bf16 is off from fp64 by some error r in its worst parameter; the split run rounds as
    often and in another order, so the two errors are alike and independent, and 2 r is allowed. A gradient that is lost,
    doubled or not summed is off by 0.3 to 1. Parameters without a gradient but for rounding (the bias of keys, which softmax
    does not see) are measured against the update that is usual, the root of the mean square over all parameters. Losses and norms
    round much less than single parameters: each kind is held to ``SCALARS`` times its own rounding. That gradients are summed in
    fp32 is no matter of size (one rounding more is far below r): the type of the sums is looked at.
    """

    def __init__(self, split: Split) -> None:
        self.split, (self.scalars, self.expected) = split, serial(split)
        self.tolerance, self.usual, self.allowed = TOLERANCE, 0.0, (TOLERANCE, TOLERANCE)
        if split.precision == "bf16":
            moved = [one - initial(name, tuple(one.shape), torch.float32).double() for name, one in self.expected.items()]
            self.usual = math.sqrt(sum(float(one.square().sum()) for one in moved) / sum(one.numel() for one in moved))
            scalars, rough = serial(split, rounded=True)
            self.tolerance = 2.0 * max(self.error(name, one, 0) for name, one in rough.items())
            errors = self.scalar_errors(scalars)
            loss, norm = (max(*errors[kind::2], least) for kind, least in enumerate(LEAST_ROUNDING))
            self.allowed = SCALARS * loss, SCALARS * norm

    def scalar_errors(self, scalars: Sequence[float]) -> tuple[float, ...]:
        """Of each loss and norm, relative."""
        errors = (abs(got - want) / abs(want) for got, want in zip(scalars, self.scalars, strict=True))
        return tuple(one if math.isfinite(one) else math.inf for one in errors)

    def error(self, name: str, value: torch.Tensor, first: int) -> float:
        """Of some rows of a parameter that both runs have."""
        whole = self.expected[name]
        want, value = whole[first : first + len(value)], value.double()
        if self.split.precision == "bf16":
            start = initial(name, tuple(whole.shape), torch.float32).double()[first : first + len(value)]
            update, usual = float((want - start).norm()), self.usual * math.sqrt(want.numel())
            error = float((value - want).norm()) / (update if update > NO_UPDATE * usual else usual)
        else:
            error = float((value - want).abs().max() / whole.abs().max())
        return error if math.isfinite(error) else math.inf

    def differences(self, found: OfRank) -> Differences:
        """Errors of what one rank has."""
        scalars, parameters, types = found
        worst, rows, wrong = 0.0, [], []
        for name, (first, value) in parameters.items():
            if name not in self.expected:
                wrong.append(f"{name} is a parameter of the split model and not of one process: is a weight meant to be shared?")
                continue
            want = tuple(self.expected[name][first : first + len(value)].shape)
            if want != value.shape:
                wrong.append(f"{name} has the shape {tuple(value.shape)} instead of {want}")
                continue
            worst = max(worst, self.error(name, torch.from_numpy(value), first))
            rows.append((name, first, first + len(value)))
        wide = "float64" if self.split.precision == "fp64" else "float32"
        wrong += [f"gradients are summed over ranks in {one} instead of {wide}" for one in sorted(types - {wide})]
        return Differences(parameters=worst, scalars=self.scalar_errors(scalars), rows=tuple(rows), wrong=tuple(wrong))

    def judged(self, every: Sequence[Differences]) -> dict[str, Any]:
        """All ranks together; ``why`` they are not equal, in words."""
        wrong = list(dict.fromkeys(sentence for one in every for sentence in one.wrong))
        places = {(name, row) for one in every for name, first, end in one.rows for row in range(first, end)}
        count = sum(len(value) for value in self.expected.values())
        if len(places) != count:
            wrong.append(f"{len(places)} rows of parameters came back, {count} were trained")
        worst = max(one.parameters for one in every)
        loss, norm = (max(error for one in every for error in one.scalars[kind::2]) for kind in (0, 1))
        named = (("parameters", worst, self.tolerance), ("losses", loss, self.allowed[0]),
                 ("norms of the gradient", norm, self.allowed[1]))  # fmt: skip
        wrong += [
            f"error of {what} {error:.1e} in {self.split.precision}, {allowed:.1g} is allowed"
            for what, error, allowed in named if not error <= allowed
        ]  # fmt: skip
        return {
            "parameters": len(self.expected), "values": sum(one.numel() for one in self.expected.values()),
            "parameter_error": worst, "loss_error": loss, "norm_error": norm, "tolerance": self.tolerance,
            "loss_tolerance": self.allowed[0], "norm_tolerance": self.allowed[1], "equal": not wrong,
            "why": "; ".join(wrong), "precision": " and ".join(filter(None, (self.split.precision, self.split.linear))),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the tiny model

WIDTH = 8
"""Of a head."""


def tiny_of(split: Split, precision: str = "fp64") -> Split:
    """The same degrees, schedule, sharding, recompute and kind of layers; one small layer per stage (three of a single
    stage), two sequences at most per microbatch, as many microbatches as the schedule needs to reach its steady state:
    interleaved schedules want a multiple of p, V-shaped ones at least 2 p."""
    each = 3 if len(split.stages) == 1 else 1
    counts = [min(len(stage.layers), each) for stage in split.stages]
    ends = zip(split.stages, counts, itertools.accumulate(counts), strict=True)
    return dataclasses.replace(
        split, model=_model(split, sum(counts)), sequence_length=8 * split.cp * split.tp,
        micro_batch_size=min(split.micro_batch_size, 2),
        num_microbatches=min(split.num_microbatches, 2 if split.pp == 1 else 2 * split.pp),
        stages=tuple(Stage(rank=stage.rank, layers=tuple(range(end - count, end))) for stage, count, end in ends),
        precision=precision, optimizer="sgd", balanced=False, clip=0.5, learning_rate=0.1, scale_block=WIDTH,
    )  # fmt: skip


def precisions(split: Split) -> tuple[str, ...]:
    """In which precisions the tiny model is compared: fp64, and bf16 where the plan's passes are.

    Not with experts: rounding changes which one a token goes to, and a different expert is no error.
    """
    return ("fp64", "bf16") if split.precision == "bf16" and not split.model.is_moe else ("fp64",)


def _model(split: Split, layers: int) -> ModelSpec:
    """Sizes that the degrees divide, and the same relations between them."""
    model, wide = split.model, max(split.tp, 2)
    heads = 2 * wide
    sizes: dict[str, Any] = {
        "name": f"tiny {model.name}", "num_layers": layers, "hidden_size": WIDTH * heads, "num_heads": heads,
        "num_kv_heads": wide if model.num_kv_heads < model.num_heads and not model.is_mla else heads, "head_dim": WIDTH,
        "ffn_size": 24 * wide, "vocab_size": 32 * wide, "max_sequence_length": 8 * split.cp * split.tp,
        "num_position_embeddings": 8 * split.cp * split.tp if model.position == "learned" else 0,
        "published_parameters": 0.0, "published_active_parameters": 0.0,
    }  # fmt: skip
    if model.is_mla:
        sizes |= {
            "head_dim": 12, "q_lora_rank": 16 if model.q_lora_rank else 0, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8,
        }  # fmt: skip
    if model.is_moe:
        sizes |= _experts(split, layers)
    return dataclasses.replace(model, **sizes)


def _experts(split: Split, layers: int) -> dict[str, Any]:
    """As many experts per rank as there are, at most two; more ranks than experts stay that. Dense layers first, as there."""
    model = split.model
    shards = split.dp_shard * split.cp * split.tp // split.ep
    here = min(model.num_experts // split.ep, 2)
    if shards * split.ep <= model.num_experts:
        here = max(here, shards)  # experts are shared out whole
    number = max(split.ep * here, split.ep * -(-2 // split.ep))
    return {
        "num_experts": number, "top_k": min(model.top_k, number, 2), "expert_ffn_size": 24 * max(shards, 1),
        "num_dense_layers": 1 if model.num_dense_layers and layers > 1 else 0,
        "moe_layer_interval": model.moe_layer_interval if model.moe_layer_interval < layers else 1,
        "shared_expert_ffn_size": 24 * max(split.tp, 2) if model.shared_expert_ffn_size else 0,
    }  # fmt: skip

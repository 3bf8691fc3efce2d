"""Does a split job train like one process? Loss, gradient norm and every updated parameter, in fp64 (or bf16) with SGD.

``python -m planner.lab.run.parity`` runs the whole table of combinations on CPU processes of this machine, ``--subset``
the part of it that the tests run, ``--json`` for programs. SGD, because Adam hides a gradient that is scaled wrongly.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from planner.errors import PlannerError
from planner.lab.reference.routed_experts import Experts
from planner.lab.reference.split import SCHEDULES, Split, Stage, deal
from planner.lab.reference.transformer import Part, Place
from planner.lab.run.forked_ranks import run_ranks
from planner.lab.run.parallel import Meshes
from planner.lab.run.training import Run, initial, locate, tokens
from planner.layout import Layout
from planner.model import ModelSpec

TOLERANCE = 1e-12
"""Largest error of loss, norm and parameters in fp64, relative to the largest value of each parameter."""
STEPS = 2
NO_UPDATE = 1e-6
"""Update of a parameter, over the usual one, below which its gradient is 0 but for rounding (fp64 rounds at 1e-16)."""


def tiny(**changes: Any) -> ModelSpec:
    """A small Llama with changes."""
    sizes: dict[str, Any] = {
        "name": "tiny", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_size": 48,
        "vocab_size": 64, "max_sequence_length": 64,
    }  # fmt: skip
    return ModelSpec(**sizes | changes)


EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 24}
MODELS: dict[str, ModelSpec] = {
    "llama": tiny(),
    "gqa": tiny(num_kv_heads=2, qkv_bias=True),
    "qwen": tiny(num_kv_heads=2, qk_norm=True),
    "tied": tiny(tied_embeddings=True),
    "gpt": tiny(gated=False, activation="gelu", norm="layernorm", position="learned", num_position_embeddings=64, linear_bias=True),
    "moe": tiny(**EXPERTS),
    "shared": tiny(**EXPERTS, num_shared_experts=1, shared_expert_ffn_size=24, num_dense_layers=1),
    "mla": tiny(head_dim=12, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
}  # fmt: skip


def combination(model: str, **fields: Any) -> Split:
    """A split of a small model; ``schedule`` by its number in Layout."""
    names = ("tp", "pp", "dp", "cp", "ep", "vpp", "schedule", "first_stage_layers", "last_stage_layers")
    layout = Layout(**{name: fields[name] for name in names if name in fields})
    return Split(**{
        "model": MODELS[model], "sequence_length": 16, "micro_batch_size": 1, "num_microbatches": 2, "precision": "fp64",
        "clip": 0.5, "dp_shard": int(layout.dp), "stages": deal(MODELS[model].num_layers, layout),
        **{name: value for name, value in fields.items() if name not in names},
        **{name: int(getattr(layout, name)) for name in ("tp", "pp", "dp", "cp", "ep")},
        "schedule": SCHEDULES[layout.schedule],  # type: ignore[index]
    })  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a run gave."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    """Updated parameters, whole, by name."""


def serial(split: Split, rounded: bool = False) -> Found:
    """The same job by one process: no groups, no sharding, plain torch operations.

    In fp64, from the weights that the split job starts with; ``rounded``: as mixed precision does it, fp32 weights and
    gradients, passes in bf16.
    """
    alone = dataclasses.replace(
        split, tp=1, pp=1, dp=1, cp=1, ep=1, dp_shard=1, fused=False, recompute="none",
        micro_batch_size=split.global_batch_size, num_microbatches=1, precision="fp32" if rounded else "fp64",
        stages=(Stage(rank=0, layers=tuple(range(split.model.num_layers))),),
    )  # fmt: skip
    before, drawn = torch.get_default_dtype(), torch.float64 if split.precision == "fp64" else torch.float32
    torch.set_default_dtype(torch.float32 if rounded else torch.float64)
    part = Part(alone, 0, locate(Place(), alone, 0, torch.device("cpu")))
    torch.set_default_dtype(before)
    if split.model.tied_embeddings:
        part.head.weight = part.embedding.weight  # type: ignore[union-attr]
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(initial(name, tuple(parameter.shape), drawn))
    optimizer, losses, norms = torch.optim.SGD(part.parameters(), lr=split.learning_rate, momentum=0.9), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = tokens(alone, step)
        halves = {name: one.bfloat16() for name, one in part.named_parameters()} if rounded else {}
        logits = torch.func.functional_call(part, halves, (batch[:, :-1],)) if rounded else part(batch[:, :-1])
        wide = logits.float() if rounded else logits
        loss = functional.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(part.parameters(), split.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Found(losses, norms, {name: one.detach() for name, one in part.named_parameters()})


OfRank = tuple[list[float], list[float], dict[str, Any]]
"""Losses, norms, and by name the number of the first row and the rows of a parameter."""


def of_rank(split: Split, device: torch.device | None = None, meshes: Meshes | None = None) -> OfRank:
    """Trains; what this rank has of the parameters afterwards, experts by the number of the first."""
    run = Run(split, device or torch.device("cpu"), meshes).allocate()
    losses, norms = [], []
    for step in range(STEPS):
        loss, norm = run.step(*run.data(step))
        losses.append(run.total_loss(loss))
        norms.append(float(norm))
    found: dict[str, Any] = {}
    for part in run.parts:
        experts = {id(p) for m in part.modules() if isinstance(m, Experts) for p in m.parameters()}
        for name, parameter in part.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            first = 0
            if id(parameter) in experts and run.meshes.experts is not None:
                first = run.meshes.experts.get_local_rank("ep") * value.shape[0]
            found[name] = (first, value.cpu().numpy())
    return losses, norms, found


def compare(split: Split) -> dict[str, Any]:
    """Both runs of one combination and their largest differences."""
    truth = Truth(split)
    ranks = run_ranks(of_rank, split.world, split)
    return truth.judged([truth.differences(one) for one in ranks])


def among_ranks(split: Split, device: torch.device, meshes: Meshes) -> dict[str, Any]:
    """The same inside of a running job, by all its ranks, each of which trains the one-process run for itself."""
    truth = Truth(split)
    mine = truth.differences(of_rank(split, device, meshes))
    every: list[Any] = [None] * split.world
    dist.all_gather_object(every, mine)
    return truth.judged(every)


Differences = tuple[float, float, list[tuple[str, int, int]]]
"""Of parameters, of losses and norms, and which rows of which parameters: name, first, behind the last."""


class Truth:
    """The one-process run of a split, and how far from it a split run may be.

    fp64: ``TOLERANCE``, each parameter relative to its largest value. bf16: what is compared is the update of each parameter
    (trained less initial, Euclidean norm of the error over that of the update), and rounding itself sets the measure: a
    one-process run whose passes are in bf16 is off from fp64 by some error r in its worst parameter; the split run rounds as
    often and in another order, so the two errors are alike and independent, and 2 r is allowed. A gradient that is lost,
    doubled or not summed is off by 0.3 to 1. Parameters without a gradient but for rounding (the bias of keys, which softmax
    does not see) are measured against the update that is usual, the root of the mean square over all parameters.
    """

    def __init__(self, split: Split) -> None:
        self.split, self.expected = split, serial(split)
        self.tolerance, self.usual = TOLERANCE, 0.0
        if split.precision == "bf16":
            moved = [
                one - initial(name, tuple(one.shape), torch.float32).double()
                for name, one in self.expected.parameters.items()
            ]
            self.usual = math.sqrt(sum(float(one.square().sum()) for one in moved) / sum(one.numel() for one in moved))
            rough = serial(split, rounded=True)
            self.tolerance = 2.0 * max(self.error(name, one, 0) for name, one in rough.parameters.items())

    def error(self, name: str, value: torch.Tensor, first: int) -> float:
        """Of some rows of a parameter."""
        whole = self.expected.parameters[name]
        want, value = whole[first : first + len(value)], value.double()
        if want.shape != value.shape:
            raise PlannerError(f"{name}: {tuple(value.shape)} instead of {tuple(want.shape)}")
        if self.split.precision == "bf16":
            start = initial(name, tuple(whole.shape), torch.float32).double()[first : first + len(value)]
            update, usual = float((want - start).norm()), self.usual * math.sqrt(want.numel())
            error = float((value - want).norm()) / (update if update > NO_UPDATE * usual else usual)
        else:
            error = float((value - want).abs().max() / whole.abs().max())
        return error if math.isfinite(error) else math.inf

    def differences(self, found: OfRank) -> Differences:
        """Largest errors of what one rank has."""
        losses, norms, parameters = found
        worst, rows = 0.0, []
        for name, (first, value) in parameters.items():
            worst = max(worst, self.error(name, torch.from_numpy(value), first))
            rows.append((name, first, first + len(value)))
        pairs = [*zip(losses, self.expected.losses, strict=True), *zip(norms, self.expected.norms, strict=True)]
        scalars = [abs(got - want) / abs(want) for got, want in pairs]
        return worst, max(one if math.isfinite(one) else math.inf for one in scalars), rows

    def judged(self, every: Sequence[Differences]) -> dict[str, Any]:
        """All ranks together. Raises PlannerError where parameters are missing."""
        expected = self.expected.parameters
        places = {(name, row) for _, _, rows in every for name, first, end in rows for row in range(first, end)}
        count = sum(len(value) for value in expected.values())
        if len(places) != count:
            raise PlannerError(f"{len(places)} rows of parameters came back, {count} were trained")
        worst, scalars = max(one[0] for one in every), max(one[1] for one in every)
        return {
            "parameters": len(expected), "values": sum(one.numel() for one in expected.values()),
            "parameter_error": worst, "loss_and_norm_error": scalars, "equal": max(worst, scalars) <= self.tolerance,
            "tolerance": self.tolerance, "precision": self.split.precision,
        }  # fmt: skip


GPIPE, INTERLEAVED, ZB, ZBV, DUALPIPE = 0, 2, 3, 4, 5
TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    # tensor parallelism, alone and with replicas and shards
    ("llama", {"tp": 2}),
    ("gqa", {"tp": 2, "fused": True}),
    ("qwen", {"tp": 2, "recompute": "selective"}),
    ("llama", {"tp": 4, "fused": True, "recompute": "full"}),
    ("gpt", {"tp": 2, "dp": 2, "zero": 2}),
    ("tied", {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"}),
    ("llama", {"tp": 2, "dp": 2, "zero": 0}),
    ("llama", {"tp": 2, "dp": 4, "dp_shard": 2, "zero": 3, "fused": True}),
    # data parallelism: every level of sharding, HSDP, accumulation
    ("llama", {"dp": 2, "zero": 0, "num_microbatches": 3}),
    ("llama", {"dp": 2, "zero": 1, "num_microbatches": 3, "fused": True}),
    ("tied", {"dp": 2, "zero": 2, "num_microbatches": 3}),
    ("gqa", {"dp": 2, "zero": 3, "num_microbatches": 3, "micro_batch_size": 2, "recompute": "selective"}),
    ("gpt", {"dp": 4, "zero": 3, "recompute": "full"}),
    ("llama", {"dp": 4, "dp_shard": 2, "zero": 2}),
    ("llama", {"dp": 4, "dp_shard": 2, "zero": 1, "num_microbatches": 3}),
    ("llama", {"dp": 8, "dp_shard": 4, "zero": 3, "fused": True}),
    # pipelines: every schedule, with shards and recompute
    ("llama", {"pp": 2, "schedule": GPIPE, "num_microbatches": 4}),
    ("llama", {"pp": 2, "num_microbatches": 4, "fused": True}),
    ("llama", {"pp": 4, "num_microbatches": 6, "recompute": "full"}),
    ("llama", {"pp": 2, "first_stage_layers": 1, "num_microbatches": 3}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": INTERLEAVED, "num_microbatches": 4}),
    ("gqa", {"pp": 2, "schedule": ZB, "num_microbatches": 4}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": ZBV, "num_microbatches": 4}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": DUALPIPE, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 3, "num_microbatches": 4, "recompute": "full"}),
    ("llama", {"pp": 2, "dp": 2, "zero": 0, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "schedule": GPIPE, "num_microbatches": 3}),
    ("llama", {"pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": INTERLEAVED, "num_microbatches": 4, "recompute": "selective"}),
    ("llama", {"pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": ZBV, "num_microbatches": 4, "fused": True}),
    ("llama", {"pp": 2, "dp": 4, "dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    # tensor parallelism in a pipeline
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4}),
    ("gqa", {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "fused": True, "recompute": "full"}),
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "zero": 0, "num_microbatches": 3}),
    ("llama", {"tp": 2, "pp": 2, "vpp": 2, "schedule": ZBV, "num_microbatches": 4, "fused": True}),
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": INTERLEAVED, "num_microbatches": 4}),
    ("gqa", {"tp": 2, "pp": 4, "num_microbatches": 4}),
    # context parallelism
    ("llama", {"cp": 2}),
    ("gqa", {"cp": 4, "fused": True, "recompute": "full"}),
    ("gqa", {"cp": 2, "dp": 2, "zero": 3, "recompute": "selective"}),
    ("qwen", {"cp": 2, "tp": 2, "fused": True}),
    ("gpt", {"cp": 2, "tp": 2, "dp": 2, "zero": 2}),
    ("llama", {"cp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3}),
    ("llama", {"cp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "fused": True}),
    # experts
    ("moe", {"dp": 2, "zero": 2}),
    ("moe", {"ep": 2, "dp": 2, "zero": 3, "fused": True}),
    ("shared", {"ep": 4, "dp": 4, "zero": 2, "recompute": "full"}),
    ("moe", {"ep": 2, "dp": 4, "zero": 3, "num_microbatches": 3}),
    ("moe", {"ep": 2, "dp": 4, "dp_shard": 2, "zero": 2}),
    ("shared", {"ep": 4, "tp": 2, "dp": 2, "zero": 3, "fused": True}),
    ("moe", {"ep": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3}),
    ("moe", {"ep": 4, "cp": 2, "tp": 2, "fused": True}),
    ("shared", {"ep": 8, "cp": 2, "dp": 2, "tp": 2, "zero": 2}),
    ("moe", {"ep": 2, "dp": 8, "zero": 3}),
    # latent attention
    ("mla", {"dp": 2, "zero": 3}),
    ("mla", {"tp": 2, "dp": 2, "zero": 2, "fused": True}),
    ("mla", {"tp": 2, "cp": 2, "fused": True, "recompute": "full"}),
    # passes in bf16, see Truth
    ("gqa", {"tp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "precision": "bf16", "fused": True}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4, "precision": "bf16"}),
    ("qwen", {"cp": 2, "dp": 2, "zero": 1, "precision": "bf16", "recompute": "full"}),
)  # fmt: skip
"""Combinations up to 8 processes: model of MODELS and what differs from one process."""
SUBSET = (1, 9, 11, 13, 20, 21, 22, 29, 31, 42, 44, 45, 51, 55, 57)
"""Rows of TABLE that the tests run."""


def describe(fields: dict[str, Any]) -> str:
    """A combination in words."""
    from planner.layout import NAMES

    words = {**fields, **({"schedule": NAMES["schedule"][fields["schedule"]]} if "schedule" in fields else {})}
    return " ".join(f"{name} {value}" if value is not True else name for name, value in words.items())


def main(arguments: list[str] | None = None) -> int:
    """The table; 1 when a combination differs or fails."""
    parser = argparse.ArgumentParser(prog="python -m planner.lab.run.parity", description=__doc__.split("\n\n")[0])
    parser.add_argument("--subset", action="store_true", help="only what the tests run")
    parser.add_argument("--row", type=int, action="append", help="only this row, from 0; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = options.row or (SUBSET if options.subset else range(len(TABLE)))
    failed = 0
    for row in rows:
        name, fields = TABLE[row]
        started = time.perf_counter()
        try:
            found = compare(combination(name, **fields))
        except PlannerError as error:
            found = {"equal": False, "error": str(error)}
        failed += not found["equal"]
        found = {
            "row": row,
            "model": name,
            "split": describe(fields),
            "seconds": round(time.perf_counter() - started, 1),
        } | found
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            result = found.get("error") or (
                f"{found['parameters']} parameters, {found['values']} values: error {found['parameter_error']:.1e}, "
                f"loss and norm {found['loss_and_norm_error']:.1e}"
            )
            verdict = "equal" if found["equal"] else "WRONG"
            print(f"{row:3} {name:7} {found['split']:80} {found['seconds']:5.1f} s  {verdict}  {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

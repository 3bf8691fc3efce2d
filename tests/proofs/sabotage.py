"""Changes that make a split job train wrongly, one at a time, each found by the comparison with one process:
``python -m tests.proofs.sabotage``, two ranks of this machine's CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from planner.lab.reference import eight_bits, flash_attention, fused_operators, transformer, virtual_stage
from planner.lab.reference.split import Split
from planner.lab.run import tensor_parallel, training
from planner.lab.run.parity import Truth, of_rank
from tests.proofs.forked_ranks import run_ranks
from tests.proofs.parity import combination

Patch = tuple[Any, str, Any]
"""Owner, attribute and what it becomes."""


def _loss(factor: Callable[[int], float]) -> list[Patch]:
    """Each call's loss times a factor by its number."""
    original, calls = training.Run.loss, iter(range(10**6))
    return [(training.Run, "loss", lambda self, *given: original(self, *given) * factor(next(calls)))]


def _own_chunk(_self: Any, *, output_tensor: Any, input_tensor: Any, group: Any, **_: Any) -> None:
    output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _whole(alone: Callable[[Any], bool]) -> list[Patch]:
    """Weights whose gradient is not summed over the tensor-parallel ranks."""
    original = transformer.whole
    return [
        (transformer, "whole", lambda w: w.to_local() if hasattr(w, "to_local") and alone(w) else original(w)),
    ]


def _divided() -> list[Patch]:
    original = training.get_schedule_class

    def found(name: str) -> Any:
        kind = original(name)

        class Divides(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named | {"scale_grads": True})

        return Divides

    return [(training, "get_schedule_class", found)]


def _norm_of_a_stage() -> list[Patch]:
    original = training.Run.clip

    def clip(self: Any) -> Any:
        with patched([(dist, "all_reduce", lambda *_, **__: None)]):
            return original(self)

    return [(training.Run, "clip", clip)]


def _twice() -> list[Patch]:
    original = FSDPModule.set_gradient_divide_factor
    return [(FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, factor / 2.0))]


def _largest() -> list[Patch]:
    original = fused_operators.collectives.reduce_scatter_tensor
    return [
        (fused_operators.collectives, "reduce_scatter_tensor", lambda x, _, *given: original(x, "max", *given)),
    ]


def _positions() -> list[Patch]:
    original = training.angles
    return [(training, "angles", lambda positions, *given: original(torch.arange(len(positions)), *given))]


def _untied() -> list[Patch]:
    original = training.Run._part

    def part(self: Any, number: int) -> nn.Module:
        tied = self.split
        self.split = dataclasses.replace(tied, model=dataclasses.replace(tied.model, tied_embeddings=False))
        found = original(self, number)
        self.split = tied
        return found

    return [(training.Run, "_part", part)]


def _gate() -> list[Patch]:
    original = transformer.Experts.forward
    return [(transformer.Experts, "forward", lambda self, x, gate, chosen: original(self, x, gate.detach(), chosen))]


def _no_mask() -> list[Patch]:
    forward, backward = flash_attention._flash, flash_attention._flash_backward
    return [
        (flash_attention, "_flash", lambda q, k, v, _: forward(q, k, v, False)),
        (flash_attention, "_flash_backward", lambda gradient, saved, _: backward(gradient, saved, False)),
    ]


def _sums_in_bf16() -> list[Patch]:
    original = training.MixedPrecisionPolicy
    return [
        (training, "MixedPrecisionPolicy", lambda **named: original(**named | {"reduce_dtype": torch.bfloat16})),
    ]


def _other_gradients() -> list[Patch]:
    recipe = dataclasses.replace(tensor_parallel.RECIPES["fp8"], gradients=eight_bits.E4M3)
    return [(tensor_parallel, "RECIPES", {"fp8": recipe})]


def _wide_inputs() -> list[Patch]:
    def cast(self: Any, x: Any, axis: int) -> Any:
        return self.quantised(x, axis, self.recipe.tile, 1 if self.split == 1 else None, eight_bits.E5M2)

    return [(eight_bits.Shared, "input", cast)]


def _other_scale() -> list[Patch]:
    original = eight_bits.Shared.weight

    def weight(self: Any, w: Any, axis: int) -> Any:
        found = original(self, w, axis)
        return found._replace(scale=found.scale * 1.01)

    return [(eight_bits.Shared, "weight", weight)]


DP, PP, TP, CP = {"dp": 2, "num_microbatches": 3}, {"pp": 2, "num_microbatches": 4}, {"tp": 2}, {"cp": 2}
BF16: dict[str, Any] = {"dp": 2, "precision": "bf16"}
FP8: dict[str, Any] = {"tp": 2, "linear": "fp8"}
EP: dict[str, Any] = {"tp": 2, "ep": 2}
SABOTAGE: tuple[tuple[str, Callable[[], list[Patch]], str, dict[str, Any], str], ...] = (
    ("no gradient sync over dp", lambda: [(_fsdp_collectives.DefaultReduceScatter, "__call__", _own_chunk)],
     "llama", DP, "parameters"),
    ("loss x 2", lambda: _loss(lambda _: 2.0), "llama", DP, "losses"),
    ("last microbatch x 1.001", lambda: _loss(lambda n: 1.001 if n % 3 == 2 else 1.0), "llama", DP, "losses"),
    ("norm gradients not summed", lambda: _whole(lambda w: w.ndim == 1), "llama", TP, "parameters"),
    ("pipeline divides by m", _divided, "llama", PP, "parameters"),
    ("norm not summed over pp", _norm_of_a_stage, "llama", PP, "norms"),
    ("HSDP counts twice", _twice, "llama", {"dp": 2, "dp_shard": 1}, "norms"),
    ("cp takes the largest dK, dV", _largest, "gqa", CP, "parameters"),
    ("cp has the wrong positions", _positions, "gqa", CP, "losses"),
    ("router gradient not summed over tp", lambda: _whole(lambda w: w.ndim == 2), "moe", EP, "parameters"),
    ("embedding untied", _untied, "tied", DP, "head.weight is a parameter of the split model and not of one process"),
    ("router detached", _gate, "moe", EP, "parameters"),
    ("no causal mask", _no_mask, "llama", DP, "losses"),
    ("no causal mask with latent attention", _no_mask, "mla", TP, "losses"),
    ("bf16 loss x 1.03", lambda: _loss(lambda _: 1.03), "llama", BF16, "losses"),
    ("bf16 gradients summed in bf16", _sums_in_bf16, "llama", BF16, "gradients are summed over ranks in bfloat16"),
    ("embedding of prediction modules not summed over pp", lambda: [(training.Run, "_add_copies", lambda self: None)],
     "later", PP, "parameters"),
    ("loss of prediction modules x 2", lambda: [(virtual_stage, "LATER_LOSS", 2.0 * virtual_stage.LATER_LOSS)],
     "later", PP, "losses"),
    ("fp8 scales of each rank's own largest values", lambda: [(eight_bits.Shared, "over_ranks", lambda *_: False)],
     "llama", FP8, "parameters"),
    ("fp8 scales per row of each rank's own", lambda: [(eight_bits.Shared, "over_ranks", lambda *_: False)],
     "llama", {"tp": 2, "linear": "fp8_row"}, "parameters"),
    ("fp8 gradients in e4m3", _other_gradients, "llama", FP8, "parameters"),
    ("fp8 inputs in e5m2", _wide_inputs, "llama", FP8, "losses"),
    ("fp8 scale of weights x 1.01", _other_scale, "llama", FP8, "losses"),
)  # fmt: skip
"""What is wrong, how it is made so, the model of tests.proofs.parity and its split, and a word of the sentence that says it."""


@contextlib.contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Attributes that are others while it is entered."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def jobs() -> list[tuple[int | None, Split]]:
    """All sabotaged runs, and each split once as it is (None)."""
    splits = [combination(model, **fields) for _, _, model, fields, _ in SABOTAGE]
    return [*enumerate(splits), *((None, split) for split in dict.fromkeys(splits))]


def one_after_the_other() -> list[Any]:
    """What this rank has after each job: in one start of the processes."""
    found = []
    for number, split in jobs():
        with patched(SABOTAGE[number][1]() if number is not None else []):
            found.append(of_rank(split))
    return found


def rows() -> list[dict[str, Any]]:
    """Each job held against one process."""
    ranks = run_ranks(one_after_the_other, 2)
    found = []
    for at, (number, split) in enumerate(jobs()):
        truth = Truth(split)
        judged = truth.judged([truth.differences(rank[at]) for rank in ranks])
        what, expected = ("nothing", "") if number is None else (SABOTAGE[number][0], SABOTAGE[number][4])
        found.append({"sabotage": what, "model": split.model.name, "expected": expected, **judged})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    every = rows()
    for row in every:
        print(json.dumps(row), flush=True)
    sys.exit(any(row["equal"] != (row["sabotage"] == "nothing") for row in every))

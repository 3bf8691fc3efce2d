"""Memory without hardware: the rank's real modules, optimizer and step on fake tensors and a fake process group.

Everything has its full size, and nothing is allocated or computed. Optimizer states exist before the step that is measured,
as in every step but the first.  [torch: FakeTensorMode, FakeStore]
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.lab.reference.split import V_SHAPED, Split
from planner.lab.run.collective_recorder import Wires
from planner.lab.run.depth import Points, place
from planner.lab.run.memory_tracker import CATEGORIES, Witness
from planner.lab.run.training import Run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's step."""

    rank: int
    """Of all ranks."""
    stage: int
    """Its pipeline rank."""
    held: dict[str, int]
    """Most bytes of each category within the step, not all at one moment."""
    at_peak: dict[str, int]
    """Bytes of each category when most was allocated; they sum to the peak."""
    peak: int
    """Most bytes allocated at one moment."""
    parameters: int
    """Parameters of the rank before state sharding."""
    microbatches: int
    """That were run; see ``step_of``."""
    unseen_receive_bytes: int
    """Receive buffers of the microbatches that were not run, part of the peak and of temporary."""
    collectives: list[dict[str, Any]]
    """Operation, ranks of the group (how many, and from each to the next), bytes of the full buffer, times; of the
    microbatches that were run."""
    seconds: float
    """That it took."""
    layers_run: int = 0
    """Layers of the rank that were run; the rest is their straight line (depth.py)."""
    points: Points = dataclasses.field(default_factory=dict, repr=False)
    """Most bytes between two layers, by pass and microbatch (depth.py)."""


def step_of(split: Split) -> int:
    """Microbatches that show the peak: with more only the receive buffers of a pipeline grow, by the same for each.

    One rank accumulates from the second microbatch on; 1F1B and its kin have at most 2 p + 1 (interleaved: rounds of p)
    in flight; GPipe all.
    """
    count = split.num_microbatches
    if split.pp == 1:
        return min(count, 2)
    if split.schedule == "GPipe":
        return count
    if split.schedule == "1F1B":
        return min(count, split.pp + 1)
    if split.schedule == "Interleaved1F1B":
        rounds = max(1, count // split.pp)
        per_round = count // rounds
        return per_round * min(rounds, 3)
    return min(count, 2 * split.pp + 1)


def stage_ranks(split: Split) -> list[int]:
    """A rank of each pipeline stage that may have the highest peak: first, second and last."""
    size = split.world // split.pp
    return [stage * size for stage in sorted({0, min(1, split.pp - 1), split.pp - 1})]


def measure(
    split: Split, rank: int, progress: Callable[[str], None] = lambda _: None, *, real: bool = False
) -> Measured:
    """The step of one rank. ``real``: on the CPU, with memory and numbers.

    Once per process: torch remembers process groups by name that the next call would not have.
    """
    started = time.perf_counter()
    gc.collect()
    gc.disable()  # nothing here waits for it, and it would look at every fake tensor again and again
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    count = step_of(split)
    ran = dataclasses.replace(split, num_microbatches=count, balanced=True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=split.world)
    try:
        with ExitStack() as stack:
            stack.enter_context(RealMeshes())
            witness = Witness()
            stack.enter_context(witness.patches())
            made = Run(ran, torch.device("cpu"))  # before tensors are fake: shards of nothing are made quickly
            if not real:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(witness)
            run, wires = Emulated(made, witness, progress), Wires()
            run.warm()
            witness.start()
            witness.at("start")
            with wires:
                run.measured()
            witness.is_("gradients", run.gradient_tensors())
            witness.at(None)
            return measured_by(run, witness, wires, split, rank, time.perf_counter() - started)
    finally:
        gc.enable()
        dist.destroy_process_group()


def measured_by(run: Emulated, witness: Witness, wires: Wires, split: Split, rank: int, seconds: float) -> Measured:
    """What was seen of a rank's step, as if all microbatches of ``split`` had run."""
    unseen = (split.num_microbatches - run.split.num_microbatches) * run.receive_bytes()
    return Measured(
        rank=rank, stage=run.run.rank["pp"], held=_with(witness.largest, unseen), at_peak=_with(run.peak.parts, unseen),
        peak=run.peak.total + unseen, parameters=run.parameters, microbatches=run.split.num_microbatches,
        unseen_receive_bytes=unseen, collectives=_listed(wires), seconds=seconds,
        layers_run=sum(len(part.layers) for part in run.run.parts),
        points={key: (top + unseen, _with(parts, unseen), _with(most, unseen))
                for key, (top, parts, most) in witness.points.items()},
    )  # fmt: skip


def _with(parts: dict[str, int], unseen: int) -> dict[str, int]:
    return {**parts, "temporary": parts["temporary"] + unseen}


class Emulated:
    """The run of a rank whose neighbours do not exist."""

    def __init__(self, run: Run, witness: Witness, progress: Callable[[str], None]) -> None:
        self.split, self.run, self.witness, self.progress = run.split, run, witness, progress
        self.parameters = sum(p.numel() for part in run.parts for p in part.parameters())
        self._done = 0
        self._passes: dict[int, int] = {}
        run.allocate(fill=False)
        self.kept = [
            p for part in run.parts for p in part.parameters()
        ]  # shards: in a pass modules hold gathered weights
        witness.is_("weights", [p for part in self.run.parts for p in part.parameters()])
        self.hooks: list[Any] = []
        for number, part in zip(run.mine, run.parts, strict=True):
            self._passes[number] = 0
            self.hooks.append(part.register_forward_pre_hook(self._accumulated))
            self.hooks.append(part.register_forward_pre_hook(partial(self._begun, number)))
            for i, layer in enumerate(part.layers.values()):
                where = place(i, len(part.layers))
                self.hooks.append(layer.register_forward_pre_hook(partial(self._before, number, where)))
                self.hooks.append(layer.register_forward_hook(partial(self._after, number, where)))
                self.hooks.append(layer.register_forward_hook(self._tick))

    def _accumulated(self, *_: Any) -> None:
        """Gradients of the microbatches before this one."""
        self.witness.is_("gradients", self.gradient_tensors())

    def _begun(self, number: int, *_: Any) -> None:
        self._passes[number] += 1

    def _before(self, number: int, where: int | None, *_: Any) -> None:
        self.witness.at((number, self._passes[number], "forward", where))

    def _after(self, number: int, where: int | None, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        """Behind the last layer comes the head; its backward pass begins when the gradient of its output is there."""
        count = self._passes[number]
        if where == -1:
            self.witness.at((number, count, "behind", 0))
        output.register_hook(lambda _: self.witness.at((number, count, "backward", where)))

    def _tick(self, *_: Any) -> None:
        self._done += 1
        layers = sum(len(part.layers) for part in self.run.parts)
        self.progress(f"stage {self.run.rank['pp']}: {self._done} of {layers * self.split.num_microbatches} layers")

    def inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token numbers and targets of ``count`` microbatches, all zero."""
        shape = (count * self.split.micro_batch_size, self.split.sequence_length // self.split.cp)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)

    def warm(self) -> None:
        """Optimizer states, by an update with gradients of nothing."""
        for part, optimizer in zip(self.run.parts, self.run.optimizers, strict=True):
            for parameter in part.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            states = [
                one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)
            ]
            self.witness.is_("optimizer_states", states)
            optimizer.zero_grad()
        if self.run.schedule is not None:
            self.run.schedule._warmup_p2p = self._no_vote

    @staticmethod
    def _no_vote(stages: Any, *_: Any) -> None:
        for stage in stages if isinstance(stages, list) else [stages]:
            stage._inference_mode = InferenceMode.STATIC

    def measured(self) -> None:
        """The step: gradients are named when the passes are over, before clipping and the update."""
        self.run.gradients(*self.inputs(self.split.num_microbatches))
        before = self.witness.peak
        self.witness.is_("gradients", self.gradient_tensors())
        self.witness.at("update")
        self.run.clip()
        for optimizer in self.run.optimizers:
            optimizer.step()
        self.peak = self.witness.peak if self.witness.peak.total > before.total else before

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Of all parameters, as they are kept between the backward pass and the update."""
        return [p.grad for p in self.kept if p.grad is not None]

    def receive_bytes(self) -> int:
        """Receive buffers of one microbatch: activations from before, gradients from behind, for each virtual stage."""
        total = 0
        for number in self.run.mine:
            for there, shown in ((number > 0, number), (number < len(self.split.stages) - 1, number + 1)):
                neighbour = self.split.stages[number - 1 if shown == number else number + 1].rank if there else -1
                same = neighbour == self.run.rank["pp"] and self.split.schedule in V_SHAPED
                if there and not same and self.split.pp > 1:
                    example, _ = self.run.examples(shown)
                    total += example.numel() * example.element_size()
        return total


class RealMeshes(ExitStack):
    """Meshes are joined with real tensors, also under fake ones."""

    def __enter__(self) -> RealMeshes:
        original = DeviceMesh._concatenate

        def joined(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return original(*arguments)

        DeviceMesh._concatenate = staticmethod(joined)
        self.callback(setattr, DeviceMesh, "_concatenate", staticmethod(original))
        super().__enter__()
        return self


def _listed(wires: Wires) -> list[dict[str, Any]]:
    found = []
    for (operation, ranks, size), times in sorted(wires.found.items()):
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        found.append({"operation": operation, "ranks": len(ranks), "stride": stride, "bytes": size, "times": times})
    return found


__all__ = ["CATEGORIES", "Emulated", "Measured", "measure", "measured_by", "stage_ranks", "step_of"]

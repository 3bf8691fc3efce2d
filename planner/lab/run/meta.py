"""Level meta: memory without hardware. The rank's real modules, optimizer and step on fake tensors and a fake process group.

Everything has its full size, and nothing is allocated or computed. Optimizer states exist before the step that is measured,
as in every step but the first.  [torch: FakeTensorMode, FakeStore]
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
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

from planner.errors import PlannerError
from planner.lab.reference.split import V_SHAPED, Split
from planner.lab.run.comparison import tracked_rank
from planner.lab.run.depth import Points, beyond, depths, place
from planner.lab.run.levels import Say, Task, kills
from planner.lab.run.memory_tracker import CollectiveRecorder, MemoryTracker, optimizer_states
from planner.lab.run.plan_question import Question
from planner.lab.run.training import Run
from planner.lab.run.workers import Lost, Manner, measure_all
from planner.units import format_seconds

FAKE = 20.0
"""A rank on fake tensors may take so many times the limit of a step: all its operations run on one core."""


# ------------------------------------------------------------------------------------------------ the level


def run(task: Task, say: Say) -> dict[str, Any]:
    """The ranks asked for, or one of each stage that may be the worst. One that does not come to its end is a result."""
    wanted, gone, killed, limit = task.chosen_ranks(), list[Lost](), kills(), FAKE * task.timeout
    count = "1 rank" if len(wanted) == 1 else f"{len(wanted)} ranks"
    stated = f"{format_seconds(limit)} for each ({FAKE:.0f} times --timeout), then it is named and ended"
    print(f"{count} on fake tensors. Limit: {stated}", file=sys.stderr, flush=True)
    every = measure_ranks(
        task.asked.split, wanted, limit=limit, say=lambda text: say(f"{len(wanted)} ranks, {text}"), lost=gone.append
    )
    found = result(task.asked, [one for one in every if one is not None]) | {"limits": {"rank_seconds": limit}}
    if not gone:
        return found
    if gone[0].kind == "failed":  # the torch model has not got what the plan asks for: nothing was run
        raise PlannerError(gone[0].sentence)
    failure = gone[0].failure(killed)
    rank = gone[0].rank if gone[0].rank >= 0 else None
    return {**found, "outcome": failure.pop("outcome"), "failure": {"rank": rank, **failure}}


def result(asked: Question, ranks: Sequence[Measured]) -> dict[str, Any]:
    """The whole validation as plain data; the rank with the highest peak first."""
    rows = sorted((tracked_rank(asked, one) for one in ranks), key=lambda one: -one["memory"][-1]["measured_gib"])
    return {
        "rung": "meta", "trainer": asked.trainer.name, "changes": list(asked.changes),
        "layout": asked.layout.to_dict(), "num_gpus": int(asked.layout.num_gpus), "ranks": rows,
    }  # fmt: skip


def measure_ranks(
    split: Split, ranks: Sequence[int], *, limit: float = float("inf"), say: Callable[[str], object] = lambda _: None,
    lost: Callable[[Lost], object] | None = None,
) -> list[Measured | None]:  # fmt: skip
    """The step of each rank, in processes of their own; of a deep stage the line through two shallow ones (depth.py)."""
    manner = Manner(work=measure, at_once=os.cpu_count() or 1, fork=True, where="on fake tensors", limit=limit)
    deep = {rank: depths(split, rank * split.pp // split.world) for rank in ranks}
    jobs = [(rank, job) for rank, pair in deep.items() for job in (pair[:2] if pair else (split,))]
    every, found = iter(measure_all(jobs, manner, say=say, lost=lost)), []
    for pair in deep.values():
        one = next(every)
        if pair is not None:
            second = next(every)
            one = None if one is None or second is None else beyond(one, second, pair[2])
        found.append(one)
    return found


# ------------------------------------------------------------------------------------------------ one rank


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


def measure(
    split: Split, rank: int, progress: Callable[[str], None] = lambda _: None, *, real: bool = False
) -> Measured:
    """The step of one rank. ``real``: on the CPU, with memory and numbers.

    Once per process: torch remembers process groups by name that the next call would not have.
    """
    started = time.perf_counter()
    ran = quiet_process(split)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=split.world)
    try:
        with ExitStack() as stack:
            stack.enter_context(RealMeshes())
            tracker = MemoryTracker()
            stack.enter_context(tracker.patches())
            made = Run(ran, torch.device("cpu"))  # before tensors are fake: shards of nothing are made quickly
            if not real:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(tracker)
            alone = RankAlone(made, tracker, progress)
            alone.warm()
            return alone.tracked(split, rank, started)
    finally:
        gc.enable()
        dist.destroy_process_group()


def quiet_process(split: Split) -> Split:
    """Sets this process up for one rank alone; the job with as few microbatches as show the peak, and even experts."""
    gc.collect()
    gc.disable()  # a collection in a step belongs to no layout, and would look at every fake tensor again and again
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    return dataclasses.replace(split, num_microbatches=step_of(split), balanced=True)


def _with(parts: dict[str, int], unseen: int) -> dict[str, int]:
    return {**parts, "temporary": parts["temporary"] + unseen}


class RankAlone:
    """The run of a rank whose neighbours do not exist, under a tracker."""

    def __init__(self, run: Run, tracker: MemoryTracker, progress: Callable[[str], None]) -> None:
        self.split, self.run, self.tracker, self.progress = run.split, run, tracker, progress
        self.parameters = sum(p.numel() for part in run.parts for p in part.parameters())
        self._done = 0
        self._passes: dict[int, int] = {}
        run.allocate(fill=False)
        self.kept = [
            p for part in run.parts for p in part.parameters()
        ]  # shards: in a pass modules hold gathered weights
        tracker.assign("weights", self.kept)
        self.hooks: list[Any] = []
        for number, part in zip(run.mine, run.parts, strict=True):
            self._passes[number] = 0
            self.hooks.append(part.register_forward_pre_hook(self._accumulated))
            self.hooks.append(part.register_forward_pre_hook(partial(self._begun, number)))
            for i, layer in enumerate(part.layers.values()):
                where = place(i, len(part.layers))
                self.hooks.append(layer.register_forward_pre_hook(partial(self._before, number, where)))
                self.hooks.append(layer.register_forward_hook(partial(self._after, number, where)))

    def _accumulated(self, *_: Any) -> None:
        """Gradients of the microbatches before this one."""
        self.tracker.assign("gradients", self.gradient_tensors())

    def _begun(self, number: int, *_: Any) -> None:
        self._passes[number] += 1

    def _before(self, number: int, where: int | None, *_: Any) -> None:
        self.tracker.at((number, self._passes[number], "forward", where))

    def _after(self, number: int, where: int | None, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        """Behind the last layer comes the head; its backward pass begins when the gradient of its output is there."""
        count = self._passes[number]
        if where == -1:
            self.tracker.at((number, count, "behind", 0))
        output.register_hook(lambda _: self.tracker.at((number, count, "backward", where)))
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
            self.tracker.assign("optimizer_states", optimizer_states(optimizer))
            optimizer.zero_grad()
        if self.run.schedule is not None:
            self.run.schedule._warmup_p2p = self._no_vote

    @staticmethod
    def _no_vote(stages: Any, *_: Any) -> None:
        for stage in stages if isinstance(stages, list) else [stages]:
            stage._inference_mode = InferenceMode.STATIC

    def tracked(self, split: Split, rank: int, started: float) -> Measured:
        """Takes a step and says what was seen of it, as if all microbatches of ``split`` had run."""
        recorder, tracker = CollectiveRecorder(), self.tracker
        tracker.start()
        tracker.at("start")
        with recorder:
            self.measured()
        tracker.assign("gradients", self.gradient_tensors())
        tracker.at(None)
        unseen = (split.num_microbatches - self.split.num_microbatches) * self.receive_bytes()
        return Measured(
            rank=rank, stage=self.run.rank["pp"], held=_with(tracker.largest, unseen), at_peak=_with(self.peak.parts, unseen),
            peak=self.peak.total + unseen, parameters=self.parameters, microbatches=self.split.num_microbatches,
            unseen_receive_bytes=unseen, collectives=recorder.listed(), seconds=time.perf_counter() - started,
            layers_run=sum(len(part.layers) for part in self.run.parts),
            points={key: (top + unseen, _with(parts, unseen), _with(most, unseen))
                    for key, (top, parts, most) in tracker.points.items()},
        )  # fmt: skip

    def measured(self) -> None:
        """The step: gradients are named when the passes are over, before clipping and the update."""
        self.run.gradients(*self.inputs(self.split.num_microbatches))
        before = self.tracker.peak
        self.tracker.assign("gradients", self.gradient_tensors())
        self.tracker.at("update")
        self.run.clip()
        for optimizer in self.run.optimizers:
            optimizer.step()
        self.peak = self.tracker.peak if self.tracker.peak.total > before.total else before

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Of all parameters, as they are kept between the backward pass and the update."""
        return [p.grad for p in self.kept if p.grad is not None]

    def receive_bytes(self) -> int:
        """Receive buffers of one microbatch: activations from before, gradients from behind, for each virtual stage."""
        total = 0
        for number in self.run.mine if self.split.pp > 1 else ():
            for neighbour, shown in ((number - 1, number), (number + 1, number + 1)):
                if not 0 <= neighbour < len(self.split.stages):
                    continue
                mine = self.split.stages[neighbour].rank == self.run.rank["pp"]
                if not (mine and self.split.schedule in V_SHAPED):
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

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.errors import PlannerError
from planner.lab.reference.split import Split
from planner.lab.run.comparison import tracked_rank
from planner.lab.run.depth import beyond, depths, place
from planner.lab.run.fake_tensors import RepeatedFakes
from planner.lab.run.host_states import HostStates
from planner.lab.run.levels import ONE_PROCESS, Question, Task, kills
from planner.lab.run.memory_tracker import MemoryTracker, Most, optimizer_states, overall
from planner.lab.run.training import Run
from planner.lab.run.workers import Lost, Manner, Tell, measure_all
from planner.record import record
from planner.terminal.flags import progress
from planner.units import format_seconds

FAKE = 20.0
"""A rank on fake tensors may take so many times the limit of a step: all its operations run on one core."""


# ------------------------------------------------------------------------------------------------ the level


def obstacle(task: Task) -> str:
    """Any machine can run it."""
    return "" if task.machine.place is None else ONE_PROCESS


def run(task: Task) -> dict[str, Any]:
    """The ranks asked for, or one of each stage that may be the worst. One that does not come to its end is a result."""
    wanted, gone, killed, limit = task.chosen_ranks(), list[Lost](), kills(), FAKE * task.timeout
    count = "1 rank" if len(wanted) == 1 else f"{len(wanted)} ranks"
    runs, cores = len(_jobs(task.asked.split, wanted)[1]), len(os.sched_getaffinity(0))
    whole = f"; all of it takes at most {format_seconds(limit * -(-runs // cores))}"
    stated = f"{format_seconds(limit)} for each ({FAKE:.0f} times --timeout), then it is named and ended{whole}"
    print(f"{count} on fake tensors. Limit: {stated}", file=sys.stderr, flush=True)
    with progress(f"level meta: {count}", every=30.0) as say:
        every = measure_ranks(task.asked.split, wanted, limit=limit, say=say, lost=gone.append)
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
        "rung": "meta", "trainer": asked.trainer.name, "changes": list(asked.changes), "unchecked": list(asked.unchecked),
        "layout": asked.layout.to_dict(), "num_gpus": int(asked.layout.num_gpus), "ranks": rows,
    }  # fmt: skip


def measure_ranks(
    split: Split, ranks: Sequence[int], *, limit: float = float("inf"), say: Callable[[str], object] = lambda _: None,
    lost: Callable[[Lost], object] | None = None,
) -> list[Measured | None]:  # fmt: skip
    """The step of each rank, in processes of their own; of a deep stage the line through two shallow ones (depth.py)."""
    manner = Manner(work=measure, at_once=len(os.sched_getaffinity(0)), fork=True, where="on fake tensors", limit=limit)
    deep, jobs = _jobs(split, ranks)
    every, found = iter(measure_all(jobs, manner, say=say, lost=lost)), []
    for pair in deep.values():
        one = next(every)
        if pair is not None:
            second = next(every)
            one = None if one is None or second is None else beyond(one, second, pair[2])
        found.append(one)
    return found


def _jobs(split: Split, ranks: Sequence[int]) -> tuple[dict[int, Any], list[tuple[int, Split]]]:
    """For each rank the two shallow jobs of a deep stage, or None; and all that is run, with its rank."""
    deep = {rank: depths(split, rank * split.pp // split.world) for rank in ranks}
    return deep, [(rank, job) for rank, pair in deep.items() for job in (pair[:2] if pair else (split,))]


# ------------------------------------------------------------------------------------------------ one rank


@record
class Measured:
    """One rank's step."""

    rank: int
    """Of all ranks."""
    stage: int
    """Its pipeline rank."""
    points: dict[Any, Most] = dataclasses.field(repr=False)
    """What was most between two layers, by (virtual stage, microbatch, pass, layer): see depth.py."""
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
    layers_run: int
    """Layers of the rank that were run; the rest is their straight line (depth.py)."""
    host_bytes: int = 0
    """Of optimizer states, gradients and weights in host memory."""

    @property
    def most(self) -> Most:
        """Within the step."""
        return overall(self.points.values())


def step_of(split: Split) -> int:
    """Microbatches that show the peak: with more only the receive buffers of a pipeline grow, by the same for each.

    One rank accumulates from the second microbatch on; 1F1B and its kin have at most 2 p + 1 (interleaved: rounds of p)
    in flight; GPipe all.
    """
    count, pp = split.num_microbatches, split.pp
    most = {"GPipe": count, "1F1B": pp + 1, "Interleaved1F1B": 3 * (count // max(1, count // pp))}
    return min(count, 2 if pp == 1 else most.get(split.schedule, 2 * pp + 1))


@contextmanager
def pretended(split: Split, rank: int) -> Iterator[None]:
    """This process is one rank of a job whose other ranks do not exist.

    Once per process: torch remembers process groups by name that the next call would not have.
    """
    gc.collect()
    gc.disable()  # a collection in a step belongs to no layout, and would look at every fake tensor again and again
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a failed pipeline logs its whole schedule
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=split.world)
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def measure(split: Split, rank: int, tell: Tell = lambda *_: None) -> Measured:
    """The step of one rank on fake tensors, once per process."""
    with pretended(split, rank):
        return RankAlone(split, tell).tracked(rank)


class RankAlone:
    """The run of a rank whose neighbours do not exist: as few microbatches as show the peak, even experts.

    Without a device on fake tensors, with no numbers; else weights and tokens are drawn.
    """

    def __init__(self, split: Split, tell: Tell, device: torch.device | None = None) -> None:
        self.whole, self.tell, self.started = split, tell, time.perf_counter()
        self.split = dataclasses.replace(split, num_microbatches=step_of(split), balanced=True)
        self.tracker = MemoryTracker()
        self._passes: Counter[int] = Counter()
        self._layers_done = 0
        tell("progress", (0.0, "its modules are built and split"))
        self._mode: Any = nullcontext() if device else RepeatedFakes()
        with self.tracker.patches():
            self.run = Run(self.split, device or torch.device("cpu"))  # before tensors are fake: shards of nothing are quick
            self.parameters = sum(p.numel() for part in self.run.parts for p in part.parameters())
            with self._mode, self.tracker:
                self.run.allocate(fill=False)
                if device:
                    self.run.fill_by_shard()
                self._warm()
        self.hooks: list[Any] = []
        for number, part in zip(self.run.mine, self.run.parts, strict=True):
            self.hooks.append(part.register_forward_pre_hook(partial(self._begun, number)))
            for i, layer in enumerate(part.layers.values()):
                where = place(i, len(part.layers))
                self.hooks.append(layer.register_forward_pre_hook(partial(self._before, number, where)))
                self.hooks.append(layer.register_forward_hook(partial(self._after, number, where)))

    def _warm(self) -> None:
        """Optimizer states, by an update with gradients of nothing; no vote on the shapes of stages."""
        self.kept = [p for part in self.run.parts for p in part.parameters()]  # shards; in a pass modules hold whole weights
        self.tracker.assign("weights", self.kept)
        for parameter in self.kept:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.run.optimizers:
            optimizer.step()
            self.tracker.assign("optimizer_states", optimizer_states(optimizer))
            optimizer.zero_grad()
        if self.run.schedule is not None:
            self.run.schedule._warmup_p2p = lambda *_: None
            for stage in self.run.stages:
                stage._inference_mode = InferenceMode.STATIC

    def _begun(self, number: int, *_: Any) -> None:
        """The next microbatch: what has been accumulated until now is of the ones before."""
        self._name_gradients()
        self._passes[number] += 1

    def _before(self, number: int, where: int | None, *_: Any) -> None:
        self.tracker.at((number, self._passes[number], "forward", where))

    def _after(self, number: int, where: int | None, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        """Behind the last layer comes the head; its backward pass begins when the gradient of its output is there."""
        count = self._passes[number]
        if where == -1:
            self.tracker.at((number, count, "behind", 0))
        output.register_hook(partial(self._back, (number, count, "backward", where)))
        self._progress()

    def _back(self, point: tuple[int, int, str, int | None], _: torch.Tensor) -> None:
        """The backward pass of a layer begins."""
        self.tracker.at(point)
        self._progress()

    def _progress(self) -> None:
        """One more pass of a layer; forward and backward ones, as most of the time is the latter's."""
        self._layers_done += 1
        passes = 2 * sum(len(part.layers) for part in self.run.parts) * self.split.num_microbatches
        words = f"stage {self.run.rank['pp']}: {self._layers_done} of {passes} passes of layers"
        self.tell("progress", (self._layers_done / passes, words))

    def _name_gradients(self) -> None:
        self.tracker.assign("gradients", [p.grad for p in self.kept if p.grad is not None])

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a step and what follows them."""
        shape = (self.split.num_microbatches * self.split.micro_batch_size, self.split.sequence_length // self.split.cp)
        modules = self.split.model.mtp_layers
        shapes = (shape, (*shape, 1 + modules) if modules else shape)
        first, second = (torch.randint(self.split.model.vocab_size, one, device=self.run.device) for one in shapes)
        return first, second

    def tracked(self, rank: int) -> Measured:
        """Takes a step and says what was seen of it, as if all microbatches had run."""
        tracker = self.tracker
        with tracker.patches(), self._mode, tracker:
            tracker.start()
            self.step()
            self._name_gradients()
        unseen = (self.whole.num_microbatches - self.split.num_microbatches) * self._receive_bytes()
        for point in tracker.points.values():
            point.parts["temporary"] += unseen
            point.held["temporary"] += unseen
        return Measured(
            rank=rank, stage=self.run.rank["pp"], points=tracker.points, parameters=self.parameters,
            microbatches=self.split.num_microbatches, unseen_receive_bytes=unseen, collectives=tracker.collectives(),
            seconds=time.perf_counter() - self.started, layers_run=sum(len(part.layers) for part in self.run.parts),
            host_bytes=sum(optimizer.host_bytes for optimizer in self.run.optimizers if isinstance(optimizer, HostStates)),
        )  # fmt: skip

    def step(self) -> None:
        """Gradients are named when the passes are over, before clipping and the update."""
        self.run.gradients(*self.inputs())
        self._name_gradients()
        self.tracker.at("update")
        self.tell("progress", (1.0, f"stage {self.run.rank['pp']}: clipping and the update"))
        self.run.clip()
        for optimizer in self.run.optimizers:
            optimizer.step()

    def _receive_bytes(self) -> int:
        """Receive buffers of one microbatch: what comes from stages of other ranks."""
        infos = [info for one in self.run.stages for every in (one.args_recv_info, one.grad_recv_info) for info in every.get(0, ())]
        received = [one.buffer for one in infos
                    if one.buffer is not None and self.split.stages[one.source].rank != self.run.rank["pp"]]  # fmt: skip
        return sum(one.numel() * one.element_size() for one in received)

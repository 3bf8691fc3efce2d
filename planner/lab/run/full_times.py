"""Measured times of a run beside the predicted ones: the step, its stages, the bubble, exposed communication. No torch here.

On a CPU whose cores are shared only processor time says something about the work: each pass is compared by the seconds of the
thread that computes, without what it waits, at the rate that the core had when it was profiled, and the step by a replay of
the schedule with those seconds. Wall time is compared when the machine is quiet and every rank has a core. What is not
compiled is priced as it runs (``uncompiled``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from planner.cost.pipeline.schedule_walk import stage_rank, walked_time
from planner.detect import profile_of
from planner.hardware import load_hardware
from planner.lab.run.eager_pricing import UPDATE, Host, as_run, mean_host, processor_seconds, update_seconds
from planner.lab.run.levels import Task
from planner.lab.run.record import time_row
from planner.plan_file import Prediction, predict
from planner.rules import Job
from planner.timeline.passes import pieces_by_action
from planner.timeline.priced_plan import Priced, price

QUIET = 10.0
"""Percent of time in which some process waited for a core; below, wall times are compared."""
SECONDS, PROCESSOR, THREAD, RATED = 0, 1, 2, 3
"""Clocks of a time: wall (of the stream on a GPU), processor time of the process, of the thread that ran it, and that at the
rate that the core had when it was profiled."""
EXPOSED = {
    "tensor": "tensor_communication", "context": "context_communication", "expert": "expert_communication",
    "pipeline": "pipeline_communication", "data": "data_communication",
}  # fmt: skip
"""Kind of communication -> part of the predicted step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What ranks left, and what was predicted."""

    task: Task
    entries: Sequence[dict[str, Any]]
    """One of each rank that came so far, as full_rank.OneRank writes them."""
    pressure: tuple[float | None, float | None]
    """Before and after."""

    @property
    def on_cpu(self) -> bool:
        """Whether it ran on a CPU."""
        return self.task.machine.device == "cpu"

    @cached_property
    def not_compiled(self) -> dict[str, str]:
        """Operators of a GPU that ran as several kernels because no compiler made one of them, and why."""
        return {name: why for one in self.entries for name, why in one.get("not_compiled", {}).items()}

    @property
    def plain(self) -> bool:
        """Whether what ran is not compiled."""
        return self.on_cpu or bool(self.not_compiled)

    @cached_property
    def priced(self) -> Priced:
        """The layout priced as it was run."""
        asked = self.task.asked
        trainer = as_run(asked.trainer, asked.split, on_cpu=self.on_cpu) if self.plain else asked.trainer
        return price(Job(workload=asked.workload, cluster=asked.cluster, trainer=trainer), asked.layout)

    @cached_property
    def host(self) -> Host | None:
        """What layers of nothing took on a processor."""
        return mean_host(self.entries)

    @cached_property
    def passes(self) -> dict[tuple[int, str], float]:
        """Predicted seconds of one microbatch by virtual stage and kind: of the core, or of the GPU's stream."""
        if not self.on_cpu:
            return predicted_passes(self)
        return self._processor(self.host)

    def _processor(self, host: Host | None) -> dict[tuple[int, str], float]:
        told = processor_seconds(self.priced, self.task.asked.split, host)
        return _as_torch({(stage, kind): float(t) for kind, every in told.items() for stage, t in enumerate(every)})

    @cached_property
    def update(self) -> float:
        """Predicted seconds of the update, on a processor with the gradient's norm, of the stage where it takes longest."""
        return (
            float(np.max(update_seconds(self.priced, self.task.asked.split, self.host)))
            if self.on_cpu
            else self.prediction.time_s["optimizer"]
        )

    @cached_property
    def step_range(self) -> tuple[float, float, float]:
        """Predicted seconds of the step and the ends of its interval: on a processor with the host's work and the norm."""
        told, (low, high) = self.prediction.step_time_s, self.prediction.step_time_range_s
        if not self.on_cpu:
            return told, low, high
        more = (replay(self, self.passes) or 0.0) - (replay(self, self._processor(None)) or 0.0)
        whole = told + more + self.update - self.prediction.time_s["optimizer"]
        return whole, low * whole / told, high * whole / told

    @cached_property
    def prediction(self) -> Prediction:
        """As plans show it, with its interval."""
        return predict(self.priced.estimate, self.priced.job, self.task.plan.kind())

    @cached_property
    def steps(self) -> list[list[dict[str, Any]]]:
        """Steps that all ranks have measured, each by rank."""
        if len(self.entries) < self.task.asked.split.world:
            return []
        count = min(len(one["steps"]) for one in self.entries)
        return [[_rated(one["steps"][number]) for one in self.entries] for number in range(count)]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Each step's time on the slowest rank."""
        return [max(one["step"][SECONDS] for one in step) for step in self.steps]

    @cached_property
    def not_compared(self) -> str:
        """Why measured times are not held against predicted ones; "" when they are."""
        hardware = self.task.asked.cluster.hardware
        if self.on_cpu == hardware.is_cpu:
            known = None if self.on_cpu else profile_of(self.task.machine.name)
            arch = load_hardware(known).arch if known else hardware.arch
            if arch == hardware.arch:
                return ""
            return (
                f"the plan is for {hardware.name} ({hardware.arch}) and ran on {self.task.machine.name}: not compared"
            )
        return f"the plan is for {hardware.name} and ran on a {'CPU' if self.on_cpu else 'GPU'}: not compared"

    @cached_property
    def not_by_wall(self) -> str:
        """Why wall times are not compared; "" when they are."""
        if self.not_compared or not self.on_cpu:
            return self.not_compared
        world, cores = self.task.asked.split.world, self.task.machine.cores
        waits = [one for one in self.pressure if one is not None]
        if world > cores:
            return f"{world} ranks share {cores} cores: wall time is not compared"
        if not waits or max(waits) > QUIET:
            said = (
                f"for {max(waits):.0f} % of the time a process waited for a core"
                if waits
                else "the kernel does not say"
            )
            return f"the machine is not quiet ({said}): wall time is not compared"
        return ""

    def of_ranks(self, measure: Callable[[dict[str, Any]], float]) -> dict[int, list[float]]:
        """By pipeline rank one value per step: the largest of its ranks."""
        found: dict[int, list[float]] = {}
        for stage in sorted({one["stage"] for one in self.entries}):
            mine = [rank for rank, one in enumerate(self.entries) if one["stage"] == stage]
            found[stage] = [max(measure(step[rank]) for rank in mine) for step in self.steps]
        return found


def _rated(step: dict[str, Any]) -> dict[str, Any]:
    """A step of one rank with a fourth clock: the thread's seconds over how much slower the core was than when it was profiled;
    the update, which moves bytes, by a yardstick that does so too."""
    slowed = step.get("slowed") or 1.0
    update = step.get("update_slowed") or slowed

    def more(times: list[float], by: float = slowed) -> list[float]:
        return [*times, times[THREAD] / by]

    found = {
        name: more(value, update if name in UPDATE else slowed)
        if isinstance(value, list) and name != "actions"
        else value
        for name, value in step.items()
    }
    actions = [{**one, "total": more(one["total"]), "median": more(one["median"])} for one in step["actions"]]
    return {**found, "actions": actions}


def spread(values: Sequence[float]) -> float | None:
    """Half the distance of the 5th and the 95th percentile over the median."""
    middle = statistics.median(values) if values else 0.0
    if len(values) < 2 or middle <= 0:
        return None
    low, high = np.percentile(values, [5, 95])
    return float((high - low) / 2 / middle)


def times(run: Run) -> list[dict[str, Any]]:
    """The rows of the table of times; none before a step was measured."""
    if not run.steps:
        return []
    wall = "wall" if run.on_cpu else "device"
    step = run.step_seconds
    told, low, high = run.step_range
    return [
        time_row(
            "step", _if(run, told), statistics.median(step), spread=spread(step), currency=wall,
            interval=(low, high) if not run.not_compared else None, note=run.not_by_wall,
        ),
        *(_on_cpu(run) if run.on_cpu else _on_gpu(run)),
    ]  # fmt: skip


def _if(run: Run, value: float) -> float | None:
    """A prediction, where it is one of this device."""
    return None if run.not_compared else value


def _passes(clock: int) -> Callable[[dict[str, Any]], float]:
    return lambda step: sum(one["total"][clock] for one in step["actions"])


def _update(clock: int) -> Callable[[dict[str, Any]], float]:
    return lambda step: sum(step[name][clock] for name in UPDATE if name in step)


def _on_cpu(run: Run) -> list[dict[str, Any]]:
    """Processor time of the thread that computes; waiting only where the machine is quiet."""
    passes, update = run.of_ranks(_passes(RATED)), run.of_ranks(_update(RATED))
    slowest = max(passes, key=lambda rank: statistics.median(passes[rank]))
    told = seconds_of_rank(run, slowest)
    most = max(update.values(), key=statistics.median)
    rows = [
        time_row("forward_backward", _if(run, told), statistics.median(passes[slowest]), spread=spread(passes[slowest]),
                 currency="processor", note=run.not_compared),
        time_row("optimizer", _if(run, run.update), statistics.median(most), spread=spread(most),
                 currency="processor", note=run.not_compared),
    ]  # fmt: skip
    measured = replay(run, measured_passes(run, RATED))
    if measured is not None:
        expected = replay(run, run.passes)
        whole = None if expected is None else expected + run.update
        rows.append(
            time_row("replayed_step", None if run.not_compared else whole, measured + statistics.median(most),
                     currency="processor", note=run.not_compared)
        )  # fmt: skip
    if not run.not_by_wall:
        rows += _waiting(run, slowest)
    return rows


def _waiting(run: Run, slowest: int) -> list[dict[str, Any]]:
    """What the slowest pipeline rank waits: inside of its passes for others, and between them."""
    time, hidden = run.prediction.time_s, ("tensor", "context", "expert")
    inside = run.of_ranks(
        lambda step: sum(max(one["total"][SECONDS] - one["total"][THREAD], 0.0) for one in step["actions"])
    )
    between = run.of_ranks(lambda step: max(step["passes"][SECONDS] - _passes(SECONDS)(step), 0.0))
    told = sum(time[EXPOSED[kind]] for kind in hidden) + time["data_communication"]
    return [
        time_row("exposed in passes", told, statistics.median(inside[slowest]), spread=spread(inside[slowest])),
        time_row("pipeline_bubble", time["bubble"] + time["pipeline_communication"], statistics.median(between[slowest]),
                 spread=spread(between[slowest])),
    ]  # fmt: skip


def _on_gpu(run: Run) -> list[dict[str, Any]]:
    """By events of the stream; exposed communication by the kernels of the traced step."""
    passes, update = run.of_ranks(_passes(SECONDS)), run.of_ranks(_update(SECONDS))
    between = run.of_ranks(lambda step: max(step["passes"][SECONDS] - _passes(SECONDS)(step), 0.0))
    slowest = max(passes, key=lambda rank: statistics.median(passes[rank]))
    most = max(update.values(), key=statistics.median)
    time = run.prediction.time_s
    told = {
        "forward_backward": sum(time[one] for one in ("compute", "recompute", "host", *list(EXPOSED.values())[:3])),
        "optimizer": time["optimizer"], "pipeline_bubble": time["bubble"] + time["pipeline_communication"],
    }  # fmt: skip
    seen = {"forward_backward": passes[slowest], "optimizer": most, "pipeline_bubble": between[slowest]}
    rows = [
        time_row(name, _if(run, told[name]), statistics.median(values), spread=spread(values), currency="device",
                 note=run.not_compared)
        for name, values in seen.items()
    ]  # fmt: skip
    found: dict[str, float] = next(
        (one["exposed"] for one in run.entries if one["stage"] == slowest and one.get("exposed")), {}
    )
    for kind, seconds in found.items():
        if kind in EXPOSED:
            rows.append(
                time_row(
                    f"exposed {kind}", _if(run, time[EXPOSED[kind]]), seconds, currency="device", note=run.not_compared
                )
            )
    return rows


# ------------------------------------------------------------------------------------------------ passes by stage


def stages(run: Run) -> list[dict[str, Any]]:
    """A row for each virtual stage and kind of pass: seconds of one microbatch, the median of its steps and ranks."""
    if not run.steps:
        return []
    clock = RATED if run.on_cpu else SECONDS
    told, found = run.passes, []
    for (stage, kind), values in sorted(measured_passes(run, clock, every=True).items()):
        row = time_row(
            kind, None if run.not_compared else told.get((stage, kind)), statistics.median(values), spread=spread(values),
            currency="processor" if run.on_cpu else "device", note=run.not_compared,
        )  # fmt: skip
        found.append({"rank": _rank(run, stage), "stage": stage, "kind": row.pop("what"), **row})
    return found


def _rank(run: Run, stage: int) -> int:
    """Pipeline rank of a virtual stage."""
    layout = run.priced.dealt
    return stage_rank(stage, int(layout.pp), int(layout.schedule))


def measured_passes(run: Run, clock: int, *, every: bool = False) -> Any:
    """Seconds of one microbatch by virtual stage and kind; with ``every`` the value of each step, else their median."""
    found: dict[tuple[int, str], list[float]] = {}
    for step in run.steps:
        this: dict[tuple[int, str], list[float]] = {}
        for one in step:
            for action in one["actions"]:
                this.setdefault((action["stage"], action["kind"]), []).append(action["median"][clock])
        for key, values in this.items():
            found.setdefault(key, []).append(statistics.median(values))
    return found if every else {key: statistics.median(values) for key, values in found.items()}


def predicted_passes(run: Run) -> dict[tuple[int, str], float]:
    """The same as predicted, of all that is not hidden."""
    pieces = pieces_by_action(run.priced)
    return _as_torch({key: sum(one.seconds for one in mine if not one.hidden) for key, mine in pieces.items()})


def _as_torch(found: dict[tuple[int, str], float]) -> dict[tuple[int, str], float]:
    """Kinds as torch's schedules have them: B where the model has I and W, and nothing for halves that it does not tell apart."""
    for stage in {stage for stage, _ in found}:
        if (stage, "I") in found:
            found[stage, "B"] = found[stage, "I"] + found.get((stage, "W"), 0.0)
    if (0, "I") in found:  # tokens have no gradient: torch's first stage does its whole backward pass as W
        found[0, "W"] = found[0, "B"]
        del found[0, "I"]
    return found


def seconds_of_rank(run: Run, rank: int) -> float:
    """Predicted seconds of all passes of a pipeline rank in a step."""
    passes = run.passes
    count = int(run.priced.dealt.num_microbatches)
    return count * sum(
        seconds for (stage, kind), seconds in passes.items() if kind in ("F", "B") and _rank(run, stage) == rank
    )


def replay(run: Run, passes: dict[tuple[int, str], float]) -> float | None:
    """Seconds of the pipeline if each pass took that long and sends nothing; None where a pass is missing."""
    layout = run.priced.dealt
    pp, v, m = int(layout.pp), int(layout.vpp), int(layout.num_microbatches)
    forward, backward, weight = [], [], []
    for stage in range(pp * v):
        half = passes.get((stage, "W"), 0.0)
        whole = passes.get((stage, "B"), passes.get((stage, "I"), -1.0) + half)
        if (stage, "F") not in passes or whole < 0:
            return None
        forward.append(passes[stage, "F"])
        backward.append(whole)
        weight.append(half)
    if pp == 1:
        return m * (sum(forward) + sum(backward))
    durations = np.array(forward), np.array(backward), np.array(weight)
    return walked_time(int(layout.schedule), pp, v, m, durations)

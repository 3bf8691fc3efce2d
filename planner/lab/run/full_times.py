"""Measured and predicted times of a run: the step, its stages, the bubble, exposed communication. No torch here.

On a CPU whose cores are shared only processor time says something about the work: each pass is compared by the seconds of the
thread that computes, without what it waits, at the rate that the core had when it was profiled, and the step by a replay of
the schedule with those seconds. Wall time is compared when the machine is quiet and every rank has a core. What is not
compiled is priced as it runs (``eager_pricing``).
"""

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
from planner.lab.run.record import measured_row, time_row
from planner.plan_file import Prediction, predict
from planner.timeline.passes import pieces_by_action
from planner.timeline.priced_plan import Priced

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

Passes = dict[tuple[int, str], float]
"""Seconds of one microbatch by virtual stage and kind."""


@dataclass(frozen=True, kw_only=True)
class FullRun:
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
        return asked.priced(as_run(asked.trainer, asked.split, on_cpu=self.on_cpu) if self.plain else None)

    @cached_property
    def host(self) -> Host | None:
        """What empty layers took on a processor."""
        return mean_host([one.get("host_seconds") for one in self.entries])

    @cached_property
    def passes(self) -> Passes:
        """Predicted seconds of one microbatch by virtual stage and kind: of the core, or of all that the stream does not hide."""
        if self.on_cpu:
            return self._processor(self.host)
        pieces = pieces_by_action(self.priced)
        return _as_torch({key: sum(one.seconds for one in mine if not one.hidden) for key, mine in pieces.items()})

    def _processor(self, host: Host | None) -> Passes:
        seconds = processor_seconds(self.priced, self.task.asked.split, host)
        return _as_torch({(stage, kind): float(t) for kind, every in seconds.items() for stage, t in enumerate(every)})

    @cached_property
    def update(self) -> float:
        """Predicted seconds of the update, on a processor with the gradient's norm, of the stage where it takes longest."""
        if not self.on_cpu:
            return self.prediction.time_s["optimizer"]
        return float(np.max(update_seconds(self.priced, self.task.asked.split, self.host)))

    @cached_property
    def step_range(self) -> tuple[float, float, float]:
        """Predicted seconds of the step and the ends of its interval: on a processor with the host's work and the norm."""
        step, (low, high) = self.prediction.step_time_s, self.prediction.step_time_range_s
        if not self.on_cpu:
            return step, low, high
        more = (replay(self, self.passes) or 0.0) - (replay(self, self._processor(None)) or 0.0)
        whole = step + more + self.update - self.prediction.time_s["optimizer"]
        return whole, low * whole / step, high * whole / step

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
        """Why measured times are not compared with predicted ones; "" when they are."""
        hardware, name = self.task.asked.cluster.hardware, self.task.machine.name
        if self.on_cpu != hardware.is_cpu:
            return f"the plan is for {hardware.name} and ran on a {'CPU' if self.on_cpu else 'GPU'}: not compared"
        known = None if self.on_cpu else profile_of(name)
        if known is None or load_hardware(known).arch == hardware.arch:
            return ""
        return f"the plan is for {hardware.name} ({hardware.arch}) and ran on {name}: not compared"

    @cached_property
    def not_by_wall(self) -> str:
        """Why wall times are not compared; "" when they are."""
        if self.not_compared or not self.on_cpu:
            return self.not_compared
        world, cores = self.task.asked.split.world, self.task.machine.cores
        if world > cores:
            return f"{world} ranks share {cores} cores: wall time is not compared"
        waits = [one for one in self.pressure if one is not None]
        if waits and max(waits) <= QUIET:
            return ""
        said = f"for {max(waits):.0f} % of the time a process waited for a core" if waits else "the kernel does not say"
        return f"the machine is not quiet ({said}): wall time is not compared"

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

    actions = [{**one, "total": more(one["total"]), "median": more(one["median"])} for one in step["actions"]]
    spans = {name: value for name, value in step.items() if isinstance(value, list) and name != "actions"}
    rated = {name: more(value, update if name in UPDATE else slowed) for name, value in spans.items()}
    return {**step, **rated, "actions": actions}


def times(run: FullRun) -> list[dict[str, Any]]:
    """The rows of the table of times; none before a step was measured."""
    if not run.steps:
        return []
    step, low, high = run.step_range
    row = measured_row(
        "step", _if(run, step), run.step_seconds, currency="wall" if run.on_cpu else "device", note=run.not_by_wall,
        interval=None if run.not_compared else (low, high),
    )  # fmt: skip
    return [row, *(_on_cpu(run) if run.on_cpu else _on_gpu(run))]


def _if(run: FullRun, value: float | None) -> float | None:
    """A prediction, where it is one of this device."""
    return None if run.not_compared else value


def _row(run: FullRun, what: str, predicted: float | None, values: Sequence[float]) -> dict[str, Any]:
    """One compared time, of the core or of the GPU's stream."""
    currency = "processor" if run.on_cpu else "device"
    return measured_row(what, _if(run, predicted), values, currency=currency, note=run.not_compared)


def _passes(clock: int) -> Callable[[dict[str, Any]], float]:
    return lambda step: sum(one["total"][clock] for one in step["actions"])


def _update(clock: int) -> Callable[[dict[str, Any]], float]:
    return lambda step: sum(step[name][clock] for name in UPDATE if name in step)


def _between(step: dict[str, Any]) -> float:
    """Wall seconds between the passes of a step."""
    return max(step["passes"][SECONDS] - _passes(SECONDS)(step), 0.0)


def _slowest(run: FullRun, clock: int) -> tuple[int, list[float], list[float]]:
    """The pipeline rank whose passes take longest, their seconds by step; and the longest updates, of any rank."""
    passes, update = run.of_ranks(_passes(clock)), run.of_ranks(_update(clock))
    slowest = max(passes, key=lambda rank: statistics.median(passes[rank]))
    return slowest, passes[slowest], max(update.values(), key=statistics.median)


def _on_cpu(run: FullRun) -> list[dict[str, Any]]:
    """Processor time of the thread that computes; waiting only where the machine is quiet."""
    slowest, passes, update = _slowest(run, RATED)
    count = int(run.priced.dealt.num_microbatches)
    mine = [t for (stage, kind), t in run.passes.items() if kind in ("F", "B") and _rank(run, stage) == slowest]
    rows = [_row(run, "forward_backward", count * sum(mine), passes), _row(run, "optimizer", run.update, update)]
    measured = replay(run, {key: statistics.median(values) for key, values in measured_passes(run, RATED).items()})
    if measured is not None:
        expected = replay(run, run.passes)
        whole = None if expected is None else expected + run.update
        row = time_row(
            "replayed_step",
            _if(run, whole),
            measured + statistics.median(update),
            currency="processor",
            note=run.not_compared,
        )
        rows.append(row)
    return rows if run.not_by_wall else [*rows, *_waiting(run, slowest)]


def _waiting(run: FullRun, slowest: int) -> list[dict[str, Any]]:
    """What the slowest pipeline rank waits: inside of its passes for others, and between them."""
    time = run.prediction.time_s
    inside = run.of_ranks(
        lambda step: sum(max(one["total"][SECONDS] - one["total"][THREAD], 0.0) for one in step["actions"])
    )
    exposed = sum(time[EXPOSED[kind]] for kind in ("tensor", "context", "expert", "data"))
    bubble = time["bubble"] + time["pipeline_communication"]
    return [
        measured_row("exposed in passes", exposed, inside[slowest], currency="wall"),
        measured_row("pipeline_bubble", bubble, run.of_ranks(_between)[slowest], currency="wall"),
    ]


def _on_gpu(run: FullRun) -> list[dict[str, Any]]:
    """By events of the stream; exposed communication by the kernels of the traced step."""
    slowest, passes, update = _slowest(run, SECONDS)
    time = run.prediction.time_s
    in_passes = sum(time[one] for one in ("compute", "recompute", "host", *list(EXPOSED.values())[:3]))
    rows = [
        _row(run, "forward_backward", in_passes, passes), _row(run, "optimizer", time["optimizer"], update),
        _row(run, "pipeline_bubble", time["bubble"] + time["pipeline_communication"], run.of_ranks(_between)[slowest]),
    ]  # fmt: skip
    traced = (one["exposed"] for one in run.entries if one["stage"] == slowest and one.get("exposed"))
    for kind, seconds in next(traced, {}).items():
        if kind in EXPOSED:
            rows.append(_row(run, f"exposed {kind}", time[EXPOSED[kind]], [seconds]))
    return rows


# ------------------------------------------------------------------------------------------------ passes by stage


def stages(run: FullRun) -> list[dict[str, Any]]:
    """A row for each virtual stage and kind of pass: seconds of one microbatch, the median of its steps and ranks."""
    found = []
    for (stage, kind), values in sorted(measured_passes(run, RATED if run.on_cpu else SECONDS).items()):
        row = _row(run, kind, run.passes.get((stage, kind)), values)
        found.append({"rank": _rank(run, stage), "stage": stage, "kind": row.pop("what"), **row})
    return found


def _rank(run: FullRun, stage: int) -> int:
    """Pipeline rank of a virtual stage."""
    layout = run.priced.dealt
    return stage_rank(stage, int(layout.pp), int(layout.schedule))


def measured_passes(run: FullRun, clock: int) -> dict[tuple[int, str], list[float]]:
    """Seconds of one microbatch by virtual stage and kind, one for each step."""
    found: dict[tuple[int, str], list[float]] = {}
    for step in run.steps:
        this: dict[tuple[int, str], list[float]] = {}
        for action in (action for one in step for action in one["actions"]):
            this.setdefault((action["stage"], action["kind"]), []).append(action["median"][clock])
        for key, values in this.items():
            found.setdefault(key, []).append(statistics.median(values))
    return found


def _as_torch(found: Passes) -> Passes:
    """Kinds as torch's schedules have them: B where the model has I and W, and nothing for halves that it does not separate."""
    for stage in {stage for stage, _ in found}:
        if (stage, "I") in found:
            found[stage, "B"] = found[stage, "I"] + found.get((stage, "W"), 0.0)
    if (0, "I") in found:  # tokens have no gradient: torch's first stage does its whole backward pass as W
        found[0, "W"] = found[0, "B"]
        del found[0, "I"]
    return found


def replay(run: FullRun, passes: Passes) -> float | None:
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
    return walked_time(int(layout.schedule), pp, v, m, (np.array(forward), np.array(backward), np.array(weight)))

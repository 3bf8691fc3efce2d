"""What the ranks of level ``full`` left, as the content of validation.yaml: outcome, times, memory, rates. No torch here.

On a CPU whose cores are shared only processor time says something about the work: each pass is compared by the seconds of the
thread that computes, without what it waits, at the rate that the core had when it was profiled, and the step by a replay of
the schedule with those seconds. Wall time is compared when the machine is quiet and every rank has a core. What is not
compiled is priced as it runs (``eager_pricing``).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from planner import library
from planner.cost.pipeline.schedule_walk import stage_rank, walked_time
from planner.error_bars import error_bar
from planner.lab.launch.watch import Verdict
from planner.lab.run.comparison import attention_said, device_memory, memory_row, rank_memory
from planner.lab.run.eager_pricing import (
    UPDATE,
    EagerRun,
    Host,
    Passes,
    as_run,
    as_torch,
    computed,
    mean_host,
    notes_of,
    processor_seconds,
    update_seconds,
)
from planner.lab.run.kernel_trace import by_host, host_bound
from planner.lab.run.learn import not_compared
from planner.lab.run.levels import FIRST, SETTING_UP, START, Task
from planner.lab.run.outcome import losses_of, outcome_of, parity_of
from planner.lab.run.record import measured_row, rates, time_row
from planner.plan_file import Prediction, predict
from planner.questions.report.trace import trace_of
from planner.record import record
from planner.timeline.priced_plan import Priced
from planner.units import GIB

QUIET = 10.0
"""Percent of time in which some process waited for a core; below, wall times are compared."""
WALL, BUSY = 0, 1
"""The two times of a span, see ``full_rank.summary``."""
EXPOSED = {
    "tensor": "tensor_communication", "context": "context_communication", "expert": "expert_communication",
    "pipeline": "pipeline_communication", "data": "data_communication",
}  # fmt: skip
"""Kind of communication -> part of the predicted step."""


@record
class FullRun:
    """What ranks left, and what was predicted."""

    task: Task
    entries: Sequence[dict[str, Any]]
    """One of each rank that came so far, as full_rank.OneRank writes them."""

    @property
    def on_cpu(self) -> bool:
        """Whether it ran on a CPU."""
        return self.task.machine.device == "cpu"

    @cached_property
    def pressure(self) -> list[float | None]:
        """Before and, if it came so far, after."""
        return next((one["pressure"] for one in self.entries if one["rank"] == 0), [])

    @cached_property
    def not_compiled(self) -> dict[str, str]:
        """Operators of a GPU that ran as several kernels because no compiler made one of them, and why."""
        return {name: why for one in self.entries for name, why in one.get("not_compiled", {}).items()}

    @property
    def attention(self) -> list[str]:
        """Which kernels attention ran on GPUs, as a sentence."""
        ran = (name for one in self.entries for name in one.get("attention", ()))
        return attention_said(self.task.asked.split.attention, ran)

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
        """Predicted seconds of one microbatch: of the core, or of all that the stream does not hide."""
        if self.on_cpu:
            return processor_seconds(self.priced, self.task.asked.split, self.host)
        return as_torch(computed(self.priced, None))

    @cached_property
    def update(self) -> float:
        """Predicted seconds of the update, on a processor with the gradient's norm, of the stage where it takes longest."""
        if not self.on_cpu:
            return self.priced_update
        return float(np.max(update_seconds(self.priced, self.task.asked.split, self.host)))

    @property
    def priced_update(self) -> float:
        """Predicted seconds of the update, with what states on the host add."""
        return self.prediction.time_s["optimizer"] + self.prediction.time_s["offload"]

    @cached_property
    def step_range(self) -> tuple[float, float, float]:
        """Predicted seconds of the step and the ends of its interval: on a processor with the host's work and the norm."""
        step, (low, high) = self.prediction.step_time_s, self.prediction.step_time_range_s
        if not self.on_cpu:
            return step, low, high
        bare = processor_seconds(self.priced, self.task.asked.split, None)
        more = self.replay(self.passes) - self.replay(bare)
        whole = step + more + self.update - self.priced_update
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
        return [list(step) for step in zip(*(one["steps"] for one in self.entries), strict=False)]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Each step's time on the slowest rank."""
        return [max(one["step"][WALL] for one in step) for step in self.steps]

    @cached_property
    def measured(self) -> dict[tuple[int, str], list[float]]:
        """Seconds of one microbatch by virtual stage and kind, one for each step: the median of its ranks."""
        found: dict[tuple[int, str], list[float]] = {}
        for step in self.steps:
            this: dict[tuple[int, str], list[float]] = {}
            for action in (action for one in step for action in one["actions"]):
                this.setdefault((action["stage"], action["kind"]), []).append(action["median"][BUSY])
            for key, values in this.items():
                found.setdefault(key, []).append(statistics.median(values))
        return found

    @cached_property
    def not_compared(self) -> str:
        """Why measured times are not compared with predicted ones; "" when they are."""
        return not_compared(self.task.asked.cluster.hardware, self.task.machine)

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

    @cached_property
    def host_bound(self) -> dict[tuple[int, str], float]:
        """Share of a pass in which the GPU works, by virtual stage and kind, where the host bounds it."""
        return {} if self.on_cpu else host_bound(self.entries)

    @property
    def by_host(self) -> str:
        """Why passes are not compared of which the host sets the pace; "" where the GPU does."""
        return by_host(self.host_bound)

    def of_ranks(self, measure: Callable[[dict[str, Any]], float]) -> dict[int, list[float]]:
        """By pipeline rank one value per step: the largest of its ranks."""
        found: dict[int, list[float]] = {}
        for stage in sorted({one["stage"] for one in self.entries}):
            mine = [rank for rank, one in enumerate(self.entries) if one["stage"] == stage]
            found[stage] = [max(measure(step[rank]) for rank in mine) for step in self.steps]
        return found

    def rank_of(self, stage: int) -> int:
        """Pipeline rank of a virtual stage."""
        return stage_rank(stage, int(self.priced.assigned.pp), int(self.priced.assigned.schedule))

    def replay(self, passes: Passes) -> float:
        """Seconds of the pipeline if each pass took that long and nothing was sent."""
        layout = self.priced.assigned
        pp, v, m = int(layout.pp), int(layout.vpp), int(layout.num_microbatches)
        if pp == 1:
            return float(m * (passes["F"].sum() + passes["B"].sum()))
        return walked_time(int(layout.schedule), pp, v, m, (passes["F"], passes["B"], passes["W"]))


def result(task: Task, entries: Sequence[dict[str, Any]], verdict: Verdict | None) -> dict[str, Any]:
    """The validation as plain data, as far as the run came."""
    asked, run = task.asked, FullRun(task=task, entries=entries)
    before, after = (*run.pressure, None, None)[:2]
    parity = next((parity_of(one["parity"]) for one in entries if one["parity"]), None)
    outcome, failure = outcome_of(task, entries, verdict, parity)
    passes = _stages(run)
    traces = [{"what": f"measured, pipeline rank {one['stage']}", "file": one["trace"]} for one in entries if one.get("trace")]
    if task.trace and traces:
        path = task.trace.with_name(f"{task.trace.stem}.predicted{task.trace.suffix}")
        library.write_whole(path, trace_of(asked.priced()))
        traces.append({"what": "predicted", "file": str(path)})
    return {
        "trainer": asked.trainer.name, "layout": asked.layout.to_dict(), "num_gpus": int(asked.layout.num_gpus),
        "changes": [*asked.changes, *run.attention], "unchecked": list(asked.unchecked), "outcome": outcome, "failure": failure,
        "device": {
            "name": entries[0]["name"] if entries and not run.on_cpu else task.machine.name, "kind": task.machine.device,
            "ranks": asked.split.world, "hosts": sorted({one["host"] for one in entries}),
            "cores": task.machine.cores if run.on_cpu else None,
            "pressure": {"some_avg10": {"before": before, "after": after}} if run.on_cpu else None,
        },
        "steps": {"warm": task.warmup, "measured": len(run.steps), "seconds": run.step_seconds},
        "times": _times(run) if run.steps else [], "stages": passes, "as_run": _as_run(run, passes),
        "ranks": [_memory(run, one) for one in entries if "states" in one["memory"]],
        "rates": _rates(run), "parity": parity, "traces": traces,
        "limits": {
            "start_seconds": START, "setting_up_seconds": SETTING_UP, "step_seconds": task.step_seconds,
            "first_step_seconds": FIRST * task.step_seconds,
        },
    }  # fmt: skip


def _memory(run: FullRun, entry: dict[str, Any]) -> dict[str, Any]:
    """One rank as level meta writes it, with what the allocator holds and the device or the system has in use."""
    asked, seen, stage = run.task.asked, entry["memory"], entry["stage"]
    measured = {**seen["states"], **seen.get("held", {}), "peak": seen.get("peak", seen.get("allocated", 0))}
    found = rank_memory(asked, entry["rank"], stage, measured, seen.get("at_peak", {}))
    if "device" in seen:
        predicted = device_memory(asked, stage, alone=False)
        reserved, device = (memory_row(name, predicted[name], seen[name]) for name in ("reserved", "device"))
        bar = error_bar("memory", asked.trainer, asked.cluster.hardware, run.task.plan.kind())
        low, high = bar.interval(device["predicted_gib"])
        inside = None if run.not_compared else low <= device["measured_gib"] <= high
        found["memory"] += [reserved, {**device, "interval": [low, high], "inside": inside}]
    if "resident" in seen:
        row = {"what": "resident", "predicted_gib": None, "measured_gib": seen["resident"] / GIB}
        found["memory"].append({**row, "error": None, "bound": None, "inside": None})
    return found


def _as_run(run: FullRun, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What it was priced as; None where the plan's own prediction stands."""
    if not run.plain or not run.steps or run.not_compared:
        return None
    slowed, update_slowed = (
        [one[name] for step in run.steps for one in step if one.get(name)] for name in ("slowed", "update_slowed")
    )
    eager = EagerRun(
        asked=run.task.asked, priced=run.priced, on_cpu=run.on_cpu, not_compiled=run.not_compiled, host=run.host,
        slowed=slowed, update_slowed=update_slowed,
    )  # fmt: skip
    return notes_of(eager, rows)


def _rates(run: FullRun) -> dict[str, Any] | None:
    """Throughput of the job, MFU, loss of the first and the last measured step."""
    if not run.steps:
        return None
    loss = losses_of(run.entries)
    predicted = None if run.not_by_wall or run.by_host else run.step_range[0]
    return rates(
        run.priced.estimate, run.task.asked.split.world, predicted, statistics.median(run.step_seconds),
        loss if all(math.isfinite(one) for one in loss) else None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ times


def _row(
    run: FullRun, what: str, predicted: float | None, values: Sequence[float], note: str = ""
) -> dict[str, Any]:
    """One compared time, of the core or of the GPU's stream."""
    currency, note = "processor" if run.on_cpu else "device", run.not_compared or note
    return measured_row(what, None if run.not_compared else predicted, values, currency=currency, note=note)


def _passes(step: dict[str, Any], clock: int = BUSY) -> float:
    return sum(one["total"][clock] for one in step["actions"] if one["kind"] != "W")  # B has all of the backward pass


def _update(step: dict[str, Any]) -> float:
    return sum(step[name][BUSY] for name in UPDATE if name in step)


def _between(step: dict[str, Any]) -> float:
    """Wall seconds between the passes of a step."""
    return max(step["passes"][WALL] - _passes(step, WALL), 0.0)


def _times(run: FullRun) -> list[dict[str, Any]]:
    """The rows of the table of times: by processor time or by events of the stream; waiting on a CPU only where it is quiet."""
    step, low, high = run.step_range
    passes, time = run.of_ranks(_passes), run.prediction.time_s
    slowest = max(passes, key=lambda rank: statistics.median(passes[rank]))
    update = max(run.of_ranks(_update).values(), key=statistics.median)
    if run.on_cpu:
        mine = [i for i in range(len(run.passes["F"])) if run.rank_of(i) == slowest]
        expected = int(run.priced.assigned.num_microbatches) * float((run.passes["F"] + run.passes["B"])[mine].sum())
    else:
        expected = sum(time[one] for one in ("compute", "recompute", "host", *list(EXPOSED.values())[:3]))
    rows = [
        measured_row(
            "step", None if run.not_compared else step, run.step_seconds, currency="wall" if run.on_cpu else "device",
            note=run.not_by_wall or run.by_host, interval=None if run.not_compared else (low, high),
        ),
        _row(run, "forward_backward", expected, passes[slowest], run.by_host), _row(run, "optimizer", run.update, update),
    ]  # fmt: skip
    bubble, between = time["bubble"] + time["pipeline_communication"], run.of_ranks(_between)[slowest]
    if not run.on_cpu:
        traced = (one["exposed"] for one in run.entries if one["stage"] == slowest and one.get("exposed"))
        exposed = [(kind, seconds) for kind, seconds in next(traced, {}).items() if kind in EXPOSED]
        rows.append(_row(run, "pipeline_bubble", bubble, between))
        return rows + [_row(run, f"exposed {kind}", time[EXPOSED[kind]], [seconds]) for kind, seconds in exposed]
    replayed = _replayed(run) + statistics.median(update)
    note, whole = run.not_compared, run.replay(run.passes) + run.update
    rows.append(time_row("replayed_step", None if note else whole, replayed, currency="processor", note=note))
    if not run.not_by_wall:
        inside = run.of_ranks(lambda step: step["waited"])[slowest]
        exposed_in_passes = sum(time[EXPOSED[kind]] for kind in ("tensor", "context", "expert", "data"))
        rows.append(measured_row("exposed in passes", exposed_in_passes, inside, currency="wall"))
        rows.append(measured_row("pipeline_bubble", bubble, between, currency="wall"))
    return rows


def _replayed(run: FullRun) -> float:
    """The schedule walked with the measured passes."""
    found = {kind: np.zeros_like(seconds) for kind, seconds in run.passes.items()}
    for (stage, kind), values in run.measured.items():
        found[kind][stage] = statistics.median(values)
    return run.replay(found)


def _stages(run: FullRun) -> list[dict[str, Any]]:
    """A row for each virtual stage and kind of pass: seconds of one microbatch, the median of its steps and ranks."""
    found = []
    for (stage, kind), values in sorted(run.measured.items()):
        bound = run.by_host if (stage, kind) in run.host_bound else ""
        row = _row(run, kind, float(run.passes[kind][stage]), values, bound)
        if bound:
            row["busy"] = run.host_bound[stage, kind]
        found.append({"rank": run.rank_of(stage), "stage": stage, "kind": row.pop("what"), **row})
    return found

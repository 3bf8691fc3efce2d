"""What the ranks of level ``full`` left, as the content of validation.yaml: outcome, times, memory, rates. No torch here."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from planner.error_bars import error_bar
from planner.lab.launch.watch import Verdict
from planner.lab.run.as_run import EagerRun, notes_of
from planner.lab.run.comparison import device_memory, memory_row, rank_memory
from planner.lab.run.full_times import FullRun, stages, times
from planner.lab.run.levels import LONGER, Task
from planner.lab.run.record import rates
from planner.units import GIB

OUTCOME = {
    "died": "lost_rank", "store": "lost_rank", "hung": "hung", "link": "hung", "interrupted": "interrupted",
    "error": "failed", "said": "failed", "stopped": "failed",
}  # fmt: skip
"""Kind of a verdict -> outcome."""


def result(task: Task, entries: Sequence[dict[str, Any]], verdict: Verdict | None) -> dict[str, Any]:
    """The validation as plain data, as far as the run came."""
    asked = task.asked
    waits = [one["pressure"] for one in entries if one["rank"] == 0]
    before, after = (waits[0][0], waits[0][-1] if len(waits[0]) > 1 else None) if waits else (None, None)
    run = FullRun(task=task, entries=entries, pressure=(before, after))
    parity = next((_parity(one["parity"]) for one in entries if one["parity"]), None)
    outcome, failure = _outcome(entries, verdict, parity)
    passes = stages(run)
    return {
        "trainer": asked.trainer.name, "layout": asked.layout.to_dict(), "num_gpus": int(asked.layout.num_gpus),
        "changes": list(asked.changes), "outcome": outcome, "failure": failure,
        "device": {
            "name": entries[0]["name"] if entries and not run.on_cpu else task.machine.name, "kind": task.machine.device,
            "ranks": asked.split.world, "hosts": sorted({one["host"] for one in entries}),
            "cores": task.machine.cores if run.on_cpu else None,
            "pressure": {"some_avg10": {"before": before, "after": after}} if run.on_cpu else None,
        },
        "steps": {"warm": task.warmup, "measured": len(run.steps), "seconds": run.step_seconds},
        "times": times(run), "stages": passes, "as_run": _as_run(run, passes),
        "ranks": [_memory(run, one) for one in entries if "states" in one["memory"]],
        "rates": _rates(run), "parity": parity,
        "traces": [
            {"what": f"measured, pipeline rank {one['stage']}", "file": one["trace"]} for one in entries if one.get("trace")
        ],
    }  # fmt: skip


def _parity(found: dict[str, Any]) -> dict[str, Any]:
    """The comparison in fp64, and under ``rounded`` that in bf16 where the plan's passes are (None: not made)."""
    rounded = found.get("rounded")
    return {
        "compared_parameters": found["parameters"], "compared_values": found["values"],
        "largest_error": max(found["parameter_error"], found["loss_and_norm_error"]), "tolerance": found["tolerance"],
        "precision": found.get("precision", "fp64"), "equal": found["equal"] and (rounded is None or rounded["equal"]),
        "rounded": None if rounded is None else {k: v for k, v in _parity(rounded).items() if k != "rounded"},
    }  # fmt: skip


def _outcome(
    entries: Sequence[dict[str, Any]], verdict: Verdict | None, parity: dict[str, Any] | None
) -> tuple[str, dict[str, Any] | None]:
    """How it ended, and what is known of a failure: rank, phase, sentence, GiB allocated on that rank."""
    if verdict is None:
        if parity is None or parity["equal"]:
            return _numbers(entries)
        worst = parity["rounded"] or parity
        sentence = (
            f"a tiny model with the plan's degrees does not train like one process: error {worst['largest_error']:.1e} in "
            f"{worst['precision']}, {worst['tolerance']:.1g} is allowed; nothing was timed"
        )
        return "not_equal", {"rank": None, "phase": "parity", "sentence": sentence, "allocated_gib": None}
    outcome = "out_of_memory" if verdict.facts.get("out_of_memory") else OUTCOME[verdict.kind]
    memory: dict[str, float] = next((one["memory"] for one in entries if one["rank"] == verdict.rank), {})
    known = memory.get("allocated", memory.get("peak"))
    allocated = verdict.facts.get("allocated_gib", None if known is None else known / GIB)
    more = LONGER.format(what="a step") if outcome == "hung" else ""
    return outcome, {
        "rank": verdict.rank if verdict.rank >= 0 else None, "phase": verdict.phase, "sentence": verdict.sentence + more,
        "allocated_gib": allocated,
    }  # fmt: skip


def _numbers(entries: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any] | None]:
    """A run whose loss is no number does not train, however fast it is."""
    losses = _losses(entries)
    if all(math.isfinite(one) for one in losses):
        return "completed", None
    sentence = (
        f"the loss is {losses[0]} in the first and {losses[-1]} in the last measured step: the run does not train, and its times "
        "are those of other numbers"
    )
    return "failed", {"rank": None, "phase": "the measured steps", "sentence": sentence, "allocated_gib": None}


def _losses(entries: Sequence[dict[str, Any]]) -> list[float]:
    """Of the first and of the last measured step."""
    return next((one["loss"] for one in entries if one["loss"]), [])


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
    loss = _losses(run.entries)
    predicted = None if run.not_compared else run.step_range[0]
    return rates(
        run.priced.estimate, run.task.asked.split.world, predicted, statistics.median(run.step_seconds),
        loss if all(math.isfinite(one) for one in loss) else None,
    )  # fmt: skip

"""How a run on all ranks ended, and what its comparison with one process said, as a record has them. No torch here."""

import math
from collections.abc import Sequence
from typing import Any

from planner.lab.launch.watch import Verdict
from planner.lab.run.levels import Task, longer
from planner.units import GIB

OUTCOME = {
    "died": "lost_rank", "store": "lost_rank", "hung": "hung", "link": "hung", "interrupted": "interrupted",
    "error": "failed", "said": "failed", "stopped": "failed",
}  # fmt: skip
"""Kind of a verdict -> outcome."""


def parity_of(found: dict[str, Any]) -> dict[str, Any]:
    """The comparison in fp64, and under ``rounded`` that in bf16 where the plan's passes are (None: not made)."""
    rounded = found.get("rounded")
    return {
        "compared_parameters": found["parameters"], "compared_values": found["values"],
        "largest_error": found["parameter_error"], "tolerance": found["tolerance"],
        **{name: found[name] for name in ("loss_error", "loss_tolerance", "norm_error", "norm_tolerance", "why")},
        "precision": found.get("precision", "fp64"), "equal": found["equal"] and (rounded is None or rounded["equal"]),
        "rounded": None if rounded is None else {k: v for k, v in parity_of(rounded).items() if k != "rounded"},
    }  # fmt: skip


def outcome_of(
    task: Task, entries: Sequence[dict[str, Any]], verdict: Verdict | None, parity: dict[str, Any] | None
) -> tuple[str, dict[str, Any] | None]:
    """How it ended, and what is known of a failure: rank, phase, sentence, GiB allocated on that rank."""
    if verdict is not None:
        outcome = "out_of_memory" if verdict.facts.get("out_of_memory") else OUTCOME[verdict.kind]
        memory: dict[str, float] = next((one["memory"] for one in entries if one["rank"] == verdict.rank), {})
        known = memory.get("allocated", memory.get("peak"))
        return outcome, {
            "rank": verdict.rank if verdict.rank >= 0 else None, "phase": verdict.phase,
            "sentence": verdict.sentence + (longer(task) if outcome == "hung" else ""),
            "allocated_gib": verdict.facts.get("allocated_gib", None if known is None else known / GIB),
        }  # fmt: skip
    losses = losses_of(entries)
    if parity is not None and not parity["equal"]:
        worst, outcome, phase = parity["rounded"] or parity, "not_equal", "parity"
        sentence = (
            f"a tiny model with the plan's degrees does not train like one process: {worst['why']}; nothing was timed"
        )
    elif not all(math.isfinite(one) for one in losses):
        outcome, phase = "failed", "the measured steps"
        sentence = (
            f"the loss is {losses[0]} in the first and {losses[-1]} in the last measured step: the run does not train, and its "
            "times are those of other numbers"
        )
    else:
        return "completed", None
    return outcome, {"rank": None, "phase": phase, "sentence": sentence, "allocated_gib": None}


def losses_of(entries: Sequence[dict[str, Any]]) -> list[float]:
    """Of the first and of the last measured step."""
    return next((one["loss"] for one in entries if one["loss"]), [])

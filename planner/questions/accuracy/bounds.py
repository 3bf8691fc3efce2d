"""What the project promises about its accuracy on the runs that come with it, and whether it holds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.error_bars import FINE_TUNING, held_by_kind
from planner.record import record

Summary = Mapping[str, Any]


@record
class Bound:
    """One figure of the summary and what it shall be."""

    name: str
    least: float | None = None
    most: float | None = None
    digits: str = "%"
    """'%' a share, '.2f' a number."""
    now: Callable[[Summary], float | None]


def _share(part: str, whole: str) -> Callable[[Summary], float | None]:
    def now(summary: Summary) -> float | None:
        verdicts = summary["out_of_memory"]["overall"]
        return float(verdicts[part] / verdicts[whole]) if verdicts[whole] else None

    return now


def _tuning(key: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary["kinds"].get(FINE_TUNING, {}).get("memory", {}).get(key)


BOUNDS = (
    Bound(name="step time, mean over sources", most=0.08, now=lambda one: one["mean_of_sources"]),
    Bound(name="step time, median over runs", most=0.05, now=lambda one: one["overall"].get("median_abs")),
    Bound(name="step time, nine of ten runs below", most=0.16, now=lambda one: one["overall"].get("p90_abs")),
    Bound(name="memory, mean over sources", most=0.10, now=lambda one: one["all_kinds"]["memory"]["mean_of_sources"]),
    Bound(name="memory of fine-tuning, median over runs", most=0.08, now=_tuning("median_abs")),
    Bound(name="memory of fine-tuning, mean over sources", most=0.10, now=_tuning("mean_of_sources")),
    Bound(name="ran, called impossible", most=0.03, now=_share("called_impossible_but_ran", "ran")),
    Bound(name="ran out, called safe", most=0.005, now=_share("called_safe_but_ran_out", "ran_out")),
    Bound(name="interval of the step time", least=0.88, most=0.94, now=lambda _: held_by_kind("step_time")["sources"]),
    Bound(name="interval of memory", least=0.88, most=0.94, now=lambda _: held_by_kind("memory")["sources"]),
    Bound(name="predicted of the runs that state their layout", least=0.97,
          now=lambda one: one["coverage"]["predicted_of_stated"]),
    Bound(name="regret of the pick", most=0.03, now=lambda one: one["ranking"]["overall"]["mean_pick_regret"]),
    Bound(name="Kendall's tau, pairs 3 % apart", least=0.82, digits=".2f",
          now=lambda one: one["ranking"]["overall"]["mean_tau_apart"]),
    Bound(name="picks that ran out", most=0.0, digits=".0f",
          now=lambda one: float(one["ranking"]["overall"]["picks_that_ran_out"])),
)  # fmt: skip


GENERIC = (
    Bound(name="step time, median over runs, without recipes", most=0.09, now=lambda one: one["overall"].get("median_abs")),
)  # fmt: skip
"""What shall hold when a row's framework is known by its name alone."""


def bounds(summary: Summary, listed: Sequence[Bound] = BOUNDS) -> list[dict[str, Any]]:
    """``{name, least, most, now, met, digits}`` of every bound; ``now`` and ``met`` are None where no run tells.

    The intervals are those of runs whose whole campaign was left out: they are counted by tools/update_accuracy.py, and read here.
    """
    found = []
    for one in listed:
        now = one.now(summary)
        low, high = one.least if one.least is not None else -1.0, one.most if one.most is not None else float("inf")
        said = {"name": one.name, "least": one.least, "most": one.most, "digits": one.digits, "now": now}
        found.append({**said, "met": None if now is None else low <= now <= high})
    return found

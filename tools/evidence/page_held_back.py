"""The section of the accuracy page on sources that were left out: does it hold for what was never seen?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.questions.accuracy.numbers import Pair, Table
from planner.questions.accuracy.page import markdown
from planner.questions.accuracy.prediction import grouped
from planner.questions.accuracy.summary import mean_of_sources, statistics
from planner.questions.accuracy.tables import percent
from planner.questions.calibrate import constants
from planner.questions.calibrate.held_back import LeftOut


def held_back_section(
    pairs: Sequence[Pair], held: Sequence[Pair], left: Sequence[LeftOut], proofs: Mapping[str, Mapping[str, Any]]
) -> str:
    """Markdown: error bars on held-back sources, medians without calibration on the own source, the free constants.

    ``held`` are the same runs as ``pairs``, predicted with constants that their own source had no part in; ``proofs`` is
    by quantity what ``bars.calibrated`` found.
    """
    return "\n\n".join([
        "## Sources left out", _BARS, markdown(_bars(proofs)), f"Step time by kind of run: {_kinds(proofs)}.",
        "### Errors when no constant was calibrated on the own source", _headline(pairs, held), markdown(_families(pairs, held)),
        "### The free constants", _count(pairs), markdown(_constants(left)),
    ])  # fmt: skip


_BARS = (
    "The interval that `plan` prints shall hold nine of ten runs of its kind. Every source is left out in turn: constants "
    "that were calibrated on it are fitted again without it (or fall back to their default), the bars are made from the other "
    "sources, and the share of its runs that they hold is counted. Where that share stays below 90 %, all bars are stretched in "
    "the logarithm until it does not."
)


def _bars(proofs: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = tuple(
        (quantity.replace("_", " "), str(one["n"]), percent(one["runs"]), percent(one["sources"]), f"{one['widen']:.2f}",
         f"{one['width']:.2f}")
        for quantity, one in proofs.items()
    )  # fmt: skip
    headings = ("", "runs", "held, of all runs", "held, mean over sources", "stretch", "high / low, median")
    return Table(title="", headings=headings, rows=rows)


def _kinds(proofs: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(f"{kind} {percent(share)}" for kind, share in proofs["step_time"]["by_kind"].items())


def _headline(pairs: Sequence[Pair], held: Sequence[Pair]) -> str:
    good = [[pair for pair in which if pair.counts] for which in (pairs, held)]
    seen, unseen = (statistics(which, "time_error") for which in good)
    apart = [mean_of_sources(which, "time_error") for which in good]
    rise = unseen["median_abs"] / seen["median_abs"] - 1.0
    return (
        f"Median over {seen['n']:,} runs: {percent(seen['median_abs'])} as shipped, {percent(unseen['median_abs'])} when each "
        f"source is predicted without itself ({percent(rise, signed=True)}); mean over sources {percent(apart[0])} and "
        f"{percent(apart[1])}. Families that move:"
    )


def _families(pairs: Sequence[Pair], held: Sequence[Pair]) -> Table:
    rows = []
    unseen = grouped(held, lambda pair: pair.run.family)
    for family, members in grouped(pairs, lambda pair: pair.run.family).items():
        one, other = statistics(members, "time_error"), statistics(unseen[family], "time_error")
        if one["n"] and abs(one["median_abs"] - other["median_abs"]) > 5e-4:
            rows.append((family, str(one["n"]), percent(one["median_abs"]), percent(other["median_abs"])))
    return Table(title="", headings=("", "runs", "median error", "own source left out"), rows=tuple(rows))


def _count(pairs: Sequence[Pair]) -> str:
    listed = constants()
    return (
        f"{len(listed)} constants were calibrated on published runs, against {len(pairs):,} runs "
        f"({sum(pair.time_error is not None for pair in pairs):,} with a step time); all others are derived, read in code, "
        "or measured on kernels and collectives (`profiles/calibrated.yaml`)."
    )


def _constants(left: Sequence[LeftOut]) -> Table:
    rows = []
    for one in constants():
        without = [(out.source, out.refits[one.name]) for out in left if one.name in out.refits]
        values = "; ".join(f"{refit.value:.3g} without {source}" for source, refit in without)
        rows.append((one.name, f"{one.value:.3g}", f"{one.default:.3g}", values))
    return Table(title="", headings=("constant", "value", "default", "with a source left out"), rows=tuple(rows))

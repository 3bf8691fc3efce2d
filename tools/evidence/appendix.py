"""docs/accuracy-appendix.md: all tables of the evidence.

The page of ``plan accuracy --page``, then other predictors, campaigns left out, what is known about rows, bounds not reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.error_bars import KINDS
from planner.questions.accuracy.accuracy_page import Table, bounds_table, markdown, page, percent
from planner.questions.accuracy.prediction import Pair, grouped
from planner.questions.accuracy.summary import mean_of_sources, statistics
from tools.evidence.constants import constants
from tools.evidence.held_back import LeftOut

Proofs = Mapping[str, Mapping[str, Any]]
"""By quantity, what ``bars.coverage`` found."""


def appendix(
    pairs: Sequence[Pair],
    summary: Mapping[str, Any],
    held: Sequence[Pair],
    left: Sequence[LeftOut],
    proofs: Proofs,
    notes: Mapping[str, Any],
) -> str:
    """Markdown. ``held`` are the same runs as ``pairs``, predicted with constants that their own campaign had no part in."""
    text = page(pairs, summary, "accuracy.png")
    text = text.replace(
        "# Accuracy: predicted against measured", "# Accuracy: all tables\n\nThe summary is [accuracy.md](accuracy.md)."
    )
    return "\n\n".join([
        text.strip(), peers_section(notes["peers"], summary), held_back_section(pairs, held, left, proofs),
        "## What is known about rows that are far off", markdown(_table(notes["rows"], "source", "rows", "why")),
        "## Bounds that were not reached", markdown(_table(unmet(summary, notes), "what", "asked", "reached", "floor", "proof")),
    ]) + "\n"  # fmt: skip


def unmet(summary: Mapping[str, Any], notes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Bounds that are not met, each with what the notes say of it: ``what``, ``asked``, ``reached``, ``short``, ``floor``, ``proof``."""
    known = {one["bound"]: one for one in notes["limits"]}
    found = []
    for bound, row in zip(summary["bounds"], bounds_table(summary["bounds"]).rows, strict=True):
        if bound["met"] is False:
            said = {key: known.get(bound["name"], {}).get(key, "not known") for key in ("short", "floor", "proof")}
            found.append({"what": row[0], "asked": row[1], "reached": row[2], **{k: " ".join(str(v).split()) for k, v in said.items()}})
    return found


def _table(entries: Sequence[Mapping[str, str]], *keys: str) -> Table:
    """Entries of the notes as a table, one column for each key."""
    return Table(
        title="", headings=keys, rows=tuple(tuple(" ".join(str(one[key]).split()) for key in keys) for one in entries)
    )


def peers_section(peers: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Published predictors on the same runs, and ours."""
    overall, families = summary["overall"], summary["families"]
    ours = ("planner", f"{overall['n']:,}", percent(overall["median_abs"]), percent(overall["within_10"]))
    rows = (*(tuple(map(str, row)) for row in peers["rows"]), ours)
    best = tuple(
        (name, f"{value} %", percent(families[name]["median_abs"]))
        for name, value in peers["families"].items() if name in families
    )  # fmt: skip
    return "\n\n".join([
        "## Other predictors on the same runs", peers["text"].strip(),
        markdown(Table(tuple(peers["headings"]), rows)),
        markdown(Table(("family", "best of these", "planner"), best)),
    ])  # fmt: skip


def held_back_section(pairs: Sequence[Pair], held: Sequence[Pair], left: Sequence[LeftOut], proofs: Proofs) -> str:
    """Error bars on held-back campaigns, medians without calibration on the own campaign, the free constants."""
    return "\n\n".join([
        "## Campaigns left out", _BARS, markdown(_bars(proofs)),
        "### Errors when no constant was calibrated on the own campaign", left_out(pairs, held) + " Families that move:",
        markdown(_families(pairs, held)), "### The free constants", _count(pairs), markdown(_constants(left)),
    ])  # fmt: skip


_BARS = (
    "The interval that `plan` prints shall hold nine of ten runs of its kind. A campaign is all that one paper or repository "
    "published. Every campaign is left out in turn: constants that were calibrated on it are fitted again without it (or fall back "
    "to their default), the bars are made from the other campaigns, and the share of its runs that they hold is counted."
)


def _bars(proofs: Proofs) -> Table:
    rows = [
        (quantity.replace("_", " "), str(one["n"]), percent(one["sources"]), percent(one["campaigns"]), percent(one["runs"]),
         *(percent(one["by_kind"].get(kind)) for kind in KINDS), f"{one['narrowest']:.2f}", f"{one['width']:.2f}", f"{one['widest']:.2f}")
        for quantity, one in proofs.items()
    ]  # fmt: skip
    held = ("held, mean over sources", "over campaigns", "of all runs", *KINDS)
    return Table(("", "runs", *held, "high / low, narrowest", "median", "widest"), tuple(rows))


def left_out(pairs: Sequence[Pair], held: Sequence[Pair]) -> str:
    """What the errors are when no constant was calibrated on the own campaign, in a sentence."""
    good = [[pair for pair in which if pair.counts] for which in (pairs, held)]
    seen, unseen = (statistics(which, "time_error") for which in good)
    apart = [mean_of_sources(which, "time_error") for which in good]
    rise = unseen["median_abs"] / seen["median_abs"] - 1.0
    return (
        f"Median over {seen['n']:,} runs: {percent(seen['median_abs'])} as shipped, {percent(unseen['median_abs'])} when each "
        f"campaign is predicted without itself ({percent(rise, signed=True)}); mean over sources {percent(apart[0])} and "
        f"{percent(apart[1])}."
    )


def _families(pairs: Sequence[Pair], held: Sequence[Pair]) -> Table:
    rows = []
    unseen = grouped(held, lambda pair: pair.run.family)
    for family, members in grouped(pairs, lambda pair: pair.run.family).items():
        one, other = statistics(members, "time_error"), statistics(unseen[family], "time_error")
        if one["n"] and abs(one["median_abs"] - other["median_abs"]) > 5e-4:
            rows.append((family, str(one["n"]), percent(one["median_abs"]), percent(other["median_abs"])))
    return Table(("", "runs", "median error", "own campaign left out"), tuple(rows))


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
        without = [(out.campaign, out.refits[one.name]) for out in left if one.name in out.refits]
        values = "; ".join(f"{refit.value:.3g} without {campaign}" for campaign, refit in without)
        rows.append((one.name, f"{one.value:.3g}", f"{one.default:.3g}", values))
    return Table(("constant", "value", "default", "with a campaign left out"), tuple(rows))

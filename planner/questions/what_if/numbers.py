"""What if: the same job with one thing changed, and the least or the most that still does the job; asked as a user writes it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from planner import library, units
from planner.costs import LEFT_OUT
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.hardware.names import profile_named
from planner.keywords import flag_of
from planner.questions.what_if.changed_rows import Pricing, Row, row_of
from planner.questions.what_if.changes import INPUTS, Value, Variant, apply, base_variant, read_values
from planner.questions.what_if.cheapest import by_cost, cheapest
from planner.questions.what_if.inverse import Goal, Question, fewest_gpus, largest_batch, longest_sequence
from planner.record import record
from planner.search import Pins
from planner.trainer_options import read_options

SINGLE: dict[str, Callable[[Question], Row]] = {
    "fewest_gpus": fewest_gpus, "longest_sequence": longest_sequence, "largest_batch": largest_batch,
}  # fmt: skip
"""Questions with one answer."""
QUESTIONS = (*SINGLE, "cheapest")
OWN_NUMBERS = ("gpus", "sequence_length", "global_batch_size")
"""Flags whose number the base has too: it is a point of the sweep."""


@record
class Asked:
    """Everything that was asked."""

    resolved: ResolvedJob
    """The job as it is."""
    base: Variant
    variants: tuple[Variant, ...]
    """The changes, one each."""
    pins: Pins
    pricing: Pricing
    goal: Goal
    questions: tuple[str, ...]
    """Of QUESTIONS."""
    candidates: tuple[str, ...]
    """Hardware that ``cheapest`` looks at."""
    named: bool = False
    """It was named: all of it is searched."""

    @property
    def sweeps(self) -> dict[str, dict[float, int]]:
        """Flags that have two numbers or more, the base's included: each number with the place of its row."""
        found: dict[str, dict[float, int]] = {}
        for place, one in enumerate(self.variants, 1):
            if len(one.changed) == 1 and one.number is not None:
                flag = one.changed[0]
                own = {float(getattr(self.base.request, INPUTS[flag].field)): 0} if flag in OWN_NUMBERS else {}
                found.setdefault(flag, own)[one.number] = place
        return {flag: points for flag, points in found.items() if len(points) >= 2}


@record
class WhatIf:
    """The answers."""

    asked: Asked
    rows: tuple[Row, ...]
    """The base's, one per change, then the answers to the questions."""
    complete: bool
    """False = interrupted."""

    @property
    def warning(self) -> str:
        """A sentence where the rows' prices are of different kinds: then the order may be that of the price lists; else ''."""
        prices = [row.rates.price for row in self.rows if row.rates is not None and (row.fits or not row.searched)]
        sources = {(one.source, one.date) for one in prices if one is not None}
        if len(sources) < 2:
            return ""
        return (
            f"Prices come from {len(sources)} lists of different kinds and dates (below), which differ by a factor of 2 to 3 "
            "for the same GPU: compare kinds of hardware with your own, --price NAME=USD."
        )

    def sweeps(self, least: int) -> dict[str, list[tuple[float, Row]]]:
        """Rows of flags with ``least`` numbers or more, the base's included, in the order of the numbers."""
        known = {flag: [one for one in sorted(points.items()) if one[1] < len(self.rows)]
                 for flag, points in self.asked.sweeps.items()}  # fmt: skip
        return {flag: [(n, self.rows[at]) for n, at in some] for flag, some in known.items() if len(some) >= least}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        resolved = self.asked.resolved
        return {
            "workload": resolved.job.workload.to_dict(),
            "cluster": {"hardware": resolved.hardware, "num_gpus": resolved.job.cluster.num_gpus},
            "trainer": resolved.trainer,
            "assumptions": [vars(one) for one in resolved.assumptions],
            "rows": [row.to_dict() for row in self.rows],
            "rates": {
                row.hardware: [vars(one) for one in row.rates.basis]
                for row in self.rows
                if row.rates is not None and (row.fits or not row.searched)
            },
            "left_out": list(LEFT_OUT),
            "warning": self.warning,
            "complete": self.complete,
        }


def what_if(asked: Asked, progress: Callable[[str], None] = lambda _: None) -> WhatIf:
    """Search the base, every change, and what the questions need; Ctrl-C leaves what was found, ``complete`` False."""
    rows: list[Row] = []
    kept: list[Row] = []
    try:
        for row in _answers(asked, progress, kept.append):
            rows.append(row)
            kept.clear()
    except KeyboardInterrupt:
        rows += [dataclasses.replace(one, label=f"{one.label} so far") for one in kept[-1:]]
        return WhatIf(asked=asked, rows=tuple(rows), complete=False)
    return WhatIf(asked=asked, rows=tuple(rows), complete=True)


def _answers(asked: Asked, say: Callable[[str], None], keep: Callable[[Row], None]) -> Iterator[Row]:
    """The rows one after the other; ``keep`` gets the best answer to a question so far."""
    say("the job as it is")
    first, row = row_of(asked.base, None, asked.pins, asked.pricing)
    yield row
    ask = Question(
        base=asked.base, first=first, pins=asked.pins, pricing=asked.pricing, goal=asked.goal, say=say, keep=keep,
        free_batch=any(one.what == "global batch" for one in asked.resolved.assumptions),
    )  # fmt: skip
    for variant in asked.variants:
        yield ask.row(variant)[1]
    for name, answer in SINGLE.items():
        if name in asked.questions:
            yield answer(ask)
    found: list[Row] = []
    try:
        found.extend(cheapest(ask, asked.candidates, asked.named))
    finally:  # also those that were found before Ctrl-C
        yield from by_cost(ask.goal, found)


def ask(resolved: ResolvedJob | None, flags: Mapping[str, Any], pins: Mapping[str, int] | None = None) -> Asked:
    """What flags ask of a job: texts by name of INPUTS (several each) and the further flags of the command; those not given
    are None, False or missing. Without a job the first text of each input describes it. ``pins``: fields of the layout that
    hold for every row. Raises PlannerError with the sentence for what cannot be read."""
    values = {name: read_values(name, flags[name]) for name in INPUTS if flags.get(name)}
    tokens, budget = (
        None if flags.get(name) is None else units.parse_amount(flags[name], what=flag_of(name)) for name in ("tokens", "budget")
    )
    goal = Goal(tokens=tokens, days=flags.get("days"), budget=budget)
    questions = tuple(name for name in QUESTIONS if flags.get(name))
    if (goal.days is not None or goal.budget is not None) and not {"fewest_gpus", "cheapest"} & set(questions):
        raise PlannerError("--days and --budget ask for something: add --fewest-gpus or --cheapest")
    changes = [one for found in values.values() for one in found]
    if resolved is None:
        resolved, changes = _job_of(values)
    base = base_variant(resolved)
    candidates: tuple[str, ...] = ()
    named: list[str] = []
    if "cheapest" in questions:
        named = [one.text for one in changes if one.flag == "hardware"]
        changes = [one for one in changes if one.flag != "hardware"]
        candidates = tuple(dict.fromkeys([resolved.hardware, *(named or _priced(flags))]))
    variants = [apply(base, one) for one in changes]
    if flags.get("together"):
        first = {one.flag: one for one in reversed(changes)}
        if len(first) < 2:
            raise PlannerError("--together needs changes of two flags or more")
        variants.append(reduce(apply, [first[name] for name in INPUTS if name in first], base))
    if not variants and not questions:
        raise PlannerError(
            "nothing to change: give a change such as --network x2, several values such as --gpus 64,128 or 64..4096, or a "
            f"question: {', '.join(flag_of(name) for name in QUESTIONS)}"
        )
    return Asked(
        resolved=resolved, base=base, variants=tuple(variants), pins=Pins(values=dict(pins or {})), goal=goal,
        questions=questions, pricing=_pricing(flags, tokens), candidates=candidates, named=bool(named),
    )  # fmt: skip


def _job_of(values: Mapping[str, Sequence[Value]]) -> tuple[ResolvedJob, list[Value]]:
    """The first value of each input of the job describes the base; factors and further values are changes."""
    said: dict[str, Any] = {}
    changes: list[Value] = []
    for flag, (first, *rest) in values.items():
        one = INPUTS[flag]
        if not one.field or first.factor is not None:
            rest = [first, *rest]
        else:
            text = read_options(first.text) if flag == "options" else first.text
            said[one.field] = text if first.number is None else first.number
        changes += rest
    for field, flag in (("model", "--model"), ("num_gpus", "--gpus")):
        if field not in said:
            raise PlannerError(f"which job? {flag} is missing: give a plan file, or at least --model and --gpus")
    return resolve(Request(**said)), changes


def _pricing(flags: Mapping[str, Any], tokens: float | None) -> Pricing:
    prices: dict[str, float] = {}
    for text in flags.get("price") or ():
        name, _, amount = text.rpartition("=")
        try:
            value = float(amount.strip().removeprefix("$"))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise PlannerError(f"--price: '{text}' is not dollars per GPU-hour above 0; write 2.5 or h100-sxm=2.5")
        prices[name and profile_named(name)] = value
    said = {name: flags[name] for name in ("power_share", "pue") if flags.get(name) is not None}
    return Pricing(price=prices.pop("", None), prices=prices, tokens=tokens, **said)


def _priced(flags: Mapping[str, Any]) -> list[str]:
    """All hardware of the library whose price is known."""
    given = {name and profile_named(name) for name in (text.rpartition("=")[0] for text in flags.get("price") or ())}
    return [name for name in library.names("hardware") if name in given or load_hardware(name).prices]

"""The cheapest hardware: cards by what they cost at the least, searched as long as one may cost less than those before it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from planner.costs import usd_per_million_tokens
from planner.defaults import ResolvedJob
from planner.errors import PlannerError
from planner.priced_layouts import SearchedJob
from planner.questions.best_plan import best_of
from planner.questions.what_if.changed_rows import Row, priced_row, row_asked, row_of
from planner.questions.what_if.changes import Value, Variant, apply
from planner.questions.what_if.inverse import Goal, Question, fewest_gpus
from planner.record import record
from planner.rules import check_workload
from planner.search import least_fitting_step, least_step


def cheapest(ask: Question, names: Sequence[str], every: bool) -> Iterator[Row]:
    """One row per kind of hardware, also of those that the job cannot run on, with the reason: with a deadline on the fewest
    GPUs that meet it, else on the job's number of GPUs.

    Unless ``every`` one is asked for, those that cannot be the cheapest are not searched: their computation alone costs as much as
    the cheapest that was found, or with what passes wait for, or their fastest layout without memory options does. Their rows say
    what they cost at the least. Bounds are made closer, and cards searched, from the lowest bound on.
    """
    bounded = not every and ask.goal.days is None
    cards = [_Card.of(ask, name) if bounded else _Card(name=name) for name in names]
    waiting = [(card.least, number, card) for number, card in enumerate(cards)]
    heapify(waiting)
    lowest, done = math.inf, 0
    while waiting:
        _, number, card = heappop(waiting)
        if card.vague and card.least < lowest < math.inf:
            card = card.closer(ask)
            heappush(waiting, (card.least, number, card))
            continue
        done += 1
        row = _answer(ask, card, lowest if bounded else math.inf, f"{card.name}, {done} of {len(names)}")
        if row.usd_per_million_tokens is not None:
            lowest = min(lowest, row.usd_per_million_tokens)
        gpus = "" if row.label.endswith("none") else f" x {row.num_gpus}"
        missed = ask.goal.missed(row) if row.fits else ""
        yield dataclasses.replace(row, label=f"{card.name}{gpus}", why=missed or row.why, missed=bool(missed), by_price=True)


def _answer(ask: Question, card: "_Card", lowest: float, at: str) -> Row:
    """The row of one kind of hardware; ``at``: where in the list it is."""
    ask.say(at)
    if ask.goal.days is None:
        return _on_hardware(ask, card, lowest)

    def say(text: str) -> None:
        ask.say(f"{at}: {text}")

    variant = apply(ask.base, Value(flag="hardware", text=card.name))
    return fewest_gpus(dataclasses.replace(ask, base=variant, say=say, many=True), card.name)


def by_cost(goal: Goal, rows: Sequence[Row]) -> list[Row]:
    """Rows in the order: meets the goal, fits, was not searched, does not fit; in each the cheapest first, those without a price
    last."""

    def rank(row: Row) -> tuple[int, bool, float]:
        dollars = row.usd_per_million_tokens if row.searched else row.least_usd_per_million_tokens
        group = 2 if not row.searched else 3 if not row.fits else 1 if goal.missed(row) else 0
        return group, dollars is None, dollars or 0.0

    return sorted(rows, key=rank)


@record
class _Card:
    """Hardware, and what a job costs on it at the least."""

    name: str
    least: float = 0.0
    """USD per million tokens; 0 = not known, or already searched."""
    step: float = 0.0
    """Seconds of a step that costs so much."""
    why: str = "by its computation alone"
    """What that is the least of."""
    resolved: ResolvedJob | None = None
    """The job on it, where there is such a bound."""
    vague: bool = False
    """The bound can be made closer."""

    @classmethod
    def of(cls, ask: Question, name: str) -> "_Card":
        """With the cost of its computation alone."""
        variant = apply(ask.base, Value(flag="hardware", text=name))
        if _is_base(ask, variant):
            return cls(name=name)
        try:
            resolved = variant.resolved()
            job = resolved.job
            check_workload(job.workload, job.cluster, job.trainer)
            step = least_step(job, ask.pins)
            least = _dollars(ask, resolved, step)
        except PlannerError:  # its row says why
            return cls(name=name)
        return cls(name=name) if least is None else cls(name=name, least=least, step=step, resolved=resolved, vague=True)

    def closer(self, ask: Question) -> "_Card":
        """With the cost of what passes wait for, in layouts that may fit; the same where none may, as it then says by how much it
        misses."""
        assert self.resolved is not None
        job = SearchedJob.of(self.resolved.job)
        resolved = dataclasses.replace(self.resolved, job=job)
        step = least_fitting_step(job, ask.pins)
        if not self.step < step < math.inf:
            return dataclasses.replace(self, resolved=resolved, vague=False)
        least = _dollars(ask, resolved, step) or 0.0
        return dataclasses.replace(self, least=least, step=step, why="with any layout", resolved=resolved, vague=False)


def _on_hardware(ask: Question, card: _Card, lowest: float) -> Row:
    """The base on one kind of hardware, on its own it is known; searched no further than its plans may cost less than the
    ``lowest``, USD per million tokens."""
    variant, resolved = apply(ask.base, Value(flag="hardware", text=card.name)), card.resolved
    if resolved is None or not math.isfinite(lowest):
        known = ask.first if _is_base(ask, variant) else None
        return row_of(variant, ask.first, ask.pins, ask.pricing, known=known)[1]
    step, why = card.step, card.why
    if card.least < lowest:
        tokens = resolved.job.workload.tokens
        rate = (_dollars(ask, resolved, tokens) or 0.0) / lowest  # a step of so many seconds: one token a second
        known = best_of(resolved, ask.pins, rate=rate)
        row = row_of(variant, ask.first, ask.pins, ask.pricing, known=known)[1]
        if known.finding is None or known.finding.too_slow is None:
            return row
        step, why = known.finding.too_slow, "with any layout"
    dollars = _dollars(ask, resolved, step) or 0.0
    row = priced_row(row_asked(variant), resolved, ask.pricing)
    return dataclasses.replace(
        row, least_step_time_s=step, least_usd_per_million_tokens=dollars,
        why=f"not searched: {why} it costs at least {dollars:.3g} USD per million tokens",
    )  # fmt: skip


def _is_base(ask: Question, variant: Variant) -> bool:
    return (variant.request, variant.figures) == (ask.base.request, ask.base.figures)


def _dollars(ask: Question, resolved: ResolvedJob, step: float) -> float | None:
    """USD per million tokens where a step takes so many seconds; None without a price."""
    job = resolved.job
    rates = ask.pricing.rates(resolved.hardware, job.cluster.hardware)
    return usd_per_million_tokens(rates, job.cluster.num_gpus, job.workload.tokens / step)

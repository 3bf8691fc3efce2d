"""Fewest GPUs, longest sequence, largest micro batch that still do the job."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from planner.cluster import MOST_GPUS, usual_counts
from planner.cost.parameters import total_parameters
from planner.costs import DAY, HOUR
from planner.errors import PlannerError
from planner.questions.best_plan import Best
from planner.questions.what_if.changed_rows import Pricing, Row, row_of
from planner.questions.what_if.changes import Value, Variant, apply
from planner.record import record
from planner.search import Pins

POWER_OF_TWO = 1.01
"""No number of GPUs reaches more tokens per second and GPU than this many times the power of two below it: the global batch
shares out over it, and so do heads, layers and experts. A test compares it with a scan of every size."""
WASTEFUL = 8
"""Times the GPUs that the deadline would need at the throughput per GPU of small jobs: nobody buys more, no more are tried."""
CHEAPER = 0.03
"""The next power of two of GPUs is named where it saves at least this share of the GPU-hours."""
SHORTEST, LONGEST = 512, 2**24
"""Tokens of the shortest and of the longest sequence that are tried, besides the job's own."""
PIECES = 8
"""A longest sequence is found to an eighth of a power of two."""


@record
class Goal:
    """What an answer must meet, besides fitting."""

    tokens: float | None = None
    days: float | None = None
    """Time for the tokens."""
    budget: float | None = None
    """USD for the tokens."""

    def __post_init__(self) -> None:
        if self.tokens is None and (self.days is not None or self.budget is not None):
            flag = "--days" if self.days is not None else "--budget"
            raise PlannerError(f"{flag} needs the number of tokens to train on: add --tokens, like --tokens 15T")
        for flag, value in (("--days", self.days), ("--budget", self.budget)):
            if value is not None and not 0 < value < float("inf"):
                raise PlannerError(f"{flag} is {value:g}; it must be above 0")

    @property
    def rate(self) -> float:
        """Tokens per second that the deadline asks of the whole job; 0 without one."""
        return self.tokens / (self.days * DAY) if self.tokens is not None and self.days is not None else 0.0

    def missed(self, row: Row) -> str:
        """Why a row does not meet the goal; '' when it does."""
        total = row.costs
        if not row.fits or (total is None and self.tokens is not None):
            return row.why
        if total is not None and self.days is not None and total.days > self.days:
            return f"takes {total.days:,.1f} days, {self.days:g} are allowed"
        if total is None or self.budget is None or (total.usd is not None and total.usd <= self.budget):
            return ""
        if total.usd is None:
            return f"no price is known for {row.hardware}; give --price"
        return f"costs {total.usd:,.0f} USD, {self.budget:,.0f} are allowed"


@record
class Question:
    """What every answer needs."""

    base: Variant
    first: Best | None
    """The base's search: what rows are compared with."""
    pins: Pins | None
    pricing: Pricing
    goal: Goal
    say: Callable[[str], None]
    """Called with what is tried."""
    many: bool = False
    """One of many: nothing but the answer itself is looked for."""
    free_batch: bool = False
    """The global batch was not said: another number of GPUs takes the one that is usual for it."""
    keep: Callable[[Row], None] = lambda _: None
    """Called with the best answer so far: it remains when the search is interrupted."""

    def row(self, variant: Variant, pins: Pins | None = None, rate: float = 0.0) -> tuple[Best | None, Row]:
        """Search one variant."""
        self.say(variant.label)
        return row_of(variant, self.first, pins or self.pins, self.pricing, rate)

    def with_count(self, flag: str, count: int, rate: float = 0.0) -> tuple[Best | None, Row]:
        """Search the base with another whole number of a flag, for plans of at least so many tokens per second."""
        variant = apply(self.base, Value(flag=flag, text=str(count), number=count))
        if flag == "gpus" and self.free_batch:
            variant = dataclasses.replace(variant, request=dataclasses.replace(variant.request, global_batch_size=None))
        return self.row(variant, rate=rate)


def fewest_gpus(ask: Question, label: str = "fewest GPUs") -> Row:
    """The smallest number of GPUs (of ``usual_counts``) whose best plan fits and meets the goal.

    Sizes are tried from below, so that a size that is illegal (its divisors do not match the batch or the model) hides no
    smaller one. Left out are sizes that hold no copy of the weights, and of the gradients where all weights are trained, 2
    bytes each (the states of the optimizer may live on the host); and those that are too slow, or cost too much, even at the
    throughput per GPU of the powers of two below them.
    """
    try:
        job, goal = ask.base.resolved().job, ask.goal
    except PlannerError:  # of this hardware no number of GPUs can be asked: the row says why
        return dataclasses.replace(ask.row(ask.base)[1], label=f"{label}: none")
    hardware, copies = job.cluster.hardware, 2.0 if job.workload.lora_rank else 4.0
    sizes = usual_counts(hardware, total_parameters(job.model) * copies / hardware.usable_memory)
    last: Row | None = None
    fastest: tuple[float, Row] | None = None
    powers: dict[int, Power] = {}
    for count in _worth_a_search(ask, sizes, 4096 * int(hardware.gpus_per_node), powers):
        found, row = ask.with_count("gpus", count, goal.rate)
        if not goal.missed(row):
            batch = ask.base.request.global_batch_size
            other = "" if row.global_batch_size == batch else f"; with a global batch of {row.global_batch_size} instead of {batch}"
            cheaper = "" if ask.many else _rounder(ask, row)
            return dataclasses.replace(row, label=f"{label}: {count}", why=row.why + other + cheaper)
        last, rate = row, found.tokens_per_second if found is not None else None
        if rate is not None and (fastest is None or rate > fastest[0]):
            fastest = rate, row
        elif rate is not None and fastest is not None and count >= 2 * fastest[1].num_gpus:
            break  # twice as many GPUs make the job no faster
    return _none(ask, label, powers, fastest[1] if fastest is not None else last)


@record
class Power:
    """A power of two of GPUs, which tells what more of them can reach."""

    row: Row
    rate: float
    """Tokens per second that no plan exceeds, nor per GPU one on more GPUs; 0 = nothing is legal."""

    def dollars(self, tokens: float) -> float:
        """What tokens cost at that; 0 where it or the price is not known."""
        price = self.row.rates.usd_per_gpu_hour if self.row.rates is not None else None
        return tokens / self.rate * self.row.num_gpus / HOUR * (price or 0.0) if self.rate else 0.0


def _worth_a_search(ask: Question, sizes: Iterable[int], most: int, powers: dict[int, Power]) -> Iterator[int]:
    """Sizes that may be fast enough, and cheap enough, by the powers of two below them, which are kept in ``powers``. Beyond
    four times ``most`` GPUs a job that nothing makes fit is given up."""
    goal, first, per_gpu = ask.goal, 0, math.inf
    for count in sizes:
        number = 1 << (count.bit_length() - 1)
        if count * per_gpu < goal.rate:
            continue
        if (goal.rate or goal.budget is not None) and number not in powers:
            before = max((one.rate for size, one in powers.items() if 4 * size <= number), default=0.0)
            power = powers[number] = _power(ask, number)
            if 0.0 < power.rate <= before or power.dollars(goal.tokens or 0.0) > (goal.budget or math.inf):
                return  # four times as many GPUs make the job no faster, or all sizes from here on cost too much
            per_gpu = min(per_gpu, power.rate / number or math.inf)
        ideal = max((one.rate / size for size, one in powers.items()), default=0.0)
        if (ideal and count > WASTEFUL * goal.rate / ideal > 0) or count > 4 * max(first, most):
            return
        if count * per_gpu >= goal.rate:
            first = first or count
            yield count


def _power(ask: Question, number: int) -> Power:
    """A power of two of GPUs; a global batch that was said becomes the power of two above it, which shares out over them."""
    variant = apply(ask.base, Value(flag="gpus", text=str(number), number=number))
    batch = None if ask.free_batch else 1 << (int(variant.request.global_batch_size or 1) - 1).bit_length()
    request = dataclasses.replace(variant.request, global_batch_size=batch)
    found, row = ask.row(dataclasses.replace(variant, request=request), rate=math.inf)
    slow = found.finding.too_slow if found is not None and found.finding is not None else None
    return Power(row=row, rate=POWER_OF_TWO * found.resolved.job.workload.tokens / slow if found and slow else 0.0)


def _none(ask: Question, label: str, powers: Mapping[int, Power], last: Row | None) -> Row:
    """That no number of GPUs will do: the best that any could, or what the fastest that was searched, else the last, lacks."""
    goal, best = ask.goal, max(powers.values(), default=None, key=lambda one: one.rate)
    row = last or (best.row if best is not None else None)
    if row is None:
        raise PlannerError(f"more than {MOST_GPUS} GPUs would be needed to hold the weights alone")
    tokens, which = goal.tokens or 0.0, "the fastest" if row.fits else "last tried"
    dollars = min((one.dollars(tokens) for one in powers.values() if one.rate), default=0.0)
    if goal.budget is not None and dollars > goal.budget:
        why = f"no number of GPUs: at the best, {tokens:.3g} tokens cost {dollars:,.0f} USD, {goal.budget:,.0f} are allowed"
        return row.none(label, why)
    if best is not None and best.rate and goal.days is not None and not row.fits and best.rate < goal.rate:
        days = f"{tokens / best.rate / DAY:,.1f} days, {goal.days:g} are allowed"
        gpus = f"{best.row.num_gpus} GPUs take" if best.row.num_gpus > 1 else "1 GPU takes"
        return best.row.none(label, f"none found; {gpus} at the least {days}")
    return row.none(label, f"none found; {which}, {row.num_gpus} GPUs: {goal.missed(row)}")


def _rounder(ask: Question, row: Row) -> str:
    """What the next power of two of GPUs would do, where it needs clearly fewer GPU-hours: the fewest are not the cheapest."""
    count = 1 << (row.num_gpus - 1).bit_length()
    more = ask.with_count("gpus", count)[1] if count != row.num_gpus else row
    if row.prediction is None or more.prediction is None or ask.goal.missed(more):
        return ""
    hours = row.prediction.tokens_per_second_per_gpu / more.prediction.tokens_per_second_per_gpu
    return f"; {count} GPUs need {100 * (1 - hours):.0f} % fewer GPU-hours" if hours < 1 - CHEAPER else ""


def longest_sequence(ask: Question) -> Row:
    """The longest sequence that fits, with as many sequences per step: doubled until it does not fit, then halved in
    between. Memory grows with the length, so what fits at one length fits below it; a test scans one job."""
    rows: dict[int, Row] = {}

    def fits(tokens: int) -> bool:
        _, row = ask.with_count("sequence_length", tokens)
        rows[tokens] = dataclasses.replace(row, label=f"longest sequence: {tokens}")
        if row.fits:
            ask.keep(rows[tokens])
        return row.fits

    low = 1 << (int(ask.base.request.sequence_length or 0).bit_length() - 1)
    while not fits(low) and low > SHORTEST:
        low //= 2
    if not rows[low].fits:
        return rows[low].none("longest sequence", f"none from {low} tokens on: {rows[low].why}")
    while 2 * low <= LONGEST and 2 * low not in rows and fits(2 * low):
        low *= 2
    piece = max(low // PIECES, 1)
    fitting = bisect_left(range(1, PIECES), True, key=lambda more: not fits(low + more * piece))
    return rows[low + fitting * piece]


def largest_batch(ask: Question) -> Row:
    """The most sequences per forward pass and replica (micro batch) with which a plan fits: every divisor of the global
    batch is tried. Larger global batches always fit: they are more microbatches one after the other."""
    pinned = dict(ask.pins.values) if ask.pins else {}
    if "micro_batch_size" in pinned:
        raise PlannerError("--largest-batch looks for the micro batch, which --micro-batch-size pins; leave one out")
    batch = int(ask.base.request.global_batch_size or 1)
    best: Row | None = None
    for size in (n for n in range(1, batch + 1) if batch % n == 0):
        variant = dataclasses.replace(ask.base, label=f"micro batch {size}", number=None)
        _, last = ask.row(variant, Pins(values={**pinned, "micro_batch_size": size}))
        if last.fits:
            best = dataclasses.replace(last, label=f"largest micro batch: {size}")
            ask.keep(best)
    return best or last.none("largest micro batch", last.why)

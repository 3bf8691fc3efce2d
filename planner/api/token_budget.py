"""What training on a number of tokens takes with the best plan of a job, and the fewest GPUs that meet a deadline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from planner.assumption import Assumption
from planner.costs import Costs, Rates, costs, rates_of
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError, shown
from planner.hardware import load_hardware
from planner.search import Pins
from planner.units import format_count, format_days, format_energy, parse_amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens to train on, and the time for them."""

    tokens: float
    days: float | None = None
    """Deadline; None = none."""
    price: float | None = None
    """USD per GPU-hour; None = that of the profile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The best plan over all tokens."""

    budget: Budget
    costs: Costs
    rates: Rates
    num_gpus: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {**self.costs.to_dict(), "rates": [vars(one) for one in self.rates.basis], "deadline_days": self.budget.days}

    def sentences(self) -> list[str]:
        """Days or hours, GPU-hours, dollars and energy; whether the deadline is met; where the price comes from."""
        found, days = self.costs, self.budget.days
        price = self.rates.basis[0]
        money = "no price is known (--price)"
        if found.usd is not None:
            money = f"{found.usd:,.{0 if found.usd >= 100 else 2}f} USD at {price.value} per GPU-hour"
        text = (
            f"{format_count(found.tokens)} tokens: {format_days(found.seconds)}, {format_count(found.gpu_hours)} GPU-hours, "
            f"{money}, at most {format_energy(found.kwh)}."
        )
        if days is not None and found.days > days:
            least = math.ceil(self.num_gpus * found.days / days)
            text += (
                f" {days:g} days are allowed: {least:,} GPUs if each of them still did as much as here; more of them do less each, "
                "so that more are needed: leave out --gpus, and the fewest are searched."
            )
        date = f", {price.date}" if price.date else ""
        return [text, f"Price: {price.source}{date}. Left out: failures, restarts, evaluation, storage."]


def read_budget(tokens: str | float | None, days: float | None, price: float | None) -> Budget | None:
    """The budget that flags ask for; None without tokens. Raises PlannerError."""
    for flag, value in (("--days", days), ("--price", price)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise PlannerError(f"{flag} is {shown(value)}; it must be a number above 0")
    if tokens is None:
        if days is not None or price is not None:
            flag = "--days" if days is not None else "--price"
            raise PlannerError(f"{flag} needs the number of tokens to train on: add --tokens, like --tokens 15T")
        return None
    return Budget(tokens=parse_amount(str(tokens), what="--tokens"), days=days, price=price)


def training(budget: Budget, resolved: ResolvedJob, step_time_s: float) -> Training:
    """All tokens of the budget with the best plan of a job, whose step takes so long."""
    job = resolved.job
    rates = rates_of(job.cluster.hardware, price=budget.price)
    found = costs(
        rates, num_gpus=job.cluster.num_gpus, step_time_s=step_time_s, tokens_per_step=job.workload.tokens,
        tokens=budget.tokens,
    )  # fmt: skip
    return Training(budget=budget, costs=found, rates=rates, num_gpus=job.cluster.num_gpus)


def fewest(
    budget: Budget, said: Mapping[str, Any], pins: Pins, progress: Callable[[str], None]
) -> tuple[dict[str, Any], tuple[Assumption, ...]]:
    """Fields of the request with the fewest GPUs that meet the deadline, and what is said about them. Raises PlannerError where no
    number of GPUs does."""
    from planner.questions.what_if.changed_rows import Pricing
    from planner.questions.what_if.changes import base_variant
    from planner.questions.what_if.inverse import Goal, Question, fewest_gpus

    node = resolve(Request(**{**said, "nodes": 1}))
    ask = Question(
        base=base_variant(node), first=None, pins=pins, pricing=Pricing(tokens=budget.tokens, price=budget.price),
        goal=Goal(tokens=budget.tokens, days=budget.days), say=progress, many=True,
        free_batch=any(one.what == "global batch" for one in node.assumptions),
    )  # fmt: skip
    row = fewest_gpus(ask)
    if not row.fits or ask.goal.missed(row):
        raise PlannerError(f"no number of GPUs trains {format_count(budget.tokens)} tokens in {budget.days:g} days: {row.why}")
    why = f"the fewest {load_hardware(node.hardware).name} that train {format_count(budget.tokens)} tokens in {budget.days:g} days"
    return {**said, "num_gpus": row.num_gpus}, (Assumption("GPUs", f"{row.num_gpus}", why, "--gpus"),)


__all__ = ["Budget", "Training", "fewest", "read_budget", "training"]

"""A what-if as a user asks it: the base from a plan file or from flags, the changes, the questions; answered row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from planner import library, units
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.plan_file import load_plan
from planner.questions.best_plan import resolved_of
from planner.questions.what_if.changes import (
    COUNTS,
    FLAGS,
    MACHINES,
    Value,
    Variant,
    apply,
    base_variant,
    flag_of,
    read_values,
)
from planner.questions.what_if.inverse import (
    Goal,
    Question,
    by_cost,
    cheapest,
    fewest_gpus,
    largest_batch,
    longest_sequence,
)
from planner.questions.what_if.numbers import Pricing, Row, row_of
from planner.search import Pins

QUESTIONS = ("fewest_gpus", "longest_sequence", "largest_batch", "cheapest")


@dataclass(frozen=True, kw_only=True)
class WhatIfJob:
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
    """Hardware that --cheapest looks at."""

    @property
    def sweep(self) -> str | None:
        """The first flag that has two numbers or more, the base's included."""
        work = self.resolved.job.workload
        own = {"gpus": self.resolved.job.cluster.num_gpus, "sequence_length": work.sequence_length,
               "global_batch_size": work.global_batch_size}  # fmt: skip
        numbers: dict[str, set[float]] = {}
        for one in self.variants:
            if len(one.changed) == 1 and one.number is not None:
                flag = one.changed[0]
                numbers.setdefault(flag, {float(own[flag])} if flag in own else set()).add(one.number)
        return next((flag for flag, found in numbers.items() if len(found) >= 2), None)


def what_if_job(file: Path | None, flags: Mapping[str, Any], pins: dict[str, int]) -> WhatIfJob:
    """What the flags ask for. Raises PlannerError with the sentence for what cannot be read."""
    values = {name: read_values(name, flags[name]) for name in FLAGS if flags.get(name)}
    tokens = None if flags["tokens"] is None else _amount("--tokens", flags["tokens"])
    budget = None if flags["budget"] is None else _amount("--budget", flags["budget"])
    goal = Goal(tokens=tokens, days=flags["days"], budget=budget)
    questions = tuple(name for name in QUESTIONS if flags[name])
    if (goal.days is not None or goal.budget is not None) and not {"fewest_gpus", "cheapest"} & set(questions):
        raise PlannerError("--days and --budget ask for something: add --fewest-gpus or --cheapest")
    if file is not None:
        resolved, changes = resolved_of(load_plan(file)), [one for found in values.values() for one in found]
    else:
        resolved, changes = _from_flags(values)
    base = base_variant(resolved)
    candidates: tuple[str, ...] = ()
    if "cheapest" in questions:
        named = [one.name for one in changes if one.flag == "hardware" and one.name]
        changes = [one for one in changes if one.flag != "hardware"]
        candidates = tuple(dict.fromkeys([resolved.hardware, *named] if named else _priced(resolved.hardware, flags)))
    variants = [apply(base, one) for one in changes]
    if flags["together"]:
        first = {one.flag: one for one in reversed(changes)}
        if len(first) < 2:
            raise PlannerError("--together needs changes of two flags or more")
        variants.append(reduce(apply, [first[name] for name in FLAGS if name in first], base))
    if not variants and not questions:
        raise PlannerError(
            "nothing to change: give a change such as --network x2, several values such as --gpus 64,128 or 64..4096, or a "
            f"question: {', '.join(flag_of(name) for name in QUESTIONS)}"
        )
    return WhatIfJob(
        resolved=resolved, base=base, variants=tuple(variants), pins=Pins(values=pins), goal=goal, questions=questions,
        pricing=_pricing(flags, tokens), candidates=candidates,
    )  # fmt: skip


def _from_flags(values: Mapping[str, list[Value]]) -> tuple[ResolvedJob, list[Value]]:
    """The first value of each flag of the job describes the base; factors and further values are changes."""
    said: dict[str, Any] = {}
    changes: list[Value] = []
    for flag, found in values.items():
        rest = list(found)
        if flag not in MACHINES and rest[0].factor is None:
            first = rest.pop(0)
            field = {"gpus": "num_gpus", "network": "network_bandwidth"}.get(flag, flag)
            number = int(first.number) if flag in COUNTS and first.number is not None else first.number
            said[field] = number if first.name is None else first.name
        changes += rest
    for field, flag in (("model", "--model"), ("num_gpus", "--gpus")):
        if field not in said:
            raise PlannerError(f"which job? {flag} is missing: give a plan file, or at least --model and --gpus")
    return resolve(Request(**said)), changes


def _amount(what: str, text: str) -> float:
    """15T, 2M, 250k, $2M."""
    plain = text.strip().removeprefix("$").removesuffix("USD").strip()
    if plain.endswith("k"):
        plain = f"{plain[:-1]}K"
    value = units.parse(plain, "tokens", what=what)
    if value < 1:
        raise PlannerError(f"{what}: '{text}' must be at least 1")
    return value


def _pricing(flags: Mapping[str, Any], tokens: float | None) -> Pricing:
    price, prices = None, []
    for text in flags["price"]:
        name, _, amount = text.rpartition("=")
        try:
            value = float(amount.strip().removeprefix("$"))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise PlannerError(f"--price: '{text}' is not dollars per GPU-hour above 0; write 2.5 or h100-sxm=2.5")
        if name:
            load_hardware(name)
            prices.append((name, value))
        else:
            price = value
    return Pricing(
        price=price, prices=tuple(prices), tokens=tokens, power_share=flags["power_share"], pue=flags["pue"]
    )  # fmt: skip


def _priced(own: str, flags: Mapping[str, Any]) -> list[str]:
    """The job's hardware, and all of the library whose price is known."""
    given = {text.rpartition("=")[0] for text in flags["price"]}
    known = [name for name in library.names("hardware") if name in given or load_hardware(name).prices]
    return [own, *known]


def answers(job: WhatIfJob, say: Callable[[str], None], keep: Callable[[Row], None] = lambda _: None) -> Iterator[Row]:
    """The base's row, one per change, then the answers to the questions; ``keep`` gets the best of one so far."""
    say("the job as it is")
    first, row = row_of(job.base, None, job.pins, job.pricing)
    yield row
    for variant in job.variants:
        say(variant.label)
        _, row = row_of(variant, first, job.pins, job.pricing)
        yield row
    ask = Question(base=job.base, first=first, pins=job.pins, pricing=job.pricing, goal=job.goal, say=say, keep=keep)
    single: Sequence[tuple[str, Callable[[Question], Row]]] = (
        ("fewest_gpus", fewest_gpus), ("longest_sequence", longest_sequence), ("largest_batch", largest_batch),
    )  # fmt: skip
    for name, answer in single:
        if name in job.questions:
            yield answer(ask)
    if "cheapest" in job.questions:
        yield from _cheapest(ask, job.candidates)


def _cheapest(ask: Question, candidates: Sequence[str]) -> Iterator[Row]:
    """The rows of --cheapest in the order of their cost; also those that were found before Ctrl-C."""
    found: list[Row] = []
    stopped = False
    try:
        for row in cheapest(ask, candidates):
            found.append(row)
    except KeyboardInterrupt:
        stopped = True
    yield from by_cost(ask.goal, found)
    if stopped:
        raise KeyboardInterrupt


__all__ = ["QUESTIONS", "WhatIfJob", "answers", "what_if_job"]

"""The answer to a question of serving: the best deployments by objective or at the limits, the front, alternatives, ways out."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import PlannerError
from planner.serving.candidates import row_of
from planner.serving.estimate import estimate
from planner.serving.published import precision_text
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_layout import Precision
from planner.serving.serving_question import Question
from planner.serving.serving_reasons import misses, why_first
from planner.serving.serving_rows import plan_of
from planner.serving.serving_rules import violations
from planner.serving.serving_search import OBJECTIVES, Choice, Priced, chosen, front, joined, priced, ranked, splits

AT_LIMITS, AT_LOAD = "at the limits", "at this load"
MOST_FRONT = 16
"""Points of the front that are shown."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a search says of a question."""

    question: Question
    best: tuple[ServePlan, ...]
    """Best first inside of every purpose."""
    purposes: tuple[str, ...]
    """What each is the best for."""
    fit: bool
    """The plans start; else they are those that miss by the least."""
    kept: bool
    """They keep the limits, and keep up."""
    front: tuple[ServePlan, ...]
    """From the fastest for a user to the most tokens/s."""
    others: tuple[ServePlan, ...]
    """The best in every quantised format, for the first purpose."""
    looked_at: int
    """Splits of engines in all formats."""
    legal: int
    fitting: int
    priced: int
    """Deployments with their loads that were priced."""
    seconds: float
    """Wall time of the search."""


def answer(question: Question, top: int = 3, progress: Callable[[str], None] = lambda _: None) -> Answered:
    """Search all engines in the main format, then the quantised ones, and say why the best is the best.

    Raises PlannerError when no split is legal.
    """
    started = clock.perf_counter()
    tables = [_searched(question, None, progress)]
    main = tables[0]
    if not main.legal:
        raise PlannerError(_nothing_legal(question))
    purposes = [AT_LOAD] if question.task.loaded else [AT_LIMITS] if question.task.limited else list(OBJECTIVES)
    objective = OBJECTIVES[0] if question.task.loaded or question.task.limited else None
    plans: list[ServePlan] = []
    named: list[str] = []
    for purpose in purposes:
        for plan in best_plans(question, main, objective or purpose, purpose, top):
            plans.append(plan)
            named.append(purpose)
    fit = bool(len(main))
    if not fit:
        plans, named = list(closest(question, top)), ["closest"] * top
    kept = fit and _kept(main)
    others = []
    for precision in question.others:
        table = _searched(question, precision, progress)
        tables.append(table)
        if len(table):
            others += best_plans(question, table, objective or purposes[0], precision_text(precision), 1)
    points = () if question.task.loaded else tuple(_front(question, main))
    return Answered(
        question=question, best=tuple(plans), purposes=tuple(named[: len(plans)]), fit=fit, kept=kept, front=points,
        others=tuple(others),
        looked_at=sum(one.looked_at for one in tables), legal=sum(one.legal for one in tables),
        fitting=sum(one.fitting for one in tables), priced=sum(len(one) for one in tables), seconds=clock.perf_counter() - started,
    )  # fmt: skip


def _kept(table: Priced) -> bool:
    return bool(np.any(table["score"] <= 1.0))


def _searched(question: Question, precision: Precision | None, progress: Callable[[str], None]) -> Priced:
    tables = []
    for one in question.served(precision):
        progress(f"{one.engine.name} {one.engine.version}, {precision_text(one.precision)}")
        tables.append(priced(one, question.task))
    return joined(tables)


def best_plans(question: Question, table: Priced, objective: str, purpose: str, top: int) -> list[ServePlan]:
    """The best plans of a purpose, the first with its reason, the others with how far behind they are."""
    rows = ranked(table, question.task, objective, top + 1)
    found = [chosen(table, question.task, int(row), purpose) for row in rows]
    plans = []
    for number, one in enumerate(found[:top]):
        following = found[number + 1] if number + 1 < len(found) else None
        missing = misses(one)
        plans.append(
            plan_of(question, one, f"{missing}." if missing else why_first(one, following if number == 0 else None))
        )
    return plans


def _front(question: Question, table: Priced) -> list[ServePlan]:
    """Points of the front that keep the limits, thinned to MOST_FRONT evenly in speed."""
    rows = front(table.take(np.flatnonzero(table["score"] <= 1.0)))
    kept = table.take(np.flatnonzero(table["score"] <= 1.0))
    if len(rows) > MOST_FRONT:
        speed = np.log(kept["user"][rows])
        marks = np.linspace(speed[0], speed[-1], MOST_FRONT)
        rows = rows[np.unique([int(np.argmin(np.abs(speed - mark))) for mark in marks])]
    return [plan_of(question, chosen(kept, question.task, int(row))) for row in rows]


def closest(question: Question, top: int) -> list[ServePlan]:
    """Where nothing starts: the legal splits that miss the memory by the least, with by how much."""
    found: list[tuple[float, Choice]] = []
    task = question.task
    for one in question.served():
        layout, _ = splits(one, task)
        count = int(np.size(layout.tp))
        if not count:
            continue
        layout = replace(layout, replicas=np.ones(count, dtype=np.int64))
        memory = estimate(one, layout, replace(task.traffic, load="concurrency", value=1.0)).memory
        cache = np.broadcast_to(np.asarray(memory.cache, dtype=np.float64), (count,))
        for row in np.argsort(-cache, kind="stable")[:top]:
            single = row_of(layout, int(row))
            traffic = task.traffic if task.loaded else replace(task.traffic, load="concurrency", value=1.0)
            found.append((float(cache[row]), Choice(
                served=one, layout=single, traffic=traffic, found=estimate(one, single, traffic), limits=task.limits,
            )))  # fmt: skip
    found.sort(key=lambda pair: -pair[0])
    return [plan_of(question, one, f"{misses(one)}.") for _, one in found[:top]]


def _nothing_legal(question: Question) -> str:
    """Why no split is legal: what every engine says of the one that the fixed degrees make."""
    said = [sentence for one in question.served() for sentence in _refused(question, one)]
    reasons = "; ".join(dict.fromkeys(said)) or "the fixed degrees leave no split"
    return f"no split of {question.model.name} on {question.gpus} GPUs is legal: {reasons}"


def _refused(question: Question, one: Served) -> Sequence[str]:
    from planner.serving.serving_layout import ServingLayout

    pins = (
        {"moe_tp": question.task.pins.get("tp", 1), **question.task.pins}
        if question.model.is_moe
        else dict(question.task.pins)
    )
    layout = ServingLayout(**pins)
    return [
        f"{one.engine.name}: {text}" for text in violations(one.model, one.hardware, one.engine, one.precision, layout)
    ]

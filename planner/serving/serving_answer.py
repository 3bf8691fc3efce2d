"""The answer to a question of serving: the best deployments by objective or at the limits, the front, alternatives, ways out."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.arrays import unique
from planner.errors import PlannerError
from planner.record import record
from planner.serving.pool_search import pool_pairs
from planner.serving.priced_table import OBJECTIVES, Choice, Priced, Task, joined
from planner.serving.published import precision_text
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_question import Question
from planner.serving.serving_reasons import TIED, disaggregated_text, misses, why_first
from planner.serving.serving_rows import plan_of
from planner.serving.serving_rules import violations
from planner.serving.serving_search import CHUNKS, chosen, front_of, priced, ranked, splits, starting, value_of
from planner.units import plural

AT_LIMITS, AT_LOAD = "at the limits", "at this load"
MOST_FRONT = 16
"""Points of the front that are shown."""


@record
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
    pools_note: str
    """Two pools against none, where both were looked at."""
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
    both = searched(question, None, progress)
    main = both[1:] if question.disaggregated else both
    if not any(one.legal for one in main):
        raise PlannerError(_nothing_legal(question))
    task = question.task
    fit = any(len(one) for one in main)
    if question.disaggregated and not fit and any(one.fitting for one in main):
        raise PlannerError(_no_room_for_two(question))
    purposes = [AT_LOAD] if task.loaded else [AT_LIMITS] if task.limited else list(OBJECTIVES)
    objectives = task.objectives
    picks = Picks(task, main)
    best = [picks.best(objective, top + 1) for objective in objectives]
    points = [] if task.loaded else picks.front()
    picks.price([*points, *(key for keys in best for key in keys)])
    plans, named = list[ServePlan](), list[str]()
    for objective, keys, purpose in zip(objectives, best, purposes, strict=True):
        found = picks.plans(question, objective, keys, top)
        plans, named = plans + found, named + [purpose] * len(found)
    if not fit:
        plans = list(closest(question, top))
        named = ["closest"] * len(plans)
    others, tables = list[ServePlan](), list(main)
    for precision in question.others:
        more = searched(question, precision, progress, objectives[0])
        tables += more
        others += best_plans(question, more, objectives[0], 1)
    return Answered(
        question=question, best=tuple(plans), purposes=tuple(named), fit=fit,
        kept=any(np.any(one["score"] <= 1.0) for one in main), front=tuple(plan_of(question, picks.known[key]) for key in points),
        others=tuple(others), pools_note=_pools_note(question, both, objectives[0]), looked_at=sum(one.looked_at for one in tables),
        legal=sum(one.legal for one in tables), fitting=sum(one.fitting for one in tables),
        priced=sum(len(one) for one in tables), seconds=clock.perf_counter() - started,
    )  # fmt: skip


def searched(
    question: Question, precision: Precision | None, progress: Callable[[str], None], alone: str = ""
) -> list[Priced]:  # fmt: skip
    """Aggregated deployments, and pools where they are asked for or a limit or a load may speak for them. ``alone``: only what is
    best for this objective is asked for, not what it is compared with."""
    apart, task, served = question.disaggregated, question.task, question.served(precision)
    chunks, reached = CHUNKS if precision is None else (), [0.0, 0.0]
    bounded = alone and task.limited and not task.loaded

    def of_all(search: Callable[[Served, float], Priced]) -> Priced:
        """``search``: of an engine, with what a deployment needs to be one of the best two."""
        found = list[Priced]()
        for one in served:
            progress(f"{one.engine.name} {one.engine.version}, {precision_text(one.precision)}")
            found.append(search(one, sorted(reached)[-2]))
            reached.extend(best_two(found[-1], task, alone) if bounded else ())
        return joined(found)

    tables = list[Priced]()
    if not (alone and apart):
        tables.append(of_all(lambda one, _: priced(one, task, chunks, alone)))
    if apart or (apart is None and (task.limited or task.loaded)):
        tables.append(of_all(lambda one, least: pool_pairs(one, task, least)))
    return tables


def best_two(table: Priced, task: Task, objective: str) -> list[float]:
    """Tokens/s of the best two deployments, of those that keep the limits."""
    rows = ranked(table, task, objective, 2)
    return [float(one) for one in table["total"][rows[table["score"][rows] <= 1.0]]]


Key = tuple[int, int]
"""Number of a table, and its row."""


class Picks:
    """Rows of several tables that are looked at, priced with all that an estimate says when they are asked for together."""

    def __init__(self, task: Task, tables: Sequence[Priced]) -> None:
        self.task, self.tables = task, tables
        self.known: dict[Key, Choice] = {}

    def best(self, objective: str, top: int) -> list[Key]:
        """The best rows of all tables, best first: of those that keep the limits and keep up, where any does."""
        task = self.task
        fastest = max(
            (float(np.max(one["user"], initial=0.0, where=one["score"] <= 1.0)) for one in self.tables), default=0.0
        )
        found = [
            (-float(worth[row]), (number, int(row)))
            for number, table in enumerate(self.tables)
            for worth in [value_of(table, task, objective, fastest)]
            for row in ranked(table, task, objective, top)
        ]
        kept = [pair for pair in found if pair[0] < 0]  # a row that misses is worth less than nothing
        return [key for _, key in sorted(kept or found, key=lambda pair: pair[0])[:top]]

    def front(self) -> list[Key]:
        """Rows of the front that keep the limits, thinned to MOST_FRONT evenly in speed."""
        where = [
            (number, int(row)) for number, one in enumerate(self.tables) for row in np.flatnonzero(one["score"] <= 1.0)
        ]
        speed, total = (np.array([self.tables[at][name][row] for at, row in where]) for name in ("user", "total"))
        rows = front_of(speed, total)
        if len(rows) > MOST_FRONT:
            marks = np.geomspace(speed[rows[0]], speed[rows[-1]], MOST_FRONT)
            rows = rows[unique([int(np.argmin(np.abs(np.log(speed[rows] / mark)))) for mark in marks])]
        return [where[at] for at in rows]

    def price(self, keys: Sequence[Key]) -> list[Choice]:
        """The deployments of some rows."""
        for number, table in enumerate(self.tables):
            rows = sorted({row for at, row in keys if at == number and (at, row) not in self.known})
            if rows:
                self.known |= {
                    (number, row): one for row, one in zip(rows, chosen(table, self.task, rows), strict=True)
                }
        return [self.known[key] for key in keys]

    def plans(self, question: Question, objective: str, keys: Sequence[Key], top: int) -> list[ServePlan]:
        """Plans of the first rows, the first with its reason; what misses, with by how much."""
        found, plans = self.price(keys), []
        for number, one in enumerate(found[:top]):
            following = found[number + 1] if number == 0 and len(found) > 1 else None
            missing = misses(one)
            equal = 0 if number or missing else self._equal(objective, keys[:top])
            why = f"{missing}." if missing else why_first(one, following, equal)
            plans.append(plan_of(question, one, why, chosen_for=self.chosen_for(objective)))
        return plans

    def chosen_for(self, objective: str) -> str:
        """What loads are chosen for; empty where the load is asked for."""
        return "" if self.task.loaded else "limits" if self.task.limited else objective

    def _equal(self, objective: str, keys: Sequence[Key]) -> int:
        """How many rows after the first are too near to it to be told apart by what the objective is about."""
        worth = []
        for at, row in keys:
            total, user, seconds = (float(self.tables[at][name][row]) for name in ("total", "user", "e2e"))
            kind = objective if not (self.task.loaded or self.task.limited) else ""
            worth.append(
                1.0 / seconds if self.task.loaded else {"balanced": total * user, "interactive": user}.get(kind, total)
            )
        near = [abs(one / worth[0] - 1.0) < TIED for one in worth]
        return near.index(False) - 1 if False in near else len(near) - 1


def best_plans(question: Question, tables: Sequence[Priced], objective: str, top: int) -> list[ServePlan]:
    """The best plans of some tables."""
    picks = Picks(question.task, tables)
    return picks.plans(question, objective, picks.best(objective, top + 1), top)


def best_plan(question: Question, objective: str = "offline") -> ServePlan | None:
    """The best plan in the main format; None where nothing starts."""
    tables = searched(question, None, lambda _: None)[bool(question.disaggregated) :]
    return next(iter(best_plans(question, tables, objective, 1)), None)


def _pools_note(question: Question, tables: Sequence[Priced], objective: str) -> str:
    """Two pools against none, in a sentence."""
    if len(tables) < 2:
        return ""
    first = []
    for table in tables:
        picks = Picks(question.task, [table])
        first.append(next(iter(picks.price(picks.best(objective, 1))), None))
    together, apart = first
    if together is None or apart is None:
        return "Disaggregated: no pair of pools starts on these GPUs." if apart is None and together is not None else ""
    return disaggregated_text(question.task.loaded, together, apart)


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
            single = layout.row(int(row))
            traffic = task.traffic if task.loaded else replace(task.traffic, load="concurrency", value=1.0)
            found.append((float(cache[row]), Choice(
                served=one, layout=single, traffic=traffic, found=estimate(one, single, traffic), limits=task.limits,
            )))  # fmt: skip
    found.sort(key=lambda pair: -pair[0])
    return [plan_of(question, one, f"{misses(one)}.") for _, one in found[:top]]


def _nothing_legal(question: Question) -> str:
    """Why no split is legal: what every engine says of the one that the fixed degrees make."""
    said: dict[str, dict[str, None]] = {}
    for one in question.served():
        for sentence in _refused(question, one):
            said.setdefault(sentence, {})[one.engine.name] = None
    reasons = "; ".join(f"{', '.join(names)}: {text}" for text, names in said.items()) or "the fixed degrees leave no split"
    return f"no split of {question.model.name} on {plural(question.gpus, 'GPU')} is legal: {reasons}"


def _no_room_for_two(question: Question) -> str:
    """How many GPUs two pools take at least, where one of them starts."""
    sizes = [np.asarray(starting(one, question.task).layout.engine_gpus) for one in question.served()]
    least = int(min(np.min(one) for one in sizes if one.size))
    return (
        f"two pools of {question.model.name} need {2 * least} GPUs or more, a worker of each takes {least}, and there "
        f"{'is' if question.gpus == 1 else 'are'} {question.gpus}; leave --disaggregated out, or give more --gpus"
    )


def _refused(question: Question, one: Served) -> Sequence[str]:
    pins = (
        {"moe_tp": question.task.pins.get("tp", 1), **question.task.pins}
        if question.model.is_moe
        else dict(question.task.pins)
    )
    layout = ServingLayout(**pins)
    return list(violations(one.model, one.hardware, one.engine, one.precision, layout))

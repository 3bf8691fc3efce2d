"""The fewest GPUs that serve a load within limits: found by bisection over every split, aggregated or in two pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from planner.assumption import Assumption
from planner.errors import PlannerError
from planner.serving.pool_search import pool_pairs
from planner.serving.priced_table import Task, score_of
from planner.serving.published import precision_text
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_answer import best_plan
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_search import splits

Progress = Callable[[str], None]
Candidate = TypeVar("Candidate")


def fewest_gpus(question: Question, progress: Progress = lambda _: None) -> int | None:
    """The fewest GPUs on which some split serves the load within the limits; None where those of the question are too few.

    More GPUs never serve less, as they may stay idle: the number is found by bisection.
    """
    if not question.task.loaded:
        raise PlannerError("--fewest-gpus needs a load: give --rate, like 5/s, or --concurrency")
    together = None if question.disaggregated else _fewest_together(question, progress)
    if question.disaggregated is False:
        return together
    most = question.gpus if together is None else together - 1
    return _fewest_apart(question, most, progress) or together


def _bisected(
    candidates: Sequence[Candidate], serving: Callable[[Sequence[Candidate], int], list[Candidate]], least: int, most: int
) -> int | None:
    """The smallest number above ``least``, up to ``most``, on which some of the candidates serve; those that fail on a number are
    looked at no more on smaller ones."""
    candidates = serving(candidates, most) if most > least else []
    if not candidates:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        found = serving(candidates, middle)
        if found:
            candidates, most = found, middle
        else:
            least = middle
    return most


def _fewest_together(question: Question, progress: Progress) -> int | None:
    """Of aggregated deployments."""

    def serving(candidates: Iterable[tuple[Served, ServingLayout]], gpus: int) -> list[tuple[Served, ServingLayout]]:
        progress(f"{gpus} GPUs")
        return _serving(candidates, question.task, gpus)

    every = [(one, splits(one, question.task)[0]) for one in question.served()]
    return _bisected([pair for pair in every if np.size(pair[1].tp)], serving, 0, question.gpus)


def _fewest_apart(question: Question, most: int, progress: Progress) -> int | None:
    """Of two pools, on at most so many GPUs."""

    def serving(candidates: Iterable[Served], gpus: int) -> list[Served]:
        progress(f"two pools on {gpus} GPUs")
        task = replace(question.task, gpus=gpus)
        return [one for one in candidates if np.any(pool_pairs(one, task)["score"] <= 1.0)]

    return _bisected(question.served(), serving, 1, most)


def _serving(
    candidates: Iterable[tuple[Served, ServingLayout]], task: Task, gpus: int
) -> list[tuple[Served, ServingLayout]]:
    """Those of some splits that serve the load within the limits on a number of GPUs."""
    kept = []
    for one, every in candidates:
        rows = np.flatnonzero(np.asarray(every.engine_gpus) * task.pins.get("replicas", 1) <= gpus)
        if not len(rows):
            continue
        layout = every.take(rows)
        copies = task.pins.get("replicas") or gpus // np.asarray(layout.engine_gpus)
        if task.traffic.load == "concurrency":
            copies = np.minimum(copies, max(int(task.traffic.value), 1))
            each = np.ceil(task.traffic.value / np.asarray(copies)).astype(np.int64)
            layout = (
                layout if "max_batch" in task.pins else replace(layout, max_batch=np.maximum(layout.max_batch, each))
            )
        layout = replace(layout, replicas=np.broadcast_to(np.asarray(copies, dtype=np.int64), (len(rows),)).copy())
        found = estimate(one, layout, task.traffic)
        late = np.asarray(found.saturated) if task.traffic.load == "rate" else np.False_
        good = np.broadcast_to(np.asarray(found.fits) & ~late & (score_of(found, task.limits) <= 1.0), (len(rows),))
        if good.any():
            kept.append((one, every.take(rows[good])))
    return kept


def on_fewest(request: ServeRequest, progress: Progress = lambda _: None) -> Question:
    """The question of the fewest GPUs that serve it. Raises PlannerError where those at hand do not."""
    request = replace(request, any_number=True)
    question = ask(request)
    found = fewest_gpus(question, progress)
    if found is None:
        near = best_plan(question)
        raise PlannerError(
            f"no deployment on up to {question.gpus} GPUs serves that load within the limits"
            + (f": the nearest {near.why.rstrip('.')}" if near else "")
            + "; raise a limit, lower the load, or give other --hardware or quantised --weights"
        )
    smaller = ask(replace(request, gpus=found, nodes=None, any_number=False))
    assumed = Assumption("GPUs", str(found), "the fewest that serve the load within the limits", "--gpus")
    return replace(smaller, assumptions=(assumed, *smaller.assumptions))


def fewest_of_others(question: Question, progress: Progress = lambda _: None) -> list[ServePlan]:
    """The best plan of every quantised format, each on the fewest GPUs that serve the load in it."""
    found = []
    for precision in question.others:
        request = replace(question.request, fixed=precision, weights=None, cache=None, any_number=False)
        progress(precision_text(precision))
        gpus = fewest_gpus(ask(request), progress)
        plan = None if gpus is None else best_plan(ask(replace(request, gpus=gpus, nodes=None)))
        found += [plan] if plan is not None and plan.keeps_limits else []
    return found

"""The fewest GPUs that serve a load within limits, over every split, aggregated or in two pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.arrays import NDArray, unique
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
from planner.serving.serving_search import splits, starting, with_batch

TRIED, EDGE = 12, 2.0**-20
"""Numbers of replicas that are tried at once, and what rounding may add to one."""
Progress = Callable[[str], None]


def fewest_gpus(question: Question, progress: Progress = lambda _: None) -> int | None:
    """The fewest GPUs on which some split serves the load within the limits; None where those of the question are too few.

    Of one split more replicas never serve less.
    """
    if not question.task.loaded:
        raise PlannerError("--fewest-gpus needs a load: give --rate, like 5/s, or --concurrency")
    together = None if question.disaggregated else _fewest_together(question, progress)
    if question.disaggregated is False:
        return together
    most = question.gpus if together is None else together - 1
    return _fewest_apart(question, most, progress) or together


def _fewest_together(question: Question, progress: Progress) -> int | None:
    """Of aggregated deployments."""
    found: int | None = None
    for one in question.served():
        progress(f"{one.engine.name} {one.engine.version}")
        layout, _ = splits(one, question.task)
        found = _fewest_of(one, layout, question.task, question.gpus if found is None else found - 1) or found
    return found


def _fewest_of(one: Served, layout: ServingLayout, task: Task, gpus: int) -> int | None:
    """The fewest GPUs, up to ``gpus``, on which some split of an engine serves the load within the limits.

    Replicas of every split are tried at several numbers at once, then between the last that fails and the first that serves, of
    those splits that may still need fewer GPUs than the best.
    """
    pinned, size = task.pins.get("replicas"), np.asarray(layout.engine_gpus)
    most = np.full(len(size), pinned) if pinned else gpus // size
    if task.traffic.load == "concurrency" and not pinned:
        most = np.minimum(most, max(int(task.traffic.value), 1))
    fails = most - 1 if pinned else np.zeros(len(size), dtype=np.int64)
    serves, rows, best = most + 1, np.flatnonzero((most >= 1) & (most * size <= gpus)), gpus + 1
    while len(rows):
        at, copies = _between(rows, fails, np.minimum(serves - 1, most))
        good = _serve(one, replace(layout.take(at), replicas=copies), task)
        np.minimum.at(serves, at[good], copies[good])
        late = ~good & (copies < serves[at])
        np.maximum.at(fails, at[late], copies[late])
        rows = rows[serves[rows] <= most[rows]]  # more replicas never serve less: what fails with most of them never serves
        best = min(best, int(np.min(serves[rows] * size[rows], initial=best)))
        rows = rows[(fails[rows] + 1 < serves[rows]) & ((fails[rows] + 1) * size[rows] < best)]
    return best if best <= gpus else None


def _between(
    rows: NDArray[np.intp], fails: NDArray[np.int64], most: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Rows, each with some numbers above its ``fails`` up to its ``most``, that included; denser where they are small."""
    steps = np.geomspace(1.0, (most - fails)[rows].astype(np.float64), TRIED)
    columns = np.stack([np.tile(rows, TRIED), fails[np.tile(rows, TRIED)] + np.ceil(steps - EDGE).astype(np.int64).ravel()])
    at, copies = np.unique(columns, axis=1)
    return at, copies


def _fewest_apart(question: Question, most: int, progress: Progress) -> int | None:
    """Of two pools, on at most so many GPUs.

    Which workers are paired, and how many of each, depends on the GPUs, so that fewer may serve where more do not: numbers are
    tried from the smallest up, some at once, then all between the last that fails and the first that serves.
    """
    served = question.served()
    sizes = [np.asarray(starting(one, question.task).layout.engine_gpus) for one in served]
    step = int(np.gcd.reduce(np.concatenate(sizes))) or 1

    def serves(number: int) -> bool:
        progress(f"two pools on {number * step} GPUs")
        task = replace(question.task, gpus=number * step)
        return any(np.any(pool_pairs(one, task)["score"] <= 1.0) for one in served)

    fails, last, found = 1, most // step, None
    while fails < last:
        tried = unique(fails + np.ceil(np.geomspace(1.0, last - fails, TRIED) - EDGE).astype(np.int64))
        first = next((at for at, number in enumerate(tried) if serves(int(number))), None)
        if first is None:
            break
        found, last = int(tried[first]) * step, int(tried[first]) - 1
        fails = int(tried[first - 1]) if first else last
    return found


def _serve(one: Served, layout: ServingLayout, task: Task) -> NDArray[np.bool_]:
    """Which rows serve the load within the limits; of more replicas than requests some are idle."""
    if task.traffic.load == "concurrency":
        layout = replace(layout, replicas=np.minimum(layout.replicas, max(int(task.traffic.value), 1)))
    found = estimate(one, with_batch(one, layout, task), task.traffic, parts=False)
    good = np.asarray(found.fits) & (score_of(found, task.limits, task.traffic.rate) <= 1.0)
    return np.array(np.broadcast_to(good, np.shape(layout.replicas)))


def on_fewest(request: ServeRequest, progress: Progress = lambda _: None) -> Question:
    """The question of the fewest GPUs that serve it; of those at hand where these do not."""
    request = replace(request, any_number=True)
    question = ask(request)
    found = fewest_gpus(question, progress)
    if found is None:
        why = "no number up to this serves the load within the limits"
        assumed = Assumption("GPUs", str(question.gpus), why, "--gpus")
        return replace(question, assumptions=(assumed, *question.assumptions))
    smaller = ask(replace(request, gpus=found, nodes=None, any_number=False))
    assumed = Assumption("GPUs", str(found), "the fewest that serve the load within the limits", "--gpus")
    return replace(smaller, assumptions=(assumed, *smaller.assumptions))


def fewest_of_others(question: Question, progress: Progress = lambda _: None) -> list[ServePlan]:
    """The best plan of every quantised format, each on the fewest GPUs that serve the load in it."""
    found = []
    for precision in question.others:
        request = replace(question.request, fixed=precision, weights=None, cache=None)
        progress(precision_text(precision))
        gpus = fewest_gpus(ask(request), progress)
        plan = None if gpus is None else best_plan(ask(replace(request, gpus=gpus, nodes=None)))
        found += [plan] if plan is not None and plan.keeps_limits else []
    return found

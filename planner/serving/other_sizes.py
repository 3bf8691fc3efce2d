"""Other numbers of GPUs and other hardware: the fewest that serve a load within limits, the cheapest that do, and what would
serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner import library
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.plan_file import Assumption
from planner.serving.candidates import take
from planner.serving.pool_search import pool_pairs
from planner.serving.priced_table import Task, score_of
from planner.serving.published import precision_text
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_answer import Answered, best_plans, searched
from planner.serving.serving_estimate import estimate
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_search import splits

Progress = Callable[[str], None]
GROWN = (2, 4, 8)
"""Times as many GPUs as were asked for, tried where nothing serves."""
ON_GPU = (90, 75, 50, 25, 10)
"""Percent of the weights that stay on GPUs, tried where nothing starts with all of them."""
FASTER_MEMORY = 1.2
"""Hardware is a way out where its memory is larger or faster than that of the question by this factor."""
MOST_WAYS = 4
"""Other hardware that is tried."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The question with something changed, and its best plan."""

    change: str
    """In words."""
    flag: str
    """What is typed for it."""
    question: Question
    plan: ServePlan | None
    """None: nothing is legal, or nothing starts."""
    kept: bool = False
    """The plan keeps the limits, and keeps up."""
    why_not: str = ""
    """Why there is no plan, or by how much it misses."""


def fewest_gpus(question: Question, progress: Progress = lambda _: None) -> int | None:
    """The fewest GPUs on which some split serves the load within the limits; None where those of the question are too few.

    More GPUs never serve less, as they may stay idle: the number is found by bisection, and a split that fails on some number is
    looked at no more on fewer.
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
    open_: list[tuple[Served, ServingLayout]] = []
    for one in question.served():
        layout, _ = splits(one, question.task)
        if np.size(layout.tp):
            open_.append((one, layout))
    least, most = 0, question.gpus
    open_ = _serving(open_, question.task, most)
    if not open_:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        progress(f"{middle} GPUs")
        found = _serving(open_, question.task, middle)
        if found:
            open_, most = found, middle
        else:
            least = middle
    return most


def _fewest_apart(question: Question, most: int, progress: Progress) -> int | None:
    """Of two pools, on at most so many GPUs; engines that fail on them are looked at no more."""
    served, least = question.served(), 1

    def serving(candidates: list[Served], gpus: int) -> list[Served]:
        progress(f"two pools on {gpus} GPUs")
        task = replace(question.task, gpus=gpus)
        return [one for one in candidates if np.any(pool_pairs(one, task)["score"] <= 1.0)]

    served = serving(served, most) if most > least else []
    if not served:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        found = serving(served, middle)
        if found:
            served, most = found, middle
        else:
            least = middle
    return most


def _serving(
    candidates: Iterable[tuple[Served, ServingLayout]], task: Task, gpus: int
) -> list[tuple[Served, ServingLayout]]:
    """Those of some splits that serve the load within the limits on a number of GPUs."""
    kept = []
    for one, every in candidates:
        rows = np.flatnonzero(np.asarray(every.engine_gpus) * task.pins.get("replicas", 1) <= gpus)
        if not len(rows):
            continue
        layout = take(every, rows)
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
            kept.append((one, take(every, rows[good])))
    return kept


def on_fewest(request: ServeRequest, progress: Progress = lambda _: None) -> Question:
    """The question of the fewest GPUs that serve it. Raises PlannerError where those at hand do not."""
    request = replace(request, any_number=True)
    question = ask(request)
    found = fewest_gpus(question, progress)
    if found is None:
        near = _best_of(question)
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
        plan = None if gpus is None else _best_of(ask(replace(request, gpus=gpus, nodes=None)))
        found += [plan] if plan is not None and keeps(plan) else []
    return found


def _best_of(question: Question, objective: str = "offline") -> ServePlan | None:
    tables = searched(question, None, lambda _: None)[bool(question.disaggregated) :]
    found = best_plans(question, tables, objective, 1)
    return found[0] if found else None


def changed(change: str, flag: str, request: ServeRequest, objective: str = "offline") -> Change:
    """The best plan of a changed request, main format alone."""
    question = ask(request)
    plan = _best_of(question, objective)
    if plan is None:
        legal = any(np.size(splits(one, question.task)[0].tp) for one in question.served())
        why = "does not fit into memory" if legal else "no split is legal there"
        return Change(change=change, flag=flag, question=question, plan=None, why_not=why)
    kept = keeps(plan)
    return Change(change=change, flag=flag, question=question, plan=plan, kept=kept, why_not="" if kept else plan.why)


def keeps(plan: ServePlan) -> bool:
    """Whether a priced plan starts, keeps up and keeps its limits."""
    found = plan.prediction
    assert found is not None
    ttft, tpot = (found.latency(name, plan.limits.percentile) for name in ("ttft", "tpot"))
    late = plan.traffic.load == "rate" and found.saturated
    return found.fits and not late and ttft <= plan.limits.ttft and tpot <= plan.limits.tpot


def ways_out(found: Answered, progress: Progress = lambda _: None) -> list[Change]:
    """Changes that serve what the question does not: quantised formats, more GPUs, faster or larger devices; each with its
    price."""
    question, request = found.question, found.question.request
    ways = [
        Change(change=precision_text(plan.precision), flag=_format_flags(plan), question=question, plan=plan, kept=True)
        for plan in found.others
        if keeps(plan)
    ]
    for share in () if found.fit else ON_GPU:
        progress(f"{100 - share} % of the weights in host memory")
        text = f"{100 - share} % on the host"
        one = changed(text, f"--gpu-weights {share}", replace(request, layout={**request.layout, "gpu_weights": share}))
        if one.kept:
            ways.append(one)
            break
    for factor in GROWN:
        progress(f"{factor * question.gpus} GPUs")
        text = f"{factor * question.gpus} GPUs"
        one = changed(
            text, f"--gpus {factor * question.gpus}", replace(request, gpus=factor * question.gpus, nodes=None)
        )
        if one.kept:
            ways.append(one)
            break
    for name in _stronger(question):
        progress(name)
        ways.append(changed(name, f"--hardware {name}", replace(request, hardware=name, intra_node=None)))
    return [one for one in ways if one.kept]


def _format_flags(plan: ServePlan) -> str:
    return f"--weights {plan.precision.weights} --cache {plan.precision.cache}"


def _stronger(question: Question) -> list[str]:
    """Priced hardware of the same vendor with more or faster memory, the cheapest first."""
    mine = question.hardware
    found = []
    for name in library.names("hardware"):
        one = load_hardware(name)
        better = (
            max(one.usable_memory / mine.usable_memory, one.memory_bandwidth / mine.memory_bandwidth) >= FASTER_MEMORY
        )
        worse = min(one.usable_memory / mine.usable_memory, one.memory_bandwidth / mine.memory_bandwidth) < 1.0
        if one.prices and one.vendor == mine.vendor and better and not worse:
            found.append((one.prices[0].usd_per_hour, name))
    return [name for _, name in sorted(found)[:MOST_WAYS]]


def cheapest(
    request: ServeRequest, names: Iterable[str], progress: Progress = lambda _: None
) -> tuple[list[Change], bool]:
    """Hardware by price: dollars an hour where a load is given, on the fewest GPUs of each that serve it; else dollars of a million
    tokens on the GPUs of the question. What cannot serve comes last. And whether all was looked at: Ctrl-C ends it with what was
    found."""
    rows, complete = list[Change](), True
    try:
        for name in names:
            progress(name)
            rows.append(_on_hardware(request, name, progress))
    except KeyboardInterrupt:
        complete = False
    return sorted(rows, key=lambda row: (not row.kept, dollars(row))), complete


def _on_hardware(request: ServeRequest, name: str, progress: Progress) -> Change:
    """The best deployment on other hardware; under a load on the fewest GPUs of it."""
    one = replace(request, hardware=name, intra_node=None, any_number=request.gpus is None)
    question = ask(one)
    if question.task.loaded:
        gpus = fewest_gpus(question, lambda text: progress(f"{name}: {text}"))
        if gpus is None:
            why = f"does not serve it on up to {question.gpus} GPUs"
            return Change(change=name, flag=f"--hardware {name}", question=question, plan=None, why_not=why)
        one = replace(one, gpus=gpus, nodes=None, any_number=False)
    return changed(name, f"--hardware {name}", one)


def dollars(row: Change) -> float:
    """What a change costs: by the hour under a load, else for a million tokens; infinite where nothing is known."""
    price = row.question.rates.usd_per_gpu_hour
    if row.plan is None or price is None or row.plan.prediction is None:
        return float("inf")
    hourly = price * row.plan.gpus
    return hourly if row.question.task.loaded else hourly / max(row.plan.prediction.output_tokens_per_second, 1e-12)


def priced_hardware() -> list[str]:
    """All hardware that has a price."""
    return [name for name in library.names("hardware") if load_hardware(name).prices]

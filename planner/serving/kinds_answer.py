"""Serving on the nodes of a cluster file: every kind alone, replicas on all kinds, prompts on one kind and answers on another.

Replicas of several kinds stand behind one router, which sends to each kind in proportion to what it answers within the limits;
prompts and answers apart pass the cache over the link between their kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.cluster_file import ClusterFile, NodeKind
from planner.costs import rates_of
from planner.errors import PlannerError
from planner.serving import pools
from planner.serving.kinds_pipelines import add_pipeline, pipelines
from planner.serving.kinds_rows import (
    ALONE,
    APART,
    REPLICAS,
    KindsAnswer,
    KindsRow,
    Passing,
    Share,
    objective_of,
    order_of,
    row_of,
    score_of_choice,
)
from planner.serving.pool_search import ENOUGH, decode_splits, prefill_splits
from planner.serving.pools import Across, cache_bytes, prefill_of
from planner.serving.priced_table import Choice, Priced, Task, columns_of
from planner.serving.served import Served
from planner.serving.serving_answer import best_plans, searched
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_rows import layout_text, plan_layout_text, row_of_plan
from planner.serving.serving_search import chosen, raised, ranked, starting

LOADS = 24
"""Loads at which a pair of pools is looked at where none is given."""


def serve_kinds(
    request: ServeRequest, cluster: ClusterFile, progress: Callable[[str], None] = lambda _: None
) -> KindsAnswer:
    """All ways, priced and in order: what keeps the limits first, by tokens/s, or under a load by dollars an hour.

    Pipelines over several kinds are among them where they are better than all others, or alone serve. Raises PlannerError where
    nothing starts on any kind, nor on several together.
    """
    questions, notes = dict[str, Question](), list[str]()
    rows, capacity, asked = list[KindsRow](), dict[str, float](), dict[str, Question]()
    for kind in cluster.nodes:
        try:
            questions[kind.kind] = asked[kind.kind] = question = _question(request, kind)
            progress(kind.kind)
            rows.append(_alone(question, kind))
            capacity[kind.kind] = _capacity(question, rows[-1])
        except PlannerError as error:
            questions.pop(kind.kind, None)
            notes.append(f"{kind.kind}: {error}")
    able = [kind for kind in cluster.nodes if capacity.get(kind.kind, 0.0) > 0]
    if len(able) > 1:
        rows.append(_replicas(questions, able, capacity, rows))
    for first, second in itertools.permutations([one for one in cluster.nodes if one.kind in questions], 2):
        progress(f"prefill on {first.kind}, decode on {second.kind}")
        found = _apart(cluster, (questions[first.kind], first), (questions[second.kind], second))
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            rows.append(found)
    if asked:
        add_pipeline(rows, pipelines(cluster, asked, progress), notes, next(iter(asked.values())).task)
    if not rows:
        raise PlannerError(f"the model starts on no kind of the cluster: {'; '.join(notes)}")
    question = next(iter(asked.values()))
    rows.sort(key=lambda one: order_of(one, question.task))
    return KindsAnswer(question=question, rows=tuple(rows), notes=tuple(dict.fromkeys(notes)))


def _question(request: ServeRequest, kind: NodeKind) -> Question:
    """The question on the nodes of one kind, at their price; a measured slowdown is refused: serving has no term for it."""
    if any(factor != 1.0 for factor in kind.slowdown.values()):
        raise PlannerError("its nodes have a measured slowdown, which deployments are not priced with; leave it out")
    asked = ask(replace(request, hardware=kind.hardware, gpus=kind.num_gpus, price=request.price or kind.usd_per_hour()))
    return replace(asked, hardware=kind.profile, rates=rates_of(kind.profile, price=asked.request.price), disaggregated=False)


def _alone(question: Question, kind: NodeKind) -> KindsRow:
    """The best deployment of one kind alone. Raises PlannerError where nothing starts."""
    share = _share(question, kind)
    return row_of(ALONE, [share], [(question.rates, kind)])


def _share(question: Question, kind: NodeKind, routed: float = 1.0) -> Share:
    """The best deployment on one kind, for its part of the requests. Raises PlannerError where nothing starts."""
    plans = best_plans(question, searched(question, None, lambda _: None), objective_of(question.task), 1)
    if not plans or plans[0].prediction is None or not plans[0].prediction.fits:
        raise PlannerError(f"{question.model.name} starts on none of its {question.gpus} GPUs")
    row = row_of_plan(plans[0], question.rates)
    return Share(
        kind=kind.kind, site=kind.site, hardware=question.hardware_name, gpus=question.gpus, engine=row.engine,
        layout=plan_layout_text(plans[0]), role="all", routed=routed, requests_per_second=row.requests_per_second,
        tokens_per_second=row.tokens_per_second, ttft_s=row.ttft_s, tpot_s=row.tpot_s,
        limits_kept=row.fits and row.limits_kept and row.keeps_up,
    )  # fmt: skip


def _capacity(question: Question, alone: KindsRow) -> float:
    """Requests/s that a kind answers within the limits: without a load what it is best at, under one the most it could."""
    if not question.task.loaded:
        return alone.requests_per_second if alone.limits_kept else 0.0
    free = replace(question, task=replace(question.task, loaded=False))
    found = _share(free, NodeKind(kind="any", hardware=question.hardware_name, count=1))
    return found.requests_per_second if found.limits_kept else 0.0


def _replicas(
    questions: dict[str, Question], kinds: Sequence[NodeKind], capacity: dict[str, float], alone: Sequence[KindsRow]
) -> KindsRow:
    """Engines on all kinds behind one router, requests shared out by capacity."""
    whole, shares = sum(capacity[one.kind] for one in kinds), list[Share]()
    for kind in kinds:
        question, part = questions[kind.kind], capacity[kind.kind] / whole
        if question.task.loaded:
            value = question.task.traffic.value * part
            traffic = replace(question.task.traffic, value=value if question.task.traffic.load == "rate" else max(value, 1.0))
            shares.append(_share(replace(question, task=replace(question.task, traffic=traffic)), kind, part))
        else:
            own = next(row.shares[0] for row in alone if row.shares[0].kind == kind.kind)
            shares.append(replace(own, routed=part))
    return row_of(REPLICAS, shares, [(questions[one.kind].rates, one) for one in kinds])


# ------------------------------------------------------------------------------------------------ two pools


def _apart(
    cluster: ClusterFile, first: tuple[Question, NodeKind], second: tuple[Question, NodeKind]
) -> KindsRow | str | None:
    """Prompts on the first kind, answers on the second, all GPUs of both; a sentence where the link is not known, None where no
    engine starts on both."""
    (prompts, one), (answers, other) = first, second
    link = cluster.link(one.kind, other.kind)
    if link is None and one.site != other.site:
        return f"no link between {one.site} and {other.site} is given: prompts and answers apart are looked at in one site only"
    if link is None:
        cards = [kind.profile.network_bandwidth * kind.num_gpus for kind in (one, other)]
        bandwidth, latency, price = min(cards), 0.0, 0.0
    else:
        bandwidth, latency, price = link.speed(min(one.count, other.count)), link.latency, link.price
    best: tuple[float, Choice, float] | None = None
    for prompt, answer in _same_engines(prompts, answers):
        across = Across(bandwidth=bandwidth, latency=latency)
        table = _pairs(across, (prompt, answer), prompts.task, answers.task)
        rows = ranked(table, answers.task, objective_of(answers.task), 1)
        if len(rows):
            [choice] = chosen(table, answers.task, [int(rows[0])])
            worth = -score_of_choice(choice, answers.task)
            if best is None or worth > best[0]:
                best = worth, choice, cache_bytes(answer, answers.task.traffic)
    if best is None:
        return None
    return _row_apart(best[1], (prompts, one), (answers, other), best[2], bandwidth, price)


def _same_engines(prompts: Question, answers: Question) -> list[tuple[Served, Served]]:
    """Engines in the main format that both kinds have."""
    return [
        (one, other)
        for one in prompts.served() for other in answers.served()
        if one.engine.label == other.engine.label and one.precision == other.precision
    ]  # fmt: skip


def _pairs(across: Across, served: tuple[Served, Served], mine: Task, theirs: Task) -> Priced:
    """Splits of both pools, for prompts and answers, on all their GPUs, at the load of the task or at several."""
    answer, starts = served[1], (starting(served[0], mine), starting(served[1], theirs))
    if not all(len(one) for one in starts):
        return Priced.nothing(answer, starts[1].layout, {"looked_at": 0})
    traffic = theirs.priced_traffic
    prompts = prefill_of(served[0], starts[0].layout, traffic)
    first = prefill_splits(prompts, mine)
    never = prefill_of(answer, replace(starts[1].layout.row(0), replicas=ENOUGH), traffic)
    second = decode_splits(answer, theirs, starts[1], never)
    rows = []
    for a, b in itertools.product(first, second):
        workers = theirs.gpus // int(np.asarray(starts[1].layout.engine_gpus)[b])
        senders = mine.gpus // int(np.asarray(starts[0].layout.engine_gpus)[a])
        most = max(float(starts[1].most[b]), 1.0)
        each = [most] if theirs.loaded else np.unique(np.geomspace(1.0, most, LOADS).round())
        if theirs.loaded and theirs.traffic.load == "concurrency":
            each = [max(np.ceil(theirs.traffic.value / workers), 1.0)]
        rows += [(a, b, senders, workers, int(load)) for load in each]
    grid = np.array(rows, dtype=np.int64)
    prefill = prompts.take(grid[:, 0], grid[:, 2])
    decode = replace(starts[1].layout.take(grid[:, 1]), replicas=grid[:, 3])
    if not theirs.loaded or theirs.traffic.load == "concurrency":
        decode = raised(answer, theirs, decode, grid[:, 4])
    value = np.full(len(grid), theirs.traffic.value) if theirs.loaded else (grid[:, 4] * grid[:, 3]).astype(np.float64)
    found = pools.compared(answer, prefill, decode, traffic, value, across)
    return Priced.of(answer, decode, found, columns_of(found, theirs, value), starts[1].counts, prefill.layout)


def _row_apart(
    choice: Choice, first: tuple[Question, NodeKind], second: tuple[Question, NodeKind], size: float, bandwidth: float, price: float
) -> KindsRow:
    """A pair of pools as a line."""
    found, figure = choice.found, choice.limits.percentile
    requests, tokens = float(np.asarray(found.requests_per_second)), choice.total
    assert choice.prefill is not None
    shares = [
        Share(
            kind=kind.kind, site=kind.site, hardware=question.hardware_name, gpus=kind.num_gpus, layout=layout_text(layout),
            engine=choice.served.engine.label.replace("@", " "), role=role, routed=1.0, requests_per_second=requests,
            tokens_per_second=tokens if role == "decode" else 0.0, ttft_s=float(np.asarray(found.ttft.of(figure))),
            tpot_s=float(np.asarray(found.tpot.of(figure))), limits_kept=choice.meets,
        )
        for (question, kind), layout, role in ((first, choice.prefill, "prefill"), (second, choice.layout, "decode"))
    ]  # fmt: skip
    paid = [(question.rates, kind) for question, kind in (first, second)]
    return row_of(APART, shares, paid, Passing(bytes_per_second=requests * size, bandwidth=bandwidth, price=price))


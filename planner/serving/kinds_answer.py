"""Serving on the nodes of a cluster file: every kind alone, replicas on all kinds, prompts on one kind and answers on another.

Replicas of several kinds stand behind one router, which sends to each kind in proportion to what it answers within the limits;
prompts and answers apart pass the cache over the link between their kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster_file import ClusterFile, NodeKind
from planner.costs import Rates, rates_of, usd_per_million_tokens
from planner.errors import PlannerError
from planner.serving import pools
from planner.serving.pool_search import decode_splits, prefill_splits
from planner.serving.pools import Across, cache_bytes
from planner.serving.priced_table import Choice, Priced, Task, columns_of, traffic_of
from planner.serving.served import Served
from planner.serving.serving_answer import best_plans, searched
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_rows import layout_text, plan_layout_text, row_of_plan
from planner.serving.serving_search import OBJECTIVES, ranked, starting

ALONE, REPLICAS, APART = "alone", "replicas", "prefill and decode"
HOUR = 3600.0
LOADS = 24
"""Loads at which a pair of pools is looked at where none is given."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of one kind of nodes in a deployment."""

    kind: str
    site: str
    hardware: str
    gpus: int
    engine: str
    layout: str
    role: str
    """``all``, ``prefill`` or ``decode``."""
    routed: float
    """Share of the requests that the router sends there."""
    requests_per_second: float
    tokens_per_second: float
    ttft_s: float | None
    tpot_s: float | None
    limits_kept: bool


@dataclass(frozen=True, kw_only=True)
class KindsRow:
    """One way to use the nodes."""

    what: str
    """``alone``, ``replicas`` or ``prefill and decode``."""
    shares: tuple[Share, ...]
    requests_per_second: float
    tokens_per_second: float
    """Output tokens."""
    ttft_s: float | None
    """That of the slowest kind, as the limits name it."""
    tpot_s: float | None
    limits_kept: bool
    """Starts, keeps up and keeps the limits, on every kind."""
    usd_per_hour: float | None
    """All nodes of the kinds in it, and the traffic over the link."""
    usd_per_million_output: float | None
    link_bytes_per_second: float = 0.0
    """Cache that passes between two kinds."""
    link_bandwidth: float | None = None

    @property
    def text(self) -> str:
        """In words: replicas on a100 and t4."""
        names = [one.kind for one in self.shares]
        if self.what == ALONE:
            return f"{names[0]} alone"
        if self.what == APART:
            return f"prefill on {names[0]}, decode on {names[1]}"
        return f"replicas on {' and '.join([', '.join(names[:-1]), names[-1]])}"


@dataclass(frozen=True, kw_only=True)
class KindsAnswer:
    """Ways to serve on the kinds of a cluster, best first."""

    question: Question
    """That of the first kind."""
    rows: tuple[KindsRow, ...]
    notes: tuple[str, ...]
    """Kinds on which nothing starts, and links that are missing."""

    @property
    def kept(self) -> bool:
        """Something serves."""
        return any(one.limits_kept for one in self.rows)


def serve_kinds(
    request: ServeRequest, cluster: ClusterFile, progress: Callable[[str], None] = lambda _: None
) -> KindsAnswer:
    """All three ways, priced and in order: what keeps the limits first, by tokens/s, or under a load by dollars an hour.

    Raises PlannerError where nothing starts on any kind.
    """
    questions, notes = dict[str, Question](), list[str]()
    rows, capacity = list[KindsRow](), dict[str, float]()
    for kind in cluster.nodes:
        try:
            questions[kind.kind] = question = _question(request, kind)
            progress(kind.kind)
            rows.append(_alone(question, kind))
            capacity[kind.kind] = _capacity(question, rows[-1])
        except PlannerError as error:
            questions.pop(kind.kind, None)
            notes.append(f"{kind.kind}: {error}")
    if not rows:
        raise PlannerError(f"the model starts on no kind of the cluster: {'; '.join(notes)}")
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
    loaded = next(iter(questions.values())).task.loaded
    rows.sort(key=lambda one: _order(one, loaded))
    return KindsAnswer(question=next(iter(questions.values())), rows=tuple(rows), notes=tuple(dict.fromkeys(notes)))


def _order(row: KindsRow, loaded: bool) -> tuple[bool, float]:
    """What serves first; then by price under a load, else by tokens/s."""
    price = np.inf if row.usd_per_hour is None else row.usd_per_hour
    return not row.limits_kept, float(price) if loaded else -row.tokens_per_second


def _question(request: ServeRequest, kind: NodeKind) -> Question:
    """The question on the nodes of one kind, at their price; a measured slowdown is refused: serving has no term for it."""
    if any(factor != 1.0 for factor in kind.slowdown.values()):
        raise PlannerError("its nodes have a measured slowdown, which deployments are not priced with; leave it out")
    asked = ask(replace(request, hardware=kind.hardware, gpus=kind.num_gpus, price=request.price or kind.usd_per_hour()))
    return replace(asked, hardware=kind.profile, rates=rates_of(kind.profile, price=asked.request.price), disaggregated=False)


def _objective(task: Task) -> str:
    """Where neither a load nor a limit is asked for, the knee of tokens/s against tokens/s of a user."""
    return OBJECTIVES[0] if task.loaded or task.limited else "balanced"


def _alone(question: Question, kind: NodeKind) -> KindsRow:
    """The best deployment of one kind alone. Raises PlannerError where nothing starts."""
    share = _share(question, kind)
    return _row(ALONE, [share], [(question.rates, kind)])


def _share(question: Question, kind: NodeKind, routed: float = 1.0) -> Share:
    """The best deployment on one kind, for its part of the requests. Raises PlannerError where nothing starts."""
    plans = best_plans(question, searched(question, None, lambda _: None), _objective(question.task), 1)
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
    return _row(REPLICAS, shares, [(questions[one.kind].rates, one) for one in kinds])


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Cache that passes between two kinds."""

    bytes_per_second: float = 0.0
    bandwidth: float | None = None
    price: float = 0.0
    """Dollars per byte."""


def _row(what: str, shares: Sequence[Share], paid: Sequence[tuple[Rates, NodeKind]], passing: Passing = Passing()) -> KindsRow:
    """Sums and the worst of some kinds."""
    each = [None if rates.usd_per_gpu_hour is None else rates.usd_per_gpu_hour * kind.num_gpus for rates, kind in paid]
    traffic = HOUR * passing.bytes_per_second * passing.price
    dollars = None if None in each else sum(one for one in each if one is not None) + traffic
    answering = [one for one in shares if one.role != "prefill"]
    tokens = sum(one.tokens_per_second for one in answering)
    whole = replace(paid[0][0], usd_per_gpu_hour=dollars)
    return KindsRow(
        what=what, shares=tuple(shares), tokens_per_second=tokens, usd_per_hour=dollars,
        usd_per_million_output=usd_per_million_tokens(whole, 1, tokens) if dollars is not None and tokens else None,
        requests_per_second=sum(one.requests_per_second for one in answering),
        ttft_s=_slowest([one.ttft_s for one in shares]), tpot_s=_slowest([one.tpot_s for one in shares]),
        limits_kept=all(one.limits_kept for one in shares), link_bytes_per_second=passing.bytes_per_second,
        link_bandwidth=passing.bandwidth,
    )  # fmt: skip


def _slowest(seconds: Sequence[float | None]) -> float | None:
    """The largest; None where one has none."""
    known = [one for one in seconds if one is not None]
    return max(known) if len(known) == len(seconds) else None


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
        across = Across(prompts=prompt, bandwidth=bandwidth, latency=latency)
        table = _pairs(across, answer, prompts.task, answers.task)
        rows = ranked(table, answers.task, _objective(answers.task), 1)
        if len(rows):
            choice = _chosen(table, answers.task, int(rows[0]), across)
            worth = -_order_of(choice, answers.task)
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


def _order_of(choice: Choice, task: Task) -> float:
    """Smaller is better: what breaks its limits last, then the request's time under a load, else tokens/s."""
    if not choice.meets:
        return 1e12 + choice.score
    return float(np.asarray(choice.found.e2e.mean)) if task.loaded else -choice.total


def _pairs(across: Across, answer: Served, mine: Task, theirs: Task) -> Priced:
    """Splits of both pools on all their GPUs, at the load of the task or at several."""
    starts = starting(across.prompts, mine), starting(answer, theirs)
    if not all(len(one) for one in starts):
        return Priced.nothing(answer, starts[1].layout, {"looked_at": 0})
    first = prefill_splits(across.prompts, mine, starts[0].layout)
    second = decode_splits(answer, theirs, starts[1].layout, starts[1].most, starts[1].layout.row(0))
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
    prefill = replace(starts[0].layout.take(grid[:, 0]), replicas=grid[:, 2])
    decode = replace(starts[1].layout.take(grid[:, 1]), replicas=grid[:, 3])
    if not theirs.loaded or theirs.traffic.load == "concurrency":
        decode = replace(decode, max_batch=np.maximum(decode.max_batch, grid[:, 4]))
    value = np.full(len(grid), theirs.traffic.value) if theirs.loaded else (grid[:, 4] * grid[:, 3]).astype(np.float64)
    traffic = theirs.traffic if theirs.loaded else replace(theirs.traffic, load="concurrency")
    found = pools.estimate(answer, prefill, decode, traffic, value, across)
    return Priced.of(answer, decode, columns_of(found, theirs, value), starts[1].counts, prefill)


def _chosen(table: Priced, task: Task, row: int, across: Across) -> Choice:
    """One pair priced with all that an estimate says; it starts where both pools do."""
    assert table.prefill is not None
    served, traffic = table.served[0], traffic_of(table, task, row)
    prefill, decode = table.prefill.row(row), table.layout.row(row)
    found = pools.estimate(served, prefill, decode, traffic, None, across)
    one = across.prompts
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, prefill, traffic)
    found = replace(found, fits=np.asarray(found.fits) & np.asarray(memory.fits))
    return Choice(served=served, layout=decode, prefill=prefill, traffic=traffic, found=found, limits=task.limits)


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
    return _row(APART, shares, paid, Passing(bytes_per_second=requests * size, bandwidth=bandwidth, price=price))

"""Ways to use the nodes of a cluster file, as lines: what each kind does, sums and the worst of them, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.cluster_file import NodeKind
from planner.costs import HOUR, Rates, usd_per_million_tokens
from planner.record import record
from planner.serving.priced_table import OBJECTIVES, Choice, Task
from planner.serving.serve_plan import ServePlan
from planner.serving.serving_question import Question

ALONE, REPLICAS, APART, PIPELINE = "alone", "replicas", "prefill and decode", "pipeline"


@record
class Share:
    """The part of one kind of nodes in a deployment."""

    kind: str
    site: str
    hardware: str
    gpus: int
    engine: str
    layout: str
    role: str
    """``all``, ``prefill``, ``decode``, or ``stages`` of a pipeline."""
    routed: float
    """Share of the requests that the router sends there."""
    requests_per_second: float
    tokens_per_second: float
    ttft_s: float | None
    tpot_s: float | None
    limits_kept: bool


@record
class KindsRow:
    """One way to use the nodes."""

    what: str
    """``alone``, ``replicas``, ``prefill and decode`` or ``pipeline``."""
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
    cut: tuple[int, ...] = ()
    """Layers of each stage of a pipeline over several kinds."""
    cut_by: str = ""
    """Environment variable of the engine that says the cut."""
    plan: ServePlan | None = None
    """Of a pipeline over several kinds."""

    @property
    def text(self) -> str:
        """In words: replicas on a100 and t4."""
        names = [one.kind for one in self.shares]
        if self.what == ALONE:
            return f"{names[0]} alone"
        if self.what == APART:
            return f"prefill on {names[0]}, decode on {names[1]}"
        if self.what == PIPELINE:
            return f"pipeline over {', then '.join(names)}"
        return f"replicas on {' and '.join([', '.join(names[:-1]), names[-1]])}"


@record
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


def order_of(row: KindsRow, task: Task) -> tuple[bool, float]:
    """What serves first; then by price under a load, else by tokens/s."""
    price = np.inf if row.usd_per_hour is None else row.usd_per_hour
    return not row.limits_kept, float(price) if task.loaded else -row.tokens_per_second


def worth_of(row: KindsRow, task: Task) -> tuple[bool, float]:
    """The same, but without load and limits by tokens/s times tokens/s of a user, by which each way was chosen."""
    kept, order = order_of(row, task)
    return kept, order / row.tpot_s if row.tpot_s and not (task.loaded or task.limited) else order


def objective_of(task: Task) -> str:
    """Where neither a load nor a limit is asked for, the knee of tokens/s against tokens/s of a user."""
    return OBJECTIVES[0] if task.loaded or task.limited else "balanced"


def score_of_choice(choice: Choice, task: Task) -> float:
    """Smaller is better: what breaks its limits last, then the request's time under a load, else tokens/s."""
    if not choice.meets:
        return 1e12 + choice.score
    return float(np.asarray(choice.found.e2e.mean)) if task.loaded else -choice.total


@record
class Passing:
    """Cache that passes between two kinds."""

    bytes_per_second: float = 0.0
    bandwidth: float | None = None
    price: float = 0.0
    """Dollars per byte."""


NO_TRAFFIC = Passing()


def row_of(what: str, shares: Sequence[Share], paid: Sequence[tuple[Rates, NodeKind]], passing: Passing = NO_TRAFFIC) -> KindsRow:
    """Sums and the worst of some kinds."""
    each = [None if rates.usd_per_gpu_hour is None else rates.usd_per_gpu_hour * kind.num_gpus for rates, kind in paid]
    traffic = HOUR * passing.bytes_per_second * passing.price
    dollars = None if None in each else sum(one for one in each if one is not None) + traffic
    answering = [one for one in shares if one.role != "prefill"] if what != PIPELINE else shares[-1:]
    tokens = sum(one.tokens_per_second for one in answering)
    whole = replace(paid[0][0], usd_per_gpu_hour=dollars)
    return KindsRow(
        what=what, shares=tuple(shares), tokens_per_second=tokens, usd_per_hour=dollars,
        usd_per_million_output=usd_per_million_tokens(whole, 1, tokens) if dollars is not None and tokens else None,
        requests_per_second=sum(one.requests_per_second for one in answering),
        ttft_s=slowest_of([one.ttft_s for one in shares]), tpot_s=slowest_of([one.tpot_s for one in shares]),
        limits_kept=all(one.limits_kept for one in shares), link_bytes_per_second=passing.bytes_per_second,
        link_bandwidth=passing.bandwidth,
    )  # fmt: skip


def slowest_of(seconds: Sequence[float | None]) -> float | None:
    """The largest; None where one has none."""
    known = [one for one in seconds if one is not None]
    return max(known) if len(known) == len(seconds) else None

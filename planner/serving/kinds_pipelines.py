"""Serving with pipelines whose stages stand on several kinds of nodes: the best over each order of kinds, as lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.cluster_file import ClusterFile, NodeKind
from planner.serving.chain import Hop
from planner.serving.chain_search import CUT_BY, ChainChoice, Place, best_chain
from planner.serving.kinds_rows import (
    PIPELINE,
    KindsRow,
    Passing,
    Share,
    objective_of,
    row_of,
    score_of_choice,
    worth_of,
)
from planner.serving.priced_table import Task
from planner.serving.serve_plan import ServePlan, ServeStage
from planner.serving.serving_question import Question
from planner.serving.serving_rows import plan_of
from planner.serving.step import ACTIVATION
from planner.units import format_seconds, plural

MOST_KINDS = 3
"""Kinds of one pipeline."""


def add_pipeline(rows: list[KindsRow], found: Sequence[KindsRow], notes: list[str], task: Task) -> None:
    """The best pipeline over several kinds where it is better than all other ways; a note where it is not."""
    if not found:
        return
    best = min(found, key=lambda one: worth_of(one, task))
    others = min((worth_of(one, task) for one in rows), default=(True, np.inf))
    if worth_of(best, task) < others:
        rows.append(best)
    elif best.limits_kept and not task.loaded:
        tpot = f", one every {format_seconds(best.tpot_s)} to a user" if best.tpot_s else ""
        said = f"A {best.text} would answer {best.tokens_per_second:,.0f} tokens/s{tpot}"
        notes.append(f"{said}: less than the best other way, so it is not shown.")


def pipelines(cluster: ClusterFile, asked: Mapping[str, Question], progress: Callable[[str], None]) -> list[KindsRow]:
    """The best engine over each order of kinds, all of their GPUs in use where they divide."""
    found = list[KindsRow]()
    kinds = [one for one in cluster.nodes if one.kind in asked]
    for count in range(2, min(len(kinds), MOST_KINDS) + 1):
        for order in itertools.permutations(kinds, count):
            hops = [_hop(cluster, *pair) for pair in itertools.pairwise(order)]
            if any(one is None for one in hops):
                continue
            progress(f"pipeline over {', then '.join(one.kind for one in order)}")
            row = _pipeline([(asked[one.kind], one) for one in order], [one for one in hops if one is not None])
            found += [row] if row is not None else []
    return found


def _hop(cluster: ClusterFile, one: NodeKind, other: NodeKind) -> tuple[Hop, float] | None:
    """The link between the stages of two kinds and dollars per byte; None between two sites without a link."""
    link = cluster.link(one.kind, other.kind)
    if link is None:
        return (Hop(bandwidth=np.inf), 0.0) if one.site == other.site else None
    return Hop(bandwidth=link.speed(min(one.count, other.count)), latency=link.latency), link.price


def _pipeline(parts: Sequence[tuple[Question, NodeKind]], hops: Sequence[tuple[Hop, float]]) -> KindsRow | None:
    """The best engine over kinds in this order, as a line."""
    task = replace(parts[0][0].task, gpus=sum(kind.num_gpus for _, kind in parts))
    best: ChainChoice | None = None
    for served in itertools.product(*(question.served() for question, _ in parts)):
        if len({(one.engine.label, one.precision) for one in served}) > 1:
            continue
        places = [
            Place(served=one, gpus=kind.num_gpus, per_node=kind.gpus_per_node)
            for one, (_, kind) in zip(served, parts, strict=True)
        ]
        found = best_chain(places, [hop for hop, _ in hops], task, objective_of(task))
        if found and (best is None or score_of_choice(found.choice, task) < score_of_choice(best.choice, task)):
            best = found
    return None if best is None else _row_of_chain(best, parts, hops)


def _row_of_chain(
    best: ChainChoice, parts: Sequence[tuple[Question, NodeKind]], hops: Sequence[tuple[Hop, float]]
) -> KindsRow:
    """A chain as a line: each kind with its stages."""
    choice, chain = best.choice, best.chain
    found, figure, layout = choice.found, choice.limits.percentile, choice.layout
    requests, shares = float(np.asarray(found.requests_per_second)), list[Share]()
    for number, (question, kind) in enumerate(parts):
        stages, layers = int(chain.stages_of(number)[0]), int(chain.layers_of(number)[0])
        shares.append(Share(
            kind=kind.kind, site=kind.site, hardware=question.hardware_name, gpus=kind.num_gpus,
            engine=choice.served.engine.label.replace("@", " "), role="stages", routed=1.0, requests_per_second=requests,
            layout=f"{layout.replicas} x {plural(stages, 'stage')} tp {layout.tp}, {layers} layers",
            tokens_per_second=choice.total, ttft_s=float(np.asarray(found.ttft.of(figure))),
            tpot_s=float(np.asarray(found.tpot.of(figure))), limits_kept=choice.meets,
        ))  # fmt: skip
    sent = float(np.asarray(found.total_tokens_per_second)) * ACTIVATION * choice.served.model.hidden_size
    slowest = min((hop.bandwidth for hop, _ in hops), default=np.inf)
    passing = Passing(
        bytes_per_second=sent, bandwidth=slowest if np.isfinite(slowest) else None, price=sum(price for _, price in hops)
    )
    row = row_of(PIPELINE, shares, [(question.rates, kind) for question, kind in parts], passing)
    return replace(row, cut=best.cut, cut_by=CUT_BY[choice.served.engine.name], plan=_plan(best, parts, hops))


def _plan(best: ChainChoice, parts: Sequence[tuple[Question, NodeKind]], hops: Sequence[tuple[Hop, float]]) -> ServePlan:
    """A chain as a serve plan."""
    question, stages = parts[0][0], list[ServeStage]()
    cut = list(best.cut)
    for number, (asked, kind) in enumerate(parts):
        hop = hops[number][0] if number < len(hops) else Hop(bandwidth=np.inf)
        for _ in range(int(best.chain.stages_of(number)[0])):
            stages.append(ServeStage(
                kind=kind.kind, hardware=kind.hardware, layers=cut.pop(0), gpus_per_node=kind.gpus_per_node,
                usd_per_gpu_hour=asked.rates.usd_per_gpu_hour, link_latency=hop.latency,
                link_bandwidth=hop.bandwidth if np.isfinite(hop.bandwidth) else None,
            ))  # fmt: skip
    gpus = sum(kind.num_gpus for _, kind in parts)
    chosen = "" if question.task.loaded else "limits" if question.task.limited else "balanced"
    why = "The stages stand on several kinds, which together answer more than apart, or than has room on one."
    return replace(plan_of(question, best.choice, why, gpus, chosen), hardware=stages[0].hardware, stages=tuple(stages))

"""What a trainer can run of a mixed layout, and the nearest layout that it can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.errors import listed
from planner.mixed.export.export_job import share_text, stages_text
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.record import record


@record
class Limits:
    """What a trainer asks of a mixed layout; what is not asked may differ from stage to stage and from replica to replica."""

    equal_tp: bool = False
    """One tensor parallel degree in all stages."""
    equal_cuts: bool = False
    """All replicas have the same stages: layers, tp, recompute."""
    equal_kinds: bool = False
    """And of the same kinds."""
    equal_shares: bool = False
    """All replicas take as many microbatches of the same size."""
    equal_recompute: bool = False
    """One recompute in all stages."""
    no_selective: bool = False
    """Recompute is full or none."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    cp: bool = False
    """Context parallelism is there."""
    ep: bool = False
    """Expert parallelism is there."""
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    outer: bool = False
    """Local updates are there."""
    offload: bool = False
    """Optimizer states can lie on the host."""
    hsdp: bool = False
    """States can be shared by a part of the replicas, gradients averaged in two levels."""


@record
class _Rule:
    broken: Callable[[MixedLayout], str]
    """What is asked for and cannot be; "" where it can."""
    mend: Callable[[MixedLayout], MixedLayout | None]
    """The nearest layout that keeps the rule; None where there is none."""


def reasons(layout: MixedLayout, limits: Limits) -> list[str]:
    """Every rule that a layout breaks, in words; none = it can be run."""
    return [text for rule in _rules(limits) if (text := rule.broken(layout))]


def nearest(layout: MixedLayout, limits: Limits) -> MixedLayout | None:
    """The layout that differs least: each broken rule mended, the least costly first; None where that leads to none.

    Sequences per step stay; GPUs may be left over, which a new plan would use.
    """
    found: MixedLayout | None = layout
    for rule in _rules(limits):
        if found is not None and rule.broken(found):
            found = rule.mend(found)
    return found if found is not None and not reasons(found, limits) else None


def refusal(who: str, layout: MixedLayout, found: list[str], near: MixedLayout | None) -> str:
    """The sentence that refuses a layout and names the nearest one that runs; ``found``: the reasons."""
    text = f"{who} cannot run this plan: {'; '.join(found)}"
    if layout.outer is not None and near is None:
        return f"{text}; plan it again with --trainer torchtitan, which exports local updates, and another --global-batch-size"
    if near is None:
        return f"{text}; plan with fewer kinds or with --runnable, or export to another trainer"
    again = "; plan --runnable finds the fastest" if layout.outer is None else ""
    return f"{text}. The nearest plan that it runs is {stages_text(near)}{_settings(layout, near)}{again}"


def _settings(layout: MixedLayout, near: MixedLayout) -> str:
    names = ("cp", "ep", "zero", "schedule", "dp_shard")
    changed = [f"{name} {getattr(near, name)}" for name in names if getattr(near, name) != getattr(layout, name)]
    changed += ["without local updates"] if layout.outer and not near.outer else []
    return f", {', '.join(changed)}" if changed else ""


def _stages(layout: MixedLayout) -> list[Stage]:
    return [stage for one in layout.pipelines for stage in one.stages]


def _shape(one: Pipeline, *, kinds: bool) -> tuple[Any, ...]:
    return tuple(
        (held.kind if kinds else "", held.layers, held.tp, held.recompute, held.recompute_layers) for held in one.stages
    )


def _with_stages(layout: MixedLayout, **changed: object) -> MixedLayout:
    """The layout with fields of all stages set."""
    pipelines = tuple(
        replace(one, stages=tuple(replace(held, **changed) for held in one.stages))  # type: ignore[arg-type]
        for one in layout.pipelines
    )
    return replace(layout, pipelines=pipelines)


def _rules(limits: Limits) -> list[_Rule]:
    """Those of a trainer, the least costly to mend first."""
    found = [_schedule(limits.schedules), _zero(limits.zero)]
    found += [] if limits.outer else [_Rule(broken=_outer, mend=lambda one: replace(one, outer=None))]
    found += [] if limits.offload else [_Rule(broken=_offload, mend=lambda one: None)]
    found += [] if limits.hsdp else [_Rule(broken=_levels, mend=lambda one: replace(one, dp_shard=0))]
    found += [_Rule(broken=_selective, mend=_without_selective)] if limits.no_selective else []
    found += [_Rule(broken=_recompute, mend=_one_recompute)] if limits.equal_recompute else []
    found += [] if limits.cp else [_degree("cp", "context")]
    found += [] if limits.ep else [_degree("ep", "expert")]
    found += (
        [_Rule(broken=_tp, mend=lambda one: _with_stages(one, tp=min(held.tp for held in _stages(one))))]
        if limits.equal_tp
        else []
    )
    if limits.equal_cuts:
        found.append(
            _Rule(broken=lambda one: _cuts(one, limits.equal_kinds), mend=lambda one: _one_cut(one, limits.equal_kinds))
        )
    found += [_Rule(broken=_shares, mend=_one_share)] if limits.equal_shares else []
    return found


def _schedule(known: tuple[str, ...]) -> _Rule:
    plain = "1f1b" if "1f1b" in known else known[0]
    return _Rule(
        broken=lambda one: _unknown("schedule", one.schedule, known),
        mend=lambda one: replace(one, schedule=plain, vpp=1),
    )


def _zero(known: tuple[int, ...]) -> _Rule:
    return _Rule(
        broken=lambda one: _unknown("zero", one.zero, known),
        mend=lambda one: replace(one, zero=min(known, key=lambda level: (abs(level - one.zero), -level))),
    )


def _unknown(name: str, value: Any, known: tuple[Any, ...]) -> str:
    return "" if value in known else f"{name} {value}, of which it knows {listed(map(str, known))} here"


def _degree(name: str, words: str) -> _Rule:
    return _Rule(
        broken=lambda one: (
            f"{name} {getattr(one, name)}, and it has no {words} parallelism here" if getattr(one, name) > 1 else ""
        ),
        mend=lambda one: replace(one, **{name: 1}),  # type: ignore[arg-type]
    )


def _outer(layout: MixedLayout) -> str:
    return f"local updates ({layout.outer.method}), which it has not" if layout.outer else ""


def _offload(layout: MixedLayout) -> str:
    share = layout.offload_optimizer
    return f"{share} % of the optimizer states on the host, which it does not do" if share else ""


def _levels(layout: MixedLayout) -> str:
    some = layout.dp_shard
    return f"states shared by {some} of {layout.replicas} replicas, and it shares them over all" if some else ""


def _selective(layout: MixedLayout) -> str:
    kinds = sorted({held.kind for held in _stages(layout) if held.recompute == "selective"})
    return f"selective recompute on {listed(kinds, 'and')}, and it knows full or none per stage" if kinds else ""


def _without_selective(layout: MixedLayout) -> MixedLayout:
    pipelines = tuple(
        replace(one, stages=tuple(
            replace(held, recompute="full") if held.recompute == "selective" else held for held in one.stages
        ))
        for one in layout.pipelines
    )  # fmt: skip
    return replace(layout, pipelines=pipelines)


def _recompute(layout: MixedLayout) -> str:
    every = sorted({(held.recompute, held.recompute_layers) for held in _stages(layout)})
    words = [f"{name} of {count} layers" if count else name for name, count in every]
    return f"recompute {listed(words, 'and')} in one job, and it has one for all stages" if len(every) > 1 else ""


def _one_recompute(layout: MixedLayout) -> MixedLayout:
    """The one that needs the least memory: then all stages fit."""
    order = ("none", "selective", "full")
    most = max(_stages(layout), key=lambda held: (order.index(held.recompute), held.recompute_layers == 0))
    return _with_stages(layout, recompute=most.recompute, recompute_layers=0)


def _tp(layout: MixedLayout) -> str:
    every = sorted({held.tp for held in _stages(layout)})
    return (
        f"tp {listed(map(str, every), 'and')} in one job, and it has one degree for all stages"
        if len(every) > 1
        else ""
    )


def _cuts(layout: MixedLayout, kinds: bool) -> str:
    every = {_shape(one, kinds=kinds) for one in layout.pipelines}
    what = "cuts and kinds" if kinds else "cuts"
    return f"pipelines with {len(every)} different {what}, and its replicas are all alike" if len(every) > 1 else ""


def _one_cut(layout: MixedLayout, kinds: bool) -> MixedLayout | None:
    """Every replica on its kinds with the cut that most sequences pass; those with other numbers of stages are left out."""
    weights: Counter[tuple[Any, ...]] = Counter()
    for one in layout.pipelines:
        weights[_shape(one, kinds=kinds)] += one.count * one.sequences
    best = next(one for one in layout.pipelines if _shape(one, kinds=kinds) == weights.most_common(1)[0][0])
    kept = []
    for one in layout.pipelines:
        if _shape(one, kinds=kinds) == _shape(best, kinds=kinds):
            kept.append(one)
        elif not kinds and len(one.stages) == len(best.stages):
            stages = tuple(replace(other, kind=held.kind) for other, held in zip(best.stages, one.stages, strict=True))
            kept.append(replace(one, stages=stages))
    return _whole_batch(replace(layout, pipelines=tuple(kept)), layout.global_batch_size)


def _shares(layout: MixedLayout) -> str:
    every = sorted({(one.num_microbatches, one.micro_batch_size) for one in layout.pipelines})
    words = [share_text(count, size) for count, size in every]
    return f"shares of {listed(words, 'and')}, and its replicas take equal ones" if len(every) > 1 else ""


def _one_share(layout: MixedLayout) -> MixedLayout | None:
    return _whole_batch(layout, layout.global_batch_size)


def _whole_batch(layout: MixedLayout, sequences: int) -> MixedLayout | None:
    """Equal shares of so many sequences, in microbatches as large as the smallest there are; None where replicas do not divide
    it."""
    sizes = [*sorted({one.micro_batch_size for one in layout.pipelines}), 1]
    size = next((one for one in sizes if sequences % (layout.replicas * one) == 0), 0)
    if not size:
        return None
    count = sequences // (layout.replicas * size)
    return replace(
        layout, pipelines=tuple(replace(one, micro_batch_size=size, num_microbatches=count) for one in layout.pipelines)
    )

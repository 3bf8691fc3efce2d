"""A plan made small enough for a few devices: fewer layers and replicas, the same shards on every rank.

A degree and the dimension that it divides shrink together, so that a rank's matrices, tokens, experts and stage stay what they
are: tp with heads, MLP width and vocabulary, cp with the sequence, ep with the experts, pp with the layers. What cannot stay
(states are sharded over fewer replicas, groups are smaller) is said in a sentence each.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.cost.pipeline.partition import stage_layers
from planner.errors import PlannerError
from planner.lab.reference.split import refusals
from planner.layout import Layout, Schedule
from planner.model import ModelSpec
from planner.record import record
from planner.rules import Job, check
from planner.units import GIB

LEAST = 2
"""Devices: with fewer there is no collective to run."""
ROUNDS = 2
"""Microbatches of a truncated pipeline over its stages (and of a job without one): past warm-up and first accumulation."""


@record
class Truncated:
    """A smaller plan."""

    job: Job
    """Its workload and as many GPUs as it uses, of the same kind, in one node."""
    layout: Layout
    """Its layout."""
    layers: int
    """Layers of each virtual stage at this depth; the plan's own number where the depth was not reduced and stages differ."""
    changes: tuple[str, ...]
    """What differs from the plan, a sentence each."""


def shrink(job: Job, layout: Layout, devices: int, memory: float) -> Truncated:
    """The largest truncated plan for so many devices of so many bytes each. Raises PlannerError when there is none."""
    if devices < LEAST:
        raise PlannerError(
            f"level truncated needs at least {LEAST} devices for real collectives, this machine has {devices}; --rung rank "
            "runs one rank of the plan on one device"
        )
    if devices >= int(layout.num_gpus):
        raise PlannerError(
            f"the plan has {int(layout.num_gpus)} GPUs and this machine {devices}: nothing to truncate; use --rung full"
        )
    said: list[str] = []
    for degrees in sorted(_degrees(layout, devices), key=_kept, reverse=True):
        try:
            return _deepest(job, layout, degrees, memory)
        except _TooLargeError:
            raise
        except PlannerError as error:
            said.append(str(error))
    reason = said[0] if said else "none of its degrees has a smaller divisor"
    raise PlannerError(
        f"the plan cannot be truncated to {devices} devices with the same shards: {reason}; use --rung rank, or more devices"
    )


class _TooLargeError(PlannerError):
    """Not even one layer per stage fits: fewer ranks would only make shards larger."""


def _kept(degrees: Layout) -> tuple[int, ...]:
    """What is kept first: shards inside a layer, then that there are a pipeline and replicas at all, then how many."""
    tp, ep, cp, pp, dp = (int(getattr(degrees, name)) for name in ("tp", "ep", "cp", "pp", "dp"))
    return (tp, ep, cp, min(pp, 2) + min(dp, 2), min(pp, 2), pp, dp)


def _degrees(layout: Layout, devices: int) -> Iterator[Layout]:
    """The layout with every smaller set of degrees that has at least two ranks."""
    tp, ep, cp = (
        [d for d in range(1, min(n, devices) + 1) if n % d == 0]
        for n in (int(layout.tp), int(layout.ep), int(layout.cp))
    )
    pp, dp = (range(1, min(n, devices) + 1) for n in (int(layout.pp), int(layout.dp)))
    shard = int(layout.shard)
    for t, e, c, p, d in itertools.product(tp, ep, cp, pp, dp):
        whole = d <= shard or d % shard == 0
        if LEAST <= t * c * p * d <= devices and whole and t * c * min(d, shard) % e == 0:
            yield layout.replace(tp=t, ep=e, cp=c, pp=p, dp=d)


def _deepest(job: Job, layout: Layout, degrees: Layout, memory: float) -> Truncated:
    """As many layers as the plan's stages have, or as fit."""
    whole = _build(job, layout, degrees, None)
    if _needs(whole) <= memory:
        return whole
    most = whole.layers  # does not fit, or has other stages than even ones
    low = bisect.bisect(range(1, most), memory, key=lambda layers: _needs(_build(job, layout, degrees, layers)))
    if low == 0:
        least = _needs(_build(job, layout, degrees, 1))
        raise _TooLargeError(
            f"one layer per stage of the truncated plan needs {least / GIB:.1f} GiB of {memory / GIB:.1f} GiB on each of "
            f"{int(degrees.num_gpus)} devices, because its states are sharded over fewer ranks; use more devices, or --rung rank"
        )
    found = _build(job, layout, degrees, low)
    why = f"{low} layers per stage instead of {most}: what fits into {memory / GIB:.1f} GiB of each device"
    return dataclasses.replace(found, changes=(*found.changes, why))


def shallower(job: Job, layout: Layout, deep: Truncated) -> Truncated | None:
    """The same truncated plan with half as many layers per stage, to see what depends on depth; None with one layer."""
    return _build(job, layout, deep.layout, deep.layers // 2) if deep.layers > 1 else None


def _needs(small: Truncated) -> float:
    """Peak bytes of the worst device, as the cost model says."""
    found = estimate(small.job.workload, small.job.cluster, small.job.trainer, Layout.stack([small.layout]))
    return float(found.memory_needed[0])


def _build(job: Job, layout: Layout, degrees: Layout, layers: int | None) -> Truncated:
    """The plan with such degrees and layers per virtual stage (None: the plan's own). Raises PlannerError if not legal."""
    tp, ep, cp, pp, dp = (int(getattr(degrees, name)) for name in ("tp", "ep", "cp", "pp", "dp"))
    length = job.workload.sequence_length * cp // int(layout.cp)
    piped, own = pp > 1, stage_layers(job.model.num_layers, layout)
    own = [*own[: pp - 1], own[-1]] if piped else own[:1]  # the first, some in the middle, the last
    parts = int(layout.vpp) if piped else 1
    each = layers or max(1, max(own) // parts)
    model = _smaller(job.model, layout, degrees, sum(own) if layers is None else layers * parts * pp)
    few = min(int(layout.num_microbatches), ROUNDS * pp)
    small = layout.replace(
        tp=tp, ep=ep, cp=cp, pp=pp, dp=dp, dp_shard=min(int(layout.shard), dp),
        num_microbatches=few // pp * pp if few >= pp else few,  # whole rounds of a pipeline
        first_stage_layers=int(layout.first_stage_layers) if piped and layers is None else 0,
        last_stage_layers=int(layout.last_stage_layers) if piped and layers is None else 0,
        **({} if piped else {"vpp": 1, "schedule": int(Schedule.ONE_F_ONE_B)}),
        **({"sequence_parallel": 0} if tp == 1 else {}),
    )  # fmt: skip
    workload = dataclasses.replace(
        job.workload, model=model, sequence_length=length, global_batch_size=int(small.global_batch_size)
    )
    cluster = Cluster(hardware=job.cluster.hardware, num_gpus=int(small.num_gpus))
    smaller = Job(workload=workload, cluster=cluster, trainer=job.trainer)
    check(smaller, small)
    for reason in refusals(workload, small):
        raise PlannerError(reason)
    return Truncated(job=smaller, layout=small, layers=each, changes=_changes(job, layout, smaller, small))


def _smaller(model: ModelSpec, layout: Layout, degrees: Layout, layers: int) -> ModelSpec:
    """The model whose shards on fewer ranks are the plan's, with so many layers, the leading dense ones of a mixture among
    them."""
    tp, t, ep, e = (int(one) for one in (layout.tp, degrees.tp, layout.ep, degrees.ep))
    names = ("num_heads", "num_kv_heads", "ffn_size", "shared_expert_ffn_size")
    odd = [f"{name} {getattr(model, name)}" for name in names if getattr(model, name) * t % tp]
    if odd:
        raise PlannerError(f"tp {t} instead of {tp} would need {odd[0]} divided by {tp // t}")
    sizes = {name: getattr(model, name) * t // tp for name in names}
    sizes["num_experts"] = experts = model.num_experts * e // ep
    if model.num_experts * e % ep or (e < ep and experts < model.top_k):
        raise PlannerError(
            f"ep {e} instead of {ep} would leave {experts} of {model.num_experts} experts for the {model.top_k} that each token "
            "visits"
        )
    if t < tp:
        sizes["vocab_size"] = -(-model.vocab_size // tp) * t
    if layers != model.num_layers:
        sizes["num_dense_layers"] = min(model.num_dense_layers, max(layers - model.moe_layer_interval, 0))
    smaller = dataclasses.replace(model, **sizes, num_layers=layers)
    if smaller == model:
        return model
    return dataclasses.replace(smaller, published_parameters=0.0, published_active_parameters=0.0)


def _changes(job: Job, layout: Layout, smaller: Job, small: Layout) -> tuple[str, ...]:
    """What differs, a sentence each."""
    shards = [int(one.shard) * int(one.cp) for one in (layout, small)]
    times = int(layout.tp) // int(small.tp)
    kept = "the first and the last stage" if int(small.pp) > 1 else "one stage with embedding and head"
    between = " and some between" if int(small.pp) > 2 else ""
    notes = {
        "tp": f" with 1/{times} of heads, MLP width and vocabulary: the same matrices per rank, whose norms and residual "
              f"stream have {times} times the tokens",
        "ep": f" with {smaller.model.num_experts} experts: the same experts and rows per rank, exchanged with fewer",
        "cp": f" with sequences of {smaller.workload.sequence_length} instead of {job.workload.sequence_length} tokens: the "
              "same tokens per rank, which attend to fewer others",
        "pp": f": {kept}{between}", "dp": "", "num_microbatches": " per step",
    }  # fmt: skip
    found = []
    for name, note in notes.items():
        before, after = int(getattr(layout, name)), int(getattr(small, name))
        if after < before:
            found.append(f"{name} {after} instead of {before}{note}")
    if smaller.model.num_layers != job.model.num_layers:
        found.append(f"{smaller.model.num_layers} layers instead of {job.model.num_layers}")
    if int(layout.zero) and shards[1] < shards[0]:
        found.append(
            f"states are sharded over {shards[1]} instead of {shards[0]} ranks: {shards[0] / shards[1]:g} times the bytes of "
            "each rank in optimizer, gathers and reductions of a shard"
        )
    return tuple(found)

"""What the traffic of states adds to a step: how often gradients are reduced and weights gathered, and what overlap hides."""

import numpy as np

from planner.arrays import Floats
from planner.cluster import Cluster, strides
from planner.cost.price.communication import exposed, slowdown_of
from planner.cost.price.state_traffic import UpdateSeconds
from planner.hardware import Slowdown
from planner.layout import Layout, Schedule
from planner.trainer import Trainer


def data_parallel(
    trainer: Trainer, layout: Layout, traffic: UpdateSeconds, forward: Floats, backward: Floats, slowdown: Slowdown
) -> tuple[Floats, Floats]:
    """Exposed and hidden seconds per step of gradients and weights; all arrays (3, N), stages first.

    ``forward`` and ``backward`` are seconds per microbatch: what traffic hides behind. A backward pass ends with gradients
    alone: weights come before their layer. Copies into and out of communication buffers share the memory with the computation,
    which they lengthen. ``slowdown``: what traffic and computation cost each other (``data_slowdown``).

    zero 0     all-reduce of the gradients once per step, overlapped with the last backward pass
    zero 1     reduce-scatter of the gradients likewise; all-gather of the weights overlapped with the next first forward pass
    zero 2, 3  reduce-scatter for every microbatch, or for the last of a step where gradients are ``deferred``; all-gather of
               the weights for every forward pass where resident weights are sharded (else once per step), with zero 3 for
               every backward pass as well  [FSDP, arXiv 2304.11277, section 3]
    pipelines  once per step up to zero 2: gathered weights and unsharded gradients stay between microbatches. With zero 3
               weights are dropped after every forward pass and stay after a backward pass, so that what comes next finds
               them or gathers them: all first forward passes, each backward pass behind a forward one, m + 1 in all
               whatever the schedule [torch.distributed.pipelining, stage.backward_maybe_with_nosync; counted in the fake run]
               Below zero 3 a schedule may drop virtual stages and gather them again (``_again``).

    A forward pass goes through the reference model too, whose weights are gathered for it with zero 3.

    HSDP adds an all-reduce of the local shard over the replicas.  [the same, section 3.2.2]
    """
    zero, m = np.asarray(layout.zero), np.asarray(layout.num_microbatches, dtype=float)
    pipelined, hidden_by = np.asarray(layout.pp) > 1, trainer.traffic.overlap
    weights, last, first = traffic.gather, traffic.reduced_last * traffic.reduce, traffic.gathered_first * traffic.gather
    once = (zero <= 1) | pipelined
    between = np.where(once | (zero < 3), 0.0, weights)  # what a backward pass gathers
    backward_traffic, passes = traffic.reduce + between, np.where(once, 1.0, m)
    gathers = np.where(once | (zero < trainer.stored.weight_sharding_level), 1.0, m) * (zero >= 1)
    added = backward_traffic
    if "gradients" in hidden_by:
        added = _exposed(layout, slowdown, backward_traffic, backward, last)
    if trainer.traffic.zero1_all_reduces and "whole_gradients" not in hidden_by:
        added = np.where(zero == 1, backward_traffic, added)
    wanted = weights + traffic.reference
    gathering = _exposed(layout, slowdown, wanted, forward, first) if "parameters" in hidden_by else wanted
    reductions, least = passes, between
    if trainer.stored.gradients == "deferred":  # passes but the last gather alone
        reductions = np.minimum(passes, 1.0)
        least = _exposed(layout, slowdown, between, backward, 0.0 * last) if "gradients" in hidden_by else between
    added = reductions * added + (passes - reductions) * least + gathers * gathering
    hidden = reductions * backward_traffic + (passes - reductions) * between + gathers * wanted - added
    again = np.where(once | (zero < 3), 0.0, passes)
    dropped = np.where((zero == 3) & pipelined, m, 0.0)
    if np.any(dropped):
        more, window = dropped * weights, np.where(np.asarray(layout.schedule) == Schedule.GPIPE, forward, backward)
        beyond = exposed(weights, window, first, slowdown) if "parameters" in hidden_by else weights
        exposed_more = dropped * beyond
        added, hidden, again = added + exposed_more, hidden + more - exposed_more, again + dropped
    for term in trainer.terms:
        more = term.gathered_again(layout) * (once & pipelined & (zero >= 1) & (zero < 3))
        if np.any(more):
            exposed_more = more * _again(layout, weights, forward + backward, slowdown, hides="parameters" in hidden_by)
            added, hidden, again = added + exposed_more, hidden + more * weights - exposed_more, again + more
    gathered, reduced = trainer.traffic.copied("gather"), trainer.traffic.copied("reduce")
    moved = (gathers * np.where(traffic.reference > 0.0, 2.0, 1.0) + again) * gathered + reductions * (zero >= 1) * reduced
    return added + traffic.copies * moved, hidden


def _exposed(layout: Layout, slowdown: Slowdown, time: Floats, window: Floats, end: Floats) -> Floats:
    """Seconds that stay exposed of ``time``, of which ``end`` has nothing to hide behind.

    Interleaved schedules end with min(p, m) backward passes of each of the v chunks in turn: gradients of all but the
    last chunk are complete while others are still computed, so (v - 1) / v of the traffic has min(p, m) times the
    window; the weights of all but the first chunk likewise.  [Megatron Core, one bucket group per model chunk]
    """
    pp, vpp, m = (np.asarray(one, dtype=float) for one in (layout.pp, layout.vpp, layout.num_microbatches))
    interleaved = (np.asarray(layout.schedule) == Schedule.INTERLEAVED) & (pp > 1)
    early = np.where(interleaved, 1.0 - 1.0 / np.maximum(vpp, 1.0), 0.0)
    late = 1.0 - early
    last = exposed(time * late, window * late, end, slowdown)
    if not np.any(early):
        return last
    return last + exposed(time * early, window * early * np.minimum(pp, m), slowdown=slowdown)


def _again(layout: Layout, weights: Floats, passes: Floats, slowdown: Slowdown, hides: bool) -> Floats:
    """Exposed seconds to gather all v virtual stages of a rank again, one at a time, each weights / v.

    The schedule gathers the next three that it will need. Passes forward and backward alternate for p microbatches of two virtual
    stages, then of the next two: the one that goes forward next is gathered when these begin, the one that goes back next
    when they end. So half hide behind p pairs of passes of a virtual stage, ``passes`` / v each, half behind one.
    [torch 2.13, pipelining/schedules.py, _add_unshard_reshard]
    """
    if not hides:
        return weights
    pp, vpp = np.asarray(layout.pp, dtype=float), np.asarray(layout.vpp, dtype=float)
    each, window = weights / vpp, passes / vpp
    return vpp / 2.0 * (exposed(each, pp * window, slowdown=slowdown) + exposed(each, window, slowdown=slowdown))


def data_slowdown(cluster: Cluster, layout: Layout) -> Slowdown:
    """What traffic of states and computation cost each other, by the link of the whole group that holds the dense weights."""
    stride = strides(layout)
    distance = np.where(np.asarray(layout.cp) > 1, np.asarray(stride["cp"]), np.asarray(stride["dp"]))
    return slowdown_of(cluster, np.asarray(layout.dp) * np.asarray(layout.cp), distance)

"""The computation of a step operator by operator: how long each runs, and what keeps it from the peak of the GPU.

The same operators that the step time is priced of, priced three times: as in the step, at the full clock, and there without what
quantising costs. The differences are losses; what is left over an operator's FLOP at the peak is the loss of its kind.
"""

import dataclasses
import math

import numpy as np

from planner.cost.estimate import PARTS
from planner.cost.layer.operators import Attention, GatheredRows, Gemm, MemoryBound, Number, Operator, Scan, Shard
from planner.cost.pipeline.partition import stage_parameters
from planner.cost.price.compute import Work, gemm_dtype, model_passes, price
from planner.cost.price.layer_costs import ends_of, operators_of, shard_of
from planner.cost.price.stage_times import block_counts
from planner.cost.price.state_traffic import accumulation_seconds
from planner.cost.state_dtypes import stored_as
from planner.hardware import HardwareProfile
from planner.layout import Column, Layout
from planner.record import record
from planner.timeline.priced_plan import Priced

LOSSES = ("shapes", "precision", "imbalance", "attention", "scans", "memory_bound", "clock", "uneven")
"""What computation takes longer for than its FLOP at the peak, in the order of the waterfall."""
KINDS = {Gemm: "matrix product", Attention: "attention", GatheredRows: "attention", Scan: "scan", MemoryBound: "memory-bound"}
"""Kinds of operators for people."""
LOSS_OF = {Attention: "attention", GatheredRows: "attention", Scan: "scans", MemoryBound: "memory_bound"}
"""Which loss the time over the FLOP is; of a matrix product it is looked at more closely."""


@record
class OperatorTime:
    """One operator of all layers, on the mean GPU of a pipeline; seconds of one step."""

    name: str
    """As the cost model calls it."""
    kind: str
    """One of KINDS."""
    seconds: float
    """Forward and backward; what recompute repeats is a part of the step of its own."""
    at_peak: float
    """What its model FLOP would take at the peak that the MFU is over."""
    losses: dict[str, float]
    """By LOSSES but the last; with ``at_peak`` they sum to ``seconds``."""


@record
class Computation:
    """The computation of one step; seconds."""

    operators: tuple[OperatorTime, ...]
    """The longest first."""
    losses: dict[str, float]
    """By LOSSES; with the model FLOP at the peak they sum to the part 'compute' of the step time."""


def computation_of(priced: Priced) -> Computation:
    """Every operator of a priced layout, and the losses of all of them.

    ``uneven`` is what the slowest stage computes longer than the mean of all stages: the model FLOP are those of the mean.
    Below 0 where the slowest stage is slow for its communication and computes less than the others.
    """
    found: dict[str, list[OperatorTime]] = {}
    for one in _operators(priced):
        found.setdefault(one.name, []).append(one)
    operators = sorted(map(_together, found.values()), key=lambda one: -one.seconds)
    losses = {name: math.fsum(one.losses[name] for one in operators) for name in LOSSES[:-1]}
    compute = float(priced.estimate.time[PARTS[0]][0])
    losses["uneven"] = compute - math.fsum(one.seconds for one in operators)
    if int(priced.layout.pp) == 1:  # nothing but rounding
        losses["memory_bound"] += losses["uneven"]
        losses["uneven"] = 0.0
    return Computation(operators=tuple(operators), losses=losses)


def _together(some: list[OperatorTime]) -> OperatorTime:
    """Operators of the same name in different blocks as one."""
    first = some[0]
    return dataclasses.replace(
        first, seconds=math.fsum(one.seconds for one in some), at_peak=math.fsum(one.at_peak for one in some),
        losses={name: math.fsum(one.losses[name] for one in some) for name in first.losses},
    )  # fmt: skip


def _operators(priced: Priced) -> list[OperatorTime]:
    """Every operator of every block, times its number in the model over the stages, times the microbatches of a step."""
    job, layout = priced.job, Layout.stack([priced.assigned])
    trainer = stored_as(job.workload, job.trainer)
    shard = shard_of(job.workload, trainer, layout)
    counts, m, pp = block_counts(job.workload.model), _number(layout.num_microbatches), _number(layout.pp)
    blocks = operators_of(shard) | {name: [(1.0, made)] for name, made in ends_of(shard).items()}
    found = []
    for name, kinds in blocks.items():
        each = counts["embedding" if name == "images" else name] * m / pp
        for share, (operators, _) in kinds:
            found += _times(operators, shard, job.cluster.hardware, priced.estimate.peak_flops, each * share)
    parameters = stage_parameters(job.workload, layout, priced.contents, trainer.kernels)
    adding = accumulation_seconds(job.workload, job.cluster, trainer, layout, parameters) * priced.contents.weight
    if seconds := m * float(np.sum(adding)) / pp:
        losses = dict.fromkeys(LOSSES[:-1], 0.0) | {"memory_bound": seconds}
        found.append(OperatorTime(name="gradient_sums", kind="memory-bound", seconds=seconds, at_peak=0.0, losses=losses))
    return found


def _times(operators: list[Operator], shard: Shard, hardware: HardwareProfile, peak: float, each: float) -> list[OperatorTime]:
    """The operators of one block, ``each`` times in a step; ``peak``: that of the MFU, FLOP/s."""
    plain = dataclasses.replace(shard.trainer, kernels=dataclasses.replace(shard.trainer.kernels, casts={}))
    full_clock = dataclasses.replace(hardware, sustained_clock=1.0)
    work = price(operators, shard, hardware)
    fast = price(operators, shard, full_clock)
    bare = price(operators, dataclasses.replace(shard, trainer=plain), full_clock)
    passes = model_passes(shard.workload)
    found = []
    for one in operators:
        seconds, quick, least = (each * _seconds(prices[one.name], shard) for prices in (work, fast, bare))
        flop = each * passes * _number(work[one.name].flop)
        losses = dict.fromkeys(LOSSES[:-1], 0.0)
        losses["clock"], losses["memory_bound"] = seconds - quick, quick - least
        left = least - flop / peak
        if isinstance(one, Gemm):
            own = hardware.peak(gemm_dtype(shard, one.low_precision, hardware))
            losses["precision"] = flop / own - flop / peak
            losses["imbalance"] = 0.0 if one.activations else flop / own * (1.0 / _number(one.useful) - 1.0)
            losses["attention" if one.activations else "shapes"] += left - losses["precision"] - losses["imbalance"]
        else:
            losses[LOSS_OF[type(one)]] += left
        kind = "attention" if isinstance(one, Gemm) and one.activations else KINDS[type(one)]
        found.append(OperatorTime(name=one.name, kind=kind, seconds=seconds, at_peak=flop / peak, losses=losses))
    return found


def _seconds(work: Work, shard: Shard) -> float:
    """Both passes, and the forward pass of a reference model."""
    return _number(work.forward) * shard.workload.forwards + _number(work.dgrad) + _number(work.wgrad)


def _number(value: Number | Column) -> float:
    """The one number of a column of length 1."""
    return float(np.ravel(value)[0])

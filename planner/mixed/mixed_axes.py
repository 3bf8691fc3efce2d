"""What a search over mixed layouts varies: degrees that rules and trainers allow on every kind, within what the user fixed."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import numpy as np

from planner.errors import PlannerError
from planner.layout import FIELDS, NAMES, Layout, divisors
from planner.mixed.mixed_job import RECOMPUTES, SCHEDULES, MixedJob
from planner.mixed.mixed_layout import INTERLEAVED
from planner.mixed.stage_tables import Axes
from planner.record import record
from planner.rules import stage_allowed
from planner.schema import Count, one_of, plain_fields, within
from planner.space import MICRO_BATCHES

LARGEST_TP = 64
LEAST_TOKENS, FEWER_TOKENS = 4096, 1024
"""Context parallelism leaves every rank at least this many tokens of a sequence; fewer on small clusters, where the search has time
for them: they were seen to gain 1 % (docs/log/mixed.md). ``--cp`` may ask for any."""
SMALL = 128
"""GPUs of a small cluster."""
VPPS = (2, 4)
"""Virtual stages that are tried."""


@record
class MixedPins:
    """What the user fixed; None = searched."""

    tp: Count | None = None
    """Of every kind."""
    micro_batch_size: Count | None = None
    recompute: Annotated[str | None, one_of(*NAMES["recompute"].values())] = None
    zero: Annotated[int | None, within(0, 3)] = None
    schedule: Annotated[str | None, one_of(*NAMES["schedule"].values())] = None
    vpp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    offload_optimizer: Annotated[int | None, within(0, 100)] = None
    """None: on the host only where nothing fits otherwise."""
    equal_shares: bool = False
    """All replicas take as many microbatches, as most trainers ask for."""
    equal_tp: bool = False
    """Likewise one tensor parallel degree for all stages."""
    equal_recompute: bool = False
    """Likewise one recompute for all stages."""
    runnable: bool = False
    """Only what an export of the trainer runs as it is."""

    def to_dict(self) -> dict[str, Any]:
        """What is fixed, as plain data that ``schema.read`` takes back."""
        return plain_fields(self)

    def of_layout(self) -> dict[str, int]:
        """The fixed fields that a layout of one kind has, as it holds them."""
        given = {name: value for name, value in self.to_dict().items() if name in FIELDS}
        return {name: int(getattr(Layout.from_dict(given), name)) for name in given}


NOTHING_FIXED = MixedPins()


def axes_of(job: MixedJob, pins: MixedPins, offload: int = 0) -> list[Axes]:
    """What is searched: one for every context and expert parallel degree, schedule, and where it must be one for all stages,
    recompute. Raises PlannerError where nothing that was fixed suits the job."""
    batch = job.workload.global_batch_size
    micros = (pins.micro_batch_size,) if pins.micro_batch_size else tuple(b for b in MICRO_BATCHES if batch % b == 0)
    if batch % micros[0]:
        raise PlannerError(f"micro_batch_size {micros[0]} does not divide the global batch of {batch}")
    schedules = _schedules(job, pins)
    zero = pins.zero if pins.zero is not None else _zero(job)
    recomputes = job.recomputes if pins.recompute is None else (pins.recompute,)
    sets = [(one,) for one in recomputes] if pins.equal_recompute and pins.recompute is None else [recomputes]
    found = list[Axes]()
    for cp, ep, (schedule, vpp), some in itertools.product(_contexts(job, pins), _experts(job, pins), schedules, sets):
        most = min(sum(one.num_gpus for one in job.clusters.values()) // cp, batch)
        fixed = {"cp": cp, "ep": ep, "zero": zero, "schedule": int(SCHEDULES[schedule]), "vpp": vpp,
                 "micro_batch_size": micros[0], "offload_optimizer": offload}  # fmt: skip
        tps = {kind: _tps(job, kind, pins, fixed) for kind in job.kinds}
        if not any(tps.values()):
            continue
        piped = schedule in job.trainer.legal.schedules
        piped = piped and any(_legal(job, kind, fixed, tp, 2) for kind, every in tps.items() for tp in every)
        if vpp > 1 and not piped:
            continue
        found.append(Axes(
            tps=tps, micros=micros, replicas=tuple(2**n for n in range(max(most, 1).bit_length())), cp=cp, ep=ep, zero=zero,
            schedule=schedule, vpp=vpp, recomputes=some, piped=piped, offload=offload, equal_shares=pins.equal_shares,
            equal_tp=pins.equal_tp,
        ))  # fmt: skip
    if not found and offload == (pins.offload_optimizer or 0):
        _say_why(job, pins, zero, schedules[0], offload)
    return found


def _say_why(job: MixedJob, pins: MixedPins, zero: int, schedule: tuple[str, int], offload: int) -> None:
    """Raise the sentence of the first rule that the pinned degrees break on the first kind."""
    tp, ep, cp = pins.tp or 1, pins.ep or 1, pins.cp or 1
    kind = job.kinds[0]
    at = job.layout(
        kind, tp=tp, pp=1 + (schedule[1] > 1), dp=ep, cp=cp, ep=ep, zero=zero, micro_batch_size=pins.micro_batch_size or 1,
        schedule=int(SCHEDULES[schedule[0]]), vpp=schedule[1], offload_optimizer=offload,
    )  # fmt: skip
    stage_allowed(job.uniform(kind), at, say=True)
    heads = f"leave --tp out, or choose a divisor of {job.workload.model.num_heads} heads"
    raise PlannerError(f"no tensor parallel degree suits {kind}; {heads}")


def _zero(job: MixedJob) -> int:
    """The least level of state sharding that the trainer has in pipelines."""
    legal = job.trainer.legal
    pipelined = legal.zero_with_pp if legal.pp else legal.zero
    return min([level for level in pipelined if level >= 1] or [max(legal.zero)])


def _schedules(job: MixedJob, pins: MixedPins) -> list[tuple[str, int]]:
    """Schedules with their virtual stages. Interleaved chunks of unlike stages only where the trainer cuts layers freely."""
    known = job.trainer.legal.schedules
    plain = "1f1b" if "1f1b" in known or not known else "gpipe" if "gpipe" in known else "1f1b"
    interleaves = INTERLEAVED in known and job.trainer.legal.uneven_stages
    schedule = pins.schedule or (None if pins.vpp in (None, 1) else INTERLEAVED)
    if schedule is None:
        return [(plain, 1), *((INTERLEAVED, vpp) for vpp in VPPS if interleaves and pins.vpp is None)]
    if schedule not in SCHEDULES:
        raise PlannerError(f"schedule {schedule} is not planned on mixed clusters; choose {', '.join(SCHEDULES)}")
    if schedule != INTERLEAVED:
        if pins.vpp not in (None, 1):
            raise PlannerError(f"vpp {pins.vpp} with schedule {schedule}: virtual stages are those of {INTERLEAVED}")
        return [(schedule, 1)]
    if not interleaves:
        raise PlannerError(f"trainer {job.trainer.name} has no interleaved stages of unlike length; choose schedule {plain}")
    return [(INTERLEAVED, vpp) for vpp in ((pins.vpp,) if pins.vpp else VPPS)]


def _contexts(job: MixedJob, pins: MixedPins) -> tuple[int, ...]:
    """Context parallel degrees: powers of two that leave enough tokens, inside the largest kind."""
    if pins.cp is not None:
        return (pins.cp,)
    if not job.trainer.legal.cp_methods:
        return (1,)
    least = FEWER_TOKENS if job.cluster.num_gpus <= SMALL else LEAST_TOKENS
    most = min(job.workload.sequence_length // least, max(one.num_gpus for one in job.clusters.values()))
    return tuple(2**n for n in range(max(most, 1).bit_length()))


def _experts(job: MixedJob, pins: MixedPins) -> tuple[int, ...]:
    """Expert parallel degrees: none, a node's, and eight times as many."""
    if pins.ep is not None:
        return (pins.ep,)
    if not job.workload.model.is_moe or job.trainer.legal.expert_parallel == "none":
        return (1,)
    return tuple(n for n in (1, 8, 64) if job.workload.model.num_experts % n == 0)


def _tps(job: MixedJob, kind: str, pins: MixedPins, fixed: dict[str, int]) -> tuple[int, ...]:
    """Tensor parallel degrees of a kind: inside its fast link, and as all rules of a stage allow it."""
    cluster = job.clusters[kind]
    most = min(int(cluster.domain), cluster.num_gpus, LARGEST_TP)
    degrees = [n for n in divisors(job.workload.model.num_heads) if n <= most and most % n == 0 and pins.tp in (None, n)]
    return tuple(n for n in degrees if n * fixed["cp"] <= cluster.num_gpus and _legal(job, kind, fixed, n, 1 + (fixed["vpp"] > 1)))


def _legal(job: MixedJob, kind: str, fixed: dict[str, int], tp: int, pp: int) -> bool:
    """Whether all rules of a stage hold, in as many replicas as it has experts apart."""
    at: Layout = job.layout(kind, tp=tp, pp=pp, dp=fixed["ep"], recompute=int(RECOMPUTES["none"]), **fixed)
    return bool(np.all(stage_allowed(job.uniform(kind), at)))

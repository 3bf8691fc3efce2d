"""Mechanisms that may change a step or its memory: changes of a plan's inputs that are priced again, each with its check.

A mechanism is a family of changes with a size: a factor on what a machine or a stack achieves, or something that is on or off.
mechanisms.yaml holds the words, the sizes and how plausible they are by published runs; here stands when a plan may have one, and
what it changes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner import library
from planner.cluster import Cluster
from planner.cost.layer.routing import busiest
from planner.cost.pipeline.partition import stage_layers
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute, Schedule
from planner.questions.calibrate.factors import FACTORS, achieved, highest
from planner.record import record
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced
from planner.trainer_records import PASSES, WORDS
from planner.units import GIB, GIGA, format_seconds
from planner.workload import LOW_PRECISIONS

Change = Callable[[Priced, float], tuple[Job, Layout]]
_FACTORS = {factor.key: factor for factor in FACTORS}
EAGER_LOGITS = 14.0
"""Bytes per logit of a loss in plain torch: bf16, fp32 copy, log softmax, gradient (docs/log, torchtitan)."""
GATHERED_LOGITS = 20.0
"""The same where shards are gathered first (docs/log, Hagemann)."""
FP32 = 4.0


@record
class Mechanism:
    """One thing that may not be as the plan assumes."""

    key: str
    name: str
    """In words, without its size."""
    size: str
    """Template of the size in words."""
    now: float
    """The planned number that the size multiplies or replaces, for the template."""
    change: Change
    """Inputs with the mechanism at a size."""
    seen: int
    """Published sources in which it was the cause."""
    source: str
    """Where that and the width come from."""
    check: str
    """The command, or line of a log, that decides."""
    sizes: tuple[float, ...]
    """Continuous: (largest,), from 1 on; else the sizes that it may have."""
    width: float
    """Standard deviation of the logarithm of a continuous size; 0 = the sizes are options, equally likely."""

    def size_text(self, x: float) -> str:
        """The size in words."""
        now, times = self.now, self.now * x
        seconds = {"seconds": format_seconds(times), "now_seconds": format_seconds(now)}
        return self.size.format(x=x, inverse=1.0 / x, now=now, times=times, divided=now / x, **seconds)


class Case(NamedTuple):
    """A mechanism of one plan."""

    key: str
    applies: bool
    """The plan may have it."""
    change: Change
    now: float = 0.0
    sizes: tuple[float, ...] = ()
    """Where they depend on the plan."""


@cache
def _texts() -> dict[str, Any]:
    return library.read_yaml(Path(__file__).with_name("mechanisms.yaml"))


def _made(section: str, cases: list[Case], words: Mapping[str, str] | None = None) -> list[Mechanism]:
    """The mechanisms that a plan may have, with what a section of mechanisms.yaml says; ``words`` for its checks."""
    found = []
    for one in cases:
        if not one.applies:
            continue
        said = _texts()[section][one.key]
        width = 0.0
        if "largest" in said:
            width = math.log(said["seen_size"]) / 2.0 if "seen_size" in said else _FACTORS[one.key].width
        found.append(Mechanism(
            key=one.key, name=said["name"], size=said["size"], now=one.now, change=one.change, seen=said.get("seen", 0),
            source=said.get("source") or _FACTORS[one.key].why, check=said["check"].format(**words or {}),
            sizes=one.sizes or (said.get("largest", 1.0),), width=width,
        ))  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------ changes


def with_hardware(base: Priced, hardware: HardwareProfile) -> tuple[Job, Layout]:
    """The inputs with another profile."""
    return replace(base.job, cluster=Cluster(hardware=hardware, num_gpus=base.job.cluster.num_gpus)), base.layout


def times_slower(name: str) -> Change:
    """A figure of the hardware, x times worse."""
    return lambda base, x: with_hardware(base, base.job.cluster.hardware.scaled(**{name: 1.0 / x}))


def achieved_factor(key: str, worse: bool = True) -> Change:
    """A factor of calibration, x times worse or x times better."""
    more_is_better = key in ("sustained_clock", "memory_fraction", "scale_up", "scale_out")

    def change(base: Priced, x: float) -> tuple[Job, Layout]:
        value = 1.0 / x if worse == more_is_better else x
        hardware, trainer = achieved(base.job.cluster.hardware, base.job.trainer, {key: value})
        job, layout = with_hardware(base, hardware)
        return replace(job, trainer=trainer), layout

    return change


def changed(
    trainer: Mapping[str, Any] | None = None, workload: Mapping[str, Any] | None = None, **layout: int
) -> Change:
    """Facts of the trainer, fields of the workload and of the layout; a function makes its value of the old one and the size."""

    def change(base: Priced, x: float) -> tuple[Job, Layout]:
        old, work = base.job.trainer, base.job.workload
        facts = {name: new(old.fact(name), x) if callable(new) else new for name, new in (trainer or {}).items()}
        fields = {name: new(getattr(work, name), x) if callable(new) else new for name, new in (workload or {}).items()}
        job = replace(base.job, trainer=old.replace(**facts) if facts else old, workload=work.replace(**fields))
        return job, base.layout.replace(**layout)

    return change


def _communicators(base: Priced, x: float) -> tuple[Job, Layout]:
    hardware = base.job.cluster.hardware
    each, expert = hardware.communicator_memory * x, hardware.expert_communicator_memory * x
    return with_hardware(base, replace(hardware, communicator_memory=each, expert_communicator_memory=expert))


def _recompute(base: Priced, how: Recompute) -> Case:
    """All layers recompute everything, or nothing, where the trainer can and not all do."""
    all_layers = int(base.layout.recompute) == how and not int(base.layout.recompute_layers)
    known = how == Recompute.NONE or "full" in base.job.trainer.legal.recompute
    return Case("recompute", known and not all_layers, changed(recompute=int(how), recompute_layers=0, recompute_modules=0))


def _flash_off(base: Priced) -> Case:
    """Attention as plain matrices, where the trainer has it fused."""
    kernels = base.job.trainer.kernels
    change = changed({"attention": "unfused", "unfused": kernels.unfused | {"softmax"}})
    return Case("attention", kernels.attention == "flash", change)


def _unequal_stages(base: Priced) -> Case:
    """More layers on the last stage than planned, whether or not the trainer would assign them so."""
    layers, pp = base.job.model.num_layers, int(base.layout.pp)
    last = max(stage_layers(layers, base.assigned)[-1], 0)
    more = tuple(k for k in (1.0, 2.0, 4.0) if last + k <= layers - pp + 1)

    def change(base: Priced, k: float) -> tuple[Job, Layout]:
        return base.job, base.layout.replace(last_stage_layers=last + int(k), first_stage_layers=0)

    return Case("stage_imbalance", pp > 1 and int(base.layout.vpp) == 1 and bool(more), change, sizes=more)


def _batch(base: Priced, shares: tuple[float, ...]) -> Case:
    """A step that holds another number of microbatches than planned: the shares that make a legal layout."""
    planned = int(base.layout.num_microbatches)

    def change(base: Priced, share: float) -> tuple[Job, Layout]:
        layout = base.layout.replace(num_microbatches=max(round(planned * share), 1))
        workload = base.job.workload.replace(global_batch_size=int(layout.global_batch_size))
        return replace(base.job, workload=workload), layout

    def legal(share: float) -> bool:
        try:
            check(*change(base, share))
        except PlannerError:
            return False
        return planned * share % 1 == 0

    sizes = tuple(share for share in shares if legal(share))
    return Case("batch", bool(sizes), change, planned, sizes)


# ------------------------------------------------------------------------------------------------ which a plan may have


def _bus(base: Priced, gpus: float) -> str:
    """Bus bandwidth of an all-reduce of 1 GiB, which the model prices with."""
    seconds = float(base.job.cluster.collective_time("all_reduce", GIB, gpus, 1.0))
    return f"{2.0 * (gpus - 1.0) / gpus * GIB / seconds / GIGA:.0f} GB/s"


def slower(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step slower than planned."""
    trainer, layout, cluster = base.job.trainer, base.layout, base.job.cluster
    hardware, host, overlap = cluster.hardware, trainer.host, trainer.traffic.overlap
    several, crosses = cluster.num_gpus > 1, cluster.num_gpus > cluster.domain
    words = {}
    if several:
        inside, nodes = (min(gpus, float(cluster.num_gpus)) for gpus in (cluster.domain, 2.0 * cluster.domain))
        words = {"nodes": f"{nodes:.0f}", "bus_across": _bus(base, nodes), "bus_inside": _bus(base, inside)}
    imbalance = float(busiest(base.job.workload, np.asarray(layout.ep)))

    def not_overlapped(key: str, applies: bool, *names: str) -> Case:
        return Case(f"overlap_{key}", applies and bool(overlap & {*names}), changed({"overlap": overlap - {*names}}))

    one_stage = changed(vpp=1, schedule=int(Schedule.ONE_F_ONE_B))
    cases = [
        Case("network", crosses, times_slower("network_bandwidth"), 8 * hardware.network_bandwidth / GIGA),
        Case("network_latency", crosses, achieved_factor("network_latency")),
        Case(
            "scale_up", several, times_slower("scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth")
        ),
        Case("sustained_clock", True, achieved_factor("sustained_clock")),
        Case("slow_gpu", True, achieved_factor("sustained_clock")),
        Case("host_time", True, achieved_factor("host_time"), host.host_time),
        Case("step_overhead", host.step_overhead > 0, achieved_factor("step_overhead"), host.step_overhead),
        Case("unfused", True, changed({"passes": lambda old, x: {name: x * old.get(name, 1.0) for name in PASSES}})),
        Case("expert_imbalance", base.job.model.is_moe and int(layout.ep) > 1,
             changed(workload={"expert_imbalance": lambda _, x: min(imbalance * x, 1024.0)}), imbalance),
        not_overlapped("data", True, "gradients", "parameters"),
        not_overlapped("tensor", int(layout.tp) > 1, "tp", "tp_backward"),
        not_overlapped("ep", int(layout.ep) > 1, "ep"),
        not_overlapped("cp", int(layout.cp) > 1, "cp"),
        not_overlapped("pipeline", int(layout.pp) > 1, "pipeline"),
        _recompute(base, Recompute.FULL),
        _flash_off(base),
        Case("virtual_stages", int(layout.vpp) > 1 and int(layout.schedule) == Schedule.INTERLEAVED, one_stage),
        _unequal_stages(base),
        _batch(base, (2.0, 4.0)),
    ]  # fmt: skip
    return _made("slower", cases, words)


def faster(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step faster than planned."""
    job, trainer, workload = base.job, base.job.trainer, base.job.workload
    better = []
    for key in ("sustained_clock", "memory_fraction", "scale_up", "scale_out", "host_time", "step_overhead"):
        factor = _FACTORS[key]
        limit = highest(factor, job.cluster.hardware, trainer) if factor.of == "hardware" else 1.0 / factor.low
        better.append(Case(key, limit > 1.0, achieved_factor(key, worse=False), sizes=(limit,)))
    fp8 = "fp8" in trainer.legal.precisions and "fp8" in job.cluster.hardware.peak_flops
    packed = changed(workload={"document_length": workload.sequence_length // 16})
    cases = [
        *better,
        Case("overlap", trainer.traffic.overlap != frozenset(WORDS["overlap"]) and job.cluster.num_gpus > 1,
             changed({"overlap": frozenset(WORDS["overlap"])})),
        _recompute(base, Recompute.NONE),
        Case("precision", workload.precision not in LOW_PRECISIONS and fp8, changed(workload={"precision": "fp8"})),
        Case("documents", workload.document_length == 0 and workload.sequence_length >= 1024, packed),
        Case("dispatch", job.model.is_moe and int(base.layout.ep) > 1 and trainer.kernels.expert_dispatch == "alltoall",
             changed({"expert_dispatch": "deduplicated"})),
        _batch(base, (0.5, 0.25)),
    ]  # fmt: skip
    return _made("faster", cases)


def memory_mechanisms(base: Priced, more: bool) -> list[Mechanism]:
    """The mechanisms that could make a GPU of this plan hold more (or less) than planned."""
    trainer, layout = base.job.trainer, base.layout
    stored, unfused, most = trainer.stored, trainer.kernels.unfused, max(trainer.legal.zero)
    fragmentation = Case("fragmentation", stored.fragmentation > 0, achieved_factor("fragmentation", worse=more))
    logits, larger = stored.logit_bytes, tuple(x for x in (EAGER_LOGITS, GATHERED_LOGITS) if x > stored.logit_bytes)
    if not more:
        alone = trainer.legal.offload_optimizer
        states_there = changed(offload_optimizer=100, zero=max(int(layout.zero), 1))
        offloaded = states_there if alone else changed(offload_parameters=1, zero=most)
        shared = int(layout.zero) < most and int(layout.dp) * int(layout.cp) > 1
        return _made("less", [
            fragmentation,
            _recompute(base, Recompute.FULL),
            Case("logits", logits > FP32, changed({"logit_bytes": FP32}), logits),
            Case("zero", shared, changed(zero=most), most),
            Case("offload", not layout.offloads and (alone or trainer.legal.offload_parameters), offloaded),
        ])  # fmt: skip
    in_fp32 = changed({"gradient_bytes": FP32, "fp16_gradient_bytes": lambda old, _: (FP32, old[1])})
    states = bool(base.estimate.memory["optimizer_states"][0] > 0)
    unfused_too = changed({"unfused": unfused | {"norm", "swiglu"}})
    return _made("more", [
        fragmentation,
        Case("logits", bool(larger), changed({"logit_bytes": lambda _, x: x}), logits, larger),
        _recompute(base, Recompute.NONE),
        _flash_off(base),
        Case("saved", not {"norm", "swiglu"} <= unfused, unfused_too),
        Case("zero", int(layout.zero) >= 1 and states, changed(zero=0)),
        Case("gradients", stored.gradient_bytes < FP32, in_fp32, stored.gradient_bytes),
        Case("in_flight", int(layout.pp) > 1, changed(schedule=int(Schedule.GPIPE), vpp=1)),
        Case("communicators", base.job.cluster.num_gpus > 1, _communicators),
    ])  # fmt: skip

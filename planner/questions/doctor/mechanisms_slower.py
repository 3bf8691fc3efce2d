"""What makes a step take longer than planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cost.pipeline.partition import stage_layers
from planner.layout import Layout, Recompute, Schedule
from planner.questions.doctor.mechanisms import (
    WIDTHS,
    Change,
    Mechanism,
    batch,
    factor,
    flash_off,
    layout_change,
    on,
    switch,
    times,
    trainer_change,
    with_hardware,
    with_layout,
    with_trainer,
)
from planner.rules import Job
from planner.timeline.priced_plan import Priced
from planner.units import GIB, GIGA, format_seconds

CHECK_SECONDS = 0.24e-3
"""Host seconds per collective and rank with TORCH_DISTRIBUTED_DEBUG=DETAIL (docs/log.md: 0.19 to 0.30 ms in 700 runs)."""


BESIDE = "a profile of one step: NCCL kernels must run beside GEMMs, not between them"


def slower(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step slower than planned."""
    return [*_networks(base), *_clocks(base), *_host(base), *_work(base), *_switches(base), *batch(base, (2.0, 4.0))]


def _crosses(base: Priced) -> bool:
    return base.job.cluster.num_gpus > base.job.cluster.domain


def _bus(base: Priced, gpus: float) -> str:
    """Bus bandwidth of an all-reduce of 1 GiB, which the model prices with."""
    seconds = float(base.job.cluster.collective_time("all_reduce", GIB, gpus, 1.0))
    return f"{2.0 * (gpus - 1.0) / gpus * GIB / seconds / GIGA:.0f} GB/s"


def _networks(base: Priced) -> list[Mechanism]:
    """Links, slower; and what holds up every collective."""
    cluster, found = base.job.cluster, []
    hardware = cluster.hardware
    link = "scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth"
    if _crosses(base):
        line = 8 * hardware.network_bandwidth / GIGA
        nodes = min(2.0 * cluster.domain, float(cluster.num_gpus))
        found = [
            Mechanism(
                key="network", name="slow network between nodes", sizes=(50.0,), width=math.log(6.0) / 2.0,
                size=lambda _, x: f"{x:.3g} times slower, {line / x:.3g} instead of {line:.4g} Gb/s per GPU",
                change=lambda base, x: with_hardware(base, hardware.scaled(network_bandwidth=1.0 / x)), seen=4,
                source="ten jobs of nanotron's sweep were 6 times slower, Hagemann's nodes had 36 GB/s, YaFSDP's and an nvfp4 "
                "405B run's networks were slower than assumed",
                check=f"nccl-tests over {nodes:.0f} GPUs: 'all_reduce_perf -b 1G -e 1G' must reach a bus bandwidth of about "
                f"{_bus(base, nodes)}; NCCL_DEBUG=INFO must say NET/IB (or the plugin), not NET/Socket, for every adapter",
            ),
            Mechanism(
                key="network_latency", name="latency between nodes", sizes=(30.0,), width=math.log(6.5) / 2.0,
                size=times("longer"), change=factor("network_latency", worse=True), seen=1,
                source="rings over EFA have 8.7 times the latency of RoCE, all else 5.6 times (nanotron sweeps)",
                check="nccl-tests: 'all_reduce_perf -b 8 -e 64K' between nodes; small messages must take tens of microseconds",
            ),
            Mechanism(
                key="collective_check", name="every collective is checked first", sizes=(1.0,), width=0.0,
                size=on("TORCH_DISTRIBUTED_DEBUG=DETAIL"), seen=1,
                change=lambda base, _: with_trainer(base, base.job.trainer.replace(collective_check=CHECK_SECONDS)),
                source="700 runs of one sweep had it on, 0.19 to 0.30 ms per collective and rank (nanotron)",
                check="'env | grep -E \"TORCH_DISTRIBUTED_DEBUG|NCCL_DEBUG|CUDA_LAUNCH_BLOCKING\"' on a worker must print nothing",
            ),
        ]  # fmt: skip
    if cluster.num_gpus > 1:
        inside = min(cluster.domain, float(cluster.num_gpus))
        found.append(
            Mechanism(
                key="scale_up", name="slow link inside a node", sizes=(20.0,), width=WIDTHS["scale_up"],
                size=times("slower"), change=lambda base, x: with_hardware(base, hardware.scaled(**{link: 1.0 / x})), seen=0,
                source="measured all-reduce over NVLink differs by a fifth between NCCL versions (nccl-tests tables)",
                check=f"nccl-tests inside one node: 'all_reduce_perf -b 1G -e 1G' must reach about {_bus(base, inside)}; "
                "'nvidia-smi nvlink --status' must show every link up",
            )
        )  # fmt: skip
    return [one for one in found if not (one.key == "collective_check" and base.job.trainer.collective_check)]


def _clocks(base: Priced) -> list[Mechanism]:
    """Rates of the GPUs, lower: of all, or of one."""
    return [
        Mechanism(
            key="sustained_clock", name="lower clock of all GPUs: power or heat", sizes=(2.0,), width=WIDTHS["sustained_clock"],
            size=lambda base, x: f"{1 / x:.2f} of the planned rate of matrix products", seen=2,
            change=factor("sustained_clock", worse=True),
            source="500 W instead of 700 W parts (torchtitan 2024), a machine at 0.735 instead of 0.82 (SimuMax)",
            check="'nvidia-smi -q -d CLOCK,PERFORMANCE,POWER' during a step: SM clock, and whether SW Power Cap or a thermal "
            "slowdown is active",
        ),
        Mechanism(
            key="slow_gpu", sizes=(4.0,), width=math.log(1.9) / 2.0, change=factor("sustained_clock", worse=True), seen=0,
            name="one slow GPU that all wait for" if base.job.cluster.num_gpus > 1 else "the GPU is shared or throttled",
            size=lambda base, x: f"a GPU at {1 / x:.2f} of its rate",
            source="GPUs of one cluster spread by 8 % (Sinha 2022, SC22); a limit that was not stated made torchao's B200 1.9 "
            "times slower",
            check="time the same matrix product on every GPU, or read clocks with 'dcgmi dmon -e 100,155' on all nodes; Megatron "
            "prints them with --log-straggler",
        ),
    ]  # fmt: skip


def _host(base: Priced) -> list[Mechanism]:
    """Rates of the host, lower: for each kernel, and for each step."""
    found = [
        Mechanism(
            key="host_time", name="launch-bound: the host is slow", sizes=(30.0,), width=WIDTHS["host_time"],
            size=lambda base, x: f"{format_seconds(x * base.job.trainer.host.host_time)} instead of "
            f"{format_seconds(base.job.trainer.host.host_time)} per kernel",
            change=factor("host_time", worse=True), seen=3,
            source="9 to 125 us between frameworks (compiled torchtitan, Megatron-Bridge Qwen3-30B, nanotron)",
            check="a profile of one step (torch.profiler or 'nsys profile'): gaps between kernels on the compute stream, "
            "CPU at 100 % on the launching thread",
        ),
        Mechanism(
            key="step_overhead", name="data loader, logging or checkpoint in every step", sizes=(500.0,),
            width=WIDTHS["step_overhead"], seen=1,
            size=lambda base, x: f"{format_seconds(x * base.job.trainer.host.step_overhead)} instead of "
            f"{format_seconds(base.job.trainer.host.step_overhead)} per step", change=factor("step_overhead", worse=True),
            source="10 to 20 ms assumed; 0 to seconds where data or logging waits (calibration factors)",
            check="run with synthetic data (Megatron: --mock-data) and without logging: the difference is what it costs",
        ),
    ]  # fmt: skip
    return [one for one in found if one.key != "step_overhead" or base.job.trainer.host.step_overhead > 0]


def _work(base: Priced) -> list[Mechanism]:
    """More work for the kernels: of memory, or of the busiest rank."""

    def eager(base: Priced, x: float) -> tuple[Job, Layout]:
        trainer = base.job.trainer
        names = ("norm_passes", "elementwise_passes", "rope_passes", "loss_passes")
        return with_trainer(base, trainer.replace(**{name: getattr(trainer, name) * x for name in names}))

    def skewed(base: Priced, x: float) -> tuple[Job, Layout]:
        busiest = min(base.job.workload.expert_imbalance * x, 1024.0)
        return replace(base.job, workload=base.job.workload.replace(expert_imbalance=busiest)), base.layout

    found = [
        Mechanism(
            key="unfused", name="norms, activations and loss not fused", sizes=(9.0,), width=math.log(52.0 / 18.0) / 2.0,
            size=times("the memory traffic of these kernels"), change=eager, seen=4,
            source="eager norms move 36 bytes per element where a fused one moves 4 (torchtitan, InternEvo, Hagemann); "
            "a plain cross entropy 52 for 18 (Megatron Core)",
            check="a profile of one step: time in elementwise and reduction kernels; torch.compile or the fusion flags must be on",
        ),
    ]  # fmt: skip
    workload, layout = base.job.workload, base.layout
    if workload.model.is_moe and int(layout.ep) > 1:
        found.append(
            Mechanism(
                key="expert_imbalance", name="expert imbalance", sizes=(16.0,), width=math.log(4.0) / 2.0,
                size=lambda base, x: f"{x * base.job.workload.expert_imbalance:.3g} times the mean on the busiest rank",
                change=skewed, seen=0, source="a skewed router reaches 1.5 to 4 times the mean",
                check="tokens per expert in the trainer's log (Megatron: --moe-per-layer-logging); time with forced balance "
                "(--moe-router-force-load-balancing)",
            )
        )  # fmt: skip
    return found


def _switches(base: Priced) -> Iterator[Mechanism]:
    """What may be on or off."""
    trainer, layout = base.job.trainer, base.layout

    def without(*names: str) -> Change:
        return trainer_change(overlap=trainer.traffic.overlap - {*names})

    if trainer.traffic.overlap & {"gradients", "parameters"}:
        yield switch(
            "overlap_data", "gradients and weights not overlapped", "no overlap with the passes",
            without("gradients", "parameters"), seen=3,
            source="Megatron before v2.6 (SC'21), BigScience's fork and MegaScale's baseline had none",
            check=f"{BESIDE}; Megatron: --overlap-grad-reduce and --overlap-param-gather",
        )  # fmt: skip
    kinds = trainer.traffic.overlap & {"tp", "tp_backward"}
    if kinds and int(layout.tp) > 1:
        yield switch(
            "overlap_tensor", "tensor-parallel communication not overlapped", "no overlap with GEMMs", without(*kinds),
            seen=1, source="Hagemann's code runs it synchronously",
            check=f"{BESIDE}; CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper and before; Megatron: --tp-comm-overlap",
        )  # fmt: skip
    for kind, degree, text in (
        ("ep", "ep", "expert all-to-all"), ("cp", "cp", "context-parallel ring"), ("pipeline", "pp", "pipeline sends"),
    ):  # fmt: skip
        if kind in trainer.traffic.overlap and int(getattr(layout, degree)) > 1:
            yield switch(
                f"overlap_{kind}", f"{text} not overlapped", "no overlap with computation", without(kind), seen=0,
                source="no published run is known for it", check=BESIDE,
            )  # fmt: skip
    all_layers = int(layout.recompute) == Recompute.FULL and not int(layout.recompute_layers)
    if "full" in trainer.legal.recompute and not all_layers:
        yield switch(
            "recompute", "full recompute is on", "every forward pass runs twice",
            layout_change(recompute=int(Recompute.FULL), recompute_layers=0, recompute_modules=0), seen=3,
            source="recipes recomputed what their pages did not say (AutoModel, DGX Cloud MaxText and PaxML)",
            check="the arguments that the trainer prints (Megatron: recompute_granularity, recompute_num_layers); memory "
            "is then lower than planned",
        )  # fmt: skip
    yield from flash_off(base, "scores as a matrix in memory")
    if int(layout.vpp) > 1 and int(layout.schedule) == Schedule.INTERLEAVED:
        yield switch(
            "virtual_stages", "virtual stages are off", "1F1B with one stage per rank",
            layout_change(vpp=1, schedule=int(Schedule.ONE_F_ONE_B)), seen=0, source="no published run is known for it",
            check="the arguments that the trainer prints (Megatron: virtual_pipeline_model_parallel_size)",
        )  # fmt: skip
    if int(layout.pp) > 1 and int(layout.vpp) == 1:
        yield from _unequal_stages(base)


def _unequal_stages(base: Priced) -> Iterator[Mechanism]:
    """More layers on the last stage than planned, whether or not the trainer would deal them so."""
    layout, layers = base.dealt, base.job.model.num_layers
    last = max(stage_layers(layers, layout)[-1], 0)
    more = tuple(k for k in (1.0, 2.0, 4.0) if last + k <= layers - int(layout.pp) + 1)
    if more:
        yield Mechanism(
            key="stage_imbalance", name="unequal pipeline stages", sizes=more, width=0.0, seen=2,
            size=lambda _, k: f"{k:.0f} more layer{'s' if k > 1 else ''} on the last stage",
            change=lambda base, k: with_layout(
                base, base.layout.replace(last_stage_layers=last + int(k), first_stage_layers=0)
            ),
            source="stages dealt in another way than assumed (nanotron, DeepSeek-V3 recipes of Megatron-Bridge)",
            check="times of every pipeline rank (Megatron: --timing-log-level 2 --timing-log-option all)",
        )  # fmt: skip

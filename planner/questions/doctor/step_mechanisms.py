"""Mechanisms that make a step take longer, or less time, than planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cost.refine import stage_layers
from planner.errors import PlannerError
from planner.layout import Layout, Recompute, Schedule
from planner.questions.calibrate.factors import FACTORS, highest
from planner.questions.doctor.mechanisms import (
    WIDTHS,
    Change,
    Mechanism,
    achieved_factor,
    can_recompute_more,
    flash_off,
    layout_fields,
    recomputed,
    times_slower,
    trainer_facts,
    workload_fields,
)
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced
from planner.trainer import OVERLAPS
from planner.units import GIB, GIGA, format_seconds
from planner.workload import LOW_PRECISIONS

CHECK_SECONDS = 0.24e-3
"""Host seconds per collective and rank with TORCH_DISTRIBUTED_DEBUG=DETAIL (docs/log.md: 0.19 to 0.30 ms in 700 runs)."""
OVERLAPPED = "a profile of one step: NCCL kernels must run beside GEMMs, not between them"
UNKNOWN = "no published run is known for it"
BETTER = {
    "sustained_clock": ("matrix products at a higher clock", "'nvidia-smi -q -d CLOCK,POWER' during a step"),
    "memory_fraction": ("faster memory-bound kernels", "a profile: time in norms, activations and the optimizer"),
    "scale_up": ("faster link inside a node", "nccl-tests inside one node: 'all_reduce_perf -b 1G -e 1G'"),
    "scale_out": ("faster collectives between nodes", "nccl-tests between nodes; SHARP, or a newer NCCL"),
    "host_time": ("faster launches by the host", "a profile: gaps between kernels; CUDA graphs"),
    "step_overhead": ("less overhead per step", "what the trainer times: the passes only, or the whole step"),
}
"""Factors of calibration that can be better than planned: in words, and the check."""


def slower(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step slower than planned."""
    return [*_networks(base), *_rates(base), *_work(base), *_switches(base), *_batch(base, (2.0, 4.0))]


def _bus(base: Priced, gpus: float) -> str:
    """Bus bandwidth of an all-reduce of 1 GiB, which the model prices with."""
    seconds = float(base.job.cluster.collective_time("all_reduce", GIB, gpus, 1.0))
    return f"{2.0 * (gpus - 1.0) / gpus * GIB / seconds / GIGA:.0f} GB/s"


def _networks(base: Priced) -> Iterator[Mechanism]:
    """Links, slower; and what holds up every collective."""
    cluster, count = base.job.cluster, float(base.job.cluster.num_gpus)
    hardware = cluster.hardware
    if cluster.num_gpus > cluster.domain:
        line, nodes = 8 * hardware.network_bandwidth / GIGA, min(2.0 * cluster.domain, count)
        yield Mechanism(
            key="network", name="slow network between nodes", sizes=(50.0,), width=math.log(6.0) / 2.0, seen=4,
            size=lambda x: f"{x:.3g} times slower, {line / x:.3g} instead of {line:.4g} Gb/s per GPU",
            change=times_slower("network_bandwidth"),
            source="ten jobs of nanotron's sweep were 6 times slower, Hagemann's nodes had 36 GB/s, YaFSDP's and an nvfp4 "
            "405B run's networks were slower than assumed",
            check=f"nccl-tests over {nodes:.0f} GPUs: 'all_reduce_perf -b 1G -e 1G' must reach a bus bandwidth of about "
            f"{_bus(base, nodes)}; NCCL_DEBUG=INFO must say NET/IB (or the plugin), not NET/Socket, for every adapter",
        )  # fmt: skip
        yield Mechanism(
            key="network_latency", name="latency between nodes", size="{x:.3g} times longer", sizes=(30.0,),
            width=math.log(6.5) / 2.0, change=achieved_factor("network_latency", worse=True), seen=1,
            source="rings over EFA have 8.7 times the latency of RoCE, all else 5.6 times (nanotron sweeps)",
            check="nccl-tests: 'all_reduce_perf -b 8 -e 64K' between nodes; small messages must take tens of microseconds",
        )  # fmt: skip
        if not base.job.trainer.collective_check:
            yield Mechanism(
                key="collective_check", name="every collective is checked first", size="TORCH_DISTRIBUTED_DEBUG=DETAIL",
                change=trainer_facts(collective_check=CHECK_SECONDS), seen=1,
                source="700 runs of one sweep had it on, 0.19 to 0.30 ms per collective and rank (nanotron)",
                check="'env | grep -E \"TORCH_DISTRIBUTED_DEBUG|NCCL_DEBUG|CUDA_LAUNCH_BLOCKING\"' on a worker must print nothing",
            )  # fmt: skip
    if cluster.num_gpus > 1:
        link = "scale_up_bandwidth" if hardware.scale_up_domain > 1 else "pcie_bandwidth"
        yield Mechanism(
            key="scale_up", name="slow link inside a node", size="{x:.3g} times slower", sizes=(20.0,),
            width=WIDTHS["scale_up"], change=times_slower(link), seen=0,
            source="measured all-reduce over NVLink differs by a fifth between NCCL versions (nccl-tests tables)",
            check=f"nccl-tests inside one node: 'all_reduce_perf -b 1G -e 1G' must reach about "
            f"{_bus(base, min(cluster.domain, count))}; 'nvidia-smi nvlink --status' must show every link up",
        )  # fmt: skip


def _rates(base: Priced) -> Iterator[Mechanism]:
    """Rates of the GPUs, of all or of one, and of the host, for each kernel and for each step: lower."""
    trainer = base.job.trainer
    yield Mechanism(
        key="sustained_clock", name="lower clock of all GPUs: power or heat", sizes=(2.0,), width=WIDTHS["sustained_clock"],
        size="{inverse:.2f} of the planned rate of matrix products", seen=2,
        change=achieved_factor("sustained_clock", worse=True),
        source="500 W instead of 700 W parts (torchtitan 2024), a machine at 0.735 instead of 0.82 (SimuMax)",
        check="'nvidia-smi -q -d CLOCK,PERFORMANCE,POWER' during a step: SM clock, and whether SW Power Cap or a thermal "
        "slowdown is active",
    )  # fmt: skip
    yield Mechanism(
        key="slow_gpu", sizes=(4.0,), width=math.log(1.9) / 2.0, seen=0, size="a GPU at {inverse:.2f} of its rate",
        name="one slow GPU that all wait for" if base.job.cluster.num_gpus > 1 else "the GPU is shared or throttled",
        change=achieved_factor("sustained_clock", worse=True),
        source="GPUs of one cluster spread by 8 % (Sinha 2022, SC22); a limit that was not stated made torchao's B200 1.9 "
        "times slower",
        check="time the same matrix product on every GPU, or read clocks with 'dcgmi dmon -e 100,155' on all nodes; Megatron "
        "prints them with --log-straggler",
    )  # fmt: skip
    yield Mechanism(
        key="host_time", name="launch-bound: the host is slow", sizes=(30.0,), width=WIDTHS["host_time"], seen=3,
        size=lambda x: f"{format_seconds(x * trainer.host_time)} instead of {format_seconds(trainer.host_time)} per kernel",
        change=achieved_factor("host_time", worse=True),
        source="9 to 125 us between frameworks (compiled torchtitan, Megatron-Bridge Qwen3-30B, nanotron)",
        check="a profile of one step (torch.profiler or 'nsys profile'): gaps between kernels on the compute stream, "
        "CPU at 100 % on the launching thread",
    )  # fmt: skip
    if trainer.step_overhead > 0:
        yield Mechanism(
            key="step_overhead", name="data loader, logging or checkpoint in every step", sizes=(500.0,), seen=1,
            size=lambda x: f"{format_seconds(x * trainer.step_overhead)} instead of "
            f"{format_seconds(trainer.step_overhead)} per step",
            width=WIDTHS["step_overhead"], change=achieved_factor("step_overhead", worse=True),
            source="10 to 20 ms assumed; 0 to seconds where data or logging waits (calibration factors)",
            check="run with synthetic data (Megatron: --mock-data) and without logging: the difference is what it costs",
        )  # fmt: skip


def _work(base: Priced) -> Iterator[Mechanism]:
    """More work for the kernels: of memory, or of the busiest rank."""
    passes = ("norm_passes", "elementwise_passes", "rope_passes", "loss_passes")
    yield Mechanism(
        key="unfused", name="norms, activations and loss not fused", sizes=(9.0,), width=math.log(52.0 / 18.0) / 2.0,
        size="{x:.3g} times the memory traffic of these kernels", seen=4,
        change=trainer_facts(**dict.fromkeys(passes, lambda old, x: old * x)),
        source="eager norms move 36 bytes per element where a fused one moves 4 (torchtitan, InternEvo, Hagemann); "
        "a plain cross entropy 52 for 18 (Megatron Core)",
        check="a profile of one step: time in elementwise and reduction kernels; torch.compile or the fusion flags must be on",
    )  # fmt: skip
    if base.job.model.is_moe and int(base.layout.ep) > 1:
        planned = base.job.workload.expert_imbalance
        yield Mechanism(
            key="expert_imbalance", name="expert imbalance", sizes=(16.0,), width=math.log(4.0) / 2.0, seen=0,
            size=lambda x: f"{x * planned:.3g} times the mean on the busiest rank",
            change=lambda base, x: workload_fields(expert_imbalance=min(planned * x, 1024.0))(base, x),
            source="a skewed router reaches 1.5 to 4 times the mean",
            check="tokens per expert in the trainer's log (Megatron: --moe-per-layer-logging); time with forced balance "
            "(--moe-router-force-load-balancing)",
        )  # fmt: skip


def _switches(base: Priced) -> Iterator[Mechanism]:
    """What may be on or off."""
    trainer, layout = base.job.trainer, base.layout

    def without(*names: str) -> Change:
        return trainer_facts(overlap=trainer.overlap - {*names})

    if trainer.overlap & {"gradients", "parameters"}:
        yield Mechanism(
            key="overlap_data", name="gradients and weights not overlapped", size="no overlap with the passes", seen=3,
            change=without("gradients", "parameters"),
            source="Megatron before v2.6 (SC'21), BigScience's fork and MegaScale's baseline had none",
            check=f"{OVERLAPPED}; Megatron: --overlap-grad-reduce and --overlap-param-gather",
        )  # fmt: skip
    if trainer.overlap & {"tp", "tp_backward"} and int(layout.tp) > 1:
        yield Mechanism(
            key="overlap_tensor", name="tensor-parallel communication not overlapped", size="no overlap with GEMMs",
            change=without("tp", "tp_backward"), seen=1, source="Hagemann's code runs it synchronously",
            check=f"{OVERLAPPED}; CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper and before; Megatron: --tp-comm-overlap",
        )  # fmt: skip
    for kind, degree, text in (
        ("ep", "ep", "expert all-to-all"), ("cp", "cp", "context-parallel ring"), ("pipeline", "pp", "pipeline sends"),
    ):  # fmt: skip
        if kind in trainer.overlap and int(getattr(layout, degree)) > 1:
            yield Mechanism(
                key=f"overlap_{kind}", name=f"{text} not overlapped", size="no overlap with computation",
                change=without(kind), seen=0, source=UNKNOWN, check=OVERLAPPED,
            )  # fmt: skip
    if can_recompute_more(base):
        yield Mechanism(
            key="recompute", name="full recompute is on", size="every forward pass runs twice", seen=3,
            change=recomputed(Recompute.FULL),
            source="recipes recomputed what their pages did not say (AutoModel, DGX Cloud MaxText and PaxML)",
            check="the arguments that the trainer prints (Megatron: recompute_granularity, recompute_num_layers); memory "
            "is then lower than planned",
        )  # fmt: skip
    yield from flash_off(base, "scores as a matrix in memory")
    if int(layout.vpp) > 1 and int(layout.schedule) == Schedule.INTERLEAVED:
        yield Mechanism(
            key="virtual_stages", name="virtual stages are off", size="1F1B with one stage per rank", seen=0,
            change=layout_fields(vpp=1, schedule=int(Schedule.ONE_F_ONE_B)), source=UNKNOWN,
            check="the arguments that the trainer prints (Megatron: virtual_pipeline_model_parallel_size)",
        )  # fmt: skip
    layers, last = base.job.model.num_layers, max(stage_layers(base.job.model.num_layers, base.dealt)[-1], 0)
    more = tuple(k for k in (1.0, 2.0, 4.0) if last + k <= layers - int(layout.pp) + 1)
    if int(layout.pp) > 1 and int(layout.vpp) == 1 and more:  # whether or not the trainer would assign layers so
        yield Mechanism(
            key="stage_imbalance", name="unequal pipeline stages", sizes=more, seen=2,
            size=lambda k: f"{k:.0f} more layer{'s' if k > 1 else ''} on the last stage",
            change=lambda base, k: layout_fields(last_stage_layers=last + int(k), first_stage_layers=0)(base, k),
            source="stages dealt in another way than assumed (nanotron, DeepSeek-V3 recipes of Megatron-Bridge)",
            check="times of every pipeline rank (Megatron: --timing-log-level 2 --timing-log-option all)",
        )  # fmt: skip


def _batch(base: Priced, shares: tuple[float, ...]) -> Iterator[Mechanism]:
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

    if sizes := tuple(share for share in shares if legal(share)):
        yield Mechanism(
            key="batch", name="the step holds another number of tokens", sizes=sizes, change=change, seen=1,
            size=lambda share: f"{planned * share:.0f} instead of {planned} microbatches",
            source="rows whose batch was read wrong at first (microbatches of torchtitan's pipelines in 2024)",
            check="tokens per step in the trainer's log; whether a step of the log is an optimizer step",
        )  # fmt: skip


def faster(base: Priced) -> list[Mechanism]:
    """The mechanisms that could make this plan's step faster than planned."""
    job, found = base.job, []
    for one in FACTORS:
        if one.key in BETTER:
            limit = highest(one, job.cluster.hardware, job.trainer) if one.of == "hardware" else 1.0 / one.low
            name, check = BETTER[one.key]
            found.append(Mechanism(
                key=one.key, name=name, size="{x:.3g} times better", sizes=(limit,), width=one.width, seen=0,
                change=achieved_factor(one.key, worse=False), source=one.why, check=check,
            ))  # fmt: skip
    return [one for one in found if one.sizes[0] > 1.0] + [*_better_switches(base), *_batch(base, (0.5, 0.25))]


def _better_switches(base: Priced) -> Iterator[Mechanism]:
    job, layout = base.job, base.layout
    trainer, workload = job.trainer, job.workload
    if trainer.overlap != frozenset(OVERLAPS) and job.cluster.num_gpus > 1:
        yield Mechanism(
            key="overlap", name="more communication is overlapped", size="all of it beside computation", seen=1,
            change=trainer_facts(overlap=frozenset(OVERLAPS)), check="a profile: NCCL kernels beside GEMMs",
            source="releases that hide what earlier ones did not (Megatron-Bridge 26.06)",
        )  # fmt: skip
    if int(layout.recompute) != Recompute.NONE:
        yield Mechanism(
            key="recompute", name="less recompute than planned", size="none", change=recomputed(Recompute.NONE), seen=2,
            source="checkpoints that stop early or save projections (llm-foundry, DGX Cloud MaxText)",
            check="the arguments that the trainer prints; memory is then higher than planned",
        )  # fmt: skip
    if workload.precision not in LOW_PRECISIONS and "fp8" in {*trainer.precisions} & {*job.cluster.hardware.peak_flops}:
        yield Mechanism(
            key="precision", name="linear layers run in fp8", size=f"fp8 instead of {workload.precision}", seen=0,
            change=workload_fields(precision="fp8"), source=UNKNOWN, check="names of GEMM kernels in a profile",
        )  # fmt: skip
    if workload.document_length == 0 and workload.sequence_length >= 1024:
        yield Mechanism(
            key="documents", name="attention inside packed documents only", size="16 documents per sequence", seen=1,
            change=workload_fields(document_length=workload.sequence_length // 16),
            source="packed SQuAD of DGX Cloud fine-tuning, 11 to 30 % too slow before it was priced",
            check="the attention mask of the data loader",
        )  # fmt: skip
    if workload.model.is_moe and int(layout.ep) > 1 and trainer.expert_dispatch == "alltoall":
        yield Mechanism(
            key="dispatch", name="a token is sent once per node and GPU", size="DeepEP or HybridEP", seen=1,
            change=trainer_facts(expert_dispatch="deduplicated"), check="the dispatcher in the arguments",
            source="DeepSeek-V3 and Qwen3 rows whose dispatcher was not stated (Megatron-Bridge)",
        )  # fmt: skip

"""Mechanisms that make a step take longer, or less time, than planned."""

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.cost.pipeline.partition import stage_layers
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
    options,
    recomputed,
    times_slower,
    trainer_facts,
    workload_fields,
)
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced
from planner.trainer_records import OVERLAPS, PASSES
from planner.units import GIB, GIGA, format_seconds
from planner.workload import LOW_PRECISIONS

OVERLAPPED = "a profile of one step: NCCL kernels must run at the same time as GEMMs, not between them"
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
    more = (*_work(base), *_switches(base), *_unequal_stages(base), *_batch(base, (2.0, 4.0)))
    return [*_networks(base), *_rates(base), *more]


def _bus(base: Priced, gpus: float) -> str:
    """Bus bandwidth of an all-reduce of 1 GiB, which the model prices with."""
    seconds = float(base.job.cluster.collective_time("all_reduce", GIB, gpus, 1.0))
    return f"{2.0 * (gpus - 1.0) / gpus * GIB / seconds / GIGA:.0f} GB/s"


def _networks(base: Priced) -> Iterator[Mechanism]:
    """Links, slower."""
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
    host = base.job.trainer.host
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
        size=lambda x: f"{format_seconds(x * host.host_time)} instead of {format_seconds(host.host_time)} per kernel",
        change=achieved_factor("host_time", worse=True),
        source="9 to 125 us between frameworks (compiled torchtitan, Megatron-Bridge Qwen3-30B, nanotron)",
        check="a profile of one step (torch.profiler or 'nsys profile'): gaps between kernels on the compute stream, "
        "CPU at 100 % on the launching thread",
    )  # fmt: skip
    if host.step_overhead > 0:
        yield Mechanism(
            key="step_overhead", name="data loader, logging or checkpoint in every step", sizes=(500.0,), seen=1,
            size=lambda x: f"{format_seconds(x * host.step_overhead)} instead of "
            f"{format_seconds(host.step_overhead)} per step",
            width=WIDTHS["step_overhead"], change=achieved_factor("step_overhead", worse=True),
            source="10 to 20 ms assumed; 0 to seconds where data or logging waits (calibration factors)",
            check="run with synthetic data (Megatron: --mock-data) and without logging: the difference is what it costs",
        )  # fmt: skip


def _work(base: Priced) -> Iterator[Mechanism]:
    """More work for the kernels: of memory, or of the busiest rank."""
    yield Mechanism(
        key="unfused", name="norms, activations and loss not fused", sizes=(9.0,), width=math.log(52.0 / 18.0) / 2.0,
        size="{x:.3g} times the memory traffic of these kernels", seen=4,
        change=trainer_facts(passes=lambda old, x: {name: x * old.get(name, 1.0) for name in PASSES}),
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


def _switches(base: Priced) -> list[Mechanism]:
    """What may be off, or on, against the plan."""
    trainer, layout = base.job.trainer, base.layout

    def without(*names: str) -> Change:
        return trainer_facts(overlap=trainer.traffic.overlap - {*names})

    kinds = (
        ("ep", "ep", "expert all-to-all"), ("cp", "cp", "context-parallel ring"), ("pipeline", "pp", "pipeline sends"),
    )  # fmt: skip
    return options(
        (bool(trainer.traffic.overlap & {"gradients", "parameters"}), "overlap_data", "gradients and weights not overlapped",
         "no overlap with the passes", without("gradients", "parameters"), 3,
         "Megatron before v2.6 (SC'21), BigScience's fork and MegaScale's baseline had none",
         f"{OVERLAPPED}; Megatron: --overlap-grad-reduce and --overlap-param-gather"),
        (bool(trainer.traffic.overlap & {"tp", "tp_backward"}) and int(layout.tp) > 1, "overlap_tensor",
         "tensor-parallel communication not overlapped", "no overlap with GEMMs", without("tp", "tp_backward"), 1,
         "Hagemann's code runs it synchronously",
         f"{OVERLAPPED}; CUDA_DEVICE_MAX_CONNECTIONS=1 on Hopper and before; Megatron: --tp-comm-overlap"),
        *((kind in trainer.traffic.overlap and int(getattr(layout, degree)) > 1, f"overlap_{kind}", f"{text} not overlapped",
           "no overlap with computation", without(kind), 0, UNKNOWN, OVERLAPPED) for kind, degree, text in kinds),
        (can_recompute_more(base), "recompute", "full recompute is on", "every forward pass runs twice",
         recomputed(Recompute.FULL), 3,
         "recipes recomputed what their pages did not say (AutoModel, DGX Cloud MaxText and PaxML)",
         "the arguments that the trainer prints (Megatron: recompute_granularity, recompute_num_layers); memory "
         "is then lower than planned"),
        flash_off(base, "scores as a matrix in memory"),
        (int(layout.vpp) > 1 and int(layout.schedule) == Schedule.INTERLEAVED, "virtual_stages", "virtual stages are off",
         "1F1B with one stage per rank", layout_fields(vpp=1, schedule=int(Schedule.ONE_F_ONE_B)), 0, UNKNOWN,
         "the arguments that the trainer prints (Megatron: virtual_pipeline_model_parallel_size)"),
    )  # fmt: skip


def _unequal_stages(base: Priced) -> Iterator[Mechanism]:
    """More layers on the last stage than planned, whether or not the trainer would assign them so."""
    layers, pp = base.job.model.num_layers, int(base.layout.pp)
    last = max(stage_layers(layers, base.dealt)[-1], 0)
    more = tuple(k for k in (1.0, 2.0, 4.0) if last + k <= layers - pp + 1)
    if pp > 1 and int(base.layout.vpp) == 1 and more:
        yield Mechanism(
            key="stage_imbalance", name="unequal pipeline stages", sizes=more, seen=2,
            size=lambda k: f"{k:.0f} more layer{'s' if k > 1 else ''} on the last stage",
            change=lambda base, k: layout_fields(last_stage_layers=last + int(k), first_stage_layers=0)(base, k),
            source="stages partitioned in another way than assumed (nanotron, DeepSeek-V3 recipes of Megatron-Bridge)",
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


def _better_switches(base: Priced) -> list[Mechanism]:
    job, layout = base.job, base.layout
    trainer, workload = job.trainer, job.workload
    fp8 = "fp8" in trainer.legal.precisions and "fp8" in job.cluster.hardware.peak_flops
    return options(
        (trainer.traffic.overlap != frozenset(OVERLAPS) and job.cluster.num_gpus > 1, "overlap", "more communication is overlapped",
         "all of it behind computation", trainer_facts(overlap=frozenset(OVERLAPS)), 1,
         "releases that hide what earlier ones did not (Megatron-Bridge 26.06)",
         "a profile: NCCL kernels at the same time as GEMMs"),
        (int(layout.recompute) != Recompute.NONE, "recompute", "less recompute than planned", "none",
         recomputed(Recompute.NONE), 2,
         "checkpoints that stop early or save projections (llm-foundry, DGX Cloud MaxText)",
         "the arguments that the trainer prints; memory is then higher than planned"),
        (workload.precision not in LOW_PRECISIONS and fp8, "precision", "linear layers run in fp8",
         f"fp8 instead of {workload.precision}", workload_fields(precision="fp8"), 0, UNKNOWN,
         "names of GEMM kernels in a profile"),
        (workload.document_length == 0 and workload.sequence_length >= 1024, "documents",
         "attention inside packed documents only", "16 documents per sequence",
         workload_fields(document_length=workload.sequence_length // 16), 1,
         "packed SQuAD of DGX Cloud fine-tuning, 11 to 30 % too slow before it was priced",
         "the attention mask of the data loader"),
        (workload.model.is_moe and int(layout.ep) > 1 and trainer.kernels.expert_dispatch == "alltoall", "dispatch",
         "a token is sent once per node and GPU", "DeepEP or HybridEP", trainer_facts(expert_dispatch="deduplicated"), 1,
         "DeepSeek-V3 and Qwen3 rows whose dispatcher was not stated (Megatron-Bridge)",
         "the dispatcher in the arguments"),
    )  # fmt: skip

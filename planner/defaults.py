"""Defaults an engineer would choose, each said aloud with the flag that changes it."""

import dataclasses
from dataclasses import dataclass

from planner.cluster import Cluster
from planner.cost.estimate import Estimate
from planner.cost.parameters import total_parameters
from planner.detect import local_device, profile_of
from planner.error_bars import Kind, kind_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.plan_file import Assumption, Plan, predict
from planner.rules import Job, check_workload
from planner.trainer import Trainer, load_trainer
from planner.units import format_count, format_seconds
from planner.workload import OPTIMIZERS, Workload, default_global_batch_size

HARDWARE = "h100-sxm"
TRAINER = "megatron"
TRAINER_WITHOUT_FLASH = "megatron-2021"
NO_FLASH_ATTENTION = ("Volta",)
"""Architectures without a flash attention kernel: FlashAttention 2 and cuDNN's need Ampere or newer."""
SEQUENCE_LENGTH = 8192
"""Longest default sequence: what recent models are pre-trained with before their context is extended."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user said; None = not said."""

    model: str | ModelSpec
    """Name or path, or the model itself."""
    num_gpus: int
    hardware: str | None = None
    trainer: str | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    lora_rank: int = 0
    expert_imbalance: float | None = None
    lora_targets: str = "all"
    document_length: int = 0
    network_bandwidth: float | None = None
    """Bytes/s per GPU, one direction."""


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A request with its defaults filled in."""

    job: Job
    hardware: str
    trainer: str
    kind: Kind
    """Kind of run, which decides the error bar."""
    network_bandwidth: float | None
    """Bytes/s per GPU where the user gave it; None = the profile's."""
    assumptions: tuple[Assumption, ...]

    def plan(self, layout: Layout, found: Estimate, why: str, assumed: tuple[Assumption, ...] = ()) -> Plan:
        """The plan of one layout of the job; ``assumed``: what was further assumed."""
        return Plan(
            workload=self.job.workload, hardware=self.hardware, num_gpus=self.job.cluster.num_gpus, trainer=self.trainer,
            layout=layout, prediction=predict(found, self.job, self.kind), network_bandwidth=self.network_bandwidth,
            assumptions=(*self.assumptions, *assumed), why=why,
        )  # fmt: skip


def resolve(request: Request) -> ResolvedJob:
    """Load what is named, choose what is not, and say so. Raises PlannerError."""
    assumed: list[Assumption] = []
    model = load_model(request.model) if isinstance(request.model, str) else request.model
    hardware_name = request.hardware or _hardware(assumed)
    hardware = load_hardware(hardware_name)
    if request.network_bandwidth is not None:
        hardware = dataclasses.replace(hardware, network_bandwidth=request.network_bandwidth)
    cluster = Cluster(hardware=hardware, num_gpus=request.num_gpus)
    trainer_name = request.trainer or (TRAINER_WITHOUT_FLASH if hardware.arch in NO_FLASH_ATTENTION else TRAINER)
    trainer = _trainer(trainer_name, hardware)
    if request.trainer is None:
        assumed.append(Assumption("trainer", trainer_name, trainer.title, "--trainer"))
    length = request.sequence_length
    if length is None:
        length = min(model.max_sequence_length, SEQUENCE_LENGTH)
        why = f"pre-training length; the model was published for {model.max_sequence_length}"
        assumed.append(Assumption("sequence length", f"{length} tokens", why, "--sequence-length"))
    precision = request.precision or (
        "fp16" if "bf16" not in hardware.peak_flops and "fp16" in hardware.peak_flops else "bf16"
    )
    if request.precision is None:
        assumed.append(Assumption("precision", precision, "mixed precision with fp32 master weights", "--precision"))
    optimizer = request.optimizer or "adam"
    if request.optimizer is None:
        assumed.append(Assumption("optimizer", optimizer, OPTIMIZERS[optimizer], "--optimizer"))
    imbalance = request.expert_imbalance or 1.0
    if model.is_moe and request.expert_imbalance is None:
        why = "balanced routing; the busiest rank over the mean, a skewed router reaches 1.5 to 4"
        assumed.append(Assumption("expert imbalance", "1.0", why, "--expert-imbalance"))
    if length < 1:
        raise PlannerError(f"sequence_length is {length}; it must be a whole number from 1")
    batch = request.global_batch_size
    if batch is None:
        batch = default_global_batch_size(total_parameters(model), length, request.num_gpus)
        value = f"{batch} sequences ({format_count(batch * length)} tokens)"
        why = "a pre-training batch for a model of this size"
        assumed.append(Assumption("global batch", value, why, "--global-batch-size"))
    workload = Workload(
        model=model, sequence_length=length, global_batch_size=batch, precision=precision, optimizer=optimizer,
        lora_rank=request.lora_rank, expert_imbalance=imbalance, lora_targets=request.lora_targets,
        document_length=request.document_length,
    )  # fmt: skip
    check_workload(workload, cluster, trainer)
    if length > model.max_sequence_length:
        why = f"longer than the {model.max_sequence_length} tokens that {model.name} was published for"
        assumed.append(Assumption("context", f"{length} tokens", why, "--sequence-length"))
    assumed += _kernel_speeds(hardware)
    if request.network_bandwidth is None:
        assumed += _network(cluster)
    job = Job(workload=workload, cluster=cluster, trainer=trainer)
    return ResolvedJob(
        job=job, hardware=hardware_name, trainer=trainer_name, kind=kind_of(workload),
        network_bandwidth=request.network_bandwidth, assumptions=tuple(assumed),
    )  # fmt: skip


def _hardware(assumed: list[Assumption]) -> str:
    """The local GPU when there is one that the library knows, else the common training card."""
    device = local_device()
    profile = profile_of(device) if device else None
    why = f"the local {device} is not in the library" if device else "no GPU found on this machine"
    why = f"found here: {device}" if profile else why
    assumed.append(Assumption("hardware", profile or HARDWARE, why, "--hardware"))
    return profile or HARDWARE


def _trainer(name: str, hardware: HardwareProfile) -> Trainer:
    """The trainer. Raises PlannerError where it needs a kernel that the device does not have."""
    trainer = load_trainer(name)
    if hardware.arch in NO_FLASH_ATTENTION and trainer.kernels.attention == "flash":
        raise PlannerError(
            f"{hardware.name} ({hardware.arch}) has no flash attention kernel, which trainer {name} needs; "
            f"use --trainer {TRAINER_WITHOUT_FLASH}"
        )
    return trainer


def _kernel_speeds(hardware: HardwareProfile) -> list[Assumption]:
    """What stands for kernels that were not measured on the device."""
    if hardware.filled_from:
        value = f"a datasheet; curves of {hardware.filled_from} scaled by peak, bandwidth and link"
        why = f"{len(hardware.unverified)} figures are not its own (plan hardware show); times are rougher than the interval says"
    elif hardware.measured["gemm"].startswith("scaled"):
        value = hardware.measured["gemm"]
        why = "no kernel was measured on this device: times are rougher than the interval says"
    else:
        return []
    return [Assumption("kernel speeds", value, why, "--hardware FILE")]


def _network(cluster: Cluster) -> list[Assumption]:
    """The network between nodes, when the job needs one."""
    hardware = cluster.hardware
    if cluster.num_gpus <= cluster.domain:
        return []
    value = f"{hardware.network_bandwidth * 8 / 1e9:.0f} Gb/s per GPU, {format_seconds(hardware.network_latency)}"
    why = f"of profile {hardware.name}; {cluster.num_nodes} nodes of {hardware.gpus_per_node:.0f} GPUs"
    return [Assumption("network", value, why, "--network-bandwidth")]

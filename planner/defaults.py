"""Defaults an engineer would choose, each said aloud with the flag that changes it."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from planner.assumption import Assumption
from planner.cluster import Cluster
from planner.cost.estimate import Estimate
from planner.cost.layer.routing import busiest
from planner.cost.parameters import total_parameters
from planner.detect import says_so, setting
from planner.error_bars import Kind, kind_of
from planner.errors import PlannerError
from planner.hardware import OVER, HardwareProfile, load_hardware
from planner.hardware.asked import hardware_asked
from planner.layout import Layout
from planner.model import ModelSpec, load_model
from planner.model_names import unknown_family
from planner.options import Ratios, Unstated, assumed_options, unstated
from planner.plan_file import Plan, predict
from planner.plausible import odd_sizes
from planner.record import record
from planner.rules import NO_FLASH_ATTENTION, SPARSE_KERNELS, Job, check_workload, runs_attention
from planner.trainer import Trainer, known_as, load_trainer
from planner.trainer_options import spell, spelled
from planner.trainer_records import WORDS, FineTuning
from planner.units import format_count, format_seconds
from planner.workload import OPTIMIZERS, PRECISIONS, Workload, default_global_batch_size, usual_name

TRAINER = "megatron"
TRAINER_WITHOUT_FLASH = "megatron-2021"
SIZES_DISAGREE = 0.1
"""Part by which counted and published parameters may differ before it is said: publishers round and count embeddings or not."""
PUBLISHED_AS = (("8 bits", "int8"), ("fp8", "fp8"), ("4 bits", "nf4"), ("mxfp4", "nf4"), ("nvfp4", "nf4"))
"""What stands in the format of published weights, and the nearest dtype of frozen ones: 4 bits and the scales of blocks."""
SEQUENCE_LENGTH = 8192
"""Longest default sequence: what recent models are pre-trained with before their context is extended."""
TUNED_LENGTH, TUNED_BATCH, TUNED_PER_GPU = 1024, 16, 2
"""Of a fine-tuning job whose trainer has no habit of its own: the longest sequence, sequences per step, and the least per GPU.

[transformers, run_clm.py: block_size 1024; TRL 1.9, SFTConfig: max_length 1024; torchtune 0.7, recipes of Llama 3.1 with adapters:
2 sequences, 8 times accumulated; litgpt 0.5.13 and ms-swift 4.4: 16 per step]
"""


@record
class Request:
    """What a user said; None = not said."""

    model: str | ModelSpec
    """Name or path, or the model itself."""
    num_gpus: int = 0
    """0 = ``nodes`` says it."""
    nodes: int | None = None
    """Nodes of the hardware, all their GPUs."""
    hardware: str | None = None
    trainer: str | None = None
    """NAME[@VERSION][+OPTION=VALUE...]."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of the trainer, by name."""
    sequence_length: int | None = None
    global_batch_size: int | None = None
    global_batch_tokens: int | None = None
    """Tokens per optimizer step, where the batch was said so."""
    precision: str | None = None
    optimizer: str | None = None
    lora_rank: int | None = None
    expert_imbalance: float | None = None
    lora_targets: str = "all"
    lora_whole: str = "none"
    frozen_weights: str | None = None
    document_length: int = 0
    objective: str = "lm"
    image_tokens: int = 0
    image_encoder: str = "frozen"
    network_bandwidth: float | None = None
    """Bytes/s per GPU, one direction."""
    intra_node: str | None = None
    """Another link inside a node than the profile's (``hardware.joined_by``); becomes part of the profile's name."""


@record
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

    def plan(
        self, layout: Layout, found: Estimate, why: str, unstated: Ratios, assumed: tuple[Assumption, ...] = ()
    ) -> Plan:
        """The plan of one layout of the job; ``assumed``: what was further assumed; ``unstated`` widens its intervals."""
        return Plan(
            workload=self.job.workload, hardware=self.hardware, num_gpus=self.job.cluster.num_gpus, trainer=self.trainer,
            layout=layout, prediction=predict(found, self.job, self.kind, 0, unstated), network_bandwidth=self.network_bandwidth,
            assumptions=(*self.assumptions, *assumed), why=why,
        )  # fmt: skip

    def unstated(self, layouts: Sequence[Layout]) -> Unstated:
        """Layouts under the other values of the options that nobody stated."""
        return unstated(self.job, layouts, spelled(self.trainer)[2])


def resolve(request: Request) -> ResolvedJob:
    """Load what is named, choose what is not, and say so. Raises PlannerError."""
    assumed: list[Assumption] = []
    model = load_model(request.model) if isinstance(request.model, str) else request.model
    hardware_name = hardware_asked(request.hardware, assumed)
    if request.intra_node is not None:
        hardware_name = f"{hardware_name.partition(OVER)[0]}{OVER}{request.intra_node}"
    hardware = load_hardware(hardware_name)
    if request.network_bandwidth is not None:
        hardware = dataclasses.replace(hardware, network_bandwidth=request.network_bandwidth)
    request = dataclasses.replace(request, num_gpus=_gpus(request, hardware))
    cluster = Cluster(hardware=hardware, num_gpus=request.num_gpus)
    usual = None if request.trainer else setting("TRAINER")
    trainer_name = request.trainer or usual or (TRAINER_WITHOUT_FLASH if hardware.arch in NO_FLASH_ATTENTION else TRAINER)
    trainer_name = spell(known_as(trainer_name), request.options)
    trainer = _trainer(trainer_name, hardware)
    if request.trainer is None:
        why = says_so("TRAINER") if usual else trainer.title
        assumed.append(Assumption("trainer", spelled(trainer_name)[0], why, "--trainer"))
    rank = _lora_rank(request, trainer, assumed)
    habit = _habit(trainer.legal.fine_tuning) if trainer.legal.fine_tuning.tunes(rank, request.objective) else None
    length = _length(request, model, habit, assumed)
    precision = _precision(request, hardware, trainer, assumed)
    optimizer = _optimizer(request, trainer, precision, assumed)
    imbalance = request.expert_imbalance
    if imbalance is None:
        imbalance = 0.0 if model.is_moe else 1.0
    shared_out = trainer.legal.expert_parallel != "none" and request.num_gpus > 1
    if model.is_moe and shared_out and request.expert_imbalance is None:
        assumed.append(_routing(model, request.num_gpus))
    if length < 1:
        raise PlannerError(f"sequence_length is {length}; it must be a whole number from 1")
    batch = _batch(request, model, length, habit, assumed)
    workload = Workload(
        model=model, sequence_length=length, global_batch_size=batch, precision=precision, optimizer=optimizer,
        lora_rank=rank, expert_imbalance=imbalance, lora_targets=request.lora_targets, lora_whole=request.lora_whole,
        document_length=request.document_length, objective=request.objective, image_tokens=request.image_tokens,
        image_encoder=request.image_encoder, frozen_weights=_frozen_weights(request, model, trainer, rank, assumed),
    )  # fmt: skip
    trainer_name, trainer, chosen = _with_recipe(trainer_name, trainer, workload, cluster)
    check_workload(workload, cluster, trainer)
    if length > model.max_sequence_length:
        why = f"longer than the {model.max_sequence_length} tokens that {model.name} was published for"
        assumed.append(Assumption("context", f"{length} tokens", why, "--sequence-length"))
    assumed += _of_the_model(workload, trainer)
    assumed += _kernel_speeds(hardware)
    if request.network_bandwidth is None:
        assumed += _network(cluster)
    job = Job(workload=workload, cluster=cluster, trainer=trainer)
    assumed += chosen
    return ResolvedJob(
        job=job, hardware=hardware_name, trainer=trainer_name, kind=kind_of(workload, trainer),
        network_bandwidth=request.network_bandwidth, assumptions=tuple(assumed),
    )  # fmt: skip


def _gpus(request: Request, hardware: HardwareProfile) -> int:
    """GPUs of the job: as said, or all those of its nodes. Raises PlannerError where both are said and disagree."""
    if request.nodes is None:
        return request.num_gpus
    gpus = request.nodes * int(hardware.gpus_per_node)
    if request.num_gpus not in (0, gpus):
        raise PlannerError(
            f"{request.nodes} nodes of {hardware.name} have {gpus} GPUs, not {request.num_gpus}; --gpus counts all GPUs of the "
            "job: leave --nodes or --gpus out"
        )
    return gpus


def tuned_batch_size(few: int, num_gpus: int) -> int:
    """A batch for fine-tuning: at least as many sequences as ``few`` and as TUNED_PER_GPU on every GPU.

    A power of two times the odd part of the number of GPUs, so that it divides by every data parallel degree.
    """
    odd = num_gpus // (num_gpus & -num_gpus)
    least = max(few, TUNED_PER_GPU * num_gpus)
    return odd << max(-(-least // odd) - 1, 0).bit_length()


def _habit(own: FineTuning) -> FineTuning:
    """What a job of fine-tuning is by default; what its trainer leaves open is usual."""
    length, batch = own.sequence_length or TUNED_LENGTH, own.global_batch_size or TUNED_BATCH
    return dataclasses.replace(own, sequence_length=length, global_batch_size=batch)


def _length(request: Request, model: ModelSpec, habit: FineTuning | None, assumed: list[Assumption]) -> int:
    """Tokens of a sequence."""
    if request.sequence_length is not None:
        return request.sequence_length
    length = min(model.max_sequence_length, habit.sequence_length if habit else SEQUENCE_LENGTH)
    kind = "a usual length of fine-tuning" if habit else "pre-training length"
    why = f"{kind}; the model was published for {model.max_sequence_length}"
    assumed.append(Assumption("sequence length", f"{length} tokens", why, "--sequence-length"))
    return length


def _batch(
    request: Request, model: ModelSpec, length: int, habit: FineTuning | None, assumed: list[Assumption]
) -> int:  # fmt: skip
    """Sequences per optimizer step."""
    if request.global_batch_size is not None:
        return request.global_batch_size
    samples, taken = ("pairs", 2 * length) if request.objective == "dpo" else ("sequences", length)
    if request.global_batch_tokens is not None:
        batch = round(request.global_batch_tokens / taken)
        if batch < 1:
            raise PlannerError(
                f"--global-batch-size: {request.global_batch_tokens:,} tokens are less than one {samples[:-1]} of {taken}; with a "
                f"suffix it counts tokens, without one {samples}"
            )
        value = f"{batch} {samples} ({batch * taken:,} tokens)"
        why = f"{request.global_batch_tokens:,} tokens in {samples} of {taken}"
        assumed.append(Assumption("global batch", value, why, "--global-batch-size"))
        return batch
    if habit:
        batch = tuned_batch_size(habit.global_batch_size, request.num_gpus)
        why = f"a usual batch of fine-tuning: {habit.global_batch_size}, or {TUNED_PER_GPU} per GPU"
    else:
        batch = default_global_batch_size(total_parameters(model), length, request.num_gpus)
        why = "a pre-training batch for a model of this size"
    value = f"{batch} {samples} ({format_count(batch * taken)} tokens)"
    assumed.append(Assumption("global batch", value, why, "--global-batch-size"))
    return batch


def _lora_rank(request: Request, trainer: Trainer, assumed: list[Assumption]) -> int:
    """Rank of the adapters, 0 = none."""
    rank = trainer.legal.fine_tuning.lora_rank
    if request.lora_rank is not None:
        return request.lora_rank
    if rank:
        why = f"{trainer.name} trains adapters by default; 0 trains every weight"
        assumed.append(Assumption("adapters", f"rank {rank}", why, "--lora-rank"))
    return rank


def _frozen_weights(
    request: Request, model: ModelSpec, trainer: Trainer, rank: int, assumed: list[Assumption]
) -> str:
    """Dtype of the base under adapters: the trainer's habit, or of weights that were published quantised the nearest it has."""
    found = (rank and trainer.legal.fine_tuning.frozen_weights) or "bf16"
    if request.frozen_weights is not None:
        return request.frozen_weights
    published = next((near for word, near in PUBLISHED_AS if word in model.quantised), None)
    if rank and published in trainer.legal.frozen_weights:
        found = str(published)
    if rank:
        assumed.append(Assumption("frozen weights", found, WORDS["frozen_weights"][found], "--frozen-weights"))
    return found


def _precision(request: Request, hardware: HardwareProfile, trainer: Trainer, assumed: list[Assumption]) -> str:
    """What the trainer takes, or fp16 where the device has no bf16; bf16 that is asked for there is priced as that, and said."""
    if request.precision is not None:
        asked = usual_name(request.precision)
        if asked in ("bf16", "bf16_true") and hardware.lacks_bf16:
            why = f"{hardware.name} has no bf16: priced as if it were fp16; what torch does in its place is slower"
            assumed.append(Assumption("precision", asked, why, "--precision fp16"))
        return asked
    found = "fp16" if hardware.lacks_bf16 else trainer.legal.precisions[0]
    assumed.append(Assumption("precision", found, PRECISIONS.get(found, ""), "--precision"))
    return found


def _optimizer(request: Request, trainer: Trainer, precision: str, assumed: list[Assumption]) -> str:
    """Adam, or what the trainer takes in its place."""
    if request.optimizer is not None:
        return usual_name(request.optimizer)
    found = trainer.legal.fine_tuning.optimizer or "adam"
    why = "Adam, both moments in bf16" if precision == "bf16_true" and found == "adam" else OPTIMIZERS.get(found, "")
    assumed.append(Assumption("optimizer", found, why, "--optimizer"))
    return found


def _trainer(name: str, hardware: HardwareProfile) -> Trainer:
    """The trainer. Raises PlannerError where it needs a kernel that the device does not have."""
    trainer = load_trainer(name)
    if not runs_attention(trainer, hardware.arch):
        raise PlannerError(
            f"{hardware.name} ({hardware.arch}) has no flash attention kernel, which trainer {name} needs; "
            f"use --trainer {TRAINER_WITHOUT_FLASH}"
        )
    return trainer


def _with_recipe(
    name: str, trainer: Trainer, workload: Workload, cluster: Cluster
) -> tuple[str, Trainer, list[Assumption]]:
    """The trainer with the options that its published recipe for such a job sets, where the user does not; what is assumed."""
    said = spelled(name)[2]
    recipe = trainer.choices.recipe(
        workload.model.name, cluster.hardware.name, workload.precision, adapters=workload.lora_rank > 0
    )
    more = {option: value for option, value in recipe.options.items() if option not in said}
    name = spell(name, more)
    trainer = load_trainer(name) if more else trainer
    job = Job(workload=workload, cluster=cluster, trainer=trainer)
    return name, trainer, assumed_options(job, said, recipe)


def _of_the_model(workload: Workload, trainer: Trainer) -> list[Assumption]:
    """What its file leaves open or contradicts: sizes, quantised weights, images, sparse attention."""
    model, found = workload.model, []
    counted, stated = total_parameters(model), model.published_parameters
    if stated and abs(counted / stated - 1.0) > SIZES_DISAGREE:
        why = f"its sizes give {format_count(counted)}, published are {format_count(stated)}: a size of its file is wrong"
        found.append(Assumption("parameters", format_count(counted), why, "--model FILE"))
    found += [
        Assumption("odd size", value, f"{why}: is its file right? planned as it says", "--model FILE")
        for value, why in odd_sizes(model)
    ]
    if kind := unknown_family(model.source):
        why = f"{kind} is not known, and its config.json has the keys of a llama alone"
        found.append(Assumption("architecture", "llama, by its keys", why, "--model FILE"))
    if model.quantised:
        kept = f"frozen in {workload.frozen_weights}" if workload.lora_rank else f"trained in {workload.precision}"
        why = f"published weights are quantised ({model.quantised}); what is kept otherwise is converted before training"
        found.append(Assumption("weights", kept, why, "--lora-rank and --frozen-weights"))
    if model.vision:
        images = f"{workload.image_tokens} image tokens per sequence" if workload.image_tokens else "text only"
        value = f"{format_count(model.vision.parameters)} parameters, {workload.image_encoder}; {images}"
        why = "it stands on the first stage, whole on every tensor rank"
        found.append(Assumption("image encoder", value, why, "--image-tokens and --image-encoder"))
    if model.is_sparse:
        value = f"{model.index_top_k} keys per query, indexer trained on these"
        why = "the sparse stage; forward measured in inference engines, backward estimated from bytes and FLOP"
        if trainer.code_base not in SPARSE_KERNELS:
            value, why = f"{model.index_top_k} keys per query", f"a mask over all keys in {trainer.name}: the choice saves no time"
        found.append(Assumption("sparse attention", value, why, "--model FILE"))
    return found


def _routing(model: ModelSpec, num_gpus: int) -> Assumption:
    """How uneven the loads of expert ranks are, on a node's and on the most ranks that the job can have."""
    job = Workload(model=model, sequence_length=1, global_batch_size=1, expert_imbalance=0.0)
    most = min(model.num_experts, num_gpus)
    loads = {ranks: float(busiest(job, np.asarray(ranks))) for ranks in sorted({min(8, most), most})}
    value = ", ".join(f"{load:.2f} on {ranks} expert ranks" for ranks, load in loads.items())
    why = "the busiest rank over the mean under a balancing loss; 1 = balanced by force, as in benchmarks"
    return Assumption("expert imbalance", value, why, "--expert-imbalance")


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

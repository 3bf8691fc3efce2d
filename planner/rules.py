"""Which layouts are legal for a job: one table of rules, each a predicate on columns and a sentence for one layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.layout import NAMES, CpMethod, Layout, Module, Order, Recompute, Schedule, module_mask, module_names
from planner.model import ModelSpec
from planner.trainer import Trainer
from planner.workload import LOW_PRECISIONS, Workload

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the rules look at beside the layout."""

    workload: Workload
    cluster: Cluster
    trainer: Trainer

    @property
    def model(self) -> ModelSpec:
        """The model of the workload."""
        return self.workload.model


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that every legal layout meets."""

    name: str
    """Short name, printed with the number of layouts that a rule refuses."""
    holds: Callable[[Job, Layout], Any]
    """True where the rule holds; one value or a column."""
    sentence: Callable[[Job, Layout], str]
    """What is wrong with one layout that breaks it, with the numbers and the remedy."""


def check(job: Job, layout: Layout) -> None:
    """Raise PlannerError with the sentence of the first rule that one layout breaks."""
    for rule in RULES:
        if not np.all(rule.holds(job, layout)):
            raise PlannerError(f"{rule.sentence(job, layout)} (rule '{rule.name}')")


def allowed(job: Job, layout: Layout) -> Mask:
    """Mask of the candidates that meet every rule."""
    mask = np.ones(len(layout), dtype=bool)
    for rule in RULES:
        mask &= np.asarray(rule.holds(job, layout), dtype=bool)
    return mask


def refusals(job: Job, layout: Layout) -> dict[str, int]:
    """How many candidates each rule refuses (a candidate counts for each rule it breaks), largest first."""
    counts = {rule.name: int(np.sum(~np.broadcast_to(rule.holds(job, layout), len(layout)))) for rule in RULES}
    return dict(sorted(((name, n) for name, n in counts.items() if n), key=lambda item: -item[1]))


LEAN_OPTIMIZERS = ("adam_bf16", "adam_8bit")
"""Optimizers whose moments have less than 32 bits."""


def check_workload(workload: Workload, cluster: Cluster, trainer: Trainer) -> None:
    """Raise PlannerError when no layout at all could run this job: precision or optimizer unknown to trainer or GPU."""
    if workload.precision not in trainer.precisions:
        raise PlannerError(
            f"trainer {trainer.name} does not train in {workload.precision}; it knows {', '.join(trainer.precisions)}"
        )
    if workload.optimizer not in trainer.optimizers:
        raise PlannerError(
            f"trainer {trainer.name} has no optimizer {workload.optimizer}; it knows {', '.join(trainer.optimizers)}"
        )
    if trainer.transformer_engine and workload.precision == "fp16" and workload.optimizer in LEAN_OPTIMIZERS:
        raise PlannerError(
            f"optimizer {workload.optimizer} in fp16: trainer {trainer.name}'s optimizer with moments of less than 32 bits takes "
            "gradients in fp32 or bf16; use --precision bf16 or --optimizer adam"
        )
    cluster.hardware.peak({"mxfp8": "fp8", "fp8_row": "fp8"}.get(workload.precision, workload.precision))


def _divides(divisor: Any, number: Any) -> Any:
    return np.asarray(number) % np.maximum(np.asarray(divisor), 1) == 0


def _given_stages(layout: Layout) -> Any:
    return (np.asarray(layout.first_stage_layers) > 0).astype(int) + (np.asarray(layout.last_stage_layers) > 0)


def _left_layers(job: Job, layout: Layout) -> Any:
    return job.model.num_layers - np.asarray(layout.first_stage_layers) - np.asarray(layout.last_stage_layers)


def _stages_hold(job: Job, layout: Layout) -> Any:
    pp, given, left = np.asarray(layout.pp), _given_stages(layout), np.asarray(_left_layers(job, layout))
    rest = np.maximum(pp - given, 0)
    some = np.where(rest > 0, left >= rest, left == 0)
    even = np.where(rest > 0, left % np.maximum(rest, 1) == 0, True)
    uneven_allowed = (given == 0) | job.trainer.uneven_stages
    return (
        (pp <= job.model.num_layers)
        & some
        & (even | (not job.trainer.drops_remainder))
        & uneven_allowed
        & ((pp > 1) | (given == 0))
    )


def _chunks_hold(job: Job, layout: Layout) -> Any:
    """Each virtual stage holds as many layers as the others; the first and last may lose one layer to what they carry."""
    pp, vpp, given = np.asarray(layout.pp), np.asarray(layout.vpp), np.asarray(_given_stages(layout))
    middle = np.asarray(_left_layers(job, layout)) // np.maximum(pp - given, 1)
    first = np.where(np.asarray(layout.first_stage_layers) > 0, layout.first_stage_layers, middle)
    last = np.where(np.asarray(layout.last_stage_layers) > 0, layout.last_stage_layers, middle)
    return (vpp == 1) | ((middle % vpp == 0) & (first >= vpp - 1) & (last >= vpp - 1) & (middle >= vpp))


def _schedule_holds(job: Job, layout: Layout) -> Any:
    schedule, pp, vpp = np.asarray(layout.schedule), np.asarray(layout.pp), np.asarray(layout.vpp)
    numbers = [number for number, name in NAMES["schedule"].items() if name in job.trainer.schedules]
    known = np.isin(schedule, numbers) | ((pp == 1) & (schedule == Schedule.ONE_F_ONE_B))
    v_shaped = (schedule == Schedule.ZBV) | (schedule == Schedule.DUALPIPE_V)
    virtual = np.where(schedule == Schedule.INTERLEAVED, vpp > 1, np.where(v_shaped, vpp == 2, vpp == 1))
    return known & virtual & ((pp > 1) | (schedule == Schedule.ONE_F_ONE_B))


def _microbatches_hold(job: Job, layout: Layout) -> Any:
    schedule, pp, m = np.asarray(layout.schedule), np.asarray(layout.pp), np.asarray(layout.num_microbatches)
    interleaved = schedule == Schedule.INTERLEAVED
    group = np.maximum(pp, 1) if job.trainer.interleaved_multiple else np.maximum(m // np.maximum(pp, 1), 1)
    return (~interleaved | (m % group == 0)) & ((schedule != Schedule.DUALPIPE_V) | (m >= 2 * pp))


def _kv_heads_hold(job: Job, layout: Layout) -> Any:
    tp, kv = np.asarray(layout.tp), job.model.num_kv_heads
    if job.model.is_mla:
        return np.ones(tp.shape, dtype=bool)
    replicated = (tp % kv == 0) & job.trainer.kv_replication
    return (kv % np.maximum(tp, 1) == 0) | replicated


def _cp_holds(job: Job, layout: Layout) -> Any:
    cp, method = np.asarray(layout.cp), np.asarray(layout.cp_method)
    numbers = [number for number, name in NAMES["cp_method"].items() if name in job.trainer.cp_methods]
    per_rank = job.model.num_heads // np.maximum(np.asarray(layout.tp), 1)
    keys = np.maximum(job.model.num_kv_heads // np.maximum(np.asarray(layout.tp), 1), 1)
    divides = (per_rank % np.maximum(cp, 1) == 0) & (keys % np.maximum(cp, 1) == 0)
    a2a = (method != CpMethod.A2A) | divides
    return (cp == 1) | (np.isin(method, numbers) & a2a)


def _sequence_holds(job: Job, layout: Layout) -> Any:
    s, cp, split = job.workload.sequence_length, np.asarray(layout.cp), np.asarray(layout.sequence_parallel)
    chunks = (cp == 1) | (s % np.maximum(job.trainer.sequence_divisor * cp, 1) == 0)
    whole = s % np.maximum(cp, 1) == 0
    return chunks & whole & ((split == 0) | (s // np.maximum(cp, 1) % np.maximum(np.asarray(layout.tp), 1) == 0))


def _sp_holds(job: Job, layout: Layout) -> Any:
    tp, split = np.asarray(layout.tp), np.asarray(layout.sequence_parallel)
    if job.trainer.sequence_parallel == "never":
        return split == 0
    if job.trainer.sequence_parallel == "always":
        return split == (tp > 1)
    return (split == 0) | (tp > 1)


def _ep_holds(job: Job, layout: Layout) -> Any:
    ep, etp, tp = np.asarray(layout.ep), np.asarray(layout.etp), np.asarray(layout.tp)
    if not job.model.is_moe:
        return (ep == 1) & (etp == 1)
    kind = job.trainer.expert_parallel
    ranks = tp * np.asarray(layout.cp) * np.asarray(layout.dp)
    folded = ranks % np.maximum(ep * etp, 1) == 0
    if kind == "none":
        return (ep == 1) & (etp == tp)
    alone = (ep == 1) | (tp * np.asarray(layout.cp) == 1) | (kind != "alone")
    if kind in ("dp", "alone"):
        return alone & (np.asarray(layout.dp) % np.maximum(ep, 1) == 0) & (etp == tp)
    return folded & ((job.trainer.etp & (not job.model.expert_bias)) | (etp == 1))


def _zero_holds(job: Job, layout: Layout) -> Any:
    zero, alone = np.asarray(layout.zero), np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return np.isin(zero, job.trainer.zero) & (
        (np.asarray(layout.pp) == 1) | np.isin(zero, job.trainer.zero_with_pp) | alone
    )


def _recompute_holds(job: Job, layout: Layout) -> Any:
    mode, modules = np.asarray(layout.recompute), np.asarray(layout.recompute_modules)
    modes = [number for number, name in NAMES["recompute"].items() if name in job.trainer.recompute]
    known = module_mask(list(job.trainer.recompute_modules))
    selective = mode == Recompute.SELECTIVE
    named = np.where(selective, (modules != 0) & ((modules & ~known) == 0), modules == 0)
    layers = np.asarray(layout.recompute_layers)
    partly = (layers == 0) | (
        (mode == Recompute.FULL) & job.trainer.recompute_layers & (layers <= job.model.num_layers)
    )
    return np.isin(mode, modes) & named & partly


def absent_modules(model: ModelSpec, trainer: Trainer) -> int:
    """Modules that selective recompute cannot repeat in a model, as a bit mask.

    What the model does not have; with Transformer Engine also what is part of a linear layer's kernel: the norms of a
    dense layer, and all activations but those of grouped experts.  [megatron/core: transformer_layer.py, moe/experts.py]
    """
    absent = Module(0)
    if not model.is_mla:
        absent |= Module.MLA_UP_PROJECTION
    if not model.is_moe:
        absent |= Module.MOE | Module.SHARED_EXPERTS
        absent |= Module.MLP_ACTIVATION if trainer.transformer_engine else Module(0)
    elif not model.shared_expert_ffn_size:
        absent |= Module.SHARED_EXPERTS
    if trainer.transformer_engine and not (model.is_moe or model.is_mla):
        absent |= Module.NORM
    return int(absent)


def _modules_hold(job: Job, layout: Layout) -> Any:
    """Only modules that the model has."""
    return (np.asarray(layout.recompute_modules) & absent_modules(job.model, job.trainer)) == 0


def _recompute_chunks_hold(job: Job, layout: Layout) -> Any:
    """Layers to recompute are counted per virtual stage."""
    return np.asarray(layout.recompute_layers) % np.maximum(np.asarray(layout.vpp), 1) == 0


def _ring_holds(job: Job, layout: Layout) -> Any:
    """Transformer Engine's context parallelism: MLA only as a ring, sliding windows only without one."""
    method, cp = np.asarray(layout.cp_method), np.asarray(layout.cp)
    if not job.trainer.transformer_engine:
        return np.ones(cp.shape, dtype=bool)
    ring = method == CpMethod.RING
    return (cp == 1) | ((ring | (not job.model.is_mla)) & (~ring | (job.model.window == 0)))


def _low_precision_holds(job: Job, layout: Layout) -> Any:
    """Low-precision GEMMs want both sides of every matrix on one rank in multiples of 16, with mx scales of 32."""
    if job.workload.precision not in LOW_PRECISIONS:
        return np.ones(np.asarray(layout.tp).shape, dtype=bool)
    model, tp, split = job.model, np.asarray(layout.tp), np.asarray(layout.sequence_parallel)
    unit = low_precision_multiple(job.workload.precision)
    rows = job.workload.sequence_length * np.asarray(layout.micro_batch_size) // np.maximum(np.asarray(layout.cp), 1)
    holds = (model.hidden_size % unit == 0) & (model.attention_output_size % (tp * unit) == 0)
    holds &= rows % (np.where(split == 1, tp, 1) * unit) == 0
    if model.num_plain_layers:
        holds &= model.ffn_size % (tp * unit) == 0
    if model.is_moe:
        holds &= model.expert_ffn_size % (np.asarray(layout.etp) * unit) == 0
    return holds


def low_precision_multiple(precision: str) -> int:
    """Both sides of the matrices of a low-precision GEMM are multiples of this: the length of one row of scales for mx
    formats, else 16 bytes of alignment in fp8.  [TransformerEngine, pytorch/utils.py, assert_dim_for_fp8_exec]"""
    return 32 if precision == "mxfp8" else 16


def _host_states_hold(job: Job, layout: Layout) -> Any:
    """Offload works on sharded optimizers, and so do Megatron's moments of less than 32 bits."""
    lean = job.trainer.transformer_engine and job.workload.optimizer in LEAN_OPTIMIZERS
    alone = np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    return alone | (np.asarray(layout.zero) > 0) | ((np.asarray(layout.offload_optimizer) == 0) & (not lean))


def _fp16_stays(job: Job) -> bool:
    """Megatron's optimizer on the host clips gradients in fp32 or bf16 only.  [core/optimizer/clip_grads.py, decoupled_grad]"""
    return job.trainer.transformer_engine and job.workload.precision == "fp16"


def _offloadable(job: Job) -> str:
    states = "optimizer states" if job.trainer.offload_optimizer else "no optimizer states"
    return f"{states}, but not in fp16" if job.trainer.offload_optimizer and _fp16_stays(job) else states


def _offload_holds(job: Job, layout: Layout) -> Any:
    able = job.trainer.offload_optimizer and not _fp16_stays(job)
    optimizer = (np.asarray(layout.offload_optimizer) == 0) | able
    activations = (np.asarray(layout.offload_activations) == 0) | (
        job.trainer.offload_activations & (np.asarray(layout.recompute) == Recompute.FULL)
    )
    return optimizer & activations


def _shard_holds(job: Job, layout: Layout) -> Any:
    shard, dp = np.asarray(layout.shard), np.asarray(layout.dp)
    return (dp % np.maximum(shard, 1) == 0) & ((shard == dp) | job.trainer.hsdp) & (shard <= dp)


def _experts_in_shards(job: Job, layout: Layout) -> Any:
    """FSDP takes the expert parallel ranks from those that shard the dense weights.  [torchtitan, ParallelDims]"""
    borrowed = np.asarray(layout.shard) * np.asarray(layout.cp) * np.asarray(layout.tp)
    return (job.trainer.weight_sharding_level != 1) | (borrowed % np.maximum(np.asarray(layout.ep), 1) == 0)


def _experts_whole(job: Job, layout: Layout) -> Any:
    """Without expert parallelism, such trainers split every expert over tp.  [torchtitan, moe_sharding.py]"""
    splits = (not job.model.is_moe) | (job.trainer.expert_parallel != "folded") | job.trainer.etp
    return splits | (np.asarray(layout.ep) > 1) | (np.asarray(layout.tp) == 1)


def _meshes_hold(job: Job, layout: Layout) -> Any:
    return (np.asarray(layout.tp) == 1) | (np.asarray(layout.cp) == 1) | job.trainer.tp_with_cp


def _part_of_optimizer_holds(job: Job, layout: Layout) -> Any:
    share, level = np.asarray(layout.offload_optimizer), job.trainer.partial_offload_level
    part = (share > 0) & (share < 100)
    return (share == 0) | (np.asarray(layout.zero) >= np.where(part, level, min(level, 1)))


def _offload_meshes_hold(job: Job, layout: Layout) -> Any:
    split = (np.asarray(layout.tp) > 1) & (np.asarray(layout.ep) > 1) & (np.asarray(layout.offload_optimizer) > 0)
    return ~split | job.trainer.offload_with_tp_and_ep


def _split_backward_holds(job: Job, layout: Layout) -> Any:
    """FSDP frees the weights after the input gradient and loses the weight gradient that comes later.

    Measured with torch 2.13, two pipeline ranks, gradient norm against the same job in one process: zbv with
    reshard_after_forward 0.966 for 1.372, dualpipe_v 1.301; without it, and with 1f1b or interleaved_1f1b either way, 1.372.
    """
    split = np.isin(np.asarray(layout.schedule), (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPE_V))
    return ~split | (np.asarray(layout.zero) < 3) | (job.trainer.weight_sharding_level != 1)


def _late_weights_hold(job: Job, layout: Layout) -> Any:
    """What was computed again for the input gradient waits for the weight gradient too, in every microbatch in between.

    Fake run of torch 2.13 (planner.validator, 2026-11), Llama 3 8B, pp 2, zbv: 3.3 times the activations that full
    recompute leaves under 1f1b. That is not modelled.
    """
    split = np.isin(np.asarray(layout.schedule), (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPE_V))
    return ~split | (np.asarray(layout.recompute) != Recompute.FULL) | (not job.trainer.late_gradients)


def _tied_holds(job: Job, layout: Layout) -> Any:
    return (np.asarray(layout.pp) == 1) | (not job.model.tied_embeddings) | job.trainer.tied_embeddings_with_pp


def _batch_sentence(job: Job, layout: Layout) -> str:
    batch, replicas = job.workload.global_batch_size, int(layout.micro_batch_size) * int(layout.dp)
    nearest = max(1, round(batch / replicas)) * replicas
    return (
        f"micro_batch_size {layout.micro_batch_size} x {layout.num_microbatches} microbatches x dp {layout.dp} = "
        f"{layout.global_batch_size} sequences, but the global batch is {batch}; it must be a multiple of {replicas}, "
        f"the nearest is {nearest}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="GPUs",
        holds=lambda job, x: np.asarray(x.num_gpus) == job.cluster.num_gpus,
        sentence=lambda job, x: (
            f"tp {x.tp} x pp {x.pp} x dp {x.dp} x cp {x.cp} = {x.num_gpus} GPUs, but the job has "
            f"{job.cluster.num_gpus}; choose degrees whose product is {job.cluster.num_gpus}"
        ),
    ),
    Rule(
        name="trainer degrees",
        holds=lambda job, x: ((np.asarray(x.tp) == 1) | job.trainer.tp) & ((np.asarray(x.pp) == 1) | job.trainer.pp),
        sentence=lambda job, x: (
            f"trainer {job.trainer.name} has no {'tensor' if not job.trainer.tp and x.tp > 1 else 'pipeline'} "
            "parallelism; set the degree to 1 or choose another trainer"
        ),
    ),
    Rule(
        name="heads",
        holds=lambda job, x: _divides(x.tp, job.model.num_heads),
        sentence=lambda job, x: (
            f"tp {x.tp} does not divide the {job.model.num_heads} attention heads of {job.model.name}; "
            f"tp may be {_divisors_text(job.model.num_heads)}"
        ),
    ),
    Rule(
        name="key-value heads",
        holds=_kv_heads_hold,
        sentence=lambda job, x: (
            f"tp {x.tp} does not fit the {job.model.num_kv_heads} key-value heads of {job.model.name}: "
            + (
                "it must divide them or be a multiple of them"
                if job.trainer.kv_replication
                else f"trainer {job.trainer.name} does not replicate them, so tp must divide {job.model.num_kv_heads}"
            )
        ),
    ),
    Rule(
        name="MLP width",
        holds=lambda job, x: (
            _divides(x.tp, job.model.ffn_size)
            & (_divides(x.etp, job.model.expert_ffn_size) if job.model.is_moe else True)
        ),
        sentence=lambda job, x: (
            f"the MLP width ({job.model.ffn_size}, experts {job.model.expert_ffn_size}) does not divide by "
            f"tp {x.tp} (experts: etp {x.etp}); choose a smaller degree"
        ),
    ),  # fmt: skip
    Rule(
        name="layers",
        holds=_stages_hold,
        sentence=lambda job, x: (
            f"{job.model.num_layers} layers do not split over {x.pp} pipeline stages with first_stage_layers "
            f"{x.first_stage_layers} and last_stage_layers {x.last_stage_layers} in trainer {job.trainer.name}; choose pp from "
            f"{_divisors_text(job.model.num_layers)}, or give the first and last stage layers so that the rest divides"
        ),
    ),
    Rule(
        name="virtual stages",
        holds=_chunks_hold,
        sentence=lambda job, x: (
            f"vpp {x.vpp} does not divide the layers of each of the {x.pp} stages of {job.model.name} "
            f"({job.model.num_layers} layers); choose vpp so that every virtual stage has the same number"
        ),
    ),
    Rule(
        name="schedule",
        holds=_schedule_holds,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with pp {x.pp} and vpp {x.vpp}: trainer "
            f"{job.trainer.name} knows {', '.join(job.trainer.schedules) or '1f1b'}; interleaved_1f1b needs pp > 1 and vpp > 1, "
            "zbv and dualpipe_v need vpp 2, the others vpp 1"
        ),
    ),
    Rule(
        name="microbatches",
        holds=_microbatches_hold,
        sentence=lambda job, x: (
            f"{x.num_microbatches} microbatches with schedule {NAMES['schedule'][int(x.schedule)]} and pp "
            f"{x.pp}: interleaved_1f1b needs a multiple of "
            f"{'pp' if job.trainer.interleaved_multiple else 'm // pp rounds'}, dualpipe_v at least 2 pp; "
            "change micro_batch_size or the batch"
        ),
    ),
    Rule(
        name="batch",
        holds=lambda job, x: np.asarray(x.global_batch_size) == job.workload.global_batch_size,
        sentence=_batch_sentence,
    ),
    Rule(
        name="context parallel",
        holds=_cp_holds,
        sentence=lambda job, x: (
            f"cp {x.cp} with method {NAMES['cp_method'][int(x.cp_method)]}: trainer {job.trainer.name} "
            f"knows {', '.join(job.trainer.cp_methods) or 'no context parallelism'}; a2a also needs cp to divide the "
            f"{job.model.num_heads // max(1, int(x.tp))} heads of each tensor-parallel rank"
        ),
    ),
    Rule(
        name="context parallel kernels",
        holds=_ring_holds,
        sentence=lambda job, x: (
            f"cp {x.cp} with method {NAMES['cp_method'][int(x.cp_method)]}: Transformer Engine's context parallelism knows "
            f"{'MLA as a ring only' if job.model.is_mla else 'sliding windows with a2a or allgather only'}"
        ),
    ),
    Rule(
        name="low precision",
        holds=_low_precision_holds,
        sentence=lambda job, x: (
            f"{job.workload.precision} needs hidden size, attention width, MLP width (experts: over etp {x.etp}) and tokens of "
            f"each of the {x.tp} tensor-parallel ranks in multiples of {low_precision_multiple(job.workload.precision)}; "
            "choose a smaller tp, or bf16"
        ),
    ),
    Rule(
        name="sequence",
        holds=_sequence_holds,
        sentence=lambda job, x: (
            f"the sequence of {job.workload.sequence_length} tokens does not divide by "
            f"{job.trainer.sequence_divisor} x cp {x.cp}, or the part of each rank not by tp {x.tp}; choose a length that does"
        ),
    ),
    Rule(
        name="sequence parallel",
        holds=_sp_holds,
        sentence=lambda job, x: (
            f"sequence_parallel {bool(x.sequence_parallel)} with tp {x.tp}: trainer {job.trainer.name} uses it "
            f"{job.trainer.sequence_parallel}, and only with tp > 1"
        ),
    ),
    Rule(
        name="experts",
        holds=lambda job, x: (
            np.asarray(x.ep) * 0 == (job.model.num_experts % np.maximum(np.asarray(x.ep), 1) if job.model.is_moe else 0)
        ),
        sentence=lambda job, x: (
            f"ep {x.ep} does not divide the {job.model.num_experts} experts of {job.model.name}; ep may be "
            f"{_divisors_text(job.model.num_experts)}"
        ),
    ),
    Rule(
        name="expert parallel",
        holds=_ep_holds,
        sentence=lambda job, x: (
            f"ep {x.ep} and etp {x.etp} with tp {x.tp}, cp {x.cp}, dp {x.dp}: "
            + (
                f"{job.model.name} has no experts, so both must be 1"
                if not job.model.is_moe
                else {
                    "folded": "ep x etp must divide tp x cp x dp"
                    + (" and etp must be 1" if not job.trainer.etp or job.model.expert_bias else "")
                    + (", as its experts have biases" if job.model.expert_bias else ""),
                    "dp": "ep must divide dp and etp must equal tp",
                    "alone": "ep must divide dp, with tp 1 and cp 1 when it is above 1, and etp must equal tp",
                    "none": "this trainer has no expert parallelism: ep must be 1 and etp equal tp",
                }[job.trainer.expert_parallel]
            )
        ),
    ),
    Rule(
        name="rank order",
        holds=lambda job, x: (
            (np.asarray(x.order) != Order.TP_CP_EP_PP_DP)
            | (np.asarray(x.pp) == 1)
            | np.where(
                job.model.is_moe,
                np.asarray(x.ep) * np.asarray(x.etp) == np.asarray(x.tp) * np.asarray(x.cp),
                np.asarray(x.cp) == 1,
            )
        ),
        sentence=lambda job, x: (
            f"order tp-cp-ep-pp-dp with pp {x.pp}: "
            + (
                f"ep {x.ep} x etp {x.etp} must equal tp {x.tp} x cp {x.cp}, "
                if job.model.is_moe
                else f"cp {x.cp} must be 1 without experts, "
            )
            + "so that experts and dense layers have the same data parallel groups; use order tp-cp-ep-dp-pp"
        ),
    ),  # fmt: skip
    Rule(
        name="experts with tp",
        holds=lambda job, x: (
            (not job.model.is_moe)
            | (np.asarray(x.tp) == 1)
            | (np.asarray(x.sequence_parallel) == 1)
            | (job.trainer.sequence_parallel == "never")
        ),
        sentence=lambda job, x: f"a mixture of experts with tp {x.tp} needs sequence_parallel: true",
    ),  # fmt: skip
    Rule(
        name="sharding",
        holds=_zero_holds,
        sentence=lambda job, x: (
            f"zero {x.zero} with pp {x.pp}: trainer {job.trainer.name} knows zero "
            f"{', '.join(map(str, job.trainer.zero))}, with a pipeline {', '.join(map(str, job.trainer.zero_with_pp)) or 'none'}"
        ),
    ),
    Rule(
        name="shard group",
        holds=_shard_holds,
        sentence=lambda job, x: (
            f"dp_shard {x.dp_shard} must divide dp {x.dp}"
            + (
                ""
                if job.trainer.hsdp
                else f", and trainer {job.trainer.name} shards over all of dp: leave dp_shard at 0"
            )
        ),
    ),
    Rule(
        name="recompute",
        holds=_recompute_holds,
        sentence=lambda job, x: (
            f"recompute {NAMES['recompute'][int(x.recompute)]} with modules "
            f"{', '.join(module_names(int(x.recompute_modules))) or 'none'} and recompute_layers {x.recompute_layers}: trainer "
            f"{job.trainer.name} knows {', '.join(job.trainer.recompute)} "
            f"(modules: {', '.join(job.trainer.recompute_modules) or 'none'}); "
            "selective needs modules, the others none; layers go with full only"
        ),
    ),
    Rule(
        name="recompute modules",
        holds=_modules_hold,
        sentence=lambda job, x: (
            f"{job.model.name} does not have all of the modules "
            f"{', '.join(module_names(int(x.recompute_modules)))}; moe and shared_experts need experts, mla_up_projection needs MLA"
            + (
                "; norm and mlp_activation of dense layers are part of Transformer Engine's linear layers: choose mlp"
                if int(x.recompute_modules)
                & absent_modules(job.model, job.trainer)
                & (Module.NORM | Module.MLP_ACTIVATION)
                else ""
            )
        ),
    ),
    Rule(
        name="recompute layers",
        holds=_recompute_chunks_hold,
        sentence=lambda job, x: (
            f"recompute_layers {x.recompute_layers} with vpp {x.vpp}: layers are counted per virtual stage, so it must be a "
            f"multiple of {x.vpp}; the nearest is {max(1, round(int(x.recompute_layers) / int(x.vpp))) * int(x.vpp)}"
        ),
    ),
    Rule(
        name="host optimizer",
        holds=_host_states_hold,
        sentence=lambda job, x: (
            f"optimizer {job.workload.optimizer} with offload_optimizer {x.offload_optimizer} and zero {x.zero}: states on the "
            "host or in less than 32 bits are a part of the sharded optimizer; use zero 1"
        ),
    ),
    Rule(
        name="offload",
        holds=_offload_holds,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} and offload_activations {bool(x.offload_activations)}: "
            f"trainer {job.trainer.name} offloads "
            f"{_offloadable(job)} and "
            f"{'activations with full recompute' if job.trainer.offload_activations else 'no activations'}"
        ),
    ),
    Rule(
        name="partial offload",
        holds=_part_of_optimizer_holds,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} with zero {x.zero}: trainer {job.trainer.name} moves a part of the states "
            f"to the host from zero {job.trainer.partial_offload_level} on, all of them from 1 on; use 100, or a higher zero"
        ),
    ),
    Rule(
        name="offload with split experts",
        holds=_offload_meshes_hold,
        sentence=lambda job, x: (
            f"offload_optimizer {x.offload_optimizer} with tp {x.tp} and ep {x.ep}: trainer {job.trainer.name} does not offload "
            "when experts take ranks from tensor parallelism; use tp 1 or no offload"
        ),
    ),
    Rule(
        name="tp with cp",
        holds=_meshes_hold,
        sentence=lambda job, x: (
            f"tp {x.tp} with cp {x.cp}: trainer {job.trainer.name} has meshes of data and one of the two, none of all three; "
            "use one of them"
        ),
    ),
    Rule(
        name="split backward",
        holds=_split_backward_holds,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with zero {x.zero}: weights that FSDP frees between the two halves of "
            "the backward pass lose their gradient, without an error; use zero 2"
        ),
    ),
    Rule(
        name="recompute in split backward",
        holds=_late_weights_hold,
        sentence=lambda job, x: (
            f"schedule {NAMES['schedule'][int(x.schedule)]} with full recompute: what is computed again waits for the weight "
            "gradients of later passes and takes more memory than it saves; use recompute none or selective, or schedule 1f1b"
        ),
    ),
    Rule(
        name="experts in shards",
        holds=_experts_in_shards,
        sentence=lambda job, x: (
            f"ep {x.ep} must divide dp_shard {int(x.shard)} x cp {x.cp} x tp {x.tp}, whose ranks trainer {job.trainer.name} "
            "takes for experts; choose a larger dp_shard"
        ),
    ),
    Rule(
        name="whole experts",
        holds=_experts_whole,
        sentence=lambda job, x: (
            f"ep 1 with tp {x.tp}: trainer {job.trainer.name} then splits every expert over tp, which is not priced; "
            "use ep > 1 or tp 1"
        ),
    ),
    Rule(
        name="tied embeddings",
        holds=_tied_holds,
        sentence=lambda job, x: (
            f"{job.model.name} ties its embeddings, and with pp {x.pp} they lie on two stages, which trainer "
            f"{job.trainer.name} does not keep equal; use pp 1"
        ),
    ),
)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _divisors_text(number: int) -> str:
    return ", ".join(map(str, divisors(number)[:16]))

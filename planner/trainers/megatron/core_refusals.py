"""What Megatron Core cannot run, for every target that is built on it.

Read in NVIDIA/Megatron-LM, megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py
(__post_init__), of the published megatron-core 0.18.2 and 0.19.2.
"""

from collections.abc import Collection

from planner.layout import NAMES, CpMethod, Module, Order, Recompute, Schedule, module_names
from planner.trainers.bundle.target import ExportJob, unknown_choices
from planner.trainers.megatron.core_settings import (
    MODULES,
    OPTIMIZERS,
    PRECISIONS,
    alone,
    lean_optimizer,
    precision_recipe,
)


def refusals(
    job: ExportJob, who: str, optimizers: Collection[str] = tuple(OPTIMIZERS), precisions: Collection[str] = PRECISIONS
) -> list[str]:
    """What Megatron Core cannot run of this job, each with the rule's place."""
    found = unknown_choices(job, who, optimizers, precisions)
    return found + _layout_refusals(job) + _model_refusals(job) + _optimizer_refusals(job) + _precision_refusals(job)


def _layout_refusals(job: ExportJob) -> list[str]:
    layout, found = job.layout, []
    if layout.order == Order.TP_CP_DP_PP_EP:
        found.append(
            "rank order tp-cp-dp-pp-ep puts experts outermost; Megatron's groups are tp-cp-ep-dp-pp or tp-cp-ep-pp-dp "
            "(parallel_state.RankGenerator); price the plan with --order tp-cp-ep-dp-pp"
        )
    if layout.zero > 1:
        found.append(f"zero {layout.zero}: the distributed optimizer shards optimizer states only (zero 1); use zero 1")
    if layout.dp_shard not in (0, layout.dp):
        found.append(f"dp_shard {layout.dp_shard}: states are sharded over all {layout.dp} data parallel ranks; use 0")
    per_stage = min(sum(rank) for rank in job.layers_per_chunk())
    if layout.recompute_layers > per_stage > 0:
        found.append(
            f"recompute_layers {layout.recompute_layers} exceeds the {per_stage} layers of the smallest stage: "
            "--recompute-num-layers counts layers of each stage; choose at most that many"
        )
    parts = len(job.layers_per_chunk()[0])
    if layout.recompute_layers % parts:
        found.append(
            f"recompute_layers {layout.recompute_layers} with vpp {parts}: --recompute-num-layers counts layers of each virtual "
            f"stage (TransformerBlock._checkpointed_forward), so it must be a multiple of {parts}; "
            f"the nearest is {max(parts, round(layout.recompute_layers / parts) * parts)}"
        )
    if layout.offload_activations:
        found.append("offload_activations: --cpu-offloading-num-layers excludes pipelines and recompute; leave it off")
    if layout.cp > 1 and layout.cp_method == CpMethod.ALLGATHER and job.model.is_mla:
        found.append(
            "cp_method allgather with MLA: Transformer Engine gathers keys and values of equal head sizes only; "
            "use --cp-method ring"
        )
    if layout.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        found.append(f"schedule {NAMES['schedule'][layout.schedule]}: Megatron Core runs 1f1b and interleaved_1f1b")
    return [*found, *_recompute_refusals(job)]


def _recompute_refusals(job: ExportJob) -> list[str]:
    """Modules that Megatron accepts and then repeats nothing, or refuses."""
    mask, model = job.layout.recompute_modules, job.model
    if job.layout.recompute != Recompute.SELECTIVE:
        return []
    found = []
    unknown = [name for name in module_names(mask) if name not in {module_names(int(m))[0] for m in MODULES}]
    if unknown:
        found.append(f"recompute of {', '.join(unknown)}: --recompute-modules knows {', '.join(MODULES.values())}")
    if mask & Module.MLP_ACTIVATION and not model.is_moe:
        found.append(
            f"recompute of mlp_activation: moe_act repeats the activation of grouped experts only (experts.py), and {model.name} "
            "has none; recompute mlp, or layers with --recompute full --recompute-layers N"
        )
    if mask & Module.NORM and not (model.is_moe or model.is_mla):
        found.append(
            f"recompute of norm: in {model.name} every norm is part of the linear layer that follows it "
            "(TELayerNormColumnParallelLinear), so --recompute-modules layernorm repeats nothing; recompute mlp, or layers with "
            "--recompute full --recompute-layers N"
        )
    delayed = precision_recipe(job)[1] == "delayed"
    if delayed and mask & (Module.NORM | Module.MLP_ACTIVATION):
        found.append(
            "recompute of norm or mlp_activation: not with delayed scaling (transformer_config.py); recompute mlp"
        )
    return found


def _optimizer_refusals(job: ExportJob) -> list[str]:
    layout, work, found = job.layout, job.workload, []
    if work.lora_rank:
        found.append(
            f"lora_rank {work.lora_rank}: Megatron-LM has no flag for adapters; plan without --lora-rank, or use another target"
        )
    if lean_optimizer(job) and layout.zero == 0 and not alone(job):
        found.append(
            f"optimizer {work.optimizer} with offload_optimizer {layout.offload_optimizer} and zero 0: the precision-aware "
            "optimizer, which also offloads, is a part of the distributed optimizer (optimizer_config.py); use --zero 1"
        )
    if layout.offload_optimizer and OPTIMIZERS.get(work.optimizer, ("",))[0] != "adam":
        found.append(f"offload_optimizer with {work.optimizer}: optimizer offload is Adam's only; use --optimizer adam")
    if work.optimizer == "muon" and work.precision == "fp16":
        found.append("muon with fp16: Megatron's emerging optimizers refuse fp16; use --precision bf16")
    return found


def _precision_refusals(job: ExportJob) -> list[str]:
    work, arch, found = job.workload, job.cluster.hardware.arch, []
    if work.precision == "fp32":
        found.append(
            "precision fp32: no fused attention kernel computes in fp32, and the plan was priced with one; use bf16"
        )
    if work.precision in ("mxfp8", "nvfp4") and not arch.startswith("Blackwell"):
        found.append(f"precision {work.precision} needs Blackwell, not {arch}; use fp8 or bf16")
    if precision_recipe(job)[0]:
        found += _shape_refusals(job)
    return found


def _shape_refusals(job: ExportJob) -> list[str]:
    """Transformer Engine's low-precision GEMMs want both sides of every matrix on one rank in multiples of 16 (mx: 32)."""
    model, layout, tp = job.model, job.layout, job.layout.tp
    unit = 32 if job.workload.precision == "mxfp8" else 16
    tokens = job.workload.sequence_length * layout.micro_batch_size // layout.cp
    sizes = {
        "hidden size": model.hidden_size, "attention width per rank": model.attention_output_size / tp,
        "tokens per rank": tokens / (tp if layout.sequence_parallel else 1),
    }  # fmt: skip
    if model.num_plain_layers:
        sizes["MLP width per rank"] = model.ffn_size / tp
    if model.is_moe:
        sizes["expert width per rank"] = model.expert_ffn_size / layout.etp
    wrong = [f"{name} {size:g}" for name, size in sizes.items() if size % unit]
    return (
        [f"{job.workload.precision} needs multiples of {unit}: {', '.join(wrong)}; choose a smaller tp or bf16"]
        if wrong
        else []
    )


def _model_refusals(job: ExportJob) -> list[str]:
    """Models that Megatron Core's GPT layers do not have."""
    m, layout = job.model, job.layout
    bias_mixed = m.is_moe and m.linear_bias != m.expert_bias
    rules = (
        (m.position == "alibi", "ALiBi positions"),
        (m.parallel_attention, "attention and MLP side by side"),
        (m.norms_per_layer != 2, f"{m.norms_per_layer} norms per layer"),
        (m.embedding_norm, "a norm after the embedding"),
        (bias_mixed, "biases in experts but not in attention, or the other way round"),
        (m.is_moe and m.router_bias != m.linear_bias, "a router bias that differs from the other biases"),
    )
    found = [f"{m.name} has {what}, which Megatron's GPT layers do not have" for wrong, what in rules if wrong]
    if m.expert_bias and layout.etp > 1:
        found.append(f"etp {layout.etp} with biases in experts: Megatron allows them only with etp 1; use --etp 1")
    return found

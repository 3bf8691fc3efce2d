"""What Megatron-LM and Megatron-Bridge share: Megatron Core's words for a layout, and what it cannot run.

Read in NVIDIA/Megatron-LM, megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py
(__post_init__), of the published megatron-core 0.18.2 and 0.19.2.
"""

from __future__ import annotations

from itertools import groupby

from planner.layout import CpMethod, Module, Order, Recompute, module_names
from planner.model import ModelSpec
from planner.rules import LEAN_OPTIMIZERS
from planner.trainers.bundle.target import ExportJob, Setting, library_trainer

VERSIONS = ">=0.18,<0.20"
SOURCE = "NVIDIA/Megatron-LM, megatron-core 0.18.2 and 0.19.2: arguments.py, transformer_config.py, parallel_state.py"

MODULES = {
    Module.CORE_ATTENTION: "core_attn", Module.NORM: "layernorm", Module.MLP_ACTIVATION: "moe_act", Module.MLP: "mlp",
    Module.MOE: "moe", Module.MLA_UP_PROJECTION: "mla_up_proj", Module.SHARED_EXPERTS: "shared_experts",
}  # fmt: skip
"""Names after --recompute-modules."""
CP_TYPES: dict[int, str] = {CpMethod.RING: "p2p", CpMethod.A2A: "a2a", CpMethod.ALLGATHER: "all_gather"}
"""Transformer Engine's names; its check knows all_gather, while the help of --cp-comm-type says allgather."""
NEED_FUSED_ATTENTION = ("Hopper", "Blackwell")


def pipeline_layout(job: ExportJob) -> str:
    """Every virtual stage in the order that the data passes it: E embedding, t layer, m prediction module, L loss.

    ``Et*3|(t*4|)*6t*3L``: the one form that expresses every split.  [PipelineParallelLayerLayout.parse_str_to_list]
    """
    stages = ["t" * len(layers) for _, _, layers in job.virtual_stages()]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * job.model.mtp_layers + "L"
    short = [_runs(stage) for stage in stages]
    words = []
    for stage, same in groupby(short[:-1]):
        number = len(list(same))
        words.append(f"({stage}|)*{number}" if number > 1 else f"{stage}|")
    return "".join([*words, short[-1]])


def _runs(stage: str) -> str:
    """EttttL -> Et*4L."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(f"{letter}*{number}" if number > 1 else letter for letter, number in runs)


def moe_layer_pattern(model: ModelSpec) -> str:
    """Which layers have experts, as --moe-layer-freq takes it: 1 for all, else a list expression."""
    flags = [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)]
    if all(flags):
        return "1"
    if model.num_dense_layers == 0 and model.num_layers % model.moe_layer_interval == 0:
        period = [0] * (model.moe_layer_interval - 1) + [1]
        return f"({period}*{model.num_layers // model.moe_layer_interval})".replace(" ", "")
    parts = [f"[{flag}]*{len(list(same))}" for flag, same in groupby(flags)]
    return f"({'+'.join(parts)})" if len(parts) <= 8 else str(flags).replace(" ", "")


def vocab_rows(job: ExportJob) -> int:
    """Rows of the embedding table: the model's own when every rank gets a multiple of 8, which tensor cores want, else
    Megatron's padding to 128 tp."""
    rows, tp = job.model.vocab_size, int(job.layout.tp)
    return rows if rows % (8 * tp) == 0 else -(-rows // (128 * tp)) * 128 * tp


def recompute_modules(job: ExportJob) -> list[str]:
    """Names after --recompute-modules, in the order of Module."""
    mask = int(job.layout.recompute_modules)
    return [name for module, name in MODULES.items() if mask & module]


def layers_to_recompute(job: ExportJob) -> int:
    """--recompute-num-layers of the block method: per virtual stage; 0 in a plan means all.

    Megatron recomputes the first N layers of every virtual stage [TransformerBlock._checkpointed_forward], the plan says
    how many of each rank.
    """
    dealt = job.layers_per_chunk()
    wanted = int(job.layout.recompute_layers)
    most = max(max(rank) for rank in dealt)
    return most if wanted == 0 else -(-wanted // len(dealt[0]))


def precision_recipe(job: ExportJob) -> tuple[str, str]:
    """(format, recipe) of the low-precision linear layers; empty without.

    fp8 is priced with one scale per tensor: of the current tensor (tensorwise), in NeMo's recipes of the last ones
    (delayed). [profiles/trainers, quantise_bytes]
    """
    delayed = library_trainer(job.plan.trainer) == "nemo"
    recipes = {
        "fp8": ("hybrid", "delayed" if delayed else "tensorwise"), "fp8_block": ("e4m3", "blockwise"),
        "mxfp8": ("e4m3", "mxfp8"), "nvfp4": ("e2m1", "nvfp4"),
    }  # fmt: skip
    return recipes.get(job.workload.precision, ("", ""))


def sums_in_fp32(job: ExportJob) -> bool:
    """Gradients are added up and reduced in fp32; else in the type of the weights, as the plan was priced."""
    stored = job.trainer.stored
    return (stored.fp16_gradient_bytes[0] if job.workload.precision == "fp16" else stored.gradient_bytes) >= 4


def attention_backend(job: ExportJob) -> str:
    """The kernel that was priced, pinned: with --attention-backend auto an unfused one would be taken silently.

    cuDNN's fused attention is the fastest from Hopper on, FlashAttention 2 before.
    """
    if job.workload.precision == "fp32":
        return "unfused"
    arch = job.cluster.hardware.arch
    newer = any(arch.startswith(name) for name in NEED_FUSED_ATTENTION) or job.cluster.hardware.vendor == "AMD"
    return "fused" if newer or job.model.is_mla else "flash"


def shards_states(job: ExportJob) -> bool:
    """The distributed optimizer: the plan's zero 1; on one data parallel rank also where other settings need it."""
    return int(job.layout.zero) == 1 or (_alone(job) and _lean_optimizer(job))


def lean_optimizer(job: ExportJob) -> bool:
    """--use-precision-aware-optimizer: moments of less than 32 bits, or states on the host."""
    return _lean_optimizer(job)


def _lean_optimizer(job: ExportJob) -> bool:
    return job.workload.optimizer in LEAN_OPTIMIZERS or int(job.layout.offload_optimizer) > 0


def _alone(job: ExportJob) -> bool:
    return int(job.layout.dp) * int(job.layout.cp) == 1


def environment(job: ExportJob) -> dict[str, Setting]:
    """Variables that Megatron's validator asks for."""
    layout = job.layout
    if int(layout.tp) * int(layout.cp) == 1 or job.cluster.hardware.arch.startswith("Blackwell"):
        return {}
    why = (
        "Before Blackwell, tensor and context parallelism need one hardware queue: communication is then issued in "
        "program order and runs beside the GEMM that does not wait for it (validate_args asserts it)."
    )
    return {"CUDA_DEVICE_MAX_CONNECTIONS": Setting(value="1", why=why)}


def refusals(job: ExportJob) -> list[str]:
    """What Megatron Core cannot run of this job, each with the rule's place."""
    return [*_layout_refusals(job), *_model_refusals(job), *_optimizer_refusals(job), *_precision_refusals(job)]


def _layout_refusals(job: ExportJob) -> list[str]:
    layout, found = job.layout, []
    if int(layout.order) == Order.TP_CP_DP_PP_EP:
        found.append(
            "rank order tp-cp-dp-pp-ep puts experts outermost; Megatron's groups are tp-cp-ep-dp-pp or tp-cp-ep-pp-dp "
            "(parallel_state.RankGenerator); price the plan with --order tp-cp-ep-dp-pp"
        )
    if int(layout.zero) > 1:
        found.append(f"zero {layout.zero}: the distributed optimizer shards optimizer states only (zero 1); use zero 1")
    if int(layout.dp_shard) not in (0, int(layout.dp)):
        found.append(f"dp_shard {layout.dp_shard}: states are sharded over all {layout.dp} data parallel ranks; use 0")
    per_stage = min(sum(rank) for rank in job.layers_per_chunk())
    if int(layout.recompute_layers) > per_stage > 0:
        found.append(
            f"recompute_layers {layout.recompute_layers} exceeds the {per_stage} layers of the smallest stage: "
            "--recompute-num-layers counts layers of each stage; choose at most that many"
        )
    parts = len(job.layers_per_chunk()[0])
    if int(layout.recompute_layers) % parts:
        found.append(
            f"recompute_layers {layout.recompute_layers} with vpp {parts}: --recompute-num-layers counts layers of each virtual "
            f"stage (TransformerBlock._checkpointed_forward), so it must be a multiple of {parts}; "
            f"the nearest is {max(parts, round(int(layout.recompute_layers) / parts) * parts)}"
        )
    if int(layout.offload_activations):
        found.append("offload_activations: --cpu-offloading-num-layers excludes pipelines and recompute; leave it off")
    if int(layout.cp) > 1 and int(layout.cp_method) == CpMethod.ALLGATHER and job.model.is_mla:
        found.append(
            "cp_method allgather with MLA: Transformer Engine gathers keys and values of equal head sizes only; "
            "use --cp-method ring"
        )
    return [*found, *_recompute_refusals(job)]


def _recompute_refusals(job: ExportJob) -> list[str]:
    """Modules that Megatron accepts and then repeats nothing, or refuses."""
    mask, model = int(job.layout.recompute_modules), job.model
    if int(job.layout.recompute) != Recompute.SELECTIVE:
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
    if _lean_optimizer(job) and int(layout.zero) == 0 and not _alone(job):
        found.append(
            f"optimizer {work.optimizer} with offload_optimizer {layout.offload_optimizer} and zero 0: the precision-aware "
            "optimizer, which also offloads, is a part of the distributed optimizer (optimizer_config.py); use --zero 1"
        )
    if int(layout.offload_optimizer) and work.optimizer not in ("adam", "adam_bf16", "adam_8bit"):
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
    model, layout, tp = job.model, job.layout, int(job.layout.tp)
    unit = 32 if job.workload.precision == "mxfp8" else 16
    tokens = job.workload.sequence_length * int(layout.micro_batch_size) // int(layout.cp)
    sizes = {
        "hidden size": model.hidden_size, "attention width per rank": model.attention_output_size / tp,
        "tokens per rank": tokens / (tp if layout.sequence_parallel else 1),
    }  # fmt: skip
    if model.num_plain_layers:
        sizes["MLP width per rank"] = model.ffn_size / tp
    if model.is_moe:
        sizes["expert width per rank"] = model.expert_ffn_size / int(layout.etp)
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
    if m.expert_bias and int(layout.etp) > 1:
        found.append(f"etp {layout.etp} with biases in experts: Megatron allows them only with etp 1; use --etp 1")
    return found


FLEX_BACKENDS = {"deduplicated": "hybridep", "deepep": "deepep"}
"""Dispatch of experts that sends a token once per place -> back end of the flex dispatcher."""


def fused_loss(job: ExportJob) -> bool:
    """The plan was priced with the cross entropy as one kernel (Transformer Engine's), not in plain torch operations."""
    return job.trainer.kernels.loss_passes < 2

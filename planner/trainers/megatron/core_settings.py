"""What Megatron-LM and Megatron-Bridge share: Megatron Core's words for a layout, and what it cannot run.

Read in NVIDIA/Megatron-LM, megatron/training/arguments.py (validate_args) and megatron/core/transformer/transformer_config.py
(__post_init__), of the published megatron-core 0.18.2 and 0.19.2.
"""

from collections.abc import Collection
from itertools import groupby
from typing import Any

from planner.layout import CpMethod, Module, Recompute, module_names
from planner.model import ModelSpec
from planner.rules import LEAN_OPTIMIZERS
from planner.trainers.bundle.quoting import Expression, refused
from planner.trainers.bundle.target import ExportJob, Setting, library_trainer, unknown_choices

MODULES = {
    Module.CORE_ATTENTION: "core_attn", Module.NORM: "layernorm", Module.MLP_ACTIVATION: "moe_act", Module.MLP: "mlp",
    Module.MOE: "moe", Module.MLA_UP_PROJECTION: "mla_up_proj", Module.SHARED_EXPERTS: "shared_experts",
}  # fmt: skip
"""Names after --recompute-modules."""
CP_TYPES: dict[int, str] = {CpMethod.RING: "p2p", CpMethod.A2A: "a2a", CpMethod.ALLGATHER: "all_gather"}
CP_METHODS = {name: CpMethod(method) for method, name in CP_TYPES.items()} | {"allgather": CpMethod.ALLGATHER}
"""Transformer Engine's names; its check knows all_gather, while the help of --cp-comm-type says allgather."""
OPTIMIZERS = {
    "adam": ("adam", "fp32"), "adam_bf16": ("adam", "bf16"), "adam_8bit": ("adam", "fp8"), "muon": ("muon", "fp32"),
    "sgd": ("sgd", "fp32"),
}  # fmt: skip
"""Optimizer -> Megatron's name for it and the type of its moments."""
BY_MOMENTS = {pair: name for name, pair in OPTIMIZERS.items()}
RECIPES = {
    "fp8": ("hybrid", "tensorwise"), "fp8_block": ("e4m3", "blockwise"), "mxfp8": ("e4m3", "mxfp8"), "nvfp4": ("e2m1", "nvfp4"),
}  # fmt: skip
"""Precision -> format and recipe of the low-precision linear layers."""
PRECISIONS = ("bf16", "fp16", "fp32", *RECIPES)
ACTIVATION_FLAGS = {
    ("silu", True): "swiglu", ("gelu", True): "quick_geglu", ("gelu", False): "", ("relu2", False): "squared_relu",
}  # fmt: skip
"""(activation, gated) -> flag; GELU without gate is Megatron's default and has none."""
NEED_FUSED_ATTENTION = ("Hopper", "Blackwell")
FLEX_BACKENDS = {"deduplicated": "hybridep", "deepep": "deepep"}
"""Dispatch of experts that sends a token once per place -> back end of the flex dispatcher."""
Fields = dict[str, Any]
"""Field of Megatron Core's configuration -> value. Megatron-LM writes them as flags, Megatron-Bridge and verl as they are."""


def sizes(job: ExportJob) -> Fields:
    """Dimensions of the model."""
    m = job.model
    drop = 0.1 if job.trainer.stored.dropout else 0.0
    reach = max(m.num_position_embeddings, m.max_sequence_length, job.workload.sequence_length)
    return {
        "num_layers": m.num_layers, "hidden_size": m.hidden_size, "ffn_hidden_size": m.ffn_size,
        "seq_length": job.workload.sequence_length,
        "max_position_embeddings": m.num_position_embeddings if m.position == "learned" else reach,
        "position_embedding_type": "yarn" if m.scaled_rope else {"learned": "learned_absolute"}.get(m.position, m.position),
        "normalization": "RMSNorm" if m.norm == "rmsnorm" else "LayerNorm", "padded_vocab_size": vocab_rows(job),
        "vocab_size": m.vocab_size, "hidden_dropout": drop, "attention_dropout": drop,
    }  # fmt: skip


def constants(m: ModelSpec) -> Fields:
    """Norms and rotary positions; llama3's two borders and its original length are Megatron Core's own."""
    known = m.constants
    if known is None:
        return {}
    fields: Fields = {"layernorm_epsilon": Expression(f"{known.norm_eps:g}")}
    if m.position != "rope":
        return fields
    fields["rotary_base"] = int(known.rope_theta)
    if known.rotary_fraction < 1:
        fields["rotary_percent"] = known.rotary_fraction
    scaling = known.rope_scaling
    if scaling is None:
        return fields | ({"rotary_scaling_factor": 1.0} if m.is_mla else {})
    if scaling.kind == "llama3":
        return fields | {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if scaling.kind == "linear":
        return fields | {"seq_len_interpolation_factor": int(scaling.factor)}
    turns: Fields = {
        "rotary_scaling_factor": scaling.factor, "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "mscale": scaling.mscale or 1.0,
        "mscale_all_dim": scaling.mscale_all_dim,
    }  # fmt: skip
    if m.is_mla:
        return fields | turns
    turns["correction_range_round_to_int"] = scaling.truncate
    return fields | {f"yarn_{name}": value for name, value in turns.items()}


def router(m: ModelSpec) -> Fields:
    """How experts are chosen. A bias that their load moves balances them; each sequence then has a small loss of its own."""
    known = m.constants.router if m.constants else None
    if known is None:
        return {
            "moe_router_pre_softmax": m.top_k == 1, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001
        }  # fmt: skip
    grouped = known.groups > 1
    return {
        "moe_router_score_function": known.score, "moe_router_enable_expert_bias": known.expert_bias,
        "moe_router_pre_softmax": m.top_k == 1 or (known.score == "softmax" and not known.normalised),
        "moe_router_num_groups": known.groups if grouped else None, "moe_router_group_topk": known.top_groups if grouped else None,
        "moe_router_topk_scaling_factor": known.scale if known.scale != 1 else None,
        "moe_router_load_balancing_type": "seq_aux_loss" if known.expert_bias else "aux_loss",
        "moe_aux_loss_coeff": Expression("1e-4") if known.expert_bias else 0.001,
    }  # fmt: skip


def attention(m: ModelSpec) -> Fields:
    """Heads, latent attention, windows."""
    fields: Fields = {"num_attention_heads": m.num_heads}
    if m.is_mla:
        fields |= {
            "multi_latent_attention": True, "rope_type": "yarn", "qk_layernorm": True, "q_lora_rank": m.q_lora_rank or None,
            "kv_lora_rank": m.kv_lora_rank, "qk_head_dim": m.qk_nope_head_dim, "qk_pos_emb_head_dim": m.qk_rope_head_dim,
            "v_head_dim": m.v_head_dim,
        }  # fmt: skip
    else:
        fields |= {
            "kv_channels": m.head_dim, "group_query_attention": True, "num_query_groups": m.num_kv_heads, "qk_layernorm": m.qk_norm,
        }  # fmt: skip
    if m.attention_sinks:
        fields["softmax_type"] = "learnable"
    if m.window:
        fields["window_size"] = (m.window - 1, 0)  # tokens before the own one  [gpt_oss_bridge.py]
        if m.num_windowed_layers < m.num_layers:
            fields["window_attn_skip_freq"] = window_pattern(m.num_layers, m.num_windowed_layers)
    return fields


def window_pattern(layers: int, windowed: int) -> Expression:
    """1 for a layer with the window: as many as the model has, spread evenly, the full ones last of each run."""
    full = layers - windowed
    flags = [1 - int((layer + 1) * full // layers > layer * full // layers) for layer in range(layers)]
    return Expression(str(flags).replace(" ", ""))


def experts(job: ExportJob) -> Fields:
    """Experts, their router and their dispatch; empty for a dense model."""
    m, layout = job.model, job.layout
    if not m.is_moe:
        return {}
    fields: Fields = {
        "num_moe_experts": m.num_experts, "moe_router_topk": m.top_k, "moe_ffn_hidden_size": m.expert_ffn_size,
        "moe_layer_freq": Expression(moe_layer_pattern(m)), "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp, "moe_grouped_gemm": True, "moe_permute_fusion": True,
        "moe_router_dtype": "fp32" if "router_fp32" in job.trainer.kernels.unfused else None,
        **router(m),
    }  # fmt: skip
    if m.shared_expert_ffn_size:
        fields["moe_shared_expert_intermediate_size"] = m.shared_expert_ffn_size
    backend = FLEX_BACKENDS.get(job.trainer.kernels.expert_dispatch)
    fields |= {"moe_token_dispatcher_type": "flex" if backend else "alltoall"}
    fields |= {"moe_flex_dispatcher_backend": backend} if backend else {}
    return fields | ({"use_transformer_engine_op_fuser": True} if job.trainer.kernels.fused_experts else {})


def overlaps_experts(job: ExportJob) -> bool:
    """The exchange of experts hides behind the computation of another microbatch."""
    return job.model.is_moe and job.layout.ep > 1 and "ep" in job.trainer.traffic.overlap


def kernels(job: ExportJob) -> Fields:
    """CUDA graphs of the plan: attention, dense MLP and routers.  [transformer_config.py: cuda_graph_modules]"""
    captured = job.trainer.host.cuda_graphs == "layers"
    modules = ["attn", *(["mlp"] if job.model.num_plain_layers else []), *(["moe_router"] if job.model.is_moe else [])]
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules} if captured else {}


def cross_entropy(job: ExportJob) -> Fields:
    """The loss that the plan was priced with: Transformer Engine's kernel, Megatron's own steps compiled, or plain."""
    value = job.trainer.option("loss_fusion")
    impl = {"native": "native", "on": "te", "in_place": "te"}.get(value)
    return {"cross_entropy_loss_fusion": impl is not None, **({"cross_entropy_fusion_impl": impl} if impl else {})}


def degrees(job: ExportJob) -> Fields:
    """How the model is split over GPUs."""
    layout = job.layout
    return {
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp, "sequence_parallel": bool(layout.sequence_parallel),
        "cp_comm_type": CP_TYPES[layout.cp_method] if layout.cp > 1 else None,
        "pipeline_model_parallel_layout": pipeline_layout(job) if layout.pp > 1 else None,
    }  # fmt: skip


def recompute(job: ExportJob) -> Fields:
    """What is computed again in the backward pass, or waits on the host: of all layers but one at most."""
    if job.layout.offload_activations:
        number = job.layout.offload_layers or job.model.num_layers
        return {"recompute_granularity": None, "cpu_offloading_num_layers": min(number, job.model.num_layers - 1)}
    if job.layout.recompute == Recompute.SELECTIVE:
        names = [name for module, name in MODULES.items() if job.layout.recompute_modules & module]
        return {"recompute_granularity": "selective", "recompute_modules": names}
    if job.layout.recompute == Recompute.FULL:
        number = layers_to_recompute(job)
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": number}
    return {"recompute_granularity": None}


def overlaps(job: ExportJob) -> tuple[bool, bool]:
    """Whether gradients, and whether weights after the step, are communicated during computation."""
    layout, overlap = job.layout, job.trainer.traffic.overlap
    reduce = layout.dp * layout.cp > 1 and "gradients" in overlap
    return reduce, reduce and layout.zero >= 1 and "parameters" in overlap


def offload(job: ExportJob) -> Fields:
    """States on the host."""
    share = job.layout.offload_optimizer
    fraction = Expression(f"{share / 100:g}")
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction} if share else {}


def overlaps_tensor(job: ExportJob) -> bool:
    """The plan was priced with tensor-parallel collectives that overlap the GEMM they feed."""
    return "tp" in job.trainer.traffic.overlap and bool(job.layout.sequence_parallel)


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
    rows, tp = job.model.vocab_size, job.layout.tp
    return rows if rows % (8 * tp) == 0 else -(-rows // (128 * tp)) * 128 * tp


def layers_to_recompute(job: ExportJob) -> int:
    """--recompute-num-layers of the block method: per virtual stage; 0 in a plan means all.

    Megatron recomputes the first N layers of every virtual stage [TransformerBlock._checkpointed_forward], the plan says
    how many of each rank.
    """
    partition = job.layers_per_chunk()
    wanted = job.layout.recompute_layers
    most = max(max(rank) for rank in partition)
    return most if wanted == 0 else -(-wanted // len(partition[0]))


def precision_recipe(job: ExportJob) -> tuple[str, str]:
    """(format, recipe) of the low-precision linear layers; empty without.

    fp8 is priced with one scale per tensor: of the current tensor (tensorwise), in NeMo's recipes of the last ones
    (delayed). [profiles/trainers, quantise_bytes]
    """
    form, recipe = RECIPES.get(job.workload.precision, ("", ""))
    delayed = job.workload.precision == "fp8" and library_trainer(job.plan.trainer) == "nemo"
    return form, "delayed" if delayed else recipe


def sums_in_fp32(job: ExportJob) -> bool:
    """Gradients are added up and reduced in fp32; else in the type of the weights, as the plan was priced."""
    stored = job.trainer.stored
    return (stored.fp16_gradient_bytes[0] if job.workload.precision == "fp16" else stored.gradient_bytes) >= 4


def attention_backend(job: ExportJob) -> str:
    """The kernel that was priced, pinned: with --attention-backend auto an unfused one would be taken silently.

    cuDNN's fused attention is the fastest from Hopper on, FlashAttention 2 before.
    """
    kernels = job.trainer.kernels
    if job.workload.precision == "fp32" or kernels.attention == "unfused":
        return "unfused"
    if kernels.attention_kernel == "fa2":
        return "flash"
    arch = job.cluster.hardware.arch
    newer = any(arch.startswith(name) for name in NEED_FUSED_ATTENTION) or job.cluster.hardware.vendor == "AMD"
    return "fused" if newer or job.model.is_mla else "flash"


def shards_states(job: ExportJob) -> bool:
    """The distributed optimizer: the plan's zero 1; on one data parallel rank also where other settings need it."""
    return job.layout.zero == 1 or (alone(job) and lean_optimizer(job))


def fully_sharded(job: ExportJob) -> bool:
    """Megatron-FSDP shards the states: the plan's zero 2 or 3."""
    return library_trainer(job.plan.trainer) == "megatron-fsdp"


def lean_optimizer(job: ExportJob) -> bool:
    """--use-precision-aware-optimizer: moments of less than 32 bits, or states on the host."""
    return job.workload.optimizer in LEAN_OPTIMIZERS or job.layout.offload_optimizer > 0


def alone(job: ExportJob) -> bool:
    """One data parallel rank."""
    return job.layout.dp * job.layout.cp == 1


def environment(job: ExportJob) -> dict[str, Setting]:
    """Variables that Megatron's validator asks for."""
    layout = job.layout
    if fully_sharded(job):
        why = "Megatron-FSDP needs more than one hardware queue (validate_args asserts it): 8 is CUDA's own default."
        return {"CUDA_DEVICE_MAX_CONNECTIONS": Setting("8", why)}
    if layout.tp * layout.cp == 1 or job.cluster.hardware.arch.startswith("Blackwell"):
        return {}
    why = (
        "Before Blackwell, tensor and context parallelism need one hardware queue: communication is then issued in "
        "program order and overlaps with the GEMM that does not wait for it (validate_args asserts it)."
    )
    return {"CUDA_DEVICE_MAX_CONNECTIONS": Setting("1", why)}


def refusals(
    job: ExportJob, who: str, optimizers: Collection[str] = tuple(OPTIMIZERS), precisions: Collection[str] = PRECISIONS
) -> list[str]:
    """What Megatron Core, and ``who`` builds on it, cannot run of this job, each with the rule's place."""
    layout, partition = job.layout, job.layers_per_chunk()
    parts, multiple = len(partition[0]), 32 if job.workload.precision == "mxfp8" else 16
    return unknown_choices(job, who, optimizers, precisions) + refused(
        job, "megatron", who=who, parts=parts, multiple=multiple, per_stage=min(sum(rank) for rank in partition),
        nearest_layers=max(parts, round(layout.recompute_layers / parts) * parts),
        selected=module_names(layout.recompute_modules) if layout.recompute == Recompute.SELECTIVE else [],
        known_modules={module_names(int(module))[0]: name for module, name in MODULES.items()},
        recipe=precision_recipe(job)[1], lean=lean_optimizer(job), alone=alone(job), uneven_sizes=_uneven(job, multiple),
        graphs=job.trainer.host.cuda_graphs, fully_sharded=fully_sharded(job),
        has_flag=(job.model.activation, job.model.gated) in ACTIVATION_FLAGS,
    )  # fmt: skip


def _uneven(job: ExportJob, multiple: int) -> list[str]:
    """Sides of matrices on one rank that are no multiple."""
    model, layout, tp = job.model, job.layout, job.layout.tp
    tokens = job.workload.sequence_length * layout.micro_batch_size // layout.cp
    sizes = {
        "hidden size": model.hidden_size, "attention width per rank": model.attention_output_size / tp,
        "tokens per rank": tokens / (tp if layout.sequence_parallel else 1),
    }  # fmt: skip
    if model.num_plain_layers:
        sizes["MLP width per rank"] = model.ffn_size / tp
    if model.is_moe:
        sizes["expert width per rank"] = model.expert_ffn_size / layout.etp
    return [f"{name} {size:g}" for name, size in sizes.items() if size % multiple]

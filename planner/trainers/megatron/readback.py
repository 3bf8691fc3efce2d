"""Reads Megatron-LM: an argument list, a mapping of arguments in YAML, or the dump of arguments in a training log."""

import ast
import re
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Order, Recompute, Schedule
from planner.model import ModelSpec
from planner.trainers.megatron import core_settings
from planner.trainers.megatron.arguments import Arguments, number, read_arguments, sure
from planner.trainers.reading.configuration import Reading, known_model
from planner.trainers.reading.values import MOST, MOST_LAYERS, percent, read_text, whole_number

HEADER = re.compile(r"# plan: (\d+) GPUs, hardware (\S+), trainer (\S+), model (\S+)")
"""What the export writes above its arguments."""
SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size",
)  # fmt: skip
READ = {
    *SIZES, "ffn_hidden_size", "kv_channels", "group_query_attention", "num_query_groups", "swiglu", "squared_relu", "quick_geglu",
    "normalization", "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights", "vocab_size",
    "padded_vocab_size", "add_bias_linear", "disable_bias_linear", "add_qkv_bias", "qk_layernorm", "multi_latent_attention",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "moe_router_topk",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size", "mtp_num_layers", "window_size",
    "window_attn_skip_freq", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "cp_comm_type", "world_size",
    "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_tp_pp_dp_mapping",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_activations",
    "use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "optimizer", "use_precision_aware_optimizer",
    "exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer_offload_fraction", "bf16", "fp16", "fp8", "fp8_recipe",
    "fp4", "fp4_recipe", "tp_comm_overlap", "activation_func_clamp_value",
}  # fmt: skip
"""Arguments that a plan holds."""
NEUTRAL = re.compile(
    r"accumulate_allreduce_grads_in_fp32|overlap_(grad_reduce|param_gather)|transformer_impl|attention_backend|"
    r"cross_entropy_.*|(hidden|attention)_dropout|moe_(grouped_gemm|permute_fusion|router_.*|aux_loss_coeff|z_loss_coeff)|"
    r"rope_type|rotary_.*|main_(params|grads)_dtype|sgd_momentum|init_method_std|seed|lr.*|min_lr|weight_decay.*|adam_.*|"
    r"clip_grad|train_.*|eval_.*|log_.*|save.*|load|ckpt_.*|tokenizer_.*|data_.*|split|mock_data|tensorboard_.*|wandb_.*|"
    r"distributed_.*|num_workers|layernorm_epsilon|no_create_.*|make_vocab_size_divisible_by|use_mcore_models|use_flash_attn|"
    r"dist_ckpt_.*|manual_gc.*|timing_.*|exit_.*|moe_token_dispatcher_type|use_rotary_position_embeddings|async_save|"
    r"use_rope_scaling|rope_scaling_factor|apply_layernorm_1p|glu_linear_offset"
)
"""Arguments that change neither time nor memory, or that every plan is priced with."""
COUNTS = {
    "use_megatron_fsdp": False, "use_torch_fsdp2": False, "num_distributed_optimizer_instances": "1", "cpu_offloading": False,
    "fine_grained_activation_offloading": False, "overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False,
    "cuda_graph_impl": "none", "hybrid_layer_pattern": None, "moe_enable_deepep": False, "grad_reduce_in_bf16": False,
    "rampup_batch_size": None, "moe_expert_capacity_factor": None, "fp8_param_gather": False, "fp4_param_gather": False,
    "moe_shared_expert_overlap": False, "distribute_saved_activations": False, "spec": None, "yaml_cfg": None,
    "hierarchical_context_parallel_sizes": None, "encoder_num_layers_": None,
}  # fmt: skip
"""Arguments of a dump that change time or memory and that a plan does not hold, with the value at which they do not."""
NO_FUSION = "no_bias_dropout_fusion"
"""Experts with biases run without this fusion, whatever is said."""
MODULES = {name: module for module, name in core_settings.MODULES.items()}
CP_METHODS = {name: method for method, name in core_settings.CP_TYPES.items()} | {"allgather": CpMethod.ALLGATHER}
MOMENTS = {"bfloat16": "bf16", "uint8": "fp8"}
"""Types of moments as a dump prints them -> as flags say them."""


def read(path: Path, num_gpus: int | None = None) -> Reading:
    """The job in a file; the number of GPUs is taken from it where it says one. Raises PlannerError."""
    return parse(read_text(path), str(path), num_gpus)


def parse(text: str, where: str, num_gpus: int | None = None) -> Reading:
    """The job in a text. Raises PlannerError that names the file and the argument."""
    found, dumped = read_arguments(text, where)
    for name in SIZES:
        if found.get(name) is None:
            raise PlannerError(f"{where}: {_spelled(name, dumped)} is missing; without it there is no plan")
        most = MOST_LAYERS if name == "num_layers" else MOST
        whole_number(number(found, name, where), f"{where}: {_spelled(name, dumped)}", most=most)
    header = HEADER.search(text)
    model = known_model(_model(found, where), header.group(4) if header else "")
    gpus = number(found, "world_size", where) or (int(header.group(1)) if header else num_gpus)
    optimizer, layout = _optimizer(found), _layout(found, model, gpus, where)
    if dumped:
        unread = [f"{name} = {found[name]}" for name, quiet in COUNTS.items() if found.get(name, quiet) != quiet]
    else:
        unread = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in found.items()
            if name not in READ and not NEUTRAL.fullmatch(name) and not (name == NO_FUSION and model.expert_bias)
        ]
    return Reading(
        trainer=header.group(3) if header else "nemo" if found.get("tp_comm_overlap") else "megatron", model=model,
        sequence_length=sure(found, "seq_length", where), global_batch_size=sure(found, "global_batch_size", where),
        fields=layout, precision=_precision(found, where), optimizer=optimizer, num_gpus=gpus,
        hardware=header.group(2) if header else None, unread=tuple(unread),
    )  # fmt: skip


def _spelled(name: str, dumped: bool) -> str:
    return name if dumped else f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------------------------- model


def _model(found: Arguments, where: str) -> ModelSpec:
    heads, hidden = sure(found, "num_attention_heads", where), sure(found, "hidden_size", where)
    mla, experts = bool(found.get("multi_latent_attention")), sure(found, "num_experts", where)
    layers, gated = sure(found, "num_layers", where), bool(found.get("swiglu") or found.get("quick_geglu"))
    bias = not (found.get("disable_bias_linear") or found.get("add_bias_linear") is False)
    groups = sure(found, "num_query_groups", where, heads) if found.get("group_query_attention") else heads
    position = str(found.get("position_embedding_type", "learned_absolute"))
    clamped = found.get("activation_func_clamp_value") is not None
    reach = sure(found, "max_position_embeddings", where, sure(found, "seq_length", where))
    width = sure(found, "ffn_hidden_size", where, int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    shared = sure(found, "moe_shared_expert_intermediate_size", where)
    dense, interval = _moe_layers(found, layers, where) if experts else (0, 1)
    window, windowed = _window(found, layers, where)
    values: dict[str, Any] = {
        "name": "imported", "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": heads if mla else groups, "head_dim": sure(found, "kv_channels", where, hidden // heads),
        "ffn_size": width, "vocab_size": _vocabulary(found, where), "max_sequence_length": reach, "gated": gated,
        "activation": "silu" if found.get("swiglu") or clamped else "relu2" if found.get("squared_relu") else "gelu",
        "tied_embeddings": not found.get("untie_embeddings_and_output_weights"),
        "position": {"learned_absolute": "learned", "none": "none"}.get(position, "rope"),
        "num_position_embeddings": reach if position == "learned_absolute" else 0,
        "norm": "rmsnorm" if found.get("normalization") == "RMSNorm" else "layernorm", "linear_bias": bias,
        "qkv_bias": bool(found.get("add_qkv_bias")) and not bias, "qk_norm": bool(found.get("qk_layernorm")) and not mla,
        "num_experts": experts, "top_k": sure(found, "moe_router_topk", where, 2) if experts else 0,
        "expert_ffn_size": sure(found, "moe_ffn_hidden_size", where, width) if experts else 0,
        "num_shared_experts": int(bool(shared)), "shared_expert_ffn_size": shared if experts else 0,
        "num_dense_layers": dense, "moe_layer_interval": interval, "expert_bias": bool(experts) and bias,
        "router_bias": bool(experts) and bias, "window": window, "num_windowed_layers": windowed,
        "mtp_layers": sure(found, "mtp_num_layers", where), "clamped_activation": clamped,
        "scaled_rope": position == "yarn" and not mla,
    }  # fmt: skip
    if mla:
        nope, rope = sure(found, "qk_head_dim", where, 128), sure(found, "qk_pos_emb_head_dim", where, 64)
        values |= {
            "q_lora_rank": sure(found, "q_lora_rank", where), "kv_lora_rank": sure(found, "kv_lora_rank", where, 32),
            "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": sure(found, "v_head_dim", where, 128),
            "head_dim": nope + rope,
        }  # fmt: skip
    try:
        return ModelSpec(**values)
    except PlannerError as error:
        raise PlannerError(f"{where}: {error}") from error


def _vocabulary(found: Arguments, where: str) -> int:
    rows = number(found, "vocab_size", where) or number(found, "padded_vocab_size", where)
    if rows is None:
        raise PlannerError(
            f"{where}: neither --vocab-size nor --padded-vocab-size is given, and the tokenizer is not read"
        )
    return rows


def _flags(text: str, where: str, name: str) -> list[int]:
    """A pattern such as ([0]*3+[1]*58) as Megatron evaluates it, without evaluating code."""
    if not re.fullmatch(r"[\[\]()\d,*+ ]+", text):
        raise PlannerError(f"{where}: {name} is {shown(text)}; only lists of 0 and 1, * and + are understood")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if (
                isinstance(node.op, ast.Mult)
                and isinstance(left, list)
                and isinstance(right, int)
                and len(left) * right <= MOST_LAYERS
            ):
                return left * right
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
        if isinstance(node, ast.List):
            return [value(one) for one in node.elts]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise PlannerError(f"{where}: {name} is {shown(text)}; only lists of 0 and 1, * and + are understood")

    try:
        flags = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise PlannerError(f"{where}: {name} is {shown(text)}; it cannot be read") from error
    flat = flags if isinstance(flags, list) else [flags]
    return [whole_number(one, f"{where}: {name}", least=0) for one in flat]


def _listed(given: Any) -> str:
    """A pattern as text: a dump prints a list, which was read as one."""
    return f"[{', '.join(given)}]" if isinstance(given, list) else str(given)


def _moe_layers(found: Arguments, layers: int, where: str) -> tuple[int, int]:
    """(leading dense layers, every n-th layer has experts)."""
    given = found.get("moe_layer_freq", "1")
    flags = _flags(_listed(given), where, "moe_layer_freq")
    if len(flags) == 1 and flags[0]:
        return 0, flags[0]
    dense = flags.index(1) if 1 in flags else len(flags)
    for interval in range(1, dense + 2):
        first = dense - interval + 1
        if flags == [int(i >= first and (i - first) % interval == interval - 1) for i in range(layers)]:
            return first, interval
    raise PlannerError(
        f"{where}: moe_layer_freq is {shown(given)}; a plan knows leading dense layers and every n-th layer"
    )


def _window(found: Arguments, layers: int, where: str) -> tuple[int, int]:
    given = found.get("window_size")
    if given in (None, True):
        return 0, 0
    first = re.sub(r"[()\[\]' ]", "", ",".join(given) if isinstance(given, list) else str(given)).split(",")[0]
    size = whole_number(int(first) if re.fullmatch(r"\d{1,15}", first) else given, f"{where}: window_size", least=0)
    skip = found.get("window_attn_skip_freq")
    if skip is None:
        return size, layers
    flags = _flags(_listed(skip), where, "window_attn_skip_freq")
    if len(flags) == 1 and flags[0]:
        return size, sum((layer + 1) % flags[0] != 0 for layer in range(layers))
    return size, sum(flags)


# --------------------------------------------------------------------------------------------------------------- layout


def _layout(found: Arguments, model: ModelSpec, gpus: int | None, where: str) -> dict[str, int]:
    tp, pp, cp = (sure(found, f"{kind}_size", where, 1, least=1) for kind in
                  ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"))  # fmt: skip
    sharded = bool(found.get("use_distributed_optimizer") or found.get("use_layer_wise_distributed_optimizer"))
    method = found.get("cp_comm_type", ["p2p"])
    method = method[0] if isinstance(method, list) else str(method)
    if cp > 1 and method not in CP_METHODS:
        raise PlannerError(f"{where}: cp_comm_type is {shown(method)}; a plan knows {', '.join(CP_METHODS)}")
    layout = {
        "tp": tp, "pp": pp, "cp": cp, "micro_batch_size": sure(found, "micro_batch_size", where, 1, least=1),
        "sequence_parallel": int(bool(found.get("sequence_parallel")) and tp > 1), "zero": int(sharded),
        "cp_method": int(CP_METHODS[method]) if cp > 1 else 0,
        "order": int(Order.TP_CP_EP_PP_DP if found.get("use_tp_pp_dp_mapping") else Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if model.is_moe:
        layout["ep"] = sure(found, "expert_model_parallel_size", where, 1, least=1)
        layout["etp"] = sure(found, "expert_tensor_parallel_size", where, tp, least=1)
    layout |= _stages(found, model, pp, where)
    layout["schedule"] = int(Schedule.INTERLEAVED if layout["vpp"] > 1 else Schedule.ONE_F_ONE_B)
    layout |= _recompute(found, model, layout, where)
    if found.get("optimizer_cpu_offload"):
        share = found.get("optimizer_offload_fraction", 1.0)
        layout["offload_optimizer"] = percent(share, f"{where}: optimizer_offload_fraction")
    return layout


def _stages(found: Arguments, model: ModelSpec, pp: int, where: str) -> dict[str, int]:
    """vpp and the layers of the first and the last stage, from whichever of Megatron's forms is used."""
    if pp == 1:
        return {"vpp": 1, "first_stage_layers": 0, "last_stage_layers": 0}
    written = found.get("pipeline_model_parallel_layout")
    if isinstance(written, str):
        return _written_stages(written, model, pp, where)
    first = sure(found, "decoder_first_pipeline_num_layers", where)
    last = sure(found, "decoder_last_pipeline_num_layers", where)
    counted = model.num_layers
    for name, end in (("account_for_embedding_in_pipeline_split", 0), ("account_for_loss_in_pipeline_split", 1)):
        if found.get(name):
            counted += 1
            first, last = (-1, last) if end == 0 else (first, -1)
    share = counted // pp
    first, last = (share - 1 if one == -1 else one for one in (first, last))
    vpp = sure(found, "num_virtual_stages_per_pipeline_rank", where) or sure(
        found, "virtual_pipeline_model_parallel_size", where
    )
    each = sure(found, "num_layers_per_virtual_pipeline_stage", where)
    return {"vpp": vpp or (share // each if each else 1), "first_stage_layers": first, "last_stage_layers": last}


def _written_stages(text: str, model: ModelSpec, pp: int, where: str) -> dict[str, int]:
    flat = re.sub(
        r"\(([^()]*)\)\*(\d+)", lambda one: one.group(1) * min(int(one.group(2)), 4096), text.replace(",", "")
    )
    flat = re.sub(r"(.)\*(\d+)", lambda one: one.group(1) * min(int(one.group(2)), 4096), flat)
    if len(flat) > 4 * MOST_LAYERS:
        raise PlannerError(f"{where}: pipeline_model_parallel_layout {shown(text)} has more than {MOST_LAYERS} layers")
    chunks = [stage.count("t") for stage in flat.split("|")]
    if len(chunks) % pp or sum(chunks) != model.num_layers:
        raise PlannerError(
            f"{where}: pipeline_model_parallel_layout {shown(text)} has {len(chunks)} stages and {sum(chunks)} layers; the job has "
            f"{pp} pipeline ranks and {model.num_layers} layers"
        )
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    vpp = len(chunks) // pp
    if len(set(ranks[1:-1])) > 1:
        raise PlannerError(
            f"{where}: pipeline_model_parallel_layout {shown(text)} gives the stages {ranks} layers; a plan knows a first and last "
            "stage that differ, the ones between are equal"
        )
    even = len(set(ranks)) == 1
    return {"vpp": vpp, "first_stage_layers": 0 if even else ranks[0], "last_stage_layers": 0 if even else ranks[-1]}


def _recompute(found: Arguments, model: ModelSpec, layout: dict[str, int], where: str) -> dict[str, int]:
    mode = "selective" if found.get("recompute_activations") else found.get("recompute_granularity")
    if mode is None:
        return {"recompute": int(Recompute.NONE)}
    if mode == "selective":
        names = found.get("recompute_modules") or ["core_attn"]
        names = [names] if isinstance(names, str) else names
        wrong = [name for name in names if name not in MODULES]
        if wrong:
            raise PlannerError(f"{where}: recompute_modules has {', '.join(wrong)}; a plan knows {', '.join(MODULES)}")
        mask = 0
        for name in names:
            mask |= MODULES[name]
        return {"recompute": int(Recompute.SELECTIVE), "recompute_modules": mask}
    layers = sure(found, "recompute_num_layers", where) * layout["vpp"]
    most = -(-model.num_layers // layout["pp"])
    covered = found.get("recompute_method") == "block" and layers < max(most, layout["first_stage_layers"])
    return {"recompute": int(Recompute.FULL), "recompute_layers": layers if covered else 0}


def _optimizer(found: Arguments) -> str:
    name = str(found.get("optimizer", "adam")).removeprefix("dist_")
    moments = str(found.get("exp_avg_dtype", "fp32")) if found.get("use_precision_aware_optimizer") else "fp32"
    known = {pair: optimizer for optimizer, pair in core_settings.OPTIMIZERS.items()}
    return known.get((name, MOMENTS.get(moments, moments)), name)


def _precision(found: Arguments, where: str) -> str:
    if found.get("fp4"):
        return "nvfp4"
    if found.get("fp8"):
        recipe = str(found.get("fp8_recipe", "delayed"))
        known = {"delayed": "fp8", **{name: one for one, (_, name) in core_settings.RECIPES.items() if one != "nvfp4"}}
        if recipe not in known:
            raise PlannerError(f"{where}: fp8_recipe is {shown(recipe)}; a plan knows {', '.join(known)}")
        return known[recipe]
    return "fp16" if found.get("fp16") else "bf16" if found.get("bf16") else "fp32"

"""Reads Megatron-LM: an argument list, a mapping of arguments in YAML, or the dump of arguments in a training log."""

import re
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Order, Recompute, Schedule
from planner.model import ModelSpec
from planner.runs.job import chunk_layers
from planner.trainer_options import spell
from planner.trainers.megatron import core_settings
from planner.trainers.megatron.arguments import Arguments, read_arguments
from planner.trainers.reading.configuration import Reading, known_model
from planner.trainers.reading.given import Given
from planner.trainers.reading.values import MOST, MOST_LAYERS, percent, read_text, whole_number

HEADER = re.compile(r"# plan: (\d+) GPUs, hardware (\S+), trainer (\S+), model (\S+)")
"""What the export writes above its arguments."""
SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size",
)  # fmt: skip
NO_FUSION = "no_bias_dropout_fusion"
"""Experts with biases run without this fusion, whatever is said."""
MODULES = {name: module for module, name in core_settings.MODULES.items()}
CP_METHODS = {name: method for method, name in core_settings.CP_TYPES.items()} | {"allgather": CpMethod.ALLGATHER}
SHARDED = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What --data-parallel-sharding-strategy of Megatron-FSDP shards, as zero."""
STATE_TYPES = {"bfloat16": "bf16", "uint8": "fp8"}
"""Types of optimizer states as a dump prints them -> as flags say them."""


def read(path: Path, given: Given) -> Reading:
    """The job in a file; the number of GPUs is taken from it where it says one. Raises PlannerError."""
    return parse(read_text(path), str(path), given.num_gpus)


def parse(text: str, where: str, num_gpus: int | None = None) -> Reading:
    """The job in a text. Raises PlannerError that names the file and the argument."""
    found = read_arguments(text, where)
    for name in SIZES:
        if found.get(name) is None:
            raise PlannerError(f"{where}: {found.spelled(name)} is missing; without it there is no plan")
        found.number(name, least=1, most=MOST_LAYERS if name == "num_layers" else MOST)
    header = HEADER.search(text)
    model = known_model(_model(found), header.group(4) if header else "")
    gpus = found.number("world_size") or (int(header.group(1)) if header else num_gpus)
    optimizer, layout = _optimizer(found), _layout(found, model)
    return Reading(
        trainer=header.group(3) if header else _trainer(found), model=model,
        sequence_length=found.number("seq_length"), global_batch_size=found.number("global_batch_size"), fields=layout,
        precision=_precision(found), optimizer=optimizer, num_gpus=gpus, hardware=header.group(2) if header else None,
        unread=_unread(found, model),
    )  # fmt: skip


def _trainer(found: Arguments) -> str:
    """Trainer whose facts the arguments ask for, with its options."""
    flex = found.get("moe_token_dispatcher_type") == "flex"
    backend = found.get("moe_flex_dispatcher_backend") or "deepep"
    graphs = found.get("cuda_graph_impl") not in (None, "none")
    said = {
        "expert_dispatch": str(backend) if flex or found.get("moe_enable_deepep") else "",
        "expert_overlap": "on" if found.get("overlap_moe_expert_parallel_comm") else "",
        "fused_experts": "on" if found.get("use_transformer_engine_op_fuser") else "",
        "cuda_graphs": "layers" if graphs else "",
    }
    name, usual = ("nemo", "bf16") if found.get("tp_comm_overlap") else ("megatron", "fp32")
    name = "megatron-fsdp" if _zero(found) > 1 else name
    gradients = "bf16" if found.get("grad_reduce_in_bf16") else "fp32"
    return spell(name, {key: one for key, one in {**said, "gradient_dtype": gradients}.items() if one not in ("", usual)})


def _zero(found: Arguments) -> int:
    """State sharding: the distributed optimizer's, or what Megatron-FSDP shards, by default all."""
    if found.get("use_megatron_fsdp") or found.get("use_custom_fsdp"):
        return SHARDED.get(str(found.get("data_parallel_sharding_strategy", "optim_grads_params")), 0)
    return int(bool(found.get("use_distributed_optimizer") or found.get("use_layer_wise_distributed_optimizer")))


def _unread(found: Arguments, model: ModelSpec) -> tuple[str, ...]:
    """Arguments that a plan does not hold, with their values."""
    known = library.read_yaml(Path(__file__).with_name("known_arguments.yaml"))
    if found.dumped:
        quiet = known["counted"].items()
        return tuple(f"{name} = {found[name]}" for name, value in quiet if found.get(name, value) != value)
    neutral = [*known["neutral"].split(), *([NO_FUSION] if model.expert_bias else ())]
    expression = re.compile("|".join([*known["held"].split(), *neutral]))
    return tuple(
        found.spelled(name) + ("" if value is True else f" {value}")
        for name, value in found.items()
        if not expression.fullmatch(name)
    )


# ---------------------------------------------------------------------------------------------------------------- model


def _model(found: Arguments) -> ModelSpec:
    heads, hidden = found.number("num_attention_heads"), found.number("hidden_size")
    mla, experts = bool(found.get("multi_latent_attention")), found.number("num_experts")
    layers, gated = found.number("num_layers"), bool(found.get("swiglu") or found.get("quick_geglu"))
    bias = not (found.get("disable_bias_linear") or found.get("add_bias_linear") is False)
    groups = found.number("num_query_groups", heads) if found.get("group_query_attention") else heads
    position = str(found.get("position_embedding_type", "learned_absolute"))
    clamped = found.get("activation_func_clamp_value") is not None
    reach = found.number("max_position_embeddings", found.number("seq_length"))
    width = found.number("ffn_hidden_size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    shared = found.number("moe_shared_expert_intermediate_size")
    dense, interval = _moe_layers(found, layers) if experts else (0, 1)
    window, windowed = _window(found, layers)
    rows = found.number("vocab_size") or found.number("padded_vocab_size")
    if not rows:
        raise PlannerError(
            f"{found.where}: neither --vocab-size nor --padded-vocab-size is given, and the tokenizer is not read"
        )
    values: dict[str, Any] = {
        "name": "imported", "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": heads if mla else groups, "head_dim": found.number("kv_channels", hidden // heads),
        "ffn_size": width, "vocab_size": rows, "max_sequence_length": reach, "gated": gated,
        "activation": "silu" if found.get("swiglu") or clamped else "relu2" if found.get("squared_relu") else "gelu",
        "tied_embeddings": not found.get("untie_embeddings_and_output_weights"),
        "position": {"learned_absolute": "learned", "none": "none"}.get(position, "rope"),
        "num_position_embeddings": reach if position == "learned_absolute" else 0,
        "norm": "rmsnorm" if found.get("normalization") == "RMSNorm" else "layernorm", "linear_bias": bias,
        "qkv_bias": bool(found.get("add_qkv_bias")) and not bias, "qk_norm": bool(found.get("qk_layernorm")) and not mla,
        "num_experts": experts, "top_k": found.number("moe_router_topk", 2) if experts else 0,
        "expert_ffn_size": found.number("moe_ffn_hidden_size", width) if experts else 0,
        "num_shared_experts": int(bool(shared)), "shared_expert_ffn_size": shared if experts else 0,
        "num_dense_layers": dense, "moe_layer_interval": interval, "expert_bias": bool(experts) and bias,
        "router_bias": bool(experts) and bias, "window": window, "num_windowed_layers": windowed,
        "mtp_layers": found.number("mtp_num_layers"), "clamped_activation": clamped,
        "scaled_rope": position == "yarn" and not mla, "attention_sinks": found.get("softmax_type") == "learnable",
    }  # fmt: skip
    if mla:
        nope, rope = found.number("qk_head_dim", 128), found.number("qk_pos_emb_head_dim", 64)
        values |= {
            "q_lora_rank": found.number("q_lora_rank"), "kv_lora_rank": found.number("kv_lora_rank", 32),
            "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": found.number("v_head_dim", 128),
            "head_dim": nope + rope,
        }  # fmt: skip
    try:
        return ModelSpec(**values)
    except PlannerError as error:
        raise PlannerError(f"{found.where}: {error}") from error


def _pattern(found: Arguments, name: str) -> list[int]:
    """A number, or a pattern such as ([0]*3+[1]*58), evaluated without running code; a dump prints a list."""
    given = found.get(name, "1")
    text = re.sub(r"\s", "", f"[{','.join(given)}]" if isinstance(given, list) else str(given))

    def repeat(one: re.Match[str]) -> str:
        return ",".join([one.group(1)] * int(one.group(2) or 1))

    while len(text) <= 8 * MOST_LAYERS:
        text, before = re.sub(r"[\[(]([\d,+]+)[\])](?:\*(\d{1,4})(?!\d))?", repeat, text, count=1), text
        if text == before:
            break
    if not re.fullmatch(r"\d{1,8}([,+]\d{1,8})*", text) or len(text) > 8 * MOST_LAYERS:
        raise PlannerError(f"{found.where}: {name} is {shown(given)}; only lists of 0 and 1, * and + are understood")
    return [int(flag) for flag in re.split("[,+]", text)]


def _moe_layers(found: Arguments, layers: int) -> tuple[int, int]:
    """(leading dense layers, every n-th layer has experts)."""
    flags = _pattern(found, "moe_layer_freq")
    if len(flags) == 1 and flags[0]:
        return 0, flags[0]
    dense = flags.index(1) if 1 in flags else len(flags)
    for interval in range(1, dense + 2):
        first = dense - interval + 1
        if flags == [int(i >= first and (i - first) % interval == interval - 1) for i in range(layers)]:
            return first, interval
    given = shown(found["moe_layer_freq"])
    raise PlannerError(
        f"{found.where}: moe_layer_freq is {given}; a plan knows leading dense layers and every n-th layer"
    )


def _window(found: Arguments, layers: int) -> tuple[int, int]:
    """(tokens, layers that have it)."""
    given = found.get("window_size")
    if given in (None, True):
        return 0, 0
    first = re.match(r"\W*(\d{1,15})\b(?!\.)", ",".join(given) if isinstance(given, list) else str(given))
    size = whole_number(int(first.group(1)) if first else given, f"{found.where}: window_size", least=0)
    if found.get("window_attn_skip_freq") is None:
        return size, layers
    flags = _pattern(found, "window_attn_skip_freq")
    if len(flags) == 1 and flags[0]:
        return size, sum((layer + 1) % flags[0] != 0 for layer in range(layers))
    return size, sum(flags)


# --------------------------------------------------------------------------------------------------------------- layout


def _layout(found: Arguments, model: ModelSpec) -> dict[str, int]:
    tp, pp, cp = (found.number(f"{kind}_size", 1, least=1) for kind in
                  ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"))  # fmt: skip
    method = found.get("cp_comm_type", ["p2p"])
    method = method[0] if isinstance(method, list) else str(method)
    if cp > 1 and method not in CP_METHODS:
        raise PlannerError(f"{found.where}: cp_comm_type is {shown(method)}; a plan knows {', '.join(CP_METHODS)}")
    layout = {
        "tp": tp, "pp": pp, "cp": cp, "micro_batch_size": found.number("micro_batch_size", 1, least=1),
        "sequence_parallel": int(bool(found.get("sequence_parallel")) and tp > 1), "zero": _zero(found),
        "cp_method": int(CP_METHODS[method]) if cp > 1 else 0,
        "order": int(Order.TP_CP_EP_PP_DP if found.get("use_tp_pp_dp_mapping") else Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if model.is_moe:
        layout["ep"] = found.number("expert_model_parallel_size", 1, least=1)
        layout["etp"] = found.number("expert_tensor_parallel_size", tp, least=1)
    layout |= _stages(found, model, pp)
    layout["schedule"] = int(Schedule.INTERLEAVED if layout["vpp"] > 1 else Schedule.ONE_F_ONE_B)
    layout |= _recompute(found, model, layout)
    if found.get("optimizer_cpu_offload"):
        share = found.get("optimizer_offload_fraction", 1.0)
        layout["offload_optimizer"] = percent(share, f"{found.where}: optimizer_offload_fraction")
    if some := found.number("cpu_offloading_num_layers"):
        layout |= {"offload_activations": 1, "offload_layers": some}
    return layout


def _stages(found: Arguments, model: ModelSpec, pp: int) -> dict[str, int]:
    """vpp and the layers of the first and the last stage, from whichever of Megatron's forms is used."""
    if pp == 1:
        return {"vpp": 1, "first_stage_layers": 0, "last_stage_layers": 0}
    written = found.get("pipeline_model_parallel_layout")
    if isinstance(written, str):
        return _written_stages(written, model, pp, f"{found.where}: pipeline_model_parallel_layout {shown(written)}")
    embedding, loss = (bool(found.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    share = (model.num_layers + embedding + loss) // pp
    first = share - 1 if embedding else found.number("decoder_first_pipeline_num_layers")
    last = share - 1 if loss else found.number("decoder_last_pipeline_num_layers")
    vpp = found.number("num_virtual_stages_per_pipeline_rank") or found.number("virtual_pipeline_model_parallel_size")
    each = found.number("num_layers_per_virtual_pipeline_stage")
    return {"vpp": vpp or (share // each if each else 1), "first_stage_layers": first, "last_stage_layers": last}


def _written_stages(text: str, model: ModelSpec, pp: int, where: str) -> dict[str, int]:
    chunks = chunk_layers(text)
    if len(chunks) % pp or sum(chunks) != model.num_layers:
        raise PlannerError(
            f"{where} has {len(chunks)} stages and {sum(chunks)} layers; the job has {pp} pipeline ranks and "
            f"{model.num_layers} layers"
        )
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    if len(set(ranks[1:-1])) > 1:
        raise PlannerError(
            f"{where} gives the stages {ranks} layers; a plan knows a first and last stage that differ, the ones between are equal"
        )
    even = len(set(ranks)) == 1
    first, last = (0, 0) if even else (ranks[0], ranks[-1])
    return {"vpp": len(chunks) // pp, "first_stage_layers": first, "last_stage_layers": last}


def _recompute(found: Arguments, model: ModelSpec, layout: dict[str, int]) -> dict[str, int]:
    mode = "selective" if found.get("recompute_activations") else found.get("recompute_granularity")
    if mode is None:
        return {"recompute": int(Recompute.NONE)}
    if mode == "selective":
        names = found.get("recompute_modules") or ["core_attn"]
        names = [names] if isinstance(names, str) else names
        wrong = [name for name in names if name not in MODULES]
        if wrong:
            raise PlannerError(f"{found.where}: recompute_modules has {', '.join(wrong)}; a plan knows {', '.join(MODULES)}")
        mask = 0
        for name in names:
            mask |= MODULES[name]
        return {"recompute": int(Recompute.SELECTIVE), "recompute_modules": mask}
    layers = found.number("recompute_num_layers") * layout["vpp"]
    most = -(-model.num_layers // layout["pp"])
    covered = found.get("recompute_method") == "block" and layers < max(most, layout["first_stage_layers"])
    return {"recompute": int(Recompute.FULL), "recompute_layers": layers if covered else 0}


def _optimizer(found: Arguments) -> str:
    name = str(found.get("optimizer", "adam")).removeprefix("dist_")
    states = str(found.get("exp_avg_dtype", "fp32")) if found.get("use_precision_aware_optimizer") else "fp32"
    known = {pair: optimizer for optimizer, pair in core_settings.OPTIMIZERS.items()}
    return known.get((name, STATE_TYPES.get(states, states)), name)


def _precision(found: Arguments) -> str:
    if found.get("fp4"):
        return "nvfp4"
    if found.get("fp8"):
        recipe = str(found.get("fp8_recipe", "delayed"))
        known = {"delayed": "fp8", **{name: one for one, (_, name) in core_settings.RECIPES.items() if one != "nvfp4"}}
        if recipe not in known:
            raise PlannerError(f"{found.where}: fp8_recipe is {shown(recipe)}; a plan knows {', '.join(known)}")
        return known[recipe]
    return "fp16" if found.get("fp16") else "bf16" if found.get("bf16") else "fp32"

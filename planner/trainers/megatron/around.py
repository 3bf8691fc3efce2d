"""What the Megatron around a script takes where the script does not say it: defaults that forks and older versions have."""

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.megatron.arguments import RENAMED, Arguments
from planner.trainers.megatron.trainer_words import FLASH, OLD, has_fsdp
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import project_root

PLACES = ("arguments.py", "training/arguments.py")
"""Of the argument parser in the package of Megatron."""
USUAL = {
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "optimizer": "adam", "num_query_groups": 1, "recompute_num_layers": 1,
    "position_embedding_type": "learned_absolute", "normalization": "layernorm",
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "micro_batch_size": None,
    "expert_model_parallel_size": 1, "moe_layer_freq": 1, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128, "fp8_recipe": "delayed", "main_grads_dtype": "fp32", "main_params_dtype": "fp32", "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32", "context_parallel_algo": None, "num_layers": None, "hidden_size": None,
    "num_attention_heads": None, "ffn_hidden_size": None, "kv_channels": None, "seq_length": None, "global_batch_size": None,
    "max_position_embeddings": None, "recompute_granularity": None, "recompute_method": None, "bf16": False, "fp16": False,
    "swiglu": False, "sequence_parallel": False, "use_distributed_optimizer": False, "overlap_grad_reduce": False,
    "untie_embeddings_and_output_weights": False, "group_query_attention": False, "use_rotary_position_embeddings": False,
    "use_flash_attn": False, "add_qkv_bias": False, "qk_layernorm": False, "use_precision_aware_optimizer": False,
    "accumulate_allreduce_grads_in_fp32": False,
}  # fmt: skip
"""Arguments that are taken from there -> what this reader assumes without them; None = nothing."""
OF_EXPERTS = {"moe_router_topk": 2}
"""Those of models with experts."""
OF_FSDP = {"data_parallel_sharding_strategy": None}
"""Those of Megatron-FSDP."""


@lru_cache(maxsize=8)
def _parser(text: str) -> dict[str, Any]:
    """Argument -> its default, where that is written as a constant; {} for what is no Python."""
    try:
        tree = library.parse_python(text, "arguments.py")
    except PlannerError:
        return {}
    found: dict[str, Any] = {}
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        names = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        words = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
        if words.get("action") == "store_false":
            continue
        for name in (one for one in names if one.startswith("--")):
            plain = name.lstrip("-").replace("-", "_")
            found.setdefault(RENAMED.get(plain, plain), words.get("default"))
    return found


def parser_around(where: str) -> Path | None:
    """The module of arguments of the Megatron that lies around a file, or of the one copy of it in the project."""
    folders = [one / "megatron" for one in Path(where).resolve().parents[:8]]
    copies = sorted(project_root(Path(where)).glob("*[Mm]egatron*/megatron"))
    folders += copies if len(copies) == 1 else []
    return next((one / name for one in folders for name in PLACES if (one / name).is_file()), None)


def defaults_around(where: str) -> dict[str, Any]:
    """Defaults of the argument parser that lies around a file; {} without one."""
    file = parser_around(where)
    return {} if file is None else _parser(read_text(file))


def take_defaults(found: Arguments) -> None:
    """Takes the defaults of the Megatron around a script where they differ from what is assumed, each with a note."""
    there = {} if found.dumped else defaults_around(found.where)
    if not there:
        _take_age(found)
        return
    usual = USUAL | (OF_EXPERTS if found.get("num_experts") not in (None, "0", "1") else {})
    usual |= OF_FSDP if has_fsdp(found) else {}
    if found.get("position_embedding_type") or found.get("use_rotary_position_embeddings"):
        usual = {name: value for name, value in usual.items() if "position_embedding" not in name}
    both = {"bf16", "fp16"} & found.keys()
    for name, value in usual.items():
        if name not in there or name in found or (both and name in ("bf16", "fp16")):
            continue
        default = there[name]
        if default is None or default is False or str(default).lower() == str(value) or (value is None and not default):
            continue
        found[name] = default if default is True else str(default)
        found.notes.append(f"{found.spelled(name)} {default} by default in the Megatron around it")
    if there.get("transformer_impl") == "local":
        take_own_layers(found, "the Megatron around it has its own layers by default, which keep scores without --use-flash-attn")


def _take_age(found: Arguments) -> None:
    """Takes the layers of the Megatron that had an argument; what is older still is a trainer of its own."""
    word = next((one for one in UNTIL_2023 if one in found), None)
    other = ("deepspeed", "use_mcore_models", *OLD)
    if word is not None and not found.dumped and not any(found.get(one) for one in other):
        why = f"{found.spelled(word)} is of Megatron-LM until 2023, with its own layers, which keep scores without --use-flash-attn"
        take_own_layers(found, why)
    young = any(SINCE_2024.fullmatch(one) for one in found) or found.get("tokenizer_type") == "HuggingFaceTokenizer"
    whole = not any(found.get(one) for one in (*other, *FLASH, "recompute_granularity", "recompute_activations"))
    if word is None and whole and not (young or found.dumped) and re.fullmatch(r"(\S*/)?pretrain_gpt\.py", found.program):
        found.notes.append(
            "attention keeps no scores: Transformer Engine's, Megatron-LM's default since April 2024; --set transformer_impl=local "
            "imports the job with the layers before, which keep them"
        )


SINCE_2024 = re.compile(
    r"transformer_impl|attention_backend|use_(mcore|legacy)_models|fp8.*|tp_comm_.*|c(p_comm_type|ontext_parallel_size)|moe_.*|ckpt_.*|ddp_.*"
    r"|(use_)?dist_ckpt.*|.*_ckpt_format|cross_entropy_.*|.*cuda_graph.*|multi_latent.*|qk_layernorm|grad_reduce_in_bf16|.*fsdp.*"
    r"|decoder_.*|account_for_.*|calculate_per_.*|.*precision_aware.*|.*_gloo_.*|rope_scaling.*|use_rope_.*|enable_.*|async_save|mock_data"
)
"""Arguments that Megatron-LM has since then, or that its other layers alone take."""
UNTIL_2023 = ("data_impl", "no_contiguous_buffers_in_local_ddp")
"""Arguments that Megatron-LM had until 2023; Transformer Engine is its default since April 2024.  [megatron/arguments.py]"""


def take_own_layers(found: Arguments, why: str) -> None:
    """Layers of Megatron that are not Transformer Engine's, where the script does not say which and has no flash attention."""
    if "transformer_impl" not in found and not any(found.get(one) for one in ("attention_backend", *FLASH)):
        found["attention_backend"] = "unfused"
        found.notes.append(f"attention unfused: {why}")

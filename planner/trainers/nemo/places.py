"""What NeMo 2 calls things -> settings as recipes of Megatron-Bridge call them, which is where NeMo's went."""

import re
from collections.abc import Mapping
from typing import Any

from planner.model_names import preset_of

PLACES = (
    (r"(trainer\.)?strategy\.(?P<name>\w+_parallel_size|sequence_parallel|num_layers_in_\w+_pipeline_stage"
     r"|account_for_\w+_in_pipeline_split|pipeline_model_parallel_layout|hierarchical_context_parallel_sizes)", "model.{name}"),
    (r"(trainer\.)?strategy\.(?P<name>use_tp_pp_dp_mapping)", "dist.{name}"),
    (r"(trainer\.)?strategy\.(?P<name>num_distributed_optimizer_instances)", "ddp.{name}"),
    (r"(trainer\.)?num_nodes", "nodes"), (r"(trainer\.)?devices", "devices"),
    (r"data\.(?P<name>global_batch_size|micro_batch_size)", "train.{name}"), (r"data\.seq_length", "dataset.seq_length"),
    (r"data\.(?P<name>rampup_batch_size)", "train.{name}"),
    (r"data\.(packed_sequence_specs\.)?packed_sequence_size", "dataset.packed_sequence_size"),
    (r"model\.config\.(?P<name>\w+)", "model.{name}"),
    (r"trainer\.(?P<name>precision)", "plugin.{name}"), (r"(trainer\.)?plugins\.(?P<name>\w+)", "plugin.{name}"),
    (r"(trainer\.)?strategy\.ddp\.(?P<name>(?!use_distributed_optimizer$)\w+)", "ddp.{name}"),
    (r"(trainer\.)?strategy\.fsdp", "strategy.fsdp"),
    (r"optim\.config\.(?P<name>use_distributed_optimizer)", "ddp.{name}"), (r"optim\.config\.(?P<name>\w+)", "optimizer.{name}"),
    (r"(?P<name>comm_overlap\.tp_comm_overlap)", "{name}"), (r"(?P<name>peft|peft\.(dim|target_modules|dropout))", "{name}"),
)  # fmt: skip
"""Places below a recipe, and the settings that they are. Of the distributed optimizer that of optim counts.
[lightning/pytorch/strategies/megatron_strategy.py: Fixing mis-match]"""
NAMES = (
    (r"[-_](4k|8k|16k|32k|64k|128k|256k|instruct)(?=[-_]|$)", ""), (r"^llama(\d)(\d)_nemotron.*", ""),
    (r"^llama4_e16$", "llama-4-scout"),
    (r"^llama4_e128$", "llama-4-maverick"), (r"^llama(\d)(\d)_", r"llama-\1.\2-"), (r"^llama(\d)_", r"llama-\1-"),
    (r"^qwen25_", "qwen2.5-"), (r"500m$", "0.5b"), (r"600m$", "0.6b"), (r"(\d)p(\d)b", r"\1.\2b"), (r"^gemma(\d)_", r"gemma-\1-"),
    (r"^nemotron(\d)_", r"nemotron-\1-"), (r"^nemotronh_", "nemotron-h-"), (r"^phi(\d)_", r"phi-\1-"), (r"_", "-"),
)  # fmt: skip
"""A recipe's name -> the model's."""


def setting_of(place: str) -> str | None:
    """The setting that a place below a recipe is; None = nothing that a plan knows."""
    for expression, name in PLACES:
        if (found := re.fullmatch(expression, place)) is not None:
            return name.format(**found.groupdict())
    return None


def preset_of_recipe(name: str) -> str | None:
    """The preset of a recipe's model, like llama31_8b_16k."""
    for expression, to in NAMES:
        name = re.sub(expression, to, name)
    return preset_of(name)


def preset_of_class(name: str) -> str | None:
    """The preset of a class like Llama31Config8B or MixtralConfig8x7B."""
    family, config, size = name.partition("Config")
    called = f"{family}_{size}".strip("_").lower().replace("gpt_", "gpt3_").replace("deepseekv", "deepseek_v")
    return preset_of_recipe(called) if config else None


def with_precision(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the plugin of mixed precision as one word; gradients are reduced in fp32 unless it says no."""
    plugin = {name.removeprefix("plugin."): value for name, value in settings.items() if name.startswith("plugin.")}
    found = {name: value for name, value in settings.items() if not name.startswith("plugin.")}
    if plugin.keys() - {"grad_reduce_in_fp32"} or (plugin and "mixed_precision" not in found):
        fp8 = plugin.get("fp8") not in (None, "", False)
        recipe = str(plugin.get("fp8_recipe", "delayed"))
        half = "fp16" if str(plugin.get("precision", "bf16-mixed")) in ("16", "16-mixed", "fp16") else "bf16"
        found["mixed_precision"] = "nvfp4" if plugin.get("fp4") else f"fp8_{recipe}" if fp8 else half
        found["mixed_precision"] = "mxfp8" if found["mixed_precision"] == "fp8_mxfp8" else found["mixed_precision"]
        own = next((plugin[one] for one in ("fp8_param_gather", "fp8_params") if one in plugin), False)
        found["mixed_precision.fp8_param_gather"] = own
        found |= {f"mixed_precision.{one}": plugin[one] for one in ATTENTION if one in plugin}
    if plugin or "mixed_precision" in found:  # its fields go over those of the buffers of gradients
        found["ddp.grad_reduce_in_fp32"] = plugin.get("grad_reduce_in_fp32", "fp16" not in str(found.get("mixed_precision")))
    return found


ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")


def taken(places: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe whose arguments stand at these places."""
    return {name: value for place, value in places.items() if (name := setting_of(place)) is not None}

"""Options of accelerate launch over the file that they stand beside: both become one mapping in the words of that file."""

import re
from collections.abc import Mapping
from typing import Any

from planner.trainers.reading.settings import parsed

SECTIONS = {
    "fsdp_config": r"fsdp_\w+", "megatron_lm_config": r"megatron_lm_\w+", "parallelism_config": r"parallelism_config_\w+",
    "dynamo_config": r"dynamo_\w+", "fp8_config": r"fp8_\w+",
    "deepspeed_config": r"zero_stage|zero3_\w+|offload_(optimizer|param)_\w+|gradient_(accumulation_steps|clipping)|deepspeed_\w+",
}  # fmt: skip
"""Section of the file -> its options.  [accelerate, commands/launch.py: _validate_launch_command]"""
KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU", "tpu": "TPU"}
"""Switches that go before distributed_type of the file."""
TOP = ("mixed_precision", "num_processes", "num_machines", "gpu_ids")


def overlaid(data: Mapping[str, Any], options: Mapping[str, list[str]]) -> dict[str, Any]:
    """The mapping of a file with the options of a command over it; without one of KINDS its own distributed_type stays."""
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for name, values in options.items():
        value = parsed(values[0]) if values else True
        section = next((one for one, names in SECTIONS.items() if re.fullmatch(names, name)), None)
        if section is not None:
            part = found.setdefault(section, {})
            if isinstance(part, dict):
                part.pop(name.removeprefix("fsdp_") if section == "fsdp_config" else name, None)
                part[name] = value
        elif name in TOP:
            found[name] = value
    kind = next((kind for name, kind in KINDS.items() if name in options), None)
    if kind is not None:
        found["distributed_type"] = kind
    return {**found, "cpu": True} if "cpu" in options else found

"""Python programs that build nanotron's configuration, to write it as YAML or to train with it: read as that YAML."""

import ast
import re
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.given import Given
from planner.trainers.reading.python_text import last_name

WHOLE = re.compile(r"\w*Config")
"""The class of a configuration, nanotron's own or one that extends it."""
IN_ORDER = {
    "ParallelismArgs": ("dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication"),
    "TokensArgs": ("sequence_length", "train_steps", "micro_batch_size", "batch_accumulation_per_replica"),
    "ModelArgs": ("model_config", "init_method", "dtype"),
    "OptimizerArgs": ("optimizer_factory", "zero_stage", "weight_decay", "clip_grad", "accumulate_grad_in_fp32"),
}  # fmt: skip
"""Fields of the classes that are built without their names.  [config/config.py, config/parallelism_config.py]"""
SAYS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"is_llama_config": True}, "Qwen2Config": {"is_qwen2_config": True},
    "Starcoder2Config": {"is_starcoder2_config": True}, "MambaModelConfig": {"is_mamba_config": True},
    "LlaMoEConfig": {"is_llamoe_config": True}, "MistralConfig": {"is_mistral_config": True},
    "AdamWOptimizerArgs": {"name": "adamW"}, "SGDOptimizerArgs": {"name": "sgd"},
}  # fmt: skip
"""What the class of a part says by itself."""
ENGINES = {"OneForwardOneBackwardPipelineEngine": "1f1b", "AllForwardAllBackwardPipelineEngine": "afab"}
SECTIONS = ("parallelism", "tokens", "model", "optimizer", "data_stages")
DEEPEST = 8


def data_of(path: Path, said: Given) -> dict[str, Any]:
    """The mapping that the configuration of a program is written as; what its text does not say is a text with a gap. Raises
    PlannerError where it builds none, or several."""
    script = Parts(path, said)
    every = [one for one in script.every_call() if WHOLE.fullmatch(last_name(one.func))
             and {"parallelism", "tokens"} <= {word.arg for word in one.keywords}]  # fmt: skip
    if len(every) != 1:
        what = f"{len(every)} configurations of nanotron" if every else "no Config(parallelism=..., tokens=...)"
        raise PlannerError(f"{path}: {what} in this program, of which one is read; import the YAML that it writes")
    found = {name: value for name, value in _part(script, every[0], 0).items() if name in SECTIONS}
    for place, value in script.places().items():
        parts = place.split(".")
        section: Any = found
        for part in parts[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if parts[0] in SECTIONS and len(parts) > 1 and isinstance(section, dict):
            section[parts[-1]] = value
    return found


def _part(script: Parts, call: ast.Call, depth: int) -> dict[str, Any]:
    """The fields of a part, with those that are parts themselves."""
    name = last_name(call.func)
    positions = dict(zip(IN_ORDER.get(name, ()), call.args, strict=False))
    words = {**positions, **{one.arg: one.value for one in call.keywords if one.arg}}
    named: dict[str, Any] = {"name": name} if name.endswith("OptimizerArgs") and name != "OptimizerArgs" else {}
    return {**named, **SAYS.get(name, {}), **{key: _field(script, node, depth + 1) for key, node in words.items()}}


def _field(script: Parts, node: ast.expr, depth: int) -> Any:
    made = script.made(node)
    if isinstance(made, ast.List) and depth < DEEPEST:
        return [_field(script, one, depth + 1) for one in made.elts]
    if isinstance(made, ast.Call) and depth < DEEPEST and re.search("Args$|Config$|Init$", last_name(made.func)):
        return _part(script, made, depth)
    if isinstance(made, ast.Call) and last_name(made.func) in ENGINES:
        return ENGINES[last_name(made.func)]
    if isinstance(made, ast.Attribute) and last_name(made.value) in ("TensorParallelLinearMode", "RecomputeGranularity", "torch"):
        return made.attr
    return script.value(node)

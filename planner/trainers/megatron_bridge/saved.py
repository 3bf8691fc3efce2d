"""A configuration that Megatron-Bridge saved with a checkpoint (run_config.yaml): all sections of its ConfigContainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.megatron_bridge.recipes import DECISIVE

TARGET = "_target_"
SECTIONS = ("model", "train", "dataset", "ddp", "dist", "optimizer", "comm_overlap")


def is_saved(data: Mapping[str, Any]) -> bool:
    """Whether the file is one that Megatron-Bridge wrote."""
    return str(data.get(TARGET, "")).endswith(".ConfigContainer")


def settings(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Its settings by the dotted names of recipes. Raises PlannerError for one that holds no training."""
    if not isinstance(data.get("train"), Mapping) or not isinstance(data.get("model"), Mapping):
        raise PlannerError(f"{path}: its section train or model is empty: it was saved where weights were converted, not trained")
    found: dict[str, Any] = {}
    for section in SECTIONS:
        part = data.get(section)
        for name, value in part.items() if isinstance(part, Mapping) else ():
            place = f"{section}.{str(name).replace('sequence_length', 'seq_length')}"
            if place in DECISIVE and value is not None:
                found[place] = _value(value)
    hub = data["model"].get("hf_model_id")
    found["model.hf"] = str(hub) if hub else ""
    return {**found, **_precision(data), **_adapters(data.get("peft"))}


def whole(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a YAML says of precision and adapters as a whole, over those of a recipe."""
    found: dict[str, Any] = {}
    mixed = data.get("mixed_precision")
    if isinstance(mixed, Mapping):
        names = ("fp8", "fp16", "bf16")
        found |= {"mixed_precision": "fp16_mixed" if mixed.get("fp16") else "bf16_mixed"} if mixed.keys() & set(names) else {}
        found |= {f"mixed_precision.{name}": _value(value) for name, value in mixed.items() if name != TARGET}
    elif "mixed_precision" in data:
        found["mixed_precision"] = mixed
    adapters = data.get("peft")
    if isinstance(adapters, Mapping) and TARGET in adapters:
        found |= _adapters(adapters)
    elif "peft" in data and not isinstance(adapters, Mapping):
        found["peft"] = adapters
    return found


def _value(value: Any) -> Any:
    """What a reference to Python stands for, by its last name: torch.float32 is float32."""
    if isinstance(value, Mapping) and TARGET in value:
        return str(value[TARGET]).rpartition(".")[2]
    return value


def _precision(data: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe by its name, or by what it switches on; without one that of the model, whose gradients are not added up in fp32
    by themselves."""
    given = data.get("mixed_precision")
    if given:
        return whole({"mixed_precision": given})
    return {"mixed_precision": None, "ddp.grad_reduce_in_fp32": bool((data.get("ddp") or {}).get("grad_reduce_in_fp32", False)),
            "model.fp16": bool(data["model"].get("fp16"))}  # fmt: skip


def _adapters(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {}
    inner = {f"peft.{one}": given[one] for one in ("dim", "target_modules") if given.get(one) is not None}
    return {"peft": str(given.get(TARGET, "lora")).rpartition(".")[2].lower(), **inner}

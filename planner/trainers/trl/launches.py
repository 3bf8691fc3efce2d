"""How ``trl sft`` and ``trl dpo`` start processes: options of accelerate launch among those of the training, since TRL 0.18."""

from pathlib import Path
from typing import Any

from planner.trainers.reading.accelerate_file import accelerate, of_accelerate
from planner.trainers.reading.given import Given
from planner.trainers.reading.launch_options import overlaid
from planner.trainers.reading.settings import beside
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.shell.text import is_open

OWN: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)},
    **{f"fsdp{version}": {"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_version": version, "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}} for version in (1, 2)},
    "multi_gpu": {"distributed_type": "MULTI_GPU"}, "single_gpu": {"distributed_type": "NO"},
}  # fmt: skip
"""Configurations of accelerate that TRL has by name, each of 8 processes in bf16.  [trl/accelerate_configs]"""
COUNTS = ("num_processes", "num_machines")


def of_options(path: Path, data: dict[str, Any], said: Given) -> Sharding | None:
    """What arguments of a training say to accelerate, which are taken out of them; None = nothing.
    [trl/cli/accelerate_config.py]"""
    counts = {name: [str(data.pop(name))] for name in COUNTS if data.get(name) is not None and not is_open(str(data[name]))}
    if (name := data.pop("accelerate_config", None)) is None:
        several = counts.get("num_processes", ["1"]) != ["1"]
        plain = {"distributed_type": "MULTI_GPU" if several else "NO", "mixed_precision": None}
        return of_accelerate(path, overlaid(plain, counts), said) if counts and "accelerate" not in data else None
    if "accelerate" in data:  # the user says another one
        return None
    if (file := beside(path, str(name))) is not None:
        return accelerate(file, counts, said)
    if (own := OWN.get(str(name))) is None:
        data["accelerate"] = name  # asked for
        return None
    return of_accelerate(path, overlaid({"mixed_precision": "bf16", "num_processes": 8, **own}, counts), said)

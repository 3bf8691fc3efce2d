"""How ``trl sft`` and ``trl dpo`` start processes since TRL 0.18, by options of accelerate launch among those of the training; and
what TRL's program took before it had those of transformers."""

from pathlib import Path
from typing import Any

from planner.trainers.reading.accelerate_file import accelerate, of_accelerate
from planner.trainers.reading.given import Given
from planner.trainers.reading.launch_options import overlaid
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings, beside
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.shell.text import is_open
from planner.trainers.reading.training_arguments import BATCHES, LENGTHS, OLD_TRL, STEPS, Habits

OWN: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}} for stage in (1, 2, 3)},
    **{f"fsdp{version}": {"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_version": version, "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}} for version in (1, 2)},
    "multi_gpu": {"distributed_type": "MULTI_GPU"}, "single_gpu": {"distributed_type": "NO"},
}  # fmt: skip
"""Configurations of accelerate that TRL has by name, each of 8 processes in bf16.  [trl/accelerate_configs]"""
COUNTS = ("num_processes", "num_machines")
OLD = {"batch_size": (BATCHES[0], 64), "seq_length": (LENGTHS[0], 512), "peft_lora_r": ("lora_r", 64)}
"""Options of TRL's sft.py until 0.7 and their defaults.  [examples/scripts/sft.py]"""


def of_old_program(given: Settings, program: str) -> Habits | None:
    """Puts what that program takes into the settings of its command; None = it is another one."""
    data = dict(given.data)
    named = program_file(given.path, program) is None and program.rpartition("/")[2] in ("sft.py", "sft_trainer.py")
    if not named or "model_name" not in data or not OLD.keys() & data.keys():
        return None
    for word, (ours, usual) in OLD.items():
        if word != "peft_lora_r" or given.flag("use_peft"):
            data[ours] = data.pop(word, usual)
    bits = any(data.get(one) is True for one in ("load_in_4bit", "load_in_8bit"))
    given.data = {STEPS[0]: 16, "loss_type": "nll", "lora_dropout": 0.0, **({"torch_dtype": "bfloat16"} if bits else {}), **data}
    return OLD_TRL


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

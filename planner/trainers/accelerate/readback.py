"""accelerate: its YAML alone, which says how a job is split and on how many GPUs; the rest is asked for."""

from pathlib import Path

from planner.trainers.reading import fine_tuning
from planner.trainers.reading.accelerate_file import accelerate
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import FineTuning, optimizer
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.settings_files import require_no_sections


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    require_no_sections(path, file_settings(path, "a configuration of accelerate"))
    sharding = accelerate(path, said=said)
    given = Settings(path, said.filled({}), said=said)
    micro = said.micro_batch_size or given.number("per_device_train_batch_size")
    precision = {"no": "fp32", "fp16": "fp16", "fp8": "fp8"}.get(str(sharding.precision), "bf16")
    about = "sequences per GPU and forward pass, which stand in the script"
    return fine_tuning.reading(FineTuning(
        given=given, trainer="fsdp", model=None, micro_batch_size=micro or 1,
        accumulation=given.number("gradient_accumulation_steps") or sharding.accumulation or 1, sequence_length=None,
        precision=precision, half_weights=False, optimizer=optimizer(given, given.get("optim", "adamw_torch"), "optim"),
        recompute=given.flag("gradient_checkpointing"), sharding=sharding, num_gpus=said.num_gpus,
        questions=() if micro else (Question(name="--micro-batch-size M", about=about),),
    ))  # fmt: skip

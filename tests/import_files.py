"""Files of users for imports, and what a reading asks."""

from pathlib import Path

from planner.trainers.reading.configuration import Reading

NEMO_RL = """sft: {max_num_steps: 10}
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 2048
  precision: bfloat16
"""
"""The start of a job of NeMo-RL's SFT, up to the engine of its policy."""


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    """A file with that text in a folder, which is made where it is not there."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def asked_for(found: Reading) -> list[str]:
    """What a reading asks, by name."""
    return [one.name for one in found.questions]

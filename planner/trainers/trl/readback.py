"""TRL: the YAML of a recipe (trl sft --config, alignment-handbook), and scripts that run sft.py or dpo.py."""

from pathlib import Path

from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.training_arguments import TRL, parse

PROGRAM = r"(?:\S*/)?(?:\w*_)?(?:sft|dpo)(?:_\w+)?\.py|trl|trl\.scripts\.(?:sft|dpo)"


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        return parse(Settings(path, said.filled(file_settings(path, "a recipe of TRL"))), TRL, said.num_gpus)
    found = launched(path, said, PROGRAM)
    script = found.words[0] if found.program == "trl" and found.words else found.program
    return parse(with_files(path, found, said), TRL, said.num_gpus or found.num_gpus, found.sharding, script)

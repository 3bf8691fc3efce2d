"""transformers: scripts that run a Trainer with its arguments as options, like run_clm.py, and those arguments in YAML or JSON."""

from pathlib import Path

from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.programs import usual_options
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.training_arguments import TRANSFORMERS, parse


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        given = Settings(path, said.filled(file_settings(path, "arguments of transformers")), said=said)
        return parse(given, TRANSFORMERS, said.num_gpus)
    found = launched(path, said, r"\S+\.py|[\w.]*train[\w.]*")
    settings = with_files(path, found, said)
    settings.usual = usual_options(path, found.program)
    return parse(settings, TRANSFORMERS, said.num_gpus or found.num_gpus, found.sharding, found.program)

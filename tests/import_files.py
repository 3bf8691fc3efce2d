"""Files of users for imports, and what a reading asks."""

from pathlib import Path

from planner.trainers.reading.configuration import Reading


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    """A file with that text in a folder, which is made where it is not there."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def asked_for(found: Reading) -> list[str]:
    """What a reading asks, by name."""
    return [one.name for one in found.questions]

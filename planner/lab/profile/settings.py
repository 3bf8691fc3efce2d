"""What the user asked of the profile; the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.errors import PlannerError, nearest_first

PARTS = ("collectives", "compute", "memory")  # What ``--only`` may name


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what is measured and where it goes."""

    output: str  # Profile to write
    device: str  # "cpu" or "cuda"
    budget: float  # Seconds of measuring, start-up left out
    models: Sequence[str] = ()  # What the operators and sizes are taken from
    resume: bool = False  # Go on with the journal of an earlier run
    only: Sequence[str] = PARTS  # Parts to measure
    timeout: float = 30.0  # Seconds after which a step has hung
    largest: float | None = None  # Largest buffer of a collective, bytes; None = by the models
    base: str | None = None  # Library profile for what is not measured; None = by the device's name
    network_bandwidth: float | None = None
    """Line rate of the NICs per GPU, bytes/s; None = of the base, else the best that was measured."""
    command: str = ""  # As the user typed it

    def __post_init__(self) -> None:
        for part in self.only:
            if part not in PARTS:
                raise PlannerError(
                    f"unknown part '{part}' of a profile; known: {', '.join(nearest_first(part, PARTS))}"
                )
        for name in ("budget", "timeout"):
            if not getattr(self, name) > 0:
                raise PlannerError(f"--{name} is {getattr(self, name):g} s; it must be above zero")
        if not self.output.endswith((".yaml", ".yml")):
            raise PlannerError(f"--output {self.output}: a profile is a YAML file; give it a name that ends in .yaml")

    @property
    def journal(self) -> Path:
        """Where the measurements are kept while they run, next to the profile."""
        return Path(self.output).with_suffix(".journal.json")

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that the first process handed to the ranks."""
        return cls(**json.loads(text))

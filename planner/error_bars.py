"""Error bars: how far measured runs lay from what was predicted for them, by what kind of run it is.

The table ``profiles/error_bars.yaml`` is made from the residuals ln(measured / predicted) of the published runs
(``tools/evidence/bars.py``). The most specific entry that had enough sources answers; where nothing like a job was
ever measured a wider class of runs does, and its bar is the wider for it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.schema import Rule, value_of, within
from planner.trainer import Trainer
from planner.workload import LOW_PRECISIONS, Workload

QUANTITIES = ("step_time", "memory")
KEYS = ("code_base", "arch", "kind")
"""What an entry may be restricted to; an entry without any stands for all runs."""
SLOW = "slow network"
SLOW_NETWORK = 0.5
"""Below this part of the usual network bandwidth a job is of the kind ``SLOW``."""


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Nine of ten measured runs lie between low and high times the prediction."""

    low: Annotated[float, Rule(most=1.0, above=True)]
    """5 % of the runs measured less than this times the prediction."""
    high: Annotated[float, within(1.0)]
    """5 % measured more."""
    runs: int
    """Runs behind it."""
    sources: int
    """Tables, papers and logs that these runs come from."""
    code_base: str = ""
    """Trainer of those runs, see ``Trainer.code_base``; '' = any."""
    arch: str = ""
    """Generation of their GPUs; '' = any."""
    kind: str = ""
    """Kind of run, see ``kind_of``; '' = any."""

    def interval(self, predicted: float) -> tuple[float, float]:
        """The range that a measurement falls into nine times of ten, in the unit of the prediction."""
        return predicted * self.low, predicted * self.high

    @property
    def basis(self) -> str:
        """The runs behind it, in words."""
        what = " ".join(word for word in (self.code_base, self.arch, self.kind) if word) or "all trainers and GPUs"
        return f"{self.runs} published runs of {self.sources} sources: {what}"


def kind_of(workload: Workload, hardware: HardwareProfile, usual_bandwidth: float | None = None) -> str:
    """'slow network', 'adapters', 'mixture of experts', 'low precision' or 'dense'; the first that holds.

    ``usual_bandwidth`` is the line rate of the network in bytes/s; None = what the profile says now.
    """
    if usual_bandwidth is not None and hardware.network_bandwidth < SLOW_NETWORK * usual_bandwidth:
        return SLOW
    if workload.lora_rank:
        return "adapters"
    if workload.model.is_moe:
        return "mixture of experts"
    return "low precision" if workload.precision in LOW_PRECISIONS else "dense"


def error_bar(quantity: str, trainer: Trainer, hardware: HardwareProfile, kind: str) -> ErrorBar:
    """The bar of 'step_time' or 'memory' for a job: the first entry of the table whose restrictions it meets."""
    return choose(shipped()[quantity], trainer.code_base, hardware.arch, kind)


def choose(bars: tuple[ErrorBar, ...], code_base: str, arch: str, kind: str) -> ErrorBar:
    """The first bar that is restricted to nothing else than this code, generation and kind."""
    job = {"code_base": code_base, "arch": arch, "kind": kind}
    return next(bar for bar in bars if all(getattr(bar, key) in ("", job[key]) for key in KEYS))


@cache
def shipped() -> dict[str, tuple[ErrorBar, ...]]:
    """The table that comes with the planner, by quantity, the most specific entries first."""
    return read(library.profiles_directory() / "error_bars.yaml")


def read(path: Path) -> dict[str, tuple[ErrorBar, ...]]:
    """A table from a file. Raises PlannerError with the entry that is wrong."""
    data, tables = library.read_yaml(path), {}
    for quantity in QUANTITIES:
        bars = value_of(tuple[ErrorBar, ...], data.get(quantity, []), str(path), quantity)
        if not bars or any(getattr(bars[-1], key) for key in KEYS):
            raise PlannerError(f"{path}: {quantity}: the last entry must stand for all runs")
        tables[quantity] = bars
    return tables

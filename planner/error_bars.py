"""Error bars: how far measured runs lay from what was predicted for them, by kind of user and model, trainer and generation of GPU.

The table ``profiles/error_bars.yaml`` is made from the residuals ln(measured / predicted) of the published runs
(``tools/evidence/bars.py``). The most specific class that has runs answers. A class with few campaigns lies near the wider
class around it, whose bar answers alone where nothing like a job was ever measured.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.record import record
from planner.schema import Rule, value_of, within
from planner.trainer import Trainer
from planner.workload import Workload

QUANTITIES = ("step_time", "memory")
KEYS = ("user", "code_base", "model", "arch")
"""What an entry may be restricted to, the widest first; an entry without any stands for all runs."""
QUARTER = 0.6745
"""Standard deviations of a normal distribution that a half lies within."""
Z90 = 1.645
"""Standard deviations of a normal distribution that 90 % lie within."""
PRE_TRAINING, FINE_TUNING, OWN_RUN = KINDS = ("pre-training", "fine-tuning", "own run")
"""Kinds of user, by who made a run: tables and papers of tuned pre-training; of fine-tuning; a user's own job, as issues and logs
report it."""

UNLISTED = "unlisted framework"
"""The user of runs whose framework the planner does not know; its bars are those of known ones, read as if they were not."""


class Kind(NamedTuple):
    """Kind of run: with the trainer and the GPU it chooses the error bar."""

    user: str
    """One of KINDS, or UNLISTED."""
    model: str
    """'dense' or 'mixture of experts'."""


@record
class ErrorBar:
    """Nine of ten measured runs lie between low and high times the prediction."""

    low: Annotated[float, Rule(most=1.0, above=True)]
    """5 % of the runs measured less than this times the prediction."""
    middle: Annotated[float, Rule(above=True)]
    """Half of them measured less."""
    high: Annotated[float, within(1.0)]
    """5 % measured more."""
    bulk: Annotated[float, Rule(above=True)]
    """Standard deviation of ln(measured / predicted) of the middle half, as if normal: the interval is that of the tails."""
    runs: int
    """Runs behind it."""
    sources: int
    """Tables, papers and logs that these runs come from."""
    user: str = ""
    """One of KINDS; '' = any."""
    code_base: str = ""
    """Trainer of those runs, see ``Trainer.code_base``; '' = any."""
    model: str = ""
    """'dense' or 'mixture of experts'; '' = any."""
    arch: str = ""
    """Generation of their GPUs; '' = any."""

    def interval(self, predicted: float) -> tuple[float, float]:
        """The range that a measurement falls into nine times of ten, in the unit of the prediction."""
        return predicted * self.low, predicted * self.high

    @property
    def half(self) -> tuple[float, float]:
        """A quarter of the runs measured less than the first of these times the prediction, a quarter more than the second."""
        return self.middle * math.exp(-QUARTER * self.bulk), self.middle * math.exp(QUARTER * self.bulk)

    def widened(self, alternatives: Sequence[float]) -> "ErrorBar":
        """The bar when options were not stated; ``alternatives``: predictions with another value of one over that with its own.

        Either value is as likely: a variance of ln(ratio)^2 / 4. It adds to that of the model on the side where the ratio lies,
        ln(low)^2 + Z90^2 sum ln(ratio)^2 / 4 over the ratios below 1, and so above.
        """
        logs = [math.log(ratio) for ratio in alternatives]
        below, above = ([one for one in logs if one * sign > 0] for sign in (-1, 1))
        low, high = (Z90 / 2.0 * math.hypot(*some) for some in (below, above))
        return replace(
            self, low=math.exp(-math.hypot(math.log(self.low), low)), high=math.exp(math.hypot(math.log(self.high), high))
        )

    @property
    def basis(self) -> str:
        """The runs behind it, in words."""
        what = ", ".join(word for word in (self.user, self.code_base, self.model, self.arch) if word) or "all trainers and GPUs"
        return f"{self.runs} published run{'s' * (self.runs != 1)} of {self.sources} source{'s' * (self.sources != 1)}: {what}"


def kind_of(workload: Workload, trainer: Trainer, user: str = "") -> Kind:
    """The kind of a job.

    ``user``: one of KINDS or UNLISTED; '' = fine-tuning or pre-training.
    """
    tunes = trainer.legal.fine_tuning.tunes(workload.lora_rank, workload.objective)
    user = user or (FINE_TUNING if tunes else PRE_TRAINING)
    return Kind(user, "mixture of experts" if workload.model.is_moe else "dense")


def error_bar(quantity: str, trainer: Trainer, hardware: HardwareProfile, kind: Kind) -> ErrorBar:
    """The bar of 'step_time' or 'memory' for a job: the first entry of the table whose restrictions it meets."""
    return choose(shipped()[quantity], (kind.user, trainer.code_base, kind.model, hardware.arch))


def choose(bars: tuple[ErrorBar, ...], names: tuple[str, ...]) -> ErrorBar:
    """The first bar that is restricted to nothing else than these values of KEYS."""
    job = dict(zip(KEYS, names, strict=True))
    return next(bar for bar in bars if all(getattr(bar, key) in ("", job[key]) for key in KEYS))


@cache
def shipped() -> dict[str, tuple[ErrorBar, ...]]:
    """The table that comes with the planner, by quantity, the most specific entries first."""
    return read(library.profiles_directory() / "error_bars.yaml")


def held_by_kind(quantity: str) -> dict[str, float]:
    """Part of the published runs that the bars hold when whole campaigns are left out: by kind of user, and ``sources`` in all."""
    data = library.read_yaml(library.profiles_directory() / "error_bars.yaml")
    return value_of(dict[str, float], data.get("held", {}).get(quantity), "error_bars.yaml", f"held: {quantity}")


def read(path: Path) -> dict[str, tuple[ErrorBar, ...]]:
    """A table from a file. Raises PlannerError with the entry that is wrong."""
    data, tables = library.read_yaml(path), {}
    for quantity in QUANTITIES:
        bars = value_of(tuple[ErrorBar, ...], data.get(quantity, []), str(path), quantity)
        if not bars or any(getattr(bars[-1], key) for key in KEYS):
            raise PlannerError(f"{path}: {quantity}: the last entry must stand for all runs")
        tables[quantity] = bars
    return tables

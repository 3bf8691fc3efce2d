"""What a rule is: one function that yields its condition, on columns, then its sentence, for one layout, from the same numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from planner import library
from planner.arrays import NDArray
from planner.cluster import Cluster
from planner.errors import FEW, listed
from planner.layout import NAMES, Layout, divisors
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import Trainer, load_trainer
from planner.trainer_records import Legal
from planner.workload import Workload

Mask = NDArray[np.bool_]


@record
class Job:
    """What the rules look at, besides the layout."""

    workload: Workload
    cluster: Cluster
    trainer: Trainer

    @property
    def model(self) -> ModelSpec:
        """The model of the workload."""
        return self.workload.model

    @property
    def fine_tunes(self) -> bool:
        """It does not train from scratch."""
        return self.legal.fine_tuning.tunes(self.workload.lora_rank, self.workload.objective)

    @property
    def legal(self) -> Legal:
        """What the trainer allows."""
        return self.trainer.legal


@record
class Rule:
    """A condition that every legal layout meets."""

    name: str
    """Short name, printed with the number of layouts that a rule refuses."""
    judge: Callable[[Job, Any], Iterator[Any]]
    """Of a job and a layout whose fields are numpy arrays. Yields where the rule holds, one value or a column; then, of one
    layout that breaks it, what is wrong, with the numbers and the remedy."""

    def holds(self, job: Job, layout: Layout) -> Any:
        """Where the rule holds."""
        return next(self.judge(job, layout.arrays()))

    def sentence(self, job: Job, layout: Layout) -> str:
        """What is wrong with one layout that breaks it."""
        _, sentence = self.judge(job, layout.arrays())
        return str(sentence)


def rule(name: str) -> Callable[[Callable[[Job, Any], Iterator[Any]]], Rule]:
    """Makes a rule of the function below it."""
    return lambda judge: Rule(name=name, judge=judge)


def divides(divisor: Any, number: Any) -> Any:
    """Where a number divides by another; a divisor of 0 counts as 1."""
    return number % np.maximum(divisor, 1) == 0


def divisors_text(number: int) -> str:
    """The first divisors, for a sentence."""
    return ", ".join(map(str, divisors(number)[:16]))


def known_to(what: str, knows: Callable[[Legal], bool]) -> str:
    """End of a sentence on what a trainer does not know: the trainers of the library that do."""
    found = [name for name in library.names("trainers") if knows(load_trainer(name).legal)]
    some = [*found[:FEW], f"{len(found) - FEW} more"] if len(found) > FEW else found
    return f"; {what} is known to --trainer {listed(some)}" if found else ""


def chosen(kind: str, value: Any) -> str:
    """Text of a choice of a layout, as flags and files write it."""
    return NAMES[kind][int(value)]


def known(kind: str, names: tuple[str, ...]) -> list[int]:
    """Numbers of the choices that a trainer names."""
    return [number for number, name in NAMES[kind].items() if name in names]

"""A mechanism that may change a step or its memory: a change of the plan's inputs that is priced again, with the check for it.

A mechanism is a family of changes with a size: a factor on what a machine or a stack achieves, or something that is on or off.
How plausible a size is comes from published runs: ``seen`` counts the sources in which the mechanism turned out to be the cause
(docs/log), ``width`` says how large it was there: the logarithm of the largest factor as two standard deviations, or
the width of the same factor in ``calibrate.factors``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster import Cluster
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute
from planner.questions.calibrate.factors import FACTORS, achieved
from planner.rules import Job
from planner.timeline.priced_plan import Priced

Change = Callable[[Priced, float], tuple[Job, Layout]]
WIDTHS = {factor.key: factor.width for factor in FACTORS}
"""How far machines of one kind differ in a factor: standard deviation of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One thing that may not be as the plan assumes."""

    key: str
    name: str
    """In words, without its size."""
    size: str | Callable[[float], str]
    """The size in words; a text is a template of the size {x} and its {inverse}."""
    change: Change
    """Inputs with the mechanism at a size."""
    seen: int
    """Published sources in which it was the cause."""
    source: str
    """Where that and the width come from."""
    check: str
    """The command, or line of a log, that decides."""
    sizes: tuple[float, ...] = (1.0,)
    """Continuous: (largest,), from 1 on; else the sizes that it may have."""
    width: float = 0.0
    """Standard deviation of the logarithm of a continuous size; 0 = the sizes are options, equally likely."""

    def size_text(self, x: float) -> str:
        """The size in words."""
        return self.size(x) if callable(self.size) else self.size.format(x=x, inverse=1.0 / x)


Option = tuple[bool, str, str, str, Change, int, str, str]
"""A mechanism that is on or off: whether a plan may have it, key, name, size in words, change, seen, source, check."""


def options(*rows: Option) -> list[Mechanism]:
    """The mechanisms of a table that a plan may have."""
    return [
        Mechanism(key=key, name=name, size=size, change=change, seen=seen, source=source, check=check)
        for applies, key, name, size, change, seen, source, check in rows
        if applies
    ]


def with_hardware(base: Priced, hardware: HardwareProfile) -> tuple[Job, Layout]:
    """The inputs with another profile."""
    return replace(base.job, cluster=Cluster(hardware=hardware, num_gpus=base.job.cluster.num_gpus)), base.layout


def times_slower(*names: str) -> Change:
    """Figures of the hardware, x times worse."""
    return lambda base, x: with_hardware(base, base.job.cluster.hardware.scaled(**dict.fromkeys(names, 1.0 / x)))


def achieved_factor(key: str, worse: bool) -> Change:
    """A factor of calibration, x times worse or x times better."""
    more_is_better = key in ("sustained_clock", "memory_fraction", "scale_up", "scale_out")

    def change(base: Priced, x: float) -> tuple[Job, Layout]:
        value = 1.0 / x if worse == more_is_better else x
        hardware, trainer = achieved(base.job.cluster.hardware, base.job.trainer, {key: value})
        job, layout = with_hardware(base, hardware)
        return replace(job, trainer=trainer), layout

    return change


def trainer_facts(**changes: Any) -> Change:
    """Facts of the trainer; a function makes its value of the old one and the size."""

    def change(base: Priced, x: float) -> tuple[Job, Layout]:
        old = base.job.trainer
        values = {name: new(old.fact(name), x) if callable(new) else new for name, new in changes.items()}
        return replace(base.job, trainer=old.replace(**values)), base.layout

    return change


def layout_fields(**changes: int) -> Change:
    """Fields of the layout."""
    return lambda base, _: (base.job, base.layout.replace(**changes))


def recomputed(how: Recompute) -> Change:
    """All layers recompute everything, or nothing."""
    return layout_fields(recompute=int(how), recompute_layers=0, recompute_modules=0)


def workload_fields(**changes: Any) -> Change:
    """Fields of the workload."""
    return lambda base, _: (replace(base.job, workload=base.job.workload.replace(**changes)), base.layout)


def can_recompute_more(base: Priced) -> bool:
    """The trainer has full recompute, and not all layers use it."""
    all_layers = int(base.layout.recompute) == Recompute.FULL and not int(base.layout.recompute_layers)
    return "full" in base.job.trainer.legal.recompute and not all_layers


def flash_off(base: Priced, size: str) -> Option:
    """Attention as plain matrices, where the trainer has it fused."""
    trainer = base.job.trainer
    change = trainer_facts(attention="unfused", unfused=trainer.kernels.unfused | {"softmax"})
    return (
        trainer.kernels.attention == "flash", "attention", "flash attention is off", size, change, 1,
        "Hagemann's rows 'torch' run it so",
        "a profile: softmax kernels; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 names Transformer Engine's backend",
    )  # fmt: skip

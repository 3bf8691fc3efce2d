"""What makes a step take longer or shorter than planned, each as a change of the plan's inputs that is priced again.

A mechanism is a family of changes with a size: a factor on what a machine or a stack achieves, or something that is on or off.
How plausible a size is comes from published runs: ``seen`` counts the sources in which the mechanism turned out to be the cause
(docs/log.md), ``width`` says how large it was there: the logarithm of the largest factor as two standard deviations, or
the width of the same factor in ``calibrate.factors``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.questions.calibrate.factors import FACTORS, achieved
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced
from planner.trainer import Trainer

Change = Callable[[Priced, float], tuple[Job, Layout]]
WIDTHS = {factor.key: factor.width for factor in FACTORS}
"""How far machines of one kind differ in a factor: standard deviation of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One thing that may not be as the plan assumes."""

    key: str
    name: str
    """In words, without its size."""
    size: Callable[[Priced, float], str]
    """The size in words."""
    sizes: tuple[float, ...]
    """Continuous: (largest,), from 1 on; else the sizes that it may have."""
    width: float
    """Standard deviation of the logarithm of a continuous size; 0 = the sizes are options, equally likely."""
    change: Change
    """Inputs with the mechanism at a size."""
    seen: int
    """Published sources in which it was the cause."""
    source: str
    """Where that and the width come from."""
    check: str
    """What tells: a command or a line of a log."""


def with_hardware(base: Priced, hardware: HardwareProfile) -> tuple[Job, Layout]:
    """The inputs with another profile."""
    cluster = Cluster(hardware=hardware, num_gpus=base.job.cluster.num_gpus)
    return replace(base.job, cluster=cluster), base.layout


def with_trainer(base: Priced, trainer: Trainer) -> tuple[Job, Layout]:
    """The inputs with another trainer."""
    return replace(base.job, trainer=trainer), base.layout


def with_layout(base: Priced, layout: Layout) -> tuple[Job, Layout]:
    """The inputs with another layout."""
    return base.job, layout


def factor(key: str, worse: bool) -> Change:
    """A factor of calibration as a change: x times worse, or x times better."""
    more_is_better = key in ("sustained_clock", "memory_fraction", "scale_up", "scale_out")

    def change(base: Priced, x: float) -> tuple[Job, Layout]:
        value = 1.0 / x if worse == more_is_better else x
        hardware, trainer = achieved(base.job.cluster.hardware, base.job.trainer, {key: value})
        job, layout = with_hardware(base, hardware)
        return replace(job, trainer=trainer), layout

    return change


def times(what: str) -> Callable[[Priced, float], str]:
    """'3.9 times slower' and the like."""
    return lambda _, x: f"{x:.3g} times {what}"


def on(text: str) -> Callable[[Priced, float], str]:
    """Something without a size."""
    return lambda _, __: text


def switch(key: str, name: str, size: str, change: Change, *, seen: int, source: str, check: str) -> Mechanism:
    """Something that is on or off."""
    return Mechanism(
        key=key, name=name, size=on(size), sizes=(1.0,), width=0.0, change=change, seen=seen, source=source, check=check
    )


def trainer_change(**changes: Any) -> Change:
    """Facts of the trainer as a change."""
    return lambda base, _: with_trainer(base, base.job.trainer.replace(**changes))


def layout_change(**changes: int) -> Change:
    """Fields of the layout as a change."""
    return lambda base, _: with_layout(base, base.layout.replace(**changes))


def flash_off(base: Priced, size: str) -> list[Mechanism]:
    """Attention as plain matrices, where the trainer has it fused."""
    trainer = base.job.trainer
    if trainer.kernels.attention != "flash":
        return []
    change = trainer_change(attention="unfused", unfused=trainer.kernels.unfused | {"softmax"})
    return [
        switch(
            "attention", "flash attention is off", size, change, seen=1, source="Hagemann's rows 'torch' run it so",
            check="a profile: softmax kernels; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 names Transformer Engine's backend",
        )
    ]  # fmt: skip


def batch(base: Priced, shares: tuple[float, ...]) -> list[Mechanism]:
    """A step that holds another number of microbatches than planned; shares that make a legal layout, and none without one."""

    def change(base: Priced, share: float) -> tuple[Job, Layout]:
        microbatches = max(round(int(base.layout.num_microbatches) * share), 1)
        layout = base.layout.replace(num_microbatches=microbatches)
        workload = base.job.workload.replace(global_batch_size=int(layout.global_batch_size))
        return replace(base.job, workload=workload), layout

    def legal(share: float) -> bool:
        if int(base.layout.num_microbatches) * share % 1:
            return False
        try:
            check(*change(base, share))
        except PlannerError:
            return False
        return True

    sizes = tuple(share for share in shares if legal(share))
    one = Mechanism(
        key="batch", name="the step holds another number of tokens", sizes=sizes, width=0.0, change=change, seen=1,
        size=lambda base, share: f"{int(base.layout.num_microbatches) * share:.0f} instead of "
        f"{int(base.layout.num_microbatches)} microbatches",
        source="rows whose batch was read wrong at first (microbatches of torchtitan's pipelines in 2024)",
        check="tokens per step in the trainer's log; whether a step of the log is an optimizer step",
    )  # fmt: skip
    return [one] if sizes else []

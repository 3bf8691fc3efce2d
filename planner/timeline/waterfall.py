"""The step time as a waterfall: from computation at the peak rate of the GPU to the whole step, loss by loss."""

from dataclasses import dataclass

from planner.cost.estimate import PARTS
from planner.errors import PlannerError
from planner.plan_file import Prediction

TEXT = {
    "ideal": "model FLOP at peak",
    "kernels": "kernels below the peak",
    "recompute": "recompute",
    "tensor_communication": "tensor parallel traffic",
    "context_communication": "context parallel traffic",
    "expert_communication": "expert all-to-all",
    "data_communication": "gradient, weight traffic",
    "pipeline_communication": "pipeline sends",
    "bubble": "pipeline bubble",
    "stragglers": "slowest GPU",
    "optimizer": "optimizer step",
    "host": "kernel launches (host)",
    "offload": "states on the host",
    "overhead": "fixed overhead",
}
"""A short name for each bar, in order: computation in two bars, then the other parts of the step time."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One step of the waterfall: from ``start`` to ``end`` seconds."""

    name: str
    """ideal, kernels, or a part of the step time."""
    start: float
    """Seconds where it begins: the end of the bar before."""
    seconds: float
    """What it adds. Negative only for kernels, where the mean over stages hides that the slowest stage is the smaller one."""

    @property
    def end(self) -> float:
        """Seconds where it ends."""
        return self.start + self.seconds

    @property
    def text(self) -> str:
        """Its name for people."""
        return TEXT[self.name]


def waterfall(prediction: Prediction) -> tuple[Bar, ...]:
    """Bars whose seconds sum to the step time exactly; the last ends at it.

    ideal     F / P = MFU * T: model FLOP of the step on one GPU over the dense peak
    kernels   compute - F / P: kernels run below the peak, and the slowest stage holds more than the mean
    then      every other part of ``prediction.time_s``, zeros included

    Communication is what is exposed; what hides behind computation is not part of the step.
    """
    if set(prediction.time_s) != set(PARTS):
        raise PlannerError("the estimate does not hold every part of the step time; make the plan again")
    ideal = prediction.mfu * prediction.step_time_s
    seconds = {"ideal": ideal, "kernels": prediction.time_s["compute"] - ideal}
    seconds |= {name: prediction.time_s[name] for name in tuple(TEXT)[2:]}
    bars, start = [], 0.0
    for name, value in seconds.items():
        bars.append(Bar(name=name, start=start, seconds=value))
        start += value
    return tuple(bars)

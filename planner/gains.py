"""What would make the best plan of a job faster: options of its trainer that were not stated, and lower precisions."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from planner.errors import PlannerError
from planner.explain import layout_text
from planner.options import Alternative, Unstated, priced
from planner.record import record
from planner.rules import Job, allowed, check_workload
from planner.search import Finding, fits
from planner.workload import PRECISIONS


@record
class Gain:
    """An option, or a precision, that would make the best plan faster."""

    flag: str
    """The flag that chooses it."""
    what: str
    """What it does."""
    gain: float
    """Part of the step time that it saves, by pricing the plan both ways."""
    step_time_s: float
    layout: str
    """The layout that is fastest then; '' = that of the best plan."""


GAINS = 3
"""Options that would be faster are listed up to this many, the largest gain first, and one precision."""
LEAST_GAIN = 0.01
FP8 = {"Hopper": ("fp8", "fp8_row", "fp8_block"), "Blackwell": ("fp8", "fp8_row", "mxfp8")}
"""Kinds of fp8 by architecture: scales per 32 values need Blackwell, which has no kernel for blocks of 128; others know one
scale per tensor."""


def gains(found: Unstated) -> list[Gain]:
    """What would make the best plan faster and still fit: options of the trainer that were not stated, and lower precisions; of
    several values the best, the largest gains first.

    The gain of an alternative is that of the fastest layout it has, over the first as it is.
    """
    first, now = found.layouts[0], float(found.now.step_time[0])
    best: dict[str, Gain] = {}
    for one, prices in (*found.others, *priced(_precisions(found.job), found.columns)):
        safe = allowed(one.job, found.columns) & fits(one.job, prices)
        step = np.where(safe, prices.step_time, np.inf)
        row = int(np.argmin(step))
        gain = 1.0 - float(step[row]) / now
        if gain >= LEAST_GAIN and (one.option not in best or gain > best[one.option].gain):
            layout = found.columns.row(row)
            other = "" if layout == first else layout_text(layout)
            best[one.option] = Gain(flag=one.flag, what=one.what, gain=gain, step_time_s=float(step[row]), layout=other)
    narrow = [best.pop("precision")] if "precision" in best else []
    return sorted([*sorted(best.values(), key=_largest)[:GAINS], *narrow], key=_largest)


def held_back(finding: Finding) -> list[Gain]:
    """What the search knows to be faster and does not take: optimizer states on the host for less than a tenth of the time."""
    if finding.held_back is None:
        return []
    layout, found = finding.held_back
    gain = 1.0 - float(found.step_time[0] / finding.estimates[0].step_time[0])
    risk = f"runs out with a chance of {100 * float(found.out_of_memory_probability[0]):.1f} %"
    what = f"optimizer states on the host; not taken below a tenth: it hangs on the host's memory and PCIe, and {risk}"
    share = int(layout.offload_optimizer)
    return [Gain(flag=f"--offload-optimizer {share}", what=what, gain=gain, step_time_s=float(found.step_time[0]),
                 layout=layout_text(layout))] if gain >= LEAST_GAIN else []  # fmt: skip


def _largest(one: Gain) -> float:
    return -one.gain


def _precisions(job: Job) -> Iterator[Alternative]:
    """The job in each lower precision that the device and the trainer know."""
    if job.workload.precision != "bf16":
        return
    for name in FP8.get(job.cluster.hardware.arch.split()[0], ("fp8",)):
        changed = dataclasses.replace(job, workload=job.workload.replace(precision=name))
        with contextlib.suppress(PlannerError):
            check_workload(changed.workload, changed.cluster, changed.trainer)
            flag, what = f"--precision {name}", PRECISIONS[name]
            yield Alternative(option="precision", value=name, flag=flag, what=what, job=changed)

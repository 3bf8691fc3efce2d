"""What a run was priced as, where that is not the plan's compiled trainer: a whole plan on a processor, and the notes of any run.

Level ``rank`` compares the passes of one rank with it and assembles its step, level ``truncated`` scales it up. Communication is
the cost model's. No torch here.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.cost.estimate import PARTS
from planner.lab.reference.split import Split
from planner.lab.run.assembled_step import Predicted, predicted_of, predicted_step, with_copies
from planner.lab.run.eager_pricing import (
    UPDATED,
    Host,
    as_run,
    not_measured,
    priced_host,
    processor_seconds,
    profile_error,
    update_seconds,
    yardsticks,
)
from planner.lab.run.plan_question import Question
from planner.timeline.priced_plan import Priced
from planner.trainer import changes_of
from planner.units import format_seconds

KINDS = {"F": "forward", "B": "backward"}
"""Passes whose host time is said."""


# ------------------------------------------------------------------------------------------------ a plan on a processor


def priced_as_run(asked: Question) -> Priced:
    """The plan with the trainer that runs on a processor."""
    return asked.priced(as_run(asked.trainer, asked.split, on_cpu=True))


def predicted_as_run(priced: Priced, split: Split, host: Host | None) -> Predicted:
    """Passes and updates of every stage of what ``priced_as_run`` gave, with the host's work that was measured."""
    seconds = processor_seconds(priced, split, host)
    computed = with_copies(priced, {"forward": seconds["F"], "backward": seconds["B"], "weight": seconds["W"]})
    return dataclasses.replace(predicted_of(priced), computed=computed, update=update_seconds(priced, split, host))


def parts_as_run(asked: Question, host: Host | None) -> dict[str, float]:
    """Seconds of the whole plan's step by part of the cost model's; they sum to it. The host's work is in compute."""
    priced = priced_as_run(asked)
    found = predicted_step(priced, predicted_as_run(priced, asked.split, host)).parts
    found["data_communication"] += found.pop("once_per_step")  # copies of sharded states
    return {part: found.get(part, 0.0) for part in PARTS}


def host_of(as_run: Mapping[str, Any] | None) -> Host | None:
    """What the ranks of a run have measured of the host, from its ``as_run``; None where they have not."""
    host = (as_run or {}).get("host")
    if host is None:
        return None
    names = {**KINDS, UPDATED: UPDATED}
    return {kind: (host[name]["layer_seconds"], host[name]["ends_seconds"]) for kind, name in names.items()}


# ------------------------------------------------------------------------------------------------ notes


@dataclass(frozen=True, kw_only=True)
class EagerRun:
    """An uncompiled run, of all ranks or of one."""

    asked: Question
    """What was to be run."""
    priced: Priced
    """It as it was run."""
    on_cpu: bool
    """Whether it ran on a CPU."""
    not_compiled: Mapping[str, str]
    """Operators of a GPU that ran as several kernels, and why."""
    host: Host | None
    """What empty layers took."""
    slowed: Sequence[float]
    """How many times longer than in the profile the yardstick took, by step and rank."""
    update_slowed: Sequence[float]
    """The same of that of the update."""
    more: Sequence[str] = ()
    """Sentences of the level's own about the rate."""


def notes_of(run: EagerRun, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the prediction of an uncompiled run is made of, in numbers and sentences. ``rows``: its passes."""
    own = profile_error(run.asked.cluster)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    found: dict[str, Any] = {
        "trainer": changes_of(run.priced.job.trainer, run.asked.trainer),
        "not_compiled": dict(run.not_compiled), "host": _host(run) if run.on_cpu else None,
        "yardstick": _yardstick(run) if run.on_cpu else None, "profile_error": own,
        "median_error": statistics.median(errors) if errors else None,
        "passes": len(errors), "within_profile_error": sum(one <= own for one in errors) if own is not None else None,
    }  # fmt: skip
    return found | {"sentences": [*(_on_cpu if run.on_cpu else _on_gpu)(run, found), *run.more, *_errors(found)]}


def _host(run: EagerRun) -> dict[str, Any] | None:
    """Seconds of an empty layer and of the ends, measured and as its operators are priced; those of the update measured."""
    if run.host is None:
        return None
    priced = priced_host(run.priced.job, run.priced.layout, run.asked.split)
    found = {
        name: dict(zip(("layer_seconds", "ends_seconds"), run.host[kind], strict=True))
        for kind, name in {**KINDS, UPDATED: UPDATED}.items()
    }
    for kind, name in KINDS.items():
        found[name] |= dict(zip(("priced_layer_seconds", "priced_ends_seconds"), priced[kind], strict=True))
    return found


def _yardstick(run: EagerRun) -> dict[str, float] | None:
    """Of the profile, and how much longer it took during the steps: the mean of ranks and steps."""
    seconds = yardsticks(run.asked.cluster).get("product")
    if not seconds or not run.slowed:
        return None
    slowed, update = statistics.fmean(run.slowed), statistics.fmean(run.update_slowed or run.slowed)
    return {"profile_seconds": seconds, "slowed": slowed, "update_slowed": update}


def _operators(run: EagerRun) -> str:
    """What a compiler would have made one kernel each."""
    return f"{'norms, ' if run.asked.split.fused else ''}SwiGLU, rotary embedding and loss"


def _on_gpu(run: EagerRun, _: dict[str, Any]) -> list[str]:
    names = "; ".join(f"{name}: {why}" for name, why in run.not_compiled.items())
    return [
        f"priced as it ran: {_operators(run)} as sequences of eager kernels, because no compiler made one of them ({names})"
    ]


def _on_cpu(run: EagerRun, found: dict[str, Any]) -> list[str]:
    host, at = found["host"], found["yardstick"]
    layers = not_measured(run.asked.split) or "host time around layers was not measured: it is priced by launches"
    if host is not None:
        layers = "host time of a layer, measured on empty layers: " + " and ".join(
            f"{format_seconds(host[kind]['layer_seconds'])} {kind} (priced by launches "
            f"{format_seconds(host[kind]['priced_layer_seconds'])})"
            for kind in KINDS.values()
        )
    rate = "the profile has no yardstick: a core that is slower now than when it was profiled shows as an error"
    if at is not None:
        rate = (
            f"processor time is given at the profile's rate of the core: its yardstick took {at['slowed']:.2f} times as long "
            f"during the steps, that of the update {at['update_slowed']:.2f} times"
        )
    return [
        f"priced as it ran: nothing is compiled on a CPU, so {_operators(run)} are sequences of eager kernels, further gradients "
        "are added by kernels, the update takes the gradient's norm, and the host's work is the core's", layers, rate,
    ]  # fmt: skip


def _errors(found: dict[str, Any]) -> list[str]:
    if found["median_error"] is None:
        return []
    said, own = f"passes are off by {found['median_error']:.1%} in the median", found["profile_error"]
    if own is None:
        return [f"{said}; the profile has no whole layer, so its own error is not known"]
    count = f"{found['within_profile_error']} of {found['passes']}"
    return [f"{said}; {count} within the profile's own error ({own:.1%}: its operators' sum against whole layers)"]

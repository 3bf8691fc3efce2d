"""What a run was priced as, where that is not the plan's compiled trainer, and how well; no torch here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.lab.run.eager_pricing import UPDATED, Host, not_measured, priced_host, profile_error, yardstick_seconds
from planner.lab.run.full_times import Run
from planner.lab.run.predicted_ranks import Question
from planner.timeline.priced_plan import Priced
from planner.trainer import changes_of
from planner.units import format_seconds

KINDS = {"F": "forward", "B": "backward"}
"""Passes whose host time is said."""


@dataclass(frozen=True, kw_only=True)
class Ran:
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
    """What layers of nothing took."""
    slowed: Sequence[float]
    """How many times longer than in the profile the yardstick took, by step and rank."""
    update_slowed: Sequence[float]
    """The same of that of the update."""
    more: Sequence[str] = ()
    """Sentences of the rung's own about the rate."""


def as_run_of(run: Run, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of rung full; None where the plan's own prediction stands."""
    if not run.plain or not run.steps or run.not_compared:
        return None

    def slowed(name: str) -> list[float]:
        return [one[name] for step in run.steps for one in step if one.get(name)]

    ran = Ran(
        asked=run.task.asked, priced=run.priced, on_cpu=run.on_cpu, not_compiled=run.not_compiled, host=run.host,
        slowed=slowed("slowed"), update_slowed=slowed("update_slowed"),
    )  # fmt: skip
    return notes_of(ran, rows)


def notes_of(run: Ran, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the prediction of an uncompiled run is made of, in numbers and sentences. ``rows``: its passes."""
    own = profile_error(run.asked.cluster)
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    found = {
        "trainer": changes_of(run.priced.job.trainer, run.asked.trainer),
        "not_compiled": dict(run.not_compiled), "host": _host(run) if run.on_cpu else None,
        "yardstick": _yardstick(run) if run.on_cpu else None, "profile_error": own,
        "median_error": statistics.median(errors) if errors else None,
        "passes": len(errors), "within_profile_error": sum(one <= own for one in errors) if own is not None else None,
    }  # fmt: skip
    return found | {"sentences": [*_priced_as(run), *_measured_at(run, found), *run.more, *_errors(found)]}


def _host(run: Ran) -> dict[str, Any] | None:
    """Seconds of a layer of nothing and of the ends, measured and as its operators are priced; those of the update measured."""
    if run.host is None:
        return None
    told = priced_host(run.priced.job, run.priced.layout, run.asked.split)
    passes = {
        name: {
            "layer_seconds": run.host[kind][0], "ends_seconds": run.host[kind][1],
            "priced_layer_seconds": told[kind][0], "priced_ends_seconds": told[kind][1],
        }
        for kind, name in KINDS.items()
    }  # fmt: skip
    each, ends = run.host[UPDATED]
    return {**passes, UPDATED: {"layer_seconds": each, "ends_seconds": ends}}


def _yardstick(run: Ran) -> dict[str, float] | None:
    """Of the profile, and how much longer it took during the steps: the mean of ranks and steps."""
    seconds = yardstick_seconds(run.asked.cluster)
    if not seconds or not run.slowed:
        return None
    return {
        "profile_seconds": seconds, "slowed": statistics.fmean(run.slowed),
        "update_slowed": statistics.fmean(run.update_slowed or run.slowed),
    }  # fmt: skip


def _priced_as(run: Ran) -> list[str]:
    fused = run.asked.split.fused
    chains = "norms, SwiGLU, rotary embedding and loss" if fused else "SwiGLU, rotary embedding and loss"
    if not run.on_cpu:
        names = "; ".join(f"{name}: {why}" for name, why in run.not_compiled.items())
        return [
            f"priced as it ran: {chains} as chains of plain kernels, because no compiler made one of them ({names})"
        ]
    return [
        f"priced as it ran: nothing is compiled on a CPU, so {chains} are chains of plain kernels, further gradients are added by "
        "kernels, the update takes the gradient's norm, and the host's work is the core's"
    ]  # fmt: skip


def _measured_at(run: Ran, found: dict[str, Any]) -> list[str]:
    if not run.on_cpu:
        return []
    host, at = found["host"], found["yardstick"]
    if host is None:
        why = not_measured(run.asked.split) or "host time around layers was not measured: it is priced by launches"
        said = [why]
    else:
        each = " and ".join(
            f"{format_seconds(one['layer_seconds'])} {kind} (priced by launches {format_seconds(one['priced_layer_seconds'])})"
            for kind, one in host.items()
            if kind in KINDS.values()
        )
        said = [f"host time of a layer, measured on layers of nothing: {each}"]
    if at is None:
        return [
            *said,
            "the profile has no yardstick: a core that is slower now than when it was profiled shows as an error",
        ]
    return [
        *said,
        "processor time is given at the profile's rate of the core: its yardstick took "
        f"{at['slowed']:.2f} times as long during the steps, that of the update {at['update_slowed']:.2f} times",
    ]


def _errors(found: dict[str, Any]) -> list[str]:
    if found["median_error"] is None:
        return []
    said = f"passes are off by {found['median_error']:.1%} in the median"
    own = found["profile_error"]
    if own is None:
        return [f"{said}; the profile has no whole layer, so its own error is not known"]
    count = f"{found['within_profile_error']} of {found['passes']}"
    return [f"{said}; {count} within the profile's own error ({own:.1%}: its operators' sum against whole layers)"]

"""A whole plan as a processor runs it, for rungs that measure a part of it: passes and update with chains and host. No torch here.

Rung ``rank`` holds the passes of one rank against it and puts its step together with it, rung ``truncated`` scales it up. What
stands in it is said in ``uncompiled``; communication is the cost model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.cost.estimate import PARTS
from planner.lab.reference.split import Split
from planner.lab.run.assembled_step import Told, predicted_passes, predicted_step, with_copies
from planner.lab.run.eager_pricing import UPDATED, Host, as_run, processor_seconds, update_seconds
from planner.lab.run.full_notes import KINDS
from planner.lab.run.predicted_ranks import Question
from planner.rules import Job
from planner.timeline.priced_plan import Priced, price


def priced_as_run(asked: Question) -> Priced:
    """The plan with the trainer that runs on a processor."""
    trainer = as_run(asked.trainer, asked.split, on_cpu=True)
    return price(Job(workload=asked.workload, cluster=asked.cluster, trainer=trainer), asked.layout)


def told_as_run(priced: Priced, split: Split, host: Host | None) -> Told:
    """Passes and updates of every stage of what ``priced_as_run`` gave, with the host's work that was measured."""
    seconds = processor_seconds(priced, split, host)
    computed = {"forward": seconds["F"], "backward": seconds["B"] if "B" in seconds else seconds["I"] + seconds["W"]}
    computed["weight"] = np.array(seconds["W"]) if "W" in seconds else np.zeros_like(seconds["F"])
    if "W" in seconds:  # tokens have no gradient: torch's first stage does its whole backward pass as W
        computed["weight"][0] = computed["backward"][0]
    passes = dataclasses.replace(predicted_passes(priced), computed=with_copies(priced, computed))
    return Told(passes=passes, update=update_seconds(priced, split, host))


def parts_as_run(asked: Question, host: Host | None) -> dict[str, float]:
    """Seconds of the whole plan's step by part of the cost model's; they sum to it. The host's work is in compute."""
    priced = priced_as_run(asked)
    found = predicted_step(priced, told_as_run(priced, asked.split, host)).parts
    found["data_communication"] += found.pop("once_per_step")  # copies of sharded states
    return {part: found.get(part, 0.0) for part in PARTS}


def host_of(as_run: Mapping[str, Any] | None) -> Host | None:
    """What the ranks of a run have measured of the host, from its ``as_run``; None where they have not."""
    told = (as_run or {}).get("host")
    if told is None:
        return None
    return {
        kind: (told[name]["layer_seconds"], told[name]["ends_seconds"])
        for kind, name in {**KINDS, UPDATED: UPDATED}.items()
    }

"""Host times of an RL step that neither the serving nor the training model knows: profiles/rl_phases.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from planner import library
from planner.schema import Seconds, read


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Fitted on the measured steps that planner has, checked with sources left out (docs/log/rl.md)."""

    sample: Seconds
    """Of one sampled token in an engine, next to the engine's own host time: log-probs, detokenising, Python lists."""
    token: Seconds
    """Of one token of a step in the process that controls it: rewards, advantages, copies between processes, logs."""
    step: Seconds
    """Of a step, whatever its size."""


@cache
def host_times() -> HostTimes:
    """As the library has them."""
    path = library.profiles_directory() / "rl_phases.yaml"
    return read(HostTimes, library.read_yaml(path), path.name)

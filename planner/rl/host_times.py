"""What neither the serving nor the training model knows of an RL step: profiles/rl_phases.yaml."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated

from planner import library
from planner.record import record
from planner.schema import Seconds, read, within


@record
class HostTimes:
    """Fitted on the measured steps that planner has, checked with sources left out (docs/log/rl.md)."""

    sample: Seconds
    """Of one sampled token of an engine that runs in the framework's own process: detokenising, log-probs, Python lists."""
    hosts_step: Seconds
    """Of a decode step of an engine over several hosts, next to its kernels: remote workers, all-reduce between hosts."""
    stall: Seconds
    """Of the host of a rank in a decode that it launches piece by piece: n ranks wait for the slowest, H(n) - 1 times as long."""
    token: Seconds
    """Of one token of a step in the process that controls it: rewards, advantages, copies between processes, logs."""
    step: Seconds
    """Of a step, whatever its size."""
    learners: dict[str, Annotated[float, within(0.5, 4)]]
    """Time of updates and log-probs over that of the training model, by pattern of the hardware's name."""

    def slower(self, hardware: str) -> float:
        """Of ``learners`` the first that fits a hardware profile; else 1."""
        return next((value for name, value in self.learners.items() if fnmatchcase(hardware, name)), 1.0)


@cache
def host_times() -> HostTimes:
    """As the library has them."""
    path = library.profiles_directory() / "rl_phases.yaml"
    return read(HostTimes, library.read_yaml(path), path.name)

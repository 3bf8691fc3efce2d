"""The ranks of a running profile: who is where, on which machine, groups of a pattern, and agreement between all (torch)."""

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from planner.detect import processor
from planner.lab.launch.meeting import JOIN_SECONDS, meet
from planner.lab.launch.place import Place
from planner.lab.launch.watch import Watch
from planner.lab.profile.operations import Group
from planner.lab.profile.patterns import Pattern

CONTROL_SECONDS = 7 * 86400.0
"""Ranks wait this long for the first one's next word while it measures alone; the watch sees to hangs."""


@dataclass(kw_only=True)
class Ranks:
    """All ranks of the profile as one of them sees them."""

    place: Place  # Of this rank
    device: str  # "cpu" or "cuda"
    local: int  # Ranks of a node, the same on every one
    hosts: list[str]  # Host of each rank, with the node's number where one host plays several
    names: list[str]  # Device of each rank
    watch: Watch  # Ends the profile when a rank or link fails
    timeout: float  # Seconds that one step may take
    groups: dict[Pattern, Group | None] = field(default_factory=dict)
    """Groups that were formed; None where this rank is in none."""

    @property
    def world(self) -> int:
        """All ranks."""
        return self.place.world

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which keeps the results."""
        return self.place.rank == 0

    @property
    def backend(self) -> str:
        """Of the collectives that are measured."""
        return "nccl" if self.device == "cuda" else "gloo"

    def group(self, pattern: Pattern) -> Group | None:
        """The group of a pattern that this rank is in; formed by all ranks together when first asked for."""
        if pattern not in self.groups:
            self.groups[pattern] = None
            # Formed by their members only, groups are named after their ranks: fast, but it needs every rank to have
            # formed as many before. A world that is no power of two leaves ranks idle in some patterns.
            alone = self.world & (self.world - 1) == 0
            for ranks in pattern.groups(self.world):
                inside = self.place.rank in ranks
                if alone and not inside:
                    continue
                handle = dist.new_group(
                    ranks, timeout=timedelta(seconds=self.timeout + 10.0), backend=self.backend,
                    use_local_synchronization=alone,
                )  # fmt: skip
                if inside:
                    self.groups[pattern] = Group(ranks=ranks, me=ranks.index(self.place.rank), handle=handle)
        return self.groups[pattern]

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier()

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """The longest of each sample over all ranks."""
        values = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values]

    def from_first(self, values: Sequence[float], meanwhile: Callable[[], object] | None = None) -> list[float]:
        """Rank 0's numbers, on every rank; until they come the others do ``meanwhile`` over and over, where it is given."""
        sent = torch.tensor(values, dtype=torch.float64)
        work: Any = dist.broadcast(sent, 0, async_op=True)
        while meanwhile and not work.is_completed():
            meanwhile()
        work.wait()
        return [float(value) for value in sent]

    def collect(self, value: Any) -> list[Any]:
        """An object from every rank, on every rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def join(place: Place, device: str, timeout: float, ended: Callable[[str], None], wait: float = JOIN_SECONDS) -> Ranks:
    """Meets the other ranks. Raises PlannerError where some do not come, or where the nodes differ."""
    met = meet(place, device, timeout, ended, wait)
    with met.watch.doing("joining the process group", list(range(place.world)), wait):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("control", met.store), rank=place.rank, world_size=place.world,
            timeout=timedelta(seconds=CONTROL_SECONDS),
        )  # fmt: skip
    return Ranks(
        place=place, device=device, local=met.nodes.count(met.nodes[0]), hosts=met.watch.hosts, names=met.names,
        watch=met.watch, timeout=timeout,
    )  # fmt: skip


def versions(device: str) -> dict[str, str]:
    """Of every library that has a part in the figures."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()}
    try:
        found["planner"] = metadata.version("planner")
    except metadata.PackageNotFoundError:
        found["planner"] = "of a checkout that is not installed"
    if device != "cuda":
        return found | {"gloo": f"of torch {torch.__version__}"}
    return found | {
        "cuda": str(torch.version.cuda or torch.version.hip), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": str(torch.backends.cudnn.version()),
    }  # fmt: skip


def driver() -> str:
    """Version of the GPU's driver, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "".join(done.stdout.split()[:1])


def header(ranks: Ranks) -> dict[str, Any]:
    """Of the journal: what the results belong to."""
    hosts = sorted(set(ranks.hosts))
    found = {
        "device": ranks.device, "name": processor(), "host": hosts[0].split(" node ")[0], "nodes": len(hosts),
        "world": ranks.world, "local": ranks.local, "cores": os.cpu_count() or 1,
        "memory": float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "units": 1, "driver": "",
        "versions": versions(ranks.device),
    }  # fmt: skip
    if ranks.device == "cuda":
        card: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"name": ranks.names[0], "driver": driver()}
        found |= {"memory": float(card.total_memory), "units": int(card.multi_processor_count)}
    return found

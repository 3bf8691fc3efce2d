"""The ranks of a running profile: who is where, groups of a pattern, and agreement between all (torch)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from planner.profiler.operations import Group
from planner.profiler.patterns import Pattern
from planner.profiler.place import Place
from planner.profiler.watch import Watch

JOIN_SECONDS = 120.0
"""How long the ranks wait for each other at the start."""
CONTROL_SECONDS = 7 * 86400.0
"""Ranks wait this long for the first one's next word while it measures alone; the watch sees to hangs."""
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
}  # fmt: skip
"""Where the user has set nothing: errors end the process, the last collectives are kept for a dump."""


@dataclass(kw_only=True)
class Ranks:
    """All ranks of the profile as one of them sees them."""

    place: Place
    """Of this rank."""
    device: str
    """"cpu" or "cuda"."""
    local: int
    """Ranks of a node, the same on every one."""
    hosts: list[str]
    """Host of each rank, with the node's number where one host plays several."""
    names: list[str]
    """Device of each rank."""
    watch: Watch
    """Ends the profile when a rank or link fails."""
    timeout: float
    """Seconds that one step may take."""
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
            mine: Group | None = None
            everyone = pattern.groups(self.world)
            # Formed by their members only, groups are named after their ranks: fast, but it needs every rank to have
            # formed as many before. A world that is no power of two leaves ranks idle in some patterns.
            alone = self.world & (self.world - 1) == 0
            for ranks in everyone:
                inside = self.place.rank in ranks
                if alone and not inside:
                    continue
                handle = dist.new_group(
                    ranks, timeout=timedelta(seconds=self.timeout + 10.0), backend=self.backend,
                    use_local_synchronization=alone,
                )  # fmt: skip
                if inside:
                    mine = Group(ranks=ranks, me=ranks.index(self.place.rank), handle=handle)
            self.groups[pattern] = mine
        return self.groups[pattern]

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier()

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """The longest of each sample over all ranks."""
        values = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values]

    def word(self, values: Sequence[float]) -> list[float]:
        """Numbers that rank 0 says to all."""
        said = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(said, 0)
        return [float(value) for value in said]

    def collect(self, value: Any) -> list[Any]:
        """An object from every rank, on every rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def open_store(place: Place, prefix: str) -> Any:
    """A client of the store; rank 0 without an agent holds it."""
    master = place.rank == 0 and not place.agent_store and prefix == "profile"
    store = dist.TCPStore(
        place.address, place.port, None, is_master=master, timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    return dist.PrefixStore("profile", store)


def join(place: Place, device: str, timeout: float, ended: Callable[[str], None], wait: float = JOIN_SECONDS) -> Ranks:
    """Meets the other ranks. Raises PlannerError where some do not come, or where the nodes differ."""
    if device == "cuda":
        for key, value in NCCL_SETTINGS.items():
            os.environ.setdefault(key, value)
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())  # srun may show each task its own GPU only
    else:
        torch.set_num_threads(1)
    try:
        store = open_store(place, "profile")
        everyone = _meet(store, place, device, wait)
        watch = Watch(open_store(place, "watch"), place.rank, _hosts(everyone), timeout, ended=ended)
    except dist.DistError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise PlannerError(
            f"rank {place.rank} does not reach the store of rank 0 at {place.address}:{place.port} ({reason})"
        ) from error
    watch.begin()
    with watch.doing("joining the process group", list(range(place.world)), wait):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("control", store), rank=place.rank, world_size=place.world,
            timeout=timedelta(seconds=CONTROL_SECONDS),
        )  # fmt: skip
    local = sum(one["node"] == everyone[0]["node"] for one in everyone)
    return Ranks(
        place=place, device=device, local=local, hosts=watch.hosts, names=[one["name"] for one in everyone],
        watch=watch, timeout=timeout,
    )  # fmt: skip


def _meet(store: Any, place: Place, device: str, wait: float) -> list[dict[str, Any]]:
    """Says in the store where this rank is and reads where the others are."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    mine = {"node": place.node, "host": socket.gethostname(), "name": name}
    store.set(f"here/{place.rank}", json.dumps(mine))
    missing = list(range(place.world))
    until = time.monotonic() + wait
    while missing and time.monotonic() < until:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        time.sleep(0.05 if missing else 0.0)
    if missing:
        raise PlannerError(
            f"{len(missing)} of {place.world} ranks did not come within {wait:g} s: rank "
            f"{', '.join(map(str, missing[:8]))}; look at their machines, and at the address {place.address}:{place.port}"
        )
    everyone = [json.loads(store.get(f"here/{rank}")) for rank in range(place.world)]
    nodes = [one["node"] for one in everyone]
    counts = sorted({nodes.count(node) for node in nodes})
    if len(counts) > 1:
        raise PlannerError(f"the nodes have different numbers of ranks ({counts}); start as many on each")
    if nodes != sorted(nodes):
        raise PlannerError(
            "the ranks are not numbered node by node; start them with torchrun, or srun --distribution=block"
        )
    return everyone


def _hosts(everyone: list[dict[str, Any]]) -> list[str]:
    """Host of each rank; with the node's number where one machine plays several nodes."""
    several = len({one["host"] for one in everyone}) < len({one["node"] for one in everyone})
    return [f"{one['host']} node {one['node']}" if several else str(one["host"]) for one in everyone]

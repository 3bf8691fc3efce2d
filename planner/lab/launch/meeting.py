"""How the ranks of a run find each other and start to watch each other (torch)."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.watch import Watch

JOIN_SECONDS = 120.0
"""How long the ranks wait for each other at the start."""
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}  # fmt: skip
"""Where the user has set nothing: errors end the process, the last collectives are kept for a dump."""


@dataclass(frozen=True, kw_only=True)
class Met:
    """All ranks are there."""

    store: Any
    """The main thread's client of the store."""
    watch: Watch
    """Ends the run when a rank or a link fails; it has begun."""
    names: list[str]
    """Device of each rank."""
    nodes: list[int]
    """Number of the node of each rank."""


def meet(place: Place, device: str, timeout: float, ended: Callable[[str], None], wait: float = JOIN_SECONDS) -> Met:
    """Meets the other ranks. Raises PlannerError where some do not come, or where the nodes differ."""
    if device == "cuda":
        for key, value in NCCL_SETTINGS.items():
            os.environ.setdefault(key, value)
        # By default 480 s: the watch is to see a hang first, and NCCL's own watchdog to end a process that cannot end itself.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(2 * timeout + 60)))
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())  # srun may show each task its own GPU only
    else:
        torch.set_num_threads(1)
    try:
        store = open_store(place, first=True)
        everyone = _meet(store, place, device, wait)
        nodes = [one["node"] for one in everyone]
        several = len({one["host"] for one in everyone}) < len(set(nodes))  # one machine plays several nodes
        hosts = [f"{one['host']} node {one['node']}" if several else one["host"] for one in everyone]
        watch = Watch(open_store(place), place.rank, hosts, timeout, ended=ended)
    except dist.DistError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise PlannerError(
            f"rank {place.rank} does not reach the store of rank 0 at {place.address}:{place.port} ({reason})"
        ) from error
    watch.begin()
    return Met(store=store, watch=watch, names=[one["name"] for one in everyone], nodes=nodes)


def open_store(place: Place, *, first: bool = False) -> Any:
    """A client of the store; without an agent rank 0 holds it, with its ``first`` client."""
    store = dist.TCPStore(
        place.address, place.port, None, is_master=first and place.rank == 0 and not place.agent_store,
        timeout=timedelta(seconds=JOIN_SECONDS), wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    return dist.PrefixStore("planner", store)


def _meet(store: Any, place: Place, device: str, wait: float) -> list[dict[str, Any]]:
    """Says in the store where this rank is and reads where the others are."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    mine = {"node": place.node, "host": socket.gethostname(), "name": name}
    store.set(f"here/{place.rank}", json.dumps(mine))
    missing, until = list(range(place.world)), time.monotonic() + wait
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > until:
            raise PlannerError(
                f"{len(missing)} of {place.world} ranks did not come within {wait:g} s: rank "
                f"{', '.join(map(str, missing[:8]))}; look at their machines, and at the address {place.address}:{place.port}"
            )
        time.sleep(0.05)
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

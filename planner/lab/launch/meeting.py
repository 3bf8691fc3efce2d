"""How the ranks of a run find each other and start to watch each other (torch)."""

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.watch import Watch
from planner.record import record

JOIN_SECONDS = 120.0
"""How long the ranks wait for each other at the start."""
AFTER_FIRST = 3.0
"""Seconds in which the others hear from rank 0, after it has stopped to wait for those that are missing."""
LONGEST_PAUSE = 0.5
"""Seconds between two looks into the store by a rank that waits."""
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_DEBUG": "WARN",
}  # fmt: skip
"""Where the user has set nothing: errors end the process, the last collectives are kept for a dump, NCCL says what is wrong."""
MESH = 64
"""Ranks up to which gloo may connect all with all at the start: eight nodes."""
OPEN_FILES = 256
"""Of a rank besides its connections to the others, which are as many as there are ranks: libraries, devices, the network."""


class UnlikeRanksError(PlannerError):
    """The ranks have different devices. Whoever can do with that finds all of them here, and the store, whose server rank 0
    holds."""

    def __init__(self, sentence: str, everyone: list[dict[str, Any]], store: Any) -> None:
        super().__init__(sentence)
        self.everyone, self.store = everyone, store


@record
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
        torch.cuda.set_device(own_gpu(place, torch.cuda.device_count()))
    else:
        torch.set_num_threads(1)
    allow_connections(place.world)
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
    return dist.PrefixStore(f"planner{place.part}", store)


def own_gpu(place: Place, count: int) -> int:
    """The GPU of a rank, of ``count`` that torch sees: that of its number on the node, or the only one where a launcher shows each
    task its own. Raises PlannerError where there is none for it."""
    if count > place.local_rank:
        return place.local_rank
    if count == 1:
        return 0  # whether another rank has the same is seen when they meet
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise PlannerError(
        f"rank {place.rank} is number {place.local_rank} on its node (from 0), and torch sees {count} GPUs there"
        f"{'' if seen is None else f' with CUDA_VISIBLE_DEVICES={seen}'}: start as many ranks on a node as it has GPUs"
    )


def allow_connections(world: int) -> None:
    """Raises this process's limit of open files as far as it may. Raises PlannerError where it may not go far enough.

    gloo connects every rank with every other when a group forms, at a thousand ranks a million connections through one store
    [pytorch/gloo issue 419]. Above MESH ranks each connects when it first sends: its collectives need some log2 of all
    [torch 2.8, ProcessGroupGloo.hpp; 48 ranks: 11 sockets a rank in place of 48, 2026-11-28]. What the user has set stays.
    """
    if world > MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    needed = world + OPEN_FILES
    if most < needed:
        raise PlannerError(
            f"each of {world} ranks may be connected with every other one and needs about {needed} open files; the limit here is "
            f"{hard}: ulimit -Hn {needed} (or LimitNOFILE of the service that starts the ranks)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _meet(store: Any, place: Place, device: str, wait: float) -> list[dict[str, Any]]:
    """Says in the store where this rank is and reads where the others are.

    Rank 0 looks whether all are there and tells the rest in one key: a thousand ranks that all ask for all would be a million
    questions to one store.
    """
    store.set(f"here/{place.rank}", json.dumps(_mine(place, device)))
    store.add("here", 1)
    until, pause = time.monotonic() + wait, 0.02
    if place.rank:
        while not store.check(["everyone"]):
            if time.monotonic() > until + AFTER_FIRST:
                raise PlannerError(_missing(place, [0], wait))
            time.sleep(pause := min(2.0 * pause, LONGEST_PAUSE))
        said = json.loads(store.get("everyone"))
    else:
        while store.add("here", 0) < place.world and time.monotonic() < until:
            time.sleep(pause := min(2.0 * pause, LONGEST_PAUSE))
        said = _seen_by_first(store, place, wait)
        store.set("everyone", json.dumps(said))
    if isinstance(said, str):
        if not place.rank and not place.agent_store:
            time.sleep(AFTER_FIRST)  # the others read it from this process
        raise PlannerError(said)
    if wrong := _unlike(said):
        raise UnlikeRanksError(wrong, said, store)
    return said


def _mine(place: Place, device: str) -> dict[str, Any]:
    """Where this rank is, and on what."""
    found = {"node": place.node, "host": socket.gethostname(), "name": "CPU", "gpu": ""}
    if device == "cuda":
        card: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"name": card.name, "gpu": str(getattr(card, "uuid", ""))}
    return found


def _seen_by_first(store: Any, place: Place, wait: float) -> list[dict[str, Any]] | str:
    """Where every rank is, or the sentence about what is wrong with that."""
    keys = [f"here/{rank}" for rank in range(place.world)]
    if store.add("here", 0) < place.world:
        return _missing(place, [rank for rank, key in enumerate(keys) if not store.check([key])], wait)
    everyone = [json.loads(one) for one in store.multi_get(keys)]
    nodes = [one["node"] for one in everyone]
    counts = sorted({nodes.count(node) for node in set(nodes)})
    if len(counts) > 1 and not _unlike(everyone):
        return f"the nodes have different numbers of ranks ({counts}); start as many on each"
    if nodes != sorted(nodes):
        return "the ranks are not numbered node by node; start them with torchrun, or srun --distribution=block"
    return _shared(everyone) or everyone


def _missing(place: Place, ranks: list[int], wait: float) -> str:
    return (
        f"{len(ranks)} of {place.world} ranks did not come within {wait:g} s: rank {', '.join(map(str, ranks[:8]))}; look at their "
        f"machines, and at the address {place.address}:{place.port}"
    )


def _unlike(everyone: list[dict[str, Any]]) -> str:
    """The sentence about ranks on different devices, of which one profile or plan says nothing; "" where there are none."""
    first: dict[str, int] = {}
    for rank, one in enumerate(everyone):
        first.setdefault(one["name"], rank)
    if len(first) == 1:
        return ""
    where = [f"rank {rank} ({everyone[rank]['host']}) has {name}" for name, rank in list(first.items())[:4]]
    return f"the ranks have different devices: {', '.join(where)}; start them on machines of one kind"


def _shared(everyone: list[dict[str, Any]]) -> str:
    """The sentence about two ranks on one GPU; "" where there are none. NCCL would end with its own about a duplicate."""
    owners: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(everyone):
        if not one["gpu"]:
            continue
        other = owners.setdefault((one["host"], one["gpu"]), rank)
        if other != rank:
            on_node = sum(each["host"] == one["host"] for each in everyone)
            return (
                f"ranks {other} and {rank} on {one['host']} have the same GPU ({one['name']}, {one['gpu']}): {on_node} ranks were "
                "started there; start as many as it has GPUs, and let the launcher show each rank its own or all of them"
            )
    return ""

"""Ranks on different devices: each kind is profiled by itself, the links between kinds are measured, a cluster file joins them
(torch).

All ranks meet first and find that their devices differ; then those of one kind meet again, as a run of their own on the same store,
and do what ``worker.work`` does. Kinds do not share nodes, so they measure at the same time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner import detect, library
from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.errors import PlannerError, listed
from planner.lab.launch.meeting import UnlikeRanksError
from planner.lab.launch.place import Place
from planner.lab.launch.state import State
from planner.lab.profile.points import Settings
from planner.lab.profile.profile_file import main_dtype, write_profile
from planner.lab.profile.rank_groups import Buffers, Operation
from planner.lab.profile.worker import work
from planner.record import record
from planner.units import KIB, MIB

SIZES = {"cpu": (KIB, 4 * MIB), "cuda": (KIB, 64 * MIB)}
"""Messages between two kinds: one for the latency, one for the bandwidth."""
SAMPLES = 15
LATE = 300.0
"""Seconds that the kinds wait for each other beyond the budget: the points that every profile needs take longer on a slow one."""


@record
class Kind:
    """The ranks of one device."""

    name: str
    """Its profile of the library, else the device's own name as a word."""
    device: str
    """As the driver says it."""
    ranks: tuple[int, ...]
    nodes: int

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return len(self.ranks) // self.nodes


def kinds_of(everyone: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """The kinds in the order of their first ranks. Raises PlannerError where a node has two, or nodes of a kind unequal
    numbers of ranks."""
    found, names = list[Kind](), set[str]()
    for device in dict.fromkeys(one["name"] for one in everyone):
        ranks = tuple(rank for rank, one in enumerate(everyone) if one["name"] == device)
        nodes = [everyone[rank]["node"] for rank in ranks]
        mixed = [one["host"] for one in everyone if one["node"] in nodes and one["name"] != device]
        if mixed:
            raise PlannerError(
                f"{mixed[0]} has {device} and other devices, and a node of a cluster file has one kind; choose with "
                "CUDA_VISIBLE_DEVICES, and profile the kinds one after the other"
            )
        if len({nodes.count(one) for one in nodes}) > 1:
            raise PlannerError(f"the nodes with {device} have different numbers of ranks; start as many on each")
        name = (
            detect.profile_of(device)
            or "-".join("".join(sign if sign.isalnum() else " " for sign in device).lower().split())
            or "device"
        )
        while name in names:
            name = f"{name}-2"
        names.add(name)
        found.append(Kind(name=name, device=device, ranks=ranks, nodes=len(set(nodes))))
    return found


def profile_of_kind(output: str, kind: str) -> str:
    """File of a kind's profile, next to the cluster file."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}-{kind}{path.suffix or '.yaml'}"))


def own_place(place: Place, kind: Kind, everyone: Sequence[Mapping[str, Any]]) -> Place:
    """Where a rank stands among those of its kind; the server of the store stays where it is."""
    nodes = sorted({everyone[rank]["node"] for rank in kind.ranks})
    return replace(
        place, rank=kind.ranks.index(place.rank), world=len(kind.ranks), node=nodes.index(everyone[place.rank]["node"]),
        agent_store=True, part=f"-{kind.name}",
    )  # fmt: skip


def work_by_kind(
    settings: Settings, place: Place, met: UnlikeRanksError, show: Callable[[State], object] | None = None
) -> ClusterFile | None:  # fmt: skip
    """Profiles every kind, measures the links between them; rank 0 writes the cluster file and gets it, the others None.

    Raises PlannerError; ends the process where a rank or link fails.
    """
    if settings.base:
        raise PlannerError(f"--hardware {settings.base} is one profile, and {met}")
    kinds = kinds_of(met.everyone)
    mine = next(one for one in kinds if place.rank in one.ranks)
    own = replace(settings, output=profile_of_kind(settings.output, mine.name))
    begun = time.monotonic()
    work(own, own_place(place, mine, met.everyone), show, lambda: write_profile(own, time.monotonic() - begun))
    links = measure_links(settings, place, kinds, met.store)
    if place.rank:
        return None
    cluster = joined(settings.output, kinds, links)
    text = (
        "# Kinds of nodes as plan profile found them, each with its profile, and the links between them as measured.\n"
    )
    library.write_whole(Path(settings.output), text + library.dump_yaml(cluster.to_dict()))
    return cluster


def joined(output: str, kinds: Sequence[Kind], links: Mapping[tuple[str, str], tuple[float, float]]) -> ClusterFile:
    """The cluster file: a kind per device, a link per pair with what one node of each reaches."""
    return ClusterFile(
        nodes=tuple(
            NodeKind(kind=one.name, hardware=profile_of_kind(output, one.name), count=one.nodes, gpus=one.local)
            for one in kinds
        ),
        links=tuple(
            Link(between=pair, bandwidth=rate, latency=latency, per_node=True)
            for pair, (rate, latency) in links.items()
        ),
    )


# ------------------------------------------------------------------------------------------------ links


def measure_links(
    settings: Settings, place: Place, kinds: Sequence[Kind], store: Any
) -> dict[tuple[str, str], tuple[float, float]]:
    """Bytes/s of a node in one direction and seconds of one message between the first nodes of every pair of kinds.

    As many ranks send at once as the smaller node has: bandwidth of all, latency of the slowest.
        B = n S / (t(S) - t(1 KiB)),  alpha = t(1 KiB)
    """
    backend = "nccl" if settings.device == "cuda" else "gloo"
    limit = timedelta(seconds=settings.budget + LATE)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("links", store), rank=place.rank, world_size=place.world, timeout=limit
    )  # fmt: skip
    try:
        dist.barrier()  # the others may still measure
        return {(a.name, b.name): _link(settings, place, (a, b), backend) for a, b in combinations(kinds, 2)}
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:200]
        names = listed([one.name for one in kinds], "and")
        raise PlannerError(
            f"the links between {names} could not be measured ({reason}); the profiles are written"
        ) from error
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _link(settings: Settings, place: Place, pair: tuple[Kind, Kind], backend: str) -> tuple[float, float]:
    """Bandwidth and latency between the first nodes of two kinds; all ranks call it, and all get the same."""
    count = min(one.local for one in pair)
    small, large = (int(size) for size in SIZES[settings.device])
    buffers, dtype = Buffers(large, settings.device), main_dtype(settings.device)
    mine = None
    for number in range(count):
        ranks = [one.ranks[number] for one in pair]
        group = dist.new_group(ranks, backend=backend)
        mine = group if place.rank in ranks else mine
    found = []
    for size in (small, large):
        operation = Operation("send_recv", size, dtype, mine, buffers) if mine is not None else None
        samples = [_once(operation, settings.device) for _ in range(SAMPLES + 1)][1:]  # the first makes the connection
        every: list[Any] = [None] * place.world
        dist.all_gather_object(every, samples)
        slowest = [max(one[sample] for one in every) for sample in range(SAMPLES)]
        found.append(statistics.median(slowest))
    seconds = max(found[1] - found[0], 1e-9)
    return count * large / seconds, found[0]


def _once(operation: Operation | None, device: str) -> float:
    """Seconds of one message on this rank, from a common start; 0 on ranks that have none."""
    dist.barrier()
    started = time.perf_counter()
    if operation is None:
        return 0.0
    operation.run()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - started

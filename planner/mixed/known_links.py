"""Links between sites: those that the cluster file gives, else what is known of two cloud regions; and changes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.errors import PlannerError, listed, shown
from planner.mixed.mixed_layout import Outer
from planner.mixed.region_links import (
    Machine,
    Region,
    flows_of,
    is_region,
    machine_of,
    region_cap,
    region_of,
    round_trip,
    wide_links,
)
from planner.mixed.wide_links import site_link
from planner.schema import read
from planner.units import GIGA, format_seconds, parse


def linked(cluster: ClusterFile, *, needed: bool = True) -> tuple[ClusterFile, tuple[str, ...]]:
    """The cluster with a link between every two sites, and a sentence for each that was added. Raises PlannerError.

    Sites that are cloud regions (us-east-1, us-central1-a) need none in the file: latency, limit of a node, connections and
    price are those of ``region_links``. Others do, where links are ``needed``; else they stay without one.
    """
    found, notes = list(cluster.links), list[str]()
    for a, b in combinations(cluster.sites, 2):
        try:
            site_link(cluster, a, b)
        except PlannerError:
            if not needed and not (is_region(a) and is_region(b)):
                continue
            link = region_link(cluster, a, b)
            found.append(link)
            speed, both = 8.0 * link.speed() / GIGA, format_seconds(2.0 * link.latency)
            notes.append(
                f"{a} - {b}: no link is given; by what is known of these regions a node reaches {speed:.3g} Gb/s over "
                f"{link.flows} connections, {both} there and back; add it to links to say otherwise"
            )
    return replace(cluster, links=tuple(found)), tuple(notes)


def region_link(cluster: ClusterFile, a: str, b: str) -> Link:
    """The link between two sites that are cloud regions, by what machines of theirs may send. Raises PlannerError."""
    try:
        regions = region_of(a), region_of(b)
    except PlannerError as error:
        raise PlannerError(
            f"the cluster file gives no link between {a} and {b}; add one to links, with its bandwidth and latency, or name sites "
            f"as cloud regions ({error})"
        ) from None
    kinds = [(region, kind) for region, site in zip(regions, (a, b), strict=True) for kind in cluster.nodes if kind.site == site]
    nodes = [(_machine(region, kind), kind.gpus_per_node) for region, kind in kinds]
    return Link(
        between=(a, b), latency=round_trip(a, b) / 2.0, per_node=True, window=wide_links().tcp.window,
        bandwidth=min(region_cap(machine, gpus) for machine, gpus in nodes),
        flows=min(flows_of(machine.provider, gpus) for machine, gpus in nodes),
        price=0.0 if regions[0].name == regions[1].name else max(wide_links().provider(one.provider).price for one in regions),
    )  # fmt: skip


def _machine(region: Region, kind: NodeKind) -> Machine:
    """The provider's type of machine; where that is not known, one with the network of the GPU's profile."""
    hardware, gpus = kind.profile, kind.gpus_per_node
    try:
        return machine_of(region.provider, hardware.name, gpus)
    except PlannerError:
        network = hardware.network_bandwidth * gpus
        return Machine(provider=region.provider, hardware=hardware.name, gpus=gpus, machine="unknown", network=network)


def changed_link(cluster: ClusterFile, text: str) -> ClusterFile:
    """The cluster with another bandwidth, or bandwidth and latency, of a link: ``us-east,us-west=2Gb/s``, ``...=2Gb/s@80ms``.

    Raises PlannerError with how it is written.
    """
    ends, equals, values = text.partition("=")
    names = [one.strip() for one in ends.split(",")]
    bandwidth, at, latency = values.partition("@")
    if not equals or len(names) != 2 or (at and not latency.strip()):
        raise PlannerError(f"--link is {shown(text)}; write it like us-east,us-west=2Gb/s or us-east,us-west=2Gb/s@80ms")
    known = {*cluster.sites, *(one.kind for one in cluster.nodes)}
    for name in names:
        if name not in known:
            raise PlannerError(f"--link names {shown(name)}; the cluster has {listed(sorted(known))}")
    old = next((one for one in cluster.links if set(one.between) == set(names)), None)
    given: dict[str, Any] = {"bandwidth": parse(bandwidth.strip(), "bytes/s", what="--link")}
    if at:
        given["latency"] = parse(latency.strip(), "seconds", what="--link")
    new = replace(old, **given) if old else Link(between=(names[0], names[1]), **given)
    return replace(cluster, links=(new, *(one for one in cluster.links if one is not old)))


def read_outer(text: str) -> Outer:
    """Local updates as ``METHOD:EVERY[:BITS[:FRAGMENTS]]``, like diloco:100:8. Raises PlannerError."""
    method, *numbers = text.split(":")
    if not 1 <= len(numbers) <= 3 or not all(one.isdecimal() for one in numbers):
        raise PlannerError(
            f"--outer is {shown(text)}; write it like diloco:100:8 or streaming_diloco:100:4:24: the method, inner steps between "
            "two averages, bits of a sent number, fragments"
        )
    names = ("every", "bits", "fragments")
    said = {"fragments": 2} if method == "streaming_diloco" else {}
    said |= {name: int(one) for name, one in zip(names, numbers, strict=False)}
    return read(Outer, {"method": method, **said}, "--outer")

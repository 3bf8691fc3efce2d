"""Cluster file: node kinds, the links between kinds and sites, storage, spares; read wherever ``--cluster`` stands.

    nodes:                                   # in rank order
    - {kind: a100, hardware: a100-sxm-80gb, count: 4, gpus: 8, site: us-east, price: 12 USD/h, mtbf: 900 h}
    - {kind: t4, hardware: t4, count: 2, gpus: 4, site: us-west, slowdown: {node-5: 1.4}}
    links:                                   # symmetric: between two sites or two kinds; inside a kind its profile's network
    - {between: [us-east, us-west], bandwidth: 5 Gb/s, latency: 35 ms, flows: 8, price: 0.02 USD/GB}
    storage: {read: 20 GB/s, write: 10 GB/s, per_node: 2 GB/s}
    spares: 1

A file of one kind and one site is the same question as ``--hardware`` and ``--gpus`` (``ClusterFile.uniform``).
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from planner import library, schema
from planner.errors import PlannerError, listed, nearest_first, shown
from planner.hardware import HardwareProfile, load_hardware
from planner.record import record
from planner.schema import Bandwidth, Bytes, Count, HourlyPrice, Name, Rule, Seconds, TrafficPrice, within

SITE = "here"
"""Site of nodes that name none."""
MOST_NODES = 2**18
Slow = Annotated[float, within(0.5, 100.0)]
"""Time of a node over that of its profile, measured."""


def _slowdown(value: Any, where: str) -> dict[str, float]:
    """One factor for all nodes of a kind (stored under its name ``""``), or factors by node."""
    if isinstance(value, dict):
        found: dict[str, float] = schema.value_of(dict[str, Slow], value, where, "")
        return found
    return {"": schema.value_of(Slow, value, where, "")}


@record
class NodeKind:
    """Equal nodes of one site."""

    kind: Name
    """What tables and flags call them."""
    hardware: Annotated[str, Rule(loose=True)]
    """Profile by library name or path."""
    count: Annotated[int, within(1, MOST_NODES)]
    """Nodes."""
    gpus: Annotated[int, within(0, 4096)] = 0
    """GPUs of a node; 0 = the profile's."""
    site: Name = SITE
    """Region, zone or data centre."""
    price: HourlyPrice | None = None
    """Dollars of one node for an hour; None = the profile's, per GPU."""
    network: Bandwidth | None = None
    """Bytes/s of one GPU's share of its node's network cards, one direction; None = the profile's."""
    slowdown: Annotated[dict[str, float], Rule(reader=_slowdown)] = field(default_factory=dict)
    """Measured time over that of the profile: by node, or of all under ``""``."""
    mtbf: Seconds | None = None
    """Mean time between failures of one node."""
    spot: bool = False
    """The price is that of a node that may be taken away."""

    @cached_property
    def profile(self) -> HardwareProfile:
        """The hardware profile, with the GPUs of a node that the file says."""
        found = load_hardware(self.hardware)
        if self.network is not None:
            found = replace(found, network_bandwidth=self.network)
        if self.gpus in (0, found.gpus_per_node):
            return found
        domain = found.scale_up_domain
        own = domain > found.gpus_per_node  # a rack's NVLink reaches further than its hosts
        return replace(found, gpus_per_node=self.gpus, scale_up_domain=domain if own else min(domain, self.gpus))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""
        return self.gpus or int(self.profile.gpus_per_node)

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes of the kind."""
        return self.count * self.gpus_per_node

    def usd_per_hour(self) -> float | None:
        """Dollars of one GPU for an hour; None where neither the file nor the profile says it."""
        if self.price is not None:
            return self.price / self.gpus_per_node
        return self.profile.prices[0].usd_per_hour if self.profile.prices else None


@record
class Link:
    """The link between two sites or two kinds, both directions alike."""

    between: tuple[str, str]
    """Names of two sites, or of two kinds."""
    bandwidth: Bandwidth
    """Bytes/s of the whole link, one direction, all flows together; of one node where ``per_node``."""
    latency: Seconds = 0.0
    """One way."""
    flows: Count = 1
    """TCP connections of one node to one of the other end."""
    window: Bytes | None = None
    """Bytes in flight of one flow; with it a flow is no faster than window / round-trip time."""
    price: TrafficPrice = 0.0
    """Dollars per byte that leaves a site."""
    per_node: bool = False
    """The bandwidth is that of each node's network card, not of one link that all nodes share."""

    def speed(self, nodes: int = 1) -> float:
        """Bytes/s, one direction, that ``nodes`` nodes of each end get together when each of them sends to one of the other end.

        The link's bandwidth, or that of each node's card, and no more than all their windows per round-trip time:
        flows nodes window / (2 latency). [RFC 7323, section 1.1]
        """
        whole = self.bandwidth * (nodes if self.per_node else 1)
        if self.window is None or self.latency <= 0:
            return whole
        return min(whole, self.flows * nodes * self.window / (2.0 * self.latency))


@record
class Storage:
    """Where checkpoints lie."""

    read: Bandwidth
    """Bytes/s of the whole storage."""
    write: Bandwidth
    """Bytes/s of the whole storage."""
    per_node: Bandwidth | None = None
    """Bytes/s that one node reaches; None = the whole."""
    latency: Seconds = 0.0
    """Time until the first byte."""


@record
class ClusterFile:
    """Everything that a job may run on."""

    nodes: tuple[NodeKind, ...]
    """In rank order."""
    links: tuple[Link, ...] = ()
    """Between kinds and sites; two kinds of one site without a link: the slower of their networks."""
    storage: Storage | None = None
    """None = not known."""
    spares: Annotated[int, within(0, MOST_NODES)] = 0
    """Nodes that wait for a failure, further to those of ``nodes``."""

    def __post_init__(self) -> None:
        kinds = [one.kind for one in self.nodes]
        if not kinds:
            raise PlannerError("nodes is empty; give at least one kind of node")
        if twice := sorted({one for one in kinds if kinds.count(one) > 1}):
            raise PlannerError(f"the kind {shown(twice[0])} stands twice in nodes; give each its own name")
        if both := sorted(set(kinds) & set(self.sites) - {SITE}):
            raise PlannerError(f"{shown(both[0])} names a kind and a site; links would not know which is meant")
        if self.num_nodes > MOST_NODES:
            raise PlannerError(f"the cluster has {self.num_nodes} nodes; at most {MOST_NODES} are planned")
        names = {*kinds, *self.sites}
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise PlannerError(f"a link is between {shown(end)} and another; known: {listed(nearest_first(end, names))}")
            if link.between[0] == link.between[1]:
                raise PlannerError(f"a link is between {shown(link.between[0])} and itself")
            if link.bandwidth <= 0:
                raise PlannerError(f"the link between {listed(link.between)} has no bandwidth")
        for one in self.nodes:
            for name in one.slowdown:
                if name and name not in self.names_of(one.kind):
                    raise PlannerError(
                        f"{one.kind}: slowdown names {shown(name)}; its nodes are {listed(self.names_of(one.kind)[:4])}"
                        + (", ..." if one.count > 4 else "")
                    )

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds, spares not counted."""
        return sum(one.count for one in self.nodes)

    @property
    def num_gpus(self) -> int:
        """GPUs of all kinds."""
        return sum(one.num_gpus for one in self.nodes)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites in the order in which they appear."""
        return tuple(dict.fromkeys(one.site for one in self.nodes))

    @property
    def uniform(self) -> NodeKind | None:
        """The only kind, where nothing differs between nodes: the job is then one of ``--hardware`` and ``--gpus``."""
        only = self.nodes[0]
        return only if len(self.nodes) == 1 and not only.slowdown else None

    def names_of(self, kind: str) -> tuple[str, ...]:
        """Names of the nodes of a kind: node-0, node-1, ... through the whole file."""
        start = 0
        for one in self.nodes:
            if one.kind == kind:
                return tuple(f"node-{number}" for number in range(start, start + one.count))
            start += one.count
        raise PlannerError(f"the cluster has no kind {shown(kind)}; it has {listed([one.kind for one in self.nodes])}")

    def node_kind(self, kind: str) -> NodeKind:
        """A kind by name. Raises PlannerError."""
        found = next((one for one in self.nodes if one.kind == kind), None)
        if found is None:
            raise PlannerError(f"the cluster has no kind {shown(kind)}; it has {listed([one.kind for one in self.nodes])}")
        return found

    def slowdowns(self, kind: str) -> tuple[float, ...]:
        """Measured time over that of the profile, of each node of a kind."""
        factors = self.node_kind(kind).slowdown
        return tuple(factors.get(name, factors.get("", 1.0)) for name in self.names_of(kind))

    def link(self, a: str, b: str) -> Link | None:
        """The link between two kinds: their own, else that of their sites; None where the file gives neither."""
        ends = ({a, b}, {self.node_kind(a).site, self.node_kind(b).site})
        return next((one for pair in ends for one in self.links if set(one.between) == pair), None)

    def without(self, kind: str) -> ClusterFile:
        """The cluster without one kind. Raises PlannerError where nothing would be left."""
        self.node_kind(kind)
        left = tuple(one for one in self.nodes if one.kind != kind)
        if not left:
            raise PlannerError(f"without {kind} no node is left")
        known = {name for one in left for name in (one.kind, one.site)}
        return replace(self, nodes=left, links=tuple(one for one in self.links if set(one.between) <= known))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``read_cluster`` takes back."""
        return schema.plain_fields(self)


def read_cluster(path: Path) -> ClusterFile:
    """The cluster of a file. Raises PlannerError that names file, key and value."""
    data = library.read_yaml(path)
    return schema.read(ClusterFile, data, path.name, hint="; see the example in docs/clusters.md")

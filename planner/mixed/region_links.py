"""Links between cloud regions, from what is known before anything runs: where they lie, and what a machine may send.

The round-trip time follows the fibre: great circles between the towns where cables land, and on land to the data centre, the
shortest way. The bandwidth is the least of the machine's network, of the provider's limit between regions, and of the windows
of all connections over the round-trip time (``wide_links``). Regions, cables and limits are data: profiles/wide_links.yaml.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Annotated

from planner import library, schema
from planner.errors import PlannerError, listed, nearest_first, shown
from planner.mixed.wide_links import path_bandwidth
from planner.record import record
from planner.schema import Bandwidth, Bytes, Count, Name, Number, Positive, Seconds, TrafficPrice, within

LIGHT = 299_792_458.0
"""Metres per second."""
GROUP_INDEX = 1.468
"""Of single-mode fibre at 1550 nm: light is that much slower in it. [ITU-T G.652; datasheet of Corning SMF-28: 1.4682]"""
EARTH = 6_371_000.0
"""Mean radius of the Earth in metres. [IUGG]"""
Place = tuple[Number, Number]
"""Degrees north and east."""


@record
class Region:
    """A region of a cloud provider."""

    name: Name
    provider: Name
    place: Name
    """Town that the provider names."""
    at: Place
    land: Name
    """Land mass: fibre between two places of one does not need a cable under the sea."""
    also: tuple[Name, ...] = ()
    """Other names that documents use for it."""


@record
class Landing:
    """A town where cables under the sea land."""

    name: Name
    at: Place
    land: Name


@record
class Pair:
    """One transfer between two regions by machines of which nothing is known."""

    cap: Bandwidth
    window: Bytes
    """Bytes under way, all connections of the transfer together."""


@record
class Between:
    """The most that one machine sends to another region, all its connections together."""

    cap: Bandwidth | None = None
    share: Annotated[float, within(0, 1)] | None = None
    """Part of the machine's bandwidth."""
    least: Bandwidth = 0.0
    """At least that much where the share is less."""
    flow: Bandwidth | None = None
    """Of one connection."""


@record
class Provider:
    """A cloud provider's limits."""

    name: Name
    sockets: Count
    """TCP connections of one NCCL process to another."""
    between: Between = Between()
    pair: Pair | None = None
    price: TrafficPrice = 0.0
    """Dollars per byte between two regions of one continent."""


@record
class Machine:
    """A type of machine with GPUs."""

    provider: Name
    hardware: Name
    gpus: Count
    machine: Name
    network: Bandwidth
    """Documented, one direction, to machines of the same region."""


@record
class Path:
    """Length of a fibre path over the great circle, and what both ends add."""

    sea: Positive
    land: Positive
    ends: Seconds


@record
class Reach:
    """Share of a machine's bandwidth that NCCL gets over TCP."""

    one: Positive
    """With one process of the machine."""
    several: Positive


@record
class Tcp:
    """Connections of an untuned machine."""

    window: Bytes
    reach: Reach


@record
class WideLinks:
    """profiles/wide_links.yaml."""

    path: Path
    tcp: Tcp
    providers: tuple[Provider, ...]
    machines: tuple[Machine, ...]
    regions: tuple[Region, ...]
    landings: tuple[Landing, ...]
    cables: tuple[tuple[Name, Name], ...]

    def provider(self, name: str) -> Provider:
        """Limits of a provider. Raises PlannerError."""
        found = next((one for one in self.providers if one.name == name), None)
        if found is None:
            raise PlannerError(f"no provider is called {shown(name)}; known: {listed([one.name for one in self.providers])}")
        return found


@cache
def wide_links() -> WideLinks:
    """The shipped data."""
    file = library.profiles_directory() / "wide_links.yaml"
    return schema.read(WideLinks, library.read_yaml(file), file.name)


def region_of(name: str) -> Region:
    """The region that a name means: its own, another of its names, or that of one of its zones (us-central1-a, us-east-1a).

    Raises PlannerError with the nearest names.
    """
    plain = name.strip().lower().replace(" ", "-").replace("_", "-")
    zone = re.sub(r"(?<=\d)-?[a-f]$", "", plain)
    for text in (plain, zone):
        for one in wide_links().regions:
            if text in (one.name, *one.also):
                return one
    known = [one.name for one in wide_links().regions]
    raise PlannerError(f"no cloud region is called {shown(name)}; known: {listed(nearest_first(name, known)[:6])}, ...")


def is_region(name: str) -> bool:
    """Whether a name means a region that is known."""
    try:
        return bool(region_of(name))
    except PlannerError:
        return False


def great_circle(a: Place, b: Place) -> float:
    """Metres between two places over the sphere. [haversine formula; Sinnott 1984]"""
    (north, east), (other, further) = ((math.radians(one[0]), math.radians(one[1])) for one in (a, b))
    half = math.sin((north - other) / 2) ** 2 + math.cos(north) * math.cos(other) * math.sin((east - further) / 2) ** 2
    return 2.0 * EARTH * math.asin(math.sqrt(half))


@cache
def _landing_lengths() -> dict[tuple[str, str], float]:
    """Metres of fibre between all pairs of landings, over cables and over land (Floyd and Warshall)."""
    data = wide_links()
    places = {one.name: one for one in data.landings}
    cables = {frozenset(pair) for pair in data.cables}
    if unknown := sorted({name for pair in cables for name in pair} - set(places)):
        raise PlannerError(f"wide_links.yaml: a cable ends at {shown(unknown[0])}, which is no landing")
    metres = dict[tuple[str, str], float]()
    for a in data.landings:
        for b in data.landings:
            straight = great_circle(a.at, b.at)
            by_sea = straight * data.path.sea if {a.name, b.name} in cables else math.inf
            metres[a.name, b.name] = min(by_sea, straight * data.path.land if a.land == b.land else math.inf)
    for over in places:
        for start in places:
            for end in places:
                metres[start, end] = min(metres[start, end], metres[start, over] + metres[over, end])
    return metres


def fibre_length(a: Region, b: Region) -> float:
    """Metres of the shortest fibre between two regions. Raises PlannerError where no cable joins them."""
    data = wide_links()
    direct = great_circle(a.at, b.at) * data.path.land if a.land == b.land else math.inf
    ends = [
        [(one.name, great_circle(region.at, one.at) * data.path.land) for one in data.landings if one.land == region.land]
        for region in (a, b)
    ]
    between = _landing_lengths()
    over = min((x + between[m, n] + y for m, x in ends[0] for n, y in ends[1]), default=math.inf)
    found = min(direct, over)
    if not math.isfinite(found):
        raise PlannerError(f"wide_links.yaml has no cable between {a.land} and {b.land}; give the latency of the link")
    return found


def round_trip(a: str, b: str) -> float:
    """Seconds there and back between two regions: 2 n d / c over the shortest fibre d, and what the ends add.

    0 where both names are of one region: its zones lie within a millisecond of each other.
    """
    first, second = region_of(a), region_of(b)
    if first.name == second.name:
        return 0.0
    return 2.0 * fibre_length(first, second) * GROUP_INDEX / LIGHT + wide_links().path.ends


def machine_of(provider: str, hardware: str, gpus: int) -> Machine:
    """The type of machine of a provider with so many GPUs of a kind. Raises PlannerError."""
    same = [one for one in wide_links().machines if (one.provider, one.hardware) == (provider, hardware)]
    found = next((one for one in same if one.gpus == gpus), None)
    if found is None:
        sizes = listed([str(one.gpus) for one in same]) if same else "none"
        raise PlannerError(f"no machine of {provider} with {gpus} x {hardware} is known (known sizes: {sizes}); give its bandwidth")
    return found


def machine_bandwidth(machine: Machine, processes: int) -> float:
    """Bytes/s between two such machines of one region, ``processes`` NCCL processes of each sending over TCP."""
    reach = wide_links().tcp.reach
    return machine.network * (reach.one if processes == 1 else reach.several)


def region_cap(machine: Machine, processes: int) -> float:
    """Bytes/s that a machine may send to another region, windows aside: the least of its network and the provider's limits."""
    between = wide_links().provider(machine.provider).between
    caps = [machine_bandwidth(machine, processes)]
    if between.cap is not None:
        caps.append(between.cap)
    if between.share is not None:
        caps.append(max(between.share * machine.network, between.least))
    if between.flow is not None:
        caps.append(flows_of(machine.provider, processes) * between.flow)
    return min(caps)


def flows_of(provider: str, processes: int) -> int:
    """TCP connections between two machines of a provider, NCCL in so many processes of each."""
    return processes * wide_links().provider(provider).sockets


def region_bandwidth(machine: Machine, processes: int, rtt: float) -> float:
    """Bytes/s between two such machines of two regions: ``region_cap``, or all windows over the round-trip time."""
    flows = flows_of(machine.provider, processes)
    return float(path_bandwidth(region_cap(machine, processes), flows, wide_links().tcp.window, rtt))


def pair_bandwidth(provider: str, rtt: float) -> float:
    """Bytes/s of one transfer between two regions by machines of which nothing is known. Raises PlannerError."""
    pair = wide_links().provider(provider).pair
    if pair is None:
        raise PlannerError(f"nothing is known of transfers between regions of {provider} without the type of machine")
    return float(path_bandwidth(pair.cap, 1, pair.window, rtt))

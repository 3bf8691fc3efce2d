"""Which collectives are measured: operations, groups of ranks, sizes; no torch.

A pattern divides all ranks into equal groups of ``n`` ranks that are ``stride`` apart; all its groups run at the same time,
as the tensor, data or pipeline groups of a training job do, and the slowest rank of all counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from planner import units
from planner.cluster import strides
from planner.cost.parameters import count_parameters
from planner.curves import COLLECTIVES
from planner.lab.profile.points import Point
from planner.layout import NAMES, Layout
from planner.model import load_model

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "reduce", "gather",
    "scatter", "send_recv_ring", "send_recv_both",
)  # fmt: skip
"""Everything that is measured; those that a profile's curves need come first. ``send_recv`` is one way inside each pair,
``send_recv_both`` both ways at once, ``send_recv_ring`` every rank to its next."""
PAIRS = ("send_recv", "send_recv_both")  # Operations of two ranks
ADDING = ("all_reduce", "reduce_scatter", "reduce")
"""Operations whose time depends on the type of the elements, not only on their bytes."""
ASKED = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "cp": ("send_recv", "all_gather", "reduce_scatter", "all_to_all"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "pp": ("send_recv",),
    "ep": ("all_to_all",),
    "edp": ("all_reduce", "all_gather", "reduce_scatter"),
}
"""What a training job runs in the groups of each kind of parallelism."""
OVERLAPPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that trainers run while they compute."""
FORMS: dict[str, tuple[str, ...]] = {
    "eager": (*OVERLAPPED, "send_recv"), "graph": (*OVERLAPPED, "send_recv"),
    "in_place": ("all_gather", "reduce_scatter"), "no_nvls": ("all_reduce", "all_gather", "reduce_scatter"),
}  # fmt: skip
"""Other ways to run a collective, on a GPU: launched by a host while it is timed; from a CUDA graph; its input a part of its result
or the other way round; on rings and trees instead of in the switch. torch has all_reduce, broadcast and reduce in place only, the
others out of place where nothing else is said."""
SMALLEST = units.KIB
CAP = {"cpu": 16.0 * units.MIB, "cuda": units.GIB}
"""Largest buffer, bytes. Beyond this the bus bandwidth is flat on every fabric whose sweep is in the library, and a CPU needs
seconds per run."""
SEQUENCE = 8192
DTYPE_BYTES = {"fp32": 4, "bf16": 2}


def factor(op: str, n: int) -> float:
    """Bus bandwidth over algorithm bandwidth S / t.  [nccl-tests, PERFORMANCE.md]

    2 (n-1)/n all_reduce; (n-1)/n all_gather, reduce_scatter, all_to_all, gather, scatter; 1 broadcast, reduce, send_recv.
    An all_reduce counts 2 (n-1)/n also where a switch adds (NVLS, SHARP), for which the same page has (n-1)/(n+1): a job does not
    see which algorithm NCCL took. Its bus bandwidth may then exceed the link; times do not depend on it.
    S: the reduced or broadcast tensor, the gathered result, the whole input of a scatter or exchange.
    """
    if op in ("broadcast", "reduce", *PAIRS, "send_recv_ring"):
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (n - 1) / n


@dataclass(frozen=True, kw_only=True, order=True)
class Pattern:
    """Groups of ``n`` ranks, ``stride`` apart, that fill the world."""

    n: int  # Ranks of a group
    stride: int  # Distance between neighbours of a group

    def groups(self, world: int) -> list[list[int]]:
        """The ranks of every group: blocks of n stride ranks, inside a block every stride-th; ranks beyond the last block idle."""
        block = self.n * self.stride
        return [
            [base + offset + self.stride * i for i in range(self.n)]
            for base in range(0, world // block * block, block)
            for offset in range(self.stride)
        ]

    def per_node(self, local: int) -> int:
        """Ranks of a group that share a node of ``local`` ranks."""
        return max(1, min(self.n, local // self.stride))

    def nodes(self, local: int) -> int:
        """Nodes of a group."""
        return math.ceil(self.n / self.per_node(local))


def doubling(limit: int) -> list[int]:
    """2, 4, ... up to the limit, and the limit itself."""
    powers = [2**i for i in range(1, limit.bit_length()) if 2**i <= limit]
    return sorted({*powers, *([limit] if limit > 1 else [])})


def plain_patterns(world: int, local: int) -> list[Pattern]:
    """Neighbours inside a node; one rank per node; whole nodes: what the curves of a profile are made of."""
    found = {Pattern(n=n, stride=1) for n in doubling(min(local, world))}
    for n in doubling(world // local):
        found |= {Pattern(n=n, stride=local), Pattern(n=n * local, stride=1)}
    return sorted(found, key=lambda one: (one.nodes(local), one.stride, one.n))


def asked_patterns(world: int) -> dict[Pattern, tuple[str, ...]]:
    """Groups that every division of the world into tp, cp, dp, pp and ep forms under every rank order, and what runs in them."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    rows = [
        (tp, cp, world // (tp * cp * pp), pp, ep, order)
        for tp, cp, pp, ep, order in product(divisors, divisors, divisors, divisors, NAMES["order"])
        if world % (tp * cp * pp) == 0 and (world // pp) % ep == 0
    ]
    tp, cp, dp, pp, ep, order = (np.array(column) for column in zip(*rows, strict=True))
    distances = strides(Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order=order))
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "edp": world // (pp * ep)}
    found: dict[Pattern, set[str]] = {}
    for kind, ops in ASKED.items():
        ns, apart = np.broadcast_arrays(sizes[kind], np.asarray(distances[kind]))
        for n, stride in set(zip(ns.tolist(), apart.tolist(), strict=True)):
            if n > 1 and n * stride <= world:
                found.setdefault(Pattern(n=n, stride=int(stride)), set()).update(ops)
    return {pattern: tuple(op for op in OPERATIONS if op in found[pattern]) for pattern in sorted(found)}


def sizes(largest: float, smallest: float = SMALLEST) -> list[int]:
    """Buffer sizes in bytes, one per octave, up to the first that is not below ``largest``."""
    count = max(1, math.ceil(math.log2(max(largest / smallest, 2.0))))
    return [int(smallest) * 2**i for i in range(count + 1)]


def coarse_first(count: int) -> list[list[int]]:
    """0 .. count - 1 in rounds: the ends and the middle, then what halves every gap: any budget gives curves over all sizes."""
    known = sorted({0, (count - 1) // 2, count - 1})
    found = [known]
    while len(known) < count:
        between = [(a + b) // 2 for a, b in pairwise(known) if b - a > 1]
        found.append(between)
        known = sorted([*known, *between])
    return found


def largest_buffer(models: Sequence[str], device: str) -> float:
    """Bytes: the weights of one layer in bf16 (what is gathered or reduced at once), or the activations of one sequence.

    max over models of 2 max(parameters of a layer, s h), at most CAP. Without a model: CAP.
    """
    wanted = []
    for model in map(load_model, models):
        counts = count_parameters(model)
        layer = counts.attention_sharded + max(counts.mlp_sharded, counts.expert * model.num_experts)
        wanted.append(2.0 * max(layer, float(min(SEQUENCE, model.max_sequence_length)) * model.hidden_size))
    return min(max(wanted, default=CAP[device]), CAP[device])


def collective_points(world: int, local: int, largest: float, *, main: str, other: str | None) -> list[Point]:
    """Every collective to measure: operations of the curves in the plain patterns with elements of type ``main``; the groups of
    layouts; the other operations; the adding operations in ``other``. In each of these rounds sizes come from coarse to fine."""
    plain = plain_patterns(world, local)
    rest = tuple(op for op in OPERATIONS if op not in COLLECTIVES)
    rounds: list[tuple[str | None, dict[Pattern, tuple[str, ...]]]] = [
        (main, dict.fromkeys(plain, COLLECTIVES)),
        (main, {pattern: ops for pattern, ops in asked_patterns(world).items() if pattern not in plain}),
        (main, dict.fromkeys(plain, rest)),
        (other, dict.fromkeys(plain, ADDING)),
    ]
    octaves = sizes(largest)
    found = (
        collective_point(op, pattern, octaves[place], dtype, local, weight=1.0 / 4**number)
        for number, (dtype, entries) in enumerate(rounds)
        if dtype
        for turn, places in enumerate(coarse_first(len(octaves)))
        # There and back: groups that are still formed come first.
        for pattern, ops in list(entries.items())[:: -1 if turn % 2 else 1]
        for op in ops
        if not (op in PAIRS and pattern.n != 2) and not (op == "send_recv_ring" and pattern.n == 2)
        for place in places
    )
    return list(dict.fromkeys(found))


def largest_patterns(world: int, local: int) -> list[Pattern]:
    """The largest group of a node and, on several, one rank per node."""
    patterns = [Pattern(n=doubling(local)[-1], stride=1)] if local > 1 else []
    return [*patterns, *([Pattern(n=world // local, stride=local)] if world > local else [])]


def overlap_points(world: int, local: int, largest: int, dtype: str, weight: float) -> list[Point]:
    """Both directions for each collective, in the largest group of a node and, on several, with one rank per node."""
    return [
        Point.of("overlap", weight=weight, of=of, **collective_point(op, one, largest, dtype, local).values)
        for one in largest_patterns(world, local) for op in OVERLAPPED for of in ("gemm", "collective")
    ]  # fmt: skip


def form_points(world: int, local: int, octaves: Sequence[int], dtype: str, weight: float) -> list[Point]:
    """The forms of collectives at five sizes, where ``overlap_points`` are; those in the switch inside a node only."""
    places = sorted({place for some in coarse_first(len(octaves))[:2] for place in some})
    found = []
    for form, ops in FORMS.items():
        for one in largest_patterns(world, local):
            pairs = Pattern(n=2, stride=one.stride)
            for op, place in product(ops, places):
                values = collective_point(op, pairs if op in PAIRS else one, octaves[place], dtype, local).values
                if form != "no_nvls" or values["nodes"] == 1:
                    found.append(Point.of("collective_form", weight=weight, form=form, **values))
    return found


def collective_point(op: str, pattern: Pattern, size: int, dtype: str, local: int, *, weight: float = 0.0) -> Point:
    """The point of one collective."""
    return Point.of(
        "collective", weight=weight, op=op, n=pattern.n, stride=pattern.stride, size=size, dtype=dtype,
        per_node=pattern.per_node(local), nodes=pattern.nodes(local),
    )  # fmt: skip


def pattern_of(point: Point) -> Pattern:
    """The pattern of a collective's or overlap's point."""
    return Pattern(n=point["n"], stride=point["stride"])


def in_words(point: Point) -> str:
    """For a person: ``all_reduce of 4 MiB fp32 in groups of 4 ranks, 1 apart``."""
    if point.family not in ("collective", "overlap", "collective_form"):
        return point.label
    size = units.format_bytes(float(point["size"]))
    apart = f", {point['stride']} apart" if point["stride"] != 1 else ""
    other = {"gemm": "GEMMs during ", "collective": "overlapped "}.get(str(point.values.get("of")), "")
    form = f" ({str(point['form']).replace('_', ' ')})" if "form" in point.values else ""
    return f"{other}{point['op']}{form} of {size} {point['dtype']} in groups of {point['n']} ranks{apart}"

"""What the answers to a failure need to know of a job, whatever kind of plan it has: how often its nodes fail, and how it stops,
starts and goes on with fewer of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from planner.arrays import Floats
from planner.assumption import Assumption
from planner.elastic.checkpoints import SaveTimes
from planner.elastic.failure_rates import NodeMtbf
from planner.elastic.spares import in_repair, short_of
from planner.record import record

UNLIKELY = 1e-7
"""States of the nodes that are rarer count as no work."""


@record
class FailingNodes:
    """Equal nodes of a job."""

    kind: str
    """Of the cluster file; the hardware where there is one kind."""
    count: int
    """That the plan runs on."""
    mtbf: NodeMtbf
    """Of one of them."""
    repair: float
    """Seconds until a failed one is back."""
    spares: int = 0
    """More of them, which wait."""
    usd_per_hour: float | None = None
    """Of one node; None where no price is known."""
    spot: bool = False
    """The provider may take them away."""

    @property
    def rate(self) -> float:
        """Failures a second of all of them."""
        return self.count / self.mtbf.seconds

    def missing(self) -> Floats:
        """P(j of them are missing), j = 0, 1, ..."""
        return short_of(in_repair(self.count, self.mtbf.seconds, self.repair), self.spares)


@record
class Failures:
    """How often the nodes of a job fail, by kind; kinds fail independently."""

    kinds: tuple[FailingNodes, ...]

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return sum(one.count for one in self.kinds)

    @property
    def spares(self) -> int:
        """Nodes that wait."""
        return sum(one.spares for one in self.kinds)

    @property
    def mtbf(self) -> float:
        """Seconds between failures of the job: 1 / sum_k (n_k / M_k)."""
        return 1.0 / sum(one.rate for one in self.kinds)

    @property
    def node_mtbf(self) -> float:
        """Seconds between failures of one node, mean of all: nodes x M."""
        return self.nodes * self.mtbf

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars of all nodes, spares too; None without a price of one kind."""
        prices = [(one.count + one.spares, one.usd_per_hour) for one in self.kinds]
        return None if any(usd is None for _, usd in prices) else sum(count * (usd or 0.0) for count, usd in prices)

    def present(self) -> float:
        """P(no node is missing)."""
        return float(np.prod([one.missing()[0] for one in self.kinds]))

    def states(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Numbers of missing nodes by kind with their probability; the product over kinds, without those that are UNLIKELY."""
        each = [[(j, float(p)) for j, p in enumerate(one.missing()) if p > UNLIKELY or j == 0] for one in self.kinds]
        for state in itertools.product(*each):
            chance = float(np.prod([p for _, p in state]))
            if chance > UNLIKELY or not any(j for j, _ in state):
                yield tuple(j for j, _ in state), chance

    def scaled(self, *, mtbf: float = 1.0, nodes: int = 1) -> Failures:
        """The same with so many times the time between failures of a node, or with so many times the nodes."""
        return Failures(kinds=tuple(
            replace(one, count=one.count * nodes, mtbf=replace(one.mtbf, seconds=one.mtbf.seconds * mtbf)) for one in self.kinds
        ))  # fmt: skip

    def covered(self) -> Failures:
        """The same with so many spares that no node is ever missing."""
        return Failures(kinds=tuple(replace(one, repair=0.0) for one in self.kinds))


def only(kind: int, count: int, kinds: int) -> tuple[int, ...]:
    """Missing nodes by kind where ``count`` of one kind are missing."""
    return tuple(count * (number == kind) for number in range(kinds))


@record
class Groups:
    """A job as replica groups that share no states."""

    number: int = 0
    """0 = it cannot be."""
    step_time: float = 0.0
    """Seconds of a step then."""
    join: float = 0.0
    """Seconds until a new group has the states of a peer."""
    why_not: str = ""
    """Why there are none."""


@record
class Rerouting:
    """A job whose ranks do the work of peers that failed."""

    rate: Callable[[int], float] | None = None
    """Rate with some nodes missing over that of all, 0 where a stage has no peer left; None = it cannot be."""
    why_not: str = ""
    """Why not."""


class FailingJob(Protocol):
    """A plan with its surroundings, as the answers to a failure see it."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def machines(self) -> str:
        """GPUs in words: ``64 x h100-sxm``."""

    @property
    def layout_in_words(self) -> str:
        """The layout."""

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""

    @property
    def times(self) -> SaveTimes:
        """What a save and a load take."""

    @property
    def start(self) -> Mapping[str, float]:
        """Seconds of a new start, in parts: detection, processes, communicators, planning, load, warm-up."""

    def failures(self, repair: float | None = None) -> Failures:
        """How often its nodes fail; ``repair``: seconds until one is back, None = as published, else a day."""

    def speed(self, missing: tuple[int, ...]) -> float:
        """Rate without some nodes of each kind over that of all: of the best plan of what is left."""

    def groups(self) -> Groups:
        """The most replica groups that hold the states by themselves."""

    def rerouting(self) -> Rerouting:
        """What its peers can do."""

    def assumptions(self) -> tuple[Assumption, ...]:
        """What the user did not say."""

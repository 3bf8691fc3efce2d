"""Candidates cut exactly in the order of their bounds, until no other can be faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planner.arrays import Floats, NDArray
from planner.mixed.mixed_candidates import Found, layouts_of
from planner.mixed.mixed_columns import Columns, sharpened
from planner.mixed.mixed_space import Space
from planner.record import record

CUTS = 1500
"""Candidates that are cut exactly, at most; what is left out then is said with its bound."""
EACH = 3
"""Candidates of every set of kinds that are cut first."""
FEW = 100
"""The same of those that use several kinds and cannot be faster than one kind alone."""
PIECE = 512
"""Rows of which the best are a set's first candidates, if enough of them are below the limit."""


@record
class InOrder:
    """What came of some candidates."""

    kept: list[Found]
    """The best, in closed form."""
    bound: float
    """Of those that were not cut."""


@dataclass
class _Set:
    """Candidates of one set of kinds in one space, and what is known of them."""

    space: Space
    columns: Columns
    bound: Floats
    sharp: NDArray[np.bool_]
    cut: NDArray[np.bool_]
    found: list[Found] = field(default_factory=list)

    @property
    def least(self) -> float:
        """Bound of all that were not cut."""
        return float(np.where(self.cut, np.inf, self.bound).min(initial=np.inf))

    def sharpen(self, rows: NDArray[np.intp]) -> None:
        """Bounds with memory, where they are not known."""
        rows = rows[~self.sharp[rows]]
        if len(rows):
            self.bound[rows] = np.maximum(self.bound[rows], sharpened(self.space, self.columns, rows))
            self.sharp[rows] = True

    def first(self, limit: float) -> NDArray[np.intp]:
        """The most promising rows below a limit that are not cut, as many as are cut first of every set."""
        ranked = np.argsort(self.bound, kind="stable")
        ranked = ranked[(self.bound[ranked] < limit) & ~self.cut[ranked]]
        start, end = 0, PIECE
        while start < len(ranked):
            self.sharpen(ranked[start:end])
            left = np.flatnonzero(self.bound[ranked[:end]] < limit)
            if len(left) >= EACH:
                some = ranked[left[left < PIECE * (left[EACH - 1] // PIECE + 1)]]
                return np.asarray(some[np.argsort(self.bound[some], kind="stable")][:EACH])
            start, end = end, 2 * end  # the more of them are ruled out, the more together
        return ranked[self.bound[ranked] < limit][:EACH]

    def make(self, row: int, below: float, near: float) -> None:
        """Cut one of them."""
        self.cut[row] = True
        self.found += layouts_of(self.space, self.columns.row(row), below, near)


class BestFirst:
    """All candidates of a search. What one call of ``run`` cut is known to the next."""

    def __init__(self, columns: list[tuple[Space, Columns]], wanted: int) -> None:
        """``wanted``: how many layouts are kept."""
        self.wanted = wanted
        self.sets = []
        for space, one in columns:
            none = np.zeros(len(one.bound), dtype=bool)
            self.sets.append(_Set(space, one, one.bound.copy(), none, none.copy()))

    @property
    def candidates(self) -> int:
        """Rows of all sets."""
        return sum(len(one.bound) for one in self.sets)

    @property
    def cuts(self) -> int:
        """Rows that were cut."""
        return sum(int(one.cut.sum()) for one in self.sets)

    @property
    def found(self) -> list[Found]:
        """All layouts of those, best first."""
        return sorted((found for one in self.sets for found in one.found), key=lambda found: found.seconds)

    def run(self, suits: Callable[[Columns], bool], gap: float, beaten: float = np.inf) -> InOrder:
        """The best of the sets that suit: the most promising of each, which show what is reached, then all that could be faster by
        more than ``gap``.

        Of candidates that cannot be faster than ``beaten`` seconds a few are cut all the same, to say how far they fall behind.
        """
        sets = sorted((one for one in self.sets if suits(one.columns)), key=lambda one: one.least)

        def kept() -> list[Found]:
            return sorted((found for one in sets for found in one.found), key=lambda found: found.seconds)[: self.wanted]

        def limits() -> tuple[float, float]:
            """Seconds of the last that is kept, and what another would have to take less than."""
            some = kept()
            near = (1.0 - gap) * some[0].seconds if some else np.inf
            return (some[-1].seconds if len(some) >= self.wanted else np.inf), near

        for one in sets:
            below, near = limits()
            if not one.found:
                for row in one.first(near):
                    one.make(int(row), below, near)
        below, near = limits()
        places = list[tuple[float, int, int]]()
        for number, one in enumerate(sets):
            one.sharpen(np.flatnonzero(~one.cut & (one.bound < near)))
            places += [(float(one.bound[row]), number, int(row)) for row in np.flatnonzero(~one.cut & (one.bound < near))]
        for tried, (bound, number, row) in enumerate(sorted(places)):
            if tried >= (FEW if bound >= beaten else CUTS) or bound >= near:
                break
            before = len(sets[number].found)
            sets[number].make(row, below, near)
            if len(sets[number].found) > before:
                below, near = limits()
        least = min((one.least for one in sets), default=np.inf)
        return InOrder(kept=kept(), bound=min(least, near))  # orders of kinds from ``near`` on are not cut

"""Slow members of a set, nodes or GPUs, found by measuring halves of it against each other; no torch, no process.

The whole set reduces together, then its halves at the same time, then theirs, down to pairs: about log2 n rounds, however many
members are slow, as all groups of a round run at once. A pair is slow where it stays behind the faster half of the pairs by more
than they scatter. Which of the two it is, one more round says: each is paired with a member of a pair that is not slow. Who is
slow there too is paired with another of them: a single reading may be chance, or the partner's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

Group = tuple[int, ...]
Measure = Callable[[Sequence[Group]], Sequence[float]]
"""Bandwidth of each group while all run, bytes/s."""
BEHIND = 0.10
"""A group is slow that stays behind by more than this, or by SCATTERS of its fellows' scatter where that is more."""
SCATTERS = 5.0
LARGEST = 0.6
"""However much everything scatters, what stays behind by more than this is slow."""
NORMAL = 1.4826  # Standard deviation over the median absolute deviation of normal samples


@dataclass(frozen=True)
class Slow:
    """One member that is slow with whomever it is paired."""

    member: int
    share: float
    """Bandwidth with a healthy partner over that of healthy pairs."""
    path: tuple[tuple[int, float], ...]
    """From the whole down: members of the half that it is in, and its bandwidth over that of the best of the round."""


@dataclass(kw_only=True)
class Found:
    """What the rounds have found."""

    rounds: list[list[tuple[Group, float]]] = field(default_factory=list)
    """Groups of each round with their bandwidth."""
    healthy: float = 0.0
    """Bandwidth of pairs that are not slow, bytes/s."""
    tolerance: float = BEHIND
    """How far a pair may stay behind, relative."""
    slow: list[Slow] = field(default_factory=list)
    """The slowest first."""
    pairs: list[Group] = field(default_factory=list)
    """Slow together, and neither is with others: the link between them."""
    undecided: list[Group] = field(default_factory=list)
    """Slow groups for whose members there is no healthy partner."""


def halves(group: Group) -> list[Group]:
    """Two of a group of four and more; itself of a smaller one."""
    middle = len(group) // 2
    return [group[:middle], group[middle:]] if len(group) > 3 else [group]


def find_slow(count: int, measure: Measure, scatter: Callable[[], float] = lambda: 0.0) -> Found:
    """The slow ones of ``count`` members; nothing for a single one. ``scatter``: of what was measured so far, relative, from sample
    to sample (standard deviation of a median)."""
    found, groups = Found(), [tuple(range(count))]
    if count < 2:
        return found

    def take(some: list[Group]) -> dict[Group, float]:
        pace = dict(zip(some, measure(some), strict=True))
        found.rounds.append(list(pace.items()))
        return pace

    last = take(groups)
    while (smaller := [half for group in groups for half in halves(group)]) != groups:
        groups, last = smaller, take(smaller)
    found.healthy, found.tolerance = _usual(list(last.values()))
    found.tolerance = min(max(found.tolerance, SCATTERS * scatter()), LARGEST)
    least = found.healthy * (1.0 - found.tolerance)
    suspects = [group for group, pace in last.items() if pace < least]
    partners = [one for group, pace in last.items() if pace >= least for one in group]
    if count < 4 or len(partners) < 2:  # nobody to compare with
        found.undecided = suspects
        return found
    rounds = list(found.rounds)
    alone = _with_partners([one for group in suspects for one in group], partners, least, take)
    fine = []
    for group in suspects:
        worst = [one for one in group if alone[one] < least]
        found.slow += [Slow(one, alone[one] / found.healthy, _path(one, rounds)) for one in worst]
        fine += [] if worst else [group]
    paces = take(fine) if fine else {}  # chance, or the link
    found.pairs = [group for group in fine if paces[group] < least]
    found.slow.sort(key=lambda one: one.share)
    return found


def _usual(paces: list[float]) -> tuple[float, float]:
    """Median of the faster half, and how far one may stay behind it."""
    faster = sorted(paces)[len(paces) // 2 :]
    middle = median(faster)
    scatter = NORMAL * median(abs(one - middle) for one in faster) / middle if len(faster) > 2 else 0.0
    return middle, max(BEHIND, SCATTERS * scatter)


def _with_partners(
    members: list[int], partners: list[int], least: float, take: Callable[[list[Group]], dict[Group, float]]
) -> dict[int, float]:
    """Bandwidth of each member with a healthy partner of its own, as many at once as there are partners; below ``least`` the better
    of two partners."""
    alone: dict[int, float] = {}
    while members:
        now, members = members[: len(partners)], members[len(partners) :]
        for some in (partners, [*partners[1:], partners[0]]):
            met = zip(now, some, strict=False)
            pairs = {one: tuple(sorted((one, other))) for one, other in met if alone.get(one, 0.0) < least}
            paces = take(list(pairs.values())) if pairs else {}
            alone |= {one: max(paces[pair], alone.get(one, 0.0)) for one, pair in pairs.items()}
    return alone


def _path(member: int, rounds: list[list[tuple[Group, float]]]) -> tuple[tuple[int, float], ...]:
    """The halves that it was in."""
    found: list[tuple[int, float]] = []
    for groups in rounds:
        best = max(pace for _, pace in groups)
        found += [(len(group), pace / best) for group, pace in groups if member in group]
    return tuple(found)


def matches(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs in which everyone meets everyone once and nobody is in two pairs of a round: the circle method."""
    circle = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(circle) - 1 if count > 1 else 0):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if -1 not in (a, b)])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found

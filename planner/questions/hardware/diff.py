"""Where two hardware profiles differ by more than chance: a slow link, a throttled card, another driver.

Two runs of one machine never give the same figures. Each point's median has an interval, which says how well it was known at
one moment; heat, clocks, other jobs and the modes of a library move points, curves and whole families between runs by more.
Where both profiles hold the points themselves, the log ratios d = ln(second / first) of the points in common are compared,
not figures read off fits, at three levels:

    family   the median d of all points against 0. Variance: 2 delta^2 + (pi/2) sigma^2 / k; delta is how far the family moved
             between rounds of the same points during each run (provenance: drift), sigma the scatter of the k points about
             their curves, at least their intervals
    group    the mean over its curves' medians against that of the other groups of ranks: the drift moves all alike.
             Variance: tau^2 (GROUPS + 1 / curves) of each; tau is the scatter of curves about their group
    curve    its median against that of the other curves of the family, or of its group where that is listed. Variance: that
             of the other curves

with Student's t (degrees of freedom by Welch and Satterthwaite). The error CHANCE is divided over all tests (Bonferroni), a
third for each level: of twenty comparisons of two runs of one machine in one state, one lists anything. What is found slow is
no yardstick for the rest. Single points are not judged.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeAlias

from planner.hardware import HardwareProfile
from planner.questions.hardware.measured_points import Shared, shared_points
from planner.questions.hardware.numbers import Figure, figures

LEAST_DIFFERENCE = 2.0
"""Percent below which two figures count as the same whatever their scatter."""
CHANCE = 0.05
"""Chance that two runs of one machine list any difference between points."""
OF_MEDIAN = math.pi / 2.0
"""Variance of a median over that of a mean."""
FEWEST_POINTS, FEWEST = 3, 3
"""Points that make a curve, and curves to compare one with."""
GROUPS = 0.1
"""How far a whole group moves between runs in addition to its curves: its variance over that of one curve."""
DRIFT, DRIFT_ROUNDS = 3.0, 4.0
"""Percent, and degrees of freedom, where a profile has measured no drift."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What two profiles disagree on: one figure, or the points of a family, group or curve."""

    family: str
    """Family of the figure or points."""
    name: str
    """Quantity, with its shape or size."""
    first: float
    """In the first profile; of points their geometric mean."""
    second: float
    """In the second profile."""
    unit: str
    """Of both."""
    percent: float
    """100 (second / first - 1); of points by the median of their ratios."""
    spread: float
    """Percent that may be chance."""
    points: int = 0
    """Points that were compared; 0 for a figure that is read off curves."""

    @property
    def verdict(self) -> str:
        """``faster``, ``slower`` or ``other`` in the second profile: a figure is better when it is larger, but for times
        and what memory is taken."""
        if self.unit in ("share", "bytes"):
            return "more" if self.percent > 0 else "less"
        worse = self.percent > 0 if self.unit in ("seconds", "times") else self.percent < 0
        return "slower" if worse else "faster"


@dataclass(frozen=True, kw_only=True)
class ProfileDiff:
    """Where two profiles differ by more than chance."""

    names: tuple[str, str]
    """Of the two profiles, as asked for."""
    differences: list[Difference]
    """The largest first."""
    compared: int
    """Comparisons."""
    not_compared: list[str]
    """Families and quantities that one of the two assumes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "first": self.names[0], "second": self.names[1], "compared": self.compared, "chance": CHANCE,
            "not_compared": self.not_compared,
            "differences": [{**asdict(one), "verdict": one.verdict} for one in self.differences],
        }  # fmt: skip


def profile_diff(first: HardwareProfile, second: HardwareProfile, names: tuple[str, str]) -> ProfileDiff:
    """Everything that ``plan hardware diff`` prints."""
    found, compared = differences(first, second)
    left_out = sorted(assumed(first) | assumed(second))
    return ProfileDiff(names=names, differences=found, compared=compared, not_compared=left_out)


_SPREADS = {
    "gemm": ("gemm",), "attention": ("attention",), "memory": ("memory_bound",), "launch floor": ("launch",),
    "graph launch floor": ("launch",), "memory bandwidth": ("memory_bound",), "pcie bandwidth": ("host_copy",),
    "host memory bandwidth": ("host_stream",), "cpu adam bandwidth fraction": ("host_stream", "cpu_adam"),
    "sustained clock": ("sustained", "gemm"), "network latency": ("collective send_recv",),
    "scale up bandwidth": ("collective send_recv",), "network bandwidth": ("collective send_recv",),
}  # fmt: skip
"""Families of points whose scatter is that of a figure, by the figure's family or its name; sizes of memories have none."""
_ROOTS = {
    "gemm": "gemm", "attention": "attention", "memory": "memory_bound", "scale_up": "collectives inside a node",
    "scale_out": "collectives across nodes", "overlap": "overlap", "launch floor": "launch", "graph launch floor": "launch",
    "memory bandwidth": "memory_bound", "pcie bandwidth": "host_copy",
    "host memory bandwidth": "memory_bound", "cpu adam bandwidth fraction": "cpu_adam", "sustained clock": "sustained",
    "network latency": "collectives across nodes", "scale up bandwidth": "collectives inside a node",
    "network bandwidth": "collectives across nodes", "peak": "gemm",
}  # fmt: skip
"""Points that a figure is made of, by the figure's family, its name, or the first word of it."""
_DRIFTS = {"collectives inside a node": "collective inside", "collectives across nodes": "collective across",
           "overlap inside a node": "collective inside", "overlap across nodes": "collective across"}  # fmt: skip
"""What the drift of a root is stated of, where that is not its first word."""


def spread_of(profile: HardwareProfile, family: str, name: str = "") -> float:
    """Percent by which a figure scatters in a profile that says so; 0 in one that does not."""
    if family == "overlap":
        link = name.rsplit(" ", 1)[-1]
        found = profile.overlap.get(link)
        side = "communication_spread" if name.startswith("a collective") else "compute_spread"
        return float(getattr(found, side)) if found else 0.0
    if profile.provenance is None:
        return 0.0
    said = profile.provenance.spread
    if family in ("scale_up", "scale_out"):
        return said.get(f"collective {name.split()[0]}", 0.0) if name else 0.0
    wanted = _SPREADS.get(name) or _SPREADS.get(family, ())
    return math.hypot(*(said.get(one, 0.0) for one in wanted))


def assumed(profile: HardwareProfile) -> set[str]:
    """Families and quantities that a measured profile only assumes: they differ from another's for no reason of the machine's."""
    families = {family for family, how in profile.measured.items() if how.startswith("assumed")}
    said = {name.replace("_", " ") for name in profile.unverified} if profile.provenance else set()
    return families | said


def differences(first: HardwareProfile, second: HardwareProfile) -> tuple[list[Difference], int]:
    """What differs by more than chance, the largest difference first; and how many things were compared.

    Points in common are tested as the module says. Other figures differ where they do by more than
    sqrt(spread_1^2 + spread_2^2) percent, at least LEAST_DIFFERENCE. What one of them assumes is not compared.
    """
    points = shared_points(first, second)
    found, compared = _of_points(points, (first, second))
    roots = {name for point in points for name in (point.path[0], point.path[0].split()[0])}  # gemm fp32 counts as gemm
    guessed = assumed(first) | assumed(second)
    theirs = {(one.family, one.name): one for one in figures(second)}
    for one in figures(first):
        other = theirs.get((one.family, one.name))
        if other is None or one.value == 0 or {one.family, one.name} & guessed or _made_of(one) & roots:
            continue
        compared += 1
        percent = 100.0 * (other.value / one.value - 1.0)
        both = (spread_of(profile, one.family, one.name) for profile in (first, second))
        chance = max(math.hypot(*both), LEAST_DIFFERENCE)
        if abs(percent) > chance:
            found.append(Difference(
                family=one.family, name=one.name, first=one.value, second=other.value, unit=one.unit,
                percent=round(percent, 1), spread=round(chance, 1),
            ))  # fmt: skip
    return sorted(found, key=lambda one: -abs(math.log1p(max(one.percent, -99.9) / 100.0))), compared


def _made_of(one: Figure) -> set[str]:
    """The points that a figure comes from."""
    if one.family == "machine":
        return {_ROOTS.get(one.name) or _ROOTS.get(one.name.split()[0], "")} - {""}
    return {_ROOTS[one.family]} if one.family in _ROOTS else set()


Variance: TypeAlias = tuple[float, float]
"""Of ln t, with its degrees of freedom."""
Split: TypeAlias = dict[tuple[str, ...], list[Shared]]
"""Points by group, or by group and curve."""


def _of_points(points: Sequence[Shared], profiles: tuple[HardwareProfile, ...]) -> tuple[list[Difference], int]:
    """Families, groups and curves whose change is beyond chance, and the number of tests."""
    families: dict[str, list[Shared]] = {}
    for point in points:
        families.setdefault(point.path[0], []).append(point)
    groups = {family: _split(rows, 2) for family, rows in families.items()}
    curves = {family: _split(rows, 3) for family, rows in families.items()}
    tests = [len(families), *(sum(map(len, level.values())) for level in (groups, curves))]
    found: list[Difference] = []
    for family, rows in families.items():
        drift = _drift(family, profiles)
        found += _test((family, "all of them"), rows, 0.0, [drift, _points_scatter(rows)], CHANCE / 3.0 / tests[0])
        slow = _slow_groups(family, groups[family], CHANCE / 3.0 / max(tests[1], 1))
        found += slow.values()
        for (group, curve), members in curves[family].items():
            # The change of a slow group is listed itself; its curves are compared with each other.
            others = [
                some for (where, name), some in curves[family].items()
                if (where, name) != (group, curve) and (where == group if group in slow else where not in slow)
            ]  # fmt: skip
            if len(others) >= FEWEST:
                middles = [_middle(some) for some in others]
                base, freedom = fmean(middles), len(middles) - 1.0
                each = sum((one - base) ** 2 for one in middles) / freedom
                own = (each * (1.0 + 1.0 / len(others)), freedom)
                name = ", ".join(part for part in (curve, group) if part)
                found += _test((family, name), members, base, [own], CHANCE / 3.0 / tests[2])
    return found, sum(tests)


def _slow_groups(family: str, groups: Split, chance: float) -> dict[str, Difference]:
    """Groups that changed otherwise than the other groups, the furthest off first; those are then no yardstick for others.

    A change of a whole group leaves the scatter of its curves as it is: that of all groups counts.
    """
    found: dict[str, Difference] = {}
    curves = {name: _split(rows, 3) for (name,), rows in groups.items()}
    rest = {name: [_middle(some) for some in members.values()] for name, members in curves.items() if members}
    while len(rest) > 1:
        freedom = float(sum(len(middles) - 1 for middles in rest.values()))
        if freedom < FEWEST - 1:
            break
        means = {name: fmean(middles) for name, middles in rest.items()}
        each = sum((one - means[name]) ** 2 for name, middles in rest.items() for one in middles) / freedom
        scatter = {name: each * (GROUPS + 1.0 / len(middles)) for name, middles in rest.items()}
        listed: list[tuple[float, str, Difference]] = []
        for group in rest:
            others = [name for name in rest if name != group]
            base = fmean(means[name] for name in others)
            total = scatter[group] + fmean(scatter[name] for name in others) / len(others)
            for one in _test((family, group), groups[group,], base, [(total, freedom)], chance, means[group]):
                listed.append((abs(means[group] - base), group, one))
        if not listed:
            break
        _, group, one = max(listed, key=lambda entry: entry[0])
        found[group] = one
        del rest[group]
    return found


def _points_scatter(rows: Sequence[Shared]) -> Variance:
    """Variance of the median of the points of a family: by their scatter about their curves, at least their intervals."""
    curves = [some for some in _split(rows, 3).values() if len(some) > 1] or [list(rows)]
    about = [one.change - fmean(each.change for each in some) for some in curves for one in some]
    freedom = max(float(len(about) - len(curves)), 1.0)
    one = max(sum(value**2 for value in about) / freedom, median(each.error for each in rows) ** 2)
    return (OF_MEDIAN if len(rows) > 2 else 1.0) * one / len(rows), freedom


def _middle(rows: Sequence[Shared]) -> float:
    """Median change."""
    return median(one.change for one in rows)


def _split(rows: Sequence[Shared], level: int) -> Split:
    """Points by (group,) at level 2, by (group, curve) at level 3, where there are several to compare."""
    found: Split = {}
    for one in rows:
        found.setdefault(one.path[1:level], []).append(one)
    return {name: some for name, some in found.items() if len(some) >= FEWEST_POINTS} if len(found) > 1 else {}


def _drift(family: str, profiles: tuple[HardwareProfile, ...]) -> Variance:
    """(2 delta^2, degrees of freedom) of a family in ln t, over both profiles.

    A family that has no rounds of its own moves like the one of the profile that moves most; without any, DRIFT.
    """
    squares, freedom = 0.0, 0.0
    for profile in profiles:
        said = profile.provenance.drift if profile.provenance else {}
        own = said.get(_DRIFTS.get(family, family.split()[0]))
        own = own or max(said.values(), key=lambda one: one["percent"], default=None)
        percent, rounds = (own["percent"], max(own["rounds"], 1.0)) if own else (DRIFT, DRIFT_ROUNDS)
        squares += rounds * (percent / 100.0) ** 2
        freedom += rounds
    return 2.0 * squares / freedom, freedom


def _test(
    where: tuple[str, str], rows: Sequence[Shared], base: float, parts: Sequence[Variance], chance: float,
    change: float | None = None,
) -> list[Difference]:  # fmt: skip
    """The difference of a (family, name) if the change of its points (by default the median) is beyond chance from ``base``.

    ``parts`` are variances that add up; degrees of freedom by Welch and Satterthwaite. What changed less than half of its
    distance from the others is not what changed: they are.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    count, change = len(rows), _middle(rows) if change is None else change
    total = sum(value for value, _ in parts)
    if total <= 0.0:
        return []
    freedom = total**2 / sum(value**2 / degrees for value, degrees in parts)
    limit = float(stdtrit(freedom, 1.0 - 0.5 * chance)) * math.sqrt(total)
    limit = max(limit, math.log1p(LEAST_DIFFERENCE / 100.0))
    if abs(change - base) <= limit or change * (change - base) < 0.5 * (change - base) ** 2:
        return []
    mean = math.exp(fmean(math.log(one.first) for one in rows))
    return [Difference(
        family=where[0], name=f"{where[1]} ({count} point{'s' if count > 1 else ''})", first=mean,
        second=mean * math.exp(change), unit=rows[0].unit, percent=round(100.0 * math.expm1(change), 1),
        spread=round(100.0 * abs(math.expm1(math.copysign(limit, change))), 1), points=count,
    )]  # fmt: skip

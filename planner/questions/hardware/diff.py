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
    curve    its median against that of the other curves of its group. Variance: tau^2 (1 + 1 / the others), tau of the others

with Student's t (degrees of freedom by Welch and Satterthwaite). The error CHANCE is divided over all tests (Bonferroni), a
third for each level: of twenty comparisons of two runs of one machine in one state, one lists anything. What changed less
than the things that it is compared with is not listed: they are. Single points are not judged.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, variance
from typing import Any, TypeAlias

from planner.hardware import HardwareProfile
from planner.questions.hardware.measured_points import Shared, shared_points
from planner.questions.hardware.numbers import figures

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


_MADE_OF = {
    "gemm": ("gemm",), "attention": ("attention",), "memory": ("memory_bound",), "overlap": ("overlap",), "peak": ("gemm",),
    "scale_up": ("collectives inside a node",), "scale_out": ("collectives across nodes",), "launch floor": ("launch",),
    "graph launch floor": ("launch",), "memory bandwidth": ("memory_bound",), "pcie bandwidth": ("host_copy",),
    "host memory bandwidth": ("memory_bound", "host_stream"), "cpu adam bandwidth fraction": ("cpu_adam", "host_stream"),
    "sustained clock": ("sustained", "gemm"), "network latency": ("collectives across nodes", "collective send_recv"),
    "scale up bandwidth": ("collectives inside a node", "collective send_recv"),
    "network bandwidth": ("collectives across nodes", "collective send_recv"),
}  # fmt: skip
"""The points that a figure comes from, and others whose scatter is its own too; by the figure's family, or of the machine by its
name or the first word of it. Sizes of memories have none."""


def _made_of(family: str, name: str) -> tuple[str, ...]:
    keys = (name, name.split()[0] if name else "") if family == "machine" else (family,)
    return next((_MADE_OF[key] for key in keys if key in _MADE_OF), ())


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
    return math.hypot(*(said.get(one, 0.0) for one in _made_of(family, name)))


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
        if other is None or one.value == 0 or {one.family, one.name} & guessed:
            continue
        if {*_made_of(one.family, one.name)[:1]} & roots:
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


Variance: TypeAlias = tuple[float, float]
"""Of ln t, with its degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    """Whether the change of some points is beyond chance."""

    family: str
    name: str
    rows: Sequence[Shared]
    change: float
    """ln(second / first) of them."""
    base: float
    """What it is compared with."""
    variances: Sequence[Variance]
    """They add up."""

    def difference(self, chance: float) -> Difference | None:
        """The difference, if there is one beyond ``chance``; degrees of freedom by Welch and Satterthwaite.

        What changed less than half of its distance from the others is not what changed: they are.
        """
        from scipy.special import stdtrit  # type: ignore[import-untyped]

        total, away = sum(value for value, _ in self.variances), self.change - self.base
        if total <= 0.0:
            return None
        freedom = total**2 / sum(value**2 / degrees for value, degrees in self.variances)
        limit = float(stdtrit(freedom, 1.0 - 0.5 * chance)) * math.sqrt(total)
        limit = max(limit, math.log1p(LEAST_DIFFERENCE / 100.0))
        if abs(away) <= limit or self.change * away < 0.5 * away**2:
            return None
        mean, count = math.exp(fmean(math.log(one.first) for one in self.rows)), len(self.rows)
        return Difference(
            family=self.family, name=f"{self.name} ({count} point{'s' if count > 1 else ''})", first=mean,
            second=mean * math.exp(self.change), unit=self.rows[0].unit, percent=round(100.0 * math.expm1(self.change), 1),
            spread=round(100.0 * abs(math.expm1(math.copysign(limit, self.change))), 1), points=count,
        )  # fmt: skip


def _of_points(points: Sequence[Shared], profiles: tuple[HardwareProfile, ...]) -> tuple[list[Difference], int]:
    """Families, groups and curves whose change is beyond chance, and the number of tests."""
    levels: tuple[list[_Test], ...] = ([], [], [])
    for family, rows in _split(points, 0).items():
        curves = {group: _split(some, 2, FEWEST_POINTS) for group, some in _split(rows, 1, FEWEST_POINTS).items()}
        variances = [_drift(family, profiles), _points_scatter(rows)]
        levels[0].append(_Test(
            family=family, name="all of them", rows=rows, change=_middle(rows), base=0.0, variances=variances,
        ))  # fmt: skip
        levels[1].extend(_group_tests(family, curves))
        levels[2].extend(_curve_tests(family, curves))
    tried = [one.difference(CHANCE / 3.0 / len(level)) for level in levels for one in level]
    return [one for one in tried if one is not None], len(tried)


Curves: TypeAlias = dict[str, dict[str, list[Shared]]]
"""Points by group and curve."""


def _group_tests(family: str, curves: Curves) -> Iterator[_Test]:
    """Every group against the others."""
    middles = {group: [_middle(rows) for rows in some.values()] for group, some in curves.items() if some}
    each, freedom = _pooled(middles.values())
    for group in middles if len(middles) > 1 and freedom >= FEWEST - 1 else ():
        others = [some for name, some in middles.items() if name != group]
        scatter = [each * (GROUPS + 1.0 / len(some)) for some in (middles[group], *others)]
        yield _Test(
            family=family, name=group, rows=[one for rows in curves[group].values() for one in rows],
            change=fmean(middles[group]), base=fmean(fmean(some) for some in others),
            variances=[(scatter[0] + fmean(scatter[1:]) / len(others), freedom)],
        )  # fmt: skip


def _curve_tests(family: str, curves: Curves) -> Iterator[_Test]:
    """Every curve against the others of its group."""
    middles = {(group, curve): _middle(rows) for group, some in curves.items() for curve, rows in some.items()}
    for (group, curve), change in middles.items():
        rest = [[m for (where, name), m in middles.items() if where == one and (where, name) != (group, curve)] for one in curves]
        others = rest[list(curves).index(group)]
        each, freedom = _pooled(rest)
        if others and freedom >= FEWEST - 1:
            yield _Test(
                family=family, name=", ".join(part for part in (curve, group) if part), rows=curves[group][curve], change=change,
                base=fmean(others), variances=[(each * (1.0 + 1.0 / len(others)), freedom)],
            )  # fmt: skip


def _pooled(groups: Iterable[list[float]]) -> Variance:
    """Variance of curves about the mean of their group."""
    several = [some for some in groups if len(some) > 1]
    freedom = float(sum(len(some) - 1 for some in several))
    return sum(variance(some) * (len(some) - 1) for some in several) / max(freedom, 1.0), freedom


def _points_scatter(rows: Sequence[Shared]) -> Variance:
    """Variance of the median of the points of a family: by their scatter about their curves, at least their intervals."""
    curves: dict[tuple[str, ...], list[float]] = {}
    for one in rows:
        curves.setdefault(one.path, []).append(one.change)
    each, freedom = _pooled(curves.values())
    largest = max(each, median(one.error for one in rows) ** 2)
    return (OF_MEDIAN if len(rows) > 2 else 1.0) * largest / len(rows), max(freedom, 1.0)


def _middle(rows: Sequence[Shared]) -> float:
    """Median change."""
    return median(one.change for one in rows)


def _split(rows: Sequence[Shared], level: int, fewest: int = 1) -> dict[str, list[Shared]]:
    """Points by one part of their paths, where there are several."""
    found: dict[str, list[Shared]] = {}
    for one in rows:
        found.setdefault(one.path[level], []).append(one)
    return {name: some for name, some in found.items() if len(some) >= fewest}


def _drift(family: str, profiles: tuple[HardwareProfile, ...]) -> Variance:
    """(2 delta^2, degrees of freedom) of a family in ln t, over both profiles.

    A family that has no rounds of its own moves like the one of the profile that moves most; without any, DRIFT.
    """
    words, squares, freedom = family.split(), 0.0, 0.0
    key = f"collective {words[1]}" if words[0] in ("collectives", "overlap") else words[0]
    for profile in profiles:
        said = profile.provenance.drift if profile.provenance else {}
        own = said.get(key) or max(said.values(), key=lambda one: one["percent"], default=None)
        percent, rounds = (own["percent"], max(own["rounds"], 1.0)) if own else (DRIFT, DRIFT_ROUNDS)
        squares += rounds * (percent / 100.0) ** 2
        freedom += rounds
    return 2.0 * squares / freedom, freedom

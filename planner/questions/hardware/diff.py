"""Where two hardware profiles differ by more than chance: a slow link, a throttled card, another driver.

Where both hold the points themselves, the log ratios ln(second / first) of the points in common are compared, not figures read
off fits: families, groups of ranks and curves, against the drift within each run and the scatter of points and of curves, with
Student's t; docs/profile.md has the variances. The error CHANCE is divided over all tests (Bonferroni), a third for each level.
Single points are not judged.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, NamedTuple, TypeAlias

from planner import library, units
from planner.hardware import HardwareProfile
from planner.questions.hardware.numbers import figures
from planner.record import record

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
NORMAL = 1.96
"""Standard errors in half a 95 percent interval."""
RESULTS = (
    "repetitions", "outliers", "rounds", "threads", "clock", "kernel_of_groups", "source", "gemm", "interval", "backend",
    "queued", "slowest", "host",
)  # fmt: skip
"""Entries of a point that are results, or how it was run; all other texts and whole numbers say what was measured."""
_POINTS = library.read_yaml(Path(__file__).with_name("points.yaml"))


@record
class Shared:
    """One point that both profiles have."""

    path: tuple[str, str, str]
    """Root ("gemm fp32"), group ("in groups of 4 ranks, 1 apart") and curve ("all_reduce fp32") that it belongs to."""
    first: float
    """Seconds in the first profile; for overlaps the slowdown."""
    second: float
    """In the second."""
    error: float
    """Standard error of ln(second / first) by the intervals of the two medians."""
    unit: str

    @property
    def change(self) -> float:
        """ln(second / first)."""
        return math.log(self.second / self.first)


Point = tuple[object, tuple[str, str, str], float, float]
"""What was measured, its path, value and standard error of the logarithm."""


def shared_points(first: HardwareProfile, second: HardwareProfile) -> list[Shared]:
    """What was measured in both, point by point; entries that a file has in another form are passed over."""
    theirs = {key: (value, error) for key, _, value, error in _points(second)}
    found = []
    for key, path, mine, error in _points(first):
        other, its_error = theirs.get(key, (0.0, 0.0))
        if 0.0 < mine < math.inf and 0.0 < other < math.inf:
            unit = "times" if path[0].startswith("overlap") else "seconds"
            found.append(Shared(path=path, first=mine, second=other, error=math.hypot(error, its_error), unit=unit))
    return found


def _points(profile: HardwareProfile) -> Iterator[Point]:
    for family, rows in profile.measurements.items():
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, Mapping):
                continue
            try:
                if family == "collective":
                    yield from _collective(row)
                elif family == "overlap":
                    yield _overlap(row)
                elif family in _POINTS["paths"]:
                    yield _operator(family, row)
            except (ArithmeticError, KeyError, TypeError, ValueError):
                continue


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What was measured: texts and whole numbers of the row but for results."""
    return tuple(sorted((k, v) for k, v in row.items() if isinstance(v, str | int) and k not in RESULTS))


def _operator(family: str, row: Mapping[str, Any]) -> Point:
    value = float(row["whole_us"] if family == "layer" else row["us"]) * units.MICRO
    low, high = (float(end) * units.MICRO for end in row.get("interval", (0.0, 0.0)))
    names = [" ".join(str(row[name]) for name in part if name in row) for part in _POINTS["paths"][family]]
    path = (f"{family} {names[0]}".strip(), names[1], names[2])
    return (family, _key(row)), path, value, _error(low, high)


def _error(low: float, high: float) -> float:
    return math.log(high / low) / (2.0 * NORMAL) if 0.0 < low < high else 0.0


def _group(row: Mapping[str, Any]) -> tuple[str, str]:
    """Root and group of a collective."""
    apart = f", {row['stride']} apart" if int(row["stride"]) != 1 else ""
    return "across nodes" if int(row["nodes"]) > 1 else "inside a node", f"groups of {row['n']}{apart}"


def _collective(row: Mapping[str, Any]) -> Iterator[Point]:
    where, group = _group(row)
    path = (f"collectives {where}", group, f"{row['op']} {row['dtype']}")
    columns = (str(row[name]).split() for name in ("sizes", "us", "low_us", "high_us"))
    for size, us, low, high in zip(*columns, strict=True):
        key = ("collective", *(str(row[name]) for name in ("op", "dtype", "n", "stride", "nodes")), size)
        yield key, path, float(us) * units.MICRO, _error(float(low), float(high))


def _overlap(row: Mapping[str, Any]) -> Point:
    side = "computation during a collective" if row["of"] == "gemm" else "a collective during computation"
    path = (f"overlap {_group(row)[0]}", "", side)
    names = ("op", "of", "dtype", "n", "stride", "nodes", "size")
    key = ("overlap", *(str(row[name]) for name in names))
    return key, path, float(row["slowdown"]), float(row.get("spread", 0.0)) / NORMAL


@record
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


@record
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


def _made_of(family: str, name: str) -> list[str]:
    made_of: dict[str, list[str]] = _POINTS["made_of"]
    keys = (name, name.split()[0] if name else "") if family == "machine" else (family,)
    return next((made_of[key] for key in keys if key in made_of), [])


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


class _Test(NamedTuple):
    """Whether the change of some points is beyond chance."""

    name: str
    rows: Sequence[Shared]
    change: float
    """ln(second / first) of them."""
    base: float
    """What it is compared with."""
    variances: Sequence[Variance]
    """They add up; degrees of freedom by Welch and Satterthwaite."""

    def difference(self, chance: float) -> Difference | None:
        """The difference, if it is beyond ``chance``. What changed less than half of its distance from the others is not
        what changed: they are."""
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
            family=self.rows[0].path[0], name=f"{self.name} ({count} point{'s' if count > 1 else ''})", first=mean,
            second=mean * math.exp(self.change), unit=self.rows[0].unit, percent=round(100.0 * math.expm1(self.change), 1),
            spread=round(100.0 * abs(math.expm1(math.copysign(limit, self.change))), 1), points=count,
        )  # fmt: skip


def _of_points(points: Sequence[Shared], profiles: tuple[HardwareProfile, ...]) -> tuple[list[Difference], int]:
    """Families, groups and curves whose change is beyond chance, and the number of tests."""
    levels: tuple[list[_Test], ...] = ([], [], [])
    for family, rows in _split(points, 0, 1).items():
        variances = [_drift(family, profiles), _points_scatter(rows)]
        levels[0].append(_Test("all of them", rows, median(one.change for one in rows), 0.0, variances))
        levels[1].extend(_group_tests(rows))
        levels[2].extend(_curve_tests(rows))
    tried = [one.difference(CHANCE / 3.0 / len(level)) for level in levels for one in level]
    return [one for one in tried if one is not None], len(tried)


def _curves(rows: Sequence[Shared]) -> dict[str, dict[str, list[Shared]]]:
    """Points of a family by group and curve."""
    found = {group: _split(some, 2, FEWEST_POINTS) for group, some in _split(rows, 1, FEWEST_POINTS).items()}
    return {group: some for group, some in found.items() if some}


def _middles(curves: Iterable[Sequence[Shared]]) -> list[float]:
    """Median change of each curve."""
    return [median(one.change for one in rows) for rows in curves]


def _group_tests(rows: Sequence[Shared]) -> Iterator[_Test]:
    """Every group against the others."""
    curves = _curves(rows)
    middles = {group: _middles(some.values()) for group, some in curves.items()}
    each, freedom = _pooled(middles.values())
    for group, mine in middles.items() if len(middles) > 1 and freedom >= FEWEST - 1 else ():
        others = [some for name, some in middles.items() if name != group]
        scatter = [each * (GROUPS + 1.0 / len(some)) for some in others]
        total = each * (GROUPS + 1.0 / len(mine)) + fmean(scatter) / len(others)
        members = [one for some in curves[group].values() for one in some]
        yield _Test(group, members, fmean(mine), fmean(map(fmean, others)), [(total, freedom)])


def _curve_tests(rows: Sequence[Shared]) -> Iterator[_Test]:
    """Every curve against the others of its group."""
    curves = _curves(rows)
    for group, some in curves.items():
        for curve, members in some.items():
            rest = {name: _middles(rows for each, rows in one.items() if (name, each) != (group, curve))
                    for name, one in curves.items()}  # fmt: skip
            others, (each, freedom) = rest[group], _pooled(rest.values())
            if others and freedom >= FEWEST - 1:
                name = ", ".join(part for part in (curve, group) if part)
                [change], scatter = _middles([members]), each * (1.0 + 1.0 / len(others))
                yield _Test(name, members, change, fmean(others), [(scatter, freedom)])


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


def _split(rows: Sequence[Shared], level: int, fewest: int) -> dict[str, list[Shared]]:
    """Points by one part of their paths, where there are enough."""
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

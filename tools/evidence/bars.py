"""Error bars from residuals, and the proof that they hold: every campaign left out in turn.

A residual is r = ln(measured / predicted). Runs of one campaign (what one paper or repository published) are wrong together, and
what a user will run is another campaign: the campaign is the unit. Inside it every source weighs the same, in that every run.

A class of runs (kind of user; and code; and kind of model; and generation of GPU) has a centre m and a scale s, both pooled with those
of the class around it (m', s') as if that were POOL further campaigns: with k campaigns c of its own,

    m = (sum_c E_c[r] + POOL m') / (k + POOL),    s^2 = (sum_c E_c[(r - m)^2] + POOL s'^2) / (k + POOL)

the posterior mean and variance of a normal distribution with a conjugate prior. s^2 holds the variance between campaigns and
that within them, as E_c[(r - m)^2] does: it is that of a run of a new campaign.  [Gelman 2013, Bayesian Data Analysis, 3.3, 5.4]

Residuals are neither normal nor symmetric. The ends of the interval are m + q s, q two quantiles of z = (r - m) / s over all
campaigns, each with m and s that it had no part in. Which two is set for every kind of user: those that hold AIM of its runs, as a
mean over sources, when whole campaigns are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.error_bars import KEYS, QUANTITIES, QUARTER, UNLISTED, Z90, ErrorBar
from planner.questions.accuracy.prediction import Pair, grouped

AIM = 0.91
"""Part that it holds of published runs: users' runs differ more from these than these from one another."""
TAILS = tuple(round(0.3 - 0.0025 * step, 4) for step in range(120))
"""Parts of the campaigns' residuals that are left out on either side, from the narrowest bar to the widest."""
POOL = 4.0
"""Campaigns that the wider class counts as. From 2 to 8 nothing moves by more than what one campaign does."""
NARROWEST = 0.03
"""No interval leaves out a measurement that is this part away from the prediction."""
TAIL = 0.05
"""What is left out on either side where no kind of user says more."""

Class = tuple[str, ...]
"""Values of the first of KEYS; () = all runs."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One measured value against its prediction."""

    source: str
    campaign: str
    user: str
    code_base: str
    model: str
    arch: str
    value: float
    """ln(measured / predicted)."""

    @property
    def classes(self) -> tuple[Class, ...]:
        """The classes that it is in, the widest first."""
        names = tuple(getattr(self, key) for key in KEYS)
        return tuple(names[:level] for level in range(len(names) + 1))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where the residuals of a class lie."""

    centre: float
    scale: float


def residuals(pairs: Sequence[Pair], quantity: str) -> list[Residual]:
    """Residuals of all predicted runs that were measured, whose layout is stated and that their source does not call broken."""
    found = []
    for pair in pairs:
        run = pair.run
        error = pair.time_error if quantity == "step_time" else pair.memory_error
        if error is None or not pair.counts or run.cluster is None or run.trainer is None or run.kind is None:
            continue
        found.append(
            Residual(
                source=run.source, campaign=run.campaign, user=run.kind.user, code_base=run.trainer.code_base,
                model=run.kind.model, arch=run.cluster.hardware.arch, value=-float(np.log1p(error)),
            )
        )  # fmt: skip
    return found


# -------------------------------------------------------------------------------------------------------------- the table


class Evidence:
    """Residuals by campaign and class: first and second moments, which are all that the spreads need."""

    def __init__(self, found: Sequence[Residual]) -> None:
        self.campaigns = grouped(found, lambda one: one.campaign)
        self.moments: dict[Class, dict[str, tuple[float, float]]] = defaultdict(dict)
        """By class and campaign E_c[r] and E_c[r^2]."""
        for campaign, members in self.campaigns.items():
            inside: dict[Class, list[Residual]] = defaultdict(list)
            for one in members:
                for name in one.classes:
                    inside[name].append(one)
            for name, some in inside.items():
                values, weights = np.array([one.value for one in some]), weights_of(some)
                self.moments[name][campaign] = (float(weights @ values), float(weights @ values**2))

    def spreads(self, without: frozenset[str]) -> dict[Class, Spread]:
        """Centre and scale of every class that has runs of campaigns other than those left out."""
        found: dict[Class, Spread] = {}
        for name in sorted(self.moments, key=len):
            own = [moments for campaign, moments in self.moments[name].items() if campaign not in without]
            if not own:
                continue
            first, second = (sum(column) for column in zip(*own, strict=True))
            around, pool = (found[name[:-1]], POOL) if name else (Spread(centre=0.0, scale=0.0), 0.0)
            centre = (first + pool * around.centre) / (len(own) + pool)
            square = second - 2.0 * centre * first + len(own) * centre**2
            variance = max((square + pool * around.scale**2) / (len(own) + pool), 1e-12)
            found[name] = Spread(centre=float(centre), scale=float(variance**0.5))
        return found

    def scaled(self, without: frozenset[str]) -> tuple[Floats, Floats]:
        """(r - m) / s of the campaigns but for those left out, each with spreads that it had no part in; and their weights."""
        kept = [name for name in self.campaigns if name not in without]
        if len(kept) < 2:  # nothing to leave out: as if normal
            return np.array([-Z90, 0.0, Z90]), np.array([0.1, 0.8, 0.1])
        parts, weights = [], []
        for campaign in kept:
            members, spreads = self.campaigns[campaign], self.spreads(without | {campaign})
            near = [spread_of(one, spreads) for one in members]
            parts.append(np.array([(one.value - at.centre) / at.scale for one, at in zip(members, near, strict=True)]))
            weights.append(weights_of(members))
        return np.concatenate(parts), np.concatenate(weights)


def weights_of(members: Sequence[Residual]) -> Floats:
    """Weights of the residuals of one campaign: every source the same, in it every run; they sum to 1."""
    runs = Counter(one.source for one in members)
    return np.array([1.0 / runs[one.source] / len(runs) for one in members])


def spread_of(one: Residual, spreads: Mapping[Class, Spread]) -> Spread:
    """That of the narrowest class that is known."""
    return next(spreads[name] for name in reversed(one.classes) if name in spreads)


def build(found: Sequence[Residual], tails: Mapping[str, float]) -> tuple[ErrorBar, ...]:
    """Bars of every class that has runs, the most specific first; the last is that of all runs. ``tails``: see ``tails_of``."""
    runs, sources = Counter[Class](), defaultdict[Class, set[str]](set)
    for one in found:
        for name in one.classes:
            runs[name] += 1
            sources[name].add(one.source)
    evidence, nobody = Evidence(found), frozenset[str]()
    scaled, bars = evidence.scaled(nobody), list[ErrorBar]()
    for name, spread in evidence.spreads(nobody).items():
        tail = tails.get("".join(name[:1]), TAIL)
        low, quarter, middle, more, high = (
            spread.centre + quantiles(*scaled, (tail, 0.25, 0.5, 0.75, 1.0 - tail)) * spread.scale
        )
        low, high = clear(low, high)
        bars.append(
            ErrorBar(
                low=float(np.exp(low)), middle=float(np.exp(middle)), high=float(np.exp(high)),
                bulk=max(float(more - quarter) / (2.0 * QUARTER), NARROWEST / 2.0), runs=runs[name], sources=len(sources[name]), **dict(zip(KEYS, name, strict=False)),
            )
        )  # fmt: skip
    return tuple(sorted(bars, key=lambda bar: (-sum(bool(getattr(bar, key)) for key in KEYS), bar.basis)))


def of_unlisted(found: Sequence[Residual]) -> tuple[ErrorBar, ...]:
    """Bars of runs whose framework is read as if nobody knew it (``read_runs(unlisted=True)``): those of their own kind alone."""
    found = [one for one in found if one.user == UNLISTED]
    table = build(found, tails_of(held_back(found)))
    return tuple(bar for bar in table if bar.user and not bar.code_base)


def clear(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Ends in the logarithm, NARROWEST apart from the prediction at least."""
    return np.minimum(low, np.log1p(-NARROWEST)), np.maximum(high, np.log1p(NARROWEST))


def quantiles(values: Floats, weights: Floats, shares: Sequence[float]) -> Floats:
    """Weighted quantiles: the values at which these shares of the weight are reached, interpolated between values."""
    order = np.argsort(values)
    weights = weights[order]
    place = (np.cumsum(weights) - 0.5 * weights) / np.sum(weights)
    return np.asarray(np.interp(shares, place, values[order]))


# -------------------------------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True, kw_only=True)
class Held:
    """One residual and what the other campaigns say of its class: no bar yet, as this depends on the tail."""

    residual: Residual
    spread: Spread
    others: tuple[Floats, Floats]
    """(r - m) / s of the other campaigns and their weights."""


def held_back(found: Sequence[Residual], unseen: Sequence[Residual] | None = None) -> list[Held]:
    """Every campaign left out in turn: each residual with what is known from all other campaigns.

    ``unseen`` are the residuals of the same runs when no constant was calibrated on their own campaign (default: the same).
    """
    evidence, rows = Evidence(found), []
    for campaign, members in grouped(found if unseen is None else unseen, lambda one: one.campaign).items():
        spreads, others = evidence.spreads(frozenset([campaign])), evidence.scaled(frozenset([campaign]))
        rows += [Held(residual=one, spread=spread_of(one, spreads), others=others) for one in members]
    return rows


def limits(rows: Sequence[Held], tails: Sequence[float]) -> tuple[Floats, Floats]:
    """Low and high of the bars in the logarithm, (T, R): one row for each tail that is left out on either side."""
    known: dict[int, Floats] = {}
    for row in rows:
        if id(row.others) not in known:
            known[id(row.others)] = quantiles(*row.others, [*tails, *(1.0 - tail for tail in tails)])
    quantile = np.array([known[id(row.others)] for row in rows]).T.reshape(2, len(tails), len(rows))
    centre, scale = (np.array([getattr(row.spread, key) for row in rows]) for key in ("centre", "scale"))
    return clear(centre + quantile[0] * scale, centre + quantile[1] * scale)


def tails_of(rows: Sequence[Held]) -> dict[str, float]:
    """By kind of user that of TAILS whose bars hold nearest to AIM of its runs as a mean over sources; of equals the narrowest."""
    found = {}
    for kind, some in grouped(rows, lambda row: row.residual.user).items():
        low, high = limits(some, TAILS)
        value = np.array([row.residual.value for row in some])
        held = ((low <= value) & (value <= high)) @ shares(some, "source")
        found[kind] = TAILS[int(np.argmin(np.round(np.abs(held - AIM), 6)))]
    return found


def shares(rows: Sequence[Held], key: str) -> Floats:
    """Weights that make a mean over sources, or campaigns, of rows; they sum to 1."""
    runs = Counter(getattr(row.residual, key) for row in rows)
    return np.array([1.0 / runs[getattr(row.residual, key)] / len(runs) for row in rows])


def coverage(rows: Sequence[Held], tails: Mapping[str, float]) -> dict[str, Any]:
    """How many runs of campaigns that were left out the bars hold.

    ``runs`` is the share of all runs, ``sources`` and ``campaigns`` the means over these of each one's share; ``by_kind`` the mean
    over the sources of a kind; ``width`` the median of high / low, ``narrowest`` and ``widest`` its ends.
    """
    kinds = grouped(rows, lambda row: row.residual.user)
    ends = [limits(some, [tails.get(kind, TAIL)]) for kind, some in kinds.items()]
    low, high = (np.concatenate([pair[end][0] for pair in ends]) for end in (0, 1))
    rows = [row for some in kinds.values() for row in some]
    value = np.array([row.residual.value for row in rows])
    inside = (low <= value) & (value <= high)
    width, of_kind = np.exp(high - low), np.array([row.residual.user for row in rows])
    return {
        "n": len(rows),
        "runs": float(inside.mean()),
        "sources": float(inside @ shares(rows, "source")),
        "campaigns": float(inside @ shares(rows, "campaign")),
        "width": float(np.median(width)),
        "narrowest": float(width.min()),
        "widest": float(width.max()),
        "by_kind": {kind: float(inside[of_kind == kind] @ shares(some, "source")) for kind, some in kinds.items()},
    }


# -------------------------------------------------------------------------------------------------------------- files


def stored_errors(pairs: Sequence[Pair], found: Sequence[Residual]) -> list[tuple[dict[str, str], list[float]]]:
    """Residuals as errors, predicted / measured - 1, by source and class: what ``profiles/residuals.yaml`` stores."""
    where = {pair.run.source: pair.run.where for pair in pairs}
    groups = grouped(found, lambda one: (one.source, *(getattr(one, key) for key in KEYS)))
    return [
        (
            {"source": source, "where": where[source], **dict(zip(KEYS, names, strict=True))},
            [float(np.expm1(-one.value)) for one in members],
        )
        for (source, *names), members in sorted(groups.items())
    ]


def to_dict(tables: Mapping[str, Sequence[ErrorBar]], proofs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Plain data in the form of ``profiles/error_bars.yaml``: the bars, and what share of runs they hold."""

    def entry(bar: ErrorBar) -> dict[str, Any]:
        names = {key: getattr(bar, key) for key in KEYS if getattr(bar, key)}
        ends = {end: round(getattr(bar, end), 3) for end in ("low", "middle", "high", "bulk")}
        return {**names, **ends, "runs": bar.runs, "sources": bar.sources}

    held = {
        name: {"sources": round(one["sources"], 3), **{kind: round(share, 3) for kind, share in one["by_kind"].items()}}
        for name, one in proofs.items()
    }
    return {"held": held, **{quantity: [entry(bar) for bar in tables[quantity]] for quantity in QUANTITIES}}


def errors_to_dict(rows: Mapping[str, Sequence[tuple[Mapping[str, str], Sequence[float]]]]) -> dict[str, Any]:
    """Plain data in the form of ``profiles/residuals.yaml``: ``stored_errors`` by quantity, in percent with one decimal."""
    return {
        quantity: [
            {**entry, "percent": " ".join(f"{100 * error:.1f}" for error in sorted(errors))} for entry, errors in rows[quantity]
        ]
        for quantity in QUANTITIES
    }  # fmt: skip

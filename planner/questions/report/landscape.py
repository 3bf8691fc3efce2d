"""Every legal layout of a job, priced: the best step time of each TP x PP, and throughput against memory.

The search prices only what could be among the best; a picture needs the others too. Without memory options every legal layout is
priced. The variants with recompute follow for the fastest and for the leanest of the layouts that differ only in how a
pipeline is cut, and offload where the search would try it too: where nothing fits without it.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cost.estimate import Estimate, estimate, join
from planner.cost.memory.states import COMPONENTS
from planner.cost.price.deduplicate import distinct
from planner.cost.refine import refine
from planner.layout import Layout
from planner.rules import RULES, Job, allowed
from planner.search import PLAN_FIELDS, Finding, best_splits, fits
from planner.space import OFFLOADS, Pins, base_layouts, recompute_options, stack
from planner.units import GIB

NEAR = 1.25
"""Cells up to this much behind the best get the best split of layers, and are walked on the exact timeline: that moves a step
time by up to 8 % up and 12 % down."""
LEAST_SPEED = 0.4
"""Layouts below this part of the best throughput are left out of pictures and fronts: nobody would run them."""
OF_A_CELL = 100
"""Fastest layouts of a TP x PP that get memory options whatever their speed, and as many of the leanest."""
MOST_POINTS = 1500
"""Points that a picture of throughput against memory keeps; more only hide each other."""
MOST_ON_FRONT = 40
"""Layouts of the front that are shown, spread over it."""
AT_ONCE = 8
"""Members of the front that are walked before the front is drawn anew."""
MOST_ACTIONS = 80_000
"""Forward and backward passes that are walked for one picture, the fastest layouts first: about a second. Pipelines of 64
stages have hundreds of thousands; layouts that slow keep their closed form."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One layout with what it takes."""

    layout: Layout
    step_time_s: float
    tokens_per_second_per_gpu: float
    memory_gib: float
    """Peak of the device on the worst stage."""
    out_of_memory_probability: float
    fits: bool
    """By the rule of the search: device memory with its chance of running out, and host memory."""
    largest: str
    """The largest component of its memory."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One TP x PP: its best layout, or why there is none."""

    tp: int
    pp: int
    best: Point | None
    """The fastest layout that fits; where none fits the one that needs least memory; None where none is legal."""
    rule: str
    """Name of the rule that refuses every layout of this cell; '' = some are legal."""


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """All layouts of a job, as far as a picture can show them."""

    cells: tuple[Cell, ...]
    """Every TP x PP whose product divides the GPUs and of which at least one row and one column has a legal layout."""
    points: tuple[Point, ...]
    """Layouts of different memory and throughput, thinned; the front and the plan are always among them."""
    front: tuple[Point, ...]
    """Layouts that fit and that no other beats in both throughput and memory, least memory first."""
    plan: Point
    """The plan in question, on the exact timeline."""
    legal: int
    """Layouts without memory options that meet every rule."""
    priced: int
    """Layouts priced, memory options included."""
    fitting: int
    """Of those priced."""


def landscape(job: Job, layout: Layout, found: Estimate, finding: Finding) -> Landscape:
    """All layouts of a job and one of them, whose refined estimate is ``found``, and those that a search found best."""
    base = base_layouts(job, Pins())
    plain = base.take(allowed(job, base))
    table, prices = _priced(job, plain)
    plan = _point(job, layout, found)
    best = [plan] + [
        _point(job, one, priced)
        for one, priced in zip(finding.layouts, finding.estimates, strict=True) if one.to_dict() != layout.to_dict()
    ]  # fmt: skip
    cells = _cells(job, base, table, prices, best)
    prices = None if prices is None else _walk_front(job, table, prices, best)
    front = _front(job, table, prices, best)
    return Landscape(
        cells=cells, points=_thinned(job, table, prices, [*front, *best]), front=front, plan=plan, legal=len(plain),
        priced=len(table) if prices is not None else 0,
        fitting=int(fits(job, prices).sum()) if prices is not None else 0,
    )  # fmt: skip


def _priced(job: Job, plain: Layout) -> tuple[Layout, Estimate | None]:
    """Layouts with their estimates: plain, with recompute, and offloaded where a cell has nothing that fits."""
    if not len(plain):
        return plain, None
    tables, prices = [plain], [_price(job, plain)]
    some = plain.take(_extremes(plain, prices[0]))
    options = recompute_options(job, Pins())
    if options:
        _add(job, tables, prices, [option.apply(some, job.model) for option in options])
    if job.trainer.legal.offload_optimizer:
        table, found = stack(tables), join(prices)
        rows = _empty_cells(job, table, found)
        level = min((one for one in job.trainer.legal.zero if one), default=0)
        left = table.take(rows)
        zero = np.where(
            (np.asarray(left.zero) == 0) & (np.asarray(left.dp) * np.asarray(left.cp) == 1), level, left.zero
        )
        _add(job, tables, prices, [left.replace(offload_optimizer=share, zero=zero) for share in OFFLOADS])
    return stack(tables), join(prices)


def _add(job: Job, tables: list[Layout], prices: list[Estimate], more: list[Layout]) -> None:
    stacked = stack(more)
    legal = stacked.take(allowed(job, stacked)) if len(stacked) else stacked
    if len(legal):
        tables.append(legal)
        prices.append(_price(job, legal))


def _price(job: Job, layout: Layout) -> Estimate:
    return estimate(job.workload, job.cluster, job.trainer, layout)


def _extremes(table: Layout, found: Estimate) -> NDArray[np.intp]:
    """Of the layouts that differ only in the cut of the pipeline: the fastest and the one that needs least memory.

    Those too slow for any picture are left out, as memory options only make them slower, but for OF_A_CELL of each TP x PP.
    """
    _, group = distinct(table, PLAN_FIELDS, few=0)
    chosen = []
    for value in (found.step_time, found.memory_needed):
        order = np.argsort(value, kind="stable")
        _, first = np.unique(group[order], return_index=True)
        chosen.append(order[first])
    rows = np.unique(np.concatenate(chosen))
    fast = rows[found.step_time[rows] <= found.step_time.min() / LEAST_SPEED]
    ends = [_first_of_cells(table, rows, value) for value in (found.step_time, found.memory_needed)]
    return np.unique(np.concatenate([fast, *ends]))


def _first_of_cells(table: Layout, rows: NDArray[np.intp], value: Floats) -> NDArray[np.intp]:
    """Of some rows, the OF_A_CELL with the least value in each TP x PP."""
    ordered = rows[np.lexsort((value[rows], _key(table)[rows]))]
    key = _key(table)[ordered]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    place = np.arange(len(key)) - np.repeat(starts, np.diff([*starts, len(key)]))
    return ordered[place < OF_A_CELL]


def _key(table: Layout) -> NDArray[np.int64]:
    return np.asarray(table.tp, dtype=np.int64) << 32 | np.asarray(table.pp, dtype=np.int64)


def _empty_cells(job: Job, table: Layout, found: Estimate) -> NDArray[np.intp]:
    """Rows of cells where nothing fits that would fit, or come closest, with the optimizer states elsewhere."""
    key, fit = _key(table), fits(job, found)
    empty = ~np.isin(key, np.unique(key[fit]))
    without = found.memory_needed - found.memory["optimizer_states"] * (1.0 + job.trainer.stored.fragmentation)
    open_rows = np.flatnonzero(empty)
    could = open_rows[without[open_rows] <= found.usable_memory]
    ends = [_first_of_cells(table, could, found.step_time), _first_of_cells(table, open_rows, without)]
    return np.unique(np.concatenate(ends))


def _point(job: Job, layout: Layout, found: Estimate) -> Point:
    """A layout with its estimate of length 1."""
    return _points(job, Layout.stack([layout]), found)[0]


def _points(job: Job, table: Layout, found: Estimate) -> list[Point]:
    """Layouts with their estimates, row by row."""
    columns = (
        found.step_time, found.tokens_per_second_per_gpu, found.memory_peak / GIB, found.out_of_memory_probability,
        fits(job, found), np.argmax(np.stack([found.memory[name] for name in COMPONENTS]), axis=0),
    )  # fmt: skip
    return [
        Point(
            layout=table.row(row), step_time_s=step, tokens_per_second_per_gpu=rate, memory_gib=peak,
            out_of_memory_probability=chance, fits=fit, largest=COMPONENTS[largest],
        )
        for row, (step, rate, peak, chance, fit, largest) in enumerate(zip(*(one.tolist() for one in columns), strict=True))
    ]  # fmt: skip


def _actions(layout: Layout) -> int:
    """Passes that the walk of one layout takes.  [timeline.walked_time]"""
    pp, vpp, m = int(layout.pp), int(layout.vpp), int(layout.num_microbatches)
    return 2 * pp * vpp * (min(m, 6 * pp) + min(m, 5 * pp)) if pp > 1 else 0


def _exact(job: Job, variants: list[tuple[Layout, Estimate]], plan: Point) -> list[tuple[Layout, Estimate]]:
    """Layouts on the exact timeline: those that look faster than the plan, then others as far as MOST_ACTIONS go, fastest
    first; the rest are left out."""
    left, chosen = MOST_ACTIONS, []
    for layout, found in sorted(variants, key=lambda one: float(one[1].step_time[0])):
        left -= _actions(layout)
        if left < 0 and float(found.step_time[0]) >= plan.step_time_s:
            break
        chosen.append((layout, found))
    if not chosen:
        return []
    layouts = [layout for layout, _ in chosen]
    return list(
        zip(layouts, refine(job.workload, job.cluster, job.trainer, layouts, [one for _, one in chosen]), strict=True)
    )


# ------------------------------------------------------------------------------------------------ TP x PP


def _cells(job: Job, base: Layout, table: Layout, found: Estimate | None, best: list[Point]) -> tuple[Cell, ...]:
    """Every TP x PP that the space has, its best layout, and the rule where none is legal. ``best`` are exact, the plan first."""
    points = _best_of_cells(job, table, found, best[0]) if found is not None else {}
    for one in best:
        mine = (int(one.layout.tp), int(one.layout.pp))
        held = points.get(mine)
        if held is None or (one.fits, -one.step_time_s) >= (held.fits, -held.step_time_s):
            points[mine] = one
    tps, pps = ({cell[side] for cell in points} for side in (0, 1))
    gpus = job.cluster.num_gpus
    cells = []
    for tp in sorted(tps):
        for pp in sorted(pps):
            if gpus % (tp * pp):
                continue
            point = points.get((tp, pp))
            cells.append(Cell(tp=tp, pp=pp, best=point, rule="" if point else _rule(job, base, tp, pp)))
    return tuple(cells)


def _best_of_cells(job: Job, table: Layout, found: Estimate, plan: Point) -> dict[tuple[int, int], Point]:
    """The fastest layout that fits of every cell, else the leanest; those near the best with the best split of layers over
    the stages and on the exact timeline, as the search refines its finalists."""
    key, fit = _key(table), fits(job, found)
    rank = np.where(fit, found.step_time, np.inf)
    rows = {}
    order = np.argsort(key, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        fastest = members[np.argmin(rank[members])]
        leanest = members[np.argmin(found.memory_needed[members])]
        rows[int(key[members[0]])] = int(fastest if fit[fastest] else leanest)
    fastest_of_all = min((rank[row] for row in rows.values()), default=np.inf)
    near = [row for row in rows.values() if rank[row] <= NEAR * fastest_of_all]
    variants = [(table.row(row), found.row(row)) for row in near]
    variants += best_splits(job, Pins(), [layout for layout, _ in variants])
    points = {one: _points(job, table.take(np.array([row])), found.row(row))[0] for one, row in rows.items()}
    for layout, priced in _exact(job, variants, plan):
        one = _point(job, layout, priced)
        place = int(layout.tp) << 32 | int(layout.pp)
        if points[place].layout == layout or one.step_time_s < points[place].step_time_s:
            points[place] = one
    return {(one >> 32, one & 0xFFFFFFFF): point for one, point in points.items()}


def _rule(job: Job, base: Layout, tp: int, pp: int) -> str:
    """The rule that refuses most layouts of a cell; 'batch' where the space has none because the batch does not divide."""
    rows = base.take((np.asarray(base.tp) == tp) & (np.asarray(base.pp) == pp))
    if not len(rows):
        return "batch"
    refused = {rule.name: int(np.sum(~np.broadcast_to(rule.holds(job, rows), len(rows)))) for rule in RULES}
    return max(refused, key=lambda name: refused[name])


# ------------------------------------------------------------------------------------------------ memory and throughput


def pareto(memory: Floats, throughput: Floats) -> NDArray[np.intp]:
    """Rows that no other beats in both: throughput rises with memory along them, least memory first."""
    order = np.lexsort((-throughput, memory))
    best = np.maximum.accumulate(throughput[order])
    better = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, dtype=bool)
    return order[better]


def _walk_front(job: Job, table: Layout, found: Estimate, best: list[Point]) -> Estimate:
    """The estimates with the idle time of the exact timeline where it decides the front.

    Members of the front are walked, which may bring up others, until all are walked or MOST_ACTIONS are spent; those that
    look faster than the fastest of ``best``, which are exact, are walked whatever it takes. What is not walked gets the
    median correction of the walked layouts with the same schedule, stages and virtual stages.
    """
    speed, fit = found.tokens_per_second_per_gpu, fits(job, found)
    rows = np.flatnonzero(fit & (speed >= LEAST_SPEED * np.max(speed[fit], initial=0.0)))
    if not len(rows):
        return found
    kind = _pipeline_kind(table)
    factors: dict[int, list[float]] = {}
    exact = Layout.stack([point.layout for point in best])
    closed, mine = _price(job, exact), _pipeline_kind(exact)
    for number, point in enumerate(best):
        factors.setdefault(int(mine[number]), []).append(point.step_time_s / float(closed.step_time[number]))
    fastest = min((point.step_time_s for point in best if point.fits), default=0.0)
    walked: dict[int, float] = {}
    left = MOST_ACTIONS
    while True:
        time = _corrected(found.step_time, kind, factors, walked)
        front = rows[pareto(found.memory_peak[rows], -time[rows])]
        some = [int(row) for row in front[::-1] if int(row) not in walked][:AT_ONCE]
        some = [
            row for row in some
            if (left := left - _actions(table.row(row))) >= 0 or float(time[row]) < fastest
        ]  # fmt: skip
        if not some:
            break
        layouts, estimates = [table.row(row) for row in some], [found.row(row) for row in some]
        for row, one in zip(some, refine(job.workload, job.cluster, job.trainer, layouts, estimates), strict=True):
            walked[row] = float(one.step_time[0])
            factors.setdefault(int(kind[row]), []).append(walked[row] / float(found.step_time[row]))
    extra = time - found.step_time
    return dataclasses.replace(found, time={**found.time, "bubble": found.time["bubble"] + extra})


def _pipeline_kind(table: Layout) -> NDArray[np.int64]:
    """One number for each schedule, number of stages and of virtual stages."""
    schedule, pp, vpp = (np.asarray(value, dtype=np.int64) for value in (table.schedule, table.pp, table.vpp))
    return np.broadcast_to((schedule << 48) | (pp << 24) | vpp, len(table))


def _corrected(
    closed: Floats, kind: NDArray[np.int64], factors: dict[int, list[float]], walked: dict[int, float]
) -> Floats:
    """Step times, those of walked rows as walked, the others by the factor of their kind of pipeline."""
    time = closed.copy()
    for one, known in factors.items():
        rows = kind == one
        time[rows] *= float(np.median(known))
    for row, value in walked.items():
        time[row] = value
    return time


def _front(job: Job, table: Layout, found: Estimate | None, best: list[Point]) -> tuple[Point, ...]:
    """The front of what fits, ``best`` included where they lie on it, spread over MOST_ON_FRONT members."""
    points = [one for one in best if one.fits]
    known = [one.layout for one in best]
    if found is not None:
        speed, fit = found.tokens_per_second_per_gpu, fits(job, found)
        rows = np.flatnonzero(fit & (speed >= LEAST_SPEED * np.max(speed[fit], initial=0.0)))
        members = rows[pareto(found.memory_peak[rows], speed[rows])]
        points += [one for one in _points(job, table.take(members), found.take(members)) if one.layout not in known]
    memory, speed = (
        np.array([getattr(one, name) for one in points]) for name in ("memory_gib", "tokens_per_second_per_gpu")
    )
    front = [points[row] for row in pareto(memory, speed)]
    spread = np.unique(np.linspace(0, len(front) - 1, min(len(front), MOST_ON_FRONT)).round().astype(int))
    return tuple(front[row] for row in spread)


def _thinned(job: Job, table: Layout, found: Estimate | None, always: list[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS layouts that spread over the picture, what fits first, and those to be shown ``always``."""
    kept = list({id(one): one for one in always}.values())
    if found is None:
        return tuple(kept)
    memory, speed, fit = found.memory_peak / GIB, found.tokens_per_second_per_gpu, fits(job, found)
    best = np.max(speed[fit], initial=0.0) or speed.max()
    shown = np.flatnonzero((memory <= 2.0 * found.usable_memory / GIB) & (speed >= LEAST_SPEED * best))
    side = max(int(np.sqrt(2 * MOST_POINTS)), 1)

    def place(value: Floats) -> NDArray[np.int64]:
        low, high = value.min(), value.max()
        return np.minimum((value - low) / max(high - low, 1e-12) * side, side - 1).astype(np.int64)

    if len(shown) > MOST_POINTS:  # one layout for each small square of the picture, fitting ones and others apart
        square = (place(memory[shown]) * side + place(speed[shown])) * 2 + fit[shown]
        _, first = np.unique(square, return_index=True)
        shown = shown[np.sort(first)]
        shown = shown[np.unique(np.linspace(0, len(shown) - 1, min(len(shown), MOST_POINTS)).round().astype(int))]
    return (*kept, *_points(job, table.take(shown), found.take(shown)))

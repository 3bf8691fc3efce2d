"""Every legal layout of a job, priced: the best step time of each TP x PP, and throughput against memory.

The search prices only what could be among the best; a picture needs the others too. Without memory options every legal layout is
priced, the fast and the lean ones with recompute as well, and offload where the search would try it: where nothing fits without it.
"""

from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cost.estimate import Estimate, estimate, join
from planner.cost.memory.states import COMPONENTS
from planner.cost.price.deduplicate import distinct
from planner.cost.refine import refine
from planner.layout import FIELDS, Layout
from planner.questions.sensitivity.pull import MOST
from planner.record import record
from planner.rules import RULES, Job, allowed
from planner.search import PLAN_FIELDS, Finding, best_splits, fits
from planner.space import OFFLOADS, Pins, base_layouts, recompute_options, stack
from planner.units import GIB

NEAR = 1.25
"""Cells up to this much behind the best get the best split of layers."""
LEAST_SPEED = 0.4
"""Layouts below this part of the best throughput are left out of pictures and fronts: nobody would run them."""
OF_A_CELL = 200
"""Fastest layouts of a TP x PP that get memory options, and as many of the leanest."""
SQUARES = 50
"""A picture keeps one layout for each small square, of which it has so many along each side; more only hide each other."""
MOST_ACTIONS = 40_000
"""Forward and backward passes that are walked at once: about half a second. Pipelines of 64 stages have hundreds of thousands."""


@record
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


@record
class Cell:
    """One TP x PP: its best layout, or why there is none."""

    tp: int
    pp: int
    best: Point | None
    """The fastest layout that fits; where none fits the one that needs least memory; None where none is legal."""
    rule: str
    """Name of the rule that refuses every layout of this cell; '' = some are legal."""


@record
class Landscape:
    """All layouts of a job, as far as a picture can show them."""

    cells: tuple[Cell, ...]
    """Every TP x PP whose product divides the GPUs and of which at least one row and one column has a legal layout."""
    points: tuple[Point, ...]
    """Layouts of different memory and throughput, thinned; the front and the plan are always among them."""
    front: tuple[Point, ...]
    """Layouts that fit and that no other beats in both throughput and memory, least memory first."""
    near: tuple[Layout, ...]
    """The fastest layouts that fit, where few do also others, at most 1.5 times as slow as the plan."""
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
    times = [float(one.step_time[0]) for one in (found, *finding.estimates)]
    every = _Layouts(job, _variants(job, plain, Layout.stack([layout, *finding.layouts])), times)
    every.walk(every.best_of_cells())
    every.walk(every.front())
    cells, front, drawn = every.best_of_cells(), every.front(), every.thinned()
    points = every.points(np.unique(np.concatenate([[0], cells, front, drawn])))
    return Landscape(
        cells=_cells(job, base, [points[row] for row in cells.tolist()]),
        points=tuple(points[row] for row in dict.fromkeys([0, *front.tolist(), *drawn.tolist()])),
        front=tuple(points[row] for row in front.tolist()), near=tuple(map(every.table.row, every.near())), plan=points[0],
        legal=len(plain), priced=len(every.table), fitting=int(every.fit.sum()),
    )  # fmt: skip


def _price(job: Job, layouts: Layout) -> Estimate:
    return estimate(job.workload, job.cluster, job.trainer, layouts)


def _variants(job: Job, plain: Layout, known: Layout) -> tuple[Layout, Estimate]:
    """Some known layouts and all others with their closed form: plain, with recompute, offloaded where a cell has nothing that
    fits, and with the best split of layers over the stages where a cell is near the best."""
    tables, prices = [known], [_price(job, known)]

    def add(layouts: list[Layout]) -> None:
        stacked = stack(layouts)
        legal = stacked.take(allowed(job, stacked)) if len(stacked) else stacked
        if len(legal):
            tables.append(legal)
            prices.append(_price(job, legal))

    add([plain])
    if len(plain):
        some = plain.take(_worth_options(plain, prices[1]))
        if options := recompute_options(job, Pins()):
            add([option.apply(some, job.model) for option in options])
        if job.trainer.legal.offload_optimizer:
            table = stack(tables)
            left = _left_out(job, table, join(prices, len(table)))
            level = min((one for one in job.trainer.legal.zero if one), default=0)
            alone = (np.asarray(left.zero) == 0) & (np.asarray(left.dp) * np.asarray(left.cp) == 1)
            zero = np.where(alone, level, left.zero)
            add([left.replace(offload_optimizer=share, zero=zero) for share in OFFLOADS])
    table = stack(tables)
    found = join(prices, len(table))
    fit = fits(job, found)
    rows = _first_of_cells(table, np.flatnonzero(fit), 1, found.step_time)
    near = rows[found.step_time[rows] <= NEAR * found.step_time[fit].min(initial=np.inf)]
    splits = best_splits(job, Pins(), [table.row(row) for row in near]) if len(near) else []
    if splits:
        every = stack([table, Layout.stack([one for one, _ in splits])])
        return every, join([found, *(one for _, one in splits)], len(every))
    return table, found


def _worth_options(table: Layout, found: Estimate) -> NDArray[np.intp]:
    """Of the layouts that differ only in the cut of the pipeline: the fastest and the one that needs least memory; of each
    TP x PP the first OF_A_CELL in both."""
    _, group = distinct(table, PLAN_FIELDS, few=0)
    ends = (found.step_time, found.memory_needed)
    orders = [np.argsort(value, kind="stable") for value in ends]
    rows = np.unique(np.concatenate([order[np.unique(group[order], return_index=True)[1]] for order in orders]))
    return np.unique(np.concatenate([_first_of_cells(table, rows, OF_A_CELL, value) for value in ends]))


def _left_out(job: Job, table: Layout, found: Estimate) -> Layout:
    """Layouts of cells where nothing fits that would fit, or come closest, with the optimizer states elsewhere."""
    key = _key(table)
    rows = np.flatnonzero(~np.isin(key, key[fits(job, found)]))
    without = found.memory_needed - found.memory["optimizer_states"] * (1.0 + job.trainer.stored.fragmentation)
    time = np.where(without <= found.usable_memory, found.step_time, np.inf)
    return table.take(np.unique(np.concatenate([_first_of_cells(table, rows, OF_A_CELL, one) for one in (time, without)])))


def _first_of_cells(table: Layout, rows: NDArray[np.intp], most: int, *values: NDArray[Any]) -> NDArray[np.intp]:
    """Of some rows, the ``most`` with the least values in each TP x PP, the last value first."""
    ordered = rows[np.lexsort((*(value[rows] for value in values), _key(table)[rows]))]
    _, start, count = np.unique(_key(table)[ordered], return_index=True, return_counts=True)
    return ordered[np.arange(len(ordered)) - np.repeat(start, count) < most]


def _key(table: Layout) -> NDArray[np.int64]:
    """TP x PP as one number."""
    return np.asarray(table.tp, dtype=np.int64) << 32 | np.asarray(table.pp, dtype=np.int64)


def pareto(memory: Floats, throughput: Floats) -> NDArray[np.intp]:
    """Rows that no other beats in both: throughput rises with memory along them, least memory first."""
    order = np.lexsort((-throughput, memory))
    best = np.maximum.accumulate(throughput[order])
    return order[np.diff(best, prepend=-np.inf) > 0]


class _Layouts:
    """Many layouts with their estimates: the first ones on the exact timeline, and others when they are walked.

    The step time of a layout that is not walked is its closed form times what the timeline changed, in the median, on those
    with the same schedule, stages and virtual stages; no such layout fits and is faster than the fastest that is exact.
    """

    def __init__(self, job: Job, priced: tuple[Layout, Estimate], times: list[float]) -> None:
        """``times`` are the exact ones of the first layouts, in seconds; of equal layouts the first is kept."""
        table, found = priced
        _, group = distinct(table, FIELDS, few=0)
        kept = np.sort(np.unique(group, return_index=True)[1])
        self.job, self.table, self.found = job, table.take(kept), found.take(kept)
        self.fit = fits(job, self.found)
        self.exact = kept < len(times)
        self.time = self.found.step_time.copy()
        self.time[self.exact] = np.array(times)[kept[self.exact]]
        self._follow()

    @property
    def rate(self) -> Floats:
        """Tokens per second and GPU."""
        return self.found.tokens_per_second_per_gpu * self.found.step_time / self.time

    def _follow(self) -> None:
        """Correct the step times of what is not exact."""
        closed = self.found.step_time
        _, kind = distinct(self.table, ("schedule", "pp", "vpp"), few=0)
        for one in np.unique(kind[self.exact]):
            alike = kind == one
            factor = np.median((self.time / closed)[alike & self.exact])
            self.time[alike & ~self.exact] = (closed * factor)[alike & ~self.exact]
        others, known = self.fit & ~self.exact, self.time[self.fit & self.exact]
        self.time[others] = np.maximum(self.time[others], known.min() if len(known) else 0.0)

    def walk(self, rows: NDArray[np.intp]) -> None:
        """Put those of some layouts that fit on the exact timeline, the fastest first, as far as MOST_ACTIONS go."""
        rows = rows[self.fit[rows] & ~self.exact[rows]]
        rows = rows[np.argsort(self.time[rows], kind="stable")]
        one = self.table.take(rows)
        pp, vpp, m = (np.asarray(value) for value in (one.pp, one.vpp, one.num_microbatches))
        actions = np.where(pp > 1, 2 * pp * vpp * (np.minimum(m, 6 * pp) + np.minimum(m, 5 * pp)), 0)  # [walked_time]
        rows = rows[np.cumsum(actions) <= MOST_ACTIONS]
        if len(rows):
            job, layouts = self.job, [self.table.row(row) for row in rows]
            exact = refine(job.workload, job.cluster, job.trainer, layouts, [self.found.row(row) for row in rows])
            self.time[rows] = [float(one.step_time[0]) for one in exact]
            self.exact[rows] = True
            self._follow()

    def best_of_cells(self) -> NDArray[np.intp]:
        """The fastest layout that fits of every TP x PP, one that is exact if there is any; else the leanest."""
        value = np.where(self.fit, self.time, self.found.memory_needed)
        return _first_of_cells(self.table, np.arange(len(value)), 1, value, ~(self.fit & self.exact), ~self.fit)

    def near(self) -> list[int]:
        """The fastest that fit, then the others, up to 1.5 times as slow as the first layout."""
        rows = np.lexsort((self.time, ~self.fit))
        return list(rows[self.time[rows] < 1.5 * self.time[0]][:MOST].tolist())

    def _fast(self) -> NDArray[np.bool_]:
        """Fast enough for a picture."""
        return self.rate >= LEAST_SPEED * self.rate[self.fit if self.fit.any() else slice(None)].max()

    def front(self) -> NDArray[np.intp]:
        """What fits and nothing that fits beats in both throughput and memory, least memory first."""
        rows = np.flatnonzero(self.fit & self._fast())
        return rows[pareto(self.found.memory_peak[rows], self.rate[rows])]

    def thinned(self) -> NDArray[np.intp]:
        """One layout for each small square of the picture: the fastest that fits if there is any."""
        memory = self.found.memory_peak / self.found.usable_memory
        rows = np.flatnonzero((memory <= 2.0) & self._fast())
        rows = rows[np.lexsort((self.time[rows], ~self.fit[rows]))]
        square = np.zeros(len(rows), dtype=np.int64)
        for value in (memory[rows], self.rate[rows]):
            low, high = value.min(initial=np.inf), value.max(initial=0.0)
            square = square * SQUARES + np.minimum((value - low) / max(high - low, 1e-12) * SQUARES, SQUARES - 1).astype(int)
        return rows[np.unique(square, return_index=True)[1]]

    def points(self, rows: NDArray[np.intp]) -> dict[int, Point]:
        """Some layouts with their numbers, by row."""
        found = self.found.take(rows)
        columns = (
            self.time[rows], self.rate[rows], found.memory_peak / GIB, found.out_of_memory_probability, self.fit[rows],
            np.argmax(np.stack([found.memory[name] for name in COMPONENTS]), axis=0),
        )  # fmt: skip
        return {
            row: Point(
                layout=self.table.row(row), step_time_s=step, tokens_per_second_per_gpu=rate, memory_gib=peak,
                out_of_memory_probability=chance, fits=fit, largest=COMPONENTS[largest],
            )
            for row, step, rate, peak, chance, fit, largest in zip(rows.tolist(), *(one.tolist() for one in columns), strict=True)
        }  # fmt: skip


def _cells(job: Job, base: Layout, best: list[Point]) -> tuple[Cell, ...]:
    """Every TP x PP that the space has, its best layout, and the rule where none is legal."""
    points = {(int(one.layout.tp), int(one.layout.pp)): one for one in best}
    tps, pps = ({cell[side] for cell in points} for side in (0, 1))
    return tuple(
        Cell(tp=tp, pp=pp, best=points.get((tp, pp)), rule="" if (tp, pp) in points else _rule(job, base, tp, pp))
        for tp in sorted(tps) for pp in sorted(pps) if job.cluster.num_gpus % (tp * pp) == 0
    )  # fmt: skip


def _rule(job: Job, base: Layout, tp: int, pp: int) -> str:
    """The rule that refuses most layouts of a cell; 'batch' where the space has none because the batch does not divide."""
    rows = base.take((np.asarray(base.tp) == tp) & (np.asarray(base.pp) == pp))
    if not len(rows):
        return "batch"
    refused = {rule.name: int(np.sum(~np.broadcast_to(rule.holds(job, rows), len(rows)))) for rule in RULES}
    return max(refused, key=lambda name: refused[name])

"""What the 1,440 rows of vTrain's single-node table are, and how well any model could choose among them.

They were published as measured. This prints, from the rows alone:

- how far series of one layout lie from a straight line in the number of microbatches, and how much the part that data
  parallelism adds differs between series: both zero to the last digit, so they were computed, from one time of a layer for each
  of 32 shapes (hidden size, tp, micro batch);
- those 32 times, beside the model's GPU time of a layer without and with recompute;
- the regret over the same sweeps of a model that knows everything else exactly (embedding, logits, optimizer, collectives,
  pipeline) and has for a layer max(host time, a + b times the model's GPU time): the least that any such model can reach;
- the regret of the planner's own times of a layer with everything else as published, and the other way round.

    python tools/computed_rows.py
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.arrays import Floats  # noqa: E402
from planner.cost.price.layer_costs import INDEX, price_blocks  # noqa: E402
from planner.layout import Layout, Recompute  # noqa: E402
from planner.questions.accuracy.numbers import kendall_tau, predict  # noqa: E402
from planner.questions.accuracy.ranking import SWEEP  # noqa: E402
from planner.runs import Run, read_runs  # noqa: E402

SOURCE = "oss-vtrain-single-node"
MS = 1000.0
GRID = (np.arange(2.2, 4.7, 0.1), np.arange(0.0, 2.6, 0.25), np.arange(0.8, 2.05, 0.1))
"""Host time of a layer in ms, a in ms, and b, of which the best for the choice itself is taken."""
Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row in numbers."""

    h: int
    layers: int
    t: int
    p: int
    d: int
    b: int
    m: int
    ms: float
    run: Run

    @property
    def shape(self) -> Shape:
        """Hidden size, tp and micro batch."""
        return self.h, self.t, self.b

    @property
    def layer_times(self) -> float:
        """How often the time of one layer and microbatch is in the step: (m + p - 1) L / p, 1F1B."""
        return (self.m + self.p - 1) * self.layers / self.p


def rows() -> list[Row]:
    found = []
    for run in read_runs([ROOT / "profiles" / "runs" / f"{SOURCE}.yaml"]):
        assert run.workload is not None and run.layout is not None and run.measured.step_time is not None
        model, layout = run.workload.model, run.layout
        t, p, d, b, m = (
            int(x) for x in (layout.tp, layout.pp, layout.dp, layout.micro_batch_size, layout.num_microbatches)
        )
        ms = run.measured.step_time * MS
        found.append(Row(h=model.hidden_size, layers=model.num_layers, t=t, p=p, d=d, b=b, m=m, ms=ms, run=run))
    return found


def print_additivity(table: list[Row]) -> None:
    """Differences that no measurement would repeat: per microbatch, and between numbers of replicas."""
    series: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    replicas: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for one in table:
        series[(one.h, one.layers, one.t, one.p, one.d, one.b)].append(one)
        replicas[(one.h, one.layers, one.t, one.p, one.b, one.m)][one.d] = one.ms
    long = [sorted(members, key=lambda one: one.m) for members in series.values() if len(members) > 2]
    worst = 0.0
    for members in long:
        first, last = members[0], members[-1]
        slope = (last.ms - first.ms) / (last.m - first.m)
        worst = max(worst, *(abs(one.ms - first.ms - slope * (one.m - first.m)) for one in members))
    print(f"{len(long)} series of 3 and more numbers of microbatches: at most {worst:.4f} ms from a straight line")
    added: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for key, by_d in replicas.items():
        for low, high in itertools.pairwise(sorted(by_d)):
            added[(*key[:4], low, high)].append(by_d[high] - by_d[low])
    spread = max(max(values) - min(values) for values in added.values())
    count = sum(map(len, added.values()))
    print(
        f"{len(added)} steps of dp in {count} pairs of rows: equal within {spread:.4f} ms whatever micro batch and batch are"
    )


def layer_times(table: list[Row]) -> dict[Shape, float]:
    """ms of one layer and microbatch, both passes, by differences of 24 and 12 layers and of numbers of microbatches.

    Where one number of microbatches is there only, what does not grow with it is that of micro batch 4.
    """
    known = {(one.h, one.layers, one.t, one.d, one.b, one.m): one.ms for one in table if one.p == 1}
    each: dict[tuple[int, int, int, int], dict[int, float]] = defaultdict(dict)  # (h, t, d, b): m -> ms per layer
    for (h, layers, t, d, b, m), ms in known.items():
        if layers == 24:
            each[h, t, d, b][m] = (ms - known[h, 12, t, d, b, m]) / 12
    found: dict[Shape, float] = {}
    rest: dict[tuple[int, int, int], float] = {}
    for (h, t, d, b), by_m in sorted(each.items()):
        low, high = min(by_m), max(by_m)
        if high > low:
            found[h, t, b] = (by_m[high] - by_m[low]) / (high - low)
            rest[h, t, d] = by_m[low] - low * found[h, t, b]
        elif (h, t, b) not in found:
            found[h, t, b] = (by_m[low] - rest[h, t, d]) / low
    return found


def gpu_times(table: list[Row]) -> dict[Shape, dict[str, float]]:
    """The model's ms of a layer: operators of both passes, their collectives, and what recompute adds."""
    found: dict[Shape, dict[str, float]] = {}
    for one in table:
        run = one.run
        if (
            one.shape in found
            or run.workload is None
            or run.cluster is None
            or run.trainer is None
            or run.layout is None
        ):
            continue
        plain = Layout.stack([run.layout.replace(recompute=int(Recompute.NONE))])
        whole = Layout.stack([run.layout.replace(recompute=int(Recompute.FULL))])
        dense, full = (price_blocks(run.workload, run.cluster, run.trainer, x).dense[:, 0] * MS for x in (plain, whole))
        found[one.shape] = {
            "gpu": float(dense[INDEX["forward"]] + dense[INDEX["dgrad"]] + dense[INDEX["wgrad"]]),
            "tp": float(dense[INDEX["tp_forward"]] + dense[INDEX["tp_backward"]]),
            "recompute": float(full[INDEX["recompute"]]),
        }
    return found


class Sweeps:
    """The sweeps of the table, and what choosing by other times of a layer would cost."""

    def __init__(self, table: list[Row], layer: dict[Shape, float]) -> None:
        self.shapes = sorted(layer)
        number = {shape: index for index, shape in enumerate(self.shapes)}
        self._layer = np.array([layer[shape] for shape in self.shapes])
        self._of = np.array([number[one.shape] for one in table])
        self._times = np.array([one.layer_times for one in table])
        self._ms = np.array([one.ms for one in table])
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, one in enumerate(table):
            groups[one.h, one.layers, one.t * one.p * one.d, one.b * one.m * one.d].append(index)
        self._groups = [np.array(members) for members in groups.values() if len(members) >= SWEEP]

    def predicted(self, layer: Floats) -> Floats:
        """ms of every row with other times of a layer and everything else as published."""
        return self._ms + self.change(layer - self._layer)

    def change(self, longer: Floats) -> Floats:
        """ms that every row takes longer when a layer does."""
        return np.asarray(self._times * longer[self._of])

    def regrets(self, guess: Floats) -> Floats:
        return np.array([self._ms[g[guess[g].argmin()]] / self._ms[g].min() - 1.0 for g in self._groups])

    def tau(self, guess: Floats) -> float:
        found = [kendall_tau(guess[g], self._ms[g]) for g in self._groups]
        return float(np.mean([one for one in found if one is not None]))


def print_floor(sweeps: Sweeps, model: dict[Shape, dict[str, float]]) -> None:
    gpu = np.array([model[shape]["gpu"] for shape in sweeps.shapes])
    tp = np.array([model[shape]["tp"] for shape in sweeps.shapes])
    best: tuple[float, tuple[float, ...]] = (np.inf, ())
    for host, plus, times in itertools.product(*GRID):
        mean = float(sweeps.regrets(sweeps.predicted(tp + np.maximum(host, plus + times * gpu))).mean())
        best = min(best, (mean, (float(host), float(plus), float(times))))
    host, plus, times = best[1]
    guess = sweeps.predicted(tp + np.maximum(host, plus + times * gpu))
    tried = np.prod([len(one) for one in GRID])
    print_regrets(
        f"best of {tried} models max({host:.1f}, {plus:.2f} + {times:.2f} GPU) ms, all else published", sweeps, guess
    )


def print_split(table: list[Row], sweeps: Sweeps, layer: dict[Shape, float]) -> None:
    """Where the planner's regret comes from: its times of a layer, or all the rest."""
    answers = np.array([(one.step_time or np.nan) * MS for one in predict([row.run for row in table])])
    ours = layer_times([replace(row, ms=ms) for row, ms in zip(table, answers.tolist(), strict=True)])
    mine, theirs = (np.array([times[shape] for shape in sweeps.shapes]) for times in (ours, layer))
    print_regrets("the planner", sweeps, answers)
    print_regrets("the planner's times of a layer, all else published", sweeps, sweeps.predicted(mine))
    print_regrets("published times of a layer, all else the planner's", sweeps, answers + sweeps.change(theirs - mine))


def print_regrets(name: str, sweeps: Sweeps, guess: Floats) -> None:
    found = sweeps.regrets(guess)
    print(f"{name}: mean regret {found.mean():.1%}, worst {found.max():.1%}, tau {sweeps.tau(guess):.2f}")


def main() -> None:
    table = rows()
    print_additivity(table)
    layer, model = layer_times(table), gpu_times(table)
    print("hidden tp micro batch | a layer, ms | model: GPU, + collectives, + recompute")
    for shape in sorted(layer):
        one = model[shape]
        sums = np.cumsum([one["gpu"], one["tp"], one["recompute"]])
        print(
            f"{shape[0]:6d} {shape[1]:2d} {shape[2]:11d} | {layer[shape]:11.3f} | "
            + " ".join(f"{x:6.2f}" for x in sums)
        )
    sweeps = Sweeps(table, layer)
    print_split(table, sweeps, layer)
    print_floor(sweeps, model)


if __name__ == "__main__":
    main()

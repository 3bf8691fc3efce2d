"""Writes profiles/serving_error_bars.yaml from the residuals of serving runs: python tools/update_serving_bars.py [RUNS...].

Run it after a change of the serving model; RUNS are files or folders of runs, by default those that come with planner. Residuals are
ln(measured / predicted) of rows that count. A bar is made of the family-weighted quantiles (1 - c) / 2 and (1 + c) / 2; c is the
smallest that holds nine of ten of each family, made without it, as a mean over families.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner import library  # noqa: E402
from planner.questions.accuracy.serving_errors import ServingPair  # noqa: E402
from planner.serving.intervals import ALL, BASES, KINDS, SATURATED, base_of  # noqa: E402
from planner.serving.runs.predicted_runs import PREDICTED, predict_runs  # noqa: E402
from planner.serving.runs.run_schema import read_serving_file  # noqa: E402
from planner.serving.runs.serving_run import runs_of  # noqa: E402

HEAD = """# Intervals of serving estimates: measured / predicted of nine of ten rows, by quantity and kind of run. Written by
# tools/update_serving_bars.py from {rows:,} rows of {families} families (model x device x engine). held: the part that they hold of
# families that were left out, as a mean over families.
"""
LEAST = 3
"""Families from which a kind has a bar of its own."""
UNMEASURED = {ALL: {"low": 0.9, "high": 1.1, "middle": 1.0, "runs": 0, "families": 0}}
"""Of memory, which no published run gives: engines fill what their accounting leaves."""
AIM = 0.9
LEVELS = np.concatenate([np.arange(0.80, 0.995, 0.005), [0.995, 0.998, 1.0]])
WIDEN = np.exp(np.arange(0.0, 1.5, 0.02))
"""Factors by which the ends are moved out where the quantiles alone do not reach the aim."""
Families = dict[str, np.ndarray[Any, Any]]


def ends(families: Families, level: float) -> tuple[float, float]:
    """Quantiles of residuals in which every family weighs the same."""
    values = np.concatenate(list(families.values()))
    weights = np.concatenate([np.full(len(one), 1.0 / len(one)) for one in families.values()])
    order = np.argsort(values)
    shares = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    low, high = np.interp([(1.0 - level) / 2.0, (1.0 + level) / 2.0], shares, values[order])
    return float(min(low, 0.0)), float(max(high, 0.0))


def left_out(families: Families, level: float, wider: float) -> float:
    """Part inside of a family that the ends were made without, as a mean over families."""
    held = []
    for name, values in families.items():
        low, high = ends({key: one for key, one in families.items() if key != name}, level)
        held.append(np.mean((values >= low - np.log(wider)) & (values <= high + np.log(wider))))
    return float(np.mean(held))


def bar(families: Families) -> tuple[dict[str, Any], float]:
    """The bar of some families, and what it holds of those left out."""
    level, wider, held = 1.0, 1.0, 0.0
    tries = [(level, 1.0) for level in LEVELS] + [(1.0, wider) for wider in WIDEN]
    for level, wider in tries:
        held = left_out(families, level, wider)
        if held >= AIM:
            break
    low, high = (float(one) for one in np.exp(ends(families, level)) * (1.0 / wider, wider))
    values = np.concatenate(list(families.values()))
    middle = ends(families, 0.0)
    found = {
        "low": round(low, 3), "high": round(high, 3),
        "middle": round(float(np.exp(middle[0] if middle[0] < 0 else middle[1])), 3), "runs": len(values), "families": len(families),
    }  # fmt: skip
    return found, held


def residuals(pairs: list[ServingPair]) -> dict[str, dict[str, Families]]:
    """By base, kind and family."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for pair in pairs:
        if pair.answer.status == PREDICTED and pair.run.counts and not pair.run.speculates:
            for name in pair.answer.quantities:
                error = pair.error(name)
                if error is not None and not (pair.run.law and base_of(name) == "throughput"):
                    for kind in {pair.kind, pair.kind.removesuffix(SATURATED), ALL}:
                        found[base_of(name)][kind][pair.run.family].append(-np.log1p(error))
    return {
        base: {kind: {name: np.array(one) for name, one in families.items()} for kind, families in kinds.items()}
        for base, kinds in found.items()
    }


@click.command(help=__doc__)
@click.argument("runs", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(runs: tuple[Path, ...]) -> None:
    """Read, predict, write."""
    warnings.simplefilter("ignore")
    paths = runs or (ROOT / "profiles" / "serving-runs",)
    files = [one for path in paths for one in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    read = runs_of(row for file in files for row in read_serving_file(file))
    pairs = [ServingPair(run=run, answer=answer) for run, answer in zip(read, predict_runs(read), strict=True)]
    found, held = residuals(pairs), {}
    table: dict[str, Any] = {}
    for base in BASES:
        kinds, entries, shares = found.get(base, {}), {}, list[float]()
        for kind in (*KINDS, ALL):
            if kind in kinds and (kind == ALL or len(kinds[kind]) >= LEAST):
                entries[kind], share = bar(kinds[kind])
                shares += [share] * len(kinds[kind])
                print(f"{base:14} {kind:32} {entries[kind]} holds {share:.3f}")
        table[base] = entries or UNMEASURED
        if shares:
            held[base] = round(float(np.mean(shares)), 3)
    families = len({pair.run.family for pair in pairs})
    text = HEAD.format(rows=len(pairs), families=families) + library.dump_yaml({"held": held, **table})
    library.write_whole(ROOT / "profiles" / "serving_error_bars.yaml", text)


if __name__ == "__main__":
    main()

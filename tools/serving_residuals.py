"""Errors of serving runs at a glance: by class, file, family, quantity, load or degree, the worst groups first.

    python tools/serving_residuals.py                                       # the classes that the bounds speak of
    python tools/serving_residuals.py RUNS/ --class "TPOT, closed loop, dense" --by family
    python tools/serving_residuals.py RUNS/ --quantity tpot_ms.mean --by value --only gpu=h100-sxm --only engine=vllm
    python tools/serving_residuals.py RUNS/ --class TTFT --rows 20          # single rows

PATHS are files or folders in the schema of profiles/serving-runs/README.md; without any, the runs that come with planner. Rows are read once: a copy
is kept under the system's folder for temporary files until a file changes. --by and --only take: file, family, model, gpu,
engine, version, weights, kind, value (requests in flight), tp, gpus, attn_dp, ep, isl, osl, date, status, quantity.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner import library  # noqa: E402
from planner.questions.accuracy.serving_errors import CLASSES, ServingPair, coverage, figures_of, of_class  # noqa: E402
from planner.serving.runs.predicted_runs import ServingAnswer, predict_runs  # noqa: E402
from planner.serving.runs.run_schema import ServingRow, read_serving_file  # noqa: E402
from planner.serving.runs.serving_run import ServingRun, runs_of  # noqa: E402

Errors = list[tuple[ServingPair, float]]
LOOKS: dict[str, Callable[[ServingPair], Any]] = {
    "file": lambda one: one.run.source,
    "family": lambda one: one.run.family,
    "model": lambda one: one.run.model.name if one.run.model else one.run.row.get("model"),
    "gpu": lambda one: one.run.row.get("hardware.gpu"),
    "engine": lambda one: one.run.row.get("engine.name"),
    "version": lambda one: one.run.engine.full if one.run.engine else "",
    "weights": lambda one: one.run.formats.get("weights"),
    "kind": lambda one: one.run.kind,
    "value": lambda one: one.run.traffic.value if one.run.traffic else None,
    "tp": lambda one: one.answer.layout.tp if one.answer.layout else None,
    "attn_dp": lambda one: one.answer.layout.attn_dp if one.answer.layout else None,
    "ep": lambda one: one.answer.layout.ep if one.answer.layout else None,
    "gpus": lambda one: one.run.row.get("hardware.count"),
    "isl": lambda one: one.run.row.get("load.isl"),
    "osl": lambda one: one.run.row.get("load.osl"),
    "lengths": lambda one: f"{one.run.row.get('load.isl')}/{one.run.row.get('load.osl')}",
    "date": lambda one: str(one.run.row.get("date"))[:7],
    "status": lambda one: f"{one.answer.status} {one.answer.reason}"[:90],
}


def rows_of(path: Path) -> list[ServingRow]:
    """Rows of a file, from the copy of an earlier call where the file is the same."""
    text = path.read_bytes() + (ROOT / "planner/serving/runs/run_schema.py").read_bytes()
    kept = Path(tempfile.gettempdir()) / f"serving-rows-{hashlib.sha256(text).hexdigest()[:24]}.pickle"
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    rows = read_serving_file(path)
    kept.write_bytes(pickle.dumps(rows))
    return rows


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Files of runs in files and folders."""
    given = paths or [library.profiles_directory() / "serving-runs"]
    return [one for path in given for one in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]


def pairs_of(runs: list[ServingRun], jobs: int) -> list[ServingPair]:
    """Every run with its answer; whole models go to one process."""
    if jobs > 1:
        runs = sorted(runs, key=lambda one: one.family)
        cuts = [runs[len(runs) * part // (4 * jobs) : len(runs) * (part + 1) // (4 * jobs)] for part in range(4 * jobs)]
        with ProcessPoolExecutor(jobs) as pool:
            answers = [one for part in pool.map(predict_runs, cuts) for one in part]
    else:
        answers = predict_runs(runs)
    return [ServingPair(run=run, answer=answer) for run, answer in zip(runs, answers, strict=True)]


def table(groups: dict[Any, Errors], most: int, ordered: bool) -> None:
    """A line for each group, the worst first, or in the order of its numbers."""
    found = [(key, figures_of(errors)) for key, errors in groups.items()]
    found.sort(key=(lambda one: one[0]) if ordered else (lambda one: -(one[1]["mean_abs"] or 0.0)))
    print(f"{'':52} {'n':>5} {'mean':>7} {'median':>7} {'p90':>7} {'bias':>7}  of families")
    for key, one in found[:most]:
        if one["n"]:
            figures = "".join(f"{100 * one[name]:7.1f} " for name in ("mean_abs", "median_abs", "p90_abs", "bias"))
            print(f"{str(key)[:52]:52} {one['n']:5} {figures} {100 * one['mean_of_families']:5.1f} ({one['families']})")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, as the flags say it."""

    paths: tuple[Path, ...]
    named: str
    quantity: str
    looks: tuple[str, ...]
    only: tuple[str, ...]
    rows: int
    most: int
    everything: bool
    jobs: int


def errors_of(pairs: list[ServingPair], question: Question) -> dict[str, Errors]:
    """Rows with their errors, by class, or of one quantity."""
    if not question.quantity:
        return {one.name: of_class(pairs, one) for one in CLASSES if question.named.lower() in one.name.lower()}
    counted = [pair for pair in pairs if pair.run.counts or question.everything]
    errors = [(pair, pair.error(question.quantity)) for pair in counted]
    return {question.quantity: [(pair, error) for pair, error in errors if error is not None]}


def grouped(errors: Errors, looks: Sequence[str]) -> dict[Any, Errors]:
    """By the value of one look, or by the values of several as one text."""
    groups: dict[Any, Errors] = {}
    for pair, error in errors:
        key = tuple(LOOKS[look](pair) for look in looks)
        groups.setdefault(" ".join(map(str, key)) if len(key) > 1 else key[0], []).append((pair, error))
    return groups


def worst_rows(errors: Errors, most: int) -> None:
    """A line for each of the rows with the largest errors."""
    for pair, error in sorted(errors, key=lambda one: -abs(one[1]))[:most]:
        load, layout = pair.run.row.data["load"], pair.answer.layout
        split = f"tp{layout.tp} pp{layout.pp} x{layout.replicas} dp{layout.attn_dp} ep{layout.ep}" if layout else ""
        print(f"{100 * error:+7.1f} {pair.run.id:45.45} {load.get('value')}@{load.get('isl')}/{load.get('osl')} {split} "
              f"{pair.run.formats.get('weights')} {dict(pair.run.measured)}"[:240])  # fmt: skip


@click.command(help=__doc__.partition("\n")[0])
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--class", "named", default="", help="Only classes whose name contains this.")
@click.option(
    "--quantity", default="", help="One quantity by schema name, of all counted rows, in place of the classes."
)
@click.option("--by", "looks", multiple=True, type=click.Choice([*LOOKS]), help="Groups; several make a cross table.")
@click.option("--only", multiple=True, metavar="KEY=VALUE", help="Rows whose KEY contains VALUE (==VALUE: is VALUE).")
@click.option("--rows", type=int, default=0, help="Also the N worst rows.")
@click.option("--most", type=int, default=60, help="Lines of a table.")
@click.option("--all", "everything", is_flag=True, help="Also rows that are not counted.")
@click.option("--jobs", type=int, default=2, help="Processes.")
def main(**flags: Any) -> None:
    """Read, predict, print."""
    question = Question(**flags)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    runs = runs_of(row for path in files_of(question.paths) for row in rows_of(path))
    runs = [one for one in runs if all(_meets(one, condition) for condition in question.only)]
    read = time.perf_counter() - start
    pairs = pairs_of(runs, question.jobs)
    print(f"{len(runs):,} rows, read in {read:.1f} s, predicted in {time.perf_counter() - start - read:.1f} s")
    shares = coverage(pairs).items()
    print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in shares))
    chosen = errors_of(pairs, question)
    if not question.looks:
        table(chosen, question.most, ordered=False)
    for name, errors in chosen.items() if question.looks else ():
        print(f"\n{name}")
        groups = grouped(errors, question.looks)
        table(groups, question.most, ordered=all(isinstance(key, (int, float)) for key in groups))
    for name, errors in chosen.items() if question.rows else ():
        print(f"\n{name}: worst rows")
        worst_rows(errors, question.rows)


def _meets(run: ServingRun, condition: str) -> bool:
    key, _, value = condition.partition("=")
    found = str(LOOKS[key](ServingPair(run=run, answer=ServingAnswer(status=""))))
    return found == value[1:] if value.startswith("=") else value in found


if __name__ == "__main__":
    main()

"""Benchmarks of one's own servers correct the host times of an engine: what differs between machines of one GPU.

A closed or open loop at a stated load gives the mean time per output token, which is GPU and host together:

    TPOT' = TPOT (g (1 - h) + k h)      h = share of the host in the decode step, g = factor of all kernels, k = of host times
    TTFT' = TTFT(k) + d                 d = what client and server take more before the first token

k and g are fitted to the logarithms of all TPOTs by least squares, with priors; they are told apart only as far as the runs differ
in h, and the interval of k says how far that is. g is said and not written: it is the GPU's, which ``plan profile`` measures. d is
the median over runs with a short queue.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.arrays import Floats
from planner.error_bars import Z90
from planner.errors import PlannerError
from planner.record import record
from planner.serving.engine import Engine, load_engine
from planner.serving.engine_facts import HOST
from planner.serving.measure.bench_files import read_bench
from planner.serving.measure.plan_comparison import compare_with
from planner.serving.plan_pricing import priced
from planner.serving.serve_plan import ServePlan, load_serve_plan

NOISE = 0.05
"""Standard deviation of the logarithm of a measured TPOT against the model, its own error included."""
HOST_PRIOR, KERNEL_PRIOR = 0.7, 0.1
"""How far hosts and GPUs of one kind differ: standard deviations of the logarithms of k and g. Hosts of clouds differ by a factor
of two in the rate of one core; clocks and power limits of one card by a tenth."""
LEAST_SHARE = 0.03
"""A host that takes less than this part of the steps of all runs is not determined by them."""
MOST_DOUBT = 0.25
"""Standard deviation of ln k above which the runs hardly determine it."""
FEWEST = 2
ROUNDS = 30


@record
class ServedRun:
    """One benchmark with its plan."""

    source: str
    plan: ServePlan
    """With the load that was measured, priced."""
    tpot: float
    """Measured mean, seconds."""
    ttft: float | None


@record
class ServingFit:
    """What the runs say of an engine's host."""

    base: Engine
    engine: Engine
    """With the fitted host times."""
    host: float
    """k."""
    host_range: tuple[float, float]
    """Nine of ten values of k that the runs allow lie within."""
    kernels: float
    """g: said, not written."""
    first_token: float
    """d: seconds."""
    rows: tuple[tuple[str, float, float, float], ...]
    """Run, measured TPOT, predicted before and after, seconds."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "engine": self.base.label, "host_factor": self.host, "host_range": list(self.host_range),
            "kernel_factor": self.kernels, "first_token_s": self.first_token,
            "host_s": dict(self.engine.host), "notes": list(self.notes),
            "runs": [
                {"source": one, "measured_tpot_s": measured, "before_s": before, "after_s": after}
                for one, measured, before, after in self.rows
            ],
        }  # fmt: skip


def read_served(pairs: Sequence[tuple[Path, Path]]) -> list[ServedRun]:
    """Plans with their benchmarks. Raises PlannerError."""
    found = []
    for plan_file, bench in pairs:
        plan = load_serve_plan(plan_file)
        compared = compare_with(plan, read_bench(bench, plan.num_gpus), causes=False)
        tpot = compared.result.latencies.get("tpot", {}).get("mean")
        if tpot is None:
            raise PlannerError(f"{bench}: it holds no mean time per output token, from which the host is fitted")
        ttft = compared.result.latencies.get("ttft", {}).get("mean")
        found.append(ServedRun(source=str(bench), plan=compared.plan, tpot=tpot, ttft=ttft))
    return found


def _told_apart(shares: Floats, gaps: Floats, notes: list[str]) -> tuple[float, float, float]:
    """``_factors`` where the host shows in the steps, else 1 for the host; with notes on what the runs do not say."""
    most = float(np.max(shares))
    if most < LEAST_SHARE:
        notes.append(f"the host takes at most {100 * most:.1f} % of the steps of these runs: its times stay as they are")
        host, kernels, doubt = 1.0, math.exp(float(np.mean(gaps))), HOST_PRIOR
    else:
        host, kernels, doubt = _factors(shares, gaps)
        if doubt > MOST_DOUBT:
            notes.append(
                "these runs hardly tell the host from the GPU: add some with short steps (one request at once, a small model), or "
                "measure the GPU with 'plan profile'"
            )
    if abs(kernels - 1.0) > 0.03:
        notes.append(f"kernels take {kernels:.2f} times as long as priced: not written, measure the GPU with 'plan profile'")
    return host, kernels, doubt


def fit_serving(runs: Sequence[ServedRun]) -> ServingFit:
    """Host times of the engine of all runs. Raises PlannerError for several engines, and for too few runs."""
    engines = {one.plan.engine for one in runs}
    if len(engines) > 1:
        raise PlannerError(f"the runs are of {', '.join(sorted(engines))}; calibrate one engine and version at a time")
    if len(runs) < FEWEST:
        raise PlannerError(
            f"one run does not tell the host from the GPU; measure {FEWEST} or more, of few and of many requests at once"
        )
    base = load_engine(engines.pop())
    doubled = replace(base, host=_slower(base, 2.0))
    shares = np.array([_tpot(one.plan, doubled) / _tpot(one.plan, base) - 1.0 for one in runs])
    gaps = np.array(
        [math.log(one.tpot / one.plan.prediction.latency("tpot")) for one in runs if one.plan.prediction is not None]
    )
    notes: list[str] = []
    host, kernels, doubt = _told_apart(shares, gaps, notes)
    times = _slower(base, host)
    extra = _first_token(runs, replace(base, host=times), notes)
    times["first_token"] = max(times["first_token"] + extra, 0.0)
    engine = replace(base, host=times)
    spread = host * math.exp(-Z90 * doubt), host * math.exp(Z90 * doubt)
    rows = tuple((one.source, one.tpot, _tpot(one.plan, base), _tpot(one.plan, engine)) for one in runs)
    return ServingFit(
        base=base, engine=engine, host=host, host_range=spread, kernels=kernels,
        first_token=times["first_token"], rows=rows, notes=tuple(notes)
    )  # fmt: skip


def _slower(engine: Engine, host: float) -> dict[str, float]:
    """Host times of an engine whose host takes ``host`` times as long."""
    scaled = [name for name in HOST if name not in ("prompt_token", "first_token")]
    return {name: value * (host if name in scaled else 1.0) for name, value in engine.host.items()}


def _factors(shares: Floats, gaps: Floats) -> tuple[float, float, float]:
    """k, g and the standard deviation of ln k: Gauss-Newton on ln(g (1 - h) + k h) = gap, the priors as two more equations."""
    x, rows = np.zeros(2), np.eye(2)  # ln k, ln g
    for _ in range(ROUNDS):
        k, g = np.exp(x)
        model = g * (1.0 - shares) + k * shares
        slopes = np.column_stack([k * shares / model, g * (1.0 - shares) / model]) / NOISE
        left = (gaps - np.log(model)) / NOISE
        rows = np.vstack([slopes, np.diag([1.0 / HOST_PRIOR, 1.0 / KERNEL_PRIOR])])
        wanted = np.concatenate([left, -x / np.array([HOST_PRIOR, KERNEL_PRIOR])])
        x = x + np.linalg.lstsq(rows, wanted, rcond=None)[0]
    doubt = math.sqrt(float(np.linalg.inv(rows.T @ rows)[0, 0]))
    return float(np.exp(x[0])), float(np.exp(x[1])), doubt


def _first_token(runs: Sequence[ServedRun], engine: Engine, notes: list[str]) -> float:
    """Seconds that the first token takes more than priced: the median over runs below saturation."""
    differences = []
    for one in runs:
        again = priced(one.plan, engine).prediction
        assert again is not None
        if one.ttft is not None and not again.saturated and (again.waiting or 0.0) < 1.0:
            differences.append(one.ttft - again.latency("ttft"))
    if not differences:
        notes.append("no run below saturation has a time to first token: that of an idle server stays as it is")
        return 0.0
    return float(np.median(differences))


def _tpot(plan: ServePlan, engine: Engine) -> float:
    found = priced(plan, engine).prediction
    assert found is not None
    return found.latency("tpot")


def write_engine(fit: ServingFit, path: Path) -> None:
    """The engine file, whole or not at all: host times over the version that it extends."""
    if fit.base.file:
        again = f"{fit.base.name}@{fit.base.version}"
        raise PlannerError(f"the plans name {fit.base.file}, which is calibrated already; make them again with {again}")
    data = {
        "extends": f"{fit.base.name}@{fit.base.version}",
        "host": {name: f"{value:.6g} s" for name, value in fit.engine.host.items()},
        "source": f"plan calibrate, {len(fit.rows)} benchmarks: {', '.join(Path(one).name for one, *_ in fit.rows)}",
    }  # fmt: skip
    library.write_whole(path, library.dump_yaml(data))

"""Does the cost model on a profile of this processor tell what a real run takes? Processor time, pass by pass.

Wall time on shared cores says little, and the speed of a core changes from second to second with what its neighbours do. So the
two sides take turns: every rank times each operator of the profile once (the profiler's own operators, on all ranks at the same
time, as they work in a step), then takes a training step whose passes are timed; and so on for some rounds. The operators
make a profile by the profiler's own fits, the cost model prices the layout on it, and both are compared pass by pass and, replayed
through the schedule, as a step. All times are processor time of the thread that computes: gloo moves data in others.

    python -m tests.proofs.processor_time               # pp 2, pp 4, tp 2, dp 2, tp 2 x pp 2
    python -m tests.proofs.processor_time --row 0 --rounds 10

The layout is priced as ``plan validate --rung full`` prices what is not compiled (``uncompiled``). What this adds: the operators
are timed between the steps, and count with their mean, not their median (a pass is the sum of hundreds of them, and a core that
is slow a fifth of the time is so within every pass); products that read one input are timed apart, as the model has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.cost.pipeline.schedule_walk import program, walk
from planner.detect import pressure
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.profile import operator_runs as operators
from planner.lab.profile.compute_points import layout_points
from planner.lab.profile.compute_timing import measure_compute
from planner.lab.profile.definitions import gemm, memory_bound
from planner.lab.profile.fit_compute import base_of, fit_compute
from planner.lab.profile.journal import Journal
from planner.lab.profile.points import Measured, Point, Settings
from planner.lab.profile.profile_file import profile_data
from planner.lab.profile.rank_groups import header
from planner.lab.profile.tensors import keep_memory
from planner.lab.reference.split import SCHEDULES, Split, virtual_stages
from planner.lab.run.clock import Clock
from planner.lab.run.eager_pricing import Host, as_run, mean_host, processor_seconds
from planner.lab.run.rate import Passes, Rate, host_seconds, middle, passes_of, taken_step
from planner.lab.run.training import Run
from planner.layout import Layout, Schedule
from planner.model import ModelSpec
from planner.rules import Job
from planner.timeline.priced_plan import price
from planner.trainer import load_trainer
from planner.units import MIB
from planner.workload import Workload
from tests.proofs.forked_ranks import run_ranks

BOUND = 0.08
"""Largest median error of passes, and error of the step, that is right."""
ROUNDS = 6
FACTS = (Point.of("bytes", name="usable"), Point.of("launch", kind="stream"))
"""Points that are no operators, without which no profile is written."""


def medium(**changes: Any) -> ModelSpec:
    """A Llama whose products outweigh the host's work, and whose step takes some seconds of one core."""
    sizes: dict[str, Any] = {
        "name": "medium", "num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64,
        "ffn_size": 1408, "vocab_size": 4096, "max_sequence_length": 512,
    }  # fmt: skip
    return ModelSpec(**sizes | changes)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One job."""

    layout: Layout
    """How it is split."""
    model: ModelSpec = dataclasses.field(default_factory=medium)
    """What is trained."""
    sequence_length: int = 512
    """Tokens."""
    rounds: int = ROUNDS
    """Turns of profile and step."""

    def split(self) -> Split:
        """What the torch model runs."""
        names = ("micro_batch_size", "num_microbatches", "tp", "pp", "dp", "zero")
        fields: dict[str, Any] = {name: int(getattr(self.layout, name)) for name in names}
        return Split(
            model=self.model, sequence_length=self.sequence_length, dp_shard=int(self.layout.dp), precision="fp32",
            schedule=SCHEDULES[Schedule(int(self.layout.schedule))], stages=virtual_stages(self.model.num_layers, self.layout),
            optimizer="adam", learning_rate=1e-4, **fields,
        )  # fmt: skip

    def job(self, hardware: HardwareProfile) -> Job:
        """The same for the cost model."""
        workload = Workload(
            model=self.model, sequence_length=self.sequence_length, precision="fp32", optimizer="adam",
            global_batch_size=int(self.layout.global_batch_size),
        )  # fmt: skip
        cluster = Cluster(hardware=hardware, num_gpus=int(self.layout.num_gpus))
        return Job(
            workload=workload, cluster=cluster, trainer=as_run(load_trainer("torchtitan"), self.split(), on_cpu=True)
        )

    def points(self) -> list[Point]:
        """Operators of the layout; which ones they are does not depend on the hardware that weighs them."""
        job = self.job(load_hardware("h100-sxm"))
        one = Layout.stack([self.layout])
        found = layout_points(
            job, self.layout, estimate(job.workload, job.cluster, job.trainer, one), "fp32", largest=TRAFFIC
        )
        copy = memory_bound("copy", "forward", 512, 512, "fp32")
        return [*found, *([] if copy in found else [copy])]


TRAFFIC = 16.0 * MIB
"""Bytes of a memory-bound point at most, as for every profile of a CPU."""


# ------------------------------------------------------------------------------------------------ one rank


def operator(point: Point, split: Split) -> Callable[[], object]:
    """What to time for a point."""
    return product(point, split) if point.family == "gemm" else operators.operator(point, "cpu")


def product(point: Point, split: Split) -> Callable[[], object]:
    """A product as the model has it: queries, keys and values apart, and gate and up; their input's gradients are added."""
    model, tp = split.model, split.tp
    heads = (model.query_size, model.key_size, model.value_size)
    whole: dict[int, tuple[int, ...]] = {sum(heads): heads}
    if model.gated:
        whole[2 * model.ffn_size] = (model.ffn_size, model.ffn_size)
    n, k = point["n"], point["k"]
    sizes = whole.get(n * tp, ()) if k == model.hidden_size else ()
    dtype, pass_, m = point["dtype"], point["pass"], point["m"]
    each = [size // tp for size in sizes] or [n]
    apart = [operators.operator(gemm(dtype, pass_, m, size, k), "cpu") for size in each]
    if pass_ != "dgrad":
        return lambda: [one() for one in apart]

    def gradient() -> object:
        first, *others = (one() for one in apart)
        assert isinstance(first, Tensor)
        for other in others:
            assert isinstance(other, Tensor)
            first = torch.add(first, other)
        return first

    return gradient


def on_rank(split: Split, points: Sequence[Point], rounds: int) -> tuple[list[list[float]], list[Passes], Host, float]:
    """Each point by round, the passes by round and the host, all as multiples of what the yardstick took beside them; and the
    seconds of this rank's yardstick."""
    keep_memory()
    device = torch.device("cpu")
    runs = [operator(point, split) for point in points]
    rate = Rate()
    host = host_seconds(split, 1.0)
    run, clock = Run(split, device).allocate(fill=False).fill_by_shard(), Clock(device)
    clock.attach(run)
    clock.on, clock.between = True, rate.look
    samples: list[list[float]] = [[] for _ in points]
    steps = []
    for number_ in range(1 + rounds):  # the first round warms up
        seconds = []
        for work in runs:
            start = time.thread_time()
            work()
            seconds.append(time.thread_time() - start)
            rate.look()
        beside = rate.take()
        for found, took in zip(samples, seconds, strict=True):
            found.append(took / beside)
        passes = passes_of(taken_step(run, clock, number_))
        beside = rate.take()
        steps.append({key: took / beside for key, took in passes.items()})
        if number_ == 0:
            for found in samples:
                found.clear()
            steps.clear()
    return samples, steps, host, rate.yardstick.reference


# ------------------------------------------------------------------------------------------------ predicted and measured


def profiled(points: Sequence[Point], samples: Sequence[Sequence[float]], seconds: float) -> HardwareProfile:
    """A profile by the profiler's own fits, of the mean time of each operator."""
    rows = [
        Measured(point=point, median=statistics.fmean(found), low=min(found), high=max(found), repetitions=len(found), clock="cpu")
        for point, found in zip(points, samples, strict=True)
    ]  # fmt: skip
    rows += [measure_compute(point, "cpu", 0.2) for point in FACTS]
    journal = Journal(None, _header())
    for row in rows:
        journal.add(row)
    settings = Settings(output="here.yaml", device="cpu", budget=max(seconds, 1.0), only=("compute", "memory"))
    fit = fit_compute(rows, base_of("cpu", rows, None), "cpu")
    return HardwareProfile.from_dict(profile_data(journal, settings, fit, None, seconds))


def _header() -> dict[str, Any]:
    class Alone:
        device, hosts, names, world, local = "cpu", ("here",), (), 1, 1

    return header(Alone())  # type: ignore[arg-type]


def replayed(split: Split, schedule: int, passes: Passes) -> float:
    """Seconds from the first to the last pass when each takes what it took, in the order of the schedule."""
    if split.pp == 1:
        return sum(passes.values())
    vpp = len(split.stages) // split.pp
    ends: list[float] = []
    free = [0.0] * split.pp
    for step in program(schedule, split.pp, vpp, split.num_microbatches):
        start = max([free[step.rank], *(ends[one] for one, _ in step.needs)])
        free[step.rank] = start + passes[step.stage, step.kind, step.microbatch]
        ends.append(free[step.rank])
    return max(ends)


def compare(asked: Asked) -> dict[str, Any]:
    """Profile and run in turns; errors of each pass and of the step."""
    torch.set_num_threads(1)
    points, split, before, begun = asked.points(), asked.split(), pressure(), time.monotonic()
    ranks = run_ranks(
        on_rank, split.world, split, points, asked.rounds, limit=120.0 + 60.0 * asked.rounds * split.world
    )
    reference = statistics.fmean(rank[3] for rank in ranks)
    samples = [[t * reference for rank in ranks for t in rank[0][i]] for i in range(len(points))]
    priced = price(asked.job(profiled(points, samples, time.monotonic() - begun)), asked.layout)
    host = [{kind: (reference * layer, reference * ends) for kind, (layer, ends) in rank[2].items()} for rank in ranks]
    predicted = processor_seconds(priced, split, mean_host(host))
    measured = _mean_passes({key: took * reference for key, took in step.items()} for rank in ranks for step in rank[1])
    return {"layout": asked.layout.to_dict(), **_errors(asked, predicted, measured), "pressure": [before, pressure()]}


def _mean_passes(steps: Iterable[Passes]) -> Passes:
    """Mean over rounds, and over the ranks that do the same."""
    found: dict[tuple[int, str, int], list[float]] = {}
    for step in steps:
        for key, seconds in step.items():
            found.setdefault(key, []).append(seconds)
    return {key: statistics.fmean(values) for key, values in found.items()}


def _errors(asked: Asked, predicted: dict[str, Floats], measured: Passes) -> dict[str, Any]:
    split, schedule = asked.split(), int(asked.layout.schedule)
    passes, errors = [], []
    for kind in ("F", "B"):
        for stage, seconds in enumerate(predicted[kind]):
            mine = middle([{key: t for key, t in measured.items() if key[0] == stage}], kind)
            took = statistics.fmean(mine)
            errors.append(abs(float(seconds) / took - 1.0))
            passes.append({"stage": stage, "kind": kind, "predicted_seconds": float(seconds), "measured_seconds": took,
                           "error": float(seconds) / took - 1.0})  # fmt: skip
    if split.pp > 1:
        nothing = np.zeros(len(split.stages))
        durations = predicted["F"], predicted["B"], nothing
        spans = walk(schedule, split.pp, len(split.stages) // split.pp, split.num_microbatches, durations)
        step = max(one.end for one in spans)
    else:
        step = split.num_microbatches * float(predicted["F"][0] + predicted["B"][0])
    took = replayed(split, schedule, measured)
    return {
        "passes": passes, "median_error": statistics.median(errors),
        "step": {"predicted_seconds": step, "measured_seconds": took, "error": step / took - 1.0},
    }  # fmt: skip


ROWS = (
    Layout(pp=2, num_microbatches=8, zero=2),
    Layout(pp=4, num_microbatches=8, zero=2),
    Layout(tp=2, num_microbatches=4, zero=1, sequence_parallel=1),
    Layout(dp=2, num_microbatches=4, zero=1),
    Layout(tp=2, pp=2, num_microbatches=8, zero=2, sequence_parallel=1),
)
"""What the command runs."""


def main(arguments: list[str] | None = None) -> int:
    """The table; 1 when a row lies outside of the bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.processor_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("--row", type=int, action="append", help="only this row, from 0; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of profile and step")
    parser.add_argument("--json", type=Path, help="writes everything there, one JSON object per row")
    options = parser.parse_args(arguments)
    wrong = 0
    for row in options.row or range(len(ROWS)):
        layout = ROWS[row]
        found = compare(Asked(layout=layout, rounds=options.rounds))
        outside = found["median_error"] > BOUND or abs(found["step"]["error"]) > BOUND
        wrong += outside
        _show(row, layout, found, outside)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    return int(wrong > 0)


def _show(row: int, layout: Layout, found: dict[str, Any], outside: bool) -> None:
    step = found["step"]
    degrees = {name: int(getattr(layout, name)) for name in ("tp", "pp", "dp")}
    shape = " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    busy = " to ".join("?" if one is None else f"{one:.0f}" for one in found["pressure"])
    print(
        f"{row} {shape}: passes off by {found['median_error']:.1%} (median); step predicted {step['predicted_seconds']:.3f} s, "
        f"measured {step['measured_seconds']:.3f} s: {step['error']:+.1%}{', OUTSIDE' if outside else ''}; some process waited "
        f"for a core {busy} % of the time",
        flush=True,
    )
    for one in found["passes"]:
        predicted, took = one["predicted_seconds"], one["measured_seconds"]
        print(
            f"    {one['kind']}{one['stage']}: predicted {predicted:.4f} s, measured {took:.4f} s: {one['error']:+.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())

"""Traces of torch.profiler as measured runs: the step of a job that ran a plan, and how fast its collectives were."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.hardware import load_hardware
from planner.kineto.events import Tell
from planner.kineto.job_traces import Bandwidth, read_traces, trace_files
from planner.kineto.plan_traces import bus_bandwidth, no_truth, priced_seconds
from planner.plan_file import load_plan
from planner.questions.calibrate.sources import check_same_device
from planner.record import record
from planner.runs import Measured, Run, rows_from_dict, share, to_run
from planner.runs.mapping import document_of_plan


@record
class TracedRun:
    """The run of one plan, and its collectives with nothing else running, with the seconds that they are priced with."""

    run: Run
    bandwidths: tuple[tuple[Bandwidth, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; bus bandwidths in GB/s as nccl-tests counts them, None where the group is not known."""
        return {
            "id": self.run.id, "step_seconds": self.run.measured.step_time, "left_out": self.run.unsupported or None,
            "collectives": [
                {"kind": one.kind, "op": one.op, "ranks": one.size, "bytes": one.bytes, "calls": one.calls,
                 "bus_bandwidth": bus_bandwidth(one, one.seconds),
                 "bus_bandwidth_of_profile": bus_bandwidth(one, priced) if priced == priced else None}
                for one, priced in self.bandwidths
            ],
        }  # fmt: skip


def read_traced(
    traces: Sequence[tuple[str | os.PathLike[str], str | os.PathLike[str]]], hardware: str, tell: Tell = lambda _: None
) -> list[TracedRun]:
    """Plans with their traces as runs on ``hardware`` (name or file).

    A run whose step the host bounds, or that no step can be read of, is not supported and says why. Raises PlannerError for files
    that cannot be read, and traces of another job.
    """
    found = []
    for number, (file, trace) in enumerate(traces, 1):
        plan = load_plan(Path(file))
        job = read_traces(trace_files([trace]), plan.layout, tell)
        why = no_truth(plan, job) or ("" if job.step_time else "its trace shows no steps")
        document = document_of_plan(
            plan, Measured(step_time=job.step_time or job.slowest.step_time, fits=True), name=f"{Path(file).stem}-{number}",
            framework=f"trace of torch.profiler, {plan.load_trainer().name}",
        )  # fmt: skip
        document["source"] |= {"id": "trace", "title": "trace of torch.profiler"}
        [row] = rows_from_dict(document, where=str(trace))
        check_same_device(row, hardware, load_hardware(hardware))
        run = to_run(row, hardware=hardware)
        pairs = tuple((one, priced_seconds(plan, one)) for one in job.bandwidths)
        found.append(TracedRun(run=replace(run, unsupported=why) if why else run, bandwidths=pairs))
    together = share([one.run for one in found])
    return [replace(one, run=run) for one, run in zip(found, together, strict=True)]

"""What traces say of a job that ran a plan: its step, whether it may stand as a measured run, how its collectives are priced."""

import math

import numpy as np

from planner.detect import profile_of
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.kineto.job_traces import Bandwidth, JobTraces
from planner.kineto.step_parts import BUSY
from planner.plan_file import Plan
from planner.units import GIGA


def step_time_of(job: JobTraces) -> float:
    """Seconds per step of traces. Raises PlannerError where no steps were found."""
    if job.step_time is None:
        raise PlannerError(
            "the trace shows no steps: it has neither ProfilerStep (call prof.step() after each optimizer step) nor an optimizer; "
            "give the step time with --measured"
        )
    return job.step_time


def device_note(plan: Plan, job: JobTraces) -> str:
    """Why the times of a trace are not those of the plan's hardware; '' = they are, or the device is not known."""
    hardware = plan.cluster().hardware
    if not job.has_gpu:
        return "" if hardware.is_cpu else f"no kernels were recorded, and the plan is for {hardware.device}"
    known = profile_of(job.device) if job.device else None
    if known is None or load_hardware(known).arch == hardware.arch:
        return ""
    return f"it ran on {job.device}, and the plan is for {hardware.device}"


def no_truth(plan: Plan, job: JobTraces) -> str:
    """Why a traced step says nothing about how fast the plan's hardware is; '' = it does."""
    if other := device_note(plan, job):
        return other
    for one in job.parts if job.has_gpu else ():
        if one.host_bound:
            return f"{one.trace.name} is host-bound: for {one.host_share:.0%} of the step its GPU waits for the host"
        if not np.any(np.isfinite(one.trace.launched)) and one.busy_share < BUSY:
            return (
                f"{one.trace.name}: its GPU works for {one.busy_share:.0%} of the step, and without calls of the host (record "
                "ProfilerActivity.CPU too) nobody knows what it waits for"
            )
        if one.steps.how == "a single ProfilerStep":
            return f"{one.trace.name}: a single step was recorded, which holds the start of the profiler"
    return ""


def priced_seconds(plan: Plan, one: Bandwidth) -> float:
    """Seconds that the plan's hardware is priced with for the same collective; nan where its ranks are unknown."""
    if len(one.ranks) < 2:
        return math.nan
    stride = (one.ranks[-1] - one.ranks[0]) / (len(one.ranks) - 1)
    return float(np.asarray(plan.cluster().collective_time(one.op, one.bytes, float(one.size), stride)))


def bus_bandwidth(one: Bandwidth, seconds: float) -> float:
    """GB/s of the bus, as nccl-tests counts it."""
    factor = (2.0 if one.op == "all_reduce" else 1.0) * (one.size - 1.0) / one.size
    return factor * one.bytes / seconds / GIGA

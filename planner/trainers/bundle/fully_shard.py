"""What torch's own fully_shard and pipelining have, for torchtitan and for the script without a framework."""

from __future__ import annotations

from planner.layout import NAMES, Schedule
from planner.trainers.bundle.target import ExportJob

SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPE_V: "DualPipeV",
}
"""Names of torch.distributed.pipelining, as parallelism.pipeline_parallel_schedule of torchtitan takes them too."""


def shared_refusals(job: ExportJob) -> list[str]:
    """Sharding and schedules that torch itself does not have."""
    layout, found = job.layout, []
    schedule = int(layout.schedule)
    if int(layout.zero) not in (2, 3):
        found.append(f"zero {layout.zero}: fully_shard always shards the states; use 2 (never reshards) or 3 (always)")
    if int(layout.zero) == 3 and schedule in (Schedule.ZBV, Schedule.DUALPIPE_V):
        found.append(
            f"schedule {NAMES['schedule'][schedule]} with zero 3: weights that FSDP frees between the two halves of "
            "the backward pass lose their gradient, without an error [measured, torch 2.13]; use zero 2"
        )
    if schedule not in SCHEDULES:
        found.append(
            f"schedule {NAMES['schedule'][schedule]} is not one of torch.distributed.pipelining that the planner prices; "
            f"use one of {', '.join(NAMES['schedule'][int(one)] for one in SCHEDULES)}"
        )
    return found

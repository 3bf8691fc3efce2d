"""What a row leaves open of its layout: the layouts that it may have run with, of which the one is taken that fits and is fastest.

Whoever publishes a benchmark, and whoever tunes a job, takes the micro batch and the virtual stages that are fastest and fit. Which
these are only the cost model can say: ``prediction.predict`` prices them together. Recompute that is not stated stays the
trainer's default: of 17 sources with rows that by the model would not have fitted without more of it, 14 were then met worse.
"""

from planner.layout import Layout, Schedule
from planner.model import ModelSpec
from planner.runs.rows import Row
from planner.runs.software import default_of

LARGEST = 64
"""Largest micro batch that is tried, sequences."""


def layouts_left_open(row: Row, layout: Layout, model: ModelSpec) -> tuple[Layout, ...]:
    """Layouts that the row may have run with other than the usual one; none where it states all, or ran out of memory."""
    if row.get("measured.oom"):
        return ()
    found = [
        layout.replace(
            micro_batch_size=micro, num_microbatches=steps, vpp=vpp,
            schedule=int(Schedule.INTERLEAVED if vpp > 1 else layout.schedule),
        )
        for micro, steps in _micro_batches(row, layout) for vpp in _virtual_stages(row, layout, model, steps)
    ]  # fmt: skip
    return tuple(one for one in found if one != layout)


def _micro_batches(row: Row, layout: Layout) -> list[tuple[int, int]]:
    """The stated micro batch, or 1, 2, 4 ... as far as they divide the batch of a replica; each with its number per step."""
    if row.get("batch.micro") or default_of(row, "microbatches", ""):
        return [(int(layout.micro_batch_size), int(layout.num_microbatches))]
    each = int(layout.global_batch_size) // int(layout.dp)
    return [(2**power, each // 2**power) for power in range(LARGEST.bit_length()) if each % 2**power == 0]


def _virtual_stages(row: Row, layout: Layout, model: ModelSpec, steps: int) -> list[int]:
    """Those that are stated; else 1, and what divides the layers of a stage where the schedule can be interleaved."""
    pp, vpp = int(layout.pp), int(layout.vpp)
    if pp == 1 or row.get("parallel.vpp") is not None or steps % pp or model.num_layers % pp:
        return [vpp]
    each = model.num_layers // pp
    return [one for one in range(1, each + 1) if each % one == 0]

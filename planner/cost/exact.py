"""One layout on the exact timeline of its schedule: every stage with its own layers, first and last with what they carry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cluster import Cluster
from planner.cost.operators import Floats
from planner.cost.stages import split_stages
from planner.cost.step import Estimate, StageTimes, stage_times
from planner.cost.timeline import walked_time
from planner.layout import Layout, Schedule
from planner.trainer import Trainer
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StageDurations:
    """Seconds per microbatch of every (virtual) stage in model order, arrays of length p v."""

    forward: Floats
    backward: Floats
    weight: Floats


def chunks(layout: Layout) -> int:
    """Virtual stages per rank that the schedule runs."""
    v_shaped = int(layout.schedule) in (Schedule.ZBV, Schedule.DUALPIPE_V)
    return 2 if v_shaped else int(layout.vpp)


def stage_layers(num_layers: int, layout: Layout) -> list[int]:
    """Layers of every pipeline rank: given first and last, the rest as even as it goes, larger ones first."""
    pp, first, last = int(layout.pp), int(layout.first_stage_layers), int(layout.last_stage_layers)
    given = (first > 0) + (last > 0)
    share, extra = divmod(num_layers - first - last, max(pp - given, 1))
    middle = [share + (i < extra) for i in range(pp - given)]
    return ([first] if first else []) + middle + ([last] if last else [])


def durations(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> StageDurations:
    """Durations of all stages: a rank's layers in equal chunks, the embedding in the first, the head in the last."""
    times: StageTimes = stage_times(workload, cluster, trainer, layout)
    stages = split_stages(workload.model, layout)
    layers = np.array(stage_layers(workload.model.num_layers, layout), dtype=float)
    pp, vpp = int(layout.pp), chunks(layout)
    which = np.full(pp, 1)
    which[0], which[-1] = 0, 2
    counted = np.maximum((stages.dense + stages.moe)[0], 1.0)
    ends_forward = times.of_ends("forward")[0]
    ends_backward = times.of_ends("backward")[0]
    ends_weight = times.of_ends("weight")[0]

    def spread(total: Floats, ends: Floats) -> Floats:
        """Layers' share on every chunk, then what only the first and the last stage carry."""
        body = (total - ends)[which] * layers / counted[which] / vpp
        every = np.tile(body, vpp) if vpp == 1 or int(layout.schedule) == Schedule.INTERLEAVED else np.concatenate([body, body[::-1]])
        every[0] += ends[0]
        every[-1] += ends[2] if int(layout.schedule) not in (Schedule.ZBV, Schedule.DUALPIPE_V) else 0.0
        return every

    return StageDurations(
        forward=spread(times.forward[0], ends_forward),
        backward=spread(times.backward[0], ends_backward),
        weight=spread(times.part("wgrad")[0], ends_weight),
    )


def refine_bubble(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, found: Estimate
) -> Floats:
    """Seconds that the slowest stage idles, from the walked schedule; shape (1,). 0 without a pipeline."""
    if int(layout.pp) == 1:
        return np.zeros(1)
    stage = durations(workload, cluster, trainer, layout)
    vpp, m = chunks(layout), int(layout.num_microbatches)
    walked = walked_time(
        int(layout.schedule), int(layout.pp), vpp, m, stage.forward, stage.backward, stage.weight
    )
    busy = sum(float(found.time[part][0]) for part in _BUSY)
    return np.array([max(walked - busy, 0.0)])


_BUSY = (
    "compute", "recompute", "host", "tensor_communication", "context_communication", "expert_communication",
    "pipeline_communication",
)  # fmt: skip

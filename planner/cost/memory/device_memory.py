"""Peak memory of the device: the program point of a step at which most is alive, and what the allocator holds beyond that.

One rule for every trainer: the peak is the largest of a list of program points, each with what is alive there as activations,
gradients and workspace. Which points there are depends on how gradients come (``Trainer.stored.gradients_on_demand``): in buffers
that are there from start to end (``buffered_points``), or made unit by unit (``peak_points``).
"""

import numpy as np

from planner.arrays import Floats
from planner.cost.memory.peak_points import Peak, Point, on_demand_peak
from planner.cost.memory.states import StageBytes
from planner.hardware import HardwareProfile
from planner.trainer import Trainer

GIVEN_BACK = 0.8
"""Part of the memory in free blocks of other streams and of gathered weights that the allocator can really give back: blocks
that are split stay.

Over 1088 layouts of runs/oss-ultrascale-nanotron-*, 261 of which ran out, 0.5 to 1 are equally likely (within a factor of 3).
"""
HELD_GIVEN_BACK = 0.1
"""The same of the inputs of collectives in flight, which other tensors are cut out of while the GPU catches up.

Most likely value over the same layouts (0 to 0.2 within a factor of 8; 0.8 is exp(13) times less likely).
"""


def buffered_points(stages: StageBytes) -> list[Point]:
    """Program points of a step whose gradients lie in buffers from start to end.

    backward pass        microbatches in flight, and the larger of one layer brought back by recompute and the loss; workspace
    a microbatch ends    its fresh gradients in place of its activations
    the step ends        gathered weights in place of all activations
    """
    activations = np.minimum(stages.in_flight, stages.resident) * stages.stored + stages.transient
    return [
        (activations, stages.gradients, stages.workspace),
        (activations, stages.gradients, stages.fresh - stages.stored - stages.transient),
        (activations, stages.gradients, stages.step_end - activations),
    ]


def peak(trainer: Trainer, stages: StageBytes, hardware: HardwareProfile) -> Peak:
    """The largest program point of each stage."""
    if trainer.stored.gradients_on_demand:
        return on_demand_peak(stages, hardware.workspace_memory)
    running, ended, last = buffered_points(stages)
    before = np.maximum(running[2], ended[2])
    workspace = np.maximum(before, last[2])
    pooled = np.maximum(stages.pooled - (workspace - before), 0.0)
    return Peak(
        activations=running[0],
        gradients=stages.gradients,
        workspace=workspace,
        largest_activations=running[0],
        pooled=pooled,
    )


def stage_memory(
    trainer: Trainer, stages: StageBytes, hardware: HardwareProfile, host_share: Floats
) -> tuple[dict[str, Floats], Floats]:
    """Peak bytes of each stage by component but for the context, and the part that is given back when needed, (3, N).

    What is alive at the peak, and a share of it for fragmentation; in addition, as far as the device has room, memory held by
    collectives in flight, and blocks of other streams that are not in use at the peak (gradients put out by reductions, buffers
    of gathered weights): the allocator keeps free blocks by stream, until an allocation would fail. ``host_share``: the host's
    time to launch over the GPU's.  [torch, CUDACachingAllocator]
    """
    most = peak(trainer, stages, hardware)
    allocated = stages.weights + most.gradients + stages.optimizer_states + most.activations + most.workspace
    lost = trainer.stored.fragmentation * allocated
    room = hardware.usable_memory - hardware.context_memory - stages.buffers - allocated - lost
    held = record_stream_held(
        stages.held_launched, stages.held_most, stages.held_waiting, host_share * stages.held_busy
    )
    held = np.minimum(held, np.maximum(room, 0.0))
    pooled = np.minimum(most.pooled, np.maximum(room - held, 0.0))
    return {
        "weights": stages.weights,
        "gradients": most.gradients,
        "optimizer_states": stages.optimizer_states,
        "activations": most.activations,
        "workspace": most.workspace,
        "fragmentation": lost + held + pooled,
        "communication_buffers": stages.buffers,
    }, held * HELD_GIVEN_BACK + pooled * GIVEN_BACK


def record_stream_held(launched: Floats, most: Floats, waiting: Floats, host_share: Floats) -> Floats:
    """Bytes of ``OwnTerms.record_stream_bytes`` for a host that needs ``host_share`` r of the GPU's time.

    max(waiting, min((1 - r) launched, most))

    Layouts of runs/oss-ultrascale-nanotron-* with one stage hold, beyond what is alive and fragmentation, in units of T h:
    r 0.10, 0.16, 0.31 and 0.44 with one microbatch of 64, 32, 32 and 32 tensors: 56, 36, 20 and 5; r 0.85 with 2 and with 32
    microbatches: 11 and 46; r 0.93 and above: none.
    """
    return np.maximum(waiting, np.minimum(np.maximum(1.0 - host_share, 0.0) * launched, most))

"""What the device holds at the peak: what is alive at its program point, and what the allocator keeps beyond that."""

import numpy as np

from planner.arrays import Floats
from planner.cost.memory.peak_points import peak
from planner.cost.memory.states import StageBytes, record_stream_held
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


def stage_memory(
    trainer: Trainer, stages: StageBytes, hardware: HardwareProfile, host_share: Floats
) -> tuple[dict[str, Floats], Floats, Floats]:
    """Peak bytes of each stage by component but for the context, the part that is given back when needed, and what collectives in
    flight would hold beyond the room that there is, (3, N).

    What is alive at the peak, and a share of it for fragmentation; in addition, as far as the device has room, memory held by
    collectives in flight, and blocks of other streams that are not in use at the peak (gradients put out by reductions, buffers
    of gathered weights): the allocator keeps free blocks by stream, until an allocation would fail. ``host_share``: the host's
    time to launch over the GPU's.  [torch, CUDACachingAllocator]
    """
    most = peak(trainer, stages, hardware)
    allocated = stages.weights + most.gradients + stages.optimizer_states + most.activations + most.workspace
    lost = trainer.stored.fragmentation * allocated
    room = hardware.usable_memory - hardware.context_memory - stages.buffers - allocated - lost
    wanted = record_stream_held(stages.held_launched, stages.held_most, stages.held_waiting, host_share * stages.held_busy)
    held = np.minimum(wanted, np.maximum(room, 0.0))
    pooled = np.minimum(most.pooled, np.maximum(room - held, 0.0))
    return {
        "weights": stages.weights, "gradients": most.gradients, "optimizer_states": stages.optimizer_states,
        "activations": most.activations, "workspace": most.workspace, "fragmentation": lost + held + pooled,
        "communication_buffers": stages.buffers,
    }, held * HELD_GIVEN_BACK + pooled * GIVEN_BACK, wanted - room

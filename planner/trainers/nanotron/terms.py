"""What nanotron alone does: layers partitioned by cost, gathers tensor by tensor, buffers held by streams."""

from dataclasses import dataclass

import numpy as np

from planner import units
from planner.arrays import Floats
from planner.cost.layer.operators import Number
from planner.cost.own_terms import OwnTerms
from planner.cost.pipeline.partition import NO_LAYERS, TIE, StageParameters, Stages, column, shard_groups
from planner.cost.price.state_traffic import MATRICES, Part
from planner.layout import Layout
from planner.model import ModelSpec
from planner.schema import Seconds
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """nanotron 0.4 to 0.5."""

    fresh_gradient_bytes: float
    """Bytes per parameter of one microbatch's gradients, all alive when its backward pass ends."""
    gather_buffer_bytes: float
    """Bytes per parameter of flat buffers that ZeRO 1 gathers updated weights into, in addition to the rank's own share."""
    gather_tensor_time: Seconds
    """Seconds of host work per weight tensor and rank to gather updated weights at ZeRO 1: slices, views and copies in Python."""
    held_collectives: float
    """Inputs of tensor-parallel collectives, T h each, that a host far ahead has freed but the GPU has not read yet."""
    allocation_time: Seconds
    """Seconds to give a GiB back to the device and to allocate it anew, on one rank."""

    def partition(self, model: ModelSpec, layout: Layout) -> Layout:
        """Layers by their multiplications, the head counted like the layers.

        Costs are multiplications per token: 4 a d h + 3 h f of a layer, V h of the head, 0 of all else. A stage takes blocks
        until their sum since the first one exceeds its share (i + 1) / p of all; the block that exceeds it is its last. Where
        the sum meets the share exactly the stage is full as well: 16 layers and a head of 4 are 10 and 6 on two stages, 5 first
        on four, by what rank 0 has allocated (oss-ultrascale-nanotron-1p34b).
        [nanotron, models/base.py, build_model, and models/llama.py, get_block_compute_costs]
        """
        pp = np.asarray(layout.pp)
        if np.all(pp == 1):
            return layout
        cost = 4.0 * model.attention_output_size * model.hidden_size + 3.0 * model.hidden_size * model.ffn_size
        total = model.num_layers * cost + float(model.vocab_size) * model.hidden_size
        stages = np.asarray(pp, dtype=float)
        own = np.minimum(np.ceil(total / stages / cost - TIE), model.num_layers)
        before = np.minimum(np.ceil(total * (stages - 1.0) / stages / cost - TIE), model.num_layers)
        rest = np.where(model.num_layers - before > 0, model.num_layers - before, NO_LAYERS)
        given = (np.asarray(layout.first_stage_layers) != 0) | (np.asarray(layout.last_stage_layers) != 0) | (pp == 1)
        return layout.replace(
            first_stage_layers=np.where(given, layout.first_stage_layers, own).astype(np.int64),
            last_stage_layers=np.where(given, layout.last_stage_layers, rest).astype(np.int64),
        )

    def end_bytes(
        self, workload: Workload, layout: Layout, parameters: StageParameters
    ) -> tuple[Number, Number, Number]:
        """What is alive when activations are not.

        fresh gradients   N fresh_gradient_bytes: a microbatch's gradients are accumulated after its backward pass
        updated weights   (2 N + N / d) gather_buffer_bytes under ZeRO 1 with replicas: flat copies of all weights, the
                          library's own of all that it receives, and one of the rank's share; after the last backward pass
        of these pooled   N gather_buffer_bytes: the library's copy is one block larger than any that activations gave back
        [nanotron, optim/zero.py, all_gather_coalesced in distributed.py; torch, ProcessGroupNCCL.cpp, allgather: newLikeFlat]
        """
        dense, expert = parameters.trained(workload)
        trained = dense + expert
        gathers = (column(layout.zero) == 1) & (shard_groups(layout)[0] > 1)
        one = trained * self.gather_buffer_bytes * gathers
        share = parameters.updated(workload, layout) * self.gather_buffer_bytes * gathers
        fresh = 0.0 if workload.precision == "bf16_true" else self.fresh_gradient_bytes  # on the weights, as they are accumulated
        return trained * fresh, 2.0 * one + share, one

    def record_stream_bytes(
        self, workload: Workload, layout: Layout, stages: Stages, flights: Floats
    ) -> tuple[Floats, Floats, Floats, Floats] | None:
        """Inputs of tensor-parallel collectives, T h each, two tensors per layer and pass.

        Collectives run on a stream of their own; the allocator keeps what they read until the GPU has passed them, and a host
        that runs ahead allocates anew. Launched since the step began: 2 m - 1 passes when the last forward pass ends. In a
        pipeline, whichever is slower, all but two of the microbatches in flight are launched while the GPU waits to send. The
        GPU works m / (m + p - 1) of the step.  [torch, CUDACachingAllocator: record_stream, release_cached_blocks]
        """
        if not self.held_collectives:
            return None
        tokens = column(layout.micro_batch_size) * workload.sequence_length / column(layout.cp)
        each = tokens * workload.model.hidden_size * workload.element * (column(layout.tp) > 1)
        waiting = np.where(column(layout.pp) > 1, np.maximum(flights - 2.0, 0.0), 0.0)
        per_pass = 2.0 * (stages.dense + stages.moe)
        most = self.held_collectives + 0.0 * per_pass
        m = column(layout.num_microbatches)
        launched = 2.0 * m - 1.0
        busy = m / (m + column(layout.pp) - 1.0) + 0.0 * per_pass
        return each * per_pass * launched, each * most, each * np.minimum(per_pass * waiting, most), busy

    def allocation_seconds(self, layout: Layout, launched: Floats) -> Number:
        """Every input of a collective is allocated anew, and the ranks that run collectives together wait for each other's calls.

        An allocation that fails waits for the GPU, gives all free blocks back and asks for new ones; a host that runs ahead
        fills them with inputs that are not yet read, until one fails again: all 2 m passes' inputs pass through it. Each rank
        fails when its own blocks are full, and a collective waits for the last: t times one rank's time.
        [torch, CUDACachingAllocator: malloc, release_cached_blocks, synchronize_and_free_events]
        """
        m = np.asarray(layout.num_microbatches, dtype=float)
        return launched * 2.0 * m / (2.0 * m - 1.0) * np.asarray(layout.tp) * self.allocation_time / units.GIB

    def gather_host_seconds(self, part: Part) -> Number:
        """Every tensor is sliced, viewed and copied once per rank of the group.  [optim/zero.py, _all_gather_params]"""
        tensors = (MATRICES + 2.0) * part.learned / part.largest_dense_unit
        return tensors * part.group * (part.group > 1) * self.gather_tensor_time

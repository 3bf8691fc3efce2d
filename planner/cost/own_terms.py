"""What one framework alone does, as terms that the cost model adds up: each in the folder of its trainer, none known here by name.

A trainer's file names folders of ``planner.trainers`` under ``terms``, with values for the fields of their ``Terms``. Every method
here is a place where a term can add something; what it does not override adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.arrays import Floats
from planner.layout import Layout

if TYPE_CHECKING:
    from planner.cost.layer.operators import Collective, Number, Operator, Shard
    from planner.cost.pipeline.partition import StageParameters, Stages
    from planner.cost.price.state_traffic import Part
    from planner.model import ModelSpec
    from planner.trainer import Trainer
    from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class OwnTerms:
    """No term at all; base of those of a trainer."""

    @classmethod
    def folder(cls) -> str:
        """Folder of ``planner.trainers`` that it lies in."""
        return cls.__module__.split(".")[-2]

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Operators and collectives of a layer (``part`` 'layer'), the embedding or the head as this framework runs them."""
        return operators, collectives

    def least_forward_host_time(self) -> float:
        """Least seconds of host work in the forward pass of one layer."""
        return 0.0

    def collective_seconds(self, collective: Collective, seconds: Number) -> Number:
        """Seconds of a collective among the kernels of a layer, by those that it takes alone."""
        return seconds

    def partition(self, model: ModelSpec, layout: Layout) -> Layout:
        """The layout with the layers that this framework gives to first and last stage, where it decides them."""
        return layout

    def flush(self) -> int:
        """Microbatches after which a pipeline runs empty, as where gradients are accumulated over several calls of its schedule; 0:
        it does so once per step."""
        return 0

    def sends_whole_tensors(self) -> bool:
        """Without sequence parallelism every tensor-parallel rank sends T h to the next stage, not its 1 / t."""
        return False

    def sent_bytes(self, workload: Workload) -> float:
        """Bytes that every rank sends to the next stage with a microbatch's activations, as a mean of both directions."""
        return 0.0

    def stored_bytes(self, workload: Workload, layout: Layout) -> Number:
        """Bytes kept per microbatch in flight in addition to what the layers save, (N, 1)."""
        return 0.0

    def workspace_bytes(self, workload: Workload, layout: Layout, parameters: StageParameters) -> Number:
        """Further workspace, (N, 3)."""
        return 0.0

    def communicators(self, layout: Layout) -> Number:
        """Communicators that are opened in addition to those of the world and of each parallel group, (N, 1)."""
        return 0.0

    def attention_gradient_bytes(self, shard: Shard) -> Number:
        """Bytes that the backward pass of attention has on top of what its layer saved, where these are more than gradients."""
        return 0.0

    def prefetched_units(self) -> float:
        """Units that zero 3 gathers ahead, in addition to the current one and the next."""
        return 0.0

    def end_bytes(
        self, workload: Workload, layout: Layout, parameters: StageParameters
    ) -> tuple[Number, Number, Number]:
        """Bytes, (N, 3) each, that take the place of one microbatch's activations when its backward pass has ended; of all of them
        at the end of the step; and the part of the latter that stays reserved, free, until an allocation would fail."""
        return 0.0, 0.0, 0.0

    def record_stream_bytes(
        self, workload: Workload, layout: Layout, stages: Stages, flights: Floats
    ) -> tuple[Floats, Floats, Floats, Floats] | None:
        """Inputs of collectives that a host far ahead has freed but the GPU has not read; None where there are none.

        Bytes, (N, 3): of all passes until most is alive; the most that is held at once; those held whether the host is ahead or
        not. Last the part of the step in which the GPU does not wait for other stages.  [cost.memory.states, record_stream_held]
        """
        return None

    def allocation_seconds(self, layout: Layout, launched: Floats) -> Number:
        """Seconds of a step, (3, N), in which an allocator without room for the inputs of collectives (``launched`` bytes of
        ``record_stream_bytes``) gives blocks back and allocates them anew."""
        return 0.0

    def most_gathered(self) -> int:
        """Virtual stages whose gathered weights a pipeline's schedule holds at most; 0 = all."""
        return 0

    def gathered_again(self, layout: Layout) -> Number:
        """How often in a step a pipeline's schedule gathers all weights of a stage after the first time, (N,): it drops some of its
        virtual stages."""
        return 0.0

    def frozen_gradients(self) -> float:
        """Bytes per frozen parameter of gradients that sharded data parallelism makes all the same, and keeps whole on every rank
        while microbatches are accumulated."""
        return 0.0

    def head_bytes(self, trainer: Trainer) -> float:
        """Bytes per weight of the head of copies that its product makes."""
        return 0.0

    def pair_bytes(self) -> float:
        """Bytes per logit alive at the peak of the loss of DPO, where they are its own; 0: they are not."""
        return 0.0

    def update_bytes(self, workload: Workload) -> float:
        """Bytes that kernels in addition to the optimizer's own move per updated parameter."""
        return 0.0

    def gather_seconds(self, part: Part, size: Floats, seconds: Floats) -> Floats:
        """Seconds until all ranks of a group have updated weights, by those of one all-gather of ``size`` bytes."""
        return seconds

    def gather_host_seconds(self, part: Part) -> Number:
        """Host work, in seconds, to gather all weights of a stage once, in addition."""
        return 0.0


def until_flush(trainer: Trainer, layout: Layout) -> Layout:
    """The layout with the microbatches alone that are under way before its pipeline runs empty."""
    calls = [term.flush() for term in trainer.terms if term.flush()]
    if not calls:
        return layout
    return layout.replace(num_microbatches=np.minimum(np.asarray(layout.num_microbatches), calls[0]))


def flushes(trainer: Trainer, layout: Layout) -> Number:
    """How often a pipeline runs empty in a step."""
    return np.ceil(np.asarray(layout.num_microbatches) / np.asarray(until_flush(trainer, layout).num_microbatches))

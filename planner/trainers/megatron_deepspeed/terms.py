"""What Megatron-DeepSpeed alone does: outputs kept by the pipeline engine, joined gradients, late tensor-parallel ranks, heads of
keys and values repeated."""

from dataclasses import dataclass

import numpy as np

from planner.cost.layer.operators import Collective, MemoryBound, Number, Operator, Shard
from planner.cost.memory.states import stage_output_bytes
from planner.cost.own_terms import OwnTerms
from planner.cost.pipeline.partition import StageParameters, column, shard_groups
from planner.layout import Layout
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """BigScience's fork of 2021 to 2022."""

    kept_outputs: float
    """Outputs of a stage that the pipeline engine keeps for each microbatch in flight, in addition to what the layers save."""
    split_outputs: float
    """1: of these each tensor-parallel rank keeps its 1 / t."""
    joined_bytes: float
    """Bytes of gradients that are copied into one buffer to be reduced together."""
    joined_parameters: float
    """Parameters that such a buffer holds at the most."""
    sent_masks: float
    """Attention masks that travel with a microbatch's activations, forward; every tensor-parallel rank sends the whole of it."""
    tensor_wait: float
    """Time of a tensor-parallel collective among the kernels of a layer over its time in a loop of collectives: ranks arrive
    one after the other, and each change of stream costs."""
    repeats_key_values: bool = False
    """Keys and values are repeated for all query heads before attention, and the output of flash attention is copied where a
    microbatch has several sequences."""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """T (e (a - k) (d_k + d_v) + e O) / t more bytes are kept: a heads, k those of keys, O the output's width. Both copies are
        written once and read once, each way.  [megatron/model/transformer.py, repeat_kv; rearrange(...).contiguous()]"""
        model, first = shard.model, ("core_attention", "scores")
        at = next((i for i, one in enumerate(operators) if one.name in first), -1)
        if part != "layer" or not self.repeats_key_values or at < 0:
            return operators, collectives
        heads = np.maximum(model.num_heads / shard.tp - shard.kv_heads, 0.0)
        width = heads * (model.key_size + model.value_size) / model.num_kv_heads
        twice = (shard.trainer.kernels.attention == "flash") & (np.asarray(shard.layout.micro_batch_size) > 1)
        output = model.attention_output_size / shard.tp * twice
        size = shard.tokens * shard.element * (width + output)
        copies = MemoryBound(name="repeated_heads", kind="elementwise", forward=2 * size, backward=2 * size, kept=size)
        return [*operators[:at], copies, *operators[at:]], collectives

    def collective_seconds(self, collective: Collective, seconds: Number) -> Number:
        """``tensor_wait`` times that of tensor parallelism."""
        return seconds * self.tensor_wait if collective.group == "tp" else seconds

    def sent_bytes(self, workload: Workload) -> float:
        """s^2 values of 2 bytes, in one of two directions.  [DeepSpeed 0.3, pipe/engine.py: has_attention_mask, half()]"""
        return self.sent_masks * float(workload.sequence_length) ** 2 * 2.0 / 2.0

    def stored_bytes(self, workload: Workload, layout: Layout) -> Number:
        """Outputs of a stage, T_s h each, or 1 / t of it."""
        part = column(layout.tp) if self.split_outputs else 1.0
        return stage_output_bytes(workload, layout) * self.kept_outputs * (column(layout.pp) > 1) / part

    def communicators(self, layout: Layout) -> Number:
        """That of all ranks of a pipeline, over which parameters are counted, and where stages follow a second one of tensor
        parallelism, with which they gather what they received. One that has a single rank on each node has few channels and is
        left out.  [DeepSpeed, runtime/pipe/topology.py: ds_model_proc_group, slice_proc_group; runtime/pipe/engine.py]"""
        return (column(layout.tp) > 1) * (1.0 + (column(layout.pp) > 1))

    def workspace_bytes(self, workload: Workload, layout: Layout, parameters: StageParameters) -> Number:
        """The buffer of joined gradients. One replica joins them as well; not in fp16, where ZeRO 1 reduces its
        own partitions.  [runtime/engine.py: allreduce_gradients]"""
        dense, expert = parameters.trained(workload)
        replicated = shard_groups(layout)[0] * column(layout.dp) / column(layout.shard) > 1
        joined = replicated | (workload.precision != "fp16")
        return np.minimum(dense + expert, self.joined_parameters) * self.joined_bytes * joined

"""What LitGPT alone does: queries and keys as well as the tensor they are views of, and a frozen base in FSDP's flat parameters."""

import dataclasses
from dataclasses import dataclass

from planner.cost.layer.operators import Collective, Gemm, Operator, Shard
from planner.cost.own_terms import OwnTerms
from planner.cost.state_dtypes import dequantised
from planner.layout import Module


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Terms of LitGPT."""

    quantised_inputs: bool = False
    """Quantised linear layers save a copy of their input: bitsandbytes of 2023 (MatMul4Bit keeps A in ``ctx.tensors``)."""
    flat_parameters: bool = False
    """LoRA is sharded by FSDP's flat parameters, as up to 0.5.10; then by fully_shard.  [litgpt/finetune/lora.py]"""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """The value is a view of what the one projection puts out and keeps all of it, while the rotary embedding puts out
        queries and keys anew: w T (Q + K) more.  [lit_gpt/model.py, CausalSelfAttention: split, apply_rope, cat]"""
        if part != "layer":
            return operators, collectives
        more = self.quantised_inputs and dequantised(shard.workload)
        found = []
        for one in operators:
            kept = one.kept
            if isinstance(one, Gemm) and more and one.low_precision and not one.trained and one.module != Module.CORE_ATTENTION:
                kept = kept + one.m * one.groups * one.k * shard.element
            if one.name == "rope":
                model = shard.model
                keys = shard.kv_heads * model.key_size / model.num_kv_heads
                kept = kept + shard.tokens * (model.query_size / shard.tp + keys) * shard.element
            found.append(one if kept is one.kept else dataclasses.replace(one, kept=kept))
        return found, collectives

    def frozen_gradients(self) -> float:
        """Frozen weights lie in one flat parameter with the adapters of their layer, which gets a gradient as a whole; between
        microbatches it is not reduced. Under fully_shard every tensor is a parameter of its own, and a frozen one has no gradient.
        [torch, FullyShardedDataParallel: use_orig_params; Fabric.no_backward_sync]"""
        return 2.0 * self.flat_parameters

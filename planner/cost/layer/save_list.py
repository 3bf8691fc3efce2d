"""What per-operator recompute keeps of a layer: the outputs of every other matrix product, counted in order, and of collectives.

[torchtitan, activation_checkpoint.py: save list and policy; the router's product is repeated and not counted]
"""

import numpy as np

from planner.cost.layer.operators import Number, Shard
from planner.model import ModelSpec


def attention_products(model: ModelSpec) -> int:
    """Products up to the output projection: wq wk wv wo, of MLA wq wkv_a wkv_b wo, or wq_a wq_b wkv_a wkv_b wo with a low rank of
    queries. Of layers with linear attention the fifth is taken, whose output is kept."""
    return 5 if model.q_lora_rank or model.linear else 4


def repeats(product: int) -> float:
    """1 where a product, counted from 1, is repeated, 0 where its output is kept."""
    return 1.0 - product % 2


def listed_output(shard: Shard, product: int) -> Number:
    """Bytes kept of what a product puts out whose outputs are summed over tensor-parallel ranks: T rows if it is kept itself, and
    the T_s of its reduce-scatter."""
    rows = shard.tokens * (1.0 - repeats(product)) + np.where(shard.split > 1, shard.tokens_split, 0.0)
    return shard.listed * rows * shard.model.hidden_size * shard.element

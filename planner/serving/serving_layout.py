"""How a model is split for serving: degrees, batch and precision; integers for one deployment, columns for many."""

from __future__ import annotations

from copy import copy
from typing import Annotated

import numpy as np

from planner.arrays import NDArray
from planner.errors import PlannerError
from planner.record import record
from planner.schema import check, one_of

Degree = int | NDArray[np.integer]
"""An integer, or a column of integers: one per candidate."""
WEIGHTS = ("bf16", "fp16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int8")
CACHES = ("bf16", "fp16", "fp8")
WEIGHT_BYTES = {
    "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0 + 4.0 / 128**2, "nvfp4": 0.5 + 1.0 / 16, "mxfp4": 0.5 + 1.0 / 32,
    "int4": 0.5 + 2.5 / 128, "int8": 1.0,
}  # fmt: skip
"""Bytes of one weight with its scales: fp8_block one fp32 per 128 x 128, nvfp4 one fp8 per 16, mxfp4 one e8m0 per 32, int4 one fp16
scale and half a byte of zero point per group of 128."""
CACHE_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@record
class Precision:
    """Formats of what is stored."""

    weights: Annotated[str, one_of(WEIGHTS)] = "bf16"
    """Of the linear layers; embeddings, head, norms and routers stay bf16."""
    experts: Annotated[str, one_of(("", *WEIGHTS))] = ""
    """Of routed experts; empty = as ``weights``."""
    cache: Annotated[str, one_of(CACHES)] = "bf16"
    """Of keys and values."""
    attention: Annotated[str, one_of(("", *WEIGHTS))] = ""
    """Of the projections of attention; empty = as ``weights`` (gpt-oss and DeepSeek's fp4 files keep these in 16 or 8 bits)."""

    def __post_init__(self) -> None:
        check(self)


@record
class ServingLayout:
    """Degrees of one deployment: integers, or integer columns of one length.

    One engine is pp stages of tp x attn_dp ranks; num_gpus = replicas x pp x tp x attn_dp. Experts are spread over the ranks of a
    stage, ep x moe_tp = tp x attn_dp. Each of the attn_dp groups holds the attention weights split over tp and the cache of its own
    sequences; dense layers outside attention are split over tp as well.
    """

    tp: Degree = 1
    """Tensor parallel degree of attention and dense layers."""
    pp: Degree = 1
    """Pipeline stages."""
    replicas: Degree = 1
    """Independent engines behind one router."""
    attn_dp: Degree = 1
    """Data-parallel ranks of attention in one engine, in lock step."""
    ep: Degree = 1
    """Expert parallel degree."""
    moe_tp: Degree = 1
    """Tensor degree inside each expert."""
    dcp: Degree = 1
    """Context (sequence) split of the cache in decode, inside tp."""
    max_batch: Degree = 256
    """Sequences in one step of one engine at most, over its attn_dp ranks together."""
    max_tokens: Degree = 8192
    """Token budget of one step of one attention rank."""
    receive_interval: Degree = 1
    """Steps between two looks for new requests (SGLang's --scheduler-recv-interval)."""
    balance: Degree = 1
    """Steps that prompts wait at most until every attention rank has one (TensorRT-LLM's attention_dp_config timeout_iters); the
    count goes on while none waits."""
    hold: Degree = 1
    """Steps from that which the first prompt that waits could join to that which takes all (TensorRT-LLM's batch_wait_timeout_iters
    and one)."""

    gpu_weights: Degree = 100
    """Percent of the weights of layers, or of routed experts, that GPUs hold; the others stay in host memory."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1 if isinstance(value, int) else (value < 1).any():
                raise PlannerError(f"{name} must be at least 1")
        if np.any(np.asarray(self.gpu_weights) > 100):
            raise PlannerError(f"gpu_weights {np.max(self.gpu_weights)} is a percentage; give 1 to 100")

    @property
    def ranks(self) -> Degree:
        """GPUs of one stage of one engine."""
        return self.tp * self.attn_dp

    def take(self, rows: object) -> ServingLayout:
        """Some rows of columns; numbers stand for all rows."""
        found = copy(self)  # rows of what was checked need no check
        vars(found).update({name: value[rows] for name, value in vars(self).items() if np.ndim(value)})
        return found

    def row(self, index: int) -> ServingLayout:
        """One row, its fields integers."""
        values = {name: np.asarray(value) for name, value in vars(self).items()}
        return ServingLayout(**{name: int(value[index] if value.ndim else value) for name, value in values.items()})

    @property
    def engine_gpus(self) -> Degree:
        """GPUs of one engine."""
        return self.ranks * self.pp

    @property
    def num_gpus(self) -> Degree:
        """GPUs of all replicas."""
        return self.engine_gpus * self.replicas

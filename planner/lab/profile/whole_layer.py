"""A whole layer of the reference transformer, run forward or backward: what the sum of its operators is held against.

The layer is the validator's (planner/lab/reference/transformer.py:Layer), dense or with experts, grouped-query or latent attention,
in plain torch operations. The shard of one rank of a tensor parallel group, its collectives left out: heads / t, width / t,
the hidden size whole. Layers take turns like the operands of an operator: weights are read once per microbatch.
"""

from __future__ import annotations

from typing import Any

import torch

from planner.errors import PlannerError
from planner.lab.profile.definitions import ELEMENT, SCALED, resident_weights, text
from planner.lab.profile.layer_check import model_of
from planner.lab.profile.points import Point
from planner.lab.profile.tensors import DTYPES, Run, gradients, in_turn, precision, values, whole
from planner.lab.reference.split import Split
from planner.lab.reference.transformer import Layer, Place, angles


def built(point: Point, device: str) -> Layer:
    """The layer with random weights. ``point`` is of family layer."""
    model, dtype, sequence = model_of(point), DTYPES[text(point, "dtype")], whole(point, "seq")
    place = Place()
    if model.position == "rope":
        width = model.qk_rope_head_dim if model.is_mla else model.head_dim
        tables = angles(torch.arange(sequence, device=device), width, torch.float32)
        place.cosine, place.sine = (table.to(dtype) for table in tables)
    # Every expert gets the same number of tokens, as the cost model has it; the router is computed all the same.
    split = Split(model=model, sequence_length=sequence, micro_batch_size=whole(point, "batch"), balanced=True)
    with torch.device("meta"):
        made = Layer(split, 0, place)
    made = made.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = values(tuple(parameter.shape), text(point, "dtype"), device)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else torch.ones_like(drawn))
    return made


def layer(point: Point, device: str) -> Run:
    """Forward with what the backward pass needs kept, or the backward pass of the input and all weights."""
    dtype = text(point, "dtype")
    if dtype in SCALED:
        raise PlannerError(f"{point.label}: a whole layer runs in bf16, fp16, tf32 or fp32")
    precision(dtype)
    shape = (whole(point, "batch"), whole(point, "seq"), whole(point, "hidden"))

    def one() -> Run:
        made: Any = built(point, device)
        x = values(shape, dtype, device).requires_grad_(True)
        if text(point, "pass") == "forward":
            return lambda: made(x)
        return gradients([made(x)], (x, *made.parameters()))

    return in_turn(one, resident_weights(point) * ELEMENT[dtype], device)

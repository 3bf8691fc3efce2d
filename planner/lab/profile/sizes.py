"""The largest buffer that the collectives of a job use, from its models."""

from __future__ import annotations

from planner import units
from planner.cost.parameters import count_parameters
from planner.model import load_model

CAP = {"cpu": 16.0 * units.MIB, "cuda": units.GIB}
"""Beyond this the bus bandwidth is flat on every fabric whose sweep is in the library, and a CPU needs seconds per run."""
SEQUENCE = 8192


def largest_buffer(models: tuple[str, ...], device: str) -> float:
    """Bytes: the weights of one layer in bf16 (what is gathered or reduced at once), or the activations of one sequence.

    max over models of 2 max(parameters of a layer, s h), at most CAP. Without a model: CAP.
    """
    wanted = []
    for name in models:
        model = load_model(name)
        counts = count_parameters(model)
        layer = counts.attention_sharded + max(counts.mlp_sharded, counts.expert * model.num_experts)
        activations = float(min(SEQUENCE, model.max_sequence_length)) * model.hidden_size
        wanted.append(2.0 * max(layer, activations))
    return min(max(wanted, default=CAP[device]), CAP[device])

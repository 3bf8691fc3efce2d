"""What InternEvo alone does: ranks own whole tensors and broadcast them after the update."""

from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.cost.own_terms import OwnTerms
from planner.cost.price.state_traffic import Part

TENSORS_PER_LAYER = 7.0
"""Weight tensors of a layer: query-key-value and output projection, three of a gated MLP, two norms."""


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """InternEvo's hybrid ZeRO optimizer."""

    def gather_seconds(self, part: Part, size: Floats, seconds: Floats) -> Floats:
        """k = min(group, tensors of the stage) broadcasts of size / k, one after the other.

        The latency of each grows with the ring: at a thousand ranks it is all.
        """
        messages = np.minimum(part.group, np.maximum(TENSORS_PER_LAYER * part.layers, 1.0))
        return messages * part.cluster.collective_time("broadcast", size / messages, part.group, part.distance)

"""What NeMo's LoRA recipes alone do: adapters with dropout in addition to the scale, and Python around each layer."""

from dataclasses import dataclass

from planner.cost.layer.operators import Collective, Operator, Shard
from planner.cost.layer.parts import scale_adapters
from planner.cost.own_terms import OwnTerms
from planner.schema import Seconds


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Layers with adapters."""

    adapter_scale_bytes: float = 4.0
    """Bytes moved each way per output of a low-rank adapter to scale it, and for dropout where it is used."""
    layer_host_time: Seconds = 0.0
    """Least host time of one layer's forward pass: Python around the kernels where it was measured; 0 = not known."""

    def layer(
        self, shard: Shard, part: str, operators: list[Operator], collectives: list[Collective]
    ) -> tuple[list[Operator], list[Collective]]:
        """Adapters with their own scaling."""
        return scale_adapters(operators, self.adapter_scale_bytes, shard), collectives

    def least_forward_host_time(self) -> float:
        """As the file says."""
        return self.layer_host_time

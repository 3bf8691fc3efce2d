"""What Megatron-LM of 2021 and 2022 alone does: kernels of the update in addition to Adam's own."""

from dataclasses import dataclass

from planner.cost.own_terms import OwnTerms
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """FP16 optimizer with fp32 parameters, before the distributed optimizer."""

    update_copy_bytes: float
    """Bytes that kernels move per updated parameter: gradients zeroed and clipped, weights copied."""
    fp16_unscale_bytes: float
    """Further bytes per updated parameter in fp16, to take the loss scale out of the gradients."""

    def update_bytes(self, workload: Workload) -> float:
        """The sum of both."""
        return self.update_copy_bytes + (self.fp16_unscale_bytes if workload.precision == "fp16" else 0.0)

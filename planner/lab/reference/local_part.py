"""What a rank has of a weight that tensor-parallel ranks share out or all hold."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def whole(weight: Tensor) -> Tensor:
    """What this rank has of a weight. Of one that is the same on all tensor-parallel ranks, which meet different tokens or
    heads, the gradient is the sum of theirs."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial()] if weight.placements[0].is_replicate() else None)

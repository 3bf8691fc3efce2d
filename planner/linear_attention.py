"""Layers whose mixer keeps a state of fixed size instead of keys and values: Mamba-2, gated delta net, Kimi delta attention."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

from planner.record import record
from planner.schema import check, one_of, within

KINDS = ("mamba2", "gated_delta_net", "kimi_delta_attention")
Size = Annotated[int, within(1, 10**9)]


@record
class LinearAttention:
    """The linear-attention layers of a hybrid model.

    One set of names: in Mamba-2 the groups of B and C are the key heads, the state size is their width, and the heads of x are
    the value heads [Dao 2024, arXiv 2405.21060, section 5: B, C and x stand for keys, queries and values].
    """

    kind: Annotated[str, one_of(KINDS)]
    """mamba2 [arXiv 2405.21060], gated_delta_net [arXiv 2412.06464] or kimi_delta_attention [arXiv 2510.26692]."""
    num_layers: Size
    """Layers with this mixer; all other mixers are attention."""
    key_heads: Size
    """Heads of keys and queries; in Mamba-2 groups of B and C."""
    key_head_dim: Size
    """Width of one of them; in Mamba-2 the state size."""
    value_heads: Size
    """Heads of values, gates and decays; in Mamba-2 heads of x."""
    value_head_dim: Size
    """Width of one value head."""
    conv_kernel: Size = 4
    """Tokens that the causal convolution before the mixer sees."""
    chunk_size: Size = 64
    """Tokens of a chunk of the scan."""
    num_mlp_layers: Annotated[int, within(0, 10**9)] = 0
    """Layers that are an MLP or experts alone; all others are a mixer alone then (Nemotron-H). 0: each layer has both."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def key_size(self) -> int:
        """Width of all keys together."""
        return self.key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def gate_rank(self) -> int:
        """Inner width of the two low-rank gates of Kimi delta attention; 0 for the others."""
        return self.key_head_dim if self.kind == "kimi_delta_attention" else 0

    @property
    def decay_size(self) -> int:
        """Width of the decay: one per value head, in Kimi delta attention one per channel of its keys."""
        return self.value_heads * (self.key_head_dim if self.gate_rank else 1)

    @property
    def input_size(self) -> int:
        """Outputs of the projection of the hidden state that heads split: queries, keys, values and write strengths, and but for
        low-rank gates the output gate and the decay."""
        one_each = self.value_heads * (2 if self.kind == "gated_delta_net" else 1)
        return self.conv_size + one_each + (0 if self.gate_rank else self.value_size)


class LayerKind(NamedTuple):
    """Some of a model's layers, alike in what they are made of."""

    share: float
    """Part of all layers."""
    mixer: str
    """attention, linear (linear attention) or none."""
    mlp: bool
    """It has an MLP or experts."""


WHOLE = LayerKind(1.0, "attention", True)
"""Every layer of a transformer."""


def layer_kinds(linear: LinearAttention | None, num_layers: int) -> tuple[LayerKind, ...]:
    """What the layers of a model are, in fixed proportion within every pipeline stage."""
    if linear is None:
        return (WHOLE,)
    both = linear.num_mlp_layers == 0
    attention = num_layers - linear.num_layers - linear.num_mlp_layers
    counts = ((attention, "attention", both), (linear.num_layers, "linear", both), (linear.num_mlp_layers, "none", True))
    return tuple(LayerKind(number / num_layers, mixer, mlp) for number, mixer, mlp in counts if number > 0)


def disagreements(linear: LinearAttention, num_layers: int) -> Iterator[str]:
    """Fields that do not agree with each other or with the number of layers."""
    if linear.num_layers + linear.num_mlp_layers > num_layers:
        yield (
            f"linear num_layers {linear.num_layers} and num_mlp_layers {linear.num_mlp_layers} are more than "
            f"num_layers {num_layers}"
        )
    if linear.value_heads % linear.key_heads:
        yield f"linear value_heads {linear.value_heads} must be a multiple of key_heads {linear.key_heads}"

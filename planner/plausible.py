"""Sizes of a model that a typing error would give: legal, and like those of no published model."""

from collections.abc import Iterator

from planner.model import ModelSpec

LEAST = {"head_dim": 16, "vocab_size": 256, "max_sequence_length": 128, "num_layers": 2}
"""Smallest of published models, the smallest of tests included."""
MOST = {"head_dim": 576, "vocab_size": 10**6, "max_sequence_length": 2**27, "num_layers": 256}
"""Largest of published models, with room for those of the next years."""
WIDTHS = {"ffn_size": (0.5, 16.0), "expert_ffn_size": (0.02, 8.0), "shared_expert_ffn_size": (0.02, 32.0)}
"""Widths over the hidden size."""
STEP = 8
"""Widths are multiples of this: 16 bytes in bf16, as tensor cores take them."""


def odd_sizes(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """(field and value, what is odd about it) of every size that is doubted."""
    for name, least in LEAST.items():
        value = getattr(model, name)
        if not least <= value <= MOST[name]:
            yield f"{name} {value}", f"published models have from {least} to {MOST[name]}"
    for name in ("hidden_size", "head_dim"):
        value = getattr(model, name)
        if value % STEP and value >= LEAST.get(name, 0):
            yield f"{name} {value}", f"no multiple of {STEP}, as kernels want it"
    for name, (low, high) in WIDTHS.items():
        value = getattr(model, name)
        used = model.num_plain_layers if name == "ffn_size" else value
        if used and not low <= value / model.hidden_size <= high:
            yield f"{name} {value}", f"{value / model.hidden_size:.3g} times hidden_size {model.hidden_size}"
    heads, width = model.num_heads, model.num_heads * model.head_dim
    if not model.is_mla and width != model.hidden_size:
        if heads % 2 and heads > 1:
            yield f"num_heads {heads}", f"an odd number, and {heads} x {model.head_dim} is not hidden_size {model.hidden_size}"
        elif not 0.25 <= width / model.hidden_size <= 4.0:
            yield f"num_heads {heads}", f"{heads} x {model.head_dim} is far from hidden_size {model.hidden_size}"

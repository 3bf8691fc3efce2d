"""A dense transformer layer in plain torch, run whole: what the sum of its operators is held against.

The shard of one rank of a tensor parallel group, its collectives left out: heads / t, width / t, the hidden size whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from planner.errors import PlannerError
from planner.profiler.definitions import text
from planner.profiler.operators import Run, precision, values, whole
from planner.profiler.points import Point

ROPE_BASE = 10000.0


class Layer:
    """RMSNorm, QKV in one product, rotary embedding, attention, output, RMSNorm, (gated) MLP; two residual additions."""

    def __init__(self, point: Point, device: str) -> None:
        """Weights and the rotary table. ``point`` is of family layer."""
        dtype = text(point, "dtype")
        hidden, ffn, self.heads, self.kv_heads, self.head_dim, sequence = (
            whole(point, name) for name in ("hidden", "ffn", "heads", "kv_heads", "head_dim", "seq")
        )
        self.gated, self.hidden = bool(point["gated"]), hidden
        inner = self.heads * self.head_dim
        shapes = {
            "norm1": (hidden,), "norm2": (hidden,), "out": (hidden, inner), "down": (hidden, ffn),
            "qkv": (inner + 2 * self.kv_heads * self.head_dim, hidden), "up": (ffn * (1 + self.gated), hidden),
        }  # fmt: skip
        scale = hidden**-0.5
        self.weights = {
            name: (values(shape, dtype, device) * (scale if len(shape) == 2 else 1.0)).requires_grad_(True)
            for name, shape in shapes.items()
        }
        angles = torch.outer(
            torch.arange(sequence, device=device).float(),
            ROPE_BASE ** (-torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim),
        )
        both = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = both.cos().to(values((1,), dtype, device).dtype), both.sin().to(self.weights["qkv"].dtype)

    def _rotate(self, x: Any) -> Any:
        half = self.head_dim // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + turned * self.sin

    def __call__(self, x: Any) -> Any:
        """y of x (batch, sequence, hidden)."""
        w, batch, sequence = self.weights, x.shape[0], x.shape[1]
        sizes = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        parts = F.linear(F.rms_norm(x, (self.hidden,), w["norm1"]), w["qkv"]).split(sizes, dim=-1)
        query, key, value = (part.view(batch, sequence, -1, self.head_dim).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, sequence, -1), w["out"])
        up = F.linear(F.rms_norm(x, (self.hidden,), w["norm2"]), w["up"])
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            up = F.silu(gate) * up
        else:
            up = F.relu(up)
        return x + F.linear(up, w["down"])


def layer(point: Point, device: str) -> Run:
    """Forward with what the backward pass needs kept, or the backward pass of all inputs and weights."""
    if text(point, "dtype") == "fp8":
        raise PlannerError(f"{point.label}: a whole layer runs in bf16, fp16, tf32 or fp32")
    precision(text(point, "dtype"))
    made = Layer(point, device)
    shape = (whole(point, "batch"), whole(point, "seq"), made.hidden)
    x = values(shape, text(point, "dtype"), device).requires_grad_(True)
    if text(point, "pass") == "forward":
        return lambda: made(x)
    output = made(x)
    gradient = torch.randn_like(output)
    wanted = (x, *made.weights.values())
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)

"""FlashAttention 2 on Hopper: measured rates of the FlashAttention-3 paper, and the curves that follow.

No public table of attention times has this kernel on Hopper, where it reaches about half of what kernels made for it do; trainers
of 2023 and 2024 ran it (torch's scaled_dot_product_attention, NeMo until 24.07, nanotron).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.lab.profile.fit_attention import Rows, attention_model, refine_rate

SOURCE = "FlashAttention-2 on H100 SXM5: arXiv 2407.08608, figures 5 (forward) and 6 (backward), 16k tokens, hidden size 2048"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
RATES = {
    ("forward", 64, False): (282, 306, 318, 321, 322, 324),
    ("forward", 64, True): (180, 229, 262, 284, 295, 299),
    ("forward", 128, False): (309, 350, 362, 368, 370, 370),
    ("forward", 128, True): (191, 260, 298, 319, 333, 335),
    ("forward", 256, False): (275, 313, 321, 323, 324, 326),
    ("forward", 256, True): (208, 251, 278, 293, 297, 298),
    ("backward", 64, False): (198, 238, 264, 279, 287, 291),
    ("backward", 128, False): (214, 260, 291, 310, 318, 322),
}
"""TFLOP/s by pass, head size and whether causal (counted half), for LENGTHS. The backward pass was measured without a mask only."""


def _causal_rows(pass_: str, head_dim: int) -> tuple[Rows, str]:
    """Rows with a causal mask, which is what is priced, and what they are. Where the paper has none, those without one with
    what the mask costs in the forward pass at 16k (the tiles on the diagonal, which are half empty)."""
    causal, note = (pass_, head_dim, True), "causal, in sample"
    if causal in RATES:
        rates = np.array(RATES[causal], dtype=float)
    else:
        cost = RATES["forward", head_dim, True][-1] / RATES["forward", head_dim, False][-1]
        rates = np.array(RATES[pass_, head_dim, False], dtype=float) * cost
        note = f"without a mask x {cost:.2f}, the ratio in the forward pass"
    length = np.array(LENGTHS, dtype=float)
    flop = 4.0 * TOKENS * WIDTH * length / 2.0 * (2.5 if pass_ == "backward" else 1.0)
    tiles = TOKENS / length * (WIDTH / head_dim) * np.ceil(length / 128.0)
    return Rows(flop=flop, span=length / 2.0, tiles=tiles, seconds=flop / (rates * 1e12)), note


def fits(best: dict[int, Any], peak: float, units: float) -> dict[str, tuple[dict[int, Any], dict[str, Any]]]:
    """By pass: (t0, e, s0, c) by head size, and their errors (median and 90 % below, in sample).

    ``best`` has the constants of the device's best kernel by head size: what 16k tokens cannot show, its launch and its
    idle units, is taken from there.
    """
    found: dict[str, tuple[dict[int, Any], dict[str, Any]]] = {}
    for pass_ in ("forward", "backward"):
        constants, errors = {}, {}
        for head_dim in sorted({dim for of_pass, dim, _ in RATES if of_pass == pass_}):
            rows, note = _causal_rows(pass_, head_dim)
            constants[head_dim] = refine_rate(rows, best[head_dim], peak, units)
            off = np.abs(attention_model(constants[head_dim], rows, peak, units) / rows.seconds - 1.0) * 100.0
            errors[f"{head_dim} ({len(off)} rows {note})"] = [
                round(float(np.median(off)), 1), round(float(np.quantile(off, 0.9)), 1)
            ]  # fmt: skip
        found[pass_] = constants, errors
    return found

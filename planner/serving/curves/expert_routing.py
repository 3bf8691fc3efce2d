"""How many experts of the slowest rank a batch touches, and how many copies of tokens arrive there."""

import numpy as np

from planner.curves import Column, column

_RANKS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
_LARGEST = np.array([0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.595, 2.827, 3.044, 3.248])
"""Mean of the largest of n standard normal variables."""
POWER, RANGE = 1.2, 100.0
"""Skewed routing: how often an expert is chosen is spread as x^-1.2 between one and a hundred times the least popular."""


def _popularity() -> tuple[Column, float]:
    """Quantiles of the popularity over its mean (each as likely), and its variance."""
    share = (np.arange(400) + 0.5) / 400.0
    spread = (1.0 - share * (1.0 - RANGE ** (1.0 - POWER))) ** (1.0 / (1.0 - POWER))
    relative = spread / spread.mean()
    return relative, float(np.var(relative))


_RELATIVE, _VARIANCE = _popularity()
_LOADS = np.exp2(np.arange(-14.0, 15.0, 0.5))
_TOUCHED = np.array([float(np.mean(-np.expm1(-load * _RELATIVE))) for load in _LOADS])
"""Share of experts touched at so many expected copies per expert, when popularity is skewed."""


def slowest_rank(
    tokens: Column, top_k: Column, experts: Column, ep: Column, skewed: bool
) -> tuple[Column, Column]:  # fmt: skip
    """(experts touched, copies of tokens) on the slowest of ``ep`` ranks that hold E / ep experts each.

    A token uses K of E experts: one expert is touched with probability p = 1 - (1 - K/E)^B, a rank touches n p of its n experts
    on the mean, and the luckless one L(ep) standard deviations more, at most all. Copies: B K / ep, likewise.
    ``skewed``: experts differ in popularity by the power law above; else all are alike and only chance makes ranks differ.
    """
    each = np.maximum(experts / ep, 1.0)
    chosen = np.minimum(top_k / experts, 1.0)
    uniform = -np.expm1(tokens * np.log1p(-np.minimum(chosen, 1.0 - 1e-12)))
    share = np.minimum(np.interp(np.log2(tokens * chosen), np.log2(_LOADS), _TOUCHED), uniform) if skewed else uniform
    luck = np.interp(np.log2(np.maximum(ep, 1.0)), np.log2(_RANKS), _LARGEST)
    touched = each * share + luck * np.sqrt(each * share * (1.0 - share))
    touched = np.clip(touched, np.minimum(1.0, tokens * top_k / ep), np.minimum(each, tokens * np.minimum(top_k, each)))
    mean = tokens * top_k / ep
    variance = mean * (1.0 - 1.0 / ep) + (mean * mean * _VARIANCE * (1.0 - 1.0 / ep) / each if skewed else 0.0)
    rows = np.minimum(mean + luck * np.sqrt(variance), tokens * np.minimum(top_k, each))
    return column(touched), column(np.maximum(rows, touched))

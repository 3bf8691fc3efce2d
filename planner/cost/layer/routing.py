"""How unevenly a router loads the ranks that share the experts."""

import numpy as np

from planner.arrays import Floats
from planner.workload import Workload

INDEPENDENT_CHOICES = 138.0
"""Choices of K experts in a batch that are independent of each other: tokens of one kind go to the same experts.

Read off one expert's load under the usual balancing loss: MaxVio, the most loaded of 64 experts over the mean minus 1, is 0.72
and 0.52 with K = 6 at the end of training (1B and 3B models, 100 and 200 billion tokens) [Wang 2024, arXiv 2408.15664, table 2].
Their mean 0.62 is E(64) = 2.34 standard deviations of 0.265, and (E - K) / (K 0.265^2) = 138. Sums over many batches: one
microbatch of few documents is rougher. A bias per expert in place of the loss brings these sums to 0.04.
"""
_RANKS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
_LARGEST = np.array([0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.595, 2.827, 3.044, 3.248])
"""Mean of the largest of n standard normal variables: the integral of x d(Phi(x)^n)."""


def busiest(workload: Workload, ep: Floats) -> Floats:
    """Tokens of the busiest of ``ep`` expert ranks over the mean: ``Workload.expert_imbalance``, or 1 + sigma E(e) where that is 0.

    A rank holds n = E / e of E experts. Each of N independent choices takes K of them without replacement, of which K / e are on
    the rank at the mean, with the variance of a hypergeometric distribution:

        sigma^2 = (E - n) (E - K) / (n K (E - 1) N)

    E(e) is the mean of the largest of e normal variables. Many experts per rank even each other out, and so do many per token: 8
    of 128 on 8 ranks 1.11, 8 of 256 on 64 ranks 1.55, 2 of 8 on 8 ranks 1.21. Left out: experts of one rank that go together, how
    layers and microbatches differ, the first steps of a training.
    """
    ranks, experts = np.asarray(ep, dtype=float), float(max(workload.model.num_experts, 2))
    if workload.expert_imbalance:
        return np.where(ranks > 1.0, workload.expert_imbalance, 1.0)
    each, top_k = np.maximum(experts / ranks, 1.0), float(workload.model.top_k)
    choices = workload.independent_choices or INDEPENDENT_CHOICES
    spread = np.sqrt((experts - each) * (experts - top_k) / (each * top_k * (experts - 1.0) * choices))
    return np.asarray(1.0 + spread * np.interp(np.log2(ranks), np.log2(_RANKS), _LARGEST))

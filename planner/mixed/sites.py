"""What it costs to train over slow links: gradients, activations, local updates and compression, as traffic, seconds and memory.

Pure formulas; ``site_report`` puts them together for a layout.

    P  bytes of all gradients        R  sites           tau  seconds of a stage's forward and backward pass of one microbatch
    t  seconds of an inner step      H  inner steps between two averages      t_AR  seconds of the average      d  seconds of a
    hand-over
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.cost.parameters import count_parameters
from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.record import record

NONE, FP16, INT8, POWER_SGD = "none", "fp16", "int8", "powersgd"
COMPRESSIONS = (NONE, FP16, INT8, POWER_SGD)
"""Of gradients or of outer gradients; PowerSGD with a rank: ``powersgd:4``."""
MOVED = {NONE: 0.0, FP16: 12.0, INT8: 18.0, POWER_SGD: 44.0}
"""Bytes that the kernels read and write in GPU memory per number of 4 bytes.
fp16: read 4, write 2 before, read 2, write 4 after. int8: read 4 for the range, read 4, write 1 before, read 1, write 4 after, and
4 to add in fp32. PowerSGD: read gradient and error, write their sum (12), read it for P and for Q (8), write the approximation
(4), read both and write the new error (12), write the result over the gradient (8). [Vogels et al. 2019, algorithms 1 and 2]"""


def data_bytes(parameters: Any, replicas: Any, width: float) -> Any:
    """Bytes that each of R sites sends in one all-reduce of gradients of ``width`` bytes: 2 (R-1)/R P, hierarchical or flat
    over R."""
    return 2.0 * (replicas - 1) / replicas * parameters * width


def extra_in_flight(latency: float, wire: float, tau: float) -> int:
    """Microbatches that the stages before a slow link keep in flight further to 1F1B's, so that it does not wait: the hand-over and
    its gradient's way back, ceil(2 (latency + bytes / bandwidth) / tau)."""
    return math.ceil(2.0 * (latency + wire) / tau - 1e-9)


def pipeline_pace(taus: Sequence[float], hops: Sequence[float], wires: Sequence[float], extra: int = 0) -> float:
    """Seconds between two microbatches of 1F1B in its steady state, where sends overlap with computation.

    max over j of tau_j, of the time that a hop's wire is busy, and of the round trip of a microbatch from stage j to the end
    and back over the p - j (+ extra, before the last slow hop) microbatches that stage j has in flight: (sum_{i>=j} tau_i + 2
    sum_{i>=j} d_i) / (p - j + k). ``hops``: seconds until a hand-over has arrived; ``wires``: seconds in which the link is
    busy with it, p - 1 of each.
    """
    stages, slow = len(taus), max((i for i, hop in enumerate(hops) if hop > 0), default=-1)
    loops = [
        (sum(taus[j:]) + 2.0 * sum(hops[j:])) / (stages - j + (extra if j <= slow else 0))
        for j in range(stages)
    ]  # fmt: skip
    return max(*taus, *wires, *loops) if wires else max(*taus, *loops)


def pipeline_seconds(
    taus: Sequence[float], hops: Sequence[float], wires: Sequence[float], microbatches: int, extra: int = 0
) -> float:
    """Seconds of a pipeline over slow hops: sum tau + 2 sum d + (m - 1) pace."""
    return sum(taus) + 2.0 * sum(hops) + (microbatches - 1) * pipeline_pace(taus, hops, wires, extra)


# ------------------------------------------------------------------------------------------------ local updates


def utilisation(every: Any, step: Any, average: Any) -> Any:
    """Share of time in which GPUs train with local updates: H t / (H t + t_AR). [DiLoCo, Douillard et al. 2023, algorithm 1]

    INTELLECT-1: 38 minutes of inner steps and 103, 382, 469 s of averaging give 95.7, 85.6 and 82.9 %. [arXiv 2412.01152]
    """
    return every * step / (every * step + average)


def streaming_utilisation(every: Any, step: Any, average: Any, fragments: int, overlap: int) -> Any:
    """The same where one of F fragments is averaged every H / F steps while ``overlap`` further steps are done.

    H t / (H t + F max(t_AR / F - overlap t, 0)): nothing is exposed where a fragment's bytes / (overlap t) are within the link.
    [Streaming DiLoCo, Douillard et al. 2025]
    """
    import numpy as np

    exposed = np.maximum(average / fragments - overlap * step, 0.0) * fragments
    return every * step / (every * step + exposed)


def outer_memory(parameters: float) -> float:
    """Bytes of DiLoCo's outer optimizer, over all GPUs of a site or in host memory: a copy of the parameters and the Nesterov
    momentum, 4 + 4 bytes each. [prime, torchft.local_sgd.DiLoCo: backup on the host]"""
    return 8.0 * parameters


CONVERGENCE = {
    "diloco": "DiLoCo reports the loss of synchronous training at H = 500 with 8 workers (arXiv 2311.08105), INTELLECT-1 "
    "trained 10B at "
    "H = 100 with 8 bits (2412.01152); a gap that shrinks with model size is reported too (2503.09799). It is another algorithm: "
    "its inner and outer learning rates are to be tuned, and planner does not predict the loss.",
    "streaming_diloco": "Streaming DiLoCo reports the loss of DiLoCo with fragments, overlap and 4 bits (arXiv "
    "2501.18512); as DiLoCo, "
    "it is another algorithm than synchronous training, and planner does not predict the loss.",
    "local_sgd": "Local SGD averages weights every H steps; with adaptive optimizers H above some tens is reported to cost "
    "accuracy "
    "(Lin et al. 2020, arXiv 1808.07217; Ortiz et al. 2021, 2110.08133), and planner does not predict the loss.",
}
"""What papers say of the loss, by method."""


# ------------------------------------------------------------------------------------------------ compression


@record
class Compression:
    """Gradients over the link, per step and site."""

    name: str
    wire: float
    """Bytes of one copy of what is reduced."""
    kernels: float
    """Bytes of GPU memory that the kernels read and write, of all gradients."""
    flop: float
    """FLOP of its matrix products."""


def matrices(model: ModelSpec) -> list[tuple[float, float, float]]:
    """(rows, columns, how many) of the weight matrices of a model, by kind; vectors are left out."""
    m, layers = model, float(model.num_layers)
    found = [
        (float(m.query_size), float(m.hidden_size), layers),
        (float(m.num_kv_heads * m.head_dim), float(m.hidden_size), 2.0 * layers),
        (float(m.hidden_size), float(m.attention_output_size), layers),
    ]
    plain = float(m.num_plain_layers)
    if plain:
        found.append((float(m.ffn_size), float(m.hidden_size), plain * m.num_mlp_matrices))
    if m.is_moe:
        found.append((float(m.expert_ffn_size), float(m.hidden_size), float(m.num_moe_layers * m.num_experts * m.num_mlp_matrices)))
    found.append((float(m.vocab_size), float(m.hidden_size), 1.0 if m.tied_embeddings else 2.0))
    return found


def compressed(model: ModelSpec, parameters: float, name: str) -> Compression:
    """Traffic and work of a compression of gradients in fp32. Raises PlannerError for an unknown one.

    PowerSGD with rank r sends r (n + m) numbers of 4 bytes for an n x m matrix, in two all-reduces, and takes 6 n m r FLOP (P
    = M Q, Q = M^T P, P Q^T); orthogonalisation of P, 2 n r^2, is left out. Its matrices are scaled to the model's parameter count.
    """
    method, _, rank = name.partition(":")
    if method not in COMPRESSIONS or (rank and method != POWER_SGD) or (rank and not rank.isdecimal()):
        raise PlannerError(f"no compression is called '{name}'; use none, fp16, int8 or powersgd:RANK")
    kernels = MOVED[method] * parameters
    if method != POWER_SGD:
        width = {NONE: 4.0, FP16: 2.0, INT8: 1.0}[method]
        return Compression(name=name, wire=width * parameters, kernels=kernels, flop=0.0)
    if rank and int(rank) < 1:
        raise PlannerError("the rank of PowerSGD is 0; it must be at least 1")
    r, shapes = float(rank or 4), matrices(model)
    scale = parameters / sum(n * m * count for n, m, count in shapes)
    wire = scale * sum(4.0 * min(r * (n + m), n * m) * count for n, m, count in shapes)
    flop = scale * sum(6.0 * n * m * r * count for n, m, count in shapes)
    return Compression(name=f"{POWER_SGD}:{int(r)}", wire=wire, kernels=kernels, flop=flop)


def kernel_seconds(one: Compression, gpus: float, memory_bandwidth: float, flops: float) -> float:
    """Seconds of the kernels of a compression, the gradients being spread over ``gpus`` GPUs: bytes over memory bandwidth, or FLOP
    over the peak rate where that is longer (roofline)."""
    return max(one.kernels / memory_bandwidth, one.flop / flops) / gpus


def layer_parameters(model: ModelSpec) -> tuple[float, float, float]:
    """Parameters of the mean layer, of what stands on the first stage alone, and on the last stage alone."""
    from planner.cost.parameters import total_parameters

    counts = count_parameters(model)
    first = counts.input_embedding + counts.position_embedding + counts.vision
    last = (counts.head or counts.input_embedding) + counts.final_norm
    outside = first + counts.head + counts.final_norm
    return (total_parameters(model) - outside) / model.num_layers, first, last

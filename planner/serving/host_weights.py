"""Seconds of a pass whose weights lie partly in host memory; what is not derived here is not measured anywhere in this package.

g of the weights of layers, or of routed experts, on the GPU, w bytes of a layer on one of n GPUs of a node, T rows of a stage:

streams    products (1 - g) T_gpu become max((1 - g) T_gpu, (1 - g) w / min(B_pcie, B_host / n)): kernels read over the link what
           they multiply, once a pass, of routed experts the touched share 1 - (1 - K / E)^T  [vLLM, cpu_offload_gb]
computes   routed experts of a layer take max(g T_gpu, T_cpu + 2 T h 2 / B_pcie): the CPU computes its part meanwhile, states
           go there and back; T_cpu = max(touched bytes / (u B_host), 2 T K (1 - g) parameters / F_cpu)  [KTransformers in SGLang]

u is the part of B_host that an optimizer step on the CPU reaches in the profile. Engines on a node share its CPU and its memory.
Uneven choice of experts is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cost.parameters import count_parameters
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_weights import PLAIN, layer_bytes
from planner.units import TERA

CPU_FLOPS = 2 * 21.3 * TERA
"""FLOP/s of experts on two sockets with AMX.  [KTransformers in SGLang, lmsys.org, 2025-10-22: 21.3 TFLOP/s on one Xeon]"""


def touched(served: Served, rows: Any) -> Floats:
    """Part of the routed experts of a layer that some rows reach, each of E with equal chance."""
    model = served.model
    return np.asarray(1.0 - (1.0 - model.top_k / model.num_experts) ** np.asarray(rows, dtype=np.float64))


def products_seconds(served: Served, layout: ServingLayout, products: Any) -> Floats:
    """All products of mixers and dense MLPs of a pass, ``products`` seconds where all weights are on the GPU."""
    left = 1.0 - np.asarray(layout.gpu_weights) / 100.0
    if served.engine.host_weights != "streams" or not np.any(left):
        return np.asarray(products)
    model, one = served.model, layer_bytes(served.model, served.precision, layout)
    whole = model.num_layers * one.mixer + model.num_plain_layers * one.dense
    return _streamed(served, layout, products, whole, left)


def experts_seconds(served: Served, layout: ServingLayout, experts: Any, rows: Any) -> Floats:
    """Routed and shared experts of one layer, ``experts`` seconds where all weights are on the GPU; ``rows`` of the stage."""
    left = 1.0 - np.asarray(layout.gpu_weights) / 100.0
    if served.engine.host_weights == "none" or not np.any(left):
        return np.asarray(experts)
    model, hardware, one = served.model, served.hardware, layer_bytes(served.model, served.precision, layout)
    reached = touched(served, rows)
    if served.engine.host_weights == "streams":
        return _streamed(served, layout, experts, one.routed * reached + one.shared, left)
    engines = np.maximum(np.minimum(layout.replicas, hardware.gpus_per_node // np.asarray(layout.engine_gpus)), 1)
    rate = hardware.host_memory_bandwidth * hardware.cpu_adam_bandwidth_fraction / engines
    bytes_read = one.routed * np.asarray(layout.ranks) * reached * left / rate
    parameters = count_parameters(model).expert * model.top_k
    arithmetic = 2.0 * np.asarray(rows) * left * parameters / (CPU_FLOPS / engines)
    states = 2.0 * PLAIN * np.asarray(rows) * model.routed_size / hardware.pcie_bandwidth
    together = np.maximum(np.asarray(experts) * (1.0 - left), np.maximum(bytes_read, arithmetic) + states)
    return np.where(left > 0.0, together, experts)


def _streamed(served: Served, layout: ServingLayout, seconds: Any, size: Any, left: Any) -> Floats:
    """Kernels of ``seconds`` that read ``left`` of ``size`` bytes over the link."""
    hardware = served.hardware
    sharing = np.minimum(np.asarray(layout.num_gpus), hardware.gpus_per_node)
    rate = np.minimum(hardware.pcie_bandwidth, hardware.host_memory_bandwidth / sharing)
    return np.asarray(seconds) * (1.0 - left) + np.maximum(np.asarray(seconds) * left, left * size / rate)

"""Linear layers of a frozen base and their low-rank adapters: what they compute, move and save.

A frozen linear layer Y = X W needs W alone for its input gradient, so X is saved only where an adapter reads it: for the
gradient of A in X A B. [torch, mm: an operand is saved for the gradient of the other, where that is asked for]
"""

import numpy as np

from planner.cost.layer.operators import Gemm, MemoryBound, Number, Operator, Shard
from planner.cost.state_dtypes import dequantised, frozen_element, in_fewer_bits
from planner.layout import Module
from planner.workload import LORA_TARGETS

ADAPTER_SCALE_BYTES = 4.0
"""Bytes moved each way per output of a low-rank adapter to scale it, by a kernel of its own: read and write."""


def adapted(shard: Shard, *names: str) -> bool:
    """One of these linear layers carries an adapter."""
    targets = LORA_TARGETS[shard.workload.lora_targets] or names
    kernels = shard.trainer.kernels
    found = [name for name in names if name in targets and (kernels.adapted_experts or not name.startswith("experts"))]
    return shard.workload.lora_rank > 0 and bool(found)


def own_input(shard: Shard) -> float:
    """Bytes per element that each adapter saves of its input, in a copy of its own; 0 where it shares the layer's.

    Dropout puts out a tensor and a mask. Adapters in fp32 on a base in half precision (peft: autocast_adapter_dtype) read a
    cast of the input, which autocast casts back, and each casts an input in fp32.  [peft, tuners/lora/layer.py: _cast_input_dtype]
    """
    trainer = shard.trainer
    if trainer.stored.dropout:
        return shard.element + 1.0
    master = trainer.stored.weight_bytes > shard.element or (trainer.kernels.fp32_norms and in_fewer_bits(shard.workload))
    casts = trainer.kernels.separate_projections and "own_adapters" not in trainer.kernels.unfused
    return shard.element if master and casts else 0.0


def read_again(shard: Shard, *names: str) -> float:
    """1 where the input of linear layers is saved for a weight gradient: of a trained layer, or of an adapter that shares it."""
    if not shard.workload.lora_rank:
        return 1.0
    return float(adapted(shard, *names) and not own_input(shard))


def pieces(shard: Shard, name: str) -> float:
    """Adapters of one linear layer: of query, key and value, and of gate and up, one each where those are layers of their own."""
    kernels = shard.trainer.kernels
    if not kernels.separate_projections or (name.startswith("experts") and not kernels.linear_experts):
        return 1.0
    if name == "qkv" and not shard.model.is_mla:
        return shard.trainer.kernels.query_adapters(shard.workload.lora_targets)
    return 2.0 if name.endswith("_up") and shard.model.gated and not name.startswith("mla") else 1.0


def adapters_of(
    shard: Shard, name: str, m: Number, n: Number, k: Number, groups: Number = 1.0
) -> list[Operator]:
    """Adapters X A B of one frozen linear layer, in the precision of activations.

    The output is scaled and added to the layer's, two reads and a write; backward so are the input gradients.
    """
    if not adapted(shard, name):
        return []
    model, count, e = shard.model, pieces(shard, name), shard.element
    rank = float(shard.workload.lora_rank)
    side = shard.trainer.kernels.query_adapters(shard.workload.lora_targets) if name == "qkv" and not model.is_mla else count
    if name == "qkv" and shard.workload.lora_targets == "qv" and not shard.model.is_mla:
        n = n * (model.query_size + model.value_size) / (model.query_size + model.key_size + model.value_size)
    rows = m * groups
    inputs = rows * k * own_input(shard) * count
    outputs, launches = rows * n, (count, 2.0 * count)
    common = {"groups": groups, "low_precision": False, "launches": launches}
    return [
        Gemm(name=f"{name}_lora_a", m=m, n=side * rank, k=k, kept=inputs, **common),  # type: ignore[arg-type]
        Gemm(name=f"{name}_lora_b", m=m, n=n, k=rank, kept=rows * side * rank * e, **common),  # type: ignore[arg-type]
        MemoryBound(name=f"{name}_lora_add", kind="elementwise", forward=outputs * (3 * e + ADAPTER_SCALE_BYTES),
                    backward=outputs * ADAPTER_SCALE_BYTES + 3 * e * rows * k * count, launches=(2.0 * count, 2.0 * count)),
    ]  # fmt: skip


def dequantise(shard: Shard, name: str, n: Number, k: Number, groups: Number, module: Module) -> list[Operator]:
    """A frozen weight in 4 or 8 bits is read and written in half precision before the product of each pass: n k (q + w) bytes.

    So are experts in fp32 beside such a base. Nothing of it is kept: the backward pass does it again.
    [bitsandbytes, autograd/_functions.py: MatMul4Bit; torchao, nf4tensor.py: LinearNF4]
    """
    kernels, lies = shard.trainer.kernels, frozen_element(shard.workload)
    if name.startswith("experts") and not kernels.quantised_experts:
        lies = 4.0 if kernels.fp32_experts else shard.element
    if not dequantised(shard.workload) or lies == shard.element:
        return []
    moved = np.ones_like(shard.tp) * n * k * groups * (lies + shard.element)
    return [MemoryBound(name=f"{name}_dequantise", kind="quantize", forward=moved, backward=moved, module=module)]


def brought_experts(shard: Shard) -> Number:
    """Experts of a layer that one tensor holds, brought to half precision together, both passes long; with adapters on tensors what
    these add to gate and up, in their own dtype.  [torch, parametrize: cached; peft, ParamWrapper: get_delta_weight]"""
    workload, trainer = shard.workload, shard.trainer
    kernels, matrices = trainer.kernels, workload.model.num_mlp_matrices
    alone = dequantised(workload) and (kernels.quantised_tensors or kernels.fp32_experts)
    added = (matrices - 1) * trainer.stored.weight_bytes * _adapts_tensors(shard)
    found: Number = _values_of_experts(shard) * (matrices * workload.element * alone + added)
    return found


def merged_experts(shard: Shard) -> list[Operator]:
    """Weights of experts and what their adapters add, W + B A, made for each product and saved for its backward pass.

    Per value: forward B A in the dtype of the adapters written and read again, the weight read and the sum written; backward the
    gradient of the sum written, and read for both matrices.  [peft, tuners/lora/layer.py: ParamWrapper, _LoraParameterProxy]
    """
    if not _adapts_tensors(shard):
        return []
    values, e, own = _values_of_experts(shard) * shard.model.num_mlp_matrices, shard.element, shard.trainer.stored.weight_bytes
    return [
        MemoryBound(name="experts_merged", kind="elementwise", module=Module.MOE, forward=values * (2.0 * own + 2.0 * e),
                    backward=values * 3.0 * e, saved=values * e, launches=(4.0, 6.0))
    ]  # fmt: skip


def _adapts_tensors(shard: Shard) -> bool:
    """Adapters are on the tensors that hold all experts."""
    workload = shard.workload
    return workload.lora_rank > 0 and workload.lora_targets == "all" and shard.trainer.kernels.adapters_on_tensors


def _values_of_experts(shard: Shard) -> Number:
    """Values of one matrix of all experts of a layer on a rank."""
    model = shard.model
    return model.num_experts * float(model.routed_size) * model.expert_ffn_size / (shard.ep * shard.etp)

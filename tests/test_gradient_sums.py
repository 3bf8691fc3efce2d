"""Sums of gradients that run as kernels of their own: by hand, and counted in the operations that torch really dispatches."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from fresh import fresh

from planner.cluster import Cluster
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import MemoryBound, Shard, loss_bytes
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.state_traffic import accumulation_seconds
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
TITAN = load_trainer("torchtitan")
EAGER = TITAN.replace(unfused=frozenset({"swiglu", "gradient_sum", "projections"}))
LENGTH = 1024


def work(precision: str = "bf16") -> Workload:
    return Workload(model=load_model("llama-3-8b"), global_batch_size=64, sequence_length=LENGTH, precision=precision)


def sums(trainer: Trainer, model: str = "llama-3-8b", **fields: int) -> dict[str, float]:
    """Bytes of the backward pass of each sum of input gradients and residual in a layer."""
    layout = Layout.stack([Layout(**fields)])
    workload = Workload(model=load_model(model), global_batch_size=64, sequence_length=LENGTH)
    shard = Shard(workload=workload, trainer=trainer, layout=layout, ep_stride=1.0)
    found = layers.layer(shard, moe=workload.model.is_moe)[0]
    kept = [one for one in found if isinstance(one, MemoryBound) and one.name.endswith(("_sum", "_residual"))]
    return {one.name: float(np.ravel(one.backward)[0]) for one in kept}


def test_by_hand() -> None:
    """h 4096, 1,024 tokens in bf16: 8 MiB a tensor. Query, key, value: two more; gate and up: one more."""
    tensor = LENGTH * 4096 * 2.0
    assert sums(EAGER) == {
        "attention_gradient_sum": 6 * tensor, "attention_residual": 3 * tensor,
        "mlp_gradient_sum": 3 * tensor, "mlp_residual": 3 * tensor,
    }  # fmt: skip
    compiled = sums(TITAN)
    assert compiled["attention_gradient_sum"] == pytest.approx(2 * TITAN.kernels.norm_passes * tensor)
    assert compiled["mlp_gradient_sum"] == pytest.approx(TITAN.kernels.norm_passes * tensor)
    # All ranks have all rows before the reduce-scatter; its copy in rank order reads them, once each.
    assert sums(TITAN, tp=8, sequence_parallel=1)["attention_gradient_sum"] == pytest.approx(2 * tensor)
    # Asynchronous: no GEMM puts out the sum, so none is pipelined with it, and the copy of a half becomes a whole one.
    asynchronous = TITAN.replace(overlap=TITAN.traffic.overlap | {"tp"})
    assert sums(asynchronous, tp=8, sequence_parallel=1)["mlp_gradient_sum"] == pytest.approx(2 * tensor)
    assert set(sums(load_trainer("megatron"))) == {"attention_residual", "mlp_residual"}
    assert set(sums(load_trainer("automodel"))) == {"attention_residual", "mlp_residual"}


def test_experts_add_gate_and_up_of_their_rows() -> None:
    found = sums(EAGER, "mixtral-8x7b")
    assert found["experts_gradient_sum"] == 3 * 2 * LENGTH * 4096 * 2.0  # top 2
    assert found["attention_gradient_sum"] == 6 * LENGTH * 4096 * 2.0


def adding(trainer: Trainer, precision: str = "bf16", **fields: int) -> float:
    """Bytes per parameter of the first stage and microbatch to add gradients, off the time that is priced for them."""
    workload = work(precision)
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=8)
    layout = Layout.stack([Layout(**fields)])
    parameters = stage_parameters(workload, layout, split_stages(workload.model, layout))
    seconds = accumulation_seconds(workload, cluster, trainer, layout, parameters)[0, 0]
    return float(seconds / cluster.hardware.memory_time(parameters.dense[0, 0], "elementwise"))


def test_unsharded_gradients_are_added_in_a_pipeline_only() -> None:
    assert adding(TITAN, pp=2, dp=4, zero=2, num_microbatches=4) == pytest.approx(10.0, rel=0.02)
    assert adding(TITAN, "fp32", pp=2, dp=4, zero=2, num_microbatches=4) == pytest.approx(12.0, rel=0.02)
    assert adding(TITAN, pp=1, dp=8, zero=3, num_microbatches=4) == 0.0
    assert adding(load_trainer("megatron"), pp=2, dp=4, zero=1, num_microbatches=4) == 0.0
    assert adding(load_trainer("nanotron"), pp=2, dp=4, zero=1, num_microbatches=4) == pytest.approx(10.0, rel=0.02)


def test_bytes_of_the_loss() -> None:
    """Half precision: 2 + 4 per pass; compiled 4. fp32: 8 in one kernel, plain ones without their cast."""

    def each(trainer: Trainer, precision: str) -> float:
        shard = Shard(workload=work(precision), trainer=trainer, layout=Layout.stack([Layout()]), ep_stride=1.0)
        return loss_bytes(shard)

    assert each(TITAN, "bf16") == pytest.approx(4.0, rel=1e-3) and each(TITAN, "fp32") == 8.0
    eager = TITAN.replace(passes={"loss": 4.0})
    assert each(eager, "bf16") == 24.0 and each(eager, "fp32") == 18.0


COUNT = """
import collections, json, sys
import torch
from tests.proofs import agreement
from planner.lab.run import meta
from planner.lab.run import memory_tracker as tracker
seen = collections.Counter()
original = tracker.MemoryTracker.__torch_dispatch__
def counting(self, func, types, args=(), kwargs=None):
    wrapped = any(issubclass(one, tracker.WRAPPERS) for one in types)
    if not self._blind and not wrapped and not tracker.ForwardPass.depth and args and isinstance(args[0], torch.Tensor):
        if str(func) in ("aten.add.Tensor", "aten.add_.Tensor") and isinstance(args[1], torch.Tensor):
            seen[f"{args[0].dtype} {args[1].dtype}".replace("torch.", "")] += args[0].numel()
        if str(func) == "aten._to_copy.default" and args[0].dtype == torch.bfloat16:
            seen["cast"] += args[0].numel()
    return original(self, func, types, args, kwargs)
tracker.MemoryTracker.__torch_dispatch__ = counting
row = agreement.parse(sys.argv[1])
found = meta.measure(row.asked.split, 0)
print("FOUND", json.dumps({**seen, "parameters": found.parameters, "m": found.microbatches}))
"""


@pytest.mark.proof
@needs_torch
def test_torch_adds_what_is_priced() -> None:
    """Two layers, one in each of two stages, 3 microbatches, fake tensors: every element that the backward pass adds, 2 reads and
    a write each, is what an uncompiled trainer is charged; each gradient is cast once and added m - 1 times to an fp32 sum."""
    lines = fresh(COUNT, f"llama-3-8b layers=2 pp=2 dp=4 m=3 s={LENGTH}").splitlines()
    found = json.loads(next(x for x in lines if x.startswith("FOUND")).removeprefix("FOUND "))
    m, whole = found["m"], found["parameters"]
    assert m == 3
    assert 3 * 2 * found["bfloat16 bfloat16"] == m * sum(sums(EAGER).values())
    assert found["cast"] == whole and found["float32 bfloat16"] == (m - 1) * whole
    moved = 6 * found["cast"] + 10 * found["float32 bfloat16"]
    assert m * 10 * whole - moved == 4 * whole  # the first is only cast; the reduction then reads 2 bytes more

"""What docs/cost-model.md claims about the model as a whole, held to the code."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost.estimate import PARTS, estimate
from planner.cost.price.layer_costs import INDEX, price_blocks
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.rules import Job, allowed
from planner.search import SAFE
from planner.space import OFFLOADS, Pins, base_layouts, recompute_options
from planner.trainer import load_trainer
from planner.workload import Workload


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_bytes_are_those_of_korthikanti(tp: int, split: bool) -> None:
    """s b h (10 + 24/t + 5 a s/(h t)), with sequence parallelism s b h/t (34 + 5 a s/h).  [arXiv 2205.05198]"""
    model = load_model("gpt3-175b")
    s, b, h, a = 2048, 2, model.hidden_size, model.num_heads
    workload = Workload(model=model, sequence_length=s, global_batch_size=16)
    cluster = Cluster(hardware=load_hardware("a100-sxm-80gb"), num_gpus=8)
    layout = Layout(tp=tp, dp=8 // tp, micro_batch_size=b, num_microbatches=tp, sequence_parallel=int(split and tp > 1))
    saved = price_blocks(workload, cluster, load_trainer("megatron-2021"), layout).dense[INDEX["saved"], 0]
    within = 34 / tp if split and tp > 1 else 10 + 24 / tp
    assert saved == pytest.approx(s * b * h * (within + 5 * a * s / (h * tp)), rel=1e-12)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "gpus", "trainer", "hardware"),
    [
        ("llama-3-8b", 64, "megatron", "h100-sxm"),
        ("mixtral-8x7b", 64, "megatron", "h100-sxm"),
        ("llama-3-8b", 64, "torchtitan", "h100-sxm"),
        ("llama-3-8b", 16, "deepspeed", "rtx-4090"),
        ("deepseek-v2-lite", 32, "nemo", "b200-sxm"),
        ("gpt3-13b", 64, "megatron-2021", "a100-sxm-80gb"),
    ],
)
def test_a_lever_never_makes_a_layout_faster(model: str, gpus: int, trainer: str, hardware: str) -> None:
    """What the search leaves out rests on this; nor does offloading raise the peak of the device."""
    job = Job(
        workload=Workload(model=load_model(model), sequence_length=2048, global_batch_size=256),
        cluster=Cluster(hardware=load_hardware(hardware), num_gpus=gpus),
        trainer=load_trainer(trainer),
    )
    base = base_layouts(job, Pins())
    base = base.take(allowed(job, base))
    base = base.take(np.random.default_rng(0).permutation(len(base))[:1500])
    plain = estimate(job.workload, job.cluster, job.trainer, base)
    changed = [lever.apply(base, job.model) for lever in recompute_options(job, Pins())]
    offloaded = [base.replace(offload_optimizer=share) for share in OFFLOADS if job.trainer.legal.offload_optimizer]
    assert changed
    for layouts in (*changed, *offloaded):
        found = estimate(job.workload, job.cluster, job.trainer, layouts)
        assert np.all(found.step_time >= plain.step_time * (1 - 1e-12))
        assert np.allclose(found.step_time, sum(found.time[part] for part in PARTS))
        if any(layouts is one for one in offloaded):
            assert np.all(found.memory_peak <= plain.memory_peak * (1 + 1e-12))


def test_a_layout_fits_up_to_nine_tenths_of_the_memory() -> None:
    """P <= SAFE with sigma 0.06 is a peak of exp(-0.06 ln(1/SAFE - 1) / 1.702) = 0.90 of what is usable."""
    error = load_trainer("megatron").stored.memory_error
    assert np.exp(-error * np.log(1 / SAFE - 1) / 1.702) == pytest.approx(0.9, abs=0.005)

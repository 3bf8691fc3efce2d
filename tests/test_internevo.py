"""InternEvo: gradients that are all-reduced whole at ZeRO 1 while the last backward pass goes on."""

import pytest

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload


def _data_seconds(trainer: Trainer) -> tuple[float, float]:
    """Exposed and hidden seconds of data-parallel traffic of 8B on two nodes at ZeRO 1."""
    work = Workload(model=load_model("llama-3.1-8b"), sequence_length=2048, global_batch_size=128)
    layout = Layout.stack([Layout(dp=16, zero=1, micro_batch_size=2, num_microbatches=4)])
    found = estimate(work, Cluster(hardware=load_hardware("a100-sxm-80gb"), num_gpus=16), trainer, layout)
    return float(found.time["data_communication"][0]), float(found.hidden["data"][0])


def test_whole_gradients_are_reduced_behind_the_backward_pass() -> None:
    """An all-reduce moves twice what a reduce-scatter does; without the word for it nothing of it is hidden."""
    own = load_trainer("internevo")
    late = own.with_facts({"-overlap": ["whole_gradients"]})
    scattered = own.with_facts({"zero1_all_reduces": False})
    (exposed, hidden), (late_exposed, late_hidden) = _data_seconds(own), _data_seconds(late)
    assert hidden > 0.0 == late_hidden and late_exposed > exposed
    assert exposed + hidden == pytest.approx(late_exposed)  # the same traffic
    assert exposed + hidden > sum(_data_seconds(scattered))

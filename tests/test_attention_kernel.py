"""Which attention kernel a validation runs: the one that is priced where torch has it, and it is said which one ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.defaults import Request, resolve
from planner.lab.profile import definitions
from planner.lab.profile.definitions import Heads
from planner.lab.profile.points import Measured
from planner.layout import Layout
from planner.trainer import load_trainer

torch = pytest.importorskip("torch")

from planner.lab.reference import attention_kernel as kernels  # noqa: E402
from planner.lab.reference.split import split_of  # noqa: E402
from planner.lab.run.comparison import attention_said  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "RAN", {})


def test_the_priced_kernel_runs_and_is_noted() -> None:
    """On this processor torch chooses its flash kernel; the mathematics where that is priced."""
    q, k = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    whole = k.repeat_interleave(2, 1)
    wanted = (torch.ones(16, 16).tril().log() + q @ whole.mT * 8**-0.5).softmax(-1) @ whole
    from torch.nn.attention import SDPBackend

    kernels.PRICED["math"] = [SDPBackend.MATH]
    try:
        for name, ran in (("best", "flash"), ("fa2", "flash"), ("math", "math")):
            kernels.RAN.clear()
            assert torch.allclose(kernels.attend_by(name, q, k, k), wanted, atol=1e-5)
            assert set(kernels.RAN.values()) == {ran}
    finally:
        del kernels.PRICED["math"]
    assert kernels.sdpa_choice(q, k, k, causal=False) == "flash", "the choice ends with the block"


def test_a_plan_brings_the_kernel_of_its_trainer() -> None:
    job = resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).job
    layout = Layout(dp=8, micro_batch_size=1, num_microbatches=1, zero=3)
    trainer = load_trainer("torchtitan")
    assert split_of(job.workload, trainer, layout).attention == trainer.kernels.attention_kernel
    assert split_of(job.workload, load_trainer("deepspeed"), layout).attention == "fa2"


def test_a_validation_says_which_kernel_ran() -> None:
    assert attention_said("fa2", []) == [], "a processor"
    assert attention_said("best", ["cudnn", "flash", "cudnn"]) == [
        "attention ran as torch's cudnn and flash kernel; it is priced as best"
    ]


def test_a_profile_keeps_which_kernel_a_point_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.lab.profile import compute_timing
    from planner.lab.profile.operator_runs import which_kernel

    point = definitions.attention("fp32", "forward", Heads(1, 2, 1, 8, 8, 16))
    monkeypatch.setattr(compute_timing, "_timed", lambda *_, **__: Measured.fact(point, 1.0))
    assert compute_timing.measure_compute(point, "cpu", 0.01).details["backend"] == "flash"
    assert which_kernel(replace(point, key=(*point.key, ("kernel", "cudnn"))), "cuda") == {"backend": "cudnn"}

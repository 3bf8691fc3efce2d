"""Every rule has a layout that breaks it alone, and a sentence with the numbers and the remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from broken_layouts import CASES, Broken, sample, zero_of
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import HARDWARE, MODELS, TRAINERS, job

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.layout import Layout, Schedule
from planner.rules import RULES, Job, allowed, check, check_workload, refusals
from planner.workload import Workload


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.layout}"[:60])
def test_sentence_of_a_broken_rule(case: Broken) -> None:
    one, layout = sample(case)
    layout = zero_of(one, layout)
    if case.rule == "heads":  # 4098 tokens divide by 3; a width that does would not be a power of two
        assert list(refusals(one, layout)) == ["heads", "MLP width"]
    else:
        assert list(refusals(one, layout)) == [case.rule]
    with pytest.raises(PlannerError) as error:
        check(one, layout)
    sentence = str(error.value)
    assert sentence.endswith(f"(rule '{case.rule}')")
    for part in case.says:
        assert part in sentence, sentence


def test_mlp_width() -> None:
    narrow = job("moe")
    layout = Layout(tp=8, etp=1, num_microbatches=32, sequence_parallel=1)
    odd = type(narrow.model)(**{**vars(narrow.model), "ffn_size": 4100})
    one = Job(workload=narrow.workload.replace(model=odd), cluster=narrow.cluster, trainer=narrow.trainer)
    assert list(refusals(one, layout)) == ["MLP width"]
    with pytest.raises(
        PlannerError, match=r"MLP width \(4100, experts 1024\) does not divide by tp 8 .*choose a smaller degree"
    ):
        check(one, layout)


def test_pipeline_length() -> None:
    """A pipeline of 65,536 stages is legal to a trainer, and would be walked for hours."""
    flat, layout = job(), Layout(pp=4, dp=2, num_microbatches=16, vpp=256, schedule=Schedule.INTERLEAVED)
    deep = Job(
        workload=flat.workload.replace(model=replace(flat.model, num_layers=1024)), cluster=flat.cluster, trainer=flat.trainer
    )
    assert list(refusals(deep, layout)) == ["pipeline length"]
    with pytest.raises(PlannerError, match="pp 4 x vpp 256 = 1024 stages; pipelines of up to 512 are priced"):
        check(deep, layout)
    check(deep, layout.replace(vpp=128))


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in RULES} == {case.rule for case in CASES} | {"MLP width", "pipeline length"}
    good = Layout(dp=8, num_microbatches=4)
    check(job(), good)
    assert refusals(job(), good) == {}


columns = {
    "tp": [1, 2, 3, 4, 8],
    "pp": [1, 2, 3, 4, 8],
    "dp": [1, 2, 4, 8],
    "cp": [1, 2, 4],
    "ep": [1, 2, 4],
    "etp": [1, 2],
    "vpp": [1, 2, 4],
    "dp_shard": [0, 2, 3],
    "micro_batch_size": [1, 2],
    "num_microbatches": [4, 8, 16, 32],
    "sequence_parallel": [0, 1],
    "cp_method": [0, 1, 2],
    "zero": [0, 1, 2, 3],
    "schedule": [0, 1, 2, 3, 4, 5],
    "recompute": [0, 1, 2],
    "recompute_layers": [0, 2, 9],
    "recompute_modules": [0, 1, 6, 16, 32, 64],
    "offload_optimizer": [0, 50],
    "offload_activations": [0, 1],
    "offload_layers": [0, 1],
    "offload_parameters": [0, 1],
    "first_stage_layers": [0, 1, 3],
    "last_stage_layers": [0, 1, 2],
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(TRAINERS)), st.integers(0, 2**32 - 1))
def test_mask_of_many_is_the_check_of_each(model: str, trainer: str, seed: int) -> None:
    """Most rows keep the defaults in most fields, so that some are legal."""
    rng = np.random.default_rng(seed)
    rows, gpus = 40, 8
    values = {
        name: np.where(rng.random(rows) < 0.15, rng.choice(some, rows), some[0]) for name, some in columns.items()
    }
    values |= {"schedule": np.where(rng.random(rows) < 0.7, 1, values["schedule"])}
    room = gpus // np.maximum(values["tp"] * values["pp"] * values["cp"], 1)
    values["dp"] = np.where(rng.random(rows) < 0.9, np.maximum(room, 1), values["dp"])
    left = 32 // (values["dp"] * values["micro_batch_size"])
    values["num_microbatches"] = np.where(rng.random(rows) < 0.9, np.maximum(left, 1), values["num_microbatches"])
    values["zero"] = np.where(rng.random(rows) < 0.8, max(TRAINERS[trainer].legal.zero), values["zero"])
    values["sequence_parallel"] = np.where(
        rng.random(rows) < 0.8, values["tp"] > 1, values["sequence_parallel"]
    ).astype(np.int64)
    one, many = job(model, trainer), Layout(**values)
    mask = allowed(one, many)
    for row in range(rows):
        try:
            check(one, many.row(row))
            good = True
        except PlannerError:
            good = False
        assert mask[row] == good, many.row(row)
    assert sum(refusals(one, many).values()) >= rows - mask.sum()


def test_jobs_that_no_layout_can_run() -> None:
    def refused(sentence: str, trainer: str = "megatron", hardware: str = "h100-sxm", **changes: str) -> None:
        one = Workload(model=MODELS["gqa"], sequence_length=4096, global_batch_size=8, **changes)
        with pytest.raises(PlannerError, match=sentence):
            check_workload(one, Cluster(hardware=HARDWARE[hardware], num_gpus=8), TRAINERS[trainer])

    refused("trainer nanotron does not train in fp8; it knows bf16, bf16_true, fp16, fp32", "nanotron", precision="fp8")
    refused("trainer fsdp has no optimizer muon; it knows adam, adam_8bit, paged_adam, ", "fsdp", optimizer="muon")
    refused("a100-sxm-80gb has no fp8 tensor cores; choose one of", hardware="a100-sxm-80gb", precision="mxfp8")
    refused("h100-sxm has no fp4 tensor cores", precision="nvfp4")
    refused("adam_bf16 in fp16: trainer megatron's .* use --precision bf16", precision="fp16", optimizer="adam_bf16")
    for trainer in TRAINERS.values():  # whatever a trainer lists, its own checks and its byte counts know
        for precision in trainer.legal.precisions:
            lean = {"adam_bf16", "adam_8bit"} if precision == "fp16" and trainer.kernels.transformer_engine else set()
            for optimizer in set(trainer.optimizers) - lean:
                assert trainer.stored.optimizer_bytes[optimizer] > 0
                work = Workload(
                    model=MODELS["gqa"],
                    sequence_length=4096,
                    global_batch_size=8,
                    precision=precision,
                    optimizer=optimizer,
                )
                check_workload(work, Cluster(hardware=HARDWARE["b200-sxm"], num_gpus=8), trainer)

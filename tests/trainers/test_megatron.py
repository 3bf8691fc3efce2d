"""Megatron-LM's own parser, validator, groups and model code on every exported plan. Needs megatron-core on the path."""

from __future__ import annotations

import importlib.util

import pytest

from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.export import load_target
from planner.export.check import Checked
from planner.export.check.megatron import check_many
from planner.export.megatron import arguments
from planner.export.target import ExportJob
from planner.layout import Layout
from planner.plan import Plan
from planner.rules import check
from tests.trainers.plans import EVEN, jobs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="NOT CHECKED: megatron-core is not on the path"
)

BUILT, LARGEST = 12, 64
"""At least this many models are built on the meta device, of at most this many layers: one of each kind."""


def words(job: ExportJob) -> list[str]:
    """The argument list as the trainer gets it."""
    return [word for group in arguments(job) for flag in group.words for word in flag]


def mine() -> list[ExportJob]:
    """Every plan of the set that Megatron-LM runs."""
    return [job for job in jobs() if job.plan.trainer in load_target("megatron").trainers]


def said(results: list[Checked], cases: list[ExportJob]) -> list[str]:
    """What was refused, with the plan."""
    return [
        f"{job.model.name} {job.cluster.num_gpus} {job.workload.precision} {job.layout.to_dict()}: {one.text()}"
        for one, job in zip(results, cases, strict=True)
        if one.problem or not one.level
    ]


def test_every_plan_is_accepted_and_its_groups_and_stages_are_the_planners() -> None:
    """parse_args, validate_args, the microbatch calculator, initialize_model_parallel, layers of every virtual stage."""
    cases = mine()
    assert len(cases) >= 200
    results = check_many([(job, words(job)) for job in cases], level="groups built")
    assert not said(results, cases)
    assert {one.level for one in results} == {"groups built"}


def test_parameters_of_megatrons_own_model_are_the_planners() -> None:
    """GPTModel on the meta device: parameters of the first, second, middle and last stage, exactly."""
    kinds: dict[tuple[object, ...], ExportJob] = {}
    for job in sorted(mine(), key=lambda job: job.model.num_layers):
        model, layout = job.model, job.layout
        kind = (
            model.is_moe,
            model.is_mla,
            model.mtp_layers,
            model.tied_embeddings,
            model.linear_bias,
            model.qkv_bias,
            model.qk_norm,
        )
        kinds.setdefault((*kind, layout.tp > 1, layout.pp > 1 and layout.vpp > 1), job)
    cases = [job for job in kinds.values() if job.model.num_layers <= LARGEST and job.model.name != "deepseek-v2-lite"]
    results = check_many([(job, words(job)) for job in cases], level="model built")
    assert not said(results, cases)
    assert len(cases) >= BUILT and {one.level for one in results} == {"model built"}
    assert all("parameters as planned" in one.details for one in results)


REFUSED: list[tuple[str, int, dict[str, int], str, str]] = [
    ("llama-3.1-8b", 8, {"tp": 3, "dp": 2, "sequence_parallel": 1}, "= 6 GPUs, but the job has 8", "not divisible"),
    (
        "llama-3.1-8b",
        24,
        {"tp": 3, "sequence_parallel": 1},
        "32 attention heads",
        "num_attention_heads (32) must be a multiple",
    ),
    (
        "qwen2.5-0.5b",
        7,
        {"tp": 7, "dp": 1, "sequence_parallel": 1},
        "2 key-value heads",
        "num_query_groups (2) must be a multiple",
    ),
    (
        "mixtral-8x7b",
        24,
        {"dp": 24, "ep": 3},
        "ep 3 does not divide the 8 experts",
        "Number of experts should be a multiple",
    ),
    (
        "llama-3.1-8b",
        24,
        {"cp": 3, "sequence": 8192},
        "does not divide by 2 x cp 3",
        "multiple of 2 * context-parallel-size",
    ),
    ("llama-3.1-8b", 8, {"micro_batch_size": 3}, "must be a multiple of 24", "must be divisible by"),
    (
        "mixtral-8x7b",
        8,
        {"tp": 2, "dp": 4, "ep": 8, "etp": 2, "sequence_parallel": 1},
        "must divide tp x cp x dp",
        "divisible",
    ),
    (
        "gpt-oss-20b",
        8,
        {"tp": 2, "dp": 4, "etp": 2, "sequence_parallel": 1},
        "experts have biases",
        "only supported when ETP==1",
    ),
    (
        "llama-3.1-8b",
        8,
        {"pp": 2, "cp": 2, "dp": 2, "order": 1},
        "cp 2 must be 1 without experts",
        "pp-last rank ordering",
    ),
    (
        "llama-3.1-8b",
        8,
        {"recompute": 1, "recompute_modules": 4},
        "Transformer Engine's linear layers",
        "moe_act in recompute_modules",
    ),
    (
        "llama-3.1-8b",
        8,
        {"recompute": 1, "recompute_modules": 32},
        "mla_up_projection needs MLA",
        "mla_up_proj in recompute_modules",
    ),
    ("gpt3-1.3b", 8, {"sequence": 4096}, "learned 2048 positions", "max_position_embeddings (2048)"),
]
"""Model, GPUs, layout; what the planner says, what Megatron says."""


def test_what_the_planner_refuses_megatron_refuses() -> None:
    """The same layouts, each with its own sentence, about the same thing."""
    cases = []
    for model, gpus, fields, planner_says, _ in REFUSED:
        batch = 24 * 32 if gpus % 3 == 0 else 7 * 32 if gpus == 7 else 256
        request = Request(model=model, num_gpus=gpus, hardware="h100-sxm", trainer="megatron", global_batch_size=batch,
                          sequence_length=fields.get("sequence"))  # fmt: skip
        resolved = resolve(request)
        base = {**EVEN, "dp": gpus // fields.get("tp", 1) // fields.get("cp", 1)}
        layout = Layout(**{**base, **{name: value for name, value in fields.items() if name != "sequence"}})
        each = int(layout.dp) * int(layout.micro_batch_size)
        layout = layout.replace(num_microbatches=max(batch // each, 1))
        job = ExportJob.of(
            Plan(workload=resolved.job.workload, hardware="h100-sxm", num_gpus=gpus, trainer="megatron", layout=layout,
                 prediction=jobs()[0].plan.prediction)
        )  # fmt: skip
        sentences = load_target("megatron").refusals(job)
        try:
            check(job.rules_job, layout)
        except PlannerError as error:
            sentences.append(str(error))
        assert any(planner_says in one for one in sentences), (model, fields, sentences)
        cases.append((job, words(job)))
    for case, result in zip(REFUSED, check_many(cases, level="groups built"), strict=True):
        assert result.problem and case[-1] in result.problem, (case, result.text())

"""Megatron-LM's own parser, validator, groups and model code on every exported plan. Needs megatron-core on the path."""

from __future__ import annotations

import importlib.util

import pytest

from planner.export import load_target
from planner.export.check import Checked
from planner.export.check.megatron import check_many
from planner.export.megatron import arguments
from planner.export.target import ExportJob
from tests.trainers.plans import jobs

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

"""Megatron-LM's own parser, validator, groups and model code on every exported plan. Needs megatron-core on the path."""

from __future__ import annotations

import importlib.util

import pytest

from planner.export import load_target
from planner.export.check import Checked
from planner.export.check.megatron import check_many
from planner.export.megatron import arguments
from planner.export.target import ExportJob
from tests.trainers.plans import EVEN, Wanted, changed, found, jobs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="NOT CHECKED: megatron-core is not on the path"
)

BUILT = 12
"""Plans whose model is built on the meta device, beside all mixtures of experts' kinds."""


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
    for job in mine():
        model, layout = job.model, job.layout
        kinds.setdefault((model.name, layout.tp > 1, layout.pp > 1, layout.vpp > 1, layout.ep > 1), job)
    cases = [job for job in kinds.values() if job.model.num_layers * job.layout.num_gpus < 10**5]
    cases = sorted(cases, key=lambda job: (job.model.num_experts, job.model.name))[:: max(1, len(kinds) // 40)]
    results = check_many([(job, words(job)) for job in cases], level="model built")
    assert not said(results, cases)
    assert len(cases) >= BUILT and {one.level for one in results} == {"model built"}
    assert all("parameters as planned" in one.details for one in results)


SMALL = Wanted(model="llama-3.1-8b", gpus=8, top=8)
REFUSED: list[tuple[dict[str, int], str]] = [
    ({"tp": 3, "dp": 1, "pp": 1}, "world size"),
    ({"tp": 5, "dp": 1}, "world size"),
    ({"pp": 3, "dp": 1}, "world size"),
    ({"micro_batch_size": 3}, "divisible"),
    (
        {"zero": 0, "offload_optimizer": 0, "recompute": 2, "recompute_layers": 0, "pp": 1, "cp": 8, "dp": 1, "tp": 2},
        "world",
    ),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_megatron_refuses(fields: dict[str, int], says: str) -> None:
    """Layouts that the planner's rules refuse too: the trainer's sentence names the same thing."""
    from planner.errors import PlannerError
    from planner.rules import check

    job = ExportJob.of(changed(found(SMALL)[0], **(EVEN | fields)))
    with pytest.raises(PlannerError):
        check(job.rules_job, job.layout)
    [result] = check_many([(job, words(job))], level="validated")
    assert result.problem and says in result.problem

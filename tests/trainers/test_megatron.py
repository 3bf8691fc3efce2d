"""Megatron-LM's own parser, validator, groups and model code on every exported plan. Needs megatron-core on the path."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path

import pytest

from planner.explicit import complete
from planner.trainers.bundle.target import ExportJob, in_range
from planner.trainers.checking import Checked
from planner.trainers.checking.child import check_many
from planner.trainers.megatron.readback import parse
from planner.trainers.targets import load_target
from planner.workload import Workload
from tests.trainers.plans import jobs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="NOT CHECKED: megatron-core is not on the path"
)

BUILT, LARGEST = 12, 64
"""At least this many models are built on the meta device, of at most this many layers: one of each kind."""


def check(cases: list[ExportJob], folder: Path, **options: bool) -> list[Checked]:
    """Megatron-LM's own code on the plans as they are exported."""
    for number, job in enumerate(cases):
        (folder / str(number)).mkdir()
        (folder / str(number) / "arguments.sh").write_text(load_target("megatron").render(job).files["arguments.sh"])
    return check_many("megatron", [(job, folder / str(number)) for number, job in enumerate(cases)], **options)


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


def test_every_plan_is_accepted_and_its_groups_and_stages_are_the_planners(tmp_path: Path) -> None:
    """parse_args, validate_args, the microbatch calculator, initialize_model_parallel, layers of every virtual stage."""
    cases = mine()
    assert len(cases) >= 200
    results = check(cases, tmp_path)
    assert not said(results, cases)
    assert {one.level for one in results} == {"groups built"}


def test_another_sharding_of_megatron_fsdp_is_refused(tmp_path: Path) -> None:
    """The wrapper's own configuration, not the words."""
    job = next(job for job in mine() if job.plan.trainer == "megatron-fsdp")
    text, wrong = load_target("megatron").render(job).files["arguments.sh"], "--data-parallel-sharding-strategy optim\n"
    (tmp_path / "arguments.sh").write_text(re.sub(r"--data-parallel-sharding-strategy \w+\n", wrong, text))
    assert "sharding: the trainer says optim" in check_many("megatron", [(job, tmp_path)])[0].problem


def test_parameters_of_megatrons_own_model_are_the_planners(tmp_path: Path) -> None:
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
    results = check(cases, tmp_path, deep=True)
    assert not said(results, cases)
    assert len(cases) >= BUILT and {one.level for one in results} == {"model built"}
    assert all("parameters as planned" in one.details for one in results)


def test_the_head_of_a_training_log_is_the_plan(tmp_path: Path) -> None:
    """Megatron's own _print_args after its validation, read back: job and layout, on every sixth plan."""
    cases = mine()[::6]
    assert len(cases) >= 30
    for job, answer in zip(cases, check(cases, tmp_path, dump=True), strict=True):
        assert answer.level == "validated" and not answer.problem, answer.text()
        dump = answer.details[-1]
        log = "\n".join(f" 0: {line}" for line in dump.splitlines()) if job.layout.tp > 1 else dump  # srun --label
        reading = parse(log, "train.log")
        assert not reading.unread, reading.unread
        work = Workload(
            model=reading.model, sequence_length=reading.sequence_length, precision=reading.precision,
            global_batch_size=reading.global_batch_size, optimizer=reading.optimizer,
        )  # fmt: skip
        routed = job.workload.replace(expert_imbalance=work.expert_imbalance)  # a job does not say how its router routes
        assert (work, reading.num_gpus) == (routed, job.cluster.num_gpus)
        layout = complete(job.rules_job, dict(reading.fields))[0]
        again = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
        same = {"first_stage_layers": 0, "last_stage_layers": 0}  # one split may be said in two ways
        assert again.virtual_stages() == job.virtual_stages()
        assert layout.replace(**same).to_dict() == job.layout.replace(**same).to_dict()


def test_the_older_version_of_the_range_takes_the_same_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every sixth plan as far as its groups and stages, with the first minor version that the export declares."""
    older = os.environ.get("PLANNER_OLDER_MEGATRON", "")
    if not Path(older).joinpath("megatron").is_dir():
        pytest.skip("NOT CHECKED: no older megatron-core in PLANNER_OLDER_MEGATRON")
    monkeypatch.setenv("PYTHONPATH", f"{older}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    target, version = load_target("megatron"), Path(older).name.rpartition("-")[2]
    assert in_range(version, target.versions) and not in_range(f"{version.split('.')[0]}.17.9", target.versions)
    cases = [job for job in mine()[3::6] if not job.model.scaled_rope]  # YaRN without MLA came with 0.19, as the export says
    results = check(cases, tmp_path)
    assert not said(results, cases)
    assert len(cases) >= 30 and {one.level for one in results} == {"groups built"}

"""Every plan of the search is written for its trainers; the folder is whole; what cannot be said is a sentence."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from trainers.plans import EVEN, Wanted, changed, found, jobs

from planner.errors import PlannerError
from planner.explicit import complete
from planner.layout import Module, Recompute
from planner.model import load_model
from planner.plan_file import Plan
from planner.trainer_options import spell
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.target import GROUPS, ExportJob, group_of, in_range
from planner.trainers.megatron.core_settings import moe_layer_pattern, pipeline_layout, vocab_rows
from planner.trainers.megatron.readback import parse as read_megatron
from planner.trainers.targets import TARGETS, load_target
from planner.workload import Workload

SMALL = Wanted(model="llama-3.1-8b", gpus=8, top=8)


def plan_of(**fields: int) -> Plan:
    """A small plan with fields changed."""
    return changed(found(SMALL)[0], **(EVEN | fields))


# ------------------------------------------------------------------------------------------------ every plan exports


@pytest.mark.proof
def test_the_set_is_large() -> None:
    plans = [one.plan for one in jobs()]
    assert len(plans) >= 200
    assert {plan.trainer for plan in plans} >= {"megatron", "nemo", "torchtitan", "deepspeed", "fsdp", "nanotron"}
    assert {plan.num_gpus for plan in plans} >= {8, 64, 1024, 4096}


@pytest.mark.parametrize("name", TARGETS)
def test_every_plan_of_the_search_exports(name: str, searched: tuple[ExportJob, ...]) -> None:
    """The search proposes only what the trainer can run: no plan is refused, and each becomes files."""
    target, written = load_target(name), 0
    every = searched
    if target.package in ("vllm", "sglang"):  # serving asks for the model and the machines, not for the layout
        every = tuple({(one.model.name, one.plan.hardware, one.plan.num_gpus): one for one in every}.values())
    for job in every:
        plan = job.plan
        if plan.trainer not in target.trainers:
            continue
        refused = target.refusals(job)
        if refused and name in PARTIAL:
            assert all(one.count(" ") > 3 for one in refused)
            continue
        if refused and {plan.workload.model.name, plan.workload.optimizer} & set(UNKNOWN.get(name, ())):
            continue
        assert not refused, f"{plan.workload.model.name} on {plan.num_gpus} for {name}: {refused}"
        files = make_bundle(target, job, "torchrun").files
        assert {"plan.yaml", "README.md"} <= set(files)
        assert yaml.safe_load(files["plan.yaml"]) == plan.to_dict()
        written += 1
    assert written


PARTIAL = ("pytorch", "llama-factory", "axolotl", "verl", "automodel", "torchtune", "lightning", "olmo-core", "primus")
"""Targets that say a part of what the trainer below them can do; they refuse the rest with a sentence."""
UNKNOWN: dict[str, tuple[str, ...]] = {"torchtitan": ("deepseek-v3",), "megatron-bridge": ("muon",)}
"""Models and optimizers of the set that a target does not have at all, whatever the layout."""


# ------------------------------------------------------------------------------------------------ what Megatron is told


def job_of(**wanted: object) -> ExportJob:
    """The best plan of a search as a job."""
    return ExportJob.of(found(Wanted(**wanted))[0])  # type: ignore[arg-type]


def test_layers_per_stage_are_all_layers(searched: tuple[ExportJob, ...]) -> None:
    for job in searched:
        plan, stages = job.plan, job.virtual_stages()
        assert [layer for _, _, layers in stages for layer in layers] == list(range(plan.workload.model.num_layers))
        if plan.trainer == "megatron":
            assert pipeline_layout(job).startswith("E") and pipeline_layout(job).endswith("L")


def test_pipeline_layout_is_short_and_exact() -> None:
    plan = plan_of(pp=4, dp=2, first_stage_layers=7, last_stage_layers=5, num_microbatches=64)
    assert pipeline_layout(ExportJob.of(plan)) == "Et*7|(t*10|)*2t*5L"
    plan = plan_of(pp=2, dp=4, vpp=4, schedule=2)
    assert pipeline_layout(ExportJob.of(plan)) == "Et*4|(t*4|)*6t*4L"


def test_moe_layers_as_megatron_takes_them() -> None:
    assert moe_layer_pattern(load_model("mixtral-8x7b")) == "1"
    assert moe_layer_pattern(load_model("deepseek-v3")) == "([0]*3+[1]*58)"
    assert moe_layer_pattern(load_model("llama-4-maverick")) == "([0,1]*24)"


def test_groups_tile_the_ranks(searched: tuple[ExportJob, ...]) -> None:
    for plan in [job.plan for job in searched[:60]]:
        for name in GROUPS:
            if plan.num_gpus > 1024 or (name in ("etp", "ep", "edp") and not plan.workload.model.is_moe):
                continue
            every = {tuple(group_of(plan.layout, name, rank)) for rank in range(plan.num_gpus)}
            assert sorted(rank for one in every for rank in one) == list(range(plan.num_gpus))


def test_parameters_of_all_stages_are_the_model(searched: tuple[ExportJob, ...]) -> None:
    """One tensor-parallel rank: stages sum to the model, with the copies that pipelines need."""
    for job in searched:
        plan = job.plan
        model, layout = plan.workload.model, plan.layout
        if layout.tp != 1 or layout.ep * layout.etp != 1 or model.mtp_layers:
            continue
        from planner.cost.parameters import count_parameters, total_parameters

        copy = count_parameters(model).input_embedding * (model.tied_embeddings and layout.pp > 1)
        assert sum(job.parameters()) == pytest.approx(total_parameters(model) + copy, rel=1e-12)


def test_vocabulary_is_padded_only_where_it_must_be() -> None:
    assert vocab_rows(ExportJob.of(plan_of(tp=8))) == 128256
    gpt = found(Wanted(model="gpt3-1.3b", gpus=64, hardware="a100-sxm-40gb"))[0]
    assert vocab_rows(ExportJob.of(changed(gpt, tp=4))) % 512 == 0


# ------------------------------------------------------------------------------------------------ the folder


def test_bundle_is_written_whole(tmp_path: Path) -> None:
    job = ExportJob.of(found(SMALL)[0])
    bundle = make_bundle(load_target("megatron"), job, "torchrun")
    folder = tmp_path / "deep" / "run"
    write_bundle(bundle, folder)
    assert {path.name for path in folder.iterdir()} == set(bundle.files)
    for name, text in bundle.files.items():
        assert bool((folder / name).stat().st_mode & 0o100) == text.startswith("#!")
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    with pytest.raises(PlannerError, match="is not empty; choose another folder, or replace it with --force"):
        write_bundle(bundle, folder)
    (folder / "stale").write_text("old")
    write_bundle(bundle, folder, force=True)
    assert {path.name for path in folder.iterdir()} == set(bundle.files)
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # nothing left beside it


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    job = ExportJob.of(found(SMALL)[0])
    bundle = make_bundle(load_target("megatron"), job, "torchrun")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match="is a file"):
        write_bundle(bundle, tmp_path / "file")
    with pytest.raises(PlannerError, match="cannot be written"):
        write_bundle(bundle, tmp_path / "file" / "inside")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_readme_has_the_numbers_of_the_plan() -> None:
    plan = found(SMALL)[0]
    text = make_bundle(load_target("megatron"), ExportJob.of(plan), "torchrun").files["README.md"]
    assert f"{plan.prediction.memory_peak_gib:.1f} of {plan.prediction.memory_limit_gib:.1f} GiB" in text
    assert "Parameters per GPU" in text and "chance of running out of memory" in text


@pytest.mark.parametrize(
    ("version", "inside"),
    [("0.18.2", True), ("0.19", True), ("0.19.2rc1", True), ("0.17.9", False), ("0.20.0", False), ("1.0", False)],
)
def test_versions(version: str, inside: bool) -> None:
    assert in_range(version, ">=0.18,<0.20") == inside


# ------------------------------------------------------------------------------------------------ refusals


REFUSED = [
    ({"zero": 3}, "shards optimizer states only"),
    ({"zero": 2}, "shards optimizer states only"),
    ({"order": 2}, "experts outermost"),
    ({"dp_shard": 2}, "states are sharded over all 8"),
    ({"schedule": 3, "pp": 2, "dp": 4}, "runs 1f1b and interleaved_1f1b"),
    ({"schedule": 4, "pp": 2, "dp": 4, "vpp": 2}, "runs 1f1b and interleaved_1f1b"),
    ({"offload_activations": 1, "recompute": int(Recompute.FULL)}, "excludes pipelines and recompute"),
    ({"recompute": 1, "recompute_modules": int(Module.NORM)}, "repeats nothing"),
    ({"recompute": 1, "recompute_modules": int(Module.MLP_ACTIVATION)}, "grouped experts only"),
    ({"recompute": 1, "recompute_modules": int(Module.EVERY_SECOND_MATMUL)}, "knows core_attn"),
    ({"recompute": int(Recompute.FULL), "recompute_layers": 40}, "exceeds the 32 layers"),
    ({"zero": 0, "offload_optimizer": 50}, "part of the distributed optimizer"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_megatron_refuses(fields: dict[str, int], says: str) -> None:
    assert any(says in one for one in load_target("megatron").refusals(ExportJob.of(plan_of(**fields))))


def test_bridge_makes_the_table_of_positions_as_long_as_the_sequences() -> None:
    """Accepted by its validation; the model would be another one."""
    short = found(Wanted(model="gpt3-1.3b", gpus=64, hardware="a100-sxm-40gb", sequence=1024, top=1))[0]
    [said] = load_target("megatron-bridge").refusals(ExportJob.of(short))
    assert "learned 2048 positions" in said and not load_target("megatron").refusals(ExportJob.of(short))


def test_gradients_are_summed_as_they_were_priced(tmp_path: Path) -> None:
    """bf16 where the trainer's file says 2 bytes, fp16 in fp16; a file of one's own that a target would not follow is refused."""
    fp32, bf16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"

    def text(target: str, job: ExportJob) -> str:
        return "".join(load_target(target).render(job).files.values())

    plan, narrow = plan_of(), tmp_path / "narrow.yaml"
    narrow.write_text("extends: megatron\ngradient_bytes: 2\ngradient_reduce_bytes: 2\n")
    two = ExportJob.of(dataclasses.replace(plan, trainer=str(narrow)))
    bridge = ExportJob.of(dataclasses.replace(plan, trainer="megatron-bridge"))
    half = ExportJob.of(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, precision="fp16")))
    assert fp32 in text("megatron", ExportJob.of(plan)) and bf16 not in text("megatron", ExportJob.of(plan))
    require_expressible(load_target("megatron"), two, narrow)
    assert bf16 in text("megatron", two) and fp32 not in text("megatron", two)
    assert bf16 not in text("megatron", half) and fp32 not in text("megatron", half)
    assert "grad_reduce_in_fp32=True" in text("megatron-bridge", ExportJob.of(plan))
    assert "grad_reduce_in_fp32=False" in text("megatron-bridge", bridge)
    assert "fused cross entropy, which Megatron-LM refuses" in load_target("megatron").refusals(bridge)[0]

    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: deepspeed\ngradient_bytes: 8\n")
    own = changed(found(Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed"))[0])
    require_expressible(load_target("deepspeed"), ExportJob.of(own), mine)
    with pytest.raises(PlannerError, match="gradient_bytes 8.* of .*mine.yaml, and deepspeed runs with 2"):
        require_expressible(load_target("deepspeed"), ExportJob.of(dataclasses.replace(own, trainer=str(mine))), mine)


@pytest.mark.parametrize(("fusion", "impl"), [("off", ""), ("native", "native"), ("on", "te")])
def test_the_loss_is_the_one_that_was_priced(fusion: str, impl: str) -> None:
    job = ExportJob.of(dataclasses.replace(plan_of(), trainer=spell("megatron-bridge", {"loss_fusion": fusion})))
    text = "".join(load_target("megatron-bridge").render(job).files.values())
    assert f"cross_entropy_loss_fusion={bool(impl)}" in text
    assert re.findall(r"cross_entropy_fusion_impl=.(\w+)", text) == [impl] * bool(impl)


def test_targets_of_a_trainer() -> None:
    assert "megatron" in load_target("megatron").trainers and "torchtitan" not in load_target("megatron").trainers


# ------------------------------------------------------------------------------------------------ and back


def stages_of(plan: Plan) -> dict[str, object]:
    """A layout with its stages in place of the two fields that have several spellings of one split."""
    layout = plan.layout.to_dict()
    del layout["first_stage_layers"], layout["last_stage_layers"]
    return {**layout, "stages": ExportJob.of(plan).layers_per_chunk()}


def test_megatron_export_then_import_is_the_identity(searched: tuple[ExportJob, ...]) -> None:
    """The script of every plan, and the mapping, which has the same arguments, of every fifth."""
    target = load_target("megatron")
    mine = [(job, target.render(job).files) for job in searched if job.plan.trainer in target.trainers]
    cases = [(job, files, "arguments.sh") for job, files in mine] + [(*one, "arguments.yaml") for one in mine[::5]]
    for job, files, name in cases:
        reading = read_megatron(files[name], name)
        assert not reading.unread
        again = Plan(
            workload=Workload(
                model=reading.model, sequence_length=reading.sequence_length, precision=reading.precision,
                global_batch_size=reading.global_batch_size, optimizer=reading.optimizer,
            ),
            hardware=reading.hardware or "", num_gpus=reading.num_gpus or 0, trainer=reading.trainer,
            layout=complete(job.rules_job, dict(reading.fields))[0], prediction=job.plan.prediction,
        )  # fmt: skip
        assert again.workload == job.plan.workload.replace(expert_imbalance=1.0)  # no argument says how a router routes
        assert (again.hardware, again.num_gpus, again.trainer) == (
            job.plan.hardware,
            job.plan.num_gpus,
            job.plan.trainer,
        )
        assert stages_of(again) == stages_of(job.plan)

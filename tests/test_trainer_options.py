"""Trainers at a version and with options: how they are written, what holds, what is assumed, what would be faster."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from planner import api, library
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.gains import gains
from planner.options import alternatives, matters, unstated
from planner.search import search
from planner.trainer import load_trainer
from planner.trainer_options import at_version, number_of, read_options, spell, spelled, table

MOE = {"model": "qwen3-30b-a3b", "num_gpus": 64, "hardware": "h100-sxm"}


def test_a_trainer_is_written_with_version_and_options(tmp_path: Path) -> None:
    assert spelled("megatron") == ("megatron", "", {})
    whole = "megatron-bridge@26.06+expert_dispatch=deepep+cuda_graphs=layers"
    assert spelled(whole) == ("megatron-bridge", "26.06", {"expert_dispatch": "deepep", "cuda_graphs": "layers"})
    assert spell("megatron-bridge@26.06+expert_dispatch=hybridep", spelled(whole)[2]) == whole
    odd = tmp_path / "a@1+b=c.yaml"
    assert spelled(str(odd)) == (str(odd), "", {})


def test_facts_hold_from_a_version_until_the_next() -> None:
    assert number_of("v0.0.2") == (0, 0, 2) and number_of("25.10") > number_of("25.9")
    stated = ["0.0.2", "0.1", "0.2"]
    assert [at_version(stated, one) for one in ("0.0.1", "0.0.2", "0.1.5", "0.2", "7")] == ["0.0.2", "0.0.2", "0.1", "0.2", "0.2"]
    newest, old = load_trainer("torchtitan"), load_trainer("torchtitan@0.1")
    assert newest.traffic.root_units == 1 and old.traffic.root_units == 2
    assert load_trainer("torchtitan@0.3").traffic == newest.traffic
    assert old.choices.version == "0.1" and newest.choices.version == "0.3"
    oldest = load_trainer("torchtitan@0.0.2")
    assert oldest.kernels.loss_passes == 4 and oldest.kernels.norm_passes == newest.kernels.norm_passes
    assert oldest.with_option("compile", "on").stored.logit_bytes == 14, "the loss was not compiled then"


@pytest.mark.parametrize("name", library.names("trainers"))
def test_every_option_of_every_trainer_can_be_set_and_is_then_its_value(name: str) -> None:
    trainer = load_trainer(name)
    for option, values in trainer.choices.options.items():
        assert trainer.option(option) in values, f"{option} of {name} has none of its values"
        for value in values:
            assert trainer.with_option(option, value).option(option) == value
            assert load_trainer(f"{name}+{option}={value}").option(option) == value
    for version in library.read_yaml(library.find("trainers", name)).get("versions", {}):
        dated = load_trainer(f"{name}@{version}")
        assert all(dated.option(option) in values for option, values in dated.choices.options.items()), version


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("megatron@", "write it NAME, NAME@VERSION"),
        ("megatron@new", "version 'new' is not a number like 26.06"),
        ("maxtext@2", "trainer maxtext: this trainer has no versions; leave @2 out"),
        ("megatron+expert_dispatch=magic", "unknown expert_dispatch of trainer megatron 'magic'"),
        ("megatron+compile=on", "trainer megatron has no option 'compile'; it has, nearest first"),
        ("megatrom@1", "unknown trainer 'megatrom'"),
    ],
)
def test_what_cannot_be_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(PlannerError) as error:
        load_trainer(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize("given", ["expert_dispatch", ["a=b=c"], ["=x"], [""]])
def test_options_are_written_name_and_value(given: Any) -> None:
    with pytest.raises(PlannerError, match="NAME=VALUE, like --option expert_dispatch=deepep"):
        read_options(given)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"versions": {26.06: {}}}, "in a file it must be in quotes"),
        ({"options": {"warp": ["on"]}}, "option 'warp' is not known"),
        ({"options": {"dropout": ["sometimes"]}}, "option dropout has no value 'sometimes'; it has off, on"),
        ({"defaults": {"tp": 4}}, "unknown key 'tp'"),
        ({"versions": {"1": {}}, "recipes": {"1": [{"model": "("}]}}, "'(' is no regular expression"),
        ({"versions": {"1": {}}, "recipes": {"1": [{"options": {"dropout": "no"}}]}}, "unknown dropout of"),
        ({"fine_tuning": {"frozen_weights": "megatron"}}, "frozen_weights is 'megatron'; it must be of bf16"),
        ({"fine_tuning": {"optimizer": "paged_adam"}}, "optimizer is 'paged_adam'; it must be of adam"),
    ],
)
def test_a_wrong_file_gets_a_sentence(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(library.dump_yaml({"extends": "megatron", "title": "mine", **more}))
    with pytest.raises(PlannerError) as error:
        load_trainer(str(path))
    assert sentence in str(error.value)


def test_a_file_may_extend_a_version_with_options(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('extends: megatron-bridge@25.11+expert_dispatch=deepep\ntitle: mine\nhost_time: 20 us\n')
    mine = load_trainer(str(path))
    assert mine.kernels.expert_dispatch == "deepep" and mine.choices.version == "25.11" and mine.choices.recipes
    assert mine.host.host_time == pytest.approx(20e-6)


# ------------------------------------------------------------------------------------------------ what is assumed


def test_options_that_matter_are_assumed_aloud() -> None:
    said = {one.what: one for one in resolve(Request(**MOE, trainer="megatron")).assumptions}
    dispatch = said["expert dispatch"]
    assert (dispatch.value, dispatch.flag) == ("alltoall", "--option expert_dispatch=deepep")
    assert dispatch.why.startswith("megatron 0.19's default") and "cuda_graphs none" in said["options"].value
    chosen = resolve(Request(**MOE, trainer="megatron", options={"expert_dispatch": "deepep"}))
    assert "expert dispatch" not in {one.what for one in chosen.assumptions}
    assert chosen.job.trainer.kernels.expert_dispatch == "deepep"
    dense = resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm", trainer="megatron"))
    assert not any("expert" in one.what for one in dense.assumptions)


def test_the_recipe_of_a_version_is_taken_and_said_and_gives_way_to_the_user() -> None:
    asked: dict[str, Any] = {"model": "qwen3-30b-a3b", "num_gpus": 16, "hardware": "h100-sxm", "trainer": "megatron-bridge@26.06"}
    found = resolve(Request(**asked))
    assert found.trainer == "megatron-bridge@26.06+expert_dispatch=hybridep"
    (one,) = [one for one in found.assumptions if one.what == "expert dispatch"]
    assert one.why.startswith("published recipe of megatron-bridge 26.06 for qwen3-30b-a3b")
    assert resolve(Request(**asked, options={"expert_dispatch": "alltoall"})).job.trainer.kernels.expert_dispatch == "alltoall"
    older = resolve(Request(**{**asked, "trainer": "megatron-bridge@26.02"}))
    assert older.trainer == "megatron-bridge@26.02"


def test_estimates_take_the_recompute_of_the_recipe() -> None:
    asked: dict[str, Any] = {
        "model": "deepseek-v3", "gpus": 256, "hardware": "gb200-nvl72", "trainer": "megatron-bridge@25.11", "pp": 4, "ep": 64,
        "first_stage_layers": 16, "last_stage_layers": 13, "global_batch_size": 2048, "sequence_length": 4096,
    }  # fmt: skip
    plan = api.estimate(**asked)
    assert plan.layout.to_dict()["recompute_modules"] == ["mla_up_projection"]
    assert any(one.what == "recompute" and one.flag == "--recompute none" for one in plan.assumed)
    assert api.estimate(**asked, recompute="none").layout.to_dict()["recompute"] == "none"


def test_a_plan_file_keeps_version_and_options(tmp_path: Path) -> None:
    plan = api.estimate(
        model="qwen3-30b-a3b", gpus=16, hardware="h100-sxm", trainer="megatron-bridge@26.02", ep=8,
        options={"expert_dispatch": "deepep", "expert_overlap": "on"},
    )  # fmt: skip
    path = tmp_path / "plan.yaml"
    plan.save(path)
    again = api.load(path)
    assert again.file == plan.file
    assert again.file.trainer == "megatron-bridge@26.02+expert_dispatch=deepep+expert_overlap=on"
    assert again.file.load_trainer().option("expert_overlap") == "on"
    other = api.estimate(path, options="expert_dispatch=alltoall")
    assert other.file.load_trainer().option("expert_dispatch") == "alltoall"
    assert other.estimate.step_time > plan.estimate.step_time


# ------------------------------------------------------------------------------------------------ what would be faster


def test_what_an_option_needs() -> None:
    work = resolve(Request(**MOE, trainer="megatron")).job.workload
    assert matters("expert_dispatch", work, 8) and not matters("fp8_attention", work, 8)
    assert matters("fp8_attention", work.replace(precision="fp8"), 8) and not matters("fused_experts", work, 8)
    assert matters("tp_overlap", work, 2) and not matters("tp_overlap", work, 1)
    assert not matters("adapter_dropout", work, 8) and matters("adapter_dropout", work.replace(lora_rank=8), 8)


def test_unstated_options_are_priced_both_ways() -> None:
    job = resolve(Request(**MOE, trainer="megatron")).job
    names = {(one.option, one.value) for one in alternatives(job)}
    assert {("expert_dispatch", "deepep"), ("expert_dispatch", "hybridep"), ("expert_overlap", "on")} <= names
    assert not any(job.trainer.option(option) == value for option, value in names)
    assert not any(option == "dropout" for option, _ in names), "nobody leaves that open"
    assert "expert_dispatch" not in {one.option for one in alternatives(job, ["expert_dispatch"])}
    ampere = resolve(Request(**{**MOE, "hardware": "a100-sxm-80gb"}, trainer="megatron")).job
    assert "expert_dispatch" not in {one.option for one in alternatives(ampere)}, "DeepEP needs Hopper"
    layout = search(job, None, 1).layouts[0]
    priced = {one.flag: float(found.step_time[0]) for one, found in unstated(job, [layout]).others}
    by_hand = api.estimate(
        model="qwen3-30b-a3b", gpus=64, hardware="h100-sxm", trainer="megatron+expert_dispatch=deepep",
        **{key: value for key, value in layout.to_dict().items() if key not in ("dp", "num_microbatches")},
    )  # fmt: skip
    assert priced["--option expert_dispatch=deepep"] == pytest.approx(by_hand.estimate.step_time, rel=0.02)


@pytest.mark.proof
def test_deepseek_v3_is_pointed_at_deepep_dualpipe_and_fp8() -> None:
    job = resolve(Request(model="deepseek-v3", num_gpus=2048, hardware="h800-sxm")).job
    layouts = search(job, None, 5).layouts
    found = {one.flag: one for one in gains(unstated(job, layouts))}
    assert {"--option expert_dispatch=deepep", "--option expert_overlap=on"} <= found.keys() and len(found) <= 4
    assert any(flag.startswith("--precision fp8") for flag in found)
    assert "DualPipe" in found["--option expert_overlap=on"].what
    assert [one.gain for one in found.values()] == sorted((one.gain for one in found.values()), reverse=True)
    assert all(0.01 <= one.gain < 1 for one in found.values())
    assert "--option expert_dispatch=deepep" not in {one.flag for one in gains(unstated(job, layouts, ["expert_dispatch"]))}


def test_exports_write_an_option_or_refuse(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "gpus": 16, "hardware": "h100-sxm", "trainer": "megatron", "ep": 8, "recompute": "none",
        "zero": 1,
    }  # fmt: skip
    options = {"expert_dispatch": "deepep", "expert_overlap": "on", "cuda_graphs": "layers", "router_dtype": "bf16"}
    plan = api.estimate(**asked, options=options)
    plan.export("megatron", tmp_path / "out")
    text = (tmp_path / "out" / "arguments.sh").read_text()
    for words in (
        "--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep", "--overlap-moe-expert-parallel-comm",
        "--cuda-graph-impl transformer_engine", "--cuda-graph-modules attn moe_router",
    ):  # fmt: skip
        assert words in text, words
    assert "--moe-router-dtype" not in text
    again = api.import_config(tmp_path / "out" / "arguments.sh")
    assert again.file.trainer == plan.file.trainer
    with pytest.raises(PlannerError, match="option pipeline_overlap=off, which an export to megatron does not write"):
        api.estimate(**asked, options="pipeline_overlap=off").export("megatron", tmp_path / "no")
    with pytest.raises(PlannerError, match="option cuda_graphs=layers_and_experts: a graph of the experts"):
        api.estimate(**asked, options="cuda_graphs=layers_and_experts").export("megatron", tmp_path / "no")


def test_the_table_is_whole() -> None:
    known = {option for name in library.names("trainers") for option in load_trainer(name).choices.options}
    assert known == set(table()), "an option that no trainer has"
    for name, one in table().items():
        assert one.what and len(one.values) > 1 and (one.open is None or set(one.open) <= set(one.values)), name


JUNK: list[Any] = [
    None, True, 3, "x", [], [1], {"a": 1}, {1: 2}, {"dropout": 3}, {"dropout": {"on": 3}}, {"26.06": 3}, {"26.06": [3]},
    {"26.06": [{"model": 3}]}, {26.06: {}}, {"zero": [1]},
]  # fmt: skip


@pytest.mark.parametrize("key", ["options", "versions", "defaults", "recipes"])
def test_any_data_is_read_or_refused_with_a_sentence(key: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for value in JUNK:
        path.write_text(library.dump_yaml({"extends": "megatron", "code_base": "x", "version": "26.06", key: value}))
        with contextlib.suppress(PlannerError):
            load_trainer(str(path))


@pytest.mark.proof
def test_what_would_be_faster_does_not_hang_on_how_many_plans_are_shown() -> None:
    """Llama 70B on 64 H100: in fp8 another layout than the first is the fastest, with one plan shown as with five."""
    one, five = (api.plan(model="llama-70b", gpus=64, hardware="h100-sxm", top=top) for top in (1, 5))
    assert (len(one), len(five)) == (1, 5) and one[0].layout == five[0].layout
    assert [(each.flag, each.layout) for each in one.faster] == [(each.flag, each.layout) for each in five.faster]
    assert [each.gain for each in one.faster] == pytest.approx([each.gain for each in five.faster])
    assert any(each.layout for each in one.faster)


@pytest.mark.parametrize("hardware", ["v100-sxm2-32gb", "t4", "a100-sxm-80gb"])
def test_no_kernel_of_attention_is_offered_that_the_device_has_not(hardware: str) -> None:
    resolved = resolve(Request(model="llama-3.1-8b", num_gpus=8, hardware=hardware, trainer="megatron-2021"))
    offered = [one for one in alternatives(resolved.job) if one.option == "attention_kernel"]
    assert bool(offered) == (hardware == "a100-sxm-80gb")
    for one in offered:  # what is offered is taken where it is typed
        resolve(Request(model="llama-3.1-8b", num_gpus=8, hardware=hardware, trainer=f"megatron-2021+{one.flag.split()[1]}"))


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_kernels_that_options_switch_stay_whatever_is_compiled(compiled: str) -> None:
    """An option before compile was undone by it, which names what it fuses alone."""
    options = {"attention_kernel": "eager", "optimizer_kernel": "foreach", "autocast": "off", "activation_kernel": "plain_half"}
    words = "".join(f"+{name}={value}" for name, value in options.items())
    for text in (f"fsdp{words}+compile={compiled}", f"fsdp+compile={compiled}{words}"):
        trainer = load_trainer(text)
        assert {name: trainer.option(name) for name in options} == options
        assert ("swiglu" in trainer.kernels.unfused) is (compiled == "off")

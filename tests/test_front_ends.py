"""Front ends, MaxText, Colossal-AI and servers: names that exist, layouts that fit, refusals with their rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainers.plans import EVEN, SOME, Wanted, changed, found, jobs

from planner import api, library
from planner.model import from_hugging_face, load_model, to_dict
from planner.trainers import reading
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.model_config import family, model_config
from planner.trainers.bundle.serving import held, serving
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking.setting_names import check_names, recorded, unknown
from planner.trainers.reading.given import Given
from planner.trainers.targets import load_target

SNAPSHOTS = Path(__file__).resolve().parent / "trainers" / "snapshots"
SHIPPED = ("colossalai", "sglang", "vllm")
"""Those whose parsers nothing runs: --check compares with the recorded names where the package is not installed."""
TARGETS = sorted([*SHIPPED, *(path.stem for path in SNAPSHOTS.glob("*.json"))])


def snapshot(name: str) -> dict[str, Any]:
    if name in SHIPPED:
        return recorded(name)
    return json.loads((SNAPSHOTS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def known(name: str) -> dict[str, dict[str, str]]:
    return snapshot(name)["settings"]  # type: ignore[no-any-return]


def mine(name: str, searched: tuple[ExportJob, ...]) -> list[ExportJob]:
    """Plans of the set that a target takes; of the servers, which take all, every tenth."""
    target = load_target(name)
    cases = [job for job in searched if job.plan.trainer in target.trainers]
    return [job for job in cases[:: 10 if name in ("vllm", "sglang") else 1] if not target.refusals(job)]


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", TARGETS)
def test_every_name_exists_in_the_recorded_version(name: str, searched: tuple[ExportJob, ...], tmp_path: Path) -> None:
    target, cases = load_target(name), mine(name, searched)
    assert len(cases) >= (2 if searched == jobs(SOME) else 8)
    for number, job in enumerate(cases):
        folder = tmp_path / str(number)
        write_bundle(make_bundle(target, job, "torchrun"), folder)
        assert not unknown(name, known(name), folder)


@pytest.mark.parametrize("name", TARGETS)
def test_a_wrong_name_is_found(name: str, tmp_path: Path) -> None:
    """Every section of the snapshot is really looked at: without its names the export has unknown ones."""
    job = mine(name, jobs(SOME))[0]
    write_bundle(make_bundle(load_target(name), job, "torchrun"), tmp_path / "run")
    assert unknown(name, {section: {} for section in known(name)}, tmp_path / "run")
    removed = unknown(name, {section: {} for section in known(name)}, tmp_path / "run")[0].split(": ")[1]
    without = {section: {k: v for k, v in names.items() if k != removed} for section, names in known(name).items()}
    assert any(one.endswith(f": {removed}") for one in unknown(name, without, tmp_path / "run"))


def test_snapshots_are_of_the_versions_that_targets_declare() -> None:
    from planner.trainers.bundle.target import in_range

    for name in TARGETS:
        data = snapshot(name)
        target = load_target(name)
        assert data["package"] == target.package and in_range(data["version"], target.versions)


@pytest.mark.parametrize("name", SHIPPED)
def test_names_are_checked_without_the_package(name: str, tmp_path: Path) -> None:
    write_bundle(make_bundle(load_target(name), mine(name, jobs(SOME))[0], "torchrun"), tmp_path)
    one = check_names(name, tmp_path)
    assert one.level == "name known" and "as recorded" in one.text()
    path = tmp_path / ("run.sh" if name != "colossalai" else "plan.json")
    text = path.read_text()
    path.write_text(
        text.replace("tensor-parallel", "tenser-parallel").replace("--tp", "--tpp").replace("tp_size", "tq_size")
    )
    assert path.read_text() != text and "unknown names" in check_names(name, tmp_path).text()


# ------------------------------------------------------------------------------------------------ config.json


def test_config_json_means_the_model_or_is_not_written() -> None:
    written = 0
    for name in library.names("models"):
        model = load_model(name)
        config = model_config(model)
        if config is None:
            continue
        read, skip = to_dict(from_hugging_face(config, name=name)), ("name", "source")
        expected = {k: v for k, v in to_dict(model).items() if k not in skip and not k.startswith("published")}
        assert {k: v for k, v in read.items() if k not in skip} == expected
        written += 1
    assert written >= 60
    assert family(load_model("qwen2.5-7b")) == "qwen2"  # llama's attention_bias would add one to the output projection
    assert family(load_model("deepseek-v3")) == "deepseek_v3" and family(load_model("bloom-176b")) is None


# ------------------------------------------------------------------------------------------------ serving


def test_serving_layouts_fit_and_are_legal(searched: tuple[ExportJob, ...]) -> None:
    for job in searched:
        one = serving(job)
        assert one is not None
        assert one.weights + one.cache + one.step <= one.budget
        assert job.model.num_heads % one.tp == 0 and one.pp <= job.model.num_layers
        assert one.tp * one.pp * one.dp == one.nodes * job.gpus_per_node
        assert one.servers * one.nodes * job.gpus_per_node <= job.cluster.num_gpus
        assert one.ep == 1 or (job.model.num_experts % one.ep == 0 and one.ep == one.tp * one.dp)
        if not job.model.is_moe and one.nodes == 1 and one.tp > 1:  # half of the ranks would not do
            assert held(job, "vllm", (one.tp // 2, 1, 2 * one.dp, 1), one.sequences) is None


def test_sglang_counts_ranks_its_own_way() -> None:
    """tp-size x pp-size divides by the nodes; attention groups divide tp-size [validation_hook.py, parallel_hook.py]."""
    for job in mine("sglang", jobs(SOME)):
        words = make_bundle(load_target("sglang"), job, "torchrun").rendered.entry
        value = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}
        tp, pp, dp, attention, nodes = (
            int(value[f"--{k}"]) for k in ("tp-size", "pp-size", "dp-size", "attn-dp-size", "nnodes")
        )
        assert tp * pp % nodes == 0 and tp % attention == 0 and not (attention > 1 and dp > 1)
        assert not (dp > 1 and nodes != 1) and int(value["--ep-size"]) in (1, tp)


# ------------------------------------------------------------------------------------------------ refusals

FSDP = Wanted(model="llama-3.1-8b", gpus=8, trainer="fsdp", top=1)
DEEPSPEED = Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed", top=1)
MAXTEXT = Wanted(model="llama-3.1-8b", gpus=8, trainer="maxtext", top=1)
EXPERTS = Wanted(model="mixtral-8x7b", gpus=64, trainer="maxtext", top=1)
AXOLOTL = Wanted(model="llama-3.1-8b", gpus=8, trainer="axolotl", top=1)
COLOSSAL = Wanted(model="llama-3.1-8b", gpus=8, trainer="colossalai", top=1)
MEGATRON = Wanted(model="llama-3.1-8b", gpus=8, top=1)
REFUSED: tuple[tuple[str, Wanted, dict[str, int], str], ...] = (
    ("llama-factory", FSDP, {"tp": 2, "dp": 4}, "tp 2: LLaMA-Factory runs fsdp plans with data parallelism alone"),
    ("llama-factory", DEEPSPEED, {"cp": 2, "dp": 4}, "no context parallelism; use cp 1"),
    ("llama-factory", FSDP, {"recompute": 1, "recompute_modules": 2}, "checkpoints of transformers cover whole layers"),
    ("axolotl", FSDP, {"pp": 2, "dp": 4}, "no pipeline parallelism; use pp 1"),
    ("axolotl", FSDP, {"cp": 2, "dp": 4, "zero": 3}, "only trainer axolotl prices that"),
    ("axolotl", AXOLOTL, {"cp": 2, "dp": 4, "zero": 3, "micro_batch_size": 2}, "takes one row of packed samples"),
    ("axolotl", FSDP, {"zero": 3, "offload_activations": 1}, "without recompute full"),
    ("axolotl", DEEPSPEED, {"zero": 1, "offload_optimizer": 50}, "with ZeRO 3 only"),
    ("verl", FSDP, {"zero": 0}, "verl's FSDP engine always shards states"),
    ("verl", MEGATRON, {"order": 1}, "Megatron's default groups"),
    ("verl", MEGATRON, {"zero": 2}, "use zero 1"),
    ("maxtext", MAXTEXT, {"pp": 2, "dp": 4, "zero": 3}, "all microbatches forward, then all backward"),
    ("maxtext", MAXTEXT, {"zero": 2}, "the fsdp axis shards states and weights alike"),
    ("maxtext", MAXTEXT, {"zero": 3, "cp": 2, "dp": 4, "cp_method": 0}, "context_parallel_strategy all_gather"),
    ("maxtext", EXPERTS, {"zero": 3, "dp": 32, "tp": 2, "ep": 8}, "the expert axis lies inside the tensor axis"),
    ("colossalai", COLOSSAL, {"zero": 2, "pp": 2, "dp": 4}, "zero stage must be 0 or 1 with a pipeline"),
    ("colossalai", COLOSSAL, {"tp": 16}, "key-value heads divide by it"),
    ("colossalai", COLOSSAL, {"pp": 4, "dp": 2, "vpp": 2, "schedule": 2, "num_microbatches": 6}, "the nearest is 8"),
    ("colossalai", COLOSSAL, {"cp": 2, "tp": 2, "dp": 2}, "sequence ranks are next to each other"),
    ("colossalai", COLOSSAL, {"pp": 2, "dp": 4, "schedule": 4, "vpp": 2}, "zbv needs a table of its own"),
)


@pytest.mark.parametrize(("name", "wanted", "changes", "words"), REFUSED)
def test_refusals_say_why_and_what_to_do(name: str, wanted: Wanted, changes: dict[str, int], words: str) -> None:
    job = ExportJob.of(changed(found(wanted)[0], **(EVEN | changes)))
    said = load_target(name).refusals(job)
    assert any(words in one for one in said), said


def test_models_that_a_trainer_does_not_know() -> None:
    job = ExportJob.of(found(Wanted(model="gemma-3-27b", gpus=64, trainer="maxtext", top=1))[0])
    assert any("no decoder_block of MaxText" in one for one in load_target("maxtext").refusals(job))
    job = ExportJob.of(found(Wanted(model="gemma-3-27b", gpus=64, trainer="colossalai", top=1))[0])
    assert any("no policy of Shardformer" in one for one in load_target("colossalai").refusals(job))


# ------------------------------------------------------------------------------------------------ what is written


def read(name: str, wanted: Wanted, file: str, **changes: int) -> Any:
    job = ExportJob.of(changed(found(wanted)[0], **(EVEN | changes)))
    import yaml

    return yaml.safe_load(make_bundle(load_target(name), job, "torchrun").files[file])


def test_recompute_is_done_once() -> None:
    """accelerate's file and LLaMA-Factory's own switch must not both checkpoint the layers."""
    for zero, twice in ((3, True), (0, False)):
        batch = {"micro_batch_size": 1, "num_microbatches": 64, "zero": zero, "recompute": 2}
        own = read("llama-factory", FSDP, "llama_factory.yaml", **batch)
        assert own["disable_gradient_checkpointing"] is twice
        below = read("llama-factory", FSDP, "accelerate.yaml", **batch)
        assert below.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False) is twice


def test_uneven_pipelines_are_written_out() -> None:
    batch = {"pp": 4, "dp": 2, "first_stage_layers": 7, "last_stage_layers": 5, "num_microbatches": 256, "zero": 1}
    plugin = read("colossalai", COLOSSAL, "plan.json", **batch)["plugin"]
    assert plugin["num_layers_per_stage"] == [7, 10, 10, 5] and plugin["dp_outside"] is False
    lines = make_bundle(
        load_target("verl"), ExportJob.of(changed(found(MEGATRON)[0], **(EVEN | batch))), "torchrun"
    ).files["overrides.txt"]  # fmt: skip
    assert "pipeline_model_parallel_layout='Et*7|(t*10|)*2t*5L'" in lines


def test_verl_has_a_baseline_for_one_answer_per_prompt() -> None:
    """GRPO compares the answers of a prompt: with one of them there is nothing to learn from, and the README says what it takes."""
    files = make_bundle(load_target("verl"), ExportJob.of(found(MEGATRON)[0]), "torchrun").files
    lines = files["overrides.txt"].splitlines()
    assert "algorithm.adv_estimator=reinforce_plus_plus" in lines
    assert "actor_rollout_ref.rollout.n=1" in lines and "rollout.n to n > 1" in " ".join(files["README.md"].split())


def test_maxtext_batch_is_the_plans() -> None:
    for job in mine("maxtext", jobs(SOME)):
        import yaml

        data = yaml.safe_load(make_bundle(load_target("maxtext"), job, "torchrun").files["maxtext.yml"])
        degrees = [value for key, value in data.items() if key.startswith("ici_")]
        product = 1
        for degree in degrees:
            product *= degree
        assert product == job.cluster.num_gpus
        assert (
            data["per_device_batch_size"] * product * data["gradient_accumulation_steps"]
            == job.workload.global_batch_size
        )


# ------------------------------------------------------------------------------------------------ fine-tuning


@pytest.mark.parametrize(
    ("name", "more", "written"),
    [
        (
            "axolotl",
            {"lora_rank": 16, "frozen_weights": "nf4"},
            {"adapter": "qlora", "load_in_4bit": True, "sample_packing": True},
        ),
        ("axolotl", {"lora_rank": 16, "frozen_weights": "int8"}, {"adapter": "lora", "load_in_8bit": True}),
        ("axolotl", {"objective": "dpo"}, {"rl": "dpo"}),
        ("axolotl", {"precision": "bf16_true"}, {"bf16": False, "bfloat16": True}),
        (
            "axolotl",
            {"lora_rank": 16, "options": {"adapter_dtype": "half"}},
            {"bf16": True, "peft_autocast_adapter_dtype": False},
        ),
        (
            "llama-factory",
            {"frozen_weights": "nf4_dq"},
            {"stage": "pt", "quantization_bit": 4, "double_quantization": True},
        ),
        ("llama-factory", {"objective": "dpo", "lora_rank": 0}, {"stage": "dpo", "finetuning_type": "full"}),
    ],
)
def test_fine_tuning_is_written_in_words_that_exist(
    name: str, more: dict[str, Any], written: dict[str, Any], tmp_path: Path
) -> None:
    """Each front end runs plans of the trainer of its own name."""
    job = ExportJob.of(api.plan(model="llama-8b", gpus=8, hardware="h100-sxm", trainer=name, top=1, **more)[0].file)
    target = load_target(name)
    assert name in target.trainers and not target.refusals(job)
    write_bundle(make_bundle(target, job, "torchrun"), tmp_path / "run")
    assert not unknown(name, known(name), tmp_path / "run")
    config = library.read_yaml(tmp_path / "run" / f"{name.replace('-', '_')}.yaml")
    assert {key: config.get(key) for key in written} == written
    assert ("sample_packing" in config or "packing" in config) == ("objective" not in more)


def test_what_a_front_end_has_no_word_for_is_refused() -> None:
    plan = api.plan(model="llama-8b", gpus=8, hardware="h100-sxm", trainer="trl", objective="dpo", top=1)[0]
    job = ExportJob.of(plan.file)
    assert any(
        "objective dpo" in one and "plan with objective lm" in one for one in load_target("accelerate").refusals(job)
    )


def test_what_axolotl_holds_in_half_precision_is_read_back(tmp_path: Path) -> None:
    for more, half in (({"precision": "bf16_true"}, ""), ({"lora_rank": 16, "options": {"adapter_dtype": "half"}}, "half")):
        job = ExportJob.of(api.plan(model="llama-8b", gpus=8, hardware="h100-sxm", trainer="axolotl", top=1, **more)[0].file)
        write_bundle(make_bundle(load_target("axolotl"), job, "torchrun"), tmp_path / f"run{half}")
        back = reading.read(tmp_path / f"run{half}" / "axolotl.yaml", "axolotl", Given(num_gpus=8, model="llama-3.1-8b"))
        assert (back.precision, "adapter_dtype=half" in back.trainer) == (job.workload.precision, bool(half))
    work = {"lora_rank": 16, "frozen_weights": "nf4", "options": {"adapter_dtype": "half"}}
    job = ExportJob.of(api.plan(model="llama-8b", gpus=8, hardware="h100-sxm", trainer="axolotl", top=1, **work)[0].file)
    assert any(one.startswith("option adapter_dtype half on a quantised base") for one in load_target("axolotl").refusals(job))

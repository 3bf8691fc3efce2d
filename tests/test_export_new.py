"""Megatron-FSDP and the targets of 2026: what their files say of a plan, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_samples import plan_of

from planner.layout import Layout, Module
from planner.model import load_model
from planner.trainers.bundle.folder import make_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.reading import read
from planner.trainers.reading.given import Given
from planner.trainers.targets import load_target


def job_of(
    trainer: str, *, model: str = "llama-3.1-8b", hardware: str = "h100-sxm", work: Any = None, **layout: int
) -> ExportJob:
    """A job without a search: 8 GPUs, 16 microbatches, unless told otherwise."""
    fields = {"dp": 8, "num_microbatches": 16, **layout}
    return ExportJob.of(plan_of(trainer, Layout(**fields), model=load_model(model), hardware=hardware, **(work or {})))


def files_of(target: str, job: ExportJob, launcher: str = "torchrun") -> dict[str, str]:
    """The bundle of a plan that the target takes."""
    assert not load_target(target).refusals(job)
    return make_bundle(load_target(target), job, launcher).files


def said(target: str, job: ExportJob) -> str:
    """All refusals."""
    return " | ".join(load_target(target).refusals(job))


# ------------------------------------------------------------------------------------------------ Megatron-FSDP


def test_zero_2_and_3_of_megatron_are_megatron_fsdp() -> None:
    for zero, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
        files = files_of("megatron", job_of("megatron-fsdp", zero=zero, tp=2, dp=4, sequence_parallel=1))
        words = shlex.split(files["arguments.sh"], comments=True)
        assert words[words.index("--data-parallel-sharding-strategy") + 1] == strategy
        assert {"--use-megatron-fsdp", "--use-distributed-optimizer", "--init-model-with-meta-device"} <= set(words)
        assert words[words.index("--ckpt-format") + 1] == "fsdp_dtensor"
        assert words[words.index("--megatron-fsdp-main-grads-dtype") + 1] == "fp32"
        assert "torch_dist" not in files["run.sh"]
        assert re.search(r"CUDA_DEVICE_MAX_CONNECTIONS=\W*8\b", files["environment.sh"])
    assert "--megatron-fsdp" not in files_of("megatron", job_of("megatron", zero=1))["arguments.sh"]


def test_what_megatron_fsdp_has_not_is_refused() -> None:
    assert "plan for trainer megatron-fsdp" in said("megatron", job_of("megatron", zero=3))
    assert "use --to megatron" in said("megatron-bridge", job_of("megatron-fsdp", zero=3))
    assert "not with a pipeline" in said("megatron", job_of("megatron-fsdp", zero=3, pp=2, dp=4))
    assert "zero 0" in said("megatron", job_of("megatron-fsdp", zero=0))


# ------------------------------------------------------------------------------------------------ NeMo AutoModel


def test_automodel_writes_degrees_stages_and_sharding() -> None:
    files = files_of("automodel", job_of("automodel", zero=2, pp=2, vpp=2, schedule=2, dp=4, dp_shard=2))
    run, smoke = (yaml.safe_load(files[name]) for name in ("automodel.yaml", "automodel-smoke.yaml"))
    assert run["distributed"] == smoke["distributed"]
    found = run["distributed"]
    assert {name: found[f"{name}_size"] for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")} == {
        "dp": 4, "dp_replicate": 2, "tp": 1, "pp": 2, "cp": 1, "ep": 1,
    }  # fmt: skip
    parts = found["pipeline"]["module_fqns_per_model_part"]
    assert [sum(".layers." in one for one in part) for part in parts] == [8, 8, 8, 8]
    assert "lm_head" in parts[-1] and "model.embed_tokens" in parts[0]
    assert run["step_scheduler"]["local_batch_size"] == 16 and found["reshard_after_forward"] is False
    assert json.loads(files["model/config.json"])["num_hidden_layers"] == 32
    assert "automodel-smoke.yaml" in files["smoke.sh"]


def test_what_automodel_has_not_is_refused() -> None:
    moe = {"model": "qwen3-30b-a3b", "zero": 3}
    assert "tp 2 with experts" in said("automodel", job_of("automodel", **moe, tp=2, dp=4, ep=4, sequence_parallel=1))
    assert "ep 1: its mixtures" in said("automodel", job_of("automodel", **moe))
    assert "prediction modules" in said("automodel", job_of("automodel", model="deepseek-v3", zero=3, ep=8))
    assert "at least pp" in said("automodel", job_of("automodel", zero=2, pp=2, dp=4, num_microbatches=1))
    assert "no model of NeMo" in said("automodel", job_of("automodel", model="mixtral-8x7b", zero=3, ep=8))


# ------------------------------------------------------------------------------------------------ ms-swift


def test_swift_is_started_with_transformers_or_with_megatron() -> None:
    files = files_of("ms-swift", job_of("ms-swift", zero=3, recompute=2))
    run, shards = yaml.safe_load(files["ms_swift.yaml"]), json.loads(files["fsdp.json"])
    assert (run["fsdp"], run["torch_dtype"], run["bf16"], run["packing"]) == ("fsdp.json", "float32", True, True)
    assert shards["fsdp_config"]["activation_checkpointing"] and shards["fsdp"].startswith("full_shard")
    assert "exec swift" in files["run.sh"] and "--max_steps" in files["run.sh"]
    adapters = yaml.safe_load(files_of("ms-swift", job_of("ms-swift", work={"lora_rank": 8}))["ms_swift.yaml"])
    assert (adapters["tuner_type"], adapters["lora_rank"], adapters["target_modules"]) == ("lora", 8, ["all-linear"])
    job = job_of("ms-swift-megatron", zero=1, tp=2, pp=2, vpp=2, schedule=2, dp=2, sequence_parallel=1)
    files = files_of("ms-swift", job)
    run = yaml.safe_load(files["ms_swift.yaml"])
    assert "fsdp.json" not in files and "exec megatron" in files["run.sh"] and "--train_iters" in files["smoke.sh"]
    assert run["pipeline_model_parallel_layout"] == "Et*8|(t*8|)*2t*8L"
    assert (run["tensor_model_parallel_size"], run["global_batch_size"], run["main_grads_dtype"]) == (2, 32, "fp32")


def test_swift_says_where_its_kernel_of_attention_is_not_the_priced_one() -> None:
    for trainer, told in (("ms-swift", False), ("ms-swift+attention_kernel=best", True), ("ms-swift-megatron", False)):
        files = files_of("ms-swift", job_of(trainer, zero=1 if "megatron" in trainer else 3))
        assert ("attn_impl: flash_attn" in files["ms_swift.yaml"]) == ("megatron" not in trainer)
        assert ("--option attention_kernel=fa2" in files["README.md"]) == told


def test_what_swift_has_not_is_refused() -> None:
    assert "replicas of shards" in said("ms-swift", job_of("ms-swift", zero=3, dp_shard=4))
    assert "tp 2: ms-swift runs" in said("ms-swift", job_of("ms-swift", zero=3, tp=2, dp=4))
    assert "rank order" in said("ms-swift", job_of("ms-swift-megatron", zero=1, order=1))
    work = {"lora_rank": 8, "frozen_weights": "nf4"}
    assert "bitsandbytes" in said("ms-swift", job_of("ms-swift", zero=3, work=work))
    assert "optimizer muon" in said("ms-swift", job_of("ms-swift-megatron", zero=1, work={"optimizer": "muon"}))


# ------------------------------------------------------------------------------------------------ torchtune


def test_torchtune_writes_a_recipe_and_every_dimension() -> None:
    files = files_of("torchtune", job_of("torchtune", zero=2, recompute=2, work={"precision": "bf16_true"}))
    run = yaml.safe_load(files["torchtune.yaml"])
    assert run["model"]["_component_"] == "torchtune.models.llama3_1.llama3_1"
    assert (run["model"]["num_layers"], run["model"]["rope_base"], run["model"]["scale_factor"]) == (32, 500000, 8)
    assert (run["batch_size"], run["gradient_accumulation_steps"], run["fsdp_reshard_after_forward"]) == (1, 16, False)
    assert run["enable_activation_checkpointing"] and run["dtype"] == "bf16" and not run["optimizer_in_bwd"]
    assert "full_finetune_distributed" in files["run.sh"] and "--nproc-per-node 8" in files["smoke.sh"]
    work = {"precision": "bf16_true", "lora_rank": 8, "frozen_weights": "nf4_dq"}
    files = files_of("torchtune", job_of("torchtune", model="qwen2.5-7b", dp=1, zero=0, work=work))
    model = yaml.safe_load(files["torchtune.yaml"])["model"]
    assert (model["_component_"], model["lora_rank"], model["quantize_base"]) == ("torchtune.models.qwen2.lora_qwen2", 8, True)
    assert "lora_finetune_single_device" in files["run.sh"]


def test_what_torchtune_has_not_is_refused() -> None:
    work = {"precision": "bf16_true"}
    assert "no context parallelism" in said("torchtune", job_of("torchtune", zero=3, cp=2, dp=4, work=work))
    assert "window of 4096" in said("torchtune", job_of("torchtune", model="mistral-7b", zero=3, work=work))
    assert "no builder" in said("torchtune", job_of("torchtune", model="qwen3-32b", zero=3, work=work))
    assert "shard with FSDP2" in said("torchtune", job_of("torchtune", zero=0, work=work))
    assert "precision fp16" in said("torchtune", job_of("torchtune", zero=3, work={"precision": "fp16"}))


# ------------------------------------------------------------------------------------------------ Lightning


def test_lightning_wraps_the_script() -> None:
    job = job_of("torchtitan", zero=3, tp=2, dp=4, sequence_parallel=1)
    files, plain = files_of("lightning", job), files_of("pytorch", job)
    assert (files["train.py"], files["plan.json"]) == (plain["train.py"], plain["plan.json"])
    compile(files["lightning_train.py"], "lightning_train.py", "exec")
    assert "lightning_train.py" in files["run.sh"] and "--nodes 1" in files["smoke.sh"]
    assert "data and tensor parallelism alone" in said("lightning", job_of("torchtitan", zero=2, pp=2, dp=4))
    assert "one data-parallel axis" in said("lightning", job_of("torchtitan", zero=3, dp_shard=4))
    assert "the script has dense layers" in said("lightning", job_of("torchtitan", model="qwen3-30b-a3b", zero=3, ep=8))


# ------------------------------------------------------------------------------------------------ OLMo-core


def test_olmo_core_writes_its_configuration_as_python() -> None:
    job = job_of("torchtitan", zero=2, pp=2, vpp=2, schedule=2, dp=4, dp_shard=2)
    text = files_of("olmo-core", job)["olmo_train.py"]
    compile(text, "olmo_train.py", "exec")
    once = ("n_layers=32", "split_points=[8, 16, 24]", '("Interleaved1F1B")', "num_replicas=2, shard_degree=2")
    assert all(text.count(one) == 1 for one in once)
    assert "rank_microbatch_size=1 * SEQUENCE_LENGTH" in text and "global_batch_size=64 * SEQUENCE_LENGTH" in text
    assert "factor=8" in text and "low_freq_proportion=0.0" in text and "high_freq_proportion=0.25" in text


def test_what_olmo_core_has_not_is_refused() -> None:
    assert "use zero 3" in said("olmo-core", job_of("torchtitan", zero=2))
    assert "use zero 2" in said("olmo-core", job_of("torchtitan", zero=3, pp=2, dp=4))
    assert "not the exchange that was priced" in said("olmo-core", job_of("torchtitan", zero=3, cp=2, dp=4, cp_method=2))
    assert "ties its embeddings" in said("olmo-core", job_of("torchtitan", model="llama-3.2-1b", zero=3))
    assert "experts" in said("olmo-core", job_of("torchtitan", model="qwen3-30b-a3b", zero=3, ep=8))
    assert "trains every weight" in said("olmo-core", job_of("fsdp", zero=3, work={"lora_rank": 8}))


# ------------------------------------------------------------------------------------------------ Primus


def test_primus_overrides_are_megatrons_arguments() -> None:
    job = job_of("megatron", hardware="mi300x", zero=0, tp=2, pp=2, dp=2, sequence_parallel=1)
    files = files_of("primus", job)
    run, smoke = (yaml.safe_load(files[name])["modules"]["pre_trainer"] for name in ("primus.yaml", "primus-smoke.yaml"))
    one = run["overrides"]
    assert (run["framework"], one["pipeline_model_parallel_layout"], one["layernorm_epsilon"]) == ("megatron", "Et*16|t*16L", 1e-5)
    assert one["use_distributed_optimizer"] is False and one["add_bias_linear"] is False  # its defaults are others
    assert (one["mock_data"], smoke["overrides"]["mock_data"]) == (False, True)
    assert one["vocab_size"] == 128256 == 2 * one["make_vocab_size_divisible_by"]  # the rows as planned
    assert "primus-smoke.yaml" in files["smoke.sh"] and one["train_iters"] == "${TRAIN_ITERS:1000}"


def test_an_export_of_primus_is_read_back_without_a_question(tmp_path: Path) -> None:
    """Its variables of the corpus and the tokenizer have no default, and decide nothing."""
    layout = {"zero": 1, "ep": 8, "recompute": 1, "recompute_modules": int(Module.MOE)}
    for model, more in (("llama-3.1-8b", {"zero": 1, "cp": 2, "dp": 4}), ("gpt-oss-20b", layout), ("deepseek-v3", layout)):
        job = job_of("megatron", model=model, hardware="mi300x", **more)
        (tmp_path / "primus.yaml").write_text(files_of("primus", job)["primus.yaml"])
        found = read(tmp_path / "primus.yaml", given=Given(num_gpus=8))
        assert not found.unread and not [note for note in found.notes if "None" in note], (found.unread, found.notes)
        same = [name for name, value in found.fields.items() if value == getattr(job.layout, name)]
        assert {*more, "tp", "pp"} - {"dp"} <= set(same), (model, found.fields)
        assert found.model is not None and found.model.num_layers == job.model.num_layers


def test_what_primus_has_not_is_refused() -> None:
    assert "Primus is AMD's" in said("primus", job_of("megatron", zero=1))
    assert "optimizer muon" in said("primus", job_of("megatron", hardware="mi300x", zero=1, work={"optimizer": "muon"}))


@pytest.mark.parametrize(
    ("target", "file", "trainer"),
    [
        ("automodel", "automodel.yaml", "automodel+compile=off+loss=bf16"),
        ("automodel", "automodel.yaml", "automodel+compile=off+loss=fused_linear"),
        ("automodel", "automodel.yaml", "automodel+compile=off+loss=in_place"),
        ("torchtitan", "plan_config.py", "torchtitan+loss=pieces"),
    ],
)  # fmt: skip
def test_losses_of_an_export_are_read_back(tmp_path: Path, target: str, file: str, trainer: str) -> None:
    text = files_of(target, job_of(trainer, model="llama-3.1-8b", zero=3))[file]
    (tmp_path / file).write_text(text)
    assert read(tmp_path / file, given=Given(num_gpus=8)).trainer == trainer


# ------------------------------------------------------------------------------------------------ accelerate


@pytest.mark.parametrize(("precision", "mixed", "rank", "dtype"), [
    ("bf16", "bf16", 0, "float32"), ("bf16_true", "no", 0, "bfloat16"), ("bf16_true", "no", 8, "bfloat16"),
    ("fp32", "no", 0, "float32"),
])  # fmt: skip
def test_weights_in_bf16_run_without_mixed_precision(precision: str, mixed: str, rank: int, dtype: str) -> None:
    """accelerate knows no, fp16, bf16 and fp8, and brings what FSDP trains in mixed precision to fp32."""
    files = files_of("accelerate", job_of("fsdp", zero=3, work={"precision": precision, "lora_rank": rank}))
    settings = json.loads(files["training.json"])
    assert yaml.safe_load(files["accelerate.yaml"])["mixed_precision"] == mixed
    assert settings["training_arguments"]["bf16"] is (mixed == "bf16")
    assert (settings["dtype"], settings["autocast_adapters"]) == (dtype, precision != "bf16_true")

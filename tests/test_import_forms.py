"""Configurations as people have them, reduced: each is read as it is, or asks in one sentence for what decides time or memory."""

import re
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

FILES = Path(__file__).parent / "data" / "import"


def reading(name: str, settings: dict[str, str] | None = None, **given: Any) -> Reading:
    return read(FILES / name, None, Given(settings=settings or {}, **given))


def values(found: Reading, *names: str) -> list[Any]:
    """Fields of the layout, and of the reading, by name."""
    known = {**vars(found), **found.fields, "model": found.model.name if found.model else None}
    return [known[name] for name in names]


def asked(name: str, settings: dict[str, str] | None = None, **given: Any) -> list[str]:
    """What a file asks for."""
    with pytest.raises(OpenQuestionsError) as caught:
        found = reading(name, settings, **given)
        to_plan(found, {"num_gpus": given.get("num_gpus"), "hardware": "h100-sxm"})
    assert "\n" not in str(caught.value)
    return [one.name for one in caught.value.questions]


def test_a_megatron_script_with_variables_and_branches_is_read_as_it_is() -> None:
    found = reading("megatron_llama.sh")
    assert values(found, "model", "tp", "pp", "num_gpus", "micro_batch_size", "global_batch_size", "sequence_length") == [
        "llama-3.1-8b", 4, 2, 64, 1, 256, 8192]  # fmt: skip
    assert values(found, "sequence_parallel", "zero", "precision") == [0, 1, "fp8"]
    assert found.trainer == "megatron+gradient_dtype=bf16" and found.unread == ()
    assert {"save", "log_interval"} <= set(found.noise)
    plain = reading("megatron_llama.sh", {"PRECISION": "bf16", "TP": "8"})
    assert values(plain, "tp", "precision", "trainer") == [8, "bf16", "megatron"]
    plan = to_plan(found, {"hardware": "h100-sxm"})
    assert plan.layout.sequence_parallel == 0 and plan.layout.dp == 8


def test_megatron_fsdp_is_read_as_its_sharding() -> None:
    assert asked("megatron_fsdp.sh") == ["--gpus N"]
    found = reading("megatron_fsdp.sh", num_gpus=64)
    assert values(found, "model", "zero", "ep", "etp") == ["deepseek-v3", 3, 8, 1]
    assert found.trainer == "megatron-fsdp+gradient_dtype=bf16"
    assert values(reading("megatron_fsdp.sh", {"STRATEGY": "optim_grads"}, num_gpus=64), "zero") == [2]
    other = reading("megatron_fsdp.sh", {"FSDP": "0", "NODES": "16"})
    assert values(other, "zero", "num_gpus", "trainer") == [1, 128, "megatron+gradient_dtype=bf16"]


def test_old_names_and_quoted_blocks_of_bigscience() -> None:
    found = reading("bigscience.slurm")
    assert values(found, "trainer", "tp", "pp", "zero", "recompute", "num_gpus", "precision") == [
        "megatron-deepspeed", 4, 4, 1, 2, 128, "fp16"]  # fmt: skip
    assert found.model is not None and (found.model.vocab_size, found.model.num_layers) == (50257, 40)
    assert found.unread == ("--rampup-batch-size 32 32 1_000_000",)


def test_a_functional_test_asks_for_its_gpus_alone() -> None:
    assert asked("functional_test.yaml") == ["--gpus N"]
    found = reading("functional_test.yaml", num_gpus=8)
    assert values(found, "tp", "pp", "sequence_parallel", "micro_batch_size", "zero") == [2, 2, 0, 4, 0]
    assert to_plan(found, {"hardware": "h100-sxm"}).layout.dp == 2


def test_arguments_of_a_script_are_one_question() -> None:
    assert asked("several_sizes.sh") == ["ARGS"]
    found = reading("several_sizes.sh", {"ARGS": "70B 8"})
    assert values(found, "tp", "num_gpus") == [8, 16] and found.model is not None and found.model.num_layers == 80
    small = reading("several_sizes.sh", {"SIZE": "8B", "TP": "2"})
    assert values(small, "model", "tp") == ["llama-3-8b", 2]
    assert asked("several_sizes.sh", {"SIZE": "8B"}) == ["TP"]
    with pytest.raises(PlannerError, match=r"--set PP_SIZ: .* has no variable or setting of that name"):
        reading("several_sizes.sh", {"ARGS": "70B 8", "PP_SIZ": "2"})


def test_torchtitan_keeps_states_in_the_dtype_of_training() -> None:
    assert asked("torchtitan.toml") == ["--gpus N"]
    found = reading("torchtitan.toml", num_gpus=64)
    assert values(found, "model", "precision", "tp", "dp", "zero", "recompute") == [
        "llama-3.1-405b",
        "bf16_true",
        8,
        8,
        3,
        2,
    ]
    said = {"hardware": "h200-sxm"}
    half, whole = (
        to_plan(reading("torchtitan.toml", dtype, num_gpus=64), said).prediction.memory_gib
        for dtype in ({}, {"training.dtype": "float32"})
    )
    assert half["optimizer_states"] == pytest.approx(whole["optimizer_states"] / 2)


def test_torchtitan_of_today_counts_tokens_and_has_many_functions() -> None:
    assert asked("config_registry.py", num_gpus=16) == ["config"]
    found = reading("config_registry.py", {"config": "llama3_8b"}, num_gpus=16)
    assert values(found, "model", "dp", "micro_batch_size", "global_batch_size", "sequence_length") == [
        "llama-3.1-8b", 16, 2, 32, 8192]  # fmt: skip
    wide = reading("config_registry.py", {"config": "llama3_8b_wide"}, num_gpus=16)
    assert values(wide, "tp", "dp", "num_microbatches", "global_batch_size") == [2, 8, 4, 64]


def test_auto_of_deepspeed_is_what_the_command_line_says() -> None:
    assert asked("ds_auto.json") == ["--micro-batch-size M", "--gpus N"]
    found = reading(
        "ds_auto.json", {"gradient_checkpointing": "true"}, num_gpus=16, micro_batch_size=2, global_batch_size=64
    )
    assert values(found, "zero", "micro_batch_size", "num_microbatches", "recompute", "precision") == [
        3,
        2,
        2,
        2,
        "bf16",
    ]
    unsaid = reading("ds_auto.json", num_gpus=16, micro_batch_size=2, global_batch_size=64)
    assert [one.name for one in unsaid.questions] == ["gradient_checkpointing"]


def test_primus_says_its_overrides_over_its_defaults() -> None:
    assert asked("primus.yaml") == ["--gpus N"]
    found = reading("primus.yaml", {"PRIMUS_TP": "4"}, num_gpus=8)
    assert values(found, "tp", "sequence_parallel", "zero", "micro_batch_size", "global_batch_size") == [
        4,
        1,
        1,
        2,
        128,
    ]
    assert found.trainer == "megatron+loss_fusion=on"


def test_a_configuration_of_mlperf() -> None:
    assert asked("config_DGXH100_256x8x72.sh") == ["FP8"]
    found = reading("config_DGXH100_256x8x72.sh", {"FP8": "True"})
    assert values(found, "tp", "pp", "cp", "vpp", "num_gpus", "global_batch_size", "precision") == [
        8,
        8,
        2,
        8,
        2048,
        1152,
        "fp8",
    ]
    assert values(found, "first_stage_layers", "last_stage_layers", "sequence_length") == [15, 15, 8192]
    assert found.hardware == "h100-sxm"


def test_mlperf_of_5_1_says_degrees_in_short_names(tmp_path: Path) -> None:
    lora = tmp_path / "llama2_70b_lora" / "config_DGXB200_8x8x1xtp1pp1cp8.sh"
    lora.parent.mkdir()
    lora.write_text("export MINIBS=1 TP=2 PP=1 CP=4 SP=False\nexport DGXNNODES=8\nexport DGXNGPU=8 FP8=True FP8_PARAM_GATHER=0\n")
    found = read(lora, None, Given())
    assert values(found, "tp", "cp", "global_batch_size", "frozen_weights", "hardware", "sequence_parallel") == [
        2, 4, 8, "bf16", "b200-sxm", 0]  # fmt: skip
    amd = tmp_path / "config_MI355X_1x8x1_8b.sh"
    text = 'export MLPERF_SUBMISSION_ORG="AMD" NNODES=1 GPUS_PER_NODE=8 SIZE="8b" GBS=32 MBS=2 TP=1 PP=1 CP=1\n'
    amd.write_text(text)
    with pytest.raises(OpenQuestionsError, match="FP8=True"):
        read(amd, None, Given())
    amd.write_text(text + "export FP4=True FP8=False RECOMPUTE_GRANULARITY=full\n")
    found = read(amd, None, Given())
    assert values(found, "model", "micro_batch_size", "global_batch_size", "precision", "hardware", "recompute") == [
        "llama-3.1-8b", 2, 32, "nvfp4", "mi355x", 2]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", "moments in bf16 and fp8"),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "master weights in fp16"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 changes how states are sharded, which is not priced"),
        ("--num-distributed-optimizer-instances 2", "--set num_distributed_optimizer_instances=1 imports the job without it"),
        ("--hybrid-layer-pattern MEM*", "is an architecture that its sizes do not tell"),
        ("--num-experts 64 --deepspeed", "experts of Megatron-DeepSpeed are not priced"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "data_parallel_sharding_strategy is 'all'"),
    ],
)
def test_what_decides_memory_and_cannot_be_said_is_refused(arguments: str, says: str, tmp_path: Path) -> None:
    sizes = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 4096"
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --micro-batch-size 1 --bf16 {arguments}\n"
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(PlannerError, match=re.escape(says)):
        to_plan(read(tmp_path / "train.sh"), {"hardware": "h100-sxm"})


def test_the_command_prints_what_was_left_out(run, tmp_path: Path) -> None:
    result = run("import", str(FILES / "megatron_llama.sh"), "--set", "TP=8", "--hardware", "h100-sxm")
    assert result.exit_code == 0 and "settings that change neither time nor memory" in result.output, result.output
    result = run("import", str(FILES / "several_sizes.sh"))
    assert result.exit_code == 2 and "say --set ARGS=VALUE" in " ".join(result.output.split())
    result = run("import", str(FILES / "several_sizes.sh"), "--set", "SIZE")
    assert result.exit_code == 2 and "write it as NAME=VALUE" in result.output


def test_no_sharding_can_be_said_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 4096\nbf16: true\n")

    def zero(word: str) -> int:
        found = read(file, "trl", Given(num_gpus=8, settings={"fsdp": word}))
        return to_plan(found, {"num_gpus": 8, "hardware": "h100-sxm"}).layout.zero

    assert [zero(word) for word in ("no_shard", "full_shard auto_wrap", "shard_grad_op")] == [0, 3, 2]
    with pytest.raises(PlannerError, match="fsdp is 'shard'; a plan knows full_shard, "):
        zero("shard")
    for word in ("none", "false"):
        with pytest.raises(OpenQuestionsError, match="--set fsdp=no_shard where every GPU holds the whole model"):
            zero(word)

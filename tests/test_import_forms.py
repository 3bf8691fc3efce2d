"""Configurations as people have them, reduced: each is read as it is, or asks in one sentence for what decides time or memory."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.layout import CpMethod
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.torchtitan import forms as torchtitan_forms
from planner.trainers.torchtitan import python_modules as torchtitan_modules

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
    others = ["gradient_checkpointing", "--model NAME", "--sequence-length S"]
    assert asked("ds_auto.json") == ["--micro-batch-size M", "--gpus N", *others]
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
    assert any("6 bytes a logit, as from 2.18 on" in one for one in found.notes)


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
        ("--num-distributed-optimizer-instances 2", "--set num_distributed_optimizer_instances=1 imports the job without it"),
        ("--hybrid-layer-pattern MEM*", "is an architecture that its sizes do not tell"),
        ("--num-experts 64 --deepspeed --no-pipeline-parallel --mlp-type residual",
         "--mlp-type decides memory or degrees and is not priced"),
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


MEGATRON = "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
MEGATRON += "--seq-length 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 "


def script(directory: Path, more: str, settings: dict[str, str] | None = None) -> Reading:
    """A script of Megatron-LM with more arguments, read."""
    (directory / "train.sh").write_text(MEGATRON + more)
    return read(directory / "train.sh", None, Given(settings=settings or {}))


def test_a_tokenizer_of_its_own_leaves_the_vocabulary_open(tmp_path: Path) -> None:
    own = "--tokenizer-type Llama2Tokenizer --tokenizer-model $DIR/own-tokenizer-100k.ver3.model"
    with pytest.raises(OpenQuestionsError, match=r"--set vocab_size=VALUE .*'own-tokenizer-100k.ver3.model' is a tokenizer"):
        script(tmp_path, own)
    assert script(tmp_path, own, {"vocab_size": "99574"}).model.vocab_size == 99574
    usual = "--tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model"
    assert script(tmp_path, usual + " --ffn-hidden-size 4000").model.vocab_size == 32000
    with pytest.raises(OpenQuestionsError, match=r"--set vocab_size=32000\|50257"):  # sizes of a GPT-3
        script(tmp_path, usual)


def test_arguments_of_forks_are_said_in_megatrons_words(tmp_path: Path) -> None:
    moe = "--vocab-size 32000 --num-experts 8 --moe-intermediate-size 512 --n-shared-experts 2 "
    moe += "--first-k-dense-replace 1 --moe-layer-freq 1 "
    model = script(tmp_path, moe + "--expert-model-parallel-size 8 --swiglu").model
    assert (model.num_dense_layers, model.expert_ffn_size, model.shared_expert_ffn_size) == (1, 512, 1024)
    assert script(tmp_path, moe.replace("replace 1", "replace -1").replace("freq 1", "freq -1")).model.num_dense_layers == 0
    ulysses = script(tmp_path, "--vocab-size 32000 --context-parallel-size 4 --context-parallel-algo ulysses_cp_algo")
    assert values(ulysses, "cp", "cp_method") == [4, int(CpMethod.A2A)]
    assert script(tmp_path, "--vocab-size 49152 --attention-head-type multiquery").model.num_kv_heads == 1
    lora = script(tmp_path, "--vocab-size 32000 --lora-r 16 --lora-target-modules linear_qkv linear_proj")
    assert values(lora, "lora_rank", "lora_targets", "frozen_weights") == [16, "attention", "bf16"]


@pytest.mark.parametrize(
    "argument", ["--swap-attention", "--kd", "--num-layers-teacher 24", "--my-offload-states", "--reuse-fp32-param"]
)
def test_an_unknown_argument_that_decides_memory_is_refused(argument: str, tmp_path: Path) -> None:
    name = argument.split()[0].removeprefix("--").replace("-", "_")
    says = f"{argument.split()[0]} decides memory or degrees and is not priced; --set {name}=false"
    with pytest.raises(PlannerError, match=says):
        script(tmp_path, "--vocab-size 32000 " + argument)
    assert script(tmp_path, "--vocab-size 32000 " + argument, {name: "false"}).model.vocab_size == 32000


def test_a_script_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    text = "CHECKPOINT=<Path to it (e.g. /345m)>\n" + MEGATRON.replace("pretrain_gpt", "tools/text_generation")
    (tmp_path / "quantise.sh").write_text(text)
    with pytest.raises(PlannerError, match=r"it starts 'tools/text_generation.py', which trains nothing"):
        read(tmp_path / "quantise.sh", None, Given())


def test_torchtitan_settings_of_a_module_of_its_own_ask_for_the_experts_degree(tmp_path: Path) -> None:
    text = '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nlocal_batch_size = 2\nseq_len = 1024\n'
    text += '[parallelism]\ndata_parallel_shard_degree = 2\n[experimental]\ncustom_args_module = "own.args"\n'
    file = tmp_path / "own.toml"
    file.write_text(text + '[activation_checkpoint]\nmode = "full"\n')
    with pytest.raises(OpenQuestionsError, match=r"--set parallelism.expert_parallel_degree=VALUE"):
        read(file, None, Given(model="deepseek-v2-lite"))
    found = read(file, None, Given(model="deepseek-v2-lite", settings={"parallelism.expert_parallel_degree": "2"}))
    assert values(found, "ep", "dp") == [2, 2]


def test_verl_takes_the_defaults_of_the_version_around_the_script(tmp_path: Path) -> None:
    config = tmp_path / "verl" / "trainer" / "config" / "ppo_megatron_trainer.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("actor_rollout_ref:\n  model: {enable_gradient_checkpointing: false}\n"
                      "  actor: {megatron: {tensor_model_parallel_size: 4}}\n")  # fmt: skip
    config.with_name("ppo_trainer.yaml").write_text("actor_rollout_ref: {model: {enable_gradient_checkpointing: false}}\n")
    (tmp_path / "examples").mkdir()
    file = tmp_path / "examples" / "run.sh"
    text = "python3 -m verl.trainer.main_ppo {} actor_rollout_ref.model.path=meta-llama/Llama-2-7b-hf "
    text += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8"
    file.write_text(text.format("--config-name=ppo_megatron_trainer"))
    assert values(read(file, None, Given()), "tp", "dp") == [4, 2]
    file.write_text(text.format(""))
    assert values(read(file, None, Given()), "tp", "recompute") == [1, 0]


def test_a_program_of_its_own_is_asked_which_layers_it_adapts(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("torchrun --nproc_per_node 8 own/train.py --model_name_or_path meta-llama/Llama-2-7b-hf "
        "--bf16 True --per_device_train_batch_size 4 --lora_enable True --lora_r 64 --model_max_length 2048\n")  # fmt: skip
    says = r"--set lora_target_modules=all-linear\|q_proj,v_proj .*--set torch_dtype=bfloat16"
    with pytest.raises(OpenQuestionsError, match=says):
        to_plan(read(tmp_path / "train.sh", None, Given()), {"hardware": "h100-sxm"})
    settings = {"lora_target_modules": "all-linear", "torch_dtype": "bfloat16"}
    found = read(tmp_path / "train.sh", None, Given(settings=settings))
    assert values(found, "lora_rank", "lora_targets", "frozen_weights") == [64, "all", "bf16"]
    plain = (tmp_path / "train.sh").read_text().replace("enable True", "enable False")
    (tmp_path / "train.sh").write_text(plain)
    assert read(tmp_path / "train.sh", None, Given()).lora_rank == 0
    (tmp_path / "train.sh").write_text(plain.replace("2048", "2048 --tune_mm_mlp_adapter True"))
    with pytest.raises(PlannerError, match="tune_mm_mlp_adapter trains a part of the model"):
        read(tmp_path / "train.sh", None, Given())
    (tmp_path / "train.sh").write_text(plain.replace("--lora_enable False --lora_r 64", "--lora_enable True --bits 4"))
    with pytest.raises(OpenQuestionsError, match=r"--set lora_r=VALUE \(rank of the adapters of train.py\)"):
        to_plan(read(tmp_path / "train.sh", None, Given()), {"hardware": "h100-sxm"})


def test_what_is_open_is_asked_at_once_and_evaluation_is_no_training(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match=r"--set BACKEND=VALUE .*--set vocab_size=VALUE"):
        script(tmp_path, "--attention-backend $BACKEND --tokenizer-type HuggingFaceTokenizer --tokenizer-model own/tokenizer")
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo +trainer.val_only=true actor_rollout_ref.model.path=a/b\n")
    with pytest.raises(PlannerError, match="it evaluates a model and trains nothing"):
        read(tmp_path / "run.sh", None, Given())
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo distillation.enabled=True actor_rollout_ref.x=1\n")
    with pytest.raises(PlannerError, match="distillation from a teacher is not modelled"):
        read(tmp_path / "run.sh", None, Given())
    (tmp_path / "flux.toml").write_text("[training]\nlocal_batch_size = 4\nimg_size = 256\n[parallelism]\n")
    with pytest.raises(PlannerError, match="it trains a model of images"):
        read(tmp_path / "flux.toml", None, Given())
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo --config-path . --config-name own trainer.nnodes=1\n")
    with pytest.raises(PlannerError, match="it names the configuration 'own', which is not there"):
        read(tmp_path / "run.sh", None, Given())
    (tmp_path / "run.sh").write_text('accelerate launch --num_processes 8 sft.py "$@"\n')
    with pytest.raises(PlannerError, match="arguments come from who calls this script"):
        read(tmp_path / "run.sh", None, Given())
    with pytest.raises(PlannerError, match=r"tasks/main.py is an architecture that its sizes do not tell"):
        (tmp_path / "bert.sh").write_text(MEGATRON.replace("pretrain_gpt.py", "./tasks/main.py --task MNLI"))
        read(tmp_path / "bert.sh", None, Given())


def test_sections_of_flagscale_are_arguments_of_megatron(tmp_path: Path) -> None:
    file = tmp_path / "7b.yaml"
    file.write_text(
        "system:\n  tensor_model_parallel_size: 2\n  sequence_parallel: true\n  precision: {bf16: true}\n"
        "model:\n  num_layers: 4\n  hidden_size: 512\n  num_attention_heads: 8\n  seq_length: 2048\n  micro_batch_size: 1\n"
        "  global_batch_size: 8\n  optimizer: {lr: 1e-4}\ndata:\n  tokenizer: {vocab_size: 32000}\n"
    )
    found = read(file, None, Given(num_gpus=4))
    assert values(found, "tp", "sequence_parallel", "global_batch_size", "precision") == [2, 1, 8, "bf16"]


def test_no_sharding_can_be_said_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-8B\nmax_length: 4096\nbf16: true\ngradient_checkpointing: true\n")

    def zero(word: str) -> int:
        found = read(file, "trl", Given(num_gpus=8, settings={"fsdp": word}))
        return to_plan(found, {"num_gpus": 8, "hardware": "h100-sxm"}).layout.zero

    assert [zero(word) for word in ("no_shard", "full_shard auto_wrap", "shard_grad_op")] == [0, 3, 2]
    with pytest.raises(PlannerError, match="fsdp is 'shard'; a plan knows full_shard, "):
        zero("shard")
    for word in ("none", "false"):
        with pytest.raises(OpenQuestionsError, match="--set fsdp=no_shard where every GPU holds the whole model"):
            zero(word)


def test_functions_of_a_module_are_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve, each of which calls all that stand before it: which of them makes a configuration is asked of each of each."""
    lines = ["def f0():", "    return Trainer.Config(parallelism=ParallelismConfig(), training=TrainingConfig(local_batch_size=1))"]
    for number in range(1, 12):
        lines += [f"def f{number}():", *(f"    f{one}()" for one in range(number)), "    return None"]
    (tmp_path / "configs.py").write_text("\n".join(lines))
    walked, own = list[int](), ast.walk
    monkeypatch.setattr(torchtitan_modules.ast, "walk", lambda node: walked.append(1) or own(node))
    given = Given(num_gpus=8, settings={"config": "f0"})
    assert torchtitan_forms.sections(tmp_path / "configs.py", (tmp_path / "configs.py").read_text(), given)["training"]
    assert len(walked) <= 15

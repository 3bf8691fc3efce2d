"""What scripts and configurations of people say in other commands, in recipes and in words of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.layout import CpMethod, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.shell import evaluate


def words(text: str) -> str:
    return " ".join(evaluate(text, "train.sh", {}).commands[-1].words)


def reading(folder: Path, name: str, text: str, gpus: int | None = None, **settings: str) -> Reading:
    (folder / name).write_text(text)
    return read(folder / name, None, Given(num_gpus=gpus, settings=settings))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('A="--x 1\n  --y 2"\nrun $(echo "$A" | tr \'\\n\' \' \')', "run --x 1 --y 2"),
        ('A="--x 1\n  --y 2"\nrun $(echo $A | sed \'s/  \\+/ /g\' | xargs)', "run --x 1 --y 2"),
        ('A="--x  1"\nrun $(echo "$A" | sed -E "s/[[:space:]]+/ /g")', "run --x 1"),
        ("IFS=',' read -r T P <<< \"2,4\"\nrun --t $T --p $P", "run --t 2 --p 4"),
        ('read -r T P <<< "2 4 6"\nrun --t $T --p "$P"', "run --t 2 --p 4 6"),
        ("IFS=: read -ra ALL <<< 1:2:3\nrun --n ${#ALL[@]} --x ${ALL[2]}", "run --n 3 --x 3"),
        ("IFS=, read -r T P <<< 2,\nrun --t $T --p=$P", "run --t 2 --p="),
    ],
)
def test_texts_through_other_commands(text: str, said: str) -> None:
    assert words(text) == said


def test_a_line_that_stays_open_is_asked_for_with_its_values(tmp_path: Path) -> None:
    text = """for C in 2,4 4,2; do
    IFS=, read -r TP PP <<< "$C"
    torchrun --nproc_per_node 8 run_recipe.py --recipe llama32_1b_pretrain_config \\
        model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP
done"""
    with pytest.raises(OpenQuestionsError, match=r"--set C=2,4\|4,2"):
        read_to_plan(reading(tmp_path, "t.sh", text))
    found = reading(tmp_path, "t.sh", text, C="4,2")
    assert (found.fields["tp"], found.fields["pp"], found.fields["dp"]) == (4, 2, 1)


def read_to_plan(found: Reading) -> None:
    from planner.trainers.reading.configuration import to_plan

    to_plan(found)


def test_arguments_that_another_command_writes_are_never_dropped(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 run_recipe.py --recipe llama32_1b_pretrain_config $(./more_arguments)"
    with pytest.raises(PlannerError, match="the output of another command"):
        reading(tmp_path, "t.sh", text)
    assert reading(tmp_path, "t.sh", text.replace("$(./more", "model.seq_length=4096 --save $(./more")).sequence_length == 4096


def test_how_a_recipe_sends_over_its_context_parallel_ranks(tmp_path: Path) -> None:
    """The published recipes of 32 and 128 thousand tokens say a2a; a plan of a ring has other traffic and other limits."""
    text = "torchrun --nproc_per_node 8 run_recipe.py --recipe qwen3_600m_sft_128k_config"
    assert reading(tmp_path, "t.sh", text).fields["cp_method"] == CpMethod.A2A
    assert reading(tmp_path, "t.sh", text + " model.cp_comm_type=p2p").fields["cp_method"] == CpMethod.RING
    with pytest.raises(PlannerError, match="cp_comm_type is 'a2a\\+p2p'; a plan knows"):
        reading(tmp_path, "t.sh", text + " model.cp_comm_type=a2a+p2p")


RECIPE = """
model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 1
max_seq_length: 1024
gradient_checkpointing: true
bf16: true
fsdp: full_shard
"""


def test_an_optimizer_under_another_word_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="optimizer_type, which is 'rmsprop'"):
        read_to_plan(reading(tmp_path, "a.yaml", RECIPE + "optimizer_type: rmsprop\n", 8))
    found = reading(tmp_path, "a.yaml", RECIPE + "optimizer_type: rmsprop\n", 8, optim="lion")
    assert found.optimizer == "lion" and not found.questions
    assert not reading(tmp_path, "a.yaml", RECIPE + "optimizer_type: AdamW\n", 8).questions
    with pytest.raises(PlannerError, match="slic is not modelled"):
        reading(tmp_path, "a.yaml", RECIPE + "algorithm: slic\n", 8)


ADAPTERS = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: lora\nlora_rank: 4\nbf16: false\n"


def test_a_frozen_model_of_llama_factory_keeps_its_own_dtype(tmp_path: Path) -> None:
    """Where neither bf16 nor fp16 is said its model is loaded as it was saved, but ZeRO-3 builds it in fp32."""
    found = reading(tmp_path, "a.yaml", ADAPTERS, 2, deepspeed="zero2")
    assert (found.precision, found.frozen_weights) == ("bf16", "bf16")
    found = reading(tmp_path, "a.yaml", ADAPTERS, 2, deepspeed="zero3")
    assert (found.precision, found.frozen_weights) == ("fp32", "fp32")
    assert reading(tmp_path, "a.yaml", ADAPTERS.replace("lora\n", "full\n"), 2, deepspeed="zero2").precision == "fp32"


def test_a_file_that_only_starts_llama_factory_names_the_one_to_import(tmp_path: Path) -> None:
    text = "target: cluster\njobs:\n- command:\n  - torchrun --nproc_per_node=8 src/train.py configs/dpo.yaml\n"
    with pytest.raises(PlannerError, match="none of its settings; import configs/dpo.yaml"):
        reading(tmp_path, "job.yaml", text, 8)


def test_a_program_of_another_library_is_no_program_of_transformers(tmp_path: Path) -> None:
    program = "from megatron.bridge.recipes.llama import llama32_1b_pretrain_config\nconfig = llama32_1b_pretrain_config()\n"
    (tmp_path / "go.py").write_text(program)
    with pytest.raises(PlannerError, match="trains with Megatron-Bridge; import go.py"):
        reading(tmp_path, "t.sh", "torchrun --nproc_per_node=8 go.py")


TITAN = """[model]
name = "FAMILY"
flavor = "FLAVOR"
[training]
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


@pytest.mark.parametrize(
    ("family", "flavor", "preset"),
    [("llama4", "17bx16e", "llama-4-scout"),
     ("deepseek_v3", "16B_flex", "deepseek-v2-lite"), ("deepseek_v3", "671B", "deepseek-v3")],
)  # fmt: skip
def test_flavours_of_torchtitan(tmp_path: Path, family: str, flavor: str, preset: str) -> None:
    text = TITAN.replace("FAMILY", family).replace("FLAVOR", flavor)
    found = reading(tmp_path, "a.toml", text)
    assert found.model is not None and found.model.name == preset and found.trainer == "torchtitan"
    assert reading(tmp_path, "a.toml", text + 'components = ["loss"]\n').trainer == "torchtitan+compile=off"
    assert reading(tmp_path, "a.toml", text + 'components = ["model", "loss"]\n').trainer == "torchtitan"


STEP = """deepspeed --module here.train_sft --pretrain Qwen/Qwen2.5-7B --max_len 2048 --train_batch_size 128 \\
    --micro_train_batch_size 4 --zero_stage 3 --bf16 --gradient_checkpointing"""


def test_the_batch_of_a_step_and_that_of_a_forward_pass(tmp_path: Path) -> None:
    found = reading(tmp_path, "t.sh", STEP, 8)
    assert (found.global_batch_size, found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (128, 4, 4)
    assert (found.sequence_length, found.model_name, found.fields["zero"]) == (2048, "Qwen/Qwen2.5-7B", 3)
    with pytest.raises(OpenQuestionsError, match="per_device_train_batch_size=VALUE"):
        read_to_plan(reading(tmp_path, "t.sh", STEP.replace("--micro_train_batch_size 4", ""), 8))


def test_a_program_whose_training_lies_in_other_modules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("import deepspeed\n")
    (tmp_path / "go.py").write_text("import argparse\nfrom loop import train\ntrain()\n")
    with pytest.raises(PlannerError, match="go.py trains with modules of its own, which are not read"):
        reading(tmp_path, "t.sh", "deepspeed go.py --config_path a.yaml", 8)


def test_frozen_weights_in_two_bits_are_not_those_in_four(tmp_path: Path) -> None:
    text = ADAPTERS.replace("Qwen/Qwen2.5-7B", "someone/Llama-2-7b-AQLM-2Bit-1x16")
    with pytest.raises(PlannerError, match="fewer than 4 bits"):
        reading(tmp_path, "a.yaml", text, 1)
    assert reading(tmp_path, "a.yaml", text.replace("2Bit-1x16", "4Bit"), 1).frozen_weights == "nf4"


def test_workers_of_ray_are_its_gpus(tmp_path: Path) -> None:
    found = reading(tmp_path, "a.yaml", ADAPTERS + "ray_num_workers: 4\n")
    assert found.num_gpus == 4 and found.fields["zero"] == 0 and not found.questions


YAML = """language_model:
  num_layers: 8
  hidden_size: 1024
  num_attention_heads: 16
  activation_func: swiglu
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: true
  bf16: true
micro_batch_size: 2
global_batch_size: 64
seq_length: 2048
padded_vocab_size: 32000
"""


def test_a_script_that_names_its_yaml_of_megatron(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg conf/gpt.yaml --save x"
    with pytest.raises(OpenQuestionsError, match=r"--set config_file=FILE \(it names 'conf/gpt.yaml'"):
        reading(tmp_path, "t.sh", text)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "gpt.yaml").write_text(YAML)
    found = reading(tmp_path, "t.sh", text)
    assert (found.fields["tp"], found.num_gpus, found.global_batch_size, found.sequence_length) == (2, 8, 64, 2048)
    found = reading(tmp_path, "t.sh", text + " --seq-length 1024")
    assert found.sequence_length == 2048 and any("--seq-length of the command line" in one for one in found.notes)


MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 --padded-vocab-size 32000 --bf16
    --tensor-model-parallel-size 2 --use-distributed-optimizer"""


def test_words_of_megatron_that_decide_memory(tmp_path: Path) -> None:
    """Full recompute under its old name, gradients summed in bf16, tp without sequence parallelism."""
    text = MEGATRON.replace("\n", " ")
    assert reading(tmp_path, "t.sh", text).fields["sequence_parallel"] == 0
    text += " --sequence-parallel"
    plain = reading(tmp_path, "t.sh", text)
    assert plain.fields["sequence_parallel"] == 1 and plain.fields["recompute"] == 0
    assert reading(tmp_path, "t.sh", text + " --checkpoint-activations").fields["recompute"] == Recompute.FULL
    assert "gradient_dtype=bf16" in reading(tmp_path, "t.sh", text + " --grad-reduce-in-bf16").trainer
    low = text + " --use-precision-aware-optimizer --main-grads-dtype bf16"
    assert "gradient_dtype=bf16" in reading(tmp_path, "t.sh", low).trainer
    for words in ("--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype fp32"):  # the last word of each counts
        assert "gradient_dtype=bf16" not in reading(tmp_path, "t.sh", f"{low} {words}").trainer

"""Programs of fine-tuning as people write them: what they load, hold on the host, comment out or call by words of their own."""

from pathlib import Path

import pytest

from planner.api import estimate, import_config
from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError


def names(found: Reading) -> list[str]:
    return [one.name for one in found.questions]


def script(folder: Path, program: str, command: str, said: Given | None = None) -> Reading:
    (folder / "tune.py").write_text(program)
    (folder / "run.sh").write_text(command)
    return read(folder / "run.sh", None, said or Given())


TRL = """
import torch
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
%s
SFTTrainer(model_args.model_name_or_path, args=training_args, train_dataset=d, peft_config=get_peft_config(model_args)).train()
"""
COMMAND = (
    "accelerate launch --num_processes 4 --mixed_precision bf16 --use_deepspeed --zero_stage 2 tune.py --model_name_or_path "
    "Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --gradient_checkpointing --use_peft --lora_r 64 --lora_target_modules "
    "all-linear --max_length 4096\n"
)


def test_what_a_trainer_loads_its_model_with_stands_in_its_program(tmp_path: Path) -> None:
    """model_init_kwargs that a program puts into the arguments count, whatever the command leaves unsaid."""
    words = "kwargs = dict(use_cache=False, torch_dtype=torch.bfloat16)\ntraining_args.model_init_kwargs = kwargs"
    found = script(tmp_path, TRL % words, COMMAND)
    assert (names(found), found.frozen_weights) == ([], "bf16")
    alone = COMMAND.replace("--use_deepspeed --zero_stage 2", "--multi_gpu")  # DeepSpeed brings all weights to bf16 by itself
    assert "torch_dtype" in names(script(tmp_path, TRL % "", alone))
    assert (found.frozen_weights, names(script(tmp_path, TRL % "", COMMAND))) == ("bf16", [])


@pytest.mark.parametrize(("kwargs", "frozen"), [
    ('{"torch_dtype": torch.bfloat16, "attn_implementation": "flash_attention_2"}', "bf16"), ('{"torch_dtype": "float32"}', "fp32"),
    ('{"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)}', "nf4_dq"),
])  # fmt: skip
def test_a_program_that_names_its_model_loads_it_as_it_says(tmp_path: Path, kwargs: str, frozen: str) -> None:
    (tmp_path / "tune.py").write_text(f"""
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
args = SFTConfig(per_device_train_batch_size=2, max_length=2048, bf16=True, gradient_checkpointing=True, model_init_kwargs={kwargs})
trainer = SFTTrainer("Qwen/Qwen2.5-7B", args=args, train_dataset=d, peft_config=LoraConfig(r=8, target_modules="all-linear"))
trainer.train()
""")
    found = read(tmp_path / "tune.py", None, Given(num_gpus=1))
    assert found.frozen_weights == frozen
    assert ("attention_kernel=fa2" in found.trainer) is ("flash" in kwargs)


def test_a_condition_over_what_stands_under_itself_is_not_known(tmp_path: Path) -> None:
    """'if a.b is None and a.c: a.b = ...' was followed without an end."""
    words = """
if training_args.kept is None or training_args.kept == 0:
    training_args.kept = 1
if training_args.kept == 1:
    adapters = LoraConfig(r=8)
"""
    found = script(tmp_path, f"from peft import LoraConfig\n{TRL % words}", COMMAND)
    assert found.fields["micro_batch_size"] == 2


def test_a_trainer_of_the_project_is_not_read_as_that_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/loop.py").write_text("class Trainer:\n    def train(self):\n        pass\n")
    program = """
import argparse
from transformers import AutoModelForCausalLM
from parts.loop import Trainer
parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path")
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
args = parser.parse_args()
Trainer(args=args, model=AutoModelForCausalLM.from_pretrained(args.model_name_or_path)).train()
"""
    command = "python tune.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 4 --max_seq_length 512\n"
    with pytest.raises(PlannerError, match="Trainer is not the one of TRL or transformers"):
        script(tmp_path, program, command)
    (tmp_path / "parts/loop.py").write_text("from transformers import Trainer as T\nclass Trainer(T.Trainer):\n    pass\n")
    assert script(tmp_path, program, command).fields["micro_batch_size"] == 4
    with pytest.raises(PlannerError, match="tune.py trains with JAX"):
        script(tmp_path, f"import jax\n{program}", command)


def test_states_on_the_host_stay_there_with_one_gpu(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    words = "--model_name_or_path Qwen/Qwen2.5-7B --bf16 --max_length 512 --per_device_train_batch_size 1 --gradient_checkpointing"
    found = script(tmp_path, TRL % "", f"torchrun --nproc_per_node 1 tune.py --deepspeed zero2.json {words}\n")
    assert (found.fields["zero"], found.fields["offload_optimizer"], found.fields["dp"]) == (2, 100, 1)


def test_options_behind_commented_ones_belong_to_the_command(tmp_path: Path) -> None:
    command = r"""
torchrun --nproc_per_node 2 tune.py \
    --model_name_or_path Qwen/Qwen2.5-7B \
    # --resume_from_checkpoint out/last \
    --per_device_train_batch_size 6 \
    --gradient_accumulation_steps 2 \
    # --max_steps 10 \
    # --fp16 \
    --bf16 --torch_dtype bfloat16 --gradient_checkpointing --max_length 512

# --per_device_train_batch_size 1
echo done
"""
    found = script(tmp_path, TRL % "", command)
    assert (found.fields["micro_batch_size"], found.global_batch_size, found.precision) == (6, 24, "bf16_true")
    assert found.model_name == "Qwen/Qwen2.5-7B"


FLAT = """
model_name_or_path: Qwen/Qwen2.5-7B
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
gradient_checkpointing: true
max_length: 1024
fsdp: no_shard
"""


def test_adapters_that_a_program_goes_on_with_are_asked_for_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text(f"{FLAT}beta: 0.1\nfirst_adapter_path: out/first\n")
    assert names(read(tmp_path / "tune.yaml", None, Given())) == ["use_peft", "lora_r", "lora_target_modules", "torch_dtype"]
    answers = {"use_peft": "true", "lora_r": "16", "lora_target_modules": "all-linear", "torch_dtype": "bfloat16"}
    found = read(tmp_path / "tune.yaml", None, Given(settings=answers))
    assert (names(found), found.lora_rank, found.frozen_weights) == ([], 16, "bf16")
    (tmp_path / "tune.yaml").write_text(f"{FLAT}lora_output_dir: out/adapters\n")
    assert names(read(tmp_path / "tune.yaml", None, Given())) == []


def test_words_of_adapters_that_trl_does_not_have_leave_the_dtype_to_their_program(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text(f"{FLAT}use_lora: true\nlora_r: 16\ntarget_modules: [q_proj, v_proj]\n")
    assert names(read(tmp_path / "tune.yaml", None, Given())) == ["torch_dtype"]
    (tmp_path / "tune.yaml").write_text(f"{FLAT}use_peft: true\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\n")
    assert names(read(tmp_path / "tune.yaml", None, Given())) == []


def test_a_switch_that_is_asked_for_says_its_answers(tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text("""
from trl import SFTConfig, SFTTrainer
args = SFTConfig(per_device_train_batch_size=2, max_length=2048, bf16=True, gradient_checkpointing=use_it(), optim=choose())
SFTTrainer("Qwen/Qwen2.5-7B", args=args, train_dataset=d).train()
""")
    said = Given(num_gpus=1)
    read(tmp_path / "tune.py", None, said)
    asked = {one.name: one.choices for one in said.questions}
    assert asked["gradient_checkpointing"] == ("true", "false")
    assert "adamw_torch" in asked["optim"]


@pytest.mark.parametrize(("files", "answers"), [
    ('"$@"', ("FILE",)), ("a.yaml b.yaml", ("a.yaml", "b.yaml")), ('"${FILES[@]}"', ("c.yaml", "d.yaml")),
])  # fmt: skip
def test_a_file_that_a_loop_names_is_asked_by_its_variable(tmp_path: Path, files: str, answers: tuple[str, ...]) -> None:
    (tmp_path / "a.yaml").write_text("stage: sft\nfinetuning_type: full\nmodel_name_or_path: Qwen/Qwen2.5-7B\ncutoff_len: 1024\n")
    (tmp_path / "run.sh").write_text(f"""
if [ "$#" -ge 1 ]; then
  FILES=("$@")
else
  FILES=(c.yaml d.yaml)
fi
for FILE in {files}; do
  FORCE_TORCHRUN=1 NPROC_PER_NODE=4 llamafactory-cli train "$FILE"
done
""")
    with pytest.raises(OpenQuestionsError) as asked:
        read(tmp_path / "run.sh", None, Given())
    assert [(one.name, one.choices) for one in asked.value.questions] == [("FILE", answers)]
    assert read(tmp_path / "run.sh", None, Given(settings={"FILE": "a.yaml"})).sequence_length == 1024


@pytest.mark.parametrize(("model", "words", "targets"), [
    ("openai/gpt-oss-20b", "", "attention"), ("unsloth/gpt-oss-20b", "lora_target: q_proj,v_proj\n", "qv"),
    ("Qwen/Qwen3-30B-A3B", "", "all"),
])  # fmt: skip
def test_experts_that_are_tensors_have_no_adapters(tmp_path: Path, model: str, words: str, targets: str) -> None:
    job = f"model_name_or_path: {model}\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\ncutoff_len: 1024\nbf16: true\n"
    (tmp_path / "tune.yaml").write_text(f"{job}{words or 'lora_target: all'}\n")
    assert read(tmp_path / "tune.yaml", None, Given(num_gpus=1)).lora_targets == targets


def test_exports_are_read_back_as_they_were_priced(tmp_path: Path) -> None:
    """Weights of axolotl without a second quantisation, and stages of Megatron-Bridge of a model that is named."""
    job = {"model": "llama-8b", "gpus": 1, "hardware": "h100-sxm", "trainer": "axolotl", "lora_rank": 16, "frozen_weights": "nf4"}
    estimate(**job).export("axolotl", tmp_path / "axolotl")
    tuned = import_config(tmp_path / "axolotl" / "axolotl.yaml", model="llama-8b", gpus=1)
    assert tuned.file.workload.frozen_weights == "nf4"
    stages = {"pp": 16, "first_stage_layers": 4, "last_stage_layers": 1}
    estimate(model="deepseek-v3", gpus=256, hardware="h100-sxm", ep=16, **stages).export("megatron-bridge", tmp_path / "bridge")
    layout = import_config(tmp_path / "bridge" / "plan_config.py", model="deepseek-v3", gpus=256).layout
    assert {name: getattr(layout, name) for name in stages} == stages

"""One round of questions: all that a file leaves open is asked for in its first message."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

AUTO = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
TEMPLATE = """{
  "train_batch_size": BATCH,
  "train_micro_batch_size_per_gpu": Micro_1st,
  "steps_per_print": LOG_EVERY,
  "zero_optimization": {"stage": STAGE},
  "bf16": {"enabled": WITH_BF16},
  "curriculum_learning": {"enabled": SHORT_FIRST}
}
"""


def _questions(path: Path, given: Given) -> list[str]:
    with pytest.raises(OpenQuestionsError) as error:
        read(path, None, given)
    return [one.name for one in error.value.questions]


class TestDeepSpeedFile:
    """A configuration of DeepSpeed alone, which is no more than a part of its job."""

    def test_one_sentence_asks_for_batch_gpus_recompute_model_and_length(self, tmp_path: Path) -> None:
        names = _questions(written(tmp_path, AUTO, "ds.json"), Given())
        assert names == ["--micro-batch-size M", "--gpus N", "gradient_checkpointing", "--model NAME", "--sequence-length S"]

    def test_words_of_a_template_are_asked_for_and_put_in_their_places(self, tmp_path: Path) -> None:
        path = written(tmp_path, TEMPLATE, "ds.json")
        given = Given(num_gpus=4, model="llama-8b", sequence_length=1024)
        assert _questions(path, given) == ["BATCH", "Micro_1st", "STAGE", "WITH_BF16", "gradient_checkpointing"]
        answers = {"BATCH": "64", "Micro_1st": "2", "STAGE": "3", "WITH_BF16": "true", "gradient_checkpointing": "true"}
        job = read(path, None, given.with_settings(answers))
        assert (job.fields["zero"], job.fields["dp"], job.fields["num_microbatches"], job.precision) == (3, 4, 8, "bf16")
        assert "BATCH" not in job.unread
        assert "curriculum_learning: not in the plan" in "; ".join(job.notes)

    def test_the_question_for_gpus_says_what_they_share(self, tmp_path: Path) -> None:
        text = AUTO.replace('"auto"', '2, "train_batch_size": 8')
        with pytest.raises(OpenQuestionsError, match="they share 4 micro batches"):
            read(written(tmp_path, text, "ds.json"), None, Given())


LAUNCH = """#!/bin/bash
MODEL=$1
TASK=$2
KIND=$3
FILE=recipes/$MODEL/$TASK/config_$KIND.yaml
SIZE=$(python scripts/get_batch_size.py --model_name $MODEL)
CMD="scripts/run_$TASK.py $FILE"
srun bash -c "accelerate launch --config_file $KIND.yaml $CMD"
"""
RECIPE = """model_name_or_path: Qwen/Qwen2.5-7B
beta: 0.1
bf16: true
max_length: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
"""
PAIRS = """from alignment import is_adapter_model
from peft import PeftModel
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config
args, model_args = TrlParser((DPOConfig, ModelConfig)).parse_args_and_config()
model = model_args.model_name_or_path
if is_adapter_model(model) is True:
    model = PeftModel.from_pretrained(model, model).merge_and_unload()
DPOTrainer(model, args=args, peft_config=get_peft_config(model_args)).train()
"""
ODDS = "from trl import ORPOConfig, ORPOTrainer, TrlParser\n" + PAIRS.partition("\n")[2].replace("DPO", "ORPO")


class TestRecipeOfALauncher:
    """A script whose arguments name the recipe and the program at once."""

    def _job(self, folder: Path, task: str) -> tuple[Path, Given]:
        written(folder, PAIRS, "scripts/run_dpo.py")
        written(folder, ODDS, "scripts/run_orpo.py")
        written(folder, RECIPE, f"recipes/small/{task}/config_full.yaml")
        file = f"recipes/small/{task}/config_full.yaml"
        return written(folder, LAUNCH, "launch.sh"), Given(num_gpus=8, settings={"config_file": file, "fsdp": "full_shard"})

    def test_the_one_training_is_read_beside_a_program_that_looks_something_up(self, tmp_path: Path) -> None:
        path, _ = self._job(tmp_path, "dpo")
        assert "config_file" in _questions(path, Given())

    def test_the_file_that_is_said_decides_the_program(self, tmp_path: Path) -> None:
        path, given = self._job(tmp_path, "orpo")
        with pytest.raises(PlannerError, match="ORPO is not modelled"):
            read(path, None, given)

    def test_adapters_of_an_upload_are_not_asked_about(self, tmp_path: Path) -> None:
        path, given = self._job(tmp_path, "dpo")
        job = read(path, None, given)
        assert (job.objective, job.lora_rank) == ("dpo", 0)
        assert not {"use_peft", "lora_r"} & {one.name for one in job.questions}


SCRIPT = """#!/bin/bash
ENGINE=$1
torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16 True --model_max_length 1024 \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing True --deepspeed $ENGINE
"""
OWN = """import sys
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
quick = HfArgumentParser(Options).parse_args_into_dataclasses()[0]
use_half = quick.use_half
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16 if use_half == True else torch.float32)
args = TrainingArguments("out", per_device_train_batch_size=2, bf16=True)
Trainer(model=model, args=args).train()
"""


class TestChoices:
    """Answers that a question offers are those that settle it."""

    def test_the_engine_of_a_variable(self, tmp_path: Path) -> None:
        job = read(written(tmp_path, SCRIPT, "run.sh"), None, Given())
        assert next(one.choices for one in job.questions if one.name == "ENGINE")[:2] == ("zero3", "zero2")

    def test_a_variable_that_is_on_or_off(self, tmp_path: Path) -> None:
        job = read(written(tmp_path, OWN, "train.py"), None, Given(num_gpus=1, sequence_length=1024))
        assert next(one.choices for one in job.questions if one.name == "use_half") == ("true", "false")


OF_ITS_COMMAND = """import transformers
from dataclasses import dataclass
@dataclass
class ModelArguments:
    model_name_or_path: str = "facebook/opt-125m"
def train():
    parser = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    transformers.Trainer(model=model, args=training_args).train()
if __name__ == "__main__":
    train()
"""


class TestProgramOfACommand:
    """A program whose arguments are those of its command, without one."""

    def test_what_a_command_says_is_asked_for_at_once(self, tmp_path: Path) -> None:
        path = written(tmp_path, OF_ITS_COMMAND, "train.py")
        job = read(path, None, Given())
        names = ["gradient_checkpointing", "bf16", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"]
        assert [one.name for one in job.questions][:7] == [*names, "accelerate", "--sequence-length S"]
        answers = {"gradient_checkpointing": "true", "bf16": "true", "per_device_train_batch_size": "2", "optim": "adafactor"}
        settings = {**answers, "gradient_accumulation_steps": "4", "fsdp": "full_shard", "torch_dtype": "float32"}
        job = read(path, None, Given(num_gpus=8, model="llama-8b", sequence_length=1024, settings=settings))
        found = job.fields
        assert job.questions == () and (job.precision, job.optimizer) == ("bf16", "adafactor")
        assert (found["micro_batch_size"], found["num_microbatches"], found["zero"]) == (2, 4, 3)
        assert found["recompute"] == Recompute.FULL
        assert "opt-125m" not in job.model_name and not any("opt " in one for one in job.notes)


CHAT = """#!/bin/bash
deepspeed main.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_len 512 \\
  --gradient_accumulation_steps 1 --gradient_checkpointing --zero_stage 3 --lora_dim 128 --lora_module_name layers. --deepspeed
"""
WORDS = """#!/bin/bash
SIZE=$1
TP=$2
if [ $SIZE = 7B ]; then
  LAYERS=32
elif [ $SIZE = 13B ]; then
  LAYERS=40
fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \\
  --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
  --tensor-model-parallel-size $TP --vocab-size 32000
"""


def test_a_rank_of_its_own_that_is_refused_is_not_asked_about_under_another_name(tmp_path: Path) -> None:
    names = _questions(written(tmp_path, CHAT, "run.sh"), Given())
    assert "lora_dim" in names and "use_peft" not in names


def test_words_of_a_script_are_asked_for_with_the_values_that_its_branches_know(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match=r"SIZE=7B\|13B \(--num-layers\)"):
        read(written(tmp_path, WORDS, "run.sh"), None, Given())


OWN_CLASS = """from transformers import Trainer
class Plain(Trainer):
    pass
class PlainTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss
"""
OF_A_MODULE = """import argparse
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments
from parts import PlainTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
rank = parser.parse_args().rank
args = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16)
if rank != 0:
    model = get_peft_model(model, LoraConfig(r=rank, target_modules=layers_of(model)))
PlainTrainer(model=model, args=args).train()
"""


def test_a_trainer_of_a_module_beside_and_adapters_of_no_rank(tmp_path: Path) -> None:
    written(tmp_path, OWN_CLASS, "parts.py")
    given = Given(num_gpus=1, sequence_length=512, settings={"rank": "0"})
    job = read(written(tmp_path, OF_A_MODULE, "train.py"), None, given)
    assert (job.lora_rank, job.fields["micro_batch_size"], job.precision) == (0, 2, "bf16_true")
    assert not {"rank", "lora_target_modules"} & {one.name for one in job.questions}


def test_a_micro_batch_is_asked_for_with_the_sizes_that_a_script_leaves_open(tmp_path: Path) -> None:
    text = "python pretrain_gpt2.py --num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --fp16\n"
    names = _questions(written(tmp_path, text, "run.sh"), Given(num_gpus=8))
    assert {"LAYERS", "--micro-batch-size M"} <= {*names}


def test_the_length_of_prompts_alone_decides_nothing_and_is_not_asked_for(tmp_path: Path) -> None:
    text = SCRIPT.replace("train.py", "scripts/run_dpo.py").replace("--deepspeed $ENGINE", "--max_prompt_length $PROMPT --beta 0.1")
    written(tmp_path, PAIRS, "scripts/run_dpo.py")
    job = read(written(tmp_path, text, "run.sh"), None, Given())
    assert job.objective == "dpo" and "PROMPT" not in [one.name for one in job.questions]


READER = """import sys
import yaml
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
config = yaml.safe_load(open(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained(config["base"]["name"])
args = TrainingArguments("out", per_device_train_batch_size=config["step"]["rows"], bf16=True)
Trainer(model=model, args=args).train()
"""
OTHER = READER.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")


def test_a_file_that_one_of_several_programs_reads(tmp_path: Path) -> None:
    written(tmp_path, READER, "a_run.py")
    written(tmp_path, OTHER, "b_judge.py")
    written(tmp_path, "", "setup.py")
    path = written(tmp_path, "base: {name: Qwen/Qwen2.5-7B}\nstep: {rows: 3}\n", "own.yaml")
    assert read(path, None, Given(num_gpus=1, sequence_length=512)).fields["micro_batch_size"] == 3


def test_words_about_data_and_the_mask_of_a_loss_are_not_asked_about(tmp_path: Path) -> None:
    text = WORDS.replace("--vocab-size", "--answer-loss-only --json-key text --strange-word 3 --vocab-size")
    names = _questions(written(tmp_path, text, "run.sh"), Given())
    assert "strange_word" in names and not {"answer_loss_only", "json_key"} & {*names}

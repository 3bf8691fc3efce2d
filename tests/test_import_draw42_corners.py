"""Practice before draw 42, odd corners of programs of transformers and TRL. Short files of the same shape, each failed before."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

CUTS = """
import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
p = argparse.ArgumentParser()
p.add_argument("--seq_length", type=int, default=2048)
args = p.parse_args()
class Chunks:
    def __init__(self, data, seq_length=1024):
        self.seq_length = seq_length
    def __iter__(self):
        yield from cut(self.seq_length)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B")
train, valid = Chunks(a, seq_length=args.seq_length), Chunks(b, seq_length=OTHER)
config = TrainingArguments(per_device_train_batch_size=1, bf16=True)
Trainer(model=model, args=config, train_dataset=train, eval_dataset=valid).train()
"""


@pytest.mark.parametrize(("other", "length"), [("args.seq_length", 2048), ("2048", 2048), ("512", None)])
def test_a_parameter_is_what_all_calls_give_it(tmp_path: Path, other: str, length: int | None) -> None:
    found = read(written(tmp_path, CUTS.replace("OTHER", other), "tune.py"), None, Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert found.sequence_length == length


PAIRS = """
import argparse
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
p = argparse.ArgumentParser()
p.add_argument("--use_qlora", type=bool, default=False)
p.add_argument("--batch", type=int, default=2)
args = p.parse_args()
bits = BitsAndBytesConfig(load_in_4bit=True) if args.use_qlora else None
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B", torch_dtype="float32", quantization_config=bits)
adapters = LoraConfig(r=16, target_modules="all-linear")
config = DPOConfig(per_device_train_batch_size=args.batch, bf16=True, max_length=2048, gradient_checkpointing=False)
DPOTrainer(model=model, ref_model=None, args=config, train_dataset=d, peft_config=GIVEN).train()
"""


@pytest.mark.parametrize(("given", "rank"), [("adapters", 16), ("adapters if args.use_qlora else None", 0)])
def test_adapters_that_no_switch_keeps_away(tmp_path: Path, given: str, rank: int) -> None:
    """--use_qlora False leaves out the bits of such a program, not its adapters."""
    written(tmp_path, PAIRS.replace("GIVEN", given), "tune.py")
    found = read(written(tmp_path, "python tune.py --use_qlora False --batch 1\n", "run.sh"), None, Given(num_gpus=1))
    assert (found.lora_rank, found.frozen_weights, found.objective) == (rank, "fp32" if rank else None, "dpo")


TWICE = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B")
args = TrainingArguments(output_dir="a", per_device_train_batch_size=4)
SECOND
trainer = Trainer(model=model, args=args, train_dataset=d)
trainer.train()
"""
NEW = "args = TrainingArguments(output_dir='a', per_device_train_batch_size=2, gradient_accumulation_steps=8, bf16=True)"


@pytest.mark.parametrize(
    ("second", "read_as"),
    [(NEW, (2, 8, "bf16", False)), (f"if long_runs:\n    {NEW}", (4, 1, "fp32", True)), (f"other_{NEW}", (4, 1, "fp32", True))],
)
def test_the_last_configuration_under_a_name_counts(tmp_path: Path, second: str, read_as: tuple) -> None:
    job = written(tmp_path, TWICE.replace("SECOND", second), "tune.py")
    found = read(job, None, Given(num_gpus=1, sequence_length=1024, settings={"fsdp": "no_shard"}))
    noted = "the first is read" in " ".join(found.notes)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.precision, noted) == read_as


FORK = """
from trl import DPOConfig, TRAINER, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from transformers import AutoModelForCausalLM
a, args, m = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained(m.model_name_or_path)
TRAINER(model, AutoModelForCausalLM.from_pretrained(m.model_name_or_path), args=args, peft_config=get_peft_config(m)).train()
"""
OF_LIBRARY = """
from peft import LoraConfig, get_peft_model
def get_peft_config(m):
    return LoraConfig(r=m.lora_r) if m.use_peft else None
class DPOTrainer(Trainer):
    def get_batch_loss_metrics(self, model, batch):
        return self.model(batch) + self.ref_model(batch) + self.ref_model(batch)
"""


@pytest.mark.parametrize(("trainer", "asked"), [("DPOTrainer", []), ("TwinDPOTrainer", ["TwinDPOTrainer"])])
def test_a_fork_of_a_library_is_read_as_the_library(tmp_path: Path, trainer: str, asked: list[str]) -> None:
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    written(tmp_path, OF_LIBRARY, "trl/__init__.py")
    written(tmp_path, FORK.replace("TRAINER", trainer), "scripts/dpo.py")
    command = "torchrun --nproc_per_node 2 scripts/dpo.py --model_name_or_path Qwen/Qwen2.5-3B --per_device_train_batch_size 2 "
    found = read(written(tmp_path, f"{command}--bf16 --max_length 512 --gradient_checkpointing\n", "run.sh"), None, Given())
    assert (asked_for(found), found.lora_rank, found.objective) == (asked, 0, "dpo")


ZERO = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True}, "gradient_clipping": 1.0}  # fmt: skip


def test_accelerate_that_is_given_the_configuration_of_deepspeed(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(ZERO), "ds.json")
    run = "accelerate launch --config_file ds.json sft.py --model_name_or_path Qwen/Qwen2.5-3B --max_length 512 --use_peft false "
    text = f"{run}--per_device_train_batch_size 1 --bf16 true --gradient_checkpointing true\n"
    found = read(written(tmp_path, text, "run.sh"), None, Given(num_gpus=4))
    assert (found.trainer.split("+")[0], found.fields["zero"], found.fields["offload_parameters"]) == ("deepspeed", 3, 1)
    assert "ds.json is a configuration of DeepSpeed, with which accelerate does not start" in " ".join(found.notes)


def test_a_configuration_below_the_script(tmp_path: Path) -> None:
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}), "src/configs/ds.json")
    run = "cd src\ndeepspeed --num_gpus 4 tune.py --model_name_or_path Qwen/Qwen2.5-3B --model_max_length 512 --bf16 True "
    text = f"{run}--per_device_train_batch_size 1 --deepspeed configs/ds.json\n"
    found = read(written(tmp_path, text, "run.sh"), None, Given())
    assert (asked_for(found), found.fields["zero"]) == ([], 2)


def test_checkpointing_of_a_program_that_is_not_there_and_has_names_of_its_own(tmp_path: Path) -> None:
    run = "torchrun --nproc_per_node 8 main.py --model_path Qwen/Qwen2.5-3B --seq_length 512 --bf16 --batch_size 1 "
    text = run + "--gradient_accumulation_steps 8 --learning_rate 1e-5 {}\n"
    for more, asked in (("", True), ("--no_gradient_checkpointing", False)):
        found = read(written(tmp_path, text.format(more), "run.sh"), None, Given())
        assert ("gradient_checkpointing" in asked_for(found)) is asked


CLASSES = """
import yaml, transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
class Job:
    def __init__(self, config):
        self.config = config
    def load(self):
        bits = BitsAndBytesConfig(load_in_4bit=True)
        if "family" in self.config and self.config["family"] == "llama":
            self.model = LlamaForCausalLM.from_pretrained(self.config["base"], quantization_config=bits)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(self.config["base"], quantization_config=bits)
    def train(self):
        data, words = Data({"trainer": {}}), self.config["trainer"]
        model = get_peft_model(self.model, LoraConfig(r=self.config["lora"]["r"], target_modules=["q_proj", "v_proj"]))
        args = transformers.TrainingArguments(per_device_train_batch_size=words["batch"], bf16=True)
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
    def merge(self):
        model = AutoModelForCausalLM.from_pretrained(self.config["base"], device_map="cpu")
        merged(model).save_pretrained("out")
class Data:
    def __init__(self, config):
        self.config = config["trainer"]
job = Job(yaml.safe_load(open("job.yaml")))
job.load()
job.train()
job.merge()
"""


def test_settings_that_an_object_keeps_and_a_model_that_is_merged(tmp_path: Path) -> None:
    written(tmp_path, "base: Qwen/Qwen2.5-3B\nlora: {r: 4}\ntrainer: {batch: 3}\n")
    job = written(tmp_path, CLASSES, "tune.py")
    found = read(job, None, Given(num_gpus=1, sequence_length=512, settings={"fsdp": "no_shard"}))
    assert (asked_for(found), found.lora_rank, found.frozen_weights, found.fields["micro_batch_size"]) == ([], 4, "nf4", 3)


SUBMITS = """#!/bin/bash
for model in Qwen/Qwen2.5-3B; do
    script="job_$(date +%s).sh"
    cat > "$script" <<EOF
#!/bin/bash
#SBATCH --gres=gpu:4
cat > \\$HOME/job.yaml <<YAML
model_name_or_path: ${model}
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 512
bf16: true
YAML
srun bash -c "torchrun --nproc_per_node=4 tune.py \\$HOME/job.yaml"
EOF
    sbatch -p gpu "$script"
done
"""


def test_a_job_that_a_script_writes_with_its_settings(tmp_path: Path) -> None:
    found = read(written(tmp_path, SUBMITS, "submit.sh"), None, Given(sequence_length=512))
    assert (found.num_gpus, found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (4, 2, 4)


CLICKED = """
import click
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
@click.command()
@click.option("--input-model", type=str)
@click.option("--per-device-train-batch-size", type=int, default=8)
@click.option("--gradient-checkpointing/--no-gradient-checkpointing", is_flag=True, default=True)
def main(input_model, per_device_train_batch_size, gradient_checkpointing):
    model = AutoModelForCausalLM.from_pretrained(input_model)
    args = TrainingArguments(per_device_train_batch_size=per_device_train_batch_size, bf16=True, max_length=512,
                             gradient_checkpointing=gradient_checkpointing)
    Trainer(model=model, args=args, train_dataset=d).train()
main()
"""


@pytest.mark.parametrize(("more", "kept"), [("", Recompute.FULL), ("--no-gradient-checkpointing", Recompute.NONE)])
def test_switches_of_click(tmp_path: Path, more: str, kept: Recompute) -> None:
    written(tmp_path, CLICKED, "train.py")
    run = f"torchrun --nproc_per_node 2 train.py --input-model Qwen/Qwen2.5-3B --per-device-train-batch-size 6 {more}\n"
    found = read(written(tmp_path, run, "run.sh"), None, Given(sequence_length=512))
    assert (found.fields["recompute"], found.fields["micro_batch_size"]) == (kept, 6)


FAILS = """
from dataclasses import dataclass
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Model:
    name: str = "Qwen/Qwen2.5-3B"
    bits: int = 8
m, args = HfArgumentParser((Model, TrainingArguments)).parse_args_into_dataclasses()
words = {}
if m.bits in [4, 8]:
    load_in_4bit = m.bits == 4
    words["quantization_config"] = BitsAndBytesConfig(load_in_4bit=load_in_4bit, load_in_8bit=(m.bits == 8))
try:
    model = AutoModelForCausalLM.from_pretrained(m.name, torch_dtype="float16", **words)
except ImportError:
    model = AutoModelForCausalLM.from_pretrained(m.name, torch_dtype="float16", **words)
model = get_peft_model(PREPARED, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
Trainer(model=model, args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize(("prepared", "precision"), [("prepare_model_for_kbit_training(model)", "fp32"), ("model", "fp16")])
def test_bits_of_a_model_that_is_loaded_again_and_what_it_computes_in(tmp_path: Path, prepared: str, precision: str) -> None:
    """Tables in fp32 make all that no mixed precision casts fp32, whatever the model is loaded in."""
    written(tmp_path, FAILS.replace("PREPARED", prepared), "tune.py")
    run = "python tune.py --bits 4 --per_device_train_batch_size 2 --max_length 512\n"
    found = read(written(tmp_path, run, "run.sh"), None, Given(num_gpus=1, sequence_length=512))
    assert (asked_for(found), found.frozen_weights, found.precision) == ([], "nf4", precision)


def test_where_the_tokenizer_of_a_program_cuts(tmp_path: Path) -> None:
    """In a module beside it, which no option of the command says."""
    rows = "class Rows:\n    def get(self, one):\n        return tokenizer(one, truncation=True, max_length=768)\n"
    written(tmp_path, rows, "rows.py")
    text = FAILS.replace("PREPARED", "model").replace("train_dataset=d", "train_dataset=Rows()")
    written(tmp_path, f"from rows import Rows\n{text}", "tune.py")
    found = read(written(tmp_path, "python tune.py --bits 4 --per_device_train_batch_size 2\n", "run.sh"), None, Given(num_gpus=1))
    assert (asked_for(found), found.sequence_length) == ([], 768)


ELSEWHERE = """
import argparse
from bits import get_bnb_config
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
p = argparse.ArgumentParser()
p.add_argument("--max_seq_length", type=int, default=2048)
p.add_argument("--batch", type=int, default=2)
args = p.parse_args()
def rows(one):
    return one[:args.max_seq_length - 1]
print(args.max_seq_length)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B", quantization_config=get_bnb_config())
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8, lora_alpha=16))
config = TrainingArguments(per_device_train_batch_size=args.batch, bf16=True)
Trainer(model=model, args=config, train_dataset=d.map(rows)).train()
"""
BITS = "from transformers import BitsAndBytesConfig\ndef get_bnb_config():\n    return BitsAndBytesConfig(load_in_4bit=True)\n"


def test_bits_that_a_module_says_and_a_length_that_an_option_says(tmp_path: Path) -> None:
    written(tmp_path, BITS, "bits.py")
    found = read(written(tmp_path, ELSEWHERE, "tune.py"), None, Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert (asked_for(found), found.frozen_weights, found.sequence_length) == ([], "nf4", 2048)
    assert "taken to be cut at 2048 tokens, as its variable max_seq_length says" in " ".join(found.notes)
    only_shown = written(tmp_path, ELSEWHERE.replace("one[:args.max_seq_length - 1]", "one"), "tune.py")
    assert read(only_shown, None, Given(num_gpus=1, settings={"fsdp": "no_shard"})).sequence_length is None


def test_adapters_of_a_program_that_names_no_layers(tmp_path: Path) -> None:
    """PEFT puts them on query and value."""
    written(tmp_path, BITS, "bits.py")
    written(tmp_path, ELSEWHERE, "tune.py")
    found = read(written(tmp_path, "python tune.py --batch 1 --max_seq_length 512\n", "run.sh"), None, Given(num_gpus=1))
    assert ("lora_target_modules" in asked_for(found), found.lora_rank, found.lora_targets) == (False, 8, "qv")

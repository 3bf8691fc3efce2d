"""What draw 38 showed: words of forks of LLaMA-Factory, bits in keywords, layers trained whole, programs without options."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.model_names import preset_of
from planner.trainers.llama_factory.readback import known_arguments
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
do_train: true
finetuning_type: %s
deepspeed: zero3
cutoff_len: 1024
per_device_train_batch_size: 2
bf16: true
"""


@pytest.mark.parametrize("word", ["num_latent_thinking_token: 5", "reasoning_loss_weight: 1.0", "loop_layers: 3"])
def test_a_word_that_llama_factory_does_not_have_is_asked_about(tmp_path: Path, word: str) -> None:
    """Its parser refuses such words, so a fork reads them: a latent token is a pass of the model."""
    file, name = written(tmp_path, f"{FACTORY % 'full'}{word}\n", "job.yaml"), word.partition(":")[0]
    assert asked_for(read(file, None, Given(num_gpus=8))) == [name]
    assert asked_for(read(file, None, Given(num_gpus=8, settings={name: "false"}))) == []


@pytest.mark.parametrize(
    "word",
    [
        "media_dir: data", "tokenized_path: x", "interleave_probs: 0.5,0.5", "length_column_name: n", "project: p",
        "my_note: false", "chosen: a", "file_name: b",
    ],
)  # fmt: skip
def test_words_of_llama_factory_and_of_transformers_are_no_question(tmp_path: Path, word: str) -> None:
    assert asked_for(read(written(tmp_path, f"{FACTORY % 'full'}{word}\n", "job.yaml"), None, Given(num_gpus=8))) == []
    assert {"cutoff_len", "gradient_accumulation_steps", "pref_beta", "val_size"} <= known_arguments()


@pytest.mark.parametrize("named", ["q_proj,v_proj", "model.layers.0.mlp"])
def test_layers_that_are_trained_whole_beside_adapters_are_refused(tmp_path: Path, named: str) -> None:
    file = written(tmp_path, f"{FACTORY % 'lora'}additional_target: {named}\n", "job.yaml")
    if "proj" in named:
        with pytest.raises(PlannerError, match="additional_target.*trained as a whole"):
            read(file, None, Given(num_gpus=8))
    else:
        assert read(file, None, Given(num_gpus=8)).lora_whole == "none"


BITS = """
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer
config = load_it()
words = {"torch_dtype": torch.bfloat16}
if config["bits"] == 4:
    words["load_in_4bit"] = True
    words["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **config["more"])
%s
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", **words)
args = TrainingArguments(per_device_train_batch_size=4, gradient_checkpointing=True, bf16=True)
SFTTrainer(model=model, args=args, peft_config=LoraConfig(r=8, target_modules="all-linear"), max_seq_length=512).train()
"""


def test_bits_that_a_program_puts_into_keywords_are_asked_for(tmp_path: Path) -> None:
    """Without the question frozen weights came out in 16 bits."""
    file = written(tmp_path, BITS % "", "tune.py")
    assert {"load_in_4bit", "bnb_4bit_use_double_quant"} <= set(asked_for(read(file, None, Given(num_gpus=1))))
    said = {"load_in_4bit": "true", "bnb_4bit_use_double_quant": "false"}
    assert read(file, None, Given(num_gpus=1, settings=said)).frozen_weights == "nf4"


def test_bits_under_a_condition_that_is_not_met_are_no_question(tmp_path: Path) -> None:
    text = (BITS % "").replace('config["bits"] == 4', "False")
    assert "load_in_4bit" not in asked_for(read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1)))


BARE = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
size = "0.6"
model = AutoModelForCausalLM.from_pretrained(f"Qwen/Qwen3-{size}B", torch_dtype="float16")
block_size = 2048
d = chunks(rows, block_size)
args = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=8, fp16=True, gradient_checkpointing=True,
                         deepspeed="ds.json")
Trainer(model=model, args=args, train_dataset=d).train()
"""


def test_a_program_that_is_started_without_options_says_all_itself(tmp_path: Path) -> None:
    """Model and length were asked for, though they stand in the program; processes are the launcher's."""
    written(tmp_path, BARE, "tune.py")
    written(tmp_path, '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "ds.json")
    command = "accelerate launch --num_processes 2 --mixed_precision fp16 tune.py\n"
    found = read(written(tmp_path, command, "run.sh"), None, Given())
    assert (asked_for(found), found.model_name, found.sequence_length, found.num_gpus) == ([], "Qwen/Qwen3-0.6B", 2048, 2)
    assert (found.fields["zero"], found.fields["num_microbatches"], found.precision) == (2, 8, "fp16")


MEGATRON = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --bf16 "
    "--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 64 --micro-batch-size 2 --vocab-size 50304 "
)


@pytest.mark.parametrize("words", ["--moe-deepep-num-sms 32", "--wsd-decay-ratio 0.1 --wsd-half-life -1"])
def test_words_of_schedules_and_of_dispatchers_are_no_question(tmp_path: Path, words: str) -> None:
    assert asked_for(read(written(tmp_path, f"{MEGATRON}{words}\n", "run.sh"), None, Given())) == []


def test_a_program_that_is_not_there_and_has_no_options_is_asked_about(tmp_path: Path) -> None:
    """Its words could tell that it is none of transformers; without any, what it trains is the question."""
    found = read(written(tmp_path, "accelerate launch --num_processes 2 /home/me/tune.py\n", "run.sh"), "transformers", Given())
    assert "per_device_train_batch_size" in asked_for(found)


def test_a_name_longer_than_a_file_system_takes_is_no_preset() -> None:
    """Data of a job, in the place of a name, ended in a traceback."""
    assert preset_of("1-" * 400) is None


LONG = {
    "branches": "".join(f"        if inputs[{n}]:\n            x = {n}\n" for n in range(2000)),
    "frozen": "        self.ref.requires_grad_(False)\n" * 1000,
}
OWN_TRAINER = """
from trl import SFTConfig, SFTTrainer
%s
class Own(%s):
    def compute_loss(self, model, inputs):
%s        return model(inputs)
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True, bf16=True)
Own(model="Qwen/Qwen2.5-7B", args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize("body", LONG.values(), ids=LONG)
def test_a_step_of_thousands_of_statements_is_read(tmp_path: Path, body: str) -> None:
    """Without a traceback, and in a time that grows with their number alone."""
    found = read(written(tmp_path, OWN_TRAINER % ("", "SFTTrainer", body), "tune.py"), None, Given(num_gpus=1))
    assert found.fields["micro_batch_size"] == 2 and not {"compute_loss", "requires_grad"} & {*asked_for(found)}


def test_a_trainer_behind_a_thousand_classes_is_one(tmp_path: Path) -> None:
    """Each made from the one before by two names, which are 2 ** 1000 ways to the first."""
    classes = "class A0(SFTTrainer): pass\nclass B0(SFTTrainer): pass\n" + "".join(
        f"class {one}{n}(A{n - 1}, B{n - 1}): pass\n" for n in range(1, 1000) for one in "AB"
    )
    body = "        self.other(model(inputs), model(inputs))\n"
    found = read(written(tmp_path, OWN_TRAINER % (classes, "A999", body), "tune.py"), None, Given(num_gpus=1))
    assert "compute_loss" in asked_for(found)

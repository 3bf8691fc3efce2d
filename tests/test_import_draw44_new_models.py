"""Recipes that say the sizes of a new model, and programs with adapters of their own."""

from pathlib import Path

from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

RECIPE = """model_name_or_path: someone/tokenizer
max_length: 2048
packing: false
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
gradient_checkpointing: false
bf16: true
learning_rate: 1.0e-3
words_per_source: [1, 2]
model_init_kwargs:
  attn_implementation: flash_attention_2
  torch_dtype: bfloat16
"""
SIZES = """  hidden_size: 768
  num_hidden_layers: 24
  num_attention_heads: 6
  num_experts: 512
  max_position_embeddings: 4096
"""


def recipe(folder: Path, text: str, model: str | None = "qwen3-0.6b", **settings: str) -> Reading:
    """A recipe on one GPU, with the user's answers."""
    settings = {"fsdp": "no_shard", "loss_type": "nll", **settings}
    return read(written(folder, text, "config_full.yaml"), None, Given(num_gpus=1, model=model, settings=settings))


def test_a_configuration_of_a_new_model_says_no_dtype_of_a_load(tmp_path: Path) -> None:
    job = recipe(tmp_path, RECIPE + SIZES)
    assert (job.precision, job.trainer.partition("+")[0], job.fields["recompute"]) == ("bf16", "fsdp", 0)
    assert "attention_kernel=fa2" in job.trainer
    assert any("configuration of a new model" in one and "fp32 whatever dtype it says" in one for one in job.notes)
    assert recipe(tmp_path, RECIPE + SIZES, torch_dtype="bfloat16").precision == "bf16_true"
    loaded = recipe(tmp_path, RECIPE)
    assert (loaded.precision, loaded.trainer.partition("+")[0]) == ("bf16_true", "trl")
    assert "attention_kernel=fa2" in loaded.trainer
    assert not any("configuration of a new model" in one for one in loaded.notes)


def test_it_is_the_same_behind_its_launcher(tmp_path: Path) -> None:
    text = RECIPE.replace("words_per_source: [1, 2]\n", "") + SIZES
    written(tmp_path, text, "config_full.yaml")
    program = """from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import ModelConfig, TrlParser

def main(args, model_args):
    kind = LlamaForCausalLM
    config = LlamaConfig(**args.model_init_kwargs)
    model = kind.from_pretrained(model_args.model_name_or_path, config=config) if model_args.go_on else kind(config)
    Trainer(model=model, args=args).train()

main(*TrlParser((TrainingArguments, ModelConfig)).parse_args_and_config())
"""
    written(tmp_path, program, "pt.py")
    file = written(tmp_path, "accelerate launch --num_processes 1 pt.py --config config_full.yaml\n", "run.sh")
    job = read(file, None, Given(model="qwen3-0.6b"))
    assert (job.precision, job.trainer.partition("+")[0]) == ("bf16", "fsdp")
    assert any("configuration of a new model" in one for one in job.notes)


def test_its_sizes_are_said_where_the_model_is_asked_for(tmp_path: Path) -> None:
    asked = recipe(tmp_path, RECIPE + SIZES, None).questions
    about = next(one.about for one in asked if one.name == "--model NAME")
    assert "hidden_size 768, num_hidden_layers 24, num_attention_heads 6, num_experts 512" in about
    fewer = recipe(tmp_path, RECIPE.replace("someone/tokenizer", "Qwen/Qwen3-0.6B") + "  num_hidden_layers: 4\n", None)
    assert "--model NAME" in asked_for(fewer)
    assert fewer.precision == "bf16_true"  # loaded, with fewer layers
    assert "--model NAME" not in asked_for(recipe(tmp_path, RECIPE, "qwen3-0.6b"))


def test_masks_of_each_head_are_noted(tmp_path: Path) -> None:
    job = recipe(tmp_path, RECIPE + SIZES + "  keep_window_size: 2048\n")
    assert any("each head (keep_window_size) are not priced: memory comes out too low by up to 2.2 GiB" in one for one in job.notes)
    again = RECIPE.replace("gradient_checkpointing: false", "gradient_checkpointing: true")
    job = recipe(tmp_path, again + SIZES + "  keep_window_size: 2048\n")
    assert not any("keep_window_size" in one for one in job.notes)


PROGRAM = """import torch
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Ours:
    model_name_or_path: str = field(default=None)
    block_size: int = field(default=1024)
    rank: int = field(default=8)

class SmallLoRA(torch.nn.Module):
    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, linear.out_features, bias=False)

def main():
    ours, args = HfArgumentParser((Ours, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(ours.model_name_or_path, torch_dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, module in model.named_modules():
        for inner, child in module.named_children():
            if inner in ("q_proj", "v_proj"):
                setattr(module, inner, SmallLoRA(child, ours.rank))
    Trainer(model=model, args=args).train()

main()
"""
LAUNCH = "python train.py --model_name_or_path Qwen/Qwen3-0.6B --per_device_train_batch_size 2 --bf16 --rank 16 --output_dir out"


def test_adapters_written_by_hand_can_be_said(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM, "train.py")
    file = written(tmp_path, LAUNCH, "run.sh")
    asked = read(file, None, Given(num_gpus=1)).questions
    assert any("all but 'SmallLoRA'" in one.about and "--set use_peft=true --set lora_r=N" in one.about for one in asked)
    said = {"use_peft": "true", "lora_r": "16", "lora_target_modules": "q_proj,v_proj", "torch_dtype": "bfloat16"}
    job = read(file, None, Given(num_gpus=1, settings=said))
    assert (job.lora_rank, job.lora_targets, job.frozen_weights, job.questions) == (16, "qv", "bf16", ())
    assert any("makes its adapters itself" in one for one in job.notes)
    whole = read(file, None, Given(num_gpus=1, settings={"requires_grad": "false"}))
    assert (whole.lora_rank, any("makes its adapters itself" in one for one in whole.notes)) == (0, False)

"""What the same job written in many ways showed, for programs of transformers, TRL and unsloth: each was misread before."""

from pathlib import Path
from typing import Any

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SFT = """
import os, torch, typer, click
from dataclasses import dataclass
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTQConfig, HqqConfig, TrainingArguments, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=2048, bf16=True,
                 gradient_checkpointing=True)
SFTTrainer(model=model, args=args, train_dataset=d).train()
"""
LORA = ", peft_config=LoraConfig(r=8, target_modules=['q_proj', 'v_proj']))"


def of(tmp_path: Path, *changes: tuple[str, str], gpus: int = 1, **settings: str) -> Reading:
    """The job after some changes of its text."""
    text = SFT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=gpus, settings={"fsdp": "no_shard", **settings}))


SPELLED = "per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=2048, bf16=True"


@pytest.mark.parametrize(
    ("made", "length", "micro"),
    [('words = dict(bf16=True)\nwords["max_length"] = 512\nwords["per_device_train_batch_size"] = 1', 512, 1),
     ('words = {}\nwords.update(max_length=512, bf16=True)\nwords.update({"per_device_train_batch_size": 1})', 512, 1)],
)  # fmt: skip
def test_keywords_that_are_put_together_step_by_step(tmp_path: Path, made: str, length: int, micro: int) -> None:
    """What was put in after the mapping was made was dropped: 1024 tokens and batch 8 by default."""
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    found = of(tmp_path, ("args = SFT", f"{made}\nargs = SFT"), (SPELLED, "**words"))
    assert (asked_for(found), found.sequence_length, found.fields["micro_batch_size"]) == ([], length, micro)


def test_keywords_that_are_put_in_under_a_condition(tmp_path: Path) -> None:
    made = 'words = dict(bf16=True, per_device_train_batch_size=2)\nif cfg.long:\n    words["max_length"] = 8192\nargs = SFT'
    assert "max_length" in asked_for(of(tmp_path, ("args = SFT", made), (SPELLED, "**words")))


@pytest.mark.parametrize(
    "later", ["args.per_device_train_batch_size = 1", "setattr(args, 'per_device_train_batch_size', 1)"]
)  # fmt: skip
def test_what_is_set_on_arguments_later(tmp_path: Path, later: str) -> None:
    assert of(tmp_path, ("SFTTrainer(model", f"{later}\nSFTTrainer(model")).fields["micro_batch_size"] == 1
    steps = "trainer = SFTTrainer(model=model, args=args)\ntrainer.args.gradient_accumulation_steps = 8\ntrainer.train()"
    trainer = ("SFTTrainer(model=model, args=args, train_dataset=d).train()", steps)
    assert of(tmp_path, trainer).fields["num_microbatches"] == 8
    adapters = (("args = SFT", "lora = LoraConfig(r=64, target_modules='all-linear')\nlora.r = 8\nargs = SFT"),
                ("train_dataset=d)", "peft_config=lora)"))  # fmt: skip
    assert of(tmp_path, *adapters).lora_rank == 8


def test_classes_that_are_made_from_those_of_the_library(tmp_path: Path) -> None:
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    own = "class MyArgs(SFTConfig):\n    per_device_train_batch_size: int = 3\nclass Mine(SFTTrainer):\n    pass\nargs = MyArgs("
    made = ("args = SFTConfig(per_device_train_batch_size=2, ", f"{own}optim='adafactor', ")
    found = of(tmp_path, made, ("\nSFTTrainer(", "\nMine("))
    assert (asked_for(found), found.fields["micro_batch_size"], found.optimizer) == ([], 3, "adafactor")
    mine = ("\nSFTTrainer(", "\nclass Mine(SFTTrainer):\n    pass\nMine(")
    found = of(tmp_path, ("SFTConfig(", "TrainingArguments("), (" max_length=2048,", ""), mine)
    assert found.sequence_length == 1024  # of TRL, and no question of transformers


@pytest.mark.parametrize(
    "turned", [".to(torch.bfloat16)", '.to("cuda", dtype=torch.bfloat16)', "\nmodel = model.bfloat16()"]
)  # fmt: skip
def test_models_that_are_turned_into_another_dtype(tmp_path: Path, turned: str) -> None:
    assert of(tmp_path, ('B")', f'B"){turned}')).precision == "bf16_true"
    assert of(tmp_path, ("model = Auto", "torch.set_default_dtype(torch.bfloat16)\nmodel = Auto")).precision == "bf16_true"
    assert of(tmp_path, ('B")', 'B", torch_dtype=getattr(torch, "bfloat16"))')).precision == "bf16_true"


@pytest.mark.parametrize(
    ("made", "weights"),
    [("GPTQConfig(bits=4)", "nf4"), ("HqqConfig(nbits=8)", "int8"), ('{"load_in_4bit": True}', "nf4"), ("TorchAoConfig(x)", None)],
)  # fmt: skip
def test_other_quantisations(tmp_path: Path, made: str, weights: str | None) -> None:
    """Frozen weights came out in fp32."""
    found = of(tmp_path, ('B")', f'B", quantization_config={made})'), ("train_dataset=d)", LORA[2:]))
    assert found.frozen_weights == weights if weights else {"load_in_4bit", "load_in_8bit"} <= set(asked_for(found))


@pytest.mark.parametrize("word", ["tp_plan='auto'", "tp_size=2"])
def test_models_that_are_split_where_they_are_loaded_are_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(PlannerError, match=word.split("=")[0]):
        of(tmp_path, ('B")', f'B", {word})'))


def test_what_adapters_have_beside_their_rank(tmp_path: Path) -> None:
    for word in ("rank_pattern={'q_proj': 64}", "target_parameters=['experts.up_proj']", "exclude_modules=['lm_head']"):
        found = of(tmp_path, ("train_dataset=d)", LORA[2:].replace("r=8", f"r=8, {word}")))
        assert any(word.split("=")[0] in one for one in found.notes)
    with pytest.raises(PlannerError, match="layer_replication"):
        of(tmp_path, ("train_dataset=d)", LORA[2:].replace("r=8", "r=8, layer_replication=[[0, 4], [2, 5]]")))


def test_flash_attention_before_it_had_a_name(tmp_path: Path) -> None:
    assert "attention_kernel=fa2" in of(tmp_path, ('B")', 'B", use_flash_attention_2=True)')).trainer


def test_processes_that_share_out_accumulation(tmp_path: Path) -> None:
    """WORLD_SIZE was 1 whatever --gpus says."""
    divided = 'n = 16\nworld = int(os.environ.get("WORLD_SIZE", 1))\nif world != 1:\n    n = n // world\nargs = SFT'
    for gpus in (1, 4):
        found = of(tmp_path, ("args = SFT", divided), ("steps=4", "steps=n"), gpus=gpus)
        assert found.fields["num_microbatches"] == 16 // gpus
    assert of(tmp_path, ("steps=4", "steps=max(1, 32 // int(os.environ['WORLD_SIZE']))"), gpus=4).fields["num_microbatches"] == 8


def test_defaults_of_typer_and_click_and_cases_of_a_match(tmp_path: Path) -> None:
    body = SFT.partition("model = ")[2].replace("\n", "\n    ").replace("size=2", "size=bs")
    head = SFT.partition("model = ")[0]
    for made in ("def main(bs: int = typer.Option(3)):", '@click.option("--bs", default=3)\ndef main(bs):'):
        text = f"{head}{made}\n    model = {body}\nmain()\n"
        assert read(written(tmp_path, text, "own.py"), None, Given(num_gpus=1)).fields["micro_batch_size"] == 3
    match = 'size = "7b"\nmatch size:\n    case "7b":\n        bs = 3\n    case _:\n        bs = 8\nargs = SFT'
    assert of(tmp_path, ("args = SFT", match), ("size=2", "size=bs")).fields["micro_batch_size"] == 3


def test_lengths_that_nothing_cuts_are_asked_for(tmp_path: Path) -> None:
    """null, which switches the cut off, was 1024 tokens."""
    assert of(tmp_path, ("=2048", "=None")).sequence_length is None
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nlearning_rate: 1e-5\nmax_length: null\n"
    assert read(written(tmp_path, text, "sft.yaml"), None, Given()).sequence_length is None
    pairs = (("SFTConfig(", "DPOConfig(max_prompt_length=256, max_completion_length=256, "), ("SFTTrainer(", "DPOTrainer("))
    assert of(tmp_path, *pairs).sequence_length == 512


@pytest.mark.parametrize(
    ("pinned", "words", "loss"),
    [("trl==0.21.0", "", "full"), ("trl>=1.8", "", "chunked"), ("trl==0.21.0", "use_liger_kernel=True, ", "fused_linear"),
     ("", "loss_type='nll', ", "full"), ("", "", "note")],
)  # fmt: skip
def test_the_loss_of_trl_by_its_version(tmp_path: Path, pinned: str, words: str, loss: str) -> None:
    """In pieces since 1.7: before, all scores are in memory."""
    written(tmp_path, f"{pinned}\n", "requirements.txt")
    found = of(tmp_path, ("SFTConfig(", f"SFTConfig({words}"))
    assert any("loss_type=nll" in one for one in found.notes) is (loss == "note")
    assert loss in ("chunked", "note") or f"loss={loss}" in found.trainer
    assert "loss=full" in of(tmp_path, ("SFTConfig(", "DPOConfig("), ("SFTTrainer(", "DPOTrainer(")).trainer


def test_the_parallelism_of_accelerate_in_a_program(tmp_path: Path) -> None:
    """It was taken for a configuration of torchtitan."""
    own = "parallelism_config=ParallelismConfig(cp_size=2), "
    head = ("from trl", "from accelerate.parallelism_config import ParallelismConfig\nfrom trl")
    found = of(tmp_path, head, ("SFTConfig(", f"SFTConfig({own}"), gpus=8)
    assert (found.trainer.partition("+")[0], found.fields["cp"], found.fields["dp"]) == ("trl", 2, 4)


UNSLOTH = """
from unsloth import FastModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastModel.from_pretrained(model_name="unsloth/Qwen3-8B", max_seq_length=4096)
model = FastModel.get_peft_model(model, r=32)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, optim="adamw_8bit")).train()
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [("optim", "max_seq_length=1024, optim", {"sequence_length": 1024}),
     ("optim", "max_length=1024, optim", {"sequence_length": 4096}),
     ("length=4096", "length=4096, load_in_16bit=True", {"frozen_weights": "bf16"}),
     ("length=4096", "length=4096, full_finetuning=True", {"lora_rank": 0}),
     ("r=32", "r=32, finetune_mlp_modules=False", {"lora_targets": "attention"})],
)  # fmt: skip
def test_words_of_unsloth(tmp_path: Path, old: str, new: str, found: dict[str, Any]) -> None:
    reading = read(written(tmp_path, UNSLOTH.replace(old, new), "tune.py"), None, Given())
    assert {name: getattr(reading, name) for name in found} == found
    for word in ("load_in_fp8=True", "qat_scheme='int4'"):
        with pytest.raises(PlannerError, match=word.split("=")[0]):
            read(written(tmp_path, UNSLOTH.replace("length=4096", f"length=4096, {word}"), "tune.py"), None, Given())


def test_a_parameter_that_a_condition_changes(tmp_path: Path) -> None:
    """What the condition gives was taken, met or not."""
    body = SFT.partition("model = ")[2].replace("\n", "\n    ").replace("bf16=True", "bf16=True, optim=optim")
    head = SFT.partition("model = ")[0]
    for test, expected in (("not torch.cuda.is_available()", "adam_8bit"), ("torch.cuda.is_available()", "sgd"), ("cfg.own", None)):
        made = f'def main(optim="adamw_8bit"):\n    if {test}:\n        optim = "sgd"\n    model = '
        found = read(written(tmp_path, f"{head}{made}{body}\nmain()\n", "own.py"), None, Given(num_gpus=1))
        assert found.optimizer == expected if expected else "optim" in asked_for(found)


APART = {
    "parts.py": """
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig
def build_bnb():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
def attach_adapters(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
""",
    "tune.py": """
from parts import attach_adapters, build_bnb
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = attach_adapters(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", quantization_config=build_bnb()))
args = SFTConfig(per_device_train_batch_size=2, max_length=512, bf16=True, gradient_checkpointing=True)
SFTTrainer(model=model, args=args, train_dataset=d).train()
""",
}


def test_adapters_and_bits_that_another_module_makes(tmp_path: Path) -> None:
    """Every weight was trained, in 16 bits; where the module is not there they are asked for."""
    for name, text in APART.items():
        written(tmp_path, text, name)
    found = read(tmp_path / "tune.py", None, Given(num_gpus=1))
    assert (asked_for(found), found.lora_rank, found.lora_targets, found.frozen_weights) == ([], 4, "qv", "nf4_dq")
    made = ("args = SFT", "model = get_peft_model(model, their_config)\nargs = SFT")
    asked = asked_for(of(tmp_path, ('B")', 'B", quantization_config=build_bnb())'), made))
    assert {"load_in_4bit", "bnb_4bit_use_double_quant", "lora_r", "lora_target_modules"} <= set(asked)
    loaded = ("args = SFT", "model = PeftModel.from_pretrained(model, 'there', is_trainable=True)\nargs = SFT")
    assert {"lora_r", "lora_target_modules"} <= set(asked_for(of(tmp_path, loaded)))


def test_cells_of_a_notebook_that_are_saved_as_a_script(tmp_path: Path) -> None:
    assert of(tmp_path, ("model = Auto", "%env WANDB_PROJECT=own\n!pip install trl\nmodel = Auto")).sequence_length == 2048


def test_bits_that_compute_in_half_of_the_precision(tmp_path: Path) -> None:
    bits = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"
    single = (("SFTConfig(", "TrainingArguments("), (" max_length=2048, bf16=True,", ""), ("train_dataset=d)", LORA[2:]))
    found = of(tmp_path, *single, ('B")', f'B", quantization_config={bits})'))
    assert found.precision == "fp32" and any("bnb_4bit_compute_dtype" in one for one in found.notes)

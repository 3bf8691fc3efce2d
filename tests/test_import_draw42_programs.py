"""Practice before draw 42, programs of transformers and TRL: what they cast, sections that they write, commands without options.
Short files of the same shape."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SHARDED = """
import argparse
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=2)
args = p.parse_args()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", dtype="bfloat16")
words = {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "fsdp_activation_checkpointing": CHECKPOINTS}
config = SFTConfig(per_device_train_batch_size=args.batch, gradient_accumulation_steps=4, max_length=1024, bf16=True,
                   gradient_checkpointing=False, fsdp="full_shard auto_wrap", fsdp_config=words)
SFTTrainer(model=model, args=config, train_dataset=d, peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()
"""


def _run(folder: Path, program: str, command: str = "python tune.py --batch 2", **settings: str) -> Reading:
    written(folder, program, "tune.py")
    return read(written(folder, f"{command}\n", "run.sh"), None, Given(num_gpus=2, settings=settings))


@pytest.mark.parametrize(("word", "kept"), [("True", Recompute.FULL), ("False", Recompute.NONE)])
def test_a_section_that_a_program_writes_counts(tmp_path: Path, word: str, kept: Recompute) -> None:
    found = _run(tmp_path, SHARDED.replace("CHECKPOINTS", word), "torchrun --nproc_per_node=2 tune.py --batch 2")
    assert (found.fields["zero"], found.fields["recompute"]) == (3, kept)


LOOP = """
import argparse, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=2)
args = p.parse_args()
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B", dtype="bfloat16")
BEFORE
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
BEHIND
config = TrainingArguments(per_device_train_batch_size=args.batch, bf16=True, gradient_accumulation_steps=4)
Trainer(model=model, args=config, train_dataset=d).train()
"""
TRAINED = "for one in filter(lambda p: p.requires_grad, model.parameters()):\n    one.data = one.data.to(torch.float32)"
EVERY = "for name, one in model.named_parameters():\n    one.data = one.data.float()"
SMALL = "for one in model.parameters():\n    if one.ndim == 1:\n        one.data = one.data.to(torch.float32)"


@pytest.mark.parametrize(("before", "behind", "base"), [
    (TRAINED, "", "fp32"), ("", TRAINED, "bf16"), (EVERY, "", "fp32"), ("", EVERY, "fp32"), (SMALL, "", "bf16"), ("", "", "bf16"),
])  # fmt: skip
def test_a_loop_that_casts_weights_decides_what_the_base_lies_in(tmp_path: Path, before: str, behind: str, base: str) -> None:
    text = LOOP.replace("BEFORE", before).replace("BEHIND", behind)
    settings = {"max_length": "512", "fsdp": "no_shard"}
    assert _run(tmp_path, text, **settings).frozen_weights == base


def test_a_loop_behind_adapters_of_another_function_leaves_the_base(tmp_path: Path) -> None:
    made = 'model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))'
    text = LOOP.replace(made, "model = adapted(model)").replace("BEFORE", "").replace("BEHIND", TRAINED)
    text = text.replace("p = argparse", f"def adapted(model):\n    {made}\n    return model\np = argparse")
    assert _run(tmp_path, text, max_length="512", fsdp="no_shard").frozen_weights == "bf16"
    early = LOOP.replace(made, f"config = LoraConfig(r=8, target_modules=['q_proj', 'v_proj'])\n{TRAINED}\n{made}")
    found = _run(tmp_path, early.replace("BEFORE", "").replace("BEHIND", ""), max_length="512", fsdp="no_shard")
    assert found.frozen_weights == "fp32"


BARE = LOOP.replace("BEFORE", "").replace("BEHIND", "").replace("args.batch", "4").replace("p.parse_args()", "None")
BARE = "\n".join(line for line in BARE.splitlines() if not line.startswith(("p.", "p =", "import argparse", "args")))
PREPARES = "#SBATCH --gres=gpu:a100:1\nPY=/opt/env/bin/python3\nmkdir -p out\n$PY -c 'import trl'\ncd $(mktemp -d)\n"


def test_a_program_that_is_started_without_options(tmp_path: Path) -> None:
    written(tmp_path, BARE, "tune.py")
    job = written(tmp_path, f"#!/bin/bash\n{PREPARES}$PY tune.py 2>&1 | tee log\n", "job.sh")
    found = read(job, None, Given(settings={"max_length": "512"}))
    assert (found.num_gpus, found.fields["micro_batch_size"], found.lora_rank) == (1, 4, 8)


def test_other_programs_without_options_are_no_training(tmp_path: Path) -> None:
    written(tmp_path, "import json\nprint(json)\n", "clean.py")
    with pytest.raises(PlannerError, match="looks like no configuration"):
        read(written(tmp_path, "python clean.py\n", "job.sh"), None, Given())


def test_a_job_with_one_gpu_is_on_one_gpu(tmp_path: Path) -> None:
    written(tmp_path, SHARDED.replace("CHECKPOINTS", "False"), "tune.py")
    for options, gpus in (
        ("gres=gpu:h100:1", 1), ("gres=gpu:1 nodes=2", None), ("", None), ("gres=gpu:2 ntasks=2 nodes=1", 2), ("gres=gpu:2", None),
    ):  # fmt: skip
        lines = "".join(f"#SBATCH --{one}\n" for one in options.split())
        text = f"#!/bin/bash\n{lines}srun python tune.py --batch 2\n"
        assert read(written(tmp_path, text, "job.sh"), None, Given()).num_gpus == gpus


def test_ranks_of_mpirun_and_a_program_behind_many_options(tmp_path: Path) -> None:
    """The program stands behind more words than a launcher of one node has."""
    written(tmp_path, BARE, "tune.py")
    options = "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x PATH -mca pml ob1 -mca btl ^openib"
    text = f"#!/bin/bash\nEACH=4\nmpirun -np $(($EACH * 2)) -npernode $EACH -hostfile hosts {options} python tune.py\n"
    found = read(written(tmp_path, text, "job.sh"), None, Given(settings={"max_length": "512", "fsdp": "no_shard"}))
    assert (found.num_gpus, found.fields["dp"], found.lora_rank) == (8, 8, 8)


SPREAD = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
login = {"token": KEY} if KEY else {}
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B", WORDS)
args = SFTConfig(per_device_train_batch_size=2, max_length=512, bf16=True, gradient_checkpointing=True)
adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
SFTTrainer(model=model, args=args, train_dataset=d, peft_config=adapters).train()
"""


@pytest.mark.parametrize(("words", "asked"), [("**job.words(config)", ["torch_dtype"]), ("**login", [])])
def test_the_dtype_of_keywords_that_are_not_followed_is_asked_for(tmp_path: Path, words: str, asked: list[str]) -> None:
    written(tmp_path, "transformers==4.57.1\n", "requirements.txt")
    written(tmp_path, SPREAD.replace("WORDS", words), "tune.py")
    settings = {"fsdp": "no_shard"}
    found = read(tmp_path / "tune.py", None, Given(num_gpus=1, settings=settings))
    assert [one.name for one in found.questions] == asked
    for dtype, base in (("bfloat16", "bf16"), ("float32", "fp32")) if asked else ():
        answered = Given(num_gpus=1, settings={**settings, "torch_dtype": dtype})
        assert read(tmp_path / "tune.py", None, answered).frozen_weights == base


RECIPE = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nbf16: true\n"


@pytest.mark.parametrize("name", ["dpo.yaml", "dpo/kto_pair_beta0.1.yaml"])
def test_kto_pair_is_a_loss_of_dpo(tmp_path: Path, name: str) -> None:
    recipe = f"{RECIPE}beta: 0.1\nmax_length: 1024\nloss_type: kto_pair\ngradient_checkpointing: true\n"
    assert read(written(tmp_path, recipe, name), "trl", Given(num_gpus=1, settings={"fsdp": "no_shard"})).objective == "dpo"
    with pytest.raises(PlannerError, match="KTO is not modelled"):
        read(written(tmp_path, recipe.replace("kto_pair", "kto"), "dpo.yaml"), "trl", Given())


@pytest.mark.parametrize("loss", ["sigmoid", "apo_zero", "exo_pair", "[sigmoid, bco_pair]", "sigmoid_norm"])
def test_losses_of_trl_are_no_question(tmp_path: Path, loss: str) -> None:
    recipe = f"{RECIPE}beta: 0.1\nmax_length: 1024\nloss_type: {loss}\ngradient_checkpointing: true\n"
    found = read(written(tmp_path, recipe, "dpo.yaml"), "trl", Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert (found.objective, found.questions) == ("dpo", ())


def test_a_loss_that_trl_does_not_have_is_asked_for(tmp_path: Path) -> None:
    """A program of its own may pass a list of answers where TRL passes a pair."""
    recipe = f"{RECIPE}beta: 0.1\nmax_length: 1024\nloss_type: listwise\nlist_size: 8\ngradient_checkpointing: true\n"
    file = written(tmp_path, recipe, "dpo.yaml")
    settings = {"fsdp": "no_shard"}
    assert [one.name for one in read(file, "trl", Given(num_gpus=1, settings=settings)).questions] == ["loss_type"]
    assert read(file, "trl", Given(num_gpus=1, settings={**settings, "loss_type": "sigmoid"})).objective == "dpo"


def test_a_compiled_model_under_deepspeed_has_a_note(tmp_path: Path) -> None:
    written(tmp_path, ENGINE.replace("BF16", "true").replace("STAGE", "3"), "ds.json")
    recipe = f"{RECIPE}max_length: 1024\ngradient_checkpointing: true\ntorch_compile: true\n"
    for more, noted in (("deepspeed: ds.json\n", True), ("fsdp: full_shard auto_wrap\n", False)):
        found = read(written(tmp_path, recipe + more, "sft.yaml"), "trl", Given(num_gpus=2))
        assert any("torch.compile is not priced" in one for one in found.notes) == noted
        assert ("compile=on" in found.trainer) != noted


QLORA = """model_name_or_path: Qwen/Qwen2.5-7B
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: BF16
fp16: FP16
max_length: 1024
gradient_checkpointing: true
use_peft: true
load_in_4bit: true
lora_r: 64
lora_target_modules: all-linear
"""


@pytest.mark.parametrize(("pin", "half", "options"), [
    ("==0.7.4", "bf16", "+unquantised=fp32"), ("==0.8.2", "bf16", "+unquantised=norms+adapter_dtype=half"),
    ("==0.19.0", "bf16", "+unquantised=norms"), ("==0.19.0", "fp16", "+unquantised=fp32"),
    ("==0.26.1", "bf16", "+unquantised=norms+adapter_dtype=half"), ("==0.28.0", "bf16", "+adapter_dtype=half"), ("", "bf16", ""),
])  # fmt: skip
def test_what_trl_casts_beside_a_quantised_base(tmp_path: Path, pin: str, half: str, options: str) -> None:
    written(tmp_path, f"trl{pin}\n", "requirements.txt")
    text = QLORA.replace("BF16", str(half == "bf16").lower()).replace("FP16", str(half == "fp16").lower())
    found = read(written(tmp_path, text, "sft.yaml"), "trl", Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert found.trainer.partition("=full")[2] == options or found.trainer == f"trl{options}"
    notes = " ".join(found.notes)
    assert ("norms are priced in bf16, and TRL before 0.27 casts them to fp32" in notes) == (not pin)
    assert ("since 0.26, where that is its version, casts adapters" in notes and "too high by 0.6 GiB" in notes) == (not pin)
    small = text.replace("r: 64", "r: 16").replace("2.5-7B", "2.5-0.5B")
    found = read(written(tmp_path, small, "sft.yaml"), "trl", Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert any("too high by 0.03 GiB or more" in one for one in found.notes) == (not pin)


@pytest.mark.parametrize("name", ["environment.yml", "sft-env.yaml", "conda_env.yml"])
def test_versions_that_an_environment_of_conda_pins(tmp_path: Path, name: str) -> None:
    written(tmp_path, "name: sft\ndependencies:\n  - pip:\n      - transformers==4.56.2\n      - trl==0.23.0\n", name)
    recipe = written(tmp_path, f"{RECIPE}max_length: 1024\n", "sft.yaml")
    found = read(recipe, "trl", Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert (found.questions, found.fields["recompute"]) == ((), Recompute.FULL)


CASTS = """
def finish(model, args):
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            if args.bf16:
                module = module.to(torch.bfloat16)
"""


@pytest.mark.parametrize("option", ["True", "False"])
def test_adapters_that_a_program_casts_are_said(tmp_path: Path, option: str) -> None:
    text = LOOP.replace("BEFORE", "").replace("BEHIND", "finish(model, args)").replace("r=8", "r=512")
    text = text.replace("p.add", 'p.add_argument("--bf16", type=bool, default=False)\np.add', 1)
    text = text.replace("args = p", f"{CASTS}args = p")
    found = _run(tmp_path, text, f"python tune.py --batch 2 --bf16 {option}", max_length="512", fsdp="no_shard")
    assert ("adapter_dtype=half" in found.trainer) == (option == "True")


ENGINE = '{"bf16": {"enabled": BF16}, "zero_optimization": {"stage": STAGE}, "train_micro_batch_size_per_gpu": "auto"}'


@pytest.mark.parametrize(("half", "stage", "base"), [("true", 3, "bf16"), ("true", 2, "bf16"), ("false", 2, "fp32")])
def test_deepspeed_in_half_precision_casts_frozen_weights_too(tmp_path: Path, half: str, stage: int, base: str) -> None:
    """A program that loads in fp32: its dtype changes nothing under DeepSpeed in bf16, and is not asked for."""
    written(tmp_path, ENGINE.replace("BF16", half).replace("STAGE", str(stage)), "ds.json")
    text = SHARDED.replace('dtype="bfloat16"', "").replace("bf16=True", f"bf16={half.title()}, deepspeed='ds.json'")
    text = text.replace(', fsdp="full_shard auto_wrap", fsdp_config=words', "")
    found = _run(tmp_path, text, "torchrun --nproc_per_node=2 tune.py --batch 2")
    assert (found.frozen_weights, found.fields["zero"]) == (base, stage)
    command = "torchrun --nproc_per_node=2 elsewhere.py --model_name_or_path Qwen/Qwen3-8B --use_lora True --lora_r 8 "
    command += f"--bf16 {half.title()} "
    command += "--per_device_train_batch_size 2 --model_max_length 512 --lora_target_modules q_proj,v_proj --deepspeed ds.json"
    asked = [one.name for one in read(written(tmp_path, f"{command}\n", "job.sh"), None, Given()).questions]
    assert ("torch_dtype" in asked) == (half == "false")


def test_deepspeed_brings_tables_back(tmp_path: Path) -> None:
    written(tmp_path, ENGINE.replace("BF16", "true").replace("STAGE", "2"), "ds.json")
    recipe = QLORA.replace("BF16", "true").replace("FP16", "false")
    written(tmp_path, "trl==0.7.4\n", "requirements.txt")
    found = read(written(tmp_path, f"{recipe}deepspeed: ds.json\n", "sft.yaml"), "trl", Given(num_gpus=2))
    assert found.frozen_weights == "nf4" and not any("fp32" in one for one in found.notes)

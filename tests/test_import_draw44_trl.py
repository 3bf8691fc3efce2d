"""What TRL and unsloth do without a word in the file, by their sources."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.cost.state_dtypes import stored_as
from planner.errors import PlannerError
from planner.model import load_model
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.workload import Workload

SFT = """model_name_or_path: Qwen/Qwen2.5-7B
dtype: bfloat16
max_length: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
dataset_name: rows
"""
ADAPTERS = "use_peft: true\nlora_r: 16\nlora_target_modules: all-linear\n"
DPO = SFT + "beta: 0.1\n"
LEAN = """
from unsloth import FastLanguageModel, add_new_tokens
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(output_dir="out"), train_dataset=rows).train()
"""


def found(folder: Path, text: str, name: str = "recipe.yaml", gpus: int | None = 1, trl: str = "", **settings: str) -> Reading:
    if trl:
        written(folder, f"trl=={trl}\n", "requirements.txt")
    return read(written(folder, text, name), None, Given(num_gpus=gpus, settings=settings))


def says(reading: Reading, text: str) -> bool:
    return any(text in one for one in reading.notes)


@pytest.mark.parametrize(
    ("words", "zero", "dp", "trainer"),
    [
        ("--accelerate_config zero3 --num_processes 4", 3, 4, "deepspeed"),
        ("--accelerate_config fsdp2", 3, 8, "trl"),
        ("--accelerate_config single_gpu", 0, 1, "trl"),
        ("--num_processes 2", 0, 2, "trl"),
    ],
)
def test_what_trl_hands_to_accelerate(tmp_path: Path, words: str, zero: int, dp: int, trainer: str) -> None:
    written(tmp_path, SFT, "sft.yaml")
    reading = found(tmp_path, f"trl sft --config sft.yaml {words}\n", "run.sh", None)
    assert (reading.fields["zero"], reading.fields["dp"], reading.trainer.partition("+")[0]) == (zero, dp, trainer)
    assert reading.questions == () and not any("accelerate_config" in one for one in reading.unread)


def test_a_recipe_that_names_a_configuration_of_trl(tmp_path: Path) -> None:
    reading = found(tmp_path, SFT + "accelerate_config: zero2\nnum_processes: 4\n", gpus=None)
    assert (reading.fields["zero"], reading.fields["dp"], reading.questions) == (2, 4, ())
    assert "accelerate" in asked_for(found(tmp_path, SFT + "accelerate_config: mine\n", gpus=None))


def test_dropout_of_pairs(tmp_path: Path) -> None:
    words = DPO + ADAPTERS + "lora_dropout: 0.1\n"
    assert "adapter_dropout" not in found(tmp_path, words).trainer
    assert "adapter_dropout=on" in found(tmp_path, words + "disable_dropout: false\n").trainer
    assert "adapter_dropout=on" in found(tmp_path, SFT + ADAPTERS + "lora_dropout: 0.1\n").trainer


@pytest.mark.parametrize(
    ("word", "trl", "loss", "noted"),
    [
        ("use_liger_kernel", "0.19.1", "full", False),
        ("use_liger_loss", "0.19.1", "fused_linear", False),
        ("use_liger_kernel", "0.26.0", "fused_linear", False),
        ("use_liger_kernel", "", "fused_linear", True),
    ],
)
def test_ligers_loss_of_pairs_by_version(tmp_path: Path, word: str, trl: str, loss: str, noted: bool) -> None:
    reading = found(tmp_path, f"{DPO}{ADAPTERS}{word}: true\n", trl=trl)
    assert f"loss={loss}" in reading.trainer
    assert says(reading, "fuses the loss of DPO since TRL 0.25") is noted


def test_notes_on_pairs(tmp_path: Path) -> None:
    """The reference model in fp32, and the one that an older TRL makes no more once its log probabilities are there."""
    wide = DPO.replace("dtype: bfloat16\n", "")
    assert says(found(tmp_path, wide), "the reference model lies in fp32")
    assert not says(found(tmp_path, DPO), "lies in fp32") and not says(found(tmp_path, wide + ADAPTERS), "lies in fp32")
    program = """
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", torch_dtype="bfloat16")
args = DPOConfig(bf16=True, max_length=1024, gradient_checkpointing=True, precompute_ref_log_probs=True)
DPOTrainer(model, args=args, train_dataset=rows).train()
"""
    assert says(found(tmp_path, program, "pairs.py"), "TRL before 0.29 holds no such model")
    assert not says(found(tmp_path, program, "pairs.py", trl="1.0.0"), "TRL before 0.29 holds no such model")


def test_a_template_of_another_vocabulary_trains_the_head(tmp_path: Path) -> None:
    words = SFT + ADAPTERS
    assert says(found(tmp_path, words + "chat_template_path: other/model\n"), "TRL trains the head as a whole")
    for quiet in ("chat_template_path: chat.jinja\n", "", "chat_template_path: other/model\nlora_modules_to_save: [lm_head]\n"):
        assert not says(found(tmp_path, words + quiet), "TRL trains the head as a whole")


def test_the_loss_in_pieces_over_deepspeed(tmp_path: Path) -> None:
    sharded = SFT + "deepspeed: zero3\n"
    assert says(found(tmp_path, sharded, gpus=8), "all scores are kept, as in TRL before 1.7")
    newest = found(tmp_path, sharded, gpus=8, loss_type="chunked_nll")
    assert "loss=chunked" in newest.trainer
    assert sum(one.head_bytes(load_trainer(newest.trainer)) for one in load_trainer(newest.trainer).terms) == 6.0
    assert not says(found(tmp_path, sharded, gpus=8, trl="0.24.0"), "scores")


@pytest.mark.parametrize(("trl", "loss", "noted"), [("", "full", True), ("0.24.0", "full", False), ("1.8.0", "chunked", False)])
def test_the_loss_under_arguments_of_transformers(tmp_path: Path, trl: str, loss: str, noted: bool) -> None:
    program = """
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", torch_dtype="bfloat16")
SFTTrainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=rows).train()
"""
    reading = found(tmp_path, program, "tune.py", trl=trl)
    assert load_trainer(reading.trainer).stored.loss == loss
    assert says(reading, "all scores are kept, as in TRL before 1.7") is noted


def test_bits_that_the_trainer_is_given(tmp_path: Path) -> None:
    reading = found(tmp_path, """
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
args = SFTConfig(bf16=True, gradient_checkpointing=True, max_length=1024)
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
SFTTrainer("Qwen/Qwen2.5-7B", args=args, train_dataset=rows, quantization_config=bits, peft_config=LoraConfig(r=8)).train()
""", "tune.py")  # fmt: skip
    assert (reading.frozen_weights, reading.questions) == ("nf4_dq", ())


PARSED = """
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
script, args, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
SFTTrainer(model=model.model_name_or_path, args=args, train_dataset=rows, peft_config=get_peft_config(model)).train()
"""


@pytest.mark.parametrize(("trl", "precision", "recompute"), [("0.24.0", "bf16", True), ("0.15.2", "fp32", False)])
def test_a_program_of_trl_by_any_name(tmp_path: Path, trl: str, precision: str, recompute: bool) -> None:
    written(tmp_path, PARSED, "tune.py")
    words = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --max_length 2048"
    reading = found(tmp_path, f"torchrun --nproc_per_node 2 tune.py {words}\n", "run.sh", None, trl)
    assert (reading.trainer, reading.precision, reading.fields["recompute"] > 0) == ("trl+loss=full", precision, recompute)


def test_the_program_of_trl_before_it_took_arguments_of_transformers(tmp_path: Path) -> None:
    words = "--model_name meta-llama/Llama-2-7b-hf --load_in_4bit --use_peft --batch_size 4"
    old = found(tmp_path, f"python examples/scripts/sft.py {words}\n", "old.sh")
    assert (old.lora_rank, old.sequence_length, old.fields["num_microbatches"], old.questions) == (64, 512, 16, ())


@pytest.mark.parametrize(
    ("old", "new", "frozen"),
    [
        ("1024", "1024, load_in_4bit=False", "bf16"),
        ("1024", "1024, load_in_4bit=False, use_exact_model_name=True", "nf4"),
        ("1024", "1024", "nf4_dq"),
        ("llama-3-8b-bnb-4bit", "Qwen3-8B-bf16", "bf16"),
        ("1024", "1024, load_in_4bit=False, quantization_config=BitsAndBytesConfig(load_in_8bit=True)", "int8"),
    ],
)
def test_what_unsloth_loads(tmp_path: Path, old: str, new: str, frozen: str) -> None:
    assert found(tmp_path, LEAN.replace(old, new), "own.py").frozen_weights == frozen


def test_all_weights_in_fp32_under_unsloth(tmp_path: Path) -> None:
    whole = LEAN.replace("1024", "1024, full_finetuning=True, float32_mixed_precision=True")
    assert found(tmp_path, whole, "own.py", gradient_checkpointing="true").precision == "bf16"
    less = whole.replace("=True)", "=False)", 1)
    assert found(tmp_path, less, "own.py", gradient_checkpointing="true").precision == "bf16_true"


def test_keywords_of_unsloth_that_change_what_is_trained(tmp_path: Path) -> None:
    added = LEAN.replace("model = Fast", 'add_new_tokens(model, tokenizer, ["<a>"])\nmodel = Fast')
    assert found(tmp_path, added, "own.py").lora_whole == "both"
    assert says(found(tmp_path, LEAN.replace("1024", "1024, fast_inference=True"), "own.py"), "vLLM")
    for word in ("finetune_last_n_layers=4", "finetune_language_layers=False"):
        with pytest.raises(PlannerError, match=word.partition("=")[0]):
            found(tmp_path, LEAN.replace("r=16", f"r=16, {word}"), "own.py")
    for word in ("num_labels=2", "auto_model=AutoModelForSequenceClassification"):
        with pytest.raises(PlannerError, match="to classify"):
            found(tmp_path, LEAN.replace("1024", f"1024, {word}"), "own.py")
    images = LEAN.replace("FastLanguageModel", "FastVisionModel")
    assert says(found(tmp_path, images, "own.py"), "adapters on the image encoder")
    assert not says(found(tmp_path, images.replace("r=16", "r=16, finetune_vision_layers=False"), "own.py"), "image encoder")


PAIRS = """
from unsloth import FastLanguageModel, PatchDPOTrainer
from trl import DPOConfig, DPOTrainer
PatchDPOTrainer()
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=4096, device_map="balanced")
model = FastLanguageModel.get_peft_model(model, r=16)
DPOTrainer(model=model, args=DPOConfig(output_dir="out", max_length=2048), train_dataset=rows, beta=0.1).train()
"""


@pytest.mark.parametrize(("said", "length"), [(", max_length=2048", 2048), (", max_length=8192", 4096), ("", 1024)])
def test_pairs_under_unsloth_are_cut_by_trl(tmp_path: Path, said: str, length: int) -> None:
    """And a class of unsloth that is called like a trainer is none."""
    reading = found(tmp_path, PAIRS.replace(", max_length=2048", said), "own.py", None)
    assert (reading.sequence_length, reading.questions) == (length, ())
    assert says(reading, "device_map balanced")


def test_layer_inputs_of_short_sequences_stay_on_the_gpu(tmp_path: Path) -> None:
    short = LEAN.replace("1024", "256")
    assert found(tmp_path, LEAN, "own.py").fields["offload_activations"] > 0
    assert found(tmp_path, short, "own.py").fields["offload_activations"] == 0
    written(tmp_path, "unsloth==2025.9.6\n", "requirements.txt")
    assert found(tmp_path, short, "own.py").fields["offload_activations"] > 0


def test_a_program_of_unsloth_by_a_name_of_trl(tmp_path: Path) -> None:
    """With options of its own, and where it has another name."""
    program = LEAN.replace("r=16", "r=args.rank").replace('out")', 'out", per_device_train_batch_size=args.batch)')
    options = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--rank', type=int, default=8)\n"
    options += "p.add_argument('--batch', type=int, default=2)\nargs = p.parse_args()\n"
    for name in ("train_sft.py", "unsloth-cli.py"):
        written(tmp_path, options + program, name)
        reading = found(tmp_path, f"python {name} --batch 8 --rank 32\n", "run.sh", None)
        assert (reading.trainer, reading.lora_rank, reading.fields["micro_batch_size"], reading.questions) == ("unsloth", 32, 8, ())


def test_the_command_line_of_unsloth_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"unsloth-cli\.py is not there"):
        found(tmp_path, "python unsloth-cli.py --model_name rows --per_device_train_batch_size 4 --max_seq_length 2048\n", "run.sh")


def test_the_optimizer_of_the_alignment_handbook(tmp_path: Path) -> None:
    words = DPO + "dataset_mixer: {rows: 1.0}\n"
    assert says(found(tmp_path, words), "RMSprop") and not says(found(tmp_path, words + "optim: adamw_torch\n"), "RMSprop")


def test_the_scores_of_unsloth(tmp_path: Path) -> None:
    """All of them for pairs, whose loss it does not fuse; for labels pieces as large as free memory allows."""
    labels = found(tmp_path, LEAN, "own.py")
    assert says(labels, "pieces of the scores that fill half of the free memory")
    assert not says(found(tmp_path, PAIRS, "own.py"), "pieces of the scores")
    trainer = load_trainer("unsloth")
    job = Workload(model=load_model("llama-3.2-1b"), sequence_length=1024, global_batch_size=8, objective="dpo")
    pairs = stored_as(job, trainer)
    assert (pairs.stored.loss, pairs.stored.logit_bytes) == ("full", 8.0)
    fused = load_trainer("trl+loss=fused_linear")
    assert stored_as(job, fused).stored.loss == "fused_linear"

"""What the class of a model, its preparation and words of a program's own decide beside what arguments say."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

RECIPE = """model_name_or_path: EleutherAI/pythia-1b
max_seq_length: 1024
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
gradient_checkpointing: false
bf16: true
deepspeed: zero3
"""


def found(folder: Path, pins: str = "", text: str = RECIPE, name: str = "sft.yaml", gpus: int = 8, **settings: str) -> Reading:
    """A file of a project with those requirements."""
    written(folder, f"{pins}\n", "requirements.txt")
    return read(written(folder, text, name), None, Given(num_gpus=gpus, settings=settings))


@pytest.mark.parametrize(
    ("model", "pins", "eager"),
    [
        ("EleutherAI/pythia-1b", "transformers==4.40.1", True),
        ("EleutherAI/pythia-1b", "transformers==4.42.0", False),
        ("facebook/opt-1.3b", "transformers==4.45.2", True),
        ("meta-llama/Llama-2-7b-hf", "transformers==4.35.2", True),
        ("meta-llama/Llama-2-7b-hf", "transformers==4.36.0", False),
        ("bigscience/bloom-7b1", "", True),
    ],
)
def test_attention_is_that_of_the_class_in_its_version(tmp_path: Path, model: str, pins: str, eager: bool) -> None:
    text = RECIPE.replace("EleutherAI/pythia-1b", model)
    job = found(tmp_path, pins, text)
    assert ("attention_kernel=eager" in job.trainer) is eager
    assert any("takes eager attention, which keeps its scores" in one for one in job.notes) is eager
    named = found(tmp_path, pins, text + "attn_implementation: flash_attention_2\n")
    assert "attention_kernel=eager" not in named.trainer


def test_attention_without_a_pin_or_with_a_patch(tmp_path: Path) -> None:
    job = found(tmp_path)
    assert "eager" not in job.trainer
    assert any("before 4.42 keeps the scores of attention" in one and "attn_implementation=eager" in one for one in job.notes)
    written(tmp_path, "from flash_attn import flash_attn_func\n", "patch.py")
    assert "eager" not in found(tmp_path, "transformers==4.40.1").trainer


def test_scores_over_the_vocabulary_of_a_class_that_leaves_them_in_halves(tmp_path: Path) -> None:
    assert any("in half precision under DeepSpeed" in one and "too high by up to 1.5 GiB" in one
               for one in found(tmp_path, "transformers==4.40.1").notes)  # fmt: skip
    assert not any("in half precision" in one for one in found(tmp_path, "transformers==4.51.0").notes)


PREPARED = """from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", quantization_config=four)
model = prepare_model_for_kbit_training(model)
args = SFTConfig(max_length=1024, per_device_train_batch_size=4, gradient_checkpointing=True, BF16, loss_type="nll")
lora = LoraConfig(r=16, target_modules="all-linear")
SFTTrainer(model=model, args=args, peft_config=lora).train()
"""


def test_layers_of_a_prepared_base_pass_fp32_on(tmp_path: Path) -> None:
    text = PREPARED.replace("BF16", "bf16=True")
    job = found(tmp_path, "trl==0.28.0", text, "tune.py", 1)
    assert job.trainer.endswith("+unquantised=fp32+adapter_dtype=half") and not any("casts" in one for one in job.notes)
    sharded = text.replace("bf16=True", "bf16=True, fsdp='full_shard'")  # which brings what is trained to fp32
    assert found(tmp_path, "trl==0.28.0", sharded, "tune.py", 8).trainer.endswith("+unquantised=fp32")
    pairs = text.replace("SFT", "DPO").replace('"nll"', '"sigmoid"')  # whose adapters TRL leaves in fp32 until 0.29
    for pin, half in (("0.28.0", False), ("0.29.0", True)):
        assert ("adapter_dtype=half" in found(tmp_path, f"trl=={pin}", pairs, "tune.py", 1).trainer) is half


def test_without_autocast_nothing_is_priced_in_halves(tmp_path: Path) -> None:
    job = found(tmp_path, "trl==0.28.0", PREPARED.replace("BF16", "bf16=False, fp16=False"), "tune.py", 1)
    assert job.precision == "fp32" and not any("casts" in one and "to fp32" in one for one in job.notes)
    half = found(tmp_path, "trl==0.28.0", PREPARED.replace("BF16", "fp16=True, bf16=False"), "tune.py", 1)
    assert "unquantised=fp32" in half.trainer


def test_words_of_layers_that_quantise_are_noted(tmp_path: Path) -> None:
    job = found(tmp_path, "transformers==4.51.0", RECIPE + "w_bits: 4\na_bits: 8\n")
    assert any("w_bits, a_bits" in one and "memory comes out too low by up to 1.5 GiB" in one for one in job.notes)
    assert not any("quantise while" in one for one in found(tmp_path, "", RECIPE + "w_bits: 16\nkv_bits: null\n").notes)
    assert not any("quantise while" in one for one in found(tmp_path, "", RECIPE + "w_bits: 'none'\nste_name: left\n").notes)
    assert any("'ste'" in one and "quantise while" in one for one in found(tmp_path, "", RECIPE + "ste: true\n").notes)


OWN = """from trl import SFTTrainer, TrlParser
from transformers import AutoModelForCausalLM
from layers.low import Qwen2ForCausalLM as Low
model = Low.from_pretrained(args.model_name_or_path)
SFTTrainer(model=model).train()
"""


def test_a_model_class_of_the_project_is_noted(tmp_path: Path) -> None:
    written(tmp_path, OWN, "own_sft.py")
    written(tmp_path, "deepspeed_config: {zero_stage: 3}\ndistributed_type: DEEPSPEED\nnum_processes: 8\n", "zero.yaml")
    written(tmp_path, "Run `accelerate launch --config_file zero.yaml own_sft.py --config sft.yaml`\n", "README.md")
    assert not any("a class of its project" in one for one in found(tmp_path).notes)  # no module of that name is there
    written(tmp_path, "class Qwen2ForCausalLM: ...\n", "layers/low.py")
    assert any("own_sft.py loads Qwen2ForCausalLM of low.py, a class of its project" in one for one in found(tmp_path).notes)
    command = "accelerate launch --config_file zero.yaml own_sft.py --model_name_or_path Qwen/Qwen2.5-7B --max_length 512\n"
    assert any("a class of its project" in one for one in found(tmp_path, "", command, "run.sh").notes)


@pytest.mark.parametrize(
    "words", ["use_selective: true\nselected_layers: [down_proj]\n", "parts: [q_proj, v_proj]\n", "trainable_layers: 4\n"]
)
def test_words_that_choose_weights_are_asked_once(tmp_path: Path, words: str) -> None:
    job = found(tmp_path, "transformers==4.51.0", RECIPE + words)
    name = words.partition(":")[0]
    assert asked_for(job) == [name] and "may train a part of the weights" in str(job.questions[0])
    assert asked_for(found(tmp_path, "transformers==4.51.0", RECIPE + words, **{name: "null"})) == []


@pytest.mark.parametrize(
    "name", ["llm_int8_skip_modules", "modules_to_not_convert", "no_decay_layers", "compile_ignore", "optim_target_modules"]
)
def test_lists_of_layers_for_something_else_are_not_asked_for(tmp_path: Path, name: str) -> None:
    assert asked_for(found(tmp_path, "transformers==4.51.0", f"{RECIPE}{name}: [lm_head, q_proj]\n")) == []
    assert asked_for(found(tmp_path, "transformers==4.51.0", f"{RECIPE}no_grad_layers: [q_proj]\n")) == ["no_grad_layers"]


def test_stage_0_of_deepspeed_in_bf16_is_said(tmp_path: Path) -> None:
    text = RECIPE.replace("deepspeed: zero3", "deepspeed: zero0")
    assert any("at stage 0 in bf16" in one and "too high by 6.5 bytes" in one for one in found(tmp_path, "", text).notes)
    assert any("too low by 4.0 bytes" in one for one in found(tmp_path, "", text, gpus=1).notes)
    assert not any("at stage 0" in one for one in found(tmp_path).notes)


def test_adapters_of_joint_layers_are_said(tmp_path: Path) -> None:
    text = RECIPE.replace("EleutherAI/pythia-1b", "internlm/internlm2-7b") + "use_peft: true\nlora_r: 64\ntorch_dtype: bfloat16\n"
    text += "lora_target_modules: all-linear\n"
    assert any("one layer, which PEFT gives one adapter" in one for one in found(tmp_path, "", text).notes)
    plain = text.replace("internlm/internlm2-7b", "Qwen/Qwen2.5-7B")
    assert not any("which PEFT gives one adapter" in one for one in found(tmp_path, "", plain).notes)


SWIFT = """LORA_KIND=mixed swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --lora_rank 8 --max_length 2048 \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 2 OWN
"""


def test_switches_of_a_fork_of_ms_swift_are_asked(tmp_path: Path) -> None:
    text = SWIFT.replace("OWN", "--use_replay_loss True --replay_limit 200")
    path = written(tmp_path, text, "a.sh")
    job = read(path, None, Given(num_gpus=1))
    assert asked_for(job) == ["use_replay_loss"] and any("LORA_KIND=mixed" in one for one in job.notes)
    assert asked_for(read(path, None, Given(num_gpus=1, settings={"use_replay_loss": "false"}))) == []
    assert asked_for(read(written(tmp_path, SWIFT.replace("OWN", ""), "b.sh"), None, Given(num_gpus=1))) == []


def test_variables_that_a_script_uses_itself_are_of_no_fork(tmp_path: Path) -> None:
    text = SWIFT.replace("LORA_KIND=mixed ", "export LORA_SIZE=8\n").replace("OWN", "--lora_alpha $((LORA_SIZE * 2))")
    assert not any("one of a fork" in one for one in read(written(tmp_path, text, "a.sh"), None, Given(num_gpus=1)).notes)


def test_profile_words_of_megatron_are_quiet(tmp_path: Path) -> None:
    text = "megatron sft --model Qwen/Qwen3-8B --max_length 2048 --micro_batch_size 1 --global_batch_size 16 OWN\n"
    own = "--profile true --use_pytorch_profiler true --profile_ranks 0 --profile_step_start 10 --profile_step_end 12"
    plain = read(written(tmp_path, text.replace("OWN", ""), "a.sh"), None, Given(num_gpus=8))
    job = read(written(tmp_path, text.replace("OWN", own), "b.sh"), None, Given(num_gpus=8))
    assert asked_for(job) == asked_for(plain) and job.unread == plain.unread


def test_layers_beside_adapters_are_still_refused(tmp_path: Path) -> None:
    text = RECIPE + "use_peft: true\nlora_r: 8\ntorch_dtype: bfloat16\nlora_modules_to_save: [down_proj]\n"
    with pytest.raises(PlannerError, match="trained as a whole beside adapters"):
        found(tmp_path, "", text)

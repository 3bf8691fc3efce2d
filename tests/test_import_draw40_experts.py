"""Experts and tables beside a base in 4 or 8 bits, adapters on tensors of experts, several trainings, moving averages."""

from pathlib import Path

import pytest

from planner.cost.state_dtypes import FROZEN_BYTES
from planner.errors import PlannerError
from planner.trainers.bundle.folder import make_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given
from planner.trainers.targets import load_target
from planner.trainers.transformers.training_run import front_end_refusals

AXOLOTL = (
    "base_model: Qwen/Qwen3-30B-A3B\ndatasets: [{path: x, type: alpaca}]\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\n"
    "sequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\nflash_attention: true\n"
    "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]\n"
)
DENSE = AXOLOTL.replace("Qwen3-30B-A3B", "Qwen3-8B")
TENSORS = "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n"
EXPERTS = 48 * 128 * 3 * 2048 * 768
"""Weights of the experts of the model above."""
PROGRAM = """
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", quantization_config=bits, dtype=torch.bfloat16)
model = prepare_model_for_kbit_training(model)
args = SFTConfig(per_device_train_batch_size=1, gradient_accumulation_steps=4, bf16=True, gradient_checkpointing=True,
                 max_length=2048)
lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
SFTTrainer(model=model, args=args, train_dataset=data, peft_config=lora).train()
"""


def _read(folder: Path, text: str, name: str = "job.yaml", **settings: str) -> Reading:
    (folder / name).write_text(text)
    return read(folder / name, None, Given(num_gpus=1, settings=settings))


def _weights(found: Reading) -> float:
    return to_plan(found, {"hardware": "h200"}).prediction.memory_gib["weights"] * 2**30


def _note(found: Reading, text: str) -> str:
    return next((one for one in found.notes if text in one), "")


def test_experts_are_quantised_where_axolotl_is_told_so(tmp_path: Path) -> None:
    asked = _read(tmp_path, AXOLOTL).questions
    assert [one.name for one in asked] == ["transformers"] and "94.1 GiB more" in asked[0].about
    plain, told = _read(tmp_path, AXOLOTL, transformers="5"), _read(tmp_path, AXOLOTL + "quantize_moe_experts: true\n")
    assert not plain.questions and "frozen_experts=linear" in _read(tmp_path, AXOLOTL, transformers="4").trainer
    assert "frozen_experts=fp32" in plain.trainer and "frozen_experts=quantised" in told.trainer
    assert _weights(plain) - _weights(told) == pytest.approx(EXPERTS * (4.0 - FROZEN_BYTES["nf4_dq"]), rel=1e-3)
    assert "priced in fp32" in _note(plain, "one tensor in transformers 5") and not _note(told, "one tensor")


def test_experts_of_transformers_4_are_layers(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==4.56.0\n")
    found = _read(tmp_path, AXOLOTL.replace("lora_target_modules: [q_proj, k_proj, v_proj, o_proj]", "lora_target_linear: true"))
    assert "frozen_experts=linear" in found.trainer and not _note(found, "one tensor")
    (tmp_path / "requirements.txt").write_text("transformers==5.5.0\n")
    newer = _read(tmp_path, AXOLOTL)
    assert "frozen_experts=fp32" in newer.trainer and "transformers 4" not in _note(newer, "one tensor")


def test_sharded_bases_are_not_cast(tmp_path: Path) -> None:
    found = _read(tmp_path, AXOLOTL + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n")
    assert "frozen_experts=half" in found.trainer


def test_adapters_on_tensors_of_experts_are_priced_beside_those_on_layers(tmp_path: Path) -> None:
    plain = _read(tmp_path, AXOLOTL + "quantize_moe_experts: true\n")
    found = _read(tmp_path, AXOLOTL + "quantize_moe_experts: true\n" + TENSORS)
    assert "expert_adapters=on" in found.trainer and "expert_adapters" not in plain.trainer
    assert "1.26 billion weights" in _note(found, "mlp.experts.gate_up_proj")
    more = 48 * 128 * 32 * (2 * 2048 + 3 * 768)
    assert _weights(found) - _weights(plain) == pytest.approx(4.0 * more, rel=1e-3)


def test_adapters_on_tensors_in_programs(tmp_path: Path) -> None:
    text = PROGRAM.replace('"v_proj"]', '"v_proj"], target_parameters=["mlp.experts.gate_up_proj"]')
    found = _read(tmp_path, text, "train.py", fsdp="no_shard")
    assert "expert_adapters=on" in found.trainer and found.lora_targets == "all"
    dense = _read(tmp_path, text.replace("Qwen3-30B-A3B", "Qwen3-8B"), "train.py", fsdp="no_shard")
    assert "expert_adapters" not in dense.trainer and _note(dense, "are not priced: memory comes out too low")


@pytest.mark.parametrize(("targets", "peft", "model", "adapted"), [
    ('"all-linear"', "", "Qwen3-30B-A3B", True), ('"all-linear"', "0.19.1", "Qwen3-30B-A3B", False),
    ('["q_proj", "gate_proj", "up_proj", "down_proj"]', "0.19.1", "Qwen3-30B-A3B", True),
    ('["q_proj", "gate_proj", "up_proj", "down_proj"]', "0.18.0", "Qwen3-30B-A3B", False),
    ('["q_proj", "v_proj"]', "", "Qwen3-30B-A3B", False), ('"all-linear"', "", "Qwen2-57B-A14B", False),
])  # fmt: skip
def test_names_of_layers_of_experts_mean_their_tensors(tmp_path: Path, targets: str, peft: str, model: str, adapted: bool) -> None:
    """Since PEFT 0.19, patterns and all-linear since 0.20, for families whose checkpoints transformers 5 converts."""
    (tmp_path / "requirements.txt").write_text("transformers==5.5.0\n" + f"peft=={peft}\n" * bool(peft))
    text = PROGRAM.replace('["q_proj", "v_proj"]', targets).replace("Qwen3-30B-A3B", model)
    found = _read(tmp_path, text, "train.py", fsdp="no_shard")
    assert ("expert_adapters=on" in found.trainer) is adapted
    told = _note(found, "with transformers 5 PEFT since 0.19 gives tensors of experts adapters too")
    assert bool(told) is adapted and "--set transformers=4" not in told
    (tmp_path / "requirements.txt").unlink()
    if adapted and not peft:
        told = _note(_read(tmp_path, text, "train.py", fsdp="no_shard"), "gives tensors of experts adapters too")
        assert "in transformers 4 they are layers with adapters, which --set transformers=4 prices" in told


def test_prediction_modules_are_not_built_by_transformers(tmp_path: Path) -> None:
    """DeepSeek-V3 without the module that its checkpoint has beside the 61 layers."""
    (tmp_path / "requirements.txt").write_text("transformers==5.5.0\n")
    found = _read(tmp_path, PROGRAM.replace("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"), "train.py", fsdp="no_shard")
    assert found.architecture["mtp_layers"] == 0 and _note(found, "without its prediction modules (MTP)")
    assert "mtp_layers" not in _read(tmp_path, PROGRAM, "train.py", fsdp="no_shard").architecture


def test_what_a_program_casts_is_said(tmp_path: Path) -> None:
    found = _read(tmp_path, PROGRAM, "train.py", fsdp="no_shard")
    assert "frozen_experts=fp32" in found.trainer and "unquantised=fp32" in found.trainer
    without = PROGRAM.replace("model = prepare_model_for_kbit_training(model)\n", "")
    (tmp_path / "requirements.txt").write_text("trl==0.29.0\ntransformers==5.5.0\n")
    newer = _read(tmp_path, without, "train.py", fsdp="no_shard")
    assert "frozen_experts=half" in newer.trainer and not _note(newer, "embedding, head and norms")
    (tmp_path / "requirements.txt").write_text("trl==0.24.0\ntransformers==5.5.0\n")
    assert "frozen_experts=fp32" in _read(tmp_path, without, "train.py", fsdp="no_shard").trainer
    (tmp_path / "requirements.txt").unlink()
    unknown = _read(tmp_path, without, "train.py", fsdp="no_shard")
    assert "then comes out too low by" in _note(unknown, "TRL before 0.27 casts such experts")


def test_what_unsloth_may_leave_in_16_bits_is_said(tmp_path: Path) -> None:
    text = (
        "from unsloth import FastModel\nfrom trl import SFTConfig, SFTTrainer\n"
        "model, tokenizer = FastModel.from_pretrained('unsloth/Qwen3-30B-A3B', max_seq_length=2048, load_in_4bit=True)\n"
        "model = FastModel.get_peft_model(model, r=16, target_modules=['q_proj', 'v_proj'])\n"
        "args = SFTConfig(per_device_train_batch_size=1, gradient_accumulation_steps=4)\n"
        "SFTTrainer(model=model, args=args, train_dataset=data).train()\n"
    )
    assert "in bf16 memory comes out too low by 40.1 GiB" in _note(_read(tmp_path, text, "tune.py"), "quantised layers")


SCRIPTS = {
    "axolotl": ("axolotl train {}\n", AXOLOTL, "sequence_len: 2048", "sequence_len: 4096"),
    "llama-factory": (
        "llamafactory-cli train {}\n",
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\ncutoff_len: 2048\nbf16: true\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 4\ntemplate: qwen\ndataset: x\n",
        "lora_rank: 8", "lora_rank: 16",
    ),
    "trl": (
        "trl sft --model_name_or_path Qwen/Qwen3-8B --use_peft --lora_r 8 --max_length 2048 --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 4 --bf16 --gradient_checkpointing --output_dir {}\n", "", "--lora_r 8", "--lora_r 16",
    ),
    "litgpt": (
        "litgpt finetune_lora checkpoints/Qwen/Qwen3-8B --lora_r 8 --train.max_seq_length 2048 --train.micro_batch_size 1 "
        "--train.global_batch_size 8 --devices 1 --out_dir {}\n", "", "--lora_r 8", "--lora_r 16",
    ),
    "verl": (
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B data.max_length=2048 "
        "data.train_batch_size=64 data.micro_batch_size_per_gpu=1 trainer.default_local_dir={}\n",
        "", "data.train_batch_size=64", "data.train_batch_size=128",
    ),
    "ms-swift": (
        "swift sft --model Qwen/Qwen3-8B --tuner_type lora --lora_rank 8 --max_length 2048 --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 4 --output_dir {}\n", "", "--lora_rank 8", "--lora_rank 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_several_trainings_are_named_and_asked_about_where_they_differ(tmp_path: Path, trainer: str) -> None:
    start, text, before, after = SCRIPTS[trainer]
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text(text + "output_dir: other\n")
    run = start.format("a.yaml") + start.format("b.yaml")
    same = _read(tmp_path, run, "run.sh")
    assert same.notes.count("of 2 commands that train, the first is read") == 1
    assert not [one for one in same.questions if one.name == "which_training"]
    if not text:
        run = run.replace(before, after, 1)
    (tmp_path / "b.yaml").write_text(text.replace(before, after))
    asked = next(one for one in _read(tmp_path, run, "run.sh").questions if one.name == "which_training")
    assert asked.choices == ("1", "2") and "which differ in" in asked.about
    second = _read(tmp_path, run, "run.sh", which_training="2")
    assert "of 2 commands that train, number 2 is read" in second.notes
    assert not [one for one in second.questions if one.name == "which_training"]
    with pytest.raises(PlannerError, match="commands? that train"):
        _read(tmp_path, run, "run.sh", which_training="3")


def test_moving_averages_are_one_question(tmp_path: Path) -> None:
    text = DENSE + "drift_ema_decay: 0.99\n"
    asked = _read(tmp_path, text).questions
    assert [one.name for one in asked] == ["drift_ema_decay"] and asked[0].choices == ("false", "true")
    assert not _read(tmp_path, text, drift_ema_decay="false").questions
    with pytest.raises(PlannerError, match="drift_ema_decay decides memory"):
        _read(tmp_path, text, drift_ema_decay="true")
    with pytest.raises(PlannerError, match="use_ema decides memory"):
        _read(tmp_path, DENSE + "use_ema: true\n")


def test_a_checkpoint_in_mxfp4_is_named(tmp_path: Path) -> None:
    text = AXOLOTL.replace("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b").replace("adapter: qlora\nload_in_4bit: true\n", "")
    assert _note(_read(tmp_path, text), "the checkpoint lies in mxfp4")
    known = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: {dequantize: true}\n"
    assert not _note(_read(tmp_path, text + known), "mxfp4")


def test_the_image_encoder_is_trained_with_the_rest(tmp_path: Path) -> None:
    text = AXOLOTL.replace("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-27B").replace("adapter: qlora\nload_in_4bit: true\n", "")
    assert _note(_read(tmp_path, text), "the image encoder is trained too")
    assert not _note(_read(tmp_path, text + "freeze_mm_modules: true\n"), "image encoder")


def test_axolotl_is_told_of_experts_and_their_adapters(tmp_path: Path) -> None:
    found = _read(tmp_path, AXOLOTL + "quantize_moe_experts: true\n" + TENSORS)
    job = ExportJob.of(to_plan(found, {"hardware": "h200"}))
    text = make_bundle(load_target("axolotl"), job, "torchrun").files["axolotl.yaml"]
    refused = front_end_refusals(job, "LLaMA-Factory")
    assert [one.partition(":")[0] for one in refused] == ["option frozen_experts quantised", "option expert_adapters on"]
    assert "quantize_moe_experts: true" in text and "mlp.experts.down_proj" in text

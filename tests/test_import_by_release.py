"""What trainers of fine-tuning do by themselves, by their releases: ms-swift, torchtune, LitGPT, verl and NeMo-RL."""

import json
from pathlib import Path

import pytest
from import_files import NEMO_RL, asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SECOND = "NPROC_PER_NODE=4 swift {} --model_id_or_path Qwen/Qwen1.5-7B --batch_size 1 --max_length 2048 {}"
SWIFT = "NPROC_PER_NODE=8 swift {} --model Qwen/Qwen2.5-7B --max_length 4096 --deepspeed zero3 {}"
MEGATRON = "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen2.5-7B --tensor_model_parallel_size 2 --max_length 4096 {}"


def _read(folder: Path, text: str, name: str = "go.sh", gpus: int | None = None) -> Reading:
    return read(written(folder, f"{text}\n", name), None, Given(num_gpus=gpus))


def test_swift_pt_of_2_trains_all_weights(tmp_path: Path) -> None:
    assert _read(tmp_path, SECOND.format("pt", "")).lora_rank == 0
    adapted = _read(tmp_path, SECOND.format("pt", "--sft_type lora"))
    assert (adapted.lora_rank, adapted.lora_targets, _read(tmp_path, SWIFT.format("pt", "")).lora_rank) == (8, "all", 8)


@pytest.mark.parametrize(("text", "precision"), [
    (SWIFT.format("sft", "--torch_dtype float32"), "fp16"), (SWIFT.format("sft", "--torch_dtype float32 --fp16 false"), "fp32"),
    (SWIFT.format("sft", "--torch_dtype float32 --bf16 true"), "bf16"), (MEGATRON.format("--torch_dtype float32"), "fp16"),
    (SECOND.format("sft", "--sft_type full --dtype fp32"), "fp32"), (SECOND.format("sft", "--sft_type full --dtype fp16"), "fp16"),
    (SWIFT.replace("--deepspeed zero3 ", "").format("sft", "--tuner_type full --torch_dtype bfloat16"), "bf16_true"),
])  # fmt: skip
def test_weights_of_swift_in_fp32_run_under_autocast(tmp_path: Path, text: str, precision: str) -> None:
    assert _read(tmp_path, text).precision == precision


def test_swift_3_loads_weights_as_their_config_says(tmp_path: Path) -> None:
    gemma = SWIFT.format("sft", "").replace("Qwen/Qwen2.5-7B", "{}").format
    for name, precision, frozen in (("LLM-Research/gemma-2-9b", "fp16", "fp32"), ("google/gemma-2-9b-it", "bf16", "bf16")):
        found = _read(tmp_path, gemma(name))
        assert (found.precision, found.frozen_weights) == (precision, frozen)
        assert any(one.startswith("torch_dtype is not said: float32") for one in found.notes) is (frozen == "fp32")
    assert _read(tmp_path, gemma("google/gemma-2-9b --torch_dtype bfloat16")).precision == "bf16"


@pytest.mark.parametrize(("words", "frozen"), [
    ("--quant_method fp8", "int8"), ("--quant_method eetq --quant_bits 8", "int8"), ("--quant_method bnb --quant_bits 4", "nf4_dq"),
    ("--bnb_4bit_quant_type nf4", "bf16"),
])  # fmt: skip
def test_methods_of_8_bits(tmp_path: Path, words: str, frozen: str) -> None:
    assert _read(tmp_path, SWIFT.format("sft", words)).frozen_weights == frozen


@pytest.mark.parametrize(("words", "kernel"), [
    ("--use_flash_attn false", "eager"), ("--use_flash_attn true", "fa2"), ("", ""),
    ("--use_flash_attn true --attn_impl sdpa", "best"),
])  # fmt: skip
def test_use_flash_attn_of_swift_2(tmp_path: Path, words: str, kernel: str) -> None:
    trainer = _read(tmp_path, SECOND.format("sft", words)).trainer
    assert f"attention_kernel={kernel}" in trainer if kernel else "attention_kernel" not in trainer


def test_use_flash_attn_before_2_2_leaves_it_to_the_class(tmp_path: Path) -> None:
    written(tmp_path, "ms-swift==2.0.5\n", "requirements.txt")
    assert "attention_kernel" not in _read(tmp_path, SECOND.format("sft", "--use_flash_attn false")).trainer


@pytest.mark.parametrize(("mode", "words", "fused"), [
    ("sft", "", True), ("sft", "--loss_scale last_round+ignore_empty_think", True), ("sft", "--loss_scale hermes", False),
    ("sft", "--enable_dft_loss true", False), ("sft", "--sequence_parallel_size 2", False), ("sft", "--loss_type own", False),
    ("sft", "--label_smoothing_factor 0.1", False), ("rlhf", "--rlhf_type dpo", False), ("sft", "--enable_dft_loss false", True),
])  # fmt: skip
def test_where_swift_computes_the_loss_itself_liger_does_nothing(tmp_path: Path, mode: str, words: str, fused: bool) -> None:
    found = _read(tmp_path, SWIFT.format(mode, f"--use_liger_kernel true {words}"))
    assert ("loss=fused_linear" in found.trainer) is fused
    assert any(one.startswith("use_liger_kernel: with ") for one in found.notes) is not fused


@pytest.mark.parametrize(("text", "noted"), [("", True), ("torchrun", False), ("NPROC_PER_NODE=$N", False)])
def test_one_process_over_all_that_it_sees(tmp_path: Path, text: str, noted: bool) -> None:
    start = "torchrun swift/cli/sft.py" if text == "torchrun" else f"{text} swift sft"
    found = _read(tmp_path, f"{start} --model Qwen/Qwen2.5-7B --max_length 1024", gpus=8)
    assert any(one.startswith("NPROC_PER_NODE is not said") for one in found.notes) is noted and found.num_gpus == 8


def test_presets_of_swift_2(tmp_path: Path) -> None:
    assert _read(tmp_path, SECOND.format("sft", "--deepspeed zero2-offload")).fields["offload_optimizer"] == 100
    with pytest.raises(PlannerError, match="zero3-offload keeps weights on the host and states on the GPU"):
        _read(tmp_path, SECOND.format("sft", "--deepspeed zero3-offload"))


def test_older_programs_of_swift(tmp_path: Path) -> None:
    words = "--model_id_or_path Qwen/Qwen1.5-7B --sft_type lora --lora_target_modules ALL --batch_size 2"
    found = _read(tmp_path, f"torchrun --nproc_per_node=2 --master_port 29500 llm_sft.py {words}")
    assert (found.num_gpus, found.lora_rank, found.lora_targets, found.sequence_length) == (2, 8, "all", 2048)
    assert found.fields["num_microbatches"] == 4 and found.fields["recompute"] == Recompute.FULL
    assert _read(tmp_path, SECOND.format("dpo", "")).objective == "dpo"
    assert _read(tmp_path, SECOND.format("sft", "").replace("2048", "-1")).sequence_length is None
    text = 'args = SftArguments(model_type="qwen1half-7b", dataset=["a"], sft_type="full")\nsft_main(args)'
    assert _read(tmp_path, f"from swift.llm import SftArguments, sft_main\n{text}", "job.py", 1).lora_rank == 0


@pytest.mark.parametrize("mark", ["!", "! "])
def test_commands_of_notebooks_behind_a_variable(tmp_path: Path, mark: str) -> None:
    source = f"{mark}CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft \\\n --model Qwen/Qwen2.5-7B --max_length 1024"
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
    found = _read(tmp_path, json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), "job.ipynb")
    assert (found.num_gpus, found.sequence_length) == (2, 1024)


def test_arguments_of_swift_as_json(tmp_path: Path) -> None:
    text = '{\n  "model": "Qwen/Qwen2.5-7B",\n  "train_type": "lora",\n  "max_length": 2048,\n  "deepspeed": "zero2"\n}'
    found = _read(tmp_path, text, "args.json", 8)
    assert found.model is not None and (found.fields["recompute"], found.fields["num_microbatches"]) == (Recompute.FULL, 2)


def test_fsdp_of_swift_as_a_mapping(tmp_path: Path) -> None:
    inner = '{"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": true}}'
    found = _read(tmp_path, SWIFT.format("sft", "").replace("--deepspeed zero3", f"--fsdp '{inner}'"))
    assert (found.fields["zero"], found.fields["offload_parameters"]) == (3, 1)


def test_cross_entropy_of_megatron_in_swift_3_is_not_fused_unless_it_is_said(tmp_path: Path) -> None:
    third = MEGATRON.format("--train_type full")
    assert "loss_fusion=off" in _read(tmp_path, third).trainer
    assert "loss_fusion" not in _read(tmp_path, f"{third} --cross_entropy_loss_fusion true").trainer
    assert "loss_fusion" not in _read(tmp_path, MEGATRON.format("--tuner_type full")).trainer


def test_packs_of_megatron_in_swift(tmp_path: Path) -> None:
    for packing, length in (("true", 16384), ("false", 4096)):
        assert _read(tmp_path, MEGATRON.format(f"--packing {packing} --packing_length 16384")).sequence_length == length


TUNE = """model: {{_component_: torchtune.models.{}}}
tokenizer: {{max_seq_len: 8192}}
batch_size: 4
optimizer: {{_component_: torch.optim.AdamW}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
dtype: bf16
enable_activation_checkpointing: {}
"""


def test_capped_scores_are_written_out(tmp_path: Path) -> None:
    found = _read(tmp_path, TUNE.format("gemma2.gemma2_2b", "false"), "job.yaml", 8)
    assert "attention_kernel=eager" in found.trainer
    assert any("caps its scores, which are written out: up to 104.0 GiB" in one for one in found.notes)  # 2 x 4 x 8192^2 x 8 x 26
    again = _read(tmp_path, TUNE.format("gemma2.gemma2_2b", "true"), "job.yaml", 8)
    assert any("caps its scores, which are written out: up to 4.0 GiB" in one for one in again.notes)
    assert "eager" not in _read(tmp_path, TUNE.format("gemma.gemma_2b", "true"), "job.yaml", 8).trainer
    lit = _read(tmp_path, "litgpt finetune_lora google/gemma-2-2b --precision bf16-true --train.max_seq_length 1024")
    assert "attention_kernel=eager" in lit.trainer and any("up to 0.4 GiB of them" in one for one in lit.notes)


def test_heads_that_torchtune_repeats(tmp_path: Path) -> None:
    kept = "keys and values are kept once for every head: up to 3.0 GiB on top of the plan"  # 32,768 tokens x 16 x 3 x 2 x 1,024
    plain, again = (TUNE.format("llama3_2.llama3_2_1b", one) for one in ("false", "true"))
    assert kept in _read(tmp_path, plain, "job.yaml", 8).notes
    for other in (again, f"{plain}compile: true\n", plain.replace("llama3_2.llama3_2_1b", "llama2.llama2_7b")):
        assert not any(one.startswith("keys and values") for one in _read(tmp_path, other, "job.yaml", 8).notes)


@pytest.mark.parametrize(("name", "noted"), [("bitsandbytes.optim.AdamW", True), ("bitsandbytes.optim.PagedAdamW", False)])
def test_states_of_bitsandbytes_in_torchtune(tmp_path: Path, name: str, noted: bool) -> None:
    text = TUNE.format("llama2.llama2_7b", "true").replace("torch.optim.AdamW", name)
    assert any("4 bytes a trained weight on top" in one for one in _read(tmp_path, text, "job.yaml", 8).notes) is noted


def test_pre_training_of_litgpt_is_as_long_as_its_blocks(tmp_path: Path) -> None:
    found = _read(tmp_path, "litgpt pretrain pythia-160m --devices 2 --train.global_batch_size 64")
    assert found.sequence_length == 2048 and "max_seq_length is not said: block_size 2048" in found.notes
    assert _read(tmp_path, "litgpt pretrain Mistral-7B-v0.1 --devices 2").sequence_length is None  # 32,768 there, 4,096 here


BATCH = "data.train_batch_size=64 data.max_length=4096"
VERL = f"torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-0.6B {BATCH} {{}}"
ENGINE = f"-m verl.trainer.{{}} model.path=Qwen/Qwen3-0.6B {BATCH} data.use_dynamic_bsz=false {{}}"


@pytest.mark.parametrize(("words", "micro"), [
    ("data.micro_batch_size=8", 4), ("data.micro_batch_size=8 data.micro_batch_size_per_gpu=2", 2), ("", 4),
])  # fmt: skip
def test_the_micro_batch_that_verl_0_1_shares(tmp_path: Path, words: str, micro: int) -> None:
    found = _read(tmp_path, VERL.format(words))
    assert found.fields["micro_batch_size"] == micro
    assert any("is read by verl 0.1 alone" in one for one in found.notes) is (words == "data.micro_batch_size=8")


@pytest.mark.parametrize(("strategy", "fields"), [("fsdp", [3, 0]), ("fsdp2", [2, 1])])
def test_words_of_fsdp2_that_the_first_fsdp_of_verl_does_not_read(tmp_path: Path, strategy: str, fields: list[int]) -> None:
    actor = "actor_rollout_ref.actor"
    words = f"{actor}.strategy={strategy} {actor}.fsdp_config.reshard_after_forward=false {actor}.fsdp_config.offload_policy=true"
    model = f"actor_rollout_ref.model.path=Qwen/Qwen3-0.6B {actor}.ppo_micro_batch_size_per_gpu=1"
    found = _read(tmp_path, f"python3 -m verl.trainer.main_ppo {model} {words}")
    assert [found.fields[one] for one in ("zero", "offload_parameters")] == fields


def test_engines_of_verl(tmp_path: Path) -> None:
    groups = "engine.fsdp_size=4 engine.ulysses_sequence_parallel_size=2"
    found = _read(tmp_path, f"torchrun --nproc_per_node=8 {ENGINE.format('sft_trainer', groups)}")
    assert (found.fields["dp"], found.fields["cp"], found.fields["dp_shard"]) == (4, 2, 2)
    words = "trainer.n_gpus_per_node=8 trainer.nnodes=2"
    assert _read(tmp_path, f"python3 {ENGINE.format('sft_trainer_ray', words)}").num_gpus == 16


def test_the_first_worker_of_nemo_rl(tmp_path: Path) -> None:
    first = "  fsdp_offload_enabled: true\n  activation_checkpointing_enabled: true\n"
    text = f"{NEMO_RL}{first}  dtensor_cfg: {{enabled: {{}}, tensor_parallel_size: 2}}\ncluster: {{gpus_per_node: 8}}\n"
    names = ("tp", "dp", "recompute", "offload_parameters")
    found = _read(tmp_path, text.replace("{}", "false"), "sft.yaml")
    assert [found.fields[one] for one in names] == [1, 8, Recompute.FULL, 1] and not asked_for(found)
    assert any(one.startswith("dtensor_cfg.enabled is false") for one in found.notes)
    assert [_read(tmp_path, text.replace("{}", "true"), "sft.yaml").fields[one] for one in names] == [2, 4, Recompute.NONE, 0]


def test_the_loss_of_nemo_rl_over_megatron_is_its_own(tmp_path: Path) -> None:
    engines = "  dtensor_cfg: {enabled: false}\n  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}\n"
    found = _read(tmp_path, f"{NEMO_RL}{engines}cluster: {{gpus_per_node: 8}}\n", "sft.yaml")
    assert "loss_fusion=native" in found.trainer.split("+") and found.fields["tp"] == 2

"""Every word of verl's SFT trainer by itself: micro batches by tokens, optimizers, engines, adapters over Megatron."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading

COMMAND = "torchrun --nproc_per_node=8 -m {program} model.path=Qwen/Qwen3-8B data.train_batch_size={batch} {words}\n"
MEGATRON = "engine=megatron optim=megatron engine.tensor_model_parallel_size=2"


def _read(folder: Path, words: str = "engine=fsdp", program: str = "verl.trainer.sft_trainer", batch: int = 256) -> Reading:
    return read(written(folder, COMMAND.format(program=program, batch=batch, words=words), "sft.sh"))


@pytest.mark.parametrize(("program", "words", "micro"), [
    ("verl.trainer.sft_trainer", "engine=fsdp data.micro_batch_size_per_gpu=4", 8),  # 8192 tokens, 1024 each
    ("verl.trainer.sft_trainer", "engine=fsdp data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", 2),
    ("verl.trainer.sft_trainer", "engine=fsdp engine.ulysses_sequence_parallel_size=2", 16),
    ("verl.trainer.sft_trainer", MEGATRON, 8), ("verl.trainer.sft_trainer", f"{MEGATRON} data.max_token_len_per_gpu=2048", 2),
    ("verl.trainer.fsdp_sft_trainer", "data.micro_batch_size_per_gpu=4", 4),
])  # fmt: skip
def test_micro_batches_of_the_trainer_over_engines_are_filled_by_tokens(
    tmp_path: Path, program: str, words: str, micro: int
) -> None:
    assert _read(tmp_path, words, program).fields["micro_batch_size"] == micro


def test_a_micro_batch_by_tokens_divides_what_a_rank_has(tmp_path: Path) -> None:
    fields = _read(tmp_path, batch=48).fields
    assert (fields["micro_batch_size"], fields["num_microbatches"]) == (6, 1)


@pytest.mark.parametrize(("words", "name"), [
    ("engine=fsdp optim.optimizer=AdamW8bit optim.optimizer_impl=bitsandbytes.optim", "optim.optimizer is 'AdamW8bit'"),
    (f"{MEGATRON} optim.optimizer=muon", "optim.optimizer is 'muon'"),
    (f"{MEGATRON} +optim.override_optimizer_config.exp_avg_dtype=bf16", "exp_avg_dtype is 'bf16'"),
    (f"{MEGATRON} engine.use_megatron_fsdp=True", "engine.use_megatron_fsdp decides memory"),
    (f"{MEGATRON} +engine.override_transformer_config.fp8=hybrid", "override_transformer_config.fp8 decides memory"),
    ("engine=fsdp engine.qat.enable=True", "engine.qat.enable decides memory"),
    (f"{MEGATRON} model.lora.rank=16 model.lora.type=dora", "lora.type is 'dora'"),
])  # fmt: skip
def test_what_is_not_priced_is_refused_by_name(tmp_path: Path, words: str, name: str) -> None:
    with pytest.raises(PlannerError, match=name):
        _read(tmp_path, words)
    assert _read(tmp_path, f"{MEGATRON} optim.optimizer=adam engine.use_megatron_fsdp=False").num_gpus == 8


def test_the_loss_of_the_trainer_over_engines_writes_its_gradient_over_the_logits(tmp_path: Path) -> None:
    for words, program, loss in (
        ("engine=fsdp", "verl.trainer.sft_trainer", "flash"), ("", "verl.trainer.fsdp_sft_trainer", "shifted"),
        ("data.micro_batch_size_per_gpu=1", "verl.trainer.fsdp_sft_trainer", ""),
        ("ulysses_sequence_parallel_size=2", "verl.trainer.fsdp_sft_trainer", ""),
        ("engine=fsdp model.use_fused_kernels=True", "verl.trainer.sft_trainer", "fused_linear"),
    ):  # fmt: skip
        words_of_it = _read(tmp_path, words, program).trainer.split("+")
        assert [one for one in words_of_it if one.startswith("loss=")] == ([f"loss={loss}"] if loss else [])
    bytes_of = [load_trainer(one).stored.logit_bytes for one in ("verl+loss=flash", "verl", "verl+loss=shifted")]
    assert bytes_of == [4, 14, 16]  # counted with the tensors alive in torch: 13.98, and 15.97 with two rows of a micro batch


@pytest.mark.parametrize("engine", ["engine=fsdp", MEGATRON])
def test_what_waits_on_the_host_is_said_once(tmp_path: Path, engine: str) -> None:
    found = _read(tmp_path, f"{engine} engine.param_offload=True engine.optimizer_offload=True")
    assert not found.unread and sum("on the GPU in the update" in one for one in found.notes) == 1


def test_adapters_and_attention(tmp_path: Path) -> None:
    assert _read(tmp_path, f"{MEGATRON} model.lora.rank=16").lora_rank == 16
    assert "loss=fused_linear" in _read(tmp_path, "engine=fsdp model.use_fused_kernels=True").trainer
    eager = _read(tmp_path, "engine=fsdp +model.override_config.attn_implementation=eager")
    assert "attention_kernel=eager" in eager.trainer.split("+")


@pytest.mark.parametrize(("pin", "program", "batch", "last", "noted"), [
    ("==0.9.0", "verl.trainer.sft_trainer", 256, True, False), ("==0.8.0", "verl.trainer.sft_trainer", 256, False, False),
    ("", "verl.trainer.sft_trainer", 256, False, True), ("==0.9.0", "verl.trainer.sft_trainer", 8, False, False),
    ("", "verl.trainer.fsdp_sft_trainer", 256, False, False),
])  # fmt: skip
def test_gradients_that_wait_whole_for_the_last_micro_batch(
    tmp_path: Path, pin: str, program: str, batch: int, last: bool, noted: bool
) -> None:
    written(tmp_path, f"verl{pin}\n", "requirements.txt")
    found = _read(tmp_path, "data.micro_batch_size_per_gpu=4", program, batch)
    assert ("gradient_sync=last" in found.trainer) is last
    assert any("keeps gradients whole" in one and "too low by up to 26.7 GiB" in one for one in found.notes) is noted
    assert "gradient_sync" not in _read(tmp_path, MEGATRON).trainer
    adapters = _read(tmp_path, "engine=fsdp model.lora_rank=8")
    assert "gradient_sync" not in adapters.trainer and not any("gradients whole" in one for one in adapters.notes)


@pytest.mark.parametrize(("source", "last"), [("it.set_requires_gradient_sync(False)\n", True), ("pass\n", False), (None, False)])
def test_the_source_of_verl_beside_a_file_says_when_gradients_are_reduced(tmp_path: Path, source: str | None, last: bool) -> None:
    written(tmp_path, "", "setup.py")
    written(tmp_path, "", "verl/workers/__init__.py")
    if source is not None:
        written(tmp_path, source, "verl/workers/engine/fsdp/transformer_impl.py")
    found = _read(tmp_path, "data.micro_batch_size_per_gpu=4")
    assert ("gradient_sync=last" in found.trainer) is last and not any("gradients whole" in one for one in found.notes)

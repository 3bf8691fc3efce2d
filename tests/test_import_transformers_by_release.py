"""What transformers, accelerate, PEFT, DeepSpeed and torch do by themselves, by release: none of it was in a plan or in a note."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
model = AutoModelForCausalLM.from_pretrained("NAME"LOAD)
#MAKES
args = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, WORDS)
Trainer(model=model, args=args, train_dataset=d).train()
"""
HALF, ADAPTERS = ", torch_dtype=torch.bfloat16", "model = get_peft_model(model, LoraConfig(r=64, target_modules='all-linear'))"
SHARDED = "fsdp='full_shard auto_wrap'"
LLAMA = "meta-llama/Llama-3.1-8B"


def trained(tmp_path: Path, words: str = "", load: str = HALF, makes: str = "", pins: str = "transformers==4.57.1", gpus: int = 8,
            name: str = LLAMA) -> Reading:  # fmt: skip
    """A program with those words, over releases that its project pins."""
    written(tmp_path, pins.replace(" ", "\n"), "requirements.txt")
    text = PROGRAM.replace("NAME", name).replace("LOAD", load).replace("#MAKES", makes).replace("WORDS", words)
    settings = {} if "fsdp" in words or "deepspeed" in words else {"fsdp": "no_shard"}
    return read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=gpus, sequence_length=2048, settings=settings))


@pytest.mark.parametrize(
    ("pins", "words", "asked", "precision"),
    [("transformers==5.10.2", "", [], "bf16_true"), ("transformers==4.57.1", "", [], "bf16"), ("torch==2.1.0", "", [], "bf16"),
     ("datasets", "", ["torch_dtype"], "bf16"), ("datasets", "overwrite_output_dir=True", [], "bf16"),
     ("datasets", SHARDED, [], "bf16")],
)  # fmt: skip
def test_the_dtype_of_a_load_by_release(tmp_path: Path, pins: str, words: str, asked: list[str], precision: str) -> None:
    """transformers 5 takes that of the checkpoint: half the memory of plain data parallel."""
    found = trained(tmp_path, words, "", pins=pins)
    assert (asked_for(found), found.precision) == (asked, precision)


@pytest.mark.parametrize(("name", "precision"), [("distilgpt2", "bf16"), ("EleutherAI/gpt-neo-1.3B", "bf16"), (LLAMA, "bf16_true")])
def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path, name: str, precision: str) -> None:
    assert trained(tmp_path, load=", torch_dtype='auto'", name=name, gpus=1).precision == precision


def test_a_program_of_transformers_itself_names_no_dtype(tmp_path: Path) -> None:
    words = f"--model_name_or_path {LLAMA} --per_device_train_batch_size 2 --block_size 2048 --bf16"
    file = written(tmp_path, f"torchrun --nproc_per_node 8 run_clm.py {words}\n", "run.sh")
    assert asked_for(read(file, None, Given())) == ["torch_dtype"]


@pytest.mark.parametrize(("pins", "precision"), [("accelerate==1.10.1", "bf16"), ("accelerate==0.27.2", "bf16_true")])
def test_fsdp_brings_weights_to_fp32_since_a_release(tmp_path: Path, pins: str, precision: str) -> None:
    assert trained(tmp_path, SHARDED, pins=pins).precision == precision


def test_fsdp_without_mixed_precision_trains_weights_as_they_were_loaded(tmp_path: Path) -> None:
    words = f"--model_name_or_path {LLAMA} --per_device_train_batch_size 2 --block_size 2048 --torch_dtype bfloat16"
    line = f"torchrun --nproc_per_node 8 run_clm.py {words} --fsdp 'full_shard auto_wrap'"
    for more, precision in (("", "bf16_true"), (" --bf16", "bf16")):
        assert read(written(tmp_path, f"{line}{more}\n", "run.sh"), None, Given()).precision == precision


@pytest.mark.parametrize(
    ("words", "gpus", "note"),
    [("", 8, ""),
     ("", 1, ""),
     ("optim='sgd'", 1, "without, as transformers makes it, memory comes out too high by up to 15.0 GiB"),
     ("optim='adamw_bnb_8bit'", 1, "embedding stay in 32 bits, priced in 8: memory comes out too low by up to 2.9 GiB"),
     ("optim='adamw_torch_8bit'", 1, "")],
)  # fmt: skip
def test_what_is_held_beside_what_is_priced(tmp_path: Path, words: str, gpus: int, note: str) -> None:
    notes = [one for one in trained(tmp_path, words, gpus=gpus).notes if "memory comes out" in one]
    assert len(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(("words", "last"), [
    ("", True), (", accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}", False),
    (", gradient_accumulation_steps=1", False),
])  # fmt: skip
def test_gradients_under_fsdp_wait_for_the_last_microbatch(tmp_path: Path, words: str, last: bool) -> None:
    """accelerate runs all passes but the last under no_sync, and reduces in the precision of the computation."""
    found = trained(tmp_path, f"{SHARDED}{words}", gpus=8, pins="transformers==5.23.0")
    assert ("+gradient_sync=last" in found.trainer) == last and "+reduce_dtype=bf16" in found.trainer


@pytest.mark.parametrize(("zero", "note"), [
    ({"stage": 2}, "0.9 GiB"), ({"stage": 2, "reduce_bucket_size": 1e9, "overlap_comm": True}, "3.7 GiB"),
    ({"stage": 3, "reduce_bucket_size": "auto"}, ""), ({"stage": 2, "reduce_bucket_size": 2e7}, ""),
    ({"stage": 2, "contiguous_gradients": False}, ""),
])  # fmt: skip
def test_buffers_that_deepspeed_allocates_whole(tmp_path: Path, zero: dict[str, object], note: str) -> None:
    engine = json.loads(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    notes = [one for one in trained(tmp_path, f"deepspeed={engine}").notes if "reduce_bucket_size" in one]
    assert len(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(("zero", "gpus", "note"), [(2, 1, "15.0 GiB"), (3, 8, "1.9 GiB"), (1, 8, "")])
def test_gradients_lie_beside_states_on_the_host(tmp_path: Path, zero: int, gpus: int, note: str) -> None:
    """[DeepSpeed, runtime/zero/stage_1_and_2.py: independent_gradient_partition_epilogue]"""
    engine = {"zero_optimization": {"stage": zero, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    notes = [one for one in trained(tmp_path, f"deepspeed={engine}", gpus=gpus).notes if "go to the host" in one]
    assert len(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(("pins", "note"), [("accelerate==1.10.1", True), ("accelerate==1.13.0", False)])
def test_frozen_weights_under_fsdp_2(tmp_path: Path, pins: str, note: bool) -> None:
    found = trained(tmp_path, f"{SHARDED}, fsdp_config={{'version': 2}}", makes=ADAPTERS, pins=f"{pins} transformers==4.57.1")
    assert any("casts frozen weights to fp32 too under FSDP2" in one for one in found.notes) is note


def test_peft_casts_a_base_that_nothing_quantises(tmp_path: Path) -> None:
    """It was priced in bf16, and as if PEFT had switched checkpointing on, which it does for a quantised base alone."""
    found = trained(tmp_path, makes=f"model = prepare_model_for_kbit_training(model)\n{ADAPTERS}", gpus=1)
    assert (found.frozen_weights, found.fields["recompute"], asked_for(found)) == ("fp32", 0, [])


@pytest.mark.parametrize(
    ("pins", "makes", "note"),
    [("peft==0.10.0", ADAPTERS, True), ("peft==0.16.0", ADAPTERS, False),
     ("peft==0.16.0", ADAPTERS.replace("'))", "'), autocast_adapter_dtype=False)"), True)],
)  # fmt: skip
def test_adapters_stay_in_the_dtype_of_their_base(tmp_path: Path, pins: str, makes: str, note: bool) -> None:
    found = trained(tmp_path, makes=makes.replace("r=64", "r=256"), pins=pins, gpus=1)
    assert ("adapter_dtype=half" in found.trainer) is note and not any("adapters" in one for one in found.notes)


@pytest.mark.parametrize(("name", "targets"), [("EleutherAI/pythia-6.9b", "qkv"), (LLAMA, "qv")])
def test_layers_that_peft_adapts_where_none_is_named(tmp_path: Path, name: str, targets: str) -> None:
    assert trained(tmp_path, makes="model = get_peft_model(model, LoraConfig(r=8))", name=name, gpus=1).lora_targets == targets


def test_a_base_in_fewer_bits_that_is_loaded_in_fp32(tmp_path: Path) -> None:
    found = trained(tmp_path, load=", torch_dtype=torch.float32, load_in_8bit=True", makes=ADAPTERS, gpus=1)
    assert "unquantised=fp32" in found.trainer and not any("casts them" in one for one in found.notes)


def test_kernels_of_liger(tmp_path: Path) -> None:
    assert "loss=fused_linear" in trained(tmp_path, "use_liger_kernel=True").trainer
    off = "use_liger_kernel=True, liger_kernel_config={'fused_linear_cross_entropy': False}"
    assert "loss=" not in trained(tmp_path, off).trainer
    found = trained(tmp_path, "use_liger_kernel=True", makes=ADAPTERS, pins="transformers==4.46.3")
    assert "loss=" not in found.trainer and any("before 4.49 patches no model that has adapters" in one for one in found.notes)


@pytest.mark.parametrize(("pins", "eager"), [("4.44.2", False), ("4.46.3", True), ("4.57.1", False)])
def test_attention_of_gemma_2(tmp_path: Path, pins: str, eager: bool) -> None:
    found = trained(tmp_path, pins=f"transformers=={pins}", name="google/gemma-2-9b", gpus=1)
    assert ("attention_kernel=eager" in found.trainer) is eager


def test_settings_of_accelerate_in_a_file(tmp_path: Path) -> None:
    written(tmp_path, '{"split_batches": true}', "accelerator.json")
    assert trained(tmp_path, "accelerator_config='accelerator.json'", gpus=2).fields["micro_batch_size"] == 1


LOOP = """
import torch
import bitsandbytes as bnb
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
PLUGIN
accelerator = Accelerator(WORDS)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16)
loader = DataLoader(train_dataset, batch_size=16)
held_out = DataLoader(eval_dataset, batch_size=64)
optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "plugin", "fields", "states"),
    [("mixed_precision='bf16', gradient_accumulation_steps=8", "", {"micro_batch_size": 16, "num_microbatches": 8}, "adam_8bit"),
     ("gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4)", "", {"num_microbatches": 4}, "adam_8bit"),
     ("split_batches=True", "", {"micro_batch_size": 2, "num_microbatches": 1}, "adam_8bit"),
     ("deepspeed_plugin=one", "one = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, offload_optimizer_device='cpu')",
      {"zero": 3, "num_microbatches": 2, "offload_optimizer": 100}, "adam"),
     ("fsdp_plugin=one", "one = FullyShardedDataParallelPlugin(sharding_strategy='SHARD_GRAD_OP', activation_checkpointing=True)",
      {"zero": 2, "recompute": 2}, "adam_8bit")],
)  # fmt: skip
def test_a_loop_over_accelerate_says_its_own(tmp_path: Path, words: str, plugin: str, fields: dict[str, int], states: str) -> None:
    """The batch was asked for, and all else dropped."""
    written(tmp_path, LOOP.replace("WORDS", words).replace("PLUGIN", plugin), "loop.py")
    file = written(tmp_path, "accelerate launch --multi_gpu --num_processes 8 loop.py\n", "run.sh")
    found = read(file, None, Given(sequence_length=1024))
    assert (asked_for(found), found.optimizer) == ([], states)
    assert fields.items() <= found.fields.items()


@pytest.mark.parametrize(("words", "asked"), [("mixed_precision=precision", ["bf16"]), ("**words", ["bf16"])])
def test_what_a_loop_leaves_open_is_asked_for(tmp_path: Path, words: str, asked: list[str]) -> None:
    written(tmp_path, LOOP.replace("WORDS", words).replace("PLUGIN", "precision = words = choose()"), "loop.py")
    file = written(tmp_path, "accelerate launch --multi_gpu --num_processes 8 loop.py\n", "run.sh")
    assert asked_for(read(file, None, Given(sequence_length=1024))) == asked


def test_steps_of_deepspeed_count_in_a_loop(tmp_path: Path) -> None:
    """They were taken for a second number with which nothing starts, which is so of the Trainer alone."""
    written(tmp_path, LOOP.replace("WORDS", "").replace("PLUGIN", ""), "loop.py")
    written(tmp_path, "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
            "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 16}\n", "acc.yaml")  # fmt: skip
    file = written(tmp_path, "accelerate launch --config_file acc.yaml loop.py\n", "run.sh")
    found = read(file, None, Given(sequence_length=1024))
    assert found.fields["num_microbatches"] == 16 and "does not start with two" not in " ".join(found.notes)


@pytest.mark.parametrize(("release", "last"), [("4.57.1", True), ("4.45.2", False), ("5.3.0", False)])
def test_some_releases_do_not_heed_sync_each_batch(tmp_path: Path, release: str, last: bool) -> None:
    words = f"{SHARDED}, accelerator_config={{'gradient_accumulation_kwargs': {{'sync_each_batch': True}}}}"
    assert ("+gradient_sync=last" in trained(tmp_path, words, gpus=8, pins=f"transformers=={release}").trainer) == last

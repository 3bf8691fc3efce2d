"""Programs of Lit-GPT before it had settings: constants of the module, arguments of setup, the strategy that they build."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

LORA = """
import lightning as L
from lightning.fabric.strategies import FSDPStrategy
from lit_gpt.lora import GPT, Block, Config, mark_only_lora_as_trainable

devices = 4
batch_size = 64 / devices
micro_batch_size = 4
gradient_accumulation_iters = batch_size // micro_batch_size
lora_r = 8
lora_mlp = False
lora_head = True
override_max_seq_length = 1024


def setup(checkpoint_dir: Path = Path("checkpoints/meta-llama/Llama-2-7b-hf"), precision=None, quantize=None):
    precision = precision or get_default_supported_precision(training=True)
    if devices > 1:
        strategy = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, cpu_offload=False)
    fabric = L.Fabric(devices=devices, strategy=strategy, precision=precision)
    optimizer = bnb.optim.PagedAdamW(params) if quantize else torch.optim.AdamW(params)
"""
PRETRAIN = """
import lightning as L
from lit_gpt.model import GPT, Block, Config
model_name = "tiny_LLaMA_1b"
num_of_devices = 8
global_batch_size = 512
micro_batch_size = 16
batch_size = global_batch_size // num_of_devices
gradient_accumulation_steps = batch_size // micro_batch_size


def setup(devices: int = num_of_devices, precision=None):
    strategy = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy=None, sharding_strategy="SHARD_GRAD_OP")
    fabric = L.Fabric(devices=devices, strategy=strategy, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
"""


def test_constants_of_a_program_are_its_job(tmp_path: Path) -> None:
    found = read(written(tmp_path, LORA, "finetune/lora.py"))
    assert found.trainer == "litgpt@0.1" and found.model is not None and found.model.name == "llama-2-7b"
    assert (found.num_gpus, found.fields["num_microbatches"], found.global_batch_size, found.sequence_length) == (4, 4, 64, 1024)
    assert (found.fields["zero"], found.fields["recompute"], found.lora_targets) == (3, Recompute.FULL, "qv")
    assert (found.precision, found.frozen_weights, found.optimizer) == ("bf16", "fp32", "adam")
    assert any("adapters on 'lm_head'" in one for one in found.notes) and asked_for(found) == []


def test_options_of_a_command_go_before_the_arguments_of_setup(tmp_path: Path) -> None:
    written(tmp_path, LORA.replace("devices = 4", "devices = 1"), "finetune/lora.py")
    command = "python finetune/lora.py --checkpoint_dir c/pythia-160m --precision bf16-true --quantize bnb.nf4\n"
    found = read(written(tmp_path, command, "go.sh"))
    assert found.model is not None and found.model.name == "pythia-160m"
    assert (found.precision, found.frozen_weights, found.optimizer, found.num_gpus) == ("bf16_true", "nf4", "paged_adam", 1)


@pytest.mark.parametrize(("command", "gpus"), [
    ("python pretrain/tinyllama.py --devices 4", 4),
    ("lightning run model --node-rank=0 --devices=8 --num-nodes=2 pretrain/tinyllama.py --devices 8", 16),
])  # fmt: skip
def test_pretraining_by_a_program(tmp_path: Path, command: str, gpus: int) -> None:
    written(tmp_path, PRETRAIN, "pretrain/tinyllama.py")
    found = read(written(tmp_path, f"{command}\n", "go.sh"))
    assert found.model is not None and found.model.name == "tinyllama-1.1b" and found.sequence_length == 2048
    assert (found.num_gpus, found.fields["num_microbatches"], found.global_batch_size) == (gpus, 4, 64 * gpus)
    assert (found.fields["zero"], found.fields["recompute"]) == (2, Recompute.NONE)


def test_constants_are_answers(tmp_path: Path) -> None:
    path = written(tmp_path, PRETRAIN, "own.py")
    found = read(path, None, Given(settings={"micro_batch_size": "8"}))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (8, 8)


@pytest.mark.parametrize(("change", "says"), [
    (("strategy = FSDPStrategy(", "strategy = DeepSpeedStrategy("), "DeepSpeedStrategy; one FSDPStrategy is read"),
    (("cpu_offload=False", "cpu_offload=True"), "cpu_offload of its FSDPStrategy"),
    (("from lit_gpt.lora import", "from lit_gpt.adapter import"), "prompt adapters are not modelled"),
    (("gradient_accumulation_iters = ", "iters = "), "whose batch stands elsewhere"),
])  # fmt: skip
def test_programs_that_are_not_read(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        read(written(tmp_path, LORA.replace(*change), "lora.py"))


def test_own_constants_that_decide_are_asked_about(tmp_path: Path) -> None:
    path = written(tmp_path, LORA.replace("lora_r = 8", "lora_r = 8\nfreeze_layers = 4"), "lora.py")
    assert asked_for(read(path)) == ["freeze_layers"]
    assert asked_for(read(path, None, Given(settings={"freeze_layers": "false"}))) == []


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"its program finetune/lora.py is not there, and constants of it say the batch"):
        read(written(tmp_path, "python finetune/lora.py --checkpoint_dir c/x\n", "go.sh"))


def test_adapters_while_pretraining_are_refused(tmp_path: Path) -> None:
    text = "model_name: tiny-llama-1.1b\nlora_r: 8\ndevices: 8\ntrain: {max_seq_length: 2048, min_lr_ratio: 0.1}\n"
    with pytest.raises(PlannerError, match="adapters while pre-training"):
        read(written(tmp_path, text))
    assert asked_for(read(written(tmp_path, text.replace("lora_r: 8\n", "")))) == []

"""What a file leaves to the checkout around it: defaults and models of a LitGPT there, recipes of a torchtune there; and commands
in notebooks, encoders that Megatron-Bridge trains."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

LORA = """
def setup(
    checkpoint_dir, precision: str = None, devices=1, lora_r: int = 8, lora_key: bool = True, seed: int = 7,
    train=TrainArgs(save_interval=9, global_batch_size=96, micro_batch_size=3, max_seq_length=700),
) -> None: ...
"""
TUNE = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
dtype: bf16
"""
FREES = "def setup(model, params):\n    # set_trainable_params(model, params)\n"
BRIDGE = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.pretrain import pretrain

def config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3.5-27B").to_megatron_provider(load_weights=False)
    cfg.model.seq_length = 4096
    cfg.dataset.seq_length = 4096
    return cfg

if __name__ == "__main__":
    pretrain(config(), forward_step)
"""


def _litgpt(folder: Path, text: str, name: str = "go.sh", program: str = LORA) -> Reading:
    (folder / "litgpt" / "finetune").mkdir(parents=True, exist_ok=True)
    written(folder / "litgpt" / "finetune", program, "lora.py")
    return read(written(folder, text, name))


def test_what_is_not_said_is_as_the_program_of_the_checkout_has_it(tmp_path: Path) -> None:
    found = _litgpt(tmp_path, "litgpt finetune_lora EleutherAI/pythia-410m\n")
    assert (found.global_batch_size, found.fields["micro_batch_size"], found.sequence_length) == (96, 3, 700)
    assert found.lora_targets == "qkv" and "lora_key True, global_batch_size 96" in found.notes[-1]
    more = "litgpt finetune_lora EleutherAI/pythia-410m --train.global_batch_size 8 --train.micro_batch_size 2"
    said = _litgpt(tmp_path, f"{more} --lora_key false --train.max_seq_length 64\n")
    assert (said.global_batch_size, said.fields["micro_batch_size"], said.sequence_length) == (8, 2, 64)
    assert said.lora_targets == "qv" and not [one for one in said.notes if "beside it" in one]


def test_a_program_that_has_what_the_releases_have_says_nothing(tmp_path: Path) -> None:
    usual = "def setup(checkpoint_dir, devices=1, train=TrainArgs(global_batch_size=16, micro_batch_size=1)): ...\n"
    found = _litgpt(tmp_path, "litgpt finetune_lora EleutherAI/pythia-410m\n", program=usual)
    assert found.global_batch_size == 16 and found.notes == ()


def test_a_model_of_the_list_of_the_checkout(tmp_path: Path) -> None:
    sizes = "n_layer=4, n_embd=512, n_head=8, vocab_size=1000, padded_vocab_size=1024, mlp_class_name='LLaMAMLP', block_size=2048"
    written(tmp_path, "litgpt pretrain Own-90M --devices 1 --train.wsds_decay_fraction 0.1\n", "go.sh")
    (tmp_path / "litgpt").mkdir()
    written(tmp_path / "litgpt", f"configs = [dict(name='Own-90M{{}}', hf_config=dict(org=None), {sizes})]\n", "config.py")
    found = read(tmp_path / "go.sh")
    assert found.model is not None and (found.model.num_layers, found.model.vocab_size) == (4, 1024)
    assert "litgpt/config.py beside it" in found.notes[0] and asked_for(found) == []


@pytest.mark.parametrize("start", ["litgpt", "python -m litgpt", "python3 /content/litgpt/litgpt/__main__.py"])
def test_commands_of_litgpt_in_the_cells_of_a_notebook(tmp_path: Path, start: str) -> None:
    command = f"# tunes it\n!{start} finetune_lora EleutherAI/pythia-410m \\\n  --train.max_seq_length 256 --lora_r 4\nprint(1)"
    cells = [{"cell_type": "markdown", "source": "litgpt finetune"}, {"cell_type": "code", "source": command.splitlines(True)}]
    found = read(written(tmp_path, json.dumps({"cells": cells}, indent=1), "job.ipynb"))
    assert (found.trainer.partition("+")[0], found.lora_rank, found.sequence_length) == ("litgpt", 4, 256)


def test_a_notebook_writes_the_configuration_that_it_trains_with(tmp_path: Path) -> None:
    sources = [f"%%writefile own.yaml\n{TUNE}", "!tune run lora_finetune_single_device --config own.yaml batch_size=3\n", "x = 1"]
    cells = [{"cell_type": "code", "source": one} for one in sources]
    found = read(written(tmp_path, json.dumps({"cells": cells}, indent=1), "job.ipynb"))
    assert (found.trainer.partition("+")[0], found.num_gpus, found.fields["micro_batch_size"]) == ("torchtune", 1, 3)
    assert (found.lora_rank, found.sequence_length) == (16, 4096)
    prose = {"cell_type": "markdown", "source": ["We tune run by run.\n", "litgpt finetune"]}
    with pytest.raises(PlannerError, match="looks like no configuration|no command"):
        read(written(tmp_path, json.dumps({"cells": [prose]}, indent=1), "prose.ipynb"))


def test_the_end_of_a_path_names_the_model_whoever_the_user_is(tmp_path: Path) -> None:
    text = "DIR=/home/$USER/m/EleutherAI/pythia-410m\nlitgpt finetune lora --checkpoint_dir $DIR --logger wandb\n"
    found = read(written(tmp_path, text, "go.sh"))
    assert found.model is not None and found.model.name == "pythia-410m" and asked_for(found) == []


def test_adapters_on_no_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="lora_attn_modules is empty, which torchtune refuses"):
        read(written(tmp_path, TUNE.replace("[q_proj, v_proj]", "[]")), None, Given(num_gpus=1))


@pytest.mark.parametrize(("kind", "program", "says"), [
    ("lora", FREES, "calls no set_trainable_params"),
    ("lora", FREES.replace("# ", "training."), ""),
    ("full", "def setup(model):\n    for one in model.parameters():\n        one.requires_grad_(False)\n", "sets requires_grad"),
    ("full", "def setup(model):\n    print(model.weight.requires_grad)\n", ""),
])  # fmt: skip
def test_recipes_of_the_checkout_that_train_other_weights(tmp_path: Path, kind: str, program: str, says: str) -> None:
    (tmp_path / "recipes").mkdir()
    written(tmp_path / "recipes", program, f"{kind}_finetune_single_device.py")
    whole = TUNE.replace("lora_llama", "llama").replace(", lora_attn_modules: [q_proj, v_proj], lora_rank: 16", "")
    builder = TUNE if kind == "lora" else whole
    found = read(written(tmp_path, f"# tune run {kind}_finetune_single_device --config job\n{builder}"), None, Given(num_gpus=1))
    notes = [one for one in found.notes if "of the checkout" in one]
    assert len(notes) == bool(says) and all(says in one for one in notes)


def test_megatron_bridge_trains_the_encoder_of_a_model_with_images(tmp_path: Path) -> None:
    text = "the image encoder is trained too"
    assert [one for one in read(written(tmp_path, BRIDGE, "job.py")).notes if text in one]
    frozen = BRIDGE.replace("    return cfg", "    cfg.model.freeze_vision_model = True\n    return cfg")
    assert not [one for one in read(written(tmp_path, frozen, "job.py")).notes if text in one]

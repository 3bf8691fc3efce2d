"""Refusals that one word settles, switches of forks, machines that are no GPUs, adapters of own builders."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError


def _read(folder: Path, name: str, text: str, gpus: int | None = None, **settings: str) -> Reading:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return read(file, given=Given(num_gpus=gpus, settings={one.replace("__", "."): value for one, value in settings.items()}))


TITAN = """
[model]
name = "own_net"
flavor = "3B"
[training]
local_batch_size = 2
seq_len = 2048
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "full"
"""
AXOLOTL = """
base_model: own/net-3b
micro_batch_size: 1
gradient_accumulation_steps: 2
sequence_len: 2048
optimizer: adamw_torch
bf16: true
datasets: [{path: a, type: alpaca}]
"""
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: own
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 2
bf16: true
"""
TUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
model:
  _component_: torchtune.models.llama3.twin_lora_llama3_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: RANK
batch_size: 2
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torch.nn.CrossEntropyLoss}
dtype: bf16
"""


def _asked(error: pytest.ExceptionInfo[OpenQuestionsError]) -> list[str]:
    return [one.name for one in error.value.questions]


def test_a_refusal_that_a_word_settles_comes_with_all_that_is_open(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="lora decides memory or degrees and is not priced; --set lora=false") as error:
        _read(tmp_path, "a.toml", f"{TITAN}[lora]\nrank = 8\n")
    assert _asked(error) == ["lora", "--gpus N", "--model NAME"]
    with pytest.raises(OpenQuestionsError, match="x_teacher_weights decides memory") as error:
        _read(tmp_path, "a.yaml", f"{AXOLOTL}x_teacher_weights: 2\n")
    assert {"x_teacher_weights", "--gpus N", "--model NAME"} <= set(_asked(error))
    found = _read(tmp_path, "a.yaml", f"{AXOLOTL}x_teacher_weights: 2\n", 8, x_teacher_weights="false")
    assert found.fields["dp"] == 8


def test_a_refusal_that_nothing_settles_comes_first(tmp_path: Path) -> None:
    text = f"{AXOLOTL}x_teacher_weights: 2\n".replace("own/net-3b", "google-t5/t5-base")
    with pytest.raises(PlannerError, match="is no decoder") as error:
        _read(tmp_path, "a.yaml", text)
    assert not isinstance(error.value, OpenQuestionsError)


def test_a_table_of_a_fork_that_is_off_is_left_alone(tmp_path: Path) -> None:
    for table in ("[lora]\nuse_lora = false\nddp = true", "[lora]\nrank = 0\nalpha = 8", "[peft]\nenabled = false\nrank = 8",
                  "[loss_kernel]\nactive = false\nblock = 8", "[model.moe]\nenabled = false\nexperts = 8"):  # fmt: skip
        found = _read(tmp_path, "a.toml", f"{TITAN}{table}\n", 8)
        assert not found.questions and found.fields["micro_batch_size"] == 2 and found.model_name == "own_net 3B"


def test_tables_and_keys_of_a_fork_are_asked_or_named(tmp_path: Path) -> None:
    more = '[loss_kernel]\nuse_loss_kernel = true\n[own_runtime]\nmode = "x"\n'
    with pytest.raises(OpenQuestionsError, match="own_net 3B is no preset") as error:
        _read(tmp_path, "a.toml", TITAN.replace('"full"', '"full"\noffload_inputs = true') + more)
    assert _asked(error) == ["loss_kernel", "activation_checkpoint.offload_inputs", "--gpus N", "--model NAME"]
    found = _read(tmp_path, "a.toml", TITAN + more, 8, loss_kernel="false")
    assert any("own_runtime" in one for one in found.notes)


MODULE = """
from torchtitan.config import ParallelismConfig, TrainingConfig

def own_3b():
    return OwnTrainerConfig(
        model_spec=model_registry("3B"), training=TrainingConfig(local_batch_size=2, seq_len=2048),
        parallelism=ParallelismConfig(), activation_checkpoint=FullAC.Config(), own_loss=OwnLossConfig(use_own_loss=SWITCH),
        runtime_config=RuntimeConfig(eager=True),
    )
"""


def test_parts_of_a_module_that_torchtitan_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="net 3B is no preset") as error:
        _read(tmp_path, "torchtitan/net/config_registry.py", MODULE.replace("SWITCH", "True"))
    assert _asked(error) == ["own_loss", "--gpus N", "--model NAME"]
    found = _read(tmp_path, "torchtitan/net/config_registry.py", MODULE.replace("SWITCH", "False"), 8)
    assert any("runtime_config" in one for one in found.notes) and not found.questions


@pytest.mark.parametrize(
    ("name", "text", "machine"),
    [
        ("experiments/tpu/a.toml", TITAN, "TPUs"),
        ("a.toml", f'{TITAN}[compile]\nenable = true\nbackend = "tpu"\n', "TPUs"),
        ("a_npu.yaml", FACTORY, "NPUs"),
        ("a.yaml", f"{FACTORY}use_xpu: true\n", "Intel"),
    ],
)  # fmt: skip
def test_other_machines_are_said(tmp_path: Path, name: str, text: str, machine: str) -> None:
    found = _read(tmp_path, name, text, 8)
    assert any(machine in one and "stand-in" in one for one in found.notes)


def test_gpus_are_no_other_machine(tmp_path: Path) -> None:
    for name, text in (("a.toml", TITAN), ("a.yaml", f"{FACTORY}use_mps_device: false\n# device: npu\n"),
                       ("a.py", f"if is_torch_xla_available():\n    import torch_xla\n{PROGRAM}")):  # fmt: skip
        assert not any("stand-in" in one for one in _read(tmp_path, name, text, 8).notes)


def test_a_switch_of_a_fork(tmp_path: Path) -> None:
    own = "slot_hidden: 64\nslot_layers: 3\nadditional_target: slot\n"
    with pytest.raises(PlannerError, match="slot_on=.true.: not priced, as no plan has what it does; only --set slot_on=false"):
        _read(tmp_path, "a.yaml", f"{FACTORY}{own}slot_on: true\n", 1, slot_on="true")
    found = _read(tmp_path, "a.yaml", f"{FACTORY}{own}slot_on: true\n", 1)
    assert [one.name for one in found.questions if one.name.startswith("slot")] == ["slot_on"]
    assert "slot_hidden, slot_layers" in str(found.questions[-1])
    found = _read(tmp_path, "a.yaml", f"{FACTORY}{own}slot_on: false\n", 1)
    assert not found.questions
    assert any("additional_target 'slot': no layer known here" in one for one in found.notes)


def test_adapters_of_a_builder_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="several adapters at once, which no plan has") as error:
        _read(tmp_path, "a.yaml", TUNE.replace("RANK", "[8, 8]"))
    assert {"model.lora_rank", "model._component_", "--gpus N"} <= set(_asked(error))
    found = _read(tmp_path, "a.yaml", TUNE.replace("RANK", "16"), 2)
    assert [one.choices for one in found.questions] == [("torchtune.models.llama3.lora_llama3_8b",)]
    found = _read(tmp_path, "a.yaml", TUNE.replace("RANK", "16"), 2, model___component_="torchtune.models.llama3.lora_llama3_8b")
    assert (found.lora_rank, found.lora_targets, found.questions) == (16, "qv", ())


MEGATRON = """
torchrun --nproc_per_node $GPUS pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length $LENGTH \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --own-teacher-model x \\
  --tokenizer-type NullTokenizer
"""
PROGRAM = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from own import TwinLoraConfig, twin_model

model = twin_model(AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B"), TwinLoraConfig(r=8))
Trainer(model=model, args=TrainingArguments(output_dir="x", bf16=True), train_dataset=rows).train()
"""
NEMO = """
from nemo import lightning as nl
from nemo.collections import llm
from own import TwinLoRA

if __name__ == "__main__":
    trainer = nl.Trainer(devices=8, strategy=nl.MegatronStrategy(tensor_model_parallel_size=2))
    data = llm.SquadDataModule(seq_length=2048, micro_batch_size=1, global_batch_size=8)
    llm.finetune(model=llm.LlamaModel(llm.Llama3Config8B()), data=data, trainer=trainer, peft=TwinLoRA(dim=8))
"""


def test_refusals_of_megatron_come_with_what_is_open(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="own-teacher-model decides memory or degrees and is not priced") as error:
        _read(tmp_path, "a.sh", MEGATRON)
    assert {"own_teacher_model", "LENGTH"} <= set(_asked(error))


def test_adapters_of_a_class_of_its_own_are_never_dropped(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="peft is 'twinlora', which is not modelled"):
        _read(tmp_path, "b.py", NEMO)
    found = _read(tmp_path, "a.py", PROGRAM, 1)
    assert {"use_peft", "lora_r", "lora_target_modules"} <= {one.name for one in found.questions}

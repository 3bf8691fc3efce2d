"""Kernels and models that versions, copies and empty values decide."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.model_names import preset_of
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given


def found(folder: Path, files: dict[str, str], **settings: str) -> Reading:
    """The first of the files, read with the others around it."""
    for name, text in files.items():
        written(folder, text, name)
    return read(folder / next(iter(files)), None, Given(num_gpus=8, settings=settings))


TITAN = """[model]
name = "llama3"
tokenizer_path = "./assets/Llama-3.2-1B/tokenizer.model"
[training]
local_batch_size = 2
seq_len = 2048
[parallelism]
data_parallel_shard_degree = -1
"""


def test_a_tokenizer_names_no_model_of_torchtitan(tmp_path: Path) -> None:
    job = found(tmp_path, {"a.toml": TITAN})
    assert job.model is None and job.model_name == "llama3 debugmodel (the default, for model.flavor is not said)"
    with_flavor = found(tmp_path, {"a.toml": TITAN.replace('name = "llama3"', 'name = "llama3"\nflavor = "1B"')})
    assert with_flavor.model is not None and with_flavor.model.num_layers == 16
    by_assets = found(tmp_path, {"a.toml": TITAN.replace('"llama3"', '"hf_auto_model"')})
    assert by_assets.model is not None and by_assets.model.num_layers == 16


def test_float8_of_versions_without_converters(tmp_path: Path) -> None:
    text = TITAN.replace('name = "llama3"', 'name = "llama3"\nflavor = "8B"') + "[float8]\nenable_float8_linear = true\n"
    job = found(tmp_path, {"a.toml": text})
    assert job.precision == "bf16" and any("no layer is in float8 without a converter" in one for one in job.notes)
    with_converter = text.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
    assert found(tmp_path, {"a.toml": with_converter}).precision == "fp8"


TABLES = """whole = 2 * 8
model = {'name': 'llama3', 'flavor': '8B', 'converters': []}
training = dict(local_batch_size=2, global_batch_size=whole * 2, seq_len=4096, compile=False, eval_local_batch_size=4)
parallelism = {'data_parallel_replicate_degree': 1, 'data_parallel_shard_degree': 8}
activation_checkpoint = {'mode': 'full'}
memory_estimation = {'enabled': False},
"""


def test_sections_of_torchtitan_as_dictionaries_of_a_module(tmp_path: Path) -> None:
    job = found(tmp_path, {"own.py": TABLES.replace("whole * 2", "32")})
    kept = {name: job.fields[name] for name in ("dp", "micro_batch_size", "num_microbatches", "zero", "recompute")}
    assert kept == {"dp": 8, "micro_batch_size": 2, "num_microbatches": 2, "zero": 3, "recompute": 2}
    assert (job.sequence_length, job.trainer) == (4096, "torchtitan+compile=off")
    later = TABLES.replace("whole * 2", "2 * 16") + "training['seq_len'] = 8192\n"
    assert found(tmp_path, {"own.py": later}).sequence_length == 8192


def test_such_sections_that_are_computed_or_changed(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"--set training.global_batch_size=VALUE .the module computes it: whole \* 2"):
        found(tmp_path, {"own.py": TABLES})
    assert found(tmp_path, {"own.py": TABLES}, **{"training.global_batch_size": "16"}).global_batch_size == 16
    for more in ("training.update(seq_len=8)\n", "if True:\n    training['seq_len'] = 8\n"):
        with pytest.raises(PlannerError, match="changes training in a way that is not read"):
            found(tmp_path, {"own.py": TABLES + more})
    with pytest.raises(PlannerError, match="laid over the files of _base_"):
        found(tmp_path, {"own.py": "_base_ = ['other.py']\n" + TABLES})


def test_a_command_that_names_such_a_module(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node 8 torchtitan/train.py --job.config_file config/own.py\n"
    job = found(tmp_path, {"jobs/run.sh": command, "config/own.py": TABLES.replace("whole * 2", "16")})
    assert (job.fields["dp"], job.sequence_length, job.fields["recompute"]) == (8, 4096, 2)
    with pytest.raises(PlannerError, match="has no sections of torchtitan as dictionaries"):
        found(tmp_path, {"jobs/run.sh": command, "config/own.py": "def build():\n    return 1\n"})


def test_muon_of_a_table_of_torchtitan_is_asked(tmp_path: Path) -> None:
    text = TABLES.replace("whole * 2", "32") + "optimizer = {'name': 'Muon'}\n"
    assert asked_for(found(tmp_path, {"own.py": text})) == ["optimizer.name"]
    job = found(tmp_path, {"own.py": text}, **{"optimizer.name": "AdamW"})
    assert (job.optimizer, asked_for(job)) == ("adam", [])


SWIFT = (
    "megatron sft --model Qwen/Qwen3-8B --tuner_type lora --micro_batch_size 1 --global_batch_size 8 --max_length 4096 "
    "--tensor_model_parallel_size 8"
)


@pytest.mark.parametrize(
    ("words", "beside", "passes", "logit_bytes", "note"),
    [
        ("", "image: own/megatron:torch2.9-msswift4.2.1-b", 1, 2, "ms-swift 4.2.1: cross_entropy_fusion_impl te"),
        ("", "ms-swift==4.5.0", 3.3, 10, ""),
        ("", "", 3.3, 10, "native, as from ms-swift 4.4 on, 10 bytes a logit"),
        (" --cross_entropy_fusion_impl te", "", 1, 2, ""),
        (" --cross_entropy_fusion_impl native", "image: own:ms-swift4.2", 3.3, 10, ""),
        (" --cross_entropy_loss_fusion false", "image: own:ms-swift4.2", 4.3, 8, ""),
    ],
)
def test_cross_entropy_of_ms_swift_by_version(
    tmp_path: Path, words: str, beside: str, passes: float, logit_bytes: float, note: str
) -> None:
    job = found(tmp_path, {"run.sh": f"{SWIFT}{words}\n", "pod.yaml": f"{beside}\n", "requirements.txt": f"{beside}\n"})
    trainer = load_trainer(job.trainer)
    assert (trainer.kernels.loss_passes, trainer.stored.logit_bytes) == (passes, logit_bytes)
    assert [one for one in job.notes if "cross_entropy" in one] == [one for one in job.notes if note and note in one]
    assert not note or any(note in one for one in job.notes)


def test_a_dense_model_of_ms_swift_has_no_capacity(tmp_path: Path) -> None:
    words = " --moe_expert_capacity_factor 2 --cross_entropy_fusion_impl te"
    assert not any("capacity" in one for one in found(tmp_path, {"run.sh": f"{SWIFT}{words}\n"}).notes)


SWIFT_2 = "swift sft --model_type qwen2-0_5b-instruct --model_id_or_path PATH --sft_type full --batch_size 4 --max_length 1024\n"


def test_the_model_of_ms_swift_2_by_its_type(tmp_path: Path) -> None:
    job = found(tmp_path, {"run.sh": SWIFT_2.replace("PATH", "/own/weights")})
    assert job.model is not None and job.model.hidden_size == 896
    by_path = found(tmp_path, {"run.sh": SWIFT_2.replace("PATH", "/own/Qwen2-1___5B-Instruct")})
    assert by_path.model is not None and by_path.model.hidden_size == 1536
    assert preset_of("/cache/Qwen/Qwen2___5-7B-Instruct") == "qwen2.5-7b"


LITGPT = """model_name: Llama-3-8B
devices: 8
precision: bf16-mixed
train:
  global_batch_size: 64
  micro_batch_size:MICRO
  max_seq_length: 2048
"""
ATTENTION = """class CausalSelfAttention(nn.Module):
    def forward(self, q, k, v):
        return self.scaled_dot_product_attention(q, k, v)

    def scaled_dot_product_attention(self, q, k, v):
        return BODY
"""


def test_sizes_of_litgpt_that_are_left_empty(tmp_path: Path) -> None:
    text = LITGPT.replace("MICRO", "")
    assert asked_for(found(tmp_path, {"a.yaml": text})) == ["train.micro_batch_size"]
    job = found(tmp_path, {"a.yaml": text}, **{"train.micro_batch_size": "2"})
    assert job.fields["micro_batch_size"] == 2 and asked_for(job) == []
    assert found(tmp_path, {"a.yaml": LITGPT.replace("  micro_batch_size:MICRO\n", "")}).fields["micro_batch_size"] == 4


def test_a_copy_of_litgpt_that_writes_attention_out(tmp_path: Path) -> None:
    files = {"litgpt/a/b/c/d/e/f/g/a.yaml": LITGPT.replace("MICRO", " 2"), "litgpt/litgpt/model.py": ATTENTION}
    own = {**files, "litgpt/litgpt/model.py": ATTENTION.replace("BODY", "torch.softmax(q @ k, dim=-1) @ v")}
    job = found(tmp_path, own)
    assert "attention_kernel=eager" in job.trainer and any("writes attention out" in one for one in job.notes)
    usual = ATTENTION.replace("BODY", "F.scaled_dot_product_attention(q, k, v) if self.fast else torch.softmax(q @ k) @ v")
    assert "attention_kernel" not in found(tmp_path, {**files, "litgpt/litgpt/model.py": usual}).trainer


TUNE = """model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: ['q_proj', 'v_proj']
  lora_rank: 8
tokenizer:
  max_seq_len: 2048
batch_size: 2
gradient_accumulation_steps: 1
dtype: bf16
optimizer:
  _component_: torch.optim.AdamW
loss:
  _component_: torch.nn.CrossEntropyLoss
compile: True
"""


@pytest.mark.parametrize(
    ("files", "option"),
    [
        ({}, "compile=on"),
        ({"recipes/lora_finetune_single_device.py": "if compile_model:\n    model = wrap_compile(model)\n"}, "compile=model"),
        ({"recipes/lora_finetune_single_device.py": "if compile:\n    training.compile_loss(self._loss_fn)\n"}, "compile=on"),
        ({"requirements.txt": "torchtune==0.2.1\n"}, "compile=model"),
        ({"requirements.txt": "torchtune==0.4.0\n"}, "compile=on"),
    ],
)
def test_what_torchtune_compiles(tmp_path: Path, files: dict[str, str], option: str) -> None:
    assert option in found(tmp_path, {"a.yaml": TUNE, **files}).trainer.split("+")


def test_parts_that_torchtune_compiles(tmp_path: Path) -> None:
    parts = TUNE.replace("compile: True", "compile: {model: true, loss: false}")
    assert "compile=model" in found(tmp_path, {"a.yaml": parts}).trainer.split("+")
    none = TUNE.replace("compile: True", "compile: {model: false, loss: true}")
    assert "compile=" not in found(tmp_path, {"a.yaml": none}).trainer

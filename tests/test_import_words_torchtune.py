"""torchtune as its recipes read their settings: losses, compilation, what they refuse, builders, words of forks."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

TUNE = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
dtype: bf16
device: cuda
enable_activation_checkpointing: true
"""
LORA = TUNE.replace("llama3_1.llama3_1_8b", "llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 16")


def _tune(folder: Path, text: str, name: str = "job.yaml", **said: str) -> Reading:
    return read(written(folder, text, name), None, Given(num_gpus=None if "single" in name else 8, settings=said))


@pytest.mark.parametrize(("loss", "trainer", "objective"), [
    ("torch.nn.CrossEntropyLoss", "+loss=full", "lm"), ("torchtune.modules.loss.CEWithChunkedOutputLoss", "", "lm"),
    ("torchtune.rlhf.loss.RSOLoss", "+loss=full", "dpo"), ("torchtune.modules.loss.IPOLoss", "+loss=full", "dpo"),
])  # fmt: skip
def test_losses(tmp_path: Path, loss: str, trainer: str, objective: str) -> None:
    found = _tune(tmp_path, TUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", loss))
    assert found.trainer == f"torchtune{trainer}+optimizer_in_backward=off" and found.objective == objective


@pytest.mark.parametrize(("more", "held"), [
    ("", "an fp32 log softmax of all tokens until the backward pass: up to 3.9 GiB"),
    ("compile: true", "bf16 logits of all tokens until the backward pass: up to 2.0 GiB"),
])  # fmt: skip
def test_what_the_pieces_of_a_loss_keep_is_said_where_it_is_much(tmp_path: Path, more: str, held: str) -> None:
    """2 x 4096 tokens of 128,256 words: 4 bytes of each are 3.9 GiB."""
    assert f"the pieces of the loss keep {held}" in " ".join(_tune(tmp_path, TUNE + more).notes)
    open_length = written(tmp_path, TUNE.replace("max_seq_len: 4096", "max_seq_len: null") + more, "open.yaml")
    assert f"the pieces of the loss keep {held}" in " ".join(read(open_length, None, Given(num_gpus=8, sequence_length=4096)).notes)
    older = TUNE.replace("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss") + more
    assert ("and bf16 logits of all tokens" in " ".join(_tune(tmp_path, older).notes)) == (not more)
    small = TUNE.replace("max_seq_len: 4096", "max_seq_len: 128")
    whole = TUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torch.nn.CrossEntropyLoss")
    for text in (small, whole):
        assert "pieces of the loss" not in " ".join(_tune(tmp_path, text + more).notes)


def test_releases_that_wrap_tables_by_themselves(tmp_path: Path) -> None:
    noted = "custom_sharded_layers does not name tok_embeddings"
    assert noted in " ".join(_tune(tmp_path, TUNE).notes)
    assert noted not in " ".join(_tune(tmp_path, TUNE + "memory_efficient_fsdp_wrap: true\n").notes)


def test_losses_that_no_plan_has(tmp_path: Path) -> None:
    text = TUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "%s")
    with pytest.raises(PlannerError, match="loss._component_ is SimPOLoss, which is not modelled"):
        _tune(tmp_path, text % "torchtune.rlhf.loss.SimPOLoss")
    assert asked_for(_tune(tmp_path, text % "own.losses.Mine")) == ["loss._component_"]
    assert asked_for(_tune(tmp_path, text % "own.losses.Mine", **{"loss._component_": "LinearCrossEntropyLoss"})) == []


@pytest.mark.parametrize(("value", "on"), [
    ("true", True), ("false", False), ("{model: true}", True), ("{loss: true}", True), ("{model: false, loss: true}", False),
])  # fmt: skip
def test_parts_that_are_compiled(tmp_path: Path, value: str, on: bool) -> None:
    assert ("compile=on" in _tune(tmp_path, f"{TUNE}compile: {value}\n").trainer) is on


def test_what_its_recipes_refuse(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="torchtune refuses it with gradient_accumulation_steps 4"):
        _tune(tmp_path, f"{TUNE}optimizer_in_bwd: true\ngradient_accumulation_steps: 4\n")
    with pytest.raises(PlannerError, match="torchtune refuses it with clip_grad_norm 1.0; --set optimizer_in_bwd=false, or"):
        _tune(tmp_path, f"{TUNE}optimizer_in_bwd: true\nclip_grad_norm: 1.0\n")
    assert _tune(tmp_path, f"{LORA}optimizer_in_bwd: true\nclip_grad_norm: 1.0\n").lora_rank == 16  # adapters: not read
    bare = TUNE.replace("enable_activation_checkpointing: true", "enable_activation_offloading: true")
    with pytest.raises(PlannerError, match="refuses it without enable_activation_checkpointing"):
        _tune(tmp_path, bare)
    host = TUNE.replace("torch.optim.AdamW", "torchao.prototype.low_bit_optim.CPUOffloadOptimizer")
    with pytest.raises(PlannerError, match="tensor_parallel_dim is 2: tensor parallelism of torchtune is not modelled"):
        _tune(tmp_path, f"{TUNE}tensor_parallel_dim: 2\n")
    with pytest.raises(PlannerError, match="states in host memory are not modelled"):
        _tune(tmp_path, host)


def test_recipes_of_one_device_read_no_degrees(tmp_path: Path) -> None:
    more = "fsdp_cpu_offload: true\ntensor_parallel_dim: 2\ndata_parallel_shard_dim: 4\n"
    found = _tune(tmp_path, TUNE + more, "8B_full_single_device.yaml")
    assert (found.num_gpus, found.fields["tp"], found.fields["offload_parameters"], found.fields["zero"]) == (1, 1, 0, 0)
    assert asked_for(found) == []


@pytest.mark.parametrize(("word", "zero"), [("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("FULL_SHARD", 3)])
def test_sharding_by_its_older_word(tmp_path: Path, word: str, zero: int) -> None:
    assert _tune(tmp_path, f"{TUNE}fsdp_sharding_strategy: {word}\n").fields["zero"] == zero


@pytest.mark.parametrize(("line", "name", "without"), [
    ("enable_fp8_training: true", "enable_fp8_training", "false"), ("freeze_layers: 4", "freeze_layers", "null"),
    ("use_fp8: true", "use_fp8", "false"), ("ema_decay: 0.99", "ema_decay", "null"), ("zero_stage: 2", "zero_stage", "null"),
    ("precision: fp8", "precision", "null"),
    ("layer_dropout: {prob: 0.2, layers: 4}", "layer_dropout", "null"), ("micro_batch_size: 4", "micro_batch_size", "null"),
])  # fmt: skip
def test_words_that_decide_are_asked_about(tmp_path: Path, line: str, name: str, without: str) -> None:
    assert asked_for(_tune(tmp_path, f"{TUNE}{line}\n")) == [name]
    assert asked_for(_tune(tmp_path, f"{TUNE}{line}\n", **{name: without})) == []


@pytest.mark.parametrize("line", [
    "collate_fn: torchtune.data.padded_collate", "activation_offloading_use_streams: false", "fp8_recipe_name: tensorwise",
    "context_parallel_rotate_method: alltoall", "wandb_project: own",
])  # fmt: skip
def test_words_that_decide_nothing_are_not(tmp_path: Path, line: str) -> None:
    assert asked_for(_tune(tmp_path, f"{TUNE}{line}\n")) == []


def test_keys_that_are_passed_on_are_asked_about(tmp_path: Path) -> None:
    more = "context_parallel_dim: 2\ncontext_parallel_rotate_method: alltoall\n"
    assert asked_for(_tune(tmp_path, TUNE + more)) == ["context_parallel_rotate_method"]


def test_layers_with_adapters(tmp_path: Path) -> None:
    found = _tune(tmp_path, LORA.replace("lora_rank: 16", "lora_rank: 16, apply_lora_to_mlp: true, apply_lora_to_output: true"))
    assert found.lora_targets == "all" and any("so k, o too" in one for one in found.notes)
    assert any("adapters on 'output' are not priced" in one for one in found.notes)
    assert "adapter_dropout=on" in _tune(tmp_path, LORA.replace("lora_rank: 16", "lora_dropout: 0.05")).trainer
    assert asked_for(_tune(tmp_path, LORA.replace("dtype: bf16", "dtype: fp32"))) == ["dtype"]


@pytest.mark.parametrize(("name", "preset"), [
    ("code_llama2.code_llama2_7b", "codellama-7b"), ("qwen3_moe.qwen3_moe_30b_a3b", "qwen3-30b-a3b"),
])  # fmt: skip
def test_names_of_builders(tmp_path: Path, name: str, preset: str) -> None:
    found = _tune(tmp_path, TUNE.replace("llama3_1.llama3_1_8b", name))
    assert found.model is not None and found.model.name == preset


def test_a_builder_with_sizes(tmp_path: Path) -> None:
    sizes = "vocab_size: 128256, num_layers: 16, num_heads: 32, num_kv_heads: 8, embed_dim: 2048, intermediate_dim: 8192"
    sizes += ", max_seq_len: 131072"
    model = _tune(tmp_path, TUNE.replace("llama3_1.llama3_1_8b", f"llama3_2.llama3_2, {sizes}")).model
    assert model is not None and (model.name, model.tied_embeddings) == ("llama-3.2-1b", True)
    model = _tune(tmp_path, TUNE.replace("llama3_1.llama3_1_8b", f"llama3.llama3, {sizes}")).model
    assert model is not None and not model.tied_embeddings and model.ffn_size == 8192


@pytest.mark.parametrize(("name", "says"), [
    ("llama2.llama2_classifier", "without a loss over the vocabulary"), ("llama3_2_vision.llama3_2_vision_11b", "look at images"),
    ("mistral.mistral_reward_7b", "without a loss over the vocabulary"),
])  # fmt: skip
def test_models_that_no_plan_has(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        _tune(tmp_path, TUNE.replace("llama3_1.llama3_1_8b", name))


def test_the_shorter_length_counts_and_several_data_sets_are_a_list(tmp_path: Path) -> None:
    assert _tune(tmp_path, TUNE.replace("alpaca_dataset}", "alpaca_dataset, max_seq_len: 1024}")).sequence_length == 1024
    one = "dataset: {_component_: torchtune.datasets.alpaca_dataset}"
    several = TUNE.replace(one, "dataset:\n- {_component_: a}\n- {_component_: b}")
    assert _tune(tmp_path, several).sequence_length == 4096


def test_a_third_state_and_states_in_eight_bits(tmp_path: Path) -> None:
    assert asked_for(_tune(tmp_path, TUNE.replace("fused: true", "amsgrad: true"))) == ["optimizer.amsgrad"]
    assert _tune(tmp_path, TUNE.replace("torch.optim.AdamW", "torchao.optim.AdamWFp8")).optimizer == "adam_8bit"


def test_tables_in_the_root_are_noted(tmp_path: Path) -> None:
    assert any("does not name tok_embeddings" in one for one in _tune(tmp_path, TUNE).notes)
    short = TUNE.replace("max_seq_len: 4096", "max_seq_len: 128")
    assert _tune(tmp_path, f"{short}custom_sharded_layers: [tok_embeddings, output]\n").notes == ()


def test_recipes_of_another_step_are_refused_by_their_names(tmp_path: Path) -> None:
    written(tmp_path, TUNE, "own.yaml")
    with pytest.raises(PlannerError, match="knowledge_distillation"):
        read(written(tmp_path, "tune run --nproc_per_node 8 knowledge_distillation_distributed --config own.yaml\n", "go.sh"))
    found = read(written(tmp_path, "tune run --nproc_per_node 8 recipes/own.py --config own.yaml\n", "go.sh"))
    assert found.num_gpus == 8 and "recipe 'recipes/own.py' is the project's own" in found.notes[-1]

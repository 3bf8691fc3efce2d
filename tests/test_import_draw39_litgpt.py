"""What draw 39 showed: words of torchtune's forks, what LitGPT and ms-swift build otherwise than the published model."""

import re
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.cost.own_terms import OwnTerms
from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given

TUNE = """
model: {_component_: torchtune.models.qwen3.qwen3_8b_instruct}
tokenizer: {_component_: torchtune.models.qwen3.qwen3_tokenizer, max_seq_len: 4096}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m, keep_last_n_checkpoints: 2}
dataset: {_component_: torchtune.datasets.alpaca_dataset, num_shards: 4}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
dtype: bf16
device: cuda
custom_sharded_layers: [tok_embeddings, output]
save_last_epoch_only_checkpoint: true
enable_async_checkpointing: true
resume_from_checkpoint: false
enable_activation_offloading: false
data_parallel_shard_dim: -1
"""
CHECKPOINTS = "enable_activation_checkpointing: true\n"


def _tune(folder: Path, more: str, said: Given | None = None) -> Reading:
    return read(written(folder, TUNE + more), None, said or Given())


@pytest.mark.parametrize("line", [
    "expert_parallel_degree: 8", "expert_cpu_offload: true", "attention_checkpoint_every: 2", "checkpoint_experts: true",
    "native_ep_sharded_experts: true", "optimizer_sharding: os", "recompute_layers: 4",
])  # fmt: skip
def test_words_of_forks_of_torchtune_are_asked_about(tmp_path: Path, line: str) -> None:
    name = line.partition(":")[0]
    found = _tune(tmp_path, f"{CHECKPOINTS}{line}\n")
    assert asked_for(found) == [name]
    without = found.questions[0].choices[0]
    assert asked_for(_tune(tmp_path, f"{CHECKPOINTS}{line}\n", Given(settings={name: without}))) == []


def test_words_of_torchtune_itself_are_not(tmp_path: Path) -> None:
    more = "expert_parallel_degree: 1\nexpert_cpu_offload: false\nnative_fsdp_grad_reduce: null\nfsdp_reshard_after_forward: true\n"
    found = _tune(tmp_path, CHECKPOINTS + more)
    assert asked_for(found) == [] and found.fields["recompute"] == Recompute.FULL and found.fields["zero"] == 3
    assert _tune(tmp_path, "fsdp_reshard_after_forward: false\n").fields["zero"] == 2


@pytest.mark.parametrize("device", ["xpu", "npu", "cpu"])
def test_a_device_that_no_profile_is_of_is_asked_about(tmp_path: Path, device: str) -> None:
    written(tmp_path, TUNE.replace("device: cuda", f"device: {device}"))
    assert asked_for(read(tmp_path / "job.yaml")) == ["device"]
    assert asked_for(read(tmp_path / "job.yaml", None, Given(settings={"device": "cuda"}))) == []


def test_selective_recompute_of_torchtune_is_asked_about(tmp_path: Path) -> None:
    assert asked_for(_tune(tmp_path, "ac_mode: selective\nac_option: 2\n")) == ["ac_mode"]
    assert _tune(tmp_path, "ac_mode: full\n").fields["recompute"] == Recompute.FULL
    assert _tune(tmp_path, f"{CHECKPOINTS}ac_mode: full\n").fields["recompute"] == Recompute.NONE  # as its recipe has it
    lora = TUNE.replace("qwen3_8b_instruct", "lora_qwen3_8b_instruct")
    assert read(written(tmp_path, f"{lora}ac_mode: full\n")).fields["recompute"] == Recompute.NONE


def test_shards_of_torchtune_count_its_gpus(tmp_path: Path) -> None:
    more = "data_parallel_replicate_dim: 2\n"
    text = TUNE.replace("data_parallel_shard_dim: -1", "data_parallel_shard_dim: 4")
    found = read(written(tmp_path, text + more))
    assert (found.num_gpus, found.fields["dp"], found.fields["dp_shard"]) == (8, 8, 4)
    with pytest.raises(PlannerError, match="8 GPUs, but it runs on 16"):
        read(tmp_path / "job.yaml", None, Given(num_gpus=16))


def test_mixtures_of_torchtune_have_their_names(tmp_path: Path) -> None:
    text = TUNE.replace("models.qwen3.qwen3_8b_instruct", "models.qwen3_moe.qwen3_30b_a3b")
    found = read(written(tmp_path, text))
    assert found.model is not None and found.model.name == "qwen3-30b-a3b"


LORA = """
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-mixed
devices: 2
lora_r: 8
lora_dropout: 0.0
lora_head: %s
train: {global_batch_size: 16, micro_batch_size: 1, max_seq_length: 2048, tie_embeddings: %s}
"""
HEAD = "adapters on 'lm_head' are not priced"


def test_adapters_of_litgpt_on_the_head_are_noted(tmp_path: Path) -> None:
    assert any(HEAD in one for one in read(written(tmp_path, LORA % ("true", ""))).notes)
    assert not any(HEAD in one for one in read(written(tmp_path, LORA % ("false", ""))).notes)


@pytest.mark.parametrize(("beside", "trainer", "note"), [
    ({"litgpt/finetune/lora.py": "strategy = FSDPStrategy(auto_wrap_policy={Linear})"}, "litgpt@0.5", "before 0.5.11"),
    ({"litgpt/finetune/lora.py": "strategy = ModelParallelStrategy(parallelize_fn)"}, "litgpt", ""),
    ({"requirements.txt": "litgpt==0.5.3\n"}, "litgpt@0.5", "before 0.5.11"),
    ({"requirements.txt": "litgpt[all]>=0.5.11\n"}, "litgpt", ""),
    ({}, "litgpt", "from 0.5.11 on"),
])  # fmt: skip
def test_lora_of_litgpt_is_that_of_the_checkout(tmp_path: Path, beside: dict[str, str], trainer: str, note: str) -> None:
    for name, text in beside.items():
        written(tmp_path, text, name)
    found = read(written(tmp_path, LORA % ("false", ""), "config_hub/lora.yaml"))
    assert found.trainer == trainer
    assert [note in one for one in found.notes if "LoRA" in one] == ([True] if note else [])


def test_the_base_of_litgpt_lies_in_fp32_under_mixed_precision(tmp_path: Path) -> None:
    assert read(written(tmp_path, LORA % ("false", ""))).frozen_weights == "fp32"
    assert read(written(tmp_path, (LORA % ("false", "")).replace("bf16-mixed", "bf16-true"))).frozen_weights == "bf16"


@pytest.mark.parametrize(("words", "refused"), [
    ("bf16-true\ndevices: 1", ""), ("bf16-mixed\ndevices: 1", "precision bf16-mixed"), ("bf16-true\ndevices: 2", "on 2 GPUs"),
    ("bf16-true\ndevices: auto\nnum_nodes: 2", "on 2 nodes"),
])  # fmt: skip
def test_four_bits_of_litgpt_are_of_one_gpu_without_mixed_precision(tmp_path: Path, words: str, refused: str) -> None:
    job = re.sub(r"devices:.*\n", "", LORA % ("false", "")).replace("bf16-mixed", f"{words}\nquantize: bnb.nf4")
    if refused:
        with pytest.raises(PlannerError, match=refused):
            read(written(tmp_path, job))
    else:
        assert read(written(tmp_path, job)).frozen_weights == "nf4"


def test_frozen_weights_of_litgpt_have_gradients_in_flat_parameters_alone() -> None:
    def bytes_of(name: str) -> float:
        terms: tuple[OwnTerms, ...] = load_trainer(name).terms
        return sum(one.frozen_gradients() for one in terms)

    assert (bytes_of("litgpt"), bytes_of("litgpt@0.5"), bytes_of("litgpt@0.1")) == (0.0, 2.0, 2.0)


def test_the_word_of_litgpt_ties_both_ways(tmp_path: Path) -> None:
    def tied(text: str) -> bool:
        return to_plan(read(written(tmp_path, text))).workload.model.tied_embeddings

    pretrain = LORA.replace("checkpoint_dir: checkpoints/meta-llama/", "model_name: ").replace("lora_r: 8\n", "")
    assert tied(pretrain % ("false", "true"))
    assert not tied(pretrain % ("false", ""))  # although the published model is
    assert not tied(LORA % ("false", ""))
    own = read(written(tmp_path, (pretrain % ("false", "")).replace("Llama-3.2-1B", "own")))
    assert not to_plan(own, {"model": "llama-3.2-1b"}).workload.model.tied_embeddings


SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --train_type lora --load /models/GLM-4.5-Air-mcore --tensor_model_parallel_size 4 "
    "--sequence_parallel true --expert_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 16 --max_length 4096%s\n"
)


def test_ms_swift_builds_layers_that_predict_further_tokens_by_its_word(tmp_path: Path) -> None:
    found = read(written(tmp_path, SWIFT % "", "a.sh"))
    assert found.model is not None and found.model.mtp_layers == 0 and "mtp_num_layers is not said" in found.notes[-1]
    plan = to_plan(read(written(tmp_path, (SWIFT % "").replace("GLM-4.5-Air", "own"), "b.sh")), {"model": "glm-4.5-air"})
    assert plan.workload.model.mtp_layers == 0
    said = read(written(tmp_path, SWIFT % " --mtp_num_layers 1", "c.sh"))
    assert said.model is not None and said.model.mtp_layers == 1 and len(said.notes) == 1


PART = """
import argparse
from megatron.bridge.recipes.own.own_16b import OwnKwargs, _own_finetune_common
from megatron.bridge.training.finetune import finetune
parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()
kwargs: OwnKwargs = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "seq_length": 4096, "peft": None,
    "optimizer_type": args.optimizer_type,
}
config = _own_finetune_common(**kwargs)
config.train.global_batch_size = 16
config.train.micro_batch_size = 1
finetune(config=config)
"""


def test_what_a_part_of_a_recipe_of_megatron_bridge_says_is_asked(tmp_path: Path) -> None:
    found = read(written(tmp_path, PART, "tune.py"), None, Given(num_gpus=8, model="qwen3-8b"))
    assert asked_for(found)[:3] == ["ddp.grad_reduce_in_fp32", "optimizer.optimizer", "optimizer.use_precision_aware_optimizer"]
    said = {"optimizer.optimizer": "adam", "optimizer.use_precision_aware_optimizer": "true", "optimizer.exp_avg_dtype": "bf16",
            "ddp.grad_reduce_in_fp32": "false"}  # fmt: skip
    found = read(tmp_path / "tune.py", None, Given(num_gpus=8, model="qwen3-8b", settings=said))
    assert (asked_for(found), found.sequence_length, found.fields["tp"]) == ([], 4096, 2)


def test_what_a_command_leaves_open_of_a_part_of_a_recipe_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, PART, "tune.py")
    script = 'torchrun --nproc_per_node=8 tune.py --tp 2 --optimizer-type "$2" --packed-sequence 1\n'
    found = read(written(tmp_path, script, "go.sh"))
    assert [found.fields["tp"], found.num_gpus, found.global_batch_size] == [2, 8, 16]
    assert "optimizer.optimizer" in asked_for(found)
    assert any("options of the command that tune.py does not have: --packed_sequence" in one for one in found.notes)

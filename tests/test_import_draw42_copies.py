"""What practice for draw 42 showed of LitGPT, torchtitan, torchtune and OLMo-core: programs of forks beside their settings, loads
of experts, layers that a trainer does not build, launchers that are modules, switches that nobody says."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

LITGPT = """
{model}
precision: bf16-true
devices: 8
num_nodes: {nodes}
train: {{global_batch_size: 512, micro_batch_size: 4, max_seq_length: 2048}}
eval: {{interval: 100}}
"""
PRETRAIN, FULL = "model_name: Llama-3.1-8B", "checkpoint_dir: meta-llama/Llama-3.1-8B"
LORA = f"{FULL}\nlora_r: 8"
PROGRAM = """
def setup(devices):
    '''strategy = FSDPStrategy(auto_wrap_policy=Block)'''
    if devices > 1:
        # strategy = FSDPStrategy(auto_wrap_policy=Block)
        strategy = {strategy}
    fabric = L.Fabric(devices=devices, strategy=strategy)

def main(fabric):
    {compiled}
    model = fabric.setup(model)
"""
COMPILED = "model = torch.compile(model)"


def _litgpt(
    folder: Path, model: str, program: str, strategy: str, compiled: str = "pass", nodes: int = 1, answer: str = ""
) -> Reading:
    written(folder, PROGRAM.format(strategy=strategy, compiled=compiled), f"litgpt/{program}.py")
    file = written(folder, LITGPT.format(model=model, nodes=nodes), "config_hub/a.yaml")
    return read(file, "litgpt", Given(settings={"strategy": answer} if answer else {}))


@pytest.mark.parametrize(("model", "program", "strategy", "fields"), [
    (PRETRAIN, "pretrain", "DDPStrategy()", {"zero": 0, "recompute": int(Recompute.NONE)}),
    (FULL, "finetune/full", "DDPStrategy()", {"zero": 0, "recompute": int(Recompute.NONE)}),
    (LORA, "finetune/lora", "DDPStrategy(find_unused_parameters=True)", {"zero": 0, "recompute": int(Recompute.NONE)}),
    (FULL, "finetune/full", "FSDPStrategy(auto_wrap_policy=Block)", {"zero": 3, "recompute": int(Recompute.NONE)}),
    (PRETRAIN, "pretrain", 'FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", activation_checkpointing_policy={Block})',
     {"zero": 2, "recompute": int(Recompute.FULL)}),
    (PRETRAIN, "pretrain", "ThunderDDPStrategy(jit=False) if thunder else FSDPStrategy()", {"zero": 3, "dp_shard": 0}),
    (PRETRAIN, "pretrain", "FSDPStrategy(**words)", {"zero": 3, "recompute": int(Recompute.NONE)}),
    (LORA, "finetune/lora", "ModelParallelStrategy(parallelize_fn=shard)", {"zero": 3, "recompute": int(Recompute.FULL)}),
])  # fmt: skip
def test_a_copy_of_litgpt_shards_as_its_program_does(
    tmp_path: Path, model: str, program: str, strategy: str, fields: dict[str, int]
) -> None:
    found = _litgpt(tmp_path, model, program, strategy)
    assert fields.items() <= found.fields.items() and found.fields["dp"] == 8
    assert any("DDP" in one for one in found.notes) == strategy.startswith("DDP")


def test_replicas_of_a_copy_of_litgpt(tmp_path: Path) -> None:
    hybrid = _litgpt(tmp_path, PRETRAIN, "pretrain", 'FSDPStrategy(sharding_strategy="HYBRID_SHARD")', COMPILED, nodes=2)
    assert (hybrid.fields["zero"], hybrid.fields["dp_shard"], hybrid.notes) == (3, 8, hybrid.notes[:1])
    whole = _litgpt(tmp_path, PRETRAIN, "pretrain", 'FSDPStrategy(sharding_strategy="FULL_SHARD")', COMPILED, nodes=2)
    assert (whole.fields["zero"], whole.fields["dp_shard"]) == (3, 0)


@pytest.mark.parametrize(("model", "program", "line", "on", "noted"), [
    (PRETRAIN, "pretrain", COMPILED, True, False), (PRETRAIN, "pretrain", "# " + COMPILED + "\n    pass", False, True),
    (FULL, "finetune/full", COMPILED, True, True), (FULL, "finetune/full", "pass", False, False),
    (PRETRAIN, "pretrain", f"if on:\n        {COMPILED}", True, False),
])  # fmt: skip
def test_whether_a_copy_of_litgpt_compiles(tmp_path: Path, model: str, program: str, line: str, on: bool, noted: bool) -> None:
    words = 'sharding_strategy="HYBRID_SHARD"' if program == "pretrain" else "activation_checkpointing=Block"
    found = _litgpt(tmp_path, model, program, f"FSDPStrategy({words})", line)
    assert ("compile=on" in found.trainer, any("compile" in one for one in found.notes)) == (on, noted)


def test_another_strategy_of_a_copy_of_litgpt_is_asked(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match=r"strategy=fsdp\|ddp \(pretrain.py beside it makes DeepSpeedStrategy\)"):
        to_plan(_litgpt(tmp_path, PRETRAIN, "pretrain", "DeepSpeedStrategy(stage=2)", COMPILED))
    assert _litgpt(tmp_path, PRETRAIN, "pretrain", "DeepSpeedStrategy(stage=2)", COMPILED, answer="ddp").fields["zero"] == 0


# ------------------------------------------------------------------------------------------------------------ torchtitan

EXPERTS = """
[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 4
seq_len = 4096
{training}
[parallelism]
data_parallel_shard_degree = 256
expert_parallel_degree = 64
expert_parallel_comm_backend = "{backend}"
{more}
"""


def _experts(folder: Path, more: str = "", training: str = "", backend: str = "hybridep") -> Reading:
    return read(written(folder, EXPERTS.format(more=more, training=training, backend=backend), "a.toml"), None, Given())


def test_torchtitan_builds_no_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    model = to_plan(_experts(tmp_path)).workload.model
    assert (model.name, model.mtp_layers) == ("deepseek-v3", 0)


@pytest.mark.parametrize(("words", "imbalance"), [
    ({}, None), ({"more": "[debug]\nmoe_force_load_balance = true"}, 1.0),
    ({"more": "[debug]\nmoe_force_load_balance = false"}, None), ({"training": "debug_moe_force_load_balance = true"}, 1.0),
])  # fmt: skip
def test_tokens_that_torchtitan_deals_out_in_turn(tmp_path: Path, words: dict[str, str], imbalance: float | None) -> None:
    assert _experts(tmp_path, **words).expert_imbalance == imbalance


ROOM = "[parallelism.hybridep]\nenable_non_blocking = {on}\nmoe_expert_capacity_factor = {factor}"


@pytest.mark.parametrize(("on", "factor", "backend", "imbalance"), [
    ("true", "0.0625", "hybridep", 2.0), ("true", "0.01", "hybridep", 1.0), ("false", "0.0625", "hybridep", None),
    ("true", "0.0625", "standard", None),
])  # fmt: skip
def test_room_that_hybridep_makes(tmp_path: Path, on: str, factor: str, backend: str, imbalance: float | None) -> None:
    """64 ranks with 4 of the 256 experts each, 8 a token: 32 times the mean at worst."""
    found = _experts(tmp_path, ROOM.format(on=on, factor=factor), backend=backend)
    assert found.expert_imbalance == imbalance and not any("hybridep" in one for one in found.unread)
    assert any("times the tokens" in one for one in found.notes) == (imbalance is not None)


PLAIN = """
[model]
name = "llama3"
flavor = "8B"
{converters}
[training]
local_batch_size = 4
seq_len = 2048
[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
tensor_parallel_degree = {tp}
pipeline_parallel_degree = {pp}
context_parallel_degree = {cp}
"""
ALONE = {"converters": "", "replicate": 1, "shard": 1, "tp": 1, "pp": 1, "cp": 1}


@pytest.mark.parametrize(("degrees", "precision", "note"), [
    ({"tp": 8}, "fp32", "mixed precision off"), ({"pp": 4}, "fp32", "mixed precision off"), ({}, "bf16", "autocast keeps"),
    ({"replicate": 4}, "bf16", "autocast keeps"), ({"tp": 8, "shard": 2}, "bf16", ""), ({"tp": 4, "cp": 2}, "bf16", ""),
    ({"tp": 8, "converters": 'converters = ["float8"]'}, "fp8", "not in 8 bits is in float32"),
])  # fmt: skip
def test_torchtitan_without_shards_computes_as_autocast_does(
    tmp_path: Path, degrees: dict[str, object], precision: str, note: str
) -> None:
    found = read(written(tmp_path, PLAIN.format(**{**ALONE, **degrees}), "a.toml"), None, Given())
    assert found.precision == precision
    assert [one for one in found.notes if "autocast" in one or "float32" in one or "mixed" in one] == [
        one for one in found.notes if note and note in one] and bool(found.notes) == bool(note)  # fmt: skip


def test_the_first_torchtitan_casts_by_fsdp_alone(tmp_path: Path) -> None:
    text = PLAIN.format(**ALONE).replace("local_batch_size", "batch_size")
    found = read(written(tmp_path, text, "a.toml"), None, Given())
    assert (found.precision, found.notes) == ("fp32", ("without FSDP torchtitan had no mixed precision before 2025-06",))
    sharded = written(tmp_path, text.replace("shard_degree = 1", "shard_degree = 2"), "b.toml")
    assert read(sharded, None, Given()).precision == "bf16"


@pytest.mark.parametrize(("utils", "precision", "note"), [
    ("def maybe_enable_amp(dims): pass", "fp32", "turns mixed precision off"), ("def init(): pass", "bf16", ""),
    (None, "bf16", "until 2026-03"),
])  # fmt: skip
def test_a_module_without_shards_by_the_copy_beside_it(tmp_path: Path, utils: str | None, precision: str, note: str) -> None:
    if utils is not None:
        written(tmp_path, utils, "torchtitan/distributed/utils.py")
    text = """def llama3_8b():
    return Trainer.Config(hf_assets_path="./assets/hf/Llama-3.1-8B", model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, seq_len=4096),
        parallelism=ParallelismConfig(data_parallel_shard_degree=1, tensor_parallel_degree=8))
"""
    found = read(written(tmp_path, text, "torchtitan/models/llama3/config_registry.py"), None, Given())
    assert (found.precision, len(found.notes)) == (precision, int(bool(note))) and all(note in one for one in found.notes)


@pytest.mark.parametrize(("words", "noted"), [
    ("num_tokens_per_microbatch_per_dp_rank=8192", True), ("local_batch_size=2, seq_len=4096", False),
    ("num_tokens_per_microbatch_per_dp_rank=8192, disable_cuda_graphs=True", False),
])  # fmt: skip
def test_graphs_of_a_step_are_on_without_a_word(tmp_path: Path, words: str, noted: bool) -> None:
    text = f"""def llama3_8b():
    return Trainer.Config(hf_assets_path="./assets/hf/Llama-3.1-8B", model_spec=model_registry("8B"),
        training=TrainingConfig({words}), parallelism=ParallelismConfig(data_parallel_shard_degree=8))
"""
    found = read(written(tmp_path, text, "llama3/config_registry.py"), None, Given())
    assert any("CUDA graph" in one for one in found.notes) == noted


@pytest.mark.parametrize(("name", "flavor", "model"), [
    ("llama3", "8B", "llama-3.1-8b"), ("llama3", "8B_flex_attn", "llama-3.1-8b"), ("llama3_simple_fsdp", "8B", "llama-3.1-8b"),
    ("transformers_backend", "8B", "llama-3.1-8b"), ("llama3_sparse", "8B", None), ("llama3", "8B_moe", None),
    ("mamba", "8B", None), ("deepseek_v3", "16B_wide", None),
])  # fmt: skip
def test_assets_are_the_tokenizer_of_other_layers_too(tmp_path: Path, name: str, flavor: str, model: str | None) -> None:
    text = PLAIN.format(**{**ALONE, "shard": 8, "converters": 'hf_assets_path = "./assets/hf/Llama-3.1-8B"'})
    text = text.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"')
    found = read(written(tmp_path, text, "a.toml"), None, Given())
    assert (found.model.name if found.model else None) == model


COMMAND = """#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node={tasks}
{launch} -m torchtitan.train --job.config_file a.toml --debug.moe_force_load_balance \\
  --parallelism.data_parallel_shard_degree=-1 --parallelism.expert_parallel_degree=16
"""


@pytest.mark.parametrize(("tasks", "launch", "gpus"), [
    (4, "python -m torch.distributed.run --nproc_per_node=4 --nnodes=2", 8), (4, "srun python", 32), (1, "srun python", None),
    (4, "srun torchrun --nproc_per_node=$EACH", None),
])  # fmt: skip
def test_processes_of_a_module_behind_a_launcher(tmp_path: Path, tasks: int, launch: str, gpus: int | None) -> None:
    text = EXPERTS.format(more="", training="", backend="standard").replace("flavor = \"671B\"", "flavor = \"16B\"")
    written(tmp_path, text.replace("expert_parallel_degree = 64", "expert_parallel_degree = 8"), "a.toml")
    file = written(tmp_path, COMMAND.format(tasks=tasks, launch=launch).replace("degree=16", "degree=8"), "run.sh")
    if gpus is None:
        with pytest.raises(OpenQuestionsError, match="--gpus N"):
            read(file)
        return
    found = read(file)
    assert (found.num_gpus, found.fields["dp"], found.expert_imbalance) == (gpus, gpus, 1.0)


# -------------------------------------------------------------------------------------------------- torchtune, OLMo-core


def test_a_recipe_of_torchtune_under_a_folder_that_a_script_finds(tmp_path: Path) -> None:
    written(tmp_path, "model: {_component_: torchtune.models.qwen3.qwen3_8b_instruct}\nbatch_size: 2\ndtype: bf16\n"
            "tokenizer: {max_seq_len: 2048}\noptimizer: {_component_: torch.optim.AdamW}\n", "configs/own.yaml")  # fmt: skip
    file = written(tmp_path, 'ROOT=$(cd "$(dirname "$0")/.." && pwd)\nCONFIG=${1:-"$ROOT/configs/own.yaml"}\n'
                   'tune run --nproc_per_node 8 full_finetune_distributed --config "$CONFIG"\n', "scripts/run.sh")  # fmt: skip
    found = read(file)
    assert (found.num_gpus, found.fields["micro_batch_size"], found.sequence_length) == (8, 2, 2048)


@pytest.mark.parametrize(("word", "recompute"), [("true", Recompute.FULL), ("false", Recompute.NONE)])
def test_layers_of_a_builder_that_repeat_their_activations(tmp_path: Path, word: str, recompute: Recompute) -> None:
    text = (f"model: {{_component_: torchtune.models.own9.own9_8b, activation_checkpointing: {word}}}\nbatch_size: 2\ndtype: bf16\n"
            "tokenizer: {max_seq_len: 2048}\noptimizer: {_component_: torch.optim.AdamW}\nenable_activation_checkpointing: false\n"
            "checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m}\n")  # fmt: skip
    found = read(written(tmp_path, text, "own.yaml"), "torchtune", Given(num_gpus=1, model="qwen3-8b"))
    assert (found.fields["recompute"], found.unread) == (int(recompute), ())


OLMO = """
import argparse
from olmo_core.data.numpy_dataset import NumpyFSLDataset
from olmo_core.nn.transformer import TransformerConfig

class Own(NumpyFSLDataset):
    def __init__(self, paths, vocab_size):
        super().__init__(*paths, sequence_length=2048, vocab_size=vocab_size)

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", action="store_true")
    return parser.parse_args()

def main(opts):
    tokens = TokenizerConfig.dolma2()
    model = TransformerConfig.olmo2_190M(vocab_size=tokens.padded_vocab_size())
    data = Own(paths=[], vocab_size=tokens.vocab_size)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=4096, max_sequence_length=2048, optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.bfloat16),
    )
    if opts.alone:
        module.dp_config = None
    loader = NumpyDataLoaderConfig(global_batch_size=65536)

if __name__ == "__main__":
    main(options())
"""


def test_data_of_its_own_and_switches_that_nobody_says(tmp_path: Path) -> None:
    file = written(tmp_path, OLMO, "train.py")
    found = read(file, None, Given(num_gpus=8))
    fields = found.fields
    assert found.model is not None and (found.model.num_layers, fields["zero"], fields["num_microbatches"]) == (12, 3, 2)
    assert asked_for(found) == []
    for settings in ({"alone": "true"}, {"alone": "True"}):
        with pytest.raises(PlannerError, match="dp_config in line .* is set after its configuration is built"):
            read(file, None, Given(num_gpus=8, settings=settings))


PROGRAM_OF_2024 = """
import lightning as L
from lit_gpt.model import GPT, Block, Config
model_name = "tiny_LLaMA_1b"
devices = 4
batch_size = 64
micro_batch_size = 4
gradient_accumulation_steps = batch_size // micro_batch_size

def setup(precision="bf16-true"):
    fabric = L.Fabric(devices=devices, strategy=DDPStrategy(find_unused_parameters=False), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
"""


def test_a_program_of_lit_gpt_with_replicas(tmp_path: Path) -> None:
    found = read(written(tmp_path, PROGRAM_OF_2024, "pretrain/own.py"))
    assert (found.fields["zero"], found.fields["dp"], found.fields["recompute"]) == (0, 4, int(Recompute.NONE))

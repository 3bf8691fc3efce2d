"""Settings of NeMo 2 one by one, and scripts that start its programs."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Order, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

TEXT = (
    "import nemo_run as run\nfrom nemo.collections import llm\n"
    "recipe = llm.{}.{}_recipe(name='own', dir='out', num_nodes=2, num_gpus_per_node=8)\n{}\nrun.run(recipe)\n"
)


def _of(folder: Path, more: str, recipe: str = "mixtral_8x7b", kind: str = "pretrain") -> Reading:
    return read(written(folder, TEXT.format(recipe, kind, more), "own.py"), None, Given())


def test_the_plugin_says_how_gradients_are_added_up(tmp_path: Path) -> None:
    found = _of(tmp_path, "recipe.trainer.strategy.ddp.grad_reduce_in_fp32 = False")
    assert "gradient_dtype=fp32" in found.trainer and any("is overwritten" in one for one in found.notes)
    assert "gradient_dtype=bf16" in _of(tmp_path, "recipe.trainer.plugins.grad_reduce_in_fp32 = False").trainer


def test_the_optimizer_says_whether_states_are_shared(tmp_path: Path) -> None:
    assert _of(tmp_path, "recipe.trainer.strategy.ddp.use_distributed_optimizer = False").fields["zero"] == 1
    assert _of(tmp_path, "recipe.optim.config.use_distributed_optimizer = False").fields["zero"] == 0


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ("recipe.trainer.strategy.ddp.overlap_grad_reduce = False", "gradient_overlap=off"),
        ("recipe.model.config.attention_backend = 'unfused'", "attention_kernel=unfused"),
        ("recipe.model.config.cross_entropy_loss_fusion = False", "loss_fusion=off"),
        ("recipe.model.config.overlap_moe_expert_parallel_comm = True", "expert_overlap=on"),
        ("recipe.trainer.plugins.fp8 = 'hybrid'\nrecipe.trainer.plugins.fp8_params = True", "fp8_param_gather=on"),
    ],
)  # fmt: skip
def test_options_of_nemo_2(tmp_path: Path, more: str, option: str) -> None:
    assert option in _of(tmp_path, more).trainer.split("+") and option not in _of(tmp_path, "").trainer.split("+")


def test_places_of_nemo_2(tmp_path: Path) -> None:
    assert _of(tmp_path, "recipe.trainer.strategy.use_tp_pp_dp_mapping = True").fields["order"] == Order.TP_CP_EP_PP_DP
    with pytest.raises(PlannerError, match="ddp.num_distributed_optimizer_instances decides memory"):
        _of(tmp_path, "recipe.trainer.strategy.num_distributed_optimizer_instances = 2")
    with pytest.raises(PlannerError, match="has 2 stages and 32 layers; the job has 4 ranks"):
        _of(tmp_path, "recipe.trainer.strategy.pipeline_model_parallel_layout = 'Et*16|t*16L'")


def test_adapters_and_packing_of_nemo_2(tmp_path: Path) -> None:
    assert _of(tmp_path, "", "llama3_8b", "finetune").lora_rank
    assert not _of(tmp_path, "recipe.peft = None", "llama3_8b", "finetune").lora_rank
    with pytest.raises(PlannerError, match="peft is 'dora'"):
        _of(tmp_path, "recipe.peft = run.Config(llm.peft.DoRA)", "llama3_8b", "finetune")
    packed = "recipe.data.packed_sequence_specs = run.Config(PackedSequenceSpecs, packed_sequence_size=4096)"
    assert _of(tmp_path, packed, "llama3_8b", "finetune").sequence_length == 4096


PROGRAM = """
import argparse
import nemo_run as run
from nemo.collections import llm
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--peft", default="lora")
    args = parser.parse_args()
    recipe = llm.llama3_8b.finetune_recipe(num_nodes=args.nodes, num_gpus_per_node=8, peft_scheme=args.peft)
    recipe.trainer.strategy.tensor_model_parallel_size = args.tp
    run.run(recipe)
main()
"""


def test_a_program_of_nemo_2_under_the_options_of_its_command(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM, "tune.py")
    found = read(written(tmp_path, "N=2\npython tune.py --nodes $N --tp 2 --peft none\n", "run.sh"), None, Given())
    assert [found.fields["tp"], found.num_gpus, found.lora_rank] == [2, 16, 0]
    assert any("tune.py is followed" in one for one in found.notes)


def test_words_over_a_program_that_reads_them_as_nemo_does(tmp_path: Path) -> None:
    text = (
        "import nemo_run as run\nfrom nemo.collections import llm\ndef own():\n"
        "    return llm.llama3_8b.finetune_recipe(name='own', dir='out', num_nodes=1, peft_scheme=None)\n"
        "if __name__ == '__main__':\n    run.cli.main(llm.finetune, default_factory=own)\n"
    )
    written(tmp_path, text, "own.py")
    words = "ARGS=(trainer.devices=4 data.global_batch_size=64 trainer.strategy.tensor_model_parallel_size=1)\n"
    found = read(written(tmp_path, words + 'python own.py "${ARGS[@]}"\n', "run.sh"), None, Given())
    assert [found.num_gpus, found.global_batch_size, found.fields["tp"], found.lora_rank] == [4, 64, 1, 0]
    found = read(written(tmp_path, "python own.py --factory llama3_70b trainer.num_nodes=4\n", "run.sh"), None, Given())
    assert (found.model_name, found.num_gpus) == ("llama-3-70b", 32)
    with pytest.raises(PlannerError, match="--factory 'own' of own.py is not followed"):
        read(written(tmp_path, "python own.py --factory own\n", "run.sh"), None, Given())
    written(tmp_path, text.replace("run.cli.main(llm.finetune, default_factory=own)", "run.run(own())"), "own.py")
    with pytest.raises(PlannerError, match="how own.py reads 'trainer.devices'"):
        read(written(tmp_path, words + 'python own.py "${ARGS[@]}"\n', "run.sh"), None, Given())


YAML = (
    "run: {name: gpt3_175b}\ntrainer: {num_nodes: 16, devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 1\n"
    "  global_batch_size: 256\n  tensor_model_parallel_size: 8\n  pipeline_model_parallel_size: 2\n  encoder_seq_length: 2048\n"
    "  max_position_embeddings: 2048\n  num_layers: 96\n  hidden_size: 12288\n"
    "  num_attention_heads: 96\n  optim: {name: distributed_fused_adam}\n"
)


def _yaml(folder: Path, more: str) -> Reading:
    return read(written(folder, f"{YAML}  {more}\n", "gpt3_175b.yaml"), "nemo", Given())


def test_keys_of_nemo_1_that_megatron_calls_the_same(tmp_path: Path) -> None:
    assert "cuda_graphs=layers" in _yaml(tmp_path, "enable_cuda_graph: true").trainer
    assert _yaml(tmp_path, "account_for_loss_in_pipeline_split: true").fields["last_stage_layers"] == 47
    found = _yaml(tmp_path, "cpu_offloading: true\n  cpu_offloading_num_layers: 4")
    assert [found.fields[one] for one in ("offload_activations", "offload_layers")] == [1, 4]
    assert _yaml(tmp_path, "use_tp_pp_dp_mapping: true").fields["order"] == Order.TP_CP_EP_PP_DP


@pytest.mark.parametrize("name", ["fp32_residual_connection", "distribute_saved_activations"])
def test_keys_of_nemo_1_that_no_plan_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlannerError, match=f"model.{name} decides memory or degrees and is not priced; --set model.{name}=false"):
        _yaml(tmp_path, f"{name}: true")
    assert _yaml(tmp_path, f"{name}: false").fields["tp"] == 8


@pytest.mark.parametrize(("granularity", "recompute"), [("selective", Recompute.SELECTIVE), ("full", Recompute.NONE)])
def test_selective_recompute_of_nemo_1_takes_all_layers(tmp_path: Path, granularity: str, recompute: Recompute) -> None:
    words = f"activations_checkpoint_granularity: {granularity}\n  activations_checkpoint_method: block\n  "
    assert _yaml(tmp_path, f"{words}activations_checkpoint_num_layers: 0").fields["recompute"] == recompute

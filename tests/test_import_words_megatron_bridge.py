"""Settings of Megatron-Bridge one by one over a recipe: what its trainer makes of them."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Module, Recompute
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError


def _over(folder: Path, words: str, recipe: str = "llama3_8b_pretrain_config", gpus: int = 16) -> Reading:
    text = f"torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe {recipe} {words}\n"
    return read(written(folder, text, "run.sh"), None, Given(num_gpus=gpus))


@pytest.mark.parametrize(
    ("recipe", "words", "dtype"),
    [
        ("llama3_8b_pretrain_config", "", "fp32"), ("llama3_8b_pretrain_config", "ddp.grad_reduce_in_fp32=false", "fp32"),
        ("llama3_8b_pretrain_config", "mixed_precision=fp16_mixed", "bf16"), ("llama3_8b_sft_config", "", "fp32"),
        ("qwen3_30b_a3b_pretrain_config", "", "bf16"),
    ],
)  # fmt: skip
def test_mixed_precision_says_how_gradients_are_added_up(tmp_path: Path, recipe: str, words: str, dtype: str) -> None:
    found = _over(tmp_path, words, recipe)
    assert f"gradient_dtype={dtype}" in found.trainer
    assert bool([one for one in found.notes if "is overwritten" in one]) == ("ddp." in words or "sft" in recipe)


def test_either_section_switches_the_distributed_optimizer_on(tmp_path: Path) -> None:
    assert _over(tmp_path, "", "llama3_8b_sft_config").fields["zero"] == 1
    both = "ddp.use_distributed_optimizer=false optimizer.use_distributed_optimizer=false"
    assert _over(tmp_path, both).fields["zero"] == 0
    assert _over(tmp_path, "", "llama3_8b_peft_config").fields["zero"] == 0


@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        ("", True), ("ddp.overlap_grad_reduce=false", False),
        ("ddp.overlap_grad_reduce=false comm_overlap.tp_comm_overlap=false", True),
        ("comm_overlap.tp_comm_overlap=false comm_overlap.overlap_grad_reduce=false", False),
    ],
)  # fmt: skip
def test_the_section_of_overlaps_overwrites_that_of_gradients(tmp_path: Path, words: str, overlaps: bool) -> None:
    assert ("gradient_overlap=off" not in _over(tmp_path, words).trainer) == overlaps


@pytest.mark.parametrize(
    ("words", "precision", "eight_bits"),
    [
        ("mixed_precision=bf16_with_fp8_current_scaling_mixed", "fp8", True),
        ("mixed_precision=bf16_with_mxfp8_mixed", "mxfp8", True),
        ("mixed_precision=bf16_with_fp8_subchannel_scaling_mixed", "fp8_block", False), ("model.fp8=hybrid", "bf16", False),
        ("+mixed_precision.fp8=hybrid +mixed_precision.fp8_recipe=blockwise", "fp8_block", False),
        ("+mixed_precision.fp8=hybrid +mixed_precision.fp8_param_gather=false", "fp8", False),
        ("mixed_precision=bf16_with_nvfp4_mixed", "nvfp4", False),
    ],
)  # fmt: skip
def test_precisions_and_weights_in_eight_bits(tmp_path: Path, words: str, precision: str, eight_bits: bool) -> None:
    found = _over(tmp_path, words)
    assert found.precision == precision and ("fp8_param_gather=on" in found.trainer) == eight_bits


def test_sizes_over_those_of_a_recipe(tmp_path: Path) -> None:
    found = _over(tmp_path, "model.num_layers=8 model.hidden_size=4096 model.normalization=RMSNorm")
    assert found.model is not None and found.model.num_layers == 8 and not found.questions
    assert any("num_layers 8: all else as" in one for one in found.notes)
    assert asked_for(_over(tmp_path, "model.hidden_size=512")) == ["--model NAME"]
    assert asked_for(_over(tmp_path, "model.qk_layernorm=true")) == ["--model NAME"]


@pytest.mark.parametrize(
    "word",
    ["ddp.num_distributed_optimizer_instances=2", "model.fine_grained_activation_offloading=true", "model.moe_paged_stash=true",
     "model.fp32_residual_connection=true", "model.hierarchical_context_parallel_sizes=[2,2]"],
)  # fmt: skip
def test_what_no_plan_has_is_refused_by_its_name(tmp_path: Path, word: str) -> None:
    name = word.partition("=")[0]
    with pytest.raises(PlannerError, match=f"{name} decides memory or degrees and is not priced; --set {name}=false"):
        _over(tmp_path, word)


def test_recompute_offload_and_packing_of_megatron_bridge(tmp_path: Path) -> None:
    block = "model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=2"
    stages = "model.pipeline_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=2 model.context_parallel_size=1"
    assert _over(tmp_path, f"{block} {stages}").fields["recompute_layers"] == 4
    named = "model.recompute_granularity=selective 'model.recompute_modules=[layernorm,mlp]'"
    dense, experts = _over(tmp_path, named), _over(tmp_path, named, "qwen3_30b_a3b_pretrain_config")
    assert [bool(one.fields["recompute_modules"] & Module.NORM) for one in (dense, experts)] == [False, True]
    assert [any("layernorm: nothing in a dense model" in note for note in one.notes) for one in (dense, experts)] == [True, False]
    alone = _over(tmp_path, named.replace(",mlp", ""))
    assert (alone.fields["recompute"], alone.fields["recompute_modules"]) == (Recompute.NONE, 0)
    found = _over(tmp_path, "model.cpu_offloading=true model.cpu_offloading_num_layers=3")
    assert [found.fields[one] for one in ("offload_activations", "offload_layers")] == [1, 3]
    packed = _over(tmp_path, "dataset.packed_sequence_specs.packed_sequence_size=4096", "qwen3_8b_sft_config")
    assert packed.sequence_length == 4096 and any("packed into sequences of 4096" in one for one in packed.notes)


def test_a_layout_says_how_many_virtual_stages_there_are(tmp_path: Path) -> None:
    layout = "'model.pipeline_model_parallel_layout=Et*8|t*8|t*8|t*8L'"
    words = f"model.pipeline_model_parallel_size=2 model.context_parallel_size=1 {layout}"
    assert _over(tmp_path, words).fields["vpp"] == 2


def test_a_batch_that_does_not_divide_is_asked_for_with_the_rest(tmp_path: Path) -> None:
    found = _over(tmp_path, "train.global_batch_size=9")
    assert "num_microbatches" not in found.fields and asked_for(found) == ["--global-batch-size B"]


def test_adapters_on_some_layers_are_named(tmp_path: Path) -> None:
    found = _over(tmp_path, "peft.target_modules=[linear_fc1,linear_fc2] peft.dropout=0.1", "llama3_8b_peft_config", 8)
    assert any("alone are priced as on all linear layers" in one for one in found.notes)
    assert any("peft.dropout" in one for one in found.notes)


def test_recipes_of_models_that_see_start_from_functions_of_their_own(tmp_path: Path) -> None:
    found = _over(tmp_path, "train.global_batch_size=16", "ministral3_3b_peft_config", 8)
    assert found.lora_rank == 32 and found.fields["num_microbatches"] == 2


def test_where_the_files_of_a_recipes_model_lie_is_not_asked_for(tmp_path: Path) -> None:
    found = _over(tmp_path, '--hf_path "$HF_MODEL"')
    assert not found.questions and found.model is not None and found.model.name == "llama-3-8b"
    assert any("--hf_path ${HF_MODEL}" in one for one in found.notes)


WRITTEN = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
cfg = llama3_8b_pretrain_config()
cfg.model.num_layers = 4
cfg.ddp.num_distributed_optimizer_instances = 1
cfg.mixed_precision.grad_reduce_in_fp32 = False
pretrain(cfg, step)
"""


def test_fields_that_a_program_sets(tmp_path: Path) -> None:
    found = read(written(tmp_path, WRITTEN, "own.py"), None, Given(num_gpus=8))
    assert found.model is not None and found.model.num_layers == 4 and "gradient_dtype=bf16" in found.trainer
    with pytest.raises(PlannerError, match="ddp.num_distributed_optimizer_instances"):
        read(written(tmp_path, WRITTEN.replace("= 1", "= 2"), "own.py"), None, Given(num_gpus=8))


def test_a_recipe_of_megatron_bridge_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text(
        "recipe:\n  _target_: megatron.bridge.recipes.llama.llama3_8b_pretrain_config\n  tensor_model_parallel_size: 2\n"
        "train:\n  global_batch_size: 64\ndataset:\n  path: ${oc.env:BLEND,none}\n"
    )
    (tmp_path / "tiny.yaml").write_text(
        "defaults: default.yaml\nrun:\n  env: {nodes: 2, gpus_per_node: 8}\nrecipe:\n  seq_length: 4096\n"
        "train:\n  micro_batch_size: ${oc.env:MBS,2}\n"
    )
    found = read(tmp_path / "tiny.yaml", None, Given())
    assert (found.model.name, found.num_gpus, found.global_batch_size) == ("llama-3-8b", 16, 64)
    assert [found.fields[name] for name in ("tp", "micro_batch_size")] == [2, 2]
    (tmp_path / "own.yaml").write_text((tmp_path / "default.yaml").read_text() + "model:\n  num_layers: 4\n")
    assert read(tmp_path / "own.yaml", None, Given(num_gpus=8)).model.num_layers == 4
    (tmp_path / "own.yaml").write_text((tmp_path / "default.yaml").read_text() + "model:\n  hidden_size: 512\n")
    with pytest.raises(OpenQuestionsError, match=r"--model NAME \(hidden_size make it a model of its own"):
        to_plan(read(tmp_path / "own.yaml", None, Given(num_gpus=8)))
    (tmp_path / "none.yaml").write_text("recipe:\n  name: x\ntrain:\n  a: 1\n")
    with pytest.raises(PlannerError, match="its section recipe has no _target_"):
        read(tmp_path / "none.yaml", None, Given())


@pytest.mark.parametrize(
    ("recipe", "words", "passes", "logit_bytes"),
    [
        ("llama3_8b_pretrain_config", "", 1, 6), ("llama2_7b_pretrain_config", "", 3.3, 10), ("qwen3_8b_sft_config", "", 3.3, 10),
        ("llama2_7b_pretrain_config", "model.cross_entropy_fusion_impl=te", 1, 6),
        ("llama3_8b_pretrain_config", "model.cross_entropy_fusion_impl=native", 3.3, 10),
        ("llama3_8b_pretrain_config", "model.cross_entropy_loss_fusion=false", 4.3, 8),
    ],
)  # fmt: skip
def test_whose_kernels_the_loss_has(tmp_path: Path, recipe: str, words: str, passes: float, logit_bytes: float) -> None:
    """Transformer Engine's alone keeps no softmax; recipes say which, and without a word it is Megatron's own."""
    found = _over(tmp_path, words, recipe)
    trainer = load_trainer(found.trainer)
    assert (trainer.kernels.loss_passes, trainer.stored.logit_bytes) == (passes, logit_bytes)
    assert any("before 2.18 it keeps 2" in one for one in found.notes) == (passes == 1)

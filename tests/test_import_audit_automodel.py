"""Recipes of NeMo AutoModel: words that decide memory, variables of the environment, commands that start one."""

import contextlib
from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Schedule
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

RECIPE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: {local}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed:
  strategy: fsdp2
{split}
dataset:
  seq_length: 4096
optimizer:
  _target_: {optimizer}
{more}
"""
USUAL = {"local": "2", "split": "", "optimizer": "torch.optim.Adam", "more": ""}


def _read(folder: Path, said: Given | None = None, **parts: str) -> Reading:
    return read(written(folder, RECIPE.format(**{**USUAL, **parts}), "a.yaml"), None, said or Given(num_gpus=8))


def test_what_lies_on_the_host_and_how_a_pipeline_was_named(tmp_path: Path) -> None:
    policy = "  offload_policy:\n    _target_: torch.distributed.fsdp.CPUOffloadPolicy"
    assert _read(tmp_path, split=policy).fields["offload_parameters"] == 1 and not _read(tmp_path).fields["offload_parameters"]
    old = "autopipeline:\n  pp_schedule: interleaved1f1b\n  pp_microbatch_size: 2\n  layers_per_stage: 4"
    fields = _read(tmp_path, split="  pp_size: 2", more=old, local="4").fields
    assert fields.items() >= {"schedule": int(Schedule.INTERLEAVED), "vpp": 4, "micro_batch_size": 2}.items()


@pytest.mark.parametrize(("more", "what"), [
    ("qat:\n  enabled: true", "qat.enabled"),
    ("peft:\n  match_all_linear: true\n  use_dora: true", "peft.use_dora"),
])  # fmt: skip
def test_what_is_not_priced(tmp_path: Path, more: str, what: str) -> None:
    with pytest.raises(PlannerError, match=f"{what} decides memory.*--set {what}=false"):
        _read(tmp_path, more=more)


@pytest.mark.parametrize(("optimizer", "more", "said"), [
    ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam\n  master_weights: true\n  store_param_remainders: true\n"
     "  exp_avg_dtype: torch.bfloat16\n  exp_avg_sq_dtype: torch.bfloat16", "", "6 bytes of each weight less"),
    ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "", "4 bytes of each weight more"),
    ("torch.optim.Adam", "fp8:\n  enabled: true", "8 bytes of each weight less"),
])  # fmt: skip
def test_bytes_that_the_precision_says_otherwise(tmp_path: Path, optimizer: str, more: str, said: str) -> None:
    assert said in " ".join(_read(tmp_path, optimizer=optimizer, more=more).notes)


def test_variables_of_the_environment(tmp_path: Path) -> None:
    for text in ("${LBS,4}", "${oc.env:LBS,4}"):
        assert _read(tmp_path, local=text).fields["micro_batch_size"] == 4
    assert _read(tmp_path, Given(num_gpus=8, settings={"LBS": "1"}), local="$LBS").fields["micro_batch_size"] == 1
    assert [one.name for one in _read(tmp_path, local="${LBS}").questions] == ["LBS"]


def test_kernels_that_are_off(tmp_path: Path) -> None:
    recompute = "  tp_size: 2\n  activation_checkpointing: true"
    for split, off in (("", False), ("  tp_size: 2", True), (recompute, False)):
        assert any("Liger's kernels" in one for one in _read(tmp_path, split=split).notes) is off


def test_a_policy_between_is_asked(tmp_path: Path) -> None:
    found = _read(tmp_path, split="  activation_checkpointing: selective").questions
    assert [one.name for one in found] == ["distributed.activation_checkpointing"]


@pytest.mark.parametrize("command", [
    "automodel finetune llm -c a.yaml --nproc-per-node 8 --step_scheduler.local_batch_size 4 --distributed.tp_size 2",
    "automodel a.yaml --nproc-per-node 8 --step_scheduler.local_batch_size=4 --distributed.tp_size=2",
    "torchrun --nproc-per-node=8 nemo_automodel/recipes/llm/train_ft.py --config a.yaml --step_scheduler.local_batch_size 4"
    " --distributed.tp_size 2",
    "torchrun --nproc-per-node=8 examples/llm_finetune/finetune.py -c a.yaml --step_scheduler.local_batch_size=4"
    " --distributed.tp_size=2",
])  # fmt: skip
def test_commands(tmp_path: Path, command: str) -> None:
    written(tmp_path, RECIPE.format(**USUAL), "a.yaml")
    found = read(written(tmp_path, f"#!/bin/bash\n{command}\n", "job.sh"), None, Given())
    assert found.num_gpus == 8 and found.fields.items() >= {"tp": 2, "dp": 4, "micro_batch_size": 4, "num_microbatches": 4}.items()


@pytest.mark.parametrize("policy", ["{_target_: [1]}", "{pin_memory: {a: 1}}"])
def test_a_policy_of_odd_types_ends_in_no_traceback(tmp_path: Path, policy: str) -> None:
    text = "model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}\n"
    text += "step_scheduler: {global_batch_size: 8, local_batch_size: 1}\n"
    file = written(tmp_path, f"{text}distributed: {{strategy: fsdp2, offload_policy: {policy}}}\n", "recipe.yaml")
    with contextlib.suppress(PlannerError):
        read(file, "automodel", Given(num_gpus=8, sequence_length=2048))

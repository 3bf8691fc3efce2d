"""Recipes of public projects that were read otherwise than their files say: MLPerf, NeMo, Megatron-Bridge, torchtune, verl."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

MLPERF = (
    "model:\n  tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}\n"
    "  virtual_pipeline_model_parallel_size: ${oc.decode:${oc.env:INTERLEAVED_PIPELINE,12}} # interleaved\n"
    "  sequence_parallel: ${oc.decode:${oc.env:SP,False}}\n  fp8: ${oc.decode:${oc.env:FP8,False}}\n"
    "  fp8_params: ${oc.decode:${oc.env:FP8,False}}\n  cpu_offloading: ${oc.decode:${oc.env:CPU_OFFLOADING,False}}\n"
    "  cpu_offloading_num_layers: ${oc.decode:${oc.env:CPU_OFFLOADING_NUM_LAYERS,20}}\n"
)
"""The YAML of an implementation: what each variable is where no script sets it."""


def _file(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _read(file: Path, **settings: str) -> Reading:
    return read(file, None, Given(settings=settings))


def _values(found: Reading, *names: str) -> list[object]:
    return [found.fields.get(name, getattr(found, name, None)) for name in names]


def _adapters(folder: Path, text: str, place: str = "llama2_70b_lora", conf: str = MLPERF) -> Path:
    if conf:
        _file(folder / place, "src/conf/peft.yaml", conf)
    return _file(folder / place, "config_MI300X_1x8x1.sh", f"export DGXNNODES=1\nexport DGXNGPU=8 MINIBS=1\n{text}\n")


def test_recompute_of_mlperfs_adapters_by_its_short_names(tmp_path: Path) -> None:
    found = _read(_adapters(tmp_path, "export FP8=True TP=1\nexport ACG=full && export ACM=block && export ACL=21"))
    assert _values(found, "recompute", "recompute_layers", "precision", "frozen_weights") == [2, 21, "fp8", "fp8"]
    assert found.fields.get("offload_layers", 0) == 0  # cpu_offloading is off


def test_what_mlperfs_adapters_run_with(tmp_path: Path) -> None:
    said = "export FP8=True FP8_DPA=1 TP=2 SP=0 LAYER_CUDA_GRAPH=1"
    found = _read(_adapters(tmp_path, said, "llama2_70b"))  # llama2_70b is trained with adapters alone
    assert _values(found, "lora_rank", "lora_targets", "sequence_parallel") == [16, "attention", 0]
    assert found.trainer == "nemo+adapter_dropout=on+fp8_attention=on+cuda_graphs=layers+tp_overlap=off"
    found = _read(_adapters(tmp_path, "export FP8=False TP=2 SP=1 TP_COMM_OVERLAP=True LORA_DIM=32 LORA_DROPOUT=0.0"))
    assert _values(found, "lora_rank", "sequence_parallel", "trainer", "precision") == [32, 1, "nemo", "bf16"]


def test_virtual_stages_of_mlperf_that_no_script_sets(tmp_path: Path) -> None:
    text = "export DGXNNODES=64 MINIBS=64 TENSOR_MODEL_PARALLEL=4 PIPELINE_MODEL_PARALLEL=8 MICRO_BATCH_SIZE=1 FP8=True\n"
    file = _file(tmp_path / "gpt3", "config_DGXH100_64x8x64x4x8.sh", text)
    with pytest.raises(OpenQuestionsError, match="--set INTERLEAVED_PIPELINE=VALUE"):
        _read(file)
    assert _read(file, INTERLEAVED_PIPELINE="0").fields["vpp"] == 1
    _file(tmp_path / "gpt3", "conf/custom.yaml", MLPERF)
    assert _read(file).fields["vpp"] == 12
    _file(tmp_path / "gpt3", file.name, f"{text}export FP8_PARAM_GATHER=True\n")
    with pytest.raises(PlannerError, match="--fp8-param-gather changes what states take"):
        _read(file)

"""Variables of MLPerf's configurations one by one."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import CpMethod, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

ADAPTERS = "export DGXNNODES=1 DGXNGPU=8 MINIBS=1 TP=1 PP=1 CP=2 MBS=1 FP8=True FP8_PARAMS=True\n"
WHOLE = (
    "export DGXNNODES=64 DGXNGPU=8 MINIBS=128 TENSOR_MODEL_PARALLEL=4 PIPELINE_MODEL_PARALLEL=8 INTERLEAVED_PIPELINE=6\n"
    "export MICRO_BATCH_SIZE=2 FP8=True\n"
)


def _adapters(folder: Path, more: str = "", **settings: str) -> Reading:
    file = written(folder, f"{ADAPTERS}export {more}\n", "llama2_70b_lora/config_P_1x8x1.sh")
    return read(file, None, Given(settings=settings))


def _whole(folder: Path, more: str = "") -> Reading:
    return read(written(folder, f"{WHOLE}export {more}\n", "gpt3/config_P_64x8.sh"), None, Given())


def test_context_parallelism_sends_as_its_variable_says(tmp_path: Path) -> None:
    assert _adapters(tmp_path, "CP_COMM_TYPE=a2a").fields["cp_method"] == CpMethod.A2A
    conf = "model:\n  tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}\n"
    conf += "  cp_comm_type: ${oc.decode:${oc.env:CP_COMM_TYPE,'a2a'}}\n"
    written(tmp_path, conf, "llama2_70b_lora/conf/tuning.yaml")
    assert _adapters(tmp_path).fields["cp_method"] == CpMethod.A2A


def test_an_older_name_that_the_yaml_does_not_read_says_nothing(tmp_path: Path) -> None:
    assert any("8 bits" in one for one in _adapters(tmp_path, "FP8_ACTIVATION=True").notes)
    conf = "model:\n  tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}\n  input_store: ${oc.decode:${oc.env:FP8_ACT,0}}\n"
    written(tmp_path, conf, "llama2_70b_lora/conf/tuning.yaml")
    assert not any("8 bits" in one for one in _adapters(tmp_path, "FP8_ACTIVATION=True").notes)
    assert any("8 bits" in one for one in _adapters(tmp_path, "FP8_ACT=1").notes)


def test_lengths_and_layers_of_mlperf(tmp_path: Path) -> None:
    found = _adapters(tmp_path, "MAX_SEQLEN=4096 OVERWRITTEN_NUM_LAYERS=8")
    assert found.sequence_length == 4096 and found.model is not None and found.model.num_layers == 8
    assert any("OVERWRITTEN_NUM_LAYERS 8: all else as" in one for one in found.notes)
    assert not [one for one in _adapters(tmp_path, "OVERWRITTEN_NUM_LAYERS=80").notes if "all else" in one]
    with pytest.raises(OpenQuestionsError, match=r"--model NAME \(HIDDEN_SIZE make it another one"):
        _whole(tmp_path, "HIDDEN_SIZE=1024")


@pytest.mark.parametrize("name", ["USE_DISTRIBUTED_OPTIMIZER", "USE_DIST_OPTIMIZER"])
def test_states_that_no_rank_shares(tmp_path: Path, name: str) -> None:
    assert _adapters(tmp_path, f"{name}=False").fields["zero"] == 0 and _adapters(tmp_path).fields["zero"] == 1


@pytest.mark.parametrize("name", ["OVERLAP_GRAD_REDUCE", "OVERLAP_GRAD_SYNC", "DDP_OVERLAP_GRAD_REDUCE"])
def test_gradients_that_wait_for_the_end(tmp_path: Path, name: str) -> None:
    assert "gradient_overlap=off" in _whole(tmp_path, f"{name}=False").trainer
    assert "gradient_overlap=off" in _adapters(tmp_path, f"{name}=False").trainer
    assert "gradient_overlap=off" not in _whole(tmp_path).trainer


def test_recompute_of_parts_and_whole_graphs(tmp_path: Path) -> None:
    found = _adapters(tmp_path, 'RECOMPUTE_GRANULARITY=selective RECOMPUTE_MODULES="[mlp,core_attn]"')
    assert found.fields["recompute"] == Recompute.SELECTIVE and found.unread == ()
    assert "cuda_graphs=layers" in _whole(tmp_path, "FULL_CUDA_GRAPH=1").trainer


@pytest.mark.parametrize("more", ["FSDP=True", "PRECISION=32"])
def test_what_mlperf_names_and_no_plan_has(tmp_path: Path, more: str) -> None:
    with pytest.raises(PlannerError, match=more.partition("=")[0]):
        _adapters(tmp_path, more)


def test_saved_activations_that_are_cut_are_asked_about(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="--set DISTRIBUTE_SAVED_ACTIVATIONS=False"):
        _adapters(tmp_path, "DISTRIBUTE_SAVED_ACTIVATIONS=True")
    assert _adapters(tmp_path, "DISTRIBUTE_SAVED_ACTIVATIONS=True", DISTRIBUTE_SAVED_ACTIVATIONS="False").num_gpus == 8

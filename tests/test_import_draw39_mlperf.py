"""Words of MLPerf's configurations and of LLaMA-Factory over Megatron that were dropped, or asked for in rounds of their own."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

FOUR_BITS = """
export DGXNNODES=1 DGXNGPU=8 MINIBS=1 TP=1 PP=1 CP=1 MBS=1
export FP8=False FP4=True FP4_RECIPE="nvfp4" FP4_PARAM=False FP8_PARAM_GATHER=0 PRE_QUANTIZED_MODEL=True
export FP8_DPA=1 NVTE_DPA_FP8_RECIPE="DelayedScaling" NVTE_DPA_FP8_FORMAT="HYBRID"
export HEALING_ITER=350 HEALING_PRECISION="FP8_DS"
"""
EXPERTS = """
export DGXNNODES=1 DGXNGPU=8 MINIBS=3 MICRO_BATCH_SIZE=3 TENSOR_MODEL_PARALLEL=1 PIPELINE_MODEL_PARALLEL=1 CONTEXT_PARALLEL=1
export FP8=True FP8_RECIPE=mxfp8 FP8_PARAM_GATHER=False CUDA_GRAPH_IMPLEMENTATION=local CUDA_GRAPH_SCOPE=full_iteration
export USE_TE_OPS=True CE_FUSION_IMPL=te
export NVTE_CUTEDSL_FUSED_GROUPED_MLP=1
export MLPERF_SYSTEM_NAME="P5800G7 8xB300"
export EXPERT_PARALLEL=4
"""


def _adapters(folder: Path, more: str = "", **settings: str) -> Reading:
    file = written(folder, FOUR_BITS + more, "llama2_70b_lora/config_P9_1x8x1_fp4.sh")
    return read(file, None, Given(settings=settings))


def _experts(folder: Path, text: str = EXPERTS, **settings: str) -> Reading:
    file = written(folder, text, "gpt_oss/config_P5_1x8x3.sh")
    return read(file, None, Given(model="gpt-oss-20b", sequence_length=8192, settings=settings))


def test_weights_of_mlperf_that_are_cast_to_four_bits_before_the_run(tmp_path: Path) -> None:
    found = _adapters(tmp_path)
    assert (found.precision, found.frozen_weights, found.unread) == ("nvfp4", "nvfp4", ())
    assert any("HEALING_ITER: from step 350 on products are in FP8_DS" in one for one in found.notes)
    assert _adapters(tmp_path, PRE_QUANTIZED_MODEL="False").frozen_weights == "bf16"
    assert _adapters(tmp_path, "export PRE_QUANTIZED_MODEL=False FP4_PARAM=True HEALING_ITER=0\n").frozen_weights == "nvfp4"
    low = to_plan(found, {"hardware": "b300-sxm"}).prediction.memory_gib
    plain = to_plan(_adapters(tmp_path, PRE_QUANTIZED_MODEL="False"), {"hardware": "b300-sxm"}).prediction.memory_gib
    assert low["weights"] < 0.4 * plain["weights"]  # 9 bits by rows and columns, and not bf16 with a copy beside it


@pytest.mark.parametrize(("line", "said"), [
    ("export FP4=False FP8=True", "PRE_QUANTIZED_MODEL=False"), ("export STORE_GPU=True", "STORE_GPU=False"),
    ("export HYPER_PARALLEL=2", "HYPER_PARALLEL=1"),
])  # fmt: skip
def test_what_mlperf_says_of_memory_and_a_plan_does_not_know_is_asked(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(OpenQuestionsError, match=f"--set {said}"):
        _adapters(tmp_path, line)
    name, _, value = said.partition("=")
    assert _adapters(tmp_path, line, **{name: value}).questions == ()


def test_four_bits_of_mlperf_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="FP4_RECIPE is 'mxfp4'; a plan knows nvfp4"):
        _adapters(tmp_path, "export FP4_RECIPE=mxfp4")


def test_attention_of_mlperf_in_fp8_has_a_recipe_of_its_own(tmp_path: Path) -> None:
    assert "fp8_attention=on" in _adapters(tmp_path).trainer
    assert "fp8_attention" not in _adapters(tmp_path, "export NVTE_DPA_FP8_RECIPE=F16").trainer
    assert "fp8_attention" not in _adapters(tmp_path, "unset NVTE_DPA_FP8_RECIPE").trainer  # that of NVFP4 has none
    assert "fp8_attention=on" in _experts(tmp_path, f"{EXPERTS}export FP8_DPA=True\n").trainer
    assert "fp8_attention" not in _experts(tmp_path).trainer


def test_words_of_mlperf_on_memory_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    more = "export FP8_ACT=1 FIRST_LAST_LAYERS_BF16=True FP8_AMAX_ALGO=max TOKENIZERS_PARALLELISM=True OPTIMIZER_CPU_OFFLOAD=0\n"
    found = _adapters(tmp_path, more)
    assert found.unread == ("FIRST_LAST_LAYERS_BF16 = True",)
    assert any("FP8_ACT: the input of the activation waits in 8 bits" in one for one in found.notes)


def test_graphs_and_experts_of_mlperf(tmp_path: Path) -> None:
    found = _experts(tmp_path)
    assert {"cuda_graphs=layers", "fused_experts=on", "loss_fusion=on"} <= {*found.trainer.split("+")}
    assert (found.fields["ep"], found.unread) == (4, ())
    room = "MOE_EXPERT_RANK_CAPACITY_FACTOR"  # asked for, as among Megatron's own arguments
    with pytest.raises(OpenQuestionsError, match=f"--set {room}=null"):
        _experts(tmp_path, f"{EXPERTS}export {room}=1.5\n")
    plain = _experts(tmp_path, EXPERTS.replace("GROUPED_MLP=1", "GROUPED_MLP=0").replace("=local", "=none"))
    assert not {"cuda_graphs=layers", "fused_experts=on"} & {*plain.trainer.split("+")}


@pytest.mark.parametrize(("system", "hardware"), [
    ("P5800G7 8xB300", "b300-sxm"), ("8xGB200", "gb200-nvl72"), ("XE7740 8xH100-NVL-94GB", "h100-nvl"), ("Cray XD670", None),
])  # fmt: skip
def test_hardware_by_the_name_of_mlperfs_system(tmp_path: Path, system: str, hardware: str | None) -> None:
    found = _adapters(tmp_path, f'export MLPERF_SYSTEM_NAME="{system}"\n')
    assert found.hardware == hardware
    assert any("by MLPERF_SYSTEM_NAME" in one for one in found.notes) == (hardware is not None)


def test_a_precision_that_the_usual_gpu_has_not_asks_for_the_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.trainers.reading.configuration.hardware_asked", lambda *_: "h100-sxm")
    with pytest.raises(OpenQuestionsError, match="--hardware NAME .the job is in nvfp4"):
        to_plan(_adapters(tmp_path))


def test_a_default_of_mlperfs_yaml_in_quotes(tmp_path: Path) -> None:
    lines = "  tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}\n  fp8_recipe: ${oc.decode:${oc.env:FP8_RECIPE,'delayed'}}\n"
    written(tmp_path, f"model:\n{lines}", "llama2_70b_lora/conf/peft.yaml")
    found = _adapters(tmp_path, "export FP4=False FP8=True PRE_QUANTIZED_MODEL=False\n")
    assert (found.precision, found.frozen_weights) == ("fp8", "bf16")


ADAPTER = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 2
use_distributed_optimizer: true
cross_entropy_loss_fusion: true
"""


def _adapter(folder: Path, more: str, **settings: str) -> Reading:
    return read(written(folder, ADAPTER + more, "job.yaml"), None, Given(settings=settings))


def test_what_llama_factorys_adapter_cannot_price_is_asked_with_the_rest(tmp_path: Path) -> None:
    block = "additional_configs: {{max_sequence_length: 4096, position_embedding_type: mrope{}}}\n"
    found = _adapter(tmp_path, block.format(""))
    assert (found.questions, found.unread, found.trainer) == ((), (), "megatron+gradient_overlap=off+loss_fusion=native")
    found = _adapter(tmp_path, f"{block.format(', moe_ffn_hidden_size: 64')}mtp_num_layers: 1\n")
    with pytest.raises(OpenQuestionsError, match=r"mtp_num_layers=false.*additional_configs=false \(moe_ffn.*; --gpus N"):
        to_plan(found)
    assert _adapter(tmp_path, block.format(", fp8: hybrid"), additional_configs="false").questions == ()


def test_the_loss_of_llama_factorys_adapter_in_one_kernel(tmp_path: Path) -> None:
    found = _adapter(tmp_path, "cross_entropy_fusion_impl: te\n")
    assert (found.trainer, found.unread) == ("megatron+gradient_overlap=off+loss_fusion=on", ())
    assert any("6 bytes a logit, as from 2.18 on" in one for one in found.notes)

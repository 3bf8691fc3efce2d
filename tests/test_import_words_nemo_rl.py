"""Settings of NeMo-RL one by one."""

from pathlib import Path

import pytest
from import_files import NEMO_RL, asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SFT = NEMO_RL + """  dtensor_cfg: {enabled: NATIVE, tensor_parallel_size: 1MORE}
  megatron_cfg: {enabled: CORE, tensor_model_parallel_size: 2CORE_MORE}
EXTRA
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def _of(folder: Path, more: str = "", core: bool = False, extra: str = "") -> Reading:
    text = SFT.replace("NATIVE", str(not core).lower()).replace("CORE_MORE", f", {more}" if core and more else "")
    text = text.replace("CORE", str(core).lower()).replace("MORE", f", {more}" if more and not core else "").replace("EXTRA", extra)
    return read(written(folder, text, "sft.yaml"), None, Given())


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ("attention_backend: unfused", "attention_kernel=unfused"), ("transformer_impl: local", "transformer_impl=local"),
        ("moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: hybridep", "expert_dispatch=hybridep"),
        ("fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: mxfp8, fp8_param: true}", "fp8_param_gather=on"),
    ],
)  # fmt: skip
def test_options_of_megatron_in_nemo_rl(tmp_path: Path, more: str, option: str) -> None:
    assert option in _of(tmp_path, more, True).trainer.split("+")
    assert option not in _of(tmp_path, "", True).trainer.split("+")


@pytest.mark.parametrize("name", ["fine_grained_activation_offloading", "fp32_residual_connection"])
def test_what_no_plan_of_nemo_rl_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlannerError, match=rf"{name} decides memory or degrees and is not priced; --set policy\."):
        _of(tmp_path, f"{name}: true", True)


def test_a_word_that_nemo_rl_declares_and_never_reads_decides_nothing(tmp_path: Path) -> None:
    found = _of(tmp_path, "distributed_data_parallel_config: {use_custom_fsdp: true}", True)
    assert found.fields["zero"] == 1 and not found.unread


def test_sizes_laid_over_a_model_of_nemo_rl(tmp_path: Path) -> None:
    fewer = "  hf_config_overrides: {num_hidden_layers: 4}"
    for core, more, extra in ((False, "", fewer), (True, "model_overrides: {num_layers: 4}", "")):
        found = _of(tmp_path, more, core, extra)
        assert found.model is not None and found.model.num_layers == 4 and not found.questions
    assert asked_for(_of(tmp_path, "", False, "  hf_config_overrides: {hidden_size: 64}")) == ["--model NAME"]
    assert not _of(tmp_path, "", False, "  hf_config_overrides: {max_position_embeddings: 64}").questions


def test_logits_and_adapters_of_nemo_rl(tmp_path: Path) -> None:
    assert any("use_fused_linear_logprobs" in one for one in _of(tmp_path, "use_fused_linear_logprobs: true", True).notes)
    lora = "lora_cfg: {enabled: true, dim: 8, match_all_linear: true, dropout: 0.1, exclude_modules: ['*lm_head*']}"
    found = _of(tmp_path, lora)
    assert "adapter_dropout=on" in found.trainer and any("exclude_modules" in one for one in found.notes)


def test_a_batch_of_nemo_rl_that_does_not_divide_is_asked_for(tmp_path: Path) -> None:
    text = SFT.replace("NATIVE", "true").replace("CORE_MORE", "").replace("CORE", "false").replace("MORE", "").replace("EXTRA", "")
    found = read(written(tmp_path, text.replace("batch_size: 32", "batch_size: 9"), "sft.yaml"), None, Given())
    assert "num_microbatches" not in found.fields and asked_for(found) == ["--global-batch-size B"]


def test_the_first_worker_is_not_taken_beside_words_of_later_versions(tmp_path: Path) -> None:
    text = NEMO_RL + "  dtensor_cfg: {enabled: false, tensor_parallel_size: 2%s}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    path = written(tmp_path, text % ", _v2: true", "sft.yaml")
    asked = read(path, None, Given()).questions
    assert [one.name for one in asked] == ["policy.dtensor_cfg.enabled"] and "NeMo-RL with _v2 does not start" in asked[0].about
    assert read(path, None, Given(settings={"policy.dtensor_cfg.enabled": "true"})).fields["tp"] == 2
    first = read(written(tmp_path, text % "", "sft.yaml"), None, Given())
    assert first.fields["tp"] == 1 and any("until 0.2" in one for one in first.notes)

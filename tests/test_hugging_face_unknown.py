"""A config.json of a family that the table does not know, and of families whose code is on the hub alone."""

from typing import Any

import pytest

from planner.cost.parameters import total_parameters
from planner.defaults import _of_the_model
from planner.errors import PlannerError
from planner.model import ModelSpec, from_hugging_face
from planner.serving.published import published
from planner.trainer import load_trainer
from planner.workload import Workload

LLAMA = {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 26, "num_attention_heads": 12, "num_key_value_heads": 6,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 153376, "tie_word_embeddings": True, "bos_token_id": 1,
    "max_position_embeddings": 32768, "rope_theta": 4e6, "auto_map": {"AutoConfig": "configuration_own.Own"}, "use_cache": True,
}  # fmt: skip


def _model(**more: Any) -> ModelSpec:
    return from_hugging_face({**LLAMA, **more}, source="own/config.json")


def test_the_keys_of_a_llama_and_no_others_are_a_llama() -> None:
    found = _model(model_type="OwnEmbedded", bias=True)
    assert found.qkv_bias and not found.linear_bias and found.tied_embeddings and found.vision is None
    assert found.source == "model_type OwnEmbedded read as llama by its keys; own/config.json"
    assert _model(model_type="llama").source == "own/config.json" and not _model(model_type="OwnEmbedded").qkv_bias


@pytest.mark.parametrize(("more", "said"), [
    ({"num_experts": 8}, "keys are a llama's but for 'num_experts'"), ({"hidden_act": "gelu"}, "nearest are"),
    ({"sliding_window": 4096}, "but for 'sliding_window'"), ({"rms_norm_eps": None}, "nearest are"),
])  # fmt: skip
def test_other_keys_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(PlannerError, match="model_type 'Own' is not understood") as error:
        _model(model_type="Own", **more)
    assert said in str(error.value)


def test_families_whose_code_is_on_the_hub_alone() -> None:
    large = {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40}
    sizes = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 125696, "tie_word_embeddings": False}
    found = from_hugging_face({**large, **sizes, "model_type": "baichuan", "model_max_length": 4096})
    assert found.position == "alibi" and total_parameters(found) == pytest.approx(13.9e9, rel=0.01)
    words = {
        "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32, "kv_channels": 128,
        "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024, "seq_length": 8192,
        "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "model_type": "chatglm",
    }  # fmt: skip
    found = from_hugging_face(words)
    assert (found.num_kv_heads, found.qkv_bias, found.gated) == (2, True, True)
    assert total_parameters(found) == pytest.approx(6.24e9, rel=0.01)
    assert from_hugging_face({**words, "multi_query_attention": False}).num_kv_heads == 32
    old = {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32, "no_bias": True}
    found = from_hugging_face({**old, "vocab_size": 151936, "seq_length": 8192, "model_type": "qwen"})
    assert found.ffn_size == 11008 and total_parameters(found) == pytest.approx(7.72e9, rel=0.01)


def test_a_plan_says_what_was_taken_for_what() -> None:
    work = Workload(model=_model(model_type="OwnEmbedded"), sequence_length=2048, global_batch_size=8)
    said = [one.why for one in _of_the_model(work, load_trainer("fsdp")) if one.what == "architecture"]
    assert said == ["model_type OwnEmbedded is not known, and its config.json has the keys of a llama alone"]
    assert published(work.model).why == "as published; model_type OwnEmbedded read as llama by its keys"

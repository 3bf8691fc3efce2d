"""Models: presets against published parameter counts, config.json readers, sentences for every user error."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hugging_face_configs import CONFIGS, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import sentence

from planner import library
from planner.cost.parameters import active_parameters, count_parameters, total_parameters
from planner.errors import PlannerError, UnknownNameError
from planner.hugging_face import table
from planner.model import ModelSpec, from_dict, from_hugging_face, load_model, to_dict
from planner.model_names import aliases

PRESETS = library.names("models")
SMALL: dict[str, Any] = {
    "name": "small",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 128,
    "vocab_size": 100,
    "max_sequence_length": 512,
}
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 32}

# Their publishers leave the input embedding out of the active parameters.
WITHOUT_INPUT_EMBEDDING = {
    *("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.5", "glm-4.5-air", "glm-4.7-flash", "glm-5"),
    *("gpt-oss-20b", "gpt-oss-120b", "minimax-m2", "moonlight-16b-a3b", "nemotron-3-nano-30b", "nemotron-3-ultra"),
}


def last_digit(value: float) -> float:
    """One unit of the last digit that is not zero: 12.9e9 -> 1e8. Publishers round and truncate."""
    unit = 1
    while int(value) % (unit * 10) == 0:
        unit *= 10
    return float(unit)


@pytest.mark.parametrize("name", PRESETS)
def test_total_parameters_within_half_a_percent_of_published(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source and model.published_parameters > 0
    assert total_parameters(model) == pytest.approx(model.published_parameters, rel=5e-3)


@pytest.mark.parametrize("name", [name for name in PRESETS if load_model(name).is_moe])
def test_active_parameters_agree_with_published(name: str) -> None:
    model = load_model(name)
    published = model.published_active_parameters
    if name == "grok-1":  # its publisher states no figure
        assert published == 0
        return
    active = active_parameters(model, input_embedding=name not in WITHOUT_INPUT_EMBEDDING)
    assert published > 0
    assert abs(active - published) <= max(5e-3 * published, last_digit(published))


@pytest.mark.parametrize(
    ("name", "weight_files", "own_tables", "corrections"),
    [("glm-4.5", 358_337_791_296, 2, 160 * 90), ("glm-4.5-air", 110_468_824_832, 2, 128 * 46)],
)
def test_prediction_module_makes_up_the_weight_files(
    name: str, weight_files: float, own_tables: int, corrections: int
) -> None:
    """The published files repeat both tables in the module and hold a score correction per router."""
    model = load_model(name)
    tables = own_tables * model.vocab_size * model.hidden_size
    assert total_parameters(model, include_mtp=True) + tables + corrections == weight_files


def test_prediction_module_of_deepseek_v3() -> None:
    """11.5e9 [DeepSeek-V3 README_WEIGHTS.md], which leaves out the projection of 2 h h."""
    model = load_model("deepseek-v3")
    module = total_parameters(model, include_mtp=True) - total_parameters(model)
    assert module - 2 * model.hidden_size**2 == pytest.approx(11.5e9, rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_parts_sum_to_total(name: str) -> None:
    model = load_model(name)
    c = count_parameters(model)
    per_layer = c.attention_sharded + c.attention_replicated
    moe = model.num_experts * c.expert + c.shared_experts + c.router
    total = c.input_embedding + c.position_embedding + c.head + c.final_norm + c.vision
    total += model.num_layers * per_layer + model.num_plain_layers * (c.mlp_sharded + c.mlp_replicated)
    assert total + model.num_moe_layers * moe == pytest.approx(total_parameters(model), rel=1e-14)
    assert sum(model.is_moe_layer(i) for i in range(model.num_layers)) == model.num_moe_layers
    assert c.key_value_weights < c.attention_sharded
    assert active_parameters(model) <= total_parameters(model)


def test_counts_of_a_small_model_by_hand() -> None:
    c = count_parameters(from_dict(SMALL | MOE | {"qkv_bias": True, "qk_norm": True, "num_dense_layers": 1}))
    assert c.input_embedding == c.head == 6400
    assert c.key_value_weights == 2 * (64 * 32 + 32)
    assert c.attention_sharded == 64 * 64 + 64 + c.key_value_weights + 64 * 64
    assert c.attention_replicated == 2 * 64 + 2 * 16
    assert (c.mlp_sharded, c.mlp_replicated) == (3 * 64 * 128, 0)
    assert (c.expert, c.router, c.shared_experts, c.mtp) == (3 * 64 * 32, 64 * 8, 0, 0)


def test_biases_are_split_with_their_weights() -> None:
    c = count_parameters(from_dict(SMALL | {"linear_bias": True, "gated": False, "norm": "layernorm"}))
    assert c.attention_sharded == 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    assert c.attention_replicated == 2 * 2 * 64 + 64
    assert (c.mlp_sharded, c.mlp_replicated) == (2 * 64 * 128 + 128, 64)


@pytest.mark.parametrize("alias", sorted(aliases()))
def test_aliases(alias: str) -> None:
    assert alias not in PRESETS
    assert load_model(alias).name == aliases()[alias]


def test_llama_70b_loads_quickly() -> None:
    assert load_model("Llama-70B").name == "llama-3.1-70b"
    times = []
    for _ in range(5):
        start = time.perf_counter()
        load_model("llama-70b")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01  # 1.5 ms on an idle core


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name: str) -> None:
    model = load_model(name)
    assert from_dict(to_dict(model)) == model
    assert from_dict(json.loads(json.dumps(to_dict(model)))) == model


def test_round_trip_through_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(library.dump_yaml(to_dict(load_model("deepseek-v3"))))
    assert load_model(str(path)) == load_model("deepseek-v3")


def test_unknown_name_lists_nearest_first() -> None:
    with pytest.raises(UnknownNameError) as caught:
        load_model("llama-3.1-71b")
    assert str(caught.value).startswith("unknown model 'llama-3.1-71b'; known, nearest first: llama-3.1-70b, ")
    assert str(caught.value).endswith("more ('plan models')")


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "no such model", "\0", "a/\0", "a/b/c", "nowhere.yaml", "nowhere.json", "é", "~"),
        *("a" * 5000, "a" * 999 + ".json", "a" * 300 + "/x", "x/" * 3000, "a" * 300 + ".yaml"),
    ],
)
def test_names_that_are_nothing(name: str) -> None:
    sentence(load_model, name)


def test_hub_name_without_the_hub_library() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        text = sentence(load_model, "some-org/some-model")
        assert "huggingface_hub is not installed" in text


def test_unknown_architecture_sentences() -> None:
    text = sentence(from_hugging_face, {"model_type": "xyz"}, name="mine")
    assert text.startswith("config.json of mine: model_type 'xyz' is not understood; of ")
    assert "nearest are olmo2, " in sentence(from_hugging_face, {"model_type": "olmo-2"})
    assert "missing model_type" in sentence(from_hugging_face, {"hidden_size": 4})
    assert "ssm_state_size is not understood" in sentence(from_hugging_face, llama(ssm_state_size=16))
    assert "linear_attn_config is not understood" in sentence(from_hugging_face, llama(linear_attn_config={"a": 1}))
    odd = {**CONFIGS["gpt-oss-20b"], "layer_types": ["linear_attention"] * 24}
    assert "linear_attention layers are not modelled (layer_types)" in sentence(from_hugging_face, odd)
    assert "the activation 'tanh' in hidden_act" in sentence(from_hugging_face, llama(hidden_act="tanh"))
    broken = llama()
    del broken["hidden_size"]
    assert sentence(from_hugging_face, broken) == "config.json: missing hidden_size"
    assert "hidden_size is 0; it must be" in sentence(from_hugging_face, llama(hidden_size=0))
    assert "hidden_size 8191 is not a multiple of the 64 heads" in sentence(from_hugging_face, llama(hidden_size=8191))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be a whole number from 1 to 10000"),
        ({"hidden_size": -64}, "hidden_size is -64; it must be a whole number from 1 to 1000000000"),
        ({"vocab_size": 2 * 10**9}, "vocab_size is 2000000000; it must be a whole number from 1 to 1000000000"),
        ({"ffn_size": 10**400}, "ffn_size is 1" + 56 * "0" + "...; it must be a whole number"),
        ({"ffn_size": 128.0}, "ffn_size is 128.0; it must be a whole number from 1 to"),
        ({"head_dim": True}, "head_dim is True; it must be a whole number from 1 to"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number from 1 to"),
        ({"gated": 1}, "gated is 1; it must be true or false"),
        ({"source": ["a"]}, "source is ['a']; it must be a text"),
        ({"name": " "}, "name is empty"),
        ({"published_parameters": math.nan}, "published_parameters is nan; it must be a number of parameters"),
        ({"published_parameters": -1.0}, "published_parameters is -1.0; it must be"),
        ({"position": "sine"}, "position is 'sine'; it must be one of rope, learned, alibi, none"),
        ({"norm": "batch"}, "norm is 'batch'; it must be one of rmsnorm, layernorm"),
        ({"activation": "tanh"}, "activation is 'tanh'; it must be one of silu, gelu, relu, relu2"),
        ({"num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"top_k": 2}, "expert sizes are given but num_experts is 0"),
        ({"num_experts": 8}, "num_experts 8 needs top_k and expert_ffn_size"),
        (MOE | {"top_k": 9}, "top_k 9 is larger than num_experts 8"),
        (MOE | {"num_shared_experts": 1}, "num_shared_experts 1 and shared_expert_ffn_size 0 do not go together"),
        (MOE | {"num_dense_layers": 4}, "num_dense_layers 4 and moe_layer_interval 1 leave no MoE layer among 4"),
        ({"q_lora_rank": 8}, "MLA sizes are given but kv_lora_rank is 0"),
        ({"kv_lora_rank": 8}, "kv_lora_rank 8 (MLA) needs qk_nope_head_dim"),
        ({"window": 8}, "window 8 and num_windowed_layers 0 do not go together"),
        ({"window": 8, "num_windowed_layers": 5}, "num_windowed_layers 5 is larger than num_layers 4"),
        ({"position": "learned"}, "position learned does not go with num_position_embeddings 0"),
        ({"hiden_size": 64}, "unknown key 'hiden_size'; nearest: hidden_size"),
    ],
)
def test_bad_sizes(changes: dict[str, Any], expected: str) -> None:
    assert sentence(from_dict, SMALL | changes, where="my.yaml").startswith(f"my.yaml: {expected}")


def test_missing_keys_are_named() -> None:
    assert sentence(from_dict, {"name": "x", "num_layers": 1}).startswith(
        "model: missing keys 'hidden_size', 'num_heads'"
    )
    assert "expected a mapping" in sentence(from_dict, [1, 2])
    assert sentence(ModelSpec, **(SMALL | {"num_layers": 0})).startswith("num_layers is 0")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.integers(1, 300), st.just(10**500)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=6,
)


def succeeds_or_explains(call: Any, data: Any) -> None:
    """Anything but a model that can be counted or a sentence fails."""
    try:
        model = call(data)
    except PlannerError as error:
        assert str(error)
    else:
        assert isinstance(model, ModelSpec)
        assert 0 < active_parameters(model) <= total_parameters(model)
        assert from_dict(to_dict(model)) == model


@pytest.mark.proof
@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from([*SMALL, *MOE, "window", "position", "gated"]), st.text()), ANYTHING))
def test_from_dict_never_crashes(changes: dict[str, Any]) -> None:
    succeeds_or_explains(from_dict, SMALL | changes)
    succeeds_or_explains(from_dict, changes)


@pytest.mark.proof
@settings(max_examples=600, deadline=None)
@given(st.data())
def test_from_hugging_face_never_crashes(data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    if data.draw(st.booleans()):
        config["model_type"] = data.draw(st.sampled_from(sorted(table()["families"])))
    target = config["text_config"] if "text_config" in config and data.draw(st.booleans()) else config
    keys = st.one_of(st.sampled_from([*sorted(target), "layer_types", "head_dim", "moe_layers"]), st.text())
    target.update(data.draw(st.dictionaries(keys, ANYTHING, max_size=3)))
    succeeds_or_explains(from_hugging_face, config)


@pytest.mark.proof
@settings(max_examples=200, deadline=None)
@given(ANYTHING)
def test_any_json_never_crashes(data: Any) -> None:
    succeeds_or_explains(from_hugging_face, data)
    succeeds_or_explains(from_dict, data)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_any_name_never_crashes(name: str) -> None:
    succeeds_or_explains(load_model, name)


@pytest.mark.parametrize("text", ["", "[", "[1]", "{}", '{"model_type": 3}', "[" * 100_000, "\ufeff{}", '{"a": NaN}'])
def test_broken_config_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    sentence(load_model, str(tmp_path))

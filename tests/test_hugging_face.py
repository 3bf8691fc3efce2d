"""Readers of config.json: each gives the preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hugging_face_configs import CONFIGS, llama, sizes
from sentences import sentence

from planner import library
from planner.cost.parameters import total_parameters
from planner.hugging_face import table
from planner.model import from_hugging_face, load_model, to_dict


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_config_json_equals_preset(name: str) -> None:
    preset = to_dict(load_model(name))
    read = to_dict(from_hugging_face(CONFIGS[name], name=name))
    for key in ("published_parameters", "published_active_parameters", "source", "constants"):
        preset.pop(key, None)
        read.pop(key, None)
    if name in ("gemma-3-4b", "llama-4-maverick"):  # presets of the text part
        read.pop("vision", None)
    assert read == preset


PUBLISHED = json.loads((Path(__file__).parent / "data" / "hugging_face_configs.json").read_text())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_config_json_equals_preset(name: str) -> None:
    """One or more of every family; the presets' totals are compared with the published ones in test_model."""
    preset, read = to_dict(load_model(name)), to_dict(from_hugging_face(PUBLISHED[name], name=name))
    assert read == {key: value for key, value in preset.items() if not key.startswith(("published", "source", "constants"))}


def test_every_nth_layer_patterns() -> None:
    def windows(config: dict[str, Any]) -> tuple[int, int, int]:
        model = from_hugging_face(config)
        return model.window, model.num_windowed_layers, model.num_layers

    assert windows(PUBLISHED["olmo-3-7b"]) == (4096, 24, 32)  # three of four
    assert windows(PUBLISHED["command-a"]) == (4096, 48, 64)
    assert windows(PUBLISHED["command-a"] | {"sliding_window_pattern": 2}) == (4096, 32, 64)
    assert windows(PUBLISHED["exaone-4-32b"]) == (4096, 48, 64)  # LLLG
    assert windows(CONFIGS["gpt-oss-20b"]) == (128, 12, 24)
    assert windows(CONFIGS["gemma-3-4b"]) == (1024, 29, 34)  # five of six
    kinds = ["full_attention"] * 20 + ["sliding_attention"] * 12
    assert windows(PUBLISHED["olmo-3-7b"] | {"layer_types": kinds}) == (4096, 12, 32)
    # A window as long as the longest sequence is none.
    assert windows(PUBLISHED["ministral-8b"])[:2] == (0, 0)
    text = sentence(from_hugging_face, PUBLISHED["exaone-4-32b"] | {"sliding_window_pattern": "LGLG"})
    assert "sliding_window_pattern 'LGLG' is not understood" in text


def test_llama_4_attends_in_chunks() -> None:
    model = from_hugging_face(CONFIGS["llama-4-maverick"])
    assert (model.window, model.num_windowed_layers, model.chunked_attention) == (8192, 36, True)
    assert not from_hugging_face(PUBLISHED["olmo-3-7b"]).chunked_attention


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("t5", "an encoder and a decoder"),
        ("whisper", "speech encoders"),
        ("bert", "encoders without a causal loss"),
        ("rwkv", "recurrent layers in place of attention"),
        ("falcon_mamba", "Mamba-1 layers"),
        ("mllama", "cross-attention to images in some layers"),
        ("gemma3n", "embeddings per layer and shared keys and values"),
        ("deepseek_v4", "compressed attention and hyper-connections"),
    ],
)
def test_families_that_are_refused_by_name(kind: str, what: str) -> None:
    text = sentence(from_hugging_face, llama(model_type=kind), name="mine")
    assert text == f"config.json of mine: model_type '{kind}' is not modelled: it has {what}; plans are for causal decoders"


def test_no_family_is_both_understood_and_refused() -> None:
    refused = [name for names in table()["refused"] for name in names.split()]
    assert len(refused) == len(set(refused))
    assert not set(refused) & set(table()["families"])


def test_refused_parts_of_known_families() -> None:
    def said(config: dict[str, Any]) -> str:
        return sentence(from_hugging_face, config)

    assert "with is_encoder_decoder is not modelled" in said(llama(is_encoder_decoder=True))
    assert "index_topk is not understood in model_type 'llama'" in said(llama(index_topk=2048))
    assert "hc_mult is not understood" in said(llama(hc_mult=4))
    odd = PUBLISHED["hunyuan-a13b"] | {"moe_topk": [8] * 31 + [4]}
    assert "moe_topk differs between layers, which is not modelled" in said(odd)
    kinds = ["sparse", "dense"] * 30 + ["sparse"]
    assert "mlp_layer_types other than leading dense layers" in said(PUBLISHED["deepseek-v3.2"] | {"mlp_layer_types": kinds})
    ends = PUBLISHED["ernie-4.5-21b-a3b"] | {"moe_layer_end_index": 20}
    assert "moe_layer_end_index before the last layer" in said(ends)
    tower = {**CONFIGS["gemma-3-4b"], "vision_config": {"model_type": "resnet"}}
    assert "the image encoder 'resnet' in vision_config is not modelled; give its text_config as a config.json" in said(tower)
    assert "audio_config is not modelled" in said({**CONFIGS["gemma-3-4b"], "audio_config": {"hidden_size": 8}})
    assert "vision_config: patch_size is 'x'" in said({**CONFIGS["gemma-3-4b"], "vision_config": {"patch_size": "x"}})


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq of 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq of 4 bits"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"load_in_4bit": True}, "bitsandbytes of 4 bits"),
        ({"_load": 1}, "an unknown method"),
        (None, ""),
    ],
)
def test_quantised_weights_are_seen(found: Any, named: str) -> None:
    model = from_hugging_face(llama(quantization_config=found))
    assert model.quantised == named
    assert total_parameters(model) == total_parameters(from_hugging_face(llama()))


@pytest.mark.parametrize(
    ("name", "parameters", "per_token"),
    [("qwen3-vl-8b", 576_388_336, 4), ("qwen3-vl-30b-a3b", 538_631_408, 4), ("qwen2.5-vl-72b", 704_600_000, 4)],
)
def test_image_encoders(name: str, parameters: float, per_token: int) -> None:
    """Parameters of the classes in transformers 5.23; its Qwen2.5-VL has norms without biases, 1e-4 less."""
    tower = load_model(name).vision
    assert tower is not None
    assert tower.parameters == pytest.approx(parameters, rel=2e-3)
    assert tower.patches_per_token == per_token


def test_image_encoders_of_configs() -> None:
    """Gemma 3: 4,096 patches become 256 tokens; Llama 4: 871,932,416 of the weight files [profiles/models/llama-4-scout.yaml]."""
    siglip = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}  # fmt: skip
    gemma = from_hugging_face({**CONFIGS["gemma-3-4b"], "vision_config": siglip}).vision
    assert gemma is not None
    assert (gemma.patches_per_image, gemma.patches_per_token) == (4096, 16)
    assert gemma.parameters == pytest.approx(419_816_704, rel=1e-3)
    llama4 = {"model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
              "vision_output_dim": 4096}  # fmt: skip
    tower = from_hugging_face({**CONFIGS["llama-4-maverick"], "vision_config": llama4}).vision
    assert tower is not None
    assert tower.parameters == pytest.approx(871_932_416, rel=1e-4)
    pixtral = {"model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "patch_size": 14}
    text = PUBLISHED["ministral-3-8b"]
    mistral = from_hugging_face({"model_type": "mistral3", "text_config": text, "vision_config": pixtral}).vision
    assert mistral is not None
    assert (mistral.gated, mistral.bias, mistral.patches_per_token) == (True, False, 4)


def test_indexer_of_glm_is_shared_between_layers() -> None:
    config = PUBLISHED["glm-5"]
    assert from_hugging_face(config).index_layers == 78
    for layers, freq, offset in ((78, 4, 2), (10, 4, 3), (10, 3, 1), (4, 3, 6)):
        changed = {"index_topk_freq": freq, "index_skip_topk_offset": offset, "num_hidden_layers": layers, "mlp_layer_types": None}
        own = sum(max(number - offset + 1, 0) % freq == 0 for number in range(layers))
        assert from_hugging_face(config | changed).index_layers == own, changed
    assert from_hugging_face(config | {"indexer_types": ["full", "shared"] * 39}).index_layers == 39
    assert from_hugging_face(config | {"index_topk_pattern": "FSSF" * 19 + "FS"}).index_layers == 39


def test_readers_without_a_preset() -> None:
    neox = from_hugging_face({"model_type": "gpt_neox", **sizes(6144, 24576, 44, 64, 64, 50432, 2048)})
    assert total_parameters(neox) == pytest.approx(20.55e9, rel=5e-3)  # GPT-NeoX-20B
    phi = from_hugging_face({"model_type": "phi", **sizes(2560, 10240, 32, 32, 32, 51200, 2048)})
    assert total_parameters(phi) == pytest.approx(2_779_683_840, rel=5e-3)  # phi-2
    experts = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    qwen = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632, **experts}
    model = from_hugging_face({**qwen, **sizes(2048, 5632, 24, 16, 16, 151936, 8192)})
    assert total_parameters(model) == pytest.approx(14.3e9, rel=5e-3)  # Qwen1.5-MoE-A2.7B


def test_directory_and_file_of_a_config_json(tmp_path: Path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-70b"]))
    by_directory, by_file = load_model(str(directory)), load_model(str(directory / "config.json"))
    assert by_directory == by_file
    assert by_directory.name == "my-llama"
    assert total_parameters(by_directory) == 70_553_706_496


def test_the_families_read_the_same_without_libyaml() -> None:
    """A plain `a ? b` inside braces is read by libyaml alone."""
    text = (library.profiles_directory() / "model_families.yaml").read_text()
    assert yaml.load(text, Loader=yaml.SafeLoader) == yaml.load(text, Loader=yaml.CSafeLoader)


GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "intermediate_size": None,
           "attention_types": [[["global", "local"], 12]], "window_size": 256}  # fmt: skip
GPT_J = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "tie_word_embeddings": False}


@pytest.mark.parametrize(("said", "billions", "position", "norms"), [
    (GPT_NEO, 1.3156, "learned", 2), (GPT_J, 6.0509, "rope", 1), ({**GPT_J, "model_type": "codegen"}, 6.0509, "rope", 1),
])  # fmt: skip
def test_decoders_of_eleuther(said: dict[str, Any], billions: float, position: str, norms: int) -> None:
    """GPT-Neo 1.3B and GPT-J 6B by their model cards; local layers of GPT-Neo compute all scores as well."""
    sizes = {"vocab_size": 50257, "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    found = from_hugging_face({**sizes, **said}, name="one")
    assert (found.position, found.norms_per_layer, found.parallel_attention, found.window) == (position, norms, norms == 1, 0)
    assert (found.ffn_size, found.constants) == (4 * found.hidden_size, None)
    assert total_parameters(found) / 1e9 == pytest.approx(billions, abs=0.002)


MPT = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432}
"""A configuration of llm-foundry, 2048 tokens long."""


@pytest.mark.parametrize(
    ("more", "billions", "position", "kv_heads"),
    [
        ({}, 6.650, "alibi", 32),  # MPT-7B, whose model card says 6.65 billion
        ({"no_bias": False, "attn_config": {"alibi": False}}, 6.659, "learned", 32),
        ({"attn_config": {"rope": True, "alibi": False, "attn_type": "grouped_query_attention", "kv_n_heads": 8}},
         5.844, "rope", 8),
        ({"attn_config": {"alibi": False, "attn_type": "multiquery_attention"}, "learned_pos_emb": False}, 5.610, "none", 1),
    ],
)  # fmt: skip
def test_decoders_of_llm_foundry(more: dict[str, Any], billions: float, position: str, kv_heads: int) -> None:
    found = from_hugging_face({**MPT, **more}, name="mpt")
    assert (found.position, found.num_kv_heads, found.ffn_size, found.tied_embeddings) == (position, kv_heads, 16384, True)
    assert total_parameters(found) / 1e9 == pytest.approx(billions, abs=0.002)
    assert sentence(lambda: from_hugging_face({**MPT, "ffn_config": {"ffn_type": "mptglu"}}, name="mpt")).endswith(
        "ffn_type other than mptmlp and a sliding_window_size are not understood"
    )

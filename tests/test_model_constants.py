"""Constants of models: from the table and from config.json, into every target."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hugging_face_configs import CONFIGS, llama
from sentences import sentence
from trainers.plans import Wanted, found

from planner import library
from planner.model import from_dict, from_hugging_face, load_model, to_dict
from planner.model_constants import Constants, RopeScaling, Router
from planner.trainers.bundle.folder import make_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_length=8192)
DEEPSEEK = Constants(
    norm_eps=1e-6, rope_theta=10000.0, router=Router(score="sigmoid", expert_bias=True, groups=8, top_groups=4, scale=2.5),
    rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip


def test_every_pattern_of_the_table_is_a_preset_and_constants_fit_their_model() -> None:
    names = library.names("models")
    table = library.read_yaml(library.profiles_directory() / "model_constants.yaml")
    assert all(any(fnmatchcase(name, one) for name in names) for patterns in table for one in patterns.split())
    known = [load_model(name) for name in names if load_model(name).constants]
    assert len(known) >= 125
    for model in known:
        assert model.constants is not None
        assert (model.constants.router is None) == (not model.is_moe), model.name
        assert (model.constants.rope_theta > 0) == (model.position == "rope"), model.name


def test_what_a_published_config_says_is_what_the_preset_has() -> None:
    glm = load_model("glm-4.7-flash").constants
    assert glm == Constants(norm_eps=1e-5, rope_theta=1e6, router=Router(score="sigmoid", expert_bias=True, scale=1.8))
    olmo = load_model("olmo-3-7b").constants
    assert olmo is not None and olmo.local_rope_theta == olmo.rope_theta == 500000.0  # windows are not stretched
    assert olmo.rope_scaling == RopeScaling(kind="yarn", factor=8.0, original_length=8192)
    for name in ("phi-4-mini", "ministral-3-8b", "granite-3.3-8b", "ernie-4.5-21b-a3b"):  # no field says what they do
        assert load_model(name).constants is None


def test_routers_and_rotations_that_a_file_leaves_to_its_code() -> None:
    """Qwen3.5's router has no switch and divides by the sum [transformers, Qwen3_5MoeTopKRouter], Nemotron-H's is that of
    DeepSeek-V3 [NemotronHTopkRouter]; MiniMax-M2 gives the width that is rotated."""
    path = Path(__file__).parent / "data" / "hugging_face_configs.json"
    qwen = json.loads(path.read_text())["qwen3.5-122b-a10b"]
    qwen["text_config"] |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    assert from_hugging_face(qwen).constants == load_model("qwen3.5-122b-a10b").constants
    nemotron = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 512, "layer_norm_epsilon": 1e-5,
                "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1, "mamba_num_heads": 4,
                "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 16,
                "mlp_hidden_act": "relu2", "norm_topk_prob": True, "routed_scaling_factor": 2.5}  # fmt: skip
    read = from_hugging_face(nemotron).constants
    assert read is not None and read.router == Router(score="sigmoid", expert_bias=True, scale=2.5)
    says = {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "head_dim": 128, "rotary_dim": 64, "scoring_func": "sigmoid"}
    assert from_hugging_face(json.loads(path.read_text())["minimax-m2"] | says).constants == load_model("minimax-m2").constants


def test_a_config_says_its_constants() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    said = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    expected = Constants(norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3)
    assert from_hugging_face(llama(rope_scaling=scaling, **said)).constants == expected == load_model("llama-3.1-70b").constants
    newer = {"rms_norm_eps": 1e-5, "rope_parameters": {**scaling, "rope_theta": 500000.0}}  # transformers 5
    assert from_hugging_face(llama(**newer)).constants == expected
    assert from_hugging_face(llama()).constants is None  # it says no epsilon
    assert from_hugging_face(llama(rope_scaling={"type": "dynamic", "factor": 2.0}, **said)).constants is None
    deepseek = {
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8,
        "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0},
    }  # fmt: skip
    read = from_hugging_face({**CONFIGS["deepseek-v3"], **deepseek}).constants
    assert read == DEEPSEEK == load_model("deepseek-v3").constants
    whole, local = {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 10000.0}
    theta = {"full_attention": whole, "sliding_attention": local}
    gemma = from_hugging_face({**CONFIGS["gemma-3-4b"]["text_config"], "rms_norm_eps": 1e-6, "rope_parameters": theta}).constants
    assert gemma == load_model("gemma-3-4b").constants and gemma is not None and gemma.local_rope_theta == 10000.0
    assert "rms_norm_eps" in sentence(from_hugging_face, llama(rms_norm_eps="small"))


def test_constants_travel_with_a_plan_and_are_no_part_of_the_architecture() -> None:
    model = load_model("deepseek-v3")
    data = yaml.safe_load(library.dump_yaml(to_dict(model)))
    assert from_dict(data).constants == DEEPSEEK
    del data["constants"]
    assert from_dict(data) == model and from_dict(data).constants is None
    assert "norm_epsilon" in sentence(from_dict, {**data, "constants": {"norm_epsilon": 1e-5}})


@cache
def exported(target: str, wanted: Wanted) -> dict[str, str]:
    """All files of the best plan of a search."""
    return make_bundle(load_target(target), ExportJob.of(found(wanted)[0]), "torchrun").files


SMALL = Wanted(model="llama-3.1-8b", gpus=8, top=1)
EXPERTS = Wanted(
    model="deepseek-v3", gpus=1024, top=1, pins=(("tp", 1), ("pp", 16), ("ep", 64), ("cp", 1), ("micro_batch_size", 1))
)  # fmt: skip
WRITTEN: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "megatron": (SMALL, "arguments.sh",
                 ("--rotary-base 500000", "--norm-epsilon 1e-05", "--use-rope-scaling", "--rope-scaling-factor 8")),
    "megatron-bridge": (SMALL, "plan_config.py", ("rotary_base=500000", "layernorm_epsilon=1e-05", "rope_scaling=True")),
    "torchtitan": (Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=8), "plan_config.py",
                   ("THETA = 500000.0", "EPS = 1e-05", "scaling='llama', scaling_factor=8.0")),
    "nanotron": (Wanted(model="llama-3.1-8b", gpus=16, trainer="nanotron", top=6), "nanotron.yaml", ("rope_theta: 500000",)),
    "maxtext": (Wanted(model="llama-3.1-8b", gpus=16, trainer="maxtext", top=4), "maxtext.yml",
                ("rope_max_timescale: 500000", "rope_type: llama3.1", "normalization_layer_epsilon")),
    "deepspeed": (Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed", top=6), "model/config.json",
                  ('"rope_theta": 500000.0', '"rms_norm_eps": 1e-05', '"rope_type": "llama3"')),
    "pytorch": (Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=8), "plan.json",
                ('"rope_theta": 500000', '"rope_factor": 8')),
    "lightning": (Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=8), "plan.json",
                  ('"rope_theta": 500000', '"rope_factor": 8')),
    "olmo-core": (Wanted(model="llama-3.1-8b", gpus=8, trainer="fsdp", top=8), "olmo_train.py",
                  ("rope_theta=500000", "eps=1e-05", "factor=8")),
    "automodel": (Wanted(model="llama-3.1-8b", gpus=8, trainer="automodel", top=1), "model/config.json",
                  ('"rope_theta": 500000.0', '"rms_norm_eps": 1e-05', '"rope_type": "llama3"')),
    "torchtune": (Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtune", precision="bf16_true", top=1), "torchtune.yaml",
                  ("rope_base: 500000", "norm_eps: 1", "scale_factor: 8")),
    "primus": (Wanted(model="llama-3.1-8b", gpus=8, hardware="mi300x", top=1), "primus.yaml",
               ("rotary_base: 500000", "layernorm_epsilon: 1", "rope_scaling_factor: 8")),
}  # fmt: skip


@pytest.mark.parametrize("target", WRITTEN)
def test_llama_3_1_is_exported_as_llama_3_1(target: str) -> None:
    wanted, file, words = WRITTEN[target]
    files = exported(target, wanted)
    assert [word for word in words if word not in files[file]] == []
    assert "not known to the planner" not in files["README.md"]


def test_deepseek_routes_as_it_was_trained() -> None:
    text = exported("megatron", EXPERTS)["arguments.sh"]
    for words in (
        "--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias", "--moe-router-num-groups 8",
        "--mscale-all-dim 1.0",
        "--moe-router-group-topk 4", "--moe-router-topk-scaling-factor 2.5", "--moe-router-load-balancing-type seq_aux_loss",
        "--rotary-scaling-factor 40.0", "--norm-epsilon 1e-06",
    ):  # fmt: skip
        assert words in text, words


def test_an_unknown_constant_is_said() -> None:
    files = exported("megatron", Wanted(model="phi-4-mini", gpus=16, top=1, pins=(("tp", 2), ("micro_batch_size", 1))))
    assert "--rotary-base" not in files["arguments.sh"]
    assert "not known to the planner for phi-4-mini: the trainer's defaults stand" in files["README.md"]

"""Models by the names of torchtune's builders, and those whose sizes a configuration writes out."""

import dataclasses
import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.reading.configuration import known_model
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings

NAME = re.compile(r"torchtune\.models\.(?P<family>\w+)\.(?:_\w+\.)?(?P<kind>q?lora_)?(?P<name>\w+)")
FAMILIES = (
    "code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "llama4", "mistral", "phi3", "phi4",
    "qwen2", "qwen2_5", "qwen3", "smol",
)
"""Its families of language models.  [torchtune/models]"""
WINDOWED = ("gemma2", "gemma3")
"""Families whose builders have sliding windows; mistral and phi3 attend to all.  [models/*/_component_builders.py]"""
SIZES = {"0_5b": "0.5b", "1_5b": "1.5b", "0_6b": "0.6b", "1_7b": "1.7b"}
OF_ANY_SIZE: dict[str, dict[str, Any]] = {
    "llama2": {}, "code_llama2": {}, "llama3": {}, "llama3_1": {}, "llama3_2": {"tied_embeddings": True}, "mistral": {},
    "qwen2": {"qkv_bias": True}, "qwen2_5": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
}  # fmt: skip
"""Builders that take sizes, called as their family, and what they build otherwise than Llama.  [models/*/_component_builders.py]"""
OTHER_STEPS = re.compile(r"classifier|reward|clip|t5|flux|encoder")
"""Names of builders whose models have no head over the vocabulary."""
VISION = re.compile(r"vision")
TRAINABLE = ("decoder_trainable", "fusion_trainable")


def model_of(given: Settings) -> tuple[str, ModelSpec | None, str, tuple[str, ...]]:
    """('', 'lora_' or 'qlora_', the model, its name, what was taken for what). Raises PlannerError for one that no plan has."""
    part = given.section("model")
    named = str(part.get("_component_"))
    where = f"{given.where('model')}._component_ is {shown(named)}"
    found = NAME.fullmatch(named)
    if OTHER_STEPS.search(named.rpartition(".")[2] if found is None else f"{found['family']}.{found['name']}"):
        raise PlannerError(f"{where}: a model without a loss over the vocabulary is not modelled")
    if found is None:
        return "", None, named, ()
    frozen = [one for one in TRAINABLE if str(part.get(one, "lora" if found["kind"] else "true")).lower() in ("frozen", "false")]
    if VISION.search(named) or "decoder_trainable" in frozen:
        raise PlannerError(f"{where}: layers that look at images, or a decoder that is frozen beside them, are not modelled")
    kind = found["kind"] or ""
    if found["name"] == found["family"] and found["family"] in OF_ANY_SIZE:
        return kind, _of_sizes(part, found["family"]), named.rpartition(".")[2], ()
    name = _name(found)
    model, notes = named_model(name, given.path)
    if model is not None and model.window and found["family"] not in WINDOWED:
        model = dataclasses.replace(model, window=0, num_windowed_layers=0)
    if found["family"] not in FAMILIES:
        fork = f"torchtune has no builders torchtune.models.{found['family']}, which are those of a fork"
        notes = (*notes, f"{fork}: the model is read by its name")
    return kind, model, name, notes


def _name(component: re.Match[str]) -> str:
    """The model as the hub would call it."""
    name = component["name"]
    for text, dotted in SIZES.items():
        name = name.replace(text, dotted)
    own = component["family"].removesuffix("_moe")
    if own == "code_llama2":
        return f"codellama-{name.rpartition('_')[2]}"
    if own == "smol":
        return name.replace("_", "-")
    if not name.startswith(own):
        return name.replace("_", "-")
    family = re.sub(r"(llama|qwen|gemma|phi)(\d)", r"\1-\2" if not own.startswith("qwen") else r"\1\2", own).replace("_", ".")
    rest = name.removeprefix(component["family"]).removeprefix(own).strip("_")
    rest = rest.removesuffix("_instruct").removesuffix("_base").replace("_", "-")
    return f"{family}-{rest}".replace("phi-4-14b", "phi-4")


def _of_sizes(part: Settings, family: str) -> ModelSpec | None:
    """The model of a builder that takes sizes; None where one is not said."""
    said = {one: part.number(one) for one in ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "vocab_size", "max_seq_len")}
    if any(said[one] is None for one in said if one != "num_kv_heads"):
        return None
    layers, heads, kv_heads, width, rows, longest = (int(one or 0) for one in said.values())
    ffn = part.number("intermediate_dim") or -(-int(8 * width / 3) // 256) * 256  # scale_hidden_dim_for_mlp
    more = dict(OF_ANY_SIZE[family])
    if family.startswith("qwen"):
        more["tied_embeddings"] = part.flag("tie_word_embeddings")
    spec = ModelSpec(
        name=f"{family}-own", num_layers=layers, num_heads=heads, num_kv_heads=kv_heads or heads, hidden_size=width,
        head_dim=part.number("head_dim") or width // heads, ffn_size=ffn, vocab_size=rows, max_sequence_length=longest, **more,
    )  # fmt: skip
    return known_model(spec)

"""Models by the names of torchtune's builders, and those whose sizes a configuration writes out."""

import dataclasses
import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.reading.configuration import known_model
from planner.trainers.reading.given import Question, setting_of_a_fork
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings

NAME = re.compile(r"torchtune\.models\.(?P<family>\w+)\.(?:_\w+\.)?(?P<kind>q?lora_)?(?P<name>\w+)")
FAMILIES = (
    "code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "llama4", "mistral", "phi3", "phi4",
    "qwen2", "qwen2_5", "qwen3", "smol",
)
"""Its families of language models.  [torchtune/models]"""
WINDOWED = ("gemma2", "gemma3", "llama4")
"""Families whose builders have sliding windows or chunks; mistral and phi3 attend to all.  [models/*/_component_builders.py]"""
SIZES = {"0_5b": "0.5b", "1_5b": "1.5b", "0_6b": "0.6b", "1_7b": "1.7b"}
OF_ANY_SIZE: dict[str, dict[str, Any]] = {
    "llama2": {}, "code_llama2": {}, "llama3": {}, "llama3_1": {}, "llama3_2": {"tied_embeddings": True}, "mistral": {},
    "qwen2": {"qkv_bias": True}, "qwen2_5": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
}  # fmt: skip
"""Builders that take sizes, called as their family, and what they build otherwise than Llama.  [models/*/_component_builders.py]"""
OTHER_STEPS = re.compile(r"classifier|reward|clip|t5|flux|encoder")
"""Names of builders whose models have no head over the vocabulary."""
VISION = re.compile(r"vision")
OF_ADAPTERS = re.compile(r"lora|dora|adapter|peft")
"""Words of builders and of their arguments that make adapters, whoever wrote them."""
KNOWN = re.compile(
    r"_component_|lora_(attn_modules|rank|alpha|dropout)|apply_lora_to_(mlp|output)|use_dora|quantize_base|use_clip\w*|\w*_trainable"
    r"|num_\w+|embed_dim|vocab_size|max_seq_len|intermediate_dim|head_dim|\w*dropout|norm_eps|rope_\w+|scale_factor|tie_word_embeddings"
    r"|pool_\w+|image_size|\w*norm\w*|\w*aux_loss_coef\w*|use_grouped_\w+"
)
"""Arguments of torchtune's builders, of all its versions."""
TRAINABLE = ("decoder_trainable", "fusion_trainable")


def model_of(given: Settings) -> tuple[str, ModelSpec | None, str, tuple[str, ...]]:
    """('', 'lora_' or 'qlora_', the model, its name, what was taken for what). Raises PlannerError for one that no plan has."""
    part = given.section("model")
    named = str(part.get("_component_"))
    where = f"{given.where('model')}._component_ is {shown(named)}"
    found = NAME.fullmatch(named)
    kind = (found["kind"] or "") if found else ""
    if OTHER_STEPS.search(named.rpartition(".")[2] if found is None else f"{found['family']}.{found['name']}"):
        raise PlannerError(f"{where}: a model without a loss over the vocabulary is not modelled")
    _require_one_adapter(part)
    _ask_for_a_builder(given, part, named, kind)
    if found is None:
        return "", None, named, ()
    frozen = [one for one in TRAINABLE if str(part.get(one, "lora" if kind else "true")).lower() in ("frozen", "false")]
    if VISION.search(named) or "decoder_trainable" in frozen:
        raise PlannerError(f"{where}: layers that look at images, or a decoder that is frozen beside them, are not modelled")
    if found["name"] == found["family"] and found["family"] in OF_ANY_SIZE:
        return kind, _of_sizes(part, found["family"]), named.rpartition(".")[2], ()
    name = _name(found)
    model, notes = named_model(name, given.path)
    if model is not None and model.window and found["family"] not in WINDOWED:
        model = dataclasses.replace(model, window=0, num_windowed_layers=0, chunked_attention=False)
    if found["family"] not in FAMILIES:
        fork = f"torchtune has no builders torchtune.models.{found['family']}, which are those of a fork"
        notes = (*notes, f"{fork}: the model is read by its name")
    return kind, model, name, notes


def _require_one_adapter(part: Settings) -> None:
    """Raises PlannerError for several adapters that are trained at once."""
    several = [one for one in ("lora_rank", "lora_alpha") if isinstance(part.data.get(one), list)]
    if several:
        sets = " ".join(f"--set {part.place}{one}={next(iter(part.data[one]), 8)}" for one in several)
        what = f"{', '.join(f'{one} {shown(part.data[one])}' for one in several)}: several adapters at once, which no plan has"
        raise PlannerError(f"{part.where(several[0])}: {what}; {sets} imports the job with one")


def _ask_for_a_builder(given: Settings, part: Settings, named: str, kind: str) -> None:
    """Asks about a builder of a project's own that makes adapters by its name or its arguments, and is none of torchtune's: its
    adapters would be dropped; and about arguments that no builder of torchtune has."""
    adapts = [str(one) for one in part.data if OF_ADAPTERS.search(str(one)) and part.data[one] not in (None, False, 0)]
    if not kind and (adapts or OF_ADAPTERS.search(named.rpartition(".")[2])):
        why = f", with {', '.join(adapts)[:80]}" if adapts else ""
        about = f"{shown(named)} is a builder of the project's own{why}; the builder of torchtune that is like it"
        given.ask(Question(name="model._component_", about=about, choices=(f"torchtune.models.{_like(named)}",)))
    for one, value in part.data.items():
        if not KNOWN.fullmatch(str(one)) and value not in (None, False, 0) and (kind or one not in adapts):
            given.ask(setting_of_a_fork(f"model.{one}", "torchtune", "null"))


def _like(named: str) -> str:
    """The builder of adapters whose name is the end of another one's."""
    called = named.rpartition(".")[2]
    name = re.sub(r"^.*?(?=(q?lora_)?(code_llama|llama|qwen|gemma|phi|mistral))", "", called)
    family = re.match(r"(?:q?lora_)?([a-z_]*\d*(?:_\d(?=_\d+b))?)", name)
    return f"{family[1] if family else 'llama3'}.{name if name.startswith(('lora_', 'qlora_')) else f'lora_{name}'}"


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

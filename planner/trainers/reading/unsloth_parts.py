"""Programs that train with unsloth: what it puts in the place of what transformers, TRL and PEFT do by themselves."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.given import Given, value_of
from planner.trainers.reading.kernels import bare
from planner.trainers.reading.loading import loading
from planner.trainers.reading.python import Script
from planner.trainers.reading.shell.text import gap, is_open, roots
from planner.trainers.reading.versions import newer

REPLACED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_8bit"}
"""Defaults of the configurations of TRL's trainers, once unsloth is imported.  [unsloth, models/rl.py: replacements]"""
REPLACES = (2025, 2)
"""Version of unsloth since which it does so."""
OF_TRL = ("SFTConfig", "DPOConfig", "UnslothTrainingArguments")
UNPATCHES = (2026, 2)
"""Version of unsloth since which get_peft_model takes back what from_pretrained has put into torch's checkpointing."""


def replaced(script: Script, kinds: set[str], trains: bool) -> dict[str, Any]:
    """Defaults of a trainer's configuration under unsloth, by the classes that it is; without one a trainer of TRL makes it
    itself, which ``trains`` says. Not of transformers' arguments, nor of a class that is taken from TRL before unsloth is there."""
    named = [one for one in OF_TRL if one in kinds]
    if not (named or trains) or newer(script.path, "unsloth", REPLACES) is False:
        return {}
    early = [one.lineno for one in _imports(script.tree, inner=False) if getattr(one, "module", None) == "trl"
             and any(name.name in named for name in one.names)]  # fmt: skip
    lean = [one.lineno for one in _imports(script.tree, inner=True) if _of_unsloth(one)]
    return {} if early and lean and early[0] < min(lean) else dict(REPLACED)


def of_parser(script: Script) -> dict[str, Any]:
    """The same of a program whose configuration is one of TRL's, made from its command line."""
    return replaced(script, {*OF_TRL} & {*script.names_used()}, trains=False)


def _imports(tree: ast.AST, inner: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports of a script; with or without those in its functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif inner or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _imports(node, inner)


def _of_unsloth(node: ast.Import | ast.ImportFrom) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
    return any(one.partition(".")[0] == "unsloth" for one in names)


def stays_patched(script: Script, loads: Sequence[ast.Call], word: Any) -> Any:
    """use_gradient_checkpointing of get_peft_model as it counts: True sent layer inputs to the host as "unsloth" does, before
    2026.2, where from_pretrained has its default, "unsloth".  [unsloth, models/loader.py, llama.py; _utils.py:
    apply_unsloth_gradient_checkpointing]"""
    loaded = [script.keywords(one).get("use_gradient_checkpointing", "unsloth") for one in loads[:1]]
    if word not in (True, "True") or loaded != ["unsloth"]:
        return word
    new = newer(script.path, "unsloth", UNPATCHES)
    return "unsloth" if new is False else word if new else PATCHED


PATCHED = "patched before"
"""Such a True of which no version is known."""


SWITCHES = ("load_in_fp8", "qat_scheme", "offload_embedding", "fast_inference", "unsloth_tiled_mlp")
"""Keywords of from_pretrained that a note is about."""
UPLOADS = re.compile(r"(?i)(-unsloth)?-bnb-4bit$")
"""The end of a name of unsloth's own, behind which weights lie in 4 bits."""


DYNAMIC = re.compile(r"(?i)^[\w-]+/(?!.*(?<!unsloth)-bnb-4bit$)")
OF_UPLOADS = (
    "4 bits of unsloth are those of its -unsloth-bnb-4bit where there is one, with some linear layers in 16 bits "
    "(llm_int8_skip_modules of its config.json), priced in 4: memory comes out too low by 1.5 bytes for each of their weights"
)


def loading_of(script: Script, words: Mapping[str, Any], model: Any, notes: list[str]) -> dict[str, Any]:
    """Arguments of a model that unsloth loads: its switches, the configuration of bitsandbytes that goes before them, and the
    upload that it takes in the place of the one that is named.  [unsloth, models/loader.py, loader_utils.py: get_model_name]"""
    if words.get("num_labels") is not None or "Classification" in str(words.get("auto_model")):
        raise PlannerError(f"{script.path}: it loads its model to classify (num_labels), and language models are modelled")
    found = {name: words[name] for name in SWITCHES if words.get(name)}
    whole, name = words.get("full_finetuning") is True, str(model)
    eight = words.get("load_in_8bit", False)
    four = words.get("load_in_4bit", not any(words.get(one) for one in ("load_in_16bit", "load_in_fp8")))
    if words.get("quantization_config") is not None:
        given = loading(script, {"quantization_config": words["quantization_config"]})
        eight, four = given.get("load_in_8bit", eight), given.get("load_in_4bit", four)
    if name.lower().endswith("-bf16") and name.count("/") == 1 and (four or eight) and not whole:
        old = newer(script.path, "unsloth", (2025, 10)) is False
        four, eight = (four, eight) if old else (False, False)
        notes += [] if old else [f"{name} is loaded in 16 bits by its name, as unsloth does since 2025.10"]
    found |= {"load_in_4bit": four if not (eight or whole) else False, "load_in_8bit": eight, "use_bnb_nested_quant": True}
    if (whole or four is False) and not eight and UPLOADS.search(name) and words.get("use_exact_model_name") is not True:
        found["model_name_or_path"] = UPLOADS.sub("", name)
        notes.append(f"unsloth loads {found['model_name_or_path']} in 16 bits in the place of {name}: load_in_4bit is false")
    elif found["load_in_4bit"] is True and DYNAMIC.search(name) and words.get("use_exact_model_name") is not True:
        notes.append(OF_UPLOADS)
    if words.get("device_map") in ("auto", "balanced", "balanced_low_0"):
        notes.append(f"device_map {words['device_map']} spreads the layers over the GPUs that one process sees; priced on one GPU")
    dtype = words.get("dtype", words.get("torch_dtype"))
    known = dtype if isinstance(dtype, str) and not is_open(dtype) else "bfloat16"
    wide = whole and (words.get("float32_mixed_precision") is True or known == "float16")
    return {**found, "max_length": words.get("max_seq_length", 2048), "dtype": "float32" if wide else known}


def beside_layers(script: Script, words: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of get_peft_model that a note is about; models with images have adapters on the encoder by themselves."""
    images = words.get("finetune_vision_layers", "FastVisionModel" in script.names_used())
    found = {"qat_scheme": words.get("qat_scheme"), "finetune_vision_layers": images is not False}
    return {name: value for name, value in found.items() if value}


def adds_tokens(script: Script, made: ast.Call) -> bool:
    """Whether tokens are added before adapters are made, which has unsloth train embedding and head as a whole.
    [unsloth_zoo/tokenizer_utils.py: _need_to_train_embeddings]"""
    return any(one.lineno < made.lineno for one in script.calls("add_new_tokens"))


def unsloth_kernel(words: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The slow kernel of attention where unsloth takes it: with models whose attention it has not written itself.
    [unsloth/models/llama.py, vision.py; unsloth_zoo/temporary_patches/gpt_oss.py]"""
    name = str(model).lower()
    asked = words.get("attn_implementation") == "eager" and not is_open(name)
    return {} if not asked or OWN_FORWARD.search(bare(name)) or re.search("gpt[-_]?oss", name) else {"attn_implementation": "eager"}


def unsloth_checkpointing(said: Given, word: Any) -> dict[str, Any]:
    """use_gradient_checkpointing of unsloth's get_peft_model as arguments; one that is open stays so, asked by what decides it."""
    name = "gradient_checkpointing"
    if isinstance(word, str) and is_open(word):
        if set(roots(word)) <= {name, f"use_{name}"}:
            said.choices.setdefault(name, ["unsloth", "true", "false"])
            word = gap([name])
        text = said.setting(name)
        if text is None:
            return dict.fromkeys((name, "activation_offloading"), word)
        word = value_of(text)
    known = {name: word not in (False, None, "False"), "activation_offloading": word == "unsloth"}
    return {**known, "patched_before": True} if word == PATCHED and said.setting("activation_offloading") is None else known


AT_LEAST, SHORT_ON_GPU = 512, (2026, 2)
"""Tokens below which layer inputs stay on the GPU, and the version since which they do.  [models/_utils.py:
apply_unsloth_gradient_checkpointing]"""


def unsloth_length(script: Script, data: Mapping[str, Any], loaded: Any, notes: list[str]) -> dict[str, Any]:
    """The length of unsloth, which cuts at the max_seq_length of the model, or of its arguments where that is less, whatever
    max_length they say; pairs are cut by TRL, and no longer than the model takes.  [unsloth, models/rl.py: max_length_check]"""
    said, own = data.get("max_length"), data.get("max_seq_length")
    if not isinstance(loaded, int):
        return {"max_seq_length": None} if own == said else {}
    kept: dict[str, Any] = {"max_seq_length": None}
    if loaded < AT_LEAST and data.get("activation_offloading") is True and newer(script.path, "unsloth", SHORT_ON_GPU) is not False:
        kept["activation_offloading"] = False
    if "beta" in data:
        words = [one.arg for call in script.calls("DPOConfig", "DPOTrainer") for one in call.keywords]
        cut = said if "max_length" in words or None in words else 1024
        notes += [] if cut is said else ["no max_length is said: pairs are cut at 1024 tokens, as TRL does since 0.14"]
        return {**kept, **({"max_length": min(cut or loaded, loaded)} if isinstance(cut, int | None) else {})}
    if isinstance(said, int) and said != loaded:
        notes.append(f"unsloth cuts at the max_seq_length of its model, {loaded}, and not at max_length {said}")
    return {**kept, "max_length": min(own, loaded) if isinstance(own, int) and own > 0 else loaded}


PARTS = {
    "finetune_attention_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "finetune_mlp_modules": ("gate_proj", "up_proj", "down_proj"),
}
"""Switches of unsloth and the linear layers that they are for."""


def unsloth_targets(targets: Any, words: Mapping[str, Any]) -> Any:
    """Linear layers with adapters under the switches of unsloth's models with images.  [unsloth, models/vision.py]"""
    without = [layer for name, layers in PARTS.items() if words.get(name) is False for layer in layers]
    if not without or not (targets in (None, "all-linear") or isinstance(targets, list)):
        return targets
    every = targets if isinstance(targets, list) else [layer for layers in PARTS.values() for layer in layers]
    return [one for one in every if one not in without]


ADAPTS_EXPERTS = (2026, 7, 2)
"""Version of unsloth since which adapters on gate_proj, up_proj and down_proj are those of gpt-oss's experts in 4 bits too.
[models/_utils.py: get_moe_target_modules]"""
EXPERTS = (
    "adapters are priced on the experts of gpt-oss too, as unsloth makes them since 2026.7; before, gate_proj, up_proj and "
    "down_proj name none of them and memory comes out too high: --set lora_target_modules=q_proj,k_proj,v_proj,o_proj prices that"
)


def without_experts(script: Script, data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Linear layers of gpt-oss that have adapters where unsloth gave its experts none; adds a note where no version is known."""
    named, model = data.get("lora_target_modules"), str(data.get("model_name_or_path")).lower()
    if not isinstance(named, list) or data.get("load_in_4bit") not in (True, 1) or re.search("gpt[-_]?oss", model) is None:
        return {}
    rest = [one for one in named if one not in PARTS["finetune_mlp_modules"]]
    new = True if len(rest) == len(named) else newer(script.path, "unsloth", ADAPTS_EXPERTS)
    notes += [EXPERTS] if new is None and script.said.setting("lora_target_modules") is None else []
    return {"lora_target_modules": rest} if new is False else {}


SCORES = re.compile(r"(?m)^[^#\n]{0,200}\bUNSLOTH_(COMPILE_DISABLE|RETURN_LOGITS)[\"']?\]?\s*[=,:]\s*[\"']?1\b")
OWN_FORWARD = re.compile(
    r"llama(?!-?4|.*vision)|vicuna|(^|/)yi-|smollm-?2?-|zephyr|mistral(?!-(small-3\.[12]|large-3))|qwen-?(1\.5|2)(?!.*(vl|omni|audio|moe|57b))"
    r"|qwq|qwen-?3(?![.-]?(5|6|next|vl|omni))|gemma-?(1\.|2(?!7b)|7b)|granite-?3|r1-distill|openr1|skywork-or1|kimi-dev|falcon-?3-"
    r"|deepseek-(llm|coder(?!-v2)|math)"
)
"""Models whose step unsloth has written itself; for all others it rewrites that of transformers.  [models/loader.py]"""


def scores_of_unsloth(texts: Sequence[str], model: Any) -> list[str]:
    """Note about variables of unsloth that keep the scores of all tokens, which its loss takes in pieces: it then installs nothing
    that it has rewritten.  [unsloth_zoo/compiler.py: unsloth_compile_transformers, full_disable]"""
    said = {one[1] for text in texts for one in SCORES.finditer(text)}
    said -= {"COMPILE_DISABLE"} if OWN_FORWARD.search(bare(str(model))) else set()
    what = "keeps the scores of all tokens, which are priced in pieces: memory comes out too low by about 10 bytes for each of them"
    return [f"UNSLOTH_{name} {what}" for name in sorted(said)[-1:]]

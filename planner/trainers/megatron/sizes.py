"""The architecture that arguments of Megatron-LM describe."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec, load_model
from planner.model_names import preset_of
from planner.trainers.megatron.arguments import Arguments, unknown
from planner.trainers.megatron.around import defaults_around
from planner.trainers.reading.configuration import known_model, same_sizes
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.settings import beside
from planner.trainers.reading.shell import is_open, shown_text
from planner.trainers.reading.values import MOST, MOST_LAYERS, read_text, whole_number

SIZES = ("num_layers", "hidden_size", "num_attention_heads")
NAMED = (
    "hf_checkpoint",
    "tokenizer_model",
    "tokenizer_name_or_path",
    "pretrained_checkpoint",
    "load",
    "ref_load",
    "tokenizer_hf",
)
"""Arguments that hold the name of a model or of its tokenizer."""
TOKENIZERS = {
    "gpt2bpetokenizer": 50257, "bertwordpiecelowercase": 30522, "bertwordpiececase": 28996, "llama2tokenizer": 32000,
    "llamatokenizer": 32000, "llama3tokenizer": 128256, "mixtraltokenizer": 32000, "mistraltokenizer": 32000,
    "deepseekv2tokenizer": 102400, "deepseekv3tokenizer": 129280,
}  # fmt: skip
"""Rows of the vocabularies of tokenizers with one.  [megatron/training/tokenizer; Pai-Megatron-Patch, tokenizer]"""
USUAL_TOKENIZERS = re.compile(r"llama|gpt2|mistral|mixtral|deepseek|qwen|gemma|path|your")
"""Parts of the names of tokenizers whose types or models say the vocabulary, and of placeholders."""
OTHER_MODELS = (
    "hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model",
    "mamba_state_dim", "experimental_attention_variant", "linear_attention_type", "linear_attention_freq", "img_h", "img_w",
    "patch_dim", "vision_model_type", "language_model_type", "encoder_num_layers", "decoder_num_layers", "retro_workdir",
    "retro_project_dir", "retro_add_retriever", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
    "patch_size", "mrope_section", "disable_vision_class_token", "vision_ntokens", "use_lf_gate",
)  # fmt: skip
"""Arguments of architectures that these sizes do not describe."""
KNOWN_SPECS = re.compile(
    r"local\b|te\b|None\b|megatron\.core\.models\.gpt\.(gpt_layer|moe_module)_specs( \w*(local|engine|decoder|inference|moe)\w*)?$"
    r"|(mindspeed|mindspeed_llm|modellink)\.(?!.*(mamba|next|longcat|grok))"
)
"""Layers of --spec that the other arguments describe: Megatron's own and MindSpeed-LLM's."""
POSITIONS = ("learned_absolute", "rope", "mrope", "yarn", "none", "alibi", "rotary")
"""Of --position-embedding-type."""
NOTHING = (None, False, "0", "0.0", "null", "False", "false", "none", "None")
"""Values of an argument that say nothing."""
LAYERS = re.compile(
    r"(?!.*(log|rank|load|save|kernel|fusion|cache|loss|init|data|token|dropout)).*("
    r"(hidden|ffn|vocab|intermediate|embed\w*|latent|memory|state|bottleneck)_(size|width)|_dims?$|_per_layer_input|num_(loops|recurr\w*|memor\w*|streams)"
    r"|mamba|rwkv|retnet|hyena|moba|linear_att|sparse_att|hyper_connection|engram|ngram|(share|tie)d?_(layers|weights|params\w*)|cross_layer"
    r"|early_exit|mixture_of_depths|\bis_\w+_model\b).*"
)
"""Words of forks' own arguments that add weights to layers or build others."""
DUMPED_MODELS = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern", "experimental_attention_variant")
"""Those of them that a dump, which holds all arguments, has only then."""
PROGRAMS = re.compile(r".*(bert|t5|_ict|retro|vision|vlm|mimo|biencoder|multimodal|mamba|hybrid|tasks/main)")
"""Training programs of such architectures, by their paths."""
HYBRID = re.compile(r"mamba|hybrid")
"""Those of language models, which a preset may stand for."""


def is_other(program: str) -> bool:
    """Whether a program trains what is no language model, by its path."""
    return PROGRAMS.match(program) is not None and HYBRID.search(program) is None


_PADDED = 8 * 128
"""Rows that --make-vocab-size-divisible-by adds at most with tp 8."""
FAMILIES = re.compile(r".*(llama|mistral|qwen|baichuan|internlm|deepseek|gemma|bailing)[^/]*\.py")
"""Training programs of families whose layers are gated, which they build whatever the arguments say."""


def model_of(found: Arguments, given: Given, name: str = "") -> ModelSpec | None:
    """The preset with these sizes, or the sizes as they are; None (and a question) where they do not say it. What the user calls
    the model goes before. Raises PlannerError for architectures that are none of these."""
    said = given.spec()
    names = DUMPED_MODELS if found.dumped else OTHER_MODELS
    other = [one for one in names if found.get(one) not in NOTHING]
    other += [] if found.dumped else own_layers(found)
    plain = not any(found.get(one) for one in ("swiglu", "normalization"))
    built = (plain and _builds_a_family(found)) or _replaces_layers(found)
    if built and said is None and not (other or PROGRAMS.match(found.program)):
        about = f"{found.program} builds layers that its arguments do not tell; the nearest preset"
        found.questions.append(Question(name="--model NAME", about=about))
        return None
    if (other or PROGRAMS.match(found.program)) and said is None:
        why = f"{found.spelled(other[0]) if other else found.program} is an architecture that its sizes do not tell"
        if found.dumped or is_other(found.program):
            raise PlannerError(f"{found.where}: {why}; name the nearest preset with --model")
        found.questions.append(Question(name="--model NAME", about=f"{why}; the nearest preset"))
        return None
    if str(found.get("num_experts")) in ("0", "1", "['1']"):
        found.pop("num_experts")
    _ask_for_routing(found)
    missing = [one for one in SIZES if found.get(one) is None]
    if said is not None and (missing or other):
        return said
    if missing:
        called = next((preset for one in NAMED if (preset := _preset(found, one))), None)
        if called is not None and len(missing) == len(SIZES):
            found.notes.append(f"model: {called.name}, by the name of its weights or tokenizer")
            return called
        about = "without it there is no plan: " + ", ".join(found.spelled(one) for one in missing) + " is missing"
        found.questions += [] if found.settled(missing) else [Question(name="--model NAME", about=about)]
        return None
    for one in SIZES:
        found.number(one, least=1, most=MOST_LAYERS if one == "num_layers" else MOST)
    _ask_for_positions(found)
    rows = found.number("vocab_size") or found.number("padded_vocab_size") or found.number("pad_vocab_size_to")
    one_more = str(found.get("tokenizer_type")).lower() in ("nulltokenizer", "nullmultimodaltokenizer")
    model = _model(found, rows or 1)
    if said is not None:
        sizes = ("num_layers", "hidden_size", "num_heads", "ffn_size", "num_experts")
        differ = [one for one in sizes if getattr(said, one) != getattr(model, one)]
        if differ:
            differences = ", ".join(f"{one} {getattr(model, one)}, not {getattr(said, one)}" for one in differ)
            found.notes.append(f"--model {said.name} is another model than the file's: {differences}")
        elif rows > said.vocab_size + _PADDED:  # with rows of its own, more than padding adds
            found.notes.append(f"vocabulary: {rows}, of the file")
            found.rows = rows
        return said
    result = known_model(model, name) if rows else _with_vocabulary(found, model)
    if result is not None:
        _pad(found, result.vocab_size, one_more and bool(rows))
    return result


def _pad(found: Arguments, rows: int, one_more: bool) -> None:
    """Rows of a vocabulary, with the word that NullTokenizer adds and what they are padded by, where that is more than a hundredth;
    a note says less where the file says the multiple.  [megatron/training/tokenizer; arguments.py, make_vocab_size_divisible_by]"""
    if found.get("padded_vocab_size") or found.get("pad_vocab_size_to") or found.dumped:
        return
    unit = found.number("make_vocab_size_divisible_by", 128) * found.number("tensor_model_parallel_size", 1)
    padded, what = -(-(rows + one_more) // unit) * unit, f"{rows}{' and one word of NullTokenizer' * one_more}"
    if padded > 1.01 * rows:
        found.rows = padded
        found.notes.append(f"vocabulary: {padded}, {what}, padded to a multiple of {unit}")
    elif one_more or (padded != rows and "make_vocab_size_divisible_by" in found):
        found.notes.append(f"vocabulary: {rows} priced; {'NullTokenizer has one word more, ' * one_more}padded to {padded}")


def own_layers(found: Arguments) -> list[str]:
    """Arguments that no list has and that say layers of a fork's own by their words."""
    spec = found.get("spec")
    named = " ".join(map(str, spec)) if isinstance(spec, list) else str(spec or "")
    own = ["spec"] if named and not KNOWN_SPECS.match(named) else []
    return own + [
        one for one, value in unknown(found).items()
        if LAYERS.fullmatch(one) and value not in NOTHING and one not in OTHER_MODELS
    ]  # fmt: skip


def _builds_a_family(found: Arguments) -> bool:
    """Whether a program is of a family by its name, or by the model that it imports from the Megatron around it."""
    if FAMILIES.match(found.program.lower()):
        return True
    models = re.findall(r"^from megatron[\w.]* import ([\w, ]*Model\w*)", _program_text(found), re.MULTILINE)
    return any(FAMILIES.match(f"{one}.py") for line in models for one in re.findall(r"\w+", line.lower()))


def _program_text(found: Arguments) -> str:
    """The program that a script starts, where it lies in the same repository; else ''."""
    file = beside(Path(found.where), found.program.rpartition("/")[2], (".py",)) if found.program.endswith(".py") else None
    return read_text(file) if file is not None else ""


def _replaces_layers(found: Arguments) -> bool:
    """Whether the program puts modules of its own into the layers that Megatron builds."""
    text = _program_text(found)
    put = re.findall(r"\.(?:self_attention|core_attention|mlp)\s*=\s*ModuleSpec\(\s*module=(\w+)", text)
    put += re.findall(r"\b(?:self_attention|core_attention|mlp)=ModuleSpec\(\s*module=(\w+)", text)
    theirs = re.findall(r"^[ \t]*from (?:megatron\.core|transformer_engine)[\w.]* import (\([^)]*\)|.*)", text, re.MULTILINE)
    return any(not re.search(rf"\b{one}\b", "\n".join(theirs)) for one in put)


def _ask_for_routing(found: Arguments) -> None:
    """Experts per token of a Megatron that has no argument for them yet: its own code says how many."""
    if found.dumped or not found.get("num_experts") or found.get("moe_router_topk") is not None:
        return
    there = defaults_around(found.where)
    if there and "moe_router_topk" not in there:
        about = "experts per token: the Megatron around it has no such argument"
        found.questions.append(Question(name="moe_router_topk", about=about, choices=("1", "2")))


def _ask_for_positions(found: Arguments) -> None:
    """Which positions a plan shall have where those of the file are none that it knows."""
    kind = found.get("position_embedding_type")
    if kind is not None and not is_open(str(kind)) and str(kind) not in POSITIONS:
        about = f"{shown(kind)} is not known here; the nearest"
        found.questions.append(Question(name="position_embedding_type", about=about, choices=("rope", "learned_absolute", "none")))


def rows_will_be_asked(found: Arguments, unread: bool) -> bool:
    """Whether nothing says the rows of the vocabulary where sizes are open or the model is ``unread``: neither an argument nor a
    tokenizer or model by its name, so that one sentence asks for both."""
    rows = any(found.get(one) for one in ("vocab_size", "padded_vocab_size", "pad_vocab_size_to"))
    known = any(str(found.get(one, "")).lower() in TOKENIZERS for one in ("patch_tokenizer_type", "tokenizer_type"))
    gpt2 = found.get("tokenizer_type") is None and found.get("merge_file")
    waits = unread or any(found.get(one) is not None and not str(found.get(one)).isdigit() for one in SIZES)
    return waits and not (rows or known or gpt2 or any(_preset(found, one) for one in NAMED))


def _preset(found: Arguments, name: str) -> ModelSpec | None:
    text = found.get(name)
    parts = [one for one in shown_text(text).rstrip("/").split("/") if one] if isinstance(text, str) else []
    preset = next(
        (preset for part in reversed(parts[-3:]) if (preset := preset_of(part.removesuffix("_torch_dist")))), None
    )
    return load_model(preset) if preset else None


def _with_vocabulary(found: Arguments, model: ModelSpec) -> ModelSpec | None:
    """The model with the vocabulary of the preset of the same sizes, of the tokenizer, or with a question."""
    named = [preset for one in NAMED if (preset := _preset(found, one))]
    alike = same_sizes(model)
    for one in named if found.get("use_checkpoint_args") else []:  # whose groups and experts are those of the checkpoint
        if all(getattr(one, size) == getattr(model, size) for size in ("num_layers", "hidden_size", "num_heads", "ffn_size")):
            found.notes.append(f"model: {one.name}, by the name of its checkpoint, whose arguments it takes")
            return one
    for one in named:
        if one in alike or one.name in [preset.name for preset in alike]:
            found.notes.append(f"vocabulary: {one.vocab_size}, of {one.name}, which has these sizes")
            return one
    if not named and (own := _own_tokenizer(found)):
        _ask_for_rows(found, f"--vocab-size is not given, and {own} is a tokenizer that is not read", ())
        return None
    kinds = [str(found.get(one, "")).lower() for one in ("patch_tokenizer_type", "tokenizer_type")]
    rows = next((TOKENIZERS[one] for one in kinds if one in TOKENIZERS), 0)
    if alike and not named and rows and rows not in [one.vocab_size for one in alike]:
        if "llama2tokenizer" in kinds:
            why = f"Llama's own tokenizer has {rows}, {alike[0].name}, which has these sizes, has {alike[0].vocab_size}"
            _ask_for_rows(found, why, alike, (str(rows),))
            return None
        alike = []
    usual = TOKENIZERS["gpt2bpetokenizer"]
    if alike and not (named or rows) and found.get("tokenizer_type") and {one.vocab_size for one in alike} == {usual}:
        why = f"{found['tokenizer_type']} is not GPT-2's, whose {usual} {alike[0].name}, which has these sizes, has"
        _ask_for_rows(found, why, alike)
        return None
    if alike and len({one.vocab_size for one in alike}) == 1:
        best = known_model(dataclasses.replace(model, vocab_size=alike[0].vocab_size))
        found.notes.append(f"vocabulary: {best.vocab_size}, of {best.name}, which has these sizes")
        return best
    if rows and "patch_tokenizer_type" in found and str(found.get("tokenizer_type", "")).lower() not in TOKENIZERS:
        why = f"{found.get('patch_tokenizer_type')} reads the tokenizer of the weights that it loads"
        _ask_for_rows(found, why, alike, (str(rows),))
        return None
    if not rows and named:
        rows = named[0].vocab_size
        found.notes.append(f"vocabulary: {rows}, the embedding rows of {named[0].name}; its tokenizer may have fewer")
        return known_model(dataclasses.replace(model, vocab_size=rows))
    if not rows and found.get("tokenizer_type") is None and found.get("merge_file"):  # what pretrain_gpt.py takes by default
        rows = TOKENIZERS["gpt2bpetokenizer"]
    bytes_of = found.get("vocab_file", "") if "gpt2" in str(found.get("tokenizer_type", "gpt2")).lower() else ""
    if not rows and "gpt2" in f"{bytes_of} {found.get('tokenizer_model', '')}".lower():
        rows = TOKENIZERS["gpt2bpetokenizer"]
    if rows:
        found.notes.append(f"vocabulary: {rows}, of its tokenizer")
        return known_model(dataclasses.replace(model, vocab_size=rows))
    why = "neither --vocab-size nor --padded-vocab-size is given, and the tokenizer is not read"
    _ask_for_rows(found, why, alike)
    return None


def _ask_for_rows(found: Arguments, why: str, alike: Sequence[ModelSpec], more: tuple[str, ...] = ()) -> None:
    choices = tuple(dict.fromkeys((*more, *(str(one.vocab_size) for one in alike))))
    about = f"rows of the vocabulary: {why}"
    found.questions.append(Question(name="vocab_size", about=about, choices=choices if len(choices) > 1 else ()))


def _own_tokenizer(found: Arguments) -> str:
    """A tokenizer with a name of its own, which a type for any SentencePiece or Hugging Face tokenizer (Llama2Tokenizer too) says
    nothing of; empty for files that are called tokenizer.model everywhere, and for paths that are not known."""
    for one in ("tokenizer_model", "tokenizer_name_or_path", "tokenizer_hf"):
        text = found.get(one)
        if not isinstance(text, str) or is_open(text.rpartition("/")[2]):
            continue
        name = re.sub(r"\.(model|json|vocab|txt|tiktoken)$", "", text.rstrip("/").rpartition("/")[2])
        on_the_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not text.endswith((".model", ".json"))
        if re.search(r"(^|[_-])\d{2,3}k([_-]|$)|(merge|extend|expand)", f"{text}".lower()) and not on_the_hub:
            return shown(name)
        if (on_the_hub or re.search(r"\d", name)) and not USUAL_TOKENIZERS.search(f"{text}".lower()):
            return shown(text.rpartition("/")[2] if not on_the_hub else text)
    file = shown_text(str(found.get("vocab_file", "")))  # of a type for any byte-pair encoding
    own = re.search(r"tokeni[sz]er|bpe|\d{4,6}|(^|[/_-])\d{2,3}k[/_.-]|-(tiny|mini|small|base|medium|large|xl)/", file.lower())
    if own and not re.search(r"gpt-?2|path|your", file.lower()):
        return shown("/".join(file.split("/")[-2:]))
    return ""


def _model(found: Arguments, rows: int) -> ModelSpec:
    heads, hidden = found.number("num_attention_heads"), found.number("hidden_size")
    mla, experts = bool(found.get("multi_latent_attention")), found.number("num_experts")
    layers, gated = found.number("num_layers"), bool(found.get("swiglu") or found.get("quick_geglu"))
    bias = not (found.get("disable_bias_linear") or found.get("add_bias_linear") is False)
    groups = found.number("num_query_groups", 1) if found.get("group_query_attention") else heads
    groups = found.number("num_key_value_heads", groups)
    position = str(found.get("position_embedding_type", "rope" if _rotary(found) else "learned_absolute"))
    clamped = found.get("activation_func_clamp_value") is not None
    reach = found.number("max_position_embeddings", found.number("seq_length"))
    width = found.number("ffn_hidden_size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    shared = found.number("moe_shared_expert_intermediate_size")
    dense, interval = _moe_layers(found, layers) if experts else (0, 1)
    window, windowed = _window(found, layers)
    values: dict[str, Any] = {
        "name": "imported", "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
        "num_kv_heads": heads if mla else groups, "head_dim": found.number("kv_channels", hidden // heads),
        "ffn_size": width, "vocab_size": rows, "max_sequence_length": reach, "gated": gated,
        "activation": "silu" if found.get("swiglu") or clamped else "relu2" if found.get("squared_relu") else "gelu",
        "tied_embeddings": not found.get("untie_embeddings_and_output_weights"),
        "position": {"learned_absolute": "learned", "none": "none", "alibi": "alibi"}.get(position, "rope"),
        "num_position_embeddings": reach if position == "learned_absolute" else 0,
        "norm": "rmsnorm" if str(found.get("normalization")).lower() == "rmsnorm" else "layernorm", "linear_bias": bias,
        "embedding_norm": bool(found.get("embed_layernorm")),
        "qkv_bias": bool(found.get("add_qkv_bias")) and not bias, "qk_norm": bool(found.get("qk_layernorm")) and not mla,
        "attention_gate": bool(found.get("attention_output_gate")) and not mla,
        "num_experts": experts, "top_k": found.number("moe_router_topk", 2) if experts else 0,
        "expert_ffn_size": found.number("moe_ffn_hidden_size", width) if experts else 0,
        "num_shared_experts": int(bool(shared)), "shared_expert_ffn_size": shared if experts else 0,
        "num_dense_layers": dense, "moe_layer_interval": interval, "expert_bias": bool(experts) and bias,
        "router_bias": bool(experts) and bias and not found.dense_masks, "window": window, "num_windowed_layers": windowed,
        "mtp_layers": found.number("mtp_num_layers"), "clamped_activation": clamped,
        "scaled_rope": position == "yarn" and not mla, "attention_sinks": found.get("softmax_type") == "learnable",
    }  # fmt: skip
    if mla:
        nope, rope = found.number("qk_head_dim", 128), found.number("qk_pos_emb_head_dim", 64)
        values |= {
            "q_lora_rank": found.number("q_lora_rank"), "kv_lora_rank": found.number("kv_lora_rank", 32),
            "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": found.number("v_head_dim", 128),
            "head_dim": nope + rope,
        }  # fmt: skip
    try:
        return ModelSpec(**values)
    except PlannerError as error:
        raise PlannerError(f"{found.where}: {error}") from error


def _rotary(found: Arguments) -> bool:
    """Rotary embeddings by the flags of older versions."""
    return bool(found.get("use_rotary_position_embeddings") or found.get("use_llama2_rotary_position_embeddings"))


def _pattern(found: Arguments, name: str) -> list[int]:
    """A number, or a pattern such as ([0]*3+[1]*58), evaluated without running code; a dump prints a list."""
    given = found.get(name, "1")
    text = re.sub(r"\s", "", f"[{','.join(given)}]" if isinstance(given, list) else str(given))

    def repeat(one: re.Match[str]) -> str:
        return ",".join([one.group(1)] * int(one.group(2) or 1))

    while len(text) <= 8 * MOST_LAYERS:
        text, before = re.sub(r"[\[(]([\d,+]+)[\])](?:\*(\d{1,4})(?!\d))?", repeat, text, count=1), text
        if text == before:
            break
    if not re.fullmatch(r"\d{1,8}([,+]\d{1,8})*", text) or len(text) > 8 * MOST_LAYERS:
        raise PlannerError(f"{found.where}: {name} is {shown(given)}; only lists of 0 and 1, * and + are understood")
    return [int(flag) for flag in re.split("[,+]", text)]


def _moe_layers(found: Arguments, layers: int) -> tuple[int, int]:
    """(leading dense layers, every n-th layer has experts)."""
    flags = _pattern(found, "moe_layer_freq")
    if len(flags) == 1 and flags[0]:
        return 0, flags[0]
    dense = flags.index(1) if 1 in flags else len(flags)
    for interval in range(1, dense + 2):
        first = dense - interval + 1
        if flags == [int(i >= first and (i - first) % interval == interval - 1) for i in range(layers)]:
            return first, interval
    given = shown(found["moe_layer_freq"])
    raise PlannerError(
        f"{found.where}: moe_layer_freq is {given}; a plan knows leading dense layers and every n-th layer"
    )


def _window(found: Arguments, layers: int) -> tuple[int, int]:
    """(tokens with the own one, which the flag does not count, layers that have it)."""
    given = found.get("window_size")
    if given in (None, True):
        return 0, 0
    first = re.match(r"\W*(\d{1,15})\b(?!\.)", ",".join(given) if isinstance(given, list) else str(given))
    size = whole_number(int(first.group(1)) if first else given, f"{found.where}: window_size", least=0) + 1
    if found.get("window_attn_skip_freq") is None:
        return size, layers
    flags = _pattern(found, "window_attn_skip_freq")
    if len(flags) == 1 and flags[0]:
        return size, sum((layer + 1) % flags[0] != 0 for layer in range(layers))
    return size, sum(flags)

"""Models of OLMo-core by the factories of its TransformerConfig.  [ai2-olmo-core 2.5 and 3.0: nn/transformer/config.py]"""

import ast
import re
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import PlannerError
from planner.model import ModelSpec, load_model
from planner.model_names import preset_of
from planner.trainers.olmo_core.own_sizes import NUMBERS, differs, own_factory
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.configuration import known_model
from planner.trainers.reading.python_text import entry, last_name
from planner.trainers.reading.shell.text import is_open

OWNER = "TransformerConfig"
MOST_CALLS = 50
"""Calls that are looked into for the factory that they are of."""
_REORDERED = {"qk_norm": True, "block_name": "reordered_norm"}


def _sizes(d_model: int, n_layers: int, n_heads: int, factor: float | None = None, **more: Any) -> dict[str, Any]:
    return {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "hidden_size_multiplier": factor, **more}


LLAMA = {
    "llama2_271M": _sizes(1024, 16, 8), "llama2_1B": _sizes(2048, 18, 16), "llama2_7B": _sizes(4096, 32, 32),
    "llama2_13B": _sizes(5120, 40, 40), "llama2_26B": _sizes(5120, 80, 40),
    "llama2_70B": _sizes(8192, 80, 64, 1.3, n_kv_heads=8, hidden_size_multiple_of=4096),
    "llama3_1B": _sizes(2048, 16, 32, 1.5, n_kv_heads=8),
    "llama3_8B": _sizes(4096, 32, 32, 1.3, n_kv_heads=8, hidden_size_multiple_of=1024),
    "llama3_70B": _sizes(8196, 80, 64, 1.3, n_kv_heads=8, hidden_size_multiple_of=4096),
    "llama3_405B": _sizes(16384, 126, 128, 1.2, n_kv_heads=8, hidden_size_multiple_of=4096),
}  # fmt: skip
OLMO = {
    "1M": _sizes(12, 4, 4, 1.0, head_dim=4), "14M": _sizes(128, 4, 8), "30M": _sizes(256, 4, 8), "60M": _sizes(384, 8, 8, 1.5),
    "100M": _sizes(512, 12, 8, 1.5),
    "190M": _sizes(768, 12, 12, 1.5), "370M": _sizes(1024, 16, 16, 1.5), "600M": _sizes(1344, 16, 16, 1.5),
    "760M": _sizes(1536, 16, 16, 1.5), "1B_v2": _sizes(2048, 16, 16, 1.5), "3B": _sizes(3328, 16, 16, 1.5),
    "7B": _sizes(4096, 32, 32), "13B": _sizes(5120, 40, 40),
    "32B": _sizes(5120, 64, 40, 27648 / (8 * 5120 / 3), n_kv_heads=8, hidden_size_multiple_of=512),
}  # fmt: skip
WINDOWS = (False, True, [4096, 4096, 4096, -1])
"""Sliding windows of OLMo 3: on the first layer all, on the last all, and their pattern."""
FACTORIES: dict[str, dict[str, Any]] = {
    "llama_like": {}, "llama_like_moe": {"moe": True}, **LLAMA,
    **{f"olmo2_{size}": {**_REORDERED, **one} for size, one in OLMO.items()},
    "olmo2_1B": {**_REORDERED, **_sizes(2048, 18, 16, 1.5)},
    **{f"olmo3_{size}": {**_REORDERED, **one, "sliding_window": WINDOWS} for size, one in OLMO.items() if size != "1B_v2"},
    "olmo3_600M": {**_REORDERED, **OLMO["600M"], "d_model": 1280, "sliding_window": WINDOWS},
    "olmo3_1B": {**_REORDERED, **OLMO["1B_v2"], "sliding_window": WINDOWS},
    "smallmoe": {**_REORDERED, **_sizes(768, 12, 12), "moe": True, "num_experts": 32, "top_k": 4, "expert_hidden_size": 384,
                 "shared_expert_hidden_size": 1536},
}  # fmt: skip
QUIET = re.compile(
    r"layer_norm_\w+|rope_\w+|fused_ops|use_flash|attn_backend|flash_\w+|init_\w+|\w+_weight|lb_loss\w*|z_loss\w*|dropless|capacity_factor|name"
    r"|no_global_rope|embed_scale|dtype|vocab_size|loss_implementation|backend|scaling"
)
"""Keywords that change no size."""
TOKENS = {"dolma2": 100278, "dolma2_sigdig": 100278, "gpt_neox_olmo_dolma_v1_5": 50280, "gpt2": 50257}
"""Tokens of the tokenizers that TokenizerConfig has.  [data/tokenizer.py]"""
SIZES = re.compile(
    r"(^|\.)(block|block_pattern|block_overrides|d_model|n_layers|n_heads|n_kv_heads|head_dim|sequence_mixer|attention|feed_forward"
    r"|feed_forward_moe|sliding_window|tie_word_embeddings)(\.|$)"
)
"""Attributes that make another model of one that is built."""


@dataclass
class Model:
    """What a script says of its model."""

    spec: ModelSpec | None
    about: str = ""
    """Why there is none."""
    vocab_size: int | None = None
    """Rows of its tables; None = not said."""
    half: bool = False
    """Its weights are bf16."""
    notes: tuple[str, ...] = ()


def model_of(script: Parts) -> Model:
    """The model that the one factory of TransformerConfig makes."""
    owned = [one for one in script.every_call() if isinstance(one.func, ast.Attribute) and last_name(one.func.value) == OWNER]
    made = [(last_name(one.func), one) for one in owned if last_name(one.func) not in ("from_dict", "from_json")]
    made = made or _looked_up(script)
    names = list(dict.fromkeys(name for name, _ in made))
    if len(made) != 1:
        about = f"{', '.join(names)[:80]} are called" if names else "no factory of TransformerConfig is called here"
        return Model(None, about, half=any(_said(script, one).get("dtype") == "bfloat16" for _, one in made))
    [(name, call)] = made
    said = _said(script, call)
    rows = _rows(script, call, said)
    half = said.get("dtype") == "bfloat16"
    if others := _others(script, call):
        return Model(None, f"{name} and {', '.join(others)[:80]} are called", rows, half)
    sizes, notes = _factory(script, name)
    spec, about = _spec(script, name, sizes, said, rows)
    places = [one for one in script.changed() if SIZES.search(one) and not QUIET.fullmatch(one.rpartition(".")[2])]
    if spec is not None and not spec.num_windowed_layers:  # None takes nothing from it
        places = [one for one in places if not (one.endswith("sliding_window") and one in script.cleared())]
    if places:
        return Model(None, f"{name} is changed after it is made: {places[0][:80]}", rows, half)
    return Model(spec, about, rows, half, notes if spec is not None else ())


def _preset(name: str) -> str | None:
    return preset_of(re.sub(r"_(\d+)_(\d+B)$", r"-\1.\2", name)) or preset_of(name)


def _factory(script: Parts, name: str) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """(What a factory calls llama_like with, note): that of the olmo_core around the script where it is another one, or none of
    OLMo-core's; {} = it is not known; None = the one around calls it in a way that is not read."""
    own, known = own_factory(script.path, name), FACTORIES.get(name, {})
    if not known and _preset(name):
        return {}, ()
    if not own or (known and not differs(own, known)):
        return (None if own is None else known), ()
    kept = {one: value for one, value in known.items() if one not in NUMBERS}
    sizes = {one: own[one] for one in NUMBERS if own.get(one) is not None}
    said = ", ".join(f"{one} {sizes[one]:.4g}" for one in NUMBERS if isinstance(sizes.get(one), int | float))
    return {**kept, **sizes} if known else own, (f"{name} is as the olmo_core around the script has it: {said}",)


def _looked_up(script: Parts) -> list[tuple[str, ast.Call]]:
    """Factories that are called by what getattr(TransformerConfig, name) gives."""
    found: list[tuple[str, ast.Call]] = []
    named = [one for one in script.every_call() if any(word.arg == "vocab_size" for word in one.keywords)]
    for call in named[:MOST_CALLS]:
        made = script.made(call.func)
        if isinstance(made, ast.Subscript) and isinstance(table := script.made(made.value), ast.Dict):
            chosen = entry(table, script.value(made.slice))
            if isinstance(chosen, ast.Attribute) and last_name(chosen.value) == OWNER:
                found.append((chosen.attr, call))
        looked_up = isinstance(made, ast.Call) and last_name(made.func) == "getattr" and len(made.args) > 1
        if isinstance(made, ast.Call) and looked_up and last_name(made.args[0]) == OWNER:
            name = script.value(made.args[1])
            found.append((name if isinstance(name, str) and not is_open(name) else "one that is looked up", call))
    return found


def _others(script: Parts, made: ast.Call) -> list[str]:
    """Functions that are called with a vocab_size as well, and may make the model that is trained."""
    classes = [one for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef)]
    data = {one.name for one in classes if any(OF_DATA.fullmatch(last_name(base)) for base in one.bases)}
    every = [one for one in script.every_call() if one is not made and not _of_tokenizer(one)
             and not OF_DATA.fullmatch(last_name(one.func)) and last_name(one.func) not in data]  # fmt: skip
    return [last_name(one.func) for one in every if any(word.arg == "vocab_size" for word in one.keywords)]


OF_DATA = re.compile(r"__init__|\w*(Dataset|DataLoader|Collator|Tokenizer)\w*")
"""Calls that take a vocab_size as well and make no model: of data, and of the class above one's own."""


def _of_tokenizer(call: ast.Call) -> bool:
    return "TokenizerConfig" in (last_name(call.func), last_name(getattr(call.func, "value", call)))


def _said(script: Parts, call: ast.Call) -> dict[str, Any]:
    """Keywords of a factory; members of enumerations by their last name, parts as the calls that make them."""
    found: dict[str, Any] = {}
    for one in call.keywords:
        node = script.made(one.value)
        name = one.arg or "**"
        if isinstance(node, ast.Call) and name in ("feed_forward", "sliding_window"):
            found[name] = node
        elif isinstance(node, ast.Attribute) and last_name(node.value).endswith(("Type", "DType", "Name")):
            found[name] = node.attr
        else:
            found[name] = script.value(one.value)
    return found


def _rows(script: Parts, call: ast.Call, said: dict[str, Any]) -> int | None:
    """Rows of the tables: a number, or the tokens of a tokenizer that is known, padded where it says so."""
    answer = script.said.setting("vocab_size")
    if answer and re.fullmatch(r"\d{1,9}", answer):
        return int(answer)
    value = said.get("vocab_size", script.value(call.args[0]) if call.args else None)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    node = next((one.value for one in call.keywords if one.arg == "vocab_size"), next(iter(call.args), None))
    made = [one for one in script.every_call() if _of_tokenizer(one)]
    kinds = list(dict.fromkeys(last_name(one.func) for one in made)) or ["dolma2"]  # of internal/experiment.py
    tokens = TOKENS.get(kinds[0]) if len(kinds) == 1 else None
    if kinds == ["from_hf"] and len(made) == 1:
        name = script.value(made[0].args[0] if made[0].args else next(iter(made[0].keywords), ast.keyword(value=made[0])).value)
        preset = preset_of(name) if isinstance(name, str) else None
        tokens = load_model(preset).vocab_size if preset else TOKENS["dolma2"] if str(name).startswith("allenai/dolma2") else None
    elif kinds == ["TokenizerConfig"] and len(made) == 1:
        said_so = script.keywords(made[0]).get("vocab_size")
        tokens = said_so if isinstance(said_so, int) else None
    node = script.made(node)
    if isinstance(node, ast.Call) and last_name(node.func) == "padded_vocab_size" and tokens:
        each = [script.value(one) for one in (*node.args, *(word.value for word in node.keywords))] or [128]
        return -(-tokens // each[0]) * each[0] if isinstance(each[0], int) and each[0] > 0 else None
    return tokens if isinstance(node, ast.Attribute) and node.attr == "vocab_size" else None


def _spec(
    script: Parts, name: str, sizes: dict[str, Any] | None, said: dict[str, Any], rows: int | None
) -> tuple[ModelSpec | None, str]:
    """The model of a factory with what it is called with; None, with the reason, for one that the planner cannot say."""
    if sizes is None:
        return None, f"{name} of the olmo_core around it is one of its own"
    if not sizes and name not in FACTORIES:
        preset = _preset(name)
        if preset is None or (more := [one for one in said if not QUIET.fullmatch(one)]):
            return None, f"{name} is no preset" if preset is None else f"{name} with {', '.join(more)[:80]}"
        return replace(load_model(preset), vocab_size=rows or load_model(preset).vocab_size), ""
    all_of_it: dict[str, Any] = {**sizes, **said}
    try:
        return _built(script, name, all_of_it, rows)
    except (PlannerError, TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError):
        return None, f"{name} with sizes that are not read"


def _built(script: Parts, name: str, said: dict[str, Any], rows: int | None) -> tuple[ModelSpec | None, str]:
    used = {
        "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_size_multiplier", "hidden_size_multiple_of", "qk_norm",
        "use_head_qk_norm", "block_name", "reordered_norm", "feed_forward", "sliding_window", "tie_word_embeddings", "moe",
        "num_experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size",
    }  # fmt: skip
    more = [one for one, value in said.items() if one not in used and value not in (None, False) and not QUIET.fullmatch(one)]
    block = said.get("block_name") or "default"
    if more or block not in ("default", "reordered_norm", "default_scaled"):
        return None, f"{name} with {', '.join(more)[:80] or block}"
    layers, heads, width = _number(said["n_layers"]), _number(said["n_heads"]), _number(said["d_model"])
    multiple, factor = _number(said.get("hidden_size_multiple_of", 256)), said.get("hidden_size_multiplier")
    ffn = int(8 * width / 3) if factor is None else int(float(factor) * int(8 * width / 3))
    ffn = -(-ffn // multiple) * multiple
    if (inner := said.get("feed_forward")) is not None:
        words = script.keywords(inner)
        if words.get("bias") is not False or words.keys() - {"hidden_size", "bias", "dtype"}:
            return None, f"{name} with a feed_forward of its own"
        ffn = _number(words["hidden_size"])
    reordered = block == "reordered_norm" or said.get("reordered_norm") is True
    norm = said.get("qk_norm", said.get("reordered_norm") is True and bool(said.get("moe"))) is True
    windows = _windows(script, said.get("sliding_window"), layers)
    experts: dict[str, Any] = {}
    if said.get("moe"):
        shared = said.get("shared_expert_hidden_size")
        experts = {"num_experts": _number(said["num_experts"]), "top_k": _number(said["top_k"]),
                   "expert_ffn_size": _number(said["expert_hidden_size"]),
                   "num_shared_experts": int(shared is not None),
                   "shared_expert_ffn_size": _number(shared) if shared is not None else 0}  # fmt: skip
        ffn = experts["expert_ffn_size"]
    found = ModelSpec(
        name=name, num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=_number(said.get("n_kv_heads") or heads),
        head_dim=_number(said.get("head_dim") or width // heads), ffn_size=ffn, vocab_size=rows or 1, qk_norm=norm,
        qk_norm_spans="heads" if norm and said.get("use_head_qk_norm") is not True else "head", max_sequence_length=1 << 20,
        tied_embeddings=said.get("tie_word_embeddings") is True, variant=("olmo3" if windows else "olmo2") if reordered else "",
        **windows, **experts,
    )  # fmt: skip
    found = replace(found, max_sequence_length=131072) if said.get("rope_scaling") is not None else found
    known = known_model(found)
    return (known_model(found, preset_of(name) or "") if known is not found else found), ""


def _windows(script: Parts, said: Any, layers: int) -> dict[str, Any]:
    """Layers of a sliding window, by OLMo-core's pattern.  [nn/attention, SlidingWindowAttentionConfig]"""
    if said is None:
        return {}
    if isinstance(said, ast.Call):
        words = script.keywords(said)
        said = (*(words.get(f"force_full_attention_on_{end}_layer", True) for end in ("first", "last")), words["pattern"])
    first, last, pattern = said
    if not (isinstance(first, bool) and isinstance(last, bool)) or not all(isinstance(one, int) for one in pattern):
        raise ValueError
    kept = [pattern[(i - first) % len(pattern)] for i in range(layers) if not (first and i == 0) and not (last and i == layers - 1)]
    sizes = {one for one in kept if one != -1}
    if len(sizes) > 1:
        raise ValueError
    return {"window": sizes.pop(), "num_windowed_layers": sum(one != -1 for one in kept)} if sizes else {}


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**9:
        raise ValueError
    return value

"""What the copy of torchtitan around a configuration says of its models: flavours of Llama of its own, and losses of its own."""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.model import ModelSpec, from_hugging_face, load_model
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.python_text import tree_or_none
from planner.trainers.reading.settings import beside
from planner.trainers.reading.shell import options, words_of
from planner.trainers.reading.shell.arithmetic import arithmetic
from planner.trainers.reading.values import read_text
from planner.trainers.torchtitan.flavors import model_named
from planner.units import GIB

VOCABULARIES = {"llama3": 128256, "llama2": 32000, "qwen3": 151936}
"""Of the families whose flavours are read, by their tokenizers."""
SIZES = {"dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "vocab_size"}
OF_QWEN = {"head_dim": 128, "hidden_dim": 3072, "qk_norm": True, "enable_weight_tying": False, "n_kv_heads": 8}
"""Further words of Qwen3ModelArgs, and their defaults.  [models/qwen3/model/args.py]"""
LATENT = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "q_lora_rank",
          "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"}  # fmt: skip
OF_LATENT = LATENT | {"attention_bias", "dtype"}
"""Words of dense layers with latent attention, as a config.json of DeepSeek has them."""
NO_SIZES = {"rope_theta", "norm_eps", "max_seq_len", "depth_init", "use_flex_attn", "attn_mask_type", "norm_type", "eos_id",
            "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_scaling", "attention_dropout"}  # fmt: skip
"""Words of TransformerModelArgs that are no sizes."""


def own_model(path: Path, name: str, flavor: str, known: str = "", assets: Sequence[object] = ()) -> tuple[ModelSpec | None, str]:
    """(The model, what was taken for what) of a family and flavour that is no preset's, or has other sizes than the preset that is
    ``known``, by the registry around the configuration; None = it is not there, or its words are not all known. ``assets``: what
    may hold its tokenizer.  [models/llama3/__init__.py, model/args.py, FeedForward]"""
    family = name in VOCABULARIES and "debug" not in flavor  # whose tokenizer is a small one
    folders = (name, "llama") if family else (name,) if re.fullmatch(r"\w{1,60}", name) else ()
    for file in filter(None, (beside(path, f"torchtitan/models/{one}/__init__.py", (".py",)) for one in folders)):
        words = _words(file, name, flavor)
        whole = [words.get(one) for one in ("dim", "n_layers", "n_heads")]
        left, texts = _left_to_tokenizer(file)
        rows, counted = next((one for one in (_entries(path, str(each)) for each in assets if each and left) if one[0]), (0, ""))
        dense = rows and words.keys() >= LATENT and "expert" not in texts
        if dense or (family and all(isinstance(one, int) and one > 0 for one in whole)):
            spec, where = _spec(words, name, str(file), rows), "/".join(file.parts[-3:])
            if known and _sizes(spec) == _sizes(load_model(known)):
                return None, ""
            other = f", which are not those of {known}" * bool(known)
            by = f", by {counted}" * (rows == spec.vocab_size)
            return spec, f"{name} {flavor}: layers of {where} around it{other}, with a vocabulary of {spec.vocab_size}{by}"
    return None, ""


def _left_to_tokenizer(file: Path) -> tuple[bool, str]:
    """(Whether a family's model has as many rows as the tokenizer has entries, the text of its modules), by its __init__.py."""
    texts = "\n".join(map(read_text, sorted(file.parent.glob("**/*.py"))[:20]))
    program = read_text(one) if (one := file.parents[2] / "train.py").is_file() else ""
    return re.search(r"vocab_size\s*=\s*(\w+\.)*tokenizer\.", texts + program) is not None, texts


def _entries(path: Path, name: str) -> tuple[int, str]:
    """(Entries of a tokenizer's file that is there, the file): ranks of tiktoken and torchtitan's 256 words beside them, or those
    of tokenizer.json.  [datasets/tokenizer/tiktoken.py]"""
    file = beside(path, name, (".model", ".json")) or beside(path, f"{name.rstrip('/')}/tokenizer.json", (".json",))
    try:
        text = read_text(file) if file is not None else ""
        if file is not None and file.suffix == ".json":
            data = json.loads(text)
            return len({*data["model"]["vocab"], *(one["content"] for one in data.get("added_tokens", ()))}), file.name
    except (PlannerError, ValueError, KeyError, TypeError):
        return 0, ""  # of sentencepiece, or another file
    ranks = len(re.findall(r"(?m)^[A-Za-z0-9+/]+=* \d+$", text))
    return (ranks + 256, file.name) if file is not None and ranks else (0, "")


def _sizes(spec: ModelSpec) -> tuple[int, ...]:
    return spec.vocab_size, spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.ffn_size


def of_upstream(words: list[str], module: str, config: str, given: Given) -> dict[str, Any]:
    """What a function of torchtitan's own registry decides, which is not there: asked where no flag says it."""
    flags = {name.replace("-", "_") for name, _, _ in options(words_of(words))} | given.settings.keys()
    flags |= {"training.seq_len"} if given.sequence_length else set()
    flags |= {"training.local_batch_size"} if given.micro_batch_size else set()
    flags |= {"activation_checkpoint.mode"} if any(re.match("activation[-_]checkpoint:", one) for one in words) else set()
    tp = ["parallelism.tensor_parallel_degree"] * bool(re.search(r"\d\db", config))  # 8 in those of large models
    places = ("training.local_batch_size|training.num_tokens_per_microbatch_per_dp_rank",
              "training.seq_len|training.max_context_length", "activation_checkpoint.mode", *tp)  # fmt: skip
    about = f"{config} of torchtitan's {module} says it"
    asked = [Question(name=one.partition("|")[0], about=about) for one in places if not flags & set(one.split("|"))]
    family, _, flavor = config.rpartition("_")
    said = f"{config} of torchtitan's {module} is not there: its optimizer, loss and converters are taken as torchtitan's defaults"
    return {"notes": [said], "questions": asked, "module": True, "called": config, "compile": False,
            "model": model_named([], family, flavor)}  # fmt: skip


def own_loss(path: Path, name: str) -> tuple[str, ...]:
    """Note about a loss that the registry around the configuration gives a family in the place of cross entropy."""
    file = beside(path, f"torchtitan/models/{name}/__init__.py", (".py",)) if re.fullmatch(r"\w{1,60}", name) else None
    found = re.findall(r"(?m)^[ \t]*build_loss_fn\s*=\s*(\w+)", read_text(file)) if file is not None else []
    odd = [one for one in found if "cross_entropy" not in one and one != "None"]
    return (f"the loss is {odd[0]} of the project; priced as cross entropy after one pass of the model",) if odd else ()


def products_of(path: Path, table: Mapping[str, Any]) -> dict[str, int]:
    """A key of [activation_checkpoint] by which the copy around drops every n-th matrix product, where that is a word of its own:
    key -> n, 0 = it drops none."""
    places = ("torchtitan/distributed/activation_checkpoint.py", "torchtitan/models/llama3/infra/parallelize.py")
    files = [file for one in places if (file := beside(path, one, (".py",))) is not None]
    keys = {key for one in files for key in re.findall(r"mm_count\w{0,40}\]?\s*%\s*(?:\w+\.)+(\w+)\s*==\s*0", read_text(one))}
    return {key: n for key in keys if (n := table.get(key)) is not None and type(n) is int and n >= 0}


def of_products(other: Mapping[str, Any], model: ModelSpec | None, tokens: float, size: float, tp: int) -> tuple[str, ...]:
    """Note about matrix products that a layer keeps otherwise than a plan, which drops every second (wk, wo and w3); ``tokens`` of
    a rank's microbatch, ``size`` of an element."""
    key, every = next(iter(other.get("products", {}).items()), ("", 2))
    if every == 2 or model is None or "layers" in other or other.get("recompute") != Recompute.SELECTIVE:
        return ()
    keys, inner = model.num_kv_heads * model.head_dim / tp, 0 if model.is_moe else model.ffn_size / tp
    more = model.hidden_size + keys + inner * model.gated
    less = model.num_heads * model.head_dim / tp + keys + inner + model.hidden_size  # wq, wv, w1, w2
    gigabytes = (less if every == 1 else more) * tokens * size * model.num_layers / GIB
    does = "keeps all" if every == 0 else "keeps none of the" if every == 1 else f"drops one in {every} of the"
    what = f"activation_checkpoint.{key} {every} {does} matrix products of a layer, and every second is priced as kept"
    return (f"{what}: memory comes out too {'high' if every == 1 else 'low'} by up to {gigabytes:.2f} GiB",)


def _words(file: Path, name: str, flavor: str) -> dict[str, Any]:
    """Arguments of the flavour in the registry's dictionary; empty where it is not there or has words that are not known."""
    nodes = ast.walk(tree_or_none(file) or ast.Module([], []))
    registries = [one for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).startswith(name)]
    for registry in (one.value for one in registries if isinstance(one.value, ast.Dict)):
        for key, value in zip(registry.keys, registry.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == flavor and isinstance(value, ast.Call) and not value.args:
                given = {one.arg: one.value.value for one in value.keywords if isinstance(one.value, ast.Constant)}
                given |= {one.arg: int(found) for one in value.keywords if isinstance(one.value, ast.BinOp)
                          and (found := arithmetic(ast.unparse(one.value), lambda _: "?")) is not None}  # fmt: skip
                sizes = OF_LATENT if given.keys() >= LATENT else SIZES.union(OF_QWEN if name == "qwen3" else ())
                whole = len(given) == len(value.keywords) and given.keys() <= sizes | NO_SIZES
                return {str(word): one for word, one in given.items()} if whole else {}
    return {}


def _spec(words: dict[str, Any], name: str, source: str, rows: int) -> ModelSpec:
    """Their model; ``rows`` of its tables where they leave that to the tokenizer, 0 = its file is not there."""
    if words.keys() >= LATENT:
        return from_hugging_face({**words, "model_type": "deepseek_v3", "vocab_size": rows}, source=source)
    width, multiple = int(8 * words["dim"] / 3), int(words.get("multiple_of") or 256)
    width = int(float(words.get("ffn_dim_multiplier") or 1.0) * width)
    vocabulary = words.get("vocab_size") or -1
    if name == "qwen3":
        words = OF_QWEN | words
    sizes: dict[str, Any] = {
        "model_type": "llama", "hidden_size": words["dim"], "num_hidden_layers": words["n_layers"],
        "num_attention_heads": words["n_heads"], "num_key_value_heads": words.get("n_kv_heads") or words["n_heads"],
        "intermediate_size": multiple * math.ceil(width / multiple), "tie_word_embeddings": False,
        "vocab_size": vocabulary if vocabulary > 0 else rows or VOCABULARIES[name],
    }  # fmt: skip
    if name == "qwen3":
        sizes |= {"model_type": name if words["qk_norm"] else "llama", "intermediate_size": words["hidden_dim"],
                  "head_dim": words["head_dim"], "tie_word_embeddings": words["enable_weight_tying"]}  # fmt: skip
    return from_hugging_face(sizes, source=source)

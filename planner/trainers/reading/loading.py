"""What loads a model: its dtype, its kernel of attention, its bits and how it is split."""

import ast
from collections.abc import Mapping
from typing import Any

from planner.trainers.reading.base_weights import PREPARES, STAY
from planner.trainers.reading.python import Script
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import gap, is_open

SPLITS = ("tp_plan", "tp_size", "distributed_config")
"""Keywords of from_pretrained that split layers over ranks.  [transformers, modeling_utils.py]"""
QUANTISERS = {"GPTQConfig": "bits", "AwqConfig": "bits", "AutoRoundConfig": "bits", "HqqConfig": "nbits"}
"""Configurations of other quantisations and what they call their bits."""
OTHER_QUANTISERS = ("TorchAoConfig", "QuantoConfig", "EetqConfig", "FineGrainedFP8Config", "FbgemmFp8Config", "AqlmConfig",
                    "VptqConfig", "HiggsConfig", "SpQRConfig", "CompressedTensorsConfig", "Mxfp4Config")  # fmt: skip

UNDATED = "loaded_without_dtype"
"""Said by programs whose load names no dtype."""
BY_PEFT = "as PEFT has it"
"""Stands for the layers that PEFT adapts where none is named."""
NAMES = (("load_in_4bit", "load_in_4bit"), ("use_bnb_nested_quant", "bnb_4bit_use_double_quant"))
"""Arguments of TRL and what BitsAndBytesConfig calls them."""


def _other_bits(script: Script) -> dict[str, Any] | None:
    """Bits of a quantisation that is not the one of bitsandbytes: as they are said, else a question; None = there is none."""
    for name, bits in QUANTISERS.items():
        for call in script.calls(name):
            count = script.keywords(call).get(bits, 4)
            return {f"load_in_{count}bit": True} if count in (4, 8) else {"load_in_8bit": gap(["load_in_8bit"])}
    for call in script.calls(*OTHER_QUANTISERS):
        if script.keywords(call).get("dequantize") is True:  # of a checkpoint that lies in 4 bits
            return {"dequantize": True}
        return {"load_in_4bit": gap(["load_in_4bit"]), "load_in_8bit": gap(["load_in_8bit"])}
    return None


def loading(script: Script, words: Mapping[str, Any], load: ast.Call | None = None) -> dict[str, Any]:
    """Arguments of what loads a model: dtype, kernel of attention and bits."""
    found: dict[str, Any] = {}
    dtype = words.get("dtype", words.get("torch_dtype"))
    if isinstance(dtype, str):
        found["dtype"] = dtype
    if (kernel := words.get("attn_implementation")) is not None:
        found["attn_implementation"] = kernel
    if words.get("use_flash_attention_2") is True:  # before transformers 4.36
        found.setdefault("attn_implementation", "flash_attention_2")
    if "attn_implementation" not in found and any(one.startswith("**") for one in words):
        found |= _put_kernel(script)
    found |= {name: words[name] for name in SPLITS if words.get(name) not in (None, False, 1)}
    found |= dict.fromkeys(PREPARES[:1], True) if script.calls(*PREPARES) else {}
    stay = any(script.keywords(one).get("autocast_adapter_dtype") is False for one in script.calls("get_peft_model"))
    found |= {STAY: True} if stay else {}
    found |= {"by_trainer": True} if script.calls("LoraConfig") and not script.calls("get_peft_model") else {}
    bits, given = next(iter(script.calls("BitsAndBytesConfig")), None), words.get("quantization_config")
    if bits is None and given is not None and (other := _other_bits(script)) is not None:
        return found | other
    if bits is None and isinstance(given, str):  # made where nobody here looks
        found |= {ours: gap([theirs]) for ours, theirs in (*NAMES, ("load_in_8bit", "load_in_8bit"))}
    quantised = script.keywords(bits) if bits is not None and given is not None else given if isinstance(given, dict) else words
    for ours, theirs in (*NAMES, ("load_in_8bit", "load_in_8bit")):
        if theirs in quantised or quantised is not words:
            found[ours] = quantised.get(theirs, False)
    if quantised is not words and any(one.startswith("**") for one in quantised):  # what these hold is not followed to here
        found |= {ours: gap([theirs]) for ours, theirs in NAMES if theirs not in quantised}
    if quantised is not words and isinstance(script, Running) and bits is not None and not script.settled(bits, load):
        found |= {name: gap([name]) for name in ("load_in_4bit", "load_in_8bit") if found[name] is True}
    if isinstance(computes := quantised.get("bnb_4bit_compute_dtype"), str) and not is_open(computes):
        found["bnb_4bit_compute_dtype"] = computes
    spread = quantised is words and (any(one.startswith("**") for one in words) or _put_in_keywords(script))
    if spread and bits is not None and "load_in_4bit" not in found:  # in keywords that are not followed to here
        found |= {"load_in_4bit": gap(["load_in_4bit"]), "use_bnb_nested_quant": gap(["bnb_4bit_use_double_quant"])}
    bits_known = any(found.get(one) is True for one in ("load_in_4bit", "load_in_8bit"))
    if load is not None and "dtype" not in found and not bits_known and any(_may_say_dtype(script, one) for one in words):
        found["torch_dtype"] = gap(["torch_dtype"])
    elif load is not None and "dtype" not in found and not bits_known:
        found[UNDATED] = True
    if load is not None and not bits_known and isinstance(script, Running) and not any(map(script.runs, script.calls(*PREPARES))):
        found.pop(PREPARES[0], None)  # of a branch that quantises
    return found


def _may_say_dtype(script: Script, word: str) -> bool:
    """Whether keywords that are not followed to here, **name, may hold a dtype: not those that are written out without one."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == word[2:]]
    held = [one.value for one in made]
    ways = [way for one in held for way in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
    known = all(isinstance(one, ast.Dict) and None not in one.keys and "dtype" not in ast.unparse(one) for one in ways)
    return word.startswith("**") and not (ways and known and not script.stored("dtype") and not script.stored("torch_dtype"))


def _put_in_keywords(script: Script) -> bool:
    """Whether a script may put bits into keywords that it loads its model with: kwargs["load_in_4bit"] = True."""
    put = [value for name in ("load_in_4bit", "quantization_config") for value in script.stored(name)]
    return any(value is None or not isinstance(script, Running) or script.may_run(value) for value in put)


def _put_kernel(script: Script) -> dict[str, Any]:
    """The kernel of attention that a script puts into keywords which it loads its model with, where it surely does and says which:
    kwargs["attn_implementation"] = args.attention."""
    put = script.stored("attn_implementation")
    made = [one for one in put if one is not None and isinstance(script, Running) and script.may_run(one)]
    kernels = {script.value(one) if isinstance(script, Running) and script.settled(one, None) else None for one in made}
    named = kernels.pop() if len(kernels) == 1 and len(made) == len(put) else None
    return {"attn_implementation": named} if isinstance(named, str) and not is_open(named) else {}

"""Words of torchtitan that a plan says otherwise, or does not hold: what is to be said of them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.reading.given import Given, Question, setting_of_a_fork
from planner.trainers.reading.settings import beside
from planner.trainers.reading.values import not_priced, read_text
from planner.units import GIB

STATES = re.compile(r"swap|offload|in_backward|[48]_?bit|galore|(^|_)ema(_|$)")
"""Switches of [optimizer] that decide where states are and how large: those of forks, and early_step_in_backward."""
TYPES = re.compile(r"dtype|precision|bf16|fp(8|16)|quant")
"""Words of [optimizer] that may be of the states, or of a product within the step."""
LAYERS = re.compile(r"name|flavor|norm_type|tokenizer\w*|hf_\w+|converters|print_\w+|model_args|\w*path\w*|\w*(token|tokens)")
"""Words of [model] that torchtitan has, or that make no other layers."""
LINEAR, GROUPED = r"float8|mx|(quantize\.)?(linear|dense)\.(float8|mx)", r"(quantize\.)?(grouped_mm|moe)\.(float8|mx)"
"""Converters of linear layers, and of the grouped products of experts.  [components/quantization]"""
FEW = re.compile(r"output|lm_head|.*(router|gate).*|auto_filter_small_kn")
"""Layers that stay as they are without a word: their products are few, or planner's fp8 leaves them out."""
KERNELS = "primus_turbo"
"""Converter of Primus that puts AMD's kernels into the same layers, and its section.
[Primus, backends/torchtitan/primus_turbo_extensions]"""
OF_CONVERTERS = re.compile(r"use_turbo_(float8|mx)_linear")
"""Words of that section that are about layers which another converter brings to 8 bits, and nothing without it."""
LOW = re.compile(r"fp[48]|float[48]|(^|_)mx|quant|offload|recompute|deepep")
"""Words of that section that make more than other kernels of the same products."""
PRICED_AS = f"{KERNELS}: its kernels are priced as torchtitan's"
BACKENDS = ("standard", "deepep", "hybridep")


SHARED = re.compile("loss|kernel|attn|attention|memory|offload|precision|dtype|fp8|quant|recompute|remat|activation|cache")
"""Words of a table or a key that torchtitan does not have, and that may decide memory or precision."""
ADAPTERS = re.compile("lora|peft|adapter|distill|teacher")
SWITCHES = ("enable", "enabled", "active", "use", "is_enabled", "rank", "r", "lora_rank")
"""Keys that switch a table on and off, beside use_NAME and its like."""
RECOMPUTE = "activation_checkpoint"
KNOWN = {
    RECOMPUTE: r"mode|selective_ac_option|per_op_sac\w*|early_stop|memory_budget|visualize_\w+|preserve_rng_state"
                             r"|determinism_check|debug",
    "compile": r"enable|components|backend|precompile\w*|enable_async_tensor_parallel|mode|model_backend_override|(joint_)?passes"
               r"|options",
    "loss": r"name|loss_fn|num_chunks|ignore_index|chunk_size|impl",
}  # fmt: skip
"""Keys of tables that decide memory: those that torchtitan has, of all its versions."""


def is_off(name: str, table: Mapping[str, Any]) -> bool:
    """Whether nothing of a table is in the job: its switch says so, or no key of it is on."""
    switches = (*SWITCHES, f"use_{name}", f"enable_{name}", f"{name}_enable", f"{name}_enabled")
    return any(not _on(table[one]) for one in switches if one in table) or not any(map(_on, table.values()))


def _on(value: Any) -> bool:
    return isinstance(value, Mapping | list) or str(value).lower() not in ("false", "none", "null", "off", "0", "0.0", "")


def _is_number(value: Any) -> bool:
    """Whether a value is a number, of which 0 may be "never" and is no switch that is off."""
    return not isinstance(value, bool) and re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", str(value)) is not None


def of_foreign_tables(data: Mapping[str, Any], names: list[str], said: Given | None = None) -> tuple[list[Question], list[str]]:
    """What is asked, and noted, of tables that torchtitan does not have: asked of one that is on and may decide memory or
    precision by its name or by a key that is on. ``said`` answers by the name where ``data`` does not hold the answer."""
    on = [one for one in names if not is_off(one, data[one])]
    on = [one for one in on if said is None or str(said.setting(one)).lower() not in ("false", "null")]
    words = {one: " ".join([one, *(key for key, value in data[one].items() if _on(value))]) for one in on}
    same = [one for one in on if one == KERNELS and not any(
        _on(value) and LOW.search(key) and not OF_CONVERTERS.fullmatch(key) for key, value in data[one].items())]  # fmt: skip
    asked = [one for one in on if SHARED.search(words[one]) and one not in same]
    about = "no section of torchtitan, so one of a fork, which may decide memory or precision; false imports the job without it"
    on += [one for one in names if not ({*SWITCHES} & data[one].keys() or any(map(_on, data[one].values())))
           and any(map(_is_number, data[one].values()))]  # fmt: skip
    left = ", ".join([one for one in on if one not in (*asked, *same)][:8])
    noted = [f"sections that torchtitan does not have, not read: {left}"] * bool(left)
    noted += [PRICED_AS] * bool(same)
    return [Question(name=one, about=about, choices=("false",)) for one in asked], noted


def of_own_keys(data: Mapping[str, Any], read: Iterable[str]) -> tuple[list[Question], list[str]]:
    """What is asked, and noted, of keys that torchtitan does not have in tables that it has, but those that are ``read``: of
    recompute every one may decide memory, 0 too."""
    parts = {name: part for name in KNOWN if isinstance(part := data.get(name), Mapping)}
    told = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items() if key not in read
            and not re.fullmatch(KNOWN[name], str(key)) and (name == RECOMPUTE or _on(value) or _is_number(value))}  # fmt: skip
    own = [one for one, value in told.items() if value not in (None, "")]
    asked = [one for one in own if _on(told[one]) or _is_number(told[one])]
    asked = [one for one in asked if one.startswith(f"{RECOMPUTE}.") or SHARED.search(one.partition(".")[2])]
    left = ", ".join(one for one in own if one not in asked)[:200]
    noted = [f"keys that torchtitan does not have, not read: {left}"] * bool(left)
    return [setting_of_a_fork(one, "torchtitan") for one in asked], noted


def require_states(path: Path, optimizer: Mapping[str, Any]) -> list[Question]:
    """What is asked about words of the optimizer that may be of its states. Raises PlannerError for those that are."""
    usual = ("", "float32", "fp32", "torch.float32")
    on = [one for one, value in optimizer.items() if value is True or (isinstance(value, str) and value not in usual)]
    states = [f"optimizer.{one}" for one in on if STATES.search(one) and not TYPES.search(one)]
    if states:
        raise not_priced(str(path), states, states)
    return [setting_of_a_fork(f"optimizer.{one}", "torchtitan") for one in on if TYPES.search(one)]


def of_its_kind(path: Path, other: Mapping[str, Any]) -> list[Question]:
    """What is asked about an optimizer of a fork: of Adam's kind by its name, with two moments a weight or other states, or any."""
    name = str(other.get("optimizer", "AdamW"))
    if re.fullmatch("(?i)adamw?|(dist)?muon", name):
        return []
    like = re.fullmatch(r"(?i)(decoupled|aggmo|clipped|stable|nd|c)*_?(adamw?|adopt)", name) is not None
    if other.get("module") and not like:
        return []
    states = states_of(path, name)
    keeps = f", whose class keeps {states} state{'s' * (states > 1)} a weight" if states is not None else ""
    about = f"it is {shown(name)}, an optimizer of a fork{keeps}; AdamW " + (
        "where it holds two moments a weight in float32" if like else "holds two states a weight")  # fmt: skip
    muon = () if like or other.get("toml") else ("Muon",)  # which prices of TOML's time do not have
    return [Question(name="optimizer.name", about=about, choices=("AdamW", *muon))]


def states_of(path: Path, name: str) -> int | None:
    """How many states a weight the class of an optimizer keeps in the copy of torchtitan around a file; None = it is not seen."""
    file = beside(path, "torchtitan/components/optimizer.py", (".py",)) if re.fullmatch(r"\w{1,60}", name) else None
    for text in map(read_text, [file, *sorted(file.parent.glob("optimizer*/*.py"))[:20]] if file is not None else []):
        if found := re.search(rf"(?ms)^class {name}\b.*?(?=^class |\Z)", text):
            return len({*re.findall(r"\bstate(?:\[\w+\])?\[[\"'](\w+)[\"']\]\s*=[^=]", found[0])} - {"step", "steps"}) or None
    return None


def of_stand_in(path: Path, said: Given, spec: ModelSpec | None, dtype: object, ranks: int) -> list[str]:
    """A note on the optimizer that stands in for one of a fork; ``dtype`` of a state, ``ranks`` that share those of a weight."""
    answer, key = said.settings.get("optimizer.name"), r"^\s*\[optimizer\][^\[]*?^\s*name\s*=\s*|--optimizer[._]name[ =]"
    text = read_text(path) if answer and path.suffix != ".py" else ""
    files = (beside(path, one, (".toml",)) for one in re.findall(r"[\w./-]+\.toml\b", text)[:8])  # of a script
    found = re.search(rf"(?ms)(?:{key})[\"']?([A-Za-z]\w*)", "\n".join([text, *(read_text(one) for one in files if one)]))
    if found is None or spec is None or found[1].lower() == str(answer).lower():
        return []
    each, states = total_parameters(spec) * (2 if dtype == "bfloat16" else 4) / ranks / GIB, states_of(path, found[1])
    how = f"each state a weight more or less than that is {each:.2f} GiB"
    if states is not None:
        more = (1 if "muon" in str(answer).lower() else 2) - states
        much = f": memory comes out too {'high' if more > 0 else 'low'} by up to {abs(more) * each:.2f} GiB" * bool(more)
        how = f"its class keeps {states} state{'s' * (states > 1)} a weight, priced as {states + more}{much}"
    return [f"optimizer.name {answer} stands in for {found[1]}; {how}"]


DEFAULT_TYPE = re.compile(r"(\w+_)?(default|param(eter)?|model|weight)s?_(\w+_)?(precision|dtype)")
"""Words of forks for the type that weights are made in."""
TYPE_NAMES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}


def of_default_type(path: Path, training: dict[str, Any], said: Given) -> tuple[list[str], list[Question]]:
    """(Words of a fork for the type that weights are made in, what is asked of them): one that the copy of torchtitan around the
    file alone hands to torch.set_default_dtype is put in the place of training.dtype."""
    kinds = {one: TYPE_NAMES.get(str(value).removeprefix("torch.")) for one, value in training.items()}
    names = [one for one, kind in kinds.items() if kind is not None and DEFAULT_TYPE.fullmatch(one)]
    files = [file for one in ("train", "trainer") if (file := beside(path, f"torchtitan/{one}.py", (".py",))) is not None]
    handed = {one for file in files for one in re.findall(r"set_default_dtype\([^()]*?\.(\w+)\]?\s*\)", read_text(file))}
    if "training.dtype" in said.settings or not names:
        return names, []
    if len(names) == 1 and handed == {*names}:
        training["dtype"] = kinds[names[0]]
        return names, []
    about = f"training.{names[0]} is {shown(training[names[0]])}, a word of a fork: the type that weights are made in"
    return names, [Question(name="training.dtype", about=about, choices=("bfloat16", "float32"))]


def of_apart(switched: Iterable[str], replicate: int) -> list[str]:
    """Notes on words of forks by which replicas, where there are some, do not average their gradients."""
    form = r"(^|[._])(disable|skip|no|without)_(\w+_)?(all_?)?(reduce|sync)|no_?sync|local_?grad"
    names = [one for one in switched if replicate > 1 and re.search(form, one)]
    return [f"{one}: replicas do not average their gradients, which no plan has; priced with that traffic" for one in names]


def of_components(parts: object) -> list[str]:
    """A note where the model is compiled without the loss, or the loss alone: a plan has either or both."""
    if not isinstance(parts, list) or ("model" in parts) == ("loss" in parts):
        return []
    bytes_ = f"10 bytes {'less' if 'loss' in parts else 'more'} of a token and entry of the vocabulary"
    return [f"compile.components is {', '.join(map(str, parts))}: logits take {bytes_}"]


def of_muon(other: Mapping[str, Any]) -> tuple[Question, ...]:
    """What is asked where a table names Muon, which prices of torchtitan do not have."""
    if not other.get("toml") or not re.fullmatch("(?i)(dist)?muon", str(other.get("optimizer"))):
        return ()
    about = "it is Muon, one state a weight of matrices, which torchtitan's prices do not have; AdamW holds two"
    return (Question(name="optimizer.name", about=about, choices=("AdamW",)),)


def of_replicas(data: Mapping[str, Any]) -> list[str]:
    """A note on replicas that train apart and are synchronised by torchft."""
    part = data.get("fault_tolerance")
    if not isinstance(part, Mapping) or part.get("enable") is not True:
        return []
    how = f" and {shown(part['semi_sync_method'])}" if part.get("semi_sync_method") else ""
    return [f"fault_tolerance: replicas that torchft synchronises{how}, with what that holds and sends, are not in the plan"]


def own_layers(model: Mapping[str, Any]) -> list[str]:
    """A note on words of [model] that torchtitan does not have."""
    own = [one for one, value in model.items() if not isinstance(value, str | Mapping) and value not in (None, False, 0, [])
           and not LAYERS.fullmatch(one)]  # fmt: skip
    return [f"words of [model] that torchtitan does not have, not in the plan: {', '.join(own[:8])}"] if own else []


def require_converters(path: Path, converters: list[str], table: Mapping[str, Any]) -> list[str]:
    """Notes on the converters of a model. Raises PlannerError for one that is not priced. ``table``: what [float8], [mx] and
    [quantize] say."""
    own, converters = KERNELS in converters, [one for one in converters if one != KERNELS]
    whole = [one for one in converters if re.fullmatch(LINEAR, one)]
    wrong = [one for one in converters if one not in whole and not re.fullmatch(GROUPED, one)]
    if wrong or (converters and not whole):
        which = wrong[0] if wrong else converters[0]
        why = "is not priced" if wrong else "alone, low precision of the experts without the linear layers, is not priced"
        raise PlannerError(f"{path}: model.converters {shown(which)} {why}; --set model.converters=[] imports the job without")
    kept = [str(one) for one in _found(table, "filter_fqns") if not FEW.fullmatch(str(one))]
    notes = [f"layers whose names hold {', '.join(kept[:8])} stay in 16 bits; priced in low precision"] * bool(kept)
    notes += ["FSDP gathers weights in 8 bits; priced in 16"] * (True in _found(table, "enable_fsdp_float8_all_gather"))
    return [*(notes if whole else []), *([PRICED_AS] * own)]


def _found(table: Mapping[str, Any], key: str) -> list[Any]:
    """Values of a key in a table and those in it."""
    found: list[Any] = []
    for name, value in table.items():
        if name == key:
            found += value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else [value]
        elif isinstance(value, Mapping):
            found += _found(value, key)
    return found


def notes_of(
    parallel: Mapping[str, Any], training: Mapping[str, Any], other: Mapping[str, Any], model: ModelSpec | None
) -> list[str]:
    """What is taken for what, or is not in the plan."""
    whole = str(parallel["disable_loss_parallel"]).lower() == "true" and parallel["tensor_parallel_degree"] > 1
    turned = parallel["context_parallel_degree"] > 1 and parallel["context_parallel_rotate_method"] != "allgather"
    backend, experts = str(parallel["expert_parallel_comm_backend"]), parallel["expert_parallel_degree"] > 1
    reduce = str(training["mixed_precision_reduce"])
    low = other.get("precision") in ("fp8", "fp8_row", "mxfp8") and not other.get("grouped")
    dense = low and model is not None and model.is_moe
    counted = training["num_tokens_per_microbatch_per_dp_rank"] is not None  # batches in tokens, as of 2026-08
    captured = bool(other.get("module")) and counted and str(training.get("disable_cuda_graphs")).lower() != "true"
    return [
        *["disable_cuda_graphs is not true: a step is one CUDA graph since 2026-08, whose pool is not in the memory"] * captured,
        *["disable_loss_parallel: each rank has the logits of the whole vocabulary, and the memory a share of them"] * whole,
        *["context_parallel_rotate_method alltoall passes keys and values in a ring; priced as one gathering of them"] * turned,
        *[f"expert_parallel_comm_backend {shown(backend)} is priced as an all-to-all"] * (experts and backend not in BACKENDS),
        *[f"mixed_precision_reduce {shown(reduce)}: gradients are reduced in it, and priced in float32"] * (reduce != "float32"),
        *["products of the experts stay in 16 bits; priced in low precision with the others"] * dense,
    ]

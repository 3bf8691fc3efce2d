"""OLMo-core: the Python script that configures a training, read as sections of torchtitan, whose trainer prices it.

Batches are counted in tokens. Weights, gradients and states lie in fp32, FSDP computes in param_dtype; without replicas named,
hsdp has one a node.  [ai2-olmo-core 3.0: train/train_module/transformer/config.py, distributed/parallel/*.py]
"""

import ast
import re
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.model import ModelSpec
from planner.model_names import preset_of
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.shell.text import is_open, roots
from planner.trainers.reading.values import quotient, whole_number
from planner.trainers.torchtitan.readback import reading_of

MODULE = "TransformerTrainModuleConfig"
LENGTHS = ("max_sequence_length", "sequence_length")
"""Keywords and attributes that hold the tokens of a sequence."""
NODE = 8
"""GPUs of a node, which hsdp makes a group of where nothing is said."""
OPTIMIZERS = {"AdamWConfig": "AdamW", "SkipStepAdamWConfig": "AdamW", "AdamConfig": "Adam"}
GROUPS = {"fsdp", "hsdp", "ddp"}
SCHEDULES = {"single_1F1B": "1F1B", "interleaved_1F1B": "Interleaved1F1B", "gpipe": "GPipe", "zbv_zero_bubble": "ZBVZeroBubble"}
SIZES = ("d_model", "n_layers", "n_heads", "vocab_size")


def read(path: Path, said: Given) -> Reading:
    """The training of a script. Raises PlannerError, OpenQuestionsError for what its text does not say."""
    script = Script(path, said)
    [module, *others] = script.calls(MODULE) or [None]
    if module is None:
        raise PlannerError(f"{path}: no {MODULE} is built here; import the script that builds it")
    if others:
        raise PlannerError(f"{path}: {1 + len(others)} times {MODULE}, which one is trained is not read")
    asked: list[Question] = []
    length = _length(script, module, said)
    if length is None:
        asked.append(NEEDED["sequence_length"])
    else:  # attributes of this name hold it
        script = Script(path, said.with_settings({**dict.fromkeys(LENGTHS, str(length)), **said.settings}))
        module = script.calls(MODULE)[0]
    words = {one.arg: one.value for one in module.keywords if one.arg}
    model = None if said.model else _model(script, asked)
    micro = _number(script, words.get("rank_microbatch_size"), "rank_microbatch_size", asked)
    batch = _number(script, _batch(script), "global_batch_size", asked)
    parallel = _parallel(script, words, asked)
    recompute = _recompute(path, script, words, asked)
    if said.num_gpus is None:
        asked.append(NEEDED["num_gpus"])
    if asked or length is None or said.num_gpus is None:
        ask(str(path), asked)
    kind = parallel.pop("kind", "fsdp")
    parallel |= _replicas(path, str(kind), parallel, said.num_gpus)
    other = {"model": model if isinstance(model, str) else "", "recompute": recompute, "optimizer": _optimizer(path, script, words),
             "compile": script.value(words["compile_model"]) is True if "compile_model" in words else False,
             "precision": _low_precision(path, script, words)}  # fmt: skip
    training: dict[str, Any] = {
        "local_batch_size": quotient(micro, length, f"{path}: rank_microbatch_size by sequences of {length} tokens"),
        "global_batch_size": quotient(batch, length, f"{path}: global_batch_size by sequences of {length} tokens"), "seq_len": length,
    }  # fmt: skip
    if _dtype(script, words.get("dp_config"), "param_dtype") != "bfloat16" and "autocast_precision" not in words:
        training["mixed_precision_param"] = "float32"
    found = reading_of(path, {"parallelism": parallel, "training": training, "other": other}, said)
    fields = {**found.fields, **({"zero": 0, "dp_shard": 0} if kind == "ddp" else {})}
    return found.replace(fields=fields, model=found.model or (model if isinstance(model, ModelSpec) else None))


def _length(script: Script, module: ast.Call, said: Given) -> int | None:
    """Tokens of a sequence: what the user, the module's or the data's configuration, or the call that builds both says."""
    nodes = [one.value for one in module.keywords if one.arg == LENGTHS[0]]
    every = [call for name in ("partial", "build_config", "CommonComponents") for call in script.calls(name)]
    every += [call for calls in script._calls.values() for call in calls if last_name(call.func).startswith("Numpy")]
    nodes += [one.value for call in every for one in call.keywords if one.arg in LENGTHS]
    values = [script.value(one) for one in nodes]
    return said.sequence_length or next((one for one in values if isinstance(one, int) and not isinstance(one, bool)), None)


def _batch(script: Script) -> ast.expr | None:
    """Tokens of a step, where a call says them and does not hand on what it was given."""
    named = [one.value for calls in script._calls.values() for call in calls for one in call.keywords if one.arg == "global_batch_size"]
    own = [one for one in named if last_name(one) != "global_batch_size"]
    return next(iter([*own, *named]), None)


def _number(script: Script, node: ast.expr | None, name: str, asked: list[Question]) -> int:
    """A number of tokens; what is not known is asked for, by its name."""
    said = script.said.setting(name)
    value = int(said) if said and re.fullmatch(r"\d{1,15}", said) else script.value(node) if node is not None else None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) and value > 0:
        return int(value)
    if isinstance(value, str) and not is_open(value):
        raise PlannerError(f"{script.path}: {name} is {shown(value)}; it must be a number of tokens")
    open_ = roots(value) if isinstance(value, str) else []
    asked.append(Question(name=open_[0] if len(open_) == 1 and open_[0].isidentifier() else name, about=f"tokens: {name}"))
    return 1


def _parallel(script: Script, words: dict[str, ast.expr], asked: list[Question]) -> dict[str, Any]:
    """Degrees, as torchtitan names them; ``kind``: how data parallel ranks share the weights."""
    found: dict[str, Any] = {}
    for short, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        call = _call(script, words.get(f"{short}_config"))
        if call is None:
            continue
        said = script.keywords(call)
        degree = said.get("degree", script.value(call.args[0]) if call.args else None)
        if not isinstance(degree, int):
            asked.append(Question(name=f"{short}_degree", about=f"degree of {short}_config"))
            degree = 1
        found[f"{name}_parallel_degree"] = degree
        if short == "cp" and last_name(call.func) not in ("zig_zag", "llama3"):
            raise PlannerError(f"{script.path}: cp_config {last_name(call.func)[:60]} is not modelled; zig_zag and llama3 are")
        if short == "pp":
            schedule = _word(call, "schedule") or "interleaved_1F1B"
            found["pipeline_parallel_schedule"] = SCHEDULES.get(schedule, schedule)
            if "split_points" in said:
                raise PlannerError(f"{script.path}: pp_config.split_points is not read; leave the stages to the schedule")
    data = _call(script, words.get("dp_config"))
    if data is not None:
        found["kind"] = _word(data, "name") or "fsdp"
        for name in ("num_replicas", "shard_degree"):
            if isinstance(value := script.keywords(data).get(name), int):
                found[name] = value
    return found


def _replicas(path: Path, kind: str, parallel: dict[str, Any], gpus: int) -> dict[str, int]:
    """Replicas and ranks that share the weights.  [distributed/parallel/data_parallel.py, get_replicate_and_shard_degree]"""
    if kind not in GROUPS:
        raise PlannerError(f"{path}: dp_config.name is {shown(kind)}; a plan knows {', '.join(sorted(GROUPS))}")
    degrees = [int(value) for name, value in parallel.items() if name.endswith("_parallel_degree") and not name.startswith("expert")]
    dp = gpus
    for one in degrees:
        dp = quotient(dp, one, f"{path}: GPUs by the degrees")
    replicas, shard = (parallel.pop(name, None) for name in ("num_replicas", "shard_degree"))
    if kind != "hsdp":
        return {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": dp}
    if shard is None:
        nodes = max(gpus // NODE, 1)
        shard = quotient(dp, replicas or nodes, f"{path}: data parallel ranks by replicas")
    groups = quotient(dp, whole_number(shard, f"{path}: dp_config.shard_degree"), f"{path}: data parallel ranks by shard_degree")
    return {"data_parallel_replicate_degree": groups, "data_parallel_shard_degree": shard}


def _recompute(path: Path, script: Script, words: dict[str, ast.expr], asked: list[Question]) -> Recompute:
    """Every block, or none; what is chosen in between is asked for."""
    call = _call(script, words.get("ac_config"))
    mode = "none" if call is None else (_word(call, "mode") or "full")
    if mode in ("full", "none"):
        return Recompute.FULL if mode == "full" else Recompute.NONE
    said = script.said.setting("ac_config")
    if said in ("full", "none"):
        return Recompute.FULL if said == "full" else Recompute.NONE
    asked.append(Question(name="ac_config", about=f"{mode} has no plan that is the same; which is nearer", choices=("full", "none")))
    return Recompute.NONE


def _optimizer(path: Path, script: Script, words: dict[str, ast.expr]) -> str:
    call = _call(script, words.get("optim"))
    name = last_name(call.func) if call is not None else "AdamWConfig"
    if name not in OPTIMIZERS:
        raise PlannerError(f"{path}: optim is {shown(name)}; of OLMo-core's optimizers those of Adam are priced")
    if call is not None and _dtype(script, call, "dtype") == "bfloat16":
        raise PlannerError(f"{path}: optim.dtype is bfloat16: moments in bf16 beside fp32 weights are not priced")
    return OPTIMIZERS[name]


def _low_precision(path: Path, script: Script, words: dict[str, ast.expr]) -> str | None:
    """fp8 where it is switched on.  [float8/__init__.py: enabled is true unless it is said]"""
    call = _call(script, words.get("float8_config"))
    if call is None or script.keywords(call).get("enabled") is False:
        return None
    recipe = _word(call, "ao_recipe")
    if recipe not in (None, "rowwise", "tensorwise"):
        raise PlannerError(f"{path}: float8_config.ao_recipe is {shown(recipe)}; a plan knows tensorwise and rowwise")
    return "fp8_row" if recipe == "rowwise" else "fp8"


def _model(script: Script, asked: list[Question]) -> str | ModelSpec | None:
    """The preset that a factory of TransformerConfig is called like, or the sizes of llama_like."""
    made = [
        call for calls in script._calls.values() for call in calls
        if isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "TransformerConfig"
    ]  # fmt: skip
    names = list(dict.fromkeys(last_name(call.func) for call in made))
    if len(names) == 1 and (preset := preset_of(names[0])) is not None:
        return preset
    if names == ["llama_like"] and len(made) == 1 and (found := _llama(script.path, script.keywords(made[0]))) is not None:
        return found
    about = f"{', '.join(names)[:80]} is no preset" if names else "no factory of TransformerConfig is called here"
    asked.append(Question(name="--model NAME", about=about))
    return None


def _llama(path: Path, said: dict[str, Any]) -> ModelSpec | None:
    """A Llama with these sizes.  [nn/transformer/config.py, llama_like: 8 d / 3, rounded up to a multiple]"""
    if any(not isinstance(said.get(one), int) for one in SIZES) or said.keys() & {"feed_forward_moe", "block_mods", "sliding_window"}:
        return None
    width, multiple = int(8 * said["d_model"] / 3), said.get("hidden_size_multiple_of", 256)
    factor = said.get("hidden_size_multiplier", 1)
    if not isinstance(multiple, int) or not isinstance(factor, int | float) or "feed_forward" in said or multiple < 1:
        return None
    heads = said["n_heads"]
    return ModelSpec(
        name=f"llama_like of {path.name}", num_layers=said["n_layers"], hidden_size=said["d_model"], num_heads=heads,
        num_kv_heads=said.get("n_kv_heads") or heads, head_dim=said.get("head_dim") or said["d_model"] // heads,
        ffn_size=-(-int(factor * width) // multiple) * multiple, vocab_size=said["vocab_size"], qk_norm=said.get("qk_norm") is True,
        max_sequence_length=1 << 20,
    )  # fmt: skip


def _call(script: Script, node: ast.expr | None) -> ast.Call | None:
    """The call that makes a part, through a name that is given it; None = nothing, or what is not known."""
    for _ in range(4):
        if isinstance(node, ast.Call):
            return node
        if isinstance(node, ast.IfExp):
            node = node.body
        elif isinstance(node, ast.Name):
            some = [one.value for (_, name), every in script._names.items() if name == node.id for one in every]
            node = some[-1] if len(some) == 1 else None
        else:
            return None
    return None


def _word(call: ast.Call, name: str) -> str | None:
    """The last word of an enumeration's member that a keyword is given, or its text."""
    node = next((one.value for one in call.keywords if one.arg == name), None)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return last_name(node) if isinstance(node, ast.Attribute | ast.Name) else None


def _dtype(script: Script, node: ast.expr | None, name: str) -> str | None:
    call = node if isinstance(node, ast.Call) else _call(script, node)
    return _word(call, name) if call is not None else None

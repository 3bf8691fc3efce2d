"""Degrees of an OLMo-core configuration, in torchtitan's words.  [ai2-olmo-core 2.5 and 3.0: distributed/parallel]"""

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.olmo_core.models import MOST_CALLS
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.given import Question, value_of
from planner.trainers.reading.python_text import UNNAMED, last_name
from planner.trainers.reading.shell.text import is_open, roots, shown_text
from planner.trainers.reading.values import quotient, whole_number

NODE = 8
"""GPUs of a node, which hsdp makes a group of where nothing is said."""
SCHEDULES = {"single_1F1B": "1F1B", "interleaved_1F1B": "Interleaved1F1B", "gpipe": "GPipe", "zbv_zero_bubble": "ZBVZeroBubble"}
RINGS = ("zig_zag", "llama3")
"""Ways of context parallel ranks that pass keys and values on."""


def launched_on(script: Parts) -> int | None:
    """GPUs that the script launches itself on; None = it does not say one number.  [launch/beaker.py: num_gpus is 8]"""
    every = [one for one in script.every_call() if re.search(r"^partial$|^build_|Launch\w*Config$", last_name(one.func))]
    found: dict[str | None, set[int]] = {"num_nodes": set(), "num_gpus": set()}
    for call in every[:MOST_CALLS]:
        for one in call.keywords:
            if one.arg in found:
                value = script.value(one.value)
                found[one.arg].add(value if isinstance(value, int) and 0 < value < 10**6 else 0)
    nodes, each = found["num_nodes"], found["num_gpus"] or {NODE}
    return nodes.pop() * each.pop() or None if len(nodes) == len(each) == 1 else None


def parallel_of(script: Parts, parts: dict[str, ast.Call | None], asked: list[Question]) -> dict[str, Any]:
    """Degrees as torchtitan names them; and how data parallel ranks share the weights, in OLMo-core's words."""
    found: dict[str, Any] = {}
    for short, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        call = parts.get(f"{short}_config")
        if call is None:
            continue
        said = script.keywords(call).get("degree", script.value(call.args[0]) if call.args else None)
        degree = _answered(script, said, f"{short}_degree", f"degree of {short}_config", asked)
        found[f"{name}_parallel_degree"] = degree
        if short == "tp" and script.keywords(call).get("enable_async") is True:
            found["enable_async_tensor_parallel"] = True
        if short == "cp" and degree > 1 and last_name(call.func) not in RINGS:
            raise PlannerError(f"{script.path}: cp_config {last_name(call.func)[:60]} is not modelled; {' and '.join(RINGS)} are")
        if short == "pp":
            schedule = shown_text(word(call, "schedule", script=script) or "interleaved_1F1B")
            found["pipeline_parallel_schedule"] = SCHEDULES.get(schedule, schedule)
    data = parts.get("dp_config")
    said = script.keywords(data) if data is not None else {}
    for name in ("num_replicas", "shard_degree"):
        there = script.said.setting(name) is not None or said.get(name) is not None
        found[name] = _answered(script, said.get(name), name, f"dp_config.{name}", asked) if there else None
    if said.get("reshard_after_forward") is False:  # of forks
        found["fsdp_reshard_after_forward"] = "never"
    return found | {"kind": known(word(data, "name", 0, script), ("fsdp", "hsdp"), asked) or "fsdp"}


def _answered(script: Parts, value: Any, name: str, about: str, asked: list[Question]) -> int:
    """A degree: what the user says, else what the script does; asked for where neither does."""
    answer = value_of(script.said.setting(name) or "null")
    found = value if answer is None else answer
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    asked.append(Question(name=name, about=about))
    return 1


def replicas_of(path: Path, parallel: dict[str, Any], gpus: int) -> dict[str, int]:
    """Replicas and ranks that share the weights, over which experts lie.  [data_parallel.py, get_replicate_and_shard_degree]"""
    kind, replicas, shard = (parallel.pop(name) for name in ("kind", "num_replicas", "shard_degree"))
    if kind not in ("fsdp", "hsdp"):
        raise PlannerError(f"{path}: dp_config.name is {shown(kind)}; fsdp and hsdp are read, which share the weights")
    dp = gpus
    for name in ("tensor", "context", "pipeline"):
        degree = whole_number(parallel.get(f"{name}_parallel_degree", 1), f"{path}: the {name} parallel degree")
        dp = quotient(dp, degree, f"{path}: GPUs by the degrees")
    if kind == "fsdp":
        replicas = 1
    elif replicas is None:
        named = f"{path}: data parallel ranks by shard_degree"
        replicas = max(gpus // NODE, 1) if shard is None else quotient(dp, shard, named)
    each = quotient(dp, whole_number(replicas, f"{path}: dp_config.num_replicas"), f"{path}: data parallel ranks by replicas")
    if kind == "hsdp" and shard not in (None, each):
        raise PlannerError(f"{path}: dp_config has {replicas} replicas of {shard} ranks, and {dp} data parallel ranks are there")
    experts = parallel.get("expert_parallel_degree", 1)
    return {
        "data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": each,
        "expert_parallel_degree": each if experts < 0 else experts,
    }  # fmt: skip


def stages_of(script: Parts, call: ast.Call | None, parallel: dict[str, Any], model: ModelSpec) -> list[list[str]]:
    """Layers of every stage, as it says or as OLMo-core cuts them.  [train/train_module/transformer/config.py, get_split_points]"""
    splits = script.keywords(call).get("split_points") if call is not None else None
    layers, single = model.num_layers, parallel["pipeline_parallel_schedule"] in ("1F1B", "GPipe")
    if splits is None:
        stages = whole_number(parallel["pipeline_parallel_degree"], f"{script.path}: pp_config.degree", most=layers) * (2 - single)
        base, more = divmod(layers, stages)
        counts = [base] + [base + (i < more) for i in range(stages - 2)]
        splits = [sum(counts[: i + 1]) for i in range(len(counts))]
    known = isinstance(splits, list) and all(isinstance(one, int) and 0 <= one <= layers for one in splits)
    if not known or splits != sorted(splits):
        raise PlannerError(f"{script.path}: pp_config.split_points is {shown(splits)}; indices of layers are read")
    return [[f"layers.{i}" for i in range(a, b)] for a, b in pairwise([0, *splits, layers])]


def notes_of(script: Parts, parts: dict[str, ast.Call | None], parallel: dict[str, Any]) -> tuple[str, ...]:
    """What was taken for what."""
    cp = parts.get("cp_config")
    ring = cp is not None and last_name(cp.func) == "zig_zag"
    usual = list(dict.fromkeys(script.defaults))
    nodes = parallel["kind"] == "hsdp" and parallel["num_replicas"] is None and parallel["shard_degree"] is None
    words = (one for call in script.every_call() for one in call.keywords if one.arg == "generate_doc_lengths")
    masked = any(script.value(one.value) is True for one in words)
    names = {last_name(getattr(one.func, "value", one.func)) for one in script.every_call()} | {
        last_name(one.func) for one in script.every_call()
    }
    return (
        *["BatchSizeSchedulerCallback changes the batch in the course of the training; the configured one is priced"]
        * ("BatchSizeSchedulerCallback" in names),
        *["sequences of NumpyVSLDatasetConfig have several lengths; priced at the longest"] * ("NumpyVSLDatasetConfig" in names),
        *["attention ends at documents; priced over whole sequences, so its time comes out too long"] * masked,
        *[f"hsdp without num_replicas and shard_degree has one replica a node; nodes have {NODE} GPUs"] * nodes,
        *[f"options of the script at their defaults: {', '.join(usual)}"] * bool(usual),
        *["cp_config zig_zag passes keys and values in a ring; priced as one gathering of them"] * ring,
    )


def known(said: str | None, choices: tuple[str, ...], asked: list[Question]) -> str | None:
    """A member that a value names; what the value waits for is asked, with the members that are read."""
    open_ = roots(said) if said is not None and is_open(said) else []
    asked += [Question(name=one, about="a member of an enumeration is made of it", choices=choices) for one in open_]
    return None if open_ else said


def word(call: ast.Call | None, name: str, place: int = -1, script: Parts | None = None) -> str | None:
    """The last word of an enumeration's member that a keyword is given, or its text; ``script`` decides between two of them."""
    nodes = [one.value for one in call.keywords if one.arg == name] if call is not None else []
    node = next(iter([*nodes, *(call.args[place : place + 1] if call is not None and place >= 0 else [])]), None)
    node = script.made(node) if script is not None and isinstance(node, ast.IfExp) else node
    if isinstance(node, ast.IfExp):
        return ast.unparse(node)[:80]  # what it hangs on is not known
    if isinstance(node, ast.Call) and node.args:
        node = node.args[0]
        value = script.value(node) if script is not None else None  # DType(opts.param_dtype)
        if isinstance(value, str) and (not is_open(value) or set(roots(value)) - {UNNAMED}):
            return value
    return str(node.value) if isinstance(node, ast.Constant) else last_name(node) if node is not None else None

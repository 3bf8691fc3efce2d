"""Loops that people write over torch or DeepSpeed: what wraps the model, and what their data loader, optimizer and passes say."""

import ast
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.accelerators import (
    STEPS,
    batch_of,
    is_handed_on,
    keeps_outputs,
    of_loop,
    optimizer_of,
    passes_of,
)
from planner.trainers.reading.given import Question, value_of
from planner.trainers.reading.own_parts import held_by
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import FAR, UNNAMED, last_name
from planner.trainers.reading.running import Running, WithModules
from planner.trainers.reading.script_parts import BATCH
from planner.trainers.reading.settings import beside, file_settings
from planner.trainers.reading.shell.text import gap, is_open, roots, shown_text
from planner.trainers.reading.training_scripts import FOREIGN, TRAINERS
from planner.trainers.reading.values import quotient

WRAPPERS = {"FullyShardedDataParallel": "fsdp1", "FSDP": "fsdp1", "fully_shard": "fsdp2", "DistributedDataParallel": "ddp",
            "DDP": "ddp", "initialize": "deepspeed"}  # fmt: skip
"""What a loop hands its model to -> how it is split."""
SPLITS = ("parallelize_module", "context_parallel", "PipelineStage", "PipelineModule", "ScheduleGPipe", "Schedule1F1B",
          "tp_model_init", "initialize_model_parallel", "register_with_transformers", "apply_seq_parallel_monkey_patch",
          "substitute_hf_flash_attn")  # fmt: skip
"""Calls that split a model in other ways, by degrees that are not followed to here."""
OTHER_STEPS = re.compile(
    r"(?i)(.*_)?(advantages?|rewards?|old_log\w*|teacher(_model)?|distill\w*|ref(erence)?_(model|log\w*)|rollouts?|kl_\w+|dpo_loss"
    r"|chosen_log\w*)"
)
"""Names of a step that runs other models too, or generates."""
DECIDING = re.compile(r"stage|type|train_\w*batch_size\w*|gradient_accumulation_steps|autotp_size")
"""Keys of DeepSpeed that decide degrees, memory or the batch, each of one place."""
WHOLE = re.compile(r"device|enabled|zero_optimization|bf16|fp16|optimizer|offload_\w+|tensor_parallel")
"""Sections that do, and keys of several: where one is open the whole file is asked for."""
HALVES, OFFLOADS = {"bfloat16": "bf16", "float16": "fp16"}, {"fsdp1": "CPUOffload", "fsdp2": "CPUOffloadPolicy"}
POLICIES = {"fsdp1": ("mixed_precision", "MixedPrecision"), "fsdp2": ("mp_policy", "MixedPrecisionPolicy")}
OWN_JSON = (
    "the JSON that its loop hands to deepspeed.initialize; or its ZeRO, and with it --set per_device_train_batch_size=M --set "
    "gradient_accumulation_steps=N --set bf16=true"
)
EACH_PASS = "its loop reduces gradients in every pass, without no_sync, priced once a step: communication comes out too short"
STATES_APART = "ZeroRedundancyOptimizer shards states over the GPUs, priced whole: memory comes out too high"
VIEWS = "gradient_as_bucket_view: buckets are priced beside the gradients: memory comes out too high by 4 bytes a trained weight"
OWN = "the training loop is the program's own ({}): read by the calls that it makes"
HANDED_ON = "{} is handed to {}, which is not read: what it changes of the model is not in the plan"
GROUPS = "its loop may shard in groups that it replicates, by a mesh of unknown sizes: priced is one group of all GPUs"
WAY_OUT = "say its layout by flags: plan estimate --model NAME --trainer fsdp|deepspeed --gpus N --zero 3 --micro-batch-size M"


def wraps_of(program: Running) -> list[ast.Call]:
    """Calls that wrap a model: those that surely run, else those that may."""
    found = _of_libraries(program.calls(*WRAPPERS))
    return [one for one in found if program.runs(one)] or found


def _of_libraries(calls: Sequence[ast.Call]) -> list[ast.Call]:
    names = ("deepspeed.initialize", "ds.initialize")
    return [one for one in calls if last_name(one.func) != "initialize" or ast.unparse(one.func) in names]


def loop_of(program: Running, started: Path | None = None) -> dict[str, Any]:
    """Arguments, as those of transformers are called, that a loop over accelerate, torch or DeepSpeed gives itself; empty where a
    trainer has the loop. Its notes and questions stand under loop_notes and loop_questions. ``started``: the file
    that starts it."""
    wraps = wraps_of(program)
    bare = {one.name for one in ast.walk(program.tree) if isinstance(one, ast.ClassDef) and not one.bases}
    trainers = [one for one in program.calls(*TRAINERS, *FOREIGN) if last_name(one.func) not in bare]
    if (found := of_loop(program)) or not wraps or trainers or not program.calls("backward"):
        return found
    kinds = {WRAPPERS[last_name(one.func)] for one in wraps}
    kind, questions, notes = kinds.pop() if len(kinds) == 1 else "", list[Question](), list[str]()
    found = {"own_loop": True, "wrapped": kind, BATCH: batch_of(program), "optim": optimizer_of(program) or gap(["optim"])}
    defers = program.calls("no_sync", "set_requires_gradient_sync", "set_is_last_backward")
    found["sync_each_batch"] = all(any(getattr(word, "value", None) is True for word in one.args) for one in defers)
    if kind == "deepspeed":
        found |= _of_engine(program, _words(program, wraps[0]), found, questions, started)
    else:
        words = {name: node for one in wraps for name, node in _words(program, one).items()}
        found |= {STEPS: passes_of(program), BATCH: found[BATCH] or gap([BATCH])} | _precision(program, kind, words)
        found |= _of_fsdp(program, kind, words) | _of_mesh(program, wraps, notes) if kind != "ddp" else {}
        if "parallelism_config" in found:  # whose groups are no node then
            found["fsdp"] = found["fsdp"].replace("hybrid_shard_zero2", "shard_grad_op").replace("hybrid_shard", "full_shard")
        notes += [STATES_APART] * bool(program.calls("ZeroRedundancyOptimizer"))
        notes += [EACH_PASS] * (kind == "ddp" and found[STEPS] != 1 and found["sync_each_batch"])
        notes += [VIEWS] * (kind == "ddp" and "True" in ast.unparse(words.get("gradient_as_bucket_view", ast.Constant(None))))
    if found.get("fsdp") == gap(["fsdp"]):
        about = f"its loop may wrap the model by {', '.join(dict.fromkeys(last_name(one.func) for one in wraps))}"
        questions.append(Question(name="fsdp", about=about, choices=("full_shard", "shard_grad_op", "no_shard")))
    found |= _of_layers(program) | {"keeps_outputs": keeps_outputs(program)}
    return {name: value for name, value in found.items() if value is not None} | {"loop_notes": notes, "loop_questions": questions}


def _of_layers(program: Running) -> dict[str, Any]:
    """Checkpointing and offloading of activations by torch's wrappers of layers, or by a switch of the model itself."""
    found: dict[str, Any] = {}
    for put in (one for one in ast.walk(program.tree) if isinstance(one, ast.Assign)):
        if getattr(put.targets[0], "attr", "") == "gradient_checkpointing" and program.may_run(put.value):
            on = program.value(put.value)
            found["gradient_checkpointing"] = on if isinstance(on, bool) else gap(["gradient_checkpointing"])
    named = {last_name(one.func) for one in ast.walk(program.tree) if isinstance(one, ast.Call)} - {*program.functions}
    layers = program.calls(*(one for one in named if re.fullmatch(r"(apply|enable)_\w*checkpoint\w*", one)))
    layers += [one for one in program.calls("checkpoint_wrapper") if _in_a_loop(program, one)]
    for name, made in (("gradient_checkpointing", layers),
                       ("activation_offloading", program.calls("offload_wrapper", "save_on_cpu"))):  # fmt: skip
        if made:
            found[name] = True if any(map(program.runs, made)) else gap([name])
    return found


def _in_a_loop(program: Running, call: ast.Call) -> bool:
    loops = (one for one in ast.walk(program.tree) if isinstance(one, ast.For | ast.ListComp | ast.While))
    return any(part is call for one in loops for part in ast.walk(one))


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _of_fsdp(program: Running, kind: str, words: Mapping[str, ast.expr]) -> dict[str, Any]:
    """What splits weights.  [torch, distributed/fsdp: fully_sharded_data_parallel.py, _fully_shard/_fully_shard.py]"""
    if not kind or "**" in words:
        return {"fsdp": gap(["fsdp"]), "fsdp_config": {"auto_wrap_policy": ""}}
    single = not any(_in_a_loop(program, one) for one in program.calls(*(one for one in WRAPPERS if WRAPPERS[one] == kind)))
    if kind == "fsdp2":
        stays = program.value(words["reshard_after_forward"]) if "reshard_after_forward" in words else None
        strategy = {"None": "full_shard", "True": "full_shard", "False": "shard_grad_op"}.get(str(stays), gap(["fsdp"]))
    else:
        strategy = _strategy(program, words.get("sharding_strategy"))
        single = single and _is_none(words.get("auto_wrap_policy")) and not program.calls("wrap", "enable_wrap", "auto_wrap")
    moved = [one for one in program.calls(OFFLOADS[kind]) if program.keywords(one).get("offload_params", True) is not False]
    moved = moved if {"cpu_offload", "offload_policy"} & {*words} else []
    host = {"offload_params": True if any(map(program.runs, moved)) else gap(["offload_params"])} if moved else {}
    named = strategy if is_open(strategy) else f"{strategy} auto_wrap"
    return {"fsdp": named, "fsdp_config": {"auto_wrap_policy": "", **host}, "one_unit": single}


def _of_mesh(program: Running, wraps: Sequence[ast.Call], notes: list[str]) -> dict[str, Any]:
    """Replicas of groups, by a mesh of two dimensions. Raises PlannerError for one of other degrees, or that is not followed."""
    found: list[list[Any]] = []
    for call in program.calls("init_device_mesh"):
        words, gpus = program.keywords(call), program.said.num_gpus
        sizes: Any = words.get("mesh_shape", program.value(call.args[1]) if len(call.args) > 1 else None)
        names = words.get("mesh_dim_names", program.value(call.args[2]) if len(call.args) > 2 else None) or []
        named = [str(one) for one in names] if isinstance(names, list) else [str(names)]
        whole = [one for one in sizes if isinstance(one, int)] if isinstance(sizes, list) else []
        what = f"{_own(program, wraps)} has a mesh of {shown_text(', '.join(named) or str(sizes))[:80]}"
        if not isinstance(sizes, list) or len({*named}) not in (0, len(sizes)) or is_open("".join(named)):
            raise PlannerError(f"{what} over {shown_text(str(sizes))[:80]}, which is not followed; {WAY_OUT}")
        if gpus and len(whole) == len(sizes) and math.prod(whole) != gpus:
            raise PlannerError(f"{what}: {' x '.join(map(str, whole))} are not {gpus} GPUs; say --gpus N")
        copies = re.search(r"(rep|ddp|dp$|data|outer).*\n.*(shard|fsdp)", "\n".join(named))
        if len(sizes) > 2 or (len(sizes) == 2 and named and copies is None):
            raise PlannerError(f"{what}, whose degrees are not read; {WAY_OUT}")
        found += [sizes] * (len(sizes) == 2)
    handed = {name for one in wraps for name, node in _words(program, one).items() if not _is_none(node)} & {"mesh", "device_mesh"}
    elsewhere = bool(handed) and not program.calls("init_device_mesh")
    if elsewhere or any(one != found[0] or not all(isinstance(size, int) for size in one) for one in found):
        notes.append(GROUPS)
        return {}
    return {"parallelism_config": dict(zip(("dp_replicate_size", "dp_shard_size"), found[0], strict=True))} if found else {}


def _words(program: Running, call: ast.Call) -> dict[str, ast.expr]:
    """Keywords of a call, with those of a mapping that is written out; '**' stands for one that is not followed to here."""
    found = {one.arg: one.value for one in call.keywords if one.arg is not None}
    for one in (one.value for one in call.keywords if one.arg is None):
        made = held_by(program, one)
        if isinstance(made, ast.Dict) and None not in made.keys:
            found |= {str(program.value(key)): value for key, value in zip(made.keys, made.values, strict=True) if key is not None}
        elif isinstance(made, ast.Call) and last_name(made.func) == "dict" and not made.args:
            found |= {word.arg: word.value for word in made.keywords if word.arg is not None}
        else:
            found["**"] = one
        for put in (node for node in ast.walk(program.tree) if isinstance(node, ast.Assign) and program.may_run(node.value)):
            if isinstance(place := put.targets[0], ast.Subscript) and ast.unparse(place.value) == ast.unparse(one):
                found[str(program.value(place.slice))] = put.value
    return found


def _strategy(program: Running, node: ast.expr | None) -> str:
    """The name of a sharding strategy: the one that is named, or the only one that the program may take."""
    if _is_none(node):
        return "full_shard"
    for tree in (held_by(program, node) or program.tree, program.tree):
        named = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and last_name(one.value) == "ShardingStrategy"]
        names = {one.attr.lower() for one in named if program.may_run(one)}
        if names:
            return names.pop() if len(names) == 1 else gap(["fsdp"])
    return gap(["fsdp"])


def _precision(program: Running, kind: str, words: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Dtypes of products and of reductions: of a policy of FSDP, or of autocast over weights as they lie."""
    word, name = POLICIES.get(kind, ("", ""))
    held = held_by(program, words.get(word))
    named = isinstance(held, ast.Call) and last_name(held.func) == name
    made = [] if _is_none(held) else [held] if isinstance(held, ast.Call) and named else program.calls(name)
    given = [program.keywords(one) for one in made]
    pairs = {(str(one.get("param_dtype")), str(one.get("reduce_dtype"))) for one in given}
    unknown = not made and not _is_none(words.get(word))
    if "**" in words or not kind or unknown or len(pairs) > 1 or not all(map(program.runs, made)):
        return {"bf16": gap(["bf16"])}
    param, reduces = next(iter(pairs), ("None", "None"))
    casts = _autocast(program) if param in ("None", "float32") else HALVES.get(param, gap(["bf16"]))
    if is_open(casts):
        return {"bf16": gap(["bf16"])}
    reduced = {**HALVES, "float32": "fp32"}.get(param if reduces == "None" else reduces)
    return {"mixed_precision": casts, "reduce_dtype": reduced and reduced.replace("fp16", "bf16"),
            "autocast": bool(program.calls("autocast")) or None,
            "casts_each": (param == "None" and casts != "no") or None}  # fmt: skip


def _autocast(program: Running) -> str:
    """The precision of autocast around the passes, 'no' = there is none; of CUDA it is fp16 where nothing is said."""
    kinds = set()
    for call in program.calls("autocast"):
        words = program.keywords(call)
        given = [value for one in call.args if str(value := program.value(one)) in (*HALVES, "float32")]
        kind = HALVES.get(str(words.get("dtype", next(iter(given), "float16"))), gap(["bf16"]))
        if (on := words.get("enabled", True)) is not False:
            kinds.add(kind if on is True else gap(["bf16"]))
    return "no" if not kinds else kinds.pop() if len(kinds) == 1 else gap(["bf16"])


def _of_engine(
    program: Running, words: Mapping[str, ast.expr], found: Mapping[str, Any], questions: list[Question], started: Path | None
) -> dict[str, Any]:
    """What deepspeed.initialize is given: its configuration as a mapping, a file, or an option of the command; an optimizer of the
    loop goes before the one that this names.  [deepspeed, __init__.py: initialize; runtime/engine.py: _configure_optimizer]"""
    node, said = words.get("config", words.get("config_params")), program.said.setting("deepspeed")
    value = program.said.setting("deepspeed_config") if node is None else program.value(node)
    if said and said.lower() not in ("true", "false"):
        value, node = said, None
    places = [one for one in (started, program.path) if one is not None and isinstance(value, str) and not is_open(value)]
    if (file := next(filter(None, (beside(one, str(value)) for one in places)), None)) is not None:
        value = file_settings(file, "a DeepSpeed configuration")
    own = not _is_none(words.get("optimizer"))
    loaded = found[BATCH] if _is_none(words.get("training_data")) else None  # else the engine makes the loader
    if isinstance(value, str) and not is_open(value):  # a file that is not there, or a word for its ZeRO
        return {"bf16": gap(["bf16"]), STEPS: gap([STEPS]), BATCH: loaded or gap([BATCH]), "deepspeed": value}
    written = value if isinstance(value, Mapping) and _is_whole(program, node) else None
    config = {} if written is None else dict(_closed(program, _with_puts(program, node, written), questions))
    if written is None or any(one.name == "deepspeed" for one in questions):
        named = {*roots(value)} - {UNNAMED} if node is None and isinstance(value, str) else set()  # variables of its command
        questions[:] = [] if named else [Question(name="deepspeed", about=OWN_JSON, choices=("FILE", "zero3", "zero2"))]
        return {"deepspeed": value if named else "zero3", BATCH: loaded if isinstance(loaded, int) else 1,
                "optim": found["optim"] if own else None}  # fmt: skip
    for name in ("bf16", "fp16", "optimizer", "zero_optimization", "tensor_parallel"):
        if not isinstance(section := config.get(name) or {}, Mapping):
            raise PlannerError(f"{program.path}: {name} of DeepSpeed is {shown(section)}; it must be a section of settings")
    config["optimizer"] = {} if own else {"type": (config.get("optimizer") or {}).get("type")}
    whole, micro, steps = (
        number if isinstance(number := config.pop(name, None), int) else None
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", STEPS)
    )
    batch, dp = micro if loaded is None else loaded, program.said.num_gpus
    if whole and dp:  # [runtime/config.py: _set_batch_related_parameters]
        tp = (config.get("tensor_parallel") or {}).get("autotp_size")
        dp = quotient(dp, tp if isinstance(tp, int) else 1, f"{program.path}: GPUs by autotp_size")
        each = quotient(whole, dp * (micro or 1) * (steps or 1), f"{program.path}: train_batch_size by the GPUs and the other keys")
        if micro and steps and each > 1:
            raise PlannerError(f"{program.path}: train_batch_size is {whole}, but {micro} x {steps} x {dp} are {whole // each}")
        batch, steps = (each if micro is None and batch is None else batch), steps or (each if micro else 1)
    named = config["optimizer"].get("type")
    precision = next((one for one in ("bf16", "fp16") if (config.get(one) or {}).get("enabled") is True), "no")
    batch = batch if isinstance(batch, int) else micro or batch or gap([BATCH])
    auto = any((config.get(one) or {}).get("enabled") == "auto" for one in ("bf16", "fp16"))
    words_of = {"bf16": gap(["bf16"])} if auto else {"mixed_precision": precision}
    return {"deepspeed": config, BATCH: batch, STEPS: steps or 1, **words_of,
            "optim": found["optim"] if own or not named else str(named).lower()}  # fmt: skip


def _with_puts(program: Running, node: ast.expr | None, value: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what the program puts into it and its sections: config["zero_optimization"]["stage"] = 3."""
    found = copy.deepcopy(dict(value))
    for put in sorted((one for one in ast.walk(program.tree) if isinstance(one, ast.Assign)), key=lambda one: one.lineno):
        slices, place = list[ast.expr](), put.targets[0]
        while isinstance(place, ast.Subscript):
            slices, place = [place.slice, *slices], place.value
        same = node is not None and slices and ast.unparse(place) == ast.unparse(node)
        if same and program.may_run(put.value):
            keys = [str(program.value(one)) for one in slices]
            part: Any = found
            for key in keys[:-1]:
                part[key] = part = part[key] if isinstance(part.get(key), dict) else {}
            new = program.value(put.value)
            part[keys[-1]] = new if part.get(keys[-1]) == new or program.settled(put.value, None) else gap([keys[-1]])
    return found


def _closed(program: Running, value: Mapping[str, Any], questions: list[Question]) -> Iterator[tuple[str, Any]]:
    """A configuration whose unknown values are answered, asked for where they decide, or left out."""
    for name, one in value.items():
        if isinstance(one, Mapping):
            yield name, dict(_closed(program, one, questions))
        elif not (isinstance(one, str) and is_open(one)):
            yield name, one
        elif WHOLE.fullmatch(name):
            questions.append(Question(name="deepspeed"))
        elif (said := program.said.setting(name)) is not None:
            yield name, value_of(said)
        elif DECIDING.fullmatch(name):
            named = next((root for root in roots(one) if root != UNNAMED), name)
            about = f"{name} of the configuration of DeepSpeed that the program makes"
            questions.append(Question(name=named, about=about, choices=("0", "1", "2", "3") if name == "stage" else ()))


def _is_whole(program: Running, node: ast.expr | None) -> bool:
    """Whether nothing is spread or put into a configuration, nor by a function that makes it or is handed it, that is not known."""
    name, made = ast.unparse(node) if node is not None else "?", list(ast.walk(held_by(program, node) or ast.Module([], [])))
    makers = [program.functions.get(last_name(one.func)) for one in made if isinstance(one, ast.Call)]
    made += [part for one in makers if one is not None for part in ast.walk(one)]
    spread = [value for it in made if isinstance(it, ast.Dict) for key, value in zip(it.keys, it.values, strict=True) if not key]
    deep: list[ast.AST] = [one for one in made if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).count("[") > 1]
    for one in (*program.calls("update", "setdefault", "pop"), *made):
        owner = ast.unparse(one.func.value) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) else ""
        own = one in made and last_name(getattr(one, "func", one)) in ("dict", "setdefault", "update")
        if isinstance(one, ast.Call) and (own or owner == name):
            spread += [*one.args[:1], *(word.value for word in one.keywords if word.arg is None)]
        elif isinstance(one, ast.Call) and owner.startswith(f"{name}["):  # into a section, which is not followed
            return False
    handed = (one.value for one in ast.walk(program.tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
    deep += [one for one in handed if last_name(one.func) in program.functions and name in map(ast.unparse, one.args)]
    return not deep and all(isinstance(program.value(one), Mapping) for one in spread)


def _own(program: Running, wraps: Sequence[ast.Call]) -> str:
    return f"{program.path}: a training loop of its own ({_place(wraps)})"


def _place(wraps: Sequence[ast.Call]) -> str:
    line = f", line {wraps[0].lineno}" if wraps[0].lineno < FAR else ""  # else of another file
    return f"{last_name(wraps[0].func)}{line}"


def known_loop(program: WithModules, looped: bool) -> list[str]:
    """Notes about a loop of a program's own. Raises PlannerError for one that no plan is of."""
    wraps = wraps_of(program)
    _require_known_loop(program, wraps, looped)
    puts = [one for one in ast.walk(program.tree) if isinstance(one, ast.Assign) and is_handed_on(program, one)]
    handed = [HANDED_ON.format(ast.unparse(one.targets[0]), last_name(getattr(one.value, "func", one)) or "a function")
              for one in puts if program.may_run(one.value)]  # fmt: skip
    return [OWN.format(_place(wraps)), *handed]


def _of_another_step(program: Running, node: ast.AST) -> str:
    """A name of another step that holds more than a constant."""
    used = isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    name = last_name(node) if used else ""
    return name if OTHER_STEPS.fullmatch(name) and not isinstance(held_by(program, node), ast.Constant) else ""  # type: ignore[arg-type]


def _require_known_loop(program: Running, wraps: Sequence[ast.Call], looped: bool) -> None:
    """Raises PlannerError for a loop whose step or whose degrees are others than those of one language model under data parallel,
    or which is none."""
    every = _of_libraries(Script.calls(program, *WRAPPERS))
    if not wraps:
        tests = {ast.unparse(test)[:80]: test for one in every[:1] for test in program.conditions(one)}
        parts = [part for test in tests.values() for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute)]
        say = f"say --set {last_name(parts[0])}=VALUE" if parts else "set them"
        why = f"runs under {' and '.join(tests)}, which its options do not meet: {say}" if tests else "wraps no model here"
        raise PlannerError(f"{program.path}: {last_name(every[0].func) if every else 'it'} {why}")
    own = _own(program, wraps)
    other = next((name for one in ast.walk(program.tree) if (name := _of_another_step(program, one))), None)
    if not program.calls("backward"):
        raise PlannerError(f"{own}, whose backward pass is in no file here; {WAY_OUT}")
    if not looped:
        whose = "a loop over accelerate" if program.calls("Accelerator") else "a trainer has its loop"
        raise PlannerError(f"{program.path}: {whose}; import the command that starts it")
    if split := program.calls(*SPLITS):
        raise PlannerError(f"{own} splits the model by {last_name(split[0].func)}, whose degrees are not read; {WAY_OUT}")
    if other is not None:
        raise PlannerError(f"{own} runs other models or another step beside it ({other[:60]}), which is not read; {WAY_OUT}")
    if "hydra.main" in ast.unparse(program.tree):
        raise PlannerError(f"{own} takes its settings from a configuration of hydra, which is not read; {WAY_OUT}")

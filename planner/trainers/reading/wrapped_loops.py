"""Loops that people write over torch or DeepSpeed: what wraps the model, and what their data loader, optimizer and passes say."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.accelerators import OTHER_DATA, STEPS, loaders_of, of_loop, optimizer_of
from planner.trainers.reading.given import Question, value_of
from planner.trainers.reading.own_parts import held_by
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import BATCH
from planner.trainers.reading.settings import beside, file_settings
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.training_scripts import FOREIGN, TRAINERS

WRAPPERS = {"FullyShardedDataParallel": "fsdp1", "FSDP": "fsdp1", "fully_shard": "fsdp2", "DistributedDataParallel": "ddp",
            "DDP": "ddp", "initialize": "deepspeed"}  # fmt: skip
"""What a loop hands its model to -> how it is split."""
SPLITS = ("parallelize_module", "context_parallel", "PipelineStage", "PipelineModule", "ScheduleGPipe", "Schedule1F1B",
          "tp_model_init", "initialize_model_parallel")  # fmt: skip
"""Calls that split a model in other ways, by degrees that are not followed to here."""
OTHER_STEPS = re.compile(r"(?i)(.*_)?(advantages?|rewards?|old_log_?probs?|teacher(_model)?|distill\w*|ref(erence)?_(model|log_?probs?)|rollouts?)")
"""Names of a step that runs other models too, or generates."""
CHECKPOINTS = ("apply_activation_checkpointing", "checkpoint_wrapper")
DECIDING = re.compile(r"stage|device|enabled|type|train_\w*batch_size\w*|gradient_accumulation_steps|autotp_size")
"""Keys of DeepSpeed that decide degrees, memory or the batch."""
FULL, HALVES = "full_shard", {"bfloat16": "bf16", "float16": "fp16"}
ONE_UNIT = "one_unit"


def wraps_of(program: Running) -> list[ast.Call]:
    """Calls that wrap a model: those that surely run, else those that may."""
    found = [one for one in program.calls(*WRAPPERS) if last_name(one.func) != "initialize" or _of_deepspeed(program, one)]
    return [one for one in found if program.runs(one)] or found


def _of_deepspeed(program: Running, call: ast.Call) -> bool:
    owner = getattr(call.func, "value", None)
    taken = (one for one in ast.walk(program.tree) if isinstance(one, ast.ImportFrom) and one.module == "deepspeed")
    return last_name(owner) in ("deepspeed", "ds") if owner is not None else any(one.names[0].name == "initialize" for one in taken)


def loop_of(program: Running) -> dict[str, Any]:
    """Arguments, as those of transformers are called, that a loop over accelerate, torch or DeepSpeed gives itself; empty where a
    trainer has the loop. Its notes and questions stand under loop_notes and loop_questions."""
    wraps = wraps_of(program)
    bare = {one.name for one in ast.walk(program.tree) if isinstance(one, ast.ClassDef) and not one.bases}
    trainers = [one for one in program.calls(*TRAINERS, *FOREIGN) if last_name(one.func) not in bare]
    if (found := of_loop(program)) or not wraps or trainers:
        return found
    kinds = list(dict.fromkeys(WRAPPERS[last_name(one.func)] for one in wraps))
    kind, questions, notes = kinds[0] if len(kinds) == 1 else "", list[Question](), list[str]()
    steps = _steps(program)
    found = {"own_loop": True, "wrapped": kind, BATCH: _batch(program), "optim": optimizer_of(program) or gap(["optim"])}
    found["sync_each_batch"] = not program.calls("no_sync", "set_requires_gradient_sync", "set_is_last_backward")
    if kind == "deepspeed":
        found |= _of_engine(program, wraps[0], found, questions)
    else:
        found |= {STEPS: steps, **_precision(program, kind, wraps)}
        found |= {"fsdp_config": {"auto_wrap_policy": ""}} | _of_fsdp(program, kind, wraps, found) if kind != "ddp" else {}
        found |= _of_mesh(program, wraps) if kind != "ddp" else {}
        found |= {BATCH: gap([BATCH])} if not isinstance(found[BATCH], int | str) else {}
    if str(found.get("fsdp", "")) == gap(["fsdp"]):
        about = f"its loop may wrap the model by {', '.join(dict.fromkeys(last_name(one.func) for one in wraps))}"
        questions.append(Question(name="fsdp", about=about, choices=(FULL, "shard_grad_op", "no_shard")))
    if kind == "ddp" and steps != 1 and found["sync_each_batch"]:
        notes.append("its loop runs every pass without no_sync: gradients are reduced in each, priced once a step: communication "
                     "comes out too short")  # fmt: skip
    if kind == "ddp" and any(program.keywords(one).get("gradient_as_bucket_view") is True for one in wraps):
        notes.append("gradient_as_bucket_view: buckets of gradients are priced beside them: memory comes out too high by 4 bytes a "
                     "trained weight")  # fmt: skip
    for put in (one for one in ast.walk(program.tree) if isinstance(one, ast.Assign) and program.may_run(one.value)):
        if isinstance(put.targets[0], ast.Attribute) and put.targets[0].attr == "gradient_checkpointing":  # of the model itself
            found["gradient_checkpointing"] = program.value(put.value)
    made = [one for one in program.calls(*CHECKPOINTS) if last_name(one.func) == CHECKPOINTS[0] or _in_a_loop(program, one)]
    if made:
        sure = any(program.runs(one) for one in made)
        found["gradient_checkpointing"] = True if sure else gap(["gradient_checkpointing"])
    if host := program.calls("offload_wrapper"):
        found["activation_offloading"] = True if any(map(program.runs, host)) else gap(["activation_offloading"])
    return {name: value for name, value in found.items() if value is not None} | {"loop_notes": notes, "loop_questions": questions}


def _in_a_loop(program: Running, call: ast.Call) -> bool:
    loops = (one for one in ast.walk(program.tree) if isinstance(one, ast.For | ast.ListComp | ast.While))
    return any(part is call for one in loops for part in ast.walk(one))


# --------------------------------------------------------------------------------------------------------------------- FSDP


def _of_fsdp(program: Running, kind: str, wraps: list[ast.Call], found: Mapping[str, Any]) -> dict[str, Any]:
    """What splits weights.  [torch, distributed/fsdp: fully_sharded_data_parallel.py, _fully_shard/_fully_shard.py]"""
    words = _words(program, wraps[-1])
    if not kind or "**" in words:
        return {"fsdp": gap(["fsdp"])}
    inner = [_in_a_loop(program, one) for one in program.calls(*WRAPPERS) if WRAPPERS[last_name(one.func)] == kind]
    if kind == "fsdp2":
        after = words.get("reshard_after_forward")
        stays = program.value(after) if after is not None else True
        strategy = FULL if stays is True or stays is None else "shard_grad_op" if stays is False else gap(["fsdp"])
        host, one_unit = "offload_policy" in words and _made(program, "CPUOffloadPolicy"), not any(inner)
    else:
        strategy = _strategy(program, words.get("sharding_strategy"))
        host = "cpu_offload" in words and _made(program, "CPUOffload")
        policy = words.get("auto_wrap_policy")
        one_unit = not any(inner) and (policy is None or _is_none(policy)) and not program.calls("wrap", "enable_wrap", "auto_wrap")
    section = {"auto_wrap_policy": "", **({"offload_params": host} if host else {})}
    return {"fsdp": gap(["fsdp"]) if is_open(strategy) else f"{strategy} auto_wrap", "fsdp_config": section, ONE_UNIT: one_unit}


def _of_mesh(program: Running, wraps: list[ast.Call]) -> dict[str, Any]:
    """Replicas of groups, by a mesh of two dimensions. Raises PlannerError for one of other degrees."""
    for call in program.calls("init_device_mesh"):
        words = program.keywords(call)
        sizes = words.get("mesh_shape", program.value(call.args[1]) if len(call.args) > 1 else None)
        names = [str(one) for one in words.get("mesh_dim_names") or []]
        if not isinstance(sizes, list) or len(sizes) < 2:
            continue
        groups = len(sizes) == 2 and (not names or "rep" in names[0] or (names[0][:2] == "dp" and re.search("shard|fsdp", names[1])))
        if not groups:
            raise PlannerError(f"{_own(program, wraps)} has a mesh of {', '.join(names)[:80]}, whose degrees are not read; {WAY_OUT}")
        named = {"dp_replicate_size": sizes[0], "dp_shard_size": sizes[1]}
        return {"parallelism_config": {name: one if isinstance(one, int) else gap([name]) for name, one in named.items()}}
    return {}


def _words(program: Running, call: ast.Call) -> dict[str, ast.expr]:
    """Keywords of a call, with those of a mapping that is written out; '**' stands for one that is not followed to here."""
    found = {one.arg: one.value for one in call.keywords if one.arg is not None}
    for one in (one.value for one in call.keywords if one.arg is None):
        made = held_by(program, one)
        if isinstance(made, ast.Dict) and None not in made.keys:
            found |= {str(program.value(key)): value for key, value in zip(made.keys, made.values, strict=True) if key is not None}
        elif isinstance(made, ast.Call) and last_name(made.func) == "dict" and not made.args:
            found |= {one.arg: one.value for one in made.keywords if one.arg is not None}
        else:
            found["**"] = one
        for put in (node for node in ast.walk(program.tree) if isinstance(node, ast.Assign)):
            place = put.targets[0]
            if isinstance(place, ast.Subscript) and ast.unparse(place.value) == ast.unparse(one) and program.may_run(put.value):
                found[str(program.value(place.slice))] = put.value
    return found


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _strategy(program: Running, node: ast.expr | None) -> str:
    """The name of a sharding strategy: the one that is named, or the only one that the program may take."""
    if node is None or _is_none(node):
        return FULL
    named = [one for one in ast.walk(held_by(program, node) or node) if isinstance(one, ast.Attribute)]
    named = [one for one in named if last_name(one.value) == "ShardingStrategy"]
    if not named:
        named = [one for one in ast.walk(program.tree) if isinstance(one, ast.Attribute) and last_name(one.value) == "ShardingStrategy"]
    names = {one.attr.lower() for one in named if program.may_run(one)}
    return names.pop() if len(names) == 1 else gap(["fsdp"])


def _made(program: Running, name: str) -> bool | str:
    """Whether an offload to the host is made that is on."""
    calls = [one for one in program.calls(name) if program.keywords(one).get("offload_params", True) is not False]
    return any(program.runs(one) for one in calls) or (gap(["offload_params"]) if calls else False)


def _precision(program: Running, kind: str, wraps: list[ast.Call]) -> dict[str, Any]:
    """Dtypes of products and of reductions: of a policy of FSDP, or of autocast over weights as they lie."""
    words = {name: node for one in wraps for name, node in _words(program, one).items()}
    policy = words.get("mixed_precision" if kind == "fsdp1" else "mp_policy")
    made = program.calls("MixedPrecision", "MixedPrecisionPolicy") if policy is not None and not _is_none(policy) else []
    given = [program.keywords(one) for one in made]
    pairs = {(str(one.get("param_dtype")), str(one.get("reduce_dtype"))) for one in given}
    sure = all(program.runs(one) for one in made)
    if "**" in words or not kind or len(pairs) > 1 or (pairs and not sure) or (policy is not None and not _is_none(policy) and not made):
        return {"bf16": gap(["bf16"])}
    param, reduces = next(iter(pairs), ("None", "None"))
    casts = _autocast(program) if param in ("None", "float32") else HALVES.get(param, gap(["bf16"]))
    if is_open(casts):
        return {"bf16": gap(["bf16"])}
    reduced = reduces if reduces != "None" else param
    return {"mixed_precision": casts, "reduce_dtype": "bf16" if reduced in HALVES else "fp32" if reduced == "float32" else None,
            "casts_each": param == "None" and casts != "no" or None}  # fmt: skip


def _autocast(program: Running) -> str:
    """The precision of autocast around the passes, 'no' = there is none; of CUDA it is fp16 where nothing is said."""
    kinds = set()
    for call in program.calls("autocast"):
        words = program.keywords(call)
        if (on := words.get("enabled", True)) is False:
            continue
        given = [value for one in call.args if (value := program.value(one)) in ("bfloat16", "float16", "float32")]
        dtype = words.get("dtype", next(iter(given), "float16"))
        kinds.add(HALVES.get(str(dtype), gap(["bf16"])) if on is True else gap(["bf16"]))
    return "no" if not kinds else kinds.pop() if len(kinds) == 1 else gap(["bf16"])


# ---------------------------------------------------------------------------------------------------------------- DeepSpeed


def _of_engine(program: Running, call: ast.Call, found: Mapping[str, Any], questions: list[Question]) -> dict[str, Any]:
    """What deepspeed.initialize is given: its configuration as a mapping, a file, or an option of the command; an optimizer of the
    loop goes before the one that this names.  [deepspeed, __init__.py: initialize; runtime/engine.py: _configure_optimizer]"""
    words = _words(program, call)
    node = words.get("config", words.get("config_params"))
    value = program.value(node) if node is not None else program.said.setting("deepspeed_config") or gap(["deepspeed_config"])
    if (said := program.said.setting("deepspeed")) is not None:
        value = said
    if isinstance(value, str) and not is_open(value) and (file := beside(program.path, value)) is not None:
        value = file_settings(file, "a DeepSpeed configuration")
    client = words.get("optimizer")
    own = client is not None and not _is_none(client)
    if not isinstance(value, Mapping):  # a name, or what is not followed to here
        if not isinstance(value, str) or is_open(value):
            questions.append(Question(name="deepspeed", about=OWN_JSON, choices=("FILE", "zero3", "zero2")))
            return {"deepspeed": "zero3", BATCH: found[BATCH] if isinstance(found[BATCH], int) else 1, "optim": found["optim"] if own else None}
        return {"bf16": gap(["bf16"]), STEPS: gap([STEPS]), BATCH: found[BATCH] or gap([BATCH]), "deepspeed": value}
    config = dict(_closed(program, value, questions))
    precision = next((one for one in ("bf16", "fp16") if (config.get(one) or {}).get("enabled") is True), "no")
    if own:
        config.pop("optimizer", None)
    numbers = {name: value for name, value in config.items() if isinstance(value, int)}
    steps, micro = numbers.get(STEPS), numbers.get("train_micro_batch_size_per_gpu")
    batch = found[BATCH] if isinstance(found[BATCH], int) else micro if micro is not None else found[BATCH] or gap([BATCH])
    whole, gpus = numbers.get("train_batch_size"), program.said.num_gpus
    if steps is None and whole and isinstance(micro or batch, int):
        steps = max(whole // ((micro or batch) * (gpus or whole)), 1)
    if micro is None and whole and steps and found[BATCH] is None and gpus:
        batch = max(whole // (steps * gpus), 1)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", STEPS):
        config.pop(name, None)
    named = (config.get("optimizer") or {}).get("type")
    return {"deepspeed": config, BATCH: batch, STEPS: steps or 1, "mixed_precision": precision,
            "optim": found["optim"] if own or not named else str(named).lower()}  # fmt: skip


OWN_JSON = (
    "the JSON that its loop hands to deepspeed.initialize; or its ZeRO, and with it --set per_device_train_batch_size=M --set "
    "gradient_accumulation_steps=N --set bf16=true"
)


def _closed(program: Running, value: Mapping[str, Any], questions: list[Question]) -> Iterator[tuple[str, Any]]:
    """A configuration whose unknown values are answered, asked for where they decide, or left out."""
    for name, one in value.items():
        if isinstance(one, Mapping):
            yield name, dict(_closed(program, one, questions))
        elif not (isinstance(one, str) and is_open(one)):
            yield name, one
        elif (said := program.said.setting(name)) is not None:
            yield name, value_of(said)
        elif DECIDING.fullmatch(name):
            questions.append(Question(name=name, about="of the configuration of DeepSpeed that the program makes"))


# ----------------------------------------------------------------------------------------------------------------- the loop


def _batch(program: Running) -> Any:
    """Sequences of a batch of the loader that is trained on; a gap where loaders differ or leave it open, None = there is none."""
    sizes: list[Any] = []
    for one in loaders_of(program):
        words = {word.arg: word.value for word in one.keywords}
        node = words.get("batch_size", one.args[1] if len(one.args) > 1 else None)
        if node is None:
            sizes.append(gap([BATCH]) if {"batch_sampler", None} & {*words} else 1)
        else:
            sizes += [program.value(each) for each in _given(program, one, node)]
    known = {one for one in sizes if isinstance(one, int)}
    return None if not sizes else known.pop() if len(known) == 1 and all(isinstance(one, int) for one in sizes) else gap([BATCH])


def _given(program: Running, loader: ast.Call, node: ast.expr) -> list[ast.expr]:
    """What a batch is: itself, or what the function that makes the loader is given for it, where that makes those of other data too."""
    calls = program.calls(home) if (home := program.home_of(loader)) and isinstance(node, ast.Name) else []
    made = {id(one.value): one for one in ast.walk(program.tree) if isinstance(one, ast.Assign)}
    trained = [one for one in calls if OTHER_DATA.search(ast.unparse(made.get(id(one), one)).lower()) is None]
    given = [word.value for one in trained for word in one.keywords if word.arg == getattr(node, "id", "")]
    return given if given and len(given) == len(trained) < len(calls) else [node]


STEPPED = re.compile(r"(optim\w*|opt|scaler|engine|model\w*)\.step$")


def _calls_in(node: ast.AST) -> list[str]:
    return [ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]


def _steps(program: Running) -> Any:
    """Backward passes of a step: n of ``(step + 1) % n == 0`` before the optimizer steps, or of a loop that runs passes and does not
    step; 1 where no word of the program is about accumulation."""
    steps = lambda node: any(STEPPED.search(one) for one in _calls_in(node))  # noqa: E731
    for one in (node for node in ast.walk(program.tree) if isinstance(node, ast.If) and program.may_run(node.test)):
        parts = [part for part in ast.walk(one.test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]
        skips = any(isinstance(part, ast.Continue) for part in one.body)
        if parts and (skips or any(steps(part) for part in one.body)):
            return _number(program.value(parts[0].right))
    for loop in (node for node in ast.walk(program.tree) if isinstance(node, ast.For) and program.may_run(node.iter)):
        if any(one.endswith(".backward") for one in _calls_in(loop)) and not steps(loop):
            ranged = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "range" and len(loop.iter.args) == 1
            ends = [loop.iter.args[0]] if ranged and isinstance(loop.iter, ast.Call) else []
            ends += [part.right for part in ast.walk(loop) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)
                     and "loss" in ast.unparse(part.left)]  # fmt: skip
            ends += [part.value for part in ast.walk(loop) if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Div)]
            return next((number for one in ends if isinstance(number := program.value(one), int)), gap([STEPS]))
    return gap([STEPS]) if any("accum" in one.lower() for one in program.names_used()) else 1


def _number(value: Any) -> Any:
    return value if isinstance(value, int) else gap([STEPS])


def _own(program: Running, wraps: list[ast.Call]) -> str:
    return f"{program.path}: a training loop of its own ({_named(wraps)})"


def _named(wraps: list[ast.Call]) -> str:
    return f"{last_name(wraps[0].func)}, line {wraps[0].lineno}"


def require_known_loop(program: Running, wraps: list[ast.Call], looped: bool) -> None:
    """Raises PlannerError for a loop whose step or whose degrees are others than those of one language model under data parallel,
    or which is none."""
    if not wraps:
        idle = Script.calls(program, *WRAPPERS)[:1]
        tests = dict.fromkeys(ast.unparse(test)[:80] for one in idle for test in program.conditions(one))
        why = f"{_named(idle)} runs under {' and '.join(tests)}, which its options do not meet as they are; --set them" if tests else ""
        raise PlannerError(f"{program.path}: {why or 'nothing wraps a model here'}")
    own = _own(program, wraps)
    if not looped:
        raise PlannerError(f"{program.path}: a trainer has its loop ({_named(wraps)} beside it); import the command that starts it")
    if split := program.calls(*SPLITS):
        raise PlannerError(f"{own} splits the model by {last_name(split[0].func)}, whose degrees are not read; {WAY_OUT}")
    if not program.calls("backward"):
        raise PlannerError(f"{own}, whose backward pass is in no file here; {WAY_OUT}")
    other = next((one for one in program.names_used() if OTHER_STEPS.fullmatch(one)), None)
    if other is not None:
        raise PlannerError(f"{own} runs other models or another step beside it ({other[:60]}), which is not read; {WAY_OUT}")
    if "hydra.main" in ast.unparse(program.tree):
        raise PlannerError(f"{own} takes its settings from a configuration of hydra, which is not read; {WAY_OUT}")


WAY_OUT = "say its layout by flags: plan estimate --model NAME --trainer fsdp|deepspeed --gpus N --zero 3 --micro-batch-size M"

"""Loops that people write over accelerate: what their Accelerator, its plugins, their data loader and optimizer say."""

import ast
import re
from typing import Any

from planner.trainers.reading.fine_tuning import OPTIMIZERS
from planner.trainers.reading.python_text import last_name, targets
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import BATCH
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.training_scripts import FOREIGN, TRAINERS

STEPS = "gradient_accumulation_steps"
OTHER_DATA = re.compile(r"(?<![a-z])(eval(uation)?|val(id(ation)?)?|test(ing)?|dev)(_?(set|ds|dl|data\w*|loader))?s?(?![a-z])")
"""Words of data that nothing is trained on."""


def of_loop(program: Running) -> dict[str, Any]:
    """Arguments, as those of transformers are called, that a loop over accelerate gives itself; empty where there is none, or a
    trainer has the loop. What is not known is asked for.  [accelerate, accelerator.py: Accelerator.__init__]"""
    made = program.calls("Accelerator")
    if not made or program.calls(*TRAINERS, *FOREIGN):
        return {}
    words = program.keywords(made[0])
    plugin = next((program.keywords(one) for one in program.calls("GradientAccumulationPlugin")), {})
    steps = plugin.get("num_steps", words.get(STEPS))
    found: dict[str, Any] = {"own_loop": True, STEPS: gap([STEPS]) if isinstance(steps, str) else steps}
    found["sync_each_batch"] = plugin.get("sync_each_batch")
    spread = any(one.startswith("**") for one in words)
    word = words.get("mixed_precision", gap(["bf16"]) if spread else None)
    found |= {"bf16": gap(["bf16"])} if isinstance(word, str) and is_open(word) else {"mixed_precision": word}
    split = [words, *(program.keywords(one) for one in program.calls("DataLoaderConfiguration"))]
    found["split_batches"] = True if any(one.get("split_batches") is True for one in split) else None
    found |= _of_plugins(program, words)
    sizes = (program.keywords(one).get("batch_size") for one in loaders_of(program))
    found[BATCH] = next((one for one in sizes if isinstance(one, int)), None)
    found["optim"] = optimizer_of(program)
    return {name: value for name, value in found.items() if value is not None}


def _of_plugins(program: Running, words: dict[str, Any]) -> dict[str, Any]:
    """What splits the model: plugins go before what the launcher says.  [accelerate, utils/dataclasses.py]"""
    engine, sharded = program.calls("DeepSpeedPlugin"), program.calls("FullyShardedDataParallelPlugin")
    if engine and words.get("deepspeed_plugin", words.get("deepspeed_plugins")) is not None:
        said = program.keywords(engine[0])
        if (own := said.get("hf_ds_config")) is not None:
            return {"deepspeed": own if isinstance(own, dict) or not is_open(str(own)) else gap(["deepspeed"])}
        places = {f"offload_{one}": {"device": said.get(f"offload_{one}_device") or "none"} for one in ("optimizer", "param")}
        steps = {STEPS: said[STEPS]} if isinstance(said.get(STEPS), int) else {}
        return {"deepspeed": {"zero_optimization": {"stage": said.get("zero_stage", 2), **places}, **steps}}
    if not sharded or words.get("fsdp_plugin") is None:
        return {}
    named = {one.arg: one.value for one in sharded[0].keywords}
    said = program.keywords(sharded[0])
    kept = ("activation_checkpointing", "fsdp_version", "reshard_after_forward")
    config: dict[str, Any] = {one: said[one] for one in kept if one in said}
    if (strategy := named.get("sharding_strategy")) is not None:
        config["sharding_strategy"] = last_name(strategy) if isinstance(strategy, ast.Attribute) else said["sharding_strategy"]
    if (host := named.get("cpu_offload")) is not None:
        config["offload_params"] = "True" in ast.unparse(host)
    return {"fsdp": "auto_wrap", "fsdp_config": config}


def loaders_of(program: Running) -> list[ast.Call]:
    """Loaders of data that is trained on."""
    return [one for one in program.calls("DataLoader") if not of_other_data(program, one)]


def of_other_data(program: Running, call: ast.Call) -> bool:
    """Whether what a loader is of, stands in or is assigned to is data that nothing is trained on."""
    puts = [target for one in ast.walk(program.tree) for target, value in targets(one) if value is call]
    data = [*puts, *(one.value for one in call.keywords if one.arg and "data" in one.arg)]
    data += [one for one in call.args if one is call.args[0] or isinstance(one, ast.Constant)]
    return OTHER_DATA.search(" ".join([program.home_of(call), *map(ast.unparse, data)]).lower()) is not None


def batch_of(program: Running) -> Any:
    """Sequences of a batch of the loader that is trained on; a gap where loaders differ or leave it open, None = there is none."""
    sizes: list[Any] = []
    for one in loaders_of(program):
        words = {word.arg: word.value for word in one.keywords}
        node = words.get("batch_size", one.args[1] if len(one.args) > 1 else None)
        unsaid = [gap([BATCH]) if {"batch_sampler", None} & {*words} else 1]
        sizes += unsaid if node is None else [program.value(each) for each in _given(program, one, node)]
    known = {one for one in sizes if isinstance(one, int)}
    return None if not sizes else known.pop() if len(known) == 1 and all(isinstance(one, int) for one in sizes) else gap([BATCH])


def _given(program: Running, loader: ast.Call, node: ast.expr) -> list[ast.expr]:
    """What a batch is: itself, or what a function that makes loaders of other data too is given for it."""
    calls = program.calls(program.home_of(loader) or "-") if isinstance(node, ast.Name) else []
    trained = [one for one in calls if not of_other_data(program, one)]
    given = [word.value for one in trained for word in one.keywords if word.arg == getattr(node, "id", "")]
    return given if given and len(given) == len(trained) < len(calls) else [node]


WRAPS = ("compile", "prepare", "prepare_model", "DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel")
"""Functions of libraries that give a model back as it was trained before."""


def is_handed_on(program: Running, put: ast.Assign) -> bool:
    """Whether a model is what a function makes of it that is neither in the project nor known."""
    held, made = put.targets[0], put.value
    if not (isinstance(held, ast.Name) and isinstance(made, ast.Call) and "model" in held.id.lower()):
        return False
    name = last_name(made.func)
    return any(isinstance(one, ast.Name) and one.id == held.id for one in made.args) and name not in (*WRAPS, *program.functions)


def optimizer_of(program: Running) -> str | None:
    """The optimizer that a loop makes of weights; a gap where several may be meant that keep other states."""
    names = {last_name(one.func) for one in ast.walk(program.tree) if isinstance(one, ast.Call)}
    made = program.calls(*(one for one in names if one.lower() in OPTIMIZERS and one[:1].isupper()))
    names = {last_name(one.func).lower() for one in made}
    if not names:  # under another name: optimizer_class = DeepSpeedCPUAdam if args.offload else FusedAdam
        names = {one.lower() for one in program.names_used() if one.lower() in OPTIMIZERS and one[:1].isupper()}
    kinds = {OPTIMIZERS[one] for one in names}
    return None if not kinds else gap(["optim"]) if len(kinds) > 1 else min(names)

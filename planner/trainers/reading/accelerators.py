"""Loops that people write over accelerate: what their Accelerator, its plugins, their data loader and optimizer say; and how many
passes a loop runs before its optimizer steps."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from planner.trainers.reading.fine_tuning import OPTIMIZERS
from planner.trainers.reading.own_flow import GIVES_BACK
from planner.trainers.reading.own_parts import held_by
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import BATCH
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.training_scripts import FOREIGN, TRAINERS

STEPS = "gradient_accumulation_steps"
OTHER_DATA = re.compile(
    r"(?<![a-z])(eval(uation)?|val(id(ation)?)?|test(ing)?|dev|heldout|held_out)(set|ds|dl|data\w*|loader\w*|batch\w*)?(?![a-z])"
)
"""Words of data that nothing is trained on."""
OUTPUTS = ("loss", "logits")
"""What a loop takes from what a model of transformers gives out."""


def of_loop(program: Running) -> dict[str, Any]:
    """Arguments, as those of transformers are called, that a loop over accelerate gives itself; empty where there is none, or a
    trainer has the loop. What is not known is asked for.  [accelerate, accelerator.py: Accelerator.__init__]"""
    made = program.calls("Accelerator")
    others = [last_name(one.targets[0]) for one in ast.walk(program.tree) if isinstance(one, ast.Assign)
              and isinstance(one.value, ast.Name | ast.Attribute) and last_name(one.value) in TRAINERS]  # Own = Trainer
    if not made or program.calls(*TRAINERS, *FOREIGN, *others):
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
    found["keeps_outputs"] = keeps_outputs(program)
    return {name: value for name, value in found.items() if value is not None}


def keeps_outputs(program: Running) -> bool:
    """Whether what the model gave out is still a variable, with all its scores, while the backward pass runs."""
    for block in (program.tree, *(one for one in ast.walk(program.tree) if isinstance(one, ast.FunctionDef))):
        functions = [one for one in ast.walk(block) if isinstance(one, ast.FunctionDef) and one is not block]
        inner = {id(part) for one in functions for part in ast.walk(one)}
        nodes = [one for one in ast.walk(block) if id(one) not in inner]
        made = {one.targets[0].id for one in nodes if isinstance(one, ast.Assign)
                and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Call)}  # fmt: skip
        read = {one.value.id for one in nodes if isinstance(one, ast.Attribute) and one.attr in OUTPUTS
                and isinstance(one.value, ast.Name)}  # fmt: skip
        read |= {one.value.id for one in nodes if isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name)
                 and getattr(one.slice, "value", None) in OUTPUTS}  # fmt: skip
        passes = any(isinstance(one, ast.Call) and last_name(one.func) == "backward" for one in nodes)
        if passes and made & read:
            return True
    return False


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
    made = {id(one.value): ast.unparse(one.targets[0]) for one in ast.walk(program.tree) if isinstance(one, ast.Assign)}
    calls = [(one, ast.Call(one.func, one.args[:1], [word for word in one.keywords if word.arg == "dataset"]))
             for one in program.calls("DataLoader")]  # fmt: skip
    about = [f"{made.get(id(one), '')} {program.home_of(one)} {ast.unparse(short)}" for one, short in calls]
    return [one for (one, _), text in zip(calls, about, strict=True) if OTHER_DATA.search(text.lower()) is None]


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
    made = {id(one.value): one for one in ast.walk(program.tree) if isinstance(one, ast.Assign)}
    trained = [one for one in calls if OTHER_DATA.search(ast.unparse(made.get(id(one), one)).lower()) is None]
    given = [word.value for one in trained for word in one.keywords if word.arg == getattr(node, "id", "")]
    return given if given and len(given) == len(trained) < len(calls) else [node]


def is_handed_on(program: Running, put: ast.Assign) -> bool:
    """Whether a model is what a function makes of it that is neither in the project nor known."""
    held, made = put.targets[0], put.value
    if not (isinstance(held, ast.Name) and isinstance(made, ast.Call) and "model" in held.id.lower()):
        return False
    name = last_name(made.func)
    known = name in program.functions or GIVES_BACK.fullmatch(name) is not None
    return any(isinstance(one, ast.Name) and one.id == held.id for one in made.args) and not known


def optimizer_of(program: Running) -> str | None:
    """The optimizer that a loop makes of weights; a gap where several may be meant that keep other states."""
    names = {last_name(one.func) for one in ast.walk(program.tree) if isinstance(one, ast.Call)}
    made = program.calls(*(one for one in names if one.lower() in OPTIMIZERS and one[:1].isupper()))
    names = {last_name(one.func).lower() for one in made}
    if not names:  # under another name: optimizer_class = DeepSpeedCPUAdam if args.offload else FusedAdam
        names = {one.lower() for one in program.names_used() if one.lower() in OPTIMIZERS and one[:1].isupper()}
    kinds = {OPTIMIZERS[one] for one in names}
    if kinds == {"adam"} and made and all(program.keywords(one).get("fused") is True for one in made):
        return "adamw_torch_fused"
    return None if not kinds else gap(["optim"]) if len(kinds) > 1 else min(names)


ACCUMULATES = re.compile(r"accum(?!\w*(token|loss|time|count|metric|correct|sample))")


def passes_of(program: Running) -> Any:
    """Passes of a step: n of ``(step + 1) % n == 0`` before the optimizer steps, or of a loop that runs passes and does not step; 1
    where no word of the program is about accumulation."""
    nodes = [one for one in ast.walk(program.tree) if isinstance(one, ast.If | ast.For)]
    blocks = [block for one in ast.walk(program.tree) for name in ("body", "orelse", "finalbody")
              if isinstance(block := getattr(one, name, None), list)]  # fmt: skip
    for one, rest in ((one, block[at + 1 :]) for block in blocks for at, one in enumerate(block) if isinstance(one, ast.If)):
        for test in one.test.values if isinstance(one.test, ast.BoolOp) else [one.test]:
            every, fires = _every(held_by(program, test))
            left = one.orelse or (rest if isinstance(one.body[-1], ast.Continue) else [])
            updates = every is not None and any(_updates(program, each) for each in (one.body if fires else left))
            if every is not None and updates and program.may_run(one.test):
                return _first([program.value(every)])
    if not _updates(program, program.tree):
        return gap([STEPS])
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        if ".backward(" in ast.unparse(loop) and not _updates(program, loop) and program.may_run(loop.iter):
            filled = (one for one in nodes if isinstance(one, ast.For) and f"{ast.unparse(loop.iter)}.append(" in ast.unparse(one))
            over = [one.iter for one in (loop, *filled) if isinstance(one, ast.For)]
            ends = [one.args[-1] for one in over if isinstance(one, ast.Call) and last_name(one.func) == "range"]
            ends += [part.right for part in ast.walk(loop) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)
                     and "loss" in ast.unparse(part.left)]  # fmt: skip
            ends += [part.value for part in ast.walk(loop) if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Div)]
            return _first([program.value(one) for one in ends])
    return gap([STEPS]) if any(ACCUMULATES.search(one.lower()) for one in program.names_used()) else 1


def _every(test: ast.expr | None) -> tuple[ast.expr | None, bool]:
    """(n, whether it holds at each nth) of a condition on what a count of passes leaves: (step + 1) % n == 0, step % n."""
    fires = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    test = test.operand if isinstance(test, ast.UnaryOp) and fires else test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        fires = fires is not isinstance(test.ops[0], ast.Eq)
        test = None if not fires and isinstance(test.comparators[0], ast.Name | ast.Attribute) else test.left  # != rank
    divides = isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod)
    return (test.right if isinstance(test, ast.BinOp) and divides else None, fires)


def _updates(program: Running, node: ast.AST) -> bool:
    """Whether weights are updated in it: by a step of what is no scheduler, or by a function of the program that takes one."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    named = [last_name(one) for one in calls if isinstance(one, ast.Name) or ast.unparse(one).startswith("self.")]
    text = " ".join(map(ast.unparse, [node, *(program.functions[one] for one in named if one in program.functions)]))
    return re.search(r"(?i)\b(?!\w*(?:sched|prof|lr|warmup|env|ema|bar))\w+(?:\[\w+\])?\.step\(", text) is not None


def _first(values: Sequence[Any]) -> Any:
    return next((one for one in values if isinstance(one, int)), gap([STEPS]))

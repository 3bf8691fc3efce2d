"""What a Python script makes itself beside its trainer: an optimizer, a model of other sizes, a compiled model, fused losses."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.trainers.reading import own_methods, own_weights
from planner.trainers.reading.derived import classes_of, lineage, methods_of
from planner.trainers.reading.fine_tuning import OPTIMIZERS
from planner.trainers.reading.given import Given, Question, value_of
from planner.trainers.reading.kernels import OWN_LOSS
from planner.trainers.reading.model_notes import FEW
from planner.trainers.reading.own_classes import model_loads, own_loss
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import gap

SIZES = re.compile(
    "num_hidden_layers|hidden_size|intermediate_size|moe_intermediate_size|num_attention_heads|num_key_value_heads|head_dim"
    "|num_(local_)?experts|n_layers?|n_embd|n_heads?|num_layers"
)
"""Fields of a model's configuration that its presets have."""


def parts_of(script: Running, trainers: Sequence[ast.Call], loads: Sequence[ast.Call]) -> dict[str, Any]:
    """Arguments of transformers that stand for what the script makes itself; ``loads`` of its model."""
    found: dict[str, Any] = {}
    if (named := own_optimizer(script, trainers)) is not None:
        found["optim"] = named
    for call in script.calls("compile"):
        before = not trainers or call.lineno < max(one.lineno for one in trainers)  # behind it the trainer has the other model
        made = call.args[0] if ast.unparse(call.func) == "torch.compile" and call.args else getattr(call.func, "value", call.func)
        if "model" in ast.unparse(made) and before:
            found["torch_compile"] = True
    fused = [one for one in script.names_used() if re.fullmatch(r"apply_liger_kernel_to_\w+|AutoLigerKernelForCausalLM", one)]
    applied = [one for name in fused for one in (*script.calls(name), *script.calls("from_pretrained"))
               if last_name(one.func) == name or last_name(getattr(one.func, "value", one)) == name]  # fmt: skip
    words = [script.keywords(one) for one in applied]
    if any(one.get("fused_linear_cross_entropy", True) is True for one in words):
        found["use_liger_kernel"] = True
    elif any(one.get(name, True) is True for one in words for name in ("rms_norm", "swiglu")):
        found["apply_liger_kernel"] = True
    if (kept := own_loss(script, loads, trainers)) is not None:
        found[OWN_LOSS] = script.said.setting(OWN_LOSS) or kept
    if own_weights.own_adapters(script) is not None:
        found["by_hand"] = True
    return found | own_methods.found_in(script, trainers) | added_tokens(script)


def added_tokens(script: Running) -> dict[str, Any]:
    """How many tokens a script adds to the tables of its model, where they may be many; True = the text does not say how many."""
    if not script.calls("resize_token_embeddings"):
        return {}
    if (said := script.said.setting("added_tokens")) is not None:
        return {"added_tokens": value_of(said)}
    given = [call.args[0] for call in script.calls("add_tokens") if call.args and script.may_run(call)]
    if script.calls("add_special_tokens"):
        pairs = [pair for one in ast.walk(script.tree) if isinstance(one, ast.Dict)
                 for pair in zip(one.keys, one.values, strict=True)]  # fmt: skip
        given += [value for key, value in pairs if getattr(key, "value", None) == "additional_special_tokens"]
    counts = [_length(script, one) for one in given]
    if None in counts:
        return {"added_tokens": True}
    count = sum(one for one in counts if one is not None)
    return {"added_tokens": count} if count >= FEW else {}


def _length(script: Running, node: ast.expr, depth: int = 0) -> int | None:
    """How many things a list holds, with what is put into the one that a name holds; None = not known."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return None if any(isinstance(one, ast.Starred) for one in node.elts) else len(node.elts)
    if isinstance(node, ast.ListComp) and len(node.generators) == 1:
        return _times(script, node.generators[0].iter)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_length(script, one, depth) for one in (node.left, node.right)]
        return None if None in both else sum(one for one in both if one is not None)
    if not isinstance(node, ast.Name):
        return 1 if isinstance(node, ast.Constant) or last_name(getattr(node, "func", node)) == "AddedToken" else None
    nodes = list(ast.walk(script.tree))
    made = [one.value for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id]
    count = _length(script, made[-1], depth + 1) if made and depth < 2 else None
    loops = {id(part): loop for loop in nodes if isinstance(loop, ast.For) for one in loop.body for part in ast.walk(one)}
    for call in script.calls("append", "extend"):
        if count is not None and ast.unparse(getattr(call.func, "value", call)) == node.id and call.args:
            each = 1 if last_name(call.func) == "append" else _length(script, call.args[0], depth + 1)
            times = _times(script, loops[id(call)].iter) if id(call) in loops else 1
            count = None if each is None or times is None else count + each * times
    return count


def _times(script: Running, node: ast.expr) -> int | None:
    """How often a loop runs: over a range, or over a list."""
    if not (isinstance(node, ast.Call) and last_name(node.func) == "range"):
        return _length(script, node, 1)
    ends = [script.value(one) for one in node.args]
    return len(range(*ends)) if ends and all(isinstance(one, int) for one in ends) and 0 not in ends[2:] else None


def of_all_branches(script: Running, trainers: Sequence[str]) -> list[ast.Call]:
    """Calls that load the model of a trainer where none of their branches is known to run, as none of the switches of its options
    is on, and they load alike: the first of them. Else none."""
    home = {script.home_of(one) for one in script.calls(*trainers)}
    every = [one for one in model_loads(script, Script.calls(script, "from_pretrained")) if script.home_of(one) in home]
    words = [{name: value for name, value in script.keywords(one).items() if "model" not in name} for one in every]
    return every[:1] if len(every) > 1 and all(one == words[0] for one in words) else []


PATCHES = re.compile(r"(replace|patch|apply|enable|convert)\w*(attn|attention|xformers|flash)|to_bettertransformer", re.IGNORECASE)
"""Functions that put another attention into the classes of a model."""


def attention_put(script: Running, loads: Sequence[ast.Call]) -> bool | None:
    """Whether a program puts flash attention into the class of its model under its options, or surely loads it without; None = it
    has no switch for it."""
    calls = [one for one in ast.walk(script.tree) if isinstance(one, ast.Call) and PATCHES.match(last_name(one.func))]
    given = [(one, [*one.args, *(word.value for word in one.keywords)]) for one in calls if script.runs(one) is not False]
    put = [one for one, words in given if not any("flash" in ast.unparse(word) and script.value(word) is False for word in words)]
    without = any(script.keywords(one).get("use_flash_attention_2") is False for one in loads)  # before transformers 4.36
    return True if put else False if calls or without else None


OF_LIGER = re.compile(r"apply_liger|AutoLiger|use_liger_kernel|\buse_liger=")
"""Where a program hands a switch of its own on to Liger."""


def of_own_switch(script: Running, parts: Mapping[str, Any]) -> bool:
    """Whether use_liger is an option of a program itself that no library is handed, or one whose ``parts`` say what it does."""
    bodies = [one.body for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef)]
    named = any(isinstance(one, ast.AnnAssign) and last_name(one.target) == "use_liger" for body in bodies for one in body)
    known = not {"use_liger_kernel", "apply_liger_kernel", OWN_LOSS}.isdisjoint(parts)
    return named and (known or OF_LIGER.search(ast.unparse(script.tree)) is None)


PARSES = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_args", "parse_yaml_file", "parse_json_file", "parse_dict")
"""Methods that give a program its arguments."""
ARGUMENTS = re.compile(
    "per_device_train_batch_size|gradient_accumulation_steps|gradient_checkpointing|bf16|fp16|optim|deepspeed|fsdp|fsdp_config|packing"
    "|max_length|max_seq_length|model_max_length|use_liger_kernel|torch_compile|padding_free|max_prompt_length|max_completion_length"
)
"""Arguments of transformers and TRL that decide time or memory."""


def put_by(script: Running, trainers: Sequence[ast.Call]) -> dict[str, Any]:
    """Such arguments that a program sets itself on those it has parsed, or gives its trainer beside them, whatever its command
    says."""
    given = {name: value for call in trainers[:1] for name, value in script.keywords(call).items() if ARGUMENTS.fullmatch(name)}
    found = {name: value for name, value in given.items() if isinstance(value, int)}
    for call in script.calls(*PARSES):
        found |= {name: value for name, value in script.set_on(call).items() if ARGUMENTS.fullmatch(name)}
    return found


BY_HAND = ("optimizer", "optimizers", "optimizer_cls_and_kwargs")
"""What a trainer is given, or is set on it, for an optimizer."""
MAKES_OPTIMIZER = ("create_optimizer", "create_optimizer_and_scheduler")
"""Methods of a trainer that make its optimizer."""


def own_optimizer(script: Running, trainers: Sequence[ast.Call]) -> str | None:
    """The optimizer that a trainer is given, or that its class makes, as its constructor is called; a gap where it is not known;
    None = the trainer makes it from its arguments."""
    for call in trainers[:1]:
        words = {one.arg: one.value for one in call.keywords}
        puts = [(one.targets[0], one.value) for one in ast.walk(script.tree) if isinstance(one, ast.Assign)]
        names = [ast.unparse(place) for place, value in puts if value is call]
        set_on = ((one, value) for one, value in puts if isinstance(one, ast.Attribute) and ast.unparse(one.value) in names)
        words |= {one.attr: value for one, value in set_on}
        pair = held_by(script, next((words[one] for one in BY_HAND if one in words), None))
        first = pair.elts[0] if isinstance(pair, ast.Tuple | ast.List) and pair.elts else pair
        first = held_by(script, first)
        if first is not None and not (isinstance(first, ast.Constant) and first.value is None):
            return _named(last_name(first.func if isinstance(first, ast.Call) else first))
        for _, method in methods_of(lineage(last_name(call.func), classes_of(script.tree))[0], MAKES_OPTIMIZER):
            made = [last_name(one.func) for one in ast.walk(method) if isinstance(one, ast.Call)]
            known = [one for one in made if one.lower() in OPTIMIZERS]
            if not set(MAKES_OPTIMIZER) & {*made}:  # that of the class above
                return _named(known[0] if known else "")
    return None


def _named(name: str) -> str:
    return name.lower() if name.lower() in OPTIMIZERS else gap(["optim"])


def held_by(script: Running, node: ast.expr | None) -> ast.expr | None:
    """What a name holds, by its last assignment in the text."""
    if not isinstance(node, ast.Name):
        return node
    made = [one.value for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id]
    return made[-1] if made else node


def other_sizes(script: Running, said: Given) -> list[Question]:
    """What is asked of a model whose configuration the script changes: its sizes are no longer those of its name."""
    loads = [(ast.unparse(one.func), script.keywords(one)) for one in script.calls("from_pretrained")]
    words: list[str] = [name for owner, given in loads if re.search("Config|ForCausalLM", owner) for name in given]
    words += [last_name(one.targets[0]) for one in ast.walk(script.tree)
              if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Attribute)
              and "config" in ast.unparse(one.targets[0]).lower()
              and script.may_run(one.value) and not _of_sizes(one.value)]  # fmt: skip
    changed = next((one for one in words if SIZES.fullmatch(one)), None)
    if changed is None or said.model is not None:
        return []
    about = f"the script sets {changed} of its model's configuration: its config.json, or the nearest preset"
    return [Question(name="--model NAME", about=about)]


def _of_sizes(node: ast.expr) -> bool:
    """Whether a value is made of a size that the model has: config.n_embd = config.hidden_size."""
    return any(isinstance(one, ast.Attribute) and SIZES.fullmatch(one.attr) for one in ast.walk(node))


def default_dtype(script: Running, words: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype that torch makes weights in, where a load says none: torch.set_default_dtype(torch.bfloat16)."""
    if words.get("dtype", words.get("torch_dtype")) is not None:
        return {}
    for call in script.calls("set_default_dtype"):
        if call.args and isinstance(dtype := script.value(call.args[0]), str):
            return {"dtype": dtype}
    return {}

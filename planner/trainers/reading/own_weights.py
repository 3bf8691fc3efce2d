"""Which weights a program trains: parts of a model that it freezes itself, where it makes no adapters."""

import ast
import re
from collections.abc import Iterator

from planner.errors import shown
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running

ADAPTED = ("LoraConfig", "get_peft_model", "prepare_model_for_kbit_training")
"""Calls after which all but adapters is frozen, which is what adapters mean."""
OTHERS = re.compile(r"ref|teacher|reward|vision|visual|tower|image|audio|vae|encoder|old|critic|judge|draft|oracle", re.IGNORECASE)
"""Names of what is no part of the model that is trained."""
NAME = "requires_grad"


def question(script: Running, said: Given) -> Question | None:
    """What is asked of a program that freezes a part of its model; None = it freezes none, or the user says that it is imported
    with all weights trained."""
    loads = [last_name(getattr(one.func, "value", one)) for one in script.calls("from_pretrained")]
    frozen = None if script.calls(*ADAPTED) or "PeftModel" in loads else next(_frozen(script), None)
    if frozen is None or said.setting(NAME) is not None:
        return None
    what = "freezes a part of the weights, which is not priced; false imports it with all trained"
    about = f"{shown(ast.unparse(frozen)[:60])} {what}"
    return Question(name=NAME, about=about, choices=("false",))


def _frozen(script: Running) -> Iterator[ast.stmt]:
    """Statements that may run and take weights out of the training: requires_grad = ..., requires_grad_(False)."""
    for node in ast.walk(script.tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and target.attr == NAME:
            owner, value = target.value, node.value
        elif isinstance(node, ast.Expr) and call is not None and last_name(call.func) == f"{NAME}_" and call.args:
            owner, value = getattr(call.func, "value", call), call.args[0]
        else:
            continue
        trains = isinstance(value, ast.Constant) and value.value is not False
        other = OTHERS.search(f"{ast.unparse(owner)} {_looped(script.tree, node)}") is not None
        if not (trains or other) and script.may_run(value, _class(script.tree, node)):
            yield node


def _class(tree: ast.Module, node: ast.stmt) -> str:
    """The class in whose methods a statement stands."""
    homes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and any(inner is node for inner in ast.walk(one))]
    return homes[-1].name if homes else ""


def _looped(tree: ast.Module, node: ast.stmt) -> str:
    """What the innermost loop that holds a statement goes over."""
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For) and any(inner is node for inner in ast.walk(one))]
    return ast.unparse(loops[-1].iter) if loops else ""

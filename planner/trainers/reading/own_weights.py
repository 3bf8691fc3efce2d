"""Which weights a program trains: parts of a model that it freezes itself, where it makes no adapters."""

import ast
import re
from collections import deque
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
    """Statements that may run and take weights out of the training."""
    waiting: deque[tuple[ast.AST, str, ast.expr | None]] = deque([(script.tree, "", None)])
    while waiting:
        node, home, loop = waiting.popleft()  # with the innermost class around it, and what the innermost loop goes over
        home, loop = node.name if isinstance(node, ast.ClassDef) else home, node.iter if isinstance(node, ast.For) else loop
        waiting += ((child, home, loop) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign | ast.Expr) and (said := _said(node)) is not None:
            owner, value = said
            trains = isinstance(value, ast.Constant) and value.value is not False
            other = any(OTHERS.search(ast.unparse(one)) for one in (owner, loop) if one is not None)
            if not (trains or other) and script.may_run(value, home):
                yield node


def _said(node: ast.Assign | ast.Expr) -> tuple[ast.expr, ast.expr] | None:
    """Of what, and which, in requires_grad = ... and requires_grad_(...)."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return (target.value, node.value) if isinstance(target, ast.Attribute) and target.attr == NAME else None
    call = node.value
    if not isinstance(call, ast.Call) or last_name(call.func) != f"{NAME}_" or not call.args:
        return None
    return getattr(call.func, "value", call), call.args[0]

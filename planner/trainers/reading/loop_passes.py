"""How many passes a loop of a program's own runs before its optimizer steps."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from planner.trainers.reading.accelerators import STEPS
from planner.trainers.reading.own_parts import held_by
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import gap

ACCUMULATES = re.compile(r"accum(?!\w*(token|loss|time|count|metric|correct|sample))")


def passes_of(program: Running) -> Any:
    """Passes of a step: n of ``(step + 1) % n == 0`` before the optimizer steps, or of a loop that runs passes and does not step; 1
    where no word of the program is about accumulation."""
    nodes = [one for one in ast.walk(program.tree) if isinstance(one, ast.If | ast.For)]
    named = [(one, name) for one in ast.walk(program.tree) for name in ("body", "orelse", "finalbody")]
    blocks = [block for one, name in named if isinstance(block := getattr(one, name, None), list)]
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


NO_OPTIMIZER = re.compile(r"sched|prof|lr|warmup|env|ema|bar")
"""What has a step too."""


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
    """Whether weights are updated in it: by a step of what is no scheduler, or by a function that takes one."""
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        own = isinstance(call.func, ast.Name) or last_name(getattr(call.func, "value", call)) == "self"  # no model.train()
        made = program.functions.get(last_name(call.func)) if own else None
        inner = [call, *(ast.walk(made) if made is not None else ())]
        steps = (one.func for one in inner if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
        if any(one.attr == "step" and not NO_OPTIMIZER.search(last_name(one.value).lower()) for one in steps):
            return True
    return False


def _first(values: Sequence[Any]) -> Any:
    return next((one for one in values if isinstance(one, int)), gap([STEPS]))

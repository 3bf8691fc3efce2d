"""Passes of a step of the optimizer in loops that people write over torch: read in plain forms alone."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from planner.trainers.reading.accelerators import STEPS
from planner.trainers.reading.python_text import Function
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import gap, is_open


def steps_of(program: Running) -> Any:
    """Passes of a step, of the plain forms alone: one pass beside the optimizer's step, which (step + 1) % n == 0 alone may hold
    back, or a loop over range(n) of loss / n in front of it. A gap for all else."""
    every = [one for one in program.calls("step") if isinstance(one.func, ast.Attribute)]
    every = [one for one in every if _NO_UPDATE.search(ast.unparse(one.func)) is None]
    found = {_of_step(program, one, every) for one in every}
    known = found.pop() if len(found) == 1 else None
    told = known == 1 and any(re.search(r"(?i)accum\w*(step|grad|iter)|grad\w*_acc", one) for one in program.names_used())
    return gap([STEPS]) if known is None or told else known


_Tests = dict[tuple[int, bool], ast.expr]
_NO_UPDATE = re.compile(r"(?i)sched|prof|lr_|warm|env|timer|track|progress|bar\b|meter|log")
"""Owners of a step() that is none of weights."""
_PERIOD = re.compile(r"(\([\w.]+ \+ 1\)|[\w.]+) % [^=]+ == 0")


def _of_step(program: Running, step: ast.Call, every: Sequence[ast.Call]) -> int | None:
    """The same of one call that steps, in the innermost loop or function that it stands in; None = not surely known."""
    above = [one for one in ast.walk(program.tree) if isinstance(one, ast.For | ast.While | Function) and _holds(one, step)]
    parts, backs = list(ast.walk(above[-1] if above else program.tree)), program.calls("backward")
    loops = [one for one in parts[1:] if isinstance(one, ast.For | ast.While) and any(_holds(one, back) for back in backs)]
    skips = any(isinstance(one, ast.Continue) and one.lineno < step.lineno for one in parts)
    split = any(isinstance(one, ast.For) and re.search("load|batch|data", ast.unparse(one.iter)) for one in above[:-1])
    passes, steps = (_under(program, some, parts) for some in (backs, every))
    both = [one for i, one in enumerate(passes) for other in passes[:i] if not any((at, not on) in other for at, on in one)]
    if not backs or skips or split or both or len(loops) > 1 or not all(any(one is back for one in parts) for back in backs):
        return None  # passes elsewhere, of parts of a batch, or several
    of_passes, own = _common(passes, passes), _common(steps, [steps[[one is step for one in every].index(True)]])
    held = [(test, at[1]) for at, test in own.items() if at not in of_passes]
    if any(at not in own for at in of_passes) or len(held) + len(loops) > 1:
        return None
    if not held and not loops:
        return 1
    node = getattr(getattr(held[0][0], "left", None), "right", None) if held and held[0][1] else None
    if held and (node is None or _PERIOD.fullmatch(ast.unparse(held[0][0])) is None):
        return None
    if loops:
        over = [one.right for one in ast.walk(loops[0]) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)]
        over += [one.value for one in ast.walk(loops[0]) if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div)]
        turns = ast.unparse(getattr(loops[0], "iter", loops[0]))
        node = next((one for one in over if turns in (f"range({(text := ast.unparse(one))})", f"tqdm(range({text}))")), None)
    value = program.value(node) if node is not None else None
    return value if isinstance(value, int) and value > 0 else None


def _holds(outer: ast.AST, node: ast.AST) -> bool:
    return any(part is node for part in ast.walk(outer))


def _under(program: Running, calls: Sequence[ast.Call], parts: Sequence[ast.AST]) -> list[_Tests]:
    """Conditions, each with whether it holds, that calls stand under in some part of a program and that are not known."""
    inside, found = {id(one) for one in parts}, list[_Tests]()
    for call in calls:
        met = {id(one) for one in program.conditions(call, True)}
        tests = [one for one in program.conditions(call) if id(one) in inside]
        tests = [one for one in tests if "%" in ast.unparse(one) or is_open(str(program.value(one)))]
        found.append({(id(one), id(one) in met): one for one in tests})
    return found


def _common(every: Sequence[_Tests], some: Sequence[_Tests]) -> _Tests:
    """Those of some calls that none of all stands on the other side of."""
    return {at: test for one in some for at, test in one.items() if not any((at[0], not at[1]) in other for other in every)}

"""Programs that train several times, each time in a function or a part of the text of its own: what belongs to one of them."""

import ast
import re
from collections.abc import Iterator, Sequence

from planner.trainers.reading.python_text import FAR, last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import BATCH, derived_from


def only_one(script: Running, configurations: Sequence[str], trainers: Sequence[str]) -> list[str]:
    """Notes; leaves out of a script what stands in functions of other trainings than the one that is read, or, on the level of the
    module, behind that one. All stays where too little of it would be left: no trainer, or no model that is loaded."""
    made = script.calls(*configurations, *derived_from(script, tuple(configurations)))
    first = next(iter(sorted(made, key=lambda one: all(word.arg != BATCH for word in one.keywords))), None)
    built = script.calls(*trainers, *derived_from(script, tuple(trainers)))
    if first is None or len(made) < 2 or len(built) < 2:
        return []
    loads = _models(script)
    home = script.home_of(first)
    if home:
        kept = {*_reached(script, [home]), *_callers(script, home)}
        others = {name for one in (*made, *built) if (name := script.home_of(one)) and name not in kept}
        script.leave_out(functions=frozenset(set(_reached(script, others)) - kept))
    else:
        own = [one for one in built if not script.home_of(one) and first.lineno < one.lineno < FAR]
        if len(own) < 2:
            return []
        starts = [one.lineno for one in script.calls("train") if own[0].lineno <= one.lineno < own[1].lineno]
        script.leave_out(behind=max(own[0].end_lineno or 0, *starts[:1], 0))
    whole = script.calls(*trainers, *derived_from(script, tuple(trainers))) and (_models(script) or not loads)
    if not whole or len(script.calls(*configurations, *derived_from(script, tuple(configurations)))) == len(made):
        script.leave_out()
        return []
    return [f"of {len(made)} configurations of a trainer, the first is read (line {first.lineno}), with what belongs to it"]


def _reached(script: Running, names: Sequence[str] | set[str]) -> Iterator[str]:
    """Functions of the script that some functions call, and those themselves."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in script.functions:
            continue
        seen.add(name)
        yield name
        parts = ast.walk(script.functions[name])
        waiting += [last_name(one.func) for one in parts if isinstance(one, ast.Call) and _own(one)]


def _callers(script: Running, name: str) -> set[str]:
    """Functions that call a function, and those that call these."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for call in script.calls(waiting.pop()):
            if (home := script.home_of(call)) and home not in found and _own(call):
                found.add(home)
                waiting.append(home)
    return found


def _own(call: ast.Call) -> bool:
    """Whether a function of the script may be called: train(...) or self.train(...), and not trainer.train()."""
    return isinstance(call.func, ast.Name) or ast.unparse(call.func).startswith("self.")


def _models(script: Running) -> bool:
    """Whether models are loaded."""
    loads = [last_name(getattr(one.func, "value", one)) for one in script.calls("from_pretrained")]
    return any(not re.search("Tokenizer|Processor|Config", one) for one in loads)

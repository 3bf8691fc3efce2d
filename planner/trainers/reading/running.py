"""Python scripts under their conditions: calls that their options keep from running do not count. Nothing is executed."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from planner.trainers.reading import python_text
from planner.trainers.reading.given import Given, value_of
from planner.trainers.reading.modules import with_modules
from planner.trainers.reading.python import MOST_STEPS, Script
from planner.trainers.reading.python_text import (
    FAR,
    UNNAMED,
    Bound,
    Function,
    called,
    is_main,
    last_name,
    option_names,
    targets,
)
from planner.trainers.reading.settings_files import FileSettings
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.thinned import filtered, kept, thinned
from planner.trainers.reading.versions import newer

LAST = 10**9
"""Behind every line."""
MOST_OF_A_FUNCTION = 400
"""Nodes that may be evaluated for the result of one function."""
DEEPEST = 4
"""Functions that call functions."""
_Under = tuple[tuple[tuple[ast.expr, bool], ...], str]


class Running(Script):
    """A script whose calls count where they may be made."""

    def __init__(self, path: Path, said: Given) -> None:
        self._puts: dict[tuple[int, str], list[tuple[int, ast.expr | None, ast.expr]]] = {}  # (line, key, value); no key = update
        super().__init__(path, said)
        self._under = dict(_conditions(self.tree))
        self._asking: set[int] = set()
        self._out: tuple[frozenset[str], int] = (frozenset(), LAST)
        self._gives: dict[int, Any] = {}  # what functions give
        self._known: dict[int, Any] = {}  # what conditions are that were asked for by themselves

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions with such a last name that may run."""
        return [one for one in super().calls(*names) if not self._left_out(one) and self.runs(one) is not False]

    def home_of(self, node: ast.expr) -> str:
        """The function that an expression stands in, '' on the level of the module."""
        return self._under.get(id(node), ((), ""))[1]

    def leave_out(self, functions: frozenset[str] = frozenset(), behind: int = LAST) -> None:
        """From now on what stands in some functions does not count, nor what the module does behind a line."""
        self._out = (functions, behind)

    def _left_out(self, node: ast.expr) -> bool:
        home = self.home_of(node)
        return home in self._out[0] if home else self._out[1] < node.lineno < FAR

    def runs(self, call: ast.Call, depth: int = 0) -> bool | None:
        """Whether a call is made; None = its conditions are not known."""
        tests, home = self._under.get(id(call), ((), ""))
        sure = self._holds(tests)
        if sure is False:
            return False
        callers = super().calls(home) if home and depth < DEEPEST else []
        above = [self.runs(one, depth + 1) for one in callers if self._under.get(id(one), ((), ""))[1] != home]
        if above and not any(one is not False for one in above):
            return False
        return True if sure and (not above or True in above) else None

    def may_run(self, node: ast.expr, owner: str = "") -> bool:
        """Whether an expression may be reached: its conditions may hold, and something calls the function that it stands in, or
        makes the class ``owner`` whose method that is."""
        tests, home = self._under.get(id(node), ((), ""))
        called = home in ("", "main") or bool(self.calls(owner if owner and home == "__init__" else home))
        return called and not self._left_out(node) and self._holds(tests) is not False

    def behind(self, call: ast.Call, others: Sequence[ast.Call]) -> bool:
        """Whether a call stands behind one of some others in the same function."""
        home = self._under.get(id(call), ((), ""))[1]
        return any(self._under.get(id(one), ((), ""))[1] == home and one.lineno < call.lineno for one in others)

    def settled(self, call: ast.expr, beside: ast.Call | None) -> bool:
        """Whether the conditions that a call stands under are known, those left out that another one stands under too."""
        shared = self._under.get(id(beside), ((), ""))[0]
        tests = self._under.get(id(call), ((), ""))[0]
        own = [one for one in tests if not any(one[0] is other and one[1] is met for other, met in shared)]
        return self._holds(tuple(own)) is not None

    def either(self, call: ast.Call, other: ast.Call) -> bool:
        """Whether one of two calls is surely made, which stand in two branches of a condition."""
        tests, home = self._under.get(id(call), ((), ""))
        rest, callers = self._under.get(id(other), ((), ""))[0], super().calls(home) if home else []
        apart = [one for one, met in tests for there, other_way in rest if one is there and met is not other_way]
        own = tuple(one for one in tests if one[0] not in apart)
        return bool(apart) and self._holds(own) is True and (not callers or any(map(self.runs, callers)))

    def conditions(self, call: ast.expr, met: bool = False) -> list[ast.expr]:
        """The conditions that a call stands under; ``met``: those that hold there."""
        return [test for test, holds in self._under.get(id(call), ((), ""))[0] if holds or not met]

    def _holds(self, tests: tuple[tuple[ast.expr, bool], ...]) -> bool | None:
        """Whether conditions are met; None = not known."""
        sure = True
        for test, wanted in tests:
            if (has := _of_every_model(test)) is not None:
                if has is not wanted:
                    return False
                continue
            value = self._tested(test)
            if isinstance(value, str) and is_open(value):
                sure = False
            elif bool(value) is not wanted:
                return False
        return True if sure else None

    def _tested(self, test: ast.expr) -> Any:
        """The value of a condition; not known where it hangs on what stands under itself: 'if a.b is None: a.b = 1'."""
        if id(test) in self._asking:
            return gap([])
        if id(test) in self._known:
            return self._known[id(test)]
        self._asking.add(id(test))
        outer = not self._inside
        try:
            found = self._within(partial(self._value, test))
        finally:
            self._asking.discard(id(test))
        if outer:
            self._known[id(test)] = found
        return found

    def _note(self, node: ast.AST, home: Function | None, sure: bool) -> None:
        """The same, and what is put into a mapping that a name holds: a[key] = value, a.update(...), a.setdefault(key, value)."""
        super()._note(node, home, sure)
        for target, value in targets(node):
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and value is not None:
                place = (id(home), target.value.id)
                self._puts.setdefault(place, []).append((getattr(node, "lineno", 0), target.slice, value))
        if isinstance(node, ast.Call) and last_name(node.func) == "setattr" and len(node.args) == 3:
            held, name, value = node.args
            if isinstance(held, ast.Name) and isinstance(name, ast.Constant) and isinstance(name.value, str):
                bound = Bound(value, node.lineno, sure, home)
                self._attributes.setdefault(f"{held.id}.{name.value}", []).append(bound)
        owner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(node, ast.Call) and isinstance(owner, ast.Name) and last_name(node.func) == "update":
            self._puts.setdefault((id(home), owner.id), []).append((node.lineno, None, node))

    def _parameter(self, function: Function, name: str) -> tuple[Any] | None:
        """The same, of a command of click with the default of its option."""
        found = super()._parameter(function, name)
        options = [one for one in function.decorator_list if isinstance(one, ast.Call) and last_name(one.func) == "option"]
        own = next((one for one in options if name in option_names(one)), None)
        return (self._option(own, name),) if own is not None and found == (gap([name]),) else found

    def _option(self, call: ast.Call, name: str) -> Any:
        """The same; each of several processes is given its local rank."""
        return 0 if name == "local_rank" and (self.said.num_gpus or 1) > 1 else super()._option(call, name)

    def _of_call(self, node: ast.Call) -> Any:
        """The same, and getattr(torch, "bfloat16")."""
        if last_name(node.func) == "getattr" and len(node.args) >= 2 and last_name(node.args[0]) == "torch":
            return self._value(node.args[1])
        gpus = self.said.num_gpus
        places = ("WORLD_SIZE", "RANK", "LOCAL_RANK")[: 3 if gpus and gpus > 1 else 1]  # of the first of several processes
        if gpus and python_text.of_environment(node, ast.unparse(node.func)) and (name := self._value(node.args[0])) in places:
            return gpus if name == "WORLD_SIZE" else 0
        if gpus and last_name(node.func) == "get_world_size":
            return gpus
        if isinstance(node.func, ast.Name) and node.func.id in ("max", "min") and len(node.args) > 1 and not node.keywords:
            values = [self._value(one) for one in node.args]
            if all(isinstance(one, int | float) for one in values):
                return max(values) if node.func.id == "max" else min(values)
        made = self.functions.get(last_name(node.func))
        if made is not None and (given := filtered(made, node)) is not None:
            return kept(given[0], self._value(given[1]), self._value)
        if made is not None and node.args and (read := python_text.read_of_environment(made)) is not None:
            variable = str(self._value(node.args[0]))
            held = self.said.setting(variable)
            usual = self._value(node.args[1]) if len(node.args) > 1 else gap([variable])
            value = usual if held is None else value_of(held) if read else held
            plain = isinstance(value, str) and not is_open(value) and read
            return self._value(ast.Call(ast.Name(read), [ast.Constant(value)], [])) if plain else value
        found = super()._of_call(node)
        return self._given_back(made) if made is not None and found == gap([UNNAMED]) else found

    def _of_dictcomp(self, node: ast.DictComp) -> Any:
        """A mapping less some of its keys."""
        inner = thinned(node)
        return gap([UNNAMED]) if inner is None else kept(node, self._value(inner), self._value)

    def _of_compare(self, node: ast.Compare) -> Any:
        """The same, and "max_length" in inspect.signature(SFTConfig).parameters: as the newest version of the library has it,
        or an older one that the project pins."""
        word, held = getattr(node.left, "value", None), node.comparators[0]
        if isinstance(word, str) and isinstance(node.ops[0], ast.In | ast.NotIn):
            if isinstance(held, ast.Name):
                made = self._names.get((id(self._home.get(id(node))), held.id)) or self._names.get((id(None), held.id)) or []
                held = made[-1].value or held if made else held
            if SIGNATURE.search(ast.unparse(held)[:400]):
                older = "SFTConfig" in ast.unparse(held) and word in LENGTHS and newer(self.path, "trl", LENGTHS[word]) is False
                return isinstance(node.ops[0], ast.In) is ((word not in REMOVED) is not older)
        return super()._of_compare(node)

    def _given_back(self, function: Function) -> Any:
        """What a function of the script gives, where one return of it is met and no other may be; found once, at its own cost."""
        if id(function) not in self._gives:
            self._gives[id(function)] = gap([UNNAMED])  # to one that calls itself
            steps, self._steps = self._steps, max(self._steps, MOST_STEPS - MOST_OF_A_FUNCTION)
            self._gives[id(function)] = self._returned(function)
            self._steps = steps
        return self._gives[id(function)]

    def _returned(self, function: Function) -> Any:
        returns = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
        own = [one for one in returns if self.home_of(one) == function.name]
        met = [self._holds(self._under[id(one)][0]) for one in own]
        if met.count(True) != 1 or None in met:
            return gap([UNNAMED])
        value = self._value(own[met.index(True)])
        return gap([UNNAMED]) if isinstance(value, str) and is_open(value) else value

    def _of_subscript(self, node: ast.Subscript) -> Any:
        """The same, and os.environ["WORLD_SIZE"]."""
        world = isinstance(node.slice, ast.Constant) and node.slice.value == "WORLD_SIZE"
        return self.said.num_gpus if world and self.said.num_gpus else super()._of_subscript(node)

    def _named(self, name: str, at: ast.AST) -> Any:
        """The same, of a mapping with what is put into it on the way, and of a parameter that only a condition changes."""
        kept = self._kept_parameter(name, at)
        value = super()._named(name, at) if kept is None else kept[0]
        home = self._home.get(id(at))
        while home is not None and not self._names.get((id(home), name)):
            home = self._home.get(id(home))
        if not isinstance(value, dict) or isinstance(value, FileSettings) or name in self.said.settings:
            return value
        line = getattr(at, "lineno", 0) if home is self._home.get(id(at)) else LAST
        made = max((one.line for one in self._names.get((id(home), name), []) if one.line <= line), default=0)
        found = dict(value)
        for place, key, put in sorted(self._puts.get((id(home), name), []), key=lambda one: one[0]):
            if made < place < line:
                self._put(found, key, put)
        return found

    def _kept_parameter(self, name: str, at: ast.AST) -> tuple[Any] | None:
        """What a parameter is given, where the function that it is of gives it something else under a condition that is not met;
        a gap where that is not known. None = another name."""
        home, line = self._home.get(id(at)), getattr(at, "lineno", 0)
        some = [one for one in self._names.get((id(home), name), []) if one.line <= line and id(one.value) not in self._waiting]
        if home is None or not some or any(one.sure for one in some) or name in self.said.settings:
            return None
        given = self._parameter(home, name)
        met = [None if one.value is None else self._holds(self._under.get(id(one.value), ((), ""))[0]) for one in some]
        if given is None or True in met:
            return None
        may = [one.value for one, holds in zip(some, met, strict=True) if holds is None]
        same = all(one is not None and self._value(one) == given[0] for one in may)
        return given if same else (gap([name]),)

    def _put(self, found: dict[Any, Any], key: ast.expr | None, put: ast.expr) -> None:
        """Puts a value, or what an update brings, into a mapping: where its condition is not known, a gap."""
        met = self._holds(self._under.get(id(put), ((), ""))[0])
        if met is False:
            return
        if isinstance(put, ast.Call) and key is None:
            given = self._value(put.args[0]) if put.args else {}
            new = {**(given if isinstance(given, dict) else {}), **self.keywords(put)}
        else:
            new = {str(self._value(key)): self._value(put)} if key is not None else {}
        for name, value in new.items():
            value = called(value, str(name))
            found[name] = value if met or found.get(name) == value else gap([str(name)])

    def set_on(self, call: ast.Call, part: str = "") -> dict[str, Any]:
        """Attributes that are set later on the object that a call makes, or on a part of it: args.bf16 = True behind
        args = SFTConfig(...), trainer.args.bf16 = True."""
        home, found = self._home.get(id(call)), {}
        made = [one.targets[0] for one in ast.walk(self.tree) if isinstance(one, ast.Assign) and _called_in(one.value) is call]
        names = [last_name(one) for target in made for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for place, every in self._attributes.items():
            owner, _, name = place.partition(".")
            if not name.startswith(part):
                continue
            name = name.removeprefix(part)
            later = [one for one in every if one.home is home and one.line > call.lineno]
            if later and owner in names and "." not in name:
                met = [None if one.value is None else self._holds(self._under.get(id(one.value), ((), ""))[0]) for one in later]
                if any(one is not False for one in met):
                    value = called(self._within(partial(self._decided, later, name)), name)
                    found[name] = value if True in met and None not in met else gap([name])
        return found

    def _decided(self, some: list[Bound], name: str) -> Any:
        """The same, of assignments whose conditions are met or not known; the last counts as sure where they are met."""
        met = [True if one.sure else self._holds(self._under.get(id(one.value), ((), ""))[0]) for one in some]
        kept = [one for one, holds in zip(some, met, strict=True) if holds is not False]
        if len(some) > 1 and kept and kept[-1].value is not None and [one for one in met if one is not False][-1]:
            kept[-1] = replace(kept[-1], sure=True)
        return super()._decided(kept or some, name)


class WithModules(Running):
    """A script with what it imports from its project."""

    def whole(self, tree: ast.Module) -> ast.Module:
        """Its own tree, and the definitions that it imports."""
        return with_modules(tree, self.path)


_OF_LIBRARY = r"(SFTConfig|DPOConfig|(Seq2Seq)?TrainingArguments|(SFT|DPO|Seq2Seq)?Trainer)\b"
SIGNATURE = re.compile(rf"\b(signature|fields)\((\w+\.)?{_OF_LIBRARY}|\b{_OF_LIBRARY}\.__dataclass_fields__")
"""Where a script looks which arguments a class of transformers or TRL has."""
REMOVED = ("max_seq_length", "evaluation_strategy", "tokenizer", "no_cuda", "dataset_batch_size")
"""Those that newer versions have under other names, or not at all."""
LENGTHS = {"max_length": (0, 16), "max_seq_length": (0, 20)}
"""Version of TRL since which SFTConfig has the one, and no more the other.  [trl, trainer/sft_config.py]"""


def _called_in(node: ast.expr) -> ast.expr:
    """A call behind the [0] of what it gives."""
    return node.value if isinstance(node, ast.Subscript) else node


def _of_every_model(test: ast.expr) -> bool | None:
    """True for hasattr(model, ...) of what every model of transformers has; None for other conditions."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        parts = [_of_every_model(one) for one in test.values]
        return True if all(parts) else None
    named = isinstance(test, ast.Call) and last_name(test.func) == "hasattr" and len(test.args) == 2
    word = getattr(test.args[1], "value", None) if isinstance(test, ast.Call) and named else None
    return True if word in ("gradient_checkpointing_enable", "enable_input_require_grads") else None


def _conditions(tree: ast.Module) -> Iterator[tuple[int, _Under]]:
    """(id of an expression, (conditions that it stands under, function that it stands in))."""
    waiting: list[tuple[ast.AST, _Under]] = [(tree, ((), ""))]
    while waiting:
        node, (tests, home) = waiting.pop()
        if isinstance(node, ast.expr):
            yield id(node), (tests, home)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            home = node.name
        passed = _passed(node)
        branched = isinstance(node, ast.If | ast.IfExp) and not is_main(node)
        cases = _cases(node) if isinstance(node, ast.Match) else {}
        for child in ast.iter_child_nodes(node):
            under = (*tests, *passed.get(id(child), ()), *cases.get(id(child), ()))
            if branched and isinstance(node, ast.If | ast.IfExp) and child is not node.test:
                first = child in node.body if isinstance(node, ast.If) else child is node.body
                under = (*under, (node.test, first))
            waiting.append((child, (under, home)))


def _cases(node: ast.Match) -> dict[int, tuple[tuple[ast.expr, bool], ...]]:
    """Case of a match -> what holds in it: its subject is the value that it names, and none of those above."""
    found: dict[int, tuple[tuple[ast.expr, bool], ...]] = {}
    above: tuple[tuple[ast.expr, bool], ...] = ()
    for case in node.cases:
        if isinstance(case.pattern, ast.MatchValue) and case.guard is None:
            test = ast.Compare(node.subject, [ast.Eq()], [case.pattern.value])
            found[id(case)] = (*above, (ast.copy_location(test, node.subject), True))
            above = (*above, (test, False))
        else:
            rest = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            found[id(case)] = above if rest else (*above, (node.subject, True))
    return found


def _passed(node: ast.AST) -> dict[int, tuple[tuple[ast.expr, bool], ...]]:
    """Statement of a block -> the conditions above it that would have left the function: 'if not args.lora: return model'."""
    found: dict[int, tuple[tuple[ast.expr, bool], ...]] = {}
    for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
        left: tuple[tuple[ast.expr, bool], ...] = ()
        for one in block if isinstance(block, list) else []:
            found[id(one)] = left
            if isinstance(one, ast.If) and not one.orelse and isinstance(one.body[-1], ast.Return) and not is_main(one):
                left = (*left, (one.test, False))
    return found

"""What a Python script says in its text: literals, followed through names, defaults and options. Nothing is executed."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading import python_text
from planner.trainers.reading.given import Given, value_of
from planner.trainers.reading.parsed_words import with_parsed
from planner.trainers.reading.python_text import UNNAMED, Bound, Function, is_main, last_name, option_names, targets
from planner.trainers.reading.settings_files import HOLDERS, PASSES, READS, FileSettings, reads, settings_in, waits
from planner.trainers.reading.shell.text import gap, is_open, roots

MOST_STEPS = 4000
"""Nodes that one value may cost: names that double each other would cost more than a file of any size is worth."""


@dataclass
class Script:
    """A script and what the user says beside it."""

    path: Path
    said: Given
    defaults: list[str] = field(default_factory=list)
    """Options and fields that were taken at their defaults."""

    def __post_init__(self) -> None:
        self.tree = with_parsed(self.whole(python_text.tree_of(self.path)))
        self._home: dict[int, Function | None] = {}
        self._names: dict[tuple[int, str], list[Bound]] = {}
        self._attributes: dict[str, list[Bound]] = {}
        self.functions: dict[str, Function] = {}
        self.only: tuple[str, ...] | None = None
        self._fields: dict[str, list[ast.expr | None]] = {}
        self._options: dict[str, ast.Call] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._stored: dict[str, list[ast.expr | None]] = {}
        self._classes: set[str] = set()
        self._owner: dict[int, str] = {}  # a method -> its class
        self._steps, self._inside = 0, False
        self._waiting: set[int] = set()  # nodes whose value hangs on their own
        try:
            self._walk()
        except RecursionError as error:
            raise PlannerError(f"{self.path}: its expressions are nested too deeply to be read") from error

    def whole(self, tree: ast.Module) -> ast.Module:
        """What is read of a script: its own tree."""
        return tree

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions with such a last name, in the order of the text."""
        found = [call for name in names for call in self._calls.get(name, []) if self._counts(self._home[id(call)])]
        return sorted(found, key=lambda one: (one.lineno, one.col_offset))

    def keywords(self, call: ast.Call) -> dict[str, Any]:
        """Keywords of a call with their values; what is not known is a text with a gap."""
        found: dict[str, Any] = {}
        for one in call.keywords:
            value = self.value(one.value)
            if one.arg is not None:
                found[one.arg] = python_text.called(value, one.arg)
            elif waits(value):
                found["per_device_train_batch_size"] = value
            elif isinstance(value, dict):
                found |= {str(name): inner for name, inner in value.items()}
            else:
                found[f"**{ast.unparse(one.value)[:80]}"] = "..."
        return found

    def value(self, node: ast.expr) -> Any:
        """A value; a text with a gap, named as --set answers it, where the text does not say it."""
        return self._within(partial(self._value, node))

    def _within(self, function: Callable[[], Any]) -> Any:
        """A value that costs no more than it may, with all that is asked on its way."""
        if self._inside:
            return function()
        self._steps, self._inside = 0, True
        try:
            return function()
        except RecursionError:
            return gap([UNNAMED])
        finally:
            self._inside = False

    def places(self, root: str | None = None) -> dict[str, Any]:
        """Values of the attributes that are assigned, by their dotted places without the first name; ``root``: only of that name.
        One that only a condition sets is a gap, unless it is None there."""
        found: dict[str, Any] = {}
        for place, every in self._attributes.items():
            some = [one for one in every if self._counts(one.home)]
            first, _, rest = place.partition(".")
            if rest and some and root in (None, first):
                value = self._within(partial(self._decided, some, name := rest.rpartition(".")[2]))
                found[rest] = value if some[-1].sure or value is None else gap([name])
        return found

    def sets(self, place: str) -> bool:
        """Whether the last assignment of an attribute hangs on no condition."""
        return any(one[-1].sure for name, one in self._attributes.items() if name.partition(".")[2] == place)

    def _counts(self, home: Function | None) -> bool:
        """Whether what stands in a function is looked at: in those that ``only`` names, '' for the module, or in all."""
        return self.only is None or (home.name if home else "") in self.only

    def built(self, name: str) -> list[ast.Call]:
        """Calls of a class by its last name, and those that only name it first: run.Config(Class, ...)."""
        late = [one for one in self.calls("Config", "Partial") if one.args and last_name(one.args[0]) == name]
        return sorted([*self.calls(name), *late], key=lambda one: (one.lineno, one.col_offset))

    def stored(self, name: str) -> list[ast.expr | None]:
        """What is put under a key of any mapping, None = no expression."""
        return self._stored.get(name, [])

    def names_used(self) -> list[str]:
        """Last names of all names and attributes, in the order of the text."""
        return python_text.names_of(self.tree)

    # ----------------------------------------------------------------------------------------------------------- the tree

    def _walk(self) -> None:
        waiting: list[tuple[ast.AST, Function | None, bool]] = [(self.tree, None, True)]
        while waiting:
            node, home, sure = waiting.pop()
            self._home[id(node)] = home
            self._note(node, home, sure)
            inner = node if isinstance(node, Function) else home
            loose = isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.AsyncFor | ast.Match)
            known = isinstance(node, Function) or (sure and not loose) or is_main(node)
            waiting += [(child, inner, known) for child in ast.iter_child_nodes(node)]
        for some in (*self._names.values(), *self._attributes.values()):
            some.sort(key=lambda one: one.line)

    def _note(self, node: ast.AST, home: Function | None, sure: bool) -> None:
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            self._calls.setdefault(name, []).append(node)
            if name == "add_argument":
                self._options |= dict.fromkeys(option_names(node), node)
        elif isinstance(node, Function):
            self.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            self._classes.add(node.name)
            self._owner |= {id(one): node.name for one in node.body if isinstance(one, Function)}
            for name, value in python_text.fields_of(node):
                self._fields.setdefault(name, []).append(value)
        for target, value in targets(node):
            bound = Bound(value, node.lineno if isinstance(node, ast.stmt) else 0, sure, home)
            if isinstance(target, ast.Name):
                self._names.setdefault((id(home), target.id), []).append(bound)
            elif isinstance(target, ast.Attribute):
                self._attributes.setdefault(ast.unparse(target), []).append(bound)
            elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                self._stored.setdefault(str(target.slice.value), []).append(value)

    # ---------------------------------------------------------------------------------------------------------- the values

    def _value(self, node: ast.expr) -> Any:
        self._steps += 1
        if self._steps > MOST_STEPS or id(node) in self._waiting:
            return gap([UNNAMED])
        if isinstance(node, ast.Constant):
            return None if node.value is Ellipsis or isinstance(node.value, bytes | complex) else node.value
        reader = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        self._waiting.add(id(node))
        try:
            return gap([UNNAMED]) if reader is None else reader(node)
        finally:
            self._waiting.discard(id(node))

    def _of_list(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        return [self._value(one) for one in node.elts]

    _of_tuple = _of_set = _of_list

    def _of_dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self._value(value)
            if key is None:
                found |= inner if isinstance(inner, dict) else {}
            else:
                name = str(self._value(key))
                found[name] = python_text.called(inner, name)
        return found

    def _of_name(self, node: ast.Name) -> Any:
        return self._named(node.id, node)

    def _named(self, name: str, at: ast.AST) -> Any:
        said = self.said.setting(name)
        if said is not None:
            return value_of(said)
        home = self._home.get(id(at))
        while True:
            some = self._names.get((id(home), name), [])
            before = some if home is not self._home.get(id(at)) else python_text.above(some, getattr(at, "lineno", 0))
            before = [one for one in before if id(one.value) not in self._waiting] or before  # n = n // 2: the one above
            if before:
                return self._decided(before, name)
            if home is None:
                return gap([name])
            if (given := self._parameter(home, name)) is not None:
                return given[0]
            home = self._home.get(id(home))

    def _decided(self, some: list[Bound], name: str) -> Any:
        """The value of the last assignment where it is sure, or what all of them say."""
        start = max((i for i, one in enumerate(some) if one.sure), default=0)
        values = [gap([name]) if one.value is None else self._value(one.value) for one in some[start:]]
        same = all(one == values[0] for one in values)
        return values[0] if same and (some[start].sure or len(values) > 1 or len(some) == 1) else gap([name])

    def _parameter(self, function: Function, name: str) -> tuple[Any] | None:
        """What all calls of a function that may run give a parameter, or its default; None = there is no such parameter."""
        arguments, calls = function.args, self._calls.get(python_text.called_as(function, self._owner), [])
        positional = [*arguments.posonlyargs, *arguments.args]
        names = [one.arg for one in [*positional, *arguments.kwonlyargs]]
        calls = [one for one in calls if isinstance(one.func, ast.Name)] or calls  # train(...), beside trainer.train()
        calls = python_text.reached(calls, self._home, self._calls)
        if arguments.kwarg is not None and name == arguments.kwarg.arg and len(calls) == 1:
            rest = [one for one in calls[0].keywords if one.arg is not None and one.arg not in names]
            return ({str(one.arg): self._value(one.value) for one in rest},)
        if name not in names:
            return None
        place = names.index(name) - (names[0] in ("self", "cls")) if name in [one.arg for one in positional] else -1
        given = [python_text.given_for(name, place, one) for one in calls]
        given = [one for one in given if not (getattr(one, "id", "") == name and self._home.get(id(one)) is function)]
        bare = [None] * (len(positional) - len(arguments.defaults))
        usual = dict(zip(names, [*bare, *arguments.defaults, *arguments.kw_defaults], strict=True))[name]
        usual = usual and python_text.default_of(usual)
        values = [gap([name]) if one is None else self._value(one) for one in [one or usual for one in given] or [usual]]
        return (values[0] if all(one == values[0] for one in values) else gap([name]),)

    def _of_attribute(self, node: ast.Attribute) -> Any:
        name = node.attr
        if isinstance(node.value, ast.Name) and node.value.id in ("torch", "jnp") and name in python_text.DTYPES:
            return {"half": "float16", "float": "float32"}.get(name, name)
        said = self.said.setting(name)
        if said is not None:
            return value_of(said)
        if (some := self._attributes.get(ast.unparse(node))) is not None:
            own = [one for one in some if self._owner.get(id(one.home)) == self._owner.get(id(self._home.get(id(node))))]
            return self._decided((own if ast.unparse(node.value) == "self" else []) or some, name)
        owner: Any = self._value(node.value) if isinstance(node.value, ast.Name | ast.Attribute) else None
        if waits(owner) or (isinstance(owner, FileSettings) and name in owner):
            return self._kept(owner, name)
        if name in self._options:
            return self._option(self._options[name], name)
        every = self._calls.values() if len(fields := self._fields.get(name, [])) == 1 else ()  # a walk through all of it
        given = [one.value for calls in every for call in calls for one in call.keywords if one.arg == name]
        others = [one for one in given if ast.unparse(one) != ast.unparse(node)]  # those that are not given this very value
        default = (others[0] if others else fields[0]) if len(fields) == 1 and (len(given) <= 1 or not others) else None
        if default is not None:
            self.defaults.append(name)
            return self._value(python_text.default_of(default))
        return gap([name])

    def _option(self, call: ast.Call, name: str) -> Any:
        words = {one.arg: one.value for one in call.keywords}
        if "default" in words:
            value = self._value(words["default"])
            if value is not None:
                self.defaults.append(name)
            return value
        action = ast.unparse(words["action"]) if "action" in words else ""
        if "store_true" in action or "store_false" in action:
            self.defaults.append(name)
            return "store_false" in action
        required = "required" in words or not str(getattr(call.args[0], "value", "-")).startswith("-")
        return gap([name]) if required else None

    def _of_subscript(self, node: ast.Subscript) -> Any:
        owner, key = self._value(node.value), self._value(node.slice)
        if waits(owner) or (isinstance(owner, FileSettings) and str(key) in owner):
            return self._kept(owner, str(key))
        if isinstance(owner, dict) and str(key) in owner:
            return owner[str(key)]
        if isinstance(owner, list) and isinstance(key, int) and not isinstance(key, bool) and -len(owner) <= key < len(owner):
            return owner[key]
        known = isinstance(key, str) and re.fullmatch(r"\w{1,60}", key)
        said = self.said.setting(key) if known else None
        return gap([key if known else UNNAMED]) if said is None else value_of(said)

    def _kept(self, owner: FileSettings | str, key: str, default: Any = None) -> Any:
        """What a file of settings says, unless the script puts something else in its place."""
        if isinstance(owner, str):
            return owner
        put = [self._value(one) if one is not None else gap([key]) for one in self._stored.get(key, [])]
        found = owner.get(key, default)
        found = FileSettings(found) if isinstance(found, dict) else found
        return found if all(one is None or one == found for one in put) else gap([key])

    def _of_joinedstr(self, node: ast.JoinedStr) -> Any:
        return "".join(str(self._value(one.value if isinstance(one, ast.FormattedValue) else one))[:1000] for one in node.values)

    def _of_unaryop(self, node: ast.UnaryOp) -> Any:
        value = python_text.asked_as(node, self._value(node.operand))
        if isinstance(value, str) and is_open(value):
            return python_text.switch(node, value, (), self.said.choices)
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else gap([UNNAMED])

    def _of_binop(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        open_ = [name for one in (left, right) if isinstance(one, str) and is_open(one) for name in roots(one)]
        if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add | ast.Div):
            return (left + ("" if isinstance(node.op, ast.Add) else "/") + right)[:10000]
        if open_:
            return gap(open_)
        found = python_text.computed(node.op, left, right)
        return gap([UNNAMED]) if found is None else found

    def _of_boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for one in node.values:
            value = self._value(one)
            if (isinstance(value, str) and is_open(value)) or bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _of_compare(self, node: ast.Compare) -> Any:
        left, right = self._value(node.left), self._value(node.comparators[0])
        open_ = [name for one in (left, right) if isinstance(one, str) and is_open(one) for name in roots(one)]
        if open_ or len(node.ops) > 1:
            return gap(python_text.put_compared(open_, (left, right), self.said.choices) or [UNNAMED])
        found = python_text.compared(node.ops[0], left, right)
        return gap([UNNAMED]) if found is None else found

    def _of_ifexp(self, node: ast.IfExp) -> Any:
        test = python_text.asked_as(node.test, self._value(node.test))
        if not (isinstance(test, str) and is_open(test)):
            return self._value(node.body if test else node.orelse)
        yes, no = self._value(node.body), self._value(node.orelse)
        return yes if yes == no else python_text.switch(node.test, test, (yes, no), self.said.choices)

    def _of_call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
        last = name.rpartition(".")[2]
        if last in python_text.YES or name.endswith("cuda.is_available"):
            return True
        if last == "device_count" and self.said.num_gpus:
            return self.said.num_gpus
        if python_text.of_environment(node, name):
            variable, usual = str(self._value(node.args[0])), [*node.args[1:2], *python_text.keyword(node, "default")]
            said, value = self.said.setting(variable), self._value(usual[0]) if usual else gap([variable])
            return value if said is None else said if isinstance(value, str) and not is_open(value) else value_of(said)
        if last == "join" and name.endswith("path.join") and node.args:
            return "/".join(str(self._value(one)) for one in node.args)[:1000]
        if name in ("dict", "DictDefault") and isinstance(held := self._value(node.args[0]) if node.args else {}, dict):
            return {**held, **self.keywords(node)}
        if (given := self._passed(node, name)) is not None:
            return given[0]
        if (name in python_text.CONVERSIONS or name in ("Path", "list", "tuple")) and len(node.args) == 1:
            value = self._value(node.args[0])
            if name not in python_text.CONVERSIONS or (isinstance(value, str) and is_open(value)):
                return value
            try:
                return python_text.CONVERSIONS[name](value)
            except (TypeError, ValueError, OverflowError):
                return gap([UNNAMED])
        return gap([UNNAMED])

    def _passed(self, node: ast.Call, name: str) -> tuple[Any] | None:
        """What a call gives that reads a file of settings, looks into one, or gives on what it is given; None = another call."""
        last, owner = last_name(node.func), getattr(node.func, "value", None)
        words = [one.value for one in node.keywords if one.arg is not None]
        if last in self.functions and len(self._calls.get(last, [])) == 1:
            returns = [one for one in ast.walk(self.functions[last]) if isinstance(one, ast.Return) and one.value is not None]
            found = self._value(returns[0].value) if len(returns) == 1 and returns[0].value is not None else None
            if isinstance(found, FileSettings) or waits(found) or not READS.fullmatch(name):  # else put into an object key by key
                return (found,) if isinstance(found, FileSettings) or waits(found) else None
        if last in python_text.OF_TEXTS and owner is not None and isinstance(text := self._value(owner), str) and not is_open(text):
            return (python_text.of_text(last, text, [self._value(one) for one in node.args]),)
        if last == "get" and owner is not None and 1 <= len(node.args) <= 2:
            held, key = self._value(owner), str(self._value(node.args[0]))
            default = gap(roots(key) or [UNNAMED]) if is_open(key) else self._value(node.args[1]) if len(node.args) > 1 else None
            if isinstance(held, FileSettings) or waits(held):
                return (self._kept(held, key, default),)
            return (held.get(key, default),) if isinstance(held, dict) else None
        if last in (*HOLDERS, *self._classes) and len(node.keywords) == 1 and node.keywords[0].arg is None and not node.args:
            return (self._value(node.keywords[0].value),)
        if last in HOLDERS and node.keywords and not node.args:
            return (FileSettings(self.keywords(node)),)
        first = next(iter(node.args or words), None)
        if PASSES.fullmatch(name or last):
            inner = owner if isinstance(node.func, ast.Attribute) and last not in ("to_container", "create", "deepcopy") else first
            inner = first if isinstance(inner, ast.Name) and inner.id in ("io", "codecs", "os", "path") else inner
            return (self._value(inner),) if inner is not None else None
        if first is not None and READS.fullmatch(name or ast.unparse(node.func)[:200]):
            value = self._value(first)
            return (settings_in(self.path, value, self.said),) if reads(node, name, value) else None
        return None

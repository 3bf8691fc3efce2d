"""Python scripts that build an object out of others: which call makes a part. Nothing is executed."""

import ast
from dataclasses import replace
from typing import Any

from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import Function, called_as
from planner.trainers.reading.shell.text import gap, is_open

FARTHEST = 12
"""Names and conditions between a part and the call that makes it."""


class Parts(Script):
    """A script whose objects are built of parts that names, functions and conditions hand on."""

    def _walk(self) -> None:
        """A name that a function calls global is one of the module, and may be set there."""
        super()._walk()
        for node in ast.walk(self.tree):
            for name in node.names if isinstance(node, ast.Global) else ():
                set_here = self._names.pop((id(self._home[id(node)]), name), [])
                self._names.setdefault((id(None), name), []).extend(replace(one, sure=False) for one in set_here)
        self._own = {place.rpartition(".")[2] for place in self._attributes if place.startswith("self.")}

    def every_call(self) -> list[ast.Call]:
        """All calls, in the order of the text."""
        return sorted((one for some in self._calls.values() for one in some), key=lambda one: (one.lineno, one.col_offset))

    def changed(self) -> dict[str, int]:
        """Attributes that are assigned anywhere, by their dotted places without the first name: the line of the last one."""
        return {place.partition(".")[2]: some[-1].line for place, some in self._attributes.items() if "." in place}

    def cleared(self) -> set[str]:
        """Those of them that only None is assigned to."""
        empty = (place for place, some in self._attributes.items() if all(getattr(one.value, "value", ...) is None for one in some))
        return {place.partition(".")[2] for place in empty}

    def made(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that makes a part, through names, parameters, functions and conditions that are known; where one is not,
        the node that is not known."""
        for _ in range(FARTHEST):
            following = self._next(node)
            if following is None:
                break
            node = following
        return node

    def _of_attribute(self, node: ast.Attribute) -> Any:
        """A field that its object sets itself, somewhere, is not what its class says."""
        if node.attr in self._own and ast.unparse(node) not in self._attributes and self.said.setting(node.attr) is None:
            return gap([node.attr])
        return super()._of_attribute(node)

    def _next(self, node: ast.expr | None) -> ast.expr | None:
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            if isinstance(test, str) and is_open(test):
                return node.body if _alike(node.body, node.orelse) else None
            return node.body if test else node.orelse
        if isinstance(node, ast.Name):
            return self._given(node)
        function = self.functions.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if function is None:
            return None
        returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
        return returned[0] if len(returned) == 1 else None

    def _given(self, node: ast.Name) -> ast.expr | None:
        """What the one assignment, or the one call of its function, gives a name; None = not known."""
        home = self._home.get(id(node))
        while True:
            some = self._names.get((id(home), node.id), [])
            before = [one for one in some if one.line <= node.lineno] if home is self._home.get(id(node)) else some
            if before:
                sure = max((i for i, one in enumerate(before) if one.sure), default=0)
                return before[sure].value if sure == len(before) - 1 else None
            if home is None:
                return None
            if node.id in [one.arg for one in (*home.args.posonlyargs, *home.args.args, *home.args.kwonlyargs)]:
                return self._argument(home, node.id)
            home = self._home.get(id(home))

    def _argument(self, function: Function, name: str) -> ast.expr | None:
        calls = self._calls.get(called_as(function, self._owner), [])
        given = [one.value for call in calls for one in call.keywords if one.arg == name]
        if len(calls) > 1 or any(call.args or any(one.arg is None for one in call.keywords) for call in calls):
            return None
        arguments = function.args
        defaults = dict(zip([one.arg for one in reversed(arguments.args)], reversed(arguments.defaults), strict=False))
        defaults |= {one.arg: value for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
        return given[0] if given else defaults.get(name)


def _alike(one: ast.expr, other: ast.expr) -> bool:
    """Two calls with the same arguments, whatever is called: both ways make a part of one size."""
    def arguments(call: ast.Call) -> list[str]:
        return [ast.dump(part) for part in (*call.args, *call.keywords)]

    return isinstance(one, ast.Call) and isinstance(other, ast.Call) and arguments(one) == arguments(other)

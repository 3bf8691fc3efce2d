"""Programs of projects that take a recipe of Megatron-Bridge and lay options, files and overrides over it: their statements in the
order in which they run, under the options of their command. Nothing is executed."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.megatron_bridge.recipes import PARTS, Recipes
from planner.trainers.reading import python_text
from planner.trainers.reading.given import CONFIG_FILE, Given, Question
from planner.trainers.reading.python_text import is_main, last_name, option_names
from planner.trainers.reading.running import WithModules
from planner.trainers.reading.settings import beside, rooted
from planner.trainers.reading.shell.text import CLOSE, OPEN, gap, is_open, roots, shown_text

MOST_INLINED, MOST_ROUNDS = 8, 64
"""Functions that call functions, and rounds of a loop."""
LAYS_OVER = re.compile(r"\w*overrides?|from_dotlist|from_cli|merge_with_dotlist")
"""Functions that lay the words of a command over a configuration."""
LOADS = re.compile(r"OmegaConf\.load|yaml\.(safe_|full_)?load|\w*load_(yaml|config|overrides)\w*")
LAYOUT = "model.pipeline_model_parallel_layout"
SETS_LAYOUT = re.compile(r"set_\w*pipeline_model_parallel_layout")
"""Functions that spread layers over the stages that are said, as evenly as they go.  [recipes/deepseek/deepseek_v3.py]"""
THERE = ("exists", "isfile", "is_file", "hasattr")
"""Questions about files and fields that a run answers with yes."""
BUILT_IN: dict[str, type] = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}
ENDINGS = (".yaml", ".yml")
Recipe = Mapping[str, Mapping[str, Any]]
_OPEN = object()
"""The value of an expression that the text does not tell."""


class Program(WithModules):
    """A program with the options of its command, and the settings that it leaves."""

    def __init__(self, path: Path, said: Given, known: Recipe, over: Callable[[Path], dict[str, Any]]) -> None:
        super().__init__(path, said)
        self.over = over
        self.user = said
        self.recipes = Recipes(known)
        self.found: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        self._inlined: list[str] = []
        self.given: list[str] = []
        self.bound: dict[str, Any] = {}  # what loops give their names
        self.dynamic: list[int] = []  # lines that set fields by names that are not known
        self.environment: list[str] = []  # what is read of it
        self._ran: set[str] = set()
        made = {f"{one.name}.__init__": inner for one in ast.walk(self.tree) if isinstance(one, ast.ClassDef)
                for inner in one.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"}  # fmt: skip
        self.methods = {inner.name for one in ast.walk(self.tree) if isinstance(one, ast.ClassDef)
                        for inner in one.body if isinstance(inner, ast.FunctionDef)} - {"__init__"}  # fmt: skip
        self.inlines = {**self.functions, **made}

    def whole(self, tree: ast.Module) -> ast.Module:
        """Its own tree and what it imports from its project, without the library, which a fork of it holds: what that does with a
        configuration is known, and its recipes are read by themselves."""
        own = [one for one in tree.body if not (isinstance(one, ast.ImportFrom) and (one.module or "").startswith("megatron."))]
        found = super().whole(ast.Module(own, []))
        return ast.Module([*tree.body, *found.body[len(own) :]], [])

    def started(self, options: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under these options and words a.b=value of a command."""
        self.said = replace(self.user, settings={**self._options_as_settings(options), **self.user.settings})
        self.waiting, self.given = dict(words), list(options)
        if not self._block(self.tree.body) and not self.found:  # a module of functions that something else calls
            for one in [one for one in self.functions.values() if one.name not in self._ran]:
                self._block(one.body)
        self._take_words()
        return {"model.hf": "", **self.found} if self.found else {}

    def of_function(self, name: str) -> dict[str, Any]:
        """Settings of the configuration that one function of a module gives, whatever takes it."""
        self._block(one for one in self.tree.body if not is_main(one))
        self._inlined.append(name)
        self._block(self.functions[name].body)
        return {"model.hf": "", **self.found} if self.found else {}

    def notes(self) -> tuple[str, ...]:
        """Which options were taken at their defaults."""
        names = [one for one in dict.fromkeys(self.defaults) if one in self._options]
        usual = f"options of {self.path.name} at their defaults: {', '.join(names)}"
        read_here = {*self.names_used(), *self._options}
        variables = [one for one in dict.fromkeys(self.environment) if self.said.setting(one) is None]
        outside = f"variables of the environment at their defaults: {', '.join(variables[:20])}"
        foreign = [f"--{one}" for one in self.given if not any(known.startswith(one) for known in read_here)]
        strange = f"options of the command that {self.path.name} does not have: {', '.join(foreign)}"
        unseen = f"fields that line {self.dynamic[0] if self.dynamic else 0} sets by names that its text does not tell are not read"
        return (*[usual] * bool(names), *[outside] * bool(variables), *[strange] * bool(foreign), *[unseen] * bool(self.dynamic))

    def _options_as_settings(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Options of a command by the names under which the program has them: whole names, beginnings, switches."""
        found: dict[str, str] = {}
        for name, value in options.items():
            near = {id(call): call for one, call in self._options.items() if one.startswith(name)}
            call = self._options.get(name) or (next(iter(near.values())) if len(near) == 1 else None)
            if call is None:
                opposite = self._options.get(name.removeprefix("no_"))
                switch = opposite is not None and "BooleanOptional" in ast.unparse(opposite)
                found |= {name.removeprefix("no_"): "false"} if switch else {name: str(value)}
                continue
            kind = {one.arg: ast.unparse(one.value) for one in call.keywords}
            off = "store_false" in kind.get("action", "")
            text = "false" if off else "true" if kind.get("type") == "bool" and str(value) else str(value)
            found |= dict.fromkeys(option_names(call), text)
        return found

    # ------------------------------------------------------------------------------------------------------- statements

    def _block(self, body: Iterable[ast.stmt]) -> bool:
        """Runs statements; whether one of them surely leaves the function."""
        return any(self._run(one) for one in body)

    def _run(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return False
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.With):
            self._calls_in(*(one.context_expr for one in node.items))
            return self._block(node.body)
        if isinstance(node, ast.Try):
            return self._block([*node.body, *node.orelse, *node.finalbody])
        if isinstance(node, ast.For):
            self._for(node)
            return False
        if isinstance(node, ast.While):
            self._block(node.body)
            return False
        self._calls_in(node)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Return) and isinstance(value, ast.Call):
            node = ast.Assign([ast.Name("_", ast.Store())], value, lineno=node.lineno)
        elif isinstance(node, ast.Return):
            return True
        done = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_"
        node = self._with_setattr(node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and node.value is not None and not self._same(node):
            self.recipes.step(self._filled(node), self.found)
        return done

    def _for(self, node: ast.For) -> None:
        """Runs a loop over what is known, as often as it is; any other once."""
        over = node.iter
        if isinstance(over, ast.Call) and last_name(over.func) in ("items", "enumerate") and isinstance(over.func, ast.Attribute):
            held = self.value(over.func.value)
            rounds = [list(one) for one in held.items()] if isinstance(held, dict) else None
        else:
            held = self.value(over)
            rounds = held if isinstance(held, list) else None
        names = [one.id for one in getattr(node.target, "elts", [node.target]) if isinstance(one, ast.Name)]
        parts = [self._part(one) for one in getattr(over, "elts", ())] if len(names) == 1 else []
        parts = [] if None in parts else parts  # for part in (cfg.model, getattr(cfg, "comm_overlap", None))
        for i, one in enumerate(rounds[:MOST_ROUNDS] if rounds is not None and names else [None]):
            part = parts[i] if i < len(parts) else None
            values: list[Any] = one if len(names) > 1 and isinstance(one, list) else [one]
            before = dict(self.bound)
            if part is not None:
                self.recipes.constants[names[0]] = part
            elif rounds is not None and len(values) == len(names):
                self.bound |= dict(zip(names, values, strict=True))
            self._block(node.body)
            self.bound = before

    def _part(self, node: ast.expr) -> ast.expr | None:
        """A section of the configuration, also as getattr(cfg, "comm_overlap", None); None = no such section."""
        if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) > 1:
            name = self._sure(node.args[1])
            node = ast.Attribute(node.args[0], name, ast.Load()) if isinstance(name, str) else node
        return node if self.recipes.place_of(node) in PARTS else None

    def _if(self, node: ast.If) -> bool:
        test = True if is_main(node) else self._test(node.test)
        if test is not _OPEN:
            return self._block(node.body if test else node.orelse)
        before, words = dict(self.found), bool(self.waiting)
        waits = [one for one in roots(str(self.value(node.test))) if self._may_be_asked(one)]
        self._block(node.body)
        if words and not self.waiting:  # if overrides: ...
            return False
        first, self.found = self.found, dict(before)
        self._block(node.orelse)
        differ = [one for one in {**first, **self.found} if first.get(one) != self.found.get(one)]
        if differ and waits:
            self._ask_for(waits)
            self.found = first
        elif differ:
            self.found |= {one: gap([one]) for one in differ if one != "model.hf" or before}
        return False

    def _ask_for(self, names: list[str]) -> None:
        for name in names:
            words = {one.arg: one.value for one in self._options[name].keywords} if name in self._options else {}
            choices = self.value(words["choices"]) if "choices" in words else []
            values = tuple(map(str, choices)) if isinstance(choices, list) else ()
            self.user.questions.append(Question(name=name, about=f"an option of {self.path.name}", choices=values))

    def _calls_in(self, *nodes: ast.AST) -> None:
        """Runs what the calls of a statement run: functions of the project, files and words laid over the configuration."""
        calls = [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
        for call in sorted(calls, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0)):
            name, last = ast.unparse(call.func), last_name(call.func)
            given = [one.id for one in call.args if isinstance(one, ast.Name)] if last in ("Fire", "run", "main") else []
            method = last if isinstance(call.func, ast.Attribute) and last in self.methods else ""
            made = f"{name}.__init__" if name in self._classes else ""
            layout = SETS_LAYOUT.fullmatch(last) is not None
            self.found |= {LAYOUT: None} if layout else {}
            for own in [name, method, made, *given]:
                if not layout and own in self.inlines and own not in self._inlined and len(self._inlined) < MOST_INLINED:
                    self._inlined.append(own)
                    self._ran.add(own)
                    self.recipes.bind(self.inlines[own], call)
                    self._block(self.inlines[own].body)
                    self._inlined.pop()
            backend = self._sure(call.args[1]) if last == "apply_flex_dispatcher_backend" and len(call.args) > 1 else None
            if backend in ("deepep", "hybridep"):
                for field, value in (("token_dispatcher_type", "flex"), ("flex_dispatcher_backend", backend)):
                    place: ast.expr = ast.Attribute(call.args[0], f"moe_{field}", ast.Store())
                    self.recipes.step(ast.Assign([place], ast.Constant(value), lineno=call.lineno), self.found)
            if LOADS.fullmatch(name) and call.args and name not in self.functions:
                self._take_file(call.args[0])
            if LAYS_OVER.fullmatch(last) and last not in self.functions:
                for word in call.keywords:
                    if "file" in (word.arg or ""):
                        self._take_file(word.value)
                self._take_words()

    def _take_file(self, node: ast.expr) -> None:
        """Settings of a YAML that is merged; it is asked for where it is not there."""
        value = self.user.setting(CONFIG_FILE) or self.value(node)
        if value in (None, _OPEN, ""):
            return
        name = str(value)
        if is_open(name) and not shown_text(name).lower().endswith(ENDINGS):  # args.file or 'usual.yaml'
            texts = [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)]
            name = next((one for one in texts if one.lower().endswith(ENDINGS)), name)
        found = (beside(self.path, place, ENDINGS) for place in (rooted(name), f"conf/{rooted(name)}"))
        file = next((one for one in found if one is not None), None)
        if file is not None:
            self.found |= self.over(file)
        elif is_open(name) or name.lower().endswith(ENDINGS):
            about = f"the YAML that {self.path.name} reads: {shown_text(name)[:80]} is not there"
            self.user.questions.append(Question(name=CONFIG_FILE, about=about, choices=("FILE",)))

    def _take_words(self) -> None:
        self.found |= self.waiting
        self.waiting = {}

    # ------------------------------------------------------------------------------------------------------------ values

    def _same(self, node: ast.Assign | ast.AnnAssign | ast.Expr) -> bool:
        """Whether an assignment leaves its target as it is: cfg.a = args.a or cfg.a."""
        if not isinstance(node, ast.Assign) or node.value is None:
            return False
        chosen = self._chosen(node.value)
        return ast.unparse(chosen) == ast.unparse(node.targets[0])

    def _chosen(self, node: ast.expr) -> ast.expr:
        """The branch of a or b, of a if b else c, that counts."""
        if isinstance(node, ast.IfExp) and (test := self._test(node.test)) is not _OPEN:
            return self._chosen(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            for one in node.values[:-1]:
                value = self._test(one)
                if value is _OPEN or value:
                    return one if value is not _OPEN else node
            return self._chosen(node.values[-1])
        return node

    def _test(self, node: ast.expr) -> Any:
        """Whether a condition holds; _OPEN = not known."""
        if isinstance(node, ast.BoolOp):
            wanted = isinstance(node.op, ast.Or)
            tests = [self._test(one) for one in node.values]
            if any(one is not _OPEN and bool(one) is wanted for one in tests):
                return wanted
            return _OPEN if _OPEN in tests else not wanted
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._test(node.operand)
            return inner if inner is _OPEN else not inner
        if isinstance(node, ast.Call) and last_name(node.func) in THERE:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
            value, kind = self._sure(node.args[0]), BUILT_IN.get(ast.unparse(node.args[1]))
            return _OPEN if value is _OPEN or kind is None else isinstance(value, kind)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._sure(node.left), self._sure(node.comparators[0])
            if right is None and left is _OPEN and self._section(node.left):  # a section that every configuration has
                return isinstance(node.ops[0], ast.IsNot | ast.NotEq)
            found = None if _OPEN in (left, right) else python_text.compared(node.ops[0], left, right)
            return _OPEN if found is None else found
        value = self.value(node)
        if isinstance(value, str) and is_open(value):  # a path below a folder that is not known is one all the same
            return True if shown_text(re.sub(f"{OPEN}[^{CLOSE}]*{CLOSE}", "", value)) else _OPEN
        return bool(value)

    def _section(self, node: ast.expr) -> bool:
        place = self.recipes.place_of(node)
        return place is not None and (place in self.found or any(one.startswith(f"{place}.") for one in self.found))

    def _sure(self, node: ast.expr) -> Any:
        """A value that is known, _OPEN otherwise."""
        value = self.value(node)
        return _OPEN if isinstance(value, str) and is_open(value) else value

    def _value(self, node: ast.expr) -> Any:
        """The same as of any script; a field of the configuration is what it is by now."""
        if isinstance(node, ast.Name) and node.id in self.bound:
            return self.bound[node.id]
        if isinstance(node, ast.Attribute) and (place := self.recipes.place_of(node)) in self.found:
            return self.found[place]
        if isinstance(node, ast.IfExp | ast.BoolOp) and (chosen := self._chosen(node)) is not node:
            return self._value(chosen)
        try:
            return super()._value(node)
        except PlannerError:
            if CONFIG_FILE in self.user.settings:
                raise
            return gap([CONFIG_FILE])  # the option of that name says a file that is not there

    def _of_call(self, node: ast.Call) -> Any:
        """The same, with the variables of the environment that have a default and decide a value."""
        own = self.functions.get(last_name(node.func))
        own_read = own is not None and python_text.read_of_environment(own) is not None
        if len(node.args) > 1 and (own_read or python_text.of_environment(node, ast.unparse(node.func))):
            name = self._value(node.args[0])
            self.environment += [name] if isinstance(name, str) and re.fullmatch(r"[A-Z]\w*", name) else []
        return super()._of_call(node)

    def _filled(self, node: Any) -> Any:
        """A statement or an expression with the values that are known in the places of what gives them."""
        if isinstance(node, ast.Assign):
            return ast.Assign(node.targets, self._filled(node.value), lineno=node.lineno)
        if isinstance(node, ast.AnnAssign):
            return ast.Assign([node.target], self._filled(node.value), lineno=node.lineno)
        if isinstance(node, ast.Expr):
            return ast.Expr(self._filled(node.value))
        node = self._chosen(node)
        value = self.value(node)
        known = not (isinstance(value, str) and is_open(value))
        if not known and (names := roots(value)) and all(self._may_be_asked(one) for one in names):
            return ast.Constant(value)
        if isinstance(node, ast.Call) and not (known and isinstance(value, bool | int | float | str | list)):
            keywords = [ast.keyword(one.arg, self._filled(one.value)) for one in node.keywords]
            return ast.Call(self._callee(node.func), [self._filled(one) for one in node.args], keywords)
        if isinstance(node, ast.Dict):
            return ast.Dict(node.keys, [self._filled(one) for one in node.values])
        if not known:
            return node
        plain: Any = value
        return ast.Constant(plain) if isinstance(value, bool | int | float | str | list | None) else node

    def _may_be_asked(self, name: str) -> bool:
        """Whether a gap waits for an option, a variable of the environment or a file."""
        return name in self._options or name.isupper() or name == CONFIG_FILE

    def _callee(self, node: ast.expr) -> ast.expr:
        """The function behind RECIPES[name], getattr(module, name), or a name for one of these."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            return ast.Attribute(self._filled(node.value), node.attr, ast.Load())
        for _ in range(4):
            node = self.recipes.constants.get(node.id, node) if isinstance(node, ast.Name) else node
            if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) > 1:
                name = self._sure(node.args[1])
                return ast.Name(name) if isinstance(name, str) and re.fullmatch(r"\w+", name) else node
            if not isinstance(node, ast.Subscript | ast.Call):
                break
            held = node.value if isinstance(node, ast.Subscript) else getattr(node.func, "value", node.func)
            key = node.slice if isinstance(node, ast.Subscript) else (node.args[0] if node.args else node.func)
            held = self.recipes.constants.get(held.id, held) if isinstance(held, ast.Name) else held
            chosen = python_text.entry(held, self._sure(key))
            if chosen is None:
                break
            node = chosen
        return node

    def _with_setattr(self, node: ast.stmt) -> ast.stmt:
        """setattr(a, 'b', c) as a.b = c."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or last_name(call.func) != "setattr" or len(call.args) != 3:
            return node
        owner, name = call.args[0], self._sure(call.args[1])
        if isinstance(owner, ast.Call) and last_name(owner.func) == "getattr" and len(owner.args) > 1:
            part = self._sure(owner.args[1])
            owner = ast.Attribute(owner.args[0], part, ast.Load()) if isinstance(part, str) else owner
        if not isinstance(name, str) or isinstance(owner, ast.Call):
            self.dynamic.append(node.lineno)
            return node
        return ast.Assign([ast.Attribute(owner, name, ast.Store())], call.args[2], lineno=node.lineno)

"""Flags with types and choices out of an engine's Python sources, by their syntax trees: nothing of the engine is imported.

vLLM adds its flags with ``group.add_argument("--name", **kwargs["field"])``, where ``kwargs`` were made of the annotations of a
configuration class; SGLang makes one flag of every annotated field ``name: A[type, Arg(...)]``; benchmarks and routers use
argparse itself. [vllm 0.33 engine/arg_utils.py: _compute_kwargs; sglang 0.5.23 arg_groups/arg_utils.py:
add_cli_args_from_dataclass]
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Flag = dict[str, Any]
"""``type``: flag (no value), int, float, str, json, or one of these with + behind it for several values; ``choices``: its values;
``keys``: classes whose fields a mapping may have; ``same``: the flag that it is another word for."""
Flags = dict[str, Flag]
Record = dict[str, dict[str, Flags]]
"""``programs``: flags by program; ``classes``: keys of what JSON flags and configuration files hold."""
_PARSERS = {
    "int": "int", "float": "float", "str": "str", "bool": "str", "json.loads": "json", "human_readable_int": "int",
    "human_readable_int_or_auto": "int", "nullable_str": "str",
}  # fmt: skip
_JSON_FIELDS = (
    "default_chat_template_kwargs",
    "reasoning_effort_map",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
)
"""Fields of vLLM's front end whose parser is set by hand. [entrypoints/common/cli_args.py: _customize_cli_kwargs]"""
_READABLE = ("max_num_batched_tokens", "max_num_scheduled_tokens", "kv_cache_memory_bytes", "max_model_len")
"""Numbers that vLLM also takes as 8k or 1G."""


def vllm_flags(root: Path) -> Record:
    """Flags of ``vllm serve`` and ``vllm bench serve``; ``root`` holds the folder vllm. Raises OSError, SyntaxError, KeyError."""
    package = root / "vllm"
    known = _Sources(
        [*sorted((package / "config").glob("*.py")), package / "model_executor/layers/quantization/__init__.py"]
    )
    source = _Sources([package / "engine" / "arg_utils.py"])
    serve: Flags = {}
    for function in source.functions("add_cli_args"):
        classes = {  # name = get_kwargs(Class)
            node.targets[0].id: node.value.args[0].id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name)
            and ast.unparse(node.value.func) == "get_kwargs" and isinstance(node.value.args[0], ast.Name)
        }  # fmt: skip
        for call in _arguments(function):
            _add(serve, call, _of_fields(call, classes, known) or _of_call(call, source))
    front = _Sources([package / "entrypoints" / "common" / "cli_args.py"])
    for name, annotation in front.fields("BaseFrontendArgs", "FrontendArgs").items():
        flag = (
            {"type": "json"}
            if name in _JSON_FIELDS
            else _of_annotation(name, annotation, _Sources.joined(known, front))
        )
        _named(serve, [f"--{name.replace('_', '-')}"], flag)
    for call in _arguments(front.function("make_arg_parser")):
        _add(serve, call, _of_call(call, front))
    bench: Flags = {}
    clients = package / "benchmarks" / "lib" / "endpoint_request_func.py"
    for path in (package / "benchmarks" / "serve.py", *sorted((package / "benchmarks" / "datasets").glob("*.py"))):
        client = _Sources([path, clients])
        for call in _arguments(client.trees[0]):
            _add(bench, call, _of_call(call, client))
    programs = {"vllm serve": serve, "vllm bench serve": bench}
    return {"programs": programs, "classes": _classes(programs, known)}


def sglang_flags(root: Path) -> Record:
    """Flags of ``sglang.launch_server`` and ``sglang.bench_serving``; ``root`` holds the folder sglang."""
    groups = root / "sglang" / "srt" / "arg_groups"
    files = sorted((groups / "fields").glob("*.py"))
    known = _Sources([groups / "choices.py", *files, *sorted(groups.glob("*.py"))])
    server: Flags = {}
    for path in files:
        for cls in _Sources([path]).classes.values():
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    _sglang_field(server, node.target.id, node.annotation, known)
    record = _Sources([root / "sglang" / "srt" / "server_args.py"])
    for call in _arguments(record.trees[0]):
        _add(server, call, _of_call(call, record))
    bench: Flags = {}
    client = _Sources([root / "sglang" / "benchmark" / "serving.py"])
    for call in _arguments(client.trees[0]):
        _add(bench, call, _of_call(call, client))
    return {"programs": {"sglang.launch_server": server, "sglang.bench_serving": bench}, "classes": {}}


def trtllm_flags(root: Path) -> Record:
    """Keys of the file after ``trtllm-serve --config``: models of pydantic that refuse what they do not know; ``root`` holds the
    folder tensorrt_llm. The words of its command line are made while it runs and stand in the record alone."""
    known = _Sources([root / "tensorrt_llm" / "llmapi" / "llm_args.py"])
    config = {name: _of_annotation(name, one, known) for name, one in _all_fields("TorchLlmArgs", known).items()}
    return {"programs": {"trtllm-serve --config": config}, "classes": _classes({"": config}, known)}


def router_flags(root: Path, package: str, program: str) -> Record:
    """Flags of vllm-router or sglang-router, which add ``--{prefix}name`` with an empty prefix."""
    source = _Sources([root / package / "router_args.py"])
    found: Flags = {}
    for call in _arguments(source.trees[0]):
        _add(found, call, _of_call(call, source))
    return {"programs": {program: found}, "classes": {}}


def _sglang_field(found: Flags, name: str, annotation: ast.expr, known: "_Sources") -> None:
    """One field ``A[type, "help"]`` or ``A[type, Arg(...)]``; others are no flags."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated")):
        return
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    keywords: dict[str, ast.expr] = {}
    for part in parts[1:]:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Derived":
            return
        if isinstance(part, ast.Call):
            keywords = {one.arg: one.value for one in part.keywords if one.arg}
    if len(parts) < 2 or ("no_cli" in keywords and ast.unparse(keywords["no_cli"]) == "True"):
        return
    flag = _of_annotation(name, parts[0], known)
    if "action" in keywords:
        flag = _action(ast.unparse(keywords["action"])) or flag
    if "type_parser" in keywords:
        flag = {"type": _PARSERS.get(ast.unparse(keywords["type_parser"]), "str")}
    choices = known.values(keywords["choices"]) if "choices" in keywords else None
    if choices:
        flag["choices"] = choices
    written = known.values(keywords["cli_name"]) if "cli_name" in keywords else None
    aliases = (known.values(keywords["aliases"]) if "aliases" in keywords else None) or []
    _named(found, [written[0] if written else f"--{name.replace('_', '-')}", *aliases], flag)


@dataclass
class _Sources:
    """Syntax trees of some files with what is assigned in them at the top."""

    paths: list[Path]
    trees: list[ast.Module] = field(init=False)
    assigned: dict[str, ast.expr] = field(init=False)
    classes: dict[str, ast.ClassDef] = field(init=False)

    def __post_init__(self) -> None:
        self.trees = [ast.parse(path.read_text(encoding="utf-8")) for path in self.paths]
        self.assigned, self.classes = {}, {}
        for node in (node for tree in self.trees for node in tree.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.assigned.setdefault(node.target.id, node.value)
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)

    @classmethod
    def joined(cls, *parts: "_Sources") -> "_Sources":
        """All of them as one; the first wins."""
        whole = cls([])
        for part in reversed(parts):
            whole.assigned |= part.assigned
            whole.classes |= part.classes
        return whole

    def functions(self, name: str) -> list[ast.FunctionDef]:
        """Functions and methods of this name."""
        return [
            node
            for tree in self.trees
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]

    def function(self, name: str) -> ast.FunctionDef:
        """The first of them. Raises KeyError."""
        found = self.functions(name)
        if not found:
            raise KeyError(name)
        return found[0]

    def fields(self, *names: str) -> dict[str, ast.expr]:
        """Annotations of the fields of some classes. Raises KeyError."""
        return {
            node.target.id: node.annotation
            for name in names
            for node in self.classes[name].body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not ast.unparse(node.annotation).startswith("ClassVar")
        }

    def values(self, node: ast.expr, depth: int = 8) -> list[Any] | None:
        """Constants of a list, tuple, dict's keys, sum of lists, or a name of these; None where it is made while it runs."""
        if depth == 0:
            return None
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = [self.values(one.value if isinstance(one, ast.Starred) else one, depth - 1) for one in node.elts]
            return None if any(one is None for one in parts) else [value for one in parts for value in one or ()]
        if isinstance(node, ast.Dict):
            return [one.value for one in node.keys if isinstance(one, ast.Constant)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = self.values(node.left, depth - 1), self.values(node.right, depth - 1)
            return None if both[0] is None or both[1] is None else both[0] + both[1]
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self.values(self.assigned[node.id], depth - 1)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "sorted", "get_args") and node.args:
            return self.values(node.args[0], depth - 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            return self.values(node.func.value, depth - 1)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            return self.values(node.slice, depth - 1)
        return None

    def atoms(self, node: ast.expr, depth: int = 8) -> Iterator[tuple[str, Any]]:
        """What a type is made of: ("literal", value), or ("type", the text of its parts)."""
        text = ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self.atoms(ast.parse(node.value, mode="eval").body, depth - 1)
        elif depth == 0 or text in ("None", "Any"):
            yield "type", text
        elif isinstance(node, ast.BinOp):
            yield from self.atoms(node.left, depth)
            yield from self.atoms(node.right, depth)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            for value in self._literals(node.slice):
                yield "literal", value
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Optional", "Union", "Annotated", "A"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for one in parts[:1] if ast.unparse(node.value) in ("Annotated", "A") else parts:
                yield from self.atoms(one, depth - 1)
        elif isinstance(node, ast.Name) and node.id in self.assigned and node.id not in self.classes:
            yield from self.atoms(self.assigned[node.id], depth - 1)
        else:
            yield "type", text

    def _literals(self, node: ast.expr) -> Iterator[Any]:
        """Values of Literal[...], which may hold names of others."""
        for one in node.elts if isinstance(node, ast.Tuple) else [node]:
            yield from self.values(one) or ()


def _of_annotation(name: str, annotation: ast.expr, known: _Sources) -> Flag:
    """The flag that vLLM's and SGLang's own rules make of the type of a field."""
    atoms = list(known.atoms(annotation))
    types = [text for kind, text in atoms if kind == "type"]
    literals = list(dict.fromkeys(value for kind, value in atoms if kind == "literal" and value is not None))
    heads = {text.split("[")[0] for text in types}
    records = [text for text in types if text in known.classes and _is_record(known.classes[text])]
    if records:
        return {"type": "json", "keys": records}
    if "bool" in types and set(types) != {"bool", "str", "None"}:
        return {"type": "flag"}
    if literals:
        return {"type": type(literals[0]).__name__ if "str" not in types else "str", "choices": literals}
    for head in ("tuple", "list", "List", "set"):
        if head in heads:
            inner = next(text for text in types if text.split("[")[0] == head).partition("[")[2]
            return {"type": f"{'int' if inner.startswith('int]') or inner == 'int, ...]' else 'str'}+"}
    for kind in ("float", "int"):
        if any(text.lower() in (kind, f"positive{kind}", f"nonnegative{kind}") for text in types):
            return {"type": kind, **({"readable": True} if name in _READABLE else {})}
    return {"type": "json" if heads & {"dict", "Dict"} and "str" not in types else "str"}


def _is_record(cls: ast.ClassDef) -> bool:
    """A dataclass or a model of pydantic: its flag takes JSON, its key a mapping."""
    bases = [ast.unparse(one) for one in cls.bases]
    return any(
        "dataclass" in ast.unparse(one) or ast.unparse(one).split("(")[0] == "config" for one in cls.decorator_list
    ) or any(one.endswith(("BaseModel", "Config", "LlmArgs")) for one in bases)


def _classes(found: Mapping[str, Flags], known: _Sources) -> dict[str, Flags]:
    """Keys of the records that flags take, and of those inside of these."""
    kept: dict[str, Flags] = {}
    waiting = [name for flags in found.values() for flag in flags.values() for name in flag.get("keys", ())]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = {key: _of_annotation(key, one, known) for key, one in _all_fields(name, known).items()}
            waiting += [inner for flag in kept[name].values() for inner in flag.get("keys", ())]
    return kept


def _all_fields(name: str, known: _Sources) -> dict[str, ast.expr]:
    """Fields of a class after those of its bases; the class's own win."""
    found: dict[str, ast.expr] = {}
    for base in _bases(name, known):
        if base in known.classes:
            found |= _all_fields(base, known)
    return {
        key: one
        for key, one in (found | known.fields(name)).items()
        if not key.startswith("_") and key != "model_config"
    }


def _of_fields(call: ast.Call, classes: Mapping[str, str], known: _Sources) -> Flag | None:
    """``**kwargs["field"]`` of a configuration class, or ``**{**kwargs["field"], "default": ...}``."""
    for one in (part for keyword in call.keywords if keyword.arg is None for part in ast.walk(keyword.value)):
        if isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name):
            cls, name = classes.get(one.value.id), one.slice
            if cls in known.classes and isinstance(name, ast.Constant):
                fields = _all_fields(cls, known)
                if name.value in fields:
                    return _of_annotation(str(name.value), fields[name.value], known)
    return None


def _bases(cls: str, known: _Sources) -> list[str]:
    return [base.id for base in known.classes[cls].bases if isinstance(base, ast.Name)]


def _of_call(call: ast.Call, known: _Sources) -> Flag:
    """A call of argparse's own form."""
    keywords = {one.arg: one.value for one in call.keywords if one.arg}
    flag: Flag = {"type": _PARSERS.get(ast.unparse(keywords["type"]), "str") if "type" in keywords else "str"}
    if "action" in keywords:
        flag = _action(ast.unparse(keywords["action"])) or flag
    if "nargs" in keywords and ast.unparse(keywords["nargs"]) in ("'+'", "'*'"):
        flag["type"] += "+"
    choices = known.values(keywords["choices"]) if "choices" in keywords else None
    return {**flag, **({"choices": choices} if choices else {})}


def _action(text: str) -> Flag | None:
    """The flag of an action; None where it takes a value."""
    bare = ("store_true", "store_false", "BooleanOptionalAction", "StoreTrue", "StoreConst", "DeprecatedAction")
    return {"type": "flag"} if any(one in text for one in bare) else None


def _arguments(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of add_argument that name a flag."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(node, ast.Call)
            and isinstance(called, ast.Attribute)
            and called.attr == "add_argument"
            and _words(node)
        ):
            yield node


def _words(call: ast.Call) -> list[str]:
    """Option strings; of an f-string its constant parts."""
    found = []
    for one in call.args:
        parts = one.values if isinstance(one, ast.JoinedStr) else [one]
        text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        if text.startswith("-"):
            found.append(text)
    return found


def _add(found: Flags, call: ast.Call, flag: Flag) -> None:
    _named(found, sorted(_words(call), key=lambda word: not word.startswith("--")), flag)


def _named(found: Flags, words: list[str], flag: Flag) -> None:
    """A flag under its first word; others are the same as it."""
    found[words[0]] = flag
    for word in words[1:]:
        found[word] = {"same": words[0]}

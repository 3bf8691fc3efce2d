"""What a project's own program beside a Megatron script says: defaults, layers and arguments of its own. Nothing is executed."""

import ast
import re
from itertools import islice
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.megatron.arguments import Arguments, decides
from planner.trainers.megatron.around import USUAL, parser_around, take_defaults, take_own_layers
from planner.trainers.megatron.forks import RMS_NORM
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.python_text import last_name, tree_or_none
from planner.trainers.reading.values import read_text

MOST_MODULES = 12
"""Modules of a project that are looked into."""
OTHERS = ("megatron", "torch", "numpy", "os", "sys", "typing", "transformers")
"""Packages that are not the project's own, wherever they lie."""
LOGGED = re.compile(r"\b(log(s|ging|ger)?|monitor(ing)?|metrics?|track(ing|er)?|wandb|report(ing)?|client|telemetry)\b", re.I)
"""Titles of groups of arguments that decide nothing of a step."""


def labels(found: Arguments) -> set[str]:
    """Arguments that a project's own program defines in groups of what is logged, and where to."""
    names: set[str] = set()
    for tree in _trees(found):
        titles: dict[str, str] = {}
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)):
            call = node.value
            if isinstance(call, ast.Call) and last_name(call.func) == "add_argument_group":
                said = [*call.args, *(one.value for one in call.keywords if one.arg == "title")]
                titles[ast.unparse(node.targets[0])] = str(said[0].value) if said and isinstance(said[0], ast.Constant) else ""
        for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func) == "add_argument"):
            group = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if LOGGED.search(titles.get(group, "")):
                words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                names |= {one.lstrip("-").replace("-", "_") for one in words}
    return names


def _trees(found: Arguments) -> list[ast.Module]:
    program = program_file(Path(found.where), found.program) if found.program and not found.dumped else None
    return [] if program is None else _modules(program)


def take_around(found: Arguments) -> None:
    """Takes what lies around a script: what its program says, then the defaults of the Megatron there."""
    _take_program(found)
    _drop_unread_heads(found)
    take_defaults(found)
    parser = None if found.dumped else tree_or_none(parser_around(found.where))
    _take_assigned(found, [parser] if parser is not None else [], "arguments.py of the Megatron around it")


MOST_FILES = 1000
"""Files of a package of Megatron that are looked through."""
READ = r"^[^#\n]*(?:\b(?:args|config)\.|getattr\(\w+, *.){}\b"
"""A line of a layer that reads an argument."""


def _drop_unread_heads(found: Arguments) -> None:
    """Takes --num-key-value-heads away where the layers of the package that a program imports read --num-query-groups alone."""
    heads, program = found.get("num_key_value_heads"), program_file(Path(found.where), found.program) if found.program else None
    if heads in (None, found.get("num_attention_heads")) or program is None or found.get("group_query_attention"):
        return
    names = re.findall(r"^[ \t]*(?:from|import) (\w*megatron\w*)", read_text(program), re.MULTILINE)
    folder = next((up / one for one in names for up in program.resolve().parents[:4] if (up / one).is_dir()), program / "none")
    files = [one for one in islice(folder.rglob("*.py"), MOST_FILES) if one.name not in ("arguments.py", "checkpointing.py")]
    text = "\n".join(one.read_bytes().decode(errors="replace") for one in files)
    groups, own = (re.search(READ.format(one), text, re.MULTILINE) for one in ("num_query_groups", "num_key_value_heads"))
    if groups is not None and own is None:
        del found["num_key_value_heads"]
        what = "its layers read --num-query-groups under --group-query-attention, and have keys and values for every head"
        found.notes.append(f"--num-key-value-heads {heads} does nothing in {folder.name}: {what}")


def _take_program(found: Arguments) -> None:
    """Takes what a project's own program and the modules beside it say of arguments that the script does not give."""
    trees = _trees(found)
    for name, value in (_handed(trees[0]) if trees else {}).items():
        none = name in USUAL and USUAL[name] is None and value not in (None, False)
        if none and name not in found and not (name == "recompute_granularity" and found.get("recompute_activations")):
            found[name] = str(value)
            found.notes.append(f"{found.spelled(name)} {value} by args_defaults of {found.program}")
    _take_assigned(found, trees[:1], found.program)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if any(_says_local(node) for node in nodes):
        take_own_layers(found, f"{found.program} takes Megatron's own layers alone, which keep scores without --use-flash-attn")
    classes = [one for one in nodes if isinstance(one, ast.ClassDef)]
    layers = [one for one in classes if any(last_name(base).endswith("TransformerLayer") for base in one.bases)]
    rms = any(isinstance(node, ast.Call) and last_name(node.func) == "RMSNorm" for one in layers for node in ast.walk(one))
    if rms and "normalization" not in found and not any(found.get(one) for one in RMS_NORM):
        found["normalization"] = "RMSNorm"
        found.notes.append(f"--normalization RMSNorm: layers of {found.program} have it")


STARTS = re.compile(r"provider|train|initiali|set_?up|^(main|parse_args|validate_args)$")
"""Functions of a program, and of the module of arguments, that run before its first step."""
OF_MEGATRON = ("transformer_impl", "use_layer_wise_distributed_optimizer")
"""What Megatron's own functions set so, or set again under a condition."""


def _take_assigned(found: Arguments, trees: list[ast.Module], where: str) -> None:
    """Takes constants that a program gives arguments by itself, args.bf16 = True, whatever its script says."""
    functions = [one for tree in trees for one in tree.body if isinstance(one, ast.FunctionDef) and STARTS.search(one.name)]
    for node in (one for function in functions for one in function.body if isinstance(one, ast.Assign)):
        target, value = node.targets[0], node.value
        if not (isinstance(target, ast.Attribute) and ast.unparse(target.value) == "args" and isinstance(value, ast.Constant)):
            continue
        name, said, text = target.attr, value.value, str(value.value)
        same = str(found.get(name)) == text or (said in (None, False) and not found.get(name))
        if same or not decides(name) or name in OF_MEGATRON:
            continue
        found.pop(name, None)
        if said not in (None, False):
            found[name] = True if said is True else text
        found.notes.append(f"{found.spelled(name)} {text}: {where} sets it, whatever is said")


def _modules(program: Path) -> list[ast.Module]:
    """A program and the modules beside it that it imports, the program first."""
    found: dict[Path, ast.Module] = {}
    waiting, above = [program], program.resolve().parents[:8]
    while waiting and len(found) < MOST_MODULES:
        file = waiting.pop(0)
        if file in found or not library.is_file(file):
            continue
        try:
            found[file] = tree = library.parse_python(read_text(file), str(file))
        except PlannerError:
            continue
        names = [one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module]
        names += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
        own = [f"{one.replace('.', '/')}.py" for one in dict.fromkeys(names) if one.partition(".")[0] not in OTHERS]
        near = [[up / one for up in above if library.is_file(up / one)] for one in own]
        waiting += [one[0] for one in near if one]
    return list(found.values())


def _handed(tree: ast.Module) -> dict[str, Any]:
    """Constants in args_defaults of pretrain(): they hold where the parser's own default is None.  [training/arguments.py]"""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func) == "pretrain"]
    node = next((word.value for one in calls for word in one.keywords if word.arg == "args_defaults"), None)
    if isinstance(node, ast.Name):
        named = [one.value for one in ast.walk(tree) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id]
        node = named[0] if len(named) == 1 else None
    pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
    return {str(key.value): one.value for key, one in pairs if isinstance(key, ast.Constant) and isinstance(one, ast.Constant)}


def _says_local(node: ast.AST) -> bool:
    """Whether a statement asserts or sets args.transformer_impl to "local"."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
        left, right = node.test.left, node.test.comparators[0]
    elif isinstance(node, ast.Assign):
        left, right = node.targets[0], node.value
    else:
        return False
    of_arguments = isinstance(left, ast.Attribute) and left.attr == "transformer_impl"
    return of_arguments and isinstance(right, ast.Constant) and right.value == "local"

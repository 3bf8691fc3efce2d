"""The command that a Python program builds as lists of words, with the defaults of its own options. Nothing is executed."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from planner.trainers.megatron.arguments import Arguments
from planner.trainers.megatron.script import LAUNCHERS, of_script
from planner.trainers.reading.given import Given
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import is_open, roots

STARTS = re.compile(r"\bsubprocess\.|\bos\.(system|exec\w+)\(")
SIZES = re.compile(
    r"num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|max_position_embeddings|rotary_\w+|swiglu"
    r"|(layer)?norm_epsilon|qk_layernorm|group_query_attention|num_experts|moe_ffn_hidden_size|untie_embeddings_and_output_weights"
)
"""Arguments that the model says where one of them stands in a file that the program reads."""


def of_launcher(where: str, given: Given) -> Arguments | None:
    """Arguments of the command that a program starts; None where it starts none that can be followed. Raises PlannerError."""
    script = Running(Path(where), given)
    programs = [one.value for one in ast.walk(script.tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    program = next((one for one in programs if re.fullmatch(r"[\w./-]*(pretrain|train|finetune)\w*\.py", one)), None)
    found, sure = _options(script)
    names = [name for name, _ in found]
    differ = any(len({value for name, value in found if name == one}) > 1 for one in names)
    if program is None or len({*names}) < 3 or differ or _written_elsewhere(script):
        return None
    waits = [name for name, value in found if value is not None and is_open(value) and SIZES.fullmatch(_plain(name))]
    unsure = [name for name in names if name not in sure]
    if any(not (waits and SIZES.fullmatch(_plain(name))) for name in unsure):
        return None
    kept = [one for one in dict.fromkeys(found) if not (waits and SIZES.fullmatch(_plain(one[0])))]
    words = [_written(*one) for one in kept if LAUNCHERS.fullmatch(one[0])]
    text = " ".join(["torchrun", *words, program, *(_written(*one) for one in kept if not LAUNCHERS.fullmatch(one[0]))])
    arguments = of_script(f"{text}\n", where, given, Path(where).parent)
    arguments.notes.append(f"options of the program at their defaults: {', '.join(dict.fromkeys(script.defaults))[:300]}")
    if waits:
        said = ", ".join(dict.fromkeys(f"--{one}" for one in waits))
        arguments.notes.append(f"sizes that the program reads from a file ({said}) are those of the model that is priced")
    return arguments


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _written(name: str, value: str | None) -> str:
    if value is None:
        return f"--{name}"
    return f"--{name} ${(roots(value) or ('value',))[0]}" if is_open(value) else f"--{name} {shlex.quote(value)}"


def _options(script: Running) -> tuple[list[tuple[str, str | None]], set[str]]:
    """((option, its value or None) in the order of the program, those whose conditions are known to hold)."""
    found: list[tuple[str, str | None]] = []
    sure: set[str] = set()
    for at, words in _lists(script):
        rest = [*words, "--"]
        for word, after in itertools.pairwise(rest):
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--") and name and not is_open(name):
                found.append((name, value if equals else None if after.startswith("--") else after))
                sure |= {name} if script.settled(at, None) else set()
    return found, sure


def _lists(script: Running) -> Iterator[tuple[ast.expr, list[str]]]:
    """Lists of words that may be a part of the command, in the order of the program."""
    nodes = [one for one in ast.walk(script.tree) if isinstance(one, ast.List | ast.Call)]
    for node in sorted(nodes, key=lambda one: (one.lineno, one.col_offset)):
        parts = _parts(node)
        inside = [one.value for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)]
        if any(isinstance(one, str) and one.startswith("--") for one in inside) and script.may_run(node):
            inner = [one for one in parts if not isinstance(one, ast.Starred)]
            yield node, [str(script.value(_bare(one))) for one in inner]


def _parts(node: ast.List | ast.Call) -> list[ast.expr]:
    """Words of a list, or one that is appended to it."""
    added = isinstance(node, ast.Call) and last_name(node.func) == "append" and len(node.args) == 1
    return node.elts if isinstance(node, ast.List) else node.args if added else []


def _written_elsewhere(script: Running) -> bool:
    """Whether options stand in the program that are neither its own nor in such a list."""
    nodes = [one for one in ast.walk(script.tree) if isinstance(one, ast.List | ast.Call)]
    own: list[ast.AST] = [one for one in nodes if isinstance(one, ast.Call) and last_name(one.func) == "add_argument"]
    own += [one for one in ast.walk(script.tree) if isinstance(one, ast.Raise)]
    seen = {id(part) for one in nodes for root in _parts(one) for part in ast.walk(root)}
    seen |= {id(part) for one in own for part in ast.walk(one)}
    texts = [one for one in ast.walk(script.tree) if isinstance(one, ast.Constant) and id(one) not in seen]
    return any(isinstance(one.value, str) and re.match(r"\s*--[a-z][\w-]+(\s|=|$)", one.value) for one in texts)


def _bare(node: ast.expr) -> ast.expr:
    """What str() is made of."""
    made = isinstance(node, ast.Call) and last_name(node.func) == "str" and len(node.args) == 1
    return node.args[0] if made and isinstance(node, ast.Call) else node

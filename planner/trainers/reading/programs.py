"""Defaults of the program that a command starts: fields of the dataclasses that it takes its options from, and arguments of
argparse. Nothing is executed."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.given import Given
from planner.trainers.reading.parsed_words import PARSERS
from planner.trainers.reading.python_text import YES, default_of, last_name, tree_of
from planner.trainers.reading.settings import below, beside, in_project, rooted
from planner.trainers.reading.shell import evaluate
from planner.trainers.reading.shell.text import CLOSE, gap, is_open, shown_text
from planner.trainers.reading.values import Written, read_text

DEEPEST = 6
"""Classes under classes, modules that import modules."""


def trainer_kind(script: Path, program: str) -> str:
    """Whose trainer a program that is there runs: 'trl', 'old trl' (before it had configurations of its own) or 'transformers';
    'trl' where it is not there."""
    file = program_file(script, program)
    text = read_text(file) if file is not None else "from trl import SFTConfig"
    if re.search(r"^[ \t]*(from|import) trl\b", text, re.MULTILINE) is None:
        return "transformers"
    new = re.search(r"\b(SFTConfig|DPOConfig|ModelConfig)\b", text) or ("TrlParser" in text and "TrainingArguments" not in text)
    return "trl" if new else "old trl"


def program_file(script: Path, program: str) -> Path | None:
    """The program that a script starts, where it is near; a module is looked for as a file."""
    name = re.sub(f".*{CLOSE}/*", "", program) if is_open(program) else program  # what is open is its root
    file = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
    near = beside(script, file, (".py",)) or beside(script, f"src/{file}", (".py",)) or below(script, file)
    near = near or (beside(script, rooted(program), (".py",)) if is_open(program) else None)
    return near or (in_project(script, file) if isinstance(script, Written) else None)


def starts_a_trainer(script: Path, commands: str) -> bool:
    """Whether one of the programs that commands start, which is there, builds a trainer of transformers, TRL or unsloth."""
    names = dict.fromkeys(re.findall(r"(?<![\w.-])[^\s=]{1,200}\.py(?=\s|$)|(?<=\s-m )[\w.]{1,200}", commands))
    files = [file for one in list(names)[:MOST_PROGRAMS] if (file := program_file(script, one)) is not None]
    return any(re.search(r"\b(SFT|DPO|Seq2Seq|Unsloth)?Trainer\(", read_text(one)) for one in files)


def started_with(script: Path, commands: str, library: str) -> list[str]:
    """Programs of a library of LIBRARIES that commands start, as they name them, where they are there and train."""
    names = dict.fromkeys(re.findall(r"(?<![\w./-])[^\s=]{1,200}\.py(?=\s|$)|(?<=\s-m )[\w.]{1,200}", commands))
    found = []
    for one in list(names)[:MOST_PROGRAMS]:
        file = program_file(script, one)
        text = read_text(file) if file is not None else ""
        if trains_with(text) == library and re.search(r"\b((pretrain|finetune)(_recipe)?|train)\b *[(,]", text):
            found.append(one)
    return found


def own_programs(script: Path, said: Given, library: str) -> list[str]:
    """The same, of the commands of a script as it runs them with what is said."""
    commands = evaluate(read_text(script), str(script), said.settings, script.parent).commands
    return started_with(script, "\n".join(" ".join(one.words) for one in commands), library)


MOST_PROGRAMS = 8
"""Programs of a script that are looked into."""
LIBRARIES = {
    r"megatron\.bridge": "Megatron-Bridge",
    r"megatron\.(core|training)": "Megatron Core", r"nemo\.collections": "NeMo", "nanotron": "nanotron", "composer": "Composer",
    "olmo_core": "OLMo-core", "colossalai": "Colossal-AI", "(jax|flax)": "JAX", "paddle(nlp)?": "PaddlePaddle",
    "(mindspore|mindformers)": "MindSpore",
}  # fmt: skip
"""Modules of trainers whose programs take no arguments of transformers."""


MOST_OPTIONS = 12
"""Options of a command that a sentence lists."""
TRAINING = ("transformers", "trl", "peft", "accelerate", "unsloth", "torch", "deepspeed", "lightning", "datasets")
"""Libraries of which a program that trains by itself imports one."""


def trains_with(text: str) -> str | None:
    """The library of LIBRARIES that a program imports."""
    modules = re.findall(r"^[ \t]*(?:from|import) ([\w.]+)", text, re.MULTILINE)
    return next((name for one, name in LIBRARIES.items() if any(re.match(rf"{one}\b", module) for module in modules)), None)


def require_transformers(script: Path, file: Path | None, options: Mapping[str, Any]) -> None:
    """Raises PlannerError for a program that trains with another library, whatever launches it; ``options`` of its command."""
    trained = trains_with(read_text(file)) if file is not None and library.is_file(file) else None
    if file is not None and trained is not None:
        own = f"; import {file.name}" if trained in ("Megatron-Bridge", "NeMo", "OLMo-core") else ", whose programs are not read"
        words = [f"--{name} {shown_text(str(value))[:40]}" for name, value in options.items() if value not in (None, False)]
        if words and own.startswith(";"):
            more = ", ..." if len(words) > MOST_OPTIONS else ""
            listed = ", ".join(words[:MOST_OPTIONS]) + more
            own += f", and --set what the options of its command change, which are not applied: {listed}"
        raise PlannerError(f"{script}: its program {file.name} trains with {trained}{own}")


def require_loop(script: Path, program: str) -> None:
    """Raises PlannerError for a program that is there and whose training stands in modules beside it: nothing in it or in its
    command says what is trained."""
    file = program_file(script, program)
    modules = re.findall(r"^[ \t]*(?:from|import) ([\w.]+)", read_text(file), re.MULTILINE) if file is not None else []
    if file is None or any(one.partition(".")[0] in TRAINING for one in modules):
        return
    if any(library.is_file(file.parent / f"{one.replace('.', '/')}.py") for one in modules):
        what = "trains with modules of its own, which are not read, and its command says no batch"
        raise PlannerError(f"{script}: {file.name} {what}")


def takes_training_arguments(file: Path | None) -> bool:
    """Whether a program parses arguments of transformers, which have defaults."""
    return file is not None and re.search("|".join(PARSERS), read_text(file)) is not None


def shards_itself(file: Path | None) -> bool:
    """Whether a program has a loop of its own over FSDP: neither trainer nor accelerate says how it shards."""
    text = read_text(file) if file is not None else ""
    loop = re.search(r"Trainer\(|Accelerator\(", text) is None
    return loop and re.search("fsdp|FullyShardedDataParallel|fully_shard", text) is not None


def usual_options(file: Path | None) -> dict[str, Any]:
    """Options of a program with their defaults; empty where it is not there."""
    if file is None:
        return {}
    classes = _Classes(file)
    if classes.tree is None:
        return {}
    calls = [one for one in ast.walk(classes.tree) if isinstance(one, ast.Call) and last_name(one.func) in PARSERS and one.args]
    named = [last_name(one) for call in calls[:1] for one in ast.walk(call.args[0]) if isinstance(one, ast.Name)]
    found: dict[str, Any] = {}
    for one in named:
        found |= classes.fields(one)
    for call in (one for one in ast.walk(classes.tree) if isinstance(one, ast.Call) and last_name(one.func) in OPTIONS):
        found |= _argument(call)
    return found


def argument_files(file: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """{option: file} of those that name what a program parses its arguments from: parser.parse_json_file(args.train_args_file);
    ``given`` by its command, else at its default."""
    parses = re.compile(r"\bparse_(json|yaml)_file\(")
    if file is None or parses.search(read_text(file)) is None or (tree := _Classes(file).tree) is None:
        return {}
    nodes = list(ast.walk(tree))
    held = {ast.unparse(one.targets[0]): one.value for one in nodes if isinstance(one, ast.Assign)}
    calls = [one for one in nodes if isinstance(one, ast.Call) and parses.match(f"{last_name(one.func)}(")]
    inner = [part for one in calls for word in (*one.args, *(word.value for word in one.keywords)) for part in ast.walk(word)]
    inner += [part for one in inner if isinstance(one, ast.Name) for part in ast.walk(held.get(one.id, one))]
    usual = usual_options(file)
    found = {one.attr: given.get(one.attr, usual.get(one.attr)) for one in inner if isinstance(one, ast.Attribute)}
    return {name: value for name, value in found.items() if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml"))}


OPTIONS = ("add_argument", "option")
"""Functions that say an option: of argparse, and of click, which names a switch with what turns it off: --a/--no-a."""


def _argument(call: ast.Call) -> Mapping[str, Any]:
    """{name: default} of an option; a switch that is not said has none of its effect."""
    names = [str(one.value).partition("/")[0] for one in call.args if isinstance(one, ast.Constant)]
    name = next((one.lstrip("-").replace("-", "_") for one in names if one.startswith("--")), "")
    words = {one.arg: one.value for one in call.keywords}
    action = words.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false") and "default" not in words:
        return {name: action.value == "store_false"}
    return _default(name, words.get("default")) if name else {}


class _Classes:
    """Classes of a program, and of the modules beside it that it imports them from."""

    def __init__(self, file: Path, depth: int = 0) -> None:
        self.file, self.depth = file, depth
        try:
            self.tree: ast.Module | None = tree_of(file)
        except PlannerError:
            self.tree = None

    def fields(self, name: str, depth: int = 0) -> dict[str, Any]:
        """Fields of a class by name, those of its bases first; what is no literal is left out."""
        body = self.tree.body if self.tree is not None else []
        known = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == name), None)
        if known is None or depth > DEEPEST:
            return self._imported(name) if depth <= DEEPEST else {}
        found: dict[str, Any] = {}
        for base in reversed(known.bases):
            found |= self.fields(last_name(base), depth + 1)
        for one in known.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found.pop(one.target.id, None)
                found |= _default(one.target.id, one.value)
        return found

    def _imported(self, name: str) -> dict[str, Any]:
        for node in self.tree.body if self.tree is not None and self.depth < DEEPEST else []:
            if isinstance(node, ast.ImportFrom) and node.module and any((one.asname or one.name) == name for one in node.names):
                path = node.module.replace(".", "/")
                places = (f"{path}.py", f"{path}/__init__.py", f"src/{path}.py")
                file = next((found for one in places if (found := beside(self.file, one, (".py",)))), None)
                return _Classes(file, self.depth + 1).fields(name) if file is not None else {}
        return {}


def _default(name: str, node: ast.expr | None) -> Mapping[str, Any]:
    """{name: its default}, empty where it has none, or none that is a literal; of a switch of the precision that is asked for."""
    node = default_of(node) if node is not None else None
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        off = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        able = last_name(getattr(getattr(node, "operand", node), "func", ast.Pass())) in YES
        return {name: not off} if able else {name: gap([name])} if name in ("bf16", "fp16") else {}
    return {} if value is None else {name: value}

"""The shape of the code: who may import whom, what starts fast, where units live; the docs name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner import library
from planner.trainer import FACTS, OTHER_KEYS, load_trainer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "planner"

# Rooms from the ground up: a module imports from lines above its own and from its own room only. Rooms of one line do not know
# each other. A name that ends in a dot is a package. Numbers are the floors of the design; inside a room imports have no circles.
FLOORS: tuple[tuple[int, str], ...] = (
    (0, "errors arrays record newer_python"),
    (0, "units library"),
    (0, "schema detect model_names"),
    (0, "assumption"),
    (1, "layout curves. vision linear_attention model_constants hybrid_configs"),
    (1, "gpt_configs"),
    (1, "hugging_face"),
    (1, "model hardware. trainer_records trainer_options"),
    (1, "trainer"),
    (2, "workload cluster cluster_file costs keywords plausible published_rows"),
    (3, "cost.parameters cost.state_dtypes rules. error_bars ties"),
    (3, "cost.layer. cost.pipeline. space"),
    (3, "cost.price."),
    (3, "cost.memory."),
    (3, "cost.own_terms"),
    (3, "cost.least_compute cost.unique_stages"),
    (3, "cost.estimate"),
    (3, "cost.refine"),
    (4, "serving.serving_layout serving.traffic serving.result"),
    (4, "serving.engine_facts"),
    (4, "serving.engine"),
    (4, "serving.serving_weights"),
    (4, "serving.serving_memory serving.serving_rules"),  # the front ends of servers ask for it
    (4, "plan_file"),
    (4, "options"),
    (4, "priced_layouts"),
    (4, "memory_attempts"),
    (4, "search defaults"),
    (4, "explain explicit runs."),
    (4, "gains"),
    (4, "advice"),
    (5, "timeline. lab.launch. kineto."),
    (5, "trainers"),
    (5, "trainers.bundle."),
    (5, "lab.reference. trainers.targets trainers.checking. trainers.reading."),
    (5, "trainers.logs"),
    (5, "trainers."),  # one folder each: a new one stands here by itself
    (5, "serving."),
    (5, "mixed."),
    (5, "elastic. rl."),
    (6, "questions.best_plan"),
    (6, "terminal."),
    (6, "questions.accuracy. questions.compare. questions.hardware. questions.what_if. lab.profile."),
    (6, "questions.sensitivity. questions.calibrate."),
    (6, "questions.report. questions.doctor."),
    (6, "questions.serve. questions.measured. questions.mixed. questions.rl. questions.resilience."),
    (6, "questions.reshape. questions.watch."),
    (7, "lab.run. lab.first_day. lab.elastic."),
    (7, "api."),
    (7, "commands. __init__"),
    (7, "__main__"),
)
COMMAND = re.compile(r"(questions|lab)\.\w+\.command\w*")
"""A command stands on the floor of the commands, wherever its file lies: it may call the API."""
HEAVY = ("torch", "scipy", "matplotlib", "jinja2", "vl_convert", "selenium")
MAY_USE_TORCH = re.compile(r"lab\.|trainers\.(checking|\w+\.check)")
UNIT_FACTORS = {1e3, 1e6, 1e9, 1e12, 1e15, 1e18, 1e-3, 1e-6, 1e-9, 1e-12, *(1024.0**n for n in range(1, 6))}
FACTORS_OUTSIDE_UNITS = {
    "curves/attention.py": 2,  # tables of profiles hold microseconds
    "curves/collectives.py": 2,
    "terminal/tables.py": 1,
    "terminal/library_tables.py": 3,
    "defaults.py": 1,
}
"""Unit factors outside units.py, and how many: may shrink, not grow."""


# ------------------------------------------------------------------------------------------------ modules and imports


def modules() -> dict[str, Path]:
    """Every module of the package, and the command line, by dotted name without ``planner.``."""
    found = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py" or ast.parse(path.read_text()).body[1:]
    }
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


MODULES = modules()


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of it, in the order of ``ast.walk``."""
    return list(ast.walk(tree(path)))


@cache
def imports(path: Path, *, top: bool = False) -> set[str]:
    """Dotted names that a file imports; with ``top`` only those that run when it is imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if top and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if top and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # what may hold an import
                visit(child)

    visit(tree(path))
    return found


def shelf(module: str) -> int:
    """Number of the line of FLOORS that holds a module."""
    module = "commands" if COMMAND.fullmatch(module) else module
    for number, (_, line) in enumerate(FLOORS):
        for entry in line.split():
            if module == entry or (entry.endswith(".") and f"{module}.".startswith(entry)):
                return number
    raise AssertionError(f"planner module '{module}' stands on no floor; add it to FLOORS and to the README")


def room(module: str) -> str:
    """The entry of FLOORS that holds a module."""
    entries = FLOORS[shelf(module)][1].split()
    module = "commands" if COMMAND.fullmatch(module) else module
    return next(one for one in entries if module == one or f"{module}.".startswith(one))


def test_imports_have_no_circle() -> None:
    """Also not inside a room: no module reaches itself, imports inside of functions counted."""
    known = {one: {name.removeprefix("planner.") for name in imports(path)} & set(MODULES) - {one} for one, path in MODULES.items()}
    while ends := {name for name, below in known.items() if not below}:
        known = {name: below - ends for name, below in known.items() if name not in ends}
    assert not known, f"in a circle, or above one: {sorted(known)}"


@pytest.mark.parametrize("name", ["lab/run", "serving", "elastic"])
def test_modules_import_from_their_own_line_and_from_lines_above(name: str) -> None:
    """As ``__init__.py`` of a room writes the order of its modules."""
    folder, dotted = PACKAGE / name, f"planner.{name.replace('/', '.')}"
    text = (folder / "__init__.py").read_text()
    lines = [line.strip().split("  ")[0].split() for line in text.splitlines() if line[:4] == "    "]
    place = {module: number for number, modules in enumerate(lines) for module in modules}
    files = {path.relative_to(folder).parts[0].removesuffix(".py"): path for path in folder.rglob("*.py")}
    assert set(place) == {*files} - {one for one in files if one.startswith("__")}
    for path in folder.rglob("*.py"):
        mine = place.get(path.relative_to(folder).parts[0].removesuffix(".py"), len(lines))
        used = {one.removeprefix(f"{dotted}.").split(".")[0] for one in imports(path) if one.startswith(f"{dotted}.")}
        late = {one for one in used & set(place) if place[one] > mine}
        assert not late, f"{path.name} imports {sorted(late)} of a line below its own"


def test_floors_rise() -> None:
    floors = [floor for floor, _ in FLOORS]
    assert floors == sorted(floors)


def test_imports_go_down() -> None:
    for module, path in MODULES.items():  # one test, not one a module: a thousand reports take longer than their checks
        mine = shelf(module)
        for name in imports(path):
            other = name.removeprefix("planner.")
            if not name.startswith("planner.") or other not in MODULES:
                continue
            below = shelf(other) < mine or room(other) == room(module)
            assert below, f"{module} imports {other}, which does not stand below it"


def test_heavy_imports_stay_outside() -> None:
    for module, path in MODULES.items():
        roots = {name.split(".")[0] for name in imports(path)}
        at_import = {name.split(".")[0] for name in imports(path, top=True)}
        if not MAY_USE_TORCH.match(f"{module}."):
            assert "torch" not in roots, f"{module}: only lab and the checks of trainers may import torch"
            assert not at_import & set(HEAVY), f"{module} imports {at_import & set(HEAVY)} at module level"
        commands = module.split(".")[-1].startswith("command") or module.startswith(("commands.", "terminal."))
        assert "click" not in roots or commands, f"{module}: only the commands import click"
        assert "tests" not in roots and "tools" not in roots, module


def test_the_command_line_starts_light() -> None:
    entry = "planner.commands.main"
    code = f"import sys, {entry}; print([name for name in {(*HEAVY, 'huggingface_hub')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ habits


def is_unit_factor(node: ast.expr) -> bool:
    """1e9, 1024, 2**30, 1000.0**3, 1 << 30: a number that turns one unit into another."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and float(node.value) in UNIT_FACTORS
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        base, power = node.left, node.right
        if isinstance(base, ast.Constant) and isinstance(power, ast.Constant):
            value = base.value << power.value if isinstance(node.op, ast.LShift) else base.value**power.value
            return float(value) in UNIT_FACTORS
    return False


def test_unit_factors_live_in_units() -> None:
    """Factors are what multiplies or divides; limits such as 2**24 and addresses of bits are none."""
    for path in MODULES.values():
        found = [
            f"line {node.lineno}: {ast.unparse(node)}"
            for node in nodes(path)
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv))
            if is_unit_factor(node.left) or is_unit_factor(node.right)
        ]
        name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        if name != "units.py":
            assert len(found) <= FACTORS_OUTSIDE_UNITS.get(name, 0), f"{name}: use planner.units: {found}"


SOURCES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("cli.py")])


def test_everything_public_has_a_docstring() -> None:
    missing: list[str] = []

    def visit(node: Any, inside: str) -> None:
        if not ast.get_docstring(node):
            missing.append(inside)
        for child in [] if isinstance(node, ast.FunctionDef) or described(node) else node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
                visit(child, f"{inside}:{child.name}")

    def described(node: Any) -> bool:
        """Methods of click, and of torch's autograd, are described there."""
        return any("click" in (base := ast.unparse(one)) or base == "Function" for one in getattr(node, "bases", ()))

    for path in SOURCES:
        visit(tree(path), path.relative_to(ROOT).as_posix())
    assert not missing, f"without a docstring: {', '.join(missing)}"


# ------------------------------------------------------------------------------------------------ sizes

LONGEST_FUNCTION, LONGEST_FILE = 60, 400
MANY_PARAMETERS, FUNCTIONS_WITH_MANY = 6, 10
LARGEST_CLASS, MOST_FACTS = 30, 60
SHARED_FILE_NAMES = 10
"""Limits that hold today: they may fall, not rise."""


def functions(path: Path) -> list[ast.FunctionDef]:
    """Functions and methods of a file, also those inside of others."""
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]


def is_command(node: ast.FunctionDef) -> bool:
    """A command of click: its parameters are its flags."""
    return any("click" in ast.unparse(one) or ".command(" in ast.unparse(one) for one in node.decorator_list)


def named(path: Path, node: Any) -> str:
    """Where a function or class stands."""
    return f"{path.relative_to(ROOT)}:{node.name}"


def test_files_and_functions_are_short() -> None:
    files = {path.name: length for path in SOURCES if (length := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert not files, f"longer than {LONGEST_FILE} lines: {files}"
    long = {
        named(path, one): length
        for path in SOURCES
        for one in functions(path)
        if (length := (one.end_lineno or 0) - one.lineno + 1) > LONGEST_FUNCTION
    }
    assert not long, f"longer than {LONGEST_FUNCTION} lines: {long}"


def test_few_functions_have_many_parameters() -> None:
    """Commands excepted, whose parameters are flags."""
    many = {}
    for path in SOURCES:
        for one in functions(path):
            names = [each.arg for each in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)]
            if len(set(names) - {"self", "cls"}) > MANY_PARAMETERS and not is_command(one):
                many[named(path, one)] = len(names)
    assert len(many) <= FUNCTIONS_WITH_MANY, f"with more than {MANY_PARAMETERS} parameters: {many}"


def test_classes_are_small() -> None:
    large = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                fields = sum(isinstance(one, ast.AnnAssign) for one in node.body)
                if fields > LARGEST_CLASS:
                    large[named(path, node)] = fields
    assert not large, f"with more than {LARGEST_CLASS} fields: {large}"
    assert len(FACTS) <= MOST_FACTS, "a fact that one trainer alone needs is a term of its folder"


def test_few_file_names_stand_in_two_folders() -> None:
    agreed = ("__init__.py", "published.py")  # the second by planner.published_rows
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name not in agreed)
    shared = sorted(name for name, times in names.items() if times > 1)
    assert len(shared) <= SHARED_FILE_NAMES, f"file names in more than one folder of planner: {', '.join(shared)}"


# ------------------------------------------------------------------------------------------------ docs

NAMED = re.compile(r"`?(planner/[\w/]+\.py|cli\.py):([A-Za-z_][\w.]*)")
DOCS = sorted((ROOT / "docs").glob("*.md"))


def defined(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a file, as ``name`` or ``Class.name``."""
    names: set[str] = set()

    def visit(node: Any, inside: str) -> None:
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                names.add(inside + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{child.name}.")
            elif isinstance(child, ast.Assign):
                names.update(inside + target.id for target in child.targets if isinstance(target, ast.Name))
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                names.add(inside + child.target.id)

    visit(tree(path), "")
    return names


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_docs_name_what_exists(document: Path) -> None:
    for file, name in NAMED.findall(document.read_text()):
        assert (ROOT / file).is_file(), f"{document.name} names {file}, which does not exist"
        assert name.rstrip(".") in defined(ROOT / file), f"{document.name} names {file}:{name}, which does not exist"


def test_cost_model_page_names_every_formula() -> None:
    text = (ROOT / "docs" / "cost-model.md").read_text()
    named = {(file, name.rstrip(".").split(".")[0]) for file, name in NAMED.findall(text)}
    for module, path in MODULES.items():
        if not module.startswith("cost."):
            continue
        file = path.relative_to(ROOT).as_posix()
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert (file, node.name) in named, f"docs/cost-model.md does not say what {file}:{node.name} computes"


# ------------------------------------------------------------------------------------------------ data files


@pytest.mark.parametrize("name", library.names("trainers"))
def test_trainer_file_is_sourced(name: str) -> None:
    path = library.find("trainers", name)
    text, data = path.read_text(encoding="utf-8"), library.read_yaml(path)
    assert load_trainer(name).name == name
    assert set(data) - {"extends"} <= {*FACTS, *OTHER_KEYS}
    assert text.startswith("# "), "says in its first line what it describes"
    # Each key's figure comes from the file's own source, or from a comment on its line or above its block.
    unsourced = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        commented = any(line.startswith("# ") for line in lines)
        keys = [] if commented else [line for line in lines if re.match(r"\w+:", line) and "  # " not in line]
        unsourced += [line.split(":")[0] for line in keys]
    assert data.get("source") or not unsourced, f"without a source: {unsourced}"
    assert data.get("title") and len(str(data.get("source", ""))) > 10

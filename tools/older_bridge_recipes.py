"""Writes planner/trainers/megatron_bridge/older_recipes.yaml from checkouts of releases of Megatron-Bridge, oldest first:
python tools/older_bridge_recipes.py 0.2=FOLDER 0.3.0=FOLDER ... main=FOLDER; what a recipe of one decides otherwise than the next."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bridge_recipes import kept, modules, whole  # noqa: E402

from planner.trainers.megatron_bridge.recipe_releases import DECIDES, UNKNOWN, deciding  # noqa: E402
from planner.trainers.megatron_bridge.recipes import functions, published, settings_of  # noqa: E402
from planner.trainers.reading.shell.text import is_open  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "megatron_bridge" / "older_recipes.yaml"
Env = dict[str, ast.expr]


@click.command(help=__doc__)
@click.argument("releases", nargs=-1, required=True)
def main(releases: tuple[str, ...]) -> None:
    """Recipes by release where they differ."""
    *older, today = [(name, recipes(Path(folder))) for name, _, folder in (one.partition("=") for one in releases)]
    lines = []
    for name in sorted(today[1]):
        found: dict[str, Any] = {}
        after = today[1][name]
        for release, known in reversed(older):
            if name not in known:
                break
            if deciding(known[name]) != deciding(after):
                found[release] = known[name] if whole(known[name]) else with_gaps(known[name], after)
            after = known[name]
        if found and name in published():
            flow = yaml.safe_dump(found, default_flow_style=True, width=10**6, sort_keys=False).strip()
            lines.append(f"  {name}: {flow}")
    head = "# Settings of recipes in older releases of Megatron-Bridge, written by tools/older_bridge_recipes.py: by the last release that\n"
    head += "# has them, where what decides a plan is not that of the release after it; ? = its text does not tell it.\n"
    head += f"# source: NVIDIA-NeMo/Megatron-Bridge, {', '.join(f'v{one}' for one, _ in older)}, src/megatron/bridge/recipes\n"
    OUTPUT.write_text(head + "recipes:\n" + "\n".join(lines) + "\n", encoding="utf-8")
    print(len(lines), "recipes")


def with_gaps(recipe: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A recipe of which the text does not tell all, under that of the release after it: what is not known is left to be asked."""
    told = {
        one: UNKNOWN if isinstance(value, str) and is_open(value) else value for one, value in recipe.items()
        if one in DECIDES or not is_open(str(value))
    }  # fmt: skip
    return {**{one: UNKNOWN for one in deciding(after) if "train.global_batch_size" not in recipe}, **told}


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of a release's recipes by the names under which programs import them."""
    found: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    trees = [Providers().visit(one) for one in modules(folder / "src/megatron/bridge/recipes")]
    shared = {name: one for tree in trees for name, one in functions(tree).items() if name.startswith("_")}
    for tree in trees:
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
            aliases |= {one.asname: one.name for one in node.names if one.asname and one.name.endswith("_config")}
        for name in functions(tree):
            if name.endswith("_config") and not name.startswith("_"):
                found[name] = kept(settings_of(specialised(tree, name, shared), name, {}))
    return {**{alias: found[name] for alias, name in aliases.items() if name in found}, **found}


def specialised(tree: ast.Module, name: str, shared: Mapping[str, ast.FunctionDef]) -> ast.Module:
    """A module in which a recipe of keyword arguments, those of the first releases, is the function that it calls, with its own
    arguments and with the branches that they choose."""
    function = functions(tree)[name]
    call = next((one.value for one in ast.walk(function) if isinstance(one, ast.Return)), None)
    if function.args.kwarg is None or not isinstance(call, ast.Call):
        function.body = [part for one in function.body for part in inlined(one, functions(tree))]
        return tree
    common = functions(tree).get(ast.unparse(call.func)) or shared.get(ast.unparse(call.func))
    values = (one.value for one in function.body if isinstance(one, ast.Assign | ast.AnnAssign))
    words = next((one for one in values if isinstance(one, ast.Dict)), None)
    if common is None or words is None:
        return tree
    names = [*common.args.args, *common.args.kwonlyargs]
    usual = [*[None] * (len(common.args.args) - len(common.args.defaults)), *common.args.defaults, *common.args.kw_defaults]
    env: Env = {one.arg: value for one, value in zip(names, usual, strict=True) if value is not None}
    env |= {str(key.value): value for key, value in zip(words.keys, words.values, strict=True) if isinstance(key, ast.Constant)}
    for one in ast.walk(function):  # recommended["a"] = b, under conditions that a call without arguments fulfils
        place = one.targets[0] if isinstance(one, ast.Assign) else None
        if isinstance(one, ast.Assign) and isinstance(place, ast.Subscript) and isinstance(place.slice, ast.Constant):
            env[str(place.slice.value)] = one.value
    given = [ast.Assign([ast.Name(key, ast.Store())], value, lineno=1) for key, value in env.items()]
    body = [*given, *chosen(common.body, env)]
    made = ast.FunctionDef(name, ast.arguments([], [], None, [], [], None, []), body, [], lineno=1)
    return ast.Module([*(one for one in tree.body if getattr(one, "name", "") != name), made], [])


def inlined(node: ast.stmt, local: Mapping[str, ast.FunctionDef]) -> Iterator[ast.stmt]:
    """A statement, or what the helper that it calls with values does with them."""
    call = node.value if isinstance(node, ast.Expr) else None
    helper = local.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
    if helper is None or not isinstance(call, ast.Call):
        yield node
        return
    names = [one.arg for one in helper.args.args]
    usual = zip(helper.args.kwonlyargs, helper.args.kw_defaults, strict=True)
    env: Env = {one.arg: value for one, value in usual if value is not None}
    env |= {**dict(zip(names, call.args, strict=False)), **{one.arg: one.value for one in call.keywords if one.arg}}
    bound = {key: value for key, value in env.items() if key != ast.unparse(value)}
    yield from (ast.Assign([ast.Name(key, ast.Store())], value, lineno=1) for key, value in bound.items())
    yield from chosen(helper.body, env)


class Chosen(ast.NodeTransformer):
    """Expressions a if b else c as what b chooses."""

    def __init__(self, env: Mapping[str, ast.expr]) -> None:
        self.env = env

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """One of its branches where its condition is known."""
        test = holds(node.test, self.env)
        return node if test is None else node.body if test else node.orelse


class Providers(ast.NodeTransformer):
    """Classes of models by whatever name, as those that the reader knows."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of one, or of the argument that names one."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and re.fullmatch(r"model_provider|(?!\w*(Dataset|Conversation))\w*Provider\w*", node.func.id):
            node.func = ast.Name("ModelProvider", ast.Load())
        return node


def chosen(body: list[ast.stmt], env: Env) -> Iterator[ast.stmt]:
    """Statements with the branches that arguments choose; a condition of something else leaves both out."""
    for node in body:
        if isinstance(node, ast.If):
            test = holds(node.test, env)
            yield from chosen(node.body if test else node.orelse, env) if test is not None else ()
            continue
        node = Chosen(env).visit(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            env[node.targets[0].id] = node.value
        yield node


def holds(node: ast.expr, env: Mapping[str, ast.expr]) -> bool | None:
    """Whether a condition of arguments holds; None = not known."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = holds(node.operand, env)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        tests = [holds(one, env) for one in node.values]
        wanted = isinstance(node.op, ast.Or)
        return wanted if wanted in tests else None if None in tests else not wanted
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.Gt):
        left, right = (value_of(one, env) for one in (node.left, node.comparators[0]))
        if OPEN in (left, right) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return None
        if isinstance(node.ops[0], ast.Gt):
            return left is not None and left > right
        return (left == right) is not isinstance(node.ops[0], ast.IsNot)
    value = value_of(node, env)
    return None if value is OPEN else bool(value)


OPEN = object()


def value_of(node: ast.expr, env: Mapping[str, ast.expr]) -> Any:
    """The value of a literal or of an argument that is one."""
    for _ in range(4):
        node = env.get(node.id, node) if isinstance(node, ast.Name) else node
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return OPEN


if __name__ == "__main__":
    main()

"""Scripts of OLMo-core: its recipe of a training in place of the calls of it, and what hangs on the number of GPUs.

[ai2-olmo-core 2.5: internal/cookbook.py, distributed/utils.py]
"""

import ast
from collections.abc import Callable
from typing import Any

from planner.errors import PlannerError
from planner.trainers.olmo_core.overrides import laid_over
from planner.trainers.olmo_core.own_factories import written_out
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.python_text import compared, last_name
from planner.trainers.reading.shell.text import is_open

RECIPE = (
    "TransformerTrainModuleConfig(rank_microbatch_size=rank_microbatch_size, max_sequence_length=max_sequence_length,"
    " optim=SkipStepAdamWConfig(), compile_model=True, dp_config=TransformerDataParallelConfig(name=DataParallelType.hsdp,"
    " param_dtype=DType.bfloat16, reduce_dtype=DType.float32, shard_degree=dp_shard_degree),"
    " cp_config=TransformerContextParallelConfig.llama3(degree=cp_degree) if cp_degree else None,"
    " ac_config=TransformerActivationCheckpointingConfig(mode=Mode.budget, activation_memory_budget=activation_memory_budget)"
    " if activation_memory_budget < 1.0 else None, float8_config=Float8Config(enabled=float8_enabled))"
)
USUAL = {"float8_enabled": False, "activation_memory_budget": 1.0, "dp_shard_degree": None, "cp_degree": None}
NEEDED = ("rank_microbatch_size", "max_sequence_length")

WORLD = "get_world_size"
LIMITS: dict[str, Callable[[list[Any]], Any]] = {"max": max, "min": min}
LENGTHS = ("max_sequence_length", "sequence_length", "effective_sequence_length")
"""Keywords and attributes that hold the tokens of a sequence."""


class OlmoScript(Parts):
    """A script of OLMo-core, whose recipes are written out, on as many GPUs as are said."""

    def whole(self, tree: ast.Module) -> ast.Module:
        """The tree with what the recipe builds where it is called, without what is for other numbers of GPUs."""
        try:
            tree = written_out(_Written(self.said.num_gpus, self._off(tree)).visit(tree), self.path)
            return laid_over(tree, self.said.settings)
        except RecursionError as error:
            raise PlannerError(f"{self.path}: its expressions are nested too deeply to be read") from error

    def _off(self, tree: ast.Module) -> set[str]:
        """Switches of the command line that nobody says."""
        said = {name.lstrip("-").replace("-", "_") for name, value in self.said.settings.items() if value.lower() != "false"}
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func) == "add_argument" and one.args]
        switches = [one.args[0] for one in calls for word in one.keywords
                    if word.arg == "action" and ast.unparse(word.value) == "'store_true'"]  # fmt: skip
        names = {str(one.value).lstrip("-").replace("-", "_") for one in switches if isinstance(one, ast.Constant)}
        return names - said

    def _of_call(self, node: ast.Call) -> Any:
        if last_name(node.func) == WORLD and not node.args and self.said.num_gpus:
            return self.said.num_gpus
        if isinstance(node.func, ast.Name) and node.func.id in LIMITS and len(node.args) > 1 and not node.keywords:
            values = [self._value(one) for one in node.args]
            if all(isinstance(one, int | float) for one in values):
                return LIMITS[node.func.id](values)
        return super()._of_call(node)

    def _of_attribute(self, node: ast.Attribute) -> Any:
        """The value of an enumeration's member, DType.bfloat16.value, is its name in OLMo-core."""
        member = node.value if node.attr == "value" and isinstance(node.value, ast.Attribute) else None
        if member is not None and isinstance(member.value, ast.Name) and member.value.id[:1].isupper():
            return member.attr
        return super()._of_attribute(node)

    def _of_ifexp(self, node: ast.IfExp) -> Any:
        """opts.sequence_length if opts.sequence_length is not None else its default."""
        found = super()._of_ifexp(node)
        option = isinstance(node.body, ast.Attribute) and node.body.attr in LENGTHS
        if option and is_open(str(found)) and ast.unparse(node.test) == f"{ast.unparse(node.body)} is not None":
            self.defaults.append(last_name(node.body))
            return self._value(node.orelse)
        return found

    def _of_boolop(self, node: ast.BoolOp) -> Any:
        """opts.sequence_length or its default: OLMo-core's own options have none.  [script_utils.py]"""
        first, found = node.values[0], super()._of_boolop(node)
        option = isinstance(node.op, ast.Or) and isinstance(first, ast.Attribute) and first.attr in LENGTHS
        if option and len(node.values) == 2 and isinstance(found, str) and is_open(found):
            self.defaults.append(last_name(first))
            return self._value(node.values[1])
        return found


class _Written(ast.NodeTransformer):
    def __init__(self, gpus: int | None, off: set[str]) -> None:
        self._gpus, self._off = gpus, off

    def visit_If(self, node: ast.If) -> Any:
        """The branch that runs, where its condition compares the number of GPUs with a number, or is a switch that is off."""
        self.generic_visit(node)
        test = node.test
        if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.attr in self._off:
            return node.orelse or ast.copy_location(ast.Pass(), node)
        if not (self._gpus and isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Call)):
            return node
        other = test.comparators[0]
        if last_name(test.left.func) != WORLD or test.left.args or not isinstance(other, ast.Constant):
            return node
        holds = compared(test.ops[0], self._gpus, other.value)
        return node if holds is None else (node.body if holds else node.orelse) or ast.copy_location(ast.Pass(), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The recipe with the arguments of a call of it."""
        self.generic_visit(node)
        words = {one.arg: one.value for one in node.keywords}
        named = last_name(node.func) == "configure_train_module" and last_name(getattr(node.func, "value", node)) == "cookbook"
        if not named or None in words or any(one not in words for one in NEEDED):
            return node
        return ast.copy_location(_Filled(words, node).visit(ast.parse(RECIPE, mode="eval").body), node)


class _Filled(ast.NodeTransformer):
    def __init__(self, words: dict[Any, ast.expr], at: ast.Call) -> None:
        self._words, self._at = words, at

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Every node stands where the call does."""
        return ast.copy_location(super().generic_visit(node), self._at)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A parameter is what the call says, else its default."""
        usual = ast.Constant(USUAL[node.id]) if node.id in USUAL else node
        return self._words.get(node.id, ast.copy_location(usual, self._at))

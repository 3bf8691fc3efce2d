"""OLMo-core's recipe of a training, put in place of the calls of it.  [ai2-olmo-core 2.5: internal/cookbook.py]"""

import ast
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.parts import Parts
from planner.trainers.reading.python_text import last_name

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


class OlmoScript(Parts):
    """A script of OLMo-core, whose recipes are written out."""

    def whole(self, tree: ast.Module) -> ast.Module:
        """The tree with what the recipe builds where it is called."""
        try:
            return _Written().visit(tree)
        except RecursionError as error:
            raise PlannerError(f"{self.path}: its expressions are nested too deeply to be read") from error


class _Written(ast.NodeTransformer):
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

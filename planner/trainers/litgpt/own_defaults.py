"""What setup() of a LitGPT in the checkout around a file takes where nothing is said: of a fork, or of an older release."""

import ast
from collections.abc import Iterator
from typing import Any

from planner.trainers.reading.python_text import last_name, tree_or_none
from planner.trainers.reading.settings import Settings, beside

TUNED = {"global_batch_size": 16, "micro_batch_size": 1, "max_seq_length": None}
ADAPTERS = {"quantize": None, "lora_r": 8, "lora_dropout": 0.05, "lora_query": True, "lora_key": False, "lora_value": True,
            "lora_projection": False, "lora_mlp": False, "lora_head": False}  # fmt: skip
USUAL: dict[str, dict[str, Any]] = {
    "pretrain": {"global_batch_size": 512, "micro_batch_size": 4, "max_seq_length": None, "devices": "auto"},
    "finetune/full": {**TUNED, "devices": 1},
    "finetune/lora": {**TUNED, **ADAPTERS, "devices": 1},
}
"""Those of the releases from 0.3.1 on; before, fine-tuning had batches of 128 and 64."""
BOTH = {"precision": None, "num_nodes": 1}


def lay_under(given: Settings, train: Settings, program: str) -> tuple[str, ...]:
    """Takes what the program of the checkout has otherwise than the releases for what is not said, and a note that says so."""
    file = beside(given.path, f"litgpt/{program}.py", (".py",))
    tree = tree_or_none(file)
    found = dict(_defaults(tree)) if tree is not None else {}
    usual = USUAL[program] | BOTH
    own = {name: value for name, value in found.items() if name in usual and value != usual[name]}
    train.usual = {name: value for name, value in own.items() if name in TUNED}
    given.usual = {name: value for name, value in own.items() if name not in TUNED}
    taken = [f"{name} {value}" for name, value in own.items() if (train if name in TUNED else given).data.get(name) is None]
    return (f"what is not said is as litgpt/{program}.py beside it has it: {', '.join(taken)}",) if taken else ()


def _defaults(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Constants that are defaults of setup(), and of the TrainArgs that it makes."""
    for setup in (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "setup"):
        names = [one.arg for one in setup.args.args][-len(setup.args.defaults) or None :]
        for name, default in zip(names, setup.args.defaults, strict=False):
            if isinstance(default, ast.Constant):
                yield name, default.value
            elif isinstance(default, ast.Call) and last_name(default.func) == "TrainArgs":
                yield from ((str(one.arg), one.value.value) for one in default.keywords if isinstance(one.value, ast.Constant))

"""Writes planner/trainers/megatron_bridge/recipes.yaml from a checkout of Megatron-Bridge: python tools/bridge_recipes.py FOLDER"""

import ast
import sys
from pathlib import Path
from typing import Any

import yaml

from planner.trainers.megatron_bridge.recipes import DECISIVE, functions, settings_of
from planner.trainers.reading.shell.text import is_open

OUTPUT = Path(__file__).parents[1] / "planner" / "trainers" / "megatron_bridge" / "recipes.yaml"
TRUE = ("ddp.grad_reduce_in_fp32", "ddp.use_distributed_optimizer")
"""Settings that are on where nothing is said."""
USUAL = {
    "ddp.data_parallel_sharding_strategy": "no_shard", "optimizer.exp_avg_dtype": "float32", "mixed_precision": "bf16_mixed",
    "model.moe_token_dispatcher_type": "alltoall", "model.moe_flex_dispatcher_backend": "deepep",
}  # fmt: skip
"""What the reader takes where nothing is said."""


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide a plan and are not the defaults of the reader."""
    said = {name: settings[name] for name in DECISIVE if settings.get(name) not in (None, "none", [])}
    if said.get("model.seq_length") == said.get("dataset.seq_length"):
        said.pop("dataset.seq_length", None)
    return {
        name: value for name, value in said.items()
        if value != USUAL.get(name) and (name in TRUE or value is True or value not in (False, 1)) and not (name in TRUE and value)
    }  # fmt: skip


def main(folder: Path) -> None:
    """Recipes of models that the library has, and other names of theirs."""
    recipes: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for path in sorted((folder / "src/megatron/bridge/recipes").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
            aliases |= {one.asname: one.name for one in node.names if one.asname and one.name.endswith("_config")}
        for name in functions(tree):
            if name.endswith("_config") and not name.startswith("_"):
                found = kept(settings_of(tree, name, {}))
                closed = not any(isinstance(value, str) and is_open(value) for value in found.values())
                if closed and "train.global_batch_size" in found:
                    recipes[name] = found
    aliases = {alias: name for alias, name in sorted(aliases.items()) if name in recipes and alias not in recipes}
    head = "# Settings of published recipes that decide a plan, written by tools/bridge_recipes.py.\n"
    head += "# source: NVIDIA-NeMo/Megatron-Bridge, main, 2026-11, src/megatron/bridge/recipes\n"
    flow = {name: yaml.safe_dump(recipes[name], default_flow_style=True, width=10**6, sort_keys=False) for name in sorted(recipes)}
    lines = [f"  {name}: {text.strip()}" for name, text in flow.items()]
    text = yaml.safe_dump({"aliases": aliases}, sort_keys=False, width=10**6)
    OUTPUT.write_text(head + text + "recipes:\n" + "\n".join(lines) + "\n", encoding="utf-8")
    print(len(recipes), "recipes,", len(aliases), "aliases")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

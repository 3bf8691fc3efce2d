"""Writes planner/trainers/megatron_bridge/recipes.yaml and perf_recipes.yaml from a checkout of Megatron-Bridge:
python tools/bridge_recipes.py FOLDER."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.trainers.megatron_bridge.recipes import DECISIVE, functions, settings_of  # noqa: E402
from planner.trainers.reading.shell.text import is_open  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "megatron_bridge" / "recipes.yaml"
TRUE = (
    "ddp.grad_reduce_in_fp32", "ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "optimizer.use_distributed_optimizer",
    "mixed_precision.grad_reduce_in_fp32",
)  # fmt: skip
"""Settings that are on where nothing is said."""
USUAL = {
    "ddp.data_parallel_sharding_strategy": "no_shard", "optimizer.exp_avg_dtype": "float32", "mixed_precision": "bf16_mixed",
    "model.moe_token_dispatcher_type": "alltoall", "model.moe_flex_dispatcher_backend": "deepep",
    "model.cp_comm_type": "p2p", "optimizer.main_params_dtype": "float32", "optimizer.exp_avg_sq_dtype": "float32",
    "model.cross_entropy_loss_fusion": True, "model.cross_entropy_fusion_impl": "native", "model.hf": "",
}  # fmt: skip
"""What the reader takes where nothing is said."""
PERFORMANCE = re.compile(r"(?!_)\w+_(pretrain|sft|peft)_\d+gpu_\w+_config")
UNPRICED = (
    "ddp.use_megatron_fsdp", "model.fine_grained_activation_offloading", "model.moe_paged_stash", "model.cpu_offloading_num_layers",
)  # fmt: skip
"""Settings that decide memory and that the reader has no word for."""


SECTION = "comm_overlap.tp_comm_overlap"
"""What says that a recipe has that section at all, which overlaps gradients too."""


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide a plan and are not the defaults of the reader."""
    said = {name: settings[name] for name in DECISIVE if settings.get(name) not in (None, "none", [])}
    if said.get("model.seq_length") == said.get("dataset.seq_length"):
        said.pop("dataset.seq_length", None)
    return {
        name: value for name, value in said.items()
        if value != USUAL.get(name) and (name in (*TRUE, SECTION) or value is True or value not in (False, 1))
        and not (name in TRUE and value) and not (name == "model.attention_backend" and value not in ("unfused", "local"))
    }  # fmt: skip


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Recipes of models that the library has, and other names of theirs; those of its performance launcher in a file of their own."""
    recipes: dict[str, Any] = {}
    every: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for tree in modules(folder / "src/megatron/bridge/recipes"):
        for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
            aliases |= {one.asname: one.name for one in node.names if one.asname and one.name.endswith("_config")}
        for name in functions(tree):
            if name.endswith("_config") and not name.startswith("_"):
                every[name] = settings_of(tree, name, {})
                found = kept(every[name])
                if whole(found):
                    recipes[name] = found
    every |= {alias: every[name] for alias, name in aliases.items() if name in every}
    aliases = {alias: name for alias, name in sorted(aliases.items()) if name in recipes and alias not in recipes}
    write("recipes", recipes, yaml.safe_dump({"aliases": aliases}, sort_keys=False, width=10**6))
    write("perf_recipes", measured(folder / "src/megatron/bridge/perf_recipes", every))
    print(len(recipes), "recipes,", len(aliases), "aliases")


def measured(folder: Path, recipes: dict[str, Any]) -> dict[str, Any]:
    """Recipes of the performance launcher: they start from others, in whatever module, and helpers change them."""
    trees, known = list(modules(folder)), dict(recipes)
    for _ in range(4):
        for tree in trees:
            known |= {name: settings_of(tree, name, known) for name in functions(tree)}
    found = {
        name: kept(known[name]) for tree in trees for name in functions(tree)
        if PERFORMANCE.fullmatch(name) and not any(known[name].get(one) for one in UNPRICED)
    }  # fmt: skip
    return {name: one for name, one in found.items() if whole(one)}


def modules(folder: Path) -> list[ast.Module]:
    """Modules of a folder, each with the constants of all of them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    plain = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    return [ast.Module([*plain, *tree.body], []) for tree in trees]


def whole(found: dict[str, Any]) -> bool:
    """Whether a recipe says all, with nothing that is computed."""
    return "train.global_batch_size" in found and not any(isinstance(value, str) and is_open(value) for value in found.values())


def write(file: str, recipes: dict[str, Any], before: str = "") -> None:
    """One line per recipe."""
    head = "# Settings of published recipes that decide a plan, written by tools/bridge_recipes.py.\n"
    head += f"# source: NVIDIA-NeMo/Megatron-Bridge, main, 2026-11, src/megatron/bridge/{file}\n"
    flow = {name: yaml.safe_dump(recipes[name], default_flow_style=True, width=10**6, sort_keys=False) for name in sorted(recipes)}
    lines = [f"  {name}: {text.strip()}" for name, text in flow.items()]
    OUTPUT.with_name(f"{file}.yaml").write_text(head + before + "recipes:\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes planner/trainers/nemo/older_recipes.yaml from what tools/nemo_recipes.py --output FILE writes of the releases of NeMo 2, oldest
first: python tools/older_nemo_recipes.py 2.0=FILE ... main=FILE; what of a recipe decides a plan otherwise than in the next release."""

import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.trainers.megatron_bridge.recipe_releases import DECIDES  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "nemo" / "older_recipes.yaml"
KEPT = (*DECIDES, "ddp.grad_reduce_in_fp32", "dataset.seq_length")


@click.command(help=__doc__)
@click.argument("releases", nargs=-1, required=True)
def main(releases: tuple[str, ...]) -> None:
    """What differs from the recipe of today, by recipe, kind and release; null = not said."""
    *older, (_, today) = [(name, yaml.safe_load(Path(file).read_text())) for name, _, file in (one.partition("=") for one in releases)]
    lines = []
    for name, kinds in sorted(today.items()):
        found: dict[str, Any] = {}
        for kind in kinds:
            after: dict[str, Any] = {}
            for release, recipes in reversed(older):
                known = recipes.get(name, {})
                had = known.get(kind, known.get(kind.removesuffix("_fast")))
                if had is None:
                    break
                other = {one: had.get(one) for one in KEPT if had.get(one) != kinds[kind].get(one)}
                if other != after:
                    found.setdefault(kind, {})[release] = other
                after = other
        if found:
            lines.append(f"{name}: {yaml.safe_dump(found, default_flow_style=True, width=10**6, sort_keys=False).strip()}")
    head = "# What recipes of older releases of NeMo 2 say otherwise, written by tools/older_nemo_recipes.py: by the last release that does;\n"
    head += f"# null = not said.\n# source: NVIDIA/NeMo, {', '.join(f'v{one}' for one, _ in older)}, nemo/collections/llm/recipes\n"
    OUTPUT.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(len(lines), "recipes")


if __name__ == "__main__":
    main()

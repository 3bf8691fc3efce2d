"""Writes planner/trainers/torchtune/configs.yaml from a checkout of torchtune: python tools/torchtune_configs.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.trainers.reading.interpolation import resolved  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "torchtune" / "configs.yaml"
KEPT = (
    "batch_size", "gradient_accumulation_steps", "enable_activation_checkpointing", "enable_activation_offloading", "dtype",
    "optimizer_in_bwd", "compile", "tensor_parallel_dim", "context_parallel_dim", "data_parallel_replicate_dim", "fsdp_cpu_offload",
    "model", "teacher_model", "policy_model", "quantizer", "grpo_samples", "ppo_epochs",
)  # fmt: skip
"""Settings that the reader takes."""
PARTS = {"optimizer": ("_component_",), "loss": ("_component_",), "tokenizer": ("max_seq_len",), "dataset": ("packed", "max_seq_len")}
"""And those of sections."""


def kept(data: dict[str, Any]) -> dict[str, Any]:
    """What decides a plan."""
    found = {name: data[name] for name in KEPT if data.get(name) not in (None, False)}
    for name, keys in PARTS.items():
        section = data.get(name)
        if isinstance(section, dict) and (part := {key: section[key] for key in keys if section.get(key) not in (None, False)}):
            found[name] = part
    return found


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Every configuration that trains, by the name that 'tune run --config' takes."""
    root = folder / "recipes" / "configs"
    files = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))}
    read = {name: kept(resolved(yaml.safe_load(path.read_text(encoding="utf-8")))) for name, path in files.items()}
    trains = {name: one for name, one in read.items() if "batch_size" in one and "optimizer" in one}
    head = "# Settings of torchtune's configurations that decide a plan, written by tools/torchtune_configs.py.\n"
    head += "# source: pytorch/torchtune, main, 2026-11, recipes/configs\n"
    lines = [f"{name}: {yaml.safe_dump(one, default_flow_style=True, width=10**6, sort_keys=False).strip()}" for name, one in trains.items()]
    OUTPUT.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(len(trains), "configurations")


if __name__ == "__main__":
    main()

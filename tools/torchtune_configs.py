"""Writes planner/trainers/torchtune/configs.yaml from a checkout of torchtune, and older_configs.yaml from those of its releases, oldest
first: python tools/torchtune_configs.py FOLDER 0.1=FOLDER 0.2=FOLDER ..."""

import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.trainers.reading.interpolation import resolved  # noqa: E402
from planner.trainers.torchtune.own_settings import LOSSES  # noqa: E402

OUTPUT = ROOT / "planner" / "trainers" / "torchtune" / "configs.yaml"
OLDER = OUTPUT.with_name("older_configs.yaml")
KEPT = (
    "batch_size", "gradient_accumulation_steps", "enable_activation_checkpointing", "enable_activation_offloading", "dtype",
    "optimizer_in_bwd", "compile", "tensor_parallel_dim", "context_parallel_dim", "data_parallel_replicate_dim", "fsdp_cpu_offload",
    "model", "teacher_model", "policy_model", "quantizer", "grpo_samples", "ppo_epochs",
)  # fmt: skip
"""Settings that the reader takes."""
PARTS = {"optimizer": ("_component_",), "loss": ("_component_",), "tokenizer": ("max_seq_len",), "dataset": ("packed", "max_seq_len")}
"""And those of sections."""
SAME = ("model.lora_alpha", "dataset.packed", "ppo_epochs", "grpo_samples")
"""What may differ between releases in the same plan."""


def kept(data: dict[str, Any]) -> dict[str, Any]:
    """What decides a plan."""
    found = {name: data[name] for name in KEPT if data.get(name) not in (None, False)}
    for name, keys in PARTS.items():
        section = data.get(name)
        if isinstance(section, dict) and (part := {key: section[key] for key in keys if section.get(key) not in (None, False)}):
            found[name] = part
    return found


def training(folder: Path) -> dict[str, dict[str, Any]]:
    """Every configuration of a checkout that trains, by the name that 'tune run --config' takes."""
    root = folder / "recipes" / "configs"
    files = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))}
    read = {name: kept(resolved(yaml.safe_load(path.read_text(encoding="utf-8")))) for name, path in files.items()}
    return {name: one for name, one in read.items() if "batch_size" in one and "optimizer" in one}


def flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their names with dots."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def other(old: dict[str, Any], today: dict[str, Any]) -> dict[str, Any]:
    """What an older configuration says otherwise in another plan; null = not said. Of adapters the order is none."""
    def plan(name: str, value: Any) -> Any:
        named = str(value).rpartition(".")[2]  # its module may move
        usual = value is not True and value in (None, False, 0, 1)
        return LOSSES.get(named, named) if name.endswith("._component_") else sorted(value) if isinstance(value, list) else (
            None if usual else value)  # fmt: skip

    names = [one for one in dict.fromkeys([*old, *today]) if one not in SAME]
    return {one: old.get(one) for one in names if plan(one, old.get(one)) != plan(one, today.get(one))}


def differences(releases: list[tuple[str, dict[str, dict[str, Any]]]], today: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By configuration, what it says otherwise, by the last release that does."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in today.items():
        after: dict[str, Any] = {}
        for release, configs in reversed(releases):
            if name in configs and (differs := other(flat(configs[name]), flat(one))) != after:
                found.setdefault(name, {})[release] = after = differs
    return found


def lines_of(data: dict[str, Any]) -> str:
    """A line for each name."""
    lines = [f"{name}: {yaml.safe_dump(one, default_flow_style=True, width=10**6, sort_keys=False).strip()}" for name, one in data.items()]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("releases", nargs=-1)
def main(folder: Path, releases: tuple[str, ...]) -> None:
    """Both files."""
    trains = training(folder)
    head = "# Settings of torchtune's configurations that decide a plan, written by tools/torchtune_configs.py.\n"
    head += "# source: pytorch/torchtune, main, 2026-11, recipes/configs\n"
    OUTPUT.write_text(head + lines_of(trains), encoding="utf-8")
    older = [(name, training(Path(place))) for name, _, place in (one.partition("=") for one in releases)]
    head = "# What older releases of torchtune say otherwise in them, written by tools/torchtune_configs.py: by the last release that does;\n"
    head += f"# null = not said.\n# source: pytorch/torchtune, {', '.join(f'v{name}' for name, _ in older)}, recipes/configs\n"
    if older:
        OLDER.write_text(head + lines_of(differences(older, trains)), encoding="utf-8")
    print(len(trains), "configurations")


if __name__ == "__main__":
    main()

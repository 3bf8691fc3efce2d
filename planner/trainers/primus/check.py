"""Primus: keys of an exported experiment against those of its configuration; its launcher needs Megatron for ROCm."""

from pathlib import Path

from planner.trainers.checking import setting_names as names


def known_names(root: Path) -> dict[str, names.Names]:
    """Keys of an experiment, of a module, and of everything that the module and its models say: what may be overridden."""
    found: names.Names = {}
    configs = root / "primus" / "configs"
    for path in sorted(path for part in ("modules", "models") for path in (configs / part / "megatron").glob("*.yaml")):
        found |= {name: type(value).__name__ for name, value in (names.load(path) or {}).items()}
    experiment = dict.fromkeys(("work_group", "user_name", "exp_name", "workspace", "modules"), "str")
    module = dict.fromkeys(("framework", "config", "model", "overrides"), "str")
    return {"overrides": found, "experiment": experiment, "module": module}


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    for file in ("primus.yaml", "primus-smoke.yaml"):
        data = names.load(folder / file)
        module = data["modules"]["pre_trainer"]
        yield from (("experiment", name) for name in data)
        yield from (("module", name) for name in module)
        yield from (("overrides", name) for name in module["overrides"])

"""Colossal-AI's plugins: the names that an exported folder uses, against the installed package."""

from pathlib import Path

from planner.trainers.checking import setting_names as names


def known_names(root: Path) -> dict[str, names.Names]:
    """Parameters of both plugins."""
    plugins = root / "colossalai" / "booster" / "plugin"
    return {
        "HybridParallelPlugin": names.parameters(plugins / "hybrid_parallel_plugin.py", "HybridParallelPlugin"),
        "MoeHybridParallelPlugin": names.parameters(
            plugins / "moe_hybrid_parallel_plugin.py", "MoeHybridParallelPlugin"
        ),
    }


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    data = names.load(folder / "plan.json")
    section = "MoeHybridParallelPlugin" if data["moe"] else "HybridParallelPlugin"
    return ((section, name) for name in data["plugin"])

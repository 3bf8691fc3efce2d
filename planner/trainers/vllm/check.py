"""vLLM's flags: the names that an exported folder uses, against the installed package."""

from pathlib import Path

from planner.trainers.checking import setting_names as names


def known_names(root: Path) -> dict[str, names.Names]:
    """Flags of vllm serve."""
    package = root / "vllm"
    return {
        "serve": {
            **names.flags(package / "engine" / "arg_utils.py"),
            **names.flags(package / "entrypoints" / "common" / "cli_args.py"),
        }
    }


def used_names(folder: Path) -> names.Uses:
    """(section, name) of every flag of the exported scripts."""
    return (("serve", word) for word in names.script_words(folder) if word.startswith("--"))

"""SGLang's flags: the names that an exported folder uses, against the installed package."""

import re
from pathlib import Path

from planner.trainers.checking import setting_names as names


def known_names(root: Path) -> dict[str, names.Names]:
    """Its flags are the fields of its argument groups; aliases stand in their metadata."""
    found: names.Names = {}
    for path in sorted((root / "sglang" / "srt" / "arg_groups" / "fields").glob("*.py")):
        for name, text in names.fields(path).items():
            if not name.startswith("_"):
                found[f"--{name.replace('_', '-')}"] = "flag" if text == "bool" else text
        for word in re.findall(r"aliases=\[([^\]]*)\]", path.read_text(encoding="utf-8")):
            found |= {alias: "alias" for alias in re.findall(r"--[\w-]+", word)}
    return {"launch_server": found}


def used_names(folder: Path) -> names.Uses:
    """(section, name) of every flag of the exported scripts."""
    return (("launch_server", word) for word in names.script_words(folder) if word.startswith("--"))

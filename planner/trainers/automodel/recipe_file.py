"""A recipe of NeMo AutoModel as a file or as a command starts it, with variables of the environment in its values.

[components/config/loader.py: resolve_yaml_env_vars; components/config/_arg_parser.py; cli/app.py]
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.given import Given
from planner.trainers.reading.interpolation import override
from planner.trainers.reading.settings import Settings, file_settings, parsed
from planner.trainers.reading.shell.text import gap, is_open

PROGRAM = r"(\S*/)?automodel|nemo_automodel\.(cli\.app|recipes\.\S+)|(\S*/)?(finetune|pretrain|train_ft|benchmark|app)\.py"
_VARIABLE = re.compile(r"\$\{\s*(?:oc\.env:\s*)?([\w.]+)\s*(?:,([^${}]*))?\}|\$([A-Za-z_]\w*)")
"""${NAME}, ${NAME,default}, ${oc.env:NAME,default} and $NAME."""


def settings_of(path: Path, said: Given) -> tuple[Settings, int | None, tuple[str, ...]]:
    """(the recipe, GPUs that a command starts, notes). Raises PlannerError."""
    gpus: int | None = None
    notes: tuple[str, ...] = ()
    if path.suffix.lower() in (".yaml", ".yml"):
        data, known = file_settings(path, "a recipe of NeMo AutoModel"), said
    else:
        found = launched(path, said, PROGRAM)
        flat = dict(with_files(path, found, said, ("config", "c")).data)
        each, over = flat.pop("nproc_per_node", None), {name: flat.pop(name) for name in list(flat) if "." in name}
        data, notes = override(flat, over), found.notes
        gpus = found.num_gpus or (each * (found.nodes or 1) if isinstance(each, int) else None)
        known = replace(said, settings={**found.environment, **said.settings})
    taken: set[str] = set()
    data = {name: _filled(value, known, taken) for name, value in data.items()}
    rest = said.with_settings({name: text for name, text in said.settings.items() if name not in taken})
    return Settings(path, rest.filled(data), said=said), gpus, notes


def _filled(value: Any, said: Given, taken: set[str]) -> Any:
    """A value with variables as they are said, else their defaults; a gap where there is neither."""
    if isinstance(value, Mapping):
        return {name: _filled(one, said, taken) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, said, taken) for one in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def put(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        taken.add(name)
        text = said.setting(name)
        usual = found[2].strip().strip("'\"") if found[2] is not None else gap([name])
        return usual if text is None else text

    text = _VARIABLE.sub(put, value)
    return text if is_open(text) else parsed(text)

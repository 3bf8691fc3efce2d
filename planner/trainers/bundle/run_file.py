"""How a trainer is started, from the file run.txt of its folder: words, variables, notes, installation."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from planner.trainers.bundle.quoting import Expression, filled_yaml
from planner.trainers.bundle.target import ExportJob, Rendered, Setting


def run_of(
    job: ExportJob,
    trainer: str,
    files: Mapping[str, str],
    more: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> Rendered:
    """The run that run.txt describes, with the files; it may name ``versions``, those of the folder, and ``values``.

    ``more``: fields of Rendered that depend on the plan; tuples follow those of the file, others replace them.
    """
    versions = Expression(getattr(importlib.import_module(f"planner.trainers.{trainer}"), "VERSIONS", ""))
    data: dict[str, Any] = filled_yaml(job, trainer, "run.txt", versions=versions, **values)
    for part in ("environment", "variables"):
        data[part] = {name: Setting(*pair) for name, pair in data.get(part, {}).items()}
    for part in ("entry", "smoke"):
        data[part] = tuple(data[part].split() if isinstance(data[part], str) else data[part])
    for part in ("prepare", "notes", "install"):
        data[part] = tuple(data.get(part, ()))
    for part, value in more.items():
        if isinstance(value, tuple):
            data[part] = (*data[part], *value)
        else:
            data[part] = {**data[part], **value} if isinstance(value, Mapping) else value
    return Rendered(files=files, **data)

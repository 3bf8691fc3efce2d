"""Serve plans as files: what ``plan export``, ``plan import``, ``plan validate`` and ``plan doctor`` do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import File
from planner.errors import PlannerError, shown

if TYPE_CHECKING:
    from planner.api.serving_calls import ServePlan
    from planner.serving.export.serving_folder import ServeExport
    from planner.serving.readback.serve_reading import ServeRead


def is_serve_file(path: File) -> bool:
    """Whether a file says that it is a serve plan. Raises PlannerError where it cannot be read."""
    from planner.library import read_yaml
    from planner.serving.serve_plan import is_serve_plan

    return is_serve_plan(read_yaml(Path(path)))


def export_file(plan: File, to: str, output: File, *, force: bool = False) -> ServeExport:
    """Write a serve plan as a folder for an engine, Dynamo or llm-d. Raises PlannerError."""
    from planner.serving.export.serving_folder import export_serving
    from planner.serving.serve_plan import load_serve_plan

    return export_serving(load_serve_plan(Path(plan)), to, Path(output), force=force)


def check_text(made: ServeExport) -> str:
    """What the engines' own flags said of an export."""
    from planner.serving.export.serving_folder import check_text as told

    return told(made)


def is_server_file(path: File, format: str | None = None) -> bool:
    """Whether a file starts a server: by ``--from``, else by what stands in it. Raises PlannerError where it cannot be read."""
    from planner.serving.readback.serve_reading import NAMES, starts_servers

    return format in NAMES if format else starts_servers(Path(path))


def import_server(
    file: File, *, settings: Mapping[str, str] | Sequence[str] = (), **said: Any
) -> tuple[ServePlan, ServeRead]:
    """A command line, script or manifest that starts a server as a serve plan, priced, and what was not taken over.

    Keywords: model, hardware, gpus, engine, input, output (tokens: a number, or 'LOW-HIGH'), concurrency, rate. Raises PlannerError
    with everything that decides time or memory and is said nowhere.
    """
    from planner.api.serving_calls import ServePlan
    from planner.serving.plan_pricing import priced
    from planner.serving.readback.serve_reading import ServeSaid, read_serving
    from planner.trainers.reading.given import Given, parse_settings

    told = {**said, **{name: ends(said.get(name), f"--{name}-tokens") for name in ("input", "output")}}
    read = read_serving(Path(file), ServeSaid(**told), Given(settings=parse_settings(settings)))
    return ServePlan(priced(read.plan)), read


def ends(value: Any, flag: str) -> Any:
    """Tokens as a flag says them: 1024, or 512-1024. Raises PlannerError."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", value.strip())
    if found is None:
        raise PlannerError(f"{flag} is {shown(value)}; write a number of tokens, or the smallest and the largest: 512-1024")
    return [int(found[1]), int(found[2] or found[1])]

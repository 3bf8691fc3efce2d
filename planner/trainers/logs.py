"""Which reader a log belongs to, and the row that it becomes together with what the user adds."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from planner import library, units
from planner.errors import PlannerError, listed
from planner.model import ModelSpec
from planner.record import record
from planner.runs import Row, rows_from_dict
from planner.runs.row_models import model_columns
from planner.trainers import having, load
from planner.trainers.reading.log_facts import Log, steady

MOST_BYTES = 512 * int(units.MIB)
"""Longest file that is read as a log: those of runs of weeks are this long."""
_FLAGS = {
    "model.hidden": "--model", "model.layers": "--model", "model.heads": "--model", "model.ffn": "--model",
    "model.gated": "--model", "model.vocab": "--model", "model.seq": "--sequence-length", "parallel.gpus": "--gpus",
    "parallel.tp": "--tp", "parallel.pp": "--pp", "batch.micro": "--micro-batch-size",
    "batch.global": "--global-batch-size",
}  # fmt: skip
"""What a row needs, and the flag that says it."""


@record
class Given:
    """What the user adds to the logs; what a log says counts more."""

    model: ModelSpec | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a row by path, like the facts of a log."""


def is_log(path: Path) -> bool:
    """The file is a log, not a table of runs: those are YAML."""
    return path.suffix.lower() not in (".yaml", ".yml")


def read_log(path: Path) -> Log:
    """What a log says. Raises PlannerError when it cannot be read or is of none of the known frameworks."""
    return parse_log(library.read_text(path, most=MOST_BYTES, errors="replace"), str(path))


def parse_log(text: str, where: str) -> Log:
    """The log in a text. Raises PlannerError."""
    readers = {name: load(name, "log") for name in having("log")}
    for name, reader in readers.items():
        if reader.MARK not in text:
            continue
        try:
            log: Log = reader.read(text)
        except (ValueError, OverflowError) as error:
            raise PlannerError(
                f"{where}: a line of this {name} log holds what is no number ({str(error)[:60]})"
            ) from error
        if log.steps:
            return log
    *known, last = (reader.WRITER for reader in readers.values())
    raise PlannerError(
        f"{where}: no step times of {', '.join(known)} or {last} were found; is it the log of the rank that prints them? "
        "Other runs can be written by hand: see profiles/runs/README.md"
    )


def row_of_log(log: Log, given: Given, *, where: str, gpu: str) -> Row:
    """The log as a row of runs: its own facts, then what the user gave. Raises PlannerError naming what is missing.

    ``gpu`` is the profile that stands for the device where the log does not name it.
    """
    facts = {path: value for path, value in log.facts.items() if value is not None}
    if given.model is not None:
        _check_same_model(facts, given.model, where)
        facts = {path: value for path, value in facts.items() if not path.startswith("model.") or path == "model.seq"}
        facts |= {f"model.{key}": value for key, value in model_columns(given.model).items()}
    facts = {**{path: value for path, value in given.facts.items() if value is not None}, **facts}
    _derive(facts)
    now = steady(log, where)
    missing = [path for path in _FLAGS if facts.get(path) is None]
    if missing:
        flags = list(dict.fromkeys(_FLAGS[path] for path in missing))
        what = [flag.strip("-").replace("-", " ").replace("gpus", "number of GPUs") for flag in flags]
        raise PlannerError(f"{where}: the log does not say the {listed(what, 'and')}; give {listed(flags, 'and')}")
    measured = {
        "step_s": now.seconds, "tokens_per_s_per_gpu": None if now.seconds else now.tokens_per_second_per_gpu,
        "mem_gb": log.memory_gib,
    }  # fmt: skip
    if now.samples_per_second and not now.seconds:
        measured["step_s"] = facts["batch.global"] / now.samples_per_second
    if now.batch:
        facts["batch.global"] = now.batch
    row = _nested(facts) | {"id": Path(where).stem or "log", "measured": measured, "notes": "; ".join(log.notes)}
    data = {
        "source": {"id": "my-logs"}, "hardware": {"gpu": log.gpu or gpu}, "framework": log.framework, "rows": [row],
    }  # fmt: skip
    return rows_from_dict(data, where=where, source="my-logs")[0]


def _derive(facts: dict[str, Any]) -> None:
    """Degrees that follow: those that are not stated are 1, GPUs from the product, dp from the GPUs."""
    for name in ("tp", "pp", "cp", "vpp"):
        facts.setdefault(f"parallel.{name}", 1)
    if facts.get("model.experts"):
        facts.setdefault("parallel.ep", 1)
    inside = facts["parallel.tp"] * facts["parallel.pp"] * facts["parallel.cp"]
    if facts.get("parallel.gpus") is None and facts.get("parallel.dp"):
        facts["parallel.gpus"] = inside * facts["parallel.dp"]
    if facts.get("parallel.gpus") and facts.get("parallel.dp") is None:
        facts["parallel.dp"] = max(facts["parallel.gpus"] // max(inside, 1), 1)
    dp, batch = facts.get("parallel.dp"), facts.get("batch.global")
    if facts.get("batch.micro") is None and dp and batch == dp:
        facts["batch.micro"] = 1


def _check_same_model(facts: Mapping[str, Any], model: ModelSpec, where: str) -> None:
    for path, value in (("model.hidden", model.hidden_size), ("model.layers", model.num_layers)):
        if facts.get(path) not in (None, value):
            raise PlannerError(
                f"{where}: the log has {path.partition('.')[2]} {facts[path]}, --model {model.name} has {value}; leave --model "
                "out, or name the model that was trained"
            )


def _nested(facts: Mapping[str, Any]) -> dict[str, Any]:
    """{'parallel.tp': 4} as {'parallel': {'tp': 4}}."""
    row: dict[str, Any] = {"model": {}, "parallel": {}, "batch": {}}
    for path, value in facts.items():
        *group, key = path.split(".")
        (row[group[0]] if group else row)[key] = value
    return row

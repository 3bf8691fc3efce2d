"""What the steps found, put together: summary.yaml with every figure, summary.md for a person."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.lab.first_day.all_steps import MEDIUM, PROFILE
from planner.lab.first_day.runner import FINE
from planner.runs.rows import validations_from_dict
from planner.trainers.bundle.quoting import markdown
from planner.units import GIB, MIB, TERA, format_bytes, format_seconds

VERSION = 1
YAML_FILE, TEXT_FILE = "summary.yaml", "summary.md"
LEAST_RUNS = 3
"""That `plan calibrate` needs."""
MEMORY = ("peak", "allocated", "reserved", "device")
"""Rows of a rank's memory that are compared with the driver: by the tracker, by torch's allocator, in use on the device."""
COMPARED = ("what", "predicted_gib", "measured_gib", "error")
PASSES = {"F": "forward", "B": "backward"}
TIMES = ("what", "predicted_seconds", "measured_seconds", "error", "inside", "note")
DRY = "this was the dry form, whose numbers mean nothing; on a machine with GPUs"
AGAIN = "look at the sentence and the log, mend it, and do these steps alone again"

Row = dict[str, Any]


def gathered(folder: Path, records: list[Row], base: str, gpus: int) -> Row:
    """What lies in the folder, by the records of the steps; ``base``: the library's profile of this card, "" = none."""
    there = [one for one in records if (folder / one["file"]).is_file()]
    validated = [one for one in there if one["name"].endswith(("-rank", "-full"))]
    found: Row = {"machine": None, "hardware": [], "times": [], "memory": [], "low_precision": [], "health": None, "runs": 0}
    for one in there:
        try:
            data = library.read_yaml(folder / one["file"]) if one["name"] != "profile" else {}
            if one["name"] in ("machine", "health"):
                found[one["name"]] = data.get(one["name"])
            elif one["name"] == "fp8":
                found["low_precision"] = data.get("low_precision")
            elif one["name"] == "profile":
                found["hardware"] = _hardware(folder / PROFILE, base)
            elif one in validated:
                _validation(found, one, data)
        except (PlannerError, KeyError, TypeError, ValueError, AttributeError) as error:  # written in part, or changed since
            one["sentence"] = one["sentence"] or f"{one['file']} cannot be read: {error}"
    return found | {"next": _next(folder, records, found, base, gpus)}


def _validation(found: Row, step: Row, data: Mapping[str, Any]) -> None:
    """Adds the steps and passes, memory and runs of a file of plan validate."""
    memory: list[Row] = []
    for number, one in enumerate(validations_from_dict(data), 1):
        which = step["name"] if "validations" not in data else f"{step['name']} {number}"
        found["runs"] += one["run"] is not None
        passes = [
            {**row, "what": f"{PASSES[row['kind']]} of stage {row['stage']}"}
            for row in one.get("stages") or () if row["kind"] in PASSES
        ]  # fmt: skip
        steps = [row for row in one.get("times") or () if row["what"].startswith("step")]
        found["times"] += [
            {"step": which, **{name: row.get(name) for name in TIMES}}
            for row in [*steps, *passes] if row["measured_seconds"] is not None
        ]  # fmt: skip
        memory += [{"step": which, **row} for row in _memory(one)]
    found["memory"] += memory
    driver = (step["gpus"] or {}).get("memory_mib_most")
    devices = [row for row in memory if row["what"] == "device"]
    if driver and devices:  # the driver saw the fullest GPU of all runs
        seen, fullest = driver * MIB / GIB, max(devices, key=lambda row: row["measured_gib"])
        error = fullest["predicted_gib"] / seen - 1.0
        found["memory"].append({**fullest, "what": "nvidia-smi", "measured_gib": seen, "error": error})


def _memory(validation: Mapping[str, Any]) -> list[Row]:
    """Of the fullest rank, as torch counts it."""
    ranks = [rank["memory"] for rank in validation.get("ranks") or () if rank.get("memory")]
    if not ranks:
        return []
    fullest = max(ranks, key=lambda rows: max(row["measured_gib"] for row in rows))
    return [{name: row[name] for name in COMPARED} for row in fullest if row["what"] in MEMORY]


def _hardware(file: Path, base: str) -> list[Row]:
    """The main figures of the profile next to the library's."""
    measured, known = load_hardware(str(file)), load_hardware(base) if base else None
    figures: dict[str, tuple[Callable[[Any], float], str]] = {
        "sustained bf16": (lambda one: one.sustained_flops("bf16"), "FLOP/s"),
        "memory bandwidth": (lambda one: one.memory_bandwidth, "bytes/s"),
        "usable memory": (lambda one: one.usable_memory, "bytes"),
        "context of the driver": (lambda one: one.context_memory, "bytes"),
    }
    if measured.measured.get("scale_up") == "measured":
        for op in ("all_reduce", "all_gather", "all_to_all"):
            figures[f"{op} inside the node"] = (partial(_largest, op), "bytes/s")
    rows: list[Row] = []
    for name, (figure, unit) in figures.items():
        library_says = None if known is None else float(figure(known))
        value = float(figure(measured))
        error = None if not library_says or not value else library_says / value - 1.0
        rows.append({"what": name, "unit": unit, "library": library_says, "measured": value, "error": error})
    return rows


def _largest(op: str, profile: HardwareProfile) -> float:
    """Bus bandwidth of the largest group and message."""
    return float(profile.scale_up[op].bus_bandwidth()[-1])


def _next(folder: Path, records: list[Row], found: Row, base: str, gpus: int) -> list[Row]:
    """Commands to go on with, and why; their files are named from the folder."""
    done = [one["name"] for one in records if one["outcome"] in FINE]
    rows: list[Row] = []
    if len(done) < len(records):
        names = ", ".join(one["name"] for one in records if one["name"] not in done)
        rows.append({"command": "plan first-day --output . --resume", "why": f"{names}: {AGAIN}"})
    if not base:
        return [*rows, {"command": "plan first-day --output DIR", "why": DRY}]
    if "profile" in done:
        command = f"plan --model {MEDIUM[0]} --gpus {gpus} --hardware {PROFILE}"
        rows.append({"command": command, "why": "plans on what was measured here"})
    if found["runs"] >= LEAST_RUNS and "profile" in done:
        files = [one["file"] for one in records if one["name"].endswith("-full") and (folder / one["file"]).is_file()]
        command = shlex.join(["plan", "calibrate", *files, "--hardware", PROFILE, "--output", "calibrated.yaml"])
        rows.append({"command": command, "why": f"corrects the profile with the {found['runs']} runs of whole plans"})
    elif "profile" in done:
        why = f"{found['runs']} of the {LEAST_RUNS} runs that plan calibrate needs are here; run further plans, then plan calibrate"
        rows.append({"command": "plan validate PLAN --top 3 --output more.yaml", "why": why})
    return rows


# ------------------------------------------------------------------------------------------------ for a person


def text_of(summary: Mapping[str, Any]) -> str:
    """summary.md."""
    done = sum(one["outcome"] in ("done", "kept") for one in summary["steps"])
    took = format_seconds(sum(one["seconds"] for one in summary["steps"]))
    lines = [
        "# First day", "",
        f"{markdown(summary['device'])}, {summary['date']}: {done} of {summary['planned_steps']} steps done in {took}. All "
        f"figures: {YAML_FILE}; error = predicted / measured - 1.", "",
    ]  # fmt: skip
    lines += _table("Steps", ("step", "what", "outcome", "time", "why, and its log"), (
        (one["name"], one["what"], one["outcome"].replace("_", " "), format_seconds(one["seconds"]) if one["seconds"] else "",
         " ".join(filter(None, [one["sentence"], one["log"] if one["log"] and one["outcome"] not in FINE else ""])))
        for one in summary["steps"]
    ))  # fmt: skip
    lines += _table("Hardware", ("", "library", "measured", "library is off by"), (
        (one["what"], _amount(one["library"], one["unit"]), _amount(one["measured"], one["unit"]), _percent(one["error"]))
        for one in summary["hardware"]
    ))  # fmt: skip
    lines += _table("Times", ("run", "", "predicted", "measured", "error", "inside nine of ten"), (
        (one["step"], one["what"], _seconds(one["predicted_seconds"]), _seconds(one["measured_seconds"]),
         one["note"] or _percent(one["error"]), {True: "yes", False: "NO", None: ""}[one["inside"]])
        for one in summary["times"]
    ))  # fmt: skip
    lines += _table("Memory of the fullest rank, GiB", ("run", "", "predicted", "measured", "error"), (
        (one["step"], one["what"], _number(one["predicted_gib"]), _number(one["measured_gib"]), _percent(one["error"]))
        for one in summary["memory"]
    ))  # fmt: skip
    lines += _low_precision(summary["low_precision"])
    lines += _table("The GPUs meanwhile", ("step", "clock, MHz", "power, W", "heat, C", "memory, MiB, before and most"), (
        (one["name"], f"{_number(of['clock_mhz_least'])} to {_number(of['clock_mhz_most'])}", _number(of["power_w_most"]),
         _number(of["temperature_c_most"]), f"{_number(of['memory_mib_before'])}, {_number(of['memory_mib_most'])}")
        for one in summary["steps"] if (of := one["gpus"])
    ))  # fmt: skip
    if summary["health"]:
        lines += _listed("Health", summary["health"].get("sentences") or ["nothing stands out"])
    if summary["machine"]:
        lines += _listed("Machine", (f"{name}: {_flat(value)}" for name, value in summary["machine"].items() if value))
    lines += ["## Next, in this folder", "", *(f"- {markdown(one['why'])}\n\n      {one['command']}\n" for one in summary["next"])]
    return "\n".join(lines).rstrip() + "\n"


def _low_precision(rows: list[Row]) -> list[str]:
    """Those that ran; of the others the first reason of each recipe."""
    ran = [one for one in rows if "seconds" in one]
    refused: Row = {}
    for one in rows:
        if "refused" in one and not any(each["recipe"] == one["recipe"] for each in ran):
            refused.setdefault(one["recipe"], one["refused"])
    heads = ("tokens x columns x depth", "pass", "recipe", "time", "TFLOP/s", "times bf16", "the profile is off by")
    lines = _table("Products", heads, (
        (" x ".join(map(str, one["tokens_columns_depth"])), one["pass"], one["recipe"], _seconds(one["seconds"]),
         _number(one["tflops"]), f"{one['times_bf16']:.2f}" if one["times_bf16"] else "", _percent(one["error"]))
        for one in ran
    ))  # fmt: skip
    return lines + (_listed("Products that did not run", refused.values()) if refused else [])


def _listed(title: str, lines: Iterable[object]) -> list[str]:
    return [f"## {title}", "", *(f"- {markdown(one)}" for one in lines), ""]


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Nothing for no rows."""
    body = [f"| {' | '.join(map(markdown, row))} |" for row in rows]
    return [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *body, ""] if body else []


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_flat(one)}" for name, one in value.items() if one is not None)
    return ", ".join(map(_flat, value)) if isinstance(value, list) else str(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "FLOP/s":
        return f"{value / TERA:.4g} TFLOP/s"
    return format_bytes(value) + unit.removeprefix("bytes")

"""Runs steps one after the other, each in processes of its own with a limit of time, so that whatever ends one keeps the others.

What is known is handed over after each step. While a step runs the driver is asked for memory, clocks, power and heat.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner import library
from planner.lab.first_day.all_steps import Step, Words
from planner.lab.launch.state import Bar, State
from planner.lab.launch.torchrun import PRINTED, Ended, cause, run_watched, with_package
from planner.units import format_seconds

ASKED = ("memory.used", "clocks.sm", "power.draw", "temperature.gpu")
"""Of each GPU every other second, as nvidia-smi calls it."""
EVERY = 2
SAMPLED = {
    "samples", "memory_mib_before", "memory_mib_most", "clock_mhz_least", "clock_mhz_most", "power_w_most", "temperature_c_most",
}  # fmt: skip
"""What is kept of them."""
FINE = ("done", "kept", "not_possible")
"""Outcomes that leave nothing to be done again."""
LEAST_SHARE = 0.5
"""Of its limit that must be left of the whole time for a step to begin."""
LOGS = "logs"
STARTED = {"plan": ("-m", "planner"), "python": ()}
"""First word of a command: how this interpreter starts it."""


@dataclass(kw_only=True)
class Day:
    """A run of steps."""

    folder: Path
    """Where they run and write."""
    budget: float
    """Seconds for all of them."""
    gpus: bool
    """There are some, and the driver is asked about them."""
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What an earlier run said of its steps, by name: those that were done are kept."""
    report: Callable[[list[dict[str, Any]]], object] = lambda _: None
    """Given all that is known after each step."""

    def run(self, steps: list[Step]) -> list[dict[str, Any]]:
        """One record per step, in order. After Ctrl-C the last ones are missing."""
        found: list[dict[str, Any]] = []
        begun, remade = time.monotonic(), set[str]()
        (self.folder / LOGS).mkdir(exist_ok=True)
        self.report(found)
        try:
            for number, step in enumerate(steps, 1):
                which_one = f"{number}/{len(steps)} {step.name}"
                record = self._kept(step, remade)
                if record is None:
                    remade.add(step.makes)
                    record = self._done(step, begun + self.budget - time.monotonic(), which_one)
                found.append(record)
                seconds = f" in {format_seconds(record['seconds'])}" if record["seconds"] else ""
                sentence = f": {record['sentence']}" if record["sentence"] else ""
                _say(f"{which_one}: {record['outcome'].replace('_', ' ')}{seconds}{sentence}")
                self.report(found)
                if record["outcome"] == "interrupted":
                    break
        except KeyboardInterrupt:  # between two steps
            self.report(found)
        return found

    def _kept(self, step: Step, remade: set[str]) -> dict[str, Any] | None:
        """What an earlier run found, where it still holds: done by the same commands, and nothing that it needs is new."""
        record = self.before.get(step.name, {})
        same = record.get("outcome") in ("done", "kept") and record.get("commands") == _texts(step)
        if not same or remade & {*step.needs, *step.instead} or not (self.folder / step.makes).is_file():
            return None
        seconds, gpus = record.get("seconds"), record.get("gpus")
        gpus = gpus if isinstance(gpus, dict) and gpus.keys() == SAMPLED and all(map(_is_figure, gpus.values())) else None
        seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
        return {**_record(step), "outcome": "kept", "seconds": seconds, "log": f"{LOGS}/{step.name}.log", "gpus": gpus}

    def _done(self, step: Step, left: float, which_one: str) -> dict[str, Any]:
        """The step, or why it is left out."""
        record, whole = _record(step), format_seconds(step.limit)
        missing = [name for name in step.needs if not (self.folder / name).is_file()]
        if left < LEAST_SHARE * step.limit:
            return {**record, "sentence": f"{format_seconds(max(left, 0.0))} of --budget are left and it may need {whole}"}
        if missing:
            return {**record, "sentence": f"there is no {', '.join(missing)}, which a step before makes"}
        if why := step.obstacle(self.folder):
            return {**record, "outcome": "not_possible", "sentence": why}
        (self.folder / step.makes).unlink(missing_ok=True)
        log, limit = f"{LOGS}/{step.name}.log", min(step.limit, left)
        _say(f"{which_one}: {step.what}, at most {format_seconds(limit)}")
        begun = time.monotonic()
        with Bar(which=f"{which_one}: ") as bar, sampled(self.gpus) as rows:
            outcome, sentence = self._tried(step, begun + limit, log, bar)
        if outcome == "over_time":
            sentence = f"it had not ended after {format_seconds(limit)} and was stopped"
        gpus, seconds = of_samples(rows), round(time.monotonic() - begun, 1)
        return {**record, "outcome": outcome, "sentence": sentence, "log": log, "gpus": gpus, "seconds": seconds}

    def _tried(self, step: Step, end: float, log: str, bar: Bar) -> tuple[str, str]:
        """Outcome and sentence of the first command that succeeds, else of the last; their output in the log."""
        found, texts, begun = ("failed", ""), "", time.monotonic()
        for command in step.commands:
            words = tuple(step.instead.get(word, word) if not (self.folder / word).exists() else word for word in command)
            texts += f"$ {shlex.join(words)}\n"
            ended, late = _one(words, self.folder, end, lambda: bar.show(_state(begun, end)))
            ended = replace(ended, text=self._with_ranks(ended.text, Path(log)))
            texts += ended.text
            library.write_whole(self.folder / log, texts)
            found = ("over_time", "") if late else outcome_of(ended)
            if found[0] in ("done", "interrupted", "over_time"):
                break
        return found

    def _with_ranks(self, text: str, log: Path) -> str:
        """The output, with what ranks printed moved next to the log; the file of the last ones, where several runs kept one."""
        for name in re.findall(rf"{PRINTED} (\S+\.log)", text):
            there = log.with_name(f"{log.stem}-ranks.log")
            with contextlib.suppress(OSError):
                shutil.move(name, self.folder / there)
                text = text.replace(name, str(there))
        return text


def _one(words: Words, folder: Path, end: float, show: Callable[[], object]) -> tuple[Ended, bool]:
    """A command until its end, asked for as by Ctrl-C when its time is over: it then writes what it has. Whether it was."""
    late = False

    def look(_: str) -> float:
        nonlocal late
        show()
        if not late and time.monotonic() > end:
            late = True
            raise KeyboardInterrupt
        return float("inf")

    program = [sys.executable, *STARTED[words[0]], *words[1:]]
    environment = {**with_package(), "COLUMNS": "140"}
    ended = run_watched(program, look, folder=folder, environment=environment, ask=signal.SIGINT)
    return ended, late and ended.interrupted


def outcome_of(ended: Ended) -> tuple[str, str]:
    """How a command ended, and why in one sentence."""
    if ended.interrupted:
        return "interrupted", "stopped by the user"
    if ended.code == 0:
        return "done", ""
    said = [line.removeprefix("error: ") for line in ended.text.splitlines() if line.startswith("error: ")]
    why = said[-1] if said else cause(ended.text)
    if ended.code < 0:
        number = -ended.code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        memory = " (by the kernel, where main memory was used up: see dmesg)" if name == "SIGKILL" else ""
        return "crashed", f"{name} ended it{memory}{f'; {why}' if why else ''}"
    return "failed", why or f"exit code {ended.code}"


def _record(step: Step) -> dict[str, Any]:
    """Of a step that has not run."""
    return {
        "name": step.name, "what": step.what, "commands": _texts(step), "limit_seconds": step.limit, "seconds": 0.0,
        "outcome": "left_out", "sentence": "", "log": None, "file": step.makes, "gpus": None,
    }  # fmt: skip


def _state(begun: float, end: float) -> State:
    """For the bar: how much of its time a step has used."""
    return State(part="running", spent=time.monotonic() - begun, budget=end - begun)


def _texts(step: Step) -> list[str]:
    return [shlex.join(words) for words in step.commands]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ what the driver says


@contextlib.contextmanager
def sampled(wanted: bool) -> Iterator[list[str]]:
    """Lines of nvidia-smi while the body runs, one per GPU and two seconds. It writes into a pipe, so that it ends with this
    process however that ends."""
    rows: list[str] = []
    tool = shutil.which("nvidia-smi") if wanted else None
    if tool is None:
        yield rows
        return
    words = [tool, f"--query-gpu=index,{','.join(ASKED)}", "--format=csv,noheader,nounits", "-l", str(EVERY)]
    try:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        yield rows
        return
    assert process.stdout is not None
    reader = threading.Thread(target=lambda stream=process.stdout: rows.extend(stream), daemon=True)
    reader.start()
    try:
        yield rows
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=5.0)


def of_samples(rows: list[str]) -> dict[str, Any] | None:
    """Over the samples: memory of the fullest GPU at first and at most (MiB), clock (MHz), power (W) and heat (deg C) of all; None
    without a sample."""
    table = [[_number(word) for word in row.split(",")] for row in rows]
    table = [row for row in table if len(row) == len(ASKED) + 1 and row[0] is not None]
    if not table:
        return None
    first = [row[1] for number, row in enumerate(table) if row[0] not in {one[0] for one in table[:number]}]

    def column(number: int, how: Callable[[list[float]], float], given: list[Any] | None = None) -> float | None:
        values = [one for one in (given or [row[number] for row in table]) if one is not None]
        return how(values) if values else None

    return {
        "samples": len(table), "memory_mib_before": column(1, max, first), "memory_mib_most": column(1, max),
        "clock_mhz_least": column(2, min), "clock_mhz_most": column(2, max), "power_w_most": column(3, max),
        "temperature_c_most": column(4, max),
    }  # fmt: skip


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(word: str) -> float | None:
    """None for what a driver does not say ([N/A])."""
    try:
        return float(word)
    except ValueError:
        return None

"""Runs a trainer's code in a process of its own: requests as JSON lines in, answers as JSON lines out, one import for all.

check.py of a trainer holds NEEDED, the packages without which nothing is checked; ``one(asked, answer)``, which the child runs on
every request; and where it needs them ``prepare()``, run once in the child, ``asks(job)``, more facts for a request, and
``environment(job)``, variables of the child. One that runs no code of the trainer has the names of its settings instead
(checking.setting_names).
"""

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.trainers import having, load
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.setting_names import check_names

IMPORT_LIMIT, CASE_LIMIT = 240.0, 2.0
"""Seconds that a process may take to import a trainer and for each request, far above what they need; a process that takes
longer is ended, and nothing is checked."""
_MARK = "answer: "


def check_folder(name: str, job: ExportJob, folder: Path) -> Checked:
    """How far the trainer's own code goes with one folder."""
    return check_many(name, [(job, folder)], deep=True)[0]


def check_many(name: str, pairs: Sequence[tuple[ExportJob, Path]], **options: Any) -> list[Checked]:
    """The trainer's own code on the files in folders, one process for those that want the same environment.

    ``options`` go into the requests: ``deep`` has torchtitan build the model.
    """
    if name not in having("check"):
        return [Checked(target=name, missing="planner has no check for this trainer") for _ in pairs]
    module = load(name, "check")
    if not hasattr(module, "one"):
        return [check_names(name, folder) for _, folder in pairs]
    groups: dict[str, list[int]] = {}
    for number, (job, _) in enumerate(pairs):
        variables = module.environment(job) if hasattr(module, "environment") else {}
        groups.setdefault(json.dumps(variables), []).append(number)
    answers: dict[int, Checked] = {}
    for text, rows in groups.items():
        requests = [request(module, *pairs[row], **options) for row in rows]
        answers |= zip(rows, ask(name, module, requests, json.loads(text)), strict=True)
    return [answers[row] for row in range(len(pairs))]


def request(module: Any, job: ExportJob, folder: Path, **options: Any) -> Request:
    """What a child has to know of one exported folder."""
    blackwell = job.cluster.hardware.peak_flops.get("fp4") is not None
    return {
        "folder": str(folder.resolve()), "world": job.cluster.num_gpus, "capability": [10, 0] if blackwell else [9, 0],
        "layout": job.layout.columns(), "shard": int(job.layout.shard), "precision": job.workload.precision,
        "batch": job.workload.global_batch_size, **getattr(module, "asks", lambda job: {})(job), **options,
    }  # fmt: skip


def ask(name: str, module: Any, requests: Sequence[Request], environment: Mapping[str, str]) -> list[Checked]:
    """The answers of a child to all requests. Packages that are missing mean 'not checked'."""
    absent = [package for package in module.NEEDED if not installed(package)]
    why, answers = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed here", []
    limit = IMPORT_LIMIT + CASE_LIMIT * len(requests)
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH"))))
    try:
        if not absent:
            done = subprocess.run(
                [sys.executable, "-m", "planner.trainers.checking.child", module.__name__],
                input="\n".join(json.dumps(one) for one in requests), env={**os.environ, "PYTHONPATH": path, **environment},
                capture_output=True, text=True, timeout=limit, check=False,
            )  # fmt: skip
            printed = done.stdout.split("\n")
            answers = [json.loads(line.removeprefix(_MARK)) for line in printed if line.startswith(_MARK)]
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            why = f"its process ended with {done.returncode}: {last}"
    except subprocess.TimeoutExpired:
        why = f"its process was ended after {limit:g} s with {len(requests)} cases"
    if len(answers) != len(requests):
        return [Checked(target=name, missing=why) for _ in requests]
    return [Checked(**{**answer, "target": name}) for answer in answers]


def installed(package: str) -> bool:
    """A package, or a part of one, can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def serve(one: Callable[[Request, Checked], None]) -> None:
    """Answer every request on standard input; what the trainer prints goes to standard error."""
    for line in sys.stdin.read().splitlines():
        answer = Checked()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                one(json.loads(line), answer)
            except (Exception, SystemExit) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                answer.problem = f"{type(error).__name__}: {text}"[:1000]
        print(_MARK + json.dumps(vars(answer)), flush=True)


if __name__ == "__main__":
    trainer = importlib.import_module(sys.argv[1])
    sys.argv = sys.argv[:1]
    getattr(trainer, "prepare", lambda: None)()
    serve(trainer.one)

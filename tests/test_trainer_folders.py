"""A trainer is one folder: a new one is listed, exported to, read from and checked without a change anywhere else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainers.plans import Wanted, found

import planner.trainers
from planner.errors import PlannerError
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking.child import ask, check_folder, request
from planner.trainers.logs import parse_log
from planner.trainers.reading import read
from planner.trainers.targets import load_target

FILES = {
    "__init__": '''"""Made up."""

PLACE = 5
TITLE, TRAINERS, PACKAGE, VERSIONS, LEVEL, SOURCE = "Made up", ("megatron",), "made-up", ">=1", "parsed", "nowhere"
FORM = ("txt", "^made up")
''',
    "export": """from planner.trainers.bundle.target import Rendered

def refusals(job): return []
def render(job): return Rendered(files={"a.txt": "made up"}, entry=("train.py",), smoke=("train.py",))
""",
    "readback": """from planner.trainers.reading.configuration import Reading

def read(path, num_gpus): return Reading(trainer="megatron", fields={"tp": 2})
""",
    "log": """from planner.trainers.reading.log_facts import Log, Step

WRITER, MARK = "Made up", "made up"
def read(text): return Log(framework="megatron-lm core", steps=[Step(number=1, seconds=float(text.split()[-1]))])
""",
}
CHECK = """import os
NEEDED = ("numpy",)
def prepare(): print("talk of an import")
def one(asked, answer):
    print("talk")
    answer.reached("parsed")
    answer.same("file", open(asked["folder"] + "/a.txt").read(), "made up")
    answer.same("variable", os.environ["MADE_UP"], "1")
    answer.same("world", asked["world"], 16)
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a trainer, next to those of the package while the test runs."""
    folder = tmp_path / "trainers" / "made_up"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(planner.trainers, "__path__", [*planner.trainers.__path__, str(folder.parent)])
    planner.trainers.having.cache_clear()
    yield folder
    planner.trainers.having.cache_clear()
    for name in [name for name in sys.modules if name.startswith("planner.trainers.made_up")]:
        del sys.modules[name]


def test_a_new_folder_is_enough(made_up: Path, tmp_path: Path) -> None:
    names = list(planner.trainers.having("export"))
    assert names[0] == "made-up" and "megatron" in names
    exporter = planner.trainers.load("made-up", "export")
    job = ExportJob.of(found(Wanted(model="llama-3.1-8b", gpus=16, top=1))[0])
    assert exporter.render(job).files == {"a.txt": "made up"}
    (tmp_path / "a.txt").write_text("made up")
    assert read(tmp_path / "a.txt").fields == {"tp": 2}
    assert parse_log("made up 1.5", "a.log").steps[0].seconds == 1.5
    with pytest.raises(PlannerError, match="a line of this made-up log holds what is no number"):
        parse_log("made up x", "a.log")
    assert (
        check_folder("made-up", job, tmp_path).text()
        == "check: NOT CHECKED by made-up: planner has no check for this trainer"
    )


def test_a_child_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in, answers out, talk aside; what the trainer refuses, what is missing, a child that dies."""
    (tmp_path / "made_up_check.py").write_text(CHECK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = importlib.import_module("made_up_check")
    plans = [found(Wanted(model="llama-3.1-8b", gpus=gpus, top=1))[0] for gpus in (16, 8)]
    write_bundle(
        make_bundle(load_target("megatron"), ExportJob.of(plans[0]), "torchrun"),
        tmp_path / "run",
    )
    (tmp_path / "run" / "a.txt").write_text("made up")
    requests = [request(module, ExportJob.of(plan), tmp_path / "run") for plan in plans]
    good, bad = ask("made-up", module, requests, {"MADE_UP": "1"})
    assert good.text() == "check: made-up reached 'parsed'; file as planned; variable as planned; world as planned"
    assert bad.problem == "ValueError: world: the trainer says 8, the plan 16"
    monkeypatch.setattr(module, "NEEDED", ("numpy", "no_such_package"))
    assert ask("made-up", module, requests, {})[0].missing == "no_such_package is not installed here"
    monkeypatch.setattr(module, "NEEDED", ())
    (tmp_path / "made_up_check.py").write_text("raise SystemExit('broken')")
    assert ask("made-up", module, requests, {})[1].missing == "its process ended with 1: broken"

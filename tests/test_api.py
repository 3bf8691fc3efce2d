"""The Python API: the same answers as the commands, light to import, one exception, one page of examples that run."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from quick_cases import proofs_but

import planner
from planner import api
from planner.api.results import Plan
from planner.assumption import Assumption
from planner.commands.plans import estimate as estimate_command
from planner.commands.plans import search as search_command
from planner.keywords import JOB, SEARCHED, Keywords
from planner.layout import FIELDS
from planner.units import GIB

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"model": "llama-8b", "gpus": 8, "global_batch_size": 64}
FLAGS = ("--model", "llama-8b", "--gpus", "8", "--global-batch-size", "64")
RUNS = str(ROOT / "examples" / "my-runs.yaml")


def plain(data):
    """As JSON holds it, without the wall time of a search."""
    found = json.loads(data if isinstance(data, str) else json.dumps(data))
    found.get("searched", {}).pop("seconds", None)
    return found


def as_printed(text):
    """Lines of printed tables, without the last one of a search: it holds the wall time."""
    return [line.rstrip() for line in text.rstrip().splitlines() if " layouts, " not in line]


@pytest.fixture(scope="module")
def plans():
    return planner.plan(**SMALL, top=3)


# ------------------------------------------------------------------------------------------------ the same as the commands


def test_plan_is_what_the_command_prints(plans, run, monkeypatch):
    assert plain(plans.to_dict()) == plain(run(*FLAGS, "--top", "3", "--json").stdout)
    assert as_printed(str(plans)) == as_printed(run(*FLAGS, "--top", "3").stdout)


def test_estimate_is_what_the_command_prints(run):
    one = planner.estimate(**SMALL, tp=2, recompute="selective", recompute_modules=["mlp"], order="tp-cp-ep-dp-pp")
    flags = ("estimate", *FLAGS, "--tp", "2", "--recompute", "selective", "--recompute-modules", "mlp")
    assert plain(one.to_dict()) == plain(run(*flags, "--json").stdout)
    assert as_printed(str(one)) == as_printed(run(*flags).stdout)


def test_keywords_are_the_flags():
    known = set(Keywords.__annotations__)
    assert known == {*JOB, *FIELDS}
    own = {"top", "tokens", "days", "price", "cluster", "outer", "runnable", "fewest_gpus"}
    for command, names in ((search_command, {*JOB, *SEARCHED, *own}), (estimate_command, {*JOB, *FIELDS, "file"})):
        assert {one.name for one in command.params} - {"output", "as_json"} == names


def kept(function):
    """A function of the API that answers the same question once."""
    answers = {}

    def ask(*words, progress=None, **named):
        key = repr((words, sorted(named.items())))
        if key not in answers:
            answers[key] = function(*words, **named, **({"progress": progress} if progress else {}))
        return answers[key]

    return ask


@pytest.mark.proof
def test_questions_are_what_the_commands_print(plans, run, tmp_path, monkeypatch):
    """The API and the command answer each question by themselves, the command once for JSON and tables."""
    monkeypatch.chdir(tmp_path)
    names = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    for plan, name in zip(plans, names, strict=False):
        plan.save(name)
    answers = (
        (planner.compare(*names), ("compare", *names)),
        (planner.doctor(names[0], measured="85s", memory="76GiB"), ("doctor", names[0], "--measured", "85s", "--memory", "76GiB")),
        (planner.what_if(names[0], network="x2", hardware=["h200-sxm"], price={"h100-sxm": 2.5}, tokens=1e12),
         ("what-if", names[0], "--network", "x2", "--hardware", "h200-sxm", "--price", "h100-sxm=2.5", "--tokens", "1T")),
        (planner.what_if(planner.load(names[0]), gpus=[8, 16], fewest_gpus=True, micro_batch_size=1),
         ("what-if", names[0], "--gpus", "8,16", "--fewest-gpus", "--micro-batch-size", "1")),
        (planner.sensitivity(names[0], reach=1.2), ("sensitivity", names[0], "--reach", "1.2")),
        (planner.show_profile("h100-sxm"), ("hardware", "show", "h100-sxm")),
        (planner.compare_profiles("h100-sxm", "h200-sxm"), ("hardware", "diff", "h100-sxm", "h200-sxm")),
        (planner.accuracy([RUNS], sweeps=True, worst=3), ("accuracy", RUNS, "--sweeps", "--worst", "3")),
        (planner.calibrate([RUNS], hardware="h100-sxm", output="c.yaml"),
         ("calibrate", RUNS, "--hardware", "h100-sxm", "--output", "c.yaml")),
    )  # fmt: skip
    for name in ("compare", "doctor", "what_if", "sensitivity", "accuracy", "calibrate"):
        monkeypatch.setattr(api, name, kept(getattr(api, name)))
    for answer, command in answers:
        assert plain(answer.to_dict()) == plain(run(*command, "--json").stdout), command
        assert as_printed(str(answer)) == as_printed(run(*command).stdout), command
    assert planner.doctor(names[0], measured=85.0).to_dict() == planner.doctor(names[0], measured="85s").to_dict()


def test_pictures_and_pages_are_methods(tmp_path):
    swept = planner.what_if(model="llama-8b", gpus=[8, 16], sweep=True)
    assert swept.plot(tmp_path / "sweep.png")
    report = planner.accuracy([RUNS])
    assert report.write_page(tmp_path / "report.md") == tmp_path / "report.png"
    assert "# Accuracy" in (tmp_path / "report.md").read_text()
    for name in ("sweep", "report"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert {(pair.run.id, pair.run.measured.step_time) for pair in report.pairs} == {
        (one["id"], one["step_time_s"]["measured"]) for one in report.found["runs"]
    }


# ------------------------------------------------------------------------------------------------ results


def test_an_estimate_is_in_seconds_and_bytes(plans):
    one, said = plans[0].estimate, plans[0].file.prediction
    assert one.step_time == said.step_time_s
    assert one.memory == said.memory_peak_gib * GIB
    assert sum(one.time.values()) == pytest.approx(one.step_time, rel=1e-12)
    assert sum(one.memory_parts.values()) == pytest.approx(one.memory, rel=1e-12)
    assert one.memory_range[0] < one.memory < one.memory_range[1]
    assert one.memory < one.memory_limit
    assert one.tokens_per_second_per_gpu == pytest.approx(64 * 8192 / 8 / one.step_time)
    assert 0 < one.mfu < 1
    assert 0 <= one.out_of_memory_probability <= 0.05


def test_plans_are_a_sequence_best_first(plans):
    assert len(plans) == 3
    assert [one.estimate.step_time for one in plans] == sorted(one.estimate.step_time for one in plans)
    assert plans[-1] == plans[2] == list(plans)[2] == plans[1:][1]
    assert plans.why == plans[0].why
    assert "hardware" in {one.what for one in plans.assumed}
    assert plans.advice == ()
    with pytest.raises(IndexError):
        plans[3]


def test_nothing_fits_is_an_empty_result_that_says_what_would():
    found = planner.plan(model="llama-70b", gpus=4)
    assert not found
    assert list(found) == []
    assert re.match(r"nothing fits: the best attempt misses by \d+\.\d GiB; .* What would fit: 8 GPUs", found.why)
    assert found.advice[0].command == "plan --model llama-70b --gpus 8"
    assert "Nothing fits." in str(found)
    with pytest.raises(planner.PlannerError, match="nothing fits"):
        found[0]


@pytest.mark.proof
def test_advice_repeats_what_was_said():
    found = planner.plan(
        model="llama-70b", gpus=4, hardware="h100-sxm", network_bandwidth=50e9, sequence_parallel=False, tp=1
    )
    start = "--hardware h100-sxm --network-bandwidth '50000000000.0 B/s' --no-sequence-parallel --tp 1"
    assert all(start in one.command or "--hardware" in one.command for one in found.advice)
    assert any(start in one.command for one in found.advice)


def test_text_has_no_colours_and_html_is_escaped():
    hostile = Assumption("<script>alert(1)</script>[red]x[/red]", "v", "w", "--model")
    found = planner.plan(model="llama-8b", gpus=8, global_batch_size=64, top=1)
    resolved = dataclasses.replace(found.resolved, assumptions=(hostile,))
    first = dataclasses.replace(found.attempts[0].file, assumptions=(hostile,))
    found = dataclasses.replace(found, resolved=resolved, attempts=(Plan(first),))
    assert "\x1b" not in str(found) and "<script>alert(1)</script>[red]x[/red]" in "".join(str(found).split())
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html.replace("&#x27;", "'")
    for result in (found[0], planner.compare(found[0], planner.estimate(found[0], micro_batch_size=2))):
        assert "<script" not in result._repr_html_()
        assert "\x1b" not in repr(result)


def test_a_plan_is_saved_loaded_priced_again_and_exported(plans, tmp_path):
    plans[0].save(tmp_path / "plan.yaml")
    again = planner.load(tmp_path / "plan.yaml")
    assert again.file == plans[0].file
    assert planner.estimate(again).estimate.step_time == pytest.approx(again.estimate.step_time, rel=1e-9)
    assert planner.estimate(tmp_path / "plan.yaml", micro_batch_size=2).layout.micro_batch_size == 2
    (tmp_path / "layout.yaml").write_text("tp: 2\n")
    assert planner.estimate(tmp_path / "layout.yaml", **SMALL).layout.tp == 2
    trace = again.report(tmp_path / "step.trace.json")
    assert json.loads(trace) == json.loads((tmp_path / "step.trace.json").read_text())
    with pytest.raises(planner.PlannerError, match="the ending does not say"):
        again.report(tmp_path / "report.docx")
    with pytest.raises(planner.PlannerError, match="unknown format 'pdf'"):
        again.report(format="pdf")
    with pytest.raises(planner.PlannerError, match="which chart"):
        again.report(tmp_path / "memory.png")
    written = again.export("megatron", tmp_path / "run")
    assert re.match(r"check: (NOT CHECKED by megatron: |megatron reached ')", written.check())
    assert {"run.sh", "plan.yaml", "README.md"} <= set(written.files)
    assert all((tmp_path / "run" / name).is_file() for name in written.files)
    read = planner.import_config(tmp_path / "run" / "arguments.sh", hardware="h100-sxm")
    assert read.layout == again.layout
    assert "not searched" in read.why
    assert "Step time" in str(read)
    with pytest.raises(planner.PlannerError, match="is not empty"):
        again.export("megatron", tmp_path / "run")
    again.export("megatron", tmp_path / "run", force=True)
    with pytest.raises(planner.PlannerError, match="unknown launcher 'tmux'"):
        again.export("megatron", tmp_path / "other", launcher="tmux")


WRONG = [
    (lambda: planner.plan(model="lama-70b", gpus=8), "unknown model 'lama-70b'; known, nearest first: llama-70b"),
    (lambda: planner.plan(model="llama-8b", gpus="8"), "gpus is '8'; it must be a whole number"),
    (lambda: planner.plan(model="llama-8b", gpus=True), "gpus is True"),
    (lambda: planner.plan(model="llama-8b"), "--gpus, or --nodes, is missing"),
    (lambda: planner.plan(gpus=8), "--model is missing"),
    (lambda: planner.plan(model=8, gpus=8), "model is 8; it must be a text"),
    (lambda: planner.plan(**SMALL, top=0), "top is 0"),
    (lambda: planner.plan(**SMALL, tpp=2), r"plan\(\) takes no 'tpp'; nearest: tp, pp, etp"),
    (lambda: planner.plan(**SMALL, num_microbatches=2), r"plan\(\) takes no 'num_microbatches'"),
    (lambda: planner.plan(**SMALL, tp="2"), "tp is '2'"),
    (lambda: planner.plan(**SMALL, tp=3), "tp 3 does not divide 8 GPUs"),
    (lambda: planner.plan(**SMALL, recompute="ful"), "'ful'; it must be one of none, selective, full"),
    (lambda: planner.plan(**SMALL, recompute_modules=["mpl"]), "unknown module 'mpl'"),
    (lambda: planner.plan(**SMALL, network_bandwidth="400"), "has no unit"),
    (lambda: planner.plan(**SMALL, network_bandwidth=0.0), "must be above zero"),
    (lambda: planner.estimate(gpus=8), "which model?"),
    (lambda: planner.estimate("missing.yaml"), "missing.yaml"),
    (lambda: planner.load("missing.yaml"), "missing.yaml"),
    (lambda: planner.import_config("missing.sh"), "missing.sh"),
    (lambda: planner.import_config("missing.sh", tp=2), r"import_config\(\) takes no 'tp'"),
    (lambda: planner.show_profile("h10-sxm"), "unknown hardware 'h10-sxm'"),
    (lambda: planner.sensitivity(), "which job?"),
    (lambda: planner.sensitivity(ROOT / "plan.yaml", gpus=8), "and so does --gpus"),
    (lambda: planner.compare(), "two plans or more"),
    (lambda: planner.what_if(network="x2"), "which job?"),
    (lambda: planner.what_if(model="llama-8b", gpus=8), "nothing to change"),
    (
        lambda: planner.what_if(model="llama-8b", gpus=8, network="x2", sweep=True),
        "draws a sweep: give one flag several",
    ),
    (
        lambda: planner.calibrate([RUNS], hardware="h100-sxm", output="x.yaml", order="tp-cp-ep-dp-pp"),
        "takes no 'order'",
    ),
    (lambda: planner.calibrate([RUNS], hardware="h100-sxm", output="x.csv"), "a profile is a .yaml file"),
    (lambda: planner.calibrate([RUNS], hardware="h100-sxm", output="x.yaml", gpus="8"), "gpus is '8'"),
    (lambda: planner.what_if(model="llama-8b", gpus=8, networks="x2"), "nearest: network"),
    (lambda: planner.what_if(model="llama-8b", gpus=[8, 16], days="30"), "days is '30'; it must be a number"),
    (lambda: planner.what_if(model="llama-8b", gpus=8, compute=1.5), "write it like x1.5"),
    (lambda: planner.what_if(model="llama-8b", gpus=8, memory=[-1.0]), "must be finite and not negative"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_whatever_cannot_be_done_is_one_exception(call, sentence):
    with pytest.raises(planner.PlannerError, match=sentence):
        call()


# ------------------------------------------------------------------------------------------------ the package


def test_import_costs_next_to_nothing():
    code = (
        "import sys, planner\n"
        "assert not {'numpy', 'yaml', 'rich', 'click', 'planner.api'} & set(sys.modules)\n"
        "assert {'plan', 'estimate', 'PlannerError'} <= set(dir(planner))\n"
        "planner.plan, planner.Plan\n"
        "assert not {'rich', 'click', 'scipy', 'torch', 'planner.search'} & set(sys.modules)\n"
        "try:\n    planner.nothing\nexcept AttributeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "module 'planner' has no attribute 'nothing'"


def test_names_are_those_of_the_api_and_hide_no_module():
    assert planner.__all__ == api.__all__
    modules = {path.stem for path in (ROOT / "planner").iterdir()}
    assert not modules & set(planner.__all__), "a function of the package and a module cannot have one name"
    assert all(getattr(planner, name) is getattr(api, name) for name in planner.__all__)


def test_the_wheel_holds_the_package_and_its_data_and_no_more(monkeypatch):
    """Every folder of planner/ and of profiles/ is a package of the wheel, and every file of them is in it."""
    setuptools = pytest.importorskip("setuptools")
    said = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "planner").rglob("*.py")}
    data = {path.parent.relative_to(ROOT) for path in (ROOT / "profiles").rglob("*.yaml")}
    assert set(said["packages"]) == {".".join(one.parts) for one in folders} | set(said["package_dir"])
    assert said["package_dir"] == {".".join(("planner", *one.parts)): one.as_posix() for one in data}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    kinds = settings["tool"]["setuptools"]["package-data"]["*"]
    others = [path for path in (ROOT / "planner").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert not [path for path in others if not any(path.match(one) for one in kinds)]
    assert settings["project"]["scripts"] == {"plan": "planner.commands.start:start"}


# ------------------------------------------------------------------------------------------------ commands only parse and print

ALLOWED = (
    "planner.api", "planner.commands", "planner.errors", "planner.keywords", "planner.layout", "planner.library",
    "planner.model_names", "planner.terminal",
)  # fmt: skip
"""What a command may import, and all below it: the API, the names of flags and files, and what prints."""
DECLARED = ("planner.trainers", "planner.questions.report.show", "planner.questions.what_if.changes")
"""Modules, without what is below, that declare choices of flags."""
PREDICT = ("planner.advice", "planner.commands", "planner.cost", "planner.questions", "planner.search", "planner.space")
"""What predicts and searches: a command of planner.lab imports none of it."""


def imported(path):
    """Modules that a file imports, from planner only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "planner":
            yield from (f"planner.{one.name}" for one in node.names) if node.module == "planner" else (node.module,)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == "planner")


def below(name, rooms):
    return any(f"{name}.".startswith(f"{one}.") for one in rooms)


COMMAND_FILES = sorted({*(ROOT / "planner").rglob("command.py"), *(ROOT / "planner" / "commands").glob("*.py")})


@pytest.mark.parametrize("path", COMMAND_FILES, ids=lambda path: path.relative_to(ROOT / "planner").as_posix())
def test_a_command_parses_calls_the_api_and_prints(path):
    """``plan profile`` and ``plan validate`` start processes and measure, which is no call of the API: they run their own
    room, planner.lab, and what it stands on, but predict and search nothing themselves."""
    found = set(imported(path))
    if path.is_relative_to(ROOT / "planner" / "lab"):
        assert not {name for name in found if below(name, PREDICT)}
    else:
        assert not {name for name in found if not below(name, ALLOWED) and name not in DECLARED}


# ------------------------------------------------------------------------------------------------ the pages

PAGES = ("README.md", "docs/api.md")


@pytest.mark.parametrize("page", proofs_but(PAGES[:1], PAGES))
def test_examples_of_the_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # our own documentation


def test_the_page_names_the_whole_api():
    text = (ROOT / PAGES[1]).read_text(encoding="utf-8")
    assert not [name for name in planner.__all__ if f"`{name}" not in text]
    results = [one for one in map(vars(api).get, planner.__all__) if isinstance(one, type)]
    members = {name for one in results for name in (*vars(one), *one.__annotations__) if not name.startswith("_")}
    assert not {name for name in members - {"show", "with_traceback"} if not re.search(rf"`[^`]*\b{name}\b", text)}

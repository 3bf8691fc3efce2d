"""What the README and the documents tell a user to type works, and what they quote is what is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from planner.questions.accuracy.prediction import pairs_of
from planner.questions.accuracy.training_and_serving import serving_pairs, shipped_serving
from planner.runs import read_runs
from tools.update_readme import updated

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ONCE = ("plan accuracy",)
"""What reads nothing of a page and writes nothing is run for the README alone."""


def commands(page: Path) -> list[str]:
    """The lines of the shell blocks of a page that call plan, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("plan ")]


def test_readme_starts_with_the_two_commands():
    block = re.search(r"```sh\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    lines = [re.sub(r"\s+#.*", "", line) for line in block[1].splitlines()]
    assert lines == ["pip install . && plan --model llama-70b --gpus 8", "pip install '.[test]' && pytest -n auto"]
    assert PAGES[0].read_text(encoding="utf-8").index(block[0]) < 40


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[pytest.mark.proof] if page != PAGES[0] else []) for page in PAGES],
)
def test_commands_run(page, run, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line for line in commands(page) if page == PAGES[0] or line not in ONCE]
    assert lines or page != PAGES[0]
    if "plan accuracy" in lines:  # all published runs, as test_accuracy_gate.py has read and predicted them
        every_run, every_pair = (request.getfixturevalue(name) for name in ("every_run", "every_pair"))
        monkeypatch.setattr(
            "planner.questions.accuracy.training_and_serving.read_runs",
            lambda paths, generic: read_runs(paths, generic=generic) if paths or generic else every_run,
        )
        monkeypatch.setattr(
            "planner.questions.accuracy.training_and_serving.pairs_of",
            lambda runs: every_pair if runs is every_run else pairs_of(runs),
        )
        served = request.getfixturevalue("every_serving_pair")
        monkeypatch.setattr(
            "planner.questions.accuracy.training_and_serving.serving_pairs",
            lambda files: served if files == shipped_serving() else serving_pairs(files),
        )
    for line in lines:
        result = run(*shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
        assert result.output.strip(), line


def test_quoted_output_is_what_is_printed():
    text = PAGES[0].read_text(encoding="utf-8")
    assert "<!-- output of:" in text
    assert updated(text) == text, "run: python tools/update_readme.py"


def test_readme_quotes_the_accuracy_page():
    """The figures of its first section on accuracy, as the page has them now."""
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/accuracy.md"))
    said = " ".join(readme[readme.index("## How far to trust it") :].split())
    verdicts = re.compile(r"of ([\d,]+) runs that ran out of memory (\d+) were called safe, of ([\d,]+) that ran (\d+) impos")
    assert verdicts.search(said.lower())[0] == verdicts.search(" ".join(page.lower().split()))[0]
    table = page[: page.index("## Memory")]
    kinds = [
        re.search(rf"\| {kind} \| \d+ \| ([\d.]+ %)", table)[1]
        for kind in ("all", "pre-training", "fine-tuning", "own run")
    ]
    assert "{} as a mean over sources (pre-training {}, fine-tuning {}, users' own runs {})".format(*kinds) in said

"""The recipes of docs/extend.md, followed word by word in a copy of the checkout; and what notices that a step was forgotten."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS

from planner.cluster import Cluster
from planner.cost.estimate import Estimate, estimate
from planner.layout import MODULE_NAMES, Layout, Module, Recompute, module_mask
from planner.workload import OPTIMIZERS, PRECISIONS, Workload

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
PLACE = re.compile(r"# (?:file: (?P<file>\S+)|in (?P<path>\S+), (?P<how>after|instead of): (?P<line>.+))")
COMMAND = re.compile(r"\$ plan (.*?)(?:\s+# (says|fails): (.*))?")
DRIVER = """
import contextlib, io, json, sys
from planner.commands.main import main
answers = []
for words in json.load(sys.stdin):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(words, standalone_mode=True)
        except SystemExit as end:
            code = end.code
    answers.append((code, out.getvalue(), error.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One section of the page."""

    title: str
    edits: list[tuple[re.Match[str], str]] = field(default_factory=list)
    """Where a block goes, and its lines."""
    commands: list[tuple[str, str, str]] = field(default_factory=list)
    """Words of a command; 'says', 'fails' or nothing; and the text that it prints."""

    @property
    def files(self) -> set[str]:
        """Files of the checkout that it touches; a new folder of planner counts as one."""
        named = [where["file"] or where["path"] for where, _ in self.edits]
        new = {name.rpartition("/")[0] for name in named if name.startswith("planner/") and not (ROOT / name).exists()}
        kept = {name for name in named if "/" in name and name.rpartition("/")[0] not in new}
        return kept | new


def recipes() -> dict[str, Recipe]:
    """The sections with their blocks; every block is an edit or commands."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        recipe = Recipe(title=section.partition("\n")[0])
        for kind, text in BLOCK.findall(section):
            head, _, body = text.partition("\n")
            if kind == "console":
                for line in text.splitlines():
                    command = COMMAND.fullmatch(line)
                    assert command, line
                    recipe.commands.append((command[1], command[2] or "", command[3] or ""))
            else:
                where = PLACE.fullmatch(head)
                assert where, f"{recipe.title}: a block does not say where it goes: {head}"
                recipe.edits.append((where, body))
        found[recipe.title] = recipe
    return found


RECIPES = recipes()
MOST = {"A GPU": 1, "A model": 1, "A trainer": 2, "A version or an option": 1, "An export target": 1,
        "A recompute module": 4, "An optimizer": 2}
"""Files of the checkout that each recipe may touch; a folder is one."""


def apply(recipe: Recipe, root: Path) -> None:
    """Write the blocks of a recipe below a folder."""
    for where, body in recipe.edits:
        path = root / (where["file"] or where["path"])
        if where["file"]:
            assert not path.exists(), f"{path} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        hits = [number for number, line in enumerate(lines) if where["line"] in line]
        assert len(hits) == 1, f"{where['path']}: {len(hits)} lines have '{where['line']}'"
        lines[hits[0] : hits[0] + 1] = [*([lines[hits[0]]] if where["how"] == "after" else []), body]
        path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with all recipes in it: they do not disturb each other."""
    copy = tmp_path_factory.mktemp("extend")
    shutil.copytree(ROOT / "planner", copy / "planner")
    shutil.copytree(ROOT / "profiles", copy / "profiles", ignore=shutil.ignore_patterns("runs"))
    for recipe in RECIPES.values():
        apply(recipe, copy)
    return copy


def answers(recipe: Recipe, checkout: Path, folder: Path) -> list[Any]:
    """What the commands print, JSON read, all of them in one process."""
    for where, _ in recipe.edits:
        if where["file"] and "/" not in where["file"]:
            shutil.copy(checkout / where["file"], folder)
    words = [line.split() for line, _, _ in recipe.commands]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(words), capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[Any] = []
    for (code, text, error), (line, how, wanted) in zip(json.loads(done.stdout), recipe.commands, strict=True):
        assert bool(code) == (how == "fails"), f"plan {line}: {error}"
        says = wanted in " ".join(f"{text} {error}".split())
        assert says, f"plan {line} does not say '{wanted}': {text} {error}"
        found.append(json.loads(text) if "--json" in line and not code else text)
    return found


def test_the_page_has_every_recipe() -> None:
    assert list(RECIPES) == list(MOST)


@pytest.mark.parametrize("title", MOST)
def test_a_recipe_touches_few_files(title: str) -> None:
    assert len(RECIPES[title].files) <= MOST[title], sorted(RECIPES[title].files)


def test_the_guards_that_the_page_names_exist() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and not {name for name in named if f"def {name}(" not in tests}


# ------------------------------------------------------------------------------------------------ the recipes


@pytest.mark.proof
@pytest.mark.parametrize("title", ["A GPU", "A model", "An export target"])
def test_the_answer_shows_it(title: str, checkout: Path, tmp_path: Path) -> None:
    answers(RECIPES[title], checkout, tmp_path)
    if title == "An export target":
        assert "optimizer: AdamW" in (tmp_path / "run" / "mylauncher.yaml").read_text()
        assert "-- mylauncher" in (tmp_path / "run" / "run.sh").read_text()


def test_a_trainer_has_its_own_terms(checkout: Path, tmp_path: Path) -> None:
    before, after, *_ = answers(RECIPES["A trainer"], checkout, tmp_path)
    then, now = before["estimate"]["time_s"], after["estimate"]["time_s"]
    assert now["overhead"] >= then["overhead"] + 0.2
    assert now["optimizer"] > 1.2 * then["optimizer"]
    assert now["compute"] == pytest.approx(then["compute"], rel=0.01)


def test_a_recompute_module_frees_memory_for_time(checkout: Path, tmp_path: Path) -> None:
    before, after, _ = answers(RECIPES["A recompute module"], checkout, tmp_path)
    assert after["estimate"]["memory_gib"]["activations"] < before["estimate"]["memory_gib"]["activations"]
    assert after["estimate"]["time_s"]["recompute"] > before["estimate"]["time_s"]["recompute"]
    assert re.search(r"recompute-modules\W+qkv", (tmp_path / "run" / "arguments.sh").read_text())


@pytest.mark.proof
def test_an_optimizer_has_its_bytes(checkout: Path, tmp_path: Path) -> None:
    before, after, _ = answers(RECIPES["An optimizer"], checkout, tmp_path)
    states = [one["estimate"]["memory_gib"]["optimizer_states"] for one in (before, after)]
    assert states[1] == pytest.approx(states[0] * 8 / 12)
    assert after["estimate"]["time_s"]["optimizer"] < before["estimate"]["time_s"]["optimizer"]


# ------------------------------------------------------------------------------------------------ what notices a forgotten step

KINDS = ("gqa", "moe", "mla")
"""Dense; with experts; with latent attention, experts and a shared one."""


@cache
def with_modules(model: str, trainer: str, mask: int) -> Estimate:
    """One GPU, everything kept but these modules."""
    facts = TRAINERS[trainer]
    precision = "bf16" if "bf16" in facts.legal.precisions else facts.legal.precisions[0]
    work = Workload(model=MODELS[model], sequence_length=2048, global_batch_size=8, precision=precision)
    layout = Layout(
        num_microbatches=8, recompute=int(Recompute.SELECTIVE if mask else Recompute.NONE), recompute_modules=mask
    )
    return estimate(work, Cluster(hardware=HARDWARE["h100-sxm"], num_gpus=1), facts, layout)


@cache
def gained(trainer: str, module: str) -> tuple[float, float]:
    """The most bytes of activations that a module frees, and the most seconds that it costs, of models of KINDS."""
    freed, repeated = [], []
    for model in KINDS:
        without, with_it = (with_modules(model, trainer, mask) for mask in (0, module_mask([module])))
        freed.append(float(np.max(without.memory["activations"] - with_it.memory["activations"])))
        repeated.append(float(np.max(with_it.time["recompute"] - without.time["recompute"])))
    return max(freed), max(repeated)


NAMING = {
    module: [name for name, facts in TRAINERS.items() if module in facts.legal.recompute_modules]
    for module in MODULE_NAMES.values()
}


@pytest.mark.parametrize("module", NAMING)
def test_every_module_frees_bytes(module: str) -> None:
    assert NAMING[module], f"no trainer names {module}"
    assert any(gained(trainer, module)[0] > 0 for trainer in NAMING[module]), f"{module} frees nothing of any model"


@pytest.mark.parametrize("module", NAMING)
def test_every_module_is_carried_by_operators(module: str) -> None:
    for trainer in NAMING[module]:
        assert gained(trainer, module)[1] > 0, f"{trainer}.yaml names {module}, and no operator of any model carries it"


def test_a_module_that_no_operator_carries_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULE_NAMES, Module(2 * max(Module)), "made_up")
    assert gained("megatron", "made_up") == (0.0, 0.0)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_name_what_exists(name: str) -> None:
    facts = TRAINERS[name]
    assert set(facts.optimizers) <= set(OPTIMIZERS)
    assert set(facts.legal.precisions) <= set(PRECISIONS)
    assert set(facts.kernels.casts) <= set(PRECISIONS)

"""Targets that the search alone does not reach widely: plans made by hand, read by the trainers' own code.

One process per trainer: its import takes most of the time. Where a package is missing, the test says NOT CHECKED.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.layout import Layout, Module
from planner.model import load_model
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.target import LEVELS, ExportJob
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainer_samples import plan_of

SECOND = int(Module.EVERY_SECOND_MATMUL)


def job(trainer: str, model: str = "llama-3.1-8b", work: Any = None, **layout: int) -> ExportJob:
    """A job of 8 GPUs and 16 microbatches unless told otherwise, without a search."""
    fields = {"dp": 8, "num_microbatches": 16, **layout}
    return ExportJob.of(plan_of(trainer, Layout(**fields), model=load_model(model), **(work or {})))


@dataclass(frozen=True)
class Cases:
    """What one target is given."""

    package: str
    """What must be importable."""
    jobs: tuple[tuple[Any, ...], ...]
    """Trainer, model, workload, layout."""
    wrong: tuple[tuple[str, str, str], ...]
    """File of the first job's folder, an expression that stands in it, and what replaces it: refused then."""
    level: str = ""
    """Level that all reach; default the target's."""


LLAMA, QWEN_MOE = "llama-3.1-8b", "qwen3-30b-a3b"
CASES = {
    "automodel": Cases(
        "nemo_automodel",
        (
            ("automodel", LLAMA, {}, {"zero": 3}),
            ("automodel", LLAMA, {}, {"zero": 2, "tp": 2, "dp": 4, "sequence_parallel": 1, "recompute": 2}),
            ("automodel", LLAMA, {}, {"zero": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 4}),
            ("automodel", LLAMA, {}, {"zero": 3, "cp": 2, "dp": 4, "recompute": 1, "recompute_modules": SECOND}),
            ("automodel", QWEN_MOE, {}, {"zero": 3, "ep": 8, "cp": 2, "dp": 4}),
            ("automodel", QWEN_MOE, {}, {"zero": 2, "ep": 4, "pp": 2, "dp": 4}),
            ("automodel", LLAMA, {}, {"zero": 3, "dp_shard": 4}),
            ("automodel", LLAMA, {"lora_rank": 16}, {"zero": 3}),
            ("automodel", "gpt-oss-20b", {}, {"zero": 3, "ep": 8}),
            ("automodel", "qwen2.5-7b", {"precision": "fp8"}, {"zero": 3}),
        ),
        (
            ("automodel.yaml", "global_batch_size: 128", "global_batch_size: 256"),
            ("automodel.yaml", "reshard_after_forward: true", "reshard_after_forward: false"),
            ("automodel.yaml", "distributed:", "distribute:"),
            ("automodel.yaml", "tp_size: 1", "tp_sizes: 1"),
            ("automodel-smoke.yaml", "tp_size: 1", "tp_size: 2"),
            ("automodel-smoke.yaml", "seq_len", "seqlen"),
            ("model/config.json", '"num_hidden_layers": 32', '"num_hidden_layers": 31'),
        ),
        "model built",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_plan_is_accepted_and_what_is_wrong_is_not(name: str, tmp_path: Path) -> None:
    cases = CASES[name]
    if importlib.util.find_spec(cases.package) is None:
        pytest.skip(f"NOT CHECKED: {cases.package} is not installed here")
    target = load_target(name)
    jobs = [job(trainer, model, work, **layout) for trainer, model, work, layout in cases.jobs]
    assert not [one for each in jobs for one in target.refusals(each)]
    pairs = []
    for number, each in enumerate([*jobs, *[jobs[0]] * len(cases.wrong)]):
        write_bundle(make_bundle(target, each, "torchrun"), tmp_path / str(number))
        pairs.append((each, tmp_path / str(number)))
    for (_, folder), (file, old, new) in zip(pairs[len(jobs) :], cases.wrong, strict=True):
        text = (folder / file).read_text()
        assert re.search(old, text), (file, old)
        (folder / file).write_text(re.sub(old, new, text))
    results = check_many(name, pairs, deep=True)
    if all(not one.level and not one.problem and one.missing for one in results):  # a package that it needs
        pytest.skip(results[0].text())
    least = LEVELS.index(cases.level or target.level)
    said = [f"{case}: {one.text()}" for one, case in zip(results, cases.jobs, strict=False)
            if one.problem or LEVELS.index(one.level or LEVELS[0]) < least]  # fmt: skip
    assert not said
    for one, wrong in zip(results[len(jobs) :], cases.wrong, strict=True):
        assert one.problem, (wrong, one.text())

"""LLaMA-Factory, axolotl, verl and MaxText: their own parsers and validators on plans that they take.

Each pins its own transformers (MaxText needs JAX); they run with the versions of the common environment. Where a package is
missing, the test says NOT CHECKED and does not pass.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.target import LEVELS, ExportJob
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainers.plans import jobs

PACKAGES = {"llama-factory": "llamafactory", "axolotl": "axolotl", "verl": "verl", "maxtext": "maxtext"}
MOST = {"maxtext": 256}
"""GPUs of the largest plan that is checked: JAX starts anew for every number of devices."""


def cases_of(name: str) -> list[ExportJob]:
    """Plans of the set that a target takes, thinned to about 24."""
    target = load_target(name)
    cases = [job for job in jobs() if job.plan.trainer in target.trainers and not target.refusals(job)]
    kept = [job for job in cases if job.cluster.num_gpus <= MOST.get(name, 2**20)]
    return kept[:: max(1, len(kept) // 24)]


WRONG: dict[str, tuple[tuple[str, str, str], ...]] = {
    "llama-factory": (("llama_factory.yaml", "cutoff_len:", "cutoff_length:"),),
    "axolotl": (("axolotl.yaml", "sequence_len:", "sequence_length:"),),
    "verl": (
        ("overrides.txt", "tensor_model_parallel_size=", "tensor_parallel_size="),
        ("overrides.txt", r"data\.train_batch_size=\d+", "data.train_batch_size=1009"),
    ),
    "maxtext": (
        ("maxtext.yml", "max_target_length:", "max_length:"),
        ("maxtext.yml", "gradient_accumulation_steps: ", "gradient_accumulation_steps: 1"),
    ),
}
"""File of an export, what is replaced in it, by what: a key that does not exist, a batch that does not fit."""


@pytest.mark.parametrize("name", PACKAGES)
def test_every_plan_is_accepted_and_what_is_wrong_is_not(name: str, tmp_path: Path) -> None:
    """One process: its import takes most of the time."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"NOT CHECKED: {PACKAGES[name]} is not installed here")
    target, cases = load_target(name), cases_of(name)
    assert len(cases) >= 8
    pairs = []
    for number, job in enumerate([*cases, *[cases[0]] * len(WRONG[name])]):
        write_bundle(make_bundle(target, job, "torchrun"), tmp_path / str(number))
        pairs.append((job, tmp_path / str(number)))
    for (_, folder), (file, old, new) in zip(pairs[len(cases) :], WRONG[name], strict=True):
        text = (folder / file).read_text()
        assert re.search(old, text)
        (folder / file).write_text(re.sub(old, new, text))
    results = check_many(name, pairs)
    if all(not one.level and not one.problem and one.missing for one in results):  # a package that it needs
        pytest.skip(results[0].text())
    said = [f"{job.model.name} on {job.cluster.num_gpus}: {one.text()}" for one, job in zip(results, cases, strict=False)
            if one.problem or LEVELS.index(one.level or LEVELS[0]) < LEVELS.index(target.level)]  # fmt: skip
    assert not said
    for one, wrong in zip(results[len(cases) :], WRONG[name], strict=True):
        assert one.problem, (wrong, one.text())

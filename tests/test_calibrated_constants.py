"""The list of constants that were calibrated on published runs: read, checked, changed on runs, fitted again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from planner import library
from planner.cost.price.compute import straggling
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.questions.accuracy.prediction import predict
from planner.runs import Run, read_runs
from planner.trainer import load_trainer
from tools.evidence.constants import Constant, _constant, applies, constants, in_modules, predict_with, with_constants
from tools.evidence.refit import refit

LISTED = constants()
NAMED = {one.name: one for one in LISTED}
HOPPER = next(one for one in LISTED if one.key == "sustained_clock" and "Hopper" in one.arch)
FRAMEWORK = next(one for one in LISTED if one.key == "network_share")
OF_MODULES = [one for one in LISTED if one.of_module]
SPREAD_FILE = next(one.file for one in OF_MODULES if one.key == "RATE_SPREAD")
TRITON = next(one for one in LISTED if one.key == "kernels.slowdown.triton.forward" and "Ampere" in one.arch)
RINGS, TREES = (next(one for one in LISTED if one.key == key) for key in ("ring_latency", "tree_latency"))


@cache
def runs_of_one(source: str) -> list[Run]:
    return read_runs([library.profiles_directory() / "runs" / f"{source}.yaml"])


def runs_of(*sources: str) -> list[Run]:
    return [run for source in sources for run in runs_of_one(source)]


@pytest.fixture(scope="module")
def llama() -> list[Run]:
    return runs_of("nv-dgxc-25.04-llama31-h100")


@pytest.mark.parametrize("one", LISTED, ids=lambda one: one.name)
def test_each_constant_has_runs_and_moves_them(one: Constant) -> None:
    """Its runs are there, and changing it changes what is predicted for them: the list is not out of date."""
    runs = one.evidence(runs_of(*one.sources))
    runs = runs[:: max(len(runs) // (40 if one.fits == "running out" else 4), 1)]
    assert runs, f"no run of {one.sources} is meant"
    value = math.sqrt(one.low * one.high) if one.value != math.sqrt(one.low * one.high) else one.high
    before, after = predict(runs), predict_with(runs, LISTED, {one.name: value})
    field = {"memory": "memory", "running out": "out_of_memory"}.get(one.fits, "step_time")
    assert any(getattr(a, field) != getattr(b, field) for a, b in zip(before, after, strict=True) if not a.refused)
    assert predict(runs) == before, "the number is what it was"


def test_unchanged_values_leave_the_runs_alone(llama: list[Run]) -> None:
    same = with_constants(llama, LISTED, {one.name: one.value for one in LISTED})
    assert all(a is b for a, b in zip(llama, same, strict=True))


def test_a_constant_moves_only_what_it_stands_in(llama: list[Run]) -> None:
    moved = with_constants(llama, LISTED, {FRAMEWORK.name: FRAMEWORK.high})
    assert all(a is b for a, b in zip(llama, moved, strict=True))
    faster = with_constants(llama, LISTED, {HOPPER.name: HOPPER.value * 1.1})
    clocks = [
        (a.cluster.hardware.sustained_clock, b.cluster.hardware.sustained_clock)
        for a, b in zip(llama, faster, strict=True) if a.cluster and b.cluster
    ]  # fmt: skip
    assert clocks and all(b == pytest.approx(1.1 * a) for a, b in clocks)
    pairs = [{(id(run.cluster.hardware), id(run.trainer)) for run in some if run.cluster} for some in (llama, faster)]
    assert len(pairs[0]) == len(pairs[1]), "runs that shared their hardware and trainer still do"


def test_trainers_that_inherit_a_constant_follow_it() -> None:
    hardware = load_hardware("a100-sxm-80gb")
    core = next(one for one in LISTED if one.file == "trainers/megatron.yaml" and one.key == "host_time")
    for heir in ("megatron", "megatron-2021", "megatron-deepspeed"):
        assert applies(core, hardware, load_trainer(heir))
    assert not applies(core, hardware, load_trainer("nanotron"))
    assert not applies(core, hardware, load_trainer("megatron-2021").replace(host_time=1e-6)), "overridden"
    (run,) = runs_of(FRAMEWORK.sources[0])[:1]
    assert run.cluster and run.trainer and applies(FRAMEWORK, run.cluster.hardware, run.trainer)
    assert not applies(FRAMEWORK, hardware, run.trainer), "the network of one framework's cluster is its own"


def test_latency_of_a_framework_stretches_its_network() -> None:
    runs = [run for run in runs_of("oss-ultrascale-nanotron-1p34b") if not run.unsupported][:1]
    for mine, other, moved, kept in (
        (RINGS, TREES, "all_gather", "all_reduce"),
        (TREES, RINGS, "all_reduce", "all_gather"),
    ):
        (slow,) = with_constants(runs, LISTED, {mine.name: 2 * mine.value})
        before, after = runs[0].cluster, slow.cluster
        assert before and after and applies(other, after.hardware, load_trainer("nanotron"))
        assert not applies(mine, after.hardware, load_trainer("nanotron")), "no longer as it is shipped"
        assert after.collective_time(moved, 1e3, 16, 1) > 1.5 * before.collective_time(moved, 1e3, 16, 1)
        assert after.collective_time(kept, 1e3, 16, 1) == before.collective_time(kept, 1e3, 16, 1)


def test_without_the_only_source_the_default_stands() -> None:
    (source,) = TRITON.sources
    found = refit(LISTED, runs_of(source), without=[source])
    assert found[TRITON.name].value == TRITON.default and found[TRITON.name].reason == "default"
    assert found[HOPPER.name].value == HOPPER.value and found[HOPPER.name].reason == "shipped"
    assert list(found) == [one.name for one in LISTED]


def test_a_known_value_is_found_again(llama: list[Run]) -> None:
    """Runs made by the model itself with another clock: the fit finds that clock, from its prior at the default."""
    truth = 0.71
    made = predict(with_constants(llama, LISTED, {HOPPER.name: truth}))
    runs = [
        dataclasses.replace(run, measured=dataclasses.replace(run.measured, step_time=one.step_time))
        for run, one in zip(llama, made, strict=True)
    ]
    found = refit([HOPPER], runs)[HOPPER.name]
    assert found.value == pytest.approx(truth, rel=0.02)
    assert found.low < truth < found.high and found.reason == "fitted" and found.runs == 5


def test_other_runs_stand_in_for_the_source_that_is_left_out() -> None:
    also = [one.source for one in HOPPER.also]
    runs = runs_of(*HOPPER.sources, *also)
    found = refit([HOPPER], runs, without=HOPPER.sources[:1])[HOPPER.name]
    assert found.reason == "fitted" and found.runs > 0
    assert abs(math.log(found.value / HOPPER.value)) < 0.1


def test_numbers_of_the_cost_model_stand_in_the_list() -> None:
    """Value in the file = value in the module; a changed one lasts as long as its block, also when that fails."""
    keys = {one.key for one in OF_MODULES}
    assert keys == {"RATE_SPREAD", "MISALIGNED_EFFICIENCY", "GATHERED_LOGITS", "GIVEN_BACK", "HELD_GIVEN_BACK"}
    spread = next(one for one in OF_MODULES if one.key == "RATE_SPREAD")
    alone = float(straggling(1024))
    with pytest.raises(ZeroDivisionError), in_modules(LISTED, {spread.name: 2 * spread.value}):
        assert float(straggling(1024)) == pytest.approx(2 * alone)
        raise ZeroDivisionError
    assert float(straggling(1024)) == alone


def test_a_known_spread_is_found_from_differences_alone(llama: list[Run]) -> None:
    """Runs made with a spread of 0.05 and slower by half throughout: the level of a series does not count."""
    spread = next(one for one in OF_MODULES if one.key == "RATE_SPREAD")
    made = predict_with(llama, LISTED, {spread.name: 0.05})
    runs = [
        dataclasses.replace(run, measured=dataclasses.replace(run.measured, step_time=1.5 * (one.step_time or 1.0)))
        for run, one in zip(llama, made, strict=True)
    ]
    found = refit([spread], runs)[spread.name]
    assert found.value == pytest.approx(0.05, rel=0.05) and found.low < 0.05 < found.high


def priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of the same runs with and without a source begin at the same values: a run is priced once at each."""
    kept: dict[Any, Any] = {}

    def priced(runs: Sequence[Run], listed: Iterable[Constant], values: Mapping[str, float]) -> list[Any]:
        at = tuple(sorted(values.items()))
        new = [run for run in runs if (id(run), at) not in kept]
        kept.update(zip([(id(run), at) for run in new], predict_with(new, listed, values), strict=True))
        return [kept[id(run), at] for run in runs]

    monkeypatch.setattr("tools.evidence.refit.predict_with", priced)


@pytest.mark.proof
@pytest.mark.parametrize("one", OF_MODULES, ids=lambda one: one.key)
def test_numbers_of_the_cost_model_do_not_hang_on_one_source(one: Constant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted again on all its runs, its interval holds the shipped value; without any one source the interval overlaps that one."""
    runs = runs_of(*one.sources)
    priced_once(monkeypatch)
    whole = refit([one], runs)[one.name]
    assert whole.low <= one.value <= whole.high, whole
    for source in one.sources:
        found = refit([one], runs, without=[source])[one.name]
        assert max(found.low, whole.low) <= min(found.high, whole.high), (source, found, whole)


def entry(**changes: Any) -> dict[str, Any]:
    good = {
        "name": "x", "file": "trainers/nanotron.yaml", "key": "host_time", "default": "28 us", "why": "measured",
        "range": ["3 us", "300 us"], "fits": "time", "runs": [{"source": "nv-moe-folding-table4"}],
    }  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"file": "trainers/nothing.yaml"}, "no file profiles/trainers/nothing.yaml"),
        ({"key": "host_times"}, "has no key 'host_times'"),
        ({"runs": [{"source": "my-paper"}]}, "no source 'my-paper'"),
        ({"runs": [{"id": "x"}]}, "needs a source"),
        ({"range": ["30 us", "40 us"]}, "must lie in the range"),
        ({"range": 3}, "smallest and the largest"),
        ({"fits": "money"}, "fits is 'money'"),
        ({"default": "28"}, "has no unit"),
        ({"file": "hardware/h100-sxm.yaml", "key": "sustained_clock"}, "needs arch"),
        ({"file": "runs/nv-sc21-table1.yaml", "entry": "none such"}, "must be the trainer that ran there"),
        ({"file": "planner/cost/nothing.py"}, "has no number host_time"),
        ({"file": SPREAD_FILE, "key": "RATE_SPREAD"}, "needs value and unit"),
        ({"file": SPREAD_FILE, "key": "RATE_SPREAD", "value": 0.5, "unit": "x"}, "the value is 0.5, but"),
        ({"more": 1}, "needs the keys"),
    ],
)
def test_a_wrong_entry_gets_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        _constant(entry(**changes), "calibrated.yaml: entry 1")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [({"constants": 3}, "one list"), ({"constants": [entry(), entry()]}, "'x' is given twice")],
)
def test_a_wrong_list_gets_a_sentence(data, sentence, monkeypatch) -> None:
    read = library.read_yaml
    monkeypatch.setattr(library, "read_yaml", lambda path: data if path.name == "calibrated.yaml" else read(path))
    with pytest.raises(PlannerError, match=sentence):
        constants()

"""What the search leaves out, or keeps from the search before, changes no plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import job, tight

from planner import memory_attempts
from planner import search as searching
from planner.defaults import Request, resolve
from planner.layout import alike, repeated
from planner.priced_layouts import SearchedJob
from planner.rules import Job, allowed
from planner.search import Pins, search
from planner.space import base_layouts


@pytest.mark.parametrize(
    ("model", "hardware", "gpus"),
    [("llama-8b", "l4", 6144), ("llama-8b", "l40s", 192), ("llama-8b", "h100-sxm", 8)],
)
def test_a_job_that_cannot_be_fast_enough_is_not_searched_and_no_other_is_lost(
    model: str, hardware: str, gpus: int
) -> None:
    """Uneven splits and the timeline make the best plan faster than any even layout: the bound leaves room for them."""
    one = resolve(Request(model=model, hardware=hardware, num_gpus=gpus)).job
    best = float(search(one, top=1).estimates[0].step_time[0])
    same = search(one, top=1, within=best)
    assert same.too_slow is None and float(same.estimates[0].step_time[0]) == best
    free = search(one, top=1, within=0.0)
    assert not free.layouts and free.too_slow is not None and free.too_slow < best
    assert search(one, top=1, within=0.999 * free.too_slow).too_slow == free.too_slow


def test_only_fitting_does_not_price_what_is_too_large_for_any_option() -> None:
    """Closest attempts differ, plans do not: what is skipped needs more for weights and gradients alone than the card has."""
    one = job("moe", "megatron", gpus=2, batch=2)
    least = float(search(tight(one, 1.0), top=1).estimates[0].memory_needed[0])
    for memory in (0.5 * least, 1.2 * least, 2 * least):
        narrow = tight(one, memory)
        every, quick = search(narrow, top=1), search(narrow, top=1, only_fitting=True)
        assert quick.fit == every.fit and (not every.fit or quick.layouts == every.layouts) and quick.priced <= every.priced
    assert search(tight(one, 1.0), only_fitting=True).priced < search(tight(one, 1.0)).priced


def test_what_can_fit_is_worked_out_once_for_a_job_and_of_the_job_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search, its bounds and the closest attempts ask for it; where nothing can fit the first prices nothing."""
    one, counted, kept = job("moe", "megatron", gpus=2, batch=2), [0], memory_attempts._kept

    def count(*given: Any) -> Any:
        counted[0] += 1
        return kept(*given)

    monkeypatch.setattr(memory_attempts, "_kept", count)
    for memory, fits in ((1.0, False), (one.cluster.hardware.usable_memory, True), (1.0, False)):
        asked, counted[0] = SearchedJob.of(tight(one, memory)), 0
        searching.least_fitting_step(asked)
        found = search(asked, top=1, only_fitting=True)
        assert found.fit == fits and (fits or (found.priced == 0 and found.searched > 0))
        if not fits:
            nearest, every = searching.closest(asked, None, 1, found), search(tight(one, memory), top=1)
            assert nearest.layouts == every.layouts and not nearest.fit
        assert counted[0] == 1


def test_columns_of_one_value_are_those_of_numpy() -> None:
    for column in (np.array([7, 8], dtype=np.int64), np.broadcast_to(np.int64(3), 5)):
        ours, theirs = repeated(column, 9), np.broadcast_to(column[:1], 9)
        assert np.array_equal(ours, theirs) and ours.strides == theirs.strides and ours.dtype == theirs.dtype
        assert alike(ours) and len(repeated(column, 0)) == 0
    assert alike(4) and alike(np.array(4)) and not alike(np.array([4]))


@pytest.mark.proof
def test_waves_find_what_all_at_once_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory options from the fastest layouts on, until nothing can gain: the same plans, of fewer priced layouts."""
    one, fewer = job("moe", "megatron", gpus=16, batch=64), 0
    for share in (0.1, 0.05, 0.025):
        narrow = tight(one, one.cluster.hardware.usable_memory * share)
        monkeypatch.setattr(memory_attempts, "WAVE", 1 << 30)
        every = search(narrow)
        monkeypatch.setattr(memory_attempts, "WAVE", 16)
        waves, quick = search(narrow), search(narrow, only_fitting=True)
        assert waves.layouts == every.layouts and waves.fit == every.fit == quick.fit and waves.unlimited == every.unlimited
        assert waves.priced <= every.priced and (not every.fit or quick.layouts == every.layouts)
        fewer += every.fit and waves.priced < every.priced
    assert fewer


def test_finalists_that_cannot_be_among_the_best_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is at least what ``Walks.least`` says, and the plans are those of walking all of them."""
    walked: list[int] = []
    exact = searching.Walks.exact

    def counted(self: Any, row: int) -> Any:
        walked.append(row)
        found = exact(self, row)
        assert self.least(row) <= float(found.step_time[0]) * (1 + 1e-12)
        return found

    monkeypatch.setattr(searching.Walks, "exact", counted)
    one = resolve(Request(model="llama-70b", num_gpus=64, hardware="h100-sxm")).job
    few = search(one, top=1)
    some = len(walked)
    monkeypatch.setattr(searching.Walks, "least", lambda self, row: 0.0)
    walked.clear()
    every = search(one, top=1)
    assert some < len(walked) and every.layouts == few.layouts and every.runner_up == few.runner_up


def test_one_space_for_all_kinds_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules do not ask for the hardware, so that a job on other cards has the same legal layouts; another job has its own."""

    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a rule asks for {name} of the hardware")

    one = job("moe", "megatron", gpus=8, batch=32)
    unknown = dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=Untouched()))
    layouts = base_layouts(one, Pins())
    assert np.array_equal(allowed(unknown, layouts), allowed(one, layouts))
    asked: list[Job] = []
    monkeypatch.setattr(searching, "base_layouts", lambda job, pins: asked.append(job) or base_layouts(job, pins))
    monkeypatch.setattr(searching, "_LAST", [])
    for name in ("h100-sxm", "l40s", "a100-sxm-80gb"):
        search(job("moe", "megatron", gpus=8, batch=32, hardware=name))
    assert len(asked) == 1
    search(job("moe", "megatron", gpus=8, batch=16))
    search(one, Pins(values={"tp": 2}))
    assert len(asked) == 3

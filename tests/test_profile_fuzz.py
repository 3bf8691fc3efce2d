"""Hardware files and journals that somebody has edited: they are read, or refused in one sentence; never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import HARDWARE
from test_hardware_diff import run_of
from test_profiler_fits import journal_of

from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.lab.profile import profile_file as assemble
from planner.lab.profile.journal import Journal
from planner.lab.profile.points import Settings
from planner.questions.hardware.diff import differences
from planner.questions.hardware.numbers import shown_profile

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6))
ANYTHING = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=4), SCALARS, max_size=2), st.just("1 2 3")
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of nested data; of a list only the first two."""
    if path:
        yield path
    if isinstance(data, dict):
        for key, value in data.items():
            yield from places(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data[:2]):
            yield from places(value, (*path, number))


def changed(data: Any, path: tuple[Any, ...], value: Any, remove: bool) -> Any:
    found = copy.deepcopy(data)
    here = found
    for key in path[:-1]:
        here = here[key]
    if remove:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return found


def measured_file() -> dict[str, Any]:
    measurements, provenance = run_of(1)
    row = {
        "op": "all_reduce",
        "n": 2,
        "stride": 1,
        "nodes": 1,
        "dtype": "fp32",
        "sizes": "1024",
        "us": "9",
        "low_us": "8",
    }
    row |= {"high_us": "10", "outliers": "0", "latency": "9 us", "latency_percent": 3.0, "confidence": 0.95, "fits": []}
    row |= {"algorithm_bandwidth": "1 GB/s", "bus_bandwidth": "1 GB/s", "bandwidth_percent": 3.0}
    beside = {
        "op": "all_reduce",
        "of": "gemm",
        "n": 2,
        "stride": 1,
        "nodes": 1,
        "size": 9,
        "dtype": "fp32",
        "slowdown": 1.2,
    }
    measurements = {"gemm": measurements["gemm"][:2], "collective": [row], "overlap": [beside]}
    measurements["bytes"] = [{"name": "allocator_rounding", "bytes": 512.0}]
    own = {"measurements": measurements, "provenance": provenance, "unverified": [], "notes": ["one"]}
    return HARDWARE["h100-sxm"].to_dict() | own | {"overlap": {"inside": {"compute": 1.1, "communication": 1.2}}}


FILE = measured_file()
WHOLE = HardwareProfile.from_dict(FILE, where="mine")
SMALL = [path for path in places(FILE) if path[0] in ("measurements", "provenance", "overlap", "measured", "scale_up")]
PLACES = [path for path in places(FILE) if len(path) <= 3]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.sampled_from(SMALL), st.sampled_from(PLACES)), ANYTHING, st.integers(0, 4))
def test_an_edited_hardware_file_is_read_or_refused(path: tuple[Any, ...], value: Any, remove: int) -> None:
    data = changed(FILE, path, value, remove=remove == 0)
    try:
        profile = HardwareProfile.from_dict(data, where="mine.yaml")
        json.dumps(shown_profile(profile))
        differences(profile, WHOLE)
    except PlannerError as error:
        assert "\n" not in str(error), error


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Any, list[tuple[Any, ...]]]:
    wanted = Settings(output=str(tmp_path_factory.mktemp("fuzz") / "mine.yaml"), device="cuda", budget=60.0)
    kept = journal_of(wanted.journal, 2, 2, "cuda")
    kept.fail(next(iter(kept.of())).point, "left out")
    kept.write()
    data = json.loads(wanted.journal.read_text())
    return wanted, data, [path for path in places(data) if path != ("measured",)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=ANYTHING, remove=st.integers(0, 4))
def test_an_edited_journal_goes_on_or_is_refused(journal: Any, data: Any, value: Any, remove: int) -> None:
    wanted, whole, all_places = journal
    path = data.draw(st.sampled_from(all_places))
    edited = changed(whole, path, value, remove=remove == 0)
    same = json.dumps(edited) == json.dumps(whole)
    Path(wanted.journal).write_text(json.dumps(edited))
    for act in (
        lambda: Journal.resume(wanted.journal, {"device": "cuda"}),
        lambda: assemble.write_profile(wanted, 1.0),
    ):
        with pytest.raises(PlannerError, match="was edited or damaged|is not a journal") if not same else nullcontext():
            act()

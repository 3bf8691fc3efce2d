"""Files that are no traces of torch.profiler, or not whole, or spoiled: one sentence each, within limits."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_traces import training

from planner.errors import PlannerError
from planner.kineto import events, job_traces
from planner.kineto.groups import kinds_of
from planner.kineto.job_traces import read_traces, trace_files
from planner.kineto.rank_trace import read_rank
from planner.kineto.step_parts import parts_of
from planner.layout import Layout

EIGHT = Layout(dp=8, zero=3)


def refused(path: Path) -> str:
    with pytest.raises(PlannerError) as error:
        parts_of(read_rank(path), kinds_of(EIGHT))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('', 'no trace in JSON'),
        ('SQLite format 3', 'no trace in JSON'),
        ('{}', "no list 'traceEvents'"),
        ('[]', 'it has no events'),
        ('{"traceEvents": 3}', "no list 'traceEvents'"),
        ('{"traceEvents": [', 'ends in the middle'),
        ('{"traceEvents": [{"ph": "X"', 'ends in the middle'),
        ('{"traceEvents": []', 'ends in the middle'),
        ('{"traceEvents": [{} {}]}', 'not JSON after 1 events'),
        ("[" * 100_000, 'nested too deep'),
        ('{"traceEvents": []} {}', 'two files in one'),
        ('{1: 2}', 'not JSON'),
        ('[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]', 'of cpu_op'),
        ('{"traceEvents": [], "otherData": {"what": "predicted step of one pipeline of x"}}', "'plan report --format trace' wrote"),
        ('[' + '1' * 5000 + ']', 'not JSON'),
        ('[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":0,"args":[]}]', 'its steps take no time'),
    ],
    ids=range(16),
)  # fmt: skip
def test_what_is_no_trace_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert sentence in refused(path)
    path.write_bytes(gzip.compress(text.encode()))
    assert sentence in refused(path)


def test_a_trace_that_was_not_written_to_its_end(tmp_path: Path) -> None:
    whole = training().write(tmp_path / "a.json.gz").read_bytes()
    for cut in (len(whole) // 2, len(whole) - 4, 20):
        (tmp_path / "b.json.gz").write_bytes(whole[:cut])
        assert "ends in the middle" in refused(tmp_path / "b.json.gz") or "cannot be read" in refused(
            tmp_path / "b.json.gz"
        )
    (tmp_path / "c.json.gz").write_bytes(whole[:40] + b"\x00\xff" * 20 + whole[80:])
    assert refused(tmp_path / "c.json.gz")


def test_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training().write(tmp_path / "a.json.gz")
    monkeypatch.setattr(events, "MOST_TEXT", 1000)
    assert "unpacks to more than" in refused(path)
    monkeypatch.setattr(events, "MOST_FILE", 100)
    assert "that are read of a trace" in refused(path)
    assert "it is a device" in refused(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe.json")
    assert "it is a pipe" in refused(tmp_path / "pipe.json")
    (tmp_path / "pipe.json").unlink()
    monkeypatch.setattr(job_traces, "MOST_FILES", 1)
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(PlannerError, match="2 files are more than the 1 that are read"):
        trace_files([tmp_path])


def test_pieces_of_a_file_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training().write(tmp_path / "a.json")
    whole = read_rank(path)
    monkeypatch.setattr(events, "CHUNK", 61)
    again = read_rank(path)
    assert (
        np.array_equal(whole.spans, again.spans)
        and whole.collectives == again.collectives
        and whole.steps == again.steps
    )


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1e999",
    [],
    {},
    [[1]],
    {"a": 1},
    10**30,
    "\u202e\x00",
)


def spoiled(seed: int) -> str:
    """A trace with values of wrong types, keys missing, events twice, or cut."""
    draw = random.Random(seed)
    document = training(hidden=draw.random() < 0.5, steps=draw.randint(1, 4)).document()
    for _ in range(draw.randint(1, 6)):
        target = draw.choice([document, document["distributedInfo"], *document["traceEvents"][-30:]])
        if not isinstance(target, dict) or not target:
            continue
        if draw.random() < 0.4 and target.get("args") and isinstance(target["args"], dict):
            target = target["args"]
        key = draw.choice(list(target))
        if key == "traceEvents":
            target[key][draw.randrange(len(target[key]))] = draw.choice(STRANGE)
        elif draw.random() < 0.2:
            del target[key]
        else:
            target[key] = draw.choice(STRANGE)
        if not isinstance(document.get("distributedInfo"), dict):
            document["distributedInfo"] = {"rank": draw.choice(STRANGE)}
    text = json.dumps(document)
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice('{}[]",:0x\\\n') + text[place + draw.randint(0, 1) :]
    return text[: draw.randrange(len(text))] if draw.random() < 0.2 else text


def read_spoiled(seeds: range, tmp_path: Path) -> set[str]:
    found, path = set(), tmp_path / "spoiled.json"
    for seed in seeds:
        path.write_text(spoiled(seed))
        try:
            one = read_traces([path], EIGHT)
            assert all(np.isfinite(each.step_time) and each.step_time > 0 for each in one.parts)
            found.add("read")
        except PlannerError as error:
            assert "\n" not in str(error)
            found.add("sentence")
    return found


def test_spoiled_traces_are_read_or_refused(tmp_path: Path) -> None:
    assert read_spoiled(range(150), tmp_path) == {"read", "sentence"}


@pytest.mark.proof
def test_many_spoiled_traces_are_read_or_refused(tmp_path: Path) -> None:
    assert read_spoiled(range(10**6, 10**6 + 1000), tmp_path) == {"read", "sentence"}

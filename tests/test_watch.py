"""Ranks that watch each other: what is said of one that dies, hangs or falls silent. No torch, no other process."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from planner.lab.launch.watch import Watch


def entry(kind: str, doing: str = "all_reduce of 4 MiB", text: str = "", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    return {"kind": kind, "doing": doing, "text": text, "ranks": list(ranks)}


@pytest.mark.parametrize(
    ("posts", "gone", "words"),
    [
        ({0: entry("lost"), 1: entry("lost")}, [3], "rank 3 (b) died during all_reduce of 4 MiB"),
        ({0: entry("late"), 1: entry("stopped")}, [3], "rank 3 (b) stopped answering for 30 s during all_reduce of 4 MiB"),
        ({0: entry("lost")}, [2, 3], "rank 2 (b) and rank 3 (b) died during all_reduce of 4 MiB"),
        ({0: entry("lost"), 2: entry("error", text="out of memory")}, [],
         "rank 2 (b) failed at all_reduce of 4 MiB: out of memory"),
        ({0: entry("late"), 2: entry("late")}, [], "did not end although all ranks are alive (no answer within 30 s): "
         "the link between ranks 0, 1, 2, 3 on a, b hangs"),
        ({1: entry("said", text="wrong data on rank 1")}, [], "wrong data on rank 1"),
        ({1: entry("silent"), 0: entry("lost")}, [2, 3], "rank 3 (b) gave no sign of life for 30 s during all_reduce"),
        ({3: entry("silent"), 0: entry("stopped")}, [], "rank 0 (a) gave no sign of life for 30 s during all_reduce"),
    ],
)  # fmt: skip
def test_sentences(posts: Any, gone: list[int], words: str) -> None:
    watch = Watch(None, 0, ["a", "a", "b", "b"], 30.0, ended=lambda _: None, leave=lambda _: None)
    assert words in watch.judge(posts, gone).sentence


class Shared:
    """One rank's client of a store of this process."""

    def __init__(self, kept: dict[str, bytes]) -> None:
        self.kept, self.cut = kept, False

    def set(self, key: str, value: str) -> None:
        if self.cut:
            raise OSError("no route to host")
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def add(self, key: str, number: int) -> int:
        self.kept[key] = b"%d" % (int(self.kept.get(key, b"0")) + number)
        return int(self.kept[key])


@pytest.mark.proof
def test_a_rank_whose_machine_is_gone_is_named_without_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed, nothing comes any more, and the operation may take much longer: all others end, one says why."""
    monkeypatch.setattr("planner.lab.launch.watch.SILENT", 1.0)
    kept: dict[str, bytes] = {}
    said: dict[int, str] = {}
    stores = [Shared(kept) for _ in range(3)]
    ranks = [
        Watch(store, rank, ["a", "b", "c"], 600.0, ended=lambda words, rank=rank: said.update({rank: words}),
              leave=lambda _: None)
        for rank, store in enumerate(stores)
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for one in ranks:
            one.begin()
            stack.enter_context(one.doing("step 3", [0, 1, 2]))
        time.sleep(2.5)
        assert said == {}
        stores[1].cut = True
        until = time.monotonic() + 30
        while not {0, 2} <= set(said) and time.monotonic() < until:
            time.sleep(0.05)
    found = [words for rank, words in said.items() if rank != 1]
    assert sorted(map(bool, found)) == [False, True]
    assert "rank 1 (b) gave no sign of life for 1 s during step 3" in max(found)

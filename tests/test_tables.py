"""Tables of the terminal: no name that a user copies is broken, no column is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

import planner
from planner.questions.serve.show import rows_table
from planner.serving.serving_rows import ServeRow
from planner.terminal.library_tables import hardware_table, models_table, trainers_table
from planner.terminal.tables import table


def lines_of(shown: Table, width: int) -> list[str]:
    out = StringIO()
    Console(width=width, file=out).print(shown)
    return [line for line in out.getvalue().splitlines() if line.strip(" ─")]


@cache
def words(make: Callable[[int], Table]) -> frozenset[str]:
    """All words of a table that has room for them."""
    return frozenset(" ".join(lines_of(make(1000), 1000)).split())


@pytest.mark.parametrize("width", [80, 109, 117, 140])
@pytest.mark.parametrize("make", [models_table, hardware_table, trainers_table])
def test_names_of_the_library_are_never_broken(make: Callable[[int], Table], width: int) -> None:
    lines = lines_of(make(width), width)
    assert set(" ".join(lines).split()) <= words(make) and max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [12, 24, 31, 36, 40, 60])
def test_tables_are_narrowed_between_words(width: int) -> None:
    """Where whole words do not fit the longest are broken; nothing is lost, and what does not wrap is never cut."""
    row = ("name-of-one", "three short words", "1,234", "antidisestablish")
    lines = lines_of(table("=name", "words", ">n", "long word", rows=[row]), width)
    assert max(map(len, lines)) <= width
    letters = sorted("".join("".join(lines).split()))
    assert width < 31 or letters == sorted("namewordsnlongword" + "".join(row).replace(" ", ""))
    assert width < 31 or {"name-of-one", "1,234"} <= set(" ".join(lines).split())
    assert width < 60 or {"three", "antidisestablish"} <= set(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 86, 99, 120, 140])
def test_no_number_of_a_deployment_is_cut(width: int) -> None:
    rows = [
        ServeRow(
            purpose="interactive", engine="sglang 0.5.23", layout="tp 1 dp 16 ep 8 moe-tp 2", precision=weights, gpus=16,
            load="1,172", concurrency=1.0, requests_per_second=1.0, tokens_per_second=1.0, tokens_per_second_per_gpu=1621.0,
            tokens_per_second_per_user=12.3, figure="mean", ttft_s=1.325, tpot_s=0.0223, memory_gib=1.0, memory_limit_gib=2.0,
            holds=1173.0, preemption=0.0, communication_share=0.0, fits=True, keeps_up=True, limits_kept=True,
            usd_per_million_output=87.9, usd_per_million_total=None, kwh_per_million_output=None,
        )
        for weights in ("bf16", "int4")
    ]  # fmt: skip
    shown = " ".join(lines_of(rows_table(rows, "Best deployments", width, purposes=True), width))
    assert "…" not in shown and {"int4", "1,621", "22.3", "87.9", "1.325"} <= set(shown.split())


def test_a_range_beyond_the_card_beside_a_small_chance_is_explained() -> None:
    """Both stand in one line: the range is wider than the plan's own chance tells."""
    for hardware, told in (("rtx-4090", True), ("h100-sxm", False)):
        job = {"model": "llama-8b", "gpus": 1, "hardware": hardware, "trainer": "torchtune", "lora_rank": 8}
        one = planner.estimate(**job, micro_batch_size=2, recompute="full")
        found, text = one.estimate, " ".join(str(one).split())
        assert (found.memory_range[1] > found.memory_limit) == told and found.out_of_memory_probability < 0.05
        assert ("the chance is of this plan as it stands" in text) == told

"""Every part of 200 estimates of small models, against stored ones: a change of the cost model shows what it moves.

Layouts are legal ones, drawn with a fixed seed over models, trainers, hardware and precisions. What is meant to move is
stored anew with ``python tests/test_cost_stored.py``, and the difference of the file belongs to the commit.
"""

import csv
import itertools
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import HARDWARE, MODELS, TRAINERS, job, legal_layouts

from planner.cost.refine import price_exactly
from planner.layout import Layout
from planner.rules import Job
from planner.workload import peak_dtype

STORED = Path(__file__).parent / "data" / "estimates.csv"
GPUS = ("h100-sxm", "a100-sxm-80gb", "b200-sxm", "l40s")
PER_JOB = 3
Row = dict[str, Any]


def the_job(row: Row) -> Job:
    """The job of a row."""
    workload = {"precision": row["precision"], "lora_rank": int(row["lora_rank"]), "optimizer": row["optimizer"]}
    sizes = {"gpus": int(row["gpus"]), "sequence": int(row["sequence"]), "batch": int(row["batch"])}
    return job(row["model"], row["trainer"], hardware=row["hardware"], **sizes, **workload)


def drawn() -> Iterator[tuple[Row, list[Layout]]]:
    """Jobs and their layouts."""
    for model in MODELS:
        for name, trainer in TRAINERS.items():
            pick = random.Random(zlib.crc32(f"{model} {name}".encode()))
            gpus = pick.choice((8, 32))
            legal = legal_layouts(model, name, gpus, 32, PER_JOB)
            precision = pick.choice(trainer.legal.precisions)
            able = [one for one in GPUS if peak_dtype(precision) in {*HARDWARE[one].peak_flops, "fp32"}]
            row = {
                "model": model, "trainer": name, "hardware": pick.choice(able), "gpus": gpus, "batch": 32,
                "sequence": pick.choice((4096, 16384)), "lora_rank": pick.choice((0, 0, 0, 16)),
                "precision": precision, "optimizer": pick.choice(trainer.optimizers),
            }  # fmt: skip
            yield row, [legal.row(number) for number in range(len(legal))]


def answers(row: Row, layouts: list[Layout]) -> Iterator[dict[str, str]]:
    """What the cost model says: seconds, GiB and counts, to five digits."""
    one = the_job(row)
    for found in price_exactly(one.workload, one.cluster, one.trainer, layouts):
        columns = {
            **{f"{part}_s": value for part, value in found.time.items()},
            **{f"{part}_hidden_s": value for part, value in found.hidden.items()},
            **{f"{part}_gib": value / 2**30 for part, value in found.memory.items()},
            "reclaimed_gib": found.reclaimed / 2**30, "host_gib": found.host_memory / 2**30,
            "first_reserved_gib": found.first_reserved / 2**30, "stage": found.stage, "tflop": found.flop / 1e12,
        }  # fmt: skip
        yield {name: f"{float(value[0]):.5g}" for name, value in columns.items()}


def written(layout: Layout) -> str:
    """The fields of a layout that are not their defaults."""
    plain = Layout().columns()
    return " ".join(f"{name}={int(value)}" for name, value in layout.columns().items() if int(value) != plain[name])


def read(text: str) -> Layout:
    """The layout of ``written``."""
    return Layout(**{name: int(value) for name, value in (one.split("=") for one in text.split())})


def store() -> None:
    """Write the file anew."""
    rows = [
        {**row, "layout": written(layout), **answer}
        for row, layouts in drawn()
        for layout, answer in zip(layouts, answers(row, layouts), strict=True)
    ]
    with STORED.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


with STORED.open(encoding="utf-8", newline="") as stored_file:
    ROWS = list(csv.DictReader(stored_file)) if __name__ != "__main__" else []


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_no_part_of_an_estimate_moves_unseen(trainer: str) -> None:
    """All parts to four digits."""
    rows = [row for row in ROWS if row["trainer"] == trainer]
    assert len(rows) >= 9
    for _, members in itertools.groupby(rows, key=lambda row: row["model"]):  # one job each
        same = list(members)
        for row, answer in zip(same, answers(same[0], [read(one["layout"]) for one in same]), strict=True):
            for name, now in answer.items():
                near = pytest.approx(float(row[name]), rel=1e-4, abs=1e-9)
                assert float(now) == near, f"{row['model']}, {row['layout']}: {name}; store it anew if that is meant"


def test_stored_estimates_hold_what_a_mechanism_needs() -> None:
    """Every part of step time and memory is above 0 somewhere."""
    for name in ROWS[0]:
        if name.endswith(("_s", "_gib")) and "hidden" not in name:
            assert any(float(row[name]) > 0 for row in ROWS), f"no stored layout has {name}"
    assert len({row["precision"] for row in ROWS}) >= 6 and np.ptp([row["layout"].count("recompute") for row in ROWS])


if __name__ == "__main__":
    store()

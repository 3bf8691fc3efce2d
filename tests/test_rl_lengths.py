"""Answers of an RL step: their lengths, how they are packed, rounds of dynamic sampling."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from planner.errors import PlannerError
from planner.rl.answer_lengths import AnswerLengths, read_answers
from planner.rl.packing import packed, padded
from tests.rl_samples import workload


def test_lengths_have_the_mean_and_the_percentile_that_were_said() -> None:
    found = read_answers("mean=3200,p99=8192", 16000)
    assert found.mean == pytest.approx(3200, rel=0.005)
    assert found.quantile(0.99) == pytest.approx(8192, rel=0.02)


def test_cut_lengths_keep_the_mean_and_pile_up_at_the_end() -> None:
    found = read_answers("3200", 4000)
    assert found.mean == pytest.approx(3200, rel=0.005)
    assert found.most == 4000
    assert found.shares[-1] > 0.3


def test_expected_maximum_by_hand() -> None:
    """Two equally likely lengths: E[max of n] = 2 - (1/2)^n of (1, 2)."""
    two = AnswerLengths(lengths=(1.0, 2.0), shares=(0.5, 0.5))
    assert np.allclose(two.longest_of([1, 2, 3]), [1.5, 1.75, 1.875])


def test_lengths_of_a_file_and_a_histogram(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100 3\n200 1\n")
    assert read_answers(f"@{file}", 1000).mean == 125
    file.write_text("[100, 200, 300]")
    assert read_answers(f"@{file}", 250).mean == pytest.approx(550 / 3)
    file.write_text("step:1 - response_length/mean:900.0 - response_length/max:2000.0\nstep:2 - response_length/mean:1100.0\n")
    assert read_answers(f"@{file}", 4000).mean == pytest.approx(1000, rel=0.01)
    file.write_text("[100, 200, 300]")
    again = AnswerLengths.from_dict(read_answers(f"@{file}", 1000).to_dict())
    assert again.mean == pytest.approx(200)


@pytest.mark.parametrize("said", ["mean=5000", "p99=300", "mean=100,p99=50", "mean=x", "median=3", "@missing.txt"])
def test_wrong_lengths_are_one_sentence(said: str) -> None:
    with pytest.raises(PlannerError):
        read_answers(said, 4000)


def test_packing_by_hand() -> None:
    """Answers of 1,872 with prompts of 128 fill 4,096 two by two: 8 of a replica take 4 microbatches."""
    work = workload(answers=read_answers("fixed:1872", 3968), prompts=4, samples=8)
    found = packed(work, 4, 4096.0)
    assert (found.microbatches, found.tokens) == (4, 4000.0)
    assert packed(work, 4, 2048.0).microbatches == 8
    assert padded(work, 4, 2).microbatches == 4


def test_rounds_of_dynamic_sampling() -> None:
    """By hand: of 64 prompts all are kept, so one round; of 3 x 64 half are, so one; a quarter, 48 of 192, takes a second one."""
    assert workload().rounds == 1.0
    many = workload(algorithm="dapo", prompts=64, generated=3.0, keep_rate=0.5)
    assert many.rounds == pytest.approx(1.0, abs=1e-4)
    assert many.replace(keep_rate=0.25).rounds == pytest.approx(2.0, abs=0.01)
    rates = [many.replace(keep_rate=one).rounds for one in (0.9, 0.4, 0.34, 0.3, 0.1, 0.02)]
    assert rates == sorted(rates) and rates[-1] == pytest.approx(1 / 0.06, rel=0.05)
    with pytest.raises(PlannerError, match="grpo with 1 answer"):
        workload(samples=1)


def test_packing_never_needs_more_than_a_sequence_for_each_answer() -> None:
    work = workload()
    for replicas in (1, 2, 8, 64):
        found = packed(work, replicas, 4096.0)
        each = math.ceil(256 / replicas)
        assert each * (128 + work.answers.mean) / 4096 * 0.95 <= found.microbatches <= each

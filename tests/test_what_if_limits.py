"""What if, the other direction: the fewest GPUs, the longest sequence, the largest batch, against full scans."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
from test_what_if import SMALL, resolved

import planner
from planner.cluster import usual_counts
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.questions.best_plan import best_of
from planner.questions.what_if import inverse as limits
from planner.questions.what_if.changed_rows import Pricing, row_of
from planner.questions.what_if.changes import Value, apply, base_variant
from planner.questions.what_if.inverse import Goal, Question, fewest_gpus, largest_batch, longest_sequence
from planner.search import Pins
from tests.samples import HARDWARE


def question(job: ResolvedJob, goal: Goal | None = None, **changes: Any) -> Question:
    base = base_variant(job)
    pricing = Pricing(tokens=goal.tokens if goal else None, price=2.0)
    first, _ = row_of(base, None, None, pricing)
    values: dict[str, Any] = {"base": base, "first": first, "pins": None, "pricing": pricing, "goal": goal or Goal()}
    return Question(**{**values, "say": lambda _: None, **changes})


def test_counts_are_what_people_order() -> None:
    found = list(usual_counts(HARDWARE["h100-sxm"]))
    assert found[:7] == [1, 2, 4, 8, 16, 24, 32] and 8 * 16 in found and 8 * 18 in found and 8 * 17 not in found
    assert found == sorted(found) and len(set(found)) == len(found)
    steps = [(b - a) / a for a, b in itertools.pairwise(found) if a >= 128]
    assert max(steps) <= 0.126
    assert next(usual_counts(HARDWARE["h100-sxm"], 100)) == 104


@pytest.mark.proof
@pytest.mark.parametrize("days", [None, 40.0, 6.0])
def test_fewest_gpus_is_what_a_scan_of_every_size_finds(days: float | None) -> None:
    job = resolve(Request(model="llama-8b", num_gpus=8, hardware="a100-sxm-40gb", trainer="fsdp", global_batch_size=48))
    goal = Goal(tokens=2e9 if days is None else 4e10, days=days)
    ask = question(job, goal)
    tried: list[str] = []
    answer = fewest_gpus(dataclasses.replace(ask, say=tried.append))
    for count in usual_counts(job.job.cluster.hardware):
        row = ask.row(apply(ask.base, Value(flag="gpus", text=str(count), number=count)))[1]
        if not goal.missed(row):
            break
    assert answer.fits and answer.label == f"fewest GPUs: {count}" and answer.num_gpus == count
    assert answer.prediction == row.prediction


def test_an_awkward_number_of_gpus_hides_no_better_one_above_it() -> None:
    """512 sequences share out badly over 24 nodes and well over 32: the throughput of the one says nothing of the other's."""
    job = resolve(Request(model="llama-8b", num_gpus=64, hardware="h100-sxm", global_batch_size=512))
    row = fewest_gpus(question(job, Goal(tokens=15e12, days=76.0)))
    assert row.num_gpus == 256 and row.costs is not None and row.costs.days < 76.0


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "trainer", "batch"), [("llama-8b", "megatron", 48), ("mixtral-8x7b", "fsdp", None), ("gpt3-13b", "megatron", 100)]
)
def test_no_number_of_gpus_is_faster_per_gpu_than_the_power_of_two_below(
    model: str, trainer: str, batch: int | None
) -> None:
    """Of plans without a memory limit, which is all that the powers of two know."""
    request = Request(model=model, num_gpus=8, hardware="a100-sxm-80gb", trainer=trainer, global_batch_size=batch)
    roomy = question(resolve(request), free_batch=batch is None)
    roomy = dataclasses.replace(roomy, base=apply(roomy.base, Value(flag="memory", text="x100", factor=100.0)))
    powers = {size: limits._power(roomy, size) for size in (1, 4, 8, 16, 32)}
    rates = {}
    for count in (1, 2, 8, 24, 32, 40, 48):
        found, _ = roomy.with_count("gpus", count)
        if found is not None and found.tokens_per_second is not None:
            rates[count] = found.tokens_per_second / count
            for size, power in powers.items():
                assert count < size or rates[count] <= power.rate / size, (count, size)
    assert len(rates) >= 5 and {1, 8, 32} <= set(rates)


def test_hardware_that_cannot_meet_the_deadline_says_how_long_it_would_take() -> None:
    ask = question(
        resolve(Request(model="llama-8b", num_gpus=8, hardware="l4")), Goal(tokens=15e12, days=3.0), free_batch=True
    )
    row = fewest_gpus(ask)
    assert not row.fits and re.fullmatch(
        r"none found; \d+ GPUs take at the least [\d.]+ days, 3 are allowed", row.why
    ), row.why


def test_the_fewest_gpus_name_a_cheaper_power_of_two() -> None:
    """64 sequences share out badly over the 40 GPUs that a deadline asks for."""
    ask = question(resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm", global_batch_size=64)))
    rows = {
        count: ask.row(apply(ask.base, Value(flag="gpus", text=str(count), number=count)))[1] for count in (40, 48, 64)
    }
    rates = {
        count: row.prediction.tokens_per_second_per_gpu for count, row in rows.items() if row.prediction is not None
    }
    need = 0.999 * rates[40] * 40
    goal = Goal(tokens=1e12, days=1e12 / need / 86400)
    row = fewest_gpus(dataclasses.replace(ask, goal=goal, pricing=Pricing(tokens=1e12, price=2.0)))
    assert row.num_gpus == 40
    saved = 1 - rates[40] / rates[64]
    assert (f"; 64 GPUs need {100 * saved:.0f} % fewer GPU-hours" in row.why) == (saved > limits.CHEAPER)
    assert saved > limits.CHEAPER, "the job of this test should share out badly over 40 GPUs"


def test_no_number_of_gpus_meets_a_budget_below_the_cost_of_the_fastest_plan() -> None:
    ask = question(resolved(8), Goal(tokens=1e12, budget=10.0))
    row = fewest_gpus(ask)
    assert not row.fits and row.label == "fewest GPUs: none" and "USD, 10 are allowed" in row.why
    with pytest.raises(PlannerError, match="--days needs the number of tokens"):
        Goal(days=3.0)


@pytest.mark.proof
def test_longest_sequence_fits_and_no_longer_one_of_a_scan_does() -> None:
    job = resolve(Request(model="llama-8b", num_gpus=2, hardware="h100-sxm", global_batch_size=8))
    ask = question(job)
    row = longest_sequence(ask)
    assert row.fits and row.label == f"longest sequence: {row.sequence_length}"
    piece = (1 << (row.sequence_length.bit_length() - 1)) // limits.PIECES

    def fits(tokens: int) -> bool:
        return ask.row(apply(ask.base, Value(flag="sequence_length", text=str(tokens), number=tokens)))[1].fits

    scan = [
        tokens
        for tokens in range(row.sequence_length - 3 * piece, row.sequence_length + 6 * piece, piece)
        if fits(tokens)
    ]
    assert scan == [row.sequence_length - n * piece for n in (3, 2, 1, 0)]
    assert not fits(4 * row.sequence_length)


@pytest.mark.proof
def test_largest_micro_batch_is_what_a_scan_of_divisors_finds() -> None:
    ask = question(resolve(Request(model="llama-8b", num_gpus=2, hardware="h100-sxm", global_batch_size=24)))
    row = largest_batch(ask)
    assert row.layout is not None and row.label == f"largest micro batch: {row.layout.micro_batch_size}"
    fitting = [b for b in (1, 2, 3, 4, 6, 8, 12, 24)
               if best_of(ask.base.resolved(), Pins(values={"micro_batch_size": b})).fits]  # fmt: skip
    assert max(fitting) == row.layout.micro_batch_size < 24
    same = largest_batch(question(resolved(8, global_batch_size=1)))  # the base again: nothing changed
    assert same.label == "largest micro batch: 1" and same.why == "no effect, the same plan"
    with pytest.raises(PlannerError, match="which --micro-batch-size pins"):
        largest_batch(dataclasses.replace(ask, pins=Pins(values={"micro_batch_size": 1})))


def test_cheapest_searches_each_kind_of_hardware_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's own hardware is not searched again, its row is the one that a search gives; and it says how far it is."""
    from planner.questions import best_plan
    from planner.questions.what_if import changed_rows
    from planner.questions.what_if.numbers import ask, what_if

    searched: list[str] = []
    known = changed_rows.best_of

    def counted(resolved: Any, *more: Any, **named: Any) -> best_plan.Best:
        searched.append(resolved.hardware)
        return known(resolved, *more, **named)

    monkeypatch.setattr(changed_rows, "best_of", counted)
    flags = {"model": ("llama-3.2-1b",), "gpus": ("8",), "hardware": ("h100-sxm", "l40s", "a100-sxm-80gb"), "cheapest": True}
    said: list[str] = []
    rows = what_if(ask(None, flags), said.append).rows
    assert said == ["the job as it is", "h100-sxm, 1 of 3", "l40s, 2 of 3", "a100-sxm-80gb, 3 of 3"]
    assert sorted(searched) == ["a100-sxm-80gb", "h100-sxm", "l40s"]
    base, own = rows[0], next(row for row in rows if row.label == "h100-sxm x 8")
    assert own.layout == base.layout and own.prediction == base.prediction and own.same_layout and own.throughput == 1.0


def test_cheapest_is_sorted_by_cost_and_meets_the_deadline(run: Any) -> None:
    result = run("what-if", *SMALL, "--tokens", "100B", "--days", "9", "--cheapest", "--hardware",
                 "h100-sxm,l40s,gaudi2,a100-sxm-80gb", "--price", "a100-sxm-80gb=1.5", "--json")  # fmt: skip
    rows = json.loads(result.stdout)["rows"][1:]
    assert {row["hardware"] for row in rows} == {"h100-sxm", "l40s", "gaudi2", "a100-sxm-80gb"}
    dollars = [row["costs"]["usd"] for row in rows]
    assert dollars[-1] is None and rows[-1]["hardware"] == "gaudi2"  # no price: last
    assert dollars[:-1] == sorted(dollars[:-1]) and all(row["costs"]["days"] <= 9 for row in rows)
    [a100] = [row for row in rows if row["hardware"] == "a100-sxm-80gb"]
    assert a100["costs"]["usd"] == pytest.approx(1.5 * a100["costs"]["gpu_hours"])
    assert a100["price"]["source"] == "--price"
    assert "Prices come from 3 lists" in json.loads(result.stdout)["warning"]


@pytest.mark.proof
def test_the_fewest_gpus_take_another_batch_and_say_so() -> None:
    """A batch that nobody said hinders no number of GPUs; one that was said stays."""
    free = planner.what_if(model="llama-8b", gpus=64, hardware="h100-sxm", tokens="15T", days=30, fewest_gpus=True)
    said = planner.what_if(
        model="llama-8b", gpus=64, hardware="h100-sxm", tokens="15T", days=30, fewest_gpus=True, global_batch_size=512
    )
    first, second = free.found.rows[-1], said.found.rows[-1]
    assert first.num_gpus < second.num_gpus and second.global_batch_size == 512
    assert f"with a global batch of {first.global_batch_size} instead of 512" in first.why


def test_fewer_gpus_that_are_faster_are_named() -> None:
    """Over 13 nodes the batch shares out by stages alone, over 12 by replicas too; powers of two are not asked."""
    plans = planner.plan(model="llama-70b", gpus=104, hardware="h100-sxm", global_batch_size=512)
    [fewer] = [one for one in plans.faster if one.flag.startswith("--gpus")]
    there = planner.plan(model="llama-70b", gpus=int(fewer.flag.split()[1]), hardware="h100-sxm", global_batch_size=512)
    assert int(fewer.flag.split()[1]) < 104
    assert fewer.step_time_s == pytest.approx(there[0].estimate.step_time) and fewer.gain > 0.01
    by_nodes = planner.plan(model="llama-70b", nodes=13, hardware="h100-sxm", global_batch_size=512)
    assert fewer.flag in {one.flag for one in by_nodes.faster}
    assert not any(one.flag.startswith("--gpus") for one in there.faster)

"""The step as a timeline: ends when the plan says, parts as estimated, lanes free of overlap; memory over it; its trace."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from quick_cases import proofs_but
from samples import TRAINERS, job, legal_layouts, model

from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.cost.pipeline.schedules import in_flight
from planner.cost.price.stage_times import largest_stage
from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.layout import Layout, Schedule
from planner.plan_file import Plan
from planner.questions.report.trace import trace_of
from planner.rules import Job
from planner.timeline.passes import STREAM_OF_PART, STREAMS, rank_of_kind
from planner.timeline.priced_plan import Priced, price, price_plan
from planner.timeline.stage_memory import (
    memory_of_ranks,
    memory_over_time,
    worst_rank,
)
from planner.timeline.step_slices import Timeline, ends_of, timeline_of
from planner.units import GIB, MEGA

NEAR = 1e-9
"""Part of the step time that rounding may cost."""
SCHEDULES = [
    (schedule, pp, vpp, m)
    for pp, m in ((1, 3), (2, 4), (4, 8), (8, 16))
    for schedule, vpp in (
        (Schedule.GPIPE, 1), (Schedule.ONE_F_ONE_B, 1), (Schedule.INTERLEAVED, 2), (Schedule.INTERLEAVED, 4),
        (Schedule.ZB_H1, 1), (Schedule.ZB_2P, 1), (Schedule.ZBV, 2), (Schedule.DUALPIPE_V, 2),
    )
    if pp > 1 or schedule == Schedule.ONE_F_ONE_B
]  # fmt: skip


def deep_job(gpus: int, batch: int, trainer: str = "megatron", **changes: Any) -> Job:
    """32 layers, so that 8 stages have 4 chunks; a large vocabulary makes the last stage the slowest."""
    one = job("gqa", trainer, gpus, batch=batch)
    deep = model("deep", num_layers=32, num_kv_heads=4, vocab_size=128000)
    changed = dataclasses.replace(one, workload=one.workload.replace(model=deep))
    return dataclasses.replace(changed, trainer=one.trainer.replace(**changes)) if changes else changed


def check(priced: Priced, step: Timeline) -> None:
    """Everything that must hold of any timeline."""
    room = NEAR * priced.step_time
    slices = list(step.slices())
    assert max(one.end for one in slices) == step.step_time == priced.step_time
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for one in slices:
        assert one.stream == STREAM_OF_PART[one.part]
        assert one.end >= one.start >= 0
        lanes[one.rank, one.stream].append((one.start, one.end))
    for lane, spans in lanes.items():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-12 * priced.step_time, f"{lane}: {start} < {end}"
    estimated = {part: float(priced.estimate.time[part][0]) for part in PARTS}
    slowest, slowest_update = (
        rank_of_kind(kind, step.ranks)
        for kind in (int(largest_stage(priced.times.forward + priced.times.backward)[0]), ends_of(priced).slowest)
    )
    passes, update = step.totals(slowest), step.totals(slowest_update)
    for part in PARTS:
        mine = update if part in ("data_communication", "optimizer") else passes
        if part != "offload" or slowest == slowest_update:
            assert mine[part] == pytest.approx(estimated[part], abs=room), part
    for kind, seconds in priced.estimate.hidden.items():
        rank = slowest_update if kind == "data" else slowest
        mine = sum(one.end - one.start for one in slices if one.hidden and (one.rank, one.stream) == (rank, kind))
        assert mine == pytest.approx(float(seconds[0]), abs=room), kind
    for rank in range(step.ranks):
        totals = step.totals(rank)
        assert sum(totals.values()) == pytest.approx(step.step_time, abs=room)
        assert min(totals.values()) >= -room


@pytest.mark.parametrize(("schedule", "pp", "vpp", "m"), SCHEDULES)
def test_every_schedule(schedule: int, pp: int, vpp: int, m: int) -> None:
    """Sends exposed, and during computation; embedding and head make stages uneven."""
    layout = Layout(tp=2, pp=pp, dp=2, vpp=vpp, num_microbatches=m, schedule=schedule, zero=1, sequence_parallel=1)
    for overlap in (frozenset({"gradients", "parameters"}), frozenset({"pipeline", "tp_backward", "gradients"})):
        priced = price(deep_job(4 * pp, 2 * m, overlap=overlap), layout)
        step = timeline_of(priced)
        check(priced, step)
        parts = 3 if schedule in (Schedule.ZB_H1, Schedule.ZB_2P, Schedule.ZBV, Schedule.DUALPIPE_V) else 2
        assert len(step.actions) == pp * vpp * m * parts
        check_memory(priced, step)


def check_memory(priced: Priced, step: Timeline) -> None:
    """The worst rank is the estimate's, by component; over the step its peak is the predicted one."""
    ranks, worst = memory_of_ranks(priced), worst_rank(priced)
    for name in COMPONENTS:
        assert ranks[worst].memory[name] == pytest.approx(float(priced.estimate.memory[name][0]), rel=NEAR), name
    needed = [one.peak - one.given_back for one in ranks]
    assert max(needed) == pytest.approx(needed[worst], rel=NEAR)
    over = memory_over_time(priced, step)
    assert over.rank == worst
    assert over.peak == pytest.approx(priced.memory_peak, rel=NEAR)
    starts = [one.start for one in over.intervals]
    assert starts == sorted(set(starts)) and starts[0] == 0 and over.end == priced.step_time


@pytest.mark.proof
@pytest.mark.parametrize("trainer", proofs_but(["deepspeed", "fsdp", "megatron", "torchtitan"], sorted(TRAINERS)))
def test_layouts_of_every_trainer(trainer: str) -> None:
    """Dense, mixtures of experts, MLA with prediction modules: recompute, sharding, context parallelism, offload as drawn."""
    for name, gpus, batch in (("gqa", 8, 64), ("moe", 16, 160), ("mla", 8, 64)):
        one = job(name, trainer, gpus, batch=batch)
        layouts = legal_layouts(name, trainer, gpus, batch, 3)
        for row in range(len(layouts)):
            priced = price(one, layouts.row(row))
            step = timeline_of(priced)
            check(priced, step)
            check_memory(priced, step)


def test_a_pipeline_by_hand() -> None:
    """1F1B, p = 2, m = 2, equal stages, backward twice forward: 0F0 0F1 0B0 0B1, 1F0 1B0 1F1 1B1; 9 forward passes long."""
    priced = price(deep_job(2, 2), Layout(pp=2, num_microbatches=2))
    each = {name: np.full((3, 1), value) for name, value in (("forward", 1.0), ("backward", 2.0), ("weight", 1.0))}
    ends = {f"ends_{name}": np.zeros((3, 1)) for name in each}
    times = dataclasses.replace(priced.times, **each, **ends)
    durations = priced.durations(times)
    assert durations.forward.tolist() == [1.0, 1.0]
    assert durations.backward.tolist() == [2.0, 2.0]
    step = timeline_of(priced)
    order = {rank: [f"{one.kind}{one.microbatch}" for one in step.actions if one.rank == rank] for rank in (0, 1)}
    assert order == {0: ["F0", "F1", "B0", "B1"], 1: ["F0", "B0", "F1", "B1"]}
    starts = {(one.stage, one.kind, one.microbatch): one.start for one in step.actions}
    ends_at = {(one.stage, one.kind, one.microbatch): one.end for one in step.actions}
    assert starts[1, "F", 0] == ends_at[0, "F", 0]
    assert starts[0, "B", 0] == ends_at[1, "B", 0]
    # The head makes the last stage the slowest; its idle time: the first rank's first forward pass and its last backward pass
    idle = (ends_at[0, "F", 0] - starts[0, "F", 0]) + (ends_at[0, "B", 1] - starts[0, "B", 1])
    assert step.totals(1)["bubble"] == pytest.approx(idle)


def test_traffic_of_every_microbatch_stands_between_its_passes() -> None:
    """Without a pipeline, ZeRO 3 gathers before every forward pass and reduces behind every backward pass."""
    one = deep_job(8, 32, trainer="torchtitan", overlap=frozenset())
    priced = price(one, Layout(dp=8, num_microbatches=4, zero=3))
    step = timeline_of(priced)
    check(priced, step)
    kinds = sorted((item.start, item.kind) for item in step.slices() if item.stream in ("compute", "data"))
    assert [kind for _, kind in kinds][:8] == ["gather weights", "F", "B", "reduce gradients"] * 2
    assert sum(kind == "gather weights" for _, kind in kinds) == 4


def test_an_extrapolated_walk_still_ends_when_the_plan_says() -> None:
    """The model walks 6 p microbatches; where all of them take another time, hand-overs make up for it and nothing else."""
    layout = Layout(pp=4, num_microbatches=80, schedule=Schedule.ZB_H1, first_stage_layers=8, last_stage_layers=4)
    priced = price(deep_job(4, 80), layout)
    step = timeline_of(priced)
    assert step.hand_over != 0
    check(priced, step)


def test_in_flight_by_rank() -> None:
    """1F1B: p - i microbatches on rank i [Narayanan 2021, section 2.2]; weights of ranks of one kind are equal."""
    priced = price(deep_job(8, 16), Layout(pp=8, num_microbatches=16))
    ranks = memory_of_ranks(priced)
    assert [one.in_flight for one in ranks] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [one.kind for one in ranks] == ["first", *["middle"] * 6, "last"]
    assert [one.layers for one in ranks] == [4] * 8
    assert len({one.memory["weights"] for one in ranks[1:-1]}) == 1
    stored = ranks[1].memory["activations"] - ranks[2].memory["activations"]
    assert stored == pytest.approx(float(priced.shared.stored[1, 0]))
    at_kinds = in_flight(Layout.stack([priced.assigned]), np.array([[0.0, 1.0, 7.0]]))[0]
    assert at_kinds.tolist() == [8, 7, 1]


def test_activations_come_and_go() -> None:
    """Rank 0 of 1F1B: after 4 forward passes 4 microbatches wait; after the last backward pass none."""
    priced = price(deep_job(4, 8), Layout(pp=4, num_microbatches=8))
    step = timeline_of(priced)
    memory = memory_over_time(priced, step, rank=0)
    stored = float(priced.shared.stored[0, 0])
    first_backward = next(one.start for one in step.actions if one.rank == 0 and one.kind == "B")
    waiting = [one.activations / stored for one in memory.intervals if one.start < first_backward and one.workspace > 0]
    assert waiting == pytest.approx([1, 2, 3, 4])
    assert memory.intervals[-1].activations == 0
    assert sum(one.activations > 0 for one in memory.intervals) >= 16


# ------------------------------------------------------------------------------------------------ plans


def plan_of(**layout: int) -> Plan:
    said = {"model": "llama-8b", "num_gpus": 16, "hardware": "h100-sxm", "trainer": "megatron", "global_batch_size": 32}
    return explicit_plan(None, {"tp": 2, "pp": 4, **layout}, said)


def test_a_plan_that_no_longer_prices_as_it_says_is_refused() -> None:
    plan = plan_of()
    priced = price_plan(plan)
    assert timeline_of(priced).step_time == plan.prediction.step_time_s
    assert memory_over_time(priced, timeline_of(priced)).peak / GIB == pytest.approx(plan.prediction.memory_peak_gib)
    assert max(one.peak for one in memory_of_ranks(priced)) / GIB == pytest.approx(plan.prediction.memory_peak_gib)
    old = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, step_time_s=3.0))
    with pytest.raises(
        PlannerError, match=r"run.yaml says 3 s per step, but this planner prices .* 'plan estimate PLAN"
    ):
        price_plan(old, where="run.yaml")


# ------------------------------------------------------------------------------------------------ trace

METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
"""Metadata events of the format and the argument that each needs."""


def check_trace(text: str) -> list[dict[str, Any]]:
    """What the published format asks of an object with complete, metadata and counter events."""
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in document["otherData"].values())
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
            assert isinstance(event["cat"], str)
        elif event["ph"] == "M":
            value = event["args"][METADATA[event["name"]]]
            assert isinstance(value, str if METADATA[event["name"]] == "name" else int)
        else:
            assert event["ph"] == "C"
            assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
    return document["traceEvents"]


def test_the_trace_follows_the_published_format() -> None:
    plan = plan_of(vpp=2)
    events = check_trace(trace_of(price_plan(plan)))
    complete = [event for event in events if event["ph"] == "X"]
    lanes = defaultdict(list)
    for event in complete:
        lanes[event["pid"], event["tid"]].append(
            (round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"])))
        )
    for spans in lanes.values():
        assert all(start >= end for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(lanes)
    assert {pid for pid, _ in lanes} == {0, 1, 2, 3}
    end = max(event["ts"] + event["dur"] for event in complete)
    assert end == pytest.approx(plan.prediction.step_time_s * MEGA, abs=0.001)
    names = {event["name"] for event in complete if event["tid"] == STREAMS.index("compute")}
    assert {"0F0", "7B0", "optimizer"} <= names
    peak = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert peak == pytest.approx(plan.prediction.memory_peak_gib, abs=0.001)


def test_the_trace_of_an_expert_model_has_its_streams() -> None:
    one = job("moe", "megatron", 16, batch=64)
    layout = Layout(tp=2, pp=2, dp=4, ep=4, num_microbatches=16, zero=1, sequence_parallel=1)
    events = check_trace(trace_of(price(one, layout)))
    streams = {STREAMS[event["tid"]] for event in events if event["ph"] == "X"}
    assert {"compute", "tensor", "expert", "pipeline", "data", "host"} <= streams
    assert any(event.get("cat") == "hidden" for event in events)

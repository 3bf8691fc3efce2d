"""Pipeline schedules: bubbles and memory in flight against papers, closed forms against the walked timeline."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
from samples import MODELS, TRAINERS, job, priced

from planner.cost.estimate import memory_by_stage
from planner.cost.pipeline.partition import split_stages, stage_layers
from planner.cost.pipeline.schedule_walk import StageDurations, _in_chunks, actions, walk, walked_time
from planner.cost.pipeline.schedules import in_flight, interleave_waits, pipeline_time
from planner.cost.pipeline.v_orders import v_order
from planner.cost.price.compute import RATE_SPREAD, stage_straggling, straggling
from planner.cost.refine import _chunk_shares, durations, refine
from planner.cost.unique_stages import StageTable
from planner.layout import Layout, Schedule

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
EXACT = [
    (Schedule.GPIPE, 1),
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.INTERLEAVED, 2),
    (Schedule.INTERLEAVED, 4),
    (Schedule.ZB_H1, 1),
]
V_SHAPED = [(Schedule.ZBV, 2), (Schedule.DUALPIPE_V, 2)]
SIZES = [(2, 2), (2, 7), (4, 1), (4, 3), (4, 4), (4, 6), (4, 8), (4, 32), (5, 15), (8, 8), (8, 45)]


def legal(schedule: int, pp: int, m: int) -> bool:
    return schedule != Schedule.INTERLEAVED or m % max(1, m // pp) == 0


def closed(schedule: int, pp: int, vpp: int, m: int, f: float, b: float, w: float) -> float:
    layout = Layout(pp=pp, vpp=vpp, num_microbatches=m, schedule=schedule)
    one = np.ones(1)
    return float(pipeline_time(layout, f * one, b * one, w * one, pp * (f + b) * one)[0])


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    [
        (Schedule.GPIPE, 1, 3 * 3.0),
        (Schedule.ONE_F_ONE_B, 1, 3 * 3.0),
        (Schedule.INTERLEAVED, 2, 3 * 3.0 / 2),
        (Schedule.ZB_H1, 1, 3 * (1 + 1 - 1.0)),
        (Schedule.ZB_2P, 1, 0.0),
        (Schedule.ZBV, 2, 0.0),
        (Schedule.DUALPIPE_V, 2, (8 / 2 - 1) * (1.5 + 1 - 3 * 0.5)),
    ],
)
def test_bubbles_of_the_papers(schedule: int, vpp: int, bubble: float) -> None:
    """p = 4, F = I = W = 1. (p-1)(F+B)/v [Narayanan 2021]; (p-1)(F+I-W) and 0 [Qi 2024]; (P/2-1)(F&B+B-3W) with
    P = 8 half stages [DeepSeek, DualPipe's table, DualPipeV on P/2 devices]."""
    for m in (8, 64):
        assert closed(schedule, 4, vpp, m, 1.0, 2.0, 1.0) - m * 3.0 == pytest.approx(bubble)


@pytest.mark.parametrize(("schedule", "vpp"), EXACT)
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 2.0, 1.0), (1.0, 2.2, 0.9), (1.0, 3.0, 1.0)])
def test_closed_form_is_the_walked_time_of_equal_stages(
    schedule: int, vpp: int, forward: float, backward: float, weight: float
) -> None:
    """Exact, few microbatches and rounds of torch's interleaved schedule included (zb_h1: while W is the shortest)."""
    for pp, m in SIZES:
        if not legal(schedule, pp, m):
            continue
        each = np.full(pp * vpp, 1.0 / vpp)
        walked = walked_time(schedule, pp, vpp, m, (forward * each, backward * each, weight * each))
        assert closed(schedule, pp, vpp, m, forward, backward, weight) == pytest.approx(walked, rel=1e-9), (
            f"p {pp}, m {m}"
        )


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 5, 4), (4, 5, 64), (6, 8, 6), (8, 12, 8), (8, 12, 128)])
def test_sends_beside_computation_cost_a_turn_per_chunk(pp: int, vpp: int, m: int) -> None:
    """GPT-3 on 10,752 GPUs in MLPerf v3.1 (8 stages, 12 chunks, m 8) waits 190 sends, whatever the computation takes."""
    f, b, send = 0.8 / vpp, 1.7 / vpp, 0.03 / vpp
    every = np.full(pp * vpp, 1.0)
    walks = [
        walked_time(Schedule.INTERLEAVED, pp, vpp, m, (f * every, b * every, 0 * every), one) for one in (0.0, send)
    ]
    layout = Layout(pp=pp, vpp=vpp, num_microbatches=m, schedule=Schedule.INTERLEAVED)
    assert walks[1] - walks[0] == pytest.approx(float(interleave_waits(layout, np.full(1, vpp * send))[0]), rel=1e-9)
    assert float(interleave_waits(layout, np.full(1, vpp * send))[0]) == pytest.approx((2 * pp * vpp - 2) * send)


def test_2p_closes_the_bubble_but_for_the_first_forward_pass() -> None:
    """A walk of one step starts at a barrier: the last of p ranks has (p - 1) F to wait, which the paper's steps share."""
    for pp, m in ((2, 8), (4, 8), (4, 32), (8, 16), (8, 64)):
        each = np.ones(pp)
        walked = walked_time(Schedule.ZB_2P, pp, 1, m, (each, 2 * each, each))
        assert walked == pytest.approx(closed(Schedule.ZB_2P, pp, 1, m, 1.0, 2.0, 1.0) + pp - 1)


@pytest.mark.parametrize(("schedule", "vpp"), V_SHAPED)
def test_v_shaped_closed_form_is_near_the_walk(schedule: int, vpp: int) -> None:
    """The papers' forms are of the steady state, orders have ends: from m = 2 p on half a microbatch per rank apart at most."""
    for pp, m in ((2, 8), (4, 8), (4, 32), (8, 16), (8, 64)):
        each = np.full(pp * vpp, 1.0 / vpp)
        walked = walked_time(schedule, pp, vpp, m, (each, 2 * each, each))
        assert abs(walked - closed(schedule, pp, vpp, m, 1.0, 2.0, 1.0)) <= (pp - 1) * 0.5 + 1e-9
        assert walked >= m * 3.0


@pytest.mark.parametrize(("schedule", "vpp"), EXACT + V_SHAPED)
def test_in_flight_is_the_peak_of_the_actions(schedule: int, vpp: int) -> None:
    """Forwards less (input-gradient) backwards along the order of every rank; V orders of few microbatches stay below."""
    for pp, m in SIZES:
        if not legal(schedule, pp, m):
            continue
        layout = Layout(pp=pp, vpp=vpp, num_microbatches=m, schedule=schedule)
        for rank, order in enumerate(actions(schedule, pp, vpp, m)):
            change = [{"F": 1, "B": -1, "I": -1, "W": 0}[kind] for _, kind, _ in order]
            peak = max(itertools.accumulate(change)) / vpp
            stated = float(in_flight(layout, np.full((1, 3), float(rank)))[0, 0])
            if (schedule, vpp) in V_SHAPED and m < 2 * pp:
                assert stated / 2 - 1 <= peak <= stated
            else:
                assert peak == stated, f"p {pp}, m {m}, rank {rank}"


def test_later_middle_stages_hold_less() -> None:
    """p = 4, 1F1B: stages hold 4, 3, 2 and 1 microbatches; only the middle one changes with the one that is asked for."""
    one = job("gqa", gpus=8, batch=16)
    layout = Layout.stack([Layout(pp=4, dp=2, num_microbatches=8, zero=1)])
    second, third = (
        memory_by_stage(one.workload, one.cluster, one.trainer, layout, middle)[0]["activations"][:, 0]
        for middle in (1, 2)
    )
    assert second[0] == third[0] and second[2] == third[2]
    assert second[1] - third[1] == pytest.approx(third[1] / 2, rel=0.1)


def test_interleaving_keeps_more_in_flight() -> None:
    """First stage: L (1 + (p - 1) / (p v)) layers' worth against L. [Korthikanti 2022, section 4.2.3]"""
    plain = {"pp": 4, "dp": 2, "num_microbatches": 16}
    both = Layout.stack([Layout(**plain), Layout(**plain, vpp=2, schedule=Schedule.INTERLEAVED)])
    flight = in_flight(both, np.zeros((2, 3)))[:, 0]
    assert flight.tolist() == [4.0, 4.0 * (1 + 3 / (4 * 2))]


def test_interleaved_order_is_megatrons() -> None:
    """get_model_chunk_id: id mod (p v) // p, reversed backward; microbatches in groups of p. [Megatron]"""
    pp, vpp, m = 4, 2, 8
    for rank, order in enumerate(actions(Schedule.INTERLEAVED, pp, vpp, m)):
        counts = {"F": 0, "B": 0}
        for stage, kind, microbatch in order:
            number = counts[kind]
            counts[kind] += 1
            chunk = number % (pp * vpp) // pp
            chunk = vpp - 1 - chunk if kind == "B" else chunk
            assert (stage, microbatch) == (chunk * pp + rank, number // (pp * vpp) * pp + number % pp)
        assert counts == {"F": m * vpp, "B": m * vpp}
        kinds = "".join(kind for _, kind, _ in order)
        warm = 2 * (pp - rank - 1) + (vpp - 1) * pp
        assert kinds == "F" * warm + "FB" * (m * vpp - warm) + "B" * warm
    assert actions(Schedule.INTERLEAVED, 2, 2, 2)[1] == (
        (1, "F", 0),
        (1, "F", 1),
        (3, "F", 0),
        (3, "B", 0),
        (3, "F", 1),
        (3, "B", 1),
        (1, "B", 0),
        (1, "B", 1),
    )


@pytest.mark.parametrize(("schedule", "vpp"), EXACT + V_SHAPED)
def test_every_action_once_and_in_order(schedule: int, vpp: int) -> None:
    for pp, m in SIZES:
        if not legal(schedule, pp, m) or m > 16:
            continue
        stages = pp * vpp
        ones = np.ones(stages)
        spans = walk(schedule, pp, vpp, m, (ones, 2 * ones, ones), send=0.25)
        split = schedule in (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPE_V)
        wanted = {(s, k, i) for s in range(stages) for k in ("FIW" if split else "FB") for i in range(m)}
        when = {(one.stage, one.kind, one.microbatch): one for one in spans}
        assert set(when) == wanted and len(spans) == len(wanted)
        back = "I" if split else "B"
        for (s, kind, i), one in when.items():
            before = {"F": (s - 1, "F", i), "B": (s, "F", i), "I": (s, "F", i), "W": (s, "I", i)}[kind]
            after_stage = (s + 1, back, i) if kind == back else None
            for other in filter(None, (before, after_stage)):
                if other in when:
                    wait = 0.25 if when[other].rank != one.rank else 0.0
                    assert one.start >= when[other].end + wait - 1e-12
        for rank in range(pp):
            mine = sorted((one.start, one.end) for one in spans if one.rank == rank)
            assert all(b[0] >= a[1] - 1e-12 for a, b in itertools.pairwise(mine))


@pytest.mark.parametrize(("schedule", "vpp"), EXACT + V_SHAPED)
def test_the_steady_state_may_be_added(schedule: int, vpp: int) -> None:
    """Long runs are not walked to the end; with a light or heavy last stage the shortcut is within 1 %."""
    for pp, m in ((2, 16), (4, 32), (4, 36), (6, 66)):
        for extra in (-0.2, 0.2):
            f, i, w = (np.ones(pp * vpp) for _ in range(3))
            f[-1], i[-1], w[-1] = 1 + extra, 1 + extra, 1 + extra
            whole = max(one.end for one in walk(schedule, pp, vpp, m, (f, i + w, w), 0.05))
            assert walked_time(schedule, pp, vpp, m, (f, i + w, w), 0.05) == pytest.approx(whole, rel=0.01)


def torch_order(name: str, rank: int, pp: int, m: int) -> list[tuple[tuple[int, str, int], ...]]:
    """What torch makes one rank do, action by action; a whole backward pass is both of its halves."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(name)
    one = kind.__new__(kind)
    vars(one).update(pp_group_size=pp, _n_microbatches=m, num_stages=2 * pp, _num_stages=2 * pp, n_local_stages=1,
                     number_of_rounds=max(1, m // pp), microbatches_per_round=m // max(1, m // pp))  # fmt: skip
    found = []
    for action in filter(None, one._calculate_single_rank_operations(rank)):
        group: list[tuple[int, str, int]] = []
        for part in action.sub_actions or (action,):
            kinds = part.computation_type.value.replace("B", "IW")
            group += [(part.stage_index, each, part.microbatch_index) for each in kinds]
        found.append(tuple(group))
    return found


@needs_torch
def test_v_orders_are_torchs() -> None:
    """Action by action, and which of them send their results together."""
    for schedule, name in ((Schedule.ZBV, "ZBVZeroBubble"), (Schedule.DUALPIPE_V, "DualPipeV")):
        for pp, m in ((1, 4), (2, 4), (2, 9), (3, 7), (4, 8), (4, 3), (8, 16), (8, 37)):
            if schedule == Schedule.ZBV or m >= 2 * pp:
                for rank in range(pp):
                    assert list(v_order(schedule, rank, pp, m)) == torch_order(name, rank, pp, m), (name, pp, m, rank)


@needs_torch
def test_zb_h1_takes_as_long_as_torchs_order() -> None:
    """Ours is greedy; walked with torch's order it is not another time, whatever F, I and W and the last stage are."""
    for pp, m, heavy in ((2, 4, 1.0), (4, 8, 1.5), (4, 16, 1.0), (8, 16, 1.5), (8, 32, 1.0)):
        f, i, w = np.ones(pp), np.full(pp, 1.4), np.full(pp, 0.9)
        f[-1], i[-1], w[-1], i[0] = heavy, 1.4 * heavy, 0.9 * heavy, 0.0
        orders = [torch_order("InterleavedZeroBubble", rank, pp, m) for rank in range(pp)]
        ends: dict[tuple[int, str, int], float] = {}
        free, left = [0.0] * pp, [[group[0] for group in order] for order in orders]
        while any(left):
            for rank in range(pp):
                stage, kind, number = left[rank][0] if left[rank] else (0, "", 0)
                wanted = {"F": [(stage - 1, "F")] * (stage > 0), "W": [(stage, "I")], "": [(-1, "")]}.get(
                    kind, [(stage, "F")] + [(stage + 1, "I")] * (stage < pp - 1)
                )
                if all((*one, number) in ends for one in wanted):
                    start = max(free[rank], *(ends[(*one, number)] for one in wanted), 0.0)
                    free[rank] = ends[stage, kind, number] = start + {"F": f, "I": i, "W": w}[kind][stage]
                    left[rank].pop(0)
        assert walked_time(Schedule.ZB_H1, pp, 1, m, (f, i + w, w)) == pytest.approx(max(free)), (pp, m, heavy)


def test_a_v_by_hand() -> None:
    """p = 2, m = 4, F = I = W = 1: rank 1 holds stages 1 and 2, which hand over without a send; a head of 1 more on stage 3."""
    assert ["".join(f"{s}{k}{i} " for s, k, i in order) for order in actions(Schedule.ZBV, 2, 2, 4)] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3 ",
    ]
    one, head = np.ones(4), np.array([1.0, 1.0, 1.0, 2.0])
    assert walked_time(Schedule.ZBV, 2, 2, 4, (one, 2 * one, one)) == 4 * 6.0 + 1.0
    spans = walk(Schedule.DUALPIPE_V, 2, 2, 4, (head, 2 * head, head), send=0.5)
    when = {(span.stage, span.kind, span.microbatch): span for span in spans}
    [pair] = [g for g in v_order(Schedule.DUALPIPE_V, 0, 2, 4) if g[0] == (0, "F", 3)]
    assert pair == ((0, "F", 3), (3, "I", 0 + 1), (3, "W", 1))
    assert when[1, "F", 3].start >= when[3, "W", 1].end + 0.5  # sent when the backward pass beside it has ended


def test_splits_of_layers() -> None:
    """The three stages that are priced are stages of the split that is walked, and stand for all of its layers."""
    for first, last, pp in itertools.product((0, 1, 3, 5), (0, 1, 2), (2, 3, 4)):
        layout = Layout(pp=pp, first_stage_layers=first, last_stage_layers=last)
        given = (first > 0) + (last > 0)
        if 8 - first - last < pp - given or (given == pp and first + last != 8):
            continue
        layers = stage_layers(8, layout)
        stages = split_stages(MODELS["gqa"], layout)
        found = (stages.dense + stages.moe)[0]
        assert sum(layers) == 8 and len(layers) == pp
        assert (found[0], found[2]) == (layers[0], layers[-1]), (first, last, pp)
        assert found[1] == (max(layers[1:-1]) if pp > 2 else layers[0])


def test_refined_time_of_equal_stages_is_the_closed_form() -> None:
    """With embedding and head as light as nothing, the timeline changes nothing."""
    spec = MODELS["gqa"]
    light = job("gqa", batch=64)
    light = type(light)(
        workload=light.workload.replace(model=type(spec)(**{**vars(spec), "vocab_size": 1})),
        cluster=light.cluster,
        trainer=TRAINERS["torchtitan"],
    )
    for schedule, vpp in EXACT[:-1]:
        layout = Layout(pp=4, dp=2, num_microbatches=32, schedule=schedule, vpp=min(vpp, 2), zero=2)
        found = priced(light, layout)
        refined = refine(light.workload, light.cluster, light.trainer, [layout], [found])[0]
        assert refined.step_time[0] == pytest.approx(found.step_time[0], rel=0.01)


def test_slow_gpus_of_a_waiting_stage_hold_nobody_up() -> None:
    """Against rates drawn at random, 512 GPUs of 64 stages whose last takes 0 to 8 % longer than the others; over a node."""
    sigma, draws = RATE_SPREAD, np.random.default_rng(1).standard_normal((2000, 64, 8))
    node = draws[:, 0].max(axis=-1).mean()
    for more in (0.0, 0.01, 0.03, 0.08):
        seconds = np.array([[1.0], [1.0], [1.0 + more]]) / (1.0 + more)
        found = stage_straggling(np.array([512.0]), np.array([64.0]), seconds, np.ones(1))[0]
        pace = np.append(np.full(63, seconds[0, 0]), 1.0)
        drawn = (pace * (1.0 + sigma * (draws.max(axis=-1) - node))).max(axis=-1).mean() - 1.0
        assert found == pytest.approx(drawn, abs=0.0015)
        assert more > 0 or found == pytest.approx(straggling(512))
    assert stage_straggling(np.array([64.0]), np.ones(1), np.ones((3, 1)), np.ones(1)) == pytest.approx(straggling(64))


def test_whole_sends_carry_the_whole_tensor_of_every_rank() -> None:
    """T h w by each of 4 ranks without sequence parallelism, T h w / 4 with it; twice per microbatch, across nodes."""
    one = job("gqa", "megatron-2021", gpus=16, hardware="a100-sxm-80gb")
    plain, whole = one.trainer.replace(terms={}), one.trainer.replace(terms={"aleph_alpha": {}})
    layout = Layout(tp=4, dp=2, pp=2, num_microbatches=16)
    sent = {
        name: float(priced(dataclasses.replace(one, trainer=trainer), layout.replace(sequence_parallel=split)).time[
            "pipeline_communication"][0]) / 32
        for name, trainer, split in (("whole", whole, 0), ("split", whole, 1), ("gathered", plain, 0))
    }  # fmt: skip
    tensor = 4096 * 1024 * 2
    assert sent["whole"] == pytest.approx(float(one.cluster.collective_time("send_recv", tensor, 2, 8)))
    assert sent["split"] == pytest.approx(float(one.cluster.collective_time("send_recv", tensor / 4, 2, 8)))
    assert sent["split"] < sent["gathered"] < sent["whole"]


def test_a_pipeline_that_runs_empty_twice_idles_twice() -> None:
    """16 microbatches of a step in calls of 8: two bubbles, closed and walked, and 8 microbatches alone in flight with GPipe."""
    one = job("gqa", "automodel", batch=64)
    twice = dataclasses.replace(one, trainer=one.trainer.with_facts({"terms": {"automodel": {"local_batch": 8}}}))
    layout = Layout(pp=2, dp=4, num_microbatches=16, zero=1)
    found = [priced(each, layout) for each in (one, twice)]
    assert found[1].time["bubble"][0] == pytest.approx(2 * found[0].time["bubble"][0])
    assert found[1].time["compute"][0] == found[0].time["compute"][0]
    walked = [
        refine(each.workload, each.cluster, each.trainer, [layout], [was])[0]
        for each, was in zip((one, twice), found, strict=True)
    ]
    assert walked[1].time["bubble"][0] == pytest.approx(2 * walked[0].time["bubble"][0], rel=1e-6)
    gpipe = layout.replace(schedule=Schedule.GPIPE)
    stored = [priced(each, gpipe).memory["activations"][0] for each in (one, twice)]
    assert stored[1] < 0.6 * stored[0]


def test_refinement_sees_uneven_stages() -> None:
    """A heavy head on the last stage: the walk pays for it once per microbatch, and lighter ends get that back."""
    heavy = job("gqa", batch=64)
    even, lighter = (
        Layout(
            pp=2,
            dp=4,
            num_microbatches=16,
            zero=1,
            first_stage_layers=first,
            last_stage_layers=8 - first if first else 0,
        )
        for first in (0, 5)
    )
    found = [priced(heavy, one) for one in (even, lighter)]
    refined = refine(heavy.workload, heavy.cluster, heavy.trainer, [even, lighter], found)
    assert refined[1].step_time[0] < refined[0].step_time[0]
    assert all(one.time["bubble"][0] >= 0 for one in refined)


def test_prediction_modules_count_on_the_last_stage() -> None:
    """DeepSeek's extra layer makes the last stage longer in the walk as in the closed form."""
    one = job("mla", batch=64)
    layout = Layout.stack([Layout(pp=2, dp=4, num_microbatches=16, zero=1)])
    stages, times = StageTable(one.workload, one.cluster, one.trainer, layout).content(0)
    found = durations(one.workload, layout.row(0), stages, times)
    assert found.forward[1] == pytest.approx(float(times.forward[2, 0]))
    assert found.backward[0] == pytest.approx(float(times.backward[0, 0]))


def test_ends_lack_layers_in_their_end_chunks() -> None:
    """Ends of 2, others of 3 layers in 3 chunks: the first rank's first chunk and the last rank's last one are empty."""
    shares = _chunk_shares(np.array([2.0, 3.0, 2.0]), 3)
    assert shares.tolist() == [[0.0, 1 / 3, 0.5], [0.5, 1 / 3, 0.5], [0.5, 1 / 3, 0.0]]
    assert _chunk_shares(np.array([4.0, 6.0, 4.0]), 2).tolist() == [[0.5] * 3] * 2, "even where they divide"
    assert _chunk_shares(np.array([3.0, 4.0, 3.0]), 2).tolist() == [[1 / 3, 0.5, 2 / 3], [2 / 3, 0.5, 1 / 3]]
    assert _chunk_shares(np.array([1.0, 3.0, 1.0]), 3).tolist() == [[0, 1 / 3, 1], [0, 1 / 3, 0], [1, 1 / 3, 0]]
    assert np.allclose(_chunk_shares(np.array([5.0, 7.0, 7.0, 6.0]), 4).sum(axis=0), 1.0)


@pytest.mark.parametrize("send", [0.0, 0.3, "each"])
@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 2), (2, 3, 3), (3, 2, 9), (4, 4, 8), (4, 2, 10), (8, 3, 8)])
def test_interleaved_waves_are_the_walk(pp: int, vpp: int, m: int, send: float | str) -> None:
    """Ranks that wait for nothing of each other are walked at once: to the last bit what one action after the other gives."""
    rng = np.random.default_rng(pp * vpp * m)
    seconds = StageDurations(*(rng.uniform(0.1, 2.0, pp * vpp) for _ in range(2)), np.zeros(pp * vpp))
    hops = rng.uniform(0.0, 0.5, pp * vpp - 1).tolist() if send == "each" else send
    whole = max(span.end for span in walk(Schedule.INTERLEAVED, pp, vpp, m, seconds, hops))
    assert _in_chunks(pp, vpp, m, seconds, hops) == whole

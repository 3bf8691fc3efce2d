"""Every equation of the schedules at one point by hand, and the two times of a schedule: closed form and walk."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from samples import TRAINERS, job, priced

from planner.cost import refine as refining
from planner.cost.pipeline.schedule_walk import actions, walk, walked_time
from planner.cost.pipeline.schedules import (
    EQUATIONS,
    flight_columns,
    in_flight,
    interleave_waits,
    pipeline_time,
    sends_overlap,
    waiting_weights,
)
from planner.layout import Layout, Schedule, is_v_shaped
from planner.search import Pins, search

VPP = {schedule: 2 if is_v_shaped(schedule) else 1 for schedule in Schedule} | {Schedule.INTERLEAVED: 2}
UNEQUAL, EQUAL, SHORT, WEIGHTY = (1.0, 2.6, 0.4), (1.0, 2.0, 1.0), (1.0, 2.2, 0.9), (1.0, 5.0, 4.0)
"""Seconds F, B with W, and W of a microbatch."""


def closed(schedule: int, pp: int, vpp: int, m: int, seconds: tuple[float, float, float]) -> float:
    layout = Layout(pp=pp, vpp=vpp, num_microbatches=m, schedule=schedule)
    forward, backward, weight = (np.full(1, one) for one in seconds)
    return float(pipeline_time(layout, forward, backward, weight, pp * (forward + backward))[0])


def walked(schedule: int, pp: int, vpp: int, m: int, seconds: tuple[float, float, float]) -> float:
    forward, backward, weight = (np.full(pp * vpp, one / vpp) for one in seconds)
    return walked_time(schedule, pp, vpp, m, (forward, backward, weight))


@pytest.mark.parametrize(
    ("schedule", "m", "seconds", "idle", "walk"),
    [
        (Schedule.GPIPE, 8, UNEQUAL, 3 * 3.6, 39.6),
        (Schedule.ONE_F_ONE_B, 8, UNEQUAL, 3 * 3.6, 39.6),
        (Schedule.ONE_F_ONE_B, 2, UNEQUAL, 3 * 3.6, 18.0),
        (Schedule.INTERLEAVED, 8, UNEQUAL, 3 * 3.6 / 2, 34.2),
        (Schedule.INTERLEAVED, 2, UNEQUAL, 3 * 3.6 / 2 + 2 * 3.6 / 2, 16.2),
        (Schedule.ZB_H1, 8, UNEQUAL, 3 * (3.6 - 0.8), 37.2),
        (Schedule.ZB_H1, 2, UNEQUAL, 3 * (3.6 - 0.8) + 2 * 0.4, 16.4),
        (Schedule.ZB_H1, 8, WEIGHTY, 0.0, None),
        (Schedule.ZB_2P, 16, UNEQUAL, 3 * (3.6 - 1.2), 64.8),
        (Schedule.ZB_2P, 2, UNEQUAL, 3 * (3.6 - 1.2) + 2 * 0.4, None),
        (Schedule.ZB_2P, 2, WEIGHTY, 2 * 4.0, None),
        (Schedule.ZBV, 8, UNEQUAL, 3 * (3.6 - 1.2), None),
        (
            Schedule.ZBV,
            8,
            EQUAL,
            0.0,
            24.0 + 3 * 0.5,
        ),  # the last rank waits for p - 1 forward passes of half its layers
        (Schedule.ZBV, 2, EQUAL, 4 * (3.0 - 1.0) - 2 * 3.0, None),
        (Schedule.ZBV, 8, WEIGHTY, 0.0, None),
        (Schedule.DUALPIPE_V, 8, UNEQUAL, 1.5 * (3.6 + 2.6 - 1.2), None),
        (Schedule.DUALPIPE_V, 8, EQUAL, 1.5 * (3.0 + 2.0 - 3.0), 27.0),
        (Schedule.DUALPIPE_V, 1, EQUAL, 4 * (3.0 - 1.0) - 3.0, None),
    ],
)
def test_idle_seconds_by_hand(
    schedule: int, m: int, seconds: tuple[float, float, float], idle: float, walk: float | None
) -> None:
    """p = 4, of the papers that the table names; walks of the whole step where the paper's steps are whole."""
    pp, vpp = 4, VPP[Schedule(schedule)]
    assert closed(schedule, pp, vpp, m, seconds) == pytest.approx(m * (seconds[0] + seconds[1]) + idle)
    if walk is not None:
        assert walked(schedule, pp, vpp, m, seconds) == pytest.approx(walk)


@pytest.mark.parametrize(
    ("schedule", "m", "flights", "waiting"),
    [
        (Schedule.GPIPE, 8, [8, 8, 8, 8], [0, 0, 0, 0]),
        (Schedule.ONE_F_ONE_B, 8, [4, 3, 2, 1], [0, 0, 0, 0]),
        (Schedule.ONE_F_ONE_B, 2, [2, 2, 2, 1], [0, 0, 0, 0]),
        (Schedule.INTERLEAVED, 8, [5.5, 4.5, 3.5, 2.5], [0, 0, 0, 0]),
        (Schedule.INTERLEAVED, 6, [6, 5.5, 4.5, 3.5], [0, 0, 0, 0]),
        (Schedule.INTERLEAVED, 2, [2, 2, 2, 1.5], [0, 0, 0, 0]),
        (Schedule.ZB_H1, 8, [4, 3, 2, 1], [0, 0, 0, 0]),
        (Schedule.ZB_2P, 16, [8, 8, 8, 8], [0, 0, 0, 0]),
        (Schedule.ZB_2P, 6, [6, 6, 6, 6], [0, 0, 0, 0]),
        (Schedule.ZBV, 8, [4, 4, 4, 4], [0.5, 1.5, 2.5, 3.5]),
        (Schedule.ZBV, 5, [4, 4, 4, 4], [0.5, 1.5, 1.5, 1.5]),
        (Schedule.ZBV, 3, [3, 3, 3, 3], [0.5, 0.5, 0.5, 0.5]),
        (Schedule.DUALPIPE_V, 8, [4.5, 4.5, 4.5, 4.5], [0.5, 1, 1.5, 2]),
        (Schedule.DUALPIPE_V, 4, [4, 4, 4, 4], [0.5, 1, 1.5, 2]),
    ],
)
def test_microbatches_in_flight_by_hand(schedule: int, m: int, flights: list[float], waiting: list[float]) -> None:
    """p = 4, ranks 0 to 3; alone, and in a column with a candidate of every other schedule."""
    ranks, layout = (
        np.arange(4.0)[None],
        Layout(pp=4, vpp=VPP[Schedule(schedule)], num_microbatches=m, schedule=schedule),
    )
    assert in_flight(layout, ranks).tolist() == [flights]
    assert np.broadcast_to(waiting_weights(layout, ranks), (1, 4)).tolist() == [waiting]
    column = Layout.stack([layout, *(layout.replace(schedule=one, vpp=VPP[one]) for one in Schedule)])
    assert in_flight(column, np.repeat(ranks, 8, axis=0))[0].tolist() == flights
    assert waiting_weights(column, np.repeat(ranks, 8, axis=0))[0].tolist() == waiting


@pytest.mark.parametrize(
    ("fields", "flights", "share", "logits"),
    [
        ({"pp": 1, "num_microbatches": 2}, [1, 1, 1], [1, 1, 1], 1),
        ({"pp": 1, "num_microbatches": 1}, [0, 0, 0], [0, 0, 0], 1),
        ({"pp": 1, "num_microbatches": 8, "schedule": Schedule.DUALPIPE_V}, [1, 1, 1], [1, 1, 1], 1),
        ({"pp": 4, "num_microbatches": 4}, [3, 3, 1], [0, 1, 1], 1),
        ({"pp": 4, "num_microbatches": 32}, [4, 3, 1], [1, 1, 1], 1),
        ({"pp": 4, "num_microbatches": 4, "schedule": Schedule.GPIPE}, [3, 3, 3], [0, 0, 0], 4),
        ({"pp": 4, "num_microbatches": 6, "vpp": 4, "schedule": Schedule.INTERLEAVED}, [2.75] * 3, [0, 0.25, 0.5], 1),
    ],
)
def test_gradients_in_flight_by_hand(
    fields: dict[str, int], flights: list[float], share: list[float], logits: int
) -> None:
    """Stages 0, 1 and p - 1. Interleaved: m - ((v - 1) p + 1) / v = 6 - 13 / 4; on the last of 4.75 in flight, 1.25 are
    through: 5 passes of one chunk, 2 chunks' gradients begun."""
    position = np.array([[0.0, 1.0, 3.0]]) * (fields["pp"] > 1)
    found = flight_columns(Layout(**fields), position)
    assert found["accumulated_flight"][:, 0].tolist() == flights
    if fields["pp"] == 1:
        assert found["in_flight"][:, 0].tolist() == [1] * 3
        assert found["waiting_weights"].max() == 0
    assert np.broadcast_to(found["accumulated_share"], (3, 1))[:, 0].tolist() == share
    assert found["logits_held"][:, 0].tolist() == [logits] * 3


def test_sends_by_hand() -> None:
    """Overlapped sends of interleaved pipelines alone: (2 x 4 x 2 - 2) / 2 = 7 of a microbatch's are waited for."""
    overlaps = TRAINERS["megatron"].replace(overlap=frozenset({"pipeline"}))
    for schedule, vpp, pp, waits in ((Schedule.INTERLEAVED, 2, 4, 7.0), (Schedule.ONE_F_ONE_B, 1, 4, 0.0)):
        layout = Layout(pp=pp, vpp=vpp, num_microbatches=8, schedule=schedule)
        assert interleave_waits(layout, np.ones(1)).tolist() == [waits]
        assert float(sends_overlap(overlaps, layout)) == (waits > 0)
        assert float(sends_overlap(overlaps.replace(overlap=frozenset()), layout)) == 0.0


@pytest.mark.parametrize("schedule", Schedule)
def test_closed_form_and_walk_agree(schedule: Schedule) -> None:
    """Equal stages, p 1 to 8, m from p to 4 p: exact, or within one forward pass for each rank but the first (V shapes and
    zb_2p, whose papers have the steady state, while a step starts and ends at a barrier); with W no longer than F and I."""
    assert (EQUATIONS[schedule].spread > 0) == (schedule == Schedule.ZB_2P or is_v_shaped(schedule))
    for vpp in (2, 4) if schedule == Schedule.INTERLEAVED else (VPP[schedule],):
        for pp in range(1, 9):
            for m in range(2 * pp if schedule == Schedule.DUALPIPE_V else pp, 4 * pp + 1):
                if schedule == Schedule.INTERLEAVED and m % (m // pp):
                    continue
                for seconds in (UNEQUAL, EQUAL, SHORT):
                    form, walk = (time(schedule, pp, vpp, m, seconds) for time in (closed, walked))
                    room = (pp - 1) * seconds[0] * EQUATIONS[schedule].spread + 1e-9 * walk
                    assert abs(walk - form) <= room, f"p {pp}, v {vpp}, m {m}, {seconds}"


def test_the_walk_is_printed_and_the_closed_form_has_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that is 25 % longer moves the bubble by as much; a closed form or a walk that is 25 % off is an error, of a search
    as well. Without that check the closed form would not move what is printed."""
    one = job("gqa", batch=64)
    layout = Layout(pp=4, dp=2, num_microbatches=32, zero=1)
    found = priced(one, layout)

    def bubble() -> float:
        refining.check_closed_form.cache_clear()
        return float(refining.refine(one.workload, one.cluster, one.trainer, [layout], [found])[0].time["bubble"][0])

    before, times = bubble(), []
    plain = EQUATIONS[Schedule.ONE_F_ONE_B]
    wrong = dataclasses.replace(plain, idle=lambda n, s: 1.25 * plain.idle(n, s))
    with monkeypatch.context() as patch:
        patch.setitem(EQUATIONS, Schedule.ONE_F_ONE_B, wrong)
        with pytest.raises(AssertionError, match="ONE_F_ONE_B, pp 4, vpp 1: closed form 37.6, walked 35.2"):
            bubble()
        with pytest.raises(AssertionError, match="ONE_F_ONE_B"):
            search(one, Pins(values={"pp": 4, "schedule": int(Schedule.ONE_F_ONE_B), "vpp": 1}))
        patch.setattr(refining, "check_closed_form", lambda schedule, pp, vpp: None)
        patch.setattr(refining.check_closed_form, "cache_clear", lambda: None, raising=False)
        assert bubble() == before
    with monkeypatch.context() as patch:
        patch.setattr(refining, "walked_time", lambda *values: 1.25 * walked_time(*values))
        with pytest.raises(AssertionError, match="walked"):
            bubble()

        def longer(*values: Any) -> float:
            times.append(walked_time(*values))
            return times[-1] if len(times) == 1 else 1.25 * times[-1]  # the first is the check's

        patch.setattr(refining, "walked_time", longer)
        assert bubble() - before == pytest.approx(0.25 * times[-1])
    assert bubble() == before


def test_1f1b_walked_in_pairs_is_the_walk_of_its_order() -> None:
    """To the last bit, with unequal stages and sends, also with fewer microbatches than stages."""
    rng = np.random.default_rng(5)
    for pp, m in ((1, 3), (2, 1), (3, 2), (4, 4), (5, 9), (7, 40)):
        seconds = rng.uniform(0.5, 3.0, (2, pp))
        for send in (0.0, 0.3, rng.uniform(0.0, 1.0, pp).tolist()):
            values = (Schedule.ONE_F_ONE_B, pp, 1, m, (*seconds, np.zeros(pp)), send)
            assert walked_time(*values) == max(span.end for span in walk(*values))


@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("first", [0.5, 1.7])
def test_unequal_virtual_stages_in_flight_are_the_walk(vpp: int, first: float) -> None:
    """Bytes in flight along the order of every rank, whose first virtual stage saves ``first`` and the others 1 each."""
    for pp, rounds in itertools.product((2, 3, 4, 6), (0.5, 1.0, 1.4, 2.0, 3.5)):
        m = max(int(pp * rounds), 1)
        layout = Layout.stack([Layout(pp=pp, vpp=vpp, num_microbatches=m, schedule=Schedule.INTERLEAVED)])
        if m % max(m // pp, 1):
            continue
        for rank, order in enumerate(actions(Schedule.INTERLEAVED, pp, vpp, m)):
            changes = [(first if stage < pp else 1.0) * (1 if kind == "F" else -1) for stage, kind, _ in order]
            found = flight_columns(layout, np.full((1, 3), float(rank)))
            passes = found["first_chunk_most" if first > 1.0 else "first_chunk_least"][0, 0]
            said = found["in_flight"][0, 0] * (first + vpp - 1.0) + passes * (first - 1.0)
            assert said == pytest.approx(max(itertools.accumulate(changes))), f"p {pp}, m {m}, rank {rank}"

"""Pipeline schedules in closed form: idle time, microbatches in flight and waiting gradients, one entry for each schedule.

The closed form ranks: every candidate of a search is priced with it. What is printed is the walk of the schedule, action by
action (``schedule_walk``): ``cost.refine`` puts its idle time in place of the closed form's for finalists and given layouts,
and stops when the closed form and the walk of equal stages disagree.

Sources: [Narayanan 2021] arXiv 2104.04473, [Korthikanti 2022] arXiv 2205.05198, [Qi 2024] arXiv 2401.10241, [DeepSeek-V3]
arXiv 2412.19437, [DualPipe] github.com/deepseek-ai/DualPipe, [torch 2.13] torch.distributed.pipelining.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats
from planner.layout import Column, Layout, Schedule
from planner.record import record
from planner.trainer import Trainer


class Shape(NamedTuple):
    """p pipeline ranks with v virtual stages each (2 in V shapes, else 1 without interleaving), and m microbatches."""

    p: Floats
    v: Floats
    m: Floats


class Seconds(NamedTuple):
    """One microbatch: ``both`` F + B, ``b`` B (with W and recompute) and ``w`` W (weight gradients) of the slowest stage, and
    ``others``, F + B of the other p - 1 stages together."""

    both: Floats
    b: Floats
    w: Floats
    others: Floats


@record
class Equations:
    """Closed forms of one schedule; i is the number of a stage."""

    idle: Callable[[Shape, Seconds], Floats]
    """Seconds from the first forward to the last backward pass beyond the m (F + B) of the slowest stage."""
    in_flight: Callable[[Shape, Floats], Floats]
    """Microbatches (of all the layers of rank i) that wait for their backward pass at the peak."""
    waiting: Callable[[Shape, Floats], Floats] = lambda n, i: 0.0 * i
    """Microbatches (likewise) at the most whose weight gradients come later than their input gradients."""
    spread: float = 0.0
    """Forward passes per rank but the first by which the walk of equal stages may differ from the closed form."""


def _few(n: Shape) -> Floats:
    """Microbatches that are missing to fill the pipeline, max(p - m, 0)."""
    return np.maximum(n.p - n.m, 0.0)


def _round(n: Shape) -> Floats:
    """Microbatches of a round of interleaved stages: p, m / (m // p) where p does not divide m.  [torch 2.13]"""
    return n.m / np.maximum(n.m // n.p, 1.0)


def _round_trip(n: Shape, s: Seconds) -> Floats:
    """Idle seconds with few microbatches in a V: the first one takes p (F + B - W) forth and back."""
    return np.maximum(n.p * (s.both - s.w) - n.m * s.both, 0.0)


EQUATIONS: dict[Schedule, Equations] = {
    Schedule.GPIPE: Equations(
        idle=lambda n, s: s.others,  # (p - 1)(F + B)  [Narayanan 2021, section 2.2.1]
        in_flight=lambda n, i: n.m,
    ),
    Schedule.ONE_F_ONE_B: Equations(
        idle=lambda n, s: s.others,  # (p - 1)(F + B)  [Narayanan 2021, section 2.2.1]
        in_flight=lambda n, i: np.minimum(n.m, n.p - i),
    ),
    # (p - 1)(F + B) / v; with m < p too few to keep all virtual stages of a rank apart  [Narayanan 2021, section 2.2.2]
    # In flight: Megatron's warm-up in rounds of g = p; g = m / max(1, m // p) where p does not divide m  [torch 2.13].
    # At i = 0 with g = p: p (1 + (p - 1) / (p v))  [Korthikanti 2022, section 4.2.3]
    Schedule.INTERLEAVED: Equations(
        idle=lambda n, s: s.others / n.v + _few(n) * s.both * (1.0 - 1.0 / n.v),
        in_flight=lambda n, i: (
            np.minimum(n.m * n.v, 2.0 * (n.p - i - 1.0) + (n.v - 1.0) * _round(n) + 1.0) / n.v
        ),
    ),
    # (p - 1)(F + B - 2 W); with m < p too few weight gradients to fill the gaps  [Qi 2024, table 2, B including W]
    Schedule.ZB_H1: Equations(
        idle=lambda n, s: np.maximum((n.p - 1.0) * (s.both - 2.0 * s.w) + _few(n) * s.w, 0.0),
        in_flight=lambda n, i: np.minimum(n.m, n.p - i),
    ),
    # (p - 1)(F + B - 3 W); in flight 2 p on every rank, the limit it is made for  [Qi 2024, table 2: ZB-H2, and section 4.1]
    Schedule.ZB_2P: Equations(
        idle=lambda n, s: np.maximum((n.p - 1.0) * (s.both - 3.0 * s.w), 0.0) + _few(n) * s.w,
        in_flight=lambda n, i: np.minimum(n.m, 2.0 * n.p),
        spread=1.0,
    ),
    # (p - 1)(F + B - 3 W); in flight the same on every rank  [Qi 2024, section 6]; waiting: orders of torch 2.13, p 2, 4, 8
    Schedule.ZBV: Equations(
        idle=lambda n, s: np.maximum((n.p - 1.0) * (s.both - 3.0 * s.w), _round_trip(n, s)),
        in_flight=lambda n, i: np.minimum(n.m, n.p),
        waiting=lambda n, i: np.minimum(i + 0.5, np.maximum(n.m - n.p, 0.0) + 0.5),
        spread=1.0,
    ),
    # (P / 2 - 1)(F&B + B - 3 W) of P = 2 p stages of half a rank's layers  [DeepSeek-V3, table 2]; in flight P + 1 of them
    # [DualPipe, memory table]; waiting: orders of torch 2.13, p 2, 4, 8 and m from p to 4 p
    Schedule.DUALPIPE_V: Equations(
        idle=lambda n, s: np.maximum((n.p - 1.0) / 2.0 * (s.both + s.b - 3.0 * s.w), _round_trip(n, s)),
        in_flight=lambda n, i: np.minimum(n.m, n.p + 0.5),
        waiting=lambda n, i: (i + 1.0) / 2.0,
        spread=1.0,
    ),
}


def _evaluate(schedule: Column, equation: Callable[[Equations], Floats]) -> Floats:
    """One equation for every candidate, from the entry of its schedule; only of the schedules that occur."""
    occurring = [one for one in Schedule if np.any(schedule == one)]
    result = equation(EQUATIONS[occurring[0]])
    for one in occurring[1:]:
        result = np.where(schedule == one, equation(EQUATIONS[one]), result)
    return result


def in_flight(layout: Layout, position: Floats) -> Floats:
    """Microbatches (of all the layers of a rank) that wait for their backward pass at the peak on stages ``position``, (N, 3)."""
    schedule, shape = _columns(layout)
    found = _evaluate(schedule, lambda one: one.in_flight(shape, position))
    return np.where(shape.p * np.ones_like(position) == 1, 1.0, found)


def waiting_weights(layout: Layout, position: Floats) -> Floats:
    """Microbatches (likewise) at the most whose weight gradients wait after their input gradients, (N, 3)."""
    schedule, shape = _columns(layout)
    return np.where(shape.p == 1, 0.0, _evaluate(schedule, lambda one: one.waiting(shape, position)))


def flight_columns(layout: Layout, position: Floats) -> dict[str, Floats]:
    """Microbatches in flight, and which gradients there are meanwhile; (stages, N).

    accumulated_flight: microbatches in flight when all gradients are there, which is so for all v chunks after
    (v - 1) p + 1 backward passes of one chunk each; accumulated_share: share of the gradients that is there when most are in
    flight, as the last forward pass finds (m - k) of m microbatches through; logits_held: microbatches whose logits wait on
    the last stage, all of GPipe's, whose forward passes come first; first_chunk_least, first_chunk_most: microbatches of the
    first virtual stage in flight beyond those, where stages are interleaved. Of K = v in_flight passes the warm-up gives it the
    first of every round of g; then its forward passes start 2 (p - i) - 1 + (v - 2) g passes before its backward ones.
    """
    schedule, shape = _columns(layout)
    (p, v, m), rounds = shape, _round(shape)
    flights = in_flight(layout, position)
    chunks = np.where(schedule == Schedule.INTERLEAVED, v, 1.0)
    there = np.maximum(m - ((chunks - 1.0) * p + 1.0) / chunks, 0.0)
    share = np.minimum(np.ceil(np.maximum(m - flights, 0.0) * chunks / p) / chunks, 1.0)
    interleaved, ahead = (schedule == Schedule.INTERLEAVED) & (v > 1) & (p > 1), 2.0 * (p - position) - 1.0
    least, most = np.maximum(ahead - rounds, 0.0), np.minimum(ahead + (v - 2.0) * rounds, rounds)
    least, most = (np.where(interleaved, np.minimum(rounds + one, m) - flights, 0.0) for one in (least, most))
    columns = {
        "in_flight": flights,
        "first_chunk_least": least,
        "first_chunk_most": most,
        "accumulated_flight": np.minimum(flights, there),
        "accumulated_share": np.where(p == 1, (m > 1).astype(float), share),
        "logits_held": np.broadcast_to(np.where((schedule == Schedule.GPIPE) & (p > 1), m, 1.0), flights.shape),
        "waiting_weights": waiting_weights(layout, position),
    }
    return {name: np.ascontiguousarray(one.T) for name, one in columns.items()}


def pipeline_time(layout: Layout, forward: Floats, backward: Floats, weight: Floats, total: Floats) -> Floats:
    """Seconds from the first forward to the last backward pass, m (F + B) of the slowest stage + idle; shape (N,).

    ``forward``, ``backward`` (input and weight gradients, recompute) and ``weight`` (weight gradients alone) are seconds
    per microbatch of the slowest stage; ``total`` is forward + backward summed over all p stages.
    """
    schedule, shape = np.asarray(layout.schedule), Shape(*(one[..., 0] for one in _columns(layout)[1]))
    slowest = forward + backward
    seconds = Seconds(slowest, backward, weight, total - slowest)
    idle = _evaluate(schedule, lambda one: one.idle(shape, seconds))
    return shape.m * slowest + np.where(shape.p == 1, 0.0, idle)


def sends_overlap(trainer: Trainer, layout: Layout) -> Floats:
    """1 where sends overlap with computation, else 0: interleaved schedules of trainers that do so.

    Megatron switches --overlap-p2p-communication off for schedules without virtual stages.  [megatron/training/arguments.py]
    """
    interleaved = np.asarray(layout.schedule) == Schedule.INTERLEAVED
    return np.asarray(interleaved & ("pipeline" in trainer.traffic.overlap), dtype=float)


def interleave_waits(layout: Layout, send: Floats) -> Floats:
    """Seconds that an interleaved pipeline waits for sends that overlap with computation, (2 p v - 2) send / v; shape (N,).

    ``send`` is the seconds of a microbatch's v sends in one direction. A round of p microbatches is back on its first rank
    after p passes and p sends, and the rank has p passes of the round to do meanwhile: the sends remain, once for each of
    the v chunks on the way in and once on the way out, whatever m is. In between a rank has passes of both directions to
    choose from. Equal to ``schedule_walk.walk`` with that delay (a test).
    """
    schedule, (p, v, _) = _columns(layout)
    waits = (2.0 * p * v - 2.0)[..., 0] * send / v[..., 0]
    return np.where(((schedule == Schedule.INTERLEAVED) & (p > 1))[..., 0], waits, 0.0)


def _columns(layout: Layout) -> tuple[Column, Shape]:
    """Schedule, and p, v and m as float columns; all of shape (N, 1)."""
    shape = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (layout.pp, layout.vpp, layout.num_microbatches)))
    return np.asarray(layout.schedule)[..., None], Shape(*(one[..., None] for one in shape))

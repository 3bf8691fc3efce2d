"""Pipeline schedules: how many microbatches are in flight, and how long a step takes, in closed form."""

from __future__ import annotations

import numpy as np

from planner.arrays import Floats
from planner.layout import Layout, Schedule
from planner.trainer import Trainer


def is_v_shaped(layout: Layout) -> Floats:
    """1 where rank 0 holds the first and the last stage (zbv, dualpipe_v), else 0."""
    schedule = np.asarray(layout.schedule)
    return ((schedule == Schedule.ZBV) | (schedule == Schedule.DUALPIPE_V)).astype(float)


def in_flight(layout: Layout, position: Floats) -> Floats:
    """Microbatches (of all the layers of a rank) that wait for their backward pass at the peak, shape (N, 3).

    ``position`` is the stage number i of the three stages, shape (N, 3).

    gpipe          m
    1f1b, zb_h1    min(m, p - i)                                            [Narayanan 2021, section 2.2]
    interleaved    min(m v, 2 (p - i - 1) + (v - 1) g + 1) / v              [Megatron warm-up microbatches]
                   g microbatches in a round: p, or m / max(1, m // p) where p does not divide m  [torch pipelining]
                   at i = 0: p (1 + (p - 1) / (p v))                        [Korthikanti 2022, section 4.2.3]
    zb_2p          min(m, 2 p) on every rank: the limit the schedule is made for        [Qi 2024, section 4.1, ZB-2p]
    zbv            min(m, p): the same on every rank                        [Qi 2024, section 6]
    dualpipe_v     min(m, p + 1/2): P + 1 of the P = 2 p stages             [DeepSeek, DualPipe, memory table]
    """
    pp, vpp, m = _columns(layout)
    schedule = np.asarray(layout.schedule)[..., None]
    plain = np.minimum(m, pp - position)
    chunks = 2.0 * (pp - position - 1.0) + (vpp - 1.0) * m / np.maximum(m // pp, 1.0) + 1.0
    result = np.where(schedule == Schedule.INTERLEAVED, np.minimum(m * vpp, chunks) / vpp, plain)
    result = np.where(schedule == Schedule.GPIPE, m, result)
    result = np.where(schedule == Schedule.ZB_2P, np.minimum(m, 2.0 * pp), result)
    result = np.where(schedule == Schedule.ZBV, np.minimum(m, pp), result)
    result = np.where(schedule == Schedule.DUALPIPE_V, np.minimum(m, pp + 0.5), result)
    return np.where(pp == 1, 1.0, result)


def accumulating(layout: Layout, flights: Floats) -> tuple[Floats, Floats, Floats]:
    """Gradients beside activations, each (N, 3): microbatches in flight when all gradients are there, the share of gradients
    that is there when most are in flight, and microbatches whose logits wait on the last stage.

    The last forward pass finds (m - k) of m microbatches through; gradients of all v chunks are there after
    (v - 1) p + 1 backward passes of one chunk each. GPipe's forward passes all come first, so all logits wait.
    """
    pp, vpp, m = _columns(layout)
    schedule = np.asarray(layout.schedule)[..., None]
    chunks = np.where(schedule == Schedule.INTERLEAVED, vpp, 1.0)
    there = np.maximum(m - ((chunks - 1.0) * pp + 1.0) / chunks, 0.0)
    share = np.minimum(np.ceil(np.maximum(m - flights, 0.0) * chunks / pp) / chunks, 1.0)
    share = np.where(pp == 1, (m > 1).astype(float), share)
    logits = np.where((schedule == Schedule.GPIPE) & (pp > 1), m, 1.0)
    return np.minimum(flights, there), share, np.broadcast_to(logits, flights.shape)


def waiting_weights(layout: Layout, position: Floats) -> Floats:
    """Microbatches (of all the layers of a rank) at the most whose weight gradients wait after the input gradients, (N, 3).

    zbv         (2 i + 1) / 2, at most m - p + 1/2        dualpipe_v  (i + 1) / 2
    [torch 2.13, orders of ScheduleZBVZeroBubble and ScheduleDualPipeV for p of 2, 4, 8 and m from p to 4 p]
    """
    pp, _, m = _columns(layout)
    schedule = np.asarray(layout.schedule)[..., None]
    zbv = np.minimum(position + 0.5, np.maximum(m - pp, 0.0) + 0.5)
    result = np.where(schedule == Schedule.ZBV, zbv, 0.0)
    result = np.where(schedule == Schedule.DUALPIPE_V, (position + 1.0) / 2.0, result)
    return np.where(pp == 1, 0.0, result)


def flight_columns(layout: Layout, position: Floats) -> dict[str, Floats]:
    """Microbatches in flight, and which gradients there are meanwhile; (stages, N)."""
    flights = in_flight(layout, position)
    values = (flights, *accumulating(layout, flights), waiting_weights(layout, position))
    names = ("in_flight", "accumulated_flight", "accumulated_share", "logits_held", "waiting_weights")
    return {name: np.ascontiguousarray(one.T) for name, one in zip(names, values, strict=True)}


def pipeline_time(layout: Layout, forward: Floats, backward: Floats, weight: Floats, total: Floats) -> Floats:
    """Seconds from the first forward to the last backward pass, shape (N,).

    ``forward``, ``backward`` (input and weight gradients, recompute) and ``weight`` (weight gradients alone) are seconds
    per microbatch of the slowest stage; ``total`` is forward + backward summed over all p stages.

    gpipe, 1f1b    (m - 1) max + sum                          = m max + (p - 1) max with equal stages
    interleaved    m max + (sum - max) / v                    [Narayanan 2021, section 2.2]
                   and (p - m) max (1 - 1/v) more with m < p: too few to keep all virtual stages of a rank apart
    zb_h1          m max + (p - 1) (F + B - 2 W), at least 0  [Qi 2024, table 2, with B including W]
                   and (p - m) W more with m < p: too few weight gradients to fill the gaps
    zb_2p          m max + (p - 1) (F + B - 3 W), at least 0, and (p - m) W more with m < p  [Qi 2024, table 2: ZB-H2]
    zbv            m max + (p - 1) (F + B - 3 W), at least 0  [Qi 2024, section 6]
    dualpipe_v     m max + (p - 1) / 2 (F + B + B - 3 W), at least 0    [DeepSeek-V3, table 2; its P = 2 p stages of
                   half a rank's layers each: (P / 2 - 1) of half the seconds]
    V shapes take at least p (F + B - W): the first microbatch forth and back, which counts with few microbatches.
    """
    schedule = np.asarray(layout.schedule)
    pp, vpp, m = (column[..., 0] for column in _columns(layout))
    slowest = forward + backward
    fill = total - slowest
    few = np.maximum(pp - m, 0.0)
    fill = np.where(schedule == Schedule.INTERLEAVED, fill / vpp + few * slowest * (1.0 - 1.0 / vpp), fill)
    h1 = np.maximum((pp - 1.0) * (slowest - 2.0 * weight) + few * weight, 0.0)
    fill = np.where(schedule == Schedule.ZB_H1, h1, fill)
    h2 = np.maximum((pp - 1.0) * (slowest - 3.0 * weight), 0.0) + few * weight
    fill = np.where(schedule == Schedule.ZB_2P, h2, fill)
    chain = np.maximum(pp * (slowest - weight) - m * slowest, 0.0)
    v_shaped = np.maximum((pp - 1.0) * (slowest - 3.0 * weight), chain)
    fill = np.where(schedule == Schedule.ZBV, v_shaped, fill)
    dual = np.maximum((pp - 1.0) / 2.0 * (slowest + backward - 3.0 * weight), chain)
    fill = np.where(schedule == Schedule.DUALPIPE_V, dual, fill)
    return m * slowest + np.where(pp == 1, 0.0, fill)


def sends_beside(trainer: Trainer, layout: Layout) -> Floats:
    """1 where sends run beside computation, else 0: interleaved schedules of trainers that overlap them.

    Megatron switches --overlap-p2p-communication off for schedules without virtual stages.  [megatron/training/arguments.py]
    """
    interleaved = (np.asarray(layout.schedule) == Schedule.INTERLEAVED) & (np.asarray(layout.vpp) > 1)
    return (interleaved & ("pipeline" in trainer.traffic.overlap)).astype(float)


def turns(layout: Layout, send: Floats) -> Floats:
    """Seconds that an interleaved pipeline waits for sends that run beside computation, shape (N,).

    (2 p v - 2) send / v; ``send`` is the seconds of a microbatch's v sends in one direction. A round of p microbatches is
    back on its first rank after p passes and p sends, and the rank has p passes of the round to do meanwhile: the sends
    remain, once for each of the v chunks on the way in and once on the way out, whatever m is. In between a rank has
    passes of both directions to choose from. Equal to ``timeline.walk`` with that delay (a test).
    """
    pp, vpp, _ = (column[..., 0] for column in _columns(layout))
    waits = (2.0 * pp * vpp - 2.0) * send / vpp
    interleaved = (np.asarray(layout.schedule) == Schedule.INTERLEAVED) & (pp > 1)
    return np.where(interleaved, waits, 0.0)


def _columns(layout: Layout) -> tuple[Floats, Floats, Floats]:
    """p, v and m as float columns of shape (N, 1)."""
    columns = np.broadcast_arrays(
        *(np.asarray(x, dtype=float) for x in (layout.pp, layout.vpp, layout.num_microbatches))
    )
    return columns[0][..., None], columns[1][..., None], columns[2][..., None]

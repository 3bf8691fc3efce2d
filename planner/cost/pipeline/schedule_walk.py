"""Walks a pipeline schedule with given durations: the exact step time of a finalist, stage by stage."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cost.pipeline.v_orders import Action, Group, v_order
from planner.layout import Schedule, is_v_shaped


class StageDurations(NamedTuple):
    """Seconds per microbatch of every (virtual) stage in model order, arrays of length p v; ``backward`` is I + W."""

    forward: Floats
    backward: Floats
    weight: Floats


Durations = StageDurations | tuple[Floats, Floats, Floats]


Sends = float | Sequence[float]


class Span(NamedTuple):
    """One action as it runs."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def stage_rank(stage: int, pp: int, schedule: int) -> int:
    """Pipeline rank that holds a stage: stage mod p; in V shape the second chunk runs backwards."""
    return 2 * pp - 1 - stage if is_v_shaped(schedule) and stage >= pp else stage % pp


@lru_cache(maxsize=256)
def orders(schedule: int, pp: int, vpp: int, m: int) -> tuple[tuple[Group, ...], ...]:
    """The order of actions on every rank, in the groups whose results leave it together: '2F0' is (2, 'F', 0). B = I + W;
    zero-bubble schedules issue I and W apart."""
    if schedule == Schedule.ZBV or (schedule == Schedule.DUALPIPE_V and m >= 2 * pp):
        return tuple(v_order(schedule, rank, pp, m) for rank in range(pp))
    if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        single = [_in_turn(schedule, rank, pp, vpp, m) for rank in range(pp)]
    else:
        single = _greedy(schedule, pp, m)
    return tuple(tuple((action,) for action in order) for order in single)


def actions(schedule: int, pp: int, vpp: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """The order of actions on every rank, one by one."""
    return tuple(tuple(itertools.chain(*order)) for order in orders(schedule, pp, vpp, m))


def _in_turn(schedule: int, rank: int, pp: int, vpp: int, m: int) -> list[Action]:
    """Warm-up forwards, then one forward and one backward in turn, then the rest; GPipe warms up with all of them.

    Chunks are visited in groups of g microbatches; warm-up is p - i - 1 microbatches, with virtual stages
    2 (p - i - 1) + (v - 1) g.  [Narayanan 2021, section 2.2; Megatron Core schedules]
    g is p, or m / max(1, m // p) where p does not divide m  [torch.distributed.pipelining, ScheduleInterleaved1F1B].
    """
    total = m * vpp
    width = m // max(1, m // pp) if vpp > 1 else m

    def chunk(number: int, kind: str) -> Action:
        group, within = divmod(number, width * vpp)
        virtual, place = divmod(within, width)
        virtual = vpp - 1 - virtual if kind == "B" else virtual
        return virtual * pp + rank, kind, group * width + place

    forward, backward = ([chunk(number, kind) for number in range(total)] for kind in "FB")
    warm = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * width
    warm = total if schedule == Schedule.GPIPE else min(warm, total)
    pairs = zip(forward[warm:], backward, strict=False)
    return forward[:warm] + list(itertools.chain(*pairs)) + backward[total - warm :]


def _greedy(schedule: int, pp: int, m: int) -> list[list[Action]]:
    """Zero-bubble orders without a written one: every rank, whenever free, takes input gradients first, then a forward, then
    weight gradients. zb_h1 so takes as long as torch's own; and dualpipe_v with fewer microbatches than its order is for.

    Forwards stop at the schedule's number of microbatches in flight (zb_h1: p - i, zb_2p: 2 p, dualpipe_v: 2 p + 2
    chunks), which is what bounds its memory; a weight gradient is also taken when nothing else is ready.  Unit durations.
    Not for V shapes that are known: with parts that are not equal this order is up to 22 % longer than torch's.
    [Qi 2024, sections 3.1 and 6]
    """
    stages = pp * (2 if is_v_shaped(schedule) else 1)
    held = [[s for s in reversed(range(stages)) if stage_rank(s, pp, schedule) == rank] for rank in range(pp)]
    ends: dict[Action, int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    waiting: list[list[Action]] = [[] for _ in range(pp)]
    found: list[list[Action]] = [[] for _ in range(pp)]
    clock = 0

    def ready(action: Action) -> bool:
        return action[2] < m and all(ends.get(one, clock + 1) <= clock for one in _needs(*action, stages))

    while len(ends) < 3 * stages * m:
        for rank in range(pp):
            limit = pp - rank if schedule == Schedule.ZB_H1 else 2 * pp + 2 * (schedule == Schedule.DUALPIPE_V)
            flying = sum(counts[s, "F"] - counts[s, "I"] for s in held[rank])
            wanted = [(s, kind, counts[s, kind]) for kind in ("IF" if flying < limit else "I") for s in held[rank]]
            action = next(filter(ready, (*wanted, *waiting[rank][:1])), None)
            if action is None:
                continue
            stage, kind, number = action
            if kind == "I":
                waiting[rank].append((stage, "W", number))
            elif kind == "W":
                waiting[rank].pop(0)
            counts[stage, kind] += 1
            ends[action] = clock + 1
            found[rank].append(action)
        clock += 1
    return found


class Step(NamedTuple):
    """One action in an order in which everything it waits for comes earlier."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    needs: tuple[tuple[int, bool], ...]
    """Earlier steps whose results it waits for, and whether they come from another rank."""


@lru_cache(maxsize=64)
def program(schedule: int, pp: int, vpp: int, m: int) -> tuple[Step, ...]:
    """All actions of all ranks in one order that respects every dependency; it does not depend on durations."""
    left = [deque(order) for order in actions(schedule, pp, vpp, m)]
    sent = {action: group[-1] for order in orders(schedule, pp, vpp, m) for group in order for action in group}
    stages = 1 + max(stage for stage, _, _ in sent)
    ranks = [stage_rank(stage, pp, schedule) for stage in range(stages)]
    number: dict[Action, int] = {}
    steps: list[Step] = []
    while any(left):
        before = len(steps)
        for rank, order in enumerate(left):
            while order:
                wanted = [(one, ranks[one[0]] != rank) for one in _needs(*order[0], stages)]
                needs = [(number.get(sent[one] if remote else one), remote) for one, remote in wanted]
                known = tuple((step, remote) for step, remote in needs if step is not None)
                if len(known) < len(needs):
                    break
                number[order[0]] = len(steps)
                steps.append(Step(rank, *order.popleft(), known))
        if len(steps) == before:
            raise AssertionError(f"schedule {schedule} with pp {pp}, vpp {vpp}, m {m} does not come to an end")
    return tuple(steps)


def _needs(stage: int, kind: str, i: int, stages: int) -> list[Action]:
    """What an action waits for."""
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "I", i)]
    return [(stage, "F", i)] + ([(stage + 1, kind, i)] if stage < stages - 1 else [])


def walk(schedule: int, pp: int, vpp: int, m: int, seconds: Durations, send: Sends = 0.0) -> list[Span]:
    """Run the actions with the durations of every stage.

    ``send`` is added between ranks when an action waits for another rank's result: one for all, or by (virtual) stage that
    of the hop to the next. An action starts when its rank is free
    and its input is there; actions that run as one send their results when all have ended.
    """
    steps = program(schedule, pp, vpp, m)
    return [
        Span(step.rank, step.stage, step.kind, step.microbatch, start, end)
        for step, start, end in zip(steps, *_run(steps, pp, seconds, send), strict=True)
    ]


def _run(steps: tuple[Step, ...], pp: int, seconds: Durations, send: Sends) -> tuple[list[float], list[float]]:
    """Start and end of every step."""
    forward, backward, weight = seconds
    hops = _hops(send, len(forward))
    gap = {"F": [0.0, *hops], "B": hops, "I": hops, "W": hops}  # what arrives at each stage, from which side
    duration = {"F": forward.tolist(), "B": backward.tolist(), "I": (backward - weight).tolist(), "W": weight.tolist()}
    free = [0.0] * pp
    starts: list[float] = []
    ends: list[float] = []
    for rank, stage, kind, _, needs in steps:
        start = free[rank]
        for earlier, remote in needs:
            arrival = ends[earlier] + gap[kind][stage] if remote else ends[earlier]
            if arrival > start:
                start = arrival
        free[rank] = end = start + duration[kind][stage]
        starts.append(start)
        ends.append(end)
    return starts, ends


def walked_time(schedule: int, pp: int, vpp: int, m: int, seconds: Durations, send: Sends = 0.0) -> float:
    """Seconds of the whole pipeline; beyond 6 p microbatches (V schedules: 10 p) the steady state repeats and is added.

    Every further p microbatches then add what the last p did: exact to 0.01 % against the whole walk with a first stage 10 %
    lighter to 20 % heavier and a last one up to half as heavy again (V schedules after 4 p instead of 8 p: 1.2 %).
    """
    few = (8 if is_v_shaped(schedule) else 4) * pp
    step = m // max(1, m // pp) if schedule == Schedule.INTERLEAVED else pp
    if m > few + 2 * step:
        rest = (m - few) // step
        short, longer = (walked_time(schedule, pp, vpp, m - (rest - more) * step, seconds, send) for more in (0, 1))
        return short + rest * (longer - short)
    if schedule == Schedule.ONE_F_ONE_B and vpp == 1:
        return _in_pairs(pp, m, seconds, send)
    if schedule == Schedule.INTERLEAVED and pp > 1:
        return _in_chunks(pp, vpp, m, seconds, send)
    return max(_run(program(schedule, pp, vpp, m), pp, seconds, send)[1])


def _in_pairs(pp: int, m: int, seconds: Durations, send: Sends) -> float:
    """The end of a walk of 1F1B, whose order needs no list: for k from 1 - p on every rank s, the last one first, runs F of
    microbatch k + p - 1 - s and then B of k, where there are such."""
    forward, backward = (one.tolist() for one in seconds[:2])
    hops = _hops(send, pp)
    free, sent = [0.0] * pp, [0.0] * pp
    for k in range(1 - pp, m):
        returned = 0.0
        for s in range(pp - 1, -1, -1):
            now = free[s]
            if 0 <= k + pp - 1 - s < m:
                sent[s] = now = max(now, sent[s - 1] + hops[s - 1] if s else 0.0) + forward[s]
            if k >= 0:
                returned = now = max(now, returned + hops[s] if s < pp - 1 else 0.0) + backward[s]
            free[s] = now
    return max(free)


def _in_chunks(pp: int, vpp: int, m: int, seconds: Durations, send: Sends) -> float:
    """The end of a walk of the interleaved schedule, many ranks at once: those whose actions wait for nothing of each other."""
    waves, hops = _waves(pp, vpp, m), np.array([*_hops(send, pp * vpp), 0.0][: pp * vpp])
    duration = np.concatenate(seconds[:2])[waves.which]
    behind = np.concatenate([hops, np.roll(hops, 1)])[waves.which]  # the hop to the next stage, and that to the one before
    come, free = np.zeros(waves.places), np.zeros(pp)
    for start, end in itertools.pairwise(waves.bounds):
        ranks = waves.ranks[start:end]
        now = np.maximum(free[ranks], come[waves.takes[start:end]]) + duration[start:end]
        free[ranks] = now
        come[waves.puts[start:end]] = now + behind[start:end]
    return float(free.max())


class _Waves(NamedTuple):
    """All actions of an interleaved schedule in waves: each waits for earlier waves alone. What is sent has a place of its own: the
    input of a stage for a microbatch, and its gradient."""

    bounds: list[int]
    """Where each wave begins, and the end."""
    ranks: NDArray[np.intp]
    which: NDArray[np.intp]
    """The stage; of backward passes, so many stages further."""
    takes: NDArray[np.intp]
    """The place of what an action waits for."""
    puts: NDArray[np.intp]
    """The place of what it sends."""
    places: int


@lru_cache(maxsize=32)
def _waves(pp: int, vpp: int, m: int) -> _Waves:
    """The schedule does not depend on durations: the waves are those of a walk in which every action takes one."""
    stages = pp * vpp
    back = (stages + 1) * m  # where gradients begin
    orders = [
        [
            (stage, stage * m + i, (stage + 1) * m + i) if kind == "F"
            else (stages + stage, back + (stage + 1) * m + i, back + stage * m + i)
            for stage, kind, i in _in_turn(Schedule.INTERLEAVED, rank, pp, vpp, m)
        ]
        for rank in range(pp)
    ]  # fmt: skip
    come: list[int | None] = [None] * (2 * back)
    come[:m] = come[-m:] = [0] * m
    found: list[tuple[int, int, int, int, int]] = []
    free, at, total = [0] * pp, [0] * pp, sum(map(len, orders))
    while len(found) < total:
        before = len(found)
        for rank, order in enumerate(orders):
            now, done = free[rank], len(found)
            for which, takes, puts in itertools.islice(order, at[rank], None):
                arrival = come[takes]
                if arrival is None:
                    break
                now = 1 + (arrival if arrival > now else now)
                come[puts] = now
                found.append((now, rank, which, takes, puts))
            free[rank], at[rank] = now, at[rank] + len(found) - done
        if len(found) == before:
            raise AssertionError(f"interleaved with pp {pp}, vpp {vpp}, m {m} does not come to an end")
    columns = np.array(found, dtype=np.intp).T
    columns = columns[:, np.argsort(columns[0], kind="stable")]
    bounds = [*np.flatnonzero(np.diff(columns[0], prepend=-1)).tolist(), total]
    return _Waves(bounds, columns[1], columns[2], columns[3], columns[4], 2 * back)


def _hops(send: Sends, stages: int) -> list[float]:
    """Seconds of the send behind every stage."""
    return [float(send)] * stages if isinstance(send, float | int) else [*send]

"""Walks a pipeline schedule with given durations: the exact step time of a finalist, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.arrays import Floats
from planner.cost.pipeline.v_schedules import Action, Group, v_order
from planner.layout import Schedule


@dataclass(frozen=True, kw_only=True)
class Span:
    """One action as it runs."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def stage_rank(stage: int, pp: int, vpp: int, schedule: int) -> int:
    """Pipeline rank that holds a stage: stage mod p; in V shape the second chunk runs backwards."""
    if schedule in (Schedule.ZBV, Schedule.DUALPIPE_V):
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


@lru_cache(maxsize=256)
def actions(schedule: int, pp: int, vpp: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """The order of actions on every rank: '2F0' is (2, 'F', 0). B = I + W; zero-bubble schedules issue I and W apart."""
    if schedule == Schedule.GPIPE:
        return tuple(
            tuple([(rank, "F", i) for i in range(m)] + [(rank, "B", i) for i in range(m)]) for rank in range(pp)
        )
    if schedule in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        return tuple(_one_f_one_b(rank, pp, vpp, m) for rank in range(pp))
    groups = _v_groups(schedule, pp, m)
    if groups:
        return tuple(tuple(action for group in order for action in group) for order in groups)
    return _greedy(schedule, pp, vpp, m)


def _v_groups(schedule: int, pp: int, m: int) -> tuple[tuple[Group, ...], ...]:
    """The written orders of the V shapes, () for other schedules and for fewer microbatches than dualpipe_v takes."""
    if schedule == Schedule.ZBV or (schedule == Schedule.DUALPIPE_V and m >= 2 * pp):
        return tuple(v_order(schedule, rank, pp, m) for rank in range(pp))
    return ()


def _one_f_one_b(rank: int, pp: int, vpp: int, m: int) -> tuple[Action, ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the rest.

    Chunks are visited in groups of g microbatches; warm-up is p - i - 1 microbatches, with virtual stages
    2 (p - i - 1) + (v - 1) g.  [Narayanan 2021, section 2.2; Megatron Core schedules]
    g is p, or m / max(1, m // p) where p does not divide m  [torch.distributed.pipelining, ScheduleInterleaved1F1B].
    """
    total = m * vpp
    width = m // max(1, m // pp) if vpp > 1 else m

    def chunk(number: int, backward: bool) -> Action:
        group, within = divmod(number, width * vpp)
        virtual, place = divmod(within, width)
        virtual = vpp - 1 - virtual if backward else virtual
        return virtual * pp + rank, "B" if backward else "F", group * width + place

    warm = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * width
    warm = min(warm, total)
    order = [chunk(i, False) for i in range(warm)]
    for i in range(total - warm):
        order += [chunk(warm + i, False), chunk(i, True)]
    order += [chunk(i, True) for i in range(total - warm, total)]
    return tuple(order)


def _greedy(schedule: int, pp: int, vpp: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """Zero-bubble orders without a written one: every rank, whenever free, takes input gradients first, then a forward, then
    weight gradients. zb_h1 so takes as long as torch's own; and dualpipe_v with fewer microbatches than its order is for.

    Forwards stop at the schedule's number of microbatches in flight (zb_h1: p - i, zb_2p: 2 p, zbv and dualpipe_v: 2 p
    chunks), which is what bounds its memory; a weight gradient is also taken when nothing else is ready.  Unit durations.
    Not for V shapes that are known: with parts that are not equal this order is up to 22 % longer than torch's.
    [Qi 2024, sections 3.1 and 6]
    """
    stages = pp * (2 if schedule in (Schedule.ZBV, Schedule.DUALPIPE_V) else 1)
    held = [[s for s in range(stages) if stage_rank(s, pp, vpp, schedule) == rank] for rank in range(pp)]
    limit = [pp - rank if schedule == Schedule.ZB_H1 else 2 * pp + 2 * (schedule == Schedule.DUALPIPE_V)
             for rank in range(pp)]  # fmt: skip
    done: dict[Action, int] = {}
    next_forward, next_input = [0] * stages, [0] * stages
    pending: list[list[Action]] = [[] for _ in range(pp)]
    order: list[list[Action]] = [[] for _ in range(pp)]
    remaining, clock = 3 * stages * m, 0
    while remaining:
        for rank in range(pp):
            action = _choose(held[rank], stages, m, limit[rank], done, next_forward, next_input, pending[rank], clock)
            if action is None:
                continue
            stage, kind, i = action
            if kind == "F":
                next_forward[stage] += 1
            elif kind == "I":
                next_input[stage] += 1
                pending[rank].append((stage, "W", i))
            else:
                pending[rank].remove(action)
            done[action] = clock + 1
            order[rank].append(action)
            remaining -= 1
        clock += 1
    return tuple(tuple(one) for one in order)


def _choose(
    held: list[int], stages: int, m: int, limit: int, done: dict[Action, int], next_forward: list[int],
    next_input: list[int], pending: list[Action], clock: int,
) -> Action | None:  # fmt: skip
    """The action that one rank starts at ``clock``, or None when nothing is ready."""

    def ready(action: Action) -> bool:
        return done.get(action, clock + 1) <= clock

    for stage in reversed(held):
        i = next_input[stage]
        if i < next_forward[stage] and ready((stage, "F", i)) and (stage == stages - 1 or ready((stage + 1, "I", i))):
            return stage, "I", i
    flying = sum(next_forward[s] - next_input[s] for s in held)
    if flying < limit:
        for stage in reversed(held):
            i = next_forward[stage]
            if i < m and (stage == 0 or ready((stage - 1, "F", i))):
                return stage, "F", i
    return pending[0] if pending else None


@dataclass(frozen=True, kw_only=True)
class Step:
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
    orders = actions(schedule, pp, vpp, m)
    stages = 1 + max(stage for order in orders for stage, _, _ in order)
    groups = [group for order in _v_groups(schedule, pp, m) for group in order if len(group) > 1]
    sent = {action: group[-1] for group in groups for action in group}
    number: dict[Action, int] = {}
    steps: list[Step] = []
    cursor, progress = [0] * pp, True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while cursor[rank] < len(order):
                stage, kind, i = order[cursor[rank]]
                needs = []
                for wanted in _needs(stage, kind, i, stages):
                    remote = stage_rank(wanted[0], pp, vpp, schedule) != rank
                    needs.append((number.get(sent.get(wanted, wanted) if remote else wanted), remote))
                known = tuple((step, remote) for step, remote in needs if step is not None)
                if len(known) < len(needs):
                    break
                number[stage, kind, i] = len(steps)
                steps.append(Step(rank=rank, stage=stage, kind=kind, microbatch=i, needs=known))
                cursor[rank] += 1
                progress = True
    if any(cursor[rank] < len(order) for rank, order in enumerate(orders)):
        raise AssertionError(f"schedule {schedule} with pp {pp}, vpp {vpp}, m {m} does not come to an end")
    return tuple(steps)


def _needs(stage: int, kind: str, i: int, stages: int) -> list[Action]:
    """What an action waits for."""
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "I", i)]
    return [(stage, "F", i)] + ([(stage + 1, kind, i)] if stage < stages - 1 else [])


def walk(
    schedule: int, pp: int, vpp: int, m: int, forward: Floats, backward: Floats, weight: Floats, send: float = 0.0
) -> list[Span]:
    """Run the actions with durations per stage: arrays of length p v (stages in model order), seconds per microbatch.

    ``backward`` is I + W; ``send`` is added between ranks when an action waits for another rank's result. An action
    starts when its rank is free and its input is there; actions that run as one send their results when all have ended.
    """
    steps = program(schedule, pp, vpp, m)
    starts, ends = _run(steps, pp, forward, backward, weight, send)
    return [
        Span(rank=step.rank, stage=step.stage, kind=step.kind, microbatch=step.microbatch, start=start, end=end)
        for step, start, end in zip(steps, starts, ends, strict=True)
    ]


def _run(
    steps: tuple[Step, ...], pp: int, forward: Floats, backward: Floats, weight: Floats, send: float
) -> tuple[list[float], list[float]]:
    """Start and end of every step."""
    duration = {"F": forward.tolist(), "B": backward.tolist(), "I": (backward - weight).tolist(), "W": weight.tolist()}
    free = [0.0] * pp
    starts: list[float] = []
    ends: list[float] = []
    for step in steps:
        start = free[step.rank]
        for earlier, remote in step.needs:
            arrival = ends[earlier] + send if remote else ends[earlier]
            if arrival > start:
                start = arrival
        end = start + duration[step.kind][step.stage]
        free[step.rank] = end
        starts.append(start)
        ends.append(end)
    return starts, ends


def walked_time(
    schedule: int, pp: int, vpp: int, m: int, forward: Floats, backward: Floats, weight: Floats, send: float = 0.0
) -> float:
    """Seconds of the whole pipeline; beyond 6 p microbatches (V schedules: 10 p) the steady state repeats and is added.

    Every further p microbatches then add what the last p did: exact to 0.01 % against the whole walk with a first stage 10 %
    lighter to 20 % heavier and a last one up to half as heavy again (V schedules after 4 p instead of 8 p: 1.2 %).
    """
    settles = 8 if schedule in (Schedule.ZBV, Schedule.DUALPIPE_V) else 4
    few, step = settles * pp, m // max(1, m // pp) if schedule == Schedule.INTERLEAVED else pp
    if m > few + 2 * step:
        rest = (m - few) // step
        short = walked_time(schedule, pp, vpp, m - rest * step, forward, backward, weight, send)
        longer = walked_time(schedule, pp, vpp, m - (rest - 1) * step, forward, backward, weight, send)
        return short + rest * (longer - short)
    _, ends = _run(program(schedule, pp, vpp, m), pp, forward, backward, weight, send)
    return max(ends)

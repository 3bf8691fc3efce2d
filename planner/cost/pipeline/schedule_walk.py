"""Walks a pipeline schedule with given durations: the exact step time of a finalist, stage by stage."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from planner.arrays import Floats
from planner.layout import Schedule, is_v_shaped

Action = tuple[int, str, int]
"""(stage, kind, microbatch), kinds F, I and W."""
Group = tuple[Action, ...]
"""Actions one after the other whose results leave the rank together, when the last has ended."""


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
    """The end of a walk of the interleaved schedule, without the list of what each action waits for: a forward pass waits for its
    input, a backward pass for its gradient, which come from other ranks."""
    stages, hops = pp * vpp, _hops(send, pp * vpp)
    duration = {"F": seconds[0].tolist(), "B": seconds[1].tolist()}
    come: dict[str, list[list[float | None]]] = {kind: [[None] * m for _ in range(stages)] for kind in "FB"}
    come["F"][0] = come["B"][-1] = [0.0] * m
    left = [iter(_in_turn(Schedule.INTERLEAVED, rank, pp, vpp, m)) for rank in range(pp)]
    first, free, moved = [next(order, None) for order in left], [0.0] * pp, True
    while moved:
        moved = False
        for rank in range(pp):
            while (action := first[rank]) is not None:
                stage, kind, i = action
                arrival = come[kind][stage][i]
                if arrival is None:
                    break
                free[rank] = end = max(free[rank], arrival) + duration[kind][stage]
                if kind == "F" and stage < stages - 1:
                    come["F"][stage + 1][i] = end + hops[stage]
                elif kind == "B" and stage:
                    come["B"][stage - 1][i] = end + hops[stage - 1]
                first[rank], moved = next(left[rank], None), True
    if any(first):
        raise AssertionError(f"interleaved with pp {pp}, vpp {vpp}, m {m} does not come to an end")
    return max(free)


def _hops(send: Sends, stages: int) -> list[float]:
    """Seconds of the send behind every stage."""
    return [float(send)] * stages if isinstance(send, float | int) else [*send]


def v_order(schedule: int, rank: int, pp: int, m: int) -> tuple[Group, ...]:
    """What one rank does in a V, as torch.distributed.pipelining has it: by hand, whatever the durations are; dualpipe_v needs m
    of at least 2 p. Rank r of p holds stages r and 2 p - 1 - r, here "down" and "up".  [torch 2.13, ScheduleZBVZeroBubble and
    ScheduleDualPipeV; Qi 2024, section 6; DeepSeek, DualPipe]
    """
    order = _Order(rank, pp)
    if schedule == Schedule.ZBV:
        _zbv(order, rank, pp, max(2 * pp - 1, m))
    else:
        _dualpipe_v(order, rank, pp, m)
    return tuple(group for group in order.groups if group[0][2] < m)


class _Order:
    """The order of one rank as it grows: each stage takes its microbatches in turn, for each kind of action."""

    def __init__(self, rank: int, pp: int) -> None:
        self.down, self.up = rank, 2 * pp - 1 - rank
        self.groups: list[Group] = []
        self.counts: Counter[tuple[int, str]] = Counter()
        self.waiting: deque[int] = deque()
        """Stages of input gradients whose weight gradients have not come, oldest first."""

    def together(self, *parts: tuple[int, str]) -> None:
        """Actions as one group, from stages and their kinds: "IW" is a whole backward pass; each of its stage's next
        microbatch."""
        group = []
        for stage, kind in ((stage, kind) for stage, kinds in parts for kind in kinds):
            group.append((stage, kind, self.counts[stage, kind]))
            self.counts[stage, kind] += 1
        self.groups.append(tuple(group))

    def add(self, stage: int, kinds: str) -> None:
        """Actions of one stage, each a group of its own."""
        for kind in kinds:
            self.together((stage, kind))

    def backward(self, stage: int, *, split: bool) -> None:
        """A backward pass, or its first half whose second waits."""
        self.together((stage, "I" if split else "IW"))
        self.waiting.extend([stage] * split)

    def weight(self) -> None:
        """The oldest weight gradient that waits, where one does."""
        if self.waiting:
            self.add(self.waiting.popleft(), "W")


def _zbv(order: _Order, rank: int, pp: int, m: int) -> None:
    """Warm-up, one forward and one whole backward pass of both stages in turn, weight gradients last."""
    down, up, count = order.down, order.up, order.counts
    order.add(down, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        order.add(up, "F")
        order.add(down, "F")
    for _ in range(pp - rank):
        order.add(up, "FIW")
    while count[up, "F"] < count[down, "F"] or count[down, "F"] < m:
        order.add(down, "FIW" if count[down, "F"] < m else "IW")
        order.add(up, "FIW")
    for _ in range(rank):
        order.add(down, "I")
        order.add(up, "I")
    for _ in range(pp - rank):
        order.add(down, "IW")
    for stage in (up, down):
        order.add(stage, "W" * (count[stage, "I"] - count[stage, "W"]))


def _dualpipe_v(order: _Order, rank: int, pp: int, m: int) -> None:
    """The eight steps of DualPipeV; passes of the main step overlap where a runtime can, in torch 2.13 they take turns."""
    down, up, later = order.down, order.up, pp - rank - 1
    order.add(down, "F" * (2 * later))
    for _ in range(rank + 1):
        order.add(down, "F")
        order.add(up, "F")
    for _ in range(later):
        order.backward(up, split=True)
        order.weight()
        order.add(up, "F")
    for number in range(m - 2 * pp + rank + 1):
        if number == 0 and later == 0:
            order.add(down, "F")
            order.backward(up, split=False)
        else:
            order.together((down, "F"), (up, "IW"))
        order.together((up, "F"), (down, "IW"))
    for _ in range(later):
        order.backward(up, split=False)
        order.together((up, "F"), (down, "IW"))
    half = (rank + 1) // 2
    for number in range(rank + 1):
        order.backward(up, split=number > half or (number == half and rank % 2 == 1))
        order.backward(down, split=number >= half)
    for _ in range(later):
        order.weight()
        order.backward(down, split=True)
    while order.waiting:
        order.weight()

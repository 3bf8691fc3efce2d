"""Orders of V schedules as they are written down, action by action."""

from collections import Counter, deque

from planner.layout import Schedule

Action = tuple[int, str, int]
"""(stage, kind, microbatch), kinds F, I and W."""
Group = tuple[Action, ...]
"""Actions one after the other whose results leave the rank together, when the last has ended."""


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

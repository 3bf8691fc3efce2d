"""What a steady step of a rank consists of; the parts sum to its time.

    step = compute + exposed communication + exposed copies + idle

Busy is the union of everything on all streams, copies included; compute that of all kernels that do not communicate; communication
is exposed where it runs and nothing computes [Holistic Trace Analysis: temporal breakdown, comm_comp_overlap]. Where two kinds run
at once they share the time. Idle time waits for the host where the next kernel was launched after the gap began [there: idle time
breakdown, host wait]; a kernel of a collective that waits for other ranks is busy and communicates.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.errors import PlannerError
from planner.kineto.groups import KINDS
from planner.kineto.kernel_names import COMMUNICATION, COMPUTING, COPY, FAMILIES, GEMM, short_name
from planner.kineto.rank_trace import Collective, RankTrace
from planner.kineto.spans import NONE, clipped, covered, gaps, outside, shared, union
from planner.kineto.step_marks import Steps, find_steps
from planner.record import record

BUSY = 0.95
"""Share of a step in which the GPU does not wait for the host; below, the host bounds it."""
TOP = 8
"""Kernels that are named, by their time."""
LEAST_KNOWN = 0.5
"""Part of the time of matrix products whose shapes are recorded, from which their rate is stated."""


@record
class Traffic:
    """One collective of one kind of group: seconds per step."""

    kind: str
    """Of ``groups.KINDS``."""
    op: str
    size: int
    """Ranks; 0 = unknown."""
    calls: float
    total: float
    """Seconds in which it runs."""
    exposed: float
    """Seconds in which nothing computes; several at once share them."""


@record
class StepParts:
    """The mean steady step of one rank, seconds."""

    trace: RankTrace
    steps: Steps
    step_time: float
    busy: float
    """Something runs on the GPU."""
    compute: dict[str, float]
    """By family of kernels; where two run they share the time."""
    traffic: tuple[Traffic, ...]
    """Longest exposed first."""
    copies: float
    """Copies during which nothing computes or communicates."""
    idle_host: float
    """Idle time in which the next kernel was not launched yet."""
    idle_other: float
    """Other idle time: dependencies between streams, delays of launches, and all of it where launches are not recorded."""
    longest_gap: float
    top: tuple[tuple[str, str, float], ...]
    """Kernels that take longest: name, family, seconds of kernels."""
    product_rate: float | None
    """FLOP/s of the matrix products whose shapes are recorded, where these are most of them."""

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication by kind of group."""
        return {kind: sum(one.exposed for one in self.traffic if one.kind == kind) for kind in KINDS}

    @property
    def hidden(self) -> dict[str, float]:
        """Communication during which something computes, or another kind is counted, by kind of group."""
        return {
            kind: sum(max(one.total - one.exposed, 0.0) for one in self.traffic if one.kind == kind) for kind in KINDS
        }

    @property
    def busy_share(self) -> float:
        """Part of the step in which something runs on the GPU."""
        return self.busy / self.step_time

    @property
    def host_share(self) -> float:
        """Part of the step in which the GPU waits for the host."""
        return self.idle_host / self.step_time

    @property
    def host_bound(self) -> bool:
        """Whether the host sets the pace: then the step says little about the GPUs. False where launches are not recorded."""
        return self.host_share > 1.0 - BUSY


def parts_of(trace: RankTrace, kind: Callable[[Collective], str]) -> StepParts:
    """The mean of a rank's steady steps; ``kind`` names the kind of a collective (``groups.kinds_of``). Raises PlannerError."""
    steps = find_steps(trace)
    if steps.seconds <= 0:
        raise PlannerError(f"{trace.path}: its steps take no time: 'ts' and 'dur' of its events are not those of a run")
    each = [_one_step(trace, kind, float(low), float(high)) for low, high in steps.spans]
    found: dict[tuple[Any, ...], float] = defaultdict(float)
    for one in each:
        for key, seconds in one.items():
            found[key] += seconds / len(each)
    traffic = [
        Traffic(
            kind=key[1], op=key[2], size=key[3], calls=found["calls", *key[1:]], total=seconds, exposed=found["exposed", *key[1:]]
        )
        for key, seconds in list(found.items()) if key[0] == "total"
    ]  # fmt: skip
    return StepParts(
        trace=trace, steps=steps, step_time=steps.seconds, busy=found["busy",],
        compute={name: found["compute", family] for family, name in enumerate(FAMILIES) if family in COMPUTING},
        traffic=tuple(sorted(traffic, key=lambda one: -one.exposed)), copies=found["copies",], idle_host=found["idle", "host"],
        idle_other=found["idle", "other"], longest_gap=max((one["longest",] for one in each), default=0.0),
        top=_top(trace, steps), product_rate=_product_rate(trace),
    )  # fmt: skip


def _one_step(
    trace: RankTrace, kind: Callable[[Collective], str], low: float, high: float
) -> dict[tuple[Any, ...], float]:
    """Seconds of one step by what and which."""
    spans, family = clipped(trace.spans, low, high), trace.family
    here = spans[:, 1] > spans[:, 0]
    by_family = {number: spans[here & (family == number)] for number in (*COMPUTING, COPY)}
    computing = union(np.concatenate([by_family[number] for number in COMPUTING]))
    found: dict[tuple[Any, ...], float] = {
        ("compute", number): seconds for number, seconds in shared({one: by_family[one] for one in COMPUTING}).items()
    }
    kinds: dict[tuple[str, str, int], Floats] = {}
    for place, one in enumerate(trace.collectives):
        mine = spans[here & (trace.which == place)]
        key = kind(one), one.op, one.size
        if len(mine):
            kinds[key] = np.concatenate([kinds.get(key, NONE), mine])
    for key, seconds in shared(kinds, computing).items():
        found["exposed", *key] = seconds
        found["total", *key], found["calls", *key] = covered(kinds[key]), float(len(kinds[key]))
    communicating = spans[here & (family == COMMUNICATION)]
    found["copies",] = outside(by_family[COPY], np.concatenate([computing, communicating]))
    found["busy",] = covered(spans)
    idle = gaps(spans, low, high)
    lengths, waits = idle[:, 1] - idle[:, 0], _waits_for_host(trace, idle)
    found["idle", "host"], found["idle", "other"] = float(np.sum(lengths[waits])), float(np.sum(lengths[~waits]))
    found["longest",] = float(np.max(lengths, initial=0.0))
    return found


def _waits_for_host(trace: RankTrace, idle: Floats) -> np.ndarray:
    """Whether each gap ends with a kernel that was launched after the gap had begun."""
    if not trace.has_gpu or not len(idle):
        return np.zeros(len(idle), dtype=bool)
    after = np.searchsorted(trace.spans[:, 0], idle[:, 1] - 1e-9)
    known = after < len(trace.spans)
    launched = np.where(known, trace.launched[np.minimum(after, len(trace.spans) - 1)], np.nan)
    return np.asarray(launched > idle[:, 0])


def _top(trace: RankTrace, steps: Steps) -> tuple[tuple[str, str, float], ...]:
    """The kernels that take longest, by short name."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    total = np.zeros(len(trace.names))
    for low, high in steps.spans:
        np.add.at(
            total, trace.named, np.diff(clipped(trace.spans, float(low), float(high)), axis=1)[:, 0] / len(steps.spans)
        )
    family = dict(zip(trace.named.tolist(), trace.family.tolist(), strict=True))
    for place in np.flatnonzero(total > 0).tolist():
        found[short_name(trace.names[place]), FAMILIES[family[place]]] += float(total[place])
    longest = sorted(found.items(), key=lambda one: -one[1])[:TOP]
    return tuple((name, of, seconds) for (name, of), seconds in longest)


def _product_rate(trace: RankTrace) -> float | None:
    """FLOP over the seconds of matrix products whose operators have shapes."""
    products = trace.family == GEMM
    seconds = np.diff(trace.spans, axis=1)[:, 0]
    known = products & np.isin(trace.operator, np.array(sorted(trace.flop), dtype=np.int64))
    time = float(np.sum(seconds[known]))
    if time <= 0 or time < LEAST_KNOWN * float(np.sum(seconds[products])):
        return None
    return sum(trace.flop[one] for one in set(trace.operator[known].tolist())) / time

"""Traces of machines that come and go, and what a job makes of them minute by minute.

Two forms are read: ``milliseconds,add|remove,node`` (Bamboo), one event a line, and ``date,time,count`` (or ``date time count``):
the machines that are held from then on. Lines that begin with # and one line of headings are skipped.
"""

from __future__ import annotations

import csv
import datetime
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner import library
from planner.arrays import Floats
from planner.costs import HOUR
from planner.errors import PlannerError, shown
from planner.record import record
from planner.units import MILLI

MINUTE = 60.0
MOST_BYTES = 50_000_000
MOST_MACHINES = 2**18
LONGEST = 366 * 24 * HOUR
POLICIES = {
    "restart": "fixed size, waits until all machines are there",
    "shrink": "the best plan of the machines that are there",
    "replica_groups": "replica groups come and go, the others go on",
    "reroute": "peers of a stage do the microbatches of machines that went",
}


@record
class Trace:
    """Machines that are held over time."""

    name: str
    times: Floats
    """Seconds from the first event, rising."""
    counts: Floats
    """Machines from each time on."""
    removed: Floats
    """Machines taken at that time."""
    added: Floats
    """Machines given at that time."""

    @property
    def seconds(self) -> float:
        """From the first to the last event."""
        return float(self.times[-1] - self.times[0])

    @property
    def mean(self) -> float:
        """Machines, time average."""
        return float(np.sum(self.counts[:-1] * np.diff(self.times)) / self.seconds) if self.seconds > 0 else float(self.counts[-1])

    @property
    def mtbf(self) -> float:
        """Seconds that one machine stays, mean: machine seconds over removals; infinite without."""
        removals = float(self.removed.sum())
        return self.mean * self.seconds / removals if removals else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what one row of profiles/beyond-runs/elastic/spot-traces.yaml says."""
        minutes = {int(t // MINUTE) for t, n in zip(self.times, self.removed, strict=True) if n > 0}
        return {
            "name": self.name, "hours": self.seconds / HOUR, "mean_machines": self.mean, "most_machines": int(self.counts.max()),
            "additions": int(self.added.sum()), "removals": int(self.removed.sum()), "removal_minutes": len(minutes),
            "machine_mtbf_h": self.mtbf / HOUR if np.isfinite(self.mtbf) else None,
        }  # fmt: skip


def read_trace(path: Path) -> Trace:
    """A trace of either form. Raises PlannerError with file and line."""
    text = library.read_text(path, most=MOST_BYTES)
    rows = [
        (number, [one.strip() for one in next(csv.reader(io.StringIO(re.sub(r"[\t ]+(?=\S)", ",", line.strip()))))])
        for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")
    ]  # fmt: skip
    rows = [(number, [one for one in cells if one]) for number, cells in rows]
    if rows and not re.match(r"\d", rows[0][1][0]):
        rows = rows[1:]
    if len(rows) < 2:
        raise PlannerError(f"{path.name}: a trace has two lines or more, like 60000,add,node-1 or 2022-05-01,10:00:00,24")
    events = _events if rows[0][1][1:2] and rows[0][1][1].lower() in ("add", "remove") else _held
    return _trace(path.name, events(path.name, rows))


def _events(name: str, rows: Sequence[tuple[int, list[str]]]) -> list[tuple[float, float, float, float]]:
    """(time, machines, removed, added) of events of single machines; the same time counts together."""
    held: set[str] = set()
    found: dict[float, list[float]] = {}
    for number, cells in rows:
        try:
            when, what, node = float(cells[0]) * MILLI, cells[1].lower(), cells[2]
        except (IndexError, ValueError):
            raise PlannerError(f"{name} line {number}: {shown(','.join(cells))} is not milliseconds,add|remove,node") from None
        if what not in ("add", "remove"):
            raise PlannerError(f"{name} line {number}: {shown(what)} is neither add nor remove")
        at = found.setdefault(when, [0.0, 0.0, 0.0])
        if what == "add":
            at[2] += node not in held
            held.add(node)
        else:
            at[1] += node in held
            held.discard(node)
        at[0] = len(held)
    return [(when, *values) for when, values in found.items()]  # type: ignore[misc]


def _held(name: str, rows: Sequence[tuple[int, list[str]]]) -> list[tuple[float, float, float, float]]:
    """(time, machines, removed, added) of lines that say how many are held."""
    found, before = [], 0.0
    for number, cells in rows:
        try:
            when = datetime.datetime.fromisoformat(f"{cells[0]} {cells[1]}").replace(tzinfo=datetime.UTC).timestamp()
            count = float(int(cells[2]))
        except (IndexError, ValueError):
            raise PlannerError(f"{name} line {number}: {shown(','.join(cells))} is not date,time,count") from None
        if not 0 <= count <= MOST_MACHINES:
            raise PlannerError(f"{name} line {number}: {count:g} machines; it must be from 0 to {MOST_MACHINES}")
        found.append((when, count, max(before - count, 0.0), max(count - before, 0.0)))
        before = count
    return found


def _trace(name: str, events: list[tuple[float, float, float, float]]) -> Trace:
    columns = np.array(sorted(events, key=lambda one: one[0]))
    times = columns[:, 0] - columns[0, 0]
    if not np.all(np.isfinite(times)) or times[-1] > LONGEST or times[-1] <= 0:
        raise PlannerError(f"{name}: the trace is {times[-1]:g} s long; it must be above 0, and at most a year")
    return Trace(name=name, times=times, counts=columns[:, 1], removed=columns[:, 2], added=columns[:, 3])


@record
class Job:
    """What a replay needs to know of a job."""

    nodes: int
    """Machines of the plan that the trace is of."""
    step_time: float
    """Seconds of its step."""
    restart: float
    """Seconds of a new start, failure noticed and checkpoint loaded."""
    save: float
    """Seconds of a planned save before a planned start."""
    interval: float
    """Seconds of training between two saves."""
    behind: float
    """Seconds until a save is whole."""
    group_nodes: int
    """Machines of one replica group; 0 = the plan has no such groups."""
    away: float
    """Seconds until a group is back."""
    group_rate: float = 1.0
    """Rate with such groups over that of the plan: states that are not shared out over all replicas cost time."""
    speed: Callable[[int], float]
    """Rate without some machines over that of the plan; without all of them 0, or that of nodes that the trace is not of."""
    reroute: Callable[[int], float] | None = None
    """The same where peers do their microbatches, 0 where a stage has none left; None = the plan cannot do that."""
    set_up: float = 0.0
    """Seconds until the peers have new process groups."""


@record
class Replayed:
    """One policy over a trace."""

    policy: str
    work: float
    """Seconds of the whole plan's training that stay."""
    utilisation: float
    """The same over what the machines held could have done, each at its part of the plan's rate, and nodes that are in no trace."""
    paid: float
    """Machine seconds that were held."""
    stops: int
    """Times that training stopped."""
    shares: dict[str, float]
    """Of the wall time: work at the rate of the moment, lost work, restarts, waiting; they sum to 1."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "what": POLICIES[self.policy]}


@record
class Replay:
    """A trace and what each policy makes of it."""

    trace: Trace
    policies: tuple[Replayed, ...]
    """Most work first."""
    minutes: tuple[tuple[int, float, float], ...]
    """By minute: machines held, and the rate of the best policy over that of the plan."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"trace": self.trace.to_dict(), "policies": [one.to_dict() for one in self.policies]}


def by_minute(trace: Trace) -> tuple[Floats, Floats, Floats]:
    """Machines at the end of each minute, and those taken and given in it."""
    minutes = int(trace.times[-1] // MINUTE) + 1
    edges = (np.arange(minutes) + 1.0) * MINUTE
    counts = trace.counts[np.searchsorted(trace.times, edges, side="left") - 1]
    which = np.minimum((trace.times // MINUTE).astype(int), minutes - 1)
    taken, given = (np.bincount(which, one, minutes).astype(float) for one in (trace.removed, trace.added))
    return counts, taken, given


def replay(trace: Trace, job: Job) -> Replay:
    """Every policy over a trace, minute by minute."""
    counts, removed, _ = by_minute(trace)
    runs = [_checkpointed(name, counts, removed, job) for name in ("restart", "shrink")]
    if job.group_nodes:
        runs.append(_groups(counts, removed, job))
    if job.reroute is not None:
        runs.append(_rerouted(counts, removed, job, job.reroute))
    none = job.speed(job.nodes)
    could = float((none + (1.0 - none) * np.minimum(counts, job.nodes) / job.nodes).sum()) * MINUTE
    found = []
    for name, rates, shares, stops in runs:
        work = float(rates.sum()) * MINUTE
        found.append(Replayed(
            policy=name, work=work, utilisation=work / could if could > 0 else 0.0, stops=int(stops),
            paid=float(counts.sum()) * MINUTE,
            shares={key: value / len(counts) for key, value in shares.items()},
        ))  # fmt: skip
    order = sorted(range(len(found)), key=lambda i: -found[i].work)
    best = runs[order[0]][1]
    minutes = tuple((i, float(n), float(rate)) for i, (n, rate) in enumerate(zip(counts, best, strict=True)))
    return Replay(trace=trace, policies=tuple(found[i] for i in order), minutes=minutes)


Run = tuple[str, Floats, dict[str, float], int]


def _checkpointed(policy: str, counts: Floats, removed: Floats, job: Job) -> Run:
    """From checkpoints: a machine of the job that is taken ends the run, what was trained since the last whole checkpoint is
    lost, and a new start follows. With ``shrink`` on what is there; machines that come are taken in after a planned save, an
    interval after the last start at the earliest."""
    rates = np.zeros(len(counts))
    shares = {"work": 0.0, "lost_work": 0.0, "restarts": 0.0, "waiting": 0.0}
    using: int | None = None
    down, since, stops = 0.0, 0.0, 0
    for minute, (there, taken) in enumerate(zip(counts.astype(int), removed, strict=True)):
        wanted = _wanted(policy, there, job)
        hit = using is not None and taken > 0 and (
            there < using or policy == "restart" or taken * using >= there + taken
        )  # fmt: skip
        grows = policy == "shrink" and None is not wanted and None is not using and wanted > using and since >= job.interval
        if hit and using is not None:
            lost = min(since, job.interval / 2.0 + job.behind)
            undone = _undo(rates, minute, lost * job.speed(job.nodes - using))
            shares["lost_work"] += undone
            shares["work"] -= undone
            stops += 1
        if hit or grows or (using is None and wanted is not None):
            using, since = wanted, 0.0
            down = 0.0 if wanted is None else job.restart + (job.save if grows and not hit else 0.0)
            stops += grows and not hit
        if using is None:
            shares["waiting"] += 1.0
            continue
        idle = min(down, MINUTE)
        down -= idle
        part = 1.0 - idle / MINUTE
        rates[minute] = part * job.speed(job.nodes - using)
        shares["restarts"] += 1.0 - part
        shares["work"] += part
        since += MINUTE * part
    return policy, rates, shares, stops


def _wanted(policy: str, there: int, job: Job) -> int | None:
    """Machines that a job goes on with; None where it cannot."""
    if policy == "restart":
        return job.nodes if there >= job.nodes else None
    some = min(there, job.nodes)
    return some if job.speed(job.nodes - some) > 0.0 else None


def _rerouted(counts: Floats, removed: Floats, job: Job, rate: Callable[[int], float]) -> Run:
    """Peers of a stage: a machine that is taken costs the step of that moment and new process groups, one that comes the groups;
    where a stage has no peer left the job waits, and starts again from a checkpoint."""
    rates = np.zeros(len(counts))
    shares = {"work": 0.0, "lost_work": 0.0, "restarts": 0.0, "waiting": 0.0}
    using, down, since, stops = 0, 0.0, 0.0, 0
    for minute, (there, taken) in enumerate(zip(counts.astype(int), removed, strict=True)):
        wanted = min(int(there), job.nodes)
        speed = rate(job.nodes - wanted)
        if using and speed <= 0.0:
            stops, since = stops + 1, min(since, job.interval / 2.0 + job.behind)
            undone = _undo(rates, minute, since)
            shares["lost_work"] += undone
            shares["work"] -= undone
        if speed <= 0.0:
            using, since = 0, 0.0
            shares["waiting"] += 1.0
            continue
        down = job.restart if not using else down + job.set_up * (wanted != using or taken > 0)
        using, idle = wanted, min(down, MINUTE)
        down -= idle
        lost = min(job.step_time * (taken > 0), MINUTE - idle)
        part = 1.0 - (idle + lost) / MINUTE
        rates[minute] = part * speed
        shares["restarts"] += idle / MINUTE
        shares["lost_work"] += lost / MINUTE
        shares["work"] += part
        since += MINUTE * part
    return "reroute", rates, shares, stops


def _undo(rates: Floats, minute: int, seconds: float) -> float:
    """Take ``seconds`` of the plan's work off the last minutes; minutes of the wall time that they took."""
    left, wall = seconds / MINUTE, 0.0
    while left > 1e-12 and minute > 0:
        minute -= 1
        take = min(rates[minute], left)
        wall += take / max(rates[minute], 1e-12) if rates[minute] > 0 else 0.0
        rates[minute] -= take
        left -= take
    return wall


def _groups(counts: Floats, removed: Floats, job: Job) -> Run:
    """Replica groups: a machine that is taken ends its group, which is back after ``away``; the step of that moment is lost."""
    rates = np.zeros(len(counts))
    shares = {"work": 0.0, "lost_work": 0.0, "restarts": 0.0, "waiting": 0.0}
    total = max(job.nodes // job.group_nodes, 1)
    joining: list[float] = []
    up, stops = 0.0, 0
    for minute, (there, taken) in enumerate(zip(counts, removed, strict=True)):
        possible = min(int(there) // job.group_nodes, total)
        hit = min(up, np.ceil(taken / job.group_nodes)) if taken else 0.0
        up = max(min(up - hit, possible), 0.0)
        joining = [left - MINUTE for left in joining if left > MINUTE]
        waiting_to_join = possible - up - len(joining)
        joining += [job.away] * int(max(waiting_to_join, 0))
        joined = sum(left <= MINUTE for left in joining)
        stops += hit > 0 and up == 0
        lost = min(job.step_time * hit / MINUTE, 1.0) if up else 0.0
        rates[minute] = up / total * (1.0 - lost) * job.group_rate
        shares["work"] += up / total * (1.0 - lost)
        shares["lost_work"] += up / total * lost
        shares["restarts"] += len(joining) / total
        shares["waiting"] += max(1.0 - (up + len(joining)) / total, 0.0)
        up += joined
        joining = [left for left in joining if left > MINUTE]
    return "replica_groups", rates, shares, stops

"""Answers to published runs of elastic jobs: changes of layout, recoveries, goodput under failures, traces of machines.

State bytes come from the model, boxes from the two layouts, rates from the hardware; nothing is fitted to a row. A recovery counts
from when the loss is known, and the machines with the highest numbers are lost, one node where the source names no number. A
central state is gathered on one node as whole tensors and handed out again, by the formula of an exchange twice. Ranges are those
of profiles/elastic.yaml. What else a source leaves open: ``published_job``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from planner.costs import HOUR
from planner.elastic.checkpoints import transfer_seconds, wall_over_work
from planner.elastic.elastic_job import groups_of, load_seconds, start_parts
from planner.elastic.failure_answers import group_shares, kept_steps
from planner.elastic.failure_rates import spread
from planner.elastic.move_costs import exchange_seconds, host_exchange_seconds, to_devices
from planner.elastic.published_job import Row, number_of
from planner.errors import PlannerError, shown
from planner.layout import Layout
from planner.published_rows import NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of
from planner.units import GIGA

SHARE_RANGE = 0.05
"""Nine of ten shares are expected this near."""
SHARES = ("goodput", "utilisation", "utilization", "ettr", "steps_kept", "kept", "work_kept", "efficiency", "useful_work")
"""Names of shares of the wall time, or of the steps."""
MTBF = {
    1.0: ("mtbf_s", "mtbf_job_s", "failure_every_s", "failure_interval_s"), 60.0: ("mtbf_min", "failure_every_min"),
    HOUR: ("mtbf_h", "mtbf_job_h", "failure_every_h"),
}  # fmt: skip
"""Names of the time between failures of a job, by seconds of their unit."""


def _after_loss(old: Layout, left: int) -> Layout:
    """The layout on what is left: fewer replicas, then fewer stages, then a smaller tensor parallel degree."""
    tp, pp = int(old.tp), int(old.pp)
    while pp > 1 and tp * pp * int(old.cp) > left:
        pp = max(n for n in range(1, pp) if pp % n == 0)
    while tp > 1 and tp * pp * int(old.cp) > left:
        tp //= 2
    cp = int(old.cp) if tp * pp * int(old.cp) <= left else 1
    dp = max(left // (tp * pp * cp), 1)
    return Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=math.gcd(int(old.ep), tp * cp * dp), zero=old.zero, order=old.order)


def _layouts(row: Row) -> tuple[Layout, Layout]:
    """Before and after a change. Raises PlannerError where the source does not say enough."""
    old, new = row.layout("from", "before", "old"), row.layout("to", "after", "new")
    sizes = row.row.get("gpus")
    if (old is None or new is None) and isinstance(sizes, (list, tuple)) and len(sizes) == 2 and row.value("model") is not None:
        old, new = (row.searched(int(number_of(one) or 0))[0] for one in sizes)
    if old is None or new is None:
        raise PlannerError(f"{row.where}: the source does not say both layouts, nor a model with both numbers of GPUs")
    return old, new


def reconfigure(row: Row, end: str = "") -> dict[str, float]:
    """Seconds of a change of layout, in parts. Raises PlannerError where the source does not say enough."""
    old, new = _layouts(row)
    move, start = row.move(old, new), row.start(new, end)
    ranks = int(row.hardware.gpus_per_node)
    if re.search(r"nccl|rdma|live|p2p", row.system):
        return {"communicators": start["communicators"], "exchange": exchange_seconds(move, row.hardware, ranks)}
    if re.search(r"checkpoint|restart|universal|ucp|dcp", row.system):
        of_node = row.saved.size / int(old.num_gpus) * ranks
        save = transfer_seconds(row.storage, row.saved.size, of_node, row.storage.write)
        load = load_seconds(row.storage, move.read, ranks)
        return {"save": save, **start, "load": load, "devices": to_devices(move, row.hardware, end)}
    del start["processes"]
    return {**start, "exchange": host_exchange_seconds(move, row.node_bandwidth, end)}


def central(row: Row, end: str = "") -> dict[str, float]:
    """The same through one node, which gathers the whole state and hands it out. Raises PlannerError."""
    old, new = _layouts(row)
    start, whole = row.start(new, end), Layout()
    del start["processes"]
    ways = (("gather", old, whole), ("scatter", whole, new))
    return {**start, **{name: host_exchange_seconds(row.move(a, b), row.node_bandwidth, end) for name, a, b in ways}}


def recover(row: Row, end: str = "") -> dict[str, float]:
    """Seconds from a known loss of GPUs until training goes on, in parts: new processes, and the state of survivors or of a
    checkpoint. Raises PlannerError."""
    old = row.layout("from", "before", "parallel")
    if old is None and row.gpus and row.value("model") is not None:
        old = row.searched(row.gpus)[0]
    if old is None:
        raise PlannerError(f"{row.where}: the source does not say the layout, nor a model with its number of GPUs")
    node = int(row.hardware.gpus_per_node)
    nodes = row.number("lost_nodes", "failed_nodes")
    lost = row.number("lost_gpus", "failed_gpus") or (nodes * node if nodes else min(node, int(old.num_gpus) // 2))
    left = int(old.num_gpus) - int(lost)
    if lost < 1 or left < 1:
        raise PlannerError(f"{row.where}: {lost:g} GPUs are lost of {old.num_gpus}; one or more must be left")
    new = row.layout("to", "after") or _after_loss(old, left)
    move = row.move(old, new, range(left))
    if move.complete:
        state = host_exchange_seconds(move, row.node_bandwidth, end)
    else:
        state = load_seconds(row.storage, move.read, node)
    return {**row.start(new, end), "state": state, "devices": to_devices(move, row.hardware, end)}


def gb_per_s(row: Row, end: str = "") -> float:
    """State over the seconds of its change of layout, 1e9 bytes/s."""
    return row.saved.size / GIGA / sum(reconfigure(row, end).values())


def share(row: Row, name: str) -> float:
    """A share of the wall time that stays, or of the steps: of replica groups, else of a job that restarts from checkpoints."""
    step = row.number("step_s", "step_time_s", "t_step_s")
    mtbf = next((unit * value for unit, names in MTBF.items() if (value := row.number(*names))), None)
    if mtbf is None:
        raise PlannerError(f"{row.where}: the source does not say the time between failures")
    interval = row.number("interval_s", "checkpoint_interval_s")
    if interval:
        stall, behind = row.number("stall_s", "save_s") or 0.0, row.number("behind_s") or 0.0
        restart = row.number("restart_s", "recover_s") or sum(start_parts(groups_of(Layout(dp=2)), 0.0, 1.0).values())
        return 1.0 / float(wall_over_work(interval, stall=stall, mtbf=mtbf, restart=restart, behind=behind))
    if step is None and row.gpus and row.value("model") is not None:
        step = row.searched(row.gpus)[1]
    if step is None:
        raise PlannerError(f"{row.where}: the source says neither the time of a step nor an interval between saves nor a model")
    groups = row.number("groups", "replica_groups", "replicas")
    if groups is None or "kept" in name:
        return kept_steps(step, mtbf)
    away = row.number("rejoin_s", "restart_s", "recover_s")
    away = away or sum(start_parts(groups_of(Layout(dp=int(groups))), 0.0, 1.0).values())
    return group_shares(step_time=step, mtbf=mtbf, groups=int(groups), away=away)["work"]


TIMES: Mapping[str, Callable[[Row, str], dict[str, float]]] = {
    "reconfigure_s": reconfigure, "recover_s": recover, "central_state_s": central,
}  # fmt: skip
"""Times of a source -> what predicts them, in parts."""


def _predicted(row: Row, name: str) -> tuple[float, tuple[float, float]]:
    """A quantity that is no share, and the range of nine of ten. Raises PlannerError."""
    if name == "gb_per_s":
        return gb_per_s(row), (gb_per_s(row, "slow"), gb_per_s(row, "fast"))
    parts, fast, slow = (TIMES[name](row, end) for end in ("", "fast", "slow"))
    return sum(parts.values()), spread(parts, fast, slow)


def _quantities(row: Row, measured: Mapping[str, Any]) -> tuple[dict[str, Quantity], list[str]]:
    """What can be predicted of what was measured, and why the rest cannot."""
    found, reasons = dict[str, Quantity](), list[str]()
    for name, raw in measured.items():
        value = number_of(raw)
        base = re.sub(r"_(share|percent|pct)$", "", str(name))
        if value is None or value <= 0 or not (name in TIMES or name == "gb_per_s" or base in SHARES):
            continue
        try:
            if base in SHARES:
                part, scale = share(row, base), 100.0 if value > 1.5 else 1.0
                ends = scale * max(part - SHARE_RANGE, 0.0), scale * min(part + SHARE_RANGE, 1.0)
                found[name] = Quantity(measured=value, predicted=scale * part, range=ends)
            else:
                predicted, ends = _predicted(row, name)
                found[name] = Quantity(measured=value, predicted=predicted, range=ends)
        except PlannerError as error:
            reasons.append(str(error))
    return found, reasons


def answers(document: Mapping[str, Any], where: str) -> list[AnsweredRow]:
    """The answer to each row of a file, in its order. Raises PlannerError for a file that is none."""
    source = source_of(document, where)
    return [_answer(Row(row=row, document=document, where=f"{where}: {row['id']}"), source) for row in rows_of(document, where)]


def _answer(row: Row, source: str) -> AnsweredRow:
    measured = row.row.get("measured")
    plain: dict[str, Any] = {"source": source, "id": row.row["id"], "topic": "elastic", "counts": not row.row.get("suspect")}
    if not isinstance(measured, Mapping):
        raise PlannerError(f"{row.where}: measured is {shown(measured)}; it must be a mapping of quantities")
    if measured.get("ran") is False:
        return AnsweredRow(**plain, status=NOT_RUN, reason="the source measured nothing")
    found, reasons = _quantities(row, measured)
    if found:
        said = "storage and network card: what the source leaves open is taken alike for all files"
        return AnsweredRow(**plain, status=PREDICTED, reason=said, quantities=found)
    if reasons:
        return AnsweredRow(**plain, status=REFUSED, reason="; ".join(dict.fromkeys(reasons)))
    reason = "nothing that a plan predicts; a trace of machines is replayed with 'plan resilience --trace'"
    return AnsweredRow(**plain, status=NOT_RUN, reason=reason)

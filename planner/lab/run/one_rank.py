"""Rung rank: some ranks of the plan, one after the other on one device, and the step that follows from them.

Measured are the passes, the update and the memory of each rank; priced are collectives, the wait for other stages and what
belongs to the whole job. The two are put together by the cost model's own schedule (``assemble.py``): ``assembled_seconds`` of
the rows, which sum to that of the step; ``measured_seconds`` is there where the rank itself was measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner import detect
from planner.errors import PlannerError
from planner.lab.launch.state import Bar, Course, Pace
from planner.lab.run.full import kills
from planner.lab.run.ipc import Lost
from planner.lab.run.levels import Machine, Say, Task
from planner.lab.run.time_limits import FIRST, SETTING_UP, step_limits
from planner.units import GIB, format_seconds

if TYPE_CHECKING:
    from planner.lab.reference.split import Split
    from planner.lab.run.assembled_step import Assembled, Told
    from planner.lab.run.emulate import Emulation
    from planner.lab.run.meta import Measured
    from planner.lab.run.predicted_ranks import Question
    from planner.timeline.priced_plan import Priced

PRICED = "priced, not measured: one device has no neighbours"
WALKED = "priced: the schedule walked with the measured passes"
BETWEEN = "measured and not compared: on a processor the schedule's own work between the passes, which nothing prices, is in it"
ALONE = "the rank ran alone; in a step, and while a profile of several ranks is measured, all of them compute: "
MADE_UP = "only the yardstick makes up for that"
NOT_MADE_UP = "without a yardstick in the profile that shows as an error"
UNTIMED = "latency and wire time of collectives, waiting for other ranks, NCCL's own memory"
"""What a rank alone does not show."""


def obstacle(task: Task) -> str:
    """A launcher, or a CPU whose memory the rank does not fit into."""
    if task.machine.place is not None:
        return "it is one process; start it without torchrun or srun"
    if task.machine.device == "cpu":
        return _too_large(task.asked, task.machine)
    if task.asked.split.precision == "fp32":
        return "the torch model has flash attention on a GPU in bf16 only; plan with --precision bf16"
    return ""


def _too_large(asked: Question, machine: Machine) -> str:
    """Why the worst rank does not fit into main memory, or ""."""
    from planner.lab.run.predicted_ranks import predicted

    stages = {0, min(1, asked.split.pp - 1), asked.split.pp - 1}
    needs = max(predicted(asked, stage)["peak"] for stage in stages)
    if needs < machine.memory:
        return ""
    return (
        f"the worst rank allocates {needs / GIB:.1f} GiB and {machine.memory / GIB:.1f} GiB of main memory are free; "
        "use a GPU, or a smaller model"
    )


def stated_limits(task: Task, count: int) -> str:
    """What is started and how long it may take, before it starts."""
    where = "this CPU" if task.machine.device == "cpu" else "this GPU"
    ranks = "1 rank alone" if count == 1 else f"{count} ranks, one after the other"
    return (
        f"{ranks} on {where}: a step whose memory is followed, {task.warmup} warm and {task.steps} measured steps. Limits: "
        f"{format_seconds(SETTING_UP)} to build the model, {step_limits(task.timeout, 1 + task.warmup + task.steps)}"
    )


def limits(task: Task) -> dict[str, float]:
    """The same as numbers, seconds."""
    return {"setting_up_seconds": SETTING_UP, "step_seconds": task.timeout, "first_step_seconds": FIRST * task.timeout}


def run(task: Task, say: Say) -> dict[str, Any]:
    """The ranks asked for, or one of the first, the second and the last stage."""
    from planner.lab.run.meta import stage_ranks
    from planner.rules import Job
    from planner.timeline.priced_plan import price

    asked, split = task.asked, task.asked.split
    for one in task.ranks:
        if not 0 <= one < split.world:
            raise PlannerError(f"--rank {one}: the plan has ranks 0 to {split.world - 1}")
    ranks = list(dict.fromkeys(task.ranks)) or stage_ranks(split)
    before = detect.pressure()
    print(stated_limits(task, len(ranks)), file=sys.stderr, flush=True)
    found = _emulated(task, ranks)
    job = Job(workload=asked.workload, cluster=asked.cluster, trainer=asked.trainer)
    content = result(task, price(job, asked.layout), found) | {"limits": limits(task)}
    if task.machine.device == "cpu":
        content["device"]["pressure"] = {"some_avg10": {"before": before, "after": detect.pressure()}}
    return content


def _emulated(task: Task, ranks: list[int]) -> list[Emulation]:
    """Each in a process of its own, one at a time: they share the device, and times are taken. One that is lost is a result."""
    from functools import partial

    from planner.lab.run.eager_pricing import host_is_measured, yardsticks
    from planner.lab.run.emulate import Alone, emulate
    from planner.lab.run.workers import Manner, measure_all

    split, killed = task.asked.split, kills()
    alone = Alone(device=task.machine.device, warmup=task.warmup, steps=task.steps, timeout=task.timeout)
    on_gpu = task.machine.device != "cpu"
    if not on_gpu:
        cluster = task.asked.cluster
        alone = dataclasses.replace(alone, yardsticks=yardsticks(cluster), host=host_is_measured(cluster, split))
    manner = Manner(
        work=partial(emulate, alone), at_once=1, fork=not on_gpu, where="alone on one device", limit=SETTING_UP
    )
    found: list[Emulation] = []

    def lost(one: Lost) -> None:
        if one.rank >= 0 or not found:
            found.append(_lost(one if one.rank >= 0 else dataclasses.replace(one, rank=ranks[0]), split, killed))

    course = Course("rank", len(ranks))
    with Bar(through=lambda state: task.shown(course.through(state))) as bar:
        for rank in ranks:
            pace = Pace("", task.warmup + task.steps + 2, skip=2)
            course.next()
            every = measure_all(split, [rank], manner=manner, lost=lost, begun=_shown(bar, pace))
            found += [one for one in every if one is not None]
            if found and _kind(found[-1]) == "interrupted":
                break
    return found


def _shown(bar: Bar, pace: Pace) -> Callable[[str], object]:
    """Draws every phase of one rank."""
    return lambda phase: bar.show(pace.next(phase))


def _lost(one: Lost, split: Split, killed: int) -> Emulation:
    """A rank that did not come to its end: what it had found, and why."""
    from planner.lab.run.emulate import Emulation

    out_of_memory = one.kind == "died" and kills() > killed
    more = ": the kernel ended it because main memory was used up" if out_of_memory else ""
    outcome = {"died": "lost_rank"}.get(one.kind, one.kind)
    gone = Emulation.lost(one.rank, split, one.sentence + more, one.phase, outcome=outcome)
    assert gone.failure is not None
    failure = {**gone.failure, "out_of_memory": out_of_memory}
    return dataclasses.replace(gone if one.kept is None else one.kept, failure=failure)


def result(task: Task, priced: Priced, found: list[Emulation]) -> dict[str, Any]:
    """Everything about the ranks as plain data; what did not get through has a failure, and no times come from it."""
    failed = [one for one in found if one.failure is not None]
    done = [one for one in found if one.failure is None or (one.totals and not one.failure["out_of_memory"])]
    content: dict[str, Any] = {
        "rung": "rank", "trainer": task.asked.trainer.name, "changes": [*task.asked.changes, *_changes(task, found)],
        "layout": task.asked.layout.to_dict(), "num_gpus": int(task.asked.layout.num_gpus),
        "outcome": _outcome(failed), "failure": _failure(failed[0]) if failed else None,
        "device": {"name": task.machine.name, "kind": task.machine.device, "ranks": 1},
        "ranks": [_memory(task, one, one.memory) for one in found if one.memory is not None],
        "not_measured": UNTIMED, "failures": [_failure(one) for one in failed],
    }  # fmt: skip
    if done:
        content |= _times(task, priced, done)
        content["changes"] += content.get("borrowed", [])
    return content


def other_device(asked: Question, machine: Machine) -> str:
    """Why times of this device are not held against the plan's, or ""."""
    hardware = asked.cluster.hardware
    if machine.device == "cpu":
        return "" if hardware.is_cpu else f"not compared: on a CPU, and the plan is for {hardware.name}"
    here = detect.profile_of(machine.name)
    known = {profile for _, profile in detect.NAMES}
    if here is not None and hardware.name in known and here != hardware.name:
        return f"not compared: on {machine.name}, and the plan is for {hardware.name}"
    return ""


def _changes(task: Task, found: list[Emulation]) -> list[str]:
    """What was run otherwise than planned."""
    split, ran, changes = task.asked.split, found[0].microbatches, []
    if ran < split.num_microbatches:
        changes.append(
            f"{ran} microbatches of {split.num_microbatches} were run: passes of the others are taken as the same, and their "
            "receive buffers are added to the memory"
        )
    copies = max((sum(row["seconds"] for row in one.stand_ins) for one in found), default=0.0)
    taken = f"; on the stream that computes they took up to {format_seconds(copies)} of a step, which is taken off"
    changes.append(f"collectives are local copies of the same bytes{taken if copies else ''}")
    for one in found[:1]:
        changes += [f"{name} ran as several kernels, not as one: {why}" for name, why in one.not_compiled.items()]
    if split.model.is_moe:
        changes.append("every expert gets the same number of tokens: without neighbours routing means nothing")
    return changes


def _outcome(failed: list[Emulation]) -> str:
    """How it ended: for the first rank that did not get through."""
    return _kind(failed[0]) if failed else "completed"


def _kind(one: Emulation) -> str:
    """How one rank ended."""
    if one.failure is None:
        return "completed"
    return "out_of_memory" if one.failure["out_of_memory"] else str(one.failure.get("outcome", "failed"))


def _failure(one: Emulation) -> dict[str, Any]:
    assert one.failure is not None
    said, names = one.failure["sentence"], ("hung", "lost_rank", "interrupted")
    if _kind(one) not in names:  # those say all of it
        said = f"rank {one.rank} alone on one device, {one.failure['phase']}: {said}"
    if _kind(one) == "hung":
        said += "; if it only needs longer, raise --timeout"
    return {
        "rank": one.rank,
        "phase": one.failure["phase"],
        "sentence": said,
        "allocated_gib": one.failure["allocated_gib"],
    }


def _memory(task: Task, one: Emulation, memory: Measured) -> dict[str, Any]:
    """One rank's memory as rung meta writes it, what the allocator says, its update, and its stand-ins."""
    from planner.lab.run.predicted_ranks import row, stage_result

    asked = task.asked
    content = stage_result(asked, memory)
    if task.machine.device != "cpu":
        content["memory"] += [row(name, told, one.allocator[name]) for name, told in _held(asked, one.stage).items()]
    else:
        content["resident_gib"] = one.allocator.get("resident", 0) / GIB
    content["stand_ins"] = one.stand_ins
    return content


def _held(asked: Question, stage: int) -> dict[str, float]:
    """Predicted bytes of what a GPU's counters say of one rank: handed out by torch, held by it, in use on the device.

    No communicators: there are none. Receive buffers of microbatches that were not run are in the prediction.
    """
    from planner.cost.estimate import memory_by_stage
    from planner.cost.memory.states import ALLOCATED
    from planner.lab.run.predicted_ranks import position

    parts = memory_by_stage(asked.workload, asked.cluster, asked.trainer, asked.layout, max(stage, 1))
    where = position(stage, asked.split.pp)
    allocated = sum(float(parts[name][where, 0]) for name in ALLOCATED)
    reserved = allocated + float(parts["fragmentation"][where, 0])
    return {"allocated": allocated, "reserved": reserved, "device": reserved + asked.cluster.hardware.context_memory}


def _times(task: Task, priced: Priced, done: list[Emulation]) -> dict[str, Any]:
    """Passes and updates of the ranks and, where the device is the plan's, the step that they make."""
    elsewhere = other_device(task.asked, task.machine)
    currency = "processor" if task.machine.device == "cpu" else "device"
    priced, told, as_run = _as_run(task, priced, done, elsewhere)
    content: dict[str, Any] = {
        "stages": _stages(told, done, currency, elsewhere), "times": _updates(priced, told, done, currency, elsewhere),
    }  # fmt: skip
    if elsewhere:
        return content
    from planner.lab.run.assembled_step import assemble, predicted_parts, predicted_step

    whole = assemble(priced, [one.seen() for one in done], told)
    parts = predicted_parts(priced) if as_run is None else predicted_step(priced, told).parts
    step = sum(parts.values())
    content["as_run"] = None if as_run is None else as_run(content["stages"])
    content["times"] = _assembled_rows(task, whole, parts, _spread(done), currency) + content["times"]
    content["borrowed"], content["slowest_stage"] = list(whole.borrowed), whole.slowest
    tokens = float(priced.estimate.tokens[0]) * int(priced.dealt.num_gpus)
    flop = float(priced.estimate.flop[0]) / priced.estimate.peak_flops
    content["rates"] = {
        "tokens_per_second": {"predicted": tokens / step, "measured": tokens / whole.step},
        "mfu": {"predicted": flop / step, "measured": flop / whole.step}, "loss": None,
    }  # fmt: skip
    return content


Notes = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Makes ``as_run`` of the rows of passes."""


def _as_run(task: Task, priced: Priced, done: list[Emulation], elsewhere: str) -> tuple[Priced, Told, Notes | None]:
    """What the ranks are held against: on the plan's own processor as it runs there, else the plan's trainer."""
    from functools import partial

    from planner.lab.run.assembled_step import told_of
    from planner.lab.run.eager_pricing import mean_host
    from planner.lab.run.full_notes import Ran, notes_of
    from planner.lab.run.on_processor import priced_as_run, told_as_run

    if task.machine.device != "cpu" or elsewhere:
        return priced, told_of(priced), None
    asked = task.asked
    priced, host = priced_as_run(asked), mean_host([{"host_seconds": one.host} for one in done])
    ran = Ran(
        asked=asked, priced=priced, on_cpu=True, not_compiled={}, host=host,
        slowed=[value for one in done for value in one.slowed],
        update_slowed=[value for one in done for value in one.update_slowed],
        more=[ALONE + (MADE_UP if any(one.slowed for one in done) else NOT_MADE_UP)],
    )  # fmt: skip
    return priced, told_as_run(priced, asked.split, host), partial(notes_of, ran)


def _assembled_rows(
    task: Task, whole: Assembled, told: dict[str, float], spread: float | None, currency: str
) -> list[dict[str, Any]]:
    """The step and its parts. ``assembled_seconds`` sum to the step; ``measured_seconds`` are there where one rank shows them."""
    from planner.error_bars import error_bar
    from planner.lab.run.assembled_step import MEASURED
    from planner.lab.run.record import time_row

    step = sum(told.values())
    bar = error_bar("step_time", task.asked.trainer, task.asked.cluster.hardware, task.plan.kind())
    row = time_row("step", step, whole.step, spread=spread, interval=bar.interval(step), currency=currency)
    rows = [{**row, "assembled_seconds": whole.step}]
    for part, seconds in whole.parts.items():
        if seconds == told[part] == 0.0:
            continue
        alone = part in MEASURED
        note = "" if alone else WALKED if part in ("bubble", "stragglers") else PRICED
        if part == "once_per_step" and currency == "processor":
            note = BETWEEN
        row = time_row(part, told[part], seconds if alone else None, currency=currency, note=note)
        rows.append({**row, "assembled_seconds": seconds})
    return rows


def _spread(done: list[Emulation]) -> float | None:
    """Of the steps of the rank where they differ most."""
    from planner.lab.run.full_times import spread

    found = [spread([a + b for a, b in zip(one.totals, one.updates, strict=True)]) for one in done]
    return max((one for one in found if one is not None), default=None)


KINDS = {"forward": "F", "backward": "B", "weight": "W"}
"""Letters of the passes in the table; B is the whole backward pass, also where it is computed in halves, W a part of it."""


def _stages(told: Told, done: list[Emulation], currency: str, elsewhere: str) -> list[dict[str, Any]]:
    """Rows of every pass of the measured ranks, seconds per microbatch."""
    from planner.lab.run.full_times import spread
    from planner.lab.run.record import time_row

    found = []
    for one in done:
        for (name, stage), values in sorted(
            one.samples.items(), key=lambda item: (item[0][1], list(KINDS).index(item[0][0]))
        ):
            predicted = None if elsewhere else float(told.passes.computed[name][stage])
            row = time_row(
                KINDS[name],
                predicted,
                statistics.median(values),
                spread=spread(values),
                currency=currency,
                note=elsewhere,
            )
            found.append({"rank": one.rank, "stage": stage, "kind": row.pop("what"), **row})
    return found


def _updates(priced: Priced, told: Told, done: list[Emulation], currency: str, elsewhere: str) -> list[dict[str, Any]]:
    """Rows of clipping and update of every measured rank."""
    from planner.lab.run.full_times import spread
    from planner.lab.run.predicted_ranks import position
    from planner.lab.run.record import time_row

    found = []
    for one in done:
        update = float(told.update[position(one.stage, int(priced.dealt.pp))])
        found.append(
            time_row(
                f"optimizer of rank {one.rank}", None if elsewhere else update, statistics.median(one.updates),
                spread=spread(one.updates), currency=currency, note=elsewhere,
            )
        )  # fmt: skip
    return found

"""Level rank: some ranks of the plan, one after the other on one device, and the step that follows from them.

Measured are the passes, the update and the memory of each rank; priced are collectives, the wait for other stages and what
belongs to the whole job. The two are put together by the cost model's own schedule (``assembled_step.py``): ``assembled_seconds``
of the rows, which sum to that of the step; ``measured_seconds`` is there where the rank itself was measured.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from planner import detect
from planner.error_bars import error_bar
from planner.lab.launch.state import Bar, Pace
from planner.lab.run.assembled_step import (
    MEASURED,
    Assembled,
    assemble,
    predicted_as_run,
    predicted_of,
    predicted_step,
    priced_as_run,
)
from planner.lab.run.comparison import attention_said, device_memory, memory_row, predicted_memory, tracked_rank
from planner.lab.run.eager_pricing import EagerRun, host_is_measured, mean_host, notes_of, yardsticks
from planner.lab.run.kernel_trace import by_host
from planner.lab.run.learn import not_compared
from planner.lab.run.levels import FIRST, ONE_PROCESS, SETTING_UP, Task, kills, step_limits
from planner.lab.run.record import measured_row, rates, spread, time_row
from planner.lab.run.workers import Lost, Manner, measure_all
from planner.timeline.passes import stage_kind
from planner.units import GIB, format_seconds

if TYPE_CHECKING:
    from planner.lab.run.emulate import Emulation

PRICED = "priced, not measured: one device has no neighbours"
WALKED = "priced: the schedule walked with the measured passes"
BETWEEN = "measured and not compared: on a processor the schedule's own work between the passes, which nothing prices, is in it"
ALONE = "the rank ran alone; in a step, and while a profile of several ranks is measured, all of them compute: "
MADE_UP = "only the yardstick makes up for that"
NOT_MADE_UP = "without a yardstick in the profile that shows as an error"
UNTIMED = "latency and wire time of collectives, waiting for other ranks, NCCL's own memory"
"""What a rank alone does not show."""


def obstacle(task: Task) -> str:
    """A CPU whose memory the rank does not fit into, or fp32 on a GPU."""
    machine, split = task.machine, task.asked.split
    if machine.place is not None:
        return ONE_PROCESS
    if machine.device != "cpu":
        fp32 = "the torch model has flash attention on a GPU in bf16 only; plan with --precision bf16"
        if split.precision == "fp32":
            return fp32
    every = [predicted_memory(task.asked, stage) for stage in {0, min(1, split.pp - 1), split.pp - 1}]
    needs = max(one["host"] + (one["peak"] if machine.device == "cpu" else 0.0) for one in every)
    if needs <= machine.memory:
        return ""
    if machine.device != "cpu":
        return (
            f"the worst rank has {needs / GIB:.0f} GiB of optimizer states on the host and {machine.memory / GIB:.0f} GiB of main "
            "memory are free; plan with a smaller --offload-optimizer"
        )
    return (
        f"the worst rank allocates {needs / GIB:.1f} GiB and {machine.memory / GIB:.1f} GiB of main memory are free; "
        "use a GPU, or a smaller model"
    )


def run(task: Task) -> dict[str, Any]:
    """The ranks asked for, or one of the first, the second and the last stage."""
    ranks, before = task.chosen_ranks(), detect.pressure()
    where = "this CPU" if task.machine.device == "cpu" else "this GPU"
    count = "1 rank alone" if len(ranks) == 1 else f"{len(ranks)} ranks, one after the other"
    stated = (
        f"{count} on {where}: a step whose memory is followed, {task.warmup} warm and {task.steps} measured steps. Limits: "
        f"{format_seconds(SETTING_UP)} to build the model, {step_limits(task, 1 + task.warmup + task.steps)}"
    )
    print(stated, file=sys.stderr, flush=True)
    limits = {"setting_up_seconds": SETTING_UP, "step_seconds": task.step_seconds, "first_step_seconds": FIRST * task.step_seconds}
    content = result(task, _emulated(task, ranks)) | {"limits": limits}
    if task.machine.device == "cpu":
        content["device"]["pressure"] = {"some_avg10": {"before": before, "after": detect.pressure()}}
    return content


def _emulated(task: Task, ranks: list[int]) -> list[Emulation]:
    """Each in a process of its own, one at a time: they share the device, and times are taken. One that is lost is a result."""
    from planner.lab.run.emulate import Alone, Emulation, emulate

    split, cluster, killed = task.asked.split, task.asked.cluster, kills()
    on_cpu = task.machine.device == "cpu"
    alone = Alone(
        device=task.machine.device, warmup=task.warmup, steps=task.steps, timeout=task.step_seconds,
        yardsticks=yardsticks(cluster) if on_cpu else None, host=on_cpu and host_is_measured(cluster, split),
    )  # fmt: skip
    manner = Manner(work=partial(emulate, alone), at_once=1, fork=on_cpu, where="alone on one device", limit=SETTING_UP)
    found: list[Emulation] = []

    def lost(one: Lost) -> None:
        if one.rank >= 0 or not found:
            kept = one.kept or Emulation.of(one.rank if one.rank >= 0 else ranks[0], split)
            found.append(dataclasses.replace(kept, failure=one.failure(killed)))

    for rank in ranks:
        pace = Pace("", task.warmup + task.steps + 2, skip=2)
        with Bar(which=f"{task.which}rank {rank}, ") as bar:
            begun = partial(pace.next, bar.show)
            found += [one for one in measure_all([(rank, split)], manner, lost=lost, begun=begun) if one is not None]
        if found and found[-1].outcome == "interrupted":
            break
    return found


def result(task: Task, found: list[Emulation]) -> dict[str, Any]:
    """Everything about the ranks as plain data; what did not get through has a failure, and no times come from it."""
    failed = [one for one in found if one.failure is not None]
    done = [one for one in found if one.outcome == "completed" or (one.totals and one.outcome != "out_of_memory")]
    content: dict[str, Any] = {
        "rung": "rank", "trainer": task.asked.trainer.name, "changes": [*task.asked.changes, *_changes(task, found)],
        "unchecked": list(task.asked.unchecked),
        "layout": task.asked.layout.to_dict(), "num_gpus": int(task.asked.layout.num_gpus),
        "outcome": failed[0].outcome if failed else "completed", "failure": _failure(failed[0]) if failed else None,
        "device": {"name": task.machine.name, "kind": task.machine.device, "ranks": 1},
        "ranks": [_memory(task, one) for one in found if one.memory is not None],
        "not_measured": UNTIMED, "failures": [_failure(one) for one in failed],
    }  # fmt: skip
    if done:
        content |= _times(task, done)
        content["changes"] += content.get("borrowed", [])
    return content


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
    eager = found[0].not_compiled.items()
    changes += [f"{name} ran as several kernels, not as one: {why}" for name, why in eager]
    changes += attention_said(split.attention, (name for one in found for name in one.attention))
    if split.model.is_moe:
        changes.append("every expert gets the same number of tokens: without neighbours routing means nothing")
    return changes


def _failure(one: Emulation) -> dict[str, Any]:
    assert one.failure is not None
    phase, sentence = one.failure["phase"], one.failure["sentence"]
    if one.outcome not in ("hung", "lost_rank", "interrupted"):  # those say all of it
        sentence = f"rank {one.rank} alone on one device, {phase}: {sentence}"
    return {"rank": one.rank, "phase": phase, "sentence": sentence, "allocated_gib": one.failure["allocated_gib"]}


def _memory(task: Task, one: Emulation) -> dict[str, Any]:
    """One rank's memory as level meta writes it, what the allocator says, its update, and its local copies."""
    content = tracked_rank(task.asked, one.memory)
    if task.machine.device != "cpu":
        predicted = device_memory(task.asked, one.stage, alone=True)
        content["memory"] += [memory_row(name, size, one.allocator[name]) for name, size in predicted.items()]
    else:
        content["resident_gib"] = one.allocator.get("resident", 0) / GIB
    return {**content, "stand_ins": one.stand_ins}


# ------------------------------------------------------------------------------------------------ times


def _times(task: Task, done: list[Emulation]) -> dict[str, Any]:
    """Passes and updates of the ranks and, where the device is the plan's, the step that they make."""
    elsewhere = not_compared(task.asked.cluster.hardware, task.machine)
    currency = "processor" if task.machine.device == "cpu" else "device"
    ran = None if elsewhere or currency == "device" else _eager_run(task, done)
    priced = ran.priced if ran else task.asked.priced()
    predicted = predicted_as_run(priced, task.asked.split, ran.host) if ran else predicted_of(priced)

    def row(what: str, seconds: float, values: list[float], note: str = "") -> dict[str, Any]:
        note = elsewhere or note
        return measured_row(what, None if note else seconds, values, currency=currency, note=note)

    stages, updates = [], []
    for one in done:
        for kind, stage in sorted(one.samples, key=lambda key: (key[1], "FBW".index(key[0]))):
            slow = by_host(one.host_bound) if (stage, kind) in one.host_bound else ""
            found = row(kind, float(predicted.computed[kind][stage]), one.samples[kind, stage], slow)
            if slow:
                found["busy"] = one.host_bound[stage, kind]
            stages.append({"rank": one.rank, "stage": stage, "kind": found.pop("what"), **found})
        update = float(predicted.update[stage_kind(one.stage, task.asked.split.pp)])
        updates.append(row(f"optimizer of rank {one.rank}", update, one.updates))
    if elsewhere:
        return {"stages": stages, "times": updates}
    whole, parts = assemble(priced, [one.seen() for one in done], predicted), predicted_step(priced, predicted).parts
    bound = {key: share for one in done for key, share in one.host_bound.items()}
    spreads = [spread([a + b for a, b in zip(one.totals, one.updates, strict=True)]) for one in done]
    widest = max((one for one in spreads if one is not None), default=None)
    return {
        "stages": stages, "times": [*_assembled_rows(task, whole, parts, widest, by_host(bound)), *updates],
        "as_run": notes_of(ran, stages) if ran else None, "borrowed": list(whole.borrowed), "slowest_stage": whole.slowest,
        "rates": rates(priced.estimate, int(priced.assigned.num_gpus), None if bound else sum(parts.values()), whole.step),
    }  # fmt: skip


def _eager_run(task: Task, done: list[Emulation]) -> EagerRun:
    """What the ranks are compared with on the plan's own processor: the plan as it runs there."""
    return EagerRun(
        asked=task.asked, priced=priced_as_run(task.asked), on_cpu=True, not_compiled={},
        host=mean_host([one.host for one in done]), slowed=[value for one in done for value in one.slowed],
        update_slowed=[value for one in done for value in one.update_slowed],
        more=[ALONE + (MADE_UP if any(one.slowed for one in done) else NOT_MADE_UP)],
    )  # fmt: skip


def _assembled_rows(
    task: Task, whole: Assembled, predicted: dict[str, float], spread: float | None, slow: str
) -> list[dict[str, Any]]:
    """The step and its parts. ``assembled_seconds`` sum to the step; ``measured_seconds`` are there where one rank shows them.
    ``slow``: why passes, and the step with them, are not compared."""
    step, currency = sum(predicted.values()), "processor" if task.machine.device == "cpu" else "device"
    bar = error_bar("step_time", task.asked.trainer, task.asked.cluster.hardware, task.plan.kind())
    row = time_row("step", step, whole.step, interval=None if slow else bar.interval(step), currency=currency, note=slow)
    rows = [{**row, "spread": spread, "assembled_seconds": whole.step}]
    for part, seconds in whole.parts.items():
        if seconds == predicted[part] == 0.0:
            continue
        alone = part in MEASURED
        note = "" if alone else WALKED if part in ("bubble", "stragglers") else PRICED
        if part == "once_per_step" and currency == "processor":
            note = BETWEEN
        if part in ("compute", "recompute") and slow:
            note = slow
        row = time_row(part, predicted[part], seconds if alone else None, currency=currency, note=note)
        rows.append({**row, "assembled_seconds": seconds})
    return rows

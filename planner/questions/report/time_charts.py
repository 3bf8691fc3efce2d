"""Charts of where the time of one step goes."""

from collections import Counter

import numpy as np

from planner.cost.estimate import HIDDEN
from planner.questions.report.document import Chart, Value, chart, columns, shown
from planner.questions.report.subject import Subject
from planner.timeline.step_slices import Timeline
from planner.timeline.waterfall import waterfall

UNSEEN = 0.001
"""Parts of the step below this share are not worth a word."""
MOST_ACTIONS = 10_000
"""Actions that the page holds; of longer steps the begin and the end."""
VISIBLE = 48
"""Actions of a rank that a window shows at first: more are too narrow to be seen."""
KIND_TEXT = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def waterfall_chart(about: Subject) -> Chart:
    """The step time from computation at the peak rate to the whole, loss by loss."""
    one = about.plan.prediction
    step = one.step_time_s
    bars = waterfall(one)
    rows = [
        (bar.name, bar.text, bar.seconds, bar.seconds / step, bar.start, bar.end)
        for bar in bars if bar.name in ("ideal", "kernels") or bar.seconds > 0
    ]  # fmt: skip
    rows.append(("step", "step time", step, 1.0, 0.0, step))
    losses = sorted((bar for bar in bars if bar.name != "ideal"), key=lambda bar: -bar.seconds)
    first, second = losses[:2]
    reading = (
        f"Of {shown(step, 'seconds')} per step, {shown(bars[0].seconds, 'seconds')} ({shown(one.mfu, 'share')}) would be needed at "
        f"the peak rate of the GPU. The largest loss is {first.text} with {shown(first.seconds, 'seconds')} "
        f"({shown(first.seconds / step, 'share')} of the step)"
    )
    if second.seconds > 0.005 * step:
        reading += (
            f", then {second.text} with {shown(second.seconds, 'seconds')} ({shown(second.seconds / step, 'share')})"
        )
    hidden = {name: one.hidden_s[name] for name in HIDDEN if one.hidden_s[name] > UNSEEN * step}
    notes = [
        "Kernels below the peak: matrix shapes, attention and memory-bound operators, the clock under load, and stages that "
        "hold more than the mean."
    ]
    if hidden:
        listed = ", ".join(
            f"{name} {shown(value, 'seconds')}" for name, value in sorted(hidden.items(), key=lambda x: -x[1])
        )
        notes.append(f"Communication that runs during the computation and costs no time of its own: {listed}.")
    return chart(
        "waterfall", "Where the step time goes", f"{reading}.",
        columns(
            "-name text, part text, seconds seconds time, share share of the step, -start seconds from, "
            "-end seconds to"
        ),
        rows, notes=tuple(notes),
    )  # fmt: skip


def pipeline_chart(about: Subject, step: Timeline) -> Chart:
    """Every action of every stage, and what stands around the pipeline."""
    actions, gap = list(step.actions), None
    if len(actions) > MOST_ACTIONS:
        starts, ends = (np.sort([getattr(one, side) for one in actions]) for side in ("start", "end"))
        gap = (float(starts[MOST_ACTIONS // 2]), float(ends[len(ends) - MOST_ACTIONS // 2]))
        actions = [one for one in actions if one.start < gap[0] or one.end > gap[1]]
    rows: list[tuple[Value, ...]] = [
        (one.rank, KIND_TEXT[one.kind], one.stage // step.ranks, one.microbatch, one.start, one.end) for one in actions
    ]
    rows += [
        (one.rank, one.kind, -1, -1, one.start, one.end)
        for one in step.around if not one.hidden and one.end - one.start > 1e-4 * step.step_time and one.microbatch < 0
    ]  # fmt: skip
    totals = [step.totals(rank) for rank in range(step.ranks)]
    counts = Counter(one.rank for one in step.actions)
    idle = [one["bubble"] / step.step_time for one in totals]
    most, least = int(np.argmax(idle)), int(np.argmin(idle))
    chunks = step.stages // step.ranks
    table = [
        (
            rank, counts[rank], one["compute"] + one["recompute"],
            sum(value for name, value in one.items() if "communication" in name), one["bubble"], idle[rank],
        )
        for rank, one in enumerate(totals)
    ]  # fmt: skip
    per_rank = len(step.actions) / step.ranks
    back = next((one.end for one in step.actions if one.rank == 0 and one.kind != "F"), step.step_time)
    window = max(step.step_time * VISIBLE / per_rank, 1.7 * back)
    facts = {
        "step_s": step.step_time, "ranks": step.ranks, "chunks": chunks, "actions": len(step.actions),
        "window_s": step.step_time if per_rank <= 1.5 * VISIBLE else min(window, step.step_time),
        "gap_from_s": None if gap is None else gap[0], "gap_to_s": None if gap is None else gap[1],
    }  # fmt: skip
    notes = [
        "Inside a pass the model knows the sums of computation and communication, not how they alternate; `--format trace` writes "
        "every rank with its streams for Perfetto."
    ]
    if gap is not None:
        between = f"{shown(gap[0], 'seconds')} to {shown(gap[1], 'seconds')}"
        notes.insert(
            0,
            f"Of {len(step.actions):,} actions the begin and the end are drawn; the steady state from {between} is left out.",
        )
    return chart(
        "pipeline", "The pipeline, action by action", _pipeline_reading(step, chunks, idle, most, least),
        columns(
            "stage count, kind text action, chunk count virtual stage, microbatch count, start_s seconds from, "
            "end_s seconds to"
        ),
        rows, facts=facts, notes=tuple(notes), table=table,
        table_columns=columns(
            "stage count, actions count, compute_s seconds computation, "
            "communication_s seconds exposed communication, idle_s seconds idle in the pipeline, "
            "idle_share share of the step"
        ),
    )  # fmt: skip


def _pipeline_reading(step: Timeline, chunks: int, idle: list[float], most: int, least: int) -> str:
    each = f"{step.num_microbatches:,} microbatch" + ("es" if step.num_microbatches != 1 else "")
    if step.ranks == 1:
        return f"Without a pipeline one stage runs {each}, forward and backward in turn, and never waits for another."
    virtual = f", each with {chunks} virtual stages," if chunks > 1 else ""
    text = f"{step.ranks} stages{virtual} work on {each}"
    if idle[most] - idle[least] < 0.002:
        return f"{text}; every stage idles {shown(idle[most], 'share')} of the step."
    return (
        f"{text}; stage {most} idles most, {shown(idle[most], 'share')} of the step, stage {least} least with "
        f"{shown(idle[least], 'share')}."
    )

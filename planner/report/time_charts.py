"""Charts of where the time and the memory of one step go."""

from __future__ import annotations

from planner.analysis.waterfall import waterfall
from planner.cost.step import HIDDEN
from planner.report.document import Chart, Column, chart, shown
from planner.report.subject import Subject


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
        reading += f", then {second.text} with {shown(second.seconds, 'seconds')} ({shown(second.seconds / step, 'share')})"
    hidden = {name: one.hidden_s[name] for name in HIDDEN if one.hidden_s[name] > 0.001 * step}
    notes = [
        "Kernels below the peak: matrix shapes, attention and memory-bound operators, the clock under load, and stages that "
        "hold more than the mean."
    ]
    if hidden:
        listed = ", ".join(f"{name} {shown(value, 'seconds')}" for name, value in sorted(hidden.items(), key=lambda x: -x[1]))
        notes.append(f"Communication that runs beside the computation and costs no time of its own: {listed}.")
    return chart(
        "waterfall", "Where the step time goes", f"{reading}.",
        (
            Column(key="name", title="name", kind="text", in_table=False), Column(key="part", title="part", kind="text"),
            Column(key="seconds", title="time", kind="seconds"), Column(key="share", title="of the step", kind="share"),
            Column(key="start", title="from", kind="seconds", in_table=False),
            Column(key="end", title="to", kind="seconds", in_table=False),
        ),
        rows, notes=tuple(notes),
    )  # fmt: skip

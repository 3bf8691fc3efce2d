"""Charts of where the time of one step goes."""

from collections import Counter

import numpy as np

from planner.cost.estimate import HIDDEN
from planner.questions.report import specs
from planner.questions.report.document import Chart, Spec, Value, chart, columns, shown
from planner.questions.report.specs import BARE, BLUE, GREEN, GREY, ORANGE, RED, TEAL, VIOLET, WIDTH, layer
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
GROUPS = {
    "ideal": ("ideal", TEAL), "kernels": ("computation", ORANGE), "recompute": ("computation", ORANGE),
    "host": ("computation", ORANGE), "tensor_communication": ("communication", RED),
    "context_communication": ("communication", RED), "expert_communication": ("communication", RED),
    "data_communication": ("communication", RED), "pipeline_communication": ("communication", RED),
    "bubble": ("waiting", GREY), "stragglers": ("waiting", GREY), "optimizer": ("end of the step", VIOLET),
    "offload": ("end of the step", VIOLET), "overhead": ("end of the step", VIOLET), "step": ("step time", BLUE),
}  # fmt: skip
"""What each bar of the waterfall belongs to."""
KIND_COLOURS = {
    "forward": BLUE, "backward": GREEN, "input gradient": GREEN, "weight gradient": "#8fb94b",
    "gather weights": RED, "reduce gradients": RED, "stragglers": GREY, "optimizer": VIOLET,
    "optimizer on host": VIOLET, "overhead": "#b3a17d",
}  # fmt: skip


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
        rows, notes=tuple(notes), spec=_waterfall_spec,
    )  # fmt: skip


def _waterfall_spec(chart: Chart) -> Spec:
    end = max(float(row[5] or 0) for row in chart.rows)
    names = [str(row[0]) for row in chart.rows]
    steps = [{"group": f"{[GROUPS[one][0] for one in names]!r}[indexof({names!r}, datum.name)]"}]
    y = specs.name("part", None, sort=None, axis=BARE)
    x = specs.number("start", scale=specs.span(0, end), axis=specs.seconds_axis("time", end))
    tips = specs.tip(part="part", seconds_text="time", share_text="of the step", start_text="from", end_text="to")
    texts = (
        (f"datum.end <= {0.7 * end}", "left", 5, "end", "currentColor"),
        (f"datum.end > {0.7 * end} && datum.start > {0.3 * end}", "right", -5, "start", "currentColor"),
        (f"datum.end > {0.7 * end} && datum.start <= {0.3 * end}", "right", -6, "end", "white"),
    )
    return {
        "width": WIDTH, "height": 26 * len(chart.rows),
        "layer": [
            layer("bar", {"cornerRadius": 2, "minBandSize": 4}, steps, y=y, x=x, x2={"field": "end"}, tooltip=tips,
                  color=specs.hue("group", dict(GROUPS[one] for one in names))),
            *(
                layer("text", {"align": align, "dx": dx, "color": colour}, [where], y=y, x=specs.number(field),
                      text={"field": "seconds_text"})
                for where, align, dx, field, colour in texts
            ),
        ],
    }  # fmt: skip


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
        rows, facts=facts, notes=tuple(notes), table=table, spec=_pipeline_spec,
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


def _pipeline_spec(chart: Chart) -> Spec:
    facts = chart.facts
    end, ranks, chunks = float(facts["step_s"]), int(facts["ranks"]), int(facts["chunks"])
    kinds = {str(row[1]): KIND_COLOURS.get(str(row[1]), GREY) for row in chart.rows}
    unit, factor = ("s", 1) if end >= 1 else ("ms", 1000)
    moment = f"format({{0}} * {factor}, '.4~r') + ' {unit}'"
    took = "datum.end_s - datum.start_s"
    texts = {
        "from": moment.format("datum.start_s"), "to": moment.format("datum.end_s"),
        "takes": f"({took}) >= 1 ? format({took}, '.4~r') + ' s' : format(({took}) * 1000, '.4~r') + ' ms'",
        "mb": "datum.microbatch < 0 ? 'none: once per step' : format(datum.microbatch, 'd')",
        "virtual": "datum.chunk < 0 ? 'all' : format(datum.chunk, 'd')",
    }  # fmt: skip
    virtual = {"virtual": "virtual stage"} if chunks > 1 else {}
    tips = specs.tip(**{"kind": "action", "stage": "stage", **virtual, "mb": "microbatch", "from": "from", "to": "to",
                        "takes": "takes"})  # fmt: skip
    seen = "!isDefined(window.start_s) || (datum.end_s >= window.start_s[0] && datum.start_s <= window.start_s[1])"
    opacity = specs.number("chunk", legend=None, scale={
        "domain": [-1, max(chunks - 1, 1)], "range": [1, 0.5 if chunks > 1 else 1]})  # fmt: skip
    shared: Spec = {"x2": {"field": "end_s"}, "color": specs.hue("kind", kinds), "opacity": opacity}
    axes = [specs.seconds_axis(text, end) for text in (
        "time in the step", "the whole step: drag to move or to draw the window above")]  # fmt: skip
    detail = layer(
        "rect", {"clip": True}, [seen, texts], **shared, tooltip=tips,
        x=specs.number("start_s", axis=axes[0], scale={"domain": {"param": "window"}, "nice": False}),
        y=specs.step("stage", "pipeline stage", scale={"paddingInner": 0.12},
                     axis={"ticks": False, "domain": False, "labelOverlap": True}),
    )  # fmt: skip
    overview = layer(
        "rect", {"clip": True}, **shared, x=specs.number("start_s", axis=axes[1], scale=specs.span(0, end)),
        y=specs.step("stage", axis=None),
    )  # fmt: skip
    brush = {"fill": "currentColor", "fillOpacity": 0.12, "stroke": RED, "strokeWidth": 2, "strokeOpacity": 1}
    window = {"name": "window", "select": {"type": "interval", "encodings": ["x"], "mark": brush},
              "value": {"x": [0, float(facts["window_s"])]}}  # fmt: skip
    return {
        "vconcat": [
            {"width": WIDTH, "height": max(7, min(32, 480 // ranks)) * ranks, **detail},
            {"width": WIDTH, "height": max(28, min(64, 4 * ranks)), "params": [window], **overview},
        ],
        "resolve": {"scale": {"color": "shared"}},
    }

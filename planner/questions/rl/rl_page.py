"""The steps of a placement as one page to look at: the timeline of the pools, phases, memory, notes; HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.questions.rl.rl_tables import POOL_TEXT, actor_text, notes, placement_text, rollout_text
from planner.questions.rl.rl_trace import STEPS, slices
from planner.rl.rl_answer import PART_TEXT
from planner.rl.rl_plan import PHASES, RlPlan, RlPrediction
from planner.terminal.tables import percent, seconds

WIDTH, LANE, LEFT = 1000.0, 34.0, 150.0
"""Sizes of the drawing: of all steps, of a pool's lane, and of what stands left of it."""
COLOURS = dict(
    zip(
        (*PHASES, "wait"),
        ("#bab0ac", "#4e79a7", "#86bcb6", "#f1ce63", "#b6992d", "#d4a6c8", "#e15759", "#d37295", "#59a14f", "#9d7660", "#eeeeee"),
        strict=True,
    )
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .9em;border-bottom:1px solid #ddd;text-align:left}"
    "td.n{text-align:right}svg{width:100%;height:auto}"
)


def page_of(plan: RlPlan) -> str:
    """The page. The plan holds a prediction."""
    assert plan.prediction is not None
    one, work = plan.prediction, plan.workload
    title = f"{work.model.name} by {work.algorithm} on {plan.gpus} x {plan.hardware}"
    said = [placement_text(plan), f"actor {actor_text(plan)}", f"rollout {rollout_text(plan)}", plan.framework, plan.engine]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape('; '.join(said))}</p>",
        f"<p><b>{seconds(one.step_s)} a step</b>, {one.tokens_per_s_per_gpu:,.0f} tokens/s per GPU. {escape(plan.why)}</p>",
        f"<h2>{STEPS} steps</h2>{_timeline(plan)}",
        f"<h2>Phases</h2>{_phases(one)}<h2>Memory of a GPU</h2>{_memory(one)}",
        "".join(f"<p>{escape(line)}</p>" for line in notes(plan)),
        "</html>\n",
    ]
    return "\n".join(parts)


def _timeline(plan: RlPlan) -> str:
    """Lanes of the pools, a slice for each phase; seconds at the ends of steps."""
    assert plan.prediction is not None
    found, total = slices(plan), STEPS * plan.prediction.step_s
    pools = list(dict.fromkeys(pool for pool, *_ in found))
    height = LANE * len(pools) + 30.0
    drawn = [f'<svg viewBox="0 0 {LEFT + WIDTH + 10:.0f} {height:.0f}" role="img" aria-label="timeline">']
    for number, pool in enumerate(pools):
        drawn.append(f'<text x="0" y="{LANE * number + 20:.0f}" font-size="12">{escape(POOL_TEXT[pool])}</text>')
    for pool, phase, start, end, _ in found:
        x, wide, y = LEFT + WIDTH * start / total, WIDTH * (end - start) / total, LANE * pools.index(pool) + 4.0
        name = f"{PART_TEXT[phase]}: {seconds(end - start)}"
        drawn.append(
            f'<rect x="{x:.2f}" y="{y:.0f}" width="{max(wide, 0.3):.2f}" height="{LANE - 8:.0f}" fill="{COLOURS[phase]}">'
            f"<title>{escape(name)}</title></rect>"
        )
    for step in range(STEPS + 1):
        x = LEFT + WIDTH * step / STEPS
        at = "start" if not step else "end" if step == STEPS else "middle"
        label = seconds(step * plan.prediction.step_s) if step else "0"
        drawn.append(f'<text x="{x:.1f}" y="{height - 8:.0f}" font-size="11" text-anchor="{at}">{label}</text>')
    used = dict.fromkeys(phase for _, phase, *_ in found)
    legend = " ".join(f'<span style="background:{COLOURS[one]};padding:0 .6em"></span> {escape(PART_TEXT[one])}' for one in used)
    return "".join(drawn) + f"</svg><p>{legend}</p>"


def _phases(one: RlPrediction) -> str:
    rows = [
        (PART_TEXT[name], seconds(one.parts_s[name]), percent(one.parts_s[name] / one.step_s), seconds(one.phases_s.get(name, 0.0)))
        for name in (*PHASES, "wait")
        if one.parts_s[name] > 0.0 or one.phases_s.get(name, 0.0) > 0.0
    ]
    return _table(("phase", "of the step", "share", "by itself"), rows)


def _memory(one: RlPrediction) -> str:
    rows = [(name, f"{size:.1f} GiB", percent(one.memory_risk[name])) for name, size in one.memory_gib.items()]
    return _table(("phase", "peak", "chance that it runs out"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if number else ''}>{escape(cell)}</td>" for number, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"

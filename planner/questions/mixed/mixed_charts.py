"""Charts of a mixed plan: its cluster, who holds what, where time goes and is lost, its pipelines, memory, sites."""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.explain import COMPONENT_TEXT, PART_TEXT
from planner.mixed.mixed_estimate import MixedEstimate
from planner.mixed.mixed_plan import MixedPlan, StagePrediction
from planner.mixed.mixed_timeline import Action, actions
from planner.mixed.site_report import SiteReport
from planner.questions.hardware.cluster_show import shown_cluster
from planner.questions.report.document import Chart, Value, chart, columns, shown
from planner.questions.report.step_charts import NOTHING, drawn_actions, window_of
from planner.units import GIB, GIGA, KILO, TERA, format_seconds

MOST_STAGES = 40
"""Stages of which the actions are drawn: the first pipelines, whole."""


def stage_name(plan: MixedPlan, number: int) -> str:
    """A stage in a few words, by its place in the prediction: '2.1 t4', of one pipeline '1 t4'."""
    one, before = plan.prediction.stages[number], plan.prediction.stages[:number]
    place = 1 + sum(other.pipeline == one.pipeline for other in before)
    return f"{one.pipeline}.{place} {one.kind}" if len(plan.layout.pipelines) > 1 else f"{place} {one.kind}"


def group_name(plan: MixedPlan, one: StagePrediction) -> str:
    """The group of equal pipelines of a stage: its number, how many they are, microbatches and their sequences."""
    group = plan.layout.pipelines[one.pipeline - 1]
    return f"{one.pipeline} ({group.count} x {group.num_microbatches} x {group.micro_batch_size})"


def cluster_chart(plan: MixedPlan) -> Chart:
    """Kinds of nodes, and the GPUs of each that are in use."""
    rows, table = list[tuple[Value, ...]](), list[tuple[Value, ...]]()
    data = shown_cluster(plan.cluster)
    for one in data["kinds"]:
        used = plan.layout.gpus_of(one["kind"])
        place = f"{one['kind']}: {one['nodes']} x {one['gpus_per_node']}"
        rows.append((place, "in use", used, 0, used))
        if one["gpus"] > used:
            rows.append((place, "not used", one["gpus"] - used, used, one["gpus"]))
        slow = plan.cluster.slowdowns(one["kind"])[0]
        table.append((
            one["kind"], one["hardware"], one["site"], one["nodes"], one["gpus"], used, one["memory_bytes"] / GIB,
            one["peak_bf16_flops"] / TERA, one["usd_per_gpu_hour"], slow if slow != 1.0 else None,
        ))  # fmt: skip
    sites = ", ".join(data["sites"])
    where = f" in {sites}" if len(data["sites"]) > 1 else ""
    spare = data["gpus"] - plan.layout.num_gpus
    left = f"; {spare:,} {'is' if spare == 1 else 'are'} left out" if spare else ""
    reading = f"{data['gpus']:,} GPUs of {len(data['kinds'])} kinds{where}: {plan.layout.num_gpus:,} hold the model{left}."
    return chart("mixed-cluster", reading, rows, [*map(_link, data["links"]), *data["notes"]], table=table)


def _link(one: dict[str, Any]) -> str:
    """A link in a sentence."""
    each = " of each node" if one["per_node"] else ""
    flows = f", {one['flows']} flows" if (one["flows"] or 1) > 1 else ""
    rate, latency = f"{one['bytes_per_s'] / GIGA:.4g} GB/s", format_seconds(one["latency_s"])
    return f"{' to '.join(one['between'])}: {rate}{each}, {latency} one way{flows}."


def layers_chart(plan: MixedPlan) -> Chart:
    """Which stage holds which layers, of which kind."""
    rows, before = list[tuple[Value, ...]](), Counter[int]()
    for one in plan.prediction.stages:
        before[one.pipeline] += 1
        first, last = one.first_layer, one.first_layer + one.layers
        held = f"{first + 1:.0f}-{last:.0f}" if one.layers else "none"
        label = f"{one.kind}, {one.layers:.0f} layers, tp {one.tp}"
        rows.append((
            group_name(plan, one), before[one.pipeline], one.kind, one.gpus, one.tp, held, first, last, (first + last) / 2.0,
            label, one.recompute, one.busy_s / plan.prediction.step_time_s, one.imbalance_s,
        ))  # fmt: skip
    kinds = [one.kind for one in plan.cluster.nodes if plan.layout.gpus_of(one.kind)]
    layers = {
        kind: sum(one.layers * plan.layout.pipelines[one.pipeline - 1].count for one in plan.prediction.stages if one.kind == kind)
        for kind in kinds
    }
    total = sum(layers.values())
    parts = ", ".join(f"{shown(size / total, 'share')} on {kind}" for kind, size in layers.items())
    copies = f"{plan.layout.replicas:,} copies of the model" if plan.layout.replicas > 1 else "one copy of the model"
    reading = f"{copies[:1].upper()}{copies[1:]}; of their layers lie {parts}."
    facts = {"kinds": kinds, "layers": plan.workload.model.num_layers}
    return chart("mixed-layers", reading, rows, facts=facts)


def time_chart(plan: MixedPlan) -> Chart:
    """Parts of the step, which they sum to."""
    one, start = plan.prediction, 0.0
    rows = list[tuple[Value, ...]]()
    for name in PARTS:
        seconds = one.time_s[name]
        if seconds > NOTHING * one.step_time_s:
            rows.append((name, PART_TEXT[name], seconds, seconds / one.step_time_s, start, start + seconds))
            start += seconds
    rows.append(("step", "step time", one.step_time_s, 1.0, 0.0, one.step_time_s))
    largest = max((part for part in PARTS if part != "compute"), key=lambda part: one.time_s[part])
    share = shown(one.time_s["compute"] / one.step_time_s, "share")
    reading = (
        f"Computation takes {share} of a step of {shown(one.step_time_s, 'seconds')}; of the rest {PART_TEXT[largest]} takes most, "
        f"{shown(one.time_s[largest], 'seconds')}."
    )
    return chart("mixed-time", reading, rows)


def lost_chart(plan: MixedPlan, found: MixedEstimate) -> Chart:
    """What every stage does in a step, and for what it waits; the parts of a stage sum to the step."""
    longest, step = max(one.seconds for one in found.pipelines), found.step_time
    rows, number, waits = list[tuple[Value, ...]](), 0, dict.fromkeys(plan.job().kinds, 0.0)
    for pipeline in found.pipelines:
        for stage in pipeline.stages:
            parts = {
                "busy": stage.busy, "waits for a slower stage": stage.imbalance,
                "fill and drain": max(pipeline.seconds - stage.busy - stage.imbalance, 0.0),
                "waits for a slower pipeline": longest - pipeline.seconds, "end of the step": step - longest,
            }  # fmt: skip
            waits[stage.kind] += stage.gpus * (stage.imbalance + parts["waits for a slower pipeline"])
            start = 0.0
            for part, seconds in parts.items():
                if seconds > NOTHING * step:
                    rows.append((stage_name(plan, number), part, seconds, seconds / step, start / step, (start + seconds) / step))
                start += seconds
            number += 1
    lost = plan.prediction
    gpus = sum(stage.gpus for one in found.pipelines for stage in one.stages)
    by_kind = ", ".join(f"{kind} {shown(seconds / (gpus * step), 'share')}" for kind, seconds in waits.items() if seconds > 0)
    reading = (
        f"{shown(lost.lost_between_stages, 'share')} of the GPU time is lost between unequal stages and "
        f"{shown(lost.lost_between_replicas, 'share')} between unequal pipelines{f': {by_kind}' if by_kind else ''}."
    )
    return chart("mixed-lost", reading, rows)


def pipeline_chart(plan: MixedPlan, found: MixedEstimate) -> Chart:
    """Every action of one pipeline of each group."""
    keep = _groups_drawn(plan)
    every = [one for one in actions(plan.layout, found) if one.pipeline < keep]
    names = dict[tuple[int, int], str]()
    for number, one in enumerate(plan.prediction.stages):
        at = (one.pipeline - 1, sum(key[0] == one.pipeline - 1 for key in names))
        names[at] = stage_name(plan, number)
    names = {key: name for key, name in names.items() if key[0] < keep}
    passes = [one for one in every if one.microbatch >= 0]
    drawn, gap, notes = drawn_actions(passes)
    rows: list[tuple[Value, ...]] = [
        (names[one.pipeline, one.stage], one.kind, -1, one.microbatch, one.start, one.end)
        for one in [*drawn, *(one for one in every if one.microbatch < 0 and one.end - one.start > 1e-4 * found.step_time)]
    ]  # fmt: skip
    table = [_row(name, [one for one in passes if (one.pipeline, one.stage) == key], found) for key, name in names.items()]
    idle = {str(row[0]): float(row[6]) for row in table}  # type: ignore[arg-type]
    most, least = max(idle, key=idle.__getitem__), min(idle, key=idle.__getitem__)
    shares = [shown(idle[name], "share") for name in (most, least)]
    reading = f"Stage {most} waits most, {shares[0]} of the step, stage {least} least, {shares[1]}."
    if keep < len(plan.layout.pipelines):
        notes.append(f"The first {keep} of {len(plan.layout.pipelines)} groups of equal pipelines are drawn.")
    back = next((one.end for one in passes if one.kind == "backward" and one.stage == 0), found.step_time)
    facts = {
        "step_s": found.step_time, "ranks": len(names), "chunks": 1, "lanes": list(names.values()),
        "window_s": window_of(len(passes) / len(names), back, found.step_time),
        "gap_from_s": None if gap is None else gap[0], "gap_to_s": None if gap is None else gap[1],
    }  # fmt: skip
    return chart("mixed-pipeline", reading, rows, notes, facts=facts, table=table)


def _groups_drawn(plan: MixedPlan) -> int:
    """Groups of pipelines of which the stages are drawn, at least one."""
    stages = keep = 0
    for one in plan.layout.pipelines:
        stages += len(one.stages)
        if keep and stages > MOST_STAGES:
            break
        keep += 1
    return keep


def _row(name: str, passes: list[Action], found: MixedEstimate) -> tuple[Value, ...]:
    """A stage of the table of the timeline."""
    first = {kind: next((one.end - one.start for one in passes if one.kind == kind), 0.0) for kind in ("forward", "backward")}
    busy = sum(one.end - one.start for one in passes)
    idle = max(one.seconds for one in found.pipelines) - busy
    return name, len(passes), first["forward"], first["backward"], busy, idle, idle / found.step_time


def memory_chart(plan: MixedPlan) -> Chart:
    """Peak memory of every stage against what its card has."""
    rows, table = list[tuple[Value, ...]](), list[tuple[Value, ...]]()
    stages = plan.prediction.stages
    for number, one in enumerate(stages):
        place, start, chance = stage_name(plan, number), 0.0, one.out_of_memory_probability
        for part in COMPONENTS:
            size = one.memory_gib[part]
            if size > 0.0:
                peak = one.memory_peak_gib
                rows.append((place, COMPONENT_TEXT[part], size, start, start + size, peak, one.memory_limit_gib, chance))
                start += size
        parts = [one.memory_gib[part] for part in COMPONENTS]
        margin = one.memory_limit_gib - one.memory_peak_gib
        table.append((place, *parts, one.memory_peak_gib, one.memory_limit_gib, margin, chance))
    worst = max(range(len(stages)), key=lambda number: stages[number].memory_peak_gib / stages[number].memory_limit_gib)
    one = stages[worst]
    reading = (
        f"Stage {stage_name(plan, worst)} is fullest: {shown(one.memory_peak_gib, 'gib')} of the "
        f"{shown(one.memory_limit_gib, 'gib')} of its GPUs, with a chance of {shown(one.out_of_memory_probability, 'share')} to "
        "run out."
    )
    said = ", ".join(f"{part} gib {COMPONENT_TEXT[part]}" for part in COMPONENTS)
    text = f"place text stage, {said}, peak gib, limit gib the GPU has, margin gib, chance share runs out"
    return chart("mixed-memory", reading, rows, table=table, table_columns=columns(text))


def sites_chart(report: SiteReport) -> Chart:
    """What crosses between the sites, dimension by dimension."""
    rows: list[tuple[Value, ...]] = [
        (f"{' - '.join(one.between)}, {one.dimension}", one.bytes_per_step / GIGA, one.seconds, one.exposed,
         KILO * one.usd_per_step)
        for one in report.traffic
    ]  # fmt: skip
    most = max(report.traffic, key=lambda one: one.exposed)
    sent = sum(one.bytes_per_step for one in report.traffic) / GIGA
    reading = (
        f"{sent:,.3g} GB cross between {len(report.sites)} sites in a step; {most.dimension} traffic between "
        f"{' and '.join(most.between)} is waited for most, {shown(most.exposed, 'seconds')}."
    )
    return chart("mixed-sites", reading, rows, report.notes)

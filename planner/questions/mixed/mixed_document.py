"""The report of a mixed plan: the same document, page and formats as of a training on one kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planner.cost.memory.states import COMPONENTS
from planner.costs import HOUR, rates_of
from planner.explain import COMPONENT_TEXT
from planner.mixed.export.who_runs import who_runs
from planner.mixed.local_updates import price_layout
from planner.mixed.mixed_estimate import MixedEstimate
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_plan import MixedPlan, priced_plan
from planner.mixed.mixed_search import MixedFinding
from planner.mixed.mixed_timeline import actions
from planner.mixed.one_kind import Alone, alone_of
from planner.mixed.run_limits import search_within
from planner.questions.mixed.mixed_charts import (
    cluster_chart,
    layers_chart,
    lost_chart,
    memory_chart,
    pipeline_chart,
    sites_chart,
    stage_name,
    time_chart,
)
from planner.questions.report.document import Chart, Document, Figure, Value, columns, shown, today
from planner.questions.report.show import written
from planner.questions.report.subject import MOVED, Spending
from planner.questions.report.trace import metadata_event
from planner.search import SAFE
from planner.terminal.plan_tables import samples
from planner.units import KILO, MEGA, format_count, format_days

FILE = "mixed.yaml"
ALTERNATIVES = 5
"""Best mixed plans that the search is asked for."""
EXPORTED = "plan export --to "
"""Begin of a sentence on trainers that run a plan."""


def build_mixed(plan: MixedPlan, spending: Spending, progress: Callable[[str], None]) -> Document:
    """The whole report of a mixed plan, priced again. Raises PlannerError where it does not suit its cluster any more."""
    stored, job = plan.prediction.step_time_s, plan.job()
    plan = priced_plan(job, plan.trainer, plan.layout, plan.assumptions, plan.why, plan.pins)
    found, crossing = price_layout(job, plan.layout), plan.between_sites()
    progress("searching")
    finding = search_within(job, plan.trainer, plan.pins, ALTERNATIVES, progress)
    alone = [alone_of(job, kind, plan.pins.of_layout()) for kind in job.kinds]
    charts = [
        cluster_chart(plan), layers_chart(plan), time_chart(plan), lost_chart(plan, found), pipeline_chart(plan, found),
        memory_chart(plan), *([sites_chart(crossing)] if crossing is not None and crossing.traffic else []),
    ]  # fmt: skip
    work, rates = plan.workload, _rates(plan, spending)
    nodes = ", ".join(f"{one.count} x {one.gpus_per_node} {one.kind}" for one in plan.cluster.nodes)
    return Document(
        title=f"{work.model.name} on {nodes}",
        job=(
            f"Sequences of {work.sequence_length:,} tokens, {samples(work)} per step ({format_count(work.tokens)} tokens), "
            f"{work.precision}, {work.optimizer}, trainer {plan.trainer}"
        ),
        layout=shape_text(plan.layout), fits=plan.prediction.out_of_memory_probability <= SAFE, verdict=_verdict(plan),
        notices=tuple(_notices(plan, stored, finding)), figures=tuple(_figures(plan, rates)), why=tuple(_why(plan)),
        alternatives=_alternatives(plan, finding, alone), charts=tuple(charts),
        assumptions=tuple(vars(one) for one in plan.assumptions), basis=tuple(_basis(job)), plan=plan.to_dict(), **today(),
        run=tuple(_commands(plan)), rates=rates, file=FILE,
        left_out="checkpoints, failures, nodes that are not used, storage, taxes and discounts; energy: hosts, network, cooling",
    )  # fmt: skip


def _fullest(plan: MixedPlan) -> int:
    """The stage that is most likely to run out of memory, by its place."""
    stages = plan.prediction.stages
    return max(range(len(stages)), key=lambda number: stages[number].memory_peak_gib / stages[number].memory_limit_gib)


def _verdict(plan: MixedPlan) -> str:
    """One sentence: what happens if this is run."""
    one, worst = plan.prediction, plan.prediction.stages[_fullest(plan)]
    low, high = (shown(value, "seconds") for value in one.step_time_range_s)
    stage = f"stage {stage_name(plan, _fullest(plan))}"
    memory = f"{shown(worst.memory_peak_gib, 'gib')} of the {shown(worst.memory_limit_gib, 'gib')} of a GPU"
    if one.out_of_memory_probability > SAFE:
        largest = max(COMPONENTS, key=lambda name: worst.memory_gib[name])
        return (
            f"This plan may not fit: {stage} needs {memory}, most of it {COMPONENT_TEXT[largest]}, and runs out of memory with a "
            f"chance of {shown(one.out_of_memory_probability, 'share')}; up to {100 * SAFE:.0f} % counts as safe."
        )
    return (
        f"One step takes {shown(one.step_time_s, 'seconds')} ({low} to {high} for nine of ten runs), "
        f"{shown(one.tokens_per_second, 'rate')} tokens/s on {plan.layout.num_gpus:,} GPUs; {stage} is fullest with {memory}."
    )


def _notices(plan: MixedPlan, stored: float, finding: MixedFinding) -> Iterator[str]:
    now = plan.prediction.step_time_s
    if abs(stored / now - 1.0) > MOVED:
        yield (
            f"The plan file says {shown(stored, 'seconds')} per step; priced again with the profiles of now it is "
            f"{shown(now, 'seconds')}. This report shows the new price."
        )
    if finding.best and plan.layout.outer is None:
        layout, best = finding.best[0]
        gain = 1.0 - best.step_time / now
        if gain > 0.005 and layout != plan.layout:
            yield (
                f"A search of the same job finds a faster mixed plan: {shape_text(layout)}, {shown(gain, 'share')} less time per "
                "step."
            )


def _rates(plan: MixedPlan, spending: Spending) -> dict[str, float | None]:
    """What the costs of a number of tokens are computed from; dollars with the traffic between sites."""
    one, gpus, job = plan.prediction, plan.layout.num_gpus, plan.job()
    drawn = sum(rates_of(job.clusters[kind].hardware).kwh_per_gpu_hour * plan.layout.gpus_of(kind) for kind in job.kinds)
    dollars = None if one.usd_per_step is None else one.usd_per_step * HOUR / one.step_time_s / gpus
    return {
        "tokens": spending.tokens, "tokens_per_step": plan.workload.tokens, "step_s": one.step_time_s, "gpus": gpus,
        "usd_per_gpu_hour": dollars, "kwh_per_gpu_hour": drawn / gpus,
    }  # fmt: skip


def _figures(plan: MixedPlan, rates: dict[str, float | None]) -> list[Figure]:
    """The numbers that decide."""
    one, worst = plan.prediction, plan.prediction.stages[_fullest(plan)]
    low, high = (shown(value, "seconds") for value in one.step_time_range_s)
    lost = one.lost_between_stages + one.lost_between_replicas
    steps = float(rates["tokens"] or 0.0) / plan.workload.tokens
    tokens, hours = f"for {format_count(float(rates['tokens'] or 0.0))} tokens", steps * one.step_time_s / HOUR
    usd = None if one.usd_per_step is None else steps * one.usd_per_step
    return [
        Figure("Step time", one.step_time_s, "seconds", f"nine of ten runs: {low} to {high}"),
        Figure("Throughput", one.tokens_per_second, "rate", "tokens/s of all GPUs"),
        Figure("MFU", one.mfu, "share", "model FLOP over the peak of the GPUs in use"),
        Figure("Lost to the kinds", lost, "share", "of the GPU time, between unequal stages and pipelines"),
        Figure(
            "Memory", worst.memory_peak_gib, "gib",
            f"of {shown(worst.memory_limit_gib, 'gib')} on stage {stage_name(plan, _fullest(plan))}",
            alarm=one.out_of_memory_probability > SAFE,
        ),
        Figure(
            "Runs out of memory", one.out_of_memory_probability, "share", f"chance; up to {100 * SAFE:.0f} % counts as safe",
            alarm=one.out_of_memory_probability > SAFE,
        ),
        Figure("GPU-hours", hours * plan.layout.num_gpus, "number", f"{tokens}, in {format_days(hours * HOUR)}"),
        Figure(
            "Cost", usd, "number", f"{tokens}, whole nodes in use and traffic" if usd is not None else "a kind has no price",
            text="unknown" if usd is None else f"${format_count(usd)}",
        ),
    ]  # fmt: skip


def _why(plan: MixedPlan) -> Iterator[str]:
    if plan.why:
        yield plan.why
    for text in who_runs(plan):
        yield f"Runs with: {text}."
    scales = plan.prediction.loss_scales
    if any(abs(scale - 1.0) > 1e-9 for scale in scales):
        yield (
            "Pipelines have unequal shares of the batch: their losses are scaled by "
            f"{', '.join(f'{one:.4g}' for one in scales)}, so that every sequence counts the same."
        )


def _alternatives(plan: MixedPlan, finding: MixedFinding, alone: Sequence[Alone]) -> Chart:
    """The best mixed plans of now and each kind by itself."""
    rows, tokens = list[tuple[Value, ...]](), float(plan.workload.tokens)
    mine, listed = plan.prediction.step_time_s, [layout for layout, _ in finding.best]
    for number, (layout, one) in enumerate(finding.best, 1):
        name = f"{number}, this plan" if layout == plan.layout else str(number)
        rows.append((name, shape_text(layout), one.step_time, one.step_time / mine - 1.0, tokens / one.step_time, one.mfu))
    if plan.layout not in listed:
        rows.append(("this plan", shape_text(plan.layout), mine, 0.0, tokens / mine, plan.prediction.mfu))
    for kind in alone:
        step = kind.step_time_s
        behind = None if step is None else step / mine - 1.0
        rows.append((f"{kind.kind} alone", kind.layout or "does not fit", step, behind, kind.tokens_per_second, None))
    said = "rank text #, layout text, step_s seconds step, behind signed_share against this plan, rate rate tokens/s, mfu share MFU"
    title = "The best mixed plans of this job, and each kind alone"
    return Chart(name="alternatives", title=title, reading="", columns=columns(said), rows=rows)


def _basis(job: MixedJob) -> Iterator[dict[str, str]]:
    """Prices of the kinds."""
    for one in job.cluster.nodes:
        price = one.usd_per_hour()
        known = rates_of(one.profile).basis[0]
        own = one.price is not None
        yield {
            "what": f"price of a GPU, {one.kind}", "value": "unknown" if price is None else f"{price:.4g} USD/h",
            "source": "the cluster file" if own else known.source if price else "no price: give one in the cluster file",
            "date": "" if own or not price else known.date,
        }  # fmt: skip


def _commands(plan: MixedPlan) -> Iterator[dict[str, str]]:
    """How to go on from the saved plan."""
    runs = [text.removeprefix(EXPORTED) for text in who_runs(plan) if text.startswith(EXPORTED)]
    target = runs[0].split()[0].strip(",") if runs else ""
    yield {"what": "Price it again; save the plan file from the page first", "command": f"plan estimate {FILE}"}
    if target:
        yield {"what": f"Write it for {target}", "command": f"plan export {FILE} --to {target} --output run/"}
    used = [one.kind for one in plan.cluster.nodes if plan.layout.gpus_of(one.kind)]
    if len(used) > 1:
        kind = used[-1]
        command = f"plan what-if {FILE} --without {json.dumps(kind) if ' ' in kind else kind}"
        yield {"what": f"The same job without {kind}", "command": command}
    yield {"what": "The step for ui.perfetto.dev", "command": f"plan report {FILE} --output step.trace.json"}


# ------------------------------------------------------------------------------------------------ trace


def trace_of_mixed(plan: MixedPlan) -> str:
    """The step of one pipeline of each group for Perfetto: a process for each stage."""
    job = plan.job()
    found: MixedEstimate = price_layout(job, plan.layout)
    places, events = dict[tuple[int, int], int](), list[dict[str, Any]]()
    for number, one in enumerate(plan.prediction.stages):
        key = one.pipeline - 1, sum(place[0] == one.pipeline - 1 for place in places)
        places[key] = number
        layers = f"{one.layers:.0f} layers, tp {one.tp}"
        events.append(metadata_event("process_name", number, 0, name=f"stage {stage_name(plan, number)} ({layers})"))
        events.append(metadata_event("process_sort_index", number, 0, sort_index=number))
    for action in actions(plan.layout, found):
        start, end = round(action.start * MEGA * KILO), round(action.end * MEGA * KILO)
        name = f"{action.stage}{action.kind[0].upper()}{action.microbatch}" if action.microbatch >= 0 else action.kind
        args = {"microbatch": action.microbatch} if action.microbatch >= 0 else {}
        events.append({
            "name": name, "cat": action.kind, "ph": "X", "ts": start / KILO, "dur": (end - start) / KILO,
            "pid": places[action.pipeline, action.stage], "tid": 0, "args": args,
        })  # fmt: skip
    about = {"what": f"predicted step of {plan.workload.model.name}, one pipeline of each group of equal ones",
             "layout": shape_text(plan.layout), "step_time_s": repr(found.step_time)}  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def mixed_report(plan: MixedPlan, kind: str, name: str | None, spending: Spending, progress: Callable[[str], None]) -> str | bytes:
    """The report of a mixed plan in one of the formats, with the name of a chart for a picture. Raises PlannerError."""
    return written(
        "mixed plan", (kind, name), lambda: build_mixed(plan, spending, progress), progress, lambda: trace_of_mixed(plan)
    )

"""Mixed plans on the terminal: who holds what, memory by stage and kind, and where time is lost to the difference of kinds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.cost.estimate import PARTS
from planner.explain import PART_TEXT
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.who_runs import runners, who_runs
from planner.mixed.mixed_changes import MixedChange, MixedChanges
from planner.mixed.mixed_layout import shape_text
from planner.mixed.mixed_plan import MixedPlan, StagePrediction
from planner.mixed.mixed_question import MixedAnswer
from planner.questions.mixed.show_sites import print_sites
from planner.terminal.plan_tables import risk, samples
from planner.terminal.tables import assumptions_table, fitted, percent, plain_table, seconds, table
from planner.units import plural


def print_answer(console: Console, answer: MixedAnswer) -> None:
    """The best mixed plans, each kind alone, then the best in full."""
    work = answer.job.workload
    nodes = ", ".join(f"{one.count} x {one.gpus_per_node} {one.kind}" for one in answer.job.cluster.nodes)
    title = f"{work.model.name} on {nodes}, batch {samples(work)}, {work.sequence_length} tokens, {work.precision}"
    console.print(Text(title, style="bold"))
    if answer.plans:
        rows = [
            (str(number), shape_text(one.layout), seconds(one.prediction.step_time_s), f"{one.prediction.tokens_per_second:,.0f}",
             risk(one.prediction.out_of_memory_probability), ", ".join(_runs(one)) or "no trainer")
            for number, one in enumerate(answer.plans, 1)
        ]  # fmt: skip
        headings = (">#", "layout", ">step", ">tok/s", ">runs out", "runs on")
        console.print(table(*headings, title="Mixed plans", rows=rows))
    print_alone(console, answer)
    if not answer.plans or not answer.plans[0].why.startswith(answer.verdict):
        console.print(answer.verdict, markup=False, soft_wrap=not console.is_terminal)
    if answer.plans:
        print_plan(console, answer.plans[0])
    else:
        console.print(assumptions_table(answer.assumptions))


def _runs(plan: MixedPlan) -> list[str]:
    """Targets of ``plan export`` that run a plan as it is."""
    priced, others = runners(MixedExport(job=plan.job(), layout=plan.layout, trainer=plan.trainer))
    return priced or others


def print_alone(console: Console, answer: MixedAnswer) -> None:
    """Each kind by itself."""
    rows = [
        (one.kind, str(one.gpus), "does not fit" if one.step_time_s is None else seconds(one.step_time_s),
         "-" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}", one.layout)
        for one in answer.alone
    ]  # fmt: skip
    console.print(table("=kind", ">GPUs", ">step", ">tok/s", "layout", title="Each kind alone", rows=rows))


def print_plan(console: Console, plan: MixedPlan) -> None:
    """One plan with its whole breakdown."""
    one = plan.prediction
    low, high = one.step_time_range_s
    price = "" if one.usd_per_step is None else f", {one.usd_per_step:.3g} USD per step"
    console.print(
        f"step {seconds(one.step_time_s)} ({seconds(low)} to {seconds(high)} for nine of ten runs), "
        f"{one.tokens_per_second:,.0f} tokens/s, MFU {percent(one.mfu)}{price}"
    )
    console.print(stages_table(plan, console.width))
    for text in pipelines_text(plan):
        console.print(Text(text, style="dim"), soft_wrap=not console.is_terminal)
    times = plain_table("Step time of the slowest pipeline", "left", "right", "right")
    for part in PARTS:
        if one.time_s[part] > 0:
            times.add_row(PART_TEXT[part], seconds(one.time_s[part]), percent(one.time_s[part] / one.step_time_s))
    console.print(times)
    console.print(
        f"lost to the difference of kinds: {percent(one.lost_between_stages)} of the GPU time between stages, "
        f"{percent(one.lost_between_replicas)} between pipelines"
    )
    crossing = plan.between_sites()
    if crossing is not None:
        print_sites(console, crossing)
    elif len(plan.cluster.sites) > 1:
        console.print("The plan stays in one site: nothing crosses between them.")
    for text in who_runs(plan):
        console.print(f"runs with: {text}", markup=False, soft_wrap=not console.is_terminal)
    if any(abs(scale - 1.0) > 1e-9 for scale in one.loss_scales):
        scales = ", ".join(f"{scale:.4g}" for scale in one.loss_scales)
        console.print(f"loss scales by group of pipelines: {scales} (shares differ; without them gradients weigh samples unevenly)")
    if plan.why:
        console.print(plan.why, markup=False, soft_wrap=not console.is_terminal)
    console.print(assumptions_table(plan.assumptions))


def stages_table(plan: MixedPlan, width: int) -> Table:
    """Who holds what: a line for each stage of each group of equal pipelines."""
    rows = [
        (str(one.pipeline), one.kind, str(one.gpus), str(one.tp), _layers(plan.layout.vpp, one), one.recompute,
         percent(one.busy_s / plan.prediction.step_time_s), seconds(one.imbalance_s),
         f"{one.memory_peak_gib:.1f}/{one.memory_limit_gib:.1f}", risk(one.out_of_memory_probability))
        for one in plan.prediction.stages
    ]  # fmt: skip
    headings = ("=#", "kind", ">GPUs", ">tp", "layers", "recompute", ">busy", ">waits", ">GiB", ">runs out")
    columns = dict(zip(headings, zip(*rows, strict=True), strict=True))
    return fitted(columns, ["recompute", ">busy"], width, "Who holds what")


def pipelines_text(plan: MixedPlan) -> list[str]:
    """What the numbers of pipelines stand for, and what a stage waits for."""
    layout = plan.layout
    said = [
        f"pipeline {number}: {plural(one.count, 'replica')}, {one.num_microbatches} microbatches of {one.micro_batch_size}"
        for number, one in enumerate(layout.pipelines, 1)
    ]  # fmt: skip
    more = [f"cp {layout.cp}"] if layout.cp > 1 else []
    more += [f"ep {layout.ep}"] if layout.ep > 1 else []
    more += [f"{layout.vpp} virtual stages each, interleaved"] if layout.vpp > 1 else []
    more += [f"states shared by {layout.dp_shard} replicas, gradients averaged in two levels"] if layout.dp_shard else []
    more += [f"{layout.offload_optimizer} % of the optimizer states on the host"] if layout.offload_optimizer else []
    return ["; ".join([*said, *more]), "waits: for the slowest stage of its pipeline; GiB: at the peak, of what the card has"]


def _layers(vpp: int, one: StagePrediction) -> str:
    """Which layers a stage holds, of virtual stages how many each; and its recompute."""
    if vpp > 1:
        text = f"{one.layers:.0f} in {vpp} parts"
    else:
        text = f"{one.first_layer + 1:.0f}-{one.first_layer + one.layers:.0f} ({one.layers:.0f})" if one.layers else "-"
    return text if one.recompute == "none" else f"{text}, {one.recompute} recompute"


def print_changes(console: Console, found: MixedChanges) -> None:
    """One line for each change: the plan as it stands, and planned again."""
    rows = [("as it is", seconds(found.plan.prediction.step_time_s), *_best(found.plan))]
    for one in found.rows:
        kept = "cannot run" if one.kept_s is None else seconds(one.kept_s)
        rows.append((one.change, kept, *_planned(one)))
    headings = ("change", ">step, same plan", ">planned again", ">tok/s", ">GPUs", "layout")
    console.print(table(*headings, title="What if", rows=rows))


def _planned(one: MixedChange) -> tuple[str, str, str, str]:
    """What is planned again."""
    if one.alone is not None and one.alone.step_time_s is not None:
        rate = f"{one.alone.tokens_per_second:,.0f}"
        return seconds(one.alone.step_time_s), rate, str(one.alone.gpus), f"{one.alone.kind} alone: {one.alone.layout}"
    return _best(one.best) if one.best else ("nothing fits", "-", "-", "-")


def _best(plan: MixedPlan) -> tuple[str, str, str, str]:
    one = plan.prediction
    return (
        seconds(one.step_time_s), f"{one.tokens_per_second:,.0f}", str(plan.layout.num_gpus), shape_text(plan.layout)
    )  # fmt: skip

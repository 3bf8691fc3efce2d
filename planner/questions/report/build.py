"""Builds the document of a report from a plan: the heading, the reasons, the charts."""

import math
from collections.abc import Callable

from planner.advice import fewer_gpus
from planner.explain import COMPONENT_TEXT, binding, differences, layout_text, misses_by, why_first
from planner.gains import gains, held_back
from planner.plan_file import Plan, Prediction
from planner.questions.best_plan import on_cluster
from planner.questions.report.choice_charts import (
    LISTED,
    accuracy_chart,
    alternatives_chart,
    heatmap_chart,
    pareto_chart,
    scaling_chart,
    sensitivity_chart,
)
from planner.questions.report.document import Document, Figure, shown, today
from planner.questions.report.run_it import commands
from planner.questions.report.scaling import Size
from planner.questions.report.step_charts import (
    memory_chart,
    memory_timeline_chart,
    operators_chart,
    pipeline_chart,
    waterfall_chart,
)
from planner.questions.report.subject import MOVED, Spending, Subject, subject_of
from planner.search import SAFE, Pins
from planner.terminal.plan_tables import work_text
from planner.ties import shipped_ties
from planner.timeline.step_slices import timeline_of
from planner.units import format_count, format_days, format_energy

Progress = Callable[[str], None]


def build(
    plan: Plan,
    scaled: Callable[[Progress], list[Size]] | None = None,
    progress: Progress = lambda _: None,
    spending: Spending | None = None,
) -> Document:
    """The whole report of a plan; ``scaled`` gives the sizes of the cluster when everything else is done (None = left out);
    ``spending``: tokens and price of the costs.

    Raises PlannerError when the layout is not legal for its job.
    """
    progress("pricing every legal layout")
    about = subject_of(plan, spending or Spending())
    progress("walking the pipeline")
    step = timeline_of(about.priced)
    charts = [
        waterfall_chart(about), operators_chart(about), memory_chart(about), memory_timeline_chart(about, step),
        pipeline_chart(about, step), heatmap_chart(about), pareto_chart(about),
    ]  # fmt: skip
    progress("changing the numbers of the profile")
    pulled = sensitivity_chart(about)
    scaling = [] if scaled is None else [scaling_chart(about, scaled(progress))]
    plan, job = about.plan, about.resolved.job
    words = work_text(plan.workload)
    return Document(
        title=f"{plan.workload.model.name} on {plan.num_gpus:,} x {job.cluster.hardware.name}",
        job=f"{words[0].upper()}{words[1:]}, trainer {job.trainer.label}",
        layout=layout_text(plan.layout), fits=about.fits, verdict=_verdict(about), notices=tuple(_notices(about)),
        figures=tuple(_figures(about)), why=tuple(_why(about)), alternatives=alternatives_chart(about),
        charts=(*charts, *scaling, pulled, accuracy_chart(about)),
        assumptions=tuple({"what": one.what, "value": one.value, "why": one.why, "flag": one.flag} for one in plan.assumptions),
        basis=tuple(dict(vars(one)) for one in about.rates.basis), plan=plan.to_dict(), **today(),
        run=tuple(commands(about.plan, about.resolved, fits=about.fits)), rates=_rates(about),
    )  # fmt: skip


def _rates(about: Subject) -> dict[str, float | None]:
    """What the costs of another number of tokens are computed from."""
    plan, rates = about.plan, about.rates
    return {
        "tokens": about.costs.tokens, "tokens_per_step": plan.workload.tokens, "step_s": plan.prediction.step_time_s,
        "gpus": plan.num_gpus, "usd_per_gpu_hour": rates.usd_per_gpu_hour, "kwh_per_gpu_hour": rates.kwh_per_gpu_hour,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the answer


def _verdict(about: Subject) -> str:
    """One sentence: what happens if this is run."""
    one = about.plan.prediction
    low, high = (shown(value, "seconds") for value in one.step_time_range_s)
    where = f"its {one.memory_stage} stage" if about.plan.layout.pp > 1 else "it"
    if about.fits:
        return (
            f"{_degrees(about)}: one step takes {shown(one.step_time_s, 'seconds')} ({low} to {high} for nine of ten runs), and "
            f"{where} needs {shown(one.memory_peak_gib, 'gib')} of the {shown(one.memory_limit_gib, 'gib')} that a GPU has."
        )
    over = one.memory_peak_gib - one.memory_limit_gib
    largest = max(one.memory_gib, key=lambda name: one.memory_gib[name])
    if over > 0:
        return (
            f"This plan does not fit: {where} needs {shown(one.memory_peak_gib, 'gib')}, "
            f"{shown(over, 'gib')} more than the {shown(one.memory_limit_gib, 'gib')} that a GPU has. The largest part is "
            f"{COMPONENT_TEXT[largest]} with {shown(one.memory_gib[largest], 'gib')}."
        )
    if one.out_of_memory_probability > SAFE:
        return (
            f"This plan may not fit: {where} needs {shown(one.memory_peak_gib, 'gib')} of "
            f"{shown(one.memory_limit_gib, 'gib')}, and runs out of memory with a chance of "
            f"{shown(one.out_of_memory_probability, 'share')}; up to {100 * SAFE:.0f} % counts as safe."
        )
    return (
        f"This plan does not fit: the offloaded states take {shown(one.host_memory_gib_per_gpu, 'gib')} of host memory per GPU, "
        "more than a node has."
    )


def _degrees(about: Subject) -> str:
    """The degrees above 1, in words."""
    layout = about.plan.layout
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}
    words = [f"{text} {getattr(layout, name)}" for name, text in names.items() if getattr(layout, name) > 1]
    text = " x ".join(words[:4]) + (f", {words[4]}" if len(words) > 4 else "") or "one GPU"
    return text[0].upper() + text[1:]


def _notices(about: Subject) -> list[str]:
    notices = []
    now = about.plan.prediction.step_time_s
    if abs(about.stored_step_s / now - 1.0) > MOVED:
        notices.append(
            f"The plan file says {shown(about.stored_step_s, 'seconds')} per step; priced again with the profile and the model "
            f"of now it is {shown(now, 'seconds')}. This report shows the new price."
        )
    if not about.fits:
        notices.append(_way_out(about))
    elif not about.is_best and about.finding.fit:
        gain = 1.0 - float(about.finding.estimates[0].step_time[0]) / now
        if gain > 0.005:
            notices.append(
                f"A search of the same job finds a faster plan that fits: {layout_text(about.finding.layouts[0])}, "
                f"{shown(gain, 'share')} less time per step."
            )
    return notices


def _way_out(about: Subject) -> str:
    """What to do about a plan that does not fit."""
    finding = about.finding
    if finding.fit:
        step = float(finding.estimates[0].step_time[0])
        return f"The fastest layout of this job that fits is {layout_text(finding.layouts[0])}, {shown(step, 'seconds')} per step."
    if not finding.layouts:
        return "No layout of this job is legal."
    work, plan = about.plan.workload, about.plan
    command = (
        f"plan --model {work.model.name} --gpus {plan.num_gpus} --hardware {plan.hardware} --trainer {plan.trainer} "
        f"--sequence-length {work.sequence_length} --global-batch-size {work.global_batch_size}"
    )
    return (
        f"No layout of this job fits on these GPUs. The closest ({layout_text(finding.layouts[0])}) "
        f"{misses_by(finding.estimates[0])}. `{command}` lists the cheapest changes that would fit."
    )


def _figures(about: Subject) -> list[Figure]:
    """The numbers that decide, in the order in which they are asked for."""
    one, cost = about.plan.prediction, about.costs
    low, high = (shown(value, "seconds") for value in one.step_time_range_s)
    peak_low, peak_high = (shown(value, "gib") for value in one.memory_peak_range_gib)

    price = about.rates.basis[0]
    if_it_fitted = "" if about.fits else "if it fitted; "
    on_stage = f" on the {one.memory_stage} stage" if about.plan.layout.pp > 1 else ""
    dated = f" ({price.date})" if price.date else ""
    tokens = f"for {format_count(cost.tokens)} tokens"
    return [
        Figure("Step time", one.step_time_s, "seconds", f"{if_it_fitted}nine of ten tuned runs: {low} to {high}"),
        *_first_runs(one),
        Figure("Throughput", one.tokens_per_second_per_gpu, "rate", "tokens/s per GPU"),
        Figure("MFU", one.mfu, "share", "model FLOP over peak; recompute not counted"),
        Figure(
            "Memory", one.memory_peak_gib, "gib",
            f"of {shown(one.memory_limit_gib, 'gib')}{on_stage}; nine of ten: {peak_low} to {peak_high}",
            alarm=one.memory_peak_gib > one.memory_limit_gib,
        ),
        Figure(
            "Runs out of memory", one.out_of_memory_probability, "share", f"chance; up to {100 * SAFE:.0f} % counts as safe",
            alarm=one.out_of_memory_probability > SAFE,
        ),
        Figure("GPU-hours", cost.gpu_hours, "number", f"{tokens}, in {format_days(cost.seconds)}"),
        Figure(
            "Cost", cost.usd, "number", f"{tokens} at {price.value} per GPU-hour{dated}" if cost.usd else price.source,
            text="unknown" if cost.usd is None else f"${format_count(cost.usd)}",
        ),
        Figure(
            "Energy", cost.kwh, "number", f"{tokens}; upper bound, GPUs alone",
            text=format_energy(cost.kwh),
        ),
    ]  # fmt: skip


def _first_runs(one: Prediction) -> list[Figure]:
    """What a user's own run takes before it is tuned."""
    if one.first_runs_s is None:
        return []
    low, middle, high = one.first_runs_s
    times = f"{low / one.step_time_s:.1f} to {high / one.step_time_s:.1f}"
    note = f"median of users' runs; half of them take {times} times the step time"
    return [Figure("First run, not tuned", middle, "seconds", note)]


def _equal(about: Subject) -> list[str]:
    """Which of the alternatives the model cannot tell from the best one."""
    counted, finding = shipped_ties(), about.finding
    first = float(finding.estimates[0].step_time[0])
    ratios = [math.log(float(one.step_time[0]) / first) for one in finding.estimates[1:LISTED]]
    close = [number for number, ratio in enumerate(ratios, 2) if ratio < counted.equal_gap]
    gap = shown(math.expm1(counted.equal_gap), "share")
    if not close:
        return [f"The next plan is further behind than the {gap} below which the order of two plans is uncertain."]
    which = (
        "Number 2 below is"
        if len(close) == 1
        else f"Numbers 2 {'and' if len(close) == 2 else 'to'} {close[-1]} below are"
    )
    right = shown(counted.chance(ratios[0]), "share")
    return [
        f"{which} within the model's error of it: less than {gap} apart, the order of two plans is uncertain (of measured pairs as "
        f"close as the first two, {right} were ordered rightly). A short run of each decides."
    ]


def _faster(about: Subject) -> list[str]:
    """What would be faster than the best plan: fewer GPUs, layouts that the search holds back, options that nobody stated."""
    finding, job = about.finding, about.resolved.job
    rate = job.workload.tokens / float(finding.estimates[0].step_time[0])
    fewer = fewer_gpus(job, rate, lambda flags: (on_cluster(about.resolved, num_gpus=flags["gpus"]).job, Pins()))
    found = [*fewer, *held_back(finding), *gains(about.resolved.unstated(finding.layouts))]
    return [f"With {one.flag} a step would take {shown(one.gain, 'share')} less time: {one.what}." for one in found]


def _why(about: Subject) -> list[str]:
    """Why this layout, sentence by sentence."""
    finding = about.finding
    if about.is_best:
        bound = binding(finding)
        first = f"It is the fastest of {finding.priced:,} layouts priced, of which {finding.fitting:,} fit."
        return [f"{first} {why_first(finding).removesuffix(bound).strip()}", bound, *_equal(about), *_faster(about)]
    sentences = (
        ["The layout was given, not chosen by the search."]
        if not about.plan.why or "priced as given" in about.plan.why
        else []
    )
    if about.plan.why and "priced as given" not in about.plan.why:
        sentences.append(f"When it was planned: {about.plan.why}")
    if finding.fit:
        best = finding.estimates[0]
        pays, saves = differences(about.estimate, best)
        text = f"Against the best plan ({layout_text(finding.layouts[0])}) it pays {' and '.join(pays[:3]) or 'nothing more'}"
        sentences.append(text + (f", and saves {' and '.join(saves[:2])}." if saves else "."))
    return sentences

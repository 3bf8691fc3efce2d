"""The report of an RL plan: the same document, page and formats as of a training, with the timeline of its pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.text import Text

from planner.costs import rates_of
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.questions.report.document import Chart, Document, Figure, Value, chart, columns, shown, today
from planner.questions.report.show import written
from planner.questions.report.step_charts import NOTHING, UNSEEN
from planner.questions.rl.rl_tables import POOL_TEXT, actor_text, notes, placement_text, rollout_text, title
from planner.questions.rl.rl_trace import STEPS, slices, trace_of
from planner.rl.export.rl_targets import TARGETS
from planner.rl.rl_answer import PART_TEXT, Answered, answer, request_of_plan, usd_per_thousand_steps
from planner.rl.rl_plan import MEMORY, PHASES, RlPlan, RlPrediction
from planner.rl.rl_question import RlRequest
from planner.search import SAFE
from planner.units import format_count

FILE = "rl.yaml"
ALTERNATIVES = 5
"""Best placements that the search is asked for."""
OPEN = ("mode", "staleness", "actor", "rollout", "train_gpus", "generate_gpus", "sync")
"""What the search of the same job chooses."""
LANES = {"train": "trains", "generate": "generates"}
MEMORY_TEXT = {"generate": "generation", "logprob": "log-probs", "train": "update", "sync": "weight sync"}


def build_rl(plan: RlPlan, price: float | None, progress: Callable[[str], None]) -> Document:
    """The whole report of an RL plan, with the price that its file holds. Raises PlannerError where it was not priced."""
    if plan.prediction is None:
        raise PlannerError("the RL plan is not priced; plan rl estimate PLAN --output FILE prices it")
    progress("searching")
    searched = _search(plan)
    one, apart = plan.prediction, plan.placement.generate_gpus if plan.generate_hardware else 0
    pools = f"{plan.gpus - apart:,} x {plan.hardware}" + (f" and {apart:,} x {plan.generate_hardware}" if apart else "")
    return Document(
        title=f"{plan.workload.model.name} by {plan.workload.algorithm} on {pools}",
        job=Text.from_markup(title(plan)).plain,
        layout=f"{placement_text(plan)}; actor {actor_text(plan)}; rollout {rollout_text(plan)}; {plan.engine}", fits=one.fits,
        verdict=_verdict(plan, one), notices=tuple(_notices(plan, searched)), figures=tuple(_figures(plan, one, price)),
        why=tuple(text for text in (plan.why, *notes(plan)) if text), reasons="Why this placement",
        alternatives=_alternatives(plan, searched, price), charts=(_steps_chart(plan, one), _phases_chart(one), _memory_chart(one)),
        assumptions=tuple(vars(each) for each in plan.assumptions), basis=tuple(_basis(plan, price)), plan=plan.to_dict(),
        **today(), run=tuple(_commands(plan)), rates={}, file=FILE,
        left_out="checkpoints, evaluation, failures, storage, taxes and discounts",
    )  # fmt: skip


def _search(plan: RlPlan) -> Answered | None:
    """The question of the plan with its placement open; None of two kinds, whose link a plan does not hold, and of another critic,
    and where nothing is legal any more."""
    work = plan.workload
    if plan.generate_hardware or work.reward_model or (work.critic and work.critic != work.model):
        return None
    request = request_of_plan(plan, RlRequest())
    with suppress(PlannerError):
        return answer(RlRequest(**{name: None if name in OPEN else value for name, value in vars(request).items()}), ALTERNATIVES)
    return None


def _verdict(plan: RlPlan, one: RlPrediction) -> str:
    """One sentence: what happens if this is run."""
    low, high = (shown(value, "seconds") for value in one.range_s or (one.step_s, one.step_s))
    if not one.fits:
        phase = max(one.memory_risk, key=lambda name: one.memory_risk[name])
        return (
            f"This placement may not fit: {MEMORY_TEXT[phase]} needs {shown(one.memory_gib[phase], 'gib')} of a GPU and runs out "
            f"with a chance of {shown(one.memory_risk[phase], 'share')}; up to {100 * SAFE:.0f} % counts as safe."
        )
    largest = max((*PHASES, "wait"), key=lambda name: one.parts_s[name])
    return (
        f"One step takes {shown(one.step_s, 'seconds')} ({low} to {high} for nine of ten runs), most of it {PART_TEXT[largest]} "
        f"with {shown(one.parts_s[largest], 'seconds')}; {shown(one.tokens_per_s_per_gpu, 'rate')} tokens/s of a GPU."
    )


def _notices(plan: RlPlan, searched: Answered | None) -> Iterator[str]:
    assert plan.prediction is not None
    if searched is None or not searched.fit:
        return
    best = searched.plans[0]
    assert best.prediction is not None
    gain = 1.0 - best.prediction.step_s / plan.prediction.step_s
    if gain > 0.02:
        yield (
            f"A search of the same job finds a faster placement: {placement_text(best)}, actor {actor_text(best)}, rollout "
            f"{rollout_text(best)}, {shown(gain, 'share')} less time per step."
        )


def _figures(plan: RlPlan, one: RlPrediction, price: float | None) -> list[Figure]:
    """The numbers that decide."""
    low, high = (shown(value, "seconds") for value in one.range_s or (one.step_s, one.step_s))
    dollars = usd_per_thousand_steps(plan, price)
    fullest = max(one.memory_gib, key=lambda name: one.memory_gib[name])
    return [
        Figure("Step time", one.step_s, "seconds", f"nine of ten runs: {low} to {high}"),
        Figure("Throughput", one.tokens_per_s_per_gpu, "rate", "tokens/s per GPU, prompts and answers, of all pools"),
        *(
            Figure(f"Idle, pool that {LANES[name]}", one.idle[name], "share", "of a step: it computes nothing")
            for name in (("train",) if plan.placement.mode == "colocated" else ("train", "generate"))
        ),
        Figure("Memory", one.memory_gib[fullest], "gib", f"in {MEMORY_TEXT[fullest]}, the fullest phase"),
        Figure(
            "Runs out of memory", one.out_of_memory, "share",
            f"largest chance of all phases; up to {100 * SAFE:.0f} % counts as safe", alarm=not one.fits,
        ),
        Figure("Staleness", one.staleness, "number", "updates between an answer's weights and those that train on it"),
        Figure(
            "1,000 steps", dollars, "number", "GPUs of all pools, idle ones too" if dollars is not None else "the GPU has no price",
            text="unknown" if dollars is None else f"${format_count(dollars)}",
        ),
    ]  # fmt: skip


def _steps_chart(plan: RlPlan, one: RlPrediction) -> Chart:
    """What the pools do when."""
    found = slices(plan)
    apart = plan.placement.mode != "colocated"
    pools = {pool: LANES[pool] if apart else "all GPUs" for pool in dict.fromkeys(pool for pool, *_ in found)}
    rows: list[tuple[Value, ...]] = [
        (pools[pool], PART_TEXT[phase], -1, step, start, end) for pool, phase, start, end, step in found
    ]  # fmt: skip
    if not apart:
        reading = f"All GPUs train and generate in turn; they compute nothing for {shown(one.idle['train'], 'share')} of a step."
    else:
        reading = (
            f"The pool that trains idles {shown(one.idle['train'], 'share')} of a step, the one that generates "
            f"{shown(one.idle['generate'], 'share')}."
        )
    facts = {
        "step_s": STEPS * one.step_s, "ranks": len(pools), "chunks": 1, "lanes": list(pools.values()),
        "window_s": STEPS * one.step_s, "gap_from_s": None, "gap_to_s": None,
    }  # fmt: skip
    return chart("rl-steps", reading, rows, facts=facts)


def _phases_chart(one: RlPrediction) -> Chart:
    """Every phase, of the step and by itself."""
    rows: list[tuple[Value, ...]] = []
    for name in (*PHASES, "wait"):
        part, alone = one.parts_s[name], one.phases_s.get(name, one.parts_s[name])
        if max(part, alone) > NOTHING * one.step_s:
            rows.append((PART_TEXT[name], part, part / one.step_s, alone))
    first = max(rows, key=lambda row: float(row[1] or 0.0))
    hidden = [str(row[0]) for row in rows if float(row[3] or 0.0) > float(row[1] or 0.0) + UNSEEN * one.step_s]
    beside = f"; {' and '.join(hidden)} {'runs' if len(hidden) == 1 else 'run'} beside it" if hidden else ""
    reading = f"{str(first[0]).capitalize()} takes most, {shown(first[1], 'seconds')} of {shown(one.step_s, 'seconds')}{beside}."
    return chart("rl-phases", reading, rows)


def _memory_chart(one: RlPrediction) -> Chart:
    """Peak of every phase."""
    rows: list[tuple[Value, ...]] = []
    for name in MEMORY:
        if name in one.memory_gib:
            pool = "generate" if name in ("generate", "sync") else "train"
            size, limit = one.memory_gib[name], one.memory_limit_gib[pool]
            rows.append((MEMORY_TEXT[name], POOL_TEXT[pool], size, 0.0, size, limit, limit - size, one.memory_risk[name]))
    worst = max(rows, key=lambda row: float(row[2] or 0.0) / float(row[5] or 1.0))
    reading = f"{str(worst[0]).capitalize()} is fullest: {shown(worst[2], 'gib')} of {shown(worst[5], 'gib')}."
    return chart("rl-memory", reading, rows)


def _alternatives(plan: RlPlan, searched: Answered | None, price: float | None) -> Chart:
    """The best placements of now and the best of every kind."""
    rows, every = list[tuple[Value, ...]](), list[tuple[str, RlPlan]]()
    if searched is not None:
        every = [(str(number), one) for number, one in enumerate(searched.plans, 1)]
        known = [(one.placement, one.layouts) for one in searched.plans]
        every += [(f"best {name}", one) for name, one in searched.by_mode.items() if (one.placement, one.layouts) not in known]
        if not any((one.placement, one.layouts) == (plan.placement, plan.layouts) for _, one in every):
            every.append(("this plan", plan))
    for name, each in every:
        one, same = each.prediction, (each.placement, each.layouts) == (plan.placement, plan.layouts)
        assert one is not None
        shown_name = f"{name}, this plan" if same and name != "this plan" else name
        rows.append((
            shown_name, placement_text(each), actor_text(each), rollout_text(each), one.step_s, one.tokens_per_s_per_gpu,
            one.out_of_memory, usd_per_thousand_steps(each, price),
        ))  # fmt: skip
    said = (
        "rank text #, placement text, actor text, rollout text, step_s seconds step, rate rate tokens/s/GPU, "
        "chance share runs out, usd number $ per 1000 steps"
    )
    heading = "The best placements of this job, and the best of every kind"
    return Chart(name="alternatives", title=heading, reading="", columns=columns(said), rows=rows)


def _basis(plan: RlPlan, price: float | None) -> Iterator[dict[str, str]]:
    """Prices of the pools."""
    for name in dict.fromkeys((plan.hardware, plan.generate_hardware or plan.hardware)):
        one = rates_of(load_hardware(name), price=price).basis[0]
        yield {"what": f"{one.what}, {name}", "value": one.value, "source": one.source, "date": one.date}


def _commands(plan: RlPlan) -> Iterator[dict[str, str]]:
    """How to go on from the saved plan."""
    yield {"what": "Price it again; save the plan file from the page first", "command": f"plan rl estimate {FILE}"}
    target = plan.framework.partition("@")[0]
    if target in TARGETS:
        yield {"what": f"Write it for {target}", "command": f"plan export {FILE} --to {target} --output run/"}
    yield {"what": "Compare a log with it", "command": f"plan doctor {FILE} --measured train.log"}
    yield {"what": "The steps for ui.perfetto.dev", "command": f"plan report {FILE} --output step.trace.json"}


def rl_report(
    plan: RlPlan, kind: str, name: str | None, price: float | None, progress: Callable[[str], None]
) -> str | bytes:
    """The report of an RL plan in one of the formats, with the name of a chart for a picture. Raises PlannerError."""
    return written("RL plan", (kind, name), lambda: build_rl(plan, price, progress), progress, lambda: trace_of(plan))

"""Placements of RL on the terminal: a line for each, then the first in parts; and the same as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planner.rl.rl_answer import PART_TEXT, Answered, usd_per_thousand_steps
from planner.rl.rl_layout import ASYNCHRONOUS
from planner.rl.rl_plan import MEMORY, PHASES, POOLS, RlPlan, RlPrediction
from planner.terminal.plan_tables import risk
from planner.terminal.tables import assumptions_table, fitted, percent, plain_table, seconds, table
from planner.units import GIGA, plural

SPARE = (">risk", ">memory", ">tok/s/GPU", ">idle gen.", ">idle train")
"""Columns that a narrow terminal does without, in turn."""
SPARE_OF_MISSES = (">$/1000 steps", ">tok/s/GPU", ">idle gen.", ">idle train")
"""The same where nothing fits."""
POOL_TEXT = {"train": "pool that trains", "generate": "pool that generates"}


def print_answer(console: Console, found: Answered, price: float | None = None) -> None:
    """The question, the best placements, why, the best of every kind, the first in parts, assumptions."""
    console.print(title(found.plans[0]))
    heading = "Best placements" if found.fit else "Nothing fits; closest"
    console.print(plans_table(found.plans, heading, console.width, price))
    console.print(escape(found.why), soft_wrap=not console.is_terminal)
    if found.ways:
        console.print(table("what would fit", "=flag", ">step", title="What would fit", rows=[
            (one.change, one.flag, seconds(one.step_s)) for one in found.ways]))  # fmt: skip
    elif not found.fit:
        console.print(
            "Not enough by themselves: a smaller share for the engine, optimizer states in host memory, adapters of rank 32, up to "
            "32 times the GPUs. Take a smaller model, or leave out what is fixed (--actor, --rollout, --memory-share).",
            soft_wrap=True,
        )  # fmt: skip
    if len(found.by_mode) > 1:
        console.print(plans_table(list(found.by_mode.values()), "The best of every kind", console.width, price))
    print_parts(console, found.plans[0])
    console.print(assumptions_table(found.question.assumptions))
    looked = f"Priced {found.found.searched:,} placements, {found.found.fitting:,} fit, in {seconds(found.found.seconds)}."
    console.print(looked, style="dim")


def print_plan(console: Console, plan: RlPlan, price: float | None = None) -> None:
    """One placement."""
    console.print(title(plan))
    console.print(plans_table([plan], "This placement", console.width, price))
    if plan.why:
        console.print(escape(plan.why))
    print_parts(console, plan)
    if plan.assumptions:
        console.print(assumptions_table(plan.assumptions))


def title(plan: RlPlan) -> str:
    """The question in one line."""
    work = plan.workload
    apart = plan.placement.generate_gpus if plan.generate_hardware else 0
    kinds = escape(plan.hardware) + (f" and {apart} x {escape(plan.generate_hardware)}" if apart else "")
    lengths = f"{work.answers.mean:,.0f} tokens (p99 {work.answers.quantile(0.99):,.0f})"
    batch = f"{work.prompts} prompts x {plural(work.samples, 'answer')} of {lengths}"
    where = f"{plan.gpus - apart} x {kinds}"
    return f"[bold]{escape(work.model.name)}[/bold] by {work.algorithm} on {where}, {batch}, {escape(plan.framework)}"


def plans_table(plans: Sequence[RlPlan], heading: str, width: int, price: float | None = None) -> Table:
    """One line for each placement, in a terminal of this width: a narrow one does without SPARE, or SPARE_OF_MISSES where some do
    not fit."""
    found = [_of(one) for one in plans]
    usd = [usd_per_thousand_steps(one, price) for one in plans]
    cells: dict[str, Sequence[Any]] = {
        "placement": [placement_text(one) for one in plans], "actor": [actor_text(one) for one in plans],
        "rollout": [rollout_text(one) for one in plans], ">step": [seconds(one.step_s) for one in found],
        ">idle train": [percent(one.idle["train"]) for one in found],
        ">idle gen.": [percent(one.idle["generate"]) for one in found],
        ">tok/s/GPU": [f"{one.tokens_per_s_per_gpu:,.0f}" for one in found],
        ">memory": [f"{max(one.memory_gib.values()):.1f} GiB" for one in found],
        ">risk": [risk(one.out_of_memory) for one in found],
        ">$/1000 steps": ["-" if one is None else f"{one:,.0f}" for one in usd],
    }  # fmt: skip
    return fitted(cells, SPARE if all(one.fits for one in found) else SPARE_OF_MISSES, width, heading, least=12)


def _of(plan: RlPlan) -> RlPrediction:
    assert plan.prediction is not None
    return plan.prediction


def placement_text(plan: RlPlan) -> str:
    """A placement in a few words: split 40 + 24, 2 steps ahead, bucketed."""
    place = plan.placement
    if plan.workload.offline:
        return f"{place.gpus} GPUs, no generation"
    if place.mode == "colocated":
        return f"colocated on {place.gpus}, {place.sync}"
    sign = "+" if place.mode == "split" else "of"
    sizes = f"{place.train_gpus} {sign} {place.generate_gpus}"
    more = "".join(
        f" + {count} {what}"
        for count, what in ((place.critic_gpus, "critic"), (place.reference_gpus, "reference"), (place.reward_gpus, "reward"))
        if count
    )
    steps = "without a bound" if place.staleness >= ASYNCHRONOUS else f"{place.staleness} step{'s' * (place.staleness != 1)} ahead"
    when = "synchronous" if place.synchronous else steps
    return f"{place.mode} {sizes}{more}, {when}, {place.sync}"


def actor_text(plan: RlPlan) -> str:
    """The actor's layout in a few words."""
    one = plan.layouts.actor
    named = [("tp", one.tp), ("pp", one.pp), ("dp", one.dp), ("cp", one.cp), ("ep", one.ep), ("zero", one.zero)]
    found = [f"{name} {value}" for name, value in named if int(value) > (0 if name == "zero" else 1)] or ["1 GPU"]
    words = {0: "", 1: "selective recompute", 2: "full recompute"}[int(one.recompute)]
    host = "optimizer on host" if int(one.offload_optimizer) else ""
    return " ".join([*found, *(word for word in (words, host) if word)])


def rollout_text(plan: RlPlan) -> str:
    """The rollout's layout in a few words."""
    one = plan.layouts.rollout
    if plan.workload.offline:
        return "none"
    named = [("tp", one.tp), ("pp", one.pp), ("attn dp", one.attn_dp), ("ep", one.ep)]
    return " ".join([f"{one.replicas} x", *(f"{name} {value}" for name, value in named if int(value) > 1 or name == "tp")])


def print_parts(console: Console, plan: RlPlan) -> None:
    """Phases, memory of phases, and what the tail and staleness mean."""
    console.print(phases_table(plan))
    console.print(memory_table(plan))
    for line in notes(plan):
        console.print(escape(line), soft_wrap=not console.is_terminal)


def phases_table(plan: RlPlan) -> Table:
    """Every phase: what the step spends on it, and how long it takes by itself."""
    one = _of(plan)
    rows = []
    for name in (*PHASES, "wait"):
        part, alone = one.parts_s[name], one.phases_s.get(name, one.parts_s[name])
        if part > 0.0005 or alone > 0.0005:
            beside = "" if abs(alone - part) < 0.0005 or name == "wait" else "beside the step"
            rows.append((PART_TEXT[name], seconds(part), percent(part / one.step_s), seconds(alone), beside))
    low, high = one.range_s or (one.step_s, one.step_s)
    rows.append(("step", seconds(one.step_s), "100.0 %", f"{seconds(low)} to {seconds(high)}", "nine of ten runs"))
    return table("phase", ">of the step", ">share", ">by itself", "", title="A step", rows=rows)


def memory_table(plan: RlPlan) -> Table:
    """Memory of a GPU in every phase, with the chance that it runs out when the phase begins."""
    one = _of(plan)
    found = plain_table("Memory of a GPU", "left", "right", "left", "right")
    for name in MEMORY:
        if name in one.memory_gib:
            pool = "generate" if name in ("generate", "sync") else "train"
            limit = f"of {one.memory_limit_gib[pool]:.1f} GiB"
            found.add_row(name, f"{one.memory_gib[name]:.1f} GiB", limit, risk(one.memory_risk[name]))
    return found


def notes(plan: RlPlan) -> list[str]:
    """What the numbers mean for training."""
    one, place, work = _of(plan), plan.placement, plan.workload
    updates = (
        f"Updates: {plural(work.updates, 'optimizer step')} of {one.microbatches:,.0f} microbatches each, packed to "
        f"{percent(one.packed)} of {work.max_length:,} tokens"
    )
    if work.offline:
        return [f"{updates}. Answers are recorded: nothing is generated or synchronised."]
    times, hidden = one.longest_tokens / work.answers.mean, place.partial
    tail = f"a batch by itself would take {seconds(one.tail_s)} less if all had the mean"
    found = [
        f"Length tail: the longest of {work.sampled:,.0f} answers: {one.longest_tokens:,.0f} tokens, {times:.1f} times the mean; "
        + (f"{tail}. Running ahead hides it." if hidden else f"{tail}."),
        f"{updates}; {one.sync_bytes / GIGA:,.1f} GB of weights are synchronised.",
    ]
    if work.keep_rate < 1.0:
        found.append(
            f"Sampled again: {percent(1.0 - work.keep_rate)} of the prompts give no gradient; {work.rounds:.1f} rounds of "
            f"{work.sampled:,.0f} answers fill a batch."
        )
    if place.synchronous:
        found.append("Staleness: none, every answer is of the newest weights.")
    else:
        found.append(
            f"Staleness: an answer is trained on {plural(one.staleness, 'step')} after its weights; correct for it (importance "
            "sampling, clipped ratios) and check rewards against a synchronous run."
        )
    engines = int(plan.layouts.rollout.replicas) * int(plan.layouts.rollout.engine_gpus)
    if engines < place.generate_gpus:
        unused = f"{place.generate_gpus - engines} of the {place.generate_gpus} GPUs that generate"
        found.append(f"{unused} hold no engine: they are too few for one more.")
    idle = max(POOLS, key=lambda name: one.idle[name])
    if one.idle[idle] > 0.2:
        found.append(f"The {POOL_TEXT[idle]} idles {percent(one.idle[idle])} of a step.")
    return found


# ------------------------------------------------------------------------------------------------ plain data


def row_data(plan: RlPlan, price: float | None = None) -> dict[str, Any]:
    """The line of the table as plain data."""
    one = _of(plan)
    return {
        "placement": placement_text(plan), "actor": actor_text(plan), "rollout": rollout_text(plan), "step_s": one.step_s,
        "idle": dict(one.idle), "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu, "memory_gib": max(one.memory_gib.values()),
        "out_of_memory": one.out_of_memory, "usd_per_thousand_steps": usd_per_thousand_steps(plan, price), "fits": one.fits,
    }  # fmt: skip


def plan_data(plan: RlPlan, price: float | None = None) -> dict[str, Any]:
    """One plan: the line of the table, the plan as its file holds it, the notes."""
    return {"row": row_data(plan, price), "plan": plan.to_dict(), "notes": notes(plan)}


def answer_data(found: Answered, price: float | None = None) -> dict[str, Any]:
    """Everything that the tables show."""
    return {
        "fits": found.fit, "why": found.why, "plans": [plan_data(one, price) for one in found.plans],
        "best_of_kind": {name: row_data(one, price) for name, one in found.by_mode.items()},
        "would_fit": [vars(one) for one in found.ways], "assumptions": [vars(one) for one in found.question.assumptions],
        "searched": {"placements": found.found.searched, "fit": found.found.fitting, "seconds": found.found.seconds},
    }  # fmt: skip

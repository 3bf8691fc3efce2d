"""Tables of ``plan reshape``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from planner.elastic.mixed_reshape import MixedReshape
from planner.elastic.move_costs import WAYS, Way
from planner.elastic.reshape import Candidate, Reshape
from planner.explain import layout_text
from planner.questions.mixed.mixed_show import print_plan
from planner.questions.resilience.show import spell
from planner.terminal.plan_tables import print_prediction
from planner.terminal.tables import assumptions_table, seconds, table
from planner.units import format_bytes

OTHERS = 5
"""Other layouts in the table."""


def print_reshape(console: Console, found: Reshape) -> None:
    """Everything that was found."""
    job, best = found.job, found.best
    name = f"{job.plan.workload.model.name}: {job.plan.num_gpus} -> {found.wanted.gpus} x {job.plan.hardware}"
    console.print(Text(name, style="bold"))
    batch = job.plan.workload.global_batch_size
    console.print(f"from  {layout_text(job.plan.layout)}: {seconds(job.step_time)} per step of {batch}")
    console.print(f"to    [bold]{layout_text(best.layout)}[/bold]: {seconds(best.step_time)} per step of {best.batch}")
    console.print(f"[bold]Why:[/bold] {found.plan.why}.")
    console.print()
    _print_move(console, found)
    _print_pay_back(console, found)
    console.print(_others_table(found))
    _print_engine(console, found)
    console.print()
    print_prediction(console, found.plan)
    if found.assumptions:
        console.print()
        console.print(assumptions_table(found.assumptions))


def print_mixed_reshape(console: Console, found: MixedReshape) -> None:
    """The move of a plan over several kinds of nodes, then the new plan."""
    old, new = found.job, found.new
    console.print(Text(f"{old.model}: {old.machines} -> {new.machines}", style="bold"))
    batch = old.plan.layout.global_batch_size
    console.print(Text(f"from  {old.layout_in_words}: {seconds(old.step_time)} per step of {batch}"))
    console.print(Text(f"to    {new.layout_in_words}: {seconds(new.step_time)} per step of {batch}", style="bold"))
    if found.alone:
        console.print(Text(f"Faster: {found.alone}."))
    console.print()
    if found.checkpoint:
        console.print(Text(f"Checkpoint: {found.checkpoint}"))
    needed, read = found.reads
    console.print(
        f"State: {format_bytes(old.saved.size)}. All ranks together need {format_bytes(needed)} and read {format_bytes(read)}, "
        + (f"{read / needed:.2f} x what they need." if read >= needed else "the rest is sent by those that read it.")
    )
    console.print(_ways_table(found.ways))
    _print_pay_back(console, found)
    _print_engine(console, found)
    console.print()
    print_plan(console, found.plan)
    if found.assumptions:
        console.print()
        console.print(assumptions_table(found.assumptions))


def _print_pay_back(console: Console, found: Reshape | MixedReshape) -> None:
    """When the move has paid for itself, and whether a warning is long enough."""
    pay = found.pay_back
    ahead = "never ahead" if pay.seconds is None else f"ahead after {spell(pay.seconds)} ({pay.steps:,} steps)"
    console.print(f"[bold]Pay-back:[/bold] a move of {spell(found.way.seconds)}, {ahead} of {pay.against}.")
    if found.drain is not None:
        needed, enough = found.drain
        verdict = "[green]long enough[/green]" if enough else "[bold red]too short: save before the warning[/bold red]"
        console.print(
            f"[bold]Warning of {spell(found.wanted.drain or 0.0)}:[/bold] the step and a save need {spell(needed)}, {verdict}."
        )


def _print_engine(console: Console, found: Reshape | MixedReshape) -> None:
    """Who moves the state, and what goes with it."""
    recipe = found.recipe
    console.print(f"[bold]Engine:[/bold] {recipe.title}; flags of {recipe.version}. No state is moved by planner itself.")
    for what, lines in (("save", recipe.save), ("then", recipe.steps), ("load", recipe.load), ("note", recipe.notes)):
        for line in lines:
            console.print(Text(f"  {what:<5}{line}"))
    console.print("[bold]Carried over:[/bold]")
    for line in found.kept:
        console.print(Text(f"  {line}"))


def _print_move(console: Console, found: Reshape) -> None:
    move = found.best.move
    if found.checkpoint:
        console.print(Text(f"Checkpoint: {found.checkpoint}"))
        if found.other_job:
            console.print(Text(f"Checkpoint: {found.other_job}", style="bold red"))
    console.print(
        f"State: {format_bytes(found.job.saved.size)}. A rank holds at most {format_bytes(float(move.own.max()))} and reads at "
        f"most {format_bytes(float(move.read.max()))}; all together read {format_bytes(float(move.read.sum()))}, "
        f"{move.amplification:.2f} x what they need."
    )
    if move.exchanged and move.received.sum() > 0:
        sent, got = (format_bytes(float(one.max())) for one in (move.sent, move.received))
        console.print(f"Live, a node sends at most {sent} and gets at most {got} from other nodes.")
    if found.best.nests:
        nest = [name for name, yes in found.best.nests.items() if yes]
        cut = [name for name, yes in found.best.nests.items() if not yes]
        verb = "nests" if len(nest) == 1 else "nest"
        said = (
            (nest, f"{', '.join(nest)} {verb}: a new shard is made of whole old ones, or lies inside one"),
            (cut, f"{', '.join(cut)}: new shards lie across old ones, which are read whole and cut"),
        )
        text = "; ".join(part for names, part in said if names)
        console.print(f"Degrees that change: {text}.")
    console.print(_ways_table(found.best.ways))


def _ways_table(ways: Sequence[Way]) -> object:
    """Every way of a move in parts."""
    rows = [
        (WAYS[one.key] + (f" ({one.why_not})" if one.why_not else ""), "" if one.why_not else seconds(one.seconds),
         "" if one.why_not else f"{one.range[0]:.0f} to {one.range[1]:.0f} s",
         ", ".join(f"{name} {seconds(value)}" for name, value in one.parts.items() if value > 0.0))
        for one in ways
    ]  # fmt: skip
    return table("way", "~takes", "~between", "in parts", rows=rows)


def _others_table(found: Reshape) -> object:
    """The choice and what was behind it."""

    def row(one: Candidate) -> tuple[str, ...]:
        way = one.way(found.way.key)
        nests = "all" if one.nested else ", ".join(name for name, yes in one.nests.items() if yes) or "none"
        return (
            layout_text(one.layout), str(one.gpus), str(one.batch), seconds(one.step_time), seconds(way.seconds),
            f"{one.move.amplification:.2f}", nests, spell(one.total),
        )  # fmt: skip

    headings = ("layout", ">GPUs", ">batch", ">step", ">move", ">read x", "nest", ">until trained")
    return table(*headings, rows=[row(one) for one in (found.best, *found.others[:OTHERS])])

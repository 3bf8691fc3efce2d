"""Tables and bars of a training plan for the terminal: the same numbers that --json prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.cost.estimate import HIDDEN, PARTS
from planner.cost.memory.states import COMPONENTS
from planner.errors import listed
from planner.explain import COMPONENT_TEXT, PART_TEXT, host_text, layout_text, recompute_text
from planner.layout import NAMES, Layout
from planner.plan_file import Plan, Prediction
from planner.search import SAFE
from planner.terminal.tables import percent, plain_table, seconds, table
from planner.ties import RIGHT, shipped_ties
from planner.units import format_count
from planner.workload import LORA_WHOLE, Workload

if TYPE_CHECKING:
    from planner.advice import Advice
    from planner.cluster import Cluster
    from planner.trainer import Trainer

COMPONENT_COLOURS = ("blue", "cyan", "magenta", "yellow", "green", "bright_black", "red", "white")
COMPONENT_MARKS = "WGOAwfcx"
"""Letters of the memory bar, so that it reads without colours too."""
LEGEND = {
    "b": "sequences per forward pass", "m": "microbatches per step", "vpp": "virtual stages per rank",
    "zero": "stage, and the ranks that shard where they are not all of dp",
    "ends": "layers of the first and last stage", "comm.": "communication that nothing hides",
}  # fmt: skip
"""What the headings of the table of plans mean, where they do not say it."""


def risk(chance: float) -> Text:
    """The chance of running out of memory: green where it counts as safe, else red."""
    return Text(percent(chance), style="green" if chance <= SAFE else "red")


def plans_table(plans: list[Plan], fit: bool, width: int) -> Table:
    """The best plans, a line each: degrees, what saves memory, time and memory; below the meaning of its headings.

    Degrees and options that no plan uses have no column. Where ``width`` leaves no room, bubble and exposed communication are left
    out; then layouts stand in words and are folded.
    """
    columns: dict[str, list[str | Text]] = {
        ">#": [str(number) for number, _ in enumerate(plans, 1)],
        **_layout_columns([plan.layout for plan in plans]),
    }
    found = [plan.prediction for plan in plans]
    columns[">step"] = [seconds(one.step_time_s) for one in found]
    columns[">tok/s/GPU"] = [f"{one.tokens_per_second_per_gpu:,.0f}" for one in found]
    columns[">MFU"] = [percent(one.mfu) for one in found]
    waits: dict[str, list[str | Text]] = {
        ">bubble": [percent(one.bubble_share) for one in found],
        ">comm.": [percent(sum(one.exposed_s.values()) / one.step_time_s) for one in found],
    }
    memory: dict[str, list[str | Text]] = {
        ">memory, GiB": [f"{one.memory_peak_gib:.1f} of {one.memory_limit_gib:.1f}" for one in found],
        ">runs out": [risk(one.out_of_memory_probability) for one in found],
    }
    forms: list[dict[str, list[str | Text]]] = [{**columns, **waits, **memory}, {**columns, **memory}]
    times = {name: cells for name, cells in columns.items() if name in (">step", ">tok/s/GPU")}
    words: list[str | Text] = [layout_text(plan.layout) for plan in plans]
    narrow = {">#": columns[">#"], "layout": words, **times, **memory}
    columns = next((one for one in forms if _width(one) <= width), narrow)
    known = {heading.lstrip(">~"): cells for heading, cells in columns.items()}
    if not any("," in cell for cell in known.get("zero", ())):
        known.pop("zero", None)
    legend = [f"{name}: {text}" for name, text in LEGEND.items() if name in known]
    shown = table(*columns, title="Best plans" if fit else "Closest attempts (none fits)")
    shown.padding = (0, 0)
    shown.caption, shown.caption_justify = "; ".join(legend), "left"
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row, style="" if shown.row_count else "bold")
    return shown


def _width(columns: Mapping[str, Sequence[str | Text]]) -> int:
    """Characters of a line: the longest cell of every column, and what stands between columns and at both ends."""
    return 1 + sum(max(len(heading.lstrip(">~=")), *map(len, cells)) + 1 for heading, cells in columns.items())


def _layout_columns(layouts: list[Layout]) -> dict[str, list[str | Text]]:
    """Degrees and options by heading, of those that some layout uses; tp, pp, dp, b and m always."""

    def numbers(name: str) -> list[int]:
        return [int(getattr(one, name)) for one in layouts]

    found: dict[str, list[str | Text]] = {}
    for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"):
        if name in ("tp", "pp", "dp") or any(value != 1 for value in numbers(name)):
            found[f">{name}"] = [str(value) for value in numbers(name)]
    if ">cp" in found:
        found[">cp"] = [f"{one.cp} {NAMES['cp_method'][int(one.cp_method)]}" if one.cp != 1 else "1" for one in layouts]
    for name, heading in (("micro_batch_size", ">b"), ("num_microbatches", ">m")):
        found[heading] = [str(value) for value in numbers(name)]
    if any(numbers("zero")):
        found[">zero"] = [f"{one.zero}" + (f", {one.dp_shard}" if 0 < one.dp_shard != one.dp else "") for one in layouts]
    schedules = [NAMES["schedule"][int(one.schedule)] if one.pp != 1 else "" for one in layouts]
    if set(schedules) - {"", "1f1b", "interleaved_1f1b"}:
        found["=schedule"] = list(schedules)
    ends = [f"{one.first_stage_layers}/{one.last_stage_layers}" if one.first_stage_layers else "" for one in layouts]
    if any(ends):
        found[">ends"] = list(ends)
    if any(numbers("recompute")):
        found["=recompute"] = [recompute_text(one) for one in layouts]
    hosts = [host_text(one) for one in layouts]
    return {**found, "=on host": list(hosts)} if any(hosts) else found


def equal_text(plans: list[Plan]) -> str:
    """Which of the next plans count as equal to the first, in a sentence; '' where none does."""
    ties, first = shipped_ties(), plans[0].prediction.step_time_s
    near = [number for number, one in enumerate(plans, 1)
            if number > 1 and math.log(one.prediction.step_time_s / first) < ties.equal_gap]  # fmt: skip
    if not near:
        return ""
    which = "Plan 2 counts" if len(near) == 1 else f"Plans 2 {'and' if len(near) == 2 else 'to'} {near[-1]} count"
    return (
        f"{which} as equal to 1: less than {percent(math.expm1(ties.equal_gap))} apart, and nearer than that fewer than "
        f"{100 * RIGHT:.0f} % of measured pairs were ordered rightly."
    )


def memory_bar(one: Prediction, width: int) -> Text:
    """One line for the card's memory: each component by its letter, free memory as dots; '|' is the card's limit where
    the peak is beyond it."""
    inner = max(width - 2, 10)
    whole = max(one.memory_limit_gib, one.memory_peak_gib)
    cells: list[tuple[str, str]] = []
    used = 0.0
    for mark, colour, name in zip(COMPONENT_MARKS, COMPONENT_COLOURS, COMPONENTS, strict=True):
        used += one.memory_gib[name]
        cells += [(mark, colour)] * (round(inner * used / whole) - len(cells))
    cells += [(".", "bright_black")] * (inner - len(cells))
    if one.memory_peak_gib > one.memory_limit_gib:
        cells[min(round(inner * one.memory_limit_gib / whole), inner - 1)] = ("|", "bold red")
    text = Text("[")
    for mark, colour in cells:
        text.append(mark, style=colour)
    return text + Text("]")


def memory_table(one: Prediction) -> Table:
    """Memory by component, each with its letter of the bar."""
    found = plain_table(None, "left", "left", "right", "right")
    for mark, colour, name in zip(COMPONENT_MARKS, COMPONENT_COLOURS, COMPONENTS, strict=True):
        share = one.memory_gib[name] / one.memory_peak_gib
        found.add_row(Text(mark, style=colour), COMPONENT_TEXT[name], f"{one.memory_gib[name]:.2f} GiB", percent(share))
    peak, limit = one.memory_peak_gib, one.memory_limit_gib
    found.add_row("", "peak of the device", f"{peak:.2f} GiB", f"on the {one.memory_stage} stage")
    found.add_row("", "usable, as the driver reports", f"{limit:.2f} GiB", percent(peak / limit))
    if one.host_memory_gib_per_gpu > 0:
        found.add_row("", "host memory for offloaded states", f"{one.host_memory_gib_per_gpu:.2f} GiB", "per GPU")
    return found


def time_table(one: Prediction) -> Table:
    """Step time by part, and the communication hidden behind computation."""
    found = plain_table("Step time", "left", "right", "right")

    def add(name: str, value: float, style: str = "") -> None:
        if value > 0:
            found.add_row(name, seconds(value), percent(value / one.step_time_s), style=style)

    for part in PARTS:
        add(PART_TEXT[part], one.time_s[part])
    add("step", one.step_time_s, "bold")
    for kind in HIDDEN:
        add(f"hidden: {kind}", one.hidden_s[kind], "dim")
    return found


def advice_table(advice: list[Advice]) -> Table:
    """Changes that make the job fit."""
    rows = (
        (one.change, seconds(one.step_time_s), f"{one.tokens_per_second:,.0f}",
         "-" if one.usd_per_million_tokens is None else f"{one.usd_per_million_tokens:.3g}", one.layout)
        for one in advice
    )  # fmt: skip
    headings = ("change", "~step", "~tokens/s", "~USD per 1M tokens", "best layout")
    return table(*headings, title="What would fit", rows=rows)


def samples(work: Workload) -> str:
    """A batch in words."""
    return f"{work.global_batch_size:,}{' pairs' if work.objective == 'dpo' else ''}"


MIDDLE = 0.02
"""The median of an interval is said when it is this part away from the prediction."""


def range_text(one: Prediction) -> str:
    """'600 ms to 900 ms for nine of ten runs, 700 ms at the median'."""
    low, high = one.step_time_range_s
    text, middle = f"{seconds(low)} to {seconds(high)} for nine of ten runs", one.step_time_median_s
    away = middle is not None and abs(middle / one.step_time_s - 1.0) > MIDDLE
    return f"{text}, {seconds(middle)} at the median" if away and middle is not None else text


def first_runs_text(one: Prediction) -> str:
    """How much longer a user's own run takes before it is tuned, in a sentence; '' where the file does not say."""
    if one.first_runs_s is None:
        return ""
    low, middle, high = (f"{value / one.step_time_s:.1f}" for value in one.first_runs_s)
    return (
        f"That is as tuned runs are. Half of the first runs of users, not yet tuned, take {low} to {high} times as long, {middle} "
        f"at the median ({one.first_runs_basis})."
    )


def job_text(work: Workload, cluster: Cluster, trainer: Trainer) -> str:
    """A job in one line, above its plans."""
    return f"{work.model.name} on {cluster.num_gpus:,} x {cluster.hardware.name}, {work_text(work)}, trainer {trainer.label}"


def work_text(work: Workload) -> str:
    """What a step trains, and how."""
    documents = f" of documents of {work.document_length:,}" if work.document_length else ""
    images = f", {work.image_tokens:,} of them of images" if work.image_tokens else ""
    return (
        f"sequences of {work.sequence_length:,} tokens{documents}{images}, {samples(work)} per step ({format_count(work.tokens)} "
        f"tokens), {work.precision}, {work.optimizer}{_adapters(work)}"
    )


def _adapters(work: Workload) -> str:
    """Adapters in the line of a job, which says nothing where every weight is trained."""
    where = "" if work.lora_targets == "all" else f" on {work.lora_targets} alone"
    whole = f" and trained {listed(LORA_WHOLE[work.lora_whole], 'and')}" if work.lora_whole != "none" else ""
    base = "fp16" if (work.frozen_weights, work.precision) == ("bf16", "fp16") else work.frozen_weights  # 16 bits as loaded
    return f", adapters of rank {work.lora_rank}{where}{whole} on a base in {base}" if work.lora_rank else ""


def print_prediction(console: Console, plan: Plan) -> None:
    """The whole breakdown of one layout."""
    one = plan.prediction
    console.print(Text(job_text(plan.workload, plan.cluster(), plan.load_trainer())))
    console.print(Text(layout_text(plan.layout), style="bold"))
    console.print(
        f"step {seconds(one.step_time_s)} ({range_text(one)}), "
        f"{one.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {percent(one.mfu)}, bubble {percent(one.bubble_share)}"
    )
    if first := first_runs_text(one):
        console.print(first)
    console.print(time_table(one))
    print_memory(console, one)


def print_memory(console: Console, one: Prediction) -> None:
    """Memory bar and table."""
    console.print(Text("Memory of the worst stage", style="italic"))
    console.print(memory_bar(one, min(console.width, 100)))
    console.print(memory_table(one))
    low, high = one.memory_peak_range_gib
    text = (
        f"peak {one.memory_peak_gib:.1f} GiB, nine of ten runs {low:.1f} to {high:.1f} GiB; "
        f"chance of running out of memory: {percent(one.out_of_memory_probability)}"
    )
    over = one.memory_peak_gib - one.memory_limit_gib
    if over > 0:
        text = f"[bold red]does not fit:[/bold red] {text}"
    elif one.out_of_memory_probability > SAFE:
        text = f"[bold yellow]may not fit:[/bold yellow] {text}, above the {percent(SAFE)} that counts as safe"
    elif high > one.memory_limit_gib:
        text += " (the range counts options left open and campaigns left out, the chance is of this plan as it stands)"
    console.print(text)

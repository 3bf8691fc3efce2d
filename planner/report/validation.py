"""Tables of a validation: what ran and how it ended, predicted beside measured times and memory, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

WORDS = {
    "optimizer_states": "optimizer states", "forward_backward": "forward and backward", "pipeline_bubble": "pipeline bubble",
    "replayed_step": "step replayed", "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
}  # fmt: skip
CLOCKS = {"wall": "wall", "processor": "CPU", "device": "GPU"}
"""Currency of a time -> what stands in the column ``clock``."""
RUNGS = {
    "meta": "memory on fake tensors", "rank": "one rank on one device", "truncated": "fewer layers and replicas",
    "full": "the plan itself", "trainer": "the trainer itself",
}  # fmt: skip
ENDS = {
    "out_of_memory": "ran out of memory", "hung": "hung", "lost_rank": "lost a rank", "failed": "failed",
    "not_equal": "does not train like one process", "interrupted": "was stopped",
}  # fmt: skip
MOST_RANKS = 4
"""Ranks whose memory is printed, those with the highest peak; the file has all."""


def validation_tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    """What ``plan validate`` prints of the content of validation.yaml."""
    what = RUNGS.get(found["rung"], found["rung"])
    yield f"{found['plan']}: {what}, priced for trainer {found['trainer']}, {found['num_gpus']} GPUs"
    yield f"rung {found['rung']}: {found['why']}"
    for change in found["changes"]:
        yield f"changed to compare: {change}"
    yield from _circumstances(found)
    yield from _failure(found)
    if found["times"]:
        yield _times(found["times"])
    if found["stages"]:
        yield _stages(found["stages"])
    yield from _notes(found)
    if found.get("scaled"):
        yield from _scaled(found["scaled"])
    yield from _rates(found["rates"])
    ranks = sorted(found["ranks"], key=_peak, reverse=True)
    for one in ranks[:MOST_RANKS]:
        yield from _rank(one, worst=len(ranks) > 1 and one is ranks[0])
    if len(ranks) > MOST_RANKS:
        yield f"{len(ranks) - MOST_RANKS} ranks with lower peaks are in the file and in --json"
    if ranks and "collectives" in ranks[0]:
        yield _traffic(ranks[0])
        yield _collectives(ranks[0])
    yield from _verdict(found)


def _circumstances(found: dict[str, Any]) -> Iterator[str]:
    device, parity = found["device"], found["parity"]
    if device is not None:
        hosts = f" on {len(device['hosts'])} hosts" if len(device.get("hosts", [])) > 1 else ""
        yield f"{device.get('ranks', 1)} ranks{hosts}: {device['name']}"
        waits = (device.get("pressure") or {}).get("some_avg10", {})
        if any(one is not None for one in waits.values()):
            said = " and ".join(f"{value:.0f} % {when}" for when, value in waits.items() if value is not None)
            yield f"time in which a process waited for a core: {said}"
    if parity is not None:
        verdict = "trains like one process" if parity["equal"] else "does NOT train like one process"
        yield (
            f"parity: a tiny model with these degrees {verdict}: {parity['compared_parameters']} parameters, largest error "
            f"{parity['largest_error']:.1e} of {parity['tolerance']:.0e} allowed, {parity['precision']}"
        )
    elif found["rung"] == "full" and found["outcome"] == "completed":
        yield "parity: left out with --no-parity"


def _failure(found: dict[str, Any]) -> Iterator[str]:
    if found["failure"] is None:
        return
    known = found["failure"]["allocated_gib"]
    memory = "" if known is None else f", {known:.2f} GiB allocated there"
    yield f"The run {ENDS.get(found['outcome'], found['outcome'])}{memory}. What was measured before:"


def _table(title: str, first: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _spread(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _times(rows: list[dict[str, Any]]) -> Any:
    assembled = any("assembled_seconds" in row for row in rows)  # rung rank: of measured and of priced parts
    columns = ["predicted", "measured", *(["together"] if assembled else []), "spread", "error", "interval", "inside"]
    table = _table("Time of a step", "", "clock", *columns)
    for row in rows:
        low_high = row["interval"]
        interval = "" if low_high is None else f"{format_seconds(low_high[0])} to {format_seconds(low_high[1])}"
        inside = "" if row["inside"] is None else "yes" if row["inside"] else "no"
        table.add_row(
            WORDS.get(row["what"], row["what"].replace("_", " ")), CLOCKS[row["currency"]],
            _seconds(row["predicted_seconds"]), _seconds(row["measured_seconds"]),
            *([_seconds(row.get("assembled_seconds"))] if assembled else []), _spread(row["spread"]),
            _share(row["error"]), interval, inside,
        )  # fmt: skip
    return table


def _stages(rows: list[dict[str, Any]]) -> Any:
    table = _table(
        "Passes of one microbatch", "rank", "stage", "pass", "clock", "predicted", "measured", "spread", "error"
    )
    for row in rows:
        table.add_row(
            str(row["rank"]), str(row["stage"]), WORDS[row["kind"]], CLOCKS[row["currency"]],
            _seconds(row["predicted_seconds"]), _seconds(row["measured_seconds"]), _spread(row["spread"]),
            _share(row["error"]),
        )  # fmt: skip
    return table


def _scaled(found: dict[str, Any]) -> Iterator[RenderableType]:
    """Rung truncated: the whole plan's step by the ratios of the smaller one."""
    step, parts = found["step"], found["parts"]
    table = _table("The whole plan, scaled up", "part", "predicted", "measured / predicted", "at half depth", "scaled")
    for row in parts:
        first, second = (None if row[name] is None else f"{row[name]:.3f}" for name in ("ratio", "shallow_ratio"))
        name = WORDS.get(row["what"], row["what"].replace("_", " "))
        told, found_ = _seconds(row["predicted_seconds"]), _seconds(row["scaled_seconds"])
        table.add_row(name, told, first or "priced", second or "", found_)
    table.add_row("step", _seconds(step["predicted_seconds"]), "", "", _seconds(step["scaled_seconds"]))
    yield table
    low, high = step["interval"]
    yield (
        f"predicted {step['error']:+.1%}, scaled step {'inside' if step['inside'] else 'outside'} of {format_seconds(low)} to "
        f"{format_seconds(high)}; the two depths differ by {_spread(step['depth_error']) or 'nothing known: one depth'}"
    )
    unseen = [row["note"] for row in parts if row["note"]]
    if unseen:
        yield f"priced, not measured, {step['priced_share']:.1%} of it: {'; '.join(unseen)}"


def _notes(found: dict[str, Any]) -> Iterator[str]:
    """What was priced as it ran, and why something was not compared, each once."""
    if found.get("as_run"):
        yield from found["as_run"]["sentences"]
    yield from dict.fromkeys(row["note"] for row in found["times"] if row["note"])
    for one in found["traces"]:
        yield f"trace, {one['what']}: {one['file']}"


def _rates(rates: dict[str, Any] | None) -> Iterator[str]:
    if rates is None:
        return
    tokens, mfu, loss = rates["tokens_per_second"], rates["mfu"], rates["loss"]

    def beside(value: float | None, form: str) -> str:
        return "" if value is None else f", predicted {value:{form}}"

    yield f"tokens/s: {tokens['measured']:,.0f}{beside(tokens['predicted'], ',.0f')}"
    if mfu["measured"] is not None:
        yield f"MFU: {mfu['measured']:.1%}{beside(mfu['predicted'], '.1%')}"
    if loss:
        yield f"loss of the first and the last measured step: {loss[0]:.4f}, {loss[-1]:.4f} (made-up tokens)"


def _peak(one: dict[str, Any]) -> float:
    return float(next(row["measured_gib"] for row in one["memory"] if row["what"] == "peak"))


def _rank(one: dict[str, Any], *, worst: bool) -> Iterator[RenderableType]:
    title = f"Rank {one['rank']}, pipeline stage {one['stage']}{', the worst' if worst else ''}"
    table = _table(title, "GiB", "predicted", "measured", "error", "bound", "at the peak")
    for row in one["memory"]:
        states = row["what"] == "weights"
        error = "" if row["error"] is None else f"{row['error']:+.2%}" if states else f"{row['error']:+.1%}"
        bound = "" if row["bound"] is None else f"{row['bound']:.1%}"
        if row.get("interval"):
            bound = f"{row['interval'][0]:.1f} to {row['interval'][1]:.1f}"
        bound += " missed" if row["inside"] is False else ""
        parts = one["at_peak_gib"]
        at_peak = parts.get(row["what"], sum(parts.values()) if row["what"] == "peak" and parts else None)
        told = "" if row["predicted_gib"] is None else f"{row['predicted_gib']:.3f}"
        table.add_row(
            WORDS.get(row["what"], row["what"]), told, f"{row['measured_gib']:.3f}", error, bound,
            "" if at_peak is None else f"{at_peak:.3f}",
        )  # fmt: skip
    yield table
    more = one.get("receive_buffers_added_gib")
    if more:
        yield f"{one['microbatches_run']} microbatches were run; the receive buffers of the others, {more:.3f} GiB, are added."


def _traffic(one: dict[str, Any]) -> RenderableType:
    """Bytes by operation and dimension, priced and issued."""
    title = f"Bytes in collectives of rank {one['rank']}, {one['microbatches_run']} microbatches and one update"
    table = _table(title, "operation", "dimension", "predicted", "measured", "error")
    for row in one["traffic"]:
        error = (
            "not priced"
            if not row["predicted_bytes"]
            else "not issued"
            if row["error"] is None
            else f"{row['error']:+.1%}"
        )
        sizes = (format_bytes(row[name]) for name in ("predicted_bytes", "measured_bytes"))
        table.add_row(row["operation"], row["dimension"], *sizes, error)
    return table


def _collectives(one: dict[str, Any]) -> RenderableType:
    title = f"Collectives of rank {one['rank']} in {one['microbatches_run']} microbatches and one update"
    table = _table(title, "operation", "ranks", "stride", "size", "times")
    for row in one["collectives"]:
        table.add_row(
            row["operation"], str(row["ranks"]), str(row["stride"]), format_bytes(row["bytes"]), str(row["times"])
        )
    return table


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    missed = [
        f"{WORDS.get(row['what'], row['what'])} of rank {one['rank']} by {row['error']:+.1%}"
        for one in found["ranks"]
        for row in one["memory"]
        if row["inside"] is False and row["error"] is not None
    ]
    missed += [
        f"{WORDS.get(row['what'], row['what'])} by {row['error']:+.1%}"
        for row in found["times"]
        if row["inside"] is False
    ]
    held = any(row["inside"] is not None for one in found["ranks"] for row in one["memory"]) or any(
        row["inside"] is not None for row in found["times"]
    )
    if held:
        yield f"outside of their bounds: {', '.join(missed)}" if missed else "all inside of their bounds"

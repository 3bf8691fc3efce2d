"""Tables of a validation: what ran and how it ended, predicted beside measured times and memory, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.units import GIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

WORDS = {
    "optimizer_states": "optimizer states", "forward_backward": "forward and backward", "pipeline_bubble": "pipeline bubble",
    "replayed_step": "step replayed", "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
}  # fmt: skip
CLOCKS = {"wall": "wall", "processor": "CPU", "device": "GPU"}
"""Currency of a time -> what stands in the column ``clock``, or in the title where all rows have the same."""
RUNGS = {
    "meta": "memory on fake tensors", "rank": "one rank on one device", "truncated": "fewer layers and replicas",
    "full": "the plan itself", "trainer": "the trainer itself",
}  # fmt: skip
ENDS = {
    "out_of_memory": "ran out of memory", "hung": "hung", "lost_rank": "lost a rank", "failed": "failed",
    "not_equal": "does not train like one process", "interrupted": "was stopped",
}  # fmt: skip
MOST_RANKS = 4
"""Stages whose memory is printed, each by its rank with the highest peak; the file has all ranks."""
TEMPORARY = (
    "temporary: neither kept between steps nor saved for the backward pass, such as gathered weights and unsharded gradients; "
    "predicted at the peak: hold it against the last column. A row is measured at its own highest moment, the peak is one of all."
)
"""Below the tables of memory by category."""
PASSES = ("F", "B", "I", "W")
"""Kinds of passes in the order of a table."""


def validation_tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    """What ``plan validate`` prints of the content of validation.yaml."""
    what = RUNGS.get(found["rung"], found["rung"])
    yield f"{found['plan']}: {what}, priced for trainer {found['trainer']}, {_count(found['num_gpus'], 'GPU')}"
    yield f"rung {found['rung']}: {found['why']}"
    for change in found["changes"]:
        yield f"changed to compare: {change}"
    yield from _circumstances(found)
    yield from _failure(found)
    if found["times"]:
        yield from _times(found["times"])
    if found["stages"]:
        yield from _stages(found["stages"])
    yield from _notes(found)
    if found.get("scaled"):
        yield from _scaled(found["scaled"])
    yield from _rates(found["rates"])
    stages = _by_stage(found["ranks"])
    for ranks in stages[:MOST_RANKS]:
        yield from _rank(ranks, worst=len(found["ranks"]) > len(ranks) and ranks is stages[0])
    if any(ranks[0]["at_peak_gib"] for ranks in stages):
        yield TEMPORARY
    if len(stages) > MOST_RANKS:
        yield f"{_count(len(stages) - MOST_RANKS, 'stage')} with lower peaks: in the file and in --json"
    if stages and "collectives" in stages[0][0]:
        yield from _traffic(stages[0][0])
        yield from _collectives(stages[0][0])
    yield from _verdict(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _by_stage(ranks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The ranks of each pipeline stage, which hold the same: the highest peaks first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for one in sorted(ranks, key=_peak, reverse=True):
        found.setdefault(one["stage"], []).append(one)
    return list(found.values())


def _circumstances(found: dict[str, Any]) -> Iterator[str]:
    device, parity = found["device"], found["parity"]
    if device is not None:
        hosts = f" on {len(device['hosts'])} hosts" if len(device.get("hosts", [])) > 1 else ""
        yield f"{_count(device.get('ranks', 1), 'rank')}{hosts}: {device['name']}"
        waits = (device.get("pressure") or {}).get("some_avg10", {})
        if any(one is not None for one in waits.values()):
            said = " and ".join(f"{value:.0f} % {when}" for when, value in waits.items() if value is not None)
            yield f"time in which a process waited for a core: {said}"
    if parity is not None:
        for one in (parity, parity.get("rounded")):
            yield from _parity(one)
    elif found["rung"] == "full" and found["outcome"] == "completed":
        yield "parity: left out with --no-parity"


def _parity(found: dict[str, Any] | None) -> Iterator[str]:
    """One comparison of the tiny model with one process."""
    if found is not None:
        equal = found["largest_error"] <= found["tolerance"]
        verdict = "trains like one process" if equal else "does NOT train like one process"
        yield (
            f"parity in {found['precision']}: a tiny model with these degrees {verdict}: {found['compared_parameters']} parameters"
            f", largest error {found['largest_error']:.1e} of {found['tolerance']:.1g} allowed"
        )


def _failure(found: dict[str, Any]) -> Iterator[str]:
    if found["failure"] is None:
        return
    known = found["failure"]["allocated_gib"]
    memory = "" if known is None else f", {format_bytes(known * GIB)} allocated there"
    before = "What was measured before:" if found["times"] or found["ranks"] else "Nothing was measured before."
    yield f"The run {ENDS.get(found['outcome'], found['outcome'])}{memory}. {before}"


def _table(first: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _titled(title: str, table: Any) -> Iterator[RenderableType]:
    """A title of its own width: that of a table is broken at the table's."""
    from rich.text import Text

    yield Text(title, style="bold")
    yield table


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _spread(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _percent(value: float) -> str:
    """A share with as many digits as say something: 41.3%, 0.062%."""
    return f"{value:.1%}" if value >= 0.01 else f"{100 * value:.2g}%"


def _times(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    assembled = any("assembled_seconds" in row for row in rows)  # rung rank: of measured and of priced parts
    clocks = {CLOCKS[row["currency"]] for row in rows}
    several, more = ["clock"] * (len(clocks) > 1), ["together"] * assembled
    table = _table("", *several, "predicted", "measured", *more, "spread", "error")
    for row in rows:
        table.add_row(
            _name(row["what"]), *(CLOCKS[row["currency"]] for _ in several), _seconds(row["predicted_seconds"]),
            _seconds(row["measured_seconds"]), *(_seconds(row.get("assembled_seconds")) for _ in more),
            _spread(row["spread"]), _share(row["error"]),
        )  # fmt: skip
    yield from _titled(_timed("Time of a step", clocks), table)
    for row in rows:
        if row["inside"] is not None:
            low, high = map(format_seconds, row["interval"])
            where = "inside" if row["inside"] else "outside"
            yield f"{_name(row['what'])}: {where} of {low} to {high}, where nine of ten runs of such plans lie"


def _timed(title: str, clocks: set[str]) -> str:
    """A title with the clock that all rows share."""
    return f"{title}, {next(iter(clocks))} time" if len(clocks) == 1 else title


def _name(what: str) -> str:
    return WORDS.get(what, what.replace("_", " "))


def _stages(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    clocks = {CLOCKS[row["currency"]] for row in rows}
    several = ["clock"] * (len(clocks) > 1)
    table = _table("rank", "stage", "pass", *several, "predicted", "measured", "spread", "error")
    for row in sorted(rows, key=lambda one: (one["rank"], one["stage"], PASSES.index(one["kind"]))):
        table.add_row(
            str(row["rank"]), str(row["stage"]), WORDS[row["kind"]], *(CLOCKS[row["currency"]] for _ in several),
            _seconds(row["predicted_seconds"]), _seconds(row["measured_seconds"]), _spread(row["spread"]),
            _share(row["error"]),
        )  # fmt: skip
    yield from _titled(_timed("Passes of one microbatch", clocks), table)


def _scaled(found: dict[str, Any]) -> Iterator[RenderableType]:
    """Rung truncated: the whole plan's step by the ratios of the smaller one."""
    step, parts = found["step"], found["parts"]
    table = _table("part", "predicted", "ratio", "half depth", "scaled")
    for row in parts:
        first, second = (None if row[name] is None else f"{row[name]:.3g}" for name in ("ratio", "shallow_ratio"))
        name = _name(row["what"])
        told, found_ = _seconds(row["predicted_seconds"]), _seconds(row["scaled_seconds"])
        table.add_row(name, told, first or "priced", second or "", found_)
    table.add_row("step", _seconds(step["predicted_seconds"]), "", "", _seconds(step["scaled_seconds"]))
    yield from _titled("The whole plan, scaled up by the ratios of measured to predicted time", table)
    low, high = step["interval"]
    yield (
        f"predicted against scaled {step['error']:+.1%}; the scaled step is {'inside' if step['inside'] else 'outside'} of "
        f"{format_seconds(low)} to {format_seconds(high)}; the two depths differ by "
        f"{_spread(step['depth_error']) or 'nothing known: one depth'}"
    )
    unseen = [row["note"] for row in parts if row["note"]]
    if unseen:
        yield f"priced, not measured, {step['priced_share']:.1%} of it: {'; '.join(unseen)}"


def _notes(found: dict[str, Any]) -> Iterator[str]:
    """What was priced as it ran, and why something was not compared, each once."""
    if found.get("as_run"):
        yield from found["as_run"]["sentences"]
    notes: dict[str, list[str]] = {}
    for row in found["times"]:
        if row["note"]:
            notes.setdefault(row["note"], []).append(_name(row["what"]))
    for note, names in notes.items():
        yield note if len(names) == len(found["times"]) else f"{', '.join(names)}: {note}"
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
        told = "" if mfu["predicted"] is None else f", predicted {_percent(mfu['predicted'])}"
        yield f"MFU: {_percent(mfu['measured'])}{told}"
    if loss:
        yield f"loss of the first and the last measured step: {loss[0]:.4f}, {loss[-1]:.4f} (made-up tokens)"


def _peak(one: dict[str, Any]) -> float:
    return float(next(row["measured_gib"] for row in one["memory"] if row["what"] == "peak"))


def _rank(ranks: list[dict[str, Any]], *, worst: bool) -> Iterator[RenderableType]:
    """The memory of the rank with the highest peak of a stage."""
    one = ranks[0]
    of_many = f", the highest of its {len(ranks)} ranks" if len(ranks) > 1 else ""
    title = f"Rank {one['rank']}, pipeline stage {one['stage']}{', the worst' if worst else ''}{of_many}"
    rows = one["memory"]
    large = max((row["measured_gib"] or 0.0 for row in rows if row["what"] != "resident"), default=0.0) >= 1.0
    unit, factor = ("GiB", 1.0) if large else ("MiB", GIB / MIB)
    table = _table(unit, "predicted", "measured", "error", "bound", "at the peak")
    for row in rows:
        states = row["what"] == "weights"
        error = "" if row["error"] is None else f"{row['error']:+.2%}" if states else f"{row['error']:+.1%}"
        bound = "" if row["bound"] is None else f"{row['bound']:.1%}"
        if row.get("interval"):
            bound = " to ".join(_size(end * factor) for end in row["interval"])
        bound += " missed" if row["inside"] is False else ""
        parts = one["at_peak_gib"]
        at_peak = parts.get(row["what"], sum(parts.values()) if row["what"] == "peak" and parts else None)
        sizes = (
            None if size is None else size * factor for size in (row["predicted_gib"], row["measured_gib"], at_peak)
        )
        told, seen, then = ("" if size is None else _size(size) for size in sizes)
        table.add_row(WORDS.get(row["what"], row["what"]), told, seen, error, bound, then)
    yield from _titled(title, table)
    more = one.get("receive_buffers_added_gib")
    if more:
        others = format_bytes(more * GIB)
        yield f"{one['microbatches_run']} microbatches were run; the receive buffers of the others, {others}, are added."


def _size(value: float) -> str:
    """Four digits that say something: 340.2, 61.23, 1.145, 0.012."""
    return f"{value:.{1 if value >= 99.995 else 2 if value >= 9.9995 else 3}f}"


def _traffic(one: dict[str, Any]) -> Iterator[RenderableType]:
    """Bytes by operation and dimension, priced and issued."""
    table = _table("operation", "dimension", "predicted", "measured", "error")
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
    yield from _titled(
        f"Bytes in collectives of rank {one['rank']}, {one['microbatches_run']} microbatches and one update", table
    )


def _collectives(one: dict[str, Any]) -> Iterator[RenderableType]:
    table = _table("operation", "ranks", "stride", "size", "times")
    for row in one["collectives"]:
        table.add_row(
            row["operation"], str(row["ranks"]), str(row["stride"]), format_bytes(row["bytes"]), str(row["times"])
        )
    yield from _titled(
        f"Collectives of rank {one['rank']} in {one['microbatches_run']} microbatches and one update", table
    )


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    errors: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for one in found["ranks"]:
        for row in one["memory"]:
            if row["inside"] is False and row["error"] is not None:
                errors.setdefault((_name(row["what"]), one["stage"]), []).append((one["rank"], row["error"]))
    missed = [f"{what} of {_of_ranks(stage, ranks)}" for (what, stage), ranks in errors.items()]
    missed += [f"{_name(row['what'])} by {row['error']:+.1%}" for row in found["times"] if row["inside"] is False]
    held = any(row["inside"] is not None for one in found["ranks"] for row in one["memory"]) or any(
        row["inside"] is not None for row in found["times"]
    )
    if held:
        yield f"outside of their bounds: {', '.join(missed)}" if missed else "all inside of their bounds"


def _of_ranks(stage: int, ranks: list[tuple[int, float]]) -> str:
    """``rank 4 by -72.4%``, ``4 ranks of stage 0 by -65.7% to -64.0%``."""
    if len(ranks) == 1:
        return f"rank {ranks[0][0]} by {ranks[0][1]:+.1%}"
    low, high = (f"{end(error for _, error in ranks):+.1%}" for end in (min, max))
    return f"{len(ranks)} ranks of stage {stage} by {low}{'' if low == high else f' to {high}'}"

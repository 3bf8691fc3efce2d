"""What ``plan validate`` prints: what ran and how it ended, predicted and measured times and memory, collectives, finalists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from planner.lab.run.learn import RAN
from planner.lab.run.levels import LEVELS
from planner.terminal.tables import table
from planner.units import GIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

WORDS = {
    "optimizer_states": "optimizer states", "host": "on the host",
    "forward_backward": "forward and backward", "pipeline_bubble": "pipeline bubble",
    "replayed_step": "step replayed", "F": "forward", "B": "backward", "W": "weight gradients",
}  # fmt: skip
CLOCKS = {"wall": "wall", "processor": "CPU", "device": "GPU"}
"""Currency of a time -> what stands in the column ``clock``."""
WHAT_RAN = {"trainer": "the trainer itself", **{level.name: level.what for level in LEVELS}}
ENDS = {
    "out_of_memory": "ran out of memory", "hung": "hung", "lost_rank": "lost a rank", "failed": "failed",
    "not_equal": "does not train like one process", "interrupted": "was stopped",
}  # fmt: skip
MOST_RANKS = 4
"""Stages whose memory is printed, each by its rank with the highest peak; the file has all ranks."""
TEMPORARY = (
    "temporary: neither kept between steps nor saved for the backward pass, such as gathered weights and unsharded gradients. "
    "Predicted is what it adds to the peak, measured its own highest moment: they are not compared, the peak is."
)
"""Below the tables of memory by category."""


def validation_tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    """The content of validation.yaml."""
    yield f"{found['plan']}: {WHAT_RAN[found['rung']]}, priced for trainer {found['trainer']}, {_count(found['num_gpus'], 'GPU')}"
    yield f"level {found['rung']}: {found['why']}"
    for change in found["changes"]:
        yield f"changed to compare: {change}"
    for what in found["unchecked"]:
        yield f"not checked here: {what}"
    yield from _circumstances(found)
    if found["failure"] is not None:
        yield _failure(found)
    if found["times"]:
        yield from _times(found["times"])
    if found["stages"]:
        ordered = sorted(found["stages"], key=lambda one: (one["rank"], one["stage"], "FBW".index(one["kind"])))
        yield from _timed("Passes of one microbatch", ordered, {"=rank": "rank", ">stage": "stage", ">pass": "kind"})
    yield from _notes(found)
    if found.get("scaled"):
        yield from _scaled(found["scaled"])
    yield from _rates(found["rates"])
    stages = _by_stage(found["ranks"])
    for ranks in stages[:MOST_RANKS]:
        yield from _rank(ranks, worst=len(found["ranks"]) > len(ranks) and ranks is stages[0])
    if any(ranks[0].get("at_peak_gib") for ranks in stages):
        yield TEMPORARY
    if len(stages) > MOST_RANKS:
        yield f"{_count(len(stages) - MOST_RANKS, 'stage')} with lower peaks: in the file and in --json"
    if stages and "collectives" in stages[0][0]:
        yield from _traffic(stages[0][0])
    if found.get("log"):
        yield f"log: {found['log']}"
    yield from _verdict(found)


def learned_lines(found: Mapping[str, Any], file: Path | None) -> Iterator[str]:
    """Lines below the tables of one validation; ``file`` is where it is written, None = nowhere."""
    likeliest = found.get("likeliest")
    for one in [likeliest, *likeliest.get("also", ())] if likeliest else ():
        yield one["sentence"]
        if one.get("check"):
            yield f"  what tells: {one['check']}"
    if found.get("run") is not None and file is not None:
        hardware = found["run"]["hardware"]["gpu"]
        yield (
            f"what was measured corrects the profile, with at least two validations of other layouts: plan calibrate {file} "
            f"MORE.yaml --hardware {hardware} --output my-cluster.yaml"
        )
    elif found.get("no_run") and found.get("rung") in RAN:
        yield f"nothing for plan calibrate: {found['no_run']}"


def finalist_tables(found: Mapping[str, Any], file: Path | None) -> Iterator[RenderableType]:
    """The finalists in the content of a validation file, fastest first; what each teaches; the command that plans the fastest."""
    rows = []
    for row in found["finalists"]:
        predicted, measured = row["predicted_replay_seconds"] or row["predicted_seconds"], row["measured_seconds"]
        rows.append((
            _said(row["measured_rank"]), str(row["predicted_rank"]), row["layout"] + (" (the plan)" if row["own"] else ""),
            format_seconds(predicted), row["outcome"].replace("_", " ") if measured is None else format_seconds(measured),
            f"{predicted / measured - 1:+.1%}" if measured is not None and row["compared"] else "",
        ))  # fmt: skip
    headings = (">rank", ">predicted", "layout", ">step, predicted", ">measured", ">error")
    yield from _table("Finalists, fastest measured first", headings, rows)
    for row in found["finalists"]:
        if row["sentence"]:
            yield f"finalist {row['predicted_rank']}: {row['sentence']}"
    if any(row["measured_as"] == "replayed_step" for row in found["finalists"]):
        yield (
            "steps are replayed from the processor time of their passes, without communication, predicted and measured alike: the "
            "machine is not quiet"
        )
    if found["kendall_tau"] is not None:
        tau = f"{found['kendall_tau']:.2f} (1 = the same)"
        yield f"Kendall's tau of the predicted and the measured order: {tau}"
    if found["caveat"]:
        yield found["caveat"]
    if found["choose"]:
        yield f"the fastest as a plan: {found['choose']}"
    for one in found["validations"]:
        for line in learned_lines(one, file):
            yield f"finalist {one['predicted_rank']}: {line}"


# ------------------------------------------------------------------------------------------------ parts


def _table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[RenderableType]:
    """A table behind a title of its own width: that of a rich table is broken at the table's."""
    yield Text(title, style="bold")
    yield table(*headings, rows=rows)


def _said(value: Any, form: str = "{}") -> str:
    return "" if value is None else form.format(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _name(what: str) -> str:
    return WORDS.get(what, what.replace("_", " "))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _by_stage(ranks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The ranks of each pipeline stage, which hold the same: the highest peaks first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for one in sorted(ranks, key=_peak, reverse=True):
        found.setdefault(one["stage"], []).append(one)
    return list(found.values())


def _peak(one: dict[str, Any]) -> float:
    return max((row["measured_gib"] for row in one["memory"] if row["what"] == "peak"), default=0.0)


def _circumstances(found: dict[str, Any]) -> Iterator[str]:
    device, parity = found["device"], found["parity"]
    if device is not None:
        hosts = f" on {len(device['hosts'])} hosts" if len(device.get("hosts", [])) > 1 else ""
        ranks = _count(device.get("ranks", found["num_gpus"]), "rank")
        yield f"{ranks}{hosts}: {device['name'] or 'a GPU that the log does not name'}"
        waits = (device.get("pressure") or {}).get("some_avg10", {})
        if any(one is not None for one in waits.values()):
            said = " and ".join(f"{value:.0f} % {when}" for when, value in waits.items() if value is not None)
            yield f"time in which a process waited for a core: {said}"
    if found.get("steps"):
        yield f"{_count(found['steps']['measured'], 'measured step')} after {found['steps']['warm']} that do not count"
    if parity is not None:
        yield from (_parity(one) for one in (parity, parity.get("rounded")) if one is not None)
    elif found["rung"] == "full" and found["outcome"] == "completed":
        yield "parity: left out with --no-parity"


def _parity(found: dict[str, Any]) -> str:
    """One comparison of the tiny model with one process."""
    verdict = "does NOT train like one process" if found["why"] else "trains like one process"
    return (
        f"parity in {found['precision']}: a tiny model with these degrees {verdict}: {found['compared_parameters']} parameters"
        f", largest error {found['largest_error']:.1e} of {found['tolerance']:.1g} allowed, of losses {found['loss_error']:.1e} "
        f"of {found['loss_tolerance']:.1g}, of norms {found['norm_error']:.1e} of {found['norm_tolerance']:.1g}"
    )


def _failure(found: dict[str, Any]) -> str:
    known = found["failure"]["allocated_gib"]
    memory = "" if known is None else f", {format_bytes(known * GIB)} allocated there"
    before = "What was measured before:" if found["times"] or found["ranks"] else "Nothing was measured before."
    return f"The run {ENDS.get(found['outcome'], found['outcome'])}{memory}. {before}"


def _timed(title: str, rows: list[dict[str, Any]], first: dict[str, str]) -> Iterator[RenderableType]:
    """Times as a table. ``first``: headings and their keys in the rows."""
    together = any("assembled_seconds" in row for row in rows)  # level rank: of measured and of priced parts
    headings = [*first, ">clock", ">predicted", ">measured", *([">together"] if together else []), ">spread", ">error"]
    cells = [
        [*(_name(str(row[key])) for key in first.values()), CLOCKS[row["currency"]], _seconds(row["predicted_seconds"]),
         _seconds(row["measured_seconds"]), *([_seconds(row.get("assembled_seconds"))] if together else []),
         _said(row["spread"], "{:.1%}"), _said(row["error"], "{:+.1%}")]
        for row in rows
    ]  # fmt: skip
    yield from _table(title, headings, cells)


def _times(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    yield from _timed("Time of a step", rows, {"": "what"})
    for row in rows:
        if row["inside"] is not None:
            low, high = map(format_seconds, row["interval"])
            where = "inside" if row["inside"] else "outside"
            yield f"{_name(row['what'])}: {where} of {low} to {high}, where nine of ten runs of such plans lie"


def _scaled(found: dict[str, Any]) -> Iterator[RenderableType]:
    """Level truncated: the whole plan's step by the ratios of the smaller one."""
    step, parts = found["step"], found["parts"]
    rows = [
        [_name(row["what"]), _seconds(row["predicted_seconds"]), "priced" if row["ratio"] is None else f"{row['ratio']:.3g}",
         _said(row["shallow_ratio"], "{:.3g}"), _seconds(row["scaled_seconds"])]
        for row in parts
    ]  # fmt: skip
    rows.append(["step", _seconds(step["predicted_seconds"]), "", "", _seconds(step["scaled_seconds"])])
    title = "The whole plan, scaled up by the ratios of measured to predicted time"
    yield from _table(title, ("part", ">predicted", ">ratio", ">half depth", ">scaled"), rows)
    low, high = step["interval"]
    yield (
        f"predicted against scaled {step['error']:+.1%}; the scaled step is {'inside' if step['inside'] else 'outside'} of "
        f"{format_seconds(low)} to {format_seconds(high)}; the two depths differ by "
        f"{_said(step['depth_error'], '{:.1%}') or 'nothing known: one depth'}"
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
    for name, what, form in (("tokens/s", "tokens_per_second", "{:,.0f}"), ("MFU", "mfu", "{:.3g} %")):
        predicted, measured = ((100.0 if what == "mfu" else 1.0) * (rates[what][key] or 0.0) for key in ("predicted", "measured"))
        if measured:
            yield f"{name}: {form.format(measured)}{f', predicted {form.format(predicted)}' if predicted else ''}"
    if rates["loss"]:
        first, last = rates["loss"]
        chance = rates.get("loss_of_chance")
        what = "made-up tokens" if chance is None else f"random weights begin near {chance:.2f}"
        yield f"loss of the first and the last measured step: {first:.4f}, {last:.4f} ({what})"


def _rank(ranks: list[dict[str, Any]], *, worst: bool) -> Iterator[RenderableType]:
    """The memory of the rank with the highest peak of a stage."""
    one = ranks[0]
    of_many = f", the highest of its {len(ranks)} ranks" if len(ranks) > 1 else ""
    title = f"Rank {one['rank']}, pipeline stage {one['stage']}{', the worst' if worst else ''}{of_many}"
    title = title if one["rank"] is not None else "Highest peak of all ranks in the log"
    rows = one["memory"]
    large = max((row["measured_gib"] or 0.0 for row in rows if row["what"] != "resident"), default=0.0) >= 1.0
    unit, factor = ("GiB", 1.0) if large else ("MiB", GIB / MIB)
    parts, lines = one.get("at_peak_gib", {}), []
    for row in rows:
        error = _said(row["error"], "{:+.2%}" if row["what"] == "weights" else "{:+.1%}")
        bound = _said(row["bound"], "{:.1%}")
        if row.get("interval"):
            bound = " to ".join(_size(end * factor) for end in row["interval"])
        bound += " missed" if row["inside"] is False else ""
        at_peak = parts.get(row["what"], sum(parts.values()) if row["what"] == "peak" and parts else None)
        every = (row["predicted_gib"], row["measured_gib"], at_peak)
        sizes = ["" if size is None else _size(size * factor) for size in every]
        lines.append([_name(row["what"]), *sizes[:2], error, bound, sizes[2]])
    yield from _table(title, (unit, ">predicted", ">measured", ">error", ">bound", ">at the peak"), lines)
    more = one.get("receive_buffers_added_gib")
    if more:
        others = format_bytes(more * GIB)
        yield (
            f"{one['microbatches_run']} microbatches were run, which show the peak; the receive buffers of the others, {others}, "
            "are added. The error of the peak is of the rest."
        )


def _size(value: float) -> str:
    """Four digits that say something: 340.2, 61.23, 1.145, 0.012."""
    return f"{value:.{1 if value >= 99.995 else 2 if value >= 9.9995 else 3}f}"


def _traffic(one: dict[str, Any]) -> Iterator[RenderableType]:
    """Bytes by operation and dimension, priced and issued; then how often each collective ran."""
    ran = f"{one['microbatches_run']} microbatches and one update"

    def error(row: dict[str, Any]) -> str:
        missing = "not issued" if row["error"] is None else f"{row['error']:+.1%}"
        return missing if row["predicted_bytes"] else "not priced"

    rows = (
        [row["operation"], row["dimension"], format_bytes(row["predicted_bytes"]), format_bytes(row["measured_bytes"]), error(row)]
        for row in one["traffic"]
    )  # fmt: skip
    title = f"Bytes in collectives of rank {one['rank']}, {ran}"
    yield from _table(title, ("operation", ">dimension", ">predicted", ">measured", ">error"), rows)
    rows = (
        [row["operation"], str(row["ranks"]), str(row["stride"]), format_bytes(row["bytes"]), str(row["times"])]
        for row in one["collectives"]
    )
    title = f"Collectives of rank {one['rank']} in {ran}"
    yield from _table(title, ("operation", ">ranks", ">stride", ">size", ">times"), rows)


def _verdict(found: dict[str, Any]) -> Iterator[str]:
    errors: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for one in found["ranks"]:
        for row in one["memory"]:
            if row["inside"] is False and row["error"] is not None:
                errors.setdefault((_name(row["what"]), one["stage"]), []).append((one["rank"], row["error"]))
    missed = [f"{what} of {_of_ranks(stage, ranks)}" for (what, stage), ranks in errors.items()]
    missed += [f"{_name(row['what'])} by {row['error']:+.1%}" for row in found["times"] if row["inside"] is False]
    memory = [row for one in found["ranks"] for row in one["memory"]]
    if any(row["inside"] is not None for row in (*memory, *found["times"])):
        yield f"outside of their bounds: {', '.join(missed)}" if missed else "all inside of their bounds"
        yield from dict.fromkeys(row["note"] for row in memory if "note" in row and row["inside"] is False and row["error"] > 0.0)


def _of_ranks(stage: int, ranks: list[tuple[int, float]]) -> str:
    """``rank 4 by -72.4%``, ``4 ranks of stage 0 by -65.7% to -64.0%``."""
    if len(ranks) == 1:
        rank, error = ranks[0]
        return f"{'the highest rank' if rank is None else f'rank {rank}'} by {error:+.1%}"
    low, high = (f"{end(error for _, error in ranks):+.1%}" for end in (min, max))
    return f"{len(ranks)} ranks of stage {stage} by {low}{'' if low == high else f' to {high}'}"

"""A calibration for the terminal: what moved, what did not and why, errors before and after."""

from rich.console import Console
from rich.markup import escape

from planner.questions.calibrate.factors import FACTORS
from planner.questions.calibrate.numbers import Moved
from planner.questions.calibrate.output import Calibrated
from planner.terminal.tables import table
from planner.units import MEGA, format_seconds


def print_calibrated(console: Console, found: Calibrated) -> None:
    """Tables of factors, of those that stay, of the errors and of validated plans; the files, and how to use them."""
    _print_factors(console, found)
    _print_plans(console, found)
    _print_collectives(console, found)
    names = [str(path) for path in found.files]
    use = " ".join(f"{flag} {name}" for flag, name in zip(("--hardware", "--trainer"), names, strict=False))
    console.print(f"wrote {' and '.join(names)}; use it with {use}", soft_wrap=True, markup=False)


def _print_factors(console: Console, calibrated: Calibrated) -> None:
    calibration = calibrated.calibration
    for note in calibration.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")
    if calibration.moved:
        moved = table("", "~times", "~nine in ten", "~was", "~is", title="Factors that the runs determine")
        for one in calibration.moved:
            moved.add_row(one.factor.name, f"{one.value:.3f}", f"{one.low:.3f} to {one.high:.3f}", *_quantity(one))
        console.print(moved)
    kept = table("", "why", title="Factors that stay at 1")
    for factor in FACTORS:
        if factor.key in calibration.kept:
            kept.add_row(factor.name, escape(calibration.kept[factor.key]))
    console.print(kept)
    errors = table(
        "", "~runs", "~before", "~after", "~runs held back", title="Median error, predicted against measured"
    )
    for fits, title in (("time", "step time"), ("memory", "peak memory")):
        found = calibration.medians(fits)
        if found is not None:
            cells = (f"{100 * found[name]:.1f} %" for name in ("before", "after", "held_out"))
            errors.add_row(title, f"{found['runs']:.0f}", *cells)
    console.print(errors)
    if not calibration.moved:
        console.print("Nothing was changed: the profile is written as it was.")


def _print_plans(console: Console, calibrated: Calibrated) -> None:
    """The validated plans before and after, whether another layout is the best now, and the command that plans again."""
    plans = calibrated.plans
    if not plans:
        return
    again = table("", "~measured", "~before", "~after", "~best layout", title="Validated plans, step time")
    for one in plans:
        seen = one.run.measured.step_time
        cells = [
            format_seconds(predicted) + ("" if not seen else f" ({predicted / seen - 1:+.1%})")
            for predicted in (one.before, one.after)
        ]
        best = f"now {one.best_after or 'none fits'}" if one.moved else "the same"
        again.add_row(one.run.id, "" if not seen else format_seconds(seen), *cells, escape(best))
    console.print(again)
    for command in dict.fromkeys(one.command for one in plans):
        console.print(f"plan again: {command}", soft_wrap=True, markup=False)


def _print_collectives(console: Console, calibrated: Calibrated) -> None:
    """Bus bandwidths that traces show, next to those of the profile: kernels wait for ranks too, so that they are not fitted."""
    rows = [
        (one.run.id, each["kind"], each["op"].replace("_", "-"), str(each["ranks"]), f"{each['bytes'] / MEGA:.3g} MB",
         f"{each['bus_bandwidth']:.3g} GB/s", "" if (was := each["bus_bandwidth_of_profile"]) is None else f"{was:.3g} GB/s")
        for one in calibrated.traced for each in one.to_dict()["collectives"]
    ]  # fmt: skip
    if rows:
        headings = ("trace of", "group", "collective", ">ranks", ">size", ">bus bandwidth", ">of the profile")
        console.print(table(*headings, title="Collectives with nothing else running (shown, not fitted)", rows=rows))


def _quantity(one: Moved) -> tuple[str, str]:
    """The number before and after, where it is one number; curves have none."""
    if one.before != one.before:
        return "", ""
    if one.factor.key in ("host_time", "step_overhead", "network_latency"):
        return format_seconds(one.before), format_seconds(one.after)
    return f"{one.before:.3g}", f"{one.after:.3g}"

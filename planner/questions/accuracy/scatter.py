"""The scatter plot of predicted against measured step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlannerError
from planner.questions.accuracy.numbers import Pair
from planner.questions.accuracy.prediction import grouped


def scatter(pairs: Sequence[Pair], path: Path) -> None:
    """Write the picture as PNG: one point per timed run, coloured by family, with lines at 10 % to either side.

    Raises PlannerError when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlannerError("pictures need matplotlib: pip install 'planner[plot]'") from error
    figure = Figure(figsize=(9.6, 6.4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    timed = [pair for pair in pairs if pair.run.representative and pair.time_error is not None]
    groups = sorted(grouped(timed, lambda pair: pair.run.family).items(), key=lambda item: -len(item[1]))
    markers = "osD^vP"
    for number, (family, members) in enumerate(groups):
        measured = [pair.run.measured.step_time or 0.0 for pair in members]
        predicted = [pair.predicted.step_time or 0.0 for pair in members]
        colour, marker = f"C{number % 10}", markers[number % len(markers)]
        axes.scatter(
            measured,
            predicted,
            s=9,
            color=colour,
            marker=marker,
            alpha=0.55,
            linewidths=0,
            label=f"{family} ({len(members)})",
        )
    values = [pair.run.measured.step_time or 0.0 for pair in timed]
    ends = (min(values) / 1.3, max(values) * 1.3)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (1 / 1.1, 1.1):
        axes.plot(ends, [end * factor for end in ends], color="black", linewidth=0.6, linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured step time, s",
        ylabel="predicted step time, s",
    )
    axes.set_title("Published runs: predicted against measured; dotted: 10 % off", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False, markerscale=2)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", metadata={"Software": None})

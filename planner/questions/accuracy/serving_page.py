"""The accuracy report of serving runs as Markdown, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner import library
from planner.questions.accuracy.accuracy_page import WORST, markdown
from planner.questions.accuracy.serving_errors import CLASSES, ServingPair, by, of_class
from planner.questions.accuracy.serving_summary import serving_tables, worst_serving
from planner.terminal.pictures import new_figure, write_picture

DRAWN = CLASSES[:2]
"""Classes of the picture: time per output token."""


def serving_section(pairs: Sequence[ServingPair], summary: Mapping[str, Any]) -> str:
    """All tables of serving as Markdown, the worst rows last."""
    tables = [one for one in (*serving_tables(summary), worst_serving(pairs, WORST)) if one.rows]
    return "".join(f"## {one.title}\n\n{markdown(one)}\n\n" for one in tables)


def write_serving_page(pairs: Sequence[ServingPair], summary: Mapping[str, Any], path: Path) -> Path:
    """The page of serving runs alone, and its picture next to it, whose path is returned. Raises PlannerError."""
    picture = path.with_suffix(".png")
    tokens_picture(pairs, picture)
    head = "# Serving: predicted against measured\n\nErrors are predicted / measured - 1.\n\n"
    library.write_whole(path, f"{head}![Time per output token]({picture.name})\n\n{serving_section(pairs, summary)}")
    return picture


def tokens_picture(pairs: Sequence[ServingPair], path: Path) -> None:
    """Time per output token, predicted against measured, coloured by family. Raises PlannerError without matplotlib."""
    figure = new_figure(9.6, 6.4, dpi=110)
    axes = figure.add_subplot()
    drawn = [pair for one in DRAWN for pair, _ in of_class(pairs, one)]
    points = [_point(pair) for pair in drawn]
    for number, (family, some) in enumerate(by(drawn, lambda pair: pair.run.family, points).items()):
        measured, predicted = zip(*some, strict=True)
        axes.scatter(measured, predicted, s=9, color=f"C{number % 10}", marker="osD^vP"[number % 6], alpha=0.6, label=family)
    values = [measured for measured, _ in points] or [1.0]
    ends = (min(values) / 1.3, max(values) * 1.3)
    for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="0.5", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms per output token", ylabel="predicted, ms per output token")
    if points:
        axes.legend(fontsize=6, loc="upper left", frameon=False)
    write_picture(figure, path)


def _point(pair: ServingPair) -> tuple[float, float]:
    """Measured and predicted of the figure that stands for its row."""
    name = next(one for one in pair.answer.quantities if one.startswith("tpot_ms.") and pair.error(one) is not None)
    return pair.run.measured[name], pair.answer.quantities[name]

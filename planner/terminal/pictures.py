"""Pictures drawn with matplotlib: an empty figure, and its file."""

import io
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.library import write_whole


def new_figure(width: float, height: float, dpi: int) -> Any:
    """A figure of ``width`` x ``height`` inches without a window. Raises PlannerError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlannerError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_picture(figure: Any, path: Path) -> None:
    """Write a figure as .svg or .pdf by the ending of the path, else as PNG; whole or not at all. Raises PlannerError."""
    kind = path.suffix[1:] if path.suffix in (".svg", ".pdf") else "png"
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, metadata={"Software": None} if kind == "png" else None)
    write_whole(path, drawn.getvalue())

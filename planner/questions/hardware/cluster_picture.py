"""A cluster file as a picture: a box per site with its nodes, a square per GPU, the links between."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from planner.questions.hardware.cluster_show import link_text
from planner.terminal.pictures import new_figure, write_picture
from planner.units import plural

MOST_NODES, MOST_GPUS = 8, 8
"""Nodes of a kind and GPUs of a node that are drawn; the rest is written."""
NODE_WIDTH, NODE_HEIGHT, HEAD = 2.6, 0.34, 0.5
GAP = 2.4
"""Between two sites, for the words of a link."""


def draw_cluster(data: dict[str, Any], path: Path, title: str) -> None:
    """Draw what ``shown_cluster`` says. Raises PlannerError without matplotlib, or where the file cannot be written."""
    sites, first = dict[str, list[dict[str, Any]]](), 0
    for number, one in enumerate(data["kinds"]):
        slow = [place for place in range(one["nodes"]) if f"node-{first + place}" in one["slowdown"]]
        sites.setdefault(one["site"], []).append({**one, "colour": f"C{number % 10}", "slow": slow})
        first += one["nodes"]
    heights = {site: sum(_height(one) for one in kinds) + HEAD for site, kinds in sites.items()}
    width = len(sites) * (NODE_WIDTH + 0.6) + (len(sites) - 1) * GAP
    figure = new_figure(max(width + 1.0, 5.0), max(heights.values()) + 1.6, dpi=110)
    axis = figure.subplots()
    axis.set_axis_off()
    axis.set_aspect("equal")
    top, left, middles = max(heights.values()), 0.0, dict[str, tuple[float, float]]()
    for site, kinds in sites.items():
        middles |= _site(axis, site, kinds, (left, top), heights[site])
        left += NODE_WIDTH + 0.6 + GAP
    for order, link in enumerate(data["links"]):
        _link(axis, link, middles, order)
    axis.set_xlim(-0.4, width + 0.4)
    axis.set_ylim(min(top - max(heights.values()), 0.0) - 0.9, top + 0.3)
    axis.set_title(
        f"{title}: {plural(data['nodes'], 'node')}, {plural(data['gpus'], 'GPU')}", fontsize=11, parse_math=False
    )
    write_picture(figure, path)


def _height(one: dict[str, Any]) -> float:
    return float(HEAD + NODE_HEIGHT * (min(one["nodes"], MOST_NODES) + (one["nodes"] > MOST_NODES)))


def _site(
    axis: Any, site: str, kinds: list[dict[str, Any]], corner: tuple[float, float], height: float
) -> dict[str, tuple[float, float]]:
    """A box with all kinds of a site; the middle of the site and of every kind."""
    from matplotlib.patches import FancyBboxPatch

    left, top = corner
    axis.add_patch(
        FancyBboxPatch((left, top - height), NODE_WIDTH + 0.6, height, boxstyle="round,pad=0.05", fc="none", ec="grey")
    )
    axis.text(left + 0.1, top - 0.08, site, va="top", fontsize=10, fontweight="bold", parse_math=False)
    middle = left + NODE_WIDTH / 2 + 0.3
    found, place = {site: (middle, top - height / 2)}, top - HEAD
    for one in kinds:
        _kind(axis, one, (left + 0.2, place))
        found[one["kind"]] = (middle, place - _height(one) / 2)
        place -= _height(one)
    return found


def _kind(axis: Any, one: dict[str, Any], corner: tuple[float, float]) -> None:
    """Its name and its nodes, a square per GPU; slow nodes are hatched."""
    from matplotlib.patches import Rectangle

    left, top = corner
    gpus = one["gpus_per_node"]
    words = f"{one['kind']}: {one['nodes']} x {gpus} {one['hardware']}"
    axis.text(left, top - 0.1, words, va="top", fontsize=8, parse_math=False)
    drawn = min(one["nodes"], MOST_NODES)
    for node in range(drawn):
        line = top - HEAD + 0.12 - node * NODE_HEIGHT
        size = min(NODE_HEIGHT * 0.62, NODE_WIDTH / max(min(gpus, MOST_GPUS), 1) * 0.8)
        for gpu in range(min(gpus, MOST_GPUS)):
            hatch = "////" if node in one["slow"] else None
            axis.add_patch(
                Rectangle(
                    (left + gpu * size * 1.25, line - size),
                    size,
                    size,
                    fc=one["colour"],
                    ec="black",
                    lw=0.4,
                    hatch=hatch,
                )
            )
        if gpus > MOST_GPUS:
            axis.text(
                left + MOST_GPUS * size * 1.25 + 0.05,
                line - size / 2,
                f"... {gpus}",
                va="center",
                fontsize=7,
                parse_math=False,
            )
    if one["nodes"] > drawn:
        axis.text(
            left,
            top - HEAD + 0.12 - drawn * NODE_HEIGHT,
            f"... {one['nodes'] - drawn} more",
            va="top",
            fontsize=7,
            parse_math=False,
        )


def _link(axis: Any, link: dict[str, Any], middles: dict[str, tuple[float, float]], order: int) -> None:
    """A line between two boxes, as thick as its bandwidth is large, with its words."""
    (x0, y0), (x1, y1) = (middles[end] for end in link["between"])
    half = (NODE_WIDTH + 0.6) / 2
    wide = 0.6 + 0.5 * max(math.log10(max(link["bytes_per_s"], 1.0) / 1e7), 0.0)
    if abs(x1 - x0) < half:  # kinds of one site
        x0 = x1 = x0 + half * 0.9
    else:
        x0, x1 = (x0 + half, x1 - half) if x1 > x0 else (x0 - half, x1 + half)
    axis.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "<->", "lw": wide, "color": "dimgrey"})
    middle = ((x0 + x1) / 2, (y0 + y1) / 2 + 0.12 + 0.02 * order)
    axis.text(*middle, link_text(link).replace(", ", "\n"), ha="center", va="bottom", fontsize=7, parse_math=False)

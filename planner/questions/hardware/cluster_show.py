"""A cluster file as plain data, as tables, and as a drawing of its nodes and links in the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from planner.cluster_file import ClusterFile
from planner.questions.hardware.show import in_words
from planner.terminal.tables import table
from planner.units import GIGA, format_seconds, plural

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Of the kinds, in their order."""
MOST_NODES, MOST_GPUS = 6, 16
"""Nodes of a kind, and GPUs of a node, that are drawn one by one."""


def shown_cluster(cluster: ClusterFile) -> dict[str, Any]:
    """Everything that ``plan hardware show`` prints of a cluster."""
    nodes, found = cluster.nodes, []
    for one in nodes:
        slow = {
            name: factor
            for name, factor in zip(cluster.names_of(one.kind), cluster.slowdowns(one.kind), strict=True)
            if factor != 1
        }
        found.append({
            "kind": one.kind, "hardware": one.hardware, "site": one.site, "nodes": one.count, "gpus_per_node": one.gpus_per_node,
            "gpus": one.num_gpus, "memory_bytes": one.profile.usable_memory, "peak_bf16_flops": one.profile.peak("bf16"),
            "inside_bytes_per_s": one.profile.scale_up_bandwidth, "network_bytes_per_s": one.profile.network_bandwidth,
            "usd_per_gpu_hour": one.usd_per_hour(), "spot": one.spot, "mtbf_s": one.mtbf, "slowdown": slow,
        })  # fmt: skip
    links = [
        {"between": list(one.between), "bytes_per_s": one.bandwidth, "latency_s": one.latency, "flows": one.flows,
         "usd_per_byte": one.price, "per_node": one.per_node, "window_bytes": one.window}
        for one in cluster.links
    ]  # fmt: skip
    storage = None if cluster.storage is None else {
        "read_bytes_per_s": cluster.storage.read, "write_bytes_per_s": cluster.storage.write,
        "per_node_bytes_per_s": cluster.storage.per_node,
    }  # fmt: skip
    assumed = [
        f"{a} to {b}: no link is given; the slower of their networks is taken" for a, b in _without_link(cluster)
    ]
    return {
        "nodes": cluster.num_nodes, "gpus": cluster.num_gpus, "sites": list(cluster.sites), "kinds": found, "links": links,
        "storage": storage, "spares": cluster.spares, "notes": assumed,
    }  # fmt: skip


def _without_link(cluster: ClusterFile) -> list[tuple[str, str]]:
    """Pairs of sites, or of kinds of one site, between which the file gives no link."""
    pairs: dict[tuple[str, str], None] = {}
    for number, one in enumerate(cluster.nodes):
        for other in cluster.nodes[number + 1 :]:
            if cluster.link(one.kind, other.kind) is None:
                apart = one.site != other.site
                pairs[(one.site, other.site) if apart else (one.kind, other.kind)] = None
    return list(pairs)


def print_cluster(out: Console, data: dict[str, Any]) -> None:
    """The drawing, then what each kind and each link is."""
    out.print(f"{plural(data['nodes'], 'node')}, {plural(data['gpus'], 'GPU')}, {plural(len(data['sites']), 'site')}")
    out.print(drawing(data))
    rows = (
        (one["kind"], one["hardware"], str(one["nodes"]), str(one["gpus_per_node"]), in_words(one["memory_bytes"], "bytes"),
         in_words(one["peak_bf16_flops"], "FLOP/s"), in_words(one["inside_bytes_per_s"], "bytes/s"),
         in_words(one["network_bytes_per_s"], "bytes/s"),
         "-" if one["usd_per_gpu_hour"] is None else f"{one['usd_per_gpu_hour']:.4g}{' spot' if one['spot'] else ''}",
         _slow_text(one["slowdown"]))
        for one in data["kinds"]
    )  # fmt: skip
    headings = (
        "kind",
        "hardware",
        ">nodes",
        ">GPUs/node",
        "~memory",
        "~16 bits",
        "~in node/GPU",
        "~network/GPU",
        "~USD/GPU/h",
        "slowdown",
    )
    out.print(table(*headings, rows=rows))
    if data["storage"]:
        stored = data["storage"]
        read, write = (in_words(stored[f"{what}_bytes_per_s"], "bytes/s") for what in ("read", "write"))
        out.print(f"storage: read {read}, write {write}")
    if data["spares"]:
        out.print(plural(data["spares"], "spare node"))
    for note in data["notes"]:
        out.print(f"note: {note}", markup=False)


def _slow_text(factors: dict[str, float]) -> str:
    if len(factors) > 3 and len(set(factors.values())) == 1:
        return f"all {next(iter(factors.values())):g}"
    few = [f"{name} {factor:g}" for name, factor in list(factors.items())[:3]]
    return ", ".join([*few, *(["..."] if len(factors) > 3 else [])])


def drawing(data: dict[str, Any]) -> RenderableType:
    """A box per site with its kinds, a line per node with a square per GPU; below it the links, slow ones with fewer strokes."""
    colours = {one["kind"]: COLOURS[number % len(COLOURS)] for number, one in enumerate(data["kinds"])}
    first, boxes = 0, dict[str, list[RenderableType]]()
    for one in data["kinds"]:
        boxes.setdefault(one["site"], []).append(_kind(one, first, colours[one["kind"]]))
        first += one["nodes"]
    sites = [Panel(Group(*inner), title=Text(site), box=box.ROUNDED, expand=False) for site, inner in boxes.items()]
    lines = [_link(one) for one in data["links"]]
    return Group(Columns(sites, padding=(0, 2)), *lines)


def _kind(one: dict[str, Any], first: int, colour: str) -> RenderableType:
    """One kind: its name, and its nodes as far as there is room."""
    text = Text(
        f"{one['kind']}: {plural(one['nodes'], 'node')} of {one['gpus_per_node']} {one['hardware']}", style="bold"
    )
    gpus = one["gpus_per_node"]
    squares = "■ " * gpus if gpus <= MOST_GPUS else "■ " * (MOST_GPUS - 2) + f"... {gpus}"
    for number in range(min(one["nodes"], MOST_NODES)):
        name = f"node-{first + number}"
        text.append(f"\n{name:<10} ", style="")
        text.append(squares, style=colour)
        if name in one["slowdown"]:
            text.append(f"{one['slowdown'][name]:g} times as long", style="red")
    if one["nodes"] > MOST_NODES:
        text.append(f"\n... {one['nodes'] - MOST_NODES} more", style="bright_black")
    return text


def link_text(one: dict[str, Any]) -> str:
    """Bandwidth, latency, flows and price of a link."""
    rate = f"{8 * one['bytes_per_s'] / GIGA:.4g} Gb/s{' a node' if one['per_node'] else ''}"
    more = [format_seconds(one["latency_s"])] if one["latency_s"] else []
    more += [plural(one["flows"], "flow")] if one["flows"] > 1 else []
    more += [f"{one['usd_per_byte'] * GIGA:.4g} USD/GB"] if one["usd_per_byte"] else []
    return ", ".join([rate, *more])


def _link(one: dict[str, Any]) -> Text:
    a, b = one["between"]
    stroke = "═" if one["bytes_per_s"] * 8 >= 100 * GIGA else "─" if one["bytes_per_s"] * 8 >= 10 * GIGA else "┄"
    return Text(f"{a} {stroke * 4} {link_text(one)} {stroke * 4} {b}")

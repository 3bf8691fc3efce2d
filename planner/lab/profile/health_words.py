"""What a check of health means: sentences with what to look at, tables, and a picture. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from planner.lab.profile.bisection import NORMAL
from planner.units import GIGA, format_bytes

BEHIND = 0.20
"""A pair or NIC is named that stays behind its fellows by more than this, or by SCATTERS of their scatter where that is more."""
SCATTERS = 5.0
SLOW_PRODUCT = 1.1  # Times the median of the other ranks
MOST_NAMED = 5
LARGEST_TABLE = 16
"""Rows up to which a matrix is printed; the picture has all."""
CLOCKS = "look at its clock, power limit and heat (nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE) and at other processes"
NICS = "look at its NICs (ibstat, rate and errors of the port on the switch), their PCIe width (lspci -vv, LnkSta) and their cables"
CORES = "look at what else runs on its cores"
NVLINK = "look at nvidia-smi nvlink --status and --errorcounters, nvidia-smi topo -m, Xid in dmesg, and the fabric manager"


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What stands out, the member that is slow with everyone first; [] = nothing does."""
    hosts, local, search = found["hosts"], found["ranks_per_node"], found["bisection"]
    nodes, said = search["members"] == "nodes", []

    inside = CORES if found["device"] == "CPU" else NVLINK

    def name(member: int) -> str:
        return f"node {member} ({hosts[member]})" if nodes else f"rank {member} ({hosts[0]})"

    for one in search["slow"]:
        rails = found["rails"][one["member"]] if found["rails"] else []
        said.append(
            f"{name(one['member'])} is slow: its all-reduce with a healthy one reaches {one['share']:.0%} of "
            f"{_rate(search['healthy'])}, that of healthy pairs; {_rails_of(rails, found['rails']) if nodes else inside}"
        )
    for a, b in search["links"]:
        said.append(f"{name(a)} and {name(b)} are slow together and not with others: look at the cables and switches between them")
    for group in search["undecided"]:
        said.append(f"{' and '.join(map(name, group))} are slow together, and there is no healthy one to tell which: add machines")
    product = found["product"]
    if product.get("over_median", 1.0) >= SLOW_PRODUCT:
        longer = f"{product['over_median'] - 1.0:.0%}"
        where = CORES if found["device"] == "CPU" else CLOCKS
        said.append(f"rank {product['slowest']} ({product['host']}) computes {longer} longer than the median: {where}")
    said += _odd_nics(found, {one["member"] for one in search["slow"]} if nodes else set())
    for node, matrix in enumerate(found["inside"]):
        said += [
            f"from rank {node * local + a} to {node * local + b} on {hosts[node]}: {_rate(rate)}, {share:.0%} of others: {inside}"
            for a, b, rate, share in _odd(matrix, [one for one in found["inside"] if one is not matrix])
        ]
    return [*said, *found.get("unlike", [])]


def _rails_of(own: Sequence[float], all_: Sequence[Sequence[float]]) -> str:
    """Which of a slow node's NICs it is, and what to look at."""
    usual = median(rate for row in all_ for rate in row)
    slow = [f"{rail}" for rail, rate in enumerate(own) if rate < (1.0 - BEHIND) * usual]
    if 0 < len(slow) < len(own):
        return f"it is the NIC of its GPU {', '.join(slow)}: {NICS}"
    return f"{NICS}; and at PCIe switches and ACS" if slow else f"its NICs are as fast as others one by one: {CLOCKS}"


def _odd_nics(found: Mapping[str, Any], named: set[int]) -> list[str]:
    """NICs behind the others, of nodes that are not named yet."""
    rows = found["rails"] or []
    rates = [rate for row in rows for rate in row]
    least = _least(rates)
    return [
        f"the NIC of GPU {rail} of node {node} ({found['hosts'][node]}) moves {_rate(rate)}, {rate / median(rates):.0%} of the "
        f"median: {NICS}"
        for node, row in enumerate(rows) if node not in named for rail, rate in enumerate(row) if rate < least
    ][:MOST_NAMED]  # fmt: skip


def _odd(matrix: Sequence[Sequence[float | None]], others: Sequence[Any]) -> list[tuple[int, int, float, float]]:
    """Pairs that stay behind: the same pair on other nodes, which is wired alike, where there are some; else all pairs."""
    every = [rate for row in matrix for rate in row if rate]
    found = []
    for a, row in enumerate(matrix):
        for b, rate in enumerate(row):
            fellows = [one[a][b] for one in others if one[a][b]] or every
            if rate and rate < _least(fellows):
                found.append((a, b, rate, rate / median(fellows)))
    return sorted(found, key=lambda one: one[3])[:MOST_NAMED]


def _least(rates: Sequence[float]) -> float:
    """What one has to reach not to be odd."""
    if len(rates) < 3:
        return 0.0
    middle = median(rates)
    scatter = NORMAL * median(abs(rate - middle) for rate in rates) / middle
    return middle * (1.0 - max(BEHIND, SCATTERS * scatter))


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


# ------------------------------------------------------------------------------------------------ tables, picture


def tables(found: Mapping[str, Any]) -> list[Any]:
    """For a terminal: the matrices in GB/s, and the rounds of the bisection."""
    from rich import box
    from rich.table import Table

    shown: list[Any] = []
    for title, matrix, rows in _matrices(found):
        if len(matrix) > LARGEST_TABLE:
            continue
        table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in range(len(matrix[0])):
            table.add_column(str(column), justify="right")
        for row, values in zip(rows, matrix, strict=True):
            table.add_row(row, *("" if one is None else f"{one / GIGA:.4g}" for one in values))
        shown += [f"{title}, GB/s", table]
    members = found["bisection"]["members"]
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (f"groups of {members}", "slowest", "fastest", "slowest group"):
        table.add_column(heading, justify="right")
    for number, groups in enumerate(found["bisection"]["rounds"], 1):
        worst, best = (pick(groups, key=lambda one: one["bandwidth"]) for pick in (min, max))
        size = f"{len(groups)} of {len(groups[0]['members'])}"
        slowest = ", ".join(map(str, worst["members"][:4])) + (", ..." if len(worst["members"]) > 4 else "")
        table.add_row(f"round {number}", size, _rate(worst["bandwidth"]), _rate(best["bandwidth"]), slowest)
    return [*shown, *(["All-reduce in groups of one round at once", table] if found["bisection"]["rounds"] else [])]


def _matrices(found: Mapping[str, Any]) -> list[tuple[str, Any, list[str]]]:
    """Title, values and names of rows."""
    hosts, local = found["hosts"], found["ranks_per_node"]
    named = [f"{number} {host}" for number, host in enumerate(hosts)]
    several = [
        (f"From GPU to GPU on {host}", matrix, list(map(str, range(local))))
        for host, matrix in zip(hosts, found["inside"], strict=True) if local > 1
    ]  # fmt: skip
    shown = several[:1]
    if len(hosts) > 1:
        shown += [("From node to node", found["between"], named), ("Each NIC, by GPU", found["rails"], named)]
    return shown


def draw(found: Mapping[str, Any], path: Path) -> bool:
    """Heat maps of the matrices as a picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    matrices = _matrices(found)
    if not matrices:
        return False
    figure = Figure(figsize=(4.8 * len(matrices), 4.2), layout="constrained")
    for place, (title, matrix, rows) in enumerate(matrices, 1):
        axes = figure.add_subplot(1, len(matrices), place)
        values = [[float("nan") if one is None else one / GIGA for one in row] for row in matrix]
        image = axes.imshow(values, vmin=0.0, aspect="auto")
        axes.set_title(f"{title}, GB/s", fontsize=9)
        if len(rows) <= LARGEST_TABLE:
            axes.set_yticks(range(len(rows)), rows)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
    return True

"""Answers to published measurements of links: bandwidth between machines of one zone or two regions, and their delay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from planner import library, units
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.mixed.region_links import (
    is_region,
    machine_bandwidth,
    machine_of,
    pair_bandwidth,
    region_bandwidth,
    region_of,
    round_trip,
)
from planner.published_rows import NOT_RUN, PREDICTED, REFUSED, AnsweredRow, Quantity, rows_of, source_of

NEAR, FAR, DELAY = (0.90, 1.10), (0.62, 1.20), (0.82, 1.08)
"""Measured over predicted, within which nine of ten of the shipped rows lie: bandwidth inside a region and between two, delay."""
CARD = 0.92
"""Share of a network card's rate that is payload in a cluster of one's own: 1448 of the 1538 bytes of an Ethernet frame with TCP
(0.94), less acknowledgements and pauses between messages; 0.92 of 200 Gb/s and of 1 Gb/s, beyond-runs/geo/sailor-gcp-links.yaml."""


def answers(document: Mapping[str, Any], where: str) -> list[AnsweredRow]:
    """One answer per row: ``gb_per_s`` and, where it was measured, ``delay_ms`` (there and back). Raises PlannerError for a file
    that is none."""
    source, topic = source_of(document, where), str(document.get("topic", "geo"))
    return [_answer(row, source, topic) for row in rows_of(document, where)]


def _answer(row: Mapping[str, Any], source: str, topic: str) -> AnsweredRow:
    measured = row.get("measured")
    named: dict[str, Any] = {"source": source, "id": row["id"], "topic": topic, "counts": "suspect" not in row}
    numbers = {
        key: float(value)
        for key, value in (measured.items() if isinstance(measured, Mapping) else ())
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    }
    if not {"gb_per_s", "delay_ms"} & set(numbers):
        return AnsweredRow(status=NOT_RUN, reason="no bandwidth and no delay was measured", **named)
    found, refused = dict[str, Quantity](), ""
    for name, priced in (("gb_per_s", _bandwidth), ("delay_ms", _delay)):
        if name in numbers:
            try:
                predicted, spread = priced(row, numbers)
            except PlannerError as error:
                refused = str(error)
                continue
            limits = (predicted * spread[0], predicted * spread[1])
            found[name] = Quantity(measured=numbers[name], predicted=predicted, range=limits)
    return AnsweredRow(status=PREDICTED if found else REFUSED, reason=refused, quantities=found, **named)


def _ends(row: Mapping[str, Any]) -> tuple[str, str]:
    ends = row.get("from"), row.get("to")
    if not all(isinstance(one, str) for one in ends):
        raise PlannerError("the row does not say between which places it was measured")
    return str(ends[0]), str(ends[1])


def _delay(row: Mapping[str, Any], _: Mapping[str, float]) -> tuple[float, tuple[float, float]]:
    """Milliseconds there and back, from where the regions lie."""
    found = round_trip(*_ends(row)) / units.MILLI
    if found == 0:
        raise PlannerError("both ends are in one region; its delay is that of its network, which is not modelled")
    return found, DELAY


def _bandwidth(row: Mapping[str, Any], numbers: Mapping[str, float]) -> tuple[float, tuple[float, float]]:
    """GB/s between two machines. A delay that the row gives is what a user would know from ``ping``."""
    ends, gpu, gpus = _ends(row), row.get("gpu"), row.get("gpus_per_vm")
    stated = gpu and isinstance(gpus, int) and gpus > 0
    if ends[0] == ends[1] and not is_region(ends[0]):
        if not stated:
            raise PlannerError(f"{ends[0]} is no cloud region and its machines are not said; give gpu and gpus_per_vm")
        return _own_cluster(ends[0], str(gpu), int(str(gpus))) / units.GIGA, NEAR
    a, b = (region_of(one) for one in ends)
    rtt = numbers["delay_ms"] * units.MILLI if "delay_ms" in numbers else round_trip(*ends)
    if not stated:
        if a.name == b.name:
            raise PlannerError(f"both machines are in {a.name} and their type is not said; give gpu and gpus_per_vm")
        return pair_bandwidth(a.provider, rtt) / units.GIGA, FAR
    machine = machine_of(a.provider, str(gpu), int(str(gpus)))
    if a.name == b.name:
        return machine_bandwidth(machine, machine.gpus) / units.GIGA, NEAR
    return region_bandwidth(machine, machine.gpus, rtt) / units.GIGA, FAR


def _own_cluster(name: str, gpu: str, gpus: int) -> float:
    """Bytes/s between two nodes of a cluster of one's own: its cards where they are known, else those of the GPU's profile."""
    with suppress(PlannerError):
        return CARD * machine_of(name, gpu, gpus).network
    hardware = load_hardware(re.sub(r"-\d+gb$", "", gpu.replace("ti-", "-ti-")) if gpu not in library.names("hardware") else gpu)
    return CARD * hardware.network_bandwidth * min(gpus, hardware.gpus_per_node)

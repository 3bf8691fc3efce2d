"""GPUs as their driver shows them: nvidia-smi --query-gpu, dcgmi dmon, DCGM's exporter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from planner.elastic.prometheus import Metric
from planner.elastic.seen_tables import Table
from planner.record import record

KEPT = 200
"""Last lines of a GPU that are looked at."""
COLUMNS = {
    "clock": ("clocks.sm", "clocks.current.sm", "sm_clock", "smclk"), "power": ("power.draw", "power_usage", "power"),
    "temperature": ("temperature.gpu", "gpu_temp", "tmptr"), "xid": ("xid_errors", "xider"),
    "reasons": ("clocks_throttle_reasons.active", "clocks_event_reasons.active", "clock_throttle_reasons",
                "clocks_event_reasons", "dvcctr"),
    "width": ("pcie.link.width.current", "pcie_link_width"), "most_width": ("pcie.link.width.max", "pcie_max_link_width"),
}  # fmt: skip
"""Columns of nvidia-smi, names of DCGM's fields and of dcgmi dmon, in small letters."""
FIELDS = "DCGM_FI_DEV_"
REASONS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}  # fmt: skip
"""Bits of the reasons for a lower clock that are no idling.  [NVML, nvmlClocksEventReasons]"""
IDLE = 0x1
"""Nothing runs: such a clock says nothing."""
NODE = ("node", "host", "hostname", "nodename")
Rows = Iterable[tuple[str, dict[str, float]]]


@record
class Gpu:
    """One GPU, the last or the median of what was seen."""

    node: str
    """'' where nothing says it."""
    index: str
    clock: float | None = None
    """MHz of the SMs."""
    power: float | None = None
    """Watts."""
    temperature: float | None = None
    """Degrees Celsius."""
    reasons: tuple[str, ...] = ()
    """Why its clock is low."""
    xid: int = 0
    """Last error of the driver; 0 = none."""
    width: float | None = None
    """Lanes of PCIe in use."""
    most_width: float | None = None
    """Lanes that it could use."""

    @property
    def name(self) -> str:
        """Node and number."""
        return f"{self.node}{'/' if self.node else ''}GPU {self.index}"


def gpus_of_table(table: Table, node: str) -> tuple[Gpu, ...]:
    """GPUs of a table; of a ``node`` where it names none. Raises PlannerError."""
    nodes, index = table.texts(*NODE), table.texts("index", "gpu", "gpu_id", "gpu-id", "uuid")
    found = {what: values for what, names in COLUMNS.items() if (values := table.numbers(*names)) is not None}
    rows = (
        ((nodes[i] if nodes else node, index[i] if index else "0"),
         {what: value for what, values in found.items() if (value := values[i]) is not None})
        for i in range(len(table.rows))
    )  # fmt: skip
    return _gpus(rows)


def gpus_of_metrics(metrics: Sequence[Metric]) -> tuple[Gpu, ...]:
    """GPUs of DCGM's exporter, by ``Hostname`` and ``gpu``."""
    short = {name: what for what, names in COLUMNS.items() for name in names}
    return _gpus(
        ((one.labels.get("Hostname") or one.labels.get("instance") or "", one.labels.get("gpu", "0")), {what: one.value})
        for one in metrics
        if one.name.startswith(FIELDS) and (what := short.get(one.name.removeprefix(FIELDS).lower()))
    )


def _gpus(rows: Iterable[tuple[tuple[str, str], dict[str, float]]]) -> tuple[Gpu, ...]:
    """One entry for each GPU: medians, clocks while idle left out; reasons and errors that were seen at any time."""
    seen: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for who, numbers in rows:
        for what, value in numbers.items():
            if what != "clock" or not int(numbers.get("reasons", 0)) & IDLE:
                seen[who][what].append(value)
    found = []
    for (node, index), values in seen.items():
        bits = 0
        said = values.pop("reasons", [])[-KEPT:]
        for reason in said:
            bits |= int(reason)
        if said and all(int(reason) & IDLE for reason in said):
            values.pop("clock", None)
        errors = values.pop("xid", [])
        middle = {what: float(np.median(one[-KEPT:])) for what, one in values.items()}
        reasons = tuple(text for bit, text in REASONS.items() if bits & bit)
        found.append(Gpu(node=node, index=index, reasons=reasons, xid=int(max([0.0, *errors])), **middle))
    return tuple(found)

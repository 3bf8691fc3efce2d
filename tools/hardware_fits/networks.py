"""Networks of the devices, from measured segments."""

from __future__ import annotations

from typing import Any

from planner.curves import Column
from planner.lab.profile.fitting import short
from tools.hardware_fits.links import OP_NAMES, fit_network
from tools.tables import floats


def seg(
    efficiency: float, latency_us: float = 0.0, per_rank_us: float = 0.0, per_doubling_us: float = 0.0
) -> dict[str, Any]:
    """One protocol as it stands in the file."""
    return {
        "efficiency": short(min(efficiency, 1.0), 3),
        "latency": f"{short(latency_us, 3)} us",
        "latency_per_rank": f"{short(per_rank_us, 3)} us",
        "latency_per_doubling": f"{short(per_doubling_us, 3)} us",
    }


class Sweeps:
    """Measured sweeps across nodes, found by source, operation and ranks."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def fit(self, source: str, op: str, world: int, line: float, note: str = "") -> tuple[Column, list[float]]:
        """(e1, a1, e2, a2) and the error of one sweep; NIC line rate per GPU in bytes/s."""
        rows = [
            r for r in self.rows
            if r["source"] == source and OP_NAMES[r["op"]] == op and int(r["world"]) == world and int(r["nodes"]) > 1
            and note in r["note"] and float(r["bytes"]) >= 1024
        ]  # fmt: skip
        size, us = floats(sorted(rows, key=lambda r: float(r["bytes"])), "bytes", "time_us")
        return fit_network(size, us, world, int(rows[0]["gpus_per_node"]), op, line)

    def ring(self, source: str, op: str, world: int, line: float, note: str = "") -> dict[str, Any]:
        """An operation whose latency grows with the number of ranks."""
        (e1, a1, e2, a2), error = self.fit(source, op, world, line, note)
        per = 1e6 / (world - 1)
        return {
            "fast": seg(e1, 0.0, a1 * per), "bulk": seg(e2, 0.0, a2 * per),
            "source": f"{source}, {world} GPUs{', ' + note if note else ''}", "errors": {"median_p90_percent": error},
        }  # fmt: skip

    def tree(
        self,
        source: str,
        world: int,
        line: float,
        beyond: float,
        why: str,
        doubling: tuple[float, float],
        note: str = "",
    ) -> dict[str, Any]:
        """all_reduce: latency grows with log2(nodes); ``beyond`` is the efficiency on more than two nodes."""
        (e1, a1, e2, a2), error = self.fit(source, "all_reduce", world, line, note)
        fast, bulk = doubling
        return {
            "fast": seg(e1, max(a1 * 1e6 - fast, 1.0), 0.0, fast), "bulk": seg(beyond, max(a2 * 1e6 - bulk, 1.0), 0.0, bulk),
            "two_nodes": short(e2, 3), "source": f"{source}, {world} GPUs on two nodes; more nodes: {why}",
            "errors": {"two_nodes_median_p90_percent": error},
        }  # fmt: skip


# Latency of an all_reduce per doubling of the nodes, us: NCCL's own tree constants, 2 hops of 5 (LL) to 8.5 (LL128), and
# for bulk the intercept of 8 H100 nodes (coreweave, 252 us) less that of two (about 150), over two doublings.
IB_DOUBLING = (13.5, 50.0)
# Measured on Slingshot, 2 to 540 nodes: 24-37 us (fast), 305 us (bulk).
SLINGSHOT_DOUBLING = (30.0, 305.0)


def build_networks(rows: list[dict[str, str]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """name -> (latency of the smallest message, constants of the six operations)."""
    sweeps, ib, hdr = Sweeps(rows), 50e9, 25e9
    send = sweeps.ring("vidur", "send_recv", 2, ib)
    if send["bulk"]["efficiency"] < 0.5:  # the A100 rows of this source are a slow fabric: take the H100 ones
        h100 = Sweeps([r for r in rows if r["gpu"] == "H100-SXM"])
        send = h100.ring("vidur", "send_recv", 2, ib)
    send = {**send, **{part: {**send[part], "latency": send[part]["latency_per_rank"], "latency_per_rank": "0 us"}
                       for part in ("fast", "bulk")}}  # fmt: skip
    gather = sweeps.ring("gke-a3u", "all_gather", 16, ib)
    exchange = sweeps.ring("report-b200-ndr", "all_to_all", 16, ib, "tuned")
    check = "nccl-1229 (8 GiB, 4 to 128 nodes)"
    hopper = {
        "all_gather": gather, "reduce_scatter": {**gather, "source": gather["source"] + f" (all_gather); checked on {check}"},
        "broadcast": {**gather, "source": "as all_gather; not measured"}, "all_to_all": exchange, "send_recv": send,
    }  # fmt: skip
    ring = gather["bulk"]["efficiency"]
    h200_reduce = sweeps.tree(
        "report-h200-roce", 16, ib, ring, "the ring of all_gather; SHARP reaches 0.97", IB_DOUBLING
    )
    h100_reduce = {
        **h200_reduce, "two_nodes": 1.04,
        "source": "latencies of H200 RoCE; two nodes: median of 391, 415 and 464 GB/s at three sites; more: ring of all_gather",
    }  # fmt: skip
    b200 = {op: sweeps.ring("report-b200-ndr", op, 16, ib) for op in ("all_gather", "reduce_scatter")}
    b200 |= {"broadcast": {**b200["all_gather"], "source": "as all_gather; not measured"}, "all_to_all": exchange}
    b200["all_reduce"] = sweeps.tree(
        "report-b200-ndr", 16, ib, 0.955, "stas, 32 GPUs on EFA, 382 of 400 GB/s", IB_DOUBLING
    )
    b200_send = sweeps.ring("report-b200-ndr", "send_recv", 16, ib, "tuned")
    b200["send_recv"] = {**b200_send, **{
        part: {**b200_send[part], "latency": f"{short(15 * float(b200_send[part]['latency_per_rank'].split()[0]), 3)} us",
               "latency_per_rank": "0 us"} for part in ("fast", "bulk")}}  # fmt: skip
    b300 = b200 | {
        "all_reduce": {**b200["all_reduce"], "two_nodes": 0.958, "source": "B200 latencies; oci, 16 GPUs, 766 of 800 GB/s"},
        "all_to_all": {**exchange, "bulk": {**exchange["bulk"], "efficiency": 0.965},
                       "source": "B200 latencies; oci, 16 GPUs at 8 GiB: 181 GB/s bus = 96.5 of 100 per GPU"},
    }  # fmt: skip
    rack_gather = sweeps.ring("gcp-a4x-max", "all_gather", 8, 100e9)
    rack = {op: rack_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": {
            **b200["all_reduce"], "two_nodes": None, "inside": [0.90, 0.12, 0.48],
            "bulk": {**b200["all_reduce"]["bulk"], "latency": "0 us", "latency_per_doubling": "0 us", "latency_per_rank": "3.2 us"},
            "source": "B200 latencies; racks: oci, 128 and 192 GPUs, 800 and 749 of 892 GB/s inside; coreweave, 1440 GPUs, slope 429, 4.6 ms",
        },
        "all_to_all": {**exchange, "bulk": {**exchange["bulk"], "efficiency": 0.87},
                       "source": "B200 latencies; oci GB200, 128 and 192 GPUs: 45 and 42 of 50 GB/s per GPU (GB300: 24 of 100)"},
        "send_recv": b200["send_recv"],
    }  # fmt: skip
    gb300 = rack | {"all_reduce": {**rack["all_reduce"], "inside": [0.79, 0.105, 0.42],
                                   "source": "as gb200-nvl72, less by oci GB300, 128 GPUs: 738 of 930 GB/s inside"}}  # fmt: skip
    hdr_gather = sweeps.ring("alcf-sophia", "all_gather", 16, hdr)
    a100 = {op: hdr_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": sweeps.tree("alcf-sophia", 16, hdr, 0.817, "coreweave, 64 GPUs, slope 163 of 200 GB/s", (13.5, 50.0)),
        "all_to_all": sweeps.ring("alcf-sophia", "all_to_all", 16, hdr),
        "send_recv": {**send, "source": "fractions of H100 (the A100 rows of that source are a slow fabric)"},
    }  # fmt: skip
    pollara_reduce = sweeps.tree("report-mi355x-pollara", 16, ib, 0.926, "oci, 32 GPUs, 370 of 400 GB/s", IB_DOUBLING)
    pollara_exchange = sweeps.ring("report-mi355x-pollara", "all_to_all", 16, ib)
    pollara_exchange["bulk"]["efficiency"] = 0.86
    pollara_exchange["source"] += "; efficiency between two nodes (0.955) and four (oci, 0.78)"
    pollara_gather = {**gather, "bulk": {**gather["bulk"], "efficiency": 0.926},
                      "source": "latencies of H200 RoCE, bandwidth of the all_reduce; not measured"}  # fmt: skip
    mi355x = {op: pollara_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": pollara_reduce, "all_to_all": pollara_exchange, "send_recv": send,
    }  # fmt: skip
    sling_gather = sweeps.ring("alcf-polaris", "all_gather", 32, 12.5e9, "setup 5")
    sling_reduce = sweeps.tree(
        "alcf-polaris", 8, 12.5e9, 0.77, "the same fabric, 32 GPUs", SLINGSHOT_DOUBLING, "setup 5"
    )
    slingshot = {op: sling_gather for op in ("all_gather", "reduce_scatter", "broadcast")} | {
        "all_reduce": {**sling_reduce, "two_nodes": None}, "all_to_all": sweeps.ring("alcf-polaris", "all_to_all", 8, 12.5e9, "setup 5"),
        "send_recv": send,
    }  # fmt: skip
    return {
        "h100-sxm": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
        "h200-sxm": ("17.6 us", {"all_reduce": h200_reduce, **hopper}),
        "b200-sxm": ("14 us", b200), "b300-sxm": ("14 us", b300), "gb200-nvl72": ("14 us", rack), "gb300-nvl72": ("14 us", gb300),
        "a100-sxm-80gb": ("17.6 us", a100), "mi355x": ("17.6 us", mi355x), "mi250x": ("17.6 us", slingshot),
        "l40s": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
        "rtx-pro-6000": ("17.6 us", {"all_reduce": h100_reduce, **hopper}),
    }  # fmt: skip

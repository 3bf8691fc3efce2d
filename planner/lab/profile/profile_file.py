"""The journal of a profile to a profile file: what was measured, what stands in for the rest, and where all of it is from."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner import detect, library, units
from planner.curves import COLLECTIVES, CollectiveCurve, NetworkCurve, Segment, least_factor
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.hardware.profile import Provenance
from planner.lab.launch.nccl import NVLS
from planner.lab.profile import fit_links
from planner.lab.profile.fit_compute import base_of, findings, fit_compute, machine_keys, points_by_family
from planner.lab.profile.fitting import Findings, of, spread_of
from planner.lab.profile.patterns import in_words
from planner.lab.profile.points import CLOCKS, Journal, Point, Settings
from planner.lab.profile.timing import FEWEST, drift

TOGETHER = ("collective", "collective_form", "overlap", "ranks", "again")  # Families that say nothing of one device alone
SLOW_RANK, SLOW_GROUP = 1.10, 1.5
"""Time over that of the median rank, and of the median group, from which a note names it."""


def main_dtype(device: str) -> str:
    """Type of the elements of the collectives that the curves are made of."""
    return "bf16" if device == "cuda" else "fp32"


def links(journal: Journal, settings: Settings, base: HardwareProfile | None, memory_rate: float) -> Findings:
    """Curves inside a node and across nodes. ``memory_rate`` stands in for a link where a single rank was measured."""
    head, dtype, given = journal.header, main_dtype(settings.device), settings.network_bandwidth
    curves, local = fit_links.curves(journal.of("collective")), int(head["local"])
    found = Findings(keys={"gpus_per_node": local})
    if local > 1:
        found.keys["scale_up"] = fit_links.scale_up(curves, dtype)
        found.measured["scale_up"] = "measured"
        if base is None:
            reached = _fastest(found.keys["scale_up"])
            found.keys |= {"scale_up_bandwidth": _rate(reached), "scale_up_domain": local}
            found.notes.append("scale_up_bandwidth: the fastest transfer that was measured; no datasheet is known")
    elif base is None:
        found.keys |= {
            "scale_up": _assumed_scale_up(memory_rate), "scale_up_bandwidth": _rate(memory_rate), "scale_up_domain": 1,
        }  # fmt: skip
        found.measured["scale_up"] = "assumed: one rank was measured"
        found.unverified += ["scale_up", "scale_up_bandwidth"]
        found.notes.append(
            "scale_up: one rank was measured; a link of half the memory bandwidth is assumed, run more ranks"
        )
    if int(head["nodes"]) > 1:
        _across(found, curves, dtype, given or (base.network_bandwidth if base else 0.0), head)
    elif base is None:
        found.keys |= _assumed_scale_out(found.keys["scale_up"], given)
        found.measured["scale_out"] = "assumed: one node was measured"
        found.unverified += ["scale_out", "network_latency", *([] if given else ["network_bandwidth"])]
        found.notes.append(
            "scale_out: one node was measured; a network as fast as the collectives inside it is assumed, "
            "run the profile on two nodes or more"
        )
    elif given:
        found.keys["network_bandwidth"] = _rate(given)
    return found


def _across(
    found: Findings, curves: Sequence[fit_links.Curve], dtype: str, given: float, head: Mapping[str, Any]
) -> None:
    """Adds what was measured across nodes; ``given`` is the line rate of a datasheet or of the user, 0 without any."""
    best = fit_links.network_rate(curves)
    if given and best > given * 1.02:
        found.notes.append(
            f"network_bandwidth: {_rate(best)} was measured, above the {_rate(given)} given; the measured one is kept"
        )
    rate, source = max(best, given), f"{head['host']}, {head['nodes']} nodes"
    pairs = [curve for curve in curves if curve.op == "send_recv" and curve.nodes > 1]
    found.keys |= {
        "network_bandwidth": _rate(rate), "scale_out": fit_links.scale_out(curves, dtype, rate, source),
        "network_latency": f"{min(one.median for curve in pairs for one in curve.points)!r} s",
    }  # fmt: skip
    found.measured["scale_out"] = "measured"


def _rate(value: float) -> str:
    return f"{value:.6g} B/s"


def _fastest(scale_up: Mapping[str, Any]) -> float:
    """Bytes per second that the link must carry for the fastest of all measured transfers; without a datasheet this is taken for
    the link, so that no curve passes it."""
    curves = [CollectiveCurve.from_dict(op, data, "measured") for op, data in scale_up.items()]
    return max(
        float((least_factor(curve.op, group) * curve.sizes / row).max())
        for curve in curves for group, row in zip(curve.groups, curve.seconds, strict=True)
    )  # fmt: skip


def _assumed_scale_up(memory_rate: float) -> dict[str, Any]:
    """Two ranks that copy through memory: half its bandwidth, 20 us."""
    found = {}
    for op in COLLECTIVES:
        seconds = [20e-6 + float(least_factor(op, 2.0)) * units.KIB * 2.0**i / (0.5 * memory_rate) for i in range(15)]
        found[op] = {"first_size": "1 KiB", "us": {2: " ".join(f"{units.MEGA * one:.5g}" for one in seconds)}}
    return found


def _assumed_scale_out(scale_up: Mapping[str, Any], given: float | None) -> dict[str, Any]:
    """A network as fast as a pair inside the node: its latency, its best rate as the line rate where none is given."""
    pair = CollectiveCurve.from_dict("send_recv", scale_up["send_recv"], "measured")
    latency = float(pair.seconds[0, 0])
    line = Segment(efficiency=1.0, latency=latency, latency_per_rank=0.0, latency_per_doubling=latency)
    curve = NetworkCurve(fast=line, bulk=line, source="assumed").to_dict()
    return {
        "network_bandwidth": _rate(given or float((pair.sizes / pair.seconds[0]).max())),
        "network_latency": f"{latency!r} s", "scale_out": dict.fromkeys(COLLECTIVES, curve),
    }  # fmt: skip


def profile_data(
    journal: Journal, settings: Settings, compute: Findings | None, base: HardwareProfile | None, seconds: float
) -> dict[str, Any]:
    """Data of the file. Raises PlannerError naming what must be measured before it can be one."""
    head = journal.header
    if compute is None and base is None:
        raise PlannerError("nothing was measured of how fast it computes; run again with --resume and --only compute")
    compute, found = compute or Findings(), Findings()
    data: dict[str, Any] = base.to_dict() if base else _cpu_defaults(head)
    data |= {"name": Path(settings.output).stem, "device": head["name"]} | compute.keys
    if base is None or (int(head["world"]) > 1 and ("collectives" in settings.only or journal.of("collective"))):
        rate = units.parse(data.get("memory_bandwidth", "1 GB/s"), "bytes/s", what="memory_bandwidth")
        found = links(journal, settings, base, rate)
    data |= found.keys
    overlap, overlap_notes = fit_links.fit_overlap(journal.of("overlap"))
    if overlap:
        data["overlap"] = data.get("overlap", {}) | overlap
    if base is None:
        each = f"{float(head['memory']) / int(head['local']):.0f} B"  # the ranks of a CPU share its memory
        data |= {"memory": each, "usable_memory": each, "host_memory": f"{head['memory']:.0f} B"}
        memory = compute.keys.get("memory_bandwidth")
        data["pcie_bandwidth"] = memory or data["pcie_bandwidth"]
        data.setdefault("host_memory_bandwidth", memory)  # the budget ended before it
    data["measured"] = {
        **({family: f"scaled from {base.name}" for family in base.measured} if base else {}),
        **compute.measured, **found.measured,
        **({"overlap": f"measured {' and '.join(overlap)}"} if overlap else {}),
    }  # fmt: skip
    data["notes"] = [*_outliers(journal), *found.notes, *overlap_notes, *compute.notes, *_failures(journal)]
    data["unverified"] = [*found.unverified, *data.get("unverified", ())]
    data["provenance"] = _provenance(journal, settings, compute, seconds).to_dict()
    measurements = compute.measurements | _kept(journal)
    first = ("name", "device", "vendor", "arch", "provenance", "measured", "notes", "unverified")
    rest = [key for key in data if key not in (*first, "measurements")]
    return {key: _plain(data[key]) for key in (*first, *rest)} | {"measurements": _plain(measurements)}


def _plain(value: Any) -> Any:
    """A copy without shared parts: YAML would write those as anchors."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _cpu_defaults(head: Mapping[str, Any]) -> dict[str, Any]:
    """A CPU as a device: one core per rank. What has no meaning there is as small as a profile allows, and is said."""
    return {
        "vendor": str(head["name"]).split()[0], "arch": "CPU", "compute_units": 1,
        "pcie_bandwidth": "1 TB/s", "tdp": "1 W",
        "context_memory": "1 MiB", "communicator_memory": "1 MiB", "expert_communicator_memory": "1 MiB",
        "workspace_memory": "1 MiB", "sustained_clock": 1.0, "cpu_adam_bandwidth_fraction": 1.0, "prices": [],
        "unverified": ["pcie_bandwidth", "tdp", "context_memory", "communicator_memory", "workspace_memory"],
    }  # fmt: skip


def _outliers(journal: Journal) -> list[str]:
    """Ranks and groups that are slower than their like: a throttled card, a slow link."""
    found = []
    for one in journal.of("ranks", "collective"):
        details, ratio = one.details, float(one.details.get("over_median", 1.0))
        if one.point.family == "ranks" and ratio >= SLOW_RANK and int(details["ranks"]) >= FEWEST:
            found.append(
                f"rank {details['slowest']} ({details['host']}) computes {ratio:.2f} times as long as the median of the others: "
                "look for heat, a power limit, or another job there"
            )
        if one.point.family == "collective" and ratio >= SLOW_GROUP:
            found.append(
                f"{in_words(one.point)}: ranks {details['slowest_group']} take {ratio:.1f} times as long as the median group: "
                "look at the links between them"
            )
    return found[:10]


def _left_out(journal: Journal) -> int:
    """Points that the budget left out."""
    return sum(reason.startswith("left out") for _, reason in journal.failed)


def _failures(journal: Journal) -> list[str]:
    """Points without a result: those left out by the budget as a number, the others by reason."""
    left = _left_out(journal)
    found = [f"{left} points were left out by the budget; --resume measures them"] if left else []
    alike: dict[tuple[object, ...], list[Point]] = {}
    for point, reason in journal.failed:  # it begins with the point: a type that the device has not is said once
        if not reason.startswith("left"):
            why = reason.removeprefix(point.label).removeprefix(": ")
            alike.setdefault((point.family, point.values.get("dtype"), why), []).append(point)
    others = [
        f"not measured: {some[0].label}{f' and {len(some) - 1} more like it' if len(some) > 1 else ''}: {why}"
        for (_, _, why), some in alike.items()
    ]
    return found + others[:20] + ([f"and {len(others) - 20} more"] if len(others) > 20 else [])


def _kept(journal: Journal) -> dict[str, Any]:
    """The collectives as curves with the line fitted to each; overlaps and ranks as they were measured."""
    curves = [fit_links.rows(one) for one in fit_links.curves(journal.of("collective"))]
    return ({"collective": curves} if curves else {}) | points_by_family(journal.of("overlap", "ranks", "collective_form"))


def _provenance(journal: Journal, settings: Settings, compute: Findings, seconds: float) -> Provenance:
    head, collectives = journal.header, journal.of("collective")
    spread = dict(compute.spread)
    for op in sorted({one.point["op"] for one in collectives}):
        spread[f"collective {op}"] = spread_of(of(collectives, "collective", op=op))
    if journal.of("overlap"):
        spread["overlap"] = spread_of(journal.of("overlap"))
    clocks = sorted({one.clock for one in journal.of() if one.point.family != "bytes"})
    ranks = f"{head['world']} ranks on {head['nodes']} node{'s' if int(head['nodes']) > 1 else ''}"
    left, notes = _left_out(journal), []
    if head["device"] == "cpu" and head.get("cpu_pressure") is not None:  # a busy machine makes wall clocks long
        waited = float(head["cpu_pressure"])
        notes = [f"processes waited for a core in {waited:.0f} % of the ten seconds before the start"]
        if head["world"] > 1:
            notes.append("the other ranks computed while the first one measured alone")
    notes += head.get("unlike", [])
    if f"{NVLS}=0" in head.get("conditions", {}).get("environment", ""):
        notes.append(f"sums inside of NVSwitches were off ({NVLS}=0): a job that has them reduces faster inside a node")
    return Provenance(
        machine=f"{head['host']}: {head['cores']} cores, {units.format_bytes(float(head['memory']))} per device, {ranks}",
        device=str(head["name"]), driver=str(head["driver"]), versions=dict(head["versions"]),
        conditions=dict(head.get("conditions", {})),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), command=settings.command or "plan profile",
        timer="; ".join(f"{clock}: {CLOCKS[clock]}" for clock in clocks), spread=spread, drift=drift(journal),
        residuals=compute.residuals | fit_links.residuals(fit_links.curves(collectives)),
        cost={
            "seconds": round(seconds, 1), "points": len(journal), "outliers": sum(one.outliers for one in journal.of()),
            "left_out": left, "failed": len(journal.failed) - left,
        },
        notes=tuple(notes),
    )  # fmt: skip


def compute_findings(journal: Journal, base: HardwareProfile | None, device: str) -> Findings | None:
    """What the points of one rank say; None where no operator was measured. On a GPU with a library profile the facts of memory,
    launches and the host's link count alone; a CPU's figures are parts of what its operators reach."""
    rows = [one for one in journal.of() if one.point.family not in TOGETHER]
    if journal.of("gemm", "attention", "memory_bound"):
        return fit_compute(rows, base_of(device, rows, base), device)
    if not rows or base is None or device != "cuda":
        return None
    stands_on = base_of(device, rows, base)
    return findings(rows, stands_on, machine_keys(rows, stands_on, device))


def write_profile(settings: Settings, seconds: float) -> HardwareProfile:
    """Makes the profile of the journal, checks it as it will be read, and writes it. Raises PlannerError."""
    journal = Journal.read(settings.journal)
    name = settings.base or (detect.profile_of(str(journal.header["name"])) if settings.device == "cuda" else None)
    base = load_hardware(name) if name else None  # a CPU, or a device that the library does not know
    found = compute_findings(journal, base, settings.device)
    data = profile_data(journal, settings, found, base, seconds)
    path = Path(settings.output)
    profile = HardwareProfile.from_dict(data, where=path.name)
    title = f"# {profile.device}: measured by plan profile on {data['provenance']['date'][:10]}; see provenance.\n"
    library.write_whole(path, title + library.dump_yaml(data))
    return profile

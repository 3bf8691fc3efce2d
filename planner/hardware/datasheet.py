"""A profile from a datasheet alone: what it does not say comes from the nearest relative in the library, and is marked."""

import math
from collections.abc import Mapping
from typing import Any

from planner import library, units
from planner.hardware.relatives import FAMILIES
from planner.schema import Positive, check_keys, value_of

NEEDED = ("name", "peak_flops", "memory", "memory_bandwidth", "scale_up_bandwidth", "network_bandwidth", "sources")
"""Keys that are enough; ``vendor``, ``arch``, ``scale_up_domain`` and any other key of a profile make it better."""
CURVES = ("gemm", "attention", "memory_fraction", "scale_up", "scale_out", "measured", "curves_from")
FASTEST_PCIE = 150 * units.GIGA
"""A link that is faster joins a domain (NVLink, Infinity Fabric): PCIe 6 x16 carries 128 GB/s."""


def filled(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The data of a file without curves, completed from the relative in ``filled_from``, or the nearest one.

    Curves are relative to peak, bandwidth and link and follow those of the datasheet; figures such as launch times and host are
    the relative's, usable memory its share. Raises PlannerError when the datasheet says too little.
    """
    if any(key in data for key in CURVES):
        return data
    hint = (
        "; a file without curves is a datasheet, it needs at least these, and what else it lacks comes from a relative"
    )
    check_keys(data, data, where, required=NEEDED, hint=hint)
    linked = _linked(data, where)
    name = str(data["filled_from"]) if "filled_from" in data else _nearest(data, linked, where)
    relative = library.read_yaml(library.find("hardware", name))
    plain = {key: value for key, value in relative.items() if not isinstance(value, (dict, list))}
    own_memory, its_memory, its_usable = (
        units.parse(text, "bytes", what=f"{where}: memory")
        for text in (data["memory"], relative["memory"], relative["usable_memory"])
    )
    plain |= {"device": data["name"], "usable_memory": f"{own_memory * its_usable / its_memory!r} B"}
    if not linked:
        plain |= {"scale_up_domain": 1, "pcie_bandwidth": data["scale_up_bandwidth"]}
    taken = [key for key in plain if key not in data and key != "device"]
    families = dict.fromkeys(FAMILIES, name) if linked else {**dict.fromkeys(FAMILIES, name), "pcie": name}
    if not linked:
        del families["scale_up"]
    note = f"a datasheet: curves of {name} scaled by peak, bandwidth and link, and {len(taken)} figures of it that the sheet lacks"
    options: dict[str, Any] = {
        key: relative[key] for key in ("precise_accumulation", "block_scaling") if key in relative
    }
    marks = {"filled_from": name, "measured": dict.fromkeys(FAMILIES, f"scaled from {name}"), "curves_from": families}
    said = {"notes": [note, *data.get("notes", ())], "unverified": [*data.get("unverified", ()), *taken]}
    return {**options, **plain, **data, **marks, **said}


def _linked(data: Mapping[str, Any], where: str) -> bool:
    """Whether a link faster than PCIe joins the devices of a node."""
    if "scale_up_domain" in data:
        return bool(value_of(Positive, data["scale_up_domain"], where, "scale_up_domain") > 1)
    link = units.parse(data["scale_up_bandwidth"], "bytes/s", what=f"{where}: scale_up_bandwidth")
    return link > FASTEST_PCIE


def _nearest(data: Mapping[str, Any], linked: bool, where: str) -> str:
    """The most alike device with curves: same vendor, same link, same generation, then figures by their ratio (sum of |log2|)."""
    own = _figures(data, where)
    every = {name: library.read_yaml(library.find("hardware", name)) for name in library.names("hardware")}
    whole = {name: other for name, other in every.items() if any(key in other for key in CURVES)}

    def distance(name: str) -> float:
        other = whole[name]
        apart = 8.0 * (str(data.get("vendor", "")).lower() not in ("", str(other["vendor"]).lower()))
        apart += 4.0 * (linked != (other["scale_up_domain"] > 1))
        if "scale_up_domain" in data:
            apart += abs(math.log2(data["scale_up_domain"] / other["scale_up_domain"]))
        apart += 2.0 * (str(data.get("arch", "")).lower() != str(other["arch"]).lower())
        return apart + sum(abs(math.log2(mine / its)) for mine, its in zip(own, _figures(other, name), strict=True))

    return min(whole, key=distance)


def _figures(data: Mapping[str, Any], where: str) -> list[float]:
    """Half-precision peak, memory and its bandwidth: compute, capacity and kind of memory."""
    peaks = {
        str(dtype): units.parse(rate, "FLOP/s", what=f"{where}: peak_flops {dtype}")
        for dtype, rate in check_keys(data["peak_flops"], data["peak_flops"], f"{where}: peak_flops").items()
    }
    peak = peaks.get("bf16") or peaks.get("fp16") or max(peaks.values(), default=0.0)
    sizes = [units.parse(data[key], unit, what=f"{where}: {key}") for key, unit in _SIZES.items()]
    return [max(value, 1.0) for value in (peak, *sizes)]


_SIZES = {"memory": "bytes", "memory_bandwidth": "bytes/s"}

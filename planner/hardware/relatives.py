"""What a profile file does not hold comes from a relative: curves by ``curves_from``, of a datasheet all but its own figures."""

import math
from collections.abc import Mapping
from typing import Any

from planner import library, units
from planner.curves import COLLECTIVES, CollectiveCurve
from planner.errors import PlannerError
from planner.schema import Bandwidth, Bytes, FlopRate, Positive, check_keys, value_of

FAMILIES = ("gemm", "attention", "memory", "scale_up", "scale_out")
_KEYS_OF_FAMILY = {"gemm": ("gemm",), "attention": ("attention", "kernels"), "memory": ("memory_fraction",)}
NEEDED = ("name", "peak_flops", "memory", "memory_bandwidth", "scale_up_bandwidth", "network_bandwidth", "sources")
"""Keys that are enough; ``vendor``, ``arch``, ``scale_up_domain`` and any other key of a profile make it better."""
CURVES = ("gemm", "attention", "memory_fraction", "scale_up", "scale_out", "measured", "curves_from")
FASTEST_PCIE = 150 * units.GIGA
"""A link that is faster joins a domain (NVLink, Infinity Fabric): PCIe 6 x16 carries 128 GB/s."""


def with_relatives(data: Mapping[str, Any], where: str, family: str = "", depth: int = 0) -> Mapping[str, Any]:
    """Curves that the file does not hold, taken from the relative that ``curves_from`` names per family.

    GEMM, attention and memory curves are relative to peaks and follow by themselves; scale_up times are stretched by
    the ratio of the links; ``gemm_efficiency`` and ``attention_efficiency`` replace that of a recipe or a pass
    where the device's own best rate was measured, and ``achieved_bandwidth`` bounds that of kernels bound by memory.
    ``family`` limits the work to one family (for a relative).
    """
    if "curves_from" not in data:
        return data
    if depth > 4:
        raise PlannerError(f"{where}: curves_from goes round in a circle")
    data = dict(data)
    relatives = check_keys(data.pop("curves_from"), (*FAMILIES, "pcie"), f"{where}: curves_from")
    raw: dict[str, Mapping[str, Any]] = {}
    links: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for key, name in relatives.items():
        wanted = "scale_up" if key == "pcie" else key
        if family not in ("", wanted):
            continue
        if name not in raw:
            raw[name] = library.read_yaml(library.find("hardware", str(name)))
        relative = with_relatives(raw[name], f"{name}.yaml", wanted, depth + 1)
        if wanted == "scale_up":
            links[key] = f"{name}.yaml", relative
            continue
        if key == "attention" and data.get("vendor") != raw[name].get("vendor"):
            relative = _without_named_kernels(relative)
        for curve_key in _KEYS_OF_FAMILY.get(key, (key,)):
            data.setdefault(curve_key, relative.get(curve_key))
    if links and "scale_up" not in data:
        data["scale_up"] = _joined_scale_up(data, links, where)
    if "achieved_bandwidth" in data:
        data = _below_achieved(data, where)
    if family not in ("", "gemm", "attention"):
        return data
    for recipe, value in data.pop("gemm_efficiency", {}).items() if family != "attention" else ():
        data["gemm"] = dict(data["gemm"])
        data["gemm"][recipe] = {**data["gemm"][recipe], "efficiency": value}
    for pass_, value in data.pop("attention_efficiency", {}).items() if family != "gemm" else ():
        data["attention"] = [
            {**entry, "efficiency": [value] * len(entry["head_dims"])} if entry["pass"] == pass_ else entry
            for entry in data["attention"]
        ]
    return data


def _below_achieved(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parts of the memory bandwidth that kernels of the relative reach, none above what a plain copy was measured to reach here."""
    data = dict(data)
    reached = value_of(Bandwidth, data.pop("achieved_bandwidth"), where, "achieved_bandwidth")
    part = reached / value_of(Bandwidth, data["memory_bandwidth"], where, "memory_bandwidth")
    if "memory_fraction" in data:
        data["memory_fraction"] = {kind: min(float(one), part) for kind, one in data["memory_fraction"].items()}
    if "gemm" in data:
        key = "memory_efficiency"
        data["gemm"] = {name: {**curve, key: min(float(curve[key]), part)} for name, curve in data["gemm"].items()}
    return data


def _without_named_kernels(data: Mapping[str, Any]) -> dict[str, Any]:
    """Attention of a device of another vendor: the best kernel stands for the best there, those with a name do not run there."""
    curves = [entry for entry in data.get("attention", ()) if entry["kernel"] == "best"]
    return {**data, "attention": curves, "kernels": {}}


def _links(data: Mapping[str, Any], where: str) -> dict[str, float]:
    """Bandwidth of the scale-up link and of PCIe; a box without NVLink has PCIe for both."""
    keys = {"scale_up": "scale_up_bandwidth", "pcie": "pcie_bandwidth"}
    return {family: value_of(Bandwidth, data.get(key), where, key) for family, key in keys.items()}


def _joined_scale_up(
    data: Mapping[str, Any], relatives: Mapping[str, tuple[str, Mapping[str, Any]]], where: str
) -> dict[str, Any]:
    """Times per group size: the NVLink relative's up to the domain, the PCIe relative's beyond."""
    domain = value_of(Positive, data.get("scale_up_domain"), where, "scale_up_domain")
    joined: dict[str, Any] = {}
    for op in COLLECTIVES:
        rows: dict[int, Any] = {}
        first_size = "512 B"
        for family, link in _links(data, where).items():
            if family not in relatives:
                continue
            name, other = relatives[family]
            ratio = link / _links(other, name)["scale_up" if other.get("scale_up_domain", 1) > 1 else "pcie"]
            curve = CollectiveCurve.from_dict(op, other["scale_up"][op], f"{name}: scale_up {op}").with_link(ratio)
            plain = curve.to_dict()
            within = {n: row for n, row in plain["us"].items() if (n <= domain) == (family == "scale_up")}
            rows |= within or {n: row for n, row in plain["us"].items() if n not in rows}
            first_size = plain["first_size"]
        joined[op] = {"first_size": first_size, "us": dict(sorted(rows.items()))}
    return joined


def filled(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The data of a file without curves, completed from the relative in ``filled_from``, or the nearest one.

    Curves are relative to peak, bandwidth and link and follow those of the datasheet; figures such as launch times and host are
    the relative's, usable memory its share. Raises PlannerError when the datasheet says too little.
    """
    if any(key in data for key in CURVES):
        return data
    hint = "; a file without curves is a datasheet, it needs at least these, and what else it lacks comes from a relative"
    check_keys(data, data, where, required=NEEDED, hint=hint)
    linked = _linked(data, where)
    name = str(data["filled_from"]) if "filled_from" in data else _nearest(data, linked, where)
    relative = library.read_yaml(library.find("hardware", name))
    plain = {key: value for key, value in relative.items() if not isinstance(value, (dict, list))}
    sizes = (data["memory"], relative["memory"], relative["usable_memory"])
    own_memory, its_memory, its_usable = (value_of(Bytes, text, where, "memory") for text in sizes)
    plain |= {"device": data["name"], "usable_memory": f"{own_memory * its_usable / its_memory!r} B"}
    families = dict.fromkeys(FAMILIES, name)
    if not linked:
        plain |= {"scale_up_domain": 1, "pcie_bandwidth": data["scale_up_bandwidth"]}
        families["pcie"] = families.pop("scale_up")
    taken = [key for key in plain if key not in data and key != "device"]
    note = f"a datasheet: curves of {name} scaled by peak, bandwidth and link, and {len(taken)} figures of it that the sheet lacks"
    options = {key: value for key, value in relative.items() if key in ("precise_accumulation", "block_scaling")}
    marks = {"filled_from": name, "measured": dict.fromkeys(FAMILIES, f"scaled from {name}"), "curves_from": families}
    said = {"notes": [note, *data.get("notes", ())], "unverified": [*data.get("unverified", ()), *taken]}
    return {**options, **plain, **data, **marks, **said}


def _linked(data: Mapping[str, Any], where: str) -> bool:
    """Whether a link faster than PCIe joins the devices of a node."""
    if "scale_up_domain" in data:
        return bool(value_of(Positive, data["scale_up_domain"], where, "scale_up_domain") > 1)
    return bool(value_of(Bandwidth, data["scale_up_bandwidth"], where, "scale_up_bandwidth") > FASTEST_PCIE)


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
    peaks = value_of(dict[str, FlopRate], data["peak_flops"], where, "peak_flops")
    peak = peaks.get("bf16") or peaks.get("fp16") or max(peaks.values(), default=0.0)
    memory = value_of(Bytes, data["memory"], where, "memory")
    bandwidth = value_of(Bandwidth, data["memory_bandwidth"], where, "memory_bandwidth")
    return [max(value, 1.0) for value in (peak, memory, bandwidth)]

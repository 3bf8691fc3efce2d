"""Curves that a profile file does not hold: taken from the relative that ``curves_from`` names, scaled to its links."""

from collections.abc import Mapping
from typing import Any

from planner import library, units
from planner.curves import COLLECTIVES, CollectiveCurve
from planner.errors import PlannerError
from planner.schema import Positive, check_keys, value_of

FAMILIES = ("gemm", "attention", "memory", "scale_up", "scale_out")
_KEYS_OF_FAMILY = {"gemm": ("gemm",), "attention": ("attention", "kernels"), "memory": ("memory_fraction",)}


def with_relatives(data: Mapping[str, Any], where: str, family: str = "", depth: int = 0) -> Mapping[str, Any]:
    """Curves that the file does not hold, taken from the relative that ``curves_from`` names per family.

    GEMM, attention and memory curves are relative to peaks and follow by themselves; scale_up times are stretched by
    the ratio of the links; ``gemm_efficiency`` and ``attention_efficiency`` replace that of a recipe or a pass
    where the device's own best rate was measured. ``family`` limits the work to one family (for a relative).
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
        for curve_key in _KEYS_OF_FAMILY.get(key, (key,)):
            data.setdefault(curve_key, relative.get(curve_key))
    if links and "scale_up" not in data:
        data["scale_up"] = _joined_scale_up(data, links, where)
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


def _links(data: Mapping[str, Any], where: str) -> dict[str, float]:
    """Bandwidth of the scale-up link and of PCIe; a box without NVLink has PCIe for both."""
    keys = {"scale_up": "scale_up_bandwidth", "pcie": "pcie_bandwidth"}
    return {family: units.parse(data.get(key), "bytes/s", what=f"{where}: {key}") for family, key in keys.items()}


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

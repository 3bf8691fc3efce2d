"""Thin and fit raw measurement tables into ``profiles/hardware/*.yaml``.

\b
    python tools/build_hardware_profiles.py DIRECTORY [name ...]

DIRECTORY holds gemm.csv, attention.csv, membound.csv, moe_gemm.csv, collectives.csv, specs.yaml and sources.yaml: public
measurements, one row each, with a source code. The planner itself never needs them. Every fit is made on a random half
(seed 0) and scored on the other half, the errors are written with the constants, then it is repeated on all rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.curves import GemmCurve  # noqa: E402
from planner.lab.profile.fit_gemm import OPERAND  # noqa: E402
from planner.lab.profile.fitting import short  # noqa: E402
from planner.schema import read  # noqa: E402
from tools.hardware_fits import flash_attention_2  # noqa: E402
from tools.hardware_fits.attention import FLASH_ATTENTION_2, build_attention  # noqa: E402
from tools.hardware_fits.devices import (  # noqa: E402
    ACCUMULATE,
    AOTRITON,
    AOTRITON_SOURCE,
    ATTENTION_RATE,
    BEST_RATE,
    BLOCK_SCALING,
    COMMON_SOURCES,
    CUBLAS_NVFP4,
    CUBLAS_SOURCE,
    HOST,
    MEASURED,
    MEMORY,
    NETWORK,
    PCIE,
    PRECISE_ACCUMULATION,
    RELATED,
    SUSTAINED,
    kernels,
)  # fmt: skip
from tools.hardware_fits.links import build_scale_up, scaled_by_pair  # noqa: E402
from tools.hardware_fits.measured import RANDOM  # noqa: E402
from tools.hardware_fits.networks import build_networks  # noqa: E402
from tools.hardware_fits.products import (  # noqa: E402
    at_library_rate,
    fit_grouped_backward,
    fit_grouped_forward,
    fit_table,
    triple,
)  # fmt: skip
from tools.tables import Row, table  # noqa: E402

DEVICE_BUFFERS = {"communicator_memory": "0.6 GiB", "expert_communicator_memory": "1.2 GiB"}
HOST_BUFFERS = {"communicator_memory": "32 MiB", "expert_communicator_memory": "64 MiB"}
GEFORCE = ("rtx-3090", "rtx-4090", "rtx-5090")
"""Without peer access over PCIe and without GPUDirect: NCCL's buffers lie in host memory.  [NCCL, transport/shm.cc, net.cc]"""


def prices_of(spec: dict[str, Any]) -> list[dict[str, str]]:
    """Published prices; the middle of a range."""
    prices = []
    for entry in spec["price"]:
        value = str(entry["usd_per_gpu_hour"])
        ends = [float(x) for x in value.split("-")]
        kind = str(entry["kind"]) + (f" {value}, the middle" if len(ends) == 2 else "")
        price = f"{short(sum(ends) / len(ends))} USD/h"
        prices.append({"usd_per_hour": price, "kind": kind, "date": str(entry["date"]), "source": str(entry["source"])})
    return prices


def base_fields(name: str, device: str, spec: dict[str, Any], latency: str) -> dict[str, Any]:
    """Everything of a file but the curves."""
    nic, gpus, nic_note = NETWORK[name]
    pcie_text = str(spec["pcie"])
    generation = pcie_text[:4] if pcie_text[:3] == "Gen" else ""
    pcie = PCIE.get(generation, 225.0)  # NVLink-C2C: 450 GB/s one way per superchip of two GPUs
    domain = int(spec["scale_up"]["domain_gpus"])
    link = float(spec["scale_up"]["gbs_per_direction"]) if domain > 1 else pcie
    arch = str(spec["arch"])
    host_key = (
        "grace"
        if "Grace" in pcie_text
        else "box"
        if name.startswith("rtx-") and "pro" not in name
        else arch.split(" (")[0]
    )
    host_gib, host_bandwidth = HOST.get(host_key, (2048, 614.4))
    peaks = {k: v for k, v in spec["peak_dense_tflops"].items() if k in ("bf16", "fp16", "fp32", "tf32", "fp8", "fp4")}
    notes = [str(spec["note"])] if spec.get("note") else []
    notes += [
        f"network: {nic_note}",
        "host_memory and host_memory_bandwidth: a usual server of this generation, assumed; put in your own",
        "cpu_adam_bandwidth_fraction: 10e9 parameters in 2.57 s on 256 GB/s (ZeRO-Offload paper, CPU-Adam on DGX-2), from memory, not re-checked",
    ]
    if name == "mi250x":
        notes.append(
            "one rank is one GCD: everything here is half a package; 200 GB/s per direction to the GCD beside it, 50-100 to others"
        )
    unverified = [*map(str, spec.get("unverified", ())), "compute_units", "peak_flops.fp32", "pcie_bandwidth", "host_memory",
                  "host_memory_bandwidth", "cpu_adam_bandwidth_fraction"]  # fmt: skip
    half = 0.5 if name == "mi250x" else 1.0
    precise = {"precise_accumulation": PRECISE_ACCUMULATION[arch]} if arch in PRECISE_ACCUMULATION else {}
    if arch in BLOCK_SCALING:
        precise["block_scaling"] = BLOCK_SCALING[arch]
    return {
        "name": name, "device": device, "vendor": spec["vendor"], "arch": arch,
        "compute_units": int(spec["compute_units"] * half),
        "peak_flops": {k: f"{short(v * half, 6)} TFLOP/s" for k, v in peaks.items()},
        "memory": f"{spec['memory_gb'] * half:g} GB", "usable_memory": f"{spec['usable_gib'] * half:g} GiB",
        "memory_bandwidth": f"{spec['memory_bw_gbs'] * half:g} GB/s",
        "gpus_per_node": gpus, "scale_up_bandwidth": f"{50 if name == 'mi250x' else link:g} GB/s",
        "scale_up_domain": 8 if name == "mi250x" else domain,
        "network_bandwidth": f"{nic:g} Gb/s", "network_latency": latency, "pcie_bandwidth": f"{pcie:g} GB/s",
        "host_memory": f"{host_gib} GiB", "host_memory_bandwidth": f"{host_bandwidth:g} GB/s",
        "cpu_adam_bandwidth_fraction": 0.43, "sustained_clock": SUSTAINED.get("CDNA" if arch.startswith("CDNA") else arch, 0.95),
        **precise,
        "launch_floor": "2.5 us", "graph_launch_floor": "1.4 us", "tdp": f"{spec['tdp_w'] * half:g} W",
        "context_memory": "1.0 GiB", **(HOST_BUFFERS if name in GEFORCE else DEVICE_BUFFERS),
        "workspace_memory": "64 MiB", "prices": prices_of(spec), "unverified": list(dict.fromkeys(unverified)), "notes": notes,
    }  # fmt: skip


def source_text(codes: Iterable[str], sources: dict[str, Any]) -> dict[str, str]:
    """The source codes used, each as repository, commit, licence and trust (A raw table, B partly known, C indicative)."""
    result = {}
    for code in sorted(set(codes)):
        entry = sources[code]
        place = (
            f"{entry['repo']} @{entry['commit'][:7]}" if "commit" in entry else entry.get("repo", entry.get("doc", ""))
        )
        path = entry.get("path") or (entry.get("doc") if "repo" in entry else "") or ""
        result[code] = f"{place}{' ' + path if path else ''} ({entry['licence']}; trust {entry['trust']})"
    return result


def compact(data: Any) -> Any:
    """Lists of six numbers or more, and the rows of a grid, as one text: YAML reads that ten times faster."""
    if isinstance(data, dict):
        return {
            key: [" ".join(f"{x:g}" for x in row) for row in value] if key == "percent" else compact(value)
            for key, value in data.items()
        }
    if isinstance(data, list) and len(data) >= 6 and all(isinstance(x, (int, float)) for x in data):
        return " ".join(f"{x:.6g}" for x in data)
    return [compact(x) for x in data] if isinstance(data, list) else data


def write(name: str, data: dict[str, Any], directory: Path) -> None:
    """One file: leaf collections on one line each."""
    head = f"# {data['device']}: written by tools/build_hardware_profiles.py; every number with its source under sources.\n"

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    data = compact(data)
    text = yaml.dump(data, Dumper=Plain, sort_keys=False, default_flow_style=None, width=100000, allow_unicode=True)
    (directory / f"{name}.yaml").write_text(head + text, encoding="utf-8")
    print(f"{name}: {len(text) / 1024:.1f} kB")


def products_of(name: str, raw: dict[str, list[Row]], spec: dict[str, Any], grouped: dict[str, Any]) -> dict[str, Any]:
    """Constants of dense and grouped products of a device, by recipe."""
    device, memory, units = MEASURED[name], spec["memory_bw_gbs"] * 1e9, float(spec["compute_units"])
    gemm: dict[str, Any] = {}
    for recipe, (peak_name, _, _) in OPERAND.items():
        dtype = {"bf16": "bfloat16"}.get(recipe, recipe)
        rows = [r for r in raw["gemm"] if r["gpu"] == device and r["dtype"] == dtype and r["layout"] == "TN"
                and r["source"] in ("aic-trt", "aic-sgl")]  # fmt: skip
        if len(rows) < 500:
            continue
        peak = spec["peak_dense_tflops"][peak_name] * 1e12
        curve = fit_table(rows, recipe, peak, memory, units, spec["arch"] == "Ampere")
        forward = {"m": grouped["m"][0], "e": grouped["e"][0], "error": grouped["errors"]["grouped-fwd"], "rows": 0}
        moe_dtype = "bfloat16" if recipe == "bf16" else recipe
        moe_rows = [r for r in raw["moe_gemm"] if r["gpu"] == device and r["dtype"] == moe_dtype]
        if moe_rows and device != "A100-SXM-80GB":  # the A100 rows are an untuned Triton kernel
            forward = fit_grouped_forward(raw["moe_gemm"], device, curve, peak, memory)
        # Backward was measured on B200 only: its ratios to the forward carry over.
        ratio_m = [x / grouped["m"][0] for x in grouped["m"]]
        ratio_e = [x / grouped["e"][0] for x in grouped["e"]]
        curve = replace(
            curve,
            accumulate=ACCUMULATE,
            grouped_m0=triple(forward["m"] * x for x in ratio_m),
            grouped_efficiency=triple(min(forward["e"] * x, 1.0) for x in ratio_e),
            errors=curve.errors | {"grouped_forward_median_p90_percent": forward["error"],
                                   "grouped_rows": forward["rows"] or "B200 constants"},
        )  # fmt: skip
        if recipe == "nvfp4" and name in CUBLAS_NVFP4:
            shapes, seconds, clock = CUBLAS_NVFP4[name]
            factor = 1.0 if clock == "burst" else SUSTAINED[spec["arch"]]
            curve = at_library_rate(curve, read(GemmCurve, gemm["bf16"], name), shapes, seconds, factor, peak, memory)
        gemm[recipe] = plain_curve(curve)
    return gemm


def plain_curve(curve: GemmCurve) -> dict[str, Any]:
    """A curve as its file says it: few digits, units."""
    plain = curve.to_dict()
    for key in ("efficiency", "m0", "n0", "k0", "memory_efficiency", "quantise_traffic"):
        plain[key] = short(plain.get(key, 0.0))
    plain["launch"] = f"{short(curve.launch * 1e6)} us"
    if "grid" in plain:
        for axis in ("m", "n", "k"):
            plain["grid"][axis] = [int(x) for x in plain["grid"][axis]]
        plain["grid"]["percent"] = [[round(x) for x in row] for row in plain["grid"]["percent"]]
    return plain


def build_measured(name: str, raw: dict[str, list[dict[str, str]]], specs: dict[str, Any], sources: dict[str, Any],
                   networks: dict[str, tuple[str, dict[str, Any]]], grouped: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The file of a device with its own tables."""
    device = MEASURED[name]
    spec = specs[device]
    latency, scale_out = networks[name]
    data = base_fields(name, device, spec, latency)
    data["gemm"] = products_of(name, raw, spec, grouped)
    dtypes = ["bf16"] + (
        ["fp8"] if name in ("h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72", "gb300-nvl72", "b300-sxm") else []
    )
    data["attention"] = build_attention(raw["attention"], device, specs, dtypes)
    data["kernels"] = kernels(spec["arch"], name)
    data["memory_fraction"] = {op: value for op, (value, _) in MEMORY[name].items()}
    measured = {family: "measured" for family in ("gemm", "attention", "memory", "scale_up", "scale_out")}
    remarks: list[str] = []
    error = math.nan
    if name == "l40s":
        data["scale_up"], remarks, error = scaled_by_pair(raw["collectives"], device, MEASURED["rtx-pro-6000"])
        measured["scale_up"] = "scaled from rtx-pro-6000 by what two of each reach (beyond two its own table has PCIe P2P off)"
    else:
        data["scale_up"], remarks, error = build_scale_up(raw["collectives"], device)
    if name in ("l40s", "rtx-pro-6000", "h100-sxm", "a100-sxm-80gb"):
        measured["attention"] = {"h100-sxm": "forward measured, backward from h200-sxm (same compute)",
                                 "a100-sxm-80gb": "forward measured, backward from a100-pcie-80gb"}.get(
            name, "forward measured, backward scaled from rtx-4090")  # fmt: skip
    if name in ("l40s", "rtx-pro-6000"):
        measured["scale_out"] = "scaled from h100-sxm"
    if name == "h100-sxm":
        measured["scale_out"] = (
            "all_reduce measured at two and eight nodes, rings from h200-sxm, all_to_all from b200-sxm"
        )
        measured["memory"] = "part measured, part from a100, h100-pcie and h200"
    data["scale_out"] = scale_out
    data["measured"] = measured
    codes = {r["source"] for table_name in ("gemm", "attention", "collectives", "moe_gemm", "membound") for r in raw[table_name]
             if r["gpu"] == device}  # fmt: skip
    data["sources"] = {
        **COMMON_SOURCES,
        **({"fa2": flash_attention_2.SOURCE} if device in FLASH_ATTENTION_2 else {}),
        "memory_fraction": {op: text for op, (_, text) in MEMORY[name].items()},
        "scale_up": remarks
        + ([f"one time per octave; log-log between: median error below {error} percent"] if remarks else []),
        **({"gemm_nvfp4": CUBLAS_SOURCE} if name in CUBLAS_NVFP4 else {}),
        "gemm_passes": "accumulate: traffic of fp32 wgrad accumulation that is not hidden, B200 0.68, A100 PCIe 0.64 (simumax); others alike",
        "grouped": f"B200 grouped rows (simumax), errors {grouped['errors']}; forward of others: fused expert FFNs (aic-trt)",
        "tables": source_text(codes & set(sources), sources),
    }
    return data


def build_related(name: str, specs: dict[str, Any], networks: dict[str, tuple[str, dict[str, Any]]],
                  sources: dict[str, Any], raw: dict[str, list[dict[str, str]]]) -> dict[str, Any]:  # fmt: skip
    """The file of a device without its own tables: peaks of its own, curves of the nearest relative."""
    device, compute, link, pcie, network = RELATED[name]
    spec = dict(specs[device])
    if name == "h100-sxm-96gb":
        spec |= {"memory_gb": 96, "usable_gib": 94.5, "memory_bw_gbs": 2400, "tdp_w": 500, "price": [],
                 "note": "H100 variant with 96 GB of HBM2e at 500 W (Grand Teton); usable memory and bandwidth from general knowledge",
                 "unverified": ["memory", "usable_memory", "memory_bandwidth", "sustained_clock"]}  # fmt: skip
    latency = networks[network][0] if network in networks else networks.get(name, ("17.6 us", {}))[0]
    data = base_fields(name, device, spec, latency)
    if (
        spec["tdp_w"] < specs[device]["tdp_w"]
    ):  # power is f V^2 and V about f: a lower limit lowers the clock by its cube root
        share = (spec["tdp_w"] / specs[device]["tdp_w"]) ** (1 / 3)
        data["sustained_clock"] = round(data["sustained_clock"] * share, 3)
        data["notes"].append(f"sustained_clock: {share:.3f} of {device} (cube root of the ratio of the power limits)")
    families = {"gemm": compute, "attention": compute, "memory": compute}
    if link:
        families["scale_up"] = link
    if pcie:
        families["pcie"] = pcie
    if network:
        families["scale_out"] = network
    data["curves_from"] = families
    measured = {family: f"scaled from {relative}" for family, relative in families.items() if family != "pcie"}
    notes: dict[str, Any] = {}
    if "scale_up" not in measured:
        measured["scale_up"] = f"scaled from {pcie}"
    if name in BEST_RATE:
        rates, why = BEST_RATE[name]
        half = 0.5 if name == "mi250x" else 1.0
        reference = {"bf16": 1.0, "fp8": 1.0}
        own = {}
        for recipe, rate in rates.items():
            peak_key = recipe if recipe in spec["peak_dense_tflops"] else "fp16"
            own[recipe] = short(min(rate / (spec["peak_dense_tflops"][peak_key] * half) * reference[recipe], 1.0), 3)
        data["gemm_efficiency"] = own
        notes["gemm_efficiency"] = f"best measured shape {rates} TFLOP/s: {why}"
        measured["gemm"] += "; plateau measured"
    if name in ATTENTION_RATE:
        (forward, backward), why = ATTENTION_RATE[name]
        data["attention_efficiency"] = {"forward": forward, "backward": backward}
        notes["attention_efficiency"] = why
    if name in AOTRITON:
        data["kernels"] = {"slowdown": {"fa2": AOTRITON[name]}}
        notes["kernels"] = AOTRITON_SOURCE
    if name in ("mi300x", "mi355x"):
        if name == "mi300x":
            data["scale_up"], remarks, _ = build_scale_up(raw["collectives"], device)
            measured["scale_up"] = "all_reduce measured on 8; others derived"
            notes["scale_up"] = remarks
        if name in networks:
            data["scale_out"] = networks[name][1]
            measured["scale_out"] = "measured"
    if name == "mi250x":
        data["scale_out"] = networks[name][1]
        measured["scale_out"] = "constants of Slingshot-11 from Polaris (A100)"
    data["measured"] = measured
    codes = {
        r["source"] for table_name in raw for r in raw[table_name] if r["gpu"] == device and r["source"] in sources
    }
    data["sources"] = {**COMMON_SOURCES, **notes, "tables": source_text(codes, sources)}
    return data


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("only", metavar="[NAME]...", nargs=-1)
def main(directory: Path, only: tuple[str, ...]) -> None:
    """Build all files, or those named."""
    raw = {
        name: table(directory / f"{name}.csv") for name in ("gemm", "attention", "membound", "moe_gemm", "collectives")
    }
    specs = yaml.safe_load((directory / "specs.yaml").read_text(encoding="utf-8"))["gpus"]
    sources = yaml.safe_load((directory / "sources.yaml").read_text(encoding="utf-8"))
    target = ROOT / "profiles" / "hardware"
    target.mkdir(parents=True, exist_ok=True)
    networks = build_networks(raw["collectives"])
    b200 = specs["B200-SXM"]
    rows = [r for r in raw["gemm"] if r["gpu"] == "B200-SXM" and r["dtype"] == "bfloat16" and r["source"] == "aic-trt"]
    random_state = RANDOM.bit_generator.state
    curve = fit_table(rows, "bf16", 2250e12, 8000e9, float(b200["compute_units"]), False)
    grouped = fit_grouped_backward([r for r in raw["gemm"] if r["gpu"] == "B200-SXM"], curve, 2250e12, 8000e9)
    print("grouped", grouped)
    for name in MEASURED:
        if not only or name in only:
            RANDOM.bit_generator.state = random_state  # the same halves whichever files are asked for
            write(name, build_measured(name, raw, specs, sources, networks, grouped), target)
    for name in RELATED:
        if not only or name in only:
            write(name, build_related(name, specs, networks, sources, raw), target)


if __name__ == "__main__":
    main()

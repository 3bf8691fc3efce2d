"""Fit measured kernels of serving into ``profiles/decode/*.yaml``.

\b
    python tools/build_decode_curves.py DIRECTORY [device ...]

DIRECTORY holds decode/*.csv, hybrid/*.csv, moe_a2a.csv and sources.yaml: public measurements, one row each. The planner never needs
them. A kernel is a law of few positive numbers (``planner/serving/curves/kernel_laws.py``) and, where shapes differ beyond that, a mesh
of measured over law at a few nodes. Every fit is made on a random half first (seed 0) and scored on the other half; the errors are
written with the numbers, then it is repeated on all rows (``tools/decode_fits``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.hardware import HardwareProfile, load_hardware  # noqa: E402
from planner.serving.curves.decode_curves import ENGINES  # noqa: E402
from planner.serving.curves.kernel_tables import INDEX, Likeness  # noqa: E402
from tools.decode_fits.attention import decode_attention, decode_mla, sparse_prefill  # noqa: E402
from tools.decode_fits.linear_attention import linear_attention  # noqa: E402
from tools.decode_fits.measured import Rows  # noqa: E402
from tools.decode_fits.messages import all_reduce, exchange  # noqa: E402
from tools.decode_fits.products import experts, linear  # noqa: E402
from tools.tables import table  # noqa: E402

DATE = "2026-11-22"
"""Day the rows were read."""
HEADER = "# Devices of profiles/decode: arch, scale-up domain, bf16 peak, memory bandwidth; written by tools/build_decode_curves.py."
OUTPUT = ROOT / "profiles" / "decode"
PAGE = ROOT / "docs" / "serving-kernels.md"
MARKS = ("<!-- errors -->", "<!-- /errors -->")
TABLES = (
    "decode/gemm_decode", "decode/decode_attention", "decode/decode_mla", "decode/moe_decode", "decode/custom_allreduce",
    "decode/deepep_low_latency", "hybrid/gated_delta_net", "hybrid/kimi_delta_attention", "hybrid/sparse_attention_context",
    "moe_a2a",
)  # fmt: skip


def kernels_of(hardware: HardwareProfile, rows: dict[str, Rows]) -> dict[str, Any]:
    """Entries of every operator that was measured on a device."""
    kernels: dict[str, Any] = {"linear": linear(hardware, rows["decode/gemm_decode"])}
    kernels["decode_attention"], kernels["window"] = decode_attention(hardware, rows["decode/decode_attention"])
    kernels["decode_mla"] = decode_mla(hardware, rows["decode/decode_mla"])
    kernels["sparse_prefill"] = sparse_prefill(hardware, rows["hybrid/sparse_attention_context"])
    kernels["experts"] = experts(hardware, rows["decode/moe_decode"])
    thorough = [row for row in rows["moe_a2a"] if row["impl"] == "deepep-normal"]
    kernels["exchange"] = exchange(hardware, rows["decode/deepep_low_latency"], thorough)
    kernels["linear_update"], kernels["linear_scan"] = {}, {}
    for kind in ("gated_delta_net", "kimi_delta_attention"):
        updates, scans = linear_attention(hardware, rows[f"hybrid/{kind}"], kind)
        kernels["linear_update"] |= updates
        kernels["linear_scan"] |= scans
    return {operator: entries for operator, entries in kernels.items() if entries}


# ---------------------------------------------------------------------------------------------------- files


def flow(value: Any) -> str:
    """YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).splitlines()[0])


def written(data: dict[str, Any]) -> str:
    """YAML with one line per field of a kernel, and texts of numbers that load fast."""
    title = "written by tools/build_decode_curves.py; numbers of the laws in planner/serving/curves/kernel_laws.py."
    lines = [f"# {data['name']}: {title}", f"name: {data['name']}", f"source: {flow(data['source'])}", "kernels:"]
    for operator, entries in data["kernels"].items():
        lines.append(f"  {operator}:")
        for key, fields in entries.items():
            lines += [f"    {key}:", *(f"      {name}: {flow(value)}" for name, value in fields.items())]
    lines.append("all_reduce:")
    for key, fields in data["all_reduce"].items():
        lines += [f"  {key}:", *(f"    {name}: {flow(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def build(directory: Path, names: tuple[str, ...] = (), output: Path = OUTPUT) -> None:
    """Write the file of every device that was measured, or of those named, and the index of devices."""
    rows = {name: table(directory / f"{name}.csv") for name in TABLES}
    source = yaml.safe_load((directory / "sources.yaml").read_text(encoding="utf-8"))
    source = source.get("sources", source)["aic-012"]
    said = {**{key: source[key] for key in ("package", "licence", "trust")}, "date": DATE}
    devices = output.parent / INDEX
    index = yaml.safe_load(devices.read_text(encoding="utf-8")) if devices.exists() else {}
    for device in sorted({row["gpu"] for row in rows["decode/gemm_decode"]}):
        name = device.lower()
        if names and name not in names:
            continue
        own = {file: [row for row in of_file if row["gpu"] == device] for file, of_file in rows.items()}
        hardware = load_hardware(name)
        kernels, messages = kernels_of(hardware, own), all_reduce(own["decode/custom_allreduce"])
        data = {"name": name, "source": said, "kernels": kernels, "all_reduce": messages}
        (output / f"{name}.yaml").write_text(written(data), encoding="utf-8")
        index[name] = list(Likeness.of(hardware))
        print(name)
        for operator, entries in kernels.items():
            for key, fields in entries.items():
                print("  ", operator, key, fields["rows"], fields["errors"], fields["law"])
    lines = [f"{key}: {flow(row)}" for key, row in sorted(index.items())]
    devices.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- the page

SHOWN = {
    "bf16 products": ("linear", "bf16"), "fp8": ("linear", "fp8"), "nvfp4": ("linear", "nvfp4"),
    "attention, bf16 cache": ("decode_attention", "bf16 128"), "fp8 cache": ("decode_attention", "fp8 128"),
    "MLA": ("decode_mla", "bf16"), "experts, bf16": ("experts", "bf16"), "fp8 blocks": ("experts", "fp8_block"), "experts, nvfp4": ("experts", "nvfp4"),
}  # fmt: skip
"""Columns of the table of errors: operator and beginning of the key."""


def errors_table(folder: Path = OUTPUT) -> str:
    """Markdown: median / 90th percentile of the error on all rows, percent, by device and kernel; the first engine of ENGINES."""
    lines = ["| | " + " | ".join(SHOWN) + " |", "|---|" + "--:|" * len(SHOWN)]
    for path in sorted(folder.glob("*.yaml")):
        kernels = yaml.safe_load(path.read_text(encoding="utf-8"))["kernels"]
        cells = []
        for operator, start in SHOWN.values():
            names = (start, *(f"{start} {engine}" for engine in ENGINES))
            found = next((kernels[operator][one] for one in names if one in kernels.get(operator, {})), None)
            cells.append("-" if found is None else "{:.0f} / {:.0f}".format(*found["errors"]["all"]))
        lines.append(f"| {path.stem} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("devices", nargs=-1)
def main(directory: Path, devices: tuple[str, ...]) -> None:
    """The files of the devices, and the errors of all into the documentation."""
    build(directory, devices)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{errors_table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

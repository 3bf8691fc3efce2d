"""Files of hardware: sentences of broken ones, datasheets and their relatives, devices and links by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from planner import library
from planner.curves import least_factor
from planner.defaults import Request, resolve
from planner.detect import profile_of
from planner.errors import PlannerError, UnknownNameError
from planner.hardware import OVER, HardwareProfile, joined_by, load_hardware

NAMES = library.names("hardware")
PROFILES = {name: load_hardware(name) for name in NAMES}
H100 = PROFILES["h100-sxm"]


def broken(**changes: Any) -> dict[str, Any]:
    data = H100.to_dict()
    for key, value in changes.items():
        data[key] = value
    return data


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in H100.to_dict().items() if k != key}


def with_axis(nodes: list[float]) -> dict[str, Any]:
    data = H100.to_dict()
    data["gemm"]["bf16"]["grid"]["n"] = nodes
    return data


def faster_link() -> dict[str, Any]:
    data = H100.to_dict()
    row = data["scale_up"]["all_gather"]["us"][8]
    data["scale_up"]["all_gather"] = {"first_size": "512 B", "us": {8: [x / 2 for x in row]}}
    return data


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (broken(memory_bandwith="3 TB/s"), "f.yaml: unknown key 'memory_bandwith'; nearest: memory_bandwidth"),
        (without("tdp"), "f.yaml: missing key 'tdp'"),
        (broken(memory=80), "f.yaml: memory: '80' has no unit; write it like 79.6 GiB"),
        (broken(memory="80 GB/s"), "has the unit 'GB/s', which does not measure bytes"),
        (broken(memory="-80 GB"), "must be finite and not negative"),
        (broken(peak_flops={"bf16": 989.4}), "f.yaml: peak_flops bf16: '989.4' has no unit"),
        (broken(gpus_per_node=-8), "f.yaml: gpus_per_node is -8; it must be a number above 0"),
        (broken(sustained_clock="fast"), "f.yaml: sustained_clock is 'fast'; it must be a number above 0"),
        (
            broken(memory_fraction={**H100.memory_fraction, "copy": 1.2}),
            "memory_fraction copy is 1.20, faster than the memory",
        ),
        (
            broken(memory_fraction={**H100.memory_fraction, "coppy": 0.2}),
            "f.yaml: memory_fraction: unknown key 'coppy'; nearest: copy",
        ),
        (broken(gpus_per_node=0.5), "gpus_per_node is 0.5; it must be a whole number from 1"),
        (broken(scale_up_domain=8.5), "scale_up_domain is 8.5; it must be a whole number from 1"),
        (broken(usable_memory="96 GiB"), "usable_memory is larger than memory; check GB against GiB"),
        (faster_link(), r"scale_up all_gather on 8 GPUs moves .*/s at .*, above the link of 419.1 GiB/s"),
        (
            broken(gemm={"bf16": {**H100.gemm["bf16"].to_dict(), "efficiency": 1.3}}),
            "gemm bf16 runs at 1.30 of the peak",
        ),
        (
            broken(gemm={"bf16": {**H100.gemm["bf16"].to_dict(), "m0": -1}}),
            "f.yaml: gemm bf16: m0 is -1; it must be a number that is not negative",
        ),
        (
            broken(gemm={"bf16": {**H100.gemm["bf16"].to_dict(), "mo": 1}}),
            "f.yaml: gemm bf16: unknown key 'mo'; nearest: m0",
        ),
        (with_axis([64, 4096, 1024, 16384, 65536]), "f.yaml: gemm bf16: grid n: the nodes of an axis must increase"),
        (with_axis([64, 1024, 4096, 16384, 1e308]), "f.yaml: gemm bf16: grid n: the nodes of an axis must increase, to 1.07374e"),
        (
            broken(prices=[{"usd_per_hour": "2 USD/h", "kind": "x", "date": "2026"}]),
            "f.yaml: prices 1: missing key 'source'",
        ),
        (broken(link_shares={"[red]a": 0.3}), r"f.yaml: link_shares has '\[red\]a'; its keys must be numbers of GPUs"),
        (broken(link_shares={5337.69: 0.3}), "f.yaml: link_shares has 5337.69; its keys must be numbers of GPUs"),
        (broken(link_shares={0: 0.3}), "f.yaml: link_shares has 0; its keys"),
        (broken(link_shares={2: -1}), "f.yaml: link_shares: 2 is -1; it must be a number above 0"),
        (broken(gemm={"fp8": H100.gemm["fp8"].to_dict()}), "f.yaml: gemm has no curve of bf16"),
        (broken(attention=H100.to_dict()["attention"][:1]), "f.yaml: attention has no curve of the best bf16 kernel backward"),
        (broken(measured={"gemm": "measured"}), "f.yaml: measured does not say how attention is known"),
        (broken(kernels={"slowdown": {"fa2": 1.2}}), "f.yaml: kernels: slowdown fa2: expected a mapping"),
        (broken(kernels={"same_as_best": 3}), "f.yaml: kernels: same_as_best is 3; it must be a list"),
        (broken(curves_from={"gem": "h100-sxm"}), "f.yaml: curves_from: unknown key 'gem'; nearest: gemm"),
    ],
)
def test_broken_files(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        HardwareProfile.from_dict(data, where="f.yaml")


DATASHEET = {
    "name": "r100", "vendor": "NVIDIA", "arch": "Rubin", "peak_flops": {"bf16": "4000 TFLOP/s", "fp8": "8000 TFLOP/s"},
    "memory": "288 GB", "memory_bandwidth": "13 TB/s", "scale_up_bandwidth": "1800 GB/s", "scale_up_domain": 8,
    "network_bandwidth": "800 Gb/s", "sources": {"specs": "a made-up datasheet, 2026-03-16"},
}  # fmt: skip


def test_a_datasheet_is_enough(tmp_path: Path) -> None:
    """Ten lines make a profile; what they lack comes from the nearest relative, is marked, and is said with every plan."""
    file = tmp_path / "r100.yaml"
    file.write_text(library.dump_yaml(DATASHEET))
    mine = load_hardware(str(file))
    assert mine.filled_from == "b300-sxm" and mine.device == "r100"
    relative = load_hardware("b300-sxm")
    ratio = float(mine.gemm_time(8192, 8192, 8192) / relative.gemm_time(8192, 8192, 8192))
    assert ratio == pytest.approx(relative.peak_flops["bf16"] / mine.peak_flops["bf16"], rel=0.05), (
        "curves go by the peak"
    )
    assert mine.usable_memory / mine.memory == pytest.approx(relative.usable_memory / relative.memory)
    assert (
        mine.tdp == relative.tdp
        and {"tdp", "usable_memory"} <= set(mine.unverified)
        and "memory" not in mine.unverified
    )
    assert set(mine.measured.values()) == {"scaled from b300-sxm"}
    assert mine.notes[0].startswith("a datasheet: curves of b300-sxm scaled by peak, bandwidth and link")
    assert HardwareProfile.from_dict(mine.to_dict()).filled_from == "b300-sxm", "the mark stays in a whole file"
    said = resolve(Request(model="llama-8b", num_gpus=8, hardware=str(file))).assumptions
    assert any("a datasheet; curves of b300-sxm scaled by peak" in one.value for one in said)
    assert not any(
        "datasheet" in one.value
        for one in resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm")).assumptions
    )


@pytest.mark.parametrize(
    ("change", "relative"),
    [
        ({"filled_from": "h100-sxm"}, "h100-sxm"),
        ({"vendor": "AMD", "arch": "CDNA5", "scale_up_bandwidth": "600 GB/s"}, "mi355x"),
        ({"arch": "Ada", "peak_flops": {"bf16": "200 TFLOP/s"}, "memory": "32 GB", "memory_bandwidth": "900 GB/s",
          "scale_up_bandwidth": "32 GB/s", "scale_up_domain": 1}, "rtx-4090"),
        ({"arch": "Hopper", "peak_flops": {"bf16": "148 TFLOP/s", "fp8": "296 TFLOP/s"}, "memory": "96 GB",
          "memory_bandwidth": "4 TB/s", "scale_up_bandwidth": "450 GB/s"}, "h100-sxm"),
    ],
)  # fmt: skip
def test_the_nearest_relative(change: dict[str, Any], relative: str) -> None:
    found = HardwareProfile.from_dict(DATASHEET | change, where="sheet.yaml")
    assert found.filled_from == relative
    assert float(found.scale_up_time("all_gather", 1e8, 4)) >= 0.75e8 / found.scale_up_bandwidth


@pytest.mark.parametrize("name", [name for name in NAMES if not PROFILES[name].filled_from])
def test_every_device_of_the_library_from_its_datasheet(name: str) -> None:
    known = library.read_yaml(library.find("hardware", name))
    keys = (*DATASHEET, "gpus_per_node", *({"link_shares"} & set(known)))
    found = HardwareProfile.from_dict({key: known[key] for key in keys} | {"filled_from": name}, where=name)
    whole = load_hardware(name)
    assert found.sustained_flops("bf16") == whole.sustained_flops("bf16")
    assert found.memory_fraction == whole.memory_fraction and found.usable_memory == pytest.approx(whole.usable_memory)
    for op in whole.scale_up:
        assert float(found.scale_up_time(op, 1e8, 2)) == pytest.approx(float(whole.scale_up_time(op, 1e8, 2)), rel=0.02)


def test_a_datasheet_that_says_too_little() -> None:
    short = {key: value for key, value in DATASHEET.items() if key not in ("network_bandwidth", "sources")}
    with pytest.raises(
        PlannerError, match="missing keys 'network_bandwidth', 'sources'; a file without curves is a datasheet"
    ):
        HardwareProfile.from_dict(short, where="sheet.yaml")
    with pytest.raises(PlannerError, match="sheet.yaml: memory: '288' has no unit"):
        HardwareProfile.from_dict(DATASHEET | {"memory": 288}, where="sheet.yaml")


def test_network_faster_than_its_nics() -> None:
    data = H100.to_dict()
    data["scale_out"]["all_gather"]["bulk"]["efficiency"] = 1.2
    with pytest.raises(
        PlannerError,
        match="bulk: efficiency is 1.2; it must be a share of the line rate of the NICs, above 0 and at most 1",
    ):
        HardwareProfile.from_dict(data)


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA H20", "h20-sxm"), ("NVIDIA GH200 480GB", "gh200-96gb"), ("Tesla T4", "t4"), ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX A5000", "rtx-a5000"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("NVIDIA TITAN RTX", "titan-rtx"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"), ("AMD Instinct MI350X", "mi350x"), ("NVIDIA H200", "h200-sxm"),
        ("TPU v5p", None),
    ],
)  # fmt: skip
def test_devices_by_the_name_their_driver_gives_them(device: str, profile: str | None) -> None:
    assert profile_of(device) == profile


@pytest.mark.parametrize(("name", "nearest"), [("tpu-v5p", "h100-pcie"), ("TPU v6e", "h100-sxm"), ("trn2", "h100-sxm-96gb")])
def test_other_accelerators_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(PlannerError, match=f"{name}: TPUs and Trainium are not modelled.*is {nearest};"):
        load_hardware(name)


# The link, its domain and bandwidth in GB/s by hand: printed NVLink rates count both directions, PCIe 4.0 x16 carries 31.5.
LINKS = [
    ("rtx-3090", "pcie", 1, 31.5), ("rtx-3090", "PCIe 3.0 x8", 1, 7.875), ("rtx-3090", "NVLink bridge", 2, 56.24),
    ("a100-sxm-80gb", "NVLink3 400 GB/s", 8, 200.0), ("a100-pcie-80gb", "PCIe 4.0 x16", 1, 31.5),
    ("h100-sxm", "nvlink", 8, 450.0), ("h100-sxm", "200 GB/s", 8, 200.0), ("rtx-4090", "300 GB/s", 8, 300.0),
    ("rtx-4090", "PCIe 4.0 x8", 1, 15.75),
]  # fmt: skip


@pytest.mark.parametrize(("name", "link", "domain", "bandwidth"), LINKS)
def test_another_link_inside_a_node(name: str, link: str, domain: int, bandwidth: float) -> None:
    """Collectives keep below the link, follow it, and the name of the profile carries it."""
    before, found = load_hardware(name), load_hardware(f"{name}{OVER}{link}")
    assert (found.scale_up_domain, found.scale_up_bandwidth) == (domain, pytest.approx(bandwidth * 1e9))
    for op in ("all_gather", "all_reduce"):
        times = [float(one.scale_up_time(op, 1e9, 2)) for one in (before, found)]
        assert times[1] >= least_factor(op, 2) * 1e9 / found.scale_up_bandwidth
        links = [one.scale_up_bandwidth for one in (before, found)]
        assert (times[1] > times[0]) == (links[1] < links[0]) or links[0] == links[1]


@pytest.mark.parametrize(
    ("name", "link", "sentence"),
    [
        ("rtx-4090", "nvlink", "rtx-4090 has no NVLink; give its rate per GPU, like '300 GB/s'"),
        ("h100-sxm", "frob", "'frob' is not a quantity"),
        ("h100-sxm", "PCIe 9", "PCIe 9.0 is not known"),
        ("h100-sxm", "0 GB/s", "must be above zero"),
    ],
)
def test_a_link_that_cannot_be(name: str, link: str, sentence: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(sentence)):
        joined_by(load_hardware(name), link)


def test_few_gpus_of_a_cube_mesh_share_few_of_the_links() -> None:
    """A pair of a DGX-1 has 2 of the 6 links of a V100, a quad 4; all eight, and a node of four, have all."""
    mesh = load_hardware("v100-sxm2-32gb")
    quad = dataclasses.replace(mesh, scale_up_domain=4)
    for profile, n, share in ((mesh, 2, 0.333), (mesh, 4, 0.667), (mesh, 8, 1.0), (quad, 2, 0.333), (quad, 4, 1.0)):
        least = least_factor("all_reduce", n) * 1e9 / (share * 150e9)
        assert least <= float(profile.scale_up_time("all_reduce", 1e9, n)) <= 2.5 * least


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown hardware 'h101'; known, nearest first: h100-"):
        load_hardware("h101")
    with pytest.raises(UnknownNameError, match="unknown pass 'backward'"):
        H100.gemm_time(1, 1, 1, pass_="backward")
    with pytest.raises(UnknownNameError, match="unknown collective 'allreduce'; known, nearest first: all_reduce"):
        H100.scale_up_time("allreduce", 1, 2)
    with pytest.raises(UnknownNameError, match="unknown attention kernel of h100-sxm 'fa9'"):
        H100.attention_time(1, 1, 1, 128, 128, 128, kernel="fa9")
    with pytest.raises(UnknownNameError, match="unknown memory-bound operation 'norm'"):
        H100.memory_time(1, "norm")
    with pytest.raises(PlannerError, match="a100-sxm-80gb has no fp8 tensor cores; choose one of"):
        PROFILES["a100-sxm-80gb"].gemm_time(1, 1, 1, "fp8")


def test_a_circle_of_relatives_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "me.yaml"
    data = {k: v for k, v in H100.to_dict().items() if k != "gemm"} | {"curves_from": {"gemm": str(path)}}
    path.write_text(library.dump_yaml(data))
    with pytest.raises(PlannerError, match="goes round in a circle"):
        load_hardware(str(path))

"""``plan hardware show, diff, plot``; provenance; and profiles that no machine can be."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import library
from planner.errors import PlannerError
from planner.hardware import HardwareProfile, Provenance, load_hardware
from planner.questions.hardware.diff import differences
from planner.questions.hardware.numbers import figures
from planner.schema import read

H100 = load_hardware("h100-sxm")
MEASURED = {
    "machine": "node-7: 8 x H100", "device": "NVIDIA H100 80GB HBM3", "driver": "570.1", "versions": {"torch": "2.13.0"},
    "date": "2026-11-20T08:00:00Z", "command": "plan profile --output node-7.yaml", "timer": "device events",
    "spread": {"gemm": 0.5, "collective all_reduce": 1.5}, "cost": {"seconds": 590.0}, "notes": ["one point failed"],
}  # fmt: skip


def written(profile: HardwareProfile, path: Path) -> str:
    path.write_text(library.dump_yaml(profile.to_dict()))
    return str(path)


# ------------------------------------------------------------------------------------------------ provenance


def test_provenance_goes_to_the_file_and_back(tmp_path: Path) -> None:
    profile = replace(
        H100, provenance=read(Provenance, MEASURED, "mine"), measurements={"gemm": [{"m": 8, "us": 1.5}]}
    )
    again = load_hardware(written(profile, tmp_path / "mine.yaml"))
    assert again.provenance == profile.provenance and again.measurements == profile.measurements
    assert again.provenance is not None and again.provenance.to_dict() == MEASURED
    assert float(again.gemm_time(4096, 4096, 4096)) == pytest.approx(float(H100.gemm_time(4096, 4096, 4096)), 1e-9)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=150)
@given(
    st.sampled_from(sorted([*MEASURED, "colour"])),
    st.one_of(SCALARS, st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)),
)
def test_any_provenance_is_read_or_refused_in_a_sentence(key: str, value: Any) -> None:
    try:
        found = read(Provenance, {**MEASURED, key: value}, "mine: provenance")
    except PlannerError as error:
        assert str(error).startswith("mine: provenance") and "\n" not in str(error)
    else:
        assert read(Provenance, found.to_dict(), "again") == found


# ------------------------------------------------------------------------------------------------ impossible profiles


def grid_too_fast(data: dict[str, Any]) -> None:
    rows = data["gemm"]["bf16"]["grid"]["percent"]
    data["gemm"]["bf16"]["grid"]["percent"] = [[60.0] * len(row) for row in rows]


def set_at(*path: Any, to: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (grid_too_fast, r"gemm bf16 runs at 1\.\d\d of the peak of 989\.4 TFLOP/s at m \d+, n \d+, k \d+; it cannot pass 1"),
        (set_at("gemm", "bf16", "memory_efficiency", to=1.3), r"reads its operands at 1\.30 of the memory bandwidth; at most 1"),
        (set_at("gemm", "bf16", "grouped_efficiency", to=[1.2, 1.0, 1.0]), r"grouped products at 1\.20 of the rate"),
        (set_at("context_memory", to="90 GiB"), r"take 90\.66 GiB of 79\.2 GiB usable memory; nothing would be left"),
        (set_at("cpu_adam_bandwidth_fraction", to=1.4), r"is 1\.40, faster than the host's memory; at most 1"),
        (set_at("graph_launch_floor", to="9 us"), r"9 us is longer than launch_floor 2\.5 us"),
        (set_at("scale_out", "all_reduce", "two_nodes", to=2.5), r"all_reduce on two nodes reaches 2\.50 .* at most 1\.88"),
        (set_at("scale_out", "all_gather", "two_nodes", to=1.5), r"all_gather on two nodes reaches 1\.50 .* at most 1\.00"),
        (set_at("scale_up", "all_gather", "us", 8, to=[1.0] * 26), r"all_gather on 8 GPUs moves .* above the link of 419\.1 GiB/s"),
        (set_at("provenance", to={**MEASURED, "date": "yesterday"}), r"date 'yesterday' is not a day such as"),
        (set_at("provenance", to={"device": "x"}), r"missing keys 'machine', 'date', 'command'"),
    ],
)  # fmt: skip
def test_what_no_machine_can_be_is_refused_with_the_numbers(change: Any, sentence: str) -> None:
    data = copy.deepcopy(H100.to_dict())
    change(data)
    with pytest.raises(PlannerError, match=sentence) as caught:
        HardwareProfile.from_dict(data, where="mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")


# ------------------------------------------------------------------------------------------------ diff


def throttled() -> HardwareProfile:
    """One card at 0.9 of its rate, one link at half of its bandwidth."""
    curve = H100.scale_up["all_gather"]
    return replace(
        H100,
        gemm={name: replace(one, efficiency=0.9 * one.efficiency) for name, one in H100.gemm.items()},
        scale_up=H100.scale_up | {"all_gather": curve.with_link(0.5)},
    )


def test_a_throttled_card_and_a_slow_link_are_found_and_nothing_else() -> None:
    found, compared = differences(H100, throttled())
    assert compared == len(figures(H100)) > 90
    assert {one.family for one in found} == {
        "gemm",
        "scale_up",
        "scale_out",
    }  # across nodes too it goes through the link
    assert {one.name.split()[0] for one in found if one.family != "gemm"} == {"all_gather"}
    assert all(one.verdict == "slower" for one in found)
    big = next(one for one in found if one.name == "bf16 8192 x 8192 x 8192")
    assert -11.0 < big.percent < -8.0
    assert differences(H100, H100)[0] == []


def test_what_is_within_the_spread_is_chance() -> None:
    """gemm scatters by 9 and 12 percent: 15 together, more than the tenth that it lost; the link's half is not chance."""
    first = replace(H100, provenance=read(Provenance, {**MEASURED, "spread": {"gemm": 9.0}}, "a"))
    second = replace(throttled(), provenance=read(Provenance, {**MEASURED, "spread": {"gemm": 12.0}}, "b"))
    found, _ = differences(first, second)
    assert {one.family for one in found} == {"scale_up", "scale_out"}
    loose = {"spread": {"gemm": 20.0, "collective all_reduce": 90.0}}  # of another operation: it excuses nothing
    second = replace(throttled(), provenance=read(Provenance, {**MEASURED, **loose}, "b"))
    assert {one.name.split()[0] for one in differences(first, second)[0]} == {"all_gather"}


def test_what_a_profile_assumes_is_not_compared() -> None:
    one_node = replace(
        throttled(), provenance=read(Provenance, MEASURED, "b"), pcie_bandwidth=1e9, unverified=("pcie_bandwidth",),
        measured={**H100.measured, "scale_up": "assumed: one rank was measured", "scale_out": "assumed: one node"},
    )  # fmt: skip
    found, compared = differences(H100, one_node)
    assert {one.family for one in found} == {"gemm"} and compared < len(figures(H100))


# ------------------------------------------------------------------------------------------------ commands


def test_show_says_what_the_json_says(run: Any, tmp_path: Path) -> None:
    layer = {"hidden": 64, "ffn": 96, "heads": 4, "seq": 32, "batch": 2, "dtype": "fp32", "pass": "forward"}
    layer |= {"whole_us": 250.0, "operators_us": 225.0, "error_percent": -10.0}
    kept = {"layer": [layer], "gemm": [{"m": 8}, {"m": 9}]}
    profile = replace(H100, provenance=read(Provenance, MEASURED, "mine"), measurements=kept)
    path = written(profile, tmp_path / "mine.yaml")
    table, data = run("hardware", "show", path).output, json.loads(run("hardware", "show", path, "--json").output)
    assert len(data["figures"]) == len(figures(profile))
    for one in data["figures"]:
        assert one["name"] in table
    assert data["layers"] == [layer] and data["points"] == {"layer": 1, "gemm": 2}
    assert (
        "hidden 64, ffn 96, 2 x 32 tokens" in table and "225 us" in table and "-10.0 %" in table and "2 gemm" in table
    )
    assert "node-7: 8 x H100" in table and "one point failed" in table and data["provenance"] == MEASURED
    assert run("hardware", path).output == table  # the name alone shows it
    assert "h100-sxm" in run("hardware").output  # no name lists


def test_diff_command(run: Any, tmp_path: Path) -> None:
    slow = written(throttled(), tmp_path / "today.yaml")
    data = json.loads(run("hardware", "diff", "h100-sxm", slow, "--json").output)
    assert data["compared"] > 90 and all(one["verdict"] == "slower" for one in data["differences"])
    table = run("hardware", "diff", "h100-sxm", slow, "--all").output
    assert all(one["name"] in table for one in data["differences"])
    assert f"{len(data['differences'])} of {data['compared']} comparisons differ" in table
    assert "No difference beyond chance" in run("hardware", "diff", slow, slow).output


def test_plot_writes_a_picture_or_says_why_not(run: Any, tmp_path: Path) -> None:
    picture = tmp_path / "h100.png"
    assert run("hardware", "plot", "h100-sxm", "-o", str(picture)).exit_code == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 50_000
    result = run("hardware", "plot", "h100-sxm", "-o", str(tmp_path / "h100.xyz"))
    assert result.exit_code == 2 and "ends in .png, .svg or .pdf" in result.stderr
    result = run("hardware", "plot", "h100-sxm", "-o", str(tmp_path / "no" / "h100.png"))
    assert result.exit_code == 2 and "cannot be written" in result.stderr and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "words", [("shwo", "h100-sxm"), ("h100-sxn",), ("show", "h100-sxn"), ("diff", "h100-sxm", "none.yaml")]
)
def test_wrong_words_get_one_sentence(run: Any, words: tuple[str, ...]) -> None:
    result = run("hardware", *words)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1

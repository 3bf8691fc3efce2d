"""Collectives with real ranks: right values, honest times, and a sentence when a rank or link fails."""

from __future__ import annotations

import dataclasses
import os
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import profiler_ranks as ranks
from samples import job, legal_layouts, priced

from planner.hardware import ASSUMED, MeasuredOverlap
from planner.lab.profile.fit_links import fit_overlap
from planner.lab.profile.patterns import FORMS
from planner.lab.profile.points import Journal, Measured
from planner.schema import read


@pytest.mark.parametrize(("world", "operations"), [(2, 11), pytest.param(4, 11 + 11 + 9, marks=pytest.mark.proof)])
def test_every_operation_returns_right_data_and_a_time(world: int, operations: int) -> None:
    said = ranks.together(world, ranks.every_operation, (6000, 3000))
    assert set(said) == set(range(world)) and all(isinstance(one, dict) for one in said.values()), said
    found = said[0]
    assert len(found) == 2 * operations, sorted(found)
    for label, (median, bus, repetitions) in found.items():
        assert 0 < median < 5 and bus > 0 and repetitions >= 3, label
    assert all(one == found for one in said.values()), "every rank has the slowest rank's time"


@pytest.mark.proof
def test_groups_are_ended_before_a_node_has_too_many() -> None:
    """A pattern of pairs has two groups on a node of four, which is all that is allowed here beside the one that was used last."""
    said = ranks.together(4, ranks.few_communicators)
    formed, most, longest = said[0]
    assert formed[:4] == [[(2, 1)], [(2, 1), (2, 2)], [(2, 2), (4, 1)], [(2, 2), (4, 1)]]
    assert max(map(len, formed)) == 2 and len(formed) == 12, "three patterns, and ended ones are formed again"
    assert most == 3 and longest == 120.0, "the control group and two more; the first collective has a limit of its own"


def test_groups_are_bound_to_their_device_and_have_time_to_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL forms a communicator at once where its device is known, else a further one for each pair that sends; gloo has none."""
    import torch

    from planner.lab.profile import rank_groups

    asked: list[tuple[list[int], dict[str, Any]]] = []
    monkeypatch.setattr(rank_groups.dist, "new_group", lambda of, **how: (asked.append((of, how)), f"group of {of}")[1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    watch, place = SimpleNamespace(again=lambda _: None), SimpleNamespace(rank=3)
    parts: dict[str, Any] = {"place": place, "local": 4, "hosts": ["a"] * 4, "names": ["H100"] * 4, "watch": watch}
    made = rank_groups.Ranks(**parts, device="cuda", timeout=30.0).form([[0, 1], [2, 3]])
    assert made == "group of [2, 3]" and [of for of, _ in asked] == [[0, 1], [2, 3]], "all ranks walk through all groups"
    for _, how in asked:
        assert how["device_id"] == torch.device("cuda", 3) and how["backend"] == "nccl"
        assert how["timeout"].total_seconds() == 130.0, "more than the 30 s of a point"
    rank_groups.Ranks(**parts, device="cpu", timeout=300.0).form([[3]])
    assert asked[-1][1]["device_id"] is None and asked[-1][1]["timeout"].total_seconds() == 310.0


def test_sums_are_known_without_adding_ranks() -> None:
    import torch

    from planner.lab.profile.rank_groups import added, content

    index = torch.arange(40)
    for n in (2, 3, 8, 51, 200, 1024):
        one_by_one = sum((content(rank, index, n) for rank in range(1, n)), content(0, index, n))
        assert torch.equal(added(index, n), one_by_one), n


def test_wrong_data_is_a_failed_profile() -> None:
    said = ranks.together(2, ranks.wrong_data)
    for sentence in said.values():
        assert "all_reduce of 4 KiB fp32 in groups of 2 ranks returned wrong data on rank 1" in sentence
        assert "element 5 of 1024 is" in sentence and "the profile is void" in sentence


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("dies", "rank 2 ({host}) died during all_reduce of 64 KiB fp32 in groups of 3 ranks"),
        pytest.param(
            "leaves",
            "rank 2 ({host}) died during all_reduce of 64 KiB fp32 in groups of 3 ranks",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "hangs",
            "rank 2 ({host}) stopped answering for 2 s during all_reduce of 64 KiB fp32 in groups of 3 ranks",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "breaks",
            "rank 1 ({host}) failed at what follows all_reduce of 64 KiB fp32 in groups of 3 ranks: no room for 64 KiB",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_lost_rank_is_named_with_operation_and_size(how: str, what: str) -> None:
    said = ranks.together(3, ranks.loses_a_rank, how, stopped=int(how == "hangs"))
    sentences = [one for one in said.values() if one]
    assert sentences == [what.format(host=os.uname().nodename)]


@pytest.mark.proof
def test_ranks_leave_together_when_the_first_cannot_write(tmp_path: Path) -> None:
    """An agent of torchrun whose ranks left in order waits minutes for one whose rank did not."""
    said = ranks.together(2, ranks.cannot_finish, str(tmp_path / "mine.yaml"))
    assert said == {} and (tmp_path / "failure.txt").read_text() == "no room for the profile"
    assert not list(tmp_path.glob("done-*")) and (tmp_path / "mine.journal.json").is_file()


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.proof)])
@pytest.mark.parametrize("died", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_a_launcher_that_ends_the_ranks(died: bool, inside: bool) -> None:
    said = [one for one in ranks.together(3, ranks.is_terminated, died, inside).values() if one]
    gone = f"rank 2 ({os.uname().nodename}) died during a product of 8 x 8"
    assert said == [gone if died else "the launcher ended the run during a product of 8 x 8"]


@pytest.mark.proof
def test_ranks_that_do_not_come_are_named() -> None:
    said = ranks.together(3, ranks.comes_alone, missing=(1, 2))
    assert "2 of 3 ranks did not come within 1 s: rank 1, 2; look at their machines" in said[0]


@pytest.mark.proof
def test_overlap_has_both_directions() -> None:
    """And what this CPU says moves a predicted step as it should."""
    found = {label: Measured.from_dict(data) for label, data in ranks.together(2, ranks.beside)[0].items()}
    assert len(found) == 8
    for label, one in found.items():
        details = one.details
        assert details["slowdown"] == pytest.approx(one.median / details["alone"]) and details["spread"] >= 0, label
        assert 0.2 < details["slowdown"] < float("inf") and details["gemm"] in (
            64,
            96,
            128,
            192,
            256,
            384,
            512,
            768,
            1024,
        )
    measured, notes = fit_overlap(list(found.values()))
    assert measured or any("not used" in one for one in notes), "what cannot be is said"
    overlap = {link: read(MeasuredOverlap, data, "this CPU") for link, data in measured.items()}
    this, layouts = job(gpus=8), legal_layouts("gqa", "megatron", 8, 32, 100)
    before = priced(this, layouts).step_time
    hardware = dataclasses.replace(this.cluster.hardware, overlap=overlap)
    after = priced(
        dataclasses.replace(this, cluster=dataclasses.replace(this.cluster, hardware=hardware)), layouts
    ).step_time
    if overlap:
        slow = overlap["inside"].slowdown
        slower, faster = (
            all(sign * (float(one) - 1.2) >= 0 for one in (slow.compute, slow.communication)) for sign in (1, -1)
        )
        assert not slower or (after >= before * (1 - 1e-12)).all()
        assert not faster or (after <= before * (1 + 1e-12)).all()
        assert (after != before).any() or slow == ASSUMED


@pytest.mark.proof
def test_a_collective_that_the_library_lacks_is_left_out_with_its_reason(tmp_path: Path) -> None:
    output = tmp_path / "mine.yaml"
    said = ranks.together(2, ranks.lacks_an_operation, str(output))
    assert said == {0: "ended", 1: "ended"}, said
    journal = Journal.read(output.with_name("mine.journal.json"))
    assert {str(one.point["op"]) for one in journal.of("collective")} >= {"all_reduce", "all_gather", "send_recv"}
    lacking = [(point["op"], reason) for point, reason in journal.failed if "none such" in reason]
    assert lacking and {op for op, _ in lacking} == {"all_to_all"}
    assert "the library has none such: ProcessGroup does not support alltoall_base" in lacking[0][1]


def test_the_code_for_gpus_times_with_events() -> None:
    """Not on a GPU: the calls, their order and their units, with a stand-in for torch.cuda."""
    for found in ranks.together(2, ranks.as_on_a_gpu).values():
        assert set(found) == {"all_reduce", "send_recv"}, found
        for name, (median, clock) in found.items():
            assert clock == "cuda_events" and 1e-6 < median < 1.0, name


@pytest.mark.proof
def test_all_reduce_agrees_with_the_lecture_on_a_slow_link(slow_link: tuple[str, str]) -> None:
    """The link's bytes are what is timed there, so that a busy machine does not matter."""
    sizes = tuple(2**power for power in range(18, 22))
    said = ranks.together(2, ranks.both_timings, sizes, local=1, address="10.211.7.1", spaces=slow_link)
    assert isinstance(said.get(0), list), said
    off = statistics.median(abs(profiler / lecture - 1) for _, profiler, lecture in said[0])
    largest = max(profiler for _, profiler, _ in said[0])
    if off >= 0.10 and ranks.pressure() > 50:
        pytest.skip(f"off by {100 * off:.0f} %, but other processes want the cores ({ranks.pressure():.0f} % pressure)")
    assert off < 0.10, said[0]
    assert 0.8 * 12.5e6 < largest < 1.05 * 12.5e6, f"100 Mbit/s are 12.5 MB/s, measured {largest:.3g}"


@pytest.mark.proof
def test_forms_of_collectives_return_right_data_and_leave_nothing_behind() -> None:
    """In place: every element is compared before and after; without NVLS: a communicator formed without it and destroyed."""
    for found, formed, gone, left in ranks.together(2, ranks.forms).values():
        refused = found.pop("refused")
        assert {(form, op) for form, op, _ in found} == {
            (form, op) for form, ops in FORMS.items() if form != "graph" for op in ops
        }
        assert all(0.0 < seconds < 1.0 for seconds in found.values())
        without = sum(form == "no_nvls" for form, *_ in found)
        assert formed.count("^NVLS,NVLSTree") == gone == without == 6
        assert set(formed) == {None, "^NVLS,NVLSTree"} and not left
        assert "NCCL_NVLS_ENABLE=0 is set" in refused


@pytest.mark.proof
def test_all_reduce_agrees_with_the_lecture_on_the_loopback() -> None:
    if ranks.pressure() > 10:
        pytest.skip(f"other processes want the cores ({ranks.pressure():.0f} % pressure): wall times mean nothing now")
    said = ranks.together(2, ranks.both_timings, tuple(2**power for power in range(18, 23)))
    ratios = [profiler / lecture for _, profiler, lecture in said[0]]
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.25, said[0]

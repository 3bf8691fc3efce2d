"""What computation and collectives cost each other: the equation, the key of a profile, and what it does to a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import HARDWARE, job, legal_layouts, priced

from planner.cost.estimate import PARTS
from planner.cost.price.communication import exposed, slowdown_of
from planner.errors import PlannerError
from planner.hardware import ASSUMED, HardwareProfile, Slowdown
from planner.hardware.links import MeasuredOverlap
from planner.lab.profile.fit_links import fit_overlap
from planner.lab.profile.points import Measured, Point
from planner.questions.hardware.diff import differences
from planner.questions.hardware.numbers import shown_profile

H100 = HARDWARE["h100-sxm"]


def together(comm: float, window: float, compute: float, communication: float, steps: int = 20000) -> float:
    """Seconds that both take side by side, walked in small steps: each advances at 1 / slowdown while both run."""
    left, work, clock = comm, window, 0.0
    step = (comm + window) / steps
    while left > 1e-12 or work > 1e-12:
        both = left > 1e-12 and work > 1e-12
        left -= min(left, step / (communication if both else 1.0))
        work -= min(work, step / (compute if both else 1.0))
        clock += step
    return clock


@pytest.mark.parametrize(("compute", "communication"), [(1.2, 1.2), (1.5, 1.1), (1.05, 1.6), (1.0, 1.0), (1.0, 1.9)])
@pytest.mark.parametrize(("comm", "window"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_the_equation_is_two_rates_side_by_side(
    comm: float, window: float, compute: float, communication: float
) -> None:
    added = float(exposed(comm, window, slowdown=Slowdown(compute=compute, communication=communication)))
    assert added == pytest.approx(together(comm, window, compute, communication) - window, abs=2e-3)


times = st.floats(1e-6, 10.0)
ratios = st.floats(1.0, 6.0)


@settings(max_examples=300, deadline=None)
@given(
    times,
    times,
    st.floats(0.0, 1.0),
    ratios,
    ratios,
    st.floats(1.0, 3.0),
    st.sampled_from(["compute", "communication"]),
)
def test_more_slowdown_is_never_faster(
    comm: float, window: float, first: float, compute: float, communication: float, more: float, which: str
) -> None:
    before = {"compute": compute, "communication": communication}
    one = float(exposed(comm, window, first * comm, Slowdown(**before)))
    other = float(exposed(comm, window, first * comm, Slowdown(**{**before, which: more * before[which]})))
    assert 0.0 <= one <= other * (1 + 1e-12) + 1e-15 and other <= comm
    assert float(exposed(comm, window, 0.0, Slowdown(compute=compute, communication=compute))) == pytest.approx(
        min(comm, max(comm - window, 0.0) + (compute - 1.0) * min(comm, window)), rel=1e-12
    )


def with_overlap(**links: tuple[float, float]) -> HardwareProfile:
    found = {link: MeasuredOverlap(compute=a, communication=b) for link, (a, b) in links.items()}
    return replace(H100, overlap=found)


def test_each_link_has_its_own_and_each_direction_counts() -> None:
    """8 GPUs are one domain of NVLink: what is measured across nodes changes nothing there; 16 are two."""
    one, two = (replace(job(gpus=g, batch=32), trainer=job().trainer) for g in (8, 16))
    for this, across_counts in ((one, False), (two, True)):
        layouts = legal_layouts("gqa", "megatron", this.cluster.num_gpus, 32, 200)

        def step(hardware: HardwareProfile, this: Any = this, layouts: Any = layouts) -> Any:
            return priced(replace(this, cluster=replace(this.cluster, hardware=hardware)), layouts).step_time

        same, base = step(with_overlap(inside=(1.2, 1.2), across=(1.2, 1.2))), step(H100)
        assert np.array_equal(same, base), "absent is the stated constant, to the last bit"
        inside, across = step(with_overlap(inside=(1.5, 1.4))), step(with_overlap(across=(1.5, 1.4)))
        assert np.all(inside >= base * (1 - 1e-12)) and np.any(inside > 1.001 * base)
        assert np.all(across >= base * (1 - 1e-12)) and bool(np.any(across > 1.001 * base)) == across_counts
        assert np.any(step(with_overlap(inside=(1.0, 1.0))) < base)
        assert np.any(step(with_overlap(inside=(1.5, 1.2))) != step(with_overlap(inside=(1.2, 1.5))))
    parts = priced(replace(one, cluster=replace(one.cluster, hardware=with_overlap(inside=(1.0, 9.0)))), layouts)
    total = sum(parts.time[part] for part in PARTS)
    assert np.allclose(total, parts.step_time) and all(np.all(value >= 0) for value in parts.hidden.values())
    assert slowdown_of(one.cluster, 8, 1) is ASSUMED


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"inside": {"compute": 0.9, "communication": 1.1, "compute_spread": 3.0}},
         r"computation during a collective takes 0\.90 times as long as alone, and its spread is 3\.0 %; nothing gets faster"),
        ({"across": {"compute": 1.1, "communication": 40.0}},
         r"a collective during computation takes 40\.00 times as long as alone, which is waiting, not sharing; at most 16"),
        ({"inside": {"compute": 1.1}}, r"overlap inside: missing key 'communication'"),
        ({"insid": {}}, r"overlap: unknown key 'insid'; nearest: inside"),
        ({"inside": {"compute": "fast", "communication": 1.1}}, r"overlap inside: compute is 'fast'; it must be a number above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(data: Any, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        HardwareProfile.from_dict({**H100.to_dict(), "overlap": data}, where="mine.yaml")


def test_file_show_and_diff() -> None:
    key = {"inside": {"compute": 0.98, "communication": 1.3, "compute_spread": 4.0}}
    mine = HardwareProfile.from_dict({**H100.to_dict(), "overlap": key}, where="mine.yaml")
    assert mine.to_dict()["overlap"] == key and mine.overlap["inside"].slowdown == Slowdown(
        compute=1.0, communication=1.3
    )
    assert "overlap" not in H100.to_dict()
    shown = {one["name"]: one["value"] for one in shown_profile(mine)["figures"] if one["family"] == "overlap"}
    assert shown == {"computation during a collective, inside": 0.98, "a collective during computation, inside": 1.3}
    assert "assumed: 1.2 both ways" in shown_profile(H100)["measured"]["overlap"]
    worse = replace(mine, overlap={"inside": MeasuredOverlap(compute=1.4, communication=1.3)})
    assert [(one.name, one.verdict) for one in differences(mine, worse)[0]] == [
        ("computation during a collective, inside", "slower")
    ]
    assert differences(H100, mine)[0] == [], "what one of them assumes is not compared"


def pair(op: str, of: str, nodes: int, slowdown: float) -> Measured:
    point = Point.of("overlap", op=op, of=of, n=2, stride=1, size=2**20, dtype="fp32", per_node=2, nodes=nodes)
    return Measured(
        point=point, median=1e-3, low=0.99e-3, high=1.01e-3, repetitions=11, details={"slowdown": slowdown}
    )


def test_the_median_over_collectives_by_link_and_direction() -> None:
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    rows = [pair(op, "gemm", 1, s) for op, s in zip(ops, (1.1, 1.3, 1.2), strict=True)]
    rows += [pair(op, "collective", 1, s) for op, s in zip(ops, (1.4, 1.4, 1.4), strict=True)]
    found, notes = fit_overlap(rows)
    assert notes == [] and found == {
        "inside": {"compute": 1.2, "communication": 1.4, "compute_spread": 8.33, "communication_spread": 1.0}
    }
    slow = [pair("all_reduce", "gemm", 2, 30.0), pair("all_reduce", "collective", 2, 1.2)]
    found, notes = fit_overlap([*rows, *slow])
    assert set(found) == {"inside"} and notes == [
        "overlap across: compute takes 30.00 times as long, which is waiting, not sharing; at most 16; not used"
    ]
    vague = [*rows[:3], *(pair(op, "collective", 1, s) for op, s in zip(ops, (1.1, 4.5, 2.0), strict=True))]
    found, [said] = fit_overlap(vague)
    assert found == {} and said.endswith("% only; not used"), "what is not known is not planned with"
    assert fit_overlap(rows[:3]) == ({}, []), "one direction alone says nothing of the other"

"""A run on a CPU is priced as it ran: chains of kernels, the host's work, a core slower than the profile's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fresh import fresh
from validate_samples import entry, needs_torch, plan_file, task

from planner.cost.layer.eager_kernels import UNCOMPILED
from planner.lab.run.eager_pricing import UPDATED, as_run, priced_host, processor_seconds, update_seconds
from planner.lab.run.full_result import result
from planner.lab.run.levels import question
from planner.plan_file import load_plan
from planner.rules import Job
from planner.timeline.priced_plan import price

CHAINS = """
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from planner.lab.reference import fused_operators as o

rows, columns, heads = 256, 128, 4

class Count(TorchDispatchMode):
    # Bytes of the tensors that each kernel reads and writes, and kernels; views are none
    def __init__(self):
        super().__init__()
        self.bytes, self.kernels = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if any(one.alias_info and not one.alias_info.is_write for one in function._schema.returns):
            return out
        self.kernels += 1
        every = [one for one in tree_leaves((arguments, named, out)) if isinstance(one, torch.Tensor)]
        if "scatter" not in str(function):  # it touches one entry of each row
            self.bytes += sum(one.numel() * one.element_size() for one in every if one.numel() * heads >= rows * columns)
        return out

for dtype in (torch.float32, torch.bfloat16):
    x, up, gradient = (torch.randn(rows, columns).to(dtype) for _ in range(3))
    weight, scale, targets = torch.randn(columns), torch.randn(rows, 1), torch.randint(columns, (rows,))
    q, table = torch.randn(1, rows, heads, columns // heads).to(dtype), torch.randn(1, rows, 1, columns // heads // 2)
    back = -table
    chains = {
        "norm": [[lambda: o._rms_norm(x, weight, 1e-6)], [lambda: o._rms_norm_backward(gradient, x, weight, scale)]],
        "swiglu": [[lambda: o._swiglu(x, up)], [lambda: o._swiglu_backward(gradient, x, up)]],
        "rope": [[lambda: o._rotate(q, table, table)], [lambda: o._rotate(q, table, back)]],
        "cross_entropy": [
            [lambda: o._largest_logit(x), lambda: o._sum_of_exponentials(x, scale[:, 0])],
            [lambda: o._loss_gradient(x, scale[:, 0], targets, torch.tensor(0.5))],
        ],
    }
    for name, passes in chains.items():
        for number, functions in enumerate(passes):
            with Count() as count:
                for function in functions:
                    function()
            print(json.dumps([name, number, dtype == torch.bfloat16, count.bytes / rows / columns, count.kernels]))
"""


@needs_torch
def test_chains_are_counted_as_torch_runs_them() -> None:
    """cost.uncompiled by a dispatch mode that sees every kernel: its tensors' bytes, and how many there are."""
    rows = [json.loads(line) for line in fresh(CHAINS).splitlines()]
    assert len(rows) == 2 * 2 * 4 and {row[0] for row in rows} == set(UNCOMPILED)
    for name, backward, half, moved, kernels in rows:
        series, twice, element = UNCOMPILED[name], 2.0 if name == "rope" else 1.0, 2.0 if half else 4.0  # q and k
        pass_ = series.backward if backward else series.forward
        assert moved == pytest.approx(pass_.bytes(element), rel=1e-9), (name, backward, half)
        launches = series.launches[bool(backward)][not half]
        assert twice * kernels == pytest.approx(launches, abs=4 if name == "cross_entropy" else 0), name


def test_host_and_update_by_hand(tmp_path: Path) -> None:
    """Two layers on each stage: a host that takes what its launches are priced at adds nothing, 1 ms more of a layer adds 2 ms;
    the norm of the gradient moves 12 bytes per parameter."""
    asked = question(load_plan(plan_file(tmp_path)))
    trainer = as_run(asked.trainer, asked.split, on_cpu=True)
    priced = price(Job(workload=asked.workload, cluster=asked.cluster, trainer=trainer), asked.layout)
    bare, none = processor_seconds(priced, asked.split, None), priced_host(priced.job, asked.layout, asked.split)
    same = processor_seconds(priced, asked.split, none)
    assert all(same[kind] == pytest.approx(bare[kind]) for kind in "FB")
    more = {kind: (each + 1e-3, ends + 4e-4) for kind, (each, ends) in none.items()}
    slower = processor_seconds(priced, asked.split, more)
    assert all(slower[kind] - bare[kind] == pytest.approx([2.2e-3, 2.2e-3]) for kind in "FB")  # half of the ends each

    h, f, vocabulary, hardware = 128, 256, 512, asked.cluster.hardware
    rate = hardware.memory_bandwidth
    layer, embedding = 2 * h * h + 2 * h * 64 + 3 * h * f + 2 * h, vocabulary * h
    clip = [
        12 * (2 * layer + more) / (rate * hardware.memory_fraction["elementwise"])
        for more in (embedding, embedding + h)
    ]
    adam = priced.shared.optimizer[[0, 2], 0]
    bare, more = (update_seconds(priced, asked.split, host) for host in (None, {UPDATED: (1e-3, 1e-3)}))
    assert bare[[0, 2]] == pytest.approx(adam + clip)  # first and last: the last has the head and its norm
    assert more[[0, 2]] == pytest.approx(adam + clip + 2.5e-3)
    assert bare[1] <= min(bare) and more[1] <= min(more)  # two stages have no middle


@needs_torch
def test_a_slower_core_is_brought_to_the_rate_of_the_profile() -> None:
    """Passes by the product's yardstick, the update by that of memory; what waits is not touched. Halves of a backward pass are
    one."""
    from planner.lab.run.clock import Timed
    from planner.lab.run.full_rank import summary
    from planner.lab.run.rate import Slowed

    timed = [
        Timed(kind=kind, stage=stage, microbatch=number, seconds=2.0 * busy, thread=busy)
        for kind, stage, number, busy in [
            ("F", 1, 0, 0.016), ("F", 1, 1, 0.032), ("I", 1, 0, 0.008), ("W", 1, 0, 0.024), ("optimizer", -1, -1, 0.010),
            ("passes", -1, -1, 0.1), ("step", -1, -1, 0.1),
        ]
    ]  # fmt: skip
    found = summary(timed, Slowed(passes=1.6, update=1.25))
    assert found["actions"] == [
        {"stage": 1, "kind": "B", "total": [0.064, pytest.approx(0.02)], "median": [0.064, pytest.approx(0.02)]},
        {"stage": 1, "kind": "F", "total": [0.096, pytest.approx(0.03)], "median": [0.048, pytest.approx(0.015)]},
        {"stage": 1, "kind": "W", "total": [0.048, pytest.approx(0.015)], "median": [0.048, pytest.approx(0.015)]},
    ]
    assert found["optimizer"] == [0.02, 0.008] and found["step"][0] == 0.2
    assert found["waited"] == pytest.approx(0.08) and (found["slowed"], found["update_slowed"]) == (1.6, 1.25)
    assert "slowed" not in summary(timed, None)


def test_what_the_profile_lacks_is_said(tmp_path: Path) -> None:
    found = result(task(plan_file(tmp_path)), [entry(rank, 0.3) for rank in (0, 1)], None)
    assert any("its own error is not known" in one for one in found["as_run"]["sentences"])

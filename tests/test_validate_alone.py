"""A rank alone does what it does among others: emulated collectives, kernels, times brought to a rate."""

from __future__ import annotations

import importlib.util
import json

import pytest
from fresh import fresh

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)


ALONE = """
import dataclasses, json
import torch
from functools import partial
from planner.lab.run import emulate
from tests.proofs import parity
from tests.proofs.forked_ranks import run_ranks
from planner.lab.run.training import Run
from planner.lab.run.meta import measure_ranks
from planner.lab.run.workers import Manner, measure_all

small = parity.tiny(hidden_size=128, ffn_size=352, vocab_size=1024, head_dim=32)
fields = {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4, "recompute": "full"}
split = dataclasses.replace(parity.combination("llama", **fields), model=small, sequence_length=128, precision="fp32")

def shapes(run):
    local = lambda p: p.to_local() if hasattr(p, "to_local") else p
    return {name: list(local(p).shape) for part in run.parts for name, p in part.named_parameters()}

def of_rank(split):
    return shapes(Run(split, torch.device("cpu")).allocate(fill=False))

def alone(split, rank, say):
    seen = {}
    timed = emulate.LoneRank.time
    def kept(self, run):
        seen["shapes"] = shapes(run.run)
        timed(self, run)
        infos = [i for one in run.run.stages for every in (one.args_recv_info, one.grad_recv_info) for i in every.values()]
        buffers = [info.buffer for some in infos for info in some if info.buffer is not None]
        seen["buffers"] = [[int((one.abs() < 1e-30).sum()), float(one.std()), bool(one.isfinite().all())] for one in buffers]
    emulate.LoneRank.time = kept
    kept = {"product": 1e-3, "stream": 2e-3}
    found = emulate.emulate(emulate.Alone(device="cpu", warmup=1, steps=2, yardsticks=kept, host=True), split, rank, say)
    return found, seen

every = run_ranks(of_rank, split.world, split)
ranks = [6]
fake = measure_ranks(split, ranks)
real = measure_all([(rank, split) for rank in ranks], Manner(work=alone, at_once=1, fork=True, where="alone"))
for rank, one, (found, seen) in zip(ranks, fake, real):
    collectives = {}
    for row in one.collectives:
        collectives[row["operation"]] = collectives.get(row["operation"], 0) + row["times"]
    whole = found.seen()
    passes = sum(seconds for (name, _), seconds in whole.passes.items() if name != "W")
    print("FOUND", json.dumps({
        "shapes": [seen["shapes"], every[rank]], "peak": [one.most.total, found.memory.most.total],
        "parts": [one.most.parts, found.memory.most.parts], "parameters": [one.parameters, found.memory.parameters],
        "collectives": [one.collectives == found.memory.collectives, collectives,
                        {row["operation"]: row["times"] for row in found.stand_ins}],
        "buffers": seen["buffers"], "stage": found.stage,
        "samples": {f"{k} {s}": len(v) for (k, s), v in found.samples.items()},
        "sum": [found.microbatches * passes + whole.once, sorted(found.totals)],
        "stand_in_seconds": [row["seconds"] for row in found.stand_ins],
        "host": found.host, "slowed": [found.slowed, found.update_slowed],
    }))
"""


@pytest.mark.proof
@needs_torch
def test_a_rank_alone_is_the_rank_among_others() -> None:
    """tp 2 x pp 2 x dp 2: shards of a real job, memory of fake tensors, neighbours' buffers sane, times without local copies."""
    lines = [json.loads(line.removeprefix("FOUND")) for line in fresh(ALONE).splitlines() if line.startswith("FOUND")]
    assert [one["stage"] for one in lines] == [1]
    for one in lines:
        alone, among = one["shapes"]
        assert alone == among and len(alone) == 19 + one["stage"]  # 9 in each of 2 layers; embedding, or norm and head
        fake, real = one["peak"]
        assert abs(fake - real) < 0.03 * 2**20 and real > 2 * 2**20
        assert one["parts"][0] == one["parts"][1] and one["parameters"][0] == one["parameters"][1]
        same, issued, replaced = one["collectives"]
        assert same and issued == replaced
        assert len(one["buffers"]) == 3  # microbatches, activations of the stage before
        for odd, deviation, finite in one["buffers"]:
            assert odd == 0 and finite and 0.5 < deviation < 2.0
        assert set(one["samples"].values()) == {6}  # three microbatches were enough, two steps
        total, (low, high) = one["sum"]
        assert low <= total <= high and total > 0
        assert all(seconds >= 0 for seconds in one["stand_in_seconds"]) and sum(one["stand_in_seconds"]) > 0
        assert one["host"]["F"][0] > 100e-6 and one["host"]["B"][0] > 100e-6, "DTensor's calls from Python"
        assert all(len(every) == 2 and min(every) > 0 for every in one["slowed"])


@needs_torch
def test_times_of_a_rank_are_brought_to_the_rate_of_the_profile() -> None:
    """A core half as quick, memory at 0.8: passes halved, the update by its own yardstick; halves of a backward pass
    joined. Nothing is touched where the profile has no yardstick."""
    from planner.lab.run import emulate
    from planner.lab.run.clock import Timed
    from planner.lab.run.rate import Slowed
    from tests.proofs.parity import combination

    spans = {("F", 0, 0): 0.02, ("I", 0, 0): 0.02, ("W", 0, 0): 0.01, ("passes", -1, -1): 0.07, ("clip", -1, -1): 0.01,
             ("optimizer", -1, -1): 0.04, ("step", -1, -1): 0.2}  # fmt: skip

    timed = [
        Timed(kind=kind, stage=stage, microbatch=number, seconds=9.0, thread=t) for (kind, stage, number), t in spans.items()
    ]
    split = combination("llama", pp=2, num_microbatches=4)
    for slowed, by, update in ((Slowed(passes=2.0, update=1.25), 2.0, 1.25), (None, 1.0, 1.0)):
        lone = emulate.LoneRank(emulate.Alone(device="cpu", warmup=0, steps=1), split, 0, lambda *_: None)
        lone.starts.append(0)
        lone.took(timed, slowed)
        found = lone.found
        assert found.samples == {
            ("F", 0): [0.02 / by], ("B", 0): [pytest.approx(0.03 / by)], ("W", 0): [0.01 / by],
        }  # fmt: skip
        assert found.totals == [pytest.approx(0.07 / by)]
        assert found.updates == [pytest.approx(0.05 / update)]
        assert (found.slowed, found.update_slowed) == (([2.0], [1.25]) if slowed else ([], []))


STANDS = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from planner.lab.run.fake_collectives import FakeCollectives, seconds_of

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
x = torch.arange(1.0, 9.0)
with FakeCollectives(torch.device("cpu")) as stands:
    out = torch.zeros(32)
    dist.all_gather_into_tensor(out, x)
    assert torch.equal(out, x.repeat(4))
    gathered = functional.wait_tensor(functional.all_gather_single(x, 0, dist.group.WORLD)) if hasattr(
        functional, "all_gather_single") else functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))
    assert torch.equal(gathered, x.repeat(4))
    mine = torch.zeros(2)
    dist.reduce_scatter_tensor(mine, x)
    assert torch.equal(mine, x.view(4, 2).sum(0))
    kept = x.clone()
    dist.all_reduce(kept)
    dist.broadcast(kept, 0)
    assert torch.equal(kept, x)
    got = functional.wait_tensor(functional.all_to_all_single(x, [1, 2, 3, 6], [2, 2, 2, 2], dist.group.WORLD))
    assert torch.equal(got, torch.cat([x, x[:4]]))
    for kind in (torch.float32, torch.bfloat16):
        buffer = torch.full(((3 << 20) + 1,), 1e-40).to(kind)
        dist.recv(buffer, 0)
        assert not bool((buffer.abs() < 1e-30).any()) and 0.9 < float(buffer.float().std()) < 1.1
    dist.send(buffer, 0)
    names = [one[0] for one in stands.log]
    after = ["receive", "receive", "send"]
    assert names == ["all_gather", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", *after], names
    assert [one[1] for one in stands.log[:6]] == [128, 128, 32, 32, 32, 48]
    times = [one[2] for one in stands.log]
    assert seconds_of(times) > 0 and seconds_of(times[:2]) < seconds_of(times) == stands.spent
kept, before = torch.zeros(3), len(stands.log)
dist.all_reduce(kept)
assert len(stands.log) == before
print("DONE")
"""


KERNELS = """
import torch
from planner.lab.reference import fused_operators as operators
torch.manual_seed(0)
x, g, w = (torch.randn(64, 32).bfloat16(), torch.randn(64, 48).bfloat16(), torch.randn(4, 48, 32).bfloat16())
rows = torch.tensor([16, 8, 24, 16])
def products():
    both = operators._grouped(x, w, rows), operators._grouped(g, w.transpose(1, 2), rows)
    return [*both, operators._grouped_weight_gradient(g, x, rows)]
plain, operators._has_kernel = products(), lambda _: True
torch.Tensor.tolist = lambda self: 1 / 0  # a host that waits for the sizes
assert all(torch.equal(a, b) for a, b in zip(plain, products(), strict=True))
def odd(x):
    return x + 1
torch.compile = lambda function, **_: (lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler\\nat all")))
assert operators.compiled(odd)(torch.ones(1)) == 2 and operators.NOT_COMPILED == {"odd": "no compiler"}
print("DONE")
"""


@pytest.mark.proof
@needs_torch
def test_fake_collectives_and_kernels_of_a_gpu() -> None:
    """Fake collectives: every kind by hand, and nothing of it left behind. Kernels: as far as a CPU has them, grouped
    products; a missing compiler is written down."""
    assert fresh(STANDS + KERNELS).split() == ["DONE", "DONE"]

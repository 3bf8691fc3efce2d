"""Fake tensors that repeat what they have seen: the same tensors, storages and ranks as torch's own."""

from __future__ import annotations

import importlib.util
import json

import pytest
from fresh import fresh

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)

OPERATIONS = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from planner.lab.run.fake_tensors import RepeatedFakes

asked = []

class Counted(RepeatedFakes):
    def _learn(self, func, name, tensors, out):
        asked.append(str(func))
        super()._learn(func, name, tensors, out)

def look(every):
    places, found = {}, []
    for one in every:
        number = places.setdefault(one.untyped_storage()._cdata, len(places))
        shape = [list(one.shape), list(one.stride()), one.storage_offset()]
        kind = [type(one).__name__, str(one.dtype), str(one.device), one.requires_grad]
        found.append([*shape, *kind, number, one.untyped_storage().nbytes()])
    return found

def step(wide):
    x = torch.empty(4, 8, 16, dtype=torch.bfloat16)
    w = torch.empty(wide, 16, dtype=torch.bfloat16, requires_grad=True)
    every = [x, w, x.t() if x.dim() == 2 else x.transpose(0, 1), x[1:, 2], x.view(32, 16), x.expand(4, 8, 16), x.detach()]
    every += [torch.nn.functional.linear(x, w), torch.ops.aten._unsafe_view(x, [8, 64]), *x.split(4, 1), *torch.unbind(x, 0)]
    every += [x.add_(1), x.add_(1.0), x * 2, x * 2.0, x > 0, x.float(), x.to(torch.bfloat16), x.contiguous(), torch.zeros_like(x)]
    every += [torch.cat([x, x], 0), torch.stack([x, x]), x.permute(2, 0, 1).contiguous(), torch.empty(0), x.sum(-1)]
    every += torch.aminmax(x, dim=-1)
    loss = torch.nn.functional.linear(x, w).float().square().mean()
    loss.backward()
    part = torch.empty(6)
    view = part[2:4]
    storage = part.untyped_storage()
    storage.resize_(0)
    storage.resize_(24)
    view = view.view(2, 1)
    other = torch.empty(3)
    other.set_(part.untyped_storage(), 1, (3,), (1,))
    return look([*every, w.grad, loss, part, view, other])

with FakeTensorMode(allow_non_fake_inputs=True):
    own = [step(wide) for wide in (16, 24)]
mode = Counted()
with mode:
    first, second = ([step(wide) for wide in (16, 24)] for _ in range(2))
    before = len(asked)
    third = [step(wide) for wide in (16, 24)]
    kinds = [(torch.full((2,), 1).dtype, torch.full((2,), 1.0).dtype, torch.full((2,), True).dtype) for _ in range(2)]
print("FOUND", json.dumps([own == first == second == third, before, len(asked) - before, [[str(k) for k in one] for one in kinds]]))
"""

RANKS = """
import dataclasses, json, time
from torch._subclasses.fake_tensor import FakeTensorMode
from planner.lab.run import meta
from tests.proofs import parity

small = parity.tiny(hidden_size=64, ffn_size=176, vocab_size=256, head_dim=16)
jobs = [("llama", {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3, "recompute": "full"}, 3),
        ("moe", {"dp": 4, "ep": 2, "zero": 2, "num_microbatches": 2}, 1)]
same, own = [], lambda: FakeTensorMode(allow_non_fake_inputs=True)
for family, fields, rank in jobs:
    split = dataclasses.replace(parity.combination(family, **fields), precision="bf16")
    quick = meta.measure_ranks(split, [rank])[0]
    kept, meta.RepeatedFakes = meta.RepeatedFakes, own
    slow = meta.measure_ranks(split, [rank])[0]
    meta.RepeatedFakes = kept
    same.append(dataclasses.replace(quick, seconds=0.0) == dataclasses.replace(slow, seconds=0.0) and quick.most.total > 10000)
print("FOUND", json.dumps(same))
"""


def found_of(code: str) -> list[object]:
    [line] = [line for line in fresh(code).splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    assert isinstance(found, list)
    return found


@needs_torch
def test_operations_give_the_same_tensors_on_the_same_storages() -> None:
    """Views, splits, updates in place, unsafe views, a backward pass, storages that are freed, filled and handed over: shapes,
    strides, types and what shares memory are those of torch's own mode; the third time next to nothing is asked again. Numbers
    that are equal but of another type are told apart."""
    same, learned, again, kinds = found_of(OPERATIONS)
    assert same is True
    assert isinstance(learned, int) and isinstance(again, int) and learned > 40 and again <= 3
    assert kinds == [["torch.int64", "torch.float32", "torch.bool"]] * 2


@needs_torch
def test_a_rank_is_measured_to_the_byte() -> None:
    """Memory at every point, parameters and collectives of ranks: recompute in a pipeline, experts."""
    assert found_of(RANKS) == [True, True]

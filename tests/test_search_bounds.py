"""What layouts are known to need before they are priced: never more than they do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from samples import job, priced

from planner import memory_attempts
from planner.cost.estimate import memory_by_stage
from planner.cost.unique_stages import kept_bytes
from planner.defaults import Request, resolve
from planner.rules import allowed
from planner.search import Pins, search
from planner.space import OFFLOADS, base_layouts, recompute_options


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "trainer"), [("gqa", "megatron"), ("moe", "megatron"), ("gqa", "torchtitan"), ("gpt", "deepspeed")]
)
def test_no_option_needs_less_than_what_stays(model: str, trainer: str) -> None:
    """The bound by which layouts are left out before they are priced, against every layout of a space with every option."""
    one = job(model, trainer, gpus=8, batch=32)
    plain = base_layouts(one, Pins())
    plain = plain.take(allowed(one, plain))
    moved = [plain.replace(offload_optimizer=share) for share in (0, *OFFLOADS)]
    bound = np.min([kept_bytes(one.workload, one.cluster, one.trainer, some)[0] for some in moved], axis=0)
    assert np.all(memory_attempts.memory_bounds(one, Pins(), plain)[0] <= bound)
    assert np.all(bound > one.cluster.hardware.context_memory) and len(np.unique(bound)) > 3
    for option in recompute_options(one, Pins()):
        changed = option.apply(plain, one.model)
        for share in (0, *OFFLOADS):
            some = changed.replace(offload_optimizer=share)
            found, (device, host) = priced(one, some), kept_bytes(one.workload, one.cluster, one.trainer, some)
            assert np.all(found.memory_needed >= bound * (1 - 1e-12)), option
            assert np.all(found.memory_needed >= device * (1 - 1e-12)), option
            assert np.all(found.host_memory >= host * (1 - 1e-12)) and np.any(host > 0) == (share > 0), option


@pytest.mark.parametrize(
    ("model", "gpus"),
    [("glm-4.6", 16), ("deepseek-v3", 64), ("llama-4-scout", 16), ("nemotron-h-8b", 8), ("gpt-oss-120b", 16)],
)
def test_no_split_of_the_layers_needs_less_than_what_is_kept(model: str, gpus: int) -> None:
    """Experts in some layers, dense layers that are heavier than those, prediction modules, hybrids: the fullest stage of any
    split holds what the bound says."""
    one = resolve(Request(model=model, num_gpus=gpus)).job
    plain = base_layouts(one, Pins())
    plain = plain.take(allowed(one, plain) & (np.asarray(plain.pp) > 1))
    plain = plain.take(np.arange(0, len(plain), max(len(plain) // 600, 1)))
    uneven = memory_attempts.splits(one, Pins(), plain)[1]
    close = []
    for some in (plain, uneven):
        assert len(some) > 20
        device, _ = kept_bytes(one.workload, one.cluster, one.trainer, some)
        held = memory_by_stage(one.workload, one.cluster, one.trainer, some)[0]
        lost = 1 + one.trainer.stored.fragmentation
        states = (held["weights"] + held["gradients"] + held["optimizer_states"]) * lost + held["communication_buffers"]
        fullest = np.max(states, axis=0) + one.cluster.hardware.context_memory
        assert np.all(fullest >= device * (1 - 1e-12))
        close.append(float(np.max(device / fullest)))
    assert max(close) > 0.85


def test_what_host_memory_cannot_hold_is_not_priced() -> None:
    """GLM-4.6 with its optimizer states on 16 GPUs: one node's host memory is too small for them, on the card they are too large.
    That is known before anything is priced, and with room on the host the plans are those of a whole search."""
    one = resolve(Request(model="glm-4.6", num_gpus=16, hardware="mi325x")).job
    quick = search(one, top=1, only_fitting=True)
    assert not quick.fit and quick.priced == 0
    hardware = dataclasses.replace(one.cluster.hardware, host_memory=4 * one.cluster.hardware.host_memory)
    roomy = dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=hardware))
    pins = Pins(values={"tp": 8, "micro_batch_size": 1})
    every, quick = search(roomy, pins, top=2), search(roomy, pins, top=2, only_fitting=True)
    assert every.fit and quick.layouts == every.layouts and quick.priced < every.priced

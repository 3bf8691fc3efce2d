"""Properties of the whole estimate: parts, batches, monotony, every trainer on every device."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import proofs_but
from samples import HARDWARE, MODELS, TRAINERS, job, legal_layouts, priced

from planner.cost.estimate import HIDDEN, PARTS, Estimate
from planner.cost.memory.states import COMPONENTS
from planner.cost.price.deduplicate import FEW_ROWS
from planner.hardware import HardwareProfile
from planner.layout import Layout, Module, Recompute, Schedule
from planner.rules import Job
from planner.search import fits
from planner.workload import Workload

FASTER = (
    "network_bandwidth",
    "scale_up_bandwidth",
    "memory_bandwidth",
    "pcie_bandwidth",
    "peak_flops",
    "host_memory_bandwidth",
)
GROUPS = {
    "tensor": "tensor_communication",
    "context": "context_communication",
    "expert": "expert_communication",
    "pipeline": "pipeline_communication",
    "data": "data_communication",
}


def numbers(found: Estimate) -> dict[str, np.ndarray]:
    """Every number of an estimate by name, as columns."""
    flat: dict[str, np.ndarray] = {}
    for name, value in vars(found).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name} {part}": np.atleast_1d(number) for part, number in parts}
    properties = ("step_time", "memory_peak", "memory_allocated", "memory_reserved", "mfu", "out_of_memory_probability")
    return flat | {name: getattr(found, name) for name in properties}


cases = st.tuples(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(TRAINERS)),
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from([(4, 8), (16, 32), (64, 64)]),
    st.integers(0, 2**32 - 1),
)


def drawn(case: tuple[str, str, str, tuple[int, int], int], most: int) -> tuple[Job, Layout]:
    model, trainer, hardware, (gpus, batch), seed = case
    layouts = legal_layouts(model, trainer, gpus, batch, 2000)
    rows = np.random.default_rng(seed).integers(0, len(layouts), most)
    return job(model, trainer, gpus, hardware, batch=batch), layouts.take(rows)


@settings(max_examples=30, deadline=None)
@given(cases)
def test_a_batch_equals_its_rows_one_by_one(case: tuple[str, str, str, tuple[int, int], int]) -> None:
    one, layouts = drawn(case, 6)
    together = numbers(priced(one, layouts))
    for row in range(len(layouts)):
        alone = numbers(priced(one, layouts.row(row)))
        for name, value in alone.items():
            expected = together[name][row if len(together[name]) > 1 else 0]
            assert value[0] == pytest.approx(expected, rel=1e-9, abs=1e-12), f"{name} of {layouts.row(row)}"


CHANGED: dict[str, tuple[int, ...]] = {
    "tp": (1, 4), "pp": (1, 2, 4), "cp": (1, 4), "dp": (2, 8), "dp_shard": (1, 2), "ep": (1, 2, 4), "etp": (1, 2), "vpp": (1, 2),
    "micro_batch_size": (1, 4), "num_microbatches": (2, 16), "sequence_parallel": (0, 1), "cp_method": (0, 1, 2),
    "order": (0, 1, 2), "zero": (0, 1, 2, 3), "schedule": (0, 1, 2, 3, 4, 5, 6), "recompute": (0, 1, 2), "recompute_layers": (0, 1),
    "recompute_modules": (0, 1, 2, 4, 8, 16, 32, 64), "offload_optimizer": (0, 50, 100), "offload_activations": (0, 1),
    "offload_layers": (0, 1), "offload_parameters": (0, 1),
    "first_stage_layers": (0, 1, -1), "last_stage_layers": (0, 1, -1),
}  # fmt: skip
"""Values of every field of a layout; legality does not matter to prices."""
AROUND = (
    Layout(
        tp=2, pp=2, dp=4, ep=2, vpp=2, num_microbatches=8, zero=1, sequence_parallel=1, schedule=Schedule.INTERLEAVED
    ),
    Layout(tp=2, cp=2, dp=4, dp_shard=2, num_microbatches=4, zero=3, recompute=Recompute.FULL, recompute_layers=3),
    Layout(pp=4, dp=4, num_microbatches=8, zero=2, recompute=Recompute.SELECTIVE, recompute_modules=1),
)


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("model", ["gqa", "moe"])
def test_no_field_is_forgotten_where_equal_candidates_are_merged(model: str, trainer: str) -> None:
    """A batch is priced once per distinct stage, send and group: a field that decides a price and is in no list of those fields
    would give some candidates another's price. Every field is changed around three layouts; few candidates are not merged."""
    assert set(CHANGED) == set(Layout().columns())
    one = job(model, trainer, gpus=16, batch=64)
    needs = {"offload_layers": {"offload_activations": 1}}
    changes = [{**needs.get(name, {}), name: value} for name, values in CHANGED.items() for value in values]
    around = [base.replace(**change) for base in AROUND for change in changes]
    together = numbers(priced(one, Layout.stack(around)))
    assert len(around) > 2 * FEW_ROWS
    for start in range(0, len(around), FEW_ROWS):
        some = numbers(priced(one, Layout.stack(around[start : start + FEW_ROWS])))
        for name, value in some.items():
            if len(together[name]) > 1:
                rows = slice(start, start + FEW_ROWS)
                np.testing.assert_allclose(together[name][rows], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.proof
@settings(max_examples=25, deadline=None)
@given(cases, st.sampled_from(FASTER), st.floats(1.05, 8.0))
def test_faster_hardware_is_never_slower(
    case: tuple[str, str, str, tuple[int, int], int], what: str, factor: float
) -> None:
    one, layouts = drawn(case, 32)
    faster = dataclasses.replace(one.cluster, hardware=one.cluster.hardware.scaled(**{what: factor}))
    before, after = priced(one, layouts), priced(dataclasses.replace(one, cluster=faster), layouts)
    assert np.all(after.step_time <= before.step_time * (1 + 1e-9)), f"{what} x {factor}"


def test_each_speed_matters_somewhere() -> None:
    """The test above would pass on constants: each quantity must change the time of a job that depends on it."""
    one = job("gqa", "megatron", 16, batch=32)
    layout = Layout(tp=2, pp=2, dp=4, num_microbatches=8, sequence_parallel=1, zero=1, offload_optimizer=50)
    base = float(priced(one, layout).step_time[0])
    for what in FASTER:
        slow = dataclasses.replace(one.cluster, hardware=one.cluster.hardware.scaled(**{what: 0.02}))
        assert float(priced(dataclasses.replace(one, cluster=slow), layout).step_time[0]) > base * 1.001, what


EVERYWHERE = list(itertools.product(sorted(MODELS), sorted(TRAINERS)))
WITH_ALL = [(model, trainer) for model, trainer in EVERYWHERE if model == "gqa" or trainer in ("megatron", "torchtitan")]
"""Every trainer with one model, and every model with two."""


@pytest.mark.parametrize(("model", "trainer"), proofs_but(WITH_ALL, EVERYWHERE))
def test_finite_and_positive_everywhere(trainer: str, model: str) -> None:
    """Every trainer and every model meet every device; a trainer and a model together meet a sixth of them."""
    layouts = legal_layouts(model, trainer, 16, 32, 2000).take(slice(0, 32))
    assert len(layouts) >= 4
    first = (sorted(MODELS).index(model) + sorted(TRAINERS).index(trainer)) % 6
    for name in sorted(HARDWARE)[first::6]:
        hardware = HARDWARE[name]
        found = priced(job(model, trainer, 16, hardware, batch=32), layouts)
        for name, value in numbers(found).items():
            assert np.all(np.isfinite(value)) and np.all(value >= 0), f"{name} on {hardware.name}"
        for part in ("compute", "optimizer", "overhead"):
            least = found.time[part] if part != "optimizer" else found.time["optimizer"] + found.time["offload"]
            assert np.all(least > 0), f"{part} on {hardware.name}"
        late = ("gradients", "activations") * TRAINERS[trainer].stored.gradients_on_demand  # not both at every peak
        for part in {"weights", "gradients", "activations", "context"} - set(late):
            assert np.all(found.memory[part] > 0), f"{part} on {hardware.name}"
        assert np.all(found.memory["gradients"] + found.memory["activations"] + found.memory["workspace"] > 0)
        assert np.all(found.mfu < 1), hardware.name


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4"])
def test_every_precision(precision: str) -> None:
    one = job("gqa", "megatron", 8, "b200-sxm", precision=precision)
    found = priced(one, Layout(tp=2, dp=4, num_microbatches=8, sequence_parallel=1))
    bf16 = priced(job("gqa", "megatron", 8, "b200-sxm"), Layout(tp=2, dp=4, num_microbatches=8, sequence_parallel=1))
    assert 0 < found.mfu[0] < 1
    if precision == "fp32":
        assert found.time["compute"][0] > 1.3 * bf16.time["compute"][0]  # tf32 at half the rate
        assert found.memory["activations"][0] > 1.5 * bf16.memory["activations"][0]


@settings(max_examples=25, deadline=None)
@given(cases)
def test_parts_are_the_whole(case: tuple[str, str, str, tuple[int, int], int]) -> None:
    one, layouts = drawn(case, 32)
    found = priced(one, layouts)
    assert set(found.time) == set(PARTS) and set(found.memory) == set(COMPONENTS) and set(found.hidden) == set(HIDDEN)
    assert found.step_time == pytest.approx(sum(found.time.values()), rel=1e-12)
    assert found.memory_peak == pytest.approx(sum(found.memory.values()), rel=1e-12)
    kept = found.memory_reserved - found.memory["fragmentation"]
    assert found.memory_allocated == pytest.approx(kept, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(cases)
def test_hidden_and_exposed_communication_are_all_of_it(case: tuple[str, str, str, tuple[int, int], int]) -> None:
    """Overlap moves seconds from exposed to hidden, never makes or loses any. One stage, so the same one is slowest. What
    overlapped experts cost the host is a fact of its own (test_routing.py), left out here."""
    one, layouts = drawn(case, 64)
    one = dataclasses.replace(one, trainer=one.trainer.replace(host_factors={"expert_overlap": 1.0}))
    layouts = layouts.take(np.asarray(layouts.pp) == 1)
    if not len(layouts):
        return
    plain = dataclasses.replace(one, trainer=one.trainer.replace(overlap=frozenset()))
    every = dataclasses.replace(
        one,
        trainer=one.trainer.replace(
            overlap=frozenset(("tp_backward", "tp", "cp", "ep", "gradients", "parameters", "pipeline"))
        ),
    )
    without, within = priced(plain, layouts), priced(every, layouts)
    for hidden, part in GROUPS.items():
        assert np.all(without.hidden[hidden] <= 1e-12)
        assert within.time[part] + within.hidden[hidden] == pytest.approx(without.time[part], rel=1e-9, abs=1e-12)
    assert np.all(within.step_time <= without.step_time * (1 + 1e-12))


def test_nothing_is_sent_alone() -> None:
    for model in MODELS:
        found = priced(job(model, gpus=1), Layout(num_microbatches=32))
        assert all(found.time[part][0] == 0 for part in (*GROUPS.values(), "bubble", "recompute", "offload"))
        assert all(value[0] == 0 for value in found.hidden.values())
        assert found.memory["communication_buffers"][0] == 0


@pytest.mark.proof
@settings(max_examples=25, deadline=None)
@given(cases)
def test_more_work_takes_longer(case: tuple[str, str, str, tuple[int, int], int]) -> None:
    """More microbatches are never faster; a larger micro batch (as many tokens in all) never needs less memory."""
    one, layouts = drawn(case, 32)
    more = priced(one, layouts.replace(num_microbatches=np.asarray(layouts.num_microbatches) * 2))
    found = priced(one, layouts)
    assert np.all(more.step_time >= found.step_time * (1 - 1e-12))
    assert np.all(more.time["compute"] > found.time["compute"])
    m = np.asarray(layouts.num_microbatches)
    # Where gradients come as activations go, those of all but the first microbatch lie beside them: more of them if it is small.
    late = one.trainer.stored.gradients_on_demand
    settled = (m > 4 * np.asarray(layouts.pp)) & (np.asarray(layouts.schedule) != Schedule.GPIPE) if late else m > 0
    even = layouts.take((m % 2 == 0) & settled)
    larger = even.replace(
        micro_batch_size=np.asarray(even.micro_batch_size) * 2, num_microbatches=np.asarray(even.num_microbatches) // 2
    )
    # Fewer, larger microbatches keep the host less far ahead: what it has freed and the GPU not read yet may shrink.
    if any(term.folder() == "nanotron" for term in one.trainer.terms):
        one = dataclasses.replace(one, trainer=one.trainer.replace(terms={"nanotron": {"held_collectives": 0.0}}))
    if len(even):
        assert np.all(priced(one, larger).memory_needed >= priced(one, even).memory_needed * (1 - 1e-12))


@pytest.mark.proof
@settings(max_examples=25, deadline=None)
@given(cases, st.floats(1.01, 4.0))
def test_more_memory_never_loses_a_plan(case: tuple[str, str, str, tuple[int, int], int], factor: float) -> None:
    one, layouts = drawn(case, 64)

    def fitting(hardware: HardwareProfile) -> np.ndarray:
        other = dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, hardware=hardware))
        return fits(other, priced(other, layouts))

    small = one.cluster.hardware.scaled(usable_memory=0.1)
    assert np.all(fitting(small) <= fitting(small.scaled(usable_memory=factor)))
    assert np.all(fitting(small) <= fitting(small.scaled(host_memory=factor)))


def test_recompute_trades_time_for_memory() -> None:
    """none <= selective <= a part of the layers <= all of them: time rises at every step and memory falls."""
    modes = [
        {},
        {"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.MLP)},
        *({"recompute": Recompute.FULL, "recompute_layers": n} for n in (3, 4, 7)),
        {"recompute": Recompute.FULL},
    ]
    for model in ("gpt", "gqa", "window"):
        for shape in (
            {"dp": 8, "num_microbatches": 4},
            {"tp": 2, "dp": 4, "num_microbatches": 8, "sequence_parallel": 1},
        ):
            found = priced(job(model), Layout.stack([Layout(**shape, **mode) for mode in modes]))
            rows = [0, 1, 4, 5]  # selective against a small part of the layers may go either way
            assert np.all(np.diff(found.step_time[rows]) > 0), model
            assert np.all(np.diff(found.memory_peak[rows]) < 0), model
            assert np.all(np.diff(found.step_time[2:]) > 0) and np.all(np.diff(found.memory_peak[2:]) < 0), model
            assert found.time["recompute"][-1] < found.time["compute"][-1] / 2  # forward is a third, less the head's


def test_offloaded_optimizer() -> None:
    """States leave the device by the percent, wait on the host with a copy of gradient and weight, and cost time."""
    one = job("gqa", "deepspeed")
    shape = {"dp": 8, "num_microbatches": 4, "zero": 2}
    found = priced(one, Layout.stack([Layout(**shape, offload_optimizer=share) for share in (0, 50, 100)]))
    states = found.memory["optimizer_states"]
    assert states[1] == pytest.approx(states[0] / 2) and states[2] == 0
    assert found.host_memory == pytest.approx(states[0] / 12 * (12 + 2 + 2) * np.array([0, 0.5, 1.0]))
    assert found.time["offload"][0] == 0 and found.time["offload"][2] == pytest.approx(2 * found.time["offload"][1])
    assert found.time["optimizer"][2] == 0 and np.all(np.diff(found.step_time) > 0)
    hardware = one.cluster.hardware
    updated = states[0] / 12
    transfer = updated * 4 / hardware.pcie_bandwidth
    host = (
        updated
        * (2 * 2 + 2 * 12 + 2 + 18)
        / (hardware.host_memory_bandwidth * hardware.cpu_adam_bandwidth_fraction / 8)
    )
    assert found.time["offload"][2] == pytest.approx(max(transfer, host))


def test_offloaded_activations() -> None:
    one = job("gqa", "deepspeed", sequence=8192, batch=64)
    shape = {"dp": 8, "micro_batch_size": 2, "num_microbatches": 4, "recompute": Recompute.FULL, "zero": 3}
    found = priced(one, Layout.stack([Layout(**shape, offload_activations=on) for on in (0, 1)]))
    inputs = 2 * 8192 * 1024 * 2
    assert found.memory["activations"][0] - found.memory["activations"][1] == pytest.approx((8 - 2) * inputs, rel=1e-3)
    slow = dataclasses.replace(one.cluster, hardware=one.cluster.hardware.scaled(pcie_bandwidth=0.02))
    waiting = priced(dataclasses.replace(one, cluster=slow), Layout(**shape, offload_activations=1))
    busy = sum(waiting.time[part][0] for part in PARTS[:6])
    transfers = 2 * 4 * 8 * inputs / slow.hardware.pcie_bandwidth
    assert waiting.time["offload"][0] == pytest.approx(transfers - busy, rel=0.05)


def test_adapters() -> None:
    """LoRA: gradients and states of adapters alone, and about a third less computation (no weight gradients)."""
    whole = job("gqa", "deepspeed")
    h, kv, f = 8192, 16 * 64, 28672  # Llama 3 70B's sizes: in small matrices the adapters' own kernels weigh more
    wide = dataclasses.replace(whole.model, hidden_size=h, num_heads=128, num_kv_heads=16, ffn_size=f)
    whole = dataclasses.replace(whole, workload=whole.workload.replace(model=wide))
    adapters = dataclasses.replace(whole, workload=whole.workload.replace(lora_rank=16))
    layout = Layout(dp=8, num_microbatches=4)
    full, low = priced(whole, layout), priced(adapters, layout)
    pairs = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]  # one pair for each linear layer
    trained = 16 * sum(n + k for n, k in pairs) * wide.num_layers
    assert low.memory["gradients"][0] == pytest.approx(2 * trained)
    assert low.memory["optimizer_states"][0] == pytest.approx(12 * trained)
    assert low.memory["weights"][0] == pytest.approx(full.memory["weights"][0] + 2 * trained)
    assert low.flop[0] == pytest.approx(full.flop[0] * 2 / 3, rel=0.05)
    assert 0.6 < low.time["compute"][0] / full.time["compute"][0] < 0.9
    assert low.time["data_communication"][0] < 0.1 * full.time["data_communication"][0]


def test_workload_columns_do_not_leak() -> None:
    """Two workloads in a row: nothing priced for the first is remembered for the second."""
    layout = Layout(dp=8, num_microbatches=4)
    short, long = (job(sequence=s) for s in (8192, 16384))  # long enough that the host does not set the pace
    first = priced(short, layout).step_time[0]
    assert priced(long, layout).step_time[0] > 1.5 * first
    assert priced(short, layout).step_time[0] == first
    assert isinstance(short.workload, Workload)


def test_candidates_priced_in_pieces_are_those_priced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column of every candidate, to the last bit."""
    one, layouts = job("moe", "torchtitan", 32), legal_layouts("moe", "torchtitan", 32, 32, 200)
    whole = priced(one, layouts)
    monkeypatch.setattr("planner.cost.estimate.CHUNK", 64)
    pieces = priced(one, layouts)
    assert len(layouts) > 128
    for name, value in vars(whole).items():
        for key, column in value.items() if isinstance(value, dict) else [("", value)]:
            found = getattr(pieces, name)
            assert np.array_equal(column, found[key] if key else found), (name, key)

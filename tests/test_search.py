"""The search against brute force: one layout at a time, no pruning, no shared prices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from quick_cases import proofs_but
from samples import HARDWARE, MODELS, TRAINERS, job, priced, tight

from planner import memory_attempts, priced_layouts
from planner import search as searching
from planner.cost.refine import refine
from planner.defaults import Request, resolve
from planner.layout import NAMES, Layout, Recompute, Schedule
from planner.model import load_model
from planner.rules import Job, allowed, check
from planner.search import Finding, Pins, fits, search
from planner.space import OFFLOADS, base_layouts, host_options, recompute_options, stack


def all_layouts(one: Job) -> Layout:
    """Every legal layout from plain products of every field; nothing taken from space.base_layouts."""
    gpus, batch, moe = one.cluster.num_gpus, one.workload.global_batch_size, one.model.is_moe
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    levels = one.trainer.legal.zero if gpus > 1 else (min(one.trainer.legal.zero),)
    rows: list[Layout] = []
    for tp, pp, cp in itertools.product(sizes, repeat=3):
        if gpus % (tp * pp * cp):
            continue
        dp = gpus // (tp * pp * cp)
        pipelines = [(1, 1)] if pp == 1 else list(itertools.product((1, 2, 4, 8), NAMES["schedule"]))
        for micro, zero, (vpp, schedule), method, split, ep, etp in itertools.product(
            (1, 2, 4, 8, 16),
            levels,
            pipelines,
            NAMES["cp_method"] if cp > 1 else (0,),
            ((1,) if one.trainer.legal.sequence_parallel == "usual" else (0, 1)) if tp > 1 else (0,),
            sizes if moe else (1,),
            {1, tp} if moe else {1},
        ):
            if batch % (dp * micro) == 0:
                rows.append(
                    Layout(
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        dp=dp,
                        micro_batch_size=micro,
                        num_microbatches=batch // (dp * micro),
                        zero=zero,
                        vpp=vpp,
                        schedule=schedule,
                        cp_method=method,
                        sequence_parallel=split,
                        ep=ep,
                        etp=etp,
                    )
                )
    plain = Layout.stack(rows)
    levers = stack([plain, *(lever.apply(plain, one.model) for lever in recompute_options(one, Pins()))])
    moved = []
    if one.trainer.legal.offload_optimizer:
        moved = [levers.replace(offload_optimizer=share) for share in OFFLOADS]
    levers = stack([levers, *moved, *(levers.replace(**options) for options in host_options(one, Pins()))])
    return levers.take(allowed(one, levers))


@lru_cache(maxsize=8)
def brute_force(name: str) -> tuple[Layout, list[float], list[float]]:
    """All layouts of a job with their step times and peaks, each checked and priced alone."""
    layouts = all_layouts(JOBS[name])
    times, peaks = [], []
    for row in range(len(layouts)):
        layout = layouts.row(row)
        check(JOBS[name], layout)
        alone = priced(JOBS[name], layout)
        times.append(float(alone.step_time[0]))
        peaks.append(float(alone.memory_peak[0]))
    return layouts, times, peaks


# Even stages only: splits of layers have tests of their own below.
EVEN = TRAINERS["megatron"].replace(layer_split="equal", recompute_layers=False, recompute_modules=("mlp", "moe"))
JOBS: dict[str, Job] = {
    "dense": job("gqa", EVEN.replace(offload=frozenset()), gpus=4, batch=4),
    "experts": job("moe", EVEN.replace(cp_methods=("ring",), offload=frozenset()), gpus=4, batch=2),
    "sharded": job(
        "gpt", TRAINERS["torchtitan"].replace(layer_split="spread", hsdp=False), gpus=4, batch=4, hardware="l40s"
    ),
    "offload": job("gqa", "deepspeed", gpus=2, batch=4),
}


def closed_form(one: Job, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Finding:
    """The search without its last step, the walked timeline."""
    with monkeypatch.context() as patch:
        patch.setattr(searching, "_refined", lambda job, pins, layouts, estimates, wanted: (layouts, estimates))
        return search(one, **more)


def test_one_replica_frees_its_cast_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 casts weights on one GPU too, and frees them at level 3: half the bytes of the fp32 ones."""
    one = job("gpt", "torchtitan", gpus=1, batch=4, hardware="l40s")
    both = Layout.stack([Layout(num_microbatches=4, zero=level) for level in (2, 3)])
    found = priced(one, both)
    assert found.memory["workspace"][0] - found.memory["workspace"][1] == pytest.approx(found.memory["weights"][0] / 2)
    limits = (float(found.memory_peak[1]) * step / 100 for step in range(50, 200))
    between = next(narrow for narrow in (tight(one, limit) for limit in limits) if fits(narrow, priced(narrow, both))[1])
    assert not fits(between, priced(between, both))[0]
    pins = Pins(values={"recompute": 0, "micro_batch_size": 1, "offload_parameters": 0, "offload_optimizer": 0})
    assert closed_form(between, monkeypatch, pins=pins).layouts[0].zero == 3


@pytest.mark.parametrize(
    ("waves", "name"), proofs_but([(True, "sharded"), (True, "offload")], itertools.product((False, True), JOBS))
)
def test_winner_is_that_of_brute_force(name: str, waves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same best time, with memory for all, for half of the layouts, for few and for none; in waves nothing is lost."""
    if waves:
        monkeypatch.setattr(priced_layouts, "PIECE", 64)
        monkeypatch.setattr(memory_attempts, "WAVE", 8)
    one = JOBS[name]
    layouts, every, peaks = brute_force(name)
    peaks = sorted(peaks)
    assert len(every) > 50
    for limit in (2 * peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 50], peaks[0] / 2):
        narrow = tight(one, limit)
        safe = fits(narrow, priced(narrow, layouts))
        here = ~np.asarray(layouts.offloads)
        last = np.asarray(layouts.offload_activations) + np.asarray(layouts.offload_parameters) > 0
        best = [
            min((t for t, ok in zip(every, safe & side, strict=True) if ok), default=np.inf)
            for side in (here, ~here & ~last)
        ]
        if best[1] >= memory_attempts.OFFLOAD_GAIN * best[0] and np.isfinite(
            best[0]
        ):  # when nothing fits without, or to save a tenth
            safe &= here
        elif np.isfinite(best[1]):  # the last resort: when nothing fits without
            safe &= ~last
        times = [time for time, ok in zip(every, safe, strict=True) if ok]
        found = closed_form(narrow, monkeypatch, top=1 if waves else 5)  # with one plan asked for the bound is tightest
        assert found.fit == bool(times)
        if times:
            assert found.estimates[0].step_time[0] == pytest.approx(min(times), rel=1e-9), limit
            assert all(fits(narrow, estimate)[0] for estimate in found.estimates)
            spread = [estimate.step_time[0] for estimate in found.estimates]
            assert spread == pytest.approx(sorted(spread), rel=1e-12)  # ties differ in the last bit
        else:
            least = float(priced(narrow, layouts).memory_peak.min())  # what is given back when needed is not held here
            assert found.estimates[0].memory_peak[0] == pytest.approx(least, rel=1e-9)
        assert found.unlimited is not None
        assert found.unlimited[1].step_time[0] == pytest.approx(min(every), rel=1e-9)


def test_offload_when_nothing_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the least peak with and without offload the winner offloads; below it, it is the closest miss."""
    one = dataclasses.replace(JOBS["offload"], trainer=TRAINERS["deepspeed"].replace(offload=frozenset({"optimizer"})))
    layouts = all_layouts(one)
    found = priced(one, layouts)
    moved = np.asarray(layouts.offload_optimizer) > 0
    with_offload, without = found.memory_peak[moved].min(), found.memory_peak[~moved].min()
    assert with_offload * 1.2 < without
    margin = math.exp(
        one.trainer.stored.memory_error * math.log(1 / searching.SAFE - 1) / 1.702
    )  # usable over safe peak
    narrow = tight(one, margin * (with_offload + without) / 2)
    best = search(narrow)
    assert best.fit and all(layout.offload_optimizer > 0 for layout in best.layouts)
    assert not search(tight(one, with_offload * 0.9)).fit
    poor = one.cluster.hardware.scaled(
        usable_memory=narrow.cluster.hardware.usable_memory / one.cluster.hardware.usable_memory, host_memory=1e-4
    )
    assert not search(dataclasses.replace(narrow, cluster=dataclasses.replace(one.cluster, hardware=poor))).fit


def test_weights_go_to_the_host_last() -> None:
    """Where neither recompute nor offloaded states fit, weights, gradients and states do; where those fit, or are pinned, not."""
    one = JOBS["offload"]
    layouts = all_layouts(one)
    found = priced(one, layouts)
    last = np.asarray(layouts.offload_parameters) + np.asarray(layouts.offload_activations) > 0
    with_all, without = found.memory_needed[last].min(), found.memory_needed[~last].min()
    margin = math.exp(one.trainer.stored.memory_error * math.log(1 / searching.SAFE - 1) / 1.702)
    narrow = tight(one, margin * (with_all + without) / 2)
    best = search(narrow)
    assert best.fit and all(layout.offload_parameters or layout.offload_activations for layout in best.layouts)
    assert all(not one.offload_parameters for one in search(tight(one, margin * without * 1.01)).layouts)
    assert not search(narrow, Pins(values={"offload_parameters": 0, "offload_activations": 0})).fit
    pinned = search(one, Pins(values={"offload_parameters": 1}))
    assert pinned.fit and all(layout.offload_parameters and layout.zero == 3 for layout in pinned.layouts)


@pytest.mark.parametrize(
    ("model", "trainer", "gpus", "memory"),
    [
        ("gqa", "megatron", 16, 1.0),
        ("moe", "megatron", 16, 0.12),
        ("mla", "nemo", 16, 0.1),
        ("gpt", "megatron-2021", 8, 0.3),
        ("gqa", "torchtitan", 16, 0.1),
        ("gpt", "deepspeed", 8, 0.1),
        ("window", "maxtext", 8, 0.2),
        ("moe", "automodel", 8, 0.2),
    ],
)
def test_every_layout_found_is_legal_fits_and_is_priced_right(
    model: str, trainer: str, gpus: int, memory: float
) -> None:
    one = job(model, trainer, gpus, batch=32)
    one = tight(one, one.cluster.hardware.usable_memory * memory)
    found = search(one)
    assert found.layouts and found.fit
    for layout, estimate in zip(found.layouts, found.estimates, strict=True):
        check(one, layout)
        alone = priced(one, layout)
        assert fits(one, alone)[0] and fits(one, estimate)[0]
        assert estimate.memory_peak[0] == pytest.approx(alone.memory_peak[0])
        exact = refine(one.workload, one.cluster, one.trainer, [layout], [alone])[0]
        assert estimate.step_time[0] == pytest.approx(exact.step_time[0])
    times = [float(estimate.step_time[0]) for estimate in found.estimates]
    assert times == sorted(times)
    again = search(one)
    assert again.layouts == found.layouts
    assert [float(estimate.step_time[0]) for estimate in again.estimates] == times


def test_torch_interleaving_with_odd_microbatches() -> None:
    """Microbatches that are no multiple of pp: torch rounds its groups, and every legal number can be walked."""
    one = job("gqa", "torchtitan", gpus=4, batch=20)
    pins = Pins(values={"pp": 4, "schedule": Schedule.INTERLEAVED, "micro_batch_size": 2})
    found = search(one, pins)
    assert found.layouts[0].num_microbatches == 10 and found.estimates[0].time["bubble"][0] > 0


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 2},
        {"pp": 2, "vpp": 2},
        {"vpp": 4},
        {"cp": 2, "cp_method": 2},
        {"micro_batch_size": 2},
        {"num_microbatches": 4},
        {"zero": 0},
        {"dp": 2},
        {"recompute": Recompute.FULL},
        {"recompute": Recompute.FULL, "recompute_layers": 1},
        {"recompute": Recompute.SELECTIVE, "recompute_modules": 8},
        {"recompute": Recompute.SELECTIVE},
        {"offload_optimizer": 30},
        {"order": 1},
        {"schedule": Schedule.INTERLEAVED},
        {"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1},
        {"pp": 2, "first_stage_layers": 5},
        {"sequence_parallel": 1},
    ],
)
def test_pins_are_kept(values: dict[str, int]) -> None:
    one = job("gqa", "megatron", gpus=8, batch=32)
    found = search(one, Pins(values=values))
    assert found.layouts
    for layout in found.layouts:
        assert {name: getattr(layout, name) for name in values} == values
        check(one, layout)


def test_a_pin_that_cannot_be_finds_nothing() -> None:
    """Never another value, and never an illegal layout."""
    one = job("gqa", "megatron", gpus=8, batch=32)
    for values in (
        {"tp": 3},
        {"ep": 2},
        {"zero": 3},
        {"offload_parameters": 1},
        {"vpp": 3},
    ):
        found = search(one, Pins(values=values))
        assert found.layouts == [] and not found.fit, values
    refused = search(one, Pins(values={"zero": 3})).refused
    assert next(iter(refused)) == "sharding" and refused["sharding"] > 0


def test_pinned_offload_of_activations() -> None:
    found = search(job("gqa", "deepspeed", gpus=2, batch=8), Pins(values={"recompute": 2, "offload_activations": 1}))
    assert found.fit and all(layout.offload_activations == 1 for layout in found.layouts)


def test_uneven_stages() -> None:
    """A head as heavy as several layers: the best split gives the last stage fewer, and beats the even one."""
    heavy = dataclasses.replace(MODELS["gqa"], num_layers=16, vocab_size=256000)
    one = job("gqa", "megatron", gpus=4, batch=32)
    one = dataclasses.replace(one, workload=one.workload.replace(model=heavy))
    pins = {"pp": 4, "vpp": 1}
    best = search(one, Pins(values=pins))
    even = search(one, Pins(values={**pins, "first_stage_layers": 0, "last_stage_layers": 0}))
    assert 0 < best.layouts[0].last_stage_layers < 4
    assert best.estimates[0].step_time[0] < 0.97 * even.estimates[0].step_time[0]
    plain = EVEN
    assert search(dataclasses.replace(one, trainer=plain), Pins(values=pins)).layouts[0].last_stage_layers == 0


@pytest.mark.proof
@pytest.mark.parametrize("memory", [1.0, 0.85, 0.6])
def test_no_split_of_any_layout_is_faster(memory: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split within two layers of an even one, of every layout: also those that fit only because they are split."""
    trainer = TRAINERS["megatron"].replace(offload=frozenset(), recompute_modules=())
    one = job("gqa", trainer, gpus=8, batch=512, sequence=8192)
    one = dataclasses.replace(one, workload=one.workload.replace(model=load_model("llama-8b")))
    one = tight(one, one.cluster.hardware.usable_memory * memory)
    even = base_layouts(one, Pins())
    rows = [even]
    for first, last in itertools.product(range(1, one.model.num_layers), repeat=2):
        stages, middle = np.asarray(even.pp), one.model.num_layers - first - last
        share = middle / np.maximum(stages - 2, 1)
        near = (stages > 1) & (np.abs(first - last) <= 3) & (np.where(stages > 2, share % 1, middle) == 0)
        rows.append(even.take(near & (share >= 0)).replace(first_stage_layers=first, last_stage_layers=last))
    layouts = stack(rows)
    layouts = layouts.take(allowed(one, layouts))
    found = priced(one, layouts)
    safe = fits(one, found)
    assert np.any(safe) and np.any(np.asarray(layouts.first_stage_layers)[safe])
    best = closed_form(one, monkeypatch)
    assert best.estimates[0].step_time[0] <= found.step_time[safe].min() * (1 + 1e-9)


@pytest.mark.proof
@pytest.mark.parametrize(("model", "trainer"), [("gqa", "megatron"), ("moe", "megatron"), ("gpt", "deepspeed")])
def test_more_memory_is_never_slower(model: str, trainer: str) -> None:
    one = job(model, trainer, gpus=8, batch=32)
    best = np.inf
    for gib in (3, 4, 5, 7, 10, 15, 25, 80):
        found = search(tight(one, gib * 2.0**30))
        if found.fit:
            assert found.estimates[0].step_time[0] <= best * (1 + 1e-9), f"{gib} GiB"
            best = float(found.estimates[0].step_time[0])
    assert np.isfinite(best)


def test_what_does_not_fit_never_ranks_above_what_does() -> None:
    """The fastest layout if memory were no limit does not fit; it is named, but not among the plans."""
    one = tight(job("gqa", "megatron", gpus=8, batch=64), 4.0 * 2**30)
    found = search(one)
    assert found.fit and found.unlimited is not None
    layout, estimate = found.unlimited
    assert not fits(one, estimate)[0] and layout not in found.layouts
    assert estimate.step_time[0] < found.estimates[0].step_time[0]
    assert all(one_found.out_of_memory_probability[0] <= searching.SAFE for one_found in found.estimates)
    assert HARDWARE["h100-sxm"].usable_memory > one.cluster.hardware.usable_memory


def test_plans_differ_in_more_than_fine_fields() -> None:
    """Variants of one plan (virtual stages, splits, how many layers are recomputed) do not crowd out other plans."""
    found = search(job("gqa", "megatron", gpus=8, batch=16), top=5)
    keys = [tuple(getattr(layout, name) for name in searching.PLAN_FIELDS) for layout in found.layouts]
    assert len(keys) == len(set(keys)) == 5


def test_nothing_overflows_where_no_share_is_moved() -> None:
    """Shares of traffic at its ends where there is no traffic; numpy's warning would stand on the user's terminal."""
    one = resolve(Request(model="deepseek-v3", hardware="a10g", num_gpus=8, trainer="fsdp", sequence_length=32768)).job
    with np.errstate(over="raise"):
        assert not search(one, top=1).fit

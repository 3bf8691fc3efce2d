"""Prices hold together away from the runs that they were compared with: other devices, models, trainers, precisions."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.arrays import Floats
from planner.cluster import Cluster
from planner.cost.estimate import PARTS, Estimate, estimate
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.questions.accuracy.prediction import predict
from planner.rules import Job, allowed
from planner.runs import Run, read_rows, rows_from_dict, to_run
from planner.space import Pins, base_layouts, recompute_options, stack
from tools.evidence.constants import constants, in_modules

HARDWARE = sorted(path.stem for path in (library.profiles_directory() / "hardware").glob("*.yaml"))
TRAINERS = sorted(path.stem for path in (library.profiles_directory() / "trainers").glob("*.yaml"))
MODELS = sorted(path.stem for path in (library.profiles_directory() / "models").iterdir())
PRECISIONS = ("bf16", "fp8", "mxfp8", "fp8_block", "fp8_row", "nvfp4", "fp16", "fp32")
LENGTHS = (512, 2048, 8192, 8192, 131072, 1048576)
GPUS = (1, 8, 64, 72, 1024)
SPECIALS: tuple[dict[str, Any], ...] = ({}, {}, {"lora_rank": 8}, {"document_length": 300}, {"optimizer": "muon"})
EACH = 40
"""Layouts of a job that are priced."""


def _jobs(count: int) -> list[Job]:
    """Jobs from all over the library, the same ones every time."""
    chosen, random = [], np.random.default_rng(13)
    for turn in itertools.count():
        pick: dict[str, Any] = {name: known[int(random.integers(len(known)))] for name, known in
                {"model": MODELS, "trainer": TRAINERS, "precision": PRECISIONS}.items()}  # fmt: skip
        numbers = {"sequence_length": LENGTHS, "num_gpus": GPUS}
        pick |= {name: known[int(random.integers(len(known)))] for name, known in numbers.items()}
        more = SPECIALS[int(random.integers(len(SPECIALS)))]
        try:
            chosen.append(resolve(Request(**pick, **more, hardware=HARDWARE[turn % len(HARDWARE)])).job)
        except PlannerError:
            continue
        if len(chosen) == count:
            return chosen
    raise AssertionError


def _priced(job: Job) -> Estimate | None:
    random = np.random.default_rng(7)
    layout = base_layouts(job, Pins())
    layout = layout.take(allowed(job, layout))
    if not len(layout):
        return None
    layout = layout.take(np.sort(random.choice(len(layout), min(EACH, len(layout)), replace=False)))
    levers = recompute_options(job, Pins())
    if levers:
        more = levers[int(random.integers(len(levers)))].apply(layout, job.model)
        layout = stack([layout, more.take(allowed(job, more))])
    return estimate(job.workload, job.cluster, job.trainer, layout)


@pytest.mark.proof
def test_no_part_is_negative_missing_or_more_than_the_device_can_do() -> None:
    """Over a sample of model x device x trainer x precision x length: no warning, every part a number from 0 up, no MFU above 95 %
    and nothing free."""
    priced = 0
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        for job in _jobs(60):
            found = _priced(job)
            if found is None:
                continue
            priced += 1
            parts = {**found.time, **{f"hidden {k}": v for k, v in found.hidden.items()}, **found.memory}
            for name, values in parts.items():
                assert np.all(np.isfinite(values)) and np.all(values >= -1e-9), (job.workload, name)
            assert set(found.time) == set(PARTS)
            for name in ("weights", "context"):
                assert np.all(found.memory[name] > 0), (job.workload, name)
            assert np.all(found.time["compute"] > 0) and np.all(found.time["optimizer"] >= 0)
            assert np.all((found.mfu > 0) & (found.mfu < 0.95)), job.workload
    assert priced > 45


@pytest.mark.proof
def test_prices_hold_together_wherever_the_numbers_of_the_cost_model_lie() -> None:
    """The numbers that were set on published runs, each at both ends of what is possible: no part negative or missing."""
    listed = [one for one in constants() if one.of_module]
    jobs = _jobs(4)
    for one in listed:
        for value in (one.low, one.high):
            with in_modules(listed, {one.name: value}):
                for found in filter(None, map(_priced, jobs)):
                    for name, values in {**found.time, **found.memory}.items():
                        assert np.all(np.isfinite(values)) and np.all(values >= -1e-9), (one.name, value, name)
                    assert np.all((found.out_of_memory_probability >= 0) & (found.out_of_memory_probability <= 1))


LARGE = np.logspace(8, 10, 5)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"])
def test_two_boxes_are_not_faster_than_one(op: str) -> None:
    """A ring through several boxes runs through each of them: PCIe boxes were 2 to 4 times faster together than alone."""
    for name in HARDWARE:
        hardware = load_hardware(name)
        inside = int(Cluster(hardware=hardware, num_gpus=2).domain)
        if inside == 1:
            continue
        cluster = Cluster(hardware=hardware, num_gpus=4 * inside)
        alone: Floats = np.asarray(cluster.collective_time(op, LARGE, inside, 1))
        for boxes in (2, 4):
            together = cluster.collective_time(op, LARGE, boxes * inside, 1)
            assert np.all(together >= 0.9 * alone), (name, op, boxes)


def test_a_ring_over_pcie_boxes_takes_what_its_slowest_hop_takes() -> None:
    """A100 PCIe, all-gather of 1 GB over 16 cards in two boxes: 15/16 GB at the 11.5 GB/s of a box of 8, not at a pair's 150."""
    hardware = load_hardware("a100-pcie-80gb")
    bus = float(hardware.scale_up["all_gather"].bus_bandwidth()[-1])
    found = float(Cluster(hardware=hardware, num_gpus=16).collective_time("all_gather", 1e9, 16, 1))
    assert bus == pytest.approx(11.5e9, rel=0.01)
    assert found == pytest.approx(15 / 16 * 1e9 / bus, rel=0.02)


def _runs(pattern: str) -> list[Run]:
    files = sorted((library.profiles_directory() / "runs").glob(pattern))
    return [to_run(row) for row in read_rows(files)]


def test_nemotron_4_is_not_a_hybrid() -> None:
    """Nemotron-4 340B is a dense transformer; Nemotron 3 has Mamba layers, all of them. The names begin alike."""
    large = [run for run in _runs("nv-dgxc-25.04-nemotron4-h100.yaml") if run.id.startswith("340b")]
    assert len(large) == 8
    for run in large:
        assert not run.unsupported
        assert run.measured is not None and run.measured.step_time is not None
        assert predict([run])[0].step_time == pytest.approx(run.measured.step_time, rel=0.12)
    small = [run for run in _runs("nv-dgxc-24.11-nemotron4-h100.yaml") if run.id == "340b-bf16-g128-b32"]
    assert [run.trainer.stored.optimizer_bytes["adam"] for run in small if run.trainer] == [
        4
    ]  # its optimizer is bf16 throughout
    hybrids = [run for run in _runs("nv-mbridge-26.0*.yaml") if run.id.startswith("nemotron-3-")]
    assert hybrids and all(run.workload is None or run.workload.model.linear for run in hybrids)


def test_fine_tuning_recipes_of_megatron_bridge() -> None:
    """Adapters of rank 16 on the projection of queries, keys and values, documents of SQuAD packed into the sequence."""
    data: dict[str, Any] = {
        "source": {"id": "nv-mbridge-26.06-gb300", "title": "t", "where": "w", "quality": "primary"},
        "hardware": {"gpu": "GB300", "gpus_per_node": 4},
        "framework": "megatron-bridge (NeMo container 26.06)",
        "rows": [
            {"id": f"llama3-70b-{kind}-fp8-g8", "precision": "fp8", "notes": notes,
             "model": {"name": "llama3-70b", "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated": True,
                       "vocab": 128256, "seq": 4096, "tied_embeddings": False, "attention": "gqa"},
             "parallel": {"gpus": 8, "tp": 1, "pp": 2, "dp": 4, "cp": 1, "ep": 1, "vpp": 20, "zero": 1},
             "batch": {"micro": 1, "global": 32}, "document_length": 200, "measured": {"step_s": 2.19}}
            for kind, notes in (("lora", "LoRA"), ("sft", "full"))
        ],
    }  # fmt: skip
    lora, full = (to_run(row) for row in rows_from_dict(data, where="test", source="nv-mbridge-26.06-gb300"))
    assert lora.workload is not None and full.workload is not None
    assert (lora.workload.lora_rank, lora.workload.lora_targets, lora.workload.document_length) == (16, "qkv", 200)
    assert (full.workload.lora_rank, full.workload.document_length) == (0, 200)
    times = [answer.step_time for answer in predict([lora, full])]
    assert times[0] is not None and times[1] is not None and times[0] < times[1]


def test_attention_in_fp32_is_no_faster_than_its_tensor_cores() -> None:
    """Flash attention has no fp32 kernel; others multiply at the rate of tf32, half of bf16. It was priced at that of bf16,
    so a sequence of a million tokens reached 104 % of the peak."""
    for name in ("h100-sxm", "b200-sxm", "a100-sxm-80gb"):
        hardware = load_hardware(name)
        shape: dict[str, Any] = {
            "batch": 1,
            "heads": 8,
            "kv_heads": 8,
            "head_dim": 128,
            "seq_q": 2**20,
            "seq_kv": 2**20,
        }
        times = {dtype: float(hardware.attention_time(**shape, dtype=dtype)) for dtype in ("bf16", "fp32")}
        assert times["fp32"] == pytest.approx(2 * times["bf16"], rel=0.02)
        flop = 2 * 8 * 2**40 * 0.5 * 2 * 128
        assert times["fp32"] >= flop / hardware.peak("tf32")

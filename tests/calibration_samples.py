"""Runs that the model itself makes, with known factors, for the tests of calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from planner.cluster import Cluster
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.questions.accuracy.prediction import predict
from planner.questions.calibrate.factors import with_factors
from planner.runs import Run
from planner.runs.measured import Measured
from planner.trainer import load_trainer
from planner.workload import Workload

_model = cache(load_model)
"""Runs of one model share it, as those that are read from a file do: they are priced in one call."""


HARDWARE = load_hardware("h100-sxm")
TRAINER = load_trainer("megatron").replace(host_time=7e-6, step_overhead=0.01, fragmentation=0.04)
"""With factors of their own, so that tests do not change with the library's."""


def run(name: str, model: str, gpus: int, sequence: int, **layout: int) -> Run:
    """One run of Megatron on H100s: the layout, and a global batch that follows from it."""
    known = {"tp": 1, "pp": 1, "cp": 1, "micro_batch_size": 1, "num_microbatches": 4, "zero": 1, **layout}
    one = Layout(dp=gpus // (known["tp"] * known["pp"] * known["cp"]), sequence_parallel=int(known["tp"] > 1), **known)
    batch = int(one.global_batch_size)
    return Run(
        source="sample", id=name, family="other", stated=True,
        workload=Workload(model=_model(model), sequence_length=sequence, global_batch_size=batch),
        cluster=Cluster(hardware=HARDWARE, num_gpus=gpus), trainer=TRAINER, layout=one,
    )  # fmt: skip


def sweep() -> list[Run]:
    """Runs that depend on everything: matrix products, small layers, tp, pipelines, one node and several."""
    return [
        run("large", "llama-3.1-8b", 8, 8192, micro_batch_size=2, num_microbatches=16),
        run("tp2", "llama-3.1-8b", 8, 8192, tp=2, micro_batch_size=2, num_microbatches=16),
        run("tp4", "llama-3.1-8b", 8, 4096, tp=4, num_microbatches=16),
        run("tp8", "llama-3.1-8b", 8, 4096, tp=8, num_microbatches=8),
        run("one-node-few", "llama-3.1-8b", 8, 8192, num_microbatches=1),
        run("nodes-2", "llama-3.1-8b", 16, 8192, num_microbatches=1),
        run("nodes-8", "llama-3.1-8b", 64, 8192, num_microbatches=1),
        run("nodes-8-short", "llama-3.1-8b", 64, 2048, num_microbatches=1),
        run("tp-nodes", "llama-3.1-8b", 16, 4096, tp=16, num_microbatches=8),
        run("tp-nodes-long", "llama-3.1-8b", 16, 8192, tp=16, num_microbatches=8),
        run("cp-nodes", "llama-3.1-8b", 32, 32768, cp=32, num_microbatches=8),
        run("small", "gpt3-350m", 8, 512, tp=8, num_microbatches=16),
        run("small-2", "gpt3-350m", 8, 512, tp=4, num_microbatches=64),
        run("small-wide", "gpt3-350m", 8, 2048, micro_batch_size=8, num_microbatches=8),
        run("loss", "llama-3.2-1b", 8, 4096, micro_batch_size=4, num_microbatches=2),
        run("pipeline", "llama-3.1-8b", 8, 8192, pp=4, num_microbatches=8),
        run("tiny-step", "gpt3-350m", 8, 512, num_microbatches=1),
    ]  # fmt: skip


def measured(runs: Sequence[Run], factors: Mapping[str, float], *, noise: float = 0.0, kind: str = "") -> list[Run]:
    """The runs with what the model predicts under known factors as their measurement, with noise if wanted."""
    random = np.random.default_rng(7)
    with_kind = [dataclasses.replace(one, measured=Measured(memory_kind=kind)) for one in runs]
    found = predict(with_factors(with_kind, factors))
    return [
        dataclasses.replace(
            one,
            measured=Measured(
                step_time=(answer.step_time or 0.0) * float(np.exp(noise * random.standard_normal())),
                memory=answer.memory if kind else None, memory_kind=kind, fits=True,
            ),
        )
        for one, answer in zip(runs, found, strict=True)
    ]  # fmt: skip

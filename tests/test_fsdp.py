"""FSDP: the unit that nothing hides, and what runs say about the reduction, the checkpoints and the compiler."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.cost.parameters import total_parameters
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.state_traffic import last_unit, reduce_and_gather
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.runs import Run, read_runs, rows_from_dict, shipped, to_run
from planner.trainer import load_trainer
from planner.workload import Workload

MODEL = load_model("llama-3-8b")
TABLE = MODEL.vocab_size * MODEL.hidden_size
LAYER = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096
"""Query, key and value, output, three matrices of the MLP, two norms."""


def unit_of(trainer: str, *, tied: bool = False, **layout: int) -> list[float]:
    """Parameters of the unit of the first, a middle and the last stage."""
    work = Workload(model=dataclasses.replace(MODEL, tied_embeddings=tied), global_batch_size=64, sequence_length=4096)
    some = Layout(**{"dp": 8, "zero": 3, "micro_batch_size": 1, "num_microbatches": 8} | layout)  # type: ignore[arg-type]
    stages = split_stages(work.model, some)
    parts = stage_parameters(work, some, stages)
    dense, expert = last_unit(work, load_trainer(trainer), some, stages, parts)
    return [float(x) for x in np.ravel(dense + expert)]


def test_unit_that_is_gathered_first_and_reduced_last() -> None:
    assert unit_of("fsdp")[0] == 2 * TABLE  # the root holds embedding and head
    assert unit_of("fsdp", tied=True)[0] == TABLE
    assert unit_of("torchtitan")[0] == TABLE > LAYER  # the embedding by itself
    assert unit_of("torchtitan", tp=8, dp=1, zero=3)[0] == max(TABLE, LAYER - 2 * 4096) / 8  # sharded over tp alike
    first, middle, last = unit_of("torchtitan", pp=4, dp=2)
    assert (first, middle, last) == (TABLE, LAYER, LAYER)  # the head has forward work before it and is no end


def test_what_nothing_hides_is_that_unit() -> None:
    """With work enough to hide the rest, a root of two tables costs what their traffic takes more than one table's."""
    hardware = dataclasses.replace(load_hardware("a100-sxm-80gb"), network_bandwidth=6.25e9)
    cluster = Cluster(hardware=hardware, num_gpus=64)
    work = Workload(model=MODEL, global_batch_size=512, sequence_length=8192)
    layout = Layout(dp=64, zero=3, micro_batch_size=8, num_microbatches=1)

    def traffic(tables: int) -> float:
        trainer = load_trainer("fsdp").replace(root_units=tables)
        return float(np.ravel(estimate(work, cluster, trainer, layout).time["data_communication"])[0])

    size = total_parameters(MODEL)
    gathered = cluster.collective_time("all_gather", 2.0 * size, 64.0, 1.0)
    reduced = cluster.collective_time("reduce_scatter", 4.0 * size, 64.0, 1.0)
    more = (gathered + reduced) * TABLE / size
    assert traffic(2) - traffic(1) == pytest.approx(float(more), rel=0.05)  # and one collective less


def test_every_unit_pays_the_latency_of_its_ring() -> None:
    """Without overlap a step gathers 32 layers and the root twice, and reduces them once."""
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=512)
    work = Workload(model=MODEL, global_batch_size=512, sequence_length=4096)
    trainer = load_trainer("fsdp").replace(overlap=frozenset(), copy_bytes={"reduce": 0.0})
    found = estimate(work, cluster, trainer, Layout(dp=512, zero=3, micro_batch_size=1, num_microbatches=1))
    size = total_parameters(MODEL) / 33
    gathered, reduced = (
        float(cluster.collective_time(op, width * size, 512.0, 1.0))
        for op, width in (("all_gather", 2.0), ("reduce_scatter", 4.0))
    )
    assert found.time["data_communication"][0] == pytest.approx(33 * (2 * gathered + reduced), rel=1e-9)
    whole = float(cluster.collective_time("all_gather", 2.0 * 33 * size, 512.0, 1.0))
    assert 33 * gathered - whole > 32 * 512 * 3e-6  # three microseconds per rank [profile, all_gather, fast]


def traffic_of(trainer: str, work: Workload, layout: Layout) -> list[float]:
    """Seconds of the first stage: reduce, gather, the ends of both; and the cluster's collectives by bytes."""
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=layout.num_gpus)
    stages = split_stages(work.model, layout)
    parts = stage_parameters(work, layout, stages)
    reduce, gather, ends = reduce_and_gather(work, cluster, load_trainer(trainer), layout, stages, parts)
    return [float(one[0, 0]) for one in (reduce, gather, ends[0] * reduce, ends[1] * gather)]


def test_the_end_is_one_collective_with_one_latency() -> None:
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=512)
    work = Workload(model=MODEL, global_batch_size=512, sequence_length=4096)
    layout = Layout(dp=512, zero=3, micro_batch_size=1, num_microbatches=1)
    _, _, last, first = traffic_of("torchtitan", work, layout)
    assert first == pytest.approx(float(cluster.collective_time("all_gather", 2.0 * TABLE, 512.0, 1.0)))
    assert last == pytest.approx(float(cluster.collective_time("reduce_scatter", 4.0 * TABLE, 512.0, 1.0)))


def test_experts_of_one_rank_and_tied_tables_are_no_units_of_their_own() -> None:
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=256)
    mixtral = Workload(model=load_model("mixtral-8x7b"), global_batch_size=256, sequence_length=4096)
    layout = Layout(dp=256, zero=3, micro_batch_size=1, num_microbatches=1)
    size = total_parameters(mixtral.model) / 33
    assert traffic_of("fsdp", mixtral, layout)[1] == pytest.approx(
        33 * float(cluster.collective_time("all_gather", 2.0 * size, 256.0, 1.0)), rel=1e-6
    )
    latency = float(cluster.collective_time("all_gather", 0.5, 256.0, 1.0))
    tied, untied = (
        dataclasses.replace(mixtral, model=dataclasses.replace(MODEL, tied_embeddings=tied)) for tied in (True, False)
    )
    both = [traffic_of("torchtitan", work, layout)[1] for work in (tied, untied)]
    table = float(cluster.collective_time("all_gather", 2.0 * TABLE, 256.0, 1.0))
    assert latency < both[1] - both[0] < 2 * table


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    files = [file for file in shipped() if "llm-foundry" in file.name]
    return {f"{run.source}/{run.id}": run for run in read_runs(files)}


def test_rows_of_april_2023_ran_on_torch_1(runs: dict[str, Run]) -> None:
    april, october = (
        runs[f"oss-llm-foundry-a100-80/{name}"].trainer
        for name in ("70b-seq2048-64gpu-mb8-ga4-ckpt", "13b-seq2048-8gpu-mb2-ga3-none")
    )
    assert (
        april.stored.recompute_stops_early,
        april.traffic.gradient_reduce_bytes,
        april.traffic.copied("reduce"),
    ) == (False, 2, 8)
    assert (
        october.stored.recompute_stops_early,
        october.traffic.gradient_reduce_bytes,
        october.traffic.copied("reduce"),
    ) == (True, 4, 18)
    assert april.kernels.loss_passes == october.kernels.loss_passes == pytest.approx((2 * 22 + 4 + 4) / 12, abs=0.01)


def test_hooks_of_a_gathered_layer_take_the_host_their_time() -> None:
    """16 tokens on 8 GPUs: L u more per pass where weights are gathered by layer, nothing where every rank has them all."""
    hardware, trainer = load_hardware("h100-sxm"), load_trainer("fsdp")
    work = Workload(model=MODEL, global_batch_size=8, sequence_length=16)
    cluster, without = Cluster(hardware=hardware, num_gpus=8), trainer.replace(unit_host_time=0.0)
    for zero, hooks in ((3, 2 * 32 * 0.8e-3), (0, 0.0)):
        layout = Layout(dp=8, zero=zero, num_microbatches=1)
        some, none = (float(estimate(work, cluster, one, layout).time["host"][0]) for one in (trainer, without))
        assert some - none == pytest.approx(hooks, rel=1e-3)
        assert none > 0


@pytest.mark.parametrize(
    ("framework", "reduced", "default"), [("fms-fsdp (PyTorch FSDP)", 2.0, True), ("PyTorch FSDP", 4.0, False)]
)
def test_compiled_rows_fuse_what_eager_ones_do_not(framework: str, reduced: float, default: bool) -> None:
    def run(compiled: bool | None) -> Run:
        (row,) = rows_from_dict({
            "source": {"id": "some"}, "hardware": {"gpu": "A100-80GB-SXM", "gpus_per_node": 8}, "framework": framework,
            "rows": [{
                "id": "a", "model": {"name": "llama2-7b", "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn": 11008,
                                     "gated": True, "vocab": 32000, "seq": 4096, "tied_embeddings": False},
                "parallel": {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero": 3}, "batch": {"micro": 2, "global": 16},
                "precision": "bf16", "recompute": "none", "compile": compiled, "measured": {"tokens_per_s_per_gpu": 4000.0},
            }],
        })  # fmt: skip
        return to_run(row)

    eager, compiled = run(False).trainer, run(True).trainer
    assert run(None).trainer.kernels == (compiled if default else eager).kernels
    assert compiled.traffic.gradient_reduce_bytes == eager.traffic.gradient_reduce_bytes == reduced
    assert (
        compiled.kernels.norm_passes < eager.kernels.norm_passes
        and compiled.kernels.rope_passes == 1 < eager.kernels.rope_passes
    )
    assert compiled.kernels.unfused - {"adam"} == {"projections"} and "swiglu" in eager.kernels.unfused

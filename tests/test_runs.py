"""Published runs in the planner's words: layouts, times, memory and networks of cases read by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planner import units
from planner.hardware import load_hardware
from planner.layout import Module, Recompute, Schedule
from planner.runs import FORMULAS, Row, Run, flop_per_token, read_rows


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


LAYOUTS: dict[str, dict[str, int]] = {
    # tp 8 x pp 35 x dp 1, three chunks of one layer per stage, core attention recomputed; 280 / (1 x 1) = 280.
    "nv-korthikanti-2022-table5/530b-present": {
        "tp": 8, "pp": 35, "dp": 1, "vpp": 3, "num_microbatches": 280, "sequence_parallel": 1, "zero": 0,
        "recompute": Recompute.SELECTIVE, "recompute_modules": Module.CORE_ATTENTION, "schedule": Schedule.INTERLEAVED,
    },
    # 78 layers over 12 stages, the last has one; 2048 / (1 x 8) = 256 microbatches; ZeRO-1 of BigScience.
    "oss-bloom-prequel-sweep/085-h13824-l78-a64-dp8-tp4-pp12-mbs1-gbs2048": {
        "tp": 4, "pp": 12, "dp": 8, "num_microbatches": 256, "last_stage_layers": 1, "recompute": Recompute.FULL,
    },
    # 30 layers + embedding + head = 32 over 8 stages: 3 on the first and last.
    "oss-zero-bubble-zb/t4-6p2B-p8-m24-b3-zb-2p": {
        "pp": 8, "micro_batch_size": 3, "num_microbatches": 24, "schedule": Schedule.ZB_2P, "first_stage_layers": 3,
        "last_stage_layers": 3,
    },
    "oss-zero-bubble-zb/t6-6p2B-p16-m48-b6-zb-v": {
        "pp": 16, "vpp": 2, "schedule": Schedule.ZBV, "num_microbatches": 48,
    },
    # FSDP over 64 GPUs, 2048 / (8 x 64) = 4.
    "oss-llm-foundry-a100-80/70b-seq2048-64gpu-mb8-ga4-ckpt": {
        "dp": 64, "zero": 3, "micro_batch_size": 8, "num_microbatches": 4, "recompute": Recompute.FULL,
    },
    # 126 layers + 2 = 128 over 8 stages: 15 on the first and last; sequence parallelism is not printed, NeMo uses it.
    "nv-dgxc-25.04-llama31-h100/405b-fp8-g512-b256": {
        "tp": 8, "pp": 8, "cp": 2, "dp": 4, "vpp": 8, "num_microbatches": 64, "sequence_parallel": 1,
        "first_stage_layers": 15, "last_stage_layers": 15,
    },
    # Layout text Et*4|(t*4|)*14tmL in 16 chunks: rank 0 has chunks 0 and 8 (4 + 4), rank 7 chunks 7 and 15 (4 + 1).
    "nv-mbridge-26.04.01-b200/deepseek-v3-mxfp8-g256-b4096-m1-tp1pp8cp1vp2ep32": {
        "pp": 8, "vpp": 2, "ep": 32, "etp": 1, "dp": 32, "first_stage_layers": 8, "last_stage_layers": 5,
        "recompute": Recompute.SELECTIVE, "recompute_modules": Module.MLA_UP_PROJECTION | Module.MLP,
    },
    # All 80 layers, five of the printed variants.
    "oss-yafsdp-fsdp-a100/llama3-70b-256gpu-seq2048": {
        "dp": 256, "zero": 3, "recompute": Recompute.FULL, "recompute_layers": 20,
    },
    # ZeRO-1 groups of 8 are all 8 ranks here; TP 1, so no sequence parallelism.
    "oss-internevo-7b-a100/tgs-tp1-z8-8gpu": {"dp": 8, "zero": 1, "dp_shard": 0, "num_microbatches": 4},
    # Context parallel by all-gather of keys and values (torchtitan), Ulysses (DeepSpeed).
    "oss-torchtitan-h100-202412/8b-8-fsdp4-cp2-seq65536": {"cp": 2, "dp": 4, "cp_method": 2, "zero": 3},
    "oss-distflashattn-table1/ulysses-16gpu-256k-llama-7b": {"cp": 16, "dp": 1, "cp_method": 1},
    "oss-mlengineering-llama8b-b200/z3-ckpt-offload-8k": {"dp": 8, "zero": 3, "offload_optimizer": 100},
    # MCore: tp 4 x cp 4 x dp 2 = 32 ranks of a stage = ep 32, so experts cannot be split by tp as well.
    # What waits in host memory, said in notes and in the framework.
    "answerai-fsdp-qlora-4090/7b-lora-offload-b10": {"dp": 2, "zero": 3, "offload_parameters": 1, "offload_optimizer": 0},
    "oss-easycontext-a100/128k-ring": {"offload_parameters": 1},
    "trl-pr6845-long-context-h100/qwen3-8b-1m": {"offload_activations": 1, "offload_layers": 0, "offload_parameters": 0},
    "nv-mbridge-26.04-gb200/llama3-70b-fp8-g64-b256-m2-tp1pp1cp1vp1ep1-fsdp": {"offload_activations": 1, "offload_layers": 40},
    "nv-modelzoo-qwen3-gb200/235b-mxfp8-131k": {
        "tp": 4, "cp": 4, "dp": 2, "ep": 32, "etp": 1, "first_stage_layers": 23,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_a_row(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.unsupported == "" and run.layout is not None
    assert {field: int(getattr(run.layout, field)) for field in LAYOUTS[name]} == LAYOUTS[name]


STEP_TIMES = {
    "nv-korthikanti-2022-table5/530b-present": 37.83,  # printed
    # 2048 sequences of 2048 tokens on 64 GPUs at 410 tokens/s each
    "oss-llm-foundry-a100-80/70b-seq2048-64gpu-mb8-ga4-ckpt": 2048 * 2048 / (64 * 410.0),
    # 384 sequences of 1024 on 8 GPUs at 13926.4
    "oss-zero-bubble-1f1b/t4-1p5B-p8-m64-b6-1f1b": 384 * 1024 / (8 * 13926.4),
    # 256 sequences of 4096 on 128 GPUs at 662.14
    "oss-ultrascale-nanotron-80p0b/dp1-tp4-pp32-acc256-mbs1-z0": 256 * 4096 / (128 * 662.14),
    # 8 x 8192 tokens on 8 GPUs, 6 N (head counted, table not) + 6 L a d s causal, at 167 TFLOP/s
    "oss-mlengineering-llama8b-b200/z3-ckpt-offload-8k": (6 * 7.505e9 + 6 * 32 * 4096 * 8192) * 8192 / 167e12,
}


@pytest.mark.parametrize("name", STEP_TIMES)
def test_measured_step_time(name: str, runs: dict[str, Run]) -> None:
    assert runs[name].measured.step_time == pytest.approx(STEP_TIMES[name], rel=1e-3)
    assert runs[name].measured.fits is True


def test_step_time_from_printed_tflops_of_sc21(runs: dict[str, Run], rows: list[Row]) -> None:
    """Eq. 3 of SC'21 by hand for figure 11, one pipeline stage: 96 B s L h^2 (1 + s/6h + V/16Lh)."""
    row = next(row for row in rows if row.source == "nv-sc21-figures" and row.id == "fig11-p1-b8")
    b = row.get("batch.global")
    s, layers, h, v = (row.get(f"model.{key}") for key in ("seq", "layers", "hidden", "vocab"))
    flop = 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    expected = flop / (8 * row.get("measured.tflops_per_gpu") * 1e12)
    assert runs["nv-sc21-figures/fig11-p1-b8"].measured.step_time == pytest.approx(expected, rel=1e-9)


def test_formulas_reproduce_what_sources_print_beside_their_times(rows: list[Row], runs: dict[str, Run]) -> None:
    """Sources that print both tokens/s and TFLOP/s: the formula of their framework gives the printed figure."""
    cases = {
        "nv-mbridge-25.11-gb200": "causal", "nv-nemo-2407-h100-pretrain": "full",
        "nv-mcore-llama3-example-h100": "full", "oss-ultrascale-nanotron-8p86b": "full",
        "oss-internevo-7b-a100": "narayanan",
    }  # fmt: skip
    for source, formula in cases.items():
        ratios = []
        for row in rows:
            run = runs[f"{row.source}/{row.id}"]
            speed, printed = row.get("measured.tokens_per_s_per_gpu"), row.get("measured.tflops_per_gpu")
            if row.source == source and speed and printed and run.workload and run.layout:
                recomputed = row.get("measured.tflops_kind") == "hardware" and int(run.layout.recompute) == 2
                flop = flop_per_token(formula, run.workload.model, run.workload.sequence_length, recomputed=recomputed)
                ratios.append(flop * speed / (printed * 1e12))
        assert np.median(ratios) == pytest.approx(1.0, abs=0.01), source
    assert set(cases.values()) <= set(FORMULAS)


MEMORY = {
    "oss-simumax-b200-v1p2/deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef": ("allocated", 45.63 * units.GIB),
    "nv-mcore-golden-a100/tp1-pp4": ("allocated", 60.489e9),  # GB of 10^9 say the notes
    "oss-torchtitan-h100-202412/8b-fsdp8-eager-bf16": ("reserved", 82.4 * units.GIB),
    "oss-ultrascale-nanotron-80p0b/dp1-tp4-pp16-acc256-mbs1-z0-gqa8": ("reserved", 63.07 * units.GIB),
    "oss-bigscience-104b-v100-32gb/bnb-tp4-pp16": ("device", 31.0 * units.GIB),
    "oss-bloom-prequel-sweep/best-fp16-8gpu-tp8-pp1": ("device", None),
}


@pytest.mark.parametrize("name", MEMORY)
def test_kind_of_measured_memory(name: str, runs: dict[str, Run]) -> None:
    kind, value = MEMORY[name]
    assert runs[name].measured.memory_kind == kind
    if value is not None:
        assert runs[name].measured.memory == pytest.approx(value)


def test_network_of_a_node_is_shared_by_its_gpus(runs: dict[str, Run]) -> None:
    def bandwidth(name: str) -> float:
        cluster = runs[name].cluster
        assert cluster is not None
        return cluster.hardware.network_bandwidth

    assert bandwidth("oss-bloom-prequel-sweep/085-h13824-l78-a64-dp8-tp4-pp12-mbs1-gbs2048") == 4 * 100e9 / 8 / 8
    assert bandwidth("oss-llm-foundry-a100-80/70b-seq2048-64gpu-mb8-ga4-ckpt") == 1600e9 / 8 / 8
    assert bandwidth("oss-bigscience-1b3-v100-16gb/ckpt-tp1-pp1-mbs1") == 100e9 / 8
    assert bandwidth("oss-bigscience-104b-v100-32gb/bnb-tp4-pp16") == 0.15 * 100e9 / 8, "its own benchmark reaches that share"
    assert bandwidth("oss-torchtitan-h100-202412/8b-fsdp8-eager-bf16") == 400e9 / 8
    rack = runs["nv-mlperf-v50-lora-gb200/lora-144"].cluster
    assert rack is not None and (rack.hardware.gpus_per_node, rack.hardware.scale_up_domain) == (4, 72)
    box = runs["oss-bigscience-104b-v100-32gb/bnb-tp4-pp16"].cluster
    assert box is not None and (box.hardware.gpus_per_node, box.hardware.scale_up_domain) == (4, 4)


def test_job_with_checked_collectives_keeps_its_network(runs: dict[str, Run]) -> None:
    """All-gather 51.09 and reduce-scatter 49.99 GB/s over 64 ranks: 20.9 ms for 1 GiB where the network needs 5.5 ms."""
    run = runs["oss-ultrascale-nanotron-80p0b/dp1-tp4-pp16-acc256-mbs1-z0-gqa8"]
    assert run.cluster is not None and run.family == "nanotron network checked" and run.trainer is not None
    assert run.cluster.hardware.network_bandwidth == 50e9
    assert run.set_aside.startswith("every collective was checked on the host first") and not run.representative
    early = runs["oss-ultrascale-nanotron-1p34b/dp16-tp16-pp1-acc8-mbs2-z0"]
    assert early.trainer is not None and early.representative and early.family.endswith("normal")


def test_slow_allocation_gets_its_measured_network(runs: dict[str, Run]) -> None:
    """40 GB/s over 32 ranks as over 8: another network, not host work that grows with the ranks."""
    run = runs["oss-ultrascale-nanotron-8p86b/dp4-tp4-pp2-acc8-mbs8-z1"]
    assert run.cluster is not None and run.family == "nanotron network slow"
    assert 5e9 < run.cluster.hardware.network_bandwidth < 10e9
    # Not the machine that its source states, NVLink and 3200 Gb/s a node: it counts in no summary.
    assert run.set_aside.startswith("its own benchmark reads less than half") and not run.representative and run.stated
    # The cluster's own network keeps 6 GiB on each GPU; a job on another reserves 77 of 79.2 GiB.
    normal = runs["oss-ultrascale-nanotron-8p86b/dp4-tp4-pp1-acc16-mbs4-z1"].cluster
    assert normal is not None and normal.hardware.context_memory == 6 * 2**30
    assert run.cluster.hardware.context_memory == load_hardware("h100-sxm").context_memory
    for other in runs.values():
        if other.cluster is not None and other.source.startswith("oss-ultrascale"):
            assert other.cluster.hardware.network_bandwidth <= 50e9


def test_trainer_and_workload_of_a_row(runs: dict[str, Run]) -> None:
    sync = runs["oss-bloom-prequel-sweep/launch-sync-80gpu-gbs512"].trainer
    assert sync is not None and sync.traffic.overlap == frozenset() and sync.kernels.attention == "unfused"
    kernel = runs["oss-hagemann2023-llama13b-2k-64gpu/fa2rms-none-tp2-pp2-mbs1"].trainer
    assert kernel is not None and (kernel.kernels.attention, kernel.kernels.norm_passes, kernel.stored.dropout) == (
        "flash",
        1.0,
        False,
    )
    plain = runs["oss-hagemann2023-llama13b-2k-64gpu/torch-full-tp2-pp2-mbs8"].trainer
    assert plain is not None and plain.kernels.attention == "unfused" and plain.kernels.norm_passes > 1
    overlap = runs["nv-mbridge-26.04.01-gb200/gpt-oss-120b-bf16-g64-b1280-m4-tp1pp1cp1vp1ep64"]
    assert overlap.trainer is not None and "ep" in overlap.trainer.traffic.overlap
    assert overlap.workload is not None and overlap.workload.model.num_windowed_layers == 18
    graphs = runs["nv-mbridge-26.04.01-b200/deepseek-v3-mxfp8-g256-b4096-m1-tp1pp8cp1vp2ep32"]
    assert graphs.trainer is not None and graphs.trainer.host.graphs and graphs.workload is not None
    assert graphs.workload.precision == "mxfp8" and graphs.workload.model.kv_lora_rank == 512
    assert graphs.workload.model.mtp_layers == 1
    lora = runs["nv-mlperf-v50-lora-gb200/lora-144"].workload
    assert lora is not None and lora.lora_rank == 16 and lora.precision == "fp8"
    sizes = runs["oss-bigscience-104b-v100-32gb/bnb-tp4-pp16"].workload
    assert sizes is not None and sizes.optimizer == "adam_8bit" and sizes.model.position == "learned"


def test_vocabulary_from_published_parameters(runs: dict[str, Run]) -> None:
    """28.3e9 = 62 x 12 x 6144^2 + biases and norms + tied table: between 25 and 45 thousand tokens."""
    run = runs["oss-zero-bubble-1f1b/t4-28p3B-p32-m128-b1-1f1b"]
    assert run.workload is not None and 25_000 < run.workload.model.vocab_size < 45_000


def test_what_was_assumed_is_said(runs: dict[str, Run]) -> None:
    run = runs["oss-megascale-175b/megascale-256gpu-gbs768"]
    assert "micro batch: what is fastest and fits" in run.assumptions and not run.stated
    broken = runs["oss-ultrascale-nanotron-80p0b/dp1-tp1-pp8-acc16-mbs16-z0"]
    assert not broken.representative and "fix of its pipeline engine" in broken.set_aside


UNSUPPORTED = {
    "nv-korthikanti-2022-table4/22b-layer-sp": "no step time",
    "nv-nemo-longseq-h100/32k-nocp": "layout not stated: tp, pp",
    "nv-megatron-readme-2020-a100/1b": "model not stated: seq",
    "oss-bigscience-gpt2-v100-32gb/hf-z2-oom": "host memory",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_reasons(name: str, runs: dict[str, Run]) -> None:
    assert UNSUPPORTED[name] in runs[name].unsupported
    assert runs[name].layout is None


def test_every_row_maps_or_says_why(runs: dict[str, Run]) -> None:
    assert len(runs) > 4200
    for name, run in runs.items():
        parts = (run.workload, run.cluster, run.trainer, run.layout)
        assert all(part is None for part in parts) == bool(run.unsupported), name
        assert not run.unsupported.startswith("not a valid run"), (name, run.unsupported)
        if run.layout is not None and run.cluster is not None:
            assert int(run.layout.num_gpus) == run.cluster.num_gpus, name
            assert run.measured.fits is not None, name
    stated = [run for run in runs.values() if run.stated]
    assert sum(not run.unsupported for run in stated) >= 0.95 * len(stated)


def test_launch_scripts_say_what_graphs_hold(runs: dict[str, Run]) -> None:
    """NeMo's launcher of 25.05: with experts of a fixed number of rows a graph holds the whole layer, else what has no experts."""
    said = {
        "nv-dgxc-25.05-grok1-gb200/grok1-bf16-g128-b256": "layers_and_experts",
        "nv-dgxc-25.05-nemotron4-gb200/340b-weak-bf16-g128-b32": "layers",
        "nv-dgxc-25.05-llama4-h100/maverick-fp8-g512-b1024": "layers_and_experts",
        "nv-dgxc-25.05-llama4-h100/maverick-bf16-g512-b1024": "static_experts",
    }
    found = {name: runs[name].trainer for name in said}
    assert {name: trainer.host.cuda_graphs for name, trainer in found.items() if trainer is not None} == said
    ultra = runs["nv-mbridge-26.08-gb200/nemotron-3-ultra-mxfp8-g256-b256-m1-tp2pp1cp1vp1ep64"].trainer
    assert ultra is not None and "tp" not in ultra.traffic.overlap  # its recipe sets no overlap


def test_llama_3_is_interleaved_by_single_layers_and_counts_flop_as_palm(runs: dict[str, Run]) -> None:
    """128 places on 16 ranks, embedding and head one each: chunks of one layer. 6 N + 12 L a d s FLOP per token behind its MFU."""
    run = runs["oss-llama3-405b-table4/8192gpu"]
    assert run.layout is not None and run.workload is not None and run.measured.step_time is not None
    assert (int(run.layout.vpp), int(run.layout.schedule), int(run.layout.first_stage_layers)) == (8, Schedule.INTERLEAVED, 7)
    flop = flop_per_token("palm", run.workload.model, 8192)
    assert run.measured.step_time == pytest.approx(flop * run.workload.tokens / 8192 / 430e12)

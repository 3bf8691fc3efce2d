"""Published runs in the planner's words: cases read by hand, files that are broken, and the accuracy report."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import library, units
from planner.accuracy import accuracy, kendall_tau, pairs_of, predict, summarise, summary_rows
from planner.accuracy.bias import bias_interval
from planner.errors import PlannerError
from planner.layout import Module, Recompute, Schedule
from planner.runs import FORMULAS, Row, Run, flop_per_token, read_rows, read_runs, rows_from_dict, to_run

RUNS = Path(__file__).parent.parent / "profiles" / "runs"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read_rows()


@pytest.fixture(scope="module")
def runs(every_run: list[Run]) -> dict[str, Run]:
    return {f"{run.source}/{run.id}": run for run in every_run}


# ------------------------------------------------------------------------------------------------ cases read by hand

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
    "oss-vtrain-single-node/h1024-l24-g8-tp2-dp2-pp2-mbs4-gbs32": {
        "tp": 2, "pp": 2, "dp": 2, "num_microbatches": 4, "zero": 0, "sequence_parallel": 0,
        "recompute": Recompute.FULL,
    },
    # Context parallel by all-gather of keys and values (torchtitan), Ulysses (DeepSpeed).
    "oss-torchtitan-h100-202412/8b-8-fsdp4-cp2-seq65536": {"cp": 2, "dp": 4, "cp_method": 2, "zero": 3},
    "oss-distflashattn-table1/ulysses-16gpu-256k-llama-7b": {"cp": 16, "dp": 1, "cp_method": 1},
    "oss-mlengineering-llama8b-b200/z3-ckpt-offload-8k": {"dp": 8, "zero": 3, "offload_optimizer": 100},
    # MCore: tp 4 x cp 4 x dp 2 = 32 ranks of a stage = ep 32, so experts cannot be split by tp as well.
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
    # 256 sequences of 4096 on 64 GPUs at 664.99
    "oss-ultrascale-nanotron-80p0b/dp1-tp4-pp16-acc256-mbs1-z0-gqa8": 256 * 4096 / (64 * 664.99),
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
    assert bandwidth("oss-bigscience-104b-v100-32gb/bnb-tp4-pp16") == 100e9 / 8
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
    assert run.trainer.collective_check == pytest.approx((20.9e-3 - 5.5e-3) / 64, rel=0.05)
    early = runs["oss-ultrascale-nanotron-1p34b/dp16-tp16-pp1-acc8-mbs2-z0"]
    assert early.trainer is not None and early.trainer.collective_check == 0 and early.family.endswith("normal")


def test_slow_allocation_gets_its_measured_network(runs: dict[str, Run]) -> None:
    """40 GB/s over 32 ranks as over 8: another network, not host work that grows with the ranks."""
    run = runs["oss-ultrascale-nanotron-8p86b/dp4-tp4-pp2-acc8-mbs8-z1"]
    assert run.cluster is not None and run.family == "nanotron network slow"
    assert 5e9 < run.cluster.hardware.network_bandwidth < 10e9
    for other in runs.values():
        if other.cluster is not None and other.source.startswith("oss-ultrascale"):
            assert other.cluster.hardware.network_bandwidth <= 50e9


def test_trainer_and_workload_of_a_row(runs: dict[str, Run]) -> None:
    sync = runs["oss-bloom-prequel-sweep/launch-sync-80gpu-gbs512"].trainer
    assert sync is not None and sync.overlap == frozenset() and sync.attention == "unfused"
    kernel = runs["oss-hagemann2023-llama13b-2k-64gpu/fa2rms-none-tp2-pp2-mbs1"].trainer
    assert kernel is not None and (kernel.attention, kernel.norm_passes, kernel.dropout) == ("flash", 1.0, False)
    plain = runs["oss-hagemann2023-llama13b-2k-64gpu/torch-full-tp2-pp2-mbs8"].trainer
    assert plain is not None and plain.attention == "unfused" and plain.norm_passes > 1
    overlap = runs["nv-mbridge-26.04.01-gb200/gpt-oss-120b-bf16-g64-b1280-m4-tp1pp1cp1vp1ep64"]
    assert overlap.trainer is not None and "ep" in overlap.trainer.overlap
    assert overlap.workload is not None and overlap.workload.model.num_windowed_layers == 18
    graphs = runs["nv-mbridge-26.04.01-b200/deepseek-v3-mxfp8-g256-b4096-m1-tp1pp8cp1vp2ep32"]
    assert graphs.trainer is not None and graphs.trainer.cuda_graphs and graphs.workload is not None
    assert graphs.workload.precision == "mxfp8" and graphs.workload.model.kv_lora_rank == 512
    assert graphs.workload.model.mtp_layers == 1
    lora = runs["nv-mlperf-v50-lora-gb200/lora-144"].workload
    assert lora is not None and lora.lora_rank == 16 and lora.precision == "fp8"
    sizes = runs["oss-bigscience-104b-v100-32gb/bnb-tp4-pp16"].workload
    assert sizes is not None and sizes.optimizer == "adam_8bit" and sizes.model.position == "learned"
    vtrain = runs["oss-vtrain-single-node/h1024-l24-g8-tp2-dp2-pp2-mbs4-gbs32"]
    assert vtrain.workload is not None and vtrain.workload.precision == "fp16"


def test_vocabulary_from_published_parameters(runs: dict[str, Run]) -> None:
    """28.3e9 = 62 x 12 x 6144^2 + biases and norms + tied table: between 25 and 45 thousand tokens."""
    run = runs["oss-zero-bubble-1f1b/t4-28p3B-p32-m128-b1-1f1b"]
    assert run.workload is not None and 25_000 < run.workload.model.vocab_size < 45_000


def test_what_was_assumed_is_said(runs: dict[str, Run]) -> None:
    run = runs["oss-megascale-175b/megascale-256gpu-gbs768"]
    assert "micro batch 1" in run.assumptions and not run.stated
    assert not runs["oss-ultrascale-nanotron-80p0b/dp1-tp1-pp8-acc16-mbs16-z0"].representative


UNSUPPORTED = {
    "nv-korthikanti-2022-table4/22b-layer-sp": "no step time",
    "nv-moe-folding-table4/8x22b-tp-ep-dp-128": "layout not stated: micro",
    "nv-nemo-launcher-a100/175b-n8-3579cdb3": "layout not stated: tp, pp",
    "nv-megatron-readme-2020-a100/1b": "model not stated: seq",
    "oss-bigscience-gpt2-v100-32gb/hf-z2-oom": "host memory",
    "oss-easycontext-a100/128k-ring": "weights live in host memory",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_reasons(name: str, runs: dict[str, Run]) -> None:
    assert UNSUPPORTED[name] in runs[name].unsupported
    assert runs[name].layout is None


def test_every_row_maps_or_says_why(runs: dict[str, Run]) -> None:
    assert len(runs) > 5600
    for name, run in runs.items():
        parts = (run.workload, run.cluster, run.trainer, run.layout)
        assert all(part is None for part in parts) == bool(run.unsupported), name
        assert not run.unsupported.startswith("not a valid run"), (name, run.unsupported)
        if run.layout is not None and run.cluster is not None:
            assert int(run.layout.num_gpus) == run.cluster.num_gpus, name
            assert run.measured.fits is not None, name
    stated = [run for run in runs.values() if run.stated]
    assert sum(not run.unsupported for run in stated) >= 0.95 * len(stated)


# ------------------------------------------------------------------------------------------------ files of users

GOOD: dict[str, Any] = {
    "source": {"id": "mine"},
    "hardware": {"gpu": "H100-80GB-SXM", "gpus_per_node": 8, "inter_node": "8x NDR InfiniBand 400 Gb/s"},
    "framework": "megatron-core (2026)",
    "defaults": {"precision": "bf16", "parallel": {"gpus": 16, "tp": 2, "pp": 2, "vpp": 1}},
    "rows": [
        {
            "id": "a",
            "model": {"name": "llama3-8b", "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336,
                      "gated": True, "vocab": 128256, "seq": 8192, "attention": "gqa", "params_b": 8.03},
            "parallel": {"dp": 4, "zero": 1},
            "batch": {"micro": 1, "global": 64},
            "recompute": "selective: layernorm, core_attn",
            "measured": {"step_s": 6.5, "mem_gb": 50.0},
            "notes": "peak allocated",
        }
    ],
}  # fmt: skip


def test_user_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(GOOD))
    (run,) = read_runs([path])
    assert run.unsupported == "" and run.layout is not None and run.source == "mine"
    assert (run.layout.tp, run.layout.dp, run.layout.num_microbatches, run.layout.sequence_parallel) == (2, 4, 16, 1)
    assert run.layout.recompute_modules == Module.NORM | Module.CORE_ATTENTION
    report = accuracy([tmp_path])
    (entry,) = report["runs"]
    assert entry["status"] == "predicted" and entry["reason"] == ""
    assert entry["step_time_s"]["measured"] == 6.5 and 1 < entry["step_time_s"]["predicted"] < 60
    low, high = entry["memory_gib"].pop("range")
    assert low < entry["memory_gib"]["predicted"] < high
    assert entry["memory_gib"] == {"measured": 50.0, "predicted": entry["memory_gib"]["predicted"], "kind": "allocated"}
    assert entry["fits"]["measured"] is True and 0 <= entry["fits"]["probability"] <= 1
    assert report["summary"]["coverage"]["predicted_of_stated"] == 1.0
    json.dumps(report)


def _with(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


BROKEN = [
    (("rows", 0, "parallel", "tp"), "two", "row a: parallel: tp is 'two'; it must be a whole number of at least 0"),
    (("rows", 0, "parallel", "gpu"), 2, "file: row a: parallel: unknown key 'gpu'; nearest: gpus"),
    (("rows", 0, "measured"), ..., "file: row a: missing key 'measured'"),
    (("rows", 0, "id"), ..., "file: row 1: missing key 'id'"),
    (("rows", 0, "batch"), 8, "file: row a: batch: expected a mapping of keys to values, found 8"),
    (("rows", 0, "measured", "step_s"), -1.0, "measured: step_s is -1.0; it must be a number of at least 0"),
    (("rows", 0, "flash_attention"), "yes", "row a: flash_attention is 'yes'; it must be true or false"),
    (("rows",), {}, "file: rows is {}; it must be a list"),
    (("rows",), [GOOD["rows"][0], GOOD["rows"][0]], "file: row a: this id appears twice; ids must be unique in a file"),
    (("hardware", "gpu"), ..., "file: hardware: missing key 'gpu'"),
    (("framework",), ..., "file: missing key 'framework'"),
    (("extra",), 1, "file: unknown key 'extra'"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), BROKEN)
def test_broken_file(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    with pytest.raises(PlannerError) as error:
        rows_from_dict(_with(path, value), where="file")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_broken_paths(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="no such file or directory of runs"):
        read_runs([tmp_path / "nothing.yaml"])
    with pytest.raises(PlannerError, match=r"no \.yaml file of runs"):
        read_runs([tmp_path])
    (tmp_path / "bad.yaml").write_text("rows: [1\nsource: {")
    with pytest.raises(PlannerError, match=r"bad\.yaml line 2"):
        read_runs([tmp_path])


SURPRISES = [
    (("hardware", "gpu"), "TPU v5", "GPU 'TPU v5' is not in profiles/frameworks.yaml"),
    (("rows", 0, "recompute"), "some", "recompute 'some' is not understood"),
    (("rows", 0, "parallel", "dp"), 3, "tp 2 times pp 2 times cp 1 times dp 3 are not the 16 GPUs stated"),
    (("rows", 0, "batch", "global"), 2, "global batch 2 is smaller than micro batch 1 times dp 4"),
    (("rows", 0, "parallel", "zero"), 7, "zero 7 does not exist"),
    (("rows", 0, "precision"), "fp3", "unknown precision 'fp3'"),
    (("rows", 0, "model", "heads"), 31, "31 heads do not divide by tp 2"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), SURPRISES)
def test_row_that_cannot_be_priced_says_why(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    (row,) = rows_from_dict(_with(path, value), where="file")
    assert sentence in to_run(row).unsupported


def _with_recipe(source: str, row_id: str, **changes: Any) -> Run:
    """The good row as one of another source, with its recipe."""
    data = _with(("source", "id"), source)
    data["rows"][0] |= {"id": row_id, "recompute": None, **changes}
    (row,) = rows_from_dict(data, where="file")
    run = to_run(row)
    assert not run.unsupported and run.trainer and run.layout and run.cluster and run.workload
    return run


def test_recipes_of_releases_fill_what_pages_leave_out() -> None:
    """Facts of a release are found by its source and the row's id, and are read like notes of the row."""
    flex = _with_recipe("nv-mbridge-25.11-gb200", "qwen3-235b-a22b-bf16").trainer
    assert flex and flex.expert_dispatch == "deduplicated" and flex.cuda_graphs and not flex.static_experts
    plain = _with_recipe("nv-mbridge-25.11-b200", "qwen3-235b-a22b-bf16").trainer
    assert plain and plain.expert_dispatch == "alltoall" and not plain.cuda_graphs
    tuned = _with_recipe("nv-mbridge-25.11-h100", "gpt-oss-120b").layout
    assert tuned and tuned.recompute_modules == Module.NORM | Module.MLP_ACTIVATION
    packed = _with_recipe("nv-dgxc-25.04-llama3-finetune-h100", "8b-lora").workload
    assert packed and (packed.document_length, packed.lora_targets) == (200, "qkv")
    cluster = _with_recipe("oss-simumax-b200-v1p2", "any").cluster
    assert cluster and cluster.hardware.sustained_clock == 0.735


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("dispatcher deepep", {"expert_dispatch": "deepep", "cuda_graphs": False, "fused_experts": False}),
        ("cuda graphs transformer_engine/['attn']", {"cuda_graphs": True, "static_experts": False}),
        ("cuda graphs none/full_iteration", {"cuda_graphs": False, "static_experts": False}),
        ("cuda graphs full_iteration/[]", {"cuda_graphs": True, "static_experts": True}),
        ("fused grouped MLP, fp8 attention", {"fused_experts": True, "attention_dtype": "fp8"}),
        ("tokendrop", {"static_experts": True}),
    ],
)
def test_notes_say_what_the_trainer_did(notes: str, expected: dict[str, Any]) -> None:
    trainer = _with_recipe("any", "any", notes=notes).trainer
    assert trainer and {name: getattr(trainer, name) for name in expected} == expected
    assert ("grouped_gemm" in trainer.unfused) != trainer.fused_experts


def test_pipelines_of_deepseek_v3() -> None:
    """64 slots for 61 layers, the module of token prediction and the two ends: the last stage has one layer at pp 16."""
    found = {
        run.id: run.layout for run in read_runs([library.profiles_directory() / "runs" / "nv-mbridge-25.11-b200.yaml"])
    }
    layout = next(one for name, one in found.items() if name.startswith("deepseek-v3"))
    assert layout and (layout.pp, layout.first_stage_layers, layout.last_stage_layers) == (16, 4, 1)


def test_unknown_framework_is_priced_and_says_as_what() -> None:
    (row,) = rows_from_dict(_with(("framework",), "my own"), where="file")
    run = to_run(row)
    assert run.unsupported == ""
    assert any(
        "framework 'my own' is not in profiles/frameworks.yaml: priced as megatron" in one for one in run.assumptions
    )


_LEAVES = [
    ("source", "id"), ("hardware", "gpu"), ("hardware", "gpus_per_node"), ("hardware", "inter_node"), ("framework",),
    ("defaults",), ("defaults", "parallel"), ("rows",), ("rows", 0), ("rows", 0, "id"), ("rows", 0, "recompute"),
    ("rows", 0, "notes"), ("rows", 0, "precision"), ("rows", 0, "optimizer"),
    *(("rows", 0, "model", key) for key in GOOD["rows"][0]["model"]),
    *(("rows", 0, "model", key) for key in ("experts", "topk", "moe_ffn", "shared_experts", "dense_layers", "window")),
    *(("rows", 0, "parallel", key) for key in ("gpus", "tp", "pp", "dp", "cp", "ep", "etp", "vpp")),
    *(("rows", 0, "parallel", key) for key in ("zero", "shard", "sp")),
    ("rows", 0, "batch", "micro"), ("rows", 0, "batch", "global"), ("rows", 0, "measured", "step_s"),
    ("rows", 0, "measured", "mfu"), ("rows", 0, "measured", "oom"), ("rows", 0, "measured", "tflops_per_gpu"),
]  # fmt: skip
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), st.text(max_size=12), st.just([]),
    st.just({}), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([
        "mla", "full", "3 layers full", "selective: mlp", "LoRA", "8x 400 Gb/s", "0 Gb/s", "pp layout (t*9|)*999999999",
        "world AR/AG/RS 0/0/0 GB/s", "world AR/AG/RS 1.2.3/4/5 GB/s", "last stage has 99 layer", "deepseek-v3", ".",
        "schedule: zb-v", "cuda graphs none/x", "padded to 40 (TP 8) or 48 (TP 16)",
    ]),
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(_LEAVES), _VALUES), min_size=1, max_size=4))
def test_fuzzed_files_raise_planner_errors_only(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    data = copy.deepcopy(GOOD)
    for path, value in changes:
        place: Any = data
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
        except (TypeError, KeyError, IndexError):
            continue
    try:
        rows = rows_from_dict(data, where="file")
    except PlannerError as error:
        assert "\n" not in str(error)
        return
    runs = [to_run(row) for row in rows]
    for run, answer in zip(runs, predict(runs), strict=True):
        assert bool(run.unsupported) <= bool(answer.refused)
    summary_rows(summarise(pairs_of(runs)))


# ------------------------------------------------------------------------------------------------ the report


def test_a_bias_is_as_certain_as_there_are_kinds_of_runs() -> None:
    three = [-0.1] * 30 + [0.0] * 30 + [0.2] * 30
    assert bias_interval(three, ["a"] * 30 + ["b"] * 30 + ["c"] * 30) == (-0.1, 0.2)  # two of three a: 7 of 27 draws
    low, high = bias_interval(three, list(range(90))) or (9, 9)
    assert (low, high) == (0.0, 0.0)  # 46 of 90 from one end: never in 400 draws
    assert bias_interval([0.1, 0.3], ["a", "b"]) is None
    assert bias_interval([0.05] * 7, list(range(7))) == (0.05, 0.05)


def test_kendall_tau() -> None:
    order = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(order, order) == pytest.approx(1.0)
    assert kendall_tau(order, -order) == pytest.approx(-1.0)
    assert kendall_tau(order, np.ones(4)) is None
    # Pairs: 5 of 6 agree, none tied: (5 - 1) / 6.
    assert kendall_tau(order, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)
    # One pair tied in the second: (5 - 0) / sqrt(6 x 5).
    assert kendall_tau(order, np.array([1.0, 2.0, 2.0, 4.0])) == pytest.approx(5 / 30**0.5)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    sources = ("nv-korthikanti-2022-table5", "oss-zero-bubble-1f1b", "oss-hagemann2023-llama13b-2k-64gpu",
               "oss-simumax-b200-v1p2", "nv-mlperf-v31-gpt3-h100", "nv-moe-folding-table4")  # fmt: skip
    return accuracy([RUNS / f"{source}.yaml" for source in sources])


def test_report_is_plain_data_and_counts_add_up(report: dict[str, Any]) -> None:
    json.dumps(report, allow_nan=False)
    summary = report["summary"]
    predicted = [run for run in report["runs"] if run["status"] == "predicted"]
    assert summary["coverage"]["rows"] == len(report["runs"])
    assert summary["coverage"]["predicted"] == len(predicted)
    assert sum(summary["coverage"]["unsupported"].values()) == len(report["runs"]) - len(predicted)
    timed = [run for run in predicted if run["step_time_s"]["measured"] is not None]
    assert sum(stats["n"] for stats in summary["families"].values()) == len(timed) == summary["all_predicted"]["n"]
    errors = [run["step_time_s"]["predicted"] / run["step_time_s"]["measured"] - 1 for run in timed]
    assert summary["all_predicted"]["median_signed"] == pytest.approx(float(np.median(errors)))
    assert all(run["reason"] for run in report["runs"] if run["status"] == "unsupported")


def test_report_judges_memory_and_ranking(report: dict[str, Any]) -> None:
    summary = report["summary"]
    verdict = summary["out_of_memory"]["families"]["Hagemann"]
    assert verdict["ran"] == 74 and verdict["ran_out"] == 67
    assert summary["memory"]["allocated"]["n"] == 23 + 28
    (sweep,) = [sweep for sweep in summary["ranking"]["sweeps"] if sweep["family"] == "Hagemann"]
    assert sweep["n"] == 74 and sweep["regret"] >= 0 and -1 <= sweep["tau"] <= 1
    tables = summary_rows(summary)
    assert [len(row) == len(table.headings) for table in tables for row in table.rows].count(False) == 0
    assert {row[0] for row in tables[1].rows} >= {"Hagemann", "zero-bubble", "overall"}


def test_pricing_together_equals_pricing_alone(runs: dict[str, Run]) -> None:
    chosen = [run for run in runs.values() if run.source == "oss-hagemann2023-llama13b-2k-64gpu" and run.layout][::9]
    together = predict(chosen)
    for run, answer in zip(chosen, together, strict=True):
        (alone,) = predict([run])
        assert alone.step_time == pytest.approx(answer.step_time, rel=1e-9)
        assert alone.memory == pytest.approx(answer.memory, rel=1e-9)

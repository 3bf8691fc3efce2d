"""Runs in files of users: what one gives, files that are broken, rows that cannot be priced, recipes and notes."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import library
from planner.api import accuracy
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.layout import Module
from planner.questions.accuracy.accuracy_page import summary_rows
from planner.questions.accuracy.prediction import MAY_FIT, pairs_of, predict
from planner.questions.accuracy.summary import summarise
from planner.runs import Run, read_rows, read_runs, rows_from_dict, shipped, to_run
from planner.trainer import load_trainer

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
    report = accuracy([tmp_path]).to_dict()
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
    (
        ("rows", 0, "parallel", "tp"),
        "two",
        "row a: parallel: tp is 'two'; it must be a whole number that is not negative, or null",
    ),
    (("rows", 0, "parallel", "gpu"), 2, "file: row a: parallel: unknown key 'gpu'; nearest: gpus"),
    (("rows", 0, "measured"), ..., "file: row a: missing key 'measured'"),
    (("rows", 0, "id"), ..., "file: row 1: missing key 'id'"),
    (("rows", 0, "batch"), 8, "file: row a: batch: expected a mapping of keys to values, found int"),
    (
        ("rows", 0, "measured", "step_s"),
        -1.0,
        "measured: step_s is -1.0; it must be a number that is not negative, or null",
    ),
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
    (("hardware", "gpu"), "TPU v5", "TPU v5: TPUs and Trainium are not modelled"),
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


def _as(framework: str, *, gpu: str = "H100-80GB-SXM", model: str = "llama3-8b", **changes: Any) -> Run:
    """The good row as one of another framework, GPU and model's name."""
    data = _with(("framework",), framework)
    data["hardware"] |= {"gpu": gpu}
    data["rows"][0] |= {"recompute": None, **changes}
    data["rows"][0]["model"] |= {"name": model}
    (row,) = rows_from_dict(data, where="file")
    run = to_run(row)
    assert not run.unsupported, run.unsupported
    assert run.trainer and run.layout and run.cluster and run.workload
    return run


BRIDGE = "megatron-bridge (NeMo container 25.11)"


def test_recipes_of_releases_fill_what_pages_leave_out() -> None:
    """By version, model, GPU and precision; what a row says counts more, and without the version's recipe nothing is filled."""
    flex = _as(BRIDGE, gpu="GB200", model="qwen3-30b-a3b").trainer
    assert flex and flex.kernels.expert_dispatch == "deduplicated" and flex.host.cuda_graphs == "layers"
    plain = _as(BRIDGE, gpu="B200", model="qwen3-30b-a3b").trainer
    assert plain and plain.kernels.expert_dispatch == "alltoall" and not plain.host.graphs
    said = _as(BRIDGE, gpu="GB200", model="qwen3-30b-a3b", notes="dispatcher alltoall").trainer
    assert said and said.kernels.expert_dispatch == "alltoall" and said.host.cuda_graphs == "layers"
    tuned = _as(BRIDGE, model="gpt-oss-120b").layout
    assert tuned and tuned.recompute_modules == Module.NORM | Module.MLP_ACTIVATION
    later = _as("megatron-bridge (NeMo container 26.02)", model="gpt-oss-120b").layout
    assert later and later.recompute_modules == 0
    split = {gpu: _as("megatron-bridge (NeMo container 26.06)", gpu=gpu, model="qwen3-235b-a22b") for gpu in ("H100-SXM", "B200")}
    overlaps = {gpu: "tp" in run.trainer.traffic.overlap for gpu, run in split.items() if run.trainer}
    assert overlaps == {"H100-SXM": False, "B200": True}


def test_a_row_holds_what_is_its_own() -> None:
    """Adapters, documents, options, and what a source measured of its cluster; generic: the names alone."""
    changes: dict[str, Any] = {
        "lora_rank": 8, "lora_targets": "qkv", "document_length": 200, "optimizer_bytes": 4, "options": {"dropout": True}
    }  # fmt: skip
    run = _as("nemo (25.04)", **changes)
    assert run.workload and run.trainer
    assert (run.workload.lora_rank, run.workload.lora_targets, run.workload.document_length) == (8, "qkv", 200)
    assert run.trainer.stored.dropout and run.trainer.stored.optimizer_bytes["adam"] == 4
    data = _with(("hardware", "sustained_clock"), 0.735)
    (row,) = rows_from_dict(data, where="file")
    own, generic = (to_run(dataclasses.replace(row, generic=one)).cluster for one in (False, True))
    assert own and own.hardware.sustained_clock == 0.735
    assert generic and generic.hardware.sustained_clock == load_hardware("h100-sxm").sustained_clock


def test_a_share_is_of_the_network_that_the_row_states() -> None:
    """8 x 400 Gb/s for 8 GPUs are 50 GB/s each; a cluster whose own benchmark reaches an eighth of that has 6.25."""
    (row,) = rows_from_dict(_with(("hardware", "network_share"), 0.125), where="file")
    own, generic = (to_run(dataclasses.replace(row, generic=one)).cluster for one in (False, True))
    assert own and own.hardware.network_bandwidth == 6.25e9
    assert generic and generic.hardware.network_bandwidth == 50e9


def test_a_network_without_protocols_of_low_latency() -> None:
    """Simple: 15 hops of 5.68 us and 15/16 of 16 KiB at 0.952 of 400 GB/s, the other line has 3.01 us and 0.125."""
    (row,) = rows_from_dict(_with(("hardware", "nccl_protocol"), "simple"), where="file")
    own, generic = (to_run(dataclasses.replace(row, generic=one)).cluster for one in (False, True))
    assert own and generic

    def seconds(cluster: Cluster, size: float) -> float:
        return float(cluster.hardware.scale_out_time("all_gather", size, 16.0, 8))

    share = 15 / 16 * 2.0**14 / 400e9
    assert seconds(own, 2.0**14) == pytest.approx(15 * 5.68e-6 + share / 0.952, rel=1e-3)
    assert seconds(generic, 2.0**14) == pytest.approx(15 * 3.01e-6 + share / 0.125, rel=1e-2)
    assert seconds(own, 2.0**24) == seconds(generic, 2.0**24), "beyond the switch"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"notes": "LORA RANK 64 on q and v"}, {"lora_rank": 64, "lora_targets": "qv", "frozen_weights": "bf16"}),
        ({"notes": "lora rank 8 on a 4-bit (NF4) base: QLoRA"}, {"lora_rank": 8, "frozen_weights": "nf4"}),
        ({"notes": "QLoRA (bnb.nf4-dq)"}, {"lora_rank": 16, "frozen_weights": "nf4_dq"}),
        ({"notes": "LoRA on attention, int8 base"}, {"lora_targets": "attention", "frozen_weights": "int8"}),
        ({"optimizer": "PagedAdamW 8-bit"}, {"optimizer": "paged_adam_8bit", "precision": "bf16", "lora_rank": 0}),
        ({"optimizer": "adamw (bf16 states)"}, {"optimizer": "adam", "precision": "bf16_true"}),
        ({"precision": "BF16-true", "optimizer": "Lion"}, {"precision": "bf16_true", "optimizer": "lion"}),
        ({"notes": "pure bf16", "optimizer": "Adafactor"}, {"precision": "bf16_true", "optimizer": "adafactor"}),
    ],
)
def test_fine_tuning_is_read_in_any_case_and_spelling(said: dict[str, Any], means: dict[str, Any]) -> None:
    work = _as("accelerate (FSDP2)", **said).workload
    assert work and {key: getattr(work, key) for key in means} == means


def test_generic_runs_know_the_name_of_the_framework_alone() -> None:
    data = _with(("framework",), BRIDGE)
    data["hardware"] |= {"gpu": "GB200"}
    data["rows"][0] |= {"options": {"dropout": True}}
    data["rows"][0]["model"] |= {"name": "qwen3-30b-a3b"}
    (row,) = rows_from_dict(data, where="file")
    generic = to_run(dataclasses.replace(row, generic=True)).trainer
    assert generic == load_trainer("megatron-bridge")


def test_one_run_in_two_files_has_one_prediction() -> None:
    """Shipped rows of equal model, hardware, trainer and layout are equal jobs, whatever file they stand in."""
    seen: dict[str, tuple[str, Any]] = {}
    pairs = 0
    releases = [path for path in shipped() if path.stem.startswith("nv-mbridge")]
    for row in read_rows(releases):
        run = to_run(row)
        if run.unsupported or run.workload is None or run.layout is None or run.trainer is None or run.cluster is None:
            continue
        named = row.entry["trainer"], row.options, row.get("facts"), row.notes, row.get("framework")
        key = repr((run.workload, run.layout.to_dict(), run.cluster.hardware.name, named, row.hardware))
        source, trainer = seen.setdefault(key, (row.source, run.trainer))
        pairs += source != row.source
        assert trainer == run.trainer, f"{source} and {row.source}: {row.id}"
    assert pairs > 0


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("dispatcher deepep", {"expert_dispatch": "deepep", "cuda_graphs": "none", "fused_experts": False}),
        ("cuda graphs transformer_engine/['attn']", {"cuda_graphs": "layers"}),
        ("cuda graphs none/full_iteration", {"cuda_graphs": "none"}),
        ("cuda graphs full_iteration/[]", {"cuda_graphs": "layers_and_experts"}),
        ("fused grouped MLP, fp8 attention", {"fused_experts": True}),
        ("tokendrop", {"cuda_graphs": "static_experts"}),
        ("HYBRIDEP; CUDA Graphs", {"expert_dispatch": "deduplicated", "cuda_graphs": "layers"}),
        ("all-to-all dispatcher, no cuda graphs", {"expert_dispatch": "alltoall", "cuda_graphs": "none"}),
    ],
)
def test_notes_say_what_the_trainer_did(notes: str, expected: dict[str, Any]) -> None:
    trainer = _as("megatron-core (2026)", notes=notes).trainer
    assert trainer and {name: trainer.fact(name) for name in expected} == expected
    assert ("grouped_gemm" in trainer.kernels.unfused) != trainer.kernels.fused_experts


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


@pytest.mark.proof
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


def test_what_a_row_leaves_open_is_filled_by_what_is_fastest_and_fits() -> None:
    """Micro batch and virtual stages: of the candidates that fit the fastest; the row still counts as not stated."""
    row = {
        "id": "open",
        "model": {"name": "llama-70b", "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated": True,
                  "vocab": 128256, "seq": 4096, "tied_embeddings": False, "attention": "gqa"},
        "parallel": {"gpus": 64, "tp": 8, "pp": 4, "dp": 2, "zero": 1},
        "batch": {"global": 64}, "precision": "bf16", "recompute": "full", "measured": {"step_s": 20.0},
    }  # fmt: skip
    whole = {
        "source": {"id": "x"}, "hardware": {"gpu": "H100-80GB-SXM", "gpus_per_node": 8}, "framework": "megatron-lm core",
        "rows": [row, {**row, "id": "out", "measured": {"oom": True}}],
    }  # fmt: skip
    run, out = (to_run(one) for one in rows_from_dict(whole))
    assert not run.stated and run.layout is not None and int(run.layout.micro_batch_size) == 1 and not out.others
    assert {int(one.vpp) for one in run.others} == {1, 2, 4, 5, 10, 20}
    (pair,) = pairs_of([run])
    assert pair.run.layout is not None and int(pair.run.layout.vpp) > 1
    alone = predict([dataclasses.replace(run, layout=one, others=()) for one in (run.layout, *run.others)])
    fit = [one.step_time for one in alone if one.out_of_memory is not None and one.out_of_memory < MAY_FIT and one.step_time]
    assert pair.predicted.step_time == pytest.approx(min(fit), rel=1e-9)

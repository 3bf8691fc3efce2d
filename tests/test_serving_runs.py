"""Published serving runs: read, brought to what an estimate takes, checked against Little's law and physics, predicted."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.errors import PlannerError
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.predicted_runs import PREDICTED, predict_runs
from planner.serving.runs.run_schema import serving_rows
from planner.serving.runs.serving_run import ServingRun, read_serving_runs, runs_of

FOLDER = library.profiles_directory() / "serving-runs"
FILES = sorted(FOLDER.glob("*.yaml"))
ROW: dict[str, Any] = {
    "id": "a", "model": "meta-llama/Llama-3.1-70B", "engine": {"name": "vllm", "version": "0.11.0"},
    "hardware": {"gpu": "h100-sxm", "count": 4}, "parallel": {"tp": 4, "pp": 1}, "precision": {"weights": "fp8"},
    "load": {"kind": "concurrency", "value": 16, "isl": 1024, "osl": 1024, "range_ratio": 0.8},
    "measured": {"ttft_ms": {"mean": 150.0}, "tpot_ms": {"mean": 15.0}},
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    """The row with groups changed; None takes a group away."""
    found = copy.deepcopy(ROW)
    for key, value in changes.items():
        if value is None:
            found.pop(key)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = {name: one for name, one in {**found[key], **value}.items() if one is not None}
        else:
            found[key] = value
    return found


def document(*rows: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A file of rows."""
    return {"source": {"id": "mine", "title": "my runs"}, "client": "closed", "rows": list(rows or [row()]), **keys}


def run(*, title: str = "my runs", **changes: Any) -> ServingRun:
    """One row, understood."""
    rows = serving_rows({**document(row(**changes)), "source": {"id": "mine", "title": title}})
    return runs_of(rows)[0]


# -------------------------------------------------------------------------------------------------------------- reading


def test_a_row_becomes_what_an_estimate_takes() -> None:
    found = run(title="SemiAnalysis InferenceX results")
    assert found.unsupported == "" and found.counts and found.stated
    assert found.model and found.model.name == "llama-3.1-70b"
    assert found.engine and found.engine.full == "vllm@0.11.0"
    assert found.split.layouts == (Degrees(tp=4),)
    assert (
        found.traffic
        and found.traffic.load == "concurrency"
        and found.traffic.value == 16
        and found.traffic.waves == 10
    )
    assert found.traffic.input.mean == pytest.approx(0.9 * 1024) and found.traffic.input.longest == 1024
    assert (
        found.formats == {"weights": "fp8", "cache": "fp8"} and found.launch.max_tokens == 8192
    )  # flags of its launch scripts
    assert found.kind == "closed" and found.family == "llama-3.1-70b h100-sxm vllm"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (document(rows=3), "runs: rows is 3; it must be a list"),
        (document({"id": "a"}), "runs: row a: missing key 'model'"),
        (document(row(), row()), "runs: row a: this id appears twice"),
        (document(row(hardware={"cout": 4})), "row a: hardware: unknown key 'cout'; nearest: count"),
        (document(row(load={"kind": "fast"})), "row a: load: kind is 'fast'; it must be one of offline, concurrency"),
        (document(row(load={"isl": -1})), "row a: load: isl is -1"),
        (document(row(load={"value": float("nan")})), "row a: load: value is nan"),
        (document(row(parallel={"tp": 0})), "row a: parallel: tp is 0"),
        (document(row(measured={"tpot_ms": 3.0})), "row a: measured: tpot_ms: expected a mapping"),
        (document(row(measured={"tpot_ms": {"mean": True}})), "row a: measured: tpot_ms mean is True"),
        (document(row(measured={"latncy_s": 3.0})), "row a: measured: unknown key 'latncy_s'; nearest: latency_s"),
        ({**document(), "clients": "x"}, "runs: unknown key 'clients'; nearest: client"),
        ({**document(), "source": {}}, "runs: source: missing key 'id'"),
    ],
)
def test_what_is_wrong_is_said_with_file_row_and_key(data: dict[str, Any], said: str) -> None:
    with pytest.raises(PlannerError) as error:
        serving_rows(data)
    assert said in str(error.value)


def test_keys_that_mean_nothing_are_named_not_lost() -> None:
    found = run(hardware={"rack_cooling": "water"}, measured={"power_w": 300.0})
    assert "key hardware.rack_cooling is not read" in found.assumed and "power_w" not in found.measured


def test_random_rows_never_crash() -> None:
    draw = random.Random(17)
    odd: list[Any] = [
        None,
        -1,
        0,
        1,
        2.5,
        1e30,
        float("inf"),
        "",
        "x",
        "fp8",
        [],
        {},
        [1],
        {"mean": 3},
        True,
        10**20,
        "trtllm",
        "8",
    ]

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoilt(one) for key, one in value.items() if draw.random() > 0.03}
        return draw.choice(odd) if draw.random() < 0.12 else value

    answered = 0
    for _ in range(400):
        try:
            runs = runs_of(serving_rows(spoilt(document()), where="f"))
        except PlannerError as error:
            assert str(error).startswith("f") and "\n" not in str(error)
            continue
        answered += all(one.unsupported or one.traffic for one in runs)
    assert answered > 20


@pytest.mark.parametrize(
    ("model", "precision", "gpu", "expected"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", {}, "h200-sxm", {"weights": "fp8_block"}),
        ("deepseek-ai/DeepSeek-R1", {"weights": "fp8"}, "h200-sxm", {"weights": "fp8_block"}),
        ("nvidia/DeepSeek-R1-NVFP4", {}, "b200-sxm", {"weights": "nvfp4", "attention": "bf16"}),
        ("deepseek-ai/DeepSeek-R1", {"weights": "fp4"}, "mi355x", {"weights": "mxfp4", "attention": "bf16"}),
        ("openai/gpt-oss-120b", {"weights": "nvfp4"}, "b200-sxm", {"weights": "bf16", "experts": "mxfp4"}),
        ("Qwen/Qwen3-235B-A22B-FP8", {"weights": "fp8"}, "h100-sxm", {"weights": "fp8_block"}),
        ("Qwen/Qwen3-32B", {"weights": "fp8"}, "h100-sxm", {"weights": "fp8"}),
        ("meta-llama/Llama-3.1-8B-Instruct", {"kv": "fp8"}, "h100-sxm", {"weights": "bf16", "cache": "fp8"}),
    ],
)
def test_formats(model: str, precision: dict[str, str], gpu: str, expected: dict[str, str]) -> None:
    found = run(
        model=model, precision={"weights": None, **precision}, hardware={"gpu": gpu, "count": 8}, parallel={"tp": 8}
    )
    assert found.unsupported == "" and found.formats == expected


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-v3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("Deci/DeciLM-7B", "decilm-7b"),
    ],
)
def test_copies_of_a_model_are_that_model(name: str, preset: str) -> None:
    found = run(model=name)
    assert found.model and found.model.name == preset
    for unknown in ("deepseek-ai/DeepSeek-V4", "nobody/Nothing-7B"):  # another version is another model
        assert "is no preset and no copy of one" in run(model=unknown).unsupported


MOE = "deepseek-ai/DeepSeek-R1"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parallel": {"tp": 2}}, Degrees(tp=2, replicas=2)),
        ({"parallel": {"tp": 1, "dp": 4}}, Degrees(tp=1, replicas=4)),
        ({"parallel": {"tp": 2}, "hardware": {"gpu": "mi250", "count": 2}}, Degrees(tp=4)),  # two dies each
        ({"model": MOE, "parallel": {"tp": 4}}, Degrees(tp=4, moe_tp=4)),
        ({"model": MOE, "parallel": {"tp": 4, "ep": 4}}, Degrees(tp=4, ep=4)),
        ({"model": MOE, "parallel": {"tp": 4, "moe_tp": 2}}, Degrees(tp=4, ep=2, moe_tp=2)),
        ({"model": MOE, "parallel": {"tp": 1, "attn_dp": 4, "ep": 4}}, Degrees(attn_dp=4, ep=4)),
        # a table that multiplied tp by ep, beyond what a node has
        (
            {"model": MOE, "parallel": {"tp": 64, "ep": 8, "moe_tp": 8}, "hardware": {"gpu": "b200-sxm", "count": 64}},
            Degrees(tp=8, ep=8),
        ),
    ],
)
def test_what_a_row_leaves_open_follows_from_the_number_of_gpus(changes: dict[str, Any], expected: Degrees) -> None:
    found = run(**changes)
    assert found.unsupported == "" and found.split.layouts == (expected,)


def test_offline_experts_without_a_split_may_have_run_several() -> None:
    load = {"kind": "offline", "value": 3000, "range_ratio": None}
    found = run(model=MOE, hardware={"gpu": "h200-sxm", "count": 8}, parallel={"tp": 8}, load=load)
    assert (
        found.split.layouts == (Degrees(tp=8, moe_tp=8), Degrees(tp=8, ep=8), Degrees(attn_dp=8, ep=8))
        and not found.stated
    )


def test_pools_and_their_gpus() -> None:
    pools = {
        "prefill": {"workers": 2, "tp": 8, "attn_dp": 1, "ep": 1, "moe_tp": 8}, "parallel": None, "model": MOE,
        "decode": {"workers": 1, "tp": 1, "attn_dp": 1, "ep": 1, "gpus": 32}, "hardware": {"gpu": "gb200-nvl72", "count": 48},
    }  # fmt: skip
    found = run(**pools)
    assert found.kind == "disaggregated" and found.split.prefill == Degrees(tp=8, moe_tp=8, replicas=2)
    assert found.split.decode == Degrees(
        attn_dp=32, ep=32
    )  # degrees that leave most of its GPUs idle: wide expert parallelism
    assert not found.stated and "decode workers of 32 GPUs" in found.assumed
    pools["prefill"] = {"workers": 2, "tp": 1, "ep": 1, "gpus": 16}  # recipes spread both pools or none
    assert run(**pools).split.prefill == Degrees(attn_dp=8, ep=8, replicas=2)
    pools["decode"] = {"workers": 4, "tp": 1, "ep": 1, "gpus": 32}
    assert run(**pools).split.prefill == Degrees(tp=8, moe_tp=8, replicas=2)


def test_lengths_that_only_rates_give() -> None:
    measured = {"request_per_s": 10.0, "tokens_per_s_total_output": 2000.0, "tokens_per_s_total": 4400.0}
    found = run(load={"isl": None, "osl": None, "range_ratio": None}, measured=measured)
    assert found.traffic and (found.traffic.input.mean, found.traffic.output.mean) == (240.0, 200.0)
    assert "isl is not stated" in run(load={"isl": None}).unsupported


@pytest.mark.parametrize("flag", ["spec-unknown", "no-worker-counts", "replicas-unclear", "same-measurement-in-other"])
def test_flagged_rows_are_understood_and_not_counted(flag: str) -> None:
    found = run(flags=[flag])
    assert found.unsupported == "" and not found.counts and run(flags=["repeat"]).counts


# ------------------------------------------------------------------------------------------- what contradicts itself


def test_a_row_that_breaks_littles_law_is_named() -> None:
    rate = 16 * 0.9 * 1024 / (0.150 + (0.9 * 1024 - 1) * 0.015)
    assert run(measured={"tokens_per_s_total_output": 0.95 * rate}).law == ""
    said = run(measured={"tokens_per_s_total_output": 2.0 * rate}).law
    assert said.startswith("breaks Little's law") and "16 requests in flight" in said
    assert run(measured={"tokens_per_s_total_output": 0.3 * rate}).law


def test_a_row_faster_than_memory_is_named_and_not_counted() -> None:
    """70 GB of weights on four GPUs of 3,350 GB/s take 5.2 ms to read."""
    assert run(measured={"tpot_ms": {"mean": 5.5}}).impossible == ""
    found = run(measured={"tpot_ms": {"mean": 4.5}})
    assert found.impossible.startswith("faster than memory: 4.5 ms") and not found.counts
    assert run(measured={"tpot_ms": {"mean": 4.5}}, options={"speculative": "mtp"}).impossible == ""


def test_a_loop_that_was_not_closed_is_named_and_not_counted() -> None:
    """Ten waves sent at once wait 0 to 9 answers, 4.5 in the mean: the server's batch limit decides, not the requests in flight."""
    answer = (0.9 * 1024 - 1) * 15.0
    for title, times, counts in (("InferenceX", 4.5, False), ("InferenceX", 3.0, True), ("my runs", 4.5, True)):
        found = run(title=title, measured={"ttft_ms": {"mean": times * answer}})
        assert found.counts is counts and found.impossible.startswith("no closed loop") is not counts


# -------------------------------------------------------------------------------------------------------- predictions


def test_rows_together_and_alone_get_the_same_answer() -> None:
    """Rows of one model are columns of one call: different layouts, loads and lengths must not touch each other."""
    rows = [
        row(id=f"{tp}-{value}-{isl}", parallel={"tp": tp}, hardware={"count": tp}, load={"value": value, "isl": isl})
        for tp, value, isl in ((2, 4, 1024), (4, 64, 8192), (8, 256, 1024))
    ]  # fmt: skip
    runs = runs_of(serving_rows(document(*rows)))
    together = predict_runs(runs)
    for one, answer in zip(runs, together, strict=True):
        alone = predict_runs([one])[0]
        assert answer.status == alone.status == PREDICTED and set(answer.quantities) == {"ttft_ms.mean", "tpot_ms.mean"}
        for name, value in answer.quantities.items():
            assert alone.quantities[name] == pytest.approx(value, rel=1e-6)
    assert len({answer.quantities["tpot_ms.mean"] for answer in together}) == 3


def test_every_measured_figure_that_is_modelled_is_predicted() -> None:
    measured = {
        "ttft_ms": {"unstated": 1.0, "p50": 1.0, "p99": 1.0}, "tpot_ms": {"p90": 9.0, "mean": None}, "e2e_ms": {"mean": 1.0},
        "tokens_per_s_total_output": 1.0, "tokens_per_s_per_gpu": 1.0, "tokens_per_s_total": 1.0,
        "tokens_per_s_total_per_gpu": 1.0, "request_per_s": 1.0, "memory_gb": 60.0,
    }  # fmt: skip
    found = run(measured=measured)
    said = predict_runs([found])[0].quantities
    assert set(said) == set(found.measured) and "ttft_ms.unstated" in said and "tpot_ms.p90" in said
    assert said["tokens_per_s_total_output"] == pytest.approx(4 * said["tokens_per_s_per_gpu"])
    assert said["tokens_per_s_total"] == pytest.approx(
        said["tokens_per_s_total_output"] * 2.0, rel=1e-6
    )  # as long in as out
    assert said["request_per_s"] == pytest.approx(said["tokens_per_s_total_output"] / (0.9 * 1024), rel=1e-6)
    assert 20 < said["memory_gb"] < 86


def test_mlperf_takes_the_best_layout_and_keeps_the_limits() -> None:
    open_ = {"dataset": "llama2-70b-99", "value": None, "isl": None, "osl": None, "range_ratio": None}
    common: dict[str, Any] = {
        "model": "meta-llama/Llama-2-70b-chat-hf", "hardware": {"gpu": "h200-sxm", "count": 8}, "parallel": None,
        "engine": {"name": "trtllm", "version": "1.0"}, "measured": {"tokens_per_s_total_output": 30000.0},
    }  # fmt: skip
    kinds = ("offline", "server", "interactive")
    rows = [row(id=kind, load={"kind": f"mlperf-{kind}", **open_}, **common) for kind in kinds]
    answers = predict_runs(runs_of(serving_rows(document(*rows))))
    rates = [one.quantities["tokens_per_s_total_output"] for one in answers]
    assert all(one.status == PREDICTED for one in answers) and rates[0] >= rates[1] >= rates[2] > 0
    assert all(one.layout and one.layout.num_gpus == 8 for one in answers)


def test_two_pools_are_priced() -> None:
    pool = {"workers": 1, "tp": 8, "attn_dp": 1, "ep": 8, "moe_tp": 1}
    found = run(
        model=MOE,
        parallel=None,
        prefill=pool,
        decode=pool,
        hardware={"gpu": "h200-sxm", "count": 16},
        engine={"name": "sglang"},
    )
    answer = predict_runs([found])[0]
    assert answer.status == PREDICTED and answer.quantities["tpot_ms.mean"] > 1.0


# ------------------------------------------------------------------------------------------------- what comes with planner


def test_the_files_that_come_along_are_small() -> None:
    assert len(FILES) >= 18 and sum(file.stat().st_size for file in FILES) < 2e6
    assert all(file.read_text(encoding="utf-8").startswith("#") for file in FILES)  # where from, how made, what to mind


@pytest.mark.parametrize(
    "name", ["inferencex-llama-70b", "inferencemax-rocm-agentic", "trtllm-online-0.14", "lmdeploy-a100"]
)
def test_files_that_come_along_are_understood(name: str) -> None:
    runs = read_serving_runs(FOLDER / f"{name}.yaml")
    assert runs and not [one.unsupported for one in runs if one.unsupported]
    assert all(np.isfinite(one.traffic.value) for one in runs if one.traffic)


@pytest.mark.proof
def test_all_files_that_come_along_get_an_answer() -> None:
    runs = [one for file in FILES for one in read_serving_runs(file)]
    answers = predict_runs(runs)
    silent = {
        (one.row.get("hardware.gpu"), answer.reason)
        for one, answer in zip(runs, answers, strict=True)
        if not answer.quantities
    }
    assert {gpu for gpu, _ in silent} <= {"arc-pro-b60"}, silent
    stated = [answer for one, answer in zip(runs, answers, strict=True) if one.stated]
    assert np.mean([answer.status == PREDICTED for answer in stated]) > 0.97
    assert all(np.isfinite(value) and value > 0 for one in answers for value in one.quantities.values())


def test_a_file_in_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("client: closed", encoding="utf-16")
    with pytest.raises(PlannerError, match="UTF-8"):
        read_serving_runs(tmp_path / "a.yaml")

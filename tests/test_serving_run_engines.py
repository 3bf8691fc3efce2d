"""Engines of published runs: by their versions, images and dates, and by the runs of their series."""

from dataclasses import replace
from typing import Any

import pytest

from planner.hardware import load_hardware
from planner.serving.engine import load_engine
from planner.serving.runs.layout_of_row import Degrees
from planner.serving.runs.predicted_runs import predict_runs
from planner.serving.runs.run_schema import serving_rows
from planner.serving.runs.serving_run import ServingRun, runs_of
from planner.serving.serving_layout import ServingLayout
from tests.test_serving_runs import document, row, run


@pytest.mark.parametrize(
    ("engine", "date", "full"),
    [
        ({"name": "vllm", "version": "vLLM 0.9.0.2.dev108+g71, Pytorch 2.7.0, ROCm 6.4.1"}, None, "vllm@0.9.0"),
        ({"name": "sglang", "version": None, "image": "lmsysorg/sglang:v0.5.8.post1-cu130"}, None, "sglang@0.5.8.post1"),
        ({"name": "trtllm", "version": "0.8.1.post2", "image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.8.1.post2"},
         None, "trtllm@1.2.0rc6.post2"),
        ({"name": "trtllm", "version": "TensorRT 10.11, CUDA 12.9"}, "2025-08-10", "trtllm@1.0"),
        ({"name": "vllm", "version": None}, "2025-10-29", "vllm@0.11.0"),
        ({"name": "other", "version": "SGLang v0.4.9"}, None, "sglang@0.4.9"),
        ({"name": "vllm", "version": None}, None, "vllm"),
    ],
)  # fmt: skip
def test_versions_of_engines(engine: dict[str, Any], date: str | None, full: str) -> None:
    found = run(engine=engine, **({"date": date} if date else {}))
    assert found.engine and found.engine.full.startswith(full)


def test_a_series_says_the_version_of_its_runs() -> None:
    """A row without one takes that of the nearest day in two weeks; other models and later images say nothing of it."""
    silent = {"name": "vllm", "version": None}
    found = runs_of(
        serving_rows(
            document(
                row(date="2025-12-15", engine={"version": None, "image": "vllm/vllm-openai:v0.10.2"}),
                row(id="b", date="2025-12-09", engine=silent),
                row(id="c", date="2025-12-09", engine=silent, model="Qwen/Qwen3-32B"),
                row(id="d", date="2026-02-20", engine=silent),
            )
        )
    )
    assert [one.engine.full for one in found if one.engine] == ["vllm@0.10.2", "vllm@0.10.2", "vllm@0.12.0", "vllm@0.15.0"]
    assert "version 0.10.2, of runs of its series about that day" in found[1].assumed


@pytest.mark.parametrize(("date", "full"), [("2025-12-15", "0.5.2"), ("2026-01-05", "0.5.5"), ("2026-02-01", "0.5.8")])
def test_a_source_says_its_images_by_day(date: str, full: str) -> None:
    """InferenceX kept older images than the newest of the day on AMD; on other devices and for other weights it says nothing."""
    silent = {"name": "sglang", "version": None}
    block = {"engine": silent, "precision": {"weights": "fp8_block"}}
    table = document(
        row(date=date, hardware={"gpu": "mi355x"}, **block),
        row(id="b", date="2025-12-15", hardware={"gpu": "b200-sxm"}, **block),
    )
    table["source"]["title"] = "SemiAnalysis InferenceX, DeepSeek-R1"
    found = [one.engine.full for one in runs_of(serving_rows(table)) if one.engine]
    assert found == [f"sglang@{full}", "sglang@0.5.6"]


def test_an_unknown_engine_or_device_is_named() -> None:
    assert "engine 'mine' is not known" in run(engine={"name": "mine"}).unsupported
    assert "arc-pro-b60" in run(hardware={"gpu": "arc-pro-b60"}).unsupported
    assert "engine atom priced as sglang" in run(engine={"name": "atom"}).assumed


def test_a_benchmark_captures_its_own_batches() -> None:
    """The tables of TensorRT-LLM 1.0: 300 sequences are padded to 384, not to 512 as the server does by default."""
    table = document(row(engine={"name": "trtllm", "version": "1.0"}))
    table["source"]["title"] = "TensorRT-LLM performance overview, v1.0"
    launch = runs_of(serving_rows(table))[0].launch
    layout, h100 = ServingLayout(max_batch=2048), load_hardware("h100-sxm")
    server = load_engine("trtllm@1.0")
    benchmark = launch.started(server)
    assert [float(one.padded(300.0, layout, h100)) for one in (server, benchmark)] == [512.0, 384.0]
    assert benchmark.accounting == server.accounting


@pytest.mark.parametrize(("tp", "osl", "steps"), [(4, 1024, 20), (8, 1024, 0), (4, 8192, 0)])
def test_a_script_holds_prompts_back_below_a_degree(tp: int, osl: int, steps: int) -> None:
    """LLaMA-70B of TensorRT-LLM on B200: 20 steps after the first that waits, with 1,024 tokens in and out and below tp 8."""
    load = {"kind": "concurrency", "value": 16, "isl": 1024, "osl": osl}
    placed = {"hardware": {"gpu": "b200-sxm", "count": tp}, "parallel": {"tp": tp}, "model": "meta-llama/Llama-3.1-70B-Instruct"}
    table = document(row(engine={"name": "trtllm", "version": "1.1"}, load=load, **placed))
    table["source"]["title"] = "SemiAnalysis InferenceX, Llama 70B"
    assert runs_of(serving_rows(table))[0].launch.hold == steps


@pytest.mark.parametrize(("stack", "ahead"), [("dynamo-trt", True), ("trt", False)])
def test_recipes_for_dynamo_launch_kernels_ahead(stack: str, ahead: bool) -> None:
    """TRTLLM_ENABLE_PDL=1 there, before it was the default (1.2)."""
    engine = {"name": "trtllm", "version": "1.1.0rc5", "stack": stack}
    table = document(row(engine=engine, hardware={"gpu": "gb200-nvl72"}, model="deepseek-ai/DeepSeek-R1-0528"))
    table["source"]["title"] = "SemiAnalysis InferenceX, DeepSeek-R1"
    found = runs_of(serving_rows(table))[0].launch.started(load_engine("trtllm@1.1"))
    assert found.overlaps_launches(load_hardware("gb200-nvl72"), "nvfp4") == ahead


@pytest.mark.parametrize(
    ("day", "isl", "tokens"), [("2026-03-27", 8192, None), ("2026-04-03", 8192, 16384), ("2026-04-03", 1024, 2048)]
)
def test_a_script_gives_a_pass_room_for_two_prompts_from_a_day_on(day: str, isl: int, tokens: int | None) -> None:
    load = {"kind": "concurrency", "value": 16, "isl": isl, "osl": 1024}
    placed = {"hardware": {"gpu": "b200-sxm"}, "model": "MiniMaxAI/MiniMax-M2.5"}
    table = document(row(engine={"name": "vllm"}, load=load, date=day, **placed))
    table["source"]["title"] = "SemiAnalysis InferenceX, MiniMax"
    assert runs_of(serving_rows(table))[0].launch.max_tokens == tokens


def test_a_flag_prepares_steps_ahead_before_a_version_does() -> None:
    """async-scheduling of vLLM 0.11: a request waits for the step that is prepared too."""
    table = document(row(engine={"name": "vllm", "version": "0.11.0"}, model="meta-llama/Llama-3.1-70B-Instruct"))
    table["source"]["title"] = "SemiAnalysis InferenceX, Llama 70B"
    ahead = runs_of(serving_rows(table))[0]
    plain = replace(ahead, launch=replace(ahead.launch, overlap=False))
    assert [one.launch.started(load_engine("vllm@0.11")).overlap_scheduler for one in (plain, ahead)] == [False, True]
    figures = [predict_runs([one])[0].quantities for one in (plain, ahead)]
    assert figures[1]["ttft_ms.mean"] - figures[0]["ttft_ms.mean"] == pytest.approx(figures[0]["tpot_ms.mean"], rel=0.2)


@pytest.mark.parametrize(("day", "tokens", "held"), [("2025-12-10", 1152, 0), ("2026-01-22", 8192, 0), ("2026-02-01", 8192, 40)])
def test_scripts_of_deepseek_gave_a_pass_room_for_one_prompt_at_first(day: str, tokens: int, held: int) -> None:
    load = {"kind": "concurrency", "value": 64, "isl": 1024, "osl": 1024}
    placed = {"hardware": {"gpu": "b200-sxm"}, "model": "deepseek-ai/DeepSeek-R1-0528", "precision": {"weights": "fp8_block"}}
    table = document(row(engine={"name": "trtllm"}, load=load, date=day, **placed))
    table["source"]["title"] = "SemiAnalysis InferenceX, DeepSeek-R1"
    launch = runs_of(serving_rows(table))[0].launch
    assert (launch.max_tokens, launch.hold, launch.receive_spread) == (tokens, held, 60)


def test_online_runs_go_through_a_server() -> None:
    """The throughput tables of the same page are made inside the process of the engine."""
    table = document(row(engine={"name": "trtllm", "version": "0.14.0"}, load={"kind": "rate", "value": 2, "isl": 467, "osl": 256}))
    found = []
    for title in ("online serving", "throughput"):
        table["source"]["title"] = f"TensorRT-LLM performance overview, v0.14, {title}"
        run = runs_of(serving_rows(table))[0]
        assert run.traffic
        found.append((run.traffic, predict_runs([run])[0].quantities["ttft_ms.mean"]))
    assert [traffic.client for traffic, _ in found] == ["http", "process"]
    assert found[0][1] - found[1][1] == pytest.approx(7.0 + 0.003 * found[0][0].input.mean, rel=1e-6)


@pytest.mark.parametrize(("version", "ahead"), [("1.0.0rc3", False), ("1.3.0rc1", True)])
def test_a_template_turned_off_steps_ahead(version: str, ahead: bool) -> None:
    table = document(row(engine={"name": "trtllm", "version": version}))
    table["source"]["title"] = "aiconfigurator gap analysis runs on silicon (2025-2026)"
    launch = runs_of(serving_rows(table))[0].launch
    assert launch.started(load_engine(f"trtllm@{version}")).overlap_scheduler == ahead


POOLED = {"parallel": None, "model": "deepseek-ai/DeepSeek-R1-0528", "precision": {"weights": "fp8_block"}}


def _pooled(stack: str, gpu: str, value: int, isl: int, **changes: Any) -> ServingRun:
    load = {"kind": "concurrency", "value": value, "isl": isl, "osl": 1024}
    engine = {"name": "trtllm" if "trt" in stack else "sglang", "stack": stack}
    table = document(row(engine=engine, hardware={"gpu": gpu, "count": None}, load=load, **POOLED | changes))
    table["source"]["title"] = "SemiAnalysis InferenceX, DeepSeek-R1"
    return runs_of(serving_rows(table))[0]


def test_requests_wait_for_a_place_among_those_that_a_recipe_s_decode_workers_hold() -> None:
    """ctx1_gen3_tep8_batch1: three of six requests decode, each of the others waits for a whole answer."""
    pools = {"prefill": {"workers": 1, "attn_dp": 8, "ep": 8}, "decode": {"workers": 3, "tp": 8, "ep": 8}}
    held = _pooled("dynamo-trt", "gb200-nvl72", 6, 8192, **pools)
    assert held.launch.held == 3 and _pooled("dynamo-trt", "gb200-nvl72", 7, 8192, **pools).launch.held is None
    free = replace(held, launch=replace(held.launch, held=None))
    times = [predict_runs([one])[0].quantities for one in (held, free)]
    late = times[0]["ttft_ms.mean"] - times[1]["ttft_ms.mean"]
    assert late > 0.9 * (held.row.get("load.osl") - 1) * times[0]["tpot_ms.mean"]


def test_a_recipe_of_whole_workers_is_tensor_parallel() -> None:
    """dp-attn: false with tp 1 and ep 8 on MI355X in fp4."""
    pools = {one: {"workers": 1, "tp": 1, "ep": 8, "attn_dp": 1, "gpus": 8} for one in ("prefill", "decode")}
    fp4 = _pooled("mori-sglang", "mi355x", 256, 1024, **pools, precision={"weights": "mxfp4"})
    assert fp4.split.decode == Degrees(tp=8, ep=8)
    assert _pooled("mori-sglang", "mi355x", 256, 1024, **pools).split.decode == Degrees(attn_dp=8, ep=8)


@pytest.mark.parametrize(("day", "graphs"), [("2025-12-05", ((768.0, 0.0),)), ("2025-12-18", ())])
def test_an_earlier_script_captures_one_size(day: str, graphs: tuple[tuple[float, float], ...]) -> None:
    pools = {one: {"workers": 1, "attn_dp": 24, "ep": 24} for one in ("prefill", "decode")}
    assert _pooled("dynamo-sglang", "gb200-nvl72", 256, 8192, **pools, date=day).launch.grid == graphs


def test_a_row_without_workers_is_predicted_and_not_counted() -> None:
    """GPUs of both pools, given twice: no worker of 36 tensor ranks splits 128 heads."""
    pools = {one: {"workers": 0, "tp": 36, "moe_tp": 36, "gpus": 36} for one in ("prefill", "decode")}
    found = _pooled("dynamo-trt", "gb200-nvl72", 4, 1024, **pools)
    assert found.split.decode == Degrees(tp=8, ep=8, replicas=4) and not found.counts


TWO = {"prefill": {"workers": 1, "attn_dp": 8, "ep": 8}, "decode": {"workers": 1, "attn_dp": 8, "ep": 8}}
WHOLE = {"prefill": {"workers": 1, "attn_dp": 8, "ep": 8}, "decode": {"workers": 1, "tp": 8, "ep": 1}}


@pytest.mark.parametrize(
    ("stack", "gpu", "isl", "day", "limits"),
    [
        ("dynamo-trt", "gb200-nvl72", 8192, "2025-12-09", (8448, 1)),
        ("dynamo-trt", "gb200-nvl72", 8192, "2026-02-05", (16896, 2)),
        ("dynamo-trt", "h100-sxm", 1024, "2026-02-08", (2048, 2)),
        ("dynamo-sglang", "gb200-nvl72", 1024, "2026-02-09", (16384, 512)),
        ("mori-sglang", "mi355x", 1024, "2026-02-23", (16384, 128)),
    ],
)
def test_recipes_limit_a_pass_of_prompts(stack: str, gpu: str, isl: int, day: str, limits: tuple[int, int]) -> None:
    """Tokens and requests of a rank."""
    assert _pooled(stack, gpu, 8, isl, **TWO, date=day).launch.prefill == limits


def test_the_limits_of_a_pass_are_those_of_workers_for_prompts() -> None:
    """A crowd of prompts waits longer where each pass takes one; decodes of as many take as long."""
    found = _pooled("dynamo-trt", "gb200-nvl72", 2048, 1024, **TWO, date="2026-02-05")
    one = replace(found, launch=replace(found.launch, prefill=(1024, 1)))
    several, single = (predict_runs([each])[0].quantities for each in (found, one))
    assert single["ttft_ms.mean"] > 1.15 * several["ttft_ms.mean"] and single["tpot_ms.mean"] <= several["tpot_ms.mean"]


@pytest.mark.parametrize(
    ("gpu", "isl", "day", "pools", "waits", "kernels"),
    [
        ("gb200-nvl72", 1024, "2026-02-05", WHOLE, False, 0.0),
        ("gb200-nvl72", 1024, "2025-12-09", WHOLE, True, 0.0),
        ("b200-sxm", 1024, "2026-02-11", WHOLE, True, 0.0),
        ("b200-sxm", 1024, "2026-02-12", WHOLE, False, 0.0),
        ("gb200-nvl72", 1024, "2026-02-05", TWO, True, 9.0),
        ("b200-sxm", 8192, "2026-02-12", TWO, True, 0.0),
    ],
)
def test_experts_of_a_recipe_are_fused_or_a_chain(
    gpu: str, isl: int, day: str, pools: dict[str, Any], waits: bool, kernels: float
) -> None:
    """moe_config: TRTLLM for tensor parallel workers, whose kernels are launched ahead; DEEPGEMM for spread ones."""
    launch = _pooled("dynamo-trt", gpu, 8, isl, **pools, date=day).launch
    engine = launch.started(load_engine("trtllm@1.2"))
    assert engine.overlaps_launches(load_hardware(gpu), "fp8_block") != waits
    assert max((case.value for cases in engine.fusion.experts.values() for case in cases), default=0.0) == kernels
    layout = ServingLayout(attn_dp=8, max_batch=8 * 768)
    assert engine.largest_graph(layout, load_hardware(gpu)) == 768


def test_a_load_generator_sent_five_prompts_for_each_in_flight_until_a_day() -> None:
    early, late = (_pooled("dynamo-sglang", "gb200-nvl72", 8, 1024, **TWO, date=day) for day in ("2025-12-21", "2026-02-08"))
    assert early.traffic and late.traffic and (early.traffic.waves, late.traffic.waves) == (5.0, 10.0)


def test_workers_for_prompts_may_be_tensor_parallel_beside_a_wide_one() -> None:
    """GB200 in fp4 with prompts of 8,192: ten workers of four GPUs and DEP32; in fp8 the recipes spread both."""
    pools = {"prefill": {"workers": 10, "tp": 1, "gpus": 40}, "decode": {"workers": 1, "tp": 1, "gpus": 32}}
    whole, spread = Degrees(tp=4, replicas=10, moe_tp=4), Degrees(attn_dp=4, ep=4, replicas=10)
    for weights, expected in (("nvfp4", whole), ("fp8_block", spread)):
        found = _pooled("dynamo-sglang", "gb200-nvl72", 8, 8192, **pools, precision={"weights": weights})
        assert found.split.prefill == expected and found.split.decode == Degrees(attn_dp=32, ep=32)


def test_a_script_has_an_image_of_its_own_until_a_day() -> None:
    """8k1k of GB200 in fp8 before pull 335; other runs of its series say the version of the same script only."""
    said = {"name": "sglang", "stack": "dynamo-sglang", "version": "0.5.5.post2"}
    silent, rows = {**said, "version": None}, []
    for day, isl, engine in (("2025-12-19", 1024, said), ("2025-12-10", 1024, silent), ("2025-12-10", 8192, silent)):
        load = {"kind": "concurrency", "value": 512, "isl": isl, "osl": 1024}
        placed = {"hardware": {"gpu": "gb200-nvl72", "count": None}, **POOLED, **TWO}
        rows.append(row(id=f"r{len(rows)}", date=day, engine=engine, load=load, **placed))
    table = document(*rows)
    table["source"]["title"] = "SemiAnalysis InferenceX, DeepSeek-R1"
    found = runs_of(serving_rows(table))
    assert [one.engine.version for one in found if one.engine] == ["0.5.5.post2", "0.5.5.post2", "0.5.3"]


def test_decodes_of_h100_s_spread_workers_stop_for_caches() -> None:
    """TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP=1 of their environment; tensor parallel workers do not have it."""
    wide = {one: {"workers": 1, "attn_dp": 16, "ep": 16} for one in ("prefill", "decode")}
    spread, whole = (_pooled("dynamo-trt", "h100-sxm", 300, 8192, **one, date="2026-02-08") for one in (wide, WHOLE))
    assert spread.launch.arrivals == 4e9 and whole.launch.arrivals == 0.0
    behind = replace(spread, launch=replace(spread.launch, arrivals=0.0))
    times = [predict_runs([one])[0].quantities["tpot_ms.mean"] for one in (spread, behind)]
    assert times[0] > 1.05 * times[1]

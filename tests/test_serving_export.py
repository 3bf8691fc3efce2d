"""Serve plans as files that start: words of each engine, nodes and pools, manifests, benchmarks, and the check of flags."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.commands.main import SentenceError, main
from planner.errors import PlannerError
from planner.serving.export import sglang_server, trtllm_server, vllm_server
from planner.serving.export.bench_command import bench_of, ends_of, requests_of
from planner.serving.export.serve_job import ModelNames, ServeJob
from planner.serving.export.serving_folder import TARGETS, make_export
from planner.serving.flags.flag_check import known_flags, wrong_words
from planner.serving.plan_pricing import price_again
from planner.serving.serve_plan import EngineOptions, ServePlan
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Speculation, Traffic
from planner.trainers.checking.started import started
from tests.hostile import HOSTILE
from tests.serve_samples import sample_plan

TOO_LONG = Traffic(input=Lengths.fixed(200000), output=Lengths.fixed(256))
WIDE = ServingLayout(tp=1, attn_dp=16, ep=16, max_batch=1024)
NARROW = ServingLayout(tp=1, attn_dp=16, ep=16, max_batch=64, max_tokens=16384)
DRAFT = Speculation(depth=3, acceptance=0.8, draft_parameters=1e9)
DEEPSEEK: dict[str, Any] = {
    "gpus": 32, "precision": Precision(weights="fp8_block"), "layout": WIDE, "prefill": NARROW,
    "traffic": Traffic(input=Lengths.uniform(819, 1024), output=Lengths.uniform(819, 1024), value=256, speculation=DRAFT),
}  # fmt: skip
PLANS: dict[str, ServePlan] = {
    "replicas": sample_plan(),
    "one engine": sample_plan(layout=ServingLayout(tp=8)),
    "pools": sample_plan(prefill=ServingLayout(tp=4), layout=ServingLayout(tp=4)),
    "stages on two nodes": sample_plan(gpus=16, layout=ServingLayout(tp=8, pp=2)),
    "experts on two nodes": sample_plan("qwen3-235b-a22b", gpus=16, layout=WIDE, precision=Precision()),
    "sglang pools": sample_plan("deepseek-v3", engine="sglang@0.5.23", **DEEPSEEK),
    "sglang replicas": sample_plan(engine="sglang"),
    "trtllm": sample_plan(engine="trtllm@1.3", layout=ServingLayout(tp=8), options=EngineOptions(eager=True, memory_share=0.8)),
    "trtllm replicas": sample_plan(engine="trtllm"),
    "trtllm pools": sample_plan(
        engine="trtllm", prefill=ServingLayout(tp=4), layout=ServingLayout(tp=4),
        traffic=Traffic(input=Lengths.uniform(100, 4000), output=Lengths.fixed(256), load="rate", value=5, speculation=DRAFT),
    ),
    "trtllm on two nodes": sample_plan(engine="trtllm", gpus=16, layout=ServingLayout(tp=8, pp=2)),
    "drafts from the prompt": sample_plan(
        traffic=Traffic(
            input=Lengths.of([100, 100, 5000]), output=Lengths.uniform(128, 256), prefix_hit=0.3, value=9,
            speculation=Speculation(depth=3, acceptance=0.8),
        ),
        options=EngineOptions(prefix_caching=True, chunked_prefill=False, max_length=8192),
        layout=ServingLayout(tp=8, max_tokens=8192),
    ),
}  # fmt: skip


def follows(words: list[str], flag: str) -> str:
    """The word behind a flag."""
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("name", PLANS)
def test_every_script_is_bash_and_no_engine_would_refuse_its_words(name: str, tmp_path: Path) -> None:
    made = make_export(PLANS[name], PLANS[name].engine_name)
    assert {"README.md", "bench.sh", "environment.sh", "plan.yaml"} <= set(made.files)
    text = "\n".join(text for file, text in made.files.items() if file.endswith(".sh"))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ServePlan.from_dict(yaml.safe_load(made.files["plan.yaml"])) == PLANS[name]


def test_vllm_gets_what_was_planned() -> None:
    job = ServeJob.of(PLANS["experts on two nodes"])
    words = vllm_server.words(job, job.pools[0], ModelNames())
    assert follows(words, "--tensor-parallel-size") == "1" and follows(words, "--data-parallel-size") == "16"
    assert "--enable-expert-parallel" in words
    assert follows(words, "--max-num-seqs") == str(1024 // 16), "the limit is that of one attention rank"
    assert follows(words, "--max-num-batched-tokens") == "8192"
    assert follows(words, "--max-model-len") == str(1024 + 256 + 64)
    assert follows(words, "--kv-cache-dtype") == "auto" and follows(words, "--dtype") == "bfloat16"
    fp8 = ServeJob.of(sample_plan(precision=Precision(weights="fp8", cache="fp8")))
    assert follows(vllm_server.words(fp8, fp8.pools[0], ModelNames()), "--kv-cache-dtype") == "fp8"
    options = ServeJob.of(PLANS["drafts from the prompt"])
    words = vllm_server.words(options, options.pools[0], ModelNames())
    assert "--enable-prefix-caching" in words and "--no-enable-chunked-prefill" in words
    assert json.loads(follows(words, "--speculative-config")) == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
    }  # fmt: skip


def test_sglang_counts_all_ranks_of_a_stage() -> None:
    job = ServeJob.of(PLANS["sglang pools"])
    prefill, decode = (sglang_server.words(job, pool, ModelNames()) for pool in job.pools)
    assert (follows(decode, "--tp-size"), follows(decode, "--attn-dp-size"), follows(decode, "--ep-size")) == (
        "16",
        "16",
        "16",
    )
    assert follows(decode, "--max-running-requests") == "1024" and follows(prefill, "--max-running-requests") == "64"
    assert follows(prefill, "--chunked-prefill-size") == str(16 * 16384), "the chunk of all groups together"
    numbers = [follows(decode, f"--speculative-{one}") for one in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert numbers == ["3", "1", "4"], "all of the three or none"
    assert follows(decode, "--speculative-algorithm") == "EAGLE" and "--speculative-draft-model-path" not in decode
    assert (follows(prefill, "--disaggregation-mode"), follows(decode, "--disaggregation-mode")) == (
        "prefill",
        "decode",
    )


def test_sglang_splits_each_expert_over_the_ranks_beyond_ep() -> None:
    """It wants ep x moe_dp = tp where moe_dp is above 1 alone.  [0.5.23 arg_groups/parallel_hook.py]"""
    plan = sample_plan("qwen3-30b-a3b", engine="sglang", gpus=4, layout=ServingLayout(tp=4, ep=2, moe_tp=2))
    assert "--ep-size 2" in make_export(plan, "sglang").files["serve.sh"].replace(" \\\n   ", "")


@pytest.mark.parametrize(("stream", "steps"), [(0.0, "5"), (30.0, "30")])
def test_sglang_streams_no_faster_than_its_process(stream: float, steps: str) -> None:
    """60 us a response, 100,000 tokens/s of 2.95 a step: five steps to a response at half of the time of its process."""
    plan = price_again(PLANS["sglang pools"])
    assert plan.prediction is not None
    fast = replace(plan.prediction, output_tokens_per_second=100_000.0)
    job = ServeJob.of(replace(plan, prediction=fast, traffic=replace(plan.traffic, stream=stream)))
    prefill, decode = (sglang_server.words(job, pool, ModelNames()) for pool in job.pools)
    assert decode[decode.index("--stream-interval") + 1] == steps
    assert stream or "--stream-interval" not in prefill


def test_sglang_of_before_gets_its_older_flags() -> None:
    older = sample_plan("deepseek-v3", engine="sglang@0.5.16", **DEEPSEEK)
    for plan, to, file in ((older, "sglang", "decode.sh"), (PLANS["sglang pools"], "dynamo", "deployment.yaml")):
        text = make_export(plan, to).files[file]
        assert "--enable-dp-attention" in text and "--attn-dp-size" not in text, "Dynamo's image has 0.5.16"


def test_trtllm_gets_one_file_per_pool() -> None:
    job = ServeJob.of(PLANS["trtllm pools"])
    prefill, decode = (trtllm_server.config(job, pool, ModelNames()) for pool in job.pools)
    assert prefill["disable_overlap_scheduler"] and not decode["disable_overlap_scheduler"]
    assert prefill["speculative_config"] == decode["speculative_config"], "the layout of the cache must agree"
    assert prefill["max_num_tokens"] % 32 == 0 and prefill["cache_transceiver_config"]["backend"] == "NIXL"
    short = ServeJob.of(sample_plan(engine="trtllm", layout=ServingLayout(tp=8, max_tokens=500)))
    one = trtllm_server.config(short, short.pools[0], ModelNames())
    assert one["enable_chunked_prefill"] and one["max_num_tokens"] == 512, "a prompt of 1,024 tokens must be cut"
    eager = make_export(PLANS["trtllm"], "trtllm")
    data = yaml.safe_load(eager.files["serve.config.yaml"])
    assert data["cuda_graph_config"] is None and data["kv_cache_config"]["free_gpu_memory_fraction"] == 0.8


def test_engines_lie_side_by_side_and_never_over_the_edge_of_a_node() -> None:
    job = ServeJob.of(sample_plan(gpus=32, prefill=ServingLayout(tp=2, replicas=3), layout=ServingLayout(tp=8, pp=2)))
    rows = [(one.node, one.pool, one.first_gpu, one.gpus, one.slot, one.rank, one.leader) for one in job.places]
    assert rows[:3] == [(0, "prefill", 0, 2, 0, 0, 0), (0, "prefill", 2, 2, 1, 0, 0), (0, "prefill", 4, 2, 2, 0, 0)]
    assert rows[3:] == [(1, "decode", 0, 8, 0, 0, 1), (2, "decode", 0, 8, 0, 1, 1)]
    table = make_export(job.plan, "vllm").files["engines.txt"].splitlines()
    assert table[1] == "0 prefill 0,1 8100 0 0 0 1" and table[-1] == "2 decode 0,1,2,3,4,5,6,7 8100 0 1 1 2"


@pytest.mark.parametrize(("rank", "headless"), [("0", False), ("1", True)])
def test_the_second_node_of_an_engine_only_computes(rank: str, headless: bool, tmp_path: Path) -> None:
    for file, text in make_export(PLANS["stages on two nodes"], "vllm").files.items():
        (tmp_path / file).write_text(text)
    told = {"ENGINE_RANK": rank, "ENGINE_ADDR": "10.0.0.1", "MODEL": "my model; $(id)"}
    words, _ = started(tmp_path, "serve.sh", "vllm", told)
    assert words[:2] == ["serve", "my model; $(id)"], "a name is a word and no command"
    assert follows(words, "--node-rank") == rank and follows(words, "--nnodes") == "2"
    assert follows(words, "--master-addr") == "10.0.0.1"
    assert ("--headless" in words) == headless and ("--port" in words) == (not headless)
    assert wrong_words(known_flags("vllm")[0], "vllm serve", words[1:]) == []


def test_run_starts_each_engine_on_its_gpus_and_ends_when_one_does(tmp_path: Path) -> None:
    for file, text in make_export(PLANS["replicas"], "vllm").files.items():
        (tmp_path / file).write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"vllm": 'echo "$CUDA_VISIBLE_DEVICES $*"; sleep 0.2', "curl": "exit 1"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = subprocess.run(
        ["bash", "run.sh", "--load-format", "dummy"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
        env={"PATH": path, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and "a server of this node ended" in done.stderr
    logs = [(tmp_path / "logs" / f"serve-0-{slot}.log").read_text() for slot in (0, 1)]
    assert logs[0].startswith("0,1,2,3 serve") and logs[1].startswith("4,5,6,7 serve")
    assert "--port 8100" in logs[0] and "--port 8101" in logs[1] and "--load-format dummy" in logs[0]


@pytest.mark.parametrize("name", [name for name in PLANS if PLANS[name].engine_name != "trtllm" or "two" not in name])
def test_a_dynamo_deployment_has_a_component_for_each_pool(name: str) -> None:
    plan = PLANS[name]
    documents = list(yaml.safe_load_all(make_export(plan, "dynamo").files["deployment.yaml"]))
    graph = documents[-1]
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    frontend, *workers = graph["spec"]["components"]
    assert frontend["type"] == "frontend" and len(workers) == len(plan.pools())
    for worker, (role, layout) in zip(workers, plan.pools().items(), strict=True):
        container = worker["podTemplate"]["spec"]["containers"][0]
        nodes = worker.get("multinode", {}).get("nodeCount", 1)
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) * nodes == layout.engine_gpus
        assert worker["replicas"] == layout.replicas
        assert container["command"][-1] == f"dynamo.{plan.engine_name}"
        assert ("--disaggregation-mode" in container["args"]) == (role != "both")
        assert all(isinstance(one, str) and "$" not in one for one in container["args"]), "manifests know no variables"
    if plan.engine_name == "trtllm":
        assert set(documents[0]["data"]) == {"both": {"serve.yaml"}}.get(
            "both" if plan.prefill is None else "", {"prefill.yaml", "decode.yaml"}
        )


@pytest.mark.parametrize("name", ["replicas", "pools", "stages on two nodes", "experts on two nodes"])
def test_llm_d_values_hold_the_pools(name: str) -> None:
    plan = PLANS[name]
    values = yaml.safe_load(make_export(plan, "llm-d").files["values.yaml"])
    assert values["decode"]["replicas"] == plan.layout.replicas
    assert values["prefill"]["create"] == (plan.prefill is not None) == values["routing"]["proxy"]["enabled"]
    container = values["decode"]["containers"][0]
    assert container["ports"][0]["containerPort"] == (8000 if plan.prefill is None else 8200)
    assert values["multinode"] == ("two nodes" in name)
    if values["multinode"]:
        done = subprocess.run(["bash", "-n"], input=container["args"][0], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        flag = "--node-rank" if "stages" in name else "--data-parallel-size-local"
        assert flag in container["args"][0]
    else:
        assert follows(container["args"], "--tensor-parallel-size") == "4"


# ------------------------------------------------------------------------------------------------ benchmark


def test_the_benchmark_asks_for_the_load_that_was_predicted() -> None:
    words = list(bench_of(ServeJob.of(PLANS["replicas"])).words)
    assert follows(words, "--random-input-len") == "1024" and follows(words, "--random-output-len") == "256"
    assert follows(words, "--random-range-ratio") == "0" and follows(words, "--max-concurrency") == "64"
    assert "--request-rate" not in words and "--ignore-eos" in words
    ranged = sample_plan(
        traffic=Traffic(input=Lengths.uniform(800, 1000), output=Lengths.uniform(80, 120), load="rate", value=2.5)
    )
    words = list(bench_of(ServeJob.of(ranged)).words)
    ratio = json.loads(follows(words, "--random-range-ratio"))
    low, high = (900 * (1 - ratio["input"]), 900 * (1 + ratio["input"]))
    assert (round(low), round(high)) == (800, 1000), "vLLM draws from n (1 - r) to n (1 + r)"
    assert ratio["output"] == 0.2 and follows(words, "--request-rate") == "2.5" and "--max-concurrency" not in words
    words = list(bench_of(ServeJob.of(PLANS["sglang pools"])).words)
    high, ratio = int(follows(words, "--random-input-len")), float(follows(words, "--random-range-ratio"))
    assert high == 1024 and round(high * ratio) == 819, "SGLang draws from r n to n"
    words = list(bench_of(ServeJob.of(PLANS["drafts from the prompt"])).words)
    prefix = int(follows(words, "--random-prefix-len"))
    assert prefix / (prefix + int(follows(words, "--random-input-len"))) == pytest.approx(0.3, abs=0.01)


def test_other_distributions_are_drawn_with_the_same_mean() -> None:
    low, high = ends_of(Lengths.of([50.0, 100.0, 150.0, 100.0]))
    assert (low + high) / 2 == pytest.approx(100.0)
    assert Lengths.uniform(low, high).squared == pytest.approx(Lengths.of([50.0, 100.0, 150.0, 100.0]).squared)
    assert requests_of(Traffic(input=Lengths.fixed(1), output=Lengths.fixed(1), load="offline", value=500)) == 500
    assert requests_of(Traffic(input=Lengths.fixed(1), output=Lengths.fixed(1), value=64, waves=3)) == 192


# ------------------------------------------------------------------------------------------------ refusals and commands

REFUSED: list[tuple[ServePlan, str, str]] = [
    (sample_plan(options=EngineOptions(chunked_prefill=False), layout=ServingLayout(tp=8, max_tokens=512)), "vllm",
     "without chunked prefill vLLM needs a step of at least the 1344 tokens"),
    (sample_plan(layout=ServingLayout(tp=8, max_tokens=64)), "vllm", "max_tokens 64 is less than the 256 sequences"),
    (sample_plan(traffic=TOO_LONG), "vllm", "longer than the 131072 positions"),
    (sample_plan(), "sglang", "the plan was priced for vllm@0.33, and sglang is another engine: export to vllm, dynamo or llm-d"),
    (sample_plan(), "megatron", "unknown target of a serve plan 'megatron'"),
    (sample_plan(engine="sglang"), "llm-d", "llm-d's model service runs vLLM"),
    (sample_plan(hardware="h900"), "vllm", "unknown hardware 'h900'"),
    (sample_plan(gpus=12, layout=ServingLayout(tp=4, pp=3)), "vllm", "does not fill nodes of 8"),
    (sample_plan("qwen3-235b-a22b", layout=ServingLayout(tp=4, attn_dp=2, ep=2, moe_tp=4)), "vllm", "ep"),
    (sample_plan("qwen3-235b-a22b", engine="trtllm", layout=ServingLayout(tp=4, attn_dp=2, ep=8)), "trtllm",
     "one attention rank on each GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "to", "sentence"), REFUSED, ids=[sentence[:30] for *_, sentence in REFUSED])
def test_what_cannot_run_is_refused_in_a_sentence(plan: ServePlan, to: str, sentence: str) -> None:
    with pytest.raises(PlannerError) as error:
        make_export(plan, to)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_the_command_writes_a_folder_and_says_what_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_plan().save(tmp_path / "serve.yaml")
    out = tmp_path / "server"
    command = ["export", str(tmp_path / "serve.yaml"), "--to", "vllm", "--output", str(out), "--check"]
    main(command, standalone_mode=False)
    said = capsys.readouterr().out
    assert "check: reached 'name known': names, types and choices of vllm 0.33.0" in said
    assert os.access(out / "run.sh", os.X_OK) and (out / "README.md").read_text().startswith(
        "# llama-3.1-70b on 8 x h100-sxm"
    )
    with pytest.raises(SentenceError, match="is not empty"):
        main(command, standalone_mode=False)
    main([*command, "--force"], standalone_mode=False)
    main(["export", "--list"], standalone_mode=False)
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in TARGETS) and "megatron" in said


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_texts_of_a_file_never_become_commands(text: Any, tmp_path: Path) -> None:
    """Whatever a plan says of names and prose: it is refused where it is read, or stays a text."""
    base = sample_plan()
    for key in ("hardware", "engine", "why", "name", "source"):
        data = base.to_dict()
        if key in ("name", "source"):
            data["model"][key] = text
        else:
            data[key] = text
        try:
            made = make_export(ServePlan.from_dict(data), "vllm")
        except PlannerError as error:
            assert "\n" not in str(error) or key == "source"
            continue
        scripts = "\n".join(body for file, body in made.files.items() if file.endswith(".sh"))
        done = subprocess.run(["bash", "-n"], input=scripts, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if isinstance(text, str) and len(text) > 3 and re.search(r"[$`;|&<>\"'\\\\]", text):
            assert text not in scripts and text not in made.files["README.md"]


def test_a_server_that_its_default_share_would_not_start_is_told_a_larger_one() -> None:
    """DeepSeek-V3 in fp8 on four B200: weights alone are more than SGLang's default of 0.86."""
    layout = ServingLayout(tp=4, moe_tp=4, max_tokens=16384)
    tight = sample_plan(
        model="deepseek-v3",
        hardware="b200-sxm",
        gpus=4,
        engine="sglang",
        layout=layout,
        precision=Precision(weights="fp8_block"),
    )
    job = ServeJob.of(tight)
    words = sglang_server.words(job, job.pools[0], ModelNames())
    assert 0.93 < float(words[words.index("--mem-fraction-static") + 1]) < 0.99
    easy = ServeJob.of(sample_plan(engine="sglang", layout=ServingLayout(tp=8)))
    assert "--mem-fraction-static" not in sglang_server.words(easy, easy.pools[0], ModelNames())


def test_weights_in_host_memory_are_flags_of_each_engine() -> None:
    streamed = ServeJob.of(sample_plan(layout=ServingLayout(tp=4, gpu_weights=60)))
    words = vllm_server.words(streamed, streamed.pools[0], ModelNames())
    assert 6.3 < float(words[words.index("--cpu-offload-gb") + 1]) < 6.6, "40 % of 68 GB in fp8 over 4 GPUs"
    fp8 = Precision(weights="fp8_block")
    layout = ServingLayout(tp=8, moe_tp=8, gpu_weights=50)
    mixed = ServeJob.of(sample_plan(model="deepseek-v3", engine="sglang", layout=layout, precision=fp8))
    words = sglang_server.words(mixed, mixed.pools[0], ModelNames())
    at = words.index("--kt-num-gpu-experts")
    assert words[at : at + 4] == ["--kt-num-gpu-experts", "128", "--kt-method", "FP8"]
    for name, plan in (("vllm", streamed.plan), ("sglang", mixed.plan)):
        assert make_export(plan, name).files
    with pytest.raises(PlannerError, match="keeps no weights in host memory"):
        ServeJob.of(sample_plan(engine="trtllm", layout=ServingLayout(tp=8, gpu_weights=50)))


@pytest.mark.parametrize("name", ["trtllm replicas", "trtllm pools"])
def test_what_stands_before_engines_of_trtllm_knows_all_of_them(name: str, tmp_path: Path) -> None:
    for file, text in make_export(PLANS[name], "trtllm").files.items():
        (tmp_path / file).write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("nginx", "trtllm-serve", "curl"):
        text = (
            "exit 0" if program == "curl" else 'for one in "$@"; do [ -f "$one" ] && cat "$one"; done; echo "WORDS $*"'
        )
        (programs / program).write_text(f"#!/bin/bash\n{text}\n")
        (programs / program).chmod(0o755)
    done = subprocess.run(
        ["bash", "router.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
        env={"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(tmp_path), "PORT": "8000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config, _, words = done.stdout.partition("WORDS ")
    config = config.partition("\n")[2]  # behind the line that says that all engines answer
    if name == "trtllm pools":
        data = yaml.safe_load(config)
        assert data["context_servers"] == {"num_instances": 1, "urls": ["127.0.0.1:8100"]}
        assert data["generation_servers"] == {"num_instances": 1, "urls": ["127.0.0.1:8101"]} and data["port"] == 8000
        assert words.startswith("disaggregated --config ")
    else:
        assert "server 127.0.0.1:8100;" in config and "server 127.0.0.1:8101;" in config and "listen 8000;" in config
        assert config.count("{") == config.count("}") and 'proxy_set_header Connection "";' in config
        assert "-g daemon off;" in words

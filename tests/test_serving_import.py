"""What people serve with today, read back as serve plans."""

import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import planner
from planner.commands.main import main
from planner.errors import PlannerError
from planner.serving.export.serving_folder import make_export
from planner.serving.readback.serve_reading import ServeRead, ServeSaid, read_serving, starts_servers
from planner.serving.serve_plan import ServePlan, load_serve_plan
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Lengths
from planner.trainers.reading.given import Given
from tests.test_serving_export import PLANS

SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B"
LLAMA = "vllm serve meta-llama/Llama-3.1-70B-Instruct"


def read(
    folder: Path, text: str, name: str = "serve.sh", settings: dict[str, str] | None = None, **said: Any
) -> ServeRead:
    """The plan of a text in a file."""
    (folder / name).write_text(text)
    return read_serving(folder / name, ServeSaid(**said), Given(settings=settings or {}))


def layout(plan: ServePlan) -> dict[str, int]:
    """What differs from one GPU."""
    plain = vars(ServingLayout())
    return {
        key: int(value)
        for key, value in vars(plan.layout).items()
        if value != plain[key] and not key.startswith("max_")
    }


def test_a_script_with_variables_and_a_container(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """#!/bin/bash
        TP=${TP:-4}
        export MODEL=meta-llama/Llama-3.1-70B-Instruct
        docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.11.0 --model $MODEL --tensor-parallel-size $TP \\
            --max-num-seqs 128 --gpu-memory-utilization 0.92 --kv-cache-dtype fp8 --quantization fp8 --max-model-len 8k \\
            --no-enable-prefix-caching --cpu-offload-gb 4 --port 8000
        """,
    )
    plan = found.plan
    assert (plan.model.name, plan.engine, layout(plan)) == ("llama-3.1-70b", "vllm@0.11.0", {"tp": 4})
    assert (plan.layout.max_batch, plan.options.memory_share, plan.options.max_length) == (128, 0.92, 8000)
    assert plan.options.prefix_caching is False and (plan.precision.weights, plan.precision.cache) == ("fp8", "fp8")
    assert found.unread == ("cpu_offload_gb = 4",) and found.noise == ("port = 8000",)
    assert {one.what for one in plan.assumptions} == {
        "hardware",
        "tokens of a step",
        "input tokens",
        "output tokens",
        "load",
    }
    eight = read(tmp_path, (tmp_path / "serve.sh").read_text(), settings={"TP": "8"}).plan
    assert eight.layout.tp == 8


def test_vllm_lowers_its_own_batch_to_the_budget_of_a_step(tmp_path: Path) -> None:
    found = read(tmp_path, f"{LLAMA} -tp 8 --max-num-batched-tokens 512")
    assert (found.plan.layout.max_batch, found.plan.layout.max_tokens) == (512, 512) and "refuse" not in str(found.notes)
    asked: dict[str, Any] = {"model": "llama-8b", "gpus": 1, "engine": "vllm", "max_tokens": 512}
    assert planner.serve(**asked)[0].file.layout.max_batch == planner.serve_estimate(**asked, tp=1).file.layout.max_batch == 512
    with pytest.raises(PlannerError, match="vLLM does not start"):
        planner.serve_estimate(**asked, tp=1, max_batch=513)


@pytest.mark.parametrize(("text", "asked"), [
    (f"{LLAMA} --tensor-paralel-size 4", "--set tensor_parallel_size=4 ('tensor_paralel_size' is no setting of vllm)"),
    (f"{SGLANG} --tp 4 --max-runing-requests 64", "--set max_running_requests=64 "),
])  # fmt: skip
def test_a_flag_that_is_all_but_one_that_decides_is_asked_for(text: str, asked: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as caught:
        read(tmp_path, text)
    assert asked in str(caught.value)
    name, _, value = asked.split()[1].partition("=")
    plan = read(tmp_path, text, settings={name: value}).plan
    assert {"tensor_parallel_size": plan.layout.tp, "max_running_requests": plan.layout.max_batch}[name] == int(value)


def test_expert_models_keep_their_data_parallel_ranks_in_one_engine(tmp_path: Path) -> None:
    experts = read(
        tmp_path, "vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 2 -dp 4 --enable-expert-parallel --max-num-seqs 64"
    ).plan
    assert (
        layout(experts) == {"tp": 2, "attn_dp": 4, "ep": 8}
        and experts.layout.max_batch == 256
        and experts.precision.weights == "fp8"
    )
    dense = read(tmp_path, f"{LLAMA} -tp 2 -dp 4").plan
    assert layout(dense) == {"tp": 2, "replicas": 4}
    split = read(tmp_path, "vllm serve Qwen/Qwen3-235B-A22B --tensor-parallel-size=8").plan
    assert layout(split) == {"tp": 8, "moe_tp": 8}


def test_sglang_of_today_and_of_before(tmp_path: Path) -> None:
    new = "--tp-size 16 --attn-dp-size 16 --ep-size 16 --chunked-prefill-size 131072"
    old = "--tp 16 --dp 16 --enable-dp-attention --ep-size 16 --chunked-prefill-size 131072"
    for words in (new, old):
        text = f"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 {words} --nnodes 2"
        plan = read(tmp_path, f"{text} --node-rank 0 &\n{text} --node-rank 1\n").plan
        assert layout(plan) == {"attn_dp": 16, "ep": 16}, "the second node is of the same engine"
        assert plan.layout.max_tokens == 131072 // 16 and plan.precision.weights == "fp8_block"
    copies = read(tmp_path, "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp-size 2 --dp-size 4").plan
    assert layout(copies) == {"tp": 2, "replicas": 4}


@pytest.mark.parametrize(("command", "steps"), [(SGLANG, 1.0), (f"{SGLANG} --stream-interval 30", 30.0), (LLAMA, 0.0)])
def test_sglang_streams_each_token_unless_it_is_told(command: str, steps: float, tmp_path: Path) -> None:
    found = read(tmp_path, command)
    assert found.plan.traffic.stream == steps and not found.unread


def test_trtllm_reads_the_file_that_its_script_writes(tmp_path: Path) -> None:
    text = """cat > extra.yaml <<EOF
enable_attention_dp: true
moe_expert_parallel_size: 8
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}
cuda_graph_config: null
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
EOF
trtllm-serve nvidia/DeepSeek-R1-FP4 --backend pytorch --tp_size 8 --max_batch_size 64 --max_num_tokens 2048 --config extra.yaml
"""
    with pytest.raises(PlannerError, match=r"say --set acceptance=0.7 \(chance that a drafted token is accepted\)"):
        read(tmp_path, text)
    plan = read(tmp_path, text, settings={"acceptance": "0.6"}).plan
    assert layout(plan) == {"attn_dp": 8, "ep": 8} and plan.layout.max_batch == 512 and plan.layout.max_tokens == 2048
    assert plan.precision.weights == "nvfp4" and plan.precision.cache == "fp8" and plan.options.eager
    assert plan.traffic.speculation is not None and plan.traffic.speculation.depth == 3
    assert plan.traffic.speculation.acceptance == 0.6 and plan.traffic.speculation.draft_parameters > 1e8
    (tmp_path / "extra.yaml").write_text("max_batch_size: 16\n")
    named = read(tmp_path, "trtllm-serve Qwen/Qwen3-32B --tp_size 2 --extra_llm_api_options extra.yaml").plan
    assert named.layout.max_batch == 16


def test_a_benchmark_in_the_file_says_the_load(tmp_path: Path) -> None:
    bench = (
        "vllm bench serve --dataset-name random --random-input-len 100 --random-output-len 50 --random-range-ratio 0.2"
    )
    plan = read(tmp_path, f"{LLAMA} -tp 8 &\n{bench} --request-rate 4\n").plan
    assert (plan.traffic.load, plan.traffic.value, plan.traffic.input.longest) == ("rate", 4.0, 120.0)
    old = "python -m sglang.bench_serving --random-input-len 1000 --random-output-len 500 --random-range-ratio 0.8"
    old += " --max-concurrency 16"
    plan = read(tmp_path, f"python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp-size 2 &\n{old}\n").plan
    assert (plan.traffic.value, plan.traffic.input.mean, plan.traffic.output.longest) == (16.0, 900.0, 500.0)
    told = read(
        tmp_path, f"{LLAMA} -tp 8 &\n{bench} --request-rate 4\n", concurrency=8.0, input=Lengths.uniform(10, 20)
    ).plan
    assert (told.traffic.load, told.traffic.value, told.traffic.input.longest) == ("concurrency", 8.0, 20.0), (
        "flags go before"
    )


@pytest.mark.parametrize("name", [one for one in PLANS if "two nodes" not in one])
def test_what_was_exported_is_read_back(name: str, tmp_path: Path) -> None:
    """Scripts of one engine, and manifests with all pools."""
    plan = PLANS[name]
    said: dict[str, Any] = {"model": plan.model.name, "hardware": plan.hardware, "gpus": plan.gpus}
    answers = {"acceptance": "0.8", "draft_parameters": "1e9", "MODEL": "m", "DRAFT_MODEL": "d", "PORT": "1"}
    for to, file in ((plan.engine_name, "serve.sh"), ("dynamo", "deployment.yaml")):
        made = make_export(plan, to).files
        if file not in made:
            continue
        folder = tmp_path / to
        folder.mkdir()
        for one, text in made.items():
            (folder / one).write_text(text)
        draws = plan.traffic.speculation
        own = draws is not None and (draws.draft_parameters == 0 or plan.model.mtp_layers > 0)
        used = {
            key: value for key, value in answers.items()
            if (key == "acceptance" and draws) or (key == "draft_parameters" and draws and not own)
            or (key in ("MODEL", "DRAFT_MODEL", "PORT") and to != "dynamo" and key in made[file] + made["environment.sh"])
        }  # fmt: skip
        back = read_serving(
            folder / file, ServeSaid(**said), Given(settings={**used, "weights": plan.precision.weights})
        ).plan
        expected = plan.layout if to == "dynamo" else type(plan.layout)(**{**vars(plan.layout), "replicas": 1})
        assert vars(back.layout) == {
            **vars(expected),
            "max_batch": back.layout.max_batch,
            "max_tokens": back.layout.max_tokens,
        }
        assert back.layout.max_batch == plan.layout.max_batch and back.options.eager == plan.options.eager
        assert back.precision.cache == plan.precision.cache
        assert (back.prefill is None) == (plan.prefill is None) if to == "dynamo" else True


def test_dynamo_of_before_names_services(tmp_path: Path) -> None:
    text = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    Frontend: {componentType: frontend, replicas: 1}
    VllmDecodeWorker:
      replicas: 2
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-32B, --tensor-parallel-size, "2", --is-decode-worker]
    VllmPrefillWorker:
      replicas: 3
      extraPodSpec:
        mainContainer: {command: [/bin/sh, -c], args: ["python3 -m dynamo.vllm --model Qwen/Qwen3-32B --is-prefill-worker"]}
"""
    plan = read(tmp_path, text, "graph.yaml").plan
    assert layout(plan) == {"tp": 2, "replicas": 2} and plan.prefill is not None and plan.prefill.replicas == 3
    assert plan.num_gpus == 4 + 3


REFUSED = [
    ("ls -la\n", "no command that starts vLLM, SGLang or TensorRT-LLM was found"),
    ("vllm serve Qwen/Qwen3-32B -tp $SIZE\n", "say --set SIZE=VALUE (of tensor_parallel_size)"),
    ("vllm serve somebody/unknown\n", "which model? 'somebody/unknown' is no preset"),
    ("vllm serve Qwen/Qwen3-32B -tp two\n", "tensor_parallel_size is 'two'"),
    ("vllm serve Qwen/Qwen3-32B --quantization compressed-tensors\n", "--set weights=fp8|int4|int8|nvfp4"),
    ("vllm serve Qwen/Qwen3-32B --config there.yaml\n", "it names there.yaml, which is not there"),
    ("vllm serve Qwen/Qwen3-32B\npython -m sglang.launch_server --model-path x\n", "import one engine at a time"),
    ("vllm serve Qwen/Qwen3-32B -tp 2\nvllm serve Qwen/Qwen3-32B -tp 4\n", "servers with different settings"),
    ("vllm serve Qwen/Qwen3-32B --gpu-memory-utilization 3\n", "memory_share is 3"),
    (f"{SGLANG} --tp-size 8 --attn-dp-size 3\n", "does not divide by the 3 groups"),
    (f"{SGLANG} --disaggregation-mode prefill\n", "it starts prefill servers and no decode"),
    ("kind: DynamoGraphDeployment\nspec: [1]\n", "no command that starts"),
    ("kind: DynamoGraphDeployment\nspec: {components: [{podTemplate: {spec: {containers: 3}}}]}\n", "no command that starts"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED, ids=[sentence[:24] for _, sentence in REFUSED])
def test_what_cannot_be_read_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as error:
        read(tmp_path, text, "serve.yaml" if text.startswith("kind") else "serve.sh")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_our_rules_refuse_is_a_note_as_it_runs_today(tmp_path: Path) -> None:
    found = read(tmp_path, "vllm serve Qwen/Qwen3-32B -tp 3 --max-num-seqs 8")
    assert any("planner would refuse it: " in one and "64" in one for one in found.notes), found.notes


def test_trainings_that_start_a_server_stay_trainings(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("vllm serve x &\ntorchrun train.py\n")
    (tmp_path / "b.sh").write_text("exec vllm serve x\n")
    assert not starts_servers(tmp_path / "a.sh") and starts_servers(tmp_path / "b.sh")


def test_strange_files_end_in_a_sentence(tmp_path: Path) -> None:
    """Pieces of real files, cut and mixed at random: a plan, or one PlannerError."""
    draws = random.Random(26)
    pieces = [
        "vllm serve", "Qwen/Qwen3-32B", "-tp", "2", "--speculative-config", "'{\"num_speculative_tokens\": \"x\"}'", "{", "}", "$A",
        "${B:-3}", "python -m sglang.launch_server", "--model-path", "--tp-size", "0", "-1", "1e99", "trtllm-serve", "--config",
        "/dev/zero", "..", "\n", "kind: DynamoGraphDeployment\nspec:\n  components:\n  - ", "args: [a, dynamo.vllm, --model, x]",
        "replicas: -3", "&", "|", "<<EOF", "'", '"', "--kv-cache-dtype", "nan", "--max-num-seqs", "99999999999999", "--dp",
        "--enable-dp-attention", "\u202e", "\x00", "cat > a.yaml",
    ]  # fmt: skip
    for number in range(250):
        text = " ".join(draws.choice(pieces) for _ in range(draws.randint(1, 14)))
        try:
            read(tmp_path, text, "x.yaml" if number % 3 == 0 else "x.sh", model="llama-8b", hardware="h100-sxm")
        except PlannerError as error:
            assert str(error)


def test_the_command_prices_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("vllm serve Qwen/Qwen3-32B -tp 2 --enable-lora\n")
    runner, out = CliRunner(), tmp_path / "serve.yaml"
    words = ["import", str(tmp_path / "serve.sh"), "--hardware", "h200-sxm"]
    said = runner.invoke(
        main, [*words, "--input-tokens", "uniform:500-1000", "--concurrency", "16", "--output", str(out)]
    )
    assert said.exit_code == 0 and "not in the plan: enable_lora = True" in said.output and "TPOT" in said.output, (
        said.output
    )
    plan = load_serve_plan(out)
    assert (plan.hardware, plan.traffic.value, plan.traffic.input.longest) == ("h200-sxm", 16.0, 1000.0)
    assert plan.prediction is not None and plan.prediction.fits
    for more, sentence in (
        (["--trainer", "megatron"], "--trainer is of a training"),
        (["--rate", "fast"], "--rate"),
        (["--input-tokens", "0"], "--input-tokens"),
        (["--from", "verl"], ""),
    ):
        found = runner.invoke(main, [*words, *more])
        assert found.exit_code == 2 and sentence in found.output, found.output
    (tmp_path / "train.yaml").write_text("a: 1\n")
    found = runner.invoke(main, ["import", str(tmp_path / "train.yaml"), "--rate", "5"])
    assert found.exit_code == 2 and "--rate is of a server" in found.output

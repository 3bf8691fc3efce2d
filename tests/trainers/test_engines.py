"""The serving engines' own sources against what planner recorded of them, and a real server measured on a CPU."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.serving.export.serving_folder import make_export
from planner.serving.flags.flag_check import READERS, recorded
from planner.serving.measure.bench_files import result_of
from planner.serving.measure.bench_prompts import WORDS
from planner.serving.measure.load_driver import Drive, drive
from planner.serving.measure.stream_client import Address
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Lengths, Traffic
from tests.serve_samples import sample_plan

SOURCES = Path(os.environ.get("PLANNER_ENGINES", ""))
"""Folder with the unpacked wheels, one folder each; .ci/trainers makes it."""
POOLS = {"prefill": ServingLayout(tp=4), "layout": ServingLayout(tp=4)}
NEEDED = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "openai", "accelerate")


@pytest.mark.parametrize("name", [one for one in READERS if one != "trtllm"])
def test_the_record_is_what_the_package_says(name: str) -> None:
    package, reader = READERS[name]
    record = recorded(name)
    roots = [one.parent for one in SOURCES.glob(f"*/{package}") if one.is_dir()] if SOURCES.parts else []
    if not roots:
        pytest.skip(f"{name} {record['version']} is not unpacked in PLANNER_ENGINES")
    found = reader(roots[0])
    for part in ("programs", "classes"):
        assert found[part] == {key: record[part][key] for key in found[part]}, (
            f"{part} of {name}: run tools/snapshot_engines.py"
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, int]]:
    """``transformers serve`` with a model of two layers: its address, its name, tokens of its vocabulary."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: no real server to measure")
    folder = tmp_path_factory.mktemp("model")
    vocabulary = _make_model(folder)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder),
        "--device",
        "cpu",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    log = folder / "serve.log"
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, *words], stdout=log.open("w"), stderr=subprocess.STDOUT, env=variables)
    try:
        if not _ready(f"http://127.0.0.1:{port}", child):
            pytest.skip(f"transformers serve did not start: {log.read_text()[-300:]}")
        yield f"http://127.0.0.1:{port}", str(folder), vocabulary
    finally:
        child.terminate()
        child.wait(20)


def _make_model(folder: Path) -> int:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[config.eos_token_id] = 0.0  # an answer that ends before its first token is no answer to time
    model.save_pretrained(folder)
    return len(vocabulary)


def _ready(url: str, child: subprocess.Popen[bytes], limit: float = 240.0) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end and child.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.5)
    return False


def test_a_real_server_is_measured(server: tuple[str, str, int]) -> None:
    url, name, vocabulary = server
    traffic = Traffic(input=Lengths.uniform(20, 40), output=Lengths.fixed(8), value=2)
    asked = Drive(address=Address.of(url), traffic=traffic, vocabulary=vocabulary, model=name, count=8, limit=90.0)
    run = drive(asked)
    found = result_of(run, asked)
    assert found.completed == 8 and not run.stopped and run.most_at_once == 2
    assert all(19 <= one.input_tokens <= 41 and 1 <= one.output_tokens <= 8 for one in run.done), (
        "the server counts what was asked for"
    )
    for one in run.done:
        assert 0 < one.ttft <= one.latency and len(one.gaps) <= one.output_tokens
        assert one.latency == pytest.approx(one.ttft + sum(one.gaps))
    assert found.latencies["tpot"]["mean"] > 0
    concurrency = found.rates["requests_per_second"] * found.latencies["e2e"]["mean"]
    assert 0.5 < concurrency <= 2.0, "Little's law: requests in flight, of a run that begins and ends empty"


STAND_IN = """import asyncio, sys
sys.path.insert(0, {root!r})
from tests.stand_in_server import StandIn
async def main():
    one = StandIn(first=0.02, gap=0.004)
    async with await asyncio.start_server(one.serve, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
ROUTED = {
    "vllm": ("vllm_router", sample_plan(), "vllm"), "vllm pools": ("vllm_router", sample_plan(**POOLS), ""),
    "sglang": ("sglang_router", sample_plan(engine="sglang"), "sglang"),
    "sglang pools": ("sglang_router", sample_plan(engine="sglang", **POOLS), ""),
}  # fmt: skip
"""Package of the router, the plan, and whether requests are sent: pools exchange caches, which a stand-in does not."""


@pytest.mark.parametrize("name", ROUTED)
def test_run_starts_engines_and_the_real_router_before_them(name: str, tmp_path: Path) -> None:
    package, plan, sends = ROUTED[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    ports = _free_ports(3)
    made = make_export(plan, plan.engine_name).files
    for file, text in made.items():
        (tmp_path / file).write_text(text.replace(" 8100 ", f" {ports[1]} ").replace(" 8101 ", f" {ports[2]} "))
    programs = _stand_ins(tmp_path)
    child = subprocess.Popen(
        ["bash", "run.sh"], cwd=tmp_path, stdout=(tmp_path / "run.log").open("w"), stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PORT": str(ports[0])},
    )  # fmt: skip
    try:
        ready = _ready(f"http://127.0.0.1:{ports[0]}", child, 120.0)
        assert ready, (tmp_path / "run.log").read_text()[-1500:]
        if sends:
            traffic = Traffic(input=Lengths.fixed(20), output=Lengths.fixed(6), value=4)
            run = drive(
                Drive(
                    address=Address.of(f"http://127.0.0.1:{ports[0]}"),
                    traffic=traffic,
                    vocabulary=5000,
                    count=24,
                    limit=60.0,
                )
            )
            assert len(run.done) == 24, [one.error for one in run.answers if one.error][:2]
            assert all(one.output_tokens == 6 for one in run.done)
    finally:
        child.terminate()
        child.wait(20)
    for port in ports:
        with socket.socket() as one:
            assert one.connect_ex(("127.0.0.1", port)) != 0, "nothing is left running"


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _stand_ins(folder: Path) -> Path:
    """vllm, and python where it starts SGLang: a server with known delays; other programs are the real ones."""
    programs = folder / "bin"
    programs.mkdir()
    server = folder / "server.py"
    server.write_text(STAND_IN.format(root=str(Path(__file__).resolve().parents[2])))
    real = sys.executable
    texts = {
        "vllm": f'exec "{real}" "{server}" "$@"',
        "python": f'if [ "${{2:-}}" = sglang.launch_server ]; then exec "{real}" "{server}" "$@"; fi\nexec "{real}" "$@"',
        "vllm-router": f'exec "{real}" -m vllm_router.launch_router "$@"',
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    return programs

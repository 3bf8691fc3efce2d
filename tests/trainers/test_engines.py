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

from planner.serving.flags.flag_check import READERS, recorded
from planner.serving.measure.bench_files import result_of
from planner.serving.measure.bench_prompts import WORDS
from planner.serving.measure.load_driver import Drive, drive
from planner.serving.measure.stream_client import Address
from planner.serving.traffic import Lengths, Traffic

SOURCES = Path(os.environ.get("PLANNER_ENGINES", ""))
"""Folder with the unpacked wheels, one folder each; .ci/trainers makes it."""
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
    LlamaForCausalLM(config).save_pretrained(folder)
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

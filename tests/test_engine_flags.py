"""Flags of the engines: read from sources by syntax, recorded, and held against what is written."""

import json
from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.serving.export import serving_folder
from planner.serving.export.serving_folder import make_export
from planner.serving.flags import engine_sources, flag_check
from planner.serving.flags.flag_check import READERS, known_flags, recorded, wrong_keys, wrong_words
from tests.serve_samples import sample_plan


def wrong(program: str, *words: str, engine: str = "vllm") -> str:
    """What a program would refuse of some words."""
    return "; ".join(wrong_words(known_flags(engine)[0], program, list(words)))


SABOTAGE = [
    (("--tensor-paralel-size", "4"), "vllm serve has no --tensor-paralel-size; nearest: --tensor-parallel-size"),
    (("--kv-cache-dtype", "fp9"), "--kv-cache-dtype fp9: it must be one of auto,"),
    (("--max-num-seqs", "many"), "--max-num-seqs many: it must be a whole number"),
    (("--max-num-seqs", "2.5"), "it must be a whole number"),
    (("--gpu-memory-utilization=most",), "--gpu-memory-utilization most: it must be a number"),
    (("--max-num-seqs", "--enforce-eager"), "--max-num-seqs needs a value (a whole number)"),
    (("--speculative-config", "{"), "it must be JSON"),
    (
        ("--speculative-config", '{"num_speculative_token": 3}'),
        "no key num_speculative_token; nearest: num_speculative_tokens",
    ),
    (("--kv-transfer-config", '{"kv_role": "both"}'), "kv_role is 'both'; it must be one of kv_producer"),
    (("--compilation-config.cudagraph_mod=FULL",), "no key cudagraph_mod; nearest: cudagraph_mode"),
    (("--all2all-backend", "deep_ep"), "it must be one of naive"),
    (("--cudagraph-capture-sizes", "1", "two"), "--cudagraph-capture-sizes two: it must be a whole number"),
    (("--no-tensor-parallel",), "vllm serve has no --no-tensor-parallel"),
]


@pytest.mark.parametrize(("words", "sentence"), SABOTAGE, ids=[words[0] for words, _ in SABOTAGE])
def test_sabotage_is_caught(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in wrong("vllm serve", "model", *words)


def test_right_words_pass() -> None:
    assert (
        wrong("vllm serve", "m", "-tp", "4", "--max-model-len", "8k", "--no-enable-prefix-caching", "--port", "$PORT")
        == ""
    )
    assert (
        wrong("vllm serve", "--max-num-seqs", "$N", "--cudagraph-capture-sizes", "1", "2", "4", "--enforce-eager") == ""
    )
    assert wrong("sglang.launch_server", "--model-path", "m", "--tensor-parallel-size", "8", engine="sglang") == ""
    assert wrong("trtllm-serve", "m", "--tp_size", "8", "--kv_cache_dtype", "fp8", engine="trtllm") == ""
    assert "it must be one of null, prefill, decode" in wrong(
        "sglang.launch_server", "--disaggregation-mode", "both", engine="sglang"
    )


def test_keys_of_a_configuration_file_are_held_against_its_classes() -> None:
    record = known_flags("trtllm")[0]
    good = {
        "kv_cache_config": {"dtype": "fp8"}, "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
        "cuda_graph_config": None, "cache_transceiver_config": {"backend": "NIXL"},
    }  # fmt: skip
    assert wrong_keys(record, "trtllm-serve --config", good) == []
    for data, sentence in (
        ({"kv_cache_config": {"fraction": 0.9}}, "no key fraction; nearest: free_gpu_memory_fraction"),
        ({"kv_cache_config": {"dtype": "fp9"}}, "dtype is 'fp9'; it must be one of"),
        ({"max_batch_size": "8"}, "max_batch_size is '8'; it must be a whole number"),
        ({"enable_attention_dp": 1}, "enable_attention_dp is 1; it must be true or false"),
        ({"speculative_config": {"decoding_type": "MTP", "layers": 3}}, "no key layers"),
        ({"moe_config": []}, "moe_config is []; it must be JSON"),
        ({"max_num_token": 8}, "no key max_num_token; nearest: max_num_tokens"),
    ):
        assert sentence in "; ".join(wrong_keys(record, "trtllm-serve --config", data))


@pytest.mark.parametrize("name", READERS)
def test_records_say_where_they_come_from(name: str) -> None:
    record = recorded(name)
    assert record["version"] and record["source"] and record["programs"]
    for flags in (*record["programs"].values(), *record["classes"].values()):
        for flag in flags.values():
            kinds = ("flag", "json", "int", "float", "str", "bool", "int+", "str+", "flag+", "float+", "json+")
            assert flag.get("same") in flags if "same" in flag else flag["type"] in kinds


def test_an_export_with_a_flag_that_the_engine_lacks_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(json.dumps(recorded("vllm")))
    del record["programs"]["vllm serve"]["--max-num-seqs"]
    real = flag_check.known_flags
    monkeypatch.setattr(
        serving_folder, "known_flags", lambda name: (record, "a vLLM without it") if name == "vllm" else real(name)
    )
    with pytest.raises(
        PlannerError, match="a vLLM without it would refuse what was written: vllm serve has no --max-num-seqs"
    ):
        make_export(sample_plan(), "vllm")


# ------------------------------------------------------------------------------------------------ reading sources

VLLM = {
    "config/a.py": """
from typing import Literal
Kind = Literal["auto", "fp8"]
More = Literal["x", Kind]
@config
class Inner:
    size: int = 1
    kind: More = "x"
@config
class AConfig:
    kind: Kind | str = "auto"
    size: int | None = None
    share: float | int = 0.9
    on: bool = True
    sizes: list[int] | None = None
    inner: Inner | None = None
    hidden: ClassVar[int] = 3
""",
    "model_executor/layers/quantization/__init__.py": "",
    "engine/arg_utils.py": """
class EngineArgs:
    def add_cli_args(parser):
        kwargs = get_kwargs(AConfig)
        group = parser.add_argument_group()
        group.add_argument("--kind", "-k", **kwargs["kind"])
        group.add_argument("--size", **{**kwargs["size"], "default": None})
        group.add_argument("--share", **kwargs["share"])
        group.add_argument("--on", **kwargs["on"])
        group.add_argument("--sizes", **kwargs["sizes"])
        group.add_argument("--inner", **kwargs["inner"])
        group.add_argument("--plain", type=int, choices=[1, 2])
        group.add_argument("--bare", action="store_true")
""",
    "entrypoints/common/cli_args.py": """
class BaseFrontendArgs:
    host_name: str | None = None
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
def make_arg_parser(parser):
    parser.add_argument("model_tag")
    parser.add_argument("--headless", action="store_true")
""",
    "benchmarks/serve.py": "p.add_argument('--rate', type=float)\np.add_argument('--backend', choices=list(CLIENTS.keys()))\n",
    "benchmarks/lib/endpoint_request_func.py": "CLIENTS = {'openai': 1, 'vllm': 2}\n",
}


def test_flags_are_read_off_the_engines_own_rules(tmp_path: Path) -> None:
    for name, text in VLLM.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = engine_sources.vllm_flags(tmp_path)
    assert found["programs"]["vllm serve"] == {
        "--kind": {"type": "str", "choices": ["auto", "fp8"]}, "-k": {"same": "--kind"}, "--size": {"type": "int"},
        "--share": {"type": "float"}, "--on": {"type": "flag"}, "--sizes": {"type": "int+"},
        "--inner": {"type": "json", "keys": ["Inner"]}, "--plain": {"type": "int", "choices": [1, 2]},
        "--bare": {"type": "flag"}, "--host-name": {"type": "str"}, "--port": {"type": "int"}, "--headless": {"type": "flag"},
    }  # fmt: skip
    assert found["classes"] == {
        "Inner": {"size": {"type": "int"}, "kind": {"type": "str", "choices": ["x", "auto", "fp8"]}}
    }
    assert found["programs"]["vllm bench serve"]["--backend"] == {"type": "str", "choices": ["openai", "vllm"]}


def test_fields_of_sglang_are_flags(tmp_path: Path) -> None:
    groups = tmp_path / "sglang" / "srt" / "arg_groups"
    (groups / "fields").mkdir(parents=True)
    (groups / "choices.py").write_text('KINDS = ["a", "b"] + MORE\nMORE = ["c"]\n')
    (groups / "fields" / "one.py").write_text("""
class One(msgspec.Struct):
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    kind: A[Optional[str], Arg(choices=KINDS)] = None
    mode: A[Literal["null", "on"], "help"] = "null"
    flag: A[bool, "help"] = False
    derived: A[int, Derived("x")]
    hidden: A[int, Arg(no_cli=True)] = 3
    plain: int = 3
""")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(
        "def f(p):\n    p.add_argument('--old', action=DeprecatedStoreTrueAction)\n"
    )
    (tmp_path / "sglang" / "benchmark").mkdir()
    (tmp_path / "sglang" / "benchmark" / "serving.py").write_text("p.add_argument('--rate', type=float)\n")
    found = engine_sources.sglang_flags(tmp_path)["programs"]
    assert found["sglang.launch_server"] == {
        "--tp-size": {"type": "int"}, "--tensor-parallel-size": {"same": "--tp-size"},
        "--kind": {"type": "str", "choices": ["a", "b", "c"]}, "--mode": {"type": "str", "choices": ["null", "on"]},
        "--flag": {"type": "flag"}, "--old": {"type": "flag"},
    }  # fmt: skip
    assert found["sglang.bench_serving"] == {"--rate": {"type": "float"}}

"""Training logs become runs: each framework's own format, what a log leaves open, and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import PlannerError
from planner.layout import Module, Recompute
from planner.model import load_model
from planner.questions.calibrate.sources import read_measured
from planner.runs import Row, Run, to_run
from planner.trainers.logs import Given, parse_log, read_log, row_of_log
from planner.trainers.reading.log_facts import Log, Step, steady

LOGS = Path(__file__).parent / "logs"
LLAMA = load_model("llama-3.1-8b")
SAID = Given(model=LLAMA, facts={"parallel.gpus": 8, "model.seq": 4096, "batch.micro": 4})


def run_of(name: str, said: Given | None = None) -> Run:
    (found,) = read_measured([LOGS / name], "h100-sxm", given=said)
    assert not found.unsupported
    return found


def numbers(run: Run) -> dict[str, Any]:
    assert run.layout and run.workload
    names = ("tp", "pp", "dp", "cp", "micro_batch_size", "num_microbatches", "zero", "sequence_parallel", "recompute")
    found = {name: int(getattr(run.layout, name)) for name in names}
    model = run.workload.model
    sizes = (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.ffn_size, model.vocab_size)
    return {**found, "sizes": sizes, "length": run.workload.sequence_length, "batch": run.workload.global_batch_size}


def test_megatron() -> None:
    run = run_of("megatron.log")
    assert numbers(run) == {
        "tp": 2, "pp": 1, "dp": 4, "cp": 1, "micro_batch_size": 1, "num_microbatches": 32, "zero": 1,
        "sequence_parallel": 1, "recompute": Recompute.NONE, "sizes": (4096, 32, 32, 8, 14336, 128256), "length": 8192,
        "batch": 128,
    }  # fmt: skip
    assert run.trainer and run.trainer.name == "megatron" and "gradients" in run.trainer.traffic.overlap
    # 12 steps: two of warm-up (31.0 and 14.9 s) dropped, one with a checkpoint (19.2 s) outvoted by the median
    assert run.measured.step_time == pytest.approx(13.35, rel=0.01)
    assert run.measured.memory == pytest.approx(61234.5 * 2**20) and run.measured.memory_kind == "allocated"


STEP = " iteration {0}/ 20 | elapsed time per iteration (ms): 1000.0 | global batch size: 8 |\n"


@pytest.mark.parametrize(
    ("line", "kind", "gib", "others"),
    [
        ("[Rank 0] (after 1 iterations) memory (MB) | allocated: 1024.00 | max allocated: 2048.00 | reserved: 3072.00 | "
         "max reserved: 4096.00 | total device memory used: 5120.00", "allocated", 2.0, {"reserved": 4.0, "device": 5.0}),
        ("[Rank 3] (after 1 iterations) memory (MB) | allocated: 1 | max allocated: 2048.0 | reserved: 3.0 | max reserved: 4096.0",
         "allocated", 2.0, {"reserved": 4.0}),  # before 2026: all digits
        ("after 100 iterations memory (MB) | allocated: 1.5 | max allocated: 1536.0 | cached: 2.0 | max cached: 1792.0",
         "allocated", 1.5, {"reserved": 1.75}),  # v1.0
        ("[Rank 0] memory (MB) | max reserved: 4096.0", "reserved", 4.0, {}),
    ],
)  # fmt: skip
def test_megatron_prints_several_peaks(line: str, kind: str, gib: float, others: dict[str, float]) -> None:
    """report_memory of all versions; the highest of the ranks counts."""
    lower = line.replace("2048.0", "1048.0").replace("4096.0", "3096.0").replace("1536", "1036").replace("1792", "1092")
    log = parse_log(line + "\n" + lower + "\n" + "".join(STEP.format(n) for n in range(1, 7)), "log")
    assert (log.memory_kind, log.memory_gib, log.other_memory_gib) == (kind, gib, others)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "4"}, "4 layers full"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"}, "full"),
        ({"recompute_granularity": "selective", "recompute_modules": "['core_attn']"}, "selective"),
        (
            {"recompute_granularity": "selective", "recompute_modules": "['layernorm', 'mlp']"},
            "selective: layernorm, mlp",
        ),
    ],
)
def test_megatron_recompute(changed: dict[str, str], expected: str) -> None:
    lines = (LOGS / "megatron.log").read_text().splitlines()
    for name, value in changed.items():
        lines = [line for line in lines if not line.startswith(f"  {name} ")]
        lines.insert(4, f"  {name} {'.' * (48 - len(name))} {value}")
    assert parse_log("\n".join(lines), "x.log").facts["recompute"] == expected


def test_megatron_of_2022_and_its_mixture_of_experts() -> None:
    text = """
  num_layers ...................................... 24
  num_experts ..................................... 8
  moe_router_topk ................................. 2
  moe_ffn_hidden_size ............................. 1408
  moe_shared_expert_intermediate_size ............. 2816
  expert_model_parallel_size ...................... 4
  fp8 ............................................. hybrid
  fp8_recipe ...................................... mxfp8
  bf16 ............................................ True
 iteration        7/      20 | consumed samples:          512 | elapsed time per iteration (ms): 1500.5 | learning rate: 1E-4 |
"""
    log = parse_log(text, "x.log")
    assert {key: log.facts[f"model.{key}"] for key in ("experts", "topk", "moe_ffn", "shared_experts")} == {
        "experts": 8, "topk": 2, "moe_ffn": 1408, "shared_experts": 2,
    }  # fmt: skip
    assert log.facts["parallel.ep"] == 4 and log.facts["precision"] == "fp8" and log.notes == ["MXFP8"]
    assert log.steps == [Step(number=7, seconds=1.5005)]


def test_torchtitan() -> None:
    run = run_of("torchtitan.log")
    assert numbers(run) == {
        "tp": 1, "pp": 1, "dp": 8, "cp": 1, "micro_batch_size": 1, "num_microbatches": 1, "zero": 3,
        "sequence_parallel": 0, "recompute": Recompute.SELECTIVE, "sizes": (4096, 32, 32, 8, 14336, 128256),
        "length": 8192, "batch": 8,
    }  # fmt: skip
    assert run.layout and int(run.layout.recompute_modules) == Module.EVERY_SECOND_MATMUL
    assert run.trainer and run.trainer.name == "torchtitan" and run.trainer.kernels.unfused == {"projections"}
    # lines of steps 1 and 10 dropped; about 7050 tokens per second and GPU; the validation line is no step
    assert run.measured.step_time == pytest.approx(8192 / 7050, rel=0.01)
    assert run.measured.memory == pytest.approx(51.83 * 2**30) and run.measured.memory_kind == "reserved"
    assert read_log(LOGS / "torchtitan.log").gpu == "NVIDIA H100 80GB HBM3"


def test_torchtitan_of_2024() -> None:
    text = "\n".join(
        [
            "[rank0]:2024-08-19 11:10:20,101 - root - INFO - Building 2-D device mesh with ['dp', 'tp'], [2, 2]",
            "[rank0]:2024-08-19 11:10:26,196 - root - INFO - Training starts at step 1, with local batch size 5, "
            "global batch size 20, sequence length 8192, total steps 100 (warmup 200)",
            "[rank0]:2024-08-19 11:10:37,109 - root - INFO - step: 10  loss: 12.1951  memory: 81.67GiB(85.93%)  "
            "wps: 111,770  mfu: 22.68%",
        ]
    )
    log = parse_log(text, "x.log")
    assert (log.facts["parallel.dp"], log.facts["parallel.tp"], log.facts["parallel.zero"]) == (2, 2, 3)
    assert (log.facts["batch.micro"], log.facts["batch.global"], log.facts["model.seq"]) == (5, 20, 8192)
    assert log.steps == [Step(number=10, tokens_per_second_per_gpu=111770.0, loss=12.1951)]


def test_nanotron() -> None:
    run = run_of("nanotron.log")
    assert numbers(run) == {
        "tp": 2, "pp": 1, "dp": 4, "cp": 1, "micro_batch_size": 2, "num_microbatches": 4, "zero": 1,
        "sequence_parallel": 1, "recompute": Recompute.NONE, "sizes": (2048, 16, 32, 32, 8192, 32768), "length": 4096,
        "batch": 32,
    }  # fmt: skip
    assert run.trainer and run.trainer.name == "nanotron"
    assert run.measured.step_time == pytest.approx(0.921, rel=0.01)
    assert run.measured.memory == pytest.approx(26496 * 2**20) and run.measured.memory_kind == "reserved"


def test_deepspeed() -> None:
    run = run_of("deepspeed.log", Given(model=LLAMA, facts={"model.seq": 4096}))
    found = numbers(run)
    assert (found["dp"], found["zero"], found["micro_batch_size"], found["num_microbatches"]) == (8, 3, 4, 2)
    assert run.workload and run.workload.model is LLAMA
    assert run.measured.step_time == pytest.approx(64 / 13.4, rel=0.01)
    assert run.measured.memory == pytest.approx(52.52 * 2**30) and run.measured.memory_kind == "allocated"


@pytest.mark.parametrize(("name", "step"), [("trainer_state.json", 2412.6 / 500), ("transformers.log", 1 / 0.207)])
def test_transformers(name: str, step: float) -> None:
    run = run_of(name, SAID)
    found = numbers(run)
    assert (found["dp"], found["batch"], found["micro_batch_size"], found["num_microbatches"]) == (8, 32, 4, 1)
    assert run.trainer and run.trainer.name == "fsdp"
    assert run.measured.step_time == pytest.approx(step)


# ------------------------------------------------------------------------------------------------ steady steps


def logged(times: list[float], batches: list[int] | None = None) -> Log:
    steps = [
        Step(number=n, seconds=time, batch=batches[n - 1] if batches else 8) for n, time in enumerate(times, start=1)
    ]
    return Log(framework="x", steps=steps)


def test_warm_up_is_dropped_and_the_median_taken() -> None:
    found = steady(logged([90.0, 30.0, 10.0, 10.2, 9.8, 25.0, 10.1]), "x.log")
    assert found.seconds == 10.1 and found.steps == 5
    assert found.spread == pytest.approx(1.4826 * 0.1 / 10.1)


def test_steps_of_the_last_batch_size_count() -> None:
    found = steady(logged([1.0] * 6 + [2.0] * 4, [4] * 6 + [8] * 4), "x.log")
    assert (found.seconds, found.batch, found.steps) == (2.0, 8, 4)


def test_a_step_that_several_ranks_print_counts_once() -> None:
    log = logged([5.0, 4.0, 3.0, 3.0, 3.0])
    log.steps = [step for step in log.steps for _ in range(8)]
    assert steady(log, "x.log").steps == 3


def test_too_short_a_log_gets_a_sentence() -> None:
    with pytest.raises(PlannerError, match=r"x.log: 4 steps are logged; the first 2 are warm-up, and at least 3 more"):
        steady(logged([1.0] * 4), "x.log")


# ------------------------------------------------------------------------------------------------ what a log leaves open


@pytest.mark.parametrize(
    ("name", "said", "sentence"),
    [
        ("deepspeed.log", Given(), "does not say the model and sequence length; give --model and --seq"),
        ("transformers.log", Given(model=LLAMA), "sequence length, number of GPUs and micro batch size; give --sequence-length,"),
        ("megatron.log", Given(model=load_model("llama-3.1-70b")), "the log has hidden 4096, --model llama-3.1-70b has 8192"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(name: str, said: Given, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        row_of_log(read_log(LOGS / name), said, where=name, gpu="h100-sxm")


def test_the_log_counts_more_than_a_flag() -> None:
    row = row_of_log(
        read_log(LOGS / "megatron.log"), Given(facts={"parallel.tp": 8, "precision": "fp8", "parallel.ep": None}),
        where="x.log", gpu="h100-sxm",
    )  # fmt: skip
    assert row.get("parallel.tp") == 2 and row.get("precision") == "bf16"


def test_logs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "train.log")
        paths[-1].write_text((LOGS / "megatron.log").read_text())
    assert [run.id for run in read_measured(paths, "h100-sxm")] == [str(path) for path in paths]


def test_another_device_gets_a_sentence() -> None:
    with pytest.raises(PlannerError, match=r"ran on NVIDIA H100 80GB HBM3 \(Hopper\), but --hardware b200-sxm"):
        read_measured([LOGS / "torchtitan.log"], "b200-sxm")


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}', "\x00\x01", "iteration: 3 loss: 2"])
def test_what_is_no_log_gets_a_sentence(text: str) -> None:
    with pytest.raises(PlannerError, match="no step times of Megatron-LM, torchtitan, DeepSpeed, nanotron or the"):
        parse_log(text, "x.log")


def test_a_directory_or_nothing_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="cannot be read"):
        read_log(tmp_path / "none.log")
    with pytest.raises(PlannerError, match="no .yaml file of runs in this directory"):
        read_measured([tmp_path], "h100-sxm")


# ------------------------------------------------------------------------------------------------ broken files

TEXTS = {path.name: path.read_bytes() for path in sorted(LOGS.iterdir())}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(TEXTS)), begin=st.floats(0, 1), end=st.floats(0, 1), where=st.floats(0, 1),
    more=st.binary(max_size=20), digits=st.text(alphabet="0123456789.,eE+-KMinfa \n", max_size=12),
)  # fmt: skip
def test_a_broken_log_is_a_row_or_a_sentence(
    name: str, begin: float, end: float, where: float, more: bytes, digits: str
) -> None:
    """Cut anywhere, with bytes and wrong numbers put in anywhere."""
    data = TEXTS[name]
    data = data[int(min(begin, end) ** 3 * len(data)) : int(max(begin, end, 0.3) * len(data))]
    at = int(where * len(data))
    data = data[:at] + digits.encode() + more + data[at:]
    try:
        log = parse_log(data.decode("utf-8", errors="replace"), name)
        row = row_of_log(log, SAID, where=name, gpu="h100-sxm")
    except PlannerError as error:
        assert str(error).startswith(name) or "--model" in str(error)
        return
    assert isinstance(row, Row)
    assert isinstance(to_run(row, hardware="h100-sxm").unsupported, str)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["log_history", "train_runtime", "step", "train_batch_size"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_row_or_a_sentence(data: Any) -> None:
    text = json.dumps({"log_history": data, "train_runtime": 1, "train_steps_per_second": 1, "train_batch_size": data})
    try:
        row_of_log(parse_log(text, "x.json"), SAID, where="x.json", gpu="h100-sxm")
    except PlannerError as error:
        assert "x.json" in str(error)

"""plan validate: a split job trains like one process; fake memory is real memory; what it says of plans, and refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from fresh import fresh
from samples import MODELS, model

from planner.commands.main import main
from planner.errors import PlannerError
from planner.lab.reference.split import refusals, split_of, virtual_stages
from planner.layout import Layout
from planner.trainer import load_trainer
from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)


# ------------------------------------------------------------------------------------------------ like one process


@pytest.mark.proof
@needs_torch
def test_split_jobs_train_like_one_process() -> None:
    """A part of the table of tests.proofs.parity; ``python -m tests.proofs.parity`` runs all of it."""
    code = "import sys; from tests.proofs.parity import main; sys.exit(main(['--subset', '--json']))"
    rows = [json.loads(line) for line in fresh(code).splitlines() if line.startswith("{")]
    from tests.proofs.parity import SUBSET

    assert [row["row"] for row in rows] == list(SUBSET)
    for row in rows:
        tolerance = 0.15 if "bf16" in row["split"] else 1e-12  # in bf16 twice what rounding alone does, here below 0.1
        assert row["equal"] and row["parameter_error"] < tolerance and row["norm_error"] < tolerance, row
        assert row["loss_error"] <= row["loss_tolerance"] < (0.01 if "bf16" in row["split"] else 1e-11), row
        assert row["tolerance"] <= tolerance
        assert row["parameters"] >= 38 and row["values"] > 35000  # 9 tensors in each of 4 layers, and the ends


@pytest.mark.proof
@needs_torch
def test_the_whole_table_on_request(request: pytest.FixtureRequest) -> None:
    """All combinations; minutes, so only with --whole-parity."""
    if not request.config.getoption("--whole-parity"):
        pytest.skip("NOT RUN: all combinations, only with --whole-parity")
    code = "import sys; from tests.proofs.parity import main; sys.exit(main(['--json']))"
    rows = [json.loads(line) for line in fresh(code, limit=1800).splitlines() if line.startswith("{")]
    assert len(rows) >= 40 and all(row["equal"] for row in rows)


@pytest.mark.proof
@needs_torch
def test_a_lost_gradient_is_seen() -> None:
    """Norms whose gradient is that of one tensor-parallel rank: no exception, and found."""
    code = """
from planner.lab.reference import transformer as model
from tests.proofs import parity
model.whole = lambda weight: weight.to_local() if hasattr(weight, "to_local") else weight
found = parity.compare(parity.combination("llama", tp=2))
print(found["equal"], found["parameter_error"] > 1e-4)
found = parity.compare(parity.combination("llama", tp=2, precision="bf16"))
print(found["equal"], found["tolerance"] < 0.15, found["parameter_error"] > 0.2)
"""
    assert fresh(code).split() == ["False", "True", "False", "True", "True"]


# ------------------------------------------------------------------------------------------------ fake memory is real

REAL = """
import dataclasses, json, sys
import torch
from torch.profiler import ProfilerActivity, profile
from planner.lab.run import meta
from tests.proofs import parity
from planner.lab.run.meta import measure_ranks

small = parity.tiny(hidden_size=256, ffn_size=704, vocab_size=2048, head_dim=64)
fields = json.loads(sys.argv[1])
split = dataclasses.replace(parity.combination("llama", **fields), model=small, sequence_length=256, precision="fp32")
[fake] = measure_ranks(split, [0])
step, start, seen = meta.RankAlone.step, meta.MemoryTracker.start, {}

def watched(self):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step(self)
    now = 0
    events = [one for one in trace.profiler.kineto_results.events() if one.name() == "[memory]"]
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        seen["top"] = max(seen.get("top", 0), now)

def begun(self):
    start(self)
    seen["before"] = sum(self.now.values())

meta.RankAlone.step, meta.MemoryTracker.start = watched, begun
with meta.pretended(split, 0):
    meta.RankAlone(split, lambda *_: None, torch.device("cpu")).tracked(0)
print("FOUND", json.dumps([fake.most.total, seen["before"] + seen["top"]]))
"""


@pytest.mark.proof
@needs_torch
@pytest.mark.parametrize("fields", [{"tp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3, "recompute": "full"}])
def test_fake_peak_is_what_the_allocator_hands_out(fields: dict[str, Any]) -> None:
    """The same step with memory and numbers: the profiler's allocations and frees, summed up."""
    [line] = [line for line in fresh(REAL, json.dumps(fields)).splitlines() if line.startswith("FOUND")]
    fake, real = json.loads(line.removeprefix("FOUND"))
    assert abs(fake - real) < 0.03 * 2**20
    assert real > 5 * 2**20


# ------------------------------------------------------------------------------------------------ the command


def plan_file(folder: Path, *flags: str, trainer: str = "torchtitan", **sizes: Any) -> Path:
    """A plan of a small model."""
    spec = {k: v for k, v in vars(model("small", **sizes)).items() if v not in ("", 0, False, 0.0)}
    (folder / "small.yaml").write_text(yaml.safe_dump(spec))
    arguments = ["estimate", "--model", str(folder / "small.yaml"), "--trainer", trainer, "--hardware", "h100-sxm",
                 "--sequence-length", "2048", *flags, "--output", str(folder / "plan.yaml")]  # fmt: skip
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return folder / "plan.yaml"


@pytest.mark.proof
@needs_torch
def test_the_command_measures_prices_and_writes(tmp_path: Path) -> None:
    """tp 2 x dp 2: states to the byte, activations, and the collectives of a tensor-parallel layer counted by hand."""
    flags = (
        "--gpus",
        "4",
        "--tp",
        "2",
        "--dp",
        "2",
        "--zero",
        "2",
        "--num-microbatches",
        "2",
        "--global-batch-size",
        "4",
    )
    plan = plan_file(tmp_path, *flags, num_kv_heads=4)
    output = tmp_path / "validation.yaml"
    command = [sys.executable, "cli.py", "validate", str(plan), "--output", str(output)]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == yaml.safe_load(output.read_text())
    assert {"machine", "versions", "date", "command"} <= set(found) and found["changes"] == []
    [rank] = found["ranks"]
    rows = {row["what"]: row for row in rank["memory"]}
    assert all(rows[name]["inside"] for name in ("weights", "gradients", "optimizer_states", "activations"))
    h, f, layers, vocabulary = 1024, 4096, 8, 32000
    each = (h * 1024 + 2 * h * 256 + 1024 * h + 3 * h * f) / 2 + 2 * h
    assert rows["weights"]["measured_gib"] * 2**30 == 4 * (layers * each + h + 2 * h * vocabulary / 2) / 2
    hidden = 2048 * h * 2
    counts = {(one["operation"], one["ranks"], one["bytes"]): one["times"] for one in rank["collectives"]}
    assert counts["all_gather", 2, hidden] == counts["reduce_scatter", 2, hidden] == 2 * (4 * layers + 2)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "--gpus", "2", "--dp", "2", "--zero", "3")
    (tmp_path / "broken.yaml").write_text("planner_plan: [")
    cases = [
        ([str(plan), "--rung", "moon"], "unknown level 'moon', nearest: "),
        ([str(tmp_path / "broken.yaml")], "broken.yaml line 2: did not find"),
        ([str(tmp_path / "none.yaml")], "none.yaml: cannot be read"),
    ]
    if importlib.util.find_spec("torch"):
        cases.append(([str(plan), "--rank", "2"], "--rank 2: the plan has ranks 0 to 1"))
    else:
        cases.append(([str(plan)], "needs torch 2.13"))
    for arguments, says in cases:
        done = CliRunner().invoke(main, ["validate", *arguments])
        assert done.exit_code == 2 and says in done.output and len(done.output.splitlines()) == 1, done.output


@needs_torch
def test_a_megatron_plan_is_compared_as_torchtitan_or_refused(tmp_path: Path) -> None:
    from planner.lab.run.levels import question
    from planner.plan_file import load_plan

    flags = ("--gpus", "4", "--tp", "2", "--dp", "2", "--zero", "1")
    asked = question(load_plan(plan_file(tmp_path, *flags, trainer="megatron")))
    assert asked.trainer.name == "torchtitan" and int(asked.layout.zero) == 2
    assert "trainer torchtitan instead of megatron" in asked.changes[0]
    assert "zero 2 instead of 1" in asked.changes
    assert asked.unchecked == () and asked.split.host_states == 0
    offloaded = plan_file(tmp_path, *flags, "--offload-optimizer", "100", trainer="megatron")
    asked = question(load_plan(offloaded))
    assert asked.split.host_states == int(asked.layout.offload_optimizer) == 100


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("llama-8b", ("--precision", "nvfp4", "--trainer", "megatron", "--hardware", "b200-sxm"),
         ["precision nvfp4: linear layers"]),
        ("deepseek-v3", ("--pp", "16", "--ep", "8", "--tp", "2", "--precision", "fp8"), [
            "precision fp8 of routed experts: they run in bf16", "precision fp8 of MLA's down projections",
            "routing of a trained router",
        ]),
        ("deepseek-v3", ("--pp", "16", "--ep", "8"), ["routing of a trained router"]),
    ],
)
def test_what_can_be_left_out_is_left_out_and_named(
    tmp_path: Path, model: str, flags: tuple[str, ...], says: list[str]
) -> None:
    """The rest of the plan is checked, in the run and in the prediction alike; and calibration learns nothing from it."""
    from planner.lab.run.learn import no_run
    from planner.lab.run.levels import question
    from planner.plan_file import load_plan

    file = tmp_path / "plan.yaml"
    arguments = ["estimate", "--model", model, "--gpus", "256", "--trainer", "torchtitan", *flags, "--output", str(file)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    made = load_plan(file)
    asked = question(made)
    assert [one for one, word in zip(asked.unchecked, says, strict=True) if one.startswith(word)] == list(asked.unchecked)
    eight = "fp8" in flags
    assert (asked.split.precision, asked.split.linear, asked.workload.precision) == (
        ("bf16", "fp8", "fp8") if eight else ("bf16", "", "bf16")
    )
    assert asked.split.model.mtp_layers == (model == "deepseek-v3")
    assert not asked.workload.model.is_moe or asked.workload.expert_imbalance == 1.0
    found = {"rung": "full", "outcome": "completed", "unchecked": list(asked.unchecked)}
    assert no_run(made, found).startswith("what ran is not the plan")


def test_prediction_modules_of_a_v_are_left_out_and_named(tmp_path: Path) -> None:
    """Its last virtual stage lies on the first rank, next to the embedding."""
    from planner.lab.run.levels import question
    from planner.plan_file import load_plan

    for schedule, left_out in (("1f1b", 0), ("zbv", 1)):
        plan = plan_file(tmp_path, "--gpus", "2", "--pp", "2", "--schedule", schedule, mtp_layers=1)
        asked = question(load_plan(plan))
        assert len(asked.unchecked) == left_out and asked.split.model.mtp_layers == 1 - left_out
        assert all(one.startswith("1 multi-token prediction module: left out") for one in asked.unchecked)


@pytest.mark.proof
@needs_torch
def test_prediction_modules_are_counted_on_the_last_stage(tmp_path: Path) -> None:
    """Level meta of a small plan: a layer, a projection, three norms, a copy of the embedding; logits stored twice. With recompute
    what the projection reads and puts out is there in its own backward pass."""
    flags = ("--gpus", "4", "--pp", "2", "--dp", "2", "--num-microbatches", "4", "--global-batch-size", "8")
    found = {}
    for modules, recompute in ((0, "none"), (1, "full"), (1, "none")):
        plan = plan_file(
            tmp_path, *flags, "--zero", "2", "--recompute", recompute, mtp_layers=modules, vocab_size=4096
        )
        output = tmp_path / f"{modules}.yaml"
        fresh("import sys; from planner.commands.main import main; main(sys.argv[1:])", "validate", str(plan), "--rung", "meta",
              "--rank", "3", "--output", str(output))  # fmt: skip
        written = yaml.safe_load(output.read_text(encoding="utf-8"))
        [rank] = written["ranks"]
        found[modules] = {row["what"]: row for row in rank["memory"]} | {"parameters": rank["parameters"]}
        assert written["unchecked"] == []
        assert all(row["inside"] for row in rank["memory"] if row["bound"]), rank["memory"]
        assert abs(found[modules]["activations"]["error"]) < 0.01
        assert all(row["inside"] for row in rank["traffic"] if row["operation"] in ("send", "receive")), rank["traffic"]
    h, layer = 1024, 4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024
    assert found[1]["parameters"] - found[0]["parameters"] == layer + 2 * h * h + 3 * h + 4096 * h
    logits = 2048 * 4096 * 2 / 2**30
    assert found[1]["activations"]["measured_gib"] - found[0]["activations"]["measured_gib"] > logits


@pytest.mark.proof
@needs_torch
def test_states_on_the_host_are_counted_there_and_not_in_the_peak(tmp_path: Path) -> None:
    """Level meta of a small plan whose optimizer states are on the host: 16 bytes per parameter of the rank, as predicted."""
    flags = ("--gpus", "2", "--dp", "2", "--zero", "1", "--offload-optimizer")
    found = {}
    for share in ("0", "100"):
        plan = plan_file(tmp_path, *flags, share, trainer="megatron")
        output = tmp_path / f"{share}.yaml"
        fresh("import sys; from planner.commands.main import main; main(sys.argv[1:])", "validate", str(plan), "--rung", "meta",
              "--rank", "0", "--output", str(output))  # fmt: skip
        [rank] = yaml.safe_load(output.read_text(encoding="utf-8"))["ranks"]
        found[share] = {row["what"]: row for row in rank["memory"]} | {"parameters": rank["parameters"]}
    here, there = found["0"], found["100"]
    assert "host" not in here and there["optimizer_states"]["measured_gib"] == 0.0
    assert there["host"]["measured_gib"] * 2**30 == 16.0 * there["parameters"] / 2
    assert abs(there["host"]["error"]) < 1e-6 and there["peak"]["inside"] and here["peak"]["inside"]
    saved = here["peak"]["measured_gib"] - there["peak"]["measured_gib"]
    assert saved == pytest.approx(here["optimizer_states"]["measured_gib"], rel=0.01)


@pytest.mark.proof
@needs_torch
def test_fp8_is_counted_on_fake_tensors(tmp_path: Path) -> None:
    """Level meta of a small plan of Megatron: what tensor parallelism gathers for linear layers is half of the bytes; a
    compiled layer keeps norms' and SwiGLU's outputs in 8 bits and those of attention once more, where the prediction has bf16."""
    found = {}
    for precision in ("bf16", "fp8"):
        flags = ("--gpus", "4", "--tp", "2", "--dp", "2", "--precision", precision)
        plan = plan_file(tmp_path, *flags, trainer="megatron", vocab_size=4096)
        output = tmp_path / "validation.yaml"
        fresh("import sys; from planner.commands.main import main; main(sys.argv[1:])", "validate", str(plan), "--rung", "meta",
              "--rank", "0", "--output", str(output))  # fmt: skip
        written = yaml.safe_load(output.read_text(encoding="utf-8"))
        [rank] = written["ranks"]
        assert written["unchecked"] == [] and "trainer torchtitan instead of megatron" in written["changes"][0]
        rows = {row["what"]: row for row in rank["memory"]}
        traffic = {(row["operation"], row["dimension"]): row for row in rank["traffic"]}
        assert all(row["inside"] for row in traffic.values()), traffic
        assert all(rows[name]["inside"] for name in ("weights", "gradients", "optimizer_states"))
        assert rows["activations"]["inside"] == (precision == "bf16") == ("note" not in rows["activations"])
        found[precision] = rows["activations"], traffic["all_gather", "tp"]["measured_bytes"], rank["microbatches_run"]
    tokens, h, f, layers = 2048, 1024, 4096, 8
    head = found["bf16"][2] * 2 * 2 * tokens * h  # of its input and of the embedding's gradient
    assert found["bf16"][1] - head == 2 * (found["fp8"][1] - head)
    less = (found["bf16"][0]["measured_gib"] - found["fp8"][0]["measured_gib"]) * 2**30
    assert less == pytest.approx(tokens * layers * (2 * h + f / 2 - h / 2), rel=0.01)


@pytest.mark.parametrize(
    ("name", "fields", "work", "says"),
    [
        ("gqa", {"tp": 2}, {}, "tp 2 without sequence parallelism"),
        ("gqa", {"tp": 8, "sequence_parallel": 1}, {}, "must divide the 4 key-value heads"),
        ("gqa", {"cp": 2}, {}, "cp_method ring: the torch model gathers"),
        ("gqa", {"pp": 2, "vpp": 2, "zero": 3, "schedule": 4}, {}, "lose their gradient, without an error"),
        ("gqa", {"pp": 2, "schedule": 6}, {}, "schedule zb_2p: torch.distributed.pipelining has"),
        ("gpt", {"pp": 2}, {}, "ties its embeddings"),
        ("moe", {"ep": 16, "dp": 8}, {}, "ep 16 must divide dp_shard 8 x cp 1 x tp 1"),
        ("gqa", {"recompute": 1, "recompute_modules": 8}, {}, "selective recompute by module"),
        ("gqa", {"offload_parameters": 1}, {}, "offload of weights"),
        ("moe", {"pp": 2, "zero": 3, "recompute": 1}, {}, "FSDP gathers them anew"),
        ("window", {}, {}, "has 4 norms per layer"),
        ("parallel", {}, {}, "parallel attention"),
        ("gqa", {}, {"precision": "nvfp4"}, "precision nvfp4"),
        ("gqa", {}, {"lora_rank": 8}, "lora_rank 8"),
    ],
)
def test_what_the_torch_model_has_not_is_a_sentence(
    name: str, fields: dict[str, int], work: dict[str, Any], says: str
) -> None:
    layout = Layout(**fields)  # type: ignore[arg-type]
    workload = Workload(
        model=MODELS[name], sequence_length=4096, global_batch_size=int(layout.global_batch_size), **work
    )
    assert any(says in one for one in refusals(workload, layout)), refusals(workload, layout)
    with pytest.raises(PlannerError):
        split_of(workload, load_trainer("torchtitan"), layout)


def test_stages_follow_the_schedule() -> None:
    """V-shaped: down the ranks and back up; uneven ends as given."""
    assert [one.rank for one in virtual_stages(8, Layout(pp=4, vpp=2, schedule=4))] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [one.rank for one in virtual_stages(8, Layout(pp=2, vpp=2, schedule=2))] == [0, 1, 0, 1]
    assert [one.layers for one in virtual_stages(5, Layout(pp=2, first_stage_layers=2))] == [(0, 1), (2, 3, 4)]

"""plan validate --rung full: what is chosen or refused before a run, and the result of one that fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from validate_samples import entry, needs_torch, plan_file, task

from planner.commands.main import main
from planner.errors import PlannerError
from planner.lab.launch.place import Place
from planner.lab.launch.state import Pace, Teller
from planner.lab.launch.watch import Verdict
from planner.lab.run.full_result import result
from planner.lab.run.levels import choose

# ------------------------------------------------------------------------------------------------ choice and refusal


def test_the_highest_rung_that_the_machine_allows(tmp_path: Path) -> None:
    mine, gpus = plan_file(tmp_path), plan_file(tmp_path, cpu=False, name="gpus.yaml")
    assert choose(task(mine), "auto")[0].name == "full"
    level, why = choose(task(gpus), "auto")
    assert level.name == "meta" and "not full: there is no GPU here and the plan is for h100-sxm" in why
    assert choose(task(gpus), "full")[1] == "asked for with --rung full"
    assert choose(task(gpus, device="cuda", gpus=2), "auto")[0].name == "full"
    level, why = choose(task(gpus, device="cuda", gpus=1), "auto")
    assert "the plan has 2 ranks and this machine 1 GPUs; --print-commands shows" in why and level.name != "full"
    with pytest.raises(PlannerError, match=r"--rung full .* need 0.8 GiB of main memory and 0.5 GiB are free"):
        choose(task(mine, memory=0.5 * 2.0**30), "full")
    many = plan_file(tmp_path, "--gpus", "128", "--dp", "128", "--global-batch-size", "128", name="many.yaml")
    with pytest.raises(PlannerError, match="128 ranks, and on a CPU at most 64 are started"):
        choose(task(many), "full")


def test_bad_flags_are_one_sentence(tmp_path: Path) -> None:
    plan = plan_file(tmp_path)
    cases = [
        (["--nodes", "3", "--print-commands"], "--nodes 3: the plan's 2 GPUs cannot be shared out evenly"),
        (["--rung", "fool"], "unknown level 'fool', nearest: full"),
        (["--output", str(tmp_path / "no" / "v.yaml")], "--output"),
    ]
    if importlib.util.find_spec("torch"):
        cases += [
            (["--rung", "full", "--rank", "1"], "it runs all ranks and --rank names some"),
            (["--timeout", "0s"], "--timeout 0s: it must be above zero"),
            (["--timeout", "soon"], "--timeout"),
            (["--trace", str(tmp_path / "no" / "t.json")], "--trace"),
            (["--device", "cuda"], "--device cuda: neither the driver nor torch reports a GPU here"),
        ]
    for arguments, says in cases:
        done = CliRunner().invoke(main, ["validate", str(plan), *arguments])
        assert done.exit_code == 2 and says in done.output and len(done.output.splitlines()) == 1, done.output


def test_commands_for_many_machines_are_printed_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for processors asks SLURM for no GPU."""
    plan = plan_file(tmp_path, cpu=False)
    words = ["validate", str(plan), "--output", "v.yaml", "--nodes", "2", "--print-commands"]
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    text = CliRunner().invoke(main, words).output
    command = f"--no-python plan validate {plan} --output v.yaml"
    assert "torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=0 --rdzv-backend=c10d --rdzv-id=validate" in text
    assert command in text and "sbatch validate.sbatch" in text and "--gpus-per-node=1" in text
    tasks = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --distribution=block"
    assert f"srun {tasks} --kill-on-bad-exit=1 plan validate {plan} --output v.yaml" in text
    for on_cpu in (
        ["validate", str(plan), "--device", "cpu"],
        ["validate", str(plan_file(tmp_path, name="cpu-plan.yaml"))],
    ):
        text = CliRunner().invoke(main, [*on_cpu, "--nodes", "2", "--print-commands"]).output
        assert "srun --nodes=2 --ntasks-per-node=1 --distribution=block" in text and "gpus-per-node" not in text
        assert "--ntasks-per-node=1 --exclusive" in text and "one task per rank" in text


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("verdict", "outcome", "allocated"),
    [
        (Verdict(kind="error", rank=1, phase="step 2", sentence="no room", facts={"out_of_memory": True, "allocated_gib": 7.5}),
         "out_of_memory", 7.5),
        (Verdict(kind="error", rank=1, phase="step 2", sentence="a bug"), "failed", 0.25),
        (Verdict(kind="hung", rank=0, phase="step 2", sentence="silent"), "hung", None),
        (Verdict(kind="link", rank=0, phase="step 2", sentence="stuck"), "hung", None),
        (Verdict(kind="store", rank=0, phase="step 2", sentence="gone"), "lost_rank", None),
        (Verdict(kind="interrupted", rank=-1, phase="", sentence="stopped"), "interrupted", None),
    ],
)  # fmt: skip
def test_faults_are_results(tmp_path: Path, verdict: Verdict, outcome: str, allocated: float | None) -> None:
    left = [entry(0, 0.3), entry(1, 0.2, memory={"peak": 2**28})]
    found = result(task(plan_file(tmp_path)), left, verdict)
    assert found["outcome"] == outcome and found["failure"]["allocated_gib"] == allocated
    assert found["failure"]["rank"] == (None if verdict.rank < 0 else verdict.rank)
    assert found["times"], "what was measured is kept"
    if outcome == "hung":
        said = found["failure"]["sentence"]
        assert "(predicted: " in said and "only needs longer, raise --timeout" in said
    nothing = result(task(plan_file(tmp_path)), left[:1], verdict)
    assert nothing["times"] == [] and nothing["outcome"] == outcome


def test_what_trains_differently_is_not_timed(tmp_path: Path) -> None:
    parity = {
        "parameters": 21,
        "values": 9,
        "parameter_error": 0.3,
        "loss_error": 0.1,
        "norm_error": 0.1,
        "tolerance": 1e-12,
        "loss_tolerance": 1e-12,
        "norm_tolerance": 1e-12,
        "why": "error of parameters 3.0e-01 in fp64, 1e-12 is allowed",
        "equal": False,
    }
    found = result(task(plan_file(tmp_path)), [entry(rank, 0.1, steps=[], parity=parity) for rank in (0, 1)], None)
    assert found["outcome"] == "not_equal" and parity["why"] in found["failure"]["sentence"]
    assert found["times"] == [] and found["rates"] is None
    exact = parity | {"parameter_error": 0.0, "equal": True, "precision": "fp64", "why": ""}
    parity = exact | {"rounded": parity | {"precision": "bf16", "why": "gradients are summed over ranks in bfloat16"}}
    found = result(task(plan_file(tmp_path)), [entry(rank, 0.1, steps=[], parity=parity) for rank in (0, 1)], None)
    assert found["outcome"] == "not_equal" and "summed over ranks in bfloat16; nothing was timed" in found["failure"]["sentence"]
    assert (
        not found["parity"]["equal"]
        and found["parity"]["largest_error"] == 0
        and not found["parity"]["rounded"]["equal"]
    )


def test_a_loss_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    left = [entry(0, 0.3), entry(1, 0.2, loss=[6.0, float("nan")])]
    left[0]["loss"] = left[1]["loss"]
    found = result(task(plan_file(tmp_path)), left, None)
    assert found["outcome"] == "failed" and "6.0 in the first and nan in the last" in found["failure"]["sentence"]
    assert found["rates"]["loss"] is None and found["times"] and json.dumps(found, allow_nan=False)


@needs_torch
def test_memory_that_ran_out_is_known_behind_what_torch_wraps() -> None:
    from planner.lab.run.full_rank import facts, in_words

    inner = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes\nmore"
    )
    outer = RuntimeError("failed to run forward: args")
    outer.__cause__ = inner
    assert facts(outer, "cpu")["out_of_memory"] and facts(outer, "cpu")["allocated_gib"] > 0.01
    assert in_words(outer).startswith("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate")
    assert facts(ValueError("no"), "cpu") == {} and in_words(ValueError()) == "ValueError"


@needs_torch
def test_a_step_may_take_ten_times_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-8b on 8 H100 takes 63.8 s per step by default: with 60 s it had always hung, on every level with steps."""
    from planner.lab.launch.meeting import Met
    from planner.lab.launch.watch import Watch
    from planner.lab.run import full, full_rank, one_rank

    quick = task(plan_file(tmp_path), device="cuda", gpus=2)
    assert quick.step_seconds == quick.timeout == 60.0 and "60 s for each of 7 steps (--timeout;" in full.stated_limits(quick)
    prediction = replace(quick.plan.prediction, step_time_s=63.8)
    slow = replace(quick, plan=replace(quick.plan, prediction=prediction))
    assert slow.step_seconds == pytest.approx(638.0)
    said = full.stated_limits(slow)
    assert "638 s for each of 7 steps (10 times the 63.8 s that are predicted; 2552 s for the first)" in said, said
    assert result(slow, [], None)["limits"]["step_seconds"] == pytest.approx(638.0)
    assert json.loads(slow.to_json())["timeout"] == 60.0, "every rank finds the same limit from the plan"

    limits = []
    watch = Watch(None, 0, ["a", "b"], 1.0, ended=lambda _: None)
    monkeypatch.setattr(watch, "again", limits.append)
    rank = full_rank.OneRank.__new__(full_rank.OneRank)
    rank.task, rank.place = slow, Place(rank=0, world=2, local_rank=0, node=0, address="a", port=1, agent_store=False)
    rank.met, rank.teller, rank.pace = Met(store=None, watch=watch, names=[], nodes=[]), Teller(None), Pace("", 10)
    for number in (0, 1):
        with rank._before(number, "a step"):
            pass
    assert limits == pytest.approx([4 * 638.0, 638.0])

    alone = []

    def measured(_: object, manner: Any, **__: object) -> list[Any]:
        alone.append(manner.work.args[0].timeout)
        return [None]

    monkeypatch.setattr(one_rank, "measure_all", measured)
    one_rank._emulated(slow, [0])
    assert alone == pytest.approx([638.0])


def test_another_size_of_memory_than_the_plans_is_said(tmp_path: Path) -> None:
    from planner.lab.run.levels import other_size

    gpu = task(plan_file(tmp_path, cpu=False), device="cuda", gpus=2, name="NVIDIA H100 80GB HBM3", gpu_memory=(81559 * 2.0**20,))
    assert other_size(gpu) == ""
    small = replace(gpu, machine=replace(gpu.machine, name="NVIDIA H100 PCIe 64GB", gpu_memory=(65536 * 2.0**20,)))
    hardware = gpu.asked.cluster.hardware.name
    assert f"has 64 GiB of memory and the plan's {hardware} 79.2 GiB: whether the plan fits here" in other_size(small)


@needs_torch
def test_groups_of_a_mesh_have_the_limit_of_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from planner.lab.run.full_rank import limit_groups

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, timedelta(minutes=10))  # as before, after the test
    limit_groups(timedelta(seconds=2582))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
        made = dist.new_group([0])
        groups = [made, mesh.get_group("pp"), mesh.get_group("tp")]
        limits = [one._get_backend(torch.device("cpu")).options._timeout for one in groups]
        assert limits == [timedelta(seconds=2582)] * 3
    finally:
        dist.destroy_process_group()

"""The search of RL placements against brute force, its command, its API."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner import api
from planner.commands.main import main
from planner.errors import PlannerError
from planner.questions.rl.rl_trace import STEPS, slices
from planner.rl.rl_answer import _decides, answer
from planner.rl.rl_layout import RlLayouts
from planner.rl.rl_question import RlRequest, ask, read_fields, read_staleness
from planner.rl.rl_search import Asked, placements, price, search, sizes, train_candidates
from planner.rl.rollout_pools import rollout_candidates
from planner.search import SAFE

SMALL = {
    "model": "qwen3-4b", "gpus": 4, "hardware": "h100-sxm", "framework": "nemo-rl@0.5", "prompts": 16, "samples": 8,
    "answers": "mean=600,p99=2000", "max_length": 4096, "prompt_length": 128,
}  # fmt: skip


def run(*words: str) -> Any:
    """A command in this process."""
    return CliRunner().invoke(main, ["rl", *words], catch_exceptions=False)


def brute(request: dict[str, Any], **asked: Any) -> tuple[float, int]:
    """The fastest placement that fits, every one priced by itself; and how many were priced."""
    job = ask(RlRequest(**request)).job
    question = Asked(gpus=request["gpus"], **asked)
    best, count = float("inf"), 0
    for place in placements(job, question):
        trains, rollouts = train_candidates(job, place.train_gpus, {}), rollout_candidates(job, place, {})
        if trains is None or rollouts is None:
            continue
        for a, b in itertools.product(range(len(trains)), range(len(rollouts.tp))):  # type: ignore[arg-type]
            one = price(job, place, RlLayouts(actor=trains.row(a), rollout=rollouts.row(b), rollout_precision=job.precision))
            count += 1
            if one.chance <= SAFE:
                best = min(best, one.seconds)
    return best, count


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "gpus", "more"),
    [
        ("qwen3-4b", 4, {}), ("qwen3-8b", 3, {}), ("qwen3-4b", 4, {"framework": "verl"}),
        ("qwen3-4b", 4, {"framework": "openrlhf", "algorithm": "ppo", "samples": 2}),
    ],
)  # fmt: skip
def test_the_search_finds_the_optimum_of_brute_force(model: str, gpus: int, more: dict[str, str]) -> None:
    """Colocated, split, hybrid (verl) and a critic of its own pool (OpenRLHF)."""
    request = {**SMALL, "model": model, "gpus": gpus, **more}
    fastest, count = brute(request, staleness=(0, 1))
    job = ask(RlRequest(**request)).job
    found = search(job, Asked(gpus=gpus, staleness=(0, 1)), 3)
    assert count >= found.searched > 20  # layouts whose own update cannot fit are left out before
    assert found.best[0].seconds <= fastest * 1.011  # of the nearly fastest the least stale one
    assert min(one.seconds for one in (*found.best, *found.by_mode.values())) == pytest.approx(fastest, rel=1e-9)


def test_tables_and_single_placements_agree() -> None:
    """What the search prices as columns is what one placement costs by itself."""
    job = ask(RlRequest(**SMALL)).job
    found = search(job, Asked(gpus=4, modes=("colocated",)), 2)
    for one in found.best:
        assert one.seconds == pytest.approx(price(job, one.placement, one.layouts).seconds, rel=1e-9)
    assert found.best[0].seconds <= found.best[-1].seconds


def test_critics_stand_where_the_framework_has_them() -> None:
    """OpenRLHF: synchronous pools give a critic GPUs of its own; verl: on the actor's always; TRL: none."""
    ask_ = {**SMALL, "algorithm": "ppo", "framework": "openrlhf"}
    places = placements(ask(RlRequest(**ask_)).job, Asked(gpus=4))
    own = {(one.mode, one.synchronous): {bool(two.critic_gpus) for two in places if (two.mode, two.synchronous) ==
           (one.mode, one.synchronous)} for one in places}  # fmt: skip
    assert own == {("colocated", True): {False}, ("split", True): {True}, ("split", False): {True, False}}
    assert all(one.gpus <= 4 for one in places)
    assert {one.critic_gpus for one in placements(ask(RlRequest(**ask_)).job, Asked(gpus=4, critic_gpus=2))} == {2}
    verl = placements(ask(RlRequest(**{**ask_, "framework": "verl"})).job, Asked(gpus=4))
    assert not any(one.critic_gpus for one in verl) and {one.mode for one in verl} == {"colocated", "split", "hybrid"}
    with pytest.raises(PlannerError, match="trains no value model"):
        search(ask(RlRequest(**{**ask_, "framework": "trl"})).job, Asked(gpus=4), 1)


def test_recorded_pairs_are_learned_without_generation() -> None:
    """DPO: the update and the log-probs of the reference, two answers a prompt; parts sum to the step."""
    request = {**SMALL, "samples": 2, "framework": "trl"}
    pairs = search(ask(RlRequest(**{**request, "algorithm": "dpo"})).job, Asked(gpus=4), 1).best[0]
    assert pairs.placement.mode == "colocated" and set(pairs.memory.peak) == {"logprob", "train"}
    parts = {name: float(value.sum()) for name, value in pairs.step.parts.items() if hasattr(value, "sum")}
    assert {name for name, value in parts.items() if value > 0} == {"reference", "train"}
    assert pairs.seconds == pytest.approx(sum(parts.values()))
    online = search(ask(RlRequest(**{**request, "algorithm": "online-dpo"})).job, Asked(gpus=4), 1).best[0]
    assert pairs.seconds < online.seconds


def test_a_group_of_one_has_no_advantage() -> None:
    with pytest.raises(PlannerError, match="the advantage of a single one is zero; set samples to 2 or more"):
        ask(RlRequest(**{**SMALL, "samples": 1}))
    assert ask(RlRequest(**{**SMALL, "samples": 1, "algorithm": "ppo"})).job.workload.samples == 1
    with pytest.raises(PlannerError, match="compares pairs of answers; it must be 2"):
        ask(RlRequest(**{**SMALL, "samples": 4, "algorithm": "online-dpo"}))


@pytest.mark.proof
def test_more_staleness_and_more_gpus_are_never_slower() -> None:
    job = ask(RlRequest(**SMALL)).job
    times = [search(job, Asked(gpus=4, modes=("split",), staleness=(s, s)), 1).best[0].seconds for s in (0, 1, 2, 8)]
    assert times == sorted(times, reverse=True)
    few, many = (search(job, Asked(gpus=n, modes=("split",), staleness=(1, 1)), 1).best[0].seconds for n in (4, 8))
    assert many < few


def test_command_prints_what_json_says(tmp_path: Path) -> None:
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    file = tmp_path / "rl.yaml"
    shown = run(*flags, "--output", str(file))
    assert shown.exit_code == 0
    assert "Best placements" in shown.output
    data = json.loads(run(*flags, "--json").stdout)
    assert data["fits"]
    plan = api.load_rl(file)
    assert plan.step_time == pytest.approx(data["plans"][0]["row"]["step_s"])
    assert sum(plan.file.prediction.parts_s.values()) == pytest.approx(plan.step_time)  # type: ignore[union-attr]
    again = run("estimate", str(file), "--json")
    assert json.loads(again.stdout)["row"]["step_s"] == pytest.approx(plan.step_time, rel=0.02)
    slower = json.loads(run("estimate", str(file), "--prompts", "64", "--json").stdout)
    assert slower["row"]["step_s"] > plan.step_time


def test_explicit_placement() -> None:
    found = api.estimate_rl(**SMALL, mode="split", train_gpus=2, staleness=1, actor="tp=2", rollout="tp=1")
    place, layouts = found.file.placement, found.file.layouts
    assert (place.mode, place.train_gpus, place.generate_gpus, place.staleness) == ("split", 2, 2, 1)
    assert (layouts.actor.tp, layouts.rollout.tp, layouts.rollout.replicas) == (2, 1, 2)


@pytest.mark.parametrize(
    ("more", "says"),
    [({"train_gpus": 9}, "--train-gpus is 9, of 4 GPUs in all"), ({"generate_gpus": 5}, "--generate-gpus is 5, of 4 GPUs"),
     ({"gpus": 1, "framework": "prime-rl"}, "on GPUs of their own; give it 2 or more"),
     ({"gpus": 1, "mode": "split"}, "no placement on 1 GPU with")],
)  # fmt: skip
def test_pools_that_cannot_be_made_are_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(says)):
        api.plan_rl(**{"model": "qwen3-4b", "gpus": 4, "hardware": "h100-sxm", **more})


def test_a_pool_that_is_asked_for_holds_for_hybrid_placements_too() -> None:
    """All GPUs generate there: what is asked for is all, or those that never train."""
    job = ask(RlRequest(model="qwen3-4b", gpus=8, hardware="h100-sxm", framework="verl", mode="hybrid")).job
    pools = {pool: sizes(job, Asked(gpus=8, generate_gpus=pool), "hybrid") for pool in (0, 3, 8)}
    assert pools[0] == pools[8] == [(train, 8) for train in range(1, 8)] and pools[3] == [(5, 8)]


def test_a_share_may_be_written_in_percent() -> None:
    asked = {"model": "qwen3-4b", "gpus": 4, "hardware": "h100-sxm", "algorithm": "dapo"}
    assert ask(RlRequest(**asked, keep_rate="30%")).job.workload.keep_rate == 0.3
    assert ask(RlRequest(**asked, keep_rate="1")).job.workload.keep_rate == 1.0
    for wrong in ("150%", "half"):
        with pytest.raises(PlannerError, match="--keep-rate"):
            ask(RlRequest(**asked, keep_rate=wrong))


def test_cards_without_bf16_train_and_generate_in_fp16() -> None:
    found = ask(RlRequest(model="qwen3-8b", gpus=16, hardware="v100-sxm2-32gb"))
    assert (found.job.workload.precision, found.job.precision.weights) == ("fp16", "fp16")
    assert {one.flag for one in found.assumptions} >= {"--precision", "--weights"}
    assert search(found.job, found.asked, 1).fit
    newer = ask(RlRequest(model="qwen3-8b", gpus=16, hardware="h100-sxm"))
    assert (newer.job.workload.precision, newer.job.precision.weights) == ("bf16", "bf16")


def test_the_sentence_names_what_makes_the_step_as_long_as_it_is() -> None:
    phases = {"prepare": 1.0, "sync": 27.0}
    assert _decides(phases, 17.0, 10.0) == "weight sync takes more than either, 27 s"
    assert _decides(phases, 40.0, 30.0) == "generation decides"
    said = "learning with the 12 s of data and host work before it decides"
    assert _decides({"prepare": 12.0, "sync": 1.0}, 40.0, 30.0) == said, "its own host work comes before it"
    why = api.plan_rl(**SMALL, mode="split", train_gpus=3, generate_gpus=1)[0].why
    assert " on 1 GPU) and learning" in why or " on 1 GPU, learning" in why


def test_nothing_fits_says_what_would() -> None:
    flags = ["--model", "qwen3-14b", "--gpus", "2", "--hardware", "h100-sxm", "--framework", "nemo-rl@0.5", "--max-length", "8k"]
    found = run(*flags)
    assert found.exit_code == 1
    assert "Nothing fits" in found.output
    assert "--gpus" in found.output or "--lora-rank" in found.output


def test_pools_of_two_kinds(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n- {kind: h100, hardware: h100-sxm, count: 1, site: a}\n"
        "- {kind: a100, hardware: a100-sxm-80gb, count: 1, site: b}\n"
        "links:\n- {between: [a, b], bandwidth: 10 Gb/s, latency: 1 ms}\n"
    )
    said = {name: value for name, value in SMALL.items() if name not in ("gpus", "hardware")}
    found = api.plan_rl(**said, cluster=file, staleness=1)
    plan = found[0].file
    assert (plan.hardware, plan.generate_hardware) == ("h100-sxm", "a100-sxm-80gb")
    assert (plan.placement.train_gpus, plan.placement.generate_gpus) == (8, 8)
    assert plan.prediction is not None
    assert plan.prediction.phases_s["sync"] > 8e9 / 1.25e9  # the weights over the link


@pytest.mark.parametrize(
    "flags",
    [
        [], ["--model", "qwen3-4b"], ["--model", "qwen3-4b", "--gpus", "4", "--framework", "x"],
        ["--model", "qwen3-4b", "--gpus", "4", "--mode", "both"], ["--model", "qwen3-4b", "--gpus", "4", "--staleness", "8..0"],
        ["--model", "qwen3-4b", "--gpus", "4", "--actor", "tp=x"], ["--model", "qwen3-4b", "--gpus", "4", "--rollout", "zz=1"],
        ["--model", "qwen3-4b", "--gpus", "4", "--answers", "mean=9"," --algorithm"],
        ["--model", "qwen3-4b", "--gpus", "4", "--framework", "prime-rl", "--mode", "colocated"],
        ["--model", "qwen3-4b", "--gpus", "4", "--algorithm", "sac"], ["estimate", "missing.yaml"],
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence(flags: list[str]) -> None:
    found = CliRunner().invoke(main, ["rl", *flags])
    assert found.exit_code == 2
    assert "Traceback" not in found.output


def test_reading_of_flags() -> None:
    assert read_staleness("0..8") == (0, 8)
    assert read_staleness(2) == (2, 2)
    assert read_fields("tp=4, recompute=full", "--actor") == {"tp": 4, "recompute": 2}
    with pytest.raises(PlannerError):
        read_fields("tp", "--actor")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--samples", "1"], "grpo with 1 answer"), (["--keep-rate", "2"], "from 0.001 to 1"),
        (["--prompts", "0"], "--prompts is 0"), (["--turns", "0"], "--turns is 0"),
        (["--memory-share", "2"], "--memory-share is 2.0"),
        (["--train-gpus", "20"], "change --train-gpus"), (["--actor", "tp=3"], "--actor tp=3: no such layout"),
        (["--rollout", "tp=64"], "--rollout tp=64: no such layout"), (["--staleness", "8..0"], "the smaller first like 0..8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_name_of_its_flag(flags: list[str], says: str) -> None:
    """A 0 must not read as not said, and a fixed degree that rules everything out is the one named."""
    found = CliRunner().invoke(main, ["rl", "--model", "qwen3-4b", "--gpus", "4", *flags])
    assert found.exit_code == 2 and says in found.stderr


@pytest.mark.parametrize("more", [{"mode": "hybrid"}, {"mode": "split"}, {"mode": "split", "staleness": 2}])
def test_the_timeline_shows_the_pools_as_idle_as_they_are(more: dict[str, Any]) -> None:
    """Engines that never train sample while the others do, at their share of the rate of all, and stop for the new weights."""
    asked = {**SMALL, "framework": "verl", "staleness": 1, "train_gpus": 3 if more["mode"] == "hybrid" else 2, **more}
    plan = api.estimate_rl(**asked).file
    one, found = plan.prediction, slices(plan)
    assert one is not None
    sampled = sum(end - start for pool, phase, start, end, _ in found if (pool, phase) == ("generate", "generate")) / STEPS
    synced = [start for pool, phase, start, _, _ in found if (pool, phase) == ("generate", "sync")]
    assert len(synced) == STEPS and sampled <= one.step_s - one.parts_s["sync"] + 1e-9
    assert 1.0 - sampled / one.step_s == pytest.approx(one.idle["generate"], abs=one.parts_s["sync"] / one.step_s + 1e-6)


@pytest.mark.proof
def test_an_engine_that_takes_too_much_is_told_a_smaller_share() -> None:
    """OpenRLHF's default of 0.95 stands beside nothing; its scripts for one pool, and so the plan, take 0.6."""
    asked = {"model": "qwen3-8b", "gpus": 16, "algorithm": "ppo", "framework": "openrlhf", "mode": "colocated"}
    assert answer(RlRequest(**asked)).fit
    greedy = answer(RlRequest(**asked, memory_share=0.95))
    assert not greedy.fit and [one.flag for one in greedy.ways if "share" in one.flag] == ["--memory-share 0.6"]


def test_generation_is_not_priced_where_no_update_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways out that change nothing of a model whose update fits nowhere end before their engines are priced."""
    question = ask(RlRequest(model="deepseek-v3", gpus=8, framework="verl", mode="colocated", staleness="0"))
    assert not search(question.job, question.asked, 1).fit
    monkeypatch.setattr("planner.rl.rl_search.sampler_of", None)
    with pytest.raises(PlannerError, match="no update of deepseek-v3 fits on 8 GPUs"):
        search(question.job, question.asked, 1, only_fitting=True)


@pytest.mark.proof
def test_another_back_end_of_the_framework_is_told() -> None:
    """A model whose sharded weights fit no GPU next to a gathered layer may fit in a pipeline."""
    found = answer(RlRequest(model="deepseek-v3", gpus=512, train_gpus=248, framework="verl", mode="split", staleness="0"))
    assert not found.fit and "--trainer megatron" in [one.flag for one in found.ways]


def test_states_that_stay_are_asked_for_priced_and_said(tmp_path: Path) -> None:
    """Nothing is moved, and it lies beside the engine; frameworks that cannot be told so say it."""
    asked = {**SMALL, "framework": "verl", "mode": "colocated", "actor": "dp=4"}
    moved, kept = api.estimate_rl(**asked).file, api.estimate_rl(**asked, offload="none").file
    assert moved.offload is None and kept.offload == ()
    assert kept.prediction.phases_s["switch"] < moved.prediction.phases_s["switch"]
    assert kept.prediction.memory_gib["generate"] > moved.prediction.memory_gib["generate"] + 4.0
    assert kept.prediction.memory_gib["train"] >= moved.prediction.memory_gib["train"]
    kept.save(tmp_path / "plan.yaml")
    again = api.estimate_rl(tmp_path / "plan.yaml").file
    assert again.offload == () and again.prediction.memory_gib == kept.prediction.memory_gib
    assert api.estimate_rl(**asked, offload="optimizer").file.offload == ("optimizer",)
    for more, said in (
        ({"offload": "none", "framework": "nemo-rl"}, "to the host between training .* no setting changes"),
        ({"offload": "optimizer", "framework": "openrlhf"}, "or none of it"), ({"offload": "x"}, "--offload is 'x'"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match=said):
            api.estimate_rl(**{**asked, **more})

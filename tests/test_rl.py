"""RL steps: training, weight sync, the step of every placement, plan files, published rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.layout import Layout
from planner.model import load_model
from planner.questions.accuracy.beyond import answered, shipped_beyond, summarise_beyond
from planner.rl.host_times import host_times
from planner.rl.rl_framework import load_framework
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_plan import PHASES, RlPlan
from planner.rl.rl_search import price
from planner.rl.training_phase import priced
from planner.rl.weight_sync import SyncSides, sync_seconds, sync_table, tensors_of
from planner.serving.serving_layout import ServingLayout
from planner.trainer import load_trainer
from tests.rl_samples import H100, MODEL, job, workload
from tools.evidence import rl_hosts

COLOCATED = Placement(mode="colocated", train_gpus=8, generate_gpus=8)
SPLIT = Placement(mode="split", train_gpus=8, generate_gpus=8, staleness=1, sync="bucketed")
LAYOUTS = RlLayouts(
    actor=Layout(tp=2, dp=4, sequence_parallel=1, zero=1, recompute=2), rollout=ServingLayout(tp=1, replicas=8, max_batch=256)
)


def test_quantised_tensors_travel_with_their_scales() -> None:
    eight = Cluster(hardware=H100, num_gpus=8)
    sides = SyncSides(train=eight, generate=eight, trained_over=8, generated_over=8, engines=1)
    cost, model = sync_table().cost("tensor"), load_model("qwen3-30b-a3b")
    plain, fine = (float(sync_seconds("tensor", model, sides, weights=one)) for one in ("bf16", "fp8_block"))
    assert fine - plain == pytest.approx(tensors_of(model) * cost.tensor - 30.5e9 / cost.rate, rel=0.01)


@pytest.mark.parametrize(("framework", "casts"), [("nemo-rl", True), ("verl", True), ("slime", False)])
def test_engines_that_quantise_themselves_get_bf16(framework: str, casts: bool) -> None:
    eight, model = Cluster(hardware=H100, num_gpus=8), load_model("qwen3-30b-a3b")
    sides = SyncSides(train=eight, generate=eight, trained_over=8, generated_over=8, engines=1)
    plain, fine = (float(sync_seconds("bucketed", model, sides, framework=framework, weights=one)) for one in ("bf16", "fp8_block"))
    assert (fine == plain) is casts


def test_few_microbatches_leave_a_bubble() -> None:
    """Stages idle (p - 1) / m of the time of the slowest: with fewer microbatches a larger part."""
    learner, work = job().learner(8), workload()
    deep, flat = Layout(pp=4, dp=2, zero=1, recompute=2), Layout(pp=4, dp=1, zero=1, recompute=2)
    few, many = priced(learner, deep, work).estimate, priced(learner, flat, work).estimate
    assert few.bubble_share[0] > many.bubble_share[0] > 0.0
    found = priced(learner, deep, work)
    assert 0.2 < found.forward[0] / found.update[0] < 0.5


def test_columns_of_the_trainer_are_priced_as_single_layouts() -> None:
    layouts = [Layout(tp=2, dp=4, sequence_parallel=1, zero=1), Layout(pp=2, dp=4, zero=1), Layout(dp=8, zero=1, recompute=2)]
    many = priced(job().learner(8), Layout.stack(layouts), workload())
    for number, one in enumerate(layouts):
        alone = priced(job().learner(8), one, workload())
        assert many.update[number] == pytest.approx(alone.update[0], rel=1e-9)
        assert many.forward[number] == pytest.approx(alone.forward[0], rel=1e-9)


def test_tensors_of_checkpoints() -> None:
    """Qwen3-8B: 36 layers of 11 tensors (q, k, v, o and two norms of heads, two norms, three of the MLP), and 3."""
    assert tensors_of(MODEL) == 36 * 11 + 3
    assert tensors_of(load_model("qwen3-30b-a3b")) == 48 * (6 + 2 + 3 * 128 + 2) + 3


def test_sync_by_hand_and_by_measurement() -> None:
    """base + tensors x host time + W / rate; NeMo's NCCL reshard of DeepSeek-V3 took 2.39 to 2.83 s."""
    cluster = Cluster(hardware=H100, num_gpus=256)
    sides = SyncSides(train=cluster, generate=cluster, trained_over=256, generated_over=32, engines=8)
    model = load_model("deepseek-v3")
    assert 2.39 / 1.5 < float(sync_seconds("reshard", model, sides)) < 2.83 * 1.5
    cost = sync_table().cost("bucketed", "verl")
    expected = cost.base + 399 * cost.tensor + 2 * 8.19e9 / (cost.rate or 1.0)
    assert float(sync_seconds("bucketed", MODEL, sides, framework="verl")) == pytest.approx(expected, rel=0.01)
    slow = SyncSides(train=cluster, generate=cluster, trained_over=1, generated_over=1, engines=1, between=1e9)
    assert float(sync_seconds("reshard", MODEL, slow)) > 16.0


def test_parts_sum_to_the_step() -> None:
    for placement in (COLOCATED, SPLIT, Placement(mode="split", train_gpus=8, generate_gpus=8)):
        found = price(job(), placement, LAYOUTS)
        assert sum(float(np.ravel(one)[0]) for one in found.step.parts.values()) == pytest.approx(found.seconds)
        assert set(found.step.phases) == set(PHASES)


def test_one_after_the_other_or_side_by_side() -> None:
    """T = P + G + L + S in turn, max(G, P + L) + S side by side."""
    turn = price(job(), Placement(mode="split", train_gpus=8, generate_gpus=8), LAYOUTS).step.phases
    side = price(job(), SPLIT, LAYOUTS)
    learn = sum(float(side.step.phases[name][0]) for name in ("logprob", "reference", "train", "prepare"))
    generate = float(side.step.phases["generate"][0])
    assert side.seconds == pytest.approx(max(generate, learn) + float(np.ravel(side.step.phases["sync"])[0]))
    assert float(turn["generate"][0]) > generate  # the synchronous engine runs in the framework's process
    ahead = price(job(), Placement(mode="split", train_gpus=8, generate_gpus=8, staleness=4, sync="bucketed"), LAYOUTS)
    assert ahead.seconds <= side.seconds


def test_hybrid_lies_between() -> None:
    """Engines of the trainer help: faster than without them, and never faster than the learning itself."""
    hybrid = Placement(mode="hybrid", train_gpus=8, generate_gpus=9, staleness=2, sync="bucketed")
    layouts = RlLayouts(actor=LAYOUTS.actor, rollout=ServingLayout(tp=1, replicas=9, max_batch=256))
    found = price(job(), hybrid, layouts)
    own = {name: float(np.ravel(one)[0]) for name, one in found.step.phases.items()}
    busy = found.seconds - float(np.ravel(found.step.parts["generate"])[0])
    before = (busy - own["sync"]) / 9 / own["generate"]  # the sync stops the engines that never train too
    assert before < 1.0 and found.seconds == pytest.approx(busy + (1.0 - before) * own["generate"])
    assert found.seconds >= float(found.step.busy["train"][0]) - 1e-9
    assert sum(float(np.ravel(one)[0]) for one in found.step.parts.values()) == pytest.approx(found.seconds)


def test_memory_of_phases() -> None:
    found = price(job(), COLOCATED, LAYOUTS)
    assert set(found.memory.peak) == {"generate", "logprob", "train", "sync"}
    small = price(job(workload=workload(model=load_model("qwen3-32b"))), COLOCATED, LAYOUTS)
    assert small.chance > 0.9 > 0.05 >= found.chance
    more = price(job(memory_share=0.9), COLOCATED, LAYOUTS)
    assert float(np.ravel(more.memory.peak["generate"])[0]) > float(np.ravel(found.memory.peak["generate"])[0])


def test_states_that_are_not_offloaded_lie_beside_the_engine() -> None:
    """Of actor, critic and reference, each by itself; to move them takes time, and dropped gradients of FSDP take no room."""
    def priced(*states: str, trainer: str = "megatron") -> tuple[dict[str, float], float, Any]:
        framework = dataclasses.replace(load_framework("nemo-rl@0.5"), offloaded=frozenset(states))
        work = workload(critic=MODEL, reference=True)
        found = price(job(framework=framework, workload=work, trainer=load_trainer(trainer)), COLOCATED, LAYOUTS)
        peak = {name: float(np.ravel(one)[0]) for name, one in found.memory.peak.items()}
        return peak, float(np.ravel(found.step.phases["switch"])[0]), found.train.actor

    every, moved, actor = priced("weights", "gradients", "optimizer", "reference")
    sizes = {"weights": actor.weights, "gradients": actor.estimate.memory["gradients"]}
    sizes["optimizer"] = actor.estimate.memory["optimizer_states"]
    states = ["weights", "gradients", "optimizer", "reference"]
    for name in states:
        peak, switch, _ = priced(*(one for one in states if one != name))
        more = float(np.ravel(sizes[name])[0]) * 2.0 if name in sizes else float(np.ravel(actor.weights)[0])
        assert peak["generate"] - every["generate"] == pytest.approx(more), name
        assert peak["train"] > every["train"] and (switch < moved) == (name in ("weights", "optimizer"))
    fsdp, _, learner = priced("weights", "optimizer", "reference", trainer="verl")
    both, _, _ = priced("weights", "gradients", "optimizer", "reference", trainer="verl")
    assert float(np.ravel(learner.estimate.memory["gradients"])[0]) > 0 and fsdp["generate"] == both["generate"]


def test_wrong_placements_are_one_sentence() -> None:
    for wrong in (
        {"mode": "colocated", "train_gpus": 8, "generate_gpus": 4}, {"mode": "hybrid", "train_gpus": 8, "generate_gpus": 8},
        {"mode": "colocated", "train_gpus": 8, "generate_gpus": 8, "staleness": 1},
        {"mode": "split", "train_gpus": 8, "generate_gpus": 8, "partial": True}, {"mode": "x", "train_gpus": 1, "generate_gpus": 1},
    ):  # fmt: skip
        with pytest.raises(PlannerError):
            Placement(**wrong)  # type: ignore[arg-type]


def test_plan_files_come_back() -> None:
    plan = RlPlan(
        workload=workload(critic=MODEL), hardware="h100-sxm", gpus=16, framework="nemo-rl@0.5", trainer="megatron",
        engine="vllm@0.11", placement=SPLIT, layouts=LAYOUTS,
    )  # fmt: skip
    data = library.parse_yaml(library.dump_yaml(plan.to_dict()), "plan.yaml")
    assert RlPlan.from_dict(data) == plan
    with pytest.raises(PlannerError):
        RlPlan.from_dict({**data, "gpus": 8})


def test_published_steps_within_their_bounds() -> None:
    """Steps: median 15 %, 90th percentile 35 %; updates: median 12 %; syncs within 1.5 times but one for which no link is fast
    enough; ranges hold nine of ten. Pairs: right in 13 of 14, all but DeepSeek-V3 of v0.5, 3.1 % apart."""
    rows = answered(file for file in shipped_beyond() if file.parent.name == "rl")
    steps = [one.quantities["step_s"].error for one in rows if "step_s" in one.quantities and one.counts]
    assert len(steps) >= 33
    assert np.median(np.abs(steps)) <= 0.15
    assert np.percentile(np.abs(steps), 90) <= 0.35
    syncs = [one.quantities["sync_s"] for one in rows if "sync_s" in one.quantities and one.counts]
    assert sum(1 / 1.5 <= one.predicted / one.measured <= 1.5 for one in syncs) >= len(syncs) - 1
    updates = [one.quantities["train_s"].error for one in rows if "train_s" in one.quantities and one.counts]
    assert len(updates) >= 20 and np.median(np.abs(updates)) <= 0.12
    assert all(one["held"] >= 0.9 for one in summarise_beyond(rows)["quantities"]["rl"].values())
    rates = {one.id: one.quantities["tokens_per_s_per_gpu"] for one in rows if "tokens_per_s_per_gpu" in one.quantities}
    pairs = [
        (one, rates[name.rsplit("-", 2)[0] + tail])
        for name, one in rates.items()
        if name.endswith("-sync")
        for tail in {other.removeprefix(name.rsplit("-", 2)[0]) for other in rates if other.endswith("-async1")}
        if name.rsplit("-", 2)[0] + tail in rates
    ]
    apart = [(a, b) for a, b in pairs if abs(a.measured / b.measured - 1.0) > 0.03]
    right = [(a.measured > b.measured) == (a.predicted > b.predicted) for a, b in apart]
    assert len(apart) >= 8
    assert np.mean(right) >= 0.9


@pytest.mark.proof
@pytest.mark.parametrize("out", ["nemo-rl-v0.4", "nemo-rl-v0.5"])
def test_host_times_fitted_without_a_source_predict_it(out: str) -> None:
    """The linear form of a row is its step; a source left out keeps the bounds: median 15 %, 90th percentile 35 %."""
    rows = rl_hosts.priced_rows()
    shipped = {one.id: one.quantities["step_s"].error for one in answered(one for one in shipped_beyond() if one.stem == out)}
    for row in rows[out]:
        assert row.ratio(host_times()) - 1.0 == pytest.approx(shipped[row.name], abs=0.01), row.name
    sizes = np.abs(rl_hosts.errors(rows[out], rl_hosts.fitted([one for name, some in rows.items() if name != out for one in some])))
    assert np.median(sizes) <= 0.15
    assert np.percentile(sizes, 90) <= 0.35

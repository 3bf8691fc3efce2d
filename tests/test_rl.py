"""RL steps: lengths, packing, generation, weight sync, the step of every placement, plan files, published rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import library
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.model import load_model
from planner.questions.accuracy.beyond import answered, shipped_beyond, summarise_beyond
from planner.rl.answer_lengths import AnswerLengths, read_answers
from planner.rl.generation import HostCost, Sampler, longest_stall, places_of
from planner.rl.host_times import host_times
from planner.rl.packing import packed, padded
from planner.rl.rl_framework import load_framework
from planner.rl.rl_job import RlJob
from planner.rl.rl_layout import Placement, RlLayouts
from planner.rl.rl_plan import PHASES, RlPlan
from planner.rl.rl_search import price
from planner.rl.rl_workload import RlWorkload
from planner.rl.training_phase import priced
from planner.rl.weight_sync import SyncSides, sync_seconds, sync_table, tensors_of
from planner.serving.engine import load_engine
from planner.serving.served import Served
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.step import Pass, step_time
from planner.trainer import load_trainer
from tools.evidence import rl_hosts

H100 = load_hardware("h100-sxm")
MODEL = load_model("qwen3-8b")


def workload(**changes: Any) -> RlWorkload:
    """A small step of GRPO."""
    given: dict[str, Any] = {
        "model": MODEL, "prompts": 32, "samples": 8, "prompt_length": 128, "max_length": 4096,
        "answers": read_answers("mean=1000,p99=3000", 3968),
    }  # fmt: skip
    return RlWorkload(**{**given, **changes})


def job(**changes: Any) -> RlJob:
    """That step on H100 with NeMo RL."""
    framework = load_framework("nemo-rl@0.5")
    given: dict[str, Any] = {
        "workload": workload(), "framework": framework, "trainer": load_trainer("megatron"), "engine": load_engine("vllm@0.11"),
        "hardware": H100, "generate_hardware": H100, "precision": Precision(),
    }  # fmt: skip
    return RlJob(**{**given, **changes})


COLOCATED = Placement(mode="colocated", train_gpus=8, generate_gpus=8)
SPLIT = Placement(mode="split", train_gpus=8, generate_gpus=8, staleness=1, sync="bucketed")
LAYOUTS = RlLayouts(
    actor=Layout(tp=2, dp=4, sequence_parallel=1, zero=1, recompute=2), rollout=ServingLayout(tp=1, replicas=8, max_batch=256)
)


# ------------------------------------------------------------------------------------------------ lengths and packing


def test_lengths_have_the_mean_and_the_percentile_that_were_said() -> None:
    found = read_answers("mean=3200,p99=8192", 16000)
    assert found.mean == pytest.approx(3200, rel=0.005)
    assert found.quantile(0.99) == pytest.approx(8192, rel=0.02)


def test_cut_lengths_keep_the_mean_and_pile_up_at_the_end() -> None:
    found = read_answers("3200", 4000)
    assert found.mean == pytest.approx(3200, rel=0.005)
    assert found.most == 4000
    assert found.shares[-1] > 0.3


def test_expected_maximum_by_hand() -> None:
    """Two equally likely lengths: E[max of n] = 2 - (1/2)^n of (1, 2)."""
    two = AnswerLengths(lengths=(1.0, 2.0), shares=(0.5, 0.5))
    assert np.allclose(two.longest_of([1, 2, 3]), [1.5, 1.75, 1.875])


def test_lengths_of_a_file_and_a_histogram(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100 3\n200 1\n")
    assert read_answers(f"@{file}", 1000).mean == 125
    file.write_text("[100, 200, 300]")
    assert read_answers(f"@{file}", 250).mean == pytest.approx(550 / 3)
    file.write_text("step:1 - response_length/mean:900.0 - response_length/max:2000.0\nstep:2 - response_length/mean:1100.0\n")
    assert read_answers(f"@{file}", 4000).mean == pytest.approx(1000, rel=0.01)
    file.write_text("[100, 200, 300]")
    again = AnswerLengths.from_dict(read_answers(f"@{file}", 1000).to_dict())
    assert again.mean == pytest.approx(200)


@pytest.mark.parametrize("said", ["mean=5000", "p99=300", "mean=100,p99=50", "mean=x", "median=3", "@missing.txt"])
def test_wrong_lengths_are_one_sentence(said: str) -> None:
    with pytest.raises(PlannerError):
        read_answers(said, 4000)


def test_packing_by_hand() -> None:
    """Answers of 1,872 with prompts of 128 fill 4,096 two by two: 8 of a replica take 4 microbatches."""
    work = workload(answers=read_answers("fixed:1872", 3968), prompts=4, samples=8)
    found = packed(work, 4, 4096.0)
    assert (found.microbatches, found.tokens) == (4, 4000.0)
    assert packed(work, 4, 2048.0).microbatches == 8
    assert padded(work, 4, 2).microbatches == 4


def test_rounds_of_dynamic_sampling() -> None:
    """By hand: of 64 prompts all are kept, so one round; of 3 x 64 half are, so one; a quarter, 48 of 192, takes a second one."""
    assert workload().rounds == 1.0
    many = workload(algorithm="dapo", prompts=64, generated=3.0, keep_rate=0.5)
    assert many.rounds == pytest.approx(1.0, abs=1e-4)
    assert many.replace(keep_rate=0.25).rounds == pytest.approx(2.0, abs=0.01)
    rates = [many.replace(keep_rate=one).rounds for one in (0.9, 0.4, 0.34, 0.3, 0.1, 0.02)]
    assert rates == sorted(rates) and rates[-1] == pytest.approx(1 / 0.06, rel=0.05)
    with pytest.raises(PlannerError, match="grpo with 1 answer"):
        workload(samples=1)


def test_places_of_a_cache_that_is_not_known() -> None:
    """A cache far above its error holds what it holds; one nearer to its error fewer; one below it more, of those that start."""
    layout = ServingLayout(tp=1, replicas=8, max_batch=256)
    memory = Sampler(job().served("colocated"), layout, workload()).memory
    wide = dataclasses.replace(memory, cache=64e9, capacity=64e4, spread=1e6)
    assert places_of(wide, 1e4, 2e4, np.array([256.0])) == pytest.approx(64.0, rel=1e-3)
    assert places_of(wide, 1e4, 2e4, np.array([16.0])) == pytest.approx(16.0)
    found = [float(places_of(dataclasses.replace(wide, spread=one), 1e4, 2e4, np.array([256.0]))[0]) for one in (1e9, 1e10, 3e10)]
    assert found == sorted(found, reverse=True) and found[-1] < 64.0
    edge = dataclasses.replace(wide, cache=1e9, capacity=1e4, spread=4e9)  # of those that start
    assert 1.0 < float(places_of(edge, 1e4, 2e4, np.array([256.0]))[0]) < 4.0


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


def test_packing_never_needs_more_than_a_sequence_for_each_answer() -> None:
    work = workload()
    for replicas in (1, 2, 8, 64):
        found = packed(work, replicas, 4096.0)
        each = math.ceil(256 / replicas)
        assert each * (128 + work.answers.mean) / 4096 * 0.95 <= found.microbatches <= each


# ------------------------------------------------------------------------------------------------ generation


def sampler(work: RlWorkload, host: HostCost | None = None, **fields: Any) -> Sampler:
    """Engines that sample a step."""
    served = Served(model=MODEL, hardware=H100, engine=load_engine("vllm@0.11"))
    return Sampler(served, ServingLayout(**{"tp": 1, "replicas": 8, "max_batch": 256, **fields}), work, host)


def test_equal_answers_take_one_decode_a_token() -> None:
    """Fixed lengths in one wave: L decodes of the whole batch at the mean context."""
    work = workload(answers=read_answers("fixed:1000", 3968))
    found = sampler(work)
    layout = ServingLayout(tp=1, replicas=8, max_batch=256)
    clock = found.flow.engine.clock(32.0, 0.0)
    work_of = Pass(batch=32.0, context=128 + 500.0, clock=clock)
    decode = float(np.ravel(step_time(found.flow.served, layout, work_of).total)[0])
    assert float(found.seconds[0]) == pytest.approx(1000 * decode, rel=0.03)


def test_two_waves_take_twice_as_long() -> None:
    work = workload(answers=read_answers("fixed:1000", 3968), prompts=64)
    one, two = sampler(work, max_batch=64), sampler(work, max_batch=32)
    wave = float(sampler(workload(answers=work.answers), max_batch=32).seconds[0])
    assert float(one.seconds[0]) < float(two.seconds[0])
    assert float(two.seconds[0]) == pytest.approx(2 * wave, rel=0.05)


def test_a_longer_tail_costs_and_running_ahead_hides_it() -> None:
    short, long = workload(answers=read_answers("mean=1000,p99=1500", 3968)), workload()
    assert float(sampler(long).seconds[0]) > 1.5 * float(sampler(short).seconds[0])
    found = sampler(long)
    assert float(found.generation(2.0).steady[0]) < 0.8 * float(found.generation().seconds[0])
    assert float(found.even[0]) < float(found.seconds[0])


def test_a_group_is_in_flight_until_its_longest_answer_ends() -> None:
    """Slots of groups that are filled again as they end, sampled: so many answers run in the mean as the formula has them."""
    work = workload(prompts=16, samples=8)
    flow = sampler(work, replicas=1, max_batch=4096).flow
    lengths = np.array([work.answers.quantile(share) for share in (np.arange(1000) + 0.5) / 1000])
    groups = np.random.default_rng(0).choice(lengths, size=(20000, work.samples))
    running = 2 * 16 * groups.sum() / groups.max(axis=1).sum()  # the groups of two steps
    age = work.answers.squared / (2.0 * work.answers.mean)
    one = flow.decode(np.arange(1), np.array([running]), np.array([work.prompt_length + age]))
    seconds = 16 * 8 * work.answers.mean / running * float(one[0])
    assert running < 0.7 * 2 * 16 * 8 and float(flow.steady(1.0)[0]) == pytest.approx(seconds, rel=0.02)


def test_more_engines_are_never_slower_and_hosts_cost() -> None:
    times = [float(sampler(workload(), replicas=n).seconds[0]) for n in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)
    plain, costly = sampler(workload()), sampler(workload(), HostCost(sample=1e-4))
    each = workload().sampled / 8 * workload().answers.mean
    assert float(costly.seconds[0] - plain.seconds[0]) == pytest.approx(each * 1e-4, rel=0.1)


def test_columns_are_priced_as_single_layouts() -> None:
    tps, replicas = np.array([1, 2, 4]), np.array([8, 4, 2])
    many = sampler(workload(), tp=tps, replicas=replicas)
    for number, (tp, count) in enumerate(zip(tps, replicas, strict=True)):
        alone = sampler(workload(), tp=int(tp), replicas=int(count))
        assert float(many.seconds[number]) == pytest.approx(float(alone.seconds[0]), rel=1e-9)


def test_ranks_wait_for_the_slowest_host_where_graphs_are_cut() -> None:
    """H(n) - 1 by hand; vLLM 0.10 launches a decode layer by layer, 0.11 as one graph; a rank alone waits for nobody."""
    assert longest_stall([1, 2, 4]) == pytest.approx([0.0, 1 / 2, 1 / 2 + 1 / 3 + 1 / 4])
    work = workload(answers=AnswerLengths(lengths=(1000.0,), shares=(1.0,)))

    def longer(version: str, tp: int) -> float:
        served = Served(model=MODEL, hardware=H100, engine=load_engine(f"vllm@{version}"), precision=Precision())
        layout = ServingLayout(tp=tp, replicas=8 // tp, max_batch=256)
        with_stalls, without = (float(Sampler(served, layout, work, HostCost(stall=one)).seconds[0]) for one in (1e-3, 0.0))
        return with_stalls - without

    assert longer("0.10.0", 4) == pytest.approx(1000 * 1e-3 * 13 / 12, rel=0.01)
    assert longer("0.10.0", 1) == longer("0.11.2", 4) == 0.0


def test_a_bias_of_the_router_does_not_balance_answers_to_one_prompt() -> None:
    """Engines of RL serve related requests: DeepSeek-V3 touches fewer experts than behind an API."""
    one = job(workload=workload(model=load_model("deepseek-v3"))).served("split")
    assert one.related and one.skewed and not dataclasses.replace(one, related=False).skewed


def test_tools_and_speculation() -> None:
    waiting = sampler(workload(turns=4, tool_s=5.0, tool_tokens=100, max_length=8192))
    assert float(waiting.seconds[0]) > float(sampler(workload()).seconds[0]) + 10.0
    from planner.serving.traffic import Speculation

    drafted = sampler(workload(speculation=Speculation(depth=3, acceptance=0.8)))
    assert float(drafted.seconds[0]) < float(sampler(workload()).seconds[0])


# ------------------------------------------------------------------------------------------------ training, sync


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


# ------------------------------------------------------------------------------------------------ the step


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


# ------------------------------------------------------------------------------------------------ published rows


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

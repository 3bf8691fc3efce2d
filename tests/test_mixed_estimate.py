"""Mixed layouts priced: the one-kind case is that of ``plan estimate``; parts, monotonicity, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.cost.estimate import PARTS
from planner.cost.memory.states import COMPONENTS
from planner.cost.refine import price_exactly
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.layout import Layout
from planner.mixed.boundaries import Hops
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_job import MixedJob, split_by_speed
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage


def job_on(*kinds: NodeKind, links: tuple[Link, ...] = (), model: str = "llama-8b", batch=64, trainer="megatron") -> MixedJob:
    cluster = split_by_speed(ClusterFile(nodes=kinds, links=links))
    hardware = kinds[0].hardware
    said = Request(model=model, num_gpus=8, hardware=hardware, trainer=trainer, global_batch_size=batch, sequence_length=4096)
    resolved = resolve(said).job
    return MixedJob(workload=resolved.workload, cluster=cluster, trainers={one.kind: resolved.trainer for one in cluster.nodes})


A100 = NodeKind(kind="a100", hardware="a100-sxm-80gb", count=4)
H100 = NodeKind(kind="h100", hardware="h100-sxm", count=4)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "b", "recompute", "trainer"),
    [(2, 4, 4, 1, "none", "megatron"), (4, 1, 8, 2, "full", "megatron"), (1, 8, 4, 1, "selective", "megatron"),
     (8, 2, 2, 2, "none", "megatron"), (1, 2, 16, 1, "full", "torchtitan"), (2, 1, 16, 1, "full", "torchtitan"),
     (1, 4, 8, 1, "full", "automodel"), (1, 4, 8, 1, "none", "automodel")],
)  # fmt: skip
def test_one_kind_is_what_the_estimate_of_a_uniform_layout_says(tp, pp, dp, b, recompute, trainer) -> None:
    """AutoModel's pipelines run empty after every two microbatches."""
    job = job_on(A100, trainer=trainer)
    if trainer == "automodel":
        calls = job.trainer.with_facts({"terms": {"automodel": {"local_batch": 2}}})
        job = replace(job, trainers={"a100": calls})
    zero = 1 if trainer == "megatron" else 3 if pp == 1 else min(job.trainer.legal.zero_with_pp)
    number = {"none": 0, "selective": 1, "full": 2}[recompute]
    m = 64 // (b * dp)
    shared = job.layout("a100", tp=tp, pp=pp, dp=dp, micro_batch_size=b, num_microbatches=m, zero=zero, recompute=number)
    layout = Layout(**{name: int(value) for name, value in shared.columns().items()})
    one = price_exactly(job.workload, job.clusters["a100"], job.trainer, [layout])[0]
    stages = tuple(Stage(kind="a100", layers=32 // pp, tp=tp, recompute=recompute) for _ in range(pp))
    pipeline = Pipeline(stages=stages, count=dp, micro_batch_size=b, num_microbatches=64 // (b * dp))
    found = estimate_mixed(job, MixedLayout(pipelines=(pipeline,), zero=zero))
    for part in PARTS:
        assert found.time[part] == pytest.approx(float(one.time[part][0]), rel=1e-9, abs=1e-12), part
    assert found.step_time == pytest.approx(float(one.step_time[0]), rel=1e-12)
    assert found.mfu == pytest.approx(float(one.mfu[0]), rel=1e-9)
    worst = max(found.stages, key=lambda stage: stage.memory_peak)
    for name in COMPONENTS:
        assert worst.memory[name] == pytest.approx(float(one.memory[name][0]), rel=1e-9, abs=1.0), name
    assert found.out_of_memory == pytest.approx(float(one.out_of_memory_probability[0]), rel=1e-6)
    for name in ("tensor", "pipeline", "data"):
        assert found.hidden[name] == pytest.approx(float(one.hidden[name][0]), rel=1e-9, abs=1e-12)


def two_kinds(a_layers: int, links: tuple[Link, ...] = (), slow: float = 1.0):
    a100 = replace(A100, slowdown={"": slow} if slow != 1.0 else {})
    job = job_on(a100, H100, links=links)
    stages = (Stage(kind="a100", layers=a_layers, tp=8), Stage(kind="h100", layers=32 - a_layers, tp=8))
    pipeline = Pipeline(stages=stages, count=4, micro_batch_size=1, num_microbatches=16)
    return estimate_mixed(job, MixedLayout(pipelines=(pipeline,)))


def test_a_stage_is_priced_on_its_own_gpu() -> None:
    even, uneven = two_kinds(16), two_kinds(10)
    assert uneven.step_time < even.step_time
    slow, fast = even.stages
    assert slow.busy > 1.5 * fast.busy and slow.usable_memory != fast.usable_memory
    assert even.between_stages > uneven.between_stages
    assert sum(even.time.values()) == pytest.approx(even.step_time, rel=1e-15)


def test_a_slow_node_and_a_slow_link_take_longer() -> None:
    plain = two_kinds(10)
    assert two_kinds(10, slow=1.4).step_time > plain.step_time
    link = Link(between=("a100", "h100"), bandwidth=1e9 / 8, latency=0.01)
    slow = two_kinds(10, (link,))
    assert slow.step_time > plain.step_time + 16 * 0.02
    faster = two_kinds(10, (replace(link, bandwidth=1e10),))
    assert plain.step_time < faster.step_time < slow.step_time


def test_a_hop_over_a_link_by_hand() -> None:
    link = Link(between=("a100", "h100"), bandwidth=1e9, latency=0.05)
    found = two_kinds(10, (link,))
    whole = 4096 * 4096 * 2  # s b h in bf16
    hop = 4 * whole / 1e9 + 0.05  # four pipelines at once
    assert found.time["pipeline_communication"] == pytest.approx(16 * 2 * hop, rel=1e-9)


def test_replicas_on_two_kinds_reduce_over_the_slower_network_and_wait_for_each_other() -> None:
    job = job_on(A100, H100)
    def whole(kind, m):
        return Pipeline(stages=(Stage(kind=kind, layers=32, tp=8),), count=4, num_microbatches=m)

    even = estimate_mixed(job, MixedLayout(pipelines=(whole("a100", 8), whole("h100", 8))))
    shared = estimate_mixed(job, MixedLayout(pipelines=(whole("a100", 5), whole("h100", 11))))
    assert shared.step_time < even.step_time and shared.between_replicas < even.between_replicas
    for one in (even, shared):
        assert one.pipelines[0].stages[0].end["exposed"] > 0


def test_slow_nodes_become_a_kind_of_their_own() -> None:
    cluster = ClusterFile(
        nodes=(replace(A100, slowdown={"node-1": 1.4}), H100), links=(Link(between=("a100", "h100"), bandwidth=1e9),)
    )
    split = split_by_speed(cluster)
    assert [(one.kind, one.count, one.slowdown) for one in split.nodes] == [
        ("a100", 3, {}), ("a100 node-1", 1, {"": 1.4}), ("h100", 4, {})
    ]  # fmt: skip
    assert split.link("a100 node-1", "h100").bandwidth == 1e9
    assert split.num_nodes == cluster.num_nodes and split_by_speed(split) == split
    again = split_by_speed(replace(split, nodes=tuple(  # a node of a split cluster slows down: no kind stands twice
        replace(one, slowdown={**one.slowdown, split.names_of(one.kind)[0]: 3.0}) for one in split.nodes
    )))  # fmt: skip
    assert again.num_nodes == cluster.num_nodes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"num_microbatches": 3}, "sequences a step"), ({"layers": 31}, "the stages hold"), ({"tp": 3}, "does not divide"),
     ({"count": 8}, "takes 64 GPUs of a100")],
)  # fmt: skip
def test_a_layout_that_does_not_suit_is_a_sentence(change, sentence) -> None:
    job = job_on(A100)
    stage = Stage(kind="a100", layers=change.get("layers", 32), tp=change.get("tp", 8))
    count = change.get("count", 4)
    pipeline = Pipeline(stages=(stage,), count=count, num_microbatches=change.get("num_microbatches", 64 // count))
    with pytest.raises(PlannerError, match=sentence):
        estimate_mixed(job, MixedLayout(pipelines=(pipeline,)))


def test_walk_of_unequal_stages_is_exact_beyond_the_repeated_part() -> None:
    from planner.cost.pipeline.schedule_walk import StageDurations, _run, program, walked_time

    rng = np.random.default_rng(0)
    for _ in range(6):
        p, m = int(rng.integers(2, 6)), int(rng.integers(40, 60))
        both = StageDurations(rng.uniform(0.2, 2.0, p), rng.uniform(0.4, 4.0, p), np.zeros(p))
        whole = max(_run(program(1, p, 1, m), p, both, 0.0)[1])
        assert walked_time(1, p, 1, m, both) == pytest.approx(whole, rel=1e-3)
        assert whole <= (both.forward + both.backward).sum() + (m - 1) * (both.forward + both.backward).max() + 1e-9


def test_a_hop_leaves_the_node_where_the_next_stage_begins_on_another() -> None:
    """One GPU a stage: the fourth hop alone passes the network, with the cards of all four GPUs; so does that to the other kind."""
    one, other = (NodeKind(kind=name, hardware=name, count=2, gpus=4) for name in ("a100-sxm-80gb", "h100-sxm"))
    job = job_on(one, other, model="gpt3-350m", batch=8)
    stages = tuple(Stage(kind=kind.kind, layers=2, tp=1) for kind in (one, other) for _ in range(6))
    alone = Pipeline(stages=stages, count=1, micro_batch_size=1, num_microbatches=8)
    hops = Hops(job)
    seconds = [hops.boundary(alone, number) for number in range(11)]
    inside = {round(seconds[number], 12) for number in (0, 1, 2, 4)}
    assert len(inside) == 1 and seconds[3] > 2.0 * seconds[0] and seconds[9] > 2.0 * seconds[6]
    together = replace(alone, count=4, stages=(stages[0], stages[0], stages[6], stages[6]))
    shared = Hops(job).boundary(together, 0)
    assert shared > seconds[3] and Hops(job).boundary(together, 1) > seconds[5]
    wide = replace(one, network=4.0 * job.clusters[one.kind].hardware.network_bandwidth)
    assert Hops(job_on(wide, other, model="gpt3-350m", batch=8)).boundary(together, 0) == pytest.approx(seconds[3], rel=1e-9)


def test_a_link_between_interleaved_stages_is_busy_for_every_chunk() -> None:
    """With two chunks a microbatch crosses three times each way: forward, back to the first stage, forward; gradients reversed."""
    link = Link(between=("a100", "h100"), bandwidth=1e8)
    job, stages = job_on(A100, H100, links=(link,)), (Stage(kind="a100", layers=12, tp=8), Stage(kind="h100", layers=20, tp=8))
    pipeline = Pipeline(stages=stages, count=4, num_microbatches=16)
    once = 4 * 4096 * 4096 * 2 / 1e8  # four pipelines, s b h in bf16
    assert Hops(job).busiest_link(pipeline) == pytest.approx(once)
    assert Hops(job).busiest_link(pipeline, 2) == pytest.approx(3 * once)
    found = estimate_mixed(job, MixedLayout(pipelines=(pipeline,), schedule="interleaved_1f1b", vpp=2))
    assert found.step_time >= 16 * 3 * once


def test_three_kinds_have_each_their_link() -> None:
    """A ring of stages over three kinds: every pair of them has a link of its own, and the last leads back to the first."""
    l40s = NodeKind(kind="l40s", hardware="l40s", count=4)
    links = tuple(Link(between=ends, bandwidth=1e8) for ends in (("a100", "h100"), ("h100", "l40s"), ("l40s", "a100")))
    stages = tuple(Stage(kind=kind, layers=layers, tp=8) for kind, layers in (("a100", 10), ("h100", 16), ("l40s", 6)))
    one = Pipeline(stages=stages, count=1, num_microbatches=64)
    once = 4096 * 4096 * 2 / 1e8
    assert Hops(job_on(A100, H100, l40s, links=links)).busiest_link(one, 2) == pytest.approx(2 * once)

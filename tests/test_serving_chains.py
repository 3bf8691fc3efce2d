"""Engines whose stages stand on several kinds of GPU: the cut against brute force, one kind as plan serve has it, exports."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.cluster_file import ClusterFile, Link, NodeKind
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.serving.chain import Chain, ChainEngine, Hop, best_cut, chain_memory
from planner.serving.chain_search import Place, best_chain
from planner.serving.engine import load_engine
from planner.serving.engine_passes import Engine
from planner.serving.export.serving_folder import make_export
from planner.serving.kinds_answer import serve_kinds
from planner.serving.priced_table import Task
from planner.serving.result import StepTime
from planner.serving.serve_plan import ServePlan, load_serve_plan
from planner.serving.served import Served
from planner.serving.serving_estimate import estimate_of
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_question import ServeRequest
from planner.serving.traffic import Lengths, Limits, Traffic

SMALL = ClusterFile(nodes=(
    NodeKind(kind="a100", hardware="a100-sxm-40gb", count=1, gpus=2, price=6.0),
    NodeKind(kind="l40s", hardware="l40s", count=1, gpus=2, price=4.0),
))  # fmt: skip
CHAT = Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(128), load="concurrency", value=32.0)


def served(hardware: str, model: str = "llama-70b") -> Served:
    return Served(model=load_model(model), hardware=load_hardware(hardware), engine=load_engine("vllm"))


def columns(rows: int, **values: int) -> ServingLayout:
    usual = {"tp": 1, "pp": 2, "replicas": 1, "max_batch": 256, "max_tokens": 2048, **values}
    return ServingLayout(**{name: np.full(rows, value) for name, value in usual.items()})


@pytest.fixture(scope="module")
def plan() -> ServePlan:
    """A model that no kind of a small cluster holds by itself."""
    found = serve_kinds(ServeRequest(model="llama-70b", engine="vllm"), SMALL)
    assert [one.what for one in found.rows] == ["pipeline"] and found.rows[0].plan is not None
    assert found.rows[0].usd_per_hour == pytest.approx(10.0)
    assert "starts on none of its 2 GPUs" in found.notes[0]
    return found.rows[0].plan


def test_the_cut_is_that_of_brute_force() -> None:
    random = np.random.default_rng(5)
    cut = none = 0
    for _ in range(150):
        p = int(random.integers(2, 5))
        layers, kinds = int(random.integers(p, 11)), random.integers(0, 2, p)
        cost, fixed = random.uniform(0.5, 3.0, 2)[kinds], random.uniform(0.0, 1.0, p)
        most, groups = random.integers(1, layers + 1, p), float(random.uniform(1.0, p))
        found = best_cut(layers, cost.tolist(), fixed.tolist(), most.tolist(), groups)
        every = [np.array(one) for one in itertools.product(*(range(1, n + 1) for n in most)) if sum(one) == layers]
        taus = [one * cost + fixed for one in every]
        if found is None:
            assert not every
            none += 1
            continue
        assert sum(found) == layers and all(1 <= one <= n for one, n in zip(found, most, strict=True))
        mine = np.array(found) * cost + fixed
        best = min(max(tau.sum(), groups * tau.max()) for tau in taus)
        assert max(mine.sum(), groups * mine.max()) == pytest.approx(best, rel=1e-9)
        cut += 1
    assert cut > 60 and none > 5


def test_one_kind_cut_evenly_is_plan_serve_bit_for_bit_but_for_the_sends() -> None:
    one = served("h100-sxm")
    layout = replace(columns(2, max_tokens=8192), tp=np.array([2, 4]))
    chain = Chain(kinds=(one, one), hops=(Hop(bandwidth=np.inf),), layers=np.full((2, 2), 40), kind=np.array([[0, 1]] * 2))
    plain, linked = Engine(one, layout, CHAT), ChainEngine(chain, layout, CHAT)
    for batch in (1.0, 32.0, 200.0):
        first, second = plain.decode_step(np.full(2, batch)), linked.decode_step(np.full(2, batch))
        for part in fields(StepTime):
            if part.name != "communication":
                assert np.all(np.asarray(getattr(first, part.name)) == getattr(second, part.name)), part.name
        wait = np.asarray(second.communication) - np.asarray(first.communication)
        size = 2.0 * one.model.hidden_size * max(batch / 2, 1.0)
        inside, outside = (one.cluster.collective_time("send_recv", size, 2, stride) for stride in (layout.tp, one.cluster.domain))
        if batch == 1.0:  # one group waits for nobody; what is left is a send over the network in place of one inside a node
            assert wait == pytest.approx(outside - inside, rel=1e-6)
        # of two stages one has the head: a send is no longer than what both wait for it
        assert wait == pytest.approx(outside - inside if batch == 1.0 else 0.0, rel=1e-6, abs=1e-12)
    memory = serving_memory(one.model, one.hardware, one.engine, one.precision, layout, CHAT)
    both = chain_memory(chain, layout, CHAT)
    for part in fields(memory):
        assert np.array_equal(np.asarray(getattr(memory, part.name)), np.asarray(getattr(both, part.name))), part.name


def test_a_pass_waits_for_the_slowest_stage_and_its_link() -> None:
    kinds, layout = (served("h100-sxm"), served("l40s")), columns(3, tp=4)
    layers = np.array([[40, 40], [60, 20], [70, 10]])
    chain = Chain(kinds=kinds, hops=(Hop(bandwidth=np.inf),), layers=layers, kind=np.array([[0, 1]] * 3))
    engine = ChainEngine(chain, layout, CHAT)
    step = engine.decode_step(np.full(3, 32.0))
    times = [Engine(one, columns(3, tp=4, pp=1), CHAT).decode_step(np.full(3, 16.0)) for one in kinds]
    inside = [sum(float(np.ravel(getattr(one, name))[0]) for name in ("linear", "attention", "memory_bound", "communication"))
              for one in times]  # fmt: skip
    head, host = float(np.ravel(times[1].head)[0]), [float(np.ravel(one.host)[0]) / 2 for one in times]
    for row, (a, b) in enumerate(layers):
        tau = a / 80 * inside[0] + host[0], b / 80 * inside[1] + host[1] + head
        assert float(np.ravel(step.total)[row]) == pytest.approx(max(2 * max(tau), sum(tau)), rel=2e-2)
    narrow = ChainEngine(replace(chain, hops=(Hop(bandwidth=1e6),)), layout, CHAT)
    sent = 16 * 8192 * 2 / 1e6  # rows of a group, width, bytes over bytes/s: the link is the slowest station
    assert np.asarray(narrow.decode_step(np.full(3, 32.0)).total) == pytest.approx(2 * sent, rel=0.2)


def every_chain(places: list[Place], task: Task) -> float:
    """Most output tokens/s of all stage counts, cuts and batches of tp 1, priced in full."""
    model, best = places[0].served.model, 0.0
    for counts in itertools.product((1, 2), repeat=2):
        pp = sum(counts)
        cuts = [np.diff([0, *ends, model.num_layers]) for ends in itertools.combinations(range(1, model.num_layers), pp - 1)]
        batches = 2 ** np.arange(0, 11)
        layers, batch = np.repeat(cuts, len(batches), axis=0), np.tile(batches, len(cuts))
        kind = np.tile(np.repeat([0, 1], counts), (len(batch), 1))
        chain = Chain(kinds=tuple(one.served for one in places), hops=(Hop(bandwidth=np.inf),), layers=layers, kind=kind)
        layout = columns(len(batch), pp=pp, replicas=2 // max(counts))
        layout = replace(layout, max_batch=np.maximum(layout.max_batch, batch))
        value = (batch * layout.replicas).astype(float)
        found = estimate_of(ChainEngine(chain, layout, task.traffic), chain_memory(chain, layout, task.traffic), value)
        best = max(best, float(np.max(np.where(np.asarray(found.fits), np.asarray(found.output_tokens_per_second), 0.0))))
    return best


@pytest.mark.parametrize("lengths", [(1024, 128), pytest.param((128, 512), marks=pytest.mark.proof)])
def test_the_search_finds_what_brute_force_finds(lengths: tuple[int, int]) -> None:
    """All compositions of the layers over one or two stages of each kind at every batch, against the search: batches near the best
    of four shapes leave 0 to 0.3 % (docs/log/serving.md)."""
    model = replace(load_model("llama-8b"), num_layers=12)
    places = [Place(served=replace(served(name), model=model), gpus=2, per_node=2) for name in ("a100-sxm-40gb", "l40s")]
    traffic = replace(CHAT, input=Lengths.fixed(lengths[0]), output=Lengths.fixed(lengths[1]))
    task = Task(gpus=4, traffic=traffic, loaded=False, limits=Limits(), pins={"tp": 1, "max_tokens": 2048})
    found = best_chain(places, [Hop(bandwidth=np.inf)], task, "offline")
    assert found is not None and sum(found.cut) == 12
    assert found.choice.total >= every_chain(places, task) * (1.0 - 3e-3)


def test_a_pipeline_that_is_no_better_is_named_and_not_shown() -> None:
    two = ClusterFile(nodes=(SMALL.nodes[0], replace(SMALL.nodes[1], count=2)))
    found = serve_kinds(ServeRequest(model="llama-8b", engine="vllm", layout={"tp": 1}), two)
    assert not [one for one in found.rows if one.what == "pipeline"]
    assert any("less than the best other way" in note for note in found.notes)


@pytest.mark.proof
def test_engines_and_links_that_a_pipeline_needs() -> None:
    with pytest.raises(PlannerError, match="the model starts on no kind"):
        serve_kinds(ServeRequest(model="llama-70b", engine="trtllm"), SMALL)  # its layers are not cut by hand
    far = replace(SMALL, nodes=(SMALL.nodes[0], replace(SMALL.nodes[1], site="elsewhere")))
    with pytest.raises(PlannerError, match="the model starts on no kind"):  # no link between the sites
        serve_kinds(ServeRequest(model="llama-70b", engine="vllm"), far)
    linked = replace(far, links=(Link(between=("here", "elsewhere"), bandwidth=1e9, latency=0.01),))
    assert serve_kinds(ServeRequest(model="llama-70b", engine="vllm"), linked).rows[0].link_bytes_per_second > 0


def test_its_plan_is_priced_again_reported_and_exported(plan: ServePlan, tmp_path: Path, run: Any) -> None:
    file = tmp_path / "serve.yaml"
    plan.save(file)
    assert load_serve_plan(file) == plan
    again = planner.load_serve(file).report(format="json")
    assert plan.prediction is not None
    assert f'"value": {plan.prediction.output_tokens_per_second / 4:.6g}'[:16] in str(again)
    cut = ",".join(str(one.layers) for one in plan.stages)
    made = make_export(plan, "vllm")
    assert f"export VLLM_PP_LAYER_PARTITION={cut}" in made.files["serve.sh"] and "--nnodes 2" in made.files["serve.sh"]
    assert made.files["engines.txt"].splitlines()[1:] == ["0 serve 0,1 8000 0 0 0 2", "1 serve 0,1 8000 0 1 0 2"]
    assert "node 0: l40s" in made.files["hosts.txt"] or "node 0: a100" in made.files["hosts.txt"]
    with pytest.raises(PlannerError, match="dynamo starts engines on equal nodes"):
        make_export(plan, "dynamo")
    with pytest.raises(PlannerError, match="they must be the 2 of one pool with all 80"):
        replace(plan, stages=plan.stages[:1])
    for words in (("serve", "estimate", str(file)), ("serve", "what-if", str(file), "--gpus", "8")):
        done = run(*words)
        assert done.exit_code == 2 and "ask 'plan serve --cluster' again" in done.output


def test_two_engines_share_nodes(plan: ServePlan) -> None:
    """Two engines of one stage on the first kind, and of two on nodes of four of the second."""
    first, second = (replace(one, gpus_per_node=4) for one in plan.stages)
    stages = replace(first, layers=40), replace(second, layers=20), replace(second, layers=20)
    layout = replace(plan.layout, pp=3, replicas=2)
    made = make_export(replace(plan, gpus=12, layout=layout, stages=stages), "vllm")
    lines = [line.split() for line in made.files["engines.txt"].splitlines()[1:]]
    assert [(one[0], one[2], one[4], one[5], one[6]) for one in lines] == [
        ("0", "0,1", "0", "0", "0"), ("0", "2,3", "1", "0", "0"),
        ("1", "0,1", "0", "1", "0"), ("1", "2,3", "0", "2", "0"), ("2", "0,1", "1", "1", "0"), ("2", "2,3", "1", "2", "0"),
    ]  # fmt: skip

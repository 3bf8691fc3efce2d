"""Search over mixed layouts: its optimum against every layout of small cases, its bounds, what it says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.cluster_file import ClusterFile, NodeKind
from planner.errors import PlannerError
from planner.mixed.mixed_axes import MixedPins, axes_of
from planner.mixed.mixed_candidates import layouts_of
from planner.mixed.mixed_columns import columns_of, sharpened
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import MixedLayout, Pipeline, Stage
from planner.mixed.mixed_search import search_mixed
from planner.mixed.mixed_space import Space
from planner.model import load_model
from planner.search import SAFE
from planner.trainer import load_trainer
from planner.workload import Workload


def small_job(layers: int = 4, batch: int = 4, usable: float | None = None, length: int = 2048) -> MixedJob:
    model = replace(load_model("gpt3-1.3b"), num_layers=layers, published_parameters=0.0)
    profiles = {"a100": "a100-sxm-80gb", "l40s": "l40s"}
    nodes = tuple(NodeKind(kind=kind, hardware=hardware, count=1, gpus=2) for kind, hardware in profiles.items())
    trainer = load_trainer("megatron")
    workload = Workload(model=model, sequence_length=length, global_batch_size=batch, precision="bf16")
    job = MixedJob(workload=workload, cluster=ClusterFile(nodes=nodes), trainers={one.kind: trainer for one in nodes})
    if usable is not None:
        one = job.clusters["l40s"]
        job.clusters["l40s"] = replace(one, hardware=replace(one.hardware, usable_memory=usable))
    return job


def cuts(layers: int, p: int):
    """Layers of p stages; only the ends may be empty."""
    for some in itertools.product(range(layers + 1), repeat=p):
        if sum(some) == layers and all(some[1:-1]):
            yield some


def shares(total: int, replicas: int):
    for some in itertools.product(range(1, total + 1), repeat=replicas):
        if sum(some) == total:
            yield some


def every_layout(job: MixedJob):
    """Every pipeline through one or both kinds with all replicas that the GPUs allow, and pipelines of each kind side by side."""
    layers, batch = job.workload.model.num_layers, job.workload.global_batch_size
    longest = job.workload.sequence_length // 1024
    degrees = [(1, 1, 1), (1, 2, 1), (2, 1, 1), *[(1, 1, 2)] * (longest >= 2)]  # (tp, stages, cp) on two GPUs
    alike = [(some, b) for n in (1, 2) for some in itertools.product(degrees, repeat=n) for b in (1, 2, 4) if batch % b == 0
             if len({cp for _, _, cp in some}) == 1]  # fmt: skip
    for some, b in alike:
        cp, count = some[0][2], min(2 // (tp * p * cp) for tp, p, cp in some)
        for kinds in itertools.permutations(("a100", "l40s"), len(some)):
            if batch // b < count:
                continue
            places = [(kind, tp) for kind, (tp, p, _) in zip(kinds, some, strict=True) for _ in range(p)]
            for cut, given in itertools.product(cuts(layers, len(places)), shares(batch // b, count)):
                stages = tuple(Stage(kind=kind, tp=tp, layers=n) for (kind, tp), n in zip(places, cut, strict=True))
                layout = MixedLayout(
                    pipelines=tuple(Pipeline(stages=stages, micro_batch_size=b, num_microbatches=m) for m in given), cp=cp
                )
                yield layout
                for vpp in (2, 4):
                    chunks = 1 < len(places) <= layers / vpp and not any(n % vpp for n in cut) and len(set(given)) == 1
                    if chunks and given[0] % len(places) == 0:
                        yield replace(layout, schedule="interleaved_1f1b", vpp=vpp)
        if len(some) == 1:
            continue
        counts = [2 // (tp * p * cp) for tp, p, cp in some]
        if batch // b < sum(counts):
            continue
        for one, other in itertools.product(cuts(layers, some[0][1]), cuts(layers, some[1][1])):
            shapes = [
                tuple(Stage(kind=kind, tp=tp, layers=n) for n in cut)
                for kind, (tp, _, _), cut in zip(("a100", "l40s"), some, (one, other), strict=True)
            ]
            for given in shares(batch // b, sum(counts)):
                owners = [shapes[0]] * counts[0] + [shapes[1]] * counts[1]
                yield MixedLayout(cp=cp, pipelines=tuple(
                    Pipeline(stages=stages, micro_batch_size=b, num_microbatches=m) for stages, m in zip(owners, given, strict=True)
                ))  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layers", "batch", "usable", "length"),
    [(3, 3, None, 2048), (3, 4, 6.5e9, 2048), (4, 4, None, 1024), (4, 2, 8e9, 8192)],
)
def test_nothing_is_faster_than_what_is_found(layers: int, batch: int, usable: float | None, length: int) -> None:
    job = small_job(layers=layers, batch=batch, usable=usable, length=length)
    best: dict[tuple[int, int], float] = {}
    for layout in every_layout(job):
        found = estimate_mixed(job, layout)
        if found.fits:
            some = layout.cp, layout.vpp
            best[some] = min(best.get(some, np.inf), found.step_time)
    found = search_mixed(job, MixedPins(recompute="none"), top=50, gap=0.0)
    assert found.best[0][1].step_time == pytest.approx(min(best.values()), rel=1e-9)
    assert found.gap == 0.0
    for (cp, vpp), least in best.items():
        some = search_mixed(job, MixedPins(recompute="none", cp=cp, vpp=vpp), top=50, gap=0.0)
        assert some.best[0][1].step_time == pytest.approx(least, rel=1e-9)


def test_no_layout_is_below_the_bound_of_its_degrees() -> None:
    job = small_job(layers=6, batch=16)
    space = Space(job, axes_of(job, MixedPins())[0])
    seen = 0
    for kinds, apart in ((("a100",), False), (("a100", "l40s"), False), (("a100", "l40s"), True)):
        columns = columns_of(space, kinds, apart)
        for row in range(0, len(columns.bound), 3):
            sharp = max(columns.bound[row], sharpened(space, columns, np.array([row]))[0])
            for found in layouts_of(space, columns.row(row), np.inf):
                assert found.seconds >= sharp * (1.0 - 1e-12)
                seen += 1
    assert seen > 30


def test_closed_form_and_exact_price_agree() -> None:
    """The search prices with tables and closed forms what finalists are walked with, without stragglers and overhead."""
    job = small_job(layers=6, batch=16)
    space = Space(job, axes_of(job, MixedPins())[0])
    columns = columns_of(space, ("a100", "l40s"), False)
    order = np.argsort(columns.bound)[:12]
    for row in order:
        for found in layouts_of(space, columns.row(int(row)), np.inf):
            exact = estimate_mixed(job, found.layout)
            walked = exact.step_time - exact.time["stragglers"] - exact.time["overhead"]
            assert walked <= found.seconds * 1.001 and walked >= 0.9 * found.seconds
            assert exact.out_of_memory <= SAFE


def test_small_cards_get_fewer_layers() -> None:
    def layers(usable):
        found = search_mixed(small_job(layers=12, batch=16, usable=usable), MixedPins(recompute="none", micro_batch_size=4, tp=1))
        held = [one.count * stage.layers for one in found.mixed[0].pipelines for stage in one.stages if stage.kind == "l40s"]
        assert found.mixed[1].out_of_memory <= SAFE
        return sum(held), found.mixed[1].step_time

    roomy, tight = layers(None), layers(8e9)
    assert tight[0] < roomy[0] and tight[1] >= roomy[1]


def test_shares_and_scales_of_a_found_plan() -> None:
    found = search_mixed(small_job(layers=4, batch=64), MixedPins(tp=1))
    for layout, estimate in found.best:
        assert layout.global_batch_size == 64
        weights = sum(scale * one.count for scale, one in zip(layout.loss_scales(), layout.pipelines, strict=True))
        assert weights == pytest.approx(layout.replicas)
        assert sum(estimate.time.values()) == pytest.approx(estimate.step_time)


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [({"tp": 7}, "tp 7 does not divide the 16 attention heads"), ({"micro_batch_size": 3}, "micro_batch_size 3 does not divide"),
     ({"schedule": "zbv"}, "not planned on mixed clusters")],
)  # fmt: skip
def test_pins_that_cannot_be_are_sentences(pins, sentence) -> None:
    with pytest.raises(PlannerError, match=sentence):
        search_mixed(small_job(), MixedPins(**pins))


def test_host_states_that_no_rule_allows_are_no_answer() -> None:
    """What does not fit in fp16, whose states no host of Megatron holds, is said not to fit."""
    job = small_job()
    job = replace(job, workload=replace(job.workload, precision="fp16")).only("l40s")
    job.clusters["l40s"] = replace(job.clusters["l40s"], hardware=replace(job.clusters["l40s"].hardware, usable_memory=3e9))
    assert search_mixed(job).best == []


@pytest.mark.proof
def test_no_layout_with_leading_dense_layers_is_below_its_bound() -> None:
    """Bounds look at the layers behind them alone, and at no traffic that could hide behind them."""
    job = small_job(batch=16)
    model = replace(load_model("deepseek-v2-lite"), num_layers=6, published_parameters=0.0)
    job = replace(job, workload=replace(job.workload, model=model))
    seen = 0
    for axes in axes_of(job, MixedPins()):
        if axes.vpp > 1:
            continue
        space = Space(job, axes)
        for kinds, apart in ((("a100",), False), (("a100", "l40s"), False), (("a100", "l40s"), True)):
            columns = columns_of(space, kinds, apart)
            for row in () if columns is None else range(0, len(columns.bound), 3):
                sharp = max(columns.bound[row], sharpened(space, columns, np.array([row]))[0])
                for found in layouts_of(space, columns.row(row), np.inf):
                    assert found.seconds >= sharp * (1.0 - 1e-12)
                    seen += 1
    assert seen > 30


def test_a_trainer_without_pipelines_has_replicas_of_each_kind() -> None:
    job = small_job()
    trainer = load_trainer("fsdp")
    found = search_mixed(replace(job, trainers=dict.fromkeys(job.trainers, trainer)))
    assert found.mixed is not None
    assert all(len(one.stages) == 1 for layout, _ in found.best for one in layout.pipelines)

"""Every export target writes a mixed layout or refuses it, and what it names instead it writes: random layouts of all shapes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from mixed_samples import export_of, pipeline, stage, two_kinds

from planner.cluster_file import Link
from planner.errors import PlannerError
from planner.mixed.export.mixed_folder import mixed_bundle
from planner.mixed.export.mixed_targets import TARGETS, mixed_target, nearest_run
from planner.mixed.export.who_runs import runners
from planner.mixed.mixed_estimate import check_mixed, estimate_mixed
from planner.mixed.mixed_layout import MixedLayout, Outer, Pipeline

LAYERS, PLAN = 8, {"planner_mixed_plan": 1}
CLUSTER = two_kinds(2, 4, site="west", links=(Link(between=("east", "west"), bandwidth=1e9, latency=0.03),))


def some_pipeline(rng: random.Random, vpp: int, m: int, b: int) -> Pipeline:
    """Up to three stages on one kind or two, each kind with its tp, any recompute."""
    order = rng.choice((["big"], ["small"], ["big", "small"], ["small", "big"]))
    kinds = sorted((rng.choice(order) for _ in range(rng.randint(1 + (vpp > 1), 3))), key=order.index)
    inner = sorted(rng.sample(range(1, LAYERS // vpp), len(kinds) - 1))
    layers = [vpp * (end - start) for start, end in pairwise((0, *inner, LAYERS // vpp))]
    tp, again = {kind: rng.choice((1, 1, 2)) for kind in order}, rng.choice(("none", "full", "selective"))
    stages = [
        stage(kind, count, tp[kind], recompute=again if rng.random() < 0.8 else "none")
        for kind, count in zip(kinds, layers, strict=True)
    ]
    return pipeline(*stages, m=m, b=b, count=rng.choice((1, 1, 2)))


def some_layout(rng: random.Random) -> MixedLayout:
    """Equal or unequal replicas, context parallelism, virtual stages, any sharding, states on the host, local updates."""
    vpp, b, m = rng.choice((1, 1, 2)), rng.choice((1, 2)), rng.choice((6, 12))
    shares = [m, *([m if rng.random() < 0.5 else m + 6] if rng.random() < 0.5 else [])]
    return MixedLayout(
        pipelines=tuple(some_pipeline(rng, vpp, one, b) for one in shares), cp=rng.choice((1, 1, 2)), zero=rng.randrange(4),
        schedule="interleaved_1f1b" if vpp > 1 else rng.choice(("1f1b", "1f1b", "gpipe")), vpp=vpp,
        dp_shard=rng.choice((0, 0, 1)), offload_optimizer=rng.choice((0, 0, 0, 100)),
        outer=rng.choice((None, None, None, None, Outer(method="diloco", every=10, bits=8))),
    )  # fmt: skip


def written(mixed, name: str) -> bool:
    """Whether a target writes a layout; where it refuses, in one line."""
    try:
        files = mixed_bundle(mixed, name, PLAN).files
    except PlannerError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
        return False
    assert {"README.md", "plan.yaml"} < set(files) and any(one.endswith("run.sh") for one in files)
    return True


def look(seed: int) -> int:
    """Check one random layout on all targets; how many write it, or the one that they name. 0: no such layout of the job."""
    rng = random.Random(seed)
    layout, trainer = some_layout(rng), rng.choice(("megatron", "torchtitan"))
    mixed = export_of(layout, CLUSTER, trainer, sizes={"num_layers": LAYERS}, sequence_length=256)
    try:
        check_mixed(mixed.job, layout)
    except PlannerError:
        return 0
    said, found = [name for some in runners(mixed) for name in some], 0
    for name in TARGETS:
        runs = written(mixed, name)
        assert runs == (name in said), (seed, name)
        near, _ = (None, []) if runs else nearest_run(mixed_target(name, mixed), mixed)
        assert near is None or written(replace(mixed, layout=near), name), (seed, name)
        found += runs or near is not None
    return found


def test_every_target_writes_or_names_what_it_writes() -> None:
    assert sum(look(seed) for seed in range(8)) > 8


@pytest.mark.proof
def test_many_more_layouts() -> None:
    assert sum(look(seed) for seed in range(8, 400)) > 400


@pytest.mark.parametrize(
    ("m", "layers", "sentence"), [(5, (4, 4), "pass in rounds of 2"), (4, (3, 5), "3 layers has no 2 equal virtual stages")]
)
def test_virtual_stages_that_do_not_come_out_even(m: int, layers: tuple[int, int], sentence: str) -> None:
    cut = pipeline(stage("big", layers[0]), stage("small", layers[1]), m=m)
    layout = MixedLayout(pipelines=(cut,), schedule="interleaved_1f1b", vpp=2)
    with pytest.raises(PlannerError, match=sentence):
        estimate_mixed(export_of(layout, trainer="megatron", sizes={"num_layers": LAYERS}).job, layout)

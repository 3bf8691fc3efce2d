"""What a mixed search chooses beside the cut: interleaved stages, two levels of averages, which kinds to leave out, who runs it."""

import io
from dataclasses import replace

import numpy as np
import pytest
from mixed_samples import SITES, export_of, pipeline, stage, two_kinds
from rich.console import Console

from planner.cluster_file import ClusterFile, NodeKind
from planner.cost.pipeline.schedule_walk import StageDurations, walk, walked_time
from planner.errors import PlannerError
from planner.layout import Schedule
from planner.mixed.export.cut_job import cut_job
from planner.mixed.local_search import search_local
from planner.mixed.mixed_axes import MixedPins
from planner.mixed.mixed_changes import mixed_what_if
from planner.mixed.mixed_estimate import estimate_mixed
from planner.mixed.mixed_layout import INTERLEAVED, MixedLayout, Outer
from planner.mixed.mixed_plan import job_of, priced_plan
from planner.mixed.mixed_question import Wanted, ask_mixed
from planner.mixed.mixed_search import search_mixed, two_levels
from planner.mixed.one_kind import alone_of
from planner.mixed.run_limits import runs
from planner.model import load_model
from planner.questions.mixed.mixed_show import print_answer, print_changes
from planner.search import search
from planner.workload import Workload

SAID = {"model": "gpt3-125m", "global_batch_size": 16, "sequence_length": 2048, "trainer": "megatron"}
PINS = {"micro_batch_size": 1, "tp": 1, "cp": 1}
THREE = ClusterFile(nodes=tuple(
    NodeKind(kind=kind, hardware=hardware, count=1, gpus=gpus)
    for kind, hardware, gpus in (("h100", "h100-sxm", 4), ("a100", "a100-sxm-80gb", 4), ("t4", "t4", 1))
))  # fmt: skip


@pytest.fixture(scope="module")
def three():
    return ask_mixed(THREE, SAID, PINS, Wanted(top=2))


def test_hops_of_their_own_are_as_one_for_all() -> None:
    seconds = StageDurations(*(np.full(6, one) for one in (1.0, 2.0, 0.0)))
    shape = int(Schedule.INTERLEAVED), 3, 2, 6
    assert walked_time(*shape, seconds, [0.25] * 5) == walked_time(*shape, seconds, 0.25)
    slow = walk(*shape, seconds, [0.0, 0.0, 10.0, 0.0, 0.0])  # from the first chunk's end to the second's beginning
    first = next(span for span in slow if (span.stage, span.kind, span.microbatch) == (3, "F", 0))
    assert first.start == pytest.approx(3 * 1.0 + 10.0)


def test_interleaved_stages_wait_less_and_hold_more() -> None:
    def found(vpp):
        layout = MixedLayout(
            pipelines=(pipeline(stage("big", 16), stage("small", 16), m=2),), vpp=vpp, schedule=INTERLEAVED if vpp > 1 else "1f1b"
        )
        return estimate_mixed(export_of(layout, trainer="megatron", model="llama-8b").job, layout)

    plain, two = found(1), found(2)
    assert two.time["bubble"] < plain.time["bubble"] and two.stages[0].memory["activations"] > 0.0
    assert sum(two.time.values()) == pytest.approx(two.step_time)
    with pytest.raises(PlannerError, match="virtual stages are those of interleaved_1f1b"):
        MixedLayout(pipelines=(pipeline(stage("big", 4)),), vpp=2)


def test_chunks_of_an_export_are_equal_parts_of_every_stage() -> None:
    layout = MixedLayout(pipelines=(pipeline(stage("big", 20, 2), stage("small", 12, 2)),), vpp=2, schedule=INTERLEAVED)
    mixed = export_of(layout, trainer="megatron", model="llama-8b")
    assert cut_job(mixed).layers_per_chunk() == [[10, 10], [6, 6]]
    assert list(runs(mixed.job, "megatron", [layout])) == [layout]
    unequal = replace(layout, pipelines=(pipeline(stage("big", 20, 2), stage("small", 12)),))
    assert not any(runs(mixed.job, "megatron", [unequal]))


def test_a_pipeline_that_runs_empty_takes_as_long_as_its_calls() -> None:
    def seconds(m, call):
        layout = MixedLayout(pipelines=(pipeline(stage("big", 16), stage("small", 16), m=m),), zero=3)
        job = export_of(layout, trainer="automodel", model="llama-8b").job
        trainer = replace(job.trainer, terms=tuple(replace(one, local_batch=call) for one in job.trainer.terms))
        return estimate_mixed(replace(job, trainers=dict.fromkeys(job.kinds, trainer)), layout).pipelines[0]

    calls, whole = seconds(12, 4), seconds(12, 0)
    assert calls.seconds == pytest.approx(3 * seconds(4, 0).seconds) and calls.seconds > whole.seconds
    assert sum(calls.parts.values()) == pytest.approx(calls.seconds)


def test_two_levels_send_less_over_the_link() -> None:
    layout = MixedLayout(pipelines=(pipeline(stage("big", 32, 2), count=2), pipeline(stage("small", 32, 2), count=2)), zero=2)
    mixed = export_of(layout, SITES, model="llama-8b")
    (levels,) = two_levels(mixed.job, layout)
    assert levels.dp_shard == 2
    ring, two = (estimate_mixed(mixed.job, one) for one in (layout, levels))
    assert two.time["data_communication"] < 0.8 * ring.time["data_communication"]
    assert two.stages[0].memory["optimizer_states"] == pytest.approx(2.0 * ring.stages[0].memory["optimizer_states"])
    assert two_levels(export_of(layout, two_kinds(), model="llama-8b").job, layout) == []  # one site
    with pytest.raises(PlannerError, match="does not divide"):
        replace(layout, dp_shard=3)


def test_a_kind_that_adds_little_is_to_be_left_out(three) -> None:
    assert three.finding.mixed is not None
    step = three.finding.mixed[1].step_time
    assert all(one.step_time >= step * 0.999 for _, one in three.finding.without.values())
    assert "leave" in three.verdict or "faster than" in three.verdict
    alone = {one.kind: one for one in three.alone}
    uniform = search(three.job.uniform("h100"), top=1, only_fitting=True)
    assert alone_of(three.job, "h100").step_time_s == float(uniform.estimates[0].step_time[0])
    assert alone["t4"].step_time_s is None or alone["t4"].step_time_s > alone["h100"].step_time_s


@pytest.mark.proof
def test_one_kind_that_is_left_is_the_ordinary_question() -> None:
    work = Workload(model=load_model("gpt3-125m"), sequence_length=2048, global_batch_size=16, precision="bf16")
    job = job_of(work, two_kinds(), "megatron")
    plan = priced_plan(job, "megatron", search_mixed(job, top=1).best[0][0])
    (row,) = mixed_what_if(plan, without=["small"]).rows
    ordinary = float(search(job.uniform("big"), top=1).estimates[0].step_time[0])
    best = min(one for one in (row.alone and row.alone.step_time_s, row.best and row.best.prediction.step_time_s) if one)
    assert best <= ordinary and (row.alone is None or row.alone.step_time_s == ordinary)


def test_tables_show_whole_numbers_at_80_columns(three) -> None:
    changes = mixed_what_if(three.plans[0], without=["t4"])
    for width in (80, 120):
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=True, color_system=None)
        print_answer(console, three)
        print_changes(console, changes)
        assert "\u2026" not in out.getvalue()
        assert max(map(len, out.getvalue().splitlines())) <= width


@pytest.mark.proof
def test_sites_with_local_updates_get_what_their_trainer_runs() -> None:
    work = Workload(model=load_model("llama-3.2-1b"), sequence_length=2048, global_batch_size=20, precision="bf16")
    job = job_of(replace(work, model=replace(work.model, tied_embeddings=False)), SITES, "torchtitan")
    found = search_local(job, Outer(method="diloco", every=100, bits=8), MixedPins(micro_batch_size=1, cp=1))
    assert list(runs(job, "torchtitan", [found.layout])) == [found.layout]
    assert found.layout.global_batch_size == 20

"""Exports of mixed plans: who holds what, what is written, what is refused and which plan is named instead."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from mixed_samples import ALIKE, DILOCO, LLAMA_CUT, SITES, UNEQUAL, export_of, pipeline, stage, two_kinds

from planner.errors import PlannerError
from planner.layout import Order
from planner.mixed.export.cut_job import cut_job, in_order
from planner.mixed.export.flagscale import hetero, recompute
from planner.mixed.export.hexiscale import other_samples, words
from planner.mixed.export.mixed_folder import mixed_bundle
from planner.mixed.export.mixed_targets import TARGETS
from planner.mixed.export.placement import place
from planner.mixed.export.runnable import Limits, nearest, reasons
from planner.mixed.export.torch_bundle import settings
from planner.mixed.known_links import read_outer
from planner.mixed.mixed_layout import MixedLayout, Outer
from planner.trainers.bundle.folder import write_bundle
from planner.trainers.checking.started import started

PLAN = {"planner_mixed_plan": 1}


# ------------------------------------------------------------------------------------------------ places


def test_ranks_follow_the_nodes_and_every_gpu_is_taken_once() -> None:
    placed = place(UNEQUAL, two_kinds())
    assert [(one.name, one.gpus, one.first_rank) for one in placed.nodes] == [
        ("node-0", 2, 0),
        ("node-1", 2, 2),
        ("node-2", 1, 4),
    ]
    ranks = [rank for one in placed.stages for rank in one.ranks]
    assert sorted(ranks) == list(range(placed.world)) == list(range(5))
    for one in placed.stages:  # a stage lies on GPUs of its kind
        kind = UNEQUAL.pipelines[one.pipeline].stages[one.stage].kind
        nodes = [
            node.kind
            for node in placed.nodes
            for rank in one.ranks
            if node.first_rank <= rank < node.first_rank + node.gpus
        ]
        assert set(nodes) == {kind}
    assert [len(placed.of_replica(number)) for number in range(3)] == [2, 1, 2]


def test_a_tensor_group_does_not_straddle_nodes_that_have_room_for_it() -> None:
    three = MixedLayout(pipelines=(pipeline(stage("small", 4, 2), count=2), pipeline(stage("big", 4, 4))))
    assert [one.ranks for one in place(three, two_kinds()).stages] == [(4, 5), (6, 7), (0, 1, 2, 3)]
    wide = MixedLayout(pipelines=(pipeline(stage("small", 4, 4)),))
    assert [one.gpus for one in place(wide, two_kinds()).nodes] == [2, 2]  # two whole nodes
    odd = MixedLayout(pipelines=(pipeline(stage("small", 4, 1), m=1), pipeline(stage("small", 4, 2), m=1, count=2)))
    with pytest.raises(
        PlannerError, match=r"takes 5 GPUs of small in groups of 2, for which its 4 GPUs, 2 on a node, have no room"
    ):
        place(odd, two_kinds())


def test_trainers_of_one_kind_get_nodes_in_the_order_of_their_ranks() -> None:
    """Replicas of unlike kinds: a stage holds GPUs of both, so stages outermost would tear the nodes apart."""
    both = MixedLayout(
        pipelines=(pipeline(stage("big", 2), stage("big", 2)), pipeline(stage("small", 2), stage("small", 2)))
    )  # fmt: skip
    mixed = export_of(both, trainer="megatron")
    with pytest.raises(PlannerError, match="ranks that do not follow each other"):
        in_order(mixed)
    assert [one.name for one in in_order(mixed, Order.TP_CP_EP_PP_DP).nodes] == ["node-0", "node-1"]
    assert "--use-tp-pp-dp-mapping" in mixed_bundle(mixed, "megatron", PLAN).files["arguments.sh"]
    back = MixedLayout(pipelines=(pipeline(stage("small", 1, 2), stage("big", 3, 2)),), zero=1)
    assert [one.name for one in in_order(export_of(back, trainer="megatron")).nodes] == ["node-1", "node-0"]


# ------------------------------------------------------------------------------------------------ PyTorch


def test_plan_json_says_layers_ranks_shares_and_loss_scales() -> None:
    plan = settings(export_of(UNEQUAL))
    assert plan["global_batch_size"] == 12 and plan["tp"] == 1 and plan["schedule"] == "1F1B"
    assert [one["first_row"] for one in plan["replicas"]] == [0, 4, 10]
    # R m b / G by hand: 3 x 4 x 1 / 12, 3 x 3 x 2 / 12, 3 x 2 x 1 / 12
    assert [one["loss_scale"] for one in plan["replicas"]] == [1.0, 1.5, 0.5]
    assert sum(one["loss_scale"] for one in plan["replicas"]) == len(plan["replicas"])
    for one in plan["replicas"]:
        assert [layer for held in one["stages"] for layer in held["layers"]] == [0, 1, 2, 3]
    last = plan["replicas"][2]["stages"][1]
    assert last == {"layers": [1, 2, 3], "ranks": [4], "kind": "small", "recompute": "full", "recompute_layers": 2}


def test_the_folder_starts_as_many_processes_on_a_node_as_the_plan_has_there(tmp_path: Path) -> None:
    made = mixed_bundle(export_of(UNEQUAL), "pytorch", PLAN)
    write_bundle(made, tmp_path / "run")
    for node, processes in enumerate((2, 2, 1)):
        found, variables = started(tmp_path / "run", "run.sh", said={"NODE_RANK": str(node), "MASTER_ADDR": "here"})
        assert found[found.index("--nproc-per-node") + 1] == str(processes)
        assert found[found.index("--nnodes") + 1] == "3" and variables["NODE_RANK"] == str(node)
        assert found[found.index("--") + 1] == "mixed_train.py"
    for name in ("train.py", "mixed_train.py"):
        ast.parse(made.files[name])
    text = made.files["README.md"]
    assert "| 2 | 1 | 1 | small | 3 | 1 | full of 2 | 4 |" in text and "| 1 | 3 | 2 | 50.0 % | 1.5 |" in text
    assert json.loads(made.files["plan.json"])["replicas"] and yaml.safe_load(made.files["plan.yaml"]) == PLAN
    with pytest.raises(RuntimeError, match="set NODE_RANK to the number of this node, 0 to 2"):
        started(tmp_path / "run", "run.sh", said={"MASTER_ADDR": "here"})


def test_a_plan_of_another_trainer_is_written_with_a_warning() -> None:
    layout = dataclasses.replace(UNEQUAL, zero=1)
    made = mixed_bundle(export_of(layout, trainer="megatron"), "pytorch", PLAN)
    assert (
        "the plan was priced for trainer megatron" in made.warnings[0]
        and made.warnings[0][:30] in made.files["README.md"]
    )
    assert not mixed_bundle(export_of(UNEQUAL), "pytorch", PLAN).warnings


# ------------------------------------------------------------------------------------------------ trainers of one kind


def test_uneven_stages_as_megatrons_layout() -> None:
    made = mixed_bundle(export_of(LLAMA_CUT, trainer="megatron", model="llama-8b"), "megatron", PLAN)
    text = made.files["arguments.sh"]
    assert "--pipeline-model-parallel-layout 'Et*20|t*12L'" in text and "--tensor-model-parallel-size 2" in text
    assert "processes=(4 2 2)" in made.files["run.sh"]
    ends = MixedLayout(pipelines=(pipeline(stage("small", 0), stage("big", 4), stage("small", 0)),), zero=1)
    assert "'E|t*4|L'" in mixed_bundle(export_of(ends, trainer="megatron"), "megatron", PLAN).files["arguments.sh"]


def test_uneven_stages_as_torchtitans_modules() -> None:
    layout = dataclasses.replace(LLAMA_CUT, zero=2)
    made = mixed_bundle(export_of(layout, model="llama-8b"), "torchtitan", PLAN)
    stages = ast.literal_eval(made.files["plan_config.py"].split("STAGES = ")[1].split("\n]\n")[0] + "\n]")
    assert [len(one) for one in stages] == [21, 14] and stages[1][0] == "layers.20" and stages[1][-1] == "lm_head"
    assert cut_job(export_of(layout, model="llama-8b")).layers_per_chunk() == [[20], [12]]


def test_what_megatron_cannot_run_names_the_nearest_plan_that_it_can() -> None:
    with pytest.raises(PlannerError) as error:
        mixed_bundle(export_of(dataclasses.replace(UNEQUAL, zero=1), trainer="megatron"), "megatron", PLAN)
    text = str(error.value)
    assert (
        "pipelines with 3 different cuts" in text and "shares of 2 microbatches of 1, 3 microbatches of 2 and 4" in text
    )
    assert "The nearest plan that it runs is 1 x [big tp 1: 4 layers, recompute full], 6 microbatches of 2" in text


@pytest.mark.parametrize("name", TARGETS)
def test_the_nearest_plan_is_one_that_the_target_runs(name: str) -> None:
    limits = TARGETS[name].limits
    layouts = [
        UNEQUAL, ALIKE, LLAMA_CUT,
        dataclasses.replace(UNEQUAL, zero=3, cp=2, schedule="gpipe"),
        MixedLayout(pipelines=(pipeline(stage("big", 3, 4), stage("small", 1, 2, recompute="selective"), m=6),
                               pipeline(stage("big", 2, 2), stage("small", 2, 1), m=2)), ep=2),
        dataclasses.replace(UNEQUAL, outer=Outer(method="diloco", every=10)),
    ]  # fmt: skip
    for layout in layouts:
        near = nearest(layout, limits)
        assert near is not None and not reasons(near, limits)
        assert near.global_batch_size == layout.global_batch_size
        assert (near == layout) == (not reasons(layout, limits))


def test_no_nearest_plan_where_replicas_do_not_divide_the_batch() -> None:
    layout = MixedLayout(pipelines=(pipeline(stage("big", 4), m=2), pipeline(stage("small", 4), m=1)))
    assert nearest(layout, Limits(equal_shares=True)) is None
    sentence = "shares of 1 microbatch of 1 and 2 microbatches.*plan with fewer kinds or with --runnable"
    with pytest.raises(PlannerError, match=sentence):
        mixed_bundle(export_of(layout, trainer="megatron"), "megatron", PLAN)


# ------------------------------------------------------------------------------------------------ FlagScale, HexiScale


def test_flagscale_meshes() -> None:
    layout = MixedLayout(
        pipelines=(pipeline(stage("big", 12, 2), stage("big", 12, 2, recompute="full"),
                            stage("small", 8, recompute="full", recompute_layers=3), m=8),),
        zero=1,
    )  # fmt: skip
    mixed = export_of(layout, trainer="megatron", model="llama-8b")
    found = hetero(mixed)
    assert found["hetero_process_meshes"] == [2, 1, 1, 1, 2, 1, 1, 1, 1, 1]  # tp cp ep dp pp of each kind
    assert found["hetero_pipeline_layer_split"] == [12, 12, 8] and found["hetero_device_types"] == ["big", "small"]
    again = recompute(mixed)
    assert again["recompute_granularity_per_stage_micro_batch"] == [[1, 8, 0], [1, 8, 1], [1, 8, 1]]
    assert again["recompute_num_layers_per_stage_micro_batch"] == [[1, 8, 0], [1, 8, 12], [1, 8, 3]]
    files = mixed_bundle(mixed, "flagscale", PLAN).files
    data = yaml.safe_load(files["conf/train/plan.yaml"])
    assert data["system"]["pipeline_model_parallel_size"] == 3 and data["system"]["hetero"] == found
    assert "pipeline_model_parallel_layout" not in data["system"] and data["model"]["num_layers"] == 32
    assert files["hostfile"].splitlines()[1:] == [
        "ADDRESS-OF-node-0 slots=4 type=big",
        "ADDRESS-OF-node-1 slots=1 type=small",
    ]
    assert "run.py" in files["run.sh"] and '[ "$NODE_RANK" = 0 ] || exit 0' in files["run.sh"]


def test_flagscale_sorts_ranks_by_kind() -> None:
    layout = MixedLayout(pipelines=(pipeline(stage("big", 1), stage("small", 2), stage("big", 1)),), zero=1)
    with pytest.raises(PlannerError, match="big stands in two places of the pipeline"):
        mixed_bundle(export_of(layout, trainer="megatron"), "flagscale", PLAN)


def test_hexiscale_flags() -> None:
    layout = MixedLayout(
        pipelines=(pipeline(stage("big", 20, 2), stage("small", 12), m=8), pipeline(stage("big", 32, 2), m=8)), zero=2
    )  # fmt: skip
    found = words(export_of(layout, model="llama-2-7b"))
    said = dict(pairwise(found))
    assert said["--hetero_configs"] == "[[2, 1], [2]]" and said["--layer_partitions"] == "[[20, 12], [32]]"
    assert said["--pp_layouts"] == "[[[0, 1], [4]], [[2, 3]]]" and said["--model_size"] == "llama-7b"
    assert found[found.index("--chunks") : found.index("--accum-iter")] == ["--chunks", "8", "8"]
    made = mixed_bundle(export_of(layout, model="llama-2-7b"), "hexiscale", PLAN)
    assert "[[2, 1], [2]]" in made.files["arguments.sh"]
    with pytest.raises(PlannerError, match="it has llama-7b, llama-13b"):
        mixed_bundle(export_of(dataclasses.replace(ALIKE, zero=2)), "hexiscale", PLAN)


def test_hexiscale_says_where_its_data_loader_gives_labels_of_another_pipeline() -> None:
    """Ranks by node: big 0-1, small 2-3, so pipeline 0 is (0, 2) and pipeline 1 is (1, 3); the loader takes 1 for rank 2."""
    across = MixedLayout(pipelines=(pipeline(stage("big", 20), stage("small", 12), count=2),), zero=2)
    assert other_samples(export_of(across, model="llama-2-7b")) == [0]
    readme = mixed_bundle(export_of(across, model="llama-2-7b"), "hexiscale", PLAN).files["README.md"]
    assert "place_rank of get_distributed_dataloader" in readme
    apart = MixedLayout(pipelines=(pipeline(stage("big", 32), m=4), pipeline(stage("small", 32), m=4)), zero=2)
    assert other_samples(export_of(apart, model="llama-2-7b")) == []


# ------------------------------------------------------------------------------------------------ sites


def test_sites_that_step_alone_as_torchft_jobs() -> None:
    made = mixed_bundle(export_of(DILOCO, SITES), "torchtitan", PLAN)
    for number, (batch, processes) in enumerate(((8, "4"), (4, "2 2"))):
        folder = f"site-{number}"
        ast.parse(made.files[f"{folder}/diloco_config.py"])
        assert f"replica_id={number}" in made.files[f"{folder}/diloco_config.py"]
        assert f"global_batch_size={batch}" in made.files[f"{folder}/plan_config.py"]
        assert f"processes=({processes})" in made.files[f"{folder}/run.sh"]
    text = made.files["site-0/diloco_config.py"]
    for line in (
        "group_size=2",
        "sync_steps=10",
        "num_fragments=2",
        "should_quantize=True",
        "semi_sync_method='diloco'",
    ):
        assert line in text
    assert "fragment_sync_delay" not in text
    assert "global_batch_size=2 * batch" in text  # torchft's trainer divides by the sites
    assert "torchft_lighthouse --min_replicas 2" in made.files["README.md"]


def test_torchft_waits_as_long_as_a_slow_average_takes() -> None:
    """By itself it gives up after 10 and 60 seconds; here an average of the 1.2B parameters takes 40 s and more."""
    slow = dataclasses.replace(SITES, links=(dataclasses.replace(SITES.links[0], bandwidth=1e8),))
    cut = dataclasses.replace(
        DILOCO, outer=Outer(method="streaming_diloco", every=100, bits=32, fragments=4), zero=2,
        pipelines=(pipeline(stage("big", 16), count=4, m=2), pipeline(stage("small", 16), count=4, m=1)),
    )  # fmt: skip
    made = mixed_bundle(export_of(cut, slow, model="llama-3.2-1b"), "torchtitan", PLAN)
    size = 1.236e9 * 4
    for line in ("fragment_sync_delay=5", "fragment_update_alpha=0.5"):
        assert line in made.files["site-0/diloco_config.py"]
    found = {name: int(value) for name, value in re.findall(r"(TORCHFT_\w*TIMEOUT_SEC)=\"(\d+)\"", made.files["environment.sh"])}
    assert found["TORCHFT_TIMEOUT_SEC"] >= 60 + 2 * size / 1e8
    assert f"process_group_timeout_ms={1000 * found['TORCHFT_TIMEOUT_SEC']}" in made.files["site-1/diloco_config.py"]
    assert found["TORCHFT_QUORUM_TIMEOUT_SEC"] > 600


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("streaming_diloco:100:4:1", "2 to 100 fragments in turn, not 1"), ("streaming_diloco:1", "not 2"),
     ("streaming_diloco:10:8:11", "not 11")],
)  # fmt: skip
def test_fragments_that_cannot_be_averaged_in_turn(text: str, sentence: str) -> None:
    assert read_outer("streaming_diloco:100").fragments == 2
    with pytest.raises(PlannerError, match=sentence):
        read_outer(text)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (
            dataclasses.replace(DILOCO, outer=Outer(method="diloco", every=10, bits=4)),
            "averages in 4 bits; torchft sends 32 or 8",
        ),
        (
            dataclasses.replace(DILOCO, outer=Outer(method="diloco", every=10, fragments=3)),
            "3 fragments must divide the 10 steps",
        ),
        (dataclasses.replace(DILOCO, outer=Outer(method="local_sgd", every=10, bits=8)), "use diloco"),
        (
            dataclasses.replace(DILOCO, pipelines=(pipeline(stage("big", 3), stage("small", 1), count=2),)),
            "put each pipeline on one site",
        ),
    ],
)
def test_what_torchft_has_not(layout: MixedLayout, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        mixed_bundle(export_of(layout, SITES), "torchtitan", PLAN)


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(PlannerError, match="target of a mixed plan"):
        mixed_bundle(export_of(ALIKE), "deepspeed", PLAN)

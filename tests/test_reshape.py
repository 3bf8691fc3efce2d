"""``plan reshape``: boxes of two layouts, bytes and seconds of a move, the best plan with its move."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import planner
from planner.commands.main import main
from planner.cost.parameters import total_parameters
from planner.elastic.elastic_job import ElasticJob, Surroundings, load_seconds
from planner.elastic.engine_recipes import recipe_of, recipes
from planner.elastic.move_costs import exchange_seconds
from planner.elastic.moves import Move, move_of, nesting
from planner.elastic.shards import KINDS, Places, interval_overlaps, items_of, places_of, saved_of
from planner.errors import PlannerError
from planner.layout import Layout
from planner.library import names, read_yaml
from planner.model import load_model
from planner.trainer import load_trainer
from planner.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
DENSE = Workload(model=load_model("llama-8b"), sequence_length=4096, global_batch_size=96)
SPARSE = Workload(model=load_model("mixtral-8x7b"), sequence_length=4096, global_batch_size=96)


def places(workload: Workload, trainer: str = "torchtitan", **layout: int) -> Places:
    """Where a layout puts things."""
    return places_of(workload, load_trainer(trainer), Layout(**layout))


def move(workload: Workload, old: dict[str, int], new: dict[str, int], trainer: str = "torchtitan", node: int = 8) -> Move:
    """What a change of layout moves."""
    saved = saved_of(workload, load_trainer(trainer))
    return move_of(saved, places(workload, trainer, **old), places(workload, trainer, **new), node)


@pytest.mark.parametrize("name", ["llama-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-2b"])
def test_all_parameters_are_saved_once(name: str) -> None:
    model = load_model(name)
    workload = Workload(model=model, sequence_length=4096, global_batch_size=8)
    saved = saved_of(workload, load_trainer("megatron"))
    assert saved.parameters == pytest.approx(total_parameters(model, include_mtp=True), rel=2e-3)
    assert saved.bytes_each == {"weights": 2.0, "optimizer_states": 12.0}
    assert saved.size == pytest.approx(14.0 * saved.parameters)


def test_adapters_alone_are_saved() -> None:
    saved = saved_of(DENSE.replace(lora_rank=16), load_trainer("trl"))
    assert 0 < saved.parameters < 0.02 * total_parameters(DENSE.model)


def test_four_to_three_reads_half_as_much_again() -> None:
    """FSDP shards that do not nest: each of three ranks meets two of four old shards: 2/4 read for 1/3 needed."""
    found = move(DENSE, {"dp": 4, "zero": 3}, {"dp": 3, "zero": 3})
    assert found.amplification == pytest.approx(1.5)
    assert found.read == pytest.approx(1.5 * found.own)
    back = move(DENSE, {"dp": 3, "zero": 3}, {"dp": 4, "zero": 3})
    assert back.read / back.own == pytest.approx([4 / 3, 8 / 3, 8 / 3, 4 / 3])
    assert move(DENSE, {"dp": 4, "zero": 3}, {"dp": 2, "zero": 3}).amplification == pytest.approx(1.0)


def test_finer_shards_read_whole_stored_ones() -> None:
    """A shard of half a tensor that is stored whole is read whole."""
    assert move(DENSE, {"dp": 2, "zero": 3}, {"dp": 4, "zero": 3}).amplification == pytest.approx(2.0)


@pytest.mark.parametrize(("new", "old"), product([1, 2, 3, 4, 6], repeat=2))
def test_intervals_partition(new: int, old: int) -> None:
    shared = interval_overlaps(new, old)
    assert shared.sum(axis=1) == pytest.approx(1 / new) and shared.sum(axis=0) == pytest.approx(1 / old)


LAYOUTS = (
    {"tp": 2, "pp": 2, "dp": 2, "zero": 1}, {"tp": 4, "pp": 1, "dp": 3, "zero": 1}, {"tp": 1, "pp": 3, "dp": 2, "zero": 2},
    {"tp": 2, "dp": 4, "zero": 3, "dp_shard": 2}, {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "zero": 1},
)  # fmt: skip
EXPERT = (
    {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "zero": 1}, {"tp": 4, "dp": 3, "ep": 2, "etp": 2, "zero": 1},
    {"dp": 8, "ep": 8, "zero": 1},
)  # fmt: skip


@pytest.mark.parametrize(("workload", "new", "old"), [
    *((DENSE, a, b) for a, b in product(LAYOUTS, repeat=2)), *((SPARSE, a, b) for a, b in product(EXPERT, repeat=2)),
])  # fmt: skip
def test_boxes_of_one_layout_cover_each_box_of_another(workload: Workload, new: dict[str, int], old: dict[str, int]) -> None:
    """The overlaps of a rank's box with all distinct boxes of any layout are the box."""
    saved = saved_of(workload, load_trainer("megatron"))
    after, before = places(workload, "megatron", **new), places(workload, "megatron", **old)
    for item in items_of(saved, after, before):
        holders = np.unique(item.boxes(), return_index=True)[1]
        met = item.meets(np.arange(after.ranks), holders)
        assert met.sum(axis=1) == pytest.approx(item.own(), rel=1e-9), item.kind
        assert np.all(item.read() >= item.own() * (1 - 1e-9))


def test_ranks_together_hold_everything() -> None:
    saved = saved_of(SPARSE, load_trainer("megatron"))
    at = places(SPARSE, "megatron", tp=2, pp=2, dp=4, ep=4, zero=1)
    for item in items_of(saved, at, at):
        first = np.unique(item.boxes(), return_index=True)[1]
        assert item.own()[first].sum() == pytest.approx(item.slots.sum()), KINDS


def test_exchange_by_hand() -> None:
    """dp 1 -> 2 on nodes of four: the second replica comes over the network, norms once for each node; nothing else moves."""
    found = move(DENSE, {"tp": 4}, {"tp": 4, "dp": 2}, "megatron", node=4)
    held = float(found.own[:4].sum())
    assert found.received == pytest.approx([0.0, held], rel=1e-3) and found.sent == pytest.approx([held, 0.0], rel=1e-3)
    assert found.complete and found.cut.sum() == 0.0
    same = move(DENSE, {"tp": 4}, {"tp": 4}, "megatron", node=4)
    assert same.received.sum() == same.sent.sum() == same.fetched.sum() == 0.0
    finer = move(DENSE, {"tp": 4}, {"tp": 8}, "megatron", node=4)
    assert finer.cut.sum() > 0.0
    assert finer.received.sum() == pytest.approx(finer.sent.sum())


def test_survivors_hold_the_state_only_with_replicas() -> None:
    trainer = load_trainer("megatron")
    saved, new = saved_of(DENSE, trainer), places(DENSE, "megatron", tp=4)
    for layout, complete in (({"tp": 4, "dp": 2}, True), ({"tp": 4, "dp": 2, "zero": 1}, False)):
        assert move_of(saved, places(DENSE, "megatron", **layout), new, 4, range(4)).complete is complete


def test_nesting() -> None:
    """Stages cut no tensor; replicas do so only where they share the states."""
    for zero, dp in ((3, False), (0, True)):
        changed = nesting(places(DENSE, tp=4, dp=4, zero=zero), places(DENSE, tp=2, pp=3, dp=6, zero=zero))
        assert changed == {"tp": True, "pp": True, "dp": dp}


def test_every_trainer_has_a_recipe() -> None:
    engines = {recipe_of(load_trainer(name)).engine for name in names("trainers")}
    assert engines == {"dcp", "torch_dist", "universal", "safetensors", "orbax", "nanotron", "gathered"}
    assert all(one.source and one.version and one.load for one in recipes())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of 64 GPUs as a file."""
    path = tmp_path_factory.mktemp("plan") / "run.yaml"
    planner.plan(model="llama-8b", gpus=64, trainer="torchtitan", top=1)[0].save(path)
    return path


def test_new_plan_keeps_the_batch_and_counts_its_move(plan: Path, tmp_path: Path) -> None:
    found = planner.reshape(plan, gpus=48, drain="120s", step=1000)
    best = found.found.best  # type: ignore[union-attr]
    assert found.plan.file.num_gpus == 48 and found.plan.file.workload.global_batch_size == best.batch == 512
    for way in best.ways:
        assert way.seconds == pytest.approx(sum(way.parts.values())) and all(value >= 0 for value in way.parts.values())
        assert way.range[0] < way.seconds < way.range[1]
    way, rate = found.found.way, 512 / planner.load(plan).estimate.step_time  # type: ignore[union-attr]
    assert best.total == pytest.approx(86400 * rate / (best.batch / best.step_time) + way.seconds)
    assert all(other.total >= best.total * 0.98 for other in found.found.others)  # type: ignore[union-attr]
    assert found.found.drain[1]  # type: ignore[union-attr, index]
    recipe = tmp_path / "recipe.yaml"
    found.save_recipe(recipe)
    assert read_yaml(recipe)["samples"] == 512_000
    found.save(tmp_path / "next.yaml")
    assert planner.load(tmp_path / "next.yaml").layout == best.layout


def test_a_short_future_prefers_the_cheaper_move(plan: Path) -> None:
    short, long = (planner.reshape(plan, gpus=48, remaining=text).found for text in ("60s", "30days"))
    assert short.way.seconds <= long.way.seconds and short.best.step_time >= long.best.step_time  # type: ignore[union-attr]


def test_idle_gpus_rather_than_another_batch(plan: Path) -> None:
    found = planner.reshape(plan, gpus=60).found
    assert found is not None and found.best.batch == 512
    assert any("idle" in line for line in found.kept) == (found.best.gpus < 60)


def test_loss_of_machines_goes_back_to_the_checkpoint(plan: Path) -> None:
    planned, lost = (planner.reshape(plan, gpus=48, lost=one).found for one in (False, True))
    assert lost.way.key == "failed" and lost.way.seconds > planned.way.seconds  # type: ignore[union-attr]
    assert "work done again" in lost.way.parts  # type: ignore[union-attr]


def test_faster_storage_and_network_move_faster(plan: Path) -> None:
    job = ElasticJob(plan=planner.load(plan).file, around=Surroundings())
    reads = np.full(16, 1e9)
    slow, fast = (load_seconds(job.storage.__class__(read=rate, write=rate, per_node=each), reads, 8)
                  for rate, each in ((2e9, 1e9), (4e9, 2e9)))  # fmt: skip
    assert slow == pytest.approx(8.0) and fast == pytest.approx(4.0)
    shifted = move(DENSE, {"dp": 16, "zero": 3}, {"dp": 8, "tp": 2, "zero": 3})
    hardware = job.hardware
    assert exchange_seconds(shifted, hardware, 8) > exchange_seconds(shifted, hardware.scaled(network_bandwidth=2.0), 8)


def test_command_prints_what_json_holds(plan: Path, tmp_path: Path) -> None:
    command = ["reshape", str(plan), "--gpus", "48", "--drain", "10s"]
    files = ["--output", str(tmp_path / "n.yaml"), "--recipe", str(tmp_path / "r.json")]
    done = CliRunner().invoke(main, [*command, "--json", *files])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["drain"]["enough"] is False and found["recipe"]["engine"] == "dcp"
    assert json.loads((tmp_path / "r.json").read_text())["to"]["gpus"] == 48
    move = found["to"]["move"]
    assert len(move["read_by_rank_bytes"]) == 48 and sum(move["read_by_rank_bytes"]) == pytest.approx(move["read_bytes"])
    assert sum(move["sent_by_node_bytes"]) == pytest.approx(sum(move["received_by_node_bytes"]), rel=1e-6)
    text = CliRunner().invoke(main, command).output
    assert "too short" in text and "Pay-back" in text and "Engine" in text and "Live, a node sends" in text
    seen = planner.reshape(plan, gpus=48, checkpoint=ROOT / "tests" / "data" / "checkpoints" / "dcp").found
    assert "torch.distributed.checkpoint, 2 tensors" in seen.checkpoint  # type: ignore[union-attr]
    assert seen.other_job.startswith("it holds 120 B")  # type: ignore[union-attr]


def test_elastic_folder_goes_on_with_the_plan_of_its_world(plan: Path, tmp_path: Path) -> None:
    """torchrun gets MIN:MAX, a process the folder and words of its world; another world stops with a sentence."""
    folder, tools = tmp_path / "elastic", tmp_path / "bin"
    found = planner.reshape(plan, gpus=48)
    written = found.export("torchtitan", folder)
    assert {"elastic.sh", "worker.sh", "gpus-48", "gpus-64"} <= set(written)
    assert planner.load(folder / "gpus-48" / "plan.yaml").layout == found.plan.layout
    tools.mkdir()
    for name in ("python", "torchrun"):
        (tools / name).write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
        (tools / name).chmod(0o755)

    def started(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "HF_ASSETS": "a", "DATASET": "d", "STEPS": "3", **variables}
        return subprocess.run(
            ["bash", str(folder / script), "--checkpoint.folder", "a b"], env=own, capture_output=True, text=True, check=False
        )

    words = started("elastic.sh", HOST="host0").stdout.splitlines()
    assert words[1:3] == ["--nnodes", "6:8"] and words[-4:] == ["bash", "worker.sh", "--checkpoint.folder", "a b"]
    assert "c10d" in words and "HOST" in started("elastic.sh").stderr
    for world in (48, 64):
        done = started("worker.sh", WORLD_SIZE=str(world)).stdout.splitlines()
        assert done[0] == str(folder / f"gpus-{world}") and done[1:3] == ["-m", "torchtitan.train"]
        assert done[-2:] == ["--checkpoint.folder", "a b"]
    other = started("worker.sh", WORLD_SIZE="40")
    assert other.returncode == 2 and "no plan for 40 GPUs" in other.stderr


def test_nothing_fits(plan: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    planner.plan(model="llama-70b", gpus=64, top=1)[0].save(big)
    done = CliRunner().invoke(main, ["reshape", str(big), "--gpus", "2"])
    assert done.exit_code == 1 and "Nothing fits" in done.output
    with pytest.raises(PlannerError, match="no layout of the job fits"):
        planner.reshape(big, gpus=2).save(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("flags", "says"),
    [([], "how many GPUs"), (["--gpus", "0"], "--gpus"), (["--gpus", "48", "--nodes", "6"], "leave one"),
     (["--gpus", "64"], "already"), (["--gpus", "128", "--lost"], "--lost"),
     (["--gpus", "48", "--drain", "120"], "has no unit"), (["--gpus", "48", "--step", "-1"], "--step"),
     (["--gpus", "48", "--recipe", "x.toml"], "ends in"), (["--gpus", "48", "--cluster", "none.yaml"], "none.yaml")],
)  # fmt: skip
def test_bad_input_is_a_sentence(plan: Path, flags: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["reshape", str(plan), *flags])
    assert done.exit_code == 2 and says in done.output


def test_idle_gpus_are_no_gain_rather_than_without_a_layout(tmp_path: Path) -> None:
    """1,536 GPUs share out 2,048 sequences with pp 6; 1,408 are faster."""
    job = {"model": "deepseek-v3", "hardware": "h100-sxm", "global_batch_size": 2048}
    planner.plan(gpus=2048, **job)[0].save(tmp_path / "plan.yaml")
    found = planner.reshape(tmp_path / "plan.yaml", gpus=1536).found
    assert found is not None
    assert found.best.gpus == 1408 and planner.plan(gpus=1536, **job)[0].estimate.step_time > found.best.step_time
    assert "128 of 1536 GPUs stay idle: no layout that shares out the batch over all of them takes less time" in found.kept

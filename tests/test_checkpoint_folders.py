"""Checkpoint folders recognised and read without torch; pickles that want to run something do nothing; who reshards."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.lab.elastic import checkpoint_folder as formats
from planner.lab.elastic.checkpoint_folder import held_by, recognise
from planner.lab.elastic.inert_pickle import Record, read_pickle
from planner.lab.elastic.reshard import elsewhere, reshard
from planner.plan_file import load_plan
from planner.trainers.pytorch import good_checkpoints as good

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "data" / "checkpoints"
"""Written by torch 2.13: 7 x 4 values over 3 ranks, a replicated tensor, a number; the files that DeepSpeed writes, small."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    shutil.copytree(HERE, tmp_path / "c")
    return tmp_path / "c"


def test_shards_of_torch_distributed_checkpoint() -> None:
    found = recognise(HERE / "dcp")
    assert (found.kind, found.problem, found.degrees) == (formats.DCP, "", {"files": 3})
    assert set(found.tensors) == {"model.w", "model.b"}  # the number is no tensor
    w = found.tensors["model.w"]
    assert (w.shape, w.dtype, w.size) == ((7, 4), "float32", 112)
    assert [(one.offsets, one.sizes, one.file) for one in w.shards] == [
        ((0, 0), (3, 4), "__0_0.distcp"), ((3, 0), (3, 4), "__1_0.distcp"), ((6, 0), (1, 4), "__2_0.distcp"),
    ]  # fmt: skip
    assert (found.tensors["model.b"].shape, found.tensors["model.b"].dtype) == ((4,), "bfloat16")
    assert held_by(HERE / "dcp", print)[0] == 112 + 8


def test_files_that_are_cut_or_missing(folder: Path) -> None:
    with (folder / "dcp" / "__1_0.distcp").open("r+b") as file:
        file.truncate(100)
    assert recognise(folder / "dcp").problem.startswith("__1_0.distcp has 100 of at least ")
    (folder / "dcp" / "__1_0.distcp").unlink()
    assert recognise(folder / "dcp").problem == "__1_0.distcp is missing"
    with pytest.raises(PlannerError, match="is torn: __1_0.distcp is missing"):
        held_by(folder / "dcp", print)


def test_steps_of_torchtitan(folder: Path) -> None:
    for step in (10, 20, 30):
        shutil.copytree(folder / "dcp", folder / "titan" / f"step-{step}")
    (folder / "titan" / "step-30" / ".metadata").unlink()
    assert recognise(folder / "titan").step == 20
    (folder / "titan" / "step-20" / "__1_0.distcp").unlink()
    assert formats.set_aside(folder / "titan") == ["checkpoint step-20 is torn, set aside: __1_0.distcp is missing"]
    assert sorted(one.name for one in (folder / "titan").iterdir()) == ["step-10", "step-30", "torn-20"]
    assert formats.set_aside(folder / "titan") == formats.set_aside(folder / "nowhere") == []


def test_megatron(folder: Path) -> None:
    run = folder / "megatron"
    shutil.copytree(folder / "dcp", run / "iter_0000100")
    (run / "iter_0000100" / "common.pt").write_bytes(b"")
    (run / "latest_checkpointed_iteration.txt").write_text("100\n")
    found = recognise(run)
    assert (found.kind, found.step, len(found.tensors)) == (formats.MEGATRON, 100, 2)
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(PlannerError, match="names iteration 200, and there is no iter_0000200"):
        recognise(run)
    (run / "latest_checkpointed_iteration.txt").write_text("../x")
    with pytest.raises(PlannerError, match="must be the number of an iteration"):
        recognise(run)


def test_megatron_of_before(tmp_path: Path) -> None:
    for tp in range(2):
        for pp in range(3):
            (tmp_path / "iter_0000007" / f"mp_rank_{tp:02d}_{pp:03d}").mkdir(parents=True)
            (tmp_path / "iter_0000007" / f"mp_rank_{tp:02d}_{pp:03d}" / "model_optim_rng.pt").write_bytes(b"x")
    found = recognise(tmp_path)
    assert (found.kind, found.step, found.degrees) == (formats.MEGATRON_TORCH, 7, {"tp": 2, "pp": 3})


def test_deepspeed(folder: Path) -> None:
    found = recognise(folder / "deepspeed")
    assert (found.kind, found.step, found.degrees, found.problem) == (formats.DEEPSPEED, 7, {"tp": 1, "dp": 2}, "")
    assert found.tensors["w"].shape == (7, 4)
    (folder / "deepspeed" / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert recognise(folder / "deepspeed").problem == "1 of its optim_states files are missing"
    (folder / "deepspeed" / "latest").write_text("../../etc")
    with pytest.raises(PlannerError, match="there is no such folder"):
        recognise(folder / "deepspeed")


def test_universal() -> None:
    found = recognise(HERE / "universal")
    assert found.kind == formats.UNIVERSAL
    assert {name: one.shape for name, one in found.tensors.items()} == {"w.fp32": (7, 4), "w.exp_avg": (7, 4)}
    assert found.tensors["w.fp32"].dtype == "float32"


def test_safetensors(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {}}).encode()
    (tmp_path / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 12)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    found = recognise(tmp_path)
    assert (found.kind, found.problem) == (formats.SAFETENSORS, "")
    assert (found.tensors["w"].shape, found.tensors["w"].dtype, found.tensors["w"].size) == ((2, 3), "bfloat16", 12)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "model-2.safetensors"}}))
    assert recognise(tmp_path).problem == "model-2.safetensors is missing"
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(PlannerError, match="not a file of safetensors"):
        recognise(tmp_path)


def test_no_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="holds no checkpoint that is known"):
        recognise(tmp_path)
    with pytest.raises(PlannerError, match="there is no such folder"):
        recognise(tmp_path / "no")


class Harm:
    """Runs a program when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (subprocess.check_call, (["touch", self.file],))


def test_pickles_do_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": Harm(str(tmp_path / "harmed"))}))
    found = read_pickle(tmp_path / ".metadata")
    assert isinstance(found["a"], Record) and found["a"].named == "subprocess.check_call"
    with pytest.raises(PlannerError, match="not the metadata of torch.distributed.checkpoint"):
        recognise(tmp_path)
    assert not (tmp_path / "harmed").exists()


BROKEN = (b"", b"\x80\x04", b"cos\nsystem\n(S'x'\ntR", b"not a pickle", pickle.dumps([1, 2]), b"PK\x03\x04")


@pytest.mark.parametrize("data", BROKEN)
def test_what_is_no_metadata_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(PlannerError, match="not a pickle|not the metadata"):
        recognise(tmp_path)


def test_every_prefix_of_a_metadata_is_a_sentence(tmp_path: Path) -> None:
    whole = (HERE / "dcp" / ".metadata").read_bytes()
    for size in range(0, len(whole), 37):
        (tmp_path / ".metadata").write_bytes(whole[:size])
        with pytest.raises(PlannerError):
            recognise(tmp_path)


def test_recognition_needs_no_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); from pathlib import Path\n"
        "from planner.lab.elastic.checkpoint_folder import recognise\n"
        "recognise(Path('tests/data/checkpoints/dcp')); recognise(Path('tests/data/checkpoints/deepspeed'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ------------------------------------------------------------------------------------------------ resharding


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan on 16 GPUs."""
    import planner

    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    planner.estimate(model="llama-8b", gpus=16, trainer="torchtitan", hardware="h100-sxm", dp=16, zero=3).save(file)
    return file


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (formats.MEGATRON, "into any split as it is, nothing is to be rewritten: start Megatron-LM with the new split and --load"),
        (formats.DCP, "torchtitan: --checkpoint.enable --checkpoint.folder"),
        (formats.SAFETENSORS, "every trainer reads its tensors by name"),
        (formats.MEGATRON_TORCH, "(megatron is not installed here): python $MEGATRON_LM/tools/checkpoint/convert.py"),
        (formats.DEEPSPEED, "(deepspeed is not installed here): python -m deepspeed.checkpoint.ds_to_universal --input_folder"),
        (formats.UNIVERSAL, '"load_universal": true'),
    ],
)
def test_other_engines_are_named_with_their_command(kind: str, says: str, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.lab.elastic.reshard.find_spec", lambda _: None)
    old = formats.CheckpointFolder(kind=kind, path=Path("/a/iter_1"), step=1, size=1)
    assert says in elsewhere(old, load_plan(plan), Path("/b"))


def test_what_is_not_resharded_here_says_how(plan: Path, folder: Path, run: Any, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="loads into any split as it is"):
        reshard(folder / "dcp", load_plan(plan), tmp_path / "new", print)
    (folder / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(PlannerError, match="is torn: __1_0.distcp is missing"):
        reshard(folder / "dcp", load_plan(plan), tmp_path / "new", print)
    result = run("reshape", str(plan), "--gpus", "8", "--run", str(tmp_path / "new"))
    assert result.exit_code == 2 and "say which with --checkpoint DIR" in result.output


def test_reshape_counts_the_real_bytes(plan: Path, folder: Path) -> None:
    import planner

    computed, real = (planner.reshape(plan, gpus=8, **more).to_dict() for more in ({}, {"checkpoint": folder / "universal"}))
    read = [one["to"]["move"] for one in (computed, real)]
    assert read[0] != read[1]


# ------------------------------------------------------------------------------------------------ whole checkpoints


def written(root: Path, step: int, *, marked: bool = True) -> Path:
    """A checkpoint of two files."""
    folder = good.folder_of(root, step)
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(f"{name} of {step}".encode() * 50)
    if marked:
        files = {one.name: good.size_and_sum(one) for one in folder.iterdir()}
        good.mark(folder, {"step": step, "samples": 12 * step, "world": 1}, files)
    return folder


def test_torn_checkpoints_are_seen(tmp_path: Path) -> None:
    whole, cut, flipped, unmarked = (written(tmp_path, step, marked=step != 4) for step in (1, 2, 3, 4))
    with (cut / "__0_0.distcp").open("r+b") as file:
        file.truncate(7)
    with (flipped / "__0_0.distcp").open("r+b") as file:
        file.write(b"X")
    assert good.torn(whole) == ""
    assert good.torn(cut) == "__0_0.distcp has 7 of 850 bytes"
    assert good.torn(flipped) == "the bytes of __0_0.distcp are not those that were written"
    assert good.torn(flipped, sums=False) == ""
    assert good.torn(unmarked) == "it was not written to its end"
    assert (good.last_good(tmp_path, sums=True), good.last_good(tmp_path)) == (whole, flipped)
    (flipped / "__0_0.distcp").unlink()
    assert good.torn(flipped).startswith("__0_0.distcp cannot be read")
    for text in ("", "[]", '{"version": 1}', '{"version": 1, "step": 1, "samples": 2, "files": {"../x": [1, 2]}}', '{"version":'):
        (whole / good.MARKER).write_text(text)
        assert good.torn(whole) == "it was not written to its end"


def test_ranks_share_the_files(tmp_path: Path) -> None:
    folder = written(tmp_path, 1)
    (folder / "__0_0.distcp").write_bytes(b"")
    assert [bool(good.torn(folder, rank, 2)) for rank in range(2)].count(True) == 1


def test_the_last_whole_ones_stay(tmp_path: Path) -> None:
    for step in range(1, 7):
        written(tmp_path, step, marked=step not in (2, 6))
    good.forget(tmp_path, 2)
    assert [one.name for one in good.checkpoints(tmp_path)] == ["step-00000006", "step-00000005", "step-00000004"]
    assert good.checkpoints(tmp_path / "nowhere") == [] and good.last_good(tmp_path / "nowhere") is None

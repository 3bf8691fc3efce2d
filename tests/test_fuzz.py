"""Spoiled files and flags of every kind, seeded; benchmarks/fuzz.py makes a million of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fuzzing import KINDS, LONG_SENTENCE, one, places, plans, stored
from hostile import put

from planner import api
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.plan_file import plan_from_dict
from planner.runs import read_runs
from planner.serving.serving_changes import values_of
from planner.trainer import load_trainer
from planner.trainers.bundle import nearest

QUICK = {
    "config.json": 700, "model": 450, "trainer": 180, "plan": 50, "hardware": 20, "runs": 50, "log": 20, "configuration": 30,
    "flags": 5,
}  # fmt: skip
"""How many of each in the quick suite; with those of the proof they are more than 20,000."""
PROOF = {
    "config.json": 9000, "model": 5500, "trainer": 3000, "plan": 400, "hardware": 300, "runs": 700, "log": 250,
    "configuration": 400, "flags": 60,
}  # fmt: skip
assert QUICK.keys() == PROOF.keys() == KINDS.keys() and sum(PROOF.values()) + sum(QUICK.values()) > 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_input_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    found = {one(kind, seed, tmp_path) for seed in range(QUICK[kind])}
    assert found == {"sentence", "accepted"} or kind == "flags"  # neither all are refused nor all let through


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_many_spoiled_inputs_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    assert {one(kind, seed, tmp_path) for seed in range(10**6, 10**6 + PROOF[kind])} == {"sentence", "accepted"}


READERS: dict[str, Callable[[Path], Any]] = {
    "config": lambda path: load_model(str(path)), "models": lambda path: load_model(str(path)),
    "trainers": lambda path: load_trainer(str(path)), "hardware": lambda path: load_hardware(str(path)),
    "runs": lambda path: read_runs([path]), "plan": api.load,
}  # fmt: skip


def check_long_texts(kind: str, files: int, most: int, folder: Path) -> None:
    """A text of 100,000 characters as a value, in a list, as a key and under one, at places of some files."""
    rng, long, refused = random.Random(kind), "x" * 100_000, 0
    known = plans() if kind == "plan" else stored(kind)
    path = folder / ("config.json" if kind == "config" else "file.yaml")
    for data in rng.sample(known, min(len(known), files)):
        everywhere = list(places(data))
        for place in rng.sample(everywhere, min(len(everywhere), most)):
            for value in (long, [long], {long: 1}):
                path.write_text(json.dumps(put(data, place, value)))
                try:
                    READERS[kind](path)
                except PlannerError as error:
                    refused += 1
                    assert len(str(error)) < LONG_SENTENCE, (place, str(error)[:300])
    assert refused > most


@pytest.mark.parametrize("kind", ["config", "models", "trainers", "plan"])
def test_no_sentence_repeats_a_long_text(kind: str, tmp_path: Path) -> None:
    check_long_texts(kind, 2, 20, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("kind", READERS)
def test_no_sentence_repeats_a_long_text_anywhere(kind: str, tmp_path: Path) -> None:
    check_long_texts(kind, 5, 100, tmp_path)


def test_a_long_value_of_an_option_is_cut(tmp_path: Path) -> None:
    """Found by fuzz: trainer 505708."""
    path = tmp_path / "mine.yaml"
    for change in ({"options": {"loss": ["x" * 100_000]}}, {"extends": ["x" * 100_000]}, {"options": {"x" * 100_000: []}}):
        path.write_text(json.dumps({"extends": "megatron", **change}))
        with pytest.raises(PlannerError) as caught:
            load_trainer(str(path))
        assert len(str(caught.value)) < 1000


def test_a_precision_and_an_argument_that_nobody_knows(tmp_path: Path) -> None:
    """Found by fuzz: trainer 60150, configuration 556743."""
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": "megatron", "precisions": ["yes"]}))
    with pytest.raises(PlannerError, match="yes"):
        api.estimate(model="llama-8b", gpus=8, hardware="h100-sxm", trainer=str(tmp_path / "mine.yaml"))
    flag = "--tensor-model-parallel-size" + "x" * 3000
    (tmp_path / "train.sh").write_text(f"python pretrain_gpt.py --num-layers 32 --hidden-size 4096 {flag} 2\n")
    with pytest.raises(PlannerError) as caught:
        api.import_config(tmp_path / "train.sh", model="llama-8b", gpus=8, hardware="h100-sxm")
    assert len(str(caught.value)) < 1000


def test_a_row_with_a_long_name_is_named_by_its_number(tmp_path: Path) -> None:
    """Found by fuzz: runs 70643."""
    data = {**stored("runs")[0]}
    rows = [{**data["rows"][0], "id": "x" * 100_000, "model": {"attention": {1: 2}}}]
    (tmp_path / "runs.yaml").write_text(json.dumps({**data, "rows": rows}, default=str))
    with pytest.raises(PlannerError, match="row 1: ") as caught:
        read_runs([tmp_path / "runs.yaml"])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [("step_time_range_s", [46.1, 0]), ("step_time_s", 0), ("tokens_per_second_per_gpu", -1), ("memory_peak_gib", 0.0)],
)
def test_predictions_of_a_plan_are_above_zero(key: str, value: Any) -> None:
    """Found by fuzz: plan 77692, 326052. What divides by them: the README of an export, the doctor."""
    with pytest.raises(PlannerError, match=f"plan: estimate: {key} is .* above 0"):
        plan_from_dict(put(plans()[0], ("estimate", key), value))


def test_no_model_has_a_million_layers() -> None:
    """Found by fuzz: plan 20261189502. An export writes a line for each layer, which took more than 20 s."""
    with pytest.raises(PlannerError, match="num_layers is 662941; it must be a whole number from 1 to 10000"):
        plan_from_dict(put(plans()[0], ("workload", "model", "num_layers"), 662941))


def test_a_server_that_cannot_hold_a_model_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fuzz: plan 56268. No layout of the training changes what a server holds: none is searched for."""
    monkeypatch.setattr(nearest, "search", None)
    plan = api.Plan(plan_from_dict(put(plans()[0], ("workload", "model", "hidden_size"), 217589)))
    with pytest.raises(PlannerError, match="do not hold the bf16 weights .* choose another target"):
        plan.export("vllm", "nowhere")


def test_sentences_are_short_whatever_they_repeat(tmp_path: Path) -> None:
    """Found by fuzz: configuration 174306, plan 230147, trainer 277127."""
    for text in ("x" * 100_000, "x " * 50_000):
        error = str(PlannerError(f"f.yaml: '{text}' is no number; write one, like 8"))
        assert len(error) < LONG_SENTENCE and error.startswith("f.yaml: 'x") and error.endswith("is no number; write one, like 8")
        assert str(PlannerError(error)) == error
    with pytest.raises(PlannerError, match=r"unknown module 'x{50,60}\.\.\.; known: "):
        plan_from_dict(put(plans()[0], ("layout", "recompute_modules"), ["x" * 100_000]))
    (tmp_path / "m.yaml").write_text(f"per_device_train_batch_size: {'x' * 5000}\nmodel_name_or_path: a/b\nstage: sft\n")
    with pytest.raises(PlannerError, match=r"per_device_train_batch_size is 'x{50,60}\.\.\.; it must be a whole number"):
        api.import_config(tmp_path / "m.yaml", model="llama-8b", gpus=8, hardware="h100-sxm")
    (tmp_path / "mine.yaml").write_text('extends: megatron\nversion: "9"\nrecipes: {"9": [{model: llama, options: {1: 2}}]}\n')
    with pytest.raises(PlannerError, match="recipes has no option '1'"):
        load_trainer(str(tmp_path / "mine.yaml"))


def test_versions_of_a_trainer_may_be_none_and_are_short(tmp_path: Path) -> None:
    """Found by fuzz: trainer 2033677."""
    (tmp_path / "mine.yaml").write_text("extends: megatron\nversions: {}\n")
    assert load_trainer(str(tmp_path / "mine.yaml")).name == "mine"
    (tmp_path / "mine.yaml").write_text(f"extends: megatron\nversions: {{? '{'9' * 5000}' : {{}}}}\n")
    with pytest.raises(PlannerError, match=r"version '9{50,60}\.\.\. is not a number"):
        load_trainer(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("name", ["zero", "precisions"])
def test_what_every_trainer_has_may_not_be_empty(name: str, tmp_path: Path) -> None:
    """Found by fuzz: trainer 933222."""
    (tmp_path / "mine.yaml").write_text(f"extends: megatron\n{name}: []\n")
    with pytest.raises(PlannerError, match=f"mine.yaml: {name} is empty; a trainer has at least one"):
        load_trainer(str(tmp_path / "mine.yaml"))


def test_an_option_adds_what_the_set_holds(tmp_path: Path) -> None:
    """Found by fuzz: trainer 666587, whose option added a word to the levels of ZeRO, which are numbers."""
    (tmp_path / "mine.yaml").write_text("extends: megatron\noptions: {experts: {a: {+zero: [word]}, b: {}}}\n")
    with pytest.raises(PlannerError, match="zero"):
        load_trainer(str(tmp_path / "mine.yaml")).with_option("experts", "a")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndeepspeed: {0}.json\n"),
        ("b.sh", "source {0}.sh\ntorchrun pretrain_gpt.py --num-layers 32 --bf16 --micro-batch-size 1\n"),
        ("c.sh", "accelerate launch --config_file {0}.yaml {0}.py --deepspeed {0} --model_name_or_path {0}\n"),
        ("d.sh", "llamafactory-cli train {0}.yaml\n"),
        ("e.sh", "tune run full_finetune_distributed --config {0}.yaml\n"),
        ("f.py", "from trl import SFTTrainer, SFTConfig\nSFTTrainer(model='{0}', args=SFTConfig(deepspeed='{0}.json'))\n"),
    ],
)
def test_names_longer_than_a_file_system_takes(name: str, text: str, tmp_path: Path) -> None:
    """Found by fuzz: configuration 980635. No such file can be there."""
    (tmp_path / name).write_text(text.format("a" * 400))
    with suppress(PlannerError):
        api.import_config(tmp_path / name, model="llama-8b", gpus=8, hardware="h100-sxm", sequence_length=512, global_batch_size=64)


@pytest.mark.parametrize("number", ["²", "9" * 5000], ids=["superscript", "long"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.sh", "shift {0}\ntorchrun pretrain_gpt.py --num-layers 32 --bf16 --micro-batch-size 1"),
        ("noop.sh", "torchrun pretrain_gpt.py --num-layers 32 --bf16 --noop-layers 1 --first-k-dense-replace {0}"),
        ("config_mlperf.sh", "export DGXNNODES={0} DGXNGPU=8 MINIBS=4 FP8=True LORA=0 TENSOR_MODEL_PARALLEL=2\n"),
    ],
    ids=["shift", "layers", "nodes"],
)
def test_digits_that_int_does_not_read(name: str, text: str, number: str, tmp_path: Path) -> None:
    """str.isdigit says yes to them, and int() no: they are no numbers of a script."""
    (tmp_path / name).write_text(text.format(number))
    with suppress(PlannerError):
        api.import_config(tmp_path / name, model="llama-8b", gpus=8, hardware="h100-sxm", sequence_length=512, global_batch_size=64)
    with pytest.raises(PlannerError, match="--gpus is '.*; it must be a whole number"):
        values_of("gpus", number)

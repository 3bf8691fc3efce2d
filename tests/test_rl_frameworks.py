"""RL frameworks as versioned data: what each version can do, and what its file must be."""

from __future__ import annotations

import pytest

from planner import library
from planner.errors import PlannerError
from planner.rl import rl_framework
from planner.rl.rl_framework import FACTS, PHASES, framework_names, load_framework
from planner.rl.rl_plan import PHASES as PLANNED
from planner.serving.engine import load_engine
from planner.trainer import load_trainer
from planner.trainer_options import number_of

SEVEN = ["areal", "nemo-rl", "openrlhf", "prime-rl", "slime", "trl", "verl"]


def test_the_seven_are_there():
    assert framework_names() == SEVEN
    assert set(PHASES) == {*PLANNED, "wait"}


@pytest.mark.parametrize("name", SEVEN)
def test_every_version_names_trainers_and_engines_that_planner_has(name):
    data = library.read_yaml(library.find("rl", name))
    versions = {data["oldest"], data["newest"]} | {entry["since"] for one in data["facts"].values() for entry in one}
    for version in (one for one in versions if number_of(one) >= number_of(data["oldest"])):
        found = load_framework(f"{name}@{version}")
        assert found.modes and found.methods and found.label == f"{name}@{version}"
        for trainer in (found.trainer, *found.trainers):
            assert load_trainer(trainer)
        for engine in (found.engine, *found.engines):
            assert load_engine(engine).name == engine.partition("@")[0]
        for one in found.placements:
            assert one.sync and one.staleness[0] <= one.staleness[1]
            assert found.sync[one.mode] in found.methods


@pytest.mark.parametrize("name", SEVEN)
def test_every_value_has_a_source(name):
    data = library.read_yaml(library.find("rl", name))
    assert set(data["facts"]) <= set(FACTS)
    for fact, entries in data["facts"].items():
        for entry in entries:
            assert len(str(entry["source"])) > 5, f"{name}: {fact}: {entry}"
    found = load_framework(name)
    assert set(found.sources) == {one for one, entries in data["facts"].items() if entries}


def test_placements_came_with_versions():
    """verl: one step off since 0.5, without a bound since 0.6.1; NeMo RL: split since 0.3, ahead since 0.4."""
    assert load_framework("verl@0.4").modes == ("colocated",)
    assert load_framework("verl@0.5").placement("split", 1).sync == ("tensor",)
    with pytest.raises(PlannerError, match=r"verl@0.5 has no placement that is split with staleness 4; it has colocated"):
        load_framework("verl@0.5").placement("split", 4)
    assert load_framework("verl@0.6.1").placement("split", 4).partial
    assert load_framework("verl@0.9.1").placement("split", 1).sync[0] == "bucketed"
    assert load_framework("nemo-rl@0.3").staleness == 0
    assert load_framework("nemo-rl@0.4").staleness == 1000
    assert load_framework("openrlhf@0.7").staleness == 0
    assert load_framework("trl@0.17").modes == ("split",)
    assert load_framework("areal@1.0.2").modes == ("split",)


def test_defaults_of_versions():
    assert load_framework("verl@0.8").max_batch == 1024 and load_framework("verl@0.9").max_batch == 256
    assert load_framework("trl@0.18").reference and not load_framework("trl@1.16").reference
    assert load_framework("verl").backend_of("megatron:expert_dispatch=deepep").name == "megatron"


def test_wrong_names_are_sentences():
    with pytest.raises(PlannerError, match="RL framework"):
        load_framework("ver")
    with pytest.raises(PlannerError, match="older than 0.1, the first version that is known"):
        load_framework("verl@0.0.1")
    assert "is not known; what it does is taken from" in load_framework("verl@7.0").note
    with pytest.raises(PlannerError, match="version 'new' is not a number"):
        load_framework("verl@new")
    with pytest.raises(PlannerError, match="runs plans of trainer deepspeed, and this one was priced for megatron"):
        load_framework("openrlhf").backend_of("megatron")
    with pytest.raises(PlannerError, match="generates with vllm, not with sglang"):
        load_framework("openrlhf").rollout("sglang@0.5")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"placements": [{"since": "1.0", "value": [{"mode": "beside", "sync": ["ipc"]}], "source": "x"}]}, "one of colocated"),
        ({"placements": [{"since": "1.0", "value": [{"mode": "split", "sync": ["fax"]}], "source": "x"}]}, "list of ipc, reshard"),
        ({"packing": [{"since": "1.0", "value": "tight", "source": "x"}]}, "one of none, balanced, first_fit"),
        ({"packing": [{"since": "1.0", "value": "none"}]}, "missing key 'source'"),
        ({"packing": [{"since": since, "value": "none", "source": "x"} for since in ("0.9", "0.8")]}, "in the order"),
        ({"bucket": [{"since": "0.1", "value": "12", "source": "x"}]}, "bucket"),
        ({"speed": []}, "unknown key 'speed'"),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path, monkeypatch, change, said):
    data = library.read_yaml(library.find("rl", "verl"))
    data["facts"] |= change
    data["oldest"] = "0.1"
    (tmp_path / "mine.yaml").write_text(library.dump_yaml(data))
    monkeypatch.setattr(rl_framework.library, "find", lambda kind, name: tmp_path / "mine.yaml")
    with pytest.raises(PlannerError, match=said):
        rl_framework._load.__wrapped__("mine", "1.0")

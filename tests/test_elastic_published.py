"""Published elastic runs: Tenplex within a quarter, goodput of replica groups within three points, honest refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planner import library
from planner.elastic.published import answers
from planner.errors import PlannerError
from planner.published_rows import NOT_RUN, PREDICTED, REFUSED, AnsweredRow

FOLDER = library.profiles_directory() / "beyond-runs" / "elastic"


def document(**row: Any) -> dict[str, Any]:
    """A file of one row."""
    return {"source": {"id": "own"}, "topic": "elastic", "hardware": {"gpu": "h100-sxm"}, "rows": [{"id": "a", **row}]}


def answer(**row: Any) -> AnsweredRow:
    """The answer to one row."""
    [found] = answers(document(**row), "own.yaml")
    return found


@pytest.fixture(scope="module")
def tenplex() -> list[AnsweredRow]:
    """The rows that ship with planner."""
    return answers(library.read_yaml(FOLDER / "tenplex.yaml"), "tenplex.yaml")


def test_tenplex_within_a_quarter(tenplex: list[AnsweredRow]) -> None:
    """Changes and recoveries; what gathers all state on one node within a half, but for the row that its source doubts."""
    found = [(one.id, name, each) for one in tenplex for name, each in one.quantities.items()]
    errors = {(row, name): abs(each.error) for row, name, each in found if name != "central_state_s"}
    assert len(errors) == 8 and max(errors.values()) <= 0.25, errors
    central = {row: abs(each.error) for row, name, each in found if name == "central_state_s"}
    assert len(central) == 6 and sorted(central.values())[-2] <= 0.5, central
    assert all(each.range[0] < each.measured < each.range[1] for row, name, each in found if name != "central_state_s")


def test_rows_without_a_model_are_refused(tenplex: list[AnsweredRow]) -> None:
    refused = [one for one in tenplex if one.id.startswith("resize")]
    assert len(refused) == 6 and all(one.status == REFUSED and "does not say" in one.reason for one in refused)


def test_traces_are_not_runs() -> None:
    found = answers(library.read_yaml(FOLDER / "spot-traces.yaml"), "spot-traces.yaml")
    assert {one.status for one in found} == {NOT_RUN} and len(found) == 4


@pytest.mark.parametrize(("step", "mtbf", "measured"), [(10.9, 60.0, 82.3), (5.0, 60.0, 92.0), (20.0, 600.0, 96.7)])
def test_steps_kept_by_replica_groups(step: float, mtbf: float, measured: float) -> None:
    """The first was measured on 300 GPUs; the others are e^{-t/M} itself."""
    found = answer(step_s=step, mtbf_s=mtbf, measured={"steps_kept": measured}).quantities["steps_kept"]
    assert found.predicted == pytest.approx(measured, abs=3.0)
    assert answer(step_s=step, mtbf_s=mtbf, measured={"steps_kept": measured / 100}).quantities["steps_kept"].predicted < 1.0


def test_goodput_with_checkpoints_by_hand() -> None:
    """M = 1 h, every 10 min, stall 6 s, restart 60 s."""
    found = answer(interval_s=600, stall_s=6.0, restart_s=60.0, mtbf_h=1.0, measured={"goodput": 0.9}).quantities["goodput"]
    assert found.predicted == pytest.approx(1 / (6 * math.exp(60 / 3600) * (math.exp(606 / 3600) - 1)))


def test_the_way_decides() -> None:
    moved = {"model": "llama-8b", "from": {"tp": 8}, "to": {"tp": 8, "dp": 2}, "measured": {"reconfigure_s": 9.0}}
    times = {
        system: answer(system=system, **moved).quantities["reconfigure_s"].predicted
        for system in ("NCCL live reshard", "host stores", "checkpoint and restart")
    }
    assert times["NCCL live reshard"] < min(times["host stores"], times["checkpoint and restart"])
    larger = answer(system="host stores", **{**moved, "model": "llama-70b"}).quantities["reconfigure_s"].predicted
    assert larger > 3 * times["host stores"]


def test_rate_of_a_move() -> None:
    """State over seconds; its range is that of the seconds."""
    moved = {"model": "llama-8b", "system": "host stores", "from": {"tp": 8}, "to": {"tp": 8, "dp": 2}}
    found = answer(measured={"reconfigure_s": 9.0, "gb_per_s": 10.0}, **moved).quantities
    rate, seconds = found["gb_per_s"], found["reconfigure_s"]
    assert rate.range[0] < rate.predicted < rate.range[1]
    assert rate.predicted * seconds.predicted == pytest.approx(8.03 * 14, rel=0.01)


def test_more_machines_lost_need_the_checkpoint() -> None:
    row = {"model": "gpt-2.7b", "from": {"tp": 4, "pp": 2, "dp": 2}, "measured": {"recover_s": 20.0}}
    few, many = (answer(lost_gpus=lost, **row).quantities["recover_s"].predicted for lost in (4, 12))
    assert few > 10 and many > 10
    assert answer(lost_gpus=16, **row).status == REFUSED


@pytest.mark.parametrize(
    ("row", "says"),
    [({"measured": {"reconfigure_s": 3.0}}, "both layouts"), ({"measured": {"goodput": 0.9}}, "time between failures"),
     ({"measured": {"goodput": 0.9}, "mtbf_s": 60}, "time of a step"),
     ({"measured": {"recover_s": 3.0}, "from": {"tp": 2}, "lost_gpus": 1}, "which model"),
     ({"measured": {"reconfigure_s": 3.0}, "from": {"tp": 2}, "to": {"tp": 4}, "model": "no-such"}, "unknown model")],
)  # fmt: skip
def test_what_is_not_said_is_refused(row: dict[str, Any], says: str) -> None:
    found = answer(**row)
    assert found.status == REFUSED and says in found.reason


def test_layouts_that_are_not_said_are_searched() -> None:
    """A model and numbers of GPUs are enough; so is a model without the time of its step."""
    found = answer(model="llama-3.2-1b", gpus=[4, 8], system="fsdp checkpoint", measured={"reconfigure_s": 30.0})
    assert found.status == PREDICTED and found.quantities["reconfigure_s"].predicted > 10.0
    assert answer(model="llama-3.2-1b", gpus=8, system="fsdp", measured={"recover_s": 30.0}).status == PREDICTED
    kept = answer(model="llama-3.2-1b", gpus=8, system="fsdp", mtbf_h=0.1, measured={"steps_kept": 0.9})
    assert 0.0 < kept.quantities["steps_kept"].predicted < 1.0


@pytest.mark.parametrize(
    "row",
    [{"lost_gpus": 99}, {"gpus_per_node": 0}, {"gpus_per_node": 1.5}, {"from": {"tp": "a"}}, {"from": {"tp": 0}},
     {"model": 3}, {"gpu": "none"}],
)  # fmt: skip
def test_strange_rows_are_refused(row: dict[str, Any]) -> None:
    plain = {"model": "llama-8b", "from": {"tp": 4, "pp": 2}, "lost_gpus": 4, "measured": {"recover_s": 20.0}}
    assert answer(**{**plain, **row}).status == REFUSED


def test_network_of_a_node() -> None:
    """8 cards of 400 Gb/s, as text; one number is that of the node."""
    moved = {"model": "llama-70b", "from": {"tp": 8}, "to": {"tp": 8, "dp": 2}, "measured": {"reconfigure_s": 9.0}}
    found = [answer(network=text, system="host", **moved) for text in ("8x NDR 400 Gb/s", "400 Gb/s", "x")]
    times = [one.quantities["reconfigure_s"].predicted for one in found]
    assert times[0] < times[1] and times[2] == times[0]  # the profile says 8 x 400 Gb/s too


def test_damaged_files() -> None:
    assert answer(measured={"ran": False}).status == NOT_RUN
    with pytest.raises(PlannerError, match="measured is"):
        answer(measured=3)
    range_of_two = answer(measured={"reconfigure_s": [2.0, 4.0]}, model="llama-8b", **{"from": {"tp": 2}, "to": {"tp": 4}})
    assert range_of_two.status == PREDICTED

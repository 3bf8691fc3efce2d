"""A run that was not compiled is kept with the trainer that it was priced as: calibration prices it so again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml
from samples import job

from planner.error_bars import kind_of
from planner.errors import PlannerError
from planner.lab.reference.split import split_of
from planner.lab.run.eager_pricing import as_run
from planner.lab.run.learn import learned
from planner.layout import Layout
from planner.plan_file import Plan, predict
from planner.runs import rows_from_dict, to_run
from planner.runs.mapping import planned
from planner.timeline.priced_plan import estimate_of
from planner.trainer import Trainer, changes_of, load_trainer


def validated() -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a run without a compiler, and what a validation of it holds."""
    layout = Layout(pp=2, dp=4, num_microbatches=16, zero=2)
    one = job("gqa", "torchtitan", gpus=8, batch=64)
    plan = Plan(
        workload=one.workload, hardware="h100-sxm", num_gpus=8, trainer="torchtitan", layout=layout,
        prediction=predict(estimate_of(one, layout), one, kind_of(one.workload, one.trainer)),
    )  # fmt: skip
    trainer = as_run(one.trainer, split_of(one.workload, one.trainer, layout), on_cpu=False)
    step = plan.prediction.step_time_s
    found = {
        "rung": "full", "outcome": "completed", "trainer": "torchtitan", "layout": layout.to_dict(), "ranks": [],
        "device": {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3"}, "changes": [],
        "times": [{"what": "step", "predicted_seconds": step, "measured_seconds": 2 * step}],
        "as_run": {"trainer": changes_of(trainer, one.trainer)},
    }  # fmt: skip
    return trainer, learned(plan, found)


def test_a_run_that_was_not_compiled_is_priced_again_as_it_ran() -> None:
    trainer, found = validated()
    assert found["no_run"] is None and trainer != load_trainer("torchtitan")
    run = to_run(rows_from_dict(yaml.safe_load(yaml.safe_dump(found["run"])))[0])
    assert run.trainer == trainer and not run.unsupported
    assert run.trainer.name == "torchtitan", "error bars and families go by the name"
    seconds = {"host_time": "1e-05 s"}
    assert changes_of(trainer.replace(host_time=1e-5), trainer) == seconds, "a duration has its unit"


def test_changes_of_a_trainer_are_checked_like_a_file() -> None:
    _, found = validated()
    document = found["run"]
    changes = document["rows"][0]["plan"]["trainer"]
    cases = [
        ({**changes, "extends": None}, "extends is None; it must name a trainer"),
        ({**changes, "extends": "torchtitn"}, "torchtitan"),
        ({**changes, "norm_pases": 1}, "unknown key 'norm_pases'; nearest: passes"),
        ({**changes, "host_time": 1.0}, "host_time"),
        ({**changes, "unfused": ["swiglou"]}, "unfused"),
    ]
    for damaged, says in cases:
        document["rows"][0]["plan"]["trainer"] = damaged
        with pytest.raises(PlannerError) as error:
            planned(rows_from_dict(document)[0])
        assert says in str(error.value) and "\n" not in str(error.value)
    choices = random.Random(3)
    for _ in range(60):
        key = choices.choice([*changes])
        junk = choices.choice([None, -1, 1e30, "x", [], {}, True, [1], {"a": []}, float("nan")])
        document["rows"][0]["plan"]["trainer"] = {**changes, key: junk}
        try:
            planned(rows_from_dict(document)[0])
        except PlannerError as error:
            assert "\n" not in str(error)

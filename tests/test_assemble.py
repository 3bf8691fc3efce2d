"""A step put together from its passes: the predicted ones give the prediction again, slower ones a longer step."""

from __future__ import annotations

from typing import Any

import pytest
from quick_cases import proofs_but
from samples import TRAINERS, job

from planner.lab.run import assembled_step as assemble
from planner.lab.run.assembled_step import Seen, predicted_of
from planner.layout import Layout
from planner.timeline.passes import stage_kind
from planner.timeline.priced_plan import Priced, price

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("gqa", {"tp": 2, "pp": 4, "dp": 2, "zero": 2, "num_microbatches": 8, "sequence_parallel": 1}),
    ("gqa", {"dp": 8, "zero": 3, "num_microbatches": 2}),
    ("gqa", {"pp": 2, "dp": 4, "zero": 2, "num_microbatches": 8, "vpp": 2, "schedule": 2}),
    ("gqa", {"pp": 4, "dp": 2, "zero": 2, "num_microbatches": 8, "vpp": 2, "schedule": 4}),
    ("gqa", {"pp": 2, "dp": 2, "cp": 2, "zero": 2, "num_microbatches": 40, "recompute": 2, "cp_method": 2}),
    ("moe", {"dp": 8, "ep": 8, "zero": 3, "num_microbatches": 2}),
]


def priced_of(model: str, fields: dict[str, Any]) -> Priced:
    layout, trainer = Layout(**fields), TRAINERS["torchtitan"]
    return price(job(model, trainer, int(layout.num_gpus), batch=int(layout.global_batch_size)), layout)


def as_predicted(priced: Priced, rank: int, slower: float = 1.0) -> Seen:
    """A rank that computes what is predicted, or so many times longer."""
    forecast, pp = predicted_of(priced), int(priced.assigned.pp)
    mine = [i for i, where in enumerate(forecast.ranks) if where == rank]
    kind = stage_kind(rank, pp)
    split = bool(forecast.computed["W"].any())
    passes = {
        (name, i): slower * float(forecast.computed[name][i])
        for name in ("F", "B", "W")
        for i in mine
        if split or name != "W"
    }
    once = float(assemble._copies(priced)[:, kind].sum()) if pp > 1 else 0.0
    return Seen(stage=rank, passes=passes, once=slower * once, optimizer=slower * float(priced.shared.optimizer[kind, 0]))


@pytest.mark.parametrize(("model", "fields"), proofs_but([LAYOUTS[1], LAYOUTS[2], LAYOUTS[5]], LAYOUTS))
def test_a_step_of_predicted_passes_is_the_predicted_step(model: str, fields: dict[str, Any]) -> None:
    """Part by part, from all stages, from three, from one; and its parts sum to it."""
    priced = priced_of(model, fields)
    pp, forecast = int(priced.assigned.pp), assemble.predicted_step(priced, predicted_of(priced)).parts
    assert sum(forecast.values()) == pytest.approx(priced.step_time, rel=1e-12)
    priced_parts = {name: float(seconds[0]) for name, seconds in priced.estimate.time.items()}
    for part in (*assemble.EXCHANGED, "bubble", "stragglers", "optimizer", "overhead"):
        assert forecast[part] == pytest.approx(priced_parts[part], rel=1e-9, abs=1e-15), part
    computed = sum(priced_parts[name] for name in assemble.COMPUTED)
    assert forecast["compute"] == pytest.approx(computed, rel=1e-9) or (pp == 1 and forecast["compute"] > computed)
    for ranks in (range(pp), sorted({0, min(1, pp - 1), pp - 1}), [pp - 1]):
        found = assemble.assemble(priced, [as_predicted(priced, rank) for rank in ranks], predicted_of(priced))
        assert found.step == sum(found.parts.values()) == pytest.approx(priced.step_time, rel=1e-12)
        assert found.parts == pytest.approx(forecast, rel=1e-9, abs=1e-15)
        others = len({stage_kind(rank, pp) for rank in range(pp)} - {stage_kind(rank, pp) for rank in ranks})
        assert len(found.borrowed) == others


@pytest.mark.parametrize(("model", "fields"), LAYOUTS[:3])
def test_slower_computation_lengthens_what_it_should(model: str, fields: dict[str, Any]) -> None:
    """Twice the computation: twice compute and update; collectives as priced; traffic hides behind longer passes."""
    priced = priced_of(model, fields)
    pp, forecast = int(priced.assigned.pp), assemble.predicted_step(priced, predicted_of(priced)).parts
    whole = predicted_of(priced)
    found = assemble.assemble(priced, [as_predicted(priced, rank, 2.0) for rank in range(pp)], whole).parts
    assert found["compute"] == pytest.approx(2 * forecast["compute"]) and found["optimizer"] == pytest.approx(
        2 * forecast["optimizer"]
    )
    for part in assemble.EXCHANGED:
        assert found[part] == pytest.approx(forecast[part])
    assert found["data_communication"] <= forecast["data_communication"] * (1 + 1e-12)
    if pp > 1:
        assert forecast["bubble"] < found["bubble"] < 2.05 * forecast["bubble"]
    one = assemble.assemble(
        priced, [as_predicted(priced, pp - 1, 2.0), *(as_predicted(priced, r) for r in range(pp - 1))], whole
    )
    if pp > 1:  # the slowest stage sets the pace: its own passes, and the others wait
        assert one.slowest == pp - 1 and one.parts["compute"] == pytest.approx(found["compute"], rel=0.35)

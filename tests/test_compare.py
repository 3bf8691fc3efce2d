"""plan compare: what differs, effects that sum to the whole difference, changes that need each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.explicit import explicit_plan
from planner.layout import FIELDS, Schedule
from planner.plan_file import Plan
from planner.questions.compare.numbers import Comparison, compare, inputs
from planner.questions.compare.show import parts_table
from planner.rules import check
from planner.timeline.priced_plan import job_of, price
from planner.units import GIB, parse


def plan(model: str = "llama-8b", num_gpus: int = 16, *, said: dict[str, Any] | None = None, **layout: int) -> Plan:
    request = {
        "model": model,
        "num_gpus": num_gpus,
        "hardware": "h100-sxm",
        "trainer": "megatron",
        "global_batch_size": 64,
    }
    return explicit_plan(None, layout, {**request, **(said or {})})


PAIRS: dict[str, tuple[Callable[[], Plan], Callable[[], Plan]]] = {
    "degrees": (lambda: plan(tp=2, pp=2), lambda: plan(tp=4, pp=1, micro_batch_size=2)),
    "vpp": (lambda: plan(tp=2, pp=4), lambda: plan(tp=2, pp=4, vpp=4, recompute=2)),
    "cluster": (
        lambda: plan(tp=2, pp=2),
        lambda: plan("llama-8b", 32, tp=2, pp=2, said={"hardware": "b200-sxm", "sequence_length": 4096}),
    ),
    "network": (lambda: plan(tp=2), lambda: plan(tp=2, said={"network_bandwidth": 12.5e9, "precision": "fp8"})),
    "trainer": (lambda: plan(tp=2), lambda: plan(tp=1, said={"trainer": "torchtitan"})),
    "experts": (
        lambda: plan("mixtral-8x7b", tp=2, pp=2, ep=2),
        lambda: plan("mixtral-8x7b", tp=4, pp=1, ep=4, recompute=2, said={"expert_imbalance": 1.5}),
    ),
    "schedule": (
        lambda: plan(pp=4, said={"trainer": "torchtitan"}),
        lambda: plan(pp=8, zero=2, schedule=int(Schedule.ZBV), said={"trainer": "torchtitan", "sequence_length": 4096}),
    ),
}  # fmt: skip


@cache
def pair(name: str) -> tuple[Plan, Plan]:
    """Two plans; priced by whoever asks first, not by every process that collects the tests."""
    first, other = PAIRS[name]
    return first(), other()


@pytest.mark.parametrize("name", PAIRS)
def test_effects_sum_to_the_whole_difference(name: str) -> None:
    first, other = pair(name)
    found = compare([first, other], ["a", "b"])
    [effects] = found.ways
    before, after = first.prediction, other.prediction
    assert sum(one.step_time_s for one in effects) == pytest.approx(
        after.step_time_s - before.step_time_s, abs=1e-9
    )
    assert sum(one.memory_peak_gib for one in effects) == pytest.approx(
        after.memory_peak_gib - before.memory_peak_gib
    )
    for one in effects:
        assert sum(one.parts_s.values()) == pytest.approx(one.step_time_s, abs=1e-9)
    changed = [field for one in effects for field, _, _ in one.changes]
    differ = {field for field, value in inputs(first).items() if value != inputs(other)[field]}
    assert set(changed) == differ and len(changed) == len(differ)
    assert {one.field for one in found.differences} == differ
    assert len(effects) >= 2, "they come apart"


def states(first: Plan, found: Comparison) -> list[Plan]:
    """The plans on the way, rebuilt from the changes as text."""
    plans, at = [first], first
    for one in found.ways[0]:
        for field, _, new in one.changes:
            if field in FIELDS:
                value = getattr(dataclasses.replace(at).layout.from_dict({field: _yaml(field, new)}), field)
                at = dataclasses.replace(at, layout=at.layout.replace(**{field: value}))
            elif field == "network_bandwidth":
                at = dataclasses.replace(at, network_bandwidth=parse(new, "bytes/s"))
            elif field in ("hardware", "trainer"):
                at = dataclasses.replace(at, **{field: new})
            elif field == "num_gpus":
                at = dataclasses.replace(at, num_gpus=int(new))
            else:
                old = getattr(at.workload, field)
                at = dataclasses.replace(at, workload=at.workload.replace(**{field: type(old)(new)}))
        plans.append(at)
    return plans


def _yaml(field: str, text: str) -> Any:
    return {"yes": True, "no": False}.get(text, int(text) if text.isdigit() else text)


@pytest.mark.parametrize("name", PAIRS)
def test_each_effect_is_a_price_of_a_legal_layout(name: str) -> None:
    """Every stop on the way is legal, and its price is what the effects up to it say."""
    first, other = pair(name)
    found = compare([first, other], ["a", "b"])
    time, memory = first.prediction.step_time_s, first.prediction.memory_peak_gib
    stops = states(first, found)
    assert inputs(stops[-1]) == inputs(other)
    for stop, one in zip(stops[1:], found.ways[0], strict=True):
        job = job_of(stop)
        check(job, stop.layout)
        priced = price(job, stop.layout)
        time, memory = time + one.step_time_s, memory + one.memory_peak_gib
        assert priced.step_time == pytest.approx(time)
        assert priced.memory_peak / GIB == pytest.approx(memory)


def test_inputs_that_need_each_other_change_together() -> None:
    found = compare(list(pair("degrees")), ["a", "b"])
    groups = [{field for field, _, _ in one.changes} for one in found.ways[0]]
    assert {"tp", "pp"} in groups, "tp x pp x dp stays the number of GPUs"
    assert {"micro_batch_size", "num_microbatches"} in groups, "b x m x dp stays the batch"
    assert all({field} in groups for field in ("zero", "recompute") if {field} & set().union(*groups))


def test_layers_of_the_ends_change_with_the_stages_that_they_are_of() -> None:
    """9 layers on the first of two stages instead of four: a pipeline that neither plan has."""
    found = compare([plan(pp=2), plan(num_gpus=32, pp=4, first_stage_layers=9, last_stage_layers=7)], ["a", "b"])
    changed = [{name for name, *_ in one.changes} for one in found.ways[0]]
    assert any({"pp", "first_stage_layers", "last_stage_layers"} <= one for one in changed)


def test_an_assumption_is_marked() -> None:
    assumed = explicit_plan(None, {"tp": 2}, {"model": "llama-8b", "num_gpus": 16, "hardware": "h100-sxm"})
    found = compare([plan(tp=2), assumed], ["a", "b"])
    batch = next(one for one in found.differences if one.field == "global_batch_size")
    assert batch.values == ("64", "512") and batch.assumed == (False, True)


def test_other_models_have_parts_and_no_effects() -> None:
    found = compare([plan(tp=2), plan("mixtral-8x7b", tp=2, ep=2)], ["a", "b"])
    assert not found.same_model and not found.ways
    assert found.differences[0].field == "model"
    deeper = dataclasses.replace(plan().workload.model, num_layers=40)
    two = compare([plan(tp=2), plan(deeper, tp=2)], ["a", "b"])  # type: ignore[arg-type]
    assert two.differences[0].values == ("llama-3.1-8b: num_layers 32", "llama-3.1-8b: num_layers 40")


# ------------------------------------------------------------------------------------------------ command


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for number, one in enumerate((*pair("degrees"), pair("vpp")[1])):
        path = tmp_path / f"{number}.yaml"
        one.save(path)
        paths.append(str(path))
    return paths


def test_json_holds_what_the_tables_show(run: Any, files: list[str]) -> None:
    done = run("compare", *files)
    assert done.exit_code == 0, done.output
    for text in (
        "What differs",
        "From A to B",
        "From A to C",
        "all together",
        "cannot change alone",
        "Step time by part",
    ):
        assert text in done.output
    document = json.loads(run("compare", *files, "--json").stdout)
    assert [one["file"] for one in document["plans"]] == files
    assert [one["to"] for one in document["effects"]] == files[1:]
    for way, last in zip(document["effects"], document["plans"][1:], strict=True):
        total = sum(one["step_time_s"] for one in way["changes"])
        assert total == pytest.approx(last["step_time_s"] - document["plans"][0]["step_time_s"])
        for change in way["changes"]:
            text = change["inputs"][0]
            assert f"{text['input']} {text['from']} to {text['to']}" in " ".join(done.output.split())


def test_bad_input_is_one_sentence(run: Any, files: list[str], tmp_path: Path) -> None:
    alone = run("compare", files[0])
    assert alone.exit_code == 2 and "a comparison needs two plans or more" in alone.stderr
    missing = run("compare", files[0], str(tmp_path / "none.yaml"))
    assert missing.exit_code == 2 and "none.yaml: cannot be read" in missing.stderr
    stale = Path(files[1])
    stale.write_text(stale.read_text().replace("step_time_s:", "step_time_s: 1\n  #", 1))
    done = run("compare", *files[:2])
    assert done.exit_code == 2 and f"{files[1]} says 1 s per step, but this planner prices" in " ".join(
        done.stderr.split()
    )
    unknown = Path(files[1])
    unknown.write_text(Path(files[0]).read_text().replace("optimizer: adam\n", "optimizer: paged_adam_8bit\n", 1))
    done = run("compare", files[0], files[1])
    assert done.exit_code == 2 and "trainer megatron has no optimizer paged_adam_8bit; it knows adam" in " ".join(
        done.stderr.split()
    )
    unknown.write_text(Path(files[0]).read_text().replace("  pp: ", "  pp: 3794", 1))  # a pipeline that takes hours to walk
    done = run("compare", files[0], files[1])
    assert done.exit_code == 2 and f"{files[1]}: tp" in done.stderr and "but the job has 16" in " ".join(done.stderr.split())
    same = run("compare", files[0], files[0])
    assert "The plans are the same: no input differs." in same.output


def test_a_comparison_of_one_plan_is_refused() -> None:
    with pytest.raises(PlannerError, match="needs two plans"):
        compare([plan()], ["a"])


def test_a_part_that_is_the_rounding_of_others_is_no_time() -> None:
    """Seconds are differences of walked pipelines: 1e-16 s of waiting is nothing, and says so."""
    one = plan(tp=4, pp=2)
    said = one.prediction
    tiny = dataclasses.replace(one, prediction=dataclasses.replace(said, time_s={**said.time_s, "stragglers": 1e-16}))
    found = dataclasses.replace(compare([one, one], ["a", "b"]), plans=(tiny, tiny))
    assert "waiting for the slowest GPU" not in list(parts_table(found).columns[0].cells)

"""Published mixed runs: which GPUs hold which stage, what is answered, and how far it lies from what was measured."""

from pathlib import Path

import numpy as np
import pytest

from planner import library
from planner.errors import PlannerError
from planner.mixed.published import answers, run_of, trainer_of
from planner.questions.accuracy.beyond import answered, judged, sweeps

FOLDER = Path(library.profiles_directory()) / "beyond-runs" / "heterogeneous"


def document(name: str):
    return library.read_yaml(FOLDER / f"{name}.yaml")


def test_ranks_lie_node_by_node() -> None:
    """16 GPUs, the last four T4: of pp 4 the last stage, of pp 2 the last half of the replicas' second stages."""
    data = document("amp-v100-t4")
    rows = {one["id"]: one for one in data["rows"]}
    _, layout = run_of(data, rows["tp1-dp4-pp4-mbs2"], "file")
    assert [[stage.kind for stage in one.stages] for one in layout.pipelines] == [["p3.8xlarge"] * 3 + ["g4dn.12xlarge"]]
    assert layout.pipelines[0].count == 4 and [stage.layers for stage in layout.pipelines[0].stages] == [5, 7, 6, 6]
    job, layout = run_of(data, rows["tp1-dp8-pp2-mbs1"], "file")
    assert [(one.stages[1].kind, one.count) for one in layout.pipelines] == [("p3.8xlarge", 4), ("g4dn.12xlarge", 4)]
    assert job.clusters["g4dn.12xlarge"].hardware.network_bandwidth == pytest.approx(50e9 / 8 / 4)


def test_units_are_layers_and_the_two_ends() -> None:
    data = document("sailor-gh200")
    row = next(one for one in data["rows"] if one["id"] == "neo-N16-D4")
    job, layout = run_of(data, row, "file")
    assert [stage.layers for stage in layout.pipelines[0].stages] == [6, 9, 9, 8] and layout.global_batch_size == 1024
    assert job.clusters["clariden"].domain == 4


@pytest.fixture(scope="module")
def rows():
    return answered(sorted(FOLDER.glob("*.yaml")))


def test_every_row_has_an_answer(rows) -> None:
    assert {one.status for one in rows} <= {"predicted", "does not fit", "not run"}
    for one in rows:
        for quantity in one.quantities.values():
            assert quantity.range[0] <= quantity.predicted <= quantity.range[1]
            assert np.isfinite(quantity.predicted) and quantity.measured > 0
    assert all(not one.counts for one in rows if one.id == "neo-N4-D4")


def test_errors_do_not_grow(rows) -> None:
    """Figures of 2026-11-23, V100 with T4 of 2026-11-28, rounded up; docs/log/mixed.md says what is behind them."""
    by_source = {}
    for (_, name), compared in judged(rows).items():
        for row, one in compared:
            by_source.setdefault((row.source, name), []).append(abs(one.error))
    for key, most in {
        ("amp-v100-t4", "step_s"): 0.105, ("amp-t4-uneven", "step_s"): 0.095, ("sailor-gh200", "step_s"): 0.04,
        ("sailor-gh200", "memory_gb"): 0.05, ("sailor-aceso-gh200", "step_s"): 0.08,
    }.items():  # fmt: skip
        assert np.median(by_source[key]) <= most, key
    found = sweeps(rows)["amp-v100-t4"]
    assert found["right"] >= 0.85 and found["regret"] <= 0.05


def test_a_row_that_cannot_be_read_is_refused_with_its_place() -> None:
    data = document("amp-t4-uneven")
    row = {**data["rows"][0], "parallel": {"tp": 1, "dp": "x", "pp": 1}}
    refused = answers({**data, "rows": [row]}, "file.yaml")[0]
    assert refused.status == "refused" and "file.yaml: tp1-dp16-pp1-mbs1: parallel: dp is 'x'" in refused.reason
    with pytest.raises(PlannerError, match="of no trainer"):
        trainer_of("another one")


def test_stages_whose_replicas_are_of_different_kinds() -> None:
    """Two kinds in each stage, a slow Ethernet: every replica is priced on its own GPU, gradients go over the network."""
    data = {
        "source": {"id": "made-up"}, "topic": "heterogeneous", "framework": "sailor (megatron-deepspeed fork)",
        "cluster": {"nodes": [
            {"kind": "titan", "gpu": "titan-rtx", "gpus": 2, "network": "1 Gb/s"},
            {"kind": "ti", "gpu": "rtx-2080-ti", "gpus": 2, "network": "1 Gb/s"},
        ]},
        "model": {"name": "opt-350m", "hidden": 1024, "layers": 24, "heads": 16, "seq": 1024, "vocab": 50272},
        "rows": [{
            "id": "row", "parallel": {"tp": 1, "dp": 2, "pp": 2}, "batch": {"micro": 1, "global": 8},
            "stages": [
                {"units": units, "replicas": [{"gpu": gpu, "tp": 1, "count": 1} for gpu in ("titan-rtx", "rtx-2080-ti")]}
                for units in (12, 14)
            ],
            "measured": {"step_s": 3.0, "mem_bytes": 9.0e9},
        }],
    }  # fmt: skip
    job, layout = run_of(data, data["rows"][0], "file")
    assert [[stage.kind for stage in one.stages] for one in layout.pipelines] == [["titan", "titan"], ["ti", "ti"]]
    found = answers(data, "file")[0]
    assert found.status in ("predicted", "does not fit") and set(found.quantities) == {"step_s", "memory_gb"}
    open_rows = {**data["rows"][0], "parallel": {"tp": None, "dp": None, "pp": None}}  # every replica says its own
    assert run_of(data, open_rows, "file")[1] == layout
    gradients = 24 / 2 * 12 * 1024**2 * 4  # bytes of half the layers in fp32
    assert found.quantities["step_s"].predicted > gradients / job.clusters["ti"].hardware.network_bandwidth


CARDS = ("titan-rtx", "rtx-2080ti", "rtx-3090", "rtx-4090", "rtx-a5000")


def cards(stages: dict[str, tuple[str, str]]):
    """Nodes of four such cards on one network; rows of two stages, each with two replicas of a node."""
    return {
        "source": {"id": "made-up"}, "topic": "heterogeneous", "framework": "sailor (megatron-deepspeed fork)",
        "cluster": {"nodes": [{"kind": f"node-{one}", "gpu": one, "gpus": 4, "network": "10 Gb/s"} for one in CARDS]},
        "models": {"opt-350m": {"hidden": 1024, "layers": 24, "heads": 16, "seq": 2048, "vocab": 50272}},
        "rows": [
            {"id": name, "model": "opt-350m", "parallel": {"gpus": None, "dp": 2}, "batch": {"micro": 1, "global": 32},
             "stages": [{"units": 13, "replicas": [{"gpu": gpu, "tp": 4, "count": 1} for gpu in (pair[at], pair[-1])]}
                        for at in (0, 1)],
             "measured": {"step_s": 3.0, "tokens_per_s_per_gpu": 1000.0, "mem_bytes": 9.0e9}}
            for name, pair in stages.items()
        ],
    }  # fmt: skip


def test_mixed_cards_lie_between_their_homogeneous_clusters() -> None:
    """Equal networks and whole nodes: nothing but the cards differs."""
    alone = {one: (one, one) for one in CARDS}
    pairs = {f"{one} {two}": (one, two) for one in CARDS for two in CARDS if one < two}
    found = {one.id: one for one in answers(cards({**alone, **pairs}), "file")}
    steps = {name: one.quantities["step_s"].predicted for name, one in found.items()}
    assert {one.status for one in found.values()} == {"predicted"}
    for name, pair in pairs.items():
        low, high = sorted(steps[one] for one in pair)
        assert low * 0.995 <= steps[name] <= high * 1.005, name
    for name, one in found.items():
        assert one.quantities["tokens_per_s_per_gpu"].predicted == pytest.approx(32 * 2048 / steps[name] / 16)
        assert all(some.range[0] < some.predicted < some.range[1] for some in one.quantities.values())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cluster", "nodes"), 3), (("cluster", "nodes", 0), None), (("cluster", "links"), 1), (("models",), 2),
        (("rows", 0, "stages", 0), None), (("rows", 0, "stages", 0, "units"), "many"), (("rows", 0, "batch"), 4),
        (("rows", 0, "stages", 0, "replicas", 0, "tp"), 0), (("rows", 0, "stages", 0, "replicas", 0, "gpu"), "h100"),
        (("rows", 0, "layers_per_stage"), "12"), (("rows", 0, "parallel"), 1),
    ],
)  # fmt: skip
def test_rows_of_a_wrong_form_are_refused(place, value) -> None:
    data = cards({"row": ("titan-rtx", "rtx-3090")})
    assert answers(data, "file")[0].status == "predicted"
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    found = answers(data, "file")[0]
    assert found.status == "refused" and found.reason

"""The check of a cluster with real ranks of which one is late; by itself, as other work on the machine makes ranks late too."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.library import read_yaml


@pytest.mark.proof
@pytest.mark.alone
def test_a_slow_node_is_found_by_real_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import profiler_ranks as ranks

    said = ranks.together(4, ranks.health_with_a_slow_node, str(tmp_path / "health.yaml"), local=1)
    assert said[1] is None and any("node 2 (" in one and "is slow" in one for one in said[0]), said
    found = read_yaml(tmp_path / "health.yaml")["health"]
    assert [one["member"] for one in found["bisection"]["slow"]] == [2] and found["bisection"]["slow"][0]["share"] < 0.5
    between = found["between"]
    assert all(between[a][b] is not None for a in range(4) for b in range(4) if a != b)
    assert max(between[2][b] for b in (0, 1, 3)) < min(between[0][1], between[1][0], between[0][3]), "what it sends is late"
    assert found["rails"][2][0] < 0.5 * found["rails"][0][0] and len(found["inside"]) == 4

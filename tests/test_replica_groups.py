"""torchft with real replica groups on gloo: the group that is left keeps every step."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.proof
SAME = 1e-12
NO_TORCHFT = "NOT CHECKED: torchft is not installed (pip install torchft)"


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason=NO_TORCHFT)
def test_torchft_keeps_every_step_of_the_group_that_is_left(tmp_path: Path) -> None:
    """Two replica groups on gloo, one is killed: the other does no step again; the new one takes over its state."""
    from torchft._torchft import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1500)
    outs = [tmp_path / name for name in ("first", "second", "again")]

    def group(number: int, out: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.proofs.replica_groups", str(number), lighthouse.address(), "100000"]
        with out.open("wb") as file:
            return subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL, cwd=ROOT)

    def steps(out: Path) -> dict[int, tuple[int, int, float]]:
        found = re.findall(r"^step (\d+) groups (\d) kept (\d) sum (\S+)$", out.read_text(), re.M)
        return {int(step): (int(groups), int(kept), float(total)) for step, groups, kept, total in found}

    def wait(out: Path, many: int, groups: int = 2) -> None:
        limit = time.monotonic() + 80
        while sum(one[0] == groups for one in steps(out).values()) < many:
            assert time.monotonic() < limit, out.read_text()[-500:]
            time.sleep(0.1)

    running = [group(0, outs[0]), group(1, outs[1])]
    try:
        wait(outs[0], 10)
        running[1].kill()
        wait(outs[0], 10, groups=1)
        running.append(group(1, outs[2]))
        wait(outs[2], 10)
    finally:
        for one in running:
            one.kill()
            one.wait()
        lighthouse.shutdown()
    mine, theirs = steps(outs[0]), steps(outs[2])
    numbers = [int(one) for one in re.findall(r"^step (\d+) groups \d kept 1", outs[0].read_text(), re.M)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))  # none twice, none left out
    assert sum(not kept for _, kept, _ in mine.values()) <= 1  # the step of the failure
    both = [step for step in set(mine) & set(theirs) if theirs[step][0] == mine[step][0] == 2]
    assert len(both) >= 5 and min(theirs) > 10
    assert all(abs(mine[step][2] - theirs[step][2]) <= SAME for step in both)

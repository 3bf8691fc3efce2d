"""Slow links proven with two gloo ranks in two network namespaces: a limited rate, and a relay that delays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import may_limit

from planner.cluster_file import Link
from planner.detect import pressure as machine_pressure
from planner.mixed import sites, wide_links

pytestmark = [pytest.mark.proof, pytest.mark.alone]
ROOT = Path(__file__).resolve().parents[1]
LINK = 12.5e6
"""Bytes/s of the limited link, frames with all their headers."""
PAYLOAD = (1500 - 52) / (1500 + 14 + 33)
"""Part of its bytes that TCP carries as payload: headers of IP, TCP and the frame, and acknowledgements of the other direction,
66 bytes for every second segment.  [RFC 1122, 4.2.3.2]"""
DELAY = 0.06
"""Seconds that the relay holds a packet."""
MIB = 2**20
PORT = 29611


def both(spaces: tuple[str, str], device: str, address: str, *words: str, each: int = 1) -> list[float]:
    """What the slowest of all ranks timed, each time; ``each`` of them stand in each namespace."""
    ranks = []
    for rank in range(2 * each):
        space = spaces[rank // each]
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"{device}{space}",
            "WORLD_SIZE": str(2 * each),
        }  # fmt: skip
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.proofs.link_ranks", str(rank), address, str(PORT)]
        ranks.append(
            subprocess.Popen(
                [*command, *words], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        told = [one.communicate(timeout=100) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert all(one.returncode == 0 for one in ranks), [error[-2000:] for _, error in told]
    return [max(times) for times in zip(*(json.loads(out.splitlines()[-1]) for out, _ in told), strict=True)]


def require_near(predicted: float, measured: float) -> None:
    """Within 10 %; on a machine whose ranks wait for a core it may only take longer."""
    assert measured > 0.9 * predicted
    if (machine_pressure() or 0.0) < 20:
        assert predicted == pytest.approx(measured, rel=0.10)


@pytest.fixture()
def far_link() -> Iterator[tuple[str, str]]:
    """Two network namespaces whose packets take DELAY each way."""
    if not may_limit() or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("a delaying relay needs root, ip and /dev/net/tun")
    names = (f"qa{os.getpid() % 10000}", f"qb{os.getpid() % 10000}")
    relay = None
    try:
        for name in names:
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespace here: {done.stderr.strip()}")
        command = [sys.executable, "-m", "tests.proofs.delaying_relay", *names, str(DELAY)]
        relay = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert relay.stdout is not None and relay.stderr is not None
        if relay.stdout.readline().strip() != "ready":
            pytest.skip(f"no delaying relay here: {relay.stderr.read().strip().splitlines()[-1:]}")
        for number, name in enumerate(names):
            other = f"10.212.7.{2 - number}"
            address = f"addr add 10.212.7.{number + 1} peer {other} dev t{name}"
            for line in (address, f"link set t{name} mtu 8500 up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *line.split()], check=True)
        yield names
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_an_all_reduce_over_a_limited_link_takes_what_is_predicted(slow_link: tuple[str, str]) -> None:
    """1, 4 and 16 MiB over 100 Mbit/s, of which headers and acknowledgements take 6.4 %; the repeat that was disturbed least."""
    goodput = LINK * PAYLOAD
    for size, repeats in ((MIB, 7), (4 * MIB, 5), (16 * MIB, 5)):
        measured = min(both(slow_link, "v", "10.211.7.1", "reduce", str(size), str(repeats)))
        predicted = wide_links.ring_all_reduce_time(size, 2, goodput, 0.0)
        print(f"all-reduce of {size / MIB:.0f} MiB: measured {measured:.3f} s, predicted {predicted:.3f} s")
        require_near(predicted, measured)


def test_two_levels_send_less_over_the_link_than_one_ring(slow_link: tuple[str, str]) -> None:
    """Two ranks on each end: one ring sends 3/2 of the bytes over the link, two levels send them once."""
    size, goodput = 4 * MIB, LINK * PAYLOAD
    link = Link(between=("a", "b"), bandwidth=goodput)
    found = both(slow_link, "v", "10.211.7.1", "levels", str(size), "4", each=2)
    flat, levels = min(found[:4]), min(found[4:])
    ring = wide_links.flat_all_reduce_time(size, 4, (link, link))
    apart = size / 1e10 + wide_links.ring_all_reduce_time(size, 2, goodput, 0.0)  # inside each end, then between them
    print(f"one ring: measured {flat:.3f} s, predicted {ring:.3f} s; two levels: measured {levels:.3f} s, predicted {apart:.3f} s")
    require_near(ring, flat)
    require_near(apart, levels)


def test_a_hand_over_through_the_relay_takes_its_latency(far_link: tuple[str, str]) -> None:
    link = Link(between=("a", "b"), bandwidth=1e9, latency=DELAY)
    measured = min(both(far_link, "t", "10.212.7.1", "pingpong", "4096", "9"))
    predicted = 2 * wide_links.transfer_time(4096, link)
    print(f"there and back: measured {measured:.4f} s, predicted {predicted:.4f} s")
    require_near(predicted, measured)


def test_microbatches_in_flight_hide_the_latency_of_a_pipeline(far_link: tuple[str, str]) -> None:
    """Two stages of 1F1B with 2 microbatches in flight, and with as many more as the formula asks for."""
    tau, microbatches = 0.06, 14
    taus, hops, wires = [tau, tau], [DELAY], [0.0]
    extra = sites.extra_in_flight(DELAY, 0.0, tau)
    assert extra == 2
    found = {}
    for more in (0, extra):
        measured = min(both(far_link, "t", "10.212.7.1", "pipeline", str(tau), str(microbatches), str(2 + more)))
        predicted = sites.pipeline_seconds(taus, hops, wires, microbatches, more)
        print(f"{2 + more} in flight: measured {measured:.3f} s, predicted {predicted:.3f} s")
        require_near(predicted, measured)
        found[more] = measured
    assert found[extra] < 0.75 * found[0]

"""One of two gloo ranks on both ends of a link: what it times is printed as JSON.

    python -m tests.proofs.link_ranks RANK ADDRESS PORT reduce BYTES REPEATS
    python -m tests.proofs.link_ranks RANK ADDRESS PORT pipeline TAU MICROBATCHES IN_FLIGHT
    python -m tests.proofs.link_ranks RANK ADDRESS PORT pingpong BYTES REPEATS
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

FLOATS = 1024
"""Numbers of a hand-over: one packet, whose time is the latency."""


def reduced(size: int, repeats: int) -> list[float]:
    """Seconds of each all-reduce of so many bytes."""
    values, found = torch.ones(size // 4), []
    for _ in range(repeats):
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(values)
        found.append(time.monotonic() - start)
    return found


def pingpong(rank: int, size: int, repeats: int) -> list[float]:
    """Seconds of a message there and back."""
    values, found = torch.ones(size // 4), []
    for _ in range(repeats):
        start = time.monotonic()
        for sender in (0, 1):
            if rank == sender:
                dist.send(values, 1 - rank)
            else:
                dist.recv(values, 1 - rank)
        found.append(time.monotonic() - start)
    return found


def pipeline(rank: int, tau: float, microbatches: int, in_flight: int) -> list[float]:
    """Seconds of one step of two stages of 1F1B that sleep ``tau`` per microbatch, a third of it forward; sends overlap.

    ``in_flight``: microbatches of the first stage that have gone forward and not come back.
    """
    forward, backward = tau / 3, 2 * tau / 3
    arrivals = [torch.empty(FLOATS) for _ in range(microbatches)]
    sent = []
    dist.barrier()
    expected = [dist.irecv(one, 1 - rank) for one in arrivals]
    start = time.monotonic()
    if rank == 1:
        for one in expected:
            one.wait()
            time.sleep(forward + backward)
            sent.append(dist.isend(torch.ones(FLOATS), 0))
        for one in sent:
            one.wait()
    else:
        gone = 0
        for one in expected:
            while gone < microbatches and len(sent) < expected.index(one) + in_flight:
                time.sleep(forward)
                sent.append(dist.isend(torch.ones(FLOATS), 1))
                gone += 1
            one.wait()
            time.sleep(backward)
    return [time.monotonic() - start]


def main() -> None:
    """Join the group, work, print the times."""
    rank, address, port, what = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(FLOATS))
    if what == "reduce":
        found = reduced(int(sys.argv[5]), int(sys.argv[6]))
    elif what == "pingpong":
        found = pingpong(rank, int(sys.argv[5]), int(sys.argv[6]))
    else:
        found = pipeline(rank, float(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7]))
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch may abort on its way out


if __name__ == "__main__":
    main()

"""One of the gloo ranks on both ends of a link: what it times is printed as JSON. Half of them stand on each end, in order.

    python -m tests.proofs.link_ranks RANK ADDRESS PORT reduce BYTES REPEATS
    python -m tests.proofs.link_ranks RANK ADDRESS PORT levels BYTES REPEATS
    python -m tests.proofs.link_ranks RANK ADDRESS PORT pipeline TAU MICROBATCHES IN_FLIGHT    # three times
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


def levels(rank: int, world: int, size: int, repeats: int) -> list[float]:
    """Seconds of each all-reduce in two levels: reduce-scatter on each end, all-reduce of the shards between ends, all-gather."""
    half = world // 2
    ends = [dist.new_group(list(range(at, at + half))) for at in (0, half)]
    across = [dist.new_group([at, at + half]) for at in range(half)]
    values, mine, found = torch.ones(size // 4), rank % half, []
    shards = list(values.chunk(half))
    for _ in range(repeats):
        dist.barrier()
        start = time.monotonic()
        for at, shard in enumerate(shards):  # gloo has no reduce-scatter
            dist.reduce(shard, rank - mine + at, group=ends[rank // half])
        dist.all_reduce(shards[mine], group=across[mine])
        for at, shard in enumerate(shards):
            dist.broadcast(shard, rank - mine + at, group=ends[rank // half])
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


def pipeline(rank: int, tau: float, microbatches: int, in_flight: int) -> float:
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
    return time.monotonic() - start


def main() -> None:
    """Join the group, work, print the times."""
    world = int(os.environ.get("WORLD_SIZE", "2"))
    rank, address, port, what = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(FLOATS))
    if what == "reduce":
        found = reduced(int(sys.argv[5]), int(sys.argv[6]))
    elif what == "levels":
        size, repeats = int(sys.argv[5]), int(sys.argv[6])
        found = [*reduced(size, repeats), *levels(rank, world, size, repeats)]
    elif what == "pingpong":
        found = pingpong(rank, int(sys.argv[5]), int(sys.argv[6]))
    else:
        found = [pipeline(rank, float(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])) for _ in range(3)]
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch may abort on its way out


if __name__ == "__main__":
    main()

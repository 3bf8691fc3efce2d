"""A relay between two network namespaces that hands every IP packet on after a delay: latency where the kernel has no netem.

    python -m tests.proofs.delaying_relay SPACE_A SPACE_B SECONDS

It opens a TUN device in each namespace and prints a line when both are there; the devices live as long as it runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
LONGEST = 65536


def tunnel(space: str, name: str) -> int:
    """File descriptor of a new TUN device in a namespace; the process stays in that namespace. Raises OSError."""
    with open(f"/var/run/netns/{space}") as entry:
        if ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def relay(one: int, other: int, delay: float) -> None:
    """Hand packets on between two devices until the process ends."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    across = {one: other, other: one}
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, device, packet = waiting.popleft()
            with suppress(OSError):  # the device is not up yet, or its queue is full: lost, as on any network
                os.write(device, packet)
        left = max(waiting[0][0] - now, 0.0) if waiting else 1.0
        for device in select.select([one, other], [], [], left)[0]:
            with suppress(OSError):
                for _ in range(64):
                    waiting.append((time.monotonic() + delay, across[device], os.read(device, LONGEST)))


if __name__ == "__main__":
    devices = [tunnel(space, f"t{space}") for space in sys.argv[1:3]]
    print("ready", flush=True)
    relay(*devices, float(sys.argv[3]))

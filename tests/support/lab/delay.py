"""Pairs of network devices between which each frame takes a while: links with a delay.

`python -m tests.support.lab.delay N MICROSECONDS` makes the devices near0, far0, near1, ... in its
network namespace, says "ready", and carries frames between near<i> and far<i> until it is ended. A
device that is moved to another namespace stays joined to its pair. For kernels without netem.

A frame may have 64 KiB, as between veth devices: the kernel cuts it only where it has to, so
that a link of 1 Gbit/s is 2,000 frames a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
MOST_FRAME_BYTES = 1 << 17
MOST_AT_ONCE = 64  # of one device, before others have their turn


def open_device(name: str) -> int:
    """Makes a tap device; the descriptor that its frames are read from and written to."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return device


def carry(pairs: list[tuple[int, int]], delay_s: float) -> None:
    """Until the process ends.

    Args:
        pairs: descriptors of devices.
        delay_s: that each frame takes, on each way.
    """
    other = {a: b for near, far in pairs for a, b in ((near, far), (far, near))}
    under_way: deque[tuple[float, int, bytes]] = deque()  # all take as long: the first is next
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select(list(other), [], [], wait_s)
        for device in readable:
            try:
                for _ in range(MOST_AT_ONCE):
                    frame = os.read(device, MOST_FRAME_BYTES)
                    under_way.append((time.monotonic() + delay_s, other[device], frame))
            except BlockingIOError:
                pass
            except OSError:  # it went with its namespace; the others go on
                del other[device]
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # a device is down: the frame is lost
                os.write(device, frame)


def main(n_pairs: int, delay_us: int) -> None:
    """Until the process ends."""
    pairs = [(open_device(f"near{i}"), open_device(f"far{i}")) for i in range(n_pairs)]
    print("ready", flush=True)
    carry(pairs, delay_us / 1e6)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""What links take for some bytes: raw TCP between hosts, over connections that are there."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WAIT_S = 60.0
LEAD_S = 1.0  # for every sender to learn when it begins
NS_PER_S = 10**9
_LENGTH = struct.Struct("<Q")

Parts = Sequence[tuple[int, int]]  # receiver, bytes


def namespace() -> int:
    """Of this process's network: it tells hosts of a lab apart, in whatever process it is asked."""
    return Path("/proc/self/ns/net").stat().st_ino


class LinkEnd:
    """An actor on each host."""

    def __init__(self) -> None:
        import ray

        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._changed = threading.Condition()
        self._ends_ns: list[int] = []
        self._to: dict[int, socket.socket] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def about(self) -> tuple[int, tuple[str, int]]:
        """Its host's `namespace`, and where it listens."""
        return namespace(), self._listener.getsockname()

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Makes the connections that `send` uses."""
        for host, address in addresses.items():
            self._to[host] = socket.create_connection(address, WAIT_S)
            self._to[host].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, parts: Parts, begin_s: float) -> int:
        """To each receiver at once, from a moment of the machine's clock on: when that was, ns."""
        wait_s = begin_s - time.monotonic()
        if wait_s < 0:
            raise RuntimeError(f"this sender is {-wait_s:.3f} s late: not all begin at one moment")
        of: dict[int, list[bytes]] = {}
        for host, n_bytes in parts:
            of.setdefault(host, []).append(_LENGTH.pack(n_bytes) + bytes(n_bytes))
        ready = threading.Barrier(len(of) + 1)

        def send(host: int) -> None:
            ready.wait(WAIT_S)
            for data in of[host]:
                self._to[host].sendall(data)

        threads = [threading.Thread(target=send, args=(host,)) for host in of]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, begin_s - time.monotonic()))
        began_ns = time.monotonic_ns()
        ready.wait(WAIT_S)
        for thread in threads:
            thread.join(WAIT_S)
        return began_ns

    def ends_ns(self, n: int) -> list[int]:
        """When each of n parts had come, which are forgotten."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ends_ns) >= n, WAIT_S):
                raise TimeoutError(f"{len(self._ends_ns)} of {n} parts came in {WAIT_S:.0f} s")
            found, self._ends_ns = self._ends_ns, []
        return found

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        into = bytearray()
        while head := connection.recv(_LENGTH.size, socket.MSG_WAITALL):
            (n_bytes,) = _LENGTH.unpack(head)
            if len(into) != n_bytes:
                into = bytearray(n_bytes)
            got = 0
            while got < n_bytes:
                got += connection.recv_into(memoryview(into)[got:])
            with self._changed:
                self._ends_ns.append(time.monotonic_ns())
                self._changed.notify_all()


class Links:
    """Of all hosts, with a connection from each to each other one.

    Args:
        ends: An actor `LinkEnd` on each host.
    """

    def __init__(self, ends: Sequence[Any]) -> None:
        import ray

        self._ends = ends
        about = ray.get([end.about.remote() for end in ends], timeout=WAIT_S)
        self.namespaces = [each for each, _ in about]
        addresses = {host: address for host, (_, address) in enumerate(about)}
        ray.get(
            [
                end.connect.remote({at: each for at, each in addresses.items() if at != host})
                for host, end in enumerate(ends)
            ],
            timeout=WAIT_S,
        )

    def seconds(self, plan: Mapping[int, Parts]) -> float:
        """From the moment that all senders begin until all has come.

        Args:
            plan: Of each sender: receivers and bytes.
        """
        import ray

        parts = [part for each in plan.values() for part in each]
        n_to = {host: sum(to == host for to, _ in parts) for host in range(len(self._ends))}
        begin_s = time.monotonic() + LEAD_S
        sent = [self._ends[host].send.remote(list(each), begin_s) for host, each in plan.items()]
        began_ns = min(ray.get(sent, timeout=WAIT_S))
        asked = [self._ends[host].ends_ns.remote(n) for host, n in n_to.items() if n]
        came = ray.get(asked, timeout=WAIT_S)
        return (max(end for each in came for end in each) - began_ns) / NS_PER_S

"""The driver of `allreduce` in the namespace of the first host: an actor on each host.

python -m bench.drivers.allreduce_driver OPTIONS_AS_JSON      prints one JSON object per run
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np

from bench.peers.allreduce_members import Float64, own_array, verify_sum
from bench.support import common
from bench.support.common import emit, note

TIMEOUT_S = 1800
WARM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """Of the runs of one cluster.

    Args:
        n_bytes: of each member's array.
        members: how many, ascending; the peers run with the most.
        lanes: of the ring.
        repetitions: of ours; the peers run once.
        peers: "driver", "tree".
    """

    n_bytes: int
    members: tuple[int, ...]
    lanes: int
    repetitions: int
    peers: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Member:
    """An actor with an array. Moments are of this machine's clock: all hosts are on it."""

    def make(self, n_bytes: int, rank: int) -> None:
        self.mine = own_array(n_bytes, rank)
        self.out = np.empty_like(self.mine)

    def clear(self) -> None:
        self.out.fill(np.nan)

    def allreduce(self, group: Any, n_bytes: int) -> float:
        """When the sum was there."""
        n = n_bytes // 8
        group.allreduce(self.mine[:n], out=self.out[:n])
        end = time.monotonic()
        verify_sum("allreduce", self.out[:n], group.size)
        return end

    def give(self) -> Float64:
        return self.mine

    def take(self, box: list[Any], n_members: int) -> float:
        """When what the peer made was there."""
        import ray

        got = ray.get(box[0], timeout=TIMEOUT_S)
        end = time.monotonic()
        verify_sum("ray.get", got, n_members)
        return end


def add(a: Float64, b: Float64) -> Float64:
    """What a task of the tree does."""
    made: Float64 = np.add(a, b)
    return made


def cpu_seconds() -> tuple[float, float]:
    """Busy and all CPU seconds of this machine since it started."""
    with open("/proc/stat") as lines:
        ticks = [int(word) for word in lines.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / 100, sum(ticks) / 100


class Session:
    """The actors, on hosts in the order of their addresses; the driver is on the first."""

    def __init__(self, options: Options) -> None:
        import ray

        import clamor_ray as clamor

        ray.init(address="auto", log_to_driver=False, logging_level="error")
        clamor.init()
        self.options = options
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
        )
        self.nodes = [node["NodeID"] for node in nodes][: options.members[-1]]
        self.members = [common.pinned(Member, node).remote() for node in self.nodes]
        self.each("make", [(options.n_bytes, rank) for rank in range(len(self.members))])

    def each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """One call at each of the first members."""
        import ray

        calls = [
            getattr(member, method).remote(*given)
            for member, given in zip(self.members, arguments, strict=False)
        ]
        return list(ray.get(calls, timeout=TIMEOUT_S))

    def ours(self, n: int) -> None:
        """A group of so many: the first call connects it."""
        import clamor_ray as clamor

        group = clamor.AllReduceGroup(
            self.members[:n], lanes=self.options.lanes, timeout_s=TIMEOUT_S
        )
        n_bytes = self.options.n_bytes
        self.each("allreduce", [(group, min(WARM_BYTES, n_bytes))] * n)
        for _ in range(self.options.repetitions):
            self.each("clear", [()] * n)
            self.timed("ours", n, lambda: self.each("allreduce", [(group, n_bytes)] * n))

    def driver(self) -> list[float]:
        """All arrays come to the driver, and their sum goes out."""
        import ray

        arrays = ray.get([member.give.remote() for member in self.members], timeout=TIMEOUT_S)
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        del arrays
        box = [ray.put(total)]
        return self.each("take", [(box, len(self.members))] * len(self.members))

    def tree(self) -> list[float]:
        """Two by two, each on the host of its left one."""
        found = [
            (node, member.give.remote())
            for node, member in zip(self.nodes, self.members, strict=True)
        ]
        while len(found) > 1:
            pairs = [found[at : at + 2] for at in range(0, len(found), 2)]
            found = [
                (node, common.pinned(add, node).remote(left, rest[0][1]) if rest else left)
                for (node, left), *rest in pairs
            ]
        box = [found[0][1]]
        return self.each("take", [(box, len(self.members))] * len(self.members))

    def timed(self, side: str, n: int, run: Any) -> None:
        """From here until the last member has the sum."""
        busy, all_of_it = cpu_seconds()
        begin = time.monotonic()
        seconds = max(run()) - begin
        busy_end, all_end = cpu_seconds()
        emit(
            {
                "side": side,
                "members": n,
                "bytes": self.options.n_bytes,
                "seconds": seconds,
                "cores_busy": (busy_end - busy) / (all_end - all_of_it),
            }
        )


def main(arguments: list[str]) -> None:
    given = json.loads(arguments[0])
    options = Options(**{**given, "members": tuple(given["members"])})
    session = Session(options)
    for n in options.members:
        note(f"ours, {n} members")
        session.ours(n)
    for name in options.peers:
        note(f"{name}, {options.members[-1]} members")
        session.timed(name, options.members[-1], getattr(session, name))


if __name__ == "__main__":
    main(sys.argv[1:])

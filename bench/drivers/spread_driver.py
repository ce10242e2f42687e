"""The driver of `spread`, in the namespace of the first host: one session.

python -m bench.drivers.spread_driver OPTIONS_AS_JSON      prints one JSON object per run
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
import time
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note

TIMEOUT_S = 600
LEAD_S = 1.5  # for every reader to learn when it begins
READERS_A_HOST = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one session's runs."""

    hosts: int
    mib: int  # of the variable that is read
    blocks: int  # of a commit
    commits: int
    repetitions: int


class Reader:
    """Two of them are on each host."""

    def prepare(self, ref: Any, index: int, n_parts: int) -> None:
        """Opens the variable. Nothing of the part has come yet."""
        array = ref.get()
        size = len(array) // n_parts
        self.part = array[index * size : (index + 1) * size]

    def read(self, begin: float) -> tuple[float, int]:
        """All of the part, from one moment of the machine's clock on: when that ended, and what was
        found."""
        wait_s = begin - time.monotonic()
        if wait_s < 0:
            raise RuntimeError(f"this reader is {-wait_s:.3f} s late: not all began at one moment")
        time.sleep(wait_s)
        total = int(np.bitwise_xor.reduce(self.part))
        end = time.monotonic()
        del self.part
        return end, total


class Session:
    """A session, on hosts in the order of their addresses."""

    def __init__(self, options: Options) -> None:
        import ray

        import clamor_ray as clamor

        ray.init(address="auto", log_to_driver=False, logging_level="error")
        self.options = options
        self.trap = clamor.init().trap
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
        )
        self.nodes = [node["NodeID"] for node in nodes]
        self.readers = [
            self.made(host, Reader) for host in range(options.hosts) for _ in range(READERS_A_HOST)
        ]

    def made(self, host: int, cls: type) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self.nodes[host], soft=False)
        return ray.remote(cls).options(num_cpus=0, scheduling_strategy=where).remote()

    def on(self, host: int, function: Any, *arguments: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self.nodes[host], soft=False)
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy=where)
        return task.remote(*arguments)

    def read(self, home: str | None) -> dict[str, Any]:
        """All readers at once, each its own part of a variable that no other host has seen."""
        import ray

        import clamor_ray as clamor

        seed = secrets.randbits(32)
        words = np.random.default_rng(seed).integers(0, 1 << 62, self.options.mib << 17)
        ref = clamor.put(words, home=home)
        n = len(self.readers)
        prepared = [reader.prepare.remote(ref, i, n) for i, reader in enumerate(self.readers)]
        ray.get(prepared, timeout=TIMEOUT_S)
        begin = time.monotonic() + LEAD_S
        ends = ray.get([reader.read.remote(begin) for reader in self.readers], timeout=TIMEOUT_S)
        size = len(words) // n
        for index, (_, found) in enumerate(ends):
            part = words[index * size : (index + 1) * size]
            common.verify("a part", found, int(np.bitwise_xor.reduce(part)))
        return {
            "run": "read",
            "home": home or "one",
            "seconds": max(end for end, _ in ends) - begin,
        }

    def commits(self) -> list[dict[str, Any]]:
        """Commits of scattered blocks to a variable on one other host, and to one that is spread,
        in turn: what the machine does meanwhile hits both."""
        import ray

        import clamor_ray as clamor

        n_words = 64 << 17
        zeros = np.zeros(n_words, np.int64)
        refs = {
            "one": ray.get(self.on(1, _put, zeros), timeout=TIMEOUT_S),
            "spread": clamor.put(zeros, home="spread"),
        }
        every = n_words // self.options.blocks
        runs: list[dict[str, Any]] = []
        for number in range(1, self.options.commits + 1):
            for home, ref in refs.items():
                change = clamor.update(ref)
                change.begin()[::every] = number
                began = time.perf_counter()
                change.commit()
                seconds = time.perf_counter() - began
                runs.append({"run": "commit", "home": home, "seconds": seconds})
        for ref in refs.values():
            found = ray.get(self.on(2 % self.options.hosts, _every, ref, every), timeout=TIMEOUT_S)
            common.verify("commits", found, np.full(len(found), self.options.commits))
        return runs


def _put(array: Any) -> Any:
    import clamor_ray as clamor

    return clamor.put(array)


def _every(ref: Any, every: int) -> Any:
    return np.array(ref.at().get()[::every])


def main() -> int:
    import clamor_ray as clamor

    options = Options(**json.loads(sys.argv[1]))
    session = Session(options)
    emit({"trap": session.trap})
    session.read("spread")  # page servers, connections, workers
    for number in range(options.repetitions):
        for home in (None, "spread"):
            note(f"reading, {home or 'one home'}")
            emit({**session.read(home), "repetition": number})
    note("commits")
    for run in session.commits():
        emit(run)
    clamor.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

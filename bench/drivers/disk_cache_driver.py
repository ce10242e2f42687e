"""The driver of `disk_cache`, in the namespace of the first host: a session for each case.

python -m bench.drivers.disk_cache_driver OPTIONS_AS_JSON      prints one JSON object per pass
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note

TIMEOUT_S = 600
CACHED = 0.4  # of the variable


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one session's runs."""

    mib: int  # of the variable
    passes: int  # of each order, after the first
    touches: int  # random words of a pass


class Reader:
    """On the second host."""

    def __init__(self, ref: Any) -> None:
        self.words = np.asarray(ref.get())  # a plain array: each absent block is a fault

    def scan(self) -> tuple[float, int]:
        began = time.perf_counter()
        total = int(np.bitwise_xor.reduce(self.words))
        return time.perf_counter() - began, total

    def random(self, seed: int, touches: int) -> tuple[float, int]:
        places = np.random.default_rng(seed).integers(0, len(self.words), touches)
        began = time.perf_counter()
        total = int(np.bitwise_xor.reduce(self.words[places]))
        return time.perf_counter() - began, total


def run(options: Options, nodes: list[str], words: Any, *, with_disk: bool) -> None:
    """All passes of a session, its checks included."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import clamor_ray as clamor

    disk_bytes = 2 * words.nbytes if with_disk else 0
    clamor.init(cache_bytes=int(CACHED * words.nbytes), cache_disk_bytes=disk_bytes)
    ref = clamor.put(words)
    where = NodeAffinitySchedulingStrategy(nodes[1], soft=False)
    reader = ray.remote(Reader).options(num_cpus=0, scheduling_strategy=where).remote(ref)
    for order in ("scan", "random"):
        for number in range(options.passes + 1):
            before = common.node_counters(nodes[1])
            if order == "scan":
                answer, expected = reader.scan.remote(), int(np.bitwise_xor.reduce(words))
            else:
                answer = reader.random.remote(number, options.touches)
                places = np.random.default_rng(number).integers(0, len(words), options.touches)
                expected = int(np.bitwise_xor.reduce(words[places]))
            seconds, found = ray.get(answer, timeout=TIMEOUT_S)
            common.verify("a pass", found, expected)
            after = common.node_counters(nodes[1])
            grown = {
                name: common.grown(before, after, name)
                for name in ("blocks_fetched", "disk_cache_reads", "disk_cache_writes")
            }
            emit(
                {
                    "order": order,
                    "with_disk": with_disk,
                    "number": number,
                    "seconds": seconds,
                    **grown,
                }
            )
    ray.kill(reader)
    clamor.shutdown(force=True)


def main() -> int:
    import ray

    import clamor_ray as clamor

    options = Options(**json.loads(sys.argv[1]))
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    emit({"trap": clamor.init().trap})
    clamor.shutdown()
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
    )
    words = np.random.default_rng(1).integers(0, 1 << 62, options.mib << 17)
    for with_disk in (False, True):
        note("with the disk" if with_disk else "without the disk")
        run(options, [node["NodeID"] for node in alive], words, with_disk=with_disk)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

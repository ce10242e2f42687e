"""What a page server carries: a whole array against one raw TCP stream, and single blocks.

wire_ratio        bytes per second of `clamor.prefetch(ref)` of an array homed on another node,
                  cold, against one raw TCP stream between two processes of as many bytes, in turn:
                  sendfile from a memfd on one side, recv into a buffer and pwrite into a memfd on
                  the other. Memory of both is touched before. The clock of the library includes
                  mapping the variable; the stream's begins when it is connected.
small_page_rate   single 4 KiB blocks, no two of them neighbours, prefetched in one call: blocks
                  per second of CPU time of the page server that serves them (user and system, all
                  of its threads, as the kernel's scheduler counts them). Beside it the same for
                  the page server that asks, and blocks per second of wall time.

The median of the repetitions counts. All bytes are checked after the clock.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common, stream
from bench.support.common import BLOCK_BYTES, emit, grown, note, now

TIMEOUT_S = 600
SPACING = 3  # one of so many blocks is asked for, never two neighbours


class Home:
    """On node b: puts arrays there."""

    def put(self, n_bytes: int, salt: int) -> list[Any]:
        """In a list, so that nobody opens it on the way."""
        import clamor_ray as clamor

        return [clamor.put(common.make_array(n_bytes, salt))]


def put_on_b(home: Any, n_bytes: int, salt: int) -> Any:
    import ray

    (ref,) = ray.get(home.put.remote(n_bytes, salt), timeout=TIMEOUT_S)
    return ref


def server_pids() -> dict[str, int]:
    """The page server's process of each node."""
    import clamor_ray as clamor

    return {node.node_id: node.info.pid for node in clamor.stats().nodes}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's living threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def check_whole(words: npt.NDArray[np.uint64], salt: int) -> None:
    step = 1 << 20
    for first in range(0, len(words), step):
        part = words[first : first + step]
        common.verify("prefetch", part, common.expected_words(first, len(part), salt))


def wire(nodes: common.TwoNodes, home: Any, n_bytes: int, number: int) -> dict[str, Any]:
    """The library and the raw stream, one after the other."""
    import clamor_ray as clamor

    out: dict[str, Any] = {"case": "wire", "repetition": number, "bytes": n_bytes}

    def ours() -> None:
        ref = put_on_b(home, n_bytes, 20 + number)
        pids = server_pids()
        common.warm_memory(n_bytes)
        before = common.node_counters(nodes.a)
        cpu = {name: cpu_s(pids[node]) for name, node in (("server", nodes.b), ("asker", nodes.a))}
        start = now()
        clamor.prefetch(ref)
        seconds = now() - start
        after = common.node_counters(nodes.a)
        out["bytes_per_s"] = n_bytes / seconds
        out["server_cpu_s"] = cpu_s(pids[nodes.b]) - cpu["server"]
        out["asker_cpu_s"] = cpu_s(pids[nodes.a]) - cpu["asker"]
        out["fetch_requests"] = grown(before, after, "fetch_requests")
        out["bytes_received"] = grown(before, after, "bytes_received")
        check_whole(ref.get(), 20 + number)
        clamor.free(ref)

    def raw() -> None:
        start = stream.start_here
        out["raw_bytes_per_s"] = stream.rate(start, start, "127.0.0.1", n_bytes >> 20)

    for side in (ours, raw) if number % 2 == 0 else (raw, ours):
        side()
    out["ratio"] = out["bytes_per_s"] / out["raw_bytes_per_s"]
    return out


def small_pages(nodes: common.TwoNodes, home: Any, n_blocks: int, number: int) -> dict[str, Any]:
    """Blocks by ones."""
    import clamor_ray as clamor

    salt = 40 + number
    rng = np.random.default_rng(number)
    ref = put_on_b(home, SPACING * n_blocks * BLOCK_BYTES, salt)
    words = ref.get().reshape(-1, BLOCK_BYTES // 8)
    chosen = SPACING * np.arange(n_blocks) + rng.integers(0, SPACING - 1, n_blocks)
    views = [words[block, :1] for block in chosen.tolist()]
    pids = server_pids()
    common.warm_memory(n_blocks * BLOCK_BYTES)
    before = common.node_counters(nodes.a)
    server, asker = cpu_s(pids[nodes.b]), cpu_s(pids[nodes.a])
    start = now()
    clamor.prefetch(views)
    seconds = now() - start
    server_s, asker_s = cpu_s(pids[nodes.b]) - server, cpu_s(pids[nodes.a]) - asker
    after = common.node_counters(nodes.a)
    del views
    for first in range(0, n_blocks, 1 << 14):
        blocks = chosen[first : first + (1 << 14)]
        indices = blocks[:, None] * (BLOCK_BYTES // 8) + np.arange(BLOCK_BYTES // 8)
        common.verify("small pages", words[blocks], common.expected_at(indices, salt))
    del words
    clamor.free(ref)
    fetched = grown(before, after, "blocks_fetched")
    return {
        "case": "small_pages",
        "repetition": number,
        "blocks": n_blocks,
        "blocks_fetched": fetched,
        "seconds": seconds,
        "server_cpu_s": server_s,
        "asker_cpu_s": asker_s,
        "per_server_core": n_blocks / server_s,
        "per_asker_core": n_blocks / asker_s,
        "per_second": n_blocks / seconds,
        "fetch_requests": grown(before, after, "fetch_requests"),
        "bytes_ratio": grown(before, after, "bytes_received") / (n_blocks * BLOCK_BYTES),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fetch", description=__doc__)
    parser.add_argument("--small", action="store_true", help="64 MiB and 5,000 blocks, once")
    parser.add_argument("--mib", type=int, help="size of the array (1024)")
    parser.add_argument("--blocks", type=int, help="single blocks (200,000)")
    parser.add_argument("--repetitions", type=int, help="of each (5)")
    options = parser.parse_args(arguments)
    n_bytes = (options.mib or (64 if options.small else 1024)) << 20
    n_blocks = options.blocks or (5000 if options.small else 200_000)
    repetitions = options.repetitions or (1 if options.small else 5)

    import clamor_ray as clamor

    note("touching memory")
    common.warm_memory(min(max(4 * n_bytes, 8 * n_blocks * BLOCK_BYTES), 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="fetch")
    wires, smalls = [], []
    with common.two_nodes(store_bytes=128 << 20) as nodes:
        environment["environment"]["trap"] = nodes.trap
        emit(environment)
        home = nodes.on_b(Home)
        first = put_on_b(home, 8 << 20, 1)
        clamor.prefetch(first)
        clamor.free(first)
        for number in range(repetitions):
            note(f"repetition {number + 1} of {repetitions}")
            wires.append(wire(nodes, home, n_bytes, number))
            emit(wires[-1])
            smalls.append(small_pages(nodes, home, n_blocks, number))
            emit(smalls[-1])
    emit(
        {
            "spread": {
                "wire_ratio": common.spread([run["ratio"] for run in wires]),
                "small_page_rate": common.spread([run["per_server_core"] for run in smalls]),
            }
        }
    )
    common.summary(
        {
            "wire_ratio": statistics.median(run["ratio"] for run in wires),
            "small_page_rate": statistics.median(run["per_server_core"] for run in smalls),
        }
    )
    return 0

"""The driver of `drain`, on the first host of its lab: puts, readers, writers, and the drain.

python -m bench.drivers.drain_driver OPTIONS_AS_JSON      prints its records as JSON lines
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.drivers.hot_driver import cpu_seconds
from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, note

WORDS = BLOCK_BYTES // 8
TIMEOUT_S = 600.0
WARM_S = 2.0
WRITTEN_SHARE = 8  # one block of so many is written, and the others are read
GIVER = 1  # by the order of hosts; the driver and the registry are on the first

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is drained, and who uses it meanwhile.

    Args:
        variables: of the drained node.
        variable_bytes: of each.
        readers, writers: on the hosts that are neither the driver's nor drained, in turn.
        read_pause_s, write_pause_s: of each of them, after each read or commit.
        undisturbed_s: how long they are measured before the drain.
    """

    variables: int
    variable_bytes: int
    readers: int
    writers: int
    read_pause_s: float
    write_pause_s: float
    undisturbed_s: float


class Home:
    """On the node that is drained."""

    def put(self, options: Options) -> list[Any]:
        import clamor_ray as clamor

        n_bytes = options.variable_bytes
        return [clamor.put(common.make_array(n_bytes, salt)) for salt in range(options.variables)]


class Reader:
    """Reads each block once, so that none of them is on its node before."""

    def ready(self, refs: list[Any]) -> int:
        """Everything that starts once has started."""
        self.arrays = [ref.get() for ref in refs]
        return sum(int(array[-WORDS] & 1) for array in self.arrays)

    def read(self, over: Path, seed: int, pause_s: float) -> Int64:
        """(begin, end) of each, monotonic ns.

        Raises:
            WrongData: A block is not what was put.
        """
        n_blocks = len(self.arrays[0]) // WORDS
        places = np.random.default_rng(seed).permutation(n_blocks * len(self.arrays))
        times: list[tuple[int, int]] = []
        for place in places.tolist():
            salt, block = divmod(place, n_blocks)
            if block % WRITTEN_SHARE == 0 or block == n_blocks - 1:
                continue
            if over.exists():
                return np.array(times, np.int64)
            array, word = self.arrays[salt], block * WORDS + seed % WORDS
            begin = time.monotonic_ns()
            got = array[word]
            times.append((begin, time.monotonic_ns()))
            if got != common.expected_words(word, 1, salt)[0]:
                raise common.WrongData(f"word {word} of variable {salt} is {got}")
            time.sleep(pause_s)
        raise RuntimeError("this reader has read every block: give more bytes, or a longer pause")


class Writer:
    """Commits of one block each. No two writers write the same one."""

    def ready(self, refs: list[Any]) -> int:
        self.refs = refs
        return len(refs)

    def write(
        self, over: Path, number: int, n_writers: int, pause_s: float
    ) -> tuple[Int64, dict[tuple[int, int], int]]:
        """(begin, written, end) of each, monotonic ns, and the last value of each word."""
        import clamor_ray as clamor

        rng = np.random.default_rng(1000 + number)
        n_mine = self.refs[0].get().nbytes // BLOCK_BYTES // WRITTEN_SHARE // n_writers
        times: list[tuple[int, int, int]] = []
        values: dict[tuple[int, int], int] = {}
        while not over.exists():
            at = int(rng.integers(0, len(self.refs)))
            block = (int(rng.integers(0, n_mine)) * n_writers + number) * WRITTEN_SHARE
            value = int(rng.integers(0, 1 << 62))
            change = clamor.update(self.refs[at])
            begin = time.monotonic_ns()
            change.begin()[block * WORDS] = value
            written = time.monotonic_ns()
            change.commit()
            times.append((begin, written, time.monotonic_ns()))
            values[at, block * WORDS] = value
            time.sleep(pause_s)
        return np.array(times, np.int64), values


def latencies(times: Int64) -> dict[str, float]:
    """Of (begin, end) in ns. A percentile is one that was measured."""
    took_ms = (times[:, 1] - times[:, 0]) / 1e6
    return {
        "p50_ms": common.percentile(took_ms, 50),
        "p99_ms": common.percentile(took_ms, 99),
        "p999_ms": common.percentile(took_ms, 99.9),
        "max_ms": float(took_ms.max()),
        "n": len(took_ms),
    }


def within(times: Int64, begin: int, end: int) -> Int64:
    """Those that were under way in some moment from begin to end."""
    chosen: Int64 = times[(times[:, -1] > begin) & (times[:, 0] < end)]
    return chosen


def longest(times: Int64, begin: int) -> list[list[float]]:
    """The five longest: (seconds after begin that it began, ms)."""
    took = times[:, 1] - times[:, 0]
    some = times[np.argsort(took)[-5:]]
    return [[round((a - begin) / 1e9, 3), round((b - a) / 1e6, 1)] for a, b in some.tolist()]


def check_written(refs: list[Any], values: dict[tuple[int, int], int]) -> None:
    """The newest versions have what was committed last.

    Raises:
        WrongData: One has not.
    """
    newest = [ref.at().get() for ref in refs]
    got = np.array([newest[at][word] for at, word in values], np.uint64)
    common.verify("commits", got, np.array(list(values.values()), np.uint64))


class Bench:
    """A session, its variables, and who uses them."""

    def __init__(self, options: Options, nodes: list[str]) -> None:
        import ray

        self.options, self.giver = options, nodes[GIVER]
        users = nodes[GIVER + 1 :]
        # A read is of one block: of a larger page the next ones would be here before they are read.
        one_block = {"env_vars": {"CLAMOR_PAGE_BYTES": str(BLOCK_BYTES)}}
        self.readers = [
            common.pinned(Reader, users[at % len(users)], runtime_env=one_block).remote()
            for at in range(options.readers)
        ]
        self.writers = [
            common.pinned(Writer, users[at % len(users)]).remote() for at in range(options.writers)
        ]
        note(f"putting {options.variables} times {options.variable_bytes >> 20} MiB")
        self.home = common.pinned(Home, self.giver).remote()
        self.refs = ray.get(self.home.put.remote(options), timeout=TIMEOUT_S)
        crowd = (*self.readers, *self.writers)
        ray.get([each.ready.remote(self.refs) for each in crowd], timeout=TIMEOUT_S)

    def run(self, over: Path) -> dict[str, Any]:
        import ray

        import clamor_ray as clamor

        options = self.options
        common.warm_memory(options.variables * options.variable_bytes)
        reads = [
            each.read.remote(over, seed, options.read_pause_s)
            for seed, each in enumerate(self.readers, 1)
        ]
        writes = [
            each.write.remote(over, number, options.writers, options.write_pause_s)
            for number, each in enumerate(self.writers)
        ]
        try:
            time.sleep(WARM_S)
            note(f"{options.undisturbed_s:g} s undisturbed")
            began = time.monotonic_ns()
            time.sleep(options.undisturbed_s)
            note("draining")
            busy, total = cpu_seconds()
            drained = time.monotonic_ns()
            result = clamor.drain(self.giver, timeout=TIMEOUT_S)
            ended = time.monotonic_ns()
            busy_end, total_end = cpu_seconds()
        finally:
            over.touch()
        read = np.concatenate(ray.get(reads, timeout=TIMEOUT_S))
        written = ray.get(writes, timeout=TIMEOUT_S)
        commits = np.concatenate([times for times, _ in written])
        check_written(self.refs, {key: value for _, of in written for key, value in of.items()})
        if result.moved != options.variables:
            raise RuntimeError(f"{result.moved} of {options.variables} variables were moved")
        parts = {"read": read, "commit": commits[:, 1:], "update": commits[:, [0, 2]]}
        return {
            "seconds": result.seconds,
            "bytes": result.bytes,
            "bytes_per_s": result.bytes / result.seconds,
            "cpu_busy": (busy_end - busy) / max(total_end - total, 1e-9),
            "before": {name: latencies(within(of, began, drained)) for name, of in parts.items()},
            "during": {name: latencies(within(of, drained, ended)) for name, of in parts.items()},
            "longest": {
                name: longest(within(of, drained, ended), drained) for name, of in parts.items()
            },
        }


def main(arguments: list[str]) -> int:
    import ray

    import clamor_ray as clamor

    options = Options(**json.loads(arguments[0]))
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        emit({"trap": clamor.init().trap})
        # In the order of the hosts' addresses, as the lab made them.
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
        )
        with tempfile.TemporaryDirectory(prefix="bench-drain-") as folder:
            emit(Bench(options, [node["NodeID"] for node in nodes]).run(Path(folder) / "over"))
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What churn leaves behind: memory, descriptors and threads while variables come and go.

Two nodes. Round after round: a variable is put, read by a task on the other node, changed in
place and read again; an actor on the other node puts one, of which the driver gathers rows; a
variable larger than a node's cache budget is scanned there, so that blocks are evicted; all are
freed. Every read is checked. Samples are taken between rounds, when the page servers have let go of
all variables and no process has memory of one: whatever is left is left behind.

growth_kib_per_minute  slope, by least squares, of the memory of the driver, the registry, the page
                  servers, their keepers and the actor: their private memory, and the memfds that
                  any of them holds, each once. Samples of the warm-up are left out. So are the
                  memfds of history: they have a budget of their own, and fill and empty by
                  segments; they are printed.
descriptors, threads  of the same processes: median of the last third of the samples - median of
                  the first third.

The peer is an actor that knows nothing of the library and is called as often: what its private
memory grows by, Ray's own part of a process grows by, and is taken off the slope of each process
with such a part (all but the keepers). Before the summary, a line has the slopes of all processes
as they are, and says whether each is more than noise (more than two standard errors). Worker
processes of tasks are Ray's to start and to end, and not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common, processes
from bench.support.common import BLOCK_BYTES, emit, note, now

WORDS_PER_BLOCK = BLOCK_BYTES // 8
ROW_WORDS = 32
CACHE_BYTES = 8 << 20
LARGE_BYTES = 3 * CACHE_BYTES
TIMEOUT_S = 300
SETTLE_S = 30.0
CALLS = 2  # of an actor in a round
LEAST_SAMPLES = 3  # a slope and its error need them
# Names of memfds.
OF_VARIABLES = ("clamor", "clamor-layer")
HISTORY = "clamor-history"
_M_MMAP_THRESHOLD = -3


def return_memory() -> None:
    """Has this process's malloc give large arrays back when they are freed.

    By itself it takes to keeping them, as large ones as it has seen: which of this benchmark's own
    arrays is the largest one just then would be most of what the samples differ by.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)


class Other:
    """On node b."""

    def __init__(self) -> None:
        return_memory()

    def pid(self) -> int:
        return os.getpid()

    def put(self, n_bytes: int, salt: int) -> list[Any]:
        import clamor_ray as clamor

        return [clamor.put(common.make_array(n_bytes, salt))]

    def scan(self, box: list[Any], salt: int) -> bool:
        """All of it, in order; it does not fit this node's cache."""
        words = box[0].get()
        step = 1 << 17
        for first in range(0, len(words), step):
            part = words[first : first + step]
            common.verify("scan", part, common.expected_words(first, len(part), salt))
        return True


class Plain:
    """On node b too, and knows nothing of the library: what any actor of Ray's grows by."""

    def __init__(self) -> None:
        return_memory()

    def pid(self) -> int:
        return os.getpid()

    def work(self, n_bytes: int) -> bool:
        return bool(common.make_array(n_bytes, 1).any())


def read(words: npt.NDArray[np.uint64], salt: int, changed: int, value: int) -> bool:
    """A task: every word, of which one was changed."""
    want = common.expected_words(0, len(words), salt)
    if changed >= 0:
        want[changed] = value
    common.verify("task", words, want)
    return True


class Churn:
    """The rounds."""

    def __init__(self, nodes: common.TwoNodes) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        import clamor_ray as clamor

        self.other = nodes.on_b(Other)
        strategy = NodeAffinitySchedulingStrategy(nodes.b, soft=False)
        self.read = clamor.remote(read).options(num_cpus=0, scheduling_strategy=strategy)
        self.plain = nodes.on_b(Plain)
        self.rng = np.random.default_rng(3)
        self.rounds = 0

    def size(self) -> int:
        """Of a variable: 64 KiB to 8 MiB, whole blocks."""
        return int(2 ** self.rng.uniform(16, 23)) // BLOCK_BYTES * BLOCK_BYTES

    def round(self) -> None:
        import ray

        import clamor_ray as clamor

        self.rounds += 1
        salt = self.rounds % 1000 + 1
        n_bytes = self.size()
        ref = clamor.put(common.make_array(n_bytes, salt))
        ray.get(self.read.remote(ref, salt, -1, 0), timeout=TIMEOUT_S)
        changed = int(self.rng.integers(0, n_bytes // 8))
        with clamor.update(ref) as words:
            words[changed] = self.rounds
        del words
        ray.get(self.read.remote(ref, salt, changed, self.rounds), timeout=TIMEOUT_S)
        clamor.free(ref)

        (theirs,) = ray.get(self.other.put.remote(self.size(), salt), timeout=TIMEOUT_S)
        rows = theirs.get().reshape(-1, ROW_WORDS)
        ids = self.rng.integers(0, len(rows), 200)
        got = clamor.gather(rows, ids)
        indices = ids[:, None] * ROW_WORDS + np.arange(ROW_WORDS)
        common.verify("gather", got, common.expected_at(indices, salt))
        del rows, got
        clamor.free(theirs)

        large = clamor.put(common.make_array(LARGE_BYTES, salt))
        ray.get(self.other.scan.remote([large], salt), timeout=TIMEOUT_S)
        clamor.free(large)

        for _ in range(CALLS):
            ray.get(self.plain.work.remote(n_bytes), timeout=TIMEOUT_S)


def settle(pids: dict[str, int]) -> None:
    """Returns when no page server has a variable any more, and nobody the memory of one."""
    import clamor_ray as clamor

    deadline = time.monotonic() + SETTLE_S
    while True:
        regions = [region for node in clamor.stats().nodes for region in node.regions]
        memfds = processes.memfd_bytes(list(pids.values()))
        if not regions and not any(name in memfds for name in OF_VARIABLES):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"what was freed is still there after {SETTLE_S:.0f} s: {regions[:3]}, {memfds}"
            )
        time.sleep(0.05)  # freeing is told to page servers in their own time


def sample(pids: dict[str, int], peer_pid: int, begin: float) -> dict[str, Any]:
    private = {name: processes.private_bytes(pid) for name, pid in pids.items()}
    memfds = processes.memfd_bytes(list(pids.values()))
    history = memfds.pop(HISTORY, 0)
    return {
        "seconds": now() - begin,
        "memory_bytes": sum(private.values()) + sum(memfds.values()),
        "private_bytes": private,
        "peer_bytes": processes.private_bytes(peer_pid),
        "memfds": memfds,
        "history_bytes": history,
        "descriptors": {name: processes.open_descriptors(pid) for name, pid in pids.items()},
        "threads": {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in pids.items()},
    }


def churn(
    work: Churn, pids: dict[str, int], peer_pid: int, seconds: float, every_s: float
) -> list[dict[str, Any]]:
    """Rounds for so long, or longer for enough samples; the first is at the end of the warm-up."""
    begin = now()
    due = min(120.0, seconds / 4)
    samples: list[dict[str, Any]] = []
    while now() - begin < seconds or len(samples) < LEAST_SAMPLES:
        work.round()
        if now() - begin >= due:
            settle(pids)
            samples.append({"rounds": work.rounds, **sample(pids, peer_pid, begin)})
            emit(samples[-1])
            due = max(due + every_s, now() - begin)
    return samples


# ------------------------------------------------------------------ figures


def slope(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least squares: units per second, and the standard error of that.

    Example:
        >>> slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
        (2.0, 0.0)
    """
    x = np.asarray(seconds, float) - statistics.fmean(seconds)
    y = np.asarray(values, float) - statistics.fmean(values)
    spread = float(x @ x)
    if len(x) < 3 or spread == 0:
        raise ValueError(f"a slope and its error need three samples at least, not {len(x)}")
    rise = float(x @ y) / spread
    rest = y - rise * x
    return rise, float(np.sqrt(rest @ rest / (len(x) - 2) / spread))


def growth(values: Sequence[float]) -> float:
    """Median of the last third - median of the first third.

    Example:
        >>> growth([4, 9, 4, 4, 4, 4, 5, 5, 5])
        1
    """
    n = max(1, len(values) // 3)
    return statistics.median(values[-n:]) - statistics.median(values[:n])


def per_minute(samples: list[dict[str, Any]], values: Sequence[float]) -> dict[str, Any]:
    """The slope of some memory, with its error and what that says."""
    rise, error = slope([each["seconds"] for each in samples], values)
    return {
        "kib_per_minute": rise * 60 / 1024,
        "standard_error": error * 60 / 1024,
        "says": "growth" if rise > 2 * error else "none",
    }


def beyond_ray(one: dict[str, Any]) -> float:
    """Bytes of a sample, less what the peer's process has for each process with Ray in it."""
    with_ray = [name for name in one["private_bytes"] if not name.startswith("keeper")]
    return float(one["memory_bytes"] - len(with_ray) * one["peer_bytes"])


def figures(samples: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """The line before the summary, and the summary."""
    names = list(samples[0]["threads"])
    memory = per_minute(samples, [beyond_ray(each) for each in samples])
    detail: dict[str, Any] = {
        "memory": memory,
        "with_ray": per_minute(samples, [each["memory_bytes"] for each in samples]),
        "peer": per_minute(samples, [each["peer_bytes"] for each in samples]),
        "memory_of": {
            name: per_minute(samples, [each["private_bytes"][name] for each in samples])
            for name in names
        },
    }
    summary = {"growth_kib_per_minute": memory["kib_per_minute"]}
    for what in ("descriptors", "threads"):
        summary[what] = growth([sum(each[what].values()) for each in samples])
        detail[what] = {name: growth([each[what][name] for each in samples]) for name in names}
    return detail, summary


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--small", action="store_true", help="4 s")
    parser.add_argument("--seconds", type=float, help="of churn, its warm-up included (600)")
    parser.add_argument("--every", type=float, help="seconds between samples (10)")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (4.0 if options.small else 600.0)
    every_s = options.every or (0.5 if options.small else 10.0)

    import ray

    import clamor_ray as clamor

    return_memory()
    environment = common.environment(library=clamor.__version__, bench="idle")
    os.environ["CLAMOR_CACHE_BYTES"] = str(CACHE_BYTES)
    with common.two_nodes(store_bytes=256 << 20) as nodes:
        environment["environment"].update(trap=nodes.trap, cache_bytes=CACHE_BYTES)
        emit(environment)
        work = Churn(nodes)
        work.round()
        pids = processes.session_pids()
        pids["actor"] = ray.get(work.other.pid.remote(), timeout=TIMEOUT_S)
        peer_pid = ray.get(work.plain.pid.remote(), timeout=TIMEOUT_S)
        note(f"{seconds:.0f} s of churn")
        samples = churn(work, pids, peer_pid, seconds, every_s)
        engines = [dict(node.engine) for node in clamor.stats().nodes]
        detail, summary = figures(samples)
        emit({"rounds": work.rounds, "growth": detail})
        emit({"engines": engines})
        if not sum(engine["evicted_blocks"] for engine in engines):
            raise SystemExit("bench: nothing was evicted: the churn left evictions out")
    common.summary(summary)
    return 0

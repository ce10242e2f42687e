"""The driver of `store`: one opening of a store, in a Ray cluster of its own.

python -m bench.drivers.store_driver CASE OPTIONS_AS_JSON      its last line is a JSON object

A case is a function of this file. `until_killed` waits at its end, until it is killed -9 with all
that it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common, disk, processes
from bench.support.common import BLOCK_BYTES, emit, note, now

SESSION = "bench"
VALUE = "value"
# A variable of a log: its layers are below what a checkpoint waits for.
LOG_BLOCKS, LOG_COMMITS = 1 << 16, 4
VALUE_WORDS = 1 << 17  # 1 MiB
WORDS_PER_BLOCK = BLOCK_BYTES // 8
OBJECT_STORE_BYTES = 256 << 20
TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one driver."""

    directory: str  # of the disk that is measured; the store is in it
    sizes: tuple[int, ...] = ()  # layers', in bytes
    put_bytes: int = 0
    repetitions: int = 1
    writers: int = 8
    seconds: float = 5.0
    log_blocks: int = 0
    rows: int = 0
    row_bytes: int = 256


# ------------------------------------------------------------------ layers


def _beside_dd(work: Callable[[], object], directory: Path, n_bytes: int) -> dict[str, float]:
    """Bytes per second of both, one after the other."""
    disk.settle()
    dd_rate = disk.dd_rate(directory, n_bytes)
    disk.settle()
    began = now()
    work()
    rate = n_bytes / (now() - began)
    return {"bytes_per_s": rate, "dd_bytes_per_s": dd_rate, "share": rate / dd_rate}


def _commits(options: Options, n_bytes: int) -> dict[str, Any]:
    """Of layers that have every block of a variable."""
    import clamor_ray as clamor

    note(f"commits of {n_bytes >> 20} MiB")
    ref = clamor.put(common.make_array(n_bytes, 1))
    records = []
    for salt in range(2, 2 + options.repetitions):
        transaction = clamor.update(ref)
        words = transaction.begin()
        np.copyto(words, common.make_array(n_bytes, salt))
        records.append(_beside_dd(transaction.commit, Path(options.directory), n_bytes))
        del words
        common.verify("a commit", ref._latest().get()[::512], _every_512th(n_bytes, salt))
    clamor.free(ref)
    return {
        "bytes": n_bytes,
        "repetitions": records,
        "share": statistics.median(each["share"] for each in records),
    }


def layers(options: Options) -> dict[str, Any]:
    """Commits of each size, and a large put."""
    import clamor_ray as clamor

    commits = [_commits(options, n_bytes) for n_bytes in options.sizes]
    note(f"put of {options.put_bytes >> 20} MiB")
    array = common.make_array(options.put_bytes, 9)
    kept: list[Any] = []
    record = _beside_dd(
        lambda: kept.append(clamor.put(array)), Path(options.directory), options.put_bytes
    )
    common.verify("a put", kept[0].get()[::512], _every_512th(options.put_bytes, 9))
    return {"commits": commits, "put": {"bytes": options.put_bytes, **record}}


def _every_512th(n_bytes: int, salt: int) -> npt.NDArray[np.uint64]:
    return common.expected_at(np.arange(0, n_bytes // 8, 512), salt)


# ------------------------------------------------------------------ small commits


class Writer:
    """One of several processes that commit at the same time, each to a variable of its own."""

    def __init__(self) -> None:
        import clamor_ray as clamor

        self.ref = clamor.put(np.zeros(64 * WORDS_PER_BLOCK, np.uint64))

    def commit(self, seconds: float) -> tuple[int, list[float]]:
        """How many commits of one block it made, and the milliseconds of each."""
        import clamor_ray as clamor

        times = []
        ends = now() + seconds
        while now() < ends:
            began = now()
            with clamor.update(self.ref) as words:
                words[len(times) % 64 * WORDS_PER_BLOCK] += np.uint64(1)
            times.append((now() - began) * 1e3)
        total = int(self.ref._latest().get().sum())
        return total, times


def small(options: Options) -> dict[str, Any]:
    """Commits of one block by several writers, and syncs of one block by one thread."""
    import ray

    directory = Path(options.directory)
    writers = [ray.remote(Writer).options(num_cpus=0).remote() for _ in range(options.writers)]

    def run(seconds: float) -> list[Any]:
        asked = [each.commit.remote(seconds) for each in writers]
        return list(ray.get(asked, timeout=TIMEOUT_S + seconds))

    warm = [total for total, _ in run(1.0)]
    disk.settle()
    syncs = [disk.sync_rate(directory)]
    answers = run(options.seconds)
    syncs.append(disk.sync_rate(directory))
    times = [each for _, made in answers for each in made]
    common.verify("commits", sum(total for total, _ in answers) - sum(warm), len(times))
    rate = len(times) / options.seconds
    return {
        "writers": options.writers,
        "commits_per_s": rate,
        "syncs_per_s": syncs,
        "rate": rate / statistics.mean(syncs),
        "commit_ms": {q: common.percentile(times, p) for q, p in (("p50", 50), ("p99", 99))},
    }


# ------------------------------------------------------------------ openings


def plain(options: Options) -> dict[str, Any]:
    """A session without a store, and a first value."""
    import clamor_ray as clamor

    began = now()
    clamor.init(session=SESSION, lifetime="detached")
    clamor.put(common.make_array(8 * VALUE_WORDS, 3), name=VALUE)
    got = int(clamor.open(VALUE).get()[5])
    seconds = now() - began
    common.verify("a value", got, common.expected_words(5, 1, 3)[0])
    return {"seconds": seconds}


def fill(options: Options) -> dict[str, Any]:
    """What `opening` opens."""
    import clamor_ray as clamor

    clamor.put(common.make_array(options.put_bytes or 8 * VALUE_WORDS, 3), name=VALUE)
    for name, n_blocks in _logs(options):
        clamor.put(np.zeros(n_blocks * WORDS_PER_BLOCK, np.uint64), name=name)
    return {}


def _logs(options: Options) -> Iterator[tuple[str, int]]:
    """Names and blocks of the variables whose commits are redone."""
    for first in range(0, options.log_blocks, LOG_BLOCKS):
        yield f"log {first}", min(LOG_BLOCKS, options.log_blocks - first)


def opening(options: Options) -> dict[str, Any]:
    """A store that there is, and a first value."""
    import clamor_ray as clamor

    began = now()
    _init(options)
    got = int(clamor.open(VALUE).get()[5])
    seconds = now() - began
    common.verify("a value", got, common.expected_words(5, 1, 3)[0])
    for name, n_blocks in _logs(options):
        firsts = clamor.open(name).get()[::WORDS_PER_BLOCK]
        common.verify(name, firsts, np.arange(n_blocks, dtype=np.uint64) + 1)
    return {"seconds": seconds}


def until_killed(options: Options) -> dict[str, Any]:
    """Commits a log of so many blocks, says so, and waits."""
    import clamor_ray as clamor

    for name, n_blocks in _logs(options):
        ref = clamor.open(name)
        for first in range(LOG_COMMITS):
            with clamor.update(ref) as words:
                # Scattered ones: each is a run of its own.
                numbers = np.arange(first, n_blocks, LOG_COMMITS)
                words[numbers * WORDS_PER_BLOCK] = numbers + 1
    emit({"pids": sorted(set(processes.session_pids().values()))})
    threading.Event().wait(TIMEOUT_S)
    raise SystemExit("bench: nobody has killed it")


# ------------------------------------------------------------------ rows


class Ours:
    """A variable of a store, as a peer: see `bench.peers.row_stores`."""

    def put(self, rows: npt.NDArray[np.uint64]) -> None:
        """All of them, once."""
        import clamor_ray as clamor

        self._ref = clamor.put(rows)
        self._rows = np.asarray(self._ref.get())

    def row(self, number: int) -> npt.NDArray[np.uint64]:
        """A copy of one."""
        return np.array(self._rows[number])

    def rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Copies of several."""
        return np.asarray(self._rows[numbers])

    def update(self, numbers: npt.NDArray[np.int64], rows: npt.NDArray[np.uint64]) -> None:
        """One commit."""
        import clamor_ray as clamor

        with clamor.update(self._ref) as array:
            array[numbers] = rows

    def read_anew(self) -> None:
        """Readers see what was committed."""
        self._rows = np.asarray(self._ref._latest().get())

    def close(self) -> None:
        """Frees it."""
        import clamor_ray as clamor

        del self._rows
        clamor.free(self._ref)


# ------------------------------------------------------------------ all of it


def _init(options: Options) -> None:
    import clamor_ray as clamor

    clamor.init(store=str(Path(options.directory) / "store"), session=SESSION)


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    import ray

    import clamor_ray as clamor

    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(common.ROOT), os.environ.get("PYTHONPATH", "")])
    )
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="error",
    )
    try:
        yield
        clamor.shutdown(session=SESSION)
    finally:
        ray.shutdown()


def rows(options: Options) -> dict[str, Any]:
    """The same of a variable as of the peers."""
    from bench.support import row_times

    return row_times.measure(Ours(), options.rows, options.row_bytes)


CASES = (layers, small, plain, fill, opening, until_killed, rows)


def main() -> int:
    name, given = sys.argv[1:]
    options = Options(**json.loads(given))
    (case,) = (each for each in CASES if each.__name__ == name)
    common.keep_stdout()
    with _cluster():
        if case not in (plain, opening):
            _init(options)
        emit(case(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

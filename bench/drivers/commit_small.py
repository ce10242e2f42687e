"""Commits of one block, against calls of an actor method that does nothing."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, now, percentile

WORDS_PER_BLOCK = BLOCK_BYTES // 8
BATCH = 10
TIMEOUT_S = 600


class Peer:
    """The other side of a small commit, and the process that holds what is homed elsewhere."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def nothing(self) -> None:
        """What a call costs."""

    def put(self, n_bytes: int, salt: int) -> list[Any]:
        """A variable of this node; in a list, so that nobody resolves it."""
        import clamor_ray as clamor

        self._kept.append(clamor.put(common.make_array(n_bytes, salt)))
        return self._kept[-1:]

    def words(self, box: list[Any], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The newest content at some places."""
        ref = box[0]
        ref.refresh()
        words: npt.NDArray[np.uint64] = ref.get()[indices]
        return words


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(seconds, 50) * 1e3,
        "p99": percentile(seconds, 99) * 1e3,
        "mean": statistics.fmean(seconds) * 1e3,
        "n": len(seconds),
    }


def small_commits(
    case: str, nodes: common.TwoNodes, ref: Any, salt: int, samples: int, warm_up: int
) -> dict[str, Any]:
    """Commits of one block and calls of nothing, in turn."""
    import ray

    import clamor_ray as clamor

    peer = common.pinned(Peer, nodes.a).remote()
    n_blocks = len(ref.get()) // WORDS_PER_BLOCK
    changed: dict[int, int] = {}
    rng = np.random.default_rng(salt)
    took: dict[str, list[float]] = {"call": [], "begin": [], "write": [], "commit": [], "all": []}

    def call() -> None:
        start = now()
        ray.get(peer.nothing.remote())
        took["call"].append(now() - start)

    def update() -> None:
        index = int(rng.integers(0, n_blocks)) * WORDS_PER_BLOCK
        value = int(rng.integers(0, 1 << 62))
        start = now()
        with clamor.update(ref) as words:
            begun = now()
            words[index] = value
            written = now()
        end = now()
        del words  # its lease ends outside of the clock, and before the next one begins
        changed[index] = value
        took["begin"].append(begun - start)
        took["write"].append(written - begun)
        took["commit"].append(end - written)
        took["all"].append(end - start)

    first_version = ref.version
    for number in range(warm_up + samples):
        if number == warm_up:
            for times in took.values():
                times.clear()
        for step in (call, update) if (number // BATCH) % 2 else (update, call):
            for _ in range(BATCH if number % BATCH == 0 else 0):
                step()
    n_commits = -(-(warm_up + samples) // BATCH) * BATCH
    if ref.version != first_version + n_commits:
        raise common.WrongData(f"version {ref.version} after {n_commits} commits")
    check_words(case, nodes, ref, salt, changed)
    ray.kill(peer)
    ratio = {
        name: percentile(took["commit"], q) / percentile(took["call"], q)
        for name, q in (("p50", 50), ("p99", 99))
    }
    return {
        "case": "small_commit",
        "home": case,
        "commit_ms": milliseconds(took["commit"]),
        "call_ms": milliseconds(took["call"]),
        "ratio": ratio,
        "update_ms": milliseconds(took["all"]),
        "begin_ms": milliseconds(took["begin"]),
        "write_ms": milliseconds(took["write"]),
    }


def check_words(
    case: str, nodes: common.TwoNodes, ref: Any, salt: int, changed: dict[int, int]
) -> None:
    """What this node and the other one read now, changed or not."""
    import ray

    here = ref.get()
    rng = np.random.default_rng(salt)
    others = rng.integers(0, len(here) // WORDS_PER_BLOCK, 100) * WORDS_PER_BLOCK + 1
    indices = np.concatenate([np.array(sorted(changed), np.int64), others])
    want = np.array(
        [changed.get(i, int(common.expected_words(i, 1, salt)[0])) for i in indices.tolist()],
        np.uint64,
    )
    common.verify(f"{case}, read here", here[indices], want)
    reader = nodes.on_b(Peer)
    common.verify(
        f"{case}, read on the other node",
        ray.get(reader.words.remote([ref], indices), timeout=TIMEOUT_S),
        want,
    )
    ray.kill(reader)

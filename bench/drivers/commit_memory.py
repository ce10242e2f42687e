"""Memory around commits: of building in place, and of very many commits of one block.

Each runs in a driver of its own, over a cluster of its own. For what is counted as memory see
`support.processes`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import common, processes
from bench.support.common import BLOCK_BYTES, emit, now
from clamor_ray.actors.process.journal_watcher import RESERVE

WORDS_PER_BLOCK = BLOCK_BYTES // 8
CHUNK_WORDS = 1 << 20
CLUSTER: dict[str, Any] = {
    "address": "local",
    "num_cpus": 2,
    "object_store_memory": 128 << 20,
    "logging_level": "error",
    "include_dashboard": False,
}


def build_in_place(n_bytes: int) -> dict[str, Any]:
    """In a fresh driver of a cluster of its own."""
    import ray

    import clamor_ray as clamor

    ray.init(**CLUSTER)
    try:
        clamor.init()
        clamor.free(clamor.put(np.zeros(1 << 20)))  # has everything started that starts once
        common.expected_words(0, CHUNK_WORDS, 0)
        pids = processes.session_pids()
        n_words = n_bytes // 8
        with processes.peak_memory(list(pids.values())) as peak:
            with clamor.build(n_bytes + (1 << 20)) as region:
                words = region.empty(n_words, np.uint64)
                for first in range(0, n_words, CHUNK_WORDS):
                    n = min(CHUNK_WORDS, n_words - first)
                    words[first : first + n] = common.expected_words(first, n, 7)
                ref = region.publish(words)
            del words
            held = processes.memory_bytes(list(pids.values()))
        got = ref.get()
        for first in range(0, n_words, CHUNK_WORDS):
            part = got[first : first + CHUNK_WORDS]
            common.verify("built", part, common.expected_words(first, len(part), 7))
        del got
        return {
            "case": "build_in_place",
            "bytes": n_bytes,
            "processes": sorted(pids),
            "start_bytes": peak.start_bytes,
            "peak_bytes": peak.peak_bytes,
            "held_bytes": held,
            "samples": peak.samples,
            "ratio": (peak.peak_bytes - peak.start_bytes) / n_bytes,
        }
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()


def holdings(pids: dict[str, int], journal: Path) -> dict[str, Any]:
    return {
        "rss_bytes": {name: processes.resident_bytes(pid) for name, pid in pids.items()},
        "descriptors": {name: processes.open_descriptors(pid) for name, pid in pids.items()},
        "memory_bytes": processes.memory_bytes(list(pids.values())),
        "journal_bytes": sum(
            path.stat().st_size for path in journal.iterdir() if path.name != RESERVE
        ),
    }


def long_run(n_commits: int) -> dict[str, float]:
    """What many commits of one block leave behind."""
    import ray

    import clamor_ray as clamor
    from clamor_ray.actors.process.journals import journal_directory

    first = min(2000, n_commits // 2)
    ray.init(**CLUSTER)
    try:
        session = clamor.init()
        emit(common.environment(library=clamor.__version__, bench="commit", trap=session.trap))
        journal = journal_directory(session.scope)
        pids = processes.session_pids()
        ref = clamor.put(common.make_array(16 << 20, 5))
        n_blocks = len(ref.get()) // WORDS_PER_BLOCK
        before: dict[str, Any] = {}
        start = now()
        for number in range(1, n_commits + 1):
            with clamor.update(ref) as words:
                words[(number % n_blocks) * WORDS_PER_BLOCK] = number
            del words
            if number in (first, n_commits) or number % 10_000 == 0:
                time.sleep(1.0)  # homes are told and logs are trimmed within a tick or two
                state = holdings(pids, journal)
                emit({"commits": number, "seconds": now() - start, **state})
                before = before or state
        if ref.version != n_commits:
            raise common.WrongData(f"version {ref.version} after {n_commits} commits")
        growth = {
            f"{name}_{what}_growth": float(state[kind][name] - before[kind][name])
            for what, kind in (("rss_bytes", "rss_bytes"), ("descriptors", "descriptors"))
            for name in pids
        }
        for what in ("memory_bytes", "journal_bytes"):
            growth[f"{what}_growth"] = float(state[what] - before[what])
        return {"commits": float(n_commits), **growth}
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()

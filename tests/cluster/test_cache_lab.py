"""The cache's settings on a cluster of their own: what init takes, refuses, and hands to nodes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects.memory import memory_bytes
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.troubles import small_disk

pytestmark = pytest.mark.lab

ANSWER_S = 90.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    clamor.shutdown()


def test_more_than_the_node_has_is_refused(lab: LocalCluster) -> None:
    has = memory_bytes()
    assert has is not None
    with pytest.raises(errors.CacheBudgetError) as caught:
        clamor.init(cache_bytes=has + 4096)
    for part in (lab.node_ids[0], str(has), str(has + 4096)):
        assert part in str(caught.value)
    with pytest.raises(errors.NotInitializedError):
        clamor.stats()
    with pytest.warns(errors.ClamorWarning, match="Nothing is left for variables and heaps"):
        clamor.init(cache_bytes=has)  # and the next attempt is one of its own
    assert clamor.stats().cache_bytes == has


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_bytes": 4096},
        {"cache_policy": "oldest"},
        {"replication": "yes"},
        {"page_bytes": 4097},
    ],
    ids=str,
)
def test_nonsense_starts_nothing(lab: LocalCluster, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name} is "):
        clamor.init(**settings)
    with pytest.raises(errors.NotInitializedError):
        clamor.stats()


def test_settings_are_the_sessions(lab: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAMOR_CACHE_BYTES", "1GiB")
    attached = clamor.init(cache_bytes="64MiB", cache_policy="lru", page_bytes=8192)
    assert clamor.init() == attached
    assert clamor.init(cache_bytes=64 * MIB, page_bytes="8KiB") == attached
    with pytest.raises(ValueError, match=re.escape("cache_policy='fifo', and this session began")):
        clamor.init(cache_policy="fifo")
    assert [node.cache_bytes for node in clamor.stats().nodes] == [64 * MIB]


@clamor.remote(num_cpus=0, resources={node_resource(1): 0.001})
def touch(array: Any, places: Any) -> int:
    return int(np.asarray(array)[places].sum())  # by faults: a plain array does not gather


def test_every_node_gets_them(lab: LocalCluster) -> None:
    import ray

    clamor.init(cache_bytes="32MiB", cache_policy="fifo", replication="off", page_bytes="8KiB")
    ref = clamor.put(np.arange(4 * MIB))
    places = np.arange(0, 4 * MIB, MIB) + 5
    assert ray.get(touch.remote(ref, places), timeout=ANSWER_S) == places.sum()
    stats = clamor.stats()
    assert [node.cache_bytes for node in stats.nodes] == [32 * MIB] * 2
    there = stats.region(ref)[lab.node_ids[1]]
    # Two blocks for each touch, and whatever the stream took: pages of 8 KiB, and no larger ones.
    assert 8 <= there.fetched_blocks <= 8 + 2
    assert not stats.thrashing


def test_by_default_a_quarter(lab: LocalCluster) -> None:
    clamor.init()
    has = memory_bytes()
    assert has is not None
    assert clamor.stats().cache_bytes == has // 4


def shared_memory_bytes(*pids: int) -> int:
    """What the memory that these processes share takes; other tests run beside this one."""
    files = {}
    for fd in [fd for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.readlink(fd).startswith("/memfd:"):
                found = os.stat(fd)
                files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def test_reading_what_was_never_written_is_bounded(lab: LocalCluster) -> None:
    budget_bytes = 32 * MIB
    clamor.init(cache_bytes=budget_bytes)
    ref = clamor.zeros(512 * MIB, np.uint8)
    pids = (os.getpid(), lab.page_server_pid(0))
    before_bytes = shared_memory_bytes(*pids)
    assert ref.get().max() == 0
    assert shared_memory_bytes(*pids) - before_bytes < 256 * MIB  # the window of SIGSEGV is apart
    assert clamor.stats().cached_bytes <= budget_bytes * 5 // 4
    with clamor.update(ref) as array:
        array[300 * MIB] = 7
    assert ref.get().max() == 7
    assert shared_memory_bytes(*pids) > before_bytes


def total(ref: clamor.GlobalRef[Any], n_times: int) -> int:
    array = np.asarray(ref.get())
    return sum(int(np.bitwise_xor.reduce(array)) for _ in range(n_times))


def test_what_was_evicted_may_come_from_disk(lab: LocalCluster) -> None:
    """Whether it does, the engine measures: what is read is the same."""
    import ray

    clamor.init(cache_bytes="8MiB", cache_disk_bytes="64MiB")
    words = np.random.default_rng(3).integers(0, 1 << 60, 4 * MIB)
    ref = clamor.put(words)
    there = {node_resource(1): 0.01}
    many = ray.remote(total).options(resources=there, num_cpus=0)
    once = int(np.bitwise_xor.reduce(words))
    assert ray.get(many.remote(ref, 4), timeout=ANSWER_S) == 4 * once
    node = next(node for node in clamor.stats().nodes if node.node_id == lab.node_ids[1])
    assert node.engine.disk_cache_writes > 0
    assert 0 < node.engine.disk_cached_bytes <= 64 * MIB
    with clamor.update(ref) as array:
        array[::100_000] += 1
    changed = int(np.bitwise_xor.reduce(ref.at().get()))
    assert changed != once
    assert ray.get(many.remote(ref.at(), 3), timeout=ANSWER_S) == 3 * changed


def test_a_cache_on_a_disk_that_is_none(
    lab: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 100 * MIB):
        monkeypatch.setenv("CLAMOR_SPILL_DIR", str(tmp_path / "disk"))
        with pytest.raises(errors.ServerUnavailableError) as caught:
            clamor.init(cache_disk_bytes="64MiB")
        clamor.shutdown()
    said = f"{caught.value} {caught.value.hint}"
    assert "is in memory, and no disk" in said
    assert "CLAMOR_SPILL_DIR" in said
    assert "cache_disk_bytes" in said

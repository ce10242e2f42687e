"""Variables on disk: what is larger than a node's memory, and nodes and servers that go."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray._tasks.task_context import recording
from tests.cluster.test_moves_lab import on
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.memory import memory_group
from tests.support.lab.troubles import server_pid

pytestmark = pytest.mark.lab

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB  # beyond what the node's processes have
N = 4 * LIMIT_BYTES // 8


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    require_lab("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLAMOR_HISTORY_BYTES", "1MiB")  # old blocks would take memory
        patch.setenv("CLAMOR_WRITE_BYTES", "16MiB")
        patch.setenv("CLAMOR_CACHE_BYTES", "16MiB")
        with local_cluster(3) as lab:
            clamor.init()
            yield lab


def on_disk() -> Counter[str]:
    """Bytes of each node."""
    return Counter({node.node_id: node.engine.disk_bytes for node in clamor.stats().nodes})


def whole(table: Any, step: int = 1 << 20) -> int:
    return sum(int(table[at : at + step].sum()) for at in range(0, len(table), step))


def put_and_update() -> tuple[int, int]:
    """On a node that has a quarter of the memory that it takes."""
    ref = clamor.zeros(N, np.int64, spill=True)
    for add in (1, 2):
        change = clamor.update(ref)
        with change as table:
            for rows in change.chunks():
                table[rows] += add
    return whole(ref.get()), ref.version


def build_sorted() -> tuple[bool, int]:
    with clamor.build(8 * N + MIB, spill=True) as region:
        table = region.empty(N, np.int64)
        rng = np.random.default_rng(0)
        for at in range(0, N, 1 << 20):
            table[at : at + (1 << 20)] = rng.integers(0, 1 << 60, min(1 << 20, N - at))
        table.sort()
        ref = region.publish(table)
    table, last, is_sorted = ref.get(), -1, True
    for at in range(0, N, 1 << 20):
        part = table[at : at + (1 << 20)]
        is_sorted &= bool((np.diff(part) >= 0).all()) and part[0] >= last
        last = part[-1]
    return is_sorted, len(table)


def lacking() -> int:
    """Blocks that were read, and that a read set does not have."""
    ref = clamor.zeros(N, np.int64, spill=True)
    with recording(None) as context:
        whole(ref.get())
    (read,) = context.reads()
    return 0 if read.blocks is None else N * 8 // 4096 - len(BitMap.deserialize(read.blocks))


def change(ref: Any, where: Any, value: int) -> None:
    """Nothing of it stays mapped."""
    with clamor.update(ref) as table:
        table[where] = value


def warm() -> int:
    return int(clamor.zeros(N // 100, np.int64, spill=True).get()[5])


def test_four_times_a_nodes_memory(three: LocalCluster) -> None:
    on(1, warm)
    before = {pid: Path(f"/proc/{pid}/stat").exists() for pid in three.processes(1)}
    with memory_group("spill") as group:
        group.add(three.processes(1))
        group.leave(LIMIT_BYTES)
        # Little memory is slow, and slower where others use the disk.
        assert on(1, put_and_update, timeout_s=ANSWER_S) == (3 * N, 2)
        assert on(1, build_sorted, timeout_s=ANSWER_S) == (True, N)
        assert on(1, lacking, timeout_s=ANSWER_S) <= 0
    assert {pid: Path(f"/proc/{pid}/stat").exists() for pid in before} == before  # nobody is killed


@pytest.mark.parametrize("home", [None, "spread"])
def test_it_is_as_any_other(three: LocalCluster, home: Any) -> None:
    content = np.arange(3_000_000)
    until(lambda: not on_disk().total())  # of the tests before
    before = on_disk()
    ref = clamor.put(content, home=home, spill=True)
    grown = [on_disk()[node] - before[node] for node in three.node_ids]
    assert sum(grown) >= content.nbytes
    assert all(grown) if home else not any(grown[1:])
    old = ref.get()
    change(ref, np.s_[::100_000], -1)
    content[::100_000] = -1
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), content)
    assert np.array_equal(old, np.arange(len(content)))
    rows = np.random.default_rng(0).integers(0, len(content), 1000)
    assert np.array_equal(on(2, lambda ref: ref.get()[rows], ref), content[rows])
    clamor.add_at(ref, rows, 2)
    np.add.at(content, rows, 2)
    assert np.array_equal(ref.get(), content)
    del old
    clamor.free(ref)
    until(lambda: on_disk().total() <= before.total())


def test_a_home_that_moves_stays_on_disk(three: LocalCluster) -> None:
    content = np.arange(2_000_000)

    def make() -> Any:
        return clamor.put(np.arange(2_000_000), spill=True, name="moved")

    on(2, make)
    ref = clamor.open("moved")
    memory = {node.node_id: node.engine.home_bytes for node in clamor.stats().nodes}
    clamor.drain(three.node_ids[2])
    assert on_disk()[three.node_ids[2]] == 0
    assert sum(on_disk().values()) >= content.nbytes
    assert all(
        node.engine.home_bytes <= memory.get(node.node_id, 0) + MIB for node in clamor.stats().nodes
    )
    assert np.array_equal(ref.get(), content)
    clamor.cancel_drain(three.node_ids[2])
    clamor.free(ref)


def test_a_server_that_is_killed_finds_it_again(three: LocalCluster) -> None:
    content = np.arange(2_000_000)
    ref = clamor.put(content, spill=True)
    change(ref, np.s_[5:1_000_000], 7)
    content[5:1_000_000] = 7
    os.kill(server_pid(three, 0), signal.SIGKILL)
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), content)
    change(ref, 3, 1)
    assert int(on(1, lambda ref: ref.get()[3], ref)) == 1
    clamor.free(ref)


def test_redundancy_on_disk(three: LocalCluster) -> None:
    content = np.arange(1_500_000)
    ref = clamor.put(content, redundancy="raid5", spill=True)
    change(ref, np.s_[100:1_000_000], 2)
    content[100:1_000_000] = 2
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), content)
    assert clamor.stats().degraded == 0
    clamor.free(ref)

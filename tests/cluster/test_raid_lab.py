"""Variables with redundancy: nodes are lost, and every byte of every version is read after."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects import block_sets
from clamor_ray._session import process_sessions
from tests.cluster.test_lost_lab import loss_of
from tests.cluster.test_moves_lab import on
from tests.cluster.test_timeline_lab import trace_of
from tests.conftest import until
from tests.library.test_spans import rows_of
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.pieces import homes_of_pieces, lost_with
from tests.support.processes import stop

pytestmark = [
    pytest.mark.lab,
    pytest.mark.filterwarnings("default::clamor_ray.errors.LostBlocksWarning"),
]

N = 2_500_000  # of 8 bytes: 20 MB, pieces of 2 MiB
BLOCK_ROWS = 512  # of a block; block 0 has what describes the array
PIECE_BLOCKS = 512
AT = (*range(16), 40, 275, 440)  # blocks of a piece; who opens a variable may have the first 16
REPAIRED_S = 90.0


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def victim(lab: LocalCluster) -> int:
    """A node that is there to be killed."""
    return lab.add_node(num_cpus=1, object_store_memory=150 << 20)


def read_all(ref: Any) -> Any:
    return np.array(ref.get())


def change(ref: Any, rows: Any, value: int) -> int:
    with clamor.update(ref) as array:
        array[rows] = value
    return int(ref.version)


class Model:
    """A variable, and what each version of it must be."""

    def __init__(self, seed: int, **level: Any) -> None:
        self.rng = np.random.default_rng(seed)
        content = self.rng.integers(0, 1 << 62, N)
        self.versions = [content]
        self.ref = clamor.put(content, **level)

    def commit(self, on_node: int | None = None) -> None:
        begin = int(self.rng.integers(0, N - 300_000))
        rows = np.unique([*range(begin, begin + 3000), *self.rng.integers(0, N, 40)])
        value = len(self.versions)
        content = self.versions[-1].copy()
        content[rows] = value
        if on_node is None:
            change(self.ref, rows, value)
        else:
            on(on_node, change, self.ref, rows, value)
            self.ref.refresh()
        self.versions.append(content)
        assert self.ref.version == len(self.versions) - 1

    def check(self, on_node: int | None = None) -> None:
        newest = self.ref.at()
        found = read_all(newest) if on_node is None else on(on_node, read_all, newest)
        assert np.array_equal(found, self.versions[-1])

    def check_old(self) -> None:
        for version, content in enumerate(self.versions):
            assert np.array_equal(read_all(self.ref.at(version)), content), version


LEVELS = (
    {"redundancy": "raid1"},
    {"redundancy": "raid1", "copies": 3},
    {"redundancy": "raid4"},
    {"redundancy": "raid5"},
)


def server_of(lab: LocalCluster, index: int) -> str:
    node_id: str = lab.node_ids[index]
    return node_id


def wait_until_repaired() -> float:
    began_s = time.monotonic()
    until(lambda: clamor.stats().degraded == 0, REPAIRED_S)
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(each, marks=pytest.mark.soak) if "raid4" in str(each) else each
        for each in LEVELS
    ],
    ids=str,
)
def test_a_node_is_lost(lab: LocalCluster, victim: int, level: dict[str, Any]) -> None:
    """With all versions; then another one. The node that joins in between has no page server: no
    process has used anything of ours there."""
    model = Model(1, **level)
    for node in (None, 1, victim):
        model.commit(node)
    model.check(1)
    assert clamor.stats().degraded == 0
    killed_s = time.time()
    lab.kill_node(victim)
    model.check()
    model.commit()
    if level["redundancy"] != "raid1":  # all three others have a piece of each group
        assert clamor.stats().degraded > 0
    spare = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    wait_until_repaired()
    if level["redundancy"] == "raid5":
        check_spans_of_repairs(lab, model.ref, killed_s)
    model.check_old()
    model.check(2)
    model.commit(1)
    lab.kill_node(spare)
    model.check(2)
    model.commit(2)
    model.check_old()
    model.ref.free()


def check_spans_of_repairs(lab: LocalCluster, ref: Any, since_s: float) -> None:
    """What `clamor timeline` has of pieces that others of their groups have made again."""
    trace = trace_of(lab, clamor.init().scope)
    pieces = range(ref._region, ref._region + 100)  # the session has had other variables
    repairs = [
        event
        for event in trace
        if event["name"].startswith("rebuild by parity ") and event["args"]["region"] in pieces
    ]
    assert repairs, {event["name"] for event in trace}
    rows = rows_of(trace)
    for event in repairs:
        assert event["cat"] == "clamor"
        server = f"clamor page server {event['args']['node_id'][:12]}"
        assert rows[event["pid"], event["tid"]][1].startswith(server)
        assert event["dur"] > 0
        assert since_s * 1e6 <= event["ts"] <= event["ts"] + event["dur"] <= time.time() * 1e6


def test_levels_that_need_more_nodes(lab: LocalCluster) -> None:
    with pytest.raises(errors.TooFewNodesError, match="needs 9 nodes that take variables; there"):
        clamor.put(np.ones(N), redundancy="raid1", copies=9)
    with pytest.raises(ValueError, match="redundancy is one of"):
        clamor.put(np.ones(N), redundancy="raid6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copies is for"):
        clamor.put(np.ones(N), redundancy="raid5", copies=3)


def test_the_registry_is_killed_and_then_a_node(lab: LocalCluster, victim: int) -> None:
    model = Model(2, redundancy="raid5", name="kept")
    model.commit(1)
    os.kill(process_sessions.current().rpc.ping(), signal.SIGKILL)
    model.commit()
    lab.kill_node(victim)
    model.check(1)
    model.check_old()
    found = clamor.open("kept")
    assert np.array_equal(read_all(found), model.versions[-1])
    model.commit(2)
    model.check()
    clamor.free(model.ref)


def test_two_nodes_are_lost_at_once(lab: LocalCluster, victim: int) -> None:
    """Only what both had of a group is lost, and who reads it is told exactly which blocks."""
    second = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    content = np.arange(N)
    ref = clamor.put(content, redundancy="raid5")
    copies = clamor.put(content, redundancy="raid1", copies=3)
    on(victim, change, ref, [5, N - 1], -1)  # what it has of that goes with it
    change(copies, [5, N - 1], -1)
    content[[5, N - 1]] = -1
    ref.refresh()
    # Node 1 has some blocks of each piece, at the same places: with one of a group that was read,
    # the others of the group could be made again there.
    firsts = range(0, N // BLOCK_ROWS, PIECE_BLOCKS)
    there = {first + at for first in firsts for at in AT if first + at <= N // BLOCK_ROWS + 1}
    rows = [(block - 1) * BLOCK_ROWS for block in sorted(there - {0})]
    assert on(1, values_at, ref, rows) == [int(content[row]) for row in rows]
    lost = BitMap(lost_with(lab, ref, {victim, second}) - there)
    assert 0 < len(lost) < -(-ref.nbytes // 4096)
    for node in (victim, second):  # else the first one's may be made again before the second goes
        stop(lab.page_server_pid(node))
    lab.kill_node(victim)
    lab.kill_node(second)
    assert np.array_equal(on(1, read_all, copies), content)
    until(lambda: not {victim, second} & set(homes_of_pieces(lab, ref)), REPAIRED_S)
    assert lost_blocks(ref) == set(lost)
    until(lambda: loss_of(ref) != 0)
    with pytest.warns(errors.LostBlocksWarning) as caught:
        array = ref.get()
    (warning,) = (one.message for one in caught if one.category is errors.LostBlocksWarning)
    assert isinstance(warning, errors.LostBlocksWarning)
    assert (warning.region, warning.runs) == (ref._region, tuple(block_sets.runs(lost)))
    with pytest.raises(errors.HomeLostError) as failure:
        clamor.prefetch(array)
    assert block_sets.said(lost, ref._length_bytes // 4096) in str(failure.value)
    for first, n_blocks in block_sets.runs(BitMap(range(1, N // BLOCK_ROWS)) - lost):
        rows = slice((first - 1) * BLOCK_ROWS, (first - 1 + n_blocks) * BLOCK_ROWS)
        assert np.array_equal(array[rows], content[rows])
    del array
    # A commit that writes what is lost makes it whole. Its parity is made again then.
    with clamor.update(ref, lost=0) as array:
        array[:] = content
    assert np.array_equal(read_all(ref), content)
    until(lambda: not lacking(ref), REPAIRED_S)
    change(ref, [7, N // 2], -2)
    content[[7, N // 2]] = -2
    third = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    on(third, read_all, clamor.put(np.ones(1000)))  # it has a page server
    assert np.array_equal(read_all(ref.refresh()), content)
    ref.free()
    copies.free()


def lacking(ref: Any) -> set[int]:
    """Pieces that lack blocks, parity pieces too."""
    registry = process_sessions.current().rpc
    pieces = range(ref._region + 1, ref._region + 1 + ref._pieces.groups.n_regions)
    return {piece for piece in pieces if registry.lost_blocks(piece) is not None}


def values_at(ref: Any, rows: list[int]) -> list[int]:
    """One block at a time."""
    array = ref.get(page_bytes=4096)
    return [int(array[row]) for row in rows]


def lost_blocks(ref: Any) -> set[int]:
    found = process_sessions.current().rpc.lost_blocks(ref._region)
    return set(BitMap.deserialize(found.blocks)) if found is not None else set()


def test_zeros_maps_and_small_ones(lab: LocalCluster, victim: int) -> None:
    zeros = clamor.zeros((N // 4, 4), np.float32, redundancy="raid5")
    small = clamor.put(np.arange(1000), redundancy="raid1")
    inline = clamor.put([1, 2, 3], redundancy="raid5")
    keys = np.arange(50_000)
    m = clamor.HashMap.build(keys, keys * 2.0, redundancy="raid4")
    clamor.add_at(zeros, [3, 3, N // 4 - 1], 1.0)
    with clamor.update(m) as changed:
        changed[keys[:5]] = 9.0
    lab.kill_node(victim)
    found = read_all(zeros)
    assert float(found.sum()) == 12.0
    assert float(found[3, 0]) == 2.0
    assert np.array_equal(on(1, read_all, small), np.arange(1000))
    assert inline.get() == [1, 2, 3]
    assert np.array_equal(m.get(keys[3:7]), [9.0, 9.0, 10.0, 12.0])
    with clamor.update(zeros) as array:
        array[0] = 5
    assert float(zeros.get()[0, 0]) == 5.0


@pytest.mark.parametrize("level", ["raid1", "raid5"])
def test_what_tasks_of_a_stage_add(lab: LocalCluster, victim: int, level: Any) -> None:
    n = 600_000
    ref = clamor.zeros(n, np.int64, redundancy=level)
    ids = np.random.default_rng(5).integers(0, n, 4000)

    def add(part: Any) -> int:
        clamor.add_at(ref, part, 1)
        return len(part)

    parts = np.array_split(ids, 8)
    assert sum(clamor.from_items(parts, partitions=4).map(add).collect()) == len(ids)
    wanted = np.bincount(ids, minlength=n)
    assert np.array_equal(read_all(ref.refresh()), wanted)
    lab.kill_node(victim)
    assert np.array_equal(on(1, read_all, ref), wanted)

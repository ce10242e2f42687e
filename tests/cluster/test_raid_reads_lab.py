"""Reads of variables with redundancy while a home is late, or lost and not made again yet."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._session import process_sessions
from tests.cluster.test_moves_lab import on
from tests.conftest import until
from tests.library.test_fork import fork_and_read
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.pieces import blocks_of_piece, homes_of_pieces
from tests.support.processes import stop

pytestmark = pytest.mark.lab

N = 2_500_000  # of 8 bytes: 20 MB, pieces of 2 MiB
BLOCK_ROWS = 512  # of a block; block 0 has what describes the array
ANSWER_S = 60.0
REPAIRED_S = 90.0
N_BEFORE = 80  # requests: ten earn one that may be asked twice, and a busy machine spends some
N_AFTER = 10


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


class Reader:
    """Has a variable open, and touches it: each touch brings one block."""

    def __init__(self, refs: list[Any]) -> None:
        self._array = refs[0].get(page_bytes=4096)

    def values(self, rows: list[int]) -> list[int]:
        return [int(self._array[row]) for row in rows]


@contextlib.contextmanager
def reader(node: int, ref: Any) -> Iterator[Callable[[list[int]], list[int]]]:
    """Reads rows in a process of that node."""
    import ray

    where = {"num_cpus": 0, "resources": {node_resource(node): 0.01}}
    actor = ray.remote(Reader).options(**where).remote([ref])
    try:
        yield lambda rows: list(ray.get(actor.values.remote(rows), timeout=ANSWER_S))
    finally:
        ray.kill(actor)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
        assert is_stopped(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def counters(lab: LocalCluster, node: int) -> dict[str, int]:
    """Of a node's page server, by itself: the registry would ask one that is stopped, too."""
    import ray

    report = ray.get(lab.page_server(node).stats.remote(), timeout=ANSWER_S)
    return dict(report.engine)


def rows_of(lab: LocalCluster, ref: Any, home: int, reader_node: int) -> list[int]:
    """Rows that the home has and the reader's node has nothing of, not even a copy: each in a
    block of its own, in any order. Empty: there is no such piece."""
    homes, groups = homes_of_pieces(lab, ref), ref._pieces.groups
    for index in range(groups.n_pieces - 1):  # the last one is shorter
        mirrors = [homes[each] for each in groups.others(index)] if groups.are_copies else []
        if homes[index] == home and reader_node not in mirrors:
            blocks = blocks_of_piece(ref, index)[2::4]
            rows = [(block - 1) * BLOCK_ROWS for block in blocks]
            return [int(row) for row in np.random.default_rng(index).permutation(rows)]
    return []


def put(level: Any) -> tuple[Any, Any]:
    content = np.random.default_rng(3).integers(0, 1 << 62, N)
    return clamor.put(content, redundancy=level), content


@pytest.mark.parametrize("level", ["raid1", "raid5"])
def test_who_reads_from_a_home_that_is_stopped_does_not_wait_for_it(
    lab: LocalCluster, level: Any
) -> None:
    ref, content = put(level)
    # Not the driver's node, which has made all pieces.
    home, reader_node = next(pair for pair in ((1, 2), (2, 1)) if rows_of(lab, ref, *pair))
    rows = rows_of(lab, ref, home, reader_node)
    with reader(reader_node, ref) as values:
        assert values(rows[:N_BEFORE]) == [int(content[row]) for row in rows[:N_BEFORE]]
        won = counters(lab, reader_node)["hedges_won"]
        with stopped(lab.page_server_pid(home)):
            for row in rows[N_BEFORE:]:  # of copies, the other one may be asked at first
                assert values([row]) == [int(content[row])]
                if counters(lab, reader_node)["hedges_won"] > won:
                    break
        (node,) = (n for n in clamor.stats().nodes if n.node_id == lab.node_ids[reader_node])
        assert node.engine.hedges_won > won
        assert node.engine.hedges >= node.engine.hedges_won
    assert np.array_equal(on(reader_node, lambda ref: np.array(ref.get()), ref), content)
    ref.free()


@pytest.mark.parametrize("level", ["raid1", "raid5"])
def test_what_is_read_of_a_lost_home_before_it_is_made_again(lab: LocalCluster, level: Any) -> None:
    """The registry is stopped meanwhile: nobody can have declared a loss, or made anything again.
    The reader's node knows who the others are, because the home was late before."""
    victim = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    ref, content = put(level)
    reader_node = next(node for node in (1, 2) if rows_of(lab, ref, victim, node))
    rows = rows_of(lab, ref, victim, reader_node)
    before, late, after = rows[:N_BEFORE], rows[N_BEFORE], rows[N_BEFORE + 1 :][:N_AFTER]
    with reader(reader_node, ref) as values:
        assert values(before) == [int(content[row]) for row in before]
        stop(lab.page_server_pid(victim))
        assert values([late]) == [int(content[late])]
        with stopped(process_sessions.current().rpc.ping()):
            lab.kill_node(victim)
            was = counters(lab, reader_node)
            assert values(after) == [int(content[row]) for row in after]
            now = counters(lab, reader_node)
    grown = {name: now[name] - was[name] for name in ("degraded_blocks", "mirror_blocks")}
    assert sum(grown.values()) >= len(after)
    if level == "raid5":  # of copies, the other one is asked by choice, too
        assert grown["degraded_blocks"] >= len(after)
    until(lambda: victim not in homes_of_pieces(lab, ref), REPAIRED_S)
    assert np.array_equal(on(reader_node, lambda ref: np.array(ref.get()), ref), content)
    ref.free()


def test_children_of_fork_read_it(lab: LocalCluster) -> None:
    ref, content = put("raid5")
    children, own = on(1, fork_and_read, ref, 3)
    sums = [int(part.sum()) for part in np.array_split(content, 4)[:3]]
    ends = [(child.status, child.result, child.stderr) for child in children]
    assert ends == [(0, part, "") for part in sums]
    assert own == int(content.sum())
    ref.free()

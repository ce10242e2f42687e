"""After a drain the page server of the node ends. Another one comes when a process needs it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.ray_state import alive_nodes
from clamor_ray.actors.moves import ray_nodes
from tests.cluster.test_ray_nodes import drain_node
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.troubles import keeper_pids, registry_pid

pytestmark = pytest.mark.lab

TASK_S = 90.0
LEAVE_S = 60.0
LONG_S = 7.0  # more than a server needs that may end
N = 20
WORDS = 10**5


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


def on(index: int, function: Any, *arguments: Any) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def put_there(n: int) -> tuple[int, list[Any]]:
    return os.getpid(), [clamor.put(np.full(WORDS, i)) for i in range(n)]


def sums(refs: list[Any]) -> tuple[int, list[int]]:
    return os.getpid(), [int(ref.get().sum()) for ref in refs]


EXPECTED = [i * WORDS for i in range(N)]


def actor_of(lab: LocalCluster, index: int) -> str:
    return str(lab.page_server(index)._actor_id.hex())


def state_of(actor_id: str) -> tuple[str, int]:
    """As `ray list actors` says it, which needs a dashboard."""
    import ray

    found = ray._private.state.actors(actor_id)
    return found["State"], int(found["NumRestarts"])


def has_left(lab: LocalCluster, index: int) -> bool:
    return lab.node_ids[index] not in [node.node_id for node in clamor.stats().nodes]


def test_the_page_server_of_a_drained_node_ends(lab: LocalCluster) -> None:
    """The worker that has used it lives on, and the next task there is right."""
    worker, refs = on(1, put_there, N)
    assert on(1, sums, refs) == (worker, EXPECTED)
    actor, keepers = actor_of(lab, 1), keeper_pids(lab, 1)
    assert len(keepers) == 1
    result = clamor.drain(lab.node_ids[1])
    assert (result.moved, result.leaves) == (N, True)
    until(lambda: has_left(lab, 1), LEAVE_S)
    until(lambda: keeper_pids(lab, 1) == [], LEAVE_S)
    until(lambda: state_of(actor) == ("DEAD", 0), LEAVE_S)
    with pytest.raises(LookupError):
        lab.page_server(1)
    assert clamor.stats().moves.left == 1
    assert sums(refs)[1] == EXPECTED  # every byte, after it
    assert on(1, sums, refs) == (worker, EXPECTED)  # and there again, by the same process
    assert actor_of(lab, 1) != actor
    (node,) = (node for node in clamor.stats().nodes if node.node_id == lab.node_ids[1])
    assert not node.leaving
    late = on(1, put_there, 1)[1][0]
    with clamor.update(refs[3]) as array:
        array[:] = 7
    assert on(1, sums, [late, refs[3].at()])[1] == [0, 7 * WORDS]
    (home,) = (node_id for node_id, entry in clamor.stats().region(late).items() if entry.is_home)
    assert home == lab.node_ids[1]


def test_it_goes_on_while_it_is_used(lab: LocalCluster) -> None:
    import ray

    @ray.remote(num_cpus=0, resources={node_resource(1): 0.01})
    class Reader:
        def open(self, refs: list[Any]) -> int:
            self._array = refs[0].get()
            return int(self._array[0])

        def read(self) -> int:
            return int(self._array.sum())

        def let_go(self) -> None:
            del self._array

    ref = clamor.put(np.full(WORDS, 5))
    reader = Reader.remote()
    assert ray.get(reader.open.remote([ref]), timeout=TASK_S) == 5
    pid = lab.page_server_pid(1)
    assert clamor.drain(lab.node_ids[1]).leaves
    time.sleep(LONG_S)
    assert lab.page_server_pid(1) == pid
    assert [node.leaving for node in clamor.stats().nodes] == [
        node.node_id == lab.node_ids[1] for node in clamor.stats().nodes
    ]
    assert ray.get(reader.read.remote(), timeout=TASK_S) == 5 * WORDS  # blocks that were absent
    ray.get(reader.let_go.remote(), timeout=TASK_S)
    until(lambda: has_left(lab, 1), LEAVE_S)
    assert ray.get(reader.open.remote([ref]), timeout=TASK_S) == 5


def test_a_drain_is_undone(lab: LocalCluster) -> None:
    refs = on(1, put_there, 4)[1]
    pid = lab.page_server_pid(1)
    with pytest.raises(errors.DrainTimeoutError):
        clamor.drain(lab.node_ids[1], timeout=0.0)
    assert clamor.cancel_drain(lab.node_ids[1])
    assert not clamor.cancel_drain(lab.node_ids[1])
    clamor.drain(lab.node_ids[1])
    assert clamor.cancel_drain(lab.node_ids[1])
    time.sleep(LONG_S)
    assert lab.page_server_pid(1) == pid
    assert clamor.drain(lab.node_ids[0]).moved == 4  # to there again
    assert {*clamor.stats().region(refs[0])} >= {lab.node_ids[1]}
    with pytest.raises(errors.NoSuchNodeError):
        clamor.cancel_drain("nobody")
    assert sums(refs)[1] == EXPECTED[:4]


def test_a_drain_is_undone_when_the_page_server_has_left(lab: LocalCluster) -> None:
    """Its node gets another one at once, so variables can be there again."""
    on(1, put_there, 1)
    clamor.drain(lab.node_ids[1])
    until(lambda: has_left(lab, 1), LEAVE_S)
    assert clamor.cancel_drain(lab.node_ids[1])
    assert not has_left(lab, 1)
    assert not clamor.cancel_drain(lab.node_ids[1])
    ref = clamor.put(np.arange(WORDS), redundancy="raid1")
    assert clamor.stats().degraded == 0
    assert ref.get()[7] == 7


def test_what_was_freed_and_is_read_elsewhere_stays_and_is_named(lab: LocalCluster) -> None:
    ref = on(1, put_there, 8)[1][7]
    array = ref.get()
    assert array[0] == 7
    clamor.free(ref)
    with pytest.raises(errors.DrainTimeoutError, match=r"variable \d+ \(.*\) was freed"):
        clamor.drain(lab.node_ids[1], timeout=3.0)
    assert int(array.sum()) == 7 * WORDS
    del array
    assert clamor.drain(lab.node_ids[1]).moved == 0
    until(lambda: has_left(lab, 1), LEAVE_S)


def test_the_drivers_page_server_stays(lab: LocalCluster) -> None:
    ref = clamor.put(np.full(WORDS, 3))
    on(1, sums, [ref])
    pid = lab.page_server_pid(0)
    assert not clamor.drain(lab.node_ids[0]).leaves
    time.sleep(LONG_S)
    assert lab.page_server_pid(0) == pid
    assert sums([ref])[1] == [3 * WORDS]


@pytest.mark.slow
def test_it_comes_and_goes_under_tasks_and_kills(lab: LocalCluster) -> None:
    """Tasks begin there at any moment, also at that of its end; page server and registry die."""
    worker, refs = on(1, put_there, N)
    del worker
    for turn in range(4):
        actor = actor_of(lab, 1)
        clamor.drain(lab.node_ids[1])
        if turn == 1:
            os.kill(lab.page_server_pid(1), signal.SIGKILL)
        if turn == 2:
            os.kill(registry_pid(), signal.SIGKILL)
        # Now and then, and less and less often: one of them meets the end.
        pause_s = 2.5
        deadline = time.monotonic() + LEAVE_S
        while state_of(actor)[0] != "DEAD":
            assert time.monotonic() < deadline
            assert on(1, sums, refs)[1] == EXPECTED
            time.sleep(pause_s)
            pause_s += 0.5
        assert sums(refs)[1] == EXPECTED
        refs = on(1, put_there, N)[1]
    assert on(1, sums, refs)[1] == EXPECTED


def test_a_node_that_ray_takes_away_goes_before_its_deadline(lab: LocalCluster) -> None:
    """Nobody calls anything. A task that runs there keeps its page server."""
    import ray

    index = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    node = lab.node_ids[index]
    refs = on(index, put_there, N)[1]
    there = {node_resource(index): 0.01}
    running = ray.remote(read_late).options(num_cpus=1, resources=there).remote(refs, 3 * LONG_S)
    until(lambda: node in ray_nodes.nodes_in_use(), TASK_S)
    began = time.monotonic()
    assert drain_node(node, int((time.time() + 10 * LEAVE_S) * 1000))
    until(lambda: clamor.stats().moves.finished == N, LEAVE_S)
    assert time.monotonic() - began < 2 * LONG_S, "the task runs still"
    assert ray.get(running, timeout=TASK_S) == EXPECTED
    until(lambda: node not in alive_nodes(), LEAVE_S)
    assert clamor.stats().moves.left == 1
    assert sums(refs)[1] == EXPECTED


def read_late(refs: list[Any], pause_s: float) -> list[int]:
    """Opens nothing for longer than a page server waits that may end."""
    time.sleep(pause_s)
    return sums(refs)[1]

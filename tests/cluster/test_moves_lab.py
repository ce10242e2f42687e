"""Homes move to other nodes while processes read and write, and servers of ours are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab, troubles
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

WORDS = 512  # of 8 bytes: a row is a block
N_ROWS = 2000
TASK_S = 90.0
DRAIN_S = 60.0


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


def on(index: int, function: Any, *arguments: Any, timeout_s: float = TASK_S) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=timeout_s)


def home_of(ref: Any) -> str:
    (home,) = (node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home)
    return str(home)


def written_by(version: int) -> Any:
    """The rows that a commit writes, all with its number."""
    rng = np.random.default_rng(version)
    first = int(rng.integers(0, N_ROWS))
    return np.unique([*range(first, min(first + 30, N_ROWS)), *rng.integers(0, N_ROWS, 20)])


class History:
    """What each version is."""

    def __init__(self) -> None:
        self._rows = [np.zeros(N_ROWS, np.int64)]

    def at(self, version: int) -> Any:
        while len(self._rows) <= version:
            rows = self._rows[-1].copy()
            rows[written_by(len(self._rows))] = len(self._rows)
            self._rows.append(rows)
        return self._rows[version]

    def check(self, array: Any, version: int) -> None:
        expected = self.at(version)
        wrong = np.flatnonzero((np.asarray(array) != expected[:, None]).any(axis=1))
        assert not len(wrong), (version, wrong[:5], np.asarray(array)[wrong[0]], expected[wrong[0]])


def write_until(over: Path, ref: Any) -> int:
    """Commits, one after the other; the only ones of the variable. How many."""
    n_commits = 0
    while not over.exists():
        newest = ref.at()
        version = newest.version + 1
        with clamor.update(newest) as array:
            array[written_by(version)] = version
        n_commits += 1
        time.sleep(0.01)
    return n_commits


def read_until(over: Path, ref: Any, back: int) -> int:
    """Reads all of the newest version, or of one that is that far back. How often."""
    history, rng, n_reads = History(), random.Random(back), 0
    while not over.exists():
        snapshot = ref.at()
        if back:
            snapshot = ref.at(rng.randint(max(0, snapshot.version - back), snapshot.version))
        history.check(np.array(snapshot.get()), snapshot.version)
        n_reads += 1
    return n_reads


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed",
    ["nothing", pytest.param("page servers", marks=pytest.mark.soak), "the registry too"],
)
def test_a_home_moves_from_node_to_node_under_readers_and_writers(
    killed: str, lab: LocalCluster, tmp_path: Path
) -> None:
    """Each node goes once its homes have: nothing of it is missed."""
    import ray

    rng = random.Random(killed)
    ref = clamor.put(np.zeros((N_ROWS, WORDS), np.int64))
    over = tmp_path / "over"
    dead: set[int] = set()

    def here(function: Any, *arguments: Any) -> Any:
        task = ray.remote(function).options(
            num_cpus=0, resources={node_resource(0): 0.01}, max_retries=0
        )
        return task.remote(over, ref, *arguments)

    crowd = [here(write_until), here(read_until, 0), here(read_until, 20)]
    try:
        until(lambda: ref.at().version > 5)
        home = 0
        for turn in range(4):
            taker = lab.add_node(num_cpus=1, object_store_memory=150 << 20) if turn else 1
            on(taker, lambda ref: int(ref.at().get()[0, 0]), ref)  # its page server is there
            stop = threading.Event()
            killer = threading.Thread(
                target=kill_some, args=(victims(killed, lab, home, taker, rng), rng, stop, dead)
            )
            killer.start()
            try:
                n_moved = clamor.drain(lab.node_ids[home], timeout=DRAIN_S).moved
            finally:
                stop.set()
                killer.join(TASK_S)
            if killed != "the registry too":  # which knows no more what it had moved before
                assert n_moved >= 1
            assert home_of(ref) == lab.node_ids[taker]
            before = ref.at().version
            until(lambda before=before: ref.at().version > before + 3)
            if home:
                lab.kill_node(home)
            home = taker
    finally:
        over.touch()
    rounds = ray.get(crowd, timeout=TASK_S)
    assert min(rounds) > 3, rounds
    newest = ref.at()
    assert newest.version == rounds[0]
    assert killed == "nothing" or len(dead) >= 4, "they were killed too late"
    history = History()
    history.check(newest.get(), newest.version)
    history.check(on(home, lambda ref: np.array(ref.get()), newest), newest.version)
    if killed != "the registry too":
        assert clamor.stats().moves.finished >= 4


def victims(
    killed: str, lab: LocalCluster, home: int, taker: int, rng: random.Random
) -> list[Callable[[], int]]:
    """Whose processes are killed, in turn; each is asked for when its turn comes."""
    servers: list[Callable[[], int]] = [
        lambda: lab.page_server_pid(home, 5.0),
        lambda: lab.page_server_pid(taker, 5.0),
    ]
    rng.shuffle(servers)
    if killed == "nothing":
        return []
    if killed == "page servers":
        return servers
    return [troubles.registry_pid, servers[0], troubles.registry_pid]


def kill_some(
    pids: list[Callable[[], int]], rng: random.Random, stop: threading.Event, dead: set[int]
) -> None:
    """SIGKILL at a few moments, as long as the drain takes."""
    for each in pids:
        if stop.wait(rng.uniform(0.0, 0.3)):
            return
        with contextlib.suppress(Exception):  # it has no page server yet
            pid = each()
            os.kill(pid, signal.SIGKILL)
            dead.add(pid)


def put_there(n: int) -> list[Any]:
    return [clamor.put(np.full(10**5, i)) for i in range(n)]


def test_everything_leaves_a_node_and_it_can_go(lab: LocalCluster) -> None:
    import ray

    index = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    node = lab.node_ids[index]
    refs = on(index, put_there, 20)
    changed, named = refs[3], on(index, lambda: clamor.put(np.arange(10**5), name="stays"))
    for value in (7, 8):
        with clamor.update(changed) as array:
            array[5] = value
    there = {node_resource(index): 0.01}
    plain = ray.remote(lambda: np.arange(10**6)).options(num_cpus=0, resources=there).remote()
    ray.wait([plain], fetch_local=False)
    shared = clamor.share(plain)
    assert home_of(shared) == home_of(named) == node
    mapped = refs[0].get()
    result = clamor.drain(node, timeout=DRAIN_S)
    assert result.moved == 22
    assert result.bytes > 20 * 800_000
    assert 0 < result.seconds < DRAIN_S
    assert clamor.stats().moves.finished == 22
    assert clamor.drain(node).moved == 0
    late = on(index, put_there, 1)[0]  # puts there still work
    assert home_of(late) == node
    assert clamor.drain(node).moved == 1
    assert node not in {home_of(ref) for ref in (*refs, named, shared, late)}
    on(index, lambda refs: [int(ref.get()[0]) for ref in refs], refs)  # and readers there
    lab.kill_node(index)
    for i, ref in enumerate(refs):
        if ref is not changed:
            assert np.array_equal(ref.get(), np.full(10**5, i))
    assert mapped[10**5 - 1] == 0
    assert [int(changed.at(v).get()[5]) for v in range(3)] == [3, 7, 8]
    assert np.array_equal(clamor.open("stays").get(), np.arange(10**5))
    assert np.array_equal(shared.get(), np.arange(10**6))
    with clamor.update(changed.at()) as array:
        array[5] = 9
    assert int(changed.at().get()[5]) == 9


def test_what_cannot_be_drained_says_so(lab: LocalCluster) -> None:
    ref = clamor.put(np.zeros(10**5))
    with pytest.raises(errors.NoSuchNodeError, match="nobody"):
        clamor.drain("nobody")
    for timeout in (-1.0, float("inf"), float("nan"), "5", None):
        with pytest.raises(ValueError, match="timeout is a number of seconds, 0 or more"):
            clamor.drain(lab.node_ids[0], timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(errors.DrainTimeoutError, match=rf"variable {ref._region}"):
        clamor.drain(lab.node_ids[0], timeout=0.0)
    assert clamor.drain(lab.node_ids[0]).moved >= 1
    with pytest.raises(errors.NoOtherNodeError) as failure:
        clamor.drain(lab.node_ids[1])
    assert "Add a node" in str(failure.value)
    assert not ref.get().any()

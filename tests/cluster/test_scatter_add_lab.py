"""Adds of stages while processes and nodes die: integers are exact, and there is one version."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray.collection.run import scatter_add_commit
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import OBJECT_STORE_BYTES, node_resource

N_ROWS = 200_000
N_TASKS = 12


N_NODES, N_CPUS = 3, 2


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES, num_cpus=N_CPUS) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def nodes(lab: LocalCluster) -> LocalCluster:
    """Three nodes of two CPUs, with a session; node 0 is the driver's. For each that another test
    has lost there is a new one."""
    while len(lab.alive()) < N_NODES:
        lab.add_node(num_cpus=N_CPUS, object_store_memory=OBJECT_STORE_BYTES)
    return lab


def _put_on(node: int, values: Any) -> Any:
    def put() -> Any:
        return clamor.put(values)

    task = ray.remote(put).options(num_cpus=0, resources={node_resource(node): 0.001})
    return ray.get(task.remote(), timeout=60)


def _expected() -> Any:
    ids = [np.random.default_rng(n).integers(0, N_ROWS, 50_000) for n in range(N_TASKS)]
    return np.bincount(np.concatenate(ids), minlength=N_ROWS)


def _adding(w: Any, other: Any, folder: Path) -> Any:
    def work(batch: Any) -> Any:
        seed = np.random.default_rng(int(batch[0]))
        clamor.add_at(w, seed.integers(0, N_ROWS, 50_000), 1)
        clamor.add_at(other, [0], 1)
        (folder / f"began-{batch[0]}-{os.getpid()}").touch()
        deadline = time.monotonic() + 60
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return batch

    return work


def _tasks() -> clamor.DataCollection:
    return clamor.from_items(range(N_TASKS), partitions=N_TASKS).options(scheduling="ray")


def _run(w: Any, other: Any, folder: Path, act: Any, began: int) -> None:
    """Runs the stage; `act` when so many attempts have begun, which then go on."""

    def meanwhile() -> None:
        until(lambda: len(list(folder.glob("began-*"))) >= began)
        act()
        (folder / "go").touch()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    _tasks().map_batches(_adding(w, other, folder)).execute()
    thread.join(60)
    assert not thread.is_alive()


def test_workers_and_a_node_die_while_tasks_run(nodes: LocalCluster, tmp_path: Path) -> None:
    w = clamor.zeros(N_ROWS, np.int64)
    other = clamor.put(np.zeros(3, np.int32))

    def act() -> None:
        victim = next(tmp_path.glob("began-*"))
        os.kill(int(victim.name.rpartition("-")[2]), 9)
        nodes.kill_node(nodes.alive()[-1])

    _run(w, other, tmp_path, act, began=4)
    assert (w.version, other.version) == (1, 1)
    assert other.get()[0] == N_TASKS
    np.testing.assert_array_equal(w.get(), _expected())


def test_a_node_dies_between_the_tasks_and_the_commit(
    nodes: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tasks there have added is gone with it; Ray makes it again."""
    w = clamor.zeros(N_ROWS, np.int64)
    _, home, victim = nodes.alive()
    other = _put_on(home, np.zeros(10_000, np.int64))
    commit, killed = scatter_add_commit.ScatterAddCommit.commit, []

    def late(self: Any) -> None:
        assert not killed
        assert {added.node_id for added in self._added.values()} >= {nodes.node_ids[victim]}
        killed.append(victim)
        nodes.kill_node(victim)
        commit(self)

    monkeypatch.setattr(scatter_add_commit, "TOGETHER_BYTES", 0)
    monkeypatch.setattr(scatter_add_commit.ScatterAddCommit, "commit", late)
    # Five at once, on nodes of two CPUs: all three have some.
    _run(w, other, tmp_path, lambda: None, began=5)
    assert killed
    assert (w.version, other.version) == (1, 1)
    assert other.get()[0] == N_TASKS
    np.testing.assert_array_equal(w.get(), _expected())


def test_a_commit_that_was_taken_for_dead(
    nodes: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page server asked before the commit, for who had staged was gone: it begins anew."""
    w = clamor.zeros(N_ROWS, np.int64)
    other = _put_on(nodes.alive()[1], np.zeros(10_000, np.int64))
    (tmp_path / "go").touch()
    commit, lost = scatter_add_commit._commit, []

    def late(session: Any, commit_id: int, writes: Any, began_s: float) -> Any:
        if not lost:
            lost.append(commit_id)
            assert len({write.staged_at for write in writes}) == 2
            assert session.rpc.outcome(commit_id) == {}
        return commit(session, commit_id, writes, began_s)

    monkeypatch.setattr(scatter_add_commit, "_commit", late)
    _tasks().map_batches(_adding(w, other, tmp_path)).execute()
    assert lost
    assert (w.version, other.version) == (1, 1)
    assert other.get()[0] == N_TASKS
    np.testing.assert_array_equal(w.get(), _expected())

"""Lost nodes and slow nodes: what is run again, what is not, and what is seen once."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._session import process_sessions
from clamor_ray.collection.plan.pins import Pins
from clamor_ray.collection.run import evaluate
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import OBJECT_STORE_BYTES

N_NODES, N_CPUS = 3, 2


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES, num_cpus=N_CPUS) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def nodes(lab: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    """Three nodes of two CPUs, with a session; node 0 is the driver's. For each that another test
    has lost there is a new one, and the driver has learned of none that it is slow."""
    monkeypatch.setattr(evaluate, "_clusters", weakref.WeakKeyDictionary())
    while len(lab.alive()) < N_NODES:
        lab.add_node(num_cpus=N_CPUS, object_store_memory=OBJECT_STORE_BYTES)
    return lab


def note(folder: Path, name: object) -> None:
    """One more call of this name; atomic, whoever writes beside."""
    fd = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{name}\n".encode())
    os.close(fd)


def calls(folder: Path) -> Counter[str]:
    path = folder / "log"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def places(collection: clamor.DataCollection) -> dict[int, str]:
    """Node of each kept partition."""
    result: Any = collection._node.results["whole"]
    return {part.meta.partition: part.meta.node_id for part in result.parts}


def one_with(lab: LocalCluster, collection: clamor.DataCollection) -> int:
    """A node, not the driver's, that holds kept partitions."""
    at = set(places(collection).values())
    return next(i for i in lab.alive() if i and lab.node_ids[i] in at)


def kill_one_with(lab: LocalCluster, collection: clamor.DataCollection) -> list[int]:
    """Kills a node that holds kept partitions; which."""
    at = places(collection)
    node = one_with(lab, collection)
    lost = [partition for partition, place in at.items() if place == lab.node_ids[node]]
    lab.kill_node(node)
    return lost


def outcomes(collection: int) -> list[str]:
    """What became of the attempts at a collection's tasks, as the registry knows it."""
    packed = process_sessions.current().rpc.attempts_of(collection)
    return [AttemptRecord.of(record).outcome for record in packed]


def quiet(items: range) -> clamor.DataCollection:
    """A partition for each item, on every node some, and no copies: executions are counted."""
    placed = clamor.from_items(items, partitions=len(items))
    return placed.options(speculation=False, scheduling="deterministic")


def big(x: int) -> Any:
    """A result that Ray keeps on the node where it was made."""
    return np.full(40_000, float(x))


def test_only_what_was_lost_runs_again(
    nodes: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(batch: Any) -> Any:
        note(tmp_path, int(batch[0]))
        return big(int(batch[0]))

    kept = quiet(range(9)).map_batches(make).execute()
    assert calls(tmp_path) == {str(x): 1 for x in range(9)}
    lost = kill_one_with(nodes, kept)
    assert lost

    def lost_is_said() -> bool:  # when Ray has noticed
        kept.explain()
        return f"{9 - len(lost)} of 9 partitions ({len(lost)} lost)" in capsys.readouterr().out

    until(lost_is_said)
    assert kept.sum() == 40_000.0 * sum(range(9))
    assert calls(tmp_path) == {str(x): 2 if x in lost else 1 for x in range(9)}
    kept.explain()
    assert "lost" not in capsys.readouterr().out


def test_lost_partitions_see_the_snapshots_that_they_saw_first(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    """Listing 3: distances to a tree, the tree changed, distances again, and a node lost after
    that: what is run again needs both versions of the tree."""
    tree = clamor.put(np.arange(20_000.0))

    def distances(batch: Any, tree: Any, name: str) -> Any:
        note(tmp_path, f"{name}{int(batch[0])}")
        return big(0) + tree[batch.astype(int)[0] * 1000]

    queries = quiet(range(6))
    old = queries.map_batches(distances, tree, "old").execute()
    with clamor.update(tree) as t:
        t[3000] = -1.0
    new = queries.map_batches(distances, tree, "new").execute()
    for i in range(3):  # versions that nobody needs
        with clamor.update(tree) as t:
            t[3000] = 7.0 + i
    victim = one_with(nodes, old)
    lost_old = {p for p, node in places(old).items() if node == nodes.node_ids[victim]}
    lost_new = {p for p, node in places(new).items() if node == nodes.node_ids[victim]}
    nodes.kill_node(victim)
    closer = old.zip(new).map_batches(lambda pair: pair[0] - pair[1])
    found = closer.collect()
    assert sum(v != 0 for v in found) == 40_000
    assert {v for v in found if v} == {3001.0}
    ran = calls(tmp_path)
    assert {name for name, n in ran.items() if n > 1} == {
        *(f"old{p}" for p in lost_old),
        *(f"new{p}" for p in lost_new),
    }


def test_shuffled_partitions_come_back(nodes: LocalCluster) -> None:
    items = clamor.from_items(range(3000), partitions=6).options(scheduling="deterministic")
    pairs = items.map(lambda x: (x % 7, x))
    sums = pairs.reduce_by_key("sum", partitions=3).cache()
    wide = sums.map(lambda pair: big(pair[1])).execute()
    before = sorted(sums.collect())
    kill_one_with(nodes, wide)
    assert sorted(sums.collect()) == before
    assert wide.count() == 7


def test_a_node_lost_while_a_stage_runs(nodes: LocalCluster, tmp_path: Path) -> None:
    def slow(x: int) -> int:
        note(tmp_path, x)
        time.sleep(0.5)
        return x

    def kill() -> None:
        until(lambda: len(calls(tmp_path)) >= 4)
        nodes.kill_node(nodes.alive()[1])

    killer = threading.Thread(target=kill)
    killer.start()
    assert clamor.from_items(range(12), partitions=12).map(slow).sum() == 66
    killer.join(60)


def test_what_differs_the_second_time_is_said(nodes: LocalCluster, tmp_path: Path) -> None:
    def make(batch: Any) -> Any:
        note(tmp_path, int(batch[0]))
        return big(calls(tmp_path)[str(int(batch[0]))])

    made = quiet(range(6)).options(check=True).map_batches(make).execute()
    kill_one_with(nodes, made)
    with pytest.raises(errors.NondeterministicError, match="seed"):
        made.collect()


# ------------------------------------------------------------------ slow nodes


def test_a_slow_task_is_copied_and_counts_once(nodes: LocalCluster, tmp_path: Path) -> None:
    counters = clamor.zeros(20_000, np.int64)

    # Wherever the first task goes, it is slow there.
    def slow_anywhere(x: int, counters: Any) -> int:
        first = calls(tmp_path)[str(x)] == 0
        note(tmp_path, x)
        if x == 0 and first:
            until(lambda: calls(tmp_path)["0"] > 1, 60)
        with clamor.update(counters) as c:
            c[600 * x] += 1
        return x

    found = clamor.from_items(range(6), partitions=6).map(slow_anywhere, counters)
    assert found.collect() == list(range(6))
    number = Pins.of(found._node).number
    until(lambda: "cancelled" in outcomes(number))
    assert calls(tmp_path)["0"] == 2
    assert counters._latest().get()[::600][:6].tolist() == [1] * 6


def test_without_speculation_there_is_no_copy(nodes: LocalCluster, tmp_path: Path) -> None:
    def slow(x: int) -> int:
        note(tmp_path, x)
        time.sleep(3.0 if x == 0 else 0.05)
        return x

    assert quiet(range(6)).options(scheduling="locality").map(slow).sum() == 15
    assert calls(tmp_path)["0"] == 1


# ------------------------------------------------------------------ places


def test_tasks_go_where_they_went_before(nodes: LocalCluster, tmp_path: Path) -> None:
    table = clamor.put(np.zeros(200_000))

    def where(batch: Any, table: Any) -> Any:
        table[int(batch[0]) * 512]
        note(tmp_path, "begun")
        deadline = time.monotonic() + 10  # five at once, on nodes of two CPUs: all three have some
        while calls(tmp_path)["begun"] < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        return [ray.get_runtime_context().get_node_id()]

    kept = quiet(range(6)).options(scheduling="locality").cache()
    first = kept.map_batches(where, table).collect()
    assert len(set(first)) == 3
    with clamor.update(table) as t:
        t[0] = 1
    before = clamor.stats().replay.found
    # A node that seems to be full for the moment is passed over: Ray hears of free places later.
    until(lambda: ray.available_resources().get("CPU", 0) == N_NODES * N_CPUS, 30)
    assert kept.map_batches(where, table).collect() == first
    # What they had read was fetched ahead the second time.
    assert clamor.stats().replay.found > before


# ------------------------------------------------------------------ versions


def test_old_versions_stay_while_a_collection_could_need_them(
    nodes: LocalCluster,
) -> None:
    registry = process_sessions.current().registry

    def pinned() -> int:
        return int(ray.get(registry.lineage_counters.remote()).collections)

    gc.collect()
    until(lambda: pinned() == 0)  # other tests' go when nobody has them any more
    table = clamor.put(np.zeros(20_000))
    then = clamor.from_items([0], partitions=1).map(lambda i, t: float(t[1000]), table)
    until(lambda: pinned() == 1)
    with clamor.update(table) as t:
        t[1000] = 5.0
    assert then.collect() == [0.0]
    del then
    gc.collect()
    until(lambda: pinned() == 0)

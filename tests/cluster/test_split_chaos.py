"""Aggregates while tasks, actors and nodes are killed at random moments: sums are exact."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray._session import process_sessions
from clamor_ray.collection.run import mergers, split
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = pytest.mark.lab

SEED = int(os.environ.get("CLAMOR_TEST_SEED", secrets.randbits(32)))
# Three ways of aggregation, four kinds of kill: twelve rounds have each kind first with each way.
# In the gate's each kind comes first in one, and a node is lost with arrays (3) and objects (7).
GATE_ROUNDS = (0, 1, 2, 3, 7)
ROUNDS = int(os.environ.get("CLAMOR_TEST_ROUNDS", "12"))
FIRST_S = 1.0  # less than the slow item: the first kill finds the aggregate at work
LAST_S = 3.0
N_PARTITIONS = 12
N_ITEMS = 60
LARGE = 40_005
JOIN_S = 240.0  # below pytest's own, which ends this process at once
LONG = (pytest.mark.soak, pytest.mark.timeout(1200))  # for `make soak`


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    """Four nodes of one CPU, with a session; node 0 is the driver's."""
    require_lab("local")
    with local_cluster(4, log_to_driver=False) as found:
        clamor.init()
        yield found


@pytest.fixture(autouse=True)
def a_low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "LEAST_BYTES", 64 << 10)


def part(value: Any, index: int, n: int) -> Any:
    return value[len(value) * index // n : len(value) * (index + 1) // n]


def collection(folder: Path) -> clamor.DataCollection:
    """Its tasks say which processes they are, and one of them is slow enough for a copy."""

    def said(item: int) -> int:
        (folder / str(os.getpid())).touch()
        time.sleep(0.02 if item else 1.5)  # the work; the first partition's is slow
        return item

    placed = clamor.from_items(range(N_ITEMS), partitions=N_PARTITIONS)
    return placed.options(max_retries=20).map(said)


def add(total: Any, item: int) -> Any:
    total += item + 1
    return total


EXPECTED = sum(range(1, N_ITEMS + 1))


def by_arrays(col: clamor.DataCollection) -> None:
    made = col.split_aggregate(np.zeros(50_000, np.int64), add, part, np.add, np.concatenate)
    assert (made == EXPECTED).all()


def by_objects(col: clamor.DataCollection) -> None:
    def count(total: Any, item: int) -> Any:
        return {**total, item: total.get(item, 0) + 1}

    def take(total: Any, index: int, n: int) -> Any:
        return {item: times for item, times in total.items() if item % n == index}

    def merge(one: Any, other: Any) -> Any:
        for item, times in other.items():
            one[item] = one.get(item, 0) + times
        return one

    def together(segments: list[Any]) -> Any:
        return {item: times for segment in segments for item, times in segment.items()}

    made = col.split_aggregate({}, count, take, merge, together, parallelism=2)
    assert made == dict.fromkeys(range(N_ITEMS), 1)


def by_aggregate(col: clamor.DataCollection) -> None:
    assert (col.aggregate(np.zeros(LARGE, np.int64), add, np.add) == EXPECTED).all()


WAYS: list[Callable[[clamor.DataCollection], None]] = [by_arrays, by_objects, by_aggregate]


# Each says what it killed: nothing, where there is none yet.


def kill_a_task(lab: LocalCluster, rng: random.Random, folder: Path) -> str:
    pids = sorted(int(path.name) for path in folder.iterdir())
    for pid in rng.sample(pids, len(pids)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return f"task process {pid}"
    return ""


def kill_an_actor(lab: LocalCluster, rng: random.Random, folder: Path) -> str:
    actors = sorted(mergers.all(process_sessions.current()).items())
    if not actors:
        return ""
    node, actor = rng.choice(actors)
    ray.kill(actor)
    return f"actor of {node[:8]}"


def stop_an_actor(lab: LocalCluster, rng: random.Random, folder: Path) -> str:
    """Its process: Ray sees it end, and not this one."""
    actors = sorted(mergers.all(process_sessions.current()).items())
    for node, actor in rng.sample(actors, len(actors)):
        with contextlib.suppress(ray.exceptions.RayError):
            pid = ray.get(actor.ping.remote(), timeout=5)
            os.kill(pid, signal.SIGKILL)
            return f"actor process {pid} of {node[:8]}"
    return ""


def kill_a_node(lab: LocalCluster, rng: random.Random, folder: Path) -> str:
    index = rng.choice([index for index in lab.alive() if index])
    lab.kill_node(index)
    return f"node {index}, {lab.node_ids[index][:8]}"


KINDS = [kill_a_task, kill_an_actor, stop_an_actor, kill_a_node]


@pytest.mark.parametrize(
    "number",
    [
        *GATE_ROUNDS,
        *(pytest.param(n, marks=LONG) for n in range(ROUNDS) if n not in GATE_ROUNDS),
    ],
)
def test_sums_are_exact_whoever_is_killed(lab: LocalCluster, tmp_path: Path, number: int) -> None:
    rng = random.Random(f"{SEED}/{number}")
    folder = tmp_path / "pids"
    folder.mkdir()
    way, kinds = WAYS[number % 3], [KINDS[number % 4], *rng.choices(KINDS[:3], k=2)]
    first, *others = kinds
    moments = [rng.uniform(0.0, FIRST_S), *sorted(rng.uniform(FIRST_S, LAST_S) for _ in others)]
    failed: list[BaseException] = []

    def run() -> None:
        try:
            way(collection(folder))
        except BaseException as failure:  # any: it is raised below
            failed.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    deadline = time.monotonic() + JOIN_S
    thread.start()
    while thread.is_alive() and not any(folder.iterdir()):  # worker processes start first
        assert time.monotonic() < deadline
        thread.join(0.01)
    began = time.monotonic()
    story = [f"CLAMOR_TEST_SEED={SEED}, {way.__name__}"]
    killed: list[Callable[..., str]] = []
    for moment, kill in zip(moments, kinds, strict=True):
        thread.join(max(0.0, began + moment - time.monotonic()))
        while thread.is_alive() and time.monotonic() < deadline:
            if did := kill(lab, rng, folder):
                killed.append(kill)
                story.append(f"{time.monotonic() - began:.2f} s: {did}")
                break
            thread.join(0.05)  # there is none yet
    thread.join(max(0.0, deadline - time.monotonic()))
    print("; ".join(story), f"; over after {time.monotonic() - began:.2f} s")
    assert not thread.is_alive(), story
    if failed:
        raise AssertionError("; ".join(story)) from failed[0]
    assert first in killed, story
    if kill_a_node in killed:
        lab.add_node(num_cpus=1)


def test_a_node_that_joins_takes_part(lab: LocalCluster, tmp_path: Path) -> None:
    by_arrays(collection(tmp_path))
    index = lab.add_node(num_cpus=1)
    wide = clamor.from_items(range(40), partitions=40).options(scheduling="deterministic")
    deadline = time.monotonic() + 60
    while lab.node_ids[index] not in mergers.all(process_sessions.current()):
        assert time.monotonic() < deadline
        made = wide.split_aggregate(np.zeros(9, np.int64), add, part, np.add, np.concatenate)
        assert made.tolist() == [sum(range(1, 41))] * 9

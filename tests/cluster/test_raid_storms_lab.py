"""Variables in pieces, while page servers are killed and stopped, and nodes die or leave.

Of every level: where a node's death loses something ("raid0"), nodes leave by a drain alone. Every
block that readers and the last look see is that of its version: contents are known by the version's
number alone. Readers and writers have both traps, and one reader is not on the writers' node.
"""

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
from tests.cluster.test_moves_lab import DRAIN_S, N_ROWS, TASK_S, WORDS, History, on, written_by
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = pytest.mark.lab

REPAIRED_S = 120.0
STOPPED_S = 2.0
LEVELS = ("raid0", "raid1", "raid4", "raid5")


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def write_in_turn(over: Path, refs: list[Any], mine: int) -> list[int]:
    """Commits, one after the other, of two writers in turn; the only ones. How many of each."""
    n_commits = [0] * len(refs)
    while not over.exists():
        for i, ref in enumerate(refs):
            newest = ref.at()
            if newest.version % 2 != mine:
                continue
            version = newest.version + 1
            with clamor.update(newest) as array:
                array[written_by(version)] = version
            n_commits[i] += 1
        time.sleep(0.01)
    return n_commits


def read_in_turn(over: Path, refs: list[Any], back: int) -> list[int]:
    """Reads all of the newest versions, or of some that are that far back. How often, of each: once
    at least."""
    history, rng, n_reads = History(), random.Random(back), 0
    while not n_reads or not over.exists():
        for ref in refs:
            snapshot = ref.at()
            if back:
                least = max(0, snapshot.version - back)
                snapshot = ref.at(rng.randint(least, snapshot.version))
            history.check(np.array(snapshot.get()), snapshot.version)
        n_reads += 1
    return [n_reads] * len(refs)


class Trouble(threading.Thread):
    """Kills page servers, and stops each third for a while: the next one when the last is there
    again."""

    def __init__(self, lab: LocalCluster, rng: random.Random) -> None:
        super().__init__()
        self.lab = lab
        self.rng = rng
        self.alive = [0, 1, 2]
        self.over = threading.Event()
        self.quiet = threading.Lock()  # held by who kills a node
        self.n_killed = self.n_stopped = 0

    def run(self) -> None:
        while not self.over.wait(self.rng.uniform(1.0, 3.0)):
            with self.quiet, contextlib.suppress(Exception):  # it is just starting
                self._strike(self.rng.choice(self.alive))

    def _strike(self, victim: int) -> None:
        pid = self.lab.page_server_pid(victim, 5.0)
        if (self.n_killed + self.n_stopped) % 3 == 1:
            stop(pid)
            try:
                self.over.wait(STOPPED_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.n_stopped += 1
            return
        os.kill(pid, signal.SIGKILL)
        self.n_killed += 1
        while not self.over.wait(0.2) and self.lab.page_server_pid(victim, 30.0) == pid:
            pass


def storm(levels: tuple[str, ...], lab: LocalCluster, over: Path, is_long: bool) -> None:
    """A node dies without a word, or is drained first; another one is drained."""
    import ray

    rng = random.Random("".join(levels))
    array = np.zeros((N_ROWS, WORDS), np.int64)
    refs = [clamor.put(array, redundancy=level) for level in levels]  # type: ignore[arg-type]

    def at(index: int, function: Callable[..., list[int]], trap: str, *arguments: Any) -> Any:
        task = ray.remote(function).options(
            num_cpus=0,
            resources={node_resource(index): 0.01},
            max_retries=0,
            runtime_env={"env_vars": {"CLAMOR_TRAP": trap}},
        )
        return task.remote(over, refs, *arguments)

    def go_on() -> None:
        before = [ref.at().version for ref in refs]
        until(
            lambda: all(ref.at().version > was + 3 for ref, was in zip(refs, before, strict=True)),
            REPAIRED_S,
        )

    def are_whole() -> bool:
        return clamor.stats().degraded == 0

    crowd = [
        at(0, write_in_turn, "uffd", 0),
        at(0, write_in_turn, "sigsegv", 1),
        at(0, read_in_turn, "uffd", 0),
        at(0, read_in_turn, "sigsegv", 5),
    ]
    trouble = Trouble(lab, rng)
    trouble.start()
    try:
        go_on()
        for turn, victim in enumerate((1, 2)):
            if is_long or not turn:
                joined = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
                on(joined, lambda ref: int(ref.at().get()[0, 0]), refs[0])  # it has a page server
                trouble.alive.append(joined)
                until(are_whole, REPAIRED_S)
            if not turn:
                crowd.append(at(joined, read_in_turn, "sigsegv", 0))
            if turn or "raid0" in levels:
                clamor.drain(lab.node_ids[victim], timeout=DRAIN_S)
            with trouble.quiet:
                trouble.alive.remove(victim)
                lab.kill_node(victim)
            go_on()
            if is_long or not turn:  # else there are too few nodes
                until(are_whole, REPAIRED_S)
        until(lambda: bool(trouble.n_killed and trouble.n_stopped))
    finally:
        trouble.over.set()
        trouble.join(TASK_S)
        over.touch()
    rounds = ray.get(crowd, timeout=TASK_S)
    assert min(map(min, rounds)) > 0, rounds
    newest = [ref.at() for ref in refs]
    for ref, first, second in zip(newest, *rounds[:2], strict=True):
        assert ref.version == first + second
    check(0, newest)
    check(trouble.alive[-1], newest)
    if is_long and "raid0" not in levels:
        lab.kill_node(trouble.alive[1])  # and what the parity has is right, too
        check(0, newest)


def check(index: int, refs: list[Any]) -> None:
    """What a node reads of them."""
    history = History()
    for ref in refs:
        history.check(on(index, lambda ref: np.array(ref.get()), ref), ref.version)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [LEVELS[:1], LEVELS[1:]], ids="-".join)
def test_a_storm(levels: tuple[str, ...], lab: LocalCluster, tmp_path: Path) -> None:
    """A variable of each level."""
    storm(levels, lab, tmp_path / "over", False)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_a_storm_goes_on(level: str, lab: LocalCluster, tmp_path: Path) -> None:
    """Until all is made again, both times; and a third node dies."""
    storm((level,), lab, tmp_path / "over", True)

"""Variables with redundancy, while page servers are killed and stopped, and nodes die or leave.

Every block that readers and the last look see is that of its version: contents are known by the
version's number alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.cluster.test_moves_lab import (
    DRAIN_S,
    N_ROWS,
    TASK_S,
    WORDS,
    History,
    on,
    read_until,
    write_until,
)
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

REPAIRED_S = 120.0
STOPPED_S = 2.0


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        try:
            yield lab
        finally:
            clamor.shutdown()


class Trouble(threading.Thread):
    """Kills page servers, or stops them for a while: the next one when the last is there again."""

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
        if self.rng.random() < 0.3:
            os.kill(pid, signal.SIGSTOP)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "level",
    ["raid5", *(pytest.param(level, marks=pytest.mark.soak) for level in ("raid1", "raid4"))],
)
def test_a_storm(level: str, lab: LocalCluster, tmp_path: Path) -> None:
    """Two nodes die without a word, and one is drained; each when what was lost is made again."""
    import ray

    rng = random.Random(level)
    array = np.zeros((N_ROWS, WORDS), np.int64)
    ref = clamor.put(array, redundancy=level)  # type: ignore[arg-type]
    over = tmp_path / "over"

    def here(function: Any, trap: str, *arguments: Any) -> Any:
        task = ray.remote(function).options(
            num_cpus=0,
            resources={node_resource(0): 0.01},
            max_retries=0,
            runtime_env={"env_vars": {"CLAMOR_TRAP": trap}},
        )
        return task.remote(over, ref, *arguments)

    crowd = [
        here(write_until, "uffd"),
        here(read_until, "uffd", 0),
        here(read_until, "sigsegv", 0),
        here(read_until, "sigsegv", 5),
    ]
    trouble = Trouble(lab, rng)
    trouble.start()
    try:
        until(lambda: ref.at().version > 5, TASK_S)
        for turn, victim in enumerate((1, 2)):
            joined = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
            on(joined, lambda ref: int(ref.at().get()[0, 0]), ref)  # its page server is there
            until(lambda: clamor.stats().degraded == 0, REPAIRED_S)
            trouble.alive.append(joined)
            with trouble.quiet:
                trouble.alive.remove(victim)
                if turn:
                    clamor.drain(lab.node_ids[victim], timeout=DRAIN_S)
                lab.kill_node(victim)
            before = ref.at().version
            until(lambda before=before: ref.at().version > before + 3, REPAIRED_S)
            until(lambda: clamor.stats().degraded == 0, REPAIRED_S)
    finally:
        trouble.over.set()
        trouble.join(TASK_S)
        over.touch()
    rounds = ray.get(crowd, timeout=TASK_S)
    assert min(rounds) > 3, rounds
    assert trouble.n_killed + trouble.n_stopped > 2
    newest = ref.at()
    assert newest.version == rounds[0]
    history = History()
    for index in (0, trouble.alive[-1]):
        found = on(index, lambda ref: np.array(ref.get()), newest)
        history.check(found, newest.version)
    trouble.alive.remove(0)
    lab.kill_node(trouble.alive[0])  # and what the parity has is right, too
    history.check(on(0, lambda ref: np.array(ref.get()), newest), newest.version)

"""A home that is stopped for longer than anybody took for death: nobody calls it lost."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PATIENCE_S = 45  # after 40 s a server was once taken for lost
LONG_S = 4.0 * PATIENCE_S
N = 1 << 20


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    require_lab("local")
    monkeypatch.setenv("CLAMOR_FAULT_TIMEOUT_S", str(PATIENCE_S))
    monkeypatch.setenv("CLAMOR_CONTROL_TIMEOUT_S", str(PATIENCE_S))
    with local_cluster(3) as cluster:
        clamor.init()
        try:
            yield cluster
        finally:
            clamor.shutdown()


def put_four() -> list[Any]:
    return [clamor.put(np.full(N, i, np.uint8)) for i in (1, 2, 3, 4)]


def prefetch_fails(refs: list[Any]) -> str:
    try:
        clamor.prefetch(refs[0].get(), timeout=LONG_S)
    except errors.WaitTimeoutError as failure:
        return str(failure)
    return ""


def sum_of(refs: list[Any]) -> int:
    return int(refs[0].get().sum(dtype=np.int64))


class Attempt(threading.Thread):
    """Something that is to fail, on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.failure: BaseException | None = None
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        begun_s = time.monotonic()
        try:
            self._call()
        except BaseException as failure:
            self.failure = failure
        self.took_s = time.monotonic() - begun_s

    def error(self) -> errors.WaitTimeoutError:
        self.join(LONG_S)
        assert not self.is_alive()
        assert isinstance(self.failure, errors.WaitTimeoutError), repr(self.failure)
        return self.failure


def seconds_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


def test_reads_and_commits_name_it_and_the_cause(lab: LocalCluster) -> None:
    there = clamor.remote(put_four).options(num_cpus=0, resources={node_resource(1): 0.001})
    read, gathered, written, unknown = ray.get(there.remote(), timeout=LONG_S)
    elsewhere = {"num_cpus": 0, "resources": {node_resource(2): 0.001}}
    (home,) = (node.info for node in clamor.stats().nodes if node.node_id == lab.node_ids[1])
    name = f"{home.server_id:#x}"
    transaction = clamor.update(written)
    with_array = transaction.__enter__()
    with_array[::4096] = 7
    array, rows = read.get(), gathered.get()
    stop(home.pid)
    try:
        reading = Attempt(lambda: clamor.prefetch(array))
        committing = Attempt(lambda: transaction.__exit__(None, None, None))
        gathering = Attempt(lambda: clamor.gather(rows.reshape(-1, 4096), range(0, N // 4096, 2)))
        # Nobody of this reader's node was connected to it before.
        said_elsewhere = ray.remote(prefetch_fails).options(**elsewhere).remote([unknown])
        cannot_read, cannot_commit = reading.error(), committing.error()
        cannot_gather = gathering.error()
        said = ray.get(said_elsewhere, timeout=LONG_S)
    finally:
        os.kill(home.pid, signal.SIGCONT)
    for failure in (cannot_read, cannot_gather):
        assert seconds_in(rf"server {name} is not reached for (\d+) s: \w", str(failure)) >= 20
        assert "lost" not in str(failure).replace("Nothing is lost", "")
    pattern = rf"home {name} of variable {written._region} did not fetch .* within (\d+) s: \w"
    assert seconds_in(pattern, str(cannot_commit)) >= 35
    assert "stopped" in str(cannot_commit)
    assert ": ." not in str(cannot_commit)
    assert seconds_in(rf"server {name} is not reached for (\d+) s: it ", said) >= 20
    assert (
        ray.get(ray.remote(sum_of).options(**elsewhere).remote([unknown]), timeout=LONG_S) == 4 * N
    )
    assert clamor.stats().region(unknown)[lab.node_ids[1]].is_home
    # It was there all the time: what is read is right, and the transaction is still open.
    assert int(read.get().sum(dtype=np.int64)) == N
    cannot_commit.transaction.commit()
    assert written._latest().get()[::4096].tolist() == [7] * (N // 4096)

"""A node that was declared lost comes back, with homes that are elsewhere by then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._protocol.ray_state import alive_nodes
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab, worker_logs
from tests.support.lab.cluster import node_resource
from tests.support.lab.troubles import keeper_pids
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.slow]

TASK_S = 120.0
N = 1 << 20


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def on(index: int, function: Any, *arguments: Any) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def put_two() -> list[Any]:
    return [clamor.put(np.full(N, value, np.uint8)) for value in (1, 2)]


def total(ref: Any) -> int:
    return int(ref.at().get().sum(dtype=np.int64))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # nobody waits for it as long as its raylet is stopped


def homes_of(ref: Any) -> set[str]:
    return {node for node, entry in clamor.stats().region(ref).items() if entry.is_home}


def test_a_page_server_that_is_back_drops_its_old_homes(lab: LocalCluster) -> None:
    """Cut off: its raylet does not answer for longer than Ray waits, and never again."""
    began_s = time.time()
    refs = on(1, put_two)
    assert [total(ref) for ref in refs] == [N, 2 * N]  # this node has all of it
    server = lab.page_server_pid(1)
    below = lab.processes(1)
    raylet, *others = below
    (keeper,) = keeper_pids(lab, 1)
    for pid in {*below, keeper}:
        stop(pid)
    try:
        until(lambda: lab.node_ids[1] not in alive_nodes(), TASK_S)
        with clamor.update(refs[0]) as array:
            array[:] = 7
        assert total(refs[1]) == 2 * N
        assert lab.node_ids[1] not in homes_of(refs[0]) | homes_of(refs[1])
        assert on(2, total, refs[0]) == 7 * N
        for pid in {*others, keeper}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for index in range(200):  # while it finds out
            assert total(refs[0]) == 7 * N
            if index % 10 == 0:
                assert on(2, total, refs[0]) == 7 * N
            if not is_running(server):
                break
            time.sleep(0.1)
        until(lambda: not is_running(server), 60.0)
        until(lambda: clamor.stats().moves.dropped == 2, 10.0)
        said = "\n".join(worker_logs.since(began_s).values())
        assert "was declared lost while it was not reached" in said
        assert "the 2 homes that it has (2.0 MiB) are old, and dropped" in said
        until(lambda: not is_running(keeper), 60.0)
        assert [total(ref) for ref in refs] == [7 * N, 2 * N]
        assert on(2, total, refs[1]) == 2 * N
    finally:
        os.kill(raylet, signal.SIGCONT)

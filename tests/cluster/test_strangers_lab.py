"""Strangers on the data port of a page server that is being restarted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray._protocol.messages import ServerInfo
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.strangers import strangers

pytestmark = pytest.mark.lab

N_STRANGERS = 200
BLOCK_BYTES = 4096
TASK_S = 150.0  # beyond what a page server waits for a peer before it gives it up


@pytest.fixture
def nodes() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2, num_cpus=1) as lab:
        clamor.init()
        yield lab


def server_of(node_id: str) -> ServerInfo | None:
    """The node's page server, where one answers."""
    for node in clamor.stats().nodes:
        if node.node_id == node_id and not node.error:
            return node.info  # type: ignore[no-any-return]
    return None


@ray.remote(num_cpus=0)
class Reader:
    """Holds a variable on another node, and touches blocks that are not there yet."""

    def __init__(self, ref: Any) -> None:
        self._array = ref[0].get()

    def read(self, first: int, end: int) -> int:
        return int(self._array[first * BLOCK_BYTES : end * BLOCK_BYTES : BLOCK_BYTES].sum())


def test_readers_go_on_while_strangers_hold_connections(nodes: LocalCluster) -> None:
    """Of a home that is killed twice, and comes back among them."""
    n_blocks = 16_384
    ref = clamor.put(np.repeat((np.arange(n_blocks) % 251).astype(np.uint8), BLOCK_BYTES))

    def expected(first: int, end: int) -> int:
        return sum(n % 251 for n in range(first, end))

    reader = Reader.options(resources={node_resource(1): 0.01}).remote([ref])
    assert ray.get(reader.read.remote(0, 10), timeout=TASK_S) == expected(0, 10)
    home = nodes.node_ids[0]
    before = server_of(home)
    assert before is not None
    with contextlib.ExitStack() as crowds:
        for first in (6000, 12_000):
            os.kill(nodes.page_server_pid(0), signal.SIGKILL)
            found: list[ServerInfo] = []

            def is_back(found: list[ServerInfo] = found, old: int = before.pid) -> bool:
                now = server_of(home)
                found[:] = [now] if now is not None and now.pid != old else []
                return bool(found)

            until(is_back, TASK_S)
            before = found[0]
            crowd = crowds.enter_context(
                strangers(before.host, before.port, N_STRANGERS, N_STRANGERS)
            )
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == "open\n"
            # Only now does the reader's node look for it: it has to pass all of them.
            read = reader.read.remote(first, first + 200)
            assert ray.get(read, timeout=TASK_S) == expected(first, first + 200)

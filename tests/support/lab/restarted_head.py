"""A cluster whose head can be killed and started again, with Ray's state in Redis or without.

Each node but the head has an address of its own, so a driver chooses its node by it: who is on the
head's ends with that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.support.lab.auth import authenticated
from tests.support.lab.cluster import (
    HEALTH_CHECK_PERIOD_MS,
    IDLE_WORKERS,
    OBJECT_STORE_BYTES,
    LocalCluster,
    add,
    in_time,
    node_resource,
    started,
)
from tests.support.processes import end

REDIS = "RAY_REDIS_ADDRESS"
REDIS_S = 30.0
GCS = "gcs_server"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """One that keeps nothing on a disk; yields its address."""
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is not installed"
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + REDIS_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            assert server.poll() is None, "redis-server has ended"
            assert time.monotonic() < deadline, f"redis-server does not listen in {REDIS_S:g} s"
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(REDIS_S)


def address_of(index: int) -> str:
    return f"127.0.0.{index + 1}"


@dataclass
class HeadLab(LocalCluster):
    """See the file's head. Node 0 is the head. No driver is connected yet."""

    _head_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def connect(self, index: int) -> None:
        """This process becomes a driver on a node, which is not the head."""
        import ray

        ray.init(address=self.address, _node_ip_address=address_of(index), log_to_driver=False)

    @contextlib.contextmanager
    def gcs_away(self) -> Iterator[None]:
        """The GCS alone is killed (SIGKILL), and is started again, at the same port, in the end."""
        head = self._nodes[0]
        (server,) = head.all_processes.pop(GCS)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(REDIS_S)
        head._gcs_address = head._gcs_client = None
        try:
            yield
        finally:
            head.start_gcs_server()

    @contextlib.contextmanager
    def head_away(self) -> Iterator[None]:
        """The whole head is killed; another one, at the same port, is there in the end."""
        self.kill_head()
        try:
            yield
        finally:
            self.start_head()

    def kill_head(self) -> None:
        """The GCS, the head's raylet and all below it, by SIGKILL: as the end of the head's pod."""
        end(self.head_processes())
        self._nodes[0] = None
        self._cluster.head_node = None

    def start_head(self) -> None:
        """Another node with another GCS, at the same port."""
        self._nodes[0] = in_time(lambda: add(self._cluster, **self._head_options))
        self.node_ids = (self._nodes[0].node_id, *self.node_ids[1:])

    def add_node(self, **arguments: Any) -> int:
        index = len(self._nodes)
        return super().add_node(node_ip_address=address_of(index), **arguments)


@contextlib.contextmanager
def restarted_head(n_nodes: int, *, redis: bool) -> Iterator[HeadLab]:
    """Starts n raylets, of which one is the head's, and ends them all.

    Args:
        n_nodes: at least 1.
        redis: whether Ray's state is in Redis (GCS fault tolerance).
    """
    import ray

    import clamor_ray

    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(authenticated())
        if redis:
            address = stack.enter_context(redis_server())
            stack.enter_context(mock.patch.dict(os.environ, {REDIS: address}))
        each = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        head = {
            **each,
            "resources": {node_resource(0): 1},
            "gcs_server_port": free_port(),
            "no_monitor": True,
            "include_dashboard": False,
            "include_log_monitor": False,
            "_system_config": {
                "health_check_period_ms": HEALTH_CHECK_PERIOD_MS,
                "health_check_initial_delay_ms": HEALTH_CHECK_PERIOD_MS,
                "num_workers_soft_limit": IDLE_WORKERS,
                "enable_metrics_collection": False,
            },
        }
        others = [
            {**each, "resources": {node_resource(i): 1}, "node_ip_address": address_of(i)}
            for i in range(1, n_nodes)
        ]
        cluster, nodes = started([head, *others])
        try:
            yield HeadLab(
                address=cluster.address,
                node_ids=tuple(node.node_id for node in nodes),
                environment={**environment, "RAY_ADDRESS": cluster.address},
                _cluster=cluster,
                _nodes=list(nodes),
                _head_options=head,
            )
        finally:
            clamor_ray.shutdown()  # what a test that failed has left
            ray.shutdown()
            cluster.shutdown()

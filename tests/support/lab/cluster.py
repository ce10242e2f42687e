"""Several raylets on the loopback device: no root, no shaping, one driver in this process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.lab.auth import authenticated

START_TRIES = 3
LATE = "timed out during startup"  # how Ray says that a node did not start in time
OBJECT_STORE_BYTES = 150 << 20
HEALTH_CHECK_PERIOD_MS = 500
RAY_HEALTH_CHECK_PERIOD_MS = 3000  # what Ray does by itself: benches measure that


def node_resource(index: int) -> str:
    """The custom resource that only node ``index`` has: ``options(resources={name: 0.01})``."""
    return f"node{index}"


def descendants(pid: int) -> list[int]:
    """All processes below one, by who started whom."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name may hold spaces and brackets: count from the last one.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


@dataclass
class LocalCluster:
    """Handle of a running cluster; node 0 is the head, and the driver's.

    Args:
        address: For ``ray.init(address=...)`` and RAY_ADDRESS.
        node_ids: Ray's hex ids, by index; dead nodes keep theirs.
        environment: What another process needs to connect.
    """

    address: str
    node_ids: tuple[str, ...]
    environment: dict[str, str]
    _cluster: Any = field(repr=False)
    _nodes: list[Any] = field(repr=False)

    def processes(self, index: int) -> list[int]:
        """Ids of a node's raylet and of all below it."""
        node = self._nodes[index]
        if node is None:
            raise ValueError(f"node {index} is dead already")
        raylet = node.all_processes["raylet"][0].process.pid
        return [raylet, *descendants(raylet)]

    def kill_node(self, index: int) -> None:
        """Ends a node as a crash would: the raylet and all below it by SIGKILL, at once."""
        if index == 0:
            raise ValueError("node 0 is the head and the driver's")
        _, *below = self.processes(index)
        node, self._nodes[index] = self._nodes[index], None
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def add_node(self, **arguments: Any) -> int:
        """Another node, as an autoscaler would add it; returns its index."""
        index = len(self._nodes)
        node = self._cluster.add_node(resources={node_resource(index): 1}, **arguments)
        self._nodes.append(node)
        self.node_ids = (*self.node_ids, node.node_id)
        return index

    def page_server(self, index: int, scope: str = "") -> Any:
        """The handle of a node's page server: of that session, where there are several."""
        import ray

        suffix = self.node_ids[index][:16]
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith(f"page-server-{scope}") and actor["name"].endswith(suffix):
                return ray.get_actor(actor["name"], namespace=actor["namespace"])
        raise LookupError(f"node {index} has no page server")

    def page_server_pid(self, index: int, timeout_s: float = 30.0, scope: str = "") -> int:
        """The process of a node's page server, restarted or not."""
        import ray

        return int(ray.get(self.page_server(index, scope).ping.remote(), timeout=timeout_s))


def started(options: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Ray's cluster and its nodes, one for each set of options, the head first.

    Ray gives a node 30 s to start, which no setting changes and a busy machine may need. Then the
    cluster is ended, with what the late node has started, and made anew.
    """
    from ray.cluster_utils import Cluster

    for left in reversed(range(START_TRIES)):
        before = set(descendants(os.getpid()))
        cluster = Cluster(shutdown_at_exit=True)
        try:
            return cluster, [cluster.add_node(**each) for each in options]
        except Exception as failure:
            cluster.shutdown()
            for pid in set(descendants(os.getpid())) - before:  # Ray forgets those of a late node
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if LATE not in str(failure) or not left:
                raise
    raise AssertionError("START_TRIES is 0")


@contextlib.contextmanager
def local_cluster(
    n_nodes: int,
    num_cpus: int = 1,
    object_store_memory: int = OBJECT_STORE_BYTES,
    connect: bool = True,
    log_to_driver: bool = True,
    health_check_period_ms: int = HEALTH_CHECK_PERIOD_MS,
) -> Iterator[LocalCluster]:
    """Starts n raylets, connects this process to the first, and ends them all.

    Args:
        n_nodes: At least 1; node i has the custom resource ``node<i>``.
        num_cpus: Of each node.
        object_store_memory: Of each node, in bytes.
        connect: Whether to call ``ray.init`` here.
        log_to_driver: Whether what workers and raylets say is printed here, on stdout.
        health_check_period_ms: How often Ray asks each node whether it lives, and how long it gives
            a new one before; after five refusals in a row the node is dead. Ray's own: 3000, 5000.
    """
    import ray

    import clamor_ray

    head = {
        "include_dashboard": False,
        "_system_config": {
            "health_check_period_ms": health_check_period_ms,
            "health_check_initial_delay_ms": health_check_period_ms,
        },
    }
    with authenticated() as environment:
        options = [
            {
                "num_cpus": num_cpus,
                "object_store_memory": object_store_memory,
                "resources": {node_resource(index): 1},
                **(head if index == 0 else {}),
            }
            for index in range(n_nodes)
        ]
        cluster, nodes = started(options)
        try:
            if connect:
                ray.init(address=cluster.address, log_to_driver=log_to_driver)
            yield LocalCluster(
                address=cluster.address,
                node_ids=tuple(node.node_id for node in nodes),
                environment={**environment, "RAY_ADDRESS": cluster.address},
                _cluster=cluster,
                _nodes=list(nodes),
            )
        finally:
            clamor_ray.shutdown()  # what a test that failed has left
            ray.shutdown()
            cluster.shutdown()

"""The cluster that a program runs on, and what its nodes are called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray

import clamor_ray as clamor

from .stages import Stages


@contextlib.contextmanager
def attached(nodes: int | None, stages: Stages, **settings: Any) -> Iterator[Any]:
    """Attaches to the cluster that RAY_ADDRESS names, or starts one on this machine.

    Yields Ray's handle of the cluster that it started; None where it attached to one.

    Args:
        nodes: of the local cluster; None for whatever `ray.init()` finds.
        stages: where progress goes.
        settings: of `clamor.init`; None where nothing was asked for.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    given = os.environ.get("RAY_ADDRESS")
    if given or nodes is None:
        with stages.stage("start", f"attaching to {given or 'Ray'}"):
            ray.init(ignore_reinit_error=True, log_to_driver=True, logging_level="warning")
            clamor.init(**settings)
        try:
            yield None
        finally:
            clamor.shutdown(force=True)
        return
    from ray.cluster_utils import Cluster

    with stages.stage("start", f"starting a local cluster of {nodes} nodes"):
        # Ray's own store only carries the answers here.
        options = {"num_cpus": 2, "object_store_memory": 256 << 20}
        cluster: Any = Cluster(initialize_head=True, head_node_args=dict(options))
        try:
            for _ in range(nodes - 1):
                cluster.add_node(**options)
            ray.init(address=cluster.address, log_to_driver=True, logging_level="warning")
            clamor.init(**settings)
        except BaseException:
            ray.shutdown()
            cluster.shutdown()
            raise
    try:
        yield cluster
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
        cluster.shutdown()


def node_names(nodes: list[dict[str, Any]], own: str) -> list[tuple[str, str]]:
    """(node id, name) of live nodes, this one first; hosts that repeat get a number."""
    live = [node for node in nodes if node["Alive"]]
    live.sort(key=lambda node: bool(node["NodeID"] != own))
    hosts = [str(node["NodeManagerHostname"]) for node in live]
    return [
        (node["NodeID"], host if hosts.count(host) == 1 else f"node {number}")
        for number, (node, host) in enumerate(zip(live, hosts, strict=True), 1)
    ]

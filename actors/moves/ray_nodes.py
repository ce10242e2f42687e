"""What Ray knows of the nodes of its cluster that no public call of it says.

All of it is Ray's own affair, and may change with any version: `tests/cluster/test_ray_nodes.py`
asks a real cluster, and fails where an answer is not as it is taken for here.
"""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv

STATUS_KEY = b"__autoscaling_status"
STALE_S = 120.0  # a monitor writes it every few seconds
OURS = ("page-server-", "registry-", "session-")  # how names of our actors begin
CLASSES = ("PageServer", "Registry", "StoreRegistry")
SMALLEST = 1e-6  # of a resource; Ray counts in ten-thousandths


def _state() -> Any:
    return ray._private.state.state


def draining_nodes() -> dict[str, float]:
    """The nodes that Ray drains: no new task or actor comes to them.

    Returns:
        Node id -> when it may be gone, in s since the epoch of Unix; infinite: nobody has said.

    Raises:
        Exception: Ray does not say.
    """
    deadlines_ms: dict[str, int] = _state().get_draining_nodes()
    return {node: ms / 1000 if ms else math.inf for node, ms in deadlines_ms.items()}


def free_cpus() -> dict[str, float]:
    """
    Returns:
        Node id -> its CPUs that no task, actor or placement group has.

    Raises:
        Exception: Ray does not say.
    """
    available = _state().available_resources_per_node()
    return {node: float(resources.get("CPU", 0.0)) for node, resources in available.items()}


def is_autoscaled() -> bool:
    """Whether an autoscaler runs, and has started nodes. Each version of it says so in its own way.
    A cluster that nobody scales has a monitor too, which calls each node a type of its own.

    Raises:
        Exception: Ray does not say.
    """
    status = json.loads(internal_kv._internal_kv_get(STATUS_KEY) or "{}")
    report = status.get("autoscaler_report") or {}
    types = [*(report.get("active_nodes") or {}), *(report.get("idle_nodes") or {})]
    if time.time() - status.get("time", 0.0) < STALE_S and any(map(_is_scaled, types)):
        return True
    reply = autoscaler_pb2.GetClusterStatusReply()
    reply.ParseFromString(ray._private.worker.global_worker.gcs_client.get_cluster_status())
    if not reply.autoscaling_state.last_seen_cluster_resource_state_version:
        return False
    return any(_is_scaled(n.ray_node_type_name) for n in reply.cluster_resource_state.node_states)


def _is_scaled(node_type: str) -> bool:
    return not re.fullmatch(r"(|node_[0-9a-f]+)", node_type)


def nodes_in_use() -> set[str]:
    """The living nodes on which tasks, actors or objects have resources, or actors run that are
    not ours. A task without resources, such as `num_cpus=0`, is not seen.

    Raises:
        Exception: Ray does not say.
    """
    available = _state().available_resources_per_node()
    return {
        node
        for node, total in _state().total_resources_per_node().items()
        if any(n - available.get(node, {}).get(name, 0.0) > SMALLEST for name, n in total.items())
    } | {
        actor["Address"]["NodeID"]
        for actor in _state().actor_table(None, None, "ALIVE").values()
        if not (actor["Name"].startswith(OURS) and actor["ActorClassName"] in CLASSES)
    }

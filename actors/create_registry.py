"""How a driver makes its session's registry: which kind it is, and how Ray is to run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray._protocol import names
from clamor_ray._protocol.handshake import SECRET_BYTES
from clamor_ray._protocol.messages import ServerConfig
from clamor_ray.actors.process import journals
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.store.store_registry import StoreRegistry
from clamor_ray.actors.window.address_claims import Range

hold_journal = journals.hold_journal


def create_registry(
    job_scope: str, node_id: str, config: ServerConfig, avoid: Sequence[Range] = ()
) -> Any:
    """Makes the job's registry on a node, or finds the one that is there.

    The caller's process owns the registry of a session without a name: call it in the driver.

    Args:
        job_scope: 12 hex digits that separate jobs.
        node_id: Ray's hex id of the driver's node.
        config: What page servers are told.
        avoid: Addresses that this process still uses of sessions of other clusters.

    Returns:
        The actor's handle. Calls may be made at once; they wait for its start.
    """
    return (
        ray.remote(StoreRegistry if config.store else Registry)
        .options(
            name=names.registry_name(job_scope, config.session_name),
            namespace=names.NAMESPACE,
            get_if_exists=True,
            lifetime="detached" if config.session_name else None,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
            enable_task_events=False,  # a tenth of each call; and the user's tasks are shown alone
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(config, os.urandom(SECRET_BYTES), tuple(avoid))
    )

"""Where a process is, which sessions its cluster has, and how one starts. See
`_session/process_sessions.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.config import Config
from clamor_ray._version import __version__


@dataclass(frozen=True)
class InitResult:
    """What `clamor.init()` found.

    Args:
        trap: in force in this process: "uffd" (system calls on absent blocks work), "uffd-user"
            or "sigsegv" (they fail with EFAULT; `clamor.prefetch` first).
        node_id: Ray's hex id of this node.
        server_version: library version of this node's page server.
        scope: names the session in sockets and actors.
        trap_reason: why it is not "uffd": what the kernel said, or that CLAMOR_TRAP asks for it;
            "" for "uffd".

    Example:
        >>> found = clamor.init()
        >>> found.server_version == clamor.__version__
        True
    """

    trap: str
    node_id: str
    server_version: str
    scope: str
    trap_reason: str = ""


def in_worker() -> bool:
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def check_not_ray_client() -> None:
    # Importing the client costs a gRPC stack: only ask where it is there already.
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        raise errors.RayClientError("This driver is connected through Ray Client (ray://).")


def find_registry(scope: str) -> Any | None:
    try:
        return ray.get_actor(names.registry_name(scope), namespace=names.NAMESPACE)
    except ValueError:
        return None


def job_scope_part() -> str:
    context = ray.get_runtime_context()
    return names.job_part(context.gcs_address, context.get_job_id())


def find_scope_of_job() -> str | None:
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [entry["name"] for entry in named if entry["namespace"] == names.NAMESPACE]
    scopes = names.scopes_of_job(ours, job_scope_part())
    return scopes[-1] if scopes else None


def check_same_settings(now: Config, asked: Config, given: dict[str, Any]) -> None:
    for name in (name for name, value in given.items() if value is not None):
        if getattr(asked, name) != getattr(now, name):
            raise ValueError(
                f"{name}={given[name]!r}, and this session began with {getattr(now, name)!r}; call "
                "clamor.shutdown() before clamor.init() with other settings"
            )


def start_registry(
    config: Config, node_id: str, avoid: Sequence[tuple[int, int]]
) -> tuple[str, Any]:
    """A new session's scope, and its registry. See `create_registry`."""
    from clamor_ray._protocol.messages import ServerConfig
    from clamor_ray.actors.registry.registry import create_registry

    context = ray.get_runtime_context()
    scope = names.new_scope(context.gcs_address, context.get_job_id())
    registry = create_registry(
        scope,
        node_id,
        ServerConfig(
            job_scope=scope,
            library_version=__version__,
            fetch_timeout_s=config.fetch_timeout_s,
            fault_timeout_s=config.fault_timeout_s,
            reattach_s=config.reattach_s,
            orphan_timeout_s=config.orphan_s,
            page_bytes=config.page_bytes,
            control_timeout_s=config.control_timeout_s,
            history_bytes=config.history_bytes,
            history_disk_bytes=config.history_disk_bytes,
            history_directory=config.history_dir,
            sockets_below=config.socket_dir,
            cache_bytes=config.cache_bytes,
            cache_policy=config.cache_policy,
            replication=config.replication,
        ),
        avoid,
    )
    return scope, registry


def hold_journal(scope: str) -> int | None:
    """In the driver. See `registry.hold_journal`."""
    from clamor_ray.actors.registry import registry

    return registry.hold_journal(scope)

"""Where a process is, which sessions its cluster has, and how one starts. See
`_session/process_sessions.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental import internal_kv

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._session.begin.stores import RegistryPlace
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
        session: its name; None where it ends with its driver.
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
    session: str | None = None


def in_worker() -> bool:
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def check_not_ray_client() -> None:
    # Importing the client costs a gRPC stack: only ask where it is there already.
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        raise errors.RayClientError("This driver is connected through Ray Client (ray://).")


def job_scope_part() -> str:
    context = ray.get_runtime_context()
    return names.job_part(context.gcs_address, context.get_job_id())


def find_scope_of_job() -> str | None:
    """The session that this job's driver made, or else the one that it attached to by name."""
    scopes = names.scopes_of_job(ray_state.actor_names(), job_scope_part())
    if scopes:
        return scopes[-1]
    noted = internal_kv._internal_kv_get(_key_of_job(), namespace=names.NAMESPACE.encode())
    return None if noted is None else str(noted, "ascii")


def note_session_of_job(scope: str) -> None:
    """In a driver that has attached to a session by name: its tasks make variables in it."""
    namespace = names.NAMESPACE.encode()
    internal_kv._internal_kv_put(_key_of_job(), scope.encode(), namespace=namespace)


def unnote_session_of_job(scope: str) -> None:
    """In a driver that has left a session: where its tasks would use that one, they do not."""
    namespace = names.NAMESPACE.encode()
    if internal_kv._internal_kv_get(_key_of_job(), namespace=namespace) == scope.encode():
        internal_kv._internal_kv_del(_key_of_job(), namespace=namespace)


def _key_of_job() -> bytes:
    return names.job_key(job_scope_part()).encode()


def task_id() -> str:
    """Of the task that this thread runs; "" where it runs none, or Ray is not connected."""
    return (ray.get_runtime_context().get_task_id() or "") if ray.is_initialized() else ""


def in_plain_task() -> bool:
    return in_worker() and not ray.get_runtime_context().get_actor_id()


def check_same_settings(
    now: Config | ServerConfig, asked: Config, given: Mapping[str, Any]
) -> None:
    session_name = getattr(now, "session_name", "")
    ends = f"session={session_name!r}" if session_name else ""
    for name in (name for name, value in given.items() if value is not None):
        if getattr(asked, name) != getattr(now, name):
            raise ValueError(
                f"{name}={given[name]!r}, and this session began with {getattr(now, name)!r}: "
                f"leave it out, or end the session first with clamor.shutdown({ends})"
            )


def start_registry(
    config: Config,
    node_id: str,
    avoid: Sequence[tuple[int, int]],
    session_name: str = "",
    place: RegistryPlace | None = None,
) -> tuple[str, Any]:
    """A new session's scope, and its registry. See `create_registry`.

    Args:
        config, node_id, avoid: of its maker.
        session_name: "": it ends with this driver.
        place: of its store, where it has one.

    Where a session of that name is made at the same time, the registry may have another scope.
    """
    from clamor_ray.actors.create_registry import create_registry

    context = ray.get_runtime_context()
    if place is not None:
        scope = place.scope
    elif session_name:
        scope = names.new_named_scope(session_name)
    else:
        scope = names.new_scope(context.gcs_address, context.get_job_id())
    registry = create_registry(
        scope,
        node_id if place is None else place.node_id,
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
            spill_directory=config.spill_dir,
            sockets_below=config.socket_dir,
            cache_bytes=config.cache_bytes,
            cache_disk_bytes=config.cache_disk_bytes,
            cache_policy=config.cache_policy,
            replication=config.replication,
            session_name=session_name,
            began_at_s=time.time(),
            idle_node_s=config.idle_node_s,
            repair_bytes_s=config.repair_bytes_s,
            store="" if place is None else place.root,
            store_id="" if place is None else place.store_id,
            has_metrics=config.metrics == "on",
            has_spans=config.spans == "on",
        ),
        avoid,
    )
    return scope, registry


def hold_journal(scope: str) -> int | None:
    """In the driver. See `journals.hold_journal`."""
    from clamor_ray.actors import create_registry

    return create_registry.hold_journal(scope)

"""`clamor.init()`: attaches a process to its cluster, and starts a session in a driver. Its end:
`_session/shutdown.py`. What lies between: `_session/process_sessions.py`.
"""

from __future__ import annotations

import atexit
import os
import warnings
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._errors.base import level_of_caller
from clamor_ray._objects import memory
from clamor_ray._protocol.config import Config
from clamor_ray._session import end_hooks, named_sessions, process_sessions, shutdown
from clamor_ray._session.begin import starting, stores, tokens
from clamor_ray._session.begin.starting import InitResult
from clamor_ray._session.session import Session
from clamor_ray._session.spawned import SpawnedSession


def init(
    address: str | None = None,
    *,
    session: str | None = None,
    store: str | os.PathLike[str] | None = None,
    lifetime: str | None = None,
    namespace: str | None = None,
    cache_bytes: int | str | None = None,
    cache_disk_bytes: int | str | None = None,
    cache_policy: str | None = None,
    replication: str | None = None,
    page_bytes: int | str | None = None,
) -> InitResult:
    """Attaches this program to its Ray cluster and starts a session of global variables.

    Where Ray is not connected yet, connects it: to `address`, else to `RAY_ADDRESS`, else to a
    cluster that runs on this machine or a new local one. Calling it again changes nothing. In a
    task or an actor it attaches to the session of the driver. A process that Ray did not start, and
    that reads what its parent passed, becomes a driver of its own by it, and still reads that.

    Args:
        address: as `ray.init`'s; ignored where Ray is connected already.
        session: name of a session that outlives its driver. Any process of the cluster attaches to
            it by the name: another driver, a task, an actor, a replica of Ray Serve. What this
            process and its tasks make is of it (of a task that is no actor's: what that task
            makes). None: a session that ends with this driver.
        lifetime: "detached" makes the session of that name where there is none, as the lifetime of
            Ray's detached actors. It lasts until `clamor.shutdown(session=...)`, or until the node
            is lost on which it was made.
        store: a directory on each node, in which the session outlives its cluster: what was
            committed is there after a crash of all nodes, and `init` with the same store and
            session has it again, at the same addresses, in this cluster or another one. Where there
            is no such session it is made, and `lifetime` need not be said. It is made where it is
            absent; what it is in must be there. It may be on a disk that nodes share. See
            docs/store.md.
        namespace: as `ray.init`'s; ours is always "clamor".
        cache_bytes: budget of each node's cached blocks, as a number or as in "4GiB"; homes do
            not count. 0: a quarter of what each node has.
        cache_disk_bytes: how much of what was evicted from there each node keeps on its disk, in
            CLAMOR_SPILL_DIR. It comes back from there where that is faster than from another node.
            0: nothing.
        cache_policy: which cached blocks go first: sieve, fifo, lru, lfu, random.
        replication: whom a busy home sends askers to: "p2c" (of two nodes that have the block, the
            one with less to send), "random" or "off".
        page_bytes: what a fault fetches, a power of two from 4 KiB to 8 MiB; 0: by use.
            These five are settings of the session, and come before CLAMOR_CACHE_BYTES,
            CLAMOR_CACHE_DISK_BYTES, CLAMOR_CACHE_POLICY, CLAMOR_REPLICATION and
            CLAMOR_PAGE_BYTES. In a task or an actor they change nothing, but those of a session
            with a name must be the same.

    Returns:
        The trap in force, this node's id and the version of its page server.

    Raises:
        UnsupportedPlatformError: Not 64-bit Linux.
        RayClientError: Connected through `ray://`; use `ray job submit`.
        DeniedError: The cluster refuses this process's token, or this user.
        ServerUnavailableError, VersionMismatchError: This node's page server does not start.
        TrapUnavailableError: The kernel refuses the trap that CLAMOR_TRAP asks for.
        NoSuchSessionError: No session has that name, and `lifetime` does not ask for one.
        ValueError: A setting makes no sense, or is not that of the session that there is already;
            or this driver has made a session, and asks for another one by name; or there is a store
            without a session, or another one than the session has. Nothing was started.
        StoreInUseError: Another cluster has the store open.
        StoreIncompleteError: Nodes have parts of the store, and none has the registry's.
        StoreAccessError, StoreFormatError, StoreDamagedError: The store is another user's, or
            cannot be written; a newer version has written it; it is damaged.
        AddressClashError: Another session of this cluster has addresses of the store's variables.
        CacheBudgetError: This node has less memory than `cache_bytes`. (A node that has less and
            joins later raises it in the first task there that uses a global variable.)

    Warns:
        ClamorWarning: The cache and the history of this node leave nothing of its memory, or of its
            container's limit. (Other nodes log that.)

    Example:
        >>> clamor.init().trap in ("uffd", "uffd-user", "sigsegv")
        True
    """
    process_sessions._check_platform()
    named_sessions.check_arguments(session, lifetime)
    stored_in = stores.check_arguments(store, session)
    if address is not None and address.startswith("ray://"):
        raise errors.RayClientError(f"{address} is a Ray Client address.")
    starting.check_not_ray_client()
    settings = {
        "cache_bytes": cache_bytes,
        "cache_disk_bytes": cache_disk_bytes,
        "cache_policy": cache_policy,
        "replication": replication,
        "page_bytes": page_bytes,
    }
    config = Config.from_env(None, **settings)
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS", "").startswith("ray://") and address is None:
            raise errors.RayClientError("RAY_ADDRESS is a Ray Client address.")
        tokens.check_token_before(address)
        ray.init(address=address, namespace=namespace)
    with process_sessions._lock:
        for part in process_sessions.sessions():
            if not part.is_here:  # ray.shutdown() took the cluster from under it
                process_sessions._leave(part)
                shutdown.retire(part, told_s=0.5)
            elif part._has_ended():
                process_sessions._forget(part)
        if session is None:
            part = _part_in_own(config, settings)
        else:
            part = named_sessions.attach(
                session,
                is_made=lifetime is not None or bool(stored_in),
                config=config,
                given=settings,
                avoid=_still_used(),
                store=stored_in,
            )
        try:
            info = part.ensure_server()
            if part.owner:
                part.hold_journal()
            trap = part.client.trap
            reason = part.client.trap_reason
        except BaseException:
            if part not in (*process_sessions.sessions(), *process_sessions._over):
                shutdown.end(part)
            raise
        if session is not None:
            named_sessions.bind(part, session)
        elif part not in process_sessions.sessions():
            process_sessions._add(part)
        if part.in_driver:
            _end_with_process()
            _warn_of_budget(part)
    if trap != "uffd" and not reason:
        reason = f"CLAMOR_TRAP={part.config.trap} asks for it"
    return InitResult(
        trap=trap,
        node_id=part.node_id,
        server_version=info.library_version,
        scope=part.scope,
        trap_reason=reason,
        session=part.name,
    )


def _part_in_own(config: Config, settings: dict[str, Any]) -> Session:
    """The session of this driver, which is made where there is none; in a worker, of its job."""
    part = process_sessions._current
    if isinstance(part, SpawnedSession):
        part = None  # it only reads; it goes on doing that beside the one made here
    if starting.in_worker():
        return process_sessions._attach(None)
    if part is None:
        return _make_session(config)
    if part.owner:
        starting.check_same_settings(part.config, config, settings)
    return part


def _warn_of_budget(part: Session) -> None:
    """Other nodes' page servers log the same."""
    has_bytes, config = memory.memory_bytes(), part.config
    cache_bytes = memory.cache_budget(config.cache_bytes, has_bytes, part.node_id)
    trouble = memory.budget_trouble(has_bytes, cache_bytes, config.history_bytes)
    if trouble is not None:
        warnings.warn(trouble, errors.ClamorWarning, stacklevel=level_of_caller())


def _end_with_process() -> None:
    process_sessions._once("exit", lambda: atexit.register(shutdown.end_all, exiting=True))
    process_sessions._once("ray.shutdown", shutdown.end_before_ray)


def _make_session(config: Config) -> Session:
    node_id = ray.get_runtime_context().get_node_id()
    scope, registry = starting.start_registry(config, node_id, _still_used())
    return Session(scope, registry, node_id, config, owner=True)


def _still_used() -> list[tuple[int, int]]:
    """Addresses of sessions that objects here look into: they ended, or this process only reads
    them. One of this cluster has them for itself anyway; one of another cluster may be given them,
    too."""
    others = (*process_sessions._over, *process_sessions.sessions())
    tables = [*end_hooks.left, *(session.leases for session in others)]
    mappings = [leased.mapping for table in tables for _, leased in table.entries()]
    return [(mapping.address, mapping.address + mapping.length_bytes) for mapping in mappings]

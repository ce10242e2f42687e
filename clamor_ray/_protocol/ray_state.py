"""What Ray knows of nodes and of sessions, and waiting for its answers with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray._private import worker as ray_worker
from ray.experimental import internal_kv

from clamor_ray import errors
from clamor_ray._protocol import names

PING_S = 2.0
ASK_S = 5.0  # a registry for its session's scope
LOCATE_S = 1.0  # an object in a store has a location within milliseconds
LOCATE_PAUSE_S = 0.002
WITH_OWNER_BYTES = 100 << 10  # Ray keeps a result up to this size with its owner, in no store
# What Ray raises of an actor of ours that never comes back: it was killed, or its node is gone.
GONE: Final = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnschedulableError)
# Ray's API without its hooks. Those start a cluster where there is none, and the user's thread may
# have ended Ray just now: these raise then.
get_actor, get, wait, runtime_context = map(
    inspect.unwrap, (ray.get_actor, ray.get, ray.wait, ray.get_runtime_context)
)


class RayletEndedError(errors.SessionEndedError):
    """This process's own raylet has ended, so nothing is known of the session itself."""


async def within(seconds: float, reference: Any) -> Any:
    async def wait() -> Any:
        return await reference

    return await asyncio.wait_for(wait(), seconds)


def noted_address() -> str:
    """The cluster that was started last on this machine, as Ray notes it; it may be gone.

    Returns:
        "": Ray notes none.
    """
    from ray._private import utils  # of the command line alone

    read = getattr(utils, "read_ray_address", None)
    return str((read and read()) or "")


def cluster_ends_with_process() -> bool:
    """Whether this process has started the cluster, so that `ray.shutdown()` ends it."""
    node = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def was_restarted() -> bool:
    """Whether this actor has lived before, in another process."""
    with warnings.catch_warnings():  # Ray's property calls one that Ray calls deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def nodes_of(object_ref: Any) -> list[str]:
    """See `locations_of`."""
    return locations_of([object_ref])[0][0]


def locations_of(object_refs: Sequence[Any]) -> list[tuple[list[str], int]]:
    """The nodes whose stores have Ray objects that are ready, and the objects' bytes.

    Ray can say that a task's result is ready a moment before it knows where that is. So the
    location of a large object is waited for.

    Returns:
        Ray's hex ids for each. Empty: the object is small, or an error, and lies with its owner; or
        it was spilled; or it is lost, and Ray makes it again for who gets it.
    """
    until_s = time.monotonic() + LOCATE_S
    while True:
        said = ray.experimental.get_object_locations(list(object_refs))
        found = [said[each] for each in object_refs]
        if all(map(_is_located, found)) or time.monotonic() >= until_s:
            return [
                (list(known.get("node_ids") or ()), known.get("object_size") or 0)
                for known in found
            ]
        time.sleep(LOCATE_PAUSE_S)


def _is_located(known: Mapping[str, Any]) -> bool:
    n_bytes = known.get("object_size")
    is_small = n_bytes is not None and n_bytes <= WITH_OWNER_BYTES
    # One that was spilled had a location: it is not about to get its first.
    return bool(known.get("node_ids")) or is_small or bool(known.get("did_spill"))


def raylet_is_gone(node_id: str) -> bool:
    """Whether a node's host answers, and nothing listens where its raylet did.

    A raylet never comes back under its node's id. Ray itself counts missed heartbeats, for up to
    half a minute, before it calls such a node dead.
    """
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return _refuses(node["NodeManagerAddress"], node["NodeManagerPort"])
    return False


def check_raylet() -> None:
    """To be called where no answer comes. A raylet ends where its cluster has: a head that is
    started again without its state knows nothing of it. Its workers end with it, and a driver does
    not.

    Raises:
        RayletEndedError: The raylet of this process has ended.
    """
    node = ray_worker.global_worker.node
    if node is None or not node.raylet_socket_name:
        return
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PING_S)
        try:
            sock.connect(node.raylet_socket_name)
        except ConnectionRefusedError:
            pass
        except FileNotFoundError:  # it may be that only its file was removed
            if not _refuses(node.node_ip_address, node.node_manager_port):
                return
        except OSError:  # no answer is no news
            return
        else:
            return
    raise RayletEndedError(
        "This process is cut off from its session: its raylet has ended. Either the cluster was "
        "started again without its state, or Ray on this node has ended; a session with a name may "
        "live on.",
        hint="Call clamor.shutdown(force=True), ray.shutdown() and ray.init(), then clamor.init(), "
        "or clamor.init(session=NAME) for a session with a name. What a store has can be opened "
        "there. Or start the program again.",
    )


def _refuses(host: str, port: int | None) -> bool:
    """Whether a host answers, and nothing listens there. No answer is no news."""
    if not port:
        return False
    try:
        socket.create_connection((host, port), PING_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def raylet_addresses(node_id: str) -> list[tuple[str, int]] | None:
    """Where a node's raylet listens: its node manager, and its object manager.

    Args:
        node_id: Ray's hex id of the node.

    Returns:
        None: Ray says that the node is dead.
    """
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            host = node["NodeManagerAddress"]
            return [(host, node["NodeManagerPort"]), (host, node["ObjectManagerPort"])]
    return None


def actor_names() -> list[str]:
    """Of the actors in our namespace; none, where this process is in no cluster: Ray's own call
    would start one."""
    if not ray.is_initialized():
        return []
    named = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in named if entry["namespace"] == names.NAMESPACE]


def find_registry(scope: str) -> Any | None:
    """The registry of a session; None: it has ended, or is of another cluster."""
    if (registry := _actor(names.registry_name(scope))) is not None:
        return registry
    for name in names.names_of_sessions(actor_names(), scope):
        # One of that name may have ended, and another begun.
        registry = find_named_registry(name)
        if registry is not None and _has_scope(registry, scope):
            return registry
    return None


def find_named_registry(session_name: str) -> Any | None:
    """The registry of the session that has the name; None: there is none."""
    return _actor(names.registry_name("", session_name))


def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=names.NAMESPACE)
    except ValueError:
        return None


def _has_scope(registry: Any, scope: str) -> bool:
    """Also where it does not answer now: no id of a variable is of two sessions."""
    try:
        return bool(ray.get(registry.scope.remote(), timeout=ASK_S) == scope)
    except GONE:
        return False
    except ray.exceptions.RayError:
        return True


def forget_jobs_of(scope: str) -> None:
    """A session with a name ends: no job's tasks are of it, also of drivers that were killed."""
    namespace = names.NAMESPACE.encode()
    for key in internal_kv._internal_kv_list(names.job_key("").encode(), namespace=namespace):
        if internal_kv._internal_kv_get(key, namespace=namespace) == scope.encode():
            internal_kv._internal_kv_del(key, namespace=namespace)

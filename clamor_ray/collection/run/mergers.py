"""The `AllReduce` actors of a session, one per node: made when they are asked for, found again by
name, and gone with the session.

Any process of the session may ask. Who makes an actor owns it: drivers should be first, because
what a worker has made ends with that worker, and is then made again. (Where one has died, and two
processes ask at the same moment, each may make one: both are whole, and end with the session.)

Ray's own get-or-create is not enough: to a process that still has a handle of an actor that died,
it gives that one again, for ever. So each one made has a name of its own, and Ray's list of names
says which are alive.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._ring.group import RingGroup
from clamor_ray._session import end_hooks
from clamor_ray._session.session import Session
from clamor_ray.actors.allreduce.all_reduce import CONCURRENCY, AllReduce

MOST_TRIES: Final = 5

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, Any]]] = weakref.WeakKeyDictionary()


def name_begins(scope: str, node_id: str = "") -> str:
    """What names of a session's actors, or of a node's, begin with.

    Example:
        >>> name_begins("aaaaaa000001", "0123456789abcdef0123")
        'all-reduce-aaaaaa000001-0123456789abcdef'
    """
    return f"all-reduce-{scope}-{node_id[:16]}"


def _names_alive(scope: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [each["name"] for each in named if each["namespace"] == names.NAMESPACE]
    return sorted(name for name in ours if name.startswith(name_begins(scope)))


def actor_on(session: Any, node_id: str) -> Any:
    """A node's actor; made where there is none. Does not wait for its process: calls do.

    Args:
        session: this process's.
        node_id: Ray's hex id of a node that is alive.

    Raises:
        ServerUnavailableError: Ray makes none, or the one that is there is always just ending.
    """
    with _lock:
        known = _of(session)
        if node_id not in known:
            known[node_id] = _find_or_make(session.scope, node_id)
        return known[node_id][1]


def all(session: Any) -> dict[str, Any]:
    """Actors by node, of those that this process knows: `checked` before, they are alive."""
    with _lock:
        return {node_id: handle for node_id, (_, handle) in _of(session).items()}


def checked(session: Any) -> None:
    """Forgets actors that Ray says are dead. One question, to Ray's control service."""
    with _lock:
        known = _of(session)
        if not known:
            return
        alive = _names_alive(session.scope)
        for node_id, (name, _) in list(known.items()):
            if name not in alive:
                del known[node_id]


def forget(session: Any, node_id: str, handle: Any, *, end: bool = False) -> None:
    """This one is lost: the next call for the node's actor gets another.

    Args:
        end: it may be alive, and does not answer: it is killed.
    """
    with _lock:
        known = _of(session)
        if node_id in known and known[node_id][1] is handle:
            del known[node_id]
    if end:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(handle)


def _of(session: Any) -> dict[str, tuple[str, Any]]:
    """(name, handle) by node."""
    return _known.setdefault(session, {})


def _session_ends(session: Session) -> None:
    if not session.is_ending or (session.owner and session not in _known):
        return
    with contextlib.suppress(RayError):
        for name in _names_alive(session.scope):
            with contextlib.suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(name, namespace=names.NAMESPACE))


end_hooks.at_end.append(_session_ends)


def _find_or_make(scope: str, node_id: str) -> tuple[str, Any]:
    begins = name_begins(scope, node_id)
    why: Exception | None = None
    for _ in range(MOST_TRIES):
        try:
            for name in _names_alive(scope):
                if name.startswith(begins):
                    return name, ray.get_actor(name, namespace=names.NAMESPACE)
            name = f"{begins}-{secrets.token_hex(4)}"
            return name, _make(scope, node_id, name)
        except (RayError, ValueError) as failure:  # ValueError: it has ended meanwhile
            why = failure
    raise errors.ServerUnavailableError(
        f"The AllReduce actor of node {node_id} cannot be made: {why}",
        hint="Is the node alive? Try again.",
    ) from why


def _make(scope: str, node_id: str, name: str) -> Any:
    return (
        ray.remote(concurrency_groups=CONCURRENCY)(AllReduce)
        .options(
            name=name,
            namespace=names.NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,  # as of our other actors
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(scope, RingGroup)
    )

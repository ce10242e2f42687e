"""Sessions that outlive their drivers: found by name, listed, and ended by name.

Such a session's registry is a detached actor of that name, so Ray sees to it that there is one. A
process that attaches to it does not own it: its end, and `clamor.shutdown()`, leave it as it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import SessionReport
from clamor_ray._protocol.rpc import await_rpc
from clamor_ray._session import process_sessions
from clamor_ray._session.begin import starting, stores
from clamor_ray._session.session import Session

ENDING_S: Final = 10.0  # that one of the name may take to be gone, before the next begins
LIST_S: Final = 5.0


@dataclass(frozen=True)
class SessionInfo:
    """A session of the cluster.

    Args:
        name: that `clamor.init(session=...)` finds it by; None where it ends with its driver.
        scope: names it in sockets, actors and logs.
        began_at_s: when it began, in seconds since 1970.
        n_variables: how many variables it has, without those that travel inside their references.
        nbytes: their size, whole blocks.
        error: why the session did not say the rest, which is zeros then; "" where it did.

    Example:
        >>> found = clamor.init()
        >>> [info.name for info in clamor.sessions() if info.scope == found.scope]
        [None]
    """

    name: str | None
    scope: str
    began_at_s: float = 0.0
    n_variables: int = 0
    nbytes: int = 0
    error: str = ""


def check_arguments(session: str | None, lifetime: str | None) -> None:
    """Of `clamor.init`.

    Raises:
        TypeError, ValueError: They make no sense.
    """
    if session is not None:
        names.check_name(session, "session")
    if lifetime not in (None, "detached"):
        raise ValueError(f"lifetime is 'detached' or None, not {lifetime!r}")
    if lifetime is not None and session is None:
        raise ValueError(
            "a detached session has a name: clamor.init(session='...', lifetime='detached')"
        )


def attach(
    name: str,
    *,
    is_made: bool,
    config: Config,
    given: Mapping[str, Any],
    avoid: Sequence[tuple[int, int]] = (),
    store: str = "",
) -> Session:
    """This process's part in the session of that name. Under the lock of `process_sessions`.

    Args:
        name: of the session.
        is_made: where there is none it is made.
        config: this process's settings; those of a session that is made.
        given: settings that the program has given.
        avoid: see `create_registry`.
        store: absolute path of the store that it must have; "": it may have any, and one that is
            made has none.

    Raises:
        NoSuchSessionError: There is none.
        ValueError: It has other settings, or another store, or this process has made a session of
            its own.
        StoreError, AddressClashError: The store cannot be opened.
    """
    own = process_sessions.attached()
    if own is not None and own.owner:
        raise ValueError(
            "this driver has a session already, which ends with it: call clamor.shutdown() before "
            f"clamor.init(session={name!r})"
        )
    registry, report = _find(name, is_made, config, avoid, store)
    if store:
        stores.check_same(report.config.store, stores.root_of(store, name), name)
    starting.check_same_settings(report.config, config, given)
    scope = report.config.job_scope
    found = process_sessions.of_scope(scope)
    if found is None:
        node_id = ray.get_runtime_context().get_node_id()
        found = Session(scope, registry, node_id, config, owner=False)
    return found


def bind(session: Session, name: str) -> None:
    """What this process makes is of this session from now on; of a plain task, what that makes.
    Under the lock of `process_sessions`."""
    session.name = name
    session.of_job = True
    session.bound_task = starting.task_id() if starting.in_plain_task() else ""
    process_sessions._add(session)
    if session.in_driver:
        starting.note_session_of_job(session.scope)


def _find(
    name: str,
    is_made: bool,
    config: Config,
    avoid: Sequence[tuple[int, int]],
    store: str = "",
) -> tuple[Any, SessionReport]:
    """The registry of that name, and what it says. One that is about to end is waited for, and one
    that cannot open its store is ended."""
    deadline = time.monotonic() + ENDING_S
    is_made_here = False
    while True:
        registry = ray_state.find_named_registry(name)
        if registry is None and not is_made:
            raise errors.NoSuchSessionError(f"No session of this cluster is named {name!r}.")
        if registry is None:
            node_id = ray.get_runtime_context().get_node_id()
            place = stores.find(store, name) if store else None
            _, registry = starting.start_registry(config, node_id, avoid, name, place)
            is_made_here = place is not None
        try:
            # Of the one that was first, where two processes have made it.
            report: SessionReport = await_rpc(registry.report.remote(), config.control_timeout_s)
            return registry, report
        except errors.ServerUnavailableError:  # also where it is gone: then there is none
            if time.monotonic() >= deadline:
                raise
        except errors.ClosedError:  # whoever ends it is about to kill it, or was killed before
            if time.monotonic() >= deadline:
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(registry)
                deadline += ENDING_S
        except errors.WaitTimeoutError:
            raise
        except errors.ClamorError as error:
            if is_made_here or isinstance(error, errors.StoreError):  # it has not opened its store
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(registry)
            raise
        time.sleep(0.1)


def sessions() -> list[SessionInfo]:
    """The sessions of the cluster, also those of other jobs.

    Returns:
        Those with a name first, by name.

    Raises:
        NotInitializedError: Ray is not connected: call `ray.init()` or `clamor.init()`.

    Example:
        >>> clamor.init().scope in [info.scope for info in clamor.sessions()]
        True
    """
    _check_connected()
    found: dict[Any, SessionInfo] = {}
    every = ray_state.actor_names()
    for name in names.names_of_sessions(every):
        if (registry := ray_state.find_named_registry(name)) is not None:
            found[registry.report.remote()] = SessionInfo(name, "")
    for scope in names.scopes(every):
        if (registry := ray_state.find_registry(scope)) is not None:
            found[registry.report.remote()] = SessionInfo(None, scope)
    if found:
        ray.wait(list(found), num_returns=len(found), timeout=LIST_S)
    listed = [_said(info, answer) for answer, info in found.items()]
    return sorted(
        (info for info in listed if info is not None),
        key=lambda info: (info.name is None, info.name or "", info.scope),
    )


def _said(info: SessionInfo, answer: Any) -> SessionInfo | None:
    """What a session has said; None: it has ended meanwhile."""
    try:
        report: SessionReport = await_rpc(answer, 0.1, owner=False)
    except ray_state.RayletEndedError:  # which says nothing of the session
        text = (
            "What it has is not known: the raylet of this process has ended. Ask on another node, "
            "or after ray.shutdown() and ray.init()."
        )
        return SessionInfo(info.name, info.scope, error=text)
    except (errors.SessionEndedError, errors.ClosedError):
        return None
    except errors.WaitTimeoutError:
        text = f"Its registry did not answer within {LIST_S:g} s."
        return SessionInfo(info.name, info.scope, error=text)
    except errors.ClamorError as error:
        return SessionInfo(info.name, info.scope, error=error.message)
    return SessionInfo(
        name=info.name,
        scope=report.config.job_scope,
        began_at_s=report.config.began_at_s,
        n_variables=report.n_variables,
        nbytes=report.nbytes,
    )


def _check_connected() -> None:
    if not ray.is_initialized():
        raise errors.NotInitializedError(
            "This process is not connected to a cluster.",
            hint="Call ray.init() or clamor.init() first.",
        )


def part_in(name: str) -> Session | None:
    """This process's part in the session of that name, which is about to be ended; None: it did not
    answer, and was killed. Under the lock of `process_sessions`.

    Raises:
        NoSuchSessionError: There is none.
    """
    _check_connected()
    config = Config.from_env()
    try:
        registry, report = _find(name, False, config, ())
    except (errors.WaitTimeoutError, errors.ServerUnavailableError):
        hung = ray_state.find_named_registry(name)
        if hung is not None:  # its page servers end when it is gone
            with contextlib.suppress(RayError, ValueError):
                ray.kill(hung)
        return None
    scope = report.config.job_scope
    session = process_sessions.of_scope(scope)
    if session is None or session._pid != os.getpid():
        node_id = ray.get_runtime_context().get_node_id()
        return Session(scope, registry, node_id, config, owner=False)
    return session

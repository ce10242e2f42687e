"""Which sessions this process is attached to: `session.py` is its part in one.

A driver makes a session with `init`, or attaches to one by name (`named_sessions.py`). Any process
of the cluster finds one when it first needs it: by the scope of the reference that arrived, or (a
worker) by its job. It may use several at once: no two sessions of a cluster have an address or an
id in common (`actors/window/address_claims.py`). What a worker makes is of its own job's session,
where that has one.

Locks: `_lock` guards which sessions there are. It is never taken under `Session._client_lock`, and
finalizers hold neither.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.config import Config
from clamor_ray._read import opener
from clamor_ray._read.lease import Leased
from clamor_ray._session import end_hooks, spawned
from clamor_ray._session.begin import starting
from clamor_ray._session.begin.announced import announce
from clamor_ray._session.session import Session

_T = TypeVar("_T")

_OUTLIVES = (
    "A detached actor or a Serve app that outlives its driver has no session to make variables in. "
    "It can read and update those of any driver that runs: pass it their references. Or make a "
    "session that outlives its driver, and attach to it by name: "
    "clamor.init(session='...', lifetime='detached')."
)


# ------------------------------------------------------------------ where we are


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        raise errors.UnsupportedPlatformError(f"This is {sys.platform}, not Linux.")
    if sys.maxsize < 1 << 40:
        raise errors.UnsupportedPlatformError("This is a 32-bit process.")


# ------------------------------------------------------------------ which one is ours

_lock = threading.RLock()
_current: Session | None = None  # what this process makes is of this one
_others: dict[str, Session] = {}  # what else it is attached to, by scope; replaced, not changed
_over: list[Session] = []  # have ended, or this process has left; something looks into their memory
_ended: Session | None = None  # that this process made variables in, and that others have ended
_sought = False  # the job's own session, since it was last attached to another's
_noted: tuple[str, Session] | None = None  # a task, and what its driver is attached to by name
_hooks: set[str] = set()


def _once(name: str, register: Callable[[], object]) -> None:
    if name not in _hooks:
        _hooks.add(name)
        register()


def _register_fork_hook() -> None:
    _once(
        "fork",
        lambda: os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child),
    )


_was_here = True


def _before_fork() -> None:
    # In the child Ray must not be asked: it has locks that other threads may hold now.
    global _was_here
    _was_here = all(session.is_here for session in sessions())


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for session in (*sessions(), *_over):
        session.owner = False  # the end of a child is not the end of the session
        try:
            session.after_fork(_was_here)
        except errors.ClamorError as error:
            # The maps it could not have are guards now; a touch of one says so.
            os.write(2, f"clamor: {error}\n".encode())


def _leave(session: Session) -> None:
    """Under the lock: it is none of this process's sessions any more. Of those that are left, what
    this process makes is of one that it has attached to by name, or of none."""
    global _current, _others, _noted
    left = [other for other in sessions() if other is not session]
    best = _best(left)
    _current = best if best is not None and (best is _current or best.name is not None) else None
    _others = {other.scope: other for other in left if other is not _current}
    if _noted is not None and _noted[1] is session:
        _noted = None


def _forget(session: Session) -> None:
    """It has ended. It is closed when nothing looks into its memory: what is here of it is right,
    and other threads may be at it."""
    global _ended
    with _lock:
        end_hooks.scopes.add(session.scope)
        if session in sessions():
            if session is _current:
                _ended = session
            _leave(session)
            _over.append(session)
        _close_over()


def of_scope(scope: str) -> Session | None:
    """Under the lock: this process's part in that session. It may have left it, and still have its
    memory mapped: `_add` takes it back."""
    parts = (*sessions(), *_over)
    return next((part for part in parts if part.scope == scope and not part.was_told), None)


def _close_over() -> None:
    for session in list(_over):
        if len(session.leases) == 0:
            _over.remove(session)
            session.close()


def attached() -> Session | None:
    """The session that this process makes variables in, where it has one already."""
    return _current


def sessions() -> tuple[Session, ...]:
    """All that this process is attached to."""
    current, others = _current, _others
    if not others:
        return () if current is None else (current,)
    first = () if current is None else (current,)
    return (*first, *(other for other in others.values() if other is not current))


def at_address(address: int) -> tuple[Session, Leased] | None:
    """What lies there, and of which session; None where it is nothing of ours."""
    for session in sessions():
        if (leased := session.leases.at(address)) is not None:
            return session, leased
    return None


def current(scope: str | None = None) -> Session:
    """This process's session; in a worker, attaches to it first.

    Args:
        scope: of the reference that is to be opened; None for the session of the job.

    Raises:
        NotInitializedError: There is none.
        SessionMismatchError: It is another than the reference's.
    """
    session = _known(scope)
    if session is not None:
        if (session.owner or session.in_driver) and not session.is_here:
            raise errors.NotInitializedError(
                "ray.shutdown() took the cluster from under the session."
            )
        if session.owner or not session.was_told:
            return session
        _forget(session)
    with _lock:
        return _attach(scope)


def with_current(make: Callable[[Session], _T]) -> _T:
    """What `make` makes in this process's session.

    A worker may still be attached to a session that its driver has ended meanwhile: a page server
    that was killed sends no message, and asking the registry before each call would double what
    small variables cost. Then the first call fails, and the session that there is now is attached
    to.
    """
    session = current()
    try:
        return make(session)
    except ray_state.RayletEndedError:
        raise
    except (errors.ServerUnavailableError, errors.SessionEndedError):
        ray_state.check_raylet()  # without one Ray may not answer what is asked next
        if not session._has_ended():
            raise
    _forget(session)
    return make(current())


def _known(scope: str | None) -> Session | None:
    """The session of that scope, or the one to make variables in, if no other must be sought."""
    session = _current
    if session is not None and session.bound_task and _in_other_task(session.bound_task):
        _unbind(session)
        session = _current
    if scope is not None:
        return session if session is not None and session.scope == scope else _others.get(scope)
    if session is not None and session.of_job:
        return session
    if _noted is not None and _noted[0] == starting.task_id():  # who moved on says so to new tasks
        return _noted[1]
    return session if _sought else None


def _in_other_task(task_id: str) -> bool:
    """Of plain tasks, which run on the main thread; others have no ids that last."""
    return threading.current_thread() is threading.main_thread() and task_id != starting.task_id()


def _unbind(session: Session) -> None:
    """The task has ended that had attached to it by name: what later ones make is of their job."""
    with _lock:
        if session.bound_task:
            session.bound_task, session.name = "", None
            session.of_job = session.scope.startswith(starting.job_scope_part())
            _add(session)


def _attach(scope: str | None) -> Session:
    global _sought, _noted
    known = _known(scope)
    if known is not None:
        return known
    session = _current
    if session is not None and session._pid != os.getpid():
        end_hooks.raise_mismatch(scope or "?")
    if not ray.is_initialized():
        _add(alone := spawned.session_of(scope, session))
        return alone
    starting.check_not_ray_client()
    in_worker = starting.in_worker()
    if not in_worker and session is None and _ended is not None:
        ray_state.check_raylet()  # then init() fails, and the session may live on
        raise errors.SessionEndedError(
            f"Session {_ended.name or _ended.scope} has ended: another process has called "
            "clamor.shutdown(session=...), or the node of its registry is lost.",
            hint="Call clamor.init() again; what was put in it is gone.",
        )
    if not in_worker and (session is None or not session.is_here):
        raise errors.NotInitializedError("There is no clamor session in this process.")
    wanted = scope if scope is not None else starting.find_scope_of_job()
    known = None if wanted is None else of_scope(wanted)
    if known is not None and known in sessions():
        _noted = (starting.task_id(), known)
        return known
    registry = ray_state.find_registry(wanted) if wanted is not None else None
    if wanted is None or registry is None:
        if scope is not None:
            end_hooks.raise_mismatch(scope)
        if session is not None:  # another job's: there is none of our own
            _sought = True
            return session
        # Of its job, or of another: a replica of Serve is of the controller's job.
        if end_hooks.scopes:
            of_job = any(scope.startswith(starting.job_scope_part()) for scope in end_hooks.scopes)
            which = "of this process's job" if of_job else "that this process used"
            raise errors.SessionEndedError(
                f"The session {which} has ended: its driver has, or called clamor.shutdown().",
                hint=_OUTLIVES,
            )
        raise errors.NotInitializedError(
            "No driver of this job has a clamor session.",
            hint="Call clamor.init() in the driver before its tasks use global variables. "
            + _OUTLIVES,
        )
    _check_platform()
    node_id = ray.get_runtime_context().get_node_id()
    found = known or Session(wanted, registry, node_id, Config.from_env(), owner=False)
    _add(found)
    if scope is None and not found.of_job:
        _noted = (starting.task_id(), found)
    announce(node_id, found.config.socket_dir)
    return found


def _add(found: Session) -> None:
    """Under the lock: one more session, or one whose rank has changed. What this process makes is
    of the one that it made, the one that it has attached to by name last, the newest of its job, or
    else the newest. Others look at any moment, without the lock: none is left out meanwhile."""
    global _current, _others, _sought, _ended
    _sought = False
    _ended = None
    _register_fork_hook()
    if found in _over:
        _over.remove(found)
        found.come_back()
    before = _current
    parts = [*(part for part in sessions() if part is not found), found]
    if before is not None and before is not found and _rank(before) == _rank(found) == 1:
        end_hooks.scopes.add(before.scope)  # a driver has one at a time
        parts.remove(before)
        _over.append(before)
    _others = {part.scope: part for part in parts}
    _current = _best(parts)
    _others = {part.scope: part for part in parts if part is not _current}
    _close_over()


def _best(parts: Sequence[Session]) -> Session | None:
    """The newest of the highest rank."""
    return max(reversed(parts), key=_rank, default=None)


def _rank(session: Session) -> int:
    if session.owner:
        return 3
    return 2 if session.name is not None else int(session.of_job)


end_hooks.when_found.append(_forget)
opener.give(opener.Sessions(current, with_current, sessions, at_address))

"""`clamor.shutdown()`, and what the end of the driver cleans up: the process's own part
(`Session.close`), then by the registry every page server, keeper and journal, then the registry.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._errors.base import level_of_caller
from clamor_ray._protocol import names, ray_state
from clamor_ray._session import end_hooks, named_sessions, process_sessions, span_sender
from clamor_ray._session.begin import starting
from clamor_ray._session.session import Session

SHUTDOWN_S = 30.0
LAST_FETCH_S = 10.0
TOLD_S = 5.0


def end(session: Session, exiting: bool = False, for_all: bool = False) -> None:
    """Ends this process's part; where it made the session, ends that, too.

    Args:
        session: Which this process does not use any more.
        exiting: The process ends: its objects are not looked at any more.
        for_all: The session ends, whoever made it.
    """
    ends = session.is_ending = (session.owner or for_all) and session.is_here
    keeps = session.in_driver or session.name is not None
    if keeps and session.is_here and not ends and not exiting:
        session.goes_on = True  # and so does what this process reads of it
        session.leave()
        session.name = None
        process_sessions._over.append(session)
        return
    outlived = ends and not exiting and len(session.leases) > 0
    try:
        if outlived:
            session.leave()
        else:
            session.close(exiting=exiting)
    finally:  # an interrupt does not leave it half ended
        if ends:
            try:
                with contextlib.suppress(errors.ClamorError):
                    session.rpc.shutdown(timeout_s=SHUTDOWN_S)
            finally:
                with contextlib.suppress(Exception):  # already dead, or the cluster is
                    ray.kill(session.registry)
        n_missing = retire(session) if outlived else 0
    if n_missing:
        warnings.warn(
            f"Blocks of {n_missing} object{'s' if n_missing > 1 else ''} that this process holds "
            "are not on this node, and the session has ended: a touch of one ends the process. "
            "Copy what you need before the session ends.",
            errors.ClamorWarning,
            stacklevel=level_of_caller(),
        )


def _fetch_objects(session: Session, force: bool) -> None:
    """Of a session that is to end: what this process's objects look at comes here first.

    Args:
        session: Whole so far, and so it stays where this raises, or is interrupted.
        force: It ends all the same.

    Raises:
        ObjectsInUseError: Not all of it came.
    """
    if session._pid != os.getpid() or not session.is_here or not len(session.leases):
        return
    fetched = session.fetch_leased(LAST_FETCH_S)
    if force or session.was_told or session._has_ended():
        return
    if not (lacking := sum(session.may_come(*each) for each in fetched)):
        return
    s = "s" if lacking > 1 else ""
    raise errors.ObjectsInUseError(
        f"The session goes on: blocks of {lacking} object{s} that this process holds are not on "
        f"this node: they did not come within {LAST_FETCH_S:g} s, or are more than 4 GiB, or more "
        "than the node's cache has room for."
    )


def retire(session: Session, told_s: float = TOLD_S) -> int:
    """Of a session that has ended: what its objects look at here stays readable, where the page
    server says so in time: that its memory changes no more. Else their addresses die.

    Returns:
        How many mappings that objects look at lack blocks; all of them where their addresses die.
    """
    session.leave()
    n_leased = len(session.leases)
    if n_leased and session.wait_until_told(told_s):
        process_sessions._over.append(session)
        return session.n_not_here()
    session.close()
    return n_leased


def shutdown(*, session: str | None = None, force: bool = False) -> None:
    """Ends the session: stops every page server and forgets every global variable.

    Objects that `get` returned stay readable in the driver: what is absent of them is fetched
    first, for at most 10 s. In a task or an actor it only detaches that process: a touch of such
    an object ends it with a message. Runs by itself when the driver ends; calling it again changes
    nothing. Sessions of other drivers go on. A session that this process attached to by name goes
    on, too, and what `get` returned of it is still read from there.

    Args:
        session: name of a session that is ended, whether this process is attached to it or not,
            and for all processes that are.
        force: end it although objects that this process holds lack blocks: a touch of such a block
            ends the process with a message. At the end of the process it is so by itself.

    Raises:
        NoSuchSessionError: No session of the cluster has that name.
        ObjectsInUseError: Blocks of objects that are still held did not come: they took too long,
            are more than 4 GiB, or more than the node's cache has room for. The session goes on.

    Warns:
        ClamorWarning: With `force`, or where a home or the registry is lost: blocks are missing.

    Example:
        >>> ref = clamor.put(np.arange(1000))
        >>> array = ref.get()
        >>> clamor.shutdown()
        >>> clamor.init().node_id  # another session, without the variables of the first
        '...'
        >>> ref.get()
        Traceback (most recent call last):
        clamor_ray.errors.SessionEndedError: ...
        >>> int(array[7])
        7
    """
    if session is None:
        end_all(force=force)
        return
    names.check_name(session, "session")
    with process_sessions._lock:
        part = named_sessions.part_in(session)
        if part is None:
            return
        _fetch_objects(part, force)
        end_hooks.scopes.add(part.scope)
        process_sessions._leave(part)
        if part in process_sessions._over:
            process_sessions._over.remove(part)
        end(part, for_all=True)
        process_sessions._close_over()
        left = process_sessions.attached()
        if left is not None and left.name is not None and left.in_driver:
            starting.note_session_of_job(left.scope)


def end_before_ray() -> None:
    """From now on `ray.shutdown()` ends the sessions of this driver first: it takes the page
    servers from under what its objects look at, and Ray has no hook for that."""
    shutdown_ray = ray.shutdown

    @functools.wraps(shutdown_ray)
    def shutdown_both(*arguments: Any, **options: Any) -> Any:
        try:
            if ray.is_initialized():
                _end_own()
        finally:
            shutdown_ray(*arguments, **options)

    ray.shutdown = shutdown_both


def _end_own() -> None:
    """Ends the sessions that this driver has made, as Ray will. Others go on without it; where the
    cluster goes too, it only fetches what objects look at."""
    cluster_ends = ray_state.cluster_ends_with_process()
    with process_sessions._lock:
        for session in (*process_sessions.sessions(), *process_sessions._over):
            if cluster_ends and not session.owner and not session.was_told:
                _fetch_objects(session, force=True)
        for session in process_sessions.sessions():
            if session._pid != os.getpid() or not session.is_here:
                continue
            if session.owner:
                _fetch_objects(session, force=True)
                process_sessions._leave(session)
                end_hooks.scopes.add(session.scope)
                end(session)
            elif not cluster_ends:
                span_sender.send_last(session)


def end_all(exiting: bool = False, force: bool = False) -> None:
    """Ends each session that this process is attached to, or was.

    Args:
        exiting: the process ends: see `Session.close`.
        force: see `shutdown`.
    """
    with process_sessions._lock:
        over = list(process_sessions._over)
        failure: BaseException | None = None
        for session in process_sessions.sessions():
            if session.owner and not exiting:
                try:
                    _fetch_objects(session, force)
                except BaseException as raised:  # it stays; the others are ended all the same
                    failure = failure or raised
                    continue
            process_sessions._leave(session)
            end_hooks.scopes.add(session.scope)
            if session._pid == os.getpid():
                try:
                    if session.name is not None and session.in_driver and session.is_here:
                        starting.unnote_session_of_job(session.scope)
                    end(session, exiting)
                except BaseException as raised:  # the others are ended all the same
                    failure = failure or raised
        if exiting:
            for session in over:
                if session._pid == os.getpid():
                    session.close(exiting=True)
            process_sessions._over.clear()
        else:
            process_sessions._close_over()
    if failure is not None:
        raise failure

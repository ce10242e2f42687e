"""`clamor.shutdown()`, and what the end of the driver cleans up: the process's own part
(`Session.close`), then by the registry every page server, keeper and journal, then the registry.
"""

from __future__ import annotations

import contextlib
import os
import warnings

import ray

from clamor_ray import errors
from clamor_ray._session import end_hooks, process_sessions
from clamor_ray._session.session import Session

SHUTDOWN_S = 30.0
LAST_FETCH_S = 10.0
TOLD_S = 5.0


def end(session: Session, exiting: bool = False) -> None:
    """Ends this process's part; where it made the session, ends that, too.

    Args:
        session: Which this process does not use any more.
        exiting: The process ends: its objects are not looked at any more.
    """
    ends = session.owner and session.is_here
    outlived = ends and not exiting and len(session.leases) > 0
    if outlived:
        session.leave()
        _fetch_last(session)
    else:
        session.close(exiting=exiting)
    if not ends:
        return
    with contextlib.suppress(errors.ClamorError):
        session.rpc.shutdown(timeout_s=SHUTDOWN_S)
    with contextlib.suppress(Exception):  # already dead, or the cluster is
        ray.kill(session.registry)
    if outlived:
        retire(session)


def retire(session: Session) -> None:
    """Of a session that has ended: what its objects look at here stays readable, where the page
    server has said that its memory changes no more. Else their addresses die."""
    session.leave()
    if len(session.leases) and session.wait_until_told(TOLD_S):
        process_sessions._over.append(session)
    else:
        session.close()


def _fetch_last(session: Session) -> None:
    n_missing = session.fetch_leased(LAST_FETCH_S)
    if n_missing:
        warnings.warn(
            f"Blocks of {n_missing} object{'s' if n_missing > 1 else ''} that this process holds "
            "are not on this node, and the session ends: a touch of one ends the process. Copy "
            "what you need before clamor.shutdown().",
            errors.ClamorWarning,
            stacklevel=5,  # the caller of shutdown()
        )


def shutdown() -> None:
    """Ends the session: stops every page server and forgets every global variable.

    Objects that `get` returned stay readable in the driver: what is absent of them is fetched
    first, for at most 10 s. In a task or an actor it only detaches that process: a touch of such
    an object ends it with a message. Runs by itself when the driver ends; calling it again changes
    nothing. Sessions of other drivers go on.

    Warns:
        ClamorWarning: Blocks of objects that are still held did not come (they took too long, or
            the object is larger than 4 GiB): a touch of one ends the process with a message.

    Example:
        >>> ref = clamor.put(np.arange(1000))
        >>> array = ref.get()
        >>> clamor.shutdown()
        >>> clamor.init().scope == ref.scope  # another session, without the variables of the first
        False
        >>> int(array[7])
        7
    """
    end_all()


def end_all(exiting: bool = False) -> None:
    """Ends each session that this process is attached to, or was.

    Args:
        exiting: the process ends: see `Session.close`.
    """
    with process_sessions._lock:
        over = list(process_sessions._over)
        for session in process_sessions.sessions():
            process_sessions._leave(session)
            end_hooks.scopes.add(session.scope)
            if session._pid == os.getpid():
                end(session, exiting)
        if exiting:
            for session in over:
                if session._pid == os.getpid():
                    session.close(exiting=True)
            process_sessions._over.clear()
        else:
            process_sessions._close_over()

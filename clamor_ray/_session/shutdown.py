"""`clamor.shutdown()`, and what the end of the driver cleans up: the process's own part
(`Session.close`), then by the registry every page server, keeper and journal, then the registry.
"""

from __future__ import annotations

import contextlib
import os

import ray

from clamor_ray import errors
from clamor_ray._session import end_hooks, process_sessions
from clamor_ray._session.session import Session

SHUTDOWN_S = 30.0


def end(session: Session, exiting: bool = False) -> None:
    """Closes this process's part; where it made the session, ends that, too."""
    session.close(exiting=exiting)
    if not session.owner or not session.is_here:
        return
    with contextlib.suppress(errors.ClamorError):
        session.rpc.shutdown(timeout_s=SHUTDOWN_S)
    with contextlib.suppress(Exception):  # already dead, or the cluster is
        ray.kill(session.registry)


def shutdown() -> None:
    """Ends the session: stops every page server and forgets every global variable.

    Objects that `get` returned must not be used any more: their memory is gone, and a touch of it
    ends the process with a message. Runs by itself when the driver ends; calling it again changes
    nothing. In a task or an actor it only detaches that process. Sessions of other drivers go on.

    Example:
        >>> ref = clamor.put(np.arange(1000))
        >>> clamor.shutdown()
        >>> clamor.init().scope == ref.scope  # another session, without the variables of the first
        False
    """
    end_all()


def end_all(exiting: bool = False) -> None:
    """Ends each session that this process is attached to, or was.

    Args:
        exiting: the process ends: see `Session.close`.
    """
    with process_sessions._lock:
        for session in (*process_sessions.sessions(), *process_sessions._over):
            process_sessions._leave(session)
            end_hooks.scopes.add(session.scope)
            if session._pid == os.getpid():
                end(session, exiting)
        process_sessions._over.clear()

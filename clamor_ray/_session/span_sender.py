"""In: the spans of this process. Out: the page servers of its node have them.

Once a second, where there are new ones, on a thread that begins with the first. Nobody waits for
it, but the end of a session, for a moment. What is not sent when the process dies is lost. Whatever
fails here, spans are lost, and nothing else.

Ray may go at any moment: the user's thread calls `ray.shutdown()`. So it is asked without the hooks
of its API (`ray_state.py`).

Locks: `_lock` is held while something is sent, and while a session ends: Ray is not asked after
that, when it may be gone. `_starting` is held while the thread is made. No other is taken under
them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import RayError

from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.rpc import pack
from clamor_ray._session import end_hooks
from clamor_ray._spans import record

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

logger = logging.getLogger("clamor_ray")

INTERVAL_S: Final = 1.0
LAST_S: Final = 1.0  # that the end of a session waits


@dataclass
class _Known:
    session: weakref.ref[Session]
    is_over: bool = False  # Ray is not asked any more
    server: Any = None  # the page server of this node, once it was found
    last: Any = None  # call to it that has not ended, as far as is known


_wanted = threading.Event()
_lock = threading.Lock()
_starting = threading.Lock()
_known: dict[str, _Known] = {}  # by scope
_thread: threading.Thread | None = None
# What is Ray's is not let go of in a child of fork: that takes locks of Ray's, which other threads
# may have held.
_of_parent: list[dict[str, _Known]] = []


def begin(session: Session) -> None:
    """Its spans are recorded and sent from now on; not where its settings say so, nor in a child of
    the process that has the session, which cannot ask Ray."""
    if session.config.spans == "on" and session.is_of_this_process:
        _known[session.scope] = _Known(weakref.ref(session))
        record.here.begin(session.scope)
        record.here.hand_over(_wake)


def _wake() -> bool:
    """Returns: whether a thread will send what there is."""
    global _thread
    _wanted.set()
    with _starting:
        if _thread is None:
            thread = threading.Thread(target=_send_for_ever, name="clamor-spans", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is room for no more, or the process ends
                return False
            _thread = thread
    return True


def _send_for_ever() -> None:
    pause = threading.Event()
    while True:
        _wanted.wait()
        pause.wait(INTERVAL_S)
        _wanted.clear()
        with _lock:
            for scope, known in list(_known.items()):
                _send(scope, known, may_look=True)


def _send(scope: str, known: _Known, may_look: bool) -> bool:
    """Under the lock. Returns: whether there was something, and it is under way.

    Args:
        may_look: for the page server, which may take as long as Ray's GCS does.
    """
    session = known.session()
    if session is None:
        record.here.end(scope)
        _known.pop(scope, None)
        return False
    try:
        if known.is_over or session.is_ending or not session.is_here:
            return False
        if not _is_free(known):
            _wanted.set()  # the server is busy, or restarts: once more in a second
            return False
        if known.server is None:
            if not may_look:
                return False
            name = names.page_server_name(scope, session.node_id)
            known.server = ray_state.get_actor(name, namespace=names.NAMESPACE)
        spans = record.here.take(scope)
        if not spans or known.is_over:
            return False
        worker = ray_state.runtime_context().get_worker_id()
        process = f"{'driver' if session.in_driver else 'worker'}:{worker}"
        packed = pack(process, os.getpid(), [tuple(each) for each in spans])
        known.last = known.server.note_spans.remote(packed)
    except Exception as failure:  # Ray has any: it goes, or the server was drained
        logger.debug("spans of session %s are lost: %r", scope, failure)
        known.server = known.last = None
        return False
    return True


def _is_free(known: _Known) -> bool:
    """Whether the last call has ended. Of one that failed the server is looked for anew: it has
    gone, and another may be there."""
    if known.last is None:
        return True
    ready, _ = ray_state.wait([known.last], timeout=0)
    if not ready:
        return False
    call, known.last = known.last, None
    try:
        ray_state.get(call)
    except RayError:
        known.server = None
    return True


def _end(session: Session) -> None:
    """What is left goes out before this process leaves a session that goes on."""
    known = _known.get(session.scope)
    if known is None:
        return
    if _lock.acquire(timeout=LAST_S):
        try:
            if session.goes_on and _send(session.scope, known, may_look=False):
                with contextlib.suppress(Exception):
                    ray_state.wait([known.last], timeout=LAST_S)
        finally:
            _lock.release()
    known.is_over = True
    record.here.end(session.scope)
    _known.pop(session.scope, None)


def _after_fork_in_child() -> None:
    global _thread, _lock, _starting, _wanted, _known
    _thread, _lock, _starting = None, threading.Lock(), threading.Lock()
    _wanted = threading.Event()
    _of_parent.append(_known)
    _known = {}


end_hooks.at_end.append(_end)
os.register_at_fork(after_in_child=_after_fork_in_child)

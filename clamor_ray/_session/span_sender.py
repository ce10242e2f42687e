"""In: the spans of this process. Out: the page servers of its node have them.

Once a second, where there are new ones, on a thread that begins with the first. Nobody waits for
it, but who leaves a session that goes on, or Ray: then what there is goes out at once, and that is
waited for, `LAST_S` at most. What is not sent when the process dies is lost. Whatever fails here,
spans are lost, and nothing else.

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
import time
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
LAST_S: Final = 1.0  # that the end of a session, or of Ray, waits


@dataclass
class _Known:
    session: weakref.ref[Session]
    is_over: bool = False  # Ray is not asked any more
    server: Any = None  # the page server of this node, once it was found
    last: Any = None  # call to it that has not ended, as far as is known
    went: threading.Event | None = None  # who leaves waits for it: all there was is under way


_wanted = threading.Event()
_hurry = threading.Event()  # somebody leaves
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
    while True:
        _wanted.wait()
        _hurry.wait(INTERVAL_S)
        _hurry.clear()
        _wanted.clear()
        with _lock:
            for scope, known in list(_known.items()):
                went, known.went = known.went, None
                _send(scope, known, is_last=went is not None)
                if went is not None:
                    went.set()


def _send(scope: str, known: _Known, is_last: bool = False) -> None:
    """Under the lock. It may take as long as Ray's GCS does.

    Args:
        is_last: It is now or never.
    """
    session = known.session()
    if session is None:
        record.here.end(scope)
        _known.pop(scope, None)
        return
    try:
        if known.is_over or session.is_ending or not session.is_here:
            return
        if not (_is_free(known) or is_last):
            _wanted.set()  # the server is busy, or restarts: once more in a second
            return
        if known.server is None:
            name = names.page_server_name(scope, session.node_id)
            known.server = ray_state.get_actor(name, namespace=names.NAMESPACE)
        spans = record.here.take(scope)
        if not spans or known.is_over:
            return
        worker = ray_state.runtime_context().get_worker_id()
        process = f"{'driver' if session.in_driver else 'worker'}:{worker}"
        packed = pack(process, os.getpid(), [tuple(each) for each in spans])
        known.last = known.server.note_spans.remote(packed)
    except Exception as failure:  # Ray has any: it goes, or the server was drained
        logger.debug("spans of session %s are lost: %r", scope, failure)
        known.server = known.last = None


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


def send_last(session: Session) -> None:
    """What there is goes out now, before this process leaves a session that goes on, or Ray. Waits
    for `LAST_S` at most, and raises nothing of Ray's.

    The thread does it: it may hang in Ray, and then this does not."""
    known = _known.get(session.scope)
    if known is None or session.is_ending or session.was_told:
        return
    until_s = time.monotonic() + LAST_S
    if record.here.has_some(session.scope):
        known.went = went = threading.Event()
        _hurry.set()
        if not _wake():
            return
        went.wait(LAST_S)
    if known.last is not None and _lock.acquire(timeout=_left_s(until_s)):
        try:
            if known.last is not None:
                with contextlib.suppress(Exception):
                    ray_state.wait([known.last], timeout=_left_s(until_s))
        finally:
            _lock.release()


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())


def _end(session: Session) -> None:
    known = _known.get(session.scope)
    if known is None:
        return
    until_s = time.monotonic() + LAST_S
    send_last(session)
    is_locked = _lock.acquire(timeout=_left_s(until_s))
    known.is_over = True
    if is_locked:
        _lock.release()
    record.here.end(session.scope)
    _known.pop(session.scope, None)


def _after_fork_in_child() -> None:
    global _thread, _lock, _starting, _wanted, _hurry, _known
    _thread, _lock, _starting = None, threading.Lock(), threading.Lock()
    _wanted, _hurry = threading.Event(), threading.Event()
    _of_parent.append(_known)
    _known = {}


end_hooks.at_end.append(_end)
os.register_at_fork(after_in_child=_after_fork_in_child)

"""In: the spans of this process. Out: the page servers of its node have them.

Once a second, where there are new ones, on a thread that begins with the first. Nobody waits for
it, but the end of a session, for a moment. What is not sent when the process dies is lost.

Locks: `_lock` is held while something is sent, and while a session ends: Ray is not asked after
that, when it may be gone. No other is taken under it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import RayError

from clamor_ray._protocol import names
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
    server: Any = None  # the page server of this node, once it was found
    last: Any = None  # call to it


_wanted = threading.Event()
_lock = threading.Lock()
_known: dict[str, _Known] = {}  # by scope
_thread: threading.Thread | None = None
# What is Ray's is not let go of in a child of fork: that takes locks of Ray's, which other threads
# may have held.
_of_parent: list[dict[str, _Known]] = []


def begin(session: Session) -> None:
    """Its spans are sent from now on; none are recorded where its settings say so."""
    record.here.is_on = session.config.spans == "on"
    if record.here.is_on:
        _known[session.scope] = _Known(weakref.ref(session))
        record.here.hand_over(_wake)


def _wake() -> None:
    global _thread
    _wanted.set()
    if _thread is None:
        _thread = threading.Thread(target=_send_for_ever, name="clamor-spans", daemon=True)
        _thread.start()


def _send_for_ever() -> None:
    pause = threading.Event()
    while True:
        _wanted.wait()
        pause.wait(INTERVAL_S)
        _wanted.clear()
        with _lock:
            _send_all()


def _send_all() -> list[Any]:
    """Under the lock. Returns: references of the calls."""
    calls = []
    for scope, spans in record.here.take().items():
        known = _known.get(scope)
        session = known.session() if known is not None else None
        if known is None or session is None or session.is_ending or not session.is_here:
            continue  # nobody wants them
        context = ray.get_runtime_context()
        process = f"{'driver' if session.in_driver else 'worker'}:{context.get_worker_id()}"
        try:
            if known.server is None or _has_failed(known.last):
                name = names.page_server_name(scope, session.node_id)
                known.server = ray.get_actor(name, namespace=names.NAMESPACE)
            packed = pack(process, os.getpid(), [tuple(each) for each in spans])
            known.last = known.server.note_spans.remote(packed)
            calls.append(known.last)
        except (RayError, ValueError) as failure:  # it is drained, or the session ends
            logger.debug("%d spans are lost: %r", len(spans), failure)
            known.server = None
    return calls


def _has_failed(call: Any) -> bool:
    """Whether it has ended with an error: the server is gone, and another may be there."""
    ready, _ = ray.wait([call], timeout=0)
    if not ready:
        return False
    try:
        ray.get(call)
    except RayError:
        return True
    return False


def _end(session: Session) -> None:
    """What is left goes out before this process leaves a session that goes on."""
    if session.scope not in _known or not _lock.acquire(timeout=LAST_S):
        return
    try:
        if session.goes_on and (calls := _send_all()):
            with contextlib.suppress(RayError):
                ray.wait(calls, num_returns=len(calls), timeout=LAST_S)
        _known.pop(session.scope, None)
    finally:
        _lock.release()


def _after_fork_in_child() -> None:
    global _thread, _lock, _wanted, _known
    _thread, _lock, _wanted = None, threading.Lock(), threading.Event()
    _of_parent.append(_known)
    _known = {}


end_hooks.at_end.append(_end)
os.register_at_fork(after_in_child=_after_fork_in_child)

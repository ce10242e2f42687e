"""When members leave a group that nobody uses any more.

A member's connections belong to its process, not to a group object: a group that is passed to each
call of an actor is another object each time. So they are closed

* when the process leaves the session, or its driver ends it;
* when the group that was made is gone, and so are all copies of it in the member's process: whoever
  made it tells the actors, by a method that Ray gives every actor. They wait a while then, for
  calls that were under way.

Safe from any thread, finalizers included: those only put what is to be told into a queue.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import ray

from clamor_ray._ring import members
from clamor_ray._session import end_hooks
from clamor_ray._session.session import Session

if TYPE_CHECKING:
    from clamor_ray._ring.group import AllReduceGroup, RingGroup

LET_GO_S: Final = 10.0  # so often members look whether a group that is gone is still used

_Told = tuple[str, Sequence[Any]]

_here: weakref.WeakSet[RingGroup] = weakref.WeakSet()
_made: dict[str, tuple[str | None, Sequence[Any]]] = {}  # by name: scope, actors
_gone: queue.SimpleQueue[_Told] = queue.SimpleQueue()
_teller: threading.Thread | None = None
_unused: set[str] = set()
_watch: threading.Thread | None = None
_lock = threading.Lock()  # _teller, _watch, _unused


def _after_fork_in_child() -> None:
    global _lock, _gone, _teller, _watch
    _lock = threading.Lock()
    _gone = queue.SimpleQueue()
    _teller = _watch = None
    _unused.clear()
    _made.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def here(group: RingGroup) -> None:
    """A group object, or a copy of one, is in this process."""
    _here.add(group)


# ------------------------------------------------------------------ who made a group


def made(group: AllReduceGroup, actors: Sequence[Any]) -> None:
    """A group was made here, of these actors."""
    global _teller
    _made[group.name] = (group._scope, tuple(actors))
    weakref.finalize(group, _is_gone, group.name).atexit = False
    with _lock:
        if _teller is None or not _teller.is_alive():
            _teller = threading.Thread(target=_tell_all, name="clamor-group-ends", daemon=True)
            _teller.start()


def _is_gone(name: str) -> None:
    found = _made.pop(name, None)
    if found is not None:
        _gone.put((name, found[1]))


def _tell_all() -> None:
    while True:
        name, actors = _gone.get()
        _tell(actors, _let_go, name)


def _tell(actors: Sequence[Any], what: Any, name: str) -> None:
    for actor in actors:
        # One that is dead has no connections, and neither has a cluster that is gone.
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                actor.__ray_call__.remote(what, name)


# ------------------------------------------------------------------ members


def _let_go(actor: Any, name: str) -> None:
    """Runs in each actor of a group that is gone where it was made."""
    del actor
    global _watch
    with _lock:
        _unused.add(name)
        if _watch is None:
            _watch = threading.Thread(target=_close_unused, name="clamor-group-ends", daemon=True)
            _watch.start()


def _close_unused() -> None:
    global _watch
    while True:
        time.sleep(LET_GO_S)
        with _lock:
            used = {group.name for group in list(_here)}
            ends = _unused - used
            _unused.difference_update(ends)
            is_last = not _unused
            if is_last:
                _watch = None
        for name in ends:
            members.close_member(name)
        if is_last:
            return


def _end_now(actor: Any, name: str) -> None:
    """Runs in each actor of a group whose session ends."""
    del actor
    members.close_member(name)


def _session_ends(session: Session) -> None:
    if session.is_ending:
        for name, (scope, actors) in list(_made.items()):
            if scope == session.scope:
                _made.pop(name, None)
                _tell(actors, _end_now, name)
    for name, member in list(members.by_group.items()):
        if member.scope == session.scope:
            members.close_member(name)


end_hooks.at_end.append(_session_ends)

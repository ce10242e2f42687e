"""Anchors: what makes Ray count the references to a global variable.

Each reference carries its variable's *anchor*, an empty Ray object that the registry owns. Ray
counts the references to that as to any object: in tasks, actors and results, in objects that hold
it, in processes that are killed. When there is none left, the registry frees the variable
(`actors/reference_counting/`).

Ray counts what its own serializer takes along, in arguments, results and `ray.put`. So a pickle is
one of these:

* in Ray's serializer: the anchors go along, and count;
* of a function or class that Ray exports, whose references nobody counts: this process keeps their
  anchors until it ends, as Ray keeps such objects;
* in `collecting`: whoever pickles takes the anchors, and sees to it that they arrive (`given`);
* of an argument of a `clamor.remote` function: this process keeps the anchors until the task is
  over (`in_flight.py`); what outlives the call in its worker asks for an anchor of its own;
* anywhere else, as to a file: without an anchor. Such a reference is *weak*: it does not keep its
  variable. When it is opened, and the variable is still there, it gets an anchor of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from clamor_ray.errors import ClamorError, ServerUnavailableError

RESOLVE_S: Final = 60.0

_live: weakref.WeakSet[Anchor] = weakref.WeakSet()
_kept: list[Anchor] = []  # until this process ends


class Anchor:
    """One process's hold on an anchor.

    Args:
        object_ref: a `ray.ObjectRef`; None where there is none yet.
        ask: asks the registry for one, and returns the `ray.ObjectRef` of its answer.
        asked: the answer, where it was asked already: to hold it is to hold the anchor inside.
    """

    __slots__ = ("__weakref__", "_ask", "_asked", "_object_ref")

    def __init__(
        self,
        object_ref: Any | None = None,
        *,
        ask: Callable[[], Any] | None = None,
        asked: Any | None = None,
    ) -> None:
        self._object_ref = object_ref
        self._ask = ask
        self._asked = asked
        _live.add(self)

    def object_ref(self) -> Any | None:
        """The anchor itself, for who gets a reference from here; None where the session has ended.

        Raises:
            ServerUnavailableError: The registry did not answer.

        Safe from any thread: two may ask, and then have two anchors of the variable.
        """
        asked = self._asked
        if asked is None:
            ask = self._ask
            if ask is None:
                return self._object_ref
            try:
                asked = self._asked = ask()
            except ClamorError:  # there is no such session here
                return None
        import ray

        try:
            # A future: `ray.get` would tell Ray that this task is blocked, and Ray would put
            # another one on its CPU.
            self._object_ref = asked.future().result(RESOLVE_S)
        except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnschedulableError):
            return None
        except (ray.exceptions.RayError, concurrent.futures.TimeoutError) as error:
            raise ServerUnavailableError(
                f"The registry did not say within {RESOLVE_S:g} s that it keeps a variable for a "
                "reference that is passed on.",
                hint="It restarts by itself: try again in a moment.",
            ) from error
        self._ask = self._asked = None
        return self._object_ref


Anchors = tuple[Anchor, ...]


def _keep_in_child() -> None:
    # Ray's tables are the parent's. To give one back there could wait for a lock for ever.
    _kept.extend(_live)


os.register_at_fork(after_in_child=_keep_in_child)


def keep(anchors: Anchors) -> None:
    """This process keeps them until it ends."""
    _kept.extend(anchors)


def object_refs(anchors: Anchors) -> tuple[Any, ...]:
    """As they travel; those of sessions that have ended are left out.

    Raises:
        ServerUnavailableError: The registry did not answer.
    """
    return tuple(ref for anchor in anchors if (ref := anchor.object_ref()) is not None)


class _OfThread(threading.local):
    collected: list[Anchor] | None = None
    given: Anchors | None = ()


_of_thread = _OfThread()


@contextlib.contextmanager
def collecting() -> Iterator[list[Anchor]]:
    """Inside the block this thread pickles references, and the list gets their anchors."""
    before = _of_thread.collected
    found: list[Anchor] = []
    _of_thread.collected = found
    try:
        yield found
    finally:
        _of_thread.collected = before


def collected() -> list[Anchor] | None:
    """Of the block that this thread is in."""
    return _of_thread.collected


@contextlib.contextmanager
def giving(anchors: Anchors | None) -> Iterator[None]:
    """Inside the block references that were pickled in `collecting` are unpickled, and each gets
    these anchors. None: others hold them for as long as the references are used."""
    before = _of_thread.given
    _of_thread.given = anchors
    try:
        yield
    finally:
        _of_thread.given = before


def given() -> Anchors | None:
    """Of the block that this thread is in."""
    return _of_thread.given

"""The ring ends of this process, by group: what a call of a group uses, and who leaves closes.

In: the member that a group's first call joins. Out: its ring, until the group is closed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator

from clamor_ray._native.ring import Ring


@dataclasses.dataclass
class Member:
    """This process's part in a group."""

    scope: str
    rank: int
    ring: Ring
    secret: bytes = dataclasses.field(repr=False)  # a log may show the rest
    calls_before: tuple[int, ...]  # by rank: completed when the connections before were lost
    calls: int = 0  # completed
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


by_group: dict[str, Member] = {}
_joining: dict[str, threading.Lock] = {}  # by group: members may join several at once
calls_lost: dict[str, int] = {}  # by group that is being rebuilt: calls completed before


def _after_fork_in_child() -> None:
    by_group.clear()  # the parent's; what they were is poison here
    _joining.clear()
    calls_lost.clear()


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Nobody else joins or leaves this group here meanwhile."""
    while True:
        lock = _joining.setdefault(name, threading.Lock())
        with lock:
            if _joining.get(name) is lock:  # else it was closed meanwhile
                yield
                return


def close_member(name: str) -> None:
    """Leaves a group, whoever is in the middle of a call of it: that raises `ClosedError`."""
    with alone(name):
        member = by_group.pop(name, None)
        calls_lost.pop(name, None)
        del _joining[name]
    if member is not None:
        member.ring.close()


os.register_at_fork(after_in_child=_after_fork_in_child)

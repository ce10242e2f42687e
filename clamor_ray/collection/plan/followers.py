"""References that move when something that was done for their holder has made a new version."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from clamor_ray._read.ref import GlobalRef

_lock = threading.Lock()
_followers: dict[tuple[str, int], list[weakref.ref[GlobalRef[Any]]]] = {}


def follow(ref: GlobalRef[Any]) -> None:
    """This very reference was given to a collection's function: it moves with what that adds."""
    with _lock:
        for key, known in list(_followers.items()):
            alive = [each for each in known if each() is not None and each() is not ref]
            if alive:
                _followers[key] = alive
            else:
                del _followers[key]
        _followers.setdefault((ref._scope, ref._region), []).append(weakref.ref(ref))


def move_followers(at: GlobalRef[Any]) -> None:
    """Moves them to a version, if they are at an older one."""
    with _lock:
        known = list(_followers.get((at._scope, at._region), []))
    for each in known:
        follower = each()
        if follower is not None:
            follower._move(at._state)

"""References as arguments of `clamor.remote` functions: as bytes, which Ray passes on as they are.

Ray pickles every other argument by a pickler written in Python, and reads it by another: for one
reference that is a tenth of all that an empty task costs. Only what `clamor.remote` submits is
passed so; anywhere else a reference is pickled like any value.

So Ray does not count such a reference. Who submits holds the variable until the task is over, and
the worker asks for an anchor of its own where something of the argument outlives the call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from clamor_ray._counting import in_flight
from clamor_ray._counting.anchors import Anchor, Anchors
from clamor_ray._read import opener
from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.read_predictor import Hinted, Hinting, Key

# No argument begins so by accident; one that does is marked as a user's.
_MAGIC: Final = b"\x93clamor\x00\x17\xe5\xa1\x5d"
_PLAIN: Final = _MAGIC + b"r"
_WEAK: Final = _MAGIC + b"w"  # nobody holds it
_HINTED: Final = _MAGIC + b"h"
_BYTES: Final = _MAGIC + b"="
_HEAD_BYTES: Final = len(_PLAIN)
_HINT: Final = struct.Struct("<16s???")

MOST_KNOWN: Final = 256

# Opened again and again by a worker; only the call that opens them gets them.
_known: dict[bytes, GlobalRef[Any]] = {}


def packed(value: Any) -> Any:
    """An argument as it is submitted."""
    cls = type(value)
    if cls is GlobalRef:
        if value._inline and value._anchors:  # of what is inside of it: Ray counts that
            return value
        return (_PLAIN if value._anchors else _WEAK) + value._packed()
    if cls is Hinted:
        key, ref = value.key, value.ref
        hint = _HINT.pack(key.digest, key.sure, value.again, not ref._anchors)
        return _HINTED + hint + ref._packed()
    if cls is bytes and value.startswith(_MAGIC):
        return _BYTES + value
    return value


def is_packed(value: Any) -> bool:
    """Whether it has to be unpacked."""
    return type(value) is bytes and value.startswith(_MAGIC)


def unpacked(value: Any) -> Any:
    """The argument as it was passed: a `Hinted` or a `GlobalRef`, which are only to be opened."""
    if not is_packed(value):
        return value
    head, rest = value[:_HEAD_BYTES], value[_HEAD_BYTES:]
    if head == _BYTES:
        return rest
    if head != _HINTED:
        return _ref_of(rest, head == _WEAK)
    digest, sure, again, weak = _HINT.unpack_from(rest)
    return Hinted(_ref_of(rest[_HINT.size :], weak), Key(digest, sure), again)


def _ref_of(packed: bytes, weak: bool) -> GlobalRef[Any]:
    known = _known.get(packed)
    if known is None:
        known = GlobalRef._unpacked(packed)
        if not known._inline:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[packed] = known  # without an anchor: it keeps no variable
    if weak or known._inline:
        return known._held(())
    scope, region = known._scope, known._region
    return known._held((Anchor(ask=lambda: opener.current(scope).ask_anchor(region)),))


def _anchors_of(value: Any) -> Anchors:
    cls = type(value)
    ref = value if cls is GlobalRef else value.ref if cls is Hinted else None
    return () if ref is None else ref._counted()


class Passing:
    """Ray's hook around the submission of a task (`__ray_invocation_decorator__`).

    Args:
        hinting: names the calls; None: they are not named.
    """

    def __init__(self, hinting: Hinting | None) -> None:
        self.hinting = hinting

    def __call__(self, submit: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def submit_packed(args: Iterable[Any] | None, kwargs: dict[str, Any] | None) -> Any:
            given, named = list(args or ()), kwargs or {}
            held = [anchor for value in given for anchor in _anchors_of(value)]
            held += [anchor for value in named.values() for anchor in _anchors_of(value)]
            result = submit(
                [packed(value) for value in given],
                {name: packed(value) for name, value in named.items()},
            )
            if held:
                in_flight.in_flight.add(result, tuple(held))
            return result

        return submit_packed if self.hinting is None else self.hinting(submit_packed)

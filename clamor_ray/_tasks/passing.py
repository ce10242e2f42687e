"""References as arguments of `clamor.remote` functions: as bytes, which Ray passes on as they are.

Ray pickles every other argument by a pickler written in Python, and reads it by another: for one
reference that is a tenth of all that an empty task costs. Only what `clamor.remote` submits is
passed so; anywhere else a reference is pickled like any value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.read_predictor import Hinted, Hinting, Key

# No argument begins so by accident; one that does is marked as a user's.
_MAGIC: Final = b"\x93clamor\x00\x17\xe5\xa1\x5d"
_PLAIN: Final = _MAGIC + b"r"
_HINTED: Final = _MAGIC + b"h"
_BYTES: Final = _MAGIC + b"="
_HEAD_BYTES: Final = len(_PLAIN)
_HINT: Final = struct.Struct("<16s??")

MOST_KNOWN: Final = 256

# Opened again and again by a worker; only the call that opens them gets them.
_known: dict[bytes, GlobalRef[Any]] = {}


def packed(value: Any) -> Any:
    """An argument as it is submitted."""
    cls = type(value)
    if cls is GlobalRef:
        return _PLAIN + value._packed()
    if cls is Hinted:
        key = value.key
        return _HINTED + _HINT.pack(key.digest, key.sure, value.again) + value.ref._packed()
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
    if head == _PLAIN:
        return _ref_of(rest)
    digest, sure, again = _HINT.unpack_from(rest)
    return Hinted(_ref_of(rest[_HINT.size :]), Key(digest, sure), again)


def _ref_of(packed: bytes) -> GlobalRef[Any]:
    ref = _known.get(packed)
    if ref is None:
        ref = GlobalRef._unpacked(packed)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        if not ref._inline:
            _known[packed] = ref
    return ref


class Passing:
    """Ray's hook around the submission of a task (`__ray_invocation_decorator__`).

    Args:
        hinting: names the calls; None: they are not named.
    """

    def __init__(self, hinting: Hinting | None) -> None:
        self.hinting = hinting

    def __call__(self, submit: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def submit_packed(args: Iterable[Any] | None, kwargs: dict[str, Any] | None) -> Any:
            named = {name: packed(value) for name, value in kwargs.items()} if kwargs else {}
            return submit([packed(value) for value in args or ()], named)

        return submit_packed if self.hinting is None else self.hinting(submit_packed)

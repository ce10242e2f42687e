"""References that are inside a pickle stream: found, and replaced by others. Pure.

Nothing is unpickled: the stream's operations are read (`pickletools`), and a reference is a call of
`_restore_inside` with its packed bytes (`_read/ref.py`). So a class whose module is not there, or
whose `__setstate__` does something, is no concern of a backup.

A replaced stream has no frames: they would have other lengths, and nobody needs them.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

MODULE: Final = "clamor_ray._read.ref"
FUNCTION: Final = "_restore_inside"

_STRINGS: Final = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES: Final = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
_GETS: Final = {"BINGET", "LONG_BINGET"}


class _Found(NamedTuple):
    """A reference.

    Args:
        begin, end: where the stream has its packed bytes, opcode and length too.
        packed: the bytes.
    """

    begin: int
    end: int
    packed: bytes


def _operations(stream: bytes) -> Iterator[tuple[str, Any, int, int]]:
    """(name, argument, begin, end) of each."""
    before: tuple[str, Any, int] | None = None
    for opcode, argument, at in pickletools.genops(stream):
        assert at is not None
        if before is not None:
            yield (*before, at)
        before = (opcode.name, argument, at)
    if before is not None:
        yield (*before, before[2] + 1)  # STOP


def _found_in(operations: list[tuple[str, Any, int, int]]) -> list[_Found]:
    """A packed reference is what the only element of a tuple is, behind the function that gets it:
    STACK_GLOBAL or a memo's, the bytes, TUPLE1. MEMOIZE may come between any of them."""
    memo: list[object] = []
    stack: list[object] = []  # what the last operations have pushed, as far as it is of interest
    found: dict[int, _Found] = {}  # by where it begins
    function = (MODULE, FUNCTION)
    for name, argument, begin, end in operations:
        if name == "MEMOIZE":
            memo.append(stack[-1] if stack else None)
            continue
        if name == "FRAME":
            continue
        pushed: object = None
        if name in _STRINGS:
            pushed = argument
        elif name in _GETS:
            pushed = memo[argument]
        elif name == "STACK_GLOBAL" and len(stack) >= 2:
            pushed = (stack[-2], stack[-1])
        elif name in _BYTES:
            pushed = _Found(begin, end, argument)
        elif name == "TUPLE1" and len(stack) >= 2 and stack[-2] == function:
            inside = stack[-1]
            if isinstance(inside, _Found):
                found[inside.begin] = inside
        stack = [*stack[-2:], pushed]
    return list(found.values())


def packed_in(stream: bytes) -> list[bytes]:
    """The packed references in a pickle stream, in its order.

    Args:
        stream: of protocol 4 or 5.

    Example:
        >>> packed_in(pickle.dumps([1, "two"]))
        []
    """
    if FUNCTION.encode() not in stream:  # a stream may have millions of operations
        return []
    return [each.packed for each in _found_in(list(_operations(stream)))]


def _pushing(packed: bytes) -> bytes:
    if len(packed) < 256:
        return pickle.SHORT_BINBYTES + struct.pack("<B", len(packed)) + packed
    return pickle.BINBYTES + struct.pack("<I", len(packed)) + packed


def replaced(stream: bytes, other: Callable[[bytes], bytes]) -> bytes:
    """A stream with other references.

    Args:
        stream: of protocol 4 or 5.
        other: (packed reference) -> another one.

    Returns:
        The very stream where it has none.
    """
    if FUNCTION.encode() not in stream:
        return stream
    operations = list(_operations(stream))
    by_begin = {each.begin: each for each in _found_in(operations)}
    if not by_begin:
        return stream
    parts = []
    for name, _, begin, end in operations:
        if name == "FRAME":
            continue
        known = by_begin.get(begin)
        parts.append(stream[begin:end] if known is None else _pushing(other(known.packed)))
    return b"".join(parts)

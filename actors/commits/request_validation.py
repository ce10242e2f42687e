"""Whether a commit request makes sense by itself. What is refused here has changed nothing.

Everything that is read out of a request later, by the commit log, the journal, or a registry that
starts again, is read here first: after the journal's write nothing may fail any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from pyroaring import BitMap

from clamor_ray._labels import label
from clamor_ray._objects.layout import INLINE_BYTES
from clamor_ray._protocol.messages import INLINE_BASE, CommitRequest, Write
from clamor_ray.errors import ProtocolError

MOST_PLAN_BYTES: Final = 256 << 20  # SQLite stores 10^9 in one value
_END: Final = 1 << 63  # of what SQLite stores as an integer


def _refused(what: str) -> ProtocolError:
    return ProtocolError(
        f"The registry refuses a commit: {what}.",
        hint="Nothing was changed. All processes of a session run the same clamor-ray; where "
        "they do, report it.",
    )


def _check_number(name: str, value: object, end: int, where: str = "") -> None:
    if type(value) is not int or not 0 <= value < end:
        raise _refused(f"{name} is {value!r:.60}{where}, not an integer from 0 to {end - 1}")


def check_request(request: CommitRequest) -> None:
    """The request's own numbers; `changed_blocks` has those of each write.

    Raises:
        ProtocolError: They make no sense.
    """
    _check_number("its id", request.commit_id, 1 << 64)
    if not request.commit_id or not request.writes:
        raise _refused("it has an id that is not 0, and at least one write")
    timeout_s = request.timeout_s
    if type(timeout_s) not in (int, float) or not math.isfinite(timeout_s) or timeout_s < 0:
        raise _refused(f"its timeout is {timeout_s!r:.60}, not a number of seconds")
    staged_ago_s = request.staged_ago_s
    if type(staged_ago_s) not in (int, float) or not math.isfinite(staged_ago_s):
        raise _refused(f"its layers were staged {staged_ago_s!r:.60} seconds ago")
    if type(request.writes) is not tuple:
        raise _refused("its writes are no tuple")
    for write in request.writes:
        if type(write) is not Write:
            raise _refused(f"{write!r:.60} is no write")
        _check_number("a variable's id", write.region, _END)
    if len({write.region for write in request.writes}) != len(request.writes):
        raise _refused("it writes a variable twice")


def changed_blocks(write: Write, label: Callable[[int], str] = label) -> BitMap:
    """The blocks that a write of a checked request changes.

    Args:
        write: One of the request's.
        label: Its variable for people.

    Raises:
        ProtocolError: It makes no sense.
    """
    said = label(write.region)
    where = f" for {said}"
    _check_number("the version that it read", write.base_version, _END, where)
    _check_number("the number of blocks", write.n_blocks, 1 << 32, where)
    _check_number("the layer's size", write.layer_bytes, _END, where)
    _check_number("the layer's server", write.staged_at, 1 << 64, where)
    for name, value in (("layout", write.plan), ("content", write.payload)):
        if value is not None and type(value) is not bytes:
            raise _refused(f"the {name} is {type(value).__name__}{where}, not bytes")
    if write.plan is not None and len(write.plan) > MOST_PLAN_BYTES:
        raise _refused(f"the layout has {len(write.plan)} bytes{where}")
    blocks = _read(write, said)
    if write.region >= INLINE_BASE:
        _check_inline(write, said)
    elif write.payload is not None:
        raise _refused(f"{said} does not travel in its references, and is written by content")
    elif blocks and not write.layer_bytes:
        raise _refused(f"{len(blocks)} blocks of {said} come without a layer")
    return blocks


def _read(write: Write, said: str) -> BitMap:
    blocks = _bit_map(write.blocks, f"the blocks of {said}")
    if len(blocks) != write.n_blocks:
        raise _refused(f"{said} has {write.n_blocks} blocks by number, {len(blocks)} by name")
    if not _bit_map(write.were_lost, f"the lost blocks of {said}") <= blocks:
        raise _refused(f"blocks of {said} were lost that are not written")
    return blocks


def _bit_map(packed: bytes, what: str) -> BitMap:
    if type(packed) is not bytes:
        raise _refused(f"{what} are no bytes")
    try:
        found = BitMap.deserialize(packed) if packed else BitMap()
    except ValueError as error:
        raise _refused(f"{what} cannot be read ({error})") from error
    if packed and len(found.serialize()) != len(packed):
        raise _refused(f"{what} cannot be read: bytes are left over")
    return found


def _check_inline(write: Write, said: str) -> None:
    if write.payload is None:
        raise _refused(f"{said} is in its references, and comes without content")
    if len(write.payload) > INLINE_BYTES:
        raise _refused(
            f"the content of {said} has {len(write.payload)} bytes, and "
            f"references hold {INLINE_BYTES}"
        )
    if write.n_blocks or write.layer_bytes:
        raise _refused(f"{said} is in its references, and comes with blocks")

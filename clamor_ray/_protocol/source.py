"""How a global variable can be made again when the node that held it is lost.

A source makes version 0 of a variable, byte for byte as it was put: the same pickle stream and the
same buffers. It is run in a task of its own; what it makes is compared with what was put, as far as
that is known, before any of it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from clamor_ray._counting.anchors import Anchor, collecting
from clamor_ray._objects.layout import Pickled, Plan, take_apart
from clamor_ray.errors import SourceError, UnpicklableError

ZEROS = "zeros"
CALL = "call"
SHARED = "shared"
FILE = "file"

NOT_EQUAL_HINT = (
    "A source must make an equal object each time: read the same file, use the same seed, and "
    "build the object in the same way."
)


class Source(NamedTuple):
    """What makes a variable's version 0 again.

    Args:
        kind: `ZEROS`: all zeros but for the pickle stream; `CALL`: a callable; `SHARED`: a Ray
            object (`actors/lost_homes/shared_objects.py`); `FILE`: nothing is made, for what no
            commit has written is in a file, which each node reads (`_files/spec.py`).
        offset: of the pickle stream in the region, of `ZEROS`.
        digest: of the plan and the pickle stream, of `CALL`; see `Pinned`, of `SHARED`.
        what: the pickle stream, the callable by cloudpickle, or where the object or the file is.
    """

    kind: str
    offset: int
    digest: bytes
    what: bytes


def digest_of(plan: Plan, inband: memoryview | bytes) -> bytes:
    """Of what lies where, and of the pickle stream."""
    digest = hashlib.sha256(repr(plan).encode())
    digest.update(inband)
    return digest.digest()


def source_of_zeros(plan: Plan, inband: bytes) -> Source:
    """That of `clamor.zeros`."""
    return Source(ZEROS, plan.inband_offset, b"", bytes(inband))


def source_of_call(
    source: Callable[[], Any], pickled: Pickled, inside: list[Anchor] | None = None
) -> Source:
    """That of `clamor.put(obj, source=...)`.

    Args:
        source: the callable.
        pickled: what it made.
        inside: gets the anchors of the references that it closes over.

    Raises:
        TypeError: It cannot be called.
        UnpicklableError: It cannot be sent to another node.
    """
    if not callable(source):
        raise TypeError(f"source must be a callable, not {type(source).__qualname__}")
    try:
        with collecting() as found:
            what = cloudpickle.dumps(source)
    except Exception as error:  # __reduce__ of any class may raise anything
        raise UnpicklableError(
            f"The source cannot be pickled: {type(error).__name__}: {error}.",
            hint="It is run on another node: let it refer to nothing that cannot travel there.",
        ) from error
    if inside is not None:
        inside += found
    return Source(CALL, 0, digest_of(pickled.plan, pickled.inband), what)


def make_again(what: bytes, digest: bytes) -> list[tuple[int, Any]]:
    """Runs a source, as a Ray task.

    Returns:
        (offset in the region, one-dimensional uint8 array) of each piece.

    Raises:
        SourceError: It made something else than before.
        Whatever the source raises.
    """
    pickled = take_apart(cloudpickle.loads(what)())
    if digest_of(pickled.plan, pickled.inband) != digest:
        raise SourceError(
            "It made an object that differs from what was put: another pickle stream, or buffers "
            "of other lengths.",
            hint=NOT_EQUAL_HINT,
        )
    return [
        (offset, np.frombuffer(view, np.uint8)) for offset, view in pickled.pieces() if view.nbytes
    ]

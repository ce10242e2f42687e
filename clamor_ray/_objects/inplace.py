"""Whether an object is still made of the memory that it was rebuilt over.

A transaction commits blocks of a region. An array that was replaced, or a list that grew, lives
elsewhere: its change would be lost without a word. So the object is taken apart again before the
commit: its pickle stream must be the same, and its buffers must lie where they lay. Pure: no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from clamor_ray._objects.layout import Plan, dump
from clamor_ray.errors import NotInPlaceError, UnpicklableError

# Above these, looking twice costs more than the change.
LARGE_STREAM_BYTES: Final = 1 << 20
LARGE_OUTSIDE_BYTES: Final = 1 << 20


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer lies in memory; 0 where it is empty."""
    if view.nbytes == 0:
        return 0
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What of an object must not change.

    Args:
        stream: its pickle stream.
        places: (address, length) of each buffer, in order; the address is 0 where the buffer was
            made for pickling, so that it lies elsewhere each time.
        outside: the content of those, or None where that is much.
    """

    stream: bytes
    places: tuple[tuple[int, int], ...]
    outside: tuple[bytes, ...] | None


def is_worth_a_look(obj: object, plan: Plan) -> bool:
    """Whether the object can have changed elsewhere, and looking is cheap."""
    return type(obj) is not np.ndarray and plan.inband_bytes <= LARGE_STREAM_BYTES


def fingerprint(obj: object, begin: int, end: int) -> Fingerprint:
    """Takes one of an object whose memory is [begin, end).

    Raises:
        UnpicklableError: The object has come to hold something that cannot be pickled.
    """
    inband, views, _ = dump(obj)
    places, outside = [], []
    for view in views:
        address = address_of(view)
        if begin <= address and address + view.nbytes <= end:
            places.append((address, view.nbytes))
        else:
            places.append((0, view.nbytes))
            outside.append(view)
    is_large = sum(view.nbytes for view in outside) > LARGE_OUTSIDE_BYTES
    return Fingerprint(
        bytes(inband),
        tuple(places),
        None if is_large else tuple(bytes(view) for view in outside),
    )


def check_in_place(before: Fingerprint, obj: object, begin: int, end: int, name: str) -> None:
    """Compares an object with its fingerprint.

    Raises:
        NotInPlaceError: It has changed outside of its memory; says which way.
    """
    try:
        after = fingerprint(obj, begin, end)
    except UnpicklableError as error:
        raise NotInPlaceError(f"{name} was changed out of place: {error.message}") from error
    if len(after.places) != len(before.places):
        what = f"it has {len(after.places)} buffers now, and had {len(before.places)}"
    elif after.places != before.places:
        index = next(
            i for i, (a, b) in enumerate(zip(before.places, after.places, strict=True)) if a != b
        )
        what = f"array {index} of it was replaced by another one"
    elif after.outside != before.outside:
        what = "an array that its class makes when it is pickled has changed"
    elif after.stream != before.stream:
        what = (
            "something beside its arrays has changed (a list grew, an attribute or a number was "
            "set)"
        )
    else:
        return
    raise NotInPlaceError(f"{name} was changed out of place: {what}. Nothing was published.")


def check_can_change(plan: Plan, name: str) -> None:
    """Refuses what has no array to write to.

    Raises:
        NotInPlaceError: All of the object is in its pickle stream.
    """
    if not any(n_bytes for _, n_bytes in plan.buffers):
        raise NotInPlaceError(
            f"{name} cannot be changed in place: nothing of it is in arrays.",
            hint="Keep what changes in NumPy arrays, or put the new object again with clamor.put.",
        )

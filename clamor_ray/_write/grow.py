"""Arrays that grow: more of a region that was reserved for them comes into use."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clamor_ray import errors
from clamor_ray._objects.layout import Plan, format_bytes, put_together, take_apart_zeros

if TYPE_CHECKING:
    from clamor_ray._read.ref import GlobalRef


def grown(ref: GlobalRef[Any], image: Any, length: int) -> Plan:
    """Makes the array in a private image longer; what is added are the zeros that lie there.

    Args:
        ref: of the array, with its region's length.
        image: all bytes of the region, writable; its pickle stream is rewritten.
        length: of the first axis.

    Returns:
        What lies where from now on.

    Raises:
        NotInPlaceError: The object is no plain array that lies row by row.
        ValueError: The array is longer than that already.
        NoSpaceError: The region has no room for so many rows.
    """
    length = operator.index(length)
    array = put_together(image, ref._plan)
    if (
        type(array) is not np.ndarray
        or array.ndim == 0
        or not array.flags.c_contiguous
        or len(ref._plan.buffers) != 1
        or ref._plan.inband_offset  # built in place: other things may lie behind it
    ):
        raise errors.NotInPlaceError(
            f"{ref!r} cannot grow: it is not one array in C order.",
            hint="Make it with clamor.zeros(shape, dtype, capacity=rows).",
        )
    if length < array.shape[0]:
        raise ValueError(f"{ref!r} has {array.shape[0]} rows, which is more than {length}")
    if length == array.shape[0]:
        return ref._plan
    ((offset, _),) = ref._plan.buffers
    new, stream = take_apart_zeros((length, *array.shape[1:]), array.dtype)
    ((_, n_bytes),) = new.buffers
    room_bytes = max(0, ref._length_bytes - offset)
    if n_bytes > room_bytes or len(stream) > offset:
        raise errors.NoSpaceError(
            f"{ref!r} has room for {format_bytes(room_bytes)}, and {length} rows take "
            f"{format_bytes(n_bytes)}.",
            hint="Reserve room when it is made: clamor.zeros(shape, dtype, capacity=rows).",
        )
    image[: len(stream)] = np.frombuffer(stream, np.uint8)
    return replace(
        ref._plan,
        total_bytes=offset + n_bytes,
        inband_bytes=len(stream),
        buffers=((offset, n_bytes),),
        kind=new.kind,
    )

"""`table[ids]` of a `GlobalArray`: gathered where rows are absent, NumPy's own where all are here.

What NumPy indexes by position in memory, this does by rows of the first axis. A key with arrays for
other axes fetches the blocks of its elements first, and NumPy copies them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.client import Client
from clamor_ray._objects.global_array import believe, plain, set_gather
from clamor_ray._objects.ranges import BLOCK_BYTES, extent, row_spans
from clamor_ray._read import opener
from clamor_ray._read.gather import (
    Fetch,
    gather_rows,
    has_whole_rows,
    relative_spans,
    whole_rows_are_here,
)
from clamor_ray._read.lease import Leased

_FULL = slice(None)


def item(array: Any, key: Any) -> Any:
    """The rows, or NotImplemented where NumPy is to index."""
    ids: Any = key
    rest: tuple[Any, ...] = ()
    if type(key) is tuple:
        if len(key) == 0 or len(key) > array.ndim:
            return NotImplemented
        ids, rest = key[0], key[1:]
    if rest:
        return _with_rest(array, ids, rest)
    numbers = _numbers(array, ids)
    if numbers is None:
        return NotImplemented
    leased = _leased(array)
    if leased is None:
        return NotImplemented
    if is_here(leased, array, numbers):
        begin = leased.mapping.address
        believe(begin, begin + leased.mapping.length_bytes, lambda: _is_whole(leased))
        return NotImplemented
    try:
        return gather_rows(plain(array), numbers, None, None)
    except (errors.DescriptorLimitError, errors.OutOfMemoryError):
        return NotImplemented  # touches need neither


def _numbers(array: Any, ids: Any) -> npt.NDArray[np.int64] | None:
    """Numbers of rows, negative ones as they are; None: it is for NumPy to say what it is."""
    if not isinstance(ids, (np.ndarray, list)) or array.ndim == 0:
        return None
    try:
        given = np.asarray(ids)
    except ValueError:  # a list of lists of several lengths
        return None
    if given.dtype.kind == "b" and given.shape == (len(array),):
        return np.flatnonzero(given)
    if given.dtype.kind not in "iu" or given.size == 0 or given.dtype.itemsize > 8:
        return None
    if given.dtype.kind == "u" and given.dtype.itemsize == 8 and int(given.max()) >= 1 << 63:
        return None
    return np.ascontiguousarray(given, np.int64).reshape(given.shape)


def _leased(array: Any) -> Leased | None:
    """The version that all of the array lies in."""
    if array.nbytes == 0 or array.dtype.hasobject:
        return None
    low, high = extent(array)
    found = opener.at_address(low)
    if found is None or found[1].snapshot is None:
        return None
    leased = found[1]
    return leased if high <= leased.mapping.address + leased.mapping.length_bytes else None


def is_here(leased: Leased, array: Any, numbers: npt.NDArray[np.int64]) -> bool:
    """Whether none of the rows need come, as far as is known without a question.

    An id that is no row: true, for NumPy to raise its error.
    """
    if not has_whole_rows(array):
        if not _are_within(numbers, len(array)):
            return True
        positive = np.where(numbers < 0, numbers + len(array), numbers).astype(np.uint64)
        runs = relative_spans(row_spans(array, positive), leased).astype(np.int64)
        blocks = np.repeat(runs[:, 0] - np.cumsum(runs[:, 1]) + runs[:, 1], runs[:, 1])
        return _blocks_are_here(leased, blocks + np.arange(len(blocks)))
    return whole_rows_are_here(leased, array, numbers)


def _is_whole(leased: Leased) -> bool:
    client: Client | None = leased.client
    return client is not None and client.absent_blocks(leased.mapping.id) == 0


def _blocks_are_here(leased: Leased, blocks: npt.NDArray[np.int64]) -> bool:
    """Of blocks counted from the mapping's begin."""
    n_blocks = leased.mapping.length_bytes // BLOCK_BYTES
    client: Client | None = leased.client
    return client is not None and client.rows_here(
        leased.mapping.id,
        np.ascontiguousarray(blocks),
        n_blocks,
        offset_bytes=0,
        stride_bytes=BLOCK_BYTES,
        row_bytes=BLOCK_BYTES,
    )


def _with_rest(array: Any, ids: Any, rest: tuple[Any, ...]) -> Any:
    """A key of several axes, whose first has ids."""
    if all(isinstance(part, (int, slice)) for part in rest):
        numbers = _numbers(array, ids)
        if numbers is None or _leased(array) is None:
            return NotImplemented
        if numbers.ndim > 1 and any(isinstance(part, int) for part in rest):
            return NotImplemented
        index = (_FULL, *rest)
        return item(array[index], numbers)  # a number in a key with ids is as an id of its own
    if len(rest) == 1:
        return _elements(array, ids, rest[0])
    return NotImplemented


def _elements(array: Any, rows: Any, columns: Any) -> Any:
    """`array[rows, columns]`, both ids: the blocks of the elements come, and NumPy copies them."""
    leased = _leased(array)
    first, second = _numbers(array, rows), _numbers(array[:1].swapaxes(0, 1), columns)
    if leased is None or first is None or second is None or array.ndim != 2:
        return NotImplemented
    try:
        first, second = np.broadcast_arrays(first, second)
    except ValueError:
        return NotImplemented
    n_rows, n_columns = array.shape
    if not (_are_within(first, n_rows) and _are_within(second, n_columns)):
        return NotImplemented
    begin = array.__array_interface__["data"][0] - leased.mapping.address
    offsets = (first % n_rows) * array.strides[0] + (second % n_columns) * array.strides[1] + begin
    blocks = np.unique(np.concatenate([offsets, offsets + array.itemsize - 1], axis=None) >> 12)
    if not _blocks_are_here(leased, blocks):
        spans = np.stack([blocks, np.ones_like(blocks)], axis=1).astype(np.uint64)
        Fetch(None).runs(leased, spans)
    return NotImplemented


def _are_within(numbers: npt.NDArray[np.int64], n: int) -> bool:
    return bool(numbers.size) and int(numbers.min()) >= -n and int(numbers.max()) < n


def explain_read_only(array: Any) -> str | None:
    """What to do instead of writing to it; None where it is no version of a variable."""
    if array.flags.writeable:
        return None
    leased = _leased(array)
    if leased is None or leased.snapshot is None:
        return None
    return (
        f"it is version {leased.snapshot.version} of a global variable, which never changes. "
        "Write in `with clamor.update(ref) as x: ...`, or get a private copy: ref.get(mode='c')"
    )


def install() -> None:
    """Global arrays gather from now on. Idempotent."""
    set_gather(item, explain_read_only)

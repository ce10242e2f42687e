"""`clamor.gather`: rows of a global array by their numbers, in few round trips.

Of a plain array with whole rows the page cache is asked for the rows themselves: it decides, from
what is here and from the sizes, whether blocks or single rows come. Of everything else (rows with
gaps, Arrow, pandas) the blocks that the rows lie on are prefetched, and the rows
are then taken as anybody would take them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clamor_ray._objects.global_array import GlobalArray, plain
from clamor_ray._objects.ranges import Spans, extent, row_spans
from clamor_ray._read import opener
from clamor_ray._read.lease import Leased, read_runs
from clamor_ray._read.prefetch import split_by_mapping
from clamor_ray._read.ref import GlobalRef
from clamor_ray._spans.record import span
from clamor_ray.errors import HomeLostError, SessionEndedError

if TYPE_CHECKING:
    from clamor_ray._native.client import Client
    from clamor_ray._session.session import Session

Array = npt.NDArray[Any]


def gather(source: Any, ids: Any, *, out: Array | None = None, timeout: float | None = None) -> Any:
    """`source[ids]`, with what this node does not hold fetched in few round trips.

    From all nodes that have some of it, at once; where rows are few, cold and small, the rows
    themselves travel and not their blocks, and this node keeps no copy of them. Plain `view[ids]`
    gives the same, fault by fault.

    Args:
        source: a `GlobalRef` of an array, or an array that came from one, or a view of it with any
            strides; also Arrow arrays, chunked arrays and tables, and pandas frames, series and
            indexes (they take 1-D ids). What is no part of a global variable is indexed as it is.
            A reference is opened for the call: for many small calls pass what `ref.get()` gives.
        ids: numbers of rows (along axis 0), integers of any dtype and shape; negative ones count
            from the end.
        out: an array of the result's shape and dtype to be filled, for arrays only.
        timeout: seconds for all of it; CLAMOR_FAULT_TIMEOUT_S where it is None.

    Returns:
        As NumPy's `array[ids]`: shape `ids.shape + array.shape[1:]`, a copy; `out` where it was
        given. For Arrow and pandas what their `take` returns.

    Raises:
        IndexError: An id is out of bounds, or no integer; no row has moved.
        TypeError: `source` has no rows, e.g. it is a dict or a `HashMap` (use its `get`); or `out`
            was given with Arrow or pandas data.
        ValueError: `out` does not fit; or ids for Arrow or pandas data have several dimensions.
        PrefetchTimeoutError: Not all rows came in time; what `out` holds then is undefined.
        HomeLostError: The node that held them is gone.
        FreedError, SnapshotExpired, NotInitializedError, ...: As `GlobalRef.get`.

    Safe from any thread; the GIL is released while it waits. `clamor.aio.gather` is the same for
    coroutines. (REAP, Ustiugov et al., ASPLOS 2021, on batches in place of faults.)

    Example:
        >>> ref = clamor.put(np.arange(6400).reshape(100, 64))
        >>> clamor.gather(ref, [3, 1, 4]).shape
        (3, 64)
    """
    obj = source.get() if isinstance(source, GlobalRef) else source
    if isinstance(obj, np.ndarray):
        return gather_rows(plain(obj) if type(obj) is GlobalArray else obj, ids, out, timeout)
    from clamor_ray._read import gather_tables

    take = gather_tables.taker_of(obj)
    if take is None:
        kind = type(obj)
        hint = "; a HashMap has get()" if hasattr(kind, "__clamor_ref__") else ""
        raise TypeError(
            f"gather takes arrays, Arrow data and pandas data, not {kind.__qualname__}{hint}"
        )
    if out is not None:
        raise TypeError(f"out= is for arrays, not for {type(obj).__qualname__}")
    numbers = row_ids(ids, len(obj))
    if numbers.ndim > 1:
        raise ValueError(f"ids of {type(obj).__qualname__} have one dimension, not {numbers.ndim}")
    return take(obj, numbers.reshape(-1).astype(np.int64), Fetch(timeout))


# ------------------------------------------------------------------ ids


def row_ids(
    ids: Any, n_rows: int, dtype: npt.DTypeLike = np.uint64, *, copy: bool = False
) -> npt.NDArray[Any]:
    """Ids as numbers from 0 on, contiguous, of the same shape.

    Args:
        ids: integers.
        n_rows: that there are.
        dtype: of the result, that holds every row's number.
        copy: the result is nobody else's.

    Raises:
        IndexError: As NumPy's: out of bounds, or no integers.
    """
    given = np.asarray(ids)
    if given.size == 0 and not isinstance(ids, np.ndarray):
        given = given.astype(np.intp)  # NumPy takes [] for a list of integers, too
    if given.dtype.kind == "b":
        raise IndexError("ids are integers: of a mask of rows pass numpy.flatnonzero(mask)")
    if given.dtype.kind not in "iu":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    if given.size == 0:
        return np.empty(given.shape, dtype)
    low, high = int(given.min()), int(given.max())
    if low < -n_rows or high >= n_rows:
        outside = (given >= n_rows) if low >= -n_rows else (given >= n_rows) | (given < -n_rows)
        first = int(given.reshape(-1)[np.flatnonzero(outside)[0]])
        raise IndexError(f"index {first} is out of bounds for axis 0 with size {n_rows}")
    if low < 0:
        given = given.astype(np.int64)
        given = np.where(given < 0, given + n_rows, given)
    return np.ascontiguousarray(given.astype(dtype, copy=copy)).reshape(given.shape)


# ------------------------------------------------------------------ arrays


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is an array, not {type(out).__qualname__}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}; the rows have {shape} and {dtype}"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only")


def gather_rows(array: Array, ids: Any, out: Array | None, timeout: float | None) -> Any:
    """`array[ids]` of an array that is no `GlobalArray`; see `gather`."""
    if array.ndim == 0:
        raise IndexError("too many indices for array: array is 0-dimensional, but 1 were indexed")
    numbers = row_ids(ids, len(array))
    shape = numbers.shape + array.shape[1:]
    if out is not None:
        _check_out(out, shape, array.dtype)
    fetch = Fetch(timeout)
    leased = None
    if array.nbytes and numbers.size and not array.dtype.hasobject:
        leased = fetch.find(*extent(array))
    if leased is None or type(array) is not np.ndarray or not has_whole_rows(array):
        if leased is not None:
            fetch.blocks(leased, row_spans(array, numbers))
        rows = array[numbers.astype(np.intp)]
        if out is None:
            return rows
        out[...] = rows
        return out
    if whole_rows_are_here(leased, array, numbers.view(np.int64)):
        fetch.note(leased, array, numbers)
        return _copied(array, numbers.view(np.int64), out)
    direct = out is not None and out.flags.c_contiguous
    result: Array = out if out is not None and direct else np.empty(shape, array.dtype)
    fetch.rows(leased, array, numbers, result)
    if out is None:
        return result[()]  # of one id of a 1-D array NumPy gives a scalar
    if not direct:
        out[...] = result
    return out


def has_whole_rows(array: Array) -> bool:
    """Whether the page cache can copy the rows: each in one piece, apart, in this order."""
    row_bytes = array[:1].nbytes
    return array[:1].flags.c_contiguous and (len(array) == 1 or array.strides[0] >= row_bytes)


def whole_rows_are_here(leased: Leased, array: Array, numbers: npt.NDArray[np.int64]) -> bool:
    """Whether none of the rows need come, as far as is known without a question.

    Args:
        leased: the version that all of the array lies in.
        array: has whole rows.
        numbers: of rows, contiguous; negative ones count from the end. One that is no row: true,
            for NumPy to raise its error.
    """
    client: Client | None = leased.client
    row_bytes = array.nbytes // len(array)
    return client is not None and client.rows_here(
        leased.mapping.id,
        numbers,
        len(array),
        offset_bytes=array.__array_interface__["data"][0] - leased.mapping.address,
        stride_bytes=array.strides[0] if len(array) > 1 else row_bytes,
        row_bytes=row_bytes,
    )


def _copied(array: Array, numbers: npt.NDArray[np.int64], out: Array | None) -> Any:
    """The rows by NumPy alone. Should one be evicted just now, it comes by a fault."""
    rows = array[numbers]  # a copy, also of a number in an array without dimensions
    if out is None:
        return rows
    out[...] = rows
    return out


def gather_here(source: Any, ids: Any, out: Array | None, most_bytes: int) -> Any:
    """As `gather`, where that is no more than a copy of so many bytes in this process; else
    NotImplemented.

    Args:
        source, ids, out: as `gather`'s.
        most_bytes: that the rows may have.
    """
    if (
        not isinstance(source, np.ndarray)
        or source.ndim == 0
        or not isinstance(ids, (np.ndarray, list))
    ):
        return NotImplemented
    array = plain(source) if type(source) is GlobalArray else source
    if type(array) is not np.ndarray or array.dtype.hasobject or not array.nbytes:
        return NotImplemented
    row_bytes = array.nbytes // len(array)
    n_ids = ids.size if isinstance(ids, np.ndarray) else len(ids)
    if not 0 < n_ids * row_bytes <= most_bytes or not has_whole_rows(array):
        return NotImplemented
    leased = Fetch.find(*extent(array))
    if leased is None:
        return NotImplemented
    numbers = row_ids(ids, len(array), np.int64)
    if numbers.size != n_ids or not whole_rows_are_here(leased, array, numbers):
        return NotImplemented
    if out is not None:
        _check_out(out, numbers.shape + array.shape[1:], array.dtype)
    Fetch.note(leased, array, numbers.view(np.uint64))
    return _copied(array, numbers, out)


def relative_spans(spans: Spans, leased: Leased) -> Spans:
    """Blocks of the address space as blocks of the mapping."""
    runs: Spans = spans.copy()
    runs[:, 0] -= np.uint64(leased.mapping.address >> 12)
    return runs


def _session_of(leased: Leased) -> Session:
    found = opener.at_address(leased.mapping.address)
    if found is None:
        raise SessionEndedError("The session of this array has ended.")
    return found[0]


class Fetch:
    """One call's requests, with one deadline for all of them.

    Args:
        timeout: seconds; None for CLAMOR_FAULT_TIMEOUT_S.
    """

    def __init__(self, timeout: float | None) -> None:
        if timeout is None:
            timeout = max((s.config.patience_s for s in opener.sessions()), default=0.0)
        self._deadline = time.monotonic() + timeout

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @staticmethod
    def find(low: int, high: int) -> Leased | None:
        """What version's memory [low, high) is; None where it is not all of one."""
        found = opener.at_address(low)
        if found is None or found[1].snapshot is None:
            return None
        leased = found[1]
        return leased if high <= leased.mapping.address + leased.mapping.length_bytes else None

    def blocks(self, leased: Leased, spans: Spans) -> None:
        """Makes blocks of one mapping resident."""
        self.runs(leased, relative_spans(spans, leased))

    def runs(self, leased: Leased, runs: Spans) -> None:
        """Makes blocks of one mapping resident, counted from its begin."""
        session = _session_of(leased)
        region = leased.snapshot._region if leased.snapshot else None
        with span(session.scope, "prefetch", region=region):
            session.client.prefetch(leased.mapping.id, runs, wait=True, timeout_s=self._left_s())

    def any(self, spans: Spans) -> None:
        """Makes blocks resident that may lie in several mappings, or in none."""
        for session in opener.sessions():
            for mapping, runs in split_by_mapping(spans, session.leases).items():
                session.client.prefetch(mapping.id, runs, wait=True, timeout_s=self._left_s())

    @staticmethod
    def note(leased: Leased, array: Array, numbers: npt.NDArray[np.uint64]) -> Session:
        """Says who reads these rows, without a touch; returns the session that they are of."""
        session = _session_of(leased)

        def read() -> Spans:
            return relative_spans(row_spans(array, numbers), leased)

        read_runs(leased.snapshot, read)
        session.leases.note_gathered(leased.mapping.id, read)
        return session

    def rows(
        self, leased: Leased, array: Array, numbers: npt.NDArray[np.uint64], out: Array
    ) -> None:
        """Copies whole rows."""
        session = self.note(leased, array, numbers)
        row_bytes = array[:1].nbytes
        region = leased.snapshot._region if leased.snapshot else 0
        try:
            with span(session.scope, "gather", region=region or None, rows=numbers.size):
                session.client.gather(
                    leased.mapping.id,
                    numbers,
                    out,
                    offset_bytes=array.__array_interface__["data"][0] - leased.mapping.address,
                    stride_bytes=array.strides[0] if len(array) > 1 else row_bytes,
                    row_bytes=row_bytes,
                    timeout_s=self._left_s(),
                )
        except HomeLostError as error:
            session.explain(error, region)

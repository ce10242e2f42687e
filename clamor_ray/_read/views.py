"""Large views of global variables travel as references to their snapshots, not as their bytes.

Only in Ray's own serialization (arguments, closures, return values, `ray.put`): plain pickle and
`clamor.put` go on copying. All other arrays are pickled exactly as they were.

Such a pickle is worth as much as a reference: after `clamor.free`, or once the version has
expired, it cannot be read any more. Ray then raises its `RaySystemError`, whose text is that of
`FreedError`, `SnapshotExpired` or `SessionMismatchError`.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clamor_ray._objects.global_array import GlobalArray
from clamor_ray._objects.ranges import extent

if TYPE_CHECKING:
    from clamor_ray._read.lease import Leased
    from clamor_ray._read.ref import GlobalRef
from clamor_ray._read import opener

_by_value: contextvars.ContextVar[bool] = contextvars.ContextVar("clamor_views_by_value")
_arrow_installed = False


@contextlib.contextmanager
def views_by_value() -> Iterator[None]:
    """Inside the block, views of global variables are pickled with their bytes.

    For what must outlive the variable, or leave the session. It concerns this thread (or
    coroutine): what a task returns is pickled after it has ended; there, return a copy, or set
    CLAMOR_VIEW_REF_BYTES=0 in its environment.

    Example:
        >>> ref = clamor.put(np.arange(10**6))
        >>> with clamor.views_by_value():
        ...     kept = ray.put(ref.get()[:1000])
        >>> clamor.free(ref)
        >>> int(ray.get(kept)[7])  # a copy: it outlives the variable
        7
    """
    token = _by_value.set(True)
    try:
        yield
    finally:
        _by_value.reset(token)


# ------------------------------------------------------------------ sending


def _leased(address: int, n_bytes: int) -> Leased | None:
    """What a view at this address is a view of, where it is to travel as a reference."""
    if not any(0 < s.config.view_ref_bytes <= n_bytes for s in opener.sessions()):
        return None
    found = opener.at_address(address)
    if found is None:
        return None
    session, leased = found
    if not 0 < session.config.view_ref_bytes <= n_bytes:
        return None
    if leased.writable or leased.snapshot is None or _by_value.get(False):
        return None
    if leased.snapshot._region in session._freed:  # nobody could open it; the bytes are here
        return None
    return leased


def place_of(array: npt.NDArray[Any]) -> tuple[Any, ...] | None:
    """Where a large view lies: the arguments of `array_at`; None: it is to travel by value."""
    dtype = array.dtype
    if array.nbytes and not dtype.hasobject:
        start = int(array.__array_interface__["data"][0])
        leased = _leased(start, array.nbytes)
        if leased is not None:
            low, high = extent(array)
            first = leased.mapping.address
            if first <= low and high <= first + leased.mapping.length_bytes:
                strides = None if array.flags.c_contiguous else array.strides
                return leased.snapshot, start - first, dtype, array.shape, strides
    return None


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    where = place_of(array)
    return array.__reduce_ex__(5) if where is None else (array_at, where)


def _reduce_buffer(buffer: Any) -> Any:
    leased = _leased(buffer.address, buffer.size) if buffer.is_cpu else None
    if leased is not None:
        offset = buffer.address - leased.mapping.address
        if offset + buffer.size <= leased.mapping.length_bytes:
            return _buffer_of, (leased.snapshot, offset, buffer.size)
    return buffer.__reduce_ex__(5)


# ------------------------------------------------------------------ receiving


def _image_of(ref: GlobalRef[Any]) -> npt.NDArray[np.uint8]:
    session = opener.current(ref._scope)
    ref._ask_anchors(session)
    return session.open(ref, stream=False).bytes()


def array_at(
    ref: GlobalRef[Any],
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> npt.NDArray[Any]:
    """A view of a variable."""
    image: Any = _image_of(ref)
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, image, offset, strides)
    return array.view(GlobalArray)


def _buffer_of(ref: GlobalRef[Any], offset: int, n_bytes: int) -> Any:
    import pyarrow

    return pyarrow.py_buffer(_image_of(ref)[offset : offset + n_bytes])


# ------------------------------------------------------------------ the hook


def install() -> None:
    """Teaches Ray's serializer. Idempotent; called when the process attaches to a session."""
    from ray.cloudpickle import CloudPickler

    CloudPickler.dispatch_table.setdefault(np.ndarray, _reduce_array)
    CloudPickler.dispatch_table.setdefault(GlobalArray, _reduce_array)
    install_for_arrow()


def install_for_arrow() -> None:
    """The part for Arrow, once something has imported it."""
    global _arrow_installed
    if _arrow_installed:
        return
    arrow = sys.modules.get("pyarrow.lib")
    if arrow is None or not hasattr(arrow, "Buffer"):
        return
    from ray.cloudpickle import CloudPickler

    CloudPickler.dispatch_table.setdefault(arrow.Buffer, _reduce_buffer)
    _arrow_installed = True

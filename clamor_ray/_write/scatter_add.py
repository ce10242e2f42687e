"""`clamor.add_at` and its like: changes of global arrays that need no transaction of the caller's.

They say what is added, and not what is written: so two of them never conflict for good. Ids and
dtypes are checked first, against the version that is changed; then all of a call is one commit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from clamor_ray import errors
from clamor_ray._objects.layout import put_together
from clamor_ray._read.hashmap import HashMap
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._tasks import task_context
from clamor_ray._write.applying import bring
from clamor_ray._write.deltas import Array, ArrayLayout, Collector, Delta, apply, sparse
from clamor_ray._write.deltas import dense as whole
from clamor_ray._write.retry import pause_s
from clamor_ray._write.transaction import Transaction, refuse_nested
from clamor_ray._write.write_targets import WriteTarget, write_target_of

FIRST_PAUSE_S: Final = 0.002
MOST_PAUSE_S: Final = 0.5

# Others have committed meanwhile: maybe so much that the version which was read is kept no longer.
AGAIN: Final = (errors.CommitConflict, errors.SnapshotExpired, errors.NoVersionError)

Make = Callable[[tuple[int, ...], "np.dtype[Any]"], Delta]


def add_at(w: Any, ids: Any, values: Any) -> None:
    """`w[ids] += values`, where an id that is there n times is added to n times.

    One atomic commit, as NumPy's `np.add.at` on the newest version. Adds never conflict; the call
    retries by itself. A transaction that read an older version and wrote one of the
    same blocks gets `CommitConflict`, as from any commit.

    In the tasks of a stage of a `DataCollection` nothing is visible before the stage is over: then
    what all of its tasks have added is applied by one commit, once for each task however often it
    ran, floats in the same order on every run; and the references that the stage's functions were
    given move (docs/scatter_add.md).

    Args:
        w: a `GlobalRef` of an array, which moves to the new version; or an array that
            `GlobalRef.get` or a `clamor.remote` argument gave, whole.
        ids: numbers of rows (along axis 0), integers of any dtype and shape; negative ones count
            from the end. Without any, nothing is done.
        values: a scalar, or what broadcasts to ids.shape + w.shape[1:]. They are cast to w's dtype
            first, as NumPy casts "same_kind"; integers wrap, floats go to infinity.

    Raises:
        RowIdError: An id is out of bounds or no integer; an IndexError. Nothing was changed.
        TypeError: It is no array of numbers, or the values cannot be cast. Nothing was changed.
        ValueError: Values of another shape, a part of an array, or a private copy.
        FrozenReferenceError: It is a snapshot.
        NestedUpdateError: A transaction of this thread is open on the variable.
        CommitConflict: Others were first for CLAMOR_CONTROL_TIMEOUT_S seconds.
        FreedError, HomeLostError, OutOfMemoryError, ...: As `clamor.update`.

    Safe from any thread. (Clamor section 7.1.2.)

    Example:
        >>> w = clamor.zeros(1000)
        >>> clamor.add_at(w, [3, 3, -1], 1.0)
        >>> w.get()[[3, 999]]
        array([2., 1.])
    """
    _change(w, lambda shape, dtype: sparse("add", shape, dtype, ids, values))


def maximum_at(w: Any, ids: Any, values: Any) -> None:
    """`w[ids] = max(w[ids], values)`, as `np.maximum.at`: a NaN stays. Otherwise as `add_at`.

    Args:
        w: a `GlobalRef` of an array, or an array that came from one, whole.
        ids: numbers of rows (along axis 0), integers of any dtype and shape.
        values: a scalar, or what broadcasts to ids.shape + w.shape[1:].

    Raises:
        RowIdError, TypeError, ValueError, CommitConflict, ...: As `add_at`.

    Example:
        >>> w = clamor.zeros(1000)
        >>> clamor.maximum_at(w, [3, 3], [5.0, 0.0])
        >>> w.get()[[3, 4]]
        array([5., 0.])
    """
    _change(w, lambda shape, dtype: sparse("max", shape, dtype, ids, values))


def minimum_at(w: Any, ids: Any, values: Any) -> None:
    """`w[ids] = min(w[ids], values)`, as `np.minimum.at`: a NaN stays. Otherwise as `add_at`.

    Args:
        w: a `GlobalRef` of an array, or an array that came from one, whole.
        ids: numbers of rows (along axis 0), integers of any dtype and shape.
        values: a scalar, or what broadcasts to ids.shape + w.shape[1:].

    Raises:
        RowIdError, TypeError, ValueError, CommitConflict, ...: As `add_at`.

    Example:
        >>> w = clamor.zeros(1000)
        >>> clamor.minimum_at(w, [3, 3], [-5.0, 0.0])
        >>> w.get()[[3, 4]]
        array([-5.,  0.])
    """
    _change(w, lambda shape, dtype: sparse("min", shape, dtype, ids, values))


def add(w: Any, dense: Any) -> None:
    """`w += dense`, for an array of w's own shape. Otherwise as `add_at`.

    Args:
        w: a `GlobalRef` of an array, or an array that came from one, whole.
        dense: an array of w's shape; it is cast to w's dtype as NumPy casts "same_kind".

    Raises:
        ValueError: The shapes differ; nothing is broadcast.
        TypeError, FrozenReferenceError, CommitConflict, ...: As `add_at`.

    Example:
        >>> w = clamor.zeros(1000)
        >>> clamor.add(w, np.arange(1000))
        >>> float(w.get()[7])
        7.0
    """
    _change(w, lambda shape, dtype: whole(shape, dtype, dense))


def _target(w: Any) -> WriteTarget:
    if isinstance(w, HashMap):
        raise TypeError("this is a HashMap, which has no rows: use its own update")
    target = write_target_of(w)
    if target.open_as is not None:
        raise TypeError(f"{type(w).__qualname__} is no array")
    return target


def _check_not_frozen(ref: GlobalRef[Any]) -> None:
    if ref._frozen:
        raise errors.FrozenReferenceError(f"{ref!r} is a snapshot, and never changes.")


def _checked_array(value: Any, ref: GlobalRef[Any]) -> Array:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{ref!r} is a {type(value).__qualname__}, and not an array")
    return value


def _check_whole(w: Any, ref: GlobalRef[Any], layout: ArrayLayout) -> None:
    """Ids count in what the caller has: a view over all of it has other rows."""
    if not isinstance(w, np.ndarray):
        return
    if (w.shape, w.dtype) != (layout.shape, layout.dtype) or any(
        n > 1 and mine != own
        for n, mine, own in zip(w.shape, w.strides, layout.strides, strict=True)
    ):
        raise ValueError(
            f"this is a view of {ref!r}: shape {w.shape} of {w.dtype}, where the variable has "
            f"shape {layout.shape} of {layout.dtype}, or with its axes in another order. Pass the "
            "object that the view was taken from, or the reference"
        )


def _change(w: Any, make: Make) -> None:
    target = _target(w)
    context = task_context.current()
    if context is not None and id(target.ref) in context.moving:
        target = WriteTarget(target.ref._thawed())
    into = context.scatter_adds if context is not None else None
    if context is not None and into is not None and not context.has_made(target.ref._region):
        _collect(into, target, w, make)
        return
    _check_not_frozen(target.ref)
    if isinstance(w, np.ndarray):
        _check_whole(w, target.ref, _layout_of(target.ref.snapshot()))
    deadline = (
        time.monotonic() + process_sessions.current(target.ref._scope).config.control_timeout_s
    )
    n_tries = 0
    while True:
        try:
            _change_once(target, make)
            return
        except AGAIN:
            wait_s = pause_s(n_tries, FIRST_PAUSE_S, MOST_PAUSE_S, random.uniform)
            if time.monotonic() + wait_s > deadline:
                raise
        # Outside of the handler: nothing of the failed try is kept alive meanwhile.
        time.sleep(wait_s)
        n_tries += 1


def _change_once(target: WriteTarget, make: Make) -> None:
    if not any(n_bytes for _, n_bytes in target.ref._plan.buffers):
        array = _checked_array(target.ref.get(), target.ref)
        make(array.shape, array.dtype)  # an array without elements: only what is wrong can be said
        return
    transaction = Transaction([target], single=True)
    with transaction as value:
        array = _checked_array(value, target.ref)
        delta = make(array.shape, array.dtype)
        if delta.values.size:
            session = process_sessions.current(target.ref._scope)
            bring(session, transaction.lease, array, [delta.ids])
            apply(array, delta)


# ------------------------------------------------------------------ in a stage's tasks


def _collect(into: Collector, target: WriteTarget, w: Any, make: Make) -> None:
    """Keeps it until the stage ends: see docs/scatter_add.md."""
    ref = target.ref
    ref._check_not_freed()
    if target.private:
        raise ValueError(
            f"{target.private}; it is not a version of the variable. Pass the reference."
        )
    refuse_nested([target])
    _check_not_frozen(ref)
    at = ref.snapshot()
    key = (at._region, at.version)
    if key not in into.layouts:
        into.layouts[key] = layout_at_or_after(at)
    layout = into.layouts[key]
    _check_whole(w, at, layout)
    delta = make(layout.shape, layout.dtype)
    if delta.values.size:
        into.add(at, delta)


def layout_at_or_after(at: GlobalRef[Any]) -> ArrayLayout:
    """How the array of a version lies, or of the newest where that is kept no longer: only what
    grew differs."""
    deadline = time.monotonic() + process_sessions.current(at._scope).config.control_timeout_s
    while True:
        try:
            return _layout_of(at)
        except (errors.SnapshotExpired, errors.NoVersionError):
            if time.monotonic() > deadline:
                raise
            at = at._latest()


def _layout_of(at: GlobalRef[Any]) -> ArrayLayout:
    if at._payload is not None:  # no view of it: that would be a read of all of it
        value = put_together(np.frombuffer(at._payload, np.uint8), at._plan)
    else:
        value = at.get()
    array = _checked_array(value, at)
    return ArrayLayout(array.shape, array.dtype, array.strides)

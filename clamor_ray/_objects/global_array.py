"""`GlobalArray`: the arrays of an object that `get` returns. In: views of global memory. Out: the
same, as arrays that gather absent rows by themselves. Pure: what gathers is set from above.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

LEAST_BYTES: Final = 4096  # a smaller array comes with one fault
WHOLE_NS: Final = 1_000_000_000  # that all of a version is here is believed at most

_array_type: Any = importlib.import_module("clamor_ray._array_type")  # C has no types to check

if TYPE_CHECKING:
    _Base = np.ndarray[Any, np.dtype[Any]]
else:
    _Base = _array_type.ArrayBase

_take: Callable[[Any, Any], Any] = lambda array, ids: NotImplemented  # noqa: E731


def set_gather(gather: Callable[[Any, Any], Any], explain: Callable[[Any], str | None]) -> None:
    """What absent rows come by.

    Args:
        gather: (array, key of advanced indexing) -> a new array, or NotImplemented where NumPy is
            to index.
        explain: (array) -> what an error says of one that is read-only; None: nothing.
    """
    global _take
    _take = gather
    _array_type.set_functions(gather, explain)


def believe(begin: int, end: int, is_whole: Callable[[], bool]) -> None:
    """The function of `set_gather` has just found rows of that memory to be here. Where all of it
    is, it is not asked again for a moment: 10 ms, and as long again each time that rows are found,
    for a second in all.

    Args:
        begin, end: of a version's memory, addresses.
        is_whole: whether all of it is here; called now and then, for a hundredth of the time.
    """
    if _array_type.believe(begin, end):
        start_ns = time.monotonic_ns()
        is_here = is_whole()
        pause_ns = max(WHOLE_NS, 100 * (time.monotonic_ns() - start_ns))
        _array_type.looked(begin, is_here, WHOLE_NS, pause_ns)


def forget(begin: int) -> None:
    """Nothing is believed of that memory any more. Takes no lock.

    Args:
        begin: as of `believe`.
    """
    _array_type.forget(begin)


class GlobalArray(_Base):
    """An array over global memory: an `numpy.ndarray` whose `table[ids]` and `take` gather.

    Where rows that are asked for are not on this node, they come in few round trips, as by
    `clamor.gather`; where all are here, NumPy indexes as ever. Slices are of this type, too. What
    is no view of global memory (results of ufuncs, copies, gathered rows) is a plain array, and so
    is what comes out of a pickle.

    `GlobalRef.get` and tasks give it for each array of 4 KiB or more, wherever it is inside the
    object.

    Raises:
        ValueError: It is written to, and it is a version of a variable: use `clamor.update`.

    Example:
        >>> table = clamor.put(np.arange(10_000.0).reshape(1000, 10)).get()
        >>> type(table).__name__, isinstance(table, np.ndarray)
        ('GlobalArray', True)
        >>> table[[3, 999]].sum(axis=1).tolist()
        [345.0, 99945.0]
    """

    __slots__ = ()

    def take(self, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> Any:
        """As `numpy.ndarray.take`; absent rows are gathered."""
        if out is None and mode == "raise" and (axis == 0 or (axis is None and self.ndim == 1)):
            numbers = indices if isinstance(indices, np.ndarray) else np.asarray(indices)
            if numbers.dtype.kind in "iu":  # of a mask NumPy takes rows 0 and 1
                rows = _take(self, numbers)
                if rows is not NotImplemented:
                    return rows
        return plain(self).take(indices, axis, out, mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __reduce__(self) -> Any:
        return plain(self).__reduce__()

    def __copy__(self) -> Any:
        return plain(self).__copy__()

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self).__deepcopy__(memo)


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as a plain array."""
    return array.view(np.ndarray)


def _by_plain(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(plain(self), name)(*args, **options)

    method.__name__ = name
    method.__qualname__ = f"GlobalArray.{name}"
    method.__doc__ = getattr(np.ndarray, name).__doc__
    return method


# What makes new arrays, but for ufuncs: NumPy would give them this type.
_NEW: Final = (
    *("copy", "astype", "flatten", "repeat", "choose", "compress", "byteswap", "argsort"),
    *("argpartition", "searchsorted", "nonzero", "dot", "round"),
)
for _name in _NEW:
    setattr(GlobalArray, _name, _by_plain(_name))


def plain_or_same(value: Any) -> Any:
    """A `GlobalArray` as a plain array; anything else as it is."""
    return plain(value) if type(value) is GlobalArray else value


def as_global(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array over global memory, as `get` gives it."""
    if array.nbytes < LEAST_BYTES or array.dtype.hasobject:
        return array
    return array.view(GlobalArray)

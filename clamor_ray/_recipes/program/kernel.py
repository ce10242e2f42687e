"""`Kernel`: a C function in place of a stage's Python function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._native.base import c

OF_CTYPES: Final[Any] = ctypes.CFUNCTYPE(None).__base__  # all functions of C


class Kernel:
    """A C function that runs the tasks of a stage, without Python (docs/recipes.md has its struct).

    Each process that runs tasks calls `load` once, for an address is good in one process only. The
    stage says itself whether it sends, with ``sends=True``: nobody can see that in a C function.

    Args:
        load: Picklable by value. It returns the function: what ``numba.cfunc`` makes, a function of
            a ``ctypes.CDLL``, a pointer of cffi, or its address as an int.
        name: For people; that of `load` if left out.

    Raises:
        TypeError: `load` cannot be called.

    Example:
        >>> def load():
        ...     import ctypes
        ...     return ctypes.CDLL(None).getpid
        >>> clamor.Kernel(load, name="getpid")
        Kernel('getpid')
    """

    def __init__(self, load: Callable[[], Any], name: str | None = None) -> None:
        if not callable(load):
            raise TypeError(f"load is a function that returns a C function, not {load!r}")
        self._load = load
        self.__name__ = name or str(getattr(load, "__name__", "kernel"))
        self._loaded: Any = None

    def address(self) -> int:
        """Of the function, in this process. What `load` has returned stays as long as this.

        Returns:
            For C.

        Raises:
            ProgramError: `load` has returned no C function.
            Exception: Any of `load`.

        Example:
            >>> import ctypes
            >>> clamor.Kernel(lambda: ctypes.CDLL(None).getpid).address() > 0
            True
        """
        if self._loaded is None:  # threads that come here at once load it twice
            self._loaded = self._load()
        loaded = self._loaded
        found = _address_of(loaded)
        if not found:
            raise errors.ProgramError(
                f"{self!r}: load() returned {loaded!r}, which is no C function.",
                hint="Return a numba.cfunc, a function of ctypes or cffi, or its address.",
            )
        return found

    def __call__(self, *_: Any) -> Any:
        raise errors.ProgramError(f"{self!r} runs in the matcher of a worker, and not in Python.")

    def __repr__(self) -> str:
        return f"Kernel({self.__name__!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}  # of this process


def _address_of(loaded: Any) -> int:
    if isinstance(loaded, int):
        return loaded
    if isinstance(getattr(loaded, "address", None), int):  # numba.cfunc
        return int(loaded.address)
    if isinstance(loaded, OF_CTYPES):
        return ctypes.cast(loaded, ctypes.c_void_p).value or 0
    try:
        return int(c.ffi.cast("intptr_t", loaded))  # of any FFI
    except TypeError:
        return 0

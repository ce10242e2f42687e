"""NumPy's memory handler (NEP 49) for a block of code: its arrays lie in an arena.

NumPy keeps the handler in force in a context variable, so that other threads and coroutines are
not concerned, and each array keeps the handler that made it, so that it is freed by the same.
NumPy has no Python interface for this: its C function is called through ctypes. It is entry 304 of
the C interface of NumPy 1.22 and all later versions, which never renumber it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from clamor_ray._build.arena import NumpyHandler

_SET_HANDLER: Final = 304  # PyDataMem_SetHandler in NumPy's C-API table
_CAPSULE_NAME: Final = b"mem_handler"  # what NumPy asks for; PyCapsule keeps the pointer

# Handlers in use, by the address of their capsule: arrays hold capsules, not Python objects.
_kept: dict[int, NumpyHandler] = {}


def _forget(capsule: int) -> None:
    _kept.pop(capsule, None)


_DESTRUCTOR_TYPE: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_destructor: Any = _DESTRUCTOR_TYPE(_forget)
# Arrays may outlive this module at the interpreter's end, and their capsules call this.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_destructor))


@functools.cache
def _set_handler() -> Callable[[Any], Any]:
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:  # NumPy 1
        module = importlib.import_module("numpy.core._multiarray_umath")
    # Prototypes of our own: the functions that ctypes.pythonapi hands out are shared.
    kind: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = kind(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ctypes.cast(pointer_of(module._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    prototype: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    function: Callable[[Any], Any] = prototype(table[_SET_HANDLER])
    return function


def make_capsule(handler: NumpyHandler) -> Any:
    """A handler as NumPy takes it. The handler lives as long as the capsule or any array of it."""
    kind: Any = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR_TYPE
    )
    capsule = kind(("PyCapsule_New", ctypes.pythonapi))(handler.address, _CAPSULE_NAME, _destructor)
    _kept[id(capsule)] = handler
    return capsule


@contextmanager
def in_force(capsule: Any) -> Iterator[None]:
    """Inside the block NumPy allocates the data of new arrays by this handler."""
    set_handler = _set_handler()
    previous = set_handler(capsule)
    try:
        yield
    finally:
        set_handler(previous)

"""An arena of the page cache as a Python object, and what other allocators need of it.

Beside `_native.client` and `_native.base` the only file that touches cffi. Nothing here imports
Ray.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import PC_ERR_DENIED, PC_ERR_RANGE, c, check
from clamor_ray._objects.layout import format_bytes


class MallocFunctions(NamedTuple):
    """Addresses of C functions that allocate in the calling thread's current region.

    Outside of a `Region.malloc` block they allocate like those of the C library. `free` takes
    blocks of either kind, on any thread at any time.

    Args:
        malloc, calloc, realloc, aligned_alloc, free: addresses of functions like the C
            library's of that name.

    Example:
        >>> import ctypes
        >>> with clamor.build(1 << 20) as r, r.malloc():
        ...     f = r.malloc_functions()
        ...     malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(f.malloc)
        ...     ref = r.publish(r.pointer(malloc(100), 100))
        >>> f.malloc != f.free
        True
    """

    malloc: int
    calloc: int
    realloc: int
    aligned_alloc: int
    free: int


def _address_of(name: str) -> int:
    return int(c.ffi.cast("uintptr_t", c.ffi.addressof(c.lib, name)))


def malloc_functions() -> MallocFunctions:
    """The functions of `MallocFunctions`."""
    return MallocFunctions(*(_address_of(f"pc_current_{n}") for n in MallocFunctions._fields))


def address_of(pointer: Any) -> int:
    """The address in an integer, or in a pointer of ctypes or cffi.

    Raises:
        TypeError: It is none of those.
    """
    if hasattr(pointer, "__index__"):
        return int(pointer.__index__())
    if isinstance(pointer, ctypes.c_void_p):
        return int(pointer.value or 0)
    if isinstance(pointer, ctypes._Pointer | ctypes._SimpleCData):
        return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
    if isinstance(pointer, c.ffi.CData):
        return int(c.ffi.cast("uintptr_t", pointer))
    raise TypeError(f"no address: {pointer!r}")


def patch(name: str) -> str:
    """Points a loaded library's imports of malloc at the current arena. Returns its path.

    Raises:
        MallocShimError: It is not loaded, must not be patched, or imports no malloc.
    """
    path = c.ffi.new("char[]", 4096)
    code = int(c.lib.pc_shim_patch(name.encode(), path, 4096))
    found = str(c.ffi.string(path).decode()) or name
    if code in (PC_ERR_DENIED, PC_ERR_RANGE):
        why = c.ffi.string(c.lib.pc_last_message()).decode("utf-8", "replace")
        raise errors.MallocShimError(f"Allocations cannot be led into a region: {why}.", code=code)
    if check(code, library=found) == 0:
        raise errors.MallocShimError(
            f"{found} imports no malloc, free or operator new.",
            hint="Its allocator is linked into it, or in a library below: name that one.",
        )
    return found


def patch_any(names: list[str]) -> list[str]:
    """Does so with what belongs to one package, where not every part need allocate. Returns the
    paths of those that do.

    Raises:
        MallocShimError: One must not be patched, or none imports malloc.
    """
    paths = []
    without: errors.MallocShimError | None = None
    for name in names:
        try:
            paths.append(patch(name))
        except errors.MallocShimError as error:
            if error.code is not None:  # refused
                raise
            without = error
    if not paths and without is not None:
        raise without
    return paths


class ArenaBlock:
    """Memory of an arena, given back when the last array over it is gone."""

    __slots__ = ("__weakref__", "_arena", "address", "n_bytes")

    def __init__(self, arena: Arena, address: int, n_bytes: int) -> None:
        self._arena = arena
        self.address = address
        self.n_bytes = n_bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.n_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def bytes(self) -> npt.NDArray[np.uint8]:
        return np.asarray(self)

    def __del__(self) -> None:
        self._arena.free(self.address)


def _drop(pointer: Any, lease: Any) -> None:
    c.lib.pc_arena_drop(pointer)  # before the lease goes, and somebody else has the addresses
    del lease


class Arena:
    """An allocator over a mapping that is written. Safe from any thread.

    Args:
        address, length_bytes: of the mapping.
        lease: what keeps it mapped; kept for as long as anything of the arena is in use.

    Raises:
        OutOfMemoryError: For its own tables.
    """

    def __init__(self, address: int, length_bytes: int, lease: Any) -> None:
        out = c.ffi.new("pc_arena **")
        check(c.lib.pc_arena_open(address, length_bytes, out), address=hex(address))
        self._pointer = out[0]
        self._lib, self._ffi = c.lib, c.ffi  # blocks are freed when modules may be gone
        self.address = address
        self.length_bytes = length_bytes
        weakref.finalize(self, _drop, self._pointer, lease).atexit = False

    @property
    def used_bytes(self) -> int:
        """From the start to the end of what was ever handed out."""
        return int(c.lib.pc_arena_used_bytes(self._pointer))

    def allocate(self, n_bytes: int, alignment: int = 16, *, zeros: bool = False) -> ArenaBlock:
        """New memory; with `zeros` aligned as malloc does, and untouched where it is fresh.

        Raises:
            NoSpaceError: The region is full.
        """
        if zeros:
            pointer = c.lib.pc_calloc(self._pointer, 1, n_bytes)
        else:
            pointer = c.lib.pc_aligned_alloc(self._pointer, alignment, n_bytes)
        if pointer == c.ffi.NULL:
            raise errors.NoSpaceError(
                f"The region of {format_bytes(self.length_bytes)} has no room for "
                f"{format_bytes(n_bytes)} more; {format_bytes(self.used_bytes)} are in use.",
                hint="Make it larger: addresses cost nothing until they are written.",
            )
        return ArenaBlock(self, int(c.ffi.cast("uintptr_t", pointer)), n_bytes)

    def free(self, address: int) -> None:
        self._lib.pc_free(self._pointer, self._ffi.cast("void *", address))

    def close(self) -> None:
        """Allocations fail and frees do nothing from here on."""
        check(c.lib.pc_arena_close(self._pointer))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes it this thread's current arena for the block."""
        previous = c.lib.pc_arena_enter(self._pointer)
        try:
            yield
        finally:
            c.lib.pc_arena_enter(previous)

    def numpy_handler(self) -> NumpyHandler:
        return NumpyHandler(self)


class NumpyHandler:
    """A `PyDataMem_Handler` in C over an arena; must live until the last array made with it."""

    def __init__(self, arena: Arena) -> None:
        pointer = c.lib.pc_numpy_handler_new(arena._pointer)
        if pointer == c.ffi.NULL:
            raise errors.OutOfMemoryError("There is no memory for a NumPy memory handler.")
        self.arena = arena
        self.address = int(c.ffi.cast("uintptr_t", pointer))
        weakref.finalize(self, c.lib.pc_numpy_handler_free, pointer).atexit = False

"""`Pointer`: an address inside a region, which means the same in every process."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from clamor_ray.errors import AddressClashError, UnpicklableError


def _pointer_at(buffer: Any, address: int) -> Pointer:
    memory = np.frombuffer(buffer, np.uint8)
    there = int(memory.__array_interface__["data"][0])
    if there != address:
        raise AddressClashError(
            f"The structure at {address:#x} holds pointers, and its region is mapped here so that "
            f"it lies at {there:#x}.",
            hint="Another version of it is mapped at its address in this process: let go of what "
            "came from that first.",
        )
    return Pointer(address, memory)


class Pointer:
    """An address inside a region, for C and C++ code. Keeps the region mapped while it lives.

    Made by `Region.pointer`; inside an object that `Region.publish` was given it arrives in other
    processes as the same address, with the region mapped there. ctypes functions take it for a
    `void *`; for cffi use ``ffi.cast("Tree *", int(pointer))``.

    Only data is at the same place everywhere. Addresses of functions are not: what it points to
    may hold no function pointers and no objects with virtual functions, unless the reader sets
    them anew, and must be read by the same build of the library that wrote it.

    Args:
        address: in every process.
        memory: the bytes from there on, shape (n,), uint8; what they rest on keeps the mapping.

    Example:
        >>> import ctypes
        >>> with clamor.build(1 << 20) as r:
        ...     a = r.zeros(1000)
        ...     a[0] = 2.5
        ...     ref = r.publish(r.pointer(a.ctypes.data))
        >>> ctypes.c_double.from_address(int(ref.get())).value
        2.5
    """

    __slots__ = ("__weakref__", "address", "memory")

    def __init__(self, address: int, memory: npt.NDArray[np.uint8]) -> None:
        self.address = address
        self.memory = memory

    @property
    def nbytes(self) -> int:
        """How many bytes belong to it, from the address on."""
        return int(self.memory.nbytes)

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address)

    def __int__(self) -> int:
        return self.address

    def reduction(self) -> tuple[Any, ...]:
        """How it travels inside a published object.

        Returns:
            A function and its arguments, as `object.__reduce__`.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     ref = r.publish(r.pointer(r.zeros(1000).ctypes.data))
            >>> function, (buffer, address) = ref.get().reduction()
            >>> address == int(ref.get())
            True
        """
        return _pointer_at, (pickle.PickleBuffer(memoryview(cast(Any, self.memory))), self.address)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableError(
            f"{self!r} cannot be pickled by itself.",
            hint="Pass the reference that region.publish(pointer) returned, and get() it there.",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pointer) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"Pointer({self.address:#x})"

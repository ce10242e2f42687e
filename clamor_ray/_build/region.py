"""`clamor.build`: objects built straight into global memory, without a second copy."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._build import (
    arena as _arena,
)
from clamor_ray._build import (
    libraries as _libraries,
)
from clamor_ray._build import (
    numpy_allocator as _numpy_allocator,
)
from clamor_ray._build.arena import Arena, ArenaBlock, MallocFunctions
from clamor_ray._build.kept import Kept
from clamor_ray._counting.anchors import Anchor, Anchors
from clamor_ray._labels import capital, label
from clamor_ray._objects.layout import (
    BLOCK_BYTES,
    BUFFER_ALIGNMENT,
    array_shape,
    format_bytes,
    round_up,
    take_apart_in_place,
)
from clamor_ray._objects.pointer import Pointer
from clamor_ray._protocol.config import SEAL_S
from clamor_ray._read import opener
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef
from clamor_ray._spans import record as spans
from clamor_ray._tasks import task_context

if TYPE_CHECKING:
    from clamor_ray._session.session import Session


class Region:
    """Global memory in which an object is built. Made by `clamor.build`, used in its block.

    Its methods may be called from any thread while the block lasts; "this thread" in their
    descriptions is the caller's.

    Args:
        nbytes: length; it is rounded up to whole blocks of 4 KiB.
        spill: it is on disk.

    Raises:
        ValueError: Fewer than one byte, or a second block.

    Example:
        >>> with clamor.build(1 << 20) as r:
        ...     ref = r.publish(r.zeros(1000))
        >>> r.nbytes, ref.version
        (1048576, 0)
    """

    def __init__(self, nbytes: int, *, spill: bool = False) -> None:
        nbytes = operator.index(nbytes)
        if nbytes <= 0:
            raise ValueError(f"a region has at least one byte, not {nbytes}")
        self._length_bytes = round_up(nbytes, BLOCK_BYTES)
        self._on_disk = spill
        self._state = "not entered"
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._record: Any = None
        self._lease: Lease | None = None
        self._arena: Arena | None = None
        self._capsule: Any = None
        self._arrays: list[weakref.ref[npt.NDArray[Any]]] = []
        self._ref: GlobalRef[Any] | None = None
        self._anchor: Anchor | None = None  # of what was published,
        self._inside: Anchors = ()  # and of references in it
        self._is_leased = False  # its page server has sealed it: what is mapped here is a lease
        self._published: Any = None  # must stay where it is until the seal
        self._has_malloc = False  # libraries have allocated in it
        self._kept: Kept | None = None

    # -- the block

    def _create(self, session: Session) -> tuple[Session, Any]:
        size = self._length_bytes
        return session, session.creator.create_region(size, self._on_disk)

    def __enter__(self) -> Region:
        if self._state != "not entered":
            raise ValueError("a region is built once: make a new one")
        session, record = opener.given().with_current(self._create)
        task_context.made(record.region)
        timeout_s = session.config.connect_timeout_s
        try:
            with session.creator.room_on_disk(self._length_bytes):
                mapping = session.client.build(
                    *(record.region, record.base_address, record.length_bytes),
                    on_disk=record.on_disk,
                    timeout_s=timeout_s,
                )
            lease = Lease(session.client, session.leases, mapping, record.region, writable=True)
            self._arena = Arena(mapping.address, mapping.length_bytes, lease)
        except BaseException:
            with contextlib.suppress(errors.ClamorError):
                session.rpc.abandon(record.region)
            raise
        self._session, self._record, self._lease = session, record, lease
        self._length_bytes = mapping.length_bytes
        self._open()
        return self

    def _open(self) -> None:
        self._began_ns = time.time_ns()
        self._state = "open"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a fork of the process whose region it is
        arena = self._opened()
        self._state = "closed"
        arena.close()
        details = {"region": self._record.region, **spans.error_of(kind)}
        spans.here.note(self._session.scope, "build", self._began_ns, **details)
        if error is not None or self._ref is None:
            self._abandon()
            if error is None:
                warnings.warn(
                    f"{self!r}: the block ended and nothing was published; what was built in it "
                    "is gone. Call publish(...) before the end of the block.",
                    errors.ClamorWarning,
                    stacklevel=2,
                )
            return
        try:
            self._seal()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._forget()

    def _seal(self) -> None:
        session, lease, region = self._session, self._lease, self._record.region
        assert lease is not None
        assert self._anchor is not None
        # First: who writes after the seal gets a ValueError, not a signal, wherever we can.
        for reference in self._arrays:
            array = reference()
            if array is not None:
                array.flags.writeable = False
        try:
            with spans.span(session.scope, "publish", region=region):
                session.client.build_seal(
                    lease.mapping.id, timeout_s=max(SEAL_S, session.config.connect_timeout_s)
                )
                self._is_leased = True
                session.creator.seal_built(region, self._anchor, self._inside)
        except errors.FreedError as error:
            raise errors.ServerUnavailableError(
                f"{capital(label(region))} was given up while it was built: the page server of "
                "this node was restarted, or the block took more than 10 minutes.",
                code=error.code,
                hint="Nothing is left of it: build it again.",
            ) from error
        lease.writable = False
        self._state = "sealed"

    def _forget(self) -> None:
        # What is still in use keeps the lease; this object does not.
        if self._has_malloc and self._kept is None:
            assert self._lease is not None
            assert self._arena is not None
            self._kept = Kept(self._session.client, self._lease, self._arena)
        self._published = self._capsule = self._arena = self._lease = None
        self._ref = self._anchor = None  # they would keep the variable
        self._inside = ()

    def _abandon(self) -> None:
        if self._ref is not None:
            self._ref._mark_freed()
        self._state = "abandoned"
        assert self._lease is not None
        lease = weakref.ref(self._lease)
        if self._has_malloc:
            with contextlib.suppress(errors.ClamorError):  # sealed, or the session is over
                self._session.client.build_drop(self._lease.mapping.id)
        self._forget()
        if lease() is not None and not self._has_malloc and not self._is_leased:
            # Arrays of it are still there, with their memory. When they are gone the page server
            # is told; the registry ends what was not sealed by itself.
            return
        # What was sealed, as far as the registry knows or not, goes with the last array of it.
        with contextlib.suppress(errors.ClamorError):
            self._session.rpc.abandon(self._record.region, self._is_leased)

    def _opened(self) -> Arena:
        if self._state != "open" or self._arena is None:
            raise errors.ClosedError(
                f"{self!r} is not being built.", hint="Use it inside its own with block."
            )
        return self._arena

    # -- what there is

    @property
    def nbytes(self) -> int:
        """Length: the bytes of addresses, used or not."""
        return self._length_bytes

    @property
    def used_bytes(self) -> int:
        """From its start to the end of what was ever allocated in it."""
        return self._opened().used_bytes

    @property
    def address(self) -> int:
        """Where it begins, in every process."""
        self._opened()
        return int(self._record.base_address)

    # -- building

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> npt.NDArray[Any]:
        """A new array in the region; its content is arbitrary, and costs nothing until written.

        Args:
            shape: length of each axis, a number or a tuple of them.
            dtype: of the elements, plain data: one that holds no Python objects.

        Returns:
            An array in C order. Writable until the block ends.

        Raises:
            NoSpaceError: The region is full.
            ValueError: A dtype that holds Python objects, or a negative dimension.
            ClosedError: Outside of the block.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     a = r.empty((1000, 3), np.float32)
            ...     a[:] = 1
            ...     ref = r.publish(a)
        """
        return self._array(shape, dtype, zeros=False)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> npt.NDArray[Any]:
        """A new array of zeros in the region. Fresh memory costs nothing until it is written.

        Args:
            shape: length of each axis, a number or a tuple of them.
            dtype: of the elements, plain data: one that holds no Python objects.

        Returns:
            An array in C order. Writable until the block ends.

        Raises:
            NoSpaceError, ValueError, ClosedError: As `empty`.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     a = r.zeros(1000)
            ...     a[7] = 1
            ...     ref = r.publish(a)
            >>> float(ref.get().sum())
            1.0
        """
        return self._array(shape, dtype, zeros=True)

    def _array(self, shape: Any, dtype: Any, *, zeros: bool) -> npt.NDArray[Any]:
        arena = self._opened()
        dtype, dims, n_bytes = array_shape(shape, dtype)
        alignment = BLOCK_BYTES if n_bytes >= BLOCK_BYTES else BUFFER_ALIGNMENT
        block = arena.allocate(n_bytes, alignment, zeros=zeros)
        image: Any = block.bytes()
        array: npt.NDArray[Any] = np.ndarray(dims, dtype, image)
        self._remember(array)
        return array

    def _remember(self, array: npt.NDArray[Any]) -> None:
        with self._lock:
            self._arrays.append(weakref.ref(array))
            n_arrays = len(self._arrays)
            if n_arrays >= 1024 and n_arrays & (n_arrays - 1) == 0:
                self._arrays = [known for known in self._arrays if known() is not None]

    @contextlib.contextmanager
    def numpy_allocator(self) -> Iterator[None]:
        """Inside the block NumPy allocates the data of new arrays in the region (NEP 49).

        For this thread (or coroutine) only; blocks may be nested. Temporary arrays lie there too,
        and go when they are freed. An array may outlive the block and the region's own: it keeps
        its memory, which is read-only by then: do not write to it (that is a segmentation fault,
        unless it was published, when it is a ValueError).

        Raises:
            ClosedError: Outside of the region's block.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     with r.numpy_allocator():
            ...         b = np.sort(np.arange(1000)[::-1])
            ...     ref = r.publish(b)
            >>> int(ref.get()[3])
            3
        """
        arena = self._opened()
        with self._lock:
            if self._capsule is None:
                self._capsule = _numpy_allocator.make_capsule(arena.numpy_handler())
            capsule = self._capsule
        with _numpy_allocator.in_force(capsule):
            yield

    @contextlib.contextmanager
    def malloc(self, *libraries: Any) -> Iterator[None]:
        """Inside the block this thread's allocations in the libraries lie in the region.

        Their imports of malloc and its kin (with operator new: those of the C++ library) are
        pointed at functions of ours, and stay so: outside of such blocks, and on other threads,
        these call the process's malloc, and they know forever what lies in a region.

        Call nothing in the block but what builds the structure: whatever else allocates through
        these libraries on this thread (the C++ library is everybody's) lands in the region too,
        and so does what the libraries keep for themselves, such as caches. All that may be read,
        written and freed here for as long as the process lives: the region stays mapped in it
        after the block, copy-on-write, until `let_go`. What is written after the block nobody
        else sees.
        Blocks must be freed by these libraries, or by `malloc_functions().free`.

        Args:
            libraries: paths or sonames of loaded libraries, `ctypes.CDLL`, cffi libraries,
                extension modules, or packages (`faiss`): all extension modules of theirs that are
                loaded. None at all: only `malloc_functions` are concerned.

        Raises:
            MallocShimError: A library is not loaded, imports no malloc, has one of its own, or is
                Python, NumPy or the C library, whose memory must not lie in a region.
            ClosedError: Outside of the region's block.

        Example:
            >>> import pyroaring
            >>> with clamor.build(1 << 20) as r:
            ...     with r.malloc(pyroaring):
            ...         bits = pyroaring.BitMap(range(0, 10**5, 3))
            ...     ref = r.publish(np.array(bits.to_array()))
            >>> len(bits)
            33334
        """
        arena = self._opened()
        assert self._lease is not None
        for library in libraries:
            _arena.patch_any(_libraries.names_of(library))
        with self._lock:
            if not self._has_malloc:
                self._session.client.build_keep(self._lease.mapping.id)
            self._has_malloc = True
        with arena.entered():
            yield

    def let_go(self) -> None:
        """Tells that nothing that libraries made in `malloc` blocks is in use here any more.

        Until then the region stays mapped in this process, privately: what those libraries write
        to it after the block is seen here only. Afterwards it is unmapped with the last array over
        it, and using what they made ends the process. So a process that has built by a library
        whose state lives as long as the process (pybind11 and SWIG modules have such state) does
        not call this. One that has built by plain C functions, and has only the addresses that
        were published, should: the node keeps version 0 for as long as it is mapped.

        Calling it again, or where no `malloc` block was entered, changes nothing.

        Raises:
            ClosedError: The region is still being built.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     with r.malloc():
            ...         pass  # C code builds here
            ...     ref = r.publish(r.zeros(1000))
            >>> r.let_go()
        """
        if self._state == "open":
            raise errors.ClosedError(
                f"{self!r} is being built.", hint="Let go of it after the end of its block."
            )
        if self._kept is not None:
            self._kept.let_go()

    def malloc_functions(self) -> MallocFunctions:
        """Addresses of C functions for libraries that take an allocator.

        They allocate in the region whose `malloc` block the calling thread is in, and else like
        the C library. `free` takes blocks of either kind, on any thread, also after the seal.

        Returns:
            Their addresses, as integers.

        Example:
            >>> import ctypes
            >>> with clamor.build(1 << 20) as r, r.malloc():
            ...     f = r.malloc_functions()
            ...     malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(f.malloc)
            ...     ref = r.publish(r.pointer(malloc(100), 100))
            >>> ref.get().nbytes
            100
        """
        return _arena.malloc_functions()

    def pointer(self, address: Any, nbytes: int | None = None) -> Pointer:
        """An address inside the region as an object that can be published.

        Args:
            address: an integer, or a pointer of ctypes or cffi.
            nbytes: how many bytes belong to it; None for all up to the region's end.

        Returns:
            A `Pointer`.

        Raises:
            ValueError: It is not inside the region, e.g. because something else allocated it.
            TypeError: It is no address.
            ClosedError: Outside of the block.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     a = r.zeros(1000)
            ...     ref = r.publish(r.pointer(a.ctypes.data, a.nbytes))
            >>> ref.get().nbytes
            8000
        """
        self._opened()
        assert self._lease is not None
        at = _arena.address_of(address)
        offset = at - self.address
        length = self._length_bytes - offset if nbytes is None else operator.index(nbytes)
        if offset < 0 or length < 1 or offset + length > self._length_bytes:
            raise ValueError(
                f"{length} bytes at {at:#x} are not inside the region, {self.address:#x} to "
                f"{self.address + self._length_bytes:#x}: was it allocated inside "
                "`with region.malloc(library)`, on this thread, by that library?"
            )
        return Pointer(at, self._lease.bytes()[offset : offset + length])

    # -- publishing

    def publish(self, obj: Any, *, fixed: bool = False) -> GlobalRef[Any]:
        """Makes this object the global variable that the region becomes when the block ends.

        What of it lies in the region stays where it is, and is not copied; other buffers are
        copied into the region. Until the block ends the region is not sealed: the reference may
        be passed on, and `get` from anywhere fails. What is written to the object's arrays until
        then is part of it; the arrays themselves are kept.

        Args:
            obj: arrays, a `Pointer`, or anything with those in it that can be pickled.
            fixed: it holds pointers into the region as plain numbers, so that it must be mapped at
                the region's own address; implied where there is a `Pointer` in it.

        Returns:
            A reference. At the end of the block it is version 0; if that ends with an exception
            it is freed.

        Raises:
            NoSpaceError: The region has no room for what must be copied. It may be called again.
            UnpicklableError: Something in the object cannot be pickled.
            ValueError: Something was published already.
            ClosedError: Outside of the block.

        Example:
            >>> with clamor.build(1 << 20) as r:
            ...     a = r.zeros(1000)
            ...     ref = r.publish({"a": a, "where": r.pointer(a.ctypes.data)})
            >>> ref.get()["a"].shape
            (1000,)
        """
        arena = self._opened()
        if self._ref is not None:
            raise ValueError("a region holds one object: publish a dict or a tuple of them")
        assert self._lease is not None
        blocks: list[ArenaBlock] = []

        def place(n_bytes: int, alignment: int) -> int:
            blocks.append(arena.allocate(n_bytes, alignment))
            return blocks[-1].address - self.address

        taken = take_apart_in_place(
            obj,
            self.address,
            self.address + self._length_bytes,
            place,
            capacity_bytes=self._length_bytes,
            fixed=fixed,
        )
        image = self._lease.bytes()
        for offset, view in taken.pieces:
            image[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
        for array in taken.arrays:
            if self._holds(array):
                self._remember(array)
        self._published = obj, taken.buffers, blocks
        self._anchor, self._inside = self._session.creator.anchor(), taken.inside
        self._ref = self._session.creator.ref(self._record, taken.plan, (self._anchor,))
        return self._ref

    def _holds(self, array: npt.NDArray[Any]) -> bool:
        offset = int(array.__array_interface__["data"][0]) - self.address
        return 0 <= offset < self._length_bytes

    def __repr__(self) -> str:
        region = "" if self._record is None else f" {self._record.region}"
        return f"Region{region}({format_bytes(self._length_bytes)}, {self._state})"

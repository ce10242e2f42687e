"""The page cache as Python sees it; the only file that touches cffi.

Each class is one C handle and adds nothing but types and exceptions. A handle dies into a poison
state: what is called after `close` raises `ClosedError`, it never reaches C. Calls release the
GIL. Nothing here imports Ray.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._version import __version__

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_SHIFT",
    "ERRORS",
    "EXTENT_BYTES",
    "MAP_EXACT_READS",
    "MAP_PRIVATE",
    "TRAPS",
    "WINDOW_BEGIN",
    "WINDOW_END",
    "Client",
    "Engine",
    "Event",
    "Keeper",
    "Mapping",
    "Segment",
    "check",
    "copy_in",
    "keeper_run",
]

BLOCK_SHIFT: Final = 12
BLOCK_BYTES: Final = 1 << BLOCK_SHIFT
EXTENT_BYTES: Final = 64 << 20
WINDOW_BEGIN: Final = 0x1100_0000_0000
WINDOW_END: Final = 0x2900_0000_0000

MAP_PRIVATE: Final = 1
MAP_EXACT_READS: Final = 2

EVENT_NEED_REGION: Final = 1
EVENT_NEED_PEER: Final = 2
EVENT_REGION_IDLE: Final = 3
EVENT_LOG: Final = 4

BLOCKS_PRESENT: Final = 0
BLOCKS_FETCHED: Final = 1
BLOCKS_TOUCHED: Final = 2

# What CLAMOR_TRAP says -> enum pc_trap, and back for the traps that can be in force.
TRAPS: Final[dict[str, int]] = {"auto": 0, "uffd": 1, "sigsegv": 4}
TRAPS_IN_FORCE: Final[dict[int, str]] = {2: "uffd", 3: "uffd-user", 4: "sigsegv"}

# enum pc_err, and what each code becomes. tests/test_errors.py walks the header against it.
PC_ERR_SYSTEM: Final = -1
PC_ERR_NO_MEMORY: Final = -2
PC_ERR_TIMEOUT: Final = -3
PC_ERR_NO_SERVER: Final = -4
PC_ERR_VERSION_MISMATCH: Final = -5
PC_ERR_NO_REGION: Final = -6
PC_ERR_HOME_LOST: Final = -7
PC_ERR_CLASH: Final = -8
PC_ERR_PROTOCOL: Final = -9
PC_ERR_RANGE: Final = -10
PC_ERR_NO_TRAP: Final = -11
PC_ERR_EXISTS: Final = -12
PC_ERR_CLOSED: Final = -13
PC_ERR_DESCRIPTORS: Final = -14
PC_ERR_FORKED: Final = -15
PC_ERR_NO_GENERATION: Final = -16
PC_ERR_NO_PEER: Final = -17
PC_ERR_DENIED: Final = -18
PC_ERR_HUGE_PAGES: Final = -19

ERRORS: Final[dict[int, tuple[type[errors.ClamorError], str]]] = {
    PC_ERR_SYSTEM: (errors.SystemCallError, "A system call failed."),
    PC_ERR_NO_MEMORY: (errors.OutOfMemoryError, "There is not enough memory."),
    PC_ERR_TIMEOUT: (errors.WaitTimeoutError, "The page server did not answer in time."),
    PC_ERR_NO_SERVER: (
        errors.ServerUnavailableError,
        "The page server of this node does not answer.",
    ),
    PC_ERR_VERSION_MISMATCH: (
        errors.VersionMismatchError,
        f"The page server of this node is another build than this process ({__version__}).",
    ),
    PC_ERR_NO_REGION: (errors.FreedError, "The global variable was freed, or never existed."),
    PC_ERR_HOME_LOST: (
        errors.HomeLostError,
        "The node that held the only copy of the blocks is gone.",
    ),
    PC_ERR_CLASH: (
        errors.AddressClashError,
        "Other memory is mapped where the global variable must be.",
    ),
    PC_ERR_PROTOCOL: (errors.ProtocolError, "The page server sent an answer that makes no sense."),
    PC_ERR_RANGE: (errors.RangeError, "Blocks outside the region were asked for."),
    PC_ERR_NO_TRAP: (errors.TrapUnavailableError, "The kernel refuses the trap."),
    PC_ERR_EXISTS: (errors.ExistsError, "A region with this id exists already."),
    PC_ERR_CLOSED: (errors.ClosedError, "The connection to the page server was shut down."),
    PC_ERR_DESCRIPTORS: (errors.DescriptorLimitError, "There are no file descriptors left."),
    PC_ERR_FORKED: (
        errors.ForkedError,
        "This process is a fork of the one that attached to the page server.",
    ),
    PC_ERR_NO_GENERATION: (
        errors.ServerUnavailableError,
        "The page server was restarted and no longer holds the memory that this process maps.",
    ),
    PC_ERR_NO_PEER: (
        errors.ServerUnavailableError,
        "The page server has no connection to the node that holds the blocks.",
    ),
    PC_ERR_HUGE_PAGES: (
        errors.TrapUnavailableError,
        "This node's kernel makes shared memory of huge pages and refuses userfaultfd.",
    ),
    PC_ERR_DENIED: (errors.DeniedError, "The page server refused the credentials."),
}


class _Library:
    """The compiled module, loaded on first use so that `import clamor_ray` stays light."""

    def __init__(self) -> None:
        self._module: Any = None

    @property
    def module(self) -> Any:
        if self._module is None:
            try:
                self._module = importlib.import_module("clamor_ray._pagecache")
            except ImportError as error:
                raise errors.UnsupportedPlatformError(
                    f"The compiled page cache could not be loaded: {error}.",
                    hint="Install a wheel for this platform, or build it with `make setup`.",
                ) from error
        return self._module

    @property
    def lib(self) -> Any:
        return self.module.lib

    @property
    def ffi(self) -> Any:
        return self.module.ffi


_c = _Library()


def error_for(code: int, detail: str = "", **context: object) -> errors.ClamorError:
    """The exception for a page-cache code. Pure: needs no compiled module.

    Args:
        code: a negative `enum pc_err`; an unknown one gives `InternalError`.
        detail: what the C library adds (call, path, address).
        context: what the caller was doing, e.g. ``region=7``; None values are left out.
    """
    cls, message = ERRORS.get(
        code, (errors.InternalError, f"The page cache failed with the unknown code {code}.")
    )
    extra = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in context.items() if value is not None
    )
    if extra:
        message = f"{message[:-1]} ({extra})."
    if detail:
        message = f"{message[:-1]}: {detail.rstrip('.')}."
    return cls(message, code=code)


def check(code: int, **context: object) -> int:
    """Returns `code` where it is a success or a count, raises its exception where it is not.

    Must be called on the thread that made the failing call: the detail is thread-local.
    """
    if code >= 0:
        return code
    detail = _c.ffi.string(_c.lib.pc_last_message()).decode("utf-8", "replace")
    raise error_for(int(code), detail, **context)


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


Runs = npt.NDArray[np.uint64]
"""Runs of blocks, shape (n, 2): first block (relative to the region's start), number of blocks."""


def _runs_pointer(runs: Runs) -> tuple[Any, int, Runs]:
    packed = np.ascontiguousarray(runs, dtype=np.uint64).reshape(-1, 2)
    if len(packed) == 0:
        return _c.ffi.NULL, 0, packed
    return _c.ffi.cast("struct pc_run *", packed.ctypes.data), len(packed), packed


@dataclass(frozen=True, slots=True)
class Mapping:
    """One map of a region in this process."""

    id: int
    address: int
    length_bytes: int


def copy_in(fd: int, offset_bytes: int, source: Any, n_threads: int = 0) -> None:
    """Copies a contiguous buffer into a memfd, straight from where it lies.

    Args:
        fd: the memfd.
        offset_bytes: where in it.
        source: anything with a contiguous buffer.
        n_threads: 0 chooses by size and cores.
    """
    view = memoryview(source)
    if view.nbytes == 0:
        return
    flat = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if n_threads == 0:
        n_threads = 1 if flat.nbytes < 8 << 20 else 4
    pointer = _c.ffi.from_buffer(flat, require_writable=False)
    check(_c.lib.pc_copy_in(fd, offset_bytes, pointer, flat.nbytes, n_threads), bytes=flat.nbytes)


# How long closing a handle waits for calls that other threads have in it.
_DRAIN_S: Final = 30.0
_call_tokens = itertools.count()


class _Handle:
    """A C handle that starts None and ends as poison.

    What frees it first waits until no call is inside. The calls are counted without a lock, for
    finalizers make some of them, and those may run on a thread that holds any lock: a call is
    entered before it looks whether the handle is closed, and who closes it says so before looking
    for calls, so that one of the two sees the other.
    """

    def __init__(self) -> None:
        self._pointer: Any = None
        self._closed: errors.ClamorError | None = errors.ClosedError("This handle is not open.")
        # Guards only the step from open to closed, never a call into C.
        self._close_lock = threading.Lock()
        self._calls: dict[int, None] = {}

    def _opened(self, pointer: Any) -> None:
        self._pointer, self._closed = pointer, None

    @property
    def _handle(self) -> Any:
        pointer = self._pointer  # first: whoever closes says so before taking it
        closed = self._closed
        if closed is not None:
            raise type(closed)(closed.message, code=closed.code, hint=closed.hint)
        return pointer

    def _call(self, function: Any, *args: Any) -> int:
        """Calls a C function on the handle, which is not freed meanwhile."""
        token, calls = next(_call_tokens), self._calls
        try:
            calls[token] = None
            return int(function(self._handle, *args))
        finally:
            calls.pop(token, None)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def poison(self, error: errors.ClamorError) -> None:
        """Makes every later call raise `error`."""
        self._closed = error

    def _take(self) -> Any:
        with self._close_lock:
            if self._closed is None:
                self._closed = error_for(PC_ERR_CLOSED)
            pointer, self._pointer = self._pointer, None
            return pointer

    def _drain(self) -> None:
        """After `_take`: waits until no call is inside."""
        deadline = time.monotonic() + _DRAIN_S
        pause_s = 0.0
        while self._calls:
            if time.monotonic() > deadline:
                # What a thread still uses is better leaked than freed.
                raise errors.WaitTimeoutError(
                    f"Calls of other threads did not end within {_DRAIN_S:g} s.",
                    code=PC_ERR_TIMEOUT,
                )
            time.sleep(pause_s)
            pause_s = min(0.01, 2 * pause_s + 0.0001)


class Client(_Handle):
    """This process's connection to the page server of its node.

    Args:
        socket_name: abstract Unix socket, without the leading NUL.
        trap: "auto", "uffd" or "sigsegv".
        connect_timeout_s: for the connection and the first exchange.
        reattach_timeout_s: how long threads in a fault wait for a restarted page server.

    Raises:
        ServerUnavailableError, VersionMismatchError, TrapUnavailableError, DeniedError.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        socket_name: str,
        *,
        trap: str = "auto",
        connect_timeout_s: float = 5.0,
        reattach_timeout_s: float = 30.0,
        library_version: str = __version__,
    ) -> None:
        super().__init__()
        ffi, lib = _c.ffi, _c.lib
        name = ffi.new("char[]", socket_name.encode())
        version = ffi.new("char[]", library_version.encode())
        options = ffi.new("struct pc_client_options *")
        options.socket_name = name
        options.library_version = version
        options.trap = TRAPS[trap]
        options.connect_timeout_ns = _ns(connect_timeout_s)
        options.reattach_timeout_ns = _ns(reattach_timeout_s)
        out = ffi.new("pc_client **")
        check(lib.pc_client_open(options, out), socket=socket_name)
        self._opened(out[0])
        self.socket_name = socket_name

    @property
    def trap(self) -> str:
        """The trap in force: "uffd", "uffd-user" or "sigsegv"."""
        code = check(self._call(_c.lib.pc_client_trap))
        return TRAPS_IN_FORCE.get(code, f"unknown ({code})")

    def close(self) -> None:
        """Unmaps everything. Addresses of its mappings die with it. Idempotent."""
        pointer = self._take()
        if pointer is None:
            return
        check(_c.lib.pc_client_shut(pointer))  # those that wait in C come out
        self._drain()
        check(_c.lib.pc_client_close(pointer))

    def after_fork(self) -> None:
        """In a child of fork: attaches anew. Where that fails the handle turns to poison."""
        pointer = self._pointer
        self._close_lock = threading.Lock()
        self._calls = {}  # the parent's other threads are not here
        if pointer is None:
            return
        try:
            check(_c.lib.pc_client_after_fork(pointer))
        except errors.ClamorError as error:
            self.poison(
                errors.ForkedError(f"This forked process could not attach: {error.message}")
            )
            raise

    def map(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        *,
        flags: int = 0,
        timeout_s: float = 10.0,
    ) -> Mapping:
        """Maps a region and arms its trap; the mapping is a lease until `unmap`."""
        out = _c.ffi.new("struct pc_mapping *")
        check(
            self._call(
                _c.lib.pc_client_map,
                region,
                version,
                base_address,
                length_bytes,
                flags,
                _ns(timeout_s),
                out,
            ),
            region=region,
            version=version,
        )
        return Mapping(int(out.id), int(out.address), int(out.length_bytes))

    def unmap(self, mapping_id: int) -> None:
        check(self._call(_c.lib.pc_client_unmap, mapping_id), mapping=mapping_id)

    def create(
        self, region: int, base_address: int, length_bytes: int, *, timeout_s: float = 10.0
    ) -> int:
        """Makes the home of a new region here. Returns its memfd: `copy_in` to it, close it."""
        fd = _c.ffi.new("int *")
        check(
            self._call(
                _c.lib.pc_client_create, region, base_address, length_bytes, _ns(timeout_s), fd
            ),
            region=region,
            bytes=length_bytes,
        )
        return int(fd[0])

    def seal(self, region: int, *, timeout_s: float = 10.0) -> None:
        check(self._call(_c.lib.pc_client_seal, region, _ns(timeout_s)), region=region)

    def abandon(self, region: int, *, timeout_s: float = 10.0) -> None:
        check(self._call(_c.lib.pc_client_abandon, region, _ns(timeout_s)), region=region)

    def prefetch(
        self, mapping_id: int, runs: Runs, *, wait: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Makes runs of blocks resident on this node.

        Raises:
            PrefetchTimeoutError, HomeLostError, RangeError.
        """
        pointer, n_runs, keep = _runs_pointer(runs)
        if n_runs == 0:
            return
        code = self._call(
            _c.lib.pc_client_prefetch, mapping_id, pointer, n_runs, int(wait), _ns(timeout_s)
        )
        if code == PC_ERR_TIMEOUT:
            n_blocks = int(keep[:, 1].sum())
            raise errors.PrefetchTimeoutError(
                f"{n_blocks} blocks did not arrive within {timeout_s:g} s.", code=code
            )
        check(code, mapping=mapping_id)

    def reads_begin(self, mapping_id: int) -> None:
        """Each one has exactly one `reads_end` or `reads_drop`."""
        check(self._call(_c.lib.pc_client_reads_begin, mapping_id), mapping=mapping_id)

    def reads_end(self, mapping_id: int) -> Runs:
        """The blocks that this process touched since `reads_begin`, as runs."""
        capacity = 1024
        while True:
            runs = np.empty((capacity, 2), dtype=np.uint64)
            pointer = _c.ffi.cast("struct pc_run *", runs.ctypes.data)
            n_runs = check(
                self._call(_c.lib.pc_client_reads_end, mapping_id, pointer, capacity),
                mapping=mapping_id,
            )
            if n_runs <= capacity:
                return runs[:n_runs]
            capacity = n_runs + n_runs // 4

    def reads_drop(self, mapping_id: int) -> None:
        """Instead of `reads_end`: ends without a look."""
        check(
            self._call(_c.lib.pc_client_reads_end, mapping_id, _c.ffi.NULL, 0), mapping=mapping_id
        )

    def report_reads(self, mapping_id: int, runs: Runs) -> None:
        pointer, n_runs, _keep = _runs_pointer(runs)
        if n_runs:
            check(
                self._call(_c.lib.pc_client_report_reads, mapping_id, pointer, n_runs),
                mapping=mapping_id,
            )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that only Python can decide; see `enum pc_event_kind`."""

    kind: int
    error: int
    region: int
    server_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Home bytes of a shared region that lie in memory the caller keeps alive."""

    offset_bytes: int
    length_bytes: int
    address: int


class Engine(_Handle):
    """The page server's engine: serves, fetches, answers faults, in threads of its own.

    Args:
        socket_name: abstract Unix socket to listen on.
        server_id: never 0; the same after a restart.
        keeper: the keeper that outlives this process, or None.
        n_loops: 0 chooses from the number of cores.
        fetch_timeout_s: for one request to one peer.
        fault_timeout_s: for all tries of one block.
        settle_s: after a restart, how long clients have to attach again before a freed region
            without leases counts as idle.
        page_bytes: fixed size of a demand fetch, a power of two from 4 KiB to 8 MiB; 0: by use.
    """

    def __init__(
        self,
        socket_name: str,
        *,
        server_id: int,
        keeper: Keeper | None = None,
        n_loops: int = 0,
        fetch_timeout_s: float = 10.0,
        fault_timeout_s: float = 60.0,
        page_bytes: int = 0,
        settle_s: float = 30.0,
        library_version: str = __version__,
    ) -> None:
        super().__init__()
        ffi, lib = _c.ffi, _c.lib
        name = ffi.new("char[]", socket_name.encode())
        version = ffi.new("char[]", library_version.encode())
        options = ffi.new("struct pc_engine_options *")
        options.socket_name = name
        options.library_version = version
        options.server_id = server_id
        options.keeper_fd = -1 if keeper is None else keeper.fileno()
        options.n_loops = n_loops
        options.fetch_timeout_ns = _ns(fetch_timeout_s)
        options.fault_timeout_ns = _ns(fault_timeout_s)
        options.page_bytes = page_bytes
        options.settle_ns = _ns(settle_s)
        out = ffi.new("pc_engine **")
        check(lib.pc_engine_start(options, out), socket=socket_name)
        self._opened(out[0])
        self._keeper = keeper  # its descriptor is the engine's for as long as it runs

    def stop(self) -> None:
        """Stops serving and joins the threads. Idempotent."""
        pointer = self._take()
        if pointer is not None:
            self._drain()
            check(_c.lib.pc_engine_stop(pointer))

    def fileno(self) -> int:
        """Readable while there are events."""
        return check(self._call(_c.lib.pc_engine_event_fd))

    def next_event(self) -> Event | None:
        out = _c.ffi.new("struct pc_event *")
        if check(self._call(_c.lib.pc_engine_next_event, out)) == 0:
            return None
        text = _c.ffi.string(out.text).decode("utf-8", "replace")
        return Event(int(out.kind), int(out.error), int(out.region), int(out.server_id), text)

    @staticmethod
    def _info(region: int, version: int, base_address: int, length_bytes: int) -> Any:
        info = _c.ffi.new("struct pc_region_info *")
        info.region, info.version = region, version
        info.base_address, info.length_bytes = base_address, length_bytes
        return info

    def define_region(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        homes: Sequence[int],
    ) -> None:
        """Answers NEED_REGION. `homes[i]` is the server id of 64 MiB extent i."""
        info = self._info(region, version, base_address, length_bytes)
        ids = _c.ffi.new("uint64_t[]", list(homes))
        check(self._call(_c.lib.pc_engine_define_region, info, ids, len(homes)), region=region)

    def refuse_region(self, region: int, error: int = PC_ERR_NO_REGION) -> None:
        check(self._call(_c.lib.pc_engine_refuse_region, region, error), region=region)

    def create_shared(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        segments: Sequence[Segment],
    ) -> int:
        """Makes a region over memory that the caller keeps alive until it is retired.

        Returns the memfd for everything outside the segments: fill it with `copy_in`, close it,
        then `seal`.
        """
        info = self._info(region, version, base_address, length_bytes)
        array = _c.ffi.new("struct pc_segment[]", max(1, len(segments)))
        for slot, segment in zip(array, segments, strict=False):
            slot.offset_bytes = segment.offset_bytes
            slot.length_bytes = segment.length_bytes
            slot.address = segment.address
        fd = _c.ffi.new("int *")
        check(
            self._call(_c.lib.pc_engine_create_shared, info, array, len(segments), fd),
            region=region,
        )
        return int(fd[0])

    def seal(self, region: int) -> None:
        check(self._call(_c.lib.pc_engine_seal, region), region=region)

    @property
    def peer_lanes(self) -> int:
        """How many connections each peer needs."""
        return check(self._call(_c.lib.pc_engine_peer_lanes))

    def add_peer(self, server_id: int, lane: int, fd: int) -> None:
        """Hands over an authenticated connection that we made; the engine owns `fd` from here."""
        check(self._call(_c.lib.pc_engine_add_peer, server_id, lane, fd), server=server_id)

    def peer_lost(self, server_id: int, error: int = PC_ERR_NO_PEER) -> None:
        check(self._call(_c.lib.pc_engine_peer_lost, server_id, error), server=server_id)

    def serve(self, server_id: int, fd: int) -> None:
        """Hands over an authenticated connection made to us; the engine owns `fd` from here."""
        check(self._call(_c.lib.pc_engine_serve, server_id, fd), server=server_id)

    def retire(self, region: int, *, force: bool = False) -> None:
        check(self._call(_c.lib.pc_engine_retire, region, int(force)), region=region)

    def stats(self) -> dict[str, int]:
        """Counters, by the names of `struct pc_engine_stats`."""
        out = _c.ffi.new("struct pc_engine_stats *")
        check(self._call(_c.lib.pc_engine_get_stats, out))
        return _fields(out[0])

    def region_stats(self) -> list[dict[str, int]]:
        """One dict per region known here, by the names of `struct pc_region_stats`."""
        capacity = 64
        while True:
            out = _c.ffi.new("struct pc_region_stats[]", capacity)
            n_regions = check(self._call(_c.lib.pc_engine_region_stats, out, capacity))
            if n_regions <= capacity:
                return [_fields(out[i]) for i in range(n_regions)]
            capacity = n_regions + n_regions // 4

    def histogram(self, region: int, which: int, n_buckets: int) -> list[int]:
        """How many blocks of a set (`BLOCKS_*`) fall in each of `n_buckets` equal parts."""
        out = _c.ffi.new("uint32_t[]", n_buckets)
        check(self._call(_c.lib.pc_engine_histogram, region, which, out, n_buckets), region=region)
        return list(out)


def _fields(struct: Any) -> dict[str, int]:
    return {name: int(getattr(struct, name)) for name, _ in _c.ffi.typeof(struct).fields}


class Keeper:
    """A connection to the keeper, which holds a page server's descriptors across its death."""

    def __init__(self, listen_name: str, *, timeout_s: float = 5.0) -> None:
        fd = _c.ffi.new("int *")
        name = listen_name.encode()
        check(_c.lib.pc_keeper_connect(name, _ns(timeout_s), fd), socket=listen_name)
        self._fd = int(fd[0])

    def fileno(self) -> int:
        return self._fd

    def quit(self) -> None:
        """Tells the keeper to let go of everything and leave."""
        check(_c.lib.pc_keeper_quit(self._fd))


def keeper_run(listen_name: str, watched_pid: int, *, orphan_timeout_s: float = 60.0) -> None:
    """Is the keeper: returns when the watched process (the raylet) ends, or when told to quit."""
    check(
        _c.lib.pc_keeper_run(listen_name.encode(), watched_pid, _ns(orphan_timeout_s)),
        socket=listen_name,
    )

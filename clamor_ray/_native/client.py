"""The page cache as Python sees it: the client's half, and every name of the binding.

`_native.base` (codes, exceptions, runs, handles), `_native.engine` (the page server's half) and
this are the only files that touch cffi. Each class is one C handle and adds nothing but types and
exceptions. A handle dies into a poison state: what is called after `close` raises `ClosedError`,
it never reaches C. Calls release the GIL. Nothing here imports Ray.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import (
    BLOCK_BYTES,
    BLOCK_SHIFT,
    BLOCKS_FETCHED,
    BLOCKS_PRESENT,
    BLOCKS_TOUCHED,
    ERRORS,
    EVENT_KEEPER_LOST,
    EVENT_LOG,
    EVENT_NEED_CHANGES,
    EVENT_NEED_HOME,
    EVENT_NEED_OUTCOME,
    EVENT_NEED_PEER,
    EVENT_NEED_PUBLISHED,
    EVENT_NEED_REGION,
    EVENT_NEED_REPAIR,
    EVENT_NEED_SETTLED,
    EVENT_PULLED,
    EVENT_REGION_IDLE,
    EVENT_TASK_ENDED,
    EVENT_THRASHING,
    EXTENT_BYTES,
    MAP_EXACT_READS,
    MAP_FIXED,
    MAP_PAGE_SHIFT,
    MAP_PRIVATE,
    PC_ERR_CLASH,
    PC_ERR_CLOSED,
    PC_ERR_DENIED,
    PC_ERR_DESCRIPTORS,
    PC_ERR_ENDED,
    PC_ERR_EXISTS,
    PC_ERR_EXPIRED,
    PC_ERR_FILE,
    PC_ERR_FILE_ACCESS,
    PC_ERR_FILE_CHANGED,
    PC_ERR_FORKED,
    PC_ERR_HOME_LOST,
    PC_ERR_HUGE_PAGES,
    PC_ERR_MEMBER,
    PC_ERR_MISMATCH,
    PC_ERR_NO_GENERATION,
    PC_ERR_NO_MEMORY,
    PC_ERR_NO_PEER,
    PC_ERR_NO_REGION,
    PC_ERR_NO_SERVER,
    PC_ERR_NO_SPACE,
    PC_ERR_NO_TRAP,
    PC_ERR_NO_VERSION,
    PC_ERR_PROTOCOL,
    PC_ERR_RANGE,
    PC_ERR_SYSTEM,
    PC_ERR_TIMEOUT,
    PC_ERR_VERSION_MISMATCH,
    POLICIES,
    REPLICATIONS,
    TASK_BYTES,
    TRAPS,
    TRAPS_IN_FORCE,
    UNREACHED_HINT,
    WINDOW_BEGIN,
    WINDOW_END,
    Runs,
    c,
    check,
    collect_runs,
    error_for,
    last_detail,
    medium_of,
    ns,
    runs_pointer,
    runs_said,
    server_cause,
)
from clamor_ray._native.engine import (
    Engine,
    Event,
    FileRead,
    Keeper,
    Segment,
    check_cache_disk,
    keeper_run,
)
from clamor_ray._native.parity import ParityLayer, ParityMember, _ParityCalls
from clamor_ray._native.stored import HomeFile
from clamor_ray._version import __version__

__all__ = [
    "BLOCKS_FETCHED",
    "BLOCKS_PRESENT",
    "BLOCKS_TOUCHED",
    "BLOCK_BYTES",
    "BLOCK_SHIFT",
    "Client",
    "ERRORS",
    "EVENT_LOG",
    "EVENT_NEED_CHANGES",
    "EVENT_KEEPER_LOST",
    "EVENT_NEED_HOME",
    "EVENT_NEED_OUTCOME",
    "EVENT_NEED_PEER",
    "EVENT_NEED_PUBLISHED",
    "EVENT_NEED_REGION",
    "EVENT_NEED_REPAIR",
    "EVENT_NEED_SETTLED",
    "EVENT_PULLED",
    "EVENT_REGION_IDLE",
    "EVENT_TASK_ENDED",
    "EVENT_THRASHING",
    "EXTENT_BYTES",
    "Engine",
    "Event",
    "FileRead",
    "HomeFile",
    "Keeper",
    "MAP_EXACT_READS",
    "MAP_FIXED",
    "MAP_PAGE_SHIFT",
    "MAP_PRIVATE",
    "Mapping",
    "PC_ERR_CLASH",
    "PC_ERR_CLOSED",
    "PC_ERR_DENIED",
    "PC_ERR_DESCRIPTORS",
    "PC_ERR_ENDED",
    "PC_ERR_EXISTS",
    "PC_ERR_EXPIRED",
    "PC_ERR_FILE",
    "PC_ERR_FILE_ACCESS",
    "PC_ERR_FILE_CHANGED",
    "TASK_BYTES",
    "PC_ERR_FORKED",
    "PC_ERR_HOME_LOST",
    "PC_ERR_HUGE_PAGES",
    "PC_ERR_MEMBER",
    "PC_ERR_MISMATCH",
    "PC_ERR_NO_GENERATION",
    "PC_ERR_NO_MEMORY",
    "PC_ERR_NO_PEER",
    "PC_ERR_NO_REGION",
    "PC_ERR_NO_SERVER",
    "PC_ERR_NO_SPACE",
    "PC_ERR_NO_TRAP",
    "PC_ERR_NO_VERSION",
    "PC_ERR_PROTOCOL",
    "PC_ERR_RANGE",
    "PC_ERR_SYSTEM",
    "PC_ERR_TIMEOUT",
    "PC_ERR_VERSION_MISMATCH",
    "POLICIES",
    "ParityLayer",
    "ParityMember",
    "REPLICATIONS",
    "Runs",
    "Segment",
    "TRAPS",
    "TRAPS_IN_FORCE",
    "WINDOW_BEGIN",
    "WINDOW_END",
    "check",
    "check_cache_disk",
    "copy_in",
    "error_for",
    "keeper_run",
]


MAPPED_MOST: Final = 65536  # mappings whose region is remembered for messages


@dataclass(frozen=True, slots=True)
class Mapping:
    """One map of a region in this process."""

    id: int
    address: int
    length_bytes: int
    loss: int = 0
    """Number of the loss of blocks of the region; 0: none is lost."""
    wastes: bool = False
    """Faults on this node have fetched far more of the region than was touched."""


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
    pointer = c.ffi.from_buffer(flat, require_writable=False)
    check(c.lib.pc_copy_in(fd, offset_bytes, pointer, flat.nbytes, n_threads), bytes=flat.nbytes)


def unmap_kept(address: int, length_bytes: int) -> None:
    """Unmaps what a client that was closed has left mapped; nothing where it has not."""
    with contextlib.suppress(errors.FreedError):
        check(c.lib.pc_kept_unmap(address, length_bytes), address=hex(address))


def _among(code: int, n_blocks: int) -> str | None:
    """Where blocks are missing, and the call was for no certain ones: those that there are."""
    return f"among 0-{n_blocks - 1}" if code == PC_ERR_HOME_LOST and n_blocks else None


def _raise_late(what: str, timeout_s: float, hint: str | None = None) -> NoReturn:
    """After a call that made PC_ERR_TIMEOUT, on its thread; with the page server's cause if it has
    said one."""
    if cause := server_cause(last_detail()):
        message, hint = f"{what}: {cause}.", UNREACHED_HINT
    else:
        message = f"{what} within {timeout_s:g} s."
    raise errors.PrefetchTimeoutError(message, code=PC_ERR_TIMEOUT, hint=hint)


class Client(_ParityCalls):
    """This process's connection to the page server of its node.

    Args:
        socket_name: path of a Unix socket.
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
        # mapping -> (region, version, n_blocks), for messages
        self._mapped: dict[int, tuple[int, int, int]] = {}
        ffi, lib = c.ffi, c.lib
        name = ffi.new("char[]", socket_name.encode())
        version = ffi.new("char[]", library_version.encode())
        options = ffi.new("struct pc_client_options *")
        options.socket_name = name
        options.library_version = version
        options.trap = TRAPS[trap]
        options.connect_timeout_ns = ns(connect_timeout_s)
        options.reattach_timeout_ns = ns(reattach_timeout_s)
        out = ffi.new("pc_client **")
        check(lib.pc_client_open(options, out), socket=socket_name)
        self._opened(out[0])
        self.socket_name = socket_name

    @property
    def trap(self) -> str:
        """The trap in force: "uffd", "uffd-user" or "sigsegv"."""
        code = check(self._call(c.lib.pc_client_trap))
        return TRAPS_IN_FORCE.get(code, f"unknown ({code})")

    @property
    def trap_reason(self) -> str:
        """Why no better trap is in force, where none was asked for; else ""."""
        out = c.ffi.new("char[]", 256)
        check(self._call(c.lib.pc_client_trap_reason, out, 256))
        text: str = c.ffi.string(out).decode("utf-8", "replace")
        return text

    @property
    def has_ended(self) -> bool:
        """Whether the page server has said that the session ended. Then every call but `unmap`
        raises `SessionEndedError`, and what is here stays readable."""
        try:
            return check(self._call(c.lib.pc_client_has_ended)) != 0
        except (errors.ClosedError, errors.ForkedError):  # a poisoned handle says nothing of it
            return False

    @property
    def is_connected(self) -> bool:
        """Whether the page server is reached now. Where not, it is restarted, or has ended because
        no process of the node used it: then somebody must have the registry start another one."""
        try:
            return check(self._call(c.lib.pc_client_is_connected)) != 0
        except (errors.ClosedError, errors.ForkedError):  # the call that follows says why
            return True

    def note_task(self, task: bytes) -> None:
        """Which task runs here: should a block that cannot be read end the process, its page server
        is told so (TASK_ENDED). Sends nothing now.

        Args:
            task: 24 bytes, Ray's id of it; zeros: none.

        Raises:
            ValueError: It has another length.
        """
        if len(task) != TASK_BYTES:
            raise ValueError(f"a task's id has {TASK_BYTES} bytes, not {len(task)}")
        check(self._call(c.lib.pc_client_task, task))

    def close(self) -> None:
        """Unmaps everything. Addresses of its mappings die with it. Idempotent."""
        pointer = self._take()
        if pointer is None:
            return
        check(c.lib.pc_client_shut(pointer))  # those that wait in C come out
        self._drain()
        check(c.lib.pc_client_close(pointer))

    def after_fork(self, ended: errors.ClamorError | None = None) -> None:
        """In a child of fork: attaches anew. Where that fails the handle turns to poison, and at
        once where the session has `ended`."""
        pointer = self._pointer
        self._close_lock = threading.Lock()
        self._calls = {}  # the parent's other threads are not here
        if ended is not None:
            self.poison(ended)
        if pointer is None or ended is not None:
            return
        try:
            check(c.lib.pc_client_after_fork(pointer))
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
        """Maps a version of a region and arms its trap; the mapping is a lease until `unmap`.

        Maps of one version share one mapping. Where another map of the region has its address,
        this one goes elsewhere.

        Args:
            region: its id.
            version: which one.
            base_address: the region's own, in bytes.
            length_bytes: a multiple of the block.
            flags: `MAP_PRIVATE` (copy-on-write, writable, never shared), `MAP_EXACT_READS` (no
                kernel fault-around), `MAP_FIXED` (at its own address or not at all); and
                log2 of the bytes that a fault fetches << `MAP_PAGE_SHIFT`, 0 for by use.
            timeout_s: for the page server's answer.

        Raises:
            AddressClashError: other memory is there, or with `MAP_FIXED` another map of it.
            FreedError, NoVersionError, SnapshotExpired, ServerUnavailableError, WaitTimeoutError.
        """
        out = c.ffi.new("struct pc_mapping *")
        code = self._call(
            c.lib.pc_client_map,
            region,
            version,
            base_address,
            length_bytes,
            flags,
            ns(timeout_s),
            out,
        )
        among = _among(code, length_bytes // BLOCK_BYTES)
        check(code, region=region, version=version, blocks=among)
        return self._remember(out, region, version)

    def _remember(self, mapped: Any, region: int, version: int) -> Mapping:
        if len(self._mapped) >= MAPPED_MOST:
            for old in list(self._mapped)[: MAPPED_MOST // 2]:  # other threads map, too
                self._mapped.pop(old, None)
        n_blocks = int(mapped.length_bytes) // BLOCK_BYTES
        self._mapped[int(mapped.id)] = (region, version, n_blocks)
        return Mapping(
            id=int(mapped.id),
            address=int(mapped.address),
            length_bytes=int(mapped.length_bytes),
            loss=int(mapped.loss),
            wastes=bool(mapped.wastes),
        )

    def _check(self, code: int, mapping_id: int, blocks: str | None = None) -> int:
        """As `check`, of a call about a mapping: a message names the variable, and the blocks."""
        if code >= 0:
            return code
        region, version, n_blocks = self._mapped.get(mapping_id, (None, None, 0))
        number = mapping_id if region is None else None
        blocks = blocks or _among(code, n_blocks)
        return check(code, region=region, version=version, mapping=number, blocks=blocks)

    def unmap(self, mapping_id: int) -> None:
        self._check(self._call(c.lib.pc_client_unmap, mapping_id), mapping_id)

    @staticmethod
    def unmap_ended(address: int) -> None:
        """Instead of `unmap`, where the handle was closed before: lets go of the addresses.

        Raises:
            FreedError: The handle was closed, and the mapping was none that it still had.
        """
        check(c.lib.pc_ended_unmap(address))

    def unmap_later(self, mapping_id: int) -> None:
        """As `unmap`, but the next `map` of the version may still have it, for half a second."""
        self._check(self._call(c.lib.pc_client_unmap_later, mapping_id), mapping_id)

    def create(
        self,
        region: int,
        base_address: int,
        length_bytes: int,
        *,
        on_disk: bool = False,
        in_file: bool = False,
        timeout_s: float = 10.0,
    ) -> int:
        """Makes the home of a new region here. Returns its file: `copy_in` to it, close it. With
        in_file nothing is to be copied: what no commit has written is in a file of the user's.

        Raises:
            NoSpaceError: The disk has no room for it.
        """
        fd = c.ffi.new("int *")
        where = (region, base_address, length_bytes, medium_of(on_disk, in_file))
        check(
            self._call(c.lib.pc_client_create, *where, ns(timeout_s), fd),
            region=region,
            bytes=length_bytes,
        )
        return int(fd[0])

    def seal(self, region: int, *, timeout_s: float = 10.0) -> None:
        check(self._call(c.lib.pc_client_seal, region, ns(timeout_s)), region=region)

    def abandon(self, region: int, *, timeout_s: float = 10.0) -> None:
        check(self._call(c.lib.pc_client_abandon, region, ns(timeout_s)), region=region)

    def retire(
        self, region: int, *, alone: bool = False, servers: Sequence[int] = (), timeout_s: float
    ) -> None:
        """The region is freed, as the registry has said. When this returns no lease on it begins
        any more: not at this node's page server, and not at others that ask it for blocks.

        Args:
            region: its id.
            alone: no other server has heard of it: its memory goes, where there is no lease.
            servers: the ids of those others.
            timeout_s: for all of them.

        Raises:
            ClamorError: One of them cannot promise it, or does not answer. The registry must see to
                it.
        """
        ids = c.ffi.new("uint64_t[]", list(servers))
        check(
            self._call(
                c.lib.pc_client_retire, region, int(alone), ids, len(servers), ns(timeout_s)
            ),
            region=region,
        )

    @property
    def server_id(self) -> int:
        """Of the page server that this is connected to, or was last."""
        return int(self._call(c.lib.pc_client_server_id))

    def build(
        self,
        region: int,
        base_address: int,
        length_bytes: int,
        *,
        on_disk: bool = False,
        timeout_s: float = 10.0,
    ) -> Mapping:
        """Makes the home of a new region here, mapped read-write at its address.

        `build_seal` ends the writing, `unmap` before that drops the region.

        Raises:
            AddressClashError, ExistsError, OutOfMemoryError, ServerUnavailableError.
            NoSpaceError: The disk has no room for it.
        """
        out = c.ffi.new("struct pc_mapping *")
        where = (region, base_address, length_bytes, medium_of(on_disk))
        check(
            self._call(c.lib.pc_client_build, *where, ns(timeout_s), out),
            region=region,
            bytes=length_bytes,
        )
        return self._remember(out, region, 0)

    def build_seal(self, mapping_id: int, *, timeout_s: float = 10.0) -> None:
        """Makes what was built read-only, and the mapping a lease of version 0.

        After a failure it can be sealed again, or unmapped; and written again, unless no answer
        came (`WaitTimeoutError`, or the page server died meanwhile): it may be sealed then, and
        stays read-only. No thread may write to it while it is sealed: SIGSEGV would end it.

        Raises:
            ServerUnavailableError, FreedError: the page server was restarted: the region is lost.
        """
        self._check(self._call(c.lib.pc_client_build_seal, mapping_id, ns(timeout_s)), mapping_id)

    def build_keep(self, mapping_id: int) -> None:
        """While it is built: libraries may point into it for good. The seal makes it a private
        copy-on-write map, which children of fork inherit, and which outlives the client."""
        self._check(self._call(c.lib.pc_client_build_keep, mapping_id), mapping_id)

    def build_drop(self, mapping_id: int) -> None:
        """Instead of a seal: abandons a region that is kept. Its memory is this process's alone.

        Raises:
            ExistsError: It is not being built, or not kept.
        """
        self._check(self._call(c.lib.pc_client_build_drop, mapping_id), mapping_id)

    def build_let_go(self, mapping_id: int) -> None:
        """Nothing points into it any more: from here on it ends as any other mapping."""
        self._check(self._call(c.lib.pc_client_build_let_go, mapping_id), mapping_id)

    def build_copy(self) -> None:
        """Makes all that is kept this process's own memory. For `close`, in a process that goes on:
        afterwards nothing leases what lies below it."""
        check(self._call(c.lib.pc_client_build_copy))

    def blank(self, mapping_id: int, runs: Runs) -> None:
        """Lets blocks of a private mapping begin as zeros that this process has written, whatever
        the version has there: for blocks that are lost. What was written there before is gone.

        Args:
            mapping_id: of a private mapping.
            runs: shape (n, 2), first block and number of blocks.

        Raises:
            RangeError: They do not lie in the region, or the mapping is not private.
            SystemCallError: No memory, or no more maps (vm.max_map_count).
        """
        pointer, n_runs, _keep = runs_pointer(runs)
        self._check(self._call(c.lib.pc_client_blank, mapping_id, pointer, n_runs), mapping_id)

    def dirty(self, mapping_id: int) -> Runs:
        """The blocks of a private mapping that this process has written, as runs."""
        return collect_runs(
            lambda pointer, capacity: self._check(
                self._call(c.lib.pc_client_dirty, mapping_id, pointer, capacity), mapping_id
            )
        )

    def stage(
        self,
        mapping_id: int,
        commit_id: int,
        runs: Runs,
        *,
        n_threads: int = 0,
        timeout_s: float = 60.0,
        of: tuple[int, int] | None = None,
    ) -> int:
        """Copies blocks of a private mapping to this node's page server, to be committed.

        Args:
            mapping_id: of a mapping with `MAP_PRIVATE`. It stays as it is.
            commit_id: never 0. Staging again under the same id is no error.
            runs: sorted and disjoint, at least one; what `dirty` gives.
            n_threads: that copy; 0 chooses by size and cores.
            timeout_s: for all of it, a restart of the page server included.
            of: (region, version) that the layer changes; None: what is mapped.

        Returns:
            The id of the page server that has them: a node may have joined again since the session
            began.

        Raises:
            OutOfMemoryError: nothing is left behind; try again or drop it.
            RangeError, ForkedError, ServerUnavailableError, WaitTimeoutError.
        """
        pointer, n_runs, keep = runs_pointer(runs)
        server_id = c.ffi.new("uint64_t *")
        how = (pointer, n_runs, n_threads, ns(timeout_s), server_id)
        if of is None:
            code = self._call(c.lib.pc_client_stage, mapping_id, commit_id, *how)
        else:
            code = self._call(c.lib.pc_client_stage_as, mapping_id, *of, commit_id, *how)
        if code < 0:
            self._check(code, mapping_id, runs_said(keep))
        return int(server_id[0])

    def resolve(self, commit_id: int, region: int, version: int, mapping_id: int = 0) -> None:
        """Tells the page server what became of a staged layer: a version, or 0: drop it.

        With the mapping that the layer was copied from, that one does not hold its version any
        more: what the next one changed it has copies of.

        Never waits. What gets lost with the page server it asks the registry for.
        """
        check(
            self._call(c.lib.pc_client_resolve, mapping_id, commit_id, region, version),
            region=region,
            version=version,
        )

    def prefetch(
        self, mapping_id: int, runs: Runs, *, wait: bool = True, timeout_s: float = 60.0
    ) -> None:
        """Makes runs of blocks resident on this node.

        Raises:
            PrefetchTimeoutError, HomeLostError, RangeError.
        """
        pointer, n_runs, keep = runs_pointer(runs)
        if n_runs == 0:
            return
        code = self._call(
            c.lib.pc_client_prefetch, mapping_id, pointer, n_runs, int(wait), ns(timeout_s)
        )
        if code == PC_ERR_TIMEOUT:
            n_blocks = int(keep[:, 1].sum())
            _raise_late(f"{n_blocks} blocks did not arrive", timeout_s)
        if code < 0:
            self._check(code, mapping_id, runs_said(keep))

    def gather(
        self,
        mapping_id: int,
        ids: npt.NDArray[np.uint64],
        out: npt.NDArray[Any],
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
        timeout_s: float = 60.0,
    ) -> None:
        """Copies rows to `out`, in the order of the ids; blocks or rows come, whichever is less.

        Args:
            mapping_id: of a mapping; of a private one it gives what was written there.
            ids: numbers of rows, contiguous, of any shape.
            out: contiguous and writable, of `ids.size * row_bytes` bytes.
            offset_bytes: of row 0, from the region's start.
            stride_bytes: from one row to the next, at least `row_bytes`.
            row_bytes: of one row, at least 1.
            timeout_s: for all of them.

        Raises:
            RangeError: a row lies outside of the region; nothing has moved.
            PrefetchTimeoutError, HomeLostError, ServerUnavailableError.
        """
        self._check_rows(ids, out, row_bytes)
        if ids.size == 0:
            return
        rows = c.ffi.new("struct pc_rows *")
        rows.offset_bytes, rows.stride_bytes, rows.row_bytes = offset_bytes, stride_bytes, row_bytes
        code = self._call(
            c.lib.pc_client_gather,
            mapping_id,
            rows,
            c.ffi.cast("uint64_t *", ids.ctypes.data),
            ids.size,
            c.ffi.cast("void *", out.ctypes.data),
            ns(timeout_s),
        )
        if code == PC_ERR_TIMEOUT:
            hint = "Ask again with a longer timeout, or for fewer rows."
            _raise_late(f"Not all of {ids.size} rows came", timeout_s, hint)
        if code < 0:
            begin = offset_bytes + int(ids.min()) * stride_bytes
            end = offset_bytes + int(ids.max()) * stride_bytes + row_bytes
            among = f"{ids.size} rows in {begin // BLOCK_BYTES}-{(end - 1) // BLOCK_BYTES}"
            self._check(code, mapping_id, among)

    @staticmethod
    def _check_rows(ids: npt.NDArray[np.uint64], out: npt.NDArray[Any], row_bytes: int) -> None:
        if not ids.flags.c_contiguous or ids.dtype != np.uint64:
            raise ValueError("ids are a contiguous array of uint64")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("rows are copied to a contiguous, writable array")
        if out.nbytes != ids.size * row_bytes:
            raise ValueError(f"{ids.size} rows of {row_bytes} bytes do not fit {out.nbytes} bytes")

    def rows_here(
        self,
        mapping_id: int,
        ids: npt.NDArray[np.int64],
        n_rows: int,
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
    ) -> bool:
        """Whether no row need come, as far as this process or the kernel knows. Asks no server.

        Args:
            mapping_id: of a mapping.
            ids: numbers of rows, contiguous, of any shape; negative ones count from the end.
            n_rows: that there are.
            offset_bytes, stride_bytes, row_bytes: as `gather`.

        Returns:
            True also where an id is no row: NumPy raises its error then.
        """
        rows = c.ffi.new("struct pc_rows *", (offset_bytes, stride_bytes, row_bytes))
        code = self._call(
            c.lib.pc_client_rows_here,
            mapping_id,
            rows,
            c.ffi.cast("int64_t *", ids.__array_interface__["data"][0]),
            ids.size,
            n_rows,
        )
        return code != 0

    def absent_blocks(self, mapping_id: int) -> int:
        """How many blocks of the mapping are not here: none at its home, all where it is larger
        than 64 GiB. Asks no server."""
        return self._check(self._call(c.lib.pc_client_absent, mapping_id), mapping_id)

    def reads_exact(self, mapping_id: int) -> None:
        """From the next `access_report_begin` on its sets show what is touched, and not what lies
        around, where the trap can (not SIGSEGV)."""
        self._check(self._call(c.lib.pc_client_reads_exact, mapping_id), mapping_id)

    def access_report_begin(self, mapping_id: int) -> None:
        """Each one has exactly one `access_report_end` or `access_report_drop`."""
        self._check(self._call(c.lib.pc_client_reads_begin, mapping_id), mapping_id)

    def access_report_end(self, mapping_id: int) -> Runs:
        """The blocks that this process touched since `access_report_begin`, as runs."""
        return collect_runs(
            lambda pointer, capacity: self._check(
                self._call(c.lib.pc_client_reads_end, mapping_id, pointer, capacity), mapping_id
            )
        )

    def access_report_drop(self, mapping_id: int) -> None:
        """Instead of `access_report_end`: ends without a look."""
        self._check(self._call(c.lib.pc_client_reads_end, mapping_id, c.ffi.NULL, 0), mapping_id)

    def evicted_begin(self, mapping_id: int, *, timeout_s: float = 10.0) -> None:
        """From now on the page server notes what it takes from the mapping's memory. Each one has
        exactly one `evicted_end`, or ends with the mapping."""
        self._check(
            self._call(c.lib.pc_client_evicted_begin, mapping_id, ns(timeout_s)), mapping_id
        )

    def evicted(self, mapping_id: int, *, timeout_s: float = 10.0) -> Runs:
        """What was evicted since `evicted_begin`, to be asked after `access_report_end`: it may be
        missing there though it was touched. All of it where that is not known."""
        return collect_runs(
            lambda pointer, capacity: self._check(
                self._call(c.lib.pc_client_evicted, mapping_id, pointer, capacity, ns(timeout_s)),
                mapping_id,
            )
        )

    def evicted_end(self, mapping_id: int) -> None:
        self._check(self._call(c.lib.pc_client_evicted_end, mapping_id), mapping_id)

    def report_reads(self, mapping_id: int, runs: Runs) -> None:
        pointer, n_runs, _keep = runs_pointer(runs)
        if n_runs:
            self._check(
                self._call(c.lib.pc_client_report_reads, mapping_id, pointer, n_runs), mapping_id
            )

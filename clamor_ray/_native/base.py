"""What both halves of the page cache's binding share: codes, exceptions, runs, handles.

`clamor_ray._native.client` has the client's half and hands out all names; `_native.engine` the
rest. Nothing here imports Ray.
"""

from __future__ import annotations

import importlib
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._version import __version__

BLOCK_SHIFT: Final = 12
BLOCK_BYTES: Final = 1 << BLOCK_SHIFT
EXTENT_BYTES: Final = 64 << 20
WINDOW_BEGIN: Final = 0x1100_0000_0000
WINDOW_END: Final = 0x2900_0000_0000

MAP_PRIVATE: Final = 1
MAP_EXACT_READS: Final = 2
MAP_FIXED: Final = 4
MAP_PAGE_SHIFT: Final = 8
TASK_BYTES: Final = 24

EVENT_NEED_REGION: Final = 1
EVENT_NEED_PEER: Final = 2
EVENT_REGION_IDLE: Final = 3
EVENT_LOG: Final = 4
EVENT_NEED_CHANGES: Final = 5
EVENT_NEED_PUBLISHED: Final = 6
EVENT_NEED_OUTCOME: Final = 7
EVENT_PULLED: Final = 8
EVENT_THRASHING: Final = 9
EVENT_NEED_HOME: Final = 10
EVENT_KEEPER_LOST: Final = 11
EVENT_TASK_ENDED: Final = 12
EVENT_NEED_SETTLED: Final = 13
EVENT_NEED_REPAIR: Final = 14

BLOCKS_PRESENT: Final = 0
BLOCKS_FETCHED: Final = 1
BLOCKS_TOUCHED: Final = 2

# What CLAMOR_TRAP says -> enum pc_trap, and back for the traps that can be in force.
TRAPS: Final[dict[str, int]] = {"auto": 0, "uffd": 1, "sigsegv": 4}
TRAPS_IN_FORCE: Final[dict[int, str]] = {2: "uffd", 3: "uffd-user", 4: "sigsegv"}

# What CLAMOR_CACHE_POLICY and CLAMOR_REPLICATION say -> enum pc_policy, enum pc_replication.
_POLICY_NAMES: Final = ("sieve", "fifo", "lru", "lfu", "random")
POLICIES: Final[dict[str, int]] = {name: code for code, name in enumerate(_POLICY_NAMES)}
REPLICATIONS: Final[dict[str, int]] = {"p2c": 0, "random": 1, "off": 2}

# enum pc_err, and what each code becomes. tests/library/test_errors.py walks the header against it.
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
PC_ERR_EXPIRED: Final = -20
PC_ERR_NO_VERSION: Final = -21
PC_ERR_NO_SPACE: Final = -22
PC_ERR_MEMBER: Final = -23
PC_ERR_MISMATCH: Final = -24
PC_ERR_ENDED: Final = -25
PC_ERR_FILE: Final = -26
PC_ERR_FILE_CHANGED: Final = -27
PC_ERR_FILE_ACCESS: Final = -28

ERRORS: Final[dict[int, tuple[type[errors.ClamorError], str]]] = {
    PC_ERR_SYSTEM: (errors.SystemCallError, "A system call failed."),
    PC_ERR_NO_MEMORY: (errors.OutOfMemoryError, "There is not enough memory."),
    PC_ERR_TIMEOUT: (errors.WaitTimeoutError, "There was no answer in time."),
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
        "Blocks of the global variable are missing.",
    ),
    PC_ERR_CLASH: (
        errors.AddressClashError,
        "Other memory is mapped where the global variable must be.",
    ),
    PC_ERR_PROTOCOL: (errors.ProtocolError, "The page server sent an answer that makes no sense."),
    PC_ERR_RANGE: (errors.RangeError, "Blocks outside the global variable were asked for."),
    PC_ERR_NO_TRAP: (errors.TrapUnavailableError, "The kernel refuses the trap."),
    PC_ERR_EXISTS: (errors.ExistsError, "What was to be done is done already, or under way."),
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
    PC_ERR_EXPIRED: (
        errors.SnapshotExpired,
        "The blocks of this version of the global variable are kept no longer.",
    ),
    PC_ERR_NO_VERSION: (errors.NoVersionError, "The global variable has no such version."),
    PC_ERR_NO_SPACE: (errors.NoSpaceError, "A file system or an arena is full."),
    PC_ERR_MEMBER: (errors.MemberLostError, "A member of the group is gone, or says nothing."),
    PC_ERR_MISMATCH: (
        errors.CollectiveMismatchError,
        "The members of the group do not ask for the same.",
    ),
    PC_ERR_ENDED: (
        errors.SessionEndedError,
        "The session of this global variable has ended.",
    ),
    PC_ERR_FILE: (errors.FileReadError, "The file of the global variable cannot be read."),
    PC_ERR_FILE_CHANGED: (
        errors.FileChangedError,
        "The file has changed since the global variable was made of it.",
    ),
    PC_ERR_FILE_ACCESS: (
        errors.FileAccessError,
        "The file of the global variable may not be read.",
    ),
}
FILE_ERRORS: Final = (PC_ERR_FILE, PC_ERR_FILE_CHANGED, PC_ERR_FILE_ACCESS)


# Where what helps is not what helps with the other codes of the class.
HINTS: Final[dict[int, str]] = {
    PC_ERR_HUGE_PAGES: (
        "Allow userfaultfd on the node (a readable /dev/userfaultfd), or write 'never' or 'advise' "
        "to /sys/kernel/mm/transparent_hugepage/shmem_enabled before Ray starts there."
    ),
    PC_ERR_NO_GENERATION: (
        "Drop what came from it and get it again: it is opened anew at the restarted server."
    ),
    PC_ERR_NO_PEER: (
        "Try again in a moment. If it lasts, see whether the nodes reach each other, and the page "
        "server's log in Ray's session directory."
    ),
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


c = _Library()

_SERVER_SAYS: Final = "the page server says: "  # call.c; the code's text, or unreached.c's
_CAUSES: Final = ("server ", "the keeper ")  # how unreached.c and keeping.c begin
_SERVERS_DESCRIPTORS: Final = (
    "page server of this node: of those that its limit (RLIMIT_NOFILE) allows, and that are not "
    "kept for connections, all are in use"
)


_SHORTAGES: Final = (PC_ERR_NO_MEMORY, PC_ERR_DESCRIPTORS)
_CODES_OWN: Final = ("no memory left", "out of file descriptors")  # error.c: nothing more is known
# No memory is taken by these, so what is short is not memory.
_OF_ADDRESSES: Final = re.compile(
    r"\b(mmap|munmap|mremap|mprotect|madvise|MADV_[A-Z]+|UFFDIO_REGISTER)\b"
)
ADDRESSES_HINT: Final = (
    "It is not memory that is short: a process may have only so many maps (sysctl "
    "vm.max_map_count) and addresses (ulimit -v). Raise the limit on that node, or use fewer "
    "variables at a time."
)
UNREACHED_HINT: Final = (
    "Nothing is lost: it is tried again with the next call. Look at that server's node: a process "
    "that is stopped, file descriptors (ulimit -n), the network between the nodes."
)


KEEPER_HINT: Final = (
    "What the keeper has not heard of would be lost with the page server, so nobody is told that "
    "it is safe. Try again. Look at that node: is the keeper's process (pc_keeper_run) stopped, or "
    "does it get no time or memory?"
)


def server_cause(detail: str) -> str:
    """Which server or keeper does not answer, for how long, and why, where that is it; else "".

    Example:
        >>> server_cause("the page server says: server 0x2 is not reached for 7 s: refused")
        'server 0x2 is not reached for 7 s: refused'
        >>> server_cause("the page server says: it was freed")
        ''
    """
    said = detail.removeprefix(_SERVER_SAYS)
    return said.rstrip(".") if said != detail and said.startswith(_CAUSES) else ""


def last_detail() -> str:
    """What the C library adds to the failure of this thread's last call."""
    text: str = c.ffi.string(c.lib.pc_last_message()).decode("utf-8", "replace")
    return text


def error_for(
    code: int, detail: str = "", *, region: int | None = None, **context: object
) -> errors.ClamorError:
    """The exception for a page-cache code. Pure: needs no compiled module.

    Args:
        code: a negative `enum pc_err`; an unknown one gives `InternalError`.
        detail: what the C library adds (call, path, address).
        region: of which variable.
        context: what the caller was doing, e.g. ``version=7``; None values are left out.
    """
    cls, message = ERRORS.get(
        code, (errors.InternalError, f"The page cache failed with the unknown code {code}.")
    )
    about = [] if region is None else [label(region)]
    about += [
        f"{name.replace('_', ' ')} {value}" for name, value in context.items() if value is not None
    ]
    if extra := ", ".join(about):
        message = f"{message[:-1]} ({extra})."
    said = detail.removeprefix(_SERVER_SAYS) if detail.startswith(_SERVER_SAYS) else ""
    if cause := server_cause(detail):
        message = f"{message[:-1]}: {cause}."
    elif said and code in _SHORTAGES and said not in _CODES_OWN:
        message = f"{message[:-1]} at the page server of this node: {said.rstrip('.')}."
    elif said and code == PC_ERR_DESCRIPTORS:
        message = f"{message[:-1]} at the {_SERVERS_DESCRIPTORS}."
    elif said and code == PC_ERR_HOME_LOST:
        message = f"{message[:-1]}: this node's page server knows none that has them."
    elif said and code in FILE_ERRORS:
        message = f"{message[:-1]}: {said.rstrip('.')}."
    elif said:  # the same in other words
        message = f"{message[:-1]}, says the page server."
    elif detail:
        message = f"{message[:-1]}: {detail.rstrip('.')}."
    hint = HINTS.get(code)
    if cause.startswith("the keeper "):
        hint = KEEPER_HINT
    elif code == PC_ERR_NO_MEMORY and _OF_ADDRESSES.search(detail):
        hint = ADDRESSES_HINT
    return cls(message, code=code, hint=hint)


def check(code: int, *, region: int | None = None, **context: object) -> int:
    """Returns `code` where it is a success or a count, raises its exception where it is not.

    Must be called on the thread that made the failing call: the detail is thread-local.
    """
    if code >= 0:
        return code
    raise error_for(int(code), last_detail(), region=region, **context)


def medium_of(on_disk: bool, in_file: bool = False) -> int:
    """`enum pc_medium`."""
    if in_file:
        return int(c.lib.PC_MEDIUM_FILE)
    return int(c.lib.PC_MEDIUM_DISK if on_disk else c.lib.PC_MEDIUM_MEMORY)


def ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


Runs = npt.NDArray[np.uint64]
"""Runs of blocks, shape (n, 2): first block (relative to the region's start), number of blocks."""


RUNS_SAID: Final = 6


def runs_said(runs: Runs) -> str:
    """Blocks for people: the first runs of them.

    Example:
        >>> runs_said(np.array([[3, 3], [9, 1]], np.uint64))
        '3-5, 9'
    """
    parts = [
        str(first) if n == 1 else f"{first}-{first + n - 1}"
        for first, n in runs[:RUNS_SAID].tolist()
    ]
    more = f", ... ({int(runs[:, 1].sum())} in all)" if len(runs) > RUNS_SAID else ""
    return ", ".join(parts) + more


def runs_pointer(runs: Runs) -> tuple[Any, int, Runs]:
    packed = np.ascontiguousarray(runs, dtype=np.uint64).reshape(-1, 2)
    if len(packed) == 0:
        return c.ffi.NULL, 0, packed
    return c.ffi.cast("struct pc_run *", packed.ctypes.data), len(packed), packed


def collect_runs(scan: Callable[[Any, int], int]) -> Runs:
    """Calls `scan(pointer, capacity)`, with more room as long as it has more runs to tell."""
    capacity = 1024
    while True:
        runs = np.empty((capacity, 2), dtype=np.uint64)
        n_runs = scan(c.ffi.cast("struct pc_run *", runs.ctypes.data), capacity)
        if n_runs <= capacity:
            return runs[:n_runs]
        capacity = n_runs + n_runs // 4


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
                    hint="What they use stays mapped until this process ends.",
                )
            time.sleep(pause_s)
            pause_s = min(0.01, 2 * pause_s + 0.0001)

"""The matcher of a node in memory that processes share, as numbers: one C handle. No Ray here.

What the numbers mean is `_recipes/matching/shared.py`'s.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from clamor_ray import errors
from clamor_ray._native.base import (
    PC_ERR_CLOSED,
    PC_ERR_MEMBER,
    PC_ERR_NO_SPACE,
    _Handle,
    c,
    check,
    last_detail,
    ns,
)

TASK: Final = struct.Struct("=QQQ")  # struct pc_match_ready
OUTGOING: Final = struct.Struct("=QQQQQQQQ")  # struct pc_match_outgoing
TALLY: Final = struct.Struct("=QQQQ")  # of pc_match_tallies
CLOSING: Final = 1
ANY: Final = (1 << 64) - 1
SENT_BYTES: Final = 24
USUAL_MESSAGES: Final = 32
# What a kernel gets, for compilers that take a NumPy dtype for a C struct (numba).
KERNEL_MESSAGE: Final = np.dtype([("data", "u8"), ("n_bytes", "u8"), ("sender", "u8")])
KERNEL_TASK: Final = np.dtype(
    [
        ("number", "u8"),
        ("stage", "u4"),
        ("index", "u4"),
        ("n_tasks", "u4"),
        ("n_next", "u4"),
        ("n_messages", "u8"),
        ("messages", "u8"),
        ("send", "u8"),
        ("broadcast", "u8"),
        ("internal", "u8"),
    ]
)
USUAL_BYTES: Final = 1 << 16
_DIED: Final = "A process died while it changed the matcher of this node."
_DIED_HINT: Final = "What it left cannot be trusted: begin again at the last checkpoint."
_FULL_HINT: Final = (
    "Messages wait there for tasks that have not begun. Use more nodes (job.scale), or send less "
    "at a time."
)


class Progress(NamedTuple):
    """`struct pc_match_progress`, which says what each is."""

    furthest: int
    floor: int
    n_known: int
    n_ready: int
    heap_used_bytes: int
    is_complete: bool
    has_reached: bool


class Ran(NamedTuple):
    """What a run of kernels has done.

    Args:
        n_ran: Tasks whose kernels have run.
        tasks: Number, stage and index of those that Python must run.
        failed: Those of the task whose kernel has failed.
        code: What that has returned; 0: none has failed.
        detail: What C says of it.
    """

    n_ran: int
    tasks: list[tuple[int, ...]]
    failed: tuple[int, int, int]
    code: int
    detail: str


def kernel_calls() -> dict[str, int]:
    """The addresses of `pc_match_send` and `pc_match_broadcast`, for kernels that call so."""
    ffi, lib = c.ffi, c.lib
    return {
        name: int(ffi.cast("intptr_t", ffi.addressof(lib, f"pc_match_{name}")))
        for name in ("send", "broadcast")
    }


def checked(code: int) -> int:
    """As `check`, in words that fit a matcher."""
    if code == PC_ERR_MEMBER:
        raise errors.MemberLostError(_DIED, code=code, hint=_DIED_HINT)
    if code == PC_ERR_CLOSED:
        raise errors.ClosedError("The matcher of this node was stopped.", code=code)
    if code == PC_ERR_NO_SPACE:
        detail = last_detail()
        raise errors.NoSpaceError(f"{detail[:1].upper()}{detail[1:]}.", code=code, hint=_FULL_HINT)
    return check(code)


class MatcherHandle(_Handle):
    """This process's end of a node's matcher. Calls of all threads and processes may run at once.

    Args:
        pointer: From `create` or `attach`.
    """

    def __init__(self, pointer: Any) -> None:
        super().__init__()
        self._opened(pointer)

    @classmethod
    def create(
        cls,
        datasets: Sequence[tuple[int, int]],
        accesses: Sequence[tuple[int, int]],
        stages: Sequence[tuple[int, ...]],
        steps: Sequence[tuple[int, ...]],
        n_counters: int,
        window: int,
        heap_bytes: int,
    ) -> MatcherHandle:
        """A new one; the tables are the rows of `struct pc_match_tables`.

        Raises:
            RangeError: A row names what is not there.
            OutOfMemoryError, DescriptorLimitError.
        """
        tables = c.ffi.new("struct pc_match_tables *")
        keep = []
        for name, rows in (
            ("dataset", datasets),
            ("access", accesses),
            ("stage", stages),
            ("step", steps),
        ):
            made = c.ffi.new(f"struct pc_match_{name}[]", [tuple(row) for row in rows])
            keep.append(made)
            plural = "accesses" if name == "access" else f"{name}s"
            setattr(tables, plural, made)
            setattr(tables, f"n_{plural}", len(rows))
        tables.n_counters = n_counters
        out = c.ffi.new("pc_matcher **")
        checked(c.lib.pc_match_create(tables, window, heap_bytes, out))
        return cls(out[0])

    @classmethod
    def attach(cls, fd: int) -> MatcherHandle:
        """The matcher of a descriptor, which stays the caller's.

        Raises:
            ProtocolError: It has none.
        """
        out = c.ffi.new("pc_matcher **")
        checked(c.lib.pc_match_attach(fd, out))
        return cls(out[0])

    @property
    def fd(self) -> int:
        return self._call(c.lib.pc_match_fd)

    def call(self, name: str, *args: Any) -> int:
        """A function of pagecache_match.h by its name, without ``pc_match_``."""
        return checked(self._call(getattr(c.lib, f"pc_match_{name}"), *args))

    # -- tasks

    def take(self, most: int, timeout_s: float) -> Iterator[tuple[int, ...]]:
        out = c.ffi.new("struct pc_match_ready[]", most)
        n = checked(self._call(c.lib.pc_match_take, out, most, ns(timeout_s)))
        return TASK.iter_unpack(c.ffi.buffer(out, n * TASK.size))

    def finish(self, tasks: array[int], took_ns: array[int] | None) -> None:
        """
        Args:
            tasks: Rows of `struct pc_match_ready`.
            took_ns: Of each one's function.
        """
        rows = c.ffi.from_buffer("struct pc_match_ready[]", tasks)
        times = c.ffi.NULL if took_ns is None else c.ffi.from_buffer("uint64_t[]", took_ns)
        checked(self._call(c.lib.pc_match_finish, rows, times, len(tasks) // 3))

    def end(
        self,
        tasks: array[int],
        took_ns: array[int],
        sent: array[int],
        first_sent: array[int],
        data: bytes,
    ) -> tuple[int, int]:
        """
        Args:
            tasks: Rows of `struct pc_match_ready`.
            took_ns: Of each one's function.
            sent: Rows of `struct pc_match_sent`, by task.
            first_sent: Where those of each task begin, and where all end.
            data: The messages' bytes.

        Returns:
            How many are done, and what `checked` is for.
        """
        done = c.ffi.new("uint64_t *")
        rows = c.ffi.from_buffer("struct pc_match_ready[]", tasks)
        times = c.ffi.from_buffer("uint64_t[]", took_ns)
        firsts = c.ffi.from_buffer("uint64_t[]", first_sent)
        arguments = (rows, times, len(took_ns), _sent(sent)[0], firsts, data, len(data), done)
        code = self._call(c.lib.pc_match_end, *arguments)
        return done[0], code

    def tallies(self) -> list[tuple[int, ...]]:
        """Group, index, tasks and nanoseconds of slices."""
        capacity = 1024
        while True:
            out = c.ffi.new("uint64_t[]", 4 * capacity)
            n = checked(self._call(c.lib.pc_match_tallies, out, capacity))
            if n <= capacity:
                return list(TALLY.iter_unpack(c.ffi.buffer(out, n * TALLY.size)))
            capacity = n

    def messages(self, task: Sequence[int]) -> list[bytes]:
        row = _row(task)
        capacity = USUAL_MESSAGES
        while True:
            out = c.ffi.new("struct pc_match_message[]", capacity)
            n = checked(self._call(c.lib.pc_match_messages, row, out, capacity))
            if n <= capacity:
                return [c.ffi.buffer(out[i].data, out[i].n_bytes)[:] for i in range(n)]
            capacity = n

    def close_all(
        self, task: Sequence[int], sent: array[int], data: bytes, n_next: int | None
    ) -> list[int]:
        """
        Args:
            sent: Rows of `struct pc_match_sent`.
            n_next: Of the next stage's tasks; None: the closings of those that are elsewhere go
                to the outbox.
        """
        away = c.ffi.NULL if n_next is None else c.ffi.new("uint32_t[]", n_next)
        n = checked(
            self._call(c.lib.pc_match_close_all, _row(task), *_sent(sent), data, len(data), away)
        )
        return [] if n_next is None else list(away[0:n])

    def close_one(
        self, number: int, group: int, index: int, sender: int, sent: array[int], data: bytes
    ) -> None:
        arguments = (number, group, index, sender, *_sent(sent), data, len(data))
        checked(self._call(c.lib.pc_match_close, *arguments))

    # -- kernels

    def set_kernel(self, stage: int, address: int) -> None:
        kernel = c.ffi.cast("pc_match_kernel", address)
        checked(self._call(c.lib.pc_match_set_kernel, stage, kernel))

    def set_partition(self, dataset: int, index: int, address: int, n_bytes: int) -> None:
        where = c.ffi.cast("void *", address)
        checked(self._call(c.lib.pc_match_set_partition, dataset, index, where, n_bytes))

    def run(self, most: int, timeout_s: float) -> Ran:
        out = c.ffi.new("struct pc_match_ready[]", most)
        ran = c.ffi.new("struct pc_match_ran *")
        checked(self._call(c.lib.pc_match_run, most, ns(timeout_s), out, ran))
        failed = (ran.failed.number, ran.failed.stage, ran.failed.index)
        detail = last_detail() if ran.failed_code else ""
        tasks = list(TASK.iter_unpack(c.ffi.buffer(out, ran.n_tasks * TASK.size)))
        return Ran(n_ran=ran.n_ran, tasks=tasks, failed=failed, code=ran.failed_code, detail=detail)

    # -- memory

    def new_memory(self, n_bytes: int) -> tuple[int, memoryview]:
        """Memory of nobody: its address, and its bytes."""
        out = c.ffi.new("void **")
        checked(self._call(c.lib.pc_match_new_memory, n_bytes, out))
        return int(c.ffi.cast("uintptr_t", out[0])), self._bytes(out[0], n_bytes)

    def set_memory(
        self,
        dataset: int,
        index: int,
        address: int,
        n_bytes: int,
        data_offset: int,
        data_bytes: int,
    ) -> None:
        """A partition's memory is that; 0 and zeros: it has none."""
        where = c.ffi.cast("void *", address)
        arguments = (dataset, index, where, n_bytes, data_offset, data_bytes)
        checked(self._call(c.lib.pc_match_set_memory, *arguments))

    def memory_of(self, dataset: int, index: int) -> tuple[int, int, memoryview] | None:
        """A partition's generation, address and bytes; None: it has none."""
        out = c.ffi.new("struct pc_match_memory *")
        checked(self._call(c.lib.pc_match_memory_of, dataset, index, out))
        if not out.address:
            return None
        address = int(c.ffi.cast("uintptr_t", out.address))
        return out.generation, address, self._bytes(out.address, out.n_bytes)

    def generations(self) -> Sequence[int]:
        """Of all partitions, as they are now: by group, index, and dataset within the group. Not to
        be read when this is closed."""
        n = c.ffi.new("uint64_t *")
        first = c.lib.pc_match_generations(self._handle, n)
        numbers: Any = self._bytes(first, 8 * n[0]).cast("Q")
        return numbers  # type: ignore[no-any-return]

    def _bytes(self, address: Any, n_bytes: int) -> memoryview:
        return memoryview(c.ffi.buffer(c.ffi.cast("char *", address), n_bytes)).cast("B")

    # -- slices, and the order of stages

    def add(self, group: int, index: int, state: bytes) -> None:
        checked(self._call(c.lib.pc_match_add, group, index, state, len(state)))

    def remove(self, group: int, index: int) -> bytes:
        capacity = USUAL_BYTES
        while True:
            out = c.ffi.new("char[]", capacity)
            n = checked(self._call(c.lib.pc_match_remove, group, index, out, capacity))
            if n <= capacity:
                return bytes(c.ffi.buffer(out, n))
            capacity = n

    def pairs(self, name: str, kind: str) -> list[tuple[int, int]]:
        """What `slices` and `decisions` list."""
        function, capacity = getattr(c.lib, f"pc_match_{name}"), 1024
        while True:
            out = c.ffi.new(f"{kind}[]", 2 * capacity)
            n = checked(self._call(function, out, capacity))
            if n <= capacity:
                flat = out[0 : 2 * n]
                return [(flat[i], flat[i + 1]) for i in range(0, 2 * n, 2)]
            capacity = n

    def progress(self, number: int = 0) -> Progress:
        out = c.ffi.new("struct pc_match_progress *")
        checked(self._call(c.lib.pc_match_progress_of, number, out))
        return Progress(
            furthest=out.furthest,
            floor=out.floor,
            n_known=out.n_known,
            n_ready=out.n_ready,
            heap_used_bytes=out.heap_used_bytes,
            is_complete=bool(out.is_complete),
            has_reached=bool(out.has_reached),
        )

    # -- the outbox

    def take_outgoing(self) -> bytes:
        """Entries, `struct pc_match_outgoing` and what follows; at most about 1 MiB of them."""
        capacity = USUAL_BYTES
        following = c.ffi.new("uint64_t *")
        taken = b""
        while True:
            out = c.ffi.new("char[]", capacity)
            n = checked(self._call(c.lib.pc_match_take_outgoing, out, capacity, following))
            taken += bytes(c.ffi.buffer(out, n))
            if not following[0] or len(taken) >= 16 * USUAL_BYTES:
                return taken
            capacity = max(USUAL_BYTES, following[0])

    # -- its end

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a half-made one, or when the process ends
            self.close()

    def close(self) -> None:
        """Ends this process's handle, and its waits. Idempotent; the matcher itself stays."""
        pointer = self._shut()
        if pointer is not None:
            check(c.lib.pc_match_close_handle(pointer))

    def discard(self) -> None:
        """As `close`, and the memory of all partitions and messages is free, for all processes.
        Objects that point into it stay readable, and have nothing more in them. Idempotent."""
        pointer = self._shut()
        if pointer is not None:
            check(c.lib.pc_match_discard(pointer))

    def _shut(self) -> Any:
        pointer = self._take()
        if pointer is not None:
            check(c.lib.pc_match_shut(pointer))
            self._drain()
        return pointer


def _row(task: Sequence[int]) -> Any:
    return c.ffi.new("struct pc_match_ready *", tuple(task))


def _sent(rows: array[int]) -> tuple[Any, int]:
    n = len(rows) * rows.itemsize // SENT_BYTES
    return (c.ffi.from_buffer("struct pc_match_sent[]", rows) if n else c.ffi.NULL), n

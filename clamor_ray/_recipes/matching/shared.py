"""The matcher of a node that several processes share: `matcher.Matcher`'s methods, in C.

The node's worker makes it, and its executors attach its descriptor. What `Matcher` does with one
caller this does with many, in any process and thread: its lock is in C, and held for no longer than
a call. A process that dies in a call leaves it broken, and every later call says so.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from clamor_ray._native.base import PC_ERR_NO_SPACE
from clamor_ray._native.matcher import ANY, CLOSING, OUTGOING, MatcherHandle, checked
from clamor_ray._recipes.matching.matcher import WINDOW, ReadyTask
from clamor_ray._recipes.matching.packing import pack_state, unpack_state
from clamor_ray._recipes.matching.state import SliceState
from clamor_ray._recipes.program.tables import Tables

HEAP_BYTES: Final = 256 << 20  # nothing is taken before it is used


@dataclass(frozen=True, slots=True)
class Closing:
    """A task has sent all that it sends to one task, whose slice is not here.

    Args:
        number, group, index, sender, messages: As of `close`.
    """

    number: int
    group: int
    index: int
    sender: int
    messages: list[bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """A stage has decided, here.

    Args:
        number, value: As of `decide`.
    """

    number: int
    value: bool


class KernelFailed(Exception):
    """A kernel has failed. Its task, and others that were taken with it, have begun and will not
    end.

    Args:
        task: Which.
        message: What it has returned, and what C says of it.
    """

    def __init__(self, task: ReadyTask, message: str) -> None:
        super().__init__(message)
        self.task = task


class SharedMatcher:
    """See the file's head. `create` or `attach` make one; its methods are `Matcher`'s, and more.

    Args:
        tables: The program.
        handle: Of C.

    Example:
        >>> from clamor_ray._recipes.program.builder import Builder
        >>> from clamor_ray._recipes.matching.state import PartitionState
        >>> p = Builder()
        >>> x = p.dataset([1, 2])
        >>> p.stage(lambda t, x: x + 1, writes=[x])
        >>> with SharedMatcher.create(p.tables()) as matcher:
        ...     matcher.add(0, 1, SliceState({0: PartitionState()}))
        ...     matcher.take(10)
        [ReadyTask(number=1, stage=0, index=1)]
    """

    def __init__(self, tables: Tables, handle: MatcherHandle) -> None:
        self._tables = tables
        self._c = handle

    @classmethod
    def create(
        cls, tables: Tables, heap_bytes: int = HEAP_BYTES, window: int = WINDOW
    ) -> SharedMatcher:
        """
        Args:
            tables: The program.
            heap_bytes: For messages that wait.
            window: So many stages are known at once; at least 2.

        Raises:
            RangeError: The window or the heap is too small.
            OutOfMemoryError, DescriptorLimitError.
        """
        rows: list[tuple[int, ...]] = []
        accesses: list[tuple[int, int]] = []
        for stage in tables.stages:
            own = [(access.dataset, int(access.is_write)) for access in stage.accesses]
            rows.append(
                (stage.n_tasks, stage.group, len(accesses), len(own), stage.sends, stage.decides)
            )
            accesses += own
        handle = MatcherHandle.create(
            [(info.n_partitions, info.group) for info in tables.datasets],
            accesses,
            rows,
            [(int(s.op), s.arg, s.then, s.other, s.limit) for s in tables.steps],
            tables.n_counters,
            window,
            heap_bytes,
        )
        return cls(tables, handle)

    @classmethod
    def attach(cls, tables: Tables, fd: int) -> SharedMatcher:
        """Another process's matcher of the same program.

        Args:
            fd: Its descriptor; the caller's still.

        Raises:
            ProtocolError: There is no matcher in it.
        """
        return cls(tables, MatcherHandle.attach(fd))

    @property
    def memory(self) -> MatcherHandle:
        """The memory of partitions: `new_memory` and those below it."""
        return self._c

    @property
    def fd(self) -> int:
        """For `attach`. Not inherited by programs that are started."""
        return self._c.fd

    def __enter__(self) -> SharedMatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_handle()

    def close_handle(self) -> None:
        """Ends this handle, and its waits in other threads. The matcher goes with the last one."""
        self._c.close()

    def discard(self) -> None:
        """As `close_handle`, at the end of a job: what partitions and messages take is free, and no
        other process may call anything. Objects of this process that point there have zeros."""
        self._c.discard()

    def stop(self) -> None:
        """Waits of all processes end with `ClosedError`, and so do those that come."""
        self._c.call("stop")

    # -- what is here

    def add(self, group: int, index: int, state: SliceState) -> None:
        """As `Matcher.add`.

        Raises:
            ExistsError: It is here.
            RangeError: The program has no such slice, or it has other partitions.
            NoSpaceError: Its messages find no room; it is not here then.
        """
        self._c.add(group, index, pack_state(state))

    def hold(self, group: int, index: int) -> bool:
        """As `Matcher.hold`. When its last task has ended `wait_outgoing` ends too."""
        return self._c.call("hold", group, index) == 1

    def release(self, group: int, index: int) -> None:
        """As `Matcher.release`."""
        self._c.call("release", group, index)

    def remove(self, group: int, index: int) -> SliceState:
        """As `Matcher.remove`.

        Raises:
            RangeError: It is not here, not held, or in use.
        """
        return unpack_state(self._c.remove(group, index))

    @property
    def slices(self) -> list[tuple[int, int]]:
        """As `Matcher.slices`."""
        return self._c.pairs("slices", "uint32_t")

    # -- tasks

    def take(self, most: int, timeout_s: float = 0.0) -> list[ReadyTask]:
        """As `Matcher.take`, but waits for the first one. Python's handlers of signals run after
        the wait: in a main thread wait for a second at most, and again.

        Raises:
            ClosedError: The matcher was stopped.
        """
        return list(map(ReadyTask._make, self._c.take(most, timeout_s)))

    def set_takers(self, n: int) -> None:
        """So many threads, of all processes, take tasks: each takes its share of what is ready."""
        self._c.call("set_takers", n)

    def finish(self, tasks: Iterable[ReadyTask], took_ns: Sequence[int] | None = None) -> None:
        """As `Matcher.finish`.

        Args:
            tasks: That have run.
            took_ns: Of each one's function, for `tallies`.

        Raises:
            RangeError: One does not run. Those before it have ended.
        """
        flat = array("Q", chain.from_iterable(tasks))
        if flat:
            self._c.finish(flat, None if took_ns is None else array("Q", took_ns))

    def end(
        self,
        tasks: Sequence[ReadyTask],
        took_ns: Sequence[int],
        sent: Sequence[Mapping[int, list[bytes]]],
    ) -> int:
        """`send_all` and `finish` of many tasks in one call. Where one's messages find no room, it
        and those behind it have not ended.

        Args:
            tasks: That have run.
            took_ns: Of each one's function.
            sent: Of each one, by receiver; empty: it has sent nothing, or its stage does not.

        Returns:
            How many have ended.

        Raises:
            RangeError: One does not run, or sends to nobody. Those before it have ended.
        """
        rows: array[int] = array("Q")
        firsts, pieces, end_bytes = array("Q", [0]), [], 0
        for each in sent:
            if each:
                own, data = _packed(each, end_bytes)
                rows += own
                pieces.append(data)
                end_bytes += len(data)
            firsts.append(len(rows) // 3)
        flat = array("Q", chain.from_iterable(tasks))
        n_done, code = self._c.end(flat, array("Q", took_ns), rows, firsts, b"".join(pieces))
        if code != PC_ERR_NO_SPACE:
            checked(code)
        return n_done

    def tallies(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Group and index of slices -> tasks that have run on them here, and nanoseconds in their
        functions."""
        return {(row[0], row[1]): (row[2], row[3]) for row in self._c.tallies()}

    def next_stage(self, number: int) -> int | None:
        """As `Matcher.next_stage`."""
        stage = self._c.call("next_stage", number)
        return stage if stage < len(self._tables.stages) else None

    def messages(self, task: ReadyTask) -> list[bytes]:
        """As `Matcher.messages`."""
        return self._c.messages(task)

    def close_all(self, task: ReadyTask, sent: Mapping[int, list[bytes]]) -> list[int]:
        """As `Matcher.close_all`."""
        following = self.next_stage(task.number)
        n_next = 0 if following is None else self._tables.stages[following].n_tasks
        return self._c.close_all(task, *_packed(sent), n_next)

    def send_all(self, task: ReadyTask, sent: Mapping[int, list[bytes]]) -> None:
        """As `close_all`; what is for slices that are elsewhere goes to the outbox.

        Raises:
            NoSpaceError: Not all found room; safe to call again.
        """
        self._c.close_all(task, *_packed(sent), None)

    def close(
        self, number: int, group: int, index: int, sender: int, messages: list[bytes]
    ) -> None:
        """As `Matcher.close`.

        Raises:
            NoSpaceError: They find no room; safe to call again.
        """
        self._c.close_one(number, group, index, sender, *_packed({index: messages}))

    # -- kernels

    def set_kernel(self, stage: int, address: int) -> None:
        """The tasks of a stage are run in this process by a C function; 0: by Python.

        Args:
            address: Of a ``pc_match_kernel`` (pagecache_match.h): ``cfunc.address`` of numba,
                ``int(ffi.cast("intptr_t", function))`` of cffi.
        """
        self._c.set_kernel(stage, address)

    def set_partition(self, dataset: int, index: int, address: int, n_bytes: int) -> None:
        """Where a partition lies in this process, for kernels; left out: its memory is what all
        processes share."""
        self._c.set_partition(dataset, index, address, n_bytes)

    def run_kernels(self, most: int, timeout_s: float) -> tuple[int, list[ReadyTask]]:
        """Runs tasks that have kernels, without the GIL, until one comes that has none, nothing has
        been ready for `timeout_s`, or a second has passed.

        Args:
            most: So many are taken at a time.

        Returns:
            How many have run, and the tasks that Python must run: they have begun.

        Raises:
            KernelFailed: See there.
            ClosedError: The matcher was stopped.
        """
        ran = self._c.run(most, timeout_s)
        if ran.code:
            stage = self._tables.stages[ran.failed[1]]
            said = f" ({ran.detail})" if ran.detail else ""
            raise KernelFailed(
                ReadyTask(*ran.failed),
                f"{stage.line}: the kernel of {stage.name} failed for index {ran.failed[2]}, in "
                f"stage number {ran.failed[0]}: it returned {ran.code}{said}.",
            )
        return ran.n_ran, list(map(ReadyTask._make, ran.tasks))

    # -- the order of stages

    def decide(self, number: int, value: bool) -> None:
        """As `Matcher.decide`."""
        self._c.call("decide", number, value, 0)

    def answer(self, number: int, value: bool) -> None:
        """As `decide`, by a task that has run here: others are told, through the outbox."""
        self._c.call("decide", number, value, 1)

    @property
    def decisions(self) -> dict[int, bool]:
        """As `Matcher.decisions`."""
        return {number: bool(value) for number, value in self._c.pairs("decisions", "uint64_t")}

    @property
    def is_complete(self) -> bool:
        """As `Matcher.is_complete`."""
        return self._c.call("is_complete") == 1

    @property
    def furthest(self) -> int:
        """As `Matcher.furthest`."""
        return self._c.progress().furthest

    @property
    def floor(self) -> int:
        """As `Matcher.floor`."""
        return self._c.progress().floor

    @property
    def heap_used_bytes(self) -> int:
        """Of messages, closings and answers that wait."""
        return self._c.progress().heap_used_bytes

    def forget(self, before: int) -> None:
        """As `Matcher.forget`."""
        self._c.call("forget", before)

    def stop_after(self, number: int | None) -> None:
        """As `Matcher.stop_after`."""
        self._c.call("stop_after", ANY if number is None else number)

    def has_reached(self, number: int) -> bool:
        """As `Matcher.has_reached`."""
        return self._c.progress(number).has_reached

    # -- the outbox

    def wait_outgoing(self, timeout_s: float) -> bool:
        """Until the outbox has something, a held slice has come to rest, or nothing is left to run
        here.

        Raises:
            ClosedError: The matcher was stopped, and the outbox is empty.
        """
        return self._c.call("wait_outgoing", max(0, int(timeout_s * 1e9))) == 1

    def take_outgoing(self) -> list[Closing | Answer]:
        """What others must be told, oldest first; it is gone from the outbox. About a MiB at most:
        call it until it returns none."""
        return _unpacked(self._c.take_outgoing())


def _packed(sent: Mapping[int, Sequence[bytes]], begin: int = 0) -> tuple[array[int], bytes]:
    """Rows of receiver, offset and length, by receiver; and the bytes, the same object once.
    Offsets count from `begin`."""
    rows: list[int] = []
    pieces: list[bytes] = []
    seen: dict[int, int] = {}
    end = begin
    for to in sorted(sent):
        for message in sent[to]:
            offset = seen.get(id(message))
            if offset is None:
                offset = seen[id(message)] = end
                pieces.append(message)
                end += len(message)
            rows += (to, offset, len(message))
    return array("Q", rows), b"".join(pieces)


def _unpacked(taken: bytes) -> list[Closing | Answer]:
    found: list[Closing | Answer] = []
    at = 0
    while at < len(taken):
        kind, number, group, index, sender, value, n, n_bytes = OUTGOING.unpack_from(taken, at)
        at += OUTGOING.size
        lengths: Any = memoryview(taken)[at : at + 8 * n].cast("Q")
        at += 8 * n
        end = at + n_bytes
        messages = []
        for length in lengths:
            messages.append(taken[at : at + length])
            at += length
        at = end + -end % 8
        if kind == CLOSING:
            found.append(
                Closing(number=number, group=group, index=index, sender=sender, messages=messages)
            )
        else:
            found.append(Answer(number, bool(value)))
    return found

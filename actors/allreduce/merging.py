"""What one node makes of the partial results of its tasks: one value for each run. No Ray here.

An aggregate takes each partition once, in the order of turns where those are given, and else as
they come. Arrays under a known operation are added up in C, without the GIL, straight from where
they lie: the first is only looked at, the second goes with it into a buffer of the aggregate's own.
Everything else is reduced by the user's function, segment by segment.

Thread-safe: one thread merges, others wait for it or read when it is done.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.ring import reduce_into
from clamor_ray._protocol.split_aggregation import AggregateLayout, How, differ

Array = npt.NDArray[Any]

MOST_RUNS: Final = 64
MOST_DROPPED: Final = 1024


class Spare:
    """One buffer that a run is done with, for the next one: its memory is there already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: Array | None = None

    def take(self, n: int, dtype: np.dtype[Any]) -> Array:
        """An array of n elements; what is in it does not matter."""
        with self._lock:
            kept, self._buffer = self._buffer, None
        if kept is not None and kept.dtype == dtype and kept.size == n:
            return kept
        return np.empty(n, dtype)

    def give(self, buffer: Array) -> None:
        """It is needed no more."""
        with self._lock:
            self._buffer = buffer


@dataclass
class Aggregate:
    """One run's, on one node.

    Args:
        how: values are merged.
        spare: where buffers come from.
    """

    how: How
    spare: Spare
    layout: AggregateLayout | None = None
    _first: int = -1  # the partition that gave the layout
    _merged: set[int] = field(default_factory=set)
    _early: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by turn
    _turn: int = 0
    _held: list[Any] | None = None  # segments of one value that nothing was added to yet
    _buffer: Array | None = None  # all segments, one after the other
    _views: list[Array] = field(default_factory=list)  # of the buffer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, partition: int, value: Any, turn: int | None = None) -> None:
        """A partition's value; again: nothing.

        Args:
            turn: counts from 0; earlier ones are waited for, and this returns.

        Raises:
            FunctionFailedError: A function of the user's raised.
            CollectiveMismatchError: It is not what the others are.
        """
        with self._lock:
            if turn is None:
                self._add(partition, value)
                return
            if turn >= self._turn:
                self._early[turn] = (partition, value)
            while self._turn in self._early:
                self._add(*self._early.pop(self._turn))
                self._turn += 1

    def has(self, partitions: Iterable[int]) -> bool:
        """Whether all of these are merged."""
        with self._lock:
            return self._merged.issuperset(partitions)

    def _add(self, partition: int, value: Any) -> None:
        if partition in self._merged:
            return
        segments = self.how.segments(value, partition)
        layout = self.how.layout(segments)
        if self.layout is None:
            self.layout, self._first = layout, partition
        elif layout != self.layout:
            raise differ((self._first, self.layout), (partition, layout))
        if self._held is None and self._buffer is None:
            self._held = segments
        elif layout.dtype:
            self._add_arrays(segments)
        else:
            assert self._held is not None
            if len(self._merged) == 1:  # what lies in Ray's store cannot be written to
                self._held = _copies(self._held)
            where = f"at partition {partition}"
            pairs = zip(self._held, segments, strict=True)
            self._held = [self._reduced(one, other, where) for one, other in pairs]
        self._merged.add(partition)

    def _reduced(self, one: Any, other: Any, where: str) -> Any:
        """Two segments made one, which may be changed, whatever part of the second is in it."""
        if type(other) is not np.ndarray or other.dtype.hasobject:
            return self.how.two(one, copy.deepcopy(other), where)
        made = self.how.two(one, other, where)
        if type(made) is np.ndarray and not made.dtype.hasobject:
            return made.copy() if np.may_share_memory(made, other) else made
        return copy.deepcopy(made)  # the array may be anywhere in it

    def _add_arrays(self, segments: list[Any]) -> None:
        assert self.how.op is not None
        before: Sequence[Any] = self._views
        if self._buffer is None:
            assert self._held is not None
            before, self._held = self._held, None
            self._make_buffer(segments)
        for out, one, other in zip(self._views, before, segments, strict=True):
            reduce_into(out, _plain(one), _plain(other), self.how.op)

    def _make_buffer(self, segments: Sequence[Any]) -> None:
        sizes = [segment.size for segment in segments]
        self._buffer = buffer = self.spare.take(sum(sizes), segments[0].dtype)
        ends = np.cumsum(sizes).tolist()
        self._views = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def take(self) -> tuple[Array, bool]:
        """All arrays in one, and whether it may be written to: then it is the caller's from now on,
        whatever becomes of the run, and goes back to `spare` when it is needed no more."""
        with self._lock:
            if self._buffer is None:
                assert self._held is not None
                if len(self._held) == 1:
                    return _plain(self._held[0]), False
                held, self._held = self._held, None
                self._make_buffer(held)
                for view, segment in zip(self._views, held, strict=True):
                    view[...] = segment.reshape(-1)
            buffer, self._buffer, self._views = self._buffer, None, []
            assert buffer is not None
            return buffer, True

    def objects(self) -> list[Any]:
        """All segments, where they are no arrays; they may be changed."""
        with self._lock:
            assert self._held is not None
            return _copies(self._held) if len(self._merged) == 1 else self._held

    def close(self) -> None:
        """Its buffer may go to another run."""
        with self._lock:
            buffer, self._buffer, self._views, self._held = self._buffer, None, [], None
            self._early.clear()
        if buffer is not None:
            self.spare.give(buffer)


def _copies(segments: Sequence[Any]) -> list[Any]:
    """Copies that may be changed: each by itself, because one object may be several segments."""
    return [copy.deepcopy(segment) for segment in segments]


def _plain(array: Array) -> Array:
    """In one piece and aligned, as C takes it."""
    plain: Array = np.require(array, requirements=["C", "A"]).reshape(-1)
    return plain


class Runs:
    """All aggregates of one node, by run.

    Args:
        most: runs that are kept; of more the oldest go, whose driver forgot to clear them.
    """

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most
        self._spare = Spare()
        self._runs: dict[int, Aggregate] = {}
        self._dropped: dict[int, None] = {}  # the latest: calls of them may still come
        self._changed = threading.Condition()

    def of(self, run_id: int, how: Callable[[], How]) -> Aggregate | None:
        """A run's aggregate; begun where there is none. None: the run was dropped."""
        with self._changed:
            if run_id in self._dropped or run_id in self._runs:
                return self._runs.get(run_id)
        made = Aggregate(how(), self._spare)  # runs the user's imports: nobody waits for that
        with self._changed:
            if run_id in self._dropped or run_id in self._runs:
                return self._runs.get(run_id)
            while len(self._runs) >= self._most:
                self._runs.pop(next(iter(self._runs))).close()
            self._runs[run_id] = made
            return made

    def is_dropped(self, run_id: int) -> bool:
        """Whether nothing of it is wanted any more."""
        with self._changed:
            return run_id in self._dropped

    def told(self) -> None:
        """Something was merged: whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def whole(self, run_id: int, partitions: Iterable[int], timeout_s: float) -> Aggregate:
        """A run's aggregate, when all of these partitions are in it.

        Raises:
            WaitTimeoutError: They were not merged in time.
        """
        wanted = frozenset(partitions)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._runs.get(run_id)
                if found is not None and found.has(wanted):
                    return found
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise errors.WaitTimeoutError(
                        f"Partial results were not merged within {timeout_s:g} s.",
                        hint="See this node's log: their objects may be lost, and made again.",
                    )
                self._changed.wait(left_s)

    def drop(self, run_id: int) -> None:
        """Forgets a run: nothing of it is merged any more. Idempotent."""
        with self._changed:
            self._dropped[run_id] = None
            while len(self._dropped) > MOST_DROPPED:
                del self._dropped[next(iter(self._dropped))]
            found = self._runs.pop(run_id, None)
        if found is not None:
            found.close()

    def take_spare(self, n: int, dtype: np.dtype[Any]) -> Array:
        """An array for what is computed from aggregates; see `Spare`."""
        return self._spare.take(n, dtype)

    def give_spare(self, buffer: Array) -> None:
        """It is needed no more."""
        self._spare.give(buffer)

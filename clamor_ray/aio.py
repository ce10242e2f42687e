"""The waiting calls for coroutines: `await clamor.aio.get(ref)`, `.refresh(ref)`, `.prefetch(...)`,
`.gather(...)`, and `async for version in clamor.aio.watch(ref)`.

An event loop that touches an absent block stops, with everything that runs on it, until the block
is here. These calls wait on a thread instead: Ray's async actors and Ray Serve's replicas go on
with other requests meanwhile. What is resident afterwards may be touched on the loop. (A block may
be evicted again before that, where the node's budget is small: `gather` copies, and is not
concerned.) `gather` of few rows that are all resident copies them at once, without a thread.

Each process has up to 16 threads for that, made when they are needed. A call that is cancelled ends
at once for its coroutine; its thread is free again when the page cache has answered, at the latest
at the call's timeout, and what it got is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._read import opener
from clamor_ray._read.gather import gather as _gather
from clamor_ray._read.gather import gather_here as _gather_here
from clamor_ray._read.prefetch import prefetch as _prefetch
from clamor_ray._read.ref import GlobalRef, Mode

__all__ = ["gather", "get", "prefetch", "refresh", "watch"]

MOST_THREADS: Final = 16
# Rows that are here are copied on the loop itself: a thread's turn takes longer, most of all where
# the loop computes (the interpreter changes threads after 5 ms).
LOOP_BYTES: Final = 256 << 10

_T = TypeVar("_T")
_Work = Callable[[], None]


class _Threads:
    """Daemons: none of them keeps a process from ending, whatever it waits for."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_threads = 0
        self._n_free = 0  # threads that wait, less work that waits

    def submit(self, work: _Work) -> None:
        with self._lock:
            self._n_free -= 1
            if self._n_free < 0 and self._n_threads < MOST_THREADS:
                self._n_threads += 1
                self._n_free += 1
                name = f"clamor-aio-{self._n_threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._n_free += 1


_threads = _Threads()


def _after_fork_in_child() -> None:
    global _threads
    _threads = _Threads()  # the parent's threads, and what they were asked for, are not here


os.register_at_fork(after_in_child=_after_fork_in_child)


async def _on_a_thread(function: Callable[[], _T]) -> _T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, failure: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        if done.cancelled():
            return
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits
            loop.call_soon_threadsafe(tell, result, failure)

    _threads.submit(work)
    return await done


def _by(timeout: float | None, function: Callable[..., _T]) -> Callable[[], _T]:
    """A call with a timeout that begins now, not when a thread is free."""
    if timeout is None:
        return functools.partial(function, timeout=None)
    deadline = time.monotonic() + timeout

    def call() -> _T:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise errors.PrefetchTimeoutError(
                f"No thread was free within {timeout:g} s.",
                hint=f"Await fewer than {MOST_THREADS} calls at a time, or raise the timeout.",
            )
        return function(timeout=left_s)

    return call


async def get(ref: GlobalRef[Any], mode: Mode = "r", *, page_bytes: int | str = 0) -> Any:
    """As `ref.get(mode, page_bytes=page_bytes)`, without blocking the event loop.

    The object's buffers are still fetched when they are touched: `prefetch` or `gather` what the
    loop is going to touch.

    Args:
        ref: the variable.
        mode: "r" or "c", as `GlobalRef.get`'s.
        page_bytes: what a touch of an absent block fetches, as `GlobalRef.get`'s.

    Returns:
        The object, as `GlobalRef.get`.

    Raises:
        FreedError, SnapshotExpired, HomeLostError, ...: As `GlobalRef.get`.

    Example:
        >>> import asyncio
        >>> ref = clamor.put(np.arange(1000))
        >>> int(asyncio.run(clamor.aio.get(ref))[7])
        7
    """
    return await _on_a_thread(functools.partial(ref.get, mode, page_bytes=page_bytes))


async def prefetch(target: Any, *, wait: bool = True, timeout: float | None = None) -> None:
    """As `clamor.prefetch`, without blocking the event loop.

    Args:
        target, wait, timeout: as `clamor.prefetch`'s.

    Raises:
        ValueError, PrefetchTimeoutError, HomeLostError: As `clamor.prefetch`.

    Example:
        >>> import asyncio
        >>> table = clamor.put(np.arange(10**5)).get()
        >>> asyncio.run(clamor.aio.prefetch(table[1000:2000]))
    """
    await _on_a_thread(_by(timeout, functools.partial(_prefetch, target, wait=wait)))


async def gather(
    source: Any,
    ids: Any,
    *,
    out: npt.NDArray[Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """As `clamor.gather`, without blocking the event loop.

    Args:
        source, ids, out, timeout: as `clamor.gather`'s. Neither `ids` nor `out` may be changed
            before it has ended; where it was cancelled, `out` may be written to until its timeout.

    Returns:
        The rows, as `clamor.gather`.

    Raises:
        IndexError, TypeError, ValueError, PrefetchTimeoutError, ...: As `clamor.gather`.

    Example:
        >>> import asyncio
        >>> ref = clamor.put(np.arange(1000) ** 2)
        >>> asyncio.run(clamor.aio.gather(ref, [3, 1, 4]))
        array([ 9,  1, 16])
    """
    rows = _gather_here(source, ids, out, LOOP_BYTES)
    if rows is not NotImplemented:
        return rows
    return await _on_a_thread(_by(timeout, functools.partial(_gather, source, ids, out=out)))


async def refresh(ref: GlobalRef[Any]) -> GlobalRef[Any]:
    """As `ref.refresh()`, without blocking the event loop.

    Args:
        ref: the variable.

    Returns:
        This reference, at the newest version.

    Raises:
        ValueError, FreedError, SessionMismatchError, ServerUnavailableError: As
            `GlobalRef.refresh`.

    Example:
        >>> import asyncio, copy
        >>> ref = clamor.put(np.zeros(1000))
        >>> other = copy.copy(ref)
        >>> clamor.add_at(ref, [0], 1.0)
        >>> asyncio.run(clamor.aio.refresh(other)).version
        1
    """
    return await _on_a_thread(ref.refresh)


async def watch(ref: GlobalRef[Any], *, timeout: float | None = None) -> AsyncIterator[int]:
    """The newer versions of a variable, as commits make them, wherever they are made.

    `ref` does not move: `await clamor.aio.refresh(ref)`. As `GlobalRef.on_update`: the registry
    sends one message to each node for a commit, nobody asks in between, and a restart of the
    registry or of a page server loses no update.

    Args:
        ref: the variable.
        timeout: seconds for the next version; None waits until there is one, or an error.

    Returns:
        An iterator of versions, each greater than the one before; the first is greater than the
        reference's. Of several that came meanwhile only the newest.

    Raises:
        FreedError: The variable was freed.
        SessionEndedError: Its driver has ended the session.
        WaitTimeoutError: There was no version in time.
        ServerUnavailableError: The registry, or this node's page server, does not answer.

    Example:
        >>> import asyncio
        >>> async def first(ref):
        ...     clamor.add_at(ref, [0], 1.0)
        ...     async for version in clamor.aio.watch(before):
        ...         return version
        >>> ref = clamor.put(np.zeros(1000))
        >>> before = ref.snapshot()
        >>> asyncio.run(first(ref))
        1
    """
    loop = asyncio.get_running_loop()
    came: list[int | BaseException] = []
    news = asyncio.Event()

    def note(what: int | BaseException) -> None:
        came.append(what)
        news.set()

    def tell(what: int | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits
            loop.call_soon_threadsafe(note, what)

    watching: list[Any] = []
    is_over = False

    def begin() -> None:
        ref._check_not_freed()
        session = opener.current(ref._scope)
        watching.append(session.news.watch(ref._region, ref.version, tell, tell, ref.name))
        if is_over:  # who waits for this thread was cancelled
            watching[0].cancel()

    try:
        await _on_a_thread(begin)
        while True:
            try:
                await asyncio.wait_for(news.wait(), timeout)
            except asyncio.TimeoutError:
                raise errors.WaitTimeoutError(
                    f"{ref!r} had no newer version for {timeout:g} s.",
                    hint="Nothing is wrong with it: watch it again, or raise the timeout.",
                ) from None
            news.clear()
            versions = [what for what in came if isinstance(what, int)]
            ends = [what for what in came if isinstance(what, BaseException)]
            came.clear()
            if versions:
                yield versions[-1]
            if ends:
                raise ends[0]
    finally:
        is_over = True
        for each in watching:
            each.cancel()

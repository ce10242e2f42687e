"""`clamor.aio`: the loop goes on, whatever a call waits for. Counted, never timed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import aio, errors
from clamor_ray._session import process_sessions
from tests.support.fake_session import Cluster, FakeSession

TABLE = np.arange(80_000).reshape(-1, 8)
WAIT_S = 30.0


class Held:
    """Holds up one call of the page cache until `go` is set."""

    def __init__(self, session: FakeSession, name: str) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.left = 0
        client: Any = session.fake
        real: Callable[..., Any] = getattr(client, name)

        def held(*args: Any, **how: Any) -> Any:
            self.entered.set()
            assert self.go.wait(WAIT_S)
            try:
                return real(*args, **how)
            finally:
                self.left += 1

        setattr(client, name, held)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    monkeypatch.setattr(aio, "_threads", aio._Threads())
    return session


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_S))


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def a_free_thread() -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while aio._threads._n_free < 1:  # it says so a moment after the answer
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)


def test_they_do_what_the_others_do(session: FakeSession) -> None:
    ref = clamor.put(TABLE)

    async def work() -> None:
        table = await clamor.aio.get(ref)
        np.testing.assert_array_equal(table, TABLE)
        with pytest.raises(ValueError, match="page_bytes"):
            await clamor.aio.get(ref, page_bytes=12345)
        private = await clamor.aio.get(ref, "c", page_bytes="64KiB")
        assert private.flags.writeable
        np.testing.assert_array_equal(await clamor.aio.gather(table, [3, -1]), TABLE[[3, -1]])
        out = np.empty((2, 8), np.int64)
        assert await clamor.aio.gather(ref, [1, 2], out=out, timeout=5) is out
        session.fake.prefetched.clear()
        await clamor.aio.prefetch(table, wait=False, timeout=5)
        ((_, _, wait),) = session.fake.prefetched
        assert not wait
        with pytest.raises(IndexError, match="out of bounds"):
            await clamor.aio.gather(table, [len(TABLE)])
        with pytest.raises(ValueError, match="not part of a global variable"):
            await clamor.aio.prefetch(np.arange(3))

    run(work())


def test_rows_that_are_here_take_no_thread(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    session.fake.has_all = True
    n_most = aio.LOOP_BYTES // TABLE[0].nbytes
    out = np.empty((2, 8), np.int64)

    async def work() -> None:
        for ids in ([3, -1], np.array([[5], [6]]), np.array(7), np.arange(n_most) % 100):
            np.testing.assert_array_equal(await clamor.aio.gather(view, ids), TABLE[ids])
        assert await clamor.aio.gather(view, [1, 2], out=out) is out
        np.testing.assert_array_equal(out, TABLE[1:3])
        with pytest.raises(IndexError, match="out of bounds"):
            await clamor.aio.gather(view, [len(TABLE)])
        with pytest.raises(ValueError, match="out has shape"):
            await clamor.aio.gather(view, [1], out=out)
        assert aio._threads._n_threads == 0
        await clamor.aio.gather(view, np.arange(n_most + 1))
        assert aio._threads._n_threads == 1

    run(work())


@pytest.mark.parametrize("name", ["gather", "prefetch", "map"])
def test_the_loop_goes_on(session: FakeSession, name: str) -> None:
    ref = clamor.put(TABLE)
    view = ref.get()
    session.fake.shared.clear()
    held = Held(session, name)
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "gather": lambda: clamor.aio.gather(view, [1]),
        "prefetch": lambda: clamor.aio.prefetch(view),
        "map": lambda: clamor.aio.get(ref),
    }

    async def work() -> None:
        call = asyncio.ensure_future(calls[name]())
        await asyncio.to_thread(held.entered.wait, WAIT_S)
        await turns(1000)  # while it is held up
        assert not call.done()
        held.go.set()
        await call

    run(work())


def test_many_at_once(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    held = Held(session, "gather")
    n = 3 * aio.MOST_THREADS

    async def work() -> None:
        calls = [asyncio.ensure_future(clamor.aio.gather(view, [i])) for i in range(n)]
        await asyncio.to_thread(held.entered.wait, WAIT_S)
        held.go.set()
        for i, rows in enumerate(await asyncio.gather(*calls)):
            np.testing.assert_array_equal(rows, TABLE[[i]])

    run(work())
    run(clamor.aio.prefetch(view))  # on another loop
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("clamor-aio") for name in names) <= 2 * aio.MOST_THREADS
    assert aio._threads._n_threads <= aio.MOST_THREADS


def test_a_free_thread_is_used_again(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()

    async def work() -> None:
        for i in range(50):
            await clamor.aio.gather(view, [i])
            await a_free_thread()

    run(work())
    assert aio._threads._n_threads == 1


def test_a_cancelled_call_ends_at_once_and_leaks_nothing(session: FakeSession) -> None:
    ref = clamor.put(TABLE)
    held = Held(session, "map")

    async def work() -> None:
        call = asyncio.ensure_future(clamor.aio.get(ref))
        await asyncio.to_thread(held.entered.wait, WAIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert held.left == 0  # its thread is still in there
        waiting = [asyncio.ensure_future(clamor.aio.get(ref)) for _ in range(2 * aio.MOST_THREADS)]
        await turns(3)
        for call in waiting:
            call.cancel()
        held.go.set()
        np.testing.assert_array_equal(await clamor.aio.gather(ref, [5]), TABLE[[5]])

    run(work())
    assert 2 <= held.left < 2 * aio.MOST_THREADS  # those that no thread had begun never began
    for _ in range(1000):
        gc.collect()
        if not session.fake.mapped:
            break
        threading.Event().wait(0.01)  # the last thread drops its object on its own time
    assert not session.fake.mapped


def test_a_closed_loop_raises_nothing(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    held = Held(session, "gather")
    loop = asyncio.new_event_loop()
    call = loop.create_task(clamor.aio.gather(view, [1]))
    loop.run_until_complete(asyncio.sleep(0))
    assert held.entered.wait(WAIT_S)
    call.cancel()
    loop.run_until_complete(asyncio.gather(call, return_exceptions=True))
    loop.close()
    held.go.set()
    np.testing.assert_array_equal(run(clamor.aio.gather(view, [2])), TABLE[[2]])


def test_a_timeout_begins_with_the_call(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    held = Held(session, "gather")

    async def work() -> None:
        first = [
            asyncio.ensure_future(clamor.aio.gather(view, [i])) for i in range(aio.MOST_THREADS)
        ]
        await asyncio.to_thread(held.entered.wait, WAIT_S)
        late = asyncio.ensure_future(clamor.aio.gather(view, [1], timeout=1e-9))
        await turns(10)
        held.go.set()
        await asyncio.gather(*first)
        with pytest.raises(errors.PrefetchTimeoutError, match="No thread was free"):
            await late

    run(work())


def test_in_a_fork(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()

    async def work() -> None:
        await clamor.aio.gather(view, [1])
        await a_free_thread()

    run(work())
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            got = asyncio.run(clamor.aio.gather(view, [2]))
            os._exit(0 if (got == TABLE[[2]]).all() else 3)
        finally:
            os._exit(4)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0

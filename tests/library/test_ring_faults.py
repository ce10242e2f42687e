"""Rings whose members are killed, fork, or do not get through: joining, descriptors, means."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.ring import Ring
from clamor_ray._protocol.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    ClientHandshake,
    Hello,
)
from clamor_ray._ring import joining as _ring_join
from clamor_ray._ring.joining import (
    PAIR_LANE,
    RingPlace,
    _Acceptor,
    _exactly,
    _Joining,
    join,
    listen,
)
from tests.library.test_ring import HOST, SECRET, TIMEOUT_S, allreduce, everywhere, rings

LONG_S = 60.0


def join_of_two(listeners: list[socket.socket], rank: int, timeout_s: float = LONG_S) -> Ring:
    places = [RingPlace(i, HOST, listener.getsockname()[1]) for i, listener in enumerate(listeners)]
    return join(listeners[rank], b"group", SECRET, places, rank, timeout_s=timeout_s)


@contextlib.contextmanager
def listening(n: int) -> Iterator[list[socket.socket]]:
    made = [listen(HOST) for _ in range(n)]
    try:
        yield made
    finally:
        for listener in made:
            listener.close()


def barrier_of(made: list[Ring]) -> None:
    try:
        assert everywhere(made, lambda ring: ring.run("barrier", timeout_s=TIMEOUT_S)) == [
            None
        ] * len(made)
    finally:
        for ring in made:
            ring.close()


# ------------------------------------------------------------------ joining


def test_slow_strangers_delay_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each could take a minute, one after the other."""
    monkeypatch.setattr(_ring_join, "HANDSHAKE_S", 60.0)
    over = threading.Event()
    with listening(2) as listeners, contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        strangers = [
            stack.enter_context(socket.create_connection(listener.getsockname()))
            for listener in listeners
            for _ in range(5)
        ]

        def drip() -> None:
            while not over.wait(0.05):
                for stranger in strangers:
                    with contextlib.suppress(OSError):
                        stranger.send(b"C")

        dripping = pool.submit(drip)
        try:
            joined = [pool.submit(join_of_two, listeners, rank, TIMEOUT_S) for rank in range(2)]
            barrier_of([one.result(LONG_S) for one in joined])
        finally:
            over.set()
        dripping.result(LONG_S)


def test_a_slow_handshake_is_dropped_at_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_ring_join, "HANDSHAKE_S", 0.3)
    with (
        listening(2) as listeners,
        ThreadPoolExecutor(2) as pool,
        socket.create_connection(listeners[1].getsockname()) as stranger,
    ):
        waiting = pool.submit(join_of_two, listeners, 1, 4 * LONG_S)
        stranger.settimeout(0.05)
        dropped, left = False, HELLO_BYTES - 1
        deadline = time.monotonic() + LONG_S / 4
        while not dropped and time.monotonic() < deadline:
            try:
                left -= stranger.send(b"C"[: left > 0])
                dropped = stranger.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                dropped = True
        still_waits = not waiting.done()
        listeners[0].close()  # ends the joining
        assert dropped
        assert still_waits
        with pytest.raises(errors.MemberLostError):
            waiting.result(LONG_S)


def test_a_member_that_gave_up_in_the_handshake_comes_again() -> None:
    with listening(2) as listeners, ThreadPoolExecutor(2) as pool:
        one = pool.submit(join_of_two, listeners, 1)
        places = [
            RingPlace(i, HOST, listener.getsockname()[1]) for i, listener in enumerate(listeners)
        ]
        ids = _Joining(b"group", SECRET, places, 0, 1, 0.0)
        for lane in (0, PAIR_LANE):
            with socket.create_connection(listeners[1].getsockname()) as connection:
                handshake = ClientHandshake(SECRET, Hello(ids.id_of(0), ids.id_of(1), lane))
                connection.sendall(handshake.hello)
                deadline = time.monotonic() + LONG_S
                connection.sendall(handshake.prove(_exactly(connection, CHALLENGE_BYTES, deadline)))
                # The answer arrives when nobody waits for it any more.
                assert len(_exactly(connection, ACCEPT_BYTES, deadline)) == ACCEPT_BYTES
        other = pool.submit(join_of_two, listeners, 0)
        barrier_of([other.result(LONG_S), one.result(LONG_S)])


def test_a_member_that_died_before_a_connection_to_it_is_named_at_once() -> None:
    with listening(3) as listeners, ThreadPoolExecutor(3) as pool:
        places = [
            RingPlace(i, HOST, listener.getsockname()[1]) for i, listener in enumerate(listeners)
        ]
        listeners[2].close()
        begun = time.monotonic()
        waiting = [
            pool.submit(join, listeners[rank], b"group", SECRET, places, rank, timeout_s=4 * LONG_S)
            for rank in range(2)
        ]
        for one in waiting:
            with pytest.raises(errors.MemberLostError, match="refused") as raised:
                one.result(2 * LONG_S)
            assert raised.value.member == 2
        assert time.monotonic() - begun < LONG_S / 2


def test_a_member_that_died_before_it_connected_is_named() -> None:
    with listening(2) as listeners:
        places = [
            RingPlace(i, HOST, listener.getsockname()[1]) for i, listener in enumerate(listeners)
        ]
        joining = _Joining(b"group", SECRET, places, 1, 1, time.monotonic() + LONG_S)
        listeners[0].close()
        with (
            _Acceptor(joining, listeners[1]) as acceptor,
            pytest.raises(errors.MemberLostError, match="Member 0") as raised,
        ):
            acceptor.run()
        assert raised.value.member == 0


# ------------------------------------------------------------------ descriptors


@pytest.mark.parametrize("position", [2, -1])
def test_descriptors_of_a_ring_that_does_not_open(position: int) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    given = [a.detach() for a, _ in pairs]
    with pytest.raises((errors.RangeError, OverflowError)):
        Ring(position, [0, 1], given[:1], given[1:2], given[2:])
    for fd in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    for _, b in pairs:
        b.close()


def test_descriptors_after_failures() -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_now()
    with rings(3) as made:

        def one(ring: Ring) -> object:
            if ring.rank == 1:
                ring.close()
                return None
            return allreduce(ring, np.ones(100_000))

        found = everywhere(made, one)
    assert sum(isinstance(error, errors.MemberLostError) for error in found) == 2
    with listening(2) as listeners, pytest.raises(errors.MemberLostError):
        join_of_two(listeners, 0, 0.3)
    assert open_now() == before


def test_an_unreferenced_ring_is_closed() -> None:
    with rings(2) as made:
        ring = made.pop()
        del ring
        with pytest.raises(errors.MemberLostError, match="has ended"):
            made[0].run("barrier", timeout_s=LONG_S)


# ------------------------------------------------------------------ members that are processes

MEMBER = """
import os, sys, time
from clamor_ray._ring.joining import RingPlace, join, listen

with listen("127.0.0.1") as listener:
    print(listener.getsockname()[1], flush=True)
    ports = (int(input()), listener.getsockname()[1])
    places = [RingPlace(rank, "127.0.0.1", port) for rank, port in enumerate(ports)]
    ring = join(listener, b"group", bytes(range(32)), places, 1, timeout_s=60)
    ring.run("barrier")
    child = os.fork()
    if child == 0:
        try:
            ring.run("barrier")
        except Exception as error:
            ring.close()
            print(type(error).__name__, os.getpid(), flush=True)
        sys.stdin.read()  # until the test ends
        os._exit(0)
    time.sleep(600)
"""


def test_a_fork_does_not_keep_its_parent() -> None:
    """Nor does a joining that goes on when a process forks."""
    with subprocess.Popen(
        [sys.executable, "-c", MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with listen(HOST) as listener:
                places = [
                    RingPlace(0, HOST, listener.getsockname()[1]),
                    RingPlace(1, HOST, int(process.stdout.readline())),
                ]
                process.stdin.write(f"{places[0].port}\n")
                process.stdin.flush()
                ring = join(listener, b"group", SECRET, places, 0, timeout_s=LONG_S)
            ring.run("barrier", timeout_s=LONG_S)
            name, child = process.stdout.readline().split()
            assert name == "ForkedError"
            process.kill()
            process.wait(LONG_S)
            os.kill(int(child), 0)  # it lives
            with pytest.raises(errors.MemberLostError, match="has ended") as raised:
                ring.run("barrier", timeout_s=LONG_S)
            assert raised.value.member == 1
            ring.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.stdin.close()


def test_sockets_of_a_joining_are_not_a_childs() -> None:
    with listening(1) as listeners:
        read, write = os.pipe()
        fileno = listeners[0].fileno()
        pid = os.fork()
        if pid == 0:
            try:
                os.fstat(fileno)
                os.write(write, b"y")
            except OSError:
                os.write(write, b"n")
            except BaseException:
                os.write(write, b"?")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert listeners[0].fileno() >= 0
        assert os.read(read, 1) == b"n"
        os.close(read)
        os.close(write)


# ------------------------------------------------------------------ who is named


def test_the_member_that_closed_first_is_named_by_all() -> None:
    def one(ring: Ring) -> object:
        if ring.rank == 2:
            ring.close()
            return None
        return allreduce(ring, np.ones(100_000))

    for n in (4, 5, 7):
        with rings(n) as made:
            for rank, error in enumerate(everywhere(made, one)):
                assert rank == 2 or isinstance(error, errors.MemberLostError)
                assert rank == 2 or error.member == 2, error


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("size", [3, 40_001])
def test_means_of_halves_are_numpys(size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = (rng.random((5, size)) * 65_000).astype(np.float16)
    want = arrays.mean(axis=0)
    assert np.isfinite(want).all()
    with rings(5) as made:
        for found in everywhere(made, lambda ring: allreduce(ring, arrays[ring.rank], "mean")):
            # Floats added up in another order: a half's last bit may differ.
            np.testing.assert_allclose(found, want, rtol=2e-3)
            assert found.dtype == np.float16

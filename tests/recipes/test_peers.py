"""Connections between workers, on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clamor_ray.actors.recipes import frames
from clamor_ray.actors.recipes.peers import Peers, _shut
from tests.conftest import until


class End:
    """One end, and what it has heard."""

    def __init__(
        self, name: str, secret: bytes = b"s" * 32, host: str | None = "127.0.0.1"
    ) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.lost: list[tuple[str, str]] = []
        self.failed: list[str] = []
        self.peers = Peers(
            name,
            host,
            secret,
            lambda who, what: self.heard.append((who, what)),
            lambda who, why: self.lost.append((who, why)),
            self.failed.append,
        )


@pytest.fixture
def ends() -> Iterator[list[End]]:
    made = [End("a"), End("b")]
    yield made
    for end in made:
        end.peers.close()


def test_messages_arrive_in_order(ends: list[End]) -> None:
    a, b = ends
    for n in range(1000):
        a.peers.send("b", b.peers.address, n)
    b.peers.send("a", a.peers.address, b"x" * 10**7)
    until(lambda: len(b.heard) == 1000 and len(a.heard) == 1)
    assert b.heard == [("a", n) for n in range(1000)]
    assert a.heard == [("b", b"x" * 10**7)]
    assert a.lost == b.lost == []


def test_who_does_not_know_the_secret_is_refused(ends: list[End]) -> None:
    b = ends[1]
    stranger = End("c", secret=b"t" * 32)
    try:
        stranger.peers.send("b", b.peers.address, "hello")
        until(lambda: bool(stranger.lost))
        assert b.heard == []
        assert b.lost == []
    finally:
        stranger.peers.close()


def test_noise_does_not_stop_the_others(ends: list[End]) -> None:
    a, b = ends
    with contextlib.ExitStack() as stack:
        for noise in (b"", b"\x00\x00\x00\x05hello", b"\xff" * 64):
            link = stack.enter_context(socket.create_connection(b.peers.address))
            link.sendall(noise)
        a.peers.send("b", b.peers.address, "hello")
        until(lambda: b.heard == [("a", "hello")])


def test_an_end_that_goes_is_lost(ends: list[End]) -> None:
    a, b = ends
    a.peers.send("b", b.peers.address, 1)
    until(lambda: b.heard == [("a", 1)])
    a.peers.close()
    until(lambda: [who for who, _ in b.lost] == ["a"])
    assert a.lost == []  # it has gone by itself


def test_who_is_dropped_is_not_sent_to_until_there_is_something_new(ends: list[End]) -> None:
    a, b = ends
    a.peers.send("b", b.peers.address, 1)
    until(lambda: b.heard == [("a", 1)])
    a.peers.drop("b")
    until(lambda: [who for who, _ in b.lost] == ["a"])
    assert a.lost == []
    a.peers.drop("c")  # there is nothing to end
    a.peers.send("b", b.peers.address, 2)
    until(lambda: b.heard == [("a", 1), ("a", 2)])


def test_an_end_that_nobody_connects_to_sends(ends: list[End]) -> None:
    b = ends[1]
    sender = End("c", host=None)
    try:
        sender.peers.send("b", b.peers.address, "hello")
        until(lambda: b.heard == [("c", "hello")])
    finally:
        sender.peers.close()


def test_large_arrays_come_as_they_were(ends: list[End]) -> None:
    a, b = ends
    array = np.arange(300_000).reshape(300, 1000)
    fixed = np.arange(10_000)
    fixed.flags.writeable = False
    arrays = {
        "rows": array,
        "columns": np.asfortranarray(array),
        "every second": array[::2, ::2],
        "read-only": fixed,
        "small": np.arange(3),
    }
    a.peers.send("b", b.peers.address, {**arrays, "bytes": b"x" * 10**6, "again": array})
    for n in range(3):
        a.peers.send("b", b.peers.address, n)
    until(lambda: len(b.heard) == 4)
    assert [what for _, what in b.heard[1:]] == [0, 1, 2]
    came = b.heard[0][1]
    assert came["bytes"] == b"x" * 10**6
    assert came["again"] is came["rows"]
    for name, want in arrays.items():
        np.testing.assert_array_equal(came[name], want)
        assert came[name].flags.writeable == (name != "read-only")


def test_what_is_large_is_in_no_pickle() -> None:
    array = np.zeros(100_000)
    made = frames.pickled([array, np.zeros(10)])
    assert [each.nbytes for each in made.buffers] == [array.nbytes]
    assert np.shares_memory(np.frombuffer(made.buffers[0]), array)
    assert len(made.data) < 1000
    assert made.n_bytes == len(made.data) + array.nbytes


def test_a_class_of_the_script_goes_by_value(ends: list[End]) -> None:
    class Local:
        def __init__(self) -> None:
            self.array = np.arange(100_000)

    a, b = ends
    a.peers.send("b", b.peers.address, [np.zeros(50_000), Local()])
    until(lambda: bool(b.heard))
    first, local = b.heard[0][1]
    np.testing.assert_array_equal(first, np.zeros(50_000))
    np.testing.assert_array_equal(local.array, np.arange(100_000))


class Narrow:
    """A link whose kernel takes a few bytes at a time."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def sendmsg(self, pieces: list[memoryview]) -> int:
        return self.link.send(b"".join(pieces)[:30_011])


def test_frames_that_the_kernel_takes_in_pieces() -> None:
    one, other = socket.socketpair()
    with one, other:
        made = [frames.pickled([n, np.full(5000 + n, n)]) for n in range(3)]
        narrow: Any = Narrow(one)
        other.settimeout(30)
        sender = threading.Thread(target=frames.send, args=(narrow, made), daemon=True)
        sender.start()
        for n, (number, array) in enumerate(frames.receive(other)):
            assert number == n
            np.testing.assert_array_equal(array, np.full(5000 + n, n))
        sender.join(60)


def test_frames_of_more_pieces_than_the_kernel_takes_at_once() -> None:
    one, other = socket.socketpair()
    with one, other:
        batch = [frames.pickled([n, np.full(5000 + n, n)]) for n in range(1200)]
        other.settimeout(30)
        sender = threading.Thread(target=frames.send, args=(one, batch), daemon=True)
        sender.start()
        found = list(frames.receive(other))
        sender.join(60)
        assert [number for number, _ in found] == list(range(1200))
        assert all(np.array_equal(array, np.full(5000 + n, n)) for n, array in found)
        one.sendall(b"x" * 8)
        one.close()
        with pytest.raises(EOFError, match="8 of 16 bytes"):
            list(frames.receive(other))


def test_close_leaves_no_thread() -> None:
    before = threading.active_count()
    a, b = End("a"), End("b")
    a.peers.send("b", b.peers.address, 1)
    until(lambda: bool(b.heard))
    a.peers.close()
    b.peers.close()
    until(lambda: threading.active_count() <= before)


def test_a_connection_that_breaks_is_made_again(ends: list[End]) -> None:
    a, b = ends
    a.peers.send("b", b.peers.address, 1)
    until(lambda: b.heard == [("a", 1)])
    for connection in list(b.peers._open):  # as a network that resets it
        _shut(connection)
    until(lambda: [who for who, _ in b.lost] == ["a"])

    def arrives() -> bool:
        a.peers.send("b", b.peers.address, 2)
        return ("a", 2) in b.heard

    until(arrives)


def test_what_cannot_be_pickled_is_said_and_holds_up_nobody(ends: list[End]) -> None:
    a, b = ends
    a.peers.send("b", b.peers.address, threading.Lock())
    a.peers.send("b", b.peers.address, "hello")
    until(lambda: b.heard == [("a", "hello")])
    (why,) = a.failed
    assert "cannot be pickled" in why
    assert a.lost == b.lost == []

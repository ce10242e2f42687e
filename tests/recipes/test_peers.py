"""Connections between workers, on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clamor_ray.actors.recipes.peers import Peers, _shut
from tests.conftest import until


class End:
    """One end, and what it has heard."""

    def __init__(self, name: str, secret: bytes = b"s" * 32) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.lost: list[tuple[str, str]] = []
        self.failed: list[str] = []
        self.peers = Peers(
            name,
            "127.0.0.1",
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

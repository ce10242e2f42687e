"""How a page server asks for layers: a made-up server answers, over plain sockets. No Ray."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.support.engine_pair import BLOCK, GIVER, TAKER, Server

HEADER = struct.Struct("<IHHIiQIHH")  # struct pc__data_header
ASKER_BYTES = 24
MAGIC, GET, BLOCKS, LAYER = 0x31524C43, 1, 2, 2
REQUEST_BLOCKS = 64
MOST, AT_FIRST, LEAST, TRIP_S = 256, 8, 2, 0.01  # see miss.h
WAIT_S = 20.0
LATE_S = 0.2
assert LATE_S > TRIP_S


class Giver:
    """Holds back its answers until a test wants them."""

    def __init__(self, taker: Server) -> None:
        self._taker = taker
        self.urgent, theirs = socket.socketpair()
        taker.engine.add_peer(GIVER, 0, theirs.detach())
        self.bulk, theirs = socket.socketpair()
        taker.engine.add_peer(GIVER, 1, theirs.detach())
        self.asked: list[tuple[int, int, int]] = []  # request id, layer, blocks

    def close(self) -> None:
        self.urgent.close()
        self.bulk.close()

    def pull(self, commit_id: int, n_blocks: int) -> None:
        self._taker.engine.pull(7, commit_id, GIVER, n_blocks * BLOCK)

    def hears(self, lane: socket.socket, n: int) -> None:
        """So many requests are on the wire, and no more."""
        while len(self.asked) < n:
            assert select.select([lane], [], [], WAIT_S)[0], f"{self.asked}: {n} were to come"
            header = HEADER.unpack(self._receive(lane, HEADER.size))
            magic, kind, flags, request_id, _, layer, _, n_runs, n_blocks = header
            assert (magic, kind, flags) == (MAGIC, GET, LAYER)
            self._receive(lane, ASKER_BYTES + 8 * n_runs)
            self.asked.append((request_id, layer, n_blocks))
        assert not select.select([lane], [], [], LATE_S)[0], f"more than {n} are on the wire"

    def answer(self, lane: socket.socket, n: int) -> None:
        """The oldest of what waits."""
        for _ in range(n):
            request_id, layer, n_blocks = self.asked.pop(0)
            head = HEADER.pack(MAGIC, BLOCKS, 0, request_id, 0, layer, 0, 0, n_blocks)
            lane.sendall(head + bytes(n_blocks * BLOCK))

    @staticmethod
    def _receive(lane: socket.socket, n_bytes: int) -> bytes:
        lane.settimeout(WAIT_S)
        return lane.recv(n_bytes, socket.MSG_WAITALL)


@pytest.fixture
def giver() -> Iterator[Giver]:
    taker = Server(TAKER)
    giver = Giver(taker)
    try:
        yield giver
    finally:
        giver.close()
        taker.moved.close()
        taker.engine.stop()


def test_a_small_layer_does_not_wait_behind_a_large_one(giver: Giver) -> None:
    """A commit waits for it."""
    giver.pull(1, 200 * REQUEST_BLOCKS)
    giver.hears(giver.bulk, AT_FIRST)
    giver.asked.clear()
    giver.pull(2, MOST)
    giver.hears(giver.urgent, MOST // REQUEST_BLOCKS)
    giver.pull(3, MOST + 1)
    giver.hears(giver.urgent, MOST // REQUEST_BLOCKS)


def test_of_a_layer_no_more_is_on_the_wire_than_comes_soon(giver: Giver) -> None:
    """What others ask for passes the same link, behind what is on it."""
    giver.pull(1, 1000 * REQUEST_BLOCKS)
    giver.hears(giver.bulk, AT_FIRST)  # which takes longer than TRIP_S, here as in what follows
    giver.answer(giver.bulk, AT_FIRST)
    giver.hears(giver.bulk, LEAST)
    for _ in range(3):  # it does not become fewer
        giver.answer(giver.bulk, 1)
        giver.hears(giver.bulk, LEAST)

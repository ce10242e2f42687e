"""A node that is full makes room: no Ray, a page server and a registry that are made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._build.pieces import PieceMaker
from clamor_ray._build.room import ensure_room, homes_give_room
from clamor_ray._objects import memory
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import CreatedPieces, RegionRecord

MIB = 1 << 20
BASE = 0x1100_0000_0000
HERE, THERE = 0xA, 0xB
PIECE = 2 * MIB


class Node:
    """A node's memory, its page server, and the registry.

    Args:
        memory_mib: That the node has.
        others_mib: That other homes on it take, and could give.
        far_mib: That the other nodes have.
    """

    def __init__(self, memory_mib: int, others_mib: int = 0, far_mib: int = 1000) -> None:
        self.memory_bytes, self.others_bytes = memory_mib * MIB, others_mib * MIB
        self.far_bytes = far_mib * MIB
        self.here: set[int] = set()
        self.placed: list[tuple[int, int]] = []
        self.made_room: list[int] = []
        self.fails: list[Exception] = []
        self.least_bytes = self.memory_bytes

    def available_bytes(self) -> int:
        return self.memory_bytes - self.others_bytes - len(self.here) * PIECE

    # the page server

    def create(
        self, region: int, address: int, length_bytes: int, *, on_disk: bool, timeout_s: float
    ) -> int:
        if on_disk and self.available_bytes() < length_bytes:
            raise errors.NoSpaceError("The disk of this node has no room.")
        self.here.add(region)
        self.least_bytes = min(self.least_bytes, self.available_bytes())
        fd = os.memfd_create(f"piece {region}")
        os.ftruncate(fd, length_bytes)
        return fd

    def seal(self, region: int, **how: Any) -> None:
        assert region in self.here

    def abandon(self, region: int, timeout_s: float) -> None:
        self.here.discard(region)

    # the registry

    def place(self, region: int, home: int, place_s: float, timeout_s: float) -> None:
        if self.far_bytes < PIECE:
            raise errors.OutOfMemoryError("No other node has room.")
        self.far_bytes -= PIECE
        self.here.discard(region)
        self.placed.append((region, home))

    def make_room(self, node_id: str, needed_bytes: int) -> bool:
        assert node_id == "node"
        self.made_room.append(needed_bytes)
        if self.fails:
            raise self.fails.pop()
        short_bytes = needed_bytes - self.available_bytes()
        if short_bytes > min(self.others_bytes, self.far_bytes):
            return False
        self.others_bytes -= short_bytes
        self.far_bytes -= short_bytes
        return True

    def maker(self, homes: list[int], on_disk: bool = False) -> PieceMaker:
        whole = RegionRecord(
            *(1, 0, BASE, len(homes) * PIECE, (HERE,)),
            n_pieces=len(homes),
            piece_bytes=PIECE,
            on_disk=on_disk,
        )
        pieces = tuple(
            replace(
                whole,
                region=2 + index,
                base_address=BASE + index * PIECE,
                length_bytes=PIECE,
                n_pieces=0,
                piece_bytes=0,
                piece_of=1,
            )
            for index in range(len(homes))
        )
        fake: Any = self
        return PieceMaker(
            CreatedPieces(whole, pieces, tuple(homes), []),
            [(0, memoryview(bytes(len(homes) * PIECE)))],
            client=fake,
            rpc=fake,
            config=Config(),
            node_id="node",
            until_answered=lambda ask: ask(),
        )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(*request.param)
    monkeypatch.setattr(memory, "available_bytes", node.available_bytes)
    yield node
    assert node.least_bytes >= 0  # it never had more than there is


def of(*what: int) -> Any:
    return pytest.mark.parametrize("node", [what], indirect=True)


def ensure(node: Node, mib: int) -> None:
    fake: Any = node
    ensure_room(mib * MIB, "put(x)", homes_give_room(fake, "node", mib * MIB), "Do this.")


@of(10, 8)
def test_homes_move_where_there_is_too_little(node: Node) -> None:
    ensure(node, 5)
    assert node.made_room == [5 * MIB]
    assert node.available_bytes() == 5 * MIB


@of(10)
def test_nobody_is_asked_where_there_is_enough(node: Node) -> None:
    ensure(node, 10)
    assert node.made_room == []


@of(10, 8, 2)
def test_where_nobody_makes_room_the_error_is_as_before(node: Node) -> None:
    with pytest.raises(errors.OutOfMemoryError, match=r"put\(x\) needs 5\.0 MiB") as caught:
        ensure(node, 5)
    assert caught.value.hint == "Do this."
    assert node.made_room == [5 * MIB]  # once


@of(10, 8)
@pytest.mark.parametrize("error", [errors.ServerUnavailableError, errors.WaitTimeoutError])
def test_a_registry_that_is_away_makes_no_room(node: Node, error: type[errors.ClamorError]) -> None:
    node.fails = [error("It is being restarted.")]
    with pytest.raises(errors.OutOfMemoryError, match=r"put\(x\) needs 5\.0 MiB"):
        ensure(node, 5)


@of(10, 8)
def test_room_that_somebody_else_takes_at_once_is_no_loop(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    with pytest.raises(errors.OutOfMemoryError):
        ensure(node, 5)
    assert node.made_room == [5 * MIB]


STAY = [HERE] * 6


@of(100)
def test_pieces_that_fit_stay(node: Node) -> None:
    node.maker(STAY).make()
    assert node.placed == []
    assert len(node.here) == 6


@of(8)
def test_pieces_that_were_to_stay_go_where_this_node_is_full(node: Node) -> None:
    """A piece, and as much for layers, are free before each is made."""
    node.maker(STAY).make()
    assert [home for _, home in node.placed] == [0] * 3  # to the server that has the least
    assert node.here == {2, 3, 7}
    assert node.made_room == []


@of(8)
def test_pieces_on_their_way_are_waited_for_first(node: Node) -> None:
    node.maker([HERE, THERE] * 3).make()
    assert sorted(home for _, home in node.placed if home) == [THERE] * 3
    assert len(node.here) + len(node.placed) == 6


@of(12, 9)
def test_then_other_homes_of_this_node_go(node: Node) -> None:
    """There is too little for the first piece, and none that could go."""
    node.maker([THERE] * 3).make()
    assert node.made_room
    assert [home for _, home in node.placed] == [THERE] * 3


@of(8, 0, 4)
def test_where_no_node_has_room_for_a_piece_that_is_said(node: Node) -> None:
    with pytest.raises(errors.OutOfMemoryError, match="No other node has room"):
        node.maker([HERE] * 8).make()


@of(3, 0)
def test_a_node_that_is_too_small_says_so(node: Node) -> None:
    with pytest.raises(errors.OutOfMemoryError, match="A piece of the variable needs 4"):
        node.maker(STAY).make()
    assert node.made_room == [4 * MIB]
    assert node.here == set()


@of(8)
def test_a_disk_that_is_full_gives_pieces_away_too(node: Node) -> None:
    """Until the page server has room; memory is not asked for."""
    node.maker(STAY, on_disk=True).make()
    assert [home for _, home in node.placed] == [0] * 2
    assert len(node.here) == 4
    assert node.made_room == []


@of(1, 0)
def test_a_disk_that_is_too_small_says_so(node: Node) -> None:
    with pytest.raises(errors.NoSpaceError, match="disk of this node"):
        node.maker(STAY, on_disk=True).make()
    assert node.here == set()

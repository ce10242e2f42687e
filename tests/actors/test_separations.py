"""Pieces of a group that share a server. No Ray, moves that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.moves import separations as module
from clamor_ray.actors.moves.moves import MoveFailed
from clamor_ray.actors.moves.separations import Separations
from clamor_ray.actors.registry.registry_core import RegistryCore

WAIT_S = 5.0


class World:
    """A variable of two pieces and a parity, on servers 1, 2 and 2."""

    def __init__(self, is_made: bool = True) -> None:
        self.core = RegistryCore()
        for server_id in (1, 2):
            self.join(server_id)
        whole = self.core.create_pieces(2 << 21, PieceLayout(2 << 20, Shape(2, 1)), 1)
        self.pieces = list(whole.pieces)
        for piece, home in zip(self.pieces, (1, 2, 2), strict=True):
            self.core.seal(piece)
            self.core.rehome(piece, home)
        self.whole = whole.region
        if is_made:
            self.core.seal(whole.region)
        self.failures = 0
        self.asked: list[tuple[int, int]] = []
        self.drains: Any = SimpleNamespace(
            takers=lambda but: [each.server_id for each in self.core.servers()],
            load_bytes=dict,
        )
        self.n_started = 0
        self.separations = Separations(self.core, self, self.drains, start_spares=self.start)

    def join(self, server_id: int) -> None:
        info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
        self.core.server_registered(info)

    async def start(self) -> None:
        """A node has joined, and has no page server yet."""
        self.n_started += 1
        if self.n_started == 3:
            self.join(3)
            self.separations.look()
        elif self.n_started == 2:
            raise OSError("Ray does not say which nodes there are")

    def homes(self) -> list[int]:
        return [self.core.homes_of(piece)[0] for piece in self.pieces]

    async def move(self, region: int, taker: int) -> int:
        self.asked.append((region, taker))
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise MoveFailed("not now")
        self.core.rehome(region, taker)
        return 0

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not is_so():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)

    def is_settled(self) -> bool:
        return sorted(self.homes()) == [1, 2, 3] and not self.separations._is_looking


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)


def test_what_shares_a_server_is_separated_when_another_comes() -> None:
    async def work() -> None:
        world = World()
        world.separations.look()
        await world.until(lambda: world.n_started == 1)
        assert not world.asked  # there is no other
        world.join(3)
        world.failures = 2
        world.separations.look()
        await world.until(world.is_settled)
        assert world.n_started == 1  # nobody else is needed
        world.asked.clear()
        world.separations.look()
        await world.until(world.is_settled)
        assert not world.asked
        await world.separations.close()

    asyncio.run(work())


def test_a_node_that_joins_is_the_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that there is one: it looks now and then."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)

    async def work() -> None:
        world = World()
        world.separations.look()
        await world.until(world.is_settled)
        assert world.n_started == 3
        await world.separations.close()

    asyncio.run(work())


def test_what_cannot_be_moved_is_tried_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world = World()
        world.join(3)
        world.failures = 1000
        world.separations.look()
        await world.until(lambda: len(world.asked) >= 2 * module.TRIES)
        n_asked = len(world.asked)
        await asyncio.sleep(0.2)
        assert len(world.asked) == n_asked
        world.failures = 0
        monkeypatch.setattr(module, "LOOK_S", 0.01)
        world.separations.look()
        await world.until(world.is_settled)
        await world.separations.close()

    asyncio.run(work())


def test_a_server_that_stays_after_all_is_looked_at() -> None:
    """Its drain is cancelled: what has met on the others comes back."""

    async def work() -> None:
        world = World()
        world.join(3)
        takers = world.drains.takers
        world.drains.takers = lambda but: [1, 2]
        world.separations.look()
        await world.until(lambda: world.n_started == 1)
        assert not world.asked
        world.drains.takers = takers
        world.drains.stayed()
        await world.until(world.is_settled)
        await world.separations.close()

    asyncio.run(work())


def test_what_is_being_made_is_left_to_who_makes_it() -> None:
    """Both would move two of a group to one server."""

    async def work() -> None:
        world = World(is_made=False)
        world.join(3)
        world.separations.look()
        await world.until(lambda: not world.separations._is_looking)
        assert not world.asked
        world.core.seal(world.whole)
        world.separations.look()
        await world.until(world.is_settled)
        await world.separations.close()

    asyncio.run(work())

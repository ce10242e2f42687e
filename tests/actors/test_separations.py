"""Pieces of a group that share a server. No Ray, moves that are made up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._redundancy.groups import Shape
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
        whole = self.core.create_pieces(2 << 21, 2 << 20, 1, shape=Shape(2, 1))
        self.pieces = list(whole.pieces)
        for piece, home in zip(self.pieces, (1, 2, 2), strict=True):
            self.core.seal(piece)
            self.core.rehome(piece, home)
        self.whole = whole.region
        if is_made:
            self.core.seal(whole.region)
        self.failures = 0
        self.asked: list[tuple[int, int]] = []
        drains: Any = SimpleNamespace(
            takers=lambda but: [each.server_id for each in self.core.servers()],
            load_bytes=dict,
        )
        self.separations = Separations(self.core, self, drains)

    def join(self, server_id: int) -> None:
        info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
        self.core.server_registered(info)

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

    async def settled(self) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while self.separations._is_looking:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


def test_what_shares_a_server_is_separated_when_another_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)

    async def work() -> None:
        world = World()
        world.separations.look()
        await world.settled()
        assert not world.asked  # there is no other
        world.join(3)
        world.failures = 2
        world.separations.look()
        await world.settled()
        assert sorted(world.homes()) == [1, 2, 3]
        world.asked.clear()
        world.separations.look()
        await world.settled()
        assert not world.asked
        await world.separations.close()

    asyncio.run(work())


def test_what_cannot_be_moved_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)

    async def work() -> None:
        world = World()
        world.join(3)
        world.failures = 1000
        world.separations.look()
        await world.settled()
        assert 1 < len(world.asked) < 20
        await world.separations.close()

    asyncio.run(work())


def test_what_is_being_made_is_left_to_who_makes_it() -> None:
    """Both would move two of a group to one server."""

    async def work() -> None:
        world = World(is_made=False)
        world.join(3)
        world.separations.look()
        await world.settled()
        assert not world.asked
        world.core.seal(world.whole)
        world.separations.look()
        await world.settled()
        assert sorted(world.homes()) == [1, 2, 3]
        await world.separations.close()

    asyncio.run(work())

"""A registry's part that rebuilds regions, around page servers that are made up. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray._protocol.messages import (
    CommitRequest,
    RebuildOrder,
    RegionRecord,
    ServerInfo,
    Write,
)
from clamor_ray._protocol.source import Source
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.registry.registry_core import RegistryCore

HOME, PEER, OTHER = 1, 2, 3
N_BLOCKS = 10
WAIT_S = 10.0
ALL = BitMap(range(N_BLOCKS))
MOST = [(1, ALL - BitMap([9]))]


class Servers:
    """What each server has; hooks are called in the middle of things."""

    def __init__(self, core: RegistryCore) -> None:
        self.core = core
        self.cached: dict[int, list[tuple[int, BitMap]]] = {}
        self.layers: dict[int, dict[int, BitMap]] = {}  # staged, by commit id
        # As cached, for one region.
        self.holders: dict[int, dict[int, list[tuple[int, BitMap]]]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.orders: list[tuple[int, RebuildOrder, list[Any]]] = []
        self.before: dict[str, list[Callable[[], object]]] = {}
        self.dropped: list[int] = []
        self.let_go: list[int] = []
        self.has = True  # a home, when it is asked

    def _now(self, method: str, *what: Any) -> None:
        self.calls.append((method, *what))
        if hooks := self.before.get(method):
            hooks.pop(0)()

    def why_lost(self, server_id: int) -> str | None:
        return getattr(self.core.locate(server_id), "reason", None)

    async def examine(self, server_id: int) -> None:
        self._now("examine", server_id)

    async def holdings(
        self, server_id: int, region: int, commits: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        self._now("holdings", server_id)
        cached = self.holders.get(region, self.cached)
        layers = self.layers.get(server_id, {})
        found = [
            (version, layers[commit_id]) for version, commit_id in commits if commit_id in layers
        ]
        return [
            (version, bytes(blocks.serialize()))
            for version, blocks in [*cached.get(server_id, []), *found]
        ]

    async def stage_cached(
        self, server_id: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        self._now("stage_cached", server_id)
        return 4096 * (1 + len(BitMap.deserialize(blocks)))

    async def rebuild(self, server_id: int, order: RebuildOrder, made: list[Any]) -> None:
        self._now("rebuild", server_id)
        self.orders.append((server_id, order, made))

    async def rebuild_drop(self, server_id: int, region: int) -> None:
        self.let_go.append(server_id)

    async def is_home(self, server_id: int, region: int) -> bool:
        self._now("is_home", server_id)
        return self.has

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        self._now("rehome", server_id, record.homes[0])

    async def drop(self, server_id: int, commit_id: int, regions: list[int]) -> None:
        self.dropped.append(commit_id)

    def make_again(self, server_id: int, source: Source) -> list[Any]:
        self._now("make_again", server_id)
        return [source.what]

    def bring(self, server_id: int, object_refs: list[Any]) -> list[Any]:
        self._now("bring", server_id)
        return list(object_refs)

    async def until_made(self, made: list[Any]) -> None:
        self._now("until_made", made[0])


class World:
    """A region at version 1, in which the commit changed block 4; its home is then lost."""

    def __init__(self, directory: Path) -> None:
        self.core = RegistryCore()
        self.log = CommitLog()
        self.journal = Journal(directory)
        self.servers = Servers(self.core)
        for server_id in (HOME, PEER, OTHER):
            info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
            self.core.server_registered(info)
            self.journal.save_server(info)
        record = self.core.create_region(N_BLOCKS * 4096, HOME)
        self.region = record.region
        self.journal.create_region(record, 0, self.region + 1)
        self.core.seal(self.region)
        self.log.open(self.region, record.homes)
        blocks = bytes(BitMap([4]).serialize())
        self.log.apply(
            9,
            self.log.prepare(CommitRequest(9, (Write(self.region, 0, 1, blocks, 8192, PEER),))),
            0.0,
        )
        self.rebuilds = Rebuilds(self.core, self.log, self.journal, self.servers)

    def add_region(self, home: int) -> int:
        """Another one, at version 0."""
        record = self.core.create_region(N_BLOCKS * 4096, home)
        self.journal.create_region(record, 0, record.region + 1)
        self.core.seal(record.region)
        self.log.open(record.region, record.homes)
        return record.region

    def lose(self, server_id: int) -> None:
        self.core.server_lost(server_id, "its node is dead")
        self.log.server_lost(server_id)
        self.rebuilds.server_lost(server_id)

    async def settle(self) -> bool:
        return await self.rebuilds.settle(self.region, WAIT_S)

    def home(self) -> int:
        (home,) = self.core.homes_of(self.region)
        return home

    def check(self) -> None:
        self.core.check()
        self.log.check()
        saved = self.journal.load()
        (region,) = saved.regions
        assert set(region.record.homes) == {self.home()}


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def lost_of(order: RebuildOrder) -> BitMap:
    return BitMap.deserialize(order.lost) if order.lost else BitMap()


def hold(world: World, monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[Any, Any]:
    """(is set when a server is called so for the first time, lets that call end)"""
    called, go = asyncio.Event(), asyncio.Event()
    real = getattr(world.servers, method)

    async def held(*arguments: Any) -> None:
        if not called.is_set():
            called.set()
            await go.wait()
        await real(*arguments)

    monkeypatch.setattr(world.servers, method, held)
    return called, go

"""Homes move between two engines as the registry moves them; only Ray's calls are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray._protocol.messages import (
    CommitRequest,
    Publication,
    RegionRecord,
    ServerInfo,
    Write,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.moves import moves
from clamor_ray.actors.moves.moves import Moves
from clamor_ray.actors.moves.switches import Switches
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from tests.support.engine_pair import (
    DATA,
    GIVER,
    HERE,
    TAKER,
    Server,
    blocks_at,
    content,
    engine_pair,
)


class Servers:
    """Calls of page servers, on threads as Ray's actors have them."""

    def __init__(self, core: RegistryCore, *servers: Server) -> None:
        self._core = core
        self._servers = {server.engine.server_id: server for server in servers}

    def of(self, region: int) -> tuple[int, ...]:
        return self._core.homes_of(region)

    def why_lost(self, server_id: int) -> str | None:
        return None

    async def examine(self, server_id: int) -> None:
        return None

    async def _on(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        assert self._servers[home].engine.has_layer(write.region, commit_id)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        engine = self._servers[home].engine
        for item in items:
            await self._on(engine.publish, item.region, item.version, item.commit_id)
        return [(item.region, item.version) for item in items]

    async def oldest_version(self, home: int, region: int) -> int:
        (found,) = self._servers[home].engine.region_stats()
        return found["oldest_version"]

    async def retain(self, taker: int, floors: dict[int, int | None]) -> None:
        raise AssertionError("nothing of it is needed by a collection")

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        await self._on(self._servers[server_id].rehome, record)

    def __getattr__(self, name: str) -> Any:
        method = name.removeprefix("take_") if name in TAKERS else name

        async def call(server_id: int, *arguments: Any) -> Any:
            return await self._on(getattr(self._servers[server_id].moved, method), *arguments)

        return call


TAKERS = ("take_begin", "take_seal", "take_drop")


def test_back_and_forth_with_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "LAYER_BLOCKS", 3)
    monkeypatch.setattr(moves, "FEW_BLOCKS", 1)
    monkeypatch.setattr(moves, "FEW_RECORDS", 1)
    monkeypatch.setattr(moves, "RECORDS_AT_ONCE", 2)
    journal = Journal(tmp_path / "journal")
    core, log, losses, held = RegistryCore(), CommitLog(), Losses(), HeldCommits()
    info = [ServerInfo(each, f"node {each}", "127.0.0.1", 1, "", "0") for each in (GIVER, TAKER)]
    core.restore(8, [(HERE, RegionState.READY, 0)], info, [], 0.0)
    journal.create_region(HERE, 0, 8)
    journal.seal(7)
    log.open(7, HERE.homes)

    async def whole(giver: Server, taker: Server) -> None:
        pair = {GIVER: giver, TAKER: taker}
        servers: Any = Servers(core, giver, taker)
        commits = Commits(log, journal, servers, 5.0, held=held)
        switches = Switches(core, log, journal, servers, held, losses, UnheardHomes())
        moving = Moves(core, log, servers, commits, held, losses, switches)
        expected = content(DATA, 1)
        for turn, to in enumerate((TAKER, GIVER, TAKER, GIVER), 1):
            (at,) = core.homes_of(7)
            for block in (3, 4, 40)[: 1 + turn % 3]:  # a commit that writes what is there
                blocks = bytes(BitMap([block]).serialize())
                commit_id = 1000 + 10 * turn + block
                newest = log.newest(7)
                n_bytes = pair[at].moved.stage_home(7, newest, commit_id, blocks)
                write = Write(7, newest, 1, blocks, n_bytes, staged_at=at)
                await commits.commit(CommitRequest(commit_id, (write,)))
                await commits.tell_now(at)
            await asyncio.wait_for(moving.move(7, to), 20)
            record = core.record_of(7)
            assert record is not None
            assert (record.homes, record.term) == ((to,), turn + 1)
            assert (pair[to].is_home, pair[at].is_home) == (True, False)
            for version in range(log.newest(7) + 1):
                assert blocks_at(pair[to], version) == expected, (turn, version)
        await moving.close()
        await switches.close()
        await commits.close()

    with engine_pair() as pair:
        asyncio.run(whole(*pair))
    journal.close()

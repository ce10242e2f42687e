"""Another piece of a group is lost, or comes back, while one is made again: no Ray, page servers
that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray._protocol.messages import RebuildOrder, ServerInfo
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.lost_homes import rebuilds
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.lost_homes.repairs import Staged
from clamor_ray.actors.registry.versions import Versions
from tests.support.rebuild_rig import HOME, OTHER, PEER, WAIT_S, Servers, World, lost_of, run

PIECE_BYTES = 2 << 20
N = PIECE_BYTES // 4096
EVERY = BitMap(range(N))
SPARE, LAST = 4, 5
NOWHERE = BitMap([3, 4])  # blocks that no cache has


class GroupServers(Servers):
    """And what they do for a piece that its group makes: all of it is there."""

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        return bytes(EVERY.serialize())

    async def stage_versions(
        self, giver: int, region: int, wanted: list[tuple[int, int, bytes]]
    ) -> list[int]:
        self._now("stage_versions", giver, region)
        return [4096 * len(BitMap.deserialize(blocks)) for _, _, blocks in wanted]

    async def oldest_version(self, giver: int, region: int) -> int:
        return 0

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        return None

    async def take_repaired(
        self, taker: int, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        self._now("take_repaired", taker, region)

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        self._now("take_seal", taker, region)

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        return None


class Group(World):
    """And a variable of two pieces at HOME and PEER, with their parity at OTHER. Two more servers
    have nothing."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for server_id in (SPARE, LAST):
            info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
            self.core.server_registered(info)
            self.journal.save_server(info)
        self.servers = GroupServers(self.core)
        record = self.core.create_pieces(
            2 * PIECE_BYTES, PieceLayout(PIECE_BYTES, Shape(2, 1)), HOME
        )
        self.whole = record.region
        self.first, self.second, self.parity = record.pieces
        records = [each for piece in record.pieces if (each := self.core.record_of(piece))]
        self.journal.create_region(record, 0, record.pieces[-1] + 1, records)
        for region, home in zip(record.pieces, (HOME, PEER, OTHER), strict=True):
            self.core.seal(region)
            self.core.rehome(region, home)
            self.log.open(region, (home,), PIECE_BYTES)
        self.core.seal(self.whole)
        self.log.open_pieces(self.whole, record.pieces, record.groups)
        self.losses = Losses()
        self.rebuilds = Rebuilds(
            *(self.core, self.log, self.journal, self.servers), losses=self.losses
        )
        commits = Commits(self.log, self.journal, self.servers, WAIT_S)
        self.versions = Versions(self.log, self.journal, commits, self.rebuilds, WAIT_S)

    def lost(self, region: int) -> BitMap:
        """As the registry says it, and as it is written."""
        found = self.losses.of(region)
        assert dict(self.journal.load().lacking).get(region) == found
        return BitMap.deserialize(found.blocks) if found is not None else BitMap()

    def orders(self, region: int) -> list[RebuildOrder]:
        """What its next homes were told, one for each time that it was begun."""
        return [order for _, order, _ in self.servers.orders if order.record.region == region]

    async def settle_piece(self, region: int) -> None:
        assert await self.rebuilds.settle(region, WAIT_S)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(rebuilds, "PAUSE_S", 0.001)
    monkeypatch.setattr(rebuilds, "PAUSE_MOST_S", 0.002)
    group = Group(tmp_path / "journal")
    yield group
    group.journal.close()


def hold(
    group: Group, monkeypatch: pytest.MonkeyPatch, method: str, is_it: Callable[..., bool]
) -> tuple[asyncio.Event, asyncio.Event]:
    """(is set when the first such call of a server has done its work, lets that call end)"""
    called, go = asyncio.Event(), asyncio.Event()
    real = getattr(group.servers, method)

    async def held(*arguments: Any) -> None:
        await real(*arguments)
        if is_it(*arguments) and not called.is_set():
            called.set()
            await go.wait()

    monkeypatch.setattr(group.servers, method, held)
    return called, go


def test_a_piece_is_begun_again_where_another_is_lost_before_it_is_written_down(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the first piece is at its next home when blocks of the second are found to be lost.
    Both are without these blocks then, and without no others."""

    async def work() -> None:
        sealed, go = hold(group, monkeypatch, "take_seal", lambda _, r, *__: r == group.first)
        group.servers.holders = {group.second: {OTHER: [(0, EVERY - NOWHERE)]}}
        group.lose(HOME)
        await asyncio.wait_for(sealed.wait(), WAIT_S)
        group.lose(PEER)
        await group.settle_piece(group.second)
        assert group.lost(group.second) == group.lost(group.parity) == NOWHERE
        assert group.core.homes_of(group.first) == (HOME,)  # nothing of it is written yet
        go.set()
        await group.settle_piece(group.first)
        before, after = group.orders(group.first)
        assert (lost_of(before), lost_of(after)) == (BitMap(), NOWHERE)
        for piece in (group.first, group.second, group.parity):
            assert group.lost(piece) == NOWHERE
        said = group.versions.lost_blocks(group.whole)
        assert said is not None
        assert BitMap.deserialize(said.blocks) == NOWHERE | NOWHERE.shift(N)
        homes = [group.core.homes_of(each)[0] for each in (group.first, group.second, group.parity)]
        assert sorted(homes) == [OTHER, SPARE, LAST]

    run(work)


def test_a_piece_that_was_to_lose_blocks_is_whole_where_another_is_there_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two homes are lost at once: nothing makes the first piece. But a cache has all of the second
    one, and so they are not lost."""

    async def work() -> None:
        def is_first(server_id: int, order: RebuildOrder, made: list[Any]) -> bool:
            return order.record.region == group.first

        told, go = hold(group, monkeypatch, "rebuild", is_first)
        group.servers.holders = {
            group.first: {SPARE: [(0, BitMap([0]))]},
            group.second: {LAST: [(0, EVERY)]},
        }
        group.lose(HOME)
        group.lose(PEER)
        await asyncio.wait_for(told.wait(), WAIT_S)
        await group.settle_piece(group.second)
        go.set()
        await group.settle_piece(group.first)
        before, *_, after = group.orders(group.first)
        assert (lost_of(before), lost_of(after)) == (EVERY - BitMap([0]), BitMap())
        for piece in (group.first, group.second, group.parity):
            assert not group.lost(piece)
        assert group.versions.lost_blocks(group.whole) is None

    run(work)

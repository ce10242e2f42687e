"""Which pieces move to their first writer. No Ray, moves that are made up, and real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray._protocol.messages import CommitRequest, Write
from clamor_ray.actors.moves import first_writes
from clamor_ray.actors.moves.first_writes import FirstWrites
from clamor_ray.actors.moves.moves import MoveFailed
from tests.support.move_rig import GIVER, TAKER, World, run


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


class FakeMoves:
    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.asked: list[tuple[int, int]] = []

    async def move(self, region: int, taker: int) -> int:
        self.asked.append((region, taker))
        if self.failure is not None:
            raise self.failure
        return 0


def commit_of(*regions: int, commit_id: int = 5) -> CommitRequest:
    blocks = bytes(BitMap([1]).serialize())
    return CommitRequest(commit_id, tuple(Write(r, 0, 1, blocks, 8192, TAKER) for r in regions))


def of(world: World, work: Any) -> None:
    async def whole() -> None:
        try:
            await work()
        finally:
            await world.close()

    run(whole)


def test_a_piece_is_homed_where_it_is_first_written(world: World) -> None:
    async def work() -> None:
        first = FirstWrites(world.log, world.moves)
        other = world.add_region()
        first.follow([world.region])
        await first.before_commit(commit_of(world.region, other))
        assert world.core.homes_of(world.region) == (TAKER,)
        assert world.core.homes_of(other) == (GIVER,)
        assert world.journal.load().regions[0].record.homes[0] == TAKER

    of(world, work)


def test_it_moves_once_and_only_before_it_is_written(world: World) -> None:
    async def work() -> None:
        moves = FakeMoves()
        first = FirstWrites(world.log, moves)
        written, freed = world.add_region(), world.add_region()
        request = commit_of(written)
        world.log.apply(5, world.log.prepare(request), 0.0)
        first.follow([world.region, written, freed])
        first.forget(freed)
        for _ in range(2):
            await first.before_commit(commit_of(world.region, written, freed))
        assert moves.asked == [(world.region, TAKER)]

    of(world, work)


def test_what_cannot_be_moved_stays_and_is_written_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        moves = FakeMoves(MoveFailed("no room"))
        first = FirstWrites(world.log, moves)
        first.follow([world.region])
        await first.before_commit(commit_of(world.region))  # raises nothing
        assert moves.asked == [(world.region, TAKER)]

        class Slow(FakeMoves):
            async def move(self, region: int, taker: int) -> int:
                await asyncio.sleep(60)
                return 0

        monkeypatch.setattr(first_writes, "MOVE_S", 0.01)
        slow = FirstWrites(world.log, Slow())
        slow.follow([world.region])
        await asyncio.wait_for(slow.before_commit(commit_of(world.region)), 5)

    of(world, work)

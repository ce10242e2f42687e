"""Commits make lost blocks whole: in the journal first, also over a restart. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import CommitRequest, RegionRecord, Write
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses, LostBlocks
from tests.actors.test_commits import FakeHomes

REGION, HOME = 1, 2
N_BLOCKS = 16384
LOST = LostBlocks(5, N_BLOCKS, bytes(BitMap([3, 4, 9]).serialize()), "Its home is lost", "Put it.")


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.healed: list[int] = []
        self.journal = Journal(directory)
        self.losses = Losses()
        self.losses.healed = self.healed.append
        self.log = CommitLog()
        self.log.open(REGION, (HOME,), N_BLOCKS * 4096)
        self.commits = Commits(
            self.log, self.journal, FakeHomes(), 2.0, lambda: 1.0, losses=self.losses
        )

    def lose(self, lost: LostBlocks | None) -> None:
        record = RegionRecord(REGION, 0, 0, N_BLOCKS * 4096, (HOME,))
        self.journal.rehome(record, 0, lost)
        self.losses.update({REGION: lost})

    def saved(self) -> dict[int, BitMap]:
        return {
            region: BitMap.deserialize(lost.blocks) for region, lost in self.journal.load().lacking
        }

    def left(self) -> BitMap | None:
        found = self.losses.of(REGION)
        return None if found is None else BitMap.deserialize(found.blocks)

    async def commit(self, commit_id: int, *blocks: int, were_lost: Iterable[int] = ()) -> None:
        changed, lost = BitMap(blocks), BitMap(were_lost)
        write = Write(
            *(
                REGION,
                self.log.newest(REGION),
                len(changed),
                bytes(changed.serialize()),
                8192,
                HOME,
            ),
            were_lost=bytes(lost.serialize()) if lost else b"",
        )
        await self.commits.commit(CommitRequest(commit_id, (write,)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def test_what_commits_write_is_whole(world: World) -> None:
    async def work() -> None:
        world.lose(LOST)
        assert world.saved() == {REGION: BitMap([3, 4, 9])}
        await world.commit(7, 2, 5)
        assert world.left() == BitMap([3, 4, 9])
        await world.commit(8, 4, 5)
        assert world.left() == BitMap([3, 9])
        assert world.saved() == {REGION: BitMap([3, 9])}
        assert world.losses.number(REGION) == LOST.number  # nobody is warned of it again
        assert not world.healed
        await world.commit(9, 3, 9)
        assert world.left() is None
        assert world.saved() == {}
        assert world.losses.number(REGION) == 0
        assert world.healed == [REGION]

    asyncio.run(work())


def test_what_is_there_again_is_a_conflict(world: World) -> None:
    """A parity's delta has such blocks as if they had been zeros. That is true no more."""

    async def work() -> None:
        world.lose(LOST)
        world.lose(replace(LOST, number=6, blocks=bytes(BitMap([3, 9]).serialize())))
        with pytest.raises(errors.CommitConflict, match=r"Block 4 of .* is there again"):
            await world.commit(7, 3, 4, were_lost=[3, 4])
        assert world.log.newest(REGION) == 0
        await world.commit(8, 3, 4, were_lost=[3])
        world.lose(None)
        with pytest.raises(errors.CommitConflict, match="Block 9 of"):
            await world.commit(9, 9, were_lost=[9])
        with pytest.raises(errors.ProtocolError, match="were lost that are not written"):
            await world.commit(10, 2, were_lost=[9])

    asyncio.run(work())


def test_what_heals_together_is_healed_when_it_is_said(world: World) -> None:
    """A copy lacks nothing any more when its data piece is said to be whole."""
    said: list[tuple[int, int, int]] = []

    def healed(region: int) -> None:
        said.append((region, world.losses.number(REGION), world.losses.number(REGION + 1)))

    world.losses.healed = healed
    world.losses.update({REGION: LOST, REGION + 1: LOST, REGION + 2: LOST})
    world.losses.update({REGION: None, REGION + 1: None, REGION + 3: None})
    assert said == [(REGION, 0, 0), (REGION + 1, 0, 0)]
    assert world.losses.of(REGION + 2) == LOST


def test_a_full_disk_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise errors.JournalFullError("The disk is full.")

    async def work() -> None:
        world.lose(LOST)
        with monkeypatch.context() as patched:
            patched.setattr(world.journal, "commit", full)
            with pytest.raises(errors.JournalFullError):
                await world.commit(7, 4)
        assert world.left() == BitMap([3, 4, 9])
        assert world.saved() == {REGION: BitMap([3, 4, 9])}

    asyncio.run(work())


def test_a_restart_keeps_it(world: World) -> None:
    async def work() -> None:
        world.lose(LOST)
        await world.commit(7, 3)

    asyncio.run(work())
    world.journal.close()
    world.journal = Journal(world.directory)
    again = Losses()
    again.update(dict(world.journal.load().lacking))
    found = again.of(REGION)
    assert found is not None
    assert (found.number, found.why, found.hint) == (LOST.number, LOST.why, LOST.hint)
    assert "2 of 16384 blocks (4, 9)" in found.error(REGION).message


def test_it_goes_with_its_region_and_with_a_rebuild_that_has_all(world: World) -> None:
    world.lose(LOST)
    world.lose(None)
    assert world.saved() == {}
    assert world.left() is None
    world.lose(LOST)
    world.journal.set_states([(REGION, None)])
    assert world.saved() == {}
    world.losses.forget(REGION)
    assert world.losses.number(REGION) == 0

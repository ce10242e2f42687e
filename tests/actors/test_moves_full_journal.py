"""The journal is full while a home moves. No Ray; the faults are SQLite's."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray.actors.moves import drains, moves, switches
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from tests.support.move_rig import GIVER, OTHER, TAKER, World, run
from tests.support.server_rig import until

STEPS = (
    *("home_blocks", "take_begin", "oldest_version", "stage_home", "take"),
    *("stage_records", "take_records", "take_seal"),
)


class Disk:
    """Between a journal and SQLite: where it is full, each transaction fails at its end."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.is_full = False
        self.n_refused = 0

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement == "COMMIT" and self.is_full:
            self.n_refused += 1
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(statement, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def fill(self) -> None:
        self.is_full = True

    def empty(self) -> None:
        self.is_full = False


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(moves, "LAYER_BLOCKS", 8)
    monkeypatch.setattr(moves, "FEW_BLOCKS", 2)
    monkeypatch.setattr(moves, "FEW_RECORDS", 1)
    monkeypatch.setattr(moves, "RECORDS_AT_ONCE", 2)
    monkeypatch.setattr(switches, "PAUSE_S", 0.001)
    monkeypatch.setattr(switches, "PAUSE_MOST_S", 0.002)
    monkeypatch.setattr(drains, "PAUSE_S", 0.002)
    monkeypatch.setattr(drains, "PAUSE_MOST_S", 0.01)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def of(world: World, work: Callable[[Disk], Any]) -> None:
    async def whole() -> None:
        disk: Any = Disk(world.journal._db)
        try:
            for block in (3, 5, 35):  # a history of three versions
                await world.commit(block)
            await world.until_told()
            world.journal._db = disk
            await work(disk)
        finally:
            await world.close()

    run(whole)


async def restarted(world: World) -> None:
    """The registry is another one, which has what the journal has."""
    await world.close()
    world.servers.layers.clear()  # of which the giver asks what became of them
    world.restart()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("restart", [False, True])
def test_full_before_the_taker_is_written_down(world: World, step: str, restart: bool) -> None:
    """The move is refused, with the journal's reason. The giver is the home, and commits go on."""

    async def work(disk: Disk) -> None:
        world.servers.before[step] = [disk.fill]
        with pytest.raises(MoveFailed, match=r"cannot be written .*disk is full") as failed:
            await world.moves.move(world.region, TAKER)
        assert not isinstance(failed.value, NoRoom)  # another taker would not help
        assert disk.n_refused == 1
        assert world.home() == GIVER
        with pytest.raises(errors.JournalFullError):
            await world.commit(7)
        disk.empty()
        if restart:
            await restarted(world)
        assert world.home() == GIVER
        await world.check()
        await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        await world.check()

    of(world, work)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("n_told", [0, 1])
def test_full_from_the_moment_when_it_was_written_down(
    world: World, restart: bool, n_told: int
) -> None:
    """The taker is the home. That both have heard is written later, or said once more."""

    async def work(disk: Disk) -> None:
        world.servers.before["rehome"] = [*[lambda: None] * n_told, disk.fill]
        await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        assert disk.n_refused == 1
        assert not world.held.is_held([world.region])
        with pytest.raises(errors.JournalFullError):
            await world.commit(7)
        disk.empty()
        assert world.journal.load().givers == ((world.region, GIVER),)
        await world.commit(7)
        if restart:
            world.servers.calls.clear()
            await restarted(world)
            await world.commit(8)  # which waits until both have heard once more
            told = [call[1:] for call in world.servers.calls if call[0] == "rehome"]
            assert told[:2] == [(TAKER, TAKER), (GIVER, TAKER)]
            assert world.journal.load().givers == ()
        await world.check()
        await world.moves.move(world.region, OTHER)
        assert world.journal.load().givers == ()
        await world.check()

    of(world, work)


@pytest.mark.parametrize("restart", [False, True])
def test_full_when_the_region_is_to_go_back(world: World, restart: bool) -> None:
    """The taker is lost before the giver has heard. Commits wait until it is written down that the
    giver is the home again; what the giver has is never given up."""

    def lost() -> None:
        world.servers.attempts.clear()
        world.lose(TAKER)

    async def work(disk: Disk) -> None:
        def fail() -> None:
            disk.fill()
            lost()

        world.servers.before["rehome"] = [fail]
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        await until(lambda: disk.n_refused >= 3)  # it is tried again and again
        assert not moving.done()
        assert world.held.is_held([world.region])
        assert (GIVER, world.region) in world.servers.homes
        with pytest.raises((errors.WaitTimeoutError, errors.HomeLostError)):
            await world.commits.commit(world.request(7))
        disk.empty()
        if restart:
            moving.cancel()
            await restarted(world)
            world.core.server_lost(TAKER, "its node is dead")
        else:
            with pytest.raises(MoveFailed, match="before the giver had heard"):
                await moving
        await until(lambda: not world.held.is_held([world.region]))
        assert world.home() == GIVER
        await world.check()

    of(world, work)


def test_a_drain_begins_not_where_it_cannot_be_written_down(world: World) -> None:
    async def work(disk: Disk) -> None:
        disk.fill()
        with pytest.raises(errors.JournalFullError, match="disk is full"):
            await world.drains.drain(GIVER, "node 1", 5.0)
        assert world.drains.leaving == ()
        assert world.home() == GIVER
        disk.empty()
        assert (await world.drains.drain(GIVER, "node 1", 5.0)).moved == 1
        await world.check()

    of(world, work)


@pytest.mark.parametrize("for_ever", [False, True])
def test_full_while_a_node_is_drained(world: World, for_ever: bool) -> None:
    """It goes on when there is room again. Else the drain's error names what stays, and why."""

    async def work(disk: Disk) -> None:
        world.servers.before["take_seal"] = [disk.fill]
        drain = asyncio.ensure_future(world.drains.drain(GIVER, "node 1", 1.0 if for_ever else 20))
        await until(lambda: disk.n_refused >= 2)
        if for_ever:
            with pytest.raises(errors.DrainTimeoutError) as failed:
                await drain
            assert "variable 1 " in failed.value.message
            assert "disk is full" in failed.value.message
            assert world.home() == GIVER
            disk.empty()
        else:
            disk.empty()
            assert (await drain).moved == 1
            assert world.home() == TAKER
        await world.check()

    of(world, work)

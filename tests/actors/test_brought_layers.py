"""Layers that go to their homes before their commit is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray.actors.commits.brought_layers import BroughtLayers
from tests.actors.test_commits import ELSEWHERE, HERE, THERE, World, moved, request, until


def run(path: Path, work: Callable[[World], Awaitable[None]], timeout_s: float = 2.0) -> None:
    async def whole() -> None:
        world = World(path / "journal", timeout_s)
        try:
            await asyncio.wait_for(work(world), 20)
        finally:
            await world.commits.close()
            world.journal.close()

    asyncio.run(whole())


def test_the_home_has_it_and_the_commit_refers_to_it(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        assert await world.commits.bring(request(7, 3)) == THERE
        assert await world.commits.bring(request(7, 1)) == HERE  # its own: nothing to fetch
        assert world.homes.pulled == [(THERE, 7, 3)]
        assert world.versions() == [0, 0, 0]
        asked = request(7, 1, 3)
        asked = replace(asked, writes=(asked.writes[0], replace(asked.writes[1], staged_at=THERE)))
        assert (await world.commits.commit(asked)).versions == {1: 1, 3: 1}
        assert world.homes.pulled == [(THERE, 7, 3)]  # staged there just now
        assert await world.commits.outcome(7) == {1: 1, 3: 1}
        assert world.homes.dropped == []

    run(tmp_path, work)


def test_a_home_that_has_moved_since_a_layer_was_brought_keeps_none(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.commits.bring(request(7, 3))
        moved(world, 3, ELSEWHERE)
        await world.commits.commit(request(7, 3))
        await until(lambda: world.homes.dropped == [(THERE, 7, [3])])

    run(tmp_path, work)


def test_nobody_but_its_writer_gives_it_up_in_its_time(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.commits.bring(request(7, 3, timeout_s=5.0))
        with pytest.raises(errors.ServerUnavailableError, match="still on their way"):
            await world.commits.outcome(7)
        assert await world.commits.outcome(7, by_writer=True) == {}
        await asyncio.sleep(0.05)
        assert world.homes.dropped == [(THERE, 7, [3])]
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.bring(request(7, 3))
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.commit(request(7, 3))
        assert world.versions() == [0, 0, 0]

    run(tmp_path, work)


def test_a_writer_that_is_gone_holds_it_no_longer_than_that(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await world.commits.bring(request(7, 3, timeout_s=0.2))
        with pytest.raises(errors.ServerUnavailableError):
            await world.commits.outcome(7)
        await asyncio.sleep(0.3)
        assert await world.commits.outcome(7) == {}
        await asyncio.sleep(0.05)
        assert world.homes.dropped == [(THERE, 7, [3])]  # at the home, which need not ask

    run(tmp_path, work)


def test_what_cannot_be_brought(tmp_path: Path) -> None:
    async def full(home: int) -> None:
        raise errors.OutOfMemoryError("no room")

    async def work(world: World) -> None:
        with pytest.raises(errors.FreedError):
            await world.commits.bring(request(7, 99))
        world.homes.pull_does = full
        with pytest.raises(errors.OutOfMemoryError):
            await world.commits.bring(request(8, 3))
        assert await world.commits.outcome(8, by_writer=True) == {}
        await asyncio.sleep(0.05)
        assert world.homes.dropped == [(THERE, 8, [3])]  # it may have a part of it
        world.homes.lost[THERE] = "its node is dead"
        with pytest.raises(errors.HomeLostError):
            await world.commits.bring(request(9, 3))

    run(tmp_path, work)


def test_those_whose_time_is_over_are_forgotten() -> None:
    brought = BroughtLayers()
    for commit_id in range(100):
        brought.hold(commit_id, now_s=float(commit_id), until_s=commit_id + 10.0)
        brought.add(commit_id, home=1, region=commit_id)
    assert len(brought) == 11  # the newest, and those whose time is not over
    brought.hold(99, now_s=200.0, until_s=150.0)  # a shorter time takes nothing away
    assert brought.forget(99) == {1: {99}}
    assert brought.forget(99) == {}
    brought.check(99, now_s=0.0)
    assert len(brought) == 0

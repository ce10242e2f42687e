"""Drained page servers end when nothing uses them: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import LEFT, ServerLost
from clamor_ray.actors.moves import departures, drains
from clamor_ray.actors.moves.departures import Departures
from tests.support.move_rig import GIVER, OTHER, TAKER, World, run
from tests.support.server_rig import until

WAIT_S = 10.0
QUIET_S = 0.05


class Ends:
    """Page servers that say what a test tells them to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.uses: dict[int, list[int | None]] = {}  # the last answer is given again and again
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.refuses = 0
        self.silent: set[int] = set()  # asked to leave, and nobody knows the answer
        self.before_end: list[Callable[[], Any]] = []

    def asked_to_leave(self) -> set[int]:
        return set(self.silent)

    async def in_use(self, server_id: int) -> int | None:
        self.asked.append(server_id)
        answers = self.uses.get(server_id, [0])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def leave(self, server_id: int, may_leave: Callable[[], bool]) -> bool:
        if self.before_end:
            self.before_end.pop(0)()
        if not may_leave() and server_id not in self.silent:
            return False
        self.silent.discard(server_id)
        if self.refuses:
            self.refuses -= 1
            return False
        self.ended.append(server_id)
        self.world.core.server_lost(server_id, LEFT)
        self.world.drains.lost(server_id)
        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(drains, "PAUSE_S", 0.002)
    monkeypatch.setattr(departures, "LOOK_S", 0.005)
    monkeypatch.setattr(departures, "QUIET_S", QUIET_S)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def of(world: World, work: Callable[[Ends, Departures], Any], stays: int = OTHER) -> None:
    async def whole() -> None:
        ends = Ends(world)
        watched = Departures(world.core, world.log, world.drains, ends, stays.__eq__)
        try:
            await work(ends, watched)
        finally:
            await watched.close()
            await world.close()

    run(whole)


async def drain(world: World, server_id: int = GIVER, timeout_s: float = WAIT_S) -> Any:
    return await world.drains.drain(server_id, f"node {server_id}", timeout_s)


async def for_long() -> None:
    """More than enough for one that may end."""
    await asyncio.sleep(4 * QUIET_S)


def test_one_that_nothing_uses_ends(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        assert watched.leaves(GIVER)
        watched.watch()
        await until(lambda: ends.ended)
        assert ends.ended == [GIVER]
        assert watched.n_left == 1
        assert world.core.locate(GIVER) == ServerLost(GIVER, LEFT)
        n_asked = len(ends.asked)
        await for_long()
        assert len(ends.asked) == n_asked, "nobody is left to look at"
        assert {TAKER, OTHER}.isdisjoint(ends.asked)

    of(world, work)


def test_one_that_is_used_goes_on_until_it_is_not(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        ends.uses[GIVER] = [1]
        await drain(world)
        watched.watch()
        await for_long()
        assert ends.ended == []
        ends.uses[GIVER] = [None]  # it does not answer
        await for_long()
        assert ends.ended == []
        ends.uses[GIVER] = [0]
        await until(lambda: ends.ended)

    of(world, work)


def test_a_moment_without_use_is_not_enough(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        ends.uses[GIVER] = [0, 1] * 40 + [1]
        await drain(world)
        watched.watch()
        await until(lambda: len(ends.asked) > 60)
        assert ends.ended == []

    of(world, work)


def test_the_server_of_the_sessions_node_stays(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        assert not watched.leaves(GIVER)
        watched.watch()
        await for_long()
        assert ends.asked == ends.ended == []

    of(world, work, stays=GIVER)


def test_one_that_is_not_drained_stays(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        watched.watch()
        await for_long()
        assert not watched.leaves(TAKER)
        assert ends.asked == ends.ended == []

    of(world, work)


@pytest.mark.parametrize("what", ["homed", "made"])
def test_what_is_put_there_meanwhile_keeps_it(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that comes at the last moment."""

    def make() -> None:
        if what == "homed":
            world.add_region()
        else:
            world.core.create_region(4096, GIVER, time.monotonic())

    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        ends.before_end = [make]
        watched.watch()
        await until(lambda: not ends.before_end)
        await for_long()
        assert ends.ended == []
        if what == "homed":
            await drain(world)
        else:
            monkeypatch.setattr(departures, "MAKING_S", 0.0)  # so long nobody takes for it
        await until(lambda: ends.ended)

    of(world, work)


def test_a_drain_that_runs_keeps_it(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        hold = asyncio.Event()
        world.servers.before["take_seal"] = [hold.wait]
        running = asyncio.ensure_future(drain(world))
        await until(lambda: world.drains.is_running(GIVER))
        watched.watch()
        world.core.homed_at = lambda *_: ()  # type: ignore[method-assign]
        await for_long()
        assert ends.ended == []
        del world.core.homed_at
        hold.set()
        await running
        await until(lambda: ends.ended)

    of(world, work)


def test_commits_of_its_node_are_at_their_homes_before(world: World) -> None:
    """Its copies of the last ones may be all there is, if a home is lost before it acknowledges."""

    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        hold = asyncio.Event()
        world.servers.before["publish"] = [hold.wait]
        await world.commit(7)
        assert world.log.settled(world.region) < world.log.newest(world.region)
        watched.watch()
        await for_long()
        assert ends.ended == []
        hold.set()
        await until(lambda: ends.ended)

    of(world, work)


def test_the_server_says_no(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        ends.refuses = 3
        await drain(world)
        watched.watch()
        await until(lambda: ends.ended)
        assert ends.refuses == 0
        assert watched.n_left == 1

    of(world, work)


def test_a_failure_is_logged_and_it_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a mistake of ours")

    async def work(ends: Ends, watched: Departures) -> None:
        ends.before_end = [fail]
        await drain(world)
        watched.watch()
        await until(lambda: ends.ended)
        assert "a mistake of ours" in caplog.text

    of(world, work)


def test_after_a_restart_of_the_registry(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        await world.close()
        world.restart()
        ends.world = world
        again = Departures(world.core, world.log, world.drains, ends, OTHER.__eq__)
        again.watch()
        await until(lambda: ends.ended)
        await again.close()

    of(world, work)


def test_a_drain_that_is_cancelled_keeps_it(world: World) -> None:
    """And it takes homes again, also after a restart of the registry."""

    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        watched.watch()
        assert world.drains.cancel(GIVER)
        assert not world.drains.cancel(GIVER)
        await for_long()
        assert ends.ended == []
        assert world.journal.load().leaving == ()
        assert GIVER in world.drains.others(TAKER)
        await world.close()
        world.restart()
        assert not world.drains.is_leaving(GIVER)

    of(world, work)


def test_a_drain_that_runs_is_cancelled(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        for _ in range(4):
            world.add_region()
        hold = asyncio.Event()
        world.servers.before["take_seal"] = [hold.wait]
        running = asyncio.ensure_future(drain(world))
        await until(lambda: world.drains.is_running(GIVER))
        assert world.drains.cancel(GIVER)
        with pytest.raises(errors.DrainCancelledError, match="node 1 was cancelled") as failure:
            await running
        assert "Call clamor.drain again" in failure.value.hint
        assert not world.drains.is_running(GIVER)
        await world.check()
        assert (await drain(world)).moved > 0
        assert world.core.homed_at(GIVER) == ()

    of(world, work)


def test_who_asked_for_a_drain_goes(world: World) -> None:
    """That is no cancel_drain."""

    async def work(ends: Ends, watched: Departures) -> None:
        hold = asyncio.Event()
        world.servers.before["take_seal"] = [hold.wait]
        running = asyncio.ensure_future(drain(world))
        await until(lambda: world.drains.is_running(GIVER))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert world.drains.is_leaving(GIVER)

    of(world, work)


def test_a_full_journal_cancels_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(server_id: int) -> None:
        raise errors.JournalFullError("The disk is full.")

    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        monkeypatch.setattr(world.journal, "stay", full)
        with pytest.raises(errors.JournalFullError):
            world.drains.cancel(GIVER)
        assert world.drains.is_leaving(GIVER)

    of(world, work)


def test_one_that_its_node_may_need_again_goes_on(world: World) -> None:
    """Ray would start no other one there."""
    kept = {GIVER}

    async def keeps(server_id: int) -> bool:
        return server_id in kept

    async def work(ends: Ends, watched: Departures) -> None:
        watched._keeps = keeps
        await drain(world)
        watched.watch()
        await for_long()
        assert ends.ended == []
        kept.clear()
        await until(lambda: ends.ended)

    of(world, work)


def test_where_a_region_waits_for_a_new_home_nobody_leaves(world: World) -> None:
    """It may have what the rebuild needs."""

    async def work(ends: Ends, watched: Departures) -> None:
        lost_for_good: set[int] = set()
        watched._is_lost_for_good = lost_for_good.__contains__
        lost = world.add_region(OTHER)
        await drain(world)
        world.core.server_lost(OTHER, "its node is dead")
        watched.watch()
        await for_long()
        assert ends.ended == []
        lost_for_good.update([lost, *world.core.homed_at(OTHER)])
        await until(lambda: ends.ended == [GIVER])

    of(world, work)


def test_who_was_asked_is_asked_also_after_a_cancel(world: World) -> None:
    """It may have ended: nobody else would notice."""

    async def work(ends: Ends, watched: Departures) -> None:
        await drain(world)
        ends.silent.add(GIVER)
        world.drains.cancel(GIVER)
        watched.watch()
        await until(lambda: ends.ended == [GIVER])

    of(world, work)


def test_after_a_cancel_it_has_its_time_again(world: World) -> None:
    async def work(ends: Ends, watched: Departures) -> None:
        ends.uses[TAKER] = [1]
        world.drains.take_back([TAKER])  # another one that leaves, so that it goes on looking
        watched._unused[GIVER] = departures._Unused(0.0, {})  # of a drain that was cancelled
        watched.watch()
        await until(lambda: GIVER not in watched._unused)

    of(world, work)

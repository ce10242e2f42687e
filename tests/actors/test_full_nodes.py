"""A full node gives homes away. No Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray._protocol.messages import HomeUse, NodeRoom
from clamor_ray.actors.moves import full_nodes
from clamor_ray.actors.moves.full_nodes import SLACK_BYTES, FullNodes
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from tests.support.move_rig import DATA, GIVER, OTHER, TAKER, World, run
from tests.support.server_rig import until

MEMORY = 100 << 20
HOME = 10 << 20  # what each home is taken to hold


class Rig:
    """Three servers with so much memory; each home there takes ``HOME`` of it."""

    def __init__(self, world: World, moves: Any = None, timeout_s: float = 20.0) -> None:
        self.world = world
        self.used = {GIVER: 0, TAKER: 0, OTHER: 0}  # beside homes
        self.reads: dict[int, int] = {}
        self.mapped: set[int] = set()
        self.silent: set[int] = set()
        self.n_asked = 0
        self.keeps_memory = False  # what has moved away takes it still
        self.rooms = FullNodes(world.core, moves or world.moves, world.drains, self._ask, timeout_s)

    def available(self, server_id: int) -> int:
        n_homes = len(self.world.core.homed_at(server_id))
        if self.keeps_memory and server_id == GIVER:
            n_homes = 5
        return MEMORY - self.used[server_id] - n_homes * HOME

    async def _ask(self, server_id: int) -> NodeRoom | None:
        self.n_asked += 1
        await asyncio.sleep(0)
        if server_id in self.silent:
            return None
        homes = tuple(
            HomeUse(region, HOME, self.reads.get(region, 0), 0.0, region in self.mapped)
            for region in self.world.core.homed_at(server_id)
        )
        return NodeRoom(self.available(server_id), MEMORY, homes)

    def fill(self, server_id: int, left_bytes: int = 0) -> None:
        self.used[server_id] += self.available(server_id) - left_bytes


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(full_nodes, "PAUSE_S", 0.002)
    monkeypatch.setattr(full_nodes, "FREE_S", 0.05)
    world = World(tmp_path / "journal")
    for _ in range(4):
        world.add_region()
    yield world
    world.journal.close()


def of(world: World, work: Callable[[Rig], Any], **how: Any) -> None:
    async def whole() -> None:
        try:
            await work(Rig(world, **how))
        finally:
            await world.close()

    run(whole)


NEEDED = 2 * HOME - SLACK_BYTES  # two homes are enough


def test_the_least_read_homes_go_and_the_request_goes_on(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        rig.reads = {1: 9, 2: 1, 3: 8, 4: 2, 5: 7}
        assert await rig.rooms.make_room(GIVER, NEEDED)
        assert rig.available(GIVER) >= NEEDED
        assert world.core.homed_at(GIVER) == (1, 3, 5)
        assert [world.home(region) for region in (2, 4)] == [TAKER, OTHER]  # the least each time
        assert rig.rooms.n_moved == 2
        assert world.servers.homes[TAKER, 2] == {0: dict.fromkeys(DATA, 0)}  # a real move

    of(world, work)


def test_where_there_is_room_nothing_moves(world: World) -> None:
    async def work(rig: Rig) -> None:
        assert await rig.rooms.make_room(GIVER, NEEDED)
        assert rig.rooms.n_moved == 0

    of(world, work)


def test_where_all_nodes_are_full_that_is_said_at_once(world: World) -> None:
    async def work(rig: Rig) -> None:
        for server_id in rig.used:
            rig.fill(server_id, MEMORY // 8 + HOME - 1)
        rig.fill(GIVER)
        assert not await rig.rooms.make_room(GIVER, NEEDED)
        assert rig.n_asked == 3  # each once
        assert rig.rooms.n_moved == 0
        assert not [call for call in world.servers.calls if call[0] == "take_begin"]

    of(world, work)


@pytest.mark.parametrize("why", ["mapped", "silent", "unknown", "drained"])
def test_who_cannot_give_or_take_does_not(why: str, world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        if why == "mapped":
            rig.mapped = {1, 2, 3, 4, 5}
        elif why == "drained":
            for server_id in (TAKER, OTHER):
                world.drains.take_back([server_id])
        else:
            rig.silent = {GIVER} if why == "unknown" else {TAKER, OTHER}
        assert not await rig.rooms.make_room(GIVER, NEEDED)
        assert rig.rooms.n_moved == 0

    of(world, work)


def test_two_full_nodes_do_not_swap_homes(world: World) -> None:
    """The taker is full a moment later: nothing comes back, and what came does not go on."""

    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        rig.fill(OTHER)
        assert await rig.rooms.make_room(GIVER, NEEDED)
        moved = world.core.homed_at(TAKER)
        assert len(moved) == 2
        rig.fill(TAKER)
        rig.used[GIVER] = rig.used[OTHER] = 0
        assert not await rig.rooms.make_room(TAKER, NEEDED)
        assert world.core.homed_at(TAKER) == moved
        assert len(world.core.homed_at(GIVER)) == 3

    of(world, work)


def test_a_server_that_was_full_takes_nothing(world: World) -> None:
    async def work(rig: Rig) -> None:
        world.add_region(TAKER)
        world.add_region(TAKER)
        rig.fill(TAKER)
        rig.fill(OTHER)
        assert await rig.rooms.make_room(TAKER, HOME - SLACK_BYTES)  # GIVER has taken one
        rig.used[TAKER] = 0  # there would be room by now
        rig.fill(GIVER)
        assert not await rig.rooms.make_room(GIVER, NEEDED)

    of(world, work)


def test_after_a_while_homes_may_move_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_nodes, "STAY_S", 0.0)

    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        rig.fill(OTHER)
        assert await rig.rooms.make_room(GIVER, NEEDED)
        rig.fill(TAKER)
        rig.used[GIVER] = 0
        await asyncio.sleep(0.01)
        assert await rig.rooms.make_room(TAKER, NEEDED)
        assert len(world.core.homed_at(GIVER)) == 5

    of(world, work)


class FakeMoves:
    """Does what a test says, and then moves."""

    def __init__(self, world: World, *does: BaseException) -> None:
        self.world, self.does = world, list(does)
        self.asked: list[tuple[int, int]] = []

    async def move(self, region: int, taker: int) -> int:
        self.asked.append((region, taker))
        await asyncio.sleep(0.001)
        if self.does:
            raise self.does.pop(0)
        self.world.core.rehome(region, taker)
        return 10


def test_a_taker_that_says_no_is_not_asked_again(world: World) -> None:
    fake = FakeMoves(world, NoRoom("no memory"))

    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        assert await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)
        assert [taker for _, taker in fake.asked] == [TAKER, OTHER]

    of(world, work, moves=fake)


def test_what_fails_again_and_again_is_given_up(world: World) -> None:
    fake = FakeMoves(world, *[MoveFailed("restarting")] * 10)

    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        assert not await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)
        assert len(fake.asked) == full_nodes.TRIES

    of(world, work, moves=fake)


def test_a_mistake_of_ours_is_not_taken_for_a_full_node(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        with pytest.raises(RuntimeError, match="a mistake"):
            await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)

    of(world, work, moves=FakeMoves(world, RuntimeError("a mistake of ours")))


def test_memory_that_does_not_come_free_is_no_room(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.keeps_memory = True
        rig.fill(GIVER)
        assert not await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)

    of(world, work)


def test_memory_that_comes_free_a_little_later_is_waited_for(world: World) -> None:
    """Its page server lets go of it behind the last reader."""

    async def work(rig: Rig) -> None:
        rig.keeps_memory = True
        rig.fill(GIVER)
        asyncio.get_running_loop().call_later(0.02, setattr, rig, "keeps_memory", False)
        assert await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)
        assert rig.rooms.n_moved == 1

    of(world, work)


def test_it_takes_no_longer_than_the_caller_waits(world: World) -> None:
    """The move is given up, and the giver is the home."""

    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        never = asyncio.Event()
        world.servers.before["take"] = [never.wait] * 5
        began_s = asyncio.get_running_loop().time()
        assert not await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES)
        assert asyncio.get_running_loop().time() - began_s < 2.0
        await until(lambda: not world.servers.attempts)
        assert len(world.core.homed_at(GIVER)) == 5
        await world.check()

    of(world, work, timeout_s=0.2)


def test_requests_of_a_node_are_served_one_after_the_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        answers = await asyncio.gather(*(rig.rooms.make_room(GIVER, NEEDED) for _ in range(4)))
        assert answers == [True] * 4
        assert rig.rooms.n_moved == 2  # the others find what the first has made
        assert "does not make room" not in caplog.text

    of(world, work)


def test_what_is_being_changed_stays(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.fill(GIVER)
        assert not await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES, {1, 2, 3, 4, 5})
        assert await rig.rooms.make_room(GIVER, HOME - SLACK_BYTES, {1, 2, 3, 4})
        assert world.home(5) != GIVER

    of(world, work)

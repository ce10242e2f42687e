"""Everything off a server: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import HomeUse, NodeRoom
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.lost_homes import rebuild_plan
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.moves import drains
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from tests.support.move_rig import GIVER, OTHER, TAKER, World, run

WAIT_S = 10.0


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(drains, "PAUSE_S", 0.002)
    monkeypatch.setattr(drains, "PAUSE_MOST_S", 0.01)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def of(world: World, work: Callable[[], Any]) -> None:
    async def whole() -> None:
        try:
            await work()
        finally:
            await world.close()

    run(whole)


async def drain(world: World, server_id: int = GIVER, timeout_s: float = WAIT_S) -> Any:
    return await world.drains.drain(server_id, f"node {server_id}", timeout_s)


def test_everything_goes_to_those_that_have_least(world: World) -> None:
    async def work() -> None:
        regions = [world.region, *(world.add_region() for _ in range(5))]
        world.add_region(OTHER, n_blocks=90)
        result = await drain(world)
        assert result.moved == 6
        assert result.bytes > 0
        assert result.seconds > 0
        assert world.core.homed_at(GIVER) == ()
        homes = [world.home(region) for region in regions]
        assert (homes.count(TAKER), homes.count(OTHER)) == (4, 2)  # 160 blocks, and 90 + 80
        again = await drain(world)
        assert (again.moved, again.bytes) == (0, 0)
        await world.check()

    of(world, work)


def test_what_is_put_meanwhile_moves_too(world: World) -> None:
    async def work() -> None:
        world.servers.before["take_seal"] = [world.add_region]
        assert (await drain(world)).moved == 2
        assert world.core.homed_at(GIVER) == ()

    of(world, work)


def test_nothing_comes_to_a_server_that_leaves(world: World) -> None:
    """Nor after the drain, nor after a restart of the registry."""

    async def work() -> None:
        await drain(world)
        assert world.drains.others(OTHER) == [TAKER]
        await world.close()
        world.restart()
        assert world.drains.is_leaving(GIVER)
        region = world.add_region(OTHER)
        await drain(world, OTHER)
        assert world.home(region) == TAKER
        with pytest.raises(errors.NoOtherNodeError, match="node 2 cannot be drained"):
            await drain(world, TAKER)
        assert not world.drains.is_leaving(TAKER)

    of(world, work)


@pytest.mark.parametrize(
    ("leaving", "expected"), [({2}, 3), ({2, 3}, 2)], ids=["another one", "there is no other"]
)
def test_a_rebuild_goes_elsewhere_while_it_can(
    world: World, leaving: set[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[int] = []
    plan = rebuild_plan.plan

    def note(*arguments: Any, **how: Any) -> Any:
        found = plan(*arguments, **how)
        assert found is not None
        homes.append(found.home)
        raise RuntimeError("that is all that was asked")

    async def work() -> None:
        rebuilds = Rebuilds(
            *(world.core, world.log, world.journal, world.servers),  # type: ignore[arg-type]
            is_leaving=leaving.__contains__,
        )
        monkeypatch.setattr(rebuild_plan, "plan", note)
        world.lose(GIVER)
        holdings = [rebuild_plan.Holding(TAKER, 0, BitMap(range(40)))]
        record = world.core.record_of(world.region)
        assert record is not None
        from clamor_ray.actors.lost_homes.attempts import Attempts

        with pytest.raises(RuntimeError):
            rebuilds._plan(record, 0, holdings, Attempts())
        assert homes == [expected]

    of(world, work)


def test_without_another_server_nothing_begins(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", n_servers=1)

    async def work() -> None:
        with pytest.raises(errors.NoOtherNodeError) as failure:
            await drain(world)
        assert "Add a node" in failure.value.hint
        assert world.journal.load().leaving == ()

    of(world, work)
    world.journal.close()


def test_without_another_server_a_node_that_has_nothing_is_drained(tmp_path: Path) -> None:
    world = World(tmp_path / "journal", n_servers=1)

    async def work() -> None:
        world.free()
        result = await drain(world)
        assert (result.moved, result.bytes) == (0, 0)
        assert world.journal.load().leaving == (GIVER,)
        world.add_region()  # what its own processes put is homed there, and has nowhere to go
        with pytest.raises(errors.NoOtherNodeError):
            await drain(world)
        assert world.drains.cancel(GIVER)

    of(world, work)
    world.journal.close()


class FakeMoves:
    """Does what a test says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.does: list[BaseException] = []
        self.asked: list[tuple[int, int]] = []
        self.under_way = self.most = 0

    async def move(self, region: int, taker: int) -> int:
        self.asked.append((region, taker))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0.001)
            if self.does:
                raise self.does.pop(0)
        finally:
            self.under_way -= 1
        self.world.core.rehome(region, taker)
        return 10


def test_a_server_without_room_is_passed_over(world: World) -> None:
    async def work() -> None:
        fake = FakeMoves(world)
        fake.does = [NoRoom("no memory"), NoRoom("no memory"), NoRoom("no memory")]
        result = await Drains(world.core, world.journal, fake).drain(GIVER, "node 1", WAIT_S)
        assert [taker for _, taker in fake.asked] == [TAKER, OTHER, TAKER, OTHER]
        assert (result.moved, result.bytes) == (1, 10)

    of(world, work)


def test_what_fails_for_now_is_tried_again(world: World) -> None:
    async def work() -> None:
        fake = FakeMoves(world)
        regions = [world.add_region() for _ in range(8)]
        fake.does = [MoveFailed("restarting"), RuntimeError("a mistake of ours")]
        result = await Drains(world.core, world.journal, fake).drain(GIVER, "node 1", WAIT_S)
        assert result.moved == len(regions) + 1
        assert fake.most == drains.BEGUN_AT_ONCE

    of(world, work)


def test_what_stays_is_named(world: World) -> None:
    async def work() -> None:
        for _ in range(5):
            world.add_region()
        fake = FakeMoves(world)
        fake.does = [NoRoom("The node is full.")] * 10_000
        with pytest.raises(errors.DrainTimeoutError) as failure:
            await Drains(world.core, world.journal, fake).drain(GIVER, "node 1", 0.1)
        text = failure.value.message
        assert "Node node 1 has not been drained within 0.1 s" in text
        assert "variable 1, variable 2, variable 3, variable 4 and 2 more" in text
        assert "The node is full" in text
        assert "Nothing is lost" in failure.value.hint
        assert isinstance(failure.value, errors.WaitTimeoutError)
        assert fake.under_way == 0

    of(world, work)


def test_a_move_that_is_written_ends_though_the_time_is_over(world: World) -> None:
    async def work() -> None:
        world.servers.before["rehome"] = [lambda: asyncio.sleep(0.2)]
        assert (await drain(world, timeout_s=0.1)).moved == 1
        await world.unheard.moving.until_over(world.region, WAIT_S)
        assert world.home() == TAKER
        await world.check()

    of(world, work)


def test_two_drains_of_a_server_do_it_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        for _ in range(4):
            world.add_region()
        first, second = await asyncio.gather(drain(world), drain(world))
        assert first.moved + second.moved == 5
        assert "is not moved" not in caplog.text
        assert world.core.homed_at(GIVER) == ()

    of(world, work)


def test_servers_that_are_lost_take_nothing(world: World) -> None:
    async def work() -> None:
        world.add_region()
        world.servers.before["take"] = [lambda: world.lose(TAKER)]
        assert (await drain(world)).moved == 2
        assert world.home() == OTHER

    of(world, work)


def test_a_server_that_is_lost_ends_its_drain(world: World) -> None:
    """At once, whatever time is left: what was on it will not move any more."""

    async def work() -> None:
        others = [world.add_region() for _ in range(6)]
        world.servers.before["take"] = [lambda: None, lambda: world.lose(GIVER)]
        with pytest.raises(errors.NodeLostError) as failure:
            await drain(world, timeout_s=100 * WAIT_S)
        said = str(failure.value)
        assert "node 1 was lost while it was drained (its node is dead)" in said
        stays = [each for each in (world.region, *others) if world.home(each) == GIVER]
        assert stays
        assert all(f"variable {region}" in said for region in stays[:2])
        assert "Nothing is lost" not in said
        assert not world.drains.is_running(GIVER)
        assert world.drains.leaving == ()
        with pytest.raises(errors.NodeLostError):  # Ray may not know yet
            await drain(world, timeout_s=100 * WAIT_S)

    of(world, work)


def test_a_server_that_is_lost_when_all_is_moved_was_drained(world: World) -> None:
    async def work() -> None:
        moved = []
        for _ in range(2):
            moved.append((await drain(world)).moved)
            world.lose(GIVER)
        assert moved == [1, 0]

    of(world, work)


def test_a_freed_variable_that_others_read_is_lost_with_its_server(world: World) -> None:
    async def work() -> None:
        freed = world.add_region(GIVER)
        world.core.lookup(freed, TAKER)
        world.core.free(freed)
        drained = asyncio.ensure_future(drain(world))
        await asyncio.sleep(0.1)
        assert world.home() == TAKER
        assert not drained.done()
        world.lose(GIVER)
        with pytest.raises(errors.NodeLostError, match=f"variable {freed} .* was still there"):
            await drained

    of(world, work)


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_time_that_is_over_after_the_loss_says_what_was_there(
    is_rebuilt: bool, world: World
) -> None:
    """Whether it was rebuilt meanwhile or not. A move has not ended, and the second drain still
    waits for its turn."""

    async def work() -> None:
        fake = FakeMoves(world)

        async def never(region: int, taker: int) -> int:
            await asyncio.sleep(60)
            raise AssertionError

        fake.move = never  # type: ignore[method-assign]
        world.drains = Drains(world.core, world.journal, fake)
        both = [asyncio.ensure_future(drain(world, timeout_s=0.2)) for _ in range(2)]
        await asyncio.sleep(0.05)
        world.lose(GIVER)
        if is_rebuilt:
            world.core.rehome(world.region, OTHER)
        for drained in both:
            with pytest.raises(errors.NodeLostError, match=f"variable {world.region} "):
                await drained
        assert world.drains.leaving == ()
        assert not world.drains._left

    of(world, work)


def test_a_drain_in_turn_counts_what_the_one_before_it_moved(world: World) -> None:
    async def work() -> None:
        fake = FakeMoves(world)

        async def move_and_lose(region: int, taker: int) -> int:
            n_bytes = await FakeMoves.move(fake, region, taker)
            world.lose(GIVER)
            return n_bytes

        fake.move = move_and_lose  # type: ignore[method-assign]
        world.drains = Drains(world.core, world.journal, fake)
        results = await asyncio.gather(drain(world), drain(world))
        assert [each.moved for each in results] == [1, 0]

    of(world, work)


def test_what_others_have_moved_before_the_loss_is_safe(world: World) -> None:
    async def work() -> None:
        moved = world.add_region()
        fake = FakeMoves(world)
        fake.does = [MoveFailed("it is being moved")] * 10_000
        world.drains = Drains(world.core, world.journal, fake)
        drained = asyncio.ensure_future(drain(world))
        await asyncio.sleep(0.05)
        world.core.rehome(moved, OTHER)
        world.lose(GIVER)
        with pytest.raises(errors.NodeLostError, match=f"variable {world.region} ") as failure:
            await drained
        assert f"variable {moved}" not in failure.value.message

    of(world, work)


def uses(*reads: tuple[int, int]) -> NodeRoom:
    return NodeRoom(None, None, tuple(HomeUse(each, 9, n, 1.0, False) for each, n in reads))


def test_what_is_read_most_goes_first(world: World) -> None:
    """What nothing is known of goes last; more than one at a time begins."""

    async def work() -> None:
        for _ in range(9):
            world.add_region()

        async def ask(server_id: int) -> NodeRoom | None:
            assert server_id == GIVER
            return uses((3, 5), (1, 7), (8, 9), (2, 1), (7, 0), (6, 4), (10, 3))

        fake = FakeMoves(world)
        await Drains(world.core, world.journal, fake, ask=ask).drain(GIVER, "node 1", WAIT_S)
        assert [region for region, _ in fake.asked] == [8, 1, 3, 6, 10, 2, 7, 4, 5, 9]

    of(world, work)


def test_where_the_time_is_too_short_the_most_read_are_safe(world: World) -> None:
    async def work() -> None:
        for _ in range(9):
            world.add_region()
        fake = FakeMoves(world)

        async def slowly(region: int, taker: int) -> int:
            if len(fake.asked) >= 4:
                await asyncio.sleep(60)
            return await FakeMoves.move(fake, region, taker)

        async def ask(server_id: int) -> NodeRoom | None:
            return uses(*((region, region) for region in range(1, 11)))

        fake.move = slowly  # type: ignore[method-assign]
        with pytest.raises(errors.DrainTimeoutError):
            await Drains(world.core, world.journal, fake, ask=ask).drain(GIVER, "node 1", 0.3)
        assert world.core.homed_at(GIVER) == (1, 2, 3, 4, 5, 6)

    of(world, work)


def test_a_server_that_does_not_say_what_is_read_is_drained_as_well(world: World) -> None:
    async def work() -> None:
        async def ask(server_id: int) -> NodeRoom | None:
            return None

        drained = await Drains(world.core, world.journal, FakeMoves(world), ask=ask).drain(
            GIVER, "node 1", WAIT_S
        )
        assert drained.moved == 1

    of(world, work)


def test_a_silent_server_gets_nothing_while_there_is_another(world: World) -> None:
    async def work() -> None:
        world.add_region(OTHER, n_blocks=90)  # it has the most
        world.drains.is_suspected = lambda server_id: server_id == TAKER
        assert world.drains.takers(GIVER) == [OTHER]
        await world.drains.drain(GIVER, "node", WAIT_S)
        assert world.home(world.region) == OTHER
        world.drains.is_suspected = lambda server_id: True
        assert set(world.drains.takers(GIVER)) == {TAKER, OTHER}
        await world.close()

    run(work)


PIECE_BYTES = 2 << 20


def put_with_a_copy(world: World) -> int:
    """A variable of one piece, which is at GIVER, with a copy at TAKER. OTHER has more than that.

    Returns:
        The piece.
    """
    world.add_region(OTHER, n_blocks=2 * PIECE_BYTES // 4096)
    whole = world.core.create_pieces(PIECE_BYTES, PieceLayout(PIECE_BYTES, Shape(1, 1)), GIVER)
    piece, copy = whole.pieces
    for region in (piece, copy, whole.region):
        world.core.seal(region)
    world.core.rehome(copy, TAKER)
    return piece


def test_a_piece_goes_where_no_other_of_its_group_is(world: World) -> None:
    """Though that one has more: another loss would cost both."""

    async def work() -> None:
        piece = put_with_a_copy(world)
        fake = FakeMoves(world)
        await Drains(world.core, world.journal, fake).drain(GIVER, "node 1", WAIT_S)
        assert dict(fake.asked) == {world.region: TAKER, piece: OTHER}

    of(world, work)


def test_where_no_other_has_room_two_of_a_group_share_a_server(world: World) -> None:
    """A drain ends all the same: nothing is lost by that."""

    async def work() -> None:
        piece = put_with_a_copy(world)
        fake = FakeMoves(world)

        async def refuse(region: int, taker: int) -> int:
            if taker == OTHER:
                fake.asked.append((region, taker))
                raise NoRoom("no memory")
            return await FakeMoves.move(fake, region, taker)

        fake.move = refuse  # type: ignore[method-assign]
        result = await Drains(world.core, world.journal, fake).drain(GIVER, "node 1", WAIT_S)
        assert result.moved == 2
        assert [taker for region, taker in fake.asked if region == piece] == [OTHER, TAKER]

    of(world, work)


def test_two_of_a_group_that_move_at_the_same_time_go_apart(tmp_path: Path) -> None:
    """Each would go to the server that has least."""
    world = World(tmp_path / "journal", 4)

    async def work() -> None:
        piece = put_with_a_copy(world)
        fake = FakeMoves(world)
        both = Drains(world.core, world.journal, fake)
        await asyncio.gather(*(both.drain(each, "node", WAIT_S) for each in (GIVER, TAKER)))
        takers = [taker for region, taker in fake.asked if region in (piece, piece + 1)]
        assert sorted(takers) == [OTHER, 4]

    of(world, work)
    world.journal.close()


@pytest.mark.parametrize("reader", [GIVER, TAKER])
def test_what_was_freed_is_waited_for_while_others_read_it(reader: int, world: World) -> None:
    """It cannot move. What processes of the node itself read goes with the node."""

    async def work() -> None:
        freed = world.add_region(GIVER)
        world.core.lookup(freed, reader)
        world.core.free(freed)
        for server_id in world.core.waits_for(freed) - {reader}:
            world.core.region_idle(freed, server_id)
        if reader == GIVER:
            assert (await drain(world)).moved == 1
            return
        with pytest.raises(errors.DrainTimeoutError, match="was freed") as late:
            await drain(world, timeout_s=0.3)
        assert f"variable {freed}" in late.value.message
        assert "still there" not in late.value.message
        assert "let go of their arrays" in late.value.hint
        assert world.home() == TAKER
        again = asyncio.ensure_future(drain(world))
        await asyncio.sleep(0.05)
        assert not again.done()
        world.core.region_idle(freed, reader)
        assert (await again).moved == 0

    of(world, work)

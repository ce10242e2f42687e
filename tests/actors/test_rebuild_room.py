"""A lost home's regions get another one where page servers lack room: no Ray, servers made up."""

from __future__ import annotations

import asyncio

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerInfo
from clamor_ray.actors.lost_homes import rebuilds
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from tests.support.rebuild_rig import ALL, HOME, OTHER, PEER, WAIT_S, World, hold, run


def test_all_without_room_are_asked_again(world: World) -> None:
    def fail() -> None:
        raise errors.OutOfMemoryError("It has 5 bytes.")

    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rebuild"] = [fail] * 4
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == PEER
        asked = [call[1] for call in world.servers.calls if call[0] == "rebuild"]
        assert asked == [PEER, OTHER] * 2 + [PEER]

    run(work)


def test_where_all_are_full_the_best_of_them_gives_homes_away(world: World) -> None:
    """The one that has most of the region."""
    asked_room: list[tuple[int, int]] = []

    def fail() -> None:
        if not asked_room:
            raise errors.OutOfMemoryError("It has 5 bytes.")

    async def make_room(server_id: int, needed_bytes: int) -> bool:
        asked_room.append((server_id, needed_bytes))
        return True

    async def work() -> None:
        world.rebuilds = Rebuilds(
            *(world.core, world.log, world.journal, world.servers), make_room=make_room
        )
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rebuild"] = [fail] * 100
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == PEER
        assert asked_room == [(PEER, 4096 * len(ALL))]
        asked = [call[1] for call in world.servers.calls if call[0] == "rebuild"]
        assert asked == [PEER, OTHER, PEER]  # first the others are asked

    run(work)


def test_more_servers_without_room_than_tries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise errors.OutOfMemoryError("It has 5 bytes.")

    async def work() -> None:
        monkeypatch.setattr(rebuilds, "TRIES", 2)
        for server_id in range(4, 9):
            info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
            world.core.server_registered(info)
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rebuild"] = [fail] * 6
        world.lose(HOME)
        assert await world.settle()
        assert world.home() not in (HOME, PEER)

    run(work)


@pytest.mark.parametrize("shortage", [errors.OutOfMemoryError, errors.DescriptorLimitError])
def test_a_server_without_room_is_passed_over(
    world: World, shortage: type[errors.ClamorError]
) -> None:
    def fail() -> None:
        raise shortage("It has 5 of them.")

    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rebuild"] = [fail]
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == OTHER
        ((_, order, _),) = world.servers.orders
        assert [take[0] for take in order.takes] == [PEER]  # it gives all the same

    run(work)


def test_where_no_page_server_is_there_yet_none_is_said_to_be_full(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilds, "TRIES", 2)

    async def work() -> None:
        for server_id in (HOME, PEER, OTHER):
            world.lose(server_id)
        assert not await world.settle()

    run(work)
    assert "no page server has joined" in caplog.text
    assert "has room" not in caplog.text


def test_what_somebody_waits_for_is_rebuilt_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then what was asked for less often; what nobody has asked for comes as the home had it."""
    monkeypatch.setattr(rebuilds, "AT_ONCE", 1)

    async def work() -> None:
        world.rebuilds = Rebuilds(world.core, world.log, world.journal, world.servers)
        others = [world.add_region(HOME) for _ in range(5)]
        world.servers.cached = {PEER: [(0, ALL)]}
        world.servers.holders = {world.region: {PEER: [(1, ALL)]}}
        called, go = hold(world, monkeypatch, "rebuild")
        world.lose(HOME)
        await called.wait()
        asked = (others[4], others[3], others[3])
        waiting = [asyncio.ensure_future(world.rebuilds.settle(each, WAIT_S)) for each in asked]
        assert not await world.rebuilds.settle(others[2], 0.0)  # who does that does not wait
        go.set()
        assert all(await asyncio.gather(*waiting))
        for each in others:
            assert await world.rebuilds.settle(each, WAIT_S)
        order = [each.record.region for _, each, _ in world.servers.orders]
        assert order == [world.region, others[3], others[4], *others[:3]]

    run(work)


def test_what_a_group_makes_again_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pace is limited."""
    monkeypatch.setattr(rebuilds, "AT_ONCE", 1)

    async def work() -> None:
        world.rebuilds = Rebuilds(world.core, world.log, world.journal, world.servers)
        world.servers.cached = {PEER: [(1, ALL)]}
        async with world.rebuilds._turns[True].of(77):
            world.lose(HOME)
            assert await world.settle()

    run(work)

"""Page servers that are known by their directory in a store, and regions that are away. No Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    CommitRequest,
    RegionRecord,
    ServerInfo,
    ServerLost,
    ServerRestarting,
    Write,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray.actors.lost_homes import rebuilds
from clamor_ray.actors.registry import servers
from tests.support.rebuild_rig import ALL
from tests.support.store_rig import DIRECTORIES, NODES, StoreWorld, info_of

A, B, C = (server_id_of(directory) for directory in DIRECTORIES[:3])
A_AGAIN = server_id_of(DIRECTORIES[0], 1)
WAIT_S = 20.0


def looped(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in a loop of its own."""

    @functools.wraps(work)
    def test(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(work(**fixtures), WAIT_S))

    return test


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StoreWorld]]:
    """Ends the registry that is there, and makes the next."""
    monkeypatch.setattr(servers.ray, "get_actor", lambda *_, **__: object())
    worlds: list[StoreWorld] = []

    def again(is_new_opening: bool = False) -> StoreWorld:
        for world in worlds:
            world.close()
        worlds.append(StoreWorld(tmp_path / "journal", is_new_opening))
        return worlds[-1]

    yield again
    worlds[-1].close()


@pytest.fixture
def world(opened: Callable[..., StoreWorld]) -> StoreWorld:
    return opened()


# -- who is who


@looped
async def test_a_page_server_is_known_by_its_directory(world: StoreWorld) -> None:
    node = NODES[0]
    handle = world.handles[world.core.server_id_at(node)] = object()  # as `ensure` leaves it
    assert world.begin(0, 0) == (A, False)
    assert world.handles == {A: handle}
    assert not world.servers.is_here(node)
    world.servers.register(dataclasses.replace(info_of(A, 0, 0), directory=""))
    assert world.servers.is_here(node)
    assert world.core.server_id_at(node) == A == world.core.server_id_now(server_id_of(node))
    known = world.core.locate(A)
    assert isinstance(known, ServerInfo)
    assert known.directory == DIRECTORIES[0]
    assert world.begin(0, 0) == (A, True)  # it was started again: its keeper lives
    assert world.core.server_id_at(NODES[1]) == server_id_of(NODES[1])


@looped
async def test_who_does_not_say_its_directory_begins_again(world: StoreWorld) -> None:
    """The registry was started again between the two calls."""
    with pytest.raises(errors.ServerUnavailableError, match="without its directory"):
        world.servers.register(dataclasses.replace(info_of(A, 0, 0), directory=""))
    with pytest.raises(errors.ServerUnavailableError, match="does not know which directory"):
        world.stored.state(A)
    world.servers.register(info_of(A, 0, 0))
    assert world.core.server_id_at(NODES[0]) == A


@looped
async def test_after_a_restart_of_the_registry_nodes_have_the_same(
    opened: Callable[..., StoreWorld],
) -> None:
    world = opened()
    for index in range(3):
        world.register(index, index)
    region = world.add(A)
    world.lose(B)
    world = opened()
    assert world.core.server_id_at(NODES[0]) == A
    assert world.core.server_id_at(NODES[1]) == server_id_of(DIRECTORIES[1], 1)
    assert world.core.lives.has_lost_one(NODES[1])
    assert not world.core.lives.has_lost_one(NODES[0])
    assert world.core.lives.directory_of(B) == DIRECTORIES[1]
    assert world.core.homes_of(region) == (A,)
    assert world.core.awaited() == ()


@looped
async def test_a_directory_that_has_gone_to_another_node_is_nowhere_else(world: StoreWorld) -> None:
    """On a disk that nodes share. The page server that had it before has ended."""
    region = world.add(world.register(0, 0))
    assert world.begin(1, 0) == (A_AGAIN, False)
    assert isinstance(world.core.locate(A), ServerLost)
    assert world.core.server_id_at(NODES[0]) == server_id_of(NODES[0])
    assert not world.servers.is_here(NODES[0])
    assert world.register(1, 0) == A_AGAIN
    assert world.core.homes_of(region) == (A_AGAIN,)


@looped
async def test_a_node_has_one_page_server(world: StoreWorld) -> None:
    """Its page server was started again, and got another directory."""
    region = world.add(world.register(0, 0))
    handle = world.handles[A]
    assert world.begin(0, 1) == (B, False)
    assert isinstance(world.core.locate(A), ServerLost)
    assert world.handles == {B: handle}
    world.register(0, 1)
    assert [info.server_id for info in world.core.servers()] == [B]
    assert DIRECTORIES[0] in world.stored.why(region)


# -- what a page server is home of


@looped
async def test_a_new_opening_waits_for_its_homes(opened: Callable[..., StoreWorld]) -> None:
    world = opened()
    region, freed = world.add(world.register(0, 0)), world.add(A)
    world.commit(region, 71)
    world.commit(region, 72)
    world.core.free(freed)
    world.journal.set_states((region, state.value) for region, state in world.core.take_changed())
    world = opened(is_new_opening=True)
    assert world.core.awaited() == (A,)
    assert world.core.locate(A) == ServerRestarting(A)
    assert world.core.waits_for(freed) == {A}
    world.core.check()
    assert world.begin(3, 0) == (A, False)  # at another node
    (stored,) = world.stored.state(A).regions
    assert (stored.record.region, stored.record.version) == (region, 2)
    assert (stored.record.homes, stored.record.term) == ((A,), 1)
    assert stored.commits == ((1, 71), (2, 72))
    world.register(3, 0)
    assert world.core.awaited() == ()
    assert world.core.homes_of(region) == (A,)
    record = world.core.record_of(region)
    assert record is not None
    assert record.term == 1
    assert world.begin(3, 0) == (A, True)


@looped
async def test_what_is_made_still_is_no_part_of_it(world: StoreWorld) -> None:
    world.register(0, 0)
    world.core.create_region(4096, A)
    assert world.stored.state(A).regions == ()


@looped
async def test_who_comes_back_has_what_nobody_else_has_got(
    opened: Callable[..., StoreWorld],
) -> None:
    world = opened()
    for index in range(2):
        world.register(index, index)
    kept, moved = world.add(A), world.add(A)
    world.commit(kept, 71)
    await lose(world, A)
    world.stored.give([moved], B)
    assert world.stored.given_to(B) == [moved]
    world = opened()  # the registry is started again meanwhile
    assert world.begin(2, 0) == (A_AGAIN, False)
    (stored,) = world.stored.state(A_AGAIN).regions
    assert (stored.record.region, stored.commits) == (kept, ((1, 71),))
    assert (stored.record.homes, stored.record.term) == ((A_AGAIN,), 2)
    world.register(2, 0)
    record = world.core.record_of(kept)
    assert record is not None
    assert (record.homes, record.term) == ((A_AGAIN,), 2)
    assert world.log.homes_behind() == ()
    assert world.core.homes_of(moved) == (B,)
    world.core.check()
    world.log.check()
    homes = {each.record.region: each.record.homes for each in world.journal.load().regions}
    assert homes == {kept: (A_AGAIN,), moved: (B,)}


@looped
async def test_blocks_that_are_lost_stay_so(world: StoreWorld) -> None:
    region = world.add(world.register(0, 0))
    loss = rebuilds.LostBlocks(7, 10, bytes(BitMap([2]).serialize()), "Why", "Do.")
    world.losses.update({region: loss})
    await lose(world, A)
    world.register(1, 0)
    assert world.journal.load().lacking == ((region, loss),)
    assert world.stored.state(A_AGAIN).regions[0].record.loss == 7


async def lose(world: StoreWorld, server_id: int) -> None:
    world.lose(server_id)
    await asyncio.sleep(0)
    await world.rebuilds.close()


# -- regions that are away


@looped
async def test_a_region_that_is_away_is_not_rebuilt(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it lost: who waits for it goes on when its directory is back."""
    monkeypatch.setattr(rebuilds, "REHOME_S", 0.1)

    for index in range(2):
        world.register(index, index)
    region = world.add(A)
    world.calls.cached = {B: [(0, ALL)]}
    world.lose(A)
    with pytest.raises(errors.HomeLostError, match=DIRECTORIES[0]) as found:
        await world.rebuilds.new_home(region, A)
    assert not found.value.is_verdict
    assert "Nothing of it is lost" in found.value.hint
    assert world.rebuilds.verdict(region) is not None
    blocks = bytes(BitMap([1]).serialize())
    request = CommitRequest(10, (Write(region, 0, 1, blocks, 8192, B),))
    now = asyncio.get_running_loop().time()
    with pytest.raises(errors.HomeLostError, match="is in the directory"):
        await world.rebuilds.settle_all(request, now + 0.1)
    monkeypatch.setattr(rebuilds, "REHOME_S", 10.0)
    waiting = asyncio.ensure_future(world.rebuilds.new_home(region, A))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    world.register(2, 0)
    record = await asyncio.wait_for(waiting, 1.0)
    assert isinstance(record, RegionRecord)
    assert record.homes == (A_AGAIN,)
    await world.rebuilds.settle_all(request, asyncio.get_running_loop().time() + 1)
    await asyncio.sleep(0.01)
    assert world.rebuilds.verdict(region) is None
    assert world.calls.orders == []
    assert world.calls.let_go == []
    assert ("rehome", A_AGAIN, A_AGAIN) in world.calls.calls
    assert world.journal.load().lacking == ()
    await world.rebuilds.close()


@looped
async def test_a_new_opening_does_not_rebuild_before_it_has_looked(
    opened: Callable[..., StoreWorld],
) -> None:
    world = opened()
    for index in range(3):
        world.register(index, index)
    pieces = world.add_group([A, B, C])
    world = opened(is_new_opening=True)

    world.register(1, 1)
    world.register(2, 2)
    assert await world.rebuilds.settle(pieces[0], 1.0)  # as where its home is restarting
    assert world.calls.calls == []
    world.register(0, 0)
    assert [world.core.homes_of(piece) for piece in pieces] == [(A,), (B,), (C,)]
    await world.rebuilds.close()


@looped
async def test_a_group_that_cannot_make_it_waits_for_the_directory(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces of one group are away: what they have is not lost."""
    monkeypatch.setattr(rebuilds, "PAUSE_S", 0.001)
    monkeypatch.setattr(rebuilds, "PAUSE_MOST_S", 0.001)

    for index in range(4):
        world.register(index, index)
    pieces = world.add_group([A, B, C])
    world.lose(A)
    world.lose(B)
    assert world.rebuilds.verdict(pieces[0]) is None
    assert not await world.rebuilds.settle(pieces[0], 5.0)
    assert DIRECTORIES[0] in world.rebuilds._put_off[pieces[0]]
    assert world.journal.load().lacking == ()
    assert world.calls.orders == []
    world.register(0, 0)
    assert await world.rebuilds.settle(pieces[0], 1.0)
    assert world.core.homes_of(pieces[0]) == (A_AGAIN,)
    await world.rebuilds.close()

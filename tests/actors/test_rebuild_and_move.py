"""Rebuilds beside moves: terms, and regions that are just being handed over. No Ray."""

from __future__ import annotations

import asyncio

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import RegionRecord
from tests.support.rebuild_rig import ALL, HOME, OTHER, PEER, WAIT_S, World, run


def test_each_home_has_a_term_of_its_own(world: World) -> None:
    """Messages to a server overtake each other: the later term is what counts."""
    told: list[int] = []

    async def rehome(server_id: int, record: RegionRecord) -> None:
        told.append(record.term)

    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)], OTHER: [(1, ALL)]}
        world.servers.rehome = rehome  # type: ignore[method-assign]
        for lost, term in ((HOME, 2), (PEER, 3)):
            world.lose(lost)
            assert await world.settle()
            assert world.servers.orders[-1][1].record.term == term
            assert told[-1] == term
            (region,) = world.journal.load().regions
            assert region.record.term == term

    run(work)


def test_a_region_that_got_another_home_meanwhile_is_left_alone(world: World) -> None:
    """As by a move that ended just then: what is rebuilt may lack what that one has."""

    def moved() -> None:
        record = world.core.rehome(world.region, OTHER)
        world.log.rehome(world.region, OTHER)
        world.journal.rehome(record, 1)

    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)]}
        world.servers.before["rebuild"] = [moved]
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == OTHER
        assert world.rebuilds.lost_blocks(world.region) is None
        world.check()

    run(work)


def test_nothing_of_what_is_being_handed_over_is_rebuilt(world: World) -> None:
    """Its home is lost, and who had it before has everything: the region is given back to that."""

    async def work() -> None:
        unheard = world.rebuilds._activating
        world.servers.cached = {PEER: [(0, ALL)]}
        unheard.moving.add(world.region)
        world.lose(HOME)
        waiting = asyncio.ensure_future(world.settle())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not world.servers.calls
        world.core.rehome(world.region, OTHER)
        world.log.rehome(world.region, OTHER)
        unheard.moving.discard(world.region)
        assert await waiting
        assert world.home() == OTHER
        assert not world.servers.orders

    run(work)


def test_who_asks_for_a_home_that_has_not_heard_waits_for_it(world: World) -> None:
    async def work() -> None:
        unheard = world.rebuilds._activating
        unheard.add(world.region)
        waiting = asyncio.ensure_future(world.rebuilds.activated(world.region, WAIT_S))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        unheard.discard(world.region)
        await waiting
        unheard.add(world.region)
        with pytest.raises(errors.ServerUnavailableError, match="has not heard"):
            await world.rebuilds.activated(world.region, 0.01)

    run(work)

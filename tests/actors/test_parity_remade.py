"""A parity that lacks blocks is made again, whatever comes between. Nodes that are full. No Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray.actors.lost_homes import repairs
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.lost_homes.repairs import Staged
from tests.actors.test_rebuild_groups import LAST, SPARE, Group, group, hold
from tests.support.rebuild_rig import HOME, OTHER, PEER, WAIT_S, run

__all__ = ["group"]  # the fixture

LACKS = LostBlocks(1, 512, bytes(BitMap([3]).serialize()), "Why", "Do.")


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "LOOK_S", 0.02)


def lack(group: Group) -> None:
    """The parity lacks a block, and all the data is there: who has said so is gone."""
    record = group.core.record_of(group.parity)
    assert record is not None
    group.journal.rehome(record, 0, LACKS)
    group.losses.update({group.parity: LACKS})


async def until_whole(group: Group) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while group.losses.of(group.parity) is not None:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert not group.lost(group.parity)
    await group.rebuilds.activated(group.parity, WAIT_S)  # and it is served


def test_after_a_restart(group: Group) -> None:
    async def work() -> None:
        lack(group)
        group.rebuilds.activate([])
        await until_whole(group)
        assert group.core.homes_of(group.parity)[0] in (SPARE, LAST)
        await group.rebuilds.close()

    run(work)


def test_its_home_moves_meanwhile(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        sealed, go = hold(group, monkeypatch, "take_seal", lambda _, r, *__: r == group.parity)
        lack(group)
        group.rebuilds.activate([])
        await asyncio.wait_for(sealed.wait(), WAIT_S)
        record = group.core.record_of(group.parity)
        assert record is not None
        moved = replace(record, homes=(SPARE,), term=record.term + 1)
        group.journal.rehome(moved, 0, LACKS)
        group.core.rehome(group.parity, SPARE)
        group.log.rehome(group.parity, SPARE)
        group.rebuilds.moved(group.parity, SPARE)
        go.set()
        await until_whole(group)
        assert group.core.homes_of(group.parity)[0] != SPARE
        await group.rebuilds.close()

    run(work)


def test_who_has_no_room_for_what_a_group_makes_is_passed_over(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much it is shows while it comes."""
    full: list[int] = []

    async def take(
        taker: int, region: int, attempt: int, are_records: bool, _: list[Staged]
    ) -> None:
        if not full:
            full.append(taker)
        if taker in full:
            raise errors.OutOfMemoryError("This node is full.")

    async def work() -> None:
        monkeypatch.setattr(group.servers, "take_repaired", take)
        group.lose(HOME)
        await group.settle_piece(group.first)
        assert full
        assert {full[0], *group.core.homes_of(group.first)} == {SPARE, LAST}
        await group.rebuilds.close()

    run(work)


def test_who_gives_and_is_full_gets_room(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stage = group.servers.stage_versions

    async def staged(giver: int, region: int, wanted: list[tuple[int, int, bytes]]) -> list[int]:
        if giver == PEER and not asked:
            raise errors.OutOfMemoryError("This node is full.")
        return await stage(giver, region, wanted)

    async def make_room(server_id: int, needed_bytes: int) -> bool:
        asked.append(server_id)
        return True

    async def work() -> None:
        monkeypatch.setattr(group.servers, "stage_versions", staged)
        monkeypatch.setattr(group.rebuilds, "_make_room", make_room)
        group.lose(HOME)
        await group.settle_piece(group.first)
        assert asked == [PEER]
        assert group.core.homes_of(group.first)[0] not in (HOME, PEER, OTHER)
        await group.rebuilds.close()

    run(work)

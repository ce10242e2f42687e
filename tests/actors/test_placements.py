"""Where the pieces of a new variable go. No Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import RegionRecord, ServerInfo
from clamor_ray._protocol.refusals import NoSuchRegion
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.moves import placements
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from clamor_ray.actors.moves.placements import Placements
from tests.support.move_rig import GIVER, OTHER, TAKER, World, run


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(placements, "PAUSE_S", 0.002)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


class FakeMoves:
    """Moves that go as they are told."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[tuple[int, int]] = []

    async def move(self, region: int, taker: int) -> int:
        self.asked.append((region, taker))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return 1


def placed(world: World, *outcomes: Exception | None) -> tuple[Placements, FakeMoves]:
    moves = FakeMoves(*outcomes)
    return Placements(world.core, moves, world.drains, lambda region: f"variable {region}"), moves


def in_pieces(n: int) -> RegionRecord:
    return RegionRecord(50, 0, 0, n << 21, (), n_pieces=n, piece_bytes=2 << 20)


def of(world: World, work: Any) -> None:
    async def whole() -> None:
        try:
            await work()
        finally:
            await world.close()

    run(whole)


def test_pieces_go_to_all_servers_in_turn(world: World) -> None:
    async def work() -> None:
        found, _ = placed(world)
        homes = found.homes(in_pieces(6), GIVER)
        assert sorted(homes) == sorted([GIVER, TAKER, OTHER] * 2)
        assert (homes[1], homes[2], homes[0]) == homes[3:]  # each round begins one further
        assert (
            len(set(found.homes(in_pieces(9), GIVER)[::3])) == 3
        )  # who reads every third asks all
        assert {found.homes(in_pieces(1), GIVER)[0] for _ in range(3)} == {GIVER, TAKER, OTHER}
        await world.drains.drain(OTHER, "node", 10.0)
        assert set(found.homes(in_pieces(4), GIVER)) == {GIVER, TAKER}  # that one leaves

    of(world, work)


def test_a_piece_really_moves(world: World) -> None:
    async def work() -> None:
        found = Placements(world.core, world.moves, world.drains)
        await found.place(world.region, OTHER, 10.0)
        assert world.home(world.region) == OTHER
        await found.place(world.region, OTHER, 10.0)  # the answer was lost
        await world.check()

    of(world, work)


def test_a_home_without_room_is_passed_over(world: World) -> None:
    async def work() -> None:
        world.add_region(OTHER, n_blocks=90)
        found, moves = placed(world, NoRoom("full"))
        await found.place(world.region, OTHER, 10.0)
        assert [taker for _, taker in moves.asked] == [OTHER, TAKER]  # which has the least

    of(world, work)


def test_a_home_that_is_drained_meanwhile_is_passed_over(world: World) -> None:
    async def work() -> None:
        found, moves = placed(world)
        await world.drains.drain(OTHER, "node", 10.0)
        await found.place(world.region, OTHER, 10.0)
        assert [taker for _, taker in moves.asked] == [TAKER]

    of(world, work)


def test_what_was_to_stay_goes_elsewhere(world: World) -> None:
    """Where its maker has no room for the next piece."""

    async def work() -> None:
        world.add_region(TAKER, n_blocks=90)
        found, moves = placed(world, NoRoom("full"))
        await found.place(world.region, 0, 10.0)
        assert [taker for _, taker in moves.asked] == [OTHER, TAKER]
        found, moves = placed(world, *[NoRoom("it is full")] * 9)
        with pytest.raises(errors.OutOfMemoryError, match="it is full"):
            await found.place(world.region, 0, 10.0)
        assert GIVER not in {taker for _, taker in moves.asked}

    of(world, work)


def test_what_is_given_up_or_lost_is_not_placed(world: World) -> None:
    async def work() -> None:
        found, moves = placed(world, *[MoveFailed("restarting")] * 9)
        world.core.free(world.region)
        with pytest.raises(NoSuchRegion, match="given up"):
            await found.place(world.region, TAKER, 10.0)
        lost = world.add_region()
        world.core.server_lost(GIVER, "its node is dead")
        with pytest.raises(NoSuchRegion, match="its node is dead"):
            await found.place(lost, TAKER, 10.0)
        assert moves.asked == []

    of(world, work)


def test_where_nobody_else_has_room_it_stays(world: World) -> None:
    async def work() -> None:
        found, moves = placed(world, NoRoom("full"), NoRoom("full"))
        await found.place(world.region, TAKER, 10.0)
        assert [taker for _, taker in moves.asked] == [TAKER, OTHER, GIVER]

    of(world, work)


def test_where_nobody_has_room_that_is_said(world: World) -> None:
    """Of what was to stay, and cannot: its maker has no room for what follows."""

    async def work() -> None:
        found, moves = placed(world, *[NoRoom("it is full")] * 9)
        with pytest.raises(errors.OutOfMemoryError, match="it is full") as failure:
            await found.place(world.region, 0, 10.0)
        assert {taker for _, taker in moves.asked} == {TAKER, OTHER}
        assert "add nodes" in str(failure.value)

    of(world, work)


def test_a_move_that_fails_for_now_is_tried_again(world: World) -> None:
    async def work() -> None:
        found, moves = placed(world, *[MoveFailed("restarting")] * 3)
        await found.place(world.region, TAKER, 10.0)
        assert len(moves.asked) == 4

    of(world, work)


def test_a_piece_that_cannot_be_moved_in_time_says_so(world: World) -> None:
    async def work() -> None:
        found, _ = placed(world, *[MoveFailed("it is restarting")] * 999)
        with pytest.raises(errors.WaitTimeoutError, match="it is restarting"):
            await found.place(world.region, TAKER, 0.05)

        class Slow(FakeMoves):
            async def move(self, region: int, taker: int) -> int:
                await asyncio.sleep(10.0)
                return 1

        slow = Placements(world.core, Slow(), world.drains)
        with pytest.raises(errors.WaitTimeoutError, match=r"within 0\.05 s"):
            await slow.place(world.region, TAKER, 0.05)

    of(world, work)


def test_pieces_of_a_group_do_not_meet_where_a_home_has_no_room(world: World) -> None:
    """What counts is where the others will be, and not where they are made."""

    async def work() -> None:
        record = world.core.create_pieces(2 << 21, PieceLayout(2 << 20, Shape(2, 1)), GIVER)
        found, moves = placed(world, NoRoom("full"))
        homes = found.homes(record, GIVER)
        assert len(set(homes)) == 3
        for piece in record.pieces:
            world.core.seal(piece)
        piece = next(p for p, home in zip(record.pieces, homes, strict=True) if home == TAKER)
        world.core.server_registered(ServerInfo(8, "node 8", "127.0.0.1", 1, "name", "0"))
        world.add_region(8, n_blocks=90)  # it has the most
        await found.place(piece, TAKER, 10.0)
        assert [taker for _, taker in moves.asked] == [TAKER, 8]
        found.forget(record.region)

    of(world, work)


def test_a_planned_home_that_another_of_the_group_has_got_is_passed_over(world: World) -> None:
    """It stays where it was made, if that is free of the group."""

    async def work() -> None:
        record = world.core.create_pieces(1 << 21, PieceLayout(2 << 20, Shape(1, 1)), GIVER)
        found, moves = placed(world, NoRoom("full"))
        homes = dict(zip(record.pieces, found.homes(record, GIVER), strict=True))
        for piece in record.pieces:
            world.core.seal(piece)
        data, mirror = record.pieces
        found._meant[record.region] = homes = {data: TAKER, mirror: OTHER}
        await found.place(data, TAKER, 10.0)  # which has no room; the other has the mirror
        assert moves.asked == [(data, TAKER), (data, GIVER)]
        assert homes[data] == GIVER
        await found.place(mirror, OTHER, 10.0)
        assert moves.asked[2:] == [(mirror, OTHER)]
        found._meant[record.region] = {data: OTHER, mirror: OTHER}
        await found.place(mirror, OTHER, 10.0)
        assert moves.asked[3:] == [(mirror, TAKER)]

    of(world, work)


def test_a_home_that_takes_nothing_is_passed_over_in_the_end(world: World) -> None:
    async def work() -> None:
        found, moves = placed(world, *[MoveFailed("no answer")] * placements.FAILURES)
        await found.place(world.region, OTHER, 10.0)
        assert [taker for _, taker in moves.asked] == [*[OTHER] * placements.FAILURES, TAKER]

    of(world, work)

"""A home moves from one server to another: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.moves import moves, switches
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from tests.support.move_rig import DATA, GIVER, N_BLOCKS, OTHER, TAKER, World, run

# In the order of a move; a step of the giver or of the taker.
BEFORE_THE_JOURNAL = (
    *("home_blocks", "take_begin", "oldest_version", "stage_home", "take"),
    *("stage_records", "take_records", "take_seal"),
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(moves, "LAYER_BLOCKS", 8)
    monkeypatch.setattr(moves, "FEW_BLOCKS", 2)
    monkeypatch.setattr(moves, "FEW_RECORDS", 1)
    monkeypatch.setattr(moves, "RECORDS_AT_ONCE", 2)
    monkeypatch.setattr(moves, "PAUSE_S", 0.001)
    monkeypatch.setattr(switches, "PAUSE_S", 0.001)
    monkeypatch.setattr(switches, "PAUSE_MOST_S", 0.002)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def of(world: World, work: Callable[[], Any]) -> None:
    async def whole() -> None:
        try:
            for block in (3, 5, 35):  # a history of three versions
                await world.commit(block)
            await world.until_told()
            await work()
        finally:
            await world.close()

    run(whole)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.001)  # there is nothing to wait on


def told_at(world: World) -> list[tuple[int, int]]:
    """(server, home) of all that servers were told."""
    return [call[1:] for call in world.servers.calls if call[0] == "rehome"]


def test_a_home_moves_with_its_history(world: World) -> None:
    async def work() -> None:
        n_bytes = await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        versions = world.servers.homes[TAKER, world.region]
        assert sorted(versions) == [0, 1, 2, 3]
        assert versions[3] == world.newest()
        assert n_bytes >= 4096 * (len(DATA) + 2)
        counters = world.moves.counters()
        assert (counters.finished, counters.bytes) == (1, n_bytes)
        assert told_at(world)[:2] == [(TAKER, TAKER), (GIVER, TAKER)]
        record = world.core.record_of(world.region)
        assert record is not None
        assert record.term == 2
        assert world.moved == [(world.region, TAKER)]
        assert world.journal.load().givers == ()
        await world.check()

    of(world, work)


def test_and_back_in_later_terms(world: World) -> None:
    async def work() -> None:
        for n, taker in enumerate((TAKER, GIVER, OTHER, GIVER), 2):
            await world.moves.move(world.region, taker)
            record = world.core.record_of(world.region)
            assert record is not None
            assert (world.home(), record.term) == (taker, n)
            await world.check()

    of(world, work)


def test_where_it_is_already_nothing_is_done(world: World) -> None:
    async def work() -> None:
        assert await world.moves.move(world.region, GIVER) == 0
        assert world.moves.counters().finished == 0

    of(world, work)


def test_commits_go_on_in_the_middle_of_each_step(world: World) -> None:
    async def work() -> None:
        for n, step in enumerate(BEFORE_THE_JOURNAL[:-2]):
            world.servers.before[step] = [lambda n=n: world.commit(5 + n, 31 + n)]
        await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        assert world.log.newest(world.region) == 3 + len(BEFORE_THE_JOURNAL) - 2
        await world.check()

    of(world, work)


def test_a_block_that_changes_after_it_was_carried_is_carried_again(world: World) -> None:
    async def work() -> None:
        world.servers.before["stage_home"] = [
            lambda: None,
            lambda: world.commit(*range(3, 12)),  # the first of them are there
        ]
        await world.moves.move(world.region, TAKER)
        await world.check()

    of(world, work)


def n_calls(world: World, method: str) -> int:
    return sum(call[0] == method for call in world.servers.calls)


def test_the_giver_stages_the_next_layer_while_the_taker_takes_one(world: World) -> None:
    under_way: list[int] = []
    real = world.servers.take

    async def take(*arguments: Any) -> None:
        under_way.append(1)
        assert len(under_way) == 1, "two at a time: the later one might be overwritten"
        turn = min(n_calls(world, "take") + 2, 4)  # of 28 blocks: 8, 8, 8 and 4
        await until(lambda: n_calls(world, "stage_home") >= turn)
        await asyncio.sleep(0.01)
        assert n_calls(world, "stage_home") <= turn, "layers pile up"
        await real(*arguments)
        under_way.pop()

    world.servers.take = take  # type: ignore[method-assign]

    async def work() -> None:
        await world.moves.move(world.region, TAKER)
        assert n_calls(world, "take") > 2
        await world.check()

    of(world, work)


def test_a_take_that_fails_while_the_next_is_staged_leaves_neither(world: World) -> None:
    async def fail() -> None:
        await until(lambda: n_calls(world, "stage_home") == 2)
        raise RuntimeError("it is restarting")

    async def work() -> None:
        world.servers.before["take"] = [fail]
        with pytest.raises(MoveFailed, match="restarting"):
            await world.moves.move(world.region, TAKER)
        assert n_calls(world, "take") == 1
        await world.check()

    of(world, work)


def test_a_commit_that_comes_while_they_are_held_waits_and_is_made(world: World) -> None:
    waiting: list[asyncio.Task[Any]] = []

    async def commit() -> None:
        assert world.held.is_held([world.region])
        request = world.request(7, 8)
        waiting.append(asyncio.ensure_future(world.commits.commit(request)))
        await asyncio.sleep(0.01)
        assert not waiting[0].done()

    async def work() -> None:
        world.servers.before["take_seal"] = [commit]
        world.servers.after[f"rehome {TAKER}"] = [lambda: None]
        world.servers.before["rehome"] = [
            lambda: None,
            lambda: waiting[0].done() and pytest.fail("the giver had not heard"),
        ]
        await world.moves.move(world.region, TAKER)
        assert (await waiting[0]).versions == {world.region: 4}
        assert ("pull", TAKER, world.region) in world.servers.calls
        await world.check()

    of(world, work)


def test_what_takes_too_long_while_commits_are_held_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "HOLD_S", 0.05)

    async def work() -> None:
        world.servers.before["take_seal"] = [lambda: asyncio.sleep(10)]
        with pytest.raises(MoveFailed, match=r"did not come within 0\.05 s"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        await world.check()
        await world.moves.move(world.region, TAKER)
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Ray says that it is restarting"),
        errors.SnapshotExpired("not kept"),
        errors.OutOfMemoryError("no room"),
        errors.FreedError("it does not know the region"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_step_that_fails_costs_nothing_but_the_attempt(
    world: World, step: str, failure: Exception
) -> None:
    def fail() -> None:
        raise failure

    async def work() -> None:
        world.servers.before[step] = [fail]
        no_room = isinstance(failure, errors.OutOfMemoryError)
        with pytest.raises(MoveFailed) as failed:
            await world.moves.move(world.region, TAKER)
        # Where the giver has none, another taker would not help.
        assert isinstance(failed.value, NoRoom) == (no_room and not step.startswith("stage"))
        assert world.home() == GIVER
        await world.check()
        await world.moves.move(world.region, OTHER)
        assert world.home() == OTHER
        await world.check()

    of(world, work)


@pytest.mark.parametrize("room_blocks", [2, 1])
def test_a_full_giver_gives_in_small_layers(
    world: World, monkeypatch: pytest.MonkeyPatch, room_blocks: int
) -> None:
    """Else a full node could be neither drained nor relieved."""
    monkeypatch.setattr(moves, "LAYER_BLOCKS", 8)
    monkeypatch.setattr(moves, "LEAST_BLOCKS", 2)
    monkeypatch.setattr(moves, "ROUNDS", 1)
    stage, staged = world.servers.stage_home, []

    async def stage_home(
        giver: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        if (n_blocks := len(BitMap.deserialize(blocks))) > room_blocks:
            raise errors.OutOfMemoryError("no room for such a layer")
        staged.append(n_blocks)
        assert world.held.is_held([world.region]) == (sum(staged) > len(DATA))
        return await stage(giver, region, version, commit_id, blocks)

    monkeypatch.setattr(world.servers, "stage_home", stage_home)

    async def work() -> None:
        if room_blocks == 2:
            await world.moves.move(world.region, TAKER)
            assert world.home() == TAKER
            assert max(staged) == 2
        else:
            with pytest.raises(MoveFailed, match="no room for such a layer") as failed:
                await world.moves.move(world.region, TAKER)
            assert not isinstance(failed.value, NoRoom)  # another taker would not help
            monkeypatch.undo()
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_a_taker_that_is_drained_meanwhile_takes_nothing(world: World, step: str) -> None:
    """Whoever drained it may end it: it had nothing when that was done."""
    leaving: set[int] = set()

    async def work() -> None:
        world.moves._is_leaving = leaving.__contains__
        world.servers.before[step] = [lambda: leaving.add(TAKER)]
        with pytest.raises(MoveFailed, match="drained itself"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        await world.moves.move(world.region, OTHER)
        assert world.home() == OTHER
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_the_taker_is_restarted(world: World, step: str) -> None:
    async def work() -> None:
        world.servers.before[step] = [lambda: world.servers.restart(TAKER)]
        early = step in ("home_blocks", "take_begin")
        if early:
            await world.moves.move(world.region, TAKER)
        else:
            with pytest.raises(MoveFailed, match="no such attempt"):
                await world.moves.move(world.region, TAKER)
        assert world.home() == (TAKER if early else GIVER)
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_the_taker_is_lost(world: World, step: str) -> None:
    async def work() -> None:
        world.servers.before[step] = [lambda: world.lose(TAKER)]
        with pytest.raises(MoveFailed):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL[:-1])
def test_the_giver_is_lost(world: World, step: str) -> None:
    """Its regions are rebuilt as any: nothing of the move is in the way."""

    async def work() -> None:
        world.servers.before[step] = [lambda: world.lose(GIVER)]
        with pytest.raises(MoveFailed):
            await world.moves.move(world.region, TAKER)
        await asyncio.sleep(0.01)
        assert world.home() == GIVER  # which the rebuild changes
        assert not world.held.is_held([world.region])
        assert not world.servers.attempts
        record = world.core.record_of(world.region)
        assert record is not None
        assert record.term == 1

    of(world, work)


def test_the_giver_is_lost_when_the_taker_has_everything(world: World) -> None:
    async def work() -> None:
        world.servers.after["take_seal"] = [lambda: world.lose(GIVER)]
        await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        await world.check()

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_it_is_freed_meanwhile(world: World, step: str) -> None:
    async def work() -> None:
        world.servers.before[step] = [world.free]
        with pytest.raises(MoveFailed):
            await world.moves.move(world.region, TAKER)
        await asyncio.sleep(0.01)
        assert not world.held.is_held([world.region])
        assert not world.servers.attempts

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_it_is_cancelled(world: World, step: str) -> None:
    async def work() -> None:
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        world.servers.before[step] = [moving.cancel]
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert world.home() == GIVER
        await world.check()

    of(world, work)


def test_cancelled_after_the_journal_it_ends_by_itself(world: World) -> None:
    async def work() -> None:
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        world.servers.before["rehome"] = [moving.cancel]
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert world.home() == TAKER
        await world.unheard.moving.until_over(world.region, 5.0)
        await world.check()

    of(world, work)


def test_another_home_is_written_meanwhile(world: World) -> None:
    """By a rebuild, say. It is not overwritten."""

    def other() -> None:
        record = world.core.rehome(world.region, OTHER)
        world.log.rehome(world.region, OTHER)
        world.journal.rehome(record, 3)
        world.servers.homes[OTHER, world.region] = world.servers.homes.pop((GIVER, world.region))

    async def work() -> None:
        world.servers.after["take_seal"] = [other]
        with pytest.raises(MoveFailed, match="another home"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == OTHER
        await world.check()

    of(world, work)


def test_a_full_journal_changes_nothing(world: World) -> None:
    rehome = world.journal.rehome

    def full(*_: object) -> None:
        world.journal.rehome = rehome  # type: ignore[method-assign]
        raise errors.JournalFullError("The disk is full.")

    async def work() -> None:
        world.journal.rehome = full  # type: ignore[assignment, method-assign]
        with pytest.raises(MoveFailed, match="full"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        await world.check()

    of(world, work)


def test_who_cannot_be_told_yet_is_told_again(world: World) -> None:
    def fail() -> None:
        raise RuntimeError("it is restarting")

    async def work() -> None:
        world.servers.before["rehome"] = [fail, fail, lambda: None, fail, fail]
        await world.moves.move(world.region, TAKER)
        told = [server_id for server_id, _ in told_at(world)]
        assert told[:6] == [TAKER, TAKER, TAKER, GIVER, GIVER, GIVER]
        await world.check()

    of(world, work)


@pytest.mark.parametrize("lost", [False, True])
def test_a_taker_that_has_nothing_gives_it_back(world: World, lost: bool) -> None:
    """The giver has not heard: it has everything, and no commit was made."""

    def vanish() -> None:
        world.servers.attempts.clear()
        if lost:
            world.lose(TAKER)

    async def work() -> None:
        world.servers.before["rehome"] = [vanish]
        with pytest.raises(MoveFailed, match="before the giver had heard"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        record = world.core.record_of(world.region)
        assert record is not None
        assert record.term == 3
        await world.check()
        await world.moves.move(world.region, OTHER)
        await world.check()

    of(world, work)


def test_a_taker_that_is_lost_before_the_giver_has_heard(world: World) -> None:
    def fail() -> None:
        world.lose(TAKER)
        raise RuntimeError("it is restarting")

    async def work() -> None:
        world.servers.before["rehome"] = [lambda: None, fail]
        with pytest.raises(MoveFailed, match="before the giver had heard"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        await world.check()

    of(world, work)


def test_a_giver_that_is_lost_need_not_hear(world: World) -> None:
    async def work() -> None:
        world.servers.before["rehome"] = [lambda: None, lambda: world.lose(GIVER)]
        await world.moves.move(world.region, TAKER)
        assert world.home() == TAKER
        assert world.journal.load().givers == ()
        await world.check()

    of(world, work)


@pytest.mark.parametrize("n_heard", [0, 1, 2])
def test_the_registry_is_killed_after_the_journal(world: World, n_heard: int) -> None:
    """The next one tells both again, and holds commits back until then."""
    forever = asyncio.sleep

    async def work() -> None:
        hooks: list[Callable[[], Any]] = [lambda: None] * n_heard
        world.servers.before["rehome"] = [*hooks, lambda: forever(1000)]
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        await until(lambda: len(told_at(world)) > n_heard)
        moving.cancel()
        await world.close()
        world.servers.calls.clear()
        world.restart()
        assert world.home() == TAKER
        if n_heard < 2:
            assert world.held.is_held([world.region])
            assert world.region in world.unheard
            made = await world.commit(6)
            assert made.versions == {world.region: 4}
            assert told_at(world)[:2] == [(TAKER, TAKER), (GIVER, TAKER)]
        world.servers.layers.clear()  # of which the giver asks what became of them
        await world.check()

    of(world, work)


@pytest.mark.parametrize("lost", [False, True])
def test_the_registry_is_killed_before_the_giver_has_heard_that_it_is_the_home_again(
    world: World, lost: bool
) -> None:
    """A late word of the term before would still end its home: the next registry holds commits
    back too, until the giver has heard."""

    def vanish() -> None:
        world.servers.attempts.clear()
        if lost:
            world.lose(TAKER)

    async def work() -> None:
        world.servers.before["rehome"] = [vanish, lambda: asyncio.sleep(1000)]
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        await until(lambda: told_at(world)[-1:] == [(GIVER, GIVER)])
        moving.cancel()
        await world.close()
        assert world.journal.load().givers == ((world.region, GIVER),)
        world.servers.calls.clear()
        world.restart()
        assert world.home() == GIVER
        assert world.held.is_held([world.region])
        made = await world.commit(6)
        assert made.versions == {world.region: 4}
        assert told_at(world)[:1] == [(GIVER, GIVER)]
        await until(lambda: not world.journal.load().givers)
        record = world.core.record_of(world.region)
        assert record is not None
        assert record.term == 3
        world.servers.layers.clear()  # of which the giver asks what became of them
        await world.check()

    of(world, work)


def test_what_goes_back_to_a_giver_that_has_heard_is_not_there(world: World) -> None:
    """It heard of the taker, which was lost then: nobody has it, and commits are not held."""

    def lose() -> None:
        del world.servers.homes[GIVER, world.region]
        world.lose(TAKER)
        raise RuntimeError("its answer is lost")

    async def work() -> None:
        world.servers.before["rehome"] = [lambda: None, lose]
        with pytest.raises(MoveFailed, match="before the giver had heard"):
            await world.moves.move(world.region, TAKER)
        assert world.home() == GIVER
        assert world.journal.load().givers == ()
        assert not world.held.is_held([world.region])
        await until(lambda: world.again == [world.region])  # whether it is to be rebuilt

    of(world, work)


@pytest.mark.parametrize("step", BEFORE_THE_JOURNAL)
def test_the_registry_is_killed_before_the_journal(world: World, step: str) -> None:
    async def work() -> None:
        world.servers.before[step] = [lambda: asyncio.sleep(1000)]
        moving = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        await until(lambda: any(call[0] == step for call in world.servers.calls))
        moving.cancel()
        world.servers.before.clear()
        await world.close()
        world.restart()
        assert world.home() == GIVER
        world.servers.layers.clear()
        world.servers.attempts.clear()  # which the taker drops: nobody asks for it
        await world.check()

    of(world, work)


def test_lost_blocks_stay_lost(world: World) -> None:
    lost = LostBlocks(7, N_BLOCKS, bytes(BitMap([3, 4]).serialize()), "Its home was lost", "")

    async def work() -> None:
        world.losses.update({world.region: lost})
        await world.moves.move(world.region, TAKER)
        (begin,) = [call for call in world.servers.calls if call[0] == "take_begin"]
        assert BitMap.deserialize(begin[3]) == BitMap([3, 4])
        assert world.journal.load().lacking == ((world.region, lost),)

    of(world, work)


def test_what_is_on_its_way_is_no_commit_that_nobody_made(world: World) -> None:
    asked: list[int] = []

    async def ask() -> None:
        for (_, commit_id), _ in list(world.servers.layers.items()):
            with pytest.raises(errors.ServerUnavailableError, match="next home"):
                world.moves.check_outcome(commit_id)
            asked.append(commit_id)
        world.moves.check_outcome(7)

    async def work() -> None:
        world.servers.before["take"] = [ask]
        await world.moves.move(world.region, TAKER)
        assert asked
        await asyncio.sleep(0.01)
        for commit_id in asked:
            world.moves.check_outcome(commit_id)

    of(world, work)


def test_a_region_moves_once_at_a_time(world: World) -> None:
    async def work() -> None:
        first = asyncio.ensure_future(world.moves.move(world.region, TAKER))
        await asyncio.sleep(0)
        with pytest.raises(MoveFailed, match="moves already"):
            await world.moves.move(world.region, OTHER)
        await first
        await world.check()

    of(world, work)


def test_the_blocks_of_two_of_a_giver_are_copied_at_once(world: World) -> None:
    most = 0
    n_taken: Counter[int] = Counter()
    real = world.servers.take

    async def take(taker: int, region: int, *arguments: Any) -> None:
        nonlocal most
        copied = [each for _, each in world.servers.attempts if n_taken[each] < 3]
        most = max(most, len(copied))
        await asyncio.sleep(0.005)
        await real(taker, region, *arguments)
        n_taken[region] += 1  # of 26 blocks: 8, 8 and 8; the others go while commits are held

    async def work() -> None:
        world.servers.take = take  # type: ignore[method-assign]
        regions = [world.add_region() for _ in range(6)]
        await asyncio.gather(*(world.moves.move(region, TAKER) for region in regions))
        assert most == 2

    of(world, work)


def test_of_one_that_waits_for_its_turn_the_taker_hears_nothing(world: World) -> None:
    """Of what it has prepared for the region, by a rebuild, nothing is dropped."""

    async def work() -> None:
        regions = [world.add_region() for _ in range(3)]
        world.servers.before["home_blocks"] = [lambda: asyncio.sleep(1000)] * 2
        moving = [asyncio.ensure_future(world.moves.move(each, TAKER)) for each in regions]
        await until(lambda: n_calls(world, "home_blocks") == 2)
        for each in moving:
            each.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert n_calls(world, "home_blocks") == 2
        assert n_calls(world, "take_drop") == 0

    of(world, work)


def test_while_two_are_at_their_end_the_next_are_copied(world: World) -> None:
    async def next_ones() -> None:
        await until(lambda: n_calls(world, "take_begin") == 4)

    async def work() -> None:
        regions = [world.add_region() for _ in range(4)]
        world.servers.before["take_seal"] = [next_ones, next_ones]
        await asyncio.gather(*(world.moves.move(region, TAKER) for region in regions))

    of(world, work)


def test_commits_that_never_end_do_not_hold_it_up_for_ever(world: World) -> None:
    """In the end they wait for the last of it, as they wait for the switch."""

    waiting: list[asyncio.Task[Any]] = []

    async def commit() -> None:
        made = asyncio.ensure_future(world.commit(*range(3, 20)))
        if world.held.is_held([world.region]):
            waiting.append(made)
        else:
            await made

    async def work() -> None:
        world.servers.before["take"] = [commit] * 1000
        await world.moves.move(world.region, TAKER)
        world.servers.before.clear()
        for made in waiting[:1]:  # the others wrote the same blocks
            await made
        await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting
        await world.check()

    of(world, work)

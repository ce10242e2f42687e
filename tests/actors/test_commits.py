"""Commits carried out: against homes that are slow, full, restarting, lost, or deaf."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native.client import PC_ERR_HOME_LOST, PC_ERR_NO_MEMORY, PC_ERR_NO_SPACE
from clamor_ray._protocol.messages import CommitRequest, Publication, Write
from clamor_ray._protocol.refusals import NO_ROOM
from clamor_ray.actors.commits import commits as commits_module
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.committed import Limits
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.page_server.rebuilt_homes import layer_error

HERE, THERE, ELSEWHERE = 0xA, 0xB, 0xC


class FakeHomes:
    """Regions 1 and 2 live at HERE, 3 at THERE; calls do what a test says."""

    def __init__(self) -> None:
        self.homes = {1: (HERE,), 2: (HERE,), 3: (THERE,)}
        self.lost: dict[int, str] = {}
        self.pulled: list[tuple[int, int, int]] = []
        self.dropped: list[tuple[int, int, list[int]]] = []
        self.told: list[tuple[int, list[Publication]]] = []
        self.pull_does: Callable[[int], Awaitable[None]] | None = None
        self.publish_fails = 0
        self.examined: list[int] = []
        self.dies_when_examined = False
        self.oldest: int | Exception = 0
        self.asked_oldest: list[tuple[int, int]] = []

    def of(self, region: int) -> tuple[int, ...]:
        return self.homes.get(region, ())

    def why_lost(self, server_id: int) -> str | None:
        return self.lost.get(server_id)

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        self.pulled.append((home, commit_id, write.region))
        if self.pull_does is not None:
            await self.pull_does(home)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        if self.publish_fails:
            self.publish_fails -= 1
            raise RuntimeError("it restarts")
        self.told.append((home, items))
        return [(item.region, item.version) for item in items]

    async def oldest_version(self, home: int, region: int) -> int:
        self.asked_oldest.append((home, region))
        if isinstance(self.oldest, Exception):
            raise self.oldest
        return self.oldest

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        self.dropped.append((home, commit_id, regions))

    async def examine(self, home: int) -> None:
        self.examined.append(home)
        if self.dies_when_examined:
            self.lost[home] = "its node is dead"


class World:
    def __init__(
        self, directory: Path, timeout_s: float = 2.0, restarted_s: float | None = None
    ) -> None:
        self.log, self.homes = CommitLog(), FakeHomes()
        self.journal = Journal(directory)
        for region, homes in self.homes.homes.items():
            self.log.open(region, homes)
        self.now_s = 0.0
        self.held = HeldCommits()
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        self.asked_room: list[tuple[int, int, tuple[int, ...]]] = []
        self.commits = Commits(
            self.log,
            self.journal,
            self.homes,
            timeout_s,
            lambda: self.now_s,
            restarted_s=restarted_s,
            held=self.held,
            make_room=self._make_room,
        )

    async def _make_room(self, server_id: int, needed_bytes: int, stay: Collection[int]) -> bool:
        self.asked_room.append((server_id, needed_bytes, tuple(stay)))
        return False if self.make_room is None else await self.make_room()

    def versions(self) -> list[int]:
        return [self.log.newest(region) for region in (1, 2, 3)]

    def written(self) -> int:
        return len(self.journal.load().entries)


def request(commit_id: int, *regions: int, base: int = 0, **how: Any) -> CommitRequest:
    blocks = BitMap([3]).serialize()
    writes = tuple(Write(region, base, 1, blocks, 8192, HERE) for region in regions)
    return CommitRequest(commit_id, writes, **how)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.005)  # there is nothing to wait on


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits_module, "TICK_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    def runner(work: Callable[[World], Awaitable[None]], **how: Any) -> None:
        async def whole() -> None:
            world = World(tmp_path / "journal", **how)
            try:
                await asyncio.wait_for(work(world), 20)
            finally:
                await world.commits.close()
                world.journal.close()

        asyncio.run(whole())

    return runner


def test_a_commit_on_the_writers_node_never_waits(run) -> None:
    async def work(world: World) -> None:
        commit = world.commits.commit(request(7, 1, 2))
        with pytest.raises(StopIteration) as done:
            commit.send(None)  # one step, to the end
        assert done.value.value.versions == {1: 1, 2: 1}
        assert world.written() == 2
        assert world.homes.pulled == []
        # Its homes are told all the same, and asked no more once they know.
        await until(lambda: not world.log.homes_behind())
        assert world.homes.told == [(HERE, [Publication(1, 1, 7), Publication(2, 1, 7)])]
        assert set(world.journal.load().acknowledged) == {(1, HERE, 1), (2, HERE, 1)}

    run(work)


def test_a_home_that_is_silent_is_named_with_the_cause(run) -> None:
    """As one that is stopped: it does not answer, and is not dead."""

    async def silent(home: int) -> None:
        await asyncio.sleep(60)

    async def work(world: World) -> None:
        world.homes.pull_does = silent
        with pytest.raises(errors.WaitTimeoutError) as caught:
            await world.commits.commit(request(7, 3))
        text = caught.value.message
        assert "variable 3" in text
        assert hex(THERE) in text
        assert "stopped" in text
        assert ": ." not in text
        assert world.written() == 0

    run(work, timeout_s=1.0)


@pytest.mark.parametrize("failure", [asyncio.TimeoutError(), ConnectionResetError(), OSError()])
def test_a_cause_without_a_text_is_named_by_its_type(run, failure: Exception) -> None:
    async def fail(home: int) -> None:
        raise failure

    async def work(world: World) -> None:
        world.homes.pull_does = fail
        with pytest.raises(errors.WaitTimeoutError, match=type(failure).__name__):
            await world.commits.commit(request(7, 3))

    run(work, timeout_s=0.5)


def test_a_version_that_its_home_keeps_no_longer(run) -> None:
    async def work(world: World) -> None:
        await world.commits.check_kept(1, 0)
        world.homes.oldest = 5
        with pytest.raises(errors.SnapshotExpired, match=r"version 4 of variable 1 .* version 5"):
            await world.commits.check_kept(1, 4)
        await world.commits.check_kept(1, 5)
        world.homes.oldest = ConnectionResetError()  # that says nothing of the version
        await world.commits.check_kept(1, 0)
        assert world.homes.asked_oldest == [(HERE, 1)] * 4

    run(work)


def two_homes(commit_id: int) -> CommitRequest:
    """Region 1, homed at HERE, and 3, at THERE; written somewhere else."""
    blocks = BitMap([3]).serialize()
    return CommitRequest(
        commit_id, tuple(Write(region, 0, 1, blocks, 8192, ELSEWHERE) for region in (1, 3))
    )


class SlowBesideQuick:
    """THERE acknowledges at once; HERE does when it is let. Then THERE is asked once more."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slow = asyncio.Event()
        self.asked = 0

    async def __call__(self, home: int) -> None:
        if home == HERE:
            await self.slow.wait()
            return
        self.asked += 1
        if self.asked > 1:
            await self.again()

    async def again(self) -> None:
        """It has the layer."""


def test_a_home_that_died_after_its_answer_is_noticed_before_the_decision(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "FRESH_S", 0.05, raising=False)

    class Died(SlowBesideQuick):
        async def again(self) -> None:
            self.world.homes.lost[THERE] = "its node is dead"  # only who calls it finds out
            raise errors.HomeLostError("The page server is gone.")

    async def work(world: World) -> None:
        world.homes.pull_does = pulls = Died(world)
        commit = asyncio.ensure_future(world.commits.commit(two_homes(7)))
        await until(lambda: pulls.asked == 1)
        await asyncio.sleep(0.1)
        pulls.slow.set()
        with pytest.raises(errors.HomeLostError):
            await commit
        assert world.written() == 0
        assert world.versions() == [0, 0, 0]

    run(work)


def test_an_old_answer_is_asked_for_again_and_a_young_one_is_not(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "FRESH_S", 0.05, raising=False)

    async def work(world: World) -> None:
        world.homes.pull_does = pulls = SlowBesideQuick(world)
        commit = asyncio.ensure_future(world.commits.commit(two_homes(7)))
        await until(lambda: pulls.asked == 1)
        await asyncio.sleep(0.1)
        pulls.slow.set()
        assert (await commit).versions == {1: 1, 3: 1}
        assert world.homes.pulled.count((THERE, 7, 3)) >= 2
        monkeypatch.setattr(commits_module, "FRESH_S", 60.0)
        world.homes.pull_does = None
        world.homes.pulled.clear()
        blocks = BitMap([4]).serialize()
        await world.commits.commit(CommitRequest(8, (Write(3, 1, 1, blocks, 8192, HERE),)))
        assert world.homes.pulled == [(THERE, 8, 3)]

    run(work)


def test_homes_that_all_answer_slowly_are_asked_once_more_and_no_oftener(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one answers, the others' words grow old: that must not go on for ever."""
    monkeypatch.setattr(commits_module, "FRESH_S", 0.02)
    takes_s = {HERE: 0.06, THERE: 0.12}

    async def work(world: World) -> None:
        world.homes.pull_does = lambda home: asyncio.sleep(takes_s[home])
        assert (await world.commits.commit(two_homes(7))).versions == {1: 1, 3: 1}
        assert world.homes.pulled == [(HERE, 7, 1), (THERE, 7, 3), (HERE, 7, 1)]

    run(work, timeout_s=2.0)


def test_one_that_does_not_answer_the_second_time_is_named_truly(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "FRESH_S", 0.05)

    class Stops(SlowBesideQuick):
        async def again(self) -> None:
            await asyncio.sleep(60)

    async def work(world: World) -> None:
        world.homes.pull_does = pulls = Stops(world)
        commit = asyncio.ensure_future(world.commits.commit(two_homes(7)))
        await until(lambda: pulls.asked == 1)
        await asyncio.sleep(0.1)
        pulls.slow.set()
        with pytest.raises(errors.WaitTimeoutError) as caught:
            await commit
        text = caught.value.message
        assert hex(THERE) in text
        assert "asked once more" in text
        assert "for 0 s" not in text
        assert world.written() == 0

    run(work, timeout_s=1.0)


def own_and_other(commit_id: int, **how: Any) -> CommitRequest:
    """Region 1, homed at the writer's node, and 3, at another."""
    return request(commit_id, 1, 3, **how)


def test_the_home_on_the_writers_node_is_asked_where_the_others_took_long(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died since its layer was staged, as any other home that had answered."""
    monkeypatch.setattr(commits_module, "FRESH_S", 0.05)

    async def work(world: World) -> None:
        async def pull(home: int) -> None:
            if home == THERE:
                await asyncio.sleep(0.1)
                return
            world.homes.lost[HERE] = "its node is dead"
            raise errors.HomeLostError("The page server is gone.")

        world.homes.pull_does = pull
        with pytest.raises(errors.HomeLostError):
            await world.commits.commit(own_and_other(7))
        assert world.homes.pulled == [(THERE, 7, 3), (HERE, 7, 1)]
        assert world.written() == 0

    run(work)


def test_a_layer_that_was_staged_long_ago_is_asked_for_on_the_writers_node(run) -> None:
    async def work(world: World) -> None:
        async def gone(home: int) -> None:
            raise layer_error(PC_ERR_HOME_LOST, 7, 1, HERE, THERE)

        world.homes.pull_does = gone
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.commit(request(7, 1, staged_ago_s=5.0))
        assert world.homes.pulled == [(HERE, 7, 1)]
        assert world.written() == 0
        world.homes.pull_does = None
        assert (await world.commits.commit(request(8, 1, staged_ago_s=5.0))).versions == {1: 1}
        assert world.homes.dropped == []  # its writer says what becomes of it

    run(work)


@pytest.mark.parametrize(
    ("restarted_ago_s", "timeout_s", "asked"),
    [(0.0, 0.0, True), (15.0, 0.0, True), (100.0, 0.0, False), (100.0, 200.0, True)],
)
def test_what_the_registry_before_was_sent_is_never_fresh(
    run, restarted_ago_s: float, timeout_s: float, asked: bool
) -> None:
    """Ray sends it again as it was: what it says of its age was true when it was sent first."""

    async def work(world: World) -> None:
        sent = request(7, 1, staged_ago_s=0.0, timeout_s=timeout_s)
        assert (await world.commits.commit(sent)).versions == {1: 1}
        assert world.homes.pulled == ([(HERE, 7, 1)] if asked else [])

    run(work, timeout_s=10.0, restarted_s=time.monotonic() - restarted_ago_s)


def test_a_home_that_died_with_what_the_registry_before_was_sent_fails_the_commit(run) -> None:
    async def work(world: World) -> None:
        async def gone(home: int) -> None:
            if home == HERE:
                raise layer_error(PC_ERR_HOME_LOST, 7, 1, HERE, THERE)

        world.homes.pull_does = gone
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.commit(own_and_other(7))
        assert world.homes.pulled == [(THERE, 7, 3), (HERE, 7, 1)]
        assert world.written() == 0

    run(work, restarted_s=time.monotonic())


def test_layers_of_other_homes_are_fetched_first(run) -> None:
    async def work(world: World) -> None:
        gate = asyncio.Event()
        world.homes.pull_does = lambda home: gate.wait()
        commit = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))
        await until(lambda: bool(world.homes.pulled))
        assert world.homes.pulled == [(THERE, 7, 3)]
        assert world.versions() == [0, 0, 0]
        # A second call with the same id, and a question, wait for the same answer.
        again = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))
        outcome = asyncio.ensure_future(world.commits.outcome(7))
        await asyncio.sleep(0.05)
        assert not (commit.done())
        assert not (again.done())
        assert not (outcome.done())
        gate.set()
        assert (await commit).versions == (await again).versions == await outcome == {1: 1, 3: 1}
        assert await world.commits.commit(request(7, 1, 3)) == await commit
        assert world.versions() == [1, 0, 1]
        assert len(world.homes.pulled) == 1
        assert world.written() == 2

    run(work)


def test_commit_during_fetch_wins(run) -> None:
    async def work(world: World) -> None:
        gate = asyncio.Event()
        world.homes.pull_does = lambda home: gate.wait()
        slow = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))
        await until(lambda: bool(world.homes.pulled))
        await world.commits.commit(request(8, 1))
        gate.set()
        with pytest.raises(errors.CommitConflict):
            await slow
        assert world.versions() == [1, 0, 0]
        await until(lambda: world.homes.dropped == [(THERE, 7, [3])])

    run(work)


def moved(world: World, region: int, to: int) -> None:
    """A switch, while the region's commits are held."""
    world.held.hold(region)
    world.homes.homes[region] = (to,)
    world.log.rehome(region, to)
    world.held.release(region)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_home_that_moves_during_the_fetch_keeps_no_layer(run, is_refused: bool) -> None:
    async def work(world: World) -> None:
        gate = asyncio.Event()
        world.homes.pull_does = lambda home: gate.wait()
        slow = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))
        await until(lambda: bool(world.homes.pulled))
        moved(world, 3, ELSEWHERE)
        if is_refused:
            await world.commits.commit(request(8, 1))
        gate.set()
        if is_refused:
            with pytest.raises(errors.CommitConflict):
                await slow
        else:
            assert (await slow).versions == {1: 1, 3: 1}
            assert [home for home, _, _ in world.homes.pulled] == [THERE, ELSEWHERE]
        await until(lambda: (THERE, 7, [3]) in world.homes.dropped)
        assert is_refused or len(world.homes.dropped) == 1  # the home of now needs its layer

    run(work)


def test_a_conflict_that_is_there_already_ships_nothing(run) -> None:
    async def work(world: World) -> None:
        world.homes.homes[1] = (THERE,)
        world.commits.may_commit(request(7, 1))
        await world.commits.commit(request(8, 1))
        world.homes.pulled.clear()
        with pytest.raises(errors.CommitConflict):
            world.commits.may_commit(request(7, 1))
        with pytest.raises(errors.CommitConflict):
            await world.commits.commit(request(7, 1))
        assert world.homes.pulled == []
        world.commits.may_commit(request(8, 1))  # it was made: no conflict with itself

    run(work)


@pytest.mark.parametrize("shortage", NO_ROOM)
def test_a_full_home_leaves_the_transaction_open(run, shortage: type[errors.ClamorError]) -> None:
    async def work(world: World) -> None:
        async def full(home: int) -> None:
            raise shortage("There is no room.")

        world.homes.pull_does = full
        with pytest.raises(shortage):
            await world.commits.commit(request(7, 1, 3))
        assert len(world.homes.pulled) == 1  # it says so at once
        assert world.versions() == [0, 0, 0]
        assert world.written() == 0
        assert world.homes.dropped == []
        world.homes.pull_does = None
        assert (await world.commits.commit(request(7, 1, 3))).versions == {1: 1, 3: 1}

    run(work)


def test_a_full_home_gives_other_homes_away(run) -> None:
    """And the commit goes on."""

    async def work(world: World) -> None:
        full = True

        async def pull(home: int) -> None:
            if full:
                raise errors.OutOfMemoryError("There is no room.")

        async def make_room() -> bool:
            nonlocal full
            assert len(world.homes.pulled) == 1
            full = False
            return True

        world.homes.pull_does, world.make_room = pull, make_room
        assert (await world.commits.commit(request(7, 1, 3))).versions == {1: 1, 3: 1}
        assert world.asked_room == [(THERE, 8192, (3,))]
        assert [each[0] for each in world.homes.pulled] == [THERE, THERE]

    run(work)


@pytest.mark.parametrize("why", ["it is not enough", "it takes too long", "no descriptors"])
def test_where_no_room_is_made_the_error_is_as_before(run, why: str) -> None:
    async def work(world: World) -> None:
        shortage = errors.OutOfMemoryError("There is no room.")

        async def pull(home: int) -> None:
            raise errors.DescriptorLimitError("There are none.") if "descr" in why else shortage

        async def make_room() -> bool:
            await asyncio.sleep(0 if "enough" in why else 60)
            return True

        world.homes.pull_does, world.make_room = pull, make_room
        expected = errors.DescriptorLimitError if "descr" in why else errors.OutOfMemoryError
        with pytest.raises(expected):
            await world.commits.commit(request(7, 1, 3, timeout_s=0.5))
        assert len(world.asked_room) == ("descr" not in why)
        assert world.versions() == [0, 0, 0]
        assert world.written() == 0
        world.homes.pull_does = None
        assert (await world.commits.commit(request(7, 1, 3))).versions == {1: 1, 3: 1}

    run(work)


def test_a_layer_that_is_gone_is_no_lost_home(run) -> None:
    """Its writer's node lost it, page server and keeper together; the writer can stage it again."""
    gone = layer_error(PC_ERR_HOME_LOST, 1, 3, HERE, THERE)
    assert type(gone) is errors.CommitAbortedError
    assert "variable 3" in str(gone)
    assert "0xa" in str(gone)
    assert type(layer_error(PC_ERR_NO_MEMORY, 1, 3, HERE, THERE)) is errors.OutOfMemoryError
    full = layer_error(PC_ERR_NO_SPACE, 1, 3, HERE, THERE)
    assert type(full) is errors.NoSpaceError
    assert "the disk of its CLAMOR_SPILL_DIR" in full.message

    async def work(world: World) -> None:
        async def never(home: int) -> None:
            raise gone

        world.homes.pull_does = never
        with pytest.raises(errors.CommitAbortedError, match="staged, ended together"):
            await world.commits.commit(request(1, 3))
        assert world.homes.pulled == [(THERE, 1, 3)]  # not asked again: it will not come back
        assert world.versions() == [0, 0, 0]
        assert world.written() == 0
        world.homes.pull_does = None
        assert (await world.commits.commit(request(2, 3))).versions == {3: 1}

    run(work)


def test_a_home_that_restarts_is_tried_again(run) -> None:
    async def work(world: World) -> None:
        async def restarts(home: int) -> None:
            if len(world.homes.pulled) < 3:
                raise errors.WaitTimeoutError("Not now.")

        world.homes.pull_does = restarts
        assert (await world.commits.commit(request(7, 3))).versions == {3: 1}
        assert len(world.homes.pulled) == 3

    run(work)


@pytest.mark.parametrize("lost", [False, True])
def test_a_home_that_does_not_answer(run, lost: bool) -> None:
    async def work(world: World) -> None:
        world.homes.pull_does = lambda home: asyncio.Event().wait()
        world.homes.dies_when_examined = lost
        expected = errors.HomeLostError if lost else errors.WaitTimeoutError
        with pytest.raises(expected, match="dead" if lost else "has not answered for"):
            await world.commits.commit(request(7, 3, timeout_s=0.2))
        assert world.homes.examined == [THERE]
        assert world.versions() == [0, 0, 0]
        if lost:
            with pytest.raises(errors.HomeLostError):
                world.commits.may_commit(request(8, 1, 3))

    run(work)


@pytest.mark.parametrize("silent", [True, False])
def test_a_home_that_is_lost_is_not_waited_for(
    run, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(commits_module, "LOOK_S", 0.01)

    async def work(world: World) -> None:
        async def fails(home: int) -> None:
            if silent:
                await asyncio.Event().wait()
            raise RuntimeError("it cannot be reached")

        world.homes.pull_does = fails
        world.homes.dies_when_examined = True
        with pytest.raises(errors.HomeLostError, match="dead"):
            # For so long nobody waits here: this test would end before.
            await world.commits.commit(request(7, 3, timeout_s=3600.0))
        assert world.homes.examined == [THERE]
        assert len(world.homes.pulled) == 1

    run(work)


def test_a_question_before_the_commit_forbids_it(run) -> None:
    async def work(world: World) -> None:
        assert await world.commits.outcome(7) == {}
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.commit(request(7, 1))
        assert [commit_id for commit_id, _ in world.journal.load().outcomes] == [7]

    run(work)


def test_a_question_while_a_commit_fails_forbids_the_next_try(run) -> None:
    async def work(world: World) -> None:
        gate = asyncio.Event()

        async def full(home: int) -> None:
            await gate.wait()
            raise errors.OutOfMemoryError("There is no room.")

        world.homes.pull_does = full
        commit = asyncio.ensure_future(world.commits.commit(request(7, 3)))
        await until(lambda: bool(world.homes.pulled))
        outcome = asyncio.ensure_future(world.commits.outcome(7))
        await asyncio.sleep(0.02)
        gate.set()
        assert await outcome == {}
        with pytest.raises(errors.OutOfMemoryError):
            await commit
        with pytest.raises(errors.CommitAbortedError):
            await world.commits.commit(request(7, 3))

    run(work)


def test_a_full_journal_changes_nothing(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        def full(*_: object) -> None:
            raise errors.JournalFullError("The disk is full.")

        with monkeypatch.context() as context:
            context.setattr(world.journal, "commit", full)
            context.setattr(world.journal, "abort", full)
            with pytest.raises(errors.JournalFullError):
                await world.commits.commit(request(7, 1))
            with pytest.raises(errors.JournalFullError):
                await world.commits.outcome(8)
        assert world.versions() == [0, 0, 0]
        assert (await world.commits.commit(request(7, 1))).versions == {1: 1}
        assert (await world.commits.commit(request(8, 2))).versions == {2: 1}

    run(work)


def test_a_home_is_told_until_it_knows(run) -> None:
    async def work(world: World) -> None:
        world.homes.publish_fails = 2
        for base in range(5):
            await world.commits.commit(request(10 + base, 1, base=base))
        await until(lambda: not world.log.homes_behind())
        ((home, items),) = world.homes.told  # one batch
        assert home == HERE
        assert [item.version for item in items] == [1, 2, 3, 4, 5]
        assert world.homes.examined == [HERE, HERE]

    run(work)


def test_a_lost_home_is_told_no_more(run) -> None:
    async def work(world: World) -> None:
        world.homes.publish_fails = 1000
        await world.commits.commit(request(7, 1))
        await until(lambda: bool(world.homes.examined))
        world.homes.lost[HERE] = "gone"
        await until(lambda: not world.commits._telling)

    run(work)


def test_what_is_beyond_the_limits_leaves_the_journal(run) -> None:
    async def work(world: World) -> None:
        world.log._limits = Limits(max_commits=3, max_outcomes=2, outcome_s=10.0)
        for base in range(10):
            await world.commits.commit(request(10 + base, 1, base=base))
        await until(lambda: world.written() == 3)
        assert len(world.journal.load().outcomes) == 10  # young
        world.now_s = 100.0
        await world.commits.commit(request(99, 1, base=10))
        await until(lambda: len(world.journal.load().outcomes) == 2)

    run(work)


def test_a_commit_to_what_moves_waits_and_goes_to_the_new_home(run) -> None:
    """Its layer was staged at the giver, or pulled by it: the taker has neither."""

    async def work(world: World) -> None:
        world.held.hold(1)
        waiting = [
            asyncio.ensure_future(world.commits.commit(request(7, 1))),
            asyncio.ensure_future(world.commits.commit(request(8, 1, 3, base=0))),
        ]
        await asyncio.sleep(0.05)
        assert world.versions() == [0, 0, 0]
        assert await world.commits.commit(request(9, 2))  # another region's goes on
        world.homes.homes[1] = (ELSEWHERE,)
        world.log.rehome(1, ELSEWHERE)
        world.held.release(1)
        assert (await waiting[0]).versions == {1: 1}
        with pytest.raises(errors.CommitConflict):  # it wrote the same
            await waiting[1]
        assert (ELSEWHERE, 7, 1) in world.homes.pulled
        assert world.versions() == [1, 1, 0]

    run(work)


def test_a_commit_that_pulls_when_its_home_begins_to_move_waits_too(run) -> None:
    async def work(world: World) -> None:
        async def hold(home: int) -> None:
            world.homes.pull_does = None
            world.held.hold(3)

        world.homes.pull_does = hold
        waiting = asyncio.ensure_future(world.commits.commit(request(7, 3)))
        await asyncio.sleep(0.05)
        assert world.versions() == [0, 0, 0]
        world.held.release(3)
        assert (await waiting).versions == {3: 1}
        assert {home for home, _, _ in world.homes.pulled} == {THERE}

    run(work)


def test_a_move_that_takes_too_long_leaves_the_transaction_open(run) -> None:
    async def work(world: World) -> None:
        world.held.hold(1)
        with pytest.raises(errors.WaitTimeoutError, match="home of variable 1 moves") as failure:
            await world.commits.commit(request(7, 1, timeout_s=0.1))
        assert "commit again" in failure.value.hint
        world.held.release(1)
        assert (await world.commits.commit(request(7, 1))).versions == {1: 1}

    run(work)


def test_a_home_is_told_at_once_where_somebody_waits_for_it(run, monkeypatch) -> None:
    monkeypatch.setattr(commits_module, "TICK_S", 60.0)

    async def work(world: World) -> None:
        await world.commits.commit(request(7, 1))
        assert world.log.settled(1) == 0
        await world.commits.tell_now(HERE)
        assert world.log.settled(1) == 1
        await world.commits.tell_now(HERE)
        assert len(world.homes.told) == 1

    run(work)

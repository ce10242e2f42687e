"""In which order a lost home's regions get another one: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    CommitRequest,
    Pinned,
    Publication,
    RegionRecord,
    Write,
)
from clamor_ray._protocol.source import CALL, ZEROS, Source
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.lost_homes import rebuilds
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.registry.registry_core import RegionState
from clamor_ray.actors.registry.versions import Versions
from tests.support.rebuild_rig import (
    ALL,
    HOME,
    MOST,
    N_BLOCKS,
    OTHER,
    PEER,
    WAIT_S,
    World,
    hold,
    lost_of,
    run,
)


def test_from_peers(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)], OTHER: [(1, BitMap([4, 5]))]}
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == PEER
        ((server, order, made),) = world.servers.orders
        assert (server, order.record.version, order.record.homes, made) == (PEER, 1, (PEER,), [])
        assert [take[0] for take in order.takes] == [OTHER]
        ((version, blocks),) = order.cached
        assert (version, BitMap.deserialize(blocks)) == (0, ALL - BitMap([4]))
        assert not order.from_source
        assert world.log.homes_behind() == ()  # it has all versions
        blocks = bytes(BitMap([1]).serialize())
        later = CommitRequest(10, (Write(world.region, 1, 1, blocks, 8192, OTHER),))
        world.log.apply(10, world.log.prepare(later), 0.0)
        assert world.log.unacknowledged(PEER) == [Publication(world.region, 2, 10)]
        await asyncio.sleep(0)
        assert ("rehome", PEER, PEER) in world.servers.calls
        assert sorted(world.servers.dropped) == sorted(take[1] for take in order.takes)
        world.check()

    run(work)


def test_the_journal_knows_it_before_the_servers(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rehome"] = [world.check]
        world.lose(HOME)
        assert await world.settle()
        assert not world.servers.before["rehome"]
        assert world.journal.load().rehomed == (world.region,)

    run(work)


@pytest.mark.parametrize("suspects", [{PEER}, {PEER, OTHER}])
def test_a_silent_server_is_no_new_home_while_there_is_another(
    suspects: set[int], world: World
) -> None:
    async def work() -> None:
        world.rebuilds._is_suspected = suspects.__contains__
        world.servers.cached = {PEER: [(1, ALL)], OTHER: [(1, BitMap([4]))]}
        world.lose(HOME)
        assert await world.settle()
        assert world.home() == (OTHER if OTHER not in suspects else PEER)
        assert world.rebuilds.lost_blocks(world.region) is None  # its blocks are used all the same

    run(work)


def test_what_is_lost_stays_lost(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(0, BitMap([4]))]}  # which the commit changed
        world.lose(HOME)
        for _ in range(2):
            with pytest.raises(errors.HomeLostError, match=r"10 of 10 blocks \(0-9\)") as caught:
                await world.settle()
            assert "source=" in caught.value.hint
        assert [call[0] for call in world.servers.calls].count("holdings") == 2  # once each
        assert not world.servers.orders
        # Nobody will ask for its commits: they do not hold the log's budget for ever.
        assert world.log.settled(world.region) == world.log.newest(world.region) > 0
        await asyncio.sleep(0)
        assert PEER not in world.servers.let_go  # it had not begun
        world.rebuilds.forget(world.region)
        assert world.rebuilds.verdict(world.region) is None

    run(work)


def test_only_blocks_on_no_server_are_lost(world: World) -> None:
    told: list[int] = []

    async def rehome(server_id: int, record: RegionRecord) -> None:
        told.append(record.loss)

    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)]}  # not what the commit changed
        world.servers.rehome = rehome  # type: ignore[method-assign]
        world.lose(HOME)
        assert await world.settle()
        ((server, order, _),) = world.servers.orders
        assert (server, lost_of(order)) == (PEER, BitMap([4]))
        assert world.rebuilds.verdict(world.region) is None
        lost = world.rebuilds.lost_blocks(world.region)
        assert lost is not None
        assert (BitMap.deserialize(lost.blocks), lost.n_blocks) == (BitMap([4]), N_BLOCKS)
        assert world.journal.load().lacking == ((world.region, lost),)
        why = world.rebuilds.why_lost(world.region)
        assert why is not None
        assert f"variable {world.region}" in why.message
        assert "1 of 10 blocks (4) are on no node" in why.message
        assert "its home 0x1 is lost (its node is dead)" in why.message.lower()
        assert "without a source" in why.message
        assert "source=" in why.hint
        assert "update(ref, lost=0)" in why.hint
        record = await world.rebuilds.new_home(world.region, HOME)
        assert record is not None
        assert record.loss == lost.number != 0
        assert set(told) == {lost.number}
        world.check()
        world.rebuilds.forget(world.region)
        assert world.rebuilds.why_lost(world.region) is None

    run(work)


def test_another_loss_has_another_number(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)], OTHER: [(0, ALL - BitMap([7]))]}
        world.lose(HOME)
        assert await world.settle()
        first = world.rebuilds.lost_blocks(world.region)
        world.servers.cached.pop(PEER)
        world.lose(PEER)
        assert await world.settle()
        second = world.rebuilds.lost_blocks(world.region)
        assert first is not None
        assert second is not None
        assert BitMap.deserialize(second.blocks) == BitMap([4, 7])
        assert first.number != second.number
        assert world.journal.load().lacking == ((world.region, second),)

    run(work)


def test_a_rebuild_that_has_everything_ends_a_loss(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)]}
        world.lose(HOME)
        assert await world.settle()
        assert world.rebuilds.why_lost(world.region) is not None
        world.servers.cached = {OTHER: [(1, ALL)]}  # of one that did not live then
        world.lose(PEER)
        assert await world.settle()
        assert world.rebuilds.why_lost(world.region) is None
        assert world.journal.load().lacking == ()

    run(work)


@pytest.mark.parametrize("kind", [ZEROS, CALL])
def test_from_a_source(world: World, kind: str) -> None:
    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(kind, 64, b"digest", b"what"))
        world.servers.cached = {PEER: [(1, BitMap([3, 4]))]}
        world.lose(HOME)
        assert await world.settle()
        ((_, order, made),) = world.servers.orders
        assert BitMap.deserialize(order.from_source) == ALL - BitMap([3, 4])
        assert BitMap.deserialize(order.compared) == BitMap([3])  # 4 is none that it makes
        assert order.pieces == (((64, b"what"),) if kind == ZEROS else ())
        assert made == ([b"what"] if kind == CALL else [])

    run(work)


def test_what_is_staged_counts(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(0, ALL)]}
        world.servers.layers = {OTHER: {9: BitMap([4]), 10: BitMap([5])}}  # 10 is not decided
        world.lose(HOME)
        assert await world.settle()
        ((_, order, _),) = world.servers.orders
        assert [take[0] for take in order.takes] == [OTHER]
        ((version, blocks),) = order.cached
        assert (version, BitMap.deserialize(blocks)) == (0, ALL - BitMap([4]))

    run(work)


def test_no_source_makes_what_a_commit_changed(world: World) -> None:
    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"what"))
        world.lose(HOME)
        assert await world.settle()
        ((_, order, _),) = world.servers.orders
        assert BitMap.deserialize(order.from_source) == ALL - BitMap([4])
        assert lost_of(order) == BitMap([4])
        why = world.rebuilds.why_lost(world.region)
        assert why is not None
        assert "commits have changed" in why.message

    run(work)


def test_where_a_source_fails_the_rest_is_rebuilt(world: World) -> None:
    def fail() -> None:
        raise errors.SourceError("It raised: ValueError.", hint="Mend it.")

    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"what"))
        world.servers.cached = {PEER: [(1, BitMap([4]))]}
        world.servers.before["rebuild"] = [fail]
        world.lose(HOME)
        assert await world.settle()
        ((_, order, made),) = world.servers.orders
        assert lost_of(order) == ALL - BitMap([4])
        assert (order.from_source, order.compared, made) == (b"", b"", [])
        assert [call[0] for call in world.servers.calls].count("make_again") == 1
        why = world.rebuilds.why_lost(world.region)
        assert why is not None
        assert "It raised: ValueError" in why.message
        assert why.hint.startswith("Mend it.")

    run(work)


def test_a_source_without_room_is_run_again(world: World) -> None:
    """What it made may be the failure itself. Nothing is written down as lost."""

    def no_room() -> None:
        raise errors.WaitTimeoutError("The source found no room: MemoryError()")

    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"source"))
        world.servers.cached = {PEER: [(1, BitMap([4]))]}
        world.servers.before["rebuild"] = [no_room]
        world.lose(HOME)
        assert await world.settle()
        assert [call[0] for call in world.servers.calls].count("make_again") == 2
        assert world.servers.orders[-1][1].lost == b""

    run(work)


def test_a_source_that_fails_is_not_run_again(world: World) -> None:
    def fail() -> None:
        raise errors.SourceError("It raised: ValueError.", hint="Mend it.")

    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"what"))
        world.servers.cached = {}
        world.servers.before["rebuild"] = [fail]
        world.lose(HOME)
        with pytest.raises(errors.HomeLostError, match="It raised: ValueError") as caught:
            await world.settle()
        assert caught.value.hint == "Mend it."
        assert not world.servers.orders
        await asyncio.sleep(0)
        assert [call[0] for call in world.servers.calls].count("make_again") == 1
        assert world.servers.let_go == [PEER]  # an attempt before may have left something there

    run(work)


@pytest.mark.parametrize("moment", ["stage_cached", "rebuild", "rehome"])
def test_the_new_home_is_lost_too(world: World, moment: str) -> None:
    def die() -> None:
        world.lose(PEER)
        raise errors.HomeLostError("The page server is gone.")

    async def work() -> None:
        world.rebuilds.set_source(world.region, Source(ZEROS, 0, b"", b"what"))
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([4, 9]))]}
        world.servers.before[moment] = [die]
        world.lose(HOME)
        while not await world.settle():
            pass
        assert world.home() == OTHER
        assert world.servers.orders[-1][0] == OTHER
        assert ("rehome", OTHER, OTHER) in world.servers.calls
        world.check()

    run(work)


@pytest.mark.parametrize("moment", ["holdings", "stage_cached", "rebuild", "rehome"])
def test_what_fails_for_now_is_tried_again(world: World, moment: str) -> None:
    def fail() -> None:
        raise ConnectionError("It is being restarted.")

    async def work() -> None:
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([9]))]}
        world.servers.before[moment] = [fail, fail, fail, fail]
        world.lose(HOME)
        assert await world.settle()
        assert not world.servers.before[moment]
        assert world.home() == PEER
        world.check()

    run(work)


@pytest.mark.parametrize(
    ("moment", "failure"),
    [
        ("holdings", ConnectionError("It is being restarted.")),
        ("stage_cached", errors.OutOfMemoryError("The giver has 5 bytes.")),
        ("rebuild", ConnectionError("It is being restarted.")),
        ("rebuild", errors.OutOfMemoryError("It has 5 bytes.")),
        ("journal", errors.JournalFullError("The disk is full.")),
    ],
)
def test_what_fails_for_long_is_put_off_and_no_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str, failure: Exception
) -> None:
    fails = True

    def fail() -> None:
        if fails:
            raise failure

    def full(record: RegionRecord, version: int, lost: LostBlocks | None, **more: Any) -> None:
        fail()
        rehome(record, version, lost, **more)

    async def work() -> None:
        nonlocal fails
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([9]))]}
        world.servers.before[moment] = [fail] * 1000
        world.lose(HOME)
        assert not await world.settle()
        n_calls = len(world.servers.calls)
        assert n_calls < 30 * rebuilds.TRIES  # it is not tried for ever
        assert world.rebuilds.verdict(world.region) is None
        assert world.home() == HOME
        request = CommitRequest(11, (Write(world.region, 1, 1, b"", 8192, OTHER),))
        with pytest.raises(errors.WaitTimeoutError, match="another one yet: "):
            await world.rebuilds.settle_all(request, 0.0)
        fails = False
        while not await world.settle():
            pass
        assert world.home() == PEER
        world.check()

    rehome = world.journal.rehome
    if moment == "journal":
        monkeypatch.setattr(world.journal, "rehome", full)
    run(work)


def test_a_holder_that_is_silent_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, answer = True, world.servers.holdings

    async def holdings(server_id: int, region: int, commits: Any) -> list[tuple[int, bytes]]:
        if silent and server_id == OTHER:
            raise ConnectionError("It is being restarted.")
        return await answer(server_id, region, commits)

    async def work() -> None:
        nonlocal silent
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([9]))]}
        monkeypatch.setattr(world.servers, "holdings", holdings)
        world.lose(HOME)
        assert not await world.settle()
        assert world.rebuilds.verdict(world.region) is None
        silent = False
        assert await world.settle()
        assert world.home() == PEER

    run(work)


@pytest.mark.parametrize("moment", ["holdings", "stage_cached", "rebuild"])
def test_it_is_freed_meanwhile(world: World, moment: str) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([9]))]}
        told: list[Any] = []

        def free() -> None:
            told.extend(world.core.free(world.region))
            world.log.close(world.region)

        world.servers.before[moment] = [free]
        world.lose(HOME)
        assert await world.settle()
        assert world.core.state(world.region) is not RegionState.READY
        assert "rehome" not in [call[0] for call in world.servers.calls]
        if moment == "holdings":  # else who prepares something is told to let go of it
            assert not world.servers.orders
        else:
            assert PEER in {order.server_id for order in told}
        assert world.journal.load().rehomed == ()

    run(work)


def test_the_registry_is_restarted_before_the_new_home_has_heard(world: World) -> None:
    async def work() -> None:
        record = world.core.rehome(world.region, PEER)
        world.journal.rehome(record, 1)
        again = Rebuilds(world.core, world.log, world.journal, world.servers)
        again.activate(world.journal.load().rehomed)
        await again.activated(world.region, WAIT_S)
        assert world.servers.calls[0] == ("rehome", PEER, PEER)
        assert await again.settle(world.region, WAIT_S)
        assert not world.servers.orders

    run(work)


def test_after_a_restart_who_asks_begins_it(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.core.server_lost(HOME, "its node is dead")  # before this registry was started
        assert await world.settle()
        assert world.home() == PEER

    run(work)


def test_several_waiting_readers_are_one_rebuild(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.lose(HOME)
        assert all(await asyncio.gather(*(world.settle() for _ in range(20))))
        assert len(world.servers.orders) == 1
        assert not await world.rebuilds.settle(world.region, 0.0) or world.home() == PEER

    run(work)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_home_that_has_nothing_of_it_is_rebuilt_again(world: World, restarted: bool) -> None:
    def forgot() -> None:
        raise errors.HomeLostError("Nothing was prepared.")

    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rehome"] = [forgot, forgot]
        if restarted:
            world.core.server_lost(HOME, "its node is dead")
            record = world.core.rehome(world.region, PEER)
            world.log.rehome(world.region, PEER)
            world.journal.rehome(record, 1)
            world.rebuilds = Rebuilds(world.core, world.log, world.journal, world.servers)
            world.rebuilds.activate(world.journal.load().rehomed)
            await world.rebuilds.activated(world.region, WAIT_S)
        else:
            world.lose(HOME)
        assert await world.settle()
        assert not world.servers.before["rehome"]
        assert world.home() == PEER
        assert len(world.servers.orders) == (2 if restarted else 3)
        await world.rebuilds.activated(world.region, 0.0)
        world.check()

    run(work)


def test_a_home_without_blocks_is_not_named(world: World) -> None:
    async def work() -> None:
        forgotten = asyncio.Event()

        def forgot() -> None:
            forgotten.set()
            raise errors.HomeLostError("Nothing was prepared.")

        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["rehome"] = [forgot]
        world.lose(HOME)
        await forgotten.wait()
        world.servers.cached = {}  # evicted: now it is lost
        with pytest.raises(errors.ServerUnavailableError):
            await world.rebuilds.activated(world.region, 0.0)
        with pytest.raises(errors.HomeLostError, match="has nothing of it"):
            await world.settle()
        await world.rebuilds.activated(world.region, 0.0)  # who asks gets the verdict

    run(work)


def test_a_lookup_waits_until_the_new_home_has_heard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        called, go = hold(world, monkeypatch, "rehome")
        world.lose(HOME)
        await world.rebuilds.activated(world.region, 0.0)  # it has a home that is lost: no secret
        await called.wait()
        assert world.home() == PEER
        with pytest.raises(errors.ServerUnavailableError, match="Ask again"):
            await world.rebuilds.activated(world.region, 0.0)
        go.set()
        assert await world.settle()
        await world.rebuilds.activated(world.region, 0.0)

    run(work)


def test_no_layer_is_given_up_while_a_rebuild_waits_for_it(world: World) -> None:
    staged: list[int] = []

    def look() -> None:
        staged.extend(world.rebuilds._staged)
        for commit_id in staged:
            with pytest.raises(errors.ServerUnavailableError, match="Ask again"):
                world.rebuilds.check_outcome(commit_id)

    async def work() -> None:
        world.servers.cached = {PEER: MOST, OTHER: [(1, BitMap([9]))]}
        world.servers.before["rebuild"] = [look]
        world.lose(HOME)
        assert await world.settle()
        ((_, order, _),) = world.servers.orders
        assert staged == [take[1] for take in order.takes]
        for commit_id in staged:
            world.rebuilds.check_outcome(commit_id)

    run(work)


def test_the_registry_asks_the_rebuilds_before_it_gives_a_layer_up(world: World) -> None:
    async def work() -> None:
        commits = Commits(world.log, world.journal, world.servers, 10.0)
        versions = Versions(world.log, world.journal, commits, world.rebuilds, 10.0)
        world.rebuilds._staged.add(5)
        with pytest.raises(errors.ServerUnavailableError, match="Ask again"):
            await versions.outcome(5)
        assert world.log.outcome(5) is None

    run(work)


@pytest.mark.parametrize("moment", ["rehome", "until_made"])
def test_one_that_takes_long_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async def work() -> None:
        monkeypatch.setattr(rebuilds, "AT_ONCE", 1)
        world.rebuilds = Rebuilds(world.core, world.log, world.journal, world.servers)
        other = world.core.create_region(N_BLOCKS * 4096, OTHER)
        world.journal.create_region(other, 0, other.region + 1)
        world.core.seal(other.region)
        world.log.open(other.region, other.homes)
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"what"))
        world.servers.cached = {PEER: [(1, BitMap([4])), (0, ALL)]}
        if moment == "until_made":  # the source runs
            world.servers.cached = {PEER: [(1, BitMap([4])), (0, ALL - BitMap([9]))]}
        called, go = hold(world, monkeypatch, moment)
        world.lose(HOME)
        await called.wait()
        world.servers.cached = {PEER: [(0, ALL)]}
        world.lose(OTHER)
        assert await world.rebuilds.settle(other.region, WAIT_S)
        assert world.core.homes_of(other.region) == (PEER,)
        assert not await world.rebuilds.settle(world.region, 0.0)
        go.set()
        assert await world.settle()
        assert world.home() == PEER

    run(work)


@pytest.mark.parametrize("n_tries", [1, 3])
def test_a_source_that_takes_long_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, n_tries: int
) -> None:
    async def slow(made: list[Any]) -> None:
        nonlocal n_tries
        n_tries -= 1
        if n_tries:
            await asyncio.sleep(WAIT_S)

    async def work() -> None:
        monkeypatch.setattr(rebuilds, "SOURCE_S", 0.01)
        monkeypatch.setattr(world.servers, "until_made", slow)
        world.rebuilds.set_source(world.region, Source(CALL, 0, b"digest", b"what"))
        world.servers.cached = {PEER: [(1, BitMap([4]))]}
        world.lose(HOME)
        assert await world.settle()
        assert [call[0] for call in world.servers.calls].count("make_again") == 1
        ((_, _, made),) = world.servers.orders
        assert made == [b"what"]

    run(work)


def test_slow_sources_occupy_no_page_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        go = asyncio.Event()
        running: list[int] = []
        most: dict[int, int] = {}
        make_again = world.servers.make_again

        def begin(server_id: int, source: Source) -> list[Any]:
            make_again(server_id, source)
            running.append(server_id)
            most[server_id] = max(most.get(server_id, 0), running.count(server_id))
            return [server_id]

        async def slow(made: list[Any]) -> None:
            await go.wait()
            running.remove(made[0])

        monkeypatch.setattr(world.servers, "make_again", begin)
        monkeypatch.setattr(world.servers, "until_made", slow)
        regions = [world.add_region(HOME) for _ in range(32)]
        for region in regions:
            world.rebuilds.set_source(region, Source(CALL, 0, b"digest", b"what"))
        world.servers.cached = {}
        world.servers.holders = {world.region: {PEER: [(1, ALL)]}}
        world.lose(HOME)
        assert await world.settle()  # one that needs no source is not held up by them
        await asyncio.sleep(0.1)
        called = [call[0] for call in world.servers.calls]
        assert called.count("rebuild") == 1
        request = CommitRequest(12, (Write(regions[0], 0, 1, b"", 8192, OTHER),))
        with pytest.raises(errors.WaitTimeoutError, match="is run on the node"):
            await world.rebuilds.settle_all(request, 0.0)
        assert {PEER, OTHER} == set(most)
        go.set()
        for region in regions:
            assert await world.rebuilds.settle(region, WAIT_S)
        assert max(most.values()) == rebuilds.SOURCES_AT_ONCE
        homes = [home for region in regions for home in world.core.homes_of(region)]
        assert abs(homes.count(PEER) - homes.count(OTHER)) <= 2

    run(work)


def test_a_home_that_is_not_lost_stays_it(world: World) -> None:
    def fail() -> None:
        raise ConnectionError("It is stopped.")

    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.before["is_home"] = [fail]
        assert await world.rebuilds.new_home(world.region, HOME) is None  # silence is no verdict
        record = await world.rebuilds.new_home(world.region, HOME)
        assert record is not None
        assert (record.homes, record.version) == ((HOME,), 1)
        assert world.rebuilds.verdict(world.region) is None
        assert not world.servers.orders

    run(work)


def test_a_home_that_says_it_has_nothing_is_replaced(world: World) -> None:
    async def work() -> None:
        world.servers.cached = {PEER: [(1, ALL)]}
        world.servers.has = False
        assert await world.rebuilds.new_home(world.region, HOME) is None
        assert await world.settle()
        record = await world.rebuilds.new_home(world.region, HOME)
        assert record is not None
        assert record.homes == (PEER,)
        assert [call for call in world.servers.calls if call[0] == "is_home"] == [("is_home", HOME)]
        world.check()

    run(work)


def test_a_home_that_has_nothing_of_what_it_shared_is_no_verdict(world: World) -> None:
    """It could not pin the object again; Ray has it, and brings it to the new home."""

    async def work() -> None:
        region = world.add_region(HOME)
        record = world.core.record_of(region)
        assert record is not None
        world.rebuilds.set_shared(region, Pinned(record, None, b"digest"), ["a reference"])
        assert [pinned.record.region for pinned, _ in world.rebuilds.shared_at(HOME)] == [region]
        world.servers.has = False
        assert await world.rebuilds.new_home(region, HOME) is None
        assert await world.rebuilds.settle(region, WAIT_S)
        ((_, order, made),) = world.servers.orders
        assert order.digest == b"digest"
        assert made == ["a reference"]
        assert world.rebuilds.shared_at(HOME) == []  # it is memory of its new home now

    run(work)


def test_what_is_no_load_any_more(world: World) -> None:
    """Regions that are gone, or lost, and tries that failed after their last step."""

    async def work() -> None:
        regions = [world.add_region(HOME) for _ in range(3)]
        for region in regions:
            world.rebuilds.set_source(region, Source(ZEROS, 0, b"", b""))
        world.servers.holders = {region: {} for region in regions}
        world.servers.cached = {PEER: [(1, ALL)]}
        rehome, n_calls = world.journal.rehome, []

        def full_once(record: RegionRecord, *rest: Any, **more: Any) -> None:
            n_calls.append(record.region)
            if len(n_calls) == 1:
                raise errors.JournalFullError("The disk is full.")
            rehome(record, *rest)

        world.journal.rehome = full_once  # type: ignore[method-assign]
        world.lose(HOME)
        for region in (world.region, *regions):
            assert await world.rebuilds.settle(region, WAIT_S)
        assert len(n_calls) == 5
        assert sum(world.rebuilds._load.values()) == 4
        for region in (world.region, *regions):
            world.rebuilds.forget(region)
        assert not +world.rebuilds._load

    run(work)

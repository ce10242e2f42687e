"""Commits and seals of a session with a store: what is answered is on the disk before."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap
from ray.exceptions import ActorUnavailableError

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    CommitRequest,
    Publication,
    ServerConfig,
    ServerInfo,
    Write,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.refusals import IllegalTransition
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray.actors.commits import commits as commits_module
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.committed import Limits
from clamor_ray.actors.commits.durable_journal import DurableJournal
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.process import journals
from clamor_ray.actors.registry import regions as regions_module
from clamor_ray.actors.registry import registry as registry_module
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.registry.registry_core import RegionState
from clamor_ray.actors.store.durable_calls import AT_ONCE
from clamor_ray.actors.store.store_registry import MARK, StoreRegistry
from tests.support.claims_table import ListTable
from tests.support.server_rig import until

NODE = "ab" * 28
SCOPE = "aaaaaa000001"
DIRECTORY = "cd" * 16
HOME = server_id_of(DIRECTORY)
THERE = 0xB
INFO = ServerInfo(HOME, NODE, "10.0.0.1", 1, "name", "0.1.0", directory=DIRECTORY)
WAIT_S = 20.0

Steps = Callable[..., None]


def write(region: int, base: int = 0, staged_at: int = HOME) -> Write:
    return Write(region, base, 1, BitMap([0]).serialize(), 8192, staged_at)


def request(commit_id: int, *regions: int, base: int = 0, **how: Any) -> CommitRequest:
    return CommitRequest(commit_id, tuple(write(each, base) for each in regions), **how)


# -- commits


class FakeHomes:
    """Regions 1 and 2 live at HOME, where their writer is, and 3 at THERE."""

    def __init__(self) -> None:
        self.homes = {1: (HOME,), 2: (HOME,), 3: (THERE,)}
        self.pulled: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, list[int]]] = []
        self.told: list[tuple[int, list[Publication]]] = []
        self.pull_does: Callable[[int], Awaitable[None]] | None = None
        self.is_away = False

    def of(self, region: int) -> tuple[int, ...]:
        return self.homes.get(region, ())

    def why_lost(self, server_id: int) -> str | None:
        return None

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        self.pulled.append((home, write.region))
        if self.pull_does is not None:
            await self.pull_does(home)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        if self.is_away:
            raise RuntimeError("it is not registered")
        self.told.append((home, items))
        return [(item.region, item.version) for item in items]

    async def oldest_version(self, home: int, region: int) -> int:
        return 0

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        self.dropped.append((home, regions))

    async def examine(self, home: int) -> None: ...


class World:
    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.log, self.homes = CommitLog(limits), FakeHomes()
        self.journal = Journal(directory)
        for region, homes in self.homes.homes.items():
            self.log.open(region, homes)
        self.commits = Commits(self.log, self.journal, self.homes, 2.0, lambda: 0.0, keeps=True)


@pytest.fixture
def with_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(commits_module, "TICK_S", 0.01)

    def runner(work: Callable[[World], Awaitable[None]], limits: Limits | None = None) -> None:
        async def whole() -> None:
            world = World(tmp_path / "journal", limits)
            try:
                await asyncio.wait_for(work(world), WAIT_S)
            finally:
                await world.commits.close()
                world.journal.close()

        asyncio.run(whole())

    return runner


def test_the_writers_own_home_is_asked_for_its_layer_before_the_decision(
    with_world: Steps,
) -> None:
    async def work(world: World) -> None:
        may = asyncio.Event()

        async def waits(home: int) -> None:
            await may.wait()

        world.homes.pull_does = waits
        commit = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))
        await until(lambda: sorted(world.homes.pulled) == sorted([(HOME, 1), (THERE, 3)]))
        assert world.log.outcome(7) is None
        again = asyncio.ensure_future(world.commits.commit(request(7, 1, 3)))  # sent twice
        may.set()
        assert (await commit).versions == (await again).versions == {1: 1, 3: 1}
        assert (await world.commits.commit(request(7, 1, 3))).versions == {1: 1, 3: 1}
        assert len(world.homes.pulled) == 2

    with_world(work)


def test_a_home_without_room_refuses_its_own_writer(with_world: Steps) -> None:
    async def work(world: World) -> None:
        async def full(home: int) -> None:
            raise errors.NoSpaceError("The disk is full.")

        world.homes.pull_does = full
        with pytest.raises(errors.NoSpaceError):
            await world.commits.commit(request(7, 1))
        assert world.journal.load().entries == ()
        world.homes.pull_does = None  # the request may be sent again
        assert (await world.commits.commit(request(7, 1))).versions == {1: 1}

    with_world(work)


def test_a_layer_that_was_brought_stays_where_it_was_staged(with_world: Steps) -> None:
    async def work(world: World) -> None:
        for region, home in ((1, HOME), (3, THERE)):
            assert await world.commits.bring(request(7, region)) == home
        assert world.homes.pulled == [(HOME, 1), (THERE, 3)]
        assert await world.commits.outcome(7, by_writer=True) == {}  # it gives it up
        await until(lambda: len(world.homes.dropped) > 0)
        assert world.homes.dropped == [(THERE, [3])]

    with_world(work)


def test_after_a_conflict_the_writers_home_keeps_what_was_staged_there(with_world: Steps) -> None:
    async def work(world: World) -> None:
        async def other_is_first(home: int) -> None:
            world.homes.pull_does = None
            await world.commits.commit(request(8, 1))

        world.homes.pull_does = other_is_first
        with pytest.raises(errors.CommitConflict):
            await world.commits.commit(request(7, 1, 3))
        await until(lambda: len(world.homes.dropped) > 0)
        assert world.homes.dropped == [(THERE, [3])]

    with_world(work)


@pytest.mark.parametrize("when", ["while it is asked", "while another is asked"])
def test_what_a_home_has_answered_before_it_begins_anew_counts_no_more(
    when: str, with_world: Steps
) -> None:
    """It drops what was not committed then."""

    async def work(world: World) -> None:
        begins = HOME if when == "while it is asked" else THERE

        async def begins_anew(home: int) -> None:
            if home == begins:
                await asyncio.sleep(0.02)  # the other one has answered
                world.homes.pull_does = None
                world.commits.home_begins(HOME)

        world.homes.pull_does = begins_anew
        assert (await world.commits.commit(request(7, 1, 3))).versions == {1: 1, 3: 1}
        assert sorted(world.homes.pulled) == sorted([(HOME, 1), (HOME, 1), (THERE, 3)])

    with_world(work)


def kept(commit_id: int, *regions: int, process: int = 11) -> CommitRequest:
    """Its writer says that this process of the home on its node has all layers on its disk."""
    writes = (replace(write(each), kept_by=process) for each in regions)
    return CommitRequest(commit_id, tuple(writes))


def test_a_home_that_its_writer_has_asked_is_not_asked_again(with_world: Steps) -> None:
    async def work(world: World) -> None:
        world.commits.home_is(HOME, 11)
        assert (await world.commits.commit(kept(7, 1, 2))).versions == {1: 1, 2: 1}
        assert world.homes.pulled == []
        with pytest.raises(errors.CommitConflict):
            await world.commits.commit(kept(8, 1))

    with_world(work)


@pytest.mark.parametrize("known", [None, 12, "began anew"])
def test_what_another_process_of_a_home_has_said_is_asked_again(
    with_world: Steps, known: int | str | None
) -> None:
    """The registry does not know it, or another one, or what comes after it begins just now."""

    async def work(world: World) -> None:
        if known is not None:
            world.commits.home_is(HOME, 12 if known == 12 else 11)
        if known == "began anew":
            world.commits.home_begins(HOME)
        assert (await world.commits.commit(kept(7, 1))).versions == {1: 1}
        assert world.homes.pulled == [(HOME, 1)]

    with_world(work)


def test_nobody_has_said_anything_where_no_process_has_a_number(with_world: Steps) -> None:
    async def work(world: World) -> None:
        world.commits.home_is(HOME, 0)
        await world.commits.commit(kept(7, 1, process=0))
        assert world.homes.pulled == [(HOME, 1)]

    with_world(work)


def test_a_home_that_was_asked_and_begins_anew_while_another_is_asked_is_asked_again(
    with_world: Steps,
) -> None:
    async def work(world: World) -> None:
        async def begins_anew(home: int) -> None:
            if home == THERE:
                world.commits.home_begins(HOME)

        world.commits.home_is(HOME, 11)
        world.homes.pull_does = begins_anew
        assert (await world.commits.commit(kept(7, 1, 3))).versions == {1: 1, 3: 1}
        assert world.homes.pulled == [(THERE, 3), (HOME, 1)]

    with_world(work)


def test_what_was_said_long_ago_is_asked_once_more(with_world: Steps) -> None:
    async def work(world: World) -> None:
        world.commits.home_is(HOME, 11)
        await world.commits.commit(replace(kept(7, 1), staged_ago_s=commits_module.FRESH_S + 1))
        assert world.homes.pulled == [(HOME, 1)]

    with_world(work)


def test_a_home_that_begins_anew_while_another_is_asked_once_more_is_asked_again(
    with_world: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "FRESH_S", -1.0)  # all are asked once more

    async def work(world: World) -> None:
        async def begins_anew(home: int) -> None:
            if world.homes.pulled.count((THERE, 3)) == 2:
                await asyncio.sleep(0.02)  # the other one has answered
                world.homes.pull_does = None
                world.commits.home_begins(HOME)

        world.homes.pull_does = begins_anew
        monkeypatch.setattr(world.log, "apply", checked(world))
        await world.commits.commit(request(7, 1, 3))

    def checked(world: World) -> Any:
        apply = world.log.apply

        def applied(*arguments: Any) -> Any:
            at = world.homes.pulled.index((THERE, 3), world.homes.pulled.index((THERE, 3)) + 1)
            assert (HOME, 1) in world.homes.pulled[at + 1 :]
            return apply(*arguments)

        return applied

    with_world(work)


def test_what_a_home_that_is_away_has_not_acknowledged_is_never_forgotten(
    with_world: Steps, tmp_path: Path
) -> None:
    limits = Limits(max_commits=2, max_outcomes=2, outcome_s=0.0)
    n = 12

    async def work(world: World) -> None:
        world.homes.is_away = True
        for version in range(n):
            await world.commits.commit(request(100 + version, 1, base=version))
        await asyncio.sleep(0.1)  # it is tidied up
        assert len(world.journal.load().entries) == len(world.journal.load().outcomes) == n
        # Another opening, in which it has not registered; and is taken for lost.
        log = CommitLog(limits)
        log.open(1, (HOME,))
        saved = world.journal.load()
        log.restore(saved.entries, saved.plans, saved.acknowledged, saved.outcomes, ())
        log.retain({1: None})
        assert not log.trim(1e9)
        assert [item.version for item in log.unacknowledged(HOME)] == list(range(1, n + 1))
        log.server_lost(HOME)
        assert not log.trim(1e9)
        assert log.published(1, 0) == [(version + 1, 100 + version) for version in range(n)]
        world.homes.is_away = False
        world.commits.tell_homes()
        await until(lambda: len(world.journal.load().entries) == 2)

    with_world(work, limits)


# -- the registry


class Disk:
    """Syncs only while it is let."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()

    def sync(self, fd: int) -> None:
        assert self.may.wait(WAIT_S)
        os.fdatasync(fd)


class FakeServer:
    """The page server of the node."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.keep_does: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            self.called.append(method)
            if method == "hello":
                return INFO
            if method == "retire":
                return pack(*(True for _ in unpack(arguments[0])))
            if method == "leave":
                return 0  # it goes on
            if method == "publish":
                return [(item.region, item.version) for item in arguments[0]]
            if method == "keep" and self.keep_does is not None:
                await self.keep_does()
            return True

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


class Rig:
    """A registry of a session with a store, with one page server."""

    def __init__(self, tmp_path: Path) -> None:
        self.disk, self.server = Disk(), FakeServer()
        self.store = tmp_path / "store" / "features"
        self.store.parent.mkdir(mode=0o700, exist_ok=True)
        self.session = tmp_path
        self.registry: StoreRegistry

    async def made(self) -> int:
        """A region that is not sealed."""
        await self.registry.register_server(INFO)
        return (await self.registry.create_region(8192, NODE)).region

    async def sealed(self) -> int:
        return (await self.registry.seal(await self.made())).region


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    rig = Rig(tmp_path)
    monkeypatch.setattr(journals, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(registry_module.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(registry_module.keeper_process, "hold_and_watch", lambda *_: -1)
    monkeypatch.setattr(registry_module.ray, "get_actor", lambda *_, **__: rig.server)
    monkeypatch.setattr(commits_module, "TICK_S", 0.01)
    monkeypatch.setattr(
        "clamor_ray.actors.store.store_registry.DurableJournal",
        lambda directory: DurableJournal(directory, lambda fd: rig.disk.sync(fd)),
    )
    config = ServerConfig(
        SCOPE, "0.1.0", session_name="features", store=str(rig.store), store_id="ab" * 16
    )

    def runner(*steps: Callable[[Rig], Awaitable[None]]) -> None:
        """Each step has a registry of its own, all in one cluster."""

        async def one(step: Callable[[Rig], Awaitable[None]]) -> None:
            rig.registry = StoreRegistry(config, bytes(32))
            try:
                await asyncio.wait_for(step(rig), WAIT_S)
            finally:  # as by SIGKILL: nothing is told
                rig.disk.may.set()
                rig.registry._background.close()
                await rig.registry._directories.close()
                await rig.registry._commits.close()
                await rig.registry._lineage.stop()
                rig.registry._let_go()

        table = ListTable()  # the cluster's
        monkeypatch.setattr(registry_module, "RayTable", lambda: table)
        for step in steps:
            asyncio.run(one(step))

    return runner


def waiting(call: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


async def turns() -> None:
    await asyncio.sleep(0.05)


def test_nothing_is_answered_or_told_before_it_is_on_the_disk(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.sealed()
        rig.disk.may.clear()
        rig.server.called.clear()
        commit = waiting(registry.commit(request(7, region)))
        await until(lambda: registry._log.newest(region) == 1)  # it is decided
        others = [
            waiting(registry.latest([region])),
            waiting(registry.lookup(region)),
            waiting(registry.newer(HOME, {region: 0}, 10.0)),
            waiting(registry.ask(pack("latest", [region]))),
        ]
        await turns()
        assert not any(each.done() for each in (commit, *others))
        assert "publish" not in rig.server.called
        assert await registry.scope() == SCOPE  # what is not in the journal is answered
        rig.disk.may.set()
        assert (await commit).versions == {region: 1}
        await asyncio.gather(*others)
        await until(lambda: "publish" in rig.server.called)

    run(work)


def test_no_home_drops_what_is_freed_before_that_is_on_the_disk(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.sealed()
        rig.disk.may.clear()
        rig.server.called.clear()
        free = waiting(registry.free(region, HOME))
        await turns()
        await turns()  # orders go out after 0.05 s
        assert registry._core.state(region) is RegionState.FREED
        assert not free.done()
        assert "retire" not in rig.server.called
        rig.disk.may.set()
        await free
        await until(lambda: "retire" in rig.server.called)

    run(work)


def test_no_server_leaves_before_its_homes_are_elsewhere_on_the_disk(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        region = await rig.sealed()
        rig.disk.may.clear()
        commit = waiting(rig.registry.commit(request(7, region)))
        await until(lambda: rig.registry._log.newest(region) == 1)
        leave = waiting(rig.registry._servers.leave(HOME, lambda: True))
        await turns()
        assert "leave" not in rig.server.called
        rig.disk.may.set()
        assert not await leave
        assert "leave" in rig.server.called
        await commit

    run(work)


def test_a_refusal_waits_too(run: Steps) -> None:
    """It may rest on what another call has decided."""

    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.sealed()
        rig.disk.may.clear()
        first = waiting(registry.commit(request(7, region)))
        await until(lambda: registry._log.newest(region) == 1)
        second = waiting(registry.commit(request(8, region)))
        await turns()
        assert not second.done()
        rig.disk.may.set()
        await first
        with pytest.raises(errors.CommitConflict):
            await second

    run(work)


def test_commits_that_run_side_by_side_share_a_sync(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry = rig.registry
        regions = [await rig.sealed() for _ in range(20)]
        before = registry._journal.n_syncs
        await asyncio.gather(*(registry.commit(request(100 + each, each)) for each in regions))
        assert registry._journal.n_syncs - before <= 3

    run(work)


def test_what_only_reads_does_not_wait_for_the_disk(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.sealed()
        await registry.latest([region])
        before = registry._journal.n_syncs
        for _ in range(5):
            await registry.latest([region])
            await registry.locate(HOME)
        assert registry._journal.n_syncs == before

    run(work)


def test_what_does_not_wait_is_a_call_of_the_registry() -> None:
    assert {name for name in AT_ONCE if not hasattr(Registry, name)} == set()
    assert "__repr__" in vars(StoreRegistry)  # see starting


# -- seals


def test_a_home_keeps_a_region_before_it_is_sealed(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.made()
        may = asyncio.Event()

        async def waits() -> None:
            await may.wait()

        rig.server.keep_does = waits
        seals = [waiting(registry.seal(region)) for _ in range(2)]  # the same one, sent twice
        await until(lambda: "keep" in rig.server.called)
        await turns()
        assert registry._core.state(region) is RegionState.CREATING
        may.set()
        assert {(await seal).region for seal in seals} == {region}
        await registry.seal(region)
        assert rig.server.called.count("keep") == 1

    run(work)


def test_a_home_keeps_a_region_before_the_next_one_is_made(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.made()

        async def full() -> None:
            raise errors.NoSpaceError("The disk is full.")

        rig.server.keep_does = full
        with pytest.raises(errors.NoSpaceError):
            await registry.seal_and_create(region, None, 8192, NODE, 5)
        with pytest.raises(errors.NoSpaceError):
            await registry.seal(region)
        assert registry._core.state(region) is RegionState.CREATING
        rig.server.keep_does = None
        assert await registry.seal_and_create(region, None, 8192, NODE, 5) is not None
        assert registry._core.state(region) is RegionState.READY

    run(work)


def test_a_home_that_does_not_answer_is_asked_again_by_the_maker(
    run: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions_module, "KEEP_S", 0.1)

    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.made()

        async def restarts() -> None:
            raise ActorUnavailableError("it restarts", None)

        async def hangs() -> None:
            await asyncio.sleep(60)

        rig.server.keep_does = restarts
        with pytest.raises(errors.ServerUnavailableError, match=f"home of variable {region}"):
            await registry.seal(region)
        rig.server.keep_does = hangs
        with pytest.raises(errors.WaitTimeoutError, match=r"within 0\.1 s"):
            await registry.seal(region)
        rig.server.keep_does = None
        await registry.seal(region)

    run(work)


def test_a_home_that_begins_anew_while_it_keeps_a_region_has_it_no_more(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.made()

        async def begins_anew() -> None:
            registry._home_begins(HOME)

        rig.server.keep_does = begins_anew
        with pytest.raises(errors.HomeLostError, match="was not made"):
            await registry.seal(region)
        assert registry._core.state(region) is RegionState.CREATING

    run(work)


def test_a_region_that_was_given_up_meanwhile_is_not_sealed(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.made()

        async def is_given_up() -> None:
            await registry.abandon(region)

        rig.server.keep_does = is_given_up
        with pytest.raises(IllegalTransition):
            await registry.seal(region)

    run(work)


# -- restarts, and the end


def test_the_store_stays_and_the_sessions_directory_goes(run: Steps) -> None:
    made: list[int] = []

    async def work(rig: Rig) -> None:
        made.append(await rig.sealed())
        await rig.registry.give_name("kept", made[0], b"packed")
        await rig.registry.commit(request(7, *made))
        assert (rig.registry._directory / MARK).exists()
        rig.server.called.clear()

    async def restart(rig: Rig) -> None:
        assert rig.registry._commits._restarted_s is not None
        assert (await rig.registry.latest(made))[0].version == 1
        directory = rig.registry._directory
        for each in directory.iterdir():  # as at the session's end
            each.unlink()
        directory.rmdir()

    async def opening(rig: Rig) -> None:
        assert rig.registry._commits._restarted_s is None
        assert (await rig.registry.latest(made))[0].version == 1
        assert (rig.store / "registry" / "journal").exists()

    run(work, restart)
    run(opening)


def test_the_end_of_a_session_leaves_its_store(run: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "forget_jobs_of", lambda scope: None)
    monkeypatch.setattr(registry_module.ray, "kill", lambda actor: None)
    made: list[int] = []

    async def work(rig: Rig) -> None:
        region = await rig.sealed()
        made.append(region)
        await rig.registry.give_name("kept", region, b"packed")
        await rig.registry.commit(request(7, region))
        await rig.registry.shutdown()
        await rig.registry.until_end()
        assert "stop" in rig.server.called
        assert not rig.registry._directory.exists()
        assert (rig.store / "registry" / "journal").exists()

    async def opening(rig: Rig) -> None:
        assert rig.registry._log.newest(made[0]) == 1

    run(work)
    run(opening)


def test_a_journal_that_is_full_says_which_directory(run: Steps) -> None:
    async def work(rig: Rig) -> None:
        registry, region = rig.registry, await rig.sealed()
        db = registry._journal._db
        (n_pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count={n_pages}")
        large = Write(region, 0, 1, BitMap([0]).serialize(), 8192, HOME, plan=bytes(1 << 20))
        with pytest.raises(errors.JournalFullError) as refused:
            await registry.commit(CommitRequest(9, (large,)))
        assert str(rig.store / "registry") in refused.value.message
        assert (await registry.latest([region]))[0].version == 0
        db.execute("PRAGMA max_page_count=1073741823")
        await registry.commit(CommitRequest(9, (large,)))

    run(work)

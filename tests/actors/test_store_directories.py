"""Directories of a store: those that nobody has taken, that come late, or not at all. No Ray."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    RegionRecord,
    ServerLost,
    ServerRestarting,
    StoreState,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray.actors.lost_homes import rebuilds
from clamor_ray.actors.registry import servers as servers_module
from clamor_ray.actors.store import directories as directories_module
from clamor_ray.actors.store.directories import AwayDirectory, StoreDirectories
from tests.support.store_rig import DIRECTORIES, StoreWorld

A, B, C = (server_id_of(directory) for directory in DIRECTORIES[:3])
A_AGAIN = server_id_of(DIRECTORIES[0], 1)
WAIT_S = 20.0


class Servers:
    """Page servers at one path. Hooks are called in the middle of things."""

    def __init__(self, world: StoreWorld) -> None:
        self.world = world
        self.paths: dict[int, list[str]] = {}  # what is free at its path
        self.prepared: dict[int, set[int]] = {}
        self.serves: dict[int, set[int]] = {}
        self.dropped: list[tuple[int, str]] = []
        self.damaged: set[int] = set()
        self.failures: list[Exception] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.n_taken = 0
        self.too_early = False

    def _now(self, method: str) -> None:
        if (hook := self.before.pop(method, None)) is not None:
            hook()

    def why_lost(self, server_id: int) -> str | None:
        return getattr(self.world.core.locate(server_id), "reason", None)

    async def examine(self, server_id: int) -> None:
        pass

    async def free_directories(self, server_id: int) -> list[str]:
        self._now("free_directories")
        return self.paths.get(server_id, [])

    async def take_directory(self, server_id: int, directory: str, state: StoreState) -> list[int]:
        if self.failures:
            raise self.failures.pop()
        self.n_taken += 1
        records = [stored.record for stored in state.regions]
        assert all(set(record.homes) == {server_id} for record in records)
        regions = {record.region for record in records} - self.damaged
        self.prepared.setdefault(server_id, set()).update(regions)
        self._now("take_directory")
        return sorted(regions)

    async def drop_directory(self, server_id: int, directory: str) -> None:
        core = self.world.core
        there = {
            each for life in core.lives.of_directory(directory) for each in core.homed_at(life)
        }
        unserved = set(core.homed_at(server_id)) & self.prepared[server_id] - self.serves[server_id]
        self.too_early |= bool(there | unserved)
        self.dropped.append((server_id, directory))

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        self._now("rehome")
        if server_id not in record.homes:
            self.prepared[server_id].remove(record.region)
            return
        if record.region not in self.prepared.get(server_id, ()):
            raise errors.HomeLostError("It has nothing of it.")
        saved = {each.record.region: each.record for each in self.world.journal.load().regions}
        assert saved[record.region].homes[0] == server_id  # written before
        self.serves.setdefault(server_id, set()).add(record.region)


class Rig:
    """A store's registry with three directories, which is opened anew."""

    def __init__(self, directory: Path) -> None:
        world = StoreWorld(directory)
        for index in range(3):
            world.register(index, index)
        self.regions = [world.add(home) for home in (A, A, B, C)]
        self.group = world.add_group([A, B, C])
        world.close()
        self.world = StoreWorld(directory, is_new_opening=True)
        self.servers = Servers(self.world)
        self.started: list[str] = []
        self.joins: Callable[[], object] = lambda: None
        self.is_starting: Callable[[int], bool] = lambda server_id: False
        self.leaving: set[int] = set()
        self.directories = self._make()

    def _make(self) -> StoreDirectories:
        made = StoreDirectories(
            *(self.world.core, self.world.stored, self.servers),
            lose=lambda *what: self.world.liveness.lose(*what, is_there=True),
            start_all=self._start_all,
            start_new=self._start_new,
            is_starting=lambda server_id: self.is_starting(server_id),
            is_leaving=self.leaving.__contains__,
        )
        self.world.liveness.when_lost.append(lambda loss: made.server_lost())
        return made

    async def _start_all(self) -> None:
        self.started.append("all")
        self.joins()

    async def _start_new(self) -> None:
        self.started.append("new")
        self.joins()

    def homes(self) -> list[int]:
        return [self.world.core.homes_of(region)[0] for region in self.regions]

    async def until(self, is_so: Callable[[], object]) -> None:
        for _ in range(2000):
            if is_so():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("not within 10 s")


def rigged(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test with a rig, in a loop of its own."""

    @functools.wraps(work)
    def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers_module.ray, "get_actor", lambda *_, **__: object())
        monkeypatch.setattr(directories_module, "LOOK_S", 0.02)
        monkeypatch.setattr(directories_module, "LOOK_MOST_S", 0.05)
        monkeypatch.setattr(directories_module, "FREE_S", 0.0)
        monkeypatch.setattr(directories_module, "PAUSE_S", 0.01)
        monkeypatch.setattr(directories_module, "STARTING_LOOK_S", 0.01)
        monkeypatch.setattr(rebuilds, "REHOME_S", 5.0)

        async def whole() -> None:
            rig = Rig(tmp_path / "journal")
            try:
                await asyncio.wait_for(work(rig), WAIT_S)
                rig.world.core.check()
                assert not rig.servers.too_early
            finally:
                await rig.directories.close()
                await rig.world.rebuilds.close()
                rig.world.close()

        asyncio.run(whole())

    del test.__wrapped__  # type: ignore[attr-defined]  # whose parameters are no fixtures
    return test


@rigged
async def test_each_node_takes_one(rig: Rig) -> None:
    def join() -> None:
        for index in range(3):
            rig.world.register(3 - index, index)

    rig.joins = join
    before = [rig.world.core.record_of(region) for region in rig.regions]
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert rig.started == ["all"]
    assert rig.directories.away() == ()
    assert [rig.world.core.record_of(region) for region in rig.regions] == before
    assert rig.servers.n_taken == 0


@rigged
async def test_fewer_nodes_than_before_take_the_rest_over(rig: Rig) -> None:
    """Who waits for a region goes on when its new home has heard that it is that."""
    rig.world.register(0, 0)
    rig.servers.paths = {A: list(DIRECTORIES[1:3])}
    waiting = asyncio.ensure_future(rig.world.rebuilds.settle(rig.group[1], 5.0))
    rig.servers.before["rehome"] = lambda: heard.append(
        all(region in rig.world.stored.unheard for region in rig.servers.prepared[A])
    )
    heard: list[bool] = []
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert await waiting
    assert heard == [True]
    assert rig.homes() == [A] * 4
    assert rig.servers.serves[A] == {*rig.regions[2:], *rig.group[1:]}
    assert sorted(rig.servers.dropped) == [(A, each) for each in DIRECTORIES[1:3]]
    assert not any(region in rig.world.stored.unheard for region in rig.regions)
    lost = rig.world.core.locate(B)  # the next to have it is another one
    assert isinstance(lost, ServerLost)
    assert "was taken over by" in lost.reason
    assert rig.world.core.awaited() == ()
    assert rig.directories.away() == ()
    assert rig.world.calls.orders == []  # nothing was rebuilt
    terms = {each.record.region: each.record.term for each in rig.world.journal.load().regions}
    assert [terms[region] for region in rig.regions] == [1, 1, 2, 2]


@rigged
async def test_two_that_see_the_same_share_it(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    extra = rig.world.add(rig.world.register(3, 3))
    rig.world.lose(server_id_of(DIRECTORIES[3]))
    free = [DIRECTORIES[2], DIRECTORIES[3]]
    rig.servers.paths = {A: free, B: free}
    rig.directories.open()
    await rig.until(lambda: len(rig.servers.dropped) == 2)
    assert {server for server, _ in rig.servers.dropped} == {A, B}
    assert rig.world.core.homes_of(extra)[0] in (A, B)


@rigged
async def test_who_is_drained_takes_nothing(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.leaving.add(A)
    rig.servers.paths = {A: [DIRECTORIES[2]], B: [DIRECTORIES[2]]}
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert rig.homes() == [A, A, B, B]


@rigged
async def test_one_that_is_nowhere_is_away_until_it_comes(rig: Rig) -> None:
    for index in range(1, 3):
        rig.world.register(index, index)
    assert rig.world.core.locate(A) == ServerRestarting(A)
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    (away,) = rig.directories.away()
    reason = "its directory is at no node"
    assert away == AwayDirectory(DIRECTORIES[0], 3, reason)
    with pytest.raises(errors.HomeLostError, match=reason):
        await rig.world.rebuilds.settle(rig.regions[0], 0.01)
    await rig.until(lambda: "new" in rig.started)
    rig.joins = lambda: rig.world.register(3, 0)  # a node with it joins
    await rig.until(lambda: rig.homes() == [A_AGAIN, A_AGAIN, B, C])
    assert await rig.world.rebuilds.settle(rig.regions[0], 1.0)
    assert rig.directories.away() == ()


@rigged
async def test_who_is_about_to_register_is_waited_for(rig: Rig) -> None:
    for index in range(1, 3):
        rig.world.register(index, index)
    rig.is_starting = lambda server_id: server_id == A
    rig.directories.open()
    assert not await rig.directories.until_open(0.1)
    assert rig.world.core.locate(A) == ServerRestarting(A)
    rig.world.register(0, 0)
    assert await rig.directories.until_open(5.0)
    assert rig.homes() == [A, A, B, C]


@rigged
async def test_what_is_damaged_there_stays_there(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    rig.servers.damaged = {rig.regions[3]}
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert rig.world.core.homes_of(rig.group[2]) == (A,)
    assert rig.homes()[3] == C
    assert rig.servers.dropped == []  # the rest is there still
    assert [each.directory for each in rig.directories.away()] == [DIRECTORIES[2]]


@rigged
async def test_a_full_journal_leaves_all_where_it_is(rig: Rig) -> None:
    """What is not written is given the next time."""
    for index in range(2):
        rig.world.register(index, index)
    journal, n_written = rig.world.journal, 0
    real = journal.rehome

    def rehome(*arguments: Any, **more: Any) -> None:
        nonlocal n_written
        n_written += 1
        if n_written == 2:
            raise errors.JournalFullError("full")
        real(*arguments, **more)

    journal.rehome = rehome  # type: ignore[method-assign]
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    rig.directories.open()
    await rig.until(lambda: rig.servers.dropped)
    assert rig.servers.n_taken == 2
    assert rig.homes() == [A, A, B, A]
    assert rig.servers.serves[A] == {rig.regions[3], rig.group[2]}


@rigged
async def test_a_taker_that_is_lost_has_taken_nothing(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    rig.servers.before["take_directory"] = lambda: rig.world.lose(A)
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert rig.homes() == [A, A, B, C]
    assert rig.servers.dropped == []


@rigged
async def test_one_that_cannot_be_taken_now_is_taken_later(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    rig.servers.failures = [errors.NoSpaceError("full")]
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    assert rig.homes() == [A, A, B, C]
    await rig.until(lambda: rig.homes() == [A, A, B, A])


@rigged
async def test_what_has_a_home_by_now_is_not_taken(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    rig.servers.before["take_directory"] = lambda: rig.world.stored.give([rig.group[2]], B)
    rig.directories.open()
    await rig.until(lambda: rig.homes() == [A, A, B, A])
    assert rig.world.core.homes_of(rig.group[2]) == (B,)
    await rig.until(lambda: rig.servers.dropped)
    assert rig.servers.prepared[A] == {rig.regions[3]}


@rigged
async def test_what_is_freed_meanwhile_ends_at_the_taker_too(rig: Rig) -> None:
    for index in range(2):
        rig.world.register(index, index)
    rig.servers.paths = {A: [DIRECTORIES[2]]}
    known: list[tuple[int, ...]] = []

    def free() -> None:
        known.append(rig.world.core.known_to(rig.regions[3]))
        rig.world.core.free(rig.regions[3])

    rig.servers.before["take_directory"] = free
    rig.directories.open()
    await rig.until(lambda: rig.servers.dropped)
    assert set(known[0]) >= {A, C}
    assert rig.world.core.homes_of(rig.group[2]) == (A,)


@rigged
async def test_a_node_that_is_lost_later_may_come_back_first(rig: Rig) -> None:
    """Only what is free for a while goes to another one."""
    for index in range(3):
        rig.world.register(index, index)
    rig.directories.open()
    assert await rig.directories.until_open(5.0)
    directories_module.FREE_S = 0.3  # which the test's frame takes back
    rig.servers.paths = {A: [DIRECTORIES[1]]}
    rig.world.lose(B)
    await rig.until(lambda: rig.started.count("new") > 2)
    assert rig.homes() == [A, A, B, C]
    waiting = asyncio.ensure_future(rig.world.rebuilds.settle(rig.regions[2], WAIT_S))
    await rig.until(lambda: rig.homes() == [A, A, A, C])
    assert await asyncio.wait_for(waiting, 1.0)

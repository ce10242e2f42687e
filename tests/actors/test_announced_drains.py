"""Nodes that Ray drains: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._protocol.names import server_id_of
from clamor_ray.actors.moves import announced_drains, drains
from clamor_ray.actors.moves.announced_drains import AnnouncedDrains
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.moves.moves import NoRoom
from tests.support.move_rig import OTHER, TAKER, World, run
from tests.support.server_rig import until

NODE = "ab" * 28
THERE = server_id_of(NODE)
NOW_S = 1_000_000.0


class Nodes:
    """What Ray says."""

    def __init__(self) -> None:
        self.announced: dict[str, float] = {}
        self.in_use: set[str] = set()
        self.failures: list[Exception] = []
        self.n_asked = 0

    def draining_nodes(self) -> dict[str, float]:
        self.n_asked += 1
        if self.failures:
            raise self.failures.pop()
        return dict(self.announced)

    def nodes_in_use(self) -> set[str]:
        if self.failures:
            raise self.failures.pop()
        return self.in_use


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Its node has a page server with two variables."""
    for module, name, seconds in [
        (drains, "PAUSE_S", 0.002),
        (drains, "PAUSE_MOST_S", 0.01),
        (announced_drains, "LOOK_S", 0.01),
        (announced_drains, "LOOK_MOST_S", 0.02),
        (announced_drains, "PAUSE_S", 0.01),
    ]:
        monkeypatch.setattr(module, name, seconds)
    world = World(tmp_path / "journal")
    info = ServerInfo(THERE, NODE, "127.0.0.1", 1, "name", "0")
    world.core.server_registered(info)
    world.journal.save_server(info)
    for _ in range(2):
        world.add_region(THERE)
    yield world
    world.journal.close()


class Rig:
    def __init__(self, world: World, moves: Any = None) -> None:
        self.world, self.nodes = world, Nodes()
        self.prepared: list[tuple[int, set[str]]] = []
        self.n_begun = 0
        self.now_s = NOW_S
        self.drains = world.drains if moves is None else Drains(world.core, world.journal, moves)
        self.announced = AnnouncedDrains(
            *(world.core, self.drains, self.nodes, self._prepare),
            begun=self._begun,
            label=lambda region: f"variable {region} 'x'",
            now_s=lambda: self.now_s,
        )

    async def _prepare(self, server_id: int, but: Collection[str]) -> None:
        self.prepared.append((server_id, set(but)))

    def _begun(self) -> None:
        self.n_begun += 1

    @property
    def there(self) -> tuple[int, ...]:
        return self.world.core.homed_at(THERE)


def of(world: World, work: Callable[[Rig], Any], moves: Any = None) -> None:
    async def whole() -> None:
        rig = Rig(world, moves)
        try:
            await work(rig)
        finally:
            await rig.announced.close()
            await world.close()

    run(whole)


class NoRoomAnywhere:
    """Nothing can be moved."""

    def __init__(self) -> None:
        self.does: Exception | None = NoRoom("The node is full.")
        self.world: World | None = None

    async def move(self, region: int, taker: int) -> int:
        await asyncio.sleep(0.001)
        if self.does is not None:
            raise self.does
        assert self.world is not None
        self.world.core.rehome(region, taker)
        return 10


def test_it_is_drained_before_its_deadline(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def work(rig: Rig) -> None:
        rig.announced.watch()
        await until(lambda: rig.nodes.n_asked > 3)
        assert len(rig.there) == 2
        rig.nodes.announced = {NODE: NOW_S + 20.0, "of another session": NOW_S}
        await until(lambda: not rig.there)
        await until(lambda: rig.n_begun == 1)
        assert rig.drains.leaving == (THERE,)
        assert rig.prepared == [(THERE, set(rig.nodes.announced))]
        n_asked = rig.nodes.n_asked
        await until(lambda: rig.nodes.n_asked > n_asked + 5)
        assert rig.n_begun == 1, "there is nothing more to do"
        late = world.add_region(THERE)
        await until(lambda: world.home(late) in (TAKER, OTHER, 1))
        assert not [each for each in caplog.records if each.levelno > logging.WARNING]

    of(world, work)


def test_what_stays_at_the_deadline_is_named(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost before the node goes, and it is tried again until then."""
    monkeypatch.setattr(announced_drains, "LATE_S", 0.1)
    moves = NoRoomAnywhere()
    moves.world = world

    async def work(rig: Rig) -> None:
        rig.nodes.announced = {NODE: NOW_S + 0.3}
        rig.announced.watch()
        await until(lambda: "its deadline is over" in caplog.text)
        (said,) = [each for each in caplog.records if each.levelno == logging.ERROR][:1]
        text = said.getMessage()
        assert f"Ray takes node {NODE} away" in text
        assert all(f"variable {region}" in text for region in rig.there)
        assert "within 0.3 s" in text
        assert "The node is full" in text
        assert "is lost with the node" in text
        assert len(rig.there) == 2
        rig.now_s += 10.0  # the deadline is over, and the node lives
        moves.does = None
        await until(lambda: not rig.there)

    of(world, work, moves)


def test_without_a_deadline_it_is_tried_again_and_again(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced_drains, "LATE_S", 0.05)
    moves = NoRoomAnywhere()
    moves.world = world

    async def work(rig: Rig) -> None:
        rig.nodes.announced = {NODE: math.inf}
        rig.announced.watch()
        await until(lambda: caplog.text.count("It is tried again") > 1)
        assert not [each for each in caplog.records if each.levelno > logging.WARNING]
        moves.does = None
        await until(lambda: not rig.there)

    of(world, work, moves)


def test_where_nobody_can_take_it_that_is_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(rig: Rig) -> None:
        for server_id in (1, TAKER, OTHER):
            world.lose(server_id)
        rig.nodes.announced = {NODE: NOW_S + 20.0}
        rig.announced.watch()
        await until(lambda: caplog.text.count("no other node of the session") > 1)
        text = caplog.text
        assert (
            "the 2 variables that it has cannot be moved (variable 2 'x', variable 3 'x')" in text
        )
        assert not rig.drains.is_leaving(THERE)

    of(world, work)


def test_a_drain_that_somebody_has_asked_for_goes_on(world: World) -> None:
    async def work(rig: Rig) -> None:
        hold = asyncio.Event()
        world.servers.before["take_seal"] = [hold.wait]
        asked = asyncio.ensure_future(rig.drains.drain(THERE, NODE, 10.0))
        await until(lambda: rig.drains.is_running(THERE))
        rig.nodes.announced = {NODE: NOW_S + 20.0}
        rig.announced.watch()
        await until(lambda: rig.nodes.n_asked > 5)
        assert rig.prepared == []
        hold.set()
        assert (await asked).moved == 2

    of(world, work)


def test_ray_is_asked_again_where_it_does_not_answer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(rig: Rig) -> None:
        rig.nodes.failures = [RuntimeError("the GCS is restarting")] * 3
        rig.nodes.announced = {NODE: NOW_S + 20.0}
        rig.announced.watch()
        await until(lambda: not rig.there)
        assert caplog.text.count("the GCS is restarting") == 3

    of(world, work)


def test_a_node_that_still_runs_something_keeps_its_page_server(world: World) -> None:
    """Ray would start no other one there."""

    async def work(rig: Rig) -> None:
        rig.nodes.in_use = {NODE}
        assert await rig.announced.keeps(NODE)  # nobody knows yet whether Ray drains it
        rig.announced._has_heard = True
        assert not await rig.announced.keeps(NODE)  # it gets another one
        rig.nodes.announced = {NODE: NOW_S + 20.0}
        rig.announced.watch()
        await until(lambda: not rig.there)
        assert await rig.announced.keeps(NODE)
        rig.nodes.in_use = set()
        assert not await rig.announced.keeps(NODE)

    of(world, work)


def test_where_ray_does_not_say_what_runs_there_it_stays(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.nodes.announced = {NODE: NOW_S + 20.0}
        rig.announced.watch()
        await until(lambda: not rig.there)
        await rig.announced.close()
        rig.nodes.failures = [errors.WaitTimeoutError("away")]
        assert await rig.announced.keeps(NODE)

    of(world, work)

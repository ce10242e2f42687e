"""Nodes that nothing uses, where an autoscaler runs: no Ray, page servers that are made up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clamor_ray.actors.moves import drains, idle_nodes
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.moves.idle_nodes import IdleNodes
from clamor_ray.actors.moves.moves import NoRoom
from tests.support.move_rig import GIVER, OTHER, TAKER, World, run
from tests.support.server_rig import until

IDLE_S = 0.05


class Nodes:
    """What Ray says."""

    is_scaled = True

    def __init__(self) -> None:
        self.in_use: set[str] = set()
        self.failures: list[Exception] = []
        self.n_asked = 0

    def is_autoscaled(self) -> bool:
        self.n_asked += 1
        if self.failures:
            raise self.failures.pop()
        return self.is_scaled

    def nodes_in_use(self) -> set[str]:
        return set(self.in_use)


class Rig:
    """Three servers, 1 to 3, on the nodes "node 1" to "node 3"; the last is the session's."""

    def __init__(self, world: World, moves: Any, idle_s: float) -> None:
        self.world, self.nodes = world, Nodes()
        self.uses: dict[int, int | None] = {}
        self.at_look: Callable[[int], int | None] = lambda server_id: self.uses.get(server_id, 0)
        self.n_begun = 0
        self.drains = world.drains if moves is None else Drains(world.core, world.journal, moves)
        self.idle = IdleNodes(
            *(world.core, self.drains, self.nodes, self._used, OTHER.__eq__, idle_s),
            begun=self._begun,
        )

    async def _used(self, server_id: int) -> int | None:
        return self.at_look(server_id)

    def _begun(self) -> None:
        self.n_begun += 1

    async def looks(self, n: int = 8) -> None:
        """So many looks pass, and more than the time after which one is idle."""
        n_asked = self.nodes.n_asked
        await until(lambda: self.nodes.n_asked >= n_asked + n)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(drains, "PAUSE_S", 0.002)
    monkeypatch.setattr(drains, "PAUSE_MOST_S", 0.01)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


def of(world: World, work: Callable[[Rig], Any], moves: Any = None, idle_s: float = IDLE_S) -> None:
    async def whole() -> None:
        rig = Rig(world, moves, idle_s)
        try:
            rig.idle.watch()
            await work(rig)
        finally:
            await rig.idle.close()
            await world.close()

    run(whole)


def test_what_idle_nodes_have_goes_to_those_that_stay(world: World) -> None:
    """They leave together: nothing moves from one to the other."""

    async def work(rig: Rig) -> None:
        regions = [world.region, world.add_region(TAKER), world.add_region(TAKER)]
        await until(lambda: [world.home(region) for region in regions] == [OTHER] * 3)
        assert rig.drains.leaving == (GIVER, TAKER)
        takers = {call[1] for call in world.servers.calls if call[0] == "take_begin"}
        assert takers == {OTHER}
        await until(lambda: rig.n_begun == 2)
        await rig.looks()
        assert rig.n_begun == 2

    of(world, work)


@pytest.mark.parametrize("by", ["ray", "our processes", "a server that is silent"])
def test_a_node_that_something_uses_stays(by: str, world: World) -> None:
    async def work(rig: Rig) -> None:
        if by == "ray":
            rig.nodes.in_use = {"node 1"}
        else:
            rig.uses[GIVER] = 1 if by == "our processes" else None
        await until(lambda: rig.drains.leaving == (TAKER,))
        await rig.looks()
        assert rig.drains.leaving == (TAKER,)
        rig.nodes.in_use.clear()
        rig.uses.clear()
        await until(lambda: rig.drains.leaving == (GIVER, TAKER))

    of(world, work)


def test_now_and_then_is_not_idle(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.at_look = lambda server_id: 0 if server_id == OTHER else rig.nodes.n_asked % 2
        await rig.looks(12)
        assert rig.n_begun == 0
        assert rig.drains.leaving == ()

    of(world, work, idle_s=0.01)


def test_without_an_autoscaler_nothing_is_moved(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.nodes.is_scaled = False
        await rig.looks()
        assert rig.drains.leaving == ()

    of(world, work)


def test_the_setting_turns_it_off(world: World) -> None:
    async def work(rig: Rig) -> None:
        await asyncio.sleep(0.2)
        assert rig.nodes.n_asked == 0

    of(world, work, idle_s=0.0)


def test_where_all_others_leave_nothing_is_begun(world: World) -> None:
    async def work(rig: Rig) -> None:
        world.lose(OTHER)
        await rig.looks(12)
        assert rig.drains.leaving == ()

    of(world, work)


def test_one_that_is_used_again_stays(world: World) -> None:
    """Also when all was moved already. One that somebody has drained leaves all the same."""

    async def work(rig: Rig) -> None:
        rig.uses[TAKER] = 1
        await rig.drains.drain(TAKER, "node 2", 5.0)
        await until(lambda: world.core.homed_at(GIVER) == ())
        assert rig.drains.leaving == (GIVER, TAKER)
        rig.nodes.in_use = {"node 1"}
        await until(lambda: rig.drains.leaving == (TAKER,))
        assert GIVER in rig.drains.others(OTHER)
        rig.nodes.in_use = set()
        await until(lambda: rig.drains.leaving == (GIVER, TAKER), 10 * idle_nodes.AGAIN * IDLE_S)

    of(world, work)


class FullNodes:
    """Nothing can be moved."""

    n_asked = 0

    async def move(self, region: int, taker: int) -> int:
        self.n_asked += 1
        await asyncio.sleep(0.001)
        raise NoRoom("The node is full.")


def test_what_others_have_no_room_for_stays(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its node takes homes again. It is not tried again at once."""
    monkeypatch.setattr(idle_nodes, "DRAIN_S", 0.1)
    caplog.set_level(logging.INFO)

    async def work(rig: Rig) -> None:
        rig.uses[TAKER] = 1
        await until(lambda: "stays: Node node 1 has not been drained" in caplog.text)
        assert "The node is full" in caplog.text
        assert rig.drains.leaving == ()
        assert world.home() == GIVER
        n_begun = rig.n_begun
        await rig.looks(6)
        assert rig.n_begun == n_begun

    of(world, work, FullNodes())


def test_a_cancelled_one_is_not_drained_again_at_once(world: World) -> None:
    async def work(rig: Rig) -> None:
        rig.uses[TAKER] = 1
        await until(lambda: rig.n_begun == 1)
        assert rig.drains.cancel(GIVER)
        await rig.looks(6)
        assert rig.drains.leaving == ()

    of(world, work)


def test_ray_is_asked_again_where_it_does_not_answer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(rig: Rig) -> None:
        rig.nodes.failures = [RuntimeError("the GCS is restarting")] * 3
        await until(lambda: bool(rig.drains.leaving))
        assert caplog.text.count("the GCS is restarting") == 3

    of(world, work)


def test_one_that_has_left_is_forgotten(world: World) -> None:
    async def work(rig: Rig) -> None:
        await until(lambda: rig.n_begun == 2)
        world.lose(GIVER)
        rig.drains.lost(GIVER)
        rig.idle.forget(GIVER)
        assert GIVER not in rig.idle._ours
        assert GIVER not in rig.idle._since_s
        await rig.looks()

    of(world, work)


@pytest.mark.parametrize("then", ["nothing uses it", "something uses it", "somebody has asked"])
def test_after_a_restart_of_the_registry_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Else the node took no variables, and kept those that it had."""
    monkeypatch.setattr(idle_nodes, "LOOK_S", 0.02)

    async def work(rig: Rig) -> None:
        rig.uses[TAKER] = 1
        world.servers.before["take"] = [asyncio.Event().wait]  # it is under way
        await until(lambda: "take" in [call[0] for call in world.servers.calls])
        if then == "somebody has asked":
            asked = asyncio.ensure_future(rig.drains.drain(GIVER, "node 1", 5.0))
            await asyncio.sleep(0)
            asked.cancel()
        await rig.idle.close()
        await world.close()
        world.servers.layers.clear()
        world.restart()
        assert world.home() == GIVER
        again = Rig(world, None, 10.0)  # nothing is idle for so long
        again.uses = {TAKER: 1, GIVER: 0 if then == "nothing uses it" else 1}
        again.idle.watch(world.journal.load().idle)
        try:
            if then == "nothing uses it":
                await until(lambda: world.home() != GIVER)
                assert again.drains.leaving == (GIVER,)
            elif then == "something uses it":
                await until(lambda: again.drains.leaving == ())
                assert world.home() == GIVER
                assert world.journal.load().idle == ()
            else:
                await again.looks(3)
                assert again.drains.leaving == (GIVER,)  # whoever has asked asks again
                assert world.home() == GIVER
        finally:
            await again.idle.close()

    of(world, work)

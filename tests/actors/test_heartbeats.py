"""Page servers that answer, or do not, and when somebody looks after them. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clamor_ray.actors.lost_homes import evidence, heartbeats
from clamor_ray.actors.lost_homes.heartbeats import Heartbeats
from clamor_ray.actors.process.background import BackgroundTasks
from tests.support.server_rig import until

ONE, TWO = 1, 2
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PERIOD_S", 0.05)
    monkeypatch.setattr(heartbeats, "TICK_S", 0.01)
    monkeypatch.setattr(heartbeats, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(heartbeats, "LOOK_AGAIN_MOST_S", 0.2)


class World:
    """Two servers; those in `silent` do not answer, those in `failing` cannot be asked."""

    def __init__(self) -> None:
        self.here = [ONE, TWO]
        self.silent: set[int] = set()
        self.failing: set[int] = set()
        self.answers: Counter[int] = Counter()
        self.looks: Counter[int] = Counter()
        self.under_way: Counter[int] = Counter()
        self.most_under_way = 0
        self.look_fails = False
        self.on_look: Callable[[], object] = lambda: None
        self.background = BackgroundTasks(logging.getLogger("test"))
        self.beats = Heartbeats(lambda: list(self.here), self._ask, self._look, self.background)

    async def _ask(self, server_id: int) -> None:
        self.under_way[server_id] += 1
        self.most_under_way = max(self.most_under_way, *self.under_way.values())
        try:
            if server_id in self.failing:
                raise RuntimeError("It is restarting.")
            await until(lambda: server_id not in self.silent)
            self.answers[server_id] += 1
        finally:
            self.under_way[server_id] -= 1

    async def _look(self, server_id: int) -> None:
        self.looks[server_id] += 1
        self.on_look()
        if self.look_fails:
            raise RuntimeError("Ray does not answer.")


def of(work: Callable[[World], Any]) -> None:
    async def whole() -> None:
        world = World()
        world.beats.watch()
        try:
            await asyncio.wait_for(work(world), WAIT_S)
        finally:
            await world.background.end()

    asyncio.run(whole())


async def answered(world: World, server_id: int, n: int = 20) -> None:
    before = world.answers[server_id]
    await until(lambda: world.answers[server_id] >= before + n)


def test_who_answers_is_left_alone() -> None:
    async def work(world: World) -> None:
        await answered(world, ONE)
        await answered(world, TWO)
        assert not world.looks
        assert not world.beats.is_suspected(ONE)
        assert world.most_under_way == 1

    of(work)


@pytest.mark.parametrize("how", ["silent", "failing"])
def test_who_is_silent_is_looked_at_again_and_again(how: str) -> None:
    """And the other one is not."""

    async def work(world: World) -> None:
        await answered(world, ONE)
        getattr(world, how).add(ONE)
        began_s = time.monotonic()
        await until(lambda: world.looks[ONE] >= 1)
        assert 0.3 < time.monotonic() - began_s < heartbeats.SILENT_MOST_S  # 5.6 deviations
        assert world.beats.is_suspected(ONE)
        await until(lambda: world.looks[ONE] >= 4)
        await answered(world, TWO)
        assert not world.looks[TWO]
        assert not world.beats.is_suspected(TWO)
        assert world.most_under_way == 1  # questions do not pile up

    of(work)


def test_who_is_silent_for_long_is_looked_at_less_often() -> None:
    """And as often as at first when it has answered."""

    async def work(world: World) -> None:
        times_s: list[float] = []
        world.on_look = lambda: times_s.append(time.monotonic())
        for _ in range(2):
            await answered(world, ONE)
            times_s.clear()
            world.silent.add(ONE)
            await until(lambda: len(times_s) >= 6)
            world.silent.clear()
            assert times_s[1] - times_s[0] < 0.2
            assert all(times_s[i + 1] - times_s[i] >= 0.19 for i in (3, 4))

    of(work)


def test_who_answers_again_is_forgiven() -> None:
    async def work(world: World) -> None:
        await answered(world, ONE)
        world.silent.add(ONE)
        await until(lambda: world.looks[ONE] >= 2)
        world.silent.clear()
        await answered(world, ONE)
        assert not world.beats.is_suspected(ONE)
        looks = world.looks[ONE]
        await answered(world, ONE)
        assert world.looks[ONE] == looks

    of(work)


def test_a_look_that_fails_is_done_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work(world: World) -> None:
        await answered(world, ONE)
        world.look_fails = True
        world.silent.add(ONE)
        await until(lambda: world.looks[ONE] >= 3)

    of(work)
    assert "0x1 cannot be looked at: RuntimeError('Ray does not answer.')" in caplog.text


def test_who_is_lost_is_asked_no_more() -> None:
    async def work(world: World) -> None:
        await answered(world, ONE)
        world.silent.add(ONE)
        await until(lambda: world.looks[ONE] >= 1)
        world.here.remove(ONE)
        await asyncio.sleep(0.1)  # what had begun
        looks = world.looks[ONE]
        await answered(world, TWO, 10)
        assert world.looks[ONE] == looks
        assert not world.beats.is_suspected(ONE)

    of(work)


def stop_everything(seconds: float) -> None:
    time.sleep(seconds)


def test_a_loop_that_was_stopped_suspects_nobody() -> None:
    """The registry's process was stopped, or had no CPU: answers wait for it, and nobody else."""

    async def work(world: World) -> None:
        await answered(world, ONE)
        for _ in range(3):
            stop_everything(1.5)
            await asyncio.sleep(0.02)
            assert not world.looks, world.looks
        await answered(world, ONE)
        assert not world.looks

    of(work)


def test_the_most_is_kept_where_answers_never_were_regular(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(world: World) -> None:
        world.silent.add(ONE)
        began_s = time.monotonic()
        await until(lambda: world.looks[ONE] >= 1)
        assert 0.9 < time.monotonic() - began_s < 1.9

    monkeypatch.setattr(heartbeats, "PERIOD_S", 10.0)  # expected: φ says nothing for long
    monkeypatch.setattr(heartbeats, "SILENT_MOST_S", 1.0)
    of(work)


# ------------------------------------------------------------------ what is gone for certain


@pytest.fixture
def silent_address() -> Iterator[tuple[str, int]]:
    """Of a listener whose queue is full: its host answers no more connection."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()


def _used_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    return host, port


def test_only_a_refusal_is_evidence(silent_address: tuple[str, int]) -> None:
    async def work() -> None:
        gone, also_gone = _used_port(), _used_port()
        began_s = time.monotonic()
        assert await evidence.all_refuse([gone, also_gone])
        assert time.monotonic() - began_s < 0.5
        assert not await evidence.refuses(silent_address, 0.2)
        assert not await evidence.all_refuse([gone, silent_address], 0.2)
        assert not await evidence.all_refuse([])
        with socket.create_server(("127.0.0.1", 0)) as listener:  # it never takes a connection
            assert not await evidence.all_refuse([gone, listener.getsockname()])

    asyncio.run(work())


def test_no_way_there_is_no_evidence() -> None:
    """An address that nothing routes to, and one that has no name."""
    for address in (("203.0.113.1", 9), ("0.0.0.256", 9)):
        assert not asyncio.run(evidence.refuses(address, 0.2))

"""Orders to page servers that regions are freed, without Ray: batches, pauses, servers that go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from clamor_ray import errors
from clamor_ray.actors.registry import region_ends, retiring
from clamor_ray.actors.registry.registry_core import Retire
from clamor_ray.actors.registry.retiring import BATCH_MOST, Retiring, ServerGone
from tests.support.server_rig import until

HERE, THERE = 7, 8


class World:
    """Page servers that answer what a test has them answer.

    Args:
        calls: (server, regions) of each call, in order.
        troubles: What the next calls of a server raise, or a future that they wait for.
        leased: Regions of which leases are left.
        refused: Regions that a server cannot retire now.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []
        self.troubles: dict[int, list[Any]] = {}
        self.leased: set[int] = set()
        self.refused: set[int] = set()
        self.done: list[tuple[int, int, bool]] = []
        self.lost: list[int] = []
        self.retiring = Retiring(self.tell, self.note, self.lose)

    async def tell(self, server_id: int, orders: list[Retire]) -> list[bool | None]:
        self.calls.append((server_id, [order.region for order in orders]))
        assert all(order.server_id == server_id for order in orders)
        for trouble in [waiting.pop(0) for waiting in (self.troubles.get(server_id),) if waiting]:
            if isinstance(trouble, asyncio.Future):
                await trouble
            else:
                raise trouble
        return [
            None if order.region in self.refused else order.region in self.leased
            for order in orders
        ]

    def note(self, server_id: int, told: list[tuple[Retire, bool]]) -> None:
        self.done += [(server_id, order.region, leased) for order, leased in told]

    def lose(self, server_id: int, failure: ActorDiedError) -> None:
        self.lost.append(server_id)
        self.retiring.server_lost(server_id)

    def order(self, server_id: int, *regions: int, force: bool = False) -> None:
        self.retiring.order(Retire(server_id, region, force) for region in regions)

    def regions_of(self, server_id: int) -> list[list[int]]:
        return [regions for server, regions in self.calls if server == server_id]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], Any]], None]:
    monkeypatch.setattr(retiring, "BATCH_S", 0.02)
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 30.0)  # who comes sooner was not waited for
    monkeypatch.setattr(retiring, "AGAIN_MOST_S", 30.0)

    def runner(work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def all_of_it() -> None:
            world = World()
            try:
                await asyncio.wait_for(work(world), 20)
            finally:
                world.retiring.close()

        asyncio.run(all_of_it())

    return runner


def test_orders_of_a_moment_are_one_call(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "BATCH_S", 1.0)  # a busy machine may pause between two of them

    async def work(world: World) -> None:
        world.leased = {2}
        for region in (1, 2, 3):
            world.order(HERE, region)
            await asyncio.sleep(0)
        world.order(THERE, 9)
        await until(lambda: len(world.done) == 4)
        assert sorted(world.calls) == [(HERE, [1, 2, 3]), (THERE, [9])]
        assert sorted(world.done) == [
            *((HERE, 1, False), (HERE, 2, True), (HERE, 3, False)),
            (THERE, 9, False),
        ]
        world.order(HERE, 4)  # the queue had ended
        await until(lambda: len(world.done) == 5)

    run(work)


def test_a_row_goes_out_as_soon_as_it_is_long(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "BATCH_S", 30.0)

    async def work(world: World) -> None:
        world.order(HERE, *range(1, BATCH_MOST))
        await asyncio.sleep(0.05)  # a call that must not come
        assert world.calls == []
        world.order(HERE, BATCH_MOST)
        await until(lambda: len(world.done) == BATCH_MOST)
        assert world.regions_of(HERE) == [list(range(1, BATCH_MOST + 1))]
        world.order(HERE, *range(1000, 1000 + 3 * BATCH_MOST))
        await until(lambda: len(world.done) == 4 * BATCH_MOST)
        assert [len(regions) for regions in world.regions_of(HERE)] == 4 * [BATCH_MOST]

    run(work)


def test_an_urgent_order_does_not_wait_for_a_batch(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "BATCH_S", 30.0)

    async def work(world: World) -> None:
        world.order(HERE, 1)
        world.order(THERE, 1, 2)
        (there,) = world.retiring.hurry(1, but=HERE)
        await asyncio.wait_for(there, 10)
        assert world.calls == [(THERE, [1, 2])]
        assert world.retiring.hurry(2) == []  # that was carried out with it
        (here,) = world.retiring.hurry(1)
        await asyncio.wait_for(here, 10)
        assert world.regions_of(HERE) == [[1]]

    run(work)


@pytest.mark.parametrize("trouble", [RayError("not now"), asyncio.TimeoutError(), OSError("?")])
def test_what_is_not_answered_is_said_again(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 0.02)

    async def work(world: World) -> None:
        world.troubles[HERE] = [trouble, trouble]
        world.order(HERE, 1)
        await until(lambda: bool(world.done))
        assert world.regions_of(HERE) == [[1]] * 3
        assert world.done == [(HERE, 1, False)]

    run(work)


def test_what_a_server_cannot_do_now_is_said_again_and_the_rest_is_not(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 0.02)

    async def work(world: World) -> None:
        world.refused = {2}
        world.order(HERE, 1, 2, 3)
        await until(lambda: len(world.calls) >= 3)
        world.refused = set()
        await until(lambda: len(world.done) == 3)
        assert world.regions_of(HERE)[0] == [1, 2, 3]
        assert all(regions == [2] for regions in world.regions_of(HERE)[1:])

    run(work)


def test_a_server_that_answers_again_is_not_waited_for(run: Callable[..., None]) -> None:
    """Pauses here are of 30 s: who comes sooner has broken them off."""

    async def work(world: World) -> None:
        world.troubles[HERE] = [RayError("not now")]
        world.order(HERE, 1)
        await until(lambda: len(world.calls) == 1)
        await asyncio.sleep(0.05)
        world.order(HERE, 2)  # nobody waits for it
        await asyncio.sleep(0.05)
        assert len(world.calls) == 1
        (waiting,) = world.retiring.hurry(2)
        await asyncio.wait_for(waiting, 5)
        assert sorted(world.done) == [(HERE, 1, False), (HERE, 2, False)]
        # The same where it registers; and where it is silent in a call when it does.
        world.troubles[HERE] = [RayError("not now")]
        world.order(HERE, 3)
        await until(lambda: len(world.calls) == 3)
        await asyncio.sleep(0.05)
        world.retiring.server_here(HERE)
        await until(lambda: len(world.done) == 3)
        world.troubles[HERE] = [asyncio.get_running_loop().create_future()]
        world.order(HERE, 4)
        await until(lambda: len(world.calls) == 5)
        world.retiring.server_here(HERE)
        await until(lambda: len(world.done) == 4)
        world.retiring.server_here(THERE)  # to whom there is nothing to say

    run(work)


@pytest.mark.parametrize("how", ["gone", "died", "told"])
def test_nothing_waits_for_a_server_that_is_lost(run: Callable[..., None], how: str) -> None:
    async def work(world: World) -> None:
        silent = asyncio.get_running_loop().create_future()
        trouble = {"gone": ServerGone(), "died": ActorDiedError(), "told": silent}[how]
        world.troubles[HERE] = [trouble]
        world.order(HERE, 1, 2)
        world.order(THERE, 1)
        waiting = world.retiring.hurry(1)
        await until(lambda: len(world.calls) == 2)
        if how == "told":
            world.retiring.server_lost(HERE)
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert world.done == [(THERE, 1, False)]
        assert world.lost == ([HERE] if how == "died" else [])
        assert world.retiring.hurry(2) == []
        await asyncio.sleep(0.05)
        assert len(world.calls) == 2

    run(work)


def test_an_order_that_comes_during_a_call_is_carried_out_too(run: Callable[..., None]) -> None:
    """The end of a region follows its first order: both are of one region."""

    async def work(world: World) -> None:
        answers = asyncio.get_running_loop().create_future()
        world.troubles[HERE] = [answers]
        world.order(HERE, 1)
        await until(lambda: len(world.calls) == 1)
        world.order(HERE, 1, force=True)
        answers.set_result(None)
        await until(lambda: len(world.done) == 2)
        assert world.regions_of(HERE) == [[1], [1]]

    run(work)


def of_ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What a person sees. A process that Ray has set up may log INFO as well."""
    seen = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record for record in seen if record.name.startswith("clamor_ray")]


def test_one_call_that_is_not_answered_is_not_said(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 0.02)
    caplog.set_level(logging.INFO)

    async def work(world: World) -> None:
        world.troubles[HERE] = [TimeoutError()]
        world.order(HERE, 1)
        await until(lambda: world.done == [(HERE, 1, False)])
        assert not of_ours(caplog)
        assert "holds memory of 1 freed variable(s) (id 1)" in caplog.text  # for who looks
        world.troubles[HERE] = [TimeoutError(), TimeoutError()]
        world.order(HERE, 2)
        await until(lambda: len(world.done) == 2)
        (record,) = of_ours(caplog)
        assert record.levelname == "WARNING"
        assert record.getMessage().endswith(
            "holds memory of 1 freed variable(s) (id 2) still: no answer in time "
            "(TimeoutError). It is asked again until it answers or is lost; there is nothing to do"
        )

    run(work)


def test_a_failure_of_ours_is_said_and_stops_no_later_order(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(world: World) -> None:
        def broken(*_: object) -> None:
            raise ValueError("a mistake of ours")

        world.retiring._done = broken
        world.order(HERE, 1)
        await until(lambda: "a mistake of ours" in caplog.text)
        world.retiring._done = world.note
        world.order(HERE, 2)
        await until(lambda: world.done == [(HERE, 2, False)])

    run(work)


@pytest.mark.parametrize("where", ["tell", "answer", "done", "lose"])
def test_no_order_is_dropped_by_a_failure_of_ours(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 0.02)

    async def work(world: World) -> None:
        broken_calls = 0

        def broken(*_: object) -> None:
            nonlocal broken_calls
            broken_calls += 1
            raise KeyError("a mistake of ours")

        async def too_few(*_: object) -> list[bool | None]:
            return [False]

        if where == "tell":
            world.troubles[HERE] = [KeyError("a mistake of ours")]
        elif where == "answer":
            world.retiring._tell = too_few
        elif where == "done":
            world.retiring._done = broken
        else:
            world.troubles[HERE] = [ActorDiedError()]
            world.retiring._lose = broken
        world.order(HERE, 1, 2)
        (waiting,) = world.retiring.hurry(1)
        if where == "answer":
            await asyncio.sleep(0.05)
            world.retiring._tell = world.tell
        elif where == "done":
            await until(lambda: broken_calls == 1)
            world.retiring._done = world.note
        await asyncio.wait_for(waiting, 5)
        await until(lambda: len(world.done) == 2)
        assert sorted(world.done) == [(HERE, 1, False), (HERE, 2, False)]

    run(work)


def test_orders_that_a_server_cannot_carry_out_hold_up_no_others(run: Callable[..., None]) -> None:
    """They are tried again after 30 s; the others go out with the next batch, or at once."""

    async def work(world: World) -> None:
        world.refused = set(range(1, 2 * BATCH_MOST + 1))
        world.order(HERE, *sorted(world.refused))
        await until(lambda: len(world.calls) == 2)
        world.order(HERE, 1000)
        await until(lambda: world.done == [(HERE, 1000, False)])
        world.refused = set()
        (waiting,) = world.retiring.hurry(2 * BATCH_MOST)  # the last of them
        await asyncio.wait_for(waiting, 5)

    run(work)


def test_an_order_that_fails_its_call_is_alone_in_the_end(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring, "AGAIN_FIRST_S", 0.005)
    monkeypatch.setattr(retiring, "AGAIN_MOST_S", 0.01)

    async def work(world: World) -> None:
        bad = 5
        tell = world.retiring._tell

        async def fails(server_id: int, orders: list[Retire]) -> list[bool | None]:
            if any(order.region == bad for order in orders):
                raise KeyError(bad)
            return await tell(server_id, orders)

        world.retiring._tell = fails
        regions = [region for region in range(3 * BATCH_MOST) if region != bad]
        world.order(HERE, bad, *regions)
        await until(lambda: len(world.done) == len(regions))
        assert sorted(region for _, region, _ in world.done) == regions
        (waiting,) = world.retiring.hurry(bad)
        assert not waiting.done()
        world.retiring._tell = tell
        await asyncio.wait_for(waiting, 5)

    run(work)


def test_hurrying_an_order_under_way_waits_for_no_second_call(
    run: Callable[..., None],
) -> None:
    async def work(world: World) -> None:
        answers = asyncio.get_running_loop().create_future()
        world.troubles[HERE] = [answers]
        world.order(HERE, 1)
        await until(lambda: len(world.calls) == 1)
        (waiting,) = world.retiring.hurry(1)
        world.order(HERE, 2)
        answers.set_result(None)
        await asyncio.wait_for(waiting, 5)
        await until(lambda: len(world.done) == 2)
        assert world.regions_of(HERE) == [[1], [2]]

    run(work)


# ------------------------------------------------------------------ what follows an order


class Core:
    """A region that is idle at once, and must then be dropped by both servers."""

    def __init__(self) -> None:
        self.dropped_at: list[int] = []
        self.asked = False

    def region_idle(self, region: int, server_id: int) -> tuple[Retire, ...]:
        if self.asked:
            return ()
        self.asked = True
        return (Retire(HERE, region, True), Retire(THERE, region, True))

    def dropped(self, region: int, server_id: int) -> None:
        self.dropped_at.append(server_id)

    def waited_for(self) -> tuple[int, ...]:
        return ()


class Late:
    def __init__(self) -> None:
        self.failures: list[Exception] = []

    def save_changed(self) -> None:
        if self.failures:
            raise self.failures.pop()


def test_orders_that_follow_outlive_a_journal_that_fails() -> None:
    """The core makes them once: who loses them leaves the memory of the region where it is."""

    class Closed:
        is_closed = True

    class Living:
        def actor_died(self, server_id: int, failure: ActorDiedError) -> None:
            raise AssertionError(server_id)

    async def work() -> None:
        core, late = Core(), Late()
        never = asyncio.Event().wait  # its own call is replaced below
        given = (core, {}, late, Living(), Closed(), never)
        ends = region_ends.RegionEnds(*given)  # type: ignore[arg-type]
        told: list[tuple[int, bool]] = []

        async def tell(server_id: int, orders: list[Retire]) -> list[bool | None]:
            told.extend((server_id, order.force) for order in orders)
            if not core.asked:
                late.failures.append(errors.InternalError("SQLite says no."))
            return [False] * len(orders)

        ends._retiring._tell = tell
        ends.carry_out([Retire(HERE, 1, False)])
        await until(lambda: sorted(core.dropped_at) == [HERE, THERE])
        assert {(HERE, True), (THERE, True)} <= set(told)

    asyncio.run(asyncio.wait_for(work(), 20))

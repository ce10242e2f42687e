"""A layer that must be in a synced file before it is applied: whom the page server's core tells."""

from __future__ import annotations

from typing import Any

from clamor_ray.actors.page_server.engine_like import EventKind
from tests.support.server_rig import HERE, FakeEvent, Node, until

ASKED = FakeEvent(EventKind.NEED_DURABLE, 7, version=3, commit_id=5)


def test_the_store_is_told_and_what_comes_next_does_not_wait(run_core: Any) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            wanted: list[tuple[int, int, int]] = []
            here.core._durable_wanted = lambda *what: wanted.append(what)
            here.engine.ask(ASKED)
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, 8))
            await until(lambda: bool(here.engine.answers))
            assert wanted == [(7, 5, 3)]

    run_core(work)


def test_without_a_store_it_is_an_event_that_nobody_knows(run_core: Any, caplog: Any) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.ask(ASKED)
            await until(lambda: "unknown event 16" in caplog.text)

    run_core(work)

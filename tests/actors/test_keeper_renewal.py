"""A keeper that is started in place of one that died, while the session ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerConfig, ServerLost
from clamor_ray.actors.page_server import page_server
from clamor_ray.actors.page_server.engine_like import EventKind
from clamor_ray.actors.page_server.page_server import PageServer
from tests.support.server_rig import HERE, THERE, FakeEvent, Node, until

WAIT_S = 30.0


class Keeper:
    def __init__(self) -> None:
        self.was_told_to_leave = False

    def quit(self) -> None:
        self.was_told_to_leave = True


class Engine:
    is_stopped = False

    def end(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True

    def renew_keeper(self, keeper: Keeper) -> None:
        if self.is_stopped:
            raise errors.ClosedError("It was stopped.")


def test_one_that_is_being_started_leaves_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would tell it later: it would stay for CLAMOR_ORPHAN_S."""
    begun, goes_on = threading.Event(), threading.Event()
    new = Keeper()

    def spawn(*_: Any, **__: Any) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)

    monkeypatch.setattr(page_server.keepers, "end_keeper", lambda _: None)
    monkeypatch.setattr(page_server.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(page_server.keeper_process, "spawn", spawn)
    monkeypatch.setattr(page_server._native, "Keeper", lambda *_, **__: new)
    server = object.__new__(PageServer)
    engine = Engine()
    server.__dict__.update(
        _stopped=False,
        _keeper=Keeper(),
        _keeper_name="keeper",
        _renewing=threading.Lock(),
        _ending=threading.Lock(),
        _engine=engine,
        _core=SimpleNamespace(close=lambda: None),
        _moved_homes=SimpleNamespace(close=lambda: None),
        _file_reads=SimpleNamespace(close=lambda: None),
        _away=SimpleNamespace(close=lambda: None),
        _on_loop=lambda _: None,
        _pins=SimpleNamespace(regions={}),
    )
    renews = threading.Thread(target=server._renew_keeper, args=(ServerConfig("scope", "0.1.0"),))
    renews.start()
    assert begun.wait(WAIT_S)
    stops = threading.Thread(target=server.stop)
    stops.start()
    goes_on_later = threading.Timer(0.2, goes_on.set)
    goes_on_later.start()
    stops.join(WAIT_S)
    assert new.was_told_to_leave
    renews.join(WAIT_S)
    assert not renews.is_alive()
    assert not stops.is_alive()


@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "No memory")]
)
def test_it_is_tried_again_whatever_fails(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There would be no keeper for as long as the page server lives."""
    new, failures = Keeper(), [failure]

    def spawn(*_: Any, **__: Any) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(page_server.keepers, "end_keeper", lambda _: None)
    monkeypatch.setattr(page_server.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(page_server.keeper_process, "spawn", spawn)
    monkeypatch.setattr(page_server._native, "Keeper", lambda *_, **__: new)
    monkeypatch.setattr(page_server.time, "sleep", lambda _: None)
    server = object.__new__(PageServer)
    server.__dict__.update(
        _stopped=False,
        _keeper=Keeper(),
        _keeper_name="keeper",
        _renewing=threading.Lock(),
        _engine=Engine(),
    )
    server._renew_keeper(ServerConfig("scope", "0.1.0"))
    assert server._keeper is new
    assert not failures


def test_where_no_thread_can_be_started_the_loss_is_not_forgotten(run_core: Any) -> None:
    """The engine says it once."""

    async def work() -> None:
        async with Node(HERE) as here:
            asked = []

            def lost() -> None:
                asked.append(1)
                if len(asked) < 3:
                    raise RuntimeError("can't start new thread")

            here.core._keeper_lost = lost
            here.engine.ask(FakeEvent(EventKind.KEEPER_LOST))
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            here.known.places[THERE] = [ServerLost(THERE, "node died")]
            await until(lambda: len(asked) == 3)
            await until(lambda: bool(here.engine.answers))  # nor is what came after it

    run_core(work)


@pytest.mark.parametrize("fails_at", ["end", "close", "stop"])
def test_the_keeper_is_told_to_leave_whatever_else_fails(fails_at: str) -> None:
    """As where the loop is busy for longer than anybody waits for it: who stops does so once."""
    keeper, engine = Keeper(), Engine()

    def fail(*_: Any) -> None:
        raise TimeoutError("The loop has not answered.")

    if fails_at != "close":
        setattr(engine, fails_at, fail)
    server = object.__new__(PageServer)
    server.__dict__.update(
        _stopped=False,
        _keeper=keeper,
        _renewing=threading.Lock(),
        _ending=threading.Lock(),
        _engine=engine,
        _core=SimpleNamespace(close=lambda: None),
        _moved_homes=SimpleNamespace(close=lambda: None),
        _file_reads=SimpleNamespace(close=lambda: None),
        _away=SimpleNamespace(close=lambda: None),
        _on_loop=fail if fails_at == "close" else lambda _: None,
        _pins=SimpleNamespace(regions={1: "an object"}),
    )
    with pytest.raises(TimeoutError):
        server.stop()
    assert keeper.was_told_to_leave
    assert not server._pins.regions

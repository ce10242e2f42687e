"""How a page server ends that nothing uses, and how the registry has it end. No Ray."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from clamor_ray import errors
from clamor_ray._protocol.messages import LEFT, ServerConfig, ServerInfo, ServerLost
from clamor_ray._protocol.names import server_id_of
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.page_server import page_server
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.page_server.pinned_objects import PinnedObjects
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.process.starting import EXIT_TRY_AGAIN
from clamor_ray.actors.registry import servers as servers_module
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import Liveness
from clamor_ray.actors.registry.registry_core import RegistryCore
from clamor_ray.actors.registry.servers import PageServers

NODE = "ab" * 28
FIRST, SECOND = server_id_of(NODE), server_id_of(NODE, 1)
WAIT_S = 20.0

# ---------------------------------------------------------------- the server


class Keeper:
    was_told_to_leave = False

    def quit(self) -> None:
        self.was_told_to_leave = True


class Engine:
    server_id = 7
    n_used = 0
    n_homes = 0
    missed = 0  # what comes while it ends
    n_left = 0

    def leave(self) -> int:
        self.n_left += 1
        return self.missed

    n_opened = 0

    def new_opens(self) -> int:
        n_opened, self.n_opened = self.n_opened, 0
        return n_opened

    def in_use(self, but_homes: bool = False) -> int:
        return self.n_used if but_homes else self.n_used + self.n_homes


class Exited(BaseException):
    """Instead of the end of the test's process."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> PageServer:
    def leave_process(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(page_server.os, "_exit", leave_process)
    monkeypatch.setattr(page_server.logging, "shutdown", lambda: None)
    server = object.__new__(PageServer)
    server.__dict__.update(
        _stopped=False,
        _ending=threading.Lock(),
        _renewing=threading.Lock(),
        _keeper=Keeper(),
        _engine=Engine(),
        _core=SimpleNamespace(close=lambda: None, n_watching=0),
        _moved_homes=SimpleNamespace(close=lambda: None),
        _file_reads=SimpleNamespace(close=lambda: None),
        _away=SimpleNamespace(close=lambda: None),
        _on_loop=lambda _: None,
        _pins=PinnedObjects(Engine(), None, "here"),
    )
    return server


def test_it_ends_with_its_keeper_and_says_so_again(server: Any) -> None:
    assert server.leave() == 7
    assert server._keeper.was_told_to_leave
    assert server.leave() == 7
    assert server._engine.n_left == 1
    server.stop()  # the session ends: there is nothing to do any more


def test_a_use_that_was_short_is_seen_when_it_is_asked_next(server: Any) -> None:
    """Whether the node is idle; whether the server may end is about what is in use now."""
    server._engine.n_opened = 3
    assert server.in_use() == 0
    assert server.in_use(but_homes=True) == 3
    assert server.in_use(but_homes=True) == 0


@pytest.mark.parametrize("what", ["engine", "watching", "pinning"])
def test_it_goes_on_while_it_is_used(server: Any, what: str) -> None:
    if what == "engine":
        server._engine.n_used = 2
    elif what == "watching":
        server._core.n_watching = 1
    else:
        server._pins._pinning[5] = Future()
    assert server.in_use() > 0
    assert server.leave() == 0
    assert not server._keeper.was_told_to_leave
    assert server._engine.n_left == 0
    if what == "pinning":
        server._pins._pinning[5].set_result(None)
        assert server.leave() == 7


def test_homes_are_no_use_of_its_own_node(server: Any) -> None:
    server._engine.n_homes, server._engine.n_used = 4, 2
    assert server.in_use() == 6
    assert server.in_use(but_homes=True) == 2


@pytest.mark.parametrize("why", ["a lease", "the loop is busy"])
def test_what_comes_at_the_last_moment_makes_it_a_restart(
    server: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The keeper stays, and has all that is needed."""

    def fail(_: object) -> None:
        raise TimeoutError("The loop has not answered.")

    if why == "a lease":
        server._engine.missed = 1
    else:
        server._on_loop = fail
    with pytest.raises(Exited) as exited:
        server.leave()
    assert exited.value.args == (EXIT_TRY_AGAIN,)
    assert not server._keeper.was_told_to_leave
    assert ("1 uses" if why == "a lease" else "The loop") in caplog.text


# -------------------------------------------------------------- the registry


class Handle:
    """The server's actor. An exception among its answers is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.calls.append(method)
            self.arguments.append(arguments)
            self.meanwhile()
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return SimpleNamespace(remote=call)


class Rig:
    """A registry's page servers; the first of the node is registered."""

    def __init__(self, directory: Path, handle: Handle, patch: pytest.MonkeyPatch) -> None:
        self.handle = handle
        self.killed: list[Any] = []
        patch.setattr(servers_module.ray, "kill", self.killed.append)
        patch.setattr(servers_module.ray, "get_actor", self._get_actor)
        self.core, log = RegistryCore(), CommitLog()
        self.journal = Journal(directory)
        background = BackgroundTasks(logging.getLogger("test"))
        late = LateWrites(self.core, self.journal, background)
        self.handles: dict[int, Any] = {FIRST: handle}
        liveness = Liveness(self.core, log, self.handles, late)
        self.servers = PageServers(
            config=ServerConfig("scope", "0.1.0"),
            core=self.core,
            journal=self.journal,
            reserve=SimpleNamespace(),  # type: ignore[arg-type]
            handles=self.handles,
            late=late,
            liveness=liveness,
            ends=SimpleNamespace(),  # type: ignore[arg-type]
            here=lambda server_id: None,
            background=background,
        )
        liveness.when_lost.append(self.servers.server_lost)
        info = ServerInfo(FIRST, NODE, "10.0.0.1", 1, "name", "0.1.0")
        self.core.server_registered(info)
        self.journal.save_server(info)

    def _get_actor(self, *_: object, **__: object) -> Any:
        if self.killed:
            raise ValueError("There is none.")
        return self.handle


def of(
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    work: Callable[[Rig], Any],
    *answers: Any,
) -> None:
    async def whole() -> None:
        rig = Rig(tmp_path / "journal", Handle(*answers), patch)
        try:
            await asyncio.wait_for(work(rig), WAIT_S)
        finally:
            rig.journal.close()

    asyncio.run(whole())


def yes() -> bool:
    return True


def no() -> bool:
    return False


def test_the_registry_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is as lost, but nobody is alarmed, and its node gets no other one by itself."""

    async def work(rig: Rig) -> None:
        seen: list[bool] = []
        rig.handle.meanwhile = lambda: seen.append(rig.servers.is_here(NODE))
        assert rig.servers.is_here(NODE)
        assert await rig.servers.leave(FIRST, yes)
        assert seen == [False]  # nothing is made there while it decides
        assert rig.killed == [rig.handle]
        assert rig.core.locate(FIRST) == ServerLost(FIRST, LEFT)
        assert rig.core.server_id_at(NODE) == SECOND
        assert rig.handles == {}
        assert [lost.reason for lost in rig.journal.load().lost] == [LEFT]
        assert not rig.servers._background._tasks
        assert not [each for each in caplog.records if each.levelno > logging.INFO]
        assert not await rig.servers.leave(FIRST, yes)

    of(tmp_path, monkeypatch, work, FIRST)


@pytest.mark.parametrize("who", ["registry", "server"])
def test_one_that_may_not_leave_goes_on(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(rig: Rig) -> None:
        assert not await rig.servers.leave(FIRST, no if who == "registry" else yes)
        assert rig.handle.calls == ([] if who == "registry" else ["leave"])
        assert rig.servers.is_here(NODE)
        assert rig.killed == []

    of(tmp_path, monkeypatch, work, 0)


@pytest.mark.parametrize("failure", [RayError("away"), asyncio.TimeoutError()], ids=repr)
def test_where_its_answer_is_lost_it_is_asked_until_it_says(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have ended: then it counts as unused whatever has been made there since."""

    async def work(rig: Rig) -> None:
        assert not await rig.servers.leave(FIRST, yes)
        assert rig.servers.is_here(NODE)
        assert await rig.servers.in_use(FIRST) == 0
        assert await rig.servers.leave(FIRST, no)
        assert rig.core.locate(FIRST) == ServerLost(FIRST, LEFT)

    of(tmp_path, monkeypatch, work, failure, FIRST)


def test_an_earlier_registry_may_have_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(rig: Rig) -> None:
        rig.servers.take_back([FIRST])
        assert await rig.servers.in_use(FIRST) == 0
        assert rig.handle.calls == []
        assert not await rig.servers.leave(FIRST, no)  # it says that it goes on
        assert not await rig.servers.leave(FIRST, no)  # and is one as any from then on
        assert rig.handle.calls == ["leave"]

    of(tmp_path, monkeypatch, work, 0)


def test_one_that_was_restarted_meanwhile_ends_under_both_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(rig: Rig) -> None:
        assert await rig.servers.leave(FIRST, yes)
        assert rig.core.locate(SECOND) == ServerLost(SECOND, LEFT)

    of(tmp_path, monkeypatch, work, SECOND)


def test_one_that_is_dead_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        assert not await rig.servers.leave(FIRST, yes)
        answer = rig.core.locate(FIRST)
        assert isinstance(answer, ServerLost)
        assert "its actor is dead" in answer.reason

    monkeypatch.setattr(PageServers, "server_lost", lambda *_: None)
    of(tmp_path, monkeypatch, work, ActorDiedError())


def test_what_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        examined: list[int] = []

        async def examine(info: ServerInfo) -> None:
            examined.append(info.server_id)

        monkeypatch.setattr(rig.servers._liveness, "examine", examine)
        assert await rig.servers.in_use(FIRST) == 3
        assert examined == []
        assert await rig.servers.in_use(FIRST) is None  # it does not answer
        assert examined == [FIRST]  # its node may be dead
        assert await rig.servers.in_use(SECOND) is None  # it is not known
        assert await rig.servers.used(FIRST) == 1
        assert rig.handle.arguments == [(False,), (False,), (True,)]

    of(tmp_path, monkeypatch, work, 3, RayError("away"), 1)


def test_spare_nodes_are_those_that_never_had_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was drained has left, or will; one that Ray takes away is none."""
    new, announced, drained = ("cd" * 28, "ef" * 28, "01" * 28)
    started: list[str] = []

    async def ensure(_: PageServers, node_id: str) -> None:
        started.append(node_id)

    async def work(rig: Rig) -> None:
        assert await rig.servers.leave(FIRST, yes)
        await rig.servers.start_spares({announced}, server_id_of(drained).__eq__)

    monkeypatch.setattr(PageServers, "ensure", ensure)
    monkeypatch.setattr(servers_module, "alive_nodes", lambda: {NODE, new, announced, drained})
    of(tmp_path, monkeypatch, work, FIRST)
    assert started == [new]


def test_the_node_of_one_that_has_left_can_have_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its drain is undone. A node that has one, or never had, gets none by that."""
    started: list[str] = []

    async def ensure(_: PageServers, node_id: str) -> None:
        started.append(node_id)

    async def work(rig: Rig) -> None:
        assert not await rig.servers.come_back("cd" * 28)
        assert not await rig.servers.come_back(NODE)
        assert await rig.servers.leave(FIRST, yes)
        assert await rig.servers.come_back(NODE)
        assert started == [NODE]
        with pytest.raises(errors.NoSuchNodeError):
            await rig.servers.come_back("ef" * 28)

    monkeypatch.setattr(PageServers, "ensure", ensure)
    monkeypatch.setattr(servers_module, "alive_nodes", lambda: {NODE, "cd" * 28})
    of(tmp_path, monkeypatch, work, FIRST)

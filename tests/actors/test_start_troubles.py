"""Each trouble that may pass while an actor of ours starts ends its process, so that Ray starts it
again; none is raised. See test_start_again.py for some of them in a cluster."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import inspect
import os
import sqlite3
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerConfig
from clamor_ray.actors.commits import sqlite_file
from clamor_ray.actors.page_server import page_server
from clamor_ray.actors.page_server.keepers import KeeperHold
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.process import journals, keeper_process, starting
from clamor_ray.actors.process.journals import journal_directory
from clamor_ray.actors.registry import registry
from clamor_ray.actors.registry.registry import Registry
from tests.conftest import until
from tests.support.session_rig import watchers

CONFIG = ServerConfig("scope", "0.1.0")
NODE = "ab" * 28


class Ended(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(starting.logging, "shutdown", lambda: None)
    monkeypatch.setattr(starting, "PAUSES_S", (0.0,))
    monkeypatch.setattr(journals, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(page_server, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(keeper_process, "raylet_pid", lambda: 1)
    return ended


# ------------------------------------------------------------------ the page server


class FakeRegistry:
    """Notes what it is told of a start that failed."""

    def __init__(self) -> None:
        self.told: list[tuple[BaseException, bool]] = []
        self.start_failed = SimpleNamespace(remote=self._failed)

    def _failed(self, _node_id: str, cause: BaseException, is_final: bool) -> None:
        self.told.append((cause, is_final))


def start_server(
    monkeypatch: pytest.MonkeyPatch, trouble: BaseException, was_restarted: bool
) -> FakeRegistry:
    def fail(*_: object) -> None:
        raise trouble

    context = SimpleNamespace(
        get_node_id=lambda: NODE, was_current_actor_reconstructed=was_restarted
    )
    monkeypatch.setattr(page_server.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(page_server.ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(PageServer, "_start", fail)
    monkeypatch.setattr(PageServer, "_end_keepers", lambda *_: None)
    fake = FakeRegistry()
    PageServer(fake, CONFIG, NODE)
    return fake


PASSES: list[BaseException] = [
    GetTimeoutError("the registry did not answer"),
    ActorUnavailableError("the registry is restarting", None),
    OSError(24, "Too many open files"),
    OSError(12, "Cannot allocate memory"),
    MemoryError(),
    KeyError("x"),
    TimeoutError(),
    errors.DescriptorLimitError("There are none left."),
    errors.OutOfMemoryError("There is none left."),
    errors.WaitTimeoutError("The keeper did not answer in time."),
    errors.HomeLostError("The keeper had only a part."),
    keeper_process.KeeperError("the lock is in use by another process"),
]


@pytest.mark.parametrize("was_restarted", [False, True])
@pytest.mark.parametrize("trouble", PASSES, ids=repr)
def test_a_page_server_tries_again(
    trouble: BaseException,
    was_restarted: bool,
    codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Ended):
        start_server(monkeypatch, trouble, was_restarted)
    assert codes == [starting.EXIT_TRY_AGAIN]


@pytest.mark.parametrize("final", starting.FINAL)
def test_what_cannot_pass_is_raised_by_one_that_has_never_served(
    final: type[errors.ClamorError], codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(final):
        start_server(monkeypatch, final("No."), was_restarted=False)
    assert codes == []
    with pytest.raises(Ended):  # its keeper has what it served: it is not given up
        start_server(monkeypatch, final("No."), was_restarted=True)
    assert codes == [starting.EXIT_TRY_AGAIN]


def test_nothing_is_tried_when_the_session_is_over(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ActorDiedError):
        start_server(monkeypatch, ActorDiedError(), was_restarted=True)
    assert codes == []


def asking(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[PageServer, list[str]]:
    """A page server whose registry gives these answers, or fails so; what it was sent."""
    sent: list[str] = []
    now_s = [0.0]

    def get(_: object, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, GetTimeoutError):
            now_s[0] += timeout
            raise answer
        return answer

    class Handle:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: sent.append(method))

    monkeypatch.setattr(page_server.ray, "get", get)
    monkeypatch.setattr(page_server.time, "monotonic", lambda: now_s[0])
    server = object.__new__(PageServer)
    server._registry = Handle()
    server._held_keepers = KeeperHold([])
    return server, sent


@pytest.mark.parametrize(
    "method", ["begin_server", "renew_server", "floors_at", "secret", "shared_at"]
)
def test_a_registry_that_is_slow_is_waited_for(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_late = int(page_server.START_CALL_S / page_server.CALL_S) - 1
    server, sent = asking(monkeypatch, [GetTimeoutError("late")] * n_late + ["answer"])
    assert server._ask(method, 1) == "answer"
    assert sent == [method]  # once: it is the answer that is late
    server, _ = asking(monkeypatch, [GetTimeoutError("late")] * (n_late + 1))
    with pytest.raises(GetTimeoutError):
        server._ask(method, 1)


def test_each_call_of_a_start_is_one_that_waits() -> None:
    """None goes to the registry with a deadline of its own."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(PageServer._start)))
    called = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "registry"
    ]
    assert {"begin_server", "floors_at", "secret", "shared_at", "register_server"} <= set(called)
    direct = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "remote"
    ]
    assert direct == []


# ------------------------------------------------------------------ the registry


def raises(where: str, failure: BaseException) -> Callable[[pytest.MonkeyPatch], None]:
    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise failure

        monkeypatch.setattr(registry, where, fail)

    return prepare


def the_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor takes longer to die than is waited for."""
    monkeypatch.setattr(keeper_process, "LOCK_S", 0.05)
    hold = keeper_process.hold

    def hold_while_held(path: Path, flags: int = os.O_CREAT) -> int:
        other = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            return hold(path, flags)
        finally:
            os.close(other)

    monkeypatch.setattr(keeper_process, "hold", hold_while_held)


def the_journal_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "LOCK_S", 0.05)
    connect = sqlite3.connect

    def connect_while_locked(path: Any, **options: Any) -> sqlite3.Connection:
        other = connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        held.append(other)
        return connect(path, **options)

    held: list[sqlite3.Connection] = []
    monkeypatch.setattr(sqlite_file.sqlite3, "connect", connect_while_locked)


def a_process_starts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_process, "START_S", 0.001)


TROUBLES = {  # and what the log says of each
    "the old one's lock": (the_lock_is_held, "in use by another process"),
    "the journal's lock": (the_journal_is_locked, "locked"),
    "a slow watcher": (a_process_starts_slowly, "cannot start a keeper: TimeoutExpired"),
    "no descriptors": (raises("Journal", OSError(24, "Too many open files")), "Too many open"),
    "no memory": (raises("Commits", MemoryError()), "MemoryError"),
    "a full disk": (raises("Reserve", errors.JournalFullError("The disk is full.")), "is full"),
    "anything": (raises("LineageService", KeyError("x")), "KeyError"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_registry_tries_again(
    trouble: str,
    codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raylet: subprocess.Popen[bytes],
) -> None:
    monkeypatch.setattr(keeper_process, "raylet_pid", lambda: raylet.pid)
    directory = journal_directory(CONFIG.job_scope)
    directory.mkdir(parents=True)
    registry.Journal(directory).close()  # there was one before

    async def start() -> None:
        Registry(CONFIG, bytes(32))

    prepare, said = TROUBLES[trouble]
    prepare(monkeypatch)
    with pytest.raises(Ended):
        asyncio.run(start())
    assert codes == [starting.EXIT_TRY_AGAIN]
    (line,) = [line for line in caplog.messages if "the registry cannot start" in line]
    assert said in line
    raylet.kill()
    until(lambda: not watchers(directory))

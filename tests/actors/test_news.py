"""Who hears of a commit: once each node, whatever is restarted meanwhile. No Ray here."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import INLINE_BASE, NEWS_FREED, CommitRequest, Write
from clamor_ray._protocol.names import news_socket
from clamor_ray._session.news import ProcessNews as ProcessNews
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.page_server import news as server_news
from clamor_ray.actors.page_server.news import NewsServer
from clamor_ray.actors.registry.news import News
from tests.conftest import until

WAIT_S = 60.0
HOME = 7


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, WAIT_S))


async def turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def commit(log: CommitLog, region: int) -> int:
    base = log.newest(region)
    if region >= INLINE_BASE:
        write = Write(region, base, 0, b"", 0, 0, payload=b"content")
    else:
        write = Write(region, base, 1, BitMap([0]).serialize(), 4096, HOME)
    number = 1000 * (region % 1000) + base + 1
    return log.apply(number, log.prepare(CommitRequest(number, (write,))), 0.0).versions[region]


@pytest.fixture
def log() -> CommitLog:
    log = CommitLog()
    for region in (1, 2):
        log.open(region, (HOME,))
    return log


# ------------------------------------------------------------------ the registry


def test_each_server_that_waits_is_answered_once(log: CommitLog) -> None:
    async def work() -> None:
        news = News(log)
        waits = [
            asyncio.ensure_future(news.newer(server, {region: 0}))
            for server, region in ((10, 1), (11, 1), (12, 2))
        ]
        await turns()
        commit(log, 1)
        assert await waits[0] == await waits[1] == {1: 1}
        assert not waits[2].done()  # it watches something else
        assert await news.newer(10, {1: 0, 2: 0}) == {1: 1}  # what it did not know before it asked
        waits[2].cancel()

    run(work())


@pytest.mark.parametrize("region", [1, INLINE_BASE + 5], ids=["region", "inline"])
def test_what_is_freed_is_told(log: CommitLog, region: int) -> None:
    async def work() -> None:
        news = News(log)
        assert commit(log, region) == 1
        wait = asyncio.ensure_future(news.newer(10, {region: 1}))
        await turns()
        assert not wait.done()
        log.close(region)
        assert await wait == {region: NEWS_FREED}
        assert await news.newer(11, {region: 1}) == {region: NEWS_FREED}

    run(work())


def test_the_last_call_of_a_server_waits(log: CommitLog) -> None:
    async def work() -> None:
        news = News(log)
        first = asyncio.ensure_future(news.newer(10, {1: 0}))
        await turns()
        second = asyncio.ensure_future(news.newer(10, {1: 0, 2: 0}))
        assert await first == {}
        commit(log, 2)
        assert await second == {2: 1}
        assert not news._waits

    run(work())


def test_a_wait_has_a_deadline(log: CommitLog) -> None:
    assert run(News(log).newer(10, {1: 0}, wait_s=0.0)) == {}


# ------------------------------------------------------------------ a node


class Node:
    """A page server's part, on a loop of its own, and a process that listens to it."""

    def __init__(self, log: CommitLog, path: str) -> None:
        self.log, self.path = log, path
        self.registry: News | None = News(log)
        self.answers: list[dict[int, int]] = []  # messages of the registry that say something
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.has_ended = False
        self.start()

    def on_loop(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT_S)

    async def newer(self, known: dict[int, int], wait_s: float) -> dict[int, int]:
        registry = self.registry
        if registry is None:
            raise ConnectionError("the registry is being restarted")
        answer = await registry.newer(HOME, known, wait_s)
        if self.registry is not registry:
            raise ConnectionError("the registry was killed before it answered")
        if answer:
            self.answers.append(answer)
        return answer

    def kill_registry(self) -> None:
        def kill() -> None:
            assert self.registry is not None
            waits = list(self.registry._waits.values())
            self.registry = None
            for wait in waits:
                wait.over.set()

        self.on_loop(kill)

    def start(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.server = NewsServer(
            self.newer, lambda work: self.tasks.append(self.loop.create_task(work))
        )
        work = self.server.start(news_socket(self.path))
        asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def kill(self) -> None:
        """As SIGKILL does: the file stays."""

        def kill() -> None:
            for task in self.tasks:
                task.cancel()
            self.server._inode = 0
            self.server.close()

        self.on_loop(kill)

    def process(self, reattach_s: float = WAIT_S) -> ProcessNews:
        session: Any = SimpleNamespace(
            scope="a" * 12,
            ensure_server=lambda: SimpleNamespace(socket_name=self.path),
            config=SimpleNamespace(reattach_s=reattach_s),
            _has_ended=lambda: self.has_ended,
        )
        return ProcessNews(session)

    def commit(self, region: int = 1) -> int:
        return int(self.on_loop(lambda: commit(self.log, region)))

    def close(self) -> None:
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture
def node(log: CommitLog) -> Iterator[Node]:
    directory = tempfile.mkdtemp(prefix="news", dir="/tmp")
    node = Node(log, f"{directory}/server")
    yield node
    node.has_ended = True
    node.close()
    shutil.rmtree(directory)


class Heard:
    """What one watch was told."""

    def __init__(
        self, news: ProcessNews, region: int = 1, version: int = 0, name: str | None = None
    ) -> None:
        self.versions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.watch = news.watch(region, version, self.versions.put, self.ends.put, name)

    def version(self) -> int:
        return self.versions.get(timeout=WAIT_S)

    def end(self) -> BaseException:
        return self.ends.get(timeout=WAIT_S)


def test_one_message_to_a_node_for_each_commit(node: Node) -> None:
    first, second = node.process(), node.process()
    heard = [Heard(first), Heard(first), Heard(second)]
    until(lambda: len(node.server._watched) == 2)
    for number in range(1, 6):
        assert node.commit() == number
        assert [each.version() for each in heard] == [number] * 3
    assert node.answers == [{1: number} for number in range(1, 6)]


def test_a_watch_that_knows_more_keeps_nothing_from_the_others(node: Node) -> None:
    process = node.process()
    for _ in range(3):
        node.commit()
    node.kill()  # so that both are said in one line
    behind = Heard(process, version=1)
    ahead = Heard(process, version=3)
    node.start()
    assert behind.version() == 3
    assert node.commit() == 4
    assert (ahead.version(), behind.version()) == (4, 4)


def test_a_restart_of_the_registry_loses_nothing(node: Node) -> None:
    heard = Heard(node.process())
    until(lambda: bool(node.registry and node.registry._waits))
    node.kill_registry()
    node.commit()
    assert heard.versions.empty()
    node.registry = News(node.log)
    assert heard.version() == 1
    assert node.commit() == heard.version() == 2


def test_a_restart_of_the_page_server_loses_nothing(node: Node) -> None:
    heard = Heard(node.process())
    node.commit()
    assert heard.version() == 1
    node.kill()
    node.commit()
    node.commit()
    node.start()
    assert heard.version() == 3  # those between are not told
    assert node.commit() == heard.version() == 4


def test_freed_ends_a_watch(node: Node) -> None:
    process = node.process()
    heard, other = Heard(process), Heard(process, region=2)
    named = Heard(process, name="index")
    node.commit()
    assert heard.version() == named.version() == 1
    node.on_loop(lambda: node.log.close(1))
    assert isinstance(heard.end(), errors.FreedError)
    assert isinstance(heard.watch.error, errors.FreedError)
    assert heard.watch.error.message == "Variable 1 was freed."
    assert str(named.end()).startswith("Variable 'index' was freed.")
    node.commit(2)
    assert other.version() == 1  # the connection is still there


def test_the_end_of_a_session_ends_a_watch(node: Node) -> None:
    heard = Heard(node.process())
    node.commit()
    assert heard.version() == 1
    node.has_ended = True
    node.kill()
    assert isinstance(heard.end(), errors.SessionEndedError)


def test_a_page_server_that_does_not_come_back(node: Node) -> None:
    heard = Heard(node.process(reattach_s=0.5))
    node.commit()
    assert heard.version() == 1
    node.kill()
    error = heard.end()
    assert isinstance(error, errors.ServerUnavailableError)
    assert "watch the variable again" in str(error)


def test_who_left_hears_nothing_and_the_thread_ends(node: Node) -> None:
    process = node.process()
    stays, leaves = Heard(process), Heard(process)
    node.commit()
    assert stays.version() == leaves.version() == 1
    leaves.watch.cancel()
    node.commit()
    assert stays.version() == 2
    assert leaves.versions.empty()
    stays.watch.cancel()
    stays.watch.cancel()  # again: nothing
    until(lambda: process._thread is None)
    until(lambda: not node.server._watched)
    again = Heard(process, version=2)  # it begins anew
    node.commit()
    assert again.version() == 3


def test_functions_run_on_a_thread_and_may_fail(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    process = node.process()
    called: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    go = threading.Event()

    def function(version: int) -> None:
        called.put((version, threading.current_thread().name))
        if version == 1:
            assert go.wait(WAIT_S)
            raise ZeroDivisionError("of the user")

    watch = process.call(1, 0, function)
    direct = Heard(process)
    node.commit()
    assert called.get(timeout=WAIT_S) == (1, "clamor-updates")
    for number in (1, 2, 3):
        assert direct.version() == number  # a function that waits holds up no other watch
        node.commit()
    assert direct.version() == 4
    go.set()
    assert called.get(timeout=WAIT_S)[0] == 4  # of those that came meanwhile the newest
    assert "ZeroDivisionError: of the user" in caplog.text
    go.clear()
    is_held = threading.Event()

    def hold_up(version: int) -> None:
        is_held.set()
        go.wait(WAIT_S)

    process.call(1, 3, hold_up)
    assert is_held.wait(WAIT_S)  # else version 5 may come before the thread is held up
    node.commit()
    assert direct.version() == 5
    watch.cancel()  # what waits for the thread is not called any more, either
    go.set()
    last: queue.SimpleQueue[int] = queue.SimpleQueue()
    process.call(1, 4, last.put)
    assert last.get(timeout=WAIT_S) == 5
    assert called.empty()


@pytest.mark.parametrize("line", [b"hello\n", b"watch 1\n", b"watch x y\n", b"\xff\n", b"9" * 200])
def test_what_is_no_line_of_ours_is_disconnected(node: Node, line: bytes) -> None:
    heard = Heard(node.process())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(news_socket(node.path))
        stranger.sendall(line)
        assert stranger.recv(100) == b""
    node.commit()
    assert heard.version() == 1


def test_who_does_not_read_is_disconnected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_news, "MOST_UNSENT_BYTES", -1)
    heard = Heard(node.process())
    node.commit()  # it is disconnected instead of told, connects again, and is again
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.settimeout(WAIT_S)
        deaf.connect(news_socket(node.path))
        deaf.sendall(b"watch 1 0\n")
        assert deaf.recv(100) == b""
    monkeypatch.setattr(server_news, "MOST_UNSENT_BYTES", 1 << 16)
    assert heard.version() == 1


def test_a_removed_file_comes_back(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_news, "LOOK_S", 0.05)
    directory = tempfile.mkdtemp(prefix="news", dir="/tmp")
    node = Node(log, f"{directory}/server")
    os.unlink(news_socket(node.path))
    heard = Heard(node.process())
    node.commit()
    assert heard.version() == 1
    node.on_loop(node.server.close)
    time.sleep(0.2)  # who looks after the file does not bring it back once more
    assert os.listdir(directory) == []
    node.close()
    os.rmdir(directory)

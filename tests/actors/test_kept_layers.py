"""A writer asks the page server of its node for layers, and the commit goes on whatever it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.names import news_socket
from clamor_ray._session import kept_layers
from clamor_ray._session.kept_layers import KeptLayers
from clamor_ray.actors.page_server.news import NewsServer
from tests.conftest import until

COMMIT, PROCESS = 2**64 - 1, 2**63 + 5


class Node:
    """A page server's socket, on a thread of its own."""

    def __init__(self, socket_name: str) -> None:
        self.path = news_socket(socket_name)
        self.answers: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = self.start()
        self.session: Any = SimpleNamespace(
            creator=SimpleNamespace(has_store=True),
            ensure_server=lambda: SimpleNamespace(socket_name=socket_name),
        )

    def start(self) -> NewsServer:
        async def newer(known: dict[int, int], timeout_s: float) -> dict[int, int]:
            await asyncio.sleep(timeout_s)
            return {}

        async def keep(region: int, commit_id: int) -> int:
            self.asked.append((region, commit_id))
            await asyncio.to_thread(self.goes_on.wait, 10)
            return self.answers.get(region, 0)

        async def drop(region: int, commit_id: int) -> None:
            self.dropped.append((region, commit_id))

        def spawn(work: Any) -> None:
            task = self.loop.create_task(work)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        async def made() -> NewsServer:
            server = NewsServer(newer, spawn, keep, drop)
            await server.start(self.path)
            return server

        return asyncio.run_coroutine_threadsafe(made(), self.loop).result(10)

    def end_listening(self) -> None:
        self.loop.call_soon_threadsafe(self.server.close)
        until(lambda: not os.path.exists(self.path))

    def end(self) -> None:
        async def stop() -> None:
            self.server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(f"{tmp_path}/server")
    yield node
    node.goes_on.set()
    node.end()


@pytest.fixture
def layers(node: Node) -> Iterator[KeptLayers]:
    layers = KeptLayers(node.session)
    yield layers
    layers.close()


def test_all_layers_of_a_commit(node: Node, layers: KeptLayers) -> None:
    regions = [947191924000000001 + each for each in range(kept_layers.MOST_REGIONS)]
    node.answers = dict.fromkeys(regions, PROCESS)
    for _ in range(2):  # over the same connection
        assert layers.ask(COMMIT, regions) == PROCESS
    assert node.asked == [(each, COMMIT) for each in regions] * 2
    assert len(layers._idle) == 1
    node.answers[regions[7]] = 0
    assert layers.ask(COMMIT, regions) == 0
    assert layers.ask(COMMIT, regions[:7]) == PROCESS


def test_a_commit_that_was_refused_is_dropped_and_one_that_was_made_is_not(
    node: Node, layers: KeptLayers
) -> None:
    node.answers = {1: PROCESS}
    for commit_id in (7, 8, 9):
        layers.ask(commit_id, [1, 2])  # of one of them nobody knows
    layers.forget(8)
    for commit_id in (7, 8, 9, 7, 10):
        layers.drop(commit_id)
    until(lambda: len(node.dropped) == 4)
    assert node.dropped == [(1, 7), (2, 7), (1, 9), (2, 9)]
    node.end_listening()
    layers.ask(11, [1])
    layers.drop(11)  # nobody hears of it


def test_two_processes_of_a_page_server_have_not_all_of_it(node: Node, layers: KeptLayers) -> None:
    node.answers = {1: PROCESS, 2: PROCESS + 1}
    assert layers.ask(COMMIT, [1, 2]) == 0


def test_nobody_is_asked_without_a_store_or_for_too_many(node: Node, layers: KeptLayers) -> None:
    assert layers.ask(COMMIT, []) == 0
    assert layers.ask(COMMIT, range(1, kept_layers.MOST_REGIONS + 2)) == 0
    node.session.creator.has_store = False
    assert layers.ask(COMMIT, [1]) == 0
    assert node.asked == []


def test_a_page_server_that_is_not_there(node: Node, layers: KeptLayers) -> None:
    node.answers = {1: PROCESS}
    assert layers.ask(COMMIT, [1]) == PROCESS

    def gone() -> Any:
        raise errors.ServerUnavailableError("none")

    node.session.ensure_server = gone
    with contextlib.suppress(FileNotFoundError):
        os.unlink(node.path)
    layers.close()
    assert layers.ask(COMMIT, [1]) == 0


def test_a_page_server_that_was_restarted_is_asked_over_a_new_connection(
    node: Node, layers: KeptLayers
) -> None:
    node.answers = {1: PROCESS}
    assert layers.ask(COMMIT, [1]) == PROCESS
    for connection in layers._idle:
        connection.shutdown(socket.SHUT_RDWR)
    assert layers.ask(COMMIT, [1]) == 0  # this commit goes the other way
    assert layers.ask(COMMIT, [1]) == PROCESS


def test_a_page_server_that_is_slow_is_not_waited_for(
    node: Node, layers: KeptLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_layers, "ANSWER_S", 0.05)
    node.answers = {1: PROCESS, 2: PROCESS}
    node.goes_on.clear()
    assert layers.ask(COMMIT, [1]) == 0
    node.goes_on.set()
    assert layers._idle == []  # the late answer is nobody's
    monkeypatch.setattr(kept_layers, "ANSWER_S", 10.0)
    assert layers.ask(COMMIT - 1, [2]) == PROCESS


@pytest.mark.parametrize("line", ["kept 1 7 9", "at 1 7", "kept 1", "\xff", "x" * 100, ""])
def test_what_is_no_answer_ends_the_connection(tmp_path: Path, line: str) -> None:
    path = str(tmp_path / "server")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(news_socket(path))
    listener.listen()
    session: Any = SimpleNamespace(
        creator=SimpleNamespace(has_store=True),
        ensure_server=lambda: SimpleNamespace(socket_name=path),
    )
    layers = KeptLayers(session)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(line.encode("latin-1") + b"\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert layers.ask(COMMIT, [1]) == 0
        assert layers._idle == []
    finally:
        thread.join(10)
        listener.close()


def test_threads_have_connections_of_their_own(node: Node, layers: KeptLayers) -> None:
    node.answers = dict.fromkeys(range(1, 9), PROCESS)
    found: list[int] = []

    def ask(region: int) -> None:
        for _ in range(50):
            found.append(layers.ask(region + 100, [region]))

    threads = [threading.Thread(target=ask, args=(each,)) for each in node.answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [PROCESS] * 400
    assert 1 <= len(layers._idle) <= len(threads)


def test_a_child_of_fork_uses_none_of_its_parents(node: Node, layers: KeptLayers) -> None:
    node.answers = {1: PROCESS}
    assert layers.ask(COMMIT, [1]) == PROCESS
    layers.after_fork()
    assert layers._idle == []
    assert layers.ask(COMMIT, [1]) == PROCESS

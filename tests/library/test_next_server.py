"""A process whose page server has ended has another one started. Without Ray."""

from __future__ import annotations

import os
import secrets
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._protocol.config import Config
from clamor_ray._session.session import Session
from clamor_ray._session.spawned import SpawnedSession

NODE = "ab" * 28
WAIT_S = 20.0
BASE, LENGTH = 0x1300_0000_0000, 64 << 12


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


class Registry:
    """What of the registry's calls is needed."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked: list[tuple[str, float]] = []

    def ensure_server(self, node_id: str, *, timeout_s: float) -> None:
        self.asked.append((node_id, timeout_s))
        if self.failures:
            raise self.failures.pop()


def session_over(client: Any, registry: Any, kind: type[Session] = Session) -> Session:
    session = kind.__new__(kind)
    session.node_id, session.config = NODE, Config()
    session.rpc = registry
    session.owner = True
    session._pid = os.getpid()
    session._client = client
    session._client_lock = threading.Lock()
    return session


def client_that_is(connected: bool, ended: bool = False) -> Any:
    return SimpleNamespace(is_connected=connected, has_ended=ended)


def test_the_registry_is_asked_where_there_is_no_connection() -> None:
    registry, client = Registry(), client_that_is(connected=False)
    session = session_over(client, registry)
    assert session.client is client
    assert registry.asked == [(NODE, session.config.connect_timeout_s)]
    client.is_connected = True
    assert session.client is client
    assert len(registry.asked) == 1


@pytest.mark.parametrize("who", ["the session has ended", "a fork", "spawned"])
def test_who_cannot_have_one_started_asks_nobody(who: str) -> None:
    registry = Registry()
    client = client_that_is(connected=False, ended=who == "the session has ended")
    kind = SpawnedSession if who == "spawned" else Session
    session = session_over(client, registry, kind)
    if who == "a fork":
        session._pid += 1
    assert session.client is client
    assert registry.asked == []


@pytest.mark.parametrize(
    "failure",
    [errors.WaitTimeoutError("late"), errors.SessionEndedError("over"), errors.ClosedError("x")],
    ids=repr,
)
def test_what_the_registry_raises_is_left_to_the_call_that_follows(failure: Exception) -> None:
    registry, client = Registry(failure), client_that_is(connected=False)
    assert session_over(client, registry).client is client
    assert len(registry.asked) == 1


class Node:
    """A page server's engine, and the next one on the same socket."""

    def __init__(self) -> None:
        self.name = f"clamor-test-{secrets.token_hex(6)}"
        self.n_started = 0
        self.start()

    def start(self) -> None:
        self.n_started += 1
        self.engine = _native.Engine(
            self.name, server_id=self.n_started, history_directory="/tmp", n_loops=1
        )

    def ensure_server(self, node_id: str, *, timeout_s: float) -> None:
        self.start()


def test_opens_that_have_ended_are_counted() -> None:
    """Over a real engine: nothing is in use then."""
    node = Node()
    client = _native.Client(node.name, reattach_timeout_s=WAIT_S)
    try:
        os.close(client.create(1, BASE, LENGTH))
        client.seal(1)
        assert node.engine.new_opens() == 0
        for _ in range(3):
            client.unmap(client.map(1, 0, BASE, LENGTH).id)
        until(lambda: node.engine.in_use(but_homes=True) == 0)
        assert node.engine.new_opens() == 3
        assert node.engine.new_opens() == 0
    finally:
        client.close()
        node.engine.stop()


def test_the_next_server_is_found_by_the_same_client() -> None:
    """Over real engines: a variable that is put there afterwards is there."""
    node = Node()
    client = _native.Client(node.name, reattach_timeout_s=WAIT_S)
    try:
        assert client.is_connected
        assert client.server_id == 1
        assert node.engine.in_use() == 0
        os.close(client.create(1, BASE, LENGTH))
        client.seal(1)
        assert node.engine.in_use() == 1
        node.engine.retire(1, force=True)
        until(lambda: node.engine.in_use() == 0)
        assert node.engine.leave() == 0
        assert node.engine.leave() == 0
        until(lambda: not client.is_connected)
        assert not client.has_ended
        session = session_over(client, node)
        assert session.client is client
        assert node.n_started == 2
        until(lambda: client.is_connected)
        assert client.server_id == 2
        os.close(session.client.create(2, BASE, LENGTH))
        client.seal(2)
        assert node.engine.in_use() == 1
        assert node.n_started == 2
        assert node.engine.leave() == 1, "it has a home: that is said"
    finally:
        client.close()
        node.engine.stop()

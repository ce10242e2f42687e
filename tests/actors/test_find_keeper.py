"""A page server looks for its keeper: one that takes no connection is not one that is gone."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from clamor_ray import errors
from clamor_ray._native.client import PC_ERR_SYSTEM, PC_ERR_TIMEOUT, error_for
from clamor_ray._pagecache import lib
from clamor_ray._protocol import names
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import ServerConfig
from clamor_ray.actors.page_server import keepers, page_server
from clamor_ray.actors.page_server.keepers import find_keeper
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.page_server.rebuilt_homes import layer_error
from clamor_ray.actors.process import keeper_process, socket_directory
from tests.support.processes import stop

START_S = 20.0
ORPHAN_S = 0.5
NODE = "ab" * 28


@pytest.fixture
def keeper() -> Iterator[tuple[str, int]]:
    name = f"clamor-test-find-keeper-{os.getpid()}"
    pid = os.fork()
    if pid == 0:
        lib.pc_keeper_run(name.encode(), os.getppid(), int(60e9))
        os._exit(0)
    deadline_s = time.monotonic() + START_S
    while find_keeper(name) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    yield name, pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _fill_queue(name: str) -> None:
    """With connections that have ended, as of page servers that waited for it in vain."""
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            try:
                connection.connect("\0" + name)
            except BlockingIOError:
                return
    raise AssertionError("the queue has no end")


def test_one_that_is_stopped_is_not_gone(
    keeper: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pid = keeper
    monkeypatch.setattr(keepers, "CONNECT_S", 0.3)
    stop(pid)
    try:
        _fill_queue(name)
        with pytest.raises(errors.WaitTimeoutError, match="takes no connection"):
            find_keeper(name)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(keepers, "CONNECT_S", 10.0)
    assert find_keeper(name) is not None


def test_none_is_seen_at_once() -> None:
    began_s = time.monotonic()
    assert find_keeper(f"clamor-test-no-keeper-{os.getpid()}") is None
    assert time.monotonic() - began_s < keepers.CONNECT_S / 2


def test_the_message_names_the_keeper() -> None:
    said = "the page server says: the keeper of this node has taken nothing for 31 s"
    error = error_for(PC_ERR_TIMEOUT, said, region=7)
    assert isinstance(error, errors.WaitTimeoutError)
    assert "(variable 7): the keeper of this node has taken nothing for 31 s" in str(error)
    assert "overloaded" not in str(error)
    assert "Try again" in str(error)
    said = "the page server says: the keeper of this node was not given it: a system call failed"
    assert "keeper" in str(error_for(PC_ERR_SYSTEM, said))


def test_a_pull_that_takes_too_long_names_both_ends() -> None:
    error = layer_error(PC_ERR_TIMEOUT, 0x11, 7, 0x22, 0x33)
    assert isinstance(error, errors.WaitTimeoutError)
    for part in ("variable 7", "0x11", "0x22", "keeper"):
        assert part in str(error)


# ------------------------------------------------------------------ a start holds its keeper


def is_there(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) == (0, 0)


@pytest.fixture
def config() -> Iterator[ServerConfig]:
    with tempfile.TemporaryDirectory(dir="/tmp") as below:  # a socket's path is short
        socket_directory.prepare(names.socket_directory(below))
        yield ServerConfig("scope", "0.1.0", sockets_below=below)


@pytest.mark.parametrize("life", [0, 3])
def test_a_keeper_stays_while_a_start_waits_for_the_registry(
    config: ServerConfig, life: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short it stays when nobody comes."""
    name = names.keeper_socket(
        config.job_scope, NODE, names.server_id_of(NODE, life), config.sockets_below
    )
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        lib.pc_keeper_run(name.encode(), os.getppid(), int(ORPHAN_S * 1e9))
        os._exit(0)
    while not Path(name).exists():
        assert time.monotonic() < began_s + START_S
        time.sleep(0.001)

    def answer_never(_: object, timeout: float) -> None:
        time.sleep(timeout)
        raise GetTimeoutError("late")

    monkeypatch.setattr(page_server.ray, "get", answer_never)
    monkeypatch.setattr(page_server, "CALL_S", ORPHAN_S / 4)
    monkeypatch.setattr(page_server, "START_CALL_S", 3 * ORPHAN_S)
    monkeypatch.setattr(page_server, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(keeper_process, "raylet_pid", os.getpid)
    registry = SimpleNamespace(begin_server=SimpleNamespace(remote=lambda *_: None))
    server = object.__new__(PageServer)
    server._registry, server._node_id = registry, NODE
    with pytest.raises(GetTimeoutError):
        server._start(config, NODE)
    assert is_there(pid)
    time.sleep(2 * ORPHAN_S)  # the pause before this process ends, to try again
    assert is_there(pid)
    server._held_keepers.release()  # as its end does
    os.waitpid(pid, 0)


def test_a_disk_that_is_full_for_an_hour_costs_no_home() -> None:
    """Ray cannot start a page server meanwhile, so nobody connects. While the raylet lives, only
    the next page server may say that nobody needs what a keeper has."""
    assert ServerConfig("scope", "0.1.0").orphan_timeout_s == Config().orphan_s >= 2 * 3600

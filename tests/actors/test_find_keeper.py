"""A page server looks for its keeper: one that takes no connection is not one that is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from clamor_ray import errors
from clamor_ray._native.client import PC_ERR_SYSTEM, PC_ERR_TIMEOUT, error_for
from clamor_ray._pagecache import lib
from clamor_ray.actors.page_server import page_server
from clamor_ray.actors.page_server.page_server import _find_keeper, layer_error

START_S = 20.0


@pytest.fixture
def keeper() -> Iterator[tuple[str, int]]:
    name = f"clamor-test-find-keeper-{os.getpid()}"
    pid = os.fork()
    if pid == 0:
        lib.pc_keeper_run(name.encode(), os.getppid(), int(60e9))
        os._exit(0)
    deadline_s = time.monotonic() + START_S
    while _find_keeper(name) is None:
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
    monkeypatch.setattr(page_server, "CALL_S", 0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        _fill_queue(name)
        with pytest.raises(errors.WaitTimeoutError, match="takes no connection"):
            _find_keeper(name)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(page_server, "CALL_S", 10.0)
    assert _find_keeper(name) is not None


def test_none_is_seen_at_once() -> None:
    began_s = time.monotonic()
    assert _find_keeper(f"clamor-test-no-keeper-{os.getpid()}") is None
    assert time.monotonic() - began_s < page_server.CALL_S / 2


def test_the_message_names_the_keeper() -> None:
    said = "the page server says: the keeper of this node has taken nothing for 31 s"
    error = error_for(PC_ERR_TIMEOUT, said, region=7)
    assert isinstance(error, errors.WaitTimeoutError)
    assert "(region 7): the keeper of this node has taken nothing for 31 s" in str(error)
    assert "overloaded" not in str(error)
    assert "Try again" in str(error)
    said = "the page server says: the keeper of this node was not given it: a system call failed"
    assert "keeper" in str(error_for(PC_ERR_SYSTEM, said))


def test_a_pull_that_takes_too_long_names_both_ends() -> None:
    error = layer_error(PC_ERR_TIMEOUT, 0x11, 7, 0x22)
    assert isinstance(error, errors.WaitTimeoutError)
    for part in ("region 7", "0x11", "0x22", "keeper"):
        assert part in str(error)

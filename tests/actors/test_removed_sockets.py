"""Somebody removes the directory of a node's sockets: who lives listens there again."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clamor_ray._native import client as native_client
from clamor_ray._native import engine as native_engine
from clamor_ray._pagecache import lib
from clamor_ray.actors.page_server.keepers import ABSENT_S, find_keeper

START_S = 20.0


def _await_file(path: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not os.path.exists(path):
        assert time.monotonic() < deadline_s, f"{path} does not come"
        time.sleep(0.01)


@pytest.fixture
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = Path(f"/tmp/clamor-test-removed-{os.getpid()}")
    directory.mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def keeper(sockets: Path) -> Iterator[str]:
    name = str(sockets / "keeper")
    pid = os.fork()
    if pid == 0:
        lib.pc_keeper_run(name.encode(), os.getppid(), int(60e9))
        os._exit(0)
    _await_file(name)
    yield name
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_keeper_is_found_again(sockets: Path, keeper: str) -> None:
    shutil.rmtree(sockets)
    assert find_keeper(keeper) is None
    _await_file(keeper)
    assert find_keeper(keeper) is not None
    assert sockets.stat().st_mode & 0o777 == 0o700


def test_a_server_that_had_one_waits_for_its_name(sockets: Path, keeper: str) -> None:
    """It makes the directory when it starts, within a moment of the removal."""
    shutil.rmtree(sockets)
    sockets.mkdir(mode=0o700)
    assert find_keeper(keeper, has_served=True) is not None


def test_a_server_that_had_one_waits_no_longer_than_a_living_one_takes(sockets: Path) -> None:
    began_s = time.monotonic()
    assert find_keeper(str(sockets / "none"), has_served=True) is None
    assert time.monotonic() - began_s < 4 * ABSENT_S


def test_a_page_server_is_found_again_and_its_clients_notice_nothing(
    sockets: Path,
) -> None:
    name = str(sockets / "server")
    engine = native_engine.Engine(name, server_id=1)
    try:
        before = native_client.Client(name)
        shutil.rmtree(sockets)
        _await_file(name)
        after = native_client.Client(name)
        threads = [threading.Thread(target=client.close) for client in (before, after)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        said = []
        while (event := engine.next_event()) is not None:
            said.append(event.text)
        assert any("somebody removed the socket" in text for text in said)
    finally:
        engine.stop()
    assert list(sockets.iterdir()) == []

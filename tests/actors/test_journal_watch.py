"""The journal's directory goes when it should, and not before. Without Ray."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.process.keeper_process import hold_and_watch, hold_for_driver
from tests.conftest import until
from tests.support.session_rig import watchers


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "journal"
    Journal(directory).close()
    return directory


def test_it_goes_with_the_raylet(directory: Path, raylet: subprocess.Popen[bytes]) -> None:
    fd = hold_and_watch(directory, raylet.pid, poll_s=60.0)
    try:
        until(lambda: len(watchers(directory)) == 1)
        (watcher,) = watchers(directory)
        assert os.getsid(watcher) != os.getsid(0)
        assert directory.exists()
        raylet.kill()
        until(lambda: not directory.exists())  # at once: the poll is a minute
        until(lambda: not watchers(directory))
    finally:
        os.close(fd)


def test_the_watcher_leaves_with_the_directory(
    directory: Path, raylet: subprocess.Popen[bytes]
) -> None:
    fd = hold_and_watch(directory, raylet.pid, poll_s=0.1)
    until(lambda: len(watchers(directory)) == 1)
    shutil.rmtree(directory)
    os.close(fd)
    until(lambda: not watchers(directory))
    assert raylet.poll() is None


def test_a_restarted_registry_has_one_watcher(
    directory: Path, raylet: subprocess.Popen[bytes]
) -> None:
    first = hold_and_watch(directory, raylet.pid, orphan_s=1.0, poll_s=0.05)
    os.close(first)
    second = hold_and_watch(directory, raylet.pid, orphan_s=1.0, poll_s=0.05)
    until(lambda: len(watchers(directory)) == 1)
    time.sleep(1.5)  # longer than an orphan is left
    os.close(second)
    time.sleep(0.3)  # killed after a long time, and Ray has not yet started it again
    assert directory.exists()
    third = hold_and_watch(directory, raylet.pid, orphan_s=1.0, poll_s=0.05)
    time.sleep(0.3)
    assert directory.exists()
    os.close(third)
    until(lambda: not directory.exists())
    until(lambda: not watchers(directory))
    assert raylet.poll() is None


def test_two_registries_cannot_use_it(
    directory: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clamor_ray.actors.process import keeper_process

    monkeypatch.setattr(keeper_process, "LOCK_S", 0.2)
    fd = hold_and_watch(directory, raylet.pid, poll_s=0.05)
    with pytest.raises(keeper_process.KeeperError, match="in use"):
        hold_and_watch(directory, raylet.pid, poll_s=0.05)
    os.close(fd)
    shutil.rmtree(directory)
    until(lambda: not watchers(directory))


# Holds the journal as a driver does, has a child that outlives it, and waits to be killed.
_DRIVER = """
import os, sys, time
from pathlib import Path
from clamor_ray.actors.process.keeper_process import hold_for_driver
fd = hold_for_driver(Path(sys.argv[1]))
assert fd is not None
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(300)
"""


def test_it_stays_while_its_driver_lives(directory: Path, raylet: subprocess.Popen[bytes]) -> None:
    """Ray may not be able to start the registry for hours: its disk is full."""
    fd = hold_and_watch(directory, raylet.pid, orphan_s=0.3, poll_s=0.05)
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(directory)], stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    try:
        os.close(fd)
        time.sleep(1.5)  # longer than an orphan is left
        assert directory.exists()
        driver.kill()
        driver.wait()
        until(lambda: not directory.exists())
        until(lambda: not watchers(directory))
        assert Path(f"/proc/{child}").exists()
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        os.kill(child, signal.SIGKILL)
    assert raylet.poll() is None


def test_a_driver_that_cannot_see_it_holds_nothing(tmp_path: Path) -> None:
    assert hold_for_driver(tmp_path / "elsewhere") is None

"""The reserve of disk beside the journal: made, given in steps, taken again. Without Ray."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.process import journal_watcher, keeper_process
from clamor_ray.actors.process.journal_watcher import FULL_BYTES, RESERVE, STEP_BYTES, Reserve
from tests.conftest import until
from tests.support.lab import troubles
from tests.support.session_rig import watchers

RESERVE_BYTES = 8 << 20
DISK_BYTES = 40 << 20
POLL_S = 0.1


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """On a small disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("a small disk can only be mounted as root")
    disk = tmp_path / "disk"
    with troubles.small_disk(disk, DISK_BYTES):
        directory = disk / "journal"
        Journal(directory).close()
        yield directory


def allocated_bytes(directory: Path) -> int:
    path = directory / RESERVE
    return path.stat().st_blocks * 512 if path.exists() else 0


def free_bytes(directory: Path) -> int:
    return journal_watcher.free_bytes(str(directory))


def test_it_is_really_allocated(directory: Path) -> None:
    before = free_bytes(directory)
    assert Reserve(str(directory), RESERVE_BYTES).make()
    assert allocated_bytes(directory) == RESERVE_BYTES
    assert free_bytes(directory) <= before - RESERVE_BYTES
    assert Reserve(str(directory), RESERVE_BYTES).make()  # the next watcher's is the same
    assert free_bytes(directory) >= before - RESERVE_BYTES - 65536


def test_it_is_not_made_where_it_would_fill_the_disk(directory: Path) -> None:
    reserve = Reserve(str(directory), DISK_BYTES // 2 + 4096)
    assert not reserve.make()
    assert allocated_bytes(directory) == 0
    assert reserve.give() == 0


def test_it_is_given_in_steps_while_the_disk_is_full(directory: Path) -> None:
    reserve = Reserve(str(directory), RESERVE_BYTES)
    assert reserve.make()
    assert reserve.give() == 0  # there is room
    troubles.fill(directory.parent / "filler")
    assert free_bytes(directory) == 0
    given = 0
    while step := reserve.give():
        assert step == STEP_BYTES
        given += step
        assert free_bytes(directory) >= FULL_BYTES
        assert reserve.give() == 0  # that is enough
        troubles.fill(directory.parent / "filler")
    assert given == RESERVE_BYTES
    assert not reserve.make()
    (directory.parent / "filler").unlink()
    assert reserve.make()
    assert allocated_bytes(directory) == RESERVE_BYTES


def test_it_is_given_when_who_must_start_is_dead_and_the_disk_is_full(
    directory: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_process, "raylet_pid", lambda: raylet.pid)

    def hold() -> int:
        return keeper_process.hold_and_watch(
            directory, raylet.pid, poll_s=POLL_S, reserve_bytes=RESERVE_BYTES
        )

    registry: int | None = hold()
    server = keeper_process.hold_beside(directory)
    assert server is not None
    try:
        until(lambda: allocated_bytes(directory) == RESERVE_BYTES)
        troubles.fill(directory.parent / "filler")
        until(lambda: len(watchers(directory)) == 1)
        assert allocated_bytes(directory) == RESERVE_BYTES  # nobody needs it

        os.close(server)  # as its process's end does
        until(lambda: free_bytes(directory) >= FULL_BYTES)
        server = keeper_process.hold_beside(directory)
        assert server is not None
        assert allocated_bytes(directory) == RESERVE_BYTES - STEP_BYTES

        troubles.fill(directory.parent / "filler")
        assert registry is not None
        os.close(registry)
        until(lambda: free_bytes(directory) >= FULL_BYTES)
        registry = None
        registry = hold()  # it needs no more room than that
        assert allocated_bytes(directory) == RESERVE_BYTES - 2 * STEP_BYTES

        (directory.parent / "filler").unlink()
        until(lambda: allocated_bytes(directory) == RESERVE_BYTES)
    finally:
        for fd in (registry, server):
            if fd is not None:
                os.close(fd)
        raylet.kill()
        until(lambda: not directory.exists())
        until(lambda: not watchers(directory))


def test_no_lock_beside_where_the_registry_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_process, "raylet_pid", lambda: 1)
    assert keeper_process.hold_beside(tmp_path / "none") is None
    assert keeper_process.hold_beside(tmp_path) is None  # of another raylet

"""One sync of a file serves all who have written before it, and a failure is final."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray.actors.commits import group_sync
from clamor_ray.actors.commits.group_sync import GroupSync
from clamor_ray.actors.process.starting import EXIT_TRY_AGAIN
from tests.support.server_rig import until

WAIT_S = 10.0


class SlowDisk:
    """Syncs when it is let."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.n_begun = 0
        self.failure: OSError | None = None

    def sync(self, fd: int) -> None:
        self.n_begun += 1
        assert self.may.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        os.fdatasync(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"x")
    return tmp_path / "file"


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(), WAIT_S)

    asyncio.run(within())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_nothing_written_is_no_sync(path: Path) -> None:
    group = GroupSync(path)

    async def work() -> None:
        await group.synced()
        group.written()
        await group.synced()
        await group.synced()

    run(work)
    assert group.n_syncs == 1
    group.close()


def test_who_comes_in_one_turn_shares_a_sync(path: Path) -> None:
    group = GroupSync(path)

    async def one() -> None:
        group.written()
        await group.synced()

    async def work() -> None:
        await asyncio.gather(*(one() for _ in range(20)))

    run(work)
    assert group.n_syncs == 1
    group.close()


def test_who_comes_while_one_runs_waits_for_the_next(path: Path) -> None:
    disk = SlowDisk()
    group = GroupSync(path, disk.sync)

    async def one() -> None:
        group.written()
        await group.synced()

    async def work() -> None:
        first = asyncio.ensure_future(one())
        await until(lambda: disk.n_begun > 0)
        others = [asyncio.ensure_future(one()) for _ in range(9)]
        await turns()
        assert not any(each.done() for each in (first, *others))
        assert disk.n_begun == 1
        disk.may.set()
        await first
        assert not any(each.done() for each in others)  # what they wrote came after it had begun
        await asyncio.gather(*others)

    run(work)
    assert group.n_syncs == 2
    group.close()


def test_a_reader_waits_for_what_others_have_written(path: Path) -> None:
    disk = SlowDisk()
    group = GroupSync(path, disk.sync)

    async def work() -> None:
        group.written()
        reader = asyncio.ensure_future(group.synced())
        await turns()
        assert not reader.done()
        disk.may.set()
        await reader

    run(work)
    group.close()


def test_one_who_gives_up_takes_no_sync_from_the_others(path: Path) -> None:
    disk = SlowDisk()
    group = GroupSync(path, disk.sync)

    async def work() -> None:
        group.written()
        first, second = (asyncio.ensure_future(group.synced()) for _ in range(2))
        await turns()
        first.cancel()
        await turns()
        disk.may.set()
        await second
        assert first.cancelled()

    run(work)
    assert group.n_syncs == 1
    group.close()


def test_a_sync_that_failed_is_never_taken_for_a_good_one(path: Path) -> None:
    disk, failed = SlowDisk(), []
    disk.may.set()
    disk.failure = OSError(5, "Input/output error")
    group = GroupSync(path, disk.sync, on_failure=lambda path, failure: failed.append(failure))

    async def work() -> None:
        group.written()
        with pytest.raises(errors.JournalFullError, match="Input/output error"):
            await group.synced()
        disk.failure = None  # as the kernel does: it says so once
        with pytest.raises(errors.JournalFullError):
            await group.synced()
        group.written()
        with pytest.raises(errors.JournalFullError):
            await group.synced()

    run(work)
    assert disk.n_begun == 1
    assert [each.errno for each in failed] == [5]
    group.close()


def test_a_slow_disk_is_said(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_sync, "SLOW_S", 0.01)
    disk = SlowDisk()
    group = GroupSync(path, disk.sync)

    async def work() -> None:
        group.written()
        waiting = asyncio.ensure_future(group.synced())
        with caplog.at_level(logging.WARNING, "clamor_ray.registry"):
            await until(lambda: len(caplog.records) > 0)
        assert not waiting.done()  # it goes on
        disk.may.set()
        await waiting

    run(work)
    assert str(path) in caplog.text
    group.close()


def test_close_brings_the_rest_to_the_disk(path: Path) -> None:
    synced: list[int] = []
    group = GroupSync(path, synced.append)
    group.written()
    group.close()
    group.close()
    assert len(synced) == 1
    run(group.synced)


def test_close_before_a_sync_begins(path: Path) -> None:
    failed: list[BaseException] = []
    group = GroupSync(path, on_failure=lambda path, failure: failed.append(failure))

    async def work() -> None:
        group.written()
        waiting = asyncio.ensure_future(group.synced())
        asyncio.get_running_loop().call_soon(group.close)  # between its turn and the sync's
        await waiting
        assert group._running is None  # it has ended, and has not failed

    run(work)
    assert not failed


def test_the_process_ends(path: Path) -> None:
    """So that Ray starts the registry again, and nobody hears of what is not on the disk."""
    program = f"""
import asyncio
from pathlib import Path
from clamor_ray.actors.commits.group_sync import GroupSync

def sync(fd):
    raise OSError(5, "Input/output error")

async def work():
    group = GroupSync(Path({str(path)!r}), sync)
    group.written()
    await group.synced()
    print("told")

asyncio.run(work())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_TRY_AGAIN
    assert "told" not in done.stdout
    assert f"{path} cannot be brought to the disk" in done.stderr

"""The disk whose power can be cut keeps what was synced, and loses the rest."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.power_cut import PowerCutDisk, power_cut_disk

pytestmark = [pytest.mark.lab, pytest.mark.root]

DISK_BYTES = 64 << 20
BLOCK = 4096
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
os.write(fd, b"s" * 4096)
os.fsync(fd)
print("synced", flush=True)
sys.stdin.read()
"""


def write(path: Path, content: bytes, *, synced: bool) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        if synced:
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@pytest.fixture
def disk(tmp_path: Path):
    with power_cut_disk(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk
    assert not (tmp_path / "disk").exists()
    assert not Path(f"/sys/block/{Path(disk.device).name}/loop/backing_file").exists()


def test_what_was_synced_is_there_and_nothing_else(disk: PowerCutDisk) -> None:
    write(disk.path / "synced", b"s" * BLOCK, synced=True)
    write(disk.path / "old name", b"r" * BLOCK, synced=True)
    sync_directory(disk.path)
    write(disk.path / "written", b"w" * BLOCK, synced=False)
    os.rename(disk.path / "old name", disk.path / "new name")
    with (disk.path / "synced").open("r+b") as file:
        file.write(b"x")
    disk.cut()
    with pytest.raises(OSError) as failed:
        write(disk.path / "late", b"l" * BLOCK, synced=True)
    assert failed.value.errno == errno.EIO
    disk.restore()
    assert sorted(os.listdir(disk.path)) == ["lost+found", "old name", "synced"]
    assert (disk.path / "synced").read_bytes() == b"s" * BLOCK
    assert (disk.path / "old name").read_bytes() == b"r" * BLOCK


def test_it_is_cut_again_and_again_under_a_process_that_it_ends(disk: PowerCutDisk) -> None:
    for n in range(3):
        path = disk.path / f"file {n}"
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "synced\n"
            assert disk.users() == {child.pid}
            disk.cut([child.pid])
            disk.restore([child.pid])
        assert path.read_bytes() == b"s" * BLOCK
        assert (disk.path / "file 0").exists()


def test_who_still_has_files_there_is_named(
    disk: PowerCutDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.power_cut.UNUSED_S", 0.2)
    with (
        (disk.path / "open").open("wb"),
        pytest.raises(TimeoutError, match=rf"busy.*\[{os.getpid()}\]"),
    ):
        disk.unmount()

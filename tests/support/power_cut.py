"""A disk whose power can be cut: an ext4 file system on a loop device. Root only.

`cut()` is the shutdown of ext4 that drops what was not synced: neither the journal nor pages that
were only written reach the disk any more, and whoever writes or syncs from then on gets EIO. What
a sync has answered for before is there after `restore()`.

    with power_cut_disk(tmp_path / "disk", 256 << 20) as disk:
        child = subprocess.Popen(["a program", "that writes", disk.path])
        disk.cut([child.pid])
        disk.restore([child.pid])

A power cut ends the machine's processes with its disk. So they stand still before the cut: a sync
that is under way then, as one in a hundred is, may say that all is well and have lost it. (ext4
does not look for the shutdown again where it makes unwritten extents written.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.lab.availability import missing
from tests.support.processes import end, stop

# include/uapi/linux/ext4.h: _IOR('X', 125, __u32), and the way that writes nothing of its journal.
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
# By itself ext4 commits its journal every 5 s, synced or not: a test would seldom lose anything.
JOURNAL_S = 300
COMMAND_S = 60.0
UNUSED_S = 30.0  # so long a file system may be in use that nobody should use any more
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def require_power_cuts() -> None:
    """Skips the calling test where there can be no such disk, or fails it: CLAMOR_REQUIRE_LAB=1."""
    if os.geteuid() != 0:
        missing("a disk whose power is cut needs root: loop devices and mounts")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            missing(f"{tool} is not installed (Debian: e2fsprogs, mount)")
    if not Path("/dev/loop-control").exists():
        missing("this machine has no loop devices")


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@dataclass
class PowerCutDisk:
    """The disk.

    Args:
        path: where it is mounted.
        device: the loop device.
    """

    path: Path
    device: str

    def cut(self, pids: Iterable[int] = ()) -> None:
        """From now on nothing reaches the disk.

        Args:
            pids: who writes there, and is stopped just before: nobody hears of what is lost.
        """
        stop(*pids)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restore(self, pids: Iterable[int] = ()) -> None:
        """The power is there again: mounts what the disk has.

        Args:
            pids: who had files there, and is ended. Nobody else is.

        Raises:
            TimeoutError: somebody else has files there.
        """
        end(pids)
        self.unmount()
        self.mount()

    def mount(self) -> None:
        """With the replay of its journal, where it was cut."""
        options = f"commit={JOURNAL_S},errors=remount-ro"
        _command("mount", "-t", "ext4", "-o", options, self.device, str(self.path))
        self.path.chmod(0o700)

    def unmount(self) -> None:
        """Waits for those that are about to leave.

        Raises:
            TimeoutError: with the processes that do not.
        """
        deadline = time.monotonic() + UNUSED_S
        while os.path.ismount(self.path):
            try:
                _command("umount", str(self.path))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{error}: of processes {sorted(self.users())}") from None
                time.sleep(0.05)

    def users(self) -> set[int]:
        """Processes that have files of it, open or mapped. (`fuser` is in a package of its own.)"""
        found = set()
        below = f"{self.path}/"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                links, mapped = [entry / "cwd"], ""
                with contextlib.suppress(OSError):  # it ends meanwhile, as its files may
                    links += (entry / "fd").iterdir()
                    mapped = (entry / "maps").read_text()
                if below in mapped or any(f"{_target(link)}/".startswith(below) for link in links):
                    found.add(int(entry.name))
        return found


@contextlib.contextmanager
def power_cut_disk(directory: Path, n_bytes: int) -> Iterator[PowerCutDisk]:
    """A disk that is mounted there, in a directory that it makes. Skips the test where it cannot.

    Args:
        directory: is made; beside it lies `<directory>.image` with all that is on the disk.
        n_bytes: of the disk; the image is a sparse file.
    """
    require_power_cuts()
    image = directory.with_name(f"{directory.name}.image")
    with contextlib.ExitStack() as stack:
        directory.mkdir(mode=0o700)
        stack.callback(directory.rmdir)
        with image.open("xb") as file:
            stack.callback(image.unlink)
            file.truncate(n_bytes)
        _command("mkfs.ext4", "-q", "-F", "-b", "4096", str(image))
        device = _command("losetup", "--find", "--show", str(image))
        stack.callback(_command, "losetup", "--detach", device)
        disk = PowerCutDisk(directory, device)
        stack.callback(_let_go, disk)
        disk.mount()
        yield disk


def _let_go(disk: PowerCutDisk) -> None:
    """Unmounts it in every case: the kernel keeps it as long as somebody has a file there."""
    try:
        disk.unmount()
    except TimeoutError:
        _command("umount", "-l", str(disk.path))
        raise

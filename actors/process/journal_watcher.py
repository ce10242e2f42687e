"""The process beside the registry's journal: it sees to its end, and keeps some disk back for it.

Facts, and what follows:

* It outlives the registry and costs little: a bare interpreter (no site, no Ray), run by this
  file's path. So this file imports nothing but the standard library.
* The directory goes when the raylet ends, or when driver and registry have both been gone for so
  long that Ray cannot mean to restart the registry. While the driver has its session, a registry
  that is not there is late: Ray may wait for space on a disk for hours.
* The driver holds a lock of its own kind (POSIX): a child of the driver does not inherit it.
* Ray cannot start a process where its own files cannot be written, and they are on the same disk as
  the journal. So some of the disk is taken while there is room, and given back while the disk is
  full and the registry, or the page server of its node, is not there. It is given in small steps:
  whoever fills the disk may take each of them.
* The end of a process frees its locks at once. So each of the two holds one, whose file is there
  when this process starts, and a thread waits for each. It then has the lock for a moment: who
  starts tries again (``keeper_process.hold``).

Usage: ``python -I -S journal_watcher.py DIRECTORY RAYLET_PID ORPHAN_S POLL_S RESERVE_BYTES``.
It returns when its process has been forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import select
import shutil
import sys
import threading
import time

REGISTRY_LOCK = "registry.lock"
WATCHER_LOCK = "watcher"
DRIVER_LOCK = "driver"
RESERVE = "reserve"
STEP_BYTES = 2 << 20
FULL_BYTES = 1 << 20  # a disk with less than this is full
LOOK_S = 0.1  # while somebody is not there; the pause grows
LOOK_MOST_S = 1.0
REMOVE_PAUSE_S = 0.05
REMOVE_TRIES = 100


def server_lock(raylet_pid: int) -> str:
    """The name of the file that the page server below that raylet, the registry's, locks."""
    return f"page-server-{raylet_pid}.lock"


def free_bytes(directory: str) -> int:
    """What a process without privileges may still write there."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class Reserve:
    """A file whose blocks are allocated, and given back from its end.

    The file is made here, while the directory is in use, and never again: whoever removes the
    directory would find it not empty.

    Args:
        directory: Of the journal.
        n_bytes: When it is whole.

    Thread safety: any thread.
    """

    def __init__(self, directory: str, n_bytes: int) -> None:
        self._directory = directory
        self._path = os.path.join(directory, RESERVE)
        self._n_bytes = n_bytes
        self._lock = threading.Lock()
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def make(self) -> bool:
        """Makes it whole where as much again stays free; whether it is.

        Raises:
            FileNotFoundError: The session has ended.
        """
        with self._lock:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                has = os.fstat(fd).st_size
                if has >= self._n_bytes:
                    return True
                if free_bytes(self._directory) < 2 * self._n_bytes - has:
                    return False
                try:
                    os.posix_fallocate(fd, has, self._n_bytes - has)
                except OSError:  # somebody was quicker, or there is a quota
                    os.ftruncate(fd, has)
                    return False
                return True
            finally:
                os.close(fd)

    def give(self) -> int:
        """Gives some of it back where the disk is full; how many bytes."""
        with self._lock:
            try:
                if free_bytes(self._directory) >= FULL_BYTES:
                    return 0
                has = os.stat(self._path).st_size
                left = max(0, has - STEP_BYTES)
                os.truncate(self._path, left)
            except FileNotFoundError:  # the session has ended
                return 0
            return has - left


def is_held(fd: int) -> bool:
    """Whether a process holds the lock; it is not kept here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def is_driven(fd: int) -> bool:
    """Whether the driver holds its lock; it is not kept here."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False


def attend(fd: int, reserve: Reserve) -> None:
    """Gives of the reserve while nobody holds the lock; never returns."""
    while True:
        fcntl.flock(fd, fcntl.LOCK_SH)  # until its holder ends: this is the wait for the end itself
        fcntl.flock(fd, fcntl.LOCK_UN)
        pause_s = LOOK_S
        while True:
            reserve.give()
            time.sleep(pause_s)
            if is_held(fd):
                break
            pause_s = min(pause_s * 1.1, LOOK_MOST_S)


def watch(directory: str, raylet_fd: int, orphan_s: float, poll_s: float, reserve: Reserve) -> bool:
    """Waits for the end of the raylet or the session.

    Returns:
        Whether the directory is to be removed; else it is gone already.
    """
    registry_fd = os.open(os.path.join(directory, REGISTRY_LOCK), os.O_RDWR | os.O_CLOEXEC)
    driver_fd = os.open(os.path.join(directory, DRIVER_LOCK), os.O_RDWR | os.O_CLOEXEC)
    for path in glob.glob(os.path.join(glob.escape(directory), "*.lock")):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # its own: a lock belongs to an opening
        threading.Thread(target=attend, args=(fd, reserve), daemon=True).start()
    poll = select.poll()
    poll.register(raylet_fd, select.POLLIN)
    seen_s = time.monotonic()
    while True:
        with contextlib.suppress(FileNotFoundError):
            reserve.make()
        if os.fstat(registry_fd).st_nlink == 0:
            return False
        if is_held(registry_fd) or is_driven(driver_fd):
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > orphan_s:
            return True
        if poll.poll(int(poll_s * 1000)):
            return True


def remove(directory: str) -> None:
    """Somebody may still be writing, for a moment."""
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            break
        time.sleep(REMOVE_PAUSE_S)


def main(directory: str, raylet_pid: str, orphan_s: str, poll_s: str, reserve_bytes: str) -> None:
    """See the file's head."""
    raylet_fd = os.pidfd_open(int(raylet_pid))
    path = os.path.join(directory, WATCHER_LOCK)
    mine = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    reserve = Reserve(directory, int(reserve_bytes))
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    try:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # there is one
    if watch(directory, raylet_fd, float(orphan_s), float(poll_s), reserve):
        remove(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])

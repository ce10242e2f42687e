"""Files as a persistent store needs them: written whole, synced, and errors that say which file.

Nothing is there for good before the file is synced, and the directory that has its name. An fsync
that failed once says nothing about what comes after it, so a directory whose sync failed is not
synced again by this process: all who wait for it fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from clamor_ray import errors

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
CHUNK_BYTES: Final = 8 << 20
SYNC_TIMEOUT_S: Final = 120.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_SELF: Final = "/proc/self/fd"
# It had a name, which is gone; or lies elsewhere; or the file system has no such calls.
_NO_NAME: Final = (errno.ENOENT, errno.EXDEV, errno.EOPNOTSUPP)


def error_of(error: OSError, path: Path | str, what: str) -> errors.ClamorError:
    """What a failed call becomes.

    Args:
        error: as it came.
        path: the file, or directory.
        what: was being done with it.
    """
    said = f"{path}: {what}: {error.strerror or error}."
    if error.errno in _FULL:
        return errors.NoSpaceError(
            said, hint="The disk of the store is full. Make room on it, and try again."
        )
    if error.errno in _REFUSED:
        return errors.StoreAccessError(said)
    if error.errno == errno.ENOENT:
        return errors.StoreDamagedError(f"{path}: {what}: it is missing.", file=str(path))
    return errors.StoreError(said)


@contextlib.contextmanager
def asking(path: Path | str, what: str) -> Iterator[None]:
    """
    Raises:
        StoreError, NoSpaceError: For any OSError inside; see `error_of`.
    """
    try:
        yield
    except OSError as error:
        raise error_of(error, path, what) from error


def write_at(fd: int, data: Any, offset: int) -> None:
    """All of it.

    Raises:
        OSError: As it came.
    """
    rest = memoryview(data).cast("B")
    while rest.nbytes:
        wrote = os.pwrite(fd, rest, offset)
        rest, offset = rest[wrote:], offset + wrote


def read_into(fd: int, out: Any, offset: int) -> None:
    """All of it.

    Raises:
        OSError: As it came; EIO, too, where the file ends before.
    """
    rest = memoryview(out).cast("B")
    while rest.nbytes:
        got = os.preadv(fd, [rest], offset)
        if not got:
            raise OSError(errno.EIO, f"the file ends at byte {offset}")
        rest, offset = rest[got:], offset + got


def read_at(fd: int, n_bytes: int, offset: int) -> bytearray:
    """
    Raises:
        OSError: See `read_into`.
    """
    out = bytearray(n_bytes)
    read_into(fd, out, offset)
    return out


def data_ranges(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the file has data, and no holes, in order: each from its first byte to behind its last.

    Raises:
        OSError: As it came.
    """
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        if begin >= end:
            return
        hole = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        yield begin, hole
        begin = hole


class DirectorySync:
    """Syncs a directory; those who ask while that is under way share the next one.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._asked = 0
        self._synced = 0
        self._is_busy = False
        self._failure: errors.ClamorError | None = None

    def wait(self, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """Until all is synced that was done in the directory before this call.

        Raises:
            StoreError: It could not be synced, now or at any time before.
            WaitTimeoutError: The disk did not do it in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._asked += 1
            mine = self._asked
            while self._failure is None and self._synced < mine and self._is_busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise errors.WaitTimeoutError(
                        f"{self._path} was not synced in {timeout_s:g} s.",
                        hint="The disk is overloaded, or fails; look at it (dmesg).",
                    )
                self._changed.wait(left)
            if self._failure is not None:
                raise errors.StoreError(self._failure.message) from self._failure
            if self._synced >= mine:
                return
            self._is_busy, done = True, self._asked
        self._sync(done)

    def _sync(self, done: int) -> None:
        failure: errors.ClamorError | None = None
        try:
            sync_now(self._path)
        except errors.ClamorError as error:
            failure = error
            raise
        finally:
            with self._changed:
                self._is_busy, self._failure = False, failure
                self._synced = max(self._synced, done) if failure is None else self._synced
                self._changed.notify_all()


def sync_now(path: Path | str) -> None:
    """Syncs a directory.

    Raises:
        StoreError: It could not be synced.
    """
    with asking(path, "syncing the directory"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_groups: dict[str, DirectorySync] = {}
_groups_lock = threading.Lock()


def sync_directory(path: Path | str) -> None:
    """Syncs a directory, together with all who ask for it in this process: see `DirectorySync`.

    Raises:
        StoreError, WaitTimeoutError: See `DirectorySync.wait`.
    """
    with _groups_lock:
        group = _groups.setdefault(str(path), DirectorySync(path))
    group.wait()


def forget_sync(path: Path | str) -> None:
    """A directory is opened anew: what its sync said before counts no longer."""
    with _groups_lock:
        for each in [name for name in _groups if name == str(path) or name.startswith(f"{path}/")]:
            del _groups[each]


def file_id(fd: int) -> tuple[int, int]:
    """Device and inode.

    Raises:
        OSError: As it came.
    """
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_file(path: Path, fd: int) -> bool:
    """Whether the file has this name.

    Raises:
        OSError: As it came.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def link(fd: int, path: Path) -> bool:
    """Gives a file without a name one; what has it goes. False: the file system gives it none, or
    it had one, which is gone. Its directory is not synced.

    Raises:
        StoreError: It is refused.
    """
    with asking(path, "naming it"):
        if is_file(path, fd):
            return True
        made = path
        if path.exists():
            made = path.with_name(f".new-{path.name}-{secrets.token_hex(4)}")
        with open_file(path.parent, os.O_DIRECTORY) as at:
            try:
                # With a directory's descriptor os.link follows the link; else Python's does not.
                os.link(
                    *(f"{_SELF}/{fd}", made.name),
                    src_dir_fd=at,
                    dst_dir_fd=at,
                    follow_symlinks=True,
                )
            except OSError as error:
                if error.errno not in _NO_NAME:
                    raise
                return False
        if made != path:
            os.rename(made, path)
    return True


def write_whole(path: Path, content: bytes) -> None:
    """A small file, synced, in the place of what has its name: all of it or nothing.

    Raises:
        StoreError, NoSpaceError: It cannot be written; what was there is there.
    """
    temporary = path.with_name(f"{'.new-'}{path.name}-{secrets.token_hex(4)}")
    with asking(path, "writing it"):
        try:
            with open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_at(fd, content, 0)
                os.fsync(fd)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    sync_now(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """See `write_whole`."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


@contextlib.contextmanager
def open_file(path: Path | str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor, closed in the end. Files that it makes are for their owner alone.

    Raises:
        OSError: As it came.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def unlink(path: Path) -> bool:
    """Whether it was there.

    Raises:
        StoreError: It cannot be deleted.
    """
    with asking(path, "deleting it"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
    return True

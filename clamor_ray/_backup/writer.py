"""Who writes into a backup: one process at a time.

On a disk it holds a lock of the kernel's on `writer.lock`, which ends with the process. An object
store has no locks. There the writer puts an object, `writer.json`, again and again, each time with
a higher number. Who finds one that changes leaves the backup alone; one that does not change for a
while is of a writer that is dead. No clock is compared with another machine's.

Two that begin in the same moment in an object store may both go on, until one of them finds the
other's object, at the latest before it puts its manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._backup.directory import Directory
from clamor_ray._protocol.cause import cause_of

LOCK: Final = "writer.lock"
OBJECT: Final = "writer.json"
BEAT_S: Final = 5.0
DEAD_S: Final = 4 * BEAT_S
LOOK_S: Final = 1.0


def _in_use(directory: Directory, by: str) -> errors.BackupInUseError:
    return errors.BackupInUseError(f"{by} writes into {directory.name} at the moment.")


class _Beats:
    """Says that this process writes into an object store, until it is closed.

    Args:
        directory: the backup.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._owner = secrets.token_hex(8)
        self._beat = 0
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._say()
        self._thread = threading.Thread(target=self._run, name="clamor-backup", daemon=True)
        self._thread.start()

    def _say(self) -> None:
        self._beat += 1
        host, pid = socket.gethostname(), os.getpid()
        said = {"owner": self._owner, "beat": self._beat, "host": host, "pid": pid}
        self._directory.write(OBJECT, [json.dumps(said).encode()])

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._say_if_mine()
            except Exception as failure:  # any: who writes is told by `check`
                self._failure = failure
                return

    def _say_if_mine(self) -> None:
        said = _said(self._directory)
        if said is not None and said.get("owner") != self._owner:
            raise _in_use(self._directory, _who(said))
        self._say()

    def check(self) -> None:
        """Nobody else writes.

        Raises:
            BackupInUseError: Somebody does.
            StorageError: Nobody can tell.
        """
        if self._failure is not None:
            raise self._failure
        self._say_if_mine()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(errors.ClamorError):  # it is taken for dead in a moment
            said = _said(self._directory)
            if said is not None and said.get("owner") == self._owner:
                self._directory.delete([OBJECT])


def _said(directory: Directory) -> dict[str, Any] | None:
    content = directory.read(OBJECT)
    if content is None:
        return None
    try:
        said = json.loads(content)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _who(said: dict[str, Any]) -> str:
    return f"Process {said.get('pid', '?')} of {said.get('host', '?')}"


def _wait_until_dead(directory: Directory) -> None:
    """
    Raises:
        BackupInUseError: Somebody writes.
    """
    first = _said(directory)
    deadline = time.monotonic() + DEAD_S
    while first is not None and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = _said(directory)
        if now is None:
            return
        if now != first:
            raise _in_use(directory, _who(now))


class Writer:
    """The right to write into a backup; of `writing`.

    Args:
        beats: of an object store.
    """

    def __init__(self, beats: _Beats | None) -> None:
        self._beats = beats

    def check(self) -> None:
        """Nobody else writes.

        Raises:
            BackupInUseError: Somebody does.
            StorageError: Nobody can tell.
        """
        if self._beats is not None:
            self._beats.check()


@contextlib.contextmanager
def writing(directory: Directory) -> Iterator[Writer]:
    """Inside the block this process alone writes into a backup, which is prepared.

    Raises:
        BackupInUseError: Somebody else does.
        StorageError: The directory cannot be written to.
    """
    if not directory.store.is_local:
        _wait_until_dead(directory)
        beats = _Beats(directory)
        try:
            yield Writer(beats)
        finally:
            beats.close()
        return
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(f"{directory.path}/{LOCK}", flags, 0o600)
    except OSError as error:
        raise errors.StorageError(
            f"{directory.name_of(LOCK)} cannot be opened: {cause_of(error)}."
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.pread(fd, 100, 0).decode(errors="replace").strip()
            raise _in_use(directory, by or "Another process") from None
        except OSError as error:
            raise errors.StorageError(
                f"{directory.name_of(LOCK)} cannot be locked: {cause_of(error)}.",
                hint="Its file system has no locks (flock): use another one, or an object store.",
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"Process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
        yield Writer(None)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child of fork may have it, too
    finally:
        os.close(fd)

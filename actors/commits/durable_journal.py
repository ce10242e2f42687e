"""A journal that survives the machine: of a session with a store.

Facts, and what follows:

* The disk is waited for by ``synced``, in a thread, for all who have written meanwhile: see
  ``group_sync``. The write itself is as it is in ``sqlite_file``: the log's frames are chained by
  checksums, so after a power cut SQLite finds all transactions up to one that is at least the last
  one that was synced.
* Where the log is folded into the file, SQLite must sync in between (synchronous=NORMAL). The
  thread does that after a sync, not the registry's loop. Who writes meanwhile waits for it:
  4 to 6 ms for ``FOLD_BYTES``, as measured on a disk of 1 GB/s.
* A sync that failed may have left pages in the kernel that say they are on the disk and are not. So
  who opens the file folds the log in first: what is read then has been written anew, and synced.

Thread safety: as ``Journal``; the thread is its own affair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from clamor_ray._protocol.cause import cause_of
from clamor_ray.actors.commits.group_sync import GroupSync, end_process
from clamor_ray.actors.commits.journal import Journal, Saved

logger = logging.getLogger("clamor_ray.registry")

FOLD_BYTES: Final = 4 << 20  # of the log
# In what SQLite says where a fold is to be tried again later: the disk is full, or somebody reads.
LATER: Final = ("full", "locked", "in use")


class DurableJournal(Journal):
    """See the file's head.

    Args:
        directory: Made with mode 0700 where it does not exist.
        sync: See ``GroupSync``.
        on_failure: See ``GroupSync``.

    Raises:
        JournalFullError: As ``Journal``; also where the disk does not take what is in it.
    """

    SYNCHRONOUS = "NORMAL"
    CHECKPOINT_PAGES = 0

    def __init__(
        self,
        directory: Path,
        sync: Callable[[int], None] = os.fdatasync,
        on_failure: Callable[[Path, BaseException], None] = end_process,
    ) -> None:
        self._on_failure = on_failure
        self._folding = threading.Lock()  # a transaction, or the log is folded in
        self._group: GroupSync | None = None
        self._fold_at_bytes = FOLD_BYTES
        super().__init__(directory)
        try:
            with self._refusing():
                self._fold()
                for each in (directory, directory.parent):  # the names are there, too
                    _sync_directory(each)
                self._group = GroupSync(
                    directory / "journal-wal", sync, self._fold_if_large, on_failure
                )
        except BaseException:
            self._db.close()
            raise

    @property
    def n_syncs(self) -> int:
        """How often the disk was waited for since this was opened."""
        return self._group.n_syncs if self._group is not None else 0

    async def synced(self) -> None:
        """Returns when all that was written before is on the disk.

        Raises:
            JournalFullError, ClosedError: See ``GroupSync.synced``.
        """
        if self._group is not None:
            await self._group.synced()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._folding:
            with self._refusing():
                before = self._db.total_changes
            with super()._transaction() as db:
                yield db
            if self._group is not None and self._db.total_changes != before:
                self._group.written()

    def load(self) -> Saved:
        """See ``Journal.load``. The log is not folded in meanwhile."""
        with self._folding:
            return super().load()

    def _fold(self) -> None:
        """Everything is in the file, and on the disk; the log is empty.

        Raises:
            sqlite3.Error: It is not.
        """
        (busy, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("the log is in use")
        # SQLite syncs the head of a new log when something is written: better here than in a call.
        (format,) = self._db.execute("PRAGMA user_version").fetchone()
        self._db.execute(f"PRAGMA user_version={format}")

    def _fold_if_large(self) -> None:
        """In the thread."""
        assert self._group is not None
        size_bytes = self._group.size_bytes
        if size_bytes < self._fold_at_bytes:
            return
        try:
            with self._folding:
                self._fold()
            self._fold_at_bytes = FOLD_BYTES
        except sqlite3.Error as failure:
            if not any(word in str(failure) for word in LATER):
                self._on_failure(self.directory / "journal", failure)
                return
            self._fold_at_bytes = size_bytes + FOLD_BYTES
            logger.warning(
                "the log of %s cannot be folded in (%s); it grows meanwhile. Free disk space there",
                *(self.directory, cause_of(failure)),
            )

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        super().close()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""One SQLite file of the registry's: opened, locked, and written in whole transactions.

Facts, and what follows:

* A write that returned is in the kernel's hands: it survives the end of this process. It need not
  survive the machine, because nothing else of a session does. So: write-ahead log, and the disk is
  never waited for. (Where the log is folded into the file, every 200 to 300 commits, that would
  take 5 to 10 ms of the registry's loop.) ``durable_journal`` does wait.
* The file is private: the directory has mode 0700, the file 0600.
* SQLite takes rows' room again when they are deleted. So the file is as large as the most that was
  ever kept at once, however much was written.
* The exclusive lock keeps a second registry out, while an old one is still dying.

SQLite's integers have a sign: 64-bit ids are stored as two's complement.

Thread safety: one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from clamor_ray._protocol.cause import cause_of
from clamor_ray.errors import (
    ClosedError,
    InternalError,
    JournalFullError,
    VersionMismatchError,
)

LOCK_S = 20.0  # how long an old registry may take to die


def signed(number: int) -> int:
    """A 64-bit id as SQLite stores it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def unsigned(number: int) -> int:
    """What ``signed`` got."""
    return number & ((1 << 64) - 1)


class SqliteFile:
    """Opens a file, or makes one. Close it before its directory is removed.

    Args:
        directory: Made with mode 0700 where it does not exist.
        name: Of the file.
        schema: SQL statements that make its tables.
        format: A file of another one is refused.

    Raises:
        JournalFullError: It cannot be made or opened; the text says why.
        VersionMismatchError: Another build has made it.
    """

    SYNCHRONOUS = "OFF"
    CHECKPOINT_PAGES = 1000

    def __init__(self, directory: Path, name: str, schema: str, format: int) -> None:
        self.directory = directory
        self._closed = False
        with self._refusing():
            directory.mkdir(mode=0o700, parents=False, exist_ok=True)
            path = directory / name
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            # Used by one thread at a time, not always the one that opened it.
            self._db = sqlite3.connect(
                path, timeout=LOCK_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(schema, format)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, schema: str, format: int) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={self.SYNCHRONOUS}")
        self._db.execute(f"PRAGMA wal_autocheckpoint={self.CHECKPOINT_PAGES}")
        # A longer log, left by a time when it could not be folded in, is cut back to this.
        self._db.execute("PRAGMA journal_size_limit=16777216")
        with self._transaction():
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found == 0:
                for statement in schema.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={format}")
            elif found != format:
                raise VersionMismatchError(
                    f"The registry's file {self.directory} has format {found}, and this build of "
                    f"clamor-ray has format {format}.",
                    hint="Start the session anew, with the same clamor-ray everywhere.",
                )

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        if self._closed:
            raise ClosedError("The session was shut down.")
        try:
            yield
        except (sqlite3.OperationalError, OSError) as failure:
            raise JournalFullError(
                f"The registry's journal in {self.directory} cannot be written "
                f"({cause_of(failure)}); nothing was changed.",
                hint=f"Free disk space in {self.directory} and try again.",
            ) from failure
        except sqlite3.Error as failure:
            raise InternalError(
                f"The registry's journal in {self.directory} is damaged ({failure})."
            ) from failure

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._refusing():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled it back by itself
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._db.close()

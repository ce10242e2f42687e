"""What the registry must still know after ``kill -9``, in one SQLite file.

Facts, and what follows:

* A write that returned is in the kernel's hands: it survives the end of this process. It need not
  survive the machine, because nothing else of a session does. So: write-ahead log, and the disk is
  never waited for. (Where the log is folded into the file, every 200 to 300 commits, that would
  take 5 to 10 ms of the registry's loop.)
* Each method is one transaction: after a crash all of it is there, or nothing.
* Each event is written before it is answered, and before memory changes. A write that fails
  (disk full) changes nothing, and ``JournalFullError`` says so.
* The file is private: the directory has mode 0700, the file 0600. What is in it is JSON and bytes
  that go back where they came from; nothing is unpickled.
* SQLite takes rows' room again when they are deleted. So the file is as large as the most that was
  ever kept at once, however many commits there were.
* The exclusive lock keeps a second registry out, while an old one is still dying.

SQLite's integers have a sign: 64-bit ids are stored as two's complement.

Thread safety: one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clamor_ray.actors.commit_log import Entry, Outcome, Trimmed
from clamor_ray.actors.messages import RegionRecord, ServerInfo, ServerLost
from clamor_ray.errors import ClosedError, InternalError, JournalFullError

FORMAT = 1
LOCK_S = 20.0  # how long an old registry may take to die
CHECKPOINT_PAGES = 1000

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE regions (
    region INTEGER PRIMARY KEY, state TEXT NOT NULL, request_id INTEGER NOT NULL,
    record TEXT NOT NULL);
CREATE TABLE servers (
    server_id INTEGER PRIMARY KEY, info TEXT NOT NULL, lost TEXT);
CREATE TABLE commits (
    region INTEGER NOT NULL, version INTEGER NOT NULL, commit_id INTEGER NOT NULL,
    blocks BLOB NOT NULL, payload BLOB, PRIMARY KEY (region, version)) WITHOUT ROWID;
CREATE TABLE plans (
    region INTEGER NOT NULL, version INTEGER NOT NULL, plan BLOB NOT NULL,
    PRIMARY KEY (region, version)) WITHOUT ROWID;
CREATE TABLE outcomes (
    commit_id INTEGER PRIMARY KEY, at_s REAL NOT NULL, versions TEXT NOT NULL);
CREATE TABLE acknowledgements (
    region INTEGER NOT NULL, server_id INTEGER NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (region, server_id)) WITHOUT ROWID;
CREATE TABLE freed_inline (region INTEGER PRIMARY KEY);
"""


@dataclass(frozen=True)
class SavedRegion:
    """A region's record, the name of its state, and the id of the request that made it."""

    record: RegionRecord
    state: str
    request_id: int


@dataclass(frozen=True)
class Saved:
    """All that a journal holds; see ``CommitLog.restore`` for the last five."""

    next_region: int
    regions: tuple[SavedRegion, ...]
    servers: tuple[ServerInfo, ...]
    lost: tuple[ServerLost, ...]
    entries: tuple[Entry, ...]
    plans: tuple[tuple[int, int, bytes], ...]
    acknowledged: tuple[tuple[int, int, int], ...]
    outcomes: tuple[tuple[int, Outcome], ...]
    freed_inline: tuple[int, ...]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _unsigned(number: int) -> int:
    return number & ((1 << 64) - 1)


def _record_to_json(record: RegionRecord) -> str:
    # Run-length: a large region has one home for each of thousands of extents.
    homes: list[list[int]] = []
    for home in record.homes:
        if homes and homes[-1][0] == home:
            homes[-1][1] += 1
        else:
            homes.append([home, 1])
    return json.dumps([record.region, record.base_address, record.length_bytes, homes])


def _record_from_json(text: str) -> RegionRecord:
    region, base_address, length_bytes, runs = json.loads(text)
    homes = tuple(home for home, count in runs for _ in range(count))
    return RegionRecord(region, 0, base_address, length_bytes, homes)


class Journal:
    """Opens a journal, or makes one. Close it before its directory is removed.

    Args:
        directory: Made with mode 0700 where it does not exist.

    Raises:
        JournalFullError: It cannot be made or opened; the text says why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     journal = Journal(Path(directory, "private"))
        ...     journal.abort(7, at_s=0.0)
        ...     journal.close()
        ...     again = Journal(Path(directory, "private"))
        ...     again.load().outcomes
        ...     again.close()
        ((7, Outcome(versions={}, at_s=0.0)),)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._closed = False
        with self._refusing():
            directory.mkdir(mode=0o700, parents=False, exist_ok=True)
            path = directory / "journal"
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            # Used by one thread at a time, not always the one that opened it.
            self._db = sqlite3.connect(
                path, timeout=LOCK_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        # A longer log, left by a time when it could not be folded in, is cut back to this.
        self._db.execute("PRAGMA journal_size_limit=16777216")
        with self._transaction():
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={FORMAT}")
            elif found != FORMAT:
                raise sqlite3.OperationalError(f"its format is {found}, not {FORMAT}")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        if self._closed:
            raise ClosedError("The session was shut down.")
        try:
            yield
        except (sqlite3.OperationalError, OSError) as failure:
            raise JournalFullError(
                f"The registry's journal in {self.directory} cannot be written "
                f"({failure}); nothing was changed.",
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

    # -- regions and servers

    def create_region(self, record: RegionRecord, request_id: int, next_region: int) -> None:
        """A region exists, that nobody can look up yet."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO regions VALUES (?, 'creating', ?, ?)",
                (record.region, _signed(request_id), _record_to_json(record)),
            )
            db.execute("REPLACE INTO meta VALUES ('next_region', ?)", (next_region,))

    def set_states(self, states: Iterable[tuple[int, str | None]]) -> None:
        """Regions have a new state; None: they are gone, and so is all that is known of them."""
        with self._transaction() as db:
            for region, state in states:
                if state is not None:
                    db.execute("UPDATE regions SET state = ? WHERE region = ?", (state, region))
                    continue
                for table in ("regions", "commits", "plans", "acknowledgements"):
                    db.execute(f"DELETE FROM {table} WHERE region = ?", (region,))

    def free_inline(self, region: int, forgotten: Iterable[int] = ()) -> None:
        """An inline variable is freed; of others that is not remembered any more."""
        with self._transaction() as db:
            for table in ("commits", "plans"):
                db.execute(f"DELETE FROM {table} WHERE region = ?", (region,))
            db.executemany(
                "DELETE FROM freed_inline WHERE region = ?", [(other,) for other in forgotten]
            )
            db.execute("INSERT OR IGNORE INTO freed_inline VALUES (?)", (region,))

    def save_server(self, info: ServerInfo) -> None:
        """A server registered, or registered again."""
        with self._transaction() as db:
            db.execute(
                "REPLACE INTO servers VALUES (?, ?, NULL)",
                (_signed(info.server_id), json.dumps(asdict(info))),
            )

    def lose_server(self, lost: ServerLost) -> None:
        """A server is gone for good."""
        with self._transaction() as db:
            server_id = _signed(lost.server_id)
            db.execute("REPLACE INTO servers VALUES (?, '', ?)", (server_id, lost.reason))
            db.execute("DELETE FROM acknowledgements WHERE server_id = ?", (server_id,))

    # -- commits

    def commit(self, commit_id: int, entries: Iterable[Entry], at_s: float) -> None:
        """All entries of a commit and its outcome."""
        signed = _signed(commit_id)
        entries = tuple(entries)
        with self._transaction() as db:
            for entry in entries:
                db.execute(
                    "INSERT INTO commits VALUES (?, ?, ?, ?, ?)",
                    (entry.region, entry.version, signed, entry.blocks, entry.payload),
                )
                if entry.plan is not None:
                    db.execute(
                        "INSERT INTO plans VALUES (?, ?, ?)",
                        (entry.region, entry.version, entry.plan),
                    )
            versions = json.dumps([(entry.region, entry.version) for entry in entries])
            db.execute("INSERT INTO outcomes VALUES (?, ?, ?)", (signed, at_s, versions))

    def abort(self, commit_id: int, at_s: float) -> None:
        """The commit can never be made."""
        with self._transaction() as db:
            db.execute("INSERT INTO outcomes VALUES (?, ?, '[]')", (_signed(commit_id), at_s))

    def acknowledge(self, acknowledged: Iterable[tuple[int, int, int]]) -> None:
        """(region, server id, version): the home knows all versions up to this one."""
        with self._transaction() as db:
            db.executemany(
                "REPLACE INTO acknowledgements VALUES (?, ?, ?)",
                [(region, _signed(home), version) for region, home, version in acknowledged],
            )

    def trim(self, trimmed: Trimmed) -> None:
        """Deletes what the commit log has forgotten."""
        with self._transaction() as db:
            for table, rows in (("commits", trimmed.commits), ("plans", trimmed.plans)):
                db.executemany(f"DELETE FROM {table} WHERE region = ? AND version = ?", rows)
            db.executemany(
                "DELETE FROM outcomes WHERE commit_id = ?",
                [(_signed(commit_id),) for commit_id in trimmed.outcomes],
            )

    # -- after a restart

    def load(self) -> Saved:
        """All that was written."""
        db = self._db
        with self._refusing():
            meta = dict(db.execute("SELECT name, value FROM meta"))
            regions = [
                SavedRegion(_record_from_json(record), state, _unsigned(request_id))
                for record, state, request_id in db.execute(
                    "SELECT record, state, request_id FROM regions ORDER BY region"
                )
            ]
            servers: list[ServerInfo] = []
            lost: list[ServerLost] = []
            for server_id, info, reason in db.execute("SELECT * FROM servers"):
                if reason is None:
                    servers.append(ServerInfo(**json.loads(info)))
                else:
                    lost.append(ServerLost(_unsigned(server_id), reason))
            entries = [
                Entry(region, version, _unsigned(commit_id), blocks, None, payload)
                for region, version, commit_id, blocks, payload in db.execute(
                    "SELECT region, version, commit_id, blocks, payload FROM commits "
                    "ORDER BY region, version"
                )
            ]
            acknowledged = [
                (region, _unsigned(home), version)
                for region, home, version in db.execute("SELECT * FROM acknowledgements")
            ]
            outcomes = [
                (_unsigned(commit_id), Outcome(dict(json.loads(versions)), at_s))
                for commit_id, at_s, versions in db.execute(
                    "SELECT commit_id, at_s, versions FROM outcomes ORDER BY at_s"
                )
            ]
            plans: list[tuple[Any, ...]] = list(
                db.execute("SELECT region, version, plan FROM plans ORDER BY region, version")
            )
            freed = [region for (region,) in db.execute("SELECT region FROM freed_inline")]
        return Saved(
            next_region=meta.get("next_region", 1),
            regions=tuple(regions),
            servers=tuple(servers),
            lost=tuple(lost),
            entries=tuple(entries),
            plans=tuple((region, version, plan) for region, version, plan in plans),
            acknowledged=tuple(acknowledged),
            outcomes=tuple(outcomes),
            freed_inline=tuple(freed),
        )

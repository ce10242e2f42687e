"""The lineage on disk: what ``Lineage`` still knows after ``kill -9`` of the registry.

A file of its own beside the journal, because it is written off the registry's loop: in batches,
one transaction for all that has changed since the one before. What ``sqlite_file`` says of its
files holds for this one. Nothing in it is unpickled: read sets are bytes that go back where they
came from.

Thread safety: any thread may write, and another one close it.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray.actors.commits.sqlite_file import SqliteFile
from clamor_ray.actors.lineage.lineage import Changes, Collection

FORMAT = 1

_SCHEMA = """
CREATE TABLE collections (
    collection INTEGER PRIMARY KEY, description TEXT NOT NULL, pins TEXT NOT NULL);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, token BLOB NOT NULL, run_id INTEGER NOT NULL, stage TEXT NOT NULL,
    partition INTEGER NOT NULL, attempt INTEGER NOT NULL, function TEXT NOT NULL,
    inputs TEXT NOT NULL, snapshots TEXT NOT NULL, node_id TEXT NOT NULL, pid INTEGER NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, outcome TEXT NOT NULL,
    rows INTEGER NOT NULL, output_digest BLOB, predictor_digest BLOB);
CREATE TABLE reads (
    id INTEGER NOT NULL, place INTEGER NOT NULL, region INTEGER NOT NULL,
    version INTEGER NOT NULL, blocks BLOB, PRIMARY KEY (id, place)) WITHOUT ROWID;
CREATE TABLE outputs (
    number INTEGER PRIMARY KEY, token BLOB NOT NULL UNIQUE, digest BLOB NOT NULL);
CREATE TABLE releasing (region INTEGER PRIMARY KEY)
"""

_COLUMNS = (
    "token, run_id, stage, partition, attempt, function, inputs, node_id, pid, start_ns, end_ns, "
    "outcome, rows, output_digest, predictor_digest, snapshots"
)


def _text(text: str) -> str:
    """Half of a surrogate pair, which file names and messages may have, has no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _row_of(record_id: int, record: AttemptRecord) -> tuple[Any, ...]:
    fields = {
        name: _text(value) if isinstance(value, str) else value
        for name, value in record._asdict().items()
    }
    del fields["reads"]
    snapshots = json.dumps(fields.pop("snapshots"))
    return (record_id, *fields.values(), snapshots)


def _record_of(row: tuple[Any, ...], reads: list[tuple[int, int, bytes | None]]) -> AttemptRecord:
    *fields, snapshots = row
    values = dict(zip(_COLUMNS.split(", "), fields, strict=False))
    pairs = tuple((region, version) for region, version in json.loads(snapshots))
    return AttemptRecord(**values, snapshots=pairs, reads=tuple(reads))


class LineageJournal(SqliteFile):
    """Opens it, or makes it.

    Args:
        directory: The journal's.

    Raises:
        JournalFullError: It cannot be made or opened; the text says why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     journal = LineageJournal(Path(directory))
        ...     journal.write(Changes(collections={7: Collection("near", ((1, 3),))}))
        ...     journal.close()
        ...     again = LineageJournal(Path(directory))
        ...     again.load().collections
        ...     again.close()
        {7: Collection(description='near', pins=((1, 3),))}
    """

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        super().__init__(directory, "lineage", _SCHEMA, FORMAT)

    def close(self) -> None:
        """Once what is being written is. Idempotent."""
        with self._lock:
            super().close()

    def write(self, changes: Changes) -> None:
        """All of it, or nothing.

        Raises:
            JournalFullError: Nothing was written.
        """
        gone = [(number,) for number, record in changes.records.items() if record is None]
        new = [(number, record) for number, record in changes.records.items() if record is not None]
        with self._lock, self._transaction() as db:
            for collection, known in changes.collections.items():
                if known is None:
                    db.execute("DELETE FROM collections WHERE collection = ?", (collection,))
                else:
                    db.execute(
                        "REPLACE INTO collections VALUES (?, ?, ?)",
                        (collection, _text(known.description), json.dumps(known.pins)),
                    )
            for table in ("attempts", "reads"):
                db.executemany(f"DELETE FROM {table} WHERE id = ?", gone)
            db.executemany(
                f"REPLACE INTO attempts (id, {_COLUMNS}) VALUES ({', '.join('?' * 17)})",
                [_row_of(number, record) for number, record in new],
            )
            db.executemany(
                "REPLACE INTO reads VALUES (?, ?, ?, ?, ?)",
                [
                    (number, place, *read)
                    for number, record in new
                    for place, read in enumerate(record.reads)
                ],
            )
            for token, digest in changes.outputs.items():
                db.execute("DELETE FROM outputs WHERE token = ?", (token,))
                if digest is not None:
                    db.execute("INSERT INTO outputs VALUES (NULL, ?, ?)", (token, digest))
            for region, on in changes.releasing.items():
                db.execute(
                    "INSERT OR IGNORE INTO releasing VALUES (?)"
                    if on
                    else "DELETE FROM releasing WHERE region = ?",
                    (region,),
                )

    def load(self) -> Changes:
        """All that was written, in the order in which it was."""
        db = self._db
        found = Changes()
        with self._refusing():
            for collection, description, pins in db.execute("SELECT * FROM collections"):
                pairs = tuple((region, version) for region, version in json.loads(pins))
                found.collections[collection] = Collection(description, pairs)
            reads: dict[int, list[tuple[int, int, bytes | None]]] = {}
            for number, region, version, blocks in db.execute(
                "SELECT id, region, version, blocks FROM reads ORDER BY id, place"
            ):
                reads.setdefault(number, []).append((region, version, blocks))
            for number, *row in db.execute(f"SELECT id, {_COLUMNS} FROM attempts ORDER BY id"):
                found.records[number] = _record_of(tuple(row), reads.get(number, []))
            found.outputs.update(
                db.execute("SELECT token, digest FROM outputs ORDER BY number").fetchall()
            )
            found.releasing = dict.fromkeys(
                (region for (region,) in db.execute("SELECT region FROM releasing")), True
            )
        return found

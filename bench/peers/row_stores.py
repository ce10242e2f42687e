"""Peers that keep rows of one length on this machine's disk, by number: durably, as they say.

Each batch of updates is one transaction that is on the disk when it returns (np.memmap has no
transactions: what a power cut leaves of its last batch is anything).
"""

from __future__ import annotations

import importlib.util
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

MAP_BYTES = 1 << 36  # of LMDB: addresses only
BATCH = 10_000


class RowStore(Protocol):
    """What is measured of each."""

    def put(self, rows: Rows) -> None:
        """All of them, once."""

    def row(self, number: int) -> Rows:
        """A copy of one."""

    def rows(self, numbers: Int64) -> Rows:
        """Copies of several, in that order."""

    def update(self, numbers: Int64, rows: Rows) -> None:
        """Overwrites them, which have different numbers."""

    def close(self) -> None:
        """Nothing is used after it."""


def _key(number: int) -> bytes:
    return int(number).to_bytes(8, "big")


def _keys(numbers: Int64) -> list[bytes]:
    keys: list[bytes] = numbers.astype(">u8").view("V8").tolist()
    return keys


class Lmdb:
    """LMDB as it is: each transaction is synced."""

    def __init__(self, directory: Path) -> None:
        import lmdb

        self._environment = lmdb.open(str(directory / "lmdb"), map_size=MAP_BYTES)
        self._reading: Any = None

    def put(self, rows: Rows) -> None:
        keys = _keys(np.arange(len(rows)))
        with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            pairs = ((key, row.data) for key, row in zip(keys, rows, strict=True))
            cursor.putmulti(pairs, append=True)
        self._read_anew()

    def _read_anew(self) -> None:
        if self._reading is not None:
            self._reading.abort()
        self._reading = self._environment.begin(buffers=True)

    def row(self, number: int) -> Rows:
        return np.array(np.frombuffer(self._reading.get(_key(number)), np.uint64))

    def rows(self, numbers: Int64) -> Rows:
        get = self._reading.get
        found = np.frombuffer(b"".join([get(key) for key in _keys(numbers)]), np.uint64)
        return found.reshape(len(numbers), -1)

    def update(self, numbers: Int64, rows: Rows) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, row in zip(_keys(numbers), rows, strict=True):
                transaction.put(key, row.data)
        self._read_anew()

    def close(self) -> None:
        self._reading.abort()
        self._environment.close()


class Sqlite:
    """A table by rowid, in WAL mode with synchronous=FULL: each transaction is synced."""

    def __init__(self, directory: Path) -> None:
        self._connection = sqlite3.connect(directory / "rows.sqlite", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, row BLOB)")

    def put(self, rows: Rows) -> None:
        self._in_transaction(
            "INSERT INTO rows VALUES (?, ?)", ((n, row.data) for n, row in enumerate(rows))
        )

    def _in_transaction(self, statement: str, values: Any) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany(statement, values)
        self._connection.execute("COMMIT")

    def _bytes(self, number: int) -> bytes:
        (row,) = self._connection.execute(
            "SELECT row FROM rows WHERE number = ?", (number,)
        ).fetchone()
        return bytes(row)

    def row(self, number: int) -> Rows:
        return np.frombuffer(self._bytes(int(number)), np.uint64)

    def rows(self, numbers: Int64) -> Rows:
        joined = b"".join([self._bytes(number) for number in numbers.tolist()])
        return np.frombuffer(joined, np.uint64).reshape(len(numbers), -1)

    def update(self, numbers: Int64, rows: Rows) -> None:
        values = ((row.data, n) for n, row in zip(numbers.tolist(), rows, strict=True))
        self._in_transaction("UPDATE rows SET row = ? WHERE number = ?", values)

    def close(self) -> None:
        self._connection.close()


class Memmap:
    """An array in a mapped file, flushed after each batch."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "rows.memmap"
        self._rows: Any = None

    def put(self, rows: Rows) -> None:
        self._rows = np.memmap(self._path, np.uint64, "w+", shape=rows.shape)
        self._rows[:] = rows
        self._rows.flush()

    def row(self, number: int) -> Rows:
        return np.array(self._rows[number])

    def rows(self, numbers: Int64) -> Rows:
        return np.asarray(self._rows[numbers])

    def update(self, numbers: Int64, rows: Rows) -> None:
        self._rows[numbers] = rows
        self._rows.flush()

    def close(self) -> None:
        del self._rows


class RocksDb:
    """RocksDB in raw mode; each batch's write is synced."""

    def __init__(self, directory: Path) -> None:
        import rocksdict

        self._rocksdict = rocksdict
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        self._db = rocksdict.Rdict(str(directory / "rocksdb"), options)
        self._synced = rocksdict.WriteOptions()
        self._synced.sync = True

    def put(self, rows: Rows) -> None:
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            self.update(np.arange(first, first + len(part)), part)

    def row(self, number: int) -> Rows:
        return np.frombuffer(self._db[_key(number)], np.uint64)

    def rows(self, numbers: Int64) -> Rows:
        joined = b"".join(self._db.get(_keys(numbers)))
        return np.frombuffer(joined, np.uint64).reshape(len(numbers), -1)

    def update(self, numbers: Int64, rows: Rows) -> None:
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(_keys(numbers), rows, strict=True):
            batch.put(key, row.tobytes())
        self._db.write(batch, self._synced)

    def close(self) -> None:
        self._db.close()


PEERS: dict[str, Callable[[Path], RowStore]] = {
    "lmdb": Lmdb,
    "sqlite3": Sqlite,
    "memmap": Memmap,
    "rocksdict": RocksDb,
}


def installed() -> list[str]:
    """The peers that are here: two of them come with the library."""
    return [
        name
        for name in PEERS
        if name in ("sqlite3", "memmap") or importlib.util.find_spec(name) is not None
    ]

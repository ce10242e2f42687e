"""What the registry must still know after ``kill -9``, in one SQLite file.

Facts, and what follows:

* What ``sqlite_file`` says of its files holds for this one.
* Each method is one transaction: after a crash all of it is there, or nothing.
* Each event is written before it is answered, and before memory changes. A write that fails
  (disk full) changes nothing, and ``JournalFullError`` says so.
* What is in it is JSON and bytes that go back where they came from; nothing is unpickled.

Thread safety: one thread at a time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clamor_ray._protocol.messages import NamedVariable, RegionRecord, ServerInfo, ServerLost
from clamor_ray._protocol.source import Source
from clamor_ray.actors.commits.committed import Entry, Outcome, Trimmed
from clamor_ray.actors.commits.sqlite_file import SqliteFile, signed, unsigned
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks

FORMAT = 5
ANY_REGION = 0  # is no region's id: in `inside`, that any may be
IDLE = "idle "  # begins a name in `meta`; the server's id follows
NOTHING: Mapping[int, LostBlocks | None] = MappingProxyType({})

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
CREATE TABLE dropped (number INTEGER PRIMARY KEY AUTOINCREMENT, token BLOB NOT NULL UNIQUE);
CREATE TABLE sources (
    region INTEGER PRIMARY KEY, kind TEXT NOT NULL, at INTEGER NOT NULL, digest BLOB NOT NULL,
    what BLOB NOT NULL);
CREATE TABLE rehomed (region INTEGER PRIMARY KEY);
CREATE TABLE givers (region INTEGER PRIMARY KEY, server_id INTEGER NOT NULL);
CREATE TABLE leaving (server_id INTEGER PRIMARY KEY);
CREATE TABLE lacking (
    region INTEGER PRIMARY KEY, number INTEGER NOT NULL, n_blocks INTEGER NOT NULL,
    blocks BLOB NOT NULL, why TEXT NOT NULL, hint TEXT NOT NULL);
CREATE TABLE names (name TEXT PRIMARY KEY, region INTEGER NOT NULL, packed BLOB NOT NULL)
    WITHOUT ROWID;
CREATE INDEX names_by_region ON names (region);
CREATE TABLE claims (begin_address INTEGER PRIMARY KEY, end_address INTEGER NOT NULL);
CREATE TABLE inside (region INTEGER NOT NULL, inner INTEGER NOT NULL,
    PRIMARY KEY (region, inner)) WITHOUT ROWID;
CREATE INDEX inside_by_inner ON inside (inner);
CREATE TABLE directories (
    number INTEGER PRIMARY KEY AUTOINCREMENT, server_id INTEGER NOT NULL UNIQUE,
    directory TEXT NOT NULL, node_id TEXT NOT NULL);
CREATE TABLE opened (region INTEGER PRIMARY KEY, version INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class SavedRegion:
    """A region's record, the name of its state, and the id of the request that made it."""

    record: RegionRecord
    state: str
    request_id: int


@dataclass(frozen=True)
class Saved:
    """All that a journal holds; see ``CommitLog.restore`` for most of it."""

    next_region: int
    regions: tuple[SavedRegion, ...]
    servers: tuple[ServerInfo, ...]
    lost: tuple[ServerLost, ...]
    entries: tuple[Entry, ...]
    plans: tuple[tuple[int, int, bytes], ...]
    acknowledged: tuple[tuple[int, int, int], ...]
    outcomes: tuple[tuple[int, Outcome], ...]
    freed_inline: tuple[int, ...]
    sources: tuple[tuple[int, Source], ...] = ()
    rehomed: tuple[int, ...] = ()
    dropped: tuple[bytes, ...] = ()
    lacking: tuple[tuple[int, LostBlocks], ...] = ()
    names: tuple[NamedVariable, ...] = ()
    givers: tuple[tuple[int, int], ...] = ()
    leaving: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()  # of those that leave: because nothing used them
    claims: tuple[tuple[int, int], ...] = ()  # addresses that the session has; see `claim`
    inside: tuple[tuple[int, int], ...] = ()  # (region, one inside of it); see `seal`
    # (server id, directory of the store, its last node) of all that ever registered, the last first
    directories: tuple[tuple[int, str, str], ...] = ()
    opened: tuple[tuple[int, int], ...] = ()  # (region, version), above 0; see `open_again`


def _record_to_json(record: RegionRecord) -> str:
    # Run-length: a large region has one home for each of thousands of extents.
    homes: list[list[int]] = []
    for home in record.homes:
        if homes and homes[-1][0] == home:
            homes[-1][1] += 1
        else:
            homes.append([home, 1])
    where = [record.base_address, record.length_bytes, homes]
    pieces = [record.n_pieces, record.piece_bytes, record.piece_of, int(record.is_followed)]
    pieces += [record.group_width, record.group_parity]
    pieces += [int(record.is_parity), int(record.on_disk)]
    return json.dumps([record.region, *where, record.term, *(pieces if any(pieces) else ())])


def _record_from_json(text: str) -> RegionRecord:
    region, base_address, length_bytes, runs, term, *pieces = json.loads(text)
    n_pieces, piece_bytes, piece_of, is_followed, width, n_parity, *is_what = pieces or (0,) * 8
    is_parity, on_disk = map(bool, (*is_what, 0)[:2])  # older ones do not say where it is
    homes = tuple(home for home, count in runs for _ in range(count))
    return RegionRecord(
        region=region,
        version=0,
        base_address=base_address,
        length_bytes=length_bytes,
        homes=homes,
        term=term,
        n_pieces=n_pieces,
        piece_bytes=piece_bytes,
        piece_of=piece_of,
        is_followed=bool(is_followed),
        group_width=width,
        group_parity=n_parity,
        is_parity=is_parity,
        on_disk=on_disk,
    )


def _set_lacking(db: sqlite3.Connection, lost: Mapping[int, LostBlocks | None]) -> None:
    for region, found in lost.items():
        if found is None:
            db.execute("DELETE FROM lacking WHERE region = ?", (region,))
        else:
            db.execute(
                "REPLACE INTO lacking VALUES (?, ?, ?, ?, ?, ?)",
                (region, found.number, found.n_blocks, found.blocks, found.why, found.hint),
            )


def _forget_idle(db: sqlite3.Connection, server_id: int) -> None:
    db.execute("DELETE FROM meta WHERE name = ?", (IDLE + str(server_id),))


def _pass_on_inside(db: sqlite3.Connection, region: int) -> None:
    """A region ends. What is inside of it is held on by those that it is inside of: a reference
    that was taken out of it counts as one to it."""
    db.execute(
        "INSERT OR IGNORE INTO inside SELECT outer.region, own.inner FROM inside AS outer "
        "JOIN inside AS own ON own.region = outer.inner "
        "WHERE outer.inner = ? AND own.inner != outer.region",
        (region,),
    )
    db.execute("DELETE FROM inside WHERE region = ? OR inner = ?", (region, region))


def _delete_region(db: sqlite3.Connection, region: int) -> None:
    for table in (
        *("regions", "commits", "plans", "acknowledgements", "sources", "rehomed"),
        *("lacking", "givers", "opened"),
    ):
        db.execute(f"DELETE FROM {table} WHERE region = ?", (region,))


def _insert_region(
    db: sqlite3.Connection,
    record: RegionRecord,
    request_id: int,
    next_region: int,
    pieces: Iterable[RegionRecord] = (),
) -> None:
    db.execute(
        "INSERT INTO regions VALUES (?, 'creating', ?, ?)",
        (record.region, signed(request_id), _record_to_json(record)),
    )
    db.executemany(
        "INSERT INTO regions VALUES (?, 'creating', 0, ?)",
        [(piece.region, _record_to_json(piece)) for piece in pieces],
    )
    db.execute("REPLACE INTO meta VALUES ('next_region', ?)", (next_region,))


class Journal(SqliteFile):
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
        super().__init__(directory, "journal", _SCHEMA, FORMAT)

    async def synced(self) -> None:
        """Returns when all that was written before is as safe as this journal makes it: here it is
        that at once. Nobody must be told of anything before."""

    # -- regions and servers

    def create_region(
        self,
        record: RegionRecord,
        request_id: int,
        next_region: int,
        pieces: Iterable[RegionRecord] = (),
    ) -> None:
        """A region exists, that nobody can look up yet; of a variable in pieces also these."""
        with self._transaction() as db:
            _insert_region(db, record, request_id, next_region, pieces)

    def seal(
        self,
        region: int,
        source: Source | None = None,
        created: tuple[RegionRecord, int, int] | None = None,
        inside: Iterable[int] = (),
    ) -> None:
        """A region can be looked up from now on.

        Args:
            region: Its id.
            source: How its version 0 can be made again.
            created: What `create_region` takes, for one that is made with the same transaction.
            inside: Regions that references inside of it lead to; `ANY_REGION`: nobody knows which.
        """
        with self._transaction() as db:
            if source is not None:
                db.execute("REPLACE INTO sources VALUES (?, ?, ?, ?, ?)", (region, *source))
            db.execute("UPDATE regions SET state = 'ready' WHERE region = ?", (region,))
            db.executemany(
                "INSERT OR IGNORE INTO inside VALUES (?, ?)", [(region, inner) for inner in inside]
            )
            if created is not None:
                _insert_region(db, *created)

    def set_states(self, states: Iterable[tuple[int, str | None]]) -> None:
        """Regions have a new state; None: they are gone, and so is all that is known of them. One
        that ends has no name any more."""
        with self._transaction() as db:
            for region, state in states:
                db.execute("DELETE FROM names WHERE region = ?", (region,))
                _pass_on_inside(db, region)
                if state is not None:
                    db.execute("UPDATE regions SET state = ? WHERE region = ?", (state, region))
                    continue
                _delete_region(db, region)

    def free_inline(self, regions: Iterable[int], forgotten: Iterable[int] = ()) -> None:
        """Inline variables are freed; of others that is not remembered any more."""
        freed = [(region,) for region in regions]
        with self._transaction() as db:
            for table in ("commits", "plans", "names"):
                db.executemany(f"DELETE FROM {table} WHERE region = ?", freed)
            db.executemany(
                "DELETE FROM freed_inline WHERE region = ?", [(other,) for other in forgotten]
            )
            db.executemany("INSERT OR IGNORE INTO freed_inline VALUES (?)", freed)

    def drop(
        self, keys: Iterable[int], tokens: Iterable[bytes], forgotten: Iterable[bytes]
    ) -> None:
        """Tasks are dropped, with their idempotency keys; of others that is not remembered any
        more.
        """
        with self._transaction() as db:
            db.executemany("DELETE FROM commits WHERE region = ?", [(key,) for key in keys])
            db.executemany(
                "INSERT OR IGNORE INTO dropped (token) VALUES (?)", [(token,) for token in tokens]
            )
            db.executemany("DELETE FROM dropped WHERE token = ?", [(other,) for other in forgotten])

    def claim(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The session has these addresses from now on, beside those that it had."""
        with self._transaction() as db:
            db.executemany("REPLACE INTO claims VALUES (?, ?)", ranges)

    def open_again(
        self,
        gone: Iterable[int],
        keys: Iterable[int],
        sources: Iterable[int],
        opened: Mapping[int, int],
    ) -> None:
        """A store is opened in another cluster: what cannot outlive the one before goes. Which that
        is ``actors/store/opening.py`` says.

        Args:
            gone: Regions, with their pieces, with all that is known of them.
            keys: Ids of idempotency keys.
            sources: Regions whose source goes.
            opened: The newest version of each region that has one above 0.
        """
        with self._transaction() as db:
            db.execute("DELETE FROM opened")
            db.executemany("INSERT INTO opened VALUES (?, ?)", opened.items())
            for region in gone:
                db.execute("DELETE FROM inside WHERE region = ? OR inner = ?", (region, region))
                _delete_region(db, region)
            for table, rows in (("commits", keys), ("sources", sources)):
                db.executemany(f"DELETE FROM {table} WHERE region = ?", [(row,) for row in rows])
            for table in ("dropped", "leaving", "givers", "rehomed"):
                db.execute(f"DELETE FROM {table}")
            db.execute("DELETE FROM servers WHERE lost IS NULL")
            db.execute("DELETE FROM meta WHERE name GLOB ?", (IDLE + "*",))

    def give_name(self, named: NamedVariable) -> None:
        """A variable has this name from now on."""
        with self._transaction() as db:
            db.execute("INSERT INTO names VALUES (?, ?, ?)", named)

    def drop_name(self, name: str) -> None:
        """No variable has it any more."""
        with self._transaction() as db:
            db.execute("DELETE FROM names WHERE name = ?", (name,))

    def save_server(self, info: ServerInfo) -> None:
        """A server registered, or registered again. One that is lost stays lost. Which directory
        of a store it had is kept for good."""
        with self._transaction() as db:
            if info.directory:
                db.execute(
                    "REPLACE INTO directories (server_id, directory, node_id) VALUES (?, ?, ?)",
                    (signed(info.server_id), info.directory, info.node_id),
                )
            db.execute(
                "INSERT INTO servers VALUES (?, ?, NULL) ON CONFLICT DO UPDATE "
                "SET info = excluded.info WHERE lost IS NULL",
                (signed(info.server_id), json.dumps(asdict(info))),
            )

    def lose_server(self, lost: ServerLost) -> None:
        """A server is gone for good."""
        with self._transaction() as db:
            server_id = signed(lost.server_id)
            db.execute("REPLACE INTO servers VALUES (?, '', ?)", (server_id, lost.reason))
            for table in ("acknowledgements", "leaving"):
                db.execute(f"DELETE FROM {table} WHERE server_id = ?", (server_id,))
            _forget_idle(db, lost.server_id)

    def rehome(
        self,
        record: RegionRecord,
        version: int,
        lost: LostBlocks | None = None,
        giver: int | None = None,
        others: Mapping[int, LostBlocks] = MappingProxyType({}),
    ) -> None:
        """The region has another home, which has it at this version, but for what is lost.

        Args:
            record: With the new home, and its term.
            version: The newest.
            lost: What is.
            giver: The home before it, which lives and has not heard of that; or the home itself,
                where the region goes back to it. See ``giver_heard``.
            others: What is lost of other regions with it.
        """
        region = record.region
        with self._transaction() as db:
            db.execute(
                "UPDATE regions SET record = ? WHERE region = ?", (_record_to_json(record), region)
            )
            db.execute("DELETE FROM acknowledgements WHERE region = ?", (region,))
            db.executemany(
                "REPLACE INTO acknowledgements VALUES (?, ?, ?)",
                [(region, signed(home), version) for home in dict.fromkeys(record.homes)],
            )
            db.execute("INSERT OR IGNORE INTO rehomed VALUES (?)", (region,))
            _set_lacking(db, {**others, region: lost})
            db.execute("DELETE FROM givers WHERE region = ?", (region,))
            if giver is not None:
                db.execute("INSERT INTO givers VALUES (?, ?)", (region, signed(giver)))

    def giver_heard(self, region: int) -> None:
        """The giver has heard who the home is, or is lost."""
        with self._transaction() as db:
            db.execute("DELETE FROM givers WHERE region = ?", (region,))

    def leave(self, server_id: int, is_idle: bool = False) -> None:
        """A server gives its homes away, and takes none from now on; because nothing uses it, or
        because somebody has asked."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO leaving VALUES (?)", (signed(server_id),))
            _forget_idle(db, server_id)
            if is_idle:
                db.execute("INSERT INTO meta VALUES (?, ?)", (IDLE + str(server_id), 1))

    def stay(self, server_id: int) -> None:
        """A server takes homes again."""
        with self._transaction() as db:
            db.execute("DELETE FROM leaving WHERE server_id = ?", (signed(server_id),))
            _forget_idle(db, server_id)

    # -- commits

    def commit(
        self,
        commit_id: int,
        entries: Iterable[Entry],
        at_s: float,
        lost: Mapping[int, LostBlocks | None] = NOTHING,
    ) -> None:
        """All entries of a commit and its outcome, and what is lost of which regions after it."""
        stored = signed(commit_id)
        entries = tuple(entries)
        with self._transaction() as db:
            for entry in entries:
                db.execute(
                    "INSERT INTO commits VALUES (?, ?, ?, ?, ?)",
                    (entry.region, entry.version, stored, entry.blocks, entry.payload),
                )
                if entry.plan is not None:
                    db.execute(
                        "INSERT INTO plans VALUES (?, ?, ?)",
                        (entry.region, entry.version, entry.plan),
                    )
            versions = json.dumps([(entry.region, entry.version) for entry in entries])
            db.execute("INSERT INTO outcomes VALUES (?, ?, ?)", (stored, at_s, versions))
            _set_lacking(db, lost)

    def abort(self, commit_id: int, at_s: float) -> None:
        """The commit can never be made."""
        with self._transaction() as db:
            db.execute("INSERT INTO outcomes VALUES (?, ?, '[]')", (signed(commit_id), at_s))

    def acknowledge(self, acknowledged: Iterable[tuple[int, int, int]]) -> None:
        """(region, server id, version): the home knows all versions up to this one."""
        with self._transaction() as db:
            db.executemany(
                "REPLACE INTO acknowledgements VALUES (?, ?, ?)",
                [(region, signed(home), version) for region, home, version in acknowledged],
            )

    def trim(self, trimmed: Trimmed) -> None:
        """Deletes what the commit log has forgotten."""
        with self._transaction() as db:
            for table, rows in (("commits", trimmed.commits), ("plans", trimmed.plans)):
                db.executemany(f"DELETE FROM {table} WHERE region = ? AND version = ?", rows)
            db.executemany(
                "DELETE FROM outcomes WHERE commit_id = ?",
                [(signed(commit_id),) for commit_id in trimmed.outcomes],
            )

    # -- after a restart

    def load(self) -> Saved:
        """All that was written."""
        db = self._db
        with self._refusing():
            meta = dict(db.execute("SELECT name, value FROM meta"))
            regions = [
                SavedRegion(_record_from_json(record), state, unsigned(request_id))
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
                    lost.append(ServerLost(unsigned(server_id), reason))
            entries = [
                Entry(
                    region=region,
                    version=version,
                    commit_id=unsigned(commit_id),
                    blocks=blocks,
                    plan=None,
                    payload=payload,
                )
                for region, version, commit_id, blocks, payload in db.execute(
                    "SELECT region, version, commit_id, blocks, payload FROM commits "
                    "ORDER BY region, version"
                )
            ]
            acknowledged = [
                (region, unsigned(home), version)
                for region, home, version in db.execute("SELECT * FROM acknowledgements")
            ]
            outcomes = [
                (unsigned(commit_id), Outcome(dict(json.loads(versions)), at_s))
                for commit_id, at_s, versions in db.execute(
                    "SELECT commit_id, at_s, versions FROM outcomes ORDER BY at_s"
                )
            ]
            plans: list[tuple[Any, ...]] = list(
                db.execute("SELECT region, version, plan FROM plans ORDER BY region, version")
            )
            freed = [region for (region,) in db.execute("SELECT region FROM freed_inline")]
            sources = [(row[0], Source(*row[1:])) for row in db.execute("SELECT * FROM sources")]
            dropped = [row[0] for row in db.execute("SELECT token FROM dropped ORDER BY number")]
            names = [NamedVariable(*row) for row in db.execute("SELECT * FROM names")]
            rehomed = [region for (region,) in db.execute("SELECT region FROM rehomed")]
            givers = [(row[0], unsigned(row[1])) for row in db.execute("SELECT * FROM givers")]
            leaving = [unsigned(row[0]) for row in db.execute("SELECT * FROM leaving")]
            lacking = [
                (row[0], LostBlocks(*row[1:])) for row in db.execute("SELECT * FROM lacking")
            ]
            claims = list(db.execute("SELECT * FROM claims ORDER BY begin_address"))
            inside = list(db.execute("SELECT * FROM inside"))
            directories = [
                (unsigned(server_id), directory, node_id)
                for server_id, directory, node_id in db.execute(
                    "SELECT server_id, directory, node_id FROM directories ORDER BY number DESC"
                )
            ]
            opened = list(db.execute("SELECT * FROM opened"))
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
            sources=tuple(sources),
            rehomed=tuple(rehomed),
            dropped=tuple(dropped),
            lacking=tuple(lacking),
            names=tuple(names),
            givers=tuple(givers),
            leaving=tuple(leaving),
            idle=tuple(int(name[len(IDLE) :]) for name in meta if name.startswith(IDLE)),
            claims=tuple((begin, end) for begin, end in claims),
            inside=tuple((region, inner) for region, inner in inside),
            directories=tuple(directories),
            opened=tuple((region, version) for region, version in opened),
        )

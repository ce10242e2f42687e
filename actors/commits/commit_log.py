"""What the registry decides about commits: conflicts, versions, outcomes. Pure: no Ray, clock, I/O.

A commit is decided in two steps, so that the journal can come between them:

    prepare  -> the entries that it would add, or the reason against it; changes nothing
    apply    -> adds them: from now on they are the newest versions

First committer wins, block by block: a write that read version ``b`` of a variable is refused when
any version after ``b`` changed one of its blocks. An inline variable (whose payload travels in its
references) is one block; so is a variable's plan. All writes of a request pass, or none does.

What is kept is bounded:

* per region the blocks of the newest commits, at most ``max_commits``, and of all regions together
  ``budget_bytes``. Below them ``changes`` answers "anything may have changed", and a transaction
  that began there is refused. The newest commit always stays, and so does every one that some home
  has not acknowledged;
* per inline variable its newest ``max_payloads`` contents;
* of a variable in pieces, whose own region has no blocks, which versions of the pieces belong
  together: as long as its commits;
* more than that where ``retain`` says that a live collection could need it: commits and contents
  from its floor on go last, after everything else of the same budget. But at most ``max_retained``
  of one variable stay so, and ``budget_bytes`` is the bound for all of them too;
* idempotency keys (`_protocol/idempotency.py`) until their tasks are dropped. Of these the newest
  ``max_dropped`` are remembered, and what still runs of them commits nothing;
* outcomes and tombstones by number, but none that is younger than ``outcome_s`` or whose homes
  have not acknowledged.

An outcome that was asked for before the commit came is "aborted", for ever: who asked has dropped
the blocks.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pyroaring import BitMap

from clamor_ray._labels import capital, label
from clamor_ray._protocol.idempotency import key_kept_in
from clamor_ray._protocol.messages import (
    BLOCK_BYTES,
    INLINE_BASE,
    CommitRequest,
    Committed,
    Latest,
    Publication,
    Write,
    pack_row,
    unpack_row,
)
from clamor_ray._redundancy.groups import PieceGroups
from clamor_ray.actors.commits.committed import (
    CommittedVariable,
    Entry,
    Forgotten,
    Limits,
    Outcome,
    Trimmed,
)
from clamor_ray.actors.commits.conflicts import check_conflict
from clamor_ray.actors.commits.piece_table import PieceTable
from clamor_ray.actors.commits.request_validation import changed_blocks, check_request
from clamor_ray.errors import (
    CommitAbortedError,
    CommitConflict,
    FreedError,
    NoVersionError,
    ProtocolError,
    SnapshotExpired,
)


class CommitLog:
    """The commits of all variables. Not thread-safe: one caller at a time.

    Args:
        limits: How much is kept; None: the defaults.
        label: A variable for people, by its id.

    Example:
        >>> log = CommitLog()
        >>> log.open(1, (7,))
        >>> blocks = BitMap([3, 4]).serialize()
        >>> request = CommitRequest(99, (Write(1, 0, 2, blocks, 12288, 7),))
        >>> log.apply(99, log.prepare(request), now_s=0.0).versions
        {1: 1}
    """

    def __init__(self, limits: Limits | None = None, label: Callable[[int], str] = label) -> None:
        self._limits = limits or Limits()
        self.label = label
        self._variables: dict[int, CommittedVariable] = {}
        self._pieces = PieceTable()
        self._freed_inline: dict[int, None] = {}
        self._key_ids: dict[bytes, set[int]] = {}  # token -> ids of its idempotency keys
        self._dropped: dict[bytes, None] = {}  # tokens, the oldest first
        self._outcomes: dict[int, Outcome] = {}  # oldest first
        self._behind: dict[int, set[int]] = {}  # home -> regions with versions it does not know
        self._lost: set[int] = set()
        self._bytes = 0
        self._untrimmed: set[int] = set()
        self._floors: dict[int, int] = {}
        self._retained_expired = 0
        # Called with a variable that has a new version or is closed: the registry's news.
        self.when_changed: Callable[[int], object] = lambda region: None

    # -- variables

    def open(self, region: int, homes: Iterable[int], length_bytes: int | None = None) -> None:
        """The region, of this length, may be written from now on. Again: changes nothing."""
        if region not in self._variables:
            named = dict.fromkeys(homes)
            distinct = tuple(home for home in named if home not in self._lost)
            self._variables[region] = CommittedVariable(
                region,
                distinct,
                None if length_bytes is None else -(-length_bytes // BLOCK_BYTES),
                home_lost=len(distinct) < len(named),
                acknowledged=dict.fromkeys(distinct, 0),
            )

    def open_pieces(self, region: int, pieces: range, groups: PieceGroups | None = None) -> None:
        """The variable, whose pieces are open, may be written from now on.

        Args:
            region: Its id.
            pieces: Parity pieces too.
            groups: Of them; None: it has no redundancy.
        """
        self.open(region, (), 0)
        self._pieces.open(region, pieces, groups or PieceGroups(len(pieces)))

    def close(self, region: int) -> None:
        """It is freed: no commit, no new reader. What page servers ask is answered still."""
        if region >= INLINE_BASE:
            self.forget(region)
            self._freed_inline[region] = None
            while len(self._freed_inline) > self._limits.max_freed_inline:
                del self._freed_inline[next(iter(self._freed_inline))]
        elif (variable := self._variables.get(region)) is not None:
            variable.closed = True
        self.when_changed(region)

    def freed_too_many(self, n: int = 1) -> tuple[int, ...]:
        """Freed inline variables of which that is forgotten with the next n that are freed."""
        excess = len(self._freed_inline) + n - self._limits.max_freed_inline
        return tuple(itertools.islice(self._freed_inline, max(0, excess)))

    def reopen(self, region: int) -> None:
        """Undoes ``close`` of a region, where that could not be made durable."""
        if (variable := self._variables.get(region)) is not None:
            variable.closed = False

    def forget(self, region: int) -> None:
        """It is gone, with all that was known of it. Outcomes stay."""
        self._floors.pop(region, None)
        self._pieces.forget(region)
        variable = self._variables.pop(region, None)
        if variable is not None:
            self._note_key(variable.entries[-1] if variable.entries else None, gone=True)
            self._bytes -= variable.n_bytes
            self._untrimmed.discard(region)
            for home in variable.homes:
                self._behind.get(home, set()).discard(region)

    # -- idempotency keys

    def keys_of(self, tokens: Iterable[bytes]) -> tuple[int, ...]:
        """Ids of the idempotency keys of these tasks."""
        return tuple(region for token in tokens for region in sorted(self._key_ids.get(token, ())))

    def drop(self, tokens: Iterable[bytes]) -> None:
        """No attempt of these tasks commits any more, whether one has before or not."""
        tokens = tuple(tokens)
        for region in self.keys_of(tokens):
            self.forget(region)
        self._dropped.update(dict.fromkeys(tokens))
        while len(self._dropped) > self._limits.max_dropped:
            del self._dropped[next(iter(self._dropped))]

    def dropped_too_many(self, tokens: Iterable[bytes]) -> tuple[bytes, ...]:
        """Dropped tasks of which that is forgotten when these are dropped; of them, too."""
        both = {**self._dropped, **dict.fromkeys(tokens)}
        return tuple(itertools.islice(both, max(0, len(both) - self._limits.max_dropped)))

    def _check_dropped(self, write: Write) -> None:
        key = key_kept_in(write.region, write.payload)
        if key is not None and key.token in self._dropped:
            raise FreedError(
                f"The task {key.token.hex()} was cancelled while this attempt of it ran: it can "
                "commit nothing any more.",
                hint="What asked for its result has failed or ended. Nothing of this transaction "
                "was made.",
            )

    def _note_key(self, entry: Entry | None, *, gone: bool = False) -> None:
        key = key_kept_in(entry.region, entry.payload) if entry is not None else None
        if key is None:
            return
        keys = self._key_ids.setdefault(key.token, set())
        (keys.discard if gone else keys.add)(key.region)
        if not keys:
            del self._key_ids[key.token]

    def server_lost(self, server_id: int) -> None:
        """Nobody waits for its acknowledgements any more."""
        self._lost.add(server_id)
        self._behind.pop(server_id, None)
        for variable in self._variables.values():
            if server_id in variable.homes:
                variable.homes = tuple(home for home in variable.homes if home != server_id)
                variable.home_lost = True
                variable.acknowledged.pop(server_id, None)
                self._untrimmed.add(variable.region)

    def rehome(self, region: int, server_id: int) -> None:
        """The region has this home from now on, which has all versions that there are."""
        if (variable := self._variables.get(region)) is not None:
            for home in variable.homes:
                self._behind.get(home, set()).discard(region)
            variable.homes = (server_id,)
            variable.home_lost = False
            variable.acknowledged = {server_id: variable.newest}
            self._untrimmed.add(region)

    def nothing_is_left(self, region: int) -> None:
        """It is wholly lost: no home will come that could ask for what the log has of it."""
        if (variable := self._variables.get(region)) is not None:
            variable.home_lost = False
            self._untrimmed.add(region)

    # -- commits

    def prepare(self, request: CommitRequest) -> tuple[Entry, ...]:
        """What the commit would add; changes nothing.

        Raises:
            CommitConflict: Somebody else changed the same first, or the base is too old to tell.
            CommitAbortedError: Its outcome was asked for before.
            FreedError: A variable was freed, or never existed; or the task was dropped whose
                idempotency key is among the writes.
            NoVersionError: A base version that does not exist.
            ProtocolError: A request that makes no sense, or that was carried out before.
        """
        check_request(request)
        changed = [changed_blocks(write, self.label) for write in request.writes]
        if (outcome := self._outcomes.get(request.commit_id)) is not None:
            if outcome.versions:
                raise ProtocolError(f"Commit {request.commit_id:#x} was made before.")
            raise CommitAbortedError(
                f"Commit {request.commit_id:#x} came after its page server had given it up."
            )
        entries = tuple(
            self._prepare(request.commit_id, write, blocks)
            for write, blocks in zip(request.writes, changed, strict=True)
        )
        return self._with_rows(entries)

    def _with_rows(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Of variables in pieces: which versions of the pieces belong to the new one.

        Raises:
            ProtocolError: See ``PieceTable.check``.
        """
        self._pieces.check(entries, self.label)
        new = {entry.region: entry.version for entry in entries}
        return tuple(
            entry
            if not (pieces := self._pieces.pieces_of(entry.region))
            else replace(
                entry,
                payload=pack_row([new.get(p) or self.newest(p) for p in pieces]),
            )
            for entry in entries
        )

    def _prepare(self, commit_id: int, write: Write, changed: BitMap) -> Entry:
        self._check_dropped(write)
        variable = self._writable(write.region)
        if changed and variable is not None and variable.n_blocks is not None:
            last = changed.max()
            if last >= variable.n_blocks:
                raise ProtocolError(
                    f"A commit changes block {last} of {self.label(write.region)}, which has "
                    f"{variable.n_blocks}."
                )
        newest = variable.newest if variable else 0
        if not 0 <= write.base_version <= newest:
            raise NoVersionError(
                f"The transaction read version {write.base_version} of {self.label(write.region)}, "
                f"whose newest is {newest}."
            )
        if variable is not None and not self._pieces.is_parity(write.region):
            try:
                check_conflict(variable, write, changed, self.label)
            except CommitConflict as conflict:
                raise self._of_variable(conflict) from None
        return Entry(
            region=write.region,
            version=newest + 1,
            commit_id=commit_id,
            blocks=write.blocks,
            plan=write.plan,
            payload=write.payload,
            changed=changed,
        )

    def _of_variable(self, conflict: CommitConflict) -> CommitConflict:
        """Of a piece: with the id, the newest version and the blocks of its variable."""
        whole = self._pieces.whole_of(conflict.region)
        if whole is None:
            return conflict
        before = range(self._pieces.pieces_of(whole).start, conflict.region)
        conflict.first_block += sum(map(self.n_blocks, before))
        conflict.region, conflict.version = whole, self.newest(whole)
        return conflict

    def _writable(self, region: int) -> CommittedVariable | None:
        """None for an inline variable of which nobody has told us yet."""
        variable = self._variables.get(region)
        if variable is None and region >= INLINE_BASE and region not in self._freed_inline:
            return None
        if variable is None or variable.closed:
            raise FreedError(f"{capital(self.label(region))} was freed, or never existed.")
        return variable

    def apply(self, commit_id: int, entries: Iterable[Entry], now_s: float) -> Committed:
        """Adds what ``prepare`` returned, nothing having changed since. Cannot fail: all that is in
        the entries was read by ``prepare``."""
        entries = tuple(entries)
        for entry in entries:
            self._append(entry)
            self.when_changed(entry.region)
        committed = Committed(
            {entry.region: entry.version for entry in entries},
            {
                entry.region: entry.payload
                for entry in entries
                if entry.payload is not None and entry.region in self._pieces
            },
        )
        self._outcomes[commit_id] = Outcome(committed.versions, now_s)
        return committed

    def _append(self, entry: Entry) -> None:
        variable = self._variables.get(entry.region)
        if variable is None:
            variable = self._variables[entry.region] = CommittedVariable(
                entry.region, (), newest=entry.version - 1
            )
        changed = entry.changed
        if changed is None:  # from the journal, where only what could be read was written
            changed = BitMap.deserialize(entry.blocks) if entry.blocks else BitMap()
        variable.entries.append(entry)
        variable.blocks.append(changed)
        variable.newest = entry.version
        variable.n_bytes += entry.n_bytes
        self._bytes += entry.n_bytes
        self._note_key(entry)
        if entry.plan is not None:
            variable.plan_versions.append(entry.version)
            variable.plans[entry.version] = entry.plan
        for home in variable.homes:
            if variable.acknowledged[home] < entry.version:
                self._behind.setdefault(home, set()).add(entry.region)
        self._untrimmed.add(entry.region)

    def answered(self, commit_id: int) -> Committed | None:
        """The answer that this commit got before; None: none, or it was aborted."""
        outcome = self._outcomes.get(commit_id)
        if outcome is None or not outcome.versions:
            return None
        found = {
            region: self._row_of(region, version)
            for region, version in outcome.versions.items()
            if region in self._pieces
        }
        rows = {region: row for region, row in found.items() if row is not None}
        return Committed(outcome.versions, rows)

    # -- outcomes

    def outcome(self, commit_id: int) -> dict[int, int] | None:
        """The versions of a commit, {} if it was aborted; None: unknown, so ``abort`` it."""
        outcome = self._outcomes.get(commit_id)
        return None if outcome is None else outcome.versions

    def abort(self, commit_id: int, now_s: float) -> None:
        """It can never be made from now on."""
        self._outcomes.setdefault(commit_id, Outcome({}, now_s))

    # -- questions

    def open_variables(self) -> list[int]:
        """All that may be written, pieces too; of inline ones those that a commit has."""
        return [region for region, variable in self._variables.items() if not variable.closed]

    def is_freed(self, region: int) -> bool:
        """Whether an inline variable was freed; not so long ago that it is forgotten."""
        return region in self._freed_inline

    def newest(self, region: int) -> int:
        """The newest version; 0 for a variable that nobody has written, or that is not known."""
        variable = self._variables.get(region)
        return variable.newest if variable else 0

    def newest_open(self, region: int) -> int:
        """The newest version of a variable that may be written.

        Raises:
            FreedError: It was freed, or never existed.
        """
        variable = self._writable(region)
        return variable.newest if variable else 0

    def latest(self, region: int) -> Latest:
        """The newest version, its plan and its payload.

        Raises:
            FreedError: It was freed, or never existed.
        """
        variable = self._writable(region)
        return Latest(region, 0) if variable is None else self._at(variable, variable.newest)

    def at(self, region: int, version: int) -> Latest:
        """One version, its plan and its payload.

        Raises:
            FreedError: It was freed, or never existed.
            NoVersionError: There is no such version yet.
            SnapshotExpired: Its plan, or payload, is kept no longer.
        """
        variable = self._writable(region)
        newest = variable.newest if variable else 0
        if not 0 <= version <= newest:
            raise NoVersionError(
                f"There is no version {version} of {self.label(region)}; the newest is {newest}."
            )
        return Latest(region, version) if variable is None else self._at(variable, version)

    def _at(self, variable: CommittedVariable, version: int) -> Latest:
        index = bisect.bisect_right(variable.plan_versions, version) - 1
        plan = variable.plans[variable.plan_versions[index]] if index >= 0 else None
        payload = None
        expired = index < 0 and variable.plans_lost
        if self._has_content(variable.region) and version > 0:
            expired |= version <= variable.horizon
            if not expired:
                payload = variable.entries[variable.after(version) - 1].payload
        if expired:
            raise SnapshotExpired(
                f"Version {version} of {self.label(variable.region)} is kept no longer; the newest "
                f"is {variable.newest}.",
                hint="Read a newer version (ref.refresh()).",
            )
        return Latest(region=variable.region, version=version, plan=plan, payload=payload)

    def _has_content(self, region: int) -> bool:
        """Whether an entry has what the version is, and not only what it changed."""
        return region >= INLINE_BASE or region in self._pieces

    def pieces_of(self, region: int) -> range:
        """The pieces of a variable in pieces, parity pieces too; of any other none."""
        return self._pieces.pieces_of(region)

    def data_of(self, region: int) -> range:
        """The pieces that have a variable's bytes; of any other none."""
        return self._pieces.data_of(region)

    def takes_deltas(self, region: int) -> bool:
        """Whether a commit says of it what changes, and not what is written."""
        return self._pieces.takes_deltas(region)

    def row_with(self, piece: int, version: int) -> tuple[int, ...] | None:
        """The versions of all pieces at the newest version of a variable that has this version of
        one of them; None where that is forgotten, or there is none."""
        whole = self._variables.get(self._pieces.whole_of(piece) or 0)
        return None if whole is None else self._pieces.row_with(whole, piece, version)

    def n_blocks(self, region: int) -> int:
        """Of a region that is open, and has blocks.

        Raises:
            FreedError: It is gone, or never was.
        """
        return self._known(region).n_blocks or 0

    def _row_of(self, region: int, version: int) -> bytes | None:
        """What belongs to a version that a commit made; None where that is forgotten."""
        variable = self._variables.get(region)
        if variable is None or not variable.horizon < version <= variable.newest:
            return None
        return variable.entries[variable.after(version) - 1].payload

    def row(self, region: int, version: int) -> tuple[int, ...]:
        """The version of each piece, parity pieces too, at a version of a variable in pieces.

        Raises:
            FreedError, NoVersionError, SnapshotExpired: See ``at``.
        """
        payload = self.at(region, version).payload
        return unpack_row(payload, len(self.pieces_of(region)))

    def changes(self, region: int, from_version: int, to_version: int) -> BitMap | None:
        """The blocks in which two versions of a region may differ, in either order.

        Returns:
            None where the log does not reach back: anything may have changed.

        Raises:
            FreedError: It is gone, or never was.
            NoVersionError: One of the versions does not exist.
        """
        if region in self._pieces:
            return self._changes_of_pieces(region, from_version, to_version)
        variable = self._known(region)
        low, high = sorted((from_version, to_version))
        if low < 0 or high > variable.newest:
            raise NoVersionError(
                f"There is no version {high} of {self.label(region)}; the newest is "
                f"{variable.newest}."
            )
        if low == high:
            return BitMap()
        if low < variable.horizon:
            return None
        return BitMap.union(*variable.blocks[variable.after(low) : variable.after(high)])

    def _changes_of_pieces(self, region: int, from_version: int, to_version: int) -> BitMap | None:
        """Blocks are counted from the variable's first byte."""
        try:
            rows = self.row(region, from_version), self.row(region, to_version)
        except SnapshotExpired:
            return None
        changed = BitMap()
        first_block = 0
        for piece, old, new in zip(self.data_of(region), *rows, strict=False):
            found = self.changes(piece, old, new)
            if found is None:
                return None
            changed |= found.shift(first_block)
            first_block += self.n_blocks(piece)
        return changed

    def published(self, region: int, since: int) -> list[tuple[int, int]]:
        """(version, commit id) of each commit after a version, in order.

        Raises:
            FreedError: It is gone, or never was.
            SnapshotExpired: The log does not reach back so far.
        """
        variable = self._known(region)
        if since < variable.horizon:
            raise SnapshotExpired(
                f"The commits of {self.label(region)} before version {variable.horizon} are "
                "forgotten."
            )
        entries = variable.entries[variable.after(since) :]
        return [(entry.version, entry.commit_id) for entry in entries]

    def settled(self, region: int) -> int:
        """The newest version that every home of a region has acknowledged.

        Returns:
            0 while one of its homes is lost: what that had acknowledged is gone with it.

        Raises:
            FreedError: It is gone, or never was.
        """
        variable = self._known(region)
        return 0 if variable.home_lost else variable.settled

    def horizon(self, region: int) -> int:
        """The oldest version after which every commit is remembered.

        Raises:
            FreedError: It is gone, or never was.
        """
        return self._known(region).horizon

    def _known(self, region: int) -> CommittedVariable:
        variable = self._variables.get(region)
        if variable is None:
            raise FreedError(f"{capital(self.label(region))} is gone, or never existed.")
        return variable

    # -- homes

    def homes_behind(self) -> tuple[int, ...]:
        """Homes that have not acknowledged all versions."""
        return tuple(home for home, regions in self._behind.items() if regions)

    def unacknowledged(self, home: int, at_most: int = 1000) -> list[Publication]:
        """What a home has not acknowledged, each region's versions in order."""
        found: list[Publication] = []
        for region in self._behind.get(home, ()):
            variable = self._variables[region]
            start = variable.after(variable.acknowledged[home])
            for entry in variable.entries[start : start + at_most - len(found)]:
                found.append(Publication(region, entry.version, entry.commit_id))
            if len(found) >= at_most:
                break
        return found

    def acknowledge(self, home: int, region: int, version: int) -> bool:
        """The home knows all versions up to this one. Whether that is news."""
        variable = self._variables.get(region)
        if variable is None or variable.acknowledged.get(home, version) >= version:
            return False
        variable.acknowledged[home] = min(version, variable.newest)
        if variable.acknowledged[home] == variable.newest:
            self._behind.get(home, set()).discard(region)
        self._untrimmed.add(region)
        return True

    # -- bounds

    def retain(self, floors: Mapping[int, int | None]) -> None:
        """Says what live collections could need: it goes last, see the file's head.

        A floor needs the changes after it, the plan and, of an inline variable, the content at it.
        A variable that is not known yet may have one. It goes with the variable. After a restart
        they are to be said again, before ``trim`` is called.

        Args:
            floors: By variable, the oldest version that must stay; None: none must.

        Raises:
            ValueError: A version below 0. Nothing has changed.
        """
        if any(floor is not None and floor < 0 for floor in floors.values()):
            raise ValueError("versions count from 0")
        for region, floor in floors.items():
            if floor is not None:
                self._floors[region] = floor
            else:
                self._floors.pop(region, None)
            if region in self._variables:
                self._untrimmed.add(region)  # what only the old floor held is beyond the limits now

    @property
    def retained_expired(self) -> int:
        """Commits that were forgotten though a live collection could need them."""
        return self._retained_expired

    def _needed_from(self, variable: CommittedVariable) -> int:
        """The newest horizon at which all that the variable's floor needs is there."""
        floor = self._floors.get(variable.region)
        if floor is None:
            return variable.newest
        if self._has_content(variable.region):
            return max(0, floor - 1)  # the content is in the entry that made the version
        return floor

    def trim(self, now_s: float) -> Trimmed:
        """Forgets what is beyond the limits, and says what."""
        forgotten = Forgotten()
        for region in self._untrimmed:
            variable = self._variables[region]
            inline = region >= INLINE_BASE
            most = self._limits.max_payloads if inline else self._limits.max_commits
            excess = len(variable.entries) - most
            self._drop(variable, min(excess, self._n_unneeded(variable)), forgotten)
            self._drop(
                variable, len(variable.entries) - max(most, self._limits.max_retained), forgotten
            )
        self._untrimmed.clear()
        if self._bytes > self._limits.budget_bytes:
            self._shrink(forgotten, retained_too=False)
            if self._bytes > self._limits.budget_bytes:
                self._shrink(forgotten, retained_too=True)
        return Trimmed(
            tuple(forgotten.commits),
            tuple(forgotten.plans),
            self._trim_outcomes(now_s),
            tuple(forgotten.retained.items()),
        )

    def _n_unneeded(self, variable: CommittedVariable) -> int:
        return max(0, self._needed_from(variable) - variable.horizon)

    def _shrink(self, forgotten: Forgotten, *, retained_too: bool) -> None:
        # A tenth below the budget, so that this is not for every commit.
        largest = [(-variable.n_bytes, region) for region, variable in self._variables.items()]
        heapq.heapify(largest)
        while largest and self._bytes > self._limits.budget_bytes * 9 // 10:
            _, region = heapq.heappop(largest)
            variable = self._variables[region]
            n = max(1, len(variable.entries) // 8)
            if not retained_too:
                n = min(n, self._n_unneeded(variable))
            if self._drop(variable, n, forgotten):
                heapq.heappush(largest, (-variable.n_bytes, region))

    def _drop(self, variable: CommittedVariable, n: int, forgotten: Forgotten) -> int:
        n = min(n, len(variable.entries) - 1, variable.settled - variable.horizon)
        if n <= 0:
            return 0
        region = variable.region
        n_retained = n - self._n_unneeded(variable)
        for entry in variable.entries[:n]:
            variable.n_bytes -= entry.n_bytes
            self._bytes -= entry.n_bytes
            forgotten.commits.append((region, entry.version))
        del variable.entries[:n], variable.blocks[:n]
        versions = variable.plan_versions
        while len(versions) > 1 and versions[1] <= variable.horizon:
            forgotten.plans.append((region, versions[0]))
            del variable.plans[versions.pop(0)]
            variable.plans_lost = True
        if n_retained > 0:
            self._retained_expired += n_retained
            has_content = self._has_content(region)
            forgotten.retained[region] = variable.horizon + 1 if has_content else variable.horizon
        return n

    def _trim_outcomes(self, now_s: float) -> tuple[int, ...]:
        dropped: list[int] = []
        excess = len(self._outcomes) - self._limits.max_outcomes
        for commit_id, outcome in self._outcomes.items():
            if len(dropped) >= excess or now_s - outcome.at_s < self._limits.outcome_s:
                break
            if all(self._is_settled(*write) for write in outcome.versions.items()):
                dropped.append(commit_id)
        for commit_id in dropped:
            del self._outcomes[commit_id]
        return tuple(dropped)

    def _is_settled(self, region: int, version: int) -> bool:
        variable = self._variables.get(region)
        if variable is None:
            return True
        return not variable.home_lost and version <= variable.settled

    # -- after a restart

    def restore(
        self,
        entries: Iterable[Entry],
        plans: Iterable[tuple[int, int, bytes]],
        acknowledged: Iterable[tuple[int, int, int]],
        outcomes: Iterable[tuple[int, Outcome]],
        freed_inline: Iterable[int],
        dropped: Iterable[bytes] = (),
    ) -> None:
        """Takes back what the journal held, once every region was opened.

        Args:
            entries: Without their plans; each variable's in order of version.
            plans: (region, version, plan), in order of version; those of forgotten commits too.
            acknowledged: (region, server id, version).
            outcomes: By commit id, the oldest first.
            freed_inline: Ids, in the order in which they were freed.
            dropped: Tokens, in the order in which they were dropped.
        """
        for region, server_id, version in acknowledged:
            variable = self._variables.get(region)
            if variable is not None and server_id in variable.homes:
                variable.acknowledged[server_id] = version
        for entry in entries:
            variable = self._variables.get(entry.region)
            if variable is not None and not variable.entries:
                variable.newest = entry.version - 1
            if variable is not None or entry.region >= INLINE_BASE:
                self._append(entry)
        for region, version, plan in plans:
            if (variable := self._variables.get(region)) is not None:
                # Plans go when a newer one is valid at the horizon: then there may have been some.
                variable.plans_lost |= not variable.plan_versions and version <= variable.horizon
                variable.plan_versions.append(version)
                variable.plans[version] = plan
        self._outcomes.update(outcomes)
        self._freed_inline.update(dict.fromkeys(freed_inline))
        self._dropped.update(dict.fromkeys(dropped))

    def check(self) -> None:
        """Raises AssertionError when an invariant of this file does not hold."""
        assert self._bytes == sum(v.n_bytes for v in self._variables.values())
        for region, variable in self._variables.items():
            assert variable.region == region
            assert len(variable.entries) == len(variable.blocks)
            versions = [entry.version for entry in variable.entries]
            assert versions == list(range(variable.horizon + 1, variable.newest + 1))
            assert bool(versions) == (variable.newest > 0)
            assert variable.plan_versions == sorted(variable.plans)
            assert variable.settled >= variable.horizon
            for home in variable.homes:
                behind = region in self._behind.get(home, ())
                assert behind == (variable.acknowledged[home] < variable.newest)
        for regions in (*self._behind.values(), *self._key_ids.values()):
            assert regions <= self._variables.keys()
        assert all(floor >= 0 for floor in self._floors.values())
        assert self._untrimmed <= self._variables.keys()
        assert not self._key_ids.keys() & self._dropped.keys()
        assert len(self._dropped) <= self._limits.max_dropped

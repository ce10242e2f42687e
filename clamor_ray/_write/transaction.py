"""`clamor.update` and `clamor.transaction`: private work over snapshots, then one commit.

A variable is mapped copy-on-write. What the block wrote the kernel knows (the private blocks of
the mapping); only those blocks are staged at this node's page server. The registry then decides
about all variables at once. The first commit to a block wins.

A commit whose answer was lost is asked about before anything else is tried: until then it may
have happened, and its blocks must stay where they are.

In an attempt of a task that has a token (`_tasks/task_context.py`) each commit also writes an
idempotency key (`_protocol/idempotency.py`), so that all attempts together make the n-th
transaction over the same variables once. A transaction that wrote nothing commits its key alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._build.room import ensure_room, homes_give_room
from clamor_ray._counting.anchors import giving
from clamor_ray._objects.block_sets import runs
from clamor_ray._objects.inplace import check_can_change
from clamor_ray._objects.layout import BLOCK_BYTES, put_together
from clamor_ray._objects.memory import COMMIT_HINT
from clamor_ray._protocol.idempotency import IdempotencyKey, Name, key_kept_in
from clamor_ray._protocol.messages import CommitRequest, Committed
from clamor_ray._read import bad_address
from clamor_ray._read.lease import InlineImage, Lease
from clamor_ray._read.ref import GlobalRef, newest_states
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session
from clamor_ray._spans import record
from clamor_ray._tasks import task_context
from clamor_ray._write.deltas import Array
from clamor_ray._write.grow import grown
from clamor_ray._write.window import CHUNK_SHARE, Window
from clamor_ray._write.write_set import (
    ANSWER_MARGIN_S,
    Change,
    WriteSetEntry,
    rows_at,
    warn_if_rebound,
)
from clamor_ray._write.write_targets import WriteTarget, write_target_of

ASK_FIRST_BYTES: Final = 8 << 20  # from here on a conflict is asked for before blocks are copied
LEAST_COPY_RATE: Final = 50e6  # bytes per second, for deadlines of large commits
MOST_TRIES: Final = 3  # of a commit that the registry took for dead

_Status = Literal["new", "open", "committed", "aborted"]

# After these the same transaction can never succeed.
_FINAL = (
    errors.CommitConflict,
    errors.FreedError,
    errors.HomeLostError,
    errors.NoVersionError,
    errors.SnapshotExpired,
    errors.NotInitializedError,
    errors.ClosedError,
)

# ------------------------------------------------------------------ who updates what


class _Here(threading.local):
    """Open transactions of this thread, and of each coroutine that runs on it."""

    def __init__(self) -> None:
        self.of_thread: weakref.WeakSet[Transaction] = weakref.WeakSet()
        self.of_tasks: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Transaction]] = (
            weakref.WeakKeyDictionary()
        )

    def open(self) -> weakref.WeakSet[Transaction]:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here
            task = None
        if task is None:
            return self.of_thread
        return self.of_tasks.setdefault(task, weakref.WeakSet())


_here = _Here()


def refuse_nested(targets: list[WriteTarget]) -> None:
    seen: set[tuple[str, int]] = set()
    for target in targets:
        if target.key in seen:
            raise errors.NestedUpdateError(f"{target.ref!r} is in this transaction twice.")
        seen.add(target.key)
    for other in _here.open():
        clash = seen & other._keys if other._is_open_here() else None
        if clash:
            ref = next(target.ref for target in targets if target.key in clash)
            raise errors.NestedUpdateError(f"{ref!r} is being updated by this thread already.")


# ------------------------------------------------------------------ the transaction


class Transaction:
    """Private work over snapshots of variables, made visible by one commit or not at all.

    Made by `clamor.update` and `clamor.transaction`; a context manager. By hand: `begin` gives the
    objects, `commit` publishes what was written to them, `abort` drops it. A commit that fails for
    now (`OutOfMemoryError`, `ServerUnavailableError`, `WaitTimeoutError`, `JournalFullError`, ...)
    leaves the transaction open; the exception carries it as `error.transaction`, also where it
    comes out of a `with` block. Write nothing between such a failure and the next try.

    To be used by one thread at a time.

    Args:
        targets: what is changed, one entry for each variable.
        single: `begin` returns the only object, and no tuple.
        grow_to, lost: as `clamor.update`'s.

    Raises:
        ValueError: `lost` is no value of a byte.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> change = clamor.update(a)
        >>> change.begin()[0] = 1
        >>> change.commit(), change.status
        ((1,), 'committed')
    """

    def __init__(
        self,
        targets: list[WriteTarget],
        *,
        single: bool,
        grow_to: int | None = None,
        lost: int | None = None,
    ) -> None:
        if lost is not None and not 0 <= operator.index(lost) < 256:
            raise ValueError(f"lost is the value of a byte, not {lost!r}")
        self._targets = targets
        self._single = single
        self._grow_to = grow_to
        self._lost = lost
        self._keys = {target.key for target in targets}
        self._write_set: list[WriteSetEntry] = []
        self._status: _Status = "new"
        self._versions: tuple[int, ...] = ()
        self._session: Session | None = None
        self._pid = 0
        self._in_doubt: tuple[int, list[Change]] | None = None

    @property
    def status(self) -> str:
        """ "new", "open", "committed" or "aborted"."""
        return self._status

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each variable: that it began at, and after the commit that it ended at."""
        return self._versions

    @property
    def lease(self) -> Lease | None:
        """Of the private mapping of its only variable, while it is open; None: it has none."""
        (entry,) = self._write_set
        return entry.lease

    def __repr__(self) -> str:
        names = ", ".join(repr(target.ref) for target in self._targets)
        return f"Transaction({self._status}: {names})"

    # -- its beginning

    def begin(self) -> Any:
        """Opens the variables.

        Returns:
            The object; for `clamor.transaction` the tuple of objects.

        Raises:
            ClosedError: It has begun before.
            SessionMismatchError: The variables belong to several sessions.
            ValueError: An array is a private copy, and no version of a variable.
            NestedUpdateError, NotInPlaceError, FreedError, SnapshotExpired, NoSpaceError, ...: See
                `clamor.update`.

        Example:
            >>> change = clamor.update(clamor.put(np.zeros(1000)))
            >>> x = change.begin()
            >>> x[0] = 1
            >>> change.commit()
            (1,)
        """
        if self._status != "new":
            raise errors.ClosedError(
                f"{self!r} has begun before.", hint="Make a new one for each attempt."
            )
        for target in self._targets:
            target.ref._check_not_freed()
            check_can_change(target.ref._plan, repr(target.ref))
        refuse_nested(self._targets)
        for target in self._targets:
            if target.private:
                raise ValueError(
                    f"{target.private}; it is not a version of the variable. Pass the reference."
                )
        scopes = {target.ref._scope for target in self._targets}
        if len(scopes) > 1:
            raise errors.SessionMismatchError("The variables belong to several sessions.")
        session = process_sessions.current(scopes.pop())
        self._began_ns = time.time_ns()
        live = [target.ref for target in self._targets if not target.ref._frozen]
        newest = iter(newest_states(session, live))
        entries = []
        for target in self._targets:
            ref = target.ref
            begin = ref if ref._frozen else ref._with(next(newest), frozen=True)
            entries.append(self._open(session, target, begin))
        self._session, self._pid, self._write_set = session, os.getpid(), entries
        self._versions = tuple(entry.begin.version for entry in entries)
        self._status = "open"
        _here.open().add(self)
        values = tuple(entry.value for entry in entries)
        return values[0] if self._single else values

    def _open(self, session: Session, target: WriteTarget, begin: GlobalRef[Any]) -> WriteSetEntry:
        lease: Lease | None = None
        were_lost = BitMap()
        if begin._inline:
            image = InlineImage(begin, writable=True).bytes()
        else:
            lease = session.open(begin, private=True, warns=self._lost is None)
            image = lease.bytes()
            if self._lost is not None:
                were_lost = _fill_lost(session, lease, begin, self._lost)
        plan = begin._plan
        if self._grow_to is not None:
            plan = grown(begin, image, self._grow_to)
        with giving(begin._anchors):
            raw = put_together(image, plan)
        value = raw if target.open_as is None else target.open_as(raw)
        entry = WriteSetEntry(
            target=target,
            begin=begin,
            plan=plan,
            lease=lease,
            image=image,
            raw=raw,
            value=value,
            before=None,
            were_lost=were_lost,
        )
        if lease is not None and (pieces := begin._piece_versions()):
            entry.window = Window(session, lease, pieces, on_disk=begin._is_on_disk)
        entry.look()
        return entry

    # -- while it is open

    def flush(self) -> int:
        """Sends what was written so far to other nodes: the memory that it took here is free again.

        For variables that are spread (`home="spread"`); what was written to others stays here. The
        objects are read and written as before, and the commit publishes all of it. Nothing is
        visible before. No other thread may touch the objects meanwhile.

        Returns:
            How many bytes were sent; 0 where there is no other node.

        Raises:
            OutOfMemoryError, ServerUnavailableError, WaitTimeoutError, JournalFullError: Not now.
                Nothing is lost, and it stays open: call it again, or commit.
            HomeLostError: A node is gone that had some of what was sent. This one is over.
            ForkedError, ClosedError: As `commit`.

        Example:
            >>> big = clamor.zeros((4, 1 << 20), home="spread")
            >>> change = clamor.update(big)
            >>> with change as x:
            ...     for row in range(4):
            ...         x[row] = row
            ...         n_bytes = change.flush()
            >>> big.version, float(big.get()[3, 0])
            (1, 3.0)
        """
        return self._flush()

    def _flush(self, before_bytes: int | None = None) -> int:
        session = self._check_open()
        try:
            return sum(self._send(session, entry, before_bytes) for entry in self._write_set)
        except (*_FINAL, errors.CommitAbortedError):
            self._finish("aborted")
            raise
        except errors.ClamorError as error:
            if not all(entry.is_whole for entry in self._write_set):
                self._finish("aborted")
            error.transaction = self
            raise

    @staticmethod
    def _send(session: Session, entry: WriteSetEntry, before_bytes: int | None) -> int:
        if entry.window is None:
            return 0
        context = task_context.current()
        if context is not None:  # what shows another region is not in its read set
            context.reads_all(entry.begin._region, entry.begin.version)
        with session.explaining(entry.begin._region):
            return entry.window.send(before_bytes)

    def chunks(self, n_rows: int | None = None) -> Iterator[slice]:
        """The rows of its only array in parts. Between two of them it sends away what is done where
        more than half of a budget (`CLAMOR_WRITE_BYTES`) was written, and all where more than that.

        Args:
            n_rows: of each part; None: as many as a part of the budget holds.

        Yields:
            Slices of the array's first axis, in order.

        Raises:
            TypeError: It changes several variables, or one that is no array with rows.
            ValueError: Fewer than one row.
            OutOfMemoryError, HomeLostError, ClosedError, ...: As `flush`.

        Example:
            >>> big = clamor.zeros((1 << 20, 4), home="spread")
            >>> change = clamor.update(big)
            >>> with change as x:
            ...     for rows in change.chunks():
            ...         x[rows] = 7
            >>> float(big.get()[-1, -1])
            7.0
        """
        self._check_open()
        (entry, *others) = self._write_set
        array = entry.value
        if others or not isinstance(array, np.ndarray) or not array.ndim:
            raise TypeError("chunks() is for a transaction over one variable that is an array")
        window = entry.window
        if n_rows is None:
            row_bytes = max(1, array.nbytes // max(1, len(array)))
            part_bytes = array.nbytes if window is None else window.budget_bytes // CHUNK_SHARE
            n_rows = max(1, part_bytes // row_bytes)
        if n_rows < 1:
            raise ValueError(f"a part has at least one row, not {n_rows}")
        return self._chunks(array, n_rows, entry)

    def _chunks(self, array: Array, n_rows: int, entry: WriteSetEntry) -> Iterator[slice]:
        length, window = len(array), entry.window
        for first in range(0, length, n_rows):
            end = min(first + n_rows, length)
            yield slice(first, end)
            if window is None or window.dirty_bytes() <= window.budget_bytes // 2:
                continue
            if array.flags.c_contiguous and entry.lease is not None:
                begin_bytes = array.__array_interface__["data"][0] - entry.lease.mapping.address
                self._flush(begin_bytes + end * array.strides[0])
            if window.dirty_bytes() > window.budget_bytes:
                self._flush()

    # -- its end

    def _is_open_here(self) -> bool:
        return self._status == "open" and self._pid == os.getpid()

    def _check_open(self) -> Session:
        session = self._session
        if session is not None and os.getpid() != self._pid:
            raise errors.ForkedError(
                "This process is a fork of the one that began the transaction; only that one can "
                "end it.",
                hint="Begin the transaction in the process that commits it.",
            )
        if self._status != "open" or session is None:
            begin = "Call its begin() first" if self._status == "new" else "Begin a new one"
            raise errors.ClosedError(f"{self!r} is not open.", hint=f"{begin}, or use `with`.")
        return session

    def commit(self) -> tuple[int, ...]:
        """Publishes what was written: all of it becomes one version of each variable, or nothing.

        Returns:
            The version of each variable; one that was not written keeps that it began at.

        Raises:
            CommitConflict: Another transaction changed the same blocks first. This one is over.
            NotInPlaceError: An object was changed outside of its arrays. This one is over.
            FreedError: A variable was freed meanwhile. This one is over.
            HomeLostError: The node that held one of them is gone. This one is over.
            ForkedError: This process is a fork of the one that began it.
            ClosedError: It is not open.
            OutOfMemoryError, ServerUnavailableError, WaitTimeoutError, JournalFullError, ...: For
                now; it stays open for another try, or `abort`.

        Example:
            >>> a, b = clamor.put(np.zeros(1000)), clamor.put(np.zeros(1000))
            >>> change = clamor.transaction(a, b)
            >>> x, y = change.begin()
            >>> x[0] = 1
            >>> change.commit()  # b was not written
            (1, 0)
        """
        session = self._check_open()
        try:
            with record.span(session.scope, "commit", region=self._targets[0].ref._region):
                if not self._settle(session):
                    self._check_in_place()
                    self._publish(session)
        except errors.ForkedError:
            raise
        except (*_FINAL, errors.NotInPlaceError):
            self._finish("aborted")
            raise
        except errors.ClamorError as error:
            # Its block is over: who goes on to begin another one nests nothing.
            _here.open().discard(self)
            error.transaction = self
            raise
        return self._versions

    def abort(self) -> None:
        """Drops what was written; nothing of it was ever visible. Calling it again changes
        nothing.

        Warns:
            ClamorWarning: The answer of an earlier `commit` was lost, and it had been made.

        Example:
            >>> a = clamor.put(np.zeros(1000))
            >>> change = clamor.update(a)
            >>> change.begin()[0] = 1
            >>> change.abort()
            >>> a.version, change.status
            (0, 'aborted')
        """
        if self._status != "open":
            if self._status == "new":
                self._status = "aborted"
            return
        session = self._session
        if session is not None and os.getpid() == self._pid and self._in_doubt is not None:
            # Only with the registry's word: the blocks may be those of a version by now. Where it
            # cannot be had, the page server asks for it in its own time.
            with contextlib.suppress(errors.ClamorError):
                if self._settle(session):
                    warnings.warn(
                        f"{self!r} could not be aborted: its commit had been made before.",
                        errors.ClamorWarning,
                        stacklevel=2,
                    )
                    return
        self._finish("aborted")

    def _check_in_place(self) -> None:
        for entry in self._write_set:
            entry.check_in_place()

    def _publish(self, session: Session) -> None:
        changes = []
        for entry in self._write_set:
            runs = entry.dirty(session)
            if runs is not None:
                changes.append(Change.of(session, entry, runs))
            else:
                warn_if_rebound(entry)
        context = task_context.current()
        if context is None:
            self._publish_as(session, changes, None)
            return
        variables = [target.ref._region for target in self._targets]
        with context.one_commit(session.rpc, variables) as name:
            try:
                self._publish_as(session, changes, name)
            except BaseException:
                if self._in_doubt is not None:
                    context.doubts(self._in_doubt[0], variables)
                raise

    def _publish_as(self, session: Session, changes: list[Change], name: Name | None) -> None:
        """Args: name: of the transaction, where it is to be made once."""
        if not changes and name is None:
            self._committed(session, 0, Committed({}), changes)
            return
        writes = tuple(w for change in changes for w in change.writes(session.server_id))
        total_bytes = sum(write.layer_bytes for write in writes)
        timeout_s = session.config.control_timeout_s + total_bytes / LEAST_COPY_RATE
        for attempt in range(MOST_TRIES):
            # Each with an id of its own: an id that was taken for dead can never commit.
            commit_id = secrets.randbits(64) or 1
            key = () if name is None else (IdempotencyKey(name, commit_id).write(),)
            request = CommitRequest(commit_id, (*key, *writes), timeout_s)
            try:
                if total_bytes > ASK_FIRST_BYTES:
                    session.rpc.may_commit(request)
                began_s = time.monotonic()
                staged_at = self._stage(session, commit_id, changes, timeout_s)
                kept_by = session.kept_layers.ask(commit_id, _kept_together(staged_at, changes))
                staged = tuple(
                    replace(write, staged_at=staged_at.get(write.region, 0), kept_by=kept_by)
                    for write in writes
                )
                request = replace(request, writes=(*key, *staged))
                made = self._ask(session, request, changes, began_s)
            except errors.CommitAbortedError:
                self._drop(session, commit_id, changes)
                if attempt == MOST_TRIES - 1:
                    raise
            except errors.CommitConflict as conflict:
                if name is None or conflict.region != name.key_region:
                    raise
                self._was_made(session, conflict.region)
                return
            else:
                self._committed(session, commit_id, made, changes)
                return

    def _was_made(self, session: Session, key_region: int) -> None:
        """Another attempt of this task has committed it: nothing of this one counts, and the
        references move to where that one's moved, as far as the registry still knows."""
        versions: dict[int, int] = {}
        with contextlib.suppress(errors.ClamorError):
            (answer,) = session.rpc.latest([key_region])
            key = key_kept_in(key_region, answer.payload)
            if key is not None:
                versions = dict(session.rpc.outcome(key.commit_id))
        ended = []
        for entry in self._write_set:
            begin, state = entry.begin, entry.begin._state
            if (version := versions.get(begin._region, 0)) > begin.version:
                with contextlib.suppress(errors.ClamorError):
                    state = begin._state_of(session.rpc.at(begin._region, version))
            entry.target.ref._move(state)
            ended.append(state.version)
        self._versions = tuple(ended)
        self._finish("committed")

    def _stage(
        self,
        session: Session,
        commit_id: int,
        changes: list[Change],
        timeout_s: float,
    ) -> dict[int, int]:
        """Returns: which page server has each region's layer."""
        staged_at: dict[int, int] = {}
        try:
            needed_bytes = sum(change.room_bytes for change in changes)
            gives = homes_give_room(session.rpc, session.node_id, needed_bytes)
            ensure_room(needed_bytes, "The commit", gives, COMMIT_HINT)
            for change in changes:
                staged_at |= change.stage(session, commit_id, timeout_s)
            return staged_at
        except BaseException:
            self._drop(session, commit_id, changes)
            raise

    def _ask(
        self, session: Session, request: CommitRequest, changes: list[Change], began_s: float
    ) -> Committed:
        """The registry's word. Where it does not come the transaction is in doubt.

        Args: began_s: when staging began, by the monotonic clock.
        """
        deadline = time.monotonic() + session.config.reattach_s
        pause_s = 0.05
        timeout_s = request.timeout_s + ANSWER_MARGIN_S
        self._in_doubt = (request.commit_id, changes)
        while True:
            try:
                request = replace(request, staged_ago_s=time.monotonic() - began_s)
                answer = session.rpc.commit(request, timeout_s=timeout_s)
            except errors.ServerUnavailableError:
                # The registry, or a home, is being restarted. The same id gets the same answer.
                if time.monotonic() > deadline:
                    raise
            except (errors.WaitTimeoutError, errors.InternalError):
                raise  # whatever happened there may have happened after the journal was written
            except errors.ClamorError:
                self._in_doubt = None  # it said no
                self._drop(session, request.commit_id, changes)
                raise
            else:
                self._in_doubt = None
                return answer
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def _settle(self, session: Session) -> bool:
        """Finds out what became of a commit whose answer was lost: whether it was made."""
        if self._in_doubt is None:
            return False
        commit_id, changes = self._in_doubt
        versions = dict(_outcome(session, commit_id, changes))
        rows = rows_at(session, [change.entry.begin for change in changes], versions)
        self._in_doubt = None
        if versions:
            self._committed(session, commit_id, Committed(versions, rows), changes)
            return True
        self._drop(session, commit_id, changes)  # marked by the question: it never commits
        return False

    def _drop(self, session: Session, commit_id: int, changes: list[Change]) -> None:
        session.kept_layers.drop(commit_id)
        for change in changes:
            change.resolve(session.client, commit_id, {})
        if any(change.in_turn for change in changes):
            # Homes have layers of it, and nobody else tells them soon.
            with contextlib.suppress(errors.ClamorError):
                _outcome(session, commit_id, changes)

    def _committed(
        self, session: Session, commit_id: int, made: Committed, changes: list[Change]
    ) -> None:
        session.kept_layers.forget(commit_id)
        for change in changes:
            change.resolve(session.client, commit_id, made.versions)
        ended = []
        for entry in self._write_set:
            version = made.versions.get(entry.begin._region, entry.begin.version)
            entry.target.ref._move(entry.state_at(version, made.rows))
            ended.append(version)
        self._versions = tuple(ended)
        self._finish("committed")

    def _finish(self, status: _Status) -> None:
        self._status = status
        self._in_doubt = None
        ref = self._targets[0].ref
        record.here.note(
            *(ref._scope, "transaction", self._began_ns), region=ref._region, status=status
        )
        entries, self._write_set = self._write_set, []
        for entry in entries:
            if entry.window is not None:
                entry.window.end()
            if type(entry.value) is np.ndarray:
                # Writes from here on would go nowhere; this catches the plainest of them.
                entry.value.flags.writeable = False
            if entry.plan.fixed and entry.lease is not None and self._session is not None:
                self._session.gives_way(entry.lease)
        _here.open().discard(self)

    # -- as a context manager

    def __enter__(self) -> Any:
        return self.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            if error is not None:
                bad_address.explain(error)
            self.abort()
        elif self._status == "open":
            self.commit()


def _kept_together(staged_at: dict[int, int], changes: list[Change]) -> list[int]:
    """The regions of a commit, where no layer of it has gone to its home already."""
    return [] if any(change.in_turn for change in changes) else list(staged_at)


def _outcome(session: Session, commit_id: int, changes: list[Change]) -> dict[int, int]:
    """The registry's word, after which the commit is not made any more if it was not yet."""
    if any(change.in_turn for change in changes):
        return session.rpc.outcome(commit_id, True)
    return session.rpc.outcome(commit_id)


def _fill_lost(session: Session, lease: Lease, begin: GlobalRef[Any], value: int) -> BitMap:
    """Blocks that are lost begin with this value in each byte, and are written by the commit.

    Returns:
        Which.
    """
    found = session.rpc.lost_blocks(begin._region)
    if found is None:
        return BitMap()
    were_lost = BitMap.deserialize(found.blocks)
    lost = runs(were_lost)
    session.client.blank(lease.mapping.id, np.array(lost, np.uint64))
    image = lease.bytes()
    for first, n_blocks in lost if value else ():
        image[first * BLOCK_BYTES : (first + n_blocks) * BLOCK_BYTES] = value
    return were_lost


# ------------------------------------------------------------------ the surface


def update(variable: Any, *, grow_to: int | None = None, lost: int | None = None) -> Transaction:
    """Changes a global variable in place: a transaction over one variable.

        with clamor.update(ref) as x:
            x[ids] += delta

    The block gets the object over a private copy-on-write mapping, with writable arrays. It
    begins at the newest version, or, for a snapshot, at that version. At the end of the block the
    4 KiB blocks that were written become the next version, at once and everywhere, and `ref` moves
    to it; a snapshot does not move. Where the block raises, nothing is published. Where it wrote
    nothing there is no new version.

    Only the contents of arrays can change. After the block its objects are for looking at best:
    they stay as they were at its end, what is written to them goes nowhere, and those that hold
    pointers are unmapped when the variable is opened next. `ref.get()` gives the new version.

    Args:
        variable: a `GlobalRef`, a `clamor.HashMap`, or an object that `GlobalRef.get` or a
            `clamor.remote` argument gave.
        grow_to: for an array with room to grow (`clamor.zeros(..., capacity=n)`): the new length
            of its first axis; what is added is zeros.
        lost: where blocks of the variable are lost (`HomeLostError`): they begin with this value
            in each byte, 0 to 255, and the commit writes them, so that they are whole from then
            on. Without it a touch of a lost block ends the process. Where nothing is lost it
            changes nothing.

    Returns:
        A context manager, whose block gets the object; by hand: see `Transaction`.

    Raises:
        CommitConflict: Another transaction changed the same blocks first; nothing is visible.
        NotInPlaceError: The object has no arrays, or it was changed outside of them: a list grew,
            an array was replaced.
        NestedUpdateError: This thread is updating the variable already.
        FreedError: The variable was freed.
        SnapshotExpired: The version of a snapshot is kept no longer.
        NoSpaceError: `grow_to` needs more than the array's whole blocks of 4 KiB.
        TypeError, ValueError: It is no (whole) global variable.
        OutOfMemoryError, ServerUnavailableError, JournalFullError, WaitTimeoutError: For now:
            `error.transaction.commit()` tries again.

    Warns:
        ClamorWarning: The block left the array as it was, and put another in its place.
        LostBlocksWarning: Blocks of the variable are lost, and `lost` was not given.

    Works in drivers, tasks, actors and threads; two threads that update one variable compete.

    Example:
        >>> ref = clamor.put(np.zeros(1000))
        >>> with clamor.update(ref) as x:
        ...     x[17] = 4
        >>> ref.version, float(ref.get()[17])
        (1, 4.0)
    """
    return Transaction([write_target_of(variable)], single=True, grow_to=grow_to, lost=lost)


def transaction(*variables: Any) -> Transaction:
    """Changes several global variables by one commit: every reader sees all of it, or nothing.

    As `clamor.update`, with a tuple of objects.

    Args:
        variables: as `update`'s; each variable once.

    Returns:
        A context manager, whose block gets the tuple of objects.

    Raises:
        ValueError: No variables.
        NestedUpdateError: One of them twice.
        CommitConflict, NotInPlaceError, FreedError, ...: As `clamor.update`.

    Example:
        >>> a, b = clamor.put(np.ones(1000)), clamor.put(np.ones(1000))
        >>> with clamor.transaction(a, b) as (x, y):
        ...     x[0] -= 1
        ...     y[0] += 1
        >>> float(a.get()[0]), float(b.get()[0])
        (0.0, 2.0)
    """
    if not variables:
        raise ValueError("a transaction is over at least one variable")
    return Transaction([write_target_of(variable) for variable in variables], single=False)

"""The registry's part that deals with lineage: carries out what ``Lineage`` decides.

* **The journal** is written by one task at a time, in a thread, all that has changed in one
  transaction. Who noted something is answered when it is written: what was not answered when the
  registry is killed Ray sends again, and so nothing is lost. At the end of the session there is
  nothing left to write to, and notes are answered at once: else Ray would send them again.
* **Homes** are told the floors of the regions that they hold. One message at a time to each home:
  a second one could overtake the first. A message whose fate is unknown is waited for until the
  home answers or is lost; only who waits for the answer here has a deadline. A home that
  (re)starts is told everything again, and so is every home after the registry's own restart.

Thread safety: everything belongs to the registry's loop, but for ``LineageJournal.write``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clamor_ray import errors
from clamor_ray._labels import capital, label
from clamor_ray._protocol.attempt_record import PLAIN_RUN, AttemptRecord
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._protocol.rpc import unpack
from clamor_ray.actors.lineage.lineage import Lineage, LineageCounters
from clamor_ray.actors.lineage.lineage_journal import LineageJournal
from clamor_ray.actors.process.background import BackgroundTasks

logger = logging.getLogger("clamor_ray.registry")

TICK_S = 0.05  # between two batches
AGAIN_S = 0.2
AGAIN_MOST_S = 10.0
LOOK_S = 3.0  # a home that is silent for so long is looked after
TELL_SHARE = 0.8  # of the caller's time; the rest is for the answer


class LineageHomes(Protocol):
    """The page servers, by id."""

    def of(self, region: int) -> tuple[int, ...]:
        """The distinct homes of a region; none for one that is freed, unknown or inline."""

    def why_lost(self, server_id: int) -> str | None:
        """The reason, for one that will not come back."""

    async def retain(self, home: int, floors: dict[int, int | None]) -> None:
        """Tells a home the oldest version of each region that must stay readable there."""

    async def examine(self, home: int) -> None:
        """Finds out whether a home that does not answer is lost."""


@dataclass
class _Home:
    """What a home has yet to be told.

    Args:
        untold: Regions whose floor it does not know.
        sent: Those of the message under way.
        marked: Number of the last change that concerns it.
        known: Of the last one that it has acknowledged.
        telling: Somebody sees to it.
    """

    untold: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    marked: int = 0
    known: int = 0
    telling: bool = False


class PieceLookup(Protocol):
    """What of ``CommitLog`` is asked of variables in pieces."""

    def pieces_of(self, region: int) -> range:
        """The pieces; of any other variable none."""

    def row(self, region: int, version: int) -> tuple[int, ...]:
        """The version of each piece at a version of the variable."""


class LineageService:
    """See the file's head.

    Args:
        directory: The journal's.
        retain: Is told floors, too: the registry's own log of commits.
        homes: Who is told.
        note_reads: Gets what an attempt touched, for others like it: (digest, sets).
        timeout_s: How long who opens a collection waits.
        lineage: What decides.
        label: A variable for people, by its id.
    """

    def __init__(
        self,
        directory: Path,
        retain: Callable[[dict[int, int | None]], None],
        homes: LineageHomes,
        note_reads: Callable[[bytes, Mapping[int, bytes]], None],
        timeout_s: float,
        lineage: Lineage | None = None,
        label: Callable[[int], str] = label,
        rows: PieceLookup | None = None,
    ) -> None:
        self.lineage = Lineage() if lineage is None else lineage
        self._journal = LineageJournal(directory)
        self._retain = retain
        self._homes = homes
        self._note_reads = note_reads
        self._timeout_s = timeout_s
        self._label = label
        self._rows = rows
        self._waiting: list[asyncio.Future[None]] = []  # for the next batch
        self._hurry = asyncio.Event()
        self._writing = False
        self._stopped = False
        self._told: dict[int, _Home] = {}
        self._mark = 0
        self._news = asyncio.Event()
        self._background = BackgroundTasks(logger)

    def take_back(self) -> None:
        """What the journal holds, once the log and the regions are back; tells everyone."""
        self.lineage.restore(self._journal.load())
        floors = self.lineage.floors()
        self._retain(floors)
        self._tell(floors)
        self._save()

    # -- collections

    async def open(self, packed: bytes) -> None:
        """A collection is open: these snapshots stay readable until it is closed. Where it was open
        before, what it had counts no more.

        Args:
            packed: ``pack(collection id, description, pins)``, or ``pack(collection id,
                description, pins, inherited)``; both are ``[(region, version)]``. Those that it
                inherits, because kept results were made of them, may be freed: they are left out
                then.

        Raises:
            FreedError: One of the regions of ``pins`` was freed; nothing was opened.
            WaitTimeoutError: A home, or the disk, has not answered in time. It is open, and asked
                until it does.
            JournalFullError: It is open, and would not be after a restart of the registry.
        """
        collection, description, pins, *more = unpack(packed)
        inherited = more[0] if more else ()
        deadline = self._deadline()
        for _, version in (*pins, *inherited):
            if version < 0:
                raise ValueError(f"versions count from 0: {version}")
        for region, _ in pins:
            if not self._is_there(region):
                raise errors.FreedError(
                    f"{capital(self._label(region))} was freed, or never existed."
                )
        left = [(region, version) for region, version in inherited if self._is_there(region)]
        named = [(region, version) for region, version in (*pins, *left)]
        wanted = list(dict.fromkeys([*named, *self._pieces_of(named)]))
        moved = self.lineage.open(collection, description, wanted)
        self._move(moved)
        await self._saved(deadline)
        await self._until_told((region for region, _ in wanted), deadline)

    def _pieces_of(self, pins: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What has the bytes of variables in pieces, and at which versions. None of a version that
        is kept no longer: who reads it learns that."""
        found: list[tuple[int, int]] = []
        for region, version in pins:
            pieces = self._rows.pieces_of(region) if self._rows is not None else ()
            if self._rows is not None and pieces:
                with contextlib.suppress(errors.SnapshotExpired, errors.FreedError):
                    found += zip(pieces, self._rows.row(region, version), strict=True)
        return found

    def _is_there(self, region: int) -> bool:
        if region >= INLINE_BASE or self._homes.of(region):
            return True
        pieces = self._rows.pieces_of(region) if self._rows is not None else ()
        return any(map(self._homes.of, pieces))

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + TELL_SHARE * self._timeout_s

    async def close(self, collections: Iterable[int]) -> None:
        """They are gone; what only they needed may go. Idempotent; nobody need wait for the
        answer."""
        if self._stopped:
            return
        moved = self.lineage.close(collections)
        self._move(moved)
        with contextlib.suppress(errors.ClosedError):  # the session ends, and all of it with that
            await self._saved(self._deadline())

    def _move(self, regions: set[int]) -> None:
        self._retain({region: self.lineage.floor(region) for region in regions})
        self._tell(regions)

    def region_freed(self, region: int) -> None:
        """Nothing of it stays."""
        if self.lineage.floor(region) is not None:
            self._retain({region: None})
        self.lineage.forget_region(region)
        self._save()

    # -- attempts

    async def note(self, packed: bytes) -> None:
        """``AttemptRecord.packed()``: an attempt is over. Nobody need wait for the answer: it comes
        when the record is in the journal, and until then Ray sends it again if the registry dies.
        When the session ends it comes at once.
        """
        if self._stopped:
            return
        record = AttemptRecord.of(packed)
        self.lineage.note(record)
        if record.predictor_digest is not None and (sets := record.sets):
            self._note_reads(record.predictor_digest, sets)
        with contextlib.suppress(errors.ClosedError):
            await self._saved(self._deadline(), hurry=False)

    def note_plain(self, digest: bytes, sets: Mapping[int, bytes], who: tuple[Any, ...]) -> None:
        """A task of no collection: ``who`` is (function, node id, {region: version}) and maybe
        (pid, start_ns, end_ns)."""
        function, node_id, versions, *times = who
        pid, start_ns, end_ns = times or (0, 0, 0)
        reads = tuple((region, versions.get(region, 0), sets[region]) for region in sets)
        self.lineage.note(
            AttemptRecord(
                token=digest,
                run_id=PLAIN_RUN,
                stage="",
                partition=-1,
                attempt=0,
                function=function,
                snapshots=tuple(versions.items()),
                reads=reads,
                node_id=node_id,
                pid=pid,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )
        self._save()

    async def check_output(self, packed: bytes) -> bytes | None:
        """Notes what a task's first attempt made: ``pack(token, digest)``.

        Returns:
            The digest of the first attempt's output; None where this is the first.
        """
        token, digest = unpack(packed)
        known = self.lineage.check_output(token, digest)
        if known is None:
            await self._saved(self._deadline())
        return known

    # -- the journal

    def _save(self) -> None:
        if not self._writing:
            self._writing = True
            self._background.spawn(self._write())

    async def _saved(self, deadline: float, hurry: bool = True) -> None:
        """Returns when all that has changed so far is written.

        Raises:
            JournalFullError, InternalError: It is not; it is tried again.
            WaitTimeoutError: Nobody can tell yet; it goes on.
            ClosedError: The session has ended.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        if hurry:
            self._hurry.set()
        self._save()
        try:
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait_for(written, max(0.0, left_s))
        except asyncio.TimeoutError:
            raise errors.WaitTimeoutError(
                "The registry has not written its lineage in time.",
                hint="It goes on trying: is the disk of the driver's node busy?",
            ) from None

    async def _write(self) -> None:
        """Batches, until there is nothing more to write."""
        pause_s = TICK_S
        try:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause_s)
                self._hurry.clear()
                changes = self.lineage.take_changes()
                waiting, self._waiting = self._waiting, []
                failure: Exception | None = None
                if changes:
                    try:
                        await asyncio.to_thread(self._journal.write, changes)
                        pause_s = TICK_S
                    except asyncio.CancelledError:
                        self._waiting[:0] = waiting  # `stop` answers them
                        raise
                    except Exception as error:  # any: who waits must learn of it
                        self.lineage.put_back(changes)
                        failure = _failure_of(error)
                        pause_s = min(max(2 * pause_s, AGAIN_S), AGAIN_MOST_S)
                for written in waiting:
                    if written.done():
                        continue
                    if failure is None:
                        written.set_result(None)
                    else:
                        written.set_exception(failure)
                if not changes and not self._waiting:
                    return
                if isinstance(failure, errors.ClosedError):
                    return
        finally:
            self._writing = False

    # -- homes

    def floors_at(self, server_id: int) -> dict[int, int]:
        """The oldest version that must stay of each region that is at home there."""
        return {
            region: floor
            for region, floor in self.lineage.floors().items()
            if floor is not None and server_id in self._homes.of(region)
        }

    def server_here(self, server_id: int) -> None:
        """A page server has (re)started: it is told all that is its."""
        self._tell(self.lineage.floors(), only=server_id)

    def _tell(self, regions: Iterable[int], only: int | None = None) -> None:
        """Sees to it that the homes of these regions, or one of them, learn their floors soon."""
        for region in regions:
            self._mark += 1
            for server_id in self._homes.of(region):
                if only not in (None, server_id):
                    continue
                home = self._told.setdefault(server_id, _Home())
                home.untold.add(region)
                home.marked = self._mark
                if not home.telling:
                    home.telling = True
                    self._background.spawn(self._tell_home(server_id, home))
            self._maybe_released(region)

    def _maybe_released(self, region: int) -> None:
        if self.lineage.floor(region) is None and not any(
            region in home.untold or region in home.sent for home in self._told.values()
        ):
            self.lineage.released(region)
            self._save()

    async def _until_told(self, regions: Iterable[int], deadline: float) -> None:
        """Returns when every home of these regions knows their floors, as of now.

        Raises:
            WaitTimeoutError: Some home does not.
        """
        waits = {
            server_id: home.marked
            for server_id in {home for region in regions for home in self._homes.of(region)}
            if (home := self._told.get(server_id)) is not None
        }
        while late := [
            server_id
            for server_id, mark in waits.items()
            if (home := self._told.get(server_id)) is not None and home.known < mark
        ]:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except asyncio.TimeoutError:
                raise errors.WaitTimeoutError(
                    f"{len(late)} page servers (one is {late[0]:#x}) have not answered that they "
                    "keep the versions that a collection reads.",
                    hint="They are asked until they answer: run it again.",
                ) from None

    async def _tell_home(self, server_id: int, home: _Home) -> None:
        """Until it knows everything or is lost; one message at a time."""
        pause_s = AGAIN_S
        try:
            while home.untold and self._homes.why_lost(server_id) is None:
                mark = home.marked
                home.sent, home.untold = home.untold, set()
                floors = {region: self.lineage.floor(region) for region in home.sent}
                try:
                    await self._retain_watched(server_id, floors)
                except errors.HomeLostError:
                    return
                except Exception as failure:  # any: it is told again until it is lost
                    logger.warning("home %#x cannot be told what to keep: %r", server_id, failure)
                    home.untold |= home.sent
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, AGAIN_MOST_S)
                    continue
                pause_s = AGAIN_S
                sent, home.sent = home.sent, set()
                home.known = mark
                for region in sent:
                    self._maybe_released(region)
                self._tell_news()
        finally:
            home.telling = False
            if self._homes.why_lost(server_id) is not None:
                self._told.pop(server_id, None)
                for region in home.untold | home.sent:
                    self._maybe_released(region)
            self._tell_news()

    def _tell_news(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _retain_watched(self, server_id: int, floors: dict[int, int | None]) -> None:
        """Waits for the answer however long it takes, and looks after the home meanwhile: Ray goes
        on trying to reach one whose node is gone.

        Raises:
            HomeLostError: It is lost.
            Exception: The message was not carried out, and is not under way any more.
        """
        call = asyncio.ensure_future(self._homes.retain(server_id, floors))
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_S))[0]:
                await self._homes.examine(server_id)
                if (reason := self._homes.why_lost(server_id)) is not None:
                    raise errors.HomeLostError(
                        f"The home {server_id:#x} of {', '.join(map(self._label, floors))} is "
                        f"lost: {reason}."
                    )
            call.result()
        finally:
            call.cancel()

    # -- the rest

    def reads_of(self, region: int) -> list[bytes]:
        """Packed ``AttemptRecord`` of everyone who read a region, the oldest first."""
        return [record.packed() for record in self.lineage.reads_of(region)]

    def attempts_of(self, run_id: int) -> list[bytes]:
        """Packed ``AttemptRecord`` of all that is kept of a run, in the order in which it came."""
        return [record.packed() for record in self.lineage.attempts_of(run_id)]

    def counters(self) -> LineageCounters:
        """What is kept."""
        return self.lineage.counters()

    async def stop(self) -> None:
        """Ends what runs in the background and closes the journal. Idempotent."""
        self._stopped = True
        await self._background.end()
        self._journal.close()
        for written in self._waiting:
            if not written.done():
                written.set_exception(errors.ClosedError("The session was shut down."))
        self._waiting.clear()


def _failure_of(error: Exception) -> errors.ClamorError:
    """What those are told who wait for a write."""
    if isinstance(error, errors.ClamorError):
        logger.warning("%s", error)
        return error
    logger.error("the lineage cannot be written", exc_info=error)
    return errors.InternalError(f"The registry cannot write its lineage: {error!r}")

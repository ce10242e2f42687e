"""Regions: made, sealed, looked up and freed. What the core decides is written before it counts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from ray.exceptions import RayError

from clamor_ray import errors
from clamor_ray._files.spec import FileSpec
from clamor_ray._objects.layout import Plan
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    Counted,
    FreeAnswer,
    LookupAnswer,
    Pinned,
    RegionRecord,
    ServerLost,
)
from clamor_ray._protocol.ray_state import within
from clamor_ray._protocol.refusals import IllegalTransition, NoAddresses, RegistryError
from clamor_ray._protocol.source import FILE, SHARED, Source
from clamor_ray._redundancy.groups import PieceLayout, groups_of, lengths_of
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes import shared_objects
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.rebuilds import REHOME_S, Rebuilds
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import CALL_S, Handles
from clamor_ray.actors.registry.region_ends import RegionEnds
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from clamor_ray.actors.registry.servers import PageServers
from clamor_ray.actors.registry.spare_regions import SpareRegions
from clamor_ray.actors.window.address_claims import AddressClaims, Claim, Range

logger = logging.getLogger("clamor_ray.registry")

FREE_S = 5.0
AT_ONCE_BYTES: Final = 16 << 20  # of more, giving back the memory takes milliseconds
RETIRE_MOST: Final = 64  # other servers that a page server tells of a free (PC__RETIRE_MOST)
PIN_S: Final = 300.0
GIVEN_UP_MOST: Final = 1000  # requests that are remembered: longer than a page server is at one
FREED_FILES_MOST: Final = 1000
CREATING_S: Final = 600.0  # a put that takes longer is taken for dead
KEEP_S: Final = 500.0  # below it: the time begins anew with the seal


class AddressRoom:
    """Takes parts of the cluster's window of addresses as regions need them.

    Args:
        core: Knows which addresses and ids are ours.
        claims: The cluster's log of who has which.
        taken: Is told of all that the session has, before it is used.
        first_id: The first id of a region, by the session's first claim.
    """

    def __init__(
        self,
        core: RegistryCore,
        claims: AddressClaims,
        taken: Callable[[list[Range]], object] = lambda ranges: None,
        first_id: Callable[[Claim], int] = lambda claim: claim.region_ids + 1,
    ) -> None:
        self._core = core
        self._claims = claims
        self._taken = taken
        self._first_id = first_id
        self._claiming = asyncio.Lock()
        self._n_claims = 0  # that the core knows

    async def make(self, length_bytes: int) -> None:
        """Until there are addresses for a region: takes more of the cluster's window."""
        while not self._core.addresses.has_room(length_bytes):
            async with self._claiming:
                if self._core.addresses.has_room(length_bytes):
                    return
                try:
                    claims = await asyncio.wait_for(
                        asyncio.to_thread(self._claims.claim, length_bytes, self._n_claims), CALL_S
                    )
                except NoAddresses:
                    raise
                except Exception as failure:  # any of Ray's; what it has written is found again
                    raise errors.ServerUnavailableError(
                        "The cluster's log of addresses cannot be read or written: "
                        f"{type(failure).__name__}: {failure}.".replace(": .", "."),
                        hint="It is in Ray's GCS: see its log, and try again.",
                    ) from failure
                self._taken([(claim.begin, claim.end) for claim in claims])
                for claim in claims:  # those that are known change nothing
                    self._core.addresses.acquire(claim.begin, claim.end)
                self._n_claims = len(claims)
                self._core.ids_from(self._first_id(claims[0]))


class Regions:
    """See the file's head. Coroutines of the registry's loop.

    Args:
        core: Decides.
        log: The versions of those that are sealed.
        journal: Where it is written first.
        room: Addresses.
        servers: Page servers, which are homes.
        handles: Their actors.
        ends: Carries out that regions end.
        late: Writes what follows.
        rebuilds: New homes.
        losses: Blocks that are lost.
        background: Where spare regions are looked after.
        forget: Are told of a region that is freed or abandoned.
        count: Is told how the references to a region that is sealed are counted.
        inside: By anchors, what is written down to be inside of a region that is sealed.
        all_on_disk: All regions are, whoever asks.
        keep: Has a home (server, region) bring a region to its disk before it is sealed; None:
            that is not wanted.
    """

    def __init__(
        self,
        *,
        core: RegistryCore,
        log: CommitLog,
        journal: Journal,
        room: AddressRoom,
        servers: PageServers,
        handles: Handles,
        ends: RegionEnds,
        late: LateWrites,
        rebuilds: Rebuilds,
        losses: Losses,
        background: BackgroundTasks,
        forget: Iterable[Callable[[int], object]],
        count: Callable[[int, Counted], object],
        inside: Callable[[Iterable[bytes]], Iterable[int]] = lambda anchors: (),
        all_on_disk: bool = False,
        keep: Callable[[int, int], Awaitable[None]] | None = None,
    ) -> None:
        self._core = core
        self._log = log
        self._journal = journal
        self._room = room
        self._servers = servers
        self._handles = handles
        self._ends = ends
        self._late = late
        self._rebuilds = rebuilds
        self._losses = losses
        self._background = background
        self._forget = tuple(forget)
        self._count = count
        self._inside = inside
        self._all_on_disk = all_on_disk
        self._keep_at = keep
        self._keeping: dict[int, asyncio.Task[None]] = {}  # by region
        self._n_begins: dict[int, int] = {}  # by home
        self._given_up: dict[int, None] = {}  # requests; the oldest first
        self._files: dict[int, Source] = {}  # by region
        self._freed_files: dict[int, Source] = {}  # the same; the oldest first
        self._spares = SpareRegions(
            self._which_are_known, lambda region: ends.carry_out(core.abandon(region))
        )

    async def create(
        self, length_bytes: int, node_id: str, request_id: int = 0, on_disk: bool = False
    ) -> RegionRecord:
        """A new region homed on a node, invisible until ``seal``, for which there are 600 s.

        Also ends those whose maker died, or gave up, without a word.

        Args:
            length_bytes: At least 1.
            node_id: Ray's hex id of its home.
            request_id: 63 random bits; the same ones get the same region again. 0: none.
            on_disk: Its home has it in a file.

        Raises:
            ServerUnavailableError: See ``PageServers.ensure``; also where the cluster's log of
                addresses cannot be reached.
            VersionMismatchError: See ``PageServers.ensure``.
            ValueError, NoAddresses: See ``RegistryCore.create_region``.
            JournalFullError: There is no region.
        """
        info = await self._servers.ensure(node_id)
        if length_bytes > 0:
            await self._room.make(length_bytes)
        # No await from here on: others create regions, too.
        self._abandon_stale()
        record, is_new = self._make(length_bytes, info.server_id, request_id, on_disk)
        if is_new:
            try:
                self._journal.create_region(record, request_id, record.region + 1)
            except errors.JournalFullError:
                self._core.undo_create(record.region)
                raise
        return record

    async def create_pieces(
        self,
        length_bytes: int,
        layout: PieceLayout,
        node_id: str,
        request_id: int = 0,
    ) -> list[RegionRecord]:
        """A new variable in pieces, whose bytes are made on a node. Each piece is sealed when it is
        made, and may move then; the variable itself is sealed when all are. Each seal gives it 600
        s more, and so does the same request once more.

        Args:
            length_bytes: More than one piece, where there is no redundancy.
            layout: Of its pieces.
            node_id, request_id: As in ``create``.

        Returns:
            The variable's record, and that of each piece.

        Raises:
            See ``create``.
        """
        info = await self._servers.ensure(node_id)
        layout = layout._replace(on_disk=layout.on_disk or self._all_on_disk)
        self._abandon_stale()
        if self._core.requested(request_id) is None:
            groups = groups_of(length_bytes, layout)
            parity = lengths_of(groups, length_bytes, layout.piece_bytes)[groups.n_pieces :]
            await self._room.make(self._core.addresses.gap_bytes([length_bytes, *parity]))
        # No await from here on.
        self._abandon_stale()
        if request_id in self._given_up:
            raise IllegalTransition(f"request {request_id:#x} was given up by its maker")
        is_new = self._core.requested(request_id) is None
        whole = self._core.create_pieces(
            length_bytes, layout, info.server_id, time.monotonic(), request_id
        )
        pieces = [record for each in whole.pieces if (record := self._core.record_of(each))]
        if is_new:
            try:
                next_region = whole.pieces[-1] + 1
                self._journal.create_region(whole, request_id, next_region, pieces)
            except errors.JournalFullError:
                self._core.undo_create(whole.region)
                raise
        else:  # its maker says that it is at work
            self._core.goes_on(whole.region, time.monotonic())
        return [whole, *pieces]

    def _make(
        self, length_bytes: int, server_id: int, request_id: int, on_disk: bool = False
    ) -> tuple[RegionRecord, bool]:
        """A region in the core; whether it is to be written."""
        if request_id in self._given_up:
            raise IllegalTransition(f"request {request_id:#x} was given up by its maker")
        now_s = time.monotonic()
        self._ends.carry_out(self._core.abandon_stale(now_s - CREATING_S))
        if (again := self._core.requested(request_id)) is not None:
            return again, False
        on_disk = on_disk or self._all_on_disk
        made = (length_bytes, server_id, time.monotonic(), request_id, on_disk)
        return self._core.create_region(*made), True

    async def seal(
        self, region: int, source: Source | None = None, counted: Counted | None = None
    ) -> RegionRecord:
        """The region's bytes are in place: it can be looked up from now on.

        Args:
            region: Its id.
            source: What makes them again.
            counted: How its references are counted; None: it stays until it is freed.

        Raises:
            NoSuchRegion, IllegalTransition: See ``RegistryCore.seal``.
            JournalFullError: It is not sealed.
            ProtocolError: The source cannot be read. It is not sealed.
            NoSpaceError, HomeLostError, ServerUnavailableError, WaitTimeoutError: Its home cannot
                bring it to its disk, where that is wanted. It is not sealed.
        """
        await self._keep(region)
        return self._seal(region, source, counted, None)

    async def _keep(self, region: int) -> None:
        """Before a region is sealed: its home has it on its disk. No await where that is not
        wanted, or was done. A call that comes again waits for the same work."""
        if self._keep_at is None or self._core.state(region) is not RegionState.CREATING:
            return
        record = self._core.record_of(region)
        if record is None or record.n_pieces:  # its pieces have the bytes
            return
        if (running := self._keeping.get(region)) is None:
            self._core.goes_on(region, time.monotonic())
            work = self._keep_at(record.homes[0], region)
            running = asyncio.ensure_future(asyncio.wait_for(work, KEEP_S))
            self._keeping[region] = running
            running.add_done_callback(lambda done: self._kept(region, done))
        home = record.homes[0]
        n_begins = self._n_begins.get(home, 0)
        about = f"The home of {self._log.label(region)}"
        try:
            await asyncio.shield(running)
            if self._n_begins.get(home, 0) != n_begins:
                raise errors.HomeLostError(
                    f"{about} was started anew while the variable was made: it was not made.",
                    hint="Make it again.",
                )
        except asyncio.TimeoutError as failure:
            raise errors.WaitTimeoutError(
                f"{about} has not brought it to its disk within {KEEP_S:g} s.",
                hint="The disk is slow, or fails: see the kernel's log on that node. The variable "
                "was not made.",
            ) from failure
        except RayError as failure:
            raise errors.ServerUnavailableError(
                f"{about} does not answer: {cause_of(failure)}.",
                hint="The variable is not made yet. Try again.",
            ) from failure

    def home_begins(self, home: int) -> None:
        """A home begins anew from what its directory has, and drops regions that are not sealed. To
        be called before it is told which are."""
        self._n_begins[home] = self._n_begins.get(home, 0) + 1

    def _kept(self, region: int, done: asyncio.Task[None]) -> None:
        del self._keeping[region]
        if not done.cancelled():
            done.exception()  # who still waits has it

    def _seal(
        self,
        region: int,
        source: Source | None,
        counted: Counted | None,
        created: tuple[RegionRecord, int, int] | None,
    ) -> RegionRecord:
        """Also writes down a region that is made, where there is one: both, or neither."""
        learn = self._read_source(region, source)  # before the journal has it
        if self._core.state(region) is RegionState.CREATING:
            self._core.check_seal(region)
            self._check_pieces(region)
            inside = self._inside(counted.inside) if counted is not None else ()
            self._journal.seal(region, source, created, inside)
        elif created is not None:
            self._core.check_seal(region)
            self._journal.create_region(*created)
        record = self._core.seal(region, written=True)
        learn()
        if counted is not None:
            self._count(region, counted)
        self._spares.sealed(region)
        if record.n_pieces:
            self._log.open_pieces(region, record.pieces, record.groups)
        else:
            self._log.open(region, record.homes, record.length_bytes)
        if record.piece_of:
            self._core.goes_on(record.piece_of, time.monotonic())
        return record

    def _check_pieces(self, region: int) -> None:
        """
        Raises:
            IllegalTransition: A piece of the variable is not sealed, or its home or blocks of it
                are lost.
        """
        record = self._core.record_of(region)
        for piece in record.pieces if record else ():
            homes = self._core.homes_of(piece)
            is_lost = any(isinstance(self._core.locate(home), ServerLost) for home in homes)
            if not homes or is_lost or self._losses.of(piece) is not None:
                raise IllegalTransition(
                    f"piece {piece} of {self._log.label(region)} is not made, or lost"
                )

    async def seal_and_create(
        self,
        region: int,
        source: Source | None,
        length_bytes: int,
        node_id: str,
        request_id: int,
        counted: Counted | None = None,
    ) -> RegionRecord | None:
        """``seal``, and ``create`` of one for the next ``put``, which then needs no call.

        Args:
            region, source, counted: As in ``seal``.
            length_bytes, node_id, request_id: As in ``create``.

        Returns:
            The next region; None where there is none now. That is no error: ``region`` is sealed,
            and who needs the next one asks for it, and is told why.

        Raises:
            As ``seal``.
        """
        await self._keep(region)
        if self._servers.is_here(node_id) and self._core.addresses.has_room(length_bytes):
            record = self._seal_and_make(region, source, counted, length_bytes, node_id, request_id)
        else:  # it may take a minute, which a region that is filled does not wait for
            self._seal(region, source, counted, None)
            try:
                record = await self.create(length_bytes, node_id, request_id)
            except (errors.ClamorError, RegistryError, RayError) as failure:
                logger.info("no region in advance: %s", failure)
                return None
        if self._core.state(record.region) is RegionState.CREATING:
            self._spares.made(record.region, record.homes[0])
            if not self._spares.is_looking:
                self._background.spawn(self._spares.look())
        return record

    def _seal_and_make(
        self,
        region: int,
        source: Source | None,
        counted: Counted | None,
        length_bytes: int,
        node_id: str,
        request_id: int,
    ) -> RegionRecord:
        """Both in one transaction. Nothing need be waited for."""
        server_id = self._core.server_id_at(node_id)
        record, is_new = self._make(length_bytes, server_id, request_id)
        try:
            created = (record, request_id, record.region + 1) if is_new else None
            self._seal(region, source, counted, created)
        except BaseException:
            if is_new:
                self._core.undo_create(record.region)
            raise
        self._abandon_stale()  # not before: what took long and is sealed now is none of them
        return record

    def _abandon_stale(self) -> None:
        """Ends regions whose maker died, or gave up, without a word."""
        self._ends.carry_out(self._core.abandon_stale(time.monotonic() - CREATING_S))

    def abandon(self, region: int, leased: bool = False) -> None:
        """Undoes ``create``, for a maker that has not heard of ``seal``: see
        ``RegistryCore.abandon``. A call of ``seal`` that comes later is refused."""
        regions = (*self._core.pieces_of(region), region)
        orders = self._core.abandon(region, leased)
        for each in regions:
            self._close(each)
        self._ends.carry_out(orders)

    async def free(self, region: int, here: int = 0) -> FreeAnswer:
        """Starts the region's end; returns before its last lease is gone.

        When it returns, and the caller has done what the answer says (``pc_client_retire``), no
        server that answers within ``FREE_S`` seconds gives a new lease. Calling it again waits for
        those that have not been told.

        Args:
            region: Its id.
            here: The page server that the caller tells itself, and through it who asks that for
                blocks; 0: none.

        Raises:
            NoSuchRegion, IllegalTransition: See ``RegistryCore.free``.
            JournalFullError: It is not freed.
        """
        if region >= INLINE_BASE:
            self._journal.free_inline([region], self._log.freed_too_many())
            self._close(region)
            return FreeAnswer()
        if self._core.pieces_of(region):
            return await self._free_pieces(region)
        if self._core.state(region) is RegionState.READY:
            self._journal.set_states([(region, RegionState.FREED.value)])
        # Where it was freed before, its state does not change.
        homes = self._core.homes_of(region)
        record = self._core.record_of(region)
        if record is not None and record.length_bytes > AT_ONCE_BYTES:
            # Given back before this returns, and by no thread that serves pages.
            here = 0
        orders = self._core.free(region, written=True)
        self._close(region)
        self._ends.carry_out(orders)
        others = tuple(sorted(self._core.waits_for(region) - {here}))
        if here in homes and len(others) <= RETIRE_MOST:
            alone = any(order.alone and order.server_id == here for order in orders)
            return FreeAnswer(alone, others)
        if told := self._ends.hurry(region, but=here):
            await asyncio.wait(told, timeout=FREE_S)
        return FreeAnswer()

    async def _free_pieces(self, region: int) -> FreeAnswer:
        """All servers are told by the registry: those of many pieces are many."""
        pieces = self._core.pieces_of(region)
        if self._core.state(region) is RegionState.CREATING:
            raise IllegalTransition(f"{self._log.label(region)} is not sealed")
        self.free_unheld([region])
        if told := [each for piece in pieces for each in self._ends.hurry(piece)]:
            await asyncio.wait(told, timeout=FREE_S)
        return FreeAnswer()

    def free_unheld(self, regions: list[int]) -> None:
        """Frees regions that nobody refers to, with their pieces. Nobody waits for it.

        Raises:
            JournalFullError: None of them is freed.
        """
        regions = [each for region in regions for each in (*self._core.pieces_of(region), region)]
        ready = [each for each in regions if self._core.state(each) is RegionState.READY]
        self._journal.set_states([(region, RegionState.FREED.value) for region in ready])
        orders = [order for region in ready for order in self._core.free(region, written=True)]
        for region in regions:
            self._close(region)
        self._ends.carry_out(orders)

    async def lookup(self, region: int, server_id: int = 0) -> LookupAnswer:
        """The region's record with its newest version, or that it is freed or unknown.

        Args:
            region: Its id.
            server_id: The page server that will hold leases on it; 0 for a mere question.

        Raises:
            ServerUnavailableError: Its new home does not know yet that it is that: ask again.
        """
        await self._rebuilds.activated(region, REHOME_S)
        answer = self._core.lookup(region, server_id) if server_id else self._core.peek(region)
        if isinstance(answer, RegionRecord):
            return dataclasses.replace(
                answer, version=self._log.newest(region), loss=self._losses.number(region)
            )
        return answer

    # -- Ray objects

    async def share(
        self, object_refs: list[Any], node_id: str, request_id: int = 0
    ) -> tuple[RegionRecord, Plan]:
        """Makes one Ray object page-accessible from the node that holds it.

        Args:
            object_refs: A list of one ObjectRef (in a list, so that Ray passes it as it is).
            node_id: Where its bytes lie; that page server pins it.
            request_id: As in ``create``.

        Returns:
            The sealed region's record, and the plan of what lies where in it.
        """
        info = await self._servers.ensure(node_id)
        pinned: Pinned = await within(
            PIN_S, self._handles[info.server_id].pin.remote(object_refs, request_id)
        )
        return pinned.record, pinned.plan

    def give_up_share(self, request_id: int) -> None:
        """Undoes ``share``, for a process that has not had its answer. What the page server still
        does for it is refused from now on."""
        self._given_up[request_id] = None
        if len(self._given_up) > GIVEN_UP_MOST:
            del self._given_up[next(iter(self._given_up))]
        if (record := self._core.requested(request_id)) is not None:
            self.abandon(record.region)

    def know_source(self, region: int, source: Source) -> None:
        """What makes the region's bytes again, from the journal. One that cannot be read is
        dropped: the session does not end for it."""
        try:
            self._read_source(region, source)()
        except errors.ProtocolError as failure:
            logger.error("it is dropped: %s", failure.message)

    def _read_source(self, region: int, source: Source | None) -> Callable[[], None]:
        """What notes the source, and cannot fail.

        Raises:
            ProtocolError: It cannot be read.
        """
        record = self._core.record_of(region)
        if source is None or record is None:
            return lambda: None
        try:
            if source.kind == FILE:
                FileSpec.of_source(source)  # who reads it can
            if source.kind != SHARED:
                return lambda: self._set_source(region, source)
            # This reference outlives the page server's process, which pins the object anew.
            pinned, object_refs = shared_objects.pinned_of(record, source)
        except MemoryError:
            raise
        except Exception as failure:  # pickle raises what it likes
            raise errors.ProtocolError(
                f"The source of {self._log.label(region)} cannot be read: {cause_of(failure)}"
            ) from failure
        return lambda: self._rebuilds.set_shared(region, pinned, object_refs)

    def _set_source(self, region: int, source: Source) -> None:
        self._rebuilds.set_source(region, source)
        if source.kind == FILE:
            self._core.lies_in_file(region)
            self._files[region] = source

    def file_of(self, region: int) -> Source | None:
        """The file that has what no commit has written of a region. Of one that is freed, too:
        processes that have it open go on reading. None: nobody knows (any more)."""
        return self._files.get(region) or self._freed_files.get(region)

    def _close(self, region: int) -> None:
        if (source := self._files.pop(region, None)) is not None:
            self._freed_files[region] = source
            if len(self._freed_files) > FREED_FILES_MOST:
                del self._freed_files[next(iter(self._freed_files))]
        self._log.close(region)
        for forget in self._forget:
            forget(region)

    async def _which_are_known(self, server_id: int, regions: list[int]) -> list[bool] | None:
        """See ``SpareRegions``."""
        if isinstance(self._core.locate(server_id), ServerLost):
            return None
        handle = self._handles.get(server_id)
        if handle is None:
            raise errors.ServerUnavailableError(f"The page server {server_id:#x} is not here yet.")
        known: list[bool] = await within(CALL_S, handle.knows.remote(regions))
        return known


class FileCalls:
    """Calls of the registry about regions in files; the registry has them beside its own."""

    _regions: Regions

    async def file_of(self, region: int) -> Source | None:
        """See ``Regions.file_of``."""
        return self._regions.file_of(region)

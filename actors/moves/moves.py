"""Moves a home that lives to another server, while readers read and writers commit. No Ray.

One move:

    begun     -> the taker gets ready, at the newest version that the giver knows
    blocks    -> all that hold data, in layers of ``LAYER_BLOCKS``; then those that commits have
                 changed since, until few are left. Each layer is of the newest version of its time,
                 and the giver stages the next one while the taker takes it
    records   -> of the history, the oldest first
    held      -> commits wait before their decision; those that are decided are published at the
                 giver. The last blocks and records follow
    sealed    -> the taker has all, and its keeper has it
    journal   -> from here on the taker is the home, in the next term (``switches``)
    told      -> the taker, then the giver. Then commits go on

Commits are held back for ``HOLD_S`` at most before the journal is written. What fails before that
costs nothing but time: the taker drops what it has, the giver has noticed nothing, and somebody
tries again. A call that fails or takes too long ends the attempt, because nobody knows what of it
was done: a layer that comes late must not replace a later one. If the giver is lost, its regions
are rebuilt as any (``lost_homes``), unless the taker is sealed already.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import BLOCK_BYTES, MoveCounters, RegionRecord
from clamor_ray._protocol.refusals import NO_ROOM
from clamor_ray._spans.record import span
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.watched_calls import watched
from clamor_ray.actors.moves.move_servers import MoveServers
from clamor_ray.actors.moves.switches import Switches
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

AT_ONCE = 2  # of one giver: the blocks of so many are copied side by side
LAYER_BLOCKS = (16 << 20) // BLOCK_BYTES
LEAST_BLOCKS = (256 << 10) // BLOCK_BYTES  # of a layer, where the giver has little room
FEW_BLOCKS = (1 << 20) // BLOCK_BYTES  # they go while commits are held back
RECORDS_AT_ONCE = 64
FEW_RECORDS = 8
ROUNDS = 32  # after the first of each block and record; then commits are held back all the same
PAUSE_S = 0.02
BEGIN_S = 10.0  # until a taker that was the home itself a moment ago has let go of that
CALL_S = 120.0
BEGIN_CALL_S = 20.0  # nothing travels yet: a taker that is stopped holds others up no longer
PUBLISH_S = 10.0  # until the giver knows what is decided
DROP_S = 10.0
HOLD_S = 5.0

_T = TypeVar("_T")


class MoveFailed(Exception):
    """It is not made now; the text says why. The giver is the home still."""


class NoRoom(MoveFailed):
    """The taker has none: another one may."""


class _GiverFull(MoveFailed):
    """The giver has no room for a layer: another taker would not help."""


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels those that run; nobody asks any more what they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Publishes(Protocol):
    """What of ``Commits`` a move needs."""

    async def tell_now(self, home: int) -> None:
        """Tells a home once of what it has not acknowledged."""


@dataclass
class _Move:
    """One that is under way.

    Args:
        record: The region's, with the taker as its home.
        giver: Its home.
        attempt: The taker knows it by this number.
        at: The version that all of ``todo``, and all that was staged, is of.
        todo: Blocks that are to be staged.
        next_record: The version of the next record that is to be staged.
        n_bytes: What the taker has got.
        has_begun: The taker may know of it.
        layer_blocks: Of a layer, at most.
    """

    record: RegionRecord
    giver: int
    attempt: int
    at: int = 0
    todo: BitMap = field(default_factory=BitMap)
    next_record: int = 0
    n_bytes: int = 0
    has_begun: bool = False
    layer_blocks: int = field(default_factory=lambda: LAYER_BLOCKS)

    @property
    def region(self) -> int:
        return self.record.region

    @property
    def taker(self) -> int:
        return self.record.homes[0]


@dataclass
class _Staged:
    """What the giver has for the taker.

    Args:
        ids: What it is staged under, and maybe is not.
        layers: (commit id, bytes) of those that the taker is to get.
        are_records: Of the history; else they are blocks.
    """

    ids: list[int]
    layers: list[tuple[int, int]]
    are_records: bool


class Moves:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: Versions and changes.
        servers: The page servers.
        commits: Tells homes what is decided.
        held: Regions whose commits wait.
        losses: What is lost of which regions.
        switches: Makes the taker the home.
        floor_of: The oldest version of a region that a live collection could need.
        is_leaving: Whether a server is to get no home of others.

    Attributes:
        kept_bytes_s: How fast a taker sums and syncs what it takes; without a store it does not.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        servers: MoveServers,
        commits: Publishes,
        held: HeldCommits,
        losses: Losses,
        switches: Switches,
        floor_of: Callable[[int], int | None] = lambda region: None,
        is_leaving: Callable[[int], bool] = lambda server_id: False,
    ) -> None:
        self._core = core
        self._log = log
        self._servers = servers
        self._commits = commits
        self._held = held
        self._losses = losses
        self._switches = switches
        self._floor_of = floor_of
        self._is_leaving = is_leaving
        self.kept_bytes_s = math.inf
        self._moving: set[int] = set()  # regions
        self._staged: set[int] = set()  # commit ids of layers that are no commits
        self._turns: dict[int, asyncio.Semaphore] = {}  # by giver
        self._background = BackgroundTasks(logger)
        self._finished = 0
        self._finished_bytes = 0

    def counters(self) -> MoveCounters:
        """What was moved since the registry began."""
        return MoveCounters(self._finished, self._finished_bytes)

    def check_outcome(self, commit_id: int) -> None:
        """Is asked before anybody hears that a layer belongs to no commit.

        Raises:
            ServerUnavailableError: A move that runs waits for the layer: ask again.
        """
        if commit_id in self._staged:
            raise errors.ServerUnavailableError(
                f"What is staged under {commit_id:#x} is on its way to a variable's next home.",
                hint="Ask again.",
            )

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    async def move(self, region: int, taker: int) -> int:
        """Moves a region's home to a server. It takes the time that it takes: cancel it, and it is
        given up, unless the journal is written: then it ends by itself.

        Returns:
            The bytes that were moved.

        Raises:
            MoveFailed: It is not moved; nothing else has changed.
        """
        record = self._core.record_of(region)
        homes = self._core.homes_of(region)
        if record is None or len(homes) != 1:
            raise MoveFailed("it is not there any more")
        if region in self._moving:
            raise MoveFailed("it moves already")
        (giver,) = homes
        if giver == taker:
            return 0
        self._moving.add(region)
        try:
            record = replace(record, homes=(taker,) * len(record.homes), term=record.term + 1)
            move = _Move(record, giver, secrets.randbits(63) | 1)
            with span("", "move home of", region=region), self._core.heading(region, taker):
                await self._carry_all(move)
            self._finished += 1
            self._finished_bytes += move.n_bytes
            return move.n_bytes
        finally:
            self._moving.discard(region)

    async def _carry_all(self, move: _Move) -> None:
        try:
            # What comes after that waits more than it copies: the next one has its turn then.
            async with self._turns.setdefault(move.giver, asyncio.Semaphore(AT_ONCE)):
                await self._begin(move)
                rounds = 1 + len(move.todo) // LAYER_BLOCKS
                rounds += max(0, move.at - move.next_record) // RECORDS_AT_ONCE
                await self._copy(move, rounds, RECORDS_AT_ONCE)
            await self._copy(move, ROUNDS, FEW_RECORDS)
            switched = await self._switch(move)
        except BaseException as failure:
            if move.has_begun:
                self._background.spawn(self._drop(move))
            if isinstance(failure, errors.ClamorError):  # of the journal, or the log
                raise MoveFailed(cause_of(failure)) from failure
            raise
        if not await switched:  # cancelled, it ends by itself
            raise MoveFailed("the taker was lost before the giver had heard of it")

    # -- steps

    def _check(self, move: _Move) -> None:
        """
        Raises:
            MoveFailed: It is of no use to go on.
        """
        now = self._core.record_of(move.region)
        if now is None or self._core.state(move.region) is not RegionState.READY:
            raise MoveFailed("it was freed")
        if now.term + 1 != move.record.term:
            raise MoveFailed("it has got another home meanwhile")
        if (reason := self._servers.why_lost(move.taker)) is not None:
            raise MoveFailed(f"the taker {move.taker:#x} is lost: {reason}")
        if self._is_leaving(move.taker):
            raise MoveFailed(f"the taker {move.taker:#x} is drained itself")

    async def _begin(self, move: _Move) -> None:
        region = move.region
        self._core.lookup(region, move.taker)  # it is told when the region is freed
        move.at = await self._published(move)
        blocks = await self._call(
            move.giver, self._servers.home_blocks(move.giver, region, move.at)
        )
        move.todo = BitMap.deserialize(blocks)
        found = self._losses.of(region)
        n_bytes = len(move.todo) * BLOCK_BYTES
        record = replace(move.record, version=move.at)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S
        while True:
            self._check(move)
            move.has_begun = True
            call = self._servers.take_begin(
                move.taker, record, move.attempt, n_bytes, found.blocks if found else b""
            )
            try:
                await watched(self._servers, move.taker, call, BEGIN_CALL_S)
                break
            except errors.WaitTimeoutError as failure:
                if loop.time() >= deadline:
                    raise MoveFailed(str(failure)) from failure
            except NO_ROOM as failure:
                raise NoRoom(str(failure)) from failure
            except Exception as failure:  # any: nobody knows what was done
                raise self._failed(move.taker, failure) from failure
            await asyncio.sleep(PAUSE_S)
        if (floor := self._floor_of(region)) is not None:
            await self._call(move.taker, self._servers.retain(move.taker, {region: floor}))
        move.next_record = await self._call(
            move.giver, self._servers.oldest_version(move.giver, region)
        )

    async def _copy(self, move: _Move, rounds: float, few_records: int) -> None:
        """While commits go on, until little is left, or so often."""
        taking: list[asyncio.Task[None]] = []  # one that runs, and one that waits for it
        try:
            while rounds > 0:
                self._check(move)
                self._catch_up(move, await self._published(move))
                if (staged := await self._stage(move, few_records)) is not None:
                    rounds -= move.layer_blocks / LAYER_BLOCKS
                    taking.append(self._begin_to_take(move, staged, taking[-1:]))
                elif not taking:
                    return
                while len(taking) > (1 if staged is not None else 0):
                    await taking[0]
                    del taking[0]
            await asyncio.gather(*taking)
        finally:
            await _end(taking)

    async def _switch(self, move: _Move) -> asyncio.Future[bool]:
        """Commits are held back, and the taker is the home, or it is not.

        Returns:
            Whether it is, once it and the giver have heard.
        """
        self._check(move)
        # In a session with a store the taker sums and syncs all of it.
        hold_s = HOLD_S + move.record.length_bytes / self.kept_bytes_s
        self._held.hold(move.region)
        try:
            await asyncio.wait_for(self._last(move), hold_s)
            # No await from here on: what is checked is what is written.
            self._check(move)
            if self._log.newest(move.region) != move.at:
                raise MoveFailed("a commit was made that the taker lacks")
            return self._switches.begin(replace(move.record, version=move.at), move.giver)
        except asyncio.TimeoutError:
            self._held.release(move.region)
            raise MoveFailed(f"the last of it did not come within {hold_s:g} s") from None
        except BaseException:
            self._held.release(move.region)
            raise

    async def _last(self, move: _Move) -> None:
        """What is left, while no commit is decided."""
        newest = self._log.newest(move.region)
        while (known := await self._published(move)) < newest:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(PAUSE_S)
        self._catch_up(move, known)
        both = [
            asyncio.ensure_future(self._last_blocks(move)),
            asyncio.ensure_future(self._last_records(move)),
        ]
        try:
            await asyncio.gather(*both)
        finally:
            await _end(both)
        call = self._servers.take_seal(move.taker, move.region, move.attempt, move.at)
        await self._call(move.taker, call)

    # -- what each step is made of

    async def _published(self, move: _Move) -> int:
        """A version that the giver knows: the newest, if it is told in time."""
        region = move.region
        newest = self._log.newest_open(region)
        if self._log.settled(region) < newest:
            try:
                call = self._commits.tell_now(move.giver)
                await watched(self._servers, move.giver, call, PUBLISH_S)
            except Exception as failure:  # any: it may be restarting
                raise self._failed(move.giver, failure) from failure
        return self._log.settled(region)

    def _catch_up(self, move: _Move, version: int) -> None:
        """What commits have changed up to this version is to come again."""
        if version <= move.at:
            return
        changed = self._log.changes(move.region, move.at, version)
        if changed is None:
            raise MoveFailed("there were more commits meanwhile than are remembered")
        move.todo |= changed
        move.at = version

    async def _stage(self, move: _Move, few_records: int) -> _Staged | None:
        """The next of it. None: little is left."""
        if len(move.todo) > FEW_BLOCKS:
            return await self._stage_blocks(move)
        if move.at - move.next_record > few_records:
            return await self._stage_records(move)
        return None

    async def _last_blocks(self, move: _Move) -> None:
        while move.todo:
            await self._begin_to_take(move, await self._stage_blocks(move), [])

    async def _last_records(self, move: _Move) -> None:
        while move.next_record < move.at:
            await self._begin_to_take(move, await self._stage_records(move), [])

    async def _stage_blocks(self, move: _Move) -> _Staged:
        """Some blocks of ``todo``. A full giver has room for a small layer still."""
        while True:
            try:
                return await self._stage_some(move, BitMap(move.todo[: move.layer_blocks]))
            except _GiverFull:
                if move.layer_blocks <= LEAST_BLOCKS:
                    raise
                move.layer_blocks //= 4

    async def _stage_some(self, move: _Move, some: BitMap) -> _Staged:
        packed = bytes(some.serialize())
        (commit_id,) = ids = self._ids(1)
        call = self._servers.stage_home(move.giver, move.region, move.at, commit_id, packed)
        layer_bytes = await self._call_to_stage(move, ids, call)
        move.todo -= some
        return _Staged(ids, [(commit_id, layer_bytes)], are_records=False)

    async def _stage_records(self, move: _Move) -> _Staged:
        """Some records of the history."""
        ids = self._ids(min(move.at - move.next_record, RECORDS_AT_ONCE))
        most_bytes = LAYER_BLOCKS * BLOCK_BYTES
        call = self._servers.stage_records(
            move.giver, move.region, move.next_record, ids, most_bytes
        )
        layers_bytes = await self._call_to_stage(move, ids, call)
        move.next_record += len(layers_bytes)
        layers = [each for each in zip(ids, layers_bytes, strict=False) if each[1]]
        return _Staged(ids, layers, are_records=True)

    async def _call_to_stage(
        self, move: _Move, ids: list[int], call: Coroutine[Any, Any, _T]
    ) -> _T:
        try:
            return await self._call(move.giver, call)
        except NoRoom as failure:
            self._background.spawn(self._drop_layers(move, ids))
            raise _GiverFull(cause_of(failure)) from failure
        except BaseException:
            self._background.spawn(self._drop_layers(move, ids))
            raise

    def _begin_to_take(
        self, move: _Move, staged: _Staged, before: list[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        """The taker gets it, once all that was staged before is there."""
        taking = asyncio.ensure_future(self._take(move, staged, before))
        taking.add_done_callback(  # also of one that is cancelled before it has begun
            lambda _: self._background.spawn(self._drop_layers(move, staged.ids))
        )
        return taking

    async def _take(self, move: _Move, staged: _Staged, before: list[asyncio.Task[None]]) -> None:
        for each in before:
            await each
        if not staged.layers:
            return
        servers = self._servers
        take = servers.take_records if staged.are_records else servers.take
        call = take(move.taker, move.region, move.attempt, move.giver, staged.layers)
        await self._call(move.taker, call)
        move.n_bytes += sum(layer_bytes for _, layer_bytes in staged.layers)

    def _ids(self, n: int) -> list[int]:
        ids = [secrets.randbits(64) | 1 for _ in range(n)]
        self._staged.update(ids)
        return ids

    async def _call(self, server_id: int, call: Coroutine[Any, Any, _T]) -> _T:
        """
        Raises:
            MoveFailed: Whatever it is.
        """
        try:
            return await watched(self._servers, server_id, call, CALL_S)
        except Exception as failure:  # any: nobody knows what was done
            raise self._failed(server_id, failure) from failure

    @staticmethod
    def _failed(server_id: int, failure: Exception) -> MoveFailed:
        if isinstance(failure, NO_ROOM):
            return NoRoom(str(failure))
        return MoveFailed(f"page server {server_id:#x}: {failure!r}")

    async def _drop_layers(self, move: _Move, ids: list[int]) -> None:
        self._staged.difference_update(ids)
        call = self._servers.drop_layers(move.giver, move.region, ids)
        try:
            await asyncio.wait_for(call, DROP_S)
        except Exception as failure:  # any: it asks by itself what becomes of a staged layer
            logger.info("page server %#x was not told to drop layers: %r", move.giver, failure)

    async def _drop(self, move: _Move) -> None:
        call = self._servers.take_drop(move.taker, move.region, move.attempt)
        try:
            await asyncio.wait_for(call, DROP_S)
        except Exception as failure:  # any: it drops by itself what nobody asks for
            logger.info("page server %#x was not told to drop a move: %r", move.taker, failure)

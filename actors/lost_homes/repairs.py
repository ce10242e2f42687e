"""A lost piece is made again from the others of its group. No Ray.

The group's other pieces are read at the versions that one version of the variable names: so what
they make is one state, whatever commits do meanwhile. Each home stages the same blocks; the new
home pulls them, and writes their XOR. Where there are copies one of them is enough.

    blocks   -> those that hold data in any of them, some at a time
    records  -> of the history, as far as the homes still have those versions

What that reads of the homes is paid from one budget of bytes a second, of all repairs of the
session together (``CLAMOR_REPAIR_BYTES_S``): readers and writers need the links, too.

Nothing here decides: ``rebuilds.py`` does, and writes down what came of it.

(Camelot, section 3.5. Groups: ``clamor_ray._redundancy.groups``.)

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import BLOCK_BYTES, RegionRecord, RepairSet
from clamor_ray._protocol.refusals import NO_ROOM
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.watched_calls import Examined, watched
from clamor_ray.actors.process.byte_rate import ByteRate
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

LAYER_BLOCKS = (32 << 20) // BLOCK_BYTES  # that one home stages at a time
LEAST_LAYER_BLOCKS = 16
STEP_S = 1.0  # of the budget, that one step reads at most: a link is not filled for longer
SAY_S = 15.0  # who takes a repair drops one that is silent for a minute (SILENCE_S, moved_homes.py)
LOOK_S = 30.0  # for parity that can be made again
LOOK_MOST_S = 1800.0  # between two tries of one
RECORDS_AT_ONCE = 32
MOST_RECORDS = 1024
RECORDS_BYTES = 256 << 20  # of all records: a home's default budget for old versions
CALL_S = 120.0
DROP_S = 10.0

_T = TypeVar("_T")

Staged = tuple[int, list[tuple[int, int, int, int]]]
"""(version, [(server, region, commit id, bytes) of each member])."""


class RepairServers(Examined, Protocol):
    """The page servers, by id. What a call raises ends the attempt."""

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        """The blocks that hold data at a version: a serialized BitMap."""

    async def stage_versions(
        self, giver: int, region: int, wanted: list[tuple[int, int, bytes]]
    ) -> list[int]:
        """It makes layers of a home's blocks: (version, commit id, serialized BitMap) of each. The
        bytes of each; 0: that version is kept no longer."""

    async def oldest_version(self, giver: int, region: int) -> int:
        """The oldest version whose blocks it keeps."""

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        """It drops what it has staged."""

    async def take_repaired(
        self, taker: int, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        """It fetches layers, and takes the XOR of those of each version, in that order."""

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        """All of it is there, at this version."""

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        """The attempt is given up."""


@dataclass(frozen=True)
class Repairable:
    """What the others of a piece's group can make again.

    Args:
        blocks: Which of the piece.
        versions: Of each of the others that is needed, by region: those of one version of the
            variable.
        version: Of the piece, at that version of the variable.
    """

    blocks: BitMap
    versions: dict[int, int]
    version: int


class GiverFull(errors.OutOfMemoryError):
    """A home has no room for the layer that it is to give: not the taker, and not for long."""

    server_id = 0


def _is_whole(row: Staged) -> bool:
    """Whether all homes had the version."""
    return all(layer_bytes for *_, layer_bytes in row[1])


class Repairs:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: Versions and changes.
        servers: The page servers.
        losses: What is lost of which regions.
        staged: Gets the ids of layers that are no commits, while they are on their way.
        spawn: Runs what nobody waits for.
        rate: What may be read of the others.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        servers: RepairServers,
        losses: Losses,
        staged: set[int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        rate: ByteRate,
    ) -> None:
        self._core = core
        self._log = log
        self._servers = servers
        self._losses = losses
        self._staged = staged
        self._spawn = spawn
        self._rate = rate

    # -- what can be made

    def repairable(self, region: int) -> Repairable | None:
        """What the others can make of a piece's newest version; None: nothing."""
        others = self._core.others_of(region)
        row = self._log.row_with(region, self._log.newest(region)) if others else None
        if row is None:
            return None
        first = self._first_of(region)
        versions = {each: row[each - first] for each in others}
        blocks = BitMap(range(self._log.n_blocks(region)))
        if self._are_copies(region):
            living = [each for each in others if self._is_there(each)]
            if not living:
                return None
            best = min(living, key=lambda each: len(self._lost_of(each)))
            blocks -= self._lost_of(best)
            return Repairable(blocks, {best: versions[best]}, row[region - first])
        if not all(map(self._is_there, others)):
            return None
        for each in others:
            blocks -= self._lost_of(each)
        return Repairable(blocks, versions, row[region - first])

    def repair_set(self, region: int, version: int) -> RepairSet | None:
        """Who can answer for a version of a piece in its home's place."""
        others = self._core.others_of(region)
        row = self._log.row_with(region, version) if others else None
        if row is None or self._lost_of(region):
            return None
        are_copies, first = self._are_copies(region), self._first_of(region)
        there = [each for each in others if self._is_there(each) and not self._lost_of(each)]
        if not there or (not are_copies and len(there) < len(others)):
            return None
        members = tuple((each, row[each - first], self._core.homes_of(each)[0]) for each in there)
        return RepairSet(members, are_copies)

    def stale_parity(self, region: int) -> list[int]:
        """Parity pieces that are no XOR any more where blocks of a piece are lost."""
        if self._are_copies(region) or self._is_parity(region):
            return []
        return [each for each in self._core.others_of(region) if self._is_parity(each)]

    def mates(self, region: int, plan_lost: bool) -> dict[int, tuple[int, bool]]:
        """What a plan for a piece stands on: the loss of each of the others, and, where the piece
        is to lose blocks, whether it is there."""
        return {
            each: (self._losses.number(each), plan_lost and self._is_there(each))
            for each in self._core.others_of(region)
        }

    def is_awaited(self, region: int) -> bool:
        """Whether others of a parity piece's group have no home now, and will have: what of it
        nobody else has they make then."""
        return self._is_parity(region) and any(
            not self._is_there(each) for each in self._core.others_of(region)
        )

    def is_opened_part(self, region: int) -> bool:
        """Whether it is a piece of a variable that can be opened: then others of its pieces may be
        there, and nobody could open the variable without this one. A variable whose pieces are
        being made is made again."""
        whole = self._core.whole_of(region)
        return whole != region and self._core.state(whole) is RegionState.READY

    def remakeable(self, region: int) -> list[int]:
        """Parity pieces of a piece's group that lack blocks, where all its data is there."""
        group = [region, *self._core.others_of(region)]
        data = [each for each in group if not self._is_parity(each)]
        if len(group) < 2 or any(self._lost_of(e) or not self._is_there(e) for e in data):
            return []
        return [e for e in group if self._is_parity(e) and self._is_there(e) and self._lost_of(e)]

    async def look_for_stale_parity(self, remake: Callable[[int], object]) -> None:
        """Now and then. What has ended a rebuild of one may be over: no other server was there, its
        home has moved, or those that give did not answer.

        Args:
            remake: Is called with each parity piece that can be made again.
        """
        pauses_s: dict[int, float] = {}  # commits to its group wait while one is made again
        not_before_s: dict[int, float] = {}
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            found = {e for region in self._losses.regions() for e in self.remakeable(region)}
            for gone in pauses_s.keys() - found:
                del pauses_s[gone], not_before_s[gone]
            for parity in found:
                if not_before_s.get(parity, 0.0) <= now_s:
                    pauses_s[parity] = min(2 * pauses_s.get(parity, LOOK_S), LOOK_MOST_S)
                    not_before_s[parity] = now_s + pauses_s[parity]
                    remake(parity)

    def n_degraded(self) -> int:
        """Pieces that the loss of one node would leave without what makes them again, or that are
        being made again."""
        return sum(map(self._is_degraded, self._core.ready_regions()))

    def _is_degraded(self, record: RegionRecord) -> bool:
        if not record.has_repair:
            return False
        all_pieces = [record.region, *self._core.others_of(record.region)]
        homes = [home for each in all_pieces for home in self._core.homes_of(each)]
        if len(set(homes)) < len(homes):
            return True
        return any(not self._is_there(each) or bool(self._lost_of(each)) for each in all_pieces)

    def _first_of(self, region: int) -> int:
        return self._core.whole_of(region) + 1

    def _are_copies(self, region: int) -> bool:
        record = self._core.record_of(region)
        return record is not None and record.group_width == 1

    def _is_parity(self, region: int) -> bool:
        record = self._core.record_of(region)
        return record is not None and record.is_parity

    def _is_there(self, region: int) -> bool:
        homes = self._core.homes_of(region)
        return (
            self._core.state(region) is RegionState.READY
            and bool(homes)
            and all(self._servers.why_lost(home) is None for home in homes)
        )

    def _lost_of(self, region: int) -> BitMap:
        found = self._losses.of(region)
        return BitMap.deserialize(found.blocks) if found is not None else BitMap()

    # -- making it

    async def bring(
        self, record: RegionRecord, taker: int, attempt: int, found: Repairable
    ) -> None:
        """The taker gets the blocks, and the records that are still known, and is prepared then.

        Args:
            record: The piece's, with its newest version.
            taker: Its next home, which has begun to be that.
            attempt: The taker knows it by this number.
            found: What is to be made.

        Raises:
            What a call of a page server raises: the taker drops what it has.
        """
        region = record.region
        staged: list[Staged] = []  # that nobody has dropped yet
        try:
            await self._bring_blocks(region, taker, attempt, found, staged)
            await self._bring_records(region, taker, attempt, found, staged)
            call = self._servers.take_seal(taker, region, attempt, record.version)
            await self._call(taker, call)
        except BaseException:
            self._spawn(self._give_up(taker, region, attempt))
            raise
        finally:
            self._spawn(self._drop(staged))

    async def _give_up(self, taker: int, region: int, attempt: int) -> None:
        try:
            await asyncio.wait_for(self._servers.take_drop(taker, region, attempt), DROP_S)
        except Exception as failure:  # any: it drops by itself what nobody asks for
            logger.info("page server %#x was not told to drop a repair: %r", taker, failure)

    async def _bring_blocks(
        self, region: int, taker: int, attempt: int, found: Repairable, staged: list[Staged]
    ) -> None:
        with_data = await asyncio.gather(
            *(self._blocks_of(each, version) for each, version in found.versions.items())
        )
        todo = BitMap.union(*with_data) & found.blocks
        most_blocks = self._layer_blocks(found)
        taking: asyncio.Task[None] | None = None
        try:
            while todo:
                some, n_staged = BitMap(todo[:most_blocks]), len(staged)
                try:
                    rows = await self._stage([(found.version, found.versions, some)], staged)
                except GiverFull:
                    if most_blocks <= LEAST_LAYER_BLOCKS:
                        raise
                    most_blocks = max(most_blocks // 4, LEAST_LAYER_BLOCKS)
                    await self._drop(staged[n_staged:])  # what the others have: room is wanted now
                    del staged[n_staged:]
                    continue
                todo -= some
                if not all(map(_is_whole, rows)):
                    raise errors.SnapshotExpired("Another of its group does not have that version.")
                if taking is not None:
                    await taking
                work = self._take(region, taker, attempt, False, rows, staged)
                taking = asyncio.ensure_future(work)
            if taking is not None:
                await taking
        finally:
            if taking is not None and not taking.done():
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    async def _bring_records(
        self, region: int, taker: int, attempt: int, found: Repairable, staged: list[Staged]
    ) -> None:
        """What each version had in the blocks that the next commit replaced, the oldest first.
        Without room for them there are none: they are not worth the newest version."""
        kept_from = {each: await self._oldest(each) for each in found.versions}
        wanted, most_blocks = self._records(region, found, kept_from), self._layer_blocks(found)
        try:
            while wanted:
                some = [wanted.pop(0)]
                n_blocks = len(some[0][2])
                while wanted and len(some) < RECORDS_AT_ONCE:
                    n_blocks += len(wanted[0][2])
                    if n_blocks > most_blocks:
                        break
                    some.append(wanted.pop(0))
                rows = await self._stage(some, staged)
                whole = list(filter(_is_whole, rows))  # the history begins anew behind a gap
                if whole:
                    await self._take(region, taker, attempt, True, whole, staged)
        except NO_ROOM as failure:
            logger.warning("piece %d comes without older versions: %s", region, failure)

    def _records(
        self, region: int, found: Repairable, kept_from: dict[int, int]
    ) -> list[tuple[int, dict[int, int], BitMap]]:
        """(version, versions of the others, blocks) of each that can be made, the oldest first,
        without a gap to the newest."""
        wanted: list[tuple[int, dict[int, int], BitMap]] = []
        n_blocks, at = 0, found.version - 1
        while at >= 0 and len(wanted) < MOST_RECORDS and n_blocks * BLOCK_BYTES < RECORDS_BYTES:
            one = self._record(region, at, found)
            if one is None or any(one[1][each] < kept_from[each] for each in one[1]):
                break
            wanted.append(one)
            n_blocks += len(one[2])
            at -= 1
        wanted.reverse()
        return wanted

    def _record(
        self, region: int, version: int, found: Repairable
    ) -> tuple[int, dict[int, int], BitMap] | None:
        """What is wanted of whom for the record of a version; None: that is not known any more, or
        one of them has lost some of it."""
        changed = self._log.changes(region, version, version + 1)
        row = self._log.row_with(region, version)
        if changed is None or row is None:
            return None
        first = self._first_of(region)
        if any(changed & self._lost_of(each) for each in (region, *found.versions)):
            return None
        return version, {each: row[each - first] for each in found.versions}, changed

    def _layer_blocks(self, found: Repairable) -> int:
        """That each of the others stages at a time."""
        in_a_step = self._rate.bytes_in(STEP_S) / (BLOCK_BYTES * len(found.versions))
        return int(max(LEAST_LAYER_BLOCKS, min(LAYER_BLOCKS, in_a_step)))

    async def _oldest(self, region: int) -> int:
        (home,) = self._core.homes_of(region)
        return await self._call(home, self._servers.oldest_version(home, region))

    async def _blocks_of(self, region: int, version: int) -> BitMap:
        (home,) = self._core.homes_of(region)
        call = self._servers.home_blocks(home, region, version)
        return BitMap.deserialize(await self._call(home, call))

    async def _stage(
        self, wanted: list[tuple[int, dict[int, int], BitMap]], staged: list[Staged]
    ) -> list[Staged]:
        """Each home stages its part of all that is wanted, (version, versions of the members,
        blocks) of each. It is noted before anybody is asked."""
        of_each: dict[int, list[tuple[int, int, bytes]]] = {}
        asked: list[set[int]] = []  # of each that is wanted: a shorter piece may have none of it
        for _, versions, blocks in wanted:
            asked.append(set())
            for member, at in versions.items():
                some = blocks & BitMap(range(self._log.n_blocks(member)))
                if some:
                    asked[-1].add(member)
                    layer = (at, secrets.randbits(64) | 1, bytes(some.serialize()))
                    of_each.setdefault(member, []).append(layer)
        homes = {member: self._core.homes_of(member)[0] for member in of_each}
        for member, layers in of_each.items():
            ids = [commit_id for _, commit_id, _ in layers]
            self._staged.update(ids)
            staged.append((0, [(homes[member], member, commit_id, 0) for commit_id in ids]))
        calls = [
            self._call(homes[member], self._servers.stage_versions(homes[member], member, layers))
            for member, layers in of_each.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        rows: list[Staged] = [(version, []) for version, _, _ in wanted]
        for (member, layers), answer in zip(of_each.items(), answers, strict=True):
            if isinstance(answer, NO_ROOM):
                full = GiverFull(answer.message)
                full.server_id = homes[member]
                raise full from answer
            if isinstance(answer, BaseException):
                raise answer
            taken = iter(zip(layers, answer, strict=True))
            for members, row in zip(asked, rows, strict=True):
                if member in members:
                    (_, commit_id, _), layer_bytes = next(taken)
                    row[1].append((homes[member], member, commit_id, layer_bytes))
        return rows

    async def _take(
        self,
        region: int,
        taker: int,
        attempt: int,
        are_records: bool,
        rows: list[Staged],
        staged: list[Staged],
    ) -> None:
        """Takes them once the budget has the bytes."""

        def call(some: list[Staged]) -> Coroutine[Any, Any, None]:
            return self._servers.take_repaired(taker, region, attempt, are_records, some)

        n_bytes = sum(layer_bytes for _, layers in rows for *_, layer_bytes in layers)
        waiting = asyncio.ensure_future(self._rate.take(n_bytes))
        try:
            while not (await asyncio.wait({waiting}, timeout=SAY_S))[0]:
                await self._call(taker, call([]))  # it goes on
        finally:
            waiting.cancel()
        await self._call(taker, call(rows))
        ids = {commit_id for _, layers in rows for _, _, commit_id, _ in layers}
        done = [each for each in staged if any(layer[2] in ids for layer in each[1])]
        staged[:] = [each for each in staged if each not in done]
        self._spawn(self._drop(done))

    async def _call(self, server_id: int, call: Coroutine[Any, Any, _T]) -> _T:
        return await watched(self._servers, server_id, call, CALL_S)

    async def _drop(self, staged: Iterable[Staged]) -> None:
        """They are there, or of no use."""
        by_member: dict[tuple[int, int], list[int]] = {}
        for _, layers in staged:
            for home, member, commit_id, _ in layers:
                by_member.setdefault((home, member), []).append(commit_id)
        for (home, member), ids in by_member.items():
            self._staged.difference_update(ids)
            if not home:
                continue
            try:
                await asyncio.wait_for(self._servers.drop_layers(home, member, ids), DROP_S)
            except Exception as failure:  # any: it asks what becomes of a staged layer
                logger.info("page server %#x was not told to drop layers: %r", home, failure)

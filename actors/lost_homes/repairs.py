"""A lost piece is made again from the others of its group. No Ray.

The group's other pieces are read at the versions that one version of the variable names: so what
they make is one state, whatever commits do meanwhile. Each home stages the same blocks; the new
home pulls them, and writes their XOR. Where there are copies one of them is enough.

    blocks   -> those that hold data in any of them, some at a time, no faster than
                ``RATE_BYTES_S``
    records  -> of the history, the newest first, as far as the homes still have those versions

Nothing here decides: ``rebuilds.py`` does, and writes down what came of it.

(Camelot, section 3.5. Groups: ``clamor_ray._redundancy.groups``.)

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pyroaring import BitMap

from clamor_ray._protocol.messages import BLOCK_BYTES, RegionRecord, RepairSet
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.watched_calls import Examined, watched
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

LAYER_BLOCKS = (32 << 20) // BLOCK_BYTES  # that one home stages at a time
RATE_BYTES_S = 512 << 20  # of what one repair writes; readers and writers need the links, too
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
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        servers: RepairServers,
        losses: Losses,
        staged: set[int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._core = core
        self._log = log
        self._servers = servers
        self._losses = losses
        self._staged = staged
        self._spawn = spawn

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
        try:
            await self._bring_blocks(region, taker, attempt, found)
            await self._bring_records(region, taker, attempt, found.version)
            call = self._servers.take_seal(taker, region, attempt, record.version)
            await self._call(taker, call)
        except BaseException:
            self._spawn(self._give_up(taker, region, attempt))
            raise

    async def _give_up(self, taker: int, region: int, attempt: int) -> None:
        try:
            await asyncio.wait_for(self._servers.take_drop(taker, region, attempt), DROP_S)
        except Exception as failure:  # any: it drops by itself what nobody asks for
            logger.info("page server %#x was not told to drop a repair: %r", taker, failure)

    async def _bring_blocks(self, region: int, taker: int, attempt: int, found: Repairable) -> None:
        with_data = await asyncio.gather(
            *(self._blocks_of(each, version) for each, version in found.versions.items())
        )
        todo = BitMap.union(*with_data) & found.blocks
        n_bytes, loop = 0, asyncio.get_running_loop()
        begun_s = loop.time()
        taking: asyncio.Task[None] | None = None
        try:
            while todo:
                some = BitMap(todo[:LAYER_BLOCKS])
                todo -= some
                staged = await self._stage([(found.version, found.versions, some)])
                if taking is not None:
                    await taking
                taking = asyncio.ensure_future(self._take(region, taker, attempt, False, staged))
                n_bytes += len(some) * BLOCK_BYTES
                early_s = n_bytes / RATE_BYTES_S - (loop.time() - begun_s)
                await asyncio.sleep(max(0.0, early_s))
            if taking is not None:
                await taking
        finally:
            if taking is not None and not taking.done():
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    async def _bring_records(self, region: int, taker: int, attempt: int, version: int) -> None:
        """What each version had in the blocks that the next commit replaced."""
        staged: list[Staged] = []
        n_bytes, at, is_known = 0, version - 1, True
        while is_known and at >= 0 and version - at <= MOST_RECORDS and n_bytes < RECORDS_BYTES:
            wanted = []
            for older in range(at, max(-1, at - RECORDS_AT_ONCE), -1):
                one = self._record(region, older)
                if one is None:
                    break
                wanted.append(one)
            if not wanted:
                break
            rows = await self._stage(wanted)
            known = list(itertools.takewhile(_is_whole, rows))
            is_known = len(known) == len(wanted)
            for row in rows[: len(known)]:
                staged.append(row)
                n_bytes += max(layer_bytes for *_, layer_bytes in row[1])
            self._spawn(self._drop(row for row in rows[len(known) :]))
            at -= len(wanted)
        staged.reverse()
        for begin in range(0, len(staged), RECORDS_AT_ONCE):
            some = staged[begin : begin + RECORDS_AT_ONCE]
            await self._take(region, taker, attempt, True, some)

    def _record(self, region: int, version: int) -> tuple[int, dict[int, int], BitMap] | None:
        """What is wanted of whom for the record of a version; None: that is not known any more."""
        changed = self._log.changes(region, version, version + 1)
        row = self._log.row_with(region, version)
        if changed is None or row is None:
            return None
        first = self._first_of(region)
        others = self._core.others_of(region)
        if self._are_copies(region):
            others = [each for each in others if self._is_there(each)][:1]
        versions = {each: row[each - first] for each in others}
        return version, versions, changed

    async def _blocks_of(self, region: int, version: int) -> BitMap:
        (home,) = self._core.homes_of(region)
        call = self._servers.home_blocks(home, region, version)
        return BitMap.deserialize(await self._call(home, call))

    async def _stage(self, wanted: list[tuple[int, dict[int, int], BitMap]]) -> list[Staged]:
        """Each home stages its part of all that is wanted, (version, versions of the members,
        blocks) of each."""
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
        ids = [commit_id for layers in of_each.values() for _, commit_id, _ in layers]
        self._staged.update(ids)
        calls = {member: self._stage_at(member, layers) for member, layers in of_each.items()}
        found = await asyncio.gather(*calls.values(), return_exceptions=True)
        rows: list[Staged] = [(version, []) for version, _, _ in wanted]
        failed: BaseException | None = None
        for (member, layers), answer in zip(of_each.items(), found, strict=True):
            (home,) = self._core.homes_of(member) or (0,)
            if isinstance(answer, BaseException):
                failed = answer
                answer = [0] * len(layers)
            taken = iter(zip(layers, answer, strict=True))
            for members, row in zip(asked, rows, strict=True):
                if member in members:
                    (_, commit_id, _), layer_bytes = next(taken)
                    row[1].append((home, member, commit_id, layer_bytes))
        if failed is not None:
            self._spawn(self._drop(rows))
            raise failed
        return rows

    async def _stage_at(self, member: int, layers: list[tuple[int, int, bytes]]) -> list[int]:
        (home,) = self._core.homes_of(member)
        return await self._call(home, self._servers.stage_versions(home, member, layers))

    async def _take(
        self, region: int, taker: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        try:
            call = self._servers.take_repaired(taker, region, attempt, are_records, staged)
            await self._call(taker, call)
        finally:
            self._spawn(self._drop(staged))

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

"""Versions of variables: which there are, commits, and what differs between two."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Final

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native.pieced_client import loss_of_pieces
from clamor_ray._protocol.messages import CommitRequest, Committed, Latest, RegionRecord
from clamor_ray._spans.record import span
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.commits.request_validation import check_request
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds

COMMIT_TRIES: Final = 3


class Versions:
    """See the file's head.

    Args:
        log: What is decided.
        journal: Where that is written first.
        commits: Carries them out.
        rebuilds: What of lost homes must be waited for.
        timeout_s: What a commit has that does not say so.
        check_outcome: Is asked before anybody hears that a layer belongs to no commit.
    """

    def __init__(
        self,
        log: CommitLog,
        journal: Journal,
        commits: Commits,
        rebuilds: Rebuilds,
        timeout_s: float,
        check_outcome: Callable[[int], object] = lambda commit_id: None,
    ) -> None:
        self._log = log
        self._journal = journal
        self._commits = commits
        self._rebuilds = rebuilds
        self._check_outcome = check_outcome
        self._timeout_s = timeout_s

    def latest(self, regions: list[int]) -> list[Latest]:
        """The newest version of each variable, with its plan and payload.

        Raises:
            FreedError: One of them was freed, or never existed.
        """
        return [self._log.latest(region) for region in regions]

    async def at(self, region: int, version: int) -> Latest:
        """One version of a variable, with its plan and payload.

        Raises:
            FreedError, NoVersionError, SnapshotExpired: See ``CommitLog.at``; the last also where
                the home says that it keeps the version's blocks no longer.
            HomeLostError: Blocks of the variable are nowhere.
        """
        found = self._log.at(region, version)
        if (lost := self._rebuilds.verdict(region)) is not None:
            raise lost
        row = self._row(region, version)
        kept = (
            self._commits.check_kept(part, at)
            for part, at in row
            if at < self._log.newest(part) and (at or not self._rebuilds.has_file(part))
        )
        await asyncio.gather(*kept)
        blocks = self.lost_blocks(region)
        return found if blocks is None else dataclasses.replace(found, loss=blocks.number)

    def _row(self, region: int, version: int) -> list[tuple[int, int]]:
        """(region, version) of all that has bytes of a variable's version."""
        pieces = self._log.data_of(region)
        if not pieces:
            return [(region, version)]
        return list(zip(pieces, self._log.row(region, version), strict=False))

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        """Why the variable, or blocks of it, are lost, if they are."""
        pieces = self._log.data_of(region)
        if not pieces:
            return self._rebuilds.why_lost(region)
        if (verdict := next(filter(None, map(self._rebuilds.verdict, pieces)), None)) is not None:
            return verdict
        blocks = self.lost_blocks(region)
        return blocks.error(self._log.label(region)) if blocks is not None else None

    def all_lost(self, records: Iterable[RegionRecord]) -> dict[int, str]:
        """Why, of each variable among these regions that is lost, or away, or lacks blocks."""
        variables = [each.region for each in records if not each.piece_of]
        found = {region: self.why_lost(region) for region in variables}
        return {region: why.message for region, why in found.items() if why is not None}

    def lost_blocks(self, region: int) -> LostBlocks | None:
        """Which blocks of its newest version are lost, if any are. Where all of it is, ``why_lost``
        says so. Of a variable in pieces, the cause is that of its first piece with a loss.
        """
        pieces = self._log.data_of(region)
        if not pieces:
            return self._rebuilds.lost_blocks(region)
        blocks = BitMap()
        numbers = []
        first_block, some = 0, None
        for piece in pieces:
            found = self._rebuilds.lost_blocks(piece)
            numbers.append(found.number if found is not None else 0)
            if found is not None:
                blocks |= BitMap.deserialize(found.blocks).shift(first_block)
                some = some or found
            first_block += self._log.n_blocks(piece)
        if some is None:
            return None
        return dataclasses.replace(
            some,
            number=loss_of_pieces(numbers),
            n_blocks=first_block,
            blocks=bytes(blocks.serialize()),
        )

    async def may_commit(self, request: CommitRequest) -> None:
        """Raises what ``commit`` would raise now; its layers need not be staged yet."""
        check_request(request)
        await self._rebuilds.settle_all(request, self._deadline_of(request))
        self._commits.may_commit(request)

    async def commit(self, request: CommitRequest) -> Committed:
        """Makes all writes of a request the newest versions, or none. See ``Commits.commit``.

        Where a home is lost it waits for the new one.
        """
        check_request(request)
        # The last: of a task's the first is the record of its idempotency key.
        region = request.writes[-1].region if request.writes else None
        with span("", "commit at registry", region=region):
            return await self._commit(request)

    async def _commit(self, request: CommitRequest) -> Committed:
        came_s = time.monotonic()
        deadline = self._deadline_of(request)
        for left in reversed(range(COMMIT_TRIES)):
            await self._rebuilds.settle_all(request, deadline)
            now_s = time.monotonic()
            left_s = max(0.1, deadline - now_s)
            ago_s = request.staged_ago_s + now_s - came_s
            try:
                return await self._commits.commit(
                    dataclasses.replace(request, timeout_s=left_s, staged_ago_s=ago_s)
                )
            except errors.HomeLostError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _deadline_of(self, request: CommitRequest) -> float:
        return time.monotonic() + (request.timeout_s or self._timeout_s)

    async def bring(self, request: CommitRequest) -> int:
        """The home of a region fetches its layer before the commit is asked for. See
        ``Commits.bring``.

        Where the home is lost it waits for the new one.
        """
        check_request(request)
        deadline = self._deadline_of(request)
        for left in reversed(range(COMMIT_TRIES)):
            await self._rebuilds.settle_all(request, deadline)
            try:
                return await self._commits.bring(request)
            except errors.HomeLostError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def outcome(self, commit_id: int, by_writer: bool = False) -> dict[int, int]:
        """The versions that a commit made; {}: it was aborted, at the latest by this question.

        Args:
            by_writer: Nobody else brings layers of it (``Commits.bring``) any more.

        Raises:
            JournalFullError, ServerUnavailableError: Ask again.
        """
        self._rebuilds.check_outcome(commit_id)
        self._check_outcome(commit_id)
        return await self._commits.outcome(commit_id, by_writer)

    def drop_keys(self, tokens: list[bytes]) -> int:
        """Forgets the idempotency keys of tasks of which no attempt will begin any more.

        One that runs still is told that its task was cancelled, and commits nothing from now on,
        whether it has committed before or not.

        Args:
            tokens: of the tasks, 16 bytes each; those without keys may be among them.

        Returns:
            How many keys that were.

        Raises:
            JournalFullError: They are all still there.
        """
        keys = self._log.keys_of(tokens)
        if tokens:
            self._journal.drop(keys, tokens, self._log.dropped_too_many(tokens))
        self._log.drop(tokens)
        return len(keys)

    def changes(self, region: int, from_version: int, to_version: int) -> bytes | None:
        """The blocks in which two versions of a region may differ, as a serialized BitMap.

        Returns:
            None where that is not known any more.

        Raises:
            FreedError, NoVersionError: See ``CommitLog.changes``.
        """
        blocks = self._log.changes(region, from_version, to_version)
        return None if blocks is None else bytes(blocks.serialize())

    def published(self, region: int, since: int) -> list[tuple[int, int]]:
        """(version, commit id) of each commit of a region after a version, in order.

        Raises:
            FreedError, SnapshotExpired: See ``CommitLog.published``.
        """
        return self._log.published(region, since)

    def settled(self, region: int) -> int:
        """The newest version that every home of a region has acknowledged; 0 while one is lost.

        Raises:
            FreedError: See ``CommitLog.settled``.
        """
        return self._log.settled(region)

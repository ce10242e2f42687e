"""Pieces that are homed where they are first written. No Ray.

A piece of zeros that no commit has written is nothing but the word of its home, so it moves in a
few calls. It does so just before its first commit is decided, to the page server that has the
commit's layer: then the layer need not travel. A piece that cannot be moved at once, because that
server is drained, lost, or has no descriptors, stays where it is; so does one that is written
already.

Only the registry's memory knows which pieces follow their writers. After its restart those that
nobody has written stay where they are: that costs a layer's way, and nothing else.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from clamor_ray._labels import label
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import CommitRequest
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.moves.drains import MovesOne
from clamor_ray.actors.moves.moves import MoveFailed

logger = logging.getLogger("clamor_ray.registry")

MOVE_S = 2.0  # a commit waits no longer for that


class FirstWrites:
    """See the file's head.

    Args:
        log: Which pieces are written.
        moves: Moves one.
        label: A variable for people, by its id.
    """

    def __init__(
        self, log: CommitLog, moves: MovesOne, label: Callable[[int], str] = label
    ) -> None:
        self._log = log
        self._moves = moves
        self._label = label
        self._pieces: set[int] = set()

    def follow(self, pieces: Iterable[int]) -> None:
        """These are homed where they are first written."""
        self._pieces.update(pieces)

    def forget(self, region: int) -> None:
        """It is gone."""
        self._pieces.discard(region)

    async def before_commit(self, request: CommitRequest) -> CommitRequest:
        """Moves what this commit is the first to write. It never fails.

        Returns:
            The request, whose layers are as much older by now.
        """
        due = [write for write in request.writes if write.region in self._pieces]
        if not due:
            return request
        began_s = time.monotonic()
        await asyncio.gather(*(self._move(write.region, write.staged_at) for write in due))
        ago_s = request.staged_ago_s + time.monotonic() - began_s
        return replace(request, staged_ago_s=ago_s)

    async def _move(self, region: int, writer: int) -> None:
        self._pieces.discard(region)
        if self._log.newest(region):
            return
        try:
            await asyncio.wait_for(self._moves.move(region, writer), MOVE_S)
        except (MoveFailed, asyncio.TimeoutError) as failure:
            logger.info("%s stays where it is: %s", self._label(region), cause_of(failure))

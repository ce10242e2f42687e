"""Who waits for newer versions: each page server whose node has watchers, by one call that lasts.

A page server asks with the versions that it knows, and is answered when one of them is old, or the
time is over. So a commit is one message to each node that watches what it changed, and nothing is
kept here that a restart could lose: who asks again says again what it knows.

Safety: everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from clamor_ray._protocol.messages import NEWS_FREED
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.errors import FreedError

MOST_WAIT_S: Final = 60.0


class _Wait:
    def __init__(self, regions: frozenset[int]) -> None:
        self.regions = regions
        self.over = asyncio.Event()


class News:
    """See the file's head.

    Args:
        log: Says when a variable has changed.
    """

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._waits: dict[int, _Wait] = {}  # by page server
        log.when_changed = self._changed

    async def newer(
        self, server_id: int, known: dict[int, int], wait_s: float = MOST_WAIT_S
    ) -> dict[int, int]:
        """Waits until one of these variables has a newer version, or is freed.

        A call that comes again, or late, does no harm: of a page server's calls the last one waits,
        and ends those before it.

        Args:
            server_id: Who asks.
            known: The version that it knows of each variable.
            wait_s: At most so long, and at most ``MOST_WAIT_S``.

        Returns:
            The newest version of those that have a newer one, ``NEWS_FREED`` of those that are
            freed; {} where the time is over, or a later call waits.
        """
        wait = _Wait(frozenset(known))
        if (earlier := self._waits.pop(server_id, None)) is not None:
            earlier.over.set()
        if found := self._found(known):
            return found
        self._waits[server_id] = wait
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wait.over.wait(), max(0.0, min(wait_s, MOST_WAIT_S)))
        finally:
            if self._waits.get(server_id) is wait:
                del self._waits[server_id]
        return self._found(known)

    def _found(self, known: dict[int, int]) -> dict[int, int]:
        found = {}
        for region, version in known.items():
            try:
                newest = self._log.newest_open(region)
            except FreedError:
                newest = NEWS_FREED
            if newest == NEWS_FREED or newest > version:
                found[region] = newest
        return found

    def _changed(self, region: int) -> None:
        for wait in self._waits.values():
            if region in wait.regions:
                wait.over.set()

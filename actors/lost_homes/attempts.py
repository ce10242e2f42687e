"""What the tries of one rebuild know of each other, and how they call page servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clamor_ray import errors
from clamor_ray._protocol.refusals import NO_ROOM
from clamor_ray.actors.lost_homes.repairs import Repairable
from clamor_ray.actors.lost_homes.watched_calls import TELL_S, Examined, watched

logger = logging.getLogger("clamor_ray.registry")

_T = TypeVar("_T")


class Again(Exception):
    """It failed for now; the text says why."""


@dataclass
class Attempts:
    """What the tries of one rebuild know of those before.

    Args:
        refused: Servers that had no room to be the home, since all have last been asked.
        made: What a source is making, or has made, and for which new home.
        heading: What ends when the region is not on its way to a new home any more, in this try.
        failed: Why the source does not make it again: it is not asked any more.
        group: What the others of its group make, at this try.
        mates: See ``Repairs.mates``, at this try.
        number: Of the attempt, at the new home.
    """

    refused: set[int] = field(default_factory=set)
    made: tuple[int, list[Any]] | None = None
    heading: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    failed: errors.SourceError | None = None
    group: Repairable | None = None
    mates: dict[int, tuple[int, bool]] = field(default_factory=dict)
    number: int = field(default_factory=lambda: secrets.randbits(63) | 1)


class Calls:
    """Calls of page servers, whose failures a rebuild tells apart.

    Args:
        servers: The page servers.
    """

    def __init__(self, servers: Examined) -> None:
        self._servers = servers

    async def watched(self, server_id: int, call: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """See the function ``watched``.

        Raises:
            Again: The server is lost.
        """
        return await watched(
            self._servers, server_id, call, timeout_s, lambda what: Again(f"the {what}")
        )

    async def needed(
        self,
        server_id: int,
        call: Coroutine[Any, Any, _T],
        timeout_s: float,
        refused: set[int] | None = None,
    ) -> _T:
        """As ``watched``; what fails for now is ``Again``. refused: who has no room."""
        try:
            return await self.watched(server_id, call, timeout_s)
        except (Again, errors.SourceError):
            raise
        except NO_ROOM as failure:
            if refused is not None:
                refused.add(server_id)
            raise Again(str(failure)) from failure
        except Exception as failure:  # any: a server that gives may be restarting, or lost
            raise Again(f"page server {server_id:#x}: {failure!r}") from failure

    async def say(self, server_id: int, call: Coroutine[Any, Any, None], what: str) -> None:
        """As a favour: it asks by itself when it needs to know."""
        try:
            await asyncio.wait_for(call, TELL_S)
        except Exception as failure:  # any
            logger.info("page server %#x was not told %s: %r", server_id, what, failure)

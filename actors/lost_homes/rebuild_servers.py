"""What a rebuild asks of page servers (``rebuilds.py``). ``ray_homes`` calls them by Ray."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from pyroaring import BitMap

from clamor_ray._protocol.messages import RebuildOrder, RegionRecord
from clamor_ray._protocol.source import Source
from clamor_ray.actors.lost_homes.rebuild_plan import Holding
from clamor_ray.actors.lost_homes.repairs import RepairServers
from clamor_ray.actors.lost_homes.watched_calls import watched

logger = logging.getLogger("clamor_ray.registry")

ASK_S = 5.0  # what a server has


class Servers(RepairServers, Protocol):
    """The page servers, by id. Exceptions but those named mean: not now, try again."""

    def why_lost(self, server_id: int) -> str | None:
        """The reason, for one that will not come back."""

    async def examine(self, server_id: int) -> None:
        """Finds out whether a server that does not answer is lost."""

    async def holdings(
        self, server_id: int, region: int, commits: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        """What it has: (version, serialized BitMap).

        Args:
            commits: (version, commit id) of the last: its layers of these count.
        """

    async def stage_cached(
        self, server_id: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        """It makes a layer; the bytes of that."""

    async def rebuild(self, server_id: int, order: RebuildOrder, made: list[Any]) -> None:
        """It gets ready to be the home.

        Args:
            server_id: The server.
            order: What comes from where.
            made: Of ``make_again`` or ``bring``, once it is there; or empty.

        Raises:
            SourceError: The source cannot make it again. Nobody need try it anew.
            OutOfMemoryError, DescriptorLimitError, NoSpaceError: It has no room.
        """

    async def rebuild_drop(self, server_id: int, region: int) -> None:
        """The region is lost for good: it lets go of what it has got ready, if it has, and refuses
        who opens the region."""

    async def is_home(self, server_id: int, region: int) -> bool:
        """Whether it has the region's blocks, as its home."""

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        """It learns of the new homes."""

    async def drop(self, server_id: int, commit_id: int, regions: list[int]) -> None:
        """It drops a layer."""

    def make_again(self, server_id: int, source: Source) -> list[Any]:
        """Begins to run a source on that node."""

    def bring(self, server_id: int, object_refs: list[Any]) -> list[Any]:
        """Has Ray bring an object to that node, or make it again."""

    async def until_made(self, made: list[Any]) -> None:
        """Waits until it is there, or has failed: ``rebuild`` says that."""


async def all_holdings(
    servers: Servers, server_ids: list[int], region: int, commits: list[tuple[int, int]]
) -> tuple[list[Holding], list[int]]:
    """What all have of a region, and which of them live and do not say so.

    Args:
        servers: The page servers.
        server_ids: Who is asked.
        region: The region.
        commits: As in ``Servers.holdings``.
    """
    calls = (
        watched(servers, each, servers.holdings(each, region, commits), ASK_S)
        for each in server_ids
    )
    answers = await asyncio.gather(*calls, return_exceptions=True)
    holdings, silent = [], []
    for server_id, answer in zip(server_ids, answers, strict=True):
        if isinstance(answer, BaseException):
            logger.warning("page server %#x does not say what it has: %r", server_id, answer)
            if servers.why_lost(server_id) is None:
                silent.append(server_id)
            continue
        holdings += [
            Holding(server_id, version, BitMap.deserialize(blocks)) for version, blocks in answer
        ]
    return holdings, silent

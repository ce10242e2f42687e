"""The registry as a page server's core wants it: each question is one call of the actor."""

from __future__ import annotations

import asyncio
from typing import Any

from clamor_ray._protocol.messages import LocateAnswer, LookupAnswer, RegionRecord, RepairSet
from clamor_ray.actors.lost_homes.task_end_log import TaskEnd


class RegistryResolver:
    """See ``engine_like.Resolver``. Deadlines are the caller's.

    Args:
        registry: The registry's actor handle.
        server_id: Who asks.
    """

    def __init__(self, registry: Any, server_id: int) -> None:
        self._registry = registry
        self._server_id = server_id

    async def lookup(self, region: int) -> LookupAnswer:
        reference = self._registry.lookup.remote(region, self._server_id)
        answer: LookupAnswer = await asyncio.wrap_future(reference.future())
        return answer

    async def locate(self, server_id: int, since_epoch: int) -> LocateAnswer:
        reference = self._registry.locate.remote(server_id, since_epoch)
        answer: LocateAnswer = await asyncio.wrap_future(reference.future())
        return answer

    async def rehomed(self, region: int, server_id: int) -> RegionRecord | None:
        reference = self._registry.rehomed.remote(region, server_id)
        answer: RegionRecord | None = await asyncio.wrap_future(reference.future())
        return answer

    async def regions_idle(self, regions: list[int]) -> None:
        reference = self._registry.regions_idle.remote(regions, self._server_id)
        await asyncio.wrap_future(reference.future())

    async def task_ended(self, task: str, end: TaskEnd) -> None:
        await asyncio.wrap_future(self._registry.task_ended.remote(task, end).future())

    async def changes(self, region: int, from_version: int, to_version: int) -> bytes | None:
        reference = self._registry.changes.remote(region, from_version, to_version)
        answer: bytes | None = await asyncio.wrap_future(reference.future())
        return answer

    async def published(self, region: int, since: int) -> list[tuple[int, int]]:
        reference = self._registry.published.remote(region, since)
        answer: list[tuple[int, int]] = await asyncio.wrap_future(reference.future())
        return answer

    async def settled(self, region: int) -> int:
        reference = self._registry.settled.remote(region)
        version: int = await asyncio.wrap_future(reference.future())
        return version

    async def repair_of(self, region: int, version: int) -> RepairSet | None:
        reference = self._registry.repair_of.remote(region, version)
        answer: RepairSet | None = await asyncio.wrap_future(reference.future())
        return answer

    async def newer(self, known: dict[int, int], wait_s: float) -> dict[int, int]:
        reference = self._registry.newer.remote(self._server_id, known, wait_s)
        answer: dict[int, int] = await asyncio.wrap_future(reference.future())
        return answer

    async def outcome(self, commit_id: int) -> dict[int, int]:
        reference = self._registry.outcome.remote(commit_id)
        answer: dict[int, int] = await asyncio.wrap_future(reference.future())
        return answer

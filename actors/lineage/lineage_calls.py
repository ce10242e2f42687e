"""The registry's calls about lineage: the registry has them beside its own."""

from __future__ import annotations

from clamor_ray.actors.lineage.lineage import LineageCounters
from clamor_ray.actors.lineage.lineage_service import LineageService


class LineageCalls:
    """See the file's head; ``LineageService`` says what each does."""

    _lineage: LineageService

    async def lineage_open(self, packed: bytes) -> None:
        """See ``LineageService.open``."""
        await self._lineage.open(packed)

    async def lineage_close(self, collections: list[int]) -> None:
        """See ``LineageService.close``."""
        await self._lineage.close(collections)

    async def note_attempt(self, packed: bytes) -> None:
        """See ``LineageService.note``."""
        await self._lineage.note(packed)

    async def floors_at(self, server_id: int) -> dict[int, int]:
        """See ``LineageService.floors_at``."""
        return self._lineage.floors_at(server_id)

    async def check_output(self, packed: bytes) -> bytes | None:
        """See ``LineageService.check_output``."""
        return await self._lineage.check_output(packed)

    async def reads_of(self, region: int) -> list[bytes]:
        """See ``LineageService.reads_of``."""
        return self._lineage.reads_of(region)

    async def attempts_of(self, run_id: int) -> list[bytes]:
        """See ``LineageService.attempts_of``."""
        return self._lineage.attempts_of(run_id)

    async def lineage_counters(self) -> LineageCounters:
        """See ``LineageService.counters``."""
        return self._lineage.counters()

"""The page servers as ``commits`` wants them: by id, through Ray's actor calls.

Ray tries a call again for as long as it restarts the actor. What it gives up becomes an exception
of ours where it means something, and stays Ray's where it means "not now".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from clamor_ray import errors
from clamor_ray.actors.messages import Publication, ServerInfo, ServerLost, Write
from clamor_ray.actors.registry_core import RegistryCore


async def answer_of(reference: Any) -> Any:
    """What an actor of ours answers.

    Raises:
        ClamorError: What it raised, without Ray's wrapping.
        RayError: It was not reached.
    """
    try:
        return await reference
    except RayTaskError as failure:
        cause = getattr(failure, "cause", None)
        if isinstance(cause, errors.ClamorError):
            raise cause from None
        raise


class RayHomes:
    """See ``commits.Homes``.

    Args:
        core: Knows who is home of what, and who is lost.
        handles: The page servers' actors, by id.
        lose: A page server's actor is dead for good.
        examine: Asks Ray what became of a page server.
    """

    def __init__(
        self,
        core: RegistryCore,
        handles: dict[int, Any],
        lose: Callable[[int, str], object],
        examine: Callable[[ServerInfo], Awaitable[object]],
    ) -> None:
        self._core = core
        self._handles = handles
        self._lose = lose
        self._examine = examine

    def of(self, region: int) -> tuple[int, ...]:
        return self._core.homes_of(region)

    def why_lost(self, server_id: int) -> str | None:
        answer = self._core.locate(server_id)
        return answer.reason if isinstance(answer, ServerLost) else None

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        await self._call(home, "pull", commit_id, write.region, write.staged_at, write.layer_bytes)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        known: list[tuple[int, int]] = await self._call(home, "publish", items)
        return known

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        await self._call(home, "drop_staged", commit_id, regions)

    async def examine(self, home: int) -> None:
        answer = self._core.locate(home)
        if isinstance(answer, ServerInfo) and home in self._handles:
            await self._examine(answer)

    async def _call(self, home: int, method: str, *arguments: Any) -> Any:
        handle = self._handles.get(home)
        if handle is None:
            raise errors.ServerUnavailableError(f"The page server {home:#x} is not known yet.")
        try:
            return await answer_of(getattr(handle, method).remote(*arguments))
        except ActorDiedError as failure:
            self._lose(home, f"its actor is dead: {failure}")
            raise errors.HomeLostError(f"The page server {home:#x} is gone: {failure}") from failure

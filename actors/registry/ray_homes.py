"""The page servers as ``commits`` wants them: by id, through Ray's actor calls.

Ray tries a call again for as long as it restarts the actor. What it gives up becomes an exception
of ours where it means something, and stays Ray's where it means "not now".
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._objects import block_sets
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    Publication,
    RebuildOrder,
    RegionRecord,
    ServerInfo,
    ServerLost,
    StoreState,
    Write,
)
from clamor_ray._protocol.source import Source, make_again
from clamor_ray.actors.commits.commits import NotKnownYet
from clamor_ray.actors.lost_homes.repairs import Staged
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

SOURCE_RETRIES = 3
REGIONS_SAID = 6


def _make(what: bytes, digest: bytes) -> tuple[Any, bool]:
    """What a source makes, and a word for who only waits for it: the first may be large."""
    return make_again(what, digest), True


def _is_here(found: Any) -> bool:
    """Ray has brought the argument to this node."""
    return True


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
    """See ``commits.CommitHomes``, ``rebuild_servers.Servers`` and ``move_servers.MoveServers``.

    Args:
        core: Knows who is home of what, and who is lost.
        handles: The page servers' actors, by id.
        lose: A page server's actor is dead for good.
        examine: Asks Ray what became of a page server.
        label: A variable for people, by its id.
        before_told: Returns when all that has been decided may be told (``Journal.synced``).
    """

    def __init__(
        self,
        core: RegistryCore,
        handles: dict[int, Any],
        lose: Callable[[int, str], object],
        examine: Callable[[ServerInfo], Awaitable[object]],
        label: Callable[[int], str] = label,
        *,
        before_told: Callable[[], Awaitable[None]],
    ) -> None:
        self._core = core
        self._handles = handles
        self._lose = lose
        self._examine = examine
        self._label = label
        self._before_told = before_told

    def of(self, region: int) -> tuple[int, ...]:
        return self._core.homes_of(region)

    def why_lost(self, server_id: int) -> str | None:
        answer = self._core.locate(server_id)
        return answer.reason if isinstance(answer, ServerLost) else None

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        about = f"of {block_sets.of_variable(self._label(write.region), write.blocks)}"
        arguments = (commit_id, write.region, write.staged_at, write.layer_bytes)
        await self._call(home, "pull", *arguments, about=about)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        known: list[tuple[int, int]] = await self._call(
            home, "publish", items, about=self._of(*(item.region for item in items))
        )
        return known

    async def oldest_version(self, home: int, region: int) -> int:
        oldest: int = await self._call(home, "oldest_version", region, about=self._of(region))
        return oldest

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        await self._call(home, "drop_staged", commit_id, regions, about=self._of(*regions))

    async def keep(self, home: int, region: int) -> None:
        """The home has the region's bytes on its disk, with its name, when this returns.

        Raises:
            NoSpaceError: There is no room.
            HomeLostError: The home is gone.
        """
        await self._call(home, "keep", region, about=self._of(region))

    async def retain(self, home: int, floors: dict[int, int | None]) -> None:
        await self._call(home, "retain", floors, about=self._of(*floors))

    async def examine(self, home: int) -> None:
        answer = self._core.locate(home)
        if isinstance(answer, ServerInfo) and home in self._handles:
            await self._examine(answer)

    async def holdings(
        self, server_id: int, region: int, commits: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        record = self._core.lookup(region, server_id)  # it is told when the region is freed
        if not isinstance(record, RegionRecord):
            return []
        found: list[tuple[int, bytes]] = await self._call(
            server_id, "holdings", record, commits, about=f"with blocks {self._of(region)}"
        )
        return found

    async def stage_cached(
        self, server_id: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        layer_bytes: int = await self._call(
            server_id,
            "stage_cached",
            region,
            version,
            commit_id,
            blocks,
            about=f"with {block_sets.of_variable(self._label(region), blocks)}",
        )
        return layer_bytes

    async def rebuild(self, server_id: int, order: RebuildOrder, made: list[Any]) -> None:
        await self._call(server_id, "rebuild", order, made[:1], about=self._of(order.record.region))

    async def rebuild_drop(self, server_id: int, region: int) -> None:
        await self._call(server_id, "rebuild_drop", region, about=self._of(region))

    async def is_home(self, server_id: int, region: int) -> bool:
        return bool(await self._call(server_id, "is_home", region, about=self._of(region)))

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        await self._call(server_id, "rehome", record, about=self._of(record.region))

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        about = self._of(region)
        return bytes(await self._call(giver, "home_blocks", region, version, about=about))

    async def stage_home(
        self, giver: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        about = f"with {block_sets.of_variable(self._label(region), blocks)}"
        arguments = (region, version, commit_id, blocks)
        layer_bytes: int = await self._call(giver, "stage_home", *arguments, about=about)
        return layer_bytes

    async def stage_records(
        self, giver: int, region: int, first_version: int, commit_ids: list[int], most_bytes: int
    ) -> list[int]:
        arguments = (region, first_version, commit_ids, most_bytes)
        layers_bytes: list[int] = await self._call(
            giver, "stage_records", *arguments, about=self._of(region)
        )
        return layers_bytes

    async def stage_versions(
        self, giver: int, region: int, wanted: list[tuple[int, int, bytes]]
    ) -> list[int]:
        about = self._of(region)
        found: list[int] = await self._call(giver, "stage_versions", region, wanted, about=about)
        return found

    async def take_repaired(
        self, taker: int, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        arguments = (region, attempt, are_records, staged)
        await self._call(taker, "take_repaired", *arguments, about=self._of(region))

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        await self._call(giver, "drop_layers", region, commit_ids, about=self._of(region))

    async def take_begin(
        self, taker: int, record: RegionRecord, attempt: int, n_bytes: int, lost: bytes
    ) -> None:
        arguments = (record, attempt, n_bytes, lost)
        await self._call(taker, "take_begin", *arguments, about=self._of(record.region))

    async def take(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        arguments = (region, attempt, giver, layers)
        await self._call(taker, "take", *arguments, about=self._of(region))

    async def take_records(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        arguments = (region, attempt, giver, layers)
        await self._call(taker, "take_records", *arguments, about=self._of(region))

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        arguments = (region, attempt, version)
        await self._call(taker, "take_seal", *arguments, about=self._of(region))

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        await self._call(taker, "take_drop", region, attempt, about=self._of(region))

    async def free_directories(self, server_id: int) -> list[str]:
        return list(await self._call(server_id, "free_directories", about="of a store"))

    async def take_directory(self, server_id: int, directory: str, state: StoreState) -> list[int]:
        about = f"that takes the directory node-{directory} over"
        return list(await self._call(server_id, "take_directory", directory, state, about=about))

    async def drop_directory(self, server_id: int, directory: str) -> None:
        about = f"that has taken the directory node-{directory} over"
        await self._call(server_id, "drop_directory", directory, about=about)

    def make_again(self, server_id: int, source: Source) -> list[Any]:
        task = ray.remote(_make).options(name="clamor source", num_returns=2, **self._on(server_id))
        return list(task.remote(source.what, source.digest))

    def bring(self, server_id: int, object_refs: list[Any]) -> list[Any]:
        task = ray.remote(_is_here).options(name="clamor source", **self._on(server_id))
        return [object_refs[0], task.remote(object_refs[0])]

    async def until_made(self, made: list[Any]) -> None:
        try:
            await made[1]
        except RayError as failure:  # who takes it gets the same, and says what it means
            logger.info("what makes a variable again has failed: %r", failure)

    def _of(self, *regions: int) -> str:
        some = list(dict.fromkeys(regions))
        more = ", ..." if len(some) > REGIONS_SAID else ""
        return f"of {', '.join(map(self._label, some[:REGIONS_SAID]))}{more}"

    def _on(self, server_id: int) -> dict[str, Any]:
        info = self._core.locate(server_id)
        if not isinstance(info, ServerInfo):
            raise errors.ServerUnavailableError(f"The page server {server_id:#x} is lost.")
        # No CPU: tasks that wait for the variable may hold all there are.
        return {
            "num_cpus": 0,
            "max_retries": SOURCE_RETRIES,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(info.node_id, soft=False),
        }

    async def _call(self, home: int, method: str, *arguments: Any, about: str) -> Any:
        await self._before_told()
        handle = self._handles.get(home)
        if handle is None:
            raise NotKnownYet(f"The page server {home:#x} is not known yet.")
        try:
            return await answer_of(getattr(handle, method).remote(*arguments))
        except ActorDiedError as failure:
            self._lose(home, f"its actor is dead: {cause_of(failure)}")
            raise errors.HomeLostError(
                f"The page server {home:#x} {about} is gone: {cause_of(failure)}"
            ) from failure

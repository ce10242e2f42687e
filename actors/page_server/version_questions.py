"""The engine's questions about versions, and what the registry tells a home. No Ray, no C.

    NEED_CHANGES    which blocks differ between two versions     -> set_changes
    NEED_PUBLISHED  which commits came after a version           -> publish each, then caught_up
    NEED_OUTCOME    what became of a staged layer                -> publish or drop_staged
    NEED_SETTLED    what a region's homes have acknowledged      -> settled, or nothing
    NEED_REPAIR     what makes a region's blocks again           -> set_repair
    PULLED          a layer that ``pull`` asked for is here, or not

Each question that is asked again while its answer is on the way is answered once. The first two
end at the latest with the deadline; the third has no answer "unknown", and is asked until there is
one: a layer that may be published must not be dropped. The fourth is tried once, for the engine
asks it again by itself, and keeps its layers meanwhile. So is the fifth: without an answer the
engine is told that nothing does now. It asks again after a pause, and waits for the home meanwhile.

Thread safety: everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from clamor_ray._labels import label
from clamor_ray._protocol.messages import Publication, RegionRecord, RepairSet
from clamor_ray.actors.page_server.engine_like import (
    Answer,
    EngineEvent,
    EngineLike,
    EventKind,
    Resolver,
    Settings,
    Tries,
)
from clamor_ray.errors import (
    ClamorError,
    ExistsError,
    FreedError,
    HomeLostError,
    NoVersionError,
    SnapshotExpired,
    WaitTimeoutError,
)

logger = logging.getLogger("clamor_ray.page_server")

ALL_VERSIONS = 2**64 - 1


def runs_of(blocks: bytes) -> npt.NDArray[np.uint64]:
    """The runs of a serialized BitMap.

    Returns:
        Shape (n, 2): first block and number of blocks; sorted, disjoint, none adjacent.

    Example:
        >>> runs_of(BitMap([3, 4, 5, 9]).serialize()).tolist()
        [[3, 3], [9, 1]]
    """
    numbers = np.frombuffer(BitMap.deserialize(blocks).to_array(), np.uint32).astype(np.uint64)
    if not len(numbers):
        return np.empty((0, 2), np.uint64)
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(numbers)])))
    return np.stack((numbers[starts], counts.astype(np.uint64)), axis=1)


class VersionQuestions:
    """See the file's head.

    Args:
        engine: Asks, and is told.
        resolver: Answers.
        server_id: This server.
        settings: Deadlines.
        spawn: Runs a coroutine in the background, until the server closes.
        define: Tells the engine what a region is.
    """

    def __init__(
        self,
        engine: EngineLike,
        resolver: Resolver,
        server_id: int,
        settings: Settings,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        define: Callable[[RegionRecord], None],
    ) -> None:
        self._engine = engine
        self._resolver = resolver
        self._server_id = server_id
        self._settings = settings
        self._spawn = spawn
        self._define = define
        self._asking: set[tuple[int, ...]] = set()
        self._pulls: dict[tuple[int, int], asyncio.Future[int]] = {}

    def take(self, event: EngineEvent) -> bool:
        """Whether the event was one of these."""
        key: tuple[int, ...]
        kind, region = event.kind, event.region
        if kind == EventKind.NEED_CHANGES:
            key = (kind, region, event.from_version, event.version)
            self._ask(key, self._find_changes(region, event.from_version, event.version))
        elif kind == EventKind.NEED_PUBLISHED:
            self._ask((kind, region), self._find_published(region, event.from_version))
        elif kind == EventKind.NEED_OUTCOME:
            key = (kind, region, event.commit_id)
            self._ask(key, self._find_outcome(region, event.commit_id))
        elif kind == EventKind.NEED_SETTLED:
            self._ask((kind, region), self._find_settled(region))
        elif kind == EventKind.NEED_REPAIR:
            key = (kind, region, event.version)
            self._ask(key, self._find_repair(region, event.version))
        elif kind == EventKind.PULLED:
            pulled = self._pulls.get((region, event.commit_id))
            if pulled is not None and not pulled.done():
                pulled.set_result(event.error)
        else:
            return False
        return True

    def _ask(self, key: tuple[int, ...], work: Coroutine[Any, Any, None]) -> None:
        if key in self._asking:
            work.close()
            return
        self._asking.add(key)

        async def answer() -> None:
            try:
                await work
            finally:
                self._asking.discard(key)
                work.close()

        self._spawn(answer())

    # -- questions

    async def _find_changes(self, region: int, from_version: int, to_version: int) -> None:
        runs = np.empty((0, 2), np.uint64)

        async def ask() -> int:
            nonlocal runs
            blocks = await self._within(self._resolver.changes(region, from_version, to_version))
            if blocks is None:
                return Answer.EXPIRED
            runs = runs_of(blocks)
            return 0

        error = await self._until_answered(ask, f"what changed in {label(region)}")
        with contextlib.suppress(FreedError):  # it is gone, and nobody waits for it
            self._engine.set_changes(region, from_version, to_version, runs, error=error)

    async def _find_published(self, region: int, since: int) -> None:
        async def ask() -> int:
            commits = await self._within(self._resolver.published(region, since))
            return self._publish_all(region, commits)

        error = await self._until_answered(ask, f"the commits of {label(region)}")
        with contextlib.suppress(FreedError):
            self._engine.caught_up(region, error=error)

    async def _find_repair(self, region: int, version: int) -> None:
        found: RepairSet | None = None
        try:
            found = await self._within(self._resolver.repair_of(region, version))
        except FreedError:
            pass  # the engine is told below, and hears of the end of the region by itself
        except Exception as failure:  # any: the resolver's promise is to be asked again
            logger.warning("cannot learn what makes %s again: %r", label(region), failure)
        with contextlib.suppress(FreedError):  # it is gone, and nobody waits for it
            if found is None:
                self._engine.set_repair(region, version, (), False)
            else:
                self._engine.set_repair(region, version, found.members, found.is_mirror)

    async def _until_answered(self, ask: Callable[[], Awaitable[int]], what: str) -> int:
        """Asks until there is an answer, or no time for another try. Returns the engine's code."""
        for_this_long = Tries(self._settings)
        while True:
            try:
                return await ask()
            except NoVersionError:
                return Answer.NO_VERSION
            except SnapshotExpired:
                return Answer.EXPIRED
            except FreedError:
                return Answer.NO_REGION
            except Exception as failure:  # any: the resolver's promise is to be asked again
                logger.warning("cannot learn %s: %r", what, failure)
                if not await for_this_long.pause():
                    return Answer.TIMEOUT

    def _publish_all(self, region: int, commits: list[tuple[int, int]]) -> int:
        """Returns the engine's code for the first that it refused, or 0.

        Raises:
            WaitTimeoutError: One is not here yet: ask again. Only the registry says what is lost.
        """
        for version, commit_id in commits:
            try:
                self._engine.publish(region, version, commit_id)
            except (HomeLostError, NoVersionError) as failure:
                text = f"Version {version} of {label(region)} is not here yet: {failure}"
                raise WaitTimeoutError(text) from failure
            except ClamorError as failure:
                logger.error("version %d of variable %d is not here: %s", version, region, failure)
                return failure.code or Answer.TIMEOUT
        return 0

    async def _find_outcome(self, region: int, commit_id: int) -> None:
        pause_s = self._settings.backoff_first_s
        while True:
            try:
                versions = await self._within(self._resolver.outcome(commit_id))
                version = versions.get(region, 0)
                record = await self._within(self._resolver.lookup(region)) if version else None
                if not isinstance(record, RegionRecord):  # refused, or of a variable that is gone
                    self._engine.drop_staged(region, commit_id)
                elif self._server_id in record.homes:
                    self._engine.publish(region, version, commit_id)
                else:
                    self.keep(record, version, commit_id)
                return
            except FreedError:  # the engine does not know the region (yet), and asks again
                return
            except Exception as failure:  # any: a version before it may be on its way
                logger.warning("the outcome of commit %#x is not known: %r", commit_id, failure)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.backoff_most_s)

    async def _find_settled(self, region: int) -> None:
        try:
            version = await self._within(self._resolver.settled(region))
        except FreedError:  # nobody will need what its commits wrote
            version = ALL_VERSIONS
        except Exception as failure:  # any: the engine asks again
            logger.info("what the homes of variable %d have is not known: %r", region, failure)
            return
        self._engine.settled(region, version)

    def keep(self, record: RegionRecord, version: int, commit_id: int) -> None:
        """Its home is another server, which may be lost: the engine retains it for a rebuild.

        Raises:
            What the engine raises.
        """
        try:
            self._engine.publish(record.region, version, commit_id)
        except FreedError:
            # Nobody has used the region here since a restart; or a home was prepared here, and
            # another server got it, which was not heard here: what was prepared would keep it all.
            self._define(record)
            if self._server_id not in record.homes:
                self._engine.set_homes(record.region, record.homes, record.term)
            self._engine.publish(record.region, version, commit_id)

    async def _within(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wait_for(work, self._settings.answer_s)

    # -- what the registry says

    async def publish(self, items: list[Publication]) -> list[tuple[int, int]]:
        """Versions of regions that are homed here.

        Returns:
            The newest (region, version) of each region that is settled: the engine knows it, or
            the region is gone.
        """
        known: dict[int, int] = {}
        held_up: set[int] = set()  # a gap: the later ones wait for their turn
        for item in items:
            if item.region in held_up:
                continue
            try:
                await self._publish(item)
            except ClamorError as failure:
                logger.warning(
                    "cannot publish version %d of variable %d yet: %s",
                    item.version,
                    item.region,
                    failure,
                )
                held_up.add(item.region)
            else:
                known[item.region] = item.version
        return list(known.items())

    async def _publish(self, item: Publication) -> None:
        try:
            self._engine.publish(item.region, item.version, item.commit_id)
        except FreedError:
            # Freed, or not heard of since a restart.
            if await self._make_known(item.region):
                self._engine.publish(item.region, item.version, item.commit_id)

    async def _make_known(self, region: int) -> bool:
        record = await self._within(self._resolver.lookup(region))
        if not isinstance(record, RegionRecord) or record.freed:
            return False
        self._define(record)
        return True

    async def pull(self, region: int, commit_id: int, from_server: int, layer_bytes: int) -> int:
        """Fetches a layer from the server where it is staged.

        Returns:
            0, or the engine's code.

        Raises:
            What the engine raises.
        """
        key = (region, commit_id)
        if (pulled := self._pulls.get(key)) is None:
            pulled = self._pulls[key] = asyncio.get_running_loop().create_future()
            try:
                await self._start_pull(region, commit_id, from_server, layer_bytes)
                await asyncio.wait({pulled}, timeout=self._settings.pull_s)
            except ExistsError:
                if not pulled.done():
                    pulled.set_result(0)  # an earlier try has brought it
            finally:
                if not pulled.done():
                    pulled.set_result(Answer.TIMEOUT)
                del self._pulls[key]
        return await asyncio.shield(pulled)

    async def _start_pull(
        self, region: int, commit_id: int, from_server: int, layer_bytes: int
    ) -> None:
        try:
            self._engine.pull(region, commit_id, from_server, layer_bytes)
        except FreedError:
            if not await self._make_known(region):
                raise
            self._engine.pull(region, commit_id, from_server, layer_bytes)

    def drop_staged(self, commit_id: int, regions: list[int]) -> None:
        """The commit was refused."""
        for region in regions:
            with contextlib.suppress(FreedError):
                self._engine.drop_staged(region, commit_id)

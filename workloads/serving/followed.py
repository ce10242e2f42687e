"""A variable that a replica follows: opened at its newest version, each time there is one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
from typing import Any, Final

import clamor_ray as clamor
from clamor_ray import errors

from .table import Rows

AGAIN_S: Final = 0.2  # after a registry or a page server that did not answer
MOST_EXPIRED: Final = 10  # versions in a row that were gone before they were opened

_log = logging.getLogger("ray.serve")  # where Serve's replicas log


@dataclasses.dataclass(frozen=True)
class Opened:
    """One version, as long as somebody holds this.

    Args:
        version: of the variable.
        update: the number of the last update in it.
        rows: read-only; of no other version.
    """

    version: int
    update: int
    rows: Rows


async def opened(ref: clamor.GlobalRef[Any]) -> Opened:
    """The version that a reference is at. No block is touched on the event loop."""
    frozen = ref.snapshot()
    value = await clamor.aio.get(frozen)
    update = await clamor.aio.gather(value["update"], [0])
    return Opened(frozen.version, int(update[0]), value["rows"])


class Followed:
    """A variable by its name, and its newest version.

    A request takes `now` once: all that it reads is then of one version, whatever is committed
    meanwhile. The old version goes with the last request that has it.
    """

    def __init__(self, name: str, ref: clamor.GlobalRef[Any], now: Opened) -> None:
        self.now = now
        self.failure: Exception | None = None  # why it follows no more
        self._n_expired = 0
        self._name = name
        self._ref = ref
        self._task = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    async def begin(cls, name: str) -> Followed:
        """Opens it, and follows it until `end`.

        Raises:
            NoSuchNameError: The session has no such variable.
        """
        ref = await asyncio.to_thread(clamor.open, name)
        return cls(name, ref, await opened(ref))

    async def _follow(self) -> None:
        # However it ends, `failure` says so: else the replica would serve one version for ever.
        is_freed = False
        while True:
            try:
                if is_freed:  # another one may have its name by now
                    await self._turn(await asyncio.to_thread(clamor.open, self._name))
                    is_freed = False
                async for _ in clamor.aio.watch(self._ref):
                    await self._turn(await clamor.aio.refresh(copy.copy(self._ref)))
            except errors.FreedError:
                is_freed = True
            except (errors.ServerUnavailableError, errors.WaitTimeoutError) as error:
                _log.warning("%s is followed again in %g s: %s", self._name, AGAIN_S, error)
            except errors.SnapshotExpired as error:  # a commit later: the next one is newer
                self._n_expired += 1
                if self._n_expired == MOST_EXPIRED:
                    self._fail(error)
                    return
            except Exception as error:  # another sort of variable has the name; no thread starts
                self._fail(error)
                return
            await asyncio.sleep(AGAIN_S)

    async def _turn(self, newest: clamor.GlobalRef[Any]) -> None:
        # The reference last: where this fails its version is news once more.
        self.now = await opened(newest)
        self._ref = newest
        self._n_expired = 0

    def _fail(self, error: Exception) -> None:
        self.failure = error
        _log.error("%s is followed no more", self._name, exc_info=error)

    async def end(self) -> None:
        """Lets go of it."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

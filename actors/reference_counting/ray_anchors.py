"""Anchors as Ray has them: made by the registry, and looked at now and then.

An anchor is a return value, None, of a call of the registry to itself. So the registry's process
owns it, and Ray tells that process when no other refers to it any more: in Ray's words, when the
object has no reference and no borrower. Ray has no call that waits for that; the table of all
references that it has is read, which takes a microsecond for each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import ray

from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.reference_counting.counts import ReferenceCounts

logger = logging.getLogger("clamor_ray.registry")

LOOK_S: Final = 1.0
LOOK_SHARE: Final = 0.02  # of the time, at most, where there are very many
ANCHORS_MOST: Final = 256  # of one request


def _alive() -> set[bytes]:
    """Binary ids of all objects that Ray has a reference to, of this process or of those that it
    has lent them to."""
    core_worker = ray._private.worker.global_worker.core_worker
    return {bytes.fromhex(each.decode()) for each in core_worker.get_all_reference_counts()}


def _make(n_anchors: int) -> list[Any]:
    registry = ray.get_runtime_context().current_actor
    refs = registry.nothing.options(num_returns=n_anchors).remote(n_anchors)
    return [refs] if n_anchors == 1 else list(refs)


class RayAnchors:
    """See the file's head. Coroutines of the registry's loop.

    Args:
        counts: Which variable has which.
        free: Frees regions that nobody refers to.
        background: Where they are looked at.
        make: Makes so many.
        alive: The binary ids of those that are referred to. It runs in a thread.
    """

    def __init__(
        self,
        counts: ReferenceCounts,
        free: Callable[[list[int]], None],
        background: BackgroundTasks,
        make: Callable[[int], list[Any]] = _make,
        alive: Callable[[], set[bytes]] = _alive,
    ) -> None:
        self._counts = counts
        self._free = free
        self._background = background
        self._make = make
        self._alive = alive
        self._is_looking = False

    def make(self, n_anchors: int) -> list[Any]:
        """So many new anchors, for one who makes variables: ``ray.ObjectRef``s.

        Raises:
            ValueError: None, or too many.
        """
        if not 0 < n_anchors <= ANCHORS_MOST:
            raise ValueError(f"from 1 to {ANCHORS_MOST} anchors, not {n_anchors}")
        anchors = self._make(n_anchors)
        self._counts.made(anchor.binary() for anchor in anchors)
        if not self._is_looking and not self._background.is_closed:
            self._is_looking = True
            self._background.spawn(self._look())
        return anchors

    def of(self, region: int) -> Any:
        """One more anchor of a region, for who refers to it without one."""
        (anchor,) = self.make(1)
        self._counts.hold(region, anchor.binary())
        return anchor

    async def _look(self) -> None:
        pause_s = LOOK_S
        try:
            while not self._counts.is_empty:
                await asyncio.sleep(pause_s)
                began_s = time.monotonic()
                try:
                    await self._look_once()
                except Exception:  # whatever it is: a variable that stays for now harms nobody
                    logger.exception("variables without a reference stay for now")
                pause_s = max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE)
        finally:
            self._is_looking = False

    async def _look_once(self) -> None:
        known = self._counts.anchors()
        alive = await asyncio.to_thread(self._alive)
        regions = self._counts.unheld(known, alive)
        while regions:
            self._free(regions)
            regions = self._counts.unheld((), alive)  # what was inside of these

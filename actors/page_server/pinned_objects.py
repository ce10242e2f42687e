"""Ray objects that a page server serves as regions, without a copy of their large buffers.

They stay pinned until their region is freed and dropped, or moves away. Safe from any thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._objects.layout import Pickled, take_apart
from clamor_ray._protocol.messages import Pinned, RegionRecord
from clamor_ray.actors.lost_homes import shared_objects
from clamor_ray.actors.page_server.rebuilt_homes import FETCH_OBJECT_S

logger = logging.getLogger("clamor_ray.page_server")

CALL_S = 10.0
PIN_S = 600.0  # what a second asker of the same waits
BROUGHT_OBJECT_S = 0.1  # of an object that is on this node already


class PinnedObjects:
    """See the file's head.

    Args:
        engine: Serves them.
        registry: The registry's actor handle.
        node_id: Ray's hex id of this node.
    """

    def __init__(self, engine: _native.Engine, registry: Any, node_id: str) -> None:
        self._engine = engine
        self._registry = registry
        self._node_id = node_id
        self.regions: dict[int, Any] = {}  # what serves each of them
        self._pinning: dict[int, Future[Pinned]] = {}  # by request
        self._lock = threading.Lock()

    def n_pinning(self) -> int:
        """How many are being pinned just now."""
        with self._lock:
            return sum(not told.done() for told in self._pinning.values())

    def unpin(self, region: int) -> None:
        """The region is gone from here; one that is served from no object is no error."""
        with self._lock:
            if self.regions.pop(region, None) is None:
                return  # no Ray object: none of the requests made it
            for request_id, pinned in list(self._pinning.items()):
                done = pinned.done() and not pinned.exception()
                if done and pinned.result().record.region == region:
                    del self._pinning[request_id]

    def pin(self, object_refs: list[Any], request_id: int = 0) -> Pinned:
        """Makes a Ray object of this node's store a region; serving it copies no large buffer.

        The object stays pinned until the region is freed and dropped.

        Args:
            object_refs: A list of one ObjectRef.
            request_id: The same one gets the same answer again; 0: none.

        Returns:
            The sealed region, and what lies where in it.

        Raises:
            UnpicklableError: The object has no protocol-5 form.
            Whatever the object is, where it is an error.
        """
        if not request_id:
            return self._pin(object_refs, 0)
        return self._once(request_id, lambda: self._pin(object_refs, request_id))

    def _once(self, request_id: int, work: Callable[[], Pinned]) -> Pinned:
        with self._lock:
            told = self._pinning.get(request_id)
            mine = told is None
            if told is None:
                told = self._pinning[request_id] = Future()
        if mine:
            try:
                told.set_result(work())
            except BaseException as failure:
                told.set_exception(failure)
                with self._lock:
                    del self._pinning[request_id]
        return told.result(PIN_S)

    def _pin(self, object_refs: list[Any], request_id: int) -> Pinned:
        pickled = take_apart(ray.get(object_refs[0], timeout=FETCH_OBJECT_S))
        record: RegionRecord = ray.get(
            self._registry.create_region.remote(
                pickled.plan.region_bytes, self._node_id, request_id
            ),
            timeout=CALL_S,
        )
        try:
            self._serve_pinned(record, pickled, object_refs)
            digest = shared_objects.digest_of(pickled)
            source = shared_objects.source_of(pickled.plan, digest, object_refs[0])
            ray.get(self._registry.seal.remote(record.region, source), timeout=CALL_S)
        except BaseException:
            # Answered by an order to retire it with force, which unpins.
            ray.get(self._registry.abandon.remote(record.region), timeout=CALL_S)
            raise
        return Pinned(record, pickled.plan, digest)

    def pin_all_again(self, shared: list[tuple[Pinned, list[Any]]], within_s: float) -> None:
        """After a restart, and before anybody's question is answered: readers of every region wait
        for it. So all objects are brought at once, and have one deadline."""
        deadline_s = time.monotonic() + within_s
        if shared:
            ray.wait([refs[0] for _, refs in shared], num_returns=len(shared), timeout=within_s)
        for pinned, object_refs in shared:
            self._pin_again(
                pinned, object_refs, max(deadline_s - time.monotonic(), BROUGHT_OBJECT_S)
            )

    def _pin_again(self, pinned: Pinned, object_refs: list[Any], within_s: float) -> None:
        """One object that was shared.

        Raises:
            What is a shortage here: it is no reason to do without the object. But for one of time:
            other regions need this server, and whoever reads this one has it rebuilt, which waits.
        """
        region = pinned.record.region
        try:
            pickled = take_apart(ray.get(object_refs[0], timeout=within_s))
            if shared_objects.digest_of(pickled) != pinned.digest:
                raise errors.UnpicklableError("The object pickles to a different layout each time.")
            self._serve_pinned(pinned.record, pickled, object_refs)
        except Exception as failure:  # any other: the rest goes on, and who reads it has it rebuilt
            if shared_objects.is_shortage(failure) and not isinstance(failure, GetTimeoutError):
                raise
            self.regions.pop(region, None)
            logger.error("variable %d cannot be shared again: %r", region, failure)

    def _serve_pinned(self, record: RegionRecord, pickled: Pickled, object_refs: list[Any]) -> None:
        segments = [
            _native.Segment(offset, view.nbytes, np.frombuffer(view, np.uint8).ctypes.data)
            for offset, view in pickled.pieces()
            if shared_objects.is_in_place(offset, view)
        ]
        # The views hold the store's memory; the reference holds the object in the store.
        self.regions[record.region] = (object_refs, pickled)
        fd = self._engine.create_shared(
            record.region, record.version, record.base_address, record.length_bytes, segments
        )
        try:
            for offset, view in pickled.pieces():
                if not shared_objects.is_in_place(offset, view):
                    _native.copy_in(fd, offset, view)
        finally:
            os.close(fd)
        self._engine.seal(record.region)

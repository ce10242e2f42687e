"""The page server actor: one per node and job. A facade over the engine and ``server_core``.

Its process may be killed at any moment: Ray starts the actor again, ``__init__`` runs again, the
keeper hands back the memory, and the registry learns the new port. Whatever must survive is in the
keeper or in the registry; this object keeps nothing else, but for the Ray objects that it pins.

Threads: Ray calls methods on up to 16 threads. The sockets live on one thread of ours that runs a
uvloop; methods reach it only through ``_on_loop``. The engine's own threads never enter Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import resource
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import ray
import uvloop

from clamor_ray import _names, _native, errors
from clamor_ray._layout import BLOCK_BYTES, Pickled, take_apart
from clamor_ray._version import __version__
from clamor_ray.actors import keeper_process
from clamor_ray.actors.messages import (
    LocateAnswer,
    LookupAnswer,
    Pinned,
    RegionRecord,
    ServerConfig,
    ServerInfo,
    ServerReport,
)
from clamor_ray.actors.registry_core import server_id_of
from clamor_ray.actors.server_core import ServerCore, Settings

logger = logging.getLogger("clamor_ray.page_server")

CALL_S = 10.0
KEEPER_S = 10.0
LOOP_S = 10.0
FETCH_OBJECT_S = 120.0

_T = TypeVar("_T")


def keeper_socket(scope: str, node_id: str) -> str:
    """The abstract Unix socket of a node's keeper."""
    return f"{_names.server_socket(scope, node_id)}-keeper"


class _RegistryResolver:
    """The registry, as ``server_core`` wants it. Deadlines are the caller's."""

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

    async def region_idle(self, region: int) -> None:
        reference = self._registry.region_idle.remote(region, self._server_id)
        await asyncio.wrap_future(reference.future())


def _raise_descriptor_limit() -> None:
    """Every variable in use costs this process a descriptor or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _find_keeper(listen_name: str, orphan_timeout_s: float) -> _native.Keeper:
    with contextlib.suppress(errors.ClamorError):
        return _native.Keeper(listen_name, timeout_s=0.0)
    keeper_process.spawn(listen_name, keeper_process.raylet_pid(), orphan_timeout_s)
    return _native.Keeper(listen_name, timeout_s=KEEPER_S)


def _in_place(offset: int, view: memoryview) -> bool:
    """Whether a piece is served from where it lies, and not from a copy."""
    return offset > 0 and view.nbytes >= BLOCK_BYTES


def _digest(pickled: Pickled) -> bytes:
    digest = hashlib.sha256(repr(pickled.plan).encode())
    for offset, view in pickled.pieces():
        if not _in_place(offset, view):
            digest.update(view)
    return digest.digest()


class PageServer:
    """See the file's head.

    Args:
        registry: The registry's actor handle.
        config: The job's settings.
        node_id: Ray's hex id of this node.
    """

    def __init__(self, registry: Any, config: ServerConfig, node_id: str) -> None:
        self._registry = registry
        self._pinned: dict[int, Any] = {}
        self._stopped = False
        try:
            self._start(config, node_id)
        except Exception as failure:
            # Ray would start us again and again, and tell nobody why.
            cause = getattr(failure, "cause", None) or failure
            if not isinstance(cause, errors.ClamorError):
                text = f"The page server of node {node_id} cannot start: {cause!r}"
                cause = errors.ServerUnavailableError(text)
            told = registry.start_failed.remote(server_id_of(node_id), cause)
            ray.wait([told], timeout=CALL_S)
            raise

    def _start(self, config: ServerConfig, node_id: str) -> None:
        here = ray.get_runtime_context().get_node_id()
        if here != node_id:
            raise RuntimeError(f"a page server for node {node_id} was started on node {here}")
        _raise_descriptor_limit()
        self._keeper = _find_keeper(
            keeper_socket(config.job_scope, node_id), config.orphan_timeout_s
        )
        server_id = server_id_of(node_id)
        name = _names.server_socket(config.job_scope, node_id)
        self._engine = _native.Engine(
            name,
            server_id=server_id,
            keeper=self._keeper,
            fetch_timeout_s=config.fetch_timeout_s,
            fault_timeout_s=config.fault_timeout_s,
            settle_s=config.reattach_s,
            page_bytes=config.page_bytes,
            library_version=__version__,
        )
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="clamor-loop", daemon=True).start()
        secret: bytes = ray.get(self._registry.secret.remote(), timeout=CALL_S)
        host = ray.util.get_node_ip_address()
        self._core = ServerCore(
            self._engine,
            _RegistryResolver(self._registry, server_id),
            server_id=server_id,
            secret=secret,
            settings=Settings(deadline_s=config.reattach_s + CALL_S),
        )
        shared = ray.get(self._registry.shared_at.remote(server_id), timeout=CALL_S)
        for pinned, object_refs in shared:
            self._pin_again(pinned, object_refs)
        port = self._on_loop(self._core.start(host))
        info = ServerInfo(
            server_id=server_id,
            node_id=node_id,
            host=host,
            port=port,
            socket_name=name,
            library_version=__version__,
            pid=os.getpid(),
        )
        self._info: ServerInfo = ray.get(
            self._registry.register_server.remote(info), timeout=CALL_S
        )
        logger.info("page server %#x listens at %s:%d", server_id, host, port)

    def __repr__(self) -> str:
        return f"PageServer({self._info.node_id[:16]})"

    def _on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LOOP_S)

    def ping(self) -> int:
        """The actor's process id; it answers once it has registered."""
        return os.getpid()

    def stats(self) -> ServerReport:
        """The engine's counters, its regions, and what came to the data port."""
        return ServerReport(
            info=self._info,
            engine=self._engine.stats(),
            regions=tuple(self._engine.region_stats()),
            connections=self._core.counters(),
        )

    def region_stats(self) -> tuple[dict[str, int], ...]:
        """One entry per region known here, by the names of ``struct pc_region_stats``."""
        return tuple(self._engine.region_stats())

    def histogram(self, region: int, which: int, n_buckets: int) -> list[int]:
        """Blocks of a set in each of n equal parts of the region; empty where it is unknown."""
        try:
            return self._engine.histogram(region, which, n_buckets)
        except errors.FreedError:
            return []

    def retire(self, region: int, force: bool, record: RegionRecord | None = None) -> bool:
        """The region is freed; with force it goes now.

        Args:
            region: Its id.
            force: No lease on it is left anywhere.
            record: What it is, for a server that was restarted and does not know it yet.

        Returns:
            Whether the engine knew it. If not, no lease can exist or begin here.
        """

        async def tell() -> None:
            self._core.retire(region, force, record)

        try:
            self._on_loop(tell())
        except errors.FreedError:
            return False
        finally:
            if force:
                self._pinned.pop(region, None)
        return True

    def pin(self, object_refs: list[Any]) -> Pinned:
        """Makes a Ray object of this node's store a region; serving it copies no large buffer.

        The object stays pinned until the region is freed and dropped.

        Args:
            object_refs: A list of one ObjectRef.

        Returns:
            The sealed region, and what lies where in it.

        Raises:
            UnpicklableError: The object has no protocol-5 form.
            Whatever the object is, where it is an error.
        """
        pickled = take_apart(ray.get(object_refs[0], timeout=FETCH_OBJECT_S))
        record: RegionRecord = ray.get(
            self._registry.create_region.remote(pickled.plan.region_bytes, self._info.node_id),
            timeout=CALL_S,
        )
        try:
            self._serve_pinned(record, pickled, object_refs)
            ray.get(self._registry.seal.remote(record.region), timeout=CALL_S)
        except BaseException:
            # Answered by an order to retire it with force, which unpins.
            ray.get(self._registry.abandon.remote(record.region), timeout=CALL_S)
            raise
        return Pinned(record, pickled.plan, _digest(pickled))

    def _pin_again(self, pinned: Pinned, object_refs: list[Any]) -> None:
        """After a restart, and before anybody's question about the region is answered."""
        try:
            pickled = take_apart(ray.get(object_refs[0], timeout=FETCH_OBJECT_S))
            if _digest(pickled) != pinned.digest:
                raise errors.UnpicklableError("The object takes apart differently each time.")
            self._serve_pinned(pinned.record, pickled, object_refs)
        except Exception as failure:  # any: whoever reads it gets HomeLostError, the others go on
            logger.error("region %d cannot be shared again: %r", pinned.record.region, failure)

    def _serve_pinned(self, record: RegionRecord, pickled: Pickled, object_refs: list[Any]) -> None:
        segments = [
            _native.Segment(offset, view.nbytes, np.frombuffer(view, np.uint8).ctypes.data)
            for offset, view in pickled.pieces()
            if _in_place(offset, view)
        ]
        # The views hold the store's memory; the reference holds the object in the store.
        self._pinned[record.region] = (object_refs, pickled)
        fd = self._engine.create_shared(
            record.region, record.version, record.base_address, record.length_bytes, segments
        )
        try:
            for offset, view in pickled.pieces():
                if not _in_place(offset, view):
                    _native.copy_in(fd, offset, view)
        finally:
            os.close(fd)
        self._engine.seal(record.region)

    def stop(self) -> None:
        """Lets go of everything, the keeper included. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._on_loop(self._core.close())
        self._engine.stop()
        with contextlib.suppress(errors.ClamorError):
            self._keeper.quit()
        self._pinned.clear()

"""Reads the ranges of files that the engine's readers wait for, several at once.

Each page server reads by itself: no other node is in the way of S3, or of a shared file system. A
local file that is not on this node, or is another one here, is asked of the page server of the node
where the variable was made.

Threads: ``wanted`` is called on the server's loop; ranges are read on threads of this object.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from clamor_ray import errors
from clamor_ray._files.reader import Ranges, open_ranges, read_region
from clamor_ray._files.spec import FileSpec
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.source import Source

logger = logging.getLogger("clamor_ray.page_server")

AT_ONCE: Final = 64  # ranges: a request to S3 takes tens of ms, and little else
BULK_AT_ONCE: Final = 48  # of those: a store that hangs must not keep those who are stopped
ELSEWHERE_AT_ONCE: Final = 8  # of those that another node is asked for
FOR_OTHERS_AT_ONCE: Final = 8  # it has other things to do, and few threads
BUSY_PAUSE_S: Final = 0.05
READ_FILE_S: Final = 30.0  # of another node
PART_BYTES: Final = 1 << 20  # of a range: who waits for its first part need not wait for its last
MOST_KNOWN: Final = 1024  # files
CODES: Final = {
    errors.FileChangedError: _native.PC_ERR_FILE_CHANGED,
    errors.FileAccessError: _native.PC_ERR_FILE_ACCESS,
}


class FileEngine(Protocol):
    """The part of the engine that is used here."""

    def file_next(self, only_urgent: bool = False) -> _native.FileRead | None: ...
    def file_fill(self, read_id: int, image: Any) -> None: ...
    def file_end(self, read_id: int, error: int = 0, text: str = "") -> None: ...


class FileReads:
    """See the file's head.

    Args:
        engine: Has the ranges, and is given their bytes.
        source_of: Asks the registry which file a region is.
        node_id: Ray's hex id of this node.
        ask_node: Bytes of a region from the page server of another node: its id, the region, offset
            and length.
    """

    def __init__(
        self,
        engine: FileEngine,
        source_of: Callable[[int], Source | None],
        node_id: str,
        ask_node: Callable[[str, int, int, int], bytes],
    ) -> None:
        self._engine = engine
        self._source_of = source_of
        self._node_id = node_id
        self._ask_node = ask_node
        self._lock = threading.Lock()  # of what follows; nothing is waited for under it
        self._n_working = 0
        self._n_bulk = 0
        self._asking = threading.Semaphore(ELSEWHERE_AT_ONCE)
        self._for_others = threading.Semaphore(FOR_OTHERS_AT_ONCE)
        self._closed = False
        self._known: dict[int, tuple[FileSpec, Ranges]] = {}  # by region; the oldest first
        self._elsewhere: set[int] = set()  # regions whose file is not on this node
        self._threads = ThreadPoolExecutor(AT_ONCE, "clamor-file")

    def close(self) -> None:
        """Takes no more ranges. Who still waits for one asks the next server."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wanted(self) -> None:
        """There is a range more. Does not wait."""
        with self._lock:
            if self._closed or self._n_working == AT_ONCE:
                return  # who works takes it before it ends
            self._n_working += 1
        self._threads.submit(self._work)

    def _next(self) -> _native.FileRead | None:
        """Under the lock, so that a range that comes when there is none finds a free thread."""
        with self._lock:
            try:
                only_urgent = self._n_bulk >= BULK_AT_ONCE
                found = None if self._closed else self._engine.file_next(only_urgent)
            except errors.ClamorError:  # the engine ends
                found = None
            if found is None:
                self._n_working -= 1
            elif not found.urgent:
                self._n_bulk += 1
            return found

    def _work(self) -> None:
        while (read := self._next()) is not None:
            code, text = 0, ""
            try:
                self._fill(read)
            except errors.FileReadError as failure:
                code = CODES.get(type(failure), _native.PC_ERR_FILE)
                text = failure.message
            except errors.FreedError:  # it was given up, or the variable was freed
                code = _native.PC_ERR_NO_REGION
            except Exception as failure:  # any: who waits must get an answer
                logger.exception("reading the file of %s", label(read.region))
                code, text = _native.PC_ERR_FILE, cause_of(failure)
            try:
                self._engine.file_end(read.id, code, text)
            except errors.ClamorError as failure:
                logger.info("a range of %s comes too late: %s", label(read.region), failure)
            if not read.urgent:
                with self._lock:
                    self._n_bulk -= 1

    def _fill(self, read: _native.FileRead) -> None:
        offset = read.first_block * BLOCK_BYTES
        end = offset + read.n_blocks * BLOCK_BYTES
        while offset < end:
            n_bytes = min(PART_BYTES, end - offset)
            self._engine.file_fill(read.id, self._read(read.region, offset, n_bytes))
            offset += n_bytes

    def _read(self, region: int, offset: int, n_bytes: int) -> Any:
        spec, file = self._file(region)
        is_guest = spec.is_local and spec.node_id != self._node_id
        if not (is_guest and region in self._elsewhere):
            try:
                return read_region(spec, file, offset, n_bytes)
            except errors.FileReadError:
                if not is_guest:
                    raise
                self._elsewhere.add(region)
        with self._asking:
            return self._ask_node(spec.node_id, region, offset, n_bytes)

    def read_for_others(self, region: int, offset: int, n_bytes: int) -> bytes:
        """Bytes of a region whose file is on this node.

        Raises:
            FileReadError and those below it: It cannot be read.
            FreedError: There is no such variable.
            WaitTimeoutError: It reads for enough others now: ask again in a moment.
        """
        if not self._for_others.acquire(blocking=False):
            raise errors.WaitTimeoutError("This node reads for enough others now.")
        try:
            return bytes(read_region(*self._file(region), offset, n_bytes))
        finally:
            self._for_others.release()

    def _file(self, region: int) -> tuple[FileSpec, Ranges]:
        with self._lock:
            found = self._known.get(region)
        if found is None:
            source = self._source_of(region)
            if source is None:
                raise errors.FreedError(f"{label(region)} was freed.")
            spec = FileSpec.of_source(source)
            found = (spec, open_ranges(spec))
            with self._lock:
                self._known[region] = found
                if len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]
        return found


def read_at_node(job_scope: str, node_id: str, region: int, offset: int, n_bytes: int) -> bytes:
    """Bytes of a region's file from the page server of another node, which may be busy.

    Raises:
        FileReadError: It does not give them.
        What it raises.
    """
    name = names.page_server_name(job_scope, node_id)
    try:
        server = ray.get_actor(name, namespace=names.NAMESPACE)
        until_s = time.monotonic() + READ_FILE_S
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                read = server.read_file.remote(region, offset, n_bytes)
                return bytes(ray.get(read, timeout=left_s))
            except RayTaskError as failure:
                if not isinstance(failure.cause, errors.WaitTimeoutError):
                    raise
            time.sleep(BUSY_PAUSE_S)
        raise GetTimeoutError("it reads for others")
    except RayTaskError as failure:
        if isinstance(failure.cause, errors.ClamorError):
            raise failure.cause from None
        raise
    except (GetTimeoutError, RayError, ValueError) as failure:
        raise errors.FileReadError(
            f"The file of {label(region)} is on node {node_id}, whose page server does not "
            f"give it: {type(failure).__name__}."
        ) from failure

"""A session without Ray and without C: regions are bytes in this process, commits are decided by
the registry's own commit log. For tests of what lies above."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchors
from clamor_ray._native.client import MAP_PRIVATE, Mapping
from clamor_ray._native.pieced_client import PiecePart
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import Created, FreeAnswer, RegionRecord
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._read import indexing
from clamor_ray._read.lease import LeaseTable
from clamor_ray._session.kept_layers import KeptLayers
from clamor_ray._session.session import Session
from clamor_ray._tasks.task_ends import TaskEnds
from clamor_ray.actors.commits.commit_log import CommitLog

BLOCK_BYTES = 4096
SCOPE = "abcdef123456"
SERVER_ID = 77
STAGED_AT = 78  # the node has joined again since the session began


@dataclass
class _Mapped:
    memory: mmap.mmap
    region: int
    version: int
    original: bytes
    count: int = 1


@dataclass
class Cluster:
    """Registry and page server in one.

    Args:
        log: decides commits.
        content: every version of each region.
        staged: layers by (commit id, region).
        fail: called with each registry method's name before it runs, and with "stage"; may raise.
        answer_lost: methods whose next answer is lost after they have run.
        calls: names of registry calls, in order.
    """

    log: CommitLog = field(default_factory=CommitLog)
    content: dict[int, list[bytes]] = field(default_factory=dict)
    staged: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)
    fail: Callable[[str], None] = lambda name: None
    answer_lost: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    regions: dict[int, RegionRecord] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def store(self) -> str:
        """The session's; it has none."""
        return ""

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        self.fail(method)
        with self.lock:
            answer = getattr(self, method)(*args)
        if method in self.answer_lost:
            self.answer_lost.remove(method)
            raise errors.ServerUnavailableError("The answer was lost.")
        return answer

    # -- the registry's methods

    def create_region(
        self, length_bytes: int, node_id: str, request_id: int = 0, on_disk: bool = False
    ) -> RegionRecord:
        number = len(self.regions) + 1
        record = RegionRecord(number, 0, 0x1100_0000_0000 + (number << 32), length_bytes, (1,))
        self.regions[number] = record
        self.log.open(number, ())
        return record

    def create_counted(
        self, length_bytes: int, node_id: str, request_id: int, n_anchors: int, on_disk: bool
    ) -> Created:
        record = self.create_region(length_bytes, node_id, request_id, on_disk)
        return Created(record, self.anchors(n_anchors))

    def anchors(self, n_anchors: int) -> list[Any]:
        return [ray.ObjectRef.nil() for _ in range(n_anchors)]  # counted by nobody

    def make_room(self, node_id: str, needed_bytes: int) -> bool:
        return False  # there is no other node

    def seal(self, region: int, source: Any = None, counted: Any = None) -> None: ...

    def seal_and_create(
        self,
        region: int,
        source: Any,
        length_bytes: int,
        node_id: str,
        request_id: int,
        counted: Any = None,
    ) -> RegionRecord:
        self.seal(region, source, counted)
        return self.create_region(length_bytes, node_id, request_id)

    def why_lost(self, region: int) -> None: ...

    def abandon(self, region: int, leased: bool = False) -> None: ...

    def free(self, region: int, here: int = 0) -> FreeAnswer:
        self.log.close(region)
        return FreeAnswer(alone=here == SERVER_ID)

    def latest(self, regions: list[int]) -> list[Any]:
        return [self.log.latest(region) for region in regions]

    def at(self, region: int, version: int) -> Any:
        return self.log.at(region, version)

    def may_commit(self, request: Any) -> None:
        self.log.prepare(request)

    def outcome(self, commit_id: int, by_writer: bool = False) -> Any:
        known = self.log.outcome(commit_id)
        if known is None:
            self.log.abort(commit_id, 0.0)
            return {}
        return known

    def commit(self, request: Any) -> Any:
        answered = self.log.answered(request.commit_id)
        if answered is not None:
            return answered
        entries = self.log.prepare(request)
        committed = self.log.apply(request.commit_id, entries, 0.0)
        for write in request.writes:
            if write.payload is None:
                versions = self.content[write.region]
                new = bytearray(versions[-1])
                layer = self.staged[request.commit_id, write.region]
                assert write.n_blocks == len(layer)
                assert write.staged_at == STAGED_AT
                for block, data in layer.items():
                    new[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = data
                versions.append(bytes(new))
        return committed


class Client:
    """Stands in for `clamor_ray._native.client.Client`."""

    has_all = False  # what `rows_here` says
    is_connected = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.mapped: dict[int, _Mapped] = {}
        self.shared: dict[tuple[int, int], int] = {}
        self.ids = itertools.count(1)
        self.resolved: list[tuple[int, int, int]] = []
        self.prefetched: list[tuple[int, Any, bool]] = []
        self.gathered: list[tuple[int, int]] = []

    def create(self, region: int, base_address: int, length_bytes: int, **_: Any) -> int:
        fd = os.memfd_create("region")
        os.ftruncate(fd, -(-length_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        self.building = (region, os.dup(fd))
        return fd

    def seal(self, region: int, **_: Any) -> None:
        _, fd = self.building
        n_bytes = os.fstat(fd).st_size
        self.cluster.content[region] = [os.pread(fd, n_bytes, 0)]
        os.close(fd)

    def abandon(self, region: int, **_: Any) -> None: ...

    server_id = SERVER_ID

    def retire(self, region: int, *, alone: bool, servers: Any, timeout_s: float) -> None:
        assert alone
        assert not servers

    def map(
        self, region: int, version: int, base: int, n_bytes: int, *, flags: int, timeout_s: float
    ) -> Mapping:
        if not flags & MAP_PRIVATE and (region, version) in self.shared:
            number = self.shared[region, version]
            self.mapped[number].count += 1
            return self._mapping(number)
        versions = self.cluster.content[region]
        if version >= len(versions):
            raise errors.NoVersionError(f"no version {version}")
        memory = mmap.mmap(-1, n_bytes)
        memory[:] = versions[version]
        number = next(self.ids)
        self.mapped[number] = _Mapped(memory, region, version, versions[version])
        if not flags & MAP_PRIVATE:
            self.shared[region, version] = number
        return self._mapping(number)

    def _mapping(self, number: int) -> Mapping:
        memory = self.mapped[number].memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Mapping(number, address, len(memory))

    def parts(self, number: int, runs: Any) -> list[PiecePart]:
        return [PiecePart(number, 0, 0, runs)]

    def unmap(self, number: int) -> None:
        mapped = self.mapped[number]
        mapped.count -= 1
        if mapped.count == 0:
            del self.mapped[number]
            self.shared = {k: n for k, n in self.shared.items() if n != number}

    unmap_later = unmap

    def prefetch(self, number: int, runs: Any, *, wait: bool = True, **_: Any) -> None:
        self.prefetched.append((number, runs.tolist(), wait))

    def gather(
        self,
        number: int,
        ids: Any,
        out: Any,
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
        timeout_s: float,
    ) -> None:
        self.cluster.fail("gather")
        self.gathered.append((number, ids.size))
        memory = self.mapped[number].memory
        assert ids.dtype == np.uint64
        assert stride_bytes >= row_bytes
        assert out.nbytes == ids.size * row_bytes
        begin = [offset_bytes + i * stride_bytes for i in ids.reshape(-1).tolist()]
        assert all(at + row_bytes <= len(memory) for at in begin)
        rows = b"".join(memory[at : at + row_bytes] for at in begin)
        ctypes.memmove(out.ctypes.data, rows, len(rows))

    def rows_here(
        self,
        number: int,
        ids: Any,
        n_rows: int,
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
    ) -> bool:
        assert ids.dtype == np.int64
        assert ids.flags.c_contiguous
        length = len(self.mapped[number].memory)
        assert offset_bytes + (n_rows - 1) * stride_bytes + row_bytes <= length
        if ids.size and (ids.min() < -n_rows or ids.max() >= n_rows):
            return True
        return self.has_all

    def absent_blocks(self, number: int) -> int:
        return 0 if self.has_all else len(self.mapped[number].memory) // BLOCK_BYTES

    def dirty(self, number: int) -> Any:
        mapped = self.mapped[number]
        now = np.frombuffer(mapped.memory[:], np.uint8).reshape(-1, BLOCK_BYTES)
        was = np.frombuffer(mapped.original, np.uint8).reshape(-1, BLOCK_BYTES)
        blocks = np.flatnonzero((now != was).any(axis=1))
        return np.array([[block, 1] for block in blocks], np.uint64).reshape(-1, 2)

    def stage(self, number: int, commit_id: int, runs: Any, *, timeout_s: float) -> int:
        self.cluster.fail("stage")
        mapped = self.mapped[number]
        self.cluster.staged[commit_id, mapped.region] = {
            block: mapped.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            for first, n in runs.tolist()
            for block in range(first, first + n)
        }
        return STAGED_AT

    def resolve(self, commit_id: int, region: int, version: int, mapping_id: int = 0) -> None:
        assert self.mapped[mapping_id].region == region
        self.resolved.append((commit_id, region, version))
        self.cluster.staged.pop((commit_id, region), None)


class FakeSession(Session):
    """A session over a `Cluster`."""

    def anchors_of(self, ref: Any) -> Anchors:
        return ()

    def __init__(self, cluster: Cluster, config: Config | None = None) -> None:
        indexing.install()
        self.cluster = cluster
        self.rpc = RegistryClient(self._call_registry)
        self.scope = SCOPE
        self.node_id = "node"
        self.server_id = SERVER_ID
        self.task_ends = TaskEnds()
        self.config = config or Config()
        self.owner = True
        self.leases = LeaseTable()
        self._freed = {}
        self._freed_after_sweep = 0
        self._client = Client(cluster)  # type: ignore[assignment]
        self._pid = os.getpid()
        self.creator = self._make_creator()
        self.creator._store = ""
        self.kept_layers = KeptLayers(self)

    @property
    def is_here(self) -> bool:
        return True  # there is no Ray whose cluster could go

    @property
    def fake(self) -> Client:
        return self._client  # type: ignore[return-value]

    def _call_registry(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if os.getpid() != self._pid:
            raise errors.ForkedError("fork")
        if method == "ask":
            return pack(self.cluster.call(*unpack(*args)))
        return self.cluster.call(method, *args)

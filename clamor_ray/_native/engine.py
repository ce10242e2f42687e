"""The page cache as a page server's process sees it: the engine and the keeper.

Import the names from `clamor_ray._native.client`. Nothing here imports Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clamor_ray._native.base import (
    PC_ERR_NO_PEER,
    PC_ERR_NO_REGION,
    POLICIES,
    REPLICATIONS,
    Runs,
    c,
    check,
    collect_runs,
    medium_of,
    ns,
    runs_pointer,
)
from clamor_ray._native.stored import HomeFile, StoredFiles, put_home
from clamor_ray._version import __version__

RETAIN_NONE = 2**64 - 1  # UINT64_MAX in the header


@dataclass(frozen=True, slots=True)
class Event:
    """Something that only Python can decide; see `enum pc_event_kind`."""

    kind: int
    error: int
    region: int
    server_id: int
    from_version: int
    version: int
    commit_id: int
    block: int
    text: str


@dataclass(frozen=True, slots=True)
class FileRead:
    """A range of the file of a region that is to be read; see `struct pc_file_read`."""

    id: int
    region: int
    first_block: int
    n_blocks: int
    urgent: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Home bytes of a shared region that lie in memory the caller keeps alive."""

    offset_bytes: int
    length_bytes: int
    address: int


def check_cache_disk(directory: str, n_bytes: int) -> None:
    """Whether a page server could have a cache of so many bytes there.

    Raises:
        NoSpaceError, RangeError, SystemCallError: It could not, and why.
    """
    path = c.ffi.new("char[]", os.fsencode(directory))
    check(c.lib.pc_disk_cache_check(path, n_bytes), directory=directory)


class Engine(StoredFiles):
    """The page server's engine: serves, fetches, answers faults, in threads of its own.

    Args:
        socket_name: path of the Unix socket to listen on.
        server_id: never 0; the same after a restart.
        keeper: the keeper that outlives this process, or None.
        n_loops: 0 chooses from the number of cores.
        fetch_timeout_s: for one request to one peer.
        fault_timeout_s: for all tries of one block.
        settle_s: after a restart, how long clients have to attach again before a freed region
            without leases counts as idle.
        page_bytes: fixed size of a demand fetch, a power of two from 4 KiB to 8 MiB; 0: by use.
        stage_timeout_s: how long a staged layer's writer may say nothing before the registry is
            asked what became of the commit.
        history_bytes: replaced blocks kept in memory.
        history_disk_bytes: replaced blocks kept on disk after that.
        history_directory: where; its files have no names. None: memory only.
        disk_directory: likewise, of homes on disk. None: there are none here.
        cache_bytes: cached blocks are kept below it; 0: no budget.
        cache_disk_bytes: of those that were evicted, in `disk_directory`; 0: none are kept.
        cache_policy: which of them go first, one of `POLICIES`.
        replication: whom askers are sent to, one of `REPLICATIONS`.
        floors: by region, the oldest version that must stay (`retain`), of what the keeper has.
        durable: homes lie on disk, and deltas wait until they are in a synced file
            (`layer_durable`).
        cold: what the keeper has comes from an earlier session (`Keeper.put_home`): nobody maps it.
        sums_directory: of the checksums of such homes; None: they are not checked.
    """

    def __init__(
        self,
        socket_name: str,
        *,
        server_id: int,
        keeper: Keeper | None = None,
        n_loops: int = 0,
        fetch_timeout_s: float = 10.0,
        fault_timeout_s: float = 60.0,
        page_bytes: int = 0,
        settle_s: float = 30.0,
        stage_timeout_s: float = 300.0,
        history_bytes: int = 256 << 20,
        history_disk_bytes: int = 4 << 30,
        history_directory: str | None = None,
        disk_directory: str | None = None,
        cache_bytes: int = 0,
        cache_disk_bytes: int = 0,
        cache_policy: str = "sieve",
        replication: str = "p2c",
        floors: Mapping[int, int] | None = None,
        durable: bool = False,
        cold: bool = False,
        sums_directory: str | None = None,
        library_version: str = __version__,
    ) -> None:
        super().__init__()
        self.server_id = server_id
        self._opens_said = 0
        ffi, lib = c.ffi, c.lib
        name = ffi.new("char[]", socket_name.encode())
        version = ffi.new("char[]", library_version.encode())
        options = ffi.new("struct pc_engine_options *")
        options.socket_name = name
        options.library_version = version
        options.server_id = server_id
        options.keeper_fd = -1 if keeper is None else keeper.fileno()
        options.n_loops = n_loops
        options.fetch_timeout_ns = ns(fetch_timeout_s)
        options.fault_timeout_ns = ns(fault_timeout_s)
        options.page_bytes = page_bytes
        options.settle_ns = ns(settle_s)
        options.stage_timeout_ns = ns(stage_timeout_s)
        options.history_bytes = history_bytes
        options.history_disk_bytes = history_disk_bytes
        directory = ffi.NULL
        if history_directory is not None:
            directory = ffi.new("char[]", os.fsencode(history_directory))
        options.history_directory = directory
        disk = ffi.NULL
        if disk_directory is not None:
            disk = ffi.new("char[]", os.fsencode(disk_directory))
        options.disk_directory = disk
        options.cache_bytes = cache_bytes
        options.cache_disk_bytes = cache_disk_bytes
        options.cache_policy = POLICIES[cache_policy]
        options.replication = REPLICATIONS[replication]
        n_floors = len(floors or {})
        kept = ffi.new("struct pc_floor[]", n_floors)
        for i, (region, oldest) in enumerate((floors or {}).items()):
            kept[i].region, kept[i].version = region, oldest
        options.floors, options.n_floors = kept, n_floors
        options.durable, options.cold = durable, cold
        sums = ffi.NULL
        if sums_directory is not None:
            sums = ffi.new("char[]", os.fsencode(sums_directory))
        options.sums_directory = sums
        out = ffi.new("pc_engine **")
        check(lib.pc_engine_start(options, out), socket=socket_name)
        self._opened(out[0])
        self._keeper = keeper  # its descriptor is the engine's for as long as it runs

    def end(self) -> None:
        """Tells all clients that the session has ended. `stop` follows."""
        check(self._call(c.lib.pc_engine_end))

    def in_use(self, but_homes: bool = False) -> int:
        """How much here would be missed: homes, leases (also of processes whose connection has
        ended, or that have yet to come back after a restart), staged layers.

        Args:
            but_homes: Neither homes count, nor layers that other nodes have staged.
        """
        return check(self._call(c.lib.pc_engine_in_use, int(but_homes)))

    def new_opens(self) -> int:
        """How often processes of the node have opened a variable since this was last asked."""
        before, self._opens_said = self._opens_said, self.stats()["opens"]
        return self._opens_said - before

    def leave(self) -> int:
        """As `stop`, of a server that no process of the node uses.

        Returns:
            `in_use` at the very end. Above 0 somebody came at the last moment: the keeper has all
            that the next server needs.
        """
        pointer = self._take()
        if pointer is None:
            return 0
        self._drain()
        return check(c.lib.pc_engine_leave(pointer))

    def stop(self) -> None:
        """Stops serving and joins the threads. Idempotent."""
        pointer = self._take()
        if pointer is not None:
            self._drain()
            check(c.lib.pc_engine_stop(pointer))

    def fileno(self) -> int:
        """Readable while there are events."""
        return check(self._call(c.lib.pc_engine_event_fd))

    def next_event(self) -> Event | None:
        out = c.ffi.new("struct pc_event *")
        if check(self._call(c.lib.pc_engine_next_event, out)) == 0:
            return None
        text = c.ffi.string(out.text).decode("utf-8", "replace")
        return Event(
            kind=int(out.kind),
            error=int(out.error),
            region=int(out.region),
            server_id=int(out.server_id),
            from_version=int(out.from_version),
            version=int(out.version),
            commit_id=int(out.commit_id),
            block=int(out.block),
            text=text,
        )

    @staticmethod
    def _info(region: int, version: int, base_address: int, length_bytes: int) -> Any:
        info = c.ffi.new("struct pc_region_info *")
        info.region, info.version = region, version
        info.base_address, info.length_bytes = base_address, length_bytes
        return info

    def define_region(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        homes: Sequence[int],
        loss: int = 0,
        term: int = 0,
        has_repair: bool = False,
        in_file: bool = False,
    ) -> None:
        """Answers NEED_REGION. `homes[i]` is the server id of 64 MiB extent i; `loss` as in
        `region_lacks`, `term` as in `set_homes`, `has_repair` as in `region_has_repair`. in_file:
        what no commit has written is in a file (`file_next`)."""
        info = self._info(region, version, base_address, length_bytes)
        info.loss = loss
        info.term = term
        info.has_repair = has_repair
        info.medium = medium_of(False, in_file)
        ids = c.ffi.new("uint64_t[]", list(homes))
        check(self._call(c.lib.pc_engine_define_region, info, ids, len(homes)), region=region)

    def file_next(self, only_urgent: bool = False) -> FileRead | None:
        """Takes a range of a file that is to be read; None: there is none. Any thread."""
        out = c.ffi.new("struct pc_file_read *")
        if check(self._call(c.lib.pc_engine_file_next, only_urgent, out)) == 0:
            return None
        where = (int(out.id), int(out.region), int(out.first_block), int(out.n_blocks))
        return FileRead(*where, bool(out.urgent))

    def file_fill(self, read_id: int, image: Any) -> None:
        """The next bytes of it, in whole blocks: a buffer. Any thread.

        Raises:
            FreedError: It was given up.
        """
        bytes_ = c.ffi.from_buffer(image)
        check(self._call(c.lib.pc_engine_file_fill, read_id, bytes_, len(bytes_)))

    def file_end(self, read_id: int, error: int = 0, text: str = "") -> None:
        """No more of it comes: what is missing fails with error.

        Raises:
            FreedError: It was given up.
        """
        check(self._call(c.lib.pc_engine_file_end, read_id, error, text.encode()))

    def renew_keeper(self, keeper: Keeper) -> None:
        """Answers KEEPER_LOST: this one is given all that the last one had."""
        check(self._call(c.lib.pc_engine_renew_keeper, keeper.fileno()))

    def refuse_region(self, region: int, error: int = PC_ERR_NO_REGION) -> None:
        check(self._call(c.lib.pc_engine_refuse_region, region, error), region=region)

    def create_shared(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        segments: Sequence[Segment],
    ) -> int:
        """Makes a region over memory that the caller keeps alive until it is retired.

        Returns the memfd for everything outside the segments: fill it with `copy_in`, close it,
        then `seal`.
        """
        info = self._info(region, version, base_address, length_bytes)
        array = c.ffi.new("struct pc_segment[]", max(1, len(segments)))
        for slot, segment in zip(array, segments, strict=False):
            slot.offset_bytes = segment.offset_bytes
            slot.length_bytes = segment.length_bytes
            slot.address = segment.address
        fd = c.ffi.new("int *")
        check(
            self._call(c.lib.pc_engine_create_shared, info, array, len(segments), fd),
            region=region,
        )
        return int(fd[0])

    def seal(self, region: int) -> None:
        check(self._call(c.lib.pc_engine_seal, region), region=region)

    def set_changes(
        self, region: int, from_version: int, to_version: int, runs: Runs, *, error: int = 0
    ) -> None:
        """Answers NEED_CHANGES: the blocks that changed in (from, to].

        Args:
            region: its id.
            from_version: the older version.
            to_version: the newer one.
            runs: sorted and disjoint; may be empty.
            error: instead of runs: `PC_ERR_EXPIRED` (the log does not reach back so far) or
                `PC_ERR_NO_VERSION`.
        """
        pointer, n_runs, _keep = runs_pointer(runs)
        check(
            self._call(
                c.lib.pc_engine_set_changes,
                region,
                from_version,
                to_version,
                pointer,
                n_runs,
                error,
            ),
            region=region,
            version=to_version,
        )

    def publish(self, region: int, version: int, commit_id: int) -> None:
        """At the home: the layer staged under `commit_id` is this version. Idempotent.

        Raises:
            NoVersionError: a version before it has not been published here.
        """
        check(
            self._call(c.lib.pc_engine_publish, region, version, commit_id),
            region=region,
            version=version,
        )

    def caught_up(self, region: int, *, error: int = 0) -> None:
        """Answers NEED_PUBLISHED, after a `publish` for each commit there is."""
        check(self._call(c.lib.pc_engine_caught_up, region, error), region=region)

    def settled(self, region: int, version: int) -> None:
        """Answers NEED_SETTLED: all homes of the region have acknowledged up to this version."""
        check(self._call(c.lib.pc_engine_settled, region, version), region=region)

    def drop_staged(self, region: int, commit_id: int) -> None:
        """The commit was refused. An unknown id is no error."""
        check(self._call(c.lib.pc_engine_drop_staged, region, commit_id), region=region)

    def has_layer(self, region: int, commit_id: int) -> bool:
        """Whether a layer is staged here, by a process of this node or pulled. Any thread."""
        return bool(check(self._call(c.lib.pc_engine_has_layer, region, commit_id)))

    def pull(self, region: int, commit_id: int, server_id: int, layer_bytes: int) -> None:
        """At the home: fetches the layer that `server_id` holds. Ends with `EVENT_PULLED`.
        With this server's own id it only says whether the layer is here: `HOME_LOST` if not."""
        check(
            self._call(c.lib.pc_engine_pull, region, commit_id, server_id, layer_bytes),
            region=region,
            page_server=f"{self.server_id:#x}",
        )

    def cached_versions(self, region: int) -> list[int]:
        """The versions of a region of which this server has blocks that are homed elsewhere."""
        capacity = 16
        while True:
            out = c.ffi.new("uint64_t[]", capacity)
            n = check(self._call(c.lib.pc_engine_cached_versions, region, out, capacity))
            if n <= capacity:
                return [int(out[i]) for i in range(n)]
            capacity = n + 16

    def cached_blocks(self, region: int, version: int) -> Runs:
        """The blocks of one of them: shape (n, 2), first block and number of blocks."""
        return collect_runs(
            lambda runs, capacity: check(
                self._call(c.lib.pc_engine_cached_blocks, region, version, runs, capacity)
            )
        )

    def stage_cached(self, region: int, version: int, commit_id: int, runs: Runs) -> int:
        """Makes a layer of cached blocks, for another server to pull under `commit_id`.

        Returns:
            Its bytes.

        Raises:
            InternalError: Some of the blocks are not here any more.
        """
        pointer, n_runs, _keep = runs_pointer(runs)
        return check(
            self._call(c.lib.pc_engine_stage_cached, region, version, commit_id, pointer, n_runs),
            region=region,
            version=version,
        )

    def rebuild_begin(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        lost: Runs,
        term: int = 0,
        on_disk: bool = False,
        in_file: bool = False,
    ) -> int:
        """Makes the file of a region whose home this server is to be: the caller's to close.

        Args:
            region, version, base_address, length_bytes: Of the region.
            lost: Blocks that nobody has: who needs one gets HomeLostError, at versions before the
                first that writes it.
            term: In which this server would be the home, as in `set_homes`.
            on_disk: Not in memory.
            in_file: As in `define_region`.
        """
        info = self._info(region, version, base_address, length_bytes)
        info.term = term
        info.medium = medium_of(on_disk, in_file)
        fd = c.ffi.new("int *")
        pointer, n_runs, _keep = runs_pointer(lost)
        check(self._call(c.lib.pc_engine_rebuild_begin, info, pointer, n_runs, fd), region=region)
        return int(fd[0])

    def rebuild_take(self, region: int, fd: int, commit_id: int) -> None:
        """Writes a layer that is staged here into it, and drops the layer."""
        check(self._call(c.lib.pc_engine_rebuild_take, region, fd, commit_id), region=region)

    def rebuild_copy(self, region: int, fd: int, version: int, runs: Runs) -> None:
        """Copies blocks that are cached here at a version into it.

        Raises:
            InternalError: Some of them are not here any more.
        """
        pointer, n_runs, _keep = runs_pointer(runs)
        check(
            self._call(c.lib.pc_engine_rebuild_copy, region, fd, version, pointer, n_runs),
            region=region,
            version=version,
        )

    def rebuild_seal(self, region: int, fd: int) -> None:
        """All of it is there. It serves once this server is said to be the home."""
        check(self._call(c.lib.pc_engine_rebuild_seal, region, fd), region=region)

    def rebuild_seal_at(self, region: int, fd: int, version: int) -> None:
        """The same at a later version than the one that it was begun with.

        Raises:
            FreedError: Another attempt has begun since, or this process has.
        """
        check(
            self._call(c.lib.pc_engine_rebuild_seal_at, region, fd, version),
            region=region,
            version=version,
        )

    def home_blocks(self, region: int, version: int) -> Runs:
        """The blocks of a home here that hold data at a version: shape (n, 2), first block and
        number of blocks. The others are zeros, or lost."""
        return collect_runs(
            lambda runs, capacity: check(
                self._call(c.lib.pc_engine_home_blocks, region, version, runs, capacity),
                region=region,
                version=version,
            )
        )

    def stage_home(self, region: int, version: int, commit_id: int, runs: Runs) -> int:
        """Makes a layer of blocks that the home here has at a version, for another server to pull.

        Returns:
            Its bytes.

        Raises:
            FreedError: This server is not the home.
            NoVersionError: The home does not know the version yet.
            SnapshotExpired: Nor any more.
            HomeLostError: Some of the blocks are lost.
        """
        pointer, n_runs, _keep = runs_pointer(runs)
        return check(
            self._call(c.lib.pc_engine_stage_home, region, version, commit_id, pointer, n_runs),
            region=region,
            version=version,
        )

    def stage_record(self, region: int, version: int, commit_id: int) -> int:
        """Makes a layer of what this version had in the blocks that the next commit replaced.

        Returns:
            Its bytes.

        Raises:
            SnapshotExpired: It is not kept: older ones are of no use.
            HomeLostError: Blocks of it were lost then: likewise.
        """
        return check(
            self._call(c.lib.pc_engine_stage_record, region, version, commit_id),
            region=region,
            version=version,
        )

    def stage_xor(
        self, region: int, version: int, commit_id: int, parts: Sequence[tuple[int, int]]
    ) -> int:
        """Makes a layer of layers that are staged here: their XOR, of every block that one has.

        The parts are dropped.

        Args:
            region: Of which blocks come back.
            version: That they are of.
            commit_id: Of the layer that is made; `rebuild_take` takes it.
            parts: (region, commit id) of each. A block that one lacks counts as zeros.

        Returns:
            Its bytes.

        Raises:
            FreedError: The region is not known here.
            NoVersionError: A part is not staged here.
            ProtocolError: A part is a delta, which is no content.
            RangeError: A part is the layer itself, or has blocks outside of the region.
        """
        packed = c.ffi.new("struct pc_layer_part[]", list(parts))
        return check(
            self._call(c.lib.pc_engine_stage_xor, region, version, commit_id, packed, len(packed)),
            region=region,
            version=version,
        )

    def rebuild_take_record(self, region: int, fd: int, commit_id: int) -> None:
        """Takes such a layer, that is staged here, into the history of what is prepared. It waits
        for the worker: not on an event loop."""
        check(self._call(c.lib.pc_engine_rebuild_take_record, region, fd, commit_id), region=region)

    def rebuild_drop(self, region: int, fd: int = -1) -> None:
        """Lets go of what the attempt with this memfd has prepared; -1: of what any has."""
        check(self._call(c.lib.pc_engine_rebuild_drop, region, fd), region=region)

    def set_homes(self, region: int, homes: Sequence[int], term: int = 0) -> None:
        """The homes of a region that is known here are others now. Answers NEED_HOME. A home here
        that is not named ends.

        Args:
            region: Which.
            homes: Of each extent.
            term: Which of its homes in turn: what is older than what was heard changes nothing.
                0: nobody knows.

        Raises:
            FreedError: It is not known here.
            HomeLostError: This server is one of them, and has nothing of it.
        """
        ids = c.ffi.new("uint64_t[]", list(homes))
        check(
            self._call(c.lib.pc_engine_set_homes_of, region, term, ids, len(homes)), region=region
        )

    def wait_for_keeper(self) -> None:
        """Waits until the keeper has what it was given until now, as the homes that this server
        has heard of: then they outlive it. Not on an event loop.

        Raises:
            WaitTimeoutError: The keeper does not take it.
        """
        check(self._call(c.lib.pc_engine_wait_for_keeper))

    def region_lacks(self, region: int, loss: int) -> None:
        """Blocks of the region are lost: the number of that loss, which comes with each mapping
        from now on; 0: none are.

        Raises:
            FreedError: It is not known here.
        """
        check(self._call(c.lib.pc_engine_region_lacks, region, loss), region=region)

    def set_repair(
        self,
        region: int,
        version: int,
        members: Sequence[tuple[int, int, int]],
        is_mirror: bool,
    ) -> None:
        """Answers NEED_REPAIR: who makes the region's blocks of this version again.

        Args:
            region: Which.
            version: Of it.
            members: (region, version, server id) of each; none: nobody does now. The engine asks
                again after a pause.
            is_mirror: Each member alone has the blocks. Otherwise they are the XOR of all.

        Raises:
            FreedError: It is not known here.
        """
        array = c.ffi.new("struct pc_repair_member[]", max(1, len(members)))
        for slot, member in zip(array, members, strict=False):
            slot.region, slot.version, slot.server_id = member
        call = c.lib.pc_engine_set_repair
        check(self._call(call, region, version, array, len(members), int(is_mirror)), region=region)

    def region_has_repair(self, region: int, has_repair: bool) -> None:
        """Whether other regions make the blocks of the region again. Where they do, the engine asks
        for them (NEED_REPAIR) when it needs them.

        Raises:
            FreedError: It is not known here.
        """
        check(self._call(c.lib.pc_engine_region_has_repair, region, has_repair), region=region)

    def region_lost(self, region: int, error: int) -> None:
        """The registry's verdict: who opens the region from now on gets the error, until it has a
        home again."""
        check(self._call(c.lib.pc_engine_region_lost, region, error), region=region)

    def home_lost(self, region: int, server_id: int, error: int) -> None:
        """Answers NEED_HOME: there will be no other home than this lost one."""
        check(self._call(c.lib.pc_engine_home_lost, region, server_id, error), region=region)

    @property
    def peer_lanes(self) -> int:
        """How many connections each peer needs."""
        return check(self._call(c.lib.pc_engine_peer_lanes))

    def add_peer(self, server_id: int, lane: int, fd: int) -> None:
        """Hands over an authenticated connection that we made; the engine owns `fd` from here."""
        check(self._call(c.lib.pc_engine_add_peer, server_id, lane, fd), server=server_id)

    def peer_lost(self, server_id: int, error: int = PC_ERR_NO_PEER) -> None:
        check(self._call(c.lib.pc_engine_peer_lost, server_id, error), server=server_id)

    def peer_unreached(self, server_id: int, for_s: float, cause: str) -> None:
        """The peer lives and is not reached: what those are told who wait for it in vain."""
        text = cause.encode("utf-8", "replace")
        check(self._call(c.lib.pc_engine_peer_unreached, server_id, ns(for_s), text))

    def serve(self, server_id: int, fd: int) -> None:
        """Hands over an authenticated connection made to us; the engine owns `fd` from here."""
        check(self._call(c.lib.pc_engine_serve, server_id, fd), server=server_id)

    def retire(self, region: int, *, force: bool = False) -> None:
        check(self._call(c.lib.pc_engine_retire, region, int(force)), region=region)

    def retain(self, region: int, version: int | None) -> None:
        """Old blocks that this version, or a newer one, of a region needs are dropped last.

        Args:
            region: its id; it need not be known here yet.
            version: the oldest that must stay; None: none must.
        """
        floor = RETAIN_NONE if version is None else version
        check(self._call(c.lib.pc_engine_retain, region, floor), region=region)

    def stats(self) -> dict[str, int]:
        """Counters, by the names of `struct pc_engine_stats`."""
        out = c.ffi.new("struct pc_engine_stats *")
        check(self._call(c.lib.pc_engine_get_stats, out))
        return _fields(out[0])

    def region_stats(self) -> list[dict[str, int]]:
        """One dict per region known here, by the names of `struct pc_region_stats`."""
        return self._all(c.lib.pc_engine_region_stats, "struct pc_region_stats[]")

    def process_waits(self) -> list[dict[str, int]]:
        """One dict per client of a process here, by the names of `struct pc_process_waits`."""
        return self._all(c.lib.pc_engine_process_waits, "struct pc_process_waits[]")

    def _all(self, function: Any, kind: str) -> list[dict[str, int]]:
        """What a function writes into an array, and returns the number of."""
        capacity = 64
        while True:
            out = c.ffi.new(kind, capacity)
            n = check(self._call(function, out, capacity))
            if n <= capacity:
                return [_fields(out[i]) for i in range(n)]
            capacity = n + n // 4

    def histogram(self, region: int, which: int, n_buckets: int) -> list[int]:
        """How many blocks of a set (`BLOCKS_*`) fall in each of `n_buckets` equal parts."""
        out = c.ffi.new("uint32_t[]", n_buckets)
        check(self._call(c.lib.pc_engine_histogram, region, which, out, n_buckets), region=region)
        return list(out)


def _fields(struct: Any) -> dict[str, int]:
    return {name: int(getattr(struct, name)) for name, _ in c.ffi.typeof(struct).fields}


class Keeper:
    """A connection to the keeper, which holds a page server's descriptors across its death."""

    def __init__(
        self, listen_name: str, *, timeout_s: float = 5.0, absent_at_once: bool = False
    ) -> None:
        """
        Args:
            listen_name: Its socket.
            timeout_s: For one that listens and takes no connection yet.
            absent_at_once: Do not wait so long for one that nobody has started.

        Raises:
            ServerUnavailableError: Nobody listens there.
            WaitTimeoutError: There is one, and it takes no connection.
        """
        fd = c.ffi.new("int *")
        name = listen_name.encode()
        connect = c.lib.pc_keeper_find if absent_at_once else c.lib.pc_keeper_connect
        check(connect(name, ns(timeout_s), fd), socket=listen_name)
        self._fd = int(fd[0])

    def fileno(self) -> int:
        return self._fd

    def put_home(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        fd: int,
        *,
        in_file: bool = False,
        term: int = 0,
    ) -> None:
        """Gives it the file of a home of an earlier session, before any engine has it.

        Args:
            region, version, base_address, length_bytes: Of the home.
            fd: Its file, which stays the caller's.
            in_file: As in `Engine.define_region`.
            term: In which that server is the home: what is said of earlier ones changes nothing.

        Raises:
            WaitTimeoutError: The keeper takes nothing.
            ClosedError: It is gone.
        """
        home = HomeFile(
            fd=fd,
            version=version,
            base_address=base_address,
            length_bytes=length_bytes,
            in_file=in_file,
            term=term,
        )
        put_home(self._fd, region, home)

    def quit(self) -> None:
        """Tells the keeper to let go of everything and leave."""
        check(c.lib.pc_keeper_quit(self._fd))

    def close(self) -> None:
        """Ends the connection; the keeper stays for whoever comes next. Once."""
        os.close(self._fd)


def keeper_run(listen_name: str, watched_pid: int, *, orphan_timeout_s: float = 60.0) -> None:
    """Is the keeper: returns when the watched process (the raylet) ends, or when told to quit."""
    check(
        c.lib.pc_keeper_run(listen_name.encode(), watched_pid, ns(orphan_timeout_s)),
        socket=listen_name,
    )

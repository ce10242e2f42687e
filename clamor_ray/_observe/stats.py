"""`clamor.stats()` and `clamor.block_map()`: what the page servers did.

Plain numbers, counted since each page server started; the difference of two is a run's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._read import opener

if TYPE_CHECKING:
    from clamor_ray._native.pieced_client import PieceVersion
    from clamor_ray._protocol.messages import (
        MoveCounters,
        ReadPredictorCounters,
        RegistryReport,
        ServerInfo,
    )
    from clamor_ray._protocol.registry_client import RegistryClient
    from clamor_ray._read.ref import GlobalRef

_SETS = {"present": 0, "fetched": 1, "touched": 2}  # enum pc_block_set


class _Counters(Mapping[str, int]):
    """Counters by attribute, or by name as in a mapping."""

    def __getitem__(self, name: str) -> int:
        if name not in self.__dict__:
            raise KeyError(name)
        return int(self.__dict__[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)


@dataclass(frozen=True, eq=False)
class EngineStats(_Counters):
    """Counters of one page server since it started, and what it holds now; an attribute each, or by
    name as of a mapping. The names are those of `struct pc_engine_stats`. A block is 4 KiB.

    Args:
        regions: global variables that it knows.
        generations: versions of variables that it holds memory for.
        mappings: mappings of them in processes of its node.
        clients: connections of processes of its node.
        served_connections: connections from other page servers, which fetch from it.
        peer_connections: connections to other page servers, which it fetches from.
        faults: faults that it has taken: touches of blocks that were absent.
        faults_failed: faults that ended with an error.
        faults_waiting: faults that wait now.
        fault_wait_ns: how long faults have waited, together; those that wait now, until now.
        fetch_requests: requests for blocks that it has sent.
        fetch_retries: requests that were sent again.
        fetch_failed: requests that ended with an error.
        fetches_in_flight: requests that wait now for their answer.
        blocks_fetched: blocks that came from other page servers.
        bytes_received: bytes that came over the network, headers included.
        bytes_sent: bytes that it has sent over the network, headers included.
        blocks_served: blocks that it has sent to other page servers.
        zero_blocks: blocks that it filled with zeros, without a message.
        local_blocks: blocks that came from memory, or the disk, of its own node.
        prefetch_requests: prefetches that processes have asked for.
        prefetched_blocks: blocks that they brought.
        home_bytes: bytes of memory of the variables that are homed on its node.
        disk_bytes: bytes of files of those that are on disk (`spill=True`).
        cached_bytes: bytes of cached blocks, of variables that are homed elsewhere.
        bad_messages: messages that it refused, from clients and peers.
        reattached: processes that connected again after a restart.
        advances: generations that moved to a newer version in place.
        forks: generations that were made beside an older one.
        layers: layers (blocks that a commit changes) that are staged or published, and not applied.
        layer_bytes: their bytes.
        retained_layers: layers of this node's commits that are kept beside the home's copy.
        retained_bytes: their bytes.
        commits_staged: layers that were staged here.
        commits_published: layers that became part of a version.
        commits_applied: layers that were applied to the base.
        commits_dropped: layers that were dropped: their commits were not made.
        history_records: replaced blocks that are kept for old versions.
        history_bytes: bytes of those in memory.
        history_disk_bytes: bytes of those on disk.
        history_expired: replaced blocks that were let go for want of room.
        history_retained_bytes: bytes of replaced blocks that collections could need again.
        history_retained_expired: such blocks that were let go all the same.
        redirected_blocks: blocks for which it, as their home, sent the asker to another node.
        redirect_misses: blocks that it asked a peer for, and the peer did not have.
        peer_blocks_served: blocks that it has sent without being their home.
        peer_blocks_fetched: blocks that it got from nodes that are not their home.
        evicted_blocks: cached blocks that were evicted.
        refetched_blocks: blocks that were fetched again soon after they were evicted.
        rows_served: rows that it has sent for `clamor.gather`.
        rows_fetched: rows that it got for `clamor.gather`.
        degraded_blocks: blocks that other pieces made, because their home was lost or late.
        mirror_blocks: blocks that it got from a mirror of their home, by choice.
        hedges: requests for which it asked others besides, because the answer was late.
        hedges_won: of those, requests for which the others were faster.
        opens: how often processes of the node have opened a variable.
        file_reads: ranges of files that were read, for variables of `clamor.from_file`.
        file_blocks: blocks that came from them.
        damaged_blocks: blocks of variables of an earlier session that did not have their checksum.
        disk_cached_bytes: bytes of blocks that were evicted, and are on its node's disk.
        disk_cache_reads: blocks that came back from there.
        disk_cache_writes: blocks that went there.

    Example:
        >>> engine = clamor.stats().nodes[0].engine
        >>> engine.faults == engine["faults"]
        True
    """

    regions: int = 0
    generations: int = 0
    mappings: int = 0
    clients: int = 0
    served_connections: int = 0
    peer_connections: int = 0
    faults: int = 0
    faults_failed: int = 0
    faults_waiting: int = 0
    fault_wait_ns: int = 0
    fetch_requests: int = 0
    fetch_retries: int = 0
    fetch_failed: int = 0
    fetches_in_flight: int = 0
    blocks_fetched: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    blocks_served: int = 0
    zero_blocks: int = 0
    local_blocks: int = 0
    prefetch_requests: int = 0
    prefetched_blocks: int = 0
    home_bytes: int = 0
    disk_bytes: int = 0
    cached_bytes: int = 0
    bad_messages: int = 0
    reattached: int = 0
    advances: int = 0
    forks: int = 0
    layers: int = 0
    layer_bytes: int = 0
    retained_layers: int = 0
    retained_bytes: int = 0
    commits_staged: int = 0
    commits_published: int = 0
    commits_applied: int = 0
    commits_dropped: int = 0
    history_records: int = 0
    history_bytes: int = 0
    history_disk_bytes: int = 0
    history_expired: int = 0
    history_retained_bytes: int = 0
    history_retained_expired: int = 0
    redirected_blocks: int = 0
    redirect_misses: int = 0
    peer_blocks_served: int = 0
    peer_blocks_fetched: int = 0
    evicted_blocks: int = 0
    refetched_blocks: int = 0
    rows_served: int = 0
    rows_fetched: int = 0
    degraded_blocks: int = 0
    mirror_blocks: int = 0
    hedges: int = 0
    hedges_won: int = 0
    opens: int = 0
    file_reads: int = 0
    file_blocks: int = 0
    damaged_blocks: int = 0
    disk_cached_bytes: int = 0
    disk_cache_reads: int = 0
    disk_cache_writes: int = 0


@dataclass(frozen=True, eq=False)
class RegionStats(_Counters):
    """One global variable on one node; an attribute each, or by name as of a mapping. The names are
    those of `struct pc_region_stats`. A block is 4 KiB. Of a variable that is spread they are the
    sums over its pieces that the node has.

    Args:
        region: id of the variable.
        version: the newest that the node knows.
        length_bytes: its length in bytes.
        is_home: 1 where the node is its home, or that of a part, else 0.
        mappings: mappings of it in processes of the node.
        generations: versions of it that the node holds memory for.
        oldest_version: the oldest that the home can serve; 0 of a variable that is spread.
        leaves_home: 1 where the node was its home, and other nodes still read what they asked of
            it.
        present_blocks: blocks that the node has, of its newest generation.
        fetched_blocks: blocks of those that came from other nodes.
        touched_blocks: blocks of those that processes were seen to touch.
        fault_fetched_blocks: blocks that page faults have asked for, over all versions, where the
            page server chose how many. `clamor.gather`, `table[ids]` and `clamor.prefetch` fetch
            what is asked for, and do not count here.
        fault_touched_blocks: how many of these processes have touched: an estimate from samples,
            which may be wrong by some per cent.
        fault_trip_blocks: how many blocks could be moved in the time of one round trip to the home:
            page faults weigh the two against each other. Measured, and 12 before it was; 0 where
            there were no such faults.
        home_bytes: memory of its home here, as far as it holds data.
        disk_bytes: of its home here, if that is on disk.
        reads: how often processes of the node have opened it, and other nodes have asked this one
            for some of it. A node that is drained, or is full, asks this.
        idle_ns: since the last of these; 0 where there was none.
        faults: touches of absent blocks that had to wait for them.
        fault_wait_ns: how long these have waited, together; those that wait now, until now.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> (counters,) = clamor.stats().region(ref).values()
        >>> counters.is_home, counters.length_bytes > ref.nbytes
        (1, True)
    """

    region: int = 0
    version: int = 0
    length_bytes: int = 0
    is_home: int = 0
    mappings: int = 0
    generations: int = 0
    oldest_version: int = 0
    leaves_home: int = 0
    present_blocks: int = 0
    fetched_blocks: int = 0
    touched_blocks: int = 0
    fault_fetched_blocks: int = 0
    fault_touched_blocks: int = 0
    fault_trip_blocks: int = 0
    home_bytes: int = 0
    disk_bytes: int = 0
    reads: int = 0
    idle_ns: int = 0
    faults: int = 0
    fault_wait_ns: int = 0

    @property
    def fault_ratio(self) -> float:
        """Blocks that page faults have fetched for each block that was touched; 0.0 before there
        were any. Where it is far above 1, gather the rows (`clamor.gather`, or `table[ids]` on what
        `get()` returns), or fix the page size (`ref.get(page_bytes=4096)`).

        Example:
            >>> ref = clamor.put(np.arange(10**5))
            >>> (counters,) = clamor.stats().region(ref).values()
            >>> counters.fault_ratio  # it is at home here: there were none
            0.0
        """
        if not self.fault_touched_blocks:
            return 0.0
        return self.fault_fetched_blocks / self.fault_touched_blocks


@dataclass(frozen=True)
class NodeStats:
    """One node's page server. Where `error` is not empty it did not answer: the rest is zeros.

    Args:
        info: which one.
        engine: its counters.
        regions: its part of each global variable.
        refused_connections: to its data port, by reason.
        error: why it did not answer.
        cache_bytes: the budget of its cached blocks; `engine.cached_bytes` is what they take.
        thrashing: how often, at most every ten seconds, it found that it fetches again what it
            has just evicted: the budget is too small for what tasks use at once.
        leaving: it was drained (`clamor.drain`): it takes no variables of other nodes, and ends
            when no process of its node uses it.

    Example:
        >>> clamor.init().node_id in [node.node_id for node in clamor.stats().nodes]
        True
    """

    info: ServerInfo
    engine: EngineStats = field(default_factory=EngineStats)
    regions: tuple[RegionStats, ...] = ()
    refused_connections: tuple[tuple[str, int], ...] = ()
    error: str = ""
    cache_bytes: int = 0
    thrashing: int = 0
    leaving: bool = False

    @property
    def node_id(self) -> str:
        """Ray's hex id of the node."""
        return self.info.node_id

    def region(self, region: GlobalRef[Any] | int) -> RegionStats | None:
        """The node's counters of one global variable.

        Args:
            region: the variable, or its id.

        Returns:
            The counters, or None where the node has no part of it.

        Example:
            >>> ref = clamor.put(np.arange(10**5))
            >>> here = clamor.init().node_id
            >>> (node,) = [node for node in clamor.stats().nodes if node.node_id == here]
            >>> node.region(ref).length_bytes > ref.nbytes
            True
        """
        if isinstance(region, int):
            return next((found for found in self.regions if found.region == region), None)
        pieces = [piece.region for piece in region._piece_versions()]
        if not pieces:
            return self.region(region._region)
        return _of_pieces(region, [found for found in self.regions if found.region in pieces])


def _of_pieces(ref: GlobalRef[Any], found: Sequence[RegionStats]) -> RegionStats | None:
    """The counters of a variable's pieces as one; None where there are none."""
    if not found:
        return None
    most = ("is_home", "leaves_home", "generations", "fault_trip_blocks")
    values = {
        name: (max if name in most else sum)(getattr(each, name) for each in found)
        for name in (field.name for field in fields(RegionStats))
    }
    values["idle_ns"] = min((each.idle_ns for each in found if each.idle_ns), default=0)
    values |= {"region": ref._region, "version": ref.version, "length_bytes": ref._length_bytes}
    return RegionStats(**values | {"oldest_version": 0})


@dataclass(frozen=True)
class Stats:
    """The whole session: one entry per page server.

    Args:
        nodes: the page servers.
        regions_by_state: how many global variables are in which state.
        address_bytes_in_use: of the global address space.
        replay: how many read sets were noted, asked for and found (`clamor.remote(replay=...)`).
        names: id -> name of the variables that have one.
        moves: what `clamor.drain` has done, since the registry started.
        degraded: pieces of variables with redundancy that would not survive the loss of one more
            node: a node was lost, and they are being made again, or there are too few nodes.
        lost: id -> why, of the variables that are lost or lack blocks.

    Example:
        >>> stats = clamor.stats()
        >>> stats.bytes_received == sum(node.engine.bytes_received for node in stats.nodes)
        True
    """

    nodes: tuple[NodeStats, ...] = ()
    regions_by_state: tuple[tuple[str, int], ...] = ()
    address_bytes_in_use: int = 0
    replay: ReadPredictorCounters | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    moves: MoveCounters | None = None
    degraded: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)

    @property
    def bytes_received(self) -> int:
        """What crossed the network to any node, headers included."""
        return sum(node.engine.bytes_received for node in self.nodes)

    @property
    def cache_bytes(self) -> int:
        """The cache budgets of all nodes."""
        return sum(node.cache_bytes for node in self.nodes)

    @property
    def cached_bytes(self) -> int:
        """Blocks that nodes hold of extents homed elsewhere."""
        return sum(node.engine.cached_bytes for node in self.nodes)

    @property
    def thrashing(self) -> tuple[NodeStats, ...]:
        """The nodes whose cache was too small for what their tasks used at once."""
        return tuple(node for node in self.nodes if node.thrashing)

    def __str__(self) -> str:
        """A line for each node, and each name; all counters are attributes."""
        from clamor_ray._labels import label
        from clamor_ray._objects.layout import format_bytes

        lines = [("node", "home", "cached", "fetched", "received", "sent", "faults", "variables")]
        for node in self.nodes:
            engine = node.engine
            cells = (
                format_bytes(engine.home_bytes),
                format_bytes(engine.cached_bytes),
                f"{engine.blocks_fetched:,} blocks",
                format_bytes(engine.bytes_received),
                format_bytes(engine.bytes_sent),
                f"{engine.faults:,}",
                f"{len(node.regions):,}",
            )
            lines.append((node.node_id[:8], *(cells if not node.error else (node.error,))))
        full = [line for line in lines if len(line) == len(lines[0])]
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if not index else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=False))
            ).rstrip()
            for line in lines
        ]
        named = [f"{label(region)} is {name!r}" for region, name in sorted(self.names.items())]
        return "\n".join([*table, *named])

    def region(self, ref: GlobalRef[Any]) -> dict[str, RegionStats]:
        """The counters of one global variable on every node that has a part of it.

        Args:
            ref: the variable.

        Returns:
            Node id -> counters.

        Example:
            >>> ref = clamor.put(np.arange(10**5))
            >>> [found.is_home for found in clamor.stats().region(ref).values()]
            [1]
        """
        found = ((node.node_id, node.region(ref)) for node in self.nodes)
        return {node_id: stats for node_id, stats in found if stats is not None}


MOST_PARTS: Final = 4096  # of one piece, in a map of a variable

_C = TypeVar("_C", EngineStats, RegionStats)


def _known(cls: type[_C], values: Mapping[str, int]) -> _C:
    names = {f.name for f in fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def from_report(report: RegistryReport) -> Stats:
    """Stats from what the registry says."""
    nodes = tuple(
        NodeStats(
            info=server.info,
            engine=_known(EngineStats, server.engine),
            regions=tuple(_known(RegionStats, values) for values in server.regions),
            refused_connections=tuple(server.connections.refused),
            error=server.error,
            cache_bytes=server.cache_bytes,
            thrashing=server.thrashing,
            leaving=server.leaving,
        )
        for server in report.servers
    )
    return Stats(
        nodes=nodes,
        regions_by_state=tuple(sorted(report.regions_by_state.items())),
        address_bytes_in_use=report.address_bytes_in_use,
        replay=report.replay,
        names=dict(report.names),
        moves=report.moves,
        degraded=report.degraded,
        lost=dict(report.lost),
    )


def stats() -> Stats:
    """What every page server of the session has done so far.

    Returns:
        Frozen dataclasses: `nodes`, each with `engine` counters and `regions`.

    Raises:
        NotInitializedError: Before `clamor.init()`.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> sum(node.engine.home_bytes for node in clamor.stats().nodes) > ref.nbytes
        True
    """
    return from_report(opener.current().rpc.stats())


def block_map(
    ref: GlobalRef[Any],
    which: Literal["present", "fetched", "touched"] = "touched",
    buckets: int = 512,
) -> dict[str, npt.NDArray[np.uint32]]:
    """How many blocks of a global variable each node holds, fetched or touched, part by part.

    Args:
        ref: the variable.
        which: the set of blocks that is counted.
        buckets: number of equal parts.

    Returns:
        Node id -> one count per part; nodes that never saw the variable are left out.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        ValueError: No such set, or no parts.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.zeros(4 * 512))  # 4 blocks of 4 KiB, and one that describes it
        >>> clamor.block_map(ref, "fetched", buckets=4)  # it is at home here: nothing was fetched
        {'...': array([0, 0, 0, 0], dtype=uint32)}
    """
    if which not in _SETS:
        raise ValueError(f"which is one of {', '.join(_SETS)}, not {which!r}")
    if buckets < 1:
        raise ValueError(f"buckets is at least 1, not {buckets}")
    session = opener.current(ref._scope)
    if ref._inline:
        return {}
    if pieces := ref._piece_versions():
        return map_of_pieces(session.rpc, pieces, _SETS[which], buckets)
    answer = session.rpc.histogram(ref._region, _SETS[which], buckets)
    return {node_id: np.asarray(counts, np.uint32) for node_id, counts in answer.items()}


def map_of_pieces(
    rpc: RegistryClient, pieces: Sequence[PieceVersion], which: int, buckets: int
) -> dict[str, npt.NDArray[np.uint32]]:
    """Of each piece in parts of its own, each of which counts where its middle lies."""
    found: dict[str, npt.NDArray[np.uint32]] = {}
    total_blocks = sum(piece.length_bytes for piece in pieces) / BLOCK_BYTES
    first_block = 0.0
    for piece in pieces:
        n_blocks = piece.length_bytes / BLOCK_BYTES
        n_parts = min(int(n_blocks), MOST_PARTS)
        middles = first_block + (np.arange(n_parts) + 0.5) * (n_blocks / n_parts)
        into = (middles * (buckets / total_blocks)).astype(np.intp)
        for node_id, counts in rpc.histogram(piece.region, which, n_parts).items():
            here = found.setdefault(node_id, np.zeros(buckets, np.uint32))
            np.add.at(here, into, np.asarray(counts, np.uint32))
        first_block += n_blocks
    return found

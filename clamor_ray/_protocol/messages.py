"""What the registry, the page servers and the sessions say to each other.

Every message is a frozen dataclass of plain values, so that a pickled one means the same in every
process and an old one never changes under its reader.

An answer that is not the thing asked for is a value of its own type, not an exception: callers
must say what they do about a freed region or a lost server.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from clamor_ray._protocol.names import SOCKETS_BELOW
from clamor_ray._redundancy.groups import PieceGroups
from clamor_ray._version import __version__

BLOCK_BYTES = 4096
EXTENT_BYTES = 64 << 20
LIBRARY_VERSION: Final = __version__  # what a process says as its `library_version`
NEWS_FREED = -1  # in place of a newer version: the variable was freed
STORED_IDS: Final = 10**15  # ids of regions of sessions with a store, and of no others, from here
INLINE_BASE = 1 << 62  # ids from here up are variables that travel in their references


@dataclass(frozen=True)
class RegionRecord:
    """One region, and where its blocks live.

    Args:
        region: Id, never reused by any session of the cluster, below ``INLINE_BASE``.
        version: The newest one when this was looked up: the number of commits behind it; 0 is
            what ``put`` wrote.
        base_address: Where every process maps it.
        length_bytes: What was asked for; the mapping is rounded up to whole blocks.
        homes: Server id of each 64 MiB extent.
        freed: No new leases. Only a server that may hold old ones gets such a record: its
            processes go on reading, also after it was restarted.
        loss: The number of the loss of blocks of it (``LostBlocks.number``); 0: none is lost.
        term: Which of its homes in turn these are: 1 the first. What a server hears of an earlier
            term after a later one changes nothing there.
        n_pieces: Of a variable in pieces: how many regions have its bytes. Their ids follow this
            one, their addresses are adjacent, and each has a home and versions of its own. This
            region has no home, and its versions say which ones of the pieces belong together.
        piece_bytes: Of each piece but the last, which may be shorter.
        piece_of: Of a piece: the region of its variable.
        is_followed: Of a piece: the next one begins where this one ends.
        group_width, group_parity: Of a variable in pieces, and of each: the shape of its groups
            (``PieceGroups``); 0: it has none. The parity pieces follow those that have its bytes.
        is_parity: Of a piece: it has none of the variable's bytes.
        on_disk: Its home has it in a file; of a variable in pieces: of each.
        in_file: It was made of a file of the user's, which has what no commit has written.
    """

    region: int
    version: int
    base_address: int
    length_bytes: int
    homes: tuple[int, ...]
    freed: bool = False
    loss: int = 0
    term: int = 1
    n_pieces: int = 0
    piece_bytes: int = 0
    piece_of: int = 0
    is_followed: bool = False
    group_width: int = 0
    group_parity: int = 0
    is_parity: bool = False
    on_disk: bool = False
    in_file: bool = False

    @property
    def groups(self) -> PieceGroups:
        """Of the pieces of a variable."""
        return PieceGroups(self.n_pieces, self.group_width, self.group_parity)

    @property
    def pieces(self) -> range:
        """The regions of the pieces, of parity pieces too."""
        return range(self.region + 1, self.region + 1 + self.groups.n_regions)

    def piece(
        self, index: int, base_address: int, length_bytes: int, server_id: int
    ) -> RegionRecord:
        """The record of a new piece of a new variable.

        Args:
            index: Of the piece; parity pieces follow those that have its bytes.
            base_address, length_bytes: Of the piece.
            server_id: Its home.
        """
        return RegionRecord(
            region=self.region + 1 + index,
            version=self.version,
            base_address=base_address,
            length_bytes=length_bytes,
            homes=(server_id,) * -(-length_bytes // EXTENT_BYTES),
            piece_of=self.region,
            is_followed=index < self.n_pieces - 1,
            group_width=self.group_width,
            group_parity=self.group_parity,
            is_parity=self.groups.is_parity(index),
            on_disk=self.on_disk,
        )

    @property
    def has_repair(self) -> bool:
        """Whether it is a piece that others make again."""
        return bool(self.piece_of and self.group_width)


@dataclass(frozen=True)
class RepairSet:
    """What makes the blocks of a region again, at one version of it.

    Args:
        members: (region, version, server id) of each.
        is_mirror: Each member alone has the region's blocks. Otherwise they are the XOR of all
            members' blocks of the same numbers; one that is shorter has zeros there.
    """

    members: tuple[tuple[int, int, int], ...]
    is_mirror: bool


@dataclass(frozen=True)
class FreeAnswer:
    """What is left to be done by who freed a region, at its node's page server.

    Attributes:
        alone: That server is its home, and no other has heard of it.
        others: Other servers that may still give leases on it, and ask that server for blocks.
            All the rest have been told, as far as they answer.
    """

    alone: bool = False
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Counted:
    """How a variable's references are counted, said when it is sealed.

    Attributes:
        anchor: Binary id of the Ray object that each of them carries.
        inside: Anchors of the references that are inside the variable: as long as this one is
            there, so are theirs.
    """

    anchor: bytes
    inside: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Created:
    """A region, and anchors for it and for later ones.

    Attributes:
        record: Of the region.
        anchors: ``ray.ObjectRef``s.
    """

    record: RegionRecord
    anchors: list[Any]


@dataclass(frozen=True)
class CreatedPieces:
    """A variable in pieces, and anchors for it and for later ones.

    Attributes:
        whole: The record of the variable's own region.
        pieces: That of each piece.
        homes: The server that each piece is to be homed at when it is made.
        anchors: ``ray.ObjectRef``s.
    """

    whole: RegionRecord
    pieces: tuple[RegionRecord, ...]
    homes: tuple[int, ...]
    anchors: list[Any]


@dataclass(frozen=True)
class RegionFreed:
    """The region existed and was freed (or abandoned); it never comes back."""

    region: int


@dataclass(frozen=True)
class RegionUnknown:
    """No such region, or one that is not sealed yet."""

    region: int


LookupAnswer = RegionRecord | RegionFreed | RegionUnknown


@dataclass(frozen=True)
class Write:
    """What one transaction changed in one variable.

    Args:
        region: The region's id, or that of an inline variable (``INLINE_BASE`` and above).
        base_version: The version that the transaction read.
        n_blocks: How many blocks are dirty: ``len(BitMap.deserialize(blocks))``; 0 for inline.
        blocks: Serialized ``pyroaring.BitMap`` of the dirty 4 KiB blocks, counted from the
            region's start; may be empty (b"") where only the plan changed, and for inline.
        layer_bytes: Size of the staged layer; 0 for inline.
        staged_at: Id of the page server that holds the layer, as that one said; 0 for inline.
        plan: What lies where from this version on (opaque to the registry); None: as before.
        payload: The new content of an inline variable; None for a region.
        were_lost: Of a piece with parity: those of the blocks, serialized likewise, that nobody had
            when the transaction began. Its parity's delta has them as if they had been zeros.
        kept_by: In a session with a store: which process of the page server at ``staged_at`` has
            said that the layer is on its disk (``ServerInfo.process``); 0: none.
    """

    region: int
    base_version: int
    n_blocks: int
    blocks: bytes
    layer_bytes: int
    staged_at: int
    plan: bytes | None = None
    payload: bytes | None = None
    were_lost: bytes = b""
    kept_by: int = 0


@dataclass(frozen=True)
class CommitRequest:
    """One transaction: all of its writes become visible at once, or none does.

    Args:
        commit_id: 64 random bits, not 0; the same for every try of the same transaction.
        writes: At most one for each variable.
        timeout_s: How long the homes may take to fetch the layers; 0: as the session's settings
            say. The caller should wait a few seconds longer for the answer.
        staged_ago_s: How long ago the first layer was staged, at most, when this was sent.
    """

    commit_id: int
    writes: tuple[Write, ...]
    timeout_s: float = 0.0
    staged_ago_s: float = 0.0


@dataclass(frozen=True)
class Committed:
    """The transaction is visible.

    Args:
        versions: The new version of each variable and piece that it wrote.
        rows: Of each variable in pieces that it wrote the versions of the pieces
            (``pack_row``).
    """

    versions: dict[int, int]
    rows: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Latest:
    """A version of a variable, the newest one or one that was asked for.

    Args:
        region: The region's or inline variable's id.
        version: Its version.
        plan: The newest plan that a commit up to this version brought; None: version 0's, which
            every reference holds.
        payload: Content of an inline variable; of a variable in pieces the version of each
            (``pack_row``). None for other regions, and for version 0: an inline
            variable's every reference holds, and of pieces it is 0 of each.
        loss: In answer to ``at``: as in ``RegionRecord``.
    """

    region: int
    version: int
    plan: bytes | None = None
    payload: bytes | None = None
    loss: int = 0


class NamedVariable(NamedTuple):
    """A name, and what it names.

    Args:
        name: See ``names.check_name``.
        region: The region's or inline variable's id.
        packed: A reference to it (``GlobalRef._packed``).
    """

    name: str
    region: int
    packed: bytes


@dataclass(frozen=True)
class VariableRecord:
    """A variable that can be opened, as the registry knows it.

    Args:
        region: The region's or inline variable's id.
        length_bytes: Of the region; 0 for an inline variable.
        nodes: Ray's hex ids of the nodes of its homes.
        names: It may have several.
        latest: Its newest version.
        packed: A reference to it, where it has a name.
    """

    region: int
    length_bytes: int
    nodes: tuple[str, ...]
    names: tuple[str, ...]
    latest: Latest
    packed: bytes | None


@dataclass(frozen=True)
class CheckpointVariable:
    """A variable at the version that a checkpoint has of it.

    Args:
        latest: That version.
        record: Of its region; None for an inline variable.
        names: It may have several.
        packed: As in ``VariableRecord``.
        nodes: Ray's hex ids of the nodes of its homes: one for each piece, parity pieces too; ""
            where one is lost.
    """

    latest: Latest
    record: RegionRecord | None
    names: tuple[str, ...]
    packed: bytes | None
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Publication:
    """A home is told that the layer staged under ``commit_id`` is this version."""

    region: int
    version: int
    commit_id: int


@dataclass(frozen=True)
class ServerInfo:
    """A page server as others reach it.

    Args:
        server_id: Non-zero, the same after a restart.
        node_id: Ray's node id, hex.
        host: Address of the data port.
        port: Data port.
        socket_name: Path of the Unix socket for the processes of that node.
        library_version: Of the build that runs there.
        pid: The server's process, for people and tests.
        epoch: Counts this server's registrations; the registry sets it.
        directory: In a session with a store, the uuid of the directory that it has locked there: 32
            hex digits. Its id follows from that.
        process: 64 random bits, not 0, of that process alone; 0 in tests.
    """

    server_id: int
    node_id: str
    host: str
    port: int
    socket_name: str
    library_version: str
    pid: int = 0
    epoch: int = 0
    directory: str = ""
    process: int = 0


@dataclass(frozen=True)
class ServerLost:
    """The server will not come back, and why."""

    server_id: int
    reason: str


@dataclass(frozen=True)
class StoredRegion:
    """A region of a store, for the page server whose directory has it.

    Args:
        record: With that server as its home, and the newest version.
        commits: (version, commit id), in order: of all versions that its home may not have heard
            of, and of some before them.
    """

    record: RegionRecord
    commits: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StoreState:
    """All that a page server is home of, for its directory's cold start.

    Args:
        regions: What else is there below `next_region` is of no use any more.
        next_region: The first id that the registry has not given out.
    """

    regions: tuple[StoredRegion, ...] = ()
    next_region: int = 0


LEFT = "it has left: its homes were moved, and no process of its node used it"


def has_left(reason: str) -> bool:
    """Whether a server is gone because it was drained, and had nothing any more."""
    return reason == LEFT


@dataclass(frozen=True)
class ServerRestarting:
    """The server is down for now; ask again."""

    server_id: int


LocateAnswer = ServerInfo | ServerLost | ServerRestarting


@dataclass(frozen=True)
class ServerConfig:
    """What a page server is told when it starts.

    Args:
        job_scope: Part of every socket and actor name; separates jobs on one node.
        library_version: Version that every page server of the job must be.
        fetch_timeout_s: One request to one peer.
        fault_timeout_s: All tries of one block.
        reattach_s: How long peers look for a server that restarts.
        orphan_timeout_s: How long a keeper waits for a page server.
        page_bytes: Fixed size of a demand fetch; 0: by use.
        control_timeout_s: One call to the registry; a commit gives its homes 0.8 of it.
        history_bytes: Replaced blocks that a home keeps in memory for old versions, then
        history_disk_bytes: in files without a name in
        history_directory: this directory of its node; "" for Ray's session directory there.
        spill_directory: of homes on disk; "" for the same.
        sockets_below: Its directory of sockets is below this one (``names.socket_directory``).
        stage_timeout_s: A staged layer whose writer is silent for so long is asked about.
        cache_bytes: Budget of each node's cached blocks; 0: a quarter of the node's memory.
        cache_disk_bytes: Of those that were evicted, on disk, in `spill_directory`; 0: none.
        cache_policy: Which of them go first (``_native/base.py``: ``POLICIES``).
        replication: Whom a busy home sends askers to (``_native/base.py``: ``REPLICATIONS``).
        session_name: "": the session ends with its driver.
        began_at_s: When the session began, since the epoch of Unix.
        idle_node_s: A node that nothing uses for so long is drained, where an autoscaler runs; 0:
            none is.
        repair_bytes_s: What all that make lost pieces again read of others; 0: there is no limit.
        store: The directory, absolute, in which the session outlives its cluster; "": it does not.
        store_id: Of that store: 32 hex digits.
        has_metrics: Whether metrics are exported.
        has_spans: Whether page servers and the registry record spans.
    """

    job_scope: str
    library_version: str
    fetch_timeout_s: float = 10.0
    fault_timeout_s: float = 60.0
    reattach_s: float = 30.0
    orphan_timeout_s: float = 21600.0
    page_bytes: int = 0
    control_timeout_s: float = 60.0
    history_bytes: int = 256 << 20
    history_disk_bytes: int = 4 << 30
    history_directory: str = ""
    spill_directory: str = ""
    sockets_below: str = SOCKETS_BELOW
    stage_timeout_s: float = 300.0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0
    cache_policy: str = "sieve"
    replication: str = "p2c"
    session_name: str = ""
    began_at_s: float = 0.0
    idle_node_s: float = 0.0
    repair_bytes_s: int = 256 << 20
    store: str = ""
    store_id: str = ""
    has_metrics: bool = True
    has_spans: bool = True


@dataclass(frozen=True)
class SessionReport:
    """A session, as its registry says.

    Args:
        config: Its settings, name and scope.
        n_variables: How many regions can be opened.
        nbytes: Their length.
    """

    config: ServerConfig
    n_variables: int
    nbytes: int


@dataclass(frozen=True)
class Pinned:
    """A Ray object that a page server serves as a region.

    Args:
        record: The region's.
        plan: What lies where in it (``clamor_ray._objects.layout.Plan``).
        digest: Of the plan and of all bytes that are not in the object's own large buffers. A
            restarted server that takes the object apart again must come to the same.
    """

    record: RegionRecord
    plan: Any
    digest: bytes


@dataclass(frozen=True)
class RebuildOrder:
    """How a page server makes itself the home of a region whose home is lost.

    Args:
        record: The region's, with its newest version, and this server as its home.
        cached: (version, serialized BitMap) of blocks that it has in its own cache.
        takes: (server id, commit id, bytes) of each layer that others have staged for it.
        from_source: Serialized BitMap of the blocks that the source must make; b"": none.
        compared: Of those that the source makes too, and that must then be the same.
        pieces: (offset, bytes) of what the source makes, where it is known.
        before_bytes: Of a piece of a variable: where it begins in what the source makes.
        digest: Of an object that was shared; b"": the source's answer is a list of pieces.
        lost: Serialized BitMap of the blocks that no server has and no source makes; b"": none.
        attempt: Not 0: the pieces of its group make the rest, which comes under this number.
    """

    record: RegionRecord
    cached: tuple[tuple[int, bytes], ...]
    takes: tuple[tuple[int, int, int], ...]
    from_source: bytes = b""
    compared: bytes = b""
    pieces: tuple[tuple[int, bytes], ...] = ()
    digest: bytes = b""
    lost: bytes = b""
    before_bytes: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class ConnectionCounters:
    """What came to a data port, since the server started.

    ``refused`` counts connections that did not pass, by reason (see ``handshake.Refusal``).
    """

    accepted: int = 0
    peers_connected: int = 0
    peers_lost: int = 0
    unauthenticated_now: int = 0
    refused: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ServerReport:
    """One page server's part of ``stats()``; ``error`` says why the rest is empty.

    Args:
        info: Which one.
        engine: Its counters, by the names of ``struct pc_engine_stats``.
        regions: One entry per region, by the names of ``struct pc_region_stats``.
        connections: What came to its data port.
        error: Why it did not answer.
        cache_bytes: The budget that is in force there.
        thrashing: How often its engine said that the budget is too small.
        leaving: It was drained, and takes no homes.
    """

    info: ServerInfo
    engine: dict[str, int] = field(default_factory=dict)
    regions: tuple[dict[str, int], ...] = ()
    connections: ConnectionCounters = ConnectionCounters()
    error: str = ""
    cache_bytes: int = 0
    thrashing: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class ReadPredictorCounters:
    """Counters of the read predictor since the registry started.

    Args:
        noted: read sets that tasks reported.
        asked: tasks that asked for the read set of one like them.
        found: tasks that got one.
        names: read sets that are kept, one for each name of a task.
        bytes: of memory that these take.

    Example:
        >>> counters = clamor.stats().replay
        >>> counters.found <= counters.asked
        True
    """

    noted: int = 0
    asked: int = 0
    found: int = 0
    names: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class MoveCounters:
    """Homes that were moved from one node to another since the registry started.

    Args:
        finished: moves that ended well, also those that spread a new variable.
        bytes: of memory that these carried, each block as often as it was carried.
        left: page servers that have ended, because they were drained and nothing used them.
        for_room: of the moves that ended well, those that made room on a full node.
        dropped: old homes of page servers that came back after they had been declared lost: they
            were elsewhere by then.

    Example:
        >>> clamor.stats().moves.finished >= 0
        True
    """

    finished: int = 0
    bytes: int = 0
    left: int = 0
    for_room: int = 0
    dropped: int = 0


class HomeUse(NamedTuple):
    """A home on a page server, as a choice of which one goes first sees it.

    Attributes:
        region: Its id.
        n_bytes: Memory that it gives back where it goes.
        reads: How often it was opened there, or asked for.
        idle_s: Since the last of these; 0 where there was none.
        keeps_memory: Its memory stays where it moves: processes of the node have it, or it is an
            object of Ray.
    """

    region: int
    n_bytes: int
    reads: int
    idle_s: float
    keeps_memory: bool


class NodeRoom(NamedTuple):
    """What a page server says of its node's memory.

    Attributes:
        available_bytes: Of memory that can be had; None where the kernel does not say.
        memory_bytes: That the node has, used or not; None likewise.
        homes: That may move.
    """

    available_bytes: int | None
    memory_bytes: int | None
    homes: tuple[HomeUse, ...] = ()


class DrainResult(NamedTuple):
    """What `clamor.drain` has moved off a node.

    Attributes:
        moved: number of variables, and of pieces of such as are spread.
        bytes: of memory that were carried, each block as often as it was carried.
        seconds: how long it took.
        leaves: the node's page server ends as soon as no process of the node uses it. False for
            the node of the session's driver.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> moved, n_bytes, seconds, leaves = clamor.drain(clamor.init().node_id)
        >>> moved >= 1, leaves
        (True, False)
    """

    moved: int
    bytes: int
    seconds: float
    leaves: bool = False


@dataclass(frozen=True)
class RegistryReport:
    """The registry's own part of ``stats()``, and that of every page server."""

    regions_by_state: dict[str, int]
    address_bytes_in_use: int
    servers: tuple[ServerReport, ...]
    replay: ReadPredictorCounters = ReadPredictorCounters()
    names: dict[int, str] = field(default_factory=dict)
    moves: MoveCounters = MoveCounters()
    degraded: int = 0
    lost: dict[int, str] = field(default_factory=dict)


def pack_row(versions: Sequence[int]) -> bytes:
    """The versions of a variable's pieces that belong together, as bytes.

    Args:
        versions: Of each piece, in the order of their addresses.

    Example:
        >>> unpack_row(pack_row([3, 0, 7]), 3)
        (3, 0, 7)
    """
    return struct.pack(f"<{len(versions)}Q", *versions)


def unpack_row(packed: bytes | None, n_pieces: int) -> tuple[int, ...]:
    """The row that ``pack_row`` was given.

    Args:
        packed: None for version 0.
        n_pieces: Its length.

    Raises:
        ValueError: It is another number of versions.
    """
    if packed is None:
        return (0,) * n_pieces
    if len(packed) != 8 * n_pieces:
        raise ValueError(f"{len(packed)} bytes are no versions of {n_pieces} pieces")
    return struct.unpack(f"<{n_pieces}Q", packed)

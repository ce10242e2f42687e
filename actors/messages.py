"""What the registry, the page servers and the sessions say to each other.

Every message is a frozen dataclass of plain values, so that a pickled one means the same in every
process and an old one never changes under its reader.

An answer that is not the thing asked for is a value of its own type, not an exception: callers
must say what they do about a freed region or a lost server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 4096
EXTENT_BYTES = 64 << 20


@dataclass(frozen=True)
class RegionRecord:
    """One version of one region, and where its blocks live.

    Args:
        region: Id, never reused within a job.
        version: Number of commits behind this content; 0 is what ``put`` wrote.
        base_address: Where every process maps it.
        length_bytes: What was asked for; the mapping is rounded up to whole blocks.
        homes: Server id of each 64 MiB extent.
        freed: No new leases. Only a server that may hold old ones gets such a record: its
            processes go on reading, also after it was restarted.
    """

    region: int
    version: int
    base_address: int
    length_bytes: int
    homes: tuple[int, ...]
    freed: bool = False


@dataclass(frozen=True)
class RegionFreed:
    """The region existed and was freed (or abandoned); it never comes back."""

    region: int


@dataclass(frozen=True)
class RegionUnknown:
    """No such region, or one that nobody has sealed yet."""

    region: int


LookupAnswer = RegionRecord | RegionFreed | RegionUnknown


@dataclass(frozen=True)
class ServerInfo:
    """A page server as others reach it.

    Args:
        server_id: Non-zero, the same after a restart.
        node_id: Ray's node id, hex.
        host: Address of the data port.
        port: Data port.
        socket_name: Abstract Unix socket for the processes of that node.
        library_version: Of the build that runs there.
        pid: The server's process, for people and tests.
        epoch: Counts this server's registrations; the registry sets it.
    """

    server_id: int
    node_id: str
    host: str
    port: int
    socket_name: str
    library_version: str
    pid: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class ServerLost:
    """The server will not come back, and why."""

    server_id: int
    reason: str


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
    """

    job_scope: str
    library_version: str
    fetch_timeout_s: float = 10.0
    fault_timeout_s: float = 60.0
    reattach_s: float = 30.0
    orphan_timeout_s: float = 30.0
    page_bytes: int = 0


@dataclass(frozen=True)
class Pinned:
    """A Ray object that a page server serves as a region.

    Args:
        record: The region's.
        plan: What lies where in it (``clamor_ray._layout.Plan``).
        digest: Of the plan and of all bytes that are not in the object's own large buffers. A
            restarted server that takes the object apart again must come to the same.
    """

    record: RegionRecord
    plan: Any
    digest: bytes


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
    """One page server's part of ``stats()``; ``error`` says why the rest is empty."""

    info: ServerInfo
    engine: dict[str, int] = field(default_factory=dict)
    regions: tuple[dict[str, int], ...] = ()
    connections: ConnectionCounters = ConnectionCounters()
    error: str = ""


@dataclass(frozen=True)
class RegistryReport:
    """The registry's own part of ``stats()``, and that of every page server."""

    regions_by_state: dict[str, int]
    address_bytes_in_use: int
    servers: tuple[ServerReport, ...]

"""What the registry decides: addresses, regions, servers. Pure: no Ray, no clock, no I/O.

Methods take one event and return its answer, or the ``Retire`` orders that follow from it; the
facade carries the orders out and reports back with further events.

The end of a region, in order:

    free     -> lookups answer "freed"; every server that knows the region is told to retire it,
                and until it says idle it can still look the region up, for the leases it has
    idle     -> one such server says that its node's last lease is gone
    drained  -> all of them have said so, or died: the homes are told to drop it, with force
    dropped  -> one home says that it has
    gone     -> all homes have, or died: the address range is free for others

What its maker abandons ends so too, where it was sealed or is mapped; else the homes are told to
drop it at once.

An address range is reused only after that, so that no process anywhere can still have the old
region mapped where a new one must go.

Invariants, which ``check`` verifies:
* used and free ranges together are exactly what is ours of the window, and no two overlap;
* a region in the table owns exactly one used range; no other used range exists;
* a region waits only for servers that are not lost.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from clamor_ray._labels import label
from clamor_ray._protocol.messages import (
    EXTENT_BYTES,
    LocateAnswer,
    LookupAnswer,
    RegionFreed,
    RegionRecord,
    RegionUnknown,
    ServerInfo,
    ServerLost,
    ServerRestarting,
)
from clamor_ray._protocol.refusals import IllegalTransition, NoSuchRegion, NoSuchServer
from clamor_ray._redundancy.groups import PieceLayout, groups_of, lengths_of
from clamor_ray.actors.process.lives import Lives
from clamor_ray.actors.window.address_space import AddressSpace

FIRST_VERSION = 0  # the state after no commit; what the engine gives a new home


class RegionState(enum.Enum):
    """CREATING: only its maker knows it. READY: leasable. FREED: waits for the last leases.
    DROPPING: waits for its homes. GONE: not in the table any more."""

    CREATING = "creating"
    READY = "ready"
    FREED = "freed"
    DROPPING = "dropping"
    GONE = "gone"


class RegionEvent(enum.Enum):
    """What can happen to a region."""

    SEAL = "seal"
    ABANDON = "abandon"
    ABANDON_LEASED = "abandon, while it is mapped"
    FREE = "free"
    DRAINED = "drained"
    DROPPED = "dropped by all homes"


_S, _E = RegionState, RegionEvent

TRANSITIONS: dict[tuple[RegionState, RegionEvent], RegionState] = {
    (_S.CREATING, _E.SEAL): _S.READY,
    (_S.CREATING, _E.ABANDON): _S.DROPPING,  # nobody can have mapped it
    (_S.CREATING, _E.ABANDON_LEASED): _S.FREED,  # but its maker has, where it was built
    (_S.READY, _E.ABANDON): _S.FREED,  # the maker does not know that it was sealed
    (_S.READY, _E.ABANDON_LEASED): _S.FREED,
    (_S.FREED, _E.ABANDON): _S.FREED,
    (_S.FREED, _E.ABANDON_LEASED): _S.FREED,
    (_S.READY, _E.SEAL): _S.READY,  # the answer was lost on its way
    (_S.READY, _E.FREE): _S.FREED,
    (_S.FREED, _E.FREE): _S.FREED,  # freeing twice is freeing once
    (_S.FREED, _E.DRAINED): _S.DROPPING,
    (_S.DROPPING, _E.FREE): _S.DROPPING,
    (_S.DROPPING, _E.ABANDON): _S.DROPPING,
    (_S.DROPPING, _E.ABANDON_LEASED): _S.DROPPING,
    (_S.DROPPING, _E.DROPPED): _S.GONE,
}


@dataclass(frozen=True)
class Retire:
    """An order: tell ``server_id`` to retire ``region``.

    Without force it reports the region idle when its node's last lease is gone, and with force it
    drops the region now, which ``RegistryCore.dropped`` must then be told.

    alone: No other server has heard of the region. Where its node has no lease it is idle
    everywhere, and the server may drop it without another order.
    """

    server_id: int
    region: int
    force: bool
    alone: bool = field(default=False, compare=False)


@dataclass
class _Region:
    record: RegionRecord
    created_s: float
    request_id: int = 0
    state: RegionState = RegionState.CREATING
    # Servers that may hold leases or blocks: the homes, and all that looked it up.
    known_to: set[int] = field(default_factory=set)
    # FREED: servers that have not said idle. DROPPING: homes that have not said dropped.
    waits_for: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Of thousands of extents; asked for by every commit.
        self.homes = tuple(dict.fromkeys(self.record.homes))


class RegistryCore:
    """Regions, their addresses, and the servers that hold them. One caller at a time.

    Every event may come twice: who asked may have lost the answer, and asks again.

    Args:
        addresses: The window to allocate from.
        label: A variable for people, by its id.

    Example:
        >>> core = RegistryCore()
        >>> _ = core.server_registered(ServerInfo(7, "node", "10.0.0.1", 1, "name", "0.1"))
        >>> record = core.create_region(5000, 7)
        >>> hex(record.base_address), record.homes
        ('0x110000000000', (7,))
    """

    def __init__(
        self, addresses: AddressSpace | None = None, label: Callable[[int], str] = label
    ) -> None:
        self.addresses = addresses or AddressSpace()
        self._label = label
        self._regions: dict[int, _Region] = {}
        self._first_region = self._next_region = 1
        self._servers: dict[int, ServerInfo] = {}
        self._lost: dict[int, ServerLost] = {}
        self._by_request: dict[int, int] = {}
        self._changed: set[int] = set()
        # By state, so that no call walks over all regions.
        self._creating: dict[int, None] = {}  # the oldest first
        self._ending: set[int] = set()  # FREED or DROPPING
        self._awaited: set[int] = set()  # see `awaited`
        self.lives = Lives(self._lost)
        self.server_id_at, self.server_id_now = self.lives.at, self.lives.now
        self._heading: Counter[tuple[int, int]] = Counter()  # (region, its next home)

    # -- regions

    @property
    def next_region(self) -> int:
        """The first id that was not given out."""
        return self._next_region

    def ids_from(self, first_region: int) -> None:
        """Ids of regions begin there. Of no effect where one was given already.

        No other session of the cluster has ids from there on: a process may use both.
        """
        if self._next_region == self._first_region:
            self._first_region = self._next_region = first_region

    def create_region(
        self,
        length_bytes: int,
        server_id: int,
        now_s: float = 0.0,
        request_id: int = 0,
        on_disk: bool = False,
    ) -> RegionRecord:
        """A new region, homed at one server, that nobody can look up before ``seal``.

        Args:
            length_bytes: At least 1.
            server_id: Its home.
            now_s: For ``abandon_stale``; any clock that does not go back.
            request_id: Of the maker's choice; the same one gets the same region again. 0: none.
            on_disk: Its home has it in a file.

        Raises:
            ValueError: A length below 1.
            NoAddresses: The window is full.
            NoSuchServer: The home is not registered.
        """
        if (again := self.requested(request_id)) is not None:
            return again
        if server_id not in self._servers:
            raise NoSuchServer(f"server {server_id:#x} is not registered")
        base_address = self.addresses.allocate(length_bytes)
        n_extents = -(-length_bytes // EXTENT_BYTES)
        record = RegionRecord(
            region=self._next_region,
            version=FIRST_VERSION,
            base_address=base_address,
            length_bytes=length_bytes,
            homes=(server_id,) * n_extents,
            on_disk=on_disk,
        )
        self._next_region += 1
        self._regions[record.region] = _Region(
            record, now_s, request_id, known_to=set(record.homes)
        )
        self._creating[record.region] = None
        if request_id:
            self._by_request[request_id] = record.region
        return record

    def create_pieces(
        self,
        length_bytes: int,
        layout: PieceLayout,
        server_id: int,
        now_s: float = 0.0,
        request_id: int = 0,
    ) -> RegionRecord:
        """A new variable in pieces: its own region, which has no home, and one region for each
        piece, homed at one server. Each is sealed by itself, the variable's own the last.

        Args:
            length_bytes: More than one piece, where there is no redundancy.
            layout: Of its pieces; parity pieces are made too.
            server_id, now_s, request_id: As in ``create_region``.

        Raises:
            ValueError: There would be one piece, without redundancy.
            NoAddresses, NoSuchServer: See ``create_region``.
        """
        if (again := self.requested(request_id)) is not None:
            return again
        if server_id not in self._servers:
            raise NoSuchServer(f"server {server_id:#x} is not registered")
        groups = groups_of(length_bytes, layout)
        if groups.n_regions < 2:
            raise ValueError(f"{length_bytes} bytes in pieces of {layout.piece_bytes}")
        lengths = lengths_of(groups, length_bytes, layout.piece_bytes)
        base_address = self.addresses.allocate(length_bytes)
        begins = self.addresses.split(base_address, lengths[: groups.n_pieces])
        begins += self.addresses.allocate_all(lengths[groups.n_pieces :], undo=begins)
        whole = RegionRecord(
            region=self._next_region,
            version=FIRST_VERSION,
            base_address=base_address,
            length_bytes=length_bytes,
            homes=(),
            n_pieces=groups.n_pieces,
            piece_bytes=layout.piece_bytes,
            group_width=groups.width,
            group_parity=groups.n_parity,
            on_disk=layout.on_disk,
        )
        pieces = [
            whole.piece(index, begin, n_bytes, server_id)
            for index, (begin, n_bytes) in enumerate(zip(begins, lengths, strict=True))
        ]
        for record in (whole, *pieces):
            requested = request_id if record is whole else 0
            self._regions[record.region] = _Region(
                record, now_s, requested, known_to=set(record.homes)
            )
            self._creating[record.region] = None
        self._next_region += 1 + len(pieces)
        if request_id:
            self._by_request[request_id] = whole.region
        return whole

    def pieces_of(self, region: int) -> list[int]:
        """The pieces of a variable in pieces that are not gone; none of any other region."""
        entry = self._regions.get(region)
        pieces = entry.record.pieces if entry is not None else ()
        return [piece for piece in pieces if piece in self._regions]

    def whole_of(self, region: int) -> int:
        """The variable of a piece; of any other region that itself."""
        entry = self._regions.get(region)
        return region if entry is None else entry.record.piece_of or region

    def others_of(self, region: int) -> list[int]:
        """The other pieces of a piece's group; none of any other region."""
        whole = self._regions.get(self.whole_of(region))
        if whole is None or not whole.record.group_width or whole.record.region == region:
            return []
        first = whole.record.pieces.start
        return [first + index for index in whole.record.groups.others(region - first)]

    def apart(self, region: int, servers: Iterable[int]) -> list[int]:
        """Those that have no other piece of a piece's group, nor get one. Maybe none."""
        others = self.others_of(region)
        taken = {home for each in others for home in self.homes_of(each)}
        taken.update(server for each, server in self._heading if each in others)
        return [server for server in servers if server not in taken]

    @contextlib.contextmanager
    def heading(self, region: int, server_id: int) -> Iterator[None]:
        """Meanwhile the region's home is on its way to the server, or is to be."""
        self._heading[region, server_id] += 1
        try:
            yield
        finally:
            self._heading -= Counter({(region, server_id): 1})  # without those that are at 0

    def before_bytes(self, region: int) -> int:
        """Where a piece begins in its variable; 0 for any other region."""
        entry, whole = self._regions.get(region), self._regions.get(self.whole_of(region))
        if entry is None or whole is None:
            return 0
        return entry.record.base_address - whole.record.base_address

    def requested(self, request_id: int) -> RegionRecord | None:
        """The region that this request made before, if it is not gone."""
        region = self._by_request.get(request_id)
        return None if region is None else self._regions[region].record

    def undo_create(self, region: int) -> None:
        """As if ``create_region`` had not been: nobody has heard of the region yet."""
        for each in (*self.pieces_of(region), region):
            self._forget(self._regions[each])

    def seal(self, region: int, *, written: bool = False) -> RegionRecord:
        """From now on the region can be looked up. Sealing it again changes nothing.

        Args:
            region: Its id.
            written: The journal has its new state.

        Raises:
            NoSuchRegion, IllegalTransition: See ``check_seal``.
        """
        self.check_seal(region)
        entry = self._entry(region)
        self._move(entry, RegionEvent.SEAL, written)
        return entry.record

    def check_seal(self, region: int) -> None:
        """
        Raises:
            NoSuchRegion: Not in the table.
            IllegalTransition: Abandoned or freed before; or its home was lost before it was sealed.
        """
        entry = self._entry(region)
        if (entry.state, RegionEvent.SEAL) not in TRANSITIONS:
            raise self._refused(entry, RegionEvent.SEAL)
        lost = [home for home in entry.homes if home in self._lost]
        if lost and entry.state is RegionState.CREATING:
            raise IllegalTransition(
                f"{self._label(region)}: its home {lost[0]:#x} is lost "
                f"({self._lost[lost[0]].reason}), and it was not sealed yet"
            )

    def abandon(self, region: int, leased: bool = False) -> tuple[Retire, ...]:
        """The maker gave up before it heard of ``seal``. Unknown and finished regions are left as
        they are. One that was sealed ends as by ``free``: the maker may map it. The pieces of a
        variable go with it.

        Args:
            region: Its id.
            leased: The maker maps what it has built, and its node's server has that as a lease.
        """
        entry = self._regions.get(region)
        if entry is None:
            return ()
        orders: list[Retire] = []
        for piece in self.pieces_of(region):
            orders += self.abandon(piece, leased)
        return (*orders, *self._abandon(entry, leased))

    def _abandon(self, entry: _Region, leased: bool) -> tuple[Retire, ...]:
        was = entry.state
        self._move(entry, RegionEvent.ABANDON_LEASED if leased else RegionEvent.ABANDON)
        if was is RegionState.CREATING:
            entry.known_to |= self.lives.heirs(entry.homes, self._servers)
        if was is RegionState.READY or (was is RegionState.CREATING and leased):
            return self._retire(entry)
        return self._drop(entry) if was is RegionState.CREATING else ()

    def abandon_stale(self, before_s: float) -> tuple[Retire, ...]:
        """Abandons what was created before then and is still not sealed: its maker is dead."""
        orders: list[Retire] = []
        for number in list(self._creating):
            if number in self._creating and self._regions[number].created_s < before_s:
                orders += self.abandon(number)  # its pieces go with it
        return tuple(orders)

    def goes_on(self, region: int, now_s: float) -> None:
        """The maker of a variable that is not sealed is at work: its time begins anew, and that of
        its pieces."""
        for each in (region, *self.pieces_of(region)):
            entry = self._regions.get(each)
            if entry is not None and entry.state is RegionState.CREATING:
                entry.created_s = now_s
                del self._creating[each]
                self._creating[each] = None

    def free(self, region: int, *, written: bool = False) -> tuple[Retire, ...]:
        """Starts the end of a region, again or not. Pieces are freed each by itself.

        Args:
            region: Its id.
            written: The journal has its new state.

        Raises:
            NoSuchRegion: It never existed.
            IllegalTransition: It is not sealed yet.
        """
        if self._was_here(region):
            return ()
        entry = self._entry(region)
        was = entry.state
        self._move(entry, RegionEvent.FREE, written)
        return self._retire(entry) if was is RegionState.READY else ()

    def lies_in_file(self, region: int) -> None:
        entry = self._entry(region)
        entry.record = replace(entry.record, in_file=True)

    def waits_for(self, region: int) -> frozenset[int]:
        """Servers that may have leases on a region that is freed; none where it is not."""
        entry = self._regions.get(region)
        if entry is None or entry.state is not RegionState.FREED:
            return frozenset()
        return frozenset(entry.waits_for)

    def lookup(self, region: int, server_id: int) -> LookupAnswer:
        """The region's record, for a server that will hold leases on it from now on.

        Of a freed region, one that says so, for a server that has not said idle: after a restart
        it must take back the leases that its processes still have.
        """
        answer = self.peek(region)
        if isinstance(answer, RegionRecord):
            self._regions[region].known_to.add(server_id)
            return answer
        entry = self._regions.get(region)
        if entry and entry.state is RegionState.FREED and server_id in entry.waits_for:
            return replace(entry.record, freed=True)
        return answer

    def peek(self, region: int) -> LookupAnswer:
        """As ``lookup``, for somebody who will hold no lease."""
        if self._was_here(region):
            return RegionFreed(region)
        entry = self._regions.get(region)
        if entry is None or entry.state is RegionState.CREATING:
            return RegionUnknown(region)
        if entry.state is not RegionState.READY:
            return RegionFreed(region)
        return entry.record

    def record_of(self, region: int) -> RegionRecord | None:
        """The record of a region in any state; None for one that is gone or never was."""
        entry = self._regions.get(region)
        return entry.record if entry else None

    def region_idle(self, region: int, server_id: int) -> tuple[Retire, ...]:
        """A server says that the last lease on its node is gone."""
        entry = self._regions.get(region)
        if entry is None or entry.state is not RegionState.FREED:
            return ()
        entry.waits_for.discard(server_id)
        return self._drained(entry)

    def dropped(self, region: int, server_id: int) -> None:
        """A home has dropped the region, as ordered with force."""
        entry = self._regions.get(region)
        if entry is not None and entry.state is RegionState.DROPPING:
            entry.waits_for.discard(server_id)
            self._gone(entry)

    # -- servers

    def check_not_lost(self, server_id: int) -> None:
        """
        Raises:
            NoSuchServer: It was declared lost; its regions are gone for good.
        """
        if server_id in self._lost:
            reason = self._lost[server_id].reason
            raise NoSuchServer(f"server {server_id:#x} was declared lost: {reason}")

    def server_registered(self, info: ServerInfo) -> tuple[ServerInfo, tuple[Retire, ...]]:
        """A server started, or started again: its info with the epoch, and what it must catch up.

        Raises:
            NoSuchServer: It was declared lost; its regions are gone for good.
        """
        self.check_not_lost(info.server_id)
        self.lives.note(info)
        self._awaited.discard(info.server_id)
        before = self._servers.get(info.server_id)
        known = replace(info, epoch=before.epoch + 1 if before else 1)
        self._servers[info.server_id] = known
        # A restarted server may have forgotten what it was told: tell it again.
        orders = tuple(
            Retire(info.server_id, number, force=entry.state is RegionState.DROPPING)
            for number in sorted(self._ending)
            if info.server_id in (entry := self._regions[number]).waits_for
        )
        return known, orders

    def server_moved(self, info: ServerInfo) -> None:
        """Where a server says that it is, when the last time it registered was forgotten."""
        if info.server_id in self._servers:
            self._servers[info.server_id] = info

    def server_lost(self, server_id: int, reason: str) -> tuple[Retire, ...]:
        """A server is gone for good: nothing waits for it any more."""
        if server_id in self._lost:
            return ()
        self._lost[server_id] = ServerLost(server_id, reason)
        self._awaited.discard(server_id)
        self._servers.pop(server_id, None)
        orders: list[Retire] = []
        for entry in list(self._regions.values()):
            entry.known_to.discard(server_id)
            if server_id not in entry.waits_for:
                continue
            entry.waits_for.discard(server_id)
            if entry.state is RegionState.FREED:
                orders += self._drained(entry)
            elif entry.state is RegionState.DROPPING:
                self._gone(entry)
        return tuple(orders)

    def locate(self, server_id: int) -> LocateAnswer:
        """Where the server was when it last registered, or that it is lost."""
        if server_id in self._lost:
            return self._lost[server_id]
        if server_id in self._awaited:
            return ServerRestarting(server_id)
        info = self._servers.get(server_id)
        return info or ServerLost(server_id, "no such page server ever registered")

    def node_of(self, server_id: int) -> str | None:
        """The node of a server that is registered and not lost."""
        info = self._servers.get(server_id)
        return info.node_id if info else None

    def servers(self) -> tuple[ServerInfo, ...]:
        """All that are registered and not lost."""
        return tuple(self._servers.values())

    def awaited(self) -> tuple[int, ...]:
        """Homes of a store that have not registered since it was opened, and are not known to be
        lost: they are as servers that are being started again."""
        return tuple(self._awaited)

    # -- after a restart

    def restore(
        self,
        next_region: int,
        regions: Iterable[tuple[RegionRecord, RegionState, int]],
        servers: Iterable[ServerInfo],
        lost: Iterable[ServerLost],
        now_s: float,
        first_region: int = 1,
        directories: Iterable[tuple[int, str, str]] = (),
        awaits_homes: bool = False,
    ) -> tuple[Retire, ...]:
        """Takes back what the journal held; the first event of a new core.

        Who knows a region was not written down: all servers may. So of each freed region all of
        them are asked once more.

        Args:
            next_region: The next id.
            regions: (record, state, request id).
            servers: Those that are not lost.
            lost: Those that are.
            now_s: As in ``create_region``: unsealed regions get their time anew.
            first_region: The first id that this session ever gave.
            directories: (server id, directory, node) of the servers of a store, lost ones too.
            awaits_homes: Homes that are not lost register by and by. See ``awaited``.
        """
        self._next_region = next_region
        self._first_region = first_region
        self._servers = {info.server_id: info for info in servers}
        self._lost.update((server.server_id, server) for server in lost)
        for info in self._servers.values():
            self.lives.note(info)
        for known in directories:
            self.lives.know(*known)
        orders: list[Retire] = []
        for record, state, request_id in regions:
            self._reserve(record)
            entry = _Region(
                record=record,
                created_s=now_s,
                request_id=request_id,
                state=state,
                known_to=set(self._servers),
            )
            if awaits_homes:
                self._awaited |= self._alive(entry.homes) - self._servers.keys()
                entry.known_to |= self._alive(entry.homes)
            self._regions[record.region] = entry
            self._note_state(entry)
            if request_id:
                self._by_request[request_id] = record.region
            if state is RegionState.FREED:
                entry.waits_for = set(entry.known_to)
                orders += [Retire(server, record.region, False) for server in entry.waits_for]
                orders += self._drained(entry)
            elif state is RegionState.DROPPING:
                orders += self._drop(entry)
        return tuple(orders)

    def _reserve(self, record: RegionRecord) -> None:
        if record.n_pieces:
            return  # its pieces have the addresses
        guarded = not record.is_followed
        self.addresses.reserve(record.base_address, record.length_bytes, guarded=guarded)

    # -- reports

    def waited_for(self) -> set[int]:
        """Servers that some freed region waits for."""
        return set().union(*(self._regions[number].waits_for for number in self._ending))

    def count_by_state(self) -> dict[str, int]:
        """How many regions are in each state; those gone are not counted."""
        counts = {state.value: 0 for state in RegionState if state is not RegionState.GONE}
        for entry in self._regions.values():
            counts[entry.state.value] += 1
        return counts

    def take_changed(self) -> list[tuple[int, RegionState]]:
        """Regions whose state changed since the last call, and their states now."""
        changed = [
            (region, entry.state if (entry := self._regions.get(region)) else RegionState.GONE)
            for region in sorted(self._changed)
        ]
        self._changed.clear()
        return changed

    def homes_of(self, region: int) -> tuple[int, ...]:
        """The distinct homes of a region that can be looked up, lost ones too; else none."""
        entry = self._regions.get(region)
        if entry is None or entry.state is not RegionState.READY:
            return ()
        return entry.homes

    def ready_regions(self) -> list[RegionRecord]:
        """Regions that can be looked up, by id."""
        ready = [
            entry.record for entry in self._regions.values() if entry.state is RegionState.READY
        ]
        return sorted(ready, key=lambda record: record.region)

    def homed_at(self, server_id: int, state: RegionState = RegionState.READY) -> tuple[int, ...]:
        """Regions that have a home there and are in that state: can be looked up, if not said."""
        return tuple(
            region
            for region, entry in self._regions.items()
            if entry.state is state and server_id in entry.homes
        )

    def is_maker(self, server_id: int, after_s: float) -> bool:
        """Whether a region is made there, since then, that cannot be looked up yet."""
        made = (entry for entry in map(self._regions.get, self._creating) if entry)
        return any(server_id in each.homes and each.created_s > after_s for each in made)

    def rehome(self, region: int, server_id: int) -> RegionRecord:
        """All of the region is homed at this server from now on: the next term.

        Raises:
            NoSuchRegion: Not in the table.
        """
        entry = self._entry(region)
        homes = (server_id,) * len(entry.record.homes)
        entry.record = replace(entry.record, homes=homes, term=entry.record.term + 1)
        entry.homes = (server_id,)
        entry.known_to.add(server_id)
        return entry.record

    def known_to(self, region: int) -> tuple[int, ...]:
        """Servers that may hold leases or blocks of it; lost ones are not among them."""
        entry = self._regions.get(region)
        return tuple(sorted(entry.known_to)) if entry else ()

    def state(self, region: int) -> RegionState | None:
        """GONE for one that was, None for one that never was."""
        if self._was_here(region):
            return RegionState.GONE
        entry = self._regions.get(region)
        return entry.state if entry else None

    def check(self) -> None:
        """Raises AssertionError when an invariant of this file does not hold."""
        self.addresses.check()
        records = [entry.record for entry in self._regions.values()]
        bases = [record.base_address for record in records if not record.n_pieces]
        assert sorted(bases) == [begin for begin, _ in self.addresses.ranges()]
        for entry in self._regions.values():
            assert entry.state is not RegionState.GONE
            assert not entry.waits_for & self._lost.keys()
            waiting = entry.state in (RegionState.FREED, RegionState.DROPPING)
            assert bool(entry.waits_for) == waiting
            assert (entry.record.region in self._ending) == waiting
            is_creating = entry.state is RegionState.CREATING
            assert (entry.record.region in self._creating) == is_creating
        assert self._regions.keys() >= self._ending | self._creating.keys()

    # -- private

    def _was_here(self, region: int) -> bool:
        return self._first_region <= region < self._next_region and region not in self._regions

    def _entry(self, region: int) -> _Region:
        entry = self._regions.get(region)
        if entry is None:
            known = "it was freed" if self._was_here(region) else "it never existed"
            raise NoSuchRegion(f"{self._label(region)}: {known}")
        return entry

    def _refused(self, entry: _Region, event: RegionEvent) -> IllegalTransition:
        return IllegalTransition(
            f"{self._label(entry.record.region)}: no {event.value!r} while {entry.state.value}"
        )

    def _move(self, entry: _Region, event: RegionEvent, written: bool = False) -> None:
        new = TRANSITIONS.get((entry.state, event))
        if new is None:
            raise self._refused(entry, event)
        if entry.state is not new and not written:
            self._changed.add(entry.record.region)
        entry.state = new
        self._note_state(entry)

    def _note_state(self, entry: _Region) -> None:
        region = entry.record.region
        if entry.state is RegionState.CREATING:
            self._creating[region] = None
        else:
            self._creating.pop(region, None)
        if entry.state in (RegionState.FREED, RegionState.DROPPING):
            self._ending.add(region)
        else:
            self._ending.discard(region)

    def _retire(self, entry: _Region) -> tuple[Retire, ...]:
        entry.waits_for = self._alive(entry.known_to)
        region = entry.record.region
        alone = entry.waits_for == set(entry.homes) and len(entry.waits_for) == 1
        orders = tuple(
            Retire(server, region, force=False, alone=alone) for server in sorted(entry.waits_for)
        )
        return orders + self._drained(entry)

    def _drained(self, entry: _Region) -> tuple[Retire, ...]:
        if entry.waits_for:
            return ()
        self._move(entry, RegionEvent.DRAINED)
        return self._drop(entry)

    def _drop(self, entry: _Region) -> tuple[Retire, ...]:
        heirs = self.lives.heirs(entry.homes, self._servers)
        entry.waits_for = self._alive(entry.homes) | heirs
        orders = tuple(
            Retire(server, entry.record.region, force=True) for server in sorted(entry.waits_for)
        )
        self._gone(entry)
        return orders

    def _gone(self, entry: _Region) -> None:
        if entry.waits_for:
            return
        self._move(entry, RegionEvent.DROPPED)
        self._forget(entry)

    def _forget(self, entry: _Region) -> None:
        if not entry.record.n_pieces:  # whose pieces have the addresses
            self.addresses.release(entry.record.base_address)
        del self._regions[entry.record.region]
        self._creating.pop(entry.record.region, None)
        self._ending.discard(entry.record.region)
        self._by_request.pop(entry.request_id, None)

    def _alive(self, servers: Iterable[int]) -> set[int]:
        return {server for server in servers if server not in self._lost}

"""A mapping as a Python object: it lives as long as anything that looks into it.

Views are NumPy arrays whose base is the `Lease`. When the last of them is gone, so is the lease,
and the page server may evict or drop what it kept for us.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.client import Client, Mapping, Runs
from clamor_ray._objects import global_array
from clamor_ray._objects.ranges import union

if TYPE_CHECKING:
    from clamor_ray._read.ref import GlobalRef

SAME_AGAIN_S: Final = 0.25  # so long the same reads of one mapping are said once
MOST_REPORTED: Final = 64
MOST_REPORT_BYTES: Final = 16 << 10


class LeaseObserver(NamedTuple):
    """Who is told what this process may read.

    Args:
        leased: (client, token, mapping, snapshot): a lease began; nothing of it has been touched
            through it. A snapshot of None is of no version yet.
        released: (token): a lease ends; its mapping is still there. It may be called by the garbage
            collector: it takes no lock.
        read_whole: (snapshot): all of a variable is read, which travels inside its reference.
        read_runs: (snapshot, runs): blocks are read without being touched; `runs` gives them,
            counted from the region's start.
    """

    leased: Callable[[Client, int, Mapping, GlobalRef[Any] | None], None]
    released: Callable[[int], None]
    read_whole: Callable[[GlobalRef[Any]], None]
    read_runs: Callable[[GlobalRef[Any] | None, Callable[[], Runs]], None]


_observers: tuple[LeaseObserver, ...] = ()  # replaced, not changed: finalizers go through it


def observe(observer: LeaseObserver) -> None:
    """From now on it is told, also of the end of leases that have begun before."""
    global _observers
    _observers = (*_observers, observer)


def read_runs(snapshot: GlobalRef[Any] | None, runs: Callable[[], Runs]) -> None:
    """Blocks are read without being touched: see `LeaseObserver`."""
    for observer in _observers:
        observer.read_runs(snapshot, runs)


_tokens = itertools.count(1)
_changes = itertools.count(1)


def _release(
    client: Client,
    table: LeaseTable,
    token: int,
    mapping_id: int,
    address: int,
    reads: list[int],
    later: bool,
) -> None:
    # Runs wherever the last reference dies, also inside the garbage collector: takes no lock.
    table.forget(token)
    table.gathered.pop(token, None)
    global_array.forget(address)
    for observer in _observers:
        observer.released(token)
    with contextlib.suppress(errors.ClamorError):  # the session is gone, and the mapping with it
        while reads:  # a call that failed before it could report
            client.access_report_drop(reads.pop())
    try:
        (client.unmap_later if later else client.unmap)(mapping_id)
    except errors.ClosedError:  # it keeps the addresses for us
        with contextlib.suppress(errors.ClamorError):
            Client.unmap_ended(address)
    except errors.ClamorError:
        pass


class Lease:
    """This process's right to read one snapshot, and where it is mapped.

    Args:
        client: whose mapping it is.
        table: where addresses are looked up.
        mapping: what `Client.map` returned; the lease owns it.
        region: for people.
        writable: the mapping is private copy-on-write.
        snapshot: what is mapped, as a frozen reference; None for what is no version yet.
        later: the mapping may be kept for the next who opens it, for a moment after its end.
    """

    def __init__(
        self,
        client: Client,
        table: LeaseTable,
        mapping: Mapping,
        region: int,
        *,
        writable: bool,
        snapshot: GlobalRef[Any] | None = None,
        later: bool = False,
    ) -> None:
        self._client = client
        self._table = table
        self._with: Runs | None = None
        self.mapping = mapping
        self.region = region
        self.writable = writable
        token = next(_tokens)
        self._reads: list[int] = []  # the mapping's id while a read set is being taken
        self._finalizer = weakref.finalize(
            self, _release, client, table, token, mapping.id, mapping.address, self._reads, later
        )
        self._finalizer.atexit = False  # the process ends anyway, and others may still look
        self._token = token
        table.add(token, mapping, snapshot, writable=writable, client=client)
        for observer in _observers:
            observer.leased(client, token, mapping, snapshot)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.mapping.length_bytes,),
            "typestr": "|u1",
            "data": (self.mapping.address, not self.writable),
        }

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The whole mapping as bytes. Touches nothing; keeps this lease alive."""
        return np.asarray(self)

    def close(self) -> None:
        """Ends the lease at once. Only for leases that nobody looks into."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def prefetch(self, runs: Runs, *, wait: bool, timeout_s: float) -> None:
        self._client.prefetch(self.mapping.id, runs, wait=wait, timeout_s=timeout_s)

    def access_report_begin(self, also: Runs | None = None) -> None:
        """Starts a read set. It ends with `report_reads`, or with the lease.

        Args:
            also: what belongs to it, and need not be touched.
        """
        self._with = also
        self._client.access_report_begin(self.mapping.id)
        self._reads.append(self.mapping.id)
        self._table.gathered[self._token] = (self.mapping.id, [])

    def report_reads(self) -> Runs | None:
        """Tells the page server what was touched since `access_report_begin`: once for each.

        Returns:
            The same; None where no read set was begun.
        """
        if not self._reads:
            return None
        mapping_id = self._reads.pop()
        runs = self._client.access_report_end(mapping_id)
        _, read = self._table.gathered.pop(self._token, (0, []))
        if self._with is not None:  # it counts, though it was here
            read = [*read, self._with]
        if read:
            runs = union((runs, *read)) if len(runs) or len(read) > 1 else read[0]
        if self._table.is_news(mapping_id, runs):
            self._client.report_reads(mapping_id, runs)
        return runs

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.mapping.address:#x}"
        return f"Lease(region={self.region}, {state})"


@dataclass(frozen=True, slots=True)
class Leased:
    """What lies at an address.

    Args:
        mapping: where.
        snapshot: what, as a frozen reference; None for what is no version yet.
        writable: it is a private copy: what it holds may be no version's content.
        client: whose mapping it is; None: what travels inside a reference.
    """

    mapping: Mapping
    snapshot: GlobalRef[Any] | None
    writable: bool
    client: Client | None = None


_NONE_SORTED: Final[tuple[int, list[int], list[Leased]]] = (0, [], [])


class LeaseTable:
    """Finds the mapping of an address. Safe from any thread, and from finalizers: it has no lock,
    every change is one dict operation, and the sorted form is rebuilt by whoever needs it. That
    says of which change it is, so that one that was built while another came is not used again.

    Several versions of one region may be mapped at once, each at an address of its own."""

    def __init__(self) -> None:
        self._leased: dict[int, Leased] = {}
        self._reported: dict[int, tuple[bytes, float]] = {}
        # Of leases whose read set is being taken: the mapping, and rows that came without a touch.
        self.gathered: dict[int, tuple[int, list[Runs]]] = {}
        self._change = 0
        self._sorted = _NONE_SORTED

    def add(
        self,
        token: int,
        mapping: Mapping,
        snapshot: GlobalRef[Any] | None = None,
        *,
        writable: bool = False,
        client: Client | None = None,
    ) -> None:
        self._leased[token] = Leased(mapping, snapshot, writable, client)
        self._change = next(_changes)

    def forget(self, token: int) -> None:
        self._leased.pop(token, None)
        self._change = next(_changes)
        self._sorted = _NONE_SORTED  # it would keep the snapshot, and so the variable

    def note_gathered(self, mapping_id: int, runs: Callable[[], Runs]) -> None:
        """Rows of a mapping are read without being touched; `runs` gives their blocks."""
        sets = [found for at, found in list(self.gathered.values()) if at == mapping_id]
        if sets:
            read = runs()
            for found in sets:
                found.append(read)

    def is_news(self, mapping_id: int, runs: Runs) -> bool:
        """Whether the page server should hear that this was read: it was not told just that of this
        mapping a moment ago. It is statistics."""
        now_s = time.monotonic()
        report = runs.tobytes()
        last, at_s = self._reported.get(mapping_id, (None, 0.0))
        if report == last and now_s - at_s < SAME_AGAIN_S:
            return False
        if len(self._reported) >= MOST_REPORTED or len(report) > MOST_REPORT_BYTES:
            self._reported.clear()
        self._reported[mapping_id] = (report, now_s)
        return True

    def __len__(self) -> int:
        return len(self._leased)

    def entries(self) -> list[tuple[int, Leased]]:
        """All of them, by token."""
        return list(self._leased.copy().items())

    def at(self, address: int) -> Leased | None:
        """What lies at the address, or None where that is no mapping of ours."""
        change = self._change  # before the look at what is there
        known = self._sorted
        if known[0] != change:
            # Leases of one snapshot share a mapping: the one that came last speaks for it.
            by_mapping = {leased.mapping: leased for leased in self._leased.copy().values()}
            entries = sorted(by_mapping.values(), key=lambda e: (e.mapping.address, e.mapping.id))
            known = (change, [leased.mapping.address for leased in entries], entries)
            self._sorted = known
            if self._change != change:
                self._sorted = _NONE_SORTED
        _, starts, entries = known
        index = bisect.bisect_right(starts, address) - 1
        if index < 0:
            return None
        leased = entries[index]
        end = leased.mapping.address + leased.mapping.length_bytes
        return leased if address < end else None

    def find(self, address: int) -> Mapping | None:
        """The mapping that holds the address, or None."""
        leased = self.at(address)
        return None if leased is None else leased.mapping


# ------------------------------------------------------------------ objects inside references

inline_images: Final = LeaseTable()
"""Where the contents of references lie that carry their object; not of any session."""


class InlineImage:
    """The content of a reference that carries its object, as memory that can be looked up.

    Args:
        snapshot: a frozen reference with a payload.
        writable: it is a private copy.
    """

    def __init__(self, snapshot: GlobalRef[Any], *, writable: bool) -> None:
        payload = snapshot._payload
        if payload is None:
            raise ValueError(f"{snapshot!r} does not carry its object")
        for observer in _observers:
            observer.read_whole(snapshot)
        image = np.frombuffer(payload, np.uint8)
        self._image = image.copy() if writable else image
        if not len(snapshot._plan.buffers):
            return  # nothing can point into it
        token = next(_tokens)
        mapping = Mapping(-token, self._image.__array_interface__["data"][0], len(payload))
        self._finalizer = weakref.finalize(self, inline_images.forget, token)
        self._finalizer.atexit = False
        inline_images.add(token, mapping, snapshot, writable=writable)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self._image.__array_interface__)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of it; keeps this alive."""
        return np.asarray(self)

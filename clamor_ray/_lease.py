"""A mapping as a Python object: it lives as long as anything that looks into it.

Views are NumPy arrays whose base is the `Lease`. When the last of them is gone, so is the lease,
and the page server may evict or drop what it kept for us.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native import Client, Mapping, Runs

if TYPE_CHECKING:
    from clamor_ray._ref import GlobalRef

_tokens = itertools.count(1)
_changes = itertools.count(1)


def _release(
    client: Client, table: LeaseTable, token: int, mapping_id: int, reads: list[int]
) -> None:
    # Runs wherever the last reference dies, also inside the garbage collector: takes no lock.
    table.forget(token)
    with contextlib.suppress(errors.ClamorError):  # the session is gone, and the mapping with it
        while reads:  # a call that failed before it could report
            client.reads_drop(reads.pop())
    with contextlib.suppress(errors.ClamorError):
        client.unmap(mapping_id)


class Lease:
    """This process's right to read one snapshot, and where it is mapped.

    Args:
        client: whose mapping it is.
        table: where addresses are looked up.
        mapping: what `Client.map` returned; the lease owns it.
        region: for people.
        writable: the mapping is private copy-on-write.
        snapshot: what is mapped, as a frozen reference; None for what is no version yet.
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
    ) -> None:
        self._client = client
        self.mapping = mapping
        self.region = region
        self.writable = writable
        token = next(_tokens)
        self._reads: list[int] = []  # the mapping's id while a read set is being taken
        self._finalizer = weakref.finalize(
            self, _release, client, table, token, mapping.id, self._reads
        )
        self._finalizer.atexit = False  # the process ends anyway, and others may still look
        table.add(token, mapping, snapshot, writable=writable)

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

    def reads_begin(self) -> None:
        """Starts a read set. It ends with `report_reads`, or with the lease."""
        self._client.reads_begin(self.mapping.id)
        self._reads.append(self.mapping.id)

    def report_reads(self) -> Runs | None:
        """Tells the page server what was touched since `reads_begin`; once for each of those.

        Returns:
            The same; None where no read set was begun.
        """
        if not self._reads:
            return None
        mapping_id = self._reads.pop()
        runs = self._client.reads_end(mapping_id)
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
    """

    mapping: Mapping
    snapshot: GlobalRef[Any] | None
    writable: bool


class LeaseTable:
    """Finds the mapping of an address. Safe from any thread, and from finalizers: it has no lock,
    every change is one dict operation, and the sorted form is rebuilt by whoever needs it. That
    says of which change it is, so that one that was built while another came is not used again.

    Several versions of one region may be mapped at once, each at an address of its own."""

    def __init__(self) -> None:
        self._leased: dict[int, Leased] = {}
        self._change = 0
        self._sorted: tuple[int, list[int], list[Leased]] = (0, [], [])

    def add(
        self,
        token: int,
        mapping: Mapping,
        snapshot: GlobalRef[Any] | None = None,
        *,
        writable: bool = False,
    ) -> None:
        self._leased[token] = Leased(mapping, snapshot, writable)
        self._change = next(_changes)

    def forget(self, token: int) -> None:
        self._leased.pop(token, None)
        self._change = next(_changes)

    def __len__(self) -> int:
        return len(self._leased)

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
        payload = snapshot.payload
        if payload is None:
            raise ValueError(f"{snapshot!r} does not carry its object")
        image = np.frombuffer(payload, np.uint8)
        self._image = image.copy() if writable else image
        if not len(snapshot.plan.buffers):
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

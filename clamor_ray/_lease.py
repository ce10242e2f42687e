"""A mapping as a Python object: it lives as long as anything that looks into it.

Views are NumPy arrays whose base is the `Lease`. When the last of them is gone, so is the lease,
and the page server may evict or drop what it kept for us.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native import Client, Mapping, Runs

_tokens = itertools.count(1)


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
        table: where prefetch looks addresses up.
        mapping: what `Client.map` returned; the lease owns it.
        region: for people.
        writable: the mapping is private copy-on-write.
    """

    def __init__(
        self, client: Client, table: LeaseTable, mapping: Mapping, region: int, *, writable: bool
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
        table.add(token, mapping)

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

    def report_reads(self) -> None:
        """Tells the page server what was touched since `reads_begin`; once for each of those."""
        if self._reads:
            mapping_id = self._reads.pop()
            self._client.report_reads(mapping_id, self._client.reads_end(mapping_id))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.mapping.address:#x}"
        return f"Lease(region={self.region}, {state})"


class LeaseTable:
    """Finds the mapping of an address. Safe from any thread, and from finalizers: it has no lock,
    every change is one dict operation, and the sorted form is rebuilt by whoever needs it."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._sorted: tuple[list[int], list[Mapping]] | None = None

    def add(self, token: int, mapping: Mapping) -> None:
        self._mappings[token] = mapping
        self._sorted = None

    def forget(self, token: int) -> None:
        self._mappings.pop(token, None)
        self._sorted = None

    def __len__(self) -> int:
        return len(self._mappings)

    def find(self, address: int) -> Mapping | None:
        """The mapping that holds the address, or None."""
        snapshot = self._sorted
        if snapshot is None:
            mappings = sorted(set(self._mappings.copy().values()), key=lambda m: (m.address, m.id))
            snapshot = ([m.address for m in mappings], mappings)
            self._sorted = snapshot
        starts, mappings = snapshot
        index = bisect.bisect_right(starts, address) - 1
        if index < 0:
            return None
        mapping = mappings[index]
        return mapping if address < mapping.address + mapping.length_bytes else None

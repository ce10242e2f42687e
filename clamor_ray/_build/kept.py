"""Built regions that libraries of this process may point into, and write to, for good.

A C++ library keeps state for the whole process (pybind11's tables of objects, for one), and what it
allocates of that in a `Region.malloc` block lies in the region. So the region stays mapped, as a
private copy-on-write one, until `Region.let_go`; also where nothing was published, and after the
session has ended.
"""

from __future__ import annotations

import weakref

from clamor_ray import errors
from clamor_ray._build.arena import Arena
from clamor_ray._native.client import Client, unmap_kept
from clamor_ray._read.lease import Lease


class Kept:
    """One of them; kept by this module until `let_go`.

    Args:
        client: whose mapping it is.
        lease: of the mapping.
        arena: closed; it knows how long the blocks are that libraries reallocate.
    """

    def __init__(self, client: Client, lease: Lease, arena: Arena) -> None:
        self._client = client
        self._held: tuple[Lease, Arena] | None = (lease, arena)
        self.region = lease.region
        _all[id(self)] = self

    @property
    def client(self) -> Client:
        return self._client

    def let_go(self) -> None:
        """Unmaps it, when the last array over it is gone. Calling it again changes nothing."""
        _all.pop(id(self), None)
        held, self._held = self._held, None
        if held is None:
            return
        mapping = held[0].mapping
        try:
            self._client.build_let_go(mapping.id)
        except (errors.ClosedError, errors.ForkedError):
            # The session has ended, and has left it to us.
            weakref.finalize(
                held[0], unmap_kept, mapping.address, mapping.length_bytes
            ).atexit = False


_all: dict[int, Kept] = {}


def is_kept(client: Client, region: int) -> bool:
    """Whether this process keeps what it built as this region."""
    return any(kept.region == region and kept.client is client for kept in list(_all.values()))

"""`clamor.build`: objects built straight into global memory, on this node or spread over all."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._build.arena import Arena
from clamor_ray._build.pieces import UNIT_BYTES
from clamor_ray._build.region import Region
from clamor_ray._native.client import MAP_PRIVATE
from clamor_ray._native.pieced_client import PieceVersion
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._protocol.messages import CreatedPieces
from clamor_ray._protocol.rpc import new_request_id
from clamor_ray._read import opener
from clamor_ray._read.lease import Lease
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray._redundancy.levels import SPREAD
from clamor_ray._tasks import task_context
from clamor_ray._write.scratch import Scratch
from clamor_ray._write.window import Window

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

SAY_S: Final = 60.0  # between two words of one who builds


class SpreadRegion(Region):
    """Global memory in which an object is built that may be larger than this node's memory. Made by
    `clamor.build(..., home="spread")`, used in its block.

    What is written is private memory of this process until `flush` sends it to other nodes.
    `empty`, `zeros` and `publish` do so where more than a budget was written
    (`CLAMOR_WRITE_BYTES`). At the end of the block the object goes to its homes, piece by piece.

    Its methods are called by the thread that writes: what another one writes while something is
    sent may be lost.

    Args:
        nbytes: length; it is rounded up to at least two pieces of 2 MiB.
        spill: it is on disk, and so is what `flush` sends: on this node's.

    Raises:
        ValueError: Fewer than one byte, or a second block.

    Example:
        >>> with clamor.build(64 << 20, home="spread") as r:
        ...     a = r.zeros(1_000_000)
        ...     a[:500_000] = 1
        ...     n_bytes = r.flush()
        ...     a[500_000:] = 2
        ...     ref = r.publish(a)
        >>> float(ref.get().sum())
        1500000.0
    """

    def __init__(self, nbytes: int, *, spill: bool = False) -> None:
        super().__init__(nbytes, spill=spill)
        self._length_bytes = max(self._length_bytes, 2 * UNIT_BYTES)
        self._window: Window | None = None
        self._created: CreatedPieces | None = None
        self._layout: PieceLayout
        self._request_id = new_request_id()
        self._said_s = 0.0

    def _create(self, session: Session) -> tuple[Session, CreatedPieces]:
        level = SPREAD._replace(spill=self._on_disk)
        self._layout = session.creator.laid_out(self._length_bytes, level)
        self._said_s = time.monotonic()
        self._on_disk = self._layout.on_disk
        made = (self._length_bytes, self._layout, self._request_id)
        return session, session.creator.begin_pieces(*made)

    def _say_at_work(self) -> None:
        """The registry gives up what nobody has said anything of for 10 minutes.

        Raises:
            ServerUnavailableError: It has given it up.
        """
        if time.monotonic() - self._said_s < SAY_S or self._session is None:
            return
        assert self._created is not None
        whole = self._created.whole
        made = (whole.length_bytes, self._layout, self._request_id)
        now = self._session.creator.begin_pieces(*made).whole
        self._said_s = time.monotonic()
        if now.region != whole.region:
            self._session.rpc.abandon(now.region)
            raise errors.ServerUnavailableError(
                "The region was given up: nothing was flushed for more than 10 minutes.",
                hint="Build it again, and call flush more often.",
            )

    def __enter__(self) -> SpreadRegion:
        if self._state != "not entered":
            raise ValueError("a region is built once: make a new one")
        session, created = opener.given().with_current(self._create)
        whole = created.whole
        task_context.made(whole.region)
        try:
            size = (whole.length_bytes, whole.piece_bytes)
            scratch = Scratch.make(session, *size, or_here=True, on_disk=self._on_disk)
            assert scratch is not None
            self._window = self._map(session, created, scratch)
        except BaseException:
            with contextlib.suppress(errors.ClamorError):
                session.rpc.abandon(whole.region)
            raise
        self._session, self._created, self._record = session, created, whole
        self._open()
        return self

    def _map(self, session: Session, created: CreatedPieces, scratch: Scratch) -> Window:
        """At the variable's own addresses: pointers into it stay right."""
        whole, pieces = created.whole, scratch.pieces
        mapping = session.client.map_pieces(
            pieces,
            flags=MAP_PRIVATE,
            timeout_s=session.config.fault_timeout_s,
            at=whole.base_address,
        )
        lease = Lease(session.client, session.leases, mapping, whole.region, writable=True)
        self._arena = Arena(mapping.address, mapping.length_bytes, lease)
        self._lease = lease
        return Window(session, lease, pieces, scratch, on_disk=self._on_disk)

    # -- building

    def flush(self) -> int:
        """Sends what was written since to other nodes; memory here is free again. It is read and
        written as before. No other thread may touch the region meanwhile.

        Returns:
            How many bytes were sent.

        Raises:
            OutOfMemoryError: No other node has room, or this one has none for a piece on its way.
            HomeLostError: A node is gone that had some of it. Build it again.
            ServerUnavailableError, WaitTimeoutError: Not now.
            ClosedError: Outside of the block.

        Example:
            >>> with clamor.build(128 << 20, home="spread") as r:
            ...     a = r.zeros((8, 1 << 20))
            ...     for row in range(8):
            ...         a[row] = row
            ...         n_bytes = r.flush()  # no more than a row of it is private memory here
            ...     ref = r.publish(a)
            >>> float(ref.get()[7, 0])
            7.0
        """
        self._opened()
        assert self._window is not None
        self._say_at_work()
        return self._window.send()

    def _flush_beyond(self) -> None:
        assert self._window is not None
        self._say_at_work()
        if self._window.dirty_bytes() > self._window.budget_bytes:
            self._window.send()

    def _array(self, shape: Any, dtype: Any, *, zeros: bool) -> npt.NDArray[Any]:
        array = super()._array(shape, dtype, zeros=zeros)
        self._flush_beyond()
        return array

    def malloc(self, *libraries: Any) -> NoReturn:
        """A region that is spread cannot be a library's: that may write to it at any time.

        Args:
            libraries: as `Region.malloc`'s.

        Raises:
            MallocShimError: Always.

        Example:
            >>> with clamor.build(8 << 20) as r, r.malloc():  # homed here
            ...     ref = r.publish(r.zeros(1000))
        """
        raise errors.MallocShimError(
            "Libraries cannot allocate in a region that is spread: its memory goes to other nodes "
            "while it is built.",
            hint="Build it on this node: clamor.build(nbytes), without home.",
        )

    def publish(self, obj: Any, *, fixed: bool = False) -> Any:
        self._opened()
        self._flush_beyond()
        return super().publish(obj, fixed=fixed)

    publish.__doc__ = Region.publish.__doc__

    # -- its end

    def _seal(self) -> None:
        session, window, created = self._session, self._window, self._created
        assert window is not None
        assert created is not None
        assert self._anchor is not None
        assert self._lease is not None
        for reference in self._arrays:
            array = reference()
            if array is not None:
                array.flags.writeable = False
        image = self._lease.bytes().data
        content = [
            (first * BLOCK_BYTES, image[first * BLOCK_BYTES : (first + n) * BLOCK_BYTES])
            for first, n in window.written().tolist()
        ]
        session.creator.make_pieces(created, content, before=window.bring)
        image.release()
        window.show(
            [
                PieceVersion(piece.region, 0, piece.base_address, piece.length_bytes)
                for piece in created.pieces
            ]
        )
        session.creator.seal_built(self._record.region, self._anchor, self._inside)
        self._is_leased = True
        self._lease.writable = False
        self._state = "sealed"

    def _abandon(self) -> None:
        if self._ref is not None:
            self._ref._mark_freed()
        self._state = "abandoned"
        self._forget()
        with contextlib.suppress(errors.ClamorError):  # the registry ends what was not sealed
            self._session.rpc.abandon(self._record.region, self._is_leased)

    def _forget(self) -> None:
        super()._forget()
        window, self._window = self._window, None
        if window is not None:
            window.end()


def build(nbytes: int, home: Literal["spread"] | None = None, *, spill: bool = False) -> Region:
    """Global memory to build an object in, straight where tasks will read it: no second copy.

    Use it in a with block: allocate in it, write, and `publish` one object. When the block ends,
    that is a global variable at version 0, homed on this node; the memory is read-only from then
    on, and stays readable in this process as long as anything made in it is alive. An exception
    in the block abandons all of it.

    Args:
        nbytes: of addresses. They cost nothing until they are written, and what is not used stays
            free: be generous.
        home: "spread": it is homed on all nodes, and may be larger than this one's memory. What is
            written stays here until `flush`, or until an array is made or published after more than
            a budget was written.
        spill: it is in a file on disk, and not in memory, as `put(spill=True)`: for what is larger
            than memory. The disk gives room for all of it when the block begins.

    Returns:
        A `Region`, for one with block of at most 10 minutes; where it is spread a `SpreadRegion`.

    Raises (the first two at once, the others on entering the block, and at its end):
        TypeError: `nbytes` is no whole number.
        ValueError: It is less than 1, or there is no such home.
        NotInitializedError: Before `clamor.init()`.
        OutOfMemoryError: The global address space is full.
        NoSpaceError: It is to spill, and the disk has less room.
        ServerUnavailableError: The page server does not answer, or was restarted meanwhile.
        ForkedError: In a fork of the process that made the session.

    Warns:
        ClamorWarning: The block ended and nothing was published.

    Example:
        >>> with clamor.build(1 << 30) as r:  # what is not used stays free
        ...     a = r.empty((1000, 16), np.float32)
        ...     a[:] = 7
        ...     ref = r.publish(a)
        >>> float(ref.get()[999, 15])
        7.0
    """
    if type(spill) is not bool:
        raise ValueError(f"spill is True or False, not {spill!r}")
    if home is None:
        return Region(nbytes, spill=spill)
    if home != "spread":
        raise ValueError(f"home is 'spread' or None, not {home!r}")
    return SpreadRegion(nbytes, spill=spill)

"""A private mapping of a variable in pieces, of which what was written may go to other nodes.

What is on disk sends to the disk of this node.

A piece that is sent shows the scratch variable from then on, at the same addresses: its blocks
come back when they are touched, as those of any variable do, and what is written to them is private
again. So memory here is needed for what was written since, and for the cache, which has a budget.

    written         sent            touched          written again     sent again
    private blocks  scratch v1      cached           private blocks    scratch v2

Nobody may touch a piece while it is sent: a write that comes between the copy and the new mapping
would be lost. So pieces are sent when the one who writes says so, and by its thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native.client import Runs
from clamor_ray._objects import block_sets
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._objects.memory import memory_bytes
from clamor_ray._protocol.config import Config
from clamor_ray._write.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clamor_ray._native.pieced_client import PieceVersion
    from clamor_ray._read.lease import Lease
    from clamor_ray._session.session import Session

WRITE_SHARE: Final = 4  # so many of them fill a node's memory, where nothing is said
CHUNK_SHARE: Final = 8  # so many parts of `Transaction.chunks` fill the budget
UNKNOWN_BYTES: Final = 1 << 30  # where the kernel does not say what there is


def write_budget_bytes(config: Config, has_bytes: int | None) -> int:
    """How much of what it writes a transaction keeps in memory here.

    Args:
        config: of this process.
        has_bytes: `memory_bytes`.

    Example:
        >>> write_budget_bytes(Config(), 16 << 30) >> 30
        4
        >>> write_budget_bytes(Config(write_bytes=7), None)
        7
    """
    if config.write_bytes:
        return config.write_bytes
    return UNKNOWN_BYTES if has_bytes is None else has_bytes // WRITE_SHARE


def bitmap(runs: Runs) -> BitMap:
    """The blocks of some runs."""
    blocks = BitMap()
    for first, n_blocks in runs.tolist():
        blocks.add_range(first, first + n_blocks)
    return blocks


def runs_of(blocks: BitMap) -> Runs:
    """The same blocks as runs."""
    return np.array(block_sets.runs(blocks), np.uint64).reshape(-1, 2)


class Window:
    """See the file's head. For one thread at a time.

    Args:
        session: whose it is.
        lease: of the private mapping.
        pieces: what was mapped.
        scratch: what it shows already; None: it is made when it is needed.
        on_disk: what is mapped is on disk, and so is what is sent.
    """

    def __init__(
        self,
        session: Session,
        lease: Lease,
        pieces: Sequence[PieceVersion],
        scratch: Scratch | None = None,
        *,
        on_disk: bool = False,
    ) -> None:
        self._session = session
        self._lease = lease
        self._pieces = tuple(pieces)
        self._scratch = scratch
        self._on_disk = on_disk
        self._shows = set(range(len(pieces))) if scratch is not None else set()
        self._sent = BitMap()

    @property
    def budget_bytes(self) -> int:
        return write_budget_bytes(self._session.config, memory_bytes())

    @property
    def is_whole(self) -> bool:
        """Whether all of it can be touched. It cannot where this node's page server was away for
        too long while a piece was sent."""
        return self._session.client.is_whole(self._lease.mapping.id)

    @property
    def has_sent(self) -> bool:
        return bool(self._sent)

    def dirty_bytes(self) -> int:
        """What was written since it was sent last: so much memory it takes here."""
        return int(self._dirty()[:, 1].sum()) * BLOCK_BYTES

    def _dirty(self) -> Runs:
        return self._session.client.dirty(self._lease.mapping.id)

    def written(self) -> Runs:
        """All blocks that were ever written, sent or not."""
        if not self._sent:
            return self._dirty()
        return runs_of(self._sent | bitmap(self._dirty()))

    def send(self, before_bytes: int | None = None) -> int:
        """Sends all that was written since, piece by piece. No thread may touch it meanwhile.

        Args:
            before_bytes: only pieces that end before that many bytes, counted from the variable's
                first one: what a writer who goes upward has done with. So a piece goes once, and
                little else with it than what was written.

        Returns:
            How many bytes; 0 where there is no other node: then all of it stays here.

        Raises:
            OutOfMemoryError, ServerUnavailableError, WaitTimeoutError, JournalFullError: Not now.
                What was written is there, unless `is_whole` says no.
            HomeLostError: Something that was sent before is lost, or a block that a piece needs.
        """
        client, sent_bytes = self._session.client, 0
        dirty = self._dirty()
        if not len(dirty):
            return 0
        if self._scratch is None:
            piece_bytes = self._pieces[0].length_bytes
            length_bytes = sum(piece.length_bytes for piece in self._pieces)
            self._scratch = Scratch.make(
                self._session, length_bytes, piece_bytes, on_disk=self._on_disk
            )
            if self._scratch is None:
                return 0
        for part in client.parts(self._lease.mapping.id, dirty):
            index = part.region - self._pieces[0].region
            end_bytes = index * self._pieces[0].length_bytes + self._pieces[index].length_bytes
            if before_bytes is not None and end_bytes > before_bytes:
                continue
            self._send_piece(index, part.mapping_id, part.runs)
            sent_bytes += int(part.runs[:, 1].sum()) * BLOCK_BYTES
        return sent_bytes

    def _send_piece(self, index: int, part_id: int, runs: Runs) -> None:
        assert self._scratch is not None
        if index in self._shows:
            self._scratch.write(index, part_id, runs)
        else:
            # The rest of the piece goes along: the scratch variable has zeros there.
            n_blocks = self._pieces[index].length_bytes // BLOCK_BYTES
            every = np.array([[0, n_blocks]], np.uint64)
            self._bring(part_id, runs_of(bitmap(every) - bitmap(runs)))
            self._scratch.write(index, part_id, every)
        first = index * self._pieces[0].length_bytes // BLOCK_BYTES
        self._sent |= bitmap(runs).shift(first)
        self._show(index, self._scratch.pieces[index])
        self._shows.add(index)

    def _bring(self, part_id: int, runs: Runs) -> None:
        """Blocks that are lost are an exception here, and not the end of the process."""
        patience_s = self._session.config.patience_s
        if not len(runs):
            return
        self._session.client.prefetch(part_id, runs, wait=True, timeout_s=patience_s)

    def bring(self, index: int) -> None:
        """What was written of a piece is on this node, to be copied.

        Raises:
            HomeLostError: It is lost.
            ServerUnavailableError, WaitTimeoutError: Not now.
        """
        first = index * self._pieces[0].length_bytes // BLOCK_BYTES
        n_blocks = self._pieces[index].length_bytes // BLOCK_BYTES
        sent = self._sent & BitMap(range(first, first + n_blocks))
        for part in self._session.client.parts(self._lease.mapping.id, runs_of(sent)):
            self._bring(part.mapping_id, part.runs)

    def _show(self, index: int, piece: PieceVersion, *, private: bool = True) -> None:
        """Tries again for as long as a fault would: without it the piece cannot be touched."""
        config, mapping_id = self._session.config, self._lease.mapping.id
        where = (piece.region, piece.version, piece.base_address)
        deadline = time.monotonic() + config.fault_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            timeout_s = max(0.0, min(left_s, config.connect_timeout_s))
            try:
                self._session.client.replace(
                    mapping_id, index, *where, private=private, timeout_s=timeout_s
                )
                return
            except (errors.ServerUnavailableError, errors.WaitTimeoutError):
                if left_s <= config.connect_timeout_s:
                    raise
            time.sleep(0.05)

    def show(self, pieces: Sequence[PieceVersion]) -> None:
        """Lets it show other regions of the same lengths and the same content, to be read only.

        Raises:
            As `send`.
        """
        for index, piece in enumerate(pieces):
            self._show(index, piece, private=False)

    def end(self) -> None:
        """What was sent is needed no longer, except by those who still look at the mapping."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.end()

"""A client that maps variables of several pieces as one.

A variable whose memory is spread over nodes is a row of regions, its pieces. Each has a home and
versions of its own; their addresses are adjacent. Here they become one mapping with one id. All
that is asked about that is asked about the pieces, and the answers are put together: block
numbers of a variable count from its first byte. Who has a mapping need not know which kind it is.

Pieces are at the variable's own addresses, or all of them are elsewhere, side by side. No lock:
each change of the table is one dict operation, because leases end inside the garbage collector.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native import piece_maps
from clamor_ray._native.base import (
    BLOCK_BYTES,
    BLOCK_SHIFT,
    MAP_FIXED,
    MAP_PRIVATE,
    Runs,
    c,
    check,
    ns,
)
from clamor_ray._native.client import Client, Mapping

FIRST_ID: Final = 1 << 48  # ids of one region's mappings count from 1
NO_ID: Final = 0  # of a piece whose mapping could not be replaced
AT_ONCE: Final = 8  # pieces that a gather asks for at the same time

_T = TypeVar("_T")
_ids = itertools.count(FIRST_ID)  # of all clients: `piece_maps` has the mappings of all


class PieceVersion(NamedTuple):
    """A piece at a version.

    Args:
        region: its id.
        version: its own.
        base_address: its own.
        length_bytes: of it; a multiple of the block.
    """

    region: int
    version: int
    base_address: int
    length_bytes: int


class PiecePart(NamedTuple):
    """One region's part of some runs of a mapping.

    Args:
        mapping_id: of that region's own mapping.
        region: its id; 0: that of the variable, which has no pieces.
        version: of it that is mapped; 0 where region is.
        runs: blocks counted from the region's first byte.
    """

    mapping_id: int
    region: int
    version: int
    runs: Runs


def loss_of_pieces(numbers: Iterable[int]) -> int:
    """One number for the losses of a variable's pieces: another one where one of them is another.

    Args:
        numbers: Of each piece, in the order of their addresses; 0: nothing of it is lost.

    Returns:
        Below 2**32; 0: nothing is lost.

    Example:
        >>> loss_of_pieces([0, 0, 0]), loss_of_pieces([0, 5, 0]) != loss_of_pieces([5, 5, 0])
        (0, True)
    """
    lost = [(index, number) for index, number in enumerate(numbers) if number]
    return zlib.crc32(repr(lost).encode()) | 1 if lost else 0


class _Pieced:
    """One mapping of several pieces.

    Args:
        pieces: as mapped.
        ids: of their mappings.
        address: of the first.
    """

    def __init__(self, pieces: Sequence[PieceVersion], ids: Sequence[int], address: int) -> None:
        self.pieces = tuple(pieces)
        self.ids = tuple(ids)
        self.address = address
        self.length_bytes = sum(piece.length_bytes for piece in pieces)
        self.piece_bytes = pieces[0].length_bytes  # of all but the last, which may be shorter
        self.piece_blocks = self.piece_bytes >> BLOCK_SHIFT

    def first_block(self, index: int) -> int:
        return index * self.piece_blocks

    def split(self, runs: Runs) -> Iterator[tuple[int, Runs]]:
        """Runs of the variable as (index, runs of that piece), by index."""
        runs = np.ascontiguousarray(runs, np.uint64).reshape(-1, 2)
        if not len(runs):
            return
        begin = runs[:, 0]
        end = begin + runs[:, 1]
        if int(end.max()) > self.length_bytes >> BLOCK_SHIFT:
            n_blocks = self.length_bytes >> BLOCK_SHIFT
            raise errors.RangeError(f"Blocks lie outside of a variable of {n_blocks} blocks.")
        size = np.uint64(self.piece_blocks)
        first, last = begin // size, (end - np.uint64(1)) // size
        for index in range(int(first.min()), int(last.max()) + 1):
            touches = (first <= index) & (index <= last)
            if not touches.any():
                continue
            low = np.uint64(self.first_block(index))
            cut_begin = np.maximum(begin[touches], low) - low
            cut_end = np.minimum(end[touches], low + size) - low
            yield index, np.stack([cut_begin, cut_end - cut_begin], axis=1)

    def join(self, found: Sequence[Runs]) -> Runs:
        """Runs of each piece as runs of the variable, adjacent ones joined."""
        moved = []
        for index, runs in enumerate(found):
            if len(runs):
                shifted = np.array(runs, np.uint64).reshape(-1, 2)
                shifted[:, 0] += np.uint64(self.first_block(index))
                moved.append(shifted)
        if not moved:
            return np.empty((0, 2), np.uint64)
        runs = np.concatenate(moved)
        ends = runs[:, 0] + runs[:, 1]
        starts = np.flatnonzero(np.concatenate(([True], runs[1:, 0] != ends[:-1])))
        lasts = np.append(starts[1:], len(runs)) - 1
        return np.stack([runs[starts, 0], ends[lasts] - runs[starts, 0]], axis=1)


class _Memory:
    """Mapped bytes, as NumPy takes them."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, True),
        }


class PiecedClient(Client):
    """See the file's head. What `Client` documents is the same here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._pieced: dict[int, _Pieced] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        super().__init__(*args, **options)

    def after_fork(self, ended: errors.ClamorError | None = None) -> None:
        self._pool = None  # its threads are the parent's
        super().after_fork(ended)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
        super().close()

    # -- maps

    def map_pieces(
        self,
        pieces: Sequence[PieceVersion],
        *,
        flags: int = 0,
        timeout_s: float = 10.0,
        at: int = 0,
    ) -> Mapping:
        """Maps a version of a variable: all of its pieces, side by side.

        Args:
            pieces: in the order of their addresses, without a gap; all but the last of one length.
            flags: as in `map`. With `MAP_FIXED` at their own addresses or not at all.
            timeout_s: for all answers.
            at: the first address, where they are to lie elsewhere; 0: their own, or any.

        Raises:
            OutOfMemoryError: Pieces would have more than their share of the process's maps.
            As `map`. Nothing is mapped then.
        """
        deadline = time.monotonic() + timeout_s
        if at:
            mapped = self._map_elsewhere(pieces, flags, at, deadline)
        else:
            try:
                mapped = self._map_all(pieces, flags | MAP_FIXED, 0, deadline)
            except errors.AddressClashError:
                if flags & MAP_FIXED:
                    raise
                mapped = self._map_elsewhere(pieces, flags, 0, deadline)
        pieced_id = next(_ids)
        pieced = _Pieced(pieces, [each.id for each in mapped], mapped[0].address)
        self._pieced[pieced_id] = pieced
        if not piece_maps.add(pieced_id, pieced.address, len(pieced.pieces)):
            self.unmap(pieced_id)
            raise piece_maps.too_many(len(pieced.pieces))
        return Mapping(
            id=pieced_id,
            address=pieced.address,
            length_bytes=pieced.length_bytes,
            loss=loss_of_pieces(each.loss for each in mapped),
            wastes=any(each.wastes for each in mapped),
        )

    def _map_elsewhere(
        self, pieces: Sequence[PieceVersion], flags: int, at: int, deadline: float
    ) -> list[Mapping]:
        length_bytes = sum(piece.length_bytes for piece in pieces)
        out = c.ffi.new("uint64_t *")
        check(c.lib.pc_addresses_reserve(length_bytes, at, out))
        return self._map_all(pieces, flags, int(out[0]), deadline)

    def _map_all(
        self, pieces: Sequence[PieceVersion], flags: int, reserved: int, deadline: float
    ) -> list[Mapping]:
        """`reserved`: addresses for all of them, which are the mappings' from here on; 0: each at
        its own."""
        mapped: list[Mapping] = []
        at = reserved
        try:
            for piece in pieces:
                timeout_s = max(0.0, deadline - time.monotonic())
                if not reserved:
                    mapped.append(self.map(*piece, flags=flags, timeout_s=timeout_s))
                    continue
                out = c.ffi.new("struct pc_mapping *")
                code = self._call(c.lib.pc_client_map_at, *piece, flags, at, ns(timeout_s), out)
                at += piece.length_bytes  # the mapping's, or given back
                check(code, region=piece.region, version=piece.version)
                mapped.append(self._remember(out, piece.region, piece.version))
        except BaseException:
            for mapping in mapped:
                self._let_go(super().unmap, mapping.id, mapping.address)
            left_bytes = reserved + sum(piece.length_bytes for piece in pieces) - at
            if reserved and left_bytes:
                check(c.lib.pc_addresses_release(at, left_bytes))
            raise
        return mapped

    def unmap(self, mapping_id: int) -> None:
        self._unmap_each(mapping_id, super().unmap)

    def unmap_later(self, mapping_id: int) -> None:
        self._unmap_each(mapping_id, super().unmap_later)

    def _unmap_each(self, mapping_id: int, unmap: Callable[[int], None]) -> None:
        if mapping_id < FIRST_ID:
            unmap(mapping_id)
            return
        piece_maps.remove(mapping_id)
        pieced = self._pieced.pop(mapping_id, None)
        if pieced is None:
            raise errors.FreedError(f"No mapping {mapping_id} in this process.")
        at = pieced.address
        for piece, part_id in zip(pieced.pieces, pieced.ids, strict=True):
            if part_id == NO_ID:
                c.lib.pc_addresses_release(at, piece.length_bytes)
            else:
                self._let_go(unmap, part_id, at)
            at += piece.length_bytes

    def _let_go(self, unmap: Callable[[int], None], part_id: int, at: int) -> None:
        try:
            unmap(part_id)
        except errors.ClosedError:  # it keeps the addresses for us
            with contextlib.suppress(errors.ClamorError):
                self.unmap_ended(at)
        except errors.ClamorError:
            pass  # the session is gone, and the mapping with it

    def replace(
        self,
        mapping_id: int,
        index: int,
        region: int,
        version: int,
        base_address: int,
        *,
        private: bool = True,
        timeout_s: float = 10.0,
    ) -> None:
        """Lets one piece of a private mapping show another region, of the piece's length. `parts`
        and `dirty` count and name what is there as before. What this process has written to the
        piece is gone; no thread may touch it meanwhile.

        Args:
            mapping_id: of several pieces.
            index: of the piece.
            region, version, base_address: of the other region.
            private: it can be written; else the piece is read only for good.
            timeout_s: for all of it.

        Raises:
            FreedError: There is no such mapping, or no such region.
            RangeError: The mapping is to be read only.
            ServerUnavailableError, WaitTimeoutError, ...: Not now. Where the piece is lost for
                this mapping, `is_whole` says so: a touch of it ends the process.
        """
        pieced = self._find(mapping_id)
        out = c.ffi.new("struct pc_mapping *")
        ids, n_bytes = list(pieced.ids), pieced.pieces[index].length_bytes
        flags = MAP_PRIVATE if private else 0
        at = pieced.address + pieced.first_block(index) * BLOCK_BYTES
        if ids[index] != NO_ID:
            code = self._call(
                c.lib.pc_client_remap,
                *(ids[index], region, version, base_address, flags, ns(timeout_s), out),
            )
            is_gone = out.address != 0
        else:
            code = self._call(
                c.lib.pc_client_map_at,
                *(region, version, base_address, n_bytes, flags, at, ns(timeout_s), out),
            )
            is_gone = True
            if code < 0:  # it has given them back
                check(int(c.lib.pc_addresses_reserve(n_bytes, at, c.ffi.new("uint64_t *"))))
        if code >= 0:
            ids[index] = self._remember(out, region, version).id
        elif is_gone:
            ids[index] = NO_ID
        pieced.ids = tuple(ids)
        check(code, region=region, version=version)

    def is_whole(self, mapping_id: int) -> bool:
        """Whether all pieces of a mapping are mapped: see `replace`."""
        return mapping_id < FIRST_ID or NO_ID not in self._find(mapping_id).ids

    # -- all of a mapping

    def _find(self, mapping_id: int) -> _Pieced:
        pieced = self._pieced.get(mapping_id)
        if pieced is None:
            raise errors.FreedError(f"No mapping {mapping_id} in this process.")
        return pieced

    def _each(self, mapping_id: int, call: Callable[[int], _T]) -> list[_T]:
        if mapping_id < FIRST_ID:
            return [call(mapping_id)]
        return [call(part_id) for part_id in self._find(mapping_id).ids]

    def _joined(self, mapping_id: int, call: Callable[[int], Runs]) -> Runs:
        if mapping_id < FIRST_ID:
            return call(mapping_id)
        pieced = self._find(mapping_id)
        return pieced.join([call(part_id) for part_id in pieced.ids])

    def dirty(self, mapping_id: int) -> Runs:
        return self._joined(mapping_id, super().dirty)

    def absent_blocks(self, mapping_id: int) -> int:
        return sum(self._each(mapping_id, super().absent_blocks))

    def reads_exact(self, mapping_id: int) -> None:
        self._each(mapping_id, super().reads_exact)

    def access_report_begin(self, mapping_id: int) -> None:
        self._each(mapping_id, super().access_report_begin)

    def access_report_end(self, mapping_id: int) -> Runs:
        return self._joined(mapping_id, super().access_report_end)

    def access_report_drop(self, mapping_id: int) -> None:
        self._each(mapping_id, super().access_report_drop)

    def evicted_begin(self, mapping_id: int, *, timeout_s: float = 10.0) -> None:
        begin = super().evicted_begin
        self._each(mapping_id, lambda part_id: begin(part_id, timeout_s=timeout_s))

    def evicted(self, mapping_id: int, *, timeout_s: float = 10.0) -> Runs:
        ask = super().evicted
        return self._joined(mapping_id, lambda part_id: ask(part_id, timeout_s=timeout_s))

    def evicted_end(self, mapping_id: int) -> None:
        self._each(mapping_id, super().evicted_end)

    # -- some blocks of a mapping

    def parts(self, mapping_id: int, runs: Runs) -> list[PiecePart]:
        """Which regions some blocks of a mapping are of.

        Args:
            mapping_id: of a mapping.
            runs: shape (n, 2): first block, counted from the variable's first byte, and number.

        Raises:
            RangeError: They do not lie in the variable.
        """
        if mapping_id < FIRST_ID:
            return [PiecePart(mapping_id=mapping_id, region=0, version=0, runs=runs)]
        pieced = self._find(mapping_id)
        return [
            PiecePart(
                mapping_id=pieced.ids[index],
                region=pieced.pieces[index].region,
                version=pieced.pieces[index].version,
                runs=some,
            )
            for index, some in pieced.split(runs)
        ]

    def blank(self, mapping_id: int, runs: Runs) -> None:
        for part in self.parts(mapping_id, runs):
            super().blank(part.mapping_id, part.runs)

    def report_reads(self, mapping_id: int, runs: Runs) -> None:
        for part in self.parts(mapping_id, runs):
            super().report_reads(part.mapping_id, part.runs)

    def prefetch(
        self, mapping_id: int, runs: Runs, *, wait: bool = True, timeout_s: float = 60.0
    ) -> None:
        deadline = time.monotonic() + timeout_s
        parts = self.parts(mapping_id, runs)
        if wait and len(parts) > 1:  # all homes send at the same time
            for part in parts:
                super().prefetch(part.mapping_id, part.runs, wait=False, timeout_s=timeout_s)
        for part in parts:
            left_s = max(0.0, deadline - time.monotonic())
            super().prefetch(part.mapping_id, part.runs, wait=wait, timeout_s=left_s)

    # -- rows

    def gather(
        self,
        mapping_id: int,
        ids: npt.NDArray[np.uint64],
        out: npt.NDArray[Any],
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
        timeout_s: float = 60.0,
    ) -> None:
        lies = {"stride_bytes": stride_bytes, "row_bytes": row_bytes}
        if mapping_id < FIRST_ID:
            super().gather(
                mapping_id, ids, out, offset_bytes=offset_bytes, timeout_s=timeout_s, **lies
            )
            return
        pieced = self._find(mapping_id)
        self._check_rows(ids, out, row_bytes)
        if ids.size == 0:
            return
        deadline = time.monotonic() + timeout_s
        numbers = ids.reshape(-1)
        rows = out.reshape(-1).view(np.uint8).reshape(numbers.size, row_bytes)
        begins = numbers * np.uint64(stride_bytes) + np.uint64(offset_bytes)
        if int(numbers.max()) * stride_bytes + offset_bytes + row_bytes > pieced.length_bytes:
            raise errors.RangeError(
                f"Row {int(numbers.max())} lies outside of a variable of {pieced.length_bytes} "
                "bytes."
            )
        first = begins // np.uint64(pieced.piece_bytes)
        crosses = (begins + np.uint64(row_bytes - 1)) // np.uint64(pieced.piece_bytes) != first
        gather = super().gather

        def one(index: int, positions: npt.NDArray[np.intp]) -> None:
            some = numbers[positions]
            least = some.min()  # rows count from here: none begins before the piece
            begin = int(least) * stride_bytes + offset_bytes - index * pieced.piece_bytes
            found = np.empty((len(positions), row_bytes), np.uint8)
            left_s = max(0.0, deadline - time.monotonic())
            part_id = pieced.ids[index]
            gather(part_id, some - least, found, offset_bytes=begin, timeout_s=left_s, **lies)
            rows[positions] = found

        groups = [(i, np.flatnonzero((first == i) & ~crosses)) for i in np.unique(first).tolist()]
        self._at_once([functools.partial(one, i, some) for i, some in groups if len(some)])
        if crosses.any():
            self._copy_crossing(
                mapping_id, pieced, begins[crosses], row_bytes, rows, crosses, deadline
            )

    def _copy_crossing(
        self,
        mapping_id: int,
        pieced: _Pieced,
        begins: npt.NDArray[np.uint64],
        row_bytes: int,
        rows: npt.NDArray[np.uint8],
        crosses: npt.NDArray[np.bool_],
        deadline: float,
    ) -> None:
        """Rows that lie in two pieces or more: their blocks come, and are copied as memory."""
        low = begins >> np.uint64(BLOCK_SHIFT)
        high = (begins + np.uint64(row_bytes - 1)) >> np.uint64(BLOCK_SHIFT)
        runs = np.unique(np.stack([low, high - low + np.uint64(1)], axis=1), axis=0)
        left_s = max(0.0, deadline - time.monotonic())
        self.prefetch(mapping_id, runs, wait=True, timeout_s=left_s)
        memory = np.asarray(_Memory(pieced.address, pieced.length_bytes))
        for position, begin in zip(np.flatnonzero(crosses).tolist(), begins.tolist(), strict=True):
            rows[position] = memory[begin : begin + row_bytes]

    def rows_here(
        self,
        mapping_id: int,
        ids: npt.NDArray[np.int64],
        n_rows: int,
        *,
        offset_bytes: int,
        stride_bytes: int,
        row_bytes: int,
    ) -> bool:
        if mapping_id < FIRST_ID:
            return super().rows_here(
                mapping_id,
                ids,
                n_rows,
                offset_bytes=offset_bytes,
                stride_bytes=stride_bytes,
                row_bytes=row_bytes,
            )
        pieced = self._find(mapping_id)
        numbers = np.unique(np.where(ids < 0, ids + n_rows, ids))
        if not numbers.size or numbers[0] < 0 or numbers[-1] >= n_rows:
            return True  # NumPy raises its error
        low = (numbers * stride_bytes + offset_bytes) >> BLOCK_SHIFT
        high = (numbers * stride_bytes + offset_bytes + row_bytes - 1) >> BLOCK_SHIFT
        # Equal spans are beside each other. (`np.unique` of pairs takes 50 times as long.)
        is_new = np.ones(len(low), np.bool_)
        is_new[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        low, high = low[is_new], high[is_new]
        spans = np.stack([low, high - low + 1], axis=1).astype(np.uint64)
        for index, runs in pieced.split(spans):
            firsts, counts = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
            steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            blocks = np.unique(np.repeat(firsts, counts) + steps)
            n_blocks = pieced.pieces[index].length_bytes >> BLOCK_SHIFT
            if not super().rows_here(
                pieced.ids[index],
                blocks,
                n_blocks,
                offset_bytes=0,
                stride_bytes=BLOCK_BYTES,
                row_bytes=BLOCK_BYTES,
            ):
                return False
        return True

    def _at_once(self, calls: Sequence[Callable[[], None]]) -> None:
        """All of them, and then the first failure."""
        if len(calls) <= 1:
            for call in calls:
                call()
            return
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "clamor-pieces")
        running = [self._pool.submit(call) for call in calls]
        concurrent.futures.wait(running)
        for each in running:
            each.result()

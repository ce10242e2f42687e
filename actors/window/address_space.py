"""Which addresses of the window are in use. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.refusals import NoAddresses

WINDOW_BEGIN = 0x1100_0000_0000
WINDOW_END = 0x2900_0000_0000
UNIT_BYTES = 2 << 20
GUARD_BYTES = UNIT_BYTES


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class AddressSpace:
    """First fit over what is ours of the window; every range ends in a guard gap that nobody maps.

    Args:
        begin: First address, a multiple of 2 MiB.
        end: One past the last, a multiple of 2 MiB.
        ours: All of it is ours; else what ``own`` and ``reserve`` are given.
    """

    def __init__(
        self, begin: int = WINDOW_BEGIN, end: int = WINDOW_END, *, ours: bool = True
    ) -> None:
        if begin % UNIT_BYTES or end % UNIT_BYTES or begin >= end:
            raise ValueError(f"no window: {begin:#x} to {end:#x}")
        self.begin = begin
        self.end = end
        self._others: list[tuple[int, int]] = [(begin, end)]  # not ours
        self._free: list[tuple[int, int]] = []
        self._used: dict[int, int] = {}
        if ours:
            self.acquire(begin, end)

    def acquire(self, begin: int, end: int) -> None:
        """These addresses are ours from now on; those that were change nothing."""
        for low, high in self._take_from_others(begin, end):
            self._give(low, high)

    def _take_from_others(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What of the range was not ours, and is now."""
        rest: list[tuple[int, int]] = []
        taken: list[tuple[int, int]] = []
        for low, high in self._others:
            cuts = [(low, min(high, begin)), (max(low, end), high)]
            rest += [(b, e) for b, e in cuts if b < e]
            if max(low, begin) < min(high, end):
                taken.append((max(low, begin), min(high, end)))
        self._others = rest
        return taken

    def has_room(self, length_bytes: int) -> bool:
        """Whether ``allocate`` would find a gap."""
        need = _round_up(length_bytes, UNIT_BYTES) + GUARD_BYTES
        return any(end - begin >= need for begin, end in self._free)

    @staticmethod
    def gap_bytes(lengths_bytes: Sequence[int]) -> int:
        """Of a gap in which ``allocate`` finds room for each of these, one after the other.

        Example:
            >>> AddressSpace.gap_bytes([5 << 20, 2 << 20]) >> 20
            12
        """
        return sum(_round_up(each, UNIT_BYTES) + GUARD_BYTES for each in lengths_bytes)

    @property
    def bytes_in_use(self) -> int:
        """Of addresses, guard gaps included."""
        return sum(end - begin for begin, end in self._used.items())

    def ranges(self) -> list[tuple[int, int]]:
        """The used ranges (begin, end with guard), by address."""
        return sorted(self._used.items())

    def allocate(self, length_bytes: int) -> int:
        """The lowest 2 MiB-aligned address with room for the length and the guard.

        Raises:
            ValueError: A length below 1.
            NoAddresses: No gap is large enough.
        """
        if length_bytes < 1:
            raise ValueError(f"a region of {length_bytes} bytes")
        need = _round_up(length_bytes, UNIT_BYTES) + GUARD_BYTES
        for index, (begin, end) in enumerate(self._free):
            if end - begin < need:
                continue
            if end - begin == need:
                del self._free[index]
            else:
                self._free[index] = (begin + need, end)
            self._used[begin] = begin + need
            return begin
        raise NoAddresses(
            f"a variable of {format_bytes(length_bytes)} finds no room: "
            f"{format_bytes(self.bytes_in_use)} of {format_bytes(self.end - self.begin)} of "
            "addresses are in use"
        )

    def allocate_all(self, lengths_bytes: Sequence[int], undo: Sequence[int] = ()) -> list[int]:
        """``allocate`` of each, or of none.

        Args:
            lengths_bytes: Of each.
            undo: Ranges that are released where there is no room.

        Raises:
            ValueError, NoAddresses: See ``allocate``.
        """
        begins: list[int] = []
        try:
            for length_bytes in lengths_bytes:
                begins.append(self.allocate(length_bytes))
        except NoAddresses:
            for begin in (*begins, *undo):
                self.release(begin)
            raise
        return begins

    def split(self, base_address: int, lengths_bytes: Sequence[int]) -> list[int]:
        """Makes adjacent ranges of one that was allocated: each is released by itself. The last one
        has the guard gap.

        Args:
            base_address: Of the range.
            lengths_bytes: Of the parts, in order; all but the last are multiples of 2 MiB.

        Returns:
            Where each begins.
        """
        end = self._used[base_address]
        begins = [base_address]
        for length_bytes in lengths_bytes[:-1]:
            if length_bytes < 1 or length_bytes % UNIT_BYTES:
                raise ValueError(f"a part of {length_bytes} bytes")
            begins.append(begins[-1] + length_bytes)
        if begins[-1] + lengths_bytes[-1] + GUARD_BYTES > end:
            raise ValueError(f"{sum(lengths_bytes)} bytes in a range of {end - base_address}")
        self._used.update(zip(begins, [*begins[1:], end], strict=True))
        return begins

    def reserve(self, base_address: int, length_bytes: int, *, guarded: bool = True) -> None:
        """Takes the range that ``allocate`` once gave out, or a part of it, after a restart.

        Args:
            base_address: Of the range.
            length_bytes: That was asked for.
            guarded: It ends in a guard gap.

        Raises:
            ValueError: It is not free.
        """
        end = base_address + _round_up(length_bytes, UNIT_BYTES) + guarded * GUARD_BYTES
        self.acquire(base_address, end)  # it once was: the journal is read before the cluster's log
        index = bisect.bisect_right(self._free, (base_address, self.end)) - 1
        if index < 0 or self._free[index][0] > base_address or self._free[index][1] < end:
            raise ValueError(f"the addresses {base_address:#x} to {end:#x} are not free")
        free_begin, free_end = self._free[index]
        rest = [(free_begin, base_address), (end, free_end)]
        self._free[index : index + 1] = [(b, e) for b, e in rest if b < e]
        self._used[base_address] = end

    def release(self, base_address: int) -> None:
        """Gives a range back, joined with its free neighbours."""
        self._give(base_address, self._used.pop(base_address))

    def _give(self, begin: int, end: int) -> None:
        index = bisect.bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))

    def check(self) -> None:
        """Raises AssertionError unless used, free and others' ranges tile the window."""
        where = self.begin
        was_free = False
        tiles = [(b, e, False) for b, e in self._used.items()]
        tiles += [(b, e, False) for b, e in self._others]
        tiles += [(b, e, True) for b, e in self._free]
        for begin, end, is_free in sorted(tiles):
            assert begin == where, f"gap or overlap at {where:#x}"
            assert end > begin, f"empty range at {begin:#x}"
            assert not (is_free and was_free), f"free ranges not joined at {begin:#x}"
            assert begin % UNIT_BYTES == 0
            where, was_free = end, is_free
        assert where == self.end

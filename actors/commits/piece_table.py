"""The pieces of variables, and which of them a commit must write together. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

from pyroaring import BitMap

from clamor_ray._protocol.messages import unpack_row
from clamor_ray._redundancy.groups import PieceGroups
from clamor_ray.actors.commits.committed import CommittedVariable, Entry
from clamor_ray.errors import ProtocolError


class PieceTable:
    """Which regions are pieces, and of what.

    Example:
        >>> table = PieceTable()
        >>> table.open(7, range(8, 12), PieceGroups(n_pieces=2, width=1, n_parity=1))
        >>> list(table.pieces_of(7)), list(table.data_of(7)), table.is_parity(10), table.whole_of(9)
        ([8, 9, 10, 11], [8, 9], True, 7)
    """

    def __init__(self) -> None:
        self._pieces: dict[int, range] = {}  # of a variable in pieces
        self._groups: dict[int, PieceGroups] = {}  # the same
        self._whole: dict[int, int] = {}  # piece -> its variable

    def __contains__(self, region: int) -> bool:
        """Whether it is a variable in pieces."""
        return region in self._pieces

    def open(self, region: int, pieces: range, groups: PieceGroups) -> None:
        """A variable.

        Args:
            region: Its id.
            pieces: Parity pieces too.
            groups: Of them.
        """
        self._pieces[region] = pieces
        self._groups[region] = groups
        self._whole.update(dict.fromkeys(pieces, region))

    def forget(self, region: int) -> None:
        """It is gone, whatever it was."""
        self._whole.pop(region, None)
        self._pieces.pop(region, None)
        self._groups.pop(region, None)

    def pieces_of(self, region: int) -> range:
        """The pieces of a variable in pieces, parity pieces too; of any other none."""
        return self._pieces.get(region, range(0))

    def data_of(self, region: int) -> range:
        """The pieces that have a variable's bytes; of any other none."""
        pieces = self.pieces_of(region)
        return pieces[: self._groups[region].n_pieces] if pieces else pieces

    def whole_of(self, region: int) -> int | None:
        """The variable of a piece."""
        return self._whole.get(region)

    def is_parity(self, region: int) -> bool:
        """Whether it is a piece that has none of its variable's bytes. Commits to it never
        conflict: where two of them change the same block of a piece, they conflict there."""
        whole = self._whole.get(region)
        if whole is None:
            return False
        return self._groups[whole].is_parity(region - self._pieces[whole].start)

    def takes_deltas(self, region: int) -> bool:
        """Whether a commit says of it what changes: a parity piece that is no copy."""
        whole = self._whole.get(region)
        return whole is not None and self._groups[whole].width > 1 and self.is_parity(region)

    def check(self, entries: Sequence[Entry], label: Callable[[int], str]) -> None:
        """
        Raises:
            ProtocolError: A piece is written, and not its variable, or blocks of pieces, and not
                those of their parity pieces.
        """
        new = {entry.region for entry in entries}
        for region in new:
            if (whole := self._whole.get(region)) is not None and whole not in new:
                raise ProtocolError(
                    f"A commit changes piece {region} of {label(whole)}, and makes no version of "
                    "that."
                )
        for whole in new & self._groups.keys():
            if self._groups[whole].width:
                self._check_parity(whole, entries, label)

    def _check_parity(
        self, whole: int, entries: Iterable[Entry], label: Callable[[int], str]
    ) -> None:
        groups, first = self._groups[whole], self._pieces[whole].start
        changed = {
            entry.region - first: entry.changed or BitMap()
            for entry in entries
            if self._whole.get(entry.region) == whole
        }
        for group in {groups.group_of(index) for index in changed}:
            wanted = BitMap.union(*(changed.get(i, BitMap()) for i in groups.data_of(group)))
            for index in groups.parity_of(group):
                if changed.get(index, BitMap()) != wanted:
                    raise ProtocolError(
                        f"A commit to {label(whole)} changes other blocks of its pieces than of "
                        "their parity pieces."
                    )

    def row_with(
        self, variable: CommittedVariable, piece: int, version: int
    ) -> tuple[int, ...] | None:
        """The versions of all pieces at the newest version of a variable that has this version of
        one of them; None where that is forgotten, or there is none.

        Args:
            variable: What was committed to the piece's variable.
            piece: Its region.
            version: Its own.
        """
        pieces = self._pieces[variable.region]
        index, n = piece - pieces.start, len(pieces)
        after = bisect.bisect_right(
            variable.entries, version, key=lambda entry: unpack_row(entry.payload, n)[index]
        )
        if after:
            row = unpack_row(variable.entries[after - 1].payload, n)
            if row[index] == version:
                return row
        return (0,) * n if version == 0 and variable.horizon == 0 else None

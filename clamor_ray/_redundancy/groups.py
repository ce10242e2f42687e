"""Which pieces of a variable make a lost one of them again.

The pieces of a variable that have its bytes are its data pieces. With redundancy some of them in a
row make a group, with parity pieces of their own. A parity piece has, block by block, the XOR of
the group's data pieces, where a shorter one has zeros behind its end. So any piece of a group is
the XOR of the others. A group of one data piece has copies of it instead: any of them is the piece.

Regions of a variable: its own, then its data pieces, then the parity pieces, group by group.

(Camelot, section 3.5: RAID over page servers; here the unit is a block, not a part of one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Shape(NamedTuple):
    """Of the groups of a variable.

    Args:
        width: data pieces of each group, but the last, which may have fewer; 0: no redundancy.
        n_parity: parity pieces of each group; copies beside the data piece, where width is 1.
        is_fixed: one server has the parity of all groups (RAID-4); else each has some.
    """

    width: int = 0
    n_parity: int = 0
    is_fixed: bool = False


NO_GROUPS: Final = Shape()


class PieceLayout(NamedTuple):
    """How a new variable is cut, and where its pieces lie.

    Args:
        piece_bytes: of each piece but the last, a multiple of 2 MiB.
        shape: of their groups.
        on_disk: in files of their homes' nodes, and not in memory.
        is_here: all are homed where they are made.
    """

    piece_bytes: int
    shape: Shape = NO_GROUPS
    on_disk: bool = False
    is_here: bool = False


class PieceGroups(NamedTuple):
    """The groups of a variable's pieces, by index: data pieces count from 0, parity pieces follow.

    Args:
        n_pieces: data pieces.
        width, n_parity: see `Shape`.

    Example:
        >>> groups = PieceGroups(n_pieces=5, width=2, n_parity=1)
        >>> groups.n_regions, [groups.members(g) for g in range(groups.n_groups)]
        (8, [(0, 1, 5), (2, 3, 6), (4, 7)])
        >>> groups.group_of(3), groups.group_of(6)
        (1, 1)
    """

    n_pieces: int
    width: int = 0
    n_parity: int = 0

    @property
    def n_groups(self) -> int:
        return -(-self.n_pieces // self.width) if self.width else 0

    @property
    def n_regions(self) -> int:
        """Data and parity pieces."""
        return self.n_pieces + self.n_groups * self.n_parity

    @property
    def are_copies(self) -> bool:
        """Whether each parity piece is a copy of its data piece."""
        return self.width == 1

    def is_parity(self, index: int) -> bool:
        return index >= self.n_pieces

    def group_of(self, index: int) -> int:
        """Of a piece.

        Raises:
            ValueError: The variable has no groups, or no such piece.
        """
        if not self.width or not 0 <= index < self.n_regions:
            raise ValueError(f"piece {index} of {self} is in no group")
        if index < self.n_pieces:
            return index // self.width
        return (index - self.n_pieces) // self.n_parity

    def data_of(self, group: int) -> range:
        """The data pieces of a group."""
        first = group * self.width
        return range(first, min(first + self.width, self.n_pieces))

    def parity_of(self, group: int) -> range:
        """The parity pieces of a group."""
        first = self.n_pieces + group * self.n_parity
        return range(first, first + self.n_parity)

    def members(self, group: int) -> tuple[int, ...]:
        """All pieces of a group, data first."""
        return (*self.data_of(group), *self.parity_of(group))

    def others(self, index: int) -> tuple[int, ...]:
        """The other pieces of a piece's group; none where there are no groups."""
        if not self.width:
            return ()
        return tuple(each for each in self.members(self.group_of(index)) if each != index)


def groups_of(length_bytes: int, layout: PieceLayout) -> PieceGroups:
    """Of a variable that is cut so.

    Example:
        >>> groups_of(5 << 20, PieceLayout(2 << 20, Shape(2, 1)))
        PieceGroups(n_pieces=3, width=2, n_parity=1)
    """
    n_pieces = -(-length_bytes // layout.piece_bytes)
    return PieceGroups(n_pieces, layout.shape.width, layout.shape.n_parity)


def lengths_of(groups: PieceGroups, length_bytes: int, piece_bytes: int) -> list[int]:
    """Of each piece, parity pieces too: as long as the longest data piece of the group.

    Args:
        groups: of the variable.
        length_bytes: of the variable.
        piece_bytes: of each data piece but the last, which has the rest.

    Example:
        >>> lengths_of(PieceGroups(3, 2, 1), 250, 100)
        [100, 100, 50, 100, 50]
    """
    data = [min(piece_bytes, length_bytes - i * piece_bytes) for i in range(groups.n_pieces)]
    parity = [
        max(data[i] for i in groups.data_of(group))
        for group in range(groups.n_groups)
        for _ in range(groups.n_parity)
    ]
    return data + parity


def homes_of(groups: PieceGroups, servers: Sequence[int], first: int, is_fixed: bool) -> list[int]:
    """The server that each piece goes to: no two pieces of a group to one, where there are enough.

    Args:
        groups: of the variable.
        servers: that there are.
        first: the one that the first piece goes to, by its index.
        is_fixed: as in `Shape`.

    Returns:
        Of each piece, by index.

    Example:
        >>> homes_of(PieceGroups(4, 2, 1), [10, 11, 12], 0, is_fixed=False)  # RAID-5
        [10, 11, 11, 12, 12, 10]
        >>> homes_of(PieceGroups(4, 2, 1), [10, 11, 12], 0, is_fixed=True)  # RAID-4
        [11, 12, 12, 11, 10, 10]
        >>> homes_of(PieceGroups(3), [10, 11, 12], 1, is_fixed=False)
        [11, 12, 10]
    """
    n = len(servers)
    if not groups.width:  # each round begins one further: who reads every n-th piece asks all
        return [servers[(first + index + index // n) % n] for index in range(groups.n_pieces)]
    homes = [0] * groups.n_regions
    data, parity = list(servers), list(servers)
    if is_fixed:
        parity = [servers[first % n]]
        data = [server for server in servers if server not in parity]
    for group in range(groups.n_groups):
        begin = first + group + (group // n if groups.are_copies else 0)
        for j, index in enumerate(groups.data_of(group)):
            homes[index] = data[(begin + j) % len(data)]
        for j, index in enumerate(groups.parity_of(group)):
            homes[index] = parity[(begin + groups.width + j) % len(parity)]
    return homes

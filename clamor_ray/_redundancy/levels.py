"""The levels of redundancy that a variable can have, as the user names them. Pure."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from clamor_ray import errors
from clamor_ray._redundancy.groups import Shape

LevelName = Literal["raid0", "raid1", "raid4", "raid5"]
LEVELS: Final[tuple[LevelName, ...]] = ("raid0", "raid1", "raid4", "raid5")
PARITY_NODES: Final = 3  # with two nodes a parity is a copy
MOST_WIDTH: Final = 8  # what is lost is made again from so many others


class Level(NamedTuple):
    """One of them.

    Args:
        name: of the level.
        copies: of each block, for "raid1".
        follows: each piece is homed where it is first written.
        spill: each piece is on disk.
        is_here: each piece is homed on the node that makes it.
    """

    name: LevelName
    copies: int = 2
    follows: bool = False
    spill: bool = False
    is_here: bool = False

    @property
    def n_nodes(self) -> int:
        """How many it needs."""
        return {"raid0": 1, "raid1": self.copies}.get(self.name, PARITY_NODES)

    def shape(self, n_nodes: int) -> Shape:
        """Of the groups, with so many nodes.

        Raises:
            TooFewNodesError: There are not enough.

        Example:
            >>> Level("raid5").shape(5), Level("raid1", copies=3).shape(4)
            (Shape(width=4, n_parity=1, is_fixed=False), Shape(width=1, n_parity=2, is_fixed=False))
        """
        if n_nodes < self.n_nodes:
            copies = f" with copies={self.copies}" if self.name == "raid1" else ""
            raise errors.TooFewNodesError(
                f'redundancy="{self.name}"{copies} needs {self.n_nodes} nodes that take '
                f"variables; there {'is' if n_nodes == 1 else 'are'} {n_nodes}.",
                hint=_instead(n_nodes),
            )
        if self.name == "raid0":
            return Shape()
        if self.name == "raid1":
            return Shape(width=1, n_parity=self.copies - 1)
        return Shape(width=min(n_nodes - 1, MOST_WIDTH), n_parity=1, is_fixed=self.name == "raid4")


def _instead(n_nodes: int) -> str:
    if n_nodes < 2:
        return "Add nodes. With one node there is nothing that survives its loss."
    copies = f" with copies={n_nodes} or fewer" if n_nodes > 2 else ""
    return f'Add nodes, or take redundancy="raid1"{copies}, which {n_nodes} nodes can have.'


SPREAD: Final = Level("raid0")


def level_of(
    home: str | None,
    redundancy: str | None,
    copies: int,
    *,
    spill: bool = False,
    is_zeros: bool = False,
) -> Level | None:
    """What `put` and its like were asked for.

    Args:
        home: "spread" or None; "writers", of zeros without redundancy.
        redundancy: a level's name or None.
        copies: of each block, for "raid1"; 2 for the others.
        spill: it is on disk.
        is_zeros: it is all zeros.

    Returns:
        None: one home, where there is room.

    Raises:
        ValueError: No such home or level, or a number of copies that makes no sense.

    Example:
        >>> level_of(None, None, 2), level_of(None, "raid1", 3) == Level("raid1", copies=3)
        (None, True)
        >>> level_of(None, None, 2, spill=True) == Level("raid0", spill=True, is_here=True)
        True
    """
    if type(spill) is not bool:
        raise ValueError(f"spill is True or False, not {spill!r}")
    if spill:
        level = level_of(home, redundancy, copies, is_zeros=is_zeros)
        return (
            Level("raid0", spill=True, is_here=True)
            if level is None
            else level._replace(spill=True)
        )
    if home == "writers" and is_zeros:
        if redundancy is not None:
            raise ValueError('home="writers" has no redundancy: take home="spread" with it')
        return Level("raid0", follows=True)
    if home not in (None, "spread"):
        known = "'spread', 'writers' or None" if is_zeros else "'spread' or None"
        raise ValueError(
            f"home is {known}, not {home!r}. A variable that is not spread is homed on the node "
            "that puts it: call put in a task on the node that you want"
        )
    if redundancy is not None and redundancy not in LEVELS:
        raise ValueError(f"redundancy is one of {', '.join(LEVELS)}, not {redundancy!r}")
    if copies != 2 and redundancy != "raid1":
        raise ValueError('copies is for redundancy="raid1"')
    if type(copies) is not int or copies < 2:
        raise ValueError(f"copies is a whole number, 2 or more, not {copies!r}")
    if redundancy is None:
        return None if home is None else SPREAD
    return Level(redundancy, copies)

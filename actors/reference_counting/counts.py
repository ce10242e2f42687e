"""Which variables nobody refers to any more. Pure: no Ray, no clock.

Each reference carries an *anchor*: an empty Ray object that this registry owns, and whose
references Ray counts, in whatever process, task, actor or object they are. A variable may have
several anchors: one of its maker, one for each who found it by its name. It is held as long as one
of them is alive, or it has a name, or a variable that is held has a reference to it inside. What
was read of that variable has its anchors: where it is freed, they hold what was inside of it on.

Only a variable that has been counted from its seal on is ever said to be unheld. So one from before
a restart of the registry, whose anchors went with the old process, stays until it is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable


class ReferenceCounts:
    """See the file's head.

    Not thread-safe: one caller at a time.

    Args:
        is_named: Whether a region has a name.

    Example:
        >>> counts = ReferenceCounts(lambda region: False)
        >>> counts.made([b"a"])
        >>> counts.begin(7, b"a")
        >>> counts.unheld([b"a"], alive={b"a"}), counts.unheld([b"a"], alive=set())
        ([], [7])
    """

    def __init__(self, is_named: Callable[[int], bool]) -> None:
        self._is_named = is_named
        self._made: set[bytes] = set()  # given out, and of no region yet
        self._region_of: dict[bytes, int] = {}
        self._of_uncounted: dict[bytes, int] = {}  # the same, of regions that are not counted
        self._anchors_of: dict[int, set[bytes]] = {}  # of all that are counted
        self._without: set[int] = set()  # counted, and without an anchor
        self._freed: set[int] = set()  # what was read of them holds what is inside
        self._inside: dict[int, tuple[int, ...]] = {}
        self._n_outside: Counter[int] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look after."""
        return not self._made and not self._anchors_of and not self._of_uncounted

    def anchors(self) -> list[bytes]:
        """All that are known, for a look at which of them are alive."""
        return [*self._made, *self._region_of, *self._of_uncounted]

    def made(self, anchors: Iterable[bytes]) -> None:
        """Anchors are given out."""
        self._made.update(anchors)

    def begin(self, region: int, anchor: bytes, inside: Iterable[bytes] = ()) -> None:
        """A region is sealed, and its references are counted. Beginning again changes nothing.

        Args:
            region: Its id.
            anchor: What its maker's reference carries. Where it is none of this registry's, nothing
                is counted.
            inside: Anchors of references that are inside of it.
        """
        self._note_inside(region, inside)  # of one that is not counted, too
        if anchor not in self._made:
            return
        if region in self._anchors_of:  # who shares an object may ask twice
            self.hold(region, anchor)
            return
        self._made.discard(anchor)
        self._anchors_of[region] = {anchor}
        self._region_of[anchor] = region

    def _note_inside(self, region: int, inside: Iterable[bytes]) -> None:
        # Of those that are not counted nothing need be held on.
        known = (self._region_of.get(each) for each in inside)
        regions = tuple({each for each in known if each is not None and each != region})
        if regions and region not in self._inside:
            self._inside[region] = regions
            self._n_outside.update(regions)

    def regions_of(self, anchors: Iterable[bytes]) -> set[int] | None:
        """The regions that these anchors are of; None where one is not known: from before a restart
        of the registry, or of another session."""
        regions = {self._region_of.get(each, self._of_uncounted.get(each)) for each in anchors}
        return {region for region in regions if region is not None} if None not in regions else None

    def hold(self, region: int, anchor: bytes) -> None:
        """One more anchor of a region; it holds nothing where its references are not counted."""
        anchors = self._anchors_of.get(region)
        if anchors is None or region in self._freed:
            if anchors is None:
                self._made.discard(anchor)
                self._of_uncounted[anchor] = region
            return
        self._made.discard(anchor)
        self._region_of[anchor] = region
        anchors.add(anchor)
        self._without.discard(region)

    def forget(self, region: int) -> None:
        """It was freed. What is inside of it is held for as long as it would have been."""
        if region in self._inside and self._is_read(region):
            self._freed.add(region)
        else:
            self._end(region)

    def _is_read(self, region: int) -> bool:
        """There may be references that were taken out of it."""
        return bool(self._anchors_of.get(region)) or region in self._n_outside

    def _end(self, region: int) -> None:
        ending = [region]
        while ending:
            region = ending.pop()
            for anchor in self._anchors_of.pop(region, ()):
                del self._region_of[anchor]
            self._without.discard(region)
            self._freed.discard(region)
            for inner in self._inside.pop(region, ()):
                self._n_outside[inner] -= 1
                if not self._n_outside[inner]:
                    del self._n_outside[inner]
                    if inner in self._freed and not self._is_read(inner):
                        ending.append(inner)

    def unheld(self, looked_at: Iterable[bytes], alive: Container[bytes]) -> list[int]:
        """Takes in which anchors are alive.

        Args:
            looked_at: What ``anchors`` was before that was asked: later ones are not known to it.
            alive: Anchors that somebody refers to.

        Returns:
            Regions that nobody refers to, which are to be freed; they are said again until
            ``forget``.
        """
        for anchor in looked_at:
            if anchor in alive:
                continue
            self._made.discard(anchor)
            self._of_uncounted.pop(anchor, None)
            region = self._region_of.pop(anchor, None)
            if region is not None:
                anchors = self._anchors_of[region]
                anchors.discard(anchor)
                if not anchors and region not in self._freed:
                    self._without.add(region)
                elif not self._is_read(region):
                    self._end(region)
        return [
            region
            for region in sorted(self._without)
            if region not in self._n_outside and not self._is_named(region)
        ]

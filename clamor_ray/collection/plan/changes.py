"""Which partitions a change of global variables touches. Pure.

A task read blocks of a variable at a version. It would read the same at a newer one where none of
those blocks changed in between; then its result stands. Where that is not known, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pyroaring import BitMap

from clamor_ray._tasks.task_context import Read

Changed = Callable[[int, int, int], BitMap | None]
"""(region, from version, to version) -> blocks that may differ; None: any."""


@dataclass
class Targets:
    """What is to be compared with.

    Args:
        newest: version of each variable that moves.
        still: (region, version) that were read by frozen references and by none that moves.
        other_layout: (region, version) whose layout is another one than the newest's.
        changed: see `Changed`; asked once for each pair of versions.
    """

    newest: Mapping[int, int]
    still: frozenset[tuple[int, int]]
    changed: Changed
    other_layout: Callable[[int, int], bool] = lambda region, version: False
    _known: dict[tuple[int, int, int], BitMap | None] = field(default_factory=dict)

    def _between(self, region: int, low: int, high: int) -> BitMap | None:
        key = (region, low, high)
        if key not in self._known:
            self._known[key] = self.changed(region, low, high)
        return self._known[key]

    def touches(self, read: Read, as_of: int) -> bool:
        """Whether what was read may be something else now.

        Args:
            read: by the task.
            as_of: a version up to which that was looked at already, and was the same.
        """
        if read.region not in self.newest or (read.region, read.version) in self.still:
            return False
        version = max(read.version, as_of)
        newest = self.newest[read.region]
        if version >= newest:
            return False
        if read.blocks is None or self.other_layout(read.region, version):
            return True
        changed = self._between(read.region, version, newest)
        return changed is None or changed.intersect(BitMap.deserialize(read.blocks))


def is_touched(reads: Iterable[Read], as_of: Mapping[int, int], targets: Targets) -> bool:
    """Whether a task that read this would read something else now.

    Example:
        >>> read = Read(1, 0, BitMap([5]).serialize())
        >>> is_touched([read], {}, Targets({1: 2}, frozenset(), lambda *_: BitMap([4, 6])))
        False
        >>> is_touched([read], {}, Targets({1: 2}, frozenset(), lambda *_: BitMap([4, 5])))
        True
    """
    return any(targets.touches(read, as_of.get(read.region, 0)) for read in reads)

"""Slices that have not come to their workers, as the controller knows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from clamor_ray._recipes.placement.messages import Slice


@dataclass(frozen=True, slots=True)
class Migration:
    """A slice that has not come.

    Args:
        whence: The worker that had it; None: nobody knows.
        version: Of the map that moves it.
    """

    whence: str | None
    version: int


class Migrations:
    """See the file's head."""

    def __init__(self) -> None:
        self._of: dict[Slice, Migration] = {}
        self._n_from: Counter[str | None] = Counter()

    @property
    def slices(self) -> Set[Slice]:
        """All of them."""
        return self._of.keys()

    def is_origin(self, worker: str) -> bool:
        """Whether a worker had one of them."""
        return self._n_from[worker] > 0

    def begin(self, slice: Slice, whence: str | None, version: int) -> None:
        """A step of the map moves it."""
        assert slice not in self._of
        self._of[slice] = Migration(whence, version)
        self._n_from[whence] += 1

    def end(self, slice: Slice, version: int) -> Migration | None:
        """A worker says that it came there, at a version of the map. The migration that that
        ends; None: what is said of an earlier time that it was there may come late."""
        migration = self._of.get(slice)
        if migration is None or version < migration.version:
            return None
        del self._of[slice]
        self._n_from[migration.whence] -= 1
        return migration

    def forget_all(self) -> None:
        """A run begins: all slices are where they are loaded."""
        self._of.clear()
        self._n_from.clear()

"""Slices that have not come to their workers, as the controller knows them. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from clamor_ray._recipes.placement.messages import Slice


@dataclass(frozen=True, slots=True)
class _Migration:
    """One.

    Args:
        whence: The worker that had it; None: nobody knows.
        version: Of the map that moves it.
    """

    whence: str | None
    version: int


class Migrations:
    """See the file's head."""

    def __init__(self) -> None:
        self._of: dict[Slice, _Migration] = {}

    @property
    def slices(self) -> Set[Slice]:
        """All of them."""
        return self._of.keys()

    @property
    def origins(self) -> set[str | None]:
        """Workers that had them."""
        return {each.whence for each in self._of.values()}

    def begin(self, slice: Slice, whence: str | None, version: int) -> None:
        """A step of the map moves it."""
        self._of[slice] = _Migration(whence, version)

    def end(self, slice: Slice, version: int) -> bool:
        """A worker says that it came there, at a version of the map. Whether that ends a migration:
        what is said of an earlier time that it was there may come late."""
        migration = self._of.get(slice)
        if migration is None or version < migration.version:
            return False
        del self._of[slice]
        return True

    def forget_all(self) -> None:
        """A run begins: all slices are where they are loaded."""
        self._of = {}

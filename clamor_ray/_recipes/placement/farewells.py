"""Workers that have left and are there still: who may send to them, and when they may end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass
class _Group:
    """Workers that have left by one step of the map.

    Args:
        left: Those that may have something still.
        senders: Who may still send to them, themselves among them.
    """

    left: set[str]
    senders: set[str]


class Farewells:
    """Workers without slices end in three steps: all know that they have left, and what they sent
    there has come (`on_parted`); they are told to stop; what they have sent has come
    (`on_drained`)."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by the version by which they have left
        self._of: dict[str, int] = {}
        self._gone: list[str] = []

    @property
    def workers(self) -> Set[str]:
        """Those that have left and may have something still."""
        return self._of.keys()

    def begin(self, workers: Iterable[str], version: int, members: Iterable[str]) -> None:
        """They have left, by that version of the map; those may send to them."""
        group = self._groups[version] = _Group(set(workers), set(members))
        self._of.update(dict.fromkeys(group.left, version))
        if len(group.left) == 1:
            group.senders -= group.left  # nobody sends to itself

    def on_parted(self, worker: str, version: int) -> list[str]:
        """One sends nothing more to those that have left by then. Who is to stop now."""
        stop: list[str] = []
        for left_by, group in self._groups.items():
            if left_by <= version and worker in group.senders:
                group.senders.discard(worker)
                if not group.senders:
                    stop += sorted(group.left)
        return stop

    def on_drained(self, worker: str) -> list[str]:
        """It has nothing more. Who else is to stop now."""
        version = self._of.pop(worker, None)
        if version is None:
            return []
        self._gone.append(worker)
        group = self._groups[version]
        group.left.discard(worker)
        if not group.left:
            del self._groups[version]
        return [] if not self._groups else self.on_parted(worker, max(self._groups))

    def end(self) -> None:
        """The run is over, for all of them."""
        self._gone += sorted(self._of)
        self._of, self._groups = {}, {}

    def take_gone(self) -> list[str]:
        """Those that may end."""
        gone, self._gone = self._gone, []
        return gone

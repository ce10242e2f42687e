"""The last heartbeat of each worker: who is lost, and what all of them say together. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from clamor_ray._recipes.placement.messages import Heartbeat, Slice


class Heartbeats:
    """See the file's head.

    Args:
        lost_after_s: A worker that has not been heard of for so long is lost.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self.last: dict[str, Heartbeat] = {}
        self._seen_s: dict[str, float] = {}
        # Since `begin_interval`: how many have come, and the sum of their seconds.
        self._n: Counter[str] = Counter()
        self._sums: dict[str, Counter[Slice]] = {}

    def take(self, heartbeat: Heartbeat, now_s: float) -> None:
        """One has come. Its seconds become the mean since `begin_interval`: a round may be longer
        than the time between two heartbeats, and then one alone says nothing of the load."""
        worker = heartbeat.worker
        self._n[worker] += 1
        sums = self._sums.setdefault(worker, Counter())
        sums.update(heartbeat.seconds)
        if (n := self._n[worker]) > 1:
            mean = {slice: seconds / n for slice, seconds in sums.items()}
            heartbeat = replace(heartbeat, seconds=mean)
        self.last[worker] = heartbeat
        self._seen_s[worker] = now_s

    def begin_interval(self) -> None:
        """What comes from now on counts anew."""
        self._n.clear()
        self._sums.clear()

    def lost(self, workers: Iterable[str], now_s: float) -> list[str]:
        """Those that are late. The time of one that is new begins now."""
        return sorted(
            worker
            for worker in workers
            if now_s - self._seen_s.setdefault(worker, now_s) >= self._lost_after_s
        )

    def forget_all(self) -> None:
        """A run begins."""
        self.last, self._seen_s = {}, {}
        self.begin_interval()


class Agreement:
    """The heartbeats of workers that have all slices of one version of the map. Where all have, no
    slice is on its way: one that is, is in no heartbeat.

    Example:
        >>> said = Agreement()
        >>> for worker, floor in (("a", 5), ("b", 3)):
        ...     said.take(Heartbeat(1, worker, 7, True, False, floor), 7)
        >>> said.floor(7, 2), said.floor(8, 2), said.floor(7, 3)
        (3, 0, 0)
    """

    def __init__(self) -> None:
        self._version = 0
        self._said: dict[str, Heartbeat] = {}
        self._n_complete = 0
        self._n_with: Counter[int] = Counter()  # heartbeats, by floor
        self._floors: list[int] = []  # a heap: each of those, and some that nobody says any more

    def take(self, heartbeat: Heartbeat, version: int) -> None:
        """One has come.

        Args:
            heartbeat: Of a worker that takes part.
            version: Of the newest map. What was said of another one counts no more.
        """
        if version != self._version:
            self.forget_all()
            self._version = version
        before = self._said.pop(heartbeat.worker, None)
        if before is not None:
            self._n_complete -= before.is_complete
            self._n_with[before.floor] -= 1
        if not heartbeat.is_settled or heartbeat.version != version:
            return
        self._said[heartbeat.worker] = heartbeat
        self._n_complete += heartbeat.is_complete
        self._n_with[heartbeat.floor] += 1
        if self._n_with[heartbeat.floor] == 1:
            heapq.heappush(self._floors, heartbeat.floor)

    def floor(self, version: int, n_workers: int) -> int:
        """No slice anywhere needs a stage with a lower number; 0: nobody knows.

        Args:
            version: Of the newest map.
            n_workers: That take part.
        """
        if not n_workers or version != self._version or len(self._said) != n_workers:
            return 0
        while not self._n_with[self._floors[0]]:
            del self._n_with[heapq.heappop(self._floors)]
        return self._floors[0]

    def is_settled(self, version: int, n_workers: int) -> bool:
        """Whether all slices are in their places. See `floor`."""
        return version == self._version and 0 < n_workers == len(self._said)

    def settled(self, version: int, n_workers: int) -> list[Heartbeat]:
        """All heartbeats, where all slices are in their places; else none. See `floor`."""
        return list(self._said.values()) if self.is_settled(version, n_workers) else []

    def is_complete(self, version: int, n_workers: int) -> bool:
        """Whether the program has ended everywhere. See `floor`."""
        return version == self._version and 0 < n_workers == len(self._said) == self._n_complete

    def forget_all(self) -> None:
        """A run begins."""
        self._version = 0
        self._said.clear()
        self._n_complete = 0
        self._n_with.clear()
        self._floors.clear()

"""The last heartbeat of each worker, and who is lost. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from clamor_ray._recipes.placement.messages import Heartbeat


class Heartbeats:
    """See the file's head.

    Args:
        lost_after_s: A worker that has not been heard of for so long is lost.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self.last: dict[str, Heartbeat] = {}
        self._seen_s: dict[str, float] = {}

    def take(self, heartbeat: Heartbeat, now_s: float) -> None:
        """One has come."""
        self.last[heartbeat.worker] = heartbeat
        self._seen_s[heartbeat.worker] = now_s

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

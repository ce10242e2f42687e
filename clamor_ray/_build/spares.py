"""Regions that the registry has given out before they were asked for, for the next ``put``.

A put of a region that is here costs one call of the registry instead of two. One region is kept,
for a moment, and only in a row of puts of one size: each one that is not used keeps addresses until
the registry takes its maker for dead (10 minutes).
"""

from __future__ import annotations

import threading
import time
from typing import Any

KEEP_S = 5.0  # a home may be lost meanwhile, and it would be put there


class Spares:
    """At most one region, and what size the last put had. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_bytes = 0
        self._last_s = 0.0
        self._spare: tuple[int, float, Any] | None = None  # bytes, until when, record

    def wanted(self, n_bytes: int) -> bool:
        """Notes a put. Whether it is one of a row, and none of its size is here for the next."""
        now_s = time.monotonic()
        with self._lock:
            in_a_row = n_bytes == self._last_bytes and now_s - self._last_s < KEEP_S
            self._last_bytes, self._last_s = n_bytes, now_s
            spare = self._spare
            return in_a_row and (spare is None or spare[0] != n_bytes or spare[1] <= now_s)

    def keep(self, n_bytes: int, record: Any) -> None:
        """A region of that size, which no other thread knows."""
        with self._lock:
            self._spare = (n_bytes, time.monotonic() + KEEP_S, record)

    def take(self, n_bytes: int) -> Any | None:
        """The region, for the first call; None where there is none of that size."""
        with self._lock:
            if self._spare is None:
                return None
            spare_bytes, until_s, record = self._spare
            if spare_bytes != n_bytes:
                return None
            self._spare = None
            return record if time.monotonic() < until_s else None

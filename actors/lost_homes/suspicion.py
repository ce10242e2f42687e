"""How suspicious the silence of a peer is: the φ accrual failure detector. Pure: no Ray, no clock.

Hayashibara, Défago, Yared and Katayama, "The φ accrual failure detector" (SRDS 2004): the times
between arrivals of a peer's answers are remembered, and taken for normally distributed. φ is
-log10 of the probability that an answer comes later than now. At φ = 1 one suspicion in ten is
wrong, at 5 one in 100,000, at 8 one in 100,000,000, as long as answers come as they did.

φ alone never says that a peer is dead: who is stopped or cut off is as silent. It says when it is
time to look (``heartbeats.py``).

Tests: ``tests/actors/test_suspicion.py`` compares it with the distribution of the standard library.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

AVOIDED_PHI: Final = 5.0  # from there on a peer is asked for nothing that another one has
EXAMINED_PHI: Final = 8.0  # and from there on somebody looks whether it is there
REMEMBERED: Final = 100  # intervals
# The tail of few and regular arrivals is not known: less than this is taken for nobody's habit.
LEAST_STD_S: Final = 0.1


def phi_of(silent_s: float, mean_s: float, std_s: float) -> float:
    """-log10 of the probability that an arrival comes later than this.

    Args:
        silent_s: Since the last one.
        mean_s: Of the intervals.
        std_s: Of the intervals; above 0.

    Returns:
        At least 0; infinite where the probability is below what a float can say.

    Example:
        >>> round(phi_of(0.5, 0.5, 0.1), 3), round(phi_of(1.1, 0.5, 0.1), 1)
        (0.301, 9.0)
    """
    later = 0.5 * math.erfc((silent_s - mean_s) / (std_s * math.sqrt(2.0)))
    return abs(math.log10(later)) if later > 0.0 else math.inf


def _z_of(phi: float) -> float:
    """How many deviations above the mean φ is this."""
    low, high = 0.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if phi_of(middle, 0.0, 1.0) < phi else (low, middle)
    return high


Z_OF_EXAMINED: Final = _z_of(EXAMINED_PHI)  # 5.61


class Suspicion:
    """The arrivals of one peer.

    Args:
        interval_s: Expected between two, while few have been seen.
        now_s: The first one, by a clock that never goes back.

    Example:
        >>> peer = Suspicion(0.5, now_s=0.0)
        >>> for i in range(1, 100):
        ...     peer.heard(0.5 * i)
        >>> peer.phi(49.6) < 1 and 5 < peer.phi(50.5) < 8 < peer.phi(50.7)
        True
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._last_s = now_s
        # As in Akka's: two that have the expected mean, and a quarter of it as deviation.
        quarter_s = interval_s / 4
        self._intervals_s = deque([interval_s - quarter_s, interval_s + quarter_s], REMEMBERED)
        self._set_moments()

    def _set_moments(self) -> None:
        n = len(self._intervals_s)
        self._mean_s = math.fsum(self._intervals_s) / n
        squares = math.fsum((each - self._mean_s) ** 2 for each in self._intervals_s)
        self._std_s = max(LEAST_STD_S, math.sqrt(squares / n))

    def heard(self, now_s: float) -> None:
        """An answer has come.

        What was later than ``EXAMINED_PHI`` counts as just that late. One outage does not blunt the
        detector for the next hundred arrivals, and a peer that has become slow is got used to.
        """
        interval_s = max(0.0, now_s - self._last_s)
        self._last_s = max(now_s, self._last_s)
        self._intervals_s.append(min(interval_s, self._mean_s + Z_OF_EXAMINED * self._std_s))
        self._set_moments()

    def pardon(self, seconds: float, now_s: float) -> None:
        """Who listens was not there for so long, until now: that says nothing of the peer."""
        self._last_s = max(self._last_s, min(now_s, self._last_s + seconds))

    def silent_s(self, now_s: float) -> float:
        """How long nothing has come."""
        return max(0.0, now_s - self._last_s)

    def phi(self, now_s: float) -> float:
        """See the file's head."""
        return phi_of(self.silent_s(now_s), self._mean_s, self._std_s)

"""What the rounds of a program were, for its report: one task of each round says it."""

from __future__ import annotations

import dataclasses
import time

__all__ = ["Round", "begin_round", "end_round"]


@dataclasses.dataclass
class Round:
    """One round.

    Args:
        begun_s, summed_s, ended_s: of the clock of who says it: when the round began, when the sums
            of all tasks were there, and when what is made of them was.
        moved: how far the answer did.
        loss: where the round began.
        right: share of the rows on the right side there.
    """

    begun_s: float
    summed_s: float = 0.0
    ended_s: float = 0.0
    moved: float = 0.0
    loss: float = 0.0
    right: float = 0.0

    @property
    def tasks_s(self) -> float:
        """From the begin to the sums."""
        return self.summed_s - self.begun_s

    @property
    def update_s(self) -> float:
        """From the sums to the end."""
        return self.ended_s - self.summed_s


def begin_round(rounds: list[Round]) -> None:
    """One more begins now. Changes `rounds`."""
    rounds.append(Round(time.time()))


def end_round(
    rounds: list[Round], summed_s: float, moved: float, loss: float = 0.0, right: float = 0.0
) -> list[Round]:
    """The last one ends now. Changes `rounds`, and returns it."""
    last = rounds[-1]
    last.summed_s, last.ended_s = summed_s, time.time()
    last.moved, last.loss, last.right = moved, loss, right
    return rounds

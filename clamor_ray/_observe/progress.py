"""How far something is: a bar on a terminal, in a log a line now and then.

A bar redraws one line. In a file that is one line without end, so there it is told in lines of
their own: one every few seconds, and none of what takes no longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

LINE_S: Final = 5.0


class ProgressLines:
    """Says how far something is, at most every `LINE_S` seconds.

    Args:
        say: gets a line.
        text: what is done.
        total: of what is counted; None where nobody knows.
        clock: seconds that only grow.

    Example:
        >>> seconds = iter([0.0, 2.0, 6.0, 7.0])
        >>> lines = ProgressLines(print, "map(f)", 1000, clock=lambda: next(seconds))
        >>> lines.at(100)
        >>> lines.at(300)
        map(f): 300 of 1,000 (6 s)
        >>> lines.at(400)
    """

    def __init__(
        self,
        say: Callable[[str], object],
        text: str,
        total: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._text = text
        self._of = "" if total is None else f" of {total:,}"
        self._clock = clock
        self._begun_s = clock()
        self._next_s = self._begun_s + LINE_S

    def at(self, done: int, more: str = "") -> None:
        """So much is done. Called again with the same: that it goes on, though nothing is done.

        Args:
            more: What else is to be said.
        """
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_S
            said = f"{self._text}: {done:,}{self._of} ({now_s - self._begun_s:.0f} s)"
            self._say(f"{said}, {more}" if more else said)


class Progress:
    """Counts a stage's tasks.

    Args:
        name: of the stage.
        total: of its tasks.
        wanted: whether anything is shown.
    """

    def __init__(self, name: str, total: int, wanted: bool) -> None:
        self._bar: Any = None
        self._lines: ProgressLines | None = None
        self._n_done = 0
        if wanted and sys.stderr.isatty():
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(total=total, desc=name, unit="tasks")
        elif wanted:
            self._lines = ProgressLines(to_stderr, name, total)

    def done(self) -> None:
        """One more task is done."""
        self._n_done += 1
        if self._bar is not None:
            self._bar.update(1)

    def look(self) -> None:
        """Called now and then while the stage runs."""
        if self._lines is not None:
            self._lines.at(self._n_done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def to_stderr(line: str) -> None:
    """A line of its own, at once."""
    print(line, file=sys.stderr, flush=True)

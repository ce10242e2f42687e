"""Log lines of one kind: a few at once, then a count.

Everything that a page server or the registry logs comes to the driver's console. What is wrong in
one place often is so for each variable, block or connection: nobody reads ten thousand lines of
that, and they hide the others.

A kind is the text without its numbers. Of each the first ``MOST`` lines of ``WINDOW_S`` pass. How
many did not is said when that time is over: by the next line of the kind, or, where none has come
so soon, by a thread that sleeps until then.

Thread safety: any thread may log.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST = 3
WINDOW_S = 30.0
LEAST_PAUSE_S = 0.01
KINDS = 1000  # that are remembered; of more the oldest are forgotten

_IS_COUNT = "clamor_is_count"  # of a record that says what was left out
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{16,}\b|\d+")


def _by_a_thread(pause_s: float, then: Callable[[], None]) -> None:
    timer = threading.Timer(pause_s, then)
    timer.daemon = True
    timer.start()


@dataclass
class _Kind:
    """What there was of a kind in its window."""

    began_s: float
    n: int = 0
    last: logging.LogRecord | None = None  # of those that were left out

    def n_left_out(self, most: int) -> int:
        return max(0, self.n - most)


class Throttle(logging.Filter):
    """See the file's head.

    Args:
        most: Lines of a kind in a window.
        window_s: How long that is.
        now_s: The clock.
        wake: Calls a function after so many seconds.
    """

    def __init__(
        self,
        most: int = MOST,
        window_s: float = WINDOW_S,
        now_s: Callable[[], float] = time.monotonic,
        wake: Callable[[float, Callable[[], None]], None] = _by_a_thread,
    ) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[int, str], _Kind] = OrderedDict()
        self._wake = wake
        self._is_to_wake = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; adds to it how many were not."""
        if getattr(record, _IS_COUNT, False):
            return True
        text = record.getMessage()
        name = (record.levelno, _NUMBER.sub("#", text))
        now_s = self._now_s()
        with self._lock:
            kind = self._seen.get(name)
            before = None
            if kind is None or now_s - kind.began_s >= self._window_s:
                before, kind = kind, _Kind(now_s)
                self._seen[name] = kind
                self._seen.move_to_end(name)
                while len(self._seen) > KINDS:
                    self._seen.popitem(last=False)
            kind.n += 1
            if kind.n > self._most:
                kind.last = record
                self._wake_in(kind.began_s + self._window_s - now_s)
                return False
            last = kind.n == self._most
        if before is not None and before.n_left_out(self._most):
            text += self._count(before, now_s)
        elif last:
            text += f" (more lines like this are counted for {self._window_s:g} s, and left out)"
        record.msg, record.args = text, None
        return True

    def write_counts(self) -> None:
        """Writes how many lines were left out of each kind whose window is over."""
        now_s = self._now_s()
        counts: list[tuple[logging.LogRecord, str]] = []
        with self._lock:
            self._is_to_wake = False
            waiting = [kind for kind in self._seen.values() if kind.last is not None]
            for kind in waiting:
                if now_s - kind.began_s >= self._window_s and kind.last is not None:
                    counts.append((kind.last, self._count(kind, now_s)))
                    kind.n, kind.last = 0, None
            left = [kind.began_s for kind in waiting if kind.last is not None]
            if left:
                self._wake_in(min(left) + self._window_s - now_s)
        for of, count in counts:
            text = of.getMessage() + count
            line = logging.LogRecord(of.name, of.levelno, of.pathname, of.lineno, text, None, None)
            setattr(line, _IS_COUNT, True)
            logging.getLogger(of.name).handle(line)

    def _count(self, kind: _Kind, now_s: float) -> str:
        n, for_s = kind.n_left_out(self._most), now_s - kind.began_s
        return f" ({n} more lines like this in {for_s:.0f} s were left out)"

    def _wake_in(self, pause_s: float) -> None:
        """Under the lock: `write_counts` is called then, or before."""
        if not self._is_to_wake:
            self._is_to_wake = True
            self._wake(max(LEAST_PAUSE_S, pause_s), self.write_counts)


def throttle(*names: str) -> None:
    """Throttles these loggers of this process, once."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(found, Throttle) for found in logger.filters):
            logger.addFilter(Throttle())

"""Log lines of one kind: a few at once, then a count.

Everything that a page server or the registry logs comes to the driver's console. What is wrong in
one place often is so for each variable, block or connection: nobody reads ten thousand lines of
that, and they hide the others.

A kind is the text without its numbers. Of each the first ``MOST`` lines of ``WINDOW_S`` pass; the
first one after that window says how many did not.

Thread safety: any thread may log.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MOST = 3
WINDOW_S = 30.0
KINDS = 1000  # that are remembered; of more the oldest are forgotten

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{16,}\b|\d+")


class Throttle(logging.Filter):
    """See the file's head.

    Args:
        most: Lines of a kind in a window.
        window_s: How long that is.
        now_s: The clock.
    """

    def __init__(
        self,
        most: int = MOST,
        window_s: float = WINDOW_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[int, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; adds to it how many were not."""
        text = record.getMessage()
        kind = (record.levelno, _NUMBER.sub("#", text))
        now_s = self._now_s()
        with self._lock:
            began_s, n = self._seen.get(kind, (now_s, 0))
            ended = now_s - began_s >= self._window_s
            n_left_out = max(0, n - self._most) if ended else 0
            self._seen[kind] = (now_s, 1) if ended else (began_s, n + 1)
            if ended:
                self._seen.move_to_end(kind)
            while len(self._seen) > KINDS:
                self._seen.popitem(last=False)
            passes = ended or n < self._most
            last = not ended and n + 1 == self._most
        if n_left_out:
            text += f" ({n_left_out} more lines like this in {now_s - began_s:.0f} s were left out)"
        elif last:
            text += f" (more lines like this are counted for {self._window_s:g} s, and left out)"
        if n_left_out or last:
            record.msg, record.args = text, None
        return passes


def throttle(*names: str) -> None:
    """Throttles these loggers of this process, once."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(found, Throttle) for found in logger.filters):
            logger.addFilter(Throttle())

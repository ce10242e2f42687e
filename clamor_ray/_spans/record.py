"""In: what a process does, as it does it. Out: what of it took long.

Nothing here waits, or is sent. What takes less than `LEAST_NS` is not kept: it is no reason for a
slow job, and there may be thousands of it a second. A span costs two looks at the clock.

Safe from any thread.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

LEAST_NS: Final = 1_000_000
MOST: Final = 4096  # of a process, that nobody has asked for yet: then the oldest goes
KEPT_NS: Final = 3600 * 10**9


class Span(NamedTuple):
    """One thing that took long.

    Args:
        name: what it was; few different ones.
        start_ns: since the epoch of Unix.
        duration_ns: how long.
        thread: its name; "" is the main one.
        details: numbers and short texts. `region` is a variable's id, by which people are told its
            name.
    """

    name: str
    start_ns: int
    duration_ns: int
    thread: str
    details: dict[str, Any]


class Record:
    """The spans of this process, by session.

    Args:
        most: that are kept of each.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[str, collections.deque[Span]] = {}
        self._wake: Callable[[], bool] | None = None
        self._is_woken = False

    def begin(self, scope: str) -> None:
        """Spans of a session are kept from now on. Idempotent.

        Args:
            scope: of the session; "" where a process has only one.
        """
        self._kept.setdefault(scope, collections.deque(maxlen=self._most))

    def end(self, scope: str) -> None:
        """They are no longer, and those that are left go."""
        self._kept.pop(scope, None)

    def keeps(self, scope: str) -> bool:
        """Whether spans of it are kept."""
        return scope in self._kept

    def hand_over(self, wake: Callable[[], bool] | None) -> None:
        """Who is called when there is something to be taken: once, until it is taken. Says whether
        it was woken: else the next span does it."""
        self._wake = wake
        self._is_woken = False

    def note(self, scope: str, name: str, start_ns: int, **details: Any) -> None:
        """Something is over, which began then. Raises nothing: it is not what the caller is about.

        Args:
            scope: as `begin`'s.
            name, start_ns, details: as `Span`'s.
        """
        duration_ns = time.time_ns() - start_ns
        if duration_ns >= LEAST_NS:
            self.add(
                scope,
                Span(
                    name=name,
                    start_ns=start_ns,
                    duration_ns=duration_ns,
                    thread=_thread(),
                    details=details,
                ),
            )

    def add(self, scope: str, span: Span) -> None:
        """However long it took."""
        kept = self._kept.get(scope)
        if kept is None:
            return
        kept.append(span)
        if self._wake is not None and not self._is_woken:
            self._is_woken = True  # first: it may be taken at once
            if not self._wake():
                self._is_woken = False

    def take(self, scope: str) -> list[Span]:
        """All of a session: they are kept no longer."""
        self._is_woken = False  # what comes from here on wakes again
        kept = self._kept.get(scope)
        taken: list[Span] = []
        while kept:
            taken.append(kept.popleft())
        return taken

    def has_some(self, scope: str) -> bool:
        """Whether there is something to be taken."""
        return bool(self._kept.get(scope))

    def spans(self, now_ns: int | None = None) -> list[Span]:
        """All of the last hour. They stay.

        Args:
            now_ns: as `Span.start_ns`; None: now.
        """
        since_ns = (time.time_ns() if now_ns is None else now_ns) - KEPT_NS
        while True:
            try:
                everything = [span for kept in self._kept.values() for span in kept]
            except RuntimeError:  # another thread has added one meanwhile
                continue
            return [each for each in everything if each.start_ns + each.duration_ns >= since_ns]

    def after_fork(self) -> None:
        """In the child: the parent's spans are the parent's, and so is who takes them."""
        self._kept.clear()
        self.hand_over(None)


here: Final = Record()
os.register_at_fork(after_in_child=here.after_fork)


class span:
    """A block that may take long, or fail: `with span(scope, "gather", region=7): ...`

    Args:
        scope, name, details: as `Record.note`'s. `details` may be added to within the block.
    """

    __slots__ = ("_name", "_scope", "_start_ns", "details")

    def __init__(self, scope: str, name: str, **details: Any) -> None:
        self._scope = scope
        self._name = name
        self.details = details

    def __enter__(self) -> span:
        self._start_ns = time.time_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        here.note(self._scope, self._name, self._start_ns, **self.details, **error_of(kind))


def error_of(kind: type[BaseException] | None) -> dict[str, str]:
    """What the details of something say that has failed.

    Args:
        kind: of what was raised; None: it has not.
    """
    return {} if kind is None else {"error": kind.__name__}


def thinned(spans: Sequence[Span], most: int, now_ns: int) -> list[Span]:
    """Those that tell most, no more than so many. Pure.

    What is older than an hour goes. Of the rest, of the older half the shorter ones: what took
    long is seen for longer, and what is new is seen whole.

    Args:
        spans: in whatever order.
        most: how many are left.
        now_ns: as `Span.start_ns`.

    Returns:
        By their starts.
    """
    found = sorted(
        (each for each in spans if each.start_ns + each.duration_ns >= now_ns - KEPT_NS),
        key=lambda each: each.start_ns,
    )
    if len(found) <= most:
        return found
    n_new = most // 2
    old, new = found[: len(found) - n_new], found[len(found) - n_new :]
    longest = sorted(old, key=lambda each: -each.duration_ns)[: most - n_new]
    return [*sorted(longest, key=lambda each: each.start_ns), *new]


def _thread() -> str:
    current = threading.current_thread()
    return "" if current is threading.main_thread() else current.name

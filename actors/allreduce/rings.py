"""The rings that a process is a member of: several, because several processes of a session may
aggregate at once, each with rings of its own. Pure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MOST_RINGS: Final = 16

Ring = TypeVar("Ring")


@dataclass
class _Held(Generic[Ring]):
    ring: Ring
    n_calls: int = 0  # that run
    is_broken: bool = False


class Rings(Generic[Ring]):
    """Rings by name. They stay joined from call to call, the last used ones; none is closed here
    while a call of it runs. Thread-safe.

    Args:
        close: one that is needed no more; called without a lock.
        most: rings that stay.
    """

    def __init__(self, close: Callable[[Ring], None], most: int = MOST_RINGS) -> None:
        self._close = close
        self._most = most
        self._lock = threading.Lock()
        self._held: dict[str, _Held[Ring]] = {}  # the last used at the end

    def names(self) -> list[str]:
        """Of the rings that stay, the last used at the end."""
        with self._lock:
            return list(self._held)

    @contextlib.contextmanager
    def using(self, name: str, make: Callable[[], Ring]) -> Iterator[Ring]:
        """A ring, for one call; made where there is none. One whose call raises is broken: the
        next call makes another.

        Args:
            make: does not wait.
        """
        with self._lock:
            held = self._held.pop(name, None) or _Held(make())
            self._held[name] = held
            held.n_calls += 1
        try:
            yield held.ring
        except BaseException:
            held.is_broken = True
            raise
        finally:
            for ring in self._over(name, held):
                self._close(ring)

    def _over(self, name: str, held: _Held[Ring]) -> list[Ring]:
        """Those to close, now that a call has ended."""
        with self._lock:
            held.n_calls -= 1
            if held.is_broken and self._held.get(name) is held:
                del self._held[name]
            closing = [held.ring] if held.is_broken and not held.n_calls else []
            idle = [name for name, each in self._held.items() if not each.n_calls]
            for oldest in idle[: max(0, len(self._held) - self._most)]:
                closing.append(self._held.pop(oldest).ring)
            return closing

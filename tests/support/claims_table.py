"""The cluster's log of addresses as a list, for tests without Ray."""

from __future__ import annotations

from collections.abc import Callable


class ListTable:
    """See `clamor_ray.actors.window.address_claims.ClaimsTable`.

    A test sets `before_append` to what others do at that moment, `loses_answer` to whether an
    append that was made raises all the same.
    """

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.before_append: Callable[[], None] = lambda: None
        self.loses_answer: Callable[[], bool] = lambda: False

    def entries(self, start: int) -> list[bytes]:
        return self.log[start:]

    def append(self, number: int, entry: bytes) -> bool:
        self.before_append()
        is_free = number == len(self.log)
        assert number <= len(self.log), "an entry was left out"
        if is_free:
            self.log.append(entry)
        if self.loses_answer():
            raise ConnectionError("the answer is lost")
        return is_free

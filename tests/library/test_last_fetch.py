"""What a driver's objects lack when its session is to end: a page server whose cache is full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from clamor_ray import errors
from clamor_ray._native.client import Mapping
from clamor_ray._read.lease import Leased
from clamor_ray._session.session import Session

ROOM = 12  # blocks


class CacheThatIsFull:
    """What comes pushes out what came before.

    Args:
        fails: what fetching a mapping raises, by its id.
    """

    is_connected = True

    def __init__(self, fails: dict[int, errors.ClamorError]) -> None:
        self.fails = fails
        self.here: list[tuple[int, int]] = []  # (mapping, block), the oldest first
        self.lengths: dict[int, int] = {}

    def absent_blocks(self, mapping_id: int) -> int:
        return self.lengths[mapping_id] - len([1 for of, _ in self.here if of == mapping_id])

    def prefetch(self, mapping_id: int, runs: Any, *, wait: bool, timeout_s: float) -> None:
        if mapping_id in self.fails:
            raise self.fails[mapping_id]
        blocks = [(mapping_id, block) for block in range(self.lengths[mapping_id])]
        self.here = [each for each in self.here if each not in blocks] + blocks
        del self.here[:-ROOM]


def lacking(lengths: dict[int, int], **given: Any) -> list[int]:
    """Mappings that lack blocks which may still come. `unsealed` are of no version."""
    client = CacheThatIsFull(given.get("fails", {}))
    client.lengths = lengths
    session = Session.__new__(Session)
    session._client = client  # type: ignore[assignment]
    session.rpc = SimpleNamespace(why_lost=given.get("lost", {}).get)  # type: ignore[assignment]
    entries = []
    for number, n_blocks in lengths.items():
        ref: Any = None if number in given.get("unsealed", ()) else SimpleNamespace(_region=number)
        mapping = Mapping(number, number << 30, n_blocks * 4096)
        entries.append((number, Leased(mapping, ref, False)))
    session.leases = SimpleNamespace(entries=lambda: entries)  # type: ignore[assignment]
    return [each[0].id for each in session.fetch_leased(10.0) if session.may_come(*each)]


def test_what_has_room_comes() -> None:
    assert lacking({1: 4, 2: 8}) == []


def test_what_came_last_pushes_out_what_was_here() -> None:
    assert lacking({1: 4, 2: 10}) == [1]


def test_what_is_larger_than_the_cache_never_comes_whole() -> None:
    assert lacking({1: ROOM + 1}) == [1]


def test_what_cannot_come_is_not_waited_for() -> None:
    gone = errors.SnapshotExpired("It is kept no longer.")
    assert lacking({1: 4, 2: 5}, fails={1: gone, 2: errors.HomeLostError("It is lost.")}) == []
    assert lacking({1: ROOM + 1}, lost={1: errors.HomeLostError("It is lost.")}) == []
    assert lacking({1: ROOM + 1}, unsealed=(1,)) == []


def test_what_does_not_come_in_time_may_come() -> None:
    late = errors.PrefetchTimeoutError("It takes longer.")
    assert lacking({1: 4}, fails={1: late}) == [1]

"""Where members of a group find each other: which are there, and when all are. Pure: no I/O, no
clock.

A room is one group's. Members come in, each with its rank and where it listens, and come again and
again until they are told of all: that is how the room knows that they are still there. Whoever has
not come for `EXPIRY_S` is there no longer. When all are there, and each has come once more since
(so that none of them died meanwhile), each is told of all, with a secret that is theirs alone, and
the room is empty again: whoever comes next waits for the next joining.

Nothing of that is on disk, and coming twice is as good as once: a room that is lost with its
process is full again as soon as its members have come once more.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

SECRET_BYTES = 32
MOST_ROOMS = 1024
EXPIRY_S: Final = 5.0  # members come every 0.2 s
TOLD_S: Final = 60.0  # so long who was told can ask again


@dataclass(frozen=True)
class Guest:
    """A member that waits.

    Args:
        rank: its number.
        host, port: where it listens.
        visit: names this waiting of its; random.
        calls: of the group that it had completed when its connections were lost.
    """

    rank: int
    host: str
    port: int
    visit: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Meeting:
    """All members of a group.

    Args:
        number: counts the joinings of all groups.
        secret: 32 bytes.
        guests: by rank.
    """

    number: int
    secret: bytes = field(repr=False)  # a log may show the rest
    guests: tuple[Guest, ...]


@dataclass(frozen=True)
class Waiting:
    """Not all are there: come again.

    Args:
        missing: their ranks; none where all are there, and some have to come once more.
    """

    missing: tuple[int, ...]


@dataclass
class _Room:
    size: int
    guests: dict[int, Guest] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)  # visits whose place another one has
    confirmed: set[int] = field(default_factory=set)  # ranks that came since all were there

    def remove(self, rank: int) -> None:
        del self.guests[rank], self.seen_s[rank]
        self.confirmed.clear()

    def expire(self, now_s: float) -> None:
        for rank in [rank for rank, seen_s in self.seen_s.items() if seen_s < now_s - EXPIRY_S]:
            self.remove(rank)


class WrongSize(Exception):
    """A member takes its group for larger or smaller than others do."""


class TooManyRooms(Exception):
    """More groups wait for members than there may be."""


class PlaceTaken(Exception):
    """Another process came as the same member."""


class Rendezvous:
    """All rooms of a session."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}
        self._told: dict[tuple[str, int], tuple[float, Meeting]] = {}  # (group, visit) -> until
        self._number = 0

    def come(self, group: str, size: int, guest: Guest, now_s: float) -> Meeting | Waiting:
        """A member comes in, or comes again.

        Args:
            group: its name.
            size: members that it has.
            now_s: of any clock that only goes forward.

        Raises:
            WrongSize: A member that waits says another size, or there is no such rank.
            TooManyRooms: There are too many groups.
            PlaceTaken: Another process came later as this member.
        """
        self._tidy(now_s)
        if (told := self._told.get((group, guest.visit))) is not None:
            return told[1]
        if not 0 <= guest.rank < size:
            raise WrongSize(f"member {guest.rank} is none of {size}")
        room = self._room(group, size, guest)
        before = room.guests.get(guest.rank)
        if guest.visit in room.replaced:
            raise PlaceTaken(f"another process came as member {guest.rank}")
        if before is None or before.visit != guest.visit:
            if before is not None:
                room.replaced.add(before.visit)
            room.guests[guest.rank] = guest
            room.confirmed.clear()
        room.seen_s[guest.rank] = now_s
        if len(room.guests) < size:
            return Waiting(tuple(rank for rank in range(size) if rank not in room.guests))
        room.confirmed.add(guest.rank)
        if len(room.confirmed) < size:
            return Waiting(())
        return self._all_there(group, room, now_s)

    def leave(self, group: str, visit: int) -> None:
        """A member waits no longer."""
        room = self._rooms.get(group)
        if room is None:
            return
        for rank, guest in list(room.guests.items()):
            if guest.visit == visit:
                room.remove(rank)
        if not room.guests:
            del self._rooms[group]

    def _room(self, group: str, size: int, guest: Guest) -> _Room:
        room = self._rooms.get(group)
        if room is None:
            if len(self._rooms) >= MOST_ROOMS:
                raise TooManyRooms(f"{len(self._rooms)} groups wait for members")
            room = self._rooms[group] = _Room(size)
        if room.size != size:
            raise WrongSize(
                f"member {guest.rank} says that group {group!r} has {size} members, and others "
                f"that it has {room.size}"
            )
        return room

    def _all_there(self, group: str, room: _Room, now_s: float) -> Meeting:
        del self._rooms[group]
        self._number += 1
        guests = tuple(room.guests[rank] for rank in range(room.size))
        meeting = Meeting(self._number, secrets.token_bytes(SECRET_BYTES), guests)
        for guest in guests:
            self._told[group, guest.visit] = (now_s + TOLD_S, meeting)
        return meeting

    def _tidy(self, now_s: float) -> None:
        for key in [key for key, (until_s, _) in self._told.items() if until_s < now_s]:
            del self._told[key]
        for group, room in list(self._rooms.items()):
            room.expire(now_s)
            if not room.guests:
                del self._rooms[group]

"""Where members of a group find each other."""

from __future__ import annotations

import pytest

from clamor_ray._protocol.rendezvous import (
    EXPIRY_S,
    MOST_ROOMS,
    TOLD_S,
    Guest,
    Meeting,
    PlaceTaken,
    Rendezvous,
    TooManyRooms,
    Waiting,
    WrongSize,
)


def guest(rank: int, visit: int | None = None) -> Guest:
    return Guest(rank, "h", 1, 100 + rank if visit is None else visit)


def test_all_are_told_of_all_when_each_has_come_since_the_last_one_came() -> None:
    rendezvous = Rendezvous()
    assert rendezvous.come("g", 2, guest(1), 0.0) == Waiting((0,))
    assert rendezvous.come("g", 2, guest(0), 0.1) == Waiting(())
    first = rendezvous.come("g", 2, guest(1), 0.2)
    assert isinstance(first, Meeting)
    assert first.guests == (guest(0), guest(1))
    assert rendezvous.come("g", 2, guest(0), 0.3) == first
    assert rendezvous.come("g", 2, guest(1), 0.3) == first  # the answer was lost, and Ray asks anew
    second = rendezvous.come("g", 1, guest(0, 7), 0.4)  # the room was empty again
    assert isinstance(second, Meeting)
    assert second.number == first.number + 1
    assert second.secret != first.secret


def test_a_guest_that_does_not_come_again_is_forgotten() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 2, guest(0), 0.0)
    assert rendezvous.come("g", 2, guest(1), EXPIRY_S + 0.1) == Waiting((0,))
    # It comes again after all, as the same.
    assert rendezvous.come("g", 2, guest(0), EXPIRY_S + 0.2) == Waiting(())
    assert isinstance(rendezvous.come("g", 2, guest(1), EXPIRY_S + 0.3), Meeting)


def test_a_guest_that_dies_before_the_last_one_comes_keeps_all_waiting() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 3, guest(0), 0.0)
    rendezvous.come("g", 3, guest(1), 1.0)
    assert rendezvous.come("g", 3, guest(2), 1.0) == Waiting(())
    assert rendezvous.come("g", 3, guest(1), 2.0) == Waiting(())  # and 0 has died
    assert rendezvous.come("g", 3, guest(2), EXPIRY_S + 0.5) == Waiting((0,))
    rendezvous.come("g", 3, guest(1), EXPIRY_S + 0.6)
    # It was started again; those that had confirmed do so once more.
    assert rendezvous.come("g", 3, guest(0, 9), EXPIRY_S + 0.7) == Waiting(())
    assert rendezvous.come("g", 3, guest(1), EXPIRY_S + 0.8) == Waiting(())
    met = rendezvous.come("g", 3, guest(2), EXPIRY_S + 0.9)
    assert isinstance(met, Meeting)
    assert [found.visit for found in met.guests] == [9, 101, 102]


def test_a_guest_that_comes_again_takes_its_old_place() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 2, guest(0, 1), 0.0)
    rendezvous.come("g", 2, guest(0, 2), 0.0)
    with pytest.raises(PlaceTaken):
        rendezvous.come("g", 2, guest(0, 1), 0.1)
    rendezvous.leave("g", 1)  # the old one gives up, and the new one still waits
    rendezvous.come("g", 2, guest(1), 0.2)
    met = rendezvous.come("g", 2, guest(0, 2), 0.3)
    assert isinstance(met, Meeting)
    assert met.guests == (guest(0, 2), guest(1))


def test_a_guest_that_leaves_is_missing() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 4, guest(1), 0.0)
    assert rendezvous.come("g", 4, guest(2), 0.0) == Waiting((0, 3))
    rendezvous.leave("g", guest(1).visit)
    assert rendezvous.come("g", 4, guest(2), 0.0) == Waiting((0, 1, 3))
    rendezvous.leave("g", guest(2).visit)
    rendezvous.leave("g", guest(2).visit)
    assert rendezvous.come("g", 2, guest(0), 0.0) == Waiting((1,))  # of any size, when it is empty


def test_a_room_that_is_lost_is_full_again() -> None:
    before, after = Rendezvous(), Rendezvous()
    before.come("g", 2, guest(0), 0.0)
    before.come("g", 2, guest(1), 0.0)
    assert after.come("g", 2, guest(0), 0.0) == Waiting((1,))
    after.come("g", 2, guest(1), 0.0)
    assert isinstance(after.come("g", 2, guest(0), 0.0), Meeting)


def test_nothing_stays() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 1, guest(0), 0.0)
    rendezvous.come("h", 2, guest(0), 0.0)
    rendezvous.come("i", 1, guest(0), TOLD_S + 1.0)
    assert not rendezvous._rooms
    assert list(rendezvous._told) == [("i", guest(0).visit)]


def test_guests_that_do_not_fit_are_refused() -> None:
    rendezvous = Rendezvous()
    rendezvous.come("g", 2, guest(0), 0.0)
    with pytest.raises(WrongSize, match="has 3 members, and others that it has 2"):
        rendezvous.come("g", 3, guest(1), 0.0)
    with pytest.raises(WrongSize, match="7 is none of 2"):
        rendezvous.come("g", 2, guest(7), 0.0)
    for i in range(MOST_ROOMS - 1):
        rendezvous.come(str(i), 2, guest(0), 0.0)
    with pytest.raises(TooManyRooms):
        rendezvous.come("one more", 2, guest(0), 0.0)
    rendezvous.come("one more", 2, guest(0), EXPIRY_S + 0.1)
